//! What stands before a router's logits: noise on its input, and the cosine gate.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};
use crate::philox::Draw;

/// Which random factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mask {
    /// Uniform in [1 - eps, 1 + eps): the jitter of Switch Transformer (Fedus et al. 2021, section
    /// 2.4; `multiplicative_jitter` of Mesh TensorFlow).
    Jitter { eps: f64 },
    /// 0 with probability p, else 1 / (1 - p) (Srivastava et al. 2014; Tutel's `input_dropout_p`).
    Dropout { p: f64 },
}

/// y (+)= x * m, m[t, d] a function of (seed, step, layer, token, d). Its gradient is the same op.
/// On a GPU either of x and y may be F32 beside elements of 16 bits.
#[derive(Clone, Copy, Debug)]
pub struct MaskRows {
    pub rows: usize,
    pub dim: usize,
    pub mask: Mask,
    pub draw: Draw,
    pub accumulate: bool,
    /// [rows, dim]
    pub x: Buffer,
    /// Output [rows, dim]
    pub y: Buffer,
}

/// y[r, :] = x[r, :] / max(|x[r, :]|, 1e-12), norm[r] = |x[r, :]|; sums in f64.
#[derive(Clone, Copy, Debug)]
pub struct NormalizeRows {
    pub rows: usize,
    pub dim: usize,
    /// [rows, dim]
    pub x: Buffer,
    /// Output [rows, dim]
    pub y: Buffer,
    /// Output F64 [rows]
    pub norm: Buffer,
}

/// dx (+)= (dy - y <dy, y>) / norm; dy / 1e-12 where the norm is smaller.
#[derive(Clone, Copy, Debug)]
pub struct NormalizeRowsBackward {
    pub rows: usize,
    pub dim: usize,
    pub accumulate: bool,
    /// [rows, dim]
    pub y: Buffer,
    /// F64 [rows]
    pub norm: Buffer,
    /// [rows, dim]
    pub dy: Buffer,
    /// Output [rows, dim]
    pub dx: Buffer,
}

/// x *= e^min(temperature, ln 100): the learned scale of the cosine gate (Chi et al. 2022, arXiv
/// 2204.09179; Tutel's `cosine_top`, whose bound this is).
#[derive(Clone, Copy, Debug)]
pub struct Temper {
    /// [1]
    pub temperature: Buffer,
    /// Output [any]
    pub x: Buffer,
}

/// dtemperature (+)= <dx, x> (x as `Temper` left it, the sum in f64 in order), 0 above the bound;
/// then dx *= e^min(temperature, ln 100).
#[derive(Clone, Copy, Debug)]
pub struct TemperBackward {
    /// Of `d_temperature`
    pub accumulate: bool,
    /// [1]
    pub temperature: Buffer,
    /// [any]
    pub x: Buffer,
    /// Output [any]
    pub dx: Buffer,
    /// Output [1]
    pub d_temperature: Buffer,
}

impl Device {
    pub fn mask_rows(&mut self, op: &MaskRows) {
        match self {
            Device::Cpu(cpu) => on_float!(op.y.dtype(), T => cpu.mask_rows::<T>(op)),
            Device::Cuda(cuda) => cuda.mask_rows(op),
        }
    }

    pub fn normalize_rows(&mut self, op: &NormalizeRows) {
        match self {
            Device::Cpu(cpu) => on_float!(op.y.dtype(), T => cpu.normalize_rows::<T>(op)),
            Device::Cuda(cuda) => cuda.normalize_rows(op),
        }
    }

    pub fn normalize_rows_backward(&mut self, op: &NormalizeRowsBackward) {
        match self {
            Device::Cpu(cpu) => on_float!(op.y.dtype(), T => cpu.normalize_rows_backward::<T>(op)),
            Device::Cuda(cuda) => cuda.normalize_rows_backward(op),
        }
    }

    pub fn temper(&mut self, op: &Temper) {
        match self {
            Device::Cpu(cpu) => on_float!(op.x.dtype(), T => cpu.temper::<T>(op)),
            Device::Cuda(cuda) => cuda.temper(op),
        }
    }

    pub fn temper_backward(&mut self, op: &TemperBackward) {
        match self {
            Device::Cpu(cpu) => on_float!(op.x.dtype(), T => cpu.temper_backward::<T>(op)),
            Device::Cuda(cuda) => cuda.temper_backward(op),
        }
    }
}
