//! A shard that leaves for host memory beside the next step.
//!
//! ```text
//! step n ends | begin_cut: enqueued on the device's lane | step n+1: forward, backward
//!             | hold: its update waits on the device for the lane | end_cut: the shard is whole
//! ```
//! State changes in a step's update alone, so until then it may be read beside everything else.
//! Where memory is not pinned, and on processors, a shard is copied at once: all threads of a
//! processor compute, and one that copies beside them only takes its time from them.

use crate::engine::machine::check;
use crate::engine::model::Model;
use crate::state::rank::DeviceError;
use crate::state::slot::Filling;
use crate::state::snapshot::{begin_cut_into, cut_into};
use moejob_kernels::{Buffer, Device, StepPhase};

/// What is on its way.
#[derive(Debug, Default)]
pub(crate) struct Lane {
    /// Reads of state are enqueued on the device's lane.
    open: bool,
    leaving: Option<Filling>,
    /// On processors: a shard is copied when the next update would change it.
    late: bool,
    /// There: how the copying went, once it was done.
    copied: Option<Result<(), DeviceError>>,
}

impl Model {
    /// From now on processors copy a shard when the next update would change it, which is as late
    /// as a GPU may: for tests of what happens meanwhile.
    pub fn cut_late(&mut self) {
        self.lane.late = self.device.as_cuda().is_none();
    }

    /// Whether a shard could be copied into this slot beside the next step.
    pub fn can_leave(&self, slot: &Filling) -> bool {
        self.lane.late || slot.is_pinned() && self.device.as_cuda().is_some()
    }

    /// Begins to copy this rank's shard into a slot that it can leave for. No update may come
    /// before [`Model::hold`].
    pub fn begin_cut(&mut self, mut into: Filling) {
        assert!(self.can_leave(&into) && self.lane.leaving.is_none(), "one at a time");
        self.lane.copied = None;
        if !self.lane.late {
            self.on_lane(|model| begin_cut_into(model, into.bytes_mut()));
        }
        self.lane.leaving = Some(into);
    }

    fn on_lane(&mut self, enqueue: impl FnOnce(&mut Model)) {
        let begin = |model: &mut Model, open| {
            model.lane.open = open;
            match (model.device.as_cuda_mut(), open) {
                (Some(cuda), true) => cuda.lane_begin(),
                (Some(cuda), false) => cuda.lane_end(),
                (None, _) => {}
            }
        };
        begin(self, true);
        enqueue(self);
        begin(self, false);
    }

    /// Reads of state are enqueued on the device's lane.
    pub(crate) fn reads_by_lane(&self) -> bool {
        self.lane.open
    }

    /// Reads bytes of the device: at once, or on its lane.
    pub(crate) fn read_bytes(&mut self, from: Buffer, into: &mut [u8]) {
        let open = self.lane.open;
        match &mut self.device {
            // SAFETY: `into` is memory of the slot that `begin_cut` keeps, which nobody looks at
            // before `end_cut` has waited. If the model is dropped first, so is its device, which
            // waits, and then the slot.
            Device::Cuda(cuda) if open => unsafe { cuda.lane_read(from, into) },
            device => device.read(from, into),
        }
    }

    /// What comes next changes state: it waits for what is on its way.
    pub(crate) fn hold(&mut self) {
        if self.lane.leaving.is_none() {
            return;
        }
        if let Some(cuda) = self.device.as_cuda_mut() {
            cuda.lane_hold();
            // That wait is no part of the update.
            self.device.phase(StepPhase::Other);
        } else if self.lane.copied.is_none() {
            self.copy_late();
        }
    }

    fn copy_late(&mut self) {
        let Some(mut into) = self.lane.leaving.take() else { return };
        self.lane.copied = Some(cut_into(self, into.bytes_mut()));
        self.lane.leaving = Some(into);
    }

    /// Waits for what is on its way: the slot, whole, and for how many seconds the update has
    /// waited. None: nothing was.
    ///
    /// # Errors
    /// The device failed: the bytes say nothing.
    pub fn end_cut(&mut self) -> Result<Option<(Filling, f64)>, DeviceError> {
        if self.lane.late && self.lane.copied.is_none() {
            self.copy_late();
        }
        let seconds = self.device.as_cuda_mut().map_or(0.0, |cuda| cuda.lane_settle());
        let Some(slot) = self.lane.leaving.take() else { return Ok(None) };
        check(&self.device, self.layout.mesh.world())?;
        self.lane.copied.take().unwrap_or(Ok(()))?;
        Ok(Some((slot, seconds)))
    }
}
