//! That reads and writes stumble at present, for whoever tells people of it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// A clone is the same one.
#[derive(Clone, Debug, Default)]
pub struct Trouble(Arc<Shared>);

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    /// Grows with each change, so that a look without one costs nothing.
    version: AtomicU64,
}

#[derive(Debug, Default)]
struct State {
    /// Threads that try something again.
    stumbling: u32,
    last: Option<Stumbling>,
    since: Duration,
}

/// A stretch of time in which something was tried again.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Stumbling {
    /// Counted from 1.
    pub number: u64,
    /// What stumbled first, and how.
    pub why: String,
    /// How long it took, once it is over.
    pub lasted: Option<Duration>,
}

/// Something that is tried again, until this is dropped.
#[derive(Debug)]
pub(super) struct Stumble {
    of: Trouble,
    ended: Option<Duration>,
}

impl Trouble {
    /// Something is tried again.
    pub(super) fn begin(&self, why: String, now: Duration) -> Stumble {
        tracing::warn!("{why}: it is tried again");
        let mut state = self.lock();
        state.stumbling += 1;
        if state.stumbling == 1 {
            let number = state.last.as_ref().map_or(0, |last| last.number) + 1;
            state.last = Some(Stumbling { number, why, lasted: None });
            state.since = now;
        }
        drop(state);
        self.0.version.fetch_add(1, Ordering::Release);
        Stumble { of: self.clone(), ended: None }
    }

    /// Changes with every change of `last`.
    pub fn version(&self) -> u64 {
        self.0.version.load(Ordering::Acquire)
    }

    /// The newest stretch, if there was one.
    pub fn last(&self) -> Option<Stumbling> {
        self.lock().last.clone()
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.0.state.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Stumble {
    /// It is well again.
    pub fn end(mut self, now: Duration) {
        self.ended = Some(now);
    }
}

impl Drop for Stumble {
    /// Where it was given up it is over as well: whoever asked for it says so.
    fn drop(&mut self) {
        let mut state = self.of.lock();
        state.stumbling -= 1;
        let lasted = self.ended.map_or(Duration::ZERO, |ended| ended.saturating_sub(state.since));
        if state.stumbling == 0
            && let Some(last) = &mut state.last
        {
            last.lasted = Some(lasted);
        }
        drop(state);
        self.of.0.version.fetch_add(1, Ordering::Release);
    }
}
