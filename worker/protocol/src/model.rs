//! The model: its dimensions, and the table of its logical parameters.
//!
//! Everything that outlives a process (initial weights, random keys, checkpoint entries, export)
//! goes by the logical names of this table, which are those of the Hugging Face models.

pub use crate::router::{
    AuxLossScope, BalanceLoss, CosineConfig, RouterConfig, RouterKind, Scoring,
};
use crate::slices::Slices;
use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;
use std::fmt::Arguments;

/// The function of `gate` in `f(gate) * up`, between the products of an expert. Kernels of GPUs
/// name it by its number.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// max(x, 0); its derivative at 0 is 0
    Relu,
    /// x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is the tanh form of x * Phi(x)
    /// (Hendrycks and Gimpel 2016; `gelu_pytorch_tanh` of Hugging Face)
    Gelu,
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
    /// Slices of each expert, `r`: how it is computed, and no part of what it is. All of them have
    /// the same width; see [`crate::slices`]. It is told only where it is more than 1, since
    /// workers of releases before do not know the field.
    #[serde(default = "whole", skip_serializing_if = "is_whole")]
    pub slices: u32,
}

fn whole() -> u32 {
    1
}

fn is_whole(slices: &u32) -> bool {
    *slices == 1
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
    /// A matrix of one expert, or of a slice of one ([`crate::slices`]), whose id `expert` is then;
    /// held by the ranks of its slots.
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
        numel(&self.shape)
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
        let mut table = Vec::new();
        self.each_param(|name, shape, role| {
            table.push(Param { name: name.to_string(), shape: shape.to_vec(), role });
        });
        table
    }

    /// The same, one after the other: `add(name, shape, role)`. Names are not made unless they are
    /// asked for, so a model of a million tensors takes no memory.
    pub fn each_param(&self, add: impl FnMut(Arguments<'_>, &[u32], Role)) {
        self.walk(&mut Each(add));
    }

    /// How many there are, without making them: all layers with experts are alike, and so are all
    /// without.
    pub fn rows(&self) -> u64 {
        let layers = u64::from(self.num_hidden_layers);
        let dense = self.dense_layers.iter().filter(|layer| **layer < self.num_hidden_layers);
        let dense = dense.collect::<BTreeSet<_>>().len() as u64;
        let with = |num_hidden_layers: u32, dense_layers: Vec<u32>| {
            let mut rows = Rows(0);
            ModelConfig { num_hidden_layers, dense_layers, ..self.clone() }.walk(&mut rows);
            rows.0
        };
        let ends = with(0, Vec::new());
        let of = |dense_layers, layers: u64| {
            (with(1, dense_layers) - ends).saturating_mul(layers)
        };
        let mixture = of(Vec::new(), layers - dense);
        let dense = if dense > 0 { of(vec![0], dense) } else { 0 };
        ends.saturating_add(mixture).saturating_add(dense)
    }

    /// The same for a visitor that may take all experts of a layer at once.
    pub fn walk(&self, visitor: &mut impl Visitor) {
        let d = self.hidden_size;
        let (embedding, role) = (format_args!("model.embed_tokens.weight"), Role::Matrix);
        visitor.param(embedding, &[self.vocab_size, d], role);
        for layer in 0..self.num_hidden_layers {
            self.attention_params(layer, visitor);
            self.feed_forward_params(layer, visitor);
        }
        visitor.param(format_args!("model.norm.weight"), &[d], Role::Gain);
        if !self.tie_word_embeddings {
            visitor.param(format_args!("lm_head.weight"), &[self.vocab_size, d], role);
        }
    }

    /// The matrices of one expert, or of the slice with that id.
    pub fn expert_params(&self, layer: u32, expert: u32, visitor: &mut impl Visitor) {
        let (role, Slices { each, width, .. }) = (Role::Expert { layer, expert }, self.slices());
        let (whole, slice) = (expert / each, expert % each);
        if each == 1 {
            let at = format_args!("model.layers.{layer}.mlp.experts.{whole}");
            return self.gated_params(at, width, role, visitor);
        }
        let at = format_args!("model.layers.{layer}.mlp.experts.{whole}.slices.{slice}");
        self.gated_params(at, width, role, visitor);
    }

    fn attention_params(&self, layer: u32, visitor: &mut impl Visitor) {
        let (d, q, kv) = (self.hidden_size, self.q_size(), self.kv_size());
        let at = format!("model.layers.{layer}");
        visitor.param(format_args!("{at}.input_layernorm.weight"), &[d], Role::Gain);
        for (name, rows, columns) in
            [("q_proj", q, d), ("k_proj", kv, d), ("v_proj", kv, d), ("o_proj", d, q)]
        {
            let shape = [rows, columns];
            visitor.param(format_args!("{at}.self_attn.{name}.weight"), &shape, Role::Matrix);
            if self.attention_bias {
                visitor.param(format_args!("{at}.self_attn.{name}.bias"), &[rows], Role::Bias);
            }
        }
        let norm = match self.qk_norm {
            QkNorm::None => None,
            QkNorm::PerHead => Some((self.head_dim, self.head_dim)),
            QkNorm::Full => Some((q, kv)),
        };
        if let Some((q_norm, k_norm)) = norm {
            visitor.param(format_args!("{at}.self_attn.q_norm.weight"), &[q_norm], Role::Gain);
            visitor.param(format_args!("{at}.self_attn.k_norm.weight"), &[k_norm], Role::Gain);
        }
        visitor.param(format_args!("{at}.post_attention_layernorm.weight"), &[d], Role::Gain);
    }

    fn feed_forward_params(&self, layer: u32, visitor: &mut impl Visitor) {
        let at = format!("model.layers.{layer}.mlp");
        if !self.is_moe_layer(layer) {
            let width = self.dense_intermediate_size;
            self.gated_params(format_args!("{at}"), width, Role::Matrix, visitor);
            return;
        }
        let experts = &self.experts;
        self.router_params(&at, layer, visitor);
        if self.router.bias {
            let name = format_args!("{at}.gate.e_score_correction_bias");
            visitor.param(name, &[experts.count], Role::Correction { layer });
        }
        visitor.experts(self, layer);
        if experts.shared > 0 {
            let width = experts.shared * experts.intermediate_size;
            self.gated_params(format_args!("{at}.shared_experts"), width, Role::Matrix, visitor);
        }
    }

    fn router_params(
        &self,
        at: &str,
        layer: u32,
        visitor: &mut impl Visitor,
    ) {
        let (count, d) = (self.experts.count, self.hidden_size);
        let (role, zeros) = (Role::Router { layer }, Role::RouterZeros { layer });
        match &self.router.cosine {
            // Words are hashed, nothing is learned.
            _ if self.router.kind == RouterKind::Hash => {}
            None => visitor.param(format_args!("{at}.gate.weight"), &[count, d], role),
            Some(cosine) => {
                let width = cosine.projection_size;
                visitor.param(format_args!("{at}.gate.projector.weight"), &[width, d], role);
                visitor.param(format_args!("{at}.gate.projector.bias"), &[width], zeros);
                visitor.param(format_args!("{at}.gate.similarity.weight"), &[count, width], role);
                let temperature = Role::Temperature { layer };
                visitor.param(format_args!("{at}.gate.temperature"), &[1], temperature);
            }
        }
        if self.router.kind == RouterKind::NoisyTopK {
            visitor.param(format_args!("{at}.gate.noise.weight"), &[count, d], zeros);
        }
    }

    fn gated_params(
        &self,
        at: Arguments<'_>,
        width: u32,
        role: Role,
        visitor: &mut impl Visitor,
    ) {
        let d = self.hidden_size;
        visitor.param(format_args!("{at}.gate_proj.weight"), &[width, d], role);
        visitor.param(format_args!("{at}.up_proj.weight"), &[width, d], role);
        visitor.param(format_args!("{at}.down_proj.weight"), &[d, width], role);
    }

    /// Slots of a token: the most experts it can have.
    pub fn slots(&self) -> u32 {
        match self.router.kind {
            RouterKind::ExpertChoice => self.experts.count,
            _ => self.experts.per_token,
        }
    }

    /// Parameters in all.
    pub fn numel(&self) -> u64 {
        let mut sum = 0;
        self.each_param(|_, shape, _| sum += numel(shape));
        sum
    }

    /// Parameters that take part in one token's forward pass.
    pub fn active_numel(&self) -> u64 {
        let mut sum = 0;
        self.each_param(|_, shape, role| match role {
            Role::Expert { expert, .. } if expert >= self.slices().per_token => {}
            _ => sum += numel(shape),
        });
        sum
    }
}

