//! The first steps of an attempt try several ways to exchange, and the fastest stays: the bits of
//! any one way, whatever is chosen, and the same choice on all ranks.

mod common;

use common::{Job, bits, member, run_and_tell, sources, state_hash, trainers};
use moe_worker::attempt::api::{AttemptEnd, Control, TrainerEvent};
use moe_worker::attempt::trainer::Trainer;
use moe_worker::gang::comm::Comm;
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::config::{Exchange, Resume, Way};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::report::{Detail, Event, EventKind, StepReport};
use std::sync::Mutex;
use std::thread::ScopedJoinHandle;
use std::time::Duration;

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

const STEPS: u64 = 30;

/// As the plan lists them: the planned one, and the one with as many chunks, come first.
fn ways(exchange: Exchange, chunks: u32) -> Vec<Way> {
    let other = match exchange {
        Exchange::Flat => Exchange::Hierarchical,
        Exchange::Hierarchical => Exchange::Flat,
    };
    let mut all = Vec::new();
    for chunks in [chunks, 1] {
        all.extend([exchange, other].map(|exchange| Way { exchange, chunks }));
    }
    all.truncate(if chunks == 1 { 2 } else { 4 });
    all
}

/// Workers of two ranks. No snapshot disturbs the trials; a validation does, now and then.
fn job(layout: Layout, change: &impl Fn(&mut Job)) -> Job {
    let mut job = Job::new(layout);
    let training = &mut job.config.training;
    (training.steps, training.global_batch_size) = (STEPS, 5);
    (training.sequence_length, job.config.ranks) = (8, 2);
    job.config.model.experts.count = 9;
    job.config.model.experts.per_token = 4;
    job.config.recovery.memory_every_steps = 0;
    job.config.checkpoint.every_steps = STEPS;
    job.config.data.validation.every_steps = 9;
    change(&mut job);
    job
}

/// The same, which takes one way or tries several.
fn taking(mut job: Job, ways: &[Way]) -> Job {
    (job.config.exchange, job.config.overlap_degree) = (ways[0].exchange, ways[0].chunks);
    job.config.ways = if ways.len() > 1 { ways.to_vec() } else { Vec::new() };
    job
}

/// A step in two stages and one chunk is the fastest, on every rank but the third, which does not
/// know: the slowest rank of each step counts.
fn stages_are_fast(_: u64, way: Way) -> Duration {
    let stages = if way.exchange == Exchange::Flat { 20 } else { 0 };
    Duration::from_millis(100 + stages + 20 * u64::from(way.chunks))
}

fn all_are_alike(step: u64, _: Way) -> Duration {
    Duration::from_micros(70_000 + step)
}

const FAST: Way = Way { exchange: Exchange::Hierarchical, chunks: 1 };

fn four() -> Vec<Trainer> {
    let said = |trainer: Trainer, rank| match rank {
        2 => trainer.with_steps_that_take(all_are_alike),
        _ => trainer.with_steps_that_take(stages_are_fast),
    };
    trainers(4).into_iter().zip(0..).map(|(trainer, rank)| said(trainer, rank)).collect()
}

/// What all ranks tell of what was chosen.
fn told(job: &Job, group: &mut [Trainer]) -> (Vec<AttemptEnd>, Vec<StepReport>, Vec<Event>) {
    let events = Mutex::new(Vec::new());
    let (ends, reports) = run_and_tell(job, group, &|_, event| {
        if let TrainerEvent::Event(event) = event
            && event.event == EventKind::ExchangeChosen
        {
            events.lock().expect("no panic").push(event.clone());
        }
    });
    (ends, reports, events.into_inner().expect("no panic"))
}

fn hash(job: &Job) -> String {
    state_hash(&job.location().join(directory_name(job.config.training.steps)))
}

