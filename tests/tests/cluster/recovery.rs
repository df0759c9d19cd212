//! What a job does about nodes, pods and errors that are not the operator's, and what it leaves
//! behind when it is deleted.

use crate::jobs::{
    Cordoned, FOR_EVER, GROW_SOON, Job, hold_to, install, lead_from_its_own_node, node,
};
use moejob_tests::cluster::{get, kubectl, manifest};
use serde_json::{Value, json};
use std::time::{Duration, Instant};

const ONE_NODE: (&str, &str) = ("min: 1, max: 2", "min: 1, max: 1");
/// Long enough for an operator that tries again to be seen trying.
const A_WHILE: Duration = Duration::from_secs(8);
/// Two seconds where the earlier one's pods are gone at once. A new cluster's garbage collector
/// takes up to half a minute to learn of a new kind.
const MADE_AGAIN: Duration = Duration::from_secs(40);

fn other(node: &str) -> &'static str {
    if node == "worker-1" { "worker-2" } else { "worker-1" }
}

/// The only node of a job that trains there.
fn node_of(job: &Job) -> String {
    job.until("one worker runs", || {
        let running = job.running();
        (running.len() == 1).then(|| running.into_keys().next())?
    })
}

/// Before a node is maintained the job moves to another one, and pays nothing for it.
#[test]
fn a_cordon_moves_the_job() {
    install();
    let job = Job::new("moved", &[FOR_EVER, ONE_NODE, GROW_SOON]);
    job.apply();
    job.go_on(20);
    let (from, before) = (node_of(&job), job.attempt());
    let cordoned = Cordoned::new(&from);
    job.until_after(before);
    let moved = job.until("it runs elsewhere alone", || {
        let running = job.running();
        (running.len() == 1).then(|| running.into_keys().next())?.filter(|node| *node != from)
    });
    drop(cordoned);
    assert_eq!(moved, other(&from));
    assert_eq!(job.restarts(), 0, "{}", job.state());
    job.go_on(20);
    job.assert_losses_of_one_machine();
    job.delete(true);
}

#[test]
fn a_spare_takes_the_place_of_a_lost_worker() {
    install();
    lead_from_its_own_node();
    let spare = ("min: 1, max: 2", "min: 1, max: 1, spares: 1");
    let job = Job::new("spared", &[FOR_EVER, spare]);
    job.apply();
    job.until("gang and spare run", || (job.running().len() == 2).then_some(()));
    job.go_on(60);
    let ranks = job.until("the placement is told", || {
        job.status()["placement"]["ranks"].as_array().filter(|ranks| ranks.len() == 1).cloned()
    });
    let lost = ["worker-1", "worker-2"].into_iter().find(|node| {
        ranks[0].as_str().is_some_and(|text| text.contains(node))
    });
    let lost = lost.unwrap_or_else(|| panic!("{ranks:?}"));
    let (before, spare) = (job.attempt(), job.pod_on(other(lost)));
    node(lost, &["containers", "killed"]);
    job.until_after(before);
    assert_eq!(job.pod_on(other(lost)), spare, "the spare keeps its pod");
    job.until("the lost node has a spare", || job.pod_on(lost));
    assert_eq!(job.metrics().last().map(|line| line.world_size), Some(1));
    job.until("the restart is counted", || (job.restarts() == 1).then_some(()));
    job.assert_losses_of_one_machine();
    job.delete(true);
}

#[test]
fn a_budget_that_is_used_up_ends_the_job() {
    install();
    lead_from_its_own_node();
    let once = ("  checkpoint:", "  recovery: { maxRestarts: 1 }\n  checkpoint:");
    let job = Job::new("unlucky", &[FOR_EVER, ONE_NODE, once]);
    job.apply();
    for attempt in 1..=2 {
        job.until(&format!("attempt {attempt} trains"), || {
            (job.attempt() >= attempt).then_some(())
        });
        job.go_on(5);
        node(&node_of(&job), &["containers", "killed"]);
    }
    job.until_phase("Failed");
    let failed = job.condition("Failed");
    assert_eq!(failed["reason"], "RestartBudgetUsedUp", "{failed}");
    ends_and_stays_so(&job);
    job.delete(true);
}

/// The user's error is told, once, and not tried again.
#[test]
fn a_workers_exit_with_the_users_error_is_the_jobs_end() {
    install();
    let job = Job::new("mistaken", &[("corpus/*.txt", "corpus/*.none")]);
    job.apply();
    job.until_phase("Failed");
    let failed = job.condition("Failed");
    let message = failed["message"].as_str().unwrap_or_default();
    assert!(message.contains("*.none"), "{failed}");
    assert_eq!(failed["reason"], "DataOrCheckpointRefused", "{failed}");
    ends_and_stays_so(&job);
    assert!(job.pods().len() <= 2, "{:?}", job.pods());
    job.delete(false);
}

/// Nothing runs and nothing is made any more.
fn ends_and_stays_so(job: &Job) {
    // A pod that was just made for a lost worker goes, too, and may take a moment for it.
    let ended = |pod: &Value| {
        let phase = pod["status"]["phase"].as_str().unwrap_or_default();
        pod["metadata"]["deletionTimestamp"].is_null() && ["Succeeded", "Failed"].contains(&phase)
    };
    job.until("its workers end", || job.pods().iter().all(ended).then_some(()));
    let pods = names(&job.pods());
    std::thread::sleep(A_WHILE);
    assert_eq!(names(&job.pods()), pods);
    assert_eq!(job.status()["phase"], "Failed");
}

