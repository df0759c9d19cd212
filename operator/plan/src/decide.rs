//! `plan(&Observed, now) -> Plan`: everything that is to be done for one job, and why.
//!
//! Read top to bottom: is the job over; are its nodes good (`preflight`); is its gang healthy
//! (`health`); can it grow; can a new
//! attempt start, and from which state (`begin`, `resume`); are there enough workers (`begin`).
//! Nothing here reads a clock or the world, so equal inputs give equal plans, and a plan for a
//! converged job has no actions.

mod begin;
mod frozen;
mod health;
mod index;
mod pairs;
mod preflight;
mod resume;

pub use preflight::{ANSWER_TIMEOUT, FAILED_AVOID};
pub use frozen::FREEZE_PATIENCE;

use crate::preflight::Round;
use crate::reasons;
use crate::observed::{
    Gang, Millis, Observed, Outcome, Size, StopCause, Worker, WorkerState,
};
use health::Health;
use index::Index;
use moejob_manifest::job::Venue;
use moejob_manifest::words::{counted, several};
use moejob_protocol::config::WorkerConfig;
use moejob_protocol::message::Request;
use std::collections::BTreeSet;
use std::sync::Arc;

/// A suspend or an interrupt waits for its checkpoint, and a stopped gang for the last member to
/// stop, as long as something goes on: a step, or the storage. It is given up so long after.
pub const STOP_TIMEOUT: Millis = 60_000;
/// However much goes on. Members give up storage that is away after as long.
pub const STOP_MAX: Millis = 3_600_000;
/// Before the first step a member may be silent for this long: while it reads its data and weights,
/// or computes one micro-batch after the other, it shows life.
pub const FIRST_STEP_TIMEOUT: Millis = 600_000;
/// Automatic step timeout: this many medians, and at least `STEP_TIMEOUT_MIN`.
pub const STEP_TIMEOUT_MEDIANS: u64 = 20;
pub const STEP_TIMEOUT_MIN: Millis = 60_000;
/// A member that was asked to leave and still has not is ended: its device hangs. Where steps take
/// long it has two of them: a processor looks up at the end of a micro-batch.
pub const LEAVE_TIMEOUT: Millis = 10_000;
/// Where no member of a broken attempt answers and not all are known dead, the next attempt waits
/// this long for either; after that the claim in storage alone fences the old one. Pods on silent
/// nodes are force-deleted within the same time.
pub const FENCE_TIMEOUT: Millis = 20_000;
/// A node that does not reach another one of its gang is avoided for this long.
pub const PARTED_AVOID: Millis = 600_000;
/// A device that fails this often within that time is broken: its node is avoided for as long.
const DEVICE_FAILURES_MAX: usize = 3;
pub const DEVICE_WINDOW: Millis = 600_000;
/// For so many nodes of the smallest gang `maxRestarts` workers may end before an attempt begins.
const NODES_A_BUDGET: u32 = 8;
/// So often two nodes must have lost each other.
const PARTINGS_MIN: usize = 2;
/// Time that a worker has to end by itself when the job is over.
pub const END_GRACE: Millis = 5_000;

/// What to do now, in this order, and when to look again.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Plan {
    pub actions: Vec<Action>,
    /// One sentence a decision, in the order they were taken.
    pub why: Vec<String>,
    /// Look again at this time even if nothing happens.
    pub requeue: Option<Millis>,
}

