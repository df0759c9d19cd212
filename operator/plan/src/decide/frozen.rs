//! Workers whose machines stand still.
//!
//! A provider announces that it will freeze a machine for seconds. Its worker says nothing
//! meanwhile, and the others wait for it in the middle of a step. To leave it would cost more than
//! to wait.

use super::{Action, Planner};
use crate::observed::{Gang, Millis, Worker};

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

    /// Until when a member is waited for that may be frozen.
    pub(super) fn thaws_by(&self, gang: &'o Gang) -> Option<Millis> {
        let quiet = self.members(gang).flatten().filter(|worker| !worker.stopping);
        quiet.filter_map(|worker| worker.quiet_since).max().map(|since| since + FREEZE_PATIENCE)
    }
}
