//! The loss of next-token prediction.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// The target of a token that does not count.
pub const IGNORE: u32 = u32::MAX;

/// loss[t] = ln sum_v e^logits[t, v] - logits[t, targets[t]], unscaled, 0 where ignored.
/// With `gradient`, logits[t, v] becomes scale * (softmax(logits[t])[v] - (v == targets[t])), or 0
/// where ignored; without it the logits are left as scratch, to be used no more.
#[derive(Clone, Copy, Debug)]
pub struct CrossEntropy {
    pub tokens: usize,
    pub vocab: usize,
    /// 1 / the number of valid targets of the step, known from the data
    pub scale: f64,
    pub gradient: bool,
    /// Overwritten: [T, V]
    pub logits: Buffer,
    /// u32 [T], below V or IGNORE
    pub targets: Buffer,
    /// Output F64 [T]
    pub loss: Buffer,
}

impl Device {
    pub fn cross_entropy(&mut self, op: &CrossEntropy) {
        match self {
            Device::Cpu(cpu) => on_float!(op.logits.dtype(), T => cpu.cross_entropy::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("cross_entropy"),
        }
    }
}
