//! The program on machines whose driver and libraries are stubs: what it tells, how far it gets.

#[path = "../../kernels/tests/stubs/mod.rs"]
mod stubs;
mod models;
mod traces;

use models::{MODELS, On, ROUTERS, named, of_model};
use moejob_manifest::crd::spec_schema;
use serde_json::Value;
use std::collections::BTreeSet;
use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use std::time::{Duration, Instant};
use stubs::cudarc::Cudarc;
use stubs::{Stubs, compile};

const NVML: &str = r#"
#include <string.h>
#include <unistd.h>
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strcpy(text, "550.54.15"); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = (void *)7; return 0; }
struct memory { unsigned long long total, available, used; };
int nvmlDeviceGetMemoryInfo(void *d, struct memory *m) {
    m->total = 64ull << 30; m->available = 60ull << 30; m->used = 4ull << 30;
    return 0;
}
/* An Xid, and an error of memory between two readings. */
int nvmlDeviceGetTotalEccErrors(void *d, unsigned kind, unsigned since, unsigned long long *n) {
    static int calls;
    *n = calls++ ? 2 : 0;
    return 0;
}
struct data { void *d; unsigned long long kind, data; unsigned gi, ci; };
int nvmlEventSetCreate(void **set) { *set = (void *)9; return 0; }
int nvmlEventSetWait_v2(void *set, struct data *out, unsigned ms) {
    static int calls;
    if (calls++) {
        usleep(ms * 1000);
        return 10;
    }
    out->kind = 0x8;
    out->data = 79;
    return 0;
}
"#;

/// A job of two GPUs that goes on until somebody ends it.
const LONG: &str = r#"
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: long }
spec:
  nodes: { profile: gpu, devicesPerNode: 2 }
  model:
    hiddenSize: 64
    numHiddenLayers: 2
    numAttentionHeads: 2
    experts: { count: 8, perToken: 2, intermediateSize: 64 }
  data:
    train: { text: { paths: ["words/*.txt"] } }
    tokenizer: bytes
    sequenceLength: 64
  training: { steps: 100000000, globalBatchSize: 4, microBatchSize: 2 }
  checkpoint: { everySteps: 100000000 }
"#;

/// A machine: its libraries, and a folder to run in.
struct Place {
    stubs: Stubs,
    folder: tempfile::TempDir,
}

impl Place {
    fn new(versions: &[u32]) -> Place {
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join("stubs");
        std::fs::create_dir_all(&made).unwrap();
        Place { stubs: Stubs::make(&Cudarc::find(), versions, &made), folder }
    }

    /// The libraries of a version, and NVML.
    fn version(&self, version: u32) -> PathBuf {
        self.with_nvml(self.stubs.folder(&version.to_string(), [version; 3]))
    }

    fn with_nvml(&self, folder: PathBuf) -> PathBuf {
        let names = ["nvmlInit_v2", "nvmlDeviceRegisterEvents", "nvmlEventSetFree"];
        let library = compile(NVML, &names, 0, &folder);
        std::fs::write(folder.join("libnvidia-ml.so.1"), library).unwrap();
        folder
    }

    /// Another NCCL beside them.
    fn add_nccl(&self, libraries: &Path, code: u32) {
        stubs::nccl(libraries, code);
    }

    fn command(&self, libraries: &Path, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moejob"));
        command
            .args(words)
            .current_dir(self.folder.path())
            .env("LD_LIBRARY_PATH", libraries)
            .env("MOEJOB_CUBIN_CACHE", self.folder.path().join("cubins"));
        for other in ["CUDA_VISIBLE_DEVICES", "MOEJOB_CUDA_ARCH", "MOEJOB_NCCL", "MOEJOB_NVML"] {
            command.env_remove(other);
        }
        command
    }

    fn output(&self, libraries: &Path, words: &[&str]) -> Output {
        self.output_with(libraries, words, &[])
    }

