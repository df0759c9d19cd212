//! Nodes that are made of files, as a person looks at them: `moejob doctor` and `moejob preflight`.
//!
//! Run with `UPDATE_GOLDEN=1` to write what is said now, and read the difference.

#[path = "../../worker/tests/machines/mod.rs"]
mod machines;

use std::process::{Command, Output};

fn moejob(arguments: &[&str]) -> Output {
    Command::new(env!("CARGO_BIN_EXE_moejob")).args(arguments).output().expect("moejob")
}

fn text(bytes: &[u8]) -> String {
    String::from_utf8(bytes.to_vec()).expect("text")
}

/// What is expected lies in `nodes/FILE`.
fn golden(file: &str, found: &str) {
    let path = format!("{}/tests/nodes/{file}", env!("CARGO_MANIFEST_DIR"));
    if std::env::var_os("UPDATE_GOLDEN").is_some() {
        std::fs::write(&path, found).expect("written");
        return;
    }
    let expected = std::fs::read_to_string(&path).expect("the golden file");
    let how = "UPDATE_GOLDEN=1 cargo test --workspace --test nodes";
    assert!(expected == found, "{file} differs; write it with `{how}`\n{found}");
}

/// Profile, machine, and whether all is as the profile says.
const COMPARED: &[(&str, &str, bool)] = &[
    ("ndm-a100-v4", "ndm-a100-v4", true),
    ("nd-h200-v5", "nd-h200-v5", true),
    ("cpu", "laptop", true),
    ("gpu", "laptop", true),
    ("gpu", "server", true),
    ("ndm-a100-v4", "ndm-swapped", false),
    ("ndm-a100-v4", "ndm-masks", false),
    ("ndm-a100-v4", "ndm-cards", false),
    ("ndm-a100-v4", "laptop", false),
    ("ndm-a100-v4", "bare", false),
    ("nd-h100-v5", "ndm-a100-v4", false),
    ("nd-h100-v5", "server", false),
    ("cpu", "broken", false),
];

#[test]
fn doctor_names_what_is_odd_the_machine_or_its_profile() {
    let mut all = String::new();
    for (profile, machine, sound) in COMPARED {
        let made = machines::machine(machine);
        let sys = made.path().join("sys");
        let sys = sys.to_str().expect("a path");
        let said = moejob(&["doctor", "--profile", profile, "--sys", sys, "--dir", sys]);
        let out = text(&said.stdout);
        // Lines of what this machine has begin otherwise; how wide columns are is no matter.
        let words = |line: &str| line.split_whitespace().collect::<Vec<_>>().join(" ");
        let told = out.lines().map(words).skip_while(|line| !line.starts_with("profile "));
        let begins = ["profile ", "odd: ", "-> "];
        let told = told.take_while(|line| begins.iter().any(|begin| line.starts_with(begin)));
        let told: Vec<String> = told.collect();
        assert_eq!(said.status.success(), *sound, "{profile} on {machine}\n{out}");
        assert_eq!(told.len() == 1, *sound, "{profile} on {machine}\n{out}");
        all += &format!("# {machine} as {profile}\n{}\n\n", told.join("\n"));
    }
    golden("doctor.txt", &all);
}

/// Alone on this machine; what is fast here is not known, so no limit is set.
#[test]
fn preflight_checks_this_machine_and_a_made_one() {
    let said = moejob(&["preflight"]);
    let out = text(&said.stdout);
    assert_eq!(said.status.code(), Some(0), "{out}{}", text(&said.stderr));
    for part in ["CHECK ", "numa ", "lockedMemory ", "binding ", "hostCopyGBps "] {
        assert!(out.lines().any(|line| line.starts_with(part)), "{part}\n{out}");
    }
    assert!(out.contains("threads run where they are bound"), "{out}");
    let made = machines::machine("ndm-cards");
    let sys = made.path().join("sys");
    let sys = sys.to_str().expect("a path");
    let said = moejob(&["preflight", "--profile", "ndm-a100-v4", "--sys", sys, "-o", "json"]);
    assert_eq!(said.status.code(), Some(1));
    let all: serde_json::Value = serde_json::from_slice(&said.stdout).expect("JSON");
    assert_eq!((&all["grade"], &all["profile"]), (&"fail".into(), &"ndm-a100-v4".into()));
    let found = |check: &str| -> Vec<(String, String)> {
        let outcomes = all["outcomes"].as_array().expect("a list").iter();
        let of = outcomes.filter(|outcome| outcome["check"] == check);
        let word = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_string();
        of.map(|outcome| (word(&outcome["grade"]), word(&outcome["code"]))).collect()
    };
    let one = |grade: &str, code: &str| (grade.to_string(), code.to_string());
    assert_eq!(found("gpus"), [one("fail", "NHC2009")]);
    assert_eq!(found("cards"), [one("fail", "NHC2002")]);
    assert_eq!(found("links"), vec![one("fail", "NHC2004"); 2]);
    assert_eq!(found("rates"), [one("fail", "NHC2003")]);
    assert_eq!(found("numa"), [one("good", "")]);
    assert_eq!(found("peerReadGBps"), [one("unknown", "")]);
    assert_eq!(moejob(&["preflight", "--profile", "x"]).status.code(), Some(2));
}

