//! How far work on files is, for whoever waits for it.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// A clone is the same one. Every count grows only, so that whoever looks sees life.
#[derive(Clone, Default)]
pub struct Progress {
    counts: Arc<Counts>,
    given_up: Option<Arc<dyn Fn() -> bool + Send + Sync>>,
    watcher: Option<Watcher>,
}

/// Takes (done, all) and life, whenever they change.
type Watcher = Arc<dyn Fn((u64, u64), u64) + Send + Sync>;

#[derive(Debug, Default)]
struct Counts {
    total: AtomicU64,
    done: AtomicU64,
    read: AtomicU64,
    stirred: AtomicU64,
}

impl std::fmt::Debug for Progress {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        self.counts.fmt(f)
    }
}

impl Progress {
    /// The same counts, for work that ends early once `given_up` says so.
    pub fn until(&self, given_up: impl Fn() -> bool + Send + Sync + 'static) -> Progress {
        Progress { given_up: Some(Arc::new(given_up)), ..self.clone() }
    }

    /// The same counts, of which `watcher` is told.
    pub fn seen_by(&self, watcher: impl Fn((u64, u64), u64) + Send + Sync + 'static) -> Progress {
        Progress { watcher: Some(Arc::new(watcher)), ..self.clone() }
    }

    fn tell(&self) {
        if let Some(watcher) = &self.watcher {
            watcher(self.counts(), self.life());
        }
    }

    /// Whether nobody waits for the work any more.
    pub fn is_given_up(&self) -> bool {
        self.given_up.as_ref().is_some_and(|given_up| given_up())
    }

    /// Bytes that are known or read, and all that were asked for so far; equal when nothing is
    /// left.
    pub fn counts(&self) -> (u64, u64) {
        let done = self.counts.done.load(Ordering::Relaxed);
        (done, self.counts.total.load(Ordering::Relaxed).max(done))
    }

    /// Bytes that this process had to read, because no index knew them.
    pub fn bytes_read(&self) -> u64 {
        self.counts.read.load(Ordering::Relaxed)
    }

    /// Grows whenever anything was done, by this process or by one that it waits for.
    pub fn life(&self) -> u64 {
        self.counts().0 + self.counts.stirred.load(Ordering::Relaxed)
    }

    /// Something goes on that is no byte: another process, which this one waits for, or a pause
    /// before the next try.
    pub(crate) fn stir(&self) {
        self.counts.stirred.fetch_add(1, Ordering::Relaxed);
        self.tell();
    }

    pub(crate) fn expect(&self, bytes: u64) {
        self.counts.total.fetch_add(bytes, Ordering::Relaxed);
        self.tell();
    }

    /// Bytes that are done without this process.
    pub(crate) fn know(&self, bytes: u64) {
        self.counts.done.fetch_add(bytes, Ordering::Relaxed);
        self.tell();
    }

    pub(crate) fn read(&self, bytes: u64) {
        self.counts.read.fetch_add(bytes, Ordering::Relaxed);
        self.know(bytes);
    }
}
