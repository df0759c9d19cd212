//! What the watches tell of jobs, pods, nodes and profiles, and which job's loop hears of it.

use super::Controller;
use super::crew::Crew;
use crate::observe::{Change, JobSeen, JobText, Key, Owner, PodSeen, Taken, Weight};
use moejob_manifest::profile::{File, Profiles};
use moejob_plan::lead::{self, Digest, Event, Operator};
use moejob_plan::observed::Millis;
use std::sync::Arc;
use std::time::Instant;

impl Controller {
    pub(super) fn on_change(&mut self, change: Change, now: Millis) {
        let was_complete = self.cluster.is_complete();
        let taken = self.cluster.take(change);
        if let Taken::Profiles = taken {
            self.on_profiles();
        }
        // Never taken back here: another change may wait for the same allocation.
        self.stale |= !was_complete || self.matters(&taken);
        if !was_complete && self.cluster.is_complete() {
            self.context.metrics.set_ready();
            self.adopt_all();
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
        let after = self.cluster.jobs.get(key).map(JobText::seen);
        if let Some(before) = before
            && after.as_ref().is_none_or(|after| after.uid != before.uid)
        {
            self.jobs.remove(&before.owner());
            self.finished.remove(&before.owner());
            self.context.metrics.forget_job(&before.uid);
            self.memory.forget(&before.owner());
        }
        let Some(after) = after else { return };
        let owner = after.owner();
        match self.jobs.get_mut(&owner) {
            Some(job) if job.job.is_to_be_taken_anew(&after) => self.adopt(&after, now),
            // An edit is judged in a go of its own, however many jobs are edited at once.
            Some(_) if !after.deleted && job_is_edited(before, &after) => {
                self.judging.add(key, false);
            }
            Some(job) => {
                let over = job.job.is_at_rest().then(|| Digest::of(&after)).flatten();
                job.job.on(Event::Spec(Box::new(after)), now);
                // What is known of it beside that is not needed any more.
                if let Some(digest) = over.filter(|_| !self.cluster.has_pods(&owner)) {
                    self.jobs.remove(&owner);
                    self.memory.forget(&owner);
                    self.finish(owner, digest);
                }
            }
            None => {
                let has_workers = self.cluster.has_workers(&owner);
                self.judging.add(key, has_workers);
            }
        }
    }

    pub(super) fn finish(&mut self, owner: Owner, digest: Digest) {
        let uid = owner.split('@').next().unwrap_or_default();
        self.context.metrics.job(uid, digest.figures.clone());
        self.finished.insert(owner, digest);
    }

    /// Judges some of the jobs that wait for it.
    pub(super) fn judge_some(&mut self) {
        if self.term.is_none() || !self.cluster.is_complete() {
            return;
        }
        let mut judging = std::mem::take(&mut self.judging);
        let began = Instant::now();
        let now = self.context.clock.now();
        judging.go(|| began.elapsed(), |key| self.judge(&key, now));
        self.judging = judging;
        self.settled |= self.judging.is_empty();
    }

    /// One job; it may be gone, or another, since it began to wait.
    fn judge(&mut self, key: &Key, now: Millis) {
        let Some(seen) = self.cluster.jobs.get(key).map(JobText::seen) else { return };
        let owner = seen.owner();
        if let Some(job) = self.jobs.get_mut(&owner) {
            // Its profile may be another.
            job.job.on(Event::Profiles(Arc::clone(&self.operator.profiles)), now);
            return job.job.on(Event::Spec(Box::new(seen)), now);
        }
        match Digest::of(&seen).filter(|_| !self.cluster.has_pods(&owner)) {
            Some(digest) => self.finish(owner, digest),
            None => {
                self.finished.remove(&owner);
                self.adopt(&seen, now);
            }
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
        // A worker of a job that is over is there again: somebody has to end it.
        if let Some(owner) = owner.filter(|owner| self.finished.contains_key(*owner))
            && after.is_some_and(|pod| !pod.finished)
        {
            let of_it = |(_, job): &(&Key, &JobText)| job.owner() == *owner;
            let job = self.cluster.jobs.iter().find(of_it).map(|(key, _)| Key::clone(key));
            return job.into_iter().for_each(|key| self.judging.add(&key, true));
        }
        let was = before.and_then(|pod| pod.worker.as_ref()).map(|worker| &worker.owner);
        if let Some(job) = was.and_then(|owner| self.jobs.get_mut(owner)) {
            job.job.on(Event::PodGone(name.to_string()), now);
        }
    }

    /// An admin's own kinds of machine are others than before.
    fn on_profiles(&mut self) {
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
        for (key, seen) in &self.cluster.jobs {
            let owner = seen.owner();
            let is_invalid = self.finished.get(&owner).is_some_and(Digest::is_invalid);
            if is_invalid || self.jobs.contains_key(&owner) {
                self.judging.add(key, false);
            }
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
                let after = self.cluster.jobs.get(key).map(JobText::facts);
                after.map(spec) != before.as_ref().map(spec)
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
            self.adopt_all();
        }
    }

    fn adopt_all(&mut self) {
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
        for (key, seen) in &self.cluster.jobs {
            self.judging.add(key, self.cluster.has_workers(&seen.owner()));
        }
        (self.settled, self.begun) = (self.judging.is_empty(), false);
    }

    fn unfit(&self) -> Option<String> {
        let alive = self.cluster.pods.values().filter(|pod| !pod.finished);
        let claims = alive.filter_map(|pod| pod.claims.as_ref());
        lead::unfit(self.cluster.jobs.values().map(JobText::seen), claims, &self.operator.keyring)
    }

    /// Jobs that were another operator's, which is not seen any more.
    pub(super) fn take_back(&mut self, now: Millis) {
        let free = self.jobs.values().filter(|job| job.job.has_stood_back(now));
        let free: Vec<Key> = free.map(|job| {
            let id = job.job.id();
            crate::observe::key(&id.namespace, &id.name)
        }).collect();
        for key in free {
            let Some(seen) = self.cluster.jobs.get(&key).map(JobText::seen) else { continue };
            self.adopt(&seen, now);
        }
    }

    fn adopt(&mut self, seen: &JobSeen, now: Millis) {
        let Some(term) = self.term.filter(|_| !seen.deleted) else { return };
        let operator = Arc::clone(&self.operator);
        self.crews += 1;
        let terms = (self.crews, term);
        let mut job = Crew::new(seen, Arc::clone(&self.context), operator, terms, now);
        for worker in self.cluster.workers(&seen.owner()) {
            job.job.on(Event::Pod(Box::new(worker.clone())), now);
        }
        self.jobs.insert(seen.owner(), job);
        self.stale = true;
    }
}

fn job_is_edited(before: Option<&JobSeen>, after: &JobSeen) -> bool {
    before.is_some_and(|before| before.generation != after.generation)
}
