//! Checkpoints of one attempt: begun when they are due, committed when all ranks have written, and
//! never waited for but at the end.
//!
//! ```text
//! due -> room? -> begin (desk) -> every rank written -> commit ordered -> committed
//!          `-> overdue: begun once storage has caught up
//! attempt before, lost with its engines: every rank written -> its rest ordered -> committed
//! ```
//! Everything here follows from what all ranks said in a step's end, so all of them do it alike.

use crate::checkpoint::NOT_FINITE;
use crate::checkpoint::desk::{Ask, Desk};
use crate::checkpoint::writer::Rest;
use crate::disk::Stamina;
use crate::gang::step_end::StepEnd;
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::Resume;
use std::collections::VecDeque;
use std::iter;
use std::sync::Arc;
use std::sync::atomic::AtomicBool;
use std::sync::mpsc::{Sender, channel};
use std::time::Duration;

/// How long an attempt waits for storage, and for what.
#[derive(Clone, Copy, Debug)]
pub struct Patience {
    /// One answer before the first step.
    pub answer: Duration,
    /// All that an attempt cannot begin without.
    pub start: Duration,
    /// A checkpoint that is under way when the attempt is asked to stop; another attempt goes on
    /// from memory. Less than the leader waits for a stop.
    pub stop: Duration,
    /// The same where the checkpoint was asked for: a job is suspended, or a node drained.
    pub save: Duration,
    /// The job's last checkpoint, without which its training was for nothing.
    pub end: Duration,
    /// One read of the data, and a batch that has not come: what is shorter is no hang.
    pub data: Duration,
    /// Between the first two tries of a thing that failed.
    pub retry: Duration,
    /// Bytes of state that checkpoints under way may hold beside the first one's: so jobs whose
    /// steps take milliseconds keep every checkpoint that they ask for, and no large one takes
    /// memory that `plan` did not count.
    pub pending_bytes: u64,
}

impl Default for Patience {
    fn default() -> Patience {
        Patience {
            answer: Duration::from_secs(20),
            start: Duration::from_secs(3600),
            stop: Duration::from_secs(45),
            save: Duration::from_secs(45),
            end: Duration::from_secs(3600),
            data: Duration::from_secs(3600),
            retry: Duration::from_millis(250),
            pending_bytes: 8 << 20,
        }
    }
}

/// Storage that a job could be trained on takes so many bytes a second: what is larger may take
/// longer.
const STORAGE_RATE_MIN: u64 = 10 << 20;
/// A worker that is drained ends a little later (`life::session::DRAIN_MS_MAX`).
const SAVE_MAX: Duration = Duration::from_secs(540);

impl Patience {
    /// For checkpoints of so many bytes.
    pub(crate) fn for_state(self, bytes: u64) -> Patience {
        let more = Duration::from_secs(bytes / STORAGE_RATE_MIN);
        let save = (self.save + more).min(SAVE_MAX.max(self.save));
        Patience { end: self.end + more, save, ..self }
    }

    /// Of an attempt's reads of its data. What a user has mistyped is told at once, where no
    /// attempt before has found it.
    pub(crate) fn of_data(&self, config: &WorkerConfig) -> Stamina {
        self.stamina(config, self.data)
    }

    /// Of reads of a checkpoint, or of weights, that an attempt begins with.
    pub(crate) fn of_start(&self, config: &WorkerConfig) -> Stamina {
        self.stamina(config, self.start)
    }

    fn stamina(&self, config: &WorkerConfig, longest: Duration) -> Stamina {
        let first = config.attempt == 1 && matches!(config.resume, Resume::Fresh);
        Stamina { longest, retry: self.retry, known: Arc::new(AtomicBool::new(!first)) }
    }
}

/// Checkpoints that may be under way at once, where the state is small.
const PENDING_MAX: usize = 8;

/// A checkpoint that is not committed yet.
#[derive(Clone, Copy, Debug)]
struct Pending {
    step: u64,
    /// Rank 0's writer was told that all ranks have written.
    ordered: bool,
}

/// What became of storage, as rank 0 tells it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum News {
    Committed(u64),
    /// Reason and message.
    Degraded(&'static str, String),
    Recovered,
}

/// What ends the attempt.
#[derive(Debug)]
pub(crate) enum Ends {
    Fenced(u32),
    /// A number that is not finite: no storage can help.
    NotFinite(String),
}

/// Waits for a bounded time until the records so far are durable.
pub(crate) type Flush = Box<dyn Fn() + Send>;

