//! What is kept of a job that is over, or Invalid: nothing is decided about it any more but when it
//! goes.

use super::report::finished_at;
use super::spec::restored;
use super::{Figures, JobLoop, JobName, JobSeen, Write};
use crate::observed::{Millis, Outcome};
use moejob_manifest::status::MoeJobStatus;

/// A deletion of the job that did not succeed is tried again after so long.
pub(super) const EXPIRY_RETRY: Millis = 60_000;

/// A finished job, whose spec is not judged again, or an Invalid one. Neither loop nor record of it
/// is kept.
#[derive(Clone, Debug, PartialEq)]
pub struct Digest {
    job: JobName,
    /// When it is to be deleted.
    expires: Option<Millis>,
    pub figures: Figures,
}

impl Digest {
    /// None of a job about which something may still be decided: it is not over, somebody has
    /// edited it since, or what its status tells of its end is not all there.
    pub fn of(seen: &JobSeen) -> Option<Digest> {
        // Each status of a job that trains comes by here.
        if !matches!(seen.status["phase"].as_str(), Some("Complete" | "Failed")) {
            return None;
        }
        let saved = restored(&seen.status).ok()?;
        let is_own = saved.record.job_uid == seen.uid;
        let accepted = saved.more.accepted.as_ref()?.generation == seen.generation;
        let status: MoeJobStatus = serde_json::from_value(seen.status.clone()).ok()?;
        let told = status.observed_generation == Some(seen.generation);
        let over = matches!(
            saved.record.outcome,
            Some(Outcome::Complete { .. } | Outcome::Failed { .. })
        );
        if seen.deleted || !(is_own && accepted && told && over) {
            return None;
        }
        let finished = finished_at(&status)?;
        let ttl = seen.spec["ttlSecondsAfterFinished"].as_u64();
        Some(Digest {
            job: JobName {
                namespace: seen.namespace.clone(),
                name: seen.name.clone(),
                uid: seen.uid.clone(),
            },
            expires: ttl.map(|ttl| finished.saturating_add(ttl.saturating_mul(1000))),
            figures: Figures {
                namespace: seen.namespace.clone(),
                name: seen.name.clone(),
                phase: status.phase,
                step: status.step,
                loss: status.loss,
                tokens_per_second: status.tokens_per_second,
                ..Figures::default()
            },
        })
    }

    pub fn due(&self) -> Option<Millis> {
        self.expires
    }

    /// Whether other machines may make another job of it.
    pub fn is_invalid(&self) -> bool {
        self.figures.phase == "Invalid"
    }

    /// The deletion that is due now, if it is.
    pub fn expire(&mut self, now: Millis) -> Option<Write> {
        self.expires.filter(|at| *at <= now)?;
        self.expires = Some(now + EXPIRY_RETRY);
        Some(Write::DeleteJob(self.job.clone()))
    }
}

impl JobLoop {
    /// Of a job that is Invalid and that nobody has led: all is said of it until somebody edits it,
    /// or an admin describes other machines.
    pub fn digest_of_invalid(&self) -> Option<Digest> {
        let blocked = self.spec.blocked.as_ref().filter(|of| of.invalid);
        let is_led = self.spec.plannable().is_some() || self.tracker.observed.record.attempt > 0;
        let is_said = self.is_at_rest() && !self.placeholders.any();
        blocked.filter(|_| !is_led && is_said && self.fence.is_none() && !self.spec.deleted)?;
        Some(Digest {
            job: self.id.clone(),
            expires: None,
            figures: Figures {
                namespace: self.id.namespace.clone(),
                name: self.id.name.clone(),
                phase: "Invalid".to_string(),
                ..Figures::default()
            },
        })
    }

    /// Nothing of it is under way that it would have to hear the end of.
    pub fn is_at_rest(&self) -> bool {
        !self.is_dirty() && !self.outbox.busy && !self.report.is_under_way()
    }
}
