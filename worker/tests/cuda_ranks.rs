//! Several ranks whose gradients are summed in buckets: the bits of one rank, the same every time,
//! and through every way of going on. On processors in every run, and on GPUs where
//! there are two.

mod common;

use common::{Job, bits, newest_held, run_and_cut_off, sources, state_hash, trainers};
use moe_worker::attempt::api::AttemptEnd;
use moe_worker::data::Corpus;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::gang::comm::Comm;
use moe_worker::state::snapshot::{cut, initialize};
use moejob_kernels::Device;
use moejob_kernels::cuda::Gpu;
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::config::{Backend, Exchange, Precision, Resume};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::Shape;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::rails::Rails;
use moejob_protocol::report::StepReport;
use moejob_protocol::zero::Zero;
use std::path::Path;
use std::time::Duration;

const STEPS: u64 = 20;

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// What computes.
#[derive(Clone, Copy, Debug, PartialEq)]
enum On {
    Processors,
    Gpus,
}

impl On {
    fn all() -> Vec<On> {
        match Gpu::count() {
            // Where GPUs' time is short, processors are left to other runs.
            Ok(count) if count >= 2 && std::env::var_os("MOEJOB_GPUS_ALONE").is_some() => {
                vec![On::Gpus]
            }
            Ok(count) if count >= 2 => vec![On::Processors, On::Gpus],
            _ => {
                println!("no two GPUs: processors alone");
                vec![On::Processors]
            }
        }
    }

    /// As many ranks, or as many as there are GPUs.
    fn most(self, ranks: u32) -> u32 {
        match self {
            On::Processors => ranks,
            On::Gpus => ranks.min(Gpu::count().map_or(1, |count| count as u32)),
        }
    }
}

/// Widths are multiples of 64, which the layer as one op wants. The learning rate is small: a
/// token that chooses another expert by a last bit would lead elsewhere.
fn job(on: On, layout: Layout) -> Job {
    let mut job = Job::new(layout);
    if on == On::Gpus {
        job.config.training.compute.backend = Backend::Cuda;
    }
    let model = &mut job.config.model;
    (model.hidden_size, model.head_dim, model.experts.intermediate_size) = (64, 32, 64);
    model.router.bias_update_rate = 0.0;
    (model.experts.count, model.dense_intermediate_size) = (6, 128);
    // With MOEJOB_ROUTED=grows GPUs have memory for no more rows than even routing has, at first.
    model.experts.routed_headroom = 1.0;
    let training = &mut job.config.training;
    (training.steps, training.adamw.learning_rate) = (STEPS, 0.001);
    training.sequence_length = 32;
    training.compute.combine_each = Some(true);
    job.config.checkpoint.every_steps = 1;
    job.config.checkpoint.keep = 100;
    on_devices(job)
}

/// A device a rank.
fn on_devices(mut job: Job) -> Job {
    job.config.ranks = match job.config.training.compute.backend {
        Backend::Cpu => 1,
        Backend::Cuda => job.config.layout.mesh.world(),
    };
    job
}

fn run(job: &Job) -> Vec<StepReport> {
    let steps = job.config.training.steps;
    let (ends, reports) = job.run(&mut trainers(job.config.layout.mesh.world()), None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: steps }), "{ends:?}");
    reports
}

fn apart(a: f64, b: f64) -> f64 {
    (a - b).abs() / b.abs().max(1e-30)
}

/// All values of one part of a checkpoint's tensors, by tensor.
fn values(directory: &Path, part: usize) -> Vec<(String, Vec<f32>)> {
    let disk = moe_worker::checkpoint::Disk::real();
    let manifest = moe_worker::checkpoint::verify(&disk, directory).expect("a whole checkpoint");
    let read = |tensor: &moejob_protocol::checkpoint::TensorEntry| {
        let mut values = Vec::new();
        for piece in &tensor.pieces {
            let file = directory.join(&manifest.files[piece.file as usize].name);
            let bytes = std::fs::read(file).expect("a shard");
            let (floats, _) = bytes[piece.begin as usize..piece.end as usize].as_chunks::<4>();
            values.extend(floats.iter().map(|bytes| f32::from_le_bytes(*bytes)));
        }
        (tensor.name.clone(), values)
    };
    manifest.tensors.iter().skip(part).step_by(3).map(read).collect()
}

