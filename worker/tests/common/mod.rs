//! Small models and the text they train on.
#![allow(dead_code)]

use moejob_protocol::config::{
    AdamW, DataConfig, DataSource, Precision, Schedule, Tokenizer, TrainingConfig, ValidationConfig,
};
use moejob_protocol::model::{
    Activation, AuxLossScope, ExpertsConfig, ModelConfig, QkNorm, RouterConfig, Scoring,
};
use std::path::Path;

/// Two layers, D 16, 4 experts, top-2, F 8; bytes.
pub fn model() -> ModelConfig {
    ModelConfig {
        vocab_size: 256,
        hidden_size: 16,
        num_hidden_layers: 2,
        num_attention_heads: 2,
        num_key_value_heads: 1,
        head_dim: 8,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        tie_word_embeddings: true,
        qk_norm: QkNorm::None,
        clip_qkv: 0.0,
        attention_bias: false,
        initializer_range: 0.02,
        dense_layers: vec![],
        dense_intermediate_size: 24,
        experts: ExpertsConfig {
            count: 4,
            per_token: 2,
            intermediate_size: 8,
            activation: Activation::Silu,
            shared: 0,
            routed_headroom: 1.5,
        },
        router: RouterConfig {
            aux_loss_coef: 0.01,
            z_loss_coef: 0.001,
            aux_loss_scope: AuxLossScope::MicroBatch,
            capacity_factor: 0.0,
            scoring: Scoring::Softmax,
            norm_topk_prob: true,
            bias: false,
            groups: 1,
            topk_groups: 1,
            scale: 1.0,
            jitter: 0.0,
            frozen: false,
        },
    }
}

/// Five micro-batches of one sequence of 16 tokens.
pub fn training() -> TrainingConfig {
    TrainingConfig {
        steps: 10,
        global_batch_size: 5,
        micro_batch_size: 1,
        sequence_length: 16,
        precision: Precision::Fp32,
        adamw: AdamW {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
        },
        schedule: Schedule::Cosine { warmup_steps: 2, min_learning_rate: 0.001 },
        max_grad_norm: 1.0,
        seed: 3,
    }
}

/// Writes eight files of made-up words below `root`.
pub fn write_text(root: &Path) {
    let words = ["expert", "router", "token", "shard", "step", "gang", "rank", "buddy"];
    for file in 0..8usize {
        let text: String = (0..400usize)
            .map(|i| {
                let word = words[(i * i + 3 * file + i / 7) % words.len()];
                format!("{word}{}", if i % 11 == 0 { ".\n" } else { " " })
            })
            .collect();
        std::fs::write(root.join(format!("text-{file}.txt")), text).expect("a file of text");
    }
}

pub fn data(root: &Path) -> DataConfig {
    DataConfig {
        source: DataSource::Text {
            root: root.display().to_string(),
            paths: vec!["**/*.txt".to_string()],
            exclude: vec![],
        },
        tokenizer: Tokenizer::Bytes,
        validation: ValidationConfig { fraction: 0.2, every_steps: 4, max_sequences: 7 },
        exclude: vec![],
    }
}
