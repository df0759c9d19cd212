//! Data, checkpoints and weights that cannot be read for a while, or come late: what stumbles is
//! waited for, and what is missing is told at once.

mod common;

use common::disk::{Gate, faulty};
use common::{Job, bits, trainers};
use moe_worker::attempt::api::{AttemptEnd, Control, TrainerEvent, Wait};
use moe_worker::attempt::saves::Patience;
use moe_worker::attempt::trainer::Trainer;
use moe_worker::checkpoint::{self, Disk, Effect};
use moe_worker::gang::comm::Comm;
use moejob_protocol::config::Resume;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use std::collections::BTreeMap;
use std::io::{Error, Result};
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicU32, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// EIO, ESTALE, ETIMEDOUT, ENOTCONN, EHOSTDOWN, ENOSPC.
const STUMBLES: [i32; 6] = [5, 116, 110, 107, 112, 28];
const EIO: i32 = 5;

fn job(world: u32) -> Job {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(world, world)));
    let config = &mut job.config;
    config.training.global_batch_size = 2;
    config.training.sequence_length = 8;
    config.checkpoint.every_steps = 2;
    config.recovery.memory_every_steps = 2;
    job
}

fn patience() -> Patience {
    let long = Duration::from_secs(60);
    let retry = Duration::from_millis(1);
    Patience { start: long, data: long, end: long, retry, ..Patience::default() }
}

fn trainer(disk: Disk, patience: Patience) -> Trainer {
    Trainer::with_disk(disk).with_patience(patience)
}

fn is_of_text(path: &Path) -> bool {
    path.components().any(|part| part.as_os_str() == "text")
}

fn exit_code(end: &AttemptEnd) -> (i32, String) {
    let AttemptEnd::Failed(failure) = end else { panic!("{end:?}") };
    (failure.exit_code, failure.message.clone())
}

fn run(job: &Job, trainer: Trainer) -> AttemptEnd {
    common::run_and_see(job, &mut [trainer], &mut |_| {}).0.remove(0)
}

/// Reads of the data wait at the gate, once it is said that they are late.
fn late_once(late: &Arc<AtomicBool>, gate: Gate) -> Disk {
    let late = Arc::clone(late);
    faulty(move |effect| {
        let of_text = matches!(effect, Effect::Bytes(path) if is_of_text(path));
        if of_text && late.load(Ordering::Relaxed) {
            gate.pass();
        }
        Ok(())
    })
}

#[test]
fn data_that_cannot_be_read_for_a_while_end_no_job() {
    let steps = bits(&job(1).run(&mut trainers(1), None).1);
    for errno in STUMBLES {
        let job = job(1);
        let seen = AtomicU32::new(0);
        // Looks, opens and reads alike: each time two tries fail of seven.
        let disk = faulty(move |effect| match effect {
            Effect::Read(path) | Effect::Bytes(path) if is_of_text(path) => {
                match seen.fetch_add(1, Ordering::Relaxed) % 7 {
                    0 | 1 => Err(Error::from_raw_os_error(errno)),
                    _ => Ok(()),
                }
            }
            _ => Ok(()),
        });
        let mut trainers = [trainer(disk, patience())];
        let (ends, reports) = common::run_and_see(&job, &mut trainers, &mut |_| {});
        assert_eq!(ends, [AttemptEnd::Completed { step: 10 }], "error {errno}");
        assert_eq!(bits(&reports), steps, "error {errno}");
    }
}

