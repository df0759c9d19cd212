//! Random manifests under random faults. Losses, masters and moments are those of a run of one rank
//! that nothing disturbs, bit for bit.
//!
//! A trial takes one of the manifests of `golden.rs`, with other numbers. `$MOEJOB_TRIALS` says how
//! many there are; the seed is printed, and `$MOEJOB_SEED` repeats a run of them.
//!
//! A storm is one job of many engines under faults that come again and again: it trains to its end,
//! costs nobody but those that it hits, and little time. `tests/run storm` is a long one.

mod cases;

use cases::{Case, NODES, TRAINING, all, parts};
use moejob_tests::{Bench, Random, number, seed, send};
use rustix::process::Signal;
use std::collections::BTreeSet;
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(300);
/// An engine more may be lost than there are faults: peers notice in their own time.
const FAULTS_MAX: u64 = 4;
const ONE_NODE: &str = "profile: cpu, min: 1, max: 1";
/// Nodes of a trial at most.
const WORKERS_MAX: u64 = 4;

#[test]
fn random_jobs_under_random_faults_keep_their_bits() {
    let seed = seed();
    for trial in 0..number("MOEJOB_TRIALS").unwrap_or(1) {
        println!("trial {trial}: MOEJOB_SEED={}", seed.wrapping_add(trial));
        try_one(&mut Random(seed.wrapping_add(trial)));
    }
}

/// A model of some milliseconds a step, without a schedule that would depend on when it ends.
const STORM: &str = r#"
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: storm }
spec:
  nodes: { NODES }
  model:
    hiddenSize: 64
    numHiddenLayers: 2
    numAttentionHeads: 2
    experts: { count: 16, perToken: 2, intermediateSize: 64 }
    router: { auxLossCoef: 0.01 }
  data:
    train: { text: { paths: ["corpus/**/*.txt"] } }
    validation: { fraction: 0.1, everySteps: 1000000 }
    tokenizer: bytes
    sequenceLength: 64
  training:
    steps: 1000000
    globalBatchSize: 16
    microBatchSize: 1
    precision: fp32
    seed: 5
    optimizer: { adamw: { learningRate: 5.0e-4 } }
  checkpoint: { everySteps: 1000000 }
  recovery: { maxRestarts: 10000 }
"#;

