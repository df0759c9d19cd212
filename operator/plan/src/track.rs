//! Keeps an `Observed` true: what was heard of workers, and what was done to them.
//!
//! Pure as well: the shell calls one method a happening, with the time, and gets back what a person
//! should be told.

use crate::decide::Action;
use crate::observed::{Millis, Observed, StopCause, Worker, WorkerState};
use moejob_protocol::message::{Hello, Up};

/// Layouts of past attempts that are remembered for their snapshots.
const LAYOUTS_KEPT: usize = 8;
/// Steps over which the median duration is taken.
const STEP_DURATIONS_KEPT: usize = 15;
/// Recoveries that stand in status.
const RECOVERIES_KEPT: usize = 10;

/// How long a loss took to mend.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Recovery {
    pub cause: String,
    /// The attempt that the loss ended.
    pub attempt: u32,
    pub detected_at: Millis,
    pub replanned_at: Option<Millis>,
    /// First completed step of the next attempt.
    pub first_step_at: Option<Millis>,
    /// Steps that had been done and were done again.
    pub steps_lost: u64,
}

/// What happened, for events and logs.
#[derive(Clone, Debug, PartialEq)]
pub enum Happening {
    WorkerLost { name: String, cause: String },
    Recovered(Recovery),
}

/// An `Observed` and what else is needed to keep it.
#[derive(Clone, Debug)]
pub struct Tracker {
    pub observed: Observed,
    pub recoveries: Vec<Recovery>,
    step_times: Vec<Millis>,
    last_words: Vec<(String, i32, String)>,
}

impl Tracker {
    pub fn new(observed: Observed) -> Tracker {
        let (recoveries, step_times, last_words) = Default::default();
        Tracker { observed, recoveries, step_times, last_words }
    }

    fn worker(&mut self, name: &str) -> Option<&mut Worker> {
        self.observed.workers.iter_mut().find(|worker| worker.name == name)
    }

    /// An action has been carried out.
    pub fn done(&mut self, action: &Action, now: Millis) {
        match action {
            Action::StartWorker { name, node } => {
                self.observed.record.births += 1;
                self.observed.workers.push(Worker {
                    name: name.clone(),
                    node: node.clone(),
                    address: None,
                    state: WorkerState::Starting { since: now },
                    held: Vec::new(),
                    collective: 0,
                    stopping: false,
                });
            }
            Action::StopWorker { name, .. } => {
                if let Some(worker) = self.worker(name) {
                    worker.stopping = true;
                }
            }
            Action::EndAttempt { unplanned, cause, .. } => self.end(*unplanned, cause, now),
            Action::RecordAttempt(gang) => {
                self.observed.record.attempt = gang.attempt;
                self.observed.record.gang = Some((**gang).clone());
                self.step_times.clear();
                if let Some(recovery) = self.open_recovery() {
                    recovery.replanned_at = Some(now);
                }
            }
            Action::Configure { name, config } => {
                let (attempt, rank) = (config.attempt, config.rank.unwrap_or_default());
                if let Some(worker) = self.worker(name) {
                    worker.state = WorkerState::Member { attempt, rank, leaving: false };
                    worker.collective = 0;
                }
            }
            Action::LeaveAttempt { name, reason, .. } => {
                self.detect(reason, now);
                if let Some(worker) = self.worker(name)
                    && let WorkerState::Member { leaving, .. } = &mut worker.state
                {
                    *leaving = true;
                }
            }
            Action::Request { cause, .. } => {
                if let Some(gang) = &mut self.observed.record.gang {
                    gang.stop_requested = Some((*cause, now));
                }
            }
            Action::Finish(outcome) => self.observed.record.outcome = Some(outcome.clone()),
        }
    }

    fn end(&mut self, unplanned: bool, cause: &str, now: Millis) {
        if unplanned {
            self.detect(cause, now);
            self.observed.record.restarts.push(now);
        }
        let record = &mut self.observed.record;
        if let Some(gang) = &mut record.gang {
            gang.ended = true;
            record.layouts.push((gang.attempt, gang.layout.clone()));
            let surplus = record.layouts.len().saturating_sub(LAYOUTS_KEPT);
            record.layouts.drain(..surplus);
        }
    }

    /// A loss was noticed: the clock of its recovery starts.
    fn detect(&mut self, cause: &str, now: Millis) {
        let attempt = self.observed.record.attempt;
        if self.recoveries.last().is_some_and(|recovery| recovery.attempt == attempt) {
            return;
        }
        self.recoveries.push(Recovery {
            cause: cause.to_string(),
            attempt,
            detected_at: now,
            replanned_at: None,
            first_step_at: None,
            steps_lost: 0,
        });
        let surplus = self.recoveries.len().saturating_sub(RECOVERIES_KEPT);
        self.recoveries.drain(..surplus);
    }

    fn open_recovery(&mut self) -> Option<&mut Recovery> {
        self.recoveries.last_mut().filter(|recovery| recovery.first_step_at.is_none())
    }

