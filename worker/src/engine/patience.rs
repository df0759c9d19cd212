//! How long the host waits for a device that may never answer: a kernel that does not end, on this
//! GPU or on one that it waits for, gives no error.

use crate::gang::comm::AbortHandle;
use std::collections::VecDeque;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::{Duration, Instant};

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
pub(crate) struct Patience {
    took: VecDeque<Duration>,
    /// What a machine of the attempt may stand still for.
    more: Duration,
}

impl Patience {
    pub fn took(&mut self, step: Duration) {
        self.took.truncate(COUNTED - 1);
        self.took.push_front(step);
    }

    /// Each step from the next one on may take longer by this.
    pub fn wait_out(&mut self, more: Duration) {
        self.more = more;
    }

    /// For the next step.
    pub fn limit(&self) -> Duration {
        if self.took.len() < COUNTED_MIN {
            return OTHERWISE;
        }
        let mut all: Vec<Duration> = self.took.iter().copied().collect();
        all.sort_unstable();
        (all[all.len() / 2] * TIMES).max(LEAST) + self.more
    }
}

/// When a step has to be over, for another thread than its own: a device takes a bounded number of
/// launches, and the next one waits for a kernel that does not end, without a limit of its own.
#[derive(Debug)]
pub(crate) struct Deadline {
    began: Instant,
    /// Milliseconds since `began`.
    at: AtomicU64,
    /// How long a micro-batch may take, in milliseconds.
    limit: AtomicU64,
}

/// No step is under way.
const NEVER: u64 = u64::MAX;
/// Who drives the device may notice by itself, and then knows more.
const GRACE: Duration = Duration::from_millis(500);
const LOOK_EVERY: Duration = Duration::from_millis(100);

impl Deadline {
    pub fn new() -> Arc<Deadline> {
        let [at, limit] = [NEVER; 2].map(AtomicU64::new);
        Arc::new(Deadline { began: Instant::now(), at, limit })
    }

    pub fn set(&self, limit: Duration) {
        let until = (self.began.elapsed() + limit).as_millis();
        self.at.store(u64::try_from(until).unwrap_or(NEVER), Ordering::Relaxed);
        let limit = u64::try_from(limit.as_millis()).unwrap_or(NEVER);
        self.limit.store(limit, Ordering::Relaxed);
    }

    pub fn clear(&self) {
        self.at.store(NEVER, Ordering::Relaxed);
    }

    /// Does what is no work of the device, and does not count: to wait for data, for example. What
    /// comes behind it, a micro-batch, has all of the limit: a step may have any number of them.
    pub fn outside<T>(&self, work: impl FnOnce() -> T) -> T {
        let at = self.at.swap(NEVER, Ordering::Relaxed);
        let done = work();
        if at != NEVER {
            let limit = Duration::from_millis(self.limit.load(Ordering::Relaxed));
            self.set(limit);
        }
        done
    }

    /// By how much it is missed.
    fn missed(&self, now: Instant) -> Option<Duration> {
        let at = Duration::from_millis(self.at.load(Ordering::Relaxed));
        now.duration_since(self.began).checked_sub(at)
    }
}

/// From now on the attempt of `rank` is aborted when `deadline` is missed, until its engine is
/// dropped. The worker ends an engine that does not leave then.
pub(crate) fn guard(deadline: &Arc<Deadline>, rank: u32, abort: AbortHandle) {
    let deadline: Weak<Deadline> = Arc::downgrade(deadline);
    let watch = move || {
        while let Some(deadline) = deadline.upgrade() {
            if deadline.missed(Instant::now()).is_some_and(|missed| missed > GRACE) {
                abort.abort(&format!(
                    "rank {rank} or one that it waits for hangs: its GPU takes no more work"
                ));
                return;
            }
            drop(deadline);
            std::thread::sleep(LOOK_EVERY);
        }
    };
    // Without it the worker waits for the engine's own words.
    let _ = std::thread::Builder::new().name("deadline".to_string()).spawn(watch);
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_deadline_is_missed_only_while_a_step_is_under_way() {
        let deadline = Deadline::new();
        let after = |seconds| deadline.missed(Instant::now() + Duration::from_secs(seconds));
        assert_eq!(after(1_000), None, "no step");
        deadline.set(Duration::from_secs(10));
        assert_eq!(after(9), None);
        let missed = after(100).expect("it is");
        assert!(missed > Duration::from_secs(89) && missed < Duration::from_secs(95), "{missed:?}");
        let waited = Duration::from_millis(30);
        deadline.outside(|| {
            assert_eq!(after(1_000), None, "this does not count");
            std::thread::sleep(waited);
        });
        let moved = deadline.at.load(Ordering::Relaxed);
        assert!(moved >= 10_000 + 30, "{moved} ms");
        deadline.clear();
        assert_eq!(after(1_000), None, "it was over in time");
        deadline.outside(|| {});
        assert_eq!(after(1_000), None, "no step is begun by it");
    }

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
        assert_eq!(limit_after(&[400_000; 40]), 8_000_000, "long steps have long limits");
        assert_eq!(limit_after(&[1_000; 40]), 20_000, "what was long ago is forgotten");
        patience.wait_out(Duration::from_secs(30));
        assert_eq!(patience.limit().as_millis(), 50_000, "a machine may stand still");
        patience.wait_out(Duration::from_secs(900));
        assert_eq!(patience.limit().as_millis(), 920_000, "or for long");
    }
}
