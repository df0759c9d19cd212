//! The loss of weights, measured where parameters lie in buckets: on this processor in every run,
//! and on a GPU where there is one, beside what processors measure.

mod common;

use common::{Job, fit_gpus, has_gpu, trainers};
use moe_worker::data::Corpus;
use moe_worker::engine::computer::Computer;
use moe_worker::engine::eval::{Evaluation, evaluate, measure};
use moe_worker::engine::model::Model;
use moe_worker::hf::{Weights, load};
use moe_worker::state::rank::RankState;
use moejob_kernels::Device;
use moejob_protocol::buffers::Buffers;
use moejob_protocol::config::{Precision, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Kind, Planner, Rows, Shape};
use moejob_protocol::mesh::Mesh;

const LENGTH: u32 = 32;
const PROCESSORS: Computer = Computer::Processors { threads: 2, precision: Precision::Fp32 };

/// A job of some steps, and what it has learned.
fn trained() -> (Job, Weights) {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(1, 1)));
    fit_gpus(&mut job.config.model);
    job.config.training.sequence_length = LENGTH;
    job.run(&mut trainers(1), None);
    let weights = Weights::open(&job.location()).expect("a checkpoint");
    (job, weights)
}

fn by(computer: Computer, (job, weights): &(Job, Weights), apart: bool) -> Evaluation {
    let mut data = job.config.data.clone();
    (data.validation.fraction, data.reset_at_boundaries) = (0.0, apart);
    let mut told = 0;
    let mut progress = |done, _| told = done;
    let found = evaluate(weights, &data, LENGTH, computer, &mut progress).expect("a loss");
    assert_eq!(told, found.tokens);
    found
}

fn distance(found: Evaluation, expected: Evaluation) -> f64 {
    assert_eq!((found.tokens, found.sequences), (expected.tokens, expected.sequences));
    (found.loss - expected.loss).abs() / expected.loss
}

/// As a GPU lays it out, on this processor: the last micro-batch is padded.
#[test]
fn in_buckets_the_loss_is_the_same() {
    let trained = trained();
    let expected = by(PROCESSORS, &trained, false);
    let (job, weights) = &trained;
    let training = TrainingConfig {
        global_batch_size: 7,
        micro_batch_size: 7,
        ..job.config.training.clone()
    };
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let config = weights.model();
    let shape = Shape::new(config, &layout, 0, &training).measuring();
    let device = Device::cpu(2, 0).expect("threads");
    let model = Model::on(device, shape, config, &layout, 0, &training);
    let mut model = model.expect("an arena");
    load(weights, &mut model).expect("weights");
    model.finish().expect("a processor");
    let mut data = job.config.data.clone();
    data.validation.fraction = 0.0;
    let one = TrainingConfig { global_batch_size: 1, micro_batch_size: 1, ..training };
    let mut corpus = Corpus::open(&data, &one, config.vocab_size).expect("text");
    assert_ne!(corpus.windows() % 7, 0, "a whole last micro-batch shows nothing");
    let found = measure(&mut model, &mut corpus, &mut |_, _| {}).expect("a loss");
    let apart = distance(found, expected);
    assert!(apart < 1e-6, "{apart:e}");
}

/// What is measured needs room for weights, and none for gradients, moments and masters.
#[test]
fn nothing_of_training_has_a_place() {
    struct Sizes(Vec<(&'static str, u64)>);
    impl Planner for Sizes {
        type Buffer = ();
        fn part(&mut self, name: &'static str) {
            self.0.push((name, 0));
        }
        fn alloc(&mut self, kind: Kind, rows: Rows, width: u64) {
            let rows = if let Rows::Fixed(rows) = rows { rows } else { 1 };
            self.0.last_mut().expect("a part").1 += rows * width * kind.bytes();
        }
        fn alloc_on_host(&mut self, name: &'static str, _: Kind, len: u64) {
            assert_eq!(len, 0, "{name}");
        }
        fn part_of(&mut self, (): (), _: u64, _: u64) {}
    }
    let mut config = common::model();
    fit_gpus(&mut config);
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    for precision in [Precision::Fp32, Precision::Bf16, Precision::Fp16] {
        let training = Computer::Gpu { precision }.measuring(&config, LENGTH);
        let shape = Shape::new(&config, &layout, 0, &training).measuring();
        let mut sizes = Sizes(Vec::new());
        let _ = Buffers::plan(&config, &shape, &mut sizes);
        for (name, bytes) in sizes.0 {
            let of_training = ["gradients", "moments", "masters"].contains(&name);
            assert!(!of_training || bytes == 0, "{precision:?}: {bytes} bytes of {name}");
        }
    }
}

#[test]
fn a_gpu_measures_what_processors_do() {
    if !has_gpu() {
        return;
    }
    let trained = trained();
    for documents_apart in [false, true] {
        let expected = by(PROCESSORS, &trained, documents_apart);
        for (precision, most) in [
            (Precision::Fp32, 1e-5),
            (Precision::Tf32, 2e-3),
            (Precision::Bf16, 2e-2),
            (Precision::Fp16, 4e-3),
        ] {
            let found = by(Computer::Gpu { precision }, &trained, documents_apart);
            let apart = distance(found, expected);
            println!("{precision:?}, documents apart {documents_apart}: {apart:.1e} apart");
            assert!(apart < most, "{precision:?}: {apart:e}");
        }
    }
}
