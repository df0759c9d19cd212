//! The memory of a rank, as a function of model, layout and training.
//!
//! ```text
//! Buffers::plan(planner) -> every buffer that a rank computes in, in order
//!   planner = the device's   the worker's arena
//!   planner = a counter      what `moejob plan` prints
//! + host memory: snapshots, the checkpoint's copy, staging of exchanges, what is offloaded
//! ```
//! Shapes: `T` tokens of a micro-batch, `D` model, `N` heads, `V` vocabulary, `E` experts, `K`
//! top-k, `F` expert hidden, `R` routed rows, `U` distinct tokens that arrive.

mod count;
mod shapes;

pub use count::{
    OFFLOADED_MASTERS, OFFLOADED_MOMENTS, beside_arena, host_memory, model_memory, rank_memory,
    window_bytes, window_rooms,
};
pub use shapes::BucketShape;

use crate::config::{
    Backend, GradientDtype, MomentDtype, Offload, Precision, RecoveryConfig, Recompute,
    TrainingConfig,
};
use crate::formats::Formats;
use crate::layout::{Layout, Placement};
use crate::model::{AuxLossScope, ModelConfig};
use crate::owners::Holders;
use crate::rails::Rails;
use crate::rows::{RowCounts, row_counts};
use crate::workspace;

/// The memory of one rank in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct RankMemory {
    /// Named parts with even routing; their sum is `balanced`.
    pub parts: Vec<Part>,
    /// Every expert gets the same number of tokens.
    pub balanced: u64,
    /// Routed rows are `routedHeadroom` times the balanced ones.
    pub committed: u64,
    /// Every token of the expert group chooses experts of this rank.
    pub worst: u64,
    /// What of a GPU's state lies in the memory of its host; none of it is in the numbers above.
    pub offloaded: Vec<Part>,
}

impl RankMemory {
    /// Bytes of the host's memory that a GPU's state takes. Each update reads all of them and
    /// writes all of them.
    pub fn offloaded_bytes(&self) -> u64 {
        self.offloaded.iter().map(|part| part.bytes).sum()
    }
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Part {
    pub name: &'static str,
    pub bytes: u64,
}

/// What elements a buffer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Kind {
    F32,
    F64,
    /// Two doubles, the second of which is what was rounded off the first.
    Pair,
    Bf16,
    F16,
    /// Low halves of masters.
    I16,
    U32,
    U8,
}

impl Kind {
    pub const fn bytes(self) -> u64 {
        match self {
            Kind::Pair => 16,
            Kind::F64 => 8,
            Kind::F32 | Kind::U32 => 4,
            Kind::Bf16 | Kind::F16 | Kind::I16 => 2,
            Kind::U8 => 1,
        }
    }
}

/// How the masters of matrices are kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Masters {
    /// They are the weights.
    Weights,
    /// 16 bits that with the bf16 weight are the master's.
    LowBits,
    /// Fp32 beside the weights.
    Separate,
}

/// What everything is of and how it is summed: a function of the training.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Types {
    /// Activations and matrices.
    pub element: Kind,
    /// Of a row or a token: reciprocal deviations, logarithms of sums.
    pub statistic: Kind,
    /// Gains, biases, routers: what is small is kept whole.
    pub vector: Kind,
    pub masters: Masters,
    pub moment: Kind,
    /// Of matrices; of vectors as they are.
    pub gradient: Kind,
    /// Gradients of micro-batches are added up in fp64, over a step and over ranks,
    /// those of fp64 in pairs. Then their order changes no bit, and neither does the number of
    /// ranks. The gradient of a tied table is added up so from two products a micro-batch: that of
    /// the head and that of the embedding, which different ranks may compute.
    pub exact: bool,
    /// The loss is multiplied before backward, so that fp16 holds its gradients.
    pub scaled: bool,
}

impl Precision {
    /// Of weights and activations on a GPU.
    pub const fn element(self) -> Kind {
        match self {
            Precision::Fp32 | Precision::Tf32 => Kind::F32,
            Precision::Fp64 => Kind::F64,
            Precision::Bf16 => Kind::Bf16,
            Precision::Fp16 => Kind::F16,
        }
    }
}

