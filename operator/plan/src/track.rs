//! Keeps an `Observed` true: what was heard of workers, and what was done to them.
//!
//! Pure as well: the shell calls one method a happening, with the time, and gets back what a person
//! should be told.

mod connected;
mod frozen;
mod waiting;
mod measured;
mod paired;
mod rings;
mod seats;
mod lost_engines;

use crate::decide::Action;
use crate::engines::{EngineLoss, Engines, number};
use crate::observed::{
    Gang, Millis, Observed, Outcome, Record, StopCause, Stored, Worker, WorkerState, keep_newest,
};
use crate::preflight::Grade;
use crate::repeat::{End, is_own_fault};
pub use crate::recovery::Recovery;
use moejob_fabric::Found;
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::message::{LeftReason, Phase, Up};
use moejob_protocol::report::{Event, EventKind};
use std::collections::{BTreeMap, BTreeSet};

/// Layouts of past attempts that are remembered though no worker has reported a snapshot of them.
const LAYOUTS_KEPT: usize = 8;
/// Layouts that are remembered at most. A worker holds two generations of its own shard and two of
/// another's, so only a gang that broke this often before its first step could need more.
const LAYOUTS_MAX: usize = 64;
/// Steps over which the median duration is taken.
const STEP_DURATIONS_KEPT: usize = 15;
/// Workers that fail within this time have failed at once.
const AT_ONCE: Millis = 1_000;
/// Partings that are remembered.
const PARTINGS_KEPT: usize = 64;
const DEVICE_FAILURES_KEPT: usize = 256;
/// The exit code of a program that found a mistake of its own.
const PANICKED: i32 = 101;
const FENCED: i32 = 75;
/// Recoveries that stand in status.
const RECOVERIES_KEPT: usize = 10;

/// What happened, for events and logs.
#[derive(Clone, Debug, PartialEq)]
pub enum Happening {
    WorkerLost { name: String, cause: String },
    /// Nothing is heard of it, and its node is to freeze.
    Freezes { name: String, node: String },
    EngineLost(EngineLoss),
    /// A node was measured, and it is not good: what was found.
    Measured { node: String, grade: Grade, text: String },
    /// All ranks have told what NCCL has built.
    Rings(Found),
    Recovered(Recovery),
}

/// An `Observed` and what else is needed to keep it.
#[derive(Clone, Debug)]
pub struct Tracker {
    pub observed: Observed,
    pub recoveries: Vec<Recovery>,
    pub engines: Engines,
    last_words: Vec<LastWords>,
    present: Present,
    /// Attempts up to this one are an earlier job's, which had the same folder.
    taken: u32,
    /// What actions have shown, until somebody takes it.
    news: Vec<Happening>,
}

/// What a worker said before it ended.
#[derive(Clone, Debug)]
struct LastWords {
    worker: String,
    exit_code: i32,
    message: String,
    /// Steps done, where it ended in one.
    step: Option<u64>,
}

/// What is known of the present gang, and begins anew with the next.
#[derive(Clone, Debug, Default)]
struct Present {
    /// When its newest steps were done, and the last of them.
    step_times: Vec<Millis>,
    last_step: u64,
    /// Members that have found the others.
    joined: BTreeSet<String>,
    /// Of members that open their data: how much life they have shown.
    loading: BTreeMap<String, u64>,
    /// Of members that have done their last step: the collective that they have reached.
    waiting: BTreeMap<String, u64>,
    /// The rank that was the first to leave because it had lost another, and that other's.
    parted: Option<(u32, u32)>,
    /// How the first engine ended that gave up itself.
    engine_end: Option<String>,
}

impl Tracker {
    /// A record of another job (a status that was restored into a new object of the same name)
    /// tells of workers that are not this one's. Its attempt counts on, so that what the other
    /// still writes is fenced.
    pub fn new(mut observed: Observed) -> Tracker {
        let record = &mut observed.record;
        if !record.job_uid.is_empty() && record.job_uid != observed.template.job_uid {
            *record = Record { attempt: record.attempt, ..Record::default() };
        }
        if let Some(gang) = &mut record.gang {
            gang.inherited = true;
        }
        Tracker {
            observed,
            recoveries: Vec::new(),
            engines: Engines::default(),
            last_words: Vec::new(),
            present: Present::default(),
            taken: 0,
            news: Vec::new(),
        }
    }

