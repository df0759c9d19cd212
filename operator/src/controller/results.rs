//! What has become of a job's writes, and what people are told of it.

use super::Origin;
use super::job::JobState;
use crate::apply::{ApplyError, Written};
use moejob_plan::decide::Action;
use moejob_plan::observed::{Millis, Outcome};
use moejob_plan::track::Happening;

/// After a write that failed: 1 s, 2 s, 4 s, ... up to this.
pub(super) const RETRY_MAX: Millis = 60_000;
/// After a PodDisruptionBudget that could not be applied. Nothing waits for it.
const BUDGET_RETRY: Millis = 5_000;

impl JobState {
    /// The batch is written, or not.
    pub fn on_written(&mut self, aside: bool, results: Vec<(Origin, Written)>, now: Millis) {
        self.dirty = true;
        if !aside {
            self.busy = false;
        }
        let is_birth = |of: &Origin| matches!(of, Origin::Action(Action::StartWorker { .. }));
        let births = results.iter().any(|(origin, _)| is_birth(origin));
        let mut failed = false;
        for (origin, written) in results {
            failed |= !self.written(origin, written, now);
        }
        if aside {
            return;
        }
        if failed {
            self.queue.clear();
            self.failures += 1;
            let wait = (500u64 << self.failures.min(10)).min(RETRY_MAX);
            self.retry_at = now + wait;
        } else {
            (self.failures, self.retry_at, self.failure) = (0, 0, None);
        }
        if births {
            self.pods_written(!failed, now);
        }
    }

    /// Whether the plan can go on.
    fn written(&mut self, origin: Origin, written: Written, now: Millis) -> bool {
        let label = written.as_ref().map_or_else(ApplyError::label, |_| "ok");
        self.context.metrics.result(label);
        if let Origin::Recorded(_) | Origin::Status = &origin {
            self.report.written(&written, now);
        }
        match (origin, written) {
            (Origin::Action(action), Ok(_)) => self.tracker.done(&action, now),
            // Of this name there is a pod of a leader before, or of an earlier job of this name
            // that has not quite gone: the watch will tell.
            (Origin::Action(action), Err(ApplyError::Exists)) => {
                self.tracker.done(&action, now);
                if let Action::StartWorker { name, .. } = action {
                    self.workers.doubt(name, now);
                }
            }
            (Origin::Recorded(action), Ok(_)) => {
                self.tracker.done(&action, now);
                self.recorded(&action);
            }
            (Origin::Recorded(_), Err(error)) => return self.failed("Status", &error),
            (Origin::Action(action), Err(error)) => {
                let reason = match action {
                    Action::StartWorker { .. } => "PodNotCreated",
                    _ => "PodNotDeleted",
                };
                return self.failed(reason, &error);
            }
            (Origin::Object, Err(error)) => {
                self.objects = None;
                return self.failed("ObjectNotApplied", &error);
            }
            (Origin::Budget, Err(error)) => {
                tracing::warn!(job = self.id.name, %error, "no PodDisruptionBudget: tried again");
                (self.budgeted, self.budget_due) = (None, Some(now + BUDGET_RETRY));
            }
            (Origin::Event, Err(error)) => tracing::debug!(%error, "an event was not written"),
            (Origin::Status, Err(error)) => tracing::info!(%error, "status is written later"),
            (Origin::Cleanup, Err(error)) => tracing::info!(%error, "deleted later"),
            (_, Ok(_)) => {}
        }
        true
    }

    fn failed(&mut self, reason: &str, error: &ApplyError) -> bool {
        let message = moe_worker::life::listener::chain(error);
        tracing::warn!(job = self.id.name, reason, message, "planned again after a pause");
        let same = |known: &(String, String)| known.0 == reason && known.1 == message;
        let known = self.failure.as_ref().is_some_and(same);
        let conflict = matches!(error, ApplyError::Conflict);
        self.conflicted |= conflict;
        if !known && !conflict {
            self.event(true, reason, message.clone());
        }
        self.failure = Some((reason.to_string(), message));
        false
    }

    fn recorded(&mut self, action: &Action) {
        match action {
            // The first one is what everybody expects: the status tells it.
            Action::RecordAttempt(gang) if gang.attempt > 1 => {
                let (attempt, nodes, step) = (gang.attempt, gang.members.len(), gang.resumed_at);
                let note = format!("attempt {attempt} on {nodes} nodes from step {step}");
                self.event(false, "AttemptStarted", note);
            }
            Action::Finish(Outcome::Complete { step }) => {
                self.event(false, "Complete", format!("all {step} steps are done"));
            }
            Action::Finish(Outcome::Failed { reason, message, .. }) => {
                self.event(true, reason, message.clone());
            }
            Action::Finish(Outcome::Suspended) => {
                self.event(false, "Suspended", "its pods are deleted".to_string());
                self.delete_ended();
            }
            _ => {}
        }
    }

    pub(super) fn tell(&mut self, happenings: Vec<Happening>) {
        for happening in happenings {
            match happening {
                Happening::WorkerLost { name, cause } => {
                    let worker = self.tracker.observed.worker(&name);
                    let node = worker.map(|worker| worker.node.clone()).unwrap_or_default();
                    tracing::warn!(job = self.id.name, name, node, cause, "lost");
                    self.event(true, "WorkerLost", format!("{name} on {node}: {cause}"));
                }
                Happening::Recovered(recovery) => self.recovered(&recovery),
            }
        }
    }
}