fn names(pods: &[Value]) -> Vec<String> {
    pods.iter().map(|pod| pod["metadata"]["name"].to_string()).collect()
}

/// What the kubelet says stands in the condition; the job does not start and does not fail.
#[test]
fn an_image_that_cannot_be_pulled_is_told_and_can_be_changed() {
    install();
    let image = ("spec:\n  nodes", "spec:\n  image: localhost/none:1\n  nodes");
    let job = Job::new("pictured", &[ONE_NODE, image]);
    job.apply();
    job.until("the kubelet's word is told", || {
        let planned = job.condition("Planned");
        let message = planned["message"].as_str()?;
        message.contains("localhost/none:1").then_some(())
    });
    assert_ne!(job.status()["phase"], "Failed");
    // What is wrong can be put right while it is suspended.
    job.patch(&json!({ "suspend": true }));
    job.until_phase("Suspended");
    job.patch(&json!({ "image": "localhost/moejob:test" }));
    job.patch(&json!({ "suspend": false }));
    job.until_complete(5 * crate::jobs::PATIENCE);
    job.delete(true);
}

/// As `kubectl replace --force` does it: pods of the earlier job may still have the names that the
/// new one's would have, and its claims and checkpoints lie in the storage.
#[test]
fn a_job_that_is_made_again_at_once_goes_on_from_the_earlier_one() {
    install();
    let job = Job::new("again", &[FOR_EVER]);
    job.apply();
    job.until_world(2);
    job.go_on(60);
    kubectl(&["delete", "mj", "again"]).expect("deleted");
    let before = job.attempt();
    job.apply();
    let start = Instant::now();
    job.until_after(before);
    hold_to("made again: next step", start.elapsed(), MADE_AGAIN);
    job.until_world(2);
    assert_eq!(job.restarts(), 0, "{}", job.state());
    let told = job.told();
    assert!(told.iter().any(|reason| reason == "EarlierJob"), "{told:?}");
    job.assert_losses_of_one_machine();
    job.delete(true);
}

/// A gang is all or nothing, also where the API server takes only some of its pods.
#[test]
fn a_quota_that_is_too_small_is_told_and_nothing_is_held() {
    install();
    kubectl(&["delete", "quota", "small", "--ignore-not-found"]).expect("none");
    kubectl(&["create", "quota", "small", "--hard=pods=1"]).expect("a quota");
    let both = ("min: 1, max: 2", "min: 2, max: 2");
    let soon = ("  checkpoint:", "  recovery: { gangTimeout: 5s }\n  checkpoint:");
    let job = Job::new("restrained", &[FOR_EVER, both, soon]);
    job.apply();
    let told = || {
        let planned = job.condition("Planned");
        let message = planned["message"].as_str().unwrap_or_default().to_string();
        (planned["reason"] == "PodNotCreated" && message.contains("exceeded quota: small"))
            .then_some(message)
    };
    let message = job.until("the quota is told", told);
    assert!(!message.contains("kubectl apply -k"), "its rights are not the matter: {message}");
    job.until("one pod was taken", || (job.pods().len() == 1).then_some(()));
    job.until("it is given back", || job.pods().is_empty().then_some(()));
    job.until("the quota is still told", told);
    kubectl(&["delete", "quota", "small"]).expect("deleted");
    job.until_world(2);
    job.delete(true);
}

/// The kubelet waits for it, and the operator may not read what it says of that.
#[test]
fn a_config_map_that_is_missing_is_told() {
    install();
    drop(kubectl(&["delete", "configmap", "late-corpus", "--ignore-not-found"]));
    let late = ("configMap: lesson-3-corpus", "configMap: late-corpus");
    let job = Job::new("unfed", &[FOR_EVER, ONE_NODE, late]);
    job.apply();
    job.until("the volume is told", || {
        let planned = job.condition("Planned");
        planned["message"].as_str()?.contains("ConfigMap").then_some(())
    });
    assert_eq!(job.status()["phase"], "Pending", "{}", job.state());
    let mut map = get(&["configmap", "lesson-3-corpus"]);
    map["metadata"] = json!({ "name": "late-corpus" });
    manifest(&["create"], map.to_string().as_bytes()).expect("the corpus");
    job.until_world(1);
    job.delete(true);
    kubectl(&["delete", "configmap", "late-corpus"]).expect("deleted");
}

/// Whatever a job is about to do, nothing of it is left.
#[test]
fn deletion_leaves_nothing_in_any_phase() {
    install();
    let too_large = Job::new("waiting", &[("min: 1, max: 2", "min: 9, max: 9"),
        ("globalBatchSize: 8", "globalBatchSize: 16")]);
    too_large.apply();
    too_large.until_phase("Pending");
    too_large.delete(false);
    for millis in [0, 300, 1000, 2500] {
        let job = Job::new(&format!("short-{millis}"), &[FOR_EVER]);
        job.apply();
        std::thread::sleep(Duration::from_millis(millis));
        println!("deleted {millis} ms after it was applied, {}", job.status()["phase"]);
        job.delete(false);
    }
    let suspended = Job::new("halted", &[FOR_EVER]);
    suspended.apply();
    suspended.go_on(5);
    suspended.patch(&json!({ "suspend": true }));
    // Not yet, and then.
    suspended.delete(true);
    let suspended = Job::new("halted-2", &[FOR_EVER]);
    suspended.apply();
    suspended.go_on(5);
    suspended.patch(&json!({ "suspend": true }));
    suspended.until_phase("Suspended");
    suspended.delete(true);
}
