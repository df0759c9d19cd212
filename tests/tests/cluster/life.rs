//! Jobs under a real operator on real nodes: they train what `moejob run` trains, whatever happens
//! to pods, nodes and the operator itself.

use moejob_protocol::report::StepReport;
use moejob_tests::cluster::{get, kubectl, manifest, script, until};
use moejob_tests::{moejob, root};
use serde_json::Value;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::{Duration, Instant};

const EXAMPLE: &str = "examples/03-on-kubernetes";
/// For anything that this machine, its tests and a whole Kubernetes share two cores for.
const PATIENCE: Duration = Duration::from_secs(60);
/// `recovery.heartbeatTimeout` of the example, and what the bar allows beside it.
const HEARTBEAT_AND_MORE: Duration = Duration::from_secs(3 + 3);
const LEASE: Duration = Duration::from_secs(10);

/// A job in `default`, with the storage of the example.
struct Job {
    name: String,
    text: String,
    /// Where its claim lies on this machine.
    folder: PathBuf,
}

/// Installs the operator, and waits for both of its replicas.
fn install() {
    kubectl(&["apply", "-k", &root().join("manifests").display().to_string()]).expect("installed");
    let label = ["label", "--overwrite", "namespace", "default"];
    let standard = "pod-security.kubernetes.io/enforce=restricted";
    kubectl(&[&label[..], &[standard]].concat()).expect("restricted");
    let rollout = ["rollout", "status", "-n", "moejob-system", "deployment/moejob-operator"];
    let said = kubectl(&[&rollout[..], &["--timeout=90s"]].concat());
    assert!(said.good, "{said:?}\n{}", operators());
}

/// What the operators say, for whoever has to find out.
fn operators() -> String {
    let label = "app.kubernetes.io/component=operator";
    let logs = ["logs", "-n", "moejob-system", "-l", label, "--prefix", "--tail=30"];
    let pods = kubectl(&["get", "pods", "-A", "-o", "wide"]);
    let said = kubectl(&logs);
    format!("{}{}{}{}", pods.out, pods.err, said.out, said.err)
}

impl Job {
    /// The example under another name and with other steps, its corpus, a claim; not yet applied.
    fn new(name: &str, steps: u64) -> Job {
        let read = |file| std::fs::read_to_string(root().join(EXAMPLE).join(file)).expect(file);
        let text = read("job.yaml")
            .replace("name: lesson-3\n", &format!("name: {name}\n"))
            .replace("checkpoints/lesson-3", &format!("checkpoints/{name}"))
            .replace("steps: 300", &format!("steps: {steps}"));
        kubectl(&["apply", "-f", &root().join(EXAMPLE).join("corpus.yaml").display().to_string()])
            .expect("the corpus");
        manifest(&["apply"], read("storage.yaml").as_bytes()).expect("the claim");
        let folder = script("claim", &["default", "lesson-3"], b"").expect("a bound claim");
        Job { name: name.to_string(), text, folder: PathBuf::from(folder.trim()).join(name) }
    }

    fn apply(&self) {
        manifest(&["apply"], self.text.as_bytes()).expect("applied");
    }

    fn object(&self) -> Value {
        get(&["mj", &self.name])
    }

    fn state(&self) -> String {
        format!("{}\n{}", self.object()["status"], operators())
    }

    fn metrics(&self) -> Vec<StepReport> {
        metrics(&self.folder)
    }

    fn step(&self) -> u64 {
        self.metrics().last().map_or(0, |line| line.step)
    }

    /// Waits for `more` further steps.
    fn go_on(&self, more: u64, limit: Duration) {
        let from = self.step();
        until(&format!("{more} steps after {from}"), limit, || self.state(), || {
            (self.step() >= from + more).then_some(())
        });
    }

    fn until_world(&self, world: u32, limit: Duration) {
        until(&format!("{world} ranks"), limit, || self.state(), || {
            self.metrics().last().filter(|line| line.world_size == world).map(drop)
        });
    }

    fn until_complete(&self, limit: Duration) {
        let timeout = format!("--timeout={}s", limit.as_secs());
        let what = format!("mj/{}", self.name);
        let said = kubectl(&["wait", "--for=condition=Complete", &timeout, &what]);
        assert!(said.good, "{said:?}\n{}", self.state());
    }

    fn pods(&self) -> Vec<Value> {
        let label = format!("moejob.dev/job={}", self.name);
        let mut pods = get(&["pods", "-l", &label]);
        pods["items"].as_array_mut().map(std::mem::take).unwrap_or_default()
    }

