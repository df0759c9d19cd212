//! The norm of gradients, and AdamW.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// Elements per partial sum of squares; every logical tensor is cut at its multiples.
pub const SQUARE_SUM_BLOCK: usize = 4096;

/// out[b] = sum in f64 of g[i]^2 over block b of 4,096 elements, in 16 lanes and a fixed tree.
#[derive(Clone, Copy, Debug)]
pub struct BlockSquareSums {
    pub g: Buffer,
    /// Output F64 [ceil(n / 4096)]
    pub out: Buffer,
}

/// One update of one tensor, on a CPU; on every device [`crate::BucketAdamW`] does it for a bucket.
/// (Loshchilov and Hutter 2019), with g' = grad_scale * g and the step counted from 1:
/// m = beta1 m + (1 - beta1) g'; v = beta2 v + (1 - beta2) g'^2;
/// w = w (1 - lr weight_decay) - lr (m / (1 - beta1^step)) / (sqrt(v / (1 - beta2^step)) + eps).
/// Coefficients are computed in f64, powers by repeated products, and rounded once.
#[derive(Clone, Copy, Debug)]
pub struct AdamW {
    pub lr: f64,
    pub beta1: f64,
    pub beta2: f64,
    /// Added outside of the root.
    pub eps: f64,
    /// 0 for tensors of one dim.
    pub weight_decay: f64,
    /// 1 for the first update.
    pub step: u64,
    /// What clipping multiplies gradients by.
    pub grad_scale: f64,
    /// Changed in place
    pub w: Buffer,
    /// Changed in place
    pub m: Buffer,
    /// Changed in place
    pub v: Buffer,
    pub g: Buffer,
}

/// x^n by squaring, the same products on every machine.
pub(crate) fn power(x: f64, n: u64) -> f64 {
    let (mut result, mut square, mut rest) = (1.0, x, n);
    while rest > 0 {
        if rest & 1 == 1 {
            result *= square;
        }
        square *= square;
        rest >>= 1;
    }
    result
}

impl Device {
    pub fn block_square_sums(&mut self, op: &BlockSquareSums) {
        match self {
            Device::Cpu(cpu) => on_float!(op.g.dtype(), T => cpu.block_square_sums::<T>(op)),
            Device::Cuda(cuda) => cuda.block_square_sums(op),
        }
    }

    pub fn adamw(&mut self, op: &AdamW) {
        match self {
            Device::Cpu(cpu) => on_float!(op.w.dtype(), T => cpu.adamw::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("adamw"),
        }
    }
}