/// A limit that nothing reaches, and one that everything does.
#[test]
fn preflight_holds_this_machine_against_limits() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("mine.yaml");
    for (limit, code) in [("1.0e9", 1), ("1.0e-9", 0)] {
        let profile = format!(
            "version: 1\nbackend: cpu\ndevices: 1\n\
             expect: {{ hostCopyGBps: {{ fail: {limit} }} }}\n"
        );
        std::fs::write(&path, profile).expect("a profile");
        let path = path.to_str().expect("a path");
        let said = moejob(&["preflight", "--profiles", path, "--profile", "mine"]);
        let out = text(&said.stdout);
        assert_eq!(said.status.code(), Some(code), "{out}{}", text(&said.stderr));
        assert_eq!(out.contains("FAILS") && out.contains("NHC2022"), code == 1, "{out}");
    }
}

/// A worker measures before it gets a rank, and the leader judges. With limits that no machine
/// reaches nothing is trained, unless the manifest says so.
#[test]
fn a_run_on_nodes_below_their_limits_ends_and_says_so() {
    let folder = tempfile::tempdir().expect("a folder");
    let file = |name: &str, text: &str| {
        let path = folder.path().join(name);
        std::fs::write(&path, text).expect("written");
        path.to_str().expect("a path").to_string()
    };
    let profile = file(
        "mine.yaml",
        "version: 1\nbackend: cpu\ndevices: 1\nmemory: 1Gi\n\
         expect: { hostCopyGBps: { fail: 1.0e9 } }\n",
    );
    let corpus = file("corpus.txt", &"All is well that ends well. ".repeat(200));
    let job = |preflight: &str| {
        let text = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{name: a}}\nspec:\n\
             \x20 nodes: {{profile: mine, min: 1{preflight}}}\n\
             \x20 model: {{preset: tiny}}\n\
             \x20 data: {{train: {{text: {{paths: [{corpus}]}}}}, sequenceLength: 16}}\n\
             \x20 training: {{steps: 1, globalBatchSize: 2}}\n"
        );
        file("job.yaml", &text)
    };
    for (preflight, code) in [("", 1), (", preflight: never", 0)] {
        let runs = folder.path().join(format!("runs{code}"));
        let runs = runs.to_str().expect("a path");
        let said = moejob(&["run", &job(preflight), "--profiles", &profile, "--dir", runs]);
        let all = format!("{}{}", text(&said.stdout), text(&said.stderr));
        assert_eq!(said.status.code(), Some(code), "{all}");
        assert_eq!(all.contains("node-0 is not good enough"), code == 1, "{all}");
        assert_eq!(all.contains("hostCopyGBps"), code == 1, "{all}");
    }
}

#[test]
fn doctor_says_where_shared_memory_comes_in_small_pages() {
    let made = machines::machine("bare");
    let folder = made.path().join("sys/kernel/mm/transparent_hugepage");
    std::fs::create_dir_all(&folder).expect("a folder");
    for (said, small) in [
        ("always within_size advise [never] deny force", true),
        ("always within_size [advise] never deny force", false),
    ] {
        std::fs::write(folder.join("shmem_enabled"), said).expect("a file");
        let sys = made.path().join("sys");
        let out = text(&moejob(&["doctor", "--sys", sys.to_str().expect("a path")]).stdout);
        assert!(out.contains("of shared memory: "), "{out}");
        assert_eq!(out.contains("-> memory for snapshots"), small, "{out}");
    }
}

#[test]
fn doctor_finds_the_profile_by_the_addresses_of_gpus() {
    for (machine, found) in [
        ("ndm-a100-v4", "its GPUs have the addresses of nd-a100-v4 and of ndm-a100-v4"),
        ("nd-h200-v5", "its GPUs have the addresses of nd-h100-v5 and of nd-h200-v5"),
    ] {
        let made = machines::machine(machine);
        let sys = made.path().join("sys");
        let out = text(&moejob(&["doctor", "--sys", sys.to_str().expect("a path")]).stdout);
        assert!(out.contains(found), "{machine}\n{out}");
    }
    let said = moejob(&["doctor", "--profile", "ndm"]);
    assert_eq!(said.status.code(), Some(2));
    let err = text(&said.stderr);
    assert!(err.contains("there is no \"ndm\"; known: cpu, gpu, nd-a100-v4"), "{err}");
}
