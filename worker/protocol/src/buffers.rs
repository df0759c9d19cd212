//! Every buffer of a rank's arena, in the order in which it is laid out.
//!
//! `Planner` decides what a buffer is: a range of the device's arena, or nothing but its size.

mod plan;

/// All of a rank's device memory.
#[derive(Clone, Debug)]
pub struct Buffers<B> {
    pub buckets: Vec<Bucket<B>>,
    pub whole: Whole<B>,
    pub numbers: Numbers<B>,
    pub batch: Batch<B>,
    pub layers: Vec<Layer<B>>,
    pub head: Head<B>,
    pub scratch: Scratch<B>,
    /// Where text is generated.
    pub cache: Option<Cache<B>>,
}

/// What is kept of the tokens before, while text is generated: `C` of them at most.
#[derive(Clone, Debug)]
pub struct Cache<B> {
    pub layers: Vec<LayerCache<B>>,
    /// [V]
    pub logits: B,
}

#[derive(Clone, Copy, Debug)]
pub struct LayerCache<B> {
    /// [KV * H, C]
    pub keys: B,
    /// [C, KV * H]
    pub values: B,
    /// u32 [K]: the last token's experts, where a router holds on to them.
    pub chosen: B,
}

/// A bucket of parameters with all that belongs to them. Weights and gradients are those of the
/// whole bucket, unless it takes turns to be [`Whole`]; everything else that of the chunk which the
/// rank owns.
#[derive(Clone, Debug)]
pub struct Bucket<B> {
    /// u32 [owned blocks, 8]: whose each block of 4,096 elements is
    pub table: B,
    pub weight: B,
    /// I16 low halves, or fp32
    pub master: Option<B>,
    pub moment1: B,
    pub moment2: B,
    /// Where sums are exact: of one micro-batch, and in the own chunk of a whole step in the end.
    /// Of experts that chunk alone.
    pub gradient: B,
    /// f64: the sums of a step, where they are exact
    pub sum: Option<B>,
    /// f64 [owned blocks]
    pub square_sums: B,
}

/// Places in which buckets take turns to be whole, see [`crate::zero`]; none where they always are.
#[derive(Clone, Debug)]
pub struct Whole<B> {
    pub weights: Vec<B>,
    pub gradients: Vec<B>,
    /// f64: what of gradients travels, where sums are exact
    pub sums: Vec<B>,
}

/// The numbers of a step, f64 (`moejob_kernels::numbers`).
#[derive(Clone, Debug)]
pub struct Numbers<B> {
    /// What the step is told.
    pub params: B,
    /// [M, 5]: the records of a step's micro-batches, 0 for those of other ranks.
    pub parts: B,
    /// [5]: the record of the micro-batch that is computed, and the sum of a step's.
    pub record: B,
    pub records: B,
    /// Numbers of the step, which are summed over ranks.
    pub reduced: B,
    /// A pair, on processors: the sum of squares of what is owned, then of all gradients.
    pub squares: Option<B>,
    /// What follows from both, on the device, and what stays from step to step.
    pub control: B,
    /// f32 [1]: what the loss is multiplied by, where it is.
    pub loss_scale: Option<B>,
    /// f32 [1]: what the loss is multiplied by where not all targets count: `loss_scale`, times all
    /// targets of the step over those that do.
    pub target_scale: Option<B>,
    pub balance: Option<WideBalance<B>>,
}

/// Where the balance is of more than one layer of a micro-batch: statistics of a router are 5 x E.
#[derive(Clone, Debug)]
pub struct WideBalance<B> {
    /// [M, mixture layers, 5, E]: statistics of each micro-batch of a step. Where the balance is of
    /// all layers of a micro-batch, [mixture layers, 5, E]: those of each layer.
    pub parts: B,
    /// [mixture layers, 5, E], or [5, E]: their sum.
    pub sum: B,
}

/// One micro-batch.
#[derive(Clone, Debug)]
pub struct Batch<B> {
    /// u32 [T] each
    pub ids: B,
    pub targets: B,
    pub positions: B,
    /// Where each token's document begins in its sequence.
    pub starts: B,
}

/// What a layer keeps from forward to backward.
#[derive(Clone, Debug)]
pub struct Layer<B> {
    /// [T, D]: the residual stream as it enters.
    pub input: B,
    /// [T, D], [T]
    pub norm1: B,
    pub rstd1: B,
    /// [T, N * H], [T, KV * H]: what attention sees.
    pub q: B,
    pub k: B,
    pub v: B,
    pub qk_norm: Option<QkNormBuffers<B>>,
    /// [T, N * H + 2 * KV * H]: q, k and v before the clamp.
    pub unclipped: Option<B>,
    /// [T, N * H], [T, N]
    pub attended: B,
    pub lse: B,
    /// [T, D]: the residual stream after attention.
    pub mid: B,
    /// [T, D], [T]; where experts are shared out over ranks and tokens leave from where they are, a
    /// part of `Spread::x`.
    pub norm2: B,
    pub rstd2: B,
    /// The mixture layer, where it is one.
    pub fused: Option<Fused<B>>,
    /// The dense part, or the shared experts.
    pub dense: Option<Gated<B>>,
}

