//! Jobs under a real operator on real nodes, as the tests of this folder see and disturb them.

use moejob_protocol::report::StepReport;
use moejob_tests::cluster::{get, kubectl, manifest, script, until};
use moejob_tests::{moejob, root};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::{Child, Command, Stdio};
use std::time::{Duration, Instant};

pub const EXAMPLE: &str = "examples/03-on-kubernetes";
/// For anything that this machine, its tests and a whole Kubernetes share two cores for.
pub const PATIENCE: Duration = Duration::from_secs(120);
/// A job that is deleted leaves nothing behind after this.
pub const GONE_AFTER: Duration = Duration::from_secs(30);

/// More steps than anybody waits for.
pub const FOR_EVER: (&str, &str) = ("steps: 300", "steps: 1000000");
/// Else a healthy gang that could be a better one waits for a minute.
pub const GROW_SOON: (&str, &str) =
    ("  checkpoint:", "  recovery: { growthInterval: 2s }\n  checkpoint:");

/// Prints how long something took, and holds it to its bar where times are measured
/// (`MOEJOB_TIMED=1`, on a machine that does nothing else); elsewhere to four times that.
pub fn hold_to(what: &str, took: Duration, bar: Duration) {
    println!("{what}: {:.1} s (bar: {:.1} s)", took.as_secs_f64(), bar.as_secs_f64());
    let limit = if std::env::var_os("MOEJOB_TIMED").is_some() { bar } else { 4 * bar };
    assert!(took <= limit, "{what}: {took:?}, at most {limit:?}\n{}", operators());
}

/// Installs the operator, and waits for both of its replicas.
pub fn install() {
    kubectl(&["apply", "-k", &root().join("manifests").display().to_string()]).expect("installed");
    let label = ["label", "--overwrite", "namespace", "default"];
    let standard = "pod-security.kubernetes.io/enforce=restricted";
    kubectl(&[&label[..], &[standard]].concat()).expect("restricted");
    let rollout = ["rollout", "status", "-n", "moejob-system", "deployment/moejob-operator"];
    let said = kubectl(&[&rollout[..], &["--timeout=180s"]].concat());
    assert!(said.good, "{said:?}\n{}", operators());
}

/// What the operators say, for whoever has to find out.
pub fn operators() -> String {
    let label = "app.kubernetes.io/component=operator";
    let logs = ["logs", "-n", "moejob-system", "-l", label, "--prefix", "--tail=40"];
    let pods = kubectl(&["get", "pods", "-A", "-o", "wide"]);
    let said = kubectl(&logs);
    format!("{}{}{}{}", pods.out, pods.err, said.out, said.err)
}

/// A job in `default`, with the storage of the example. It is deleted when the test is over.
pub struct Job {
    pub name: String,
    pub text: String,
    /// Where its claim lies on this machine.
    pub folder: PathBuf,
}

impl Job {
    /// The example under another name and otherwise as `change` says, its corpus, a claim; not yet
    /// applied.
    pub fn new(name: &str, changes: &[(&str, &str)]) -> Job {
        let read = |file| std::fs::read_to_string(root().join(EXAMPLE).join(file)).expect(file);
        let own_name = format!("name: {name}\n");
        let own_folder = format!("checkpoints/{name}");
        let own = [("name: lesson-3\n", &*own_name), ("checkpoints/lesson-3", &*own_folder)];
        let mut text = read("job.yaml");
        for (from, to) in own.iter().chain(changes) {
            assert_eq!(text.matches(from).count(), 1, "{from}");
            text = text.replace(from, to);
        }
        kubectl(&["apply", "-f", &root().join(EXAMPLE).join("corpus.yaml").display().to_string()])
            .expect("the corpus");
        manifest(&["apply"], read("storage.yaml").as_bytes()).expect("the claim");
        let folder = script("claim", &["default", "lesson-3"], b"").expect("a bound claim");
        let folder = PathBuf::from(folder.trim()).join(name);
        // A job of this name, on a cluster that is kept, would go on from the one before.
        drop(std::fs::remove_dir_all(&folder));
        Job { name: name.to_string(), text, folder }
    }

    pub fn apply(&self) {
        manifest(&["apply"], self.text.as_bytes()).expect("applied");
    }

    /// `kubectl patch` of the spec.
    pub fn patch(&self, spec: &Value) {
        let patch = serde_json::json!({ "spec": spec }).to_string();
        kubectl(&["patch", "mj", &self.name, "--type=merge", "-p", &patch]).expect("patched");
    }

    pub fn object(&self) -> Value {
        get(&["mj", &self.name])
    }

    pub fn status(&self) -> Value {
        self.object()["status"].take()
    }

    pub fn state(&self) -> String {
        format!("{}\n{}", self.status(), operators())
    }

    pub fn until<T>(&self, what: &str, reached: impl FnMut() -> Option<T>) -> T {
        until(&format!("{}: {what}", self.name), PATIENCE, || self.state(), reached)
    }

