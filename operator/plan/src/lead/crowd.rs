//! While many pods come up, what only tells people something waits: each write costs the API server
//! time that the pods of all jobs wait for. It waits for a bounded time, so nothing starves.
//!
//! A first status that waits is seldom written: the record of the attempt tells the same.

use super::JobLoop;
use crate::observed::{Millis, WorkerState};

/// So many pods on their way are a crowd.
const CROWD: usize = 8;
/// A pod that is there for longer, and whose container does not run, waits for its image or for a
/// volume: the API server is not what it lacks.
const COMING_MAX: Millis = 10_000;
/// A change of the status, and the first budget, wait for so long at most.
pub(super) const YIELD_MAX: Millis = 2_000;
/// The status of a job whose own workers start does, beyond the time in which it settles.
pub(super) const YIELD_STARTING_MAX: Millis = 5_000;

/// Whether so many pods of these jobs are coming up that other writes would delay them.
pub fn is_crowd<'j>(jobs: impl Iterator<Item = &'j JobLoop>, now: Millis) -> bool {
    jobs.map(|job| job.coming(now)).sum::<usize>() >= CROWD
}

impl JobLoop {
    /// Pods that are on their way. While the plan waits for a write, its whole gang does.
    fn coming(&self, now: Millis) -> usize {
        if self.outbox.busy {
            return self.granted.nodes.len();
        }
        let workers = self.tracker.observed.workers.iter();
        let starting = workers.filter(|of| matches!(of.state, WorkerState::Starting { .. }));
        starting.filter(|of| self.pods.comes(&of.name, now, COMING_MAX)).count()
    }

    /// What has waited for the crowd's end is written then.
    pub(super) fn on_crowd(&mut self, crowd: bool) {
        let ends = self.crowd && !crowd;
        self.dirty |= ends && (self.report.yields || self.objects.yields.is_some());
        self.crowd = crowd;
    }
}
