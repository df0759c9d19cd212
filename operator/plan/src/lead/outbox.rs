//! Actions on their way out: the queue of what is planned, the batch that is under way, and what
//! waits for its end.

use super::streams::{replaces, weight};
use super::{Said, WriteError, WriteErrorKind, doubled};
use crate::decide::Action;
use crate::observed::Millis;
use std::collections::VecDeque;

/// Frames of all workers of a job that wait for the end of a batch; one that is longer than 1 KiB
/// counts as several. A gang of 512 tells some thousand things when it breaks.
pub const FRAMES_WAITING_MAX: usize = 8_192;
/// After a write that failed, doubled with each failure; in a cluster up to the second.
const RETRY_FIRST: Millis = 500;
pub(super) const RETRY_MAX: Millis = 60_000;

#[derive(Debug, Default)]
pub(super) struct Outbox {
    pub queue: VecDeque<Action>,
    /// A batch is under way that the plan waits for.
    pub busy: bool,
    /// A plan could not be recorded because a status is being written.
    pub awaits_status: bool,
    /// Each with its weight.
    waiting: VecDeque<(Waiting, usize)>,
    /// Of all that waits.
    weight: usize,
    retry_at: Millis,
    failures: u32,
    /// A write was refused because the job had changed.
    conflicted: bool,
    /// The last write that failed, for status: reason and message.
    pub failure: Option<(String, String)>,
}

/// Something that waits while a batch is under way.
#[derive(Debug)]
pub(super) enum Waiting {
    Stream(String, Said),
    /// Its newest facts are in `Pods` already.
    Pod(String),
}

impl Outbox {
    pub fn may_plan(&self, now: Millis) -> bool {
        !self.busy && now >= self.retry_at
    }

    /// When a plan that failed is tried again.
    pub fn due(&self, now: Millis) -> Option<Millis> {
        (!self.busy && self.retry_at > now).then_some(self.retry_at)
    }

    pub fn retry_now(&mut self, now: Millis) {
        (self.failures, self.retry_at) = (0, now);
    }

    /// The job has changed: a write on an older version may have waited for this.
    pub fn job_changed(&mut self) {
        if std::mem::take(&mut self.conflicted) {
            self.retry_at = 0;
        }
    }

    /// The batch is written as a whole.
    pub fn succeeded(&mut self) {
        (self.failures, self.retry_at, self.failure) = (0, 0, None);
    }

    /// The plan is made anew after a pause, `most` at most.
    pub fn failed(&mut self, now: Millis, most: Millis) {
        self.queue.clear();
        self.failures += 1;
        self.retry_at = now + doubled(RETRY_FIRST, self.failures, most);
    }

    /// Remembers why; whether that is news.
    pub fn note_failure(&mut self, reason: &str, error: &WriteError) -> bool {
        let same = |known: &(String, String)| known.0 == reason && known.1 == error.message;
        let known = self.failure.as_ref().is_some_and(same);
        let conflict = error.kind == WriteErrorKind::Conflict;
        self.conflicted |= conflict;
        self.failure = Some((reason.to_string(), error.message.clone()));
        !known && !conflict
    }

    /// Whether there is still room. Of a pod only the newest facts count.
    pub fn wait(&mut self, mut waiting: Waiting) -> bool {
        let last = self.waiting.back().map(|(last, _)| last);
        match (&waiting, last) {
            // The last of it that waits: what came between must stay between.
            (Waiting::Pod(name), Some(Waiting::Pod(other))) if name == other => return true,
            (Waiting::Stream(name, said), Some(Waiting::Stream(of, last)))
                if name == of && replaces(said, last) =>
            {
                self.next_of(VecDeque::pop_back);
            }
            _ => {}
        }
        let weight = match &mut waiting {
            Waiting::Stream(_, said) => weight(said),
            Waiting::Pod(_) => 1,
        };
        self.weight += weight;
        self.waiting.push_back((waiting, weight));
        self.weight <= FRAMES_WAITING_MAX
    }

    pub fn next_waiting(&mut self) -> Option<Waiting> {
        self.next_of(VecDeque::pop_front)
    }

    fn next_of(
        &mut self,
        end: fn(&mut VecDeque<(Waiting, usize)>) -> Option<(Waiting, usize)>,
    ) -> Option<Waiting> {
        let (waiting, weight) = end(&mut self.waiting)?;
        self.weight -= weight;
        Some(waiting)
    }

    /// Forgets what a stream has said that is given up.
    pub fn forget_stream(&mut self, name: &str) {
        let is_of_it = |of: &Waiting| matches!(of, Waiting::Stream(other, _) if other == name);
        self.waiting.retain(|(of, _)| !is_of_it(of));
        self.weight = self.waiting.iter().map(|(_, weight)| weight).sum();
    }

    /// The stream of which most waits.
    pub fn loudest(&self) -> Option<String> {
        let mut weights: super::ByName<usize> = Default::default();
        for (waiting, weight) in &self.waiting {
            if let Waiting::Stream(name, _) = waiting {
                *weights.entry(name.clone()).or_default() += weight;
            }
        }
        weights.into_iter().max_by_key(|(_, weight)| *weight).map(|(name, _)| name)
    }
}