    /// The pod of a node, running.
    fn pod_on(&self, node: &str) -> Option<String> {
        let pods = self.pods();
        let pod = pods.iter().find(|pod| {
            pod["spec"]["nodeName"] == node && pod["status"]["phase"] == "Running"
        })?;
        Some(pod["metadata"]["name"].as_str()?.to_string())
    }

    fn losses(&self) -> BTreeMap<u64, u64> {
        losses(&self.metrics())
    }

    /// What `moejob run` makes of the same manifest.
    fn alone(&self) -> BTreeMap<u64, u64> {
        let folder = tempfile::tempdir().expect("a folder");
        std::fs::write(folder.path().join("job.yaml"), &self.text).expect("a manifest");
        let corpus = folder.path().join("corpus");
        std::fs::create_dir(&corpus).expect("a folder");
        let map = get(&["configmap", "lesson-3-corpus"]);
        for (name, text) in map["data"].as_object().expect("a corpus") {
            std::fs::write(corpus.join(name), text.as_str().expect("text")).expect("a file");
        }
        let mut command = Command::new(moejob());
        command.current_dir(folder.path()).args(["run", "job.yaml", "--workers", "1"]);
        let output = command.output().expect("moejob runs");
        assert!(output.status.success(), "{output:?}");
        losses(&metrics(folder.path()))
    }
}

/// Whole lines of the metrics that lie somewhere below a folder, in the order of their writing.
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
fn leader() -> Option<String> {
    let lease = get(&["lease", "moejob-operator", "-n", "moejob-system"]);
    let holder = lease["spec"]["holderIdentity"].as_str()?;
    Some(holder.split('_').next()?.to_string()).filter(|pod| !pod.is_empty())
}

/// The node that the leading operator runs on.
fn leading_node() -> Option<String> {
    let pod = get(&["pod", &leader()?, "-n", "moejob-system"]);
    Some(pod["spec"]["nodeName"].as_str()?.to_string())
}

/// Lead from the node that is the operator's alone: what happens to it happens to no worker.
fn lead_from_its_own_node() {
    until("an operator leads on its own node", PATIENCE, operators, || {
        let node = leading_node()?;
        if node != "operator" {
            kubectl(&["delete", "pod", "-n", "moejob-system", &leader()?, "--wait=true"]);
        }
        (node == "operator").then_some(())
    });
}

fn node(name: &str, words: &[&str]) {
    script("node", &[&[name], words].concat(), b"").expect("the node's lot");
}

#[test]
fn the_example_trains_as_it_does_on_one_machine() {
    install();
    kubectl(&["apply", "-f", &root().join(EXAMPLE).display().to_string()]).expect("applied");
    let job = Job::new("lesson-3", 300);
    job.until_complete(5 * PATIENCE);
    let (found, expected) = (job.losses(), job.alone());
    assert_eq!(found.len(), 300);
    assert_eq!(found, expected);
    let status = job.object()["status"].take();
    assert_eq!(status["phase"], "Complete");
    assert_eq!(status["step"], 300);
    let table = kubectl(&["get", "mj", "lesson-3"]).expect("the table");
    assert!(table.contains("Complete") && table.contains("300"), "{table}");
    // No worker is left running, and deletion leaves nothing but the claim and the corpus.
    kubectl(&["delete", "mj", "lesson-3", "--wait=true", "--timeout=30s"]).expect("deleted");
    nothing_is_left_of(&job);
}

fn nothing_is_left_of(job: &Job) {
    let limit = Duration::from_secs(30);
    let kinds = "pods,networkpolicies,poddisruptionbudgets,configmaps,secrets,services,leases";
    let left = || {
        let label = format!("moejob.dev/job={}", job.name);
        kubectl(&["get", kinds, "-o", "name", "-l", &label]).expect("a list")
    };
    until("nothing is left", limit, left, || left().trim().is_empty().then_some(()));
    assert!(job.folder.exists(), "the checkpoints stay");
}

/// One job through all that can happen; its losses are those of an undisturbed run.
#[test]
fn whatever_happens_the_losses_stay() {
    install();
    lead_from_its_own_node();
    let job = Job::new("disturbed", 4000);
    job.apply();
    job.until_world(2, 2 * PATIENCE);
    job.go_on(60, PATIENCE);
    a_killed_container_is_replaced(&job);
    a_cut_link_costs_seconds(&job);
    the_leaders_link_costs_nothing(&job);
    nobody_leads_and_it_trains(&job);
    job.until_complete(10 * PATIENCE);
    let (found, expected) = (job.losses(), job.alone());
    assert_eq!(found.len(), 4000);
    assert!(found == expected, "the losses differ");
    kubectl(&["delete", "mj", "disturbed", "--wait=true", "--timeout=30s"]).expect("deleted");
    nothing_is_left_of(&job);
}

