//! A step on its device: what the host has to do with it, and what a number that is not finite
//! leaves behind.

mod common;

use common::{Job, bits, member, sources, state_hash, trainers};
use moe_worker::attempt::api::{AttemptEnd, Control, TrainerEvent};
use moe_worker::attempt::trainer::Trainer;
use moe_worker::data::Corpus;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::step::{Engine, StepSummary};
use moe_worker::gang::comm::{Comm, Links as Wires};
use moe_worker::state::snapshot::{cut, initialize};
use moejob_kernels::Traffic;
use moejob_protocol::config::Resume;
use moejob_protocol::layout::{Layout, Placement};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::report::RoutingReport;
use moejob_protocol::model::{AuxLossScope, BalanceLoss, RouterKind};
use std::sync::Mutex;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

/// Runs `each` with the engine of every rank, initialised, on threads of this process.
fn with_engines<T: Send>(job: &Job, each: impl Fn(&mut Engine, &mut Corpus) -> T + Sync) -> Vec<T> {
    let (config, each) = (&job.config, &each);
    let world = config.layout.mesh.world();
    let comms = if world == 1 { vec![Comm::solo(1)] } else { Comm::in_process(world) };
    std::thread::scope(|scope| {
        let threads: Vec<_> = comms
            .into_iter()
            .map(|comm| {
                scope.spawn(move || {
                    let (training, rank) = (&config.training, comm.rank());
                    let model = Model::new(&config.model, &config.layout, rank, training, 1);
                    let mut engine =
                        Engine::new(model.expect("an arena"), training, Links::new(comm));
                    initialize(&mut engine.model, training.seed);
                    let vocabulary = config.model.vocab_size;
                    let corpus = Corpus::open(&config.data, training, vocabulary);
                    each(&mut engine, &mut corpus.expect("text"))
                })
            })
            .collect();
        threads.into_iter().map(|thread| thread.join().expect("no panic")).collect()
    })
}

fn changed(change: impl Fn(&mut Job), layout: Layout) -> Job {
    let mut job = Job::new(layout);
    change(&mut job);
    job
}

/// Its routers are corrected, and balanced in this scope.
fn corrected(scope: AuxLossScope, layout: Layout) -> Job {
    let change = |job: &mut Job| {
        job.config.model.router.aux_loss_scope = scope;
        job.config.model.router.bias = true;
    };
    changed(change, layout)
}

/// The host's copies of the third step of each rank, and its micro-batches.
fn traffic(job: &Job) -> Vec<(Traffic, u64)> {
    with_engines(job, |engine, corpus| {
        engine.step(0, corpus).expect("peers");
        engine.step(1, corpus).expect("peers");
        let before = engine.model.device.traffic();
        engine.step(2, corpus).expect("peers");
        let after = engine.model.device.traffic();
        let mesh = &engine.model.layout.mesh;
        let own = mesh.micro_batches(engine.model.rank, engine.model.shape.micro_batches);
        let traffic = Traffic {
            writes: after.writes - before.writes,
            reads: after.reads - before.reads,
            waits: after.waits - before.waits,
        };
        (traffic, own.len() as u64)
    })
}

#[test]
fn the_host_writes_batches_and_reads_numbers_once() {
    let shuffled = Layout {
        placement: Placement::Ordered(vec![vec![1, 3, 2, 0]; 2]),
        ..layout(2, 2)
    };
    let layouts = [layout(1, 1), layout(2, 1), layout(2, 2), layout(4, 2), shuffled];
    type Change = fn(&mut Job);
    let routers: [(&str, u64, Change); 6] = [
        ("plain", 1, |_| {}),
        ("hf", 1, |job| job.config.model.router.aux_loss_scope = AuxLossScope::Hf),
        ("global", 2, |job| job.config.model.router.aux_loss_scope = AuxLossScope::Global),
        ("corrections", 1, |job| job.config.model.router.bias = true),
        ("capacity", 1, |job| {
            let router = &mut job.config.model.router;
            (router.kind, router.capacity_factor) = (RouterKind::Tutel, 1.1);
            (router.jitter, router.input_dropout) = (0.1, 0.1);
            router.balance_loss = BalanceLoss::LoadImportance;
            router.gate_noise = 1.0;
        }),
        ("documents", 1, |job| {
            job.config.data.reset_at_boundaries = true;
            job.config.data.end_of_document = Some(0);
        }),
    ];
    for (name, passes, change) in routers {
        for layout in &layouts {
            for (found, own) in traffic(&changed(change, layout.clone())) {
                // Tokens and targets; of documents, where they begin and positions, too.
                let each = if name == "documents" { 4 } else { 2 };
                let writes = 1 + passes * own * each;
                let expected = Traffic { writes, reads: 1, waits: 0 };
                assert_eq!(found, expected, "{name}, {own} micro-batches, {layout:?}");
            }
        }
    }
}

