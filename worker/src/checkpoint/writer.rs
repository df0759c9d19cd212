//! The thread that writes checkpoints, so that steps go on whatever storage does.
//!
//! ```text
//! shard(step), commit(step) -> a queue -> tried until it is done, given up, or fenced
//!                                `-> each change is told
//! ```
//! Nothing here waits for storage but the thread itself: `progress` and `cancel` take a lock that
//! is never held over an effect.

use super::best::Best;
use super::fence::{Claiming, FenceError, tidy};
use super::retention::Retention;
use super::write::{Beside, Committed, Identity, WriteError, commit, write_shard};
use super::{Disk, products};
use crate::state::slot::Reading;
use serde::{Deserialize, Serialize};
use std::collections::VecDeque;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// What the writer has done so far.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct Progress {
    /// Steps in the newest shard that is durable.
    pub written: u64,
    /// Steps in the newest checkpoint committed.
    pub committed: u64,
    /// Of the newest checkpoint whose shards have gone: it will never be.
    pub vanished: u64,
    /// Steps of the checkpoints removed, as more than `keep`, since the last telling.
    pub removed: Vec<u64>,
    /// What no other try can help.
    pub error: Option<String>,
    /// Why storage fails at present; another try is under way.
    pub trouble: Option<String>,
    pub fenced_by: Option<u32>,
    /// Shards and commits that are not done.
    pub jobs: usize,
    /// On rank 0: shards that are durable here, of which no commit is known.
    pub uncommitted: usize,
    /// Nothing is under way, and nothing more will be.
    pub ended: bool,
}

impl Progress {
    pub fn rest(&self) -> Rest {
        match self {
            _ if self.ended || self.fenced_by.is_some() => Rest::Nothing,
            _ if self.jobs > 0 => Rest::Jobs,
            _ if self.uncommitted > 0 => Rest::Commits,
            _ => Rest::Nothing,
        }
    }
}

/// What a writer has left to do.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub enum Rest {
    #[default]
    Nothing,
    /// Shards to be written, or commits that were ordered.
    Jobs,
    /// Its shards are durable: checkpoints of which it was not said whether all ranks' are.
    Commits,
}

/// Hears of each change, under the writer's lock: it must not call the writer, nor wait.
pub type OnChange = Box<dyn Fn(&mut Progress) + Send>;

enum Job {
    Shard { step: u64, bytes: Reading, beside: Beside },
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

impl State {
    /// After each change of anything that is told.
    fn tell(&mut self) {
        let over = self.progress.committed.max(self.progress.vanished).max(self.given_up);
        self.uncommitted.retain(|step| *step > over);
        self.progress.jobs = self.jobs.len() + usize::from(self.busy);
        self.progress.uncommitted = self.uncommitted.len();
        (self.on_change)(&mut self.progress);
    }
}

#[derive(Debug)]
struct Shared {
    state: Mutex<State>,
    changed: Condvar,
}

struct State {
    progress: Progress,
    on_change: OnChange,
    jobs: VecDeque<Job>,
    /// The thread has taken a job off the queue and has not done it yet.
    busy: bool,
    /// It commits what all ranks have written.
    is_first: bool,
    /// There: shards that were accepted, of which no commit is known.
    uncommitted: Vec<u64>,
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
    /// time up to [`DOUBLINGS_MAX`] times. `claiming` is rank 0's claim, where it may not be there
    /// yet; whoever made it holds the lock while it tries.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(
        identity: Identity,
        disk: Disk,
        (claiming, retention): (Option<Arc<Mutex<Claiming>>>, Retention),
        retry: Duration,
        on_change: OnChange,
    ) -> std::io::Result<Writer> {
        let state = State {
            progress: Progress::default(),
            on_change,
            jobs: VecDeque::new(),
            busy: false,
            is_first: identity.rank == 0,
            uncommitted: Vec::new(),
            given_up: 0,
            cancelled: false,
            closing: false,
            renaming: false,
        };
        let shared = Arc::new(Shared { state: Mutex::new(state), changed: Condvar::new() });
        let (own, best) = (Arc::clone(&shared), None);
        let work = move || Work { identity, disk, claiming, retention, best, retry, shared }.run();
        let thread = std::thread::Builder::new().name("checkpoint".to_string()).spawn(work)?;
        Ok(Writer { shared: own, thread: Some(thread) })
    }

