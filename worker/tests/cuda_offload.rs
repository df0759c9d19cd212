//! Optimizer state on the host: the same bits as on the device, through snapshots, checkpoints and
//! every way of going on, for less of the device's memory. What needs a GPU is left out without
//! one.

mod common;

use common::made::Made;
use common::{Job, bits, fit_gpus, has_gpu, member, newest_held, sources, state_hash, trainers};
use moe_worker::attempt::api::{AttemptEnd, Control, TrainerEvent};
use moe_worker::attempt::trainer::Trainer;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::gang::comm::Comm;
use moe_worker::state::rank::RankState;
use moe_worker::state::snapshot::initialize;
use moejob_kernels::Device;
use moejob_protocol::WorkerConfig;
use moejob_protocol::checkpoint::{Part, directory_name};
use moejob_protocol::config::{Backend, MomentDtype, Offload, Precision, Resume};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{RankMemory, Shape, rank_memory};
use moejob_protocol::mesh::Mesh;
use std::time::Instant;

const STEPS: u64 = 12;
/// Some steps behind a snapshot.
const CUT: u64 = 8;

fn job(backend: Backend, offload: Offload) -> Job {
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let mut job = Job::new(match backend {
        Backend::Cuda => layout,
        Backend::Cpu => layout,
    });
    fit_gpus(&mut job.config.model);
    let training = &mut job.config.training;
    (training.steps, training.sequence_length) = (STEPS, 32);
    (training.compute.backend, training.compute.offload) = (backend, offload);
    job.config.recovery.memory_every_steps = 3;
    job.config.checkpoint.every_steps = 4;
    job
}

fn complete(job: &Job) -> Vec<[u64; 5]> {
    let (ends, reports) = job.run(&mut trainers(1), None);
    assert_eq!(ends, [AttemptEnd::Completed { step: STEPS }]);
    bits(&reports)
}

fn last_state(job: &Job) -> String {
    state_hash(&job.location().join(directory_name(STEPS)))
}

/// A processor's state lies on the host already.
#[test]
fn on_processors_it_changes_nothing() {
    let [plain, offloaded] =
        [Offload::None, Offload::Host].map(|offload| job(Backend::Cpu, offload));
    assert_eq!(complete(&offloaded), complete(&plain));
    assert_eq!(last_state(&offloaded), last_state(&plain));
    assert_eq!(planned(&offloaded), planned(&plain));
    assert!(planned(&offloaded).offloaded.is_empty());
}

fn planned(job: &Job) -> RankMemory {
    let config = &job.config;
    rank_memory(&config.model, &config.layout, 0, &config.training, &config.recovery, 4, None)
}

/// Everything of a model as snapshots read it: all parts of all parameters.
fn everything(model: &mut Model) -> Vec<u8> {
    let mut all = Vec::new();
    for (part, index, elements, len) in pieces(model) {
        let start = all.len();
        all.resize(start + len, 0);
        model.read(part, index, elements, &mut all[start..]);
    }
    model.finish().expect("a device that works");
    all
}

/// Part, parameter, elements, and bytes as they are stored.
fn pieces(model: &Model) -> Vec<(Part, usize, std::ops::Range<u64>, usize)> {
    let table = model.table();
    let each = |index| Part::ALL.map(|part| (part, index, table.needed(part, index)));
    let all = (0..table.params.len()).flat_map(each);
    let size = table.stored.size();
    all.map(|(part, index, of)| (part, index, of.clone(), (of.end - of.start) as usize * size))
        .collect()
}

/// As a GPU lays it out, on this processor, with what would be on the host in a part of its own.
/// Processors have no experts of 16 bits, but can keep the state of a model without any.
fn in_buckets(precision: Precision, moments: MomentDtype, offloads: bool) -> Engine {
    let mut job = job(Backend::Cpu, Offload::None);
    if precision != Precision::Fp32 {
        job.config.model.dense_layers = (0..job.config.model.num_hidden_layers).collect();
    }
    let (config, training) = (&job.config.model, &mut job.config.training);
    (training.precision, training.compute.moment_dtype) = (precision, moments);
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let shape = Shape { offloads, ..Shape::new(config, &layout, 0, training) };
    let device = Device::cpu(2, 0).expect("threads");
    let model = Model::on(device, shape, config, &layout, 0, training).expect("an arena");
    assert_eq!(model.offloaded_bytes() > 0, offloads);
    let mut engine = Engine::new(model, training, Links::solo());
    initialize(&mut engine.model, training.seed);
    engine
}

