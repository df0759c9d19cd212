//! GPU jobs on nodes without GPUs: these are patched on as extended resources, and by the
//! operator's switch `MOEJOB_STAND_IN` engines compute on processors. All else is as with GPUs:
//! pods of whole nodes, eight ranks a pod, recovery of an engine, a pod, a gang.

use crate::jobs::{FOR_EVER, GROW_SOON, Job, install, node, operators};
use moejob_tests::cluster::{get, kubectl, script};
use rustix::process::{Pid, Signal, kill_process};
use serde_json::{Value, json};
use std::collections::HashSet;
use std::time::Duration;

const NODES: [&str; 2] = ["worker-1", "worker-2"];
const KIND: &str = "node.kubernetes.io/instance-type";
/// A machine with eight GPUs and eight adapters.
const INSTANCE: &str = "Standard_ND96isr_H200_v5";
const ENGINES: u32 = 8;
/// The profile asks for 64 cores.
const FEW_CORES: &str = "  podTemplate: { spec: { containers: [ { name: worker, resources: { \
                         requests: { cpu: 100m } } } ] } }\n  checkpoint:";

/// Nodes that seem to have GPUs and an operator that trains without; undone when it is dropped.
struct StandIn;

impl StandIn {
    fn begin() -> StandIn {
        let of = StandIn;
        NODES.iter().for_each(|node| of.node_has(node, &ENGINES.to_string(), INSTANCE));
        of.operator("MOEJOB_STAND_IN=true");
        of
    }

    /// `count` of each device, and a kind of machine.
    fn node_has(&self, node: &str, count: &str, instance: &str) {
        let devices = json!({ "nvidia.com/gpu": count, "rdma/ib": count });
        let patch = json!({ "status": { "capacity": devices, "allocatable": devices } });
        let patch = patch.to_string();
        let patched = ["patch", "node", node, "--subresource=status", "--type=merge", "-p"];
        kubectl(&[&patched[..], &[&patch]].concat()).expect("its devices");
        let label = format!("{KIND}={instance}");
        kubectl(&["label", "--overwrite", "node", node, &label]).expect("its kind");
    }

    fn operator(&self, variable: &str) {
        let deployment = ["-n", "moejob-system", "deployment/moejob-operator"];
        let set = [&["set", "env"], &deployment[..], &[variable]].concat();
        kubectl(&set).expect("the operator's variable");
        let rollout = [&["rollout", "status"], &deployment[..], &["--timeout=180s"]].concat();
        let said = kubectl(&rollout);
        assert!(said.good, "{said:?}\n{}", operators());
    }
}

impl Drop for StandIn {
    fn drop(&mut self) {
        if std::thread::panicking() {
            // The cluster is taken down, and what failed is to be seen.
            return;
        }
        NODES.iter().for_each(|node| self.node_has(node, "0", "none"));
        self.operator("MOEJOB_STAND_IN-");
    }
}

#[test]
fn pods_of_eight_gpus_train_recover_and_rest() {
    install();
    let _stand_in = StandIn::begin();
    let job = Job::new("gpus", &[
        FOR_EVER,
        ("profile: cpu", "profile: nd-h200-v5"),
        ("globalBatchSize: 8", "globalBatchSize: 16"),
        // Of all that is changed before `checkpoint`, once.
        (GROW_SOON.0, &format!("  recovery: {{ growthInterval: 2s }}\n{FEW_CORES}")),
    ]);
    job.apply();
    job.until_world(2 * ENGINES);
    job.go_on(20);
    its_pods_ask_for_whole_nodes(&job);
    an_engine_is_replaced_in_its_pod(&job);
    a_killed_pod_is_replaced(&job);
    suspended_it_gives_the_gpus_back(&job);
    job.assert_losses_of_one_machine();
    job.delete(true);
}

