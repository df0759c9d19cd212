//! Nodes and pods of the API -> which nodes a job could have now, by the operator's own rules.

use crate::observe::{node_seen, requests};
use k8s_openapi::api::core::v1::{Node, Pod};
use moejob_fabric::topology::NodeInfo;
use moejob_manifest::resources::Resources;
use moejob_manifest::words::several;
use moejob_plan::allocate::Needs;
use moejob_plan::pods::LABEL_JOB_UID;
use serde::Deserialize;
use serde_json::Value;
use std::collections::BTreeMap;

/// A node and what is against a job on it; nothing is against a free one.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Judged {
    pub name: String,
    pub against: Option<String>,
    pub labels: BTreeMap<String, String>,
}

/// `own` is the uid of a job whose own pods are not in its way.
pub fn judge(nodes: &[Value], pods: &[Value], needs: &Needs, own: Option<&str>) -> Vec<Judged> {
    let mut requested: BTreeMap<&str, Resources> = BTreeMap::new();
    let mut workers: BTreeMap<&str, &str> = BTreeMap::new();
    for pod in pods {
        let phase = pod["status"]["phase"].as_str().unwrap_or_default();
        let Some(node) = pod["spec"]["nodeName"].as_str() else { continue };
        if matches!(phase, "Succeeded" | "Failed") {
            continue;
        }
        match pod["metadata"]["labels"][LABEL_JOB_UID].as_str() {
            Some(uid) if Some(uid) == own => {}
            Some(_) => {
                let job = pod["metadata"]["labels"]["moejob.dev/job"].as_str();
                workers.insert(node, job.unwrap_or("a MoeJob"));
            }
            None => {
                let asked = Pod::deserialize(pod).map(|pod| requests(&pod));
                requested.entry(node).or_default().add(&asked.unwrap_or_default());
            }
        }
    }
    let mut judged: Vec<Judged> = Vec::new();
    for node in nodes.iter().filter_map(|node| Node::deserialize(node).ok()) {
        let mut node = node_seen(node);
        node.requested = requested.remove(&*node.name).unwrap_or_default();
        let against = match workers.get(node.name.as_str()) {
            Some(job) => Some(format!("in use by {job}")),
            None => needs.refuses(&node).map(|against| against.to_string()),
        };
        judged.push(Judged { name: node.name, against, labels: node.labels });
    }
    judged
}

/// As `moejob plan` takes them.
pub fn infos(judged: &[Judged]) -> Vec<NodeInfo> {
    let info = |node: &Judged| NodeInfo {
        name: node.name.clone(),
        labels: node.labels.clone(),
        usable: node.against.is_none(),
        against: node.against.clone(),
        is_whole: false,
    };
    judged.iter().map(info).collect()
}

/// `2 of 5 nodes are free for it; 1 cordoned, 2 in use by olmoe`.
pub fn summary(judged: &[Judged]) -> String {
    let free = judged.iter().filter(|node| node.against.is_none()).count();
    let mut against: BTreeMap<&str, u32> = BTreeMap::new();
    for why in judged.iter().filter_map(|node| node.against.as_deref()) {
        *against.entry(why).or_default() += 1;
    }
    let against: Vec<String> =
        against.iter().map(|(why, count)| format!("{count} {why}")).collect();
    let rest = if against.is_empty() { String::new() } else { format!("; {}", against.join(", ")) };
    let verb = if free == 1 { "is" } else { "are" };
    format!("{free} of {} {verb} free{rest}", several(judged.len(), "node"))
}

#[cfg(test)]
mod tests {
    use super::super::job::JobView;
    use super::super::job::tests::object;
    use super::*;
    use serde_json::json;

    #[test]
    fn a_node_is_free_or_it_is_said_why_not() {
        let node = |name: &str, cpu: &str, taint: Option<&str>| {
            let taints: Vec<Value> =
                taint.iter().map(|key| json!({"key": key, "effect": "NoSchedule"})).collect();
            json!({
                "metadata": {"name": name, "labels": {}}, "spec": {"taints": taints},
                "status": {
                    "conditions": [{"type": "Ready", "status": "True"}],
                    "allocatable": {"cpu": cpu, "memory": "64Gi", "pods": "110"},
                },
            })
        };
        let pod = |node: &str, uid: Option<&str>, phase: &str| {
            let labels = match uid {
                Some(uid) => json!({"moejob.dev/job-uid": uid, "moejob.dev/job": "other"}),
                None => json!({}),
            };
            json!({
                "metadata": {"labels": labels}, "status": {"phase": phase},
                "spec": {"nodeName": node, "containers": [
                    {"resources": {"requests": {"cpu": "3500m"}}}]},
            })
        };
        let nodes = [
            node("free", "4", None),
            node("busy", "4", None),
            node("taken", "4", None),
            node("own", "4", None),
            node("tainted", "4", Some("moejob.dev/operator")),
            node("done", "4", None),
            node("starting", "4", None),
        ];
        // What its first container needs to begin is the pod's, as for the operator.
        let mut starting = pod("starting", None, "Pending");
        starting["spec"]["initContainers"] = starting["spec"]["containers"].take();
        let pods = [
            pod("busy", None, "Running"),
            pod("taken", Some("uid-b"), "Running"),
            pod("own", Some("uid-a"), "Running"),
            pod("done", None, "Succeeded"),
            starting,
        ];
        let job = JobView::read(&object("a", json!({}))).job.expect("a valid job");
        let judged = judge(&nodes, &pods, &Needs::of(&job), Some("uid-a"));
        let shown: Vec<String> = judged
            .iter()
            .map(|node| format!("{}: {}", node.name, node.against.as_deref().unwrap_or("free")))
            .collect();
        assert_eq!(
            shown,
            [
                "free: free",
                "busy: with too little cpu",
                "taken: in use by other",
                "own: free",
                "tainted: with the taint moejob.dev/operator",
                "done: free",
                "starting: with too little cpu",
            ]
        );
        assert_eq!(
            summary(&judged),
            "3 of 7 nodes are free; 1 in use by other, 1 with the taint moejob.dev/operator, \
             2 with too little cpu"
        );
        assert_eq!(infos(&judged).iter().filter(|node| node.usable).count(), 3);
    }
}
