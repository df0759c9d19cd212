//! Jobs on GPUs of one worker lose engines. Driver and NCCL are stubs.
//!
//! They take no memory for themselves: an engine that stays keeps to its own, however often the
//! other one is lost. Where NCCL refuses behind a loss, snapshots outlive that, too. And a device
//! is to blame for what it does itself alone.

mod stubbed;

use serde_json::Value;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};
use stubbed::Stubbed;

/// Its training, and how it recovers.
const REST: &str = r#"
  training: { steps: 1000000, globalBatchSize: 8, microBatchSize: 2, precision: fp32 }
  parallelism: { expert: 2, exchange: flat }
  checkpoint: { everySteps: 1000000 }
  recovery: { memoryEverySteps: 10, maxRestarts: 1000 }
"#;

/// Recoveries, and those after which memory is compared.
const LOSSES: usize = 24;
const SETTLED: usize = 4;
/// Readings were the same to a MiB; a fifth of one for each recovery is found.
const READINGS_APART: u64 = 4 << 20;
const PATIENCE: Duration = Duration::from_secs(60);

/// Ends with the test.
struct Running(Child);

impl Drop for Running {
    fn drop(&mut self) {
        // Its workers end with it, and their engines with them.
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// Processes that `pid` has started.
fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let of = |thread: std::fs::DirEntry| std::fs::read_to_string(thread.path().join("children"));
    let all = threads.flatten().filter_map(|thread| of(thread).ok()).collect::<String>();
    all.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

/// Bytes that are of no file, as the system counts them.
fn own_memory(pid: u32) -> u64 {
    let text = std::fs::read_to_string(format!("/proc/{pid}/status")).expect("it lives");
    let line = text.lines().find_map(|line| line.strip_prefix("RssAnon:")).expect("Linux tells it");
    line.trim().trim_end_matches(" kB").parse::<u64>().expect("a number") << 10
}

fn events(runs: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(runs.join("events.jsonl")).expect("events");
    let whole = text.split_inclusive('\n').filter(|line| line.ends_with('\n'));
    whole.map(|line| serde_json::from_str(line).expect("an event")).collect()
}

fn losses(events: &[Value]) -> Vec<&Value> {
    events.iter().filter(|event| event["event"] == "EngineLost").collect()
}

/// The newest attempt with a line of steps, and how many steps it has.
fn newest(metrics: &Path) -> (u64, usize) {
    let text = std::fs::read_to_string(metrics).unwrap_or_default();
    let rows = text.lines().filter_map(|line| serde_json::from_str::<Value>(line).ok());
    let attempts: Vec<u64> = rows.filter_map(|row| row["attempt"].as_u64()).collect();
    let last = attempts.last().copied().unwrap_or(0);
    (last, attempts.iter().rev().take_while(|attempt| **attempt == last).count())
}

/// Waits until so many steps of an attempt behind `before` are over, and says which it is.
fn trains(run: &mut Running, metrics: &Path, before: u64) -> u64 {
    let began = Instant::now();
    loop {
        let (attempt, steps) = newest(metrics);
        if attempt > before && steps >= 12 {
            return attempt;
        }
        assert!(run.0.try_wait().expect("a child").is_none(), "the job has ended");
        assert!(began.elapsed() < PATIENCE, "no step behind attempt {before}");
        std::thread::sleep(Duration::from_millis(20));
    }
}

fn kill(engine: u32) {
    let killed = Command::new("kill").args(["-9", &engine.to_string()]).status();
    assert!(killed.is_ok_and(|status| status.success()), "engine {engine}");
}

/// A job that trains.
struct Begun {
    run: Running,
    /// Its folder.
    runs: PathBuf,
    attempt: u64,
    worker: u32,
    /// By rank.
    engines: Vec<u32>,
}

/// On so many GPUs; what the stubs are told names a file.
fn begin(place: &Stubbed, gpus: u32, (name, file): (&str, &Path)) -> Begun {
    let mut command = place.command(gpus, &["run", "job.yaml"]);
    command.env(name, file).stdout(Stdio::null()).stderr(Stdio::null());
    let mut run = Running(command.spawn().expect("the program"));
    let runs = place.path().join("runs/lost");
    let attempt = trains(&mut run, &runs.join("metrics.jsonl"), 0);
    let [worker] = children(run.0.id())[..] else { panic!("one worker") };
    Begun { run, runs, attempt, worker, engines: children(worker) }
}

#[test]
fn what_nccl_refuses_behind_a_loss_costs_no_snapshot() {
    let place = Stubbed::new(None, "lost", "devicesPerNode: 2", 2, REST);
    let refused = place.path().join("refused");
    let begun = begin(&place, 2, ("STUB_REFUSED", &refused));
    let Begun { mut run, runs, attempt, worker, engines } = begun;
    std::fs::write(&refused, "").expect("a file");
    kill(engines[1]);
    trains(&mut run, &runs.join("metrics.jsonl"), attempt);
    assert!(!refused.exists(), "nobody was refused");
    assert_eq!(children(run.0.id()), [worker], "the worker was lost");
    let events = events(&runs);
    let losses = losses(&events);
    let [_, refusal] = losses[..] else { panic!("{events:?}") };
    assert_eq!((&refusal["reason"], &refusal["rank"]), (&"DeviceFailed".into(), &0.into()));
    let words = refusal["lastWords"].as_str().expect("its last words");
    assert!(words.contains("ncclGetUniqueId: unhandled system error (2)"), "{words}");
    let resumed = events.iter().rfind(|event| event["event"] == "Resumed").expect("it goes on");
    assert_eq!(resumed["reason"], "Memory", "{resumed}");
    assert!(resumed["step"].as_u64().is_some_and(|step| step >= 10), "{resumed}");
}

/// Four GPUs, of which one is killed again and again while kernels of the others wait for it: they
/// give up and are well. The device that truly fails is the one that is named.
#[test]
fn of_four_devices_the_one_that_fails_is_to_blame_and_no_other() {
    let rest = REST.replace("memoryEverySteps: 10", "memoryEverySteps: 1");
    let rest = rest.replace("expert: 2", "expert: 4");
    let place = Stubbed::new(None, "lost", "devicesPerNode: 4", 2, &rest);
    let busy = place.path().join("busy");
    let Begun { mut run, runs, mut attempt, worker, .. } = begin(&place, 4, ("STUB_BUSY", &busy));
    for round in 1..=3 {
        let engines = children(worker);
        std::fs::write(&busy, "").expect("a file");
        // They wait by now, each for its own part of a step.
        std::thread::sleep(Duration::from_millis(150));
        kill(engines[engines.len() - 1]);
        let until = Instant::now() + PATIENCE;
        while losses(&events(&runs)).iter().filter(|of| of["reason"] == "Lost").count() < round {
            assert!(Instant::now() < until, "the loss was not told");
            std::thread::sleep(Duration::from_millis(10));
        }
        std::thread::sleep(Duration::from_millis(150));
        std::fs::remove_file(&busy).expect("it was there");
        attempt = trains(&mut run, &runs.join("metrics.jsonl"), attempt);
    }
    let events = events(&runs);
    let blamed: Vec<_> =
        losses(&events).into_iter().filter(|of| of["reason"] == "DeviceFailed").collect();
    assert!(blamed.is_empty(), "{blamed:?}");
}

#[test]
fn a_device_that_fails_three_times_is_named_among_four() {
    let rest = REST.replace("expert: 2", "expert: 4");
    let place = Stubbed::new(None, "lost", "devicesPerNode: 4", 2, &rest);
    let mut command = place.command(4, &["run", "job.yaml"]);
    let output = command.env("MOEJOB_FAULT", "illegal@5/2x3").output().expect("the program");
    let told = String::from_utf8_lossy(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    let named = told.lines().find(|line| line.contains("failed 3 times within 600 s"));
    let named = named.unwrap_or_else(|| panic!("{told}"));
    assert!(named.contains("device 2 of node-0"), "{named}");
    let events = events(&place.path().join("runs/lost"));
    let blamed = losses(&events).into_iter().filter(|of| of["reason"] == "DeviceFailed");
    let ranks: Vec<u64> = blamed.filter_map(|event| event["rank"].as_u64()).collect();
    assert_eq!(ranks, [2, 2, 2], "{told}");
}

#[test]
fn an_engine_that_stays_keeps_its_memory() {
    let place = Stubbed::new(None, "lost", "devicesPerNode: 2", 2, REST);
    let begun = begin(&place, 2, ("STUB_REFUSED", &place.path().join("nobody is refused")));
    let Begun { mut run, runs, mut attempt, worker, engines } = begun;
    let [elder, mut younger] = engines[..] else { panic!("two engines") };
    let metrics = runs.join("metrics.jsonl");
    let mut readings = Vec::new();
    for loss in 0..LOSSES {
        kill(younger);
        attempt = trains(&mut run, &metrics, attempt);
        let engines = children(worker);
        assert!(engines.contains(&elder), "loss {loss}: the other engine was replaced, too");
        let new = engines.iter().copied().find(|pid| ![elder, younger].contains(pid));
        younger = new.expect("another engine in the place of the one that was lost");
        readings.push(own_memory(elder));
    }
    // What lies lowest among some readings, and in the end.
    let least = |of: &[u64]| of.iter().copied().min().expect("readings");
    let before = least(&readings[SETTLED..SETTLED + 6]);
    let after = least(&readings[LOSSES - 6..]);
    let mib: Vec<u64> = readings.iter().map(|bytes| bytes >> 20).collect();
    assert!(after < before + READINGS_APART, "an engine that stays grows, MiB: {mib:?}");
    println!("an engine that stays has, MiB: {mib:?}");
}
