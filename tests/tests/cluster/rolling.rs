//! The operator is updated and rolled back between two releases while a gang trains.
//!
//! `MOEJOB_OLDER=PROGRAM` is the program of the older one, built from its commit; without it there
//! is nothing to roll between, and the test says so. 097657f is the oldest that can be tried: what
//! it writes and reads stands in `operator/plan/tests/releases.rs`. It knows no seal of version 2,
//! so it takes pods that a newer release has made for nobody's, and replaces them.

use crate::jobs::{FOR_EVER, GROW_SOON, Job, PATIENCE, install, leader, operators};
use moejob_tests::cluster::{get, kubectl, manifest, script, until};
use moejob_tests::root;
use serde_json::json;
use std::collections::BTreeMap;

const OLDER: &str = "localhost/moejob:older";
const DEPLOYMENT: &str = "deployment/moejob-operator";

#[test]
fn releases_take_over_from_each_other_under_a_gang_that_trains() {
    let Some(program) = std::env::var_os("MOEJOB_OLDER") else {
        return println!("skipped: no program of an older release (MOEJOB_OLDER)");
    };
    install();
    script("image", &["older", &program.to_string_lossy()], b"").expect("an image");
    let rights = older_rights().to_string();
    manifest(&["apply"], rights.as_bytes()).expect("rights");
    let newer = newer();
    roll_to(OLDER);
    let job = Job::new("rolling", &[FOR_EVER, GROW_SOON]);
    job.apply();
    job.until_world(2);
    job.go_on(60);
    assert_eq!(images(&job), [OLDER, OLDER]);

    unnoticed(&job, "update", || roll_to(&newer));
    unnoticed(&job, "rollback", || roll_to(OLDER));
    unnoticed(&job, "second update", || roll_to(&newer));
    let lost = a_lost_worker_gets_its_gangs_image(&job);

    // Whoever the older leader takes the new pod for, the job trains on.
    let before = job.attempt();
    roll_to(OLDER);
    job.go_on(60);
    println!("rollback with a pod of the newer: {} attempts more", job.attempt() - before);
    roll_to(&newer);
    job.until_world(2);
    job.go_on(60);
    assert!(!job.running().values().any(|name| *name == lost), "{}", job.state());

    // Suspended it has no gang whose image a worker must have.
    job.patch(&json!({ "suspend": true }));
    job.until_phase("Suspended");
    job.until("its pods are gone", || job.pods().is_empty().then_some(()));
    let before = job.attempt();
    job.patch(&json!({ "suspend": false }));
    job.until_after(before);
    job.until_world(2);
    assert_eq!(images(&job), [&*newer, &*newer]);
    job.assert_losses_of_one_machine();
    job.delete(true);
    let delete = ["delete", "--ignore-not-found"];
    manifest(&delete, rights.as_bytes()).expect("no rights more");
}

/// The image that the manifests name, which is today's program.
fn newer() -> String {
    let text = std::fs::read_to_string(root().join("manifests/operator.yaml")).expect("manifests");
    let image = text.lines().find_map(|line| line.trim().strip_prefix("image: "));
    image.expect("the operator's image").to_string()
}

/// An operator of this image leads, and no other is left.
fn roll_to(image: &str) {
    let container = format!("operator={image}");
    kubectl(&["set", "image", "-n", "moejob-system", DEPLOYMENT, &container]).expect("set");
    let rollout = ["rollout", "status", "-n", "moejob-system", DEPLOYMENT, "--timeout=180s"];
    let said = kubectl(&rollout);
    assert!(said.good, "{said:?}\n{}", operators());
    until(&format!("an operator of {image} leads"), PATIENCE, operators, || {
        let pod = get(&["pod", &leader()?, "-n", "moejob-system"]);
        (pod["spec"]["containers"][0]["image"] == image).then_some(())
    });
}

/// No worker is told to leave, and none is replaced.
fn unnoticed(job: &Job, what: &str, roll: impl Fn()) {
    let (attempt, restarts, pods) = (job.attempt(), job.restarts(), job.running());
    roll();
    job.go_on(60);
    // Whoever leads has its status written by then, and so has read the record of the one before.
    job.until("the new leader tells how far it is", || {
        let told = job.status()["step"].as_u64()?;
        (told + 1000 >= job.step()).then_some(())
    });
    assert_eq!((job.attempt(), job.restarts()), (attempt, restarts), "{what}\n{}", job.state());
    assert_eq!(job.running(), pods, "{what}");
}

/// Under the newer leader. The name of the worker that was lost.
fn a_lost_worker_gets_its_gangs_image(job: &Job) -> String {
    let before = job.attempt();
    let lost = job.pod_on("worker-2").expect("a worker on worker-2");
    kubectl(&["delete", "pod", &lost, "--wait=false"]).expect("deleted");
    job.until_after(before);
    job.until("another pod takes its place", || job.pod_on("worker-2").filter(|of| *of != lost));
    job.until_world(2);
    assert_eq!(images(job), [OLDER, OLDER], "all of a gang run one image");
    lost
}

/// Of the job's pods that run, by their nodes.
fn images(job: &Job) -> Vec<String> {
    let running = job.running();
    let image = |pod: &serde_json::Value| {
        let name = pod["metadata"]["name"].as_str()?;
        let (node, _) = running.iter().find(|(_, of)| *of == name)?;
        let image = pod["spec"]["containers"][0]["image"].as_str()?;
        Some((node.clone(), image.to_string()))
    };
    let images: BTreeMap<String, String> = job.pods().iter().filter_map(image).collect();
    images.into_values().collect()
}

/// A release's Role comes with it. That of 097657f lets it apply policies and budgets by PATCH,
/// which today's operator never does.
fn older_rights() -> serde_json::Value {
    let meta = json!({ "name": "moejob-older", "namespace": "default" });
    let rule = |group: &str, kinds: &[&str], verbs: &[&str]| {
        json!({ "apiGroups": [group], "resources": kinds, "verbs": verbs })
    };
    let (kind, namespace) = ("ServiceAccount", "moejob-system");
    let subject = json!({ "kind": kind, "name": "moejob-operator", "namespace": namespace });
    json!({ "apiVersion": "v1", "kind": "List", "items": [
        { "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "Role", "metadata": &meta,
            "rules": [
                rule("policy", &["poddisruptionbudgets"], &["patch"]),
                rule("networking.k8s.io", &["networkpolicies"], &["patch"]),
                rule("", &["persistentvolumeclaims", "configmaps"], &["get"]),
            ] },
        { "apiVersion": "rbac.authorization.k8s.io/v1", "kind": "RoleBinding", "metadata": &meta,
            "roleRef": { "apiGroup": "rbac.authorization.k8s.io", "kind": "Role",
                "name": "moejob-older" },
            "subjects": [subject] },
    ] })
}