pub(crate) struct Saves {
    rank: u32,
    attempt: u32,
    desk: Desk,
    /// Rank 0's way to order commits, each behind its records.
    commits: Option<Sender<u64>>,
    /// A worker still writes checkpoints of the attempt before.
    earlier: bool,
    pending: VecDeque<Pending>,
    pending_max: usize,
    /// One was due and could not begin.
    overdue: bool,
    /// Newest commit that was told.
    committed: u64,
    given_up: u64,
    /// Rank 0's word for the next step's end.
    giving_up: u64,
    /// Why checkpoints were last said to be degraded.
    degraded: Option<&'static str>,
    /// What a rank's storage says, as it was last heard.
    trouble: String,
}

/// Checkpoints of a state of so many bytes, of all ranks together, that may be under way at once.
pub(crate) fn pending_max(state_bytes: u64, patience: &Patience) -> usize {
    let beside = (patience.pending_bytes / state_bytes.max(1)) as usize;
    (1 + beside).min(PENDING_MAX)
}

impl Saves {
    /// `pending_max` checkpoints may be under way. `from_memory`: the attempt before may have some.
    pub fn new(
        (rank, attempt): (u32, u32),
        desk: Desk,
        flush: Option<Flush>,
        pending_max: usize,
        from_memory: bool,
    ) -> Saves {
        let commits = flush.and_then(|flush| committer(desk.clone(), attempt, flush));
        Saves {
            rank,
            attempt,
            desk,
            commits,
            earlier: from_memory,
            pending: VecDeque::new(),
            pending_max,
            overdue: false,
            committed: 0,
            given_up: 0,
            giving_up: 0,
            degraded: None,
            trouble: String::new(),
        }
    }

    /// What storage says while it is waited for; empty where it is slow and says nothing.
    pub fn trouble(&self) -> &str {
        &self.trouble
    }

    /// Whether a checkpoint that is due now can begin.
    pub fn has_room(&self) -> bool {
        !self.earlier && self.pending.len() < self.pending_max
    }

    /// The checkpoint of `step` is there already: the attempt before has got so far.
    pub fn has_committed(&self, step: u64) -> bool {
        self.committed >= step
    }

    pub fn is_waiting(&self) -> bool {
        self.earlier || !self.pending.is_empty()
    }

    /// One that was due could not begin, and storage has caught up since.
    pub fn is_overdue(&self) -> bool {
        self.overdue && !self.is_waiting()
    }

    /// One is due and storage has not caught up: it will begin once it has.
    pub fn put_off(&mut self, step: u64) -> Option<News> {
        self.overdue = true;
        if self.degraded.is_some() {
            return None;
        }
        let waiting = match self.pending.front() {
            Some(pending) => format!("the checkpoint of step {}", pending.step),
            None => "a checkpoint of the attempt before".to_string(),
        };
        self.degrade("StorageSlow", || {
            format!(
                "{waiting} is still being written at step {step}: those due meanwhile are left \
                 out, training goes on"
            )
        })
    }

    /// One is due, and a rank has no memory for another copy of its state.
    pub fn leave_out(&mut self) {
        self.overdue = true;
    }

    /// The shard of `step` lies in a slot that was lent; `held_out` is its loss, where the best
    /// checkpoint is kept, and `products` what rank 0's GPU has chosen.
    pub fn begin(&mut self, step: u64, held_out: Option<f64>, products: Option<String>) {
        self.overdue = false;
        self.desk.ask(Ask::Shard { step, held_out, products });
        self.pending.push_back(Pending { step, ordered: false });
    }

    /// What this rank's storage has to say at the end of a step.
    pub fn fill(&self, end: &mut StepEnd) {
        let progress = self.desk.progress();
        end.earlier = self.desk.rest() != Rest::Nothing;
        end.written = progress.written;
        end.committed = progress.committed;
        end.given_up = self.giving_up.max(progress.vanished);
        end.fenced_by = progress.fenced_by.unwrap_or(0);
        end.write_error = progress.error.or(progress.trouble).unwrap_or_default();
    }

