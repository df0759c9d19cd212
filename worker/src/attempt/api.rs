//! What the shell (`run.rs`, control thread) and the trainers (`trainer.rs`, one an engine) say to
//! each other.

use crate::data::Progress;
use crate::failure::Failure;
use crate::gang::comm::CommError;
use crate::gang::memory::Mapping;
use moejob_protocol::links::Built;
use moejob_protocol::seat::Seated;
use moejob_protocol::message::{Held, Loading, Phase, Request};
use moejob_protocol::report::{Event, StepReport};
use std::sync::Arc;
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU32, Ordering};
use std::time::Duration;

/// What a worker and one of its engines share while the engine computes; a clone is the same one.
///
/// ```text
/// u32 requests | u32 phase | u64 step | u32 beats | u32 patience | u64 loaded, to load, life
/// ```
#[derive(Clone, Debug)]
pub struct Control {
    memory: Arc<Mapping>,
    at: usize,
}

const REQUESTS: usize = 0;
const PHASE: usize = 4;
const STEP: usize = 8;
const BEATS: usize = 16;
const PATIENCE: usize = 20;
const LOADED: usize = 24;
const TO_LOAD: usize = 32;
const LIFE: usize = 40;
const BYTES: usize = 64;

impl Default for Control {
    fn default() -> Control {
        Control::new(Arc::new(Mapping::private(BYTES)), 0)
    }
}

const CHECKPOINT_NOW: u32 = 1;
const STOP_AFTER_THIS_STEP: u32 = 2;
const PHASES: [Phase; 6] = [
    Phase::Idle,
    Phase::Joining,
    Phase::Loading,
    Phase::Training,
    Phase::Validating,
    Phase::Stopping,
];

impl Control {
    /// At `at` of `memory`, which is zero there at first.
    pub fn new(memory: Arc<Mapping>, at: usize) -> Control {
        Control { memory, at }
    }

    fn word(&self, field: usize) -> &AtomicU32 {
        self.memory.word(self.at + field)
    }

    /// Adds to what is asked already.
    pub fn request(&self, request: Request) {
        let bits = u32::from(request.checkpoint_now) * CHECKPOINT_NOW
            | u32::from(request.stop_after_this_step) * STOP_AFTER_THIS_STEP;
        self.word(REQUESTS).fetch_or(bits, Ordering::AcqRel);
    }

    /// What is asked since the last call. The trainer calls it once a step and puts the answer
    /// into the step's control word.
    pub fn take_requests(&self) -> Request {
        let bits = self.word(REQUESTS).swap(0, Ordering::AcqRel);
        Request {
            checkpoint_now: bits & CHECKPOINT_NOW != 0,
            stop_after_this_step: bits & STOP_AFTER_THIS_STEP != 0,
        }
    }

    /// Machines of the attempt may stand still for so long: steps may take longer by that.
    pub fn be_patient(&self, seconds: u32) {
        self.word(PATIENCE).store(seconds, Ordering::Relaxed);
    }

    pub fn patience(&self) -> Duration {
        Duration::from_secs(self.word(PATIENCE).load(Ordering::Relaxed).into())
    }

    pub fn set_phase(&self, phase: Phase) {
        self.word(PHASE).store(phase as u32, Ordering::Relaxed);
    }

    pub fn phase(&self) -> Phase {
        let phase = self.word(PHASE).load(Ordering::Relaxed) as usize;
        PHASES.get(phase).copied().unwrap_or(Phase::Idle)
    }

    /// Steps done.
    pub fn set_step(&self, step: u64) {
        self.memory.long(self.at + STEP).store(step, Ordering::Relaxed);
    }

    pub fn step(&self) -> u64 {
        self.memory.long(self.at + STEP).load(Ordering::Relaxed)
    }

    /// An engine that runs at all counts on, whatever it computes.
    pub fn beat(&self) {
        self.word(BEATS).fetch_add(1, Ordering::Relaxed);
    }

    pub fn beats(&self) -> u32 {
        self.word(BEATS).load(Ordering::Relaxed)
    }

    /// What the opening of the data counts into.
    pub fn progress(&self) -> Progress {
        let control = self.clone();
        Progress::default().seen_by(move |counts, life| control.set_loaded(counts, life))
    }

    /// Bytes done and in all, and what grows with anything that is done.
    pub fn set_loaded(&self, (done, all): (u64, u64), life: u64) {
        for (field, count) in [(LOADED, done), (TO_LOAD, all), (LIFE, life)] {
            self.memory.long(self.at + field).store(count, Ordering::Relaxed);
        }
    }

    /// How far the opening of the data is, while that is under way.
    pub fn loading(&self) -> Option<Loading> {
        let count = |field| self.memory.long(self.at + field).load(Ordering::Relaxed);
        let (bytes_done, bytes) = (count(LOADED), count(TO_LOAD));
        let under_way = self.phase() == Phase::Loading && bytes > 0;
        under_way.then(|| Loading { bytes_done, bytes, life: count(LIFE) })
    }
}

/// What a trainer tells while an attempt runs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum TrainerEvent {
    /// Rank 0 alone.
    Step(StepReport),
    Event(Event),
    /// The snapshots in memory, whenever they change.
    Held(Vec<Held>),
    /// What NCCL has built for this rank, before the first step.
    Built(Built),
    /// Where the engine of a rank runs, when that is first read and when it changes.
    Seated(Seated),
}

/// How an attempt ended for this rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum AttemptEnd {
    /// The job's last step is done and its last checkpoint committed.
    Completed { step: u64 },
    /// `stopAfterThisStep` was reduced; a snapshot of the step is held.
    Stopped { step: u64 },
    /// A collective failed; the newest snapshot is held.
    Aborted(CommError),
    /// A higher attempt has claimed the run's directory.
    Fenced { attempt: u32 },
    Failed(Failure),
    /// Nothing that the device computes counts, until the process that used it has ended. `own`: it
    /// was the first to fail; else the loss of another rank, or memory that others have, came
    /// before.
    DeviceFailed { message: String, own: bool },
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn requests_add_up_and_are_taken_once() {
        let control = Control::default();
        control.request(Request { checkpoint_now: true, stop_after_this_step: false });
        control.clone().request(Request { checkpoint_now: false, stop_after_this_step: true });
        let both = Request { checkpoint_now: true, stop_after_this_step: true };
        assert_eq!(control.take_requests(), both);
        assert_eq!(control.take_requests(), Request::default());
    }

    #[test]
    fn steps_may_take_as_long_as_was_said_last() {
        let control = Control::default();
        assert_eq!(control.patience(), Duration::ZERO);
        control.be_patient(30);
        control.set_loaded((1, 2), 3);
        control.beat();
        assert_eq!(control.patience(), Duration::from_secs(30));
        assert_eq!(control.beats(), 1);
    }

    #[test]
    fn every_phase_survives() {
        let control = Control::default();
        for phase in PHASES {
            control.set_phase(phase);
            assert_eq!(control.phase(), phase);
        }
    }
}
