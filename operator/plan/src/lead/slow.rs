//! Links that are slower than the job's profile expects, by what rank 0 tells of its steps.

use super::JobLoop;
use crate::observed::Millis;
use crate::traffic::{self, Expected};
use moejob_protocol::communication::{CommunicationReport, Link, VerbReport};
use moejob_protocol::report::StepReport;
use std::collections::BTreeMap;

/// A verb is told that was slow in so many looks, one behind the other.
const LOOKS: u32 = 4;
/// Slow is less than this part of what is expected.
const PART: f64 = 0.5;
/// Fewer bytes say more of who waits for whom than of links.
const BYTES_MIN: u64 = 1 << 20;

/// What was told of an attempt.
#[derive(Debug, Default)]
pub(super) struct Slow {
    attempt: u32,
    expected: Vec<Expected>,
    /// By the name of the verb: looks behind each other in which it was slow.
    looks: BTreeMap<&'static str, u32>,
    pub newest: Option<CommunicationReport>,
}

impl Slow {
    /// Takes a look in; what there is to tell of it. `expected` is asked once an attempt.
    fn look(
        &mut self,
        attempt: u32,
        of: CommunicationReport,
        expected: impl FnOnce() -> Vec<Expected>,
    ) -> Vec<String> {
        if attempt != self.attempt {
            *self = Slow { attempt, expected: expected(), ..Slow::default() };
        }
        let mut told = Vec::new();
        for expected in &self.expected {
            let name = expected.verb.name();
            // Beside products few multiprocessors move tokens, as slowly as products allow.
            let at_leisure = |of: &VerbReport| of.beside && of.link == Link::Window.name();
            let found = of.verbs.get(name).filter(|found| !at_leisure(found));
            let found = found.filter(|found| found.bytes >= BYTES_MIN);
            let found = found.and_then(|found| Some((found, found.bytes_per_second()?)));
            let Some(((found, rate), least)) = found.zip(expected.bytes_per_second()) else {
                continue;
            };
            let looks = self.looks.entry(name).or_default();
            if *looks == LOOKS {
                // It is told.
                continue;
            }
            *looks = if rate < PART * least { *looks + 1 } else { 0 };
            if *looks == LOOKS {
                // A worker may call its link anything.
                let link = Link::ALL.into_iter().find(|link| link.name() == found.link);
                let link = link.unwrap_or(expected.link).name();
                told.push(format!(
                    "{name} by {link} reaches {:.1} GB/s of {:.1} expected at rank 0, in {LOOKS} \
                     steps that were looked at: a link is slow, or ranks wait for each other. \
                     `moejob bench --links` measures the links of a node by themselves",
                    rate / 1e9,
                    least / 1e9
                ));
            }
        }
        self.newest = Some(of);
        told
    }
}

impl JobLoop {
    /// A step has told what travelled.
    pub(super) fn hear_of_links(&mut self, report: &StepReport, now: Millis) {
        let Some(communication) = report.communication.clone() else { return };
        let gang = self.tracker.observed.gang().filter(|gang| gang.attempt == report.attempt);
        let Some(gang) = gang else { return };
        let (job, layout) = (self.spec.plannable(), &gang.layout);
        let expected = || job.map(|job| traffic::expected(job, layout)).unwrap_or_default();
        let told = self.slow.look(report.attempt, communication, expected);
        told.into_iter().for_each(|text| self.event(true, SLOW_LINK, text, now));
    }
}

/// The reason of the event.
pub const SLOW_LINK: &str = "LinkSlow";

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::communication::Verb;

    fn report(bytes: u64, seconds: f64) -> CommunicationReport {
        let dispatch = VerbReport { link: "nccl".into(), bytes, seconds, beside: false };
        let verbs = [("dispatch".to_string(), dispatch.clone()), ("other".to_string(), dispatch)];
        CommunicationReport { verbs: verbs.into(), ..CommunicationReport::default() }
    }

    fn expected() -> Vec<Expected> {
        let (verb, link) = (Verb::Dispatch, Link::Nccl);
        let bytes = 200 << 20;
        let seconds = Some(bytes as f64 / 200e9);
        vec![Expected { verb, link, bytes, seconds, exposed_seconds: None, beside: false }]
    }

    #[test]
    fn a_verb_that_stays_slow_is_told_once_an_attempt() {
        let mut slow = Slow::default();
        let mut look = |attempt, rate: f64| {
            let bytes = 100 << 20;
            slow.look(attempt, report(bytes, bytes as f64 / rate), expected)
        };
        // Below half, but not for long.
        for rate in [90e9, 90e9, 90e9, 110e9, 90e9, 90e9, 90e9] {
            assert_eq!(look(1, rate), [""; 0], "{rate}");
        }
        let told = look(1, 90e9);
        assert!(told[0].starts_with("dispatch by nccl reaches 90.0 GB/s of 200.0 expected"));
        assert_eq!(told.len(), 1, "{told:?}");
        assert!((0..9).all(|_| look(1, 50e9).is_empty()));
        // Another attempt may have other links.
        assert!((0..3).all(|_| look(2, 50e9).is_empty()));
        assert_eq!(look(2, 50e9).len(), 1);
    }

    #[test]
    fn little_says_nothing_of_a_link_and_nothing_is_expected_of_what_nobody_knows() {
        let mut slow = Slow::default();
        for _ in 0..9 {
            assert!(slow.look(1, report(BYTES_MIN - 1, 1.0), expected).is_empty());
            assert!(slow.look(1, report(1 << 30, 0.0), expected).is_empty());
        }
        let mut beside = report(1 << 30, 1.0);
        for of in beside.verbs.values_mut() {
            (of.link, of.beside) = (Link::Window.name().to_string(), true);
        }
        for _ in 0..9 {
            assert!(slow.look(1, beside.clone(), expected).is_empty(), "nobody waits for it");
        }
        let untimed = |of| Expected { seconds: None, ..of };
        let unknown = || expected().into_iter().map(untimed).collect();
        for _ in 0..9 {
            assert!(slow.look(2, report(1 << 30, 1e9), unknown).is_empty());
        }
        assert_eq!(slow.newest, Some(report(1 << 30, 1e9)));
    }
}
