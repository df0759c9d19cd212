//! Drives the built `moejob` binary the way a person does, and reads what it leaves behind.

pub mod cluster;
#[cfg(feature = "cluster")]
pub mod cutting;
#[cfg(feature = "cluster")]
pub mod fake;

use moejob_protocol::report::StepReport;
use rustix::process::{Pid, Signal, kill_process};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

/// The binary under test: beside the test's own, as cargo lays them out, or `$MOEJOB_BIN`.
pub fn moejob() -> PathBuf {
    if let Some(path) = std::env::var_os("MOEJOB_BIN") {
        return path.into();
    }
    let me = std::env::current_exe().expect("own path");
    let mut folders = me.ancestors().skip(1);
    let found = folders.find_map(|folder| Some(folder.join("moejob")).filter(|path| path.exists()));
    found.expect("moejob is not built: cargo build --release -p moejob")
}

/// The root of the checkout.
pub fn root() -> PathBuf {
    let tests = Path::new(env!("CARGO_MANIFEST_DIR"));
    tests.parent().expect("tests lies in the checkout").to_path_buf()
}

/// The files of the checkout whose names end so, with their texts.
pub fn tracked(endings: &[&str]) -> Vec<(PathBuf, String)> {
    let output = Command::new("git").args(["ls-files"]).current_dir(root()).output().expect("git");
    assert!(output.status.success(), "not a checkout");
    String::from_utf8_lossy(&output.stdout)
        .lines()
        .filter(|name| endings.iter().any(|ending| name.ends_with(ending)))
        .map(|name| root().join(name))
        .filter_map(|path| Some((path.clone(), std::fs::read_to_string(path).ok()?)))
        .collect()
}

/// Fails with every one of these, a line each.
pub fn all_of(found: Vec<String>) {
    assert!(found.is_empty(), "\n{}", found.join("\n"));
}

/// A folder with a manifest and a corpus of its own, removed at the end.
pub struct Bench {
    pub folder: tempfile::TempDir,
    pub name: String,
}

/// A manifest of a small model over `corpus/`, `{}` replaced by fields of the training.
pub const SMALL: &str = r#"
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: small }
spec:
  nodes: { profile: cpu, min: 1, max: 1 }
  model:
    hiddenSize: 32
    numHiddenLayers: 2
    numAttentionHeads: 2
    tieWordEmbeddings: true
    experts: { count: 8, perToken: 2, intermediateSize: 32 }
    router: { auxLossCoef: 0.01 }
  data:
    train: { text: { paths: ["corpus/**/*.txt"] } }
    validation: { fraction: 0.2, everySteps: STEPS }
    tokenizer: bytes
    sequenceLength: 32
  training:
    steps: STEPS
    globalBatchSize: 7
    microBatchSize: 1
    precision: fp32
    optimizer: { adamw: { learningRate: 3.0e-3 } }
    schedule: { cosine: { warmupSteps: 5, minLearningRate: 3.0e-4 } }
    seed: SEED
  checkpoint: { everySteps: EVERY, keep: 3 }
"#;

impl Bench {
    /// `SMALL` with these values, over a corpus that is a function of the seed.
    pub fn small(steps: u64, every: u64, seed: u64) -> Bench {
        let text = SMALL
            .replace("STEPS", &steps.to_string())
            .replace("EVERY", &every.to_string())
            .replace("SEED", &seed.to_string());
        Bench::new("small", &text)
    }

    /// `small` with so many engines a worker, each a process of its own.
    pub fn with_engines(steps: u64, every: u64, seed: u64, engines: u32) -> Bench {
        let bench = Bench::small(steps, every, seed);
        let path = bench.path().join("job.yaml");
        let text = std::fs::read_to_string(&path).expect("manifest");
        let nodes = format!("profile: cpu, devicesPerNode: {engines},");
        std::fs::write(&path, text.replace("profile: cpu,", &nodes)).expect("manifest");
        bench
    }

