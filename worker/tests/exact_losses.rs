//! Ranks that are cut off at any moment: the rest go on from memory with the same bits.

mod common;

use common::{
    Job, bits, newest_held, run_and_cut_off, run_and_tell, sources, state_hash, trainers,
};
use moe_worker::attempt::trainer::Trainer;
use moe_worker::attempt::api::{AttemptEnd, TrainerEvent};
use moejob_kernels::philox::philox4x32_10;
use moejob_protocol::config::Resume;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use std::sync::Mutex;
use std::time::Duration;

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

fn job() -> Job {
    let mut job = Job::new(layout(4, 4));
    job.config.training.steps = 12;
    job.config.checkpoint.every_steps = 100;
    job.config.recovery.memory_every_steps = 2;
    job
}

/// Lets `group` go on from its memory as `next`.
fn go_on(job: &mut Job, group: &[Trainer], next: Layout) {
    let earlier = job.config.layout.clone();
    let (attempt, step) = newest_held(group, earlier.mesh.world());
    let sources = sources(group, attempt, step, earlier.mesh.world());
    job.config.resume = Resume::Memory { step, attempt, layout: earlier, sources };
    job.config.layout = next;
    job.config.attempt += 1;
}

#[test]
fn survivors_go_on_from_the_newest_snapshot_in_memory() {
    let whole = job();
    let (ends, reports) = whole.run(&mut trainers(4), None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 12 }));
    let one = (bits(&reports), state_hash(&whole.location().join("step-00000012")));
    let mut losses = 0;
    for seed in 0..12 {
        let [a, b, c, _] = philox4x32_10(seed, [0; 4]);
        let (victim, after) = (a % 4, u64::from(b % 5) * 2);
        let delay = Duration::from_micros(u64::from(c % 8000));
        let mut job = job();
        let mut group = trainers(4);
        let (ends, reports) = run_and_cut_off(&job, &mut group, victim, after, delay);
        if ends.iter().all(|end| matches!(end, AttemptEnd::Completed { .. })) {
            continue;
        }
        losses += 1;
        let aborted = ends.iter().all(|end| matches!(end, AttemptEnd::Aborted(_)));
        assert!(aborted, "seed {seed}: {ends:?}");
        let mut rows = bits(&reports);
        group.remove(victim as usize);
        go_on(&mut job, &group, layout(3, 3));
        assert!(job.config.resume.step() >= after.saturating_sub(2), "seed {seed}: too old");
        rows.truncate(job.config.resume.step() as usize);
        let (ends, reports) = job.run(&mut group, None);
        let done = ends.iter().all(|end| *end == AttemptEnd::Completed { step: 12 });
        assert!(done, "seed {seed}: {ends:?}");
        rows.extend(bits(&reports));
        let last = job.location().join("step-00000012");
        assert_eq!((rows, state_hash(&last)), one, "seed {seed}: {victim} at {after}");
    }
    assert!(losses >= 6, "only {losses} ranks were lost in time");
}

/// All is trained, and whoever wrote the last checkpoint is gone before it was there.
#[test]
fn an_attempt_with_nothing_left_to_train_writes_the_last_checkpoint() {
    for memory_auto in [false, true] {
        let mut job = job();
        let mut group = trainers(4);
        let (ends, _) = job.run(&mut group, None);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 12 }), "{ends:?}");
        let last = job.location().join("step-00000012");
        let whole = state_hash(&last);
        std::fs::remove_dir_all(&last).expect("removed");
        group.remove(2);
        go_on(&mut job, &group, layout(3, 3));
        assert_eq!(job.config.resume.step(), 12);
        job.config.recovery.memory_auto = memory_auto;
        let (ends, reports) = job.run(&mut group, None);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 12 }), "{ends:?}");
        assert!(reports.is_empty());
        assert_eq!(state_hash(&last), whole);
    }
}

/// As on GPUs, where a copy holds steps up for seconds: what the attempt came from stays meanwhile.
#[test]
fn where_copies_are_dear_the_first_one_comes_behind_a_step() {
    let whole = job();
    let (_, reports) = whole.run(&mut trainers(4), None);
    let one = (bits(&reports), state_hash(&whole.location().join("step-00000012")));
    let mut job = job();
    let mut group = trainers(4);
    let (_, reports) = run_and_cut_off(&job, &mut group, 3, 6, Duration::ZERO);
    group.remove(3);
    go_on(&mut job, &group, layout(3, 3));
    job.config.recovery.memory_auto = true;
    let (first, attempt) = (job.config.resume.step(), job.config.attempt);
    let mut rows = bits(&reports);
    rows.truncate(first as usize);
    let told = Mutex::new(Vec::new());
    let (ends, reports) = run_and_tell(&job, &mut group, &|rank, event| match event {
        TrainerEvent::Step(report) => told.lock().expect("told").push((rank, report.step, false)),
        TrainerEvent::Held(held) => {
            let newest = held.iter().filter(|held| held.attempt == attempt).map(|held| held.step);
            told.lock().expect("told").extend(newest.max().map(|step| (rank, step, true)));
        }
        _ => {}
    });
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 12 }), "{ends:?}");
    rows.extend(bits(&reports));
    assert_eq!((rows, state_hash(&job.location().join("step-00000012"))), one);
    for rank in 0..3 {
        let told = told.lock().expect("told");
        let copied = told.iter().find(|(of, _, is_copy)| *of == rank && *is_copy);
        assert!(copied.is_some_and(|(_, step, _)| *step > first), "rank {rank}: {told:?}");
    }
}

/// Attempts that die while they take their first snapshot must not use up the one they came from.
#[test]
fn attempts_that_die_at_once_keep_the_state_they_resumed_from() {
    let mut job = job();
    let mut group = trainers(4);
    run_and_cut_off(&job, &mut group, 3, 6, Duration::ZERO);
    group.remove(3);
    go_on(&mut job, &group, layout(3, 3));
    let (first, resume) = (job.config.resume.step(), job.config.resume.clone());
    let earlier = job.config.layout.clone();
    for _ in 0..4 {
        let (ends, _) = run_and_cut_off(&job, &mut group, 1, first, Duration::ZERO);
        if ends.iter().any(|end| matches!(end, AttemptEnd::Completed { .. })) {
            break;
        }
        job.config.attempt += 1;
        let held: Vec<_> = group.iter().flat_map(Trainer::held).collect();
        assert!(held.iter().any(|held| held.step >= first), "{held:?}");
        let complete = newest_held_of(&group, &resume, &earlier);
        assert!(complete >= first, "only step {complete} is left of {first}");
    }
}

/// The newest complete step under either layout.
fn newest_held_of(group: &[Trainer], resume: &Resume, layout: &Layout) -> u64 {
    let Resume::Memory { step, attempt, layout: earlier, .. } = resume else {
        panic!("resumed from memory")
    };
    let all = |attempt: u32, step: u64, shards: u32| {
        (0..shards).all(|shard| {
            group.iter().flat_map(Trainer::held).any(|held| {
                (held.attempt, held.step) == (attempt, step) && held.shards.contains(&shard)
            })
        })
    };
    let newer = group.iter().flat_map(Trainer::held).filter(|held| held.attempt > *attempt);
    let newer = newer.filter(|held| all(held.attempt, held.step, layout.mesh.world()));
    let source = all(*attempt, *step, earlier.mesh.world()).then_some(*step);
    newer.map(|held| held.step).chain(source).max().expect("a complete snapshot")
}
