//! Our model against those of `transformers`: logits, losses, every gradient, and the weights
//! after ten AdamW steps. `tests/parity/generate.py` wrote the reference values. Other ones:
//! `generate.py --random 5 --seed 100 FOLDER`, then MOEJOB_PARITY_DATA=FOLDER and this test.

mod common;

use common::reference::{Reference, distance, relative};
use moe_worker::engine::forward::Pass;
use moe_worker::engine::buckets::BucketSums;
use moe_worker::engine::model::Model;
use moe_worker::engine::links::Links;
use moe_worker::engine::round::Round;
use moe_worker::state::rank::RankState;
use moejob_kernels::Buffer;
use moejob_protocol::config::{AdamW, Precision, Schedule, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{Param, Role};
use std::path::{Path, PathBuf};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/data");

struct Bench<'a> {
    model: Model,
    gradients: BucketSums,
    reference: &'a Reference,
    precision: Precision,
    training: TrainingConfig,
}

impl Bench<'_> {
    fn new(reference: &Reference, precision: Precision) -> Bench<'_> {
        let mut training = common::training();
        let [_, batch, sequence] = reference.sizes.map(|size| size as u32);
        training.precision = precision;
        (training.global_batch_size, training.micro_batch_size) = (batch, batch);
        training.sequence_length = sequence;
        training.schedule = Schedule::Constant { warmup_steps: 0 };
        training.max_grad_norm = 0.0;
        training.adamw = AdamW {
            learning_rate: 0.01,
            beta1: 0.9,
            beta2: 0.95,
            epsilon: 1e-8,
            weight_decay: 0.1,
        };
        let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
        let model = Model::new(&reference.config, &layout, 0, &training, 1).expect("a small arena");
        let gradients = BucketSums::new(&model);
        let mut bench = Bench { model, gradients, reference, precision, training };
        for index in 0..bench.model.params.len() {
            let name = format!("initial/{}", bench.model.params[index].name);
            let weight = bench.model.weight(index).expect("one rank holds everything");
            bench.write(weight, reference.get(&name));
        }
        let initial = reference.tensors.keys().filter(|name| name.starts_with("initial/")).count();
        assert_eq!(initial, bench.model.params.len(), "the same table of parameters");
        bench.model.clear_moments();
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

    /// The product that the head takes chunk by chunk, and keeps nothing of.
    fn logits(&self, tokens: usize) -> Vec<f64> {
        let x = self.read(self.model.buffers.head.norm);
        let names = &self.model.params;
        let of = |name: &str| names.iter().position(|param| param.name == name);
        let table = of("lm_head.weight").or(of("model.embed_tokens.weight"));
        let table = self.model.weight(table.expect("a head")).expect("one rank holds all");
        let (table, dim) = (self.read(table), x.len() / tokens);
        let row = |x: &[f64]| {
            let dot = |w: &[f64]| x.iter().zip(w).map(|(x, w)| x * w).sum::<f64>();
            table.chunks_exact(dim).map(dot).collect::<Vec<f64>>()
        };
        x.chunks_exact(dim).flat_map(row).collect()
    }

    /// max |difference| / max |reference|, the reference being `transformers` in f64 for both of
    /// our types: its own f32 is further from that than ours where a gradient nearly cancels.
    fn check(&self, name: &str, found: &[f64], bound: f64) {
        let error = relative(found, self.reference.get(&format!("f64/{name}")));
        let kind = self.precision;
        assert!(error <= bound, "{kind:?} {name}: {error:.2e}, allowed {bound:.2e}");
    }

    /// Forward, backward and update of the reference's batch `step`.
    fn step(&mut self, step: usize, bound: f64) {
        let [_, batch, sequence] = self.reference.sizes;
        let windows = self.reference.get("tokens").chunks_exact(sequence + 1);
        let windows: Vec<&[f64]> = windows.skip(step * batch).take(batch).collect();
        let column = |from: usize| -> Vec<u32> {
            windows.iter().flat_map(|w| &w[from..from + sequence]).map(|id| *id as u32).collect()
        };
        self.model.load(&column(0), &column(1));
        let tokens = batch * sequence;
        let (round, mut links) = (Round::alone(tokens), Links::solo());
        self.model.begin_step(&self.training, step as u64);
        self.model.begin_record();
        self.gradients.clear();
        Pass::new(&mut self.model, &mut links, &round).forward();
        let logits = self.logits(tokens);
        let mut pass = Pass::new(&mut self.model, &mut links, &round);
        let leaf = self.gradients.leaf(&round);
        pass.loss(Some(&leaf));
        pass.backward(&leaf);
        self.gradients.push(&round, &mut self.model);
        self.model.keep_record(0);
        let [loss, _, aux, ..] = self.model.read_record();
        let loss = loss / tokens as f64;
        if step == 0 {
            let mixture = self.model.buffers.layers.iter().filter(|l| l.fused.is_some()).count();
            let aux = aux / mixture as f64;
            let coefficient = self.model.config.router.aux_loss_coef;
            self.check("logits", &logits, bound);
            if coefficient > 0.0 {
                self.check("aux", &[aux], bound);
            }
            self.check("loss", &[loss + coefficient * aux], bound);
            self.check_gradients(bound);
        }
        self.gradients.reduce(&mut self.model, &mut links);
        self.gradients.measure(&mut self.model);
        self.model.reduce_numbers(&mut links);
        self.model.decide_update();
        self.gradients.update(&mut self.model, &mut links, &self.training.adamw);
    }

    /// Parameters that the optimizer trains; corrections of the choice have no gradient.
    fn trained(&self) -> impl Iterator<Item = (usize, &Param)> {
        let params = self.model.params.iter().enumerate();
        params.filter(|(_, param)| !matches!(param.role, Role::Correction { .. }))
    }

    fn check_gradients(&self, bound: f64) {
        for (index, param) in self.trained() {
            let gradient = common::gradient(&self.model, index);
            self.check(&format!("gradient/{}", param.name), &gradient, bound);
        }
    }

    /// The weights in f64; in f32 the norm of the change that the steps made.
    fn check_weights(&self) {
        for (index, param) in self.trained() {
            let weight = self.model.weight(index).expect("one rank holds everything");
            let (found, name) = (self.read(weight), &param.name);
            if self.precision == Precision::Fp64 {
                self.check(&format!("after/{name}"), &found, 1e-9);
                continue;
            }
            let expected = self.reference.get(&format!("f64/after/{name}"));
            let initial = self.reference.get(&format!("initial/{name}"));
            let error = distance(&found, expected) / distance(expected, initial);
            assert!(error <= 1e-3, "f32 {name} after all steps: {error:.2e}, allowed 1e-3");
        }
    }
}

