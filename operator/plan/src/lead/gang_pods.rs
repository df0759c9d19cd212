//! The pods of a gang as its record names them: by uid, with the image that all of them run.
//!
//! A gang keeps its image until none of its members lives: after an upgrade of the operator, or an
//! edit of `spec.image`, a lost member is replaced by one that computes and speaks as the others.

use super::{JobLoop, WorkerPod};
use crate::observed::{Gang, Worker};
use crate::record::GangPods;
use crate::track::Tracker;

impl JobLoop {
    /// For the record.
    pub(super) fn gang_pods(&self, tracker: &Tracker) -> GangPods {
        let Some(gang) = &tracker.observed.record.gang else { return GangPods::default() };
        let inherited = self.inherited.of(gang);
        let member = |(at, name): (usize, &str)| {
            let known = inherited.get(at);
            let uid = self.pods.facts(name).map(|pod| pod.uid.as_str());
            let uid = uid.or(known.map(|(uid, _)| uid.as_str())).unwrap_or_default();
            let protocol = self.pods.protocol(name).or(known.map(|(_, protocol)| *protocol));
            (uid.to_string(), protocol.unwrap_or_default())
        };
        let names = gang.members.iter().map(|member| member.worker.as_str());
        GangPods {
            attempt: gang.attempt,
            image: self.image.clone(),
            members: names.enumerate().map(member).collect(),
        }
    }

    /// What a new pod runs: what the gang runs, while a member of it lives, else `fresh`.
    pub(super) fn image_for(&mut self, fresh: String) -> String {
        let observed = &self.tracker.observed;
        let gang = observed.record.gang.as_ref().filter(|_| observed.record.outcome.is_none());
        let alive = |gang: &&Gang| {
            let lives = |name: &str| observed.worker(name).is_some_and(|of: &Worker| !of.is_dead());
            gang.members.iter().any(|member| lives(&member.worker))
        };
        self.image = match gang.filter(alive) {
            None => fresh,
            // Where the leader before has not told it, its pods do.
            Some(gang) if self.image.is_empty() => {
                let images = gang.members.iter().filter_map(|member| {
                    self.pods.facts(&member.worker)?.image.as_deref().map(str::to_string)
                });
                images.into_iter().next().unwrap_or(fresh)
            }
            Some(_) => return self.image.clone(),
        };
        self.image.clone()
    }

    /// A pod has the name of a member, and is another one than the member's: what the record says
    /// of it is not true of this pod.
    pub(super) fn is_another(&self, gang: &Gang, pod: &WorkerPod) -> bool {
        let at = gang.members.iter().position(|member| member.worker == pod.name);
        let known = at.and_then(|at| self.inherited.of(gang).get(at));
        known.is_some_and(|(uid, _)| !uid.is_empty() && *uid != pod.uid)
    }
}
