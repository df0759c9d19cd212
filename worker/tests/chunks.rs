//! Tokens travel to their experts in chunks, beside the products: the same bits as at once, and
//! less of what the ops wait for.

mod common;

use common::Job;
use moe_worker::data::Corpus;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::gang::comm::{Comm, Links as Pipes, PeerPipes, Pipe, Read, Shape as Ranks};
use moe_worker::state::snapshot::initialize;
use moejob_kernels::Device;
use moejob_protocol::communication::CommunicationReport;
use moejob_protocol::config::{Exchange, OVERLAP_DEGREES, Recompute};
use moejob_protocol::layout::{Layout, Placement};
use moejob_protocol::memory::{Shape, rank_memory};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{AuxLossScope, RouterKind};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// A job of three steps on workers of two ranks.
fn job(layout: Layout, degree: u32, exchange: Exchange, change: &impl Fn(&mut Job)) -> Job {
    let mut job = Job::new(layout);
    job.config.training.steps = 3;
    // Each token has choices of one rank and of several.
    job.config.model.experts.count = 9;
    job.config.model.experts.per_token = 4;
    (job.config.ranks, job.config.exchange) = (2, exchange);
    job.config.overlap_degree = degree;
    change(&mut job);
    job
}

/// Every degree gives the bits of one rank, both ways.
fn check(name: &str, layouts: &[Layout], change: impl Fn(&mut Job)) {
    let one = job(layout(1, 1), 1, Exchange::Flat, &change).whole();
    for layout in layouts {
        for degree in OVERLAP_DEGREES {
            for exchange in [Exchange::Flat, Exchange::Hierarchical] {
                let found = job(layout.clone(), degree, exchange, &change).whole();
                assert_eq!(found, one, "{name}, degree {degree}, {exchange:?}, {layout:?}");
            }
        }
    }
}

#[test]
fn two_to_six_ranks() {
    // 13 micro-batches: in the last round some ranks have none. 9 experts: one rank has more.
    check("plain", &[layout(2, 2), layout(3, 3), layout(4, 4), layout(6, 3)], |job| {
        job.config.training.global_batch_size = 13;
    });
}

#[test]
fn ranks_without_experts_or_tokens() {
    let slots = [vec![0, 1, 2, 3, 8], vec![], vec![4, 6], vec![5, 7]];
    let uneven =
        Layout { placement: Placement::Explicit(vec![slots.to_vec(); 2]), ..layout(4, 4) };
    check("uneven", &[uneven.clone()], |_| {});
    check("idle", &[uneven, layout(4, 4)], |job| job.config.training.global_batch_size = 3);
}

/// Of three tokens the first chunk of four has none.
#[test]
fn chunks_without_tokens() {
    for tokens in [1, 3, 7] {
        check("few tokens", &[layout(3, 3)], |job| {
            job.config.training.sequence_length = tokens;
        });
    }
}

#[test]
fn other_routers_and_what_is_computed_again() {
    check("capacity", &[layout(4, 4)], |job| {
        let router = &mut job.config.model.router;
        (router.kind, router.capacity_factor) = (RouterKind::Tutel, 1.1);
    });
    check("one balance of all layers", &[layout(3, 3)], |job| {
        job.config.model.router.aux_loss_scope = AuxLossScope::Hf;
        job.config.model.experts.per_token = 1;
    });
    for recompute in [Recompute::Experts, Recompute::Full] {
        check("again", &[layout(3, 3)], |job| job.config.training.recompute = recompute);
    }
}

/// More rows than a product sums in one chain of 256.
#[test]
fn many_rows_of_an_expert() {
    check("many rows", &[layout(2, 2)], |job| {
        let model = &mut job.config.model;
        (model.experts.count, model.experts.per_token) = (2, 2);
        job.config.training.sequence_length = 530;
        (job.config.training.steps, job.config.training.global_batch_size) = (1, 2);
    });
}

