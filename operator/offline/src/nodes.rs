//! The nodes that a person gives: names, or what a cluster says of them.

use moejob_fabric::topology::NodeInfo;
use moejob_manifest::yaml::first_words;
use moejob_plan::allocate::{is_pause, unhealthy, unhealthy_label};
use std::collections::BTreeMap;

/// Nodes from a file: a list of names, a list of `NodeInfo`, or what `kubectl get nodes -o json`
/// (or `-o yaml`) prints.
pub fn nodes_from(text: &str) -> Result<Vec<NodeInfo>, String> {
    let value: serde_json::Value =
        serde_saphyr::from_str(text).map_err(|error| first_words(&error.to_string()))?;
    let items = match (&value, &value["items"]) {
        (_, serde_json::Value::Array(items)) | (serde_json::Value::Array(items), _) => items,
        _ => return Err("found no list; write node names, or give `kubectl get nodes`".into()),
    };
    let nodes: Vec<NodeInfo> = items.iter().map(node_from).collect::<Result<_, String>>()?;
    let mut names: Vec<&str> = nodes.iter().map(|node| node.name.as_str()).collect();
    names.sort_unstable();
    match names.windows(2).find(|pair| pair[0] == pair[1]) {
        Some(pair) => Err(format!("the node {} stands there twice", pair[0])),
        None => Ok(nodes),
    }
}

fn node_from(item: &serde_json::Value) -> Result<NodeInfo, String> {
    if let Some(name) = item.as_str() {
        return Ok(NodeInfo { name: name.to_string(), usable: true, ..NodeInfo::default() });
    }
    let Some(name) = item["metadata"]["name"].as_str() else {
        return serde_json::from_value(item.clone()).map_err(|error| error.to_string());
    };
    let labels = item["metadata"]["labels"].as_object().into_iter().flatten();
    let labels = labels.filter_map(|(key, value)| Some((key.clone(), value.as_str()?.to_string())));
    let labels = labels.collect();
    let listed = item["status"]["conditions"].as_array();
    let of = |one: &serde_json::Value| {
        let text = |field: &str| one[field].as_str().unwrap_or_default().to_string();
        ["type", "status", "reason", "message"].map(text)
    };
    let mut conditions: Vec<[String; 4]> = listed.into_iter().flatten().map(of).collect();
    // The machine goes on after seconds.
    conditions.retain(|[name, _, reason, message]| !is_pause(name, reason, message));
    let ready = conditions.iter().all(|[name, status, ..]| name != "Ready" || status == "True");
    let said = conditions.iter().map(|[name, status, ..]| (name.as_str(), status.as_str()));
    let unhealthy = unhealthy(said).or_else(|| unhealthy_label(&labels));
    let against = match (ready, item["spec"]["unschedulable"] == true) {
        (false, _) => Some("not ready".to_string()),
        (_, true) => Some("cordoned".to_string()),
        _ => unhealthy.map(|condition| format!("with the condition {condition}")),
    };
    let usable = against.is_none();
    Ok(NodeInfo { name: name.to_string(), labels, usable, against, is_whole: true })
}

/// Those that lack a label which the job's nodes must have are not usable. Of nodes that a person
/// has listed nobody knows all labels.
pub fn select(nodes: &mut [NodeInfo], selector: &BTreeMap<String, String>) {
    for node in nodes.iter_mut().filter(|node| node.is_whole && node.against.is_none()) {
        let lacks = selector.iter().find(|(key, value)| node.labels.get(*key) != Some(value));
        if let Some((key, value)) = lacks {
            node.against = Some(format!("without the label {key}={value}"));
            node.usable = false;
        }
    }
}
