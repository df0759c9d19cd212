//! The model as typed. Names follow the Hugging Face configs, camelCased.

use super::RouterSpec;
use kube_derive::KubeSchema;
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub preset: Option<Preset>,
    /// Size of the vocabulary. Default: 256 with the tokenizer bytes.
    #[schemars(range(min = 2, max = 2097152))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub vocab_size: Option<u32>,
    /// Width of the residual stream, D.
    #[schemars(range(min = 8, max = 65536))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub hidden_size: Option<u32>,
    /// Number of layers.
    #[schemars(range(min = 1, max = 512))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_hidden_layers: Option<u32>,
    /// Query heads of a layer.
    #[schemars(range(min = 1, max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_attention_heads: Option<u32>,
    /// Key and value heads of a layer; each serves several query heads. Default: numAttentionHeads.
    #[schemars(range(min = 1, max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub num_key_value_heads: Option<u32>,
    /// Width of a head, an even number. Default: hiddenSize / numAttentionHeads.
    #[schemars(range(min = 2, max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub head_dim: Option<u32>,
    /// Added to the mean square in RMSNorm. Default: 1e-5.
    #[schemars(range(min = 0.0, max = 1.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rms_norm_eps: Option<f64>,
    /// Base of the rotary positions. Default: 10000.
    #[schemars(range(min = 1.0, max = 1e12))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rope_theta: Option<f64>,
    /// The output uses the input's embedding. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tie_word_embeddings: Option<bool>,
    /// Norm of queries and keys: none, perHead (Qwen3) or full (OLMoE). Default: none.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub qk_norm: Option<QkNormName>,
    /// Queries, keys and values are clamped to plus and minus this; 0 is off. Default: 0.
    #[schemars(range(min = 0.0, max = 1e6))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub clip_qkv: Option<f64>,
    /// Projections of the attention have a bias. Default: false.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub attention_bias: Option<bool>,
    /// Standard deviation of the initial weights. Default: 0.02.
    #[schemars(range(min = 0.0, max = 10.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub initializer_range: Option<f64>,
    /// Layers, counted from 0, with one dense feed-forward part in place of experts. Default: none.
    #[schemars(length(max = 512))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_layers: Option<Vec<u32>>,
    /// Width of that dense part; needed with denseLayers.
    #[schemars(range(max = 1048576))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub dense_intermediate_size: Option<u32>,
    /// The experts of a layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub experts: Option<ExpertsSpec>,
    /// The router of a layer.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router: Option<RouterSpec>,
    /// Existing weights to start from.
    #[serde(skip_serializing_if = "Option::is_none")]
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
        let name = serde_json::to_value(self).ok();
        name.as_ref().and_then(|name| name.as_str()).unwrap_or_default().to_string()
    }
}

/// Norm of queries and keys.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "camelCase")]
pub enum QkNormName {
    None,
    PerHead,
    Full,
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
    #[serde(skip_serializing_if = "Option::is_none")]
    pub count: Option<u32>,
    /// Experts that each token goes to, K.
    #[schemars(range(min = 1, max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub per_token: Option<u32>,
    /// Width of an expert, F.
    #[schemars(range(min = 1, max = 1048576))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub intermediate_size: Option<u32>,
    /// silu, gelu or relu of the gate, times up. Default: silu.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub activation: Option<ActivationName>,
    /// Experts that every token goes to, as one dense part. Default: 0.
    #[schemars(range(max = 64))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub shared: Option<u32>,
    /// Memory kept for routed rows, as a multiple of what even routing needs. More is taken when it
    /// is needed; no token is ever dropped. Default: 1.5.
    #[schemars(range(min = 1.0, max = 64.0))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub routed_headroom: Option<f64>,
}

/// The function at an expert's gate.
#[derive(JsonSchema, Serialize, Deserialize, Clone, Copy, Debug, PartialEq, Eq, Hash)]
#[serde(rename_all = "camelCase")]
pub enum ActivationName {
    Silu,
    Gelu,
    Relu,
}

/// Existing weights to start from.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct FromSpec {
    /// A folder of Hugging Face weights (config.json and *.safetensors), or a checkpoint of ours.
    #[schemars(required, length(min = 1, max = 1024))]
    #[serde(skip_serializing_if = "Option::is_none")]
    pub path: Option<String>,
}
