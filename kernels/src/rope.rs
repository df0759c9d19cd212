//! Rotary position embeddings (Su et al. 2021) in the half-rotating layout of Hugging Face.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// For each token, head and i < H / 2, with angle = position * theta^(-2 i / H) in f64 and
/// (c, s) its cosine and sine rounded to the float of x:
/// (x[i], x[i + H/2]) = (x[i] c - x[i + H/2] s, x[i + H/2] c + x[i] s).
/// `inverse` negates s: the transpose, which is both the backward pass and the way back.
#[derive(Clone, Copy, Debug)]
pub struct Rope {
    pub tokens: usize,
    pub heads: usize,
    /// H, even
    pub head_dim: usize,
    pub theta: f64,
    pub inverse: bool,
    /// u32 [T]; a table of all positions up to the largest is kept by the device
    pub positions: Buffer,
    /// Changed in place: [T, heads * H]
    pub x: Buffer,
}

impl Device {
    pub fn rope(&mut self, op: &Rope) {
        match self {
            Device::Cpu(cpu) => on_float!(op.x.dtype(), T => cpu.rope::<T>(op)),
            Device::Cuda(cuda) => cuda.rope(op),
        }
    }
}