#[test]
fn when_patience_with_the_data_is_over_another_attempt_may_find_them() {
    let short = Patience { data: Duration::from_millis(150), ..patience() };
    // From the beginning, and in the midst of the steps.
    for step in [0, 4] {
        let job = job(1);
        let bad = Arc::new(AtomicBool::new(step == 0));
        let fails = Arc::clone(&bad);
        let disk = faulty(move |effect| match effect {
            Effect::Bytes(path) if is_of_text(path) && fails.load(Ordering::Relaxed) => {
                Err(Error::from_raw_os_error(EIO))
            }
            _ => Ok(()),
        });
        let mut trainers = [trainer(disk, short)];
        let (ends, _) = common::run_and_see(&job, &mut trainers, &mut |report| {
            bad.store(report.step >= step, Ordering::Relaxed);
        });
        let (code, message) = exit_code(&ends[0]);
        assert_eq!(code, 75, "{message}");
        assert!(message.contains(".txt cannot be read"), "{message}");
    }
    // A read that does not come back is left behind.
    let gate = Gate::default();
    let held = gate.clone();
    let job = job(1);
    let late = Arc::new(AtomicBool::new(false));
    let disk = late_once(&late, held);
    let mut trainers = [trainer(disk, short)];
    let (ends, _) = common::run_and_see(&job, &mut trainers, &mut |report| {
        late.store(report.step >= 4, Ordering::Relaxed);
    });
    let (code, message) = exit_code(&ends[0]);
    gate.open();
    assert_eq!(code, 75, "{message}");
    assert!(message.contains("a batch of step"), "{message}");
}

#[test]
fn data_that_are_missing_are_told_at_once() {
    let job = job(1);
    let text = job.folder.path().join("text");
    let mut trainers = [trainer(Disk::real(), patience())];
    let (ends, _) = common::run_and_see(&job, &mut trainers, &mut |report| {
        if report.step == 3 {
            std::fs::remove_dir_all(&text).expect("removed");
        }
    });
    let (code, message) = exit_code(&ends[0]);
    assert_eq!(code, 3, "{message}");
}

/// Whoever stands in a read cannot say anything: it has said so before.
#[test]
fn a_rank_that_waits_says_so_and_leaves_when_it_is_asked_to() {
    let mut job = job(1);
    job.config.rank = Some(0);
    job.config.members = vec![common::member(0)];
    let gate = Gate::default();
    let held = gate.clone();
    let late = Arc::new(AtomicBool::new(false));
    let disk = late_once(&late, held);
    let (control, comm) = (Control::default(), Comm::solo(1));
    let abort = comm.abort_handle();
    let seen = control.clone();
    let end = std::thread::scope(|scope| {
        let watcher = scope.spawn(move || {
            gate.wait_for_somebody();
            // The batches that were read before are trained on first.
            let waits = (0..2000).find_map(|_| {
                std::thread::sleep(Duration::from_millis(5));
                seen.waits().filter(|_| seen.step() >= 4)
            });
            abort.abort("the leader says so");
            (waits, gate)
        });
        let mut trainer = trainer(disk, patience());
        let end = trainer.run_attempt(&job.config, comm, &control, &mut |event| {
            if let TrainerEvent::Step(report) = &event {
                late.store(report.step >= 4, Ordering::Relaxed);
            }
        });
        let (waits, gate) = watcher.join().expect("no panic");
        gate.open();
        assert_eq!(waits.map(|(_, what)| what), Some(Wait::Data));
        end
    });
    let AttemptEnd::Aborted(error) = end else { panic!("{end:?}") };
    assert!(error.to_string().contains("the leader says so"), "{error}");
    assert_eq!(control.waits(), None);
}

/// A reader that begins anew with each error would never end here.
#[test]
fn a_checkpoint_is_read_on_where_it_stumbled() {
    let mut job = job(1);
    let (ends, _) = job.run(&mut trainers(1), Some(6));
    assert_eq!(ends, [AttemptEnd::Stopped { step: 6 }]);
    let newest = checkpoint::newest_usable(&Disk::real(), &job.location()).expect("a location");
    let found = newest.usable.expect("a checkpoint");
    (job.config.attempt, job.config.resume) =
        (2, Resume::Checkpoint { step: found.step, name: found.name });
    let (opened, read) = (Arc::new(AtomicU32::new(0)), AtomicU32::new(0));
    let opens = Arc::clone(&opened);
    let disk = faulty(move |effect| match effect {
        Effect::Bytes(path) if path.extension().is_some_and(|ending| ending == "safetensors") => {
            match read.fetch_add(1, Ordering::Relaxed) % 2 {
                0 => Err(Error::from_raw_os_error(EIO)),
                _ => Ok(()),
            }
        }
        Effect::Read(path) if path.ends_with("manifest.json") => {
            opens.fetch_add(1, Ordering::Relaxed);
            Ok(())
        }
        _ => Ok(()),
    });
    assert_eq!(run(&job, trainer(disk, patience())), AttemptEnd::Completed { step: 10 });
    let opened = opened.load(Ordering::Relaxed);
    assert!(opened < 20, "the manifest was opened {opened} times");
}