/// `steps` of each rank of `job`, over these ways to each other.
fn with_engines<T: Send>(
    job: &Job,
    comms: Vec<Comm>,
    of_rank: impl Fn(&mut Engine, &mut Corpus) -> T + Sync,
) -> Vec<T> {
    let config = &job.config;
    let train = |comm: Comm| {
        let (training, rank) = (&config.training, comm.rank());
        let shape = Shape::new(&config.model, &config.layout, rank, training);
        let shape = shape.in_chunks(&config.model, training, config.overlap_degree);
        let device = Device::cpu(1, 0).expect("a thread");
        let model = Model::on(device, shape, &config.model, &config.layout, rank, training);
        let links = match config.exchange {
            Exchange::Flat => Links::new(comm),
            Exchange::Hierarchical => Links::new(comm).in_stages(config.ranks),
        };
        let mut engine = Engine::new(model.expect("an arena"), training, links);
        initialize(&mut engine.model, training.seed);
        let corpus = Corpus::open(&config.data, training, config.model.vocab_size);
        of_rank(&mut engine, &mut corpus.expect("text"))
    };
    std::thread::scope(|scope| {
        let spawn = |comm: Comm| scope.spawn(|| train(comm));
        let threads: Vec<_> = comms.into_iter().map(spawn).collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

/// A chunk is an exchange of tokens and one of rows, in forward and in backward; in stages two.
#[test]
fn chunks_are_taken() {
    let collectives = |degree, exchange| {
        let job = job(layout(4, 4), degree, exchange, &|_| {});
        with_engines(&job, Comm::in_process(4), |engine, corpus| {
            engine.step(0, corpus).expect("peers");
            let before = engine.links.comm().collective();
            engine.step(1, corpus).expect("peers");
            engine.links.comm().collective() - before
        })
    };
    let (layers, rounds, verbs) = (2, 2, 4);
    for (exchange, each) in [(Exchange::Flat, 1), (Exchange::Hierarchical, 2)] {
        let one = collectives(1, exchange);
        for degree in [2, 4] {
            let more = layers * rounds * verbs * each * u64::from(degree - 1);
            let expected: Vec<u64> = one.iter().map(|count| count + more).collect();
            assert_eq!(collectives(degree, exchange), expected, "{degree}, {exchange:?}");
        }
    }
}

/// Memory for rows that is too small at first, for all chunks together: the same steps.
#[test]
fn rows_without_room_are_routed_again_with_more() {
    let run = |degree, exchange, headroom: Option<f64>| {
        let job = job(layout(4, 2), degree, exchange, &|_| {});
        let all = with_engines(&job, Comm::in_process(4), |engine, corpus| {
            if let Some(headroom) = headroom {
                engine.model.group.commit(headroom);
            }
            let steps = (0..3).map(|step| engine.step(step, corpus).expect("peers"));
            let steps: Vec<StepSummary> = steps.collect();
            (steps, engine.model.device.traffic().reads)
        });
        let reads: u64 = all.iter().map(|of| of.1).sum();
        (all.into_iter().map(|of| of.0).collect::<Vec<_>>(), reads)
    };
    let (one, reads) = run(1, Exchange::Flat, None);
    for exchange in [Exchange::Flat, Exchange::Hierarchical] {
        for degree in [2, 4] {
            let (grown, more) = run(degree, exchange, Some(1.0));
            assert_eq!(grown, one, "degree {degree}, {exchange:?}");
            assert!(more > reads, "even routing by chance: degree {degree}, {exchange:?}");
        }
    }
}

/// A rank is lost in the middle of a step: nobody hangs, and the others go on from memory with the
/// bits of an undisturbed run, with another degree.
#[test]
fn a_lost_rank_leaves_nobody_waiting() {
    let change = |job: &mut Job| {
        job.config.training.steps = 8;
        job.config.training.global_batch_size = 7;
        job.config.recovery.memory_every_steps = 1;
    };
    let one = job(layout(1, 1), 1, Exchange::Flat, &change).whole().0;
    // On a machine that is busy elsewhere the whole job may be done before the cut.
    let was_lost = |exchange| {
        let job = job(layout(4, 4), 4, exchange, &change);
        let rows = job.losing_the_last(layout(3, 3), |job| job.config.overlap_degree = 2);
        rows.map(|rows| assert_eq!(rows, one)).is_some()
    };
    for exchange in [Exchange::Flat, Exchange::Hierarchical] {
        assert!((0..5).any(|_| was_lost(exchange)), "never cut off in time");
    }
}

/// What chunks take is planned: words for the order of rows, and what the thread sends and gets.
#[test]
fn chunks_are_counted() {
    let memory = |layout: Layout, degree| {
        // With so many rows that these are what exchanges take.
        let job = job(layout, degree, Exchange::Flat, &|job| {
            job.config.training.sequence_length = 65_536;
        });
        let (config, training) = (&job.config, &job.config.training);
        let (model, layout) = (&config.model, &config.layout);
        let parts = rank_memory(model, layout, 0, training, &config.recovery, 4, degree).parts;
        let of = |name: &str| parts.iter().find(|part| part.name == name).map(|part| part.bytes);
        ["scratch", "exchange"].map(|name| of(name).expect("a part"))
    };
    let [one, two, four] = OVERLAP_DEGREES.map(|degree| memory(layout(4, 4), degree));
    assert!(one[0] < two[0] && one[1] < two[1], "{one:?}, {two:?}");
    assert_eq!(two, four, "the same rows in other chunks");
    // Nothing travels to experts.
    assert_eq!(memory(layout(4, 1), 1), memory(layout(4, 1), 4));
}

/// Moves what comes out of `from` into `to`, so many bytes a second, until it is over.
fn pass(from: &Pipe, to: &Pipe, rate: f64, over: &AtomicBool) {
    let (mut bytes, mut free) = (vec![0; 16 << 10], Instant::now());
    while !over.load(Ordering::Relaxed) {
        match from.read(&mut bytes) {
            Read::Some(count) => {
                // The line is busy for so long, whenever this thread is woken.
                free = free.max(Instant::now()) + Duration::from_secs_f64(count as f64 / rate);
                std::thread::sleep(free.saturating_duration_since(Instant::now()));
                loop {
                    match to.space() {
                        Ok(space) if space >= count => break,
                        Ok(_) => std::thread::sleep(Duration::from_micros(100)),
                        // The peer is done.
                        Err(_) => return,
                    }
                }
                to.push(&bytes[..count], &[]);
            }
            Read::Empty => std::thread::sleep(Duration::from_micros(100)),
            Read::Ended { .. } => return,
        }
    }
}

/// Ends the line, also where a test fails.
struct Over<'a>(&'a AtomicBool);

impl Drop for Over<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// What rank 0 tells of the fourth step of two ranks with a line of so many bytes a second between
/// them, and the losses.
fn over_a_line(job: &Job, rate: f64) -> (CommunicationReport, Vec<StepSummary>) {
    let ends: Vec<Pipes> = (0..2)
        .map(|first| Ranks { attempt: 1, first, count: 1, world: 2, strands: 0 })
        .map(|ranks| Pipes::create(ranks).expect("memory"))
        .collect();
    let pairs = |own: usize| ends[own].pairs(1 - own as u32..2 - own as u32);
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        let _over = Over(&over);
        for (one, other) in pairs(0).into_iter().zip(pairs(1)) {
            let way = |from: &PeerPipes, to: &PeerPipes| {
                let (from, to, over) = (from.outgoing.clone(), to.incoming.clone(), &over);
                scope.spawn(move || pass(&from, &to, rate, over));
            };
            way(&one, &other);
            way(&other, &one);
        }
        let comms = ends.iter().zip(0..).map(|(end, rank)| end.comm(rank)).collect();
        let told = with_engines(job, comms, |engine, corpus| {
            engine.look_each(4);
            let steps: Vec<_> =
                (0..4).map(|step| engine.step(step, corpus).expect("peers")).collect();
            (engine.take_communication(), steps)
        });
        let (report, steps) = told.into_iter().next().expect("rank 0");
        (report.expect("the fourth step is looked at"), steps)
    })
}

