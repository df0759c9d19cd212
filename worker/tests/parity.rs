//! Our model against those of `transformers`: logits, losses, every gradient, and the weights
//! after ten AdamW steps. `tests/parity/generate.py` wrote the reference values.

mod common;

use moe_worker::comm::Comm;
use moe_worker::dispatch::{Round, Source};
use moe_worker::grads::{Gradients, weight_of};
use moe_worker::handles::slice;
use moe_worker::model::Model;
use moejob_kernels::Buffer;
use moejob_protocol::config::{AdamW, Precision};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{AuxLossScope, ModelConfig, Param, QkNorm, Role, Scoring};
use std::collections::BTreeMap;

const STEPS: usize = 10;
const BATCH: usize = 2;
const SEQUENCE: usize = 8;
const TOKENS: usize = BATCH * SEQUENCE;

/// The tensors of one reference file, as f64 whatever their type there.
struct Reference(BTreeMap<String, Vec<f64>>);

impl Reference {
    fn open(family: &str) -> Reference {
        #[derive(serde::Deserialize)]
        struct Entry {
            dtype: String,
            data_offsets: [usize; 2],
        }
        let folder = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/data");
        let file = std::fs::read(format!("{folder}/{family}.safetensors")).expect("a reference");
        let (length, rest) = file.split_first_chunk::<8>().expect("a header");
        let (header, data) = rest.split_at(u64::from_le_bytes(*length) as usize);
        let mut header: BTreeMap<String, serde_json::Value> =
            serde_json::from_slice(header).expect("a header");
        header.remove("__metadata__");
        let read = |entry: Entry| -> Vec<f64> {
            let bytes = &data[entry.data_offsets[0]..entry.data_offsets[1]];
            let four = bytes.chunks_exact(4).map(|b| b.try_into().expect("four bytes"));
            let eight = bytes.chunks_exact(8).map(|b| b.try_into().expect("eight bytes"));
            match entry.dtype.as_str() {
                "F32" => four.map(|b| f64::from(f32::from_le_bytes(b))).collect(),
                "U32" => four.map(|b| f64::from(u32::from_le_bytes(b))).collect(),
                "F64" => eight.map(f64::from_le_bytes).collect(),
                other => panic!("{other} is not expected in a reference"),
            }
        };
        let tensors = header.into_iter().map(|(name, entry)| {
            (name, read(serde_json::from_value(entry).expect("a tensor's entry")))
        });
        Reference(tensors.collect())
    }

    fn get(&self, name: &str) -> &[f64] {
        self.0.get(name).unwrap_or_else(|| panic!("{name} is not in the reference"))
    }
}

/// What all families of `generate.py` share.
fn config(change: impl FnOnce(&mut ModelConfig)) -> ModelConfig {
    let mut config = common::model();
    config.vocab_size = 29;
    config.hidden_size = 16;
    config.num_attention_heads = 4;
    config.num_key_value_heads = 2;
    config.head_dim = 4;
    config.tie_word_embeddings = false;
    config.router.aux_loss_coef = 0.05;
    config.router.z_loss_coef = 0.0;
    config.router.aux_loss_scope = AuxLossScope::Hf;
    change(&mut config);
    config
}

struct Bench<'a> {
    model: Model,
    gradients: Gradients,
    reference: &'a Reference,
    precision: Precision,
}

