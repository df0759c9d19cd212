//! Batches ahead of the step: a thread reads what the next steps need.
//!
//! ```text
//! (seed, step, micro-batch) -> thread: Corpus -> ring of two steps -> the step, in its order
//!                                    kept for a redo: this step and the one before it
//! ```
//! What a step gets is a function of (seed, step) alone: it does not matter when it was read.

use super::{Batch, Corpus, DataError};
use crate::disk::Disk;
use std::collections::VecDeque;
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// Steps that are read ahead: one that the devices may have begun, and one behind it.
const STEPS_AHEAD: usize = 2;
/// Steps whose batches stay for a redo: run-ahead is one step.
const STEPS_KEPT: u64 = 2;
/// So often whoever waits for a batch looks whether it is still wanted.
const LOOK: Duration = Duration::from_millis(100);
/// How long the end of an attempt waits for a read that has begun: storage may hang.
const LEAVE_MAX: Duration = Duration::from_secs(1);

/// What a step trains on.
pub trait Batches {
    /// Ids, targets and starts of documents, [sequences, S] each, of micro-batch `index` of step
    /// `step`; the same whenever it is asked for.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    fn micro_batch(&mut self, step: u64, index: u32) -> Result<&Batch, DataError>;
}

/// A corpus whose batches are read by a thread, in the order in which one rank needs them.
#[derive(Debug)]
pub struct Feeder {
    corpus: Arc<Mutex<Corpus>>,
    /// The corpus's.
    disk: Disk,
    /// A batch is waited for so long at most.
    longest: Duration,
    plan: Plan,
    ring: Option<Ring>,
    /// (step, index), in the order in which they came.
    kept: VecDeque<(u64, u32, Batch)>,
    waited: Duration,
}

/// Micro-batches of one rank: of each step below `steps` those in `own`.
#[derive(Clone, Debug)]
struct Plan {
    own: std::ops::Range<u32>,
    steps: u64,
}

#[derive(Debug)]
struct Ring {
    made: Receiver<Made>,
    /// What comes next out of it.
    next: (u64, u32),
    over: Arc<AtomicBool>,
    thread: JoinHandle<()>,
}

type Made = Result<Batch, DataError>;

impl Feeder {
    /// Of a rank that computes the micro-batches `own` of each step, from step `first` on up to
    /// `steps`.
    pub fn start(corpus: Corpus, own: std::ops::Range<u32>, first: u64, steps: u64) -> Feeder {
        let (plan, disk) = (Plan { own, steps }, corpus.disk().clone());
        let corpus = Arc::new(Mutex::new(corpus));
        let ((kept, waited), longest) = (Default::default(), Duration::MAX);
        let mut feeder = Feeder { corpus, disk, longest, plan, ring: None, kept, waited };
        let start = feeder.plan.own.start;
        feeder.seek(first, start);
        feeder
    }

