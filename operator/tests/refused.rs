//! Checkpoints that are damaged, or of a newer release: whatever is done with them, nothing of them
//! is replaced or removed, and every command that reads them tells.
//!
//! `MOEJOB_REFUSED` says how many folders are damaged (12 otherwise, 200 for a release), and
//! `MOEJOB_SEED` with which of them they begin.

mod place;

use moe_worker::checkpoint::{Disk, seal, show};
use moejob_kernels::philox::philox4x32_10;
use moejob_protocol::checkpoint::CHECKPOINT_VERSION;
use place::Place;
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

const MANIFEST: &str = "apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata: { name: small }
spec:
  nodes: { profile: cpu, min: 1, max: 1 }
  model:
    hiddenSize: 16
    numHiddenLayers: 1
    numAttentionHeads: 2
    tieWordEmbeddings: false
    initializerRange: 0.2
    experts: { count: 4, perToken: 2, intermediateSize: 16 }
  data:
    train: { text: { paths: ['words/*.txt'] } }
    validation: { everySteps: 0 }
    sequenceLength: 16
  training:
    steps: 6
    globalBatchSize: 2
    microBatchSize: 1
  checkpoint: { everySteps: 2, keep: 10 }
";

/// A folder with a run of six steps and its checkpoints of steps 2, 4 and 6.
struct Trained(Place);

impl Trained {
    /// Trained once, and copied for each case.
    fn new() -> Trained {
        static TRAINED: OnceLock<Trained> = OnceLock::new();
        let trained = TRAINED.get_or_init(|| {
            let place = Trained(Place::empty());
            std::fs::create_dir(place.path("words")).expect("a folder");
            let words = ["expert", "router", "token", "the", "step", "gang"];
            let text: String =
                (0..600).map(|i| format!("{} ", words[(i * i + i / 7) % words.len()])).collect();
            std::fs::write(place.path("words/a.txt"), text).expect("a file");
            std::fs::write(place.path("job.yaml"), MANIFEST).expect("a file");
            place.succeeds(&["run", "job.yaml", "--set", "training.seed=2", "--name", "other"]);
            place.succeeds(&["run", "job.yaml"]);
            place
        });
        let place = Trained(Place::empty());
        copy(&trained.path(""), &place.path(""));
        place
    }

    fn path(&self, name: &str) -> PathBuf {
        self.0.path(name)
    }

    fn checkpoints(&self) -> PathBuf {
        self.path("runs/small/checkpoints")
    }

    fn moejob(&self, arguments: &[&str]) -> Said {
        let output = self.0.moejob(arguments);
        let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).into_owned();
        Said {
            command: arguments.join(" "),
            code: output.status.code(),
            out: text(&output.stdout),
            err: text(&output.stderr),
        }
    }

    fn succeeds(&self, arguments: &[&str]) -> Said {
        let said = self.moejob(arguments);
        assert_eq!(said.code, Some(0), "{said:?}");
        said
    }

    /// Trains two steps more than there were.
    fn goes_on(&self, more: &[&str]) -> Said {
        let arguments = [&["run", "job.yaml", "--set", "training.steps=8"], more].concat();
        self.moejob(&arguments)
    }
}

#[derive(Debug)]
struct Said {
    command: String,
    code: Option<i32>,
    out: String,
    err: String,
}

impl Said {
    fn tells(&self, words: &[&str]) -> &Said {
        let all = format!("{}{}", self.out, self.err);
        for word in words {
            assert!(all.contains(word), "{}: {word:?} is not in {self:?}", self.command);
        }
        self
    }
}

fn copy(from: &Path, to: &Path) {
    for entry in std::fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let target = to.join(entry.file_name());
        if entry.file_type().expect("a type").is_dir() {
            std::fs::create_dir_all(&target).expect("a folder");
            copy(&entry.path(), &target);
        } else {
            std::fs::copy(entry.path(), target).expect("a copy");
        }
    }
}

