//! What becomes of a job whose pods the API server does not take: a quota is used up, a policy or
//! a class of the pods is against it.
//!
//! A gang is all or nothing. Pods that were taken wait for the others as long as for one that does
//! not connect, `recovery.gangTimeout`; then the job gives all of them back, stands back for a
//! while, and tries again: so two jobs that fit a quota one at a time do not hold half of it each.

use super::job::JobState;
use moejob_plan::allocate::{HOLD_TIMEOUT, Standing};
use moejob_plan::observed::Millis;

/// How long it stands back, doubled with each time up to the second.
const PAUSE_FIRST: Millis = 30_000;
const PAUSE_MAX: Millis = 600_000;

#[derive(Debug, Default)]
pub struct Refusals {
    /// The first one since all pods were taken.
    since: Option<Millis>,
    /// It stands back until then.
    until: Option<Millis>,
    times: u32,
    /// Reason and message of the last one before it stood back.
    why: (String, String),
    /// The allocation of nodes has not heard of the latest change.
    turned: bool,
}

impl Refusals {
    /// Pods were refused, and none that were taken is of use without them. Whether the job now
    /// stands back, as it has waited for `patience`. `seed` sets apart jobs that were refused at
    /// the same time.
    fn refused(&mut self, patience: Millis, seed: u64, now: Millis) -> bool {
        let since = *self.since.get_or_insert(now);
        if now < since + patience {
            return false;
        }
        let pause = (PAUSE_FIRST << self.times.min(10)).min(PAUSE_MAX);
        self.until = Some(now + pause + seed % pause);
        self.times += 1;
        self.since = None;
        self.turned = true;
        true
    }

    /// All pods were taken.
    fn taken(&mut self) {
        *self = Refusals { turned: self.turned, ..Refusals::default() };
    }

    /// When it has stood back long enough.
    pub fn due(&self) -> Option<Millis> {
        self.until
    }

    /// Why it holds nothing now.
    pub fn standing_back(&self) -> Option<&(String, String)> {
        self.until.map(|_| &self.why)
    }

    /// Whether the job stands back or comes forth again since this was last asked.
    pub fn take_turned(&mut self, now: Millis) -> bool {
        if self.until.is_some_and(|at| now >= at) {
            self.until = None;
            self.turned = true;
        }
        std::mem::take(&mut self.turned)
    }
}

impl JobState {
    /// A batch that was to make pods is written, `all` of it or not.
    pub(super) fn pods_written(&mut self, all: bool, now: Millis) {
        if all {
            return self.refusals.taken();
        }
        let observed = &self.tracker.observed;
        let patience = match Standing::of(observed) {
            Standing::Waiting => observed.wanted.gang_timeout,
            Standing::Holding { .. } => HOLD_TIMEOUT,
            // It trains on without them.
            Standing::Running => return,
        };
        let seed = self.id.uid.bytes().fold(0u64, |sum, byte| sum * 31 % 65_521 + u64::from(byte));
        if self.refusals.refused(patience, seed, now) {
            self.refusals.why = self.failure.clone().unwrap_or_default();
            // It is planned at once, without any node: what it has goes.
            (self.failures, self.retry_at) = (0, now);
            self.nodes_seen.clear();
            tracing::info!(job = self.id.name, "gives back its nodes: its pods are refused");
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn after_its_patience_a_job_stands_back_longer_and_longer() {
        let mut refusals = Refusals::default();
        let (patience, mut now) = (30_000, 1_000);
        for pause in [30_000, 60_000, 120_000, 240_000, 480_000, 600_000, 600_000] {
            assert!(!refusals.refused(patience, 0, now));
            assert!(!refusals.refused(patience, 0, now + patience - 1));
            assert!(!refusals.take_turned(now));
            now += patience;
            assert!(refusals.refused(patience, 0, now));
            assert!(refusals.standing_back().is_some());
            assert_eq!(refusals.due(), Some(now + pause));
            assert!(refusals.take_turned(now) && !refusals.take_turned(now + pause - 1));
            now += pause;
            assert!(refusals.take_turned(now) && refusals.standing_back().is_none());
        }
        refusals.taken();
        refusals.refused(0, 7, now);
        assert_eq!(refusals.due(), Some(now + 30_007), "jobs of different seeds come apart");
    }
}