fn its_pods_ask_for_whole_nodes(job: &Job) {
    let pods = job.pods();
    assert_eq!(pods.len(), 2, "{}", job.state());
    for pod in &pods {
        let resources = &pod["spec"]["containers"][0]["resources"];
        for device in ["nvidia.com/gpu", "rdma/ib"] {
            assert_eq!(resources["limits"][device], "8", "{resources}");
            assert_eq!(resources["requests"][device], "8", "{resources}");
        }
        assert!(resources["limits"]["memory"].is_string(), "{resources}");
    }
    let label = format!("moejob.dev/job={}", job.name);
    let policy = get(&["networkpolicy", "-l", &label]);
    // NCCL chooses its ports.
    let open = &policy["items"][0]["spec"]["ingress"][0];
    assert!(open["from"].is_array() && open["ports"].is_null(), "{policy}");
}

/// An engine that ends is started anew beside the seven others, in the same pod.
fn an_engine_is_replaced_in_its_pod(job: &Job) {
    let (before, restarts, pods) = (job.attempt(), job.restarts(), job.running());
    let engines = engines_on("worker-2");
    assert_eq!(engines.len(), ENGINES as usize, "{engines:?}\n{}", job.state());
    let engine = Pid::from_raw(engines[3]).expect("a process");
    kill_process(engine, Signal::KILL).expect("an engine of this test's own cluster");
    job.until_after(before);
    job.until_world(2 * ENGINES);
    job.go_on(5);
    assert_eq!(job.running(), pods, "no pod was made for it");
    assert_eq!(job.restarts(), restarts + 1, "{}", job.state());
    let told = job.until("EngineLost is told", || {
        Some(job.told()).filter(|told| told.iter().any(|reason| reason == "EngineLost"))
    });
    assert!(told.iter().any(|reason| reason == "Recovered"), "{told:?}");
}

fn a_killed_pod_is_replaced(job: &Job) {
    let before = job.attempt();
    let (kept, killed) = (job.pod_on("worker-1"), job.pod_on("worker-2"));
    node("worker-2", &["containers", "killed"]);
    job.until_after(before);
    job.until_world(2 * ENGINES);
    assert_eq!(job.pod_on("worker-1"), kept, "the survivor keeps its pod");
    assert_ne!(job.pod_on("worker-2"), killed, "the lost one is another's");
}

/// Another job gets the nodes meanwhile.
fn suspended_it_gives_the_gpus_back(job: &Job) {
    let before = job.attempt();
    job.patch(&json!({ "suspend": true }));
    job.until_phase("Suspended");
    job.until("its pods are gone", || job.pods().is_empty().then_some(()));
    job.patch(&json!({ "suspend": false }));
    job.until_after(before);
    job.until_world(2 * ENGINES);
    job.go_on(5);
}

/// Process numbers of the engines of this node's workers, as this machine sees them.
fn engines_on(node: &str) -> Vec<i32> {
    let containers = script("node", &[node, "containers"], b"").expect("a node's containers");
    let first = |line: &str| line.split(' ').next().unwrap_or_default().to_string();
    let workers: HashSet<String> = containers.lines().map(first).collect();
    let all = std::fs::read_dir("/proc").expect("/proc").flatten();
    let numbers = all.filter_map(|entry| entry.file_name().to_str()?.parse::<i32>().ok());
    let mut engines: Vec<i32> = numbers
        .filter(|pid| {
            let read = |file| std::fs::read_to_string(format!("/proc/{pid}/{file}"));
            let status = read("status").unwrap_or_default();
            let parent = status.lines().find_map(|line| line.strip_prefix("PPid:\t"));
            let words = read("cmdline").unwrap_or_default();
            parent.is_some_and(|pid| workers.contains(pid))
                && words.split('\0').nth(1) == Some("engine")
        })
        .collect();
    engines.sort_unstable();
    engines
}

/// Nobody's GPU job runs where no node has GPUs.
#[test]
fn a_job_waits_for_nodes_with_gpus() {
    install();
    let few = (GROW_SOON.0, FEW_CORES);
    let enough = ("globalBatchSize: 8", "globalBatchSize: 16");
    let job = Job::new("no-gpus", &[("profile: cpu", "profile: nd-h200-v5"), enough, few]);
    job.apply();
    job.until("it says what it waits for", || {
        let condition = job.condition("Planned");
        (condition["reason"] == "WaitingForNodes").then_some(())
    });
    // Nothing comes later either.
    std::thread::sleep(Duration::from_secs(5));
    assert_eq!(job.pods(), Vec::<Value>::new());
    job.delete(false);
}
