//! The numbers of a step, on the device: what each round adds, how rounds and ranks are summed, and
//! what follows from the sums.
//!
//! ```text
//! micro-batch -> AddRouting, HeadLoss -> its record, and counts of the step's StepNumbers
//! records, StepNumbers -> sums over ranks -> MoveCorrections, BucketAdamW, the host
//! ```
//! A record is summed over micro-batches in the order of the step, whoever computed what, so that
//! no bit of the sum depends on the number of ranks.

use std::ops::Range;

use crate::buffer::{Buffer, DType};
use crate::philox::Draw;
use crate::types::{BalanceLoss, Scoring};

/// Which random factors.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Mask {
    /// Uniform in [1 - eps, 1 + eps): the jitter of Switch Transformer (Fedus et al. 2021, section
    /// 2.4; `multiplicative_jitter` of Mesh TensorFlow).
    Jitter { eps: f64 },
    /// 0 with probability p, else 1 / (1 - p) (Srivastava et al. 2014; Tutel's `input_dropout_p`).
    Dropout { p: f64 },
}

/// y (+)= x * m, m[t, d] a function of (seed, step, layer, token, d). Its gradient is the same op.
/// On a GPU either of x and y may be F32 beside elements of 16 bits.
#[derive(Clone, Copy, Debug)]
pub struct MaskRows {
    pub rows: usize,
    pub dim: usize,
    pub mask: Mask,
    pub draw: Draw,
    pub accumulate: bool,
    /// [rows, dim]
    pub x: Buffer,
    /// Output [rows, dim]
    pub y: Buffer,
}

/// y[r, :] = x[r, :] / max(|x[r, :]|, 1e-12), norm[r] = |x[r, :]|; sums in f64.
#[derive(Clone, Copy, Debug)]
pub struct NormalizeRows {
    pub rows: usize,
    pub dim: usize,
    /// [rows, dim]
    pub x: Buffer,
    /// Output [rows, dim]
    pub y: Buffer,
    /// Output F64 [rows]
    pub norm: Buffer,
}

/// dx (+)= (dy - y <dy, y>) / norm; dy / 1e-12 where the norm is smaller.
#[derive(Clone, Copy, Debug)]
pub struct NormalizeRowsBackward {
    pub rows: usize,
    pub dim: usize,
    pub accumulate: bool,
    /// [rows, dim]
    pub y: Buffer,
    /// F64 [rows]
    pub norm: Buffer,
    /// [rows, dim]
    pub dy: Buffer,
    /// Output [rows, dim]
    pub dx: Buffer,
}

/// x *= e^min(temperature, ln 100): the learned scale of the cosine gate (Chi et al. 2022, arXiv
/// 2204.09179; Tutel's `cosine_top`, whose bound this is).
#[derive(Clone, Copy, Debug)]
pub struct Temper {
    /// [1]
    pub temperature: Buffer,
    /// Output [any]
    pub x: Buffer,
}

/// dtemperature (+)= <dx, x> (x as `Temper` left it, the sum in f64 in order), 0 above the bound;
/// then dx *= e^min(temperature, ln 100).
#[derive(Clone, Copy, Debug)]
pub struct TemperBackward {
    /// Of `d_temperature`
    pub accumulate: bool,
    /// [1]
    pub temperature: Buffer,
    /// [any]
    pub x: Buffer,
    /// Output [any]
    pub dx: Buffer,
    /// Output [1]
    pub d_temperature: Buffer,
}

/// What a micro-batch's record holds.
pub mod record {
    /// Sum of its cross-entropies, and its valid targets where they are counted: side by side, as
    /// [`crate::HeadLoss`] adds to them.
    pub const LOSS: usize = 0;
    pub const VALID: usize = 1;
    /// Its auxiliary loss, z loss and mean entropy, each summed over the mixture layers.
    pub const AUX: usize = 2;
    pub const Z: usize = 3;
    pub const ENTROPY: usize = 4;
    pub const COUNT: usize = 5;
}

/// What a rank's tally holds: sums over its micro-batches and mixture layers.
pub mod tally {
    /// See [`crate::StepNumbers`], where the first four stand in this order, too.
    pub const UNROUTED: usize = 0;
    pub const FOLLOWED: usize = 1;
    pub const SWITCHED: usize = 2;
    pub const ENTROPIES: usize = 3;
    pub const OVERFLOWS: usize = 4;
    pub const COUNT: usize = 5;
    /// Those that a router counts.
    pub const ROUTED: usize = OVERFLOWS;
}

/// entropy[0] = mean_t -sum_e q ln q, q = p / sum p, tokens ascending. Of a softmax that is
/// lse - <p, logits>. A GPU makes the scores anew.
#[derive(Clone, Copy, Debug)]
pub struct RouteEntropy {
    pub experts: usize,
    pub scoring: Scoring,
    /// [T, E]; on a GPU maybe empty
    pub probs: Buffer,
    /// [T, E]
    pub logits: Buffer,
    /// [T]
    pub lse: Buffer,
    /// Output F64 [1]
    pub entropy: Buffer,
}

/// The balancing loss of equal segments of a batch (see [`crate::Balance`]), and its gradient.
#[derive(Clone, Copy, Debug)]
pub struct BalanceLosses {
    pub loss: BalanceLoss,
    /// Tokens of a segment.
    pub tokens: usize,
    pub experts: usize,
    /// F64 [segments, 5, E]
    pub stats: Buffer,
    /// Output F64 [1]: the mean over the segments
    pub value: Buffer,
    /// Output F64 [segments, 3, E]: factor / segments * d value of the segment / d stats
    pub gradient: Option<(Buffer, f64)>,
}

/// Adds one layer of one micro-batch to the rank's part of a step's numbers.
#[derive(Clone, Copy, Debug)]
pub struct AddRouting {
    pub top_k: usize,
    /// F64 [3]: auxiliary loss, z loss, mean entropy
    pub losses: Buffer,
    /// u32 [E]
    pub counts: Buffer,
    /// u32 [E], where the router drops
    pub dropped: Option<Buffer>,
    /// u32 [T, K]: choices before any was dropped, and what is left of them
    pub chosen: Buffer,
    pub ids: Buffer,
    /// u32 [T]: 0 begins a text
    pub positions: Buffer,
    /// Added to, F64: [3] of the micro-batch's record, the first [4] of [`tally`], [E], [E]
    pub record: Buffer,
    pub tally: Buffer,
    pub loads: Buffer,
    pub drops: Buffer,
}

/// out[i] = x[0][i] + x[1][i] + ..., rows ascending from zero, F64
#[derive(Clone, Copy, Debug)]
pub struct SumRows {
    /// [rows, n]
    pub x: Buffer,
    /// Output [n]
    pub out: Buffer,
}

/// bias[e] += rate where the expert's load of the step is below the mean, -= rate where it is
/// above (Wang et al. 2024, auxiliary-loss-free balancing). The loads are whole numbers, so no
/// rounding decides. Nothing moves in a step whose update is skipped.
#[derive(Clone, Debug)]
pub struct MoveCorrections {
    pub rate: f64,
    /// F64 [E], of `numbers`
    pub loads: Range<usize>,
    /// StepNumbers
    pub numbers: Buffer,
    /// Changed in place: [E]; on a GPU F32
    pub bias: Buffer,
}

impl SumRows {
    pub(crate) fn check(&self) {
        assert_eq!([self.x.dtype(), self.out.dtype()], [DType::F64; 2], "{self:?}");
        assert!(self.x.len().is_multiple_of(self.out.len().max(1)), "{self:?}");
    }
}
