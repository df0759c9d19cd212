//! The thread that writes checkpoints, so that steps go on whatever storage does.
//!
//! ```text
//! shard(step), commit(step) -> a queue -> tried until it is done, given up, or fenced
//! ```
//! Nothing here waits for storage but the thread itself: `progress` and `cancel` take a lock that
//! is never held over an effect.

use super::fence::{Claiming, FenceError, tidy};
use super::write::{Committed, Identity, WriteError, commit, prune, write_shard};
use super::Disk;
use crate::state::slots::Slot;
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the writer has done so far.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Steps in the newest shard that is durable.
    pub written: u64,
    /// Steps in the newest checkpoint committed.
    pub committed: u64,
    /// Of the newest checkpoint whose shards have gone: it will never be.
    pub vanished: u64,
    /// Steps of the checkpoints removed since, as more than `keep`.
    pub removed: Vec<u64>,
    /// What no other try can help.
    pub error: Option<String>,
    /// Why storage fails at present; another try is under way.
    pub trouble: Option<String>,
    pub fenced_by: Option<u32>,
}

/// What goes before the first commit and before each one.
#[derive(Debug, Default)]
pub struct Before {
    /// Rank 0's claim, where it is not there yet; whoever made it holds the lock while it tries.
    pub claiming: Option<Arc<Mutex<Claiming>>>,
    /// Makes the records so far durable.
    pub records: Option<Flush>,
}

/// Waits for a bounded time until records are durable.
pub struct Flush(pub Box<dyn Fn() + Send>);

impl std::fmt::Debug for Flush {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str("Flush")
    }
}

#[derive(Clone)]
enum Job {
    Shard { step: u64, bytes: Arc<Slot> },
    Commit { step: u64 },
}

impl Job {
    fn step(&self) -> u64 {
        match self {
            Job::Shard { step, .. } | Job::Commit { step } => *step,
        }
    }
}

/// How long a cancelled commit that has begun its rename is waited for.
const RENAME_MAX: Duration = Duration::from_secs(2);

/// Hands work to the thread and hears of it.
#[derive(Debug)]
pub struct Writer {
    shared: Arc<Shared>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

#[derive(Default)]
struct State {
    progress: Progress,
    jobs: VecDeque<Job>,
    /// Work on checkpoints of up to this step is dropped.
    given_up: u64,
    cancelled: bool,
    closing: bool,
    /// The thread is between its last word and the end of its rename.
    renaming: bool,
}

impl std::fmt::Debug for State {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("State").field("progress", &self.progress).finish_non_exhaustive()
    }
}

impl Shared {
    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait<'a>(
        &self,
        state: MutexGuard<'a, State>,
        at_most: Duration,
    ) -> MutexGuard<'a, State> {
        let waited = self.changed.wait_timeout(state, at_most);
        waited.unwrap_or_else(PoisonError::into_inner).0
    }
}

impl Writer {
    /// Starts the thread. A try that failed is followed by another after `retry`, doubled each
    /// time up to [`DOUBLINGS_MAX`] times.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(
        identity: Identity,
        disk: Disk,
        before: Before,
        retry: Duration,
    ) -> std::io::Result<Writer> {
        let shared = Arc::<Shared>::default();
        let theirs = Arc::clone(&shared);
        let work = move || Work { identity, disk, before, retry, shared: theirs }.run();
        let thread = std::thread::Builder::new().name("checkpoint".to_string()).spawn(work)?;
        Ok(Writer { shared, thread: Some(thread) })
    }

    /// Writes this rank's shard of `step`.
    pub fn shard(&self, step: u64, bytes: Arc<Slot>) {
        self.push(Job::Shard { step, bytes });
    }

    /// All ranks have acknowledged `step`: commit it.
    pub fn commit(&self, step: u64) {
        self.push(Job::Commit { step });
    }

    fn push(&self, job: Job) {
        self.shared.lock().jobs.push_back(job);
        self.shared.changed.notify_all();
    }

    /// Drops all work on checkpoints of up to `step`, but what is under way on storage.
    pub fn give_up(&self, step: u64) {
        let mut state = self.shared.lock();
        state.given_up = state.given_up.max(step);
        state.jobs.retain(|job| job.step() > step);
        drop(state);
        self.shared.changed.notify_all();
    }

    pub fn progress(&self) -> Progress {
        self.shared.lock().progress.clone()
    }

    /// The checkpoints removed since this was last asked.
    pub fn take_removed(&self) -> Vec<u64> {
        std::mem::take(&mut self.shared.lock().progress.removed)
    }

    /// From now on nothing is committed; what is committed already is told by `progress`. Only a
    /// rename that storage takes longer than [`RENAME_MAX`] for may still happen: then the next
    /// attempt finds it, or its claim rules it out.
    pub fn cancel(&self) {
        let end = Instant::now() + RENAME_MAX;
        let mut state = self.shared.lock();
        state.cancelled = true;
        self.shared.changed.notify_all();
        while state.renaming && Instant::now() < end {
            state = self.shared.wait(state, end - Instant::now());
        }
    }

    /// Waits until everything asked for is done, or until `at_most` has passed: then the thread is
    /// left to storage, and commits nothing.
    pub fn finish(&mut self, at_most: Duration) {
        const LOOK: Duration = Duration::from_millis(1);
        let end = Instant::now() + at_most;
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
        let Some(thread) = self.thread.take() else { return };
        while !thread.is_finished() {
            if Instant::now() >= end {
                return self.cancel();
            }
            std::thread::sleep(LOOK);
        }
        if thread.join().is_err() {
            let mut state = self.shared.lock();
            state.progress.error.get_or_insert("the writer has ended".to_string());
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.cancel();
    }
}

