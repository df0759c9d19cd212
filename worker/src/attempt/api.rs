//! What the shell (`run.rs`, control thread) and the trainers (`trainer.rs`, one an engine) say to
//! each other.

use crate::disk::{Disk, Progress, Stamina, Stumbling, Trouble};
use crate::failure::Failure;
use crate::gang::comm::{AbortHandle, CommError};
use crate::gang::memory::Mapping;
use moejob_protocol::links::Built;
use moejob_protocol::seat::Seated;
use moejob_protocol::message::{Held, Loading, Phase, Request};
use moejob_protocol::report::{Event, StepReport};
use serde::{Deserialize, Serialize};
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Duration;

/// What a worker and one of its engines share while the engine computes; a clone is the same one.
///
/// ```text
/// u32 requests | u32 phase | u64 step | u32 beats | u32 patience | u64 loaded, to load, life
/// 48 u32 waits | of what stumbles: u32 number, state, milliseconds, version | 72 its text
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
const WAITS: usize = 48;
const STUMBLES: usize = 52;
const STUMBLES_HOW: usize = 56;
const STUMBLED_MS: usize = 60;
const STUMBLES_VERSION: usize = 64;
const STUMBLES_WHY: usize = 72;
const WHY_ROOM: usize = 392;
const BYTES: usize = STUMBLES_WHY + WHY_ROOM;

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

    /// Bytes done and in all, and that so much more was done of whatever kind. Both an engine and
    /// its worker may have something to tell.
    pub fn set_loaded(&self, (done, all): (u64, u64), more: u64) {
        for (field, count) in [(LOADED, done), (TO_LOAD, all)] {
            self.memory.long(self.at + field).store(count, Ordering::Relaxed);
        }
        self.memory.long(self.at + LIFE).fetch_add(more, Ordering::Relaxed);
    }

    /// Something was done that takes as long as the user's sizes make it: a micro-batch, weights.
    pub fn stir(&self) {
        self.memory.long(self.at + LIFE).fetch_add(1, Ordering::Relaxed);
    }

    /// How far the rank is with what it reads, and what else shows life.
    pub fn loading(&self) -> Option<Loading> {
        let count = |field| self.memory.long(self.at + field).load(Ordering::Relaxed);
        let (bytes_done, bytes) = (count(LOADED), count(TO_LOAD));
        let begins = matches!(self.phase(), Phase::Idle | Phase::Joining);
        let under_way = !begins || self.waits().is_some();
        under_way.then(|| Loading { bytes_done, bytes, life: count(LIFE) })
    }

    /// Does what may take as long as storage does, and says so meanwhile.
    pub fn waiting<T>(&self, what: Wait, work: impl FnOnce() -> T) -> T {
        let word = self.word(WAITS);
        let number = (word.load(Ordering::Relaxed) >> 2).wrapping_add(1) << 2;
        word.store(number | what as u32, Ordering::Relaxed);
        let done = work();
        word.store(number, Ordering::Relaxed);
        done
    }

    /// What the rank waits for, with a number that is another for each time.
    pub fn waits(&self) -> Option<(u32, Wait)> {
        let word = self.word(WAITS).load(Ordering::Relaxed);
        let what = match word & 3 {
            1 => Wait::Data,
            2 => Wait::Storage,
            _ => return None,
        };
        Some((word >> 2, what))
    }

    /// Shows what stumbles, where that has changed.
    fn show(&self, what: Wait, trouble: &Trouble) {
        let version = trouble.version() as u32;
        if self.word(STUMBLES_VERSION).swap(version, Ordering::AcqRel) == version {
            return;
        }
        let Some(Stumbling { number, why, lasted }) = trouble.last() else { return };
        let lasted = lasted.map(|lasted| u32::try_from(lasted.as_millis()).unwrap_or(u32::MAX));
        self.word(STUMBLED_MS).store(lasted.unwrap_or(0), Ordering::Relaxed);
        self.memory.write_text(self.at + STUMBLES_WHY, WHY_ROOM, &why);
        let how = what as u32 | u32::from(lasted.is_some()) << 2;
        self.word(STUMBLES_HOW).store(how, Ordering::Relaxed);
        self.word(STUMBLES).store(number as u32, Ordering::Release);
    }

    /// What stumbled last, and what it was for.
    pub fn stumbles(&self) -> Option<(Wait, Stumbling)> {
        let number = self.word(STUMBLES).load(Ordering::Acquire);
        let how = self.word(STUMBLES_HOW).load(Ordering::Relaxed);
        let lasted = Duration::from_millis(self.word(STUMBLED_MS).load(Ordering::Relaxed).into());
        let why = self.memory.read_text(self.at + STUMBLES_WHY, WHY_ROOM);
        let what = if how & 3 == Wait::Data as u32 { Wait::Data } else { Wait::Storage };
        let lasted = (how & 4 != 0).then_some(lasted);
        (number > 0).then(|| (what, Stumbling { number: number.into(), why, lasted }))
    }
}

