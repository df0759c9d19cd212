//! The engine's way to its worker's checkpoint writer: it asks, and reads what was told.
//!
//! ```text
//! engine: Desk -- Ask --> Scribe (worker): looks, claims, writes, commits
//!           ^---- Told ----'
//! ```
//! An engine that is a thread has its scribe in the same process; for one that is a process both
//! ways lead through its socket. No step waits for an answer.

use super::Disk;
use super::look::Looked;
use super::scribe::Scribe;
use super::writer::{Progress, Rest};
use crate::state::slots::Memory;
use moejob_protocol::WorkerConfig;
use serde::{Deserialize, Serialize};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// What an engine asks of its scribe, in this attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub enum Ask {
    /// Rank 0, before the first step: look into storage and claim. `time` goes into the claim.
    Look { looked_at_newer: bool, time: String },
    /// Checkpoints are written from here on, of data with this fingerprint; a try that failed is
    /// followed by another after `retry_us` microseconds.
    Begin { fingerprint: String, retry_us: u64 },
    /// The shard of `step` lies in a slot, which was lent.
    Shard {
        step: u64,
        /// The held-out loss of `step`, where the best checkpoint is kept: rank 0's alone.
        held_out: Option<f64>,
        /// What rank 0's GPU has chosen for its products, see [`super::products`].
        products: Option<String>,
    },
    /// All ranks of `attempt` have written `step`.
    Commit { attempt: u32, step: u64 },
    /// All ranks have written what they were given in the attempt before.
    CommitRest,
    /// Nothing of up to `step` is waited for.
    GiveUp { step: u64 },
    /// Nothing of the attempt before is waited for.
    GiveUpEarlier,
    /// A commit of `step` was told to the leader.
    Heard { step: u64 },
    /// Nothing is committed from here on.
    Cancel,
    /// What was asked is done, once; then the writer ends.
    Close,
}

/// What a scribe tells its engine.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Told {
    pub attempt: u32,
    pub what: News,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum News {
    Looked(Looked),
    /// Nothing of earlier attempts is in the way of this one.
    Settled,
    /// The whole of it, each time.
    Progress(Progress),
    /// Of the writer of the attempt before, which goes on.
    Earlier { progress: Progress, rest: Rest },
}

#[derive(Debug, Default)]
struct State {
    attempt: u32,
    progress: Progress,
    earlier: Progress,
    rest: Rest,
    removed: Vec<u64>,
    looked: Option<Looked>,
    settled: bool,
}

/// What was told last; a clone is the same.
#[derive(Clone, Debug, Default)]
pub struct Board(Arc<(Mutex<State>, Condvar)>);

impl Board {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What is told of an attempt that is over is of no interest.
    pub fn take_in(&self, told: Told) {
        let mut state = self.lock();
        state.begin(told.attempt);
        if told.attempt < state.attempt {
            return;
        }
        match told.what {
            News::Looked(looked) => state.looked = Some(looked),
            News::Settled => state.settled = true,
            News::Progress(mut progress) => {
                state.removed.append(&mut progress.removed);
                state.progress = progress;
            }
            News::Earlier { mut progress, rest } => {
                state.removed.append(&mut progress.removed);
                (state.earlier, state.rest) = (progress, rest);
            }
        }
        drop(state);
        self.0.1.notify_all();
    }

    /// Waits until there is something, for so long at most.
    fn wait<T>(
        &self,
        at_most: Duration,
        mut look: impl FnMut(&mut State) -> Option<T>,
    ) -> Option<T> {
        let end = Instant::now() + at_most;
        let mut state = self.lock();
        loop {
            if let Some(found) = look(&mut state) {
                return Some(found);
            }
            let left = end.checked_duration_since(Instant::now())?;
            let waited = self.0.1.wait_timeout(state, left);
            state = waited.unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

impl State {
    fn begin(&mut self, attempt: u32) {
        if attempt > self.attempt {
            *self = State { attempt, ..State::default() };
        }
    }
}

/// How long a cancelled commit that has begun its rename is waited for, and the answer.
const CANCEL_MAX: Duration = Duration::from_millis(2500);

/// A clone is the same.
#[derive(Clone)]
pub struct Desk {
    ask: Arc<dyn Fn(Ask) + Send + Sync>,
    board: Board,
    /// Where it is in the same process.
    scribe: Option<Arc<Scribe>>,
}

impl std::fmt::Debug for Desk {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Desk").field("board", &self.board).finish_non_exhaustive()
    }
}

impl Desk {
    /// With a scribe of its own, of the engine whose snapshots lie in `memory`.
    pub fn with_scribe(disk: Disk, memory: Memory) -> Desk {
        let scribe = Arc::new(Scribe::new(disk, memory));
        let board = Board::default();
        let told = board.clone();
        scribe.tell_to(Box::new(move |news| told.take_in(news)));
        let asked = Arc::clone(&scribe);
        Desk { ask: Arc::new(move |ask| asked.on(ask)), board, scribe: Some(scribe) }
    }

    /// Of an engine in a process of its own: `ask` brings what it asks to the worker, and what the
    /// worker tells comes to `board`.
    pub fn of_engine(ask: impl Fn(Ask) + Send + Sync + 'static, board: Board) -> Desk {
        Desk { ask: Arc::new(ask), board, scribe: None }
    }

    /// An attempt begins, with this rank.
    pub fn attempt(&self, config: &WorkerConfig) {
        self.board.lock().begin(config.attempt);
        if let Some(scribe) = &self.scribe {
            scribe.attempt(config);
        }
    }

    /// Waits until what earlier attempts left is out of the way, or storage keeps it.
    pub fn settle(&self) {
        self.board.wait(CANCEL_MAX, |state| state.settled.then_some(()));
    }

    /// Looks into storage and claims; none: there was no answer.
    pub fn look(&self, looked_at_newer: bool, time: String, at_most: Duration) -> Option<Looked> {
        self.board.lock().looked = None;
        (self.ask)(Ask::Look { looked_at_newer, time });
        self.board.wait(at_most, |state| state.looked.take())
    }

    pub fn ask(&self, ask: Ask) {
        (self.ask)(ask);
    }

    /// What this attempt's writer has done. Commits of the attempt before count.
    pub fn progress(&self) -> Progress {
        let state = self.board.lock();
        let mut progress = state.progress.clone();
        let earlier = &state.earlier;
        progress.committed = progress.committed.max(earlier.committed);
        progress.trouble = progress.trouble.or_else(|| earlier.trouble.clone());
        progress.error = progress.error.or_else(|| earlier.error.clone());
        progress
    }

    /// What the writer of the attempt before has left to do.
    pub fn rest(&self) -> Rest {
        self.board.lock().rest
    }

    /// The checkpoints removed since this was last asked.
    pub fn take_removed(&self) -> Vec<u64> {
        std::mem::take(&mut self.board.lock().removed)
    }

    /// From now on nothing is committed; what is committed already is told by `progress`.
    pub fn cancel(&self) {
        (self.ask)(Ask::Cancel);
        self.wait_for_end(CANCEL_MAX);
    }

    /// Waits until everything asked for is done, or until `at_most` has passed: then nothing more
    /// is committed.
    pub fn finish(&self, at_most: Duration) {
        (self.ask)(Ask::Close);
        if !self.wait_for_end(at_most) {
            self.cancel();
        }
    }

    fn wait_for_end(&self, at_most: Duration) -> bool {
        self.board.wait(at_most, |state| state.progress.ended.then_some(())).is_some()
    }
}
