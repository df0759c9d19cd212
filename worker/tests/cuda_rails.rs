//! Expert groups whose tokens travel along rails, by NCCL. The GPUs of one machine stand for nodes
//! of one, two or four GPUs. Skipped where there are less than two. Tokens travel through windows
//! within the nodes, and by NCCL with `MOEJOB_PEER=off` before it.

mod common;

use common::Job;
use moe_worker::data::Corpus;
use moe_worker::engine::links::PeerUse;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::gang::comm::Comm;
use moe_worker::state::snapshot::{cut, initialize};
use moejob_kernels::cuda::Gpu;
use moejob_protocol::config::{Backend, Exchange, Precision};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::rails::Rails;

/// More micro-batches than ranks, so that one has a round more than the others.
fn job(gpus: u32, ep: u32, precision: Precision) -> Job {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(gpus, ep)));
    let model = &mut job.config.model;
    (model.hidden_size, model.head_dim, model.experts.intermediate_size) = (64, 32, 64);
    (model.experts.count, model.dense_intermediate_size) = (32, 128);
    // Sums of two would round alike in any order.
    model.experts.per_token = 4;
    model.router.bias_update_rate = 0.0;
    let training = &mut job.config.training;
    (training.precision, training.adamw.learning_rate) = (precision, 0.001);
    (training.sequence_length, training.global_batch_size) = (32, gpus + 1);
    training.compute.backend = Backend::Cuda;
    job.config.ranks = gpus;
    job
}

/// The same on nodes of so many.
fn along_rails(mut job: Job, ranks: u32) -> Job {
    (job.config.ranks, job.config.exchange) = (ranks, Exchange::Hierarchical);
    job
}

/// Summaries of some steps of each rank, and its state after them.
fn steps(job: &Job) -> Vec<(Vec<StepSummary>, Vec<u8>)> {
    let config = &job.config;
    let train = |comm: Comm| {
        let (training, rank) = (&config.training, comm.rank());
        let engine = Engine::open_on(config, rank, comm, rank as usize);
        let mut engine = engine.expect("a GPU for each rank");
        let staged = config.exchange == Exchange::Hierarchical;
        let rails = Rails::of(&config.layout.mesh, config.ranks).filter(|_| staged);
        assert_eq!((engine.model.group.rails, staged), (rails, rails.is_some()));
        initialize(&mut engine.model, training.seed);
        engine.links.meet().expect("all are here");
        let corpus = Corpus::open(&config.data, training, config.model.vocab_size);
        let mut corpus = corpus.expect("text");
        let steps = (0..5).map(|step| engine.step(step, &mut corpus).expect("peers")).collect();
        let mut state = Vec::new();
        cut(&mut engine.model, &mut state).expect("the device works");
        engine.all_arrived().expect("the device works");
        engine.leave().expect("nothing waits any more");
        (steps, state)
    };
    std::thread::scope(|scope| {
        let comms = Comm::in_process(config.layout.mesh.world());
        let threads: Vec<_> = comms.into_iter().map(|comm| scope.spawn(|| train(comm))).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn is_same(found: &[(Vec<StepSummary>, Vec<u8>)], other: &[(Vec<StepSummary>, Vec<u8>)], of: &str) {
    for (rank, (found, other)) in found.iter().zip(other).enumerate() {
        assert!(found.0.iter().all(|step| step.loss.is_finite()), "{:?}", found.0);
        assert_eq!(found.0, other.0, "{of}: rank {rank}");
        assert!(found.1 == other.1, "{of}: rank {rank}: other weights or moments");
    }
}

/// The same bits every time, and those of the flat way but for rounding: exactly those where nodes
/// have one GPU each and NCCL adds in the flat way, too. Windows add in the order of ranks, which
/// rounds alike where there are two.
#[test]
fn gpus_train_alike_along_rails() {
    let count = Gpu::count().map_or(0, |count| count as u32);
    // GPUs, of a group, of a node.
    let shapes = [(2, 2, 1), (4, 4, 1), (4, 4, 2), (8, 4, 2), (8, 8, 2), (8, 8, 4)];
    let fitting: Vec<(u32, u32, u32)> =
        shapes.into_iter().filter(|(gpus, _, _)| *gpus <= count).collect();
    if fitting.is_empty() {
        println!("skipped: {count} GPUs, and two are needed");
    }
    for (gpus, ep, ranks) in fitting {
        for precision in [Precision::Fp32, Precision::Bf16] {
            let of = format!("{gpus} GPUs, groups of {ep}, nodes of {ranks}, {precision:?}");
            let rails = along_rails(job(gpus, ep, precision), ranks);
            let (found, again) = (steps(&rails), steps(&rails));
            is_same(&found, &again, &of);
            let flat = steps(&job(gpus, ep, precision));
            let adds_alike = ep == 2 || PeerUse::said().blocks().is_none();
            if ranks == 1 && adds_alike {
                is_same(&found, &flat, &of);
            }
            // Later a token may choose another expert by a last bit.
            let most = if precision == Precision::Fp32 { 1e-5 } else { 1e-2 };
            for (found, flat) in found[0].0.iter().zip(&flat[0].0).take(3) {
                let away = (found.loss - flat.loss).abs() / flat.loss;
                println!("{of}: {away:e}");
                assert!(away < most, "{of}: {} for {}", found.loss, flat.loss);
            }
        }
    }
}