    /// The same with variables that tell the stubs how to be.
    fn output_with(&self, libraries: &Path, words: &[&str], set: &[(&str, &str)]) -> Output {
        let output = self.command(libraries, words).envs(set.iter().copied()).output().unwrap();
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!told.contains("panicked"), "{words:?}: {told}");
        output
    }

    fn job(&self, nodes: &str) -> &'static str {
        let text = std::fs::read_to_string("../examples/05-one-gpu.yaml").unwrap();
        let text = text.replace("nodes: { profile: gpu }", nodes);
        let text: String = text
            .lines()
            .map(|line| match line.trim_start().starts_with("paths: [") {
                true => "        paths: [\"words/*.txt\"]\n".to_string(),
                false => format!("{line}\n"),
            })
            .collect();
        std::fs::write(self.folder.path().join("job.yaml"), text).unwrap();
        self.words();
        "job.yaml"
    }

    fn words(&self) {
        let words = self.folder.path().join("words");
        std::fs::create_dir_all(&words).unwrap();
        std::fs::write(words.join("0.txt"), "the same words ".repeat(20_000)).unwrap();
    }
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8_lossy(bytes).into_owned()
}

/// Each driver and its libraries are told, and a bench goes through all of a step on them: a call
/// of what they lack would be a panic.
#[test]
fn each_version_is_told_and_computes() {
    let place = Place::new(&stubs::VERSIONS);
    for version in stubs::VERSIONS {
        let libraries = place.version(version);
        place.add_nccl(&libraries, 22005);
        let cuda = format!("{}.{}", version / 1000, version % 1000 / 10);
        let told = text(&place.output(&libraries, &["doctor"]).stdout);
        let line = |name: &str| {
            let found = told.lines().find(|line| line.split("  ").next() == Some(name));
            found.unwrap_or_else(|| panic!("no {name}: {told}")).to_string()
        };
        let at = libraries.display();
        let driver = format!("550.54.15, up to CUDA {cuda}, {at}/libcuda.so");
        assert!(line("driver").ends_with(&driver), "{told}");
        assert!(line("nvrtc").ends_with(&format!("  {cuda}, {at}/libnvrtc.so")), "{told}");
        assert!(line("cublasLt").ends_with(&format!("  {cuda}, {at}/libcublasLt.so")), "{told}");
        assert!(line("nccl").ends_with("  2.20.5, libnccl.so.2"), "{told}");
        assert!(line("gpu 0").contains("NVIDIA Stub, sm_90"), "{told}");

        let bench = "bench --preset tiny --device gpu --sequence 64 --micro-batch 2 --steps 2 \
                     --warm-up 1 --threads 1 --trace trace.json --json";
        let words: Vec<&str> = bench.split(' ').collect();
        let benched = place.output(&libraries, &words);
        assert!(benched.status.success(), "{cuda}: {}", text(&benched.stderr));
        assert_eq!(traces::rows(&place.folder.path().join("trace.json")).len(), 2);
    }
}

#[test]
fn a_job_on_a_machine_that_lacks_something_is_refused_before_it_starts() {
    const VERSION: u32 = 12_040;
    let place = Place::new(&[VERSION, 13_000]);
    let job = place.job("nodes: { profile: gpu }");
    let refused = |libraries: &Path, expected: &[&str]| {
        let output = place.output(libraries, &["run", job]);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(2), "{told}");
        for part in expected.iter().chain(&["`moejob doctor` tells"]) {
            assert!(told.contains(part), "{part}: {told}");
        }
        assert!(!place.folder.path().join("runs").exists(), "{told}");
    };
    for (name, library, symbol) in [
        ("driver", "libcuda", "cuTensorMapEncodeTiled"),
        ("nvrtc", "libnvrtc", "nvrtcGetCUBIN"),
        ("cublasLt", "libcublasLt", "cublasLtMatmul"),
    ] {
        let libraries = place.with_nvml(place.stubs.without(VERSION, library, &[symbol]));
        let told = format!("{library}.so (CUDA 12.4) has no {symbol}");
        refused(&libraries, &[&format!("spec.nodes.profile: {name}: /"), &told, "; install "]);
    }
    let mixed = place.with_nvml(place.stubs.folder("mixed", [VERSION, 13_000, VERSION]));
    refused(&mixed, &["nvrtc: /", "is newer than the driver, which knows CUDA up to 12.4"]);

    let whole = place.version(VERSION);
    place.job("nodes: { profile: gpu, devicesPerNode: 2 }");
    let alone = place.output(&whole, &["run", job]);
    let told = text(&alone.stderr);
    let has_nccl = told.contains("it shows 1");
    assert!(alone.status.code() == Some(2), "{told}");
    assert!(has_nccl || told.contains("nccl: NCCL cannot be loaded as libnccl.so.2; "), "{told}");
    place.add_nccl(&whole, 21_600);
    refused(&whole, &["nccl: libnccl.so.2 is NCCL 2.16.0; 2.18.0 or newer is needed"]);
}

