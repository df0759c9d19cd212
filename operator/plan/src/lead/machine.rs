//! The kind of machine that a job began with, while admins change what their profiles say.
//!
//! A changed profile counts for pods that are made from then on. Its devices and ranks are another
//! matter: layouts, snapshots and ranks of a job under way rest on them, so such a change is
//! refused for that job, and it goes on as it was.

use super::{Blocked, JobLoop, JobSeen, Place};
use crate::observed::Millis;
use crate::record::Machine;
use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_manifest::words::several;
use std::sync::Arc;

/// The event and the reason.
const CHANGED: &str = "ProfileChanged";

impl JobLoop {
    /// The profiles that there are have changed. The job's object is to be told again after it.
    pub(super) fn on_profiles(&mut self, profiles: Arc<Profiles>) {
        let operator = super::Operator { profiles, ..(*self.operator).clone() };
        self.operator = Arc::new(operator);
        if let Place::Cluster(of_place) = &mut self.place {
            *of_place = Arc::clone(&self.operator);
        }
        let is_same = self.spec.plannable().is_some_and(|job| {
            let known = self.operator.profiles.get(&job.profile.name);
            known.is_none_or(|profile| profile.digest == job.profile.digest)
        });
        self.spec.is_stale |= !is_same;
    }

    /// The job as it was judged, unless its ranks are no longer those that it began with.
    pub(super) fn on_its_machine(&self, job: Job, seen: &JobSeen) -> Result<Job, Blocked> {
        let record = &self.tracker.observed.record;
        let under_way = record.attempt > 0 && record.outcome.is_none();
        let Some(began) = self.spec.machine.as_ref().filter(|_| under_way) else { return Ok(job) };
        let now = Machine::of(&job.profile);
        if (began.devices, began.ranks) == (now.devices, now.ranks) {
            return Ok(job);
        }
        let ranks = |of: &Machine| {
            let (gpus, ranks) = (several(of.devices, "GPU"), several(of.ranks, "rank"));
            format!("{gpus} and {ranks} a node")
        };
        let message = format!(
            "spec.nodes.profile: {} has {}, and {} had {} when it began; restore the profile, or \
             make a new job of another profile that resumes from its checkpoints",
            job.profile.name,
            ranks(&now),
            seen.name,
            ranks(began)
        );
        Err(Blocked { invalid: true, reason: CHANGED, message })
    }

    /// The job is accepted: what its profile says is kept for the next leader.
    pub(super) fn keep_machine(&mut self, job: &Job, now: Millis) {
        let machine = Machine::of(&job.profile);
        let before = self.spec.machine.replace(machine.clone());
        if before.is_some_and(|before| before.digest != machine.digest) {
            let name = &machine.name;
            let note = format!("profile {name} has changed; new pods follow what it says now");
            self.event(false, CHANGED, note, now);
        }
    }
}
