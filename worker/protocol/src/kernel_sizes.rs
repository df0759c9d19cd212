//! Which sizes kernels take: the one list of it.
//!
//! ```text
//! model, training, ranks that share the experts --layers(), attention()--> sizes
//! sizes --refused()--> each that kernels do not take, with what they take
//! ```
//! A device refuses a layer by it when it makes the layer's kernels (`moejob_kernels::cuda`), and
//! `validate` and `plan` know by it which jobs no device opens.

use crate::config::TrainingConfig;
use crate::model::{AuxLossScope, ModelConfig};
use std::fmt;

/// A size that kernels may refuse.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Size {
    /// Of a layer, or those of a rank.
    Experts,
    /// Experts that a token chooses.
    TopK,
    /// Parts of a micro-batch whose balance is a loss of its own.
    Segments,
    /// Width of the residual stream.
    Dim,
    /// Width of an expert, or of a slice of one.
    Hidden,
    /// Tokens, and sequences that attention computes at once.
    Tokens,
    Sequences,
    /// Numbers that kernels index with as few bits as they can.
    Inputs,
    Choices,
    WeightRows,
    Statistics,
}

impl Size {
    /// As it continues a number.
    pub fn words(self) -> &'static str {
        match self {
            Size::Experts => "experts",
            Size::TopK => "experts a token",
            Size::Segments => "sequences whose balance is kept apart",
            Size::Dim => "elements of a token",
            Size::Hidden => "hidden elements of an expert",
            Size::Tokens => "tokens",
            Size::Sequences => "sequences",
            Size::Inputs => "elements of all tokens that experts read",
            Size::Choices => "choices of all tokens",
            Size::WeightRows => "rows of all experts' weights",
            Size::Statistics => "statistics of queries",
        }
    }

    /// Less work at once makes it smaller.
    pub fn is_of_tokens(self) -> bool {
        matches!(
            self,
            Size::Segments
                | Size::Tokens
                | Size::Sequences
                | Size::Inputs
                | Size::Choices
                | Size::Statistics
        )
    }
}

/// What kernels take of a size.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum SizeLimit {
    AtMost(u64),
    MultiplesOf(u64),
}

/// A size that kernels do not take.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct SizeRefusal {
    pub size: Size,
    pub found: u64,
    pub taken: SizeLimit,
}

impl fmt::Display for SizeRefusal {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let SizeRefusal { size, found, taken } = self;
        let words = size.words();
        match taken {
            SizeLimit::AtMost(most) => write!(f, "{found} {words}; kernels take at most {most}"),
            SizeLimit::MultiplesOf(of) => {
                write!(f, "{found} {words}; kernels take multiples of {of}")
            }
        }
    }
}

impl std::error::Error for SizeRefusal {}

pub const EXPERTS_MAX: u32 = 512;
/// Experts of a token that a layer's own op chooses. A gate chooses as many as there are.
pub const TOP_K_MAX: u32 = 16;
/// A lane of a warp for each group of experts.
pub const GROUPS_MAX: u32 = 32;
/// A block of the kernel that chooses for each segment.
pub const SEGMENTS_MAX: u32 = 512;
/// Rows are whole lines of 128 bytes, on which the swizzle of the copy engine works.
pub const ALIGNMENT: u32 = 64;
/// Ranks that share experts: a bit each in what kernels are told.
pub const EXPERT_PARALLEL_MAX: u32 = 64;
/// Blocks of a grid in its second direction: one for each sequence of attention.
pub const SEQUENCES_MAX: u64 = 65_535;

const TOKENS_MAX: u64 = 1 << 30;
const CHOICES_MAX: u64 = 1 << 30;
/// Elements of rows are indexed in 32 bits, rows of weights and of statistics in 31.
const INPUTS_MAX: u64 = u32::MAX as u64;
const ROWS_MAX: u64 = i32::MAX as u64;
/// Statistics of a sequence's queries are padded to a multiple of all blocks of queries.
pub const QUERY_PADDING: u64 = 384;

/// Sizes of a mixture layer, of all its tokens or of those that come to one rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct LayerSizes {
    pub tokens: u64,
    pub dim: u64,
    pub hidden: u64,
    pub experts: u64,
    pub top_k: u64,
    pub segments: u64,
    /// Its own op chooses the experts of each token, and not a gate before it.
    pub chooses: bool,
    /// Columns of what up makes: gate and up, or up alone.
    pub width: u64,
}

/// Sizes of attention.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct AttentionSizes {
    pub sequences: u64,
    pub sequence_length: u64,
    pub heads: u64,
}

/// A list of what is refused, as it grows.
#[derive(Default)]
struct RefusalList(Vec<SizeRefusal>);

impl RefusalList {
    fn at_most(&mut self, size: Size, found: u64, most: u64) {
        if found > most {
            self.0.push(SizeRefusal { size, found, taken: SizeLimit::AtMost(most) });
        }
    }

