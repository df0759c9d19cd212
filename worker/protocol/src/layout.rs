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

    /// The rank that keeps the second copy of `rank`'s snapshot: the next one on another node.
    pub fn buddy(&self, rank: u32, node_of_rank: &[u32]) -> Option<u32> {
        let world = self.mesh.world();
        (1..world)
            .map(|step| (rank + step) % world)
            .find(|other| node_of_rank[*other as usize] != node_of_rank[rank as usize])
    }
}

/// Which of the MoE layers `layer` is.
pub(crate) fn mixture_row(model: &ModelConfig, layer: u32) -> usize {
    (0..layer).filter(|layer| model.is_moe_layer(*layer)).count()
}
