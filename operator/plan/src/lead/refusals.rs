//! What becomes of a job whose pods the API server does not take: a quota is used up, a policy or
//! a class of the pods is against it, or the namespace lacks the operator's Role.
//!
//! A gang is all or nothing. Pods that were taken wait for the others for a while; then the job
//! gives all of them back, stands back, and tries again: so two jobs that fit a quota one at a time
//! do not hold half of it each.

use super::{JobLoop, WriteErrorKind, doubled};
use crate::allocate::{HOLD_TIMEOUT, Standing};
use crate::observed::Millis;
use crate::record::Refused;

/// Pods that were taken wait at most so long for those that are refused, whatever the job's
/// gangTimeout is: others may be able to use the nodes.
pub const PATIENCE: Millis = 120_000;
/// How long it stands back, doubled with each time up to the second.
const PAUSE_FIRST: Millis = 30_000;
const PAUSE_MAX: Millis = 600_000;
/// In a namespace without the Role nothing can succeed: so often it is tried.
const PROBE_EVERY: Millis = 60_000;
/// A refusal that nothing has followed for so long is another story: writes that fail are tried
/// again within a minute.
const APART: Millis = 150_000;

#[derive(Debug, Default)]
pub struct Refusals {
    /// What the next leader goes on from.
    pub of: Refused,
    /// The allocation of nodes has not heard of the latest change.
    turned: bool,
}

impl Refusals {
    /// As the leader before has left it.
    pub fn restore(of: Refused) -> Refusals {
        Refusals { turned: of.until.is_some(), of }
    }

    /// Pods were refused, and none that were taken is of use without them. Whether the job now
    /// stands back, as it has waited for `patience`. `seed` sets apart jobs that were refused at
    /// the same time.
    fn refused(&mut self, patience: Millis, seed: u64, now: Millis) -> bool {
        let known = self.of.since.filter(|(_, newest)| now < newest + APART);
        let (since, _) = known.unwrap_or((now, now));
        self.of.since = Some((since, now));
        if now < since + patience {
            return false;
        }
        let pause = doubled(PAUSE_FIRST, self.of.times, PAUSE_MAX);
        self.stand_back(now + pause + seed % pause);
        self.of.times = self.of.times.saturating_add(1);
        true
    }

    fn stand_back(&mut self, until: Millis) {
        (self.of.until, self.of.since, self.turned) = (Some(until), None, true);
    }

    /// All pods were taken, or an attempt has begun with those that were.
    pub fn taken(&mut self) {
        *self = Refusals { turned: self.turned, ..Refusals::default() };
    }

    /// When it has stood back long enough.
    pub fn due(&self) -> Option<Millis> {
        self.of.until
    }

    /// Why it holds nothing now.
    pub fn standing_back(&self) -> Option<&(String, String)> {
        self.of.until.map(|_| &self.of.why)
    }

    /// Whether the job stands back or comes forth again since this was last asked.
    pub fn take_turned(&mut self, now: Millis) -> bool {
        if self.of.until.is_some_and(|at| now >= at) {
            self.of.until = None;
            self.turned = true;
        }
        std::mem::take(&mut self.turned)
    }
}

impl JobLoop {
    /// The API server has refused some pods of a batch; one that it did not answer, or that had
    /// another's name, is no refusal.
    pub(super) fn pods_refused(&mut self, kind: WriteErrorKind, now: Millis) {
        let observed = &self.tracker.observed;
        let forbidden = kind == WriteErrorKind::Forbidden;
        let patience = match Standing::of(observed) {
            // It trains on without them.
            Standing::Running => return,
            Standing::Waiting if forbidden => 0,
            Standing::Waiting => observed.wanted.gang_timeout.min(PATIENCE),
            Standing::Holding { .. } => HOLD_TIMEOUT,
        };
        let seed = self.id.uid.bytes().fold(0u64, |sum, byte| sum * 31 % 65_521 + u64::from(byte));
        if self.refusals.refused(patience, seed, now) {
            if forbidden {
                self.refusals.stand_back(now + PROBE_EVERY);
            }
            self.refusals.of.why = self.outbox.failure.clone().unwrap_or_default();
            self.report.unsaved = true;
            // It is planned at once, without any node: what it has goes.
            self.outbox.retry_now(now);
            self.granted.nodes.clear();
            let text = "gives back its nodes: its pods are refused".to_string();
            self.note(false, text);
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

    #[test]
    fn refusals_of_long_ago_count_for_nothing() {
        let mut refusals = Refusals::default();
        assert!(!refusals.refused(PATIENCE, 0, 1_000));
        // Hours later a pod is refused once.
        assert!(!refusals.refused(PATIENCE, 0, 1_000 + 3_600_000));
        assert!(refusals.standing_back().is_none());
        assert!(!refusals.refused(PATIENCE, 0, 1_000 + 3_600_000 + APART));
    }
}
