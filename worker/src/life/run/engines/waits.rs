//! What a worker tells of ranks that wait for their data, or for storage. It sees that in the
//! memory that it shares with each engine, also while the engine stands in a read that does not
//! come back.
//!
//! ```text
//! every tick: waits? stumbles? -> life for the leader's clock, as long as patience lasts
//!                              -> Degraded: at once where it stumbles, after 5 s where it is slow,
//!                                 again each time it has lasted twice as long -> Recovered
//! ```

use crate::attempt::api::Wait;
use crate::disk::Stumbling;
use moejob_protocol::report::EventKind;
use std::time::Duration;

/// What is shorter is no news.
const SLOW: Duration = Duration::from_secs(5);

/// What was seen of one rank in this attempt.
#[derive(Clone, Debug, Default)]
pub(super) struct Waits {
    /// The wait that is under way, and since when.
    now: Option<(u32, Duration)>,
    /// It is told again once it has lasted so long.
    next: Duration,
    /// By what is waited for: stretches that were told, and whether it is well again.
    of: [Told; 2],
}

#[derive(Clone, Debug, Default)]
struct Told {
    number: u64,
    /// Since when it is told to be degraded.
    degraded: Option<Duration>,
}

/// An event: its kind, its reason, what is said of the rank, and for how long that has been so.
pub(super) type Says = (EventKind, &'static str, String, Duration);

impl Waits {
    /// Looks at a rank at `now`, and gives what is to be told.
    pub fn look(
        &mut self,
        waits: Option<(u32, Wait)>,
        stumbles: Option<(Wait, Stumbling)>,
        now: Duration,
    ) -> Vec<Says> {
        let mut says = Vec::new();
        let stumbling = stumbles.as_ref().filter(|(_, of)| of.lasted.is_none());
        if let Some((what, of)) = &stumbles
            && of.number > self.of(*what).number
        {
            let told = self.of(*what);
            told.number = of.number;
            told.degraded.get_or_insert(now);
            let text = format!("{} cannot be read: {}; it is tried again", name(*what), of.why);
            says.push((kinds(*what).0, "StorageFails", text, Duration::ZERO));
        }
        match waits {
            None => self.now = None,
            Some((number, what)) => {
                let begun = self.now.filter(|(of, _)| *of == number);
                let (_, since) = *self.now.insert(begun.unwrap_or((number, now)));
                if begun.is_none() {
                    self.next = SLOW;
                }
                let waited = now.saturating_sub(since);
                if waited >= self.next {
                    self.next = waited * 2;
                    self.of(what).degraded.get_or_insert(since);
                    let seconds = waited.as_secs();
                    let why = stumbling.map(|(_, of)| format!(": {}", of.why)).unwrap_or_default();
                    let reason = if stumbling.is_some() { "StorageFails" } else { "StorageSlow" };
                    let text = format!("it has waited for {} for {seconds} s{why}", name(what));
                    says.push((kinds(what).0, reason, text, waited));
                }
            }
        }
        for what in [Wait::Data, Wait::Storage] {
            let still = waits.is_some_and(|(_, of)| of == what) && self.waited(now) >= SLOW
                || stumbling.is_some_and(|(of, _)| *of == what);
            if !still && let Some(since) = self.of(what).degraded.take() {
                let lasted = now.saturating_sub(since);
                let (name, seconds) = (name(what), lasted.as_secs_f64());
                let text = format!("{name} can be read again, after {seconds:.1} s");
                says.push((kinds(what).1, "Read", text, lasted));
            }
        }
        says
    }

    /// For how long the rank has waited.
    pub fn waited(&self, now: Duration) -> Duration {
        self.now.map_or(Duration::ZERO, |(_, since)| now.saturating_sub(since))
    }

    fn of(&mut self, what: Wait) -> &mut Told {
        &mut self.of[usize::from(what == Wait::Storage)]
    }
}

fn name(what: Wait) -> &'static str {
    match what {
        Wait::Data => "its data",
        Wait::Storage => "what it begins with",
    }
}

/// That it is worse, and that it is well again.
fn kinds(what: Wait) -> (EventKind, EventKind) {
    match what {
        Wait::Data => (EventKind::DataDegraded, EventKind::DataRecovered),
        Wait::Storage => (EventKind::CheckpointDegraded, EventKind::CheckpointRecovered),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn at(seconds: u64) -> Duration {
        Duration::from_secs(seconds)
    }

    fn stumbling(number: u64, lasted: Option<u64>) -> Option<(Wait, Stumbling)> {
        let why = "/data/a.bin: Input/output error".to_string();
        Some((Wait::Data, Stumbling { number, why, lasted: lasted.map(at) }))
    }

    /// `kind reason: text` of each.
    fn lines(says: Vec<Says>) -> Vec<String> {
        let line = |(kind, reason, text, _): Says| format!("{kind:?} {reason}: {text}");
        says.into_iter().map(line).collect()
    }

    #[test]
    fn a_wait_is_told_when_it_is_long_and_again_when_it_is_twice_as_long() {
        let mut waits = Waits::default();
        let waiting = Some((1, Wait::Data));
        let mut told = Vec::new();
        for second in 0..=95 {
            told.extend(waits.look(waiting, None, at(second)).into_iter().map(|says| says.3));
        }
        assert_eq!(told, [5, 10, 20, 40, 80].map(at));
        assert_eq!(
            lines(waits.look(Some((2, Wait::Data)), None, at(96))),
            ["DataRecovered Read: its data can be read again, after 96.0 s"]
        );
        // Each wait by itself: many short ones are no long one.
        for second in 97..1000 {
            assert_eq!(waits.look(Some((second, Wait::Data)), None, at(second.into())), []);
        }
        assert_eq!(waits.look(None, None, at(1000)), []);
    }

    #[test]
    fn what_stumbles_is_told_at_once_and_once() {
        let mut waits = Waits::default();
        let first = "DataDegraded StorageFails: its data cannot be read: /data/a.bin: Input/output \
                     error; it is tried again";
        assert_eq!(lines(waits.look(None, stumbling(1, None), at(3))), [first]);
        assert_eq!(waits.look(None, stumbling(1, None), at(4)), []);
        assert_eq!(
            lines(waits.look(None, stumbling(1, Some(2)), at(5))),
            ["DataRecovered Read: its data can be read again, after 2.0 s"]
        );
        assert_eq!(waits.look(None, stumbling(1, Some(2)), at(6)), []);
        // One that was over before it was seen.
        let both = lines(waits.look(None, stumbling(2, Some(0)), at(7)));
        assert_eq!(both.len(), 2, "{both:?}");
        assert!(both[1].starts_with("DataRecovered"), "{both:?}");
        // Waited for, with the reason.
        waits.look(Some((9, Wait::Data)), stumbling(3, None), at(10));
        let told = lines(waits.look(Some((9, Wait::Data)), stumbling(3, None), at(16)));
        let expected = "DataDegraded StorageFails: it has waited for its data for 6 s: \
                        /data/a.bin: Input/output error";
        assert_eq!(told, [expected]);
    }

    #[test]
    fn a_checkpoint_that_is_read_is_another_thing() {
        let mut waits = Waits::default();
        let waiting = Some((1, Wait::Storage));
        waits.look(waiting, None, at(0));
        assert_eq!(
            lines(waits.look(waiting, None, at(700))),
            ["CheckpointDegraded StorageSlow: it has waited for what it begins with for 700 s"]
        );
        assert_eq!(waits.look(None, None, at(701))[0].0, EventKind::CheckpointRecovered);
    }
}
