//! Who holds and who owns each parameter of a whole table, worked out once.
//!
//! `Layout` answers for one parameter and looks through all ranks for it. A table of thousands of
//! experts is asked for every rank, so its answers are kept here: by layer and expert.

use crate::buckets::Buckets;
use crate::layout::{Layout, Placement, mixture_row};
use crate::mesh::split;
use crate::model::{ModelConfig, Param, Role};
use crate::zero::{Turn, Zero};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// The ranks that hold each parameter. They may change between steps, when experts move.
///
/// Thousands of experts have few different holders, so sets of ranks are kept once.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Holders {
    /// Different sets of ranks, ascending each; the first is all.
    sets: Vec<Arc<[u32]>>,
    /// `[expert] -> set`, different ones.
    rows: Vec<Vec<usize>>,
    /// By layer: its row; none where it has no experts.
    layers: Vec<Option<usize>>,
}

impl Holders {
    pub fn new(model: &ModelConfig, layout: &Layout) -> Holders {
        let mut sets = Interned::new((0..layout.mesh.world()).collect());
        let mut rows: Vec<Vec<usize>> = Vec::new();
        let mut layers = Vec::new();
        for layer in 0..model.num_hidden_layers {
            if !model.is_moe_layer(layer) {
                layers.push(None);
                continue;
            }
            // Contiguous runs are the same in all layers.
            if layout.placement == Placement::Contiguous && !rows.is_empty() {
                layers.push(Some(0));
                continue;
            }
            let row = match &layout.placement {
                Placement::Contiguous => sets.contiguous(model, layout),
                Placement::Ordered(orders) => {
                    let by_place = sets.contiguous(model, layout);
                    let mut row = vec![0; by_place.len()];
                    for (expert, set) in orders[mixture_row(model, layer)].iter().zip(by_place) {
                        row[*expert as usize] = set;
                    }
                    row
                }
            };
            let known = rows.iter().position(|known| *known == row);
            layers.push(Some(known.unwrap_or(rows.len())));
            if known.is_none() {
                rows.push(row);
            }
        }
        Holders { sets: sets.sets, rows, layers }
    }

    /// Different sets of ranks that hold something, ascending each.
    pub(crate) fn sets(&self) -> &[Arc<[u32]>] {
        &self.sets
    }

    /// Which of `sets` holds what has that role.
    pub(crate) fn set(&self, role: Role) -> usize {
        match role {
            Role::Expert { layer, expert } => self.row(layer)[expert as usize],
            _ => 0,
        }
    }

    /// The same of each expert of a layer that has some.
    pub(crate) fn row(&self, layer: u32) -> &[usize] {
        &self.rows[self.layers[layer as usize].expect("a layer with experts")]
    }

    /// Ascending.
    pub fn of(&self, param: &Param) -> &[u32] {
        &self.sets[self.set(param.role)]
    }

    pub fn holds(&self, param: &Param, rank: u32) -> bool {
        self.of(param).binary_search(&rank).is_ok()
    }
}

/// Sets of ranks as they are found.
struct Interned {
    sets: Vec<Arc<[u32]>>,
    known: BTreeMap<Arc<[u32]>, usize>,
}

impl Interned {
    fn new(all: Arc<[u32]>) -> Interned {
        Interned { known: BTreeMap::from([(all.clone(), 0)]), sets: vec![all] }
    }

    fn intern(&mut self, set: Vec<u32>) -> usize {
        if let Some(at) = self.known.get(&set[..]) {
            return *at;
        }
        let set: Arc<[u32]> = set.into();
        self.sets.push(set.clone());
        self.known.insert(set, self.sets.len() - 1);
        self.sets.len() - 1
    }

    /// Each run of experts is held by the ranks of one place on the ep axis.
    fn contiguous(&mut self, model: &ModelConfig, layout: &Layout) -> Vec<usize> {
        let (mesh, count) = (layout.mesh, model.slices().count);
        let mut places = vec![Vec::new(); mesh.ep as usize];
        for rank in 0..mesh.world() {
            places[mesh.coord(rank).ep as usize].push(rank);
        }
        let mut row = Vec::with_capacity(count as usize);
        for (ep, place) in (0..).zip(places) {
            let run = split(count, mesh.ep, ep);
            if !run.is_empty() {
                let set = self.intern(place);
                row.extend(run.map(|_| set));
            }
        }
        row
    }
}

/// The rank that owns each element: its gradient's sum, its moments, its update, its bytes in a
/// checkpoint. Fixed for an attempt, whatever becomes of holders.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Owners {
    holders: Holders,
    buckets: Buckets,
    /// Which of them have weights with all their holders.
    zero: Zero,
}

impl Owners {
    /// Among those that hold a parameter when the attempt begins.
    pub fn new(model: &ModelConfig, layout: &Layout) -> Owners {
        let holders = Holders::new(model, layout);
        let buckets = Buckets::new(model, &model.params(), &holders);
        Owners { holders, buckets, zero: Zero::default() }
    }

    /// The same where dense parameters lie with their owners by this stage.
    #[must_use]
    pub fn in_stage(self, zero: Zero) -> Owners {
        Owners { zero, ..self }
    }

    /// Whether every holder of the parameter at `index` has all of its weights, and not its owners
    /// alone what they own.
    pub fn is_whole(&self, index: usize) -> bool {
        let bucket = &self.buckets.buckets[self.buckets.of(index)];
        !self.zero.divides_weights() || Turn::of(bucket.kind, bucket.holders.len()).is_none()
    }

    /// The elements of the parameter at `index` whose weights `rank` keeps from step to step.
    pub fn kept(&self, index: usize, param: &Param, rank: u32) -> Range<u64> {
        match (self.holders.holds(param, rank), self.is_whole(index)) {
            (true, true) => 0..param.numel(),
            (true, false) => self.of(index, param, rank),
            (false, _) => 0..0,
        }
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
        let holders = self.holders.of(param);
        let run = move |at| self.run(index, at);
        let runs = (0..holders.len()).map(move |at| (holders[at], run(at)));
        runs.filter(|(_, run)| !run.is_empty())
    }

    /// The elements of the parameter at `index` that `rank` owns.
    pub fn of(&self, index: usize, param: &Param, rank: u32) -> Range<u64> {
        match self.holders.of(param).binary_search(&rank) {
            Ok(at) => self.run(index, at),
            Err(_) => 0..0,
        }
    }

    /// What the holder at `at` owns of the parameter at `index`.
    fn run(&self, index: usize, at: usize) -> Range<u64> {
        let bucket = &self.buckets.buckets[self.buckets.of(index)];
        let span = bucket.span(index).expect("a parameter lies in its bucket");
        let within = |place: u64| place.saturating_sub(span.start).min(span.len);
        let chunk = at as u64 * bucket.chunk_len()..(at as u64 + 1) * bucket.chunk_len();
        within(chunk.start)..within(chunk.end)
    }
}