/// No choice is left to whoever executes it.
#[derive(Clone, Debug, PartialEq)]
pub enum Action {
    /// Create a worker on a node.
    StartWorker { name: String, node: String },
    /// End a worker: at once when `grace` is 0.
    StopWorker { name: String, grace: Millis },
    /// Count a loss against the budget, and mark the attempt as over.
    EndAttempt { attempt: u32, unplanned: bool, cause: String },
    /// Make the attempt durable. Before any `Configure` of it.
    RecordAttempt(Box<Gang>),
    /// Nothing was heard of a worker for longer than its node may freeze: it counts as silent.
    GiveUp { name: String },
    /// Measure the node of a worker that has no rank.
    Preflight { name: String },
    /// A worker that was asked to measure has said nothing: its node counts as failed.
    NoteUnmeasured { name: String },
    /// Measure nodes in pairs; where there are none, all that can be known is.
    MeasurePairs(Box<Round>),
    /// Tell the other worker of a pair where to meet.
    RelayPair { number: u64, name: String },
    /// A pair cannot go on. `late`: whoever has told nothing of it counts as failed.
    EndPair { number: u64, late: bool },
    /// The attempt's configuration, which all members share but for the rank.
    Configure { name: String, rank: u32, config: Arc<WorkerConfig> },
    LeaveAttempt { name: String, attempt: u32, reason: String },
    /// A machine of the attempt may freeze: steps that take longer by that are not given up.
    BePatient { name: String, attempt: u32 },
    /// To every member of the attempt; `cause` is recorded with it.
    Request { attempt: u32, request: Request, cause: StopCause },
    /// No new worker there before that time, whoever else says so.
    AvoidNode { node: String, until: Millis },
    /// The job is to stop: the time that it has to save its state begins.
    NoteStop,
    /// The job is no longer to stop: that time is over, and a suspended job is open again.
    WithdrawStop,
    Finish(Outcome),
}

/// Decides. See the module's first lines.
pub fn plan(observed: &Observed, now: Millis) -> Plan {
    let index = Index::of(observed);
    let (plan, ending) = Default::default();
    let mut planner = Planner { observed, index, now, plan, ending };
    planner.decide();
    planner.plan
}

struct Planner<'a> {
    observed: &'a Observed,
    index: Index<'a>,
    now: Millis,
    plan: Plan,
    /// Workers that this plan ends.
    ending: BTreeSet<&'a str>,
}

impl<'o> Planner<'o> {
    fn decide(&mut self) {
        if self.is_over() {
            return self.stop_everything();
        }
        if let Some(outcome) = self.outcome() {
            self.why(format!("finish: {}", describe(&outcome)));
            self.act(Action::Finish(outcome));
            return self.stop_everything();
        }
        if self.give_up_the_frozen() {
            return;
        }
        self.note_stop();
        self.kill_the_silent();
        self.release_strays();
        self.preflight();
        self.pairs();
        match self.observed.gang() {
            Some(gang) => self.tend(gang),
            None => self.begin(),
        }
        self.fill();
    }

    /// An outcome is final, except that a suspended job may be resumed.
    fn is_over(&self) -> bool {
        match self.observed.record.outcome {
            None => false,
            Some(Outcome::Suspended) => self.observed.halting().is_some(),
            Some(_) => true,
        }
    }

    /// The job's end, if something has decided it. Completion comes first: what happens to a
    /// worker after the last checkpoint is committed does not matter.
    fn outcome(&mut self) -> Option<Outcome> {
        self.completed().or_else(|| self.refused()).or_else(|| self.halted()).or_else(|| {
            let used_up = self.restarts_in_window() > self.observed.wanted.restarts_max;
            (used_up && self.observed.gang().is_none()).then(|| self.budget_used_up())
        })
        .or_else(|| self.never_starts())
        .or_else(|| self.device_fails())
        .or_else(|| self.ends_alike())
        .or_else(|| self.preflight_fails())
    }

    /// Workers end again with the same words: in the same step, which every attempt does alike, or
    /// again and again without one, where another try would come to the same machine.
    fn ends_alike(&self) -> Option<Outcome> {
        let local = self.observed.wanted.venue == Venue::Local;
        let idle = self.observed.gang().is_none();
        let (end, times) = self.observed.record.repeat.too_often(local).filter(|_| idle)?;
        let where_it_ended = match end.in_step {
            true => format!("in step {}", end.step + 1),
            false => "without a step in between".to_string(),
        };
        Some(Outcome::Failed {
            exit_code: 1,
            reason: reasons::ENDS_ALIKE,
            message: format!("{times} tries ended alike, {where_it_ended}: {}", end.words),
        })
    }