/// What looks at every logical tensor of a model, in table order.
pub trait Visitor {
    fn param(&mut self, name: Arguments<'_>, shape: &[u32], role: Role);

    /// All experts of a layer, or their slices: [`MATRICES`] of the same size each, one by one.
    fn experts(&mut self, model: &ModelConfig, layer: u32)
    where
        Self: Sized,
    {
        for expert in 0..model.slices().count {
            model.expert_params(layer, expert, self);
        }
    }
}

/// Matrices of an expert: gate, up and down.
pub const MATRICES: u32 = 3;

/// Counts.
struct Rows(u64);

impl Visitor for Rows {
    fn param(&mut self, _: Arguments<'_>, _: &[u32], _: Role) {
        self.0 += 1;
    }

    fn experts(&mut self, model: &ModelConfig, _: u32) {
        self.0 += u64::from(model.slices().count) * u64::from(MATRICES);
    }
}

struct Each<F>(F);

impl<F: FnMut(Arguments<'_>, &[u32], Role)> Visitor for Each<F> {
    fn param(&mut self, name: Arguments<'_>, shape: &[u32], role: Role) {
        self.0(name, shape, role);
    }
}

/// Elements of a tensor of that shape.
pub fn numel(shape: &[u32]) -> u64 {
    shape.iter().map(|dim| u64::from(*dim)).product()
}
