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

    /// Each release has its own way to hash what a job is, and a worker refuses a checkpoint with
    /// another hash. Where workers of another image live, which may be another release's, the next
    /// attempt is told none: then its checkpoint is judged by model, data and seed alone.
    pub(super) fn tie_to_checkpoints(&mut self) {
        let Some(job) = self.spec.plannable() else { return };
        let fresh = job.kubernetes.image.as_ref().unwrap_or(&self.operator.image.0);
        let observed = &self.tracker.observed;
        let runs_another = |worker: &Worker| {
            let image = self.pods.facts(&worker.name).and_then(|pod| pod.image.as_deref());
            !worker.is_dead() && image.is_some_and(|image| image != fresh)
        };
        let hash = match observed.workers.iter().any(runs_another) {
            true => String::new(),
            false => job.spec_hash.clone(),
        };
        self.tracker.observed.template.checkpoint.spec_hash = hash;
    }

    /// A pod has the name of a member, and is another one than the member's: what the record says
    /// of it is not true of this pod.
    pub(super) fn is_another(&self, gang: &Gang, pod: &WorkerPod) -> bool {
        let at = gang.members.iter().position(|member| member.worker == pod.name);
        let known = at.and_then(|at| self.inherited.of(gang).get(at));
        known.is_some_and(|(uid, _)| !uid.is_empty() && *uid != pod.uid)
    }
}
