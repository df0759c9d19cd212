//! Dimensions of well-known models, from their published configurations.

use crate::spec::{ExpertsSpec, ModelSpec, Preset, RouterSpec, Word};
use moejob_protocol::ModelConfig;
use moejob_protocol::model::{AuxLossScope, QkNorm, RouterKind, Scoring};
use serde::Serialize;
use serde::de::DeserializeOwned;
use serde_json::Value;

/// The preset's fields.
pub fn fields(preset: Preset) -> ModelSpec {
    match preset {
        Preset::Tiny => tiny(),
        Preset::TinyQwen3 => ModelSpec {
            num_attention_heads: Some(4),
            num_key_value_heads: Some(2),
            head_dim: Some(16),
            qk_norm: Some(Word(QkNorm::PerHead)),
            tie_word_embeddings: Some(false),
            rms_norm_eps: Some(1e-6),
            ..tiny()
        },
        Preset::TinyOlmoe => ModelSpec {
            qk_norm: Some(Word(QkNorm::Full)),
            tie_word_embeddings: Some(false),
            router: router(|router| router.norm_topk_prob = Some(false)),
            ..tiny()
        },
        Preset::Olmoe1b7b => ModelSpec {
            qk_norm: Some(Word(QkNorm::Full)),
            rms_norm_eps: Some(1e-5),
            rope_theta: Some(1e4),
            router: router(|router| {
                router.norm_topk_prob = Some(false);
                router.aux_loss_coef = Some(0.01);
                router.z_loss_coef = Some(0.001);
            }),
            ..dims(50304, 2048, 16, (16, 16, 128), (64, 8, 1024))
        },
        Preset::Mixtral8x7b => ModelSpec {
            rms_norm_eps: Some(1e-5),
            rope_theta: Some(1e6),
            router: router(|router| {
                router.aux_loss_coef = Some(0.02);
                router.z_loss_coef = Some(0.0);
            }),
            ..dims(32000, 4096, 32, (32, 8, 128), (8, 2, 14336))
        },
        Preset::Qwen330bA3b => ModelSpec {
            qk_norm: Some(Word(QkNorm::PerHead)),
            rms_norm_eps: Some(1e-6),
            rope_theta: Some(1e6),
            router: router(|router| {
                router.aux_loss_coef = Some(0.001);
                router.z_loss_coef = Some(0.0);
            }),
            ..dims(151_936, 2048, 48, (32, 4, 128), (128, 8, 768))
        },
        Preset::DeepseekV2Lite => deepseek_v2_lite(),
        Preset::Moonlight16b => moonlight(),
        Preset::DeepseekV3 => deepseek_v3(),
        Preset::GptOss20b => ModelSpec {
            rms_norm_eps: Some(1e-5),
            rope_theta: Some(1.5e5),
            attention_bias: Some(true),
            router: router(|router| {
                router.aux_loss_coef = Some(0.9);
                router.z_loss_coef = Some(0.0);
            }),
            ..dims(201_088, 2880, 24, (64, 8, 64), (32, 4, 2880))
        },
        Preset::GptMoe11t => gpt_moe(),
    }
}

/// What of the original our models do not have yet, so that nothing else is trained under its
/// name; none where the preset is the model.
pub fn lacks(preset: Preset) -> Option<&'static str> {
    match preset {
        Preset::DeepseekV2Lite | Preset::Moonlight16b | Preset::DeepseekV3 => {
            Some("which has latent attention")
        }
        Preset::GptOss20b => Some("which has attention sinks, windows and a clamped activation"),
        _ => None,
    }
}

/// The largest model of Artetxe et al. 2021 (2112.10684): 32 layers of width 4096, 512 experts in
/// every other layer, two a token. Approximate: our experts have three matrices where those have
/// two of 16,384, so theirs are 2/3 as wide for the same size; positions are rotary, norms RMS.
fn gpt_moe() -> ModelSpec {
    const WIDTH: u32 = 16_384 * 2 / 3;
    ModelSpec {
        tie_word_embeddings: Some(true),
        dense_layers: Some((0..32).step_by(2).collect()),
        dense_intermediate_size: Some(WIDTH),
        router: router(|router| {
            router.kind = Some(Word(RouterKind::Gshard));
            router.aux_loss_coef = Some(0.01);
        }),
        ..dims(51_200, 4096, 32, (32, 32, 128), (512, 2, WIDTH))
    }
}

/// DeepSeek-AI 2024 (2405.04434), appendix B; ordinary attention of the same heads in the place of
/// its latent one (`lacks`).
fn deepseek_v2_lite() -> ModelSpec {
    let base = dims(102_400, 2048, 27, (16, 16, 128), (64, 6, 1408));
    ModelSpec {
        rms_norm_eps: Some(1e-6),
        rope_theta: Some(1e4),
        dense_layers: Some(vec![0]),
        dense_intermediate_size: Some(10_944),
        experts: base.experts.clone().map(|experts| ExpertsSpec { shared: Some(2), ..experts }),
        router: router(|router| {
            router.norm_topk_prob = Some(false);
            router.aux_loss_scope = Some(Word(AuxLossScope::Sequence));
            router.aux_loss_coef = Some(0.001);
            router.z_loss_coef = Some(0.0);
        }),
        ..base
    }
}

