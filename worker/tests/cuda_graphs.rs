//! Steps whose parts are captured graphs, beside the same steps op by op: the same bits, whatever
//! comes between. Without a GPU the tests leave themselves out, with the reason. On a stub of the
//! driver they run all the same, as processes: its kernels do nothing, so that no bit is learned
//! there, but what is recorded, launched and counted is.

mod common;
#[path = "common/places.rs"]
mod places;
#[path = "../../kernels/tests/stubs/mod.rs"]
mod stubs;

use std::sync::atomic::AtomicBool;
use common::made::Made;
use moe_worker::data::{Batch, Batches, DataError};
use moe_worker::engine::graphs::{Captures, Use};
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::engine::trace::Trace;
use moe_worker::state::rank::RankState;
use moe_worker::state::slots::Memory;
use moe_worker::state::snapshot::initialize;
use moejob_kernels::{Device, StepPhase};
use moejob_protocol::checkpoint::Part;
use moejob_protocol::config::{Backend, Precision, Recompute, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Shape, Types};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{ModelConfig, QkNorm, Scoring};
use places::{model, state};
use std::time::Instant;

fn training(micro_batches: u32) -> TrainingConfig {
    let mut training = common::training();
    (training.micro_batch_size, training.global_batch_size) = (2, 2 * micro_batches);
    training.sequence_length = 64;
    (training.steps, training.adamw.learning_rate) = (8, 2e-3);
    (training.precision, training.compute.backend) = (Precision::Bf16, Backend::Cuda);
    training
}

/// None without a GPU.
fn engine(model: &ModelConfig, training: &TrainingConfig, wanted: Use) -> Option<Engine> {
    if let Err(error) = moejob_kernels::cuda::Gpu::open(0) {
        println!("no GPU, so nothing is captured: {error}");
        return None;
    }
    let device = Device::cuda(0, 0).expect("a GPU");
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let micro_batches = training.global_batch_size / training.micro_batch_size;
    let types = Types::of(training, micro_batches);
    let mut shape = Shape::with_types(model, &layout, 0, training, types);
    shape.documents = true;
    let model = Model::on(device, shape, model, &layout, 0, training).expect("its kernels");
    let mut engine = Engine::new(model, training, Links::solo());
    engine.use_graphs(wanted);
    initialize(&mut engine.model, training.seed);
    Some(engine)
}

/// As a job does: a step is begun before the numbers of the one before it are read. `between` is
/// what comes between two steps.
fn run(
    engine: &mut Engine,
    batches: &mut impl Batches,
    steps: std::ops::Range<u64>,
    mut between: impl FnMut(&mut Engine, u64),
) -> Vec<StepSummary> {
    let mut next = steps.start;
    let mut summaries = Vec::new();
    for step in steps.clone() {
        while next < steps.end && next <= step + 1 {
            engine.begin(next, batches).unwrap_or_else(|error| panic!("step {next}: {error}"));
            next += 1;
        }
        let summary = engine.end(batches).unwrap_or_else(|error| panic!("step {step}: {error}"));
        summaries.push(summary);
        between(engine, step);
    }
    summaries
}

/// What is left of two runs, op by op and by graphs.
fn both(
    name: &str,
    model: &ModelConfig,
    training: &TrainingConfig,
    with: impl Fn(&mut Engine) -> Vec<StepSummary>,
) -> Option<Captures> {
    let mut single = engine(model, training, Use::Off)?;
    let mut captured = engine(model, training, Use::On)?;
    let (expected, found) = (with(&mut single), with(&mut captured));
    assert_eq!(found, expected, "{name}");
    assert!(state(&mut captured) == state(&mut single), "{name}: weights or moments differ");
    assert_eq!(single.captures(), Captures::default(), "{name}");
    let traffic = [&single, &captured].map(|engine| engine.model.device.traffic());
    assert_eq!(traffic[0], traffic[1], "{name}: the host has had more or less to do");
    let captures = captured.captures();
    println!("{name}: {captures:?}");
    captured.leave().expect("the device works");
    assert_eq!(captured.captures().graphs, 0, "{name}: they end with the attempt");
    Some(captures)
}

/// One of each part that differs, and as many launches as there are parts but for the first of
/// each: of 8 steps.
fn expected(micro_batches: u64) -> (usize, u64) {
    // Of backward the first, the last, and those between: the last one's sums leave.
    let graphs = 1 + micro_batches.min(3) + 2;
    (graphs as usize, 8 * (2 * micro_batches + 2) - graphs)
}