    fn worker(&mut self, name: &str) -> Option<&mut Worker> {
        self.observed.worker_mut(name)
    }

    /// An action has been carried out.
    pub fn done(&mut self, action: &Action, now: Millis) {
        match action {
            Action::StartWorker { name, node } => self.started(name, node, now),
            Action::StopWorker { name, grace } => {
                if let Some(worker) = self.worker(name) {
                    worker.stopping = true;
                    let starting = matches!(worker.state, WorkerState::Starting { .. });
                    let what = match worker.state {
                        WorkerState::Silent => "went silent",
                        WorkerState::Starting { .. } => "did not connect",
                        _ => "was ended",
                    };
                    let cause = format!("{name} {what}");
                    // One that is ended because the job is over has not failed, and one that no
                    // node took has not begun.
                    let failed = starting && *grace == 0 && !worker.unplaced;
                    if failed && self.observed.record.outcome.is_none() {
                        self.start_failed(&cause, now);
                    }
                    self.member_stopped(name, cause, now);
                }
            }
            Action::EndAttempt { unplanned, cause, .. } => self.end(*unplanned, cause, now),
            Action::RecordAttempt(gang) => {
                let record = &mut self.observed.record;
                record.job_uid = self.observed.template.job_uid.clone();
                record.attempt = gang.attempt;
                record.gang = Some((**gang).clone());
                record.start_failures.clear();
                record.start_failure.clear();
                record.first_lost = None;
                self.present = Present { last_step: gang.resumed_at, ..Present::default() };
                self.observed.late_data.clear();
                self.observed.late_checkpoints.clear();
                if let Some(recovery) = self.open_recovery() {
                    (recovery.replanned_at, recovery.rejoined_at) = (Some(now), None);
                }
            }
            Action::GiveUp { name } => self.gave_up(name),
            Action::Preflight { name } => self.measures(name, now),
            Action::NoteUnmeasured { name } => self.unmeasured(name, now),
            Action::MeasurePairs(round) => self.measures_pairs(round, now),
            Action::RelayPair { number, .. } => self.pair_relayed(*number),
            Action::EndPair { number, late } => self.pair_ended(*number, *late, now),
            Action::Configure { name, rank, config } => {
                let (attempt, rank) = (config.attempt, *rank);
                // One that was lost while the attempt was recorded stays lost.
                let is_there = |worker: &&mut Worker| {
                    matches!(worker.state, WorkerState::Idle | WorkerState::Left { .. })
                };
                if let Some(worker) = self.worker(name).filter(is_there) {
                    let digest = config.digest.clone();
                    worker.state = WorkerState::Member { attempt, digest, rank, leaving: None };
                    worker.collective = 0;
                }
            }
            Action::LeaveAttempt { name, attempt, reason } => {
                if let Some(gang) = self.observed.record.gang.as_mut()
                    && (gang.attempt, gang.ended) == (*attempt, None)
                {
                    let at = gang.broken.as_ref().map_or(now, |(at, _)| *at);
                    gang.broken = Some((at, reason.clone()));
                    self.detect(reason, now);
                }
                if let Some(worker) = self.worker(name)
                    && let WorkerState::Member { leaving, .. } = &mut worker.state
                {
                    *leaving = Some(now);
                }
            }
            Action::BePatient { name, attempt } => {
                if let Some(worker) = self.worker(name) {
                    worker.patient_in = Some(*attempt);
                }
            }
            Action::Request { cause, .. } => {
                let record = &mut self.observed.record;
                if let Some(gang) = &mut record.gang {
                    gang.stop_requested = Some((*cause, now));
                }
            }
            Action::AvoidNode { node, until } => {
                let nodes = &mut self.observed.nodes;
                if let Some(of) = nodes.iter_mut().find(|of| of.name == *node) {
                    of.avoid_until = of.avoid_until.max(*until);
                }
                self.observed.record.partings.retain(|(a, b, _)| a != node && b != node);
                self.observed.record.device_failures.retain(|failure| failure.node != *node);
            }
            Action::NoteStop => self.observed.record.stopping_since = Some(now),
            Action::WithdrawStop => self.withdraw_stop(),
            Action::Finish(outcome) => self.finish(outcome),
        }
    }