    pub fn until_phase(&self, phase: &str) {
        self.until(phase, || (self.status()["phase"] == phase).then_some(()));
    }

    /// Whole lines of its metrics, in the order of their writing.
    pub fn metrics(&self) -> Vec<StepReport> {
        metrics(&self.folder)
    }

    pub fn step(&self) -> u64 {
        self.metrics().last().map_or(0, |line| line.step)
    }

    pub fn attempt(&self) -> u32 {
        self.metrics().last().map_or(0, |line| line.attempt)
    }

    /// Waits for `more` further steps.
    pub fn go_on(&self, more: u64) {
        let from = self.step();
        self.until(&format!("{more} steps after {from}"), || {
            (self.step() >= from + more).then_some(())
        });
    }

    /// Waits for a step of a later attempt than this.
    pub fn until_after(&self, attempt: u32) {
        self.until(&format!("a step after attempt {attempt}"), || {
            (self.attempt() > attempt).then_some(())
        });
    }

    pub fn until_world(&self, world: u32) {
        self.until(&format!("{world} ranks"), || {
            self.metrics().last().filter(|line| line.world_size == world).map(drop)
        });
    }

    pub fn until_complete(&self, limit: Duration) {
        let timeout = format!("--timeout={}s", limit.as_secs());
        let what = format!("mj/{}", self.name);
        let said = kubectl(&["wait", "--for=condition=Complete", &timeout, &what]);
        assert!(said.good, "{said:?}\n{}", self.state());
    }

    pub fn restarts(&self) -> u64 {
        self.status()["restarts"].as_u64().unwrap_or(0)
    }

    pub fn condition(&self, kind: &str) -> Value {
        let mut status = self.status();
        let conditions = status["conditions"].as_array_mut();
        let found = conditions.into_iter().flatten().find(|of| of["type"] == kind);
        found.map(Value::take).unwrap_or_default()
    }

    /// Reasons of the events about it.
    pub fn told(&self) -> Vec<String> {
        let about = format!("regarding.name={}", self.name);
        let events = get(&["events.events.k8s.io", "--field-selector", &about]);
        let reason = |event: &Value| event["reason"].as_str().unwrap_or_default().to_string();
        events["items"].as_array().into_iter().flatten().map(reason).collect()
    }

    /// Those of its workers.
    pub fn pods(&self) -> Vec<Value> {
        self.pods_with("moejob.dev/slot")
    }

    /// Those that show autoscalers what it lacks.
    pub fn placeholders(&self) -> Vec<Value> {
        self.pods_with("app.kubernetes.io/name=moejob-placeholder")
    }

    fn pods_with(&self, label: &str) -> Vec<Value> {
        let label = format!("moejob.dev/job={},{label}", self.name);
        let mut pods = get(&["pods", "-l", &label]);
        pods["items"].as_array_mut().map(std::mem::take).unwrap_or_default()
    }

    /// Names of its pods that run, by node.
    pub fn running(&self) -> BTreeMap<String, String> {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let pods = self.pods();
        let runs = pods.iter().filter(|pod| {
            pod["status"]["phase"] == "Running" && pod["metadata"]["deletionTimestamp"].is_null()
        });
        runs.map(|pod| (text(&pod["spec"]["nodeName"]), text(&pod["metadata"]["name"]))).collect()
    }

    pub fn pod_on(&self, node: &str) -> Option<String> {
        self.running().remove(node)
    }

    /// Deletes it, and looks for what is left.
    pub fn delete(&self, keeps_folder: bool) {
        let start = Instant::now();
        kubectl(&["delete", "mj", &self.name, "--wait=true", "--timeout=30s"]).expect("deleted");
        let left = || {
            let label = format!("moejob.dev/job={}", self.name);
            let kinds = "pods,networkpolicies,poddisruptionbudgets,configmaps,secrets,services,\
                         leases,persistentvolumeclaims";
            kubectl(&["get", kinds, "-o", "name", "-l", &label]).expect("a list")
        };
        until("nothing is left", 4 * GONE_AFTER, left, || left().trim().is_empty().then_some(()));
        hold_to(&format!("{} deleted, nothing left", self.name), start.elapsed(), GONE_AFTER);
        assert!(!keeps_folder || self.folder.exists(), "the checkpoints stay");
    }