fn a_killed_container_is_replaced(job: &Job) {
    let survivor = job.pod_on("worker-1").expect("a worker on worker-1");
    let killed = job.pod_on("worker-2").expect("a worker on worker-2");
    let before = job.metrics().last().map_or(0, |line| line.attempt);
    node("worker-2", &["containers", "killed"]);
    until("a new attempt", PATIENCE, || job.state(), || {
        job.metrics().last().filter(|line| line.attempt > before).map(drop)
    });
    job.until_world(2, 3 * PATIENCE);
    assert_eq!(job.pod_on("worker-1").as_ref(), Some(&survivor), "the survivor keeps its pod");
    assert_ne!(job.pod_on("worker-2"), Some(killed), "the lost pod is another's");
}

fn a_cut_link_costs_seconds(job: &Job) {
    let before = job.metrics().last().map_or(0, |line| line.attempt);
    node("worker-2", &["link", "down"]);
    let start = Instant::now();
    until("a step without worker-2", PATIENCE, || job.state(), || {
        job.metrics().last().filter(|line| line.attempt > before).map(drop)
    });
    let took = start.elapsed();
    println!("link of a worker down: next step after {:.1} s", took.as_secs_f64());
    assert!(took <= HEARTBEAT_AND_MORE, "{took:?}\n{}", job.state());
    node("worker-2", &["link", "up"]);
    job.until_world(2, 4 * PATIENCE);
}

/// Training does not notice; the standby leads, and restarts nothing.
fn the_leaders_link_costs_nothing(job: &Job) {
    let (attempt, pods) = (job.metrics().last().map_or(0, |line| line.attempt), names(job));
    node("operator", &["link", "down"]);
    let start = Instant::now();
    until("the standby leads", PATIENCE, operators, || {
        leading_node().filter(|node| node != "operator").map(drop)
    });
    let took = start.elapsed();
    println!("link of the leader down: the standby leads after {:.1} s", took.as_secs_f64());
    job.go_on(60, PATIENCE);
    node("operator", &["link", "up"]);
    assert!(took <= LEASE + HEARTBEAT_AND_MORE, "{took:?}");
    job.go_on(60, PATIENCE);
    assert_eq!(job.metrics().last().map(|line| line.attempt), Some(attempt), "{}", job.state());
    assert_eq!(names(job), pods);
}

fn nobody_leads_and_it_trains(job: &Job) {
    let (attempt, pods) = (job.metrics().last().map_or(0, |line| line.attempt), names(job));
    let scale = ["scale", "-n", "moejob-system", "deployment/moejob-operator"];
    kubectl(&[&scale[..], &["--replicas=0"]].concat()).expect("scaled");
    let end = Instant::now() + Duration::from_secs(60);
    while Instant::now() < end && job.step() + 100 < 4000 {
        job.go_on(10, Duration::from_secs(10));
    }
    kubectl(&[&scale[..], &["--replicas=2"]].concat()).expect("scaled");
    job.go_on(20, PATIENCE);
    assert_eq!(job.metrics().last().map(|line| line.attempt), Some(attempt), "{}", job.state());
    assert_eq!(names(job), pods);
}

fn names(job: &Job) -> Vec<String> {
    let name = |pod: &Value| pod["metadata"]["name"].as_str().unwrap_or_default().to_string();
    job.pods().iter().map(name).collect()
}

/// What rules and dashboard ask for is what the operator tells.
#[test]
fn alerts_and_dashboard_name_metrics_that_are_there() {
    install();
    let label = "app.kubernetes.io/component=operator";
    let pods = get(&["pods", "-n", "moejob-system", "-l", label]);
    let mut told = String::new();
    for pod in pods["items"].as_array().into_iter().flatten() {
        let name = pod["metadata"]["name"].as_str().expect("a name");
        let path = format!("/api/v1/namespaces/moejob-system/pods/{name}:8080/proxy/metrics");
        told += &kubectl(&["get", "--raw", &path]).expect("metrics");
    }
    for file in ["manifests/monitoring/alerts.yaml", "manifests/monitoring/dashboard.json"] {
        let text = std::fs::read_to_string(root().join(file)).expect(file);
        let words = text.split(|c: char| !c.is_ascii_alphanumeric() && c != '_');
        for word in words.filter(|word| word.starts_with("moejob_")) {
            let name = word.trim_end_matches("_bucket");
            assert!(told.contains(&format!("# TYPE {name} ")), "{file}: {name}\n{told}");
        }
    }
}