/// What the fused mixture layer keeps: see `Saved` of the kernels.
#[derive(Clone, Debug)]
pub struct Fused<B> {
    pub router: Router<B>,
    /// [R, 2 F], and where a CPU computes [R, F]
    pub h: B,
    pub a: B,
    /// u32 [E + 1], [E]
    pub offsets: B,
    pub order: B,
    /// u32 [R], [T, K], f32 [R]
    pub rows: B,
    pub pos: B,
    pub row_weights: B,
    /// u32 [segments, E]
    pub segment_counts: B,
    /// [2 E, D]
    pub router_halves: B,
    /// Where experts are shared out over ranks.
    pub spread: Option<Spread<B>>,
}

/// Tokens of an expert group that are at this rank, and where the rows of the experts here lie: see
/// `MoePlace` of the kernels. `A` tokens by (rank, token): those that came by need, else all of the
/// `P` ranks, of which some say nothing. Experts and choices are those of [slices](crate::slices).
#[derive(Clone, Debug)]
pub struct Spread<B> {
    /// [A, D]
    pub x: B,
    /// u32 [A, K], f32 [A, K]
    pub ids: B,
    pub weights: B,
    /// u32 [E]: where each expert stands in the order of those that compute them; none: by its id
    pub places: Option<B>,
    /// How tokens came by need, hop by hop; none: all ranks' tokens are here.
    pub need: Vec<Needed<B>>,
    /// u32 [G + 1], and on a GPU [G]
    pub offsets: B,
    pub order: B,
    /// u32 [R], [A, K], f32 [R]
    pub rows: B,
    pub pos: B,
    pub row_weights: B,
}

/// Who needs which tokens of one hop, from forward to backward. Tokens leave once to each rank that
/// is on the way to one of their experts.
#[derive(Clone, Debug)]
pub struct Needed<B> {
    /// u32 [P + 1]: where the tokens of each rank begin among those here, and how many there are;
    /// of the last hop alone
    pub starts: B,
    /// u32: tokens that leave, by the rank that they go to
    pub sent: B,
    /// u32 [T, K]: which of the rows that come back is that of a choice; of the first hop alone
    pub back: B,
    /// u32: the row of each choice of the tokens here, in their order: a routed row, or of those
    /// that the next hop brings back
    pub choices: B,
    /// u32 [.., K], of the tokens that leave: which of the rows that come back are sums of its
    /// choices, one from each rank; empty where the row of each choice comes
    pub sums: B,
}

/// What travels of a layer, used by every layer anew; tokens lie as in [`Spread`]. Choices are
/// those of slices.
#[derive(Clone, Debug)]
pub struct SpreadScratch<B> {
    /// [A, D]: gradients of outputs. Where they leave from where they are, the own ones are
    /// `Scratch::dx`.
    pub dout: B,
    /// [A, D]: sums over the experts here, or gradients of inputs; [A, K, D] where each expert's
    /// row comes back, and by need [R, D]. What travels in another format is packed in the one of
    /// these two that is not in use, or where it does not fit there, in `packed`.
    pub partial: B,
    pub packed: B,
    /// f32 [A, K]; by need [R]
    pub ds: B,
    /// u32 [T, K]: 0, 1, 2 ..
    pub slots: B,
    /// What leaves by need, and comes back.
    pub own: Option<OwnChoices<B>>,
    /// What passes through this rank on its way within the node.
    pub relay: Option<Relay<B>>,
    /// f32 [T, K / r]: the own `ds` of experts, where these are cut into slices.
    pub choice_ds: Option<B>,
}

/// The own tokens on their way, by need.
#[derive(Clone, Debug)]
pub struct OwnChoices<B> {
    /// u32 [T, K], f32 [T, K]
    pub ids: B,
    pub weights: B,
    /// `T K` of them
    pub leaving: Leaving<B>,
    /// f32 [T, K]: gradients of weights, where they belong
    pub ds: B,
}

/// What one hop sends: tokens, and then rows of choices [.., D] and gradients of weights f32 that
/// came back.
#[derive(Clone, Copy, Debug)]
pub struct Leaving<B> {
    pub rows: B,
    pub ds: B,
}

