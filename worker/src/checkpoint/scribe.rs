//! The worker's side of one engine's checkpoints. It outlives the engine.
//!
//! ```text
//! attempt N:    Look -> Begin -> Shard, Shard .. Commit ..       its writer
//! engine lost:  the writer goes on with what it was given
//! attempt N+1:  same members, state from memory: N's writer ends its work first (`earlier`), then
//!               come N+1's claim and checkpoints; else it is cancelled before N+1 looks
//! ```
//! A slot whose engine has died is read to its end, so the death costs no checkpoint. What all
//! ranks have written of it is committed by the writer of attempt N under N's claim. So attempt
//! N+1 claims only after that.

use super::desk::{Ask, News, Told};
use super::fence::{Claim, Claiming};
use super::look::{Looked, look_and_claim};
use super::retention::Retention;
use super::write::Beside;
use super::writer::{Progress, Rest};
use super::{Disk, Identity, Writer};
use crate::state::slots::Memory;
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::Resume;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

/// How long a cancelled writer is waited for, so that the next attempt finds nothing half done.
const END_MAX: Duration = Duration::from_secs(2);

/// Brings what is told to the engine; it must not wait.
pub type Tell = Box<dyn Fn(Told) + Send>;

pub struct Scribe {
    disk: Disk,
    memory: Memory,
    tell: Arc<Mutex<Tell>>,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    config: Option<Box<WorkerConfig>>,
    /// Rank 0's.
    claiming: Option<Arc<Mutex<Claiming>>>,
    writer: Option<Writer>,
    /// Of an attempt before, with its number.
    earlier: Option<(u32, Writer)>,
    /// The newest commit that was told to the leader.
    heard: u64,
    retention: Retention,
}

impl std::fmt::Debug for Scribe {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Scribe").field("disk", &self.disk).finish_non_exhaustive()
    }
}

impl Scribe {
    pub fn new(disk: Disk, memory: Memory) -> Scribe {
        let tell: Tell = Box::new(|_| {});
        Scribe { disk, memory, tell: Arc::new(Mutex::new(tell)), state: Mutex::default() }
    }

    /// Another engine listens from now on.
    pub fn tell_to(&self, tell: Tell) {
        *self.tell.lock().unwrap_or_else(PoisonError::into_inner) = tell;
    }

    fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn teller(&self, attempt: u32) -> impl Fn(News) + Send + 'static {
        let tell = Arc::clone(&self.tell);
        move |what| {
            let tell = tell.lock().unwrap_or_else(PoisonError::into_inner);
            tell(Told { attempt, what });
        }
    }

    /// An attempt begins, in which the engine has the rank that `config` names.
    pub fn attempt(&self, config: &WorkerConfig) {
        let teller = self.teller(config.attempt);
        let mut state = self.lock();
        let before = state.config.replace(Box::new(config.clone()));
        state.claiming = None;
        let goes_on = before.as_ref().is_some_and(|before| may_go_on(before, config));
        let of = before.map_or(0, |before| before.attempt);
        // One that still writes keeps later ones from beginning anything, so there is one at most.
        let last = state.writer.take().map(|writer| (of, writer));
        let mut over: Vec<(u32, Writer)> = state.earlier.take().into_iter().chain(last).collect();
        let writes = |(_, writer): &(u32, Writer)| writer.rest() != Rest::Nothing;
        let unheard = |(_, writer): &(u32, Writer)| writer.progress().committed > state.heard;
        let kept = over.iter().position(writes).or_else(|| over.iter().rposition(unheard));
        state.earlier = kept.filter(|_| goes_on).map(|at| over.remove(at));
        over.iter().for_each(|(_, writer)| writer.stop());
        if let Some((_, writer)) = &state.earlier {
            writer.tell_to(tell_earlier(self.teller(config.attempt), state.heard));
        }
        drop(state);
        if over.is_empty() {
            return teller(News::Settled);
        }
        let wait = move || {
            over.iter_mut().for_each(|(_, writer)| writer.finish(END_MAX));
            teller(News::Settled);
        };
        // Without a thread the engine waits for as long as it waits at most.
        let _ = std::thread::Builder::new().name("settle".to_string()).spawn(wait);
    }

    pub fn on(&self, ask: Ask) {
        match ask {
            Ask::Look { looked_at_newer, time } => self.look(looked_at_newer, time),
            Ask::Begin { fingerprint, retry_us } => {
                self.begin(&fingerprint, Duration::from_micros(retry_us));
            }
            Ask::Shard { step, held_out, products } => self.shard(step, held_out, products),
            Ask::Commit { attempt, step } => {
                let state = self.lock();
                let current = state.config.as_ref().map(|config| config.attempt);
                let earlier = state.earlier.as_ref().filter(|(of, _)| *of == attempt);
                let writer = match current == Some(attempt) {
                    true => state.writer.as_ref(),
                    false => earlier.map(|(_, writer)| writer),
                };
                writer.into_iter().for_each(|writer| writer.commit(step));
            }
            Ask::CommitRest => {
                self.lock().earlier.iter().for_each(|(_, writer)| writer.commit_rest());
            }
            Ask::GiveUp { step } => {
                self.lock().writer.iter().for_each(|writer| writer.give_up(step));
            }
            Ask::GiveUpEarlier => {
                self.lock().earlier.iter().for_each(|(_, writer)| writer.give_up(u64::MAX));
            }
            Ask::Heard { step } => {
                let mut state = self.lock();
                state.heard = state.heard.max(step);
            }
            Ask::Cancel => {
                let state = self.lock();
                let earlier = state.earlier.iter().map(|(_, writer)| writer);
                earlier.chain(&state.writer).for_each(Writer::stop);
            }
            Ask::Close => self.lock().writer.iter().for_each(Writer::close),
        }
    }

    fn look(&self, looked_at_newer: bool, time: String) {
        let mut state = self.lock();
        let Some(config) = state.config.clone() else { return };
        let claiming = state.claiming.get_or_insert_with(|| {
            Arc::new(Mutex::new(Claiming::new(Claim {
                attempt: config.attempt,
                resume_step: config.resume.step(),
                job_uid: config.job_uid.clone(),
                time,
            })))
        });
        let claiming = Arc::clone(claiming);
        let teller = self.teller(config.attempt);
        if state.earlier.as_ref().is_some_and(|(_, writer)| writer.rest() != Rest::Nothing) {
            return teller(News::Looked(Looked::Later));
        }
        drop(state);
        let disk = self.disk.clone();
        let look = move || {
            let looked = look_and_claim(&config, &disk, &claiming, looked_at_newer);
            teller(News::Looked(looked));
        };
        // Without a thread there is no answer, which is told as storage that gives none.
        let _ = std::thread::Builder::new().name("storage".to_string()).spawn(look);
    }

    fn begin(&self, fingerprint: &str, retry: Duration) {
        let mut state = self.lock();
        let Some(config) = &state.config else { return };
        let attempt = config.attempt;
        let identity = Identity::of(config, fingerprint);
        if let Resume::Checkpoint { step, .. } = &config.resume {
            // The ranks have loaded all of it.
            state.retention.know(*step);
        }
        let holds = (state.claiming.clone(), state.retention.clone());
        let teller = self.teller(attempt);
        let on_change = Box::new(move |progress: &mut Progress| {
            let removed = std::mem::take(&mut progress.removed);
            teller(News::Progress(Progress { removed, ..progress.clone() }));
        });
        match Writer::start(identity, self.disk.clone(), holds, retry, on_change) {
            Ok(writer) => state.writer = Some(writer),
            Err(error) => {
                let error = Some(format!("no thread for checkpoints: {error}"));
                let progress = Progress { error, ended: true, ..Progress::default() };
                self.teller(attempt)(News::Progress(progress));
            }
        }
    }

    fn shard(&self, step: u64, held_out: Option<f64>, products: Option<String>) {
        let state = self.lock();
        let Some((config, writer)) = state.config.as_ref().zip(state.writer.as_ref()) else {
            return;
        };
        let rank = config.rank.unwrap_or_default();
        match self.memory.lent(config.attempt, step, rank) {
            Some(bytes) => writer.shard(step, bytes, Beside { held_out, products }),
            None => tracing::error!(step, rank, "no slot holds the shard of a checkpoint"),
        }
    }
}

/// What an engine hears of the writer of an attempt before: nothing of commits that the leader
/// knows.
fn tell_earlier(teller: impl Fn(News) + Send + 'static, heard: u64) -> super::writer::OnChange {
    Box::new(move |progress| {
        let (removed, rest) = (std::mem::take(&mut progress.removed), progress.rest());
        let news = (progress.committed > heard).then_some(progress.committed);
        let committed = news.unwrap_or(0);
        let progress = Progress { removed, committed, ..progress.clone() };
        teller(News::Earlier { progress, rest });
    })
}

/// Whether what attempt `before` has begun to write may still be committed in `next`: all who were
/// given something are here, with the same ranks, and the state is not what storage has.
fn may_go_on(before: &WorkerConfig, next: &WorkerConfig) -> bool {
    matches!(next.resume, Resume::Memory { .. })
        && before.attempt < next.attempt
        && before.job_uid == next.job_uid
        && before.rank == next.rank
        && before.layout.mesh.world() == next.layout.mesh.world()
        && before.members.len() == next.members.len()
        && before.members.iter().zip(&next.members).all(|(one, other)| {
            one.worker == other.worker && one.rank == other.rank
        })
}
