//! Storage that is full, fails, hangs, forgets and goes away, and training that goes on.

mod common;

use common::chaos::Chaos;
use common::disk::{Gate, faulty};
use common::{Job, bits, state_hash};
use moe_worker::attempt::api::AttemptEnd;
use moe_worker::attempt::saves::Patience;
use moe_worker::attempt::trainer::Trainer;
use moe_worker::checkpoint::{self, Disk, Effect, Problem};
use moejob_protocol::CheckpointManifest;
use moejob_protocol::config::Resume;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::report::StepReport;
use std::io::Error;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

const EIO: i32 = 5;
const ENOSPC: i32 = 28;
const ENOTEMPTY: i32 = 39;

fn small() -> Job {
    let mut job = Job::new(Layout::contiguous(Mesh::data_parallel(1, 1)));
    let config = &mut job.config;
    config.training.global_batch_size = 2;
    config.training.sequence_length = 8;
    config.data.validation.every_steps = 0;
    config.checkpoint.every_steps = 2;
    config.recovery.memory_every_steps = 2;
    job
}

fn patience() -> Patience {
    Patience {
        answer: Duration::from_secs(5),
        start: Duration::from_secs(20),
        stop: Duration::from_secs(20),
        end: Duration::from_secs(60),
        retry: Duration::from_millis(1),
        ..Patience::default()
    }
}

fn trainer(disk: Disk) -> Trainer {
    Trainer::with_disk(disk).with_patience(patience())
}

fn verify(directory: &Path) -> std::result::Result<CheckpointManifest, Vec<Problem>> {
    checkpoint::verify(&Disk::real(), directory)
}

/// Reasons of the events of a kind, in order.
fn reasons(job: &Job, kind: &str) -> Vec<String> {
    let path = Path::new(&job.config.checkpoint.records).join("events.jsonl");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().map(|line| serde_json::from_str(line).expect("a whole line"));
    lines
        .filter(|line: &serde_json::Value| line["event"] == kind)
        .map(|line| line["reason"].as_str().unwrap_or_default().to_string())
        .collect()
}

fn run_one(job: &Job, trainer: Trainer, stop_at: Option<u64>) -> (AttemptEnd, Vec<StepReport>) {
    let (mut ends, reports) = job.run(&mut [trainer], stop_at);
    (ends.remove(0), reports)
}

/// What an undisturbed run of the job ends with.
fn undisturbed() -> (String, Vec<[u64; 5]>) {
    let job = small();
    let (end, reports) = run_one(&job, trainer(Disk::real()), None);
    assert_eq!(end, AttemptEnd::Completed { step: 10 });
    (state_hash(&job.location().join("step-00000010")), bits(&reports))
}

#[test]
fn a_disk_that_hangs_stops_no_step() {
    let job = small();
    let (gate, seen) = (Gate::default(), Gate::default());
    let held = gate.clone();
    let disk = faulty(move |effect| {
        if matches!(effect, Effect::Sync(path) if path.to_string_lossy().contains(".a1-step-")) {
            held.pass();
        }
        Ok(())
    });
    // Opened only once the last step was reported: had any step waited, this would never end.
    let opener = gate.clone();
    let last = seen.clone();
    let watcher = std::thread::spawn(move || {
        last.wait_for_somebody();
        opener.open();
    });
    let patience = Patience { pending_bytes: 0, ..patience() };
    let mut trainers = [Trainer::with_disk(disk).with_patience(patience)];
    seen.open();
    let (ends, reports) = common::run_and_see(&job, &mut trainers, &mut |report| {
        if report.step == 10 {
            seen.pass();
        }
    });
    watcher.join().expect("no panic");
    assert_eq!(ends, [AttemptEnd::Completed { step: 10 }]);
    assert_eq!(reports.len(), 10);
    assert_eq!(reasons(&job, "CheckpointDegraded"), ["StorageSlow"]);
    let found = checkpoint::list(&Disk::real(), &job.location()).expect("a location");
    let names: Vec<&str> = found.iter().map(|found| found.name.as_str()).collect();
    assert_eq!(names, ["step-00000002", "step-00000010"], "those between are left out");
    verify(&job.location().join("step-00000010")).expect("whole");
}

