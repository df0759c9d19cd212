//! `config.json` of Hugging Face <-> `ModelConfig`.
//!
//! Only what our model computes alike is read; every field that would make it compute something
//! else is refused by name, never ignored.

mod fields;
mod positions;
mod write;

pub use write::{family_of, write};

use crate::checkpoint::{Problem, model_is_sane};
use fields::{FILE, Fields};
use moejob_protocol::ModelConfig;
use moejob_protocol::model::{
    Activation, ExpertsConfig, QkNorm, RouterConfig, Scoring,
};
use serde_json::{Value, json};

/// A family of models that `transformers` knows and our model computes alike.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Family {
    Mixtral,
    Qwen3Moe,
    Olmoe,
    /// The routing of DeepSeek-V3 with ordinary attention.
    Glm4Moe,
    /// The same, always with a norm per head.
    Dots1,
}

const FAMILIES: [Family; 5] =
    [Family::Mixtral, Family::Qwen3Moe, Family::Olmoe, Family::Glm4Moe, Family::Dots1];

impl Family {
    pub fn architecture(self) -> &'static str {
        match self {
            Family::Mixtral => "MixtralForCausalLM",
            Family::Qwen3Moe => "Qwen3MoeForCausalLM",
            Family::Olmoe => "OlmoeForCausalLM",
            Family::Glm4Moe => "Glm4MoeForCausalLM",
            Family::Dots1 => "Dots1ForCausalLM",
        }
    }

    pub fn model_type(self) -> &'static str {
        match self {
            Family::Mixtral => "mixtral",
            Family::Qwen3Moe => "qwen3_moe",
            Family::Olmoe => "olmoe",
            Family::Glm4Moe => "glm4_moe",
            Family::Dots1 => "dots1",
        }
    }

    /// Positions, where a `config.json` claims none.
    fn positions(self) -> u32 {
        match self {
            Family::Mixtral | Family::Glm4Moe => 131_072,
            Family::Qwen3Moe => 32_768,
            Family::Olmoe => 4096,
            Family::Dots1 => 2048,
        }
    }

    /// Sigmoid, a correction of the choice, groups, and shared experts.
    pub(super) fn routes_like_deepseek(self) -> bool {
        matches!(self, Family::Glm4Moe | Family::Dots1)
    }
}

/// What a `config.json` describes.
#[derive(Clone, Debug)]
pub struct Config {
    pub family: Family,
    pub model: ModelConfig,
    /// Positions that it claims.
    pub positions: u32,
    /// Fields of it that say something, which nothing here knows.
    pub unknown: Vec<String>,
}

/// # Errors
/// Everything that is wrong with it or not built in.
pub fn read(text: &[u8]) -> Result<Config, Vec<Problem>> {
    let one = |why: String| vec![Problem::new(FILE, &why)];
    let value: Value = serde_json::from_slice(text).map_err(|error| one(error.to_string()))?;
    let Value::Object(fields) = &value else {
        return Err(one("it is no JSON object".to_string()));
    };
    let mut fields = Fields::new(fields);
    let family = family(&mut fields).map_err(|problem| vec![problem])?;
    let model = model(family, &mut fields);
    unsupported(family, model.num_hidden_layers, &mut fields);
    consistent(&model, &mut fields);
    let positions = fields.number("max_position_embeddings", Some(family.positions()));
    match fields.problems.is_empty() {
        true => Ok(Config { family, model, positions, unknown: fields.unknown() }),
        false => Err(fields.problems),
    }
}

/// `transformers` takes `model_type`, and other programs the first of `architectures`.
fn family(fields: &mut Fields) -> Result<Family, Problem> {
    let architectures = fields.get("architectures").and_then(Value::as_array);
    let first = architectures.and_then(|all| all.first()).and_then(Value::as_str);
    let model_type = fields.get("model_type").and_then(Value::as_str);
    let named = |first: &str| FAMILIES.into_iter().find(|family| family.architecture() == first);
    let typed = |name: &str| FAMILIES.into_iter().find(|family| family.model_type() == name);
    let refused = |field: &str, why: &str| Problem::new(&format!("{FILE}: {field}"), why);
    match (first.map(named), model_type.map(typed)) {
        (Some(Some(one)), Some(other)) if other != Some(one) => {
            let (first, other) = (first.unwrap_or_default(), model_type.unwrap_or_default());
            let why = format!("{other}, and architectures says {first}: which of them is it?");
            Err(refused("model_type", &why))
        }
        (Some(Some(family)), _) | (None, Some(Some(family))) => Ok(family),
        _ => {
            let shown = first.or(model_type).unwrap_or("none");
            let known = FAMILIES.map(Family::architecture).join(", ");
            let why = format!("{}; known are {known}", what_is_unknown(shown));
            Err(refused("architectures", &why))
        }
    }
}

