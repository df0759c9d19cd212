//! What an order of ranks costs the fabric, for people.

use super::trees::{Crossings, crossings, ring_optimum};
use moejob_manifest::words::several;
use serde::Serialize;
use std::fmt;

/// Of a gang on several leaves. Links are those that NCCL makes between nodes.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct FabricFacts {
    pub nodes: u32,
    pub leaves: u32,
    /// Links of the ring between leaves, and the fewest that there can be.
    pub ring_crossings: u32,
    pub ring_optimum: u32,
    /// Links of both trees between leaves.
    pub tree_crossings: [u32; 2],
    /// Nodes of an expert group.
    pub group_nodes: u32,
    /// Expert groups that lie on one leaf each, of how many.
    pub groups_within: u32,
    pub groups: u32,
}

impl FabricFacts {
    /// Of nodes in the order of their ranks, each given by the number of its leaf; none where there
    /// is one leaf.
    pub fn of(leaves: &[u32], group: u32) -> Option<FabricFacts> {
        let optimum = ring_optimum(leaves);
        let Crossings { ring, trees } = crossings(leaves);
        let within = leaves.chunks_exact(group.max(1) as usize);
        let is_within = |of: &&[u32]| of.iter().all(|leaf| *leaf == of[0]);
        (optimum > 0).then(|| FabricFacts {
            nodes: leaves.len() as u32,
            leaves: optimum,
            ring_crossings: ring,
            ring_optimum: optimum,
            tree_crossings: trees,
            group_nodes: group,
            groups: within.len() as u32,
            groups_within: within.filter(is_within).count() as u32,
        })
    }
}

impl FabricFacts {
    /// Of the ring and of both trees.
    pub fn all_crossings(&self) -> u32 {
        self.ring_crossings + self.tree_crossings.iter().sum::<u32>()
    }
}

impl fmt::Display for FabricFacts {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let FabricFacts { leaves, ring_crossings, ring_optimum, tree_crossings, .. } = self;
        write!(
            f,
            "on {leaves} leaves the ring crosses {ring_crossings} times (at best {ring_optimum}), \
             the trees {} and {}",
            tree_crossings[0], tree_crossings[1]
        )?;
        match self.group_nodes {
            0 | 1 => Ok(()),
            _ => {
                let groups = several(self.groups, "expert group");
                write!(f, "; {} of {groups} on one leaf", self.groups_within)
            }
        }
    }
}
