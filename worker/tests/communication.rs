//! What two ranks tell each other in a step, beside what they must have told.

mod common;

use common::{Job, trainers};
use moe_worker::attempt::api::AttemptEnd;
use moe_worker::data::Corpus;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::Engine;
use moe_worker::gang::comm::Comm;
use moe_worker::state::snapshot::initialize;
use moejob_protocol::buckets::Buckets;
use moejob_protocol::communication::CommunicationReport;
use moejob_protocol::config::Recompute;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::owners::Holders;
use moejob_protocol::zero::{Turn, Zero, gathers};

/// A micro-batch a rank; each token chooses both experts, one of which each rank has.
fn job(layout: Layout) -> Job {
    let mut job = Job::new(layout);
    (job.config.model.experts.count, job.config.model.experts.per_token) = (2, 2);
    job.config.training.global_batch_size = 2;
    job
}

fn bytes(report: &CommunicationReport, verb: &str) -> u64 {
    let of = &report.verbs[verb];
    assert_eq!((of.link.as_str(), of.beside), ("host", false), "{verb}: {report:?}");
    assert!(of.seconds > 0.0, "{verb}: {report:?}");
    of.bytes
}

#[test]
fn a_step_tells_what_it_has_sent() {
    let job = job(Layout::contiguous(Mesh::data_parallel(2, 2)));
    let (ends, reports) = job.run(&mut trainers(2), None);
    assert!(ends.iter().all(|end| matches!(end, AttemptEnd::Completed { step: 10 })), "{ends:?}");
    let told: Vec<u64> = (reports.iter())
        .filter(|report| report.communication.is_some())
        .map(|report| report.step)
        .collect();
    assert_eq!(told, [4], "one of 16 steps, the fourth first");
    let line = &reports[3];
    let report = line.communication.as_ref().expect("it was looked at");
    assert_eq!(report.step, 4);

    let model = &job.config.model;
    let (tokens, dim, top_k) = (16, u64::from(model.hidden_size), 2);
    let layers = u64::from(model.num_hidden_layers);
    let row = dim * 4;
    // How many tokens leave, an id and a weight for each choice, and a token's row; in backward a
    // row of its gradient.
    let dispatched = layers * (4 + tokens * (top_k * (4 + 4) + row + row));
    // A row of the one expert here for each token there; in backward with the weight's gradient.
    let combined = layers * tokens * (row + row + 4);
    assert_eq!(bytes(report, "dispatch"), dispatched);
    assert_eq!(bytes(report, "combine"), combined);
    let half = half_of_shared(&job);
    assert_eq!(bytes(report, "reduceScatter"), WIDE * half);
    assert_eq!(bytes(report, "allGather"), half);
    let numbers = bytes(report, "allReduce");
    assert!(numbers > 0 && numbers.is_multiple_of(8), "numbers of f64: {numbers}");
    assert_eq!(report.verbs.len(), 5, "{report:?}");

    // It adds up: the phase, and what lies in others, which is less than these.
    let phases = &line.timing.phases;
    let within = |name: &str| report.within.get(name).copied().unwrap_or(0.0);
    assert!(within("forward") > 0.0 && within("forward") < phases.forward, "{report:?}");
    assert!(within("backward") > 0.0 && within("backward") < phases.backward, "{report:?}");
    assert!(within("numbers") > 0.0 && within("numbers") < phases.numbers, "{report:?}");
    let all = phases.communication + report.within.values().sum::<f64>();
    assert!((all - report.exposed_seconds).abs() < 1e-9, "{line:?}");
    let verbs: f64 = report.verbs.values().map(|of| of.seconds).sum();
    assert!(verbs <= report.exposed_seconds + 1e-9, "nothing is beside: {report:?}");
    assert!((0.0..1.0).contains(&report.exposed_share), "{report:?}");
}

/// A gang of one sends nothing, and says nothing of it.
#[test]
fn one_rank_tells_nothing() {
    let job = job(Layout::contiguous(Mesh::data_parallel(1, 1)));
    let (_, reports) = job.run(&mut trainers(1), None);
    assert_eq!(reports.len(), 10);
    assert!(reports.iter().all(|report| report.communication.is_none()));
}

/// Sums in fp32 are exact: they travel in fp64.
const WIDE: u64 = 2;

/// Bytes of the half of each bucket that both ranks hold.
fn half_of_shared(job: &Job) -> u64 {
    let (model, layout) = (&job.config.model, &job.config.layout);
    let all = Buckets::new(model, &model.params(), &Holders::new(model, layout));
    let shared = all.buckets.iter().filter(|bucket| bucket.holders[..] == [0, 1]);
    shared.map(|bucket| bucket.len / 2 * 4).sum()
}

