//! What people are told of a job is bounded: the same words once in a while, and so many events in
//! a minute. A worker that cries wolf, or an image made to do so, fills no event log.

use crate::observed::Millis;
use moejob_manifest::problem::{printable, printable_lines};
use moejob_manifest::words::several;
use moejob_protocol::bounds::shorten;
use std::collections::VecDeque;

/// So many events at once, and then one in so long.
pub const EVENTS_BURST: u32 = 24;
pub const EVENT_EVERY: Millis = 5_000;
/// The same words are told again after so long, with how often they were meant.
const AGAIN_AFTER: Millis = 60_000;
/// Different words that are remembered.
const WORDS_MAX: usize = 64;
/// The API server cuts what is longer.
const NOTE_BYTES_MAX: usize = 1000;

#[derive(Debug, Default)]
pub struct EventLog {
    /// Reason and note, when they were last told, and how often they were not since.
    told: VecDeque<(String, String, Millis, u32)>,
    /// Events that may be told at once, in milliseconds of `EVENT_EVERY`.
    spent: Millis,
    spent_at: Millis,
    left_out: u32,
}

impl EventLog {
    /// The words to tell, if they are to be told.
    pub fn admit(&mut self, reason: &str, note: String, now: Millis) -> Option<String> {
        let mut note = printable(&note);
        shorten(&mut note, NOTE_BYTES_MAX);
        let known = |of: &&mut (String, String, Millis, u32)| of.0 == reason && of.1 == note;
        if let Some((.., at, times)) = self.told.iter_mut().find(known) {
            if now < *at + AGAIN_AFTER {
                *times = times.saturating_add(1);
                return None;
            }
            *at = now;
            let times = std::mem::take(times);
            if !self.take(now) {
                return None;
            }
            return Some(match times {
                0 => note,
                times => format!("{note} ({} more)", several(times, "time")),
            });
        }
        if !self.take(now) {
            return None;
        }
        self.told.push_back((reason.to_string(), note.clone(), now, 0));
        if self.told.len() > WORDS_MAX {
            self.told.pop_front();
        }
        match std::mem::take(&mut self.left_out) {
            0 => Some(note),
            left_out => Some(format!("{note} ({left_out} other events were left out)")),
        }
    }

    fn take(&mut self, now: Millis) -> bool {
        self.spent = self.spent.saturating_sub(now.saturating_sub(self.spent_at));
        self.spent_at = now;
        if self.spent + EVENT_EVERY > u64::from(EVENTS_BURST) * EVENT_EVERY {
            self.left_out = self.left_out.saturating_add(1);
            return false;
        }
        self.spent += EVENT_EVERY;
        true
    }
}

/// Of a worker's words: they stand in the record, in conditions and in causes.
pub fn plain(text: &mut String) {
    shorten(text, NOTE_BYTES_MAX);
    *text = printable_lines(text);
    shorten(text, NOTE_BYTES_MAX);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_same_words_are_told_once_in_a_while() {
        let mut log = EventLog::default();
        assert_eq!(log.admit("A", "x".into(), 0).as_deref(), Some("x"));
        for now in 1..100 {
            assert_eq!(log.admit("A", "x".into(), now), None);
        }
        assert_eq!(log.admit("B", "x".into(), 100).as_deref(), Some("x"), "another reason");
        let again = log.admit("A", "x".into(), AGAIN_AFTER);
        assert_eq!(again.as_deref(), Some("x (99 times more)"));
    }

    #[test]
    fn of_words_the_oldest_are_forgotten_and_no_more_than_must_be() {
        let admitted = |others: usize| {
            let mut log = EventLog::default();
            log.admit("A", "x".into(), 0);
            log.admit("A", "x".into(), 1);
            let mut now = 1;
            for other in 0..others {
                now += EVENT_EVERY;
                log.admit("A", other.to_string(), now).expect("told");
            }
            log.admit("A", "x".into(), now + EVENT_EVERY).expect("told again")
        };
        assert_eq!(admitted(WORDS_MAX - 1), "x (1 time more)");
        assert_eq!(admitted(WORDS_MAX), "x");
    }

    #[test]
    fn a_flood_of_different_words_is_cut() {
        let mut log = EventLog::default();
        let told = (0..10_000u32).filter(|at| log.admit("A", at.to_string(), 0).is_some()).count();
        assert_eq!(told, EVENTS_BURST as usize);
        let next = log.admit("A", "after".into(), EVENT_EVERY).expect("one more");
        assert_eq!(next, format!("after ({} other events were left out)", 10_000 - EVENTS_BURST));
        assert_eq!(log.admit("A", "and".into(), EVENT_EVERY), None);
        assert!(log.told.len() <= WORDS_MAX);
    }

    #[test]
    fn words_of_others_are_short_and_plain() {
        let mut log = EventLog::default();
        let note = log.admit("A", format!("\u{1b}[2J{}", "\u{e9}".repeat(900)), 0).expect("told");
        assert!(note.len() <= NOTE_BYTES_MAX && !note.contains('\u{1b}'), "{note}");
    }
}