    /// A broken device, and no other node to train on.
    fn device_fails(&self) -> Option<Outcome> {
        let failure = self.broken_device().filter(|_| self.observed.gang().is_none())?;
        // In Kubernetes the allocation looks for a node in its place.
        let elsewhere = self.observed.wanted.venue == Venue::Kubernetes;
        (!elsewhere && !self.can_spare(&failure.node)).then(|| Outcome::Failed {
            exit_code: 1,
            reason: reasons::DEVICE_FAILS,
            message: format!(
                "{} failed {DEVICE_FAILURES_MAX} times within {} s, and there is no other node to \
                 train on; the last: {}",
                failure.name,
                DEVICE_WINDOW / 1000,
                failure.words
            ),
        })
    }

    /// Workers that end before an attempt begins are lost as others are; without an attempt in
    /// between they would be started again for ever.
    fn never_starts(&self) -> Option<Outcome> {
        let (record, wanted) = (&self.observed.record, &self.observed.wanted);
        let since = self.now.saturating_sub(wanted.restart_window);
        let count = record.start_failures.iter().filter(|at| **at >= since).count();
        // Of hundreds of workers a few never come up at once.
        let most = wanted.restarts_max.saturating_mul(wanted.nodes_min.div_ceil(NODES_A_BUDGET));
        let over = count > most as usize && self.observed.gang().is_none();
        over.then(|| Outcome::Failed {
            exit_code: 1,
            reason: reasons::WORKERS_DO_NOT_START,
            message: format!(
                "workers ended {} within {} s before an attempt began, more often than {most}, \
                 which is recovery.maxRestarts for every {NODES_A_BUDGET} of nodes.min; the last: \
                 {}",
                several(count, "time"),
                wanted.restart_window / 1000,
                record.start_failure
            ),
        })
    }

    fn completed(&self) -> Option<Outcome> {
        let observed = self.observed;
        let reported = observed.workers.iter().find_map(|worker| match worker.state {
            // An attempt that was given up may complete too, but its checkpoint does not count.
            WorkerState::Completed { attempt, step } => {
                (attempt == observed.record.attempt).then_some(step)
            }
            _ => None,
        });
        // Nobody may be left to report it.
        let stored = observed.stored.as_ref().map(|stored| stored.step);
        let stored = stored.filter(|step| {
            observed.gang().is_none() && *step >= observed.template.training.steps
        });
        reported.or(stored).map(|step| Outcome::Complete { step })
    }

    fn refused(&self) -> Option<Outcome> {
        self.observed.workers.iter().find_map(|worker| match &worker.state {
            WorkerState::Dead { exit_code: Some(code @ (2 | 3)), message } => {
                let reason = if *code == 2 { reasons::INVALID_SPEC } else { reasons::REFUSED };
                Some(Outcome::Failed { exit_code: *code, reason, message: message.clone() })
            }
            _ => None,
        })
    }

    /// The job was asked to stop, and what could be saved is saved.
    fn halted(&mut self) -> Option<Outcome> {
        let halting = self.observed.halting()?;
        let over = match self.observed.gang() {
            Some(gang) => {
                let asked = gang.stop_requested.filter(|(cause, _)| cause.halts());
                asked.is_some_and(|asked| self.now >= self.stop_due(asked))
            }
            None => !self.can_save(),
        };
        let interrupted = halting == StopCause::Interrupt;
        over.then_some(if interrupted { Outcome::Interrupted } else { Outcome::Suspended })
    }

    /// When a gang that was asked to stop is waited for no longer.
    fn stop_due(&self, (_, asked): (StopCause, Millis)) -> Millis {
        let record = &self.observed.record;
        let most = record.stopping_since.unwrap_or(asked) + STOP_MAX;
        (record.progressed_at.max(asked) + STOP_TIMEOUT).min(most)
    }