    /// Whoever says first that all is done has seen the last step and its checkpoint, also where
    /// the rank that reports both is heard later.
    fn finish(&mut self, outcome: &Outcome) {
        let observed = &mut self.observed;
        if let Outcome::Complete { step } = outcome {
            observed.record.step = observed.record.step.max(*step);
            if observed.stored.as_ref().is_none_or(|stored| stored.step < *step) {
                observed.stored = Some(Stored { step: *step, name: directory_name(*step) });
            }
        }
        observed.record.outcome = Some(outcome.clone());
    }

    /// Of several that were to start together an earlier one may not have: its number is left out,
    /// or the next one would get this one's name.
    fn started(&mut self, name: &str, node: &str, now: Millis) {
        let births = &mut self.observed.record.births;
        let slot = name.rsplit('-').next().and_then(|slot| slot.parse::<u32>().ok());
        *births = slot.map_or(*births, |slot| slot.max(*births)).saturating_add(1);
        // A leader before this one may have made it.
        if self.worker(name).is_none() {
            self.observed.workers.push(Worker::starting(name, node, now));
        }
    }

    /// A member that is ended, unless the whole job is over, breaks its gang.
    fn member_stopped(&mut self, name: &str, cause: String, now: Millis) {
        let record = &mut self.observed.record;
        if let Some(gang) = record.gang.as_mut().filter(|gang| gang.ended.is_none())
            && record.outcome.is_none()
            && gang.has(name)
        {
            gang.broken.get_or_insert((now, cause));
        }
    }

    /// What a gang was asked for cannot be taken back, only that nothing shall follow it.
    fn withdraw_stop(&mut self) {
        let record = &mut self.observed.record;
        record.stopping_since = None;
        record.outcome.take_if(|outcome| *outcome == Outcome::Suspended);
        let asked = record.gang.as_mut().and_then(|gang| gang.stop_requested.as_mut());
        if let Some((cause, _)) = asked.filter(|(cause, _)| cause.halts()) {
            *cause = StopCause::Withdrawn;
        }
    }

    /// A worker ended before an attempt began with it. Several at once count once, and while a
    /// gang trains they cost it nothing.
    fn start_failed(&mut self, cause: &str, now: Millis) {
        let since = now.saturating_sub(self.observed.wanted.restart_window);
        let trains = self.observed.gang().is_some();
        let record = &mut self.observed.record;
        record.start_failures.retain(|at| *at >= since);
        let counted = record.start_failures.last().is_some_and(|at| now < at + AT_ONCE);
        if !trains && !counted {
            record.start_failures.push(now);
            record.start_failure = cause.to_string();
        }
    }

    /// The two nodes that have lost each other, if that is why the present gang is over: both their
    /// workers live, as do all others, and no engine was lost before.
    fn parting(&self) -> Option<(String, String)> {
        let (mut from, mut lost) = self.present.parted?;
        if self.observed.record.first_lost.is_some() {
            return None;
        }
        let gang = self.observed.gang()?;
        let member = |rank: u32| gang.member_of(rank);
        let same = |a: u32, b: u32| member(a).map(|of| of.rank) == member(b).map(|of| of.rank);
        let lives = |worker: &Worker| {
            !worker.stopping && !worker.is_dead() && worker.state != WorkerState::Silent
        };
        if !gang.members.iter().all(|of| self.observed.worker(&of.worker).is_some_and(lives)) {
            return None;
        }
        // The one that was lost may itself have left because it had lost a third.
        for _ in &gang.members {
            match &self.observed.worker(&member(lost)?.worker)?.state {
                WorkerState::Left { reason: LeftReason::PeerLost { rank }, .. }
                    if !same(*rank, from) =>
                {
                    (from, lost) = (lost, *rank);
                }
                WorkerState::Left { reason: LeftReason::PeerLost { .. }, .. }
                | WorkerState::Left { reason: LeftReason::Asked, .. } => break,
                _ => return None,
            }
        }
        let mut nodes = [member(from)?.node.clone(), member(lost)?.node.clone()];
        nodes.sort();
        let [a, b] = nodes;
        (a != b).then_some((a, b))
    }

