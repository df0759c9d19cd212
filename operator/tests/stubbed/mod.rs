//! A folder in which jobs train on GPUs whose driver and NCCL are stubs.

#[path = "../../../kernels/tests/stubs/mod.rs"]
mod stubs;

use std::path::{Path, PathBuf};
use std::process::Command;
use stubs::Stubs;
use stubs::cudarc::Cudarc;

pub struct Stubbed {
    folder: tempfile::TempDir,
    libraries: PathBuf,
}

impl Stubbed {
    /// A small job, `job.yaml`, of these nodes and so many layers; `rest` is its training and what
    /// else it has. `nccl`: what does something in the place of NCCL; none: messages go nowhere.
    pub fn new(nccl: Option<&str>, name: &str, nodes: &str, layers: u32, rest: &str) -> Stubbed {
        const NCCL: u32 = 22_809;
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join("stubs");
        std::fs::create_dir_all(&made).unwrap();
        let made = Stubs::make(&Cudarc::find(), &[12_080], &made);
        let libraries = made.folder("12080", [12_080; 3]);
        match nccl {
            Some(source) => stubs::nccl_of(source, &libraries, NCCL),
            None => stubs::nccl(&libraries, NCCL),
        }
        let words = "expert router token shard ".repeat(400);
        std::fs::write(folder.path().join("words.txt"), words).unwrap();
        let job = format!(
            r#"
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: {{ name: {name} }}
spec:
  nodes: {{ profile: gpu, {nodes} }}
  model:
    hiddenSize: 64
    numHiddenLayers: {layers}
    numAttentionHeads: 2
    experts: {{ count: 8, perToken: 2, intermediateSize: 64 }}
  data:
    train: {{ text: {{ paths: ["words.txt"] }} }}
    tokenizer: bytes
    sequenceLength: 32
    validation: {{ fraction: 0 }}
{rest}"#
        );
        std::fs::write(folder.path().join("job.yaml"), job).unwrap();
        Stubbed { folder, libraries }
    }

    pub fn path(&self) -> &Path {
        self.folder.path()
    }

    /// The program with these words, where so many GPUs are shown. Tokens travel by NCCL.
    pub fn command(&self, gpus: u32, words: &[&str]) -> Command {
        let mut command = Command::new(env!("CARGO_BIN_EXE_moejob"));
        for other in [
            "CUDA_VISIBLE_DEVICES",
            "MOEJOB_CUDA_ARCH",
            "MOEJOB_NCCL",
            "MOEJOB_OVERLAP",
            "MOEJOB_BESIDE",
        ] {
            command.env_remove(other);
        }
        command
            .args(words)
            .current_dir(self.path())
            .env("LD_LIBRARY_PATH", &self.libraries)
            .env("MOEJOB_CUBIN_CACHE", self.path().join("cubins"))
            .env("MOEJOB_PEER", "off")
            .env("STUB_GPUS", gpus.to_string());
        command
    }
}
