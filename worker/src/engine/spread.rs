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
//! (`links/peer.rs`). The rows of all others then say nothing, and nothing here reads them. What
//! others read of `Spread` and `SpreadScratch` in one exchange is not written before the next one
//! was enqueued: x and choices are read out, sums back, the gradient of outputs out, and so on. Of
//! a group on several nodes tokens may travel between nodes first (`links/tokens.rs`).
//!
//! In several chunks of tokens all of it is done for each (`portion.rs`): what travels of one is
//! beside what the experts compute of another. Gradients of weights are then added up chunk by
//! chunk.
//!
//! In one chunk gradients of tokens go back beside the gradient of up, where they do so through
//! windows.
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
use crate::engine::beside::Chunked;
use crate::engine::forward::Pass;
use crate::engine::handles::Dense;
use crate::engine::links::{Near, Packed, PeerUse, Rows};
use crate::engine::model::Model;
use crate::engine::portion::{Flying, Leg, Portion};
use moejob_kernels::{
    Add, Buffer, Gradients, MoeCombine, MoeDesc, MoeExperts, MoeExpertsBackward, MoeHidden,
    MoePlace, MoeRouterBackward, MoeTensors, MoeUpGradient, Saved, WireFormat,
};
use moejob_protocol::formats::RowFormat;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Kind, Shape, window_rooms};
use moejob_protocol::model::ModelConfig;
use std::time::Duration;

/// The experts of one rank, as many as the layer of all tokens of the group has, of one chunk of
/// them. Which they are says the group, by their places in the order of those that compute them.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Here {
    pub desc: MoeDesc,
    ranks: usize,
}

impl Here {
    /// Of a rank of `whole`'s layers; None where it holds all of the experts, and these whole.
    pub fn new(
        model: &ModelConfig,
        layout: &Layout,
        rank: u32,
        (mixture, shape): (&[usize], &Shape),
        whole: &MoeDesc,
    ) -> Option<Here> {
        let ranks = layout.mesh.ep as usize;
        let layer = *mixture.first()? as u32;
        let slices = model.slices();
        let desc = MoeDesc {
            tokens: whole.tokens * ranks / shape.chunks as usize,
            hidden: slices.width as usize,
            experts: layout.experts(model, layer, rank).len(),
            top_k: slices.slots as usize,
            part: true,
            groups: None,
            segments: 1,
            sources: ranks,
            ..*whole
        };
        (ranks > 1 || slices.each > 1).then_some(Here { desc, ranks })
    }

    /// The same of this rank's own tokens alone, for sums over their rows.
    pub fn own(&self) -> MoeDesc {
        MoeDesc { tokens: self.desc.tokens / self.ranks, sources: 1, ..self.desc }
    }
}

/// The layer of a rank's own tokens as one that sums up rows of slices; none: they are of experts,
/// which `whole` does.
pub(crate) fn sums_of_slices(model: &ModelConfig, whole: &MoeDesc) -> Option<MoeDesc> {
    let slices = model.slices();
    let (hidden, top_k) = (slices.width as usize, slices.slots as usize);
    let desc = MoeDesc { hidden, top_k, part: true, groups: None, ..*whole };
    (slices.each > 1).then_some(desc)
}

impl Model {
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
        let rooms = match self.shape.reads_in_place() {
            true => 0,
            false => window_rooms(positions, tokens, bytes, top_k) as usize,
        };
        // Beside products every block takes a multiprocessor from them.
        let chunks = self.shape.chunks;
        let beside = Chunked::said(chunks).blocks as usize;
        let most = (chunks > 1).then_some(beside);
        Some(Near { ranks, rooms, wanted, most, beside, patience })
    }
}