#[test]
fn graphs_have_the_bits_of_single_ops() {
    for micro_batches in [1, 2, 4] {
        for precision in [Precision::Bf16, Precision::Fp32, Precision::Tf32, Precision::Fp16] {
            let (model, training) = (model(), training(micro_batches));
            let training = TrainingConfig { precision, ..training };
            let name = format!("{micro_batches} micro-batches in {precision:?}");
            let with = |engine: &mut Engine| {
                let mut data = Made::new(&engine.model.config.clone(), &training);
                run(engine, &mut data, 0..training.steps, |_, _| {})
            };
            let Some(captures) = both(&name, &model, &training, with) else { return };
            let found = (captures.graphs, captures.repeats);
            assert_eq!(found, expected(u64::from(micro_batches)), "{name}");
            assert!(captures.launches > 80, "{name}: {captures:?}");
        }
    }
}

#[test]
fn graphs_of_other_models_have_the_bits_of_single_ops() {
    let mut dense = model();
    (dense.num_hidden_layers, dense.dense_layers, dense.experts.shared) = (3, vec![0], 1);
    (dense.dense_intermediate_size, dense.tie_word_embeddings) = (192, false);
    (dense.qk_norm, dense.attention_bias) = (QkNorm::None, true);
    let mut corrected = model();
    (corrected.qk_norm, corrected.clip_qkv) = (QkNorm::Full, 0.5);
    let router = &mut corrected.router;
    (router.scoring, router.bias, router.bias_update_rate) = (Scoring::Sigmoid, true, 0.01);
    for (name, model) in [("dense, shared, biases", dense), ("clamp, corrections", corrected)] {
        for recompute in [Recompute::None, Recompute::Experts, Recompute::Full] {
            let training = TrainingConfig { recompute, ..training(2) };
            let name = format!("{name}, {recompute:?}");
            let with = |engine: &mut Engine| {
                let mut data = Made::new(&engine.model.config.clone(), &training);
                run(engine, &mut data, 0..training.steps, |_, _| {})
            };
            let Some(captures) = both(&name, &model, &training, with) else { return };
            assert_eq!((captures.graphs, captures.repeats), expected(2), "{name}");
        }
    }
}

/// Batches of which some keep documents apart and others do not: other kernels, other buffers.
struct Documents(Made, Batch);

impl Batches for Documents {
    fn micro_batch(&mut self, step: u64, index: u32) -> Result<&Batch, DataError> {
        let Documents(made, batch) = self;
        let of = made.micro_batch(step, index)?;
        (batch.ids, batch.targets) = (of.ids.clone(), of.targets.clone());
        let starts = (0..batch.ids.len() as u32).map(|token| token % 64 / 24 * 24).collect();
        batch.starts = ((step + u64::from(index)) % 3 > 0).then_some(starts);
        Ok(batch)
    }
}

#[test]
fn documents_that_are_kept_apart_now_and_then_have_graphs_of_their_own() {
    let (model, training) = (model(), training(2));
    let with = |engine: &mut Engine| {
        let made = Made::new(&engine.model.config.clone(), &training);
        let mut data = Documents(made, Batch::new(128));
        run(engine, &mut data, 0..training.steps, |_, _| {})
    };
    let Some(captures) = both("documents", &model, &training, with) else { return };
    assert_eq!(captures.graphs, 2 * (1 + 2) + 2, "{captures:?}");
}

/// A step that is skipped, and the one behind it, are done again from their graphs.
#[test]
fn steps_that_are_done_again_have_the_bits_of_single_ops() {
    for precision in [Precision::Bf16, Precision::Fp16] {
        let (model, training) = (model(), TrainingConfig { precision, ..training(2) });
        let with = |engine: &mut Engine| {
            let spoils: &[u64] = if precision == Precision::Fp16 { &[3, 3, 5] } else { &[3, 5] };
            spoils.iter().for_each(|step| engine.spoil(*step));
            let mut data = Made::new(&engine.model.config.clone(), &training);
            let found = run(engine, &mut data, 0..training.steps, |_, _| {});
            assert!(found.iter().all(|step| step.non_finite.is_none()));
            found
        };
        let name = format!("done again in {precision:?}");
        let Some(captures) = both(&name, &model, &training, with) else { return };
        // Two steps were skipped, and the ones behind them.
        assert!(captures.repeats > expected(2).1 + 3 * 6, "{captures:?}");
    }
}