    fn end(&mut self, unplanned: bool, cause: &str, now: Millis) {
        if unplanned {
            let since = now.saturating_sub(self.observed.wanted.restart_window);
            let parting = self.parting();
            let partings = &mut self.observed.record.partings;
            partings.retain(|(.., at)| *at >= since);
            partings.extend(parting.map(|(a, b)| (a, b, now)));
            keep_newest(partings, PARTINGS_KEPT);
            self.detect(cause, now);
            self.note_repeat();
            let restarts = &mut self.observed.record.restarts;
            restarts.retain(|at| *at >= since);
            restarts.push(now);
        }
        if let Some(gang) = &mut self.observed.record.gang {
            gang.ended = Some(now);
            self.observed.record.attempt = self.taken.max(gang.attempt);
            let layout = (gang.attempt, gang.layout.clone());
            self.observed.record.layouts.push(layout);
            self.forget_layouts();
        }
    }

    /// What the worker, or the engine, said that ended the present attempt, and behind which step.
    fn note_repeat(&mut self) {
        let gang = self.observed.gang();
        let stepped = gang.is_some_and(|gang| gang.stepped);
        let members = gang.into_iter().flat_map(|gang| &gang.members);
        let said = members.into_iter().find_map(|member| self.why_it_ended(&member.worker));
        let of_engine = || self.present.engine_end.clone().map(|words| (words, None));
        let end = said.or_else(of_engine).map(|(words, step)| End {
            words,
            step: step.unwrap_or(self.present.last_step),
            in_step: step.is_some() || stepped,
        });
        let repeat = &mut self.observed.record.repeat;
        match end {
            Some(end) => repeat.note(end),
            None => repeat.clear(),
        }
    }

    /// The reason that a worker gave itself, and the step that it ended in. One that was killed, or
    /// fenced, gives none.
    fn why_it_ended(&self, name: &str) -> Option<(String, Option<u64>)> {
        let of_it = |said: &&LastWords| said.worker == name && said.exit_code != FENCED;
        let said = self.last_words.iter().find(of_it);
        let panicked = || match &self.observed.worker(name)?.state {
            WorkerState::Dead { exit_code: Some(PANICKED), message } => Some(message.clone()),
            WorkerState::Dead { exit_code: None, message } => {
                is_own_fault(message).then(|| message.clone())
            }
            _ => None,
        };
        let said = said.map(|said| (said.message.clone(), said.step));
        said.or_else(|| panicked().map(|message| (message, None)))
    }

    fn forget_layouts(&mut self) {
        let Observed { workers, record, .. } = &mut self.observed;
        let held = |attempt: u32| {
            workers.iter().flat_map(|worker| &worker.held).any(|held| held.attempt == attempt)
        };
        let oldest_kept = record.layouts.len().saturating_sub(LAYOUTS_KEPT);
        let mut index = 0;
        record.layouts.retain(|(attempt, _)| {
            index += 1;
            index > oldest_kept || held(*attempt)
        });
        keep_newest(&mut record.layouts, LAYOUTS_MAX);
    }

    /// A loss was noticed: the clock of its recovery starts. A second loss before the first step
    /// after it is part of the same recovery.
    fn detect(&mut self, cause: &str, now: Millis) {
        let attempt = self.observed.record.attempt;
        if self.open_recovery().is_some() {
            return;
        }
        self.recoveries.push(Recovery {
            cause: cause.to_string(),
            attempt,
            detected_at: now,
            replanned_at: None,
            rejoined_at: None,
            first_step_at: None,
            steps_lost: 0,
        });
        keep_newest(&mut self.recoveries, RECOVERIES_KEPT);
    }

    fn open_recovery(&mut self) -> Option<&mut Recovery> {
        self.recoveries.last_mut().filter(|recovery| recovery.first_step_at.is_none())
    }

