//! Where routed rows lie, and moving rows to and from there.
//!
//! A slot (token, k) may be empty: its expert, and its row, are [`NO_EXPERT`]. Dropped choices and
//! tokens that choose fewer than K experts are nothing else. An empty slot has no row, adds nothing
//! to its token and has a gradient of zero.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// The id, and the row, of a slot without an expert.
pub const NO_EXPERT: u32 = u32::MAX;

/// Sorts the slots (token, k) by expert, then token: row order of the expert products. Empty slots
/// come nowhere; the rows in all are offsets[E].
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub tokens: usize,
    pub top_k: usize,
    pub experts: usize,
    /// u32 [T, K], each below E or `NO_EXPERT`
    pub ids: Buffer,
    /// Output u32 [E]
    pub counts: Buffer,
    /// Output u32 [E + 1]: the rows of expert e are offsets[e] .. offsets[e + 1]
    pub offsets: Buffer,
    /// Output u32 [T * K]: the token of each row; beyond offsets[E] nothing is written
    pub rows: Buffer,
    /// Output u32 [T, K]: the row of each slot, or `NO_EXPERT`
    pub pos: Buffer,
}

/// y[r, :] = x[index[r], :], and zeros where the index is `NO_EXPERT`; with dim 1 it picks scalars,
/// such as the gradients of slots.
#[derive(Clone, Copy, Debug)]
pub struct GatherRows {
    pub rows: usize,
    pub dim: usize,
    /// [any, dim]
    pub x: Buffer,
    /// u32 [rows]
    pub index: Buffer,
    /// Output [rows, dim]
    pub y: Buffer,
}

/// y[index[r], :] = x[r, :] unless the index is `NO_EXPERT`; the others are distinct, and rows that
/// none names stay as they are.
#[derive(Clone, Copy, Debug)]
pub struct ScatterRows {
    pub rows: usize,
    pub dim: usize,
    /// [rows, dim]
    pub x: Buffer,
    /// u32 [rows]
    pub index: Buffer,
    /// Output [any, dim]
    pub y: Buffer,
}

/// out[t, :] = residual[t, :] + (sum over k of weights[t, k] * y[pos[t, k], :]), the sum a chain of
/// fused multiply-adds from zero in slot order, which is ascending expert id; empty slots are
/// passed over.
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    pub tokens: usize,
    pub top_k: usize,
    pub dim: usize,
    /// [R, D]
    pub y: Buffer,
    /// u32 [T, K]
    pub pos: Buffer,
    /// [T, K]
    pub weights: Buffer,
    /// [T, D]; may not be `out`
    pub residual: Option<Buffer>,
    /// Output [T, D]
    pub out: Buffer,
}

/// out[t, :] (+)= (sum over k of x[pos[t, k], :]), slots ascending from zero, empty ones passed
/// over.
#[derive(Clone, Copy, Debug)]
pub struct ScatterSum {
    pub tokens: usize,
    pub top_k: usize,
    pub dim: usize,
    pub accumulate: bool,
    /// [R, D]
    pub x: Buffer,
    /// u32 [T, K]
    pub pos: Buffer,
    /// Output [T, D]
    pub out: Buffer,
}

impl Device {
    pub fn place(&mut self, op: &Place) {
        match self {
            Device::Cpu(cpu) => cpu.place(op),
            Device::Cuda(cuda) => cuda.lacks("place"),
        }
    }

    pub fn gather_rows(&mut self, op: &GatherRows) {
        match self {
            Device::Cpu(cpu) => on_float!(op.y.dtype(), T => cpu.gather_rows::<T>(op)),
            Device::Cuda(cuda) => cuda.listed_rows(op),
        }
    }

    pub fn scatter_rows(&mut self, op: &ScatterRows) {
        match self {
            Device::Cpu(cpu) => on_float!(op.y.dtype(), T => cpu.scatter_rows::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("scatter_rows"),
        }
    }

    pub fn combine(&mut self, op: &Combine) {
        match self {
            Device::Cpu(cpu) => on_float!(op.out.dtype(), T => cpu.combine::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("combine"),
        }
    }

    pub fn scatter_sum(&mut self, op: &ScatterSum) {
        match self {
            Device::Cpu(cpu) => on_float!(op.out.dtype(), T => cpu.scatter_sum::<T>(op)),
            Device::Cuda(cuda) => cuda.scatter_sum(op),
        }
    }
}
