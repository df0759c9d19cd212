//! What has become of a job's writes.

use crate::decide::all_done;
use super::{JobLoop, Origin, WriteError, WriteErrorKind, Written};
use crate::decide::Action;
use crate::observed::{Millis, Outcome};
use moejob_manifest::words::several;

/// The API server has judged it, and says no.
fn is_refusal(kind: WriteErrorKind) -> bool {
    matches!(kind, WriteErrorKind::Refused | WriteErrorKind::Forbidden)
}

impl JobLoop {
    /// The batch is written, or not.
    pub(super) fn on_written(
        &mut self,
        aside: bool,
        results: Vec<(Origin, Written)>,
        now: Millis,
    ) {
        self.dirty = true;
        if !aside {
            self.outbox.busy = false;
        }
        if results.iter().any(|(_, written)| written.is_ok()) {
            self.heard_of_api = self.heard_of_api.max(now);
        }
        let is_birth = |of: &Origin| matches!(of, Origin::Action(Action::StartWorker { .. }));
        let births = results.iter().any(|(origin, _)| is_birth(origin));
        let refused = results.iter().find_map(|(origin, written)| {
            let kind = written.as_ref().err()?.kind;
            let refusal = match origin {
                // Without it there are no pods: what keeps it away keeps them away.
                Origin::Policy(_) if kind == WriteErrorKind::NotOurs => true,
                Origin::Policy(_) => is_refusal(kind),
                origin => is_birth(origin) && is_refusal(kind),
            };
            refusal.then_some(kind)
        });
        let mut failed = false;
        for (origin, written) in results {
            failed |= !self.written(origin, written, now);
        }
        if aside {
            return;
        }
        match failed {
            true => self.outbox.failed(now, self.place.patience().retry_max),
            false => self.outbox.succeeded(),
        }
        match refused {
            Some(kind) => self.pods_refused(kind, now),
            None if births && !failed => self.refusals.taken(),
            None => {}
        }
    }

    /// Whether the plan can go on.
    fn written(&mut self, origin: Origin, written: Written, now: Millis) -> bool {
        if let Origin::Recorded(_) | Origin::Status = &origin {
            self.report.written(&written, now);
        }
        match (origin, written) {
            (Origin::Action(action), Ok(_)) => self.tracker.done(&action, now),
            // Of this name there is a pod of a leader before, or of an earlier job of this name
            // that has not quite gone: the watch will tell.
            (Origin::Action(action), Err(error)) if error.kind == WriteErrorKind::Exists => {
                self.tracker.done(&action, now);
                if let Action::StartWorker { name, .. } = action {
                    self.pods.doubt(name, now);
                }
            }
            (Origin::Action(_), Err(error)) => return self.failed("PodNotCreated", &error, now),
            (Origin::Recorded(action), Ok(_)) => {
                self.tracker.done(&action, now);
                self.recorded(&action, now);
            }
            (Origin::Recorded(_), Err(error)) => return self.failed("Status", &error, now),
            (Origin::Policy(generation), written) => {
                self.objects.policy.written(generation, written.is_ok(), now);
                if let Err(error) = written {
                    return self.failed("ObjectNotApplied", &error, now);
                }
            }
            (Origin::Budget(generation), written) => {
                self.objects.budget.written(generation, written.is_ok(), now);
                if let Err(error) = written {
                    let note = format!("no PodDisruptionBudget: {}", error.message);
                    self.event(true, "ObjectNotApplied", note, now);
                }
            }
            (Origin::Placeholder(name), Err(error)) => {
                self.placeholders.refused(&name, now);
                if error.kind != WriteErrorKind::Exists {
                    self.event(true, "PlaceholderNotCreated", error.message, now);
                }
            }
            (Origin::Deletion(name), Err(error)) => {
                self.pods.delete_failed(&name, now);
                let note = format!("{name} is not deleted yet: {}", error.message);
                self.event(true, "PodNotDeleted", note, now);
            }
            (Origin::Event | Origin::Status | Origin::Expiry, Err(error)) => {
                self.note(false, format!("not written: {}", error.message));
            }
            (_, Ok(_)) => {}
        }
        true
    }

    pub(super) fn failed(&mut self, reason: &str, error: &WriteError, now: Millis) -> bool {
        let news = self.outbox.note_failure(reason, error);
        let message = error.message.clone();
        // A job that waits is told of once in the log, however often it is tried again.
        if news {
            let text = format!("{reason}: {message}: planned again after a pause");
            self.note(true, text);
        }
        if news && error.kind == WriteErrorKind::Forbidden {
            // It cannot be written where the job is: whoever looks after the operator is told.
            let at = self.operator.namespace.clone();
            let note = format!("{}/{}: {message}", self.id.namespace, self.id.name);
            self.event_in(at, true, (reason, note), now);
        } else if news {
            self.event(true, reason, message, now);
        }
        false
    }

    fn recorded(&mut self, action: &Action, now: Millis) {
        match action {
            // The first one is what everybody expects: the status tells it.
            Action::RecordAttempt(gang) if gang.attempt == 1 => self.refusals.taken(),
            Action::RecordAttempt(gang) => {
                let (attempt, nodes, step) = (gang.attempt, gang.members.len(), gang.resumed_at);
                let nodes = several(nodes, "node");
                let note = format!("attempt {attempt} on {nodes} from step {step}");
                self.refusals.taken();
                self.event(false, "AttemptStarted", note, now);
            }
            Action::Finish(Outcome::Complete { step }) => {
                self.event(false, "Complete", all_done(*step), now);
            }
            Action::Finish(Outcome::Failed { reason, message, .. }) => {
                self.event(true, reason, message.clone(), now);
            }
            Action::Finish(Outcome::Suspended) => {
                self.event(false, "Suspended", "its pods are deleted".to_string(), now);
                self.delete_ended();
            }
            _ => {}
        }
    }
}