/// The note of the best checkpoint waits for storage as its writer does, and no step waits for it.
#[test]
fn the_note_of_the_best_checkpoint_holds_up_no_step() {
    let mut job = small();
    let config = &mut job.config;
    config.data.validation.every_steps = 2;
    config.checkpoint.keep_best = true;
    let gate = Gate::default();
    let held = gate.clone();
    let disk = faulty(move |effect| {
        if matches!(effect, Effect::Sync(path) if path.ends_with(".best.json.tmp")) {
            held.pass();
        }
        Ok(())
    });
    // Opened only once the last step was reported: had any step waited, this would never end.
    let opened = gate.clone();
    let (ends, reports) = common::run_and_see(&job, &mut [trainer(disk)], &mut |report| {
        if report.step == 10 {
            gate.wait_for_somebody();
            opened.open();
        }
    });
    assert_eq!(ends, [AttemptEnd::Completed { step: 10 }]);
    assert_eq!(reports.len(), 10);
    let measured = |report: &StepReport| Some((report.validation_loss?, report.step));
    let measured = reports.iter().filter_map(measured);
    let (_, least) = measured.min_by(|a, b| a.0.total_cmp(&b.0)).expect("a held-out loss");
    verify(&job.location().join(format!("step-{least:08}"))).expect("whole");
    let note = std::fs::read_to_string(job.location().join("best.json")).expect("a note");
    let note: serde_json::Value = serde_json::from_str(&note).expect("JSON");
    assert_eq!(note["best"]["step"], least, "{note}");
}

/// What people read beside the checkpoints is kept by threads of its own: here they never end.
#[test]
fn what_is_kept_beside_the_checkpoints_holds_up_no_step() {
    let job = small();
    std::fs::create_dir_all(job.location()).expect("a folder");
    let fifo = |name: &str| {
        let (path, kind) = (job.location().join(name), rustix::fs::FileType::Fifo);
        rustix::fs::mknodat(rustix::fs::CWD, path, kind, 0o600.into(), 0).expect("a FIFO");
    };
    fifo("text.json");
    fifo(".data.json.tmp");
    let (end, reports) = run_one(&job, trainer(Disk::real()), None);
    assert_eq!(end, AttemptEnd::Completed { step: 10 });
    assert_eq!(reports.len(), 10);
    verify(&job.location().join("step-00000010")).expect("whole");
}

#[test]
fn a_full_disk_is_told_and_told_to_be_well_again() {
    let (hash, steps) = undisturbed();
    for errno in [ENOSPC, EIO] {
        let job = small();
        let full = Arc::new(Mutex::new(false));
        let rule = Arc::clone(&full);
        let disk = faulty(move |effect| match effect {
            Effect::Create(_) | Effect::Write(_) if *rule.lock().expect("no panic") => {
                Err(Error::from_raw_os_error(errno))
            }
            _ => Ok(()),
        });
        let (ends, reports) = common::run_and_see(&job, &mut [trainer(disk)], &mut |report| {
            *full.lock().expect("no panic") = (3..7).contains(&report.step);
            // So that tries happen between steps.
            std::thread::sleep(Duration::from_millis(30));
        });
        assert_eq!(ends, [AttemptEnd::Completed { step: 10 }]);
        assert_eq!(bits(&reports), steps);
        assert_eq!(reasons(&job, "CheckpointDegraded"), ["StorageFails"]);
        assert_eq!(reasons(&job, "CheckpointRecovered").len(), 1);
        assert_eq!(state_hash(&job.location().join("step-00000010")), hash);
    }
}

#[test]
fn a_volume_that_goes_away_and_comes_back_is_waited_for_at_the_end() {
    let job = small();
    let (location, away) = (job.location(), job.folder.path().join("away"));
    let back = (away.clone(), location.clone());
    let (ends, _) =
        common::run_and_see(&job, &mut [trainer(Disk::real())], &mut |report| match report.step {
            5 => std::fs::rename(&location, &away).expect("a rename"),
            10 => {
                let (from, to) = back.clone();
                std::thread::spawn(move || {
                    std::thread::sleep(Duration::from_millis(200));
                    std::fs::rename(from, to).expect("nothing was made in its place");
                });
            }
            _ => {}
        });
    assert_eq!(ends, [AttemptEnd::Completed { step: 10 }]);
    verify(&job.location().join("step-00000010")).expect("whole");
}