    /// The losses by step that `moejob run` has of the same manifest, up to this step at least.
    pub fn alone(&self, until_step: u64) -> BTreeMap<u64, u64> {
        let folder = tempfile::tempdir().expect("a folder");
        // What GPUs would train is compared with processors, as they stand in for them.
        let text = self.text.replace("profile: nd-h200-v5", "profile: cpu");
        std::fs::write(folder.path().join("job.yaml"), text).expect("a manifest");
        let corpus = folder.path().join("corpus");
        std::fs::create_dir(&corpus).expect("a folder");
        let map = get(&["configmap", "lesson-3-corpus"]);
        for (name, text) in map["data"].as_object().expect("a corpus") {
            std::fs::write(corpus.join(name), text.as_str().expect("text")).expect("a file");
        }
        let mut command = Command::new(moejob());
        command.current_dir(folder.path()).args(["run", "job.yaml", "--workers", "1"]);
        let child = command.stdout(Stdio::null()).stderr(Stdio::null()).spawn();
        let mut run = Ended(child.expect("moejob runs"));
        until("moejob run", 5 * PATIENCE, String::new, || {
            let ended = run.0.try_wait().expect("a child");
            let step = metrics(folder.path()).last().map_or(0, |line| line.step);
            (step >= until_step || ended.is_some()).then_some(())
        });
        losses(&metrics(folder.path()))
    }

    /// Every step that it has done has the loss that `moejob run` has of it, bit for bit. It is
    /// suspended for that: the processor is the comparison's.
    pub fn assert_losses_of_one_machine(&self) {
        if self.status()["phase"] != "Complete" {
            self.patch(&serde_json::json!({ "suspend": true }));
            self.until_phase("Suspended");
        }
        let found = losses(&self.metrics());
        let steps = found.last_key_value().map_or(0, |(step, _)| *step);
        assert!(found.keys().copied().eq(1..=steps), "a step is missing: {:?}", found.keys());
        let expected = self.alone(steps);
        for (step, bits) in found {
            let (found, expected) = (f64::from_bits(bits), expected.get(&step));
            assert_eq!(Some(&bits), expected, "the loss of step {step}: {found}");
        }
    }
}

/// Ended by its id with whoever holds it.
struct Ended(Child);

impl Drop for Ended {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

/// A node that takes no new pods, until this is dropped: also by a test that fails.
pub struct Cordoned(pub String);

impl Cordoned {
    pub fn new(node: &str) -> Cordoned {
        kubectl(&["cordon", node]).expect("cordoned");
        Cordoned(node.to_string())
    }
}

impl Drop for Cordoned {
    fn drop(&mut self) {
        let uncordoned = kubectl(&["uncordon", &self.0]);
        if !std::thread::panicking() {
            uncordoned.expect("uncordoned");
        }
    }
}

impl Drop for Job {
    fn drop(&mut self) {
        // What the next test needs is the nodes; a test that failed leaves its job behind.
        drop(kubectl(&["delete", "mj", &self.name, "--ignore-not-found", "--wait=false"]));
    }
}

fn metrics(folder: &Path) -> Vec<StepReport> {
    let path = find(folder, "metrics.jsonl");
    let text = path.and_then(|path| std::fs::read_to_string(path).ok()).unwrap_or_default();
    let whole = text.rfind('\n').map_or("", |end| &text[..end]);
    whole.lines().map(|line| serde_json::from_str(line).expect("a metrics line")).collect()
}

/// The bits of each step's loss; the last line of a step counts.
fn losses(metrics: &[StepReport]) -> BTreeMap<u64, u64> {
    metrics.iter().map(|line| (line.step, line.loss.to_bits())).collect()
}

/// A file of this name below a folder.
fn find(folder: &Path, name: &str) -> Option<PathBuf> {
    let entries = std::fs::read_dir(folder).ok()?;
    let mut folders = Vec::new();
    for entry in entries.filter_map(Result::ok) {
        if entry.file_name() == name {
            return Some(entry.path());
        }
        if entry.file_type().is_ok_and(|kind| kind.is_dir()) {
            folders.push(entry.path());
        }
    }
    folders.iter().find_map(|folder| find(folder, name))
}

/// The pod of the leading operator: the lease names it, and after a `_` its start.
pub fn leader() -> Option<String> {
    let lease = get(&["lease", "moejob-operator", "-n", "moejob-system"]);
    let holder = lease["spec"]["holderIdentity"].as_str()?;
    Some(holder.split('_').next()?.to_string()).filter(|pod| !pod.is_empty())
}

/// The node that the leading operator runs on.
pub fn leading_node() -> Option<String> {
    let pod = get(&["pod", &leader()?, "-n", "moejob-system"]);
    Some(pod["spec"]["nodeName"].as_str()?.to_string())
}

/// Lead from the node that is the operator's alone: what happens to it happens to no worker.
pub fn lead_from_its_own_node() {
    until("an operator leads on its own node", PATIENCE, operators, || {
        let node = leading_node()?;
        if node != "operator" {
            kubectl(&["delete", "pod", "-n", "moejob-system", &leader()?, "--wait=true"]);
        }
        (node == "operator").then_some(())
    });
}

/// What can happen to a node: `tests/cluster/node`.
pub fn node(name: &str, words: &[&str]) {
    script("node", &[&[name], words].concat(), b"").expect("the node's lot");
}
