//! `moejob bench --links` on machines whose driver and libraries are stubs: ranks are started,
//! meet, map each other's windows and are timed. Kernels of stubs move nothing, which is noticed.

#[path = "../../kernels/tests/stubs/mod.rs"]
mod stubs;

use serde_json::{Value, json};
use std::path::PathBuf;
use std::process::{Command, Output};
use stubs::Stubs;
use stubs::cudarc::Cudarc;

struct Place {
    libraries: PathBuf,
    folder: tempfile::TempDir,
}

impl Place {
    /// With the NCCL of this version, if any.
    fn new(nccl: Option<u32>) -> Place {
        const VERSION: u32 = 13_000;
        let folder = tempfile::tempdir().unwrap();
        let made = folder.path().join("stubs");
        std::fs::create_dir_all(&made).unwrap();
        let stubs = Stubs::make(&Cudarc::find(), &[VERSION], &made);
        let libraries = stubs.folder("all", [VERSION; 3]);
        if let Some(code) = nccl {
            stubs::nccl(&libraries, code);
        }
        Place { libraries, folder }
    }

    /// What it prints, where so many GPUs are shown.
    fn output(&self, gpus: &str, words: &str, set: &[(&str, &str)]) -> Output {
        let words = ["bench", "--links"].into_iter().chain(words.split_whitespace());
        let mut command = Command::new(env!("CARGO_BIN_EXE_moejob"));
        command
            .args(words)
            .current_dir(self.folder.path())
            .env("LD_LIBRARY_PATH", &self.libraries)
            .env("MOEJOB_CUBIN_CACHE", self.folder.path().join("cubins"))
            // A library that is not there, and not one that this machine has.
            .env("MOEJOB_NCCL", self.libraries.join("libnccl.so.2"))
            .env("STUB_GPUS", gpus)
            .envs(set.iter().copied());
        for other in ["CUDA_VISIBLE_DEVICES", "MOEJOB_CUDA_ARCH", "MOEJOB_PEER"] {
            command.env_remove(other);
        }
        command.output().unwrap()
    }

    /// What it says of why there is nothing measured.
    fn refused(&self, gpus: &str, words: &str, set: &[(&str, &str)], code: i32) -> String {
        let output = self.output(gpus, words, set);
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(!told.contains("panicked") && output.stdout.is_empty(), "{told}");
        assert_eq!(output.status.code(), Some(code), "{told}");
        assert!(told.starts_with("moejob: "), "{told}");
        told
    }
}

/// A gang whose messages go through files, in place of NCCL: every word of every verb arrives.
#[test]
fn words_that_arrive_are_timed() {
    let place = Place::new(Some(22_809));
    for (gpus, bytes, captured) in [("2", 64 << 10, ""), ("3", 65_280, " --captured")] {
        let gang = place.folder.path().join(format!("gang-{gpus}"));
        std::fs::create_dir(&gang).unwrap();
        // Kernels move nothing, so that there may be no windows. A reading lasts 12 ms: few calls.
        let set = [
            ("STUB_GANG", gang.to_str().unwrap()),
            ("STUB_EXPORT", "801"),
            ("STUB_EVENT_MICROSECONDS", "12000"),
        ];
        let words = format!("--bytes 64Ki --profile nd-h200-v5{captured}");
        let output = place.output(gpus, &format!("{words} --json"), &set);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        let world: u64 = gpus.parse().unwrap();
        assert_eq!(told["gpus"], json!(vec!["NVIDIA Stub"; world as usize]));
        assert_eq!(told["nccl"], json!({ "version": "2.28.9" }));
        assert_eq!((&told["profile"], &told["auto"]), (&json!("nd-h200-v5"), &json!([])));
        let why = told["windows"]["missing"].as_str().unwrap();
        assert!(why.contains("exporting a window"), "{told}");
        assert_eq!(told["links"].as_array().unwrap().len() as u64, world * (world - 1));
        let verbs = ["all-to-all", "all-reduce", "reduce-scatter", "all-gather", "counts"];
        let readings = told["readings"].as_array().unwrap();
        let said: Vec<&Value> = readings.iter().map(|reading| &reading["verb"]).collect();
        assert_eq!(said, verbs, "{told}");
        for reading in readings {
            let expected = if reading["verb"] == "counts" { 512 * world } else { bytes };
            assert_eq!((&reading["bytes"], &reading["way"]), (&json!(expected), &json!("nccl")));
            // 12 ms of three calls.
            assert_eq!(reading["seconds"], 0.004, "{reading}");
            assert!(reading["expectedSeconds"].as_f64().unwrap() > 0.0, "{reading}");
        }
    }
}

