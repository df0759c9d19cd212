//! A layer's shape: what it means, and which the kernels take.

use moejob_protocol::kernel_sizes::{ALIGNMENT, EXPERTS_MAX, GROUPS_MAX, LayerSizes};

use crate::buffer::{Buffer, DType};
use crate::error::{Refusal, all_taken, range};
use crate::types::{Activation, Output, RouteGroups};

/// A layer's shape and its meaning. See [`crate::Route`] for the router's.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct MoeDesc {
    /// What x, the experts' weights and all that lies between are of: bf16, fp16, or fp32 for
    /// checks. Sums are fp32. What fp16 cannot hold becomes infinite, so that an overflow is seen
    pub element: DType,
    pub tokens: usize,
    pub dim: usize,
    pub hidden: usize,
    pub experts: usize,
    pub top_k: usize,
    /// The experts are some of those that tokens choose of, so there may be fewer than `top_k`.
    /// Such a layer has no router: see [`crate::MoeExperts`]
    pub part: bool,
    pub activation: Activation,
    /// act(gate) * up, else act(up)
    pub gated: bool,
    /// Scores by sigmoid, else by softmax
    pub sigmoid: bool,
    pub norm_topk: bool,
    pub scale: f32,
    /// Only experts of the best groups may be chosen
    pub groups: Option<RouteGroups>,
    /// Equal runs of tokens whose auxiliary loss is their own, and the layer's their mean: 1 of the
    /// scope of a micro-batch, its sequences of the scope of a sequence
    pub segments: usize,
    pub aux_coef: f64,
    pub z_coef: f64,
    /// Expert weight gradients as elements, as fp32, or as sums in fp64
    pub weight_gradients: Output,
    /// Equal runs of tokens, one of each rank that they come from. Where weight gradients are sums
    /// in fp64, what is summed are the products of each run, rounded to elements
    pub sources: usize,
}

impl MoeDesc {
    pub const EXPERTS_MAX: usize = EXPERTS_MAX as usize;
    /// A lane of a warp for each.
    pub const GROUPS_MAX: usize = GROUPS_MAX as usize;
    const ALIGNMENT: usize = ALIGNMENT as usize;

    /// T K: choices.
    pub const fn slots(&self) -> usize {
        self.tokens * self.top_k
    }

    /// R: routed rows at most. A token has none but of the experts here, each of them once.
    pub const fn rows(&self) -> usize {
        let each = if self.top_k < self.experts { self.top_k } else { self.experts };
        self.tokens * each
    }

    /// W: columns of H.
    pub const fn width(&self) -> usize {
        if self.gated { 2 * self.hidden } else { self.hidden }
    }

    /// Useful floating-point operations, forward and backward, the router's left out.
    pub fn flops(&self) -> (f64, f64) {
        let products = self.width() + self.hidden;
        let forward = 2.0 * self.rows() as f64 * self.dim as f64 * products as f64;
        (forward, 2.0 * forward)
    }

    pub fn check(&self) -> Result<(), Refusal> {
        if !matches!(self.element, DType::Bf16 | DType::F16 | DType::F32) {
            let devices = "layers on a GPU are in bf16, fp16 or fp32";
            return Err(Refusal::Element { found: self.element, devices });
        }
        self.check_counts()?;
        all_taken(self.sizes().refused())
    }

    fn sizes(&self) -> LayerSizes {
        LayerSizes {
            tokens: self.tokens as u64,
            dim: self.dim as u64,
            hidden: self.hidden as u64,
            experts: self.experts as u64,
            top_k: self.top_k as u64,
            segments: self.segments as u64,
            chooses: !self.part,
            width: self.width() as u64,
        }
    }

    /// What the experts' weight gradients are of.
    pub const fn gradient_element(&self) -> DType {
        match self.weight_gradients {
            Output::Element => self.element,
            Output::F32 => DType::F32,
            Output::Sums => match self.element {
                DType::F64 => DType::Pair,
                _ => DType::F64,
            },
        }
    }

    /// What every device asks of a layer.
    pub(crate) fn check_counts(&self) -> Result<(), Refusal> {
        range("experts", self.experts, 1, 1 << 20)?;
        range("top_k", self.top_k, 1, if self.part { 1 << 20 } else { self.experts })?;
        range("tokens", self.tokens, 1, 1 << 30)?;
        range("dim", self.dim, 1, 1 << 20)?;
        range("hidden", self.hidden, 1, 1 << 20)?;
        range("segments", self.segments, 1, self.tokens)?;
        if !self.tokens.is_multiple_of(self.segments) {
            let (found, multiple) = (self.tokens, self.segments);
            return Err(Refusal::Segments { found, multiple });
        }
        if self.sources == 0 || !self.tokens.is_multiple_of(self.sources) {
            let (found, sources) = (self.tokens, self.sources);
            return Err(Refusal::Sources { found, sources });
        }
        let summed = matches!(self.element, DType::F32 | DType::F64);
        if self.weight_gradients == Output::Sums && !summed {
            let (found, element) = (self.weight_gradients, self.element);
            return Err(Refusal::Output { found, element, reason: "sums are of fp32 or fp64" });
        }
        self.check_groups()
    }

