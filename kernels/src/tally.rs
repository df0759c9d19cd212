//! What a micro-batch adds to its step's numbers, on the device.

use crate::buffer::{Buffer, DType};
use crate::device::Device;
use crate::step_numbers::StepNumbers;

/// numbers[LOSS] += sum of loss, tokens ascending (a GPU: in a fixed tree);
/// numbers[VALID_TARGETS] += targets that count.
#[derive(Clone, Copy, Debug)]
pub struct TallyLoss {
    /// F64 [T], 0 where ignored
    pub loss: Buffer,
    /// U32 [T], [`crate::IGNORE`] where ignored
    pub targets: Buffer,
    /// Added to: F64, see [`StepNumbers`]
    pub numbers: Buffer,
}

/// numbers[AUX_LOSS] += losses[0]; numbers[Z_LOSS] += losses[1]; the layer's loads += counts.
#[derive(Clone, Copy, Debug)]
pub struct TallyLayer {
    pub layout: StepNumbers,
    /// Among the mixture layers.
    pub moe_layer: usize,
    /// F64 [2]: see [`crate::cuda::Saved`]
    pub losses: Buffer,
    /// U32 [E]
    pub counts: Buffer,
    /// Added to: F64 [`StepNumbers::len`]
    pub numbers: Buffer,
}

impl TallyLoss {
    pub(crate) fn check(&self) {
        let kinds = [self.loss, self.targets, self.numbers].map(|buffer| buffer.dtype());
        assert_eq!(kinds, [DType::F64, DType::U32, DType::F64], "{self:?}");
        assert_eq!(self.loss.len(), self.targets.len(), "{self:?}");
        assert!(self.numbers.len() >= StepNumbers::LOADS, "{self:?}");
    }
}

impl TallyLayer {
    pub(crate) fn check(&self) {
        let kinds = [self.losses, self.counts, self.numbers].map(|buffer| buffer.dtype());
        assert_eq!(kinds, [DType::F64, DType::U32, DType::F64], "{self:?}");
        let lengths = (self.losses.len(), self.counts.len(), self.numbers.len());
        assert_eq!(lengths, (2, self.layout.experts, self.layout.len()), "{self:?}");
        assert!(self.moe_layer < self.layout.layers, "{self:?}");
    }
}

impl Device {
    pub fn tally_loss(&mut self, op: &TallyLoss) {
        op.check();
        match self {
            Device::Cpu(cpu) => cpu.tally_loss(op),
            Device::Cuda(cuda) => cuda.tally_loss(op),
        }
    }

    pub fn tally_layer(&mut self, op: &TallyLayer) {
        op.check();
        match self {
            Device::Cpu(cpu) => cpu.tally_layer(op),
            Device::Cuda(cuda) => cuda.tally_layer(op),
        }
    }
}
