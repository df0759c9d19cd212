//! Who holds and who owns what: the placement of experts, and the division of every logical
//! tensor among the ranks that hold it.
//!
//! A **holder** has the weight in its arena (all data-parallel ranks for a dense tensor, the
//! ranks of its slots for an expert). Among the holders each block of 4,096 elements has one
//! **owner**, which reduces its gradient, keeps its moments, updates it and writes it to the
//! checkpoint. Ownership is a function of the layout alone, so nobody ever sends a table of it.
//! What is divided among the holders is each bucket ([`crate::owners`]).

use crate::mesh::{Mesh, split};
use crate::model::{ModelConfig, Param, Role};
use serde::de::IgnoredAny;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Elements of a block: the unit of ownership, of statistics and of checkpoint pieces.
pub const BLOCK: u64 = 4096;

/// Slots: which logical experts a rank holds.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Placement {
    /// Each expert group holds every expert once, in contiguous runs over ep that differ by at
    /// most one; the same in all layers and all groups.
    Contiguous,
    /// Each expert group holds every expert once: contiguous runs over ep, that differ by at most
    /// one, of this order of them. `[layer] -> experts`, one row per MoE layer, each a permutation.
    Ordered(Vec<Vec<u32>>),
}

/// A mesh and a placement: everything ownership depends on beside the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", from = "Written")]
pub struct Layout {
    pub mesh: Mesh,
    pub placement: Placement,
}

/// A layout in a checkpoint. Those of GPUs say `division` where they were written before
/// November 2026: processors divided tensors then, and now all divide buckets.
#[derive(Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Written {
    mesh: Mesh,
    placement: Placement,
    #[serde(default)]
    #[allow(dead_code, reason = "it is read, and says nothing")]
    division: IgnoredAny,
}

impl From<Written> for Layout {
    fn from(Written { mesh, placement, .. }: Written) -> Layout {
        Layout { mesh, placement }
    }
}

impl Layout {
    pub fn contiguous(mesh: Mesh) -> Layout {
        Layout { mesh, placement: Placement::Contiguous }
    }

    /// Experts of `layer` that `rank` holds, or slices of them, ascending.
    pub fn experts(&self, model: &ModelConfig, layer: u32, rank: u32) -> Vec<u32> {
        match &self.placement {
            Placement::Contiguous => {
                let ep = self.mesh.coord(rank).ep;
                split(model.slices().count, self.mesh.ep, ep).collect()
            }
            Placement::Ordered(orders) => {
                let ep = self.mesh.coord(rank).ep;
                let run = split(model.slices().count, self.mesh.ep, ep);
                let order = &orders[mixture_row(model, layer)];
                let mut held = order[run.start as usize..run.end as usize].to_vec();
                held.sort_unstable();
                held
            }
        }
    }

    /// For a token of `rank`: the rank that computes each expert of `layer`, a member of the
    /// expert group of `rank` that holds it (the lowest in ep order).
    pub fn expert_ranks(&self, model: &ModelConfig, layer: u32, rank: u32) -> Vec<u32> {
        let mut ranks = vec![u32::MAX; model.slices().count as usize];
        for member in self.mesh.expert_group(rank) {
            for expert in self.experts(model, layer, member) {
                let at = &mut ranks[expert as usize];
                *at = (*at).min(member);
            }
        }
        ranks
    }

    /// Every expert of every MoE layer is held in every expert group.
    pub fn covers(&self, model: &ModelConfig) -> bool {
        let layers = (0..model.num_hidden_layers).filter(|layer| model.is_moe_layer(*layer));
        layers.into_iter().all(|layer| {
            (0..self.mesh.world())
                .all(|rank| !self.expert_ranks(model, layer, rank).contains(&u32::MAX))
        })
    }

    /// Ranks that hold `param`, ascending.
    pub fn holders(&self, model: &ModelConfig, param: &Param) -> Vec<u32> {
        let ranks = 0..self.mesh.world();
        match param.role {
            Role::Expert { layer, expert } => ranks
                .filter(|rank| self.experts(model, layer, *rank).binary_search(&expert).is_ok())
                .collect(),
            _ => ranks.collect(),
        }
    }
}

/// The rank that keeps the second copy of each rank's snapshot: that of the same place on the next
/// node, so that each rank of a node sends to another one. None: there is one node.
pub fn buddies(node_of_rank: &[u32]) -> Vec<Option<u32>> {
    let mut ranks: Vec<(u32, Vec<u32>)> = Vec::new();
    let mut at = BTreeMap::new();
    let mut seats = Vec::new();
    for (rank, node) in (0..).zip(node_of_rank) {
        let node = *at.entry(*node).or_insert_with(|| {
            ranks.push((*node, Vec::new()));
            ranks.len() - 1
        });
        seats.push((node, ranks[node].1.len()));
        ranks[node].1.push(rank);
    }
    let buddy = |(node, place): (usize, usize)| {
        let next = &ranks[(node + 1) % ranks.len()].1;
        (ranks.len() > 1).then(|| next[place % next.len()])
    };
    seats.into_iter().map(buddy).collect()
}

/// Which of the MoE layers `layer` is.
pub(crate) fn mixture_row(model: &ModelConfig, layer: u32) -> usize {
    (0..layer).filter(|layer| model.is_moe_layer(*layer)).count()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By node of each rank, as a letter: who keeps whose second copy.
    fn told(nodes: &str) -> String {
        let nodes: Vec<u32> = nodes.bytes().map(u32::from).collect();
        let of = |buddy: Option<u32>| buddy.map_or("-".to_string(), |rank| rank.to_string());
        buddies(&nodes).into_iter().map(of).collect::<Vec<_>>().join(" ")
    }

    #[test]
    fn each_rank_of_a_node_sends_its_copy_to_another_one_of_the_next_node() {
        assert_eq!(told("aaaabbbb"), "4 5 6 7 0 1 2 3");
        assert_eq!(told("aabbcc"), "2 3 4 5 0 1");
        assert_eq!(told("abab"), "1 0 3 2");
        // A node with fewer ranks keeps copies of several.
        assert_eq!(told("aaabbc"), "3 4 3 5 5 0");
        assert_eq!(told("aaa"), "- - -");
        assert_eq!(told(""), "");
    }
}
