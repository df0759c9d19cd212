//! Jobs on two GPUs of one worker lose engines. Driver and NCCL are stubs.
//!
//! They take no memory for themselves: an engine that stays keeps to its own, however often the
//! other one is lost. And where NCCL refuses behind a loss, snapshots outlive that, too.

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
    engines: [u32; 2],
}

/// While the file `refused` is there, the next one that is to connect is refused, once.
fn begin(place: &Stubbed, refused: &Path) -> Begun {
    let mut command = place.command(2, &["run", "job.yaml"]);
    command.env("STUB_REFUSED", refused).stdout(Stdio::null()).stderr(Stdio::null());
    let mut run = Running(command.spawn().expect("the program"));
    let runs = place.path().join("runs/lost");
    let attempt = trains(&mut run, &runs.join("metrics.jsonl"), 0);
    let [worker] = children(run.0.id())[..] else { panic!("one worker") };
    let [elder, younger] = children(worker)[..] else { panic!("two engines") };
    Begun { run, runs, attempt, worker, engines: [elder, younger] }
}

#[test]
fn what_nccl_refuses_behind_a_loss_costs_no_snapshot() {
    let place = Stubbed::new(None, "lost", "", 2, REST);
    let refused = place.path().join("refused");
    let Begun { mut run, runs, attempt, worker, engines: [_, younger] } = begin(&place, &refused);
    std::fs::write(&refused, "").expect("a file");
    kill(younger);
    trains(&mut run, &runs.join("metrics.jsonl"), attempt);
    assert!(!refused.exists(), "nobody was refused");
    assert_eq!(children(run.0.id()), [worker], "the worker was lost");
    let text = std::fs::read_to_string(runs.join("events.jsonl")).expect("events");
    let events: Vec<Value> =
        text.lines().map(|line| serde_json::from_str(line).expect("an event")).collect();
    let lost = |event: &&Value| event["event"] == "EngineLost";
    let losses: Vec<&Value> = events.iter().filter(lost).collect();
    let [_, refusal] = losses[..] else { panic!("{text}") };
    assert_eq!((&refusal["reason"], &refusal["rank"]), (&"DeviceFailed".into(), &0.into()));
    let words = refusal["lastWords"].as_str().expect("its last words");
    assert!(words.contains("ncclGetUniqueId: unhandled system error (2)"), "{words}");
    let resumed = events.iter().rfind(|event| event["event"] == "Resumed").expect("it goes on");
    assert_eq!(resumed["reason"], "Memory", "{resumed}");
    assert!(resumed["step"].as_u64().is_some_and(|step| step >= 10), "{resumed}");
}

#[test]
fn an_engine_that_stays_keeps_its_memory() {
    let place = Stubbed::new(None, "lost", "", 2, REST);
    let begun = begin(&place, &place.path().join("nobody is refused"));
    let Begun { mut run, runs, mut attempt, worker, engines: [elder, mut younger] } = begun;
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
