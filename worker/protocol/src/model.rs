//! The model: its dimensions, and the table of its logical parameters.
//!
//! Everything that outlives a process (initial weights, random keys, checkpoint entries, export)
//! goes by the logical names of this table, which are those of the Hugging Face models.

pub use crate::router::{
    AuxLossScope, BalanceLoss, CosineConfig, RouterConfig, RouterKind, Scoring,
};
use serde::{Deserialize, Serialize};

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Activation {
    /// `silu(gate) * up`, three matrices an expert.
    Silu,
    /// `gelu(gate) * up`, the tanh form.
    Gelu,
    /// `relu(gate) * up`.
    Relu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum QkNorm {
    None,
    /// One norm over each head (Qwen3).
    PerHead,
    /// One norm over all heads together (OLMoE).
    Full,
}

/// A model with every default resolved. Names follow the Hugging Face configs.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ModelConfig {
    pub vocab_size: u32,
    pub hidden_size: u32,
    pub num_hidden_layers: u32,
    pub num_attention_heads: u32,
    pub num_key_value_heads: u32,
    pub head_dim: u32,
    pub rms_norm_eps: f64,
    pub rope_theta: f64,
    pub tie_word_embeddings: bool,
    pub qk_norm: QkNorm,
    /// Clamp of q, k and v to ±this (OLMoE); 0 is off.
    pub clip_qkv: f64,
    pub attention_bias: bool,
    /// Standard deviation of the initial weights.
    pub initializer_range: f64,
    /// Layers that have a dense feed-forward part in place of experts, ascending.
    pub dense_layers: Vec<u32>,
    pub dense_intermediate_size: u32,
    pub experts: ExpertsConfig,
    pub router: RouterConfig,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct ExpertsConfig {
    pub count: u32,
    pub per_token: u32,
    pub intermediate_size: u32,
    pub activation: Activation,
    /// Shared experts: one dense feed-forward part of `shared * intermediate_size`.
    pub shared: u32,
    /// Committed routed rows over balanced rows.
    pub routed_headroom: f64,
}

/// What a parameter is for; decides its initial value, its holders and its weight decay.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Role {
    /// A matrix, initial values normal with `initializer_range`.
    Matrix,
    /// A norm's gain: ones.
    Gain,
    /// A bias: zeros.
    Bias,
    Router { layer: u32 },
    /// What a router learns beside its scores and begins with as zeros: biases of the cosine gate,
    /// weights of learned noise.
    RouterZeros { layer: u32 },
    /// The logarithm of the cosine gate's scale.
    Temperature { layer: u32 },
    /// Corrections of a layer's choice: zeros. No gradient: changed by the loads of each step.
    Correction { layer: u32 },
    /// A matrix of one expert; held by the ranks of its slots.
    Expert { layer: u32, expert: u32 },
}

/// One logical tensor.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Param {
    pub name: String,
    /// `[out, in]` for matrices.
    pub shape: Vec<u32>,
    pub role: Role,
}

impl Param {
    pub fn numel(&self) -> u64 {
        self.shape.iter().map(|dim| u64::from(*dim)).product()
    }

    /// AdamW decays tensors of two or more dims.
    pub fn decays(&self) -> bool {
        self.shape.len() >= 2
    }
}

impl ModelConfig {
    pub fn is_moe_layer(&self, layer: u32) -> bool {
        self.dense_layers.binary_search(&layer).is_err()
    }

    /// Width of all query heads together.
    pub fn q_size(&self) -> u32 {
        self.num_attention_heads * self.head_dim
    }

    /// Width of all key (or value) heads together.
    pub fn kv_size(&self) -> u32 {
        self.num_key_value_heads * self.head_dim
    }

    /// Every logical tensor, in table order: the order of reductions, updates and checkpoints.
    pub fn params(&self) -> Vec<Param> {
        let d = self.hidden_size;
        let mut table = Table::default();
        table.add("model.embed_tokens.weight", &[self.vocab_size, d], Role::Matrix);
        for layer in 0..self.num_hidden_layers {
            self.attention_params(layer, &mut table);
            self.feed_forward_params(layer, &mut table);
        }
        table.add("model.norm.weight", &[d], Role::Gain);
        if !self.tie_word_embeddings {
            table.add("lm_head.weight", &[self.vocab_size, d], Role::Matrix);
        }
        table.0
    }

