//! Faults: killed and frozen workers, killed runs. None changes a bit of the result.
//!
//! Counts are small here and set by `$MOEJOB_FAULT_RUNS` and `$MOEJOB_KILLS`; the seed of every run
//! is printed, and `$MOEJOB_SEED` repeats one.

use moejob_tests::{Bench, Random, is_engine, number, seed, send};
use rustix::process::Signal;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(180);

#[test]
fn killed_and_frozen_workers_change_no_bit() {
    const STEPS: u64 = 1200;
    let whole = Bench::small(STEPS, 100, 11);
    assert_eq!(whole.run(&[], LIMIT), Some(0), "{}", whole.output());
    let mut random = Random(seed());
    for round in 0..number("MOEJOB_FAULT_RUNS").unwrap_or(3) {
        let workers = 2 + random.below(3);
        let bench = Bench::small(STEPS, 100, 11);
        let mut run = bench.start(&["--workers", &workers.to_string()]);
        let mut frozen = Vec::new();
        let mut faults = 1 + random.below(5);
        let begin = Instant::now();
        while faults > 0 && !run.has_ended() && begin.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(100 + random.below(1200)));
            let pids = bench.worker_pids();
            if pids.is_empty() {
                continue;
            }
            let pid = pids[random.below(pids.len() as u64) as usize];
            let freeze = random.below(2) == 0;
            println!("round {round}: {} {pid}", if freeze { "STOP" } else { "KILL" });
            send(pid, if freeze { Signal::STOP } else { Signal::KILL });
            frozen.extend(freeze.then_some(pid));
            faults -= 1;
        }
        assert_eq!(run.wait(LIMIT), Some(0), "round {round}\n{}", bench.output());
        frozen.into_iter().for_each(|pid| send(pid, Signal::CONT));
        assert_eq!(bench.losses(), whole.losses(), "round {round}\n{}", bench.output());
        let held_out = |bench: &Bench| bench.metrics().last().and_then(|m| m.validation_loss);
        assert_eq!(held_out(&bench), held_out(&whole), "round {round}");
    }
}

#[test]
fn a_killed_run_resumes_from_a_complete_checkpoint() {
    let kills = number("MOEJOB_KILLS").unwrap_or(10);
    let steps = 200 + 60 * kills;
    let limit = LIMIT + Duration::from_secs(5 * kills);
    let whole = Bench::small(steps, 3, 12);
    assert_eq!(whole.run(&[], limit), Some(0), "{}", whole.output());
    let mut random = Random(seed());
    let bench = Bench::small(steps, 3, 12);
    let mut newest = 0;
    for kill in 0..kills {
        let mut run = bench.start(&["--workers", "2"]);
        std::thread::sleep(Duration::from_millis(50 + random.below(600)));
        if run.has_ended() {
            break;
        }
        send(run.pid(), Signal::KILL);
        assert_eq!(run.wait(limit), None);
        let names = bench.checkpoints();
        let step = names.last().and_then(|name| name.strip_prefix("step-")?.parse().ok());
        let step: u64 = step.unwrap_or(0);
        println!("kill {kill}: checkpoint {step}");
        assert!(step >= newest, "kill {kill}: checkpoint {newest} is lost, {step} is the newest");
        newest = step;
    }
    assert_eq!(bench.run(&["--workers", "3"], limit), Some(0), "{}", bench.output());
    assert_eq!(bench.losses(), whole.losses(), "{}", bench.output());
}