/// Two ranks train on stubs. What NVML reports of a GPU is an event that names its rank and node.
#[test]
fn what_the_driver_reports_of_any_gpu_is_an_event_of_the_job() {
    let place = Place::new(&[13_000]);
    let libraries = place.version(13_000);
    place.add_nccl(&libraries, 22809);
    place.words();
    std::fs::write(place.folder.path().join("long.yaml"), LONG).unwrap();
    let log = std::fs::File::create(place.folder.path().join("log")).unwrap();
    let mut running = place
        .command(&libraries, &["run", "long.yaml"])
        .env("STUB_GPUS", "2")
        .env("STUB_STEP_MICROSECONDS", "20000")
        .stdout(log.try_clone().unwrap())
        .stderr(log)
        .spawn()
        .unwrap();
    let told = |rank: u64, part: &str| {
        let path = place.folder.path().join("runs/long/events.jsonl");
        let text = std::fs::read_to_string(path).unwrap_or_default();
        text.lines().filter_map(|line| serde_json::from_str(line).ok()).any(|event: Value| {
            let message = event["message"].as_str().unwrap_or_default();
            event["event"] == "Warning"
                && event["reason"] == "DeviceTrouble"
                && event["rank"] == rank
                && event["node"].is_string()
                && message.starts_with("NVIDIA Stub (GPU-")
                && message.contains(&format!("rank {rank} on "))
                && message.contains(part)
        })
    };
    let expected = [
        (0, "error Xid 79: it has fallen off the bus"),
        (1, "error Xid 79: it has fallen off the bus"),
        (0, "2 errors of its memory could not be corrected"),
        (1, "2 errors of its memory could not be corrected"),
    ];
    let until = Instant::now() + Duration::from_secs(120);
    let missing = loop {
        let missing: Vec<_> = expected.iter().filter(|(rank, part)| !told(*rank, part)).collect();
        if missing.is_empty() || Instant::now() > until || running.try_wait().unwrap().is_some() {
            break missing;
        }
        std::thread::sleep(Duration::from_millis(100));
    };
    let _ = running.kill();
    let _ = running.wait();
    let log = std::fs::read_to_string(place.folder.path().join("log")).unwrap_or_default();
    assert!(missing.is_empty(), "not told: {missing:?}\n{log}");
}

const BENCH: &str = "bench --preset tiny --device gpu --precision bf16 --sequence 64 \
                     --micro-batch 2 --steps 2 --warm-up 1 --threads 1 --json";

/// Optimizer state on the host: a step goes through on it, and the device has that much more room.
#[test]
fn a_bench_computes_with_its_state_on_the_host() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    let planned = |more: &str| {
        let words = format!("{BENCH}{more}");
        let benched = place.output(&libraries, &words.split(' ').collect::<Vec<_>>());
        assert!(benched.status.success(), "{}", text(&benched.stderr));
        let told: Value = serde_json::from_slice(&benched.stdout).unwrap();
        assert_eq!(told["compute"]["offload"] == "host", !more.is_empty(), "{told}");
        told["memoryPlannedBytes"].as_u64().unwrap()
    };
    let (whole, less) = (planned(""), planned(" --offload host"));
    // Two moments and 16 bits of about a quarter of a million parameters.
    assert!((2_000_000..4_000_000).contains(&(whole - less)), "{whole} {less}");
}

/// Before anything is taken: how much is planned, how much is there, and of whom.
#[test]
fn an_engine_without_room_is_refused_with_what_there_is() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    let refused = |more: &str, set: (&str, &str), expected: &[&str]| {
        let words = format!("{BENCH}{more}");
        let words: Vec<&str> = words.split(' ').collect();
        let output = place.output_with(&libraries, &words, &[set]);
        let told = text(&output.stderr);
        assert_eq!(output.status.code(), Some(1), "{told}");
        expected.iter().for_each(|part| assert!(told.contains(part), "{part}: {told}"));
    };
    let small = ["of GPU 0 (NVIDIA Stub) are planned, and 0.1 GiB of its 0.1 GiB are free"];
    refused("", ("STUB_MIB", "64"), &small);
    let pinned = ["bytes of this machine's memory for what is offloaded: the driver may not pin"];
    refused(" --offload host", ("STUB_REGISTER", "1"), &pinned);
}

