//! Jobs under a real operator on real nodes: they train what `moejob run` trains, whatever happens
//! to pods, nodes and the operator itself.

use crate::jobs::{
    Cordoned, EXAMPLE, FOR_EVER, GROW_SOON, Job, PATIENCE, hold_to, install, lead_from_its_own_node,
    leading_node, node, operators,
};
use moejob_tests::cluster::{get, kubectl, until};
use moejob_tests::root;
use serde_json::json;
use std::time::{Duration, Instant};

/// `recovery.heartbeatTimeout` of the example, and what the bar allows beside it.
const HEARTBEAT_AND_MORE: Duration = Duration::from_secs(3 + 3);
const LEASE: Duration = Duration::from_secs(10);
/// How long nobody leads.
const AWAY: Duration = Duration::from_secs(60);

#[test]
fn the_example_trains_as_it_does_on_one_machine() {
    install();
    let job = Job::new("lesson-3", &[]);
    kubectl(&["apply", "-f", &root().join(EXAMPLE).display().to_string()]).expect("applied");
    job.until_complete(5 * PATIENCE);
    assert_eq!(job.step(), 300);
    job.assert_losses_of_one_machine();
    let status = job.status();
    assert_eq!(status["phase"], "Complete");
    assert_eq!(status["step"], 300);
    assert_eq!(status["restarts"], 0);
    let table = kubectl(&["get", "mj", "lesson-3"]).expect("the table");
    assert!(table.contains("Complete") && table.contains("300"), "{table}");
    // No worker is left running, and deletion leaves nothing but the claim and the corpus.
    job.until("its workers end", || job.running().is_empty().then_some(()));
    job.delete(true);
}

/// One job through all that can happen; its losses are those of an undisturbed run.
#[test]
fn whatever_happens_the_losses_stay() {
    install();
    lead_from_its_own_node();
    let job = Job::new("disturbed", &[FOR_EVER, GROW_SOON]);
    job.apply();
    job.until_world(2);
    job.go_on(60);
    a_killed_container_is_replaced(&job);
    a_deleted_pod_is_replaced_as_planned(&job);
    a_drained_node_comes_back(&job);
    a_cut_link_costs_seconds(&job);
    the_leaders_link_costs_nothing(&job);
    nobody_leads_and_it_trains(&job);
    nothing_is_stored_and_it_trains(&job);
    suspended_it_holds_nothing_and_goes_on(&job);
    job.assert_losses_of_one_machine();
    job.delete(true);
}

fn a_killed_container_is_replaced(job: &Job) {
    let survivor = job.pod_on("worker-1").expect("a worker on worker-1");
    let killed = job.pod_on("worker-2").expect("a worker on worker-2");
    let (before, restarts) = (job.attempt(), job.restarts());
    node("worker-2", &["containers", "killed"]);
    let start = Instant::now();
    job.until_after(before);
    println!("container killed: next step after {:.1} s", start.elapsed().as_secs_f64());
    job.until_world(2);
    assert_eq!(job.pod_on("worker-1").as_ref(), Some(&survivor), "the survivor keeps its pod");
    assert_ne!(job.pod_on("worker-2"), Some(killed), "the lost pod is another's");
    job.until("the restart is counted", || (job.restarts() == restarts + 1).then_some(()));
    let recoveries = job.status()["recoveries"].take();
    let last = recoveries.as_array().and_then(|all| all.last()).cloned().unwrap_or_default();
    for field in ["replannedMillis", "rejoinedMillis", "firstStepMillis", "stepsLost"] {
        assert!(last[field].is_u64(), "{field}: {recoveries}");
    }
    let told = job.told();
    for reason in ["WorkerLost", "Recovered"] {
        assert!(told.iter().any(|of| of == reason), "{reason}: {told:?}");
    }
    lead_from_its_own_node();
}

/// `kubectl delete pod`: the worker is asked to end, and its last checkpoint costs no restart.
fn a_deleted_pod_is_replaced_as_planned(job: &Job) {
    let (before, restarts) = (job.attempt(), job.restarts());
    let pod = job.pod_on("worker-2").expect("a worker on worker-2");
    kubectl(&["delete", "pod", &pod, "--wait=false"]).expect("deleted");
    job.until_after(before);
    job.until("another pod takes its place", || job.pod_on("worker-2").filter(|of| *of != pod));
    job.until_world(2);
    assert_eq!(job.restarts(), restarts, "a planned drain\n{}", job.state());
}

fn a_drained_node_comes_back(job: &Job) {
    let (before, restarts) = (job.attempt(), job.restarts());
    let drain = ["drain", "worker-2", "--ignore-daemonsets", "--delete-emptydir-data", "--force"];
    let ours = format!("--pod-selector=moejob.dev/job={}", job.name);
    let drained = Cordoned("worker-2".to_string());
    kubectl(&[&drain[..], &[&ours, "--timeout=90s"]].concat()).expect("drained");
    job.until_after(before);
    job.until_world(1);
    assert_eq!(job.pod_on("worker-2"), None);
    drop(drained);
    job.until_world(2);
    assert_eq!(job.restarts(), restarts, "a planned drain\n{}", job.state());
}

