//! `config.json` of Hugging Face <-> `ModelConfig`.
//!
//! Only what our model computes alike is read; every field that would make it compute something
//! else is refused by name, never ignored.

mod write;

pub use write::{family_of, write};

use crate::checkpoint::{Problem, model_is_sane};
use moejob_protocol::ModelConfig;
use moejob_protocol::model::{
    Activation, ExpertsConfig, QkNorm, RouterConfig, Scoring,
};
use serde_json::{Map, Value, json};

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

    fn routes_like_deepseek(self) -> bool {
        matches!(self, Family::Glm4Moe | Family::Dots1)
    }
}

const FILE: &str = "config.json";

/// The fields of a config, and what is wrong with them.
struct Fields<'a> {
    fields: &'a Map<String, Value>,
    problems: Vec<Problem>,
}

impl Fields<'_> {
    fn problem(&mut self, field: &str, why: &str) {
        self.problems.push(Problem::new(&format!("{FILE}: {field}"), why));
    }

    /// What stands there, unless it is null.
    fn get(&self, field: &str) -> Option<&Value> {
        self.fields.get(field).filter(|value| !value.is_null())
    }

    fn number(&mut self, field: &str, default: Option<u32>) -> u32 {
        let value = self.get(field).cloned();
        match (value, default) {
            (None, Some(default)) => default,
            (None, None) => {
                self.problem(field, "it is missing");
                0
            }
            (Some(value), _) => {
                let number = value.as_u64().and_then(|number| u32::try_from(number).ok());
                number.unwrap_or_else(|| {
                    self.problem(field, &format!("{value} is no whole number below 2^32"));
                    0
                })
            }
        }
    }

    fn real(&mut self, field: &str, default: f64) -> f64 {
        let Some(value) = self.get(field).cloned() else { return default };
        let real = value.as_f64().filter(|real| real.is_finite() && *real >= 0.0);
        real.unwrap_or_else(|| {
            self.problem(field, &format!("{value} is no finite number of at least 0"));
            default
        })
    }

    fn flag(&mut self, field: &str, default: bool) -> bool {
        let Some(value) = self.get(field).cloned() else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.problem(field, &format!("{value} is neither true nor false"));
            default
        })
    }

    /// A field that must be off.
    fn refuse(&mut self, field: &str, applies: bool, why: &str) {
        if applies {
            self.problem(field, why);
        }
    }
}

/// The family and the model that a `config.json` describes.
///
/// # Errors
/// Everything that is wrong with it or not built in.
pub fn read(text: &[u8]) -> Result<(Family, ModelConfig), Vec<Problem>> {
    let one = |why: String| vec![Problem::new(FILE, &why)];
    let value: Value = serde_json::from_slice(text).map_err(|error| one(error.to_string()))?;
    let Value::Object(fields) = &value else {
        return Err(one("it is no JSON object".to_string()));
    };
    let family = family(fields).map_err(|problem| vec![problem])?;
    let mut fields = Fields { fields, problems: Vec::new() };
    let model = model(family, &mut fields);
    unsupported(family, &mut fields);
    consistent(&model, &mut fields);
    if fields.problems.is_empty() { Ok((family, model)) } else { Err(fields.problems) }
}

fn family(fields: &Map<String, Value>) -> Result<Family, Problem> {
    let architectures = fields.get("architectures").and_then(Value::as_array);
    let first = architectures.and_then(|all| all.first()).and_then(Value::as_str);
    let model_type = fields.get("model_type").and_then(Value::as_str);
    let found = FAMILIES.into_iter().find(|family| match (first, model_type) {
        (Some(name), _) => name == family.architecture(),
        (None, name) => name == Some(family.model_type()),
    });
    let known = || FAMILIES.map(Family::architecture).join(", ");
    found.ok_or_else(|| {
        let shown = first.or(model_type).unwrap_or("none");
        let why = if shown.starts_with("Deepseek") || shown.starts_with("deepseek") {
            format!("{shown} has latent attention, which is not built in; known are {}", known())
        } else {
            format!("the architecture {shown} is unknown; known are {}", known())
        };
        Problem::new(&format!("{FILE}: architectures"), &why)
    })
}

