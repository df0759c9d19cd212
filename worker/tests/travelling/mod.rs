//! Expert groups whose tokens travel between ranks that compute as GPUs do: on processors, or all
//! of them on one GPU.
#![allow(dead_code)]

use crate::common::Job;
use moe_worker::data::Corpus;
use moe_worker::engine::links::{Links, PeerUse};
use moe_worker::engine::model::Model;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::gang::comm::Comm;
use moe_worker::state::snapshot::{cut, initialize};
use moejob_kernels::cuda::Gpu;
use moejob_kernels::{DType, Device};
use moejob_protocol::config::{Backend, Exchange, Precision, Wire};
use moejob_protocol::layout::{Layout, Placement};
use moejob_protocol::memory::Shape;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::rails::Rails;
use std::sync::{Mutex, MutexGuard, Once, PoisonError};
use std::time::Duration;

/// All ranks find room on one GPU.
pub const BLOCKS: usize = 6;
/// Nobody waits so long but for a mistake.
pub const PATIENCE: Duration = Duration::from_secs(15);

/// Five micro-batches: uneven for all, so that a rank has none in the last round.
pub fn job((dp, ep): (u32, u32), precision: Precision) -> Job {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(dp, ep)));
    let model = &mut job.config.model;
    (model.hidden_size, model.head_dim, model.experts.intermediate_size) = (64, 32, 64);
    (model.experts.count, model.dense_intermediate_size) = (6, 128);
    model.router.bias_update_rate = 0.0;
    let training = &mut job.config.training;
    (training.precision, training.adamw.learning_rate) = (precision, 0.001);
    training.sequence_length = 32;
    // Sums come back, but where a test asks for each row ([`returning_each`]).
    training.compute.combine_each = Some(false);
    job
}

/// A job whose tokens choose experts of up to four ranks: sums of two would round alike in any
/// order. A GPU wants as many experts as a token chooses.
pub fn wide(mesh: (u32, u32), precision: Precision) -> Job {
    let mut job = job(mesh, precision);
    (job.config.model.experts.per_token, job.config.model.experts.count) = (4, 4 * mesh.1);
    job
}

/// The same job, to whose tokens each expert's row comes back by itself.
pub fn returning_each(mut job: Job) -> Job {
    job.config.training.compute.combine_each = Some(true);
    job
}

/// The same job, whose tokens travel in another format.
pub fn travelling_as(mut job: Job, wire: Wire) -> Job {
    job.config.training.compute.wire = wire;
    job
}

/// The same job, whose experts are cut into slices as wide as the experts were.
pub fn sliced(mut job: Job, slices: u32) -> Job {
    let experts = &mut job.config.model.experts;
    (experts.slices, experts.intermediate_size) = (slices, slices * experts.intermediate_size);
    job
}

/// The same job, whose experts, or their slices, lie in another order in each layer.
pub fn in_another_order(mut job: Job) -> Job {
    let count = job.config.model.slices().count;
    let order = |layer| (0..count).map(|at| (5 * at + 1 + layer) % count).collect();
    let layers = 0..job.config.model.num_hidden_layers;
    job.config.layout.placement = Placement::Ordered(layers.map(order).collect());
    job
}

/// How tokens of a group travel.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Way {
    /// As everything else.
    Host,
    Windows,
    /// As everything else, with buckets between the parts of a step.
    OneByOne,
}

/// The GPU, for one test at a time: while a kernel waits for a peer, the driver may hold up whoever
/// loads others.
pub fn gpu() -> Option<(Gpu, MutexGuard<'static, ()>)> {
    static ALONE: Mutex<()> = Mutex::new(());
    static QUEUES: Once = Once::new();
    let alone = ALONE.lock().unwrap_or_else(PoisonError::into_inner);
    // Ranks wait for each other, so that no two may share a queue of the GPU.
    // SAFETY: before the driver is opened, and other threads of this test wait here.
    QUEUES.call_once(|| unsafe { std::env::set_var("CUDA_DEVICE_MAX_CONNECTIONS", "32") });
    match Gpu::open(0) {
        Ok(gpu) => Some((gpu, alone)),
        Err(error) => {
            println!("skipped: {error}");
            None
        }
    }
}

/// The same job, whose ranks lie on nodes of so many, and whose tokens travel along rails.
pub fn along_rails(mut job: Job, ranks: u32) -> Job {
    (job.config.ranks, job.config.exchange) = (ranks, Exchange::Hierarchical);
    let rails = Rails::of(&job.config.layout.mesh, ranks);
    assert!(rails.is_some(), "{:?} on nodes of {ranks}", job.config.layout.mesh);
    job
}