/// Every file below a folder, by its name there, with what it holds; of a link where it leads.
fn files(folder: &Path) -> BTreeMap<String, Vec<u8>> {
    fn walk(root: &Path, at: &Path, found: &mut BTreeMap<String, Vec<u8>>) {
        let name = at.strip_prefix(root).expect("below it").display().to_string();
        let kind = at.symlink_metadata().expect("it is there").file_type();
        if kind.is_symlink() {
            let target = std::fs::read_link(at).expect("a link");
            found.insert(name, target.display().to_string().into_bytes());
        } else if kind.is_dir() {
            found.insert(format!("{name}/"), Vec::new());
            for entry in std::fs::read_dir(at).expect("a folder") {
                walk(root, &entry.expect("an entry").path(), found);
            }
        } else {
            found.insert(name, std::fs::read(at).expect("a file"));
        }
    }
    let mut found = BTreeMap::new();
    walk(folder, folder, &mut found);
    found
}

const KINDS: u32 = 15;

/// Damages the checkpoint of `step` in one of many ways; gives in which, and why it is set aside.
fn damage(
    place: &Trained,
    step: u64,
    kind: u32,
    random: [u32; 4],
) -> (&'static str, &'static str) {
    let name = format!("step-{step:08}");
    let (directory, aside) = (place.checkpoints().join(&name), place.path("moved"));
    let manifest = directory.join("manifest.json");
    let shard = directory.join("a1-r0-0.safetensors");
    let other = place.path("runs/other/checkpoints").join(&name);
    let at = |len: usize| (u64::from(random[1]) << 16 ^ u64::from(random[2])) as usize % len;
    let change = |path: &Path, change: &dyn Fn(&mut Vec<u8>)| {
        let before = std::fs::read(path).expect("a file");
        let mut bytes = before.clone();
        change(&mut bytes);
        assert_ne!(bytes, before);
        std::fs::write(path, bytes).expect("a file");
    };
    let flip = |bytes: &mut Vec<u8>| {
        let at = at(bytes.len());
        bytes[at] ^= 1 << (random[3] % 8);
    };
    let cut = |bytes: &mut Vec<u8>| bytes.truncate(at(bytes.len()));
    let away = |from: &Path| {
        std::fs::create_dir_all(&aside).expect("a folder");
        std::fs::rename(from, aside.join(&name)).expect("moved");
    };
    let what = match kind {
        0 => {
            change(&shard, &flip);
            "a bit of a shard"
        }
        1 => {
            change(&manifest, &flip);
            "a bit of the manifest"
        }
        2 => {
            change(&manifest, &|bytes| {
                let at = bytes.len() - 1 - at(70);
                bytes[at] ^= 1;
            });
            "a bit of the manifest's end"
        }
        3 => {
            change(&shard, &cut);
            "a shard that is cut short"
        }
        4 => {
            change(&manifest, &cut);
            "a manifest that is cut short"
        }
        5 => {
            std::fs::remove_file(&shard).expect("removed");
            "no shard"
        }
        6 => {
            std::fs::remove_file(&manifest).expect("removed");
            "no manifest"
        }
        7 => {
            let mut newer = show(&Disk::real(), &directory).expect("a checkpoint");
            newer.version = CHECKPOINT_VERSION + 1 + random[0] % 5;
            std::fs::write(&manifest, seal(&newer).expect("JSON")).expect("a file");
            return ("a newer version", "newer");
        }
        8 => {
            std::fs::copy(other.join("a1-r0-0.safetensors"), &shard).expect("copied");
            "another job's shard"
        }
        9 => {
            away(&directory);
            let moved = aside.join("step-00000002");
            let twin = match step {
                2 => place.checkpoints().join("step-00000004"),
                _ if moved.is_dir() => moved,
                _ => place.checkpoints().join("step-00000002"),
            };
            std::fs::create_dir(&directory).expect("a folder");
            copy(&twin, &directory);
            "another step's checkpoint"
        }
        10 => {
            away(&directory);
            std::os::unix::fs::symlink(aside.join(&name), &directory).expect("a link");
            "a link in its place"
        }
        11 => {
            away(&directory);
            std::fs::write(&directory, "a note").expect("a file");
            "a file in its place"
        }
        12 => {
            let staging = place.checkpoints().join(format!(".a1-{name}"));
            std::fs::create_dir(&staging).expect("a folder");
            std::fs::rename(&shard, staging.join("a1-r0-0.safetensors")).expect("moved");
            "half of it renamed"
        }
        13 => {
            away(&directory);
            std::fs::create_dir(&directory).expect("a folder");
            "an empty folder"
        }
        _ => {
            change(&shard, &|bytes| bytes.extend_from_slice(b"more"));
            "a shard that is longer"
        }
    };
    (what, "damaged")
}

