//! How long a lost worker holds training up: from the signal to the first step of the next attempt.
//!
//!     cargo run --release -p moejob-tests --bin recovery -- [ROUNDS] [large]
//!
//! Four workers of the second example's model; SIGKILL, then SIGSTOP (which only a missing
//! heartbeat can tell), ROUNDS times each. Then the same model on one worker with two engines:
//! SIGKILL of one, of both, SIGSTOP of one. Prints every time and the medians. With `large` alone
//! SIGKILL of one of two engines whose state has 1.2 GB, and what its snapshots cost.

use moejob_tests::{Bench, Random, root, send};
use rustix::process::Signal;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);

/// 101 million parameters: 1.2 GB of weights and moments, 404 MB of weights.
const LARGE: &str = r#"
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: large }
spec:
  nodes: { profile: cpu, min: 1, max: 1, devicesPerNode: 2 }
  model:
    hiddenSize: 512
    numHiddenLayers: 4
    numAttentionHeads: 8
    tieWordEmbeddings: true
    experts: { count: 16, perToken: 2, intermediateSize: 1024 }
    router: { auxLossCoef: 0.01 }
  data:
    train: { text: { paths: ["corpus/**/*.txt"] } }
    validation: { fraction: 0.2, everySteps: 1000000 }
    tokenizer: bytes
    sequenceLength: 32
  training:
    steps: 1000000
    globalBatchSize: 2
    microBatchSize: 1
    precision: fp32
    optimizer: { adamw: { learningRate: 3.0e-4 } }
    schedule: { cosine: { warmupSteps: 5, minLearningRate: 3.0e-5 } }
    seed: 1
  recovery: { memoryEverySteps: 10, maxRestarts: 1000 }
  checkpoint: { everySteps: 1000000, keep: 2 }
"#;

/// SIGKILL of one of two engines with a large state, then the share of time that snapshots took.
fn measure_large(rounds: usize) {
    let bench = Bench::new("large", LARGE);
    let run = bench.start(&["--workers", "1"]);
    measure("a large engine, SIGKILL", rounds, &bench, 2, Bench::engine_pids, &[Signal::KILL]);
    drop(run);
    let (mut all, mut snapshots) = (0.0, 0.0);
    for line in bench.metrics() {
        let phases = line.timing.phases;
        all += phases.parts().iter().map(|(_, seconds)| seconds).sum::<f64>();
        snapshots += phases.snapshot;
    }
    println!("snapshots: {snapshots:.3} s of {all:.1} s of steps");
}

fn main() {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(10);
    if std::env::args().nth(2).as_deref() == Some("large") {
        return measure_large(rounds);
    }
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