/// Older checkpoints that cannot be written make room for the last one.
#[test]
fn a_disk_that_has_room_for_the_last_checkpoint_alone_ends_a_run_with_it() {
    let job = small();
    let full = Arc::new(AtomicBool::new(false));
    let rule = Arc::clone(&full);
    let disk = faulty(move |effect| match effect {
        Effect::Create(path) | Effect::Write(path) if rule.load(Ordering::SeqCst) => {
            match path.to_string_lossy().contains(".a1-step-0000000") {
                true => Err(Error::from_raw_os_error(ENOSPC)),
                false => Ok(()),
            }
        }
        _ => Ok(()),
    });
    let (ends, _) = common::run_and_see(&job, &mut [trainer(disk)], &mut |report| {
        full.store(report.step >= 3, Ordering::SeqCst);
    });
    assert_eq!(ends, [AttemptEnd::Completed { step: 10 }]);
    assert_eq!(reasons(&job, "CheckpointDegraded"), ["StorageFails", "EndWaits"]);
    verify(&job.location().join("step-00000010")).expect("whole");
    let left = std::fs::read_dir(job.location()).expect("a folder").flatten();
    let left = left.filter(|entry| entry.file_name().to_string_lossy().starts_with(".a1-step"));
    assert_eq!(left.count(), 0, "what was given up takes no room");
}

/// Attempt 1 stalls in its commit of step 4, right before the effect that `stalls_at` names, while
/// attempt 2 commits the same step. `prepare` makes what stands there before: while it is written,
/// since an attempt that met it at its begin would end.
fn stalled_commit(stalls_at: &'static str, prepare: impl Fn(&Path) + Send + Sync + 'static) {
    let (hash, _) = undisturbed();
    let mut job = small();
    job.config.checkpoint.every_steps = 4;
    let gate = Gate::default();
    let held = gate.clone();
    let (location, once) = (job.location(), std::sync::Once::new());
    let disk = faulty(move |effect| {
        let name = |path: &Path| path.file_name().map(|name| name.to_string_lossy().into_owned());
        let writes = |path: &Path| path.to_string_lossy().contains(".a1-step-00000004");
        if matches!(effect, Effect::Sync(path) if writes(path)) {
            once.call_once(|| prepare(&location));
        }
        if matches!(effect, Effect::Rename { to, .. } if name(to).as_deref() == Some(stalls_at)) {
            held.pass();
        }
        Ok(())
    });
    std::fs::create_dir_all(job.location()).expect("a folder");
    let folder = tempfile::tempdir().expect("a folder");
    let mut second = Job { folder, config: job.config.clone() };
    second.config.attempt = 2;
    std::thread::scope(|scope| {
        let first = scope.spawn(|| run_one(&job, trainer(disk), None).0);
        gate.wait_for_somebody();
        let (end, _) = run_one(&second, trainer(Disk::real()), None);
        assert_eq!(end, AttemptEnd::Completed { step: 10 });
        gate.open();
        let end = first.join().expect("no panic");
        assert_eq!(end, AttemptEnd::Fenced { attempt: 2 }, "stalled at {stalls_at}");
    });
    for step in [4, 8, 10] {
        let directory = job.location().join(format!("step-{step:08}"));
        let manifest = verify(&directory).expect("whole and in its place");
        assert_eq!(manifest.attempt, 2, "step {step}, stalled at {stalls_at}");
    }
    assert_eq!(state_hash(&job.location().join("step-00000010")), hash);
}

#[test]
fn a_commit_that_stalls_replaces_nothing_of_a_newer_attempt() {
    stalled_commit("step-00000004", |_| {});
    let junk = |location: &Path| {
        let directory = location.join("step-00000004");
        std::fs::create_dir(&directory).expect("a folder");
        std::fs::write(directory.join("a0-r0-0.safetensors"), "junk").expect("a file");
    };
    stalled_commit("step-00000004", junk);
}

