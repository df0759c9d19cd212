//! Sealed pods whose job is gone and that nobody deletes: left by `--cascade=orphan`, or a copy in
//! a namespace that has no such job. They train for nobody and keep their nodes: they are ended.

use crate::lead::{Owner, WorkerPod, Write};
use crate::observed::Millis;
use crate::pods::TERMINATION_GRACE_S;
use std::collections::BTreeMap;

/// A job and its pods are seen by two watches: for so long a pod may be ahead of its job, or behind
/// its end.
const AFTER: Millis = 60_000;
/// How often it is looked, and what was asked for is asked for again.
const EVERY: Millis = 15_000;

#[derive(Debug, Default)]
pub struct Orphans {
    /// Since when each of them has no job, by the pod's uid.
    since: BTreeMap<String, Millis>,
    due: Millis,
}

impl Orphans {
    pub fn due(&self) -> Option<Millis> {
        (self.due > 0).then_some(self.due)
    }

    /// The deletions that are due now. `known` says whether there is a job.
    pub fn look<'p>(
        &mut self,
        pods: impl Iterator<Item = &'p WorkerPod>,
        known: impl Fn(&Owner) -> bool,
        now: Millis,
    ) -> Vec<(Owner, Write)> {
        if now < self.due {
            return Vec::new();
        }
        self.due = now + EVERY;
        // Pods of one job follow each other seldom: each job is looked for once.
        let mut jobs: BTreeMap<&str, bool> = BTreeMap::new();
        let mut still = BTreeMap::new();
        let mut writes = Vec::new();
        for pod in pods {
            if *jobs.entry(&pod.owner).or_insert_with(|| known(&pod.owner)) {
                continue;
            }
            let since = self.since.get(&pod.uid).copied().unwrap_or(now);
            still.insert(pod.uid.clone(), since);
            if now >= since + AFTER && pod.deletion.is_none() {
                let (namespace, name, uid) =
                    (pod.namespace.clone(), pod.name.clone(), pod.uid.clone());
                // A worker that trains saves its state first.
                let grace_s = u32::try_from(TERMINATION_GRACE_S).unwrap_or(u32::MAX);
                let write = Write::DeletePod { namespace, name, uid, grace_s };
                writes.push((pod.owner.clone(), write));
            }
        }
        self.since = still;
        writes
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::lead::owner;

    fn pod(name: &str, job: &str) -> WorkerPod {
        WorkerPod {
            namespace: "n".into(),
            name: name.into(),
            uid: format!("uid-{name}"),
            owner: owner("n", job),
            started: true,
            ..WorkerPod::default()
        }
    }

    #[test]
    fn a_pod_without_a_job_is_ended_after_a_minute() {
        let mut orphans = Orphans::default();
        let pods = [pod("a", "here"), pod("b", "gone"), pod("c", "gone")];
        let look = |orphans: &mut Orphans, here: bool, now| -> usize {
            let known = |of: &Owner| here || **of == *owner("n", "here");
            orphans.look(pods.iter(), known, now).len()
        };
        assert_eq!(look(&mut orphans, false, 1_000), 0);
        assert_eq!(look(&mut orphans, false, 60_999), 0);
        assert_eq!(look(&mut orphans, false, 76_000), 2);
        assert_eq!(look(&mut orphans, false, 76_001), 0, "not at once again");
        assert_eq!(look(&mut orphans, false, 91_000), 2, "the API server did not take it");
        // Its job was only late: the minute begins anew.
        assert_eq!(look(&mut orphans, true, 106_000), 0);
        assert_eq!(look(&mut orphans, false, 121_000), 0);
    }
}