fn model(family: Family, fields: &mut Fields) -> ModelConfig {
    let hidden_size = fields.number("hidden_size", None);
    let heads = fields.number("num_attention_heads", None);
    let kv_heads = match family {
        Family::Mixtral | Family::Glm4Moe => 8,
        Family::Qwen3Moe => 4,
        Family::Olmoe | Family::Dots1 => heads,
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
        rope_theta: rope_theta(family, fields),
        tie_word_embeddings: fields.flag("tie_word_embeddings", false),
        qk_norm,
        clip_qkv: if family == Family::Olmoe { fields.real("clip_qkv", 0.0) } else { 0.0 },
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

fn rope_theta(family: Family, fields: &mut Fields) -> f64 {
    let default = if family == Family::Mixtral { 1e6 } else { 1e4 };
    let nested = fields.get("rope_parameters").or_else(|| fields.get("rope_scaling")).cloned();
    let Some(nested) = nested else {
        check_partial(family, None, fields);
        return fields.real("rope_theta", default);
    };
    let kind = nested.get("rope_type").or_else(|| nested.get("type"));
    let kind = kind.and_then(Value::as_str).unwrap_or("default").to_string();
    let why = format!("the rotary positions {kind:?} are not built in; `default` is");
    fields.refuse("rope_parameters.rope_type", kind != "default", &why);
    let partial = nested.get("partial_rotary_factor").and_then(Value::as_f64);
    check_partial(family, partial, fields);
    match nested.get("rope_theta").and_then(Value::as_f64) {
        Some(theta) => theta,
        None => fields.real("rope_theta", default),
    }
}

/// GLM-4-MoE turns half of each head unless it is told otherwise.
fn check_partial(family: Family, nested: Option<f64>, fields: &mut Fields) {
    let typed = fields.get("partial_rotary_factor").and_then(Value::as_f64);
    let default = if family == Family::Glm4Moe { 0.5 } else { 1.0 };
    let factor = nested.or(typed).unwrap_or(default);
    let why = format!("{factor}: heads are turned as a whole here, which is 1");
    fields.refuse("partial_rotary_factor", factor != 1.0, &why);
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
    let (own, alias) = match family {
        Family::Mixtral => ("num_local_experts", "num_experts"),
        Family::Qwen3Moe | Family::Olmoe => ("num_experts", "num_local_experts"),
        Family::Glm4Moe | Family::Dots1 => ("n_routed_experts", "num_local_experts"),
    };
    let count = if fields.get(own).is_none() && fields.get(alias).is_some() { alias } else { own };
    let width = match family {
        Family::Mixtral | Family::Olmoe => "intermediate_size",
        _ => "moe_intermediate_size",
    };
    let name = fields.get("hidden_act").and_then(Value::as_str).unwrap_or("silu").to_string();
    let activation = match name.as_str() {
        "silu" | "swish" => Activation::Silu,
        "relu" => Activation::Relu,
        "gelu_pytorch_tanh" | "gelu_new" => Activation::Gelu,
        other => {
            let why = format!("{other:?} is not built in; silu, relu and gelu_pytorch_tanh are");
            fields.problem("hidden_act", &why);
            Activation::Silu
        }
    };
    let default = u32::from(family == Family::Glm4Moe);
    ExpertsConfig {
        count: fields.number(count, None),
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

fn unsupported(family: Family, fields: &mut Fields) {
    if let Some(quantised) = fields.get("quantization_config").cloned() {
        let method = quantised.get("quant_method").and_then(Value::as_str).unwrap_or("unknown");
        let why = format!("weights quantised by {method:?} are not read; give the original ones");
        fields.problem("quantization_config", &why);
    }
    let window = fields.get("sliding_window").and_then(Value::as_u64);
    let positions = fields.get("max_position_embeddings").and_then(Value::as_u64);
    let slides = match family {
        Family::Mixtral => window.is_some_and(|window| positions.is_none_or(|max| window < max)),
        Family::Qwen3Moe => fields.flag("use_sliding_window", false),
        Family::Olmoe | Family::Glm4Moe | Family::Dots1 => false,
    };
    fields.refuse("sliding_window", slides, "attention over a window is not built in");
    let types = fields.get("layer_types").and_then(Value::as_array);
    let other = types.is_some_and(|types| types.iter().any(|kind| kind != "full_attention"));
    fields.refuse("layer_types", other, "full_attention alone is built in");
    let biased = family == Family::Glm4Moe && fields.flag("attention_bias", false);
    let why = "a bias of q, k and v without one of o is not built in";
    fields.refuse("attention_bias", biased, why);
    let predicts = fields.get("num_nextn_predict_layers").and_then(Value::as_u64).unwrap_or(0);
    let why = "layers that predict more than one token are not built in";
    fields.refuse("num_nextn_predict_layers", predicts > 0, why);
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
    let kept = router.topk_groups == 0 || router.topk_groups > router.groups;
    fields.refuse("topk_group", kept, "it is not between 1 and n_group");
    let held = router.topk_groups * experts.count.checked_div(router.groups).unwrap_or(0);
    fields.refuse("topk_group", held < experts.per_token, "its groups hold too few experts");
}
