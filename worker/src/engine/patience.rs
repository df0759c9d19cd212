//! How long the host waits for a device that may never answer: a kernel that does not end, on this
//! GPU or on one that it waits for, gives no error.

use std::collections::VecDeque;
use std::time::Duration;

/// A step may take so many times the median of those before it,
const TIMES: u32 = 20;
/// and at least this long.
const LEAST: Duration = Duration::from_secs(5);
/// First steps load kernels; and what is no step may take long.
pub(crate) const OTHERWISE: Duration = Duration::from_secs(600);
/// Steps that a median is of.
const COUNTED: usize = 31;
const COUNTED_MIN: usize = 3;

/// Durations of the steps of an attempt.
#[derive(Debug, Default)]
pub(crate) struct Patience(VecDeque<Duration>);

impl Patience {
    pub fn took(&mut self, step: Duration) {
        self.0.truncate(COUNTED - 1);
        self.0.push_front(step);
    }

    /// For the next step.
    pub fn limit(&self) -> Duration {
        if self.0.len() < COUNTED_MIN {
            return OTHERWISE;
        }
        let mut all: Vec<Duration> = self.0.iter().copied().collect();
        all.sort_unstable();
        (all[all.len() / 2] * TIMES).clamp(LEAST, OTHERWISE)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_step_may_take_some_times_what_steps_took() {
        let mut patience = Patience::default();
        let mut limit_after = |milliseconds: &[u64]| {
            milliseconds.iter().for_each(|step| patience.took(Duration::from_millis(*step)));
            patience.limit().as_millis()
        };
        assert_eq!(limit_after(&[9_000, 300]), 600_000, "first steps");
        assert_eq!(limit_after(&[300]), 6_000, "the median");
        assert_eq!(limit_after(&[10; 16]), 5_000, "at least");
        assert_eq!(limit_after(&[400_000; 40]), 600_000, "at most");
        assert_eq!(limit_after(&[1_000; 40]), 20_000, "what was long ago is forgotten");
    }
}