fn check(path: &Path) {
    let reference = Reference::open(path);
    for (precision, bound) in [(Precision::Fp64, 1e-9), (Precision::Fp32, 2e-5)] {
        let mut bench = Bench::new(&reference, precision);
        (0..reference.sizes[0]).for_each(|step| bench.step(step, bound));
        bench.check_weights();
    }
}

fn check_family(name: &str) {
    check(&Path::new(FOLDER).join(format!("{name}.safetensors")));
}

#[test]
fn mixtral() {
    check_family("mixtral");
}

#[test]
fn qwen3_moe_with_a_dense_layer_biases_and_tied_embeddings() {
    check_family("qwen3_moe");
}

#[test]
fn olmoe_with_clamped_queries_keys_and_values() {
    check_family("olmoe");
}

/// GLM-4-MoE routes like DeepSeek-V3: sigmoid, correction, groups, shared experts, a scale.
#[test]
fn the_routing_of_deepseek_v3() {
    check_family("glm4_moe");
}

/// Sizes that divide nothing, one or all experts a token, other activations.
#[test]
fn models_of_random_shapes() {
    let folder = std::env::var_os("MOEJOB_PARITY_DATA")
        .map_or_else(|| Path::new(FOLDER).join("random"), PathBuf::from);
    let mut paths: Vec<PathBuf> = std::fs::read_dir(&folder)
        .unwrap_or_else(|error| panic!("{}: {error}", folder.display()))
        .map(|entry| entry.expect("an entry").path())
        .filter(|path| path.extension().is_some_and(|ending| ending == "safetensors"))
        .collect();
    paths.sort();
    assert!(!paths.is_empty(), "{} has no references", folder.display());
    for path in paths {
        println!("{}", path.display());
        check(&path);
    }
}