/// What every command does with a run, and what is left of its checkpoints.
fn case(number: u32) {
    let random = philox4x32_10(42, [number, 0, 0, 0]);
    let (place, kind) = (Trained::new(), number % KINDS);
    let steps: &[u64] = if (number / KINDS + number).is_multiple_of(3) { &[2, 4, 6] } else { &[6] };
    let mut said = Vec::new();
    for step in steps {
        let random = philox4x32_10(43, [number, *step as u32, 0, 0]);
        said.push(damage(&place, *step, kind, random));
    }
    let (what, cause) = said[0];
    println!("{number}: {what} in steps {steps:?}");
    let before = files(&place.checkpoints());
    let all = steps.len() == 3;
    every_reader_tells(&place, all, random[0]);
    assert_eq!(files(&place.checkpoints()).len(), before.len(), "{what}");
    assert!(files(&place.checkpoints()) == before, "{what}: what is only read was changed");
    if all {
        let said = place.goes_on(&[]);
        assert_eq!(said.code, Some(3), "{what}: {said:?}");
        let steps = ["step-00000006", "step-00000002"];
        said.tells(&["no checkpoint in", steps[0], steps[1], "--fresh", "another name"]);
        assert!(files(&place.checkpoints()) == before, "{what}: a refused run changed something");
    }
    let said = place.goes_on(if all { &["--fresh"] } else { &[] });
    assert_eq!(said.code, Some(0), "{what}: {said:?}");
    let after = files(&place.checkpoints());
    for step in steps {
        let (was, is) = (format!("step-{step:08}"), format!("step-{step:08}.{cause}"));
        said.tells(&[&format!("the checkpoint {was} is refused"), &is]);
        for (name, bytes) in &before {
            let of_it = name == &was || name.starts_with(&format!("{was}/"));
            let now = if of_it { name.replacen(&was, &is, 1) } else { name.clone() };
            if of_it || name.starts_with(".a1-") {
                assert!(after.get(&now) == Some(bytes), "{what}: {now} is not what {name} was");
            }
        }
    }
    let told = place.succeeds(&["checkpoint", "ls", "runs/small"]);
    told.tells(&[&format!("step-00000006.{cause}"), "rm -r runs/small/checkpoints/step-00000006"]);
    let json = place.succeeds(&["checkpoint", "ls", "runs/small", "-o", "json"]).out;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let aside = json.as_array().into_iter().flatten().filter(|of| of["state"] == "aside");
    assert_eq!(aside.count(), steps.len(), "{what}: {json}");
    let words = ["set aside", &format!("step-00000006.{cause}"), "rm -r "];
    place.succeeds(&["show", "small"]).tells(&words);
    place.succeeds(&["ls"]).tells(&["small", "set aside", "rm -r "]);
    let events = std::fs::read_to_string(place.path("runs/small/events.jsonl")).expect("events");
    assert!(events.contains("CheckpointRefused"), "{what}: {events}");
}

/// `all`: nothing can be used. `random` chooses which of the slower ones are tried.
fn every_reader_tells(place: &Trained, all: bool, random: u32) {
    let (run, newest) = ("runs/small", "runs/small/checkpoints/step-00000006");
    place.succeeds(&["checkpoint", "ls", run]).tells(&["step-00000006", "refused: "]);
    let json = place.succeeds(&["checkpoint", "ls", run, "-o", "json"]).out;
    let json: Value = serde_json::from_str(&json).expect("JSON");
    let newest_state = json.as_array().and_then(|all| all.last()).expect("three");
    assert_eq!(newest_state["state"], "refused", "{json}");
    for command in ["show", "verify"] {
        let said = place.moejob(&["checkpoint", command, newest]);
        assert!(matches!(said.code, Some(2 | 3)), "{said:?}");
        said.tells(&["step-00000006"]);
    }
    let readers: [&[&str]; 4] = [
        &["eval", run, "--data", "words", "--json"],
        &["generate", run, "--prompt", "the ", "--max-tokens", "2", "--json"],
        &["checkpoint", "export", run, "exported", "--json"],
        &["checkpoint", "grow", run, "grown", "--json"],
    ];
    for reader in readers {
        let said = place.moejob(reader);
        said.tells(&["step-00000006"]);
        if all {
            assert_eq!(said.code, Some(3), "{said:?}");
            continue;
        }
        assert_eq!(said.code, Some(0), "{said:?}");
        said.tells(&["the checkpoint step-00000006 is refused", "step-00000004 is used"]);
        let line: Value = serde_json::from_str(said.out.trim()).expect("one line of JSON");
        let passed_over = line["passedOver"].as_array().expect("a list");
        let text = passed_over.first().and_then(Value::as_str).expect("one is passed over");
        assert!(text.contains("step-00000006 is refused"), "{line}");
        let from = line["from"].as_str();
        assert!(from.is_some_and(|from| from.ends_with("step-00000004")), "{line}");
    }
    if random % 3 != 0 {
        return;
    }
    let from = "model.from.path=runs/small";
    let said = place.moejob(&["run", "job.yaml", "--name", "next", "--set", from]);
    said.tells(&["spec.model.from", "step-00000006"]);
    match all {
        true => assert!(matches!(said.code, Some(2 | 3)), "{said:?}"),
        false => assert_eq!(said.code, Some(0), "{said:?}"),
    }
}