    /// The clock of a wish to stop begins when it is first seen and ends when it is taken back, so
    /// that one that comes later has its own time.
    fn note_stop(&mut self) {
        let record = &self.observed.record;
        let asked = self.observed.gang().and_then(|gang| gang.stop_requested);
        let stands = asked.is_some_and(|(cause, _)| cause.halts())
            || record.stopping_since.is_some()
            || record.outcome == Some(Outcome::Suspended);
        match self.observed.halting() {
            None if stands => {
                self.why("go on: the job is no longer to stop".to_string());
                self.act(Action::WithdrawStop);
            }
            Some(cause) if record.stopping_since.is_none() => {
                self.why(format!("the job is to stop: {cause:?}"));
                self.act(Action::NoteStop);
            }
            _ => {}
        }
    }

    fn restarts_in_window(&self) -> u32 {
        let wanted = &self.observed.wanted;
        let since = self.now.saturating_sub(wanted.restart_window);
        self.observed.record.restarts.iter().filter(|at| **at >= since).count() as u32
    }

    fn budget_used_up(&self) -> Outcome {
        let wanted = &self.observed.wanted;
        Outcome::Failed {
            exit_code: 1,
            reason: reasons::RESTART_BUDGET_USED_UP,
            message: format!(
                "{} within {} s, more than recovery.maxRestarts = {}; \
                 look at the newest WorkerLost events for the cause",
                counted(self.restarts_in_window(), "unplanned loss", "unplanned losses"),
                wanted.restart_window / 1000,
                wanted.restarts_max
            ),
        }
    }

    fn stop_everything(&mut self) {
        for worker in &self.observed.workers {
            if !worker.is_dead() && !worker.stopping {
                self.stop(worker, END_GRACE, "the job is over");
            }
        }
    }

    /// A silent worker is lost; ending it is a courtesy, the attempt number is what fences it.
    fn kill_the_silent(&mut self) {
        for worker in self.observed.workers.iter().filter(|worker| !worker.stopping) {
            match worker.state {
                WorkerState::Silent => self.stop(worker, 0, "nothing heard of it"),
                WorkerState::Starting { since } => {
                    let limit = since + self.observed.wanted.gang_timeout;
                    if self.now >= limit {
                        self.stop(worker, 0, "it did not connect in time");
                    }
                    self.look_again_at(limit);
                }
                _ => {}
            }
        }
    }

    /// Workers that are still in an attempt other than the present one leave it first.
    fn release_strays(&mut self) {
        let present = self.observed.gang().map(|gang| gang.attempt);
        for worker in self.observed.workers.iter().filter(|worker| !worker.stopping) {
            if let WorkerState::Member { attempt, leaving, .. } = worker.state
                && Some(attempt) != present
            {
                if leaving.is_none() {
                    self.why(format!("{} is still in attempt {attempt}", worker.name));
                }
                self.ask_to_leave(worker, attempt, leaving, None, "its attempt is over");
            }
        }
    }

    /// Whether it is worth waiting for.
    fn ask_to_leave(
        &mut self,
        worker: &'o Worker,
        attempt: u32,
        asked: Option<Millis>,
        at_most: Option<Millis>,
        reason: &str,
    ) -> bool {
        let patience = LEAVE_TIMEOUT.max(2 * self.observed.record.step_median);
        let limit = asked.map(|at| at + patience).into_iter().chain(at_most).min();
        if limit.is_some_and(|limit| self.now >= limit) {
            self.stop(worker, 0, &format!("it does not leave attempt {attempt}"));
            return false;
        }
        if let Some(limit) = limit {
            self.look_again_at(limit);
        }
        if asked.is_none() {
            let (name, reason) = (worker.name.clone(), reason.to_string());
            self.act(Action::LeaveAttempt { name, attempt, reason });
        }
        true
    }

    /// A gang is under way: keep it, grow it, or end it.
    fn tend(&mut self, gang: &'o Gang) {
        match self.health(gang) {
            Health::Well => {
                self.be_patient(gang);
                self.improve(gang);
                self.trim(gang);
            }
            Health::Stopping => {}
            Health::Broken { unplanned, cause } => self.end(gang, unplanned, cause),
        }
    }

