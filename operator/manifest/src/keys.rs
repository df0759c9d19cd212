//! The labels that name a node's part at each level.

use crate::problem::{Code, Problem};
use crate::read::Shaped;
use crate::spec::Level;
use serde_json::{Value as Json, json};
use std::collections::BTreeMap;

/// Where hosts stand in a path; wider parts come before, from the zone on.
pub const HOST: usize = 12;

/// Where a level stands in a path.
pub fn depth(level: Level) -> usize {
    match level {
        Level::Zone => 0,
        Level::Tier9 => 1,
        Level::Tier8 => 2,
        Level::Tier7 => 3,
        Level::Tier6 => 4,
        Level::Tier5 => 5,
        Level::Tier4 => 6,
        Level::Tier3 => 7,
        Level::Tier2 => 8,
        Level::Tier1 => 9,
        Level::Tier0 | Level::Leaf | Level::Rack => 10,
        Level::NvlinkDomain => 11,
        Level::Host => HOST,
    }
}

/// What clouds and topology operators write. Topograph's own labels come first: where it runs it
/// knows best. The names of `network.topology.nvidia.com` are its older ones, which only some still
/// configure. AWS counts layers from the core, Topograph tiers from the node.
const LABELS: &[(Level, &[&str])] = &[
    (Level::Zone, &["topology.kubernetes.io/zone", "failure-domain.beta.kubernetes.io/zone"]),
    (
        Level::Tier2,
        &["network.topology.nvidia.com/core", "topology.k8s.aws/network-node-layer-1"],
    ),
    (
        Level::Tier1,
        &[
            "network.topology.nvidia.com/spine",
            "topology.k8s.aws/network-node-layer-2",
            "ib.coreweave.cloud/superpod",
            "crusoe.ai/ib.partition.id",
        ],
    ),
    (
        Level::Tier0,
        &[
            "topology.kubernetes.io/rack",
            "network.topology.nvidia.com/leaf",
            "topology.k8s.aws/network-node-layer-3",
            "ib/torset",
            "ib.coreweave.cloud/leafgroup",
            "backend.coreweave.cloud/leafgroup",
            "crusoe.ai/pod.id",
            "cloud.google.com/gce-topology-block",
        ],
    ),
    (
        Level::NvlinkDomain,
        &[
            "accelerator.topograph.run/sub-domain",
            "accelerator.topograph.run/domain",
            "network.topology.nvidia.com/accelerator",
            "nvidia.com/gpu.clique",
            "cloud.google.com/gce-topology-subblock",
        ],
    ),
    (Level::Host, &["kubernetes.io/hostname"]),
];

/// Topograph's tiers, any depth of them.
const TOPOGRAPH: &str = "fabric.topograph.run/tier-";

/// An admin's own file among the profiles.
pub const FILE: &str = "fabric.yaml";

/// Labels by where their level stands in a path; the first that a node has counts.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Keys(Vec<Vec<String>>);

impl Default for Keys {
    fn default() -> Keys {
        let mut keys = vec![Vec::new(); HOST + 1];
        for (tier, at) in (0..=9).zip((1..=depth(Level::Tier0)).rev()) {
            keys[at].push(format!("{TOPOGRAPH}{tier}"));
        }
        for (level, labels) in LABELS {
            keys[depth(*level)].extend(labels.iter().map(|label| label.to_string()));
        }
        Keys(keys)
    }
}

impl Keys {
    /// The known labels behind those of an admin's `fabric.yaml`:
    /// `levels: { leaf: [example.org/switch], tier-1: [example.org/row] }`.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn read(bytes: &[u8]) -> Result<Keys, Vec<Problem>> {
        let shaped = Shaped::read(bytes, &schema());
        let Some(json) = shaped.json.filter(|_| shaped.problems.is_empty()) else {
            return Err(shaped.problems);
        };
        let mut keys = Keys::default();
        for (name, labels) in json["levels"].as_object().into_iter().flatten() {
            let Ok(level) = serde_json::from_value::<Level>(json!(name)) else {
                // The schema knows the same names; a test compares them.
                return Err(vec![Problem::new(Code::NotOneOf, format!("levels.{name}"))]);
            };
            let labels = labels.as_array().into_iter().flatten().filter_map(Json::as_str);
            let own = labels.map(str::to_string);
            keys.0[depth(level)].splice(0..0, own);
        }
        Ok(keys)
    }

    /// The value of each level, from wide to narrow; empty where the node has no such label.
    pub fn values<'n>(
        &self,
        labels: &'n BTreeMap<String, String>,
    ) -> impl Iterator<Item = &'n str> {
        self.0.iter().map(|keys| {
            keys.iter().find_map(|key| labels.get(key)).map_or("", String::as_str)
        })
    }
}

/// Words of `Level`, from wide to narrow.
pub const LEVELS: &[&str] = &[
    "zone", "tier-9", "tier-8", "tier-7", "tier-6", "tier-5", "tier-4", "tier-3", "tier-2",
    "tier-1", "tier-0", "leaf", "rack", "nvlink-domain", "host",
];

fn schema() -> Json {
    let label = json!({ "type": "string", "minLength": 1, "maxLength": 317 });
    let labels = json!({ "type": "array", "minItems": 1, "maxItems": 16, "items": label });
    let levels = LEVELS.iter().map(|name| (name.to_string(), labels.clone()));
    json!({
        "type": "object",
        "required": ["version", "levels"],
        "properties": {
            "version": {
                "description": "1, the version of this form",
                "type": "integer", "minimum": 1, "maximum": 1,
            },
            "levels": {
                "description": "The labels of each level, the first that a node has counts",
                "type": "object",
                "properties": levels.collect::<serde_json::Map<_, _>>(),
            },
        },
    })
}
