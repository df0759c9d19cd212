//! Snapshots that leave beside the next step, on processors, which copy as late as a GPU may.

mod common;

use common::{Job, bits, sources, state_hash};
use moe_worker::attempt::api::{AttemptEnd, Control, TrainerEvent};
use moe_worker::attempt::trainer::Trainer;
use moe_worker::gang::comm::Comm;
use moejob_protocol::config::Resume;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::report::StepReport;

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

fn job(world: u32, memory_every: u64) -> Job {
    let mut job = Job::new(layout(world, world.min(2)));
    job.config.recovery.memory_every_steps = memory_every;
    job.config.checkpoint.keep = 10;
    job
}

fn late(world: u32) -> Vec<Trainer> {
    (0..world).map(|_| Trainer::new().with_late_cuts()).collect()
}

/// Checkpoints of snapshots that left beside a step (every 2), of copies of their own that did
/// (every 3), and of a snapshot each step, which does not.
#[test]
fn what_left_beside_a_step_is_the_state_before_it() {
    for (world, memory_every) in [(1, 2), (1, 3), (2, 2), (2, 3), (2, 1)] {
        let job = job(world, memory_every);
        let (ends, at_once) = job.run(&mut common::trainers(world), None);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
        let steps = [4, 8, 10];
        let hash = |step| state_hash(&job.location().join(format!("step-{step:08}")));
        let expected = steps.map(hash);
        std::fs::remove_dir_all(job.folder.path().join("run")).expect("a folder");
        let mut group = late(world);
        let (ends, beside) = job.run(&mut group, None);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
        let what = format!("{world} ranks, a snapshot every {memory_every} steps");
        assert_eq!(bits(&beside), bits(&at_once), "{what}");
        assert_eq!(steps.map(hash), expected, "{what}");
        // Each holds its own shard and the one of its buddy, of the newest step that had one.
        let newest = 10 / memory_every * memory_every;
        let shards: Vec<u32> = (0..world).collect();
        for trainer in &group {
            let held = trainer.held();
            let found = held.iter().find(|held| held.step == newest);
            assert_eq!(found.map(|held| &held.shards), Some(&shards), "{what}: {held:?}");
        }
    }
}

/// One attempt of a single rank, which is cut off behind step `end`, before what leaves beside the
/// step after it is there.
fn run(job: &Job, trainer: &mut Trainer, end: Option<u64>) -> (AttemptEnd, Vec<StepReport>) {
    let comm = Comm::solo(job.config.attempt);
    let mut config = job.config.clone();
    config.rank = Some(0);
    let (handle, mut reports) = (comm.abort_handle(), Vec::new());
    let ended = trainer.run_attempt(&config, comm, &Control::default(), &mut |event| {
        if let TrainerEvent::Step(report) = event {
            if Some(report.step) == end {
                handle.abort("cut off by the test");
            }
            reports.push(report);
        }
    });
    (ended, reports)
}

#[test]
fn a_death_in_the_midst_leaves_the_snapshot_before() {
    let mut job = job(1, 3);
    let (end, undisturbed) = run(&job, &mut Trainer::new(), None);
    assert_eq!(end, AttemptEnd::Completed { step: 10 });
    std::fs::remove_dir_all(job.folder.path().join("run")).expect("a folder");
    // Cut off behind step 6: step 7 is computed, the snapshot of 6 copied, and nobody says so.
    let mut trainer = Trainer::new().with_late_cuts();
    let (end, reports) = run(&job, &mut trainer, Some(6));
    assert!(matches!(end, AttemptEnd::Aborted(_)), "{end:?}");
    assert_eq!(reports.len(), 6);
    let newest = trainer.held().iter().map(|held| held.step).max();
    assert_eq!(newest, Some(3), "{:?}", trainer.held());
    job.config.attempt = 2;
    let sources = sources(std::slice::from_ref(&trainer), 1, 3, 1);
    job.config.resume = Resume::Memory { step: 3, attempt: 1, layout: layout(1, 1), sources };
    let (end, again) = run(&job, &mut trainer, None);
    assert_eq!(end, AttemptEnd::Completed { step: 10 });
    assert_eq!(bits(&again), bits(&undisturbed)[3..]);
}
