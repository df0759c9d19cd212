//! The mixture layer where its experts are shared out over the ranks of a group.
//!
//! ```text
//! choices and weights of own tokens -> tokens, choices, weights to the ranks of their experts
//!   -> rows of the experts here -> back to each token's own rank, and summed there
//! ```
//! Backward is the same with gradients: those of outputs out, those of inputs and of weights back.
//!
//! Tokens travel in one of two ways (`Shape::by_need`):
//!
//! - By need, in lists. A rank has the tokens that have an expert of it, one behind the other
//!   (`links/by_need.rs`). Between nodes they pass a rank of each node that has experts of them, on
//!   their way back, too.
//! - Where ranks read each other's memory, each has room for the tokens of all, at the same places.
//!   A row comes to the ranks that need it, or by NCCL to all, and nothing here reads the others.
//!   No size depends on a router there, and the host never waits.
//!
//! A sum of each token comes back from each rank, or with `combine_each` a row of each choice.
//!
//! Of the second way: what others read of `Spread` and `SpreadScratch` in one exchange is not
//! written before the next one was enqueued: x and choices are read out, sums back, the gradient of
//! outputs out, and so on. Of a group on several nodes tokens may travel between nodes first
//! (`links/tokens.rs`). Gradients of tokens go back beside the gradient of up, where they do so
//! through windows.
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
use crate::engine::handles::Dense;
use crate::engine::links::{OwnTokens, Packed, Rows, WAITED};
use crate::engine::local_experts::{Leg, Local, sums_of_slices};
use crate::engine::model::Model;
use moejob_kernels::{
    Add, Buffer, GatherRows, Gradients, MoeCombine, MoeExperts, MoeExpertsBackward, MoeHidden,
    MoePlace, MoeRouterBackward, MoeTensors, MoeUpGradient, Saved, ScatterSum, Sources, WireFormat,
};
use moejob_protocol::formats::RowFormat;
use moejob_protocol::memory::Kind;