/// Losses of all steps, and the state behind the last, which has the bits of one rank's. In chunks
/// each adds to gradients of experts, and sums that travel are of the experts of a rank: then
/// losses, and the first step's gradients, which its first moments are, clipped, are near those of
/// one rank.
fn check(meshes: &[(u32, u32)], change: impl Fn(&mut Job)) {
    On::all().into_iter().for_each(|on| check_on(on, meshes, &change));
}

fn check_on(on: On, meshes: &[(u32, u32)], change: &impl Fn(&mut Job)) {
    let fitting = |&(dp, ep): &(u32, u32)| {
        let dp = on.most(dp);
        layout(dp, ep.min(dp))
    };
    let mut of: Vec<Layout> = meshes.iter().map(fitting).collect();
    of.dedup();
    let make = |layout: &Layout| {
        let mut job = job(on, layout.clone());
        change(&mut job);
        job
    };
    let one = make(&layout(1, 1));
    let expected = run(&one);
    assert!(expected[19].loss < expected[0].loss - 0.05, "nothing is learned");
    let first = |job: &Job| values(&job.location().join(directory_name(1)), 1);
    let gradients = first(&one);
    let largest = |values: &[f32]| values.iter().fold(0.0_f32, |most, x| most.max(x.abs()));
    let last = directory_name(STEPS);
    let hash = |job: &Job| state_hash(&job.location().join(&last));
    for layout in &of {
        let (job, again) = (make(layout), make(layout));
        let found = run(&job);
        let exact = layout.mesh.ep == 1 || job.config.training.compute.combines_each();
        if exact {
            assert_eq!(hash(&job), hash(&one), "{on:?} {layout:?}: not the state of one rank");
        }
        // Losses are told in the order of micro-batches, and norms of processors are sums of pairs.
        // Those of GPUs, and losses of a validation, are sums over ranks in fp64.
        let most_apart = if exact { 1e-13 } else { 1e-5 };
        let norm = |step: &StepReport| if on == On::Gpus { 0.0 } else { step.grad_norm };
        let told = |step: &StepReport| [step.loss, step.aux_loss, norm(step)].map(f64::to_bits);
        if exact {
            let [found, expected] = [&found, &expected];
            assert!(found.iter().map(told).eq(expected.iter().map(told)), "{on:?} {layout:?}");
        }
        for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
            // A token chose another expert by a last bit: from there on both are right, and apart.
            let flipped = found.expert_imbalance != expected.expert_imbalance;
            if !exact && on == On::Gpus && at >= 3 && flipped {
                break;
            }
            let (of, step) = ([found.loss, found.aux_loss, found.grad_norm], found.step);
            let to = [expected.loss, expected.aux_loss, expected.grad_norm];
            let most = of.iter().zip(to).map(|(a, b)| apart(*a, b)).fold(0.0, f64::max);
            assert!(most < most_apart, "{on:?} {layout:?}: step {step}: {of:?} for {to:?}");
            let (a, b) = (found.validation_loss, expected.validation_loss);
            let near = a.zip(b).is_none_or(|(a, b)| apart(a, b) < most_apart);
            assert!(near, "{layout:?}: {a:?} {b:?}");
            assert_eq!(found.validation_loss.is_some(), expected.validation_loss.is_some());
        }
        assert_eq!(found.len(), expected.len());
        for ((name, found), (_, expected)) in first(&job).iter().zip(&gradients) {
            assert_eq!(found.len(), expected.len(), "{name}");
            let away = found.iter().zip(expected).map(|(a, b)| (a - b).abs()).fold(0.0, f32::max);
            let most = 1e-5 * largest(expected).max(1e-7);
            assert!(away <= most, "{layout:?}: {name}: {away:e} of {:e}", largest(expected));
        }
        assert_eq!(bits(&run(&again)), bits(&found), "{layout:?}: not the same bits twice");
        assert_eq!(hash(&again), hash(&job), "{layout:?}: not the same state twice");
    }
}