#[test]
fn a_damaged_checkpoint_is_named_and_the_one_before_it_used() {
    let bench = Bench::small(60, 10, 13);
    let run = bench.start(&[]);
    bench.wait_until("three checkpoints", LIMIT, |bench| bench.checkpoints().len() >= 3);
    send(run.pid(), Signal::KILL);
    assert_eq!(run.wait(LIMIT), None);
    let name = bench.checkpoints().pop().expect("a checkpoint");
    let folder = bench.run_folder().join("checkpoints").join(&name);
    let shard = std::fs::read_dir(folder)
        .expect("a folder")
        .filter_map(|entry| Some(entry.ok()?.path()))
        .find(|path| path.extension().is_some_and(|end| end == "safetensors"))
        .expect("a shard");
    let mut bytes = std::fs::read(&shard).expect("a shard");
    let middle = bytes.len() / 2;
    bytes[middle] ^= 4;
    std::fs::write(&shard, bytes).expect("damaged");
    assert_eq!(bench.run(&[], LIMIT), Some(0), "{}", bench.output());
    let refused = |event: &serde_json::Value| {
        event["event"] == "CheckpointRefused" && event["name"] == name.as_str()
    };
    assert!(bench.events().iter().any(refused), "{}", bench.output());
    let whole = Bench::small(60, 10, 13);
    assert_eq!(whole.run(&[], LIMIT), Some(0), "{}", whole.output());
    assert_eq!(bench.losses(), whole.losses());
}

/// An upgrade replaces the program while it runs, and then its folder takes no file for a while.
/// What is lost meanwhile comes back, from the memory of what lives.
#[test]
fn a_lost_worker_comes_back_whatever_lies_at_the_programs_place() {
    let bench = Bench::small(1_000_000, 1_000_000, 20);
    let program = bench.path().join("moejob");
    std::fs::copy(moejob_tests::moejob(), &program).expect("a program of its own");
    let mut run = bench.start(&["--workers", "2"]);
    let world = |bench: &Bench, attempts_above: u32| {
        let newest = bench.metrics().into_iter().rev().take(5);
        let both = newest.filter(|line| line.world_size == 2 && line.attempt > attempts_above);
        both.count() == 5
    };
    bench.wait_until("steps of both", LIMIT, |bench| world(bench, 0));
    std::fs::remove_file(&program).expect("it was there");
    std::fs::write(&program, "no program").expect("another one");
    let attempt = bench.metrics().last().map_or(0, |line| line.attempt);
    send(bench.worker_pids()[1], Signal::KILL);
    bench.wait_until("both again", LIMIT, |bench| world(bench, attempt));
    // In its place nothing can be written.
    let staged = bench.run_folder().join(".job.json.tmp");
    std::fs::create_dir(&staged).expect("a folder");
    let attempt = bench.metrics().last().map_or(0, |line| line.attempt);
    send(bench.worker_pids()[1], Signal::KILL);
    let told = |words: &str| bench.output().matches(words).count();
    bench.wait_until("words of it", LIMIT, |_| told("writing job.json fails: ") == 1);
    std::thread::sleep(Duration::from_secs(1));
    assert!(!run.has_ended(), "{}", bench.output());
    std::fs::remove_dir(&staged).expect("it was there");
    bench.wait_until("both once more", LIMIT, |bench| world(bench, attempt));
    assert_eq!(told("writing job.json fails: "), 1, "{}", bench.output());
    assert_eq!(told("writing job.json works again"), 1, "{}", bench.output());
    let resumed = bench.events().into_iter().filter(|event| event["event"] == "Resumed");
    let from: Vec<_> = resumed.skip(1).map(|event| event["reason"].clone()).collect();
    assert!(from.iter().all(|reason| reason == "Memory"), "{from:?}");
}

