//! A mixture-of-experts layer, router included, as one op: what each backend does in its own way.
//!
//! logits = x Wr^T; choice, weights s and losses as in [`crate::Route`]; for the experts e of a
//! token h = [x Wg^T | x Wu^T], a = act(h gate) * h up (a = act(x Wu^T) if not gated), y = a W2^T;
//! out = sum over its experts, ascending, of s * y. A CPU computes in F32 or F64, all buffers of
//! one kind. CUDA computes in Bf16, F16 or F32; its router's weights, bias and gradient are F32,
//! as are logits and losses in any case but F64's.

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::{Gradients, LayerError, MoeDesc, MoeTensors, Saved};
use crate::device::Device;

/// `out` [T, D] = the layer of `tensors.x` (+ `tensors.residual`, before anything is rounded);
/// fills `tensors.saved`.
#[derive(Clone, Copy, Debug)]
pub struct MoeForward {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
    /// Output [T, D]
    pub out: Buffer,
}

/// H of a forward once more, from x and the routing that it left: the same bits. So layers may
/// share the memory of H, each computing its own again before its backward.
#[derive(Clone, Copy, Debug)]
pub struct MoeHidden {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
}

/// The gradient of <dout, out> + aux_coef * auxiliary loss + z_coef * z loss by x and the weights,
/// the choice and the loads held constant. With a loss scale it is the gradient of that many times
/// the two losses, beside a `dout` that was multiplied already. `tensors` are those of the forward;
/// H is overwritten.
#[derive(Clone, Copy, Debug)]
pub struct MoeBackward {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
    /// [T, D]
    pub dout: Buffer,
    /// Output [T, D]
    pub dx: Buffer,
    pub gradients: Gradients,
}

/// What a layer keeps, and a workspace that all layers of a device can share.
#[derive(Clone, Copy, Debug)]
pub struct MoePlan {
    pub saved: Saved,
    /// Of U8, this much: plan it once, for the largest
    pub workspace_bytes: usize,
}

impl Device {
    /// Reserves what one layer of `desc` keeps on this device; says why if it cannot have one.
    /// On CUDA compiles its kernels.
    pub fn moe_plan(
        &mut self,
        desc: &MoeDesc,
        plan: &mut ArenaPlan,
    ) -> Result<MoePlan, LayerError> {
        match self {
            Device::Cpu(_) => Ok(crate::cpu::moe::plan(desc, plan)?),
            Device::Cuda(cuda) => cuda.moe_plan(desc, plan),
        }
    }

    pub fn moe_forward(&mut self, op: &MoeForward) {
        match self {
            Device::Cpu(_) => crate::cpu::moe::forward(self, op),
            Device::Cuda(cuda) => cuda.moe_forward(op),
        }
    }

    pub fn moe_hidden(&mut self, op: &MoeHidden) {
        match self {
            Device::Cpu(_) => crate::cpu::moe::hidden(self, op),
            Device::Cuda(cuda) => cuda.moe_hidden(op),
        }
    }

    pub fn moe_backward(&mut self, op: &MoeBackward) {
        match self {
            Device::Cpu(_) => crate::cpu::moe::backward(self, op),
            Device::Cuda(cuda) => cuda.moe_backward(op),
        }
    }
}

impl MoeDesc {
    /// What the router's weights and their gradient are of.
    pub fn router_element(&self) -> DType {
        if self.element == DType::F64 { DType::F64 } else { DType::F32 }
    }
}
