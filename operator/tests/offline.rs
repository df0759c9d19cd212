//! The commands that need nothing but a file, as a person calls them: words and exit codes.

use std::io::Write;
use std::process::{Command, Output, Stdio};

fn root() -> &'static str {
    concat!(env!("CARGO_MANIFEST_DIR"), "/..")
}

fn moejob(arguments: &[&str], input: &str) -> Output {
    let mut child = Command::new(env!("CARGO_BIN_EXE_moejob"))
        .args(arguments)
        .current_dir(root())
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .stderr(Stdio::piped())
        .spawn()
        .unwrap();
    child.stdin.take().unwrap().write_all(input.as_bytes()).unwrap();
    child.wait_with_output().unwrap()
}

/// Exit code, standard output, standard error.
fn said(output: &Output) -> (i32, String, String) {
    let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
    (output.status.code().unwrap(), text(&output.stdout), text(&output.stderr))
}

#[test]
fn good_manifests_are_named_and_bad_ones_exit_with_2() {
    let (code, out, err) = said(&moejob(&["validate", "examples/01-first-run.yaml"], ""));
    assert_eq!((code, err.as_str()), (0, ""));
    assert_eq!(out, "examples/01-first-run.yaml: MoeJob first-run is valid\n");
    let (code, out, err) = said(&moejob(&["validate", "-"], "kind: MoeJob\nspec: { node: 1 }\n"));
    assert_eq!((code, out.as_str()), (2, ""));
    assert!(err.contains("-:2:9: E0102 spec.node: found the unknown field `node`"), "{err}");
    assert!(err.contains("did you mean `nodes`?"), "{err}");
    assert!(err.contains("E0104 apiVersion: found nothing; allowed: moejob.dev/v1alpha1"), "{err}");
    let (code, _, err) = said(&moejob(&["validate", "no-such-file.yaml", "examples"], ""));
    assert_eq!(code, 2);
    assert!(err.contains("no-such-file.yaml: cannot be read"), "{err}");
    assert!(err.contains("examples: cannot be read: it is a directory"), "{err}");
}

#[test]
fn other_kinds_in_a_file_are_skipped_by_name() {
    let service = "kind: Service\nmetadata: { name: web }\n---\n";
    let file = format!("{service}{}", with("profile: cpu", ""));
    let (code, out, err) = said(&moejob(&["validate", "-"], &file));
    assert_eq!((code, out.as_str()), (0, "-: MoeJob sample is valid\n"));
    assert_eq!(err, "-: skipped, as they are no MoeJobs: Service web\n");
    let (code, out, err) = said(&moejob(&["plan", "-"], &file));
    assert!(code == 0 && out.starts_with("MoeJob sample"), "{out}{err}");
    // Lines are those of the file.
    let file = format!("{service}kind: MoeJob\nspec: {{ node: 1 }}\n");
    let (code, _, err) = said(&moejob(&["validate", "-"], &file));
    assert!(code == 2 && err.contains("-:5:9: E0102 spec.node"), "{err}");
    let (code, _, err) = said(&moejob(&["validate", "-"], &format!("{service}{service}")));
    assert!(code == 2 && err.contains("-: it holds no MoeJob\n"), "{err}");
    // A file of one other kind is no job with many mistakes.
    let other = "examples/03-on-kubernetes/corpus.yaml";
    let (code, out, err) = said(&moejob(&["validate", other], ""));
    assert!(code == 2 && out.is_empty(), "{out}");
    assert!(err.contains("corpus.yaml: it holds no MoeJob\n"), "{err}");
    assert!(err.contains("skipped, as they are no MoeJobs: ConfigMap ") && !err.contains("E0"));
    let (code, _, err) = said(&moejob(&["run", other], ""));
    assert!(code == 2 && err.contains("it holds no MoeJob, but ConfigMap "), "{err}");
    // A mistake in the kind itself is one.
    let (code, _, err) = said(&moejob(&["validate", "-"], &file.replace("MoeJob", "MoEJob")));
    assert!(code == 2 && err.contains("did you mean `MoeJob`?"), "{err}");
}

/// A model that stands with weights which are not here is one problem, and none of each dimension.
#[test]
fn weights_that_are_not_here_are_the_one_problem() {
    let file = with("profile: cpu", "");
    let (before, after) = file.split_once("  model:\n").expect("a model");
    let (_, after) = after.split_once("  data:\n").expect("data");
    let file = format!("{before}  model: {{ from: {{ path: none/hf }} }}\n  data:\n{after}");
    let (code, _, err) = said(&moejob(&["validate", "-"], &file));
    assert!(code == 2 && err.contains("E0209 spec.model.from.path: found `none/hf`"), "{err}");
    assert!(err.contains("nothing is downloaded here") && err.ends_with("-: 1 problem\n"), "{err}");
}

#[test]
fn two_files_of_one_name_are_refused_together() {
    let file = "examples/02-elastic.yaml";
    let (code, out, err) = said(&moejob(&["validate", file, file], ""));
    assert_eq!(code, 2);
    assert_eq!(out.lines().count(), 1);
    assert!(err.contains("E0216 metadata.name"), "{err}");
}