/// Why a model of this name is not read.
fn what_is_unknown(name: &str) -> String {
    let version = name.to_ascii_lowercase();
    match version.strip_prefix("deepseek").map(|rest| rest.trim_start_matches(['_', '-'])) {
        // The first one, DeepSeek-MoE-16B.
        Some("" | "forcausallm" | "model") => format!(
            "{name} is none of the models of transformers (its code lies beside its weights), so \
             nothing could show that it is computed as it was trained"
        ),
        Some(rest) if rest.starts_with("v2") || rest.starts_with("v3") => {
            format!("{name} has latent attention, which is not built in")
        }
        _ => format!("the architecture {name} is unknown"),
    }
}

fn model(family: Family, fields: &mut Fields) -> ModelConfig {
    let hidden_size = fields.number("hidden_size", None);
    let heads = fields.number("num_attention_heads", None);
    let kv_heads = match (family, fields.raw("num_key_value_heads")) {
        (Family::Mixtral | Family::Glm4Moe, None) => 8,
        (Family::Qwen3Moe, None) => 4,
        (Family::Dots1, None) => 32,
        // As many as heads of queries, where it is null.
        _ => heads,
    };
    let layers = fields.number("num_hidden_layers", None);
    let per_head = hidden_size.checked_div(heads).unwrap_or(0);
    let qk_norm = match family {
        Family::Qwen3Moe | Family::Dots1 => QkNorm::PerHead,
        Family::Glm4Moe if fields.flag("use_qk_norm", false) => QkNorm::PerHead,
        Family::Olmoe => QkNorm::Full,
        Family::Mixtral | Family::Glm4Moe => QkNorm::None,
    };
    ModelConfig {
        vocab_size: fields.number("vocab_size", None),
        hidden_size,
        num_hidden_layers: layers,
        num_attention_heads: heads,
        num_key_value_heads: fields.number("num_key_value_heads", Some(kv_heads)),
        head_dim: fields.number("head_dim", Some(per_head)),
        rms_norm_eps: fields.real(
            "rms_norm_eps",
            if matches!(family, Family::Qwen3Moe | Family::Dots1) { 1e-6 } else { 1e-5 },
        ),
        rope_theta: positions::rope_theta(family, fields),
        tie_word_embeddings: fields.flag("tie_word_embeddings", false),
        qk_norm,
        clip_qkv: if family == Family::Olmoe { clip_qkv(fields) } else { 0.0 },
        attention_bias: family != Family::Mixtral && fields.flag("attention_bias", false),
        initializer_range: fields.real("initializer_range", 0.02),
        dense_layers: dense_layers(family, layers, fields),
        dense_intermediate_size: match family {
            Family::Mixtral | Family::Olmoe => 0,
            _ => fields.number("intermediate_size", None),
        },
        experts: experts(family, fields),
        router: router(family, fields),
    }
}

/// 0 is none here, and clamps everything to zero in `transformers`.
fn clip_qkv(fields: &mut Fields) -> f64 {
    let clip = fields.real("clip_qkv", 0.0);
    let zero = fields.get("clip_qkv").is_some() && clip == 0.0;
    fields.refuse("clip_qkv", zero, "0 leaves nothing of q, k and v; null clips nothing");
    clip
}

/// Layers without experts.
fn dense_layers(family: Family, layers: u32, fields: &mut Fields) -> Vec<u32> {
    match family {
        Family::Mixtral | Family::Olmoe => Vec::new(),
        Family::Glm4Moe | Family::Dots1 => {
            let default = u32::from(family == Family::Glm4Moe);
            (0..fields.number("first_k_dense_replace", Some(default)).min(layers)).collect()
        }
        Family::Qwen3Moe => {
            let every = fields.number("decoder_sparse_step", Some(1));
            let listed = fields.get("mlp_only_layers").cloned().unwrap_or(json!([]));
            let listed: Vec<u32> = serde_json::from_value(listed).unwrap_or_else(|error| {
                fields.problem("mlp_only_layers", &error.to_string());
                Vec::new()
            });
            let sparse = |layer: u32| {
                every > 0 && (layer + 1).is_multiple_of(every) && !listed.contains(&layer)
            };
            (0..layers.min(1 << 16)).filter(|layer| !sparse(*layer)).collect()
        }
    }
}

fn experts(family: Family, fields: &mut Fields) -> ExpertsConfig {
    let count = match family {
        Family::Mixtral => ["num_local_experts", "num_experts"],
        Family::Qwen3Moe | Family::Olmoe => ["num_experts", "num_local_experts"],
        Family::Glm4Moe | Family::Dots1 => ["n_routed_experts", "num_local_experts"],
    };
    let width = match family {
        Family::Mixtral | Family::Olmoe => "intermediate_size",
        _ => "moe_intermediate_size",
    };
    let name = fields.get("hidden_act").cloned().unwrap_or(json!("silu"));
    let activation = match name.as_str() {
        Some("silu" | "swish") => Activation::Silu,
        Some("relu") => Activation::Relu,
        Some("gelu_pytorch_tanh" | "gelu_new") => Activation::Gelu,
        _ => {
            let why = format!("{name} is not built in; silu, relu and gelu_pytorch_tanh are");
            fields.problem("hidden_act", &why);
            Activation::Silu
        }
    };
    let default = u32::from(family == Family::Glm4Moe);
    ExpertsConfig {
        count: fields.number_of(count),
        per_token: fields.number("num_experts_per_tok", None),
        intermediate_size: fields.number(width, None),
        activation,
        shared: match family.routes_like_deepseek() {
            true => fields.number("n_shared_experts", Some(default)),
            false => 0,
        },
        routed_headroom: 1.5,
        slices: 1,
    }
}