    /// The gang is well: is the job to stop, or can the gang be a better one?
    fn improve(&mut self, gang: &'o Gang) {
        if let Some(cause) = self.observed.halting() {
            match gang.stop_requested {
                Some(asked) if asked.0.halts() && self.now < asked.1 + STOP_TIMEOUT => {
                    self.look_again_at(self.stop_due(asked).min(asked.1 + STOP_TIMEOUT));
                }
                // It goes on: the request may have been lost with a leader, and another one costs
                // nothing.
                _ => {
                    self.why(format!("stop the gang with a checkpoint: {cause:?}"));
                    self.request(gang, cause);
                }
            }
            return;
        }
        // A request that has had no effect for so long was lost with a leader: think again.
        if let Some((_, at)) = gang.stop_requested
            && self.now < at + STOP_TIMEOUT
        {
            return self.look_again_at(at + STOP_TIMEOUT);
        }
        let Some((cause, why)) = self.better(gang) else {
            return;
        };
        let draining = self.members(gang).flatten().any(|worker| worker.stopping);
        // Another job waits for what is called back.
        let waited_for = gang.stepped && self.called_back(gang) > 0;
        let due = gang.started_at + self.observed.wanted.growth_interval;
        if !draining && !waited_for && (!gang.stepped || self.now < due) {
            return self.look_again_at(due);
        }
        self.why(why);
        self.request(gang, cause);
    }

    /// What a new attempt would be better at than this healthy one.
    fn better(&self, gang: &'o Gang) -> Option<(StopCause, String)> {
        let present = gang.members.len() as u32;
        let newcomers =
            self.candidates().filter(|worker| self.index.is_usable(&worker.node)).count() as u32;
        if present > self.observed.wanted.nodes_max
            && let Some(size) = self.size_for(present)
        {
            let why = several(size.nodes, "node");
            let why = format!("shrink from {present} to {why} after this step");
            return Some((StopCause::Shrink, why));
        }
        let called = self.called_back(gang);
        if called > 0 {
            let nodes = several(called, "node");
            let left = match self.size_for((present + newcomers).saturating_sub(called)) {
                Some(size) => several(size.nodes, "node"),
                None if self.observed.is_preempted() => "none".to_string(),
                None => return None,
            };
            let why = format!("give {nodes} back to a job before it: {left} after this step");
            return Some((StopCause::Shrink, why));
        }
        let leaves = |worker: &Worker| worker.stopping || !self.index.is_usable(&worker.node);
        let mover = self.members(gang).flatten().find(|worker| leaves(worker));
        if let Some(mover) = mover.filter(|mover| mover.stopping || newcomers > 0) {
            let why = format!("move off {} after this step", mover.node);
            return Some((StopCause::Move, why));
        }
        let size = self.size_for(present + newcomers).filter(|size| size.nodes > present)?;
        let why = format!("grow from {present} to {} nodes after this step", size.nodes);
        Some((StopCause::Growth, why))
    }

    /// Members on nodes that a job before this one waits for.
    fn called_back(&self, gang: &'o Gang) -> u32 {
        let members = self.members(gang).flatten();
        members.filter(|worker| self.index.is_called_back(&worker.node)).count() as u32
    }

    /// A growth keeps all members, so memory has all that is needed; in other cases shards that
    /// only one worker holds may go.
    fn request(&mut self, gang: &Gang, cause: StopCause) {
        let checkpoint_now = cause != StopCause::Growth;
        let request = Request { checkpoint_now, stop_after_this_step: true };
        self.act(Action::Request { attempt: gang.attempt, request, cause });
    }