/// Who had it all may be about to end.
#[test]
fn a_gpu_that_is_full_or_taken_is_asked_again() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    let words: Vec<&str> = BENCH.split(' ').collect();
    for (code, is_waited_for) in [("2", true), ("46", true), ("101", false)] {
        let set = [("STUB_FULL", code), ("STUB_FULL_TIMES", "4")];
        let output = place.output_with(&libraries, &words, &set);
        assert_eq!(output.status.success(), is_waited_for, "{code}: {}", text(&output.stderr));
    }
}

/// Nine steps of three micro-batches: eight parts each, of which five differ.
const CAPTURED: &str = "bench --preset tiny --device gpu --sequence 64 --micro-batch 2 \
                        --accumulation 3 --steps 7 --warm-up 2 --threads 1 --json";

impl Place {
    /// The kernels that a process has launched, the graphs that it has made, and their launches.
    fn counts(&self) -> [u64; 3] {
        let file = self.folder.path().join("counts");
        let told = std::fs::read_to_string(&file).unwrap();
        std::fs::remove_file(file).unwrap();
        let mut numbers = told.split_whitespace().map(|number| number.parse().unwrap());
        let found = [(); 3].map(|()| numbers.next().unwrap());
        assert_eq!(numbers.next(), None, "{told}");
        found
    }

    /// A bench with so many captured graphs, on stubs that are so.
    fn captured(&self, libraries: &Path, words: &str, set: &[(&str, &str)]) -> (Output, [u64; 3]) {
        let file = self.folder.path().join("counts");
        let always = [("STUB_COUNTS", file.to_str().unwrap()), ("MOEJOB_LOG", "info")];
        let set = [set, &always].concat();
        let output = self.output_with(libraries, &words.split(' ').collect::<Vec<_>>(), &set);
        (output, self.counts())
    }
}

/// By graphs a step launches the kernels that it launches op by op, and counts one update.
#[test]
fn captured_graphs_launch_what_single_ops_do() {
    let place = Place::new(&stubs::VERSIONS);
    for version in stubs::VERSIONS {
        let libraries = place.version(version);
        let run = |set: &[(&str, &str)], graphs: u64, launches: u64| {
            let (output, counts) = place.captured(&libraries, CAPTURED, set);
            assert!(output.status.success(), "{set:?}: {}", text(&output.stderr));
            let told: Value = serde_json::from_slice(&output.stdout).unwrap();
            let [kernels, made, launched] = counts;
            assert_eq!([made, launched], [graphs, launches], "{version} {set:?}");
            assert_eq!(told["capturedGraphs"], graphs, "{told}");
            assert_eq!(told["graphLaunches"], launches, "{told}");
            (kernels, told["capturedLaunches"].as_u64().unwrap(), text(&output.stderr))
        };
        let (kernels, none, _) = run(&[("MOEJOB_GRAPHS", "off")], 0, 0);
        let (captured, launches, _) = run(&[("MOEJOB_GRAPHS", "on")], 5, 9 * 8 - 5);
        assert_eq!(captured, kernels, "{version}");
        assert!(none == 0 && launches > 100, "{none} {launches}");
        // Seven steps are looked at, and one more is begun before the last of them is over.
        let fast = [("STUB_EVENT_MICROSECONDS", "0")];
        let (decided, _, told) = run(&fast, 5, 8);
        assert_eq!(decided, kernels, "{version}");
        assert!(told.contains(" captured graphs: the host enqueues a micro-batch in "), "{told}");
        let slow = [("STUB_EVENT_MICROSECONDS", "10000000")];
        let (decided, _, told) = run(&slow, 0, 0);
        assert_eq!(decided, kernels, "{version}");
        assert!(told.contains("no captured graphs: the host enqueues a micro-batch in "), "{told}");
    }
}

