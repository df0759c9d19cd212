//! Data and training as typed.

use super::Word;
use kube_derive::KubeSchema;
use moejob_protocol::config::{GradientDtype, MomentDtype, Offload, TokenType};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the model is trained on.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct DataSpec {
    /// Where the tokens come from: one of text, jsonl, tokens, megatron, parquet, mixture.
    #[schemars(required)]
    pub train: Option<TrainDataSpec>,
    /// The part that is held out, and how often it is measured.
    pub validation: Option<ValidationSpec>,
    /// `bytes`, or the path of a tokenizer.json. Default: bytes.
    #[schemars(length(min = 1, max = 1024))]
    pub tokenizer: Option<String>,
    /// Id of the token that ends a document: put behind each document that is tokenised here, and
    /// looked for in files of tokens. Default: none.
    #[schemars(range(max = 2147483647))]
    pub end_of_document: Option<u32>,
    /// Attention and positions begin anew with each document of a sequence. Default: false.
    pub reset_at_boundaries: Option<bool>,
    /// The last token of a document does not learn to predict the first one of the next: it has no
    /// loss, which is a mean over the tokens that have one. Default: false.
    pub mask_at_boundaries: Option<bool>,
    /// Tokens of a sequence, S.
    #[schemars(required, range(min = 2, max = 1048576))]
    pub sequence_length: Option<u32>,
}

/// Where the tokens come from; one of the fields.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("[has(self.text), has(self.jsonl), has(self.tokens), \
        has(self.megatron), has(self.parquet), has(self.mixture)].filter(x, x).size() == 1")
        .message("data.train: one of text, jsonl, tokens, megatron, parquet, mixture")
)]
pub struct TrainDataSpec {
    /// Text files, each one document.
    pub text: Option<FilesSpec>,
    /// Lines of JSON, each one document; plain, .gz or .zst.
    pub jsonl: Option<FieldFilesSpec>,
    /// Files of token ids: flat ones of `dtype`, or with the header of llm.c.
    pub tokens: Option<TokenFilesSpec>,
    /// Megatron's indexed datasets: .idx files, each beside its .bin.
    pub megatron: Option<FilesSpec>,
    /// Parquet files, each row one document. Needs a build with the feature parquet.
    pub parquet: Option<FieldFilesSpec>,
    /// Several sources; samples are drawn from them by weight.
    #[schemars(length(min = 1, max = 64))]
    pub mixture: Option<Vec<MixturePartSpec>>,
}

/// A source of a mixture: its weight, and one of the other fields.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("[has(self.text), has(self.jsonl), has(self.tokens), \
        has(self.megatron), has(self.parquet)].filter(x, x).size() == 1")
        .message("a part of data.train.mixture: one of text, jsonl, tokens, megatron, parquet")
)]
pub struct MixturePartSpec {
    /// Share of the samples, over the sum of all weights.
    #[schemars(required, range(max = 1e9), extend("minimum" = 0.0, "exclusiveMinimum" = true))]
    pub weight: Option<f64>,
    /// Text files, each one document.
    pub text: Option<FilesSpec>,
    /// Lines of JSON, each one document; plain, .gz or .zst.
    pub jsonl: Option<FieldFilesSpec>,
    /// Files of token ids: flat ones of `dtype`, or with the header of llm.c.
    pub tokens: Option<TokenFilesSpec>,
    /// Megatron's indexed datasets: .idx files, each beside its .bin.
    pub megatron: Option<FilesSpec>,
    /// Parquet files, each row one document. Needs a build with the feature parquet.
    pub parquet: Option<FieldFilesSpec>,
}

/// Data of its own for validation, and what of any source is given; one of the fields.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("[has(self.text), has(self.jsonl), has(self.tokens), \
        has(self.megatron), has(self.parquet)].filter(x, x).size() == 1")
        .message("data.validation.from: one of text, jsonl, tokens, megatron, parquet")
)]
pub struct SourceSpec {
    /// Text files, each one document.
    pub text: Option<FilesSpec>,
    /// Lines of JSON, each one document; plain, .gz or .zst.
    pub jsonl: Option<FieldFilesSpec>,
    /// Files of token ids: flat ones of `dtype`, or with the header of llm.c.
    pub tokens: Option<TokenFilesSpec>,
    /// Megatron's indexed datasets: .idx files, each beside its .bin.
    pub megatron: Option<FilesSpec>,
    /// Parquet files, each row one document. Needs a build with the feature parquet.
    pub parquet: Option<FieldFilesSpec>,
}

impl SourceSpec {
    /// The fields, as a person reads them.
    pub const NAMES: &str = "text, jsonl, tokens, megatron, parquet";

    /// How many of them are given.
    pub fn count(&self) -> usize {
        let SourceSpec { text, jsonl, tokens, megatron, parquet } = self;
        let given = [
            text.is_some(),
            jsonl.is_some(),
            tokens.is_some(),
            megatron.is_some(),
            parquet.is_some(),
        ];
        given.into_iter().filter(|given| *given).count()
    }
}

