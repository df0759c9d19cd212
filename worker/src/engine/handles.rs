//! Where each parameter, and each of its gradients, lies in the arena.
//!
//! ```text
//! parameter table + where each lies in buckets --> handles by layer
//! ```
//! The same handles name weights and gradients, so that forward and backward read alike.

use moejob_kernels::{Buffer, Stacked};
use moejob_protocol::model::{ModelConfig, Param, Role};
use std::collections::HashMap;

/// Parameters that every rank holds.
#[derive(Clone, Debug)]
pub struct Dense {
    /// [V, D]
    pub embed: Buffer,
    /// [D]
    pub norm: Buffer,
    /// [V, D]; the embedding when they are tied
    pub head: Buffer,
    pub layers: Vec<DenseLayer>,
}

#[derive(Clone, Debug)]
pub struct DenseLayer {
    /// [D]
    pub norm1: Buffer,
    pub q: Linear,
    pub k: Linear,
    pub v: Linear,
    pub o: Linear,
    /// [H] or [N * H], and [H] or [KV * H]
    pub qk_norm: Option<(Buffer, Buffer)>,
    /// [D]
    pub norm2: Buffer,
    /// [E, D]; a cosine gate and hashed words have none
    pub router: Option<Buffer>,
    /// [E, D]: of learned noise
    pub noise: Option<Buffer>,
    pub cosine: Option<CosineGate>,
    /// [E]
    pub correction: Option<Buffer>,
    /// The dense part, or the shared experts.
    pub gated: Option<GatedWeights>,
}

#[derive(Clone, Copy, Debug)]
pub struct Linear {
    /// [out, in]
    pub weight: Buffer,
    /// [out]
    pub bias: Option<Buffer>,
}

/// `P` is the projected width.
#[derive(Clone, Copy, Debug)]
pub struct CosineGate {
    /// [P, D], [P]
    pub projector: Linear,
    /// [E, P]
    pub similarity: Buffer,
    /// [1]
    pub temperature: Buffer,
}

/// [F, D], [F, D], [D, F]
#[derive(Clone, Copy, Debug)]
pub struct GatedWeights {
    pub gate: Buffer,
    pub up: Buffer,
    pub down: Buffer,
}

/// The matrices of a layer's experts as the fused layer reads them: at equal strides in one bucket.
#[derive(Clone, Copy, Debug)]
pub struct ExpertStacks {
    /// Gate above up.
    pub up: Stacked,
    pub down: Stacked,
}

/// Where the parameter at an index of the table lies, if it is here.
pub type Find<'a> = dyn Fn(usize) -> Option<Buffer> + 'a;

struct Names<'a> {
    find: &'a Find<'a>,
    indices: HashMap<&'a str, usize>,
}

impl<'a> Names<'a> {
    fn new(params: &'a [Param], find: &'a Find<'a>) -> Names<'a> {
        let indices = params.iter().enumerate().map(|(at, param)| (param.name.as_str(), at));
        Names { find, indices: indices.collect() }
    }

    fn get(&self, name: &str) -> Option<Buffer> {
        (self.find)(*self.indices.get(name)?)
    }

    fn must(&self, name: &str) -> Buffer {
        self.get(name).unwrap_or_else(|| panic!("the parameter table lacks {name}"))
    }

    fn linear(&self, name: &str) -> Linear {
        let weight = self.must(&format!("{name}.weight"));
        Linear { weight, bias: self.get(&format!("{name}.bias")) }
    }

    fn cosine(&self, at: &str) -> Option<CosineGate> {
        Some(CosineGate {
            temperature: self.get(&format!("{at}.temperature"))?,
            projector: self.linear(&format!("{at}.projector")),
            similarity: self.must(&format!("{at}.similarity.weight")),
        })
    }

    fn gated(&self, at: &str) -> Option<GatedWeights> {
        Some(GatedWeights {
            gate: self.get(&format!("{at}.gate_proj.weight"))?,
            up: self.must(&format!("{at}.up_proj.weight")),
            down: self.must(&format!("{at}.down_proj.weight")),
        })
    }
}

impl Dense {
    pub fn new(model: &ModelConfig, params: &[Param], find: &Find) -> Dense {
        let names = Names::new(params, find);
        let embed = names.must("model.embed_tokens.weight");
        let layer = |layer| {
            let at = format!("model.layers.{layer}");
            let attention = |part| names.linear(&format!("{at}.self_attn.{part}_proj"));
            let norm = |part| names.get(&format!("{at}.self_attn.{part}_norm.weight"));
            let mlp = format!("{at}.mlp");
            let shared = format!("{mlp}.shared_experts");
            DenseLayer {
                norm1: names.must(&format!("{at}.input_layernorm.weight")),
                q: attention("q"),
                k: attention("k"),
                v: attention("v"),
                o: attention("o"),
                qk_norm: norm("q").zip(norm("k")),
                norm2: names.must(&format!("{at}.post_attention_layernorm.weight")),
                router: names.get(&format!("{mlp}.gate.weight")),
                noise: names.get(&format!("{mlp}.gate.noise.weight")),
                cosine: names.cosine(&format!("{mlp}.gate")),
                correction: names.get(&format!("{mlp}.gate.e_score_correction_bias")),
                gated: names.gated(&mlp).or_else(|| names.gated(&shared)),
            }
        };
        Dense {
            embed,
            norm: names.must("model.norm.weight"),
            head: names.get("lm_head.weight").unwrap_or(embed),
            layers: (0..model.num_hidden_layers).map(layer).collect(),
        }
    }
}

/// Whether the optimizer leaves the parameter alone: a frozen router, and corrections, which have
/// no gradient.
pub fn is_frozen(model: &ModelConfig, param: &Param) -> bool {
    match param.role {
        Role::Router { .. } | Role::RouterZeros { .. } | Role::Temperature { .. } => {
            model.router.frozen
        }
        Role::Correction { .. } => true,
        _ => false,
    }
}
