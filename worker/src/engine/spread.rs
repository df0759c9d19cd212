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
//!
//! With `combine_each` no sum comes back but the row of each choice, and the token's own rank sums
//! them up in the order of experts, as a rank does that has all experts.
//!
//! Where experts are cut into slices, what travels and is computed are choices and rows of slices:
//! they become so before they leave, and the gradients of weights those of experts when they are
//! back.
//!
//! As what rows travel is told by [`Formats`](moejob_protocol::formats::Formats). Rows that become
//! something else on their way are changed in `Spread::x` or `SpreadScratch::dout`, never where
//! the router or the residual reads them.

use crate::engine::backward::Leaf;
use crate::engine::forward::Pass;
use crate::engine::links::{Near, Packed, PeerUse, Rows};
use crate::engine::model::Model;
use crate::engine::round::Round;
use moejob_kernels::cuda::{Gradients, MoeDesc, MoeTensors, Need, Saved, Weights};
use moejob_kernels::{
    Add, Buffer, MoeCombine, MoeExperts, MoeExpertsBackward, MoeHidden, MoePlace, MoeRoute,
    MoeRouterBackward, WireFormat,
};
use moejob_protocol::buffers::{Spread, SpreadScratch};
use moejob_protocol::formats::RowFormat;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Kind, window_rooms};
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
        let slices = model.slices();
        let desc = MoeDesc {
            tokens: whole.tokens * ranks,
            hidden: slices.width as usize,
            experts: held.len(),
            top_k: slices.per_token as usize,
            part: true,
            groups: None,
            segments: 1,
            ..*whole
        };
        (ranks > 1).then_some(Here { desc, first })
    }
}

/// The layer of a rank's own tokens as one that sums up rows of slices; none: they are of experts,
/// which `whole` does.
pub(crate) fn sums_of_slices(model: &ModelConfig, whole: &MoeDesc) -> Option<MoeDesc> {
    let slices = model.slices();
    let (hidden, top_k) = (slices.width as usize, slices.per_token as usize);
    let desc = MoeDesc { hidden, top_k, part: true, ..*whole };
    (slices.each > 1).then_some(desc)
}

impl Model {
    /// The part of this rank of what all ranks of the group have.
    fn own_of(&self, all: Buffer) -> Buffer {
        let len = all.len() / self.group.ranks.len();
        all.slice(self.group.me * len, len)
    }