/// The schema knows no fields in common, so each lists them.
macro_rules! source_of {
    ($($spec:ident)*) => {
        $(impl $spec {
            pub fn source(&self) -> SourceSpec {
                SourceSpec {
                    text: self.text.clone(),
                    jsonl: self.jsonl.clone(),
                    tokens: self.tokens.clone(),
                    megatron: self.megatron.clone(),
                    parquet: self.parquet.clone(),
                }
            }
        })*
    };
}

source_of!(TrainDataSpec MixturePartSpec);

/// Files by pattern.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct FilesSpec {
    /// Patterns such as corpus/**/*.txt, relative to the current directory (to /workspace in a
    /// pod).
    #[schemars(required, length(min = 1, max = 256), inner(length(min = 1, max = 1024)))]
    pub paths: Option<Vec<String>>,
    /// Files that match one of these are left out. Default: none.
    #[schemars(length(max = 256), inner(length(min = 1, max = 1024)))]
    pub exclude: Option<Vec<String>>,
}

/// Files by pattern, and where in them the text stands.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct FieldFilesSpec {
    /// Patterns such as corpus/**/*.jsonl, relative to the current directory (to /workspace in a
    /// pod).
    #[schemars(required, length(min = 1, max = 256), inner(length(min = 1, max = 1024)))]
    pub paths: Option<Vec<String>>,
    /// Files that match one of these are left out. Default: none.
    #[schemars(length(max = 256), inner(length(min = 1, max = 1024)))]
    pub exclude: Option<Vec<String>>,
    /// The key or column of a document's text. Default: text.
    #[schemars(length(min = 1, max = 256))]
    pub field: Option<String>,
}

/// Files by pattern, and how token ids are written in them.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct TokenFilesSpec {
    /// Patterns such as corpus/*.bin, relative to the current directory (to /workspace in a pod).
    #[schemars(required, length(min = 1, max = 256), inner(length(min = 1, max = 1024)))]
    pub paths: Option<Vec<String>>,
    /// Files that match one of these are left out. Default: none.
    #[schemars(length(max = 256), inner(length(min = 1, max = 1024)))]
    pub exclude: Option<Vec<String>>,
    /// uint16 or uint32, little-endian. Needed for files without a header.
    pub dtype: Option<Word<TokenType>>,
}

/// The part that is held out.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct ValidationSpec {
    /// Held out are these data, rather than a part of the training data.
    pub from: Option<SourceSpec>,
    /// Share of the files (text and tokens) or of the documents, chosen by the hash of their place.
    /// Default: 0.01.
    #[schemars(range(min = 0.0, max = 0.9))]
    pub fraction: Option<f64>,
    /// Measured after every so many steps and after the last; 0 is never. Default: 50.
    #[schemars(range(max = 1000000000))]
    pub every_steps: Option<u64>,
    /// Sequences of one measurement at most. Default: 64.
    #[schemars(range(min = 1, max = 1000000))]
    pub max_sequences: Option<u32>,
}

