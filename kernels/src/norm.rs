//! Root-mean-square normalisation of rows (Zhang and Sennrich 2019; Llama's RMSNorm).
//!
//! For a norm per head (qk-norm) view [T, N * H] as T * N rows of H.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// rstd[r] = 1 / sqrt(mean_d x[r, d]^2 + eps); y[r, d] = x[r, d] * rstd[r] * w[d]
#[derive(Clone, Copy, Debug)]
pub struct RmsNorm {
    pub rows: usize,
    pub dim: usize,
    pub eps: f64,
    /// [rows, D]
    pub x: Buffer,
    /// [D]
    pub w: Buffer,
    /// Output [rows, D]
    pub y: Buffer,
    /// Output [rows], kept for backward
    pub rstd: Buffer,
}

/// mid = input + branch, rounded; then [`RmsNorm`] of mid: where a branch rejoins the residual
/// stream and the next one begins.
#[derive(Clone, Copy, Debug)]
pub struct AddRmsNorm {
    pub rows: usize,
    pub dim: usize,
    pub eps: f64,
    /// [rows, D]
    pub input: Buffer,
    /// [rows, D]
    pub branch: Buffer,
    /// [D]
    pub w: Buffer,
    /// Output [rows, D]
    pub mid: Buffer,
    /// Output [rows, D]
    pub y: Buffer,
    /// Output [rows], kept for backward
    pub rstd: Buffer,
}

/// With n = x * rstd and g = dy * w:
/// dx[r, d] (+)= rstd[r] * (g[r, d] - n[r, d] * mean_d(g[r] n[r]))
/// dw[d] (+)= sum_r dy[r, d] * n[r, d], rows ascending in chunks of 64, then the chunks in order
/// (a GPU: in another fixed order, a function of rows and D).
#[derive(Clone, Copy, Debug)]
pub struct RmsNormBackward {
    pub rows: usize,
    pub dim: usize,
    /// [rows, D]
    pub x: Buffer,
    /// [D]
    pub w: Buffer,
    /// [rows]
    pub rstd: Buffer,
    /// [rows, D]
    pub dy: Buffer,
    /// Output [rows, D]
    pub dx: Buffer,
    /// Output [D]
    pub dw: Buffer,
    /// Add to dx, the gradient that a residual connection carries past the norm.
    pub accumulate_dx: bool,
    pub accumulate_dw: bool,
}

impl Device {
    pub fn rms_norm(&mut self, op: &RmsNorm) {
        match self {
            Device::Cpu(cpu) => on_float!(op.x.dtype(), T => cpu.rms_norm::<T>(op)),
            Device::Cuda(cuda) => cuda.rms_norm(op),
        }
    }

    pub fn add_rms_norm(&mut self, op: &AddRmsNorm) {
        match self {
            Device::Cpu(cpu) => on_float!(op.mid.dtype(), T => cpu.add_rms_norm::<T>(op)),
            Device::Cuda(cuda) => cuda.add_rms_norm(op),
        }
    }

    pub fn rms_norm_backward(&mut self, op: &RmsNormBackward) {
        match self {
            Device::Cpu(cpu) => on_float!(op.x.dtype(), T => cpu.rms_norm_backward::<T>(op)),
            Device::Cuda(cuda) => cuda.rms_norm_backward(op),
        }
    }
}
