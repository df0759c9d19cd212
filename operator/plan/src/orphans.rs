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
