//! Nodes are measured before their workers get a rank, and bad ones are avoided.

use super::{Action, Planner};
use crate::observed::{Millis, Outcome, Worker, WorkerState};
use crate::preflight::{Checked, line};
use crate::reasons;
use moejob_manifest::job::Venue;
use moejob_protocol::message::CONTROL_PREFLIGHT;

/// A worker that was asked and lives measures for some seconds, and gives up by itself after 30.
pub const ANSWER_TIMEOUT: Millis = 60_000;
/// A node that failed takes no new worker for so long; then it is measured again.
pub const FAILED_AVOID: Millis = 600_000;

impl<'o> Planner<'o> {
    pub(super) fn preflight(&mut self) {
        if self.observed.wanted.preflight.is_none() || self.observed.halting().is_some() {
            return;
        }
        let mut asked: Vec<&'o Worker> = Vec::new();
        for worker in &self.observed.workers {
            if self.is_ending(worker) || worker.is_dead() {
                continue;
            }
            match worker.checked {
                Checked::No if self.waits_for_check(worker) => {
                    if self.index.is_usable(&worker.node) {
                        asked.push(worker);
                    }
                }
                Checked::Asked { at, .. } => self.await_answer(worker, at + ANSWER_TIMEOUT),
                Checked::Failed | Checked::Silent => self.leave_out(worker),
                Checked::No | Checked::Passed => {}
            }
        }
        if !asked.is_empty() {
            let names: Vec<&str> = asked.iter().map(|worker| worker.name.as_str()).collect();
            self.why(format!("measure the nodes of {}", names.join(" ")));
            for worker in asked {
                self.act(Action::Preflight { name: worker.name.clone() });
            }
        }
    }

    /// Its node is to be measured, and was not. One that has trained passed before, as far as a new
    /// leader can know; one of a release before cannot be asked.
    pub(super) fn waits_for_check(&self, worker: &Worker) -> bool {
        let open = matches!(worker.checked, Checked::No | Checked::Asked { .. });
        self.observed.wanted.preflight.is_some()
            && (open || self.waits_for_pair(worker))
            && worker.state == WorkerState::Idle
            && worker.speaks >= CONTROL_PREFLIGHT
    }

    /// It may be given a rank. Whoever is to stop saves with whom there is.
    pub(super) fn is_cleared(&self, worker: &Worker) -> bool {
        let wanted = self.observed.wanted.preflight.is_some();
        !wanted
            || self.observed.halting().is_some()
            || !(matches!(worker.checked, Checked::Failed | Checked::Silent)
                || self.waits_for_check(worker))
    }

    /// Workers that may get a rank once their nodes are measured.
    pub(super) fn measuring(&self) -> usize {
        let measures = |worker: &&Worker| !worker.stopping && self.waits_for_check(worker);
        match self.observed.halting() {
            Some(_) => 0,
            None => self.observed.workers.iter().filter(measures).count(),
        }
    }

    fn await_answer(&mut self, worker: &'o Worker, until: Millis) {
        if worker.state != WorkerState::Idle {
            return;
        }
        if self.now < until {
            return self.look_again_at(until);
        }
        self.act(Action::NoteUnmeasured { name: worker.name.clone() });
        self.why(format!("{} does not say what its node is like", worker.name));
    }

    /// A node that failed, if there is another or somebody looks for one. One of which nothing is
    /// known is tried again later, whatever else there is.
    fn leave_out(&mut self, worker: &'o Worker) {
        let node = &worker.node;
        let elsewhere = self.observed.wanted.venue == Venue::Kubernetes;
        let silent = worker.checked == Checked::Silent;
        if silent || elsewhere || self.observed.gang().is_some() || self.can_spare(node) {
            let found = self.failure_of(node);
            self.avoid(node, FAILED_AVOID, &format!("its preflight failed: {found}"));
        }
    }

    fn failure_of(&self, node: &str) -> String {
        let found = self.observed.preflight.node(node);
        let worst = found.and_then(|found| found.outcomes.first());
        worst.map_or_else(|| "for a reason that is not known".to_string(), line)
    }

    /// On this machine there is no other node, and none will come.
    pub(super) fn preflight_fails(&self) -> Option<Outcome> {
        let local = self.observed.wanted.venue == Venue::Local && self.observed.gang().is_none();
        let open = self.observed.wanted.preflight.is_some() && self.observed.halting().is_none();
        if !local || !open || self.measuring() > 0 {
            return None;
        }
        let is_left = |worker: &&Worker| !worker.stopping && !worker.is_dead();
        let mut left = self.observed.workers.iter().filter(is_left);
        let failed = left.find(|worker| worker.checked == Checked::Failed)?;
        (!self.can_spare(&failed.node)).then(|| Outcome::Failed {
            exit_code: 1,
            reason: reasons::PREFLIGHT_FAILED,
            message: format!(
                "{} is not good enough, and there is no other node to train on: {}; `moejob \
                 preflight` measures it alone, and nodes.preflight: never trains all the same",
                failed.node,
                self.failure_of(&failed.node)
            ),
        })
    }
}