/// A driver that cannot capture, and one that can make no graph of it: told once, and the job goes
/// on. A graph that fails ends it, as an op that fails does.
#[test]
fn a_capture_that_fails_leaves_a_job_training() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    let on = ("MOEJOB_GRAPHS", "on");
    let (_, [kernels, ..]) = place.captured(&libraries, CAPTURED, &[("MOEJOB_GRAPHS", "off")]);
    for (refused, why) in [
        ("begin", "beginning to capture a graph: "),
        ("end", "CUDA_ERROR_STREAM_CAPTURE_INVALIDATED"),
        ("instantiate", "making a graph of what was captured: "),
    ] {
        let set = [on, ("STUB_GRAPHS", refused)];
        let (output, counts) = place.captured(&libraries, CAPTURED, &set);
        let told = text(&output.stderr);
        assert!(output.status.success(), "{refused}: {told}");
        assert_eq!(counts, [kernels, 0, 0], "{refused}: {told}");
        let lines: Vec<&str> = told.lines().filter(|line| line.contains("graph")).collect();
        let [line] = lines[..] else { panic!("{refused}: {told}") };
        let begins = line.contains("no captured graphs in this attempt: ");
        assert!(begins && line.contains(why), "{told}");
    }
    let (output, _) = place.captured(&libraries, CAPTURED, &[on, ("STUB_GRAPHS", "launch")]);
    let told = text(&output.stderr);
    assert_eq!(output.status.code(), Some(1), "{told}");
    assert!(told.contains("the device failed: launching a graph: "), "{told}");
}

/// Links between ranks are in no graph.
#[test]
fn several_devices_capture_nothing() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    place.add_nccl(&libraries, 22_809);
    let set = [("MOEJOB_GRAPHS", "on"), ("STUB_GPUS", "2")];
    let (output, counts) =
        place.captured(&libraries, &format!("{CAPTURED} --devices 2"), &set);
    assert!(output.status.success(), "{}", text(&output.stderr));
    assert_eq!(counts[1..], [0, 0]);
}

/// Tokens of an expert group on one node travel through windows where they are wanted and can be
/// had. A driver that exports nothing is told of once, and the job goes on with NCCL.
#[test]
fn windows_that_cannot_be_had_leave_a_job_training() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    place.add_nccl(&libraries, 22_809);
    let words = format!("{CAPTURED} --devices 2 --expert-parallel 2");
    let run = |set: &[(&str, &str)]| {
        let set = [&[("STUB_GPUS", "2")], set].concat();
        let (output, [kernels, ..]) = place.captured(&libraries, &words, &set);
        let told = text(&output.stderr);
        assert!(output.status.success(), "{told}");
        let lines: Vec<&str> = told.lines().filter(|line| line.contains("tokens travel")).collect();
        (kernels, lines.join("\n"))
    };
    let (usual, told) = run(&[("MOEJOB_PEER", "off")]);
    assert_eq!(told, "", "nobody asked");
    let (refused, told) = run(&[("MOEJOB_PEER", "on"), ("STUB_EXPORT", "801")]);
    assert_eq!(told.lines().count(), 1, "{told}");
    assert!(told.contains("for there are no windows: rank 0: exporting a window"), "{told}");
    assert!(refused > usual, "{refused} kernels, {usual} without a try");
    let (taken, told) = run(&[]);
    assert!(told.contains("tokens travel through windows"), "{told}");
    // A gather and a scatter of each layer, forward and backward.
    assert!(taken > refused + 100, "{taken} kernels, {refused} without windows");
}

/// The engine of a job hears of the variable, and captures in each attempt anew.
#[test]
fn a_job_that_is_resumed_captures_again() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    let file = place.folder.path().join("counts");
    let set = [("MOEJOB_GRAPHS", "on"), ("STUB_COUNTS", file.to_str().unwrap())];
    for steps in [5, 10] {
        let job = place.small("gpu", &format!("steps: {steps}"));
        let ran = place.output_with(&libraries, &["run", job], &set);
        assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
        let [kernels, made, launched] = place.counts();
        // Five steps of eight micro-batches: two parts of each, and two at the end. Five differ.
        assert_eq!([made, launched], [5, 5 * (2 * 8 + 2) - 5], "{kernels} kernels");
    }
}

