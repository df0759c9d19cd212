//! Ops on each element alone.

use crate::buffer::Buffer;
use crate::types::Activation;

/// a += b, rounded once
#[derive(Clone, Copy, Debug)]
pub struct Add {
    /// Changed in place
    pub a: Buffer,
    /// As long as a, and of its kind; on a GPU it may be of fp32 where a is not
    pub b: Buffer,
}

/// out = a + b, with the bits of a copy and [`Add`], and of the same kinds
#[derive(Clone, Copy, Debug)]
pub struct Sum {
    /// As long as `out`
    pub a: Buffer,
    pub b: Buffer,
    /// Output
    pub out: Buffer,
}

/// x = value
#[derive(Clone, Copy, Debug)]
pub struct Fill {
    pub value: f64,
    /// Output
    pub x: Buffer,
}

/// out = act(gate) * up, all equally long: the hidden layer of a dense feed-forward network.
#[derive(Clone, Copy, Debug)]
pub struct GatedMul {
    pub activation: Activation,
    pub gate: Buffer,
    pub up: Buffer,
    /// Output
    pub out: Buffer,
}

/// dgate = d_out * up * act'(gate), dup = d_out * act(gate)
#[derive(Clone, Copy, Debug)]
pub struct GatedMulBackward {
    pub activation: Activation,
    pub gate: Buffer,
    pub up: Buffer,
    pub d_out: Buffer,
    /// Output
    pub dgate: Buffer,
    /// Output
    pub dup: Buffer,
}

/// x = x between -limit and limit, the nearer of them otherwise
#[derive(Clone, Copy, Debug)]
pub struct Clamp {
    /// Above 0, rounded to the float of x first
    pub limit: f64,
    /// Changed in place
    pub x: Buffer,
}

/// dx = 0 where x, before it was clamped, lay beyond the limit
#[derive(Clone, Copy, Debug)]
pub struct ClampBackward {
    pub limit: f64,
    pub x: Buffer,
    /// Changed in place
    pub dx: Buffer,
}

/// x[i] = std * z(seed, name_hash, place(first + i)): independent standard normal numbers by Philox
/// and Box-Muller (see [`crate::philox::normals`]), a function of the logical element alone.
#[derive(Clone, Copy, Debug)]
pub struct InitNormal {
    pub seed: u64,
    /// A hash of the logical name of the tensor.
    pub name_hash: u64,
    /// Index of the buffer's first element in what `place` is of.
    pub first: u64,
    /// Where that lies in the logical tensor.
    pub place: Strided,
    pub std: f64,
    /// Output
    pub x: Buffer,
}

/// Some elements of a tensor: runs of equal length at equal distances.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Strided {
    /// The first of them
    pub from: u64,
    /// Elements of a run
    pub run: u64,
    /// From the beginning of a run to that of the next
    pub stride: u64,
}

impl Strided {
    /// All elements.
    pub const ALL: Strided = Strided { from: 0, run: u64::MAX, stride: u64::MAX };

    /// Where the `at`-th of them lies in the tensor.
    pub const fn element(&self, at: u64) -> u64 {
        self.from + at / self.run * self.stride + at % self.run
    }
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
