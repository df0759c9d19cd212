//! The norm of queries and keys and their rotation in one pass.

use crate::buffer::Buffer;

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

/// [`crate::RmsNorm`] of x into y, then [`crate::Rope`] of y: with `per_head` each head is normed
/// alone (Qwen3), else all heads of a token as one row (OLMoE).
#[derive(Clone, Copy, Debug)]
pub struct NormRope {
    pub tokens: usize,
    pub heads: usize,
    /// H, even
    pub head_dim: usize,
    pub per_head: bool,
    pub eps: f64,
    pub theta: f64,
    /// u32 [T]
    pub positions: Buffer,
    /// [T, heads * H]
    pub x: Buffer,
    /// [H] with `per_head`, else [heads * H]
    pub w: Buffer,
    /// Output [T, heads * H]
    pub y: Buffer,
    /// Output, kept for backward: [T * heads] with `per_head`, else [T]
    pub rstd: Buffer,
}

/// The inverse [`crate::Rope`] of dy, then [`crate::RmsNormBackward`].
#[derive(Clone, Copy, Debug)]
pub struct NormRopeBackward {
    pub forward: NormRope,
    /// [T, heads * H]; left as scratch, to be used no more
    pub dy: Buffer,
    /// Output [T, heads * H]
    pub dx: Buffer,
    /// Output, as w
    pub dw: Buffer,
    pub accumulate_dw: bool,
}

impl NormRope {
    /// Heads that are normed as one.
    pub(crate) fn span_heads(&self) -> usize {
        if self.per_head { 1 } else { self.heads }
    }

    /// What is normed as one: how many, and elements of each; all lengths checked.
    pub(crate) fn spans(&self) -> (usize, usize) {
        let spans = self.tokens * self.heads / self.span_heads();
        let dim = self.span_heads() * self.head_dim;
        let (x, y, w) = (self.x.len(), self.y.len(), self.w.len());
        assert_eq!((x, y, w), (spans * dim, spans * dim, dim), "{self:?}");
        assert_eq!((self.rstd.len(), self.positions.len()), (spans, self.tokens), "{self:?}");
        assert!(self.head_dim.is_multiple_of(2), "{self:?}");
        (spans, dim)
    }
}
