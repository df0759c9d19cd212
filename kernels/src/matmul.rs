//! Dense products and biases.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// How the operands of C [m, n] = A B lie in memory: N as written, T transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// A [m, k], B [n, k]: y = x W^T, forward.
    Nt,
    /// A [m, k], B [k, n]: dx = dy W.
    Nn,
    /// A [k, m], B [k, n]: dW = dy^T x.
    Tn,
}

/// c[i, j] (+)= sum_l a[i, l] b[l, j]: per chunk of 256 of l one chain of fused multiply-adds from
/// zero, l ascending; then the chunks in order (added to what c held, with `accumulate`).
///
/// CUDA takes A and B in Bf16, F16 or F32 and C of their kind or F32, sums in fp32 in an order that
/// the shape fixes, and rounds once. F32 operands are exact unless [`Device::set_tf32`] says else.
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

impl Device {
    pub fn matmul(&mut self, op: &Matmul) {
        match self {
            Device::Cpu(cpu) => on_float!(op.c.dtype(), T => cpu.matmul::<T>(op)),
            Device::Cuda(cuda) => cuda.matmul(op),
        }
    }

    /// A product whose F32 operands are exact whatever [`Device::set_tf32`] says: of a router.
    pub fn exact_matmul(&mut self, op: &Matmul) {
        match self {
            Device::Cpu(cpu) => on_float!(op.c.dtype(), T => cpu.matmul::<T>(op)),
            Device::Cuda(cuda) => cuda.exact_matmul(op),
        }
    }

    /// Whether a GPU may round F32 operands of products to 11 bits of mantissa (tf32), from the
    /// next op on. A CPU never does.
    pub fn set_tf32(&mut self, tf32: bool) {
        if let Device::Cuda(cuda) = self {
            cuda.set_tf32(tf32);
        }
    }

    pub fn add_bias(&mut self, op: &AddBias) {
        match self {
            Device::Cpu(cpu) => on_float!(op.x.dtype(), T => cpu.add_bias::<T>(op)),
            Device::Cuda(cuda) => cuda.add_bias(op),
        }
    }

    pub fn bias_backward(&mut self, op: &BiasBackward) {
        match self {
            Device::Cpu(cpu) => on_float!(op.dy.dtype(), T => cpu.bias_backward::<T>(op)),
            Device::Cuda(cuda) => cuda.bias_backward(op),
        }
    }
}
