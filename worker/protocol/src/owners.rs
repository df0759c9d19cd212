//! Who holds and who owns each parameter of a whole table, worked out once.
//!
//! `Layout` answers for one parameter and looks through all ranks for it. A table of thousands of
//! experts is asked for every rank, so its answers are kept here: by layer and expert.

use crate::buckets::Buckets;
use crate::layout::{Division, Layout, elements, owned_blocks};
use crate::model::{ModelConfig, Param, Role};
use std::ops::Range;

/// The ranks that hold each parameter. They may change between steps, when experts move.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holders {
    all: Vec<u32>,
    /// `[layer][expert] -> ranks`, ascending; empty for a layer without experts.
    experts: Vec<Vec<Vec<u32>>>,
}

impl Holders {
    pub fn new(model: &ModelConfig, layout: &Layout) -> Holders {
        let world = layout.mesh.world();
        let of_layer = |layer| {
            if !model.is_moe_layer(layer) {
                return Vec::new();
            }
            let mut holders = vec![Vec::new(); model.experts.count as usize];
            for rank in 0..world {
                for expert in layout.experts(model, layer, rank) {
                    holders[expert as usize].push(rank);
                }
            }
            holders
        };
        let experts = (0..model.num_hidden_layers).map(of_layer).collect();
        Holders { all: (0..world).collect(), experts }
    }

    /// Ascending.
    pub fn of(&self, param: &Param) -> &[u32] {
        match param.role {
            Role::Expert { layer, expert } => &self.experts[layer as usize][expert as usize],
            _ => &self.all,
        }
    }

    pub fn holds(&self, param: &Param, rank: u32) -> bool {
        self.of(param).binary_search(&rank).is_ok()
    }
}

/// The rank that owns each element: its gradient's sum, its moments, its update, its bytes in a
/// checkpoint. Fixed for an attempt, whatever becomes of holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owners {
    holders: Holders,
    /// Where buckets are divided.
    buckets: Option<Buckets>,
}

impl Owners {
    /// Among those that hold a parameter when the attempt begins.
    pub fn new(model: &ModelConfig, layout: &Layout) -> Owners {
        let holders = Holders::new(model, layout);
        let by_bucket = layout.division == Division::Buckets;
        let buckets = by_bucket.then(|| Buckets::new(model, &model.params(), &holders));
        Owners { holders, buckets }
    }

    /// Those that hold a parameter when the attempt begins.
    pub fn holders(&self) -> &Holders {
        &self.holders
    }

    /// `(owner, elements)` of the parameter at `index` of the table, ascending by owner; nobody
    /// with nothing.
    pub fn runs(
        &self,
        index: usize,
        param: &Param,
    ) -> impl Iterator<Item = (u32, Range<u64>)> + '_ {
        let (holders, numel) = (self.holders.of(param), param.numel());
        let run = move |at| self.run(index, numel, holders, at);
        let runs = (0..holders.len()).map(move |at| (holders[at], run(at)));
        runs.filter(|(_, run)| !run.is_empty())
    }

    /// The elements of the parameter at `index` that `rank` owns.
    pub fn of(&self, index: usize, param: &Param, rank: u32) -> Range<u64> {
        let (holders, numel) = (self.holders.of(param), param.numel());
        match holders.binary_search(&rank) {
            Ok(at) => self.run(index, numel, holders, at),
            Err(_) => 0..0,
        }
    }

    /// What the holder at `at` owns of `numel` elements.
    fn run(&self, index: usize, numel: u64, holders: &[u32], at: usize) -> Range<u64> {
        let Some(buckets) = &self.buckets else {
            return elements(&owned_blocks(numel, index, holders.len(), at), numel);
        };
        let bucket = &buckets.buckets[buckets.of(index)];
        let span = bucket.span(index).expect("a parameter lies in its bucket");
        let within = |place: u64| place.saturating_sub(span.start).min(span.len);
        let chunk = at as u64 * bucket.chunk_len()..(at as u64 + 1) * bucket.chunk_len();
        within(chunk.start)..within(chunk.end)
    }
}
