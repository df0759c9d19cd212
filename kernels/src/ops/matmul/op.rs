//! Dense products and biases.

use crate::buffer::Buffer;
use crate::types::Layout;

/// c[i, j] (+)= sum_l a[i, l] b[l, j]: per chunk of 256 of l one chain of fused multiply-adds from
/// zero, l ascending; then the chunks in order (added to what c held, with `accumulate`).
///
/// CUDA takes A and B in Bf16, F16 or F32 and C of their kind or F32, sums in fp32 in an order that
/// the shape fixes, and rounds once. F32 operands are exact unless [`Device::set_tf32`] says else,
/// and by [`Device::exact_matmul`], as routers need them, whatever it says.
#[derive(Clone, Copy, Debug)]
pub struct Matmul {
    pub layout: Layout,
    pub m: usize,
    pub n: usize,
    pub k: usize,
    pub accumulate: bool,
    pub a: Buffer,
    pub b: Buffer,
    /// Output [m, n]
    pub c: Buffer,
}

/// x[r, c] += bias[c]
#[derive(Clone, Copy, Debug)]
pub struct AddBias {
    pub rows: usize,
    pub columns: usize,
    /// Changed in place: [rows, columns]
    pub x: Buffer,
    /// [columns]
    pub bias: Buffer,
}

/// dbias[c] (+)= sum_r dy[r, c], rows ascending in chunks of 64, then the chunks in order
/// (a GPU: in another fixed order, a function of the sizes).
#[derive(Clone, Copy, Debug)]
pub struct BiasBackward {
    pub rows: usize,
    pub columns: usize,
    pub accumulate: bool,
    /// [rows, columns]
    pub dy: Buffer,
    /// Output [columns]
    pub dbias: Buffer,
}
