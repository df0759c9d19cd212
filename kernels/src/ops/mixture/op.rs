//! A mixture layer whose experts are shared out over ranks, in parts between which tokens travel.
//!
//! ```text
//! MoeRoute at each rank: its tokens' choices and weights
//!   -> tokens, choices and weights of all ranks of the group to all of them
//! MoePlace: rows of the experts here -> MoeExperts: out[t] = the sum over the experts here
//!   -> summed over the ranks, each token's at its own
//! backward: gradients of outputs to all -> MoeExpertsBackward: dx[t] and ds[t, k] of the experts
//!   here -> summed over the ranks -> MoeRouterBackward
//! ```
//! `P` ranks have `T` tokens each, `A = P T` in all. No size depends on what routers choose, so
//! that the host never waits for one. A choice of an expert elsewhere has no row here, as an empty
//! one.

use crate::buffer::{Buffer, DType};
use crate::ops::mixture::desc::{Gradients, MoeDesc, MoeTensors, Saved};

/// `out` [T, D] = the layer of `tensors.x` (+ `tensors.residual`, before anything is rounded);
/// fills `tensors.saved`.
#[derive(Clone, Copy, Debug)]
pub struct MoeForward {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
    /// Output [T, D]
    pub out: Buffer,
}

/// H of a forward once more, from x and the routing that it left: the same bits. So layers may
/// share the memory of H, each computing its own again before its backward.
#[derive(Clone, Copy, Debug)]
pub struct MoeHidden {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
}

/// The gradient of <dout, out> + aux_coef * auxiliary loss + z_coef * z loss by x and the weights,
/// the choice and the loads held constant. With a loss scale it is the gradient of that many times
/// the two losses, beside a `dout` that was multiplied already. `tensors` are those of the forward;
/// H is overwritten.
#[derive(Clone, Copy, Debug)]
pub struct MoeBackward {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
    /// [T, D]
    pub dout: Buffer,
    /// Output [T, D]
    pub dx: Buffer,
    pub gradients: Gradients,
}

/// What a layer keeps, and a workspace that all layers of a device can share.
#[derive(Clone, Copy, Debug)]
pub struct MoePlan {
    pub saved: Saved,
    /// Of U8, this much: plan it once, for the largest
    pub workspace_bytes: usize,
}

impl MoeDesc {
    /// What the router's weights and their gradient are of.
    pub fn router_element(&self) -> DType {
        if self.element == DType::F64 { DType::F64 } else { DType::F32 }
    }
}

/// Choices, weights, losses and loads of the tokens of `tensors.x`; what `tensors.saved` has of
/// them. Rows of experts are nobody's.
#[derive(Clone, Copy, Debug)]
pub struct MoeRoute {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
}

/// Which ranks the tokens of a layer come from, in the order of their rows.
#[derive(Clone, Copy, Debug)]
pub enum Sources {
    /// `ranks` have `each` tokens. Of these the first `present` ranks' count, and no others.
    Even { ranks: usize, each: usize, present: usize },
    /// u32 [S + 1]: where the tokens of each of S ranks begin, and behind the last how many there
    /// are; rows behind them say nothing.
    Listed(Buffer),
}

/// The row of each choice by itself.
#[derive(Clone, Copy, Debug)]
pub enum Each {
    /// Of all choices [A, K], zeros where an expert lies elsewhere.
    Slots,
    /// u32 [R], of [`MoePlace::choices`]: of the choices here alone, one behind the other.
    Choices(Buffer),
}

/// Where rows of the experts here lie: by expert, then token. Fills `saved`'s offsets [G + 1],
/// order [G], rows, pos [A, K] and row_weights from its ids [A, K] and weights [A, K]. Where there
/// are more than `room` of them, none is placed, as if nobody had tokens.
#[derive(Clone, Copy, Debug)]
pub struct MoePlace {
    pub top_k: usize,
    pub sources: Sources,
    /// The experts here are `first .. first + locals`
    pub first: usize,
    pub locals: usize,
    /// Rows for which there is memory
    pub room: usize,
    /// Added to, F64 [1]: 1 where that is too little
    pub overflows: Buffer,
    pub saved: Saved,
    /// Output u32 [R]: the row of each choice that has one, in the order of tokens and their slots
    pub choices: Option<Buffer>,
}