    /// The gang is broken: get everybody out of it, then begin anew.
    fn end(&mut self, gang: &'o Gang, unplanned: bool, cause: String) {
        let (mut waiting, mut acknowledged, mut all_dead) = (0, false, true);
        let at_most = gang.broken.as_ref().map(|(at, _)| at + FENCE_TIMEOUT);
        for worker in self.members(gang).flatten().filter(|worker| !worker.is_dead()) {
            all_dead = false;
            match worker.state {
                WorkerState::Member { attempt, leaving, .. } if attempt == gang.attempt => {
                    // One that is being ended needs no goodbye: its attempt's number fences it.
                    let waits = !self.is_ending(worker)
                        && self.ask_to_leave(worker, attempt, leaving, at_most, &cause);
                    waiting += u32::from(waits);
                }
                // A new leader has not reached it yet; it may hold what nobody else does.
                WorkerState::Starting { .. } => waiting += u32::from(!self.is_ending(worker)),
                WorkerState::Silent => {}
                // Its stream lives and says that it takes no part.
                _ => acknowledged = true,
            }
        }
        if waiting > 0 {
            let attempt = gang.attempt;
            let text = format!("attempt {attempt} is broken ({cause}): {waiting} to leave it");
            return self.why(text);
        }
        if !acknowledged && !all_dead && at_most.is_none_or(|due| self.now < due) {
            return self.await_fence(gang, &cause, at_most);
        }
        self.why(format!("attempt {} is over: {cause}", gang.attempt));
        self.act(Action::EndAttempt { attempt: gang.attempt, unplanned, cause });
    }

    /// Nobody has acknowledged leaving, and not all are known dead. The clock of the fence starts
    /// with the first action on a member.
    fn await_fence(&mut self, gang: &'o Gang, cause: &str, due: Option<Millis>) {
        self.why(format!("attempt {} is broken ({cause}): nobody answers", gang.attempt));
        if let Some(due) = due {
            return self.look_again_at(due);
        }
        let members: Vec<&Worker> = self.members(gang).flatten().collect();
        if members.iter().any(|worker| !worker.stopping && self.is_ending(worker)) {
            return;
        }
        // The stream may come back and deliver it.
        for worker in members.iter().filter(|worker| !worker.is_dead()) {
            let (name, reason) = (worker.name.clone(), cause.to_string());
            self.act(Action::LeaveAttempt { name, attempt: gang.attempt, reason });
        }
    }

    fn members(&self, gang: &'o Gang) -> impl Iterator<Item = Option<&'o Worker>> + use<'o> {
        let workers: Vec<_> =
            gang.members.iter().map(|member| self.index.worker(&member.worker)).collect();
        workers.into_iter()
    }

    /// The largest gang that `nodes` workers can form.
    fn size_for(&self, nodes: u32) -> Option<&'o Size> {
        let wanted = &self.observed.wanted;
        let range = wanted.nodes_min..=wanted.nodes_max.min(nodes);
        wanted.sizes.iter().rfind(|size| range.contains(&size.nodes))
    }

    fn is_ending(&self, worker: &Worker) -> bool {
        worker.stopping || self.ending.contains(worker.name.as_str())
    }

    fn stop(&mut self, worker: &'o Worker, grace: Millis, reason: &str) {
        // One that never connected can also be the laggard.
        if !self.ending.insert(&worker.name) {
            return;
        }
        self.why(format!("stop {}: {reason}", worker.name));
        self.act(Action::StopWorker { name: worker.name.clone(), grace });
    }

    fn look_again_at(&mut self, at: Millis) {
        if at > self.now {
            self.plan.requeue = Some(self.plan.requeue.map_or(at, |other| other.min(at)));
        }
    }

    fn act(&mut self, action: Action) {
        self.plan.actions.push(action);
    }

    fn why(&mut self, reason: String) {
        self.plan.why.push(reason);
    }
}

fn describe(outcome: &Outcome) -> String {
    match outcome {
        Outcome::Complete { step } => all_done(*step),
        Outcome::Failed { reason, message, .. } => format!("{reason}: {message}"),
        Outcome::Suspended => "suspended".to_string(),
        Outcome::Interrupted => "interrupted".to_string(),
    }
}

/// `all 20 steps are done`.
pub(crate) fn all_done(steps: u64) -> String {
    match steps {
        1 => "its only step is done".to_string(),
        steps => format!("all {steps} steps are done"),
    }
}
