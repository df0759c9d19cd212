//! The time that is left, by the present speed.

use std::time::{Duration, Instant};

/// Steps after which the time that is left is told in a line of its own.
pub const STEPS_MEASURED: usize = 4;

/// Steps per second over the newest steps, so that the time left follows the present speed.
#[derive(Default)]
pub struct Rate {
    /// Of this attempt: steps that were told, and when.
    seen: std::collections::VecDeque<(u64, Instant)>,
}

impl Rate {
    /// Readings at most, and how long they count: a validation or two lie in between.
    const READINGS_MAX: usize = 256;
    const WINDOW: Duration = Duration::from_secs(60);
    /// What is measured over less says nothing, but of steps that take long.
    const LEAST: Duration = Duration::from_secs(1);
    /// The first steps of an attempt compile, and touch memory: those that take so many times what
    /// is usual are left out.
    const UNUSUAL: f64 = 4.0;
    /// What is usual shows in so many readings.
    const READINGS_MIN: usize = 4;

    pub fn readings(&self) -> usize {
        self.seen.len()
    }

    pub fn push(&mut self, step: u64, at: Instant) {
        // A replayed step after a recovery starts the measure anew.
        if self.seen.back().is_some_and(|(last, _)| *last >= step) {
            self.seen.clear();
        }
        self.seen.push_back((step, at));
        if self.seen.len() > Rate::READINGS_MAX {
            // Every second one goes: the window stays, however fast they come.
            let mut at = 0;
            self.seen.retain(|_| {
                at += 1;
                at % 2 == 1
            });
        }
        while self.seen.len() > STEPS_MEASURED
            && self.seen.front().is_some_and(|(_, first)| at - *first > Rate::WINDOW)
        {
            self.seen.pop_front();
        }
    }

    pub fn left(&self, steps: u64) -> Option<Duration> {
        let all: Vec<(u64, Instant)> = self.seen.iter().copied().collect();
        if all.len() < Rate::READINGS_MIN {
            return None;
        }
        let each = |pair: &[(u64, Instant)]| {
            (pair[1].1 - pair[0].1).as_secs_f64() / (pair[1].0 - pair[0].0).max(1) as f64
        };
        let mut sorted: Vec<f64> = all.windows(2).map(each).collect();
        sorted.sort_by(f64::total_cmp);
        let usual = *sorted.get(sorted.len() / 2)?;
        let first = all.windows(2).position(|pair| each(pair) <= Rate::UNUSUAL * usual)?;
        let ((first, began), (last, now)) = (all[first], all[all.len() - 1]);
        let (span, done) = (now - began, last - first);
        if done == 0 {
            return None;
        }
        let left = span.div_f64(done as f64).mul_f64(steps.saturating_sub(last) as f64);
        let is_measured = span >= Rate::LEAST || done >= STEPS_MEASURED as u64 * 256;
        (is_measured || left < Rate::LEAST).then_some(left)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn time_left_follows_the_newest_steps() {
        let start = Instant::now();
        let mut rate = Rate::default();
        assert_eq!(rate.left(10), None);
        for step in 1..=4 {
            rate.push(step, start + Duration::from_secs(step));
        }
        assert_eq!(rate.left(10), Some(Duration::from_secs(6)));
        rate.push(2, start + Duration::from_secs(9));
        assert_eq!(rate.left(10), None);
    }

    /// A first step of seconds, then thousands a second, of which some are told; a stall in the
    /// midst; steps of minutes. What is told is never far from what it takes.
    #[test]
    fn time_left_does_not_jump() {
        let start = Instant::now();
        let told = |durations: &[f64], each: usize, steps: u64| {
            let (mut rate, mut at, mut found) = (Rate::default(), 0.0, Vec::new());
            let whole: f64 = durations.iter().sum();
            for (step, seconds) in (1..).zip(durations) {
                at += seconds;
                if step % each == 0 || step < 5 {
                    rate.push(step as u64, start + Duration::from_secs_f64(at));
                    let left = rate.left(steps).map(|left| left.as_secs_f64());
                    // At the end a second more or less is no jump.
                    let least = 0.05 * whole;
                    found.extend(left.map(|left| left.max(least) / (whole - at).max(least)));
                }
            }
            found
        };
        let fast: Vec<f64> = [4.0, 2.0].into_iter().chain([0.0005; 20_000]).collect();
        let found = told(&fast, 40, 20_002);
        assert!(found.len() > 100, "{}", found.len());
        assert!(found.iter().all(|ratio| (0.3..2.0).contains(ratio)), "{found:?}");
        let mut stalls = vec![0.02; 3_000];
        stalls[700] = 3.0;
        let found = told(&stalls, 1, 3_000);
        assert!(found.iter().all(|ratio| (0.3..3.0).contains(ratio)), "{found:?}");
        let slow: Vec<f64> = [300.0].into_iter().chain([90.0; 50]).collect();
        let found = told(&slow, 1, 51);
        assert!(found.len() >= 45, "{}", found.len());
        assert!(found.iter().all(|ratio| (0.3..2.5).contains(ratio)), "{found:?}");
    }
}
