//! Workers on machines that stand still for seconds.

use super::{Happening, Tracker};
use crate::decide::FREEZE_PATIENCE;
use crate::observed::{Millis, WorkerState};

impl Tracker {
    /// Nothing is heard of it. Whether that is no loss yet, because its node is to freeze.
    pub fn waits_out(&mut self, name: &str, now: Millis) -> Option<Vec<Happening>> {
        let node = self.observed.worker(name)?.node.clone();
        if !self.observed.nodes.iter().any(|of| of.name == node && of.freezes) {
            return None;
        }
        let worker = self.worker(name)?;
        let ends = matches!(
            worker.state,
            WorkerState::Completed { .. } | WorkerState::Dead { .. } | WorkerState::Silent
        );
        if worker.stopping || ends {
            return None;
        }
        let known = worker.quiet_since.is_some();
        let since = *worker.quiet_since.get_or_insert(now);
        let freezes = Happening::Freezes { name: name.to_string(), node };
        let told = if known { Vec::new() } else { vec![freezes] };
        (now < since + FREEZE_PATIENCE).then_some(told)
    }

    /// It is heard again. Its gang stood still meanwhile, and goes on from here.
    pub fn thawed(&mut self, name: &str, now: Millis) {
        let Some(worker) = self.worker(name) else { return };
        if worker.quiet_since.take().is_some()
            && self.observed.gang().is_some_and(|gang| gang.has(name))
        {
            self.observed.record.progressed_at = now;
        }
    }

    pub(super) fn gave_up(&mut self, name: &str) {
        let Some(worker) = self.worker(name) else { return };
        worker.quiet_since = None;
        let cause = "nothing heard of it, while its node was to freeze";
        let lost = self.silent(name, cause);
        self.news.extend(lost);
    }
}
