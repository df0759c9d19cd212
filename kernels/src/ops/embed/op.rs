//! Token embeddings.

use crate::buffer::Buffer;

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