/// The writer outlives the attempt: what it was given is committed, by the attempt that follows.
#[test]
fn what_a_lost_attempt_gave_to_its_writer_is_committed_in_the_next_one() {
    let (hash, steps) = undisturbed();
    let mut job = small();
    job.config.checkpoint.every_steps = 4;
    let gate = Gate::default();
    let held = gate.clone();
    let disk = faulty(move |effect| {
        let of_step = |path: &Path| path.to_string_lossy().contains(".a1-step-00000004");
        if matches!(effect, Effect::Sync(path) if of_step(path)) {
            held.pass();
        }
        Ok(())
    });
    let patience = Patience { pending_bytes: 0, ..patience() };
    let mut trainer = [Trainer::with_disk(disk).with_patience(patience)];
    let done = std::sync::atomic::AtomicU64::new(0);
    let order = std::sync::atomic::Ordering::SeqCst;
    let see = &mut |report: &StepReport| {
        done.store(report.step, order);
        if report.step >= 6 {
            // So that it is lost on the way.
            std::thread::sleep(Duration::from_millis(100));
        }
    };
    let is_lost = || done.load(order) >= 6;
    let (ends, first) = common::run_until(&job, &mut trainer[0], see, &is_lost);
    assert!(matches!(ends[0], AttemptEnd::Aborted(_)), "{ends:?}");
    gate.wait_for_somebody();
    let (attempt, step) = common::newest_held(&trainer, 1);
    assert_eq!(attempt, 1);
    let (layout, sources) = (job.config.layout.clone(), common::sources(&trainer, 1, step, 1));
    job.config.attempt = 2;
    job.config.resume = Resume::Memory { step, attempt, layout, sources };
    let (ends, second) = common::run_and_see(&job, &mut trainer, &mut |report| {
        if report.step == 8 {
            gate.open();
        }
    });
    assert_eq!(ends, [AttemptEnd::Completed { step: 10 }]);
    for row in bits(&first).into_iter().chain(bits(&second)) {
        assert!(steps.contains(&row), "other bits at step {}", row[0]);
    }
    let of = |step: u64| {
        let directory = job.location().join(format!("step-{step:08}"));
        verify(&directory).expect("whole").attempt
    };
    assert_eq!((of(4), of(10)), (1, 2));
    assert_eq!(state_hash(&job.location().join("step-00000010")), hash);
}

/// Over NFS a folder is not empty as long as somebody writes into it, and a file that is removed
/// meanwhile comes back under another name. So whoever tidies waits for the writers that are left.
#[test]
fn a_lost_attempts_writer_has_ended_before_the_next_attempt_tidies() {
    for (world, slow) in [(1, 0), (2, 0), (2, 1)] {
        let mut job = small();
        job.config.layout = Layout::contiguous(Mesh::data_parallel(world, world));
        let (gate, clashes) = (Gate::default(), Arc::new(AtomicBool::new(false)));
        let writes = Arc::new(AtomicBool::new(false));
        let (held, clash, busy) = (gate.clone(), Arc::clone(&clashes), Arc::clone(&writes));
        let file = format!(".a1-step-00000006/a1-r{slow}-");
        let disk = faulty(move |effect| match effect {
            Effect::Sync(path) if path.to_string_lossy().contains(&file) => {
                busy.store(true, Ordering::SeqCst);
                held.pass();
                busy.store(false, Ordering::SeqCst);
                Ok(())
            }
            Effect::RemoveDirectory(path)
                if path.ends_with(".a1-step-00000006") && busy.load(Ordering::SeqCst) =>
            {
                clash.store(true, Ordering::SeqCst);
                Err(Error::from_raw_os_error(ENOTEMPTY))
            }
            _ => Ok(()),
        });
        let mut group: Vec<Trainer> = (0..world).map(|_| trainer(disk.clone())).collect();
        let delay = Duration::from_millis(20);
        let (ends, _) = common::run_and_cut_off(&job, &mut group, 0, 6, delay);
        let aborted = ends.iter().all(|end| matches!(end, AttemptEnd::Aborted(_)));
        assert!(aborted, "a checkpoint is under way: {ends:?}");
        gate.wait_for_somebody();
        let newest = checkpoint::newest_usable(&Disk::real(), &job.location());
        job.config.attempt = 2;
        // The queue of its writer says how many were committed before the one that it is at.
        job.config.resume = match newest.expect("a location").usable {
            Some(found) => Resume::Checkpoint { step: found.step, name: found.name },
            None => Resume::Fresh,
        };
        let opened = gate.clone();
        let opener = std::thread::spawn(move || {
            std::thread::sleep(Duration::from_millis(300));
            opened.open();
        });
        assert!(writes.load(Ordering::SeqCst), "attempt 1 writes when attempt 2 begins");
        let (ends, _) = job.run(&mut group, None);
        opener.join().expect("no panic");
        let completed = ends.iter().all(|end| *end == AttemptEnd::Completed { step: 10 });
        assert!(completed, "{world} ranks: {ends:?}");
        let clashed = clashes.load(Ordering::SeqCst);
        assert!(!clashed, "{world} ranks: tidied while rank {slow} wrote");
        assert!(!job.location().join(".a1-step-00000006").exists(), "{world} ranks: not tidied");
        verify(&job.location().join("step-00000010")).expect("whole");
    }
}

