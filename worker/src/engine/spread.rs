//! The mixture layer where its experts are shared out over the ranks of a group.
//!
//! ```text
//! choices and weights of own tokens -> all-gather: tokens, choices, weights of the group
//!   -> rows of the experts here -> their sum for every token of the group
//!   -> reduce-scatter: each token's whole sum at its own rank
//! ```
//! Backward is the same with gradients: those of outputs to all, those of inputs and of weights
//! back. A token travels to every rank of the group, whether it chose one of its experts or not,
//! and comes back as one row. So no size depends on a router and the host never waits. With K of E
//! experts a token, and P ranks, few stay away that need not come: of OLMoE's 8 of 64 on 2 ranks 2
//! in a thousand.
//!
//! Where the group has windows, a token travels to the ranks alone that have one of its experts
//! (`links/peer.rs`). The rows of all others then say nothing, and nothing here reads them. Of a
//! group on several nodes tokens may travel between nodes first (`links/tokens.rs`).

use crate::engine::backward::Leaf;
use crate::engine::forward::Pass;
use crate::engine::links::{Near, PeerUse};
use crate::engine::model::Model;
use crate::engine::round::Round;
use moejob_kernels::cuda::{Gradients, MoeDesc, MoeTensors, Need, Saved, Weights};
use moejob_kernels::{
    Add, Buffer, MoeExpertsBackward, MoeForward, MoeHidden, MoePlace, MoeRoute, MoeRouterBackward,
};
use moejob_protocol::buffers::{Spread, SpreadScratch};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::window_rooms;
use moejob_protocol::model::ModelConfig;
use std::time::Duration;

/// The experts of one rank: `first ..`, as many as the layer of all tokens of the group has.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Here {
    pub desc: MoeDesc,
    first: usize,
}

impl Here {
    /// Of a rank of `whole`'s layers; none where it holds all of the experts.
    pub fn new(
        model: &ModelConfig,
        layout: &Layout,
        rank: u32,
        mixture: &[usize],
        whole: &MoeDesc,
    ) -> Option<Here> {
        let ranks = layout.mesh.ep as usize;
        let layer = *mixture.first()? as u32;
        let held = layout.experts(model, layer, rank);
        let first = *held.first()? as usize;
        let tokens = whole.tokens * ranks;
        let desc =
            MoeDesc { tokens, experts: held.len(), groups: None, segments: 1, ..*whole };
        (ranks > 1).then_some(Here { desc, first })
    }
}

impl Model {
    /// The part of this rank of what all ranks of the group have.
    fn own_of(&self, all: Buffer) -> Buffer {
        let len = all.len() / self.group.ranks.len();
        all.slice(self.group.me * len, len)
    }

    /// Those of the own group that may share windows, if its tokens travel.
    pub(crate) fn near(&self, wanted: PeerUse, patience: Duration) -> Option<Near> {
        let (here, scratch) = self.here.zip(self.buffers.scratch.spread.as_ref())?;
        let ranks = self.group.near().to_vec();
        // Rails of nodes with one rank each leave it nothing to do.
        if ranks.len() == 1 {
            return None;
        }
        let row = scratch.partial.bytes() / here.desc.tokens;
        // Of a position of the window: with rails those of all ranks of its place.
        let tokens = here.desc.tokens / ranks.len();
        let [positions, tokens, row, top_k] =
            [ranks.len(), tokens, row, here.desc.top_k].map(|count| count as u64);
        let rooms = window_rooms(positions, tokens, row, top_k) as usize;
        Some(Near { ranks, rooms, wanted, patience })
    }

    /// Which rank of the group needs which token of a round.
    fn need(&self, layer: usize, round: &Round) -> Need {
        let (here, spread, _) = self.spread(layer);
        let rails = self.group.rails;
        Need {
            tokens: here.desc.tokens / self.group.ranks.len(),
            top_k: here.desc.top_k,
            ids: spread.ids,
            present: round.sources.iter().map(|source| 1 << source.position).sum(),
            experts: self.group.layers[layer].ranges(),
            nodes: rails.map_or(1, |rails| rails.nodes),
            node: rails.map_or(0, |rails| rails.node(self.group.me)),
        }
    }

    fn spread(&self, layer: usize) -> (Here, Spread<Buffer>, SpreadScratch<Buffer>) {
        let fused = self.buffers.layers[layer].fused.as_ref();
        let spread = fused.and_then(|fused| fused.spread.clone());
        let scratch = self.buffers.scratch.spread.clone();
        let parts = self.here.zip(spread).zip(scratch);
        let ((here, spread), scratch) = parts.expect("memory of experts over ranks");
        (here, spread, scratch)
    }