/// Tokens of the ranks of the own place on all nodes that have an expert on this node, and what
/// goes back to them.
#[derive(Clone, Debug)]
pub struct Relay<B> {
    /// [.., D]
    pub x: B,
    pub leaving: Leaving<B>,
    pub returned: Leaving<B>,
}

/// Queries and keys before their norm, and its statistics.
#[derive(Clone, Debug)]
pub struct QkNormBuffers<B> {
    pub q: B,
    pub k: B,
    pub q_rstd: B,
    pub k_rstd: B,
}

/// [T, F] each.
#[derive(Clone, Debug)]
pub struct Gated<B> {
    pub gate: B,
    pub up: B,
    pub hidden: B,
}

/// A router's scores and choices, kept from forward to backward. Its floats are of the kind that
/// statistics have.
#[derive(Clone, Debug)]
pub struct Router<B> {
    /// [T, E], and scores [T, E] unless a GPU chooses in one op
    pub logits: B,
    pub probs: B,
    /// [T]
    pub lse: B,
    /// u32 [T, K], [T, K]
    pub ids: B,
    pub weights: B,
    /// u32 [E], f64 [E] of each segment, f64 [3]: auxiliary loss, z loss, mean entropy
    pub counts: B,
    pub prob_sums: B,
    pub losses: B,
    /// The gate's memory, where the router is more than dropless top-k.
    pub gate: Option<Gate<B>>,
}

/// What a gate keeps from forward to backward.
#[derive(Clone, Debug)]
pub struct Gate<B> {
    /// [T, E]: logits with noise.
    pub noisy: B,
    /// [T, E]: deviations of learned noise, before softplus.
    pub raw: Option<B>,
    /// u32 [T, K], [T], [E]: choices before any was dropped, the best ones, and how many were.
    pub chosen: B,
    pub first: B,
    pub dropped: B,
    /// f64 [sequences or 1, 5, E]: statistics.
    pub stats: B,
    pub cosine: Option<Cosine<B>>,
}

/// The cosine gate, `P` its projected width.
#[derive(Clone, Debug)]
pub struct Cosine<B> {
    /// [T, P] before and after it is brought to length one; f64 [T]
    pub projected: B,
    pub normed: B,
    pub norm: B,
    /// [E, P], f64 [E]
    pub similarity: B,
    pub similarity_norm: B,
}

/// The final norm and the losses.
#[derive(Clone, Debug)]
pub struct Head<B> {
    /// [T, D]: the residual stream as it leaves.
    pub input: B,
    /// [T, D], [T]
    pub norm: B,
    pub rstd: B,
    /// f64 [2]: sum of cross-entropies and valid targets of a micro-batch that is only measured.
    pub measured: B,
}

/// Memory that every layer uses anew.
#[derive(Clone, Debug)]
pub struct Scratch<B> {
    /// [T, D]: the gradient of the residual stream, and of a norm's output.
    pub dx: B,
    pub dnorm: B,
    /// [T, N * H], [T, KV * H]
    pub d_attended: B,
    pub dq: B,
    pub dk: B,
    pub dv: B,
    /// Before their norm.
    pub dq_raw: Option<B>,
    pub dk_raw: Option<B>,
    /// Where a router is no part of the op that computes experts.
    pub router: Option<RouterScratch<B>>,
    pub dense: Option<Gated<B>>,
    pub spread: Option<SpreadScratch<B>>,
    /// u8: attention, the mixture layer and the head use it in turn.
    pub workspace: B,
    /// What is read and written of the state by the host passes here; empty where the state is
    /// kept as it is stored.
    pub stage: B,
}

/// Numbers of what a step decided (`StepControl` of the kernels).
pub const CONTROL_NUMBERS: u64 = 5;
/// Words that say whose a block is (`BucketBlock` of the kernels).
pub const BLOCK_WORDS: u64 = 8;
/// Elements of a stage.
pub const STAGE_ELEMENTS: u64 = 1 << 24;

/// Gradients of a router that every layer writes anew.
#[derive(Clone, Debug)]
pub struct RouterScratch<B> {
    /// [T, E], [T, K]
    pub dlogits: B,
    pub dweights: B,
    pub gate: GateScratch<B>,
}

/// Memory of gates that every layer uses anew.
#[derive(Clone, Debug)]
pub struct GateScratch<B> {
    /// [T, D]: the layer's input after dropout.
    pub dropped: Option<B>,
    /// [T, D], as statistics are: what the router sees, where that is not the layer's input itself,
    /// and then its gradient.
    pub input: Option<B>,
    /// [T, E]
    pub d_raw: Option<B>,
    /// f64 [sequences or 1, 3, E]
    pub dstats: B,
    /// [T, P], [T, P], [E, P]
    pub cosine: Option<[B; 3]>,
}
