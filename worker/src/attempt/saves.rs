//! Checkpoints of one attempt: begun when they are due, committed when all ranks have written, and
//! never waited for but at the end.
//!
//! ```text
//! due -> room? -> begin (writer) -> every rank written -> commit ordered -> committed
//!          `-> overdue: begun once storage has caught up
//! ```
//! Everything here follows from what all ranks said in a step's end, so all of them do it alike.

use crate::checkpoint::{NOT_FINITE, Writer};
use crate::gang::step_end::StepEnd;
use crate::state::slots::Slot;
use std::collections::VecDeque;
use std::sync::Arc;
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
    /// The job's last checkpoint, without which its training was for nothing.
    pub end: Duration,
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
            start: Duration::from_secs(300),
            stop: Duration::from_secs(45),
            end: Duration::from_secs(3600),
            retry: Duration::from_millis(250),
            pending_bytes: 8 << 20,
        }
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

#[derive(Debug)]
pub(crate) struct Saves {
    rank: u32,
    writer: Writer,
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
}

impl Saves {
    /// `state_bytes` of all ranks together.
    pub fn new(rank: u32, writer: Writer, state_bytes: u64, patience: &Patience) -> Saves {
        let beside = (patience.pending_bytes / state_bytes.max(1)) as usize;
        Saves {
            rank,
            writer,
            pending: VecDeque::new(),
            pending_max: (1 + beside).min(PENDING_MAX),
            overdue: false,
            committed: 0,
            given_up: 0,
            giving_up: 0,
            degraded: None,
        }
    }

    /// Whether a checkpoint that is due now can begin.
    pub fn has_room(&self) -> bool {
        self.pending.len() < self.pending_max
    }

    pub fn is_waiting(&self) -> bool {
        !self.pending.is_empty()
    }

    /// One that was due could not begin, and storage has caught up since.
    pub fn is_overdue(&self) -> bool {
        self.overdue && self.pending.is_empty()
    }

    /// One is due and storage has not caught up: it will begin once it has.
    pub fn put_off(&mut self, step: u64) -> Option<News> {
        self.overdue = true;
        let waiting = self.pending.front()?.step;
        if self.degraded.is_some() {
            return None;
        }
        self.degrade("StorageSlow", || {
            format!(
                "the checkpoint of step {waiting} is still being written at step {step}: those \
                 due meanwhile are left out, training goes on"
            )
        })
    }

    pub fn begin(&mut self, step: u64, bytes: Arc<Slot>) {
        self.overdue = false;
        self.writer.shard(step, bytes);
        self.pending.push_back(Pending { step, ordered: false });
    }

    /// What this rank's storage has to say at the end of a step.
    pub fn fill(&self, end: &mut StepEnd) {
        let progress = self.writer.progress();
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
                if self.rank == 0 {
                    self.writer.commit(pending.step);
                }
            }
        }
        let mut news = Vec::new();
        let (committed, given_up) = (ends[0].committed, ends[0].given_up);
        if committed > self.committed {
            self.committed = committed;
            news.push(News::Committed(committed));
        }
        if given_up > self.given_up {
            self.given_up = given_up;
            self.writer.give_up(given_up);
            self.overdue |= self.pending.iter().any(|pending| pending.step <= given_up);
        }
        self.pending.retain(|pending| pending.step > committed.max(given_up));
        if let Some((rank, end)) = trouble {
            news.extend(self.degrade("StorageFails", || {
                let why = &end.write_error;
                format!("rank {rank} cannot write its checkpoint, training goes on: {why}")
            }));
        } else if self.pending.is_empty() && !self.overdue && self.degraded.take().is_some() {
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

    /// On rank 0: from the next step's end on nothing that is under way is waited for.
    pub fn lose_patience(&mut self) {
        self.giving_up = self.pending.back().map_or(0, |pending| pending.step);
    }

    /// Whether the checkpoint of `step` was given up.
    pub fn has_given_up(&self, step: u64) -> bool {
        self.given_up >= step && self.committed < step
    }

    /// Commits that were not told yet, after the last collective.
    pub fn last_commit(&mut self) -> Option<u64> {
        let committed = self.writer.progress().committed;
        let is_new = committed > self.committed;
        self.committed = self.committed.max(committed);
        is_new.then_some(committed)
    }

    /// Checkpoints that made room for newer ones.
    pub fn take_removed(&self) -> Vec<u64> {
        self.writer.take_removed()
    }

    pub fn cancel(&self) {
        self.writer.cancel();
    }

    /// Waits for what is left to do, such as removing old checkpoints.
    pub fn finish(&mut self, at_most: Duration) {
        self.writer.finish(at_most);
    }
}