    /// Something that a worker said about `attempt`.
    pub fn heard(&mut self, name: &str, attempt: u32, up: &Up, now: Millis) -> Vec<Happening> {
        self.thawed(name, now);
        match up {
            Up::Hello(_) => {}
            Up::Event(event) => {
                self.stored(attempt, event);
                self.late(name, attempt, event);
                return self.note_engine(name, event, now);
            }
            Up::Heartbeat(heartbeat) => {
                if let Some(worker) = self.worker(name).filter(|worker| !worker.is_dead()) {
                    if worker.held != heartbeat.held {
                        worker.held.clone_from(&heartbeat.held);
                    }
                    worker.collective = heartbeat.collective;
                }
                if !matches!(heartbeat.phase, Phase::Idle | Phase::Joining) {
                    self.rejoined(name, attempt, now);
                }
                if let Some(loading) = &heartbeat.loading {
                    self.loaded(name, attempt, loading.life, now);
                }
                if heartbeat.phase == Phase::Stopping {
                    self.waits(name, attempt, heartbeat.collective, now);
                }
            }
            Up::Preflight(answer) => return self.measured(name, answer, now),
            Up::Pair(answer) => return self.paired(name, answer, now),
            Up::Built(built) => return self.built(name, attempt, built),
            Up::Seated(seated) => self.seated(name, attempt, seated),
            Up::Step(report) => return self.stepped(attempt, report.step, now),
            Up::Left { reason, held } => {
                self.note_parted(attempt, name, reason);
                if let Some(worker) = self.worker(name).filter(|worker| !worker.is_dead()) {
                    worker.held = held.clone();
                    let is_in = |state: &WorkerState| {
                        matches!(state, WorkerState::Member { attempt: of, .. } if *of == attempt)
                    };
                    if is_in(&worker.state) {
                        worker.state = WorkerState::Left { attempt, reason: reason.clone() };
                    }
                }
            }
            Up::Completed { step } => {
                let (step, newest) = (*step, self.observed.record.attempt);
                // One that was given up may complete too; its checkpoint does not count.
                if let Some(worker) = self.worker(name).filter(|worker| !worker.is_dead())
                    && attempt == newest
                {
                    worker.state = WorkerState::Completed { attempt, step };
                }
            }
            Up::Failed { exit_code, message, step } => {
                // What it says first is why; what comes after it is noise.
                if self.last_words.iter().all(|said| said.worker != name) {
                    let (worker, message) = (name.to_string(), message.clone());
                    let said = LastWords { worker, exit_code: *exit_code, message, step: *step };
                    self.last_words.push(said);
                }
            }
        }
        Vec::new()
    }

    fn rejoined(&mut self, name: &str, attempt: u32, now: Millis) {
        let Some(gang) = self.observed.gang().filter(|gang| gang.attempt == attempt) else {
            return;
        };
        let members = gang.members.len();
        // Each heartbeat comes here: who has joined is found without a walk over the gang.
        if !self.present.joined.contains(name) {
            if !gang.has(name) {
                return;
            }
            self.present.joined.insert(name.to_string());
        }
        let all = self.present.joined.len() == members;
        if let Some(recovery) = self.open_recovery().filter(|of| all && of.replanned_at.is_some()) {
            recovery.rejoined_at.get_or_insert(now);
        }
    }

    /// The first to leave tells most: what follows may be its doing, or the leader's.
    fn note_parted(&mut self, attempt: u32, name: &str, reason: &LeftReason) {
        let first = |gang: &&Gang| gang.broken.is_none() && self.present.parted.is_none();
        let gang = self.observed.gang().filter(|gang| gang.attempt == attempt);
        let Some(gang) = gang.filter(first) else { return };
        let rank = gang.members.iter().find(|of| of.worker == name).map(|member| member.rank);
        if let (Some(from), LeftReason::PeerLost { rank }) = (rank, reason) {
            self.present.parted = Some((from, *rank));
        }
    }