/// The steps of rank 0 that were told of.
fn told(job: &Job, steps: u64) -> Vec<CommunicationReport> {
    let config = &job.config;
    let train = |comm: Comm| {
        let (training, rank) = (&config.training, comm.rank());
        let model = Model::new(&config.model, &config.layout, rank, training, 1);
        let mut engine = Engine::new(model.expect("an arena"), training, Links::new(comm));
        engine.look_each(4);
        initialize(&mut engine.model, training.seed);
        let corpus = Corpus::open(&config.data, training, config.model.vocab_size);
        let mut corpus = corpus.expect("text");
        let mut told = Vec::new();
        for step in 0..steps {
            engine.step(step, &mut corpus).expect("peers");
            told.extend(engine.take_communication());
        }
        assert!(rank == 0 || told.is_empty(), "rank 0 tells");
        told
    };
    std::thread::scope(|scope| {
        let comms = Comm::in_process(config.layout.mesh.world());
        let threads: Vec<_> =
            comms.into_iter().map(|comm| scope.spawn(move || train(comm))).collect();
        threads.into_iter().flat_map(|thread| thread.join().expect("no panic")).collect()
    })
}

#[test]
fn buckets_and_gathered_tokens_are_counted() {
    let mut job = job(Layout::contiguous(Mesh::data_parallel(2, 2)));
    common::fit_gpus(&mut job.config.model);
    // Rows travel by need: a token that chooses all experts needs both ranks.
    let top_k = u64::from(job.config.model.experts.count);
    job.config.model.experts.per_token = job.config.model.experts.count;
    // Three rounds, in the last of which rank 1 has no micro-batch.
    job.config.training.global_batch_size = 5;
    let told = told(&job, 9);
    assert_eq!(told.iter().map(|report| report.step).collect::<Vec<_>>(), [4, 8]);
    let (model, layout) = (&job.config.model, &job.config.layout);
    let (tokens, rounds) = (16, 3);
    let mixture = (0..model.num_hidden_layers).filter(|layer| model.is_moe_layer(*layer));
    let passes = rounds * mixture.count() as u64;
    let row = u64::from(model.hidden_size) * 4;
    let all = Buckets::new(model, &model.params(), &Holders::new(model, layout));
    let half = half_of_shared(&job);
    // Rank 1 has tokens in two rounds, and rank 0 half of the experts of each.
    let (back, here) = (passes / rounds * 2 * tokens, top_k / 2);
    for report in &told {
        let dispatched = passes * (4 + tokens * (row + top_k * (4 + 4) + row));
        assert_eq!(bytes(report, "dispatch"), dispatched);
        assert_eq!(bytes(report, "combine"), back * here * (row + row + 4));
        assert_eq!(bytes(report, "reduceScatter"), WIDE * half);
        assert_eq!(bytes(report, "allGather"), half);
        let numbers = bytes(report, "allReduce");
        assert!(numbers > 0 && numbers.is_multiple_of(8), "numbers of f64: {numbers}");
        assert_eq!(report.verbs.len(), 5, "{report:?}");
    }
    assert_eq!(bytes(&told[0], "allReduce"), bytes(&told[1], "allReduce"));

    // Dense gradients are summed in each round, and their weights gathered when they are wanted.
    job.config.training.compute.zero = Zero::Weights;
    let (layers, tied) = (job.config.model.num_hidden_layers, job.config.model.tie_word_embeddings);
    let gathers = gathers(layers, tied, Recompute::None, 3);
    let shared = all.buckets.iter().filter(|bucket| bucket.holders[..] == [0, 1]);
    let (mut reduced, mut gathered) = (0, 0);
    for bucket in shared {
        let (half, turns) = (bucket.len / 2 * 4, Turn::of(bucket.kind, 2).is_some());
        reduced += half * if turns { rounds } else { 1 };
        gathered += half * if turns { gathers(bucket.kind) } else { 1 };
    }
    assert!(reduced > 2 * half && gathered > 2 * half, "{reduced} {gathered} {half}");
    for report in self::told(&job, 9) {
        assert_eq!(bytes(&report, "reduceScatter"), WIDE * reduced);
        assert_eq!(bytes(&report, "allGather"), gathered);
        assert_eq!(report.verbs.len(), 5, "{report:?}");
    }
}
