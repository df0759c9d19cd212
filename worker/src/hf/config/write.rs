//! A model of ours as a `config.json`.

use super::Family;
use super::fields::decides;
use crate::checkpoint::Problem;
use moejob_kernels::DType;
use moejob_protocol::ModelConfig;
use moejob_protocol::model::{Activation, QkNorm, RouterKind, Scoring};
use serde_json::{Map, Value, json};

/// The family that computes what `model` computes.
///
/// # Errors
/// The fields for which none of them does.
pub fn family_of(model: &ModelConfig) -> Result<Family, Vec<Problem>> {
    let (router, qk_norm) = (&model.router, model.qk_norm);
    let mut problems = Vec::new();
    let mut refuse = |field: &str, applies: bool, why: &str| {
        if applies {
            problems.push(Problem::new(field, why));
        }
    };
    let dense = !model.dense_layers.is_empty();
    let family = match (router.scoring, qk_norm) {
        (Scoring::Sigmoid, _) => Family::Glm4Moe,
        (Scoring::Softmax, QkNorm::Full) => Family::Olmoe,
        (Scoring::Softmax, QkNorm::PerHead) => Family::Qwen3Moe,
        (Scoring::Softmax, QkNorm::None) => Family::Mixtral,
    };
    let name = family.architecture();
    let chosen = matches!(router.kind, RouterKind::TopK | RouterKind::Switch | RouterKind::Tutel);
    refuse("router.kind", !chosen, &format!("{name} takes the K best experts of a token"));
    refuse("router.cosine", router.cosine.is_some(), &format!("{name} has a linear gate"));
    let holds = router.hysteresis != 0.0;
    refuse("router.hysteresis", holds, &format!("{name} chooses for each token by itself"));
    let drops = router.eval_capacity_factor != 0.0;
    refuse("router.evalCapacityFactor", drops, &format!("{name} drops no token"));
    if family == Family::Glm4Moe {
        let prefix = model.dense_layers.iter().zip(0..).all(|(layer, at)| *layer == at);
        refuse("denseLayers", !prefix, &format!("{name} has its dense layers first"));
        refuse("qkNorm", qk_norm == QkNorm::Full, &format!("{name} has a norm per head or none"));
        refuse("attentionBias", model.attention_bias, &format!("{name} has no bias of o_proj"));
        let few = model.experts.count / router.groups.max(1) < 2;
        refuse("router.groups", few, &format!("{name} adds the two best experts of a group"));
    } else {
        let deepseek = router.bias || router.groups > 1 || router.scale != 1.0;
        let why = format!("{name} has softmax without correction, groups and scale");
        refuse("router", deepseek, &why);
        refuse("experts.shared", model.experts.shared > 0, &format!("{name} has none"));
    }
    if matches!(family, Family::Olmoe | Family::Mixtral) {
        refuse("denseLayers", dense, &format!("{name} has none"));
    }
    if family == Family::Olmoe {
        let other = model.q_size() != model.hidden_size;
        refuse("headDim", other, &format!("{name} has heads as wide as hiddenSize"));
    } else {
        refuse("clipQkv", model.clip_qkv > 0.0, &format!("{name} has none"));
    }
    if family == Family::Mixtral {
        let raw = !router.norm_topk_prob;
        refuse("router.normTopkProb", raw, &format!("{name} always has it; qkNorm chooses it"));
        refuse("attentionBias", model.attention_bias, &format!("{name} has none"));
    }
    if problems.is_empty() { Ok(family) } else { Err(problems) }
}

