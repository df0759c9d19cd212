//! What a worker is told: one `WorkerConfig` an attempt, and nothing else.

use crate::layout::Layout;
pub use crate::members::{Member, ShardSource};
use crate::model::ModelConfig;
use crate::zero::Zero;
use serde::{Deserialize, Serialize};
use std::ops::Range;

/// How rows travel between the GPUs of an expert group. Sums are made in another order by each.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Exchange {
    /// Each rank sends a message to each other one.
    #[default]
    Flat,
    /// First between workers and then within them, and back in the other order ([`crate::rails`]).
    Hierarchical,
}

impl Exchange {
    pub fn is_flat(&self) -> bool {
        *self == Exchange::Flat
    }
}

/// Everything a worker needs for one attempt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct WorkerConfig {
    /// The rank of this worker; none for a spare, which connects and waits. First, so that the text
    /// of all that follows is the same for all members.
    pub rank: Option<u32>,
    pub job_uid: String,
    pub job_name: String,
    pub attempt: u32,
    /// BLAKE3 of this attempt's shared part (`WorkerConfig::digest`).
    pub digest: String,
    pub layout: Layout,
    /// One entry a worker, with the first of its `ranks`; ascending.
    pub members: Vec<Member>,
    pub resume: Resume,
    pub model: ModelConfig,
    /// Weights that a fresh job starts from: a Hugging Face directory or a checkpoint of ours.
    #[serde(default)]
    pub model_from: Option<String>,
    pub training: TrainingConfig,
    pub data: DataConfig,
    pub checkpoint: CheckpointConfig,
    pub recovery: RecoveryConfig,
    /// Ranks of each worker, one a device: `rank` and those that follow it.
    #[serde(default = "one", skip_serializing_if = "is_one")]
    pub ranks: u32,
    #[serde(default, skip_serializing_if = "Exchange::is_flat")]
    pub exchange: Exchange,
    /// Kernel threads of this worker; 0 lets it choose.
    pub threads: u32,
}

impl WorkerConfig {
    /// The digest of what all members share: this config without its rank and digest.
    pub fn digest_of(&self, encode: impl Fn(&WorkerConfig) -> Vec<u8>) -> String {
        let shared = WorkerConfig { rank: None, digest: String::new(), threads: 0, ..self.clone() };
        blake3::hash(&encode(&shared)).to_hex().to_string()
    }

    pub fn mesh(&self) -> crate::Mesh {
        self.layout.mesh
    }

    /// Micro-batches of a step.
    pub fn micro_batches(&self) -> u32 {
        self.training.global_batch_size / self.training.micro_batch_size
    }
}

pub(crate) fn one() -> u32 {
    1
}

pub(crate) fn is_one(number: &u32) -> bool {
    *number == 1
}

/// Where an attempt's first state comes from.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Resume {
    /// Initial weights, from the seed.
    Fresh,
    /// A committed checkpoint: the directory's name, `step-00000200`.
    Checkpoint { step: u64, name: String },
    /// Snapshots in the memory of members, cut under an earlier attempt's layout.
    Memory {
        step: u64,
        attempt: u32,
        layout: Layout,
        #[serde(with = "crate::members::runs")]
        sources: Vec<ShardSource>,
    },
}

impl Resume {
    /// Steps that are done in the resumed state.
    pub fn step(&self) -> u64 {
        match self {
            Resume::Fresh => 0,
            Resume::Checkpoint { step, .. } | Resume::Memory { step, .. } => *step,
        }
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Precision {
    Fp32,
    /// Fp32, but products round their operands to 10 bits of mantissa; GPUs alone.
    Tf32,
    Bf16,
    Fp16,
    /// The reference's own precision, for parity tests.
    Fp64,
}

/// What a rank computes on.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Backend {
    #[default]
    Cpu,
    Cuda,
}

/// How AdamW's moments are kept.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum MomentDtype {
    /// Fp64 in an fp64 job.
    #[default]
    Fp32,
    /// Rounded by chance, without bias.
    Bf16,
}

/// How gradients are summed on a GPU.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum GradientDtype {
    /// As the activations where a rank has one micro-batch a step, else fp32.
    #[default]
    Auto,
    Bf16,
    Fp32,
}

/// Where a GPU's optimizer state lies: both moments, and what masters have beyond the weights.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Offload {
    /// In its own memory.
    #[default]
    None,
    /// In the memory of its host, which each update reads and writes over the bus.
    Host,
}

impl Offload {
    pub fn is_none(&self) -> bool {
        *self == Offload::None
    }
}

/// As what rows of tokens travel between the GPUs of an expert group: see [`crate::formats`].
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Wire {
    /// As they are computed.
    #[default]
    Auto,
    /// The same, and sums over experts in fp32.
    Fp32,
    Bf16,
    /// Tokens as e4m3 with a scale for each 128 elements, all else as it is computed.
    Fp8,
}

