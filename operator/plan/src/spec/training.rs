//! Data and training as typed.

use kube_derive::KubeSchema;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the model is trained on.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct DataSpec {
    /// Where the text comes from: one of text, jsonl, tokens, megatron.
    #[schemars(required)]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub train: Option<TrainDataSpec>,
    /// The part that is held out, and how often it is measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub validation: Option<ValidationSpec>,
    /// `bytes`, or the path of a tokenizer.json. Default: bytes.
    #[schemars(length(min = 1, max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokenizer: Option<String>,
    /// Tokens of a sequence, S.
    #[schemars(required, range(min = 2, max = 1048576))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub sequence_length: Option<u32>,
}

/// Where the text comes from; one of the fields.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("[has(self.text), has(self.jsonl), has(self.tokens), \
        has(self.megatron)].filter(x, x).size() == 1")
        .message("data.train: one of text, jsonl, tokens, megatron")
)]
pub struct TrainDataSpec {
    /// Text files, each one document.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub text: Option<FilesSpec>,
    /// Lines of JSON with a key `text`.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub jsonl: Option<FilesSpec>,
    /// Files of little-endian 16-bit token ids.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens: Option<FilesSpec>,
    /// Megatron's indexed datasets (.idx and .bin).
    #[serde(skip_serializing_if = "Option::is_none")]
    pub megatron: Option<FilesSpec>,
}

/// Files by pattern.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct FilesSpec {
    /// Patterns such as corpus/**/*.txt, relative to the current directory (to /workspace in a
    /// pod).
    #[schemars(required, length(min = 1, max = 256), inner(length(min = 1, max = 1024)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub paths: Option<Vec<String>>,
    /// Files that match one of these are left out.
    #[schemars(length(max = 256), inner(length(min = 1, max = 1024)))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub exclude: Option<Vec<String>>,
}

/// The part that is held out.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct ValidationSpec {
    /// Share of the files, chosen by the hash of their path. Default: 0.01.
    #[schemars(range(min = 0.0, max = 0.9))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fraction: Option<f64>,
    /// Measured after every so many steps and after the last; 0 is never. Default: 50.
    #[schemars(range(max = 1000000000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub every_steps: Option<u64>,
    /// Sequences of one measurement at most. Default: 64.
    #[schemars(range(min = 1, max = 1000000))]
    #[serde(skip_serializing_if = "Option::is_none")]
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
    validation = Rule::new("self.steps >= oldSelf.steps").message("training.steps only grows"),
    validation = Rule::new("has(self.globalBatchSize) == has(oldSelf.globalBatchSize) && \
        (!has(self.globalBatchSize) || self.globalBatchSize == oldSelf.globalBatchSize) && \
        has(self.microBatchSize) == has(oldSelf.microBatchSize) && \
        (!has(self.microBatchSize) || self.microBatchSize == oldSelf.microBatchSize) && \
        has(self.precision) == has(oldSelf.precision) && \
        (!has(self.precision) || self.precision == oldSelf.precision) && \
        has(self.optimizer) == has(oldSelf.optimizer) && \
        (!has(self.optimizer) || self.optimizer == oldSelf.optimizer) && \
        has(self.schedule) == has(oldSelf.schedule) && \
        (!has(self.schedule) || self.schedule == oldSelf.schedule) && \
        has(self.maxGradNorm) == has(oldSelf.maxGradNorm) && \
        (!has(self.maxGradNorm) || self.maxGradNorm == oldSelf.maxGradNorm) && \
        has(self.seed) == has(oldSelf.seed) && (!has(self.seed) || self.seed == oldSelf.seed)")
        .message("training is immutable, but for steps")
)]
pub struct TrainingSpec {
    /// Optimizer steps in all.
    #[schemars(required, range(min = 1, max = 1000000000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub steps: Option<u64>,
    /// Sequences of a step. Never depends on the number of nodes. Default: microBatchSize times 8.
    #[schemars(range(min = 1, max = 1048576))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub global_batch_size: Option<u32>,
    /// Sequences that a rank computes at once; divides globalBatchSize. Default: 1.
    #[schemars(range(min = 1, max = 65536))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub micro_batch_size: Option<u32>,
    /// fp32, bf16 or fp16. Default: fp32 with profile cpu, else bf16.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub precision: Option<PrecisionName>,
    /// The optimizer: adamw. Default: adamw with its defaults.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub optimizer: Option<OptimizerSpec>,
    /// The learning rate's way: constant, linear or cosine. Default: constant.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub schedule: Option<ScheduleSpec>,
    /// The gradient is scaled down to this norm; 0 is off. Default: 1.
    #[schemars(range(min = 0.0, max = 1e9))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub max_grad_norm: Option<f64>,
    /// Of the initial weights and of the order of the data. Default: 1.
    #[schemars(range(max = 9007199254740991u64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub seed: Option<u64>,
}

/// Number format of weights and activations.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "camelCase")]
pub enum PrecisionName {
    Fp32,
    Bf16,
    Fp16,
}

/// The optimizer; one of the fields.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct OptimizerSpec {
    /// Adam with decoupled weight decay.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub adamw: Option<AdamWSpec>,
}

/// Adam with decoupled weight decay.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct AdamWSpec {
    /// The peak of the learning rate. Default: 4e-4.
    #[schemars(range(max = 10.0), extend("minimum" = 0.0, "exclusiveMinimum" = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub learning_rate: Option<f64>,
    /// Decay of the mean of the gradient. Default: 0.9.
    #[schemars(range(min = 0.0), extend("maximum" = 1.0, "exclusiveMaximum" = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta1: Option<f64>,
    /// Decay of the mean of its square. Default: 0.95.
    #[schemars(range(min = 0.0), extend("maximum" = 1.0, "exclusiveMaximum" = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub beta2: Option<f64>,
    /// Added outside the root. Default: 1e-8.
    #[schemars(range(max = 1.0), extend("minimum" = 0.0, "exclusiveMinimum" = true))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub epsilon: Option<f64>,
    /// Decay of tensors of two or more dims. Default: 0.1.
    #[schemars(range(min = 0.0, max = 10.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub constant: Option<ConstantSpec>,
    /// A straight line from the peak to the minimum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub linear: Option<DecaySpec>,
    /// Half a cosine from the peak to the minimum.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub cosine: Option<DecaySpec>,
}

/// A constant learning rate.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct ConstantSpec {
    /// Steps in which the rate rises to its peak. Default: 0.
    #[schemars(range(max = 1000000000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
}

/// A learning rate that falls.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct DecaySpec {
    /// Steps in which the rate rises to its peak. Default: 0.
    #[schemars(range(max = 1000000000))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub warmup_steps: Option<u64>,
    /// The rate at the last step. Default: a tenth of the peak.
    #[schemars(range(min = 0.0, max = 10.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub min_learning_rate: Option<f64>,
}
