//! Experts' tokens travel at once or in stages, first within workers and then between them: the
//! same bits.

mod common;

use common::Job;
use moe_worker::data::Corpus;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::Engine;
use moe_worker::gang::comm::Comm;
use moe_worker::state::snapshot::initialize;
use moejob_protocol::config::Exchange;
use moejob_protocol::layout::{Layout, Placement};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{QkNorm, RouterKind};

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// A job of three steps on workers of so many ranks.
fn job(layout: Layout, ranks: u32, exchange: Exchange, change: &impl Fn(&mut Job)) -> Job {
    let mut job = Job::new(layout);
    job.config.training.steps = 3;
    // Each token has choices of one rank and of several.
    job.config.model.experts.count = 9;
    job.config.model.experts.per_token = 4;
    (job.config.ranks, job.config.exchange) = (ranks, exchange);
    change(&mut job);
    job
}

/// Both ways give the bits of one rank.
fn check(name: &str, shapes: &[(Layout, u32)], change: impl Fn(&mut Job)) {
    let one = job(layout(1, 1), 1, Exchange::Flat, &change).whole();
    for (layout, ranks) in shapes {
        for exchange in [Exchange::Flat, Exchange::Hierarchical] {
            let found = job(layout.clone(), *ranks, exchange, &change).whole();
            assert_eq!(found, one, "{name}, {exchange:?}, workers of {ranks}, {layout:?}");
        }
    }
}

#[test]
fn two_workers_of_four_and_odd_ones() {
    // 11 micro-batches: in the second round some ranks have none. 9 experts: one rank has two.
    let even = [(layout(8, 8), 4), (layout(8, 4), 4), (layout(8, 8), 2)];
    // Groups that lie on two workers of three, by four and two ranks or by two and four; a worker
    // alone with one rank.
    let odd = [(layout(12, 6), 4), (layout(6, 3), 2), (layout(9, 9), 4), (layout(3, 3), 1)];
    for shapes in [&even[..], &odd] {
        check("plain", shapes, |job| {
            job.config.training.global_batch_size = 13;
        });
    }
}

#[test]
fn four_workers_of_eight() {
    check("many", &[(layout(32, 32), 8)], |job| {
        job.config.training.steps = 2;
        job.config.training.global_batch_size = 35;
        job.config.model.experts.count = 37;
    });
}

#[test]
fn ranks_without_experts_or_tokens() {
    let slots = [vec![0, 1, 2, 3, 8], vec![], vec![4, 6], vec![5], vec![7], vec![2, 3]];
    let uneven = Layout {
        placement: Placement::Explicit(vec![slots.to_vec(); 2]),
        ..layout(6, 6)
    };
    check("uneven", &[(uneven.clone(), 3), (uneven.clone(), 2), (uneven, 4)], |_| {});
    check("idle", &[(layout(8, 8), 4)], |job| {
        job.config.training.global_batch_size = 5;
    });
}

#[test]
fn other_routers_and_models() {
    let shapes = [(layout(4, 4), 2), (layout(6, 6), 4)];
    check("capacity", &shapes, |job| {
        let router = &mut job.config.model.router;
        (router.kind, router.capacity_factor) = (RouterKind::Tutel, 1.1);
        job.config.training.global_batch_size = 7;
    });
    check("one choice", &shapes, |job| {
        job.config.model.experts.per_token = 1;
        job.config.model.qk_norm = QkNorm::PerHead;
        job.config.training.global_batch_size = 6;
    });
}

/// The collectives of the second step of each rank.
fn collectives(job: &Job) -> Vec<u64> {
    let config = &job.config;
    std::thread::scope(|scope| {
        let rank = |comm: Comm| {
            scope.spawn(move || {
                let (training, rank) = (&config.training, comm.rank());
                let model = Model::new(&config.model, &config.layout, rank, training, 1);
                let links = Links::new(comm);
                let links = match config.exchange {
                    Exchange::Flat => links,
                    Exchange::Hierarchical => links.in_stages(config.ranks),
                };
                let mut engine = Engine::new(model.expect("an arena"), training, links);
                initialize(&mut engine.model, training.seed);
                let corpus = Corpus::open(&config.data, training, config.model.vocab_size);
                let mut corpus = corpus.expect("text");
                engine.step(0, &mut corpus).expect("peers");
                let before = engine.links.comm().collective();
                engine.step(1, &mut corpus).expect("peers");
                engine.links.comm().collective() - before
            })
        };
        let threads: Vec<_> =
            Comm::in_process(config.layout.mesh.world()).into_iter().map(rank).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// Choices, tokens and their rows, and in backward gradients both ways: each in two collectives.
#[test]
fn stages_are_taken() {
    let of = |exchange| collectives(&job(layout(4, 4), 2, exchange, &|_| {}));
    let (flat, staged) = (of(Exchange::Flat), of(Exchange::Hierarchical));
    let (layers, rounds, verbs) = (2, 2, 5);
    for (flat, staged) in flat.into_iter().zip(staged) {
        assert_eq!(staged, flat + layers * rounds * verbs);
    }
}

/// A rank is lost in the middle of a step: nobody hangs, and the others go on from memory with the
/// bits of an undisturbed run, the last of them alone on its worker.
#[test]
fn a_lost_rank_leaves_nobody_waiting() {
    let change = |job: &mut Job| {
        job.config.training.steps = 8;
        job.config.training.global_batch_size = 7;
        job.config.recovery.memory_every_steps = 1;
    };
    let one = job(layout(1, 1), 1, Exchange::Flat, &change).whole().0;
    // On a machine that is busy elsewhere the whole job may be done before the cut.
    let was_lost = || {
        let job = job(layout(6, 6), 2, Exchange::Hierarchical, &change);
        let rows = job.losing_the_last(layout(5, 5), |_| {});
        rows.map(|rows| assert_eq!(rows, one)).is_some()
    };
    assert!((0..5).any(|_| was_lost()), "never cut off in time");
}