#[test]
fn what_only_has_a_manifests_name_is_neither_followed_nor_waited_for() {
    let job = small();
    assert_eq!(run_one(&job, trainer(Disk::real()), None).0, AttemptEnd::Completed { step: 10 });
    let made = |step: u64| {
        let directory = job.location().join(format!("step-{step:08}"));
        std::fs::create_dir(&directory).expect("a folder");
        directory.join("manifest.json")
    };
    let fifo = |path: PathBuf| {
        let kind = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, path, kind, 0o600.into(), 0).expect("a FIFO");
    };
    fifo(made(20));
    let whole = job.location().join("step-00000010/manifest.json");
    std::os::unix::fs::symlink(whole, made(21)).expect("a link");
    let huge = std::fs::File::create(made(22)).expect("a file");
    huge.set_len(1 << 40).expect("a sparse file");
    fifo(job.location().join(".a9-step-00000004"));
    fifo(job.location().join(".aside-a9-step-00000004"));
    let started = Instant::now();
    let newest = checkpoint::newest_usable(&Disk::real(), &job.location()).expect("a location");
    assert_eq!(newest.usable.expect("the last").step, 10);
    assert_eq!(newest.refused.len(), 3, "{:?}", newest.refused);
    assert!(started.elapsed() < Duration::from_secs(5), "{:?}", started.elapsed());
}

/// One job through attempts on bad storage, the last on good; what storage had promised holds.
fn survives(seed: u64, hash: &str, steps: &[[u64; 5]]) {
    let mut job = small();
    job.config.checkpoint.keep = 1 + (seed % 3) as u32;
    let mut promised = 0;
    for attempt in 1..=4 {
        job.config.attempt = attempt;
        let newest = checkpoint::newest_usable(&Disk::real(), &job.location());
        let newest = newest.expect("a location that can be read").usable;
        let found = newest.as_ref().map_or(0, |found| found.step);
        assert!(found >= promised, "step {promised} was committed, {found} is the newest");
        job.config.resume = match newest {
            Some(found) => Resume::Checkpoint { step: found.step, name: found.name },
            None => Resume::Fresh,
        };
        let chaos = Chaos::new(seed << 8 | u64::from(attempt), if attempt == 1 { 30 } else { 0 });
        let last = attempt == 4;
        let disk = if last { Disk::real() } else { Disk::with_faults(chaos.clone()) };
        // An hour by the schedule's clock.
        let hour = Duration::from_secs(3600);
        let patience = Patience { start: hour, data: hour, ..patience() };
        let mut trainer = Trainer::with_disk(disk).with_patience(patience);
        let is_dead = || !last && chaos.is_dead();
        let (mut ends, reports) = common::run_until(&job, &mut trainer, &mut |_| {}, &is_dead);
        let (end, crashed) = (ends.remove(0), is_dead());
        match end {
            AttemptEnd::Completed { step: 10 } => {}
            AttemptEnd::Fenced { attempt: by } if by == attempt && crashed => {}
            AttemptEnd::Failed(_) | AttemptEnd::Aborted(_) if crashed => {}
            // The leader goes on from what was found.
            AttemptEnd::Stopped { .. } if found < 10 => {}
            other => panic!("attempt {attempt} ended for want of storage: {other:?}"),
        }
        for row in bits(&reports) {
            assert!(steps.contains(&row), "other bits at step {}", row[0]);
        }
        promised = promised.max(told(&job));
        if crashed {
            chaos.crash();
        }
    }
    assert_eq!(state_hash(&job.location().join("step-00000010")), hash);
}

/// The newest checkpoint that was told as committed.
fn told(job: &Job) -> u64 {
    let path = Path::new(&job.config.checkpoint.records).join("events.jsonl");
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let lines = text.lines().filter_map(|line| serde_json::from_str(line).ok());
    let committed = lines.filter(|line: &serde_json::Value| line["event"] == "CheckpointCommitted");
    committed.filter_map(|line| line["step"].as_u64()).max().unwrap_or(0)
}

/// MOEJOB_SCHEDULES sets how many (500 in the acceptance of a release), MOEJOB_SEED the first.
/// With MOEJOB_CLOCK=real what stumbles does so in real time, 20 s at most each time.
#[test]
fn no_schedule_of_faults_ends_a_run_or_loses_a_checkpoint() {
    let number = |name| std::env::var(name).ok().and_then(|text| text.parse::<u64>().ok());
    let (count, first) = (number("MOEJOB_SCHEDULES").unwrap_or(40), number("MOEJOB_SEED"));
    let first = first.unwrap_or(20_261_122);
    let (hash, steps) = undisturbed();
    for seed in first..first + count {
        eprintln!("seed {seed}");
        survives(seed, &hash, &steps);
    }
}
