//! A layer's shape: what it means, and which the kernels take.

use super::gemm::Output;
use super::route::RouteShape;
use crate::buffer::DType;
use crate::route::RouteGroups;
use moejob_protocol::kernel_sizes::{ALIGNMENT, EXPERTS_MAX, GROUPS_MAX, LayerSizes, SizeRefusal};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoeActivation {
    Silu = 0,
    Relu = 1,
    /// x * Phi(x), the exact one; not on a CPU
    Gelu = 2,
    /// The tanh form of it: `Activation::Gelu` of the CPU's ops
    GeluTanh = 3,
}

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
    pub activation: MoeActivation,
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

/// Why the kernels do not take a shape.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum Refusal {
    #[error("{name} is {found}; it must be between {min} and {max}")]
    Range { name: &'static str, found: usize, min: usize, max: usize },
    #[error("{name} is {found}; the kernels take multiples of {multiple} only")]
    Unaligned { name: &'static str, found: usize, multiple: usize },
    #[error("{found} tokens are no whole number for each of {multiple} segments")]
    Segments { found: usize, multiple: usize },
    /// By the list that whoever plans a job reads, too.
    #[error(transparent)]
    Size(#[from] SizeRefusal),
    #[error("{kept} of {count} groups of {experts} experts: {reason}")]
    Groups { count: usize, kept: usize, experts: usize, reason: &'static str },
    #[error("{found} slices of each expert, and one rank has all of them; it computes whole ones")]
    Slices { found: usize },
    #[error("elements of {found:?}; {devices}")]
    Element { found: DType, devices: &'static str },
    #[error("weight gradients as {found:?} of {element:?}: {reason}")]
    Output { found: Output, element: DType, reason: &'static str },
    #[error("{found} tokens are no whole number for each of {sources} ranks")]
    Sources { found: usize, sources: usize },
    #[error("the activation {found:?}, which a CPU has not; GeluTanh it has")]
    Activation { found: MoeActivation },
}

pub(super) fn range(
    name: &'static str,
    found: usize,
    min: usize,
    max: usize,
) -> Result<(), Refusal> {
    match (min..=max).contains(&found) {
        true => Ok(()),
        false => Err(Refusal::Range { name, found, min, max }),
    }
}

/// The first of the sizes that kernels do not take.
pub(super) fn all_taken(refused: Vec<SizeRefusal>) -> Result<(), Refusal> {
    refused.into_iter().next().map_or(Ok(()), |first| Err(Refusal::Size(first)))
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

    pub(super) fn route(&self) -> RouteShape {
        RouteShape {
            tokens: self.tokens,
            experts: self.experts,
            top_k: self.top_k,
            sigmoid: self.sigmoid,
            norm_topk: self.norm_topk,
            scale: self.scale,
            groups: self.groups,
            segments: self.segments,
            element: self.element,
        }
    }

    /// Passes over D of the down product: two when that lets A and half of Y share the place of
    /// one [R, D].
    pub(super) fn down_passes(&self) -> usize {
        let halves = self.dim.is_multiple_of(2 * Self::ALIGNMENT);
        if halves && 2 * self.hidden <= self.dim { 2 } else { 1 }
    }
}
