//! What the order of a gang's ranks costs the network between leaves.

use crate::allocate::nodes_of_group;
use crate::observed::{Gang, Observed};
use moejob_fabric::FabricFacts;
use moejob_manifest::status::FabricStatus;
use moejob_manifest::words::several;
use std::collections::BTreeMap;

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