/// Steps are over, and the last checkpoint waits behind others that storage does not take: that is
/// no hang, however long it lasts.
#[test]
fn a_run_waits_at_its_end_for_storage_that_is_away() {
    let bench = Bench::small(120, 5, 19);
    let path = bench.path().join("job.yaml");
    let text = std::fs::read_to_string(&path).expect("manifest");
    let text = text.trim_end().to_string() + "\n  recovery: { stepTimeout: 1s }\n";
    std::fs::write(&path, text).expect("manifest");
    let run = bench.start(&[]);
    let (place, away) = (bench.run_folder().join("checkpoints"), bench.path().join("away"));
    bench.wait_until("a checkpoint", LIMIT, |bench| !bench.checkpoints().is_empty());
    std::fs::rename(&place, &away).expect("storage goes away");
    let told = |bench: &Bench| {
        let degraded = bench.events().into_iter().filter(|of| of["event"] == "CheckpointDegraded");
        degraded.filter(|event| event["reason"] == "EndWaits").count()
    };
    bench.wait_until("the end, which waits", LIMIT, |bench| told(bench) == 1);
    std::thread::sleep(Duration::from_secs(2));
    std::fs::rename(&away, &place).expect("storage comes back");
    assert_eq!(run.wait(LIMIT), Some(0), "{}", bench.output());
    assert!(bench.metrics().iter().all(|line| line.attempt == 1), "{}", bench.output());
    assert_eq!(bench.checkpoints().pop().as_deref(), Some("step-00000120"));
}

/// One node, so that what is resumed from can only be its worker's memory.
#[test]
fn lost_engines_are_started_again_and_resume_from_their_workers_memory() {
    let bench = Bench::with_engines(1_000_000, 1_000_000, 14, 2);
    let _run = bench.start(&[]);
    for (round, both) in [false, true, false, true].into_iter().enumerate() {
        let attempt = |bench: &Bench| bench.metrics().last().map_or(0, |line| line.attempt);
        let steps = |bench: &Bench| bench.metrics().iter().rev().take(25).count();
        bench.wait_until("steps and two engines", LIMIT, |bench| {
            let newest = attempt(bench);
            let of_newest = bench.metrics().iter().filter(|line| line.attempt == newest).count();
            steps(bench) >= 25 && of_newest >= 25 && bench.engine_pids().len() == 2
        });
        let (before, pids) = (attempt(&bench), bench.engine_pids());
        let begin = Instant::now();
        send(pids[0], Signal::KILL);
        if both {
            send(pids[1], Signal::KILL);
        }
        bench.wait_until("the next step", LIMIT, |bench| attempt(bench) > before);
        println!("round {round}: {:?}", begin.elapsed());
        let after = attempt(&bench);
        // Two at once may be noticed one after the other, when the next attempt has begun.
        assert!(after <= before + 1 + u32::from(both), "{}", bench.output());
    }
    let resumed: Vec<_> = (bench.events().into_iter())
        .filter(|event| event["event"] == "Resumed")
        .map(|event| event["reason"].as_str().unwrap_or_default().to_string())
        .collect();
    assert_eq!(resumed[0], "Fresh");
    assert!(resumed[1..].iter().all(|reason| reason == "Memory"), "{resumed:?}");
    let lost: Vec<_> =
        bench.events().into_iter().filter(|event| event["event"] == "EngineLost").collect();
    assert_eq!(lost.len(), 6, "{lost:?}");
    assert!(lost.iter().all(|event| event["exit"] == "killed by signal 9"), "{lost:?}");
    // Of one worker's ranks each has the device of its number; processors have no uuid.
    assert!(lost.iter().all(|event| event["rank"] == event["device"] && event["uuid"] == ""));
    let words = |event: &serde_json::Value| {
        let text = |name: &str| event[name].as_str().unwrap_or_default().to_string();
        let place = format!("rank {0} (device {0} of {1}, pid ", event["rank"], text("node"));
        !text("node").is_empty() && text("message").contains(&place)
    };
    assert!(lost.iter().all(words), "{lost:?}");
    assert_eq!(bench.count("WorkerLost"), 0, "the worker itself stays");
}