/// What is written is read again, and has the bits that it has on the device.
#[test]
fn every_kind_of_state_is_read_and_written_as_on_the_device() {
    for (precision, moments) in [
        (Precision::Fp32, MomentDtype::Fp32),
        (Precision::Bf16, MomentDtype::Fp32),
        (Precision::Bf16, MomentDtype::Bf16),
        (Precision::Fp16, MomentDtype::Fp32),
    ] {
        let [plain, offloaded] = [false, true].map(|offloads| {
            let model = &mut in_buckets(precision, moments, offloads).model;
            let first = everything(model);
            let mut written = Vec::new();
            for (part, index, elements, len) in pieces(model) {
                let value = |at: usize| (index * 7 + part as usize * 3 + at % 251) as f32 / 64.0;
                let bytes: Vec<u8> = (0..len / 4).flat_map(|at| value(at).to_le_bytes()).collect();
                model.write(part, index, elements, &bytes);
                written.extend(bytes);
            }
            let read = everything(model);
            if moments == MomentDtype::Fp32 {
                assert!(read == written, "{precision:?}: something else than was written");
            }
            model.clear_moments();
            (first, read, everything(model))
        });
        assert!(plain == offloaded, "{precision:?} {moments:?}");
        assert!(plain.0 != plain.1 && plain.1 != plain.2, "{precision:?} {moments:?}");
    }
}

#[test]
fn steps_in_buckets_have_the_bits_of_those_on_the_device() {
    let steps = |offloads| {
        let mut engine = in_buckets(Precision::Fp32, MomentDtype::Fp32, offloads);
        let config = engine.model.config.clone();
        let mut data = Made::new(&config, &job(Backend::Cpu, Offload::None).config.training);
        let steps: Vec<StepSummary> =
            (0..4).map(|step| engine.step(step, &mut data).expect("a step")).collect();
        (steps, everything(&mut engine.model))
    };
    assert!(steps(true) == steps(false));
}

/// What is spared on the device is what lies on the host, part by part.
#[test]
fn a_plan_counts_it_on_the_host_by_name() {
    for (precision, moments, masters) in [
        (Precision::Fp32, MomentDtype::Fp32, 0),
        (Precision::Bf16, MomentDtype::Fp32, 2),
        (Precision::Bf16, MomentDtype::Bf16, 2),
        (Precision::Fp16, MomentDtype::Fp32, 4),
    ] {
        let [plain, offloaded] = [Offload::None, Offload::Host].map(|offload| {
            let mut job = job(Backend::Cuda, offload);
            job.config.training.precision = precision;
            job.config.training.compute.moment_dtype = moments;
            planned(&job)
        });
        let of = |memory: &RankMemory, name: &str| {
            let all = memory.parts.iter().chain(&memory.offloaded);
            all.filter(|part| part.name == name).map(|part| part.bytes).sum::<u64>()
        };
        assert_eq!(plain.offloaded_bytes(), 0);
        for name in ["masters", "moments"] {
            assert_eq!(of(&offloaded, name), 0, "{precision:?}");
            assert_eq!(of(&offloaded, &format!("offloaded {name}")), of(&plain, name));
        }
        assert_eq!(of(&plain, "masters") > 0, masters > 0, "{precision:?}");
        for (plain, less) in [
            (plain.balanced, offloaded.balanced),
            (plain.committed, offloaded.committed),
            (plain.worst, offloaded.worst),
        ] {
            assert_eq!(plain, less + offloaded.offloaded_bytes(), "{precision:?} {moments:?}");
        }
    }
}