/// Between two machines with a slow line: what the ops wait for is less, what travels is not.
#[test]
fn over_a_slow_line_the_ops_wait_for_less() {
    let run = |degree| {
        let mut job = job(layout(2, 2), degree, Exchange::Flat, &|job| {
            let model = &mut job.config.model;
            (model.hidden_size, model.experts.intermediate_size) = (128, 512);
            (model.experts.count, model.experts.per_token) = (4, 2);
            job.config.training.sequence_length = 512;
            job.config.training.global_batch_size = 2;
        });
        job.config.ranks = 1;
        over_a_line(&job, 20e6)
    };
    let within = |report: &CommunicationReport| -> f64 {
        ["forward", "backward"].iter().filter_map(|phase| report.within.get(*phase)).sum()
    };
    // On a machine that is busy elsewhere the ops may wait for a thread that does not run.
    let less = || {
        let (one, four) = (run(1), run(4));
        check_line(&one, &four);
        let waits = [&one.0, &four.0].map(within);
        println!("the ops wait for {waits:?} s of dispatch and combine");
        waits[1] < 0.8 * waits[0]
    };
    assert!((0..3).any(|_| less()), "chunks hide nothing");
}

/// The same is computed and sent, beside the ops with several chunks.
fn check_line(
    (one, steps): &(CommunicationReport, Vec<StepSummary>),
    (four, same): &(CommunicationReport, Vec<StepSummary>),
) {
    assert_eq!(steps, same);
    assert!(!one.verbs["dispatch"].beside && four.verbs["dispatch"].beside);
    for verb in ["dispatch", "combine"] {
        assert_eq!(one.verbs[verb].bytes, four.verbs[verb].bytes, "{verb}");
        assert!(four.verbs[verb].seconds > 0.0, "{verb}: {four:?}");
    }
}