    /// Those of the own group that may share windows, if its tokens travel.
    pub(crate) fn near(&self, wanted: PeerUse, patience: Duration) -> Option<Near> {
        let here = self.here?;
        let ranks = self.group.near().to_vec();
        // Rails of nodes with one rank each leave it nothing to do.
        if ranks.len() == 1 {
            return None;
        }
        let bytes = self.shape.formats.token_bytes(self.config.hidden_size.into());
        // Of a position of the window: with rails those of all ranks of its place.
        let tokens = here.desc.tokens / ranks.len();
        let [positions, tokens, top_k] =
            [ranks.len(), tokens, here.desc.top_k].map(|count| count as u64);
        let rooms = window_rooms(positions, tokens, bytes, top_k) as usize;
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
            self.own_into(tensors.x, spread.x);
            self.choices_into(tensors.saved, [spread.ids, spread.weights]);
        }
        self.mark("router", Some(layer));
        let need = self.model.need(layer, self.round);
        let formats = self.model.shape.formats;
        let packed = packed(formats.tokens, formats.element, scratch.dout);
        self.gather(&need, Rows { rows: spread.x, packed }, Some(spread.weights));
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
        let (partial, each) = (scratch.partial, formats.returns_each());
        self.model.device.moe_experts(&MoeExperts { desc: here.desc, tensors, out: partial, each });
        self.mark("experts", Some(layer));
        let mid = self.model.buffers.layers[layer].mid;
        let onto = own.map(|_| [mid, out]).filter(|_| !each);
        self.scatter(&need, (None, onto));
        if own.is_some() && each {
            let weights = self.model.own_of(spread.weights);
            self.combine(&scratch, Some(weights), (mid, out));
        }
        self.mark("sums travel", Some(layer));
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, through experts and router.
    pub(crate) fn spread_backward(&mut self, layer: usize, own: Option<MoeTensors>, leaf: &Leaf) {
        let (here, _, scratch) = self.model.spread(layer);
        let (dx, dnorm) = (self.model.buffers.scratch.dx, self.model.buffers.scratch.dnorm);
        if own.is_some() {
            self.own_into(dx, scratch.dout);
        }
        let need = self.model.need(layer, self.round);
        let formats = self.model.shape.formats;
        let packed = packed(formats.gradients, formats.element, scratch.partial);
        self.gather(&need, Rows { rows: scratch.dout, packed }, None);
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
            each: formats.returns_each(),
            ds: scratch.ds,
            gradients: Gradients {
                router: tensors.weights.router,
                up,
                down,
                accumulate: leaf.accumulate_experts,
            },
        });
        self.mark("experts'", Some(layer));
        self.scatter(&need, (Some(scratch.ds), None));
        self.mark("gradients travel back", Some(layer));
        let (Some(tensors), Some(desc), Some(dense)) = (own, self.model.fused, leaf.dense) else {
            return;
        };
        let router = dense.layers[layer].router.expect("a mixture layer has a router");
        let mut ds = self.model.own_of(scratch.ds);
        if let Some(of_experts) = scratch.choice_ds {
            self.model.sum_slices(ds, of_experts);
            ds = of_experts;
        }
        let slots = scratch.slots.slice(0, ds.len());
        self.model.device.moe_router_backward(&MoeRouterBackward {
            desc,
            tensors,
            ds,
            slots,
            dx: dnorm,
            gradients: Gradients { router, up, down, accumulate: leaf.accumulate },
        });
        if formats.returns_each() {
            self.combine(&scratch, None, (dnorm, dnorm));
        } else {
            let b = self.model.own_of(scratch.partial);
            self.model.device.add(&Add { a: dnorm, b });
        }
        self.mark("router'", Some(layer));
    }

    /// What this rank has of what all ranks have, unless it lies there already: tokens that travel
    /// as they are do so.
    fn own_into(&mut self, from: Buffer, all: Buffer) {
        let to = self.model.own_of(all);
        if from != to {
            self.model.device.copy(from, to);
        }
    }

    /// The own tokens' choices into what all ranks have of them: those of slices.
    fn choices_into(&mut self, own: Saved, all: [Buffer; 2]) {
        let all = all.map(|all| self.model.own_of(all));
        if self.model.slices().each > 1 {
            return self.model.slice_choices([own.ids, own.weights], all);
        }
        let [ids, weights] = all;
        self.model.device.copy(own.ids, ids);
        self.model.device.copy(own.weights, weights);
    }

    fn gather(&mut self, need: &Need, of: Rows, weights: Option<Buffer>) {
        let Pass { model, links, .. } = self;
        links.gather_tokens(&mut model.device, (&model.group, need), of, weights);
    }

    /// What the experts here add, `scratch.partial` and slots, to where its tokens are.
    fn scatter(&mut self, need: &Need, more: (Option<Buffer>, Option<[Buffer; 2]>)) {
        let Pass { model, links, .. } = self;
        let formats = model.shape.formats;
        let scratch = model.buffers.scratch.spread.as_ref().expect("memory of what travels");
        let room = if scratch.packed.is_empty() { scratch.dout } else { scratch.packed };
        let packed = packed(RowFormat::Of(formats.sums), formats.written, room);
        let of = Rows { rows: scratch.partial, packed };
        let of_choices = formats.returns_each().then(|| need.of_choices());
        let need = of_choices.as_ref().unwrap_or(need);
        links.scatter_tokens(&mut model.device, (&model.group, need), of, more);
    }
}

impl Pass<'_> {
    /// out = base + the sum over the rows of each own token's choices, which came back.
    fn combine(
        &mut self,
        scratch: &SpreadScratch<Buffer>,
        weights: Option<Buffer>,
        (base, out): (Buffer, Buffer),
    ) {
        let Some(desc) = self.model.fused else { return };
        let desc = sums_of_slices(&self.model.config, &desc).unwrap_or(desc);
        let rows = self.model.own_of(scratch.partial);
        let slots = scratch.slots;
        let op = MoeCombine { desc, rows, slots, weights, base, out };
        self.model.device.moe_combine(&op);
    }
}

/// How rows of `kind` travel as `format`, by way of `room`.
fn packed(format: RowFormat, kind: Kind, room: Buffer) -> Option<Packed> {
    let format = match format {
        RowFormat::Of(of) if of == kind => return None,
        RowFormat::Of(_) => WireFormat::Bf16,
        RowFormat::Fp8 => WireFormat::Fp8,
    };
    Some(Packed { format, room })
}
