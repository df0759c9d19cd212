//! What the order of a gang's ranks costs the network between leaves.

use crate::allocate::nodes_of_group;
use crate::fabric::FabricFacts;
use crate::observed::{Gang, Observed};
use crate::words::several;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// What the order of the ranks costs the network: links of NCCL between leaves.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct FabricStatus {
    /// All of it for a person.
    pub summary: String,
    /// Leaf switches that the gang's nodes hang on.
    pub leaves: u32,
    /// Links of the ring from leaf to leaf.
    pub ring_crossings: u32,
    /// Links of each tree from leaf to leaf.
    pub tree_crossings: Vec<u32>,
    /// Links of the ring and of both trees in the best order of as many nodes that the job has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_crossings: Option<u32>,
    /// Links from leaf to leaf beyond those: members keep their places after a loss, and get the
    /// best order again when the gang grows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price: Option<u32>,
}

/// Of a gang on several leaves.
pub(super) fn fabric(observed: &Observed, gang: &Gang) -> Option<FabricStatus> {
    let leaves: BTreeMap<&str, u32> =
        observed.nodes.iter().map(|node| (node.name.as_str(), node.leaf)).collect();
    let of = |name: &String| leaves.get(name.as_str()).copied();
    // A node that is not the job's any more: nobody knows where it lies.
    let of_members = gang.members.iter().map(|member| of(&member.node)).collect::<Option<Vec<_>>>();
    let nodes = gang.members.len() as u32;
    let group = nodes_of_group(nodes, &gang.layout);
    let present = FabricFacts::of(&of_members?, group)?;
    let best = observed.fabric.filter(|best| best.nodes == present.nodes);
    let least = best.map(|best| best.all_crossings());
    let price = least.map(|least| present.all_crossings().saturating_sub(least));
    let summary = match price {
        None | Some(0) => present.to_string(),
        Some(price) => {
            format!("{present}; {} more than in the best order", several(price, "link"))
        }
    };
    Some(FabricStatus {
        summary,
        leaves: present.leaves,
        ring_crossings: present.ring_crossings,
        tree_crossings: present.tree_crossings.to_vec(),
        least_crossings: least,
        price,
    })
}