impl Bench<'_> {
    fn new<'a>(
        config: &ModelConfig,
        reference: &'a Reference,
        precision: Precision,
    ) -> Bench<'a> {
        let mut training = common::training();
        training.precision = precision;
        training.global_batch_size = BATCH as u32;
        training.micro_batch_size = BATCH as u32;
        training.sequence_length = SEQUENCE as u32;
        let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
        let model = Model::new(config, &layout, 0, &training, 1).expect("a small arena");
        let gradients = Gradients::new(&model);
        let mut bench = Bench { model, gradients, reference, precision };
        for index in 0..bench.model.params.len() {
            let name = format!("initial/{}", bench.model.params[index].name);
            let weight = weight_of(&bench.model, index).expect("one rank holds everything");
            bench.write(weight, reference.get(&name));
        }
        let initial = reference.0.keys().filter(|name| name.starts_with("initial/")).count();
        assert_eq!(initial, bench.model.params.len(), "the same table of parameters");
        let state = bench.model.buffers.state.clone();
        bench.model.device.fill_zero(state.moment1);
        bench.model.device.fill_zero(state.moment2);
        bench
    }

    fn write(&mut self, buffer: Buffer, values: &[f64]) {
        assert_eq!(buffer.len(), values.len(), "the reference has another size");
        if self.precision == Precision::Fp64 {
            self.model.device.write(buffer, values);
        } else {
            let values: Vec<f32> = values.iter().map(|value| *value as f32).collect();
            self.model.device.write(buffer, &values);
        }
    }

    fn read(&self, buffer: Buffer) -> Vec<f64> {
        if self.precision == Precision::Fp64 {
            return self.model.device.read_vec(buffer);
        }
        self.model.device.read_vec::<f32>(buffer).into_iter().map(f64::from).collect()
    }

    /// max |difference| / max |reference|
    fn check(&self, name: &str, found: &[f64], bound: f64) {
        let kind = if self.precision == Precision::Fp64 { "f64" } else { "f32" };
        let expected = self.reference.get(&format!("{kind}/{name}"));
        assert_eq!(found.len(), expected.len(), "{name}");
        let largest = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        let pairs = found.iter().zip(expected);
        let error = pairs.fold(0.0_f64, |most, (a, b)| most.max((a - b).abs()));
        let scale = largest.max(1e-30);
        assert!(error / scale <= bound, "{kind} {name}: {:.2e}", error / scale);
    }

    /// Forward, backward and update of the reference's batch `step`.
    fn step(&mut self, step: usize, bound: f64) {
        let windows = self.reference.get("tokens").chunks_exact(SEQUENCE + 1);
        let windows: Vec<&[f64]> = windows.skip(step * BATCH).take(BATCH).collect();
        let column = |from: usize| -> Vec<u32> {
            windows.iter().flat_map(|w| &w[from..from + SEQUENCE]).map(|id| *id as u32).collect()
        };
        self.model.load(&column(0), &column(1));
        let round =
            Round { tokens: TOKENS, sources: vec![Source { position: 0, tokens: TOKENS }] };
        let mut comm = Comm::solo(1);
        self.gradients.clear();
        self.model.forward(&round, &mut comm).expect("no peers");
        let logits = self.read(self.model.buffers.head.logits);
        let loss = self.model.loss(&round, true) / TOKENS as f64;
        let leaf = self.gradients.leaf(&round);
        self.model.backward(&round, &leaf, &mut comm).expect("no peers");
        if step == 0 {
            let mut counts = vec![0; 64];
            let mixture = self.model.buffers.layers.iter().filter(|l| l.moe.is_some()).count();
            let aux = self.model.routing(&round, &mut counts)[0] / mixture as f64;
            let coefficient = self.model.config.router.aux_loss_coef;
            self.check("logits", &logits, bound);
            if coefficient > 0.0 {
                self.check("aux", &[aux], bound);
            }
            self.check("loss", &[loss + coefficient * aux], bound);
            self.check_gradients(bound);
        }
        self.gradients.push(&round, Some(0), &[0], &mut self.model);
        self.gradients.reduce(&mut self.model, &mut comm).expect("no peers");
        let adamw = AdamW {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
        };
        self.gradients.update(&mut self.model, &adamw, 0.01, step as u64 + 1, 1.0);
    }

    /// Parameters that the optimizer trains; corrections of the choice have no gradient.
    fn trained(&self) -> impl Iterator<Item = (usize, &Param)> {
        let params = self.model.params.iter().enumerate();
        params.filter(|(_, param)| !matches!(param.role, Role::Correction { .. }))
    }

    fn check_gradients(&self, bound: f64) {
        let (stacks, flats) = (&self.model.buffers.gradients, &self.model.shape.flats);
        for (index, param) in self.trained() {
            let buffer = slice(stacks.dense[0], &flats.dense, index)
                .or_else(|| slice(stacks.experts[0][0], &flats.experts, index))
                .expect("one rank holds everything");
            self.check(&format!("gradient/{}", param.name), &self.read(buffer), bound);
        }
    }

    /// The weights in f64; in f32 the norm of the change that the steps made.
    fn check_weights(&self) {
        for (index, param) in self.trained() {
            let weight = weight_of(&self.model, index).expect("one rank holds everything");
            let (found, name) = (self.read(weight), &param.name);
            if self.precision == Precision::Fp64 {
                self.check(&format!("after/{name}"), &found, 1e-9);
                continue;
            }
            let expected = self.reference.get(&format!("f32/after/{name}"));
            let initial = self.reference.get(&format!("initial/{name}"));
            let norm = |a: &[f64], b: &[f64]| {
                a.iter().zip(b).map(|(a, b)| (a - b).powi(2)).sum::<f64>().sqrt()
            };
            let error = norm(&found, expected) / norm(expected, initial);
            assert!(error <= 1e-3, "f32 {name} after {STEPS} steps: {error:.2e}");
        }
    }
}

fn check(family: &str, config: &ModelConfig) {
    let reference = Reference::open(family);
    for (precision, bound) in [(Precision::Fp64, 1e-9), (Precision::Fp32, 2e-5)] {
        let mut bench = Bench::new(config, &reference, precision);
        (0..STEPS).for_each(|step| bench.step(step, bound));
        bench.check_weights();
    }
}

#[test]
fn mixtral() {
    check(
        "mixtral",
        &config(|config| {
            config.experts.count = 4;
            config.experts.intermediate_size = 12;
        }),
    );
}

#[test]
fn qwen3_moe_with_a_dense_layer_biases_and_tied_embeddings() {
    check(
        "qwen3_moe",
        &config(|config| {
            config.head_dim = 8;
            config.tie_word_embeddings = true;
            config.attention_bias = true;
            config.qk_norm = QkNorm::PerHead;
            config.dense_layers = vec![0];
            config.dense_intermediate_size = 20;
            config.experts.count = 6;
        }),
    );
}

#[test]
fn olmoe_with_clamped_queries_keys_and_values() {
    check(
        "olmoe",
        &config(|config| {
            config.qk_norm = QkNorm::Full;
            config.clip_qkv = 1.5;
            config.experts.count = 5;
            config.router.norm_topk_prob = false;
        }),
    );
}

/// GLM-4-MoE routes like DeepSeek-V3: sigmoid, correction, groups, shared experts, a scale.
#[test]
fn the_routing_of_deepseek_v3() {
    check(
        "glm4_moe",
        &config(|config| {
            config.num_hidden_layers = 3;
            config.qk_norm = QkNorm::PerHead;
            config.dense_layers = vec![0];
            config.dense_intermediate_size = 20;
            config.experts.count = 12;
            config.experts.per_token = 3;
            config.experts.shared = 2;
            let router = &mut config.router;
            router.aux_loss_coef = 0.0;
            router.scoring = Scoring::Sigmoid;
            router.bias = true;
            (router.groups, router.topk_groups, router.scale) = (4, 2, 2.5);
        }),
    );
}
