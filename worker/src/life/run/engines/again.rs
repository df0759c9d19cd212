//! Engines that are lost, and others in their place.
//!
//! Snapshots lie in the worker, so nothing that keeps an engine from starting is its end at once: a
//! limit of processes, say, or a machine without memory. It is tried again, later and later.

use super::ends::{lost, reason};
use super::{Body, Doing, Engines, Outcome};
use crate::attempt::api::{AttemptEnd, TrainerEvent};
use moejob_protocol::report::{Detail, EventKind, VICTIM};
use std::time::{Duration, Instant};

/// An engine that ends this soon after its start will likely do so again.
const AT_ONCE: Duration = Duration::from_secs(1);
/// Such ends, or engines that could not be started, in a row after which the worker gives up: half
/// a minute with the pauses between them.
const AT_ONCE_MAX: u32 = 9;
/// Before the second start in a row, and before any.
const PAUSE: Duration = Duration::from_millis(250);
const PAUSE_MAX: Duration = Duration::from_secs(8);

/// Starts in a row that led to nothing, and when the next one is.
#[derive(Debug, Default)]
pub(super) struct Again {
    failed: u32,
    due: Option<Instant>,
}

impl Again {
    fn failed(&mut self) {
        self.failed += 1;
        let pause = (PAUSE * 2_u32.pow(self.failed.min(16) - 1)).min(PAUSE_MAX);
        self.due = Some(Instant::now() + pause);
    }

    fn worked(&mut self) {
        *self = Again::default();
    }

    fn is_due(&self) -> bool {
        self.due.is_none_or(|at| Instant::now() >= at)
    }

    fn is_too_often(&self) -> bool {
        self.failed >= AT_ONCE_MAX
    }
}

impl Engines {
    pub(super) fn gone(
        &mut self,
        index: usize,
        (how, last_words): (&str, &str),
        doing: Doing,
        outcome: &mut Outcome,
    ) {
        let Some(mut engine) = self.engines[index].take() else { return };
        if self.ending {
            return;
        }
        if matches!(engine.body, Body::Thread(_)) {
            // A trainer that panicked while it was made or dropped.
            outcome.exit = true;
            return;
        }
        match engine.place.is_none() && engine.started.elapsed() < AT_ONCE {
            true => self.again.failed(),
            false => self.again.worked(),
        }
        if let Some(place) = &engine.place {
            self.memory.take_back(place.rank);
        }
        self.follow(outcome);
        let (pid, uuid) = (engine.pid(), &self.uuids[index]);
        outcome.tell.extend(engine.begin(uuid));
        let why = match &engine.place {
            Some(place) => {
                let first = self.running.as_ref().and_then(|running| running.first.as_ref());
                let reason = reason(doing, first.is_none());
                let behind = if reason == VICTIM { ", behind another loss" } else { "" };
                let place_in_words = place.in_words(uuid, pid);
                let why = format!("the engine of {place_in_words} is lost{behind}: {how}");
                let words = [
                    ("exit", Detail::Text(how.to_string())),
                    ("lastWords", Detail::Text(last_words.to_string())),
                ];
                let kind = EventKind::EngineLost;
                let told = place.told((uuid, pid), kind, reason, &why, words);
                outcome.tell.push(TrainerEvent::Event(told));
                why
            }
            None => {
                tracing::warn!(how, last_words, pid, "an engine without a rank is lost");
                format!("an engine (pid {pid}) is lost: {how}")
            }
        };
        self.leave(index, why, outcome);
        self.start_missing(outcome);
    }

    /// The others of this worker and all peers leave the attempt.
    fn leave(&mut self, index: usize, why: String, outcome: &mut Outcome) {
        let Some(running) = &mut self.running else { return };
        let rank = running.rank(index);
        running.links.lose(rank, &why);
        running.abort(&why);
        let (attempt, first) = (running.attempt(), running.first.get_or_insert(why).clone());
        self.ended(index, attempt, AttemptEnd::Aborted(lost(first)), outcome);
    }

    /// An attempt begins, and some ranks have no engine.
    pub(super) fn miss(&mut self, outcome: &mut Outcome) {
        for index in 0..self.engines.len() {
            if self.engines[index].is_none() {
                self.leave(index, "an engine is lost and not started again yet".into(), outcome);
            }
        }
    }

    /// Starts engines in the place of those that were lost, when it is time.
    pub(super) fn start_missing(&mut self, outcome: &mut Outcome) {
        for index in 0..self.engines.len() {
            if self.engines[index].is_some() || self.ending || !self.again.is_due() {
                continue;
            }
            match self.start(index, true) {
                Ok(engine) => self.engines[index] = Some(engine),
                Err(error) => {
                    tracing::error!(%error, "an engine cannot be started; it is tried again");
                    self.again.failed();
                }
            }
        }
        if self.again.is_too_often() {
            tracing::error!(tries = AT_ONCE_MAX, "engines do not start");
            outcome.exit = true;
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn an_engine_that_does_not_start_is_tried_again_for_half_a_minute() {
        let mut again = Again::default();
        let mut waits = Vec::new();
        while !again.is_too_often() {
            assert!(again.is_due() || again.failed > 0);
            again.failed();
            let due = again.due.expect("it is tried again");
            waits.push(due.saturating_duration_since(Instant::now()).as_secs_f64());
            assert!(!again.is_due());
        }
        let all: f64 = waits[..waits.len() - 1].iter().sum();
        assert!((25.0..35.0).contains(&all), "{waits:?}");
        again.worked();
        assert!(again.is_due() && !again.is_too_often());
    }
}