impl Pass<'_> {
    /// out = mid + the layer of the own tokens `own`, whose router's numbers are counted or not.
    pub(crate) fn spread_forward(&mut self, layer: usize, own: Option<MoeTensors>, out: Buffer) {
        if let (Some(tensors), Some(desc)) = (own, self.model.fused) {
            self.choose(layer, &desc, &tensors);
        }
        let portions = self.model.portions(layer, self.round);
        for portion in &portions {
            let Some(MoeTensors { x, saved, .. }) = own else { continue };
            self.own_into(portion, x, portion.spread.x);
            self.choices_into(portion, saved);
        }
        self.mark("router", Some(layer));
        let formats = self.model.shape.formats;
        for portion in &portions {
            let Portion { spread, scratch, .. } = portion;
            let packed = packed(formats.tokens, formats.element, scratch.dout);
            self.gather(portion, Rows { rows: spread.x, packed }, Some(spread.weights));
        }
        let (mid, each) = (self.model.buffers.layers[layer].mid, formats.returns_each());
        for portion in &portions {
            self.arrive(portion, Leg::Out);
            self.mark("tokens travel", Some(layer));
            self.experts(layer, portion, each);
            self.mark("experts", Some(layer));
            let onto = own.map(|_| [mid, out].map(|all| portion.of_own(all)));
            self.scatter(portion, (None, onto.filter(|_| !each)));
        }
        for portion in &portions {
            self.arrive(portion, Leg::Back);
            if own.is_some() && each {
                let [base, out] = [mid, out].map(|all| portion.of_own(all));
                let weights = portion.mine(portion.spread.weights);
                self.combine(portion, Some(weights), (base, out));
            }
        }
        self.mark("sums travel", Some(layer));
    }

    /// `scratch.partial` = what the experts here make of a portion, whose tokens are here.
    fn experts(&mut self, layer: usize, portion: &Portion, each: bool) {
        let (here, tensors) = (portion.here, portion.tensors(self.model, layer));
        let (first, _) = portion.need.experts[self.model.group.me];
        self.model.device.moe_place(&MoePlace {
            top_k: here.desc.top_k,
            tokens: portion.need.tokens,
            present: portion.need.present,
            ranks: self.model.group.ranks.len(),
            first: first as usize,
            locals: here.desc.experts,
            room: self.model.routed_room(),
            overflows: self.model.routed_overflows(),
            saved: tensors.saved,
        });
        let out = portion.scratch.partial;
        self.model.device.moe_experts(&MoeExperts { desc: here.desc, tensors, out, each });
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, through experts and router.
    pub(crate) fn spread_backward(&mut self, layer: usize, own: Option<MoeTensors>, leaf: &Leaf) {
        let (dx, dnorm) = (self.model.buffers.scratch.dx, self.model.buffers.scratch.dnorm);
        let mut portions = self.model.portions(layer, self.round);
        let formats = self.model.shape.formats;
        let up_later = self.flies_in_one();
        let fly = Flying { out: self.gradients_leave_beside(layer), back: up_later };
        portions.iter_mut().for_each(|portion| portion.fly = fly);
        for portion in &portions {
            let scratch = &portion.scratch;
            if own.is_some() {
                self.own_into(portion, dx, scratch.dout);
            }
            let packed = packed(formats.gradients, formats.element, scratch.partial);
            self.gather(portion, Rows { rows: scratch.dout, packed }, None);
        }
        self.made_later();
        for (at, portion) in portions.iter().enumerate() {
            self.arrive(portion, Leg::Out);
            self.mark("gradients travel", Some(layer));
            let before = at > 0;
            self.experts_gradients_here(layer, portion, leaf, before);
            self.mark("experts'", Some(layer));
            self.scatter(portion, (Some(portion.scratch.ds), None));
            if up_later {
                self.up_gradient(layer, portion, leaf, before);
                self.mark("experts' up'", Some(layer));
            }
        }
        for portion in &portions {
            self.arrive(portion, Leg::Back);
        }
        self.mark("gradients travel back", Some(layer));
        let (Some(tensors), Some(dense)) = (own, leaf.dense) else { return };
        let (ds, plain) = (self.own_ds(&portions), self.model.plain);
        match plain {
            true => self.router_gradients(layer, tensors, leaf, dense, ds),
            false => self.model.device.fill_zero(dnorm),
        }
        for portion in &portions {
            let dnorm = portion.of_own(dnorm);
            if formats.returns_each() {
                self.combine(portion, None, (dnorm, dnorm));
            } else {
                let b = portion.mine(portion.scratch.partial);
                self.model.device.add(&Add { a: dnorm, b });
            }
        }
        if !plain {
            let gradients = (&dense.layers[layer], leaf.accumulate);
            self.gate_backward(layer, self.round.tokens, gradients, ds);
        }
        self.mark("router'", Some(layer));
    }

    /// In one chunk what travels in backward does so beside gradients of weights, for which nobody
    /// waits. What goes by NCCL would want more multiprocessors.
    fn flies_in_one(&self) -> bool {
        let in_one = self.model.shape.chunks == 1 && self.model.group.rails.is_none();
        in_one && self.links.have_windows()
    }

    /// Gradients of the outputs of `layer` leave beside those of the attention's weights of the
    /// layer above. All ranks say the same, also those without tokens: as many blocks of each move
    /// them.
    pub(crate) fn gradients_leave_beside(&self, layer: usize) -> bool {
        let model = &self.model;
        let above = layer + 1 < model.config.num_hidden_layers as usize;
        let spread = model.here.is_some() && model.config.is_moe_layer(layer as u32);
        // What is computed again comes first, and takes the memory that they read.
        above && spread && model.shape.recompute.is_none() && self.flies_in_one()
    }

    /// `scratch.partial` and `scratch.ds` = gradients of a portion's tokens and weights, as far as
    /// the experts here make them. Theirs are added to those of chunks `before`, up's maybe later.
    fn experts_gradients_here(
        &mut self,
        layer: usize,
        portion: &Portion,
        leaf: &Leaf,
        before: bool,
    ) {
        let (desc, tensors) = (portion.here.desc, portion.tensors(self.model, layer));
        // The last mixture layer's rows are those that forward left.
        let again = self.model.shape.recompute.drops_hidden();
        if again && self.model.mixture.last() != Some(&layer) {
            self.model.device.moe_hidden(&MoeHidden { desc, tensors });
        }
        self.model.device.moe_experts_backward(&MoeExpertsBackward {
            desc,
            tensors,
            dout: portion.scratch.dout,
            dx: portion.scratch.partial,
            each: self.model.shape.formats.returns_each(),
            ds: portion.scratch.ds,
            gradients: gradients_of_experts(leaf, layer, &tensors, before),
            up_later: portion.fly.back,
        });
    }

    /// What [`Pass::experts_gradients_here`] left for later.
    fn up_gradient(&mut self, layer: usize, portion: &Portion, leaf: &Leaf, before: bool) {
        let (desc, tensors) = (portion.here.desc, portion.tensors(self.model, layer));
        let gradients = gradients_of_experts(leaf, layer, &tensors, before);
        self.model.device.moe_up_gradient(&MoeUpGradient { desc, tensors, gradients });
    }

    /// [T, K]: gradients of the weights of the own tokens' choices.
    fn own_ds(&mut self, portions: &[Portion]) -> Buffer {
        let scratch = self.model.buffers.scratch.spread.clone().expect("memory of what travels");
        let own_ds = scratch.own_ds;
        let ds = match portions {
            [whole] => whole.mine(whole.scratch.ds),
            _ => {
                for portion in portions {
                    let own = portion.mine(portion.scratch.ds);
                    self.model.device.copy(own, portion.scratch.own_ds);
                }
                own_ds
            }
        };
        match scratch.choice_ds {
            Some(of_experts) => {
                self.model.sum_slices(ds, of_experts);
                of_experts
            }
            None => ds,
        }
    }

    /// dnorm = the gradient of the own tokens through the router, by that of their weights.
    fn router_gradients(
        &mut self,
        layer: usize,
        tensors: MoeTensors,
        leaf: &Leaf,
        dense: &Dense,
        ds: Buffer,
    ) {
        let Some(desc) = self.model.fused else { return };
        let scratch = self.model.buffers.scratch.spread.as_ref().expect("memory of what travels");
        let slots = scratch.slots.slice(0, ds.len());
        let stacks = leaf.stacks[layer].expect("a mixture layer has experts");
        let router = dense.layers[layer].router.expect("a mixture layer has a router");
        let dx = self.model.buffers.scratch.dnorm;
        self.model.device.moe_router_backward(&MoeRouterBackward {
            desc,
            tensors,
            ds,
            slots,
            dx,
            gradients: Gradients {
                router,
                up: stacks.up,
                down: stacks.down,
                accumulate: leaf.accumulate_experts,
                accumulate_router: leaf.accumulate,
            },
        });
    }

    /// What this rank has of what all ranks of a portion have, unless it lies there already: where
    /// tokens leave from where they are made.
    fn own_into(&mut self, portion: &Portion, from: Buffer, all: Buffer) {
        let (from, to) = (portion.of_own(from), portion.mine(all));
        if from != to {
            self.model.device.copy(from, to);
        }
    }

    /// The own tokens' choices into what all ranks of a portion have of them: those of slices, by
    /// their places in the order of those that compute them.
    fn choices_into(&mut self, portion: &Portion, own: Saved) {
        let Portion { spread, .. } = portion;
        if self.model.slices().each > 1 || spread.places.is_some() {
            let own = [own.ids, own.weights].map(|of| portion.of_own(of));
            let all = [spread.ids, spread.weights].map(|of| portion.mine(of));
            return self.model.slice_choices(own, all, spread.places);
        }
        self.own_into(portion, own.ids, spread.ids);
        self.own_into(portion, own.weights, spread.weights);
    }

    fn gather(&mut self, portion: &Portion, of: Rows, weights: Option<Buffer>) {
        self.depart(portion, Leg::Out, |Pass { model, links, .. }| {
            let way = (&model.group, &portion.need);
            links.gather_tokens(&mut model.device, way, of, weights);
        });
    }

    /// What the experts here add, `scratch.partial` and slots, to where its tokens are.
    fn scatter(&mut self, portion: &Portion, more: (Option<Buffer>, Option<[Buffer; 2]>)) {
        let (formats, scratch) = (self.model.shape.formats, &portion.scratch);
        let room = if scratch.packed.is_empty() { scratch.dout } else { scratch.packed };
        let packed = packed(RowFormat::Of(formats.sums), formats.written, room);
        let of = Rows { rows: scratch.partial, packed };
        let of_choices = formats.returns_each().then(|| portion.need.of_choices());
        let need = of_choices.as_ref().unwrap_or(&portion.need);
        self.depart(portion, Leg::Back, |Pass { model, links, .. }| {
            links.scatter_tokens(&mut model.device, (&model.group, need), of, more);
        });
    }

    /// out = base + the sum over the rows of each own token's choices, which came back.
    fn combine(
        &mut self,
        portion: &Portion,
        weights: Option<Buffer>,
        (base, out): (Buffer, Buffer),
    ) {
        let Some(whole) = self.model.fused else { return };
        let (desc, scratch) = (portion.own_desc(&self.model.config, whole), &portion.scratch);
        let (rows, slots) = (portion.mine(scratch.partial), scratch.slots);
        let op = MoeCombine { desc, rows, slots, weights, base, out };
        self.model.device.moe_combine(&op);
    }
}

/// Where gradients of the experts here go, and whether they are added to what is there.
fn gradients_of_experts(
    leaf: &Leaf,
    layer: usize,
    tensors: &MoeTensors,
    before: bool,
) -> Gradients {
    let stacks = leaf.stacks[layer].expect("a mixture layer has experts");
    Gradients {
        router: tensors.weights.router,
        up: stacks.up,
        down: stacks.down,
        accumulate: leaf.accumulate_experts || before,
        accumulate_router: false,
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