#[test]
fn data_parallel_ranks_train_as_one() {
    // Five micro-batches: uneven for both; the sixth rank of six has none.
    check(&[(2, 1), (4, 1), (6, 1)], |_| {});
}

#[test]
fn experts_over_ranks_train_as_one() {
    check(&[(2, 2), (3, 3), (4, 2), (6, 3)], |_| {});
}

/// Their dense parameters with their owners alone.
#[test]
fn divided_gradients_and_weights_train_as_one() {
    for stage in [2, 3] {
        check(&[(2, 1), (4, 2), (3, 3)], |job| {
            job.config.training.compute.zero = Zero::of(stage).expect("a stage");
        });
    }
}

/// One micro-batch a step is added up as one of several is: a second rank adds nothing to it.
#[test]
fn a_step_of_one_micro_batch_is_that_of_one_rank() {
    check(&[(2, 1), (2, 2), (3, 3)], |job| {
        let training = &mut job.config.training;
        training.global_batch_size = training.micro_batch_size;
        job.config.model.tie_word_embeddings = true;
    });
}

/// Sums of fp64 are pairs of doubles, which travel as such.
#[test]
fn ranks_in_fp64_train_as_one() {
    check_on(On::Processors, &[(2, 1), (3, 3), (4, 2)], &|job: &mut Job| {
        job.config.training.precision = Precision::Fp64;
    });
}

/// Tokens pass a rank of each node on their way, and so does what became of them.
#[test]
fn experts_over_nodes_train_as_one() {
    for (mesh, ranks) in [((4, 4), 2), ((8, 4), 2), ((6, 6), 3), ((6, 6), 2)] {
        check_on(On::Processors, &[mesh], &|job: &mut Job| {
            (job.config.ranks, job.config.exchange) = (ranks, Exchange::Hierarchical);
            let mesh = &job.config.layout.mesh;
            assert_eq!(Rails::of(mesh, ranks).is_some(), mesh.ep > 1, "{mesh:?}");
        });
    }
}

#[test]
fn experts_over_ranks_whose_sums_travel_train_as_one() {
    check(&[(2, 2), (6, 3)], |job| job.config.training.compute.combine_each = Some(false));
}

#[test]
fn other_models() {
    check(&[(3, 1), (3, 3)], |job| {
        let model = &mut job.config.model;
        model.dense_layers = vec![0];
        (model.experts.shared, model.tie_word_embeddings) = (1, false);
        model.attention_bias = true;
    });
    check(&[(2, 1), (2, 2)], |job| {
        let model = &mut job.config.model;
        common::route_like_deepseek(model);
        model.router.bias_update_rate = 0.001;
    });
}

#[test]
fn going_on_from_a_checkpoint_gives_the_same_bits() {
    for on in On::all() {
        let whole = job(on, layout(2, 2));
        let expected = bits(&run(&whole));
        let mut parts = job(on, layout(2, 2));
        let (ends, reports) = parts.run(&mut trainers(2), Some(7));
        assert!(ends.iter().all(|end| *end == AttemptEnd::Stopped { step: 7 }), "{ends:?}");
        let mut rows = bits(&reports);
        parts.config.attempt = 2;
        parts.config.resume = Resume::Checkpoint { step: 7, name: directory_name(7) };
        rows.extend(bits(&run(&parts)));
        assert_eq!(rows, expected, "{on:?}");
        let last = directory_name(STEPS);
        let hash = |job: &Job| state_hash(&job.location().join(&last));
        assert_eq!(hash(&parts), hash(&whole), "{on:?}");
    }
}

