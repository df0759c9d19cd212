//! ZeRO-2 and 3: what takes turns to be whole gives the bits of what always is, wherever sums have
//! the same operands in the same order; and any stage goes on from any other.

mod common;

use common::{Job, bits, newest_held, run_and_cut_off, sources, state_hash, trainers};
use moe_worker::attempt::api::AttemptEnd;
use moe_worker::data::Corpus;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::gang::comm::Comm;
use moe_worker::state::rank::RankState;
use moe_worker::state::snapshot::{cut, initialize};
use moejob_kernels::DType;
use moejob_kernels::cuda::Gpu;
use moejob_kernels::{Device, KernelError};
use moejob_protocol::checkpoint::{Part, directory_name};
use moejob_protocol::config::{Backend, Recompute, Resume};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::Shape;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::report::StepReport;
use moejob_protocol::zero::Zero;
use std::time::Duration;

const ALL: [Zero; 3] = [Zero::Optimizer, Zero::Gradients, Zero::Weights];
const STEPS: u64 = 12;

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// `rounds` micro-batches on each rank, whatever stage.
fn job(layout: Layout, rounds: u32) -> Job {
    let dp = layout.mesh.dp;
    let mut job = Job::new(layout);
    common::fit_gpus(&mut job.config.model);
    let training = &mut job.config.training;
    (training.steps, training.adamw.learning_rate) = (STEPS, 0.001);
    training.sequence_length = 32;
    training.global_batch_size = dp * rounds;
    job.config.checkpoint.every_steps = 1;
    job.config.checkpoint.keep = 100;
    job
}

fn set(job: &mut Job, zero: Zero) {
    job.config.training.compute.zero = zero;
}

/// How buckets travel.
#[derive(Clone, Copy, Debug, PartialEq)]
enum Way {
    /// As soon as they can.
    Beside,
    /// When they are needed, or between the parts of a step.
    OneByOne,
    /// The ops on one GPU, whose memory is carried through the host.
    OnGpu,
}

fn model(job: &Job, rank: u32, way: Way) -> Result<Model, KernelError> {
    let (config, mut training) = (&job.config, job.config.training.clone());
    if way != Way::OnGpu {
        return Model::new(&config.model, &config.layout, rank, &training, 1);
    }
    training.compute.backend = Backend::Cuda;
    let shape = Shape::new(&config.model, &config.layout, rank, &training);
    let device = Device::cuda(0, 0)?;
    Model::on(device, shape, &config.model, &config.layout, rank, &training)
}

