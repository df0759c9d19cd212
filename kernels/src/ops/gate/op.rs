//! The routers of the field: noise, choice, capacity, weights, statistics, and all of it backwards.
//!
//! ```text
//! logits [T, E] -> + noise -> scores -> choice -> capacity -> weights, statistics
//! ```
//! A mixture layer's own op is the fast path of dropless top-k ([`crate::MoeRoute`]); this op is
//! everything else, and equals it where both apply. A micro-batch is one call: capacity and
//! statistics are its own, whoever computes it, and noise is a function of (seed, step, layer,
//! token), so no result depends on the number of ranks. Ties go to the lowest expert id, and of
//! tokens to the first. A choice that is dropped leaves its slot empty ([`crate::NO_EXPERT`]) with
//! a weight of zero. Everything after the scores is computed in f64. On a GPU scores are fp32, with
//! the bits of a CPU.

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::ops::router::balance::row;
use crate::philox::Draw;
use crate::types::{RouteGroups, Scoring};

/// How a token's experts are chosen.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Choice {
    /// The K experts of the largest score plus bias plus what `hysteresis` adds, within the kept
    /// groups.
    TopK,
    /// The best two; the second is taken with probability min(1, 2 g2), g2 its share of the two
    /// scores, and counts towards the capacity either way. Lepikhin et al. 2020 (GShard, arXiv
    /// 2006.16668), Algorithm 1. Without draws (evaluation) it is always taken.
    RandomSecond,
    /// The fewest best experts whose probabilities sum to at least `sum`, at most K. Huang et al.
    /// 2024 (arXiv 2403.07652), section 3.2.
    TopP { sum: f64 },
    /// Each expert takes the `rows` tokens that score it highest; a token has any number of
    /// experts, K = E slots. Zhou et al. 2022 (arXiv 2202.09368), eq. 1 and 2.
    Experts { rows: usize },
    /// K different experts of each word, at random but for good; the weights are 1 / K. Roller et
    /// al. 2021 (Hash Layers, arXiv 2106.04426), section 3.1.
    Hash { seed: u64, layer: u32 },
}

/// What is added to the logits; only where there are draws.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum LogitNoise {
    None,
    /// Normal with this deviation. Tutel's is gateNoise / E (Riquelme et al. 2021).
    Normal { std: f64 },
    /// Normal with deviation softplus(raw[t, e]), raw = x W_noise [T, E]. Shazeer et al. 2017
    /// (arXiv 1701.06538), eq. 4.
    Learned { raw: Buffer },
}

/// How importance and load are estimated. Phi is the standard normal distribution function.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Load {
    None,
    /// importance = sum_t softmax(logits)[t, e]; load = sum_t Phi((softmax(logits)[t, e] -
    /// threshold[t]) / std), the threshold being the token's K-th largest logit with noise. That a
    /// probability is compared with a logit is Tutel's `load_importance_loss` to the letter; V-MoE
    /// (its appendix A) has the logit in both places.
    Tutel { std: f64 },
    /// importance = sum_t weight[t, e] before `scale`, load = sum_t Phi((logits[t, e] - kth[t, e])
    /// / softplus(raw[t, e])), kth the K-th largest of the token's other logits with noise. Shazeer
    /// et al. 2017, eq. 6 and 8 to 10; with K = E every expert's load is T.
    Shazeer { raw: Buffer },
}