/// What a rank waits for that is no fault of a device.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Wait {
    /// A batch, or the data to be opened.
    Data = 1,
    /// A checkpoint, or weights, to be read.
    Storage = 2,
}

/// Where reads are shown: the control of whichever attempt runs. A clone is the same one.
#[derive(Clone, Debug, Default)]
pub struct Shown {
    attempt: Arc<Mutex<Attempted>>,
    /// Of all that is read.
    progress: Progress,
}

#[derive(Debug, Default)]
struct Attempted {
    control: Option<Control>,
    abort: Option<AbortHandle>,
    /// Life that was told.
    life: u64,
}

impl Shown {
    /// An attempt begins. Reads end with it, where it can be aborted.
    pub fn begin(&self, control: Control, abort: Option<AbortHandle>, trouble: &Trouble) {
        // What is over was shown before.
        let over = trouble.last().is_none_or(|last| last.lasted.is_some());
        if over {
            let version = trouble.version() as u32;
            control.word(STUMBLES_VERSION).store(version, Ordering::Release);
        }
        let life = self.progress.life();
        let control = Some(control);
        *self.lock() = Attempted { control, abort, life };
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Attempted> {
        self.attempt.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `disk` with patience, whose reads for `what` are shown here. `unwanted` ends them.
    pub fn disk(
        &self,
        disk: &Disk,
        stamina: Stamina,
        what: Wait,
        unwanted: impl Fn() -> bool + Send + Sync + 'static,
    ) -> Disk {
        let trouble = Trouble::default();
        let (shown, aborted, stumbling) = (self.clone(), self.clone(), trouble.clone());
        let progress = self.progress.seen_by(move |counts, life| {
            let mut attempt = shown.lock();
            let more = life.saturating_sub(attempt.life);
            attempt.life += more;
            if let Some(control) = &attempt.control {
                control.set_loaded(counts, more);
                control.show(what, &stumbling);
            }
        });
        let progress = progress.until(move || {
            aborted.lock().abort.as_ref().is_some_and(AbortHandle::is_aborted) || unwanted()
        });
        disk.counting(progress).patient(stamina, trouble)
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
    fn a_wait_and_what_stumbles_are_seen_by_the_worker() {
        let (control, shown) = (Control::default(), Shown::default());
        let stamina = Stamina {
            longest: Duration::from_secs(60),
            retry: Duration::from_millis(1),
            known: Arc::default(),
        };
        let disk = shown.disk(&Disk::real(), stamina, Wait::Data, || false);
        shown.begin(control.clone(), None, disk.trouble());
        assert_eq!((control.waits(), control.stumbles(), control.loading()), (None, None, None));
        let mut tries = 0;
        let path = std::path::Path::new("/data/a.bin");
        let found = control.waiting(Wait::Data, || {
            disk.patiently(path, None, |_| {
                tries += 1;
                if tries == 3 {
                    let (what, stumbling) = control.stumbles().expect("it stumbles");
                    assert_eq!((what, stumbling.number, stumbling.lasted), (Wait::Data, 1, None));
                    assert!(stumbling.why.starts_with("/data/a.bin: "), "{}", stumbling.why);
                    assert!(control.loading().expect("it waits").life > 0);
                    return Ok(7);
                }
                assert_eq!(control.waits().map(|(_, what)| what), Some(Wait::Data));
                Err(std::io::Error::from_raw_os_error(libc::EIO))
            })
        });
        assert_eq!(found.expect("well again"), 7);
        assert_eq!(control.waits(), None);
        let (_, over) = control.stumbles().expect("it did");
        assert!(over.lasted.is_some());
        // The next attempt is not told of it once more.
        let next = Control::default();
        shown.begin(next.clone(), None, disk.trouble());
        disk.progress().stir();
        assert_eq!(next.stumbles(), None);
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