fn number(variable: &str) -> Option<u32> {
    std::env::var(variable).ok().and_then(|text| text.parse().ok())
}

#[test]
fn nothing_refused_is_replaced_or_removed_and_every_command_tells() {
    let count = number("MOEJOB_REFUSED").unwrap_or(12);
    let first = number("MOEJOB_SEED").unwrap_or(0);
    let next = AtomicU32::new(first);
    let threads = std::thread::available_parallelism().map_or(1, usize::from);
    std::thread::scope(|scope| {
        for _ in 0..threads {
            scope.spawn(|| {
                loop {
                    let number = next.fetch_add(1, Ordering::Relaxed);
                    if number >= first + count {
                        break;
                    }
                    case(number);
                }
            });
        }
    });
}

/// A second damaged checkpoint of a step takes no second place.
#[test]
fn at_most_one_of_a_step_and_a_cause_is_kept() {
    let place = Trained::new();
    let shard = |name: &str| place.checkpoints().join(name).join("a1-r0-0.safetensors");
    std::fs::write(shard("step-00000006"), "first").expect("a file");
    assert_eq!(place.goes_on(&[]).code, Some(0));
    let entries = std::fs::read_dir(place.checkpoints().join("step-00000006")).expect("a folder");
    let mut entries = entries.map(|entry| entry.expect("an entry").path());
    let again = entries.find(|path| path.extension().is_some_and(|of| of == "safetensors"));
    std::fs::write(again.expect("a shard"), "second").expect("a file");
    std::fs::remove_dir_all(place.checkpoints().join("step-00000008")).expect("removed");
    let said = place.goes_on(&[]);
    assert_eq!(said.code, Some(0), "{said:?}");
    said.tells(&["step-00000006.damaged is kept already"]);
    assert_eq!(std::fs::read(shard("step-00000006.damaged")).expect("a file"), b"first");
    place.succeeds(&["checkpoint", "verify", "runs/small/checkpoints/step-00000006"]);
    let names = std::fs::read_dir(place.checkpoints()).expect("a folder");
    let names = names.map(|entry| entry.expect("an entry").file_name().into_string());
    let refused = names.flatten().filter(|name| name.contains(".damaged"));
    assert_eq!(refused.count(), 1);
}

#[test]
fn a_run_begins_anew_over_nothing_that_it_could_go_on_from() {
    let place = Trained::new();
    let said = place.goes_on(&["--fresh"]);
    assert_eq!(said.code, Some(2), "{said:?}");
    said.tells(&["step-00000006", "is whole"]);
    place.succeeds(&["run", "job.yaml", "--name", "next", "--fresh"]);
}

/// An epsilon that is 0 in fp32 makes the first update a division by 0.
#[test]
fn what_vanishes_in_fp32_is_refused_by_name() {
    let place = Trained::new();
    for (field, value) in [
        ("training.optimizer.adamw.epsilon", "1e-46"),
        ("training.optimizer.adamw.weightDecay", "1e-40"),
        ("training.optimizer.adamw.learningRate", "1e-39"),
        ("training.optimizer.adamw.beta2", "0.99999999"),
        ("model.rmsNormEps", "1e-300"),
        ("model.router.auxLossCoef", "1e-45"),
    ] {
        let set = format!("{field}={value}");
        let said = place.moejob(&["run", "job.yaml", "--name", "next", "--set", &set]);
        assert_eq!(said.code, Some(2), "{said:?}");
        said.tells(&[field, value]);
    }
}