    fn multiple(&mut self, size: Size, found: u64, of: u64) {
        if !found.is_multiple_of(of) {
            self.0.push(SizeRefusal { size, found, taken: SizeLimit::MultiplesOf(of) });
        }
    }
}

impl LayerSizes {
    /// What of them no GPU takes.
    pub fn refused(&self) -> Vec<SizeRefusal> {
        let LayerSizes { tokens, dim, hidden, experts, top_k, segments, chooses, width } = *self;
        let top_k_max = if chooses { TOP_K_MAX } else { EXPERTS_MAX };
        let mut found = RefusalList::default();
        found.at_most(Size::TopK, top_k, top_k_max.into());
        found.at_most(Size::Experts, experts, EXPERTS_MAX.into());
        found.at_most(Size::Segments, segments, SEGMENTS_MAX.into());
        found.at_most(Size::Tokens, tokens, TOKENS_MAX);
        found.multiple(Size::Dim, dim, ALIGNMENT.into());
        found.multiple(Size::Hidden, hidden, ALIGNMENT.into());
        found.at_most(Size::Inputs, tokens.saturating_mul(dim), INPUTS_MAX);
        found.at_most(Size::Choices, tokens.saturating_mul(top_k), CHOICES_MAX);
        found.at_most(Size::WeightRows, experts.saturating_mul(width.max(dim)), ROWS_MAX);
        found.0
    }
}

impl AttentionSizes {
    /// What of them no GPU takes.
    pub fn refused(&self) -> Vec<SizeRefusal> {
        let AttentionSizes { sequences, sequence_length, heads } = *self;
        let mut found = RefusalList::default();
        found.at_most(Size::Sequences, sequences, SEQUENCES_MAX);
        let padded = sequence_length.next_multiple_of(QUERY_PADDING);
        let statistics = sequences.saturating_mul(heads).saturating_mul(padded);
        found.at_most(Size::Statistics, statistics, ROWS_MAX);
        found.0
    }
}

/// The mixture layers that a GPU makes kernels for: that of its own tokens, and where experts are
/// shared out that of the tokens of all, with the experts here alone, and that which sums up rows
/// of the own ones.
pub fn layers(model: &ModelConfig, training: &TrainingConfig, ranks: u32) -> Vec<LayerSizes> {
    let (experts, slices) = (&model.experts, model.slices());
    let tokens = u64::from(training.micro_batch_size) * u64::from(training.sequence_length);
    let chooses = model.router.is_of_one_op();
    let whole = LayerSizes {
        tokens,
        dim: model.hidden_size.into(),
        hidden: experts.intermediate_size.into(),
        experts: experts.count.into(),
        top_k: model.slots().into(),
        segments: match model.router.aux_loss_scope {
            AuxLossScope::Sequence if chooses => training.micro_batch_size.into(),
            _ => 1,
        },
        chooses,
        width: 2 * u64::from(experts.intermediate_size),
    };
    if ranks <= 1 {
        return vec![whole];
    }
    let of_slices = LayerSizes {
        hidden: slices.width.into(),
        top_k: slices.slots.into(),
        chooses: false,
        width: 2 * u64::from(slices.width),
        ..whole
    };
    let here = LayerSizes {
        tokens: tokens.saturating_mul(ranks.into()),
        experts: slices.count.div_ceil(ranks).into(),
        segments: 1,
        ..of_slices
    };
    match slices.each {
        1 => vec![whole, here],
        _ => vec![whole, here, of_slices],
    }
}

/// Attention of a GPU's own tokens.
pub fn attention(model: &ModelConfig, training: &TrainingConfig) -> AttentionSizes {
    AttentionSizes {
        sequences: training.micro_batch_size.into(),
        sequence_length: training.sequence_length.into(),
        heads: model.num_attention_heads.into(),
    }
}

/// All that GPUs refuse of a model and its training, each size once with the most of it.
pub fn on_gpus(
    model: &ModelConfig,
    training: &TrainingConfig,
    ranks: u32,
) -> Vec<SizeRefusal> {
    let layers = layers(model, training, ranks);
    let layers = layers.iter().flat_map(LayerSizes::refused);
    let mut found: Vec<SizeRefusal> = layers.chain(attention(model, training).refused()).collect();
    found.sort_by_key(|refused| (refused.size, std::cmp::Reverse(refused.found)));
    found.dedup_by_key(|refused| refused.size);
    found
}

/// Rows of experts that processors tell apart, and tokens of an expert group: both are counted in
/// 32 bits, of which one number means none.
pub fn on_processors(
    model: &ModelConfig,
    training: &TrainingConfig,
    ranks: u32,
) -> Option<SizeRefusal> {
    let tokens = u64::from(training.micro_batch_size) * u64::from(training.sequence_length);
    let choices = tokens
        .saturating_mul(model.slices().slots.max(1).into())
        .saturating_mul(ranks.into());
    let mut found = RefusalList::default();
    found.at_most(Size::Choices, choices, u64::from(u32::MAX) - 1);
    found.0.pop()
}