    /// Writes this rank's shard of `step`.
    pub fn shard(&self, step: u64, bytes: Reading, beside: Beside) {
        let mut state = self.shared.lock();
        if state.is_first {
            state.uncommitted.push(step);
        }
        drop(state);
        self.push(Job::Shard { step, bytes, beside });
    }

    /// All ranks have acknowledged `step`: commit it.
    pub fn commit(&self, step: u64) {
        self.push(Job::Commit { step });
    }

    /// All ranks have written what they were given: commits what was not committed.
    pub fn commit_rest(&self) {
        let rest = self.shared.lock().uncommitted.clone();
        let ordered = |state: &State, step| {
            state.jobs.iter().any(|job| matches!(job, Job::Commit { step: of } if *of == step))
        };
        for step in rest {
            if !ordered(&self.shared.lock(), step) {
                self.commit(step);
            }
        }
    }

    fn push(&self, job: Job) {
        let mut state = self.shared.lock();
        if !state.cancelled {
            state.jobs.push_back(job);
            state.tell();
        }
        drop(state);
        self.shared.changed.notify_all();
    }

    /// Drops all work on checkpoints of up to `step`, but what is under way on storage.
    pub fn give_up(&self, step: u64) {
        let mut state = self.shared.lock();
        state.given_up = state.given_up.max(step);
        state.jobs.retain(|job| job.step() > step);
        state.tell();
        drop(state);
        self.shared.changed.notify_all();
    }

    pub fn progress(&self) -> Progress {
        self.shared.lock().progress.clone()
    }

    /// What is left of what it was given.
    pub fn rest(&self) -> Rest {
        let state = self.shared.lock();
        if state.cancelled { Rest::Nothing } else { state.progress.rest() }
    }

    /// Another one hears of each change from now on, and first of how things stand.
    pub fn tell_to(&self, on_change: OnChange) {
        let mut state = self.shared.lock();
        state.on_change = on_change;
        state.tell();
    }

    /// From now on nothing is begun; a rename that is under way may still happen.
    pub fn stop(&self) {
        self.shared.lock().cancelled = true;
        self.shared.changed.notify_all();
    }

    /// From now on nothing is committed; what is committed already is told by `progress`. Only a
    /// rename that storage takes longer than [`RENAME_MAX`] for may still happen: then the next
    /// attempt finds it, or its claim rules it out.
    pub fn cancel(&self) {
        let end = Instant::now() + RENAME_MAX;
        self.stop();
        let mut state = self.shared.lock();
        while state.renaming && Instant::now() < end {
            state = self.shared.wait(state, end - Instant::now());
        }
    }

    /// What was asked for is done, once, and then the thread ends.
    pub fn close(&self) {
        self.shared.lock().closing = true;
        self.shared.changed.notify_all();
    }