/// What an engine has handed over is written by its worker, from the slot that the state lies in.
#[test]
fn a_lost_engine_costs_no_checkpoint_that_is_being_written() {
    const EVERY: u64 = 400;
    let bench = Bench::with_engines(1_000_000, EVERY, 17, 2);
    let _run = bench.start(&[]);
    let place = bench.run_folder().join("checkpoints");
    let away = bench.path().join("away");
    bench.wait_until("steps and two engines", LIMIT, |bench| {
        bench.losses().len() >= 20 && bench.engine_pids().len() == 2
    });
    std::fs::rename(&place, &away).expect("storage goes away");
    bench.wait_until("a checkpoint that cannot be written", LIMIT, |bench| {
        bench.count("CheckpointDegraded") == 1
    });
    let newest = |bench: &Bench| bench.metrics().last().map_or((0, 0), |m| (m.attempt, m.step));
    let (before, _) = newest(&bench);
    send(bench.engine_pids()[0], Signal::KILL);
    bench.wait_until("the next attempt's steps", LIMIT, |bench| newest(bench).0 > before);
    let (_, step) = newest(&bench);
    bench.wait_until("some of them", LIMIT, |bench| newest(bench).1 >= step + 20);
    std::fs::rename(&away, &place).expect("storage comes back");
    // The first commit that is told from here on is the lost attempt's.
    let committed = |bench: &Bench| {
        let events = bench.events();
        let mut of = events.into_iter().skip_while(|event| event["event"] != "EngineLost");
        let commit = of.find(|event| event["event"] == "CheckpointCommitted");
        commit.and_then(|event| event["step"].as_u64())
    };
    bench.wait_until("the lost attempt's checkpoint", LIMIT, |b| committed(b).is_some());
    let step = committed(&bench).unwrap_or_default();
    let manifest = |step: u64| {
        let path = place.join(format!("step-{step:08}")).join("manifest.json");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        serde_json::from_str::<serde_json::Value>(text.lines().next().unwrap_or_default())
            .map_or(0, |manifest| manifest["attempt"].as_u64().unwrap_or(0))
    };
    assert_eq!(manifest(step), u64::from(before), "step {step}\n{}", bench.output());
    // And those of the attempt that trains follow.
    bench.wait_until("a checkpoint of the next attempt", LIMIT, |bench| {
        let newest = bench.checkpoints().pop().unwrap_or_default();
        let step = newest.strip_prefix("step-").and_then(|step| step.parse().ok());
        manifest(step.unwrap_or(0)) > u64::from(before)
    });
}

#[test]
fn killed_stopped_and_crashed_engines_and_workers_change_no_bit() {
    const STEPS: u64 = 800;
    let whole = Bench::small(STEPS, 100, 15);
    assert_eq!(whole.run(&[], LIMIT), Some(0), "{}", whole.output());
    let mut random = Random(seed());
    for round in 0..number("MOEJOB_FAULT_RUNS").unwrap_or(2) {
        let (workers, engines) = (1 + random.below(3), 2 + random.below(2) as u32);
        let bench = Bench::with_engines(STEPS, 100, 15, engines.min(7 / workers as u32));
        let mut run = bench.start(&["--workers", &workers.to_string()]);
        let mut faults = 1 + random.below(5);
        let begin = Instant::now();
        while faults > 0 && !run.has_ended() && begin.elapsed() < LIMIT {
            std::thread::sleep(Duration::from_millis(100 + random.below(1500)));
            let (engines, workers) = (bench.engine_pids(), bench.worker_pids());
            let of_workers = random.below(5) == 0;
            let pids = if of_workers { workers } else { engines };
            if pids.is_empty() {
                continue;
            }
            let pid = pids[random.below(pids.len() as u64) as usize];
            let signal = [Signal::KILL, Signal::STOP, Signal::SEGV][random.below(3) as usize];
            println!("round {round}: {signal:?} {pid}, a worker: {of_workers}");
            send(pid, signal);
            faults -= 1;
        }
        assert_eq!(run.wait(LIMIT), Some(0), "round {round}\n{}", bench.output());
        assert_eq!(bench.losses(), whole.losses(), "round {round}\n{}", bench.output());
        let held_out = |bench: &Bench| bench.metrics().last().and_then(|m| m.validation_loss);
        assert_eq!(held_out(&bench), held_out(&whole), "round {round}");
    }
}

