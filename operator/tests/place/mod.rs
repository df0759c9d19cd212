//! A folder with text and a small manifest, and `moejob` as a person types it there.

#![allow(dead_code, reason = "each test uses a part of it")]

use serde_json::Value;
use std::path::PathBuf;
use std::process::{Command, Output, Stdio};

pub const PROGRAM: &str = env!("CARGO_BIN_EXE_moejob");

pub const MANIFEST: &str = "apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: small }
spec:
  nodes: { profile: cpu, min: 1, max: 1 }
  model:
    hiddenSize: 16
    numHiddenLayers: 2
    numAttentionHeads: 2
    tieWordEmbeddings: true
    initializerRange: 0.2
    experts: { count: 4, perToken: 2, intermediateSize: 16 }
  data:
    train: { text: { paths: ['words/*.txt'] } }
    validation: { fraction: 0.2, everySteps: 5 }
    sequenceLength: 32
  training:
    steps: 10
    globalBatchSize: 4
    microBatchSize: 2
    optimizer: { adamw: { learningRate: 1.0e-2 } }
  checkpoint: { everySteps: 5, keep: 3 }
";

/// A folder with text and a manifest.
pub struct Place(tempfile::TempDir);

impl Place {
    /// A folder with nothing in it.
    pub fn empty() -> Place {
        Place(tempfile::tempdir().expect("a folder"))
    }

    pub fn new() -> Place {
        let place = Place::empty();
        std::fs::create_dir(place.path("words")).expect("a folder");
        for file in 0..10 {
            let words = ["expert", "router", "token", "the", "step", "gang"];
            let text: String =
                (0..300).map(|i| format!("{} ", words[(i * i + file) % words.len()])).collect();
            let path = place.path(&format!("words/{file}.txt"));
            std::fs::write(path, text).expect("a file");
        }
        std::fs::write(place.path("job.yaml"), MANIFEST).expect("a file");
        place
    }

    /// One whose job has run.
    pub fn trained() -> (Place, String) {
        let place = Place::new();
        let output = place.moejob(&["run", "job.yaml"]);
        assert_eq!(output.status.code(), Some(0), "{output:?}");
        (place, String::from_utf8_lossy(&output.stderr).into_owned())
    }

    pub fn path(&self, name: &str) -> PathBuf {
        self.0.path().join(name)
    }

    pub fn command(&self, program: &str, arguments: &[&str]) -> Output {
        let command = Command::new(program)
            .args(arguments)
            .current_dir(self.0.path())
            .stdin(Stdio::null())
            .output();
        command.expect("the program is there")
    }

    pub fn moejob(&self, arguments: &[&str]) -> Output {
        self.command(PROGRAM, arguments)
    }

    /// Standard output of what succeeds.
    pub fn said(&self, arguments: &[&str]) -> String {
        let output = self.moejob(arguments);
        assert_eq!(output.status.code(), Some(0), "{arguments:?}: {output:?}");
        String::from_utf8(output.stdout).expect("text")
    }

    pub fn json(&self, arguments: &[&str]) -> Value {
        serde_json::from_str(&self.said(arguments)).expect("JSON")
    }

    /// Exit code and standard error of what does not.
    pub fn refused(&self, arguments: &[&str]) -> (i32, String) {
        let output = self.moejob(arguments);
        let code = output.status.code().expect("it ends by itself");
        assert_ne!(code, 0, "{arguments:?}: {output:?}");
        (code, String::from_utf8_lossy(&output.stderr).into_owned())
    }
}