/// How the model is trained.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("!has(self.globalBatchSize) || \
        self.globalBatchSize % (has(self.microBatchSize) ? self.microBatchSize : 1) == 0")
        .message("training: microBatchSize must divide globalBatchSize"),
    validation = Rule::new("!has(self.recomputeLayers) || \
        (has(self.recompute) && self.recompute == 'full')")
        .message("training: recomputeLayers goes with recompute: full"),
    validation = Rule::new("!has(self.momentDtype) || self.momentDtype == 'fp32' || \
        !has(self.precision) || self.precision in ['bf16', 'fp16']")
        .message("training: momentDtype bf16 goes with precision bf16 or fp16"),
    validation = Rule::new("!has(self.gradientDtype) || self.gradientDtype != 'bf16' || \
        !has(self.precision) || self.precision == 'bf16'")
        .message("training: gradientDtype bf16 goes with precision bf16"),
    validation = Rule::new("self.steps >= oldSelf.steps").message("training.steps only grows"),
    validation = Rule::new(unchanged!(
        "globalBatchSize", "microBatchSize", "precision", "momentDtype", "gradientDtype",
        "attention", "optimizer", "schedule", "maxGradNorm", "recompute", "recomputeLayers",
        "offload", "seed"
    ))
        .message("training is immutable, but for steps")
)]
pub struct TrainingSpec {
    /// Optimizer steps in all.
    #[schemars(required, range(min = 1, max = 1000000000))]
    pub steps: Option<u64>,
    /// Sequences of a step. Never depends on the number of nodes. Default: microBatchSize times 8.
    #[schemars(range(min = 1, max = 1048576))]
    pub global_batch_size: Option<u32>,
    /// Sequences that a rank computes at once; divides globalBatchSize. Default: 1.
    #[schemars(range(min = 1, max = 65536))]
    pub micro_batch_size: Option<u32>,
    /// fp32, tf32, bf16 or fp16; processors compute in fp32 alone. tf32 keeps fp32 and rounds what
    /// is multiplied. Default: fp32 on processors, else bf16.
    pub precision: Option<PrecisionName>,
    /// How a GPU keeps the optimizer's moments: fp32, or bf16 (rounded by chance, without bias) for
    /// 4 bytes a parameter less. Default: fp32.
    pub moment_dtype: Option<Word<MomentDtype>>,
    /// How a GPU sums gradients: fp32, bf16, or auto, which is bf16 where precision is bf16 and a
    /// rank has one micro-batch a step. Default: auto.
    pub gradient_dtype: Option<Word<GradientDtype>>,
    /// How attention on a GPU sums its gradients: deterministic, in a fixed order, or fastest, in
    /// any order, so that two runs differ in last bits. Default: deterministic.
    pub attention: Option<AttentionName>,
    /// The optimizer: adamw. Default: adamw with its defaults.
    pub optimizer: Option<OptimizerSpec>,
    /// The learning rate's way: constant, linear or cosine. Default: constant.
    pub schedule: Option<ScheduleSpec>,
    /// The gradient is scaled down to this norm; 0 is off. Default: 1.
    #[schemars(range(min = 0.0, max = 1e9))]
    pub max_grad_norm: Option<f64>,
    /// What backward computes again rather than keeping it, to need less memory: none, selective
    /// (norms, roped queries and keys), experts (their hidden rows, too) or full (whole layers). No
    /// loss depends on it. Default: none.
    pub recompute: Option<RecomputeName>,
    /// Layers that are computed again together, with recompute full. Default: 1.
    #[schemars(range(min = 1, max = 65536))]
    pub recompute_layers: Option<u32>,
    /// Where a GPU's optimizer state lies: none, in its own memory, or host, in that of its
    /// machine, which each step's update reads and writes over the bus. `moejob plan` tells what
    /// that spares and costs; no loss depends on it, and processors have it there anyway. Default:
    /// none.
    pub offload: Option<Word<Offload>>,
    /// Of the initial weights and of the order of the data. Default: 1.
    #[schemars(range(max = 9007199254740991u64))]
    pub seed: Option<u64>,
}

/// Number format of weights and activations.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "camelCase")]
pub enum PrecisionName {
    Fp32,
    Tf32,
    Bf16,
    Fp16,
}

/// The order in which attention sums its gradients.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "camelCase")]
pub enum AttentionName {
    Deterministic,
    Fastest,
}

/// What backward computes again.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "camelCase")]
pub enum RecomputeName {
    None,
    Selective,
    Experts,
    Full,
}

/// The optimizer; one of the fields.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct OptimizerSpec {
    /// Adam with decoupled weight decay.
    pub adamw: Option<AdamWSpec>,
}

/// Adam with decoupled weight decay.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct AdamWSpec {
    /// The peak of the learning rate. Default: 4e-4.
    #[schemars(range(max = 10.0), extend("minimum" = 0.0, "exclusiveMinimum" = true))]
    pub learning_rate: Option<f64>,
    /// Decay of the mean of the gradient; in fp32 it is below 1. Default: 0.9.
    #[schemars(range(min = 0.0, max = 0.9999999))]
    pub beta1: Option<f64>,
    /// Decay of the mean of its square; in fp32 it is below 1. Default: 0.95.
    #[schemars(range(min = 0.0, max = 0.9999999))]
    pub beta2: Option<f64>,
    /// Added outside the root. Default: 1e-8.
    #[schemars(range(max = 1.0), extend("minimum" = 0.0, "exclusiveMinimum" = true))]
    pub epsilon: Option<f64>,
    /// Decay of tensors of two or more dims. Default: 0.1.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub weight_decay: Option<f64>,
}

/// The learning rate's way; one of the fields.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("[has(self.constant), has(self.linear), has(self.cosine)]\
        .filter(x, x).size() == 1")
        .message("training.schedule: one of constant, linear, cosine")
)]
pub struct ScheduleSpec {
    /// The peak, after the warmup.
    pub constant: Option<ConstantSpec>,
    /// A straight line from the peak to the minimum.
    pub linear: Option<DecaySpec>,
    /// Half a cosine from the peak to the minimum.
    pub cosine: Option<DecaySpec>,
}

/// A constant learning rate.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct ConstantSpec {
    /// Steps in which the rate rises to its peak. Default: 0.
    #[schemars(range(max = 1000000000))]
    pub warmup_steps: Option<u64>,
}

/// A learning rate that falls.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct DecaySpec {
    /// Steps in which the rate rises to its peak. Default: 0.
    #[schemars(range(max = 1000000000))]
    pub warmup_steps: Option<u64>,
    /// The rate at the last step. Default: a tenth of the peak.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub min_learning_rate: Option<f64>,
}