#[test]
fn a_checkpoint_that_cannot_be_read_is_no_damaged_one() {
    let mut job = job(2);
    let (ends, _) = job.run(&mut trainers(2), None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
    let name = "step-00000010".to_string();
    job.config.training.steps = 12;
    (job.config.attempt, job.config.resume) = (2, Resume::Checkpoint { step: 10, name });
    let short = Patience { start: Duration::from_millis(300), ..patience() };
    let disk = || {
        faulty(|effect| match effect {
            Effect::Bytes(path) if path.to_string_lossy().contains("a1-r1-0.safetensors") => {
                Err(Error::from_raw_os_error(EIO))
            }
            _ => Ok(()),
        })
    };
    let mut group = [trainer(disk(), short), trainer(disk(), short)];
    let (ends, _) = job.run(&mut group, None);
    for end in &ends {
        assert_eq!(exit_code(end).0, 75, "{ends:?}");
    }
    assert!(job.location().join("step-00000010/manifest.json").exists());
}

/// Bytes that each rank reads of each shard.
type Reads = Arc<Mutex<BTreeMap<(usize, String), u32>>>;

fn counting(rank: usize, reads: &Reads) -> Disk {
    let reads = Arc::clone(reads);
    faulty(move |effect| -> Result<()> {
        if let Effect::Read(path) = effect
            && path.extension().is_some_and(|ending| ending == "safetensors")
        {
            let name = path.file_name().expect("a name").to_string_lossy().into_owned();
            *reads.lock().expect("no panic").entry((rank, name)).or_default() += 1;
        }
        Ok(())
    })
}

/// The leader knows of step 4 alone: before anything is claimed the newer ones are verified.
#[test]
fn newer_checkpoints_are_verified_by_all_ranks_each_its_share() {
    for damaged in [false, true] {
        let mut job = job(3);
        let (ends, _) = job.run(&mut trainers(3), None);
        assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 }), "{ends:?}");
        if damaged {
            let shard = job.location().join("step-00000010/a1-r2-0.safetensors");
            let mut bytes = std::fs::read(&shard).expect("a shard");
            let last = bytes.len() - 1;
            bytes[last] ^= 1;
            std::fs::write(&shard, bytes).expect("a shard");
        }
        job.config.attempt = 2;
        let of_before = "step-00000006".to_string();
        job.config.resume = Resume::Checkpoint { step: 6, name: of_before };
        let reads = Reads::default();
        let mut group: Vec<Trainer> =
            (0..3).map(|rank| trainer(counting(rank, &reads), patience())).collect();
        let found = Mutex::new(Vec::new());
        let (ends, _) = common::run_and_tell(&job, &mut group, &|_, event| {
            if let TrainerEvent::Event(event) = event
                && event.reason == "Found"
            {
                found.lock().expect("no panic").push(event.message.clone());
            }
        });
        assert!(ends.iter().all(|end| *end == AttemptEnd::Stopped { step: 6 }), "{ends:?}");
        let newest = if damaged { "step-00000008" } else { "step-00000010" };
        assert_eq!(*found.lock().expect("no panic"), [newest]);
        let reads = reads.lock().expect("no panic");
        let looked = if damaged { 2 } else { 1 };
        assert_eq!(reads.len(), 3, "each shard is one rank's: {reads:?}");
        assert!(reads.values().all(|count| *count == looked), "{reads:?}");
        let ranks: Vec<usize> = reads.keys().map(|(rank, _)| *rank).collect();
        assert_eq!(ranks, [0, 1, 2], "{reads:?}");
    }
}
