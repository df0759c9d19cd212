//! Nodes -> zone > rack > NVLink domain > host, from the labels that clouds and topology operators
//! put on nodes; and the order in which a job uses them.

use crate::job::Closeness;
use crate::spec::Level;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// A node as a cluster describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeInfo {
    pub name: String,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// It accepts pods: ready and not cordoned.
    #[serde(default = "yes")]
    pub usable: bool,
}

fn yes() -> bool {
    true
}

/// Labels that name a node's part at each level; the first that is there counts.
const LABELS: &[(Level, &[&str])] = &[
    (Level::Zone, &["topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"]),
    (
        Level::Rack,
        &[
            "topology.kubernetes.io/rack",
            "network.topology.nvidia.com/leaf",
            "topology.k8s.aws/network-node-layer-3",
            "cloud.google.com/gce-topology-block",
        ],
    ),
    (
        Level::NvlinkDomain,
        &[
            "network.topology.nvidia.com/accelerator",
            "nvidia.com/gpu.clique",
            "cloud.google.com/gce-topology-subblock",
        ],
    ),
    (Level::Host, &["kubernetes.io/hostname"]),
];

impl NodeInfo {
    /// The part of `level` that the node lies in, with the parts around it, so that rack 1 of one
    /// zone is not rack 1 of another. A missing label is a part of its own name.
    pub fn part(&self, level: Level) -> Vec<&str> {
        let levels = LABELS.iter().filter(|(of, _)| *of <= level);
        let label = |names: &[&str]| {
            names.iter().find_map(|name| self.labels.get(*name)).map_or("", String::as_str)
        };
        let mut part: Vec<&str> = levels.map(|(_, names)| label(names)).collect();
        if level == Level::Host && part.last().is_some_and(|host| host.is_empty()) {
            part.pop();
            part.push(&self.name);
        }
        part
    }
}

/// The nodes of a job in the order in which it uses them, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ordered {
    /// Names; neighbours in this list are neighbours in the cluster.
    pub nodes: Vec<String>,
    pub why: String,
}

/// Orders `nodes` for a job that wants at least `min` of them and uses up to `count`.
///
/// With a level, the part that has just enough nodes comes first; if that level is required, nodes
/// beyond it are left out. Parts and nodes of equal worth are taken by name, so equal inputs give
/// equal orders.
pub fn order(
    nodes: &[NodeInfo],
    wish: Option<(Level, Closeness)>,
    min: u32,
    count: u32,
) -> Ordered {
    let places = Places::new(nodes);
    let usable: Vec<usize> = (0..nodes.len()).filter(|at| nodes[*at].usable).collect();
    let (ordered, first) = places.order(&usable, wish, min, count);
    let why = match (wish, ordered.first()) {
        (None, _) => format!("{} usable nodes, neighbours beside each other", usable.len()),
        (Some(_), None) => "no node is usable".to_string(),
        (Some((level, closeness)), Some(at)) => {
            let part = nodes[*at].part(level);
            let label = part.last().copied().filter(|label| !label.is_empty());
            let label = label.unwrap_or("without a label");
            let others = if closeness == Closeness::Required { ", no others" } else { "" };
            format!("{first} nodes of {level:?} {label} first, of {}{others}", usable.len())
        }
    };
    Ordered { nodes: ordered.iter().map(|at| nodes[*at].name.clone()).collect(), why }
}

/// Where many nodes lie, looked up once.
#[derive(Clone, Debug)]
pub struct Places {
    /// The position of each node when neighbours stand beside each other.
    rank: Vec<u32>,
    /// For each level, zone first, the number of each node's part.
    parts: [Vec<u32>; 4],
}

impl Places {
    pub fn new(nodes: &[NodeInfo]) -> Places {
        let mut sorted: Vec<usize> = (0..nodes.len()).collect();
        sorted.sort_by_cached_key(|at| {
            (nodes[*at].part(Level::NvlinkDomain), natural(&nodes[*at].name))
        });
        let mut rank = vec![0; nodes.len()];
        for (position, at) in (0..).zip(&sorted) {
            rank[*at] = position;
        }
        let levels = [Level::Zone, Level::Rack, Level::NvlinkDomain, Level::Host];
        let parts = levels.map(|level| {
            let all: Vec<Vec<&str>> = nodes.iter().map(|node| node.part(level)).collect();
            let mut names: Vec<&Vec<&str>> = all.iter().collect();
            names.sort_unstable();
            names.dedup();
            all.iter().map(|part| names.binary_search(&part).unwrap_or_default() as u32).collect()
        });
        Places { rank, parts }
    }

    /// Nodes of one number lie in one part of the level.
    pub fn part(&self, level: Level, node: usize) -> u32 {
        let row = match level {
            Level::Zone => 0,
            Level::Rack => 1,
            Level::NvlinkDomain => 2,
            Level::Host => 3,
        };
        self.parts[row][node]
    }