/// The `config.json` of a model. Of `fields` it takes those that decide nothing of what is
/// computed.
pub fn write(
    family: Family,
    model: &ModelConfig,
    dtype: DType,
    mut fields: Map<String, Value>,
) -> Value {
    let experts = &model.experts;
    fields.retain(|field, _| !decides(field));
    fields.entry("max_position_embeddings").or_insert(json!(POSITIONS));
    let mut set = |name: &str, value: Value| fields.insert(name.to_string(), value);
    set("architectures", json!([family.architecture()]));
    set("model_type", json!(family.model_type()));
    set("dtype", json!(torch_name(dtype)));
    set("vocab_size", json!(model.vocab_size));
    set("hidden_size", json!(model.hidden_size));
    set("num_hidden_layers", json!(model.num_hidden_layers));
    set("num_attention_heads", json!(model.num_attention_heads));
    set("num_key_value_heads", json!(model.num_key_value_heads));
    set("head_dim", json!(model.head_dim));
    set("rms_norm_eps", json!(model.rms_norm_eps));
    set("rope_theta", json!(model.rope_theta));
    let mut rope = json!({ "rope_type": "default", "rope_theta": model.rope_theta });
    if family == Family::Glm4Moe {
        rope["partial_rotary_factor"] = json!(1.0);
        set("partial_rotary_factor", json!(1.0));
    }
    set("rope_parameters", rope);
    set("tie_word_embeddings", json!(model.tie_word_embeddings));
    set("initializer_range", json!(model.initializer_range));
    set("num_experts_per_tok", json!(experts.per_token));
    let activation = match experts.activation {
        Activation::Silu => "silu",
        Activation::Relu => "relu",
        Activation::Gelu => "gelu_pytorch_tanh",
    };
    set("hidden_act", json!(activation));
    write_experts(family, model, &mut fields);
    Value::Object(fields)
}

/// Experts, router and what families differ in.
fn write_experts(family: Family, model: &ModelConfig, fields: &mut Map<String, Value>) {
    let (experts, router) = (&model.experts, &model.router);
    let mut set = |name: &str, value: Value| fields.insert(name.to_string(), value);
    let count = match family {
        Family::Mixtral => "num_local_experts",
        Family::Qwen3Moe | Family::Olmoe => "num_experts",
        Family::Glm4Moe | Family::Dots1 => "n_routed_experts",
    };
    set(count, json!(experts.count));
    if matches!(family, Family::Mixtral | Family::Olmoe) {
        set("intermediate_size", json!(experts.intermediate_size));
    } else {
        set("moe_intermediate_size", json!(experts.intermediate_size));
        // Without dense layers its value is used by none.
        let dense = model.dense_intermediate_size;
        set("intermediate_size", json!(if dense > 0 { dense } else { experts.intermediate_size }));
    }
    if family != Family::Mixtral {
        set("norm_topk_prob", json!(router.norm_topk_prob));
        set("attention_bias", json!(model.attention_bias));
    }
    if !family.routes_like_deepseek() {
        set("router_aux_loss_coef", json!(router.aux_loss_coef));
    }
    match family {
        Family::Olmoe => {
            let clip = (model.clip_qkv > 0.0).then_some(model.clip_qkv);
            set("clip_qkv", json!(clip));
        }
        Family::Qwen3Moe => {
            set("mlp_only_layers", json!(model.dense_layers));
            set("decoder_sparse_step", json!(1));
        }
        Family::Glm4Moe | Family::Dots1 => {
            set("first_k_dense_replace", json!(model.dense_layers.len()));
            set("n_shared_experts", json!(experts.shared));
            set("n_group", json!(router.groups));
            set("topk_group", json!(router.topk_groups));
            set("routed_scaling_factor", json!(router.scale));
        }
        Family::Mixtral => {}
    }
    if family == Family::Dots1 {
        // Where nothing is said, layers from the 63rd on have a window.
        set("sliding_window", Value::Null);
    }
    if family == Family::Glm4Moe {
        set("use_qk_norm", json!(model.qk_norm == QkNorm::PerHead));
        set("num_nextn_predict_layers", json!(0));
    }
}

/// Positions that an exported model claims, where nothing else is known: rotary positions have no
/// end of their own.
const POSITIONS: u32 = 4096;

fn torch_name(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "float16",
        DType::Bf16 => "bfloat16",
        DType::F64 => "float64",
        _ => "float32",
    }
}
