//! The bits of training on processors, as commit 097657f computed them.
//!
//! Every case is a manifest of a few steps. `tests/golden/CASE.txt` holds the bits of every loss,
//! norm and held-out loss, and a hash of all weights and moments of the last checkpoint. A change
//! of the engine keeps them, for any number of workers. `MOEJOB_GOLDEN=write` writes the files
//! anew, which only a change that is meant to change the bits may do.

mod cases;

use cases::{Case, all};
use moejob_tests::{Bench, root};
use serde_json::Value;
use std::collections::BTreeMap;
use std::fmt::Write;
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(300);

#[test]
fn losses_and_weights_are_those_of_097657f() {
    let writes = std::env::var_os("MOEJOB_GOLDEN").is_some_and(|what| what == "write");
    let only = std::env::var("MOEJOB_GOLDEN_CASE").ok();
    let mut wrong = Vec::new();
    for case in all().into_iter().filter(|case| only.as_ref().is_none_or(|o| o == case.name)) {
        let file = root().join("tests/golden").join(format!("{}.txt", case.name));
        if writes {
            std::fs::write(&file, bits(&case, 1)).expect("a writable checkout");
            continue;
        }
        let expected = std::fs::read_to_string(&file).expect("the case's bits");
        for workers in [1, case.workers] {
            let found = bits(&case, workers);
            if found != expected {
                let differs = expected.lines().zip(found.lines()).find(|(a, b)| a != b);
                wrong.push(format!("{} on {workers} workers: {differs:?}", case.name));
            }
        }
    }
    assert!(wrong.is_empty(), "expected and found: {wrong:#?}");
}

/// What a run of the case leaves behind, as text.
fn bits(case: &Case, workers: u32) -> String {
    let bench = Bench::new("golden", &case.manifest);
    for (name, bytes) in &case.files {
        std::fs::write(bench.path().join(name), bytes).expect("an input file");
    }
    for command in &case.before {
        let mut words = command.split(' ');
        let word = words.next().expect("a command");
        let words: Vec<&str> = [word].into_iter().chain(words).collect();
        let output = bench.command(&words).output().expect("moejob starts");
        let told = String::from_utf8_lossy(&output.stderr).into_owned();
        assert!(output.status.success(), "{}: {command}: {told}", case.name);
    }
    let workers = workers.to_string();
    let code = bench.run(&["--workers", &workers], LIMIT);
    assert_eq!(code, Some(0), "{}: {}", case.name, bench.output());
    let mut text = String::new();
    for line in bench.metrics() {
        let numbers = [line.loss, line.aux_loss, line.z_loss, line.grad_norm, line.learning_rate];
        write!(text, "step {}", line.step).expect("a string");
        for number in numbers.into_iter().chain(line.validation_loss) {
            write!(text, " {:016x}", number.to_bits()).expect("a string");
        }
        text.push('\n');
    }
    let last = bench.checkpoints().pop().expect("a checkpoint at the end");
    let folder = bench.run_folder().join("checkpoints").join(last);
    for (what, hash) in parts(&folder) {
        writeln!(text, "{what} {hash}").expect("a string");
    }
    text
}

/// By part, a hash over the values of all tensors in the order of their names. The master weight
/// counts as the weight, whatever precision it was computed in.
fn parts(folder: &Path) -> BTreeMap<String, String> {
    let text = std::fs::read_to_string(folder.join("manifest.json")).expect("a manifest");
    let manifest: Value = serde_json::from_str(&text).expect("JSON");
    let files: Vec<Vec<u8>> = (list(&manifest["files"]).iter())
        .map(|file| std::fs::read(folder.join(file["name"].as_str().expect("a name"))))
        .map(|file| file.expect("a shard"))
        .collect();
    let mut tensors = BTreeMap::new();
    for tensor in list(&manifest["tensors"]) {
        let part = match tensor["part"].as_str().expect("a part") {
            "master" => "weight",
            part => part,
        };
        let number = |piece: &Value, field: &str| piece[field].as_u64().expect("a number");
        let mut pieces: Vec<&Value> = list(&tensor["pieces"]).iter().collect();
        pieces.sort_by_key(|piece| number(piece, "start"));
        let mut bytes = Vec::new();
        for piece in pieces {
            let file = &files[number(piece, "file") as usize];
            let range = number(piece, "begin") as usize..number(piece, "end") as usize;
            bytes.extend_from_slice(&file[range]);
        }
        let name = tensor["name"].as_str().expect("a name").to_string();
        tensors.insert((part.to_string(), name), blake3::hash(&bytes));
    }
    let mut hashers: BTreeMap<String, blake3::Hasher> = BTreeMap::new();
    for ((part, name), hash) in tensors {
        let hasher = hashers.entry(part).or_default();
        hasher.update(name.as_bytes()).update(hash.as_bytes());
    }
    hashers.into_iter().map(|(part, hasher)| (part, hasher.finalize().to_string())).collect()
}

fn list(value: &Value) -> &Vec<Value> {
    value.as_array().expect("a list")
}