/// How often the pause between two tries doubles: a quarter of a second becomes half a minute.
pub const DOUBLINGS_MAX: u32 = 7;
/// How long the thread sleeps without being woken.
const IDLE: Duration = Duration::from_secs(30);

/// What the thread has.
struct Work {
    identity: Identity,
    disk: Disk,
    before: Before,
    retry: Duration,
    shared: Arc<Shared>,
}

impl Work {
    fn run(mut self) {
        while let Some(job) = self.next() {
            let mut pause = self.retry;
            loop {
                let done = self.try_once(&job);
                let mut state = self.shared.lock();
                state.renaming = false;
                match done {
                    Ok(()) => state.progress.trouble = None,
                    Err(Failed::Fenced(by)) => state.progress.fenced_by = Some(by),
                    Err(Failed::NotFinite(why)) => {
                        state.progress.error.get_or_insert(why);
                    }
                    Err(Failed::Storage(why)) => {
                        state.progress.trouble = Some(why);
                        self.shared.changed.notify_all();
                        if self.rests(state, &job, pause) {
                            pause = (2 * pause).min(self.retry * (1 << DOUBLINGS_MAX));
                            continue;
                        }
                        break;
                    }
                }
                self.shared.changed.notify_all();
                break;
            }
        }
    }

    /// The next job, once there is one; none: it is over.
    fn next(&self) -> Option<Job> {
        let mut state = self.shared.lock();
        loop {
            if state.cancelled {
                return None;
            }
            match state.jobs.pop_front() {
                Some(job) => return Some(job),
                None if state.closing => return None,
                None => state = self.shared.wait(state, IDLE),
            }
        }
    }

    /// Waits until another try is due; whether the job is still wanted.
    fn rests(&self, mut state: MutexGuard<State>, job: &Job, pause: Duration) -> bool {
        let end = Instant::now() + pause;
        loop {
            if state.cancelled || state.closing || state.given_up >= job.step() {
                if state.given_up >= job.step() {
                    state.progress.trouble = None;
                }
                return false;
            }
            let now = Instant::now();
            if now >= end {
                return true;
            }
            state = self.shared.wait(state, end - now);
        }
    }

    fn try_once(&mut self, job: &Job) -> Result<(), Failed> {
        match job {
            Job::Shard { step, bytes } => {
                match write_shard(&self.disk, &self.identity, *step, bytes) {
                    Ok(()) => self.shared.lock().progress.written = *step,
                    Err(WriteError::NotFinite(why)) => return Err(Failed::NotFinite(why)),
                    Err(WriteError::Io(source)) => {
                        let path = self.identity.staging(*step);
                        return Err(FenceError::Io { path, source }.into());
                    }
                }
            }
            Job::Commit { step } => self.commit(*step)?,
        }
        Ok(())
    }

    fn commit(&mut self, step: u64) -> Result<(), Failed> {
        let location = &self.identity.location;
        if let Some(claiming) = &self.before.claiming {
            let mut claiming = claiming.lock().unwrap_or_else(PoisonError::into_inner);
            if !claiming.is_done() {
                claiming.go(&self.disk, location)?;
                // What earlier attempts left only takes room.
                let _ = tidy(&self.disk, location, self.identity.attempt);
            }
        }
        self.before.claiming = None;
        if let Some(Flush(flush)) = &self.before.records {
            flush();
        }
        let last_word = || {
            let mut state = self.shared.lock();
            state.renaming = !state.cancelled;
            state.renaming
        };
        let committed = commit(&self.disk, &self.identity, step, last_word)?;
        let mut state = self.shared.lock();
        state.renaming = false;
        match committed {
            Committed::Yes => state.progress.committed = step,
            Committed::No => {}
            Committed::Vanished => state.progress.vanished = step,
        }
        drop(state);
        self.shared.changed.notify_all();
        if committed == Committed::Yes {
            // What could not be removed is looked at again after the next commit.
            match prune(&self.disk, &self.identity) {
                Ok(removed) => self.shared.lock().progress.removed.extend(removed),
                Err(FenceError::Fenced { claimed, .. }) => return Err(Failed::Fenced(claimed)),
                Err(FenceError::Io { .. }) => {}
            }
        }
        Ok(())
    }
}

/// Why a try did not do its job.
enum Failed {
    Fenced(u32),
    NotFinite(String),
    Storage(String),
}

impl From<FenceError> for Failed {
    fn from(error: FenceError) -> Failed {
        match &error {
            FenceError::Fenced { claimed, .. } => Failed::Fenced(*claimed),
            FenceError::Io { source, .. } => Failed::Storage(format!("{error}: {source}")),
        }
    }
}