impl Wire {
    pub fn is_auto(&self) -> bool {
        *self == Wire::Auto
    }
}

/// The devices of a job and the choices that only they have. No checkpoint depends on them.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Compute {
    #[serde(default)]
    pub backend: Backend,
    #[serde(default)]
    pub moment_dtype: MomentDtype,
    #[serde(default)]
    pub gradient_dtype: GradientDtype,
    /// Attention's backward adds in whatever order is fastest: two runs differ in last bits.
    #[serde(default)]
    pub fast_attention: bool,
    /// No bit depends on it. Workers of releases before do not know the field, so it is told only
    /// where it is asked for.
    #[serde(default, skip_serializing_if = "Offload::is_none")]
    pub offload: Offload,
    /// As of `offload`.
    #[serde(default, skip_serializing_if = "Wire::is_auto")]
    pub wire: Wire,
    /// Of a token each expert's row comes back by itself, and not a sum over those of a rank. Where
    /// it says neither, processors send rows and GPUs sums. As of `offload`.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub combine_each: Option<bool>,
    /// As of `offload`.
    #[serde(default, skip_serializing_if = "Zero::is_first")]
    pub zero: Zero,
}

impl Compute {
    pub fn is_default(&self) -> bool {
        *self == Compute::default()
    }
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TrainingConfig {
    pub steps: u64,
    /// Sequences a step.
    pub global_batch_size: u32,
    /// Sequences a micro-batch; divides the global batch.
    pub micro_batch_size: u32,
    /// Tokens a sequence.
    pub sequence_length: u32,
    pub precision: Precision,
    pub adamw: AdamW,
    pub schedule: Schedule,
    /// Clip of the global gradient norm; 0 is off.
    pub max_grad_norm: f64,
    pub seed: u64,
    #[serde(default, skip_serializing_if = "Recompute::is_none")]
    pub recompute: Recompute,
    #[serde(default, skip_serializing_if = "Compute::is_default")]
    pub compute: Compute,
}

/// What backward computes again, from what it needs less memory for. No bit depends on it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Recompute {
    /// Everything is kept.
    #[default]
    None,
    /// Outputs of norms, and roped queries and keys where those have norms of their own.
    Selective,
    /// The same, and the hidden rows of the experts.
    Experts,
    /// All of a layer, from its input.
    Full,
    /// All of so many layers together, from the input of the first.
    Every(u32),
}

impl Recompute {
    pub fn is_none(&self) -> bool {
        *self == Recompute::None
    }

    /// Layers of `layers` whose activations are in memory at once.
    pub fn span(self, layers: u32) -> u32 {
        match self {
            Recompute::None | Recompute::Selective | Recompute::Experts => layers.max(1),
            Recompute::Full => 1,
            Recompute::Every(span) => span.clamp(1, layers.max(1)),
        }
    }

    /// Layers of `layers` whose forward pass is computed once more before backward of `layer`.
    pub fn again(self, layer: u32, layers: u32) -> Range<u32> {
        let span = self.span(layers);
        let ends = layer + 1 == layers || (layer + 1).is_multiple_of(span);
        // The last layers' memory still holds what forward left there.
        let overwritten = layer / span < (layers - 1) / span;
        if ends && overwritten { layer / span * span..layer + 1 } else { layer..layer }
    }

    /// Norms are computed again.
    pub fn drops_norms(self) -> bool {
        matches!(self, Recompute::Selective | Recompute::Experts)
    }

