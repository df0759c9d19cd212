//! Faults: killed and frozen workers, killed runs. None changes a bit of the result.
//!
//! Counts are small here and set by `$MOEJOB_FAULT_RUNS` and `$MOEJOB_KILLS`; the seed of every run
//! is printed, and `$MOEJOB_SEED` repeats one.

use moejob_tests::{Bench, Random, send};
use rustix::process::Signal;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(180);

fn count(name: &str, default: u64) -> u64 {
    std::env::var(name).ok().and_then(|text| text.parse().ok()).unwrap_or(default)
}

fn seed() -> u64 {
    let clock = std::time::SystemTime::now().duration_since(std::time::UNIX_EPOCH);
    let seed = count("MOEJOB_SEED", clock.map(|time| time.as_nanos() as u64).unwrap_or(1));
    println!("seed: MOEJOB_SEED={seed}");
    seed
}

#[test]
fn killed_and_frozen_workers_change_no_bit() {
    const STEPS: u64 = 1200;
    let whole = Bench::small(STEPS, 100, 11);
    assert_eq!(whole.run(&[], LIMIT), Some(0), "{}", whole.output());
    let mut random = Random(seed());
    for round in 0..count("MOEJOB_FAULT_RUNS", 3) {
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
    let kills = count("MOEJOB_KILLS", 10);
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