/// A gang that tries ways gives the losses and the state of gangs that have one, and of one rank.
fn check(name: &str, change: impl Fn(&mut Job)) {
    let fixed = |ways: &[Way]| taking(job(layout(4, 4), &change), ways).whole();
    let one = job(layout(1, 1), &change).whole();
    for planned in [ways(Exchange::Flat, 2), ways(Exchange::Hierarchical, 4)] {
        assert_eq!(fixed(&planned[..1]), one, "{name}: {planned:?}");
        let job = taking(job(layout(4, 4), &change), &planned);
        let mut group = four();
        let (ends, reports, events) = told(&job, &mut group);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: STEPS }), "{ends:?}");
        assert_eq!((bits(&reports), hash(&job)), one, "{name}: {planned:?}");
        for trainer in &group {
            assert_eq!(trainer.chosen_way(&job.config), Some(FAST), "{name}: {planned:?}");
        }
        // Each of them by turns, and then the chosen one.
        let took = |report: &StepReport| report.way.expect("the attempt tries ways");
        let first: Vec<Way> = reports[..8].iter().map(took).collect();
        assert_eq!(first, [&planned[..], &planned].concat(), "{name}");
        // Two behind a validation did not count.
        assert!(reports[27..].iter().all(|report| took(report) == FAST), "{name}: {planned:?}");
        // Rank 0 tells it, once.
        let [event] = &events[..] else { panic!("{name}: {events:?}") };
        let text = |of: &str| Detail::Text(of.to_string());
        assert_eq!(event.details["way"], text("hierarchical"));
        assert_eq!(event.details["hierarchicalSeconds"], Detail::Real(0.12), "{event:?}");
        assert!(event.message.contains("120.00 ms in two stages"), "{}", event.message);
    }
}

#[test]
fn trials_change_no_bit() {
    check("plain", |_| {});
}

#[test]
fn trials_of_slices_change_no_bit() {
    check("slices", |job| job.config.model.experts.slices = 2);
}

/// Steps take as long as they take here: whatever is chosen, all ranks choose the same.
#[test]
fn what_is_measured_is_the_same_on_all_ranks() {
    let one = job(layout(1, 1), &|_| {}).whole();
    let planned = ways(Exchange::Flat, 2);
    let job = taking(job(layout(4, 4), &|_| {}), &planned);
    let mut group = trainers(4);
    let (_, reports, events) = told(&job, &mut group);
    assert_eq!((bits(&reports), hash(&job)), one);
    let chosen = group[0].chosen_way(&job.config).expect("something is chosen");
    assert!(group.iter().all(|trainer| trainer.chosen_way(&job.config) == Some(chosen)));
    assert_eq!(reports.last().expect("a step").way, Some(chosen));
    assert_eq!(events[0].details["way"], Detail::Text(chosen.name()));
}

/// Steps that are begun ahead, and some that are done again, each with the one behind it.
#[test]
fn steps_ahead_and_steps_done_again_take_turns_all_the_same() {
    let change = |job: &mut Job| job.config.recovery.memory_every_steps = 7;
    let one = job(layout(1, 1), &change).whole();
    let planned = ways(Exchange::Flat, 2);
    let job = taking(job(layout(4, 4), &change), &planned);
    let ahead = |trainer: Trainer| trainer.with_steps_ahead().with_steps_that_take(stages_are_fast);
    let mut group: Vec<Trainer> = trainers(4).into_iter().map(ahead).collect();
    // One rank breaks a number of steps that are measured and of one that is not.
    group[1] = ahead(Trainer::with_spoiled(vec![1, 10, 15]));
    let (ends, reports, events) = told(&job, &mut group);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: STEPS }), "{ends:?}");
    assert_eq!((bits(&reports), hash(&job)), one);
    for trainer in &group {
        // Some steps did not count, so there may be none left for a choice.
        assert_eq!(trainer.chosen_way(&job.config), group[0].chosen_way(&job.config));
    }
    assert!(events.len() <= 1, "{events:?}");
}

/// Two ways: after 13 steps all have chosen. A later attempt of the same gang takes what the
/// earlier one chose, also a rank that was not there; one with another mesh tries anew.
#[test]
fn a_choice_is_kept_for_the_same_gang_alone() {
    let change = |job: &mut Job| job.config.training.steps = 48;
    let one = job(layout(1, 1), &change).whole().0;
    let planned = ways(Exchange::Flat, 1);
    let mut job = taking(job(layout(4, 4), &change), &planned);
    let mut group = four();
    let (mut rows, mut taken) = (Vec::new(), Vec::new());
    // The last one goes to its end.
    let attempts = [(4, 16), (4, 20), (3, 32), (4, 48)];
    for (number, (ranks, until)) in (1..).zip(attempts) {
        let earlier = std::mem::replace(&mut job.config.layout, layout(ranks, ranks));
        job.config.attempt = number;
        if number == 2 {
            assert_eq!(group[0].chosen_way(&job.config), Some(FAST));
        }
        group.truncate(ranks as usize);
        group.resize_with(ranks as usize, Trainer::new);
        if number > 1 {
            let (attempt, step) = (number - 1, attempts[number as usize - 2].1);
            let sources = sources(&group, attempt, step, earlier.mesh.world());
            job.config.resume = Resume::Memory { step, attempt, layout: earlier, sources };
        }
        let (_, reports) = job.run(&mut group, Some(until).filter(|until| *until < 48));
        taken.push(reports.iter().filter_map(|report| report.way).collect::<Vec<_>>());
        rows.extend(bits(&reports));
        let first = group[0].chosen_way(&job.config);
        assert!(group.iter().all(|of| of.chosen_way(&job.config) == first), "{number}");
    }
    assert_eq!(rows, one);
    assert_eq!(taken[0][..4], [&planned[..], &planned].concat());
    assert!(taken[1].iter().all(|way| *way == FAST), "{:?}", taken[1]);
    assert_eq!(taken[2][..4], [&planned[..], &planned].concat(), "of other ranks");
    // The fourth rank has come since.
    assert!(taken[3].iter().all(|way| *way == FAST), "{:?}", taken[3]);
}

