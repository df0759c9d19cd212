//! Kernels that are compiled ahead of time, and what a container is given of its machine's GPUs, on
//! stubs of the driver and of NVRTC.

#[path = "../../kernels/tests/stubs/mod.rs"]
mod stubs;

use std::path::PathBuf;
use std::process::{Command, Output};
use stubs::Stubs;
use stubs::cudarc::Cudarc;

const VERSION: u32 = 12_080;

/// A machine: its libraries, and a folder to run in.
struct Place {
    folder: tempfile::TempDir,
    stubs: Stubs,
    libraries: PathBuf,
}

impl Place {
    fn new() -> Place {
        let folder = tempfile::tempdir().expect("a folder");
        let made = folder.path().join("stubs");
        std::fs::create_dir_all(&made).expect("a folder");
        let stubs = Stubs::make(&Cudarc::find(), &[VERSION], &made);
        let libraries = stubs.folder("all", [VERSION; 3]);
        stubs::nccl(&libraries, 22_809);
        Place { folder, stubs, libraries }
    }

    fn at(&self, name: &str) -> PathBuf {
        self.folder.path().join(name)
    }

    fn command(&self, words: &str, set: &[(&str, &str)]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moejob"));
        for other in ["CUDA_VISIBLE_DEVICES", "NVIDIA_VISIBLE_DEVICES", "MOEJOB_CUDA_ARCH"] {
            command.env_remove(other);
        }
        command
            .args(words.split(' '))
            .current_dir(self.folder.path())
            .env("LD_LIBRARY_PATH", &self.libraries)
            .env("MOEJOB_CUBIN_CACHE", self.at("cache"))
            .env("MOEJOB_CUBINS", self.at("shipped"))
            .envs(set.iter().copied());
        command
    }

    /// Exit code, and all that it wrote.
    fn told(&self, words: &str, set: &[(&str, &str)]) -> (i32, String) {
        let Output { status, stdout, stderr } =
            self.command(words, set).output().expect("moejob");
        let text = [stdout, stderr].map(|of| String::from_utf8_lossy(&of).into_owned()).concat();
        assert!(!text.contains("panicked"), "{words}: {text}");
        (status.code().unwrap_or(-1), text)
    }

    /// Compiles the kernels of `presets` where there is nothing but NVRTC.
    fn ship(&self, presets: &str, set: &[(&str, &str)]) {
        let compiler = self.stubs.folder("compiler", [0, VERSION, 0]);
        let compiler = compiler.to_str().expect("text");
        let set = [set, &[("LD_LIBRARY_PATH", compiler)]].concat();
        let words = format!("kernels --presets {presets} --arch sm_80,sm_90a --out shipped");
        let (code, told) = self.told(&words, &set);
        assert_eq!(code, 0, "{told}");
        assert!(told.contains(" modules by NVRTC 12.8 in shipped"), "{told}");
    }

    fn is_cached(&self) -> bool {
        self.at("cache").exists()
    }
}

const NO_COMPILER: (&str, &str) = ("STUB_NO_COMPILER", "1");

fn bench(preset: &str, more: &str) -> String {
    format!(
        "bench --preset {preset} --device gpu --sequence 64 --micro-batch 2 --steps 1 --warm-up 1 \
         --threads 1 --json{more}"
    )
}

/// Every kernel of a step of every preset is among those that are shipped, on either kind of GPU:
/// where they are, nothing is compiled and nothing is kept.
#[test]
fn a_step_takes_what_is_shipped_and_compiles_nothing() {
    let place = Place::new();
    place.ship("all", &[]);
    let again = place.told("kernels --out shipped", &[NO_COMPILER]);
    assert_eq!(again.0, 0, "what is there already stays: {}", again.1);
    let small = ["tiny", "tiny-olmoe"].map(|preset| (preset, ""));
    let large = ["olmoe-1b-7b", "mixtral-8x7b", "qwen3-30b-a3b"];
    let large = large.map(|preset| (preset, " --layers 1"));
    for (preset, layers) in small.into_iter().chain(large) {
        for capability in ["80", "90"] {
            for more in ["", " --accumulation 2 --moments bf16", " --attention fastest"] {
                let words = bench(preset, &format!("{layers}{more}"));
                let set = [NO_COMPILER, ("STUB_CAPABILITY", capability)];
                let (code, told) = place.told(&words, &set);
                assert_eq!(code, 0, "{words} on {capability}: {told}");
            }
        }
    }
    let shared = bench("tiny", " --devices 2 --expert-parallel 2");
    let set = [NO_COMPILER, ("STUB_GPUS", "2"), ("MOEJOB_PEER", "on")];
    let (code, told) = place.told(&shared, &set);
    assert_eq!(code, 0, "{told}");
    assert!(!place.is_cached(), "something was compiled");

    let (_, told) = place.told("doctor", &[]);
    let line = told.lines().find(|line| line.starts_with("shipped kernels"));
    assert!(line.is_some_and(|line| line.contains(" modules by NVRTC 12.8, in ")), "{told}");
    // The same without them: so it is these that were taken.
    let set = [NO_COMPILER, ("MOEJOB_CUBINS", "elsewhere")];
    let (code, told) = place.told(&bench("tiny", ""), &set);
    assert_eq!(code, 1, "{told}");
    assert!(told.contains("NVRTC refused "), "{told}");
}