/// Without variables a short one, which the machine's speed does not decide. `$MOEJOB_STORM` says
/// how many seconds it takes, `$MOEJOB_STORM_PERIOD` how many lie between two faults in the mean,
/// `$MOEJOB_STORM_NODES` replaces the field `nodes` (`profile: gpu, devicesPerNode: 2`), and with
/// `$MOEJOB_STORM_PERCENT=98` so much of an undisturbed stretch's speed has to be left.
#[test]
fn a_storm_of_kills_and_stops_costs_no_bit_and_nobody_else() {
    let mut random = Random(seed());
    let (seconds, period) = (number("MOEJOB_STORM"), number("MOEJOB_STORM_PERIOD").unwrap_or(15));
    let (span, period) = match seconds {
        Some(seconds) => (Duration::from_secs(seconds), period as f64),
        None => (Duration::from_secs(4), 0.7),
    };
    let nodes = std::env::var("MOEJOB_STORM_NODES");
    let nodes = nodes.unwrap_or("profile: cpu, devicesPerNode: 4, min: 1, max: 4".to_string());
    let bench = Bench::new("storm", &STORM.replace("NODES", &nodes));
    let mut run = bench.start(&[]);
    let newest = || bench.metrics().last().map_or(0, |line| line.step);
    bench.wait_until("steps", LIMIT, |_| newest() >= 20);
    // What is undisturbed is measured beside each minute of the storm: the machine may be busy.
    let (mut calm, mut left) = (Speed::default(), span);
    let mut storm = Speed::default();
    let (mut faults, mut stops) = (0, 0);
    while !left.is_zero() {
        let part = left.min(Duration::from_secs(60));
        left -= part;
        if seconds.is_some() {
            std::thread::sleep(Duration::from_secs(4));
            calm.measure(newest, || std::thread::sleep(Duration::from_secs(16)));
        }
        storm.measure(newest, || {
            let end = Instant::now() + part;
            while Instant::now() < end {
                let unit = (1 + random.below(1 << 30)) as f64 / f64::from(1 << 30);
                let wait = Duration::from_secs_f64(-unit.ln() * period);
                std::thread::sleep(wait.min(end.saturating_duration_since(Instant::now())));
                let engines = bench.engine_pids();
                if Instant::now() < end && !engines.is_empty() {
                    let stop = random.below(5) == 0;
                    let signal = if stop { Signal::STOP } else { Signal::KILL };
                    send(one_of(&mut random, &engines), signal);
                    (faults, stops) = (faults + 1, stops + u32::from(stop));
                }
            }
        });
        assert!(!run.has_ended(), "{}", bench.output());
    }
    let share = storm.rate() / calm.rate();
    println!(
        "{faults} faults, {stops} of them stops, in {span:?}: {:.2} steps/s, undisturbed {:.2}: \
         effective {:.2}%",
        storm.rate(),
        calm.rate(),
        100.0 * share
    );
    run.signal(Signal::INT);
    assert_eq!(run.wait(LIMIT), Some(130), "{}", bench.output());
    // Nobody but engines was lost, and no device or node is to blame for what came from outside.
    let lost = bench.events().into_iter().filter(|event| event["event"] == "EngineLost");
    let blamed: Vec<_> = lost.filter(|event| event["reason"] == "DeviceFailed").collect();
    assert!(blamed.is_empty(), "{blamed:?}");
    assert_eq!(bench.count("WorkerLost"), 0, "{}", bench.output());
    let attempts = bench.events().into_iter().filter(|event| event["event"] == "AttemptStarted");
    let sizes: BTreeSet<u64> = attempts.filter_map(|event| event["nodes"].as_u64()).collect();
    assert_eq!(sizes.len(), 1, "no node is avoided: {}", bench.output());
    // The losses are those of one rank that nothing disturbs.
    let done = newest();
    let alone = nodes.replace("devicesPerNode: 4, min: 1, max: 4", "min: 1, max: 1");
    let whole = Bench::new("storm", &STORM.replace("NODES", &alone));
    let run = whole.start(&[]);
    whole.wait_until("as many steps", LIMIT + 4 * span, |whole| {
        whole.metrics().last().is_some_and(|line| line.step >= done)
    });
    run.signal(Signal::INT);
    assert_eq!(run.wait(LIMIT), Some(130), "{}", whole.output());
    let of = |bench: &Bench| -> std::collections::BTreeMap<u64, f64> {
        let metrics = bench.metrics();
        let before = metrics.iter().filter(|line| line.step <= done);
        before.map(|line| (line.step, line.loss)).collect()
    };
    let (found, expected) = (of(&bench), of(&whole));
    assert_eq!(found.len() as u64, done);
    let same = |a: f64, b: f64| match alone == nodes {
        // Sums of losses, which are told, come in another order on GPUs.
        true => (a - b).abs() <= 1e-12 * a.abs(),
        false => a.to_bits() == b.to_bits(),
    };
    let differs = expected.iter().find(|(step, loss)| {
        !found.get(step).is_some_and(|found| same(*found, **loss))
    });
    assert_eq!(differs, None, "{}", bench.output());
    if let Some(least) = number("MOEJOB_STORM_PERCENT") {
        assert!(100.0 * share >= least as f64, "effective {:.2}%", 100.0 * share);
    }
}

/// Steps that were reached in some time.
#[derive(Default)]
struct Speed {
    steps: u64,
    seconds: f64,
}

impl Speed {
    fn measure(&mut self, newest: impl Fn() -> u64, work: impl FnOnce()) {
        let (before, began) = (newest(), Instant::now());
        work();
        self.steps += newest().saturating_sub(before);
        self.seconds += began.elapsed().as_secs_f64();
    }

    fn rate(&self) -> f64 {
        self.steps as f64 / self.seconds
    }
}

fn one_of<T: Copy>(random: &mut Random, of: &[T]) -> T {
    of[random.below(of.len() as u64) as usize]
}

fn try_one(random: &mut Random) {
    let cases: Vec<Case> =
        all().into_iter().filter(|case| case.manifest.contains(TRAINING)).collect();
    let at = random.below(cases.len() as u64) as usize;
    let mut case = cases.into_iter().nth(at).expect("one of them");
    // Now and then enough work for four workers of four engines.
    let wide = random.below(4) == 0;
    let batch = if wide { 16 + random.below(3) } else { 3 + random.below(6) };
    let large = random.below(3) == 0;
    let steps = if wide || large { 40 + random.below(80) } else { 60 + random.below(240) };
    // Not more ranks than a step has micro-batches.
    let engines = one_of(random, &[1, 1, 2, 2, 4]).min(batch);
    let workers = 1 + random.below(WORKERS_MAX.min(batch / engines).max(1));
    vary(&mut case, random, steps, batch);
    if large {
        enlarge(&mut case);
    }
    let whole = Bench::new("golden", &case.manifest);
    case.prepare(&whole);
    assert_eq!(whole.run(&["--workers", "1"], LIMIT), Some(0), "{}", whole.output());

    let nodes = format!("profile: cpu, devicesPerNode: {engines}, min: 1, max: {workers}");
    let manifest = case.manifest.replace(ONE_NODE, &nodes);
    let bench = Bench::new("golden", &manifest);
    case.prepare(&bench);
    println!("{} on {workers} workers of {engines} engines:\n{manifest}", case.name);
    let environment: &[(&str, &str)] = match random.below(2) {
        0 => &[("MOEJOB_ENGINE", "process")],
        _ => &[],
    };
    let mut run = bench.start_with(&["--workers", &workers.to_string()], environment);
    disturb(&bench, &mut run, random);
    assert_eq!(run.wait(LIMIT), Some(0), "{}", bench.output());
    assert_same(&bench, &whole);
}