/// A rank is lost while ways are tried, and the others go on, and try their own ways.
#[test]
fn a_rank_that_is_lost_during_trials_leaves_nobody_waiting() {
    let change = |job: &mut Job| {
        job.config.recovery.memory_every_steps = 2;
        job.config.training.steps = 24;
    };
    let one = job(layout(1, 1), &change).whole().0;
    let was_lost = |exchange| {
        let job = taking(job(layout(4, 4), &change), &ways(exchange, 4));
        let rows = job.losing_the_last(layout(3, 3), |job| {
            job.config.overlap_degree = 2;
            job.config.ways = ways(exchange, 2);
        });
        rows.map(|rows| assert_eq!(rows, one)).is_some()
    };
    for exchange in [Exchange::Flat, Exchange::Hierarchical] {
        assert!((0..5).any(|_| was_lost(exchange)), "never cut off in time");
    }
}

/// A leader tells all ranks the same. One that does not makes no rank wait for another.
#[test]
fn a_rank_that_was_told_other_ways_is_refused() {
    let job = taking(job(layout(2, 2), &|_| {}), &ways(Exchange::Flat, 2));
    let mut swapped = job.config.clone();
    swapped.ways.swap(1, 2);
    let ends = std::thread::scope(|scope| {
        let configs = [job.config.clone(), swapped].into_iter().zip(0..);
        let threads: Vec<_> = Comm::in_process(2)
            .into_iter()
            .zip(configs)
            .map(|(comm, (mut config, rank))| {
                (config.rank, config.members) = (Some(rank), (0..2).map(member).collect());
                let mut tell = |event| assert!(!matches!(event, TrainerEvent::Step(_)));
                scope.spawn(move || {
                    Trainer::new().run_attempt(&config, comm, &Control::default(), &mut tell)
                })
            })
            .collect();
        let end = |thread: ScopedJoinHandle<AttemptEnd>| thread.join().expect("no panic");
        threads.into_iter().map(end).collect::<Vec<_>>()
    });
    for (end, rank) in ends.iter().zip(0..) {
        let AttemptEnd::Failed(failure) = end else { panic!("{end:?}") };
        let words = format!("rank {} tries other ways than rank {rank}", 1 - rank);
        assert_eq!(failure.message, words);
    }
}

/// What would make ranks take different ways, or more memory than was planned, is refused before
/// the first step.
#[test]
fn ways_that_are_not_the_planned_ones_are_refused() {
    let refused = |ways: Vec<Way>, expected: &str| {
        let mut job = taking(job(layout(4, 4), &|_| {}), &self::ways(Exchange::Flat, 2));
        job.config.ways = ways;
        let (ends, reports) = job.run(&mut trainers(4), None);
        assert!(reports.is_empty());
        let said = |end: &AttemptEnd| match end {
            AttemptEnd::Failed(failure) => failure.message.contains(expected),
            _ => false,
        };
        assert!(ends.iter().all(said), "{expected}: {ends:?}");
    };
    let way = |exchange, chunks| Way { exchange, chunks };
    let planned = way(Exchange::Flat, 2);
    let other = way(Exchange::Hierarchical, 2);
    refused(vec![planned, other, other, other, other], "5 of them, at most 4");
    refused(vec![other, planned], "the first one is not in 2 chunks, as planned");
    refused(vec![planned, way(Exchange::Flat, 4)], "4 chunks, and there is memory for 1 to 2");
    refused(vec![planned, way(Exchange::Flat, 0)], "0 chunks");
}