    /// A worker's stream is up. A member of the present gang that says so is adopted unchanged.
    pub fn connected(&mut self, name: &str, address: &str, hello: &Hello) {
        let gang = self.observed.gang().map(|gang| (gang.attempt, gang.digest.clone()));
        let adopted = gang.filter(|(attempt, digest)| {
            *attempt == hello.attempt && *digest == hello.digest && hello.rank.is_some()
        });
        if let Some(worker) = self.worker(name).filter(|worker| !worker.is_dead()) {
            worker.address = Some(address.to_string());
            worker.held = hello.held.clone();
            worker.state = match (adopted, hello.rank) {
                (Some((attempt, _)), Some(rank)) => {
                    WorkerState::Member { attempt, rank, leaving: false }
                }
                _ => WorkerState::Idle,
            };
        }
    }

    /// Something that a worker said about `attempt`.
    pub fn heard(&mut self, name: &str, attempt: u32, up: &Up, now: Millis) -> Vec<Happening> {
        match up {
            Up::Hello(_) | Up::Event(_) => {}
            Up::Heartbeat(heartbeat) => {
                if let Some(worker) = self.worker(name) {
                    worker.held = heartbeat.held.clone();
                    worker.collective = heartbeat.collective;
                }
            }
            Up::Step(report) => return self.stepped(attempt, report.step, now),
            Up::Left { reason, held } => {
                if let Some(worker) = self.worker(name) {
                    worker.held = held.clone();
                    if matches!(worker.state, WorkerState::Member { attempt: of, .. } if of == attempt)
                    {
                        worker.state = WorkerState::Left { attempt, reason: reason.clone() };
                    }
                }
            }
            Up::Completed { step } => {
                let step = *step;
                if let Some(worker) = self.worker(name).filter(|worker| !worker.is_dead()) {
                    worker.state = WorkerState::Completed { attempt, step };
                }
            }
            Up::Failed { exit_code, message } => {
                self.last_words.push((name.to_string(), *exit_code, message.clone()));
            }
        }
        Vec::new()
    }

    fn stepped(&mut self, attempt: u32, step: u64, now: Millis) -> Vec<Happening> {
        let record = &mut self.observed.record;
        let Some(gang) = record.gang.as_mut().filter(|gang| gang.attempt == attempt) else {
            return Vec::new();
        };
        let first = !std::mem::replace(&mut gang.stepped, true);
        let lost = record.step.saturating_sub(gang.resumed_at);
        record.step = record.step.max(step);
        record.progressed_at = now;
        self.step_times.push(now);
        let surplus = self.step_times.len().saturating_sub(STEP_DURATIONS_KEPT + 1);
        self.step_times.drain(..surplus);
        let mut durations: Vec<Millis> =
            self.step_times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        durations.sort_unstable();
        self.observed.record.step_median = durations.get(durations.len() / 2).copied().unwrap_or(0);
        if first && let Some(recovery) = self.open_recovery().filter(|r| r.replanned_at.is_some()) {
            recovery.first_step_at = Some(now);
            recovery.steps_lost = lost;
            return vec![Happening::Recovered(recovery.clone())];
        }
        Vec::new()
    }

    /// Nothing was heard of it within the heartbeat timeout, or its stream was closed.
    pub fn silent(&mut self, name: &str, cause: &str) -> Vec<Happening> {
        let Some(worker) = self.worker(name) else {
            return Vec::new();
        };
        let ending = worker.stopping
            || matches!(
                worker.state,
                WorkerState::Completed { .. } | WorkerState::Dead { .. } | WorkerState::Silent
            );
        if ending {
            return Vec::new();
        }
        worker.state = WorkerState::Silent;
        vec![Happening::WorkerLost { name: name.to_string(), cause: cause.to_string() }]
    }

    /// The process or pod has ended.
    pub fn exited(&mut self, name: &str, exit_code: Option<i32>, how: &str) -> Vec<Happening> {
        let said = self.last_words.iter().find(|(of, ..)| of == name).cloned();
        let Some(worker) = self.worker(name) else {
            return Vec::new();
        };
        if matches!(worker.state, WorkerState::Completed { .. } | WorkerState::Dead { .. }) {
            return Vec::new();
        }
        let known = worker.stopping || worker.state == WorkerState::Silent;
        let message = said.map_or_else(|| how.to_string(), |(_, _, message)| message);
        worker.state = WorkerState::Dead { exit_code, message: message.clone() };
        worker.held.clear();
        if known {
            return Vec::new();
        }
        vec![Happening::WorkerLost { name: name.to_string(), cause: message }]
    }

    /// Forgets workers that have ended and that the present gang does not name.
    pub fn prune(&mut self) {
        let gang = self.observed.record.gang.clone().filter(|gang| !gang.ended);
        let named = |name: &str| {
            gang.iter().flat_map(|gang| &gang.members).any(|member| member.worker == name)
        };
        self.observed.workers.retain(|worker| {
            let failed =
                matches!(worker.state, WorkerState::Dead { exit_code: Some(2 | 3), .. });
            !worker.is_dead() || failed || named(&worker.name)
        });
        let workers = &self.observed.workers;
        self.last_words.retain(|(name, ..)| workers.iter().any(|worker| worker.name == *name));
    }

    /// Whether a growth was asked for and has not happened yet.
    pub fn is_growing(&self) -> bool {
        let asked = self.observed.gang().and_then(|gang| gang.stop_requested);
        asked.is_some_and(|(cause, _)| cause == StopCause::Growth)
    }
}