fn shard(engine: &mut Engine) -> Vec<u8> {
    let mut bytes = Vec::new();
    cut(&mut engine.model, &mut bytes).expect("a CPU");
    bytes
}

/// Three steps of every rank; before the second a broken one, whose weight is mended then.
fn steps(job: &Job, broken: bool) -> Vec<(Vec<StepSummary>, Vec<u8>)> {
    with_engines(job, |engine, corpus| {
        let mut summaries = vec![engine.step(0, corpus).expect("peers")];
        if broken && engine.model.rank == 0 {
            engine.spoil(1);
        }
        if broken {
            let before = shard(engine);
            let skipped = engine.step(1, corpus).expect("peers");
            let what = skipped.non_finite.expect("a gradient is not finite");
            assert!(what.starts_with("the gradient of model."), "{what}");
            assert!(skipped.loss.is_finite() && !skipped.grad_norm.is_finite());
            assert!(shard(engine) == before, "a skipped step changes nothing");
        }
        summaries.push(engine.step(1, corpus).expect("peers"));
        summaries.push(engine.step(2, corpus).expect("peers"));
        assert!(summaries.iter().all(|summary| summary.non_finite.is_none()));
        (summaries, shard(engine))
    })
}

#[test]
fn what_was_not_measured_is_absent() {
    let job = Job::new(layout(1, 1));
    for (measured, keys) in [(false, 0), (true, 1)] {
        let entropy = with_engines(&job, |engine, corpus| {
            if measured {
                return engine.step(0, corpus).expect("no peers").router_entropy;
            }
            engine.model.begin_step(&job.config.training, 0);
            engine.model.reduce_numbers(&mut engine.links);
            engine.model.read_numbers(&job.config.training, 0).router_entropy
        });
        assert!(entropy.iter().all(|entropy| entropy.is_some() == measured), "{entropy:?}");
        let report = RoutingReport { router_entropy: entropy[0], ..RoutingReport::default() };
        let line = serde_json::to_string(&report).expect("plain values");
        assert_eq!(line.matches("routerEntropy").count(), keys, "{line}");
    }
}

#[test]
fn a_skipped_step_changes_nothing_and_is_done_again_with_the_same_bits() {
    for layout in [layout(1, 1), layout(3, 3), layout(4, 2)] {
        for scope in [AuxLossScope::MicroBatch, AuxLossScope::Global] {
            let job = corrected(scope, layout.clone());
            let (undisturbed, disturbed) = (steps(&job, false), steps(&job, true));
            assert!(disturbed == undisturbed, "{layout:?}, {scope:?}");
        }
    }
}

/// The second and third step, which find the host's memory of routed rows too small at first.
#[test]
fn rows_without_room_are_routed_again_with_more() {
    let mut again = 0;
    for layout in [layout(2, 2), layout(3, 3), layout(4, 2)] {
        let job = Job::new(layout.clone());
        let run = |headroom: Option<f64>| {
            with_engines(&job, |engine, corpus| {
                if let Some(headroom) = headroom {
                    engine.model.group.commit(headroom);
                }
                let steps: Vec<StepSummary> =
                    (0..3).map(|step| engine.step(step, corpus).expect("peers")).collect();
                let reads = engine.model.device.traffic().reads;
                (steps, shard(engine), reads)
            })
        };
        let (whole, grown) = (run(None), run(Some(1.0)));
        for (whole, grown) in whole.iter().zip(&grown) {
            assert_eq!(grown.0, whole.0, "{layout:?}");
            assert!(grown.1 == whole.1, "{layout:?}");
            assert_eq!(whole.2, 3, "a read a step");
            again += grown.2 - whole.2;
        }
        // All of a gang grow alike.
        assert!(grown.iter().all(|rank| rank.2 == grown[0].2), "{layout:?}");
    }
    assert!(again > 0, "even routing by chance");
}

