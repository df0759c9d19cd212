//! Who holds and who owns what: the placement of experts, and the division of every logical
//! tensor among the ranks that hold it.
//!
//! A **holder** has the weight in its arena (all data-parallel ranks for a dense tensor, the
//! ranks of its slots for an expert). Among the holders each block of 4,096 elements has one
//! **owner**, which reduces its gradient, keeps its moments, updates it and writes it to the
//! checkpoint. Ownership is a function of the layout alone, so nobody ever sends a table of it.
//! What is divided among the holders is either each tensor or each bucket (`Division`).

use crate::mesh::{Mesh, split};
use crate::model::{ModelConfig, Param, Role};
use serde::{Deserialize, Serialize};
use std::ops::Range;

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
    /// `[layer][rank] -> experts`, ascending; uneven and repeated allowed. One row per MoE layer.
    Explicit(Vec<Vec<Vec<u32>>>),
}

/// What is cut into runs of blocks, one for each holder.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Division {
    /// Each tensor by itself: gradients are summed by a tree.
    #[default]
    Tensors,
    /// Each bucket, in equal chunks: gradients are summed in buckets.
    Buckets,
}

impl Division {
    fn is_default(&self) -> bool {
        *self == Division::default()
    }
}

/// A mesh, a placement and a division: everything ownership depends on beside the model.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Layout {
    pub mesh: Mesh,
    pub placement: Placement,
    #[serde(default, skip_serializing_if = "Division::is_default")]
    pub division: Division,
}

impl Layout {
    pub fn contiguous(mesh: Mesh) -> Layout {
        Layout { mesh, placement: Placement::Contiguous, division: Division::Tensors }
    }

    /// The same with buckets divided among their holders.
    #[must_use]
    pub fn by_buckets(self) -> Layout {
        Layout { division: Division::Buckets, ..self }
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
            Placement::Explicit(slots) => slots[mixture_row(model, layer)][rank as usize].clone(),
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

    /// The blocks of `param` that `rank` owns where tensors are divided; `index` is its position in
    /// the table. Small tensors rotate over the holders, so that no rank owns all of them.
    /// [`crate::owners::Owners`] knows both divisions.
    pub fn owned(&self, model: &ModelConfig, index: usize, param: &Param, rank: u32) -> Range<u64> {
        let holders = self.holders(model, param);
        match holders.iter().position(|holder| *holder == rank) {
            Some(position) => owned_of(param, index, holders.len(), position),
            None => 0..0,
        }
    }

    /// `(owner, blocks)` of `param` for each holder, ascending by holder, where tensors are
    /// divided.
    pub fn owners(
        &self,
        model: &ModelConfig,
        index: usize,
        param: &Param,
    ) -> Vec<(u32, Range<u64>)> {
        let holders = self.holders(model, param);
        let count = holders.len();
        let blocks = |position| owned_of(param, index, count, position);
        holders.into_iter().enumerate().map(|(position, rank)| (rank, blocks(position))).collect()
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

fn owned_of(param: &Param, index: usize, holders: usize, position: usize) -> Range<u64> {
    owned_blocks(param.numel(), index, holders, position)
}

/// The blocks that the holder at `position` of `holders` owns of the parameter at `index`.
pub(crate) fn owned_blocks(
    numel: u64,
    index: usize,
    holders: usize,
    position: usize,
) -> Range<u64> {
    let blocks = numel.div_ceil(BLOCK) as u32;
    let turn = (position + holders - index % holders) % holders;
    let run = split(blocks, holders as u32, turn as u32);
    u64::from(run.start)..u64::from(run.end)
}

/// The elements of a run of blocks of a tensor of `numel` elements.
pub fn elements(blocks: &Range<u64>, numel: u64) -> Range<u64> {
    (blocks.start * BLOCK).min(numel)..(blocks.end * BLOCK).min(numel)
}