    /// The hidden rows of the experts are.
    pub fn drops_hidden(self) -> bool {
        self == Recompute::Experts
    }
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct AdamW {
    pub learning_rate: f64,
    pub beta1: f64,
    pub beta2: f64,
    /// Added outside the root.
    pub epsilon: f64,
    pub weight_decay: f64,
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Schedule {
    Constant { warmup_steps: u64 },
    Cosine { warmup_steps: u64, min_learning_rate: f64 },
    Linear { warmup_steps: u64, min_learning_rate: f64 },
}

impl TrainingConfig {
    pub fn tokens_per_step(&self) -> u64 {
        u64::from(self.global_batch_size) * u64::from(self.sequence_length)
    }

    /// Learning rate of step `step`, counted from 0: a linear warmup that reaches the full rate at
    /// step `warmup_steps`, then the decay, which reaches its minimum at the last step.
    ///
    /// The cosine is our own polynomial, so that the bits are the same on every machine.
    pub fn learning_rate(&self, step: u64) -> f64 {
        let peak = self.adamw.learning_rate;
        let (warmup, minimum) = match self.schedule {
            Schedule::Constant { warmup_steps } => (warmup_steps, peak),
            Schedule::Cosine { warmup_steps, min_learning_rate }
            | Schedule::Linear { warmup_steps, min_learning_rate } => {
                (warmup_steps, min_learning_rate)
            }
        };
        if step < warmup {
            return peak * (step + 1) as f64 / (warmup + 1) as f64;
        }
        let span = self.steps.saturating_sub(warmup).saturating_sub(1).max(1);
        let done = ((step - warmup) as f64 / span as f64).min(1.0);
        let share = match self.schedule {
            Schedule::Constant { .. } => 1.0,
            Schedule::Linear { .. } => 1.0 - done,
            Schedule::Cosine { .. } => 0.5 * (1.0 + cos_pi(done)),
        };
        minimum + (peak - minimum) * share
    }
}

/// `cos(pi * x)` for `0 <= x <= 1`, by a Taylor polynomial on `[-pi/2, pi/2]` of the sine.
fn cos_pi(x: f64) -> f64 {
    // cos(pi x) = sin(pi (1/2 - x)); the argument lies in [-pi/2, pi/2].
    let angle = std::f64::consts::PI * (0.5 - x);
    let square = angle * angle;
    let mut term = angle;
    let mut sum = angle;
    for k in 1..13 {
        term *= -square / f64::from((2 * k) * (2 * k + 1));
        sum += term;
    }
    sum
}

/// Where tokens come from. Paths are already resolved against the working directory.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct DataConfig {
    pub source: DataSource,
    /// What is held out, where it is not a part of `source`.
    #[serde(default)]
    pub held_out: Option<DataSource>,
    pub tokenizer: Tokenizer,
    /// The token that ends each document: put behind documents that are tokenised here, looked for
    /// in files of tokens.
    #[serde(default)]
    pub end_of_document: Option<u32>,
    /// Attention and positions begin anew with each document in a sequence.
    #[serde(default)]
    pub reset_at_boundaries: bool,
    /// The last token of a document predicts nothing.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub mask_at_boundaries: bool,
    pub validation: ValidationConfig,
    /// Directories that are never read: the run folder.
    pub exclude: Vec<String>,
}

/// Files by globs, and how they are read.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum DataSource {
    /// Text files, a document each.
    Text { root: String, paths: Vec<String>, exclude: Vec<String> },
    /// Lines of JSON with a text in `field`; plain, .gz or .zst.
    Jsonl { root: String, paths: Vec<String>, exclude: Vec<String>, field: String },
    /// Token ids: llm.c's files with a header, or flat ones of `dtype`.
    Tokens { root: String, paths: Vec<String>, exclude: Vec<String>, dtype: Option<TokenType> },
    /// Megatron's .idx files, each beside its .bin.
    Megatron { root: String, paths: Vec<String>, exclude: Vec<String> },
    /// Parquet with a column of text.
    Parquet { root: String, paths: Vec<String>, exclude: Vec<String>, field: String },
    /// Several of the others, by weight.
    Mixture { parts: Vec<MixturePart> },
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct MixturePart {
    /// Share of the samples, over the sum of all weights.
    pub weight: f64,
    pub source: DataSource,
}

/// The number format of flat token files, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum TokenType {
    Uint16,
    Uint32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Tokenizer {
    Bytes,
    Path(String),
}

#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ValidationConfig {
    /// Share of the files that is held out, by the hash of each file's path.
    pub fraction: f64,
    /// Measured after every so many steps and after the last; 0 is never.
    pub every_steps: u64,
    /// Sequences of one measurement at most.
    pub max_sequences: u32,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CheckpointConfig {
    pub every_steps: u64,
    /// Nobody said how often: so many steps lie between two at least, and copies for them cost no
    /// more than half a percent of the time. On GPUs alone, whose copies are dear.
    #[serde(default, skip_serializing_if = "is_false")]
    pub auto: bool,
    pub keep: u32,
    /// The one with the least held-out loss is kept beside them. Workers of releases before do not
    /// know the field, so it is told only where it is asked for.
    #[serde(default, skip_serializing_if = "std::ops::Not::not")]
    pub keep_best: bool,
    /// The directory that holds `step-*` and `attempts`.
    pub location: String,
    /// The directory of `metrics.jsonl` and `events.jsonl`.
    pub records: String,
    /// Hash of the immutable part of the spec.
    pub spec_hash: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RecoveryConfig {
    pub heartbeat_timeout_ms: u64,
    /// 0: automatic, 20 times the median step and at least 60 s.
    pub step_timeout_ms: u64,
    pub orphan_timeout_ms: u64,
    pub memory_every_steps: u64,
    /// As often as it costs half a percent of the time, in place of `memory_every_steps`.
    #[serde(default, skip_serializing_if = "is_false")]
    pub memory_auto: bool,
}

fn is_false(flag: &bool) -> bool {
    !flag
}