/// Shipped code that the driver refuses is compiled here, and found at the next start.
#[test]
fn shipped_kernels_of_another_driver_are_compiled_again() {
    let place = Place::new();
    place.ship("tiny", &[("STUB_CUBIN", "olde")]);
    let foreign = ("STUB_FOREIGN", "olde");
    let (code, told) = place.told(&bench("tiny", ""), &[foreign, NO_COMPILER]);
    assert_eq!(code, 1, "{told}");
    assert!(!place.is_cached());
    let (code, told) = place.told(&bench("tiny", ""), &[foreign]);
    assert_eq!(code, 0, "{told}");
    assert!(place.is_cached());
    let (code, told) = place.told(&bench("tiny", ""), &[foreign, NO_COMPILER]);
    assert_eq!(code, 0, "the cache comes first: {told}");
}

#[test]
fn kernels_are_refused_by_what_there_are_none_for() {
    let place = Place::new();
    let refused = |words: &str, code: i32, expected: &str| {
        let told = place.told(words, &[]);
        assert_eq!(told.0, code, "{words}: {}", told.1);
        assert!(told.1.contains(expected), "{words}: {}", told.1);
    };
    refused("kernels --presets nobody --out there", 2, "--presets nobody: ");
    refused("kernels --presets tiny-qwen3 --out there", 2, "spec.model.headDim: found `16`");
    refused("kernels --arch sm_75 --out there", 2, "sm_75");
    std::fs::write(place.at("file"), "kept").expect("a file");
    refused("kernels --presets tiny --out file", 1, "kernel cache at file/");
    let nothing = [("LD_LIBRARY_PATH", "")];
    let (code, told) = place.told("kernels --presets tiny --out there", &nothing);
    // A machine may have one of its own.
    assert!(code == 0 || told.contains("libnvrtc cannot be loaded"), "{told}");
}

/// As stubs name their GPUs.
fn uuids(count: u8) -> String {
    let hex = |gpu: u8| (0..16).map(|at| format!("{:02x}", at + 16 * gpu)).collect::<String>();
    let uuid = |gpu: u8| {
        let hex = hex(gpu);
        let parts = [&hex[..8], &hex[8..12], &hex[12..16], &hex[16..20], &hex[20..]];
        format!("GPU-{}", parts.join("-"))
    };
    (0..count).map(uuid).collect::<Vec<_>>().join(",")
}

const JOB: &str = r#"
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: eight }
spec:
  nodes: { profile: gpu, devicesPerNode: 8 }
  parallelism: { expert: 1 }
  model: { preset: tiny }
  data:
    train: { text: { paths: ["words/*.txt"] } }
    tokenizer: bytes
    sequenceLength: 64
  training: { steps: 2, globalBatchSize: 8, microBatchSize: 1 }
"#;

/// What device plugins leave of a machine: eight GPUs by uuid, by CDI, fewer, parts of some.
#[test]
fn engines_take_the_gpus_that_a_container_was_given() {
    let place = Place::new();
    std::fs::create_dir_all(place.at("words")).expect("a folder");
    std::fs::write(place.at("words/0.txt"), "the same words ".repeat(20_000)).expect("a file");
    std::fs::write(place.at("job.yaml"), JOB).expect("a file");
    let eight = uuids(8);
    let container = |given: &str, shown: &str| {
        let set = [("STUB_GPUS", shown), ("NVIDIA_VISIBLE_DEVICES", given)];
        let (_, told) = place.told("doctor", &set);
        let line = told.lines().position(|line| line.starts_with("container "));
        let line = line.unwrap_or_else(|| panic!("{given}: {told}"));
        told.lines().skip(line).take(2).collect::<Vec<_>>().join("\n")
    };
    let whole = container(&eight, "8");
    assert!(whole.contains("8 GPUs named; the driver shows 8 GPUs"), "{whole}");
    let by_cdi = container("void", "8");
    assert!(by_cdi.contains("\"void\": none but by CDI; the driver shows 8 GPUs"), "{by_cdi}");
    let lost = container(&eight, "7");
    assert!(lost.contains("the driver shows 7 GPUs: no GPU-70717273-7475"), "{lost}");

    for given in [eight.as_str(), "void", "all"] {
        let set = [("STUB_GPUS", "8"), ("NVIDIA_VISIBLE_DEVICES", given)];
        let (code, told) = place.told("run job.yaml", &set);
        assert_eq!(code, 0, "{given}: {told}");
        std::fs::remove_dir_all(place.at("runs")).expect("a run");
    }
    let refused = |words: &str, given: &str, shown: &str, expected: &[&str]| {
        let set = [("STUB_GPUS", shown), ("NVIDIA_VISIBLE_DEVICES", given)];
        let (code, told) = place.told(words, &set);
        assert_ne!(code, 0, "{told}");
        assert!(!place.at("runs").exists(), "{told}");
        expected.iter().for_each(|part| assert!(told.contains(part), "{part}: {told}"));
    };
    let four = uuids(4);
    let shows = format!("it shows 4 with NVIDIA_VISIBLE_DEVICES={four}");
    refused("run job.yaml", &four, "4", &["the job takes 8 of this machine's GPUs", &shows]);
    let part = "NVIDIA_VISIBLE_DEVICES names MIG-6fa8, a part of a GPU (MIG)";
    refused("run job.yaml", "MIG-6fa8", "8", &["spec.nodes.profile: ", part]);
    // An engine looks for itself, since in a pod nobody looks before it.
    let engine = bench("tiny", " --devices 8");
    let absent = format!(": the driver shows 4 with NVIDIA_VISIBLE_DEVICES={four}");
    refused(&engine, &four, "4", &["there is no GPU ", &absent]);
    refused(&bench("tiny", ""), "0:1", "1", &["NVIDIA_VISIBLE_DEVICES names 0:1, a part"]);
}
