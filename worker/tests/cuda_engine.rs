//! A step whose gradients are summed in buckets and whose mixture layers are one op each, beside
//! the step by a tree of leaves, whose parts are compared with float64: on this processor always,
//! and on the GPU where there is one.

mod common;

use moe_worker::data::{Batch, Batches, DataError};
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::state::snapshot::initialize;
use moejob_kernels::{DType, Device, HeadDesc, HeadPlan};
use moejob_protocol::config::{Backend, GradientDtype, MomentDtype, Precision, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Shape, Types};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{ModelConfig, QkNorm, Scoring};
use moejob_protocol::workspace::head_bytes;

/// Tokens that follow from each other, so that there is something to learn.
struct Made {
    batch: Batch,
    vocabulary: u32,
    sequence: usize,
}

impl Made {
    fn new(model: &ModelConfig, training: &TrainingConfig) -> Made {
        let sequence = training.sequence_length as usize;
        let tokens = training.micro_batch_size as usize * sequence;
        Made { batch: Batch::new(tokens), vocabulary: model.vocab_size, sequence }
    }
}

impl Batches for Made {
    fn micro_batch(&mut self, step: u64, index: u32) -> Result<&Batch, DataError> {
        let mut state = (step * 1009 + u64::from(index) * 31 + 7) as u32;
        let mut next = |before: u32| {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            let jump = if state >> 28 == 0 { state >> 8 } else { 1 };
            (before.wrapping_mul(5).wrapping_add(jump)) % self.vocabulary
        };
        let rows = self.batch.ids.len() / self.sequence;
        for row in 0..rows {
            let mut token = next(row as u32);
            for at in row * self.sequence..(row + 1) * self.sequence {
                self.batch.ids[at] = token;
                token = next(token);
                self.batch.targets[at] = token;
            }
        }
        Ok(&self.batch)
    }
}

/// Widths are multiples of 64, which the kernels of GPUs want.
fn model() -> ModelConfig {
    let mut model = common::model();
    (model.hidden_size, model.head_dim, model.num_attention_heads) = (128, 64, 4);
    model.num_key_value_heads = 2;
    (model.experts.count, model.experts.intermediate_size) = (8, 64);
    model.qk_norm = QkNorm::PerHead;
    model.router.bias_update_rate = 0.0;
    model
}

fn training() -> TrainingConfig {
    let mut training = common::training();
    (training.global_batch_size, training.micro_batch_size) = (4, 2);
    training.sequence_length = 64;
    (training.steps, training.adamw.learning_rate) = (20, 2e-3);
    training
}

/// Which code computes, and on what.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Where {
    Tree,
    Buckets,
    Gpu,
}

fn engine(on: Where, model: &ModelConfig, training: &TrainingConfig) -> Engine {
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let mut training = training.clone();
    let (device, backend) = match on {
        Where::Gpu => (Device::cuda(0, 0).expect("a GPU"), Backend::Cuda),
        _ => (Device::cpu(2, 0).expect("threads"), Backend::Cpu),
    };
    training.compute.backend = backend;
    let micro_batches = training.global_batch_size / training.micro_batch_size;
    let types = match on {
        Where::Tree => Types::of(&training, micro_batches),
        _ => Types::buckets(&training, micro_batches),
    };
    let shape = Shape::with_types(model, &layout, 0, &training, types);
    let model = Model::on(device, shape, model, &layout, 0, &training).expect("its kernels");
    let mut engine = Engine::new(model, &training, Links::solo());
    initialize(&mut engine.model, training.seed);
    engine
}

fn steps(on: Where, model: &ModelConfig, training: &TrainingConfig) -> Vec<StepSummary> {
    let mut engine = engine(on, model, training);
    let mut data = Made::new(model, training);
    let step = |step| engine.step(step, &mut data).unwrap_or_else(|error| panic!("{error}"));
    (0..training.steps).map(step).collect()
}

fn has_gpu() -> bool {
    let found = moejob_kernels::cuda::Gpu::open(0).is_ok();
    if !found {
        println!("no GPU: this processor alone");
    }
    found
}

/// The places that are compared with the tree.
fn places() -> Vec<Where> {
    let gpu = has_gpu().then_some(Where::Gpu);
    [Where::Buckets].into_iter().chain(gpu).collect()
}

fn apart(a: f64, b: f64) -> f64 {
    (a - b).abs() / b.abs().max(1e-30)
}

/// The largest relative distances of losses and of norms.
fn distances(found: &[StepSummary], expected: &[StepSummary]) -> (f64, f64) {
    let most = |of: fn(&StepSummary) -> f64| {
        let pairs = found.iter().zip(expected);
        pairs.map(|(a, b)| apart(of(a), of(b))).fold(0.0, f64::max)
    };
    (most(|step| step.loss), most(|step| step.grad_norm))
}