/// A rank of `job`, on GPU 0 or on a processor.
pub fn engine(job: &Job, comm: Comm, on_gpu: bool, way: Way) -> Engine {
    let (config, rank) = (&job.config, comm.rank());
    let mut training = config.training.clone();
    if on_gpu {
        training.compute.backend = Backend::Cuda;
    }
    let staged = config.exchange == Exchange::Hierarchical;
    let rails = Rails::of(&config.layout.mesh, config.ranks).filter(|_| staged);
    let shape = Shape { rails, ..Shape::new(&config.model, &config.layout, rank, &training) };
    let device = match on_gpu {
        true => Device::cuda(0, 0).expect("a GPU"),
        false => Device::cpu(1, 0).expect("a processor"),
    };
    let model = Model::on(device, shape, &config.model, &config.layout, rank, &training);
    let links = match (on_gpu, way) {
        (true, _) => Links::carried(comm),
        (false, Way::OneByOne) => Links::new(comm).one_by_one(),
        (false, _) => Links::new(comm),
    };
    Engine::new(model.expect("memory"), &training, links)
}

/// Summaries of the steps of a rank, and its state and weights after them.
pub type Trained = (Vec<StepSummary>, Vec<u8>);

/// Summaries of some steps of each rank, and its state and weights after them. The first step is
/// without windows: it loads kernels, which would wait for those that wait for other ranks.
pub fn steps(job: &Job, on_gpu: bool, way: Way) -> Vec<Trained> {
    let train = |comm: Comm| {
        let mut engine = engine(job, comm, on_gpu, way);
        let training = &job.config.training;
        initialize(&mut engine.model, training.seed);
        let corpus = Corpus::open(&job.config.data, training, job.config.model.vocab_size);
        let mut corpus = corpus.expect("text");
        let mut summaries = Vec::new();
        for step in 0..5 {
            if step == 1 && way == Way::Windows {
                let wanted = PeerUse::On { blocks: BLOCKS };
                let opened = engine.open_windows(wanted, PATIENCE).expect("all are here");
                assert!(opened, "no windows");
            }
            summaries.push(engine.step(step, &mut corpus).expect("peers"));
        }
        let mut state = Vec::new();
        cut(&mut engine.model, &mut state).expect("the device works");
        for index in 0..engine.model.params.len() {
            if let Some(weight) = engine.model.weight(index) {
                state.extend(engine.model.device.read_vec::<u8>(weight.reinterpret(DType::U8)));
            }
        }
        engine.all_arrived().expect("the device works");
        engine.leave().expect("nothing waits any more");
        (summaries, state)
    };
    std::thread::scope(|scope| {
        let comms = Comm::in_process(job.config.layout.mesh.world());
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| train(comm))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

pub fn same(job: &Job, on_gpu: bool, ways: [Way; 2], what: &str) {
    alike([job, job], on_gpu, ways, what);
}

/// Two jobs give the same bits.
pub fn alike(jobs: [&Job; 2], on_gpu: bool, ways: [Way; 2], what: &str) {
    let first = steps(jobs[0], on_gpu, ways[0]);
    let second = steps(jobs[1], on_gpu, ways[1]);
    for (rank, (first, second)) in first.iter().zip(&second).enumerate() {
        assert!(first.0.iter().all(|step| step.loss.is_finite()), "{:?}", first.0);
        assert_eq!(first.0, second.0, "{what}: rank {rank}, {ways:?}");
        assert!(first.1 == second.1, "{what}: rank {rank}: other weights or moments, {ways:?}");
    }
}

/// Two jobs give the same but for rounding, of which there is some.
pub fn near(jobs: [&Job; 2], on_gpu: bool, what: &str) {
    let [first, second] = jobs.map(|job| steps(job, on_gpu, Way::Host));
    // Later a token may choose another expert by a last bit.
    let losses = |of: &[StepSummary]| -> Vec<f64> {
        of.iter().take(3).map(|step| step.loss).collect()
    };
    for (rank, (first, second)) in first.iter().zip(&second).enumerate() {
        let (found, expected) = (losses(&first.0), losses(&second.0));
        let away = found.iter().zip(&expected).map(|(a, b)| (a - b).abs() / b).fold(0.0, f64::max);
        assert!(away < 1e-5, "{what}: rank {rank}: {found:?} for {expected:?}");
        assert!(first.1 != second.1, "{what}: rank {rank}: the same way was taken");
    }
}

/// Of rank 0, of processors.
pub fn losses(job: &Job) -> Vec<f64> {
    let found = steps(job, false, Way::Host);
    found[0].0.iter().map(|step| step.loss).collect()
}