/// What one mesh wrote any other loads, whichever way it sums, and wherever.
#[test]
fn a_checkpoint_fits_every_mesh() {
    for on in On::all() {
        let ranks = on.most(3);
        let one = job(on, layout(ranks, 1));
        let expected = run(&one);
        let tree = Layout::contiguous(Mesh::data_parallel(2, 2));
        let more = [
            (on, layout(1, 1)),
            (On::Processors, layout(4, 1)),
            (on, layout(2, 2)),
            (On::Processors, tree),
        ];
        for (onto, next) in more {
            let mut parts = job(on, layout(ranks, 1));
            parts.run(&mut trainers(ranks), Some(6));
            parts.config.attempt = 2;
            parts.config.resume = Resume::Checkpoint { step: 6, name: directory_name(6) };
            parts.config.training.compute = job(onto, next.clone()).config.training.compute;
            parts.config.layout = next.clone();
            let parts = on_devices(parts);
            for (found, expected) in run(&parts).iter().zip(&expected[6..]) {
                assert_eq!(found.step, expected.step);
                let away = apart(found.loss, expected.loss);
                assert!(away < 1e-5, "{on:?} {next:?}: step {}: {away:e}", found.step);
            }
        }
    }
}

/// A rank is lost; the others and its successor go on from memory with the bits of a run that
/// nobody disturbed.
#[test]
fn going_on_from_memory_gives_the_same_bits() {
    for on in On::all() {
        let ranks = on.most(3);
        let whole = job(on, layout(ranks, 1));
        let expected = bits(&run(&whole));
        let mut losses = 0;
        for (victim, after) in [(0, 3), (1, 6), (ranks - 1, 9), (ranks - 1, 0)] {
            losses += u32::from(lose(on, ranks, victim, after, &whole, &expected));
        }
        assert!(losses > 0, "{on:?}: nobody was cut off in time");
    }
}

/// Whether `victim` was cut off in time.
fn lose(on: On, ranks: u32, victim: u32, after: u64, whole: &Job, expected: &[[u64; 5]]) -> bool {
    let mut job = job(on, layout(ranks, 1));
    let mut group = trainers(ranks);
    let delay = Duration::from_millis(20 * u64::from(victim));
    let (ends, reports) = run_and_cut_off(&job, &mut group, victim, after, delay);
    if ends.iter().all(|end| matches!(end, AttemptEnd::Completed { .. })) {
        return false;
    }
    let aborted = ends.iter().all(|end| matches!(end, AttemptEnd::Aborted(_)));
    assert!(aborted, "{on:?} {victim}: {ends:?}");
    // The one that is lost begins again without memory.
    group[victim as usize] = trainers(1).remove(0);
    let (attempt, step) = newest_held(&group, ranks);
    let sources = sources(&group, attempt, step, ranks);
    let earlier = job.config.layout.clone();
    job.config.resume = Resume::Memory { step, attempt, layout: earlier, sources };
    job.config.attempt += 1;
    let mut rows = bits(&reports);
    rows.truncate(step as usize);
    let (ends, reports) = job.run(&mut group, None);
    let end = AttemptEnd::Completed { step: STEPS };
    assert!(ends.iter().all(|found| *found == end), "{on:?}: {ends:?}");
    rows.extend(bits(&reports));
    assert_eq!(rows, expected, "{on:?}: rank {victim} lost after step {after}");
    let last = directory_name(STEPS);
    let hash = |job: &Job| state_hash(&job.location().join(&last));
    assert_eq!(hash(&job), hash(whole), "{on:?}: rank {victim} lost after step {after}");
    true
}