/// Summaries of some steps of each rank; its state, and the weights that it always has, after them.
fn steps(job: &Job, way: Way) -> Vec<(Vec<StepSummary>, Vec<u8>)> {
    let train = |comm: Comm| {
        let mut training = job.config.training.clone();
        let rank = comm.rank();
        if way == Way::OnGpu {
            training.compute.backend = Backend::Cuda;
        }
        let links = match way {
            Way::Beside => Links::new(comm),
            Way::OneByOne => Links::new(comm).one_by_one(),
            Way::OnGpu => Links::carried(comm),
        };
        let model = model(job, rank, way).expect("a model");
        let mut engine = Engine::new(model, &training, links);
        initialize(&mut engine.model, training.seed);
        let corpus = Corpus::open(&job.config.data, &training, job.config.model.vocab_size);
        let mut corpus = corpus.expect("text");
        let mut summaries = Vec::new();
        for step in 0..4 {
            summaries.push(engine.step(step, &mut corpus).expect("peers"));
            if step == 1 {
                let measured = engine.validate(&mut corpus, 7).expect("peers");
                assert!(measured.expect("held-out text").loss.is_finite());
            }
        }
        let mut state = Vec::new();
        cut(&mut engine.model, &mut state).expect("the device works");
        for index in 0..engine.model.params.len() {
            let name = &engine.model.params[index].name;
            // Experts, but for shared ones, and vectors.
            let always = name.contains("mlp.experts.") || name.contains("norm");
            if let Some(weight) = engine.model.weight(index).filter(|_| always) {
                let bytes = weight.reinterpret(DType::U8);
                state.extend(engine.model.device.read_vec::<u8>(bytes));
            }
        }
        engine.all_arrived().expect("the device works");
        engine.leave().expect("nothing waits any more");
        (summaries, state)
    };
    std::thread::scope(|scope| {
        let comms = match job.config.layout.mesh.world() {
            1 => vec![Comm::solo(1)],
            world => Comm::in_process(world),
        };
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| train(comm))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Stages that shall give the bits of each other, by whatever way.
fn alike(job: &mut Job, stages: &[Zero], ways: &[Way], what: &str) {
    let mut first = None;
    for stage in stages {
        for way in ways {
            set(job, *stage);
            let found = steps(job, *way);
            let finite = |of: &(Vec<StepSummary>, Vec<u8>)| {
                of.0.iter().all(|step| step.loss.is_finite())
            };
            assert!(found.iter().all(finite), "{what}: {stage:?} {way:?}");
            let Some(expected) = &first else {
                first = Some(found);
                continue;
            };
            for (rank, (found, expected)) in found.iter().zip(expected).enumerate() {
                assert_eq!(found.0, expected.0, "{what}: {stage:?} {way:?} rank {rank}");
                assert!(found.1 == expected.1, "{what}: {stage:?} {way:?} rank {rank}: state");
            }
        }
    }
}

const MESHES: [(u32, u32); 7] = [(1, 1), (2, 1), (3, 1), (4, 1), (2, 2), (4, 2), (3, 3)];
const BOTH: [Way; 2] = [Way::Beside, Way::OneByOne];

#[test]
fn with_one_round_all_stages_give_the_same_bits() {
    for (dp, ep) in MESHES {
        let mut job = job(layout(dp, ep), 1);
        alike(&mut job, &ALL, &BOTH, &format!("{dp} {ep}"));
    }
}

/// Experts are as in stage 1, and so are their slices.
#[test]
fn with_slices_all_stages_give_the_same_bits() {
    for (dp, ep) in [(4, 2), (3, 3), (8, 8)] {
        let mut job = job(layout(dp, ep), 1);
        let experts = &mut job.config.model.experts;
        (experts.slices, experts.intermediate_size) = (2, 128);
        alike(&mut job, &ALL, &BOTH, &format!("{dp} {ep} in slices"));
    }
}

#[test]
fn a_rank_without_a_micro_batch_gives_zeros_in_every_stage() {
    for (dp, ep) in [(3, 1), (4, 2)] {
        let mut job = job(layout(dp, ep), 1);
        job.config.training.global_batch_size = dp - 1;
        alike(&mut job, &ALL, &BOTH, &format!("{dp} {ep}"));
    }
}

/// Heads and embeddings of their own, biases, shared experts, and what is computed again: each
/// order in which whole weights are wanted.
#[test]
fn other_models_and_what_is_computed_again() {
    let recomputes = [
        (Recompute::Selective, 3),
        (Recompute::Full, 3),
        (Recompute::Every(2), 5),
        (Recompute::Every(3), 7),
        (Recompute::None, 1),
        (Recompute::Full, 2),
    ];
    for (at, (recompute, layers)) in recomputes.into_iter().enumerate() {
        let mut job = job(layout(2, 1 + at as u32 % 2), 1);
        let model = &mut job.config.model;
        common::route_like_deepseek(model);
        model.num_hidden_layers = layers;
        model.tie_word_embeddings = at % 3 == 0;
        model.attention_bias = true;
        model.dense_layers = if layers > 2 { vec![1] } else { vec![] };
        job.config.training.recompute = recompute;
        alike(&mut job, &ALL, &BOTH, &format!("{recompute:?} of {layers}"));
    }
}

/// Stages 2 and 3 add up ranks in each round, and rounds then. On one rank there is nothing to add.
#[test]
fn with_several_rounds_stages_2_and_3_give_the_same_bits() {
    for (dp, ep) in MESHES {
        for batch in [5, 2 * dp + 1] {
            let mut job = job(layout(dp, ep), 1);
            job.config.training.global_batch_size = batch;
            job.config.model.tie_word_embeddings = batch == 5;
            let same = if dp == 1 { &ALL[..] } else { &ALL[1..] };
            alike(&mut job, same, &BOTH, &format!("{dp} {ep} {batch}"));
        }
    }
}

fn apart(a: f64, b: f64) -> f64 {
    (a - b).abs() / b.abs().max(1e-30)
}

fn near(found: &[StepReport], expected: &[StepReport], what: &str) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (found, expected) in found.iter().zip(expected) {
        let of = [found.loss, found.aux_loss, found.grad_norm];
        let to = [expected.loss, expected.aux_loss, expected.grad_norm];
        let most = of.iter().zip(to).map(|(a, b)| apart(*a, b)).fold(0.0, f64::max);
        assert!(most < 1e-5, "{what}: step {}: {of:?} for {to:?}", expected.step);
    }
}

fn run(job: &Job) -> Vec<StepReport> {
    let (ends, reports) = job.run(&mut trainers(job.config.layout.mesh.world()), None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: STEPS }), "{ends:?}");
    reports
}