impl Types {
    /// `micro_batches` of one rank in a step.
    pub fn of(training: &TrainingConfig, micro_batches: u32) -> Types {
        let whole = |float| Types {
            element: float,
            statistic: float,
            vector: float,
            masters: Masters::Weights,
            moment: float,
            gradient: float,
            exact: true,
            scaled: false,
        };
        let element = training.precision.element();
        let masters = match training.precision {
            Precision::Fp32 | Precision::Tf32 => Masters::Weights,
            Precision::Fp64 => return whole(element),
            Precision::Bf16 => Masters::LowBits,
            Precision::Fp16 => Masters::Separate,
        };
        let gradient = match training.compute.gradient_dtype {
            GradientDtype::Auto if micro_batches <= 1 => element,
            GradientDtype::Bf16 if element == Kind::Bf16 => element,
            _ => Kind::F32,
        };
        let moment = match training.compute.moment_dtype {
            MomentDtype::Bf16 => Kind::Bf16,
            MomentDtype::Fp32 => Kind::F32,
        };
        let scaled = element == Kind::F16;
        let exact = training.precision == Precision::Fp32;
        Types { element, masters, moment, gradient, exact, scaled, ..whole(Kind::F32) }
    }

    /// What gradients that are of `kind` are added up in.
    pub const fn summed(&self, kind: Kind) -> Kind {
        if self.exact { self.sum() } else { kind }
    }

    /// What exact sums are of.
    pub const fn sum(&self) -> Kind {
        match self.element {
            Kind::F64 => Kind::Pair,
            _ => Kind::F64,
        }
    }

    /// Bytes of a float in a checkpoint.
    pub fn stored_bytes(&self) -> u64 {
        if self.element == Kind::F64 { 8 } else { 4 }
    }
}

/// How many rows a buffer has.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Rows {
    Fixed(u64),
    /// A row per (token, expert) that this rank computes.
    Routed,
    /// A row per token that comes to this rank's experts, of which each has a routed row.
    Arrived,
    /// A row per choice of the own tokens.
    Chosen,
    /// A row per token that passes through this rank on its way within the node, and one per choice
    /// of these that is of an expert there.
    Relayed,
    RelayedChoices,
    /// A row a byte of [`Shape::workspace`].
    Workspace,
}

/// Lays out buffers: for a device, or to count them.
pub trait Planner {
    type Buffer: Copy;
    /// Starts the part of memory that the next buffers belong to.
    fn part(&mut self, name: &'static str);
    fn alloc(&mut self, kind: Kind, rows: Rows, width: u64) -> Self::Buffer;
    /// The same where the other GPUs of a node may read it.
    fn alloc_shared(&mut self, kind: Kind, rows: Rows, width: u64) -> Self::Buffer {
        self.alloc(kind, rows, width)
    }
    /// `len` elements of the part `name` in the memory of a GPU's host.
    fn alloc_on_host(&mut self, name: &'static str, kind: Kind, len: u64) -> Self::Buffer;
    /// The part at `at` of a buffer that has as many in each of `parts`.
    fn part_of(&mut self, whole: Self::Buffer, at: u64, parts: u64) -> Self::Buffer;
}

/// Numbers of a micro-batch, and of a rank's own counts (`moejob_kernels::numbers`).
pub const RECORD_NUMBERS: u64 = 5;
pub const TALLY_NUMBERS: u64 = 5;
/// Numbers of a step that are no tables (`moejob_kernels::StepNumbers`).
pub const SINGLE_NUMBERS: u64 = 16;
/// Numbers that a step is told (`moejob_kernels::StepParams`).
pub const PARAM_NUMBERS: u64 = 20;
/// Rows of a router's statistics.
pub const STATISTICS: u64 = 5;

/// Elements of the vectors of a step's numbers.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumberCounts {
    /// Mixture layers x `E`.
    pub loads: u64,
    /// Single numbers | loads and dropped | a count a parameter.
    pub reduced: u64,
}

/// The sizes that buffers are made of.
#[derive(Clone, Debug)]
pub struct Shape {
    /// Sequences of a micro-batch.
    pub batch: u64,
    /// `T`
    pub tokens: u64,
    pub types: Types,
    /// Bytes of a float in snapshots and checkpoints.
    pub float_bytes: u64,
    /// Micro-batches of a step.
    pub micro_batches: u32,
    /// Ranks of an expert group, and the own one's place in it.
    pub expert_parallel: u64,
    pub expert_place: u64,
    /// Between GPUs the group's tokens travel along these; none: from each to each.
    pub rails: Option<Rails>,
    /// Experts do not lie in the order of those that compute them.
    pub shuffled: bool,
    /// As what these tokens travel.
    pub formats: Formats,
    /// The row of each expert comes back to its token by itself.
    pub combines_each: bool,
    pub numbers: NumberCounts,
    pub recompute: Recompute,
    /// Those that the rank holds.
    pub buckets: Vec<BucketShape>,
    /// Parts of a micro-batch whose balance is a loss of its own.
    pub segments: u64,
    /// Dropout stands between a mixture layer's norm and its experts.
    pub drops_input: bool,
    /// There are gradients and optimizer state.
    pub trains: bool,
    /// A processor computes.
    pub on_cpu: bool,
    /// Moments and masters of buckets lie in the memory of a GPU's host.
    pub offloads: bool,
    /// Positions whose keys and values are kept, where text is generated; none while training.
    pub cached: u64,
    /// Documents of a sequence may be kept apart, which takes kernels of their own.
    pub documents: bool,
    /// Not all targets of a step may count, and a device must be told how many do.
    pub masked: bool,
    /// Bytes that attention, the mixture layer and the head use in turn, with even routing and at
    /// most.
    pub workspace: [u64; 2],
    pub balanced: RowCounts,
    pub worst: RowCounts,
    /// Choices of the own tokens, as a rule and at most.
    pub chosen: [u64; 2],
}

impl Shape {
    pub fn new(
        model: &ModelConfig,
        layout: &Layout,
        rank: u32,
        training: &TrainingConfig,
    ) -> Shape {
        let micro_batches = training.global_batch_size / training.micro_batch_size;
        // The same on every rank, since what they sum must be of one kind.
        let types = Types::of(training, layout.mesh.rounds(micro_batches));
        Shape::with_types(model, layout, rank, training, types)
    }