/// State that is read, a shard that leaves beside a step, a trace, a diagnosis.
#[test]
fn what_comes_between_steps_changes_no_bit_of_graphs() {
    let (model, training) = (model(), training(2));
    let folder = tempfile::tempdir().expect("a folder");
    let with = |engine: &mut Engine| {
        let mut data = Made::new(&engine.model.config.clone(), &training);
        let mut found = run(engine, &mut data, 0..2, |_, _| {});
        let before = state(engine);
        let memory = Memory::default();
        let gpu = engine.model.device.as_cuda().expect("a GPU").gpu().clone();
        memory.prepare_pinned(&gpu, 0, before.len(), &AtomicBool::new(false));
        let slot = memory.fill(1, 2, 0, before.len()).expect("memory").expect("a slot");
        engine.model.begin_cut(slot);
        found.extend(run(engine, &mut data, 2..3, |_, _| {}));
        let (slot, _) = engine.model.end_cut().expect("a device").expect("on its way");
        assert!(slot.complete()[..] == before[..], "what left is not the state before the step");
        engine.trace(Trace::new(folder.path().join("trace.json"), 0, 0));
        found.extend(run(engine, &mut data, 3..6, |_, _| {}));
        engine.take_traced().expect("three steps").expect("storage");
        assert_eq!(engine.diagnose(6, &mut data).expect("a device"), None);
        found.extend(run(engine, &mut data, 6..8, |_, _| {}));
        found
    };
    let Some(captures) = both("between", &model, &training, with) else { return };
    // The traced steps were enqueued op by op.
    assert_eq!(captures.repeats, expected(2).1 - 3 * 6, "{captures:?}");
}

/// An attempt that ends, and one that goes on from its state: no graph is left from one to the
/// other.
#[test]
fn an_attempt_that_is_resumed_captures_anew() {
    let (model, training) = (model(), training(2));
    let Some(mut whole) = engine(&model, &training, Use::Off) else { return };
    let mut data = Made::new(&model, &training);
    let expected = run(&mut whole, &mut data, 0..8, |_, _| {});
    let mut first = engine(&model, &training, Use::On).expect("as above");
    let mut found = run(&mut first, &mut data, 0..5, |_, _| {});
    let pieces = everything(&mut first.model);
    // One whose last step is under way is left like any other.
    first.begin(5, &mut data).unwrap_or_else(|error| panic!("{error}"));
    first.leave().expect("the device works");
    assert_eq!(first.captures().graphs, 0);
    drop(first);
    let mut second = engine(&model, &training, Use::On).expect("as above");
    for (part, index, elements, bytes) in &pieces {
        second.model.write(*part, *index, elements.clone(), bytes);
    }
    found.extend(run(&mut second, &mut data, 5..8, |_, _| {}));
    assert!(second.captures().repeats > 0);
    // All but the count of updates, which is that of an attempt.
    let bits = |step: &StepSummary| {
        let numbers = [step.loss, step.aux_loss, step.z_loss, step.grad_norm, step.learning_rate];
        (numbers.map(f64::to_bits), step.loads.clone())
    };
    let [found, expected] = [found, expected].map(|run| run.iter().map(bits).collect::<Vec<_>>());
    assert_eq!(found, expected);
    assert!(state(&mut second) == state(&mut whole), "weights or moments differ");
}

