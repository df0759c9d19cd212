//! What of a mixture layer is this rank's: its experts, the tokens that are here, and the ways by
//! which these come and go.

use crate::engine::beside::BesideProducts;
use crate::engine::group::ExpertGroup;
use crate::engine::links::{Back, Hop, Journey, Near, PeerUse};
use crate::engine::model::Model;
use crate::engine::round::Round;
use moejob_kernels::peer::Need;
use moejob_kernels::{Buffer, Each, MoeDesc, MoeTensors, Saved, Weights};
use moejob_protocol::buffers::{Spread, SpreadScratch};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::window_rooms;
use moejob_protocol::model::ModelConfig;
use std::time::Duration;

/// Which way rows travel: tokens out, and what became of them back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Leg {
    Out,
    Back,
}

/// Flights of the device, one a leg.
pub(crate) const LEGS: usize = 2;

/// The layer of the tokens here and the experts of this rank; None where it holds all of the
/// experts, and these whole. Which they are says the group, by their places in the order of those
/// that compute them.
pub(crate) fn local_experts(
    model: &ModelConfig,
    layout: &Layout,
    rank: u32,
    mixture: &[usize],
    whole: &MoeDesc,
) -> Option<MoeDesc> {
    let ranks = layout.mesh.ep as usize;
    let layer = *mixture.first()? as u32;
    let slices = model.slices();
    let desc = MoeDesc {
        tokens: whole.tokens * ranks,
        hidden: slices.width as usize,
        experts: layout.experts(model, layer, rank).len(),
        top_k: slices.slots as usize,
        part: true,
        groups: None,
        segments: 1,
        sources: ranks,
        ..*whole
    };
    (ranks > 1 || slices.each > 1).then_some(desc)
}

/// The layer of a rank's own tokens as one that sums up rows of slices; None: they are of experts,
/// which `whole` does.
pub(crate) fn sums_of_slices(model: &ModelConfig, whole: &MoeDesc) -> Option<MoeDesc> {
    let slices = model.slices();
    let (hidden, top_k) = (slices.width as usize, slices.slots as usize);
    let desc = MoeDesc { hidden, top_k, part: true, groups: None, ..*whole };
    (slices.each > 1).then_some(desc)
}

/// A round of a layer as far as it is the experts' of this rank.
#[derive(Clone, Debug)]
pub(super) struct Local {
    pub layer: usize,
    pub desc: MoeDesc,
    pub spread: Spread<Buffer>,
    pub scratch: SpreadScratch<Buffer>,
    pub tensors: MoeTensors,
    /// Which rank of the group needs which token.
    pub need: Need,
    pub me: usize,
    /// The row of each choice comes back, and no sums.
    pub each: bool,
    /// Which legs of backward are beside what follows.
    pub fly: [bool; LEGS],
}

impl Model {
    pub(super) fn local(&self, layer: usize, round: &Round) -> Local {
        let fused = self.buffers.layers[layer].fused.as_ref().expect("a mixture layer");
        let parts = self.here.zip(fused.spread.clone()).zip(self.buffers.scratch.spread.clone());
        let ((desc, mut spread), scratch) = parts.expect("memory of experts over ranks");
        let (ranks, rails) = (self.group.ranks.len(), self.group.rails);
        // Ranks with fewer experts use less of them.
        spread.offsets = spread.offsets.slice(0, desc.experts + 1);
        spread.order = spread.order.slice(0, desc.experts.min(spread.order.len()));
        let need = Need {
            tokens: desc.tokens / ranks,
            top_k: desc.top_k,
            ids: spread.ids,
            present: round.present,
            experts: self.group.layers[layer].ranges(),
            nodes: rails.map_or(1, |rails| rails.nodes),
            node: rails.map_or(0, |rails| rails.node(self.group.me)),
        };
        let none = fused.router.losses.slice(0, 0);
        let stacks = self.stacks[layer].expect("a mixture layer has experts");
        let tensors = MoeTensors {
            x: spread.x,
            residual: None,
            weights: Weights { router: none, bias: None, up: stacks.up, down: stacks.down },
            saved: Saved {
                h: fused.h,
                a: fused.a,
                logits: none,
                probs: none,
                lse: none,
                ids: spread.ids,
                weights: spread.weights,
                counts: none,
                offsets: spread.offsets,
                order: spread.order,
                rows: spread.rows,
                pos: spread.pos,
                row_weights: spread.row_weights,
                segment_counts: none,
                prob_sums: none,
                losses: none,
                router_halves: none,
            },
            workspace: self.buffers.scratch.workspace,
            loss_scale: None,
            starts: spread.need.last().map(|need| need.starts),
        };
        let (me, fly, each) = (self.group.me, [false; LEGS], self.shape.formats.returns_each());
        Local { layer, desc, spread, scratch, tensors, need, me, each, fly }
    }

