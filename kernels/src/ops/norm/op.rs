//! Root-mean-square normalisation of rows (Zhang and Sennrich 2019; Llama's RMSNorm).
//!
//! For a norm per head (qk-norm) view [T, N * H] as T * N rows of H.

use crate::buffer::Buffer;

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
