//! Grouped products over the rows of each expert.
//!
//! Routed rows lie expert-major: expert g has rows offsets[g] .. offsets[g + 1]. The number of
//! rows, offsets[G], is known to the device alone; row buffers may be longer. What a row becomes
//! never depends on the other rows. Each expert's weights are a buffer of their own. Weight
//! gradients may be asked for by smaller segments, such as each source's rows of an expert, so that
//! they can be summed in an order that does not depend on the number of ranks.
//!
//! A gated expert computes act(x Wg^T) * (x Wu^T), its hidden buffers hold gate | up, W = 2 F wide.
//! An ungated one computes act(x Wu^T); W = F, and the gate lists are empty.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// The function between the two products of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// max(x, 0); its derivative at 0 is 0
    Relu,
    /// x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is the tanh form of x * Phi(x)
    /// (Hendrycks and Gimpel 2016; `gelu_pytorch_tanh` of Hugging Face)
    Gelu,
}

/// h[r] = [x[row_index[r]] Wg^T | x[row_index[r]] Wu^T], a = act(gate) * up.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsUp<'a> {
    pub dim: usize,
    pub hidden: usize,
    pub activation: Activation,
    pub gated: bool,
    /// [any, D]
    pub x: Buffer,
    /// u32 [R]: the row of x that each routed row is
    pub row_index: Buffer,
    /// u32 [G + 1]
    pub offsets: Buffer,
    /// G of [F, D]; empty if not gated
    pub w_gate: &'a [Buffer],
    /// G of [F, D]
    pub w_up: &'a [Buffer],
    /// Output [R, W]
    pub h: Buffer,
    /// Output [R, F]
    pub a: Buffer,
}

/// y[r] = a[r] W2^T
#[derive(Clone, Copy, Debug)]
pub struct ExpertsDown<'a> {
    pub dim: usize,
    pub hidden: usize,
    /// [R, F]
    pub a: Buffer,
    /// u32 [G + 1]
    pub offsets: Buffer,
    /// G of [D, F]
    pub w_down: &'a [Buffer],
    /// Output [R, D]
    pub y: Buffer,
}

/// With da' = dy[row_index[r]] W2 (the gradient before the routing weight s):
/// ds[r] = <da', a[r]>, a_scaled[r] = s[r] * a[r], da = s[r] * da', and dh[r] is da taken back
/// through the activation.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsDownBackward<'a> {
    pub dim: usize,
    pub hidden: usize,
    pub activation: Activation,
    pub gated: bool,
    /// [any, D]: gradients of tokens
    pub dy: Buffer,
    /// u32 [R]: the row of dy that each routed row belongs to
    pub row_index: Buffer,
    /// u32 [G + 1]
    pub offsets: Buffer,
    /// G of [D, F]
    pub w_down: &'a [Buffer],
    /// [R, W]
    pub h: Buffer,
    /// [R, F]
    pub a: Buffer,
    /// [R]: routing weights
    pub s: Buffer,
    /// Output [R]
    pub ds: Buffer,
    /// Output [R, W]
    pub dh: Buffer,
    /// Output [R, F]
    pub a_scaled: Buffer,
}

/// dW2[s] = sum over the segment's rows, ascending as in a product, of dy[row_index[r]]^T
/// a_scaled[r]; zeros for an empty segment.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsDownWgrad<'a> {
    pub dim: usize,
    pub hidden: usize,
    /// [any, D]
    pub dy: Buffer,
    /// u32 [R]
    pub row_index: Buffer,
    /// u32 [S + 1]
    pub offsets: Buffer,
    /// [R, F]
    pub a_scaled: Buffer,
    /// Outputs: S of [D, F]
    pub dw_down: &'a [Buffer],
}

/// dx[r] = dgate[r] Wg, then += dup[r] Wu.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsDgrad<'a> {
    pub dim: usize,
    pub hidden: usize,
    pub gated: bool,
    /// [R, W]
    pub dh: Buffer,
    /// u32 [G + 1]
    pub offsets: Buffer,
    /// G of [F, D]; empty if not gated
    pub w_gate: &'a [Buffer],
    /// G of [F, D]
    pub w_up: &'a [Buffer],
    /// Output [R, D]
    pub dx: Buffer,
}

/// dWg[s] = sum over the segment's rows of dgate[r]^T x[row_index[r]], dWu alike with dup; zeros
/// for an empty segment.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsUpWgrad<'a> {
    pub dim: usize,
    pub hidden: usize,
    pub gated: bool,
    /// [any, D]
    pub x: Buffer,
    /// u32 [R]
    pub row_index: Buffer,
    /// u32 [S + 1]
    pub offsets: Buffer,
    /// [R, W]
    pub dh: Buffer,
    /// Outputs: S of [F, D]; empty if not gated
    pub dw_gate: &'a [Buffer],
    /// Outputs: S of [F, D]
    pub dw_up: &'a [Buffer],
}

impl Device {
    pub fn experts_up(&mut self, op: &ExpertsUp) {
        match self {
            Device::Cpu(cpu) => on_float!(op.x.dtype(), T => cpu.experts_up::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("experts_up"),
        }
    }

    pub fn experts_down(&mut self, op: &ExpertsDown) {
        match self {
            Device::Cpu(cpu) => on_float!(op.a.dtype(), T => cpu.experts_down::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("experts_down"),
        }
    }

    pub fn experts_down_backward(&mut self, op: &ExpertsDownBackward) {
        match self {
            Device::Cpu(cpu) => on_float!(op.a.dtype(), T => cpu.experts_down_backward::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("experts_down_backward"),
        }
    }

    pub fn experts_down_wgrad(&mut self, op: &ExpertsDownWgrad) {
        match self {
            Device::Cpu(cpu) => on_float!(op.dy.dtype(), T => cpu.experts_down_wgrad::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("experts_down_wgrad"),
        }
    }

    pub fn experts_dgrad(&mut self, op: &ExpertsDgrad) {
        match self {
            Device::Cpu(cpu) => on_float!(op.dh.dtype(), T => cpu.experts_dgrad::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("experts_dgrad"),
        }
    }

    pub fn experts_up_wgrad(&mut self, op: &ExpertsUpWgrad) {
        match self {
            Device::Cpu(cpu) => on_float!(op.x.dtype(), T => cpu.experts_up_wgrad::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("experts_up_wgrad"),
        }
    }
}