/// Ends `steps`, each begun before the one before it has ended.
fn begun_ahead(
    engine: &mut Engine,
    corpus: &mut Corpus,
    steps: std::ops::Range<u64>,
) -> Vec<StepSummary> {
    let mut next = steps.start;
    let mut summaries = Vec::new();
    for step in steps.clone() {
        while next < steps.end && next <= step + 1 {
            engine.begin(next, corpus).expect("peers");
            next += 1;
        }
        summaries.push(engine.end(corpus).expect("peers"));
    }
    assert!(engine.is_settled());
    summaries
}

#[test]
fn steps_that_are_begun_ahead_give_the_same_bits() {
    for layout in [layout(1, 1), layout(3, 3), layout(4, 2)] {
        for scope in [AuxLossScope::MicroBatch, AuxLossScope::Global] {
            let job = corrected(scope, layout.clone());
            let expected = with_engines(&job, |engine, corpus| {
                let steps = (0..5).map(|step| engine.step(step, corpus).expect("peers"));
                (steps.collect::<Vec<_>>(), shard(engine))
            });
            // The first, one with another behind it, both of these, the last.
            for spoiled in [vec![], vec![0], vec![1], vec![1, 2], vec![2, 3], vec![4]] {
                let found = with_engines(&job, |engine, corpus| {
                    if engine.model.rank == 0 {
                        spoiled.iter().for_each(|step| engine.spoil(*step));
                    }
                    (begun_ahead(engine, corpus, 0..5), shard(engine))
                });
                assert!(found == expected, "{layout:?}, {scope:?}, {spoiled:?}");
            }
        }
    }
}

#[test]
fn rows_without_room_are_routed_again_with_a_step_behind_them() {
    let job = Job::new(layout(4, 2));
    let run = |headroom: Option<f64>| {
        with_engines(&job, |engine, corpus| {
            if let Some(headroom) = headroom {
                engine.model.group.commit(headroom);
            }
            let steps = begun_ahead(engine, corpus, 0..3);
            (steps, shard(engine), engine.model.device.traffic().reads)
        })
    };
    let (whole, grown) = (run(None), run(Some(1.0)));
    for (whole, grown) in whole.iter().zip(&grown) {
        assert!((&whole.0, &whole.1) == (&grown.0, &grown.1));
        assert_eq!(whole.2, 3, "a read a step");
        assert!(grown.2 > whole.2, "even routing by chance");
    }
}

#[test]
fn a_step_behind_one_that_cannot_be_done_leaves_nothing() {
    for layout in [layout(1, 1), layout(4, 2)] {
        let job = changed(|job| job.config.model.router.bias = true, layout);
        with_engines(&job, |engine, corpus| {
            engine.step(0, corpus).expect("peers");
            let before = shard(engine);
            if engine.model.rank == 0 {
                [1, 1].into_iter().for_each(|step| engine.spoil(step));
            }
            engine.begin(1, corpus).expect("peers");
            engine.begin(2, corpus).expect("peers");
            let ended = engine.end(corpus).expect("peers");
            assert!(ended.non_finite.is_some(), "{ended:?}");
            assert!(engine.is_settled());
            assert!(shard(engine) == before, "neither of the two counts");
            let done = engine.step(1, corpus).expect("peers");
            assert!(done.non_finite.is_none() && shard(engine) != before);
        });
    }
}