    /// The same with other kinds of numbers than the training asks for.
    pub fn with_types(
        model: &ModelConfig,
        layout: &Layout,
        rank: u32,
        training: &TrainingConfig,
        types: Types,
    ) -> Shape {
        let micro_batches = training.global_batch_size / training.micro_batch_size;
        let mesh = &layout.mesh;
        let tokens = u64::from(training.micro_batch_size) * u64::from(training.sequence_length);
        let group = mesh.expert_group(rank);
        let holders = Holders::new(model, layout);
        let (balanced, worst) = row_counts(model, layout, rank, tokens);
        Shape {
            batch: training.micro_batch_size.into(),
            tokens,
            types,
            float_bytes: types.stored_bytes(),
            micro_batches,
            expert_parallel: group.len() as u64,
            expert_place: group.iter().take_while(|other| **other != rank).count() as u64,
            shuffled: layout.placement != Placement::Contiguous,
            rails: None,
            formats: training.compute.formats(types.element, model.slices().slots),
            combines_each: training.compute.combines_each(),
            numbers: NumberCounts::new(model),
            recompute: training.recompute,
            buckets: shapes::of(model, &holders, rank, training.compute.zero),
            segments: match model.router.aux_loss_scope {
                AuxLossScope::Sequence => training.micro_batch_size.into(),
                _ => 1,
            },
            drops_input: model.router.input_dropout > 0.0,
            trains: true,
            on_cpu: training.compute.backend == Backend::Cpu,
            offloads: training.compute.offload == Offload::Host
                && training.compute.backend == Backend::Cuda,
            cached: 0,
            documents: true,
            masked: false,
            workspace: {
                let of = |rows: u64| workspace::bytes(model, [tokens, rows], training, &types);
                let slots = u64::from(model.slices().slots).max(1);
                // Kernels of GPUs have room for all that may come.
                let most = of(u64::from(mesh.ep).max(1) * tokens * slots);
                match training.compute.backend {
                    Backend::Cpu => [of(balanced.routed.max(tokens)).min(most), most],
                    Backend::Cuda => [most; 2],
                }
            },
            balanced,
            worst,
            chosen: {
                let slices = model.slices();
                [slices.per_token, slices.slots].map(|each| tokens * u64::from(each))
            },
        }
    }
}

impl Shape {
    /// Tokens of an expert group go to the ranks alone that have an expert of them, in lists: where
    /// ranks do not read each other's memory, so between processors and between nodes. Rows are
    /// what is computed with.
    pub fn by_need(&self) -> bool {
        let far = self.rails.is_some() || (self.on_cpu && self.combines_each);
        self.expert_parallel > 1 && far && self.formats.are_as_computed()
    }

    /// Exchanges that tokens pass by need: between nodes and within them, or all at once. None
    /// travels by need: 0.
    pub fn hops(&self) -> usize {
        match self.rails {
            _ if !self.by_need() => 0,
            Some(rails) if rails.places > 1 => 2,
            _ => 1,
        }
    }