/// Five micro-batches, as one rank adds them up.
#[test]
fn every_stage_trains_as_one_rank() {
    let of = |layout, zero| {
        let mut job = job(layout, 1);
        job.config.training.global_batch_size = 5;
        set(&mut job, zero);
        run(&job)
    };
    let expected = of(layout(1, 1), Zero::Optimizer);
    assert!(expected[11].loss < expected[0].loss, "nothing is learned");
    for (dp, ep) in [(2, 1), (3, 1), (2, 2)] {
        for zero in ALL {
            near(&of(layout(dp, ep), zero), &expected, &format!("{zero:?} {dp} {ep}"));
        }
    }
}

fn hash(job: &Job, step: u64) -> String {
    state_hash(&job.location().join(directory_name(step)))
}

/// What one stage and mesh has written any other loads: with the bits of that mesh.
#[test]
fn a_checkpoint_of_one_stage_fits_the_others() {
    let whole = job(layout(2, 2), 1);
    let expected = bits(&run(&whole));
    for (before, after) in [(0, 2), (2, 0), (1, 2), (2, 1), (2, 2)] {
        let mut parts = job(layout(2, 2), 1);
        set(&mut parts, ALL[before]);
        let (ends, reports) = parts.run(&mut trainers(2), Some(7));
        assert!(ends.iter().all(|end| *end == AttemptEnd::Stopped { step: 7 }), "{ends:?}");
        let mut rows = bits(&reports);
        parts.config.attempt = 2;
        parts.config.resume = Resume::Checkpoint { step: 7, name: directory_name(7) };
        set(&mut parts, ALL[after]);
        rows.extend(bits(&run(&parts)));
        assert_eq!(rows, expected, "{before} {after}");
        assert_eq!(hash(&parts, STEPS), hash(&whole, STEPS), "{before} {after}");
    }
}

/// A rank is lost; the others and its successor go on from memory with the bits of a run that
/// nobody disturbed.
#[test]
fn a_lost_rank_changes_no_bit_in_stage_3() {
    let make = || {
        let mut job = job(layout(3, 1), 1);
        job.config.recovery.memory_every_steps = 3;
        set(&mut job, Zero::Weights);
        job
    };
    let whole = make();
    let expected = bits(&run(&whole));
    let mut losses = 0;
    for (victim, after) in [(0, 3), (1, 6), (2, 0)] {
        let mut job = make();
        let mut group = trainers(3);
        let delay = Duration::from_millis(20 * u64::from(victim));
        let (ends, reports) = run_and_cut_off(&job, &mut group, victim, after, delay);
        if ends.iter().all(|end| matches!(end, AttemptEnd::Completed { .. })) {
            continue;
        }
        losses += 1;
        group[victim as usize] = trainers(1).remove(0);
        let (attempt, step) = newest_held(&group, 3);
        let sources = sources(&group, attempt, step, 3);
        let earlier = job.config.layout.clone();
        job.config.resume = Resume::Memory { step, attempt, layout: earlier, sources };
        job.config.attempt += 1;
        let mut rows = bits(&reports);
        rows.truncate(step as usize);
        let (ends, reports) = job.run(&mut group, None);
        let end = AttemptEnd::Completed { step: STEPS };
        assert!(ends.iter().all(|found| *found == end), "{ends:?}");
        rows.extend(bits(&reports));
        assert_eq!(rows, expected, "rank {victim} lost after step {after}");
        assert_eq!(hash(&job, STEPS), hash(&whole, STEPS), "rank {victim} lost after {after}");
    }
    assert!(losses > 0, "nobody was cut off in time");
}

