//! Pods with an engine for each of two devices: an engine is killed, and its pod stays.

use crate::jobs::{FOR_EVER, Job, hold_to, install};
use moejob_tests::cluster::script;
use moejob_tests::{is_engine, send};
use rustix::process::Signal;
use serde_json::Value;
use std::time::{Duration, Instant};

/// From the death of an engine to the next step; what the issue asks of one machine.
const NEXT_STEP: Duration = Duration::from_secs(1);
const TWO_DEVICES: (&str, &str) = ("min: 1, max: 2", "devicesPerNode: 2, min: 1, max: 1");

/// Process ids of the engines on a node, as this machine counts.
fn engines_on(node: &str) -> Vec<i32> {
    let containers = script("node", &[node, "containers"], b"").expect("a node's containers");
    let mut known: Vec<i32> = (containers.lines())
        .filter_map(|line| line.split(' ').next()?.parse().ok())
        .collect();
    let mut at = 0;
    while at < known.len() {
        known.extend(children_of(known[at]));
        at += 1;
    }
    known.retain(|pid| is_engine(*pid));
    known
}

fn children_of(pid: i32) -> Vec<i32> {
    let Ok(tasks) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let children = tasks.filter_map(|task| {
        std::fs::read_to_string(task.ok()?.path().join("children")).ok()
    });
    let text = children.collect::<Vec<_>>().join(" ");
    text.split_whitespace().filter_map(|pid| pid.parse().ok()).collect()
}

fn lost(job: &Job) -> Vec<Value> {
    job.status()["enginesLost"].as_array().cloned().unwrap_or_default()
}

#[test]
fn a_killed_engine_costs_its_pod_nothing_and_is_named() {
    install();
    let job = Job::new("engines", &[FOR_EVER, TWO_DEVICES]);
    job.apply();
    job.until_world(2);
    job.go_on(30);
    let (node, pod) = job.running().pop_first().expect("a pod that runs");
    for round in 1..=3 {
        let engines = job.until("two engines", || {
            Some(engines_on(&node)).filter(|engines| engines.len() == 2)
        });
        let before = job.attempt();
        let start = Instant::now();
        send(engines[1], Signal::KILL);
        job.until_after(before);
        hold_to("an engine of two killed: next step", start.elapsed(), NEXT_STEP);
        assert_eq!(job.running().get(&node), Some(&pod), "its pod stays\n{}", job.state());
        let newest = job.until("the loss is told", || {
            Some(lost(&job)).filter(|lost| lost.len() == round)?.pop()
        });
        let place = (newest["node"].as_str(), newest["rank"].as_u64() == newest["device"].as_u64());
        assert_eq!(place, (Some(node.as_str()), true), "{newest}");
        assert_eq!(newest["cause"], "killed by signal 9", "{newest}");
        assert!(newest.get("uuid").is_none(), "processors have none: {newest}");
        job.go_on(10);
    }
    let told = job.told();
    assert!(told.iter().any(|reason| reason == "EngineLost"), "{told:?}");
    let shown = script("moe", &["show", &job.name, "--ranks"], b"").expect("the job");
    let row = |found: &str| {
        let words: Vec<&str> = found.split_whitespace().collect();
        words == ["1", pod.as_str(), node.as_str(), "1", "-"]
    };
    assert!(shown.lines().any(row) && shown.contains("Engines lost:"), "{shown}");
    assert_eq!(job.restarts(), 3, "{}", job.state());
    job.assert_losses_of_one_machine();
    job.delete(true);
}