#[test]
fn json_is_for_tools() {
    let (code, out, err) = said(&moejob(&["validate", "-o", "json", "-"], "a: 1"));
    assert_eq!((code, err.as_str()), (2, ""));
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(found[0]["valid"], false);
    let problems = found[0]["problems"].as_array().unwrap();
    let unknown = problems.iter().find(|problem| problem["code"] == "E0102").unwrap();
    assert_eq!((&unknown["path"], &unknown["line"]), (&"a".into(), &1.into()));
}

#[test]
fn the_plan_is_shown_and_a_wrong_node_is_named() {
    let file = "examples/02-elastic.yaml";
    let (code, out, _) = said(&moejob(&["plan", file, "--lose", "node-1"], ""));
    assert_eq!(code, 0);
    assert!(out.contains("lose node-1: 3 nodes go on (dp 3, ep 3) from memory"), "{out}");
    let (code, _, err) = said(&moejob(&["plan", file, "--lose", "nod-1"], ""));
    assert_eq!(code, 2);
    assert!(err.contains("there is no such node; did you mean `node-1`?"), "{err}");
    let (code, out, _) = said(&moejob(&["plan", file, "-o", "json"], ""));
    assert_eq!(code, 0);
    let found: serde_json::Value = serde_json::from_str(&out).unwrap();
    assert_eq!(found["whatIfs"].as_array().unwrap().len(), 4);
}

#[test]
fn the_definition_is_the_one_in_the_tree() {
    let (code, out, _) = said(&moejob(&["crd"], ""));
    assert_eq!(code, 0);
    assert_eq!(out, std::fs::read_to_string(format!("{}/manifests/crd.yaml", root())).unwrap());
}

/// The base's manifest with other nodes and more of training.
fn with(nodes: &str, training: &str) -> String {
    let base = include_str!("../manifest/tests/manifests/base.yaml");
    let base = base.replace("profile: cpu, min: 1, max: 4", nodes);
    base.replace("    steps: 100", &format!("    steps: 100{training}"))
}

/// Every command that a job could start with says the same, with the place.
#[test]
fn what_gpus_cannot_do_yet_is_refused_before_a_run() {
    let several = with("profile: nd-h200-v5", "");
    let several = several.replace("microBatchSize: 2", "microBatchSize: 1");
    let several = several.replace("hiddenSize: 64", "hiddenSize: 80");
    let several =
        several.replace("  checkpoint:", "  parallelism: { tensor: 2 }\n  checkpoint:");
    let width = "8:17: E0301 spec.model.hiddenSize: found `80` on GPUs";
    let tensor = "E0301 spec.parallelism.tensor: found 2; allowed: 1";
    for command in ["validate", "run"] {
        let (code, out, err) = said(&moejob(&[command, "-"], &several));
        assert_eq!((code, out.as_str()), (2, ""), "{err}");
        assert!(err.contains(width) && err.contains(tensor), "{err}");
    }
    let (code, out, _) = said(&moejob(&["plan", "-"], &several));
    assert_eq!(code, 2, "{out}");
    assert!(out.contains("NOT YET  E0301 spec.model.hiddenSize: found `80` on GPUs"), "{out}");
}

#[test]
fn one_gpu_is_valid_and_processors_refuse_its_formats_by_line() {
    let (code, out, err) = said(&moejob(&["validate", "-"], &with("profile: gpu", "")));
    let (first, rest) = out.split_once('\n').unwrap();
    assert_eq!((code, first, err.as_str()), (0, "-: MoeJob sample is valid", ""));
    assert!(rest.starts_with("  not checked here: driver and libraries, the GPUs' "), "{rest}");
    assert_eq!(rest.lines().count(), 1, "{rest}");
    let tf32 = with("profile: cpu", "\n    precision: tf32");
    for command in ["validate", "plan", "run"] {
        let (code, _, err) = said(&moejob(&[command, "-"], &tf32));
        assert_eq!(code, 2);
        let expected = "18:16: E0221 spec.training.precision: found `tf32` on processors";
        assert!(err.contains(expected), "{command}: {err}");
    }
}

/// No worker is started for a GPU that this machine does not show.
#[test]
fn a_machine_without_a_gpu_refuses_a_gpu_job_at_once() {
    let folder = std::env::temp_dir().join(format!("moejob-no-gpu-{}", std::process::id()));
    let output = Command::new(env!("CARGO_BIN_EXE_moejob"))
        .args(["run", "examples/05-one-gpu.yaml", "--dir"])
        .arg(&folder)
        .env("CUDA_VISIBLE_DEVICES", "")
        .current_dir(root())
        .output()
        .unwrap();
    let (code, out, err) = said(&output);
    assert_eq!((code, out.as_str()), (2, ""), "{err}");
    // Without a driver, or with one that shows nothing.
    assert!(err.starts_with("moejob: spec.nodes.profile: "), "{err}");
    assert!(err.contains("`moejob doctor` tells what this machine has"), "{err}");
    assert!(!folder.exists(), "a folder was made for a run that did not start");
}