/// Three ranks, then two of them, then four: from memory each time, in stage 3 as in stage 1.
#[test]
fn a_gang_shrinks_and_grows_in_every_stage() {
    let sized = |zero: Zero| {
        let mut job = job(layout(3, 1), 1);
        job.config.training.global_batch_size = 12;
        set(&mut job, zero);
        let mut group = trainers(3);
        let mut rows = job.run(&mut group, Some(4)).1;
        for (world, until) in [(2, Some(8)), (4, None)] {
            let before = job.config.layout.clone();
            let shards = before.mesh.world();
            let (attempt, step) = newest_held(&group, shards);
            let sources = sources(&group, attempt, step, shards);
            let kept = shards.min(world) as usize;
            assert!(sources.iter().all(|source| (source.from as usize) < kept), "{sources:?}");
            group.truncate(kept);
            group.extend(trainers(world - kept as u32));
            job.config.resume = Resume::Memory { step, attempt, layout: before, sources };
            job.config.layout = layout(world, 1);
            job.config.attempt += 1;
            rows.truncate(step as usize);
            rows.extend(job.run(&mut group, until).1);
        }
        (rows, hash(&job, STEPS))
    };
    let first = sized(Zero::Optimizer);
    let [second, third] = [Zero::Gradients, Zero::Weights].map(sized);
    assert_eq!(first.0.len(), STEPS as usize);
    near(&second.0, &first.0, "stage 2");
    assert_eq!(bits(&third.0), bits(&second.0), "stages 2 and 3");
    assert_eq!(third.1, second.1, "stages 2 and 3");
}

/// A rank has of what takes turns its own chunk alone, and says of it what is broken.
#[test]
fn a_broken_weight_is_found_where_it_lies() {
    let mut job = job(layout(2, 1), 1);
    set(&mut job, Zero::Weights);
    let found: Vec<Option<String>> = (0..2)
        .map(|rank| {
            let mut model = model(&job, rank, Way::Beside).expect("a model");
            initialize(&mut model, 1);
            let index = model.params.iter().position(|param| param.name.contains("embed"));
            let index = index.expect("an embedding");
            assert_eq!(model.weight(index), None, "it is nowhere whole");
            let own = model.table().needed(Part::Master, index);
            assert_eq!(own.end - own.start, 256 * 64 / 2, "half of it");
            if rank == 1 {
                let nan = f32::NAN.to_le_bytes();
                model.write(Part::Master, index, own.start + 7..own.start + 8, &nan);
            }
            model.broken_weight()
        })
        .collect();
    let second = "the weight model.embed_tokens.weight at element 8199".to_string();
    assert_eq!(found, [None, Some(second)]);
}

/// On a GPU, whose memory is carried through the host, since NCCL has no two ranks of one GPU.
#[test]
fn on_a_gpu_all_stages_give_the_same_bits() {
    if !Gpu::count().is_ok_and(|count| count > 0) {
        println!("no GPU");
        return;
    }
    for (dp, ep, rounds) in [(2, 1, 1), (2, 2, 1), (3, 1, 2)] {
        let mut job = job(layout(dp, ep), rounds);
        let stages = if rounds == 1 { &ALL[..] } else { &ALL[1..] };
        alike(&mut job, stages, &[Way::OnGpu], &format!("{dp} {ep} {rounds}"));
    }
}
