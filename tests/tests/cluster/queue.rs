//! Which of the jobs that wait comes first.

use crate::jobs::{FOR_EVER, Job, install};
use moejob_tests::cluster::{kubectl, manifest, script};
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
/// for it, and a job that is put off gives its place to the next.
#[test]
fn the_higher_priority_is_served_first() {
    install();
    for (name, value) in [("later", 10), ("sooner", 1000)] {
        let class = json!({
            "apiVersion": "scheduling.k8s.io/v1", "kind": "PriorityClass",
            "metadata": { "name": name }, "value": value,
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
