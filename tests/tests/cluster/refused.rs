//! The definition on a real API server: what it refuses and how, what it explains, what it shows.

use crate::manifests::{BASE, TABLE, blocks};
use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_tests::cluster::{Said, get, kubectl, manifest};
use moejob_tests::root;
use serde_json::Value;
use std::fmt::Write;
use std::time::Duration;

/// Some messages repeat the whole input.
const LINE_MAX: usize = 400;
const NAMESPACE: &str = "refused";
const GOLDEN: &str = "tests/tests/cluster/refused.txt";

fn install_definition() {
    let path = root().join("manifests/crd.yaml");
    kubectl(&["apply", "-f", &path.display().to_string()]).expect("the definition is applied");
    let wait = ["wait", "--for=condition=Established", "--timeout=20s", "crd/moejobs.moejob.dev"];
    kubectl(&wait).expect("the definition is served");
    moejob_tests::cluster::until("moejobs are served", Duration::from_secs(20), String::new, || {
        kubectl(&["get", "moejobs"]).good.then_some(())
    });
}

/// What kubectl says, without what differs from run to run; of what it takes, what the operator
/// says that reads the object as the server stores it.
fn verdict(said: &Said) -> String {
    let mut text = String::new();
    let mut add = |line: &str| {
        let line: String = line.chars().take(LINE_MAX).collect();
        writeln!(text, "=> {}", line.replace(['\0', '\u{1b}'], "?").trim()).expect("text");
    };
    let mut lines: Vec<&str> = said.err.lines().filter(|line| !line.trim().is_empty()).collect();
    // The server names several fields in any order.
    let listed = |line: &str| line.starts_with("* ");
    lines.chunk_by_mut(|a, b| listed(a) && listed(b)).for_each(<[&str]>::sort_unstable);
    lines.into_iter().for_each(&mut add);
    if said.good {
        add("accepted");
        let object: Value = serde_json::from_str(&said.out).expect("an object");
        let spec = serde_json::from_value(object["spec"].clone()).expect("a spec");
        let name = object["metadata"]["name"].as_str().expect("a name");
        for problem in Job::from_spec(name, &spec, Profiles::shipped()).err().unwrap_or_default() {
            add(&format!("condition: {}", problem.sentence()));
        }
    }
    text
}

/// What kubectl's own reader of YAML smooths over before anything of ours sees it: fields given
/// twice, numbers in other notations, marks and encodings of the text. `moejob validate` tells.
const UNSEEN: &[&str] = &[
    "2 a duplicate field",
    "2 a duplicate field in braces",
    "4 a whole number with a point",
    "4 octal or not",
    "4 hexadecimal",
    "4 grouped digits",
    "4 a plus",
    "21 a merge key",
    "21 a byte-order mark",
    "21 UTF-16",
    "24 status",
    "26 yes",
];

const CREATE: [&str; 6] = ["create", "--dry-run=server", "-o", "json", "-n", NAMESPACE];

/// Part A of the bad input, as `kubectl apply` meets it. What the server accepts and the reader of
/// manifests refuses becomes a condition, which the tests of the operator look at.
#[test]
fn bad_manifests_are_refused_by_the_server_or_known_to_pass() {
    install_definition();
    drop(kubectl(&["create", "namespace", NAMESPACE]));
    let mut found = String::new();
    let mut cases = 0;
    let mut unseen = Vec::new();
    for case in blocks(TABLE) {
        let Some(title) = case.title() else { continue };
        cases += 1;
        let said = manifest(&CREATE, &case.input());
        let verdict = verdict(&said);
        if said.good && !verdict.contains("=> condition") && Job::read(&case.input()).is_err() {
            unseen.push(title.to_string());
        }
        writeln!(found, "## {title}\n{verdict}").expect("text");
    }
    assert_eq!(unseen, UNSEEN, "what only the reader sees");
    assert!(cases > 120, "only {cases} cases were read");
    let path = root().join(GOLDEN);
    let found = format!("{}\n", found.trim_end());
    if std::env::var_os("UPDATE").is_some() {
        return std::fs::write(path, found).expect("the golden file is written");
    }
    let expected = std::fs::read_to_string(path).expect("the golden file");
    for (line, (expected, found)) in expected.lines().zip(found.lines()).enumerate() {
        assert_eq!(expected, found, "{GOLDEN}, line {}", line + 1);
    }
    assert_eq!(expected.lines().count(), found.lines().count());
}

