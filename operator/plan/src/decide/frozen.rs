//! Workers whose machines stand still.
//!
//! A provider announces that it will freeze a machine for seconds. Its worker says nothing
//! meanwhile, and the others wait for it in the middle of a step. To leave it would cost more than
//! to wait.

use super::{Action, Planner};
use crate::observed::{Gang, Millis, Worker, WorkerState};
use moejob_protocol::message::CONTROL_PATIENCE;

/// Silence of a worker is waited out for so long while its node freezes.
pub const FREEZE_PATIENCE: Millis = 30_000;

impl<'o> Planner<'o> {
    /// Whether one was given up: what follows of that the next plan says.
    pub(super) fn give_up_the_frozen(&mut self) -> bool {
        let waits = |worker: &&Worker| !worker.stopping && !worker.is_dead();
        for worker in self.observed.workers.iter().filter(waits) {
            let Some(since) = worker.quiet_since else { continue };
            let until = since + FREEZE_PATIENCE;
            let (name, node) = (&worker.name, &worker.node);
            // What else is announced meanwhile may be its end.
            let ends = !self.index.is_usable(node) && !self.index.freezes(node);
            if self.now < until && !ends {
                self.look_again_at(until);
                continue;
            }
            let why = match ends {
                true => format!("{node} is to be left"),
                false => format!("a freeze takes at most {} s", FREEZE_PATIENCE / 1000),
            };
            self.why(format!("give up {name}, of which nothing is heard: {why}"));
            self.act(Action::GiveUp { name: name.clone() });
        }
        !self.plan.actions.is_empty()
    }

    /// Whoever waits for a GPU gives a step up that takes many times what others took. Members are
    /// told that this one may, before the machine stands still. That holds for the whole attempt:
    /// a freeze that is over may not be the last one.
    pub(super) fn be_patient(&mut self, gang: &'o Gang) {
        // Nearly always there is none, and no member is looked up.
        if !self.observed.nodes.iter().any(|node| node.freezes) {
            return;
        }
        let freezes = |worker: &&Worker| self.index.freezes(&worker.node);
        let Some(node) = self.members(gang).flatten().find(freezes).map(|worker| &worker.node)
        else {
            return;
        };
        let untold = |worker: &&Worker| {
            let member = matches!(
                worker.state,
                WorkerState::Member { attempt, leaving: None, .. } if attempt == gang.attempt
            );
            let known = worker.patient_in == Some(gang.attempt);
            member && !known && !worker.stopping && worker.speaks >= CONTROL_PATIENCE
        };
        let untold: Vec<&Worker> = self.members(gang).flatten().filter(untold).collect();
        if !untold.is_empty() {
            let seconds = FREEZE_PATIENCE / 1000;
            self.why(format!("{node} may freeze: a step may take {seconds} s longer"));
        }
        for worker in untold {
            let (name, attempt) = (worker.name.clone(), gang.attempt);
            self.act(Action::BePatient { name, attempt });
        }
    }

    /// A member is silent that may be frozen.
    pub(super) fn waits_for_the_frozen(&self, gang: &'o Gang) -> bool {
        let mut members = self.members(gang).flatten().filter(|worker| !worker.stopping);
        members.any(|worker| worker.quiet_since.is_some())
    }
}