    /// `nodes` in the order that [`order`] describes, and how many of them lie in the first part.
    pub fn order(
        &self,
        nodes: &[usize],
        wish: Option<(Level, Closeness)>,
        min: u32,
        count: u32,
    ) -> (Vec<usize>, usize) {
        let mut nodes = nodes.to_vec();
        nodes.sort_unstable_by_key(|at| self.rank[*at]);
        let Some((level, closeness)) = wish else {
            let first = nodes.len();
            return (nodes, first);
        };
        let mut parts: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for at in &nodes {
            parts.entry(self.part(level, *at)).or_default().push(*at);
        }
        // The part with the fewest spare nodes that has enough; else the largest.
        let (least, most) = (min as usize, count as usize);
        let worth = |nodes: &[usize]| {
            let size = nodes.len();
            match (size >= most, size >= least) {
                (true, _) => (0, size - most),
                (_, true) => (1, most - size),
                _ => (2, most.saturating_sub(size)),
            }
        };
        let mut ranked: Vec<Vec<usize>> = parts.into_values().collect();
        ranked.sort_by_key(|nodes| worth(nodes));
        let first = ranked.first().map_or(0, Vec::len);
        if closeness == Closeness::Required {
            ranked.truncate(1);
        }
        (ranked.concat(), first)
    }
}

/// Nodes from a file: a list of names, a list of `NodeInfo`, or what `kubectl get nodes -o json`
/// (or `-o yaml`) prints.
pub fn nodes_from(text: &str) -> Result<Vec<NodeInfo>, String> {
    let value: serde_json::Value =
        serde_saphyr::from_str(text).map_err(|error| error.to_string())?;
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
    let ready = item["status"]["conditions"].as_array().into_iter().flatten();
    let ready = ready.filter(|condition| condition["type"] == "Ready");
    let ready = ready.into_iter().all(|condition| condition["status"] == "True");
    let cordoned = item["spec"]["unschedulable"] == true;
    Ok(NodeInfo { name: name.to_string(), labels: labels.collect(), usable: ready && !cordoned })
}

/// `node-10` after `node-9`: the digits at the end count as a number.
fn natural(name: &str) -> (&str, u64, &str) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem, name[stem.len()..].parse().unwrap_or(0), name)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn node(name: &str, zone: &str, rack: &str) -> NodeInfo {
        let labels = [
            ("topology.kubernetes.io/zone", zone),
            ("network.topology.nvidia.com/leaf", rack),
        ];
        let labels = labels.iter().map(|(key, value)| (key.to_string(), value.to_string()));
        NodeInfo { name: name.to_string(), labels: labels.collect(), usable: true }
    }

    fn cluster() -> Vec<NodeInfo> {
        vec![
            node("n-10", "a", "1"),
            node("n-2", "a", "1"),
            node("n-1", "a", "2"),
            node("n-3", "b", "1"),
            node("n-4", "b", "1"),
            node("n-5", "b", "1"),
        ]
    }

    fn names(wish: Option<(Level, Closeness)>, min: u32, count: u32) -> String {
        order(&cluster(), wish, min, count).nodes.join(" ")
    }

    #[test]
    fn neighbours_stand_beside_each_other() {
        assert_eq!(names(None, 1, 6), "n-2 n-10 n-1 n-3 n-4 n-5");
    }

    #[test]
    fn the_part_that_fits_best_comes_first() {
        let rack = Some((Level::Rack, Closeness::Preferred));
        assert_eq!(names(rack, 1, 1), "n-1 n-2 n-10 n-3 n-4 n-5");
        assert_eq!(names(rack, 1, 2), "n-2 n-10 n-3 n-4 n-5 n-1");
        assert_eq!(names(rack, 1, 3), "n-3 n-4 n-5 n-2 n-10 n-1");
        assert_eq!(names(rack, 1, 6), "n-3 n-4 n-5 n-2 n-10 n-1");
    }

    #[test]
    fn a_required_level_leaves_the_others_out() {
        let rack = Some((Level::Rack, Closeness::Required));
        assert_eq!(names(rack, 2, 2), "n-2 n-10");
        let zone = Some((Level::Zone, Closeness::Required));
        assert_eq!(names(zone, 2, 3), "n-2 n-10 n-1");
    }

    #[test]
    fn nodes_are_read_from_what_a_person_or_kubectl_writes() {
        let names = |text| {
            let nodes = nodes_from(text)?;
            let shown = nodes.iter().map(|node| format!("{} {}", node.name, node.usable));
            Ok::<_, String>(shown.collect::<Vec<_>>().join(", "))
        };
        assert_eq!(names("- a\n- b\n").unwrap(), "a true, b true");
        assert_eq!(names("[{ name: a, usable: false, labels: { zone: b } }]").unwrap(), "a false");
        let kubectl = r#"{ "kind": "List", "items": [
            { "metadata": { "name": "a", "labels": { "zone": "1" } }, "spec": {},
              "status": { "conditions": [{ "type": "Ready", "status": "True" }] } },
            { "metadata": { "name": "b" }, "spec": { "unschedulable": true } },
            { "metadata": { "name": "c" },
              "status": { "conditions": [{ "type": "Ready", "status": "Unknown" }] } }] }"#;
        assert_eq!(names(kubectl).unwrap(), "a true, b false, c false");
        assert!(names("- a\n- a\n").unwrap_err().contains("twice"));
        assert!(names("a: 1").unwrap_err().contains("no list"));
        assert!(names("[{ nam: a }]").unwrap_err().contains("nam"));
    }

    #[test]
    fn nodes_that_accept_no_pods_are_left_out() {
        let mut nodes = cluster();
        nodes.iter_mut().for_each(|node| node.usable = node.name == "n-4");
        assert_eq!(order(&nodes, None, 1, 6).nodes, ["n-4"]);
        nodes[4].usable = false;
        let wish = Some((Level::Rack, Closeness::Preferred));
        assert_eq!(order(&nodes, wish, 1, 6).nodes, Vec::<String>::new());
    }
}