/// A whole job whose ranks begin steps ahead.
#[test]
fn a_job_whose_steps_are_begun_ahead_has_the_same_bits() {
    let ahead = |count| -> Vec<Trainer> {
        (0..count).map(|_| Trainer::new().with_steps_ahead()).collect()
    };
    let last = |job: &Job| state_hash(&job.location().join("step-00000010"));
    let whole = Job::new(layout(2, 2));
    let (_, reports) = whole.run(&mut trainers(2), None);
    let (expected, state) = (bits(&reports), last(&whole));
    for spoiled in [vec![], vec![0, 4, 9], vec![5, 6]] {
        let job = Job::new(layout(2, 2));
        let broken = Trainer::with_spoiled(spoiled.clone()).with_steps_ahead();
        let mut group = ahead(1);
        group.push(broken);
        let (ends, reports) = job.run(&mut group, None);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
        assert!(bits(&reports) == expected && last(&job) == state, "{spoiled:?}");
    }
    for asked in 1..10 {
        let mut job = Job::new(layout(2, 2));
        let mut group = ahead(2);
        let (ends, reports) = job.run(&mut group, Some(asked));
        let step = reports.len() as u64;
        // What is asked for before a step is heard with its numbers, when the next one may be
        // under way.
        assert!(asked <= step && step <= asked + 1, "{step} for {asked}");
        assert!(ends.iter().all(|end| *end == AttemptEnd::Stopped { step }), "{ends:?}");
        let mut found = bits(&reports);
        let earlier = job.config.layout.clone();
        let sources = sources(&group, 1, step, 2);
        job.config.resume = Resume::Memory { step, attempt: 1, layout: earlier, sources };
        job.config.attempt = 2;
        let (ends, reports) = job.run(&mut group, None);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
        found.extend(bits(&reports));
        assert!(found == expected && last(&job) == state, "stopped behind step {step}");
    }
}

/// A rank may be held up between two steps, by a snapshot for instance. The others' devices do not
/// wait for it meanwhile, since there is a limit to what a step may take: they begin theirs once it
/// is there.
#[test]
fn a_step_ahead_is_begun_when_all_are_there() {
    let job = changed(|job| job.config.recovery.memory_every_steps = 1, layout(2, 2));
    let wires = Wires::in_process(2, 1);
    let calls = |rank| wires.memory().long(wires.collective(rank)).load(Ordering::SeqCst);
    let (seen, calls) = (Mutex::new(Vec::new()), &calls);
    let held_up = |rank: u32| {
        if rank == 0 {
            let own = calls(0);
            let end = Instant::now() + Duration::from_secs(20);
            while calls(1) <= own && Instant::now() < end {
                std::thread::yield_now();
            }
            // If it went on, it would have by now.
            std::thread::sleep(Duration::from_millis(50));
            seen.lock().expect("no panic").push(calls(1) - own);
        }
    };
    let held_up = &held_up;
    std::thread::scope(|scope| {
        for rank in 0..2 {
            let (comm, mut config) = (wires.comm(rank), job.config.clone());
            (config.rank, config.members) = (Some(rank), (0..2).map(member).collect());
            scope.spawn(move || {
                let mut trainer = Trainer::new().with_steps_ahead();
                let end = trainer.run_attempt(&config, comm, &Control::default(), &mut |event| {
                    if let TrainerEvent::Held(_) = event {
                        held_up(rank);
                    }
                });
                assert_eq!(end, AttemptEnd::Completed { step: 10 });
            });
        }
    });
    let mut seen = seen.into_inner().expect("no panic");
    // Behind the last step nobody says anything.
    assert!(seen.pop().is_some() && seen.len() > 5, "{seen:?}");
    assert!(seen.iter().all(|more| *more == 1), "what they say and nothing else: {seen:?}");
}

fn spoiled(spoiled: Option<Vec<u64>>) -> (Job, Vec<AttemptEnd>, Vec<[u64; 5]>) {
    let job = Job::new(layout(2, 2));
    let mut group: Vec<Trainer> = match spoiled {
        Some(steps) => vec![Trainer::new(), Trainer::with_spoiled(steps)],
        None => trainers(2),
    };
    let (ends, reports) = job.run(&mut group, None);
    (job, ends, bits(&reports))
}

/// A fault of the machine that does not come back leaves no trace.
#[test]
fn a_job_goes_on_after_a_number_that_was_not_finite_once() {
    let (whole, ends, expected) = spoiled(None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
    let (job, ends, found) = spoiled(Some(vec![0, 4, 9]));
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
    let last = |job: &Job| state_hash(&job.location().join("step-00000010"));
    assert_eq!((found, last(&job)), (expected, last(&whole)));
}

#[test]
fn a_job_ends_by_name_when_a_number_is_not_finite_twice() {
    let (_, ends, reports) = spoiled(Some(vec![4, 4]));
    assert_eq!(reports.len(), 4);
    for end in ends {
        let AttemptEnd::Failed(failure) = end else { panic!("{end:?}") };
        assert_eq!(failure.exit_code, 1);
        let begins = "the gradient of model.";
        assert!(failure.message.starts_with(begins), "{}", failure.message);
        assert!(failure.message.contains("at step 5, twice"), "{}", failure.message);
    }
}