#[test]
fn a_stopped_engine_is_noticed_and_no_engine_outlives_its_worker() {
    let bench = Bench::with_engines(1_000_000, 1_000_000, 16, 2);
    let mut run = bench.start(&[]);
    let is_ready = |bench: &Bench| bench.losses().len() >= 12 && bench.engine_pids().len() == 2;
    bench.wait_until("two engines that train", LIMIT, is_ready);
    let stopped = bench.engine_pids()[1];
    let begin = Instant::now();
    send(stopped, Signal::STOP);
    bench.wait_until("another in its place", LIMIT, |bench| {
        bench.engine_pids().len() == 2 && !bench.engine_pids().contains(&stopped)
    });
    // The manifest's heartbeatTimeout is 3 s; the rest is for a machine that is busy.
    assert!(begin.elapsed() < Duration::from_secs(60), "{:?}", begin.elapsed());
    let pids = bench.engine_pids();
    send(pids[0], Signal::STOP);
    send(bench.worker_pids()[0], Signal::KILL);
    std::thread::sleep(Duration::from_secs(1));
    let left: Vec<i32> = pids.into_iter().filter(|pid| is_engine(*pid)).collect();
    assert!(left.is_empty(), "{left:?} live");
    assert!(!run.has_ended(), "another worker goes on");
}

/// 82 MB a rank, over strands: what goes on does so from memory, and both go on again.
#[test]
fn a_killed_worker_with_a_large_state_costs_the_steps_since_a_snapshot() {
    let bench = Bench::new("large", LARGE);
    let run = bench.start_with(&["--workers", "2"], &[("MOEJOB_STRANDS", "2")]);
    let world = |bench: &Bench, ranks: u32, attempts_above: u32| {
        let metrics = bench.metrics();
        let newest = metrics.iter().rev().take(30);
        let same = newest.filter(|line| line.world_size == ranks && line.attempt > attempts_above);
        same.count()
    };
    bench.wait_until("snapshots of both", LIMIT, |bench| world(bench, 2, 0) == 30);
    let attempt = bench.metrics().last().map_or(0, |line| line.attempt);
    let pids = bench.worker_pids();
    send(pids[1], Signal::KILL);
    // Of the one that is left, or of both, where the next worker was quick.
    let next = |bench: &Bench| bench.metrics().last().is_some_and(|line| line.attempt > attempt);
    bench.wait_until("the next attempt", LIMIT, next);
    let of_memory = |event: &serde_json::Value| {
        event["event"] == "Resumed" && event["attempt"] == attempt + 1 && event["step"] != 0
    };
    assert!(bench.events().iter().any(of_memory), "{}", bench.output());
    assert_eq!(bench.checkpoints(), Vec::<String>::new(), "nothing was written");
    bench.wait_until("both again", LIMIT, |bench| world(bench, 2, attempt) >= 3);
    // A step that was done twice has the same loss, on however many ranks.
    let mut losses = BTreeMap::new();
    for line in bench.metrics() {
        let loss = line.loss.to_bits();
        assert_eq!(*losses.entry(line.step).or_insert(loss), loss, "step {}", line.step);
    }
    drop(run);
}

const LARGE: &str = r#"
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: large }
spec:
  nodes: { profile: cpu, min: 1, max: 2 }
  model:
    hiddenSize: 256
    numHiddenLayers: 4
    numAttentionHeads: 4
    tieWordEmbeddings: true
    experts: { count: 8, perToken: 2, intermediateSize: 512 }
    router: { auxLossCoef: 0.01 }
  data:
    train: { text: { paths: ["corpus/**/*.txt"] } }
    validation: { fraction: 0.2, everySteps: 1000000 }
    tokenizer: bytes
    sequenceLength: 16
  training:
    steps: 1000000
    globalBatchSize: 2
    microBatchSize: 1
    precision: fp32
    optimizer: { adamw: { learningRate: 3.0e-4 } }
    seed: 1
  recovery: { memoryEverySteps: 5, maxRestarts: 1000 }
  checkpoint: { everySteps: 1000000, keep: 2 }
"#;
