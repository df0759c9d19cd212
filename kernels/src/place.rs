//! Where routed rows lie, and moving rows to and from there.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// Sorts the slots (token, k) by expert, then token: row order of the expert products.
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub tokens: usize,
    pub top_k: usize,
    pub experts: usize,
    /// u32 [T, K], each below E
    pub ids: Buffer,
    /// Output u32 [E]
    pub counts: Buffer,
    /// Output u32 [E + 1]: the rows of expert e are offsets[e] .. offsets[e + 1]
    pub offsets: Buffer,
    /// Output u32 [T * K]: the token of each row
    pub rows: Buffer,
    /// Output u32 [T, K]: the row of each slot
    pub pos: Buffer,
}

/// y[r, :] = x[index[r], :]; with dim 1 it picks scalars, such as the gradients of slots.
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

/// y[index[r], :] = x[r, :]; indices are distinct, rows that none names stay as they are.
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
/// fused multiply-adds from zero in slot order, which is ascending expert id.
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

/// out[t, :] (+)= (sum over k of x[pos[t, k], :]), slots ascending from zero.
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
        }
    }

    pub fn gather_rows(&mut self, op: &GatherRows) {
        match self {
            Device::Cpu(cpu) => on_float!(op.y.dtype(), T => cpu.gather_rows::<T>(op)),
        }
    }

    pub fn scatter_rows(&mut self, op: &ScatterRows) {
        match self {
            Device::Cpu(cpu) => on_float!(op.y.dtype(), T => cpu.scatter_rows::<T>(op)),
        }
    }

    pub fn combine(&mut self, op: &Combine) {
        match self {
            Device::Cpu(cpu) => on_float!(op.out.dtype(), T => cpu.combine::<T>(op)),
        }
    }

    pub fn scatter_sum(&mut self, op: &ScatterSum) {
        match self {
            Device::Cpu(cpu) => on_float!(op.out.dtype(), T => cpu.scatter_sum::<T>(op)),
        }
    }
}
