//! Engines that were lost, and devices that gave them up.
//!
//! A lost rank takes others along: they leave their devices while kernels wait for it, and not all
//! of them can. So an attempt has one culprit, the first that was lost, and all others are victims.

use super::{DEVICE_FAILURES_KEPT, Happening, Tracker};
use crate::repeat::gives_up_itself;
use crate::observed::{DeviceFailure, Millis, keep_newest};
use moejob_protocol::report::Event;

impl Tracker {
    pub(super) fn note_engine(&mut self, name: &str, event: &Event, now: Millis) -> Vec<Happening> {
        let Some(node) = self.observed.worker(name).map(|worker| worker.node.clone()) else {
            return Vec::new();
        };
        let is_first = self.observed.record.first_lost.is_none();
        let gang = (self.observed.gang(), is_first);
        let Some(loss) = self.engines.heard((name, &node), gang, event, now) else {
            return Vec::new();
        };
        if loss.by_device {
            let (device, name, words) = (loss.device, loss.place(), loss.cause.clone());
            let failures = &mut self.observed.record.device_failures;
            failures.push(DeviceFailure { node, device, name, words, at: now });
            keep_newest(failures, DEVICE_FAILURES_KEPT);
        }
        if !loss.victim {
            self.note_first(name);
            if gives_up_itself(&loss.cause) {
                self.present.engine_end.get_or_insert_with(|| loss.cause.clone());
            }
        }
        vec![Happening::EngineLost(loss)]
    }

    /// A member of the present gang was lost, or an engine of it: the first one is why.
    pub(super) fn note_first(&mut self, name: &str) {
        if self.observed.gang().is_some_and(|gang| gang.has(name)) {
            self.observed.record.first_lost.get_or_insert_with(|| name.to_string());
        }
    }
}