impl Pass<'_> {
    /// out = mid + the layer of the own tokens `own`, whose router's numbers are counted or not.
    pub(crate) fn shared_experts_forward(
        &mut self,
        layer: usize,
        own: Option<MoeTensors>,
        out: Buffer,
    ) {
        if let (Some(tensors), Some(desc)) = (own, self.model.fused) {
            self.choose(layer, &desc, &tensors);
        }
        let local = self.model.local(layer, self.round);
        let choices = own.map(|own| self.choices_of(&local, own.saved));
        self.mark("router", Some(layer));
        if local.travels_by_need() {
            let own = own.zip(choices).map(|(own, [ids, weights])| {
                OwnTokens { x: own.x, ids, weights }
            });
            self.dispatch(&local, own);
        } else {
            if let Some(own) = own {
                self.own_into(&local, own.x, local.spread.x);
            }
            let formats = self.model.shape.formats;
            let packed = packed(formats.tokens, formats.element, local.scratch.dout);
            let weights = Some(local.spread.weights);
            self.gather(&local, Rows { rows: local.spread.x, packed }, weights);
        }
        self.arrive(&local, Leg::Out);
        self.mark("tokens travel", Some(layer));
        self.local_experts(&local);
        self.mark("experts", Some(layer));
        let (mid, each) = (self.model.buffers.layers[layer].mid, local.each);
        if local.travels_by_need() {
            self.bring_back(&local, None);
        } else {
            let onto = own.map(|_| [mid, out]);
            self.scatter(&local, (None, onto.filter(|_| !each)));
        }
        self.arrive(&local, Leg::Back);
        match choices {
            Some([_, weights]) if each => self.combine(&local, Some(weights), (mid, out)),
            Some(_) if local.travels_by_need() => {
                self.model.device.copy(mid, out);
                self.add_sums(&local, out);
            }
            _ => {}
        }
        self.mark("sums travel", Some(layer));
    }

    /// `scratch.partial` = what the experts here make of the tokens that are here.
    fn local_experts(&mut self, local: &Local) {
        let (desc, tensors) = (local.desc, local.tensors);
        let (first, _) = local.need.experts[self.model.group.me];
        let sources = match tensors.starts {
            Some(starts) => Sources::Listed(starts),
            None => Sources::Even {
                ranks: self.model.group.ranks.len(),
                each: local.need.tokens,
                present: local.need.present,
            },
        };
        self.model.device.moe_place(&MoePlace {
            top_k: desc.top_k,
            sources,
            first: first as usize,
            locals: desc.experts,
            room: self.model.routed_room(),
            overflows: self.model.routed_overflows(),
            saved: tensors.saved,
            choices: local.spread.need.last().map(|need| need.choices),
        });
        let (out, each) = (local.scratch.partial, local.each.then(|| local.choices()));
        self.model.device.moe_experts(&MoeExperts { desc, tensors, out, each });
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, through experts and router.
    pub(crate) fn shared_experts_backward(
        &mut self,
        layer: usize,
        own: Option<MoeTensors>,
        leaf: &Leaf,
    ) {
        let (dx, dnorm) = (self.model.buffers.scratch.dx, self.model.buffers.scratch.dnorm);
        let mut local = self.model.local(layer, self.round);
        let up_later = self.flies_beside_products();
        local.fly = [self.gradients_leave_beside(layer), up_later];
        if local.travels_by_need() {
            self.dispatch_again(&local, own.map(|_| dx));
        } else {
            if own.is_some() {
                self.own_into(&local, dx, local.scratch.dout);
            }
            let formats = self.model.shape.formats;
            let packed = packed(formats.gradients, formats.element, local.scratch.partial);
            self.gather(&local, Rows { rows: local.scratch.dout, packed }, None);
        }
        self.made_later();
        self.arrive(&local, Leg::Out);
        self.mark("gradients travel", Some(layer));
        self.local_gradients(&local, leaf, up_later);
        self.mark("experts'", Some(layer));
        let ds = local.scratch.ds;
        match local.travels_by_need() {
            true => self.bring_back(&local, Some(ds)),
            false => self.scatter(&local, (Some(ds), None)),
        }
        if up_later {
            let gradients = gradients_of_experts(leaf, &local);
            let (desc, tensors) = (local.desc, local.tensors);
            self.model.device.moe_up_gradient(&MoeUpGradient { desc, tensors, gradients });
            self.mark("experts' up'", Some(layer));
        }
        self.arrive(&local, Leg::Back);
        self.mark("gradients travel back", Some(layer));
        let (Some(tensors), Some(dense)) = (own, leaf.dense) else { return };
        let (ds, plain) = (self.own_ds(&local), self.model.plain);
        match plain {
            true => self.router_gradients(layer, tensors, leaf, dense, ds),
            false => self.model.device.fill_zero(dnorm),
        }
        if local.each {
            self.combine(&local, None, (dnorm, dnorm));
        } else if local.travels_by_need() {
            self.add_sums(&local, dnorm);
        } else {
            let b = local.mine(local.scratch.partial);
            self.model.device.add(&Add { a: dnorm, b });
        }
        if !plain {
            let gradients = (&dense.layers[layer], leaf.accumulate);
            self.gate_backward(layer, self.round.tokens, gradients, ds);
        }
        self.mark("router'", Some(layer));
    }

    /// What travels in backward does so beside gradients of weights, for which nobody waits. What
    /// goes by NCCL would want more multiprocessors.
    fn flies_beside_products(&self) -> bool {
        let model = &self.model;
        !model.shape.by_need() && model.group.rails.is_none() && self.links.have_windows()
    }

    /// Gradients of the outputs of `layer` leave beside those of the attention's weights of the
    /// layer above. All ranks say the same, also those without tokens: as many blocks of each move
    /// them.
    pub(crate) fn gradients_leave_beside(&self, layer: usize) -> bool {
        let model = &self.model;
        let above = layer + 1 < model.config.num_hidden_layers as usize;
        let shared = model.here.is_some() && model.config.is_moe_layer(layer as u32);
        // What is computed again comes first, and takes the memory that they read.
        above && shared && model.shape.recompute.is_none() && self.flies_beside_products()
    }

    /// `scratch.partial` and `scratch.ds` = gradients of the tokens here and of their weights, as
    /// far as the experts here make them; and theirs, up's maybe later.
    fn local_gradients(&mut self, local: &Local, leaf: &Leaf, up_later: bool) {
        let (desc, tensors) = (local.desc, local.tensors);
        // The last mixture layer's rows are those that forward left.
        let again = self.model.shape.recompute.drops_hidden();
        if again && self.model.mixture.last() != Some(&local.layer) {
            self.model.device.moe_hidden(&MoeHidden { desc, tensors });
        }
        self.model.device.moe_experts_backward(&MoeExpertsBackward {
            desc,
            tensors,
            dout: local.scratch.dout,
            dx: local.scratch.partial,
            each: local.each,
            choices: local.choices(),
            ds: local.scratch.ds,
            gradients: gradients_of_experts(leaf, local),
            up_later,
        });
    }

    /// [T, K]: gradients of the weights of the own tokens' choices.
    fn own_ds(&mut self, local: &Local) -> Buffer {
        let ds = match (&local.scratch.own, local.spread.need.first()) {
            (Some(own), Some(need)) => {
                let (x, y, index) = (own.leaving.ds, own.ds, need.back);
                self.model.device.gather_rows(&GatherRows { rows: y.len(), dim: 1, x, index, y });
                y
            }
            _ => local.mine(local.scratch.ds),
        };
        match local.scratch.choice_ds {
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

    /// What this rank has of what all ranks have, unless it lies there already: where tokens leave
    /// from where they are made.
    fn own_into(&mut self, local: &Local, from: Buffer, all: Buffer) {
        let to = local.mine(all);
        if from != to {
            self.model.device.copy(from, to);
        }
    }

    /// Ids and weights of the own tokens' choices, where those of slices by their places in the
    /// order of those that compute them: they leave from there.
    fn choices_of(&mut self, local: &Local, own: Saved) -> [Buffer; 2] {
        let Local { spread, scratch, .. } = local;
        let to = match &scratch.own {
            Some(own) => [own.ids, own.weights],
            None => [spread.ids, spread.weights].map(|of| local.mine(of)),
        };
        if self.model.slices().each > 1 || spread.places.is_some() {
            self.model.slice_choices([own.ids, own.weights], to, spread.places);
            return to;
        }
        if local.travels_by_need() {
            return [own.ids, own.weights];
        }
        self.own_into(local, own.ids, spread.ids);
        self.own_into(local, own.weights, spread.weights);
        to
    }

    /// Own tokens `x` with their choices to the ranks of these, by need; those of others come.
    fn dispatch(&mut self, local: &Local, own: Option<OwnTokens>) {
        let Model { device, group, routes, .. } = &mut *self.model;
        routes[local.layer] = self.links.dispatch(device, &local.journey(group), own);
    }

    /// Rows of own tokens go where the tokens went.
    fn dispatch_again(&mut self, local: &Local, own: Option<Buffer>) {
        let Model { device, group, routes, .. } = &mut *self.model;
        let rows = (own, local.scratch.dout);
        self.links.dispatch_rows(device, &local.journey(group), &routes[local.layer], rows);
    }

    /// The row of each choice that the experts here made, and a number of each, where they belong.
    fn bring_back(&mut self, local: &Local, numbers: Option<Buffer>) {
        let Model { device, group, routes, .. } = &mut *self.model;
        let rows = (local.scratch.partial, numbers);
        self.links.bring_back(device, &local.journey(group), &routes[local.layer], rows);
    }

    /// out += the sums of each own token that came back by need.
    fn add_sums(&mut self, local: &Local, out: Buffer) {
        let (Some(own), Some(need)) = (&local.scratch.own, local.spread.need.first()) else {
            return;
        };
        let (top_k, dim, accumulate) = (local.desc.top_k, local.desc.dim, true);
        let (tokens, x, pos) = (need.sums.len() / top_k, own.leaving.rows, need.sums);
        self.model.device.scatter_sum(&ScatterSum { tokens, top_k, dim, accumulate, x, pos, out });
    }

    fn gather(&mut self, local: &Local, of: Rows, weights: Option<Buffer>) {
        self.depart(local, Leg::Out, |Pass { model, links, .. }| {
            let way = (&model.group, &local.need);
            links.gather_tokens(&mut model.device, way, of, weights);
        });
    }

    /// What the experts here add, `scratch.partial` and slots, to where its tokens are.
    fn scatter(&mut self, local: &Local, more: (Option<Buffer>, Option<[Buffer; 2]>)) {
        let (formats, scratch) = (self.model.shape.formats, &local.scratch);
        let room = if scratch.packed.is_empty() { scratch.dout } else { scratch.packed };
        let packed = packed(RowFormat::Of(formats.sums), formats.written, room);
        let of = Rows { rows: scratch.partial, packed };
        let of_choices = formats.returns_each().then(|| local.need.of_choices());
        let need = of_choices.as_ref().unwrap_or(&local.need);
        self.depart(local, Leg::Back, |Pass { model, links, .. }| {
            links.scatter_tokens(&mut model.device, (&model.group, need), of, more);
        });
    }

    /// out = base + the sum over the rows of each own token's choices, which came back.
    fn combine(
        &mut self,
        local: &Local,
        weights: Option<Buffer>,
        (base, out): (Buffer, Buffer),
    ) {
        let Some(whole) = self.model.fused else { return };
        let desc = sums_of_slices(&self.model.config, &whole).unwrap_or(whole);
        let (rows, slots) = match (&local.scratch.own, local.spread.need.first()) {
            (Some(own), Some(need)) => (own.leaving.rows, need.back),
            _ => (local.mine(local.scratch.partial), local.scratch.slots),
        };
        let op = MoeCombine { desc, rows, slots, weights, base, out };
        self.model.device.moe_combine(&op);
    }

    /// Verbs of one leg: at once, or beside the ops that follow.
    fn depart(&mut self, local: &Local, leg: Leg, verbs: impl FnOnce(&mut Self)) {
        if !local.fly[leg as usize] {
            return verbs(self);
        }
        self.model.device.flight_begins();
        verbs(self);
        self.model.device.flight_ends(leg as usize);
    }

    /// The ops that follow read what came by these verbs.
    fn arrive(&mut self, local: &Local, leg: Leg) {
        if local.fly[leg as usize] {
            let device = &mut self.model.device;
            let begun = device.begin_stretch(false);
            device.await_flight(leg as usize);
            device.end_stretch(begun, WAITED);
        }
    }
}

/// Where gradients of the experts here go, and whether they are added to what is there.
fn gradients_of_experts(leaf: &Leaf, local: &Local) -> Gradients {
    let stacks = leaf.stacks[local.layer].expect("a mixture layer has experts");
    Gradients {
        router: local.tensors.weights.router,
        up: stacks.up,
        down: stacks.down,
        accumulate: leaf.accumulate_experts,
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