    pub fn new(name: &str, manifest: &str) -> Bench {
        let folder = tempfile::tempdir().expect("a temporary folder");
        std::fs::write(folder.path().join("job.yaml"), manifest).expect("manifest");
        let corpus = folder.path().join("corpus");
        std::fs::create_dir(&corpus).expect("corpus");
        for (file, text) in corpus_texts() {
            std::fs::write(corpus.join(file), text).expect("corpus file");
        }
        Bench { folder, name: name.to_string() }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The folder of the run.
    pub fn run_folder(&self) -> PathBuf {
        self.path().join("runs").join(&self.name)
    }

    pub fn command(&self, arguments: &[&str]) -> Command {
        // A program of its own, which a test may replace.
        let own = self.path().join("moejob");
        let mut command = Command::new(if own.exists() { own } else { moejob() });
        command.current_dir(self.path()).args(arguments).stdin(Stdio::null());
        command
    }

    /// `moejob run job.yaml ...` in the background; its output goes to `out.txt` and `err.txt`.
    pub fn start(&self, arguments: &[&str]) -> Running {
        self.start_with(arguments, &[])
    }

    /// The same, with more in its environment.
    pub fn start_with(&self, arguments: &[&str], environment: &[(&str, &str)]) -> Running {
        let append = |name: &str| {
            let path = self.path().join(name);
            std::fs::File::options().create(true).append(true).open(path).expect("log")
        };
        let child = self
            .command(&["run", "job.yaml"])
            .args(arguments)
            .envs(environment.iter().copied())
            .stdout(append("out.txt"))
            .stderr(append("err.txt"))
            .spawn()
            .expect("moejob starts");
        Running { child: Some(child) }
    }

    /// Runs to the end and returns the exit code.
    pub fn run(&self, arguments: &[&str], limit: Duration) -> Option<i32> {
        self.start(arguments).wait(limit)
    }

    pub fn output(&self) -> String {
        let read = |name| std::fs::read_to_string(self.path().join(name)).unwrap_or_default();
        format!("--- stdout\n{}--- stderr\n{}", read("out.txt"), read("err.txt"))
    }

    pub fn metrics(&self) -> Vec<StepReport> {
        lines(&self.run_folder().join("metrics.jsonl"))
            .into_iter()
            .map(|line| serde_json::from_value(line).expect("a metrics line"))
            .collect()
    }

    pub fn events(&self) -> Vec<Value> {
        lines(&self.run_folder().join("events.jsonl"))
    }

    /// The bits of each step's loss; the last line of a step counts.
    pub fn losses(&self) -> BTreeMap<u64, u64> {
        self.metrics().into_iter().map(|line| (line.step, line.loss.to_bits())).collect()
    }

    /// Pids of workers that have started and still live, by rank order of their start.
    pub fn worker_pids(&self) -> Vec<i32> {
        let pids = self.pids("WorkerStarted");
        pids.into_iter().filter(|pid| is_worker(*pid)).collect()
    }

    /// Pids of engines that have started and still live, in the order of their start.
    pub fn engine_pids(&self) -> Vec<i32> {
        let pids = self.pids("EngineStarted");
        pids.into_iter().filter(|pid| is_engine(*pid)).collect()
    }

    fn pids(&self, kind: &str) -> Vec<i32> {
        let of = |event: &Value| (event["event"] == kind).then(|| event["pid"].as_i64()).flatten();
        self.events().iter().filter_map(of).map(|pid| pid as i32).collect()
    }

    /// How many events of that kind there are.
    pub fn count(&self, kind: &str) -> usize {
        self.events().iter().filter(|event| event["event"] == kind).count()
    }

    /// Names of committed checkpoints, ascending.
    pub fn checkpoints(&self) -> Vec<String> {
        let Ok(entries) = std::fs::read_dir(self.run_folder().join("checkpoints")) else {
            return Vec::new();
        };
        let mut names: Vec<String> = entries
            .filter_map(|entry| entry.ok()?.file_name().into_string().ok())
            .filter(|name| name.starts_with("step-"))
            .collect();
        names.sort();
        names
    }

    /// Waits until `reached` holds; panics with the run's output after `limit`.
    pub fn wait_until(&self, what: &str, limit: Duration, reached: impl Fn(&Bench) -> bool) {
        let start = Instant::now();
        while !reached(self) {
            assert!(start.elapsed() < limit, "{what}: not in {limit:?}\n{}", self.output());
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// A run under way; killed with its workers when dropped.
pub struct Running {
    child: Option<Child>,
}

impl Running {
    pub fn pid(&self) -> i32 {
        self.child.as_ref().map_or(0, |child| child.id() as i32)
    }

    /// The exit code, or `None` after a signal. Panics when it takes longer than `limit`.
    pub fn wait(mut self, limit: Duration) -> Option<i32> {
        let mut child = self.child.take().expect("waited once");
        let start = Instant::now();
        loop {
            if let Some(status) = child.try_wait().expect("wait") {
                return status.code();
            }
            if start.elapsed() > limit {
                let _ = child.kill();
                let _ = child.wait();
                panic!("moejob run has not ended within {limit:?}");
            }
            std::thread::sleep(Duration::from_millis(5));
        }
    }

    pub fn has_ended(&mut self) -> bool {
        let child = self.child.as_mut().expect("not waited for");
        child.try_wait().expect("wait").is_some()
    }

    pub fn signal(&self, signal: Signal) {
        send(self.pid(), signal);
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        if let Some(mut child) = self.child.take() {
            let _ = child.kill();
            let _ = child.wait();
        }
    }
}

/// Sends a signal to a process that may be gone already.
pub fn send(pid: i32, signal: Signal) {
    if let Some(pid) = Pid::from_raw(pid) {
        let _ = kill_process(pid, signal);
    }
}

/// Seconds of a core that a process has had; None where there is no such process.
pub fn spent(pid: u32) -> Option<f64> {
    /// Of /proc/PID/stat, everywhere.
    const JIFFIES_A_SECOND: f64 = 100.0;
    let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
    // The name of a program, in brackets, may have spaces.
    let mut words = text.rsplit(") ").next()?.split(' ').skip(11);
    let mut jiffies = || words.next()?.parse::<f64>().ok();
    Some((jiffies()? + jiffies()?) / JIFFIES_A_SECOND)
}

/// Whether `pid` is a living worker of ours (a pid can be somebody else's by now).
pub fn is_worker(pid: i32) -> bool {
    runs_as(pid, "worker")
}

/// Whether `pid` is a living engine of ours, stopped or not.
pub fn is_engine(pid: i32) -> bool {
    runs_as(pid, "engine")
}

fn runs_as(pid: i32, role: &str) -> bool {
    let read = |name| std::fs::read(format!("/proc/{pid}/{name}")).unwrap_or_default();
    let command = read("cmdline");
    let words: Vec<&[u8]> = command.split(|byte| *byte == 0).collect();
    let state = String::from_utf8_lossy(&read("stat")).into_owned();
    let zombie = state.rsplit(") ").next().is_some_and(|rest| rest.starts_with('Z'));
    words.get(1) == Some(&role.as_bytes()) && !zombie
}

fn lines(path: &Path) -> Vec<Value> {
    let text = std::fs::read_to_string(path).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).expect("a JSON line")).collect()
}

/// Some files of text with a grammar that a small model can learn.
fn corpus_texts() -> Vec<(String, String)> {
    let mut random = Random(0x9e37_79b9_7f4a_7c15);
    let words = ["node", "rank", "expert", "token", "router", "step", "shard", "gang", "mesh"];
    let verbs = ["holds", "sends", "keeps", "loses", "finds", "owns"];
    let text = |random: &mut Random| {
        let mut text = String::new();
        for _ in 0..200 {
            let subject = words[random.below(words.len() as u64) as usize];
            let verb = verbs[random.below(verbs.len() as u64) as usize];
            let object = words[random.below(words.len() as u64) as usize];
            text += &format!("the {subject} {verb} {} {object}s.\n", random.below(10));
        }
        text
    };
    (0..12).map(|file| (format!("part-{file:02}.txt"), text(&mut random))).collect()
}

/// The number that an environment variable of this name has.
pub fn number(name: &str) -> Option<u64> {
    std::env::var(name).ok()?.parse().ok()
}

/// `$MOEJOB_SEED`, which repeats what was tried, or one that differs each time. Printed.
pub fn seed() -> u64 {
    let clock = SystemTime::now().duration_since(UNIX_EPOCH);
    let clock = clock.map_or(1, |time| time.as_nanos() as u64);
    let seed = number("MOEJOB_SEED").unwrap_or(clock);
    println!("seed: MOEJOB_SEED={seed}");
    seed
}

/// SplitMix64: enough for test inputs, the same on every machine.
pub struct Random(pub u64);

impl Random {
    pub fn next(&mut self) -> u64 {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut z = self.0;
        z = (z ^ (z >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        z = (z ^ (z >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        z ^ (z >> 31)
    }

    pub fn below(&mut self, bound: u64) -> u64 {
        self.next() % bound
    }
}