/// One micro-batch through a router.
///
/// p = softmax or sigmoid of (logits + noise); weight = scale * p, with `norm_topk` divided by the
/// sum over the token's choices, the dropped ones among them. Capacity: choices are taken up in the
/// order of rank (all first choices, then all second ones), within a rank by token, or with
/// `prioritized` by the token's largest score, descending (Riquelme et al. 2021, batch prioritized
/// routing); what comes after `capacity` choices of an expert is dropped.
#[derive(Clone, Copy, Debug)]
pub struct Gate {
    pub tokens: usize,
    pub experts: usize,
    /// `K`: slots of a token.
    pub top_k: usize,
    /// Equal runs of tokens whose statistics are kept apart; divides T.
    pub segments: usize,
    pub choice: Choice,
    pub scoring: Scoring,
    pub norm_topk: bool,
    pub scale: f64,
    pub groups: Option<RouteGroups>,
    /// Choices that an expert takes; none takes all.
    pub capacity: Option<usize>,
    pub prioritized: bool,
    /// Top-k alone: what is added, in the choice, to the scores of the experts that the position
    /// before chose in the same sequence and document (dropped ones among them); 0: nothing. So the
    /// choice of a token depends on earlier positions, never on later ones.
    pub hysteresis: f64,
    /// u32 [K]: with hysteresis, the choices of the position before the first one, where that
    /// position is not among these tokens
    pub before: Option<Buffer>,
    pub noise: LogitNoise,
    pub load: Load,
    /// None: evaluation, nothing is random.
    pub draw: Option<Draw>,
    /// [T, E]; unused by hash routing
    pub logits: Buffer,
    /// [E], enters the choice only
    pub bias: Option<Buffer>,
    /// u32 [T], for hash routing
    pub words: Buffer,
    /// u32 [T], for hysteresis: 0 begins a sequence or document
    pub positions: Buffer,
    /// Output [T, E]: logits with noise
    pub noisy: Buffer,
    /// Output [T, E], [T]: scores and ln sum_e e^noisy
    pub probs: Buffer,
    pub lse: Buffer,
    /// Output u32 [T, K]: the choices in ascending id, the dropped ones among them, empty slots
    /// last
    pub chosen: Buffer,
    /// Output u32 [T, K]: the same slots, those that were dropped empty
    pub ids: Buffer,
    /// Output [T, K]; zero in empty slots
    pub weights: Buffer,
    /// Output u32 [T]: the best choice; `NO_EXPERT` without one
    pub first: Buffer,
    /// Output u32 [E]: choices of each expert, and those of them that were dropped
    pub counts: Buffer,
    pub dropped: Buffer,
    /// Output F64 [segments, 5, E], see [`crate::ops::router::balance::row`]
    pub stats: Buffer,
    /// Output F64 [2]: z loss mean_t lse[t]^2 (ST-MoE, arXiv 2202.08906, eq. 5) and mean entropy
    /// mean_t -sum_e q ln q, q = p / sum p (the dynamic loss of Huang et al. 2024)
    pub losses: Buffer,
    /// Of U8, [`Device::gate_workspace`] bytes: nothing is kept there
    pub workspace: Buffer,
}

/// The gradient of <dweights, weights> + <dstats, statistics> + z_coef * z loss + entropy_coef *
/// mean entropy by logits and, where the noise is learned, by raw. What is chosen, dropped and
/// counted is constant.
#[derive(Clone, Copy, Debug)]
pub struct GateBackward {
    pub forward: Gate,
    pub z_coef: f64,
    pub entropy_coef: f64,
    /// [T, K]; read where the slot is not empty
    pub dweights: Buffer,
    /// F64 [segments, 3, E]: by PROBS, IMPORTANCE and LOAD
    pub dstats: Buffer,
    /// F32 [1], on the device: what `dweights` was multiplied by, and what all the rest is to be
    /// multiplied by beside it; none is 1
    pub loss_scale: Option<Buffer>,
    /// Output [T, E]
    pub dlogits: Buffer,
    /// Output [T, E], where the noise is learned
    pub d_raw: Option<Buffer>,
}

impl Gate {
    /// Dropless top-k by softmax with the scores as weights, one segment, no noise, no loads; none
    /// of its buffers has memory.
    pub fn of(tokens: usize, experts: usize, top_k: usize) -> Gate {
        let none = ArenaPlan::new().alloc(DType::F64, 0);
        Gate {
            tokens,
            experts,
            top_k,
            segments: 1,
            choice: Choice::TopK,
            scoring: Scoring::Softmax,
            norm_topk: false,
            scale: 1.0,
            groups: None,
            capacity: None,
            prioritized: false,
            hysteresis: 0.0,
            before: None,
            noise: LogitNoise::None,
            load: Load::None,
            draw: None,
            logits: none,
            bias: None,
            words: none,
            positions: none,
            noisy: none,
            probs: none,
            lse: none,
            chosen: none,
            ids: none,
            weights: none,
            first: none,
            counts: none,
            dropped: none,
            stats: none,
            losses: none,
            workspace: none,
        }
    }
}

impl Gate {
    /// Lengths, and which choices go together.
    pub(crate) fn check(&self) {
        let (t, e, k) = (self.tokens, self.experts, self.top_k);
        assert!(1 <= k && k <= e && t > 0, "{self:?}");
        assert!(self.segments > 0 && t.is_multiple_of(self.segments), "{self:?}");
        let len = |buffer: Buffer| buffer.len();
        assert_eq!([self.logits, self.noisy, self.probs].map(len), [t * e; 3], "{self:?}");
        assert_eq!([self.chosen, self.ids, self.weights].map(len), [t * k; 3], "{self:?}");
        assert_eq!([self.lse, self.first, self.words, self.positions].map(len), [t; 4], "{self:?}");
        assert_eq!([self.counts, self.dropped].map(len), [e; 2], "{self:?}");
        let stats = self.segments * row::COUNT * e;
        assert_eq!([self.stats, self.losses].map(len), [stats, 2], "{self:?}");
        assert!(self.before.is_none_or(|before| before.len() == k), "{self:?}");
        let holds = self.hysteresis != 0.0;
        assert!(!holds || self.choice == Choice::TopK, "hysteresis is of top-k: {self:?}");
        let all = matches!(self.choice, Choice::Experts { .. });
        assert!(!all || k == e, "choice by experts has a slot for each: {self:?}");
    }
}