/// A library is loaded once a process, so each test is one.
#[test]
fn on_a_stub_the_same_is_recorded_and_launched() {
    const VERSION: u32 = 12_080;
    // Stubs are made from the sources of the bindings, which cargo finds.
    let here = [env!("CARGO_MANIFEST_DIR"), env!("CARGO")].map(std::path::Path::new);
    if !here.iter().all(|path| path.exists()) {
        println!("skipped: this test was built on another machine");
        return;
    }
    let folder = tempfile::tempdir().expect("a folder");
    let stubs = stubs::Stubs::make(&stubs::cudarc::Cudarc::find(), &[VERSION], folder.path());
    let libraries = stubs.folder("libraries", [VERSION; 3]);
    for test in [
        "graphs_have_the_bits_of_single_ops",
        "graphs_of_other_models_have_the_bits_of_single_ops",
        "documents_that_are_kept_apart_now_and_then_have_graphs_of_their_own",
        "what_comes_between_steps_changes_no_bit_of_graphs",
        "an_attempt_that_is_resumed_captures_anew",
        "where_the_hosts_time_shows_is_found_out",
    ] {
        let output = std::process::Command::new(std::env::current_exe().expect("this test"))
            .args(["--exact", test, "--nocapture"])
            .env("LD_LIBRARY_PATH", &libraries)
            .env("MOEJOB_CUBIN_CACHE", folder.path().join("cubins"))
            .env_remove("MOEJOB_CUDA_ARCH")
            .env_remove("CUDA_VISIBLE_DEVICES")
            .output()
            .expect("this test as a process");
        let told = [output.stdout, output.stderr].concat();
        let told = String::from_utf8_lossy(&told);
        assert!(output.status.success() && told.contains("1 passed"), "{test}: {told}");
        assert!(!told.contains("no GPU"), "{test}: {told}");
    }
}

type Piece = (Part, usize, std::ops::Range<u64>, Vec<u8>);

fn everything(model: &mut Model) -> Vec<Piece> {
    let (params, size) = (model.table().params.len(), model.table().stored.size());
    let mut pieces = Vec::new();
    for (index, part) in (0..params).flat_map(|index| Part::ALL.map(|part| (index, part))) {
        let elements = model.table().needed(part, index);
        let mut bytes = vec![0; (elements.end - elements.start) as usize * size];
        model.read(part, index, elements.clone(), &mut bytes);
        pieces.push((part, index, elements, bytes));
    }
    model.finish().expect("the device works");
    pieces
}

/// Nothing is captured before it is known whether the host's time shows; then all or nothing is.
#[test]
fn where_the_hosts_time_shows_is_found_out() {
    let (model, training) = (model(), training(2));
    let Some(mut found) = engine(&model, &training, Use::Auto) else { return };
    let mut data = Made::new(&model, &training);
    let mut seen = Vec::new();
    run(&mut found, &mut data, 0..16, |engine, _| seen.push(engine.captures().graphs));
    println!("a small model: graphs after each step {seen:?}");
    assert!(seen[..6].iter().all(|graphs| *graphs == 0), "{seen:?}");
    assert!(matches!(seen[15], 0 | 5), "{seen:?}");
}

/// Times of the model of `tests/gpu/jobs`, for a person to read.
#[test]
fn times_of_a_small_model() {
    let mut model = model();
    (model.hidden_size, model.num_hidden_layers, model.head_dim) = (256, 4, 64);
    (model.num_key_value_heads, model.qk_norm) = (4, QkNorm::Full);
    (model.experts.count, model.experts.per_token) = (16, 4);
    model.experts.intermediate_size = 128;
    let mut training = training(4);
    (training.micro_batch_size, training.global_batch_size) = (4, 16);
    training.sequence_length = 256;
    for wanted in [Use::Off, Use::On, Use::Auto, Use::Off, Use::On] {
        let Some(mut engine) = engine(&model, &training, wanted) else { return };
        let mut data = Made::new(&model, &training);
        run(&mut engine, &mut data, 0..20, |_, _| {});
        (engine.take_pace(), engine.take_phases());
        let began = Instant::now();
        run(&mut engine, &mut data, 20..220, |_, _| {});
        let each = began.elapsed().as_secs_f64() * 1e3 / 200.0;
        let pace = engine.take_pace().expect("200 steps");
        let (host, device) = (pace.host * 1e3, pace.device * 1e3);
        let phases = engine.take_phases().map(|seconds| seconds * 1e3 / 200.0);
        let of = |phase: StepPhase| phases[phase as usize];
        println!(
            "{wanted:?}: {each:.3} ms a step, {:.1} steps/s; the host enqueues it in {host:.3}, \
             the device computes it in {device:.3} (forward {:.3}, backward {:.3}, numbers {:.3}, \
             update {:.3}, data {:.3}); {:?}",
            1e3 / each,
            of(StepPhase::Forward),
            of(StepPhase::Backward),
            of(StepPhase::Numbers),
            of(StepPhase::Update),
            of(StepPhase::Data),
            engine.captures(),
        );
        assert!(host > 0.0 && device > 0.0);
    }
}