    fn check_groups(&self) -> Result<(), Refusal> {
        let Some(RouteGroups { count, kept }) = self.groups else { return Ok(()) };
        let experts = self.experts;
        let refused = |reason| Err(Refusal::Groups { count, kept, experts, reason });
        match () {
            () if count == 0 || count > Self::GROUPS_MAX => refused("there may be 1 to 32 groups"),
            () if !experts.is_multiple_of(count) => refused("groups have equally many experts"),
            () if kept == 0 || kept > count => refused("at least one and at most all are kept"),
            () if experts / count * kept < self.top_k => refused("they hold fewer than top_k"),
            () => Ok(()),
        }
    }

    /// Passes over D of the down product: two when that lets A and half of Y share the place of
    /// one [R, D].
    pub(crate) fn down_passes(&self) -> usize {
        let halves = self.dim.is_multiple_of(2 * Self::ALIGNMENT);
        if halves && 2 * self.hidden <= self.dim { 2 } else { 1 }
    }
}

/// The experts' matrices in one buffer, as a bucket holds them: expert e's starts at e * `stride`.
#[derive(Clone, Copy, Debug)]
pub struct Stacked {
    pub buffer: Buffer,
    /// Elements from one expert's first to the next's: at least a matrix, and on a GPU a multiple
    /// of 32 of its rows. What lies between is neither read nor written.
    pub stride: usize,
    /// Elements between the last of a gate and the first of its up; on a GPU none.
    pub gap: usize,
}

impl Stacked {
    /// `experts` matrices that follow each other.
    pub fn dense(buffer: Buffer, experts: usize) -> Stacked {
        Stacked { buffer, stride: buffer.len() / experts, gap: 0 }
    }

    /// Checks that `experts` matrices of `size` elements of `dtype` are there.
    pub(crate) fn check(&self, dtype: DType, experts: usize, size: usize) {
        let size = size + self.gap;
        let ends = self.stride * (experts - 1) + size;
        let right = self.buffer.dtype() == dtype && self.buffer.len() >= ends;
        assert!(right && self.stride >= size, "{self:?} of {experts} x {size} {dtype:?}");
    }
}

/// Weights; the experts' are elements (`MoeDesc::element`).
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// f32 [E, D]
    pub router: Buffer,
    /// f32 [E], added to the scores for the choice of experts alone
    pub bias: Option<Buffer>,
    /// E of [W, D], gate rows before up rows
    pub up: Stacked,
    /// E of [D, F]
    pub down: Stacked,
}

/// Gradients of [`Weights`]; the experts' as `weight_gradients` says.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// f32 [E, D]
    pub router: Buffer,
    pub up: Stacked,
    pub down: Stacked,
    /// The experts' are added to what is there, else written. Elements of 16 bits are rounded,
    /// added, rounded again
    pub accumulate: bool,
    /// The same of the router's
    pub accumulate_router: bool,
}

/// What a layer keeps from its forward to its backward, beside x. On a CPU all floats are of one
/// kind; `order` and `router_halves` are empty.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
    /// elements [R, W]; backward leaves dH here
    pub h: Buffer,
    /// On a CPU alone, else empty: A [R, F]
    pub a: Buffer,
    /// f32 [T, E]
    pub logits: Buffer,
    /// On a CPU alone, else empty: scores [T, E]
    pub probs: Buffer,
    /// f32 [T]
    pub lse: Buffer,
    /// u32 [T, K], ascending
    pub ids: Buffer,
    /// f32 [T, K]
    pub weights: Buffer,
    /// u32 [E]
    pub counts: Buffer,
    /// u32 [E + 1]
    pub offsets: Buffer,
    /// u32 [E], heaviest first; on a CPU empty
    pub order: Buffer,
    /// u32 [R]: token of each row
    pub rows: Buffer,
    /// u32 [T, K]: row of each slot
    pub pos: Buffer,
    /// f32 [R]
    pub row_weights: Buffer,
    /// u32 [segments, E]
    pub segment_counts: Buffer,
    /// f64 [segments, E]
    pub prob_sums: Buffer,
    /// f64 [2]: auxiliary and z loss, unscaled
    pub losses: Buffer,
    /// elements [2 E, D]: the router's weights rounded, then what rounding took; in fp32 none
    pub router_halves: Buffer,
}

/// All buffers of a call.
#[derive(Clone, Copy, Debug)]
pub struct MoeTensors {
    /// elements [T, D]
    pub x: Buffer,
    /// elements [T, D]: added to what the forward puts out
    pub residual: Option<Buffer>,
    pub weights: Weights,
    pub saved: Saved,
    /// `MoeLayer::workspace_bytes` of U8
    pub workspace: Buffer,
    /// F32 [1], on the device: what `dout` was multiplied by, and what the layer's own losses are
    /// to be multiplied by beside it; none is 1
    pub loss_scale: Option<Buffer>,
    /// U32 [S + 1]: where the tokens of each source begin; None: the desc's sources have equally
    /// many
    pub starts: Option<Buffer>,
}
