//! How long a lost worker holds training up: from the signal to the first step of the next attempt.
//!
//!     cargo run --release -p moejob-tests --bin recovery -- [ROUNDS]
//!
//! Four workers of the second example's model; SIGKILL, then SIGSTOP (which only a missing
//! heartbeat can tell), ROUNDS times each. Prints every time and the medians.

use moejob_tests::{Bench, Random, root, send};
use rustix::process::Signal;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(120);

fn main() {
    let rounds = std::env::args().nth(1).and_then(|text| text.parse().ok()).unwrap_or(10);
    let manifest = root().join("examples/02-elastic.yaml");
    let manifest = std::fs::read_to_string(manifest).expect("the second example");
    // Long enough to last, on a corpus that lies beside it.
    let manifest = manifest
        .replace("steps: 400", "steps: 1000000")
        .replace("\"**/*.rs\", \"**/*.md\"", "\"corpus/*.txt\"");
    let bench = Bench::new("elastic", &manifest);
    let run = bench.start(&[]);
    let mut random = Random(7);
    for (name, signal) in [("SIGKILL", Signal::KILL), ("SIGSTOP", Signal::STOP)] {
        let mut times: Vec<Duration> = Vec::new();
        for round in 0..rounds {
            bench.wait_until("four workers that train", LIMIT, is_whole);
            let pids = bench.worker_pids();
            let pid = pids[random.below(pids.len() as u64) as usize];
            let attempt = attempt_of(&bench);
            let begin = Instant::now();
            send(pid, signal);
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
    drop(run);
}

/// The attempt of the newest step.
fn attempt_of(bench: &Bench) -> u32 {
    bench.metrics().last().map_or(0, |line| line.attempt)
}

/// The newest steps were done by four workers, long enough for a snapshot.
fn is_whole(bench: &Bench) -> bool {
    let metrics = bench.metrics();
    let newest = metrics.iter().rev().take(12);
    let mut attempts = newest.map(|line| (line.world_size, line.attempt));
    let first = attempts.next();
    let same = attempts.filter(|other| Some(*other) == first).count();
    first.is_some_and(|(world, _)| world == 4) && same == 11
}
