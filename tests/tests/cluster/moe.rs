//! `kubectl moe` as a plugin of a real kubectl against a real API server: one job from its
//! submission to its end, by an administrator and by an editor of the namespace.

use moejob_tests::cluster::{Said, kubectl, manifest, script, until};
use moejob_tests::root;
use serde_json::Value;
use std::io::{BufRead, BufReader};
use std::process::{Child, Command, Stdio};
use std::sync::mpsc;
use std::time::Duration;

const EXAMPLE: &str = "examples/03-on-kubernetes";
const PATIENCE: Duration = Duration::from_secs(90);

fn moe(words: &str) -> Said {
    script("moe", &words.split(' ').collect::<Vec<_>>(), b"")
}

/// With a manifest on standard input.
fn submit(words: &str, text: &str) -> Said {
    let words: Vec<&str> = ["submit", "-"].into_iter().chain(words.split_whitespace()).collect();
    script("moe", &words, text.as_bytes())
}

fn json(words: &str) -> Value {
    serde_json::from_str(&moe(words).expect(words)).expect("JSON")
}

fn phase(job: &str) -> String {
    json(&format!("show {job} -o json"))["phase"].as_str().unwrap_or_default().to_string()
}

fn state(job: &str) -> String {
    let said = moe(&format!("show {job}"));
    format!("{}{}", said.out, said.err)
}

/// The operator, the corpus, a claim, and the example under another name.
fn prepared(name: &str, steps: u64) -> String {
    let path = |name: &str| root().join(name).display().to_string();
    kubectl(&["apply", "-k", &path("manifests")]).expect("installed");
    let rollout = ["rollout", "status", "-n", "moejob-system", "deployment/moejob-operator"];
    kubectl(&[&rollout[..], &["--timeout=120s"]].concat()).expect("ready");
    let read = |file| std::fs::read_to_string(root().join(EXAMPLE).join(file)).expect(file);
    manifest(&["apply"], read("corpus.yaml").as_bytes()).expect("the corpus");
    manifest(&["apply"], read("storage.yaml").as_bytes()).expect("the claim");
    script("claim", &["default", "lesson-3"], b"").expect("a bound claim");
    read("job.yaml")
        .replace("name: lesson-3\n", &format!("name: {name}\n"))
        // A run before on the same cluster has left its own: they would be gone on from.
        .replace("checkpoints/lesson-3", &format!("checkpoints/{name}-{}", std::process::id()))
        .replace("steps: 300", &format!("steps: {steps}"))
}

/// A command that goes on; its lines, and its end when it is dropped.
struct Running(Child, mpsc::Receiver<String>);

impl Running {
    fn new(words: &str) -> Running {
        let mut command = Command::new(root().join("tests/cluster/moe"));
        command.args(words.split(' ')).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().expect("the plugin");
        let out = BufReader::new(child.stdout.take().expect("a pipe"));
        let (sender, lines) = mpsc::channel();
        std::thread::spawn(move || {
            out.lines().map_while(Result::ok).try_for_each(|line| sender.send(line))
        });
        Running(child, lines)
    }