/// Other numbers in the same manifest.
fn vary(case: &mut Case, random: &mut Random, steps: u64, batch: u64) {
    let micro_batch = if batch.is_multiple_of(2) && random.below(3) == 0 { 2 } else { 1 };
    let batch = if micro_batch == 2 { batch * 2 } else { batch };
    let recompute = one_of(random, &["none", "selective", "full"]);
    let training = format!(
        "{{ steps: {steps}, globalBatchSize: {batch}, microBatchSize: {micro_batch}, \
         seed: {}, recompute: {recompute}, \
         optimizer: {{ adamw: {{ learningRate: 3.0e-3 }} }}, \
         schedule: {{ cosine: {{ warmupSteps: 3 }} }} }}",
        random.below(1000)
    );
    case.manifest = case.manifest.replace(TRAINING, &training);
    let kept = format!(
        "checkpoint: {{ everySteps: {}, keep: 2 }}\n  recovery: {{ heartbeatTimeout: 2s, \
         memoryEverySteps: {}, maxRestarts: 1000 }}",
        5 + random.below(steps),
        1 + random.below(12)
    );
    assert!(case.manifest.contains(NODES), "{}", case.manifest);
    case.manifest = case.manifest.replace(NODES, ONE_NODE);
    let before = "checkpoint: { everySteps: 5, keep: 2 }";
    assert!(case.manifest.contains(before), "{}", case.manifest);
    case.manifest = case.manifest.replace(before, &kept);
}

/// A state whose copies for buddies travel beside the steps: 12 MB and more, by a vocabulary of
/// which the data have a part. Models that it begins from have it, too.
fn enlarge(case: &mut Case) {
    const SIZE: &str = "hiddenSize:";
    let larger = |text: &str| {
        assert!(text.matches(SIZE).count() == 1, "{text}");
        text.replace(SIZE, "vocabSize: 16384, hiddenSize:")
    };
    case.manifest = larger(&case.manifest);
    for (_, bytes) in case.files.iter_mut().filter(|(name, _)| name.ends_with(".yaml")) {
        let text = std::str::from_utf8(bytes).expect("a manifest");
        *bytes = larger(text).into_bytes();
    }
}

/// Kills, stops and crashes engines and workers.
fn disturb(bench: &Bench, run: &mut moejob_tests::Running, random: &mut Random) {
    let mut faults = 1 + random.below(FAULTS_MAX);
    let begin = Instant::now();
    while faults > 0 && !run.has_ended() && begin.elapsed() < LIMIT {
        std::thread::sleep(Duration::from_millis(20 + random.below(900)));
        let of_workers = random.below(3) == 0;
        let pids = if of_workers { bench.worker_pids() } else { bench.engine_pids() };
        let pids = if pids.is_empty() { bench.worker_pids() } else { pids };
        if pids.is_empty() {
            continue;
        }
        // Now and then two at once.
        for _ in 0..1 + u64::from(random.below(4) == 0) {
            let pid = one_of(random, &pids);
            let signal = one_of(random, &[Signal::KILL, Signal::STOP, Signal::SEGV]);
            println!("{:?}: {signal:?} to {pid}", begin.elapsed());
            send(pid, signal);
        }
        faults -= 1;
    }
}

/// Every number of every step, and all weights and moments of the last checkpoint.
fn assert_same(bench: &Bench, whole: &Bench) {
    let numbers = |bench: &Bench| -> std::collections::BTreeMap<u64, Vec<u64>> {
        let of = |line: &moejob_protocol::report::StepReport| {
            let all = [line.loss, line.aux_loss, line.z_loss, line.grad_norm, line.learning_rate];
            all.into_iter().chain(line.validation_loss).map(f64::to_bits).collect()
        };
        bench.metrics().iter().map(|line| (line.step, of(line))).collect()
    };
    let (found, expected) = (numbers(bench), numbers(whole));
    let differs = expected.iter().find(|(step, of)| found.get(step) != Some(of));
    assert_eq!(differs, None, "{}", bench.output());
    assert_eq!(found.len(), expected.len());
    let last = |bench: &Bench| {
        let name = bench.checkpoints().pop().expect("a checkpoint at the end");
        (name.clone(), parts(&bench.run_folder().join("checkpoints").join(name)))
    };
    assert_eq!(last(bench), last(whole));
}