impl Place {
    /// A manifest of a small model, with more of nodes and of training.
    fn small(&self, nodes: &str, training: &str) -> &'static str {
        self.words();
        let text = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: small }}\nspec:\n  \
             nodes: {{ profile: {nodes} }}\n  model: {{ preset: tiny }}\n  data:\n    train: {{ \
             text: {{ paths: [\"words/*.txt\"] }} }}\n    sequenceLength: 32\n    validation: {{ \
             fraction: 0 }}\n  training: {{ {training} }}\n"
        );
        std::fs::write(self.folder.path().join("small.yaml"), text).unwrap();
        "small.yaml"
    }

    fn runs(&self, libraries: &Path, manifest: &str) {
        let ran = self.output(libraries, &["run", manifest]);
        assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
    }

    /// Names and hashes of all tensors of a checkpoint of that model.
    fn state(&self, step: u64) -> Vec<(String, String)> {
        let file = format!("runs/small/checkpoints/step-{step:08}/manifest.json");
        let told = std::fs::read_to_string(self.folder.path().join(&file)).unwrap();
        let mut values = serde_json::Deserializer::from_str(&told).into_iter();
        let manifest: Value = values.next().unwrap().unwrap();
        let hashes = |tensor: &Value| {
            let pieces = tensor["pieces"].as_array().unwrap().iter();
            let hashes: Vec<&str> = pieces.map(|piece| piece["blake3"].as_str().unwrap()).collect();
            (format!("{} {}", tensor["name"], tensor["part"]), hashes.join(" "))
        };
        manifest["tensors"].as_array().unwrap().iter().map(hashes).collect()
    }
}

/// What processors have trained goes to the GPU and its host and comes back: nothing is lost on the
/// way, and kernels that do nothing change nothing.
#[test]
fn state_on_the_host_comes_back_as_it_went() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    place.runs(&libraries, place.small("cpu", "steps: 2"));
    let trained = place.state(2);
    assert!(trained.len() > 30);
    place.runs(&libraries, place.small("gpu", "steps: 4, precision: fp32, offload: host"));
    assert_eq!(place.state(4), trained);
}

/// A run that goes on takes the algorithms that it has begun with, on the same library and device.
/// Elsewhere, and where they are not known, it chooses anew and says so.
#[test]
fn products_keep_their_algorithms_through_a_resume() {
    let place = Place::new(&[12_060, 12_080]);
    let [other, libraries] = [12_060, 12_080].map(|version| place.version(version));
    let runs = place.folder.path().join("runs/small");
    let file = |step: u64| runs.join(format!("checkpoints/step-{step:08}/cublaslt.txt"));
    // Trains so far with that heuristic; first words of the algorithms, and what is told.
    let train = |libraries: &Path, step: u64, algorithm: &str| {
        let manifest = place.small("gpu", &format!("steps: {step}"));
        let set = [("STUB_ALGORITHM", algorithm)];
        let ran = place.output_with(libraries, &["run", manifest], &set);
        assert!(ran.status.success(), "{}{}", text(&ran.stdout), text(&ran.stderr));
        let kept = std::fs::read_to_string(file(step)).unwrap();
        let products = kept.lines().filter_map(|line| line.split(" | ").nth(2));
        let words: BTreeSet<String> =
            products.map(|words| words.split(' ').next().unwrap().to_string()).collect();
        let events = std::fs::read_to_string(runs.join("events.jsonl")).unwrap();
        let told = events.lines().filter(|line| line.contains("ProductsChosenAnew")).count();
        let last = events.lines().rfind(|line| line.contains("ProductsChosenAnew"));
        (words.into_iter().collect::<Vec<_>>().join(" "), told, last.unwrap_or("").to_string())
    };
    let (words, told, _) = train(&libraries, 2, "7");
    assert_eq!((words.as_str(), told), ("7", 0), "a fresh run has nothing to tell");
    let head = std::fs::read_to_string(file(2)).unwrap();
    let begins = "dense products 1\ndevice NVIDIA Stub, sm_90, ";
    assert!(head.starts_with(begins) && head.contains("\ncublasLt 120802\n"), "{head}");
    let (words, told, _) = train(&libraries, 4, "9");
    assert_eq!((words.as_str(), told), ("7", 0), "those of before");
    // `verify` and whoever reads the checkpoint pass it over.
    let at = "runs/small/checkpoints/step-00000004";
    let verified = place.output(&libraries, &["checkpoint", "verify", at]);
    assert!(verified.status.success(), "{}", text(&verified.stderr));
    let (words, told, why) = train(&other, 6, "9");
    assert_eq!((words.as_str(), told), ("9", 1), "{why}");
    assert!(why.contains("chosen by cuBLASLt 12.8.2 on NVIDIA Stub"), "{why}");
    assert!(why.contains("and this is cuBLASLt 12.6.2 on NVIDIA Stub"), "{why}");
    let (words, told, _) = train(&other, 8, "5");
    assert_eq!((words.as_str(), told), ("9", 1), "from there on those");
    let mut damaged = std::fs::read(file(8)).unwrap();
    damaged[40] ^= 1;
    std::fs::write(file(8), damaged).unwrap();
    let (words, told, why) = train(&other, 10, "5");
    assert_eq!((words.as_str(), told), ("5", 2), "{why}");
    assert!(why.contains("cublaslt.txt of step-00000008: it is damaged"), "{why}");
    std::fs::remove_file(file(10)).unwrap();
    let (words, told, why) = train(&other, 12, "6");
    assert_eq!((words.as_str(), told), ("6", 3), "{why}");
    assert!(why.contains("step-00000010 has no cublaslt.txt"), "{why}");
}

/// Weights of a run on processors are measured on a GPU, whose kernels do nothing here.
#[test]
fn weights_are_measured_on_a_gpu() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    place.runs(&libraries, place.small("cpu", "steps: 2"));
    for precision in ["fp32", "bf16", "fp16", "tf32"] {
        let words = format!(
            "eval runs/small --data words --device gpu --precision {precision} -o json"
        );
        let output = place.output(&libraries, &words.split(' ').collect::<Vec<_>>());
        assert!(output.status.success(), "{}", text(&output.stderr));
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(told["sequenceLength"], 32, "{told}");
        assert!(told["tokens"].as_u64().unwrap() > 100_000, "{told}");
    }
}