/// Windows that processes map: what kernels are given is what their contracts ask for.
#[test]
fn words_arrive_through_windows() {
    let place = Place::new(None);
    for (ranks, bytes) in [("2", [64 << 10, 1 << 20]), ("3", [65_280, 1_048_320])] {
        let set = [("STUB_WINDOWS", "1"), ("STUB_EVENT_MICROSECONDS", "12000")];
        let words = format!("--on-one-gpu --devices {ranks} --bytes 64Ki,1Mi --json");
        let output = place.output("1", &words, &set);
        assert!(output.status.success(), "{}", String::from_utf8_lossy(&output.stderr));
        let told: Value = serde_json::from_slice(&output.stdout).unwrap();
        assert_eq!(told["windows"], json!({ "blocks": 64 }), "{told}");
        assert_eq!(told["nccl"]["missing"], "ranks that share a GPU have no communicator");
        let world: u64 = ranks.parse().unwrap();
        let expected: Vec<(&str, u64)> = ["all-to-all", "reduce-scatter", "all-gather"]
            .into_iter()
            .flat_map(|verb| bytes.map(|bytes| (verb, bytes)))
            .chain([("counts", 512 * world)])
            .collect();
        let of = |reading: &Value| {
            (reading["verb"].as_str().unwrap().to_string(), reading["bytes"].as_u64().unwrap())
        };
        let said: Vec<(String, u64)> =
            told["readings"].as_array().unwrap().iter().map(of).collect();
        let said: Vec<(&str, u64)> =
            said.iter().map(|(verb, bytes)| (verb.as_str(), *bytes)).collect();
        assert_eq!(said, expected, "{told}");
    }
}

/// What no link has moved is no result, by either way, one by one or in a graph.
#[test]
fn words_that_do_not_arrive_are_named() {
    let wrong = "word 0 of its result is NaN, and not ";
    let place = Place::new(Some(22_809));
    let told = place.refused("2", "--bytes 64Ki", &[], 1);
    let whose = "bench --links: rank 0 (GPU 0), all-to-all of 64 KiB by NCCL: ";
    assert!(told.contains(&format!("{whose}{wrong}")), "{told}");
    assert!(told.contains("moejob preflight"), "what to do next: {told}");
    let told = place.refused("2", "--bytes 1Mi --captured --json", &[], 1);
    assert!(told.contains(&format!("all-to-all of 1 MiB by NCCL: {wrong}")), "{told}");
    // Ranks that share a GPU know windows alone, and three of them other sizes.
    let told = place.refused("1", "--bytes 64Ki --on-one-gpu --devices 3", &[], 1);
    let whose = "rank 0 (GPU 0), all-to-all of 65280 B by windows: ";
    assert!(told.contains(&format!("{whose}{wrong}")), "{told}");
}

/// Of NCCL and windows one is enough; without both everything that is missing is told.
#[test]
fn what_a_machine_lacks_is_told_with_what_to_do() {
    let place = Place::new(Some(21_600));
    let told = place.refused("2", "--bytes 64Ki", &[], 1);
    assert!(told.contains("all-to-all of 64 KiB by windows: word 0"), "NCCL is too old: {told}");
    let without = [("STUB_EXPORT", "801")];
    let told = place.refused("2", "--bytes 64Ki", &without, 1);
    for part in [
        "nothing can travel here. NCCL: ",
        "is NCCL 2.16.0; 2.18.0 or newer is needed",
        "Windows: rank 0 (GPU 0), mapping the windows of the others: exporting a window",
    ] {
        assert!(told.contains(part), "{part}: {told}");
    }
    let told = Place::new(None).refused("2", "--bytes 64Ki", &without, 1);
    assert!(told.contains("NCCL: NCCL cannot be loaded as "), "{told}");
    assert!(told.contains("install it (package libnccl2"), "{told}");
}

#[test]
fn memory_and_gpus_that_are_missing_are_told_before_anything_is_taken() {
    let place = Place::new(Some(22_809));
    let told = place.refused("2", "", &[("STUB_MIB", "64")], 1);
    let expected = "rank 0 (GPU 0), NVIDIA Stub: 60 MiB are free and results of 256 MiB need ";
    assert!(told.contains(expected) && told.contains("or give smaller --bytes"), "{told}");
    let told = place.refused("1", "", &[], 2);
    let expected = "a link is between two GPUs, and this machine shows 1 GPU\n  not measured: ";
    assert!(told.contains(expected), "{told}");
    let told = place.refused("4", "--devices 1", &[], 2);
    assert!(told.contains("--devices 1 leaves 1 GPU"), "{told}");
    let told = place.refused("2", "--devices 3", &[], 2);
    assert!(told.contains("--devices 3: this machine shows 2 GPUs"), "{told}");
}