    /// How many rows a buffer has memory for, with even routing and at most.
    pub fn rows(&self, rows: Rows) -> [u64; 2] {
        let all = self.tokens * self.expert_parallel;
        let [even, worst] = [&self.balanced, &self.worst].map(|of| of.routed);
        let [own, most] = self.chosen;
        let [even, worst] = match rows {
            Rows::Fixed(rows) => [rows; 2],
            Rows::Routed => return [even, worst],
            Rows::Arrived => [all.min(even), all.min(worst)],
            Rows::Chosen => [own, most],
            Rows::Relayed | Rows::RelayedChoices => {
                let nodes = self.rails.map_or(1, |rails| rails.nodes as u64);
                let of_token = if rows == Rows::Relayed { 1 } else { most / self.tokens.max(1) };
                let worst = nodes * self.tokens * of_token;
                [own.min(worst), worst]
            }
            Rows::Workspace => self.workspace,
        };
        // Of what grows on processors GPUs let routed rows alone do so.
        [if self.on_cpu { even } else { worst }, worst]
    }

    /// Tokens that travel between GPUs do so from where they were made: nothing else is made of
    /// them before, and the own ones lie in one piece among those of the group.
    pub fn leaves_in_place(&self) -> bool {
        !self.by_need() && !self.formats.packs() && !self.drops_input
    }

    /// Through windows, tokens and what becomes of them are read where they lie: they travel as
    /// they are, and nobody else carries them on.
    pub fn reads_in_place(&self) -> bool {
        !self.on_cpu && self.rails.is_none() && !self.formats.packs()
    }

    /// What is needed to compute with weights alone: no gradients, no moments, no masters.
    pub fn measuring(mut self) -> Shape {
        (self.trains, self.offloads) = (false, false);
        self.buckets.iter_mut().for_each(BucketShape::measuring);
        self
    }

    /// The same to generate text of up to `positions` tokens.
    pub fn generating(self, positions: u64) -> Shape {
        Shape { cached: positions, ..self.measuring() }
    }
}

impl NumberCounts {
    fn new(model: &ModelConfig) -> NumberCounts {
        let layers = (0..model.num_hidden_layers).filter(|layer| model.is_moe_layer(*layer));
        let loads = layers.count() as u64 * u64::from(model.experts.count);
        NumberCounts { loads, reduced: SINGLE_NUMBERS + 2 * loads + model.rows() }
    }
}

/// Bytes of parameters that one exchange of gradients or weights moves; more take several.
pub const EXCHANGE_BYTES_MAX: u64 = 16 << 20;
/// Bytes that one direction of one peer's pipe may hold at most (`worker::comm`).
pub const PIPE_BYTES: u64 = 512 << 10;
/// And what stands before them.
pub const PIPE_HEAD: u64 = 2048;
/// All pipes of a worker together take no more, up to 4,096 ranks.
const PIPES_BYTES_MAX: u64 = 256 << 20;

/// Bytes that one direction of one peer's pipe may hold in a world of so many ranks, of which each
/// worker has `ranks`: the more pairs, the fewer bytes most of them carry.
pub fn pipe_bytes(ranks: u64, world: u64) -> u64 {
    let each = PIPES_BYTES_MAX / (2 * ranks * world).max(1);
    let most = each.saturating_sub(PIPE_HEAD) / PIPE_HEAD * PIPE_HEAD;
    most.clamp(PIPE_HEAD, PIPE_BYTES)
}
/// Snapshots that are kept: of the attempt's start or the newest two, whatever their interval.
pub const GENERATIONS: u64 = 2;
/// The process itself: code that is paged in, thread stacks, packed operands, small tables.
const PROCESS_BYTES: u64 = 8 << 20;

/// A CUDA context with the modules of a step.
pub const CONTEXT_BYTES: u64 = 576 << 20;
/// A first communicator of NCCL, with what it adds to the context.
const LINKS_BYTES: u64 = 880 << 20;
/// A further one, by which buckets travel beside the ops.
const NEXT_LINKS_BYTES: u64 = 500 << 20;
/// What a window has beside its rooms, and what its memory is a multiple of.
const WINDOW_MAIL: u64 = 512 << 10;
const WINDOW_PAGE: u64 = 2 << 20;
/// CuBLASLt's 32 MiB, 20 of partial sums, and angles of 32,768 positions.
const TABLES_BYTES: u64 = 80 << 20;