    fn attention_params(&self, layer: u32, table: &mut Table) {
        let (d, q, kv) = (self.hidden_size, self.q_size(), self.kv_size());
        let at = format!("model.layers.{layer}");
        table.add(&format!("{at}.input_layernorm.weight"), &[d], Role::Gain);
        for (name, rows, columns) in
            [("q_proj", q, d), ("k_proj", kv, d), ("v_proj", kv, d), ("o_proj", d, q)]
        {
            table.add(&format!("{at}.self_attn.{name}.weight"), &[rows, columns], Role::Matrix);
            if self.attention_bias {
                table.add(&format!("{at}.self_attn.{name}.bias"), &[rows], Role::Bias);
            }
        }
        let norm = match self.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some((self.head_dim, self.head_dim)),
            QkNorm::Full => Some((q, kv)),
        };
        if let Some((q_norm, k_norm)) = norm {
            table.add(&format!("{at}.self_attn.q_norm.weight"), &[q_norm], Role::Gain);
            table.add(&format!("{at}.self_attn.k_norm.weight"), &[k_norm], Role::Gain);
        }
        table.add(&format!("{at}.post_attention_layernorm.weight"), &[d], Role::Gain);
    }

    fn feed_forward_params(&self, layer: u32, table: &mut Table) {
        let at = format!("model.layers.{layer}.mlp");
        if !self.is_moe_layer(layer) {
            self.gated_params(&at, self.dense_intermediate_size, Role::Matrix, table);
            return;
        }
        let experts = &self.experts;
        self.router_params(&at, layer, table);
        if self.router.bias {
            let name = format!("{at}.gate.e_score_correction_bias");
            table.add(&name, &[experts.count], Role::Correction { layer });
        }
        for expert in 0..experts.count {
            let (at, role) = (format!("{at}.experts.{expert}"), Role::Expert { layer, expert });
            self.gated_params(&at, experts.intermediate_size, role, table);
        }
        if experts.shared > 0 {
            let width = experts.shared * experts.intermediate_size;
            self.gated_params(&format!("{at}.shared_experts"), width, Role::Matrix, table);
        }
    }

    fn router_params(&self, at: &str, layer: u32, table: &mut Table) {
        let (count, d) = (self.experts.count, self.hidden_size);
        let (role, zeros) = (Role::Router { layer }, Role::RouterZeros { layer });
        let at = format!("{at}.gate");
        match &self.router.cosine {
            // Words are hashed, nothing is learned.
            _ if self.router.kind == RouterKind::Hash => {}
            None => table.add(&format!("{at}.weight"), &[count, d], role),
            Some(cosine) => {
                let width = cosine.projection_size;
                table.add(&format!("{at}.projector.weight"), &[width, d], role);
                table.add(&format!("{at}.projector.bias"), &[width], zeros);
                table.add(&format!("{at}.similarity.weight"), &[count, width], role);
                let temperature = Role::Temperature { layer };
                table.add(&format!("{at}.temperature"), &[1], temperature);
            }
        }
        if self.router.kind == RouterKind::NoisyTopK {
            table.add(&format!("{at}.noise.weight"), &[count, d], zeros);
        }
    }

    /// Slots of a token: the most experts it can have.
    pub fn slots(&self) -> u32 {
        match self.router.kind {
            RouterKind::ExpertChoice => self.experts.count,
            _ => self.experts.per_token,
        }
    }

    fn gated_params(&self, at: &str, width: u32, role: Role, table: &mut Table) {
        let d = self.hidden_size;
        table.add(&format!("{at}.gate_proj.weight"), &[width, d], role);
        table.add(&format!("{at}.up_proj.weight"), &[width, d], role);
        table.add(&format!("{at}.down_proj.weight"), &[d, width], role);
    }

    /// Parameters in all.
    pub fn numel(&self) -> u64 {
        self.params().iter().map(Param::numel).sum()
    }

    /// Parameters that take part in one token's forward pass.
    pub fn active_numel(&self) -> u64 {
        let share = |param: &Param| match param.role {
            Role::Expert { expert, .. } if expert >= self.experts.per_token => 0,
            _ => param.numel(),
        };
        self.params().iter().map(share).sum()
    }
}

#[derive(Default)]
struct Table(Vec<Param>);

impl Table {
    fn add(&mut self, name: &str, shape: &[u32], role: Role) {
        self.0.push(Param { name: name.to_string(), shape: shape.to_vec(), role });
    }
}