fn a_cut_link_costs_seconds(job: &Job) {
    let (before, survivor) = (job.attempt(), job.pod_on("worker-1"));
    node("worker-2", &["link", "down"]);
    let start = Instant::now();
    job.until_after(before);
    hold_to("link of a worker down: next step", start.elapsed(), HEARTBEAT_AND_MORE);
    node("worker-2", &["link", "up"]);
    job.until_world(2);
    assert_eq!(job.pod_on("worker-1"), survivor, "the survivor keeps its pod");
}

/// Training does not notice; the standby leads, and restarts nothing.
fn the_leaders_link_costs_nothing(job: &Job) {
    let (attempt, pods) = (job.attempt(), job.running());
    lead_from_its_own_node();
    node("operator", &["link", "down"]);
    let start = Instant::now();
    let away = until("the standby leads", PATIENCE, operators, || {
        leading_node().filter(|node| node != "operator").map(|_| start.elapsed())
    });
    job.go_on(60);
    node("operator", &["link", "up"]);
    hold_to("link of the leader down: the standby leads", away, LEASE + HEARTBEAT_AND_MORE);
    job.go_on(60);
    assert_eq!(job.attempt(), attempt, "{}", job.state());
    assert_eq!(job.running(), pods);
}

fn nobody_leads_and_it_trains(job: &Job) {
    let scale = ["scale", "-n", "moejob-system", "deployment/moejob-operator"];
    let replicas = |count: &str| {
        kubectl(&[&scale[..], &[&format!("--replicas={count}")]].concat()).expect("scaled");
    };
    trains_while(job, "no operator for 60 s", || replicas("0"), || replicas("2"));
}

/// The API server answers nothing, and whoever leads loses the lease.
fn nothing_is_stored_and_it_trains(job: &Job) {
    let etcd = |what: &str| node("control", &["etcd", what]);
    trains_while(job, "etcd stopped for 60 s", || etcd("stopped"), || {
        etcd("continued");
        until("the API server answers", PATIENCE, String::new, || {
            kubectl(&["get", "nodes"]).good.then_some(())
        });
    });
}

/// No worker is told to leave between `begin` and `end`, a minute later, and none is replaced.
fn trains_while(job: &Job, what: &str, begin: impl Fn(), end: impl Fn()) {
    let (attempt, pods) = (job.attempt(), job.running());
    begin();
    let until = Instant::now() + AWAY;
    let mut longest = Duration::ZERO;
    while Instant::now() < until {
        let start = Instant::now();
        job.go_on(10);
        longest = longest.max(start.elapsed());
    }
    println!("{what}: at most {:.1} s for ten steps", longest.as_secs_f64());
    end();
    install();
    job.until("the new leader tells how far it is", || {
        let told = job.status()["step"].as_u64()?;
        (told + 1000 >= job.step()).then_some(())
    });
    assert_eq!(job.attempt(), attempt, "{what}\n{}", job.state());
    assert_eq!(job.running(), pods, "{what}");
}

fn suspended_it_holds_nothing_and_goes_on(job: &Job) {
    let (before, restarts) = (job.attempt(), job.restarts());
    job.patch(&json!({ "suspend": true }));
    job.until_phase("Suspended");
    job.until("its pods are gone", || job.pods().is_empty().then_some(()));
    job.patch(&json!({ "suspend": false }));
    job.until_after(before);
    job.until_world(2);
    assert_eq!(job.restarts(), restarts, "{}", job.state());
}

/// What rules and dashboard ask for is what the operator tells.
#[test]
fn alerts_and_dashboard_name_metrics_that_are_there() {
    install();
    let label = "app.kubernetes.io/component=operator";
    let pods = get(&["pods", "-n", "moejob-system", "-l", label]);
    // Whoever has the role of a scraper may read them, and nobody else.
    let account = ["serviceaccount", "scraper", "-n", "moejob-system"];
    let binding = ["clusterrolebinding", "scraper", "--clusterrole=moejob-metrics",
        "--serviceaccount=moejob-system:scraper"];
    kubectl(&[&["create"], &account[..]].concat()).expect("an account");
    let token = kubectl(&["create", "token", "scraper", "-n", "moejob-system"]).expect("a token");
    let scrape = |address: &str| {
        let (server, token) = (format!("--server=https://{address}:8443"), token.trim());
        let token = format!("--token={token}");
        kubectl(&["get", "--raw", "/metrics", &server, "--insecure-skip-tls-verify", &token])
    };
    let mut told = String::new();
    let addresses = pods["items"].as_array().into_iter().flatten();
    let addresses = addresses.filter_map(|pod| pod["status"]["podIP"].as_str());
    if let Some(address) = addresses.clone().next() {
        let refused = scrape(address);
        assert!(!refused.good && refused.err.contains("may not get"), "{refused:?}");
    }
    kubectl(&[&["create"], &binding[..]].concat()).expect("a binding");
    let metrics: Vec<_> = addresses.map(scrape).collect();
    kubectl(&["delete", "clusterrolebinding", "scraper"]).expect("deleted");
    kubectl(&[&["delete"], &account[..]].concat()).expect("deleted");
    for said in metrics {
        told += &said.expect("metrics");
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
