//! The ranks that together hold every expert, as seen by one of them.

use moejob_kernels::{Buffer, Device};
use moejob_protocol::buffers::Layer;
use moejob_protocol::layout::Layout;
use moejob_protocol::model::ModelConfig;
use moejob_protocol::rails::Rails;
use moejob_protocol::rows::{RowCounts, row_counts};
use std::ops::Range;

#[derive(Clone, Debug)]
pub struct ExpertGroup {
    /// In ep order.
    pub ranks: Vec<u32>,
    /// Where this rank stands among them.
    pub me: usize,
    /// Between GPUs its tokens travel along these; none: from each to each.
    pub rails: Option<Rails>,
    pub(crate) layers: Vec<Homes>,
    /// By position: rows with even routing, and at most.
    counts: Vec<[RowCounts; 2]>,
    /// Routed memory that is committed, over that of even routing; none: for the worst case.
    headroom: Option<f64>,
}

/// Where the experts of one layer are computed.
#[derive(Clone, Debug, Default)]
pub(crate) struct Homes {
    /// `[expert]`: place in the order by (owner, expert).
    order: Vec<u32>,
    /// `[position]`: the first place of an owner, and one more entry at the end.
    first: Vec<u32>,
}

impl ExpertGroup {
    /// `tokens` of a micro-batch.
    pub fn new(model: &ModelConfig, layout: &Layout, rank: u32, tokens: u64) -> ExpertGroup {
        let ranks = layout.mesh.expert_group(rank);
        let me = ranks.iter().position(|member| *member == rank).expect("a rank is in its group");
        let homes = |layer| match model.is_moe_layer(layer) {
            true => Homes::new(model, layout, rank, layer, &ranks),
            false => Homes::default(),
        };
        let layers = (0..model.num_hidden_layers).map(homes).collect();
        let counts = |rank: &u32| <[RowCounts; 2]>::from(row_counts(model, layout, *rank, tokens));
        let counts = ranks.iter().map(counts).collect();
        ExpertGroup { ranks, me, rails: None, layers, counts, headroom: None }
    }

    /// The same, whose tokens travel along rails, if there are some.
    #[must_use]
    pub(crate) fn along(self, rails: Option<Rails>) -> ExpertGroup {
        let all = |rails: Rails| rails.nodes * rails.places;
        assert!(rails.is_none_or(|rails| all(rails) == self.ranks.len()), "{rails:?}");
        ExpertGroup { rails, ..self }
    }

    /// Those with which this rank exchanges tokens in one stage: with rails the ranks of its node.
    pub(crate) fn near(&self) -> &[u32] {
        match self.rails {
            Some(rails) => &self.ranks[rails.on_node(rails.node(self.me))],
            None => &self.ranks,
        }
    }

    /// Commits memory for `headroom` times the rows of even routing, at most the worst case.
    pub fn commit(&mut self, headroom: f64) {
        self.headroom = Some(headroom.max(1.0));
    }

    /// Commits a quarter more; false where that is the worst case already. A function of what all
    /// ranks know, so that all grow alike.
    pub(crate) fn grow(&mut self) -> bool {
        let rooms = |group: &ExpertGroup| -> Vec<usize> {
            (0..group.counts.len()).map(|position| group.room_of(position)).collect()
        };
        let before = rooms(self);
        self.headroom = self.headroom.map(|headroom| 1.25 * headroom);
        rooms(self) != before
    }

    /// Those with which it exchanges parcels: with rails the others of its own, and of its node.
    pub(crate) fn partners(&self) -> Vec<u32> {
        match self.rails {
            Some(rails) => {
                let here = rails.on_node(rails.node(self.me)).filter(|at| *at != self.me);
                rails.along(self.me).chain(here).map(|position| self.ranks[position]).collect()
            }
            None if self.is_alone() => Vec::new(),
            None => self.ranks.clone(),
        }
    }

    /// Routed rows that this rank has memory for. A processor's memory is committed page by page as
    /// it is touched, so that there is room for the worst case from the beginning.
    pub(crate) fn room(&self) -> usize {
        self.room_of(self.me)
    }

    fn room_of(&self, position: usize) -> usize {
        let [balanced, worst] = &self.counts[position];
        match self.headroom {
            Some(headroom) => {
                let rows = (balanced.routed as f64 * headroom).ceil() as u64;
                rows.min(worst.routed) as usize
            }
            None => worst.routed as usize,
        }
    }

    /// Places of the experts that lie with each run of so many ranks.
    pub(crate) fn places(&self, layer: usize, ranks: usize) -> Vec<Range<u32>> {
        let first = &self.layers[layer].first;
        let begins = first.iter().step_by(ranks);
        begins.clone().zip(begins.skip(1)).map(|(begin, end)| *begin..*end).collect()
    }

    /// Nothing travels.
    pub fn is_alone(&self) -> bool {
        self.ranks.len() == 1
    }

    /// Writes what every round reads of the placement.
    pub(crate) fn write_tables(&self, layers: &[Layer<Buffer>], device: &mut Device) {
        for (homes, layer) in self.layers.iter().zip(layers) {
            let spread = layer.fused.as_ref().and_then(|fused| fused.spread.as_ref());
            if let Some(places) = spread.and_then(|spread| spread.places) {
                device.write(places, &homes.order);
            }
        }
    }
}

#[cfg(test)]
impl ExpertGroup {
    /// Ranks alone, for tests of how they exchange.
    pub fn of(ranks: Vec<u32>, me: usize, rails: Option<Rails>) -> ExpertGroup {
        let (layers, counts) = (Vec::new(), Vec::new());
        ExpertGroup { ranks, me, rails, layers, counts, headroom: None }
    }
}

impl Homes {
    fn new(model: &ModelConfig, layout: &Layout, rank: u32, layer: u32, ranks: &[u32]) -> Homes {
        let of_rank = layout.expert_ranks(model, layer, rank);
        let position = |owner: &u32| ranks.iter().position(|member| member == owner);
        let owner: Vec<u32> = of_rank
            .iter()
            .map(|owner| position(owner).expect("experts are held in the group") as u32)
            .collect();
        let mut by_owner: Vec<usize> = (0..owner.len()).collect();
        by_owner.sort_by_key(|expert| (owner[*expert], *expert));
        let mut order = vec![0; owner.len()];
        by_owner.iter().enumerate().for_each(|(at, expert)| order[*expert] = at as u32);
        let before = |p: usize| owner.iter().filter(|owner| (**owner as usize) < p).count() as u32;
        let first = (0..=ranks.len()).map(before).collect();
        Homes { order, first }
    }

    /// By position: its first expert, and how many it has, of experts in the order of their owners.
    pub fn ranges(&self) -> Vec<(u32, u32)> {
        self.first.windows(2).map(|of| (of[0], of[1] - of[0])).collect()
    }
}
