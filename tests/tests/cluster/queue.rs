//! Which of the jobs that wait comes first.

use crate::jobs::{Cordoned, FOR_EVER, Job, install, operators};
use moejob_tests::cluster::{get, kubectl, manifest, script};
use serde_json::json;

/// All nodes or none.
const BOTH_NODES: (&str, &str) = ("min: 1, max: 2", "min: 2, max: 2");
const LOW: (&str, &str) = ("spec:\n  nodes", "spec:\n  priorityClassName: later\n  nodes");
const HIGH: (&str, &str) = ("spec:\n  nodes", "spec:\n  priorityClassName: sooner\n  nodes");

/// Names in the order of `kubectl moe queue`.
fn queue() -> Vec<String> {
    let table = script("moe", &["queue", "--no-headers"], b"").expect("the queue");
    let name = |line: &str| line.split_whitespace().next().map(str::to_string);
    table.lines().filter_map(name).collect()
}

fn until_it_waits(job: &Job) {
    job.until("it is told what it waits for", || {
        let planned = job.condition("Planned");
        (planned["reason"] == "WaitingForNodes").then_some(())
    });
    assert_eq!(job.status()["nodes"]["ready"], 0, "{}", job.state());
}

/// Of two that wait the one of the higher class, although it came later; what runs is not disturbed
/// for it, as its class says, and a job that is put off gives its place to the next.
#[test]
fn the_higher_priority_is_served_first() {
    install();
    for (name, value) in [("later", 10), ("sooner", 1000)] {
        let class = json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": { "name": name }, "value": value, "preemptionPolicy": "Never",
        });
        manifest(&["apply"], class.to_string().as_bytes()).expect("a class");
    }
    let holder = Job::new("holder", &[BOTH_NODES, FOR_EVER]);
    holder.apply();
    holder.until_world(2);
    let low = Job::new("patient", &[BOTH_NODES, FOR_EVER, LOW]);
    low.apply();
    until_it_waits(&low);
    let high = Job::new("urgent", &[BOTH_NODES, FOR_EVER, HIGH]);
    high.apply();
    until_it_waits(&high);
    holder.go_on(10);
    assert_eq!(queue(), ["holder", "urgent", "patient"]);
    assert_eq!((holder.attempt(), holder.restarts()), (1, 0), "{}", holder.state());
    assert!(low.pods().is_empty() && high.pods().is_empty());

    holder.delete(true);
    high.until_world(2);
    until_it_waits(&low);
    assert_eq!(queue(), ["urgent", "patient"]);
    assert!(low.pods().is_empty(), "{}", low.state());
    for pod in high.pods() {
        assert_eq!(pod["spec"]["priority"], 1000, "{pod:#}");
    }

    // A job that is held holds nothing; it waits when it comes back, and goes on where it was.
    high.patch(&json!({ "suspend": true }));
    low.until_world(2);
    high.until_phase("Suspended");
    let before = high.attempt();
    high.patch(&json!({ "suspend": false }));
    until_it_waits(&high);
    low.go_on(10);
    assert_eq!((low.attempt(), low.restarts()), (1, 0), "{}", low.state());
    low.delete(true);
    high.until_after(before);
    high.assert_losses_of_one_machine();
    high.delete(true);
    kubectl(&["delete", "priorityclass", "later", "sooner"]).expect("deleted");
}

/// A node that is missing is shown by a pod which no node takes, and which no gate holds back. Once
/// there is a node the job has it, and nothing of the kind is left.
#[test]
fn an_autoscaler_sees_a_pod_for_each_node_that_is_missing() {
    install();
    let nodes = get(&["nodes", "-l", "moejob.dev/node=worker"]);
    let names = nodes["items"].as_array().into_iter().flatten();
    let names = names.filter_map(|node| node["metadata"]["name"].as_str());
    let Some(cordoned) = names.max() else { panic!("no node\n{}", operators()) };
    let cordoned = Cordoned::new(cordoned);
    let job = Job::new("grower", &[BOTH_NODES, FOR_EVER]);
    job.apply();
    let placeholder = job.until("a placeholder that no node takes", || {
        let pod = job.placeholders().pop()?;
        let conditions = pod["status"]["conditions"].as_array().into_iter().flatten();
        let reasons: Vec<&str> = conditions.filter_map(|of| of["reason"].as_str()).collect();
        reasons.contains(&"Unschedulable").then_some(pod)
    });
    assert!(placeholder["spec"]["schedulingGates"].is_null(), "{placeholder:#}");
    assert!(placeholder["spec"]["nodeName"].is_null(), "{placeholder:#}");
    assert_eq!(job.placeholders().len(), 1, "{}", job.state());
    assert!(job.told().contains(&"NodesMissing".to_string()), "{:?}", job.told());
    job.until("people are told of it", || {
        let planned = job.condition("Planned");
        planned["message"].as_str()?.contains("a placeholder pod shows").then_some(())
    });
    drop(cordoned);
    job.until_world(2);
    job.until("no placeholder is left", || job.placeholders().is_empty().then_some(()));
    assert_eq!((job.attempt(), job.restarts()), (1, 0), "{}", job.state());
    job.delete(true);
}