/// Liu et al. 2025 (2502.16982): DeepSeek-V3's layers in the dimensions of V2-Lite.
fn moonlight() -> ModelSpec {
    let base = deepseek_v2_lite();
    ModelSpec {
        vocab_size: Some(163_840),
        rms_norm_eps: Some(1e-5),
        rope_theta: Some(5e4),
        dense_intermediate_size: Some(11_264),
        router: router(|router| {
            router.scoring = Some(Word(Scoring::Sigmoid));
            router.bias = Some(true);
            router.scale = Some(2.446);
            router.aux_loss_scope = Some(Word(AuxLossScope::Sequence));
            router.aux_loss_coef = Some(0.001);
            router.z_loss_coef = Some(0.0);
        }),
        ..base
    }
}

/// DeepSeek-AI 2024 (2412.19437), section 4.2; attention as in `deepseek_v2_lite`.
fn deepseek_v3() -> ModelSpec {
    let base = dims(129_280, 7168, 61, (128, 128, 128), (256, 8, 2048));
    ModelSpec {
        rms_norm_eps: Some(1e-6),
        rope_theta: Some(1e4),
        dense_layers: Some(vec![0, 1, 2]),
        dense_intermediate_size: Some(18432),
        experts: base.experts.clone().map(|experts| ExpertsSpec { shared: Some(1), ..experts }),
        router: router(|router| {
            router.scoring = Some(Word(Scoring::Sigmoid));
            router.bias = Some(true);
            router.groups = Some(8);
            router.topk_groups = Some(4);
            router.scale = Some(2.5);
            router.aux_loss_scope = Some(Word(AuxLossScope::Sequence));
            router.aux_loss_coef = Some(0.0001);
            router.z_loss_coef = Some(0.0);
        }),
        ..base
    }
}

fn tiny() -> ModelSpec {
    ModelSpec { tie_word_embeddings: Some(true), ..dims(256, 64, 2, (2, 2, 32), (8, 2, 64)) }
}

/// `heads`: of queries, of keys and values, width. `experts`: count, per token, width.
fn dims(
    vocab_size: u32,
    hidden_size: u32,
    layers: u32,
    heads: (u32, u32, u32),
    experts: (u32, u32, u32),
) -> ModelSpec {
    ModelSpec {
        vocab_size: Some(vocab_size),
        hidden_size: Some(hidden_size),
        num_hidden_layers: Some(layers),
        num_attention_heads: Some(heads.0),
        num_key_value_heads: Some(heads.1),
        head_dim: Some(heads.2),
        experts: Some(ExpertsSpec {
            count: Some(experts.0),
            per_token: Some(experts.1),
            intermediate_size: Some(experts.2),
            ..ExpertsSpec::default()
        }),
        ..ModelSpec::default()
    }
}

fn router(set: impl Fn(&mut RouterSpec)) -> Option<RouterSpec> {
    let mut router = RouterSpec::default();
    set(&mut router);
    Some(router)
}

/// The fields of a model that is known from its weights.
pub fn of_model(model: &ModelConfig) -> ModelSpec {
    let value = serde_json::to_value(model);
    value.and_then(serde_json::from_value).unwrap_or_default()
}

/// The typed fields over the preset's, or over those of the weights to start from.
pub fn overlay(typed: &ModelSpec, weights: Option<&ModelConfig>) -> ModelSpec {
    let base = typed.preset.map(fields).or(weights.map(of_model));
    let Some(mut base) = base else { return typed.clone() };
    let kind = |model: &ModelSpec| model.router.as_ref().and_then(|router| router.kind);
    if kind(typed).is_some_and(|typed| Some(typed) != kind(&base)) {
        // Another kind brings defaults of its own.
        base.router = None;
    }
    over(&base, typed).unwrap_or_else(|| typed.clone())
}

/// What is typed, over `base`; none where that gives no value of its kind.
pub fn over<T: Serialize + DeserializeOwned>(base: &T, typed: &impl Serialize) -> Option<T> {
    let mut value = serde_json::to_value(base).ok()?;
    merge(&mut value, serde_json::to_value(typed).ok()?);
    serde_json::from_value(value).ok()
}

/// What is not typed is null, and leaves the base as it is.
fn merge(base: &mut Value, over: Value) {
    match (base, over) {
        (Value::Object(base), Value::Object(over)) => {
            for (name, value) in over.into_iter().filter(|(_, value)| !value.is_null()) {
                merge(base.entry(name).or_insert(Value::Null), value);
            }
        }
        (base, over) => *base = over,
    }
}
