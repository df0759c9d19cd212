//! The model as typed. Names follow the Hugging Face configs, camelCased.

use super::{RouterSpec, Word, as_typed};
use kube_derive::KubeSchema;
use moejob_protocol::model::{Activation, QkNorm};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// The model's dimensions. With a preset every field is optional and overrides the preset; without
/// one hiddenSize, numHiddenLayers, numAttentionHeads and experts are needed.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("has(self.preset) || has(self.from) || (has(self.hiddenSize) && \
        has(self.numHiddenLayers) && has(self.numAttentionHeads) && has(self.experts))")
        .message("model: without a preset, hiddenSize, numHiddenLayers, numAttentionHeads and \
            experts are needed"),
    validation = Rule::new("!has(self.numAttentionHeads) || !has(self.numKeyValueHeads) || \
        self.numAttentionHeads % self.numKeyValueHeads == 0")
        .message("model: numKeyValueHeads must divide numAttentionHeads"),
    validation = Rule::new("!has(self.numHiddenLayers) || !has(self.experts) || \
        !has(self.experts.count) || self.numHiddenLayers * self.experts.count <= 65536")
        .message("model: at most 65536 experts in all layers together")
)]
pub struct ModelSpec {
    /// A well-known model whose dimensions are taken. Default: none, and they are given here.
    pub preset: Option<Preset>,
    /// Size of the vocabulary. Default: 256 with the tokenizer bytes.
    #[schemars(range(min = 2, max = 2097152))]
    pub vocab_size: Option<u32>,
    /// Width of the residual stream, D.
    #[schemars(range(min = 8, max = 65536))]
    pub hidden_size: Option<u32>,
    /// Number of layers.
    #[schemars(range(min = 1, max = 512))]
    pub num_hidden_layers: Option<u32>,
    /// Query heads of a layer.
    #[schemars(range(min = 1, max = 1024))]
    pub num_attention_heads: Option<u32>,
    /// Key and value heads of a layer; each serves several query heads. Default: numAttentionHeads.
    #[schemars(range(min = 1, max = 1024))]
    pub num_key_value_heads: Option<u32>,
    /// Width of a head, an even number. Default: hiddenSize / numAttentionHeads.
    #[schemars(range(min = 2, max = 1024))]
    pub head_dim: Option<u32>,
    /// Added to the mean square in RMSNorm. Default: 1e-5.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub rms_norm_eps: Option<f64>,
    /// Base of the rotary positions. Default: 10000.
    #[schemars(range(min = 1.0, max = 1e12))]
    pub rope_theta: Option<f64>,
    /// The output uses the input's embedding. Default: false.
    pub tie_word_embeddings: Option<bool>,
    /// Norm of queries and keys: none, perHead (Qwen3) or full (OLMoE). Default: none.
    pub qk_norm: Option<Word<QkNorm>>,
    /// Queries, keys and values are clamped to plus and minus this; 0 is off. Default: 0.
    #[schemars(range(min = 0.0, max = 1e6))]
    pub clip_qkv: Option<f64>,
    /// Projections of the attention have a bias. Default: false.
    pub attention_bias: Option<bool>,
    /// Standard deviation of the initial weights. Default: 0.02.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub initializer_range: Option<f64>,
    /// Layers, counted from 0, with one dense feed-forward part in place of experts. Default: none.
    #[schemars(length(max = 512))]
    pub dense_layers: Option<Vec<u32>>,
    /// Width of that dense part; needed with denseLayers.
    #[schemars(range(max = 1048576))]
    pub dense_intermediate_size: Option<u32>,
    /// The experts of a layer.
    pub experts: Option<ExpertsSpec>,
    /// The router of a layer.
    pub router: Option<RouterSpec>,
    /// Existing weights to start from.
    pub from: Option<FromSpec>,
}

/// Well-known models, and small ones to try things with.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Preset {
    #[serde(rename = "tiny")]
    Tiny,
    #[serde(rename = "tiny-qwen3")]
    TinyQwen3,
    #[serde(rename = "tiny-olmoe")]
    TinyOlmoe,
    #[serde(rename = "olmoe-1b-7b")]
    Olmoe1b7b,
    #[serde(rename = "mixtral-8x7b")]
    Mixtral8x7b,
    #[serde(rename = "qwen3-30b-a3b")]
    Qwen330bA3b,
    #[serde(rename = "deepseek-v2-lite")]
    DeepseekV2Lite,
    #[serde(rename = "moonlight-16b")]
    Moonlight16b,
    #[serde(rename = "deepseek-v3")]
    DeepseekV3,
    #[serde(rename = "gpt-oss-20b")]
    GptOss20b,
    #[serde(rename = "gpt-moe-1.1t")]
    GptMoe11t,
}

impl Preset {
    /// As it is typed.
    pub fn name(self) -> String {
        as_typed(self)
    }
}

/// The experts of a layer.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("!has(self.count) || !has(self.perToken) || self.perToken <= self.count")
        .message("model.experts: perToken must be at most count")
)]
pub struct ExpertsSpec {
    /// Experts of a layer, E.
    #[schemars(range(min = 1, max = 4096))]
    pub count: Option<u32>,
    /// Experts that each token goes to, K.
    #[schemars(range(min = 1, max = 64))]
    pub per_token: Option<u32>,
    /// Width of an expert, F.
    #[schemars(range(min = 1, max = 1048576))]
    pub intermediate_size: Option<u32>,
    /// silu, gelu or relu of the gate, times up. Default: silu.
    pub activation: Option<Word<Activation>>,
    /// Experts that every token goes to, as one dense part. Default: 0.
    #[schemars(range(max = 64))]
    pub shared: Option<u32>,
    /// Memory kept for routed rows, as a multiple of what even routing needs. More is taken when it
    /// is needed; no token is ever dropped. Default: 1.5.
    #[schemars(range(min = 1.0, max = 64.0))]
    pub routed_headroom: Option<f64>,
}

/// Existing weights to start from.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct FromSpec {
    /// A folder of Hugging Face weights (config.json and *.safetensors), or a checkpoint of ours.
    #[schemars(required, length(min = 1, max = 1024))]
    pub path: Option<String>,
}
