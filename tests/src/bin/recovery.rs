//! How long a lost worker holds training up: from the signal to the first step of the next attempt.
//!
//!     cargo run --release -p moejob-tests --bin recovery -- [ROUNDS]
//!
//! Four workers of the second example's model; SIGKILL, then SIGSTOP (which only a missing
//! heartbeat can tell), ROUNDS times each. Then the same model on one worker with two engines:
//! SIGKILL of one, of both, SIGSTOP of one. Prints every time and the medians.

use moejob_tests::{Bench, Random, root, send};
use rustix::process::Signal;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);

fn main() {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(10);
    let manifest = root().join("examples/02-elastic.yaml");
    let manifest = std::fs::read_to_string(manifest).expect("the second example");
    // Long enough to last, on a corpus that lies beside it.
    let paths = manifest.lines().find(|line| line.contains("paths: [")).expect("its data");
    let replaced = |manifest: String, (from, to): (&str, &str)| {
        assert!(manifest.contains(from), "the example says {from}");
        manifest.replace(from, to)
    };
    let manifest = [
        ("steps: 2000", "steps: 1000000"),
        ("memoryEverySteps: 10", "memoryEverySteps: 10, maxRestarts: 1000"),
        (paths.trim_start(), "paths: [\"corpus/*.txt\"]"),
    ]
    .into_iter()
    .fold(manifest.clone(), replaced);
    let bench = Bench::new("elastic", &manifest);
    let run = bench.start(&[]);
    for (name, signal) in [("SIGKILL", Signal::KILL), ("SIGSTOP", Signal::STOP)] {
        measure(name, rounds, &bench, 4, Bench::worker_pids, &[signal]);
    }
    drop(run);
    let two = manifest.replace("profile: cpu", "profile: cpu, devicesPerNode: 2");
    assert_ne!(two, manifest, "the example says its profile");
    let bench = Bench::new("elastic", &two);
    let run = bench.start(&["--workers", "1"]);
    for (name, signals) in [
        ("an engine, SIGKILL", &[Signal::KILL][..]),
        ("both engines, SIGKILL", &[Signal::KILL, Signal::KILL]),
        ("an engine, SIGSTOP", &[Signal::STOP]),
    ] {
        measure(name, rounds, &bench, 2, Bench::engine_pids, signals);
    }
    drop(run);
}

/// Sends the signals to as many processes, and waits for the next step, `rounds` times.
fn measure(
    name: &str,
    rounds: usize,
    bench: &Bench,
    world: u32,
    pids: impl Fn(&Bench) -> Vec<i32>,
    signals: &[Signal],
) {
    let mut random = Random(7);
    let mut times: Vec<Duration> = Vec::new();
    for round in 0..rounds {
        let is_ready = |bench: &Bench| {
            is_whole(bench, world) && pids(bench).len() == world as usize
        };
        bench.wait_until("a whole gang that trains", LIMIT, is_ready);
        let pids = pids(bench);
        let first = random.below(pids.len() as u64) as usize;
        let attempt = attempt_of(bench);
        let begin = Instant::now();
        for (at, signal) in signals.iter().enumerate() {
            send(pids[(first + at) % pids.len()], *signal);
        }
        bench.wait_until("the next attempt's first step", LIMIT, |b| attempt_of(b) > attempt);
        let took = begin.elapsed();
        println!("{name} {round}: {:.3} s", took.as_secs_f64());
        times.push(took);
    }
    times.sort();
    let median = times.get(times.len() / 2).copied().unwrap_or_default();
    let worst = times.last().copied().unwrap_or_default();
    let (median, worst) = (median.as_secs_f64(), worst.as_secs_f64());
    println!("{name}: median {median:.3} s, worst {worst:.3} s");
}

/// The attempt of the newest step.
fn attempt_of(bench: &Bench) -> u32 {
    bench.metrics().last().map_or(0, |line| line.attempt)
}

/// The newest steps were done by so many ranks, long enough for a snapshot.
fn is_whole(bench: &Bench, ranks: u32) -> bool {
    let metrics = bench.metrics();
    let newest = metrics.iter().rev().take(12);
    let mut attempts = newest.map(|line| (line.world_size, line.attempt));
    let first = attempts.next();
    let same = attempts.filter(|other| Some(*other) == first).count();
    first.is_some_and(|(world, _)| world == ranks) && same == 11
}