    /// What a worker has done to the storage or found there. A checkpoint of an attempt that was
    /// given up does not count: a later claim is behind it.
    fn stored(&mut self, attempt: u32, event: &Event) {
        if event.event == EventKind::AttemptsClaimed {
            let taken = number(event, "claimed").and_then(|taken| u32::try_from(taken).ok());
            // An attempt is far from 2^32, unless the claim is nonsense.
            let taken = taken.filter(|taken| *taken < u32::MAX / 2);
            self.taken = self.taken.max(taken.unwrap_or(0));
        }
        let Some(step) = number(event, "step") else { return };
        let stored = &mut self.observed.stored;
        match event.event {
            _ if attempt != self.observed.record.attempt => {}
            EventKind::CheckpointCommitted
                if stored.as_ref().is_none_or(|stored| stored.step < step) =>
            {
                *stored = Some(Stored { step, name: directory_name(step) });
            }
            // It is damaged; what can be used instead is told next.
            EventKind::CheckpointRefused => drop(stored.take_if(|of| of.step == step)),
            _ => {}
        }
    }

    fn stepped(&mut self, attempt: u32, step: u64, now: Millis) -> Vec<Happening> {
        let record = &mut self.observed.record;
        let Some(gang) = record.gang.as_mut().filter(|gang| gang.attempt == attempt) else {
            return Vec::new();
        };
        // Each step counts once, whoever reports it.
        if step <= self.present.last_step {
            return Vec::new();
        }
        self.present.last_step = step;
        let first = !std::mem::replace(&mut gang.stepped, true);
        let lost = record.step.saturating_sub(gang.resumed_at);
        record.step = record.step.max(step);
        record.progressed_at = now;
        self.present.step_times.push(now);
        keep_newest(&mut self.present.step_times, STEP_DURATIONS_KEPT + 1);
        let mut durations: Vec<Millis> =
            self.present.step_times.windows(2).map(|pair| pair[1] - pair[0]).collect();
        durations.sort_unstable();
        self.observed.record.step_median = durations.get(durations.len() / 2).copied().unwrap_or(0);
        if first && let Some(recovery) = self.open_recovery().filter(|r| r.replanned_at.is_some()) {
            // It had joined before, and no heartbeat has told yet.
            recovery.rejoined_at.get_or_insert(now);
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
        self.note_first(name);
        vec![Happening::WorkerLost { name: name.to_string(), cause: cause.to_string() }]
    }

    /// The process or pod has ended.
    pub fn exited(
        &mut self,
        name: &str,
        exit_code: Option<i32>,
        how: &str,
        now: Millis,
    ) -> Vec<Happening> {
        let said = self.last_words.iter().find(|said| said.worker == name).cloned();
        let Some(worker) = self.worker(name) else {
            return Vec::new();
        };
        if matches!(worker.state, WorkerState::Completed { .. } | WorkerState::Dead { .. }) {
            return Vec::new();
        }
        let known = worker.stopping || worker.state == WorkerState::Silent;
        let early = matches!(worker.state, WorkerState::Starting { .. } | WorkerState::Idle);
        // One that said how it would end may have been killed before it could: its word counts.
        let exit_code = exit_code.or(said.as_ref().map(|said| said.exit_code));
        let message = said.map_or_else(|| how.to_string(), |said| said.message);
        worker.state = WorkerState::Dead { exit_code, message: message.clone() };
        worker.held.clear();
        if known {
            return Vec::new();
        }
        self.note_first(name);
        if early {
            self.start_failed(&format!("{name} {message}"), now);
        }
        vec![Happening::WorkerLost { name: name.to_string(), cause: message }]
    }

    /// Forgets workers that have ended and that the present gang does not name.
    pub fn prune(&mut self) {
        let Observed { record, workers, .. } = &mut self.observed;
        let gang = record.gang.as_ref().filter(|gang| gang.ended.is_none());
        let named = |name: &str| gang.is_some_and(|gang| gang.has(name));
        workers.retain(|worker| {
            let failed =
                matches!(worker.state, WorkerState::Dead { exit_code: Some(2 | 3), .. });
            !worker.is_dead() || failed || named(&worker.name)
        });
        let workers = &self.observed.workers;
        self.last_words.retain(|said| workers.iter().any(|worker| worker.name == said.worker));
        let observed = &self.observed;
        self.engines.prune(|name| observed.worker(name).is_some());
    }
}