/// Nobody adds a router, a loss or a field of a model without a line of `models`.
#[test]
fn every_field_of_a_model_is_known_of_gpus() {
    let models = MODELS.iter().map(|(line, _)| *line);
    let lines: Vec<&str> = ROUTERS.into_iter().chain(models).collect();
    let schema = &spec_schema()["properties"]["model"];
    let router = &schema["properties"]["router"];
    let experts = &schema["properties"]["experts"];
    // Where weights come from, and what a model's other fields come from; how deep and wide it is
    // does not change the kernels.
    let apart = [
        "from", "preset", "experts", "router", "numHiddenLayers", "numAttentionHeads",
    ];
    let mut missing = BTreeSet::new();
    for (schema, apart) in [(schema, &apart[..]), (router, &[]), (experts, &[])] {
        let fields = schema["properties"].as_object().expect("fields");
        assert!(fields.len() > 5, "{fields:?}");
        for (field, of) in fields.iter().filter(|(field, _)| !apart.contains(&field.as_str())) {
            if !named(&lines, field, None) {
                missing.insert(field.clone());
            }
            for word in of["enum"].as_array().into_iter().flatten().filter_map(Value::as_str) {
                if !named(&lines, field, Some(word)) {
                    missing.insert(format!("{field}: {word}"));
                }
            }
        }
    }
    assert!(missing.is_empty(), "what do GPUs do with these? {missing:?}");
}

/// A model on a GPU either trains there, or every command names the field before anything starts.
#[test]
fn every_model_trains_on_a_gpu_or_is_refused_by_its_field() {
    let place = Place::new(&[12_080]);
    let libraries = place.version(12_080);
    place.words();
    let routers = ROUTERS.map(|line| (line, On::Trains));
    for (line, on) in routers.iter().chain(&MODELS) {
        std::fs::write(place.folder.path().join("model.yaml"), of_model(line)).unwrap();
        let said = |command: &str| {
            let output = place.output(&libraries, &[command, "model.yaml"]);
            (output.status.code(), text(&output.stdout) + &text(&output.stderr))
        };
        let runs = place.folder.path().join("runs");
        match on {
            On::Trains => {
                let (code, told) = said("run");
                assert_eq!(code, Some(0), "{line}: {told}");
                std::fs::remove_dir_all(runs).unwrap();
            }
            On::Refused(field) => {
                for command in ["validate", "plan", "run"] {
                    let (code, told) = said(command);
                    assert_eq!(code, Some(2), "{command}: {line}: {told}");
                    let expected = format!("E0301 spec.model.{field}: found ");
                    assert!(told.contains(&expected), "{command}: {line}: {told}");
                }
                assert!(!runs.exists(), "{line}: something was started");
            }
        }
    }
}
