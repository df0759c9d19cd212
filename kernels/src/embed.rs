//! Token embeddings.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// x[t, :] = table[ids[t], :]
#[derive(Clone, Copy, Debug)]
pub struct Embed {
    pub tokens: usize,
    pub dim: usize,
    pub vocab: usize,
    /// u32 [T], each below V
    pub ids: Buffer,
    /// [V, D]; on a GPU elements or F32
    pub table: Buffer,
    /// Output [T, D]
    pub x: Buffer,
}

/// dtable[ids[t], :] += dx[t, :], tokens ascending.
#[derive(Clone, Copy, Debug)]
pub struct EmbedBackward {
    pub tokens: usize,
    pub dim: usize,
    pub vocab: usize,
    /// u32 [T], each below V
    pub ids: Buffer,
    /// [T, D]
    pub dx: Buffer,
    /// Added to: [V, D]; on a GPU elements or F32
    pub dtable: Buffer,
}

impl Device {
    pub fn embed(&mut self, op: &Embed) {
        match self {
            Device::Cpu(cpu) => on_float!(op.x.dtype(), T => cpu.embed::<T>(op)),
            Device::Cuda(cuda) => cuda.embed(op),
        }
    }

    pub fn embed_backward(&mut self, op: &EmbedBackward) {
        match self {
            Device::Cpu(cpu) => on_float!(op.dx.dtype(), T => cpu.embed_backward::<T>(op)),
            Device::Cuda(cuda) => cuda.embed_backward(op),
        }
    }
}