    /// The corpus, between two batches that the thread reads.
    pub fn corpus(&self) -> MutexGuard<'_, Corpus> {
        locked(&self.corpus)
    }

    /// For how long steps waited for a batch since the last call.
    pub fn take_waited(&mut self) -> Duration {
        std::mem::take(&mut self.waited)
    }

    /// Waits for a batch so long at most.
    pub fn with_patience(mut self, longest: Duration) -> Feeder {
        self.longest = longest;
        self
    }

    /// Waits until the batches of a step are here, so that nobody waits for them within it.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn prepare(&mut self, step: u64) -> Result<(), DataError> {
        self.plan.own.clone().try_for_each(|index| self.micro_batch(step, index).map(|_| ()))
    }

    /// Ends the thread. None where it is still reading: then the corpus ends with it.
    pub fn into_corpus(mut self) -> Option<Corpus> {
        let left = self.leave();
        let corpus = left.then(|| std::mem::take(&mut *self.corpus()));
        corpus
    }

    /// Whether the thread has ended, for which it has a moment.
    fn leave(&mut self) -> bool {
        let Some(Ring { made, over, thread, .. }) = self.ring.take() else { return true };
        over.store(true, Ordering::Relaxed);
        drop(made);
        let until = Instant::now() + LEAVE_MAX;
        while !thread.is_finished() {
            if Instant::now() >= until {
                return false;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        if let Err(panic) = thread.join() {
            resume_unwind(panic);
        }
        true
    }

    /// Reads from there on. Without a thread to be had each batch is read when it is asked for.
    fn seek(&mut self, step: u64, index: u32) {
        self.stop();
        if !self.plan.own.contains(&index) || step >= self.plan.steps {
            return;
        }
        let (corpus, plan) = (Arc::clone(&self.corpus), self.plan.clone());
        let over = Arc::new(AtomicBool::new(false));
        let (made, receiver) = sync_channel(STEPS_AHEAD * plan.own.len());
        let ended = Arc::clone(&over);
        let work = move || read_ahead(&corpus, &plan, (step, index), &ended, &made);
        let thread = std::thread::Builder::new().name("feeder".to_string()).spawn(work);
        self.ring = match thread {
            Ok(thread) => Some(Ring { made: receiver, next: (step, index), over, thread }),
            Err(error) => {
                tracing::warn!(%error, "no thread reads batches ahead");
                None
            }
        };
    }

    fn stop(&mut self) {
        let Some(Ring { made, over, thread, .. }) = self.ring.take() else { return };
        over.store(true, Ordering::Relaxed);
        // It may wait for room.
        drop(made);
        if let Err(panic) = thread.join() {
            resume_unwind(panic);
        }
    }

    /// The batch out of the ring, or read here.
    fn fetch(&mut self, step: u64, index: u32) -> Made {
        if self.ring.as_ref().is_none_or(|ring| ring.next != (step, index)) {
            self.seek(step, index);
        }
        let Some(ring) = &mut self.ring else { return read(&self.corpus, step, index) };
        let began = self.disk.now();
        let made = loop {
            match ring.made.recv_timeout(LOOK) {
                Err(RecvTimeoutError::Timeout) => {}
                other => break other.ok(),
            }
            if self.disk.progress().is_given_up() {
                return Err(DataError::GivenUp);
            }
            let waited = self.disk.now().saturating_sub(began);
            if waited >= self.longest {
                let (step, seconds) = (step + 1, waited.as_secs());
                return Err(DataError::Late { step, seconds });
            }
        };
        ring.next = self.plan.after(step, index);
        match made {
            Some(Ok(batch)) => Ok(batch),
            // Asked for again, it is read again.
            Some(Err(error)) => {
                self.stop();
                Err(error)
            }
            None => {
                self.stop();
                read(&self.corpus, step, index)
            }
        }
    }
}

impl Drop for Feeder {
    fn drop(&mut self) {
        if let Some(Ring { made, over, thread, .. }) = self.ring.take() {
            over.store(true, Ordering::Relaxed);
            drop(made);
            // One that is still reading ends by itself.
            if thread.is_finished() {
                drop(thread.join());
            }
        }
    }
}

impl Batches for Feeder {
    fn micro_batch(&mut self, step: u64, index: u32) -> Result<&Batch, DataError> {
        let place = self.kept.iter().position(|(of, at, _)| (*of, *at) == (step, index));
        if let Some(place) = place {
            return Ok(&self.kept[place].2);
        }
        let began = Instant::now();
        let batch = self.fetch(step, index)?;
        self.waited += began.elapsed();
        self.kept.retain(|(of, ..)| of + STEPS_KEPT > step && *of <= step);
        self.kept.push_back((step, index, batch));
        Ok(&self.kept[self.kept.len() - 1].2)
    }
}

impl Batches for Corpus {
    fn micro_batch(&mut self, step: u64, index: u32) -> Result<&Batch, DataError> {
        let mut batch = std::mem::take(&mut self.scratch);
        batch.resize(self.micro_batch_tokens());
        let filled = self.fill_micro_batch(step, index, &mut batch);
        self.scratch = batch;
        filled.map(|()| &self.scratch)
    }
}

impl Plan {
    fn after(&self, step: u64, index: u32) -> (u64, u32) {
        if index + 1 < self.own.end { (step, index + 1) } else { (step + 1, self.own.start) }
    }
}

fn locked(corpus: &Mutex<Corpus>) -> MutexGuard<'_, Corpus> {
    // A batch that was being read when a thread panicked is nobody's.
    corpus.lock().unwrap_or_else(PoisonError::into_inner)
}

fn read(corpus: &Mutex<Corpus>, step: u64, index: u32) -> Made {
    let mut corpus = locked(corpus);
    let mut batch = Batch::new(corpus.micro_batch_tokens());
    corpus.fill_micro_batch(step, index, &mut batch).map(|()| batch)
}

fn read_ahead(
    corpus: &Mutex<Corpus>,
    plan: &Plan,
    (mut step, mut index): (u64, u32),
    over: &AtomicBool,
    made: &SyncSender<Made>,
) {
    while step < plan.steps && !over.load(Ordering::Relaxed) {
        let batch = read(corpus, step, index);
        let failed = batch.is_err();
        if made.send(batch).is_err() || failed {
            return;
        }
        (step, index) = plan.after(step, index);
    }
}