    /// Those of the own group that may share windows, if its tokens travel.
    pub(crate) fn near(&self, wanted: PeerUse, patience: Duration) -> Option<Near> {
        let desc = self.here?;
        let ranks = self.group.near().to_vec();
        // Rails of nodes with one rank each leave it nothing to do.
        if ranks.len() == 1 || self.shape.by_need() {
            return None;
        }
        let bytes = self.shape.formats.token_bytes(self.config.hidden_size.into());
        // Of a position of the window: with rails those of all ranks of its place.
        let tokens = desc.tokens / ranks.len();
        let [positions, tokens, top_k] =
            [ranks.len(), tokens, desc.top_k].map(|count| count as u64);
        let rooms = match self.shape.reads_in_place() {
            true => 0,
            false => window_rooms(positions, tokens, bytes, top_k) as usize,
        };
        // Beside products every block takes a multiprocessor from them.
        let beside = BesideProducts::said().blocks as usize;
        Some(Near { ranks, rooms, wanted, beside, patience })
    }
}

impl Local {
    /// This rank's part of what all ranks have.
    pub fn mine(&self, all: Buffer) -> Buffer {
        let len = all.len() / self.need.experts.len();
        all.slice(self.me * len, len)
    }

    pub fn travels_by_need(&self) -> bool {
        !self.spread.need.is_empty()
    }

    /// Choices of the tokens here.
    pub fn choices(&self) -> Each {
        self.spread.need.last().map_or(Each::Slots, |need| Each::Choices(need.choices))
    }

    /// The exchanges by which tokens travel by need.
    pub fn journey(&self, group: &ExpertGroup) -> Journey<'_> {
        let Spread { ids, weights, .. } = self.spread;
        let back = if self.each { Back::Choices } else { Back::Sums };
        Journey { hops: self.hops(group), top_k: self.desc.top_k, back, ids, weights }
    }

    fn hops(&self, group: &ExpertGroup) -> Vec<Hop<'_>> {
        let own = self.scratch.own.as_ref().expect("memory of what travels by need");
        let dim = self.desc.dim;
        let last = |ranks: Vec<u32>, me, places, need, leaving| {
            let x = self.spread.x;
            Hop { ranks, me, places, dim, need, leaving, x, returned: None }
        };
        match (&self.spread.need[..], &self.scratch.relay, group.rails) {
            ([need], ..) => {
                let places = group.places(self.layer, 1);
                vec![last(group.ranks.clone(), group.me, places, need, own.leaving)]
            }
            ([first, second], Some(relay), Some(rails)) => {
                let node = rails.node(group.me);
                let rail = (0..rails.nodes).map(|at| at * rails.places + rails.place(group.me));
                let here = rails.on_node(node);
                let of_node = group.places(self.layer, 1)[here.clone()].to_vec();
                let between = Hop {
                    ranks: rail.map(|at| group.ranks[at]).collect(),
                    me: node,
                    places: group.places(self.layer, rails.places),
                    dim,
                    need: first,
                    leaving: own.leaving,
                    x: relay.x,
                    returned: Some(relay.returned),
                };
                let ranks = group.ranks[here].to_vec();
                let me = rails.place(group.me);
                vec![between, last(ranks, me, of_node, second, relay.leaving)]
            }
            (need, relay, rails) => panic!("{} hops, {rails:?}, {relay:?}", need.len()),
        }
    }
}