/// Of `desc`, which is of A tokens and the experts here alone: what these make of the tokens, from
/// `tensors` whose rows were placed.
#[derive(Clone, Copy, Debug)]
pub struct MoeExperts {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
    /// Output [A, D]: the weighted sum over the experts here, of elements or of fp32, which rounds
    /// nothing. With `each` a row of elements for each choice as it is: [A, K, D], or [R, D].
    pub out: Buffer,
    pub each: Option<Each>,
}

/// out [T, D] = base + the sum over the rows of each token's choices, in their order, in fp32 and
/// rounded once. `desc` is that of the own tokens.
#[derive(Clone, Copy, Debug)]
pub struct MoeCombine {
    pub desc: MoeDesc,
    /// [T, K, D]
    pub rows: Buffer,
    /// u32 [T, K]: 0, 1, 2 ...
    pub slots: Buffer,
    /// [T, K]: what each row is multiplied by; none: 1, and `out` is `base`
    pub weights: Option<Buffer>,
    /// [T, D]
    pub base: Buffer,
    /// Output [T, D]
    pub out: Buffer,
}

/// Of `desc`, which is of A tokens and the experts here alone: dx [A, D] = the gradient of
/// <dout, out> by x, ds [A, K] by the weights, 0 where an expert lies elsewhere, and the gradients
/// of up and down. `tensors` are those of the forward; H is overwritten.
#[derive(Clone, Copy, Debug)]
pub struct MoeExpertsBackward {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
    /// [A, D]
    pub dout: Buffer,
    /// Output [A, D], of elements or of fp32; with `each` of each choice: [A, K, D], or [R, D]
    pub dx: Buffer,
    pub each: bool,
    pub choices: Each,
    /// Output [A, K], as the weights; of choices that are listed [R]
    pub ds: Buffer,
    pub gradients: Gradients,
    /// Up's gradient is left to [`MoeUpGradient`], beside which dx and ds may travel.
    pub up_later: bool,
}

/// The gradient of up, behind a [`MoeExpertsBackward`] that left it out and before what writes to
/// its `tensors`.
#[derive(Clone, Copy, Debug)]
pub struct MoeUpGradient {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
    pub gradients: Gradients,
}

/// The router's own part: dx [T, D] = the gradient of <ds, weights> and of the losses by x; and its
/// weights'.
#[derive(Clone, Copy, Debug)]
pub struct MoeRouterBackward {
    pub desc: MoeDesc,
    pub tensors: MoeTensors,
    /// [T, K]
    pub ds: Buffer,
    /// u32 [T, K]: 0, 1, 2 ...
    pub slots: Buffer,
    /// Output [T, D]
    pub dx: Buffer,
    pub gradients: Gradients,
}

impl MoePlace {
    /// Rows of tokens, all lengths checked.
    pub(crate) fn check(&self) -> usize {
        let MoePlace { top_k, locals, ref saved, .. } = *self;
        let all = saved.ids.len() / top_k;
        if let Sources::Even { ranks, each, present } = self.sources {
            assert!(present <= ranks && all == ranks * each, "{self:?}");
        }
        for slots in [saved.ids, saved.weights, saved.pos] {
            assert_eq!(slots.len(), all * top_k, "{self:?}");
        }
        assert_eq!(saved.offsets.len(), locals + 1, "{self:?}");
        assert_eq!((self.overflows.dtype(), self.overflows.len()), (DType::F64, 1), "{self:?}");
        let rows = all * top_k.min(locals);
        assert!(saved.rows.len() >= rows && saved.row_weights.len() >= rows, "{self:?}");
        all
    }
}

impl MoeCombine {
    pub(crate) fn check(&self) {
        let MoeDesc { tokens, top_k, dim, .. } = self.desc;
        let found = (self.rows.len(), self.slots.len());
        assert_eq!(found, (tokens * top_k * dim, tokens * top_k), "{self:?}");
    }
}