    /// Acts on what all ranks said.
    pub fn take_in(&mut self, ends: &[StepEnd]) -> Result<Vec<News>, Ends> {
        if let Some(fenced) = ends.iter().map(|end| end.fenced_by).max().filter(|by| *by > 0) {
            return Err(Ends::Fenced(fenced));
        }
        self.trouble = ends.iter().map(|end| &end.write_error).max().cloned().unwrap_or_default();
        let mut ranks = ends.iter().enumerate();
        let trouble = ranks.find(|(_, end)| !end.write_error.is_empty());
        let diverged = ends.iter().enumerate().find(|(_, end)| {
            end.write_error.contains(NOT_FINITE)
        });
        if let Some((rank, end)) = diverged {
            let why = &end.write_error;
            return Err(Ends::NotFinite(format!("rank {rank} cannot write its checkpoint: {why}")));
        }
        for pending in &mut self.pending {
            let all_written = ends.iter().all(|end| end.written >= pending.step);
            if all_written && !pending.ordered {
                pending.ordered = true;
                let (attempt, step) = (self.attempt, pending.step);
                let behind = self.commits.as_ref().filter(|commits| commits.send(step).is_ok());
                if self.rank == 0 && behind.is_none() {
                    self.desk.ask(Ask::Commit { attempt, step });
                }
            }
        }
        self.earlier = ends.iter().any(|end| end.earlier);
        let others = ends[1..].iter().any(|end| end.earlier);
        if self.rank == 0 && !others && self.desk.rest() == Rest::Commits {
            self.desk.ask(Ask::CommitRest);
        }
        let mut news = Vec::new();
        let (committed, given_up) = (ends[0].committed, ends[0].given_up);
        if committed > self.committed {
            self.committed = committed;
            news.push(News::Committed(committed));
            if self.rank == 0 {
                self.desk.ask(Ask::Heard { step: committed });
            }
        }
        if given_up > self.given_up {
            self.given_up = given_up;
            self.desk.ask(Ask::GiveUp { step: given_up });
            self.overdue |= self.pending.iter().any(|pending| pending.step <= given_up);
        }
        self.pending.retain(|pending| pending.step > committed.max(given_up));
        if let Some((rank, end)) = trouble {
            news.extend(self.degrade("StorageFails", || {
                let why = &end.write_error;
                format!("rank {rank} cannot write its checkpoint, training goes on: {why}")
            }));
        } else if !self.is_waiting() && !self.overdue && self.degraded.take().is_some() {
            news.push(News::Recovered);
        }
        Ok(news)
    }

    fn degrade(&mut self, reason: &'static str, why: impl FnOnce() -> String) -> Option<News> {
        let known = self.degraded.replace(reason) == Some(reason);
        (!known).then(|| News::Degraded(reason, why()))
    }

    /// The attempt began without what storage should have given; a checkpoint is due at once.
    pub fn begin_degraded(&mut self, why: &str) -> Option<News> {
        self.overdue = true;
        self.degrade("StorageFails", || format!("training goes on without storage: {why}"))
    }

    /// The state of `step` waits to be written, and storage fails: on rank 0's word older ones that
    /// are under way make room for it.
    pub fn give_up_older(&mut self, step: u64) {
        let older = self.pending.iter().filter(|pending| pending.step < step);
        if let (0, Some(newest), false) = (self.rank, older.last(), self.trouble.is_empty()) {
            self.giving_up = self.giving_up.max(newest.step);
        }
    }

    /// Nothing of the attempt before is waited for, and on rank 0's word, from the next step's end
    /// on, nothing of this one that is under way.
    pub fn lose_patience(&mut self) {
        self.desk.ask(Ask::GiveUpEarlier);
        if self.rank == 0 {
            self.giving_up = self.pending.back().map_or(0, |pending| pending.step);
        }
    }

    /// Whether the checkpoint of `step` was given up.
    pub fn has_given_up(&self, step: u64) -> bool {
        self.given_up >= step && self.committed < step
    }

    /// Commits that were not told yet, after the last collective.
    pub fn last_commit(&mut self) -> Option<u64> {
        let committed = self.desk.progress().committed;
        let is_new = committed > self.committed;
        self.committed = self.committed.max(committed);
        if is_new && self.rank == 0 {
            self.desk.ask(Ask::Heard { step: committed });
        }
        is_new.then_some(committed)
    }

    /// Checkpoints that made room for newer ones.
    pub fn take_removed(&self) -> Vec<u64> {
        self.desk.take_removed()
    }

    pub fn cancel(&self) {
        self.desk.cancel();
    }

    /// Waits for what is left to do, such as removing old checkpoints.
    pub fn finish(&mut self, at_most: Duration) {
        self.desk.finish(at_most);
    }
}

/// A commit stands behind the records of the steps before it, which take their time. A thread waits
/// for them, and orders commits as they came: of two the newer one is told last. None: there is no
/// thread, and nothing waits for records.
fn committer(desk: Desk, attempt: u32, flush: Flush) -> Option<Sender<u64>> {
    let (commits, ordered) = channel();
    let work = move || {
        while let Ok(first) = ordered.recv() {
            let steps: Vec<u64> = iter::once(first).chain(ordered.try_iter()).collect();
            flush();
            steps.into_iter().for_each(|step| desk.ask(Ask::Commit { attempt, step }));
        }
    };
    let started = std::thread::Builder::new().name("commit".to_string()).spawn(work);
    started.is_ok().then_some(commits)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_is_saved_at_a_stop_is_given_time_by_its_size() {
        let save = |bytes: u64| Patience::default().for_state(bytes).save.as_secs();
        assert_eq!([0, 1 << 30, 1 << 40].map(save), [45, 45 + 102, 540]);
        let none = Patience { save: Duration::ZERO, ..Patience::default() };
        assert_eq!(none.for_state(0).save, Duration::ZERO);
    }
}