/// Undisturbed; stopped, and gone on from its checkpoint with the other choice; cut off, and gone
/// on from its snapshot.
#[test]
fn every_way_of_going_on_gives_the_bits_of_a_state_on_the_device() {
    if !has_gpu() {
        return;
    }
    for (precision, moments) in [
        (Precision::Fp32, MomentDtype::Fp32),
        (Precision::Bf16, MomentDtype::Fp32),
        (Precision::Bf16, MomentDtype::Bf16),
        (Precision::Fp16, MomentDtype::Fp32),
    ] {
        let what = format!("{precision:?}, moments {moments:?}");
        let made = |offload| {
            let mut job = job(Backend::Cuda, offload);
            job.config.training.precision = precision;
            job.config.training.compute.moment_dtype = moments;
            job
        };
        let plain = made(Offload::None);
        let (expected, state) = (complete(&plain), last_state(&plain));
        let undisturbed = made(Offload::Host);
        assert_eq!(complete(&undisturbed), expected, "{what}");
        assert_eq!(last_state(&undisturbed), state, "{what}");
        for (first, then) in [(Offload::Host, Offload::None), (Offload::None, Offload::Host)] {
            let mut parts = made(first);
            let (ends, reports) = parts.run(&mut trainers(1), Some(7));
            // A GPU has begun a step more when it hears of a stop.
            let [AttemptEnd::Stopped { step }] = ends[..] else { panic!("{what}: {ends:?}") };
            assert!((7..=8).contains(&step), "{what}: stopped behind {step}");
            let mut rows = bits(&reports);
            parts.config.attempt = 2;
            parts.config.resume = Resume::Checkpoint { step, name: directory_name(step) };
            parts.config.training.compute.offload = then;
            rows.extend(complete(&parts));
            assert_eq!(rows, expected, "{what}: {first:?}, then {then:?}");
            assert_eq!(last_state(&parts), state, "{what}: {first:?}, then {then:?}");
        }
        let mut parts = made(Offload::Host);
        let mut group = trainers(1);
        let mut rows = cut_off(&parts, &mut group[0]);
        let (attempt, step) = newest_held(&group, 1);
        assert!((3..STEPS).contains(&step), "{what}: a snapshot of step {step}");
        let sources = sources(&group, attempt, step, 1);
        let layout = parts.config.layout.clone();
        parts.config.attempt = 2;
        parts.config.resume = Resume::Memory { step, attempt, layout, sources };
        let (ends, reports) = parts.run(&mut group, None);
        assert_eq!(ends, [AttemptEnd::Completed { step: STEPS }], "{what}");
        rows.truncate(step as usize);
        rows.extend(bits(&reports));
        assert_eq!(rows, expected, "{what}");
        assert_eq!(last_state(&parts), state, "{what}");
    }
}

/// Steps of an attempt that is cut off behind [`CUT`].
fn cut_off(job: &Job, trainer: &mut Trainer) -> Vec<[u64; 5]> {
    let comm = Comm::solo(job.config.attempt);
    let config = WorkerConfig { rank: Some(0), members: vec![member(0)], ..job.config.clone() };
    let (handle, mut reports) = (comm.abort_handle(), Vec::new());
    let end = trainer.run_attempt(&config, comm, &Control::default(), &mut |event| {
        if let TrainerEvent::Step(report) = event {
            if report.step == CUT {
                handle.abort("cut off by the test");
            }
            reports.push(report);
        }
    });
    assert!(matches!(end, AttemptEnd::Aborted(_)), "{end:?}");
    bits(&reports)
}

/// Bytes of the GPU that a model takes.
fn taken(job: &Job) -> u64 {
    let device = Device::cuda(0, 0).expect("a GPU");
    let gpu = device.as_cuda().expect("a GPU").gpu().clone();
    let free = || gpu.memory().expect("its memory").0 as u64;
    let before = free();
    let (config, training) = (&job.config, &job.config.training);
    let shape = Shape::new(&config.model, &config.layout, 0, training);
    let began = Instant::now();
    let model = Model::on(device, shape, &config.model, &config.layout, 0, training);
    let model = model.expect("its memory");
    let taken = before.saturating_sub(free());
    let (offload, seconds) = (training.compute.offload, began.elapsed().as_secs_f64());
    println!("{offload:?}: {taken} bytes of the device, made in {seconds:.2} s");
    drop(model);
    taken
}

#[test]
fn the_device_has_as_much_more_room_as_the_plan_says() {
    if !has_gpu() {
        return;
    }
    let made = |offload| {
        let mut job = job(Backend::Cuda, offload);
        let model = &mut job.config.model;
        (model.vocab_size, model.hidden_size) = (32768, 512);
        (model.experts.count, model.experts.intermediate_size) = (32, 512);
        job.config.training.precision = Precision::Bf16;
        job
    };
    // Kernels that are loaded for the first time take memory, too.
    taken(&made(Offload::None));
    let spared = planned(&made(Offload::Host)).offloaded_bytes();
    println!("{spared} bytes are planned on the host");
    assert!(spared > 200 << 20, "{spared}");
    // Another process that takes memory between two readings spoils them: looked at again then.
    let right = (0..10).any(|_| {
        let (plain, offloaded) = (taken(&made(Offload::None)), taken(&made(Offload::Host)));
        // The driver gives memory by 2 MiB.
        plain.saturating_sub(offloaded).abs_diff(spared) <= 4 << 20
    });
    assert!(right, "{spared} bytes were planned, and never spared");
}