    /// Reads on until a line has all these words.
    fn until(&self, words: &[&str]) -> Vec<String> {
        let mut seen = Vec::new();
        loop {
            match self.1.recv_timeout(PATIENCE) {
                Ok(line) => seen.push(line),
                Err(error) => panic!("{words:?} did not come: {error}\n{}", seen.join("\n")),
            }
            if words.iter().all(|word| seen[seen.len() - 1].contains(word)) {
                return seen;
            }
        }
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn one_job_from_its_submission_to_its_end() {
    let text = prepared("plugged", 2000);
    moe("cancel plugged --wait");
    let doctor = moe("doctor").expect("a sound cluster");
    for part in ["ok       definition   moejobs.moejob.dev, of this version", "ok       operator",
        "ok       leader", "ok       namespace", "ok       your rights", "ok       nodes"]
    {
        assert!(doctor.contains(part), "{part}\n{doctor}");
    }
    refused(&text);

    let said = submit("--hold", &text).expect("submitted");
    assert_eq!(said, "moejob.moejob.dev/plugged submitted, held\n");
    until("it is held", PATIENCE, || state("plugged"), || {
        (phase("plugged") == "Held").then_some(())
    });
    let said = submit("", &text);
    assert!(!said.good && said.err.contains("a job plugged is there already (Held"), "{said:?}");
    let table = moe("queue").expect("the queue");
    assert!(table.starts_with("NAME ") && table.contains("until `kubectl moe release`"), "{table}");

    let watch = Running::new("queue -w");
    moe("release plugged --wait --timeout 2m").expect("running");
    watch.until(&["plugged", "Running"]);
    let logs = Running::new("logs plugged -f");
    let line = logs.until(&["[0 plugged-a1-", "] step ", "loss", "tokens/s"]).pop();
    // Numbers that pods of the job before it still have are left out, so it need not be 0.
    let pod = line.as_deref().and_then(|line| line.split([' ', ']']).nth(1)).expect("a pod");
    let top = json("top plugged -o json");
    let load = &top["items"][0];
    assert!(load["expertImbalance"].as_f64().is_some_and(|of| of >= 1.0), "{top}");
    assert!(load["workers"][0]["plannedBytes"].as_u64().is_some_and(|of| of > 0), "{top}");

    a_lost_pod_is_told(&logs, pod);
    let said = moe("hold plugged --wait --timeout 2m").expect("held");
    assert_eq!(said, "moejob.moejob.dev/plugged held after a checkpoint\n");
    watch.until(&["plugged", "Held"]);
    moe("release plugged").expect("released");
    logs.until(&["] step 2000 "]);
    until("it is complete", 2 * PATIENCE, || state("plugged"), || {
        (phase("plugged") == "Complete").then_some(())
    });
    let shown = state("plugged");
    assert!(shown.contains("complete: ") && shown.contains("metrics.jsonl"), "{shown}");
    let names = |words: &str| moe(words).expect("names").lines().any(|line| {
        line == "moejob.moejob.dev/plugged"
    });
    assert!(!names("queue -o name") && names("queue --all -o name"));
    let yaml = moe("queue --all -o yaml").expect("YAML");
    assert!(yaml.contains("kind: MoeJob") && !yaml.contains("managedFields"), "{yaml}");

    let said = script("moe", &["__complete", "moe", "show", ""], b"").expect("completion");
    assert!(said.lines().any(|line| line == "plugged"), "{said}");
    let said = moe("cancel plugged --wait").expect("cancelled");
    assert_eq!(said, "moejob.moejob.dev/plugged cancelled; its checkpoints stay\n");
    let said = moe("show plugged");
    assert!(!said.good && said.err.contains("not found"), "{said:?}");
}

/// Here first, with line and column; what only the server can know is its words, field by field.
fn refused(text: &str) {
    let said = submit("", &text.replace("min: 1, max: 2", "min: 3, max: 2"));
    let named = said.err.contains("spec.nodes.min") && said.err.contains("nothing was sent");
    assert!(!said.good && named, "{said:?}");
    let said = submit("--dry-run=server", text);
    assert_eq!(said.expect("dry run"), "moejob.moejob.dev/plugged submitted (server dry run)\n");
    assert!(!moe("show plugged").good, "a dry run leaves nothing");
    submit("--hold", text).expect("submitted");
    let said = submit("--update", &text.replace("hiddenSize: 64", "hiddenSize: 128"));
    assert!(!said.good && said.err.contains("spec.model: "), "{said:?}");
    assert!(said.err.contains("model is immutable"), "{said:?}");
    let said = submit("--update", &text.replace("max: 2", "max: 3")).expect("changed");
    assert_eq!(said, "moejob.moejob.dev/plugged changed\n");
    moe("cancel plugged --wait").expect("cancelled");
}

/// Its last words, the next attempt's first ones, and the story of it.
fn a_lost_pod_is_told(logs: &Running, pod: &str) {
    kubectl(&["delete", "pod", pod, "--force", "--grace-period=0"]).expect("deleted");
    logs.until(&["joining as rank ", "attempt=2"]);
    logs.until(&["] step "]);
    let told = || json("show plugged -o json")["timeline"].take();
    until("the recovery is told", PATIENCE, || state("plugged"), || {
        let told = told();
        let mut entries = told.as_array()?.iter();
        let entry = entries.find(|entry| entry["event"] == "Recovery")?;
        entry["details"].to_string().contains("trained on after").then_some(())
    });
    let shown = state("plugged");
    for part in ["submitted", "allocated ", "attempt 1 ended: ", "began attempt 2", "What to do:"] {
        assert!(shown.contains(part), "{part}\n{shown}");
    }
}

/// The cluster's own role in the namespace is enough; what it does not show is said to be hidden.
#[test]
fn an_editor_of_the_namespace_needs_no_more() {
    let text = prepared("edited", 30);
    let binding = ["create", "rolebinding", "moe-editor", "--clusterrole=edit", "--user=ed"];
    kubectl(&["delete", "rolebinding", "moe-editor", "--ignore-not-found"]).expect("none");
    kubectl(&binding).expect("a binding");
    moe("cancel edited --wait");
    // The roles are put together by a controller of the cluster.
    until("the role is whole", PATIENCE, String::new, || {
        moe("doctor --as ed").out.contains("ok       your rights").then_some(())
    });
    let doctor = moe("doctor --as ed").expect("nothing is missing");
    assert!(doctor.contains("unknown  operator     you may not see deployments"), "{doctor}");
    submit("--as ed --wait --timeout 5m", &text).expect("complete");
    moe("show edited --as ed").expect("shown");
    moe("logs edited --as ed").expect("logs");
    moe("plan edited --as ed").expect("a plan");
    moe("cancel edited --as ed --wait").expect("cancelled");
    let said = moe("queue --as nobody");
    assert!(!said.good && said.err.contains("you may not"), "{said:?}");
    kubectl(&["delete", "rolebinding", "moe-editor"]).expect("deleted");
}