    /// Waits until everything asked for is done, or until `at_most` has passed: then the thread is
    /// left to storage, and commits nothing.
    pub fn finish(&mut self, at_most: Duration) {
        const LOOK: Duration = Duration::from_millis(1);
        let end = Instant::now() + at_most;
        self.close();
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
    claiming: Option<Arc<Mutex<Claiming>>>,
    retention: Retention,
    /// From the first shard on that a held-out loss was measured of.
    best: Option<Best>,
    retry: Duration,
    shared: Arc<Shared>,
}

impl Drop for Work {
    fn drop(&mut self) {
        let mut state = self.shared.lock();
        (state.busy, state.renaming, state.progress.ended) = (false, false, true);
        state.jobs.clear();
        state.tell();
        drop(state);
        self.shared.changed.notify_all();
    }
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
                    Err(Failed::Lasting(why)) => {
                        state.progress.error.get_or_insert(why);
                    }
                    Err(Failed::Storage(why)) => {
                        state.progress.trouble = Some(why);
                        state.tell();
                        self.shared.changed.notify_all();
                        if self.rests(state, &job, pause) {
                            pause = (2 * pause).min(self.retry * (1 << DOUBLINGS_MAX));
                            continue;
                        }
                        break;
                    }
                }
                break;
            }
            // Whoever waits for the slot finds it free when the job is told as done.
            drop(job);
            let mut state = self.shared.lock();
            state.busy = false;
            state.tell();
            self.shared.changed.notify_all();
        }
    }

    /// The next job, once there is one; none: it is over.
    fn next(&self) -> Option<Job> {
        let mut state = self.shared.lock();
        loop {
            if state.cancelled {
                return None;
            }
            if let Some(job) = state.jobs.pop_front() {
                state.busy = true;
                return Some(job);
            }
            if state.closing {
                return None;
            }
            state = self.shared.wait(state, IDLE);
        }
    }

    /// Waits until another try is due; whether the job is still wanted.
    fn rests(&self, mut state: MutexGuard<State>, job: &Job, pause: Duration) -> bool {
        let end = Instant::now() + pause;
        loop {
            if state.cancelled || state.closing || state.given_up >= job.step() {
                if state.given_up >= job.step() {
                    state.progress.trouble = None;
                    drop(state);
                    self.identity.clear(&self.disk, job.step());
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
            Job::Shard { step, bytes, beside } => {
                // Before the commit, which removes what is not spared.
                beside.held_out.iter().for_each(|loss| self.note(*step, *loss));
                match write_shard(&self.disk, &self.identity, *step, bytes) {
                    Ok(()) => {
                        products::keep(&self.disk, &self.identity, *step, beside);
                        self.shared.lock().progress.written = *step;
                    }
                    Err(WriteError::NotFinite(why)) => return Err(Failed::Lasting(why)),
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

    /// The checkpoint of `step` is about to be written, and this is its held-out loss.
    fn note(&mut self, step: u64, loss: f64) {
        if self.best.is_none() {
            match Best::open(&self.identity.location, &self.disk) {
                Ok(best) => self.best = Some(best),
                Err(error) => return warn_of(Err(error)),
            }
        }
        self.best.iter_mut().for_each(|best| warn_of(best.begins(step, loss)));
    }

    fn commit(&mut self, step: u64) -> Result<(), Failed> {
        let location = &self.identity.location;
        if let Some(claiming) = &self.claiming {
            let mut claiming = claiming.lock().unwrap_or_else(PoisonError::into_inner);
            if !claiming.is_done() {
                // What others have committed since this attempt began to train still counts.
                claiming.be_late();
                claiming.go(&self.disk, location)?;
                // What earlier attempts left only takes room.
                let _ = tidy(&self.disk, location, self.identity.attempt);
            }
        }
        self.claiming = None;
        let last_word = || {
            let mut state = self.shared.lock();
            state.renaming = !state.cancelled;
            state.renaming
        };
        let committed = commit(&self.disk, &self.identity, step, last_word)?;
        let mut state = self.shared.lock();
        state.renaming = false;
        match &committed {
            Committed::Yes => state.progress.committed = state.progress.committed.max(step),
            Committed::No => {}
            Committed::Vanished => state.progress.vanished = step,
            Committed::Refused(problem) => {
                return Err(Failed::Lasting(format!("no reader would take it: {problem}")));
            }
        }
        state.tell();
        drop(state);
        self.shared.changed.notify_all();
        if committed == Committed::Yes {
            self.retention.know(step);
            self.best.iter_mut().for_each(|best| warn_of(best.committed(step)));
            let removed = self.retention.prune(&self.disk, &self.identity).map_err(Failed::Fenced)?;
            let mut state = self.shared.lock();
            state.progress.removed.extend(removed);
            state.tell();
        }
        Ok(())
    }
}

/// The best checkpoint is a service: training goes on without it.
fn warn_of(noted: std::io::Result<()>) {
    if let Err(error) = noted {
        tracing::warn!("the best checkpoint is not noted: {error}");
    }
}

/// Why a try did not do its job.
enum Failed {
    Fenced(u32),
    /// No other try helps.
    Lasting(String),
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
