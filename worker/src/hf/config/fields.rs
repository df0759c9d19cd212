//! The fields of a `config.json`: what was asked of them, what is wrong with them, and which ones
//! nobody asked for.

use crate::checkpoint::Problem;
use serde_json::{Map, Value};
use std::collections::BTreeSet;

pub const FILE: &str = "config.json";

/// Fields that change no number of a forward pass in `transformers` 5: names and versions, what is
/// returned and kept, how it is computed, what text is made of, and what trainers read.
const UNUSED: [&str; 63] = [
    "_attn_implementation",
    "_attn_implementation_autoset",
    "_commit_hash",
    "_experts_implementation",
    "_name_or_path",
    "attn_implementation",
    "bad_words_ids",
    "begin_suppress_tokens",
    "chunk_size_feed_forward",
    "diversity_penalty",
    "do_sample",
    "dtype",
    "early_stopping",
    "encoder_no_repeat_ngram_size",
    "experts_implementation",
    "exponential_decay_length_penalty",
    "finetuning_task",
    "gradient_checkpointing",
    "id2label",
    "label2id",
    "length_penalty",
    "max_length",
    "max_new_tokens",
    "max_position_embeddings",
    "max_window_layers",
    "min_length",
    "model_max_length",
    "name_or_path",
    "no_repeat_ngram_size",
    "num_beam_groups",
    "num_beams",
    "num_labels",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "num_return_sequences",
    "output_attentions",
    "output_hidden_states",
    "output_router_logits",
    "output_scores",
    "prefix",
    "pretraining_tp",
    "problem_type",
    "pruned_heads",
    "remove_invalid_values",
    "repetition_penalty",
    "return_dict",
    "return_dict_in_generate",
    "suppress_tokens",
    "task_specific_params",
    "temperature",
    "tf_legacy_loss",
    "tokenizer_class",
    "top_k",
    "top_p",
    "torch_dtype",
    "torchscript",
    "transformers_version",
    "typical_p",
    "unsloth_fixed",
    "unsloth_version",
    "use_bfloat16",
    "use_cache",
    "use_return_dict",
];

/// Fields that say what is computed, in some family. An export writes those of its own family, and
/// takes none of them from elsewhere.
const DECIDES: [&str; 51] = [
    "architectures",
    "attention_bias",
    "attention_chunk_size",
    "attention_dropout",
    "clip_qkv",
    "compression_config",
    "decoder_sparse_step",
    "first_k_dense_replace",
    "head_dim",
    "hidden_act",
    "hidden_size",
    "initializer_range",
    "intermediate_size",
    "is_causal",
    "is_encoder_decoder",
    "layer_types",
    "max_window_layers",
    "mlp_only_layers",
    "model_type",
    "moe_intermediate_size",
    "n_group",
    "n_routed_experts",
    "n_shared_experts",
    "norm_topk_prob",
    "num_attention_heads",
    "num_experts",
    "num_experts_per_tok",
    "num_hidden_layers",
    "num_key_value_heads",
    "num_local_experts",
    "num_mtp_layers",
    "num_nextn_predict_layers",
    "partial_rotary_factor",
    "per_layer_config",
    "quantization_config",
    "rms_norm_eps",
    "rope_parameters",
    "rope_scaling",
    "rope_theta",
    "routed_scaling_factor",
    "router_aux_loss_coef",
    "router_jitter_noise",
    "sliding_window",
    "tie_word_embeddings",
    "topk_group",
    "torch_dtype",
    "transformers_weights",
    "use_qk_norm",
    "use_sliding_window",
    "vocab_size",
    "auto_map",
];

/// The fields of a config, and what is wrong with them.
pub struct Fields<'a> {
    fields: &'a Map<String, Value>,
    asked: BTreeSet<&'static str>,
    pub problems: Vec<Problem>,
}

impl<'a> Fields<'a> {
    pub fn new(fields: &'a Map<String, Value>) -> Fields<'a> {
        Fields { fields, asked: BTreeSet::new(), problems: Vec::new() }
    }

    pub fn problem(&mut self, field: &str, why: &str) {
        self.problems.push(Problem::new(&format!("{FILE}: {field}"), why));
    }

    /// A field that must not apply.
    pub fn refuse(&mut self, field: &str, applies: bool, why: &str) {
        if applies {
            self.problem(field, why);
        }
    }

    /// What stands there, null included.
    pub fn raw(&mut self, field: &'static str) -> Option<&'a Value> {
        debug_assert!(decides(field) || UNUSED.contains(&field), "{field} is in neither list");
        self.asked.insert(field);
        self.fields.get(field)
    }

    /// What stands there, unless it is null.
    pub fn get(&mut self, field: &'static str) -> Option<&'a Value> {
        self.raw(field).filter(|value| !value.is_null())
    }

    pub fn number(&mut self, field: &'static str, default: Option<u32>) -> u32 {
        match (self.get(field), default) {
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

    /// A number that has two names.
    pub fn number_of(&mut self, names: [&'static str; 2]) -> u32 {
        let [own, other] = names;
        match (self.get(own), self.get(other)) {
            (None, Some(_)) => self.number(other, None),
            (Some(one), Some(two)) if one != two => {
                let why = format!("{one}, and {other}, which is another name of it, is {two}");
                self.problem(own, &why);
                0
            }
            _ => self.number(own, None),
        }
    }

    pub fn real(&mut self, field: &'static str, default: f64) -> f64 {
        let found = self.get(field);
        self.checked_real(field, found, default)
    }

    /// `found` at `field` as a number of at least 0.
    pub fn checked_real(&mut self, field: &str, found: Option<&Value>, default: f64) -> f64 {
        let Some(value) = found else { return default };
        let real = value.as_f64().filter(|real| real.is_finite() && *real >= 0.0);
        real.unwrap_or_else(|| {
            self.problem(field, &format!("{value} is no finite number of at least 0"));
            default
        })
    }

    pub fn flag(&mut self, field: &'static str, default: bool) -> bool {
        let Some(value) = self.get(field) else { return default };
        value.as_bool().unwrap_or_else(|| {
            self.problem(field, &format!("{value} is neither true nor false"));
            default
        })
    }

    /// The fields that nobody asked for, and that may mean something.
    pub fn unknown(&self) -> Vec<String> {
        let means = |name: &str, value: &Value| {
            !value.is_null()
                && !self.asked.contains(name)
                && !UNUSED.contains(&name)
                && !name.ends_with("_token_id")
        };
        let all = self.fields.iter().filter(|(name, value)| means(name, value));
        all.map(|(name, _)| name.clone()).collect()
    }
}

/// Whether a field of another model's `config.json` may not stand in that of an export.
pub fn decides(field: &str) -> bool {
    DECIDES.contains(&field)
}
