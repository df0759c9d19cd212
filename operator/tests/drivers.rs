//! The program on machines whose driver and libraries are stubs: what it tells, how far it gets.

#[path = "../../kernels/tests/stubs/mod.rs"]
mod stubs;

use std::path::{Path, PathBuf};
use std::process::{Command, Output};
use stubs::cudarc::Cudarc;
use stubs::{Stubs, compile};

const NVML: &str = r#"
#include <string.h>
int nvmlSystemGetDriverVersion(char *text, unsigned length) { strcpy(text, "550.54.15"); return 0; }
int nvmlDeviceGetHandleByUUID(const char *uuid, void **device) { *device = (void *)7; return 0; }
struct memory { unsigned long long total, available, used; };
int nvmlDeviceGetMemoryInfo(void *d, struct memory *m) {
    m->total = 64ull << 30; m->available = 60ull << 30; m->used = 4ull << 30;
    return 0;
}
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
        let library = compile(NVML, &["nvmlInit_v2"], 0, &folder);
        std::fs::write(folder.join("libnvidia-ml.so.1"), library).unwrap();
        folder
    }

    /// Another NCCL beside them.
    fn add_nccl(&self, libraries: &Path, code: u32) {
        let source = "int ncclGetVersion(int *code) { *code = VERSION; return 0; }";
        let list = include_str!("../../worker/nccl/src/library.rs");
        let names: Vec<&str> = list.split('"').filter(|part| part.starts_with("nccl")).collect();
        let library = compile(source, &names, code, libraries);
        std::fs::write(libraries.join("libnccl.so.2"), library).unwrap();
    }

    fn command(&self, libraries: &Path, words: &[&str]) -> Output {
        let output = Command::new(env!("CARGO_BIN_EXE_moejob"))
            .args(words)
            .current_dir(self.folder.path())
            .env("LD_LIBRARY_PATH", libraries)
            .env("MOEJOB_CUBIN_CACHE", self.folder.path().join("cubins"))
            .env_remove("CUDA_VISIBLE_DEVICES")
            .env_remove("MOEJOB_CUDA_ARCH")
            .env_remove("MOEJOB_NCCL")
            .env_remove("MOEJOB_NVML")
            .env_remove("STUB_GPUS")
            .output()
            .unwrap();
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
        let words = self.folder.path().join("words");
        std::fs::create_dir_all(&words).unwrap();
        std::fs::write(words.join("0.txt"), "the same words ".repeat(20_000)).unwrap();
        "job.yaml"
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
        let told = text(&place.command(&libraries, &["doctor"]).stdout);
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
        let benched = place.command(&libraries, &words);
        assert!(benched.status.success(), "{cuda}: {}", text(&benched.stderr));
        assert!(place.folder.path().join("trace.json").exists());
    }
}

#[test]
fn a_job_on_a_machine_that_lacks_something_is_refused_before_it_starts() {
    const VERSION: u32 = 12_040;
    let place = Place::new(&[VERSION, 13_000]);
    let job = place.job("nodes: { profile: gpu }");
    let refused = |libraries: &Path, expected: &[&str]| {
        let output = place.command(libraries, &["run", job]);
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
    let alone = place.command(&whole, &["run", job]);
    let told = text(&alone.stderr);
    let has_nccl = told.contains("it shows 1");
    assert!(alone.status.code() == Some(2), "{told}");
    assert!(has_nccl || told.contains("nccl: NCCL cannot be loaded as libnccl.so.2; "), "{told}");
    place.add_nccl(&whole, 21_600);
    refused(&whole, &["nccl: libnccl.so.2 is NCCL 2.16.0; 2.18.0 or newer is needed"]);
}