fn router(family: Family, fields: &mut Fields) -> RouterConfig {
    let deepseek = family.routes_like_deepseek();
    let norm_topk_prob = match family {
        Family::Mixtral => true,
        _ => fields.flag("norm_topk_prob", family == Family::Glm4Moe),
    };
    let coefficient = match family {
        Family::Mixtral | Family::Qwen3Moe => 0.001,
        Family::Olmoe => 0.01,
        Family::Glm4Moe | Family::Dots1 => 0.0,
    };
    RouterConfig {
        aux_loss_coef: fields.real("router_aux_loss_coef", coefficient),
        z_loss_coef: 0.0,
        scoring: if deepseek { Scoring::Sigmoid } else { Scoring::Softmax },
        norm_topk_prob,
        bias: deepseek,
        groups: if deepseek { fields.number("n_group", Some(1)) } else { 1 },
        topk_groups: if deepseek { fields.number("topk_group", Some(1)) } else { 1 },
        scale: if deepseek { fields.real("routed_scaling_factor", 1.0) } else { 1.0 },
        ..RouterConfig::default()
    }
}

/// What would be computed otherwise, or is not read.
fn unsupported(family: Family, layers: u32, fields: &mut Fields) {
    for field in ["quantization_config", "compression_config"] {
        let Some(quantised) = fields.get(field) else { continue };
        let method = quantised.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
        let why = format!("weights quantised by {method:?} are not read; give the original ones");
        fields.problem(field, &why);
    }
    positions::check_windows(family, layers, fields);
    let biased = family == Family::Glm4Moe && fields.flag("attention_bias", false);
    let why = "a bias of q, k and v without one of o is not built in";
    fields.refuse("attention_bias", biased, why);
    for field in ["attention_dropout", "router_jitter_noise"] {
        if field == "router_jitter_noise" && family != Family::Mixtral {
            continue;
        }
        let chance = fields.real(field, 0.0);
        let why = format!(
            "{chance}: training with it is not built in. Where it is not wanted, and for a loss or \
             a text, which it does not change, set it to 0"
        );
        fields.refuse(field, chance > 0.0, &why);
    }
    let why = "tokens that see those behind them are not built in";
    let causal = fields.flag("is_causal", true);
    fields.refuse("is_causal", !causal, why);
    let why = "an encoder is not built in";
    let encodes = fields.flag("is_encoder_decoder", false);
    fields.refuse("is_encoder_decoder", encodes, why);
    for (field, why) in [
        ("per_layer_config", "layers with fields of their own are not built in"),
        ("transformers_weights", "weights in another file than model.safetensors are not read"),
    ] {
        let is_there = fields.get(field).is_some();
        fields.refuse(field, is_there, why);
    }
}

fn consistent(model: &ModelConfig, fields: &mut Fields) {
    if !fields.problems.is_empty() {
        return;
    }
    if let Err(why) = model_is_sane(model) {
        fields.problem("vocab_size, hidden_size, num_attention_heads or head_dim", &why);
        return;
    }
    let (experts, router) = (&model.experts, &model.router);
    let (heads, kv) = (model.num_attention_heads, model.num_key_value_heads);
    let uneven = kv == 0 || !heads.is_multiple_of(kv);
    fields.refuse("num_key_value_heads", uneven, &format!("{kv} does not divide {heads} heads"));
    fields.refuse("head_dim", !model.head_dim.is_multiple_of(2), "it is odd");
    let whole = model.qk_norm == QkNorm::Full && model.q_size() != model.hidden_size;
    fields.refuse("head_dim", whole, "heads and hidden_size differ");
    fields.refuse("num_hidden_layers", model.num_hidden_layers == 0, "there is none");
    let empty = experts.count == 0 || experts.intermediate_size == 0;
    fields.refuse("num_experts", empty, "experts without number or width");
    let few = experts.per_token == 0 || experts.per_token > experts.count;
    let why = format!("{} of {} experts", experts.per_token, experts.count);
    fields.refuse("num_experts_per_tok", few, &why);
    let groups = router.groups == 0 || !experts.count.is_multiple_of(router.groups.max(1));
    fields.refuse("n_group", groups, "it does not divide the number of experts");
    let each = experts.count.checked_div(router.groups);
    let lone = each == Some(1) && router.scoring == Scoring::Sigmoid;
    fields.refuse("n_group", lone, "groups of one expert: the two best of a group are added");
    let kept = router.topk_groups == 0 || router.topk_groups > router.groups;
    fields.refuse("topk_group", kept, "it is not between 1 and n_group");
    let held = router.topk_groups * experts.count.checked_div(router.groups).unwrap_or(0);
    fields.refuse("topk_group", held < experts.per_token, "its groups hold too few experts");
}
