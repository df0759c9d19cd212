//! The devices that compute a model, beside each other: this processor, and a GPU where there is
//! one.
#![allow(dead_code)]

use super::common::made::Made;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::state::snapshot::{cut, initialize};
use moejob_kernels::Device;
use moejob_protocol::config::{Backend, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Shape, Types};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{ModelConfig, QkNorm};

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Where {
    Processor,
    Gpu,
}

/// Widths are multiples of 64, which the kernels of GPUs want.
pub fn model() -> ModelConfig {
    let mut model = super::common::model();
    (model.hidden_size, model.head_dim, model.num_attention_heads) = (128, 64, 4);
    model.num_key_value_heads = 2;
    (model.experts.count, model.experts.intermediate_size) = (8, 64);
    model.qk_norm = QkNorm::PerHead;
    model.router.bias_update_rate = 0.0;
    model
}

pub fn engine(on: Where, model: &ModelConfig, training: &TrainingConfig) -> Engine {
    engine_with(on, model, training, |_| {})
}

/// The same with other kinds of numbers.
pub fn engine_with(
    on: Where,
    model: &ModelConfig,
    training: &TrainingConfig,
    change: impl Fn(&mut Types),
) -> Engine {
    engine_shaped(on, model, training, change, |_| {})
}

/// An engine whose memory is planned otherwise.
pub fn engine_shaped(
    on: Where,
    model: &ModelConfig,
    training: &TrainingConfig,
    change: impl Fn(&mut Types),
    reshape: impl Fn(&mut Shape),
) -> Engine {
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let mut training = training.clone();
    // More threads than that are no faster for models as small as those of tests.
    let threads = std::thread::available_parallelism().map_or(2, usize::from).min(8);
    let (device, backend) = match on {
        Where::Gpu => (Device::cuda(0, 0).expect("a GPU"), Backend::Cuda),
        Where::Processor => (Device::cpu(threads, 0).expect("threads"), Backend::Cpu),
    };
    training.compute.backend = backend;
    let micro_batches = training.global_batch_size / training.micro_batch_size;
    let mut types = Types::of(&training, micro_batches);
    change(&mut types);
    let mut shape = Shape::with_types(model, &layout, 0, &training, types);
    reshape(&mut shape);
    let model = Model::on(device, shape, model, &layout, 0, &training).expect("its kernels");
    let mut engine = Engine::new(model, &training, Links::solo());
    initialize(&mut engine.model, training.seed);
    engine
}

pub fn steps(on: Where, model: &ModelConfig, training: &TrainingConfig) -> Vec<StepSummary> {
    run(&mut engine(on, model, training), training)
}

pub fn run(engine: &mut Engine, training: &TrainingConfig) -> Vec<StepSummary> {
    let mut data = Made::new(&engine.model.config.clone(), training);
    let step = |step| engine.step(step, &mut data).unwrap_or_else(|error| panic!("{error}"));
    (0..training.steps).map(step).collect()
}

/// Masters and moments, as they are stored.
pub fn state(engine: &mut Engine) -> Vec<u8> {
    let mut bytes = Vec::new();
    cut(&mut engine.model, &mut bytes).expect("the device works");
    bytes
}

pub fn has_gpu() -> bool {
    let found = moejob_kernels::cuda::Gpu::open(0).is_ok();
    if !found {
        println!("no GPU: this processor alone");
    }
    found
}

/// What is compared with this processor.
pub fn places() -> Vec<Where> {
    has_gpu().then_some(Where::Gpu).into_iter().collect()
}

pub fn apart(a: f64, b: f64) -> f64 {
    (a - b).abs() / b.abs().max(1e-30)
}

/// The largest relative distances of losses and of norms.
pub fn distances(found: &[StepSummary], expected: &[StepSummary]) -> (f64, f64) {
    let most = |of: fn(&StepSummary) -> f64| {
        let pairs = found.iter().zip(expected);
        pairs.map(|(a, b)| apart(of(a), of(b))).fold(0.0, f64::max)
    };
    (most(|step| step.loss), most(|step| step.grad_norm))
}