/// Creates the base in a namespace of the test and tries changes of it, as the server judges them.
#[test]
fn what_may_not_change_does_not() {
    install_definition();
    drop(kubectl(&["create", "namespace", "changes"]));
    let here = ["-n", "changes"];
    drop(kubectl(&[&here[..], &["delete", "mj", "--all"]].concat()));
    let suspended = BASE.replace("spec:\n", "spec:\n  suspend: true\n");
    manifest(&[&here[..], &["create"]].concat(), suspended.as_bytes()).expect("created");
    let patch = |text: &str| {
        kubectl(&[&here[..], &["patch", "mj", "sample", "--type=merge", "-p", text]].concat())
    };
    for (change, message) in [
        (r#"{"spec":{"model":{"hiddenSize":128}}}"#, "model is immutable"),
        (r#"{"spec":{"data":{"tokenizer":"other.json"}}}"#, "data is immutable"),
        (r#"{"spec":{"training":{"seed":7}}}"#, "training is immutable, but for steps"),
        (r#"{"spec":{"training":{"steps":99}}}"#, "training.steps only grows"),
        (r#"{"spec":{"nodes":{"profile":"ndm-a100-v4"}}}"#, "nodes.profile is immutable"),
        (r#"{"spec":{"volumes":[{"mountPath":"a","claim":"b"}]}}"#, "volumes"),
    ] {
        let said = patch(change);
        assert!(!said.good && said.err.contains(message), "{change}: {said:?}");
    }
    for change in [
        r#"{"spec":{"training":{"steps":101}}}"#,
        r#"{"spec":{"nodes":{"min":2,"max":3,"spares":1}}}"#,
        r#"{"spec":{"checkpoint":{"keep":4},"recovery":{"maxRestarts":3}}}"#,
        r#"{"spec":{"image":"example.org/moejob:2"}}"#,
        r#"{"spec":{"suspend":false}}"#,
    ] {
        patch(change).expect(change);
    }
    let said = patch(r#"{"spec":{"image":"example.org/moejob:3"}}"#);
    assert!(said.err.contains("image changes only while the job is suspended"), "{said:?}");
    // The status is another resource: what a user writes into it with the spec is dropped.
    patch(r#"{"status":{"phase":"Complete","step":100}}"#).expect("no error, no effect");
    let status = get(&["mj", "sample", "-n", "changes"])["status"].take();
    assert!(status["phase"] != "Complete" && status["step"] != 100, "{status}");
    kubectl(&["delete", "namespace", "changes", "--wait=false"]).expect("deleted");
}

#[test]
fn kubectl_explains_and_shows_jobs() {
    install_definition();
    let fields = kubectl(&["explain", "mj", "--recursive"]).expect("explain");
    let count = fields.lines().filter(|line| line.contains('<')).count();
    assert!(count > 180, "{count} fields\n{fields}");
    for path in ["mj", "mj.spec", "mj.spec.nodes", "mj.spec.model.experts", "mj.spec.recovery",
        "mj.spec.training.optimizer.adamw", "mj.spec.volumes", "mj.status", "mj.status.recoveries"]
    {
        let text = kubectl(&["explain", path]).expect(path);
        // Kubernetes explains its own two fields, apiVersion and kind, itself.
        assert!(!text.contains("<no description>"), "{path}:\n{text}");
    }
    drop(kubectl(&["create", "namespace", "shown"]));
    let shown = ["-n", "shown"];
    manifest(&["apply", "-n", "shown"], BASE.as_bytes()).expect("applied");
    let status = r#"{"status":{"phase":"Running","nodes":{"summary":"1/2"},"step":7,"loss":2.5,
        "placement":{"summary":"8 over 2 ranks"},"tokensPerSecond":1234.5,"restarts":1}}"#;
    let patch = ["patch", "mj", "sample", "--subresource=status", "--type=merge", "-p", status];
    kubectl(&[&shown[..], &patch].concat()).expect("status");
    let table = kubectl(&["get", "mj", "-n", "shown"]).expect("the table");
    let rows: Vec<Vec<&str>> =
        table.lines().map(|line| line.split("  ").map(str::trim).collect()).collect();
    let words = |row: &[&str]| {
        row.iter().filter(|word| !word.is_empty()).map(ToString::to_string).collect::<Vec<_>>()
    };
    let header = ["NAME", "PHASE", "NODES", "EXPERTS", "STEP", "LOSS", "TOK/S", "RESTARTS", "AGE"];
    assert_eq!(words(&rows[0]), header);
    let row = ["sample", "Running", "1/2", "8 over 2 ranks", "7", "2.5", "1234.5", "1"];
    assert_eq!(words(&rows[1])[..8], row, "{table}");
    kubectl(&["delete", "namespace", "shown", "--wait=false"]).expect("deleted");
}