/// What `work` makes of each rank's new engine, on processors.
fn by_engines<T: Send>(
    job: &Job,
    links: impl Fn(Comm) -> Links + Sync,
    work: impl Fn(&mut Engine, &mut Corpus) -> T + Sync,
) -> Vec<T> {
    let (config, links, work) = (&job.config, &links, &work);
    let train = |comm: Comm| {
        let (training, rank) = (&config.training, comm.rank());
        let shape = Shape::new(&config.model, &config.layout, rank, training);
        let device = Device::cpu(1, 0).expect("a CPU");
        let model = Model::on(device, shape, &config.model, &config.layout, rank, training);
        let mut engine = Engine::new(model.expect("an arena"), training, links(comm));
        initialize(&mut engine.model, training.seed);
        let corpus = Corpus::open(&config.data, training, config.model.vocab_size);
        work(&mut engine, &mut corpus.expect("text"))
    };
    std::thread::scope(|scope| {
        let comms = Comm::in_process(config.layout.mesh.world());
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| train(comm))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Summaries of some steps, and state and weights after them.
fn some_steps(engine: &mut Engine, corpus: &mut Corpus) -> (Vec<StepSummary>, Vec<u8>) {
    let steps = (0..4).map(|step| engine.step(step, corpus).expect("peers")).collect();
    let mut state = Vec::new();
    cut(&mut engine.model, &mut state).expect("the device works");
    for index in 0..engine.model.params.len() {
        if let Some(weight) = engine.model.weight(index) {
            let bytes = weight.reinterpret(moejob_kernels::DType::U8);
            state.extend(engine.model.device.read_vec::<u8>(bytes));
        }
    }
    (steps, state)
}

/// Whether buckets leave within backward and between updates, or all at once between the parts of
/// a step: the same bits on every rank. Each verb is one collective of all ranks here, so that
/// ranks that issued them in different orders would not come to an end. Five micro-batches: some
/// ranks have one round less than others, the sixth has none.
#[test]
fn when_buckets_travel_changes_no_bit() {
    for (dp, ep) in [(2, 1), (6, 1), (2, 2), (4, 2), (6, 3)] {
        let mut job = job(On::Processors, layout(dp, ep));
        job.config.model.dense_layers = vec![1];
        job.config.model.tie_word_embeddings = dp == 2;
        let beside = by_engines(&job, Links::new, some_steps);
        let one_by_one = |comm| Links::new(comm).one_by_one();
        let between = by_engines(&job, one_by_one, some_steps);
        for (rank, (beside, between)) in beside.iter().zip(&between).enumerate() {
            assert_eq!(beside.0, between.0, "dp {dp} ep {ep} rank {rank}");
            assert!(beside.0.iter().all(|step| step.loss.is_finite()), "{:?}", beside.0);
            assert!(beside.1 == between.1, "dp {dp} ep {ep} rank {rank}: other weights or moments");
        }
    }
}

/// Validations and steps, of which the first finds the memory of routed rows too small.
#[test]
fn rows_without_room_are_routed_again() {
    for (dp, ep) in [(2, 2), (4, 2), (6, 3)] {
        let job = job(On::Processors, layout(dp, ep));
        let run = |headroom: Option<f64>, validates: bool| {
            by_engines(&job, Links::new, |engine, corpus| {
                if let Some(headroom) = headroom {
                    engine.model.group.commit(headroom);
                }
                let reads = engine.model.device.traffic().reads;
                let measure = |engine: &mut Engine, corpus: &mut Corpus| {
                    engine.validate(corpus, 7).expect("peers").expect("held-out text")
                };
                let first = validates.then(|| measure(engine, corpus));
                let reads = engine.model.device.traffic().reads - reads;
                let steps = some_steps(engine, corpus);
                let again = engine.take_again();
                ((first, steps, measure(engine, corpus)), reads, again)
            })
        };
        for validates in [true, false] {
            let (whole, grown) = (run(None, validates), run(Some(1.0), validates));
            for (rank, (whole, grown)) in whole.iter().zip(&grown).enumerate() {
                let which = format!("dp {dp} ep {ep} rank {rank}");
                assert!(whole.0 == grown.0, "{which}: other numbers");
                assert!(!whole.2, "{which}: there was room");
                let by_chance = if validates { grown.1 < 2 * whole.1 } else { !grown.2 };
                assert!(!by_chance, "{which}: even routing by chance");
            }
        }
    }
}
