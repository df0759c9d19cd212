//! Whose bytes go next over the stream between two workers: those that a step waits for, or those
//! of copies that travel beside the steps.
//!
//! ```text
//! copy begins -- steps go first, it takes what they leave --> YIELDS_FOR -- halves --> it is there
//! ```
//! While a copy is on its way the state before it is what a lost worker costs, and no other
//! snapshot is taken. So steps whose bytes never end must not hold it up for ever. On a line of `R`
//! bytes a second a copy of `S` bytes is on its way for `YIELDS_FOR + 2 S / R` at most.

use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

/// For so long a copy takes only what steps leave it. Most steps leave it enough, since they have
/// moments in which they only compute.
pub(super) const YIELDS_FOR: Duration = Duration::from_secs(10);
/// A copy that has had nothing to send for so long has ended; what comes then is another one. A
/// rank that fills its pipe takes microseconds, on a machine with much else to do a moment more.
pub(super) const ENDED_AFTER: Duration = Duration::from_secs(2);

/// So long behind a write of a step's bytes it is taken to have more.
const STEPPING_FOR: Duration = Duration::from_millis(2);

/// When steps had bytes for any of a worker's streams; strands ask, which have others.
#[derive(Debug)]
pub(super) struct Traffic {
    since: Instant,
    /// Microseconds.
    last: AtomicU64,
    /// Writes of steps' bytes that are under way.
    writes: AtomicU32,
}

impl Default for Traffic {
    fn default() -> Traffic {
        let (last, writes) = Default::default();
        Traffic { since: Instant::now(), last, writes }
    }
}

impl Traffic {
    fn micros(&self, now: Instant) -> u64 {
        let micros = now.saturating_duration_since(self.since).as_micros();
        u64::try_from(micros).unwrap_or(u64::MAX)
    }

    /// A write of a step's bytes begins.
    pub fn begin(&self) {
        self.writes.fetch_add(1, Ordering::Relaxed);
    }

    pub fn end(&self, now: Instant) {
        self.last.store(self.micros(now).max(1), Ordering::Relaxed);
        self.writes.fetch_sub(1, Ordering::Relaxed);
    }

    pub fn is_stepping(&self, now: Instant) -> bool {
        let last = self.last.load(Ordering::Relaxed);
        let since = self.micros(now).saturating_sub(last);
        let recent = last > 0 && u128::from(since) < STEPPING_FOR.as_micros();
        recent || self.writes.load(Ordering::Relaxed) > 0
    }
}

/// Of one stream, for what it sends.
#[derive(Debug, Default)]
pub(super) struct Precedence {
    /// When the copy that is on its way began, and when it had bytes last.
    copy: Option<(Instant, Instant)>,
}

impl Precedence {
    /// How many bytes of copies join a write with `of_steps` bytes of steps. `waiting`: a copy has
    /// some; `alone`: where steps have fewer, a copy goes with them; `chunk`: what it sends at
    /// once.
    pub fn beside(
        &mut self,
        now: Instant,
        of_steps: usize,
        waiting: bool,
        (alone, chunk): (usize, usize),
    ) -> usize {
        if !waiting {
            return 0;
        }
        let under_way = self.copy.filter(|(_, last)| now.duration_since(*last) < ENDED_AFTER);
        let (began, _) = under_way.unwrap_or((now, now));
        self.copy = Some((began, now));
        match now.duration_since(began) >= YIELDS_FOR {
            true => of_steps.max(chunk),
            false if of_steps < alone => chunk,
            false => 0,
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const SIZES: (usize, usize) = (4 << 10, 64 << 10);
    /// Of a step in one write.
    const BATCH: usize = 256 << 10;
    /// Bytes a second of the line.
    const RATE: f64 = 100e6;

    /// Seconds until copies of so many bytes each are there, one after the other, beside steps that
    /// have `of_steps` bytes for each write; at most `limit` seconds each.
    fn travel(copies: &[usize], of_steps: usize, pause: f64, limit: f64) -> Vec<Option<f64>> {
        let (start, mut seconds) = (Instant::now(), 0.0);
        let mut precedence = Precedence::default();
        let mut times = Vec::new();
        for bytes in copies {
            let (began, mut left) = (seconds, *bytes);
            while left > 0 && seconds - began < limit {
                let now = start + Duration::from_secs_f64(seconds);
                let room = precedence.beside(now, of_steps, true, SIZES);
                let sent = room.min(left);
                left -= sent;
                seconds += (of_steps + sent) as f64 / RATE;
            }
            times.push((left == 0).then_some(seconds - began));
            // Steps go on without a copy.
            let until = seconds + pause;
            while seconds < until {
                let now = start + Duration::from_secs_f64(seconds);
                assert_eq!(precedence.beside(now, of_steps, false, SIZES), 0);
                seconds += of_steps.max(1) as f64 / RATE;
            }
        }
        times
    }

    #[test]
    fn steps_whose_bytes_never_end_hold_a_copy_up_for_a_bounded_time() {
        let times = travel(&[500_000_000, 100_000_000], BATCH, 3.0, 60.0);
        let [first, second] = times[..] else { panic!("{times:?}") };
        let (first, second) = (first.expect("it arrives"), second.expect("it arrives"));
        // Each yields first, then has half of the line.
        assert!((19.9..20.1).contains(&first), "{first}");
        assert!((11.9..12.1).contains(&second), "{second}");
        // Before that it takes nothing.
        assert_eq!(travel(&[1], BATCH, 0.0, 9.9), [None]);
    }

    #[test]
    fn a_copy_beside_steps_with_little_to_say_has_the_line() {
        let times = travel(&[500_000_000], 100, 0.0, 60.0);
        assert!((5.0..5.1).contains(&times[0].expect("it arrives")), "{times:?}");
        // A step of a few bytes is not made to wait for more than a chunk.
        let mut precedence = Precedence::default();
        assert_eq!(precedence.beside(Instant::now(), 100, true, SIZES), SIZES.1);
    }

    #[test]
    fn steps_are_under_way_while_they_are_written_and_a_moment_longer() {
        let (traffic, start) = (Traffic::default(), Instant::now());
        let at = |ms: u64| start + Duration::from_millis(ms);
        assert!(!traffic.is_stepping(at(0)));
        traffic.begin();
        assert!(traffic.is_stepping(at(500)), "a slow line");
        traffic.end(at(500));
        assert!(traffic.is_stepping(at(501)) && !traffic.is_stepping(at(503)));
    }

    /// Its rank may be slow to fill the pipe: that begins no other copy.
    #[test]
    fn a_moment_without_bytes_is_no_end_of_a_copy() {
        let (start, mut precedence) = (Instant::now(), Precedence::default());
        let mut at = |ms: u64, waiting| {
            precedence.beside(start + Duration::from_millis(ms), BATCH, waiting, SIZES)
        };
        for ms in (0..10_000).step_by(1_500) {
            assert_eq!(at(ms, true), 0, "{ms}");
            assert_eq!(at(ms + 700, false), 0, "{ms}");
        }
        assert_eq!(at(10_100, true), BATCH);
        assert_eq!(at(11_000, false), 0);
        assert_eq!(at(12_000, true), BATCH);
        // Two seconds later another one has begun.
        assert_eq!(at(14_000, true), 0);
    }
}
