//! What the watches tell of jobs, pods, nodes and profiles, and which job's loop hears of it.

use super::Controller;
use super::crew::Crew;
use crate::observe::{Change, JobSeen, Key, PodSeen, Taken, Weight};
use moejob_manifest::profile::{File, Profiles};
use moejob_plan::lead::{self, Event, Operator};
use moejob_plan::observed::Millis;
use std::sync::Arc;

impl Controller {
    pub(super) fn on_change(&mut self, change: Change, now: Millis) {
        let was_complete = self.cluster.is_complete();
        let taken = self.cluster.take(change);
        if let Taken::Profiles = taken {
            self.on_profiles(now);
        }
        // Never taken back here: another change may wait for the same allocation.
        self.stale |= !was_complete || self.matters(&taken);
        if !was_complete && self.cluster.is_complete() {
            self.context.metrics.set_ready();
            self.adopt_all(now);
        }
        if self.term.is_none() || !was_complete {
            return;
        }
        match taken {
            Taken::Nothing | Taken::Node | Taken::Profiles => {}
            Taken::Job(key, before) => self.on_job(&key, before.as_ref(), now),
            Taken::Pod(key, before) => self.on_pod(&key, before.as_ref(), now),
        }
    }

    fn on_job(&mut self, key: &Key, before: Option<&JobSeen>, now: Millis) {
        let after = self.cluster.jobs.get(key);
        if let Some(before) = before
            && after.is_none_or(|after| after.uid != before.uid)
        {
            self.jobs.remove(&before.owner());
            self.context.metrics.forget_job(&before.uid);
            self.memory.forget(&before.owner());
        }
        let Some(after) = after.cloned() else { return };
        match self.jobs.get_mut(&after.owner()) {
            Some(job) if job.job.is_to_be_taken_anew(&after) => self.adopt(&after, now),
            Some(job) => job.job.on(Event::Spec(Box::new(after)), now),
            None => self.adopt(&after, now),
        }
    }

    fn on_pod(&mut self, key: &Key, before: Option<&PodSeen>, now: Millis) {
        let after = self.cluster.pods.get(key);
        let worker = after.and_then(|pod| pod.worker.as_deref());
        if let Some(worker) = worker
            && let Some(node) = &worker.meant_for
        {
            self.memory.seen(&worker.owner, node);
        }
        let name = key.rsplit('/').next().unwrap_or_default();
        let owner = worker.map(|worker| &worker.owner);
        if let Some(job) = owner.and_then(|owner| self.jobs.get_mut(owner))
            && let Some(worker) = worker
        {
            return job.job.on(Event::Pod(Box::new(worker.clone())), now);
        }
        let was = before.and_then(|pod| pod.worker.as_ref()).map(|worker| &worker.owner);
        if let Some(job) = was.and_then(|owner| self.jobs.get_mut(owner)) {
            job.job.on(Event::PodGone(name.to_string()), now);
        }
    }

    /// An admin's own kinds of machine are others than before.
    fn on_profiles(&mut self, now: Millis) {
        let file = |(name, text): (&String, &String)| (name.clone(), text.clone().into_bytes());
        let files: Vec<File> = self.cluster.profiles.iter().map(file).collect();
        let (profiles, broken) = Profiles::shipped().with(files);
        for line in broken.iter().flat_map(crate::cli::profiles::lines) {
            tracing::warn!("ConfigMap {}: {line}", crate::observe::PROFILES);
        }
        let profiles = Arc::new(profiles);
        if profiles == self.operator.profiles {
            return;
        }
        self.operator = Arc::new(Operator { profiles, ..(*self.operator).clone() });
        (self.ground, self.stale) = (None, true);
        for seen in self.cluster.jobs.values() {
            let Some(job) = self.jobs.get_mut(&seen.owner()) else { continue };
            job.job.on(Event::Profiles(Arc::clone(&self.operator.profiles)), now);
            job.job.on(Event::Spec(Box::new(seen.clone())), now);
        }
    }

    /// Whether allocation may come out otherwise for it.
    fn matters(&mut self, taken: &Taken) -> bool {
        match taken {
            // A job that becomes another by it says so itself.
            Taken::Nothing | Taken::Profiles => false,
            Taken::Node => {
                self.ground = None;
                true
            }
            // Own writes of status change nothing.
            Taken::Job(key, before) => {
                let spec = |job: &JobSeen| (job.uid.clone(), job.generation, job.deleted);
                self.cluster.jobs.get(key).map(spec) != before.as_ref().map(spec)
            }
            Taken::Pod(key, before) => {
                let after = self.cluster.pods.get(key).and_then(PodSeen::weight);
                let before = before.as_ref().and_then(PodSeen::weight);
                if after == before {
                    return false;
                }
                for (node, weight) in before.iter().chain(&after) {
                    if let (Weight::Other(_), Some(ground)) = (weight, &mut self.ground) {
                        ground.set_requested(node, self.cluster.requested(node));
                    }
                }
                // A pod that was decided has its node already.
                match (before, after) {
                    (None, Some((node, Weight::Worker(owner)))) => {
                        !self.memory.is_unseen(owner, node)
                    }
                    _ => true,
                }
            }
        }
    }

    /// This process leads from now on: it takes every job as it stands.
    pub(super) fn lead(&mut self, term: u64) {
        tracing::info!(term, "this operator leads");
        self.term = Some(term);
        self.context.metrics.set_leader(true);
        let now = self.context.clock.now();
        self.heard_of_api = now;
        if self.cluster.is_complete() {
            self.adopt_all(now);
        }
    }

    fn adopt_all(&mut self, now: Millis) {
        if self.term.is_none() {
            return;
        }
        if let Some(why) = self.unfit() {
            tracing::error!(why, "this operator does not lead");
            self.term = None;
            // The process is about to end; if it cannot be told, it goes on as a standby.
            let _ = self.inputs.unfit.try_send(why);
            return;
        }
        let jobs: Vec<JobSeen> = self.cluster.jobs.values().cloned().collect();
        let mut pods = self.cluster.workers_by_owner();
        for seen in jobs {
            let owner = seen.owner();
            if !self.jobs.contains_key(&owner) {
                self.context.pulse.beat();
                let of = pods.remove(&owner).unwrap_or_default();
                self.adopt_with(&seen, of, now);
            }
        }
    }

    fn unfit(&self) -> Option<String> {
        let alive = self.cluster.pods.values().filter(|pod| !pod.finished);
        let claims = alive.filter_map(|pod| pod.claims.as_ref());
        lead::unfit(self.cluster.jobs.values(), claims, &self.operator.keyring)
    }

    fn adopt(&mut self, seen: &JobSeen, now: Millis) {
        let owner = seen.owner();
        let pods = self.cluster.workers_by_owner().remove(&owner).unwrap_or_default();
        self.adopt_with(seen, pods, now);
    }

    fn adopt_with(&mut self, seen: &JobSeen, pods: Vec<Key>, now: Millis) {
        let Some(term) = self.term.filter(|_| !seen.deleted) else { return };
        let operator = Arc::clone(&self.operator);
        self.crews += 1;
        let terms = (self.crews, term);
        let mut job = Crew::new(seen, Arc::clone(&self.context), operator, terms, now);
        for key in pods {
            let worker = self.cluster.pods.get(&key).and_then(|pod| pod.worker.clone());
            worker.into_iter().for_each(|worker| job.job.on(Event::Pod(worker), now));
        }
        self.jobs.insert(seen.owner(), job);
        self.stale = true;
    }
}