    /// What the experts here read and keep.
    fn tensors_here(&self, layer: usize) -> MoeTensors {
        let (here, spread, _) = self.spread(layer);
        let b = self.buffers.layers[layer].fused.clone().expect("a mixture layer");
        let none = b.losses.slice(0, 0);
        let experts = here.desc.experts;
        let stacks = self.stacks[layer].expect("a mixture layer has experts");
        MoeTensors {
            x: spread.x,
            residual: None,
            weights: Weights { router: none, bias: None, up: stacks.up, down: stacks.down },
            saved: Saved {
                h: b.h,
                a: b.a,
                logits: none,
                probs: none,
                lse: none,
                ids: spread.ids,
                weights: spread.weights,
                counts: none,
                offsets: spread.offsets.slice(0, experts + 1),
                order: spread.order.slice(0, experts.min(spread.order.len())),
                rows: spread.rows,
                pos: spread.pos,
                row_weights: spread.row_weights,
                segment_counts: none,
                prob_sums: none,
                losses: none,
                router_halves: none,
            },
            workspace: self.buffers.scratch.workspace,
            numbers: None,
            loss_scale: None,
        }
    }
}

impl Pass<'_> {
    /// out = mid + the layer of the own tokens `own`, whose router's numbers are counted or not.
    pub(crate) fn spread_forward(&mut self, layer: usize, own: Option<MoeTensors>, out: Buffer) {
        let (here, spread, scratch) = self.model.spread(layer);
        if let (Some(tensors), Some(desc)) = (own, self.model.fused) {
            self.model.device.moe_route(&MoeRoute { desc, tensors });
            // Its tokens are among those of the group already.
            for (from, all) in
                [(tensors.saved.ids, spread.ids), (tensors.saved.weights, spread.weights)]
            {
                let to = self.model.own_of(all);
                self.model.device.copy(from, to);
            }
        }
        self.mark("router", Some(layer));
        let need = self.model.need(layer, self.round);
        self.gather(&need, spread.x, Some(spread.weights));
        self.mark("tokens travel", Some(layer));
        let tensors = self.model.tensors_here(layer);
        self.model.device.moe_place(&MoePlace {
            top_k: here.desc.top_k,
            tokens: need.tokens,
            present: need.present,
            ranks: self.model.group.ranks.len(),
            first: here.first,
            locals: here.desc.experts,
            saved: tensors.saved,
        });
        let partial = scratch.partial;
        self.model.device.moe_experts(&MoeForward { desc: here.desc, tensors, out: partial });
        self.mark("experts", Some(layer));
        let onto = own.map(|_| [self.model.buffers.layers[layer].mid, out]);
        self.scatter(&need, partial, (None, onto));
        self.mark("sums travel", Some(layer));
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, which lies in `dout`, through
    /// experts and router.
    pub(crate) fn spread_backward(&mut self, layer: usize, own: Option<MoeTensors>, leaf: &Leaf) {
        let (here, _, scratch) = self.model.spread(layer);
        let dnorm = self.model.buffers.scratch.dnorm;
        let need = self.model.need(layer, self.round);
        self.gather(&need, scratch.dout, None);
        self.mark("gradients travel", Some(layer));
        let stacks = leaf.stacks[layer].expect("a mixture layer has experts");
        let (up, down) = (stacks.up, stacks.down);
        let tensors = self.model.tensors_here(layer);
        // The last mixture layer's rows are those that forward left.
        let again = self.model.shape.recompute.drops_hidden();
        if again && self.model.mixture.last() != Some(&layer) {
            self.model.device.moe_hidden(&MoeHidden { desc: here.desc, tensors });
        }
        self.model.device.moe_experts_backward(&MoeExpertsBackward {
            desc: here.desc,
            tensors,
            dout: scratch.dout,
            dx: scratch.partial,
            ds: scratch.ds,
            gradients: Gradients {
                router: tensors.weights.router,
                up,
                down,
                accumulate: leaf.accumulate_experts,
            },
        });
        self.mark("experts'", Some(layer));
        self.scatter(&need, scratch.partial, (Some(scratch.ds), None));
        self.mark("gradients travel back", Some(layer));
        let (Some(tensors), Some(desc), Some(dense)) = (own, self.model.fused, leaf.dense) else {
            return;
        };
        let router = dense.layers[layer].router.expect("a mixture layer has a router");
        let ds = self.model.own_of(scratch.ds);
        self.model.device.moe_router_backward(&MoeRouterBackward {
            desc,
            tensors,
            ds,
            slots: scratch.slots,
            dx: dnorm,
            gradients: Gradients { router, up, down, accumulate: leaf.accumulate },
        });
        let b = self.model.own_of(scratch.partial);
        self.model.device.add(&Add { a: dnorm, b });
        self.mark("router'", Some(layer));
    }

    fn gather(&mut self, need: &Need, rows: Buffer, weights: Option<Buffer>) {
        let Pass { model, links, .. } = self;
        links.gather_tokens(&mut model.device, (&model.group, need), rows, weights);
    }

    fn scatter(
        &mut self,
        need: &Need,
        rows: Buffer,
        more: (Option<Buffer>, Option<[Buffer; 2]>),
    ) {
        let Pass { model, links, .. } = self;
        links.scatter_tokens(&mut model.device, (&model.group, need), rows, more);
    }
}
