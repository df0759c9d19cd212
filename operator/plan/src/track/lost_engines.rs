//! Engines that were lost, and devices that gave them up.

use super::{DEVICE_FAILURES_KEPT, Happening, Tracker};
use crate::repeat::gives_up_itself;
use crate::observed::{DeviceFailure, Millis, keep_newest};
use moejob_protocol::report::Event;

impl Tracker {
    pub(super) fn note_engine(&mut self, name: &str, event: &Event, now: Millis) -> Vec<Happening> {
        let Some(node) = self.observed.worker(name).map(|worker| worker.node.clone()) else {
            return Vec::new();
        };
        let gang = self.observed.gang();
        let Some(loss) = self.engines.heard((name, &node), gang, event, now).cloned() else {
            return Vec::new();
        };
        if loss.by_device {
            let (device, name, words) = (loss.device, loss.place(), loss.cause.clone());
            let failures = &mut self.observed.record.device_failures;
            failures.push(DeviceFailure { node, device, name, words, at: now });
            keep_newest(failures, DEVICE_FAILURES_KEPT);
        }
        if gives_up_itself(&loss.cause) {
            self.present.engine_end.get_or_insert_with(|| loss.cause.clone());
        }
        vec![Happening::EngineLost(loss)]
    }
}