fn check(name: &str, model: &ModelConfig, training: &TrainingConfig) {
    let expected = steps(Where::Tree, model, training);
    let (first, last) = (expected[0].loss, expected[expected.len() - 1].loss);
    assert!(last < first - 0.1, "{name}: nothing is learned: {first} to {last}");
    for on in places() {
        let found = steps(on, model, training);
        assert!(found.iter().all(|step| step.non_finite.is_none()), "{name} {on:?}");
        // Where a token chose another expert, by a last bit, both are right from there on.
        let alike = found.iter().zip(&expected).take_while(|(a, b)| a.loads == b.loads).count();
        assert!(alike >= 5, "{name} {on:?}: loads differ from step {alike} on");
        let (losses, norms) = distances(&found[..alike], &expected[..alike]);
        let (all, _) = distances(&found, &expected);
        println!("{name} {on:?}: losses {losses:.1e}, norms {norms:.1e} apart, then {all:.1e}");
        assert!(losses < 1e-5 && norms < 1e-3, "{name} {on:?}: {losses:e} {norms:e}");
        assert!(all < 1e-3, "{name} {on:?}: {all:e}");
        let (found, expected) = (&found[0], &expected[0]);
        assert_eq!(found.loads, expected.loads, "{name} {on:?}");
        for (found, expected) in
            [(found.aux_loss, expected.aux_loss), (found.z_loss, expected.z_loss)]
        {
            assert!(apart(found, expected) < 1e-5, "{name} {on:?}: {found} for {expected}");
        }
    }
}

#[test]
fn the_same_losses_as_by_the_tree() {
    check("plain", &model(), &training());
}

#[test]
fn other_models() {
    let mut other = model();
    (other.dense_layers, other.experts.shared) = (vec![0], 1);
    (other.dense_intermediate_size, other.tie_word_embeddings) = (192, false);
    (other.qk_norm, other.attention_bias) = (QkNorm::None, true);
    check("dense, shared, biases", &other, &training());
    let mut other = model();
    other.qk_norm = QkNorm::Full;
    other.clip_qkv = 0.5;
    check("norm of all heads, clamp", &other, &training());
    let mut other = model();
    let router = &mut other.router;
    (router.scoring, router.bias, router.bias_update_rate) = (Scoring::Sigmoid, true, 0.01);
    (router.groups, router.topk_groups, router.scale) = (4, 2, 2.5);
    check("sigmoid, corrections, groups", &other, &training());
}

#[test]
fn sixteen_bits_stay_near() {
    if !has_gpu() {
        return;
    }
    let expected = steps(Where::Tree, &model(), &training());
    for (precision, most) in
        [(Precision::Tf32, 2e-3), (Precision::Bf16, 2e-2)]
    {
        for (moments, gradients) in [
            (MomentDtype::Fp32, GradientDtype::Fp32),
            (MomentDtype::Fp32, GradientDtype::Bf16),
            (MomentDtype::Bf16, GradientDtype::Auto),
        ] {
            let mut training = training();
            training.precision = precision;
            training.compute.moment_dtype = moments;
            training.compute.gradient_dtype = gradients;
            let found = steps(Where::Gpu, &model(), &training);
            let (losses, norms) = distances(&found, &expected);
            println!("{precision:?} {moments:?} {gradients:?}: {losses:.1e} {norms:.1e} apart");
            assert!(losses < most, "{precision:?} {moments:?} {gradients:?}: {losses:e}");
            let again = steps(Where::Gpu, &model(), &training);
            assert_eq!(again, found, "{precision:?}: two runs differ");
        }
    }
}

#[test]
fn what_is_not_finite_changes_nothing() {
    for on in places() {
        let (model, training) = (model(), training());
        let mut broken = engine(on, &model, &training);
        let mut data = Made::new(&model, &training);
        broken.spoil(1);
        let found: Vec<StepSummary> = [0, 1, 1, 2]
            .map(|step| broken.step(step, &mut data).unwrap_or_else(|error| panic!("{error}")))
            .to_vec();
        assert!(found[1].non_finite.is_some(), "{on:?}: {:?}", found[1]);
        let expected = &steps(on, &model, &training)[..3];
        let whole = [found[0].clone(), found[2].clone(), found[3].clone()];
        assert_eq!(&whole, expected, "{on:?}: a skipped step left something behind");
    }
}

/// The plan reserves for a head what the kernels lay out.
#[test]
fn a_planned_head_is_as_large_as_its_scratch() {
    let cpu = Device::cpu(1, 0).expect("a thread");
    for (tokens, vocab) in [(100, 50257), (256, 256), (16384, 50304), (4096, 151_936), (3, 7)] {
        for (element, on_gpu) in [(DType::F32, false), (DType::F64, false), (DType::Bf16, true)] {
            let desc = HeadDesc { element, tokens, dim: 64, vocab };
            let plan = if on_gpu { HeadPlan::cuda(&desc) } else { cpu.head_plan(&desc) };
            let bytes = element.size() as u64;
            let planned = head_bytes(tokens as u64, vocab as u64, bytes, on_gpu);
            assert_eq!(planned, plan.scratch_bytes as u64, "{desc:?}");
        }
    }
}
