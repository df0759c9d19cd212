//! The mixture layer: route, dispatch, experts, combine, and all of it backwards.
//!
//! ```text
//! own tokens -> route -> choices to all of the expert group        (every rank can now place)
//!            -> rows of x: once to each rank that holds a chosen expert
//!            -> up, down -> a row per (token, expert) comes back -> weighted sum here
//! ```
//! In backward dY travels like x did, and dX rows with <dA', A> come back. With one rank a group
//! nothing travels and the experts read the tokens where they lie.
//!
//! In several chunks of tokens that is done by `chunks.rs`.
//!
//! A token's K contributions are summed at its own rank in ascending logical expert id, and the
//! rows of a segment (expert, source) stand in token order: no bit depends on who computes. How
//! many rows there are stands in device memory; buffers of rows are as long as the worst case.

use crate::engine::backward::Leaf;
use crate::engine::chunks::{Chunk, Summed};
use crate::engine::forward::Pass;
use crate::engine::links::{Links, Travelling};
use crate::engine::model::Model;
use moejob_kernels::{
    Activation, Buffer, ExpertsDgrad, ExpertsDown, ExpertsDownBackward, ExpertsDownWgrad,
    ExpertsUp, ExpertsUpWgrad, GatherCounted, Layout as Order, MapIds, Matmul, Place,
    Room, Route, RouteBackward, RouteGroups, RoutePlan, ScatterRows, Scoring, SumCounts,
};
use moejob_protocol::model::{Activation as ActivationName, AuxLossScope, Scoring as ScoringName};

/// What the expert products of one rank read in one round, or in a chunk of it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RoutedRows {
    /// [U, D]
    pub x: Buffer,
    /// u32 [R]
    pub index: Buffer,
    /// u32 [G * S + 1]
    pub offsets: Buffer,
    /// `S`
    pub sources: usize,
}

impl Model {
    /// The rows that this rank computes in `layer`, of a chunk.
    pub(crate) fn routed_rows(&self, layer: usize, chunk: &Chunk) -> RoutedRows {
        let moe = &chunk.moe;
        let Some(routes) = &moe.routes else {
            let x = self.moe_input(layer, chunk.round.tokens);
            return RoutedRows { x, index: moe.rows, offsets: moe.offsets, sources: 1 };
        };
        let (sources, offsets) = (chunk.round.sources.len(), moe.segments);
        RoutedRows { x: routes.tokens, index: moe.row_index, offsets, sources }
    }

    /// Under the scope `hf` the layers are one: the loads of a layer's auxiliary loss are those of
    /// all layers together.
    pub(crate) fn has_one_balance(&self) -> bool {
        self.config.router.aux_loss_scope == AuxLossScope::Hf && !self.mixture.is_empty()
    }

    /// u32 [E] of each mixture layer
    pub(crate) fn all_counts(&self) -> Vec<Buffer> {
        self.mixture.iter().map(|layer| self.router(*layer).counts).collect()
    }
}

impl Pass<'_> {
    /// out = mid + sum over the token's experts
    pub(crate) fn moe_forward(&mut self, layer: usize, out: Buffer) {
        let t = self.round.tokens;
        if t > 0 {
            if self.model.plain {
                self.route(layer, t);
            } else {
                self.drop_input(layer, t);
                self.gate(layer, t);
            }
            self.record_routing(layer, t);
            self.choose_slices(layer, t);
        }
        if self.model.chunk_count() > 1 {
            return self.forward_in_chunks(layer, out);
        }
        let whole = self.model.whole(layer, self.round);
        if t > 0 {
            self.place(layer, &whole);
        }
        let alone = self.model.group.is_alone();
        if alone && t == 0 {
            return;
        }
        if alone {
            self.weights_to_rows(&whole);
        } else {
            self.dispatch(layer, &whole);
        }
        let rows = self.model.routed_rows(layer, &whole);
        if rows.sources > 0 {
            self.experts_up(layer, &whole, &rows);
            self.experts_down(layer, &whole, &rows);
        }
        self.rows_back(layer, &whole, false);
        if t > 0 {
            self.sum_rows(layer, &whole, out);
        }
    }

    fn route(&mut self, layer: usize, t: usize) {
        let (e, k, d) = (self.model.expert_count(), self.model.top_k(), self.model.dim());
        let kept = self.model.router(layer);
        let logits = kept.logits.slice(0, t * e);
        let router = self.model.dense.layers[layer].router.expect("a mixture layer has a router");
        let (layout, accumulate) = (Order::Nt, false);
        let (a, b, c) = (self.model.buffers.layers[layer].norm2.slice(0, t * d), router, logits);
        self.model.device.matmul(&Matmul { layout, m: t, n: e, k: d, accumulate, a, b, c });
        let config = &self.model.config.router;
        let groups = RouteGroups {
            count: config.groups as usize,
            kept: config.topk_groups as usize,
        };
        let op = Route {
            tokens: t,
            experts: e,
            top_k: k,
            scoring: scoring(config.scoring),
            norm_topk: config.norm_topk_prob,
            scale: config.scale,
            groups: (config.groups > 1).then_some(groups),
            logits,
            bias: self.model.dense.layers[layer].correction,
            probs: kept.probs.slice(0, t * e),
            lse: kept.lse.slice(0, t),
            ids: kept.ids.slice(0, t * k),
            weights: kept.weights.slice(0, t * k),
            counts: kept.counts,
            prob_sums: kept.prob_sums,
            losses: kept.losses.slice(0, 2),
        };
        self.model.device.route(&op);
    }

    /// Sorts the own slots by (rank that computes, expert, token).
    pub(crate) fn place(&mut self, layer: usize, chunk: &Chunk) {
        let (moe, mut ids) = (&chunk.moe, chunk.ids);
        if let Some(routes) = &moe.routes
            && self.model.group.layers[layer].is_shuffled()
        {
            let out = chunk.scratch.ids;
            self.model.device.map_ids(&MapIds { table: routes.order, ids, out });
            ids = out;
        }
        let op = Place {
            tokens: chunk.round.tokens,
            top_k: self.model.slices().slots,
            experts: self.model.slices().count,
            ids,
            counts: chunk.scratch.counts,
            offsets: moe.offsets,
            rows: moe.rows,
            pos: moe.pos,
        };
        self.model.device.place(&op);
    }

    /// Without expert parallelism the routed rows are read where they lie; their weights are not.
    fn weights_to_rows(&mut self, chunk: &Chunk) {
        let (rows, moe) = (chunk.moe.pos.len(), &chunk.moe);
        let y = moe.row_weights.slice(0, rows);
        let (dim, x, index) = (1, chunk.weights, moe.pos);
        self.model.device.scatter_rows(&ScatterRows { rows, dim, x, index, y });
    }

    /// Tells all choices to the group, then sends each own token once to each rank that needs it.
    fn dispatch(&mut self, layer: usize, whole: &Chunk) {
        self.share_choices(layer);
        let rooms = self.model.group.rooms();
        self.plan_routes(layer, whole, &rooms);
        let (x, into) = (self.model.moe_input(layer, whole.round.tokens), whole.routes().tokens);
        self.send_tokens(whole, x, into);
    }

    /// Everybody's choices to everybody.
    pub(crate) fn share_choices(&mut self, layer: usize) {
        let (moe, scratch) = (self.model.moe(layer), self.model.moe_scratch());
        let counts = (self.model.slices().slots, self.model.chunk_count());
        let (routes, travel) = (moe.routes.as_ref(), scratch.travel.as_ref());
        let (Some(routes), Some(travel)) = (routes, travel) else { return };
        let (at, dim, round) = (layer * counts.1, self.model.dim(), self.round);
        let Model { device, group, .. } = &mut *self.model;
        let way = Travelling { at, group, round, dim, routes, travel };
        self.links.share_choices(device, &way, &moe, counts);
    }

    /// Who sends which token of a chunk where: every rank has room for so much.
    pub(crate) fn plan_routes(&mut self, layer: usize, chunk: &Chunk, rooms: &[Room]) {
        let top_k = self.model.slices().slots;
        self.travelling(chunk, |links, model, way| {
            links.count_choices(&model.device, way, (top_k, rooms));
        });
        let (moe, routes, travel) = (&chunk.moe, chunk.routes(), chunk.travel());
        let sources: Vec<usize> = chunk.round.sources.iter().map(|source| source.tokens).collect();
        let op = RoutePlan {
            top_k,
            positions: self.model.group.ranks.len(),
            me: self.model.group.me,
            locals: self.model.group.layers[layer].locals,
            sources: &sources,
            rooms,
            all_ids: travel.all_ids,
            ids: chunk.ids,
            owner: routes.owner,
            local: routes.local,
            first: routes.first,
            offsets: moe.offsets,
            overflows: self.model.routed_overflows(),
            segments: moe.segments,
            rows: moe.row_index,
            slots: travel.slots,
            arrived: routes.arrived,
            leaving: routes.leaving,
            departures: routes.departures,
            returns: routes.returns,
        };
        self.model.device.route_plan(&op);
        let count = moe.segments.slice(moe.segments.len() - 1, 1);
        let (x, index, y) = (travel.all_weights, travel.slots, moe.row_weights);
        self.model.device.gather_counted(&GatherCounted { dim: 1, count, x, index, y });
    }

    /// Rows of `x` [T, D] to the ranks that need them; what arrives goes to `into` [U, D].
    fn send_tokens(&mut self, chunk: &Chunk, x: Buffer, into: Buffer) {
        self.gather_leaving(chunk, x);
        self.travelling(chunk, |links, model, way| {
            links.dispatch(&mut model.device, way, into);
        });
    }

    /// Rows of the own tokens `x` [T, D] in the order in which they leave.
    pub(crate) fn gather_leaving(&mut self, chunk: &Chunk, x: Buffer) {
        let routes = chunk.routes();
        let count = routes.departures.slice(routes.departures.len() - 1, 1);
        let (dim, index, y) = (self.model.dim(), routes.leaving, chunk.travel().leaving);
        self.model.device.gather_counted(&GatherCounted { dim, count, x, index, y });
    }

    /// The experts' rows of the own tokens, and with `with_ds` their `ds`, to [`Chunk::returned`].
    fn rows_back(&mut self, layer: usize, chunk: &Chunk, with_ds: bool) {
        if self.model.group.is_alone() {
            return;
        }
        let segments = self.model.routed_rows(layer, chunk).offsets;
        self.travelling(chunk, |links, model, way| {
            links.combine(&mut model.device, way, (&chunk.scratch, segments), with_ds);
        });
    }

    /// Calls a verb with what it moves.
    pub(crate) fn travelling<T>(
        &mut self,
        chunk: &Chunk,
        verb: impl FnOnce(&mut Links, &mut Model, &Travelling) -> T,
    ) -> T {
        let group = self.model.group.clone();
        let (round, dim, at) = (&chunk.round, self.model.dim(), chunk.at);
        let (routes, travel) = (chunk.routes(), chunk.travel());
        let way = Travelling { at, group: &group, round, dim, routes, travel };
        verb(self.links, self.model, &way)
    }

    pub(crate) fn experts_up(&mut self, layer: usize, chunk: &Chunk, rows: &RoutedRows) {
        let model = &mut *self.model;
        let (dim, hidden) = (model.dim(), model.slices().width);
        let (moe, sources, offsets) = (&chunk.moe, rows.sources, rows.offsets);
        model.device.experts_up(&ExpertsUp {
            dim,
            hidden,
            sources,
            activation: activation(model.config.experts.activation),
            gated: true,
            x: rows.x,
            row_index: rows.index,
            offsets,
            w_gate: &model.experts[layer].gate,
            w_up: &model.experts[layer].up,
            h: moe.h,
            a: moe.a,
        });
    }

    pub(crate) fn experts_down(&mut self, layer: usize, chunk: &Chunk, rows: &RoutedRows) {
        let model = &mut *self.model;
        let (dim, hidden) = (model.dim(), model.slices().width);
        let (sources, offsets) = (rows.sources, rows.offsets);
        let (w_down, a, y) = (&model.experts[layer].down, chunk.moe.a, chunk.scratch.y);
        model.device.experts_down(&ExpertsDown { dim, hidden, sources, a, offsets, w_down, y });
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, through experts and router.
    pub(crate) fn moe_backward(&mut self, layer: usize, leaf: &Leaf) {
        let (t, d) = (self.round.tokens, self.model.dim());
        let dx = self.model.buffers.scratch.dx.slice(0, t * d);
        if t > 0 && !self.model.plain {
            self.drop_input(layer, t);
        }
        match self.model.chunk_count() {
            1 => self.backward_at_once(layer, dx, leaf),
            _ => self.backward_in_chunks(layer, dx, leaf),
        }
        let Some(gradients) = leaf.dense else { return };
        self.sum_slices(t);
        let gradients = &gradients.layers[layer];
        if let Some(gradient) = gradients.correction {
            self.model.device.fill_zero(gradient);
        }
        if self.model.plain {
            self.sum_counts();
            let gradient = gradients.router.expect("a mixture layer has a router");
            self.route_backward(layer, t, gradient);
        } else {
            let dweights = self.model.router_scratch().dweights;
            self.gate_backward(layer, t, gradients, dweights);
        }
    }

    /// From `dx`, the gradients of the layer's outputs, to those of its inputs, as far as experts
    /// make them: in `scratch.dnorm`, and of the weights of choices in `scratch.dweights`.
    fn backward_at_once(&mut self, layer: usize, dx: Buffer, leaf: &Leaf) {
        let whole = self.model.whole(layer, self.round);
        let dy = if self.model.group.is_alone() {
            dx
        } else {
            let into = whole.travel().dy;
            self.send_tokens(&whole, dx, into);
            into
        };
        let rows = self.model.routed_rows(layer, &whole);
        if rows.sources > 0 && !leaf.experts.is_empty() {
            if self.model.shape.recompute.drops_hidden() {
                self.experts_up(layer, &whole, &rows);
            }
            self.experts_backward(layer, &whole, &rows, dy);
            let RoutedRows { x, index, offsets, sources } = rows;
            let (dh, a_scaled) = (whole.scratch.dh, whole.scratch.a_scaled);
            let summed = Summed { sources, x, dy, index, offsets, order: None, dh, a_scaled };
            self.experts_gradients(layer, &summed, leaf);
        }
        self.rows_back(layer, &whole, true);
        if leaf.dense.is_some() {
            self.sum_gradients(&whole);
        }
    }

    /// Gradients of the experts' inputs, and what those of their weights are made of.
    pub(crate) fn experts_backward(
        &mut self,
        layer: usize,
        chunk: &Chunk,
        rows: &RoutedRows,
        dy: Buffer,
    ) {
        let model = &mut *self.model;
        let (dim, hidden) = (model.dim(), model.slices().width);
        let (moe, scratch) = (&chunk.moe, &chunk.scratch);
        let (sources, offsets, row_index) = (rows.sources, rows.offsets, rows.index);
        let (weights, gated) = (&model.experts[layer], true);
        let (dh, a_scaled) = (scratch.dh, scratch.a_scaled);
        model.device.experts_down_backward(&ExpertsDownBackward {
            dim,
            hidden,
            sources,
            activation: activation(model.config.experts.activation),
            gated,
            dy,
            row_index,
            offsets,
            w_down: &weights.down,
            h: moe.h,
            a: moe.a,
            s: moe.row_weights,
            ds: scratch.ds,
            dh,
            a_scaled,
        });
        let (w_gate, w_up, dx) = (&weights.gate, &weights.up, scratch.y);
        let op = ExpertsDgrad { dim, hidden, sources, gated, dh, offsets, w_gate, w_up, dx };
        model.device.experts_dgrad(&op);
    }

    /// Gradients of the weights of the experts here.
    pub(crate) fn experts_gradients(&mut self, layer: usize, of: &Summed, leaf: &Leaf) {
        let model = &mut *self.model;
        let (dim, hidden) = (model.dim(), model.slices().width);
        let mut dw: [Vec<Buffer>; 3] = Default::default();
        for g in 0..model.experts[layer].gate.len() {
            for source in &leaf.experts {
                dw[0].push(source[layer].gate[g]);
                dw[1].push(source[layer].up[g]);
                dw[2].push(source[layer].down[g]);
            }
        }
        let Summed { sources, x, dy, index: row_index, offsets, order, dh, a_scaled } = *of;
        let dw_down = &dw[2];
        let op = ExpertsDownWgrad {
            dim, hidden, sources, dy, row_index, offsets, order, a_scaled, dw_down,
        };
        model.device.experts_down_wgrad(&op);
        let (gated, dw_gate, dw_up) = (true, &dw[0], &dw[1]);
        let op = ExpertsUpWgrad {
            dim, hidden, sources, gated, x, row_index, offsets, order, dh, dw_gate, dw_up,
        };
        model.device.experts_up_wgrad(&op);
    }

    /// The router's gradient, and dnorm += what flows through its logits.
    fn route_backward(&mut self, layer: usize, t: usize, gradient: Buffer) {
        let (e, k, d) = (self.model.expert_count(), self.model.top_k(), self.model.dim());
        let (kept, scratch) = (self.model.router(layer), self.model.router_scratch());
        let dlogits = scratch.dlogits.slice(0, t * e);
        let config = &self.model.config.router;
        let mut aux_coef = config.aux_loss_coef * self.model.router_scale;
        let mut counts = kept.counts;
        if config.aux_loss_scope == AuxLossScope::Hf {
            aux_coef /= self.model.mixture.len() as f64;
            counts = self.model.moe_scratch().counts.slice(0, e);
        }
        let op = RouteBackward {
            tokens: t,
            experts: e,
            top_k: k,
            scoring: scoring(config.scoring),
            norm_topk: config.norm_topk_prob,
            scale: config.scale,
            aux_coef,
            z_coef: config.z_loss_coef * self.model.router_scale,
            logits: kept.logits.slice(0, t * e),
            probs: kept.probs.slice(0, t * e),
            lse: kept.lse.slice(0, t),
            ids: kept.ids.slice(0, t * k),
            counts,
            dweights: scratch.dweights.slice(0, t * k),
            dlogits,
        };
        self.model.device.route_backward(&op);
        let x = self.model.buffers.layers[layer].norm2.slice(0, t * d);
        if self.model.config.router.frozen {
            self.model.device.fill_zero(gradient);
        } else {
            let (layout, accumulate) = (Order::Tn, false);
            let (a, b, c) = (dlogits, x, gradient);
            self.model.device.matmul(&Matmul { layout, m: e, n: d, k: t, accumulate, a, b, c });
        }
        let (layout, accumulate) = (Order::Nn, true);
        let b = self.model.dense.layers[layer].router.expect("a mixture layer has a router");
        let (a, c) = (dlogits, self.model.buffers.scratch.dnorm.slice(0, t * d));
        self.model.device.matmul(&Matmul { layout, m: t, n: d, k: e, accumulate, a, b, c });
    }

    /// The loads of all layers together, in `scratch.counts`, with which `Place` is done.
    fn sum_counts(&mut self) {
        if self.model.has_one_balance() {
            let (counts, out) = (self.model.all_counts(), self.model.moe_scratch().counts);
            let out = out.slice(0, self.model.expert_count());
            self.model.device.sum_counts(&SumCounts { counts: &counts, out });
        }
    }
}

pub(crate) fn scoring(name: ScoringName) -> Scoring {
    match name {
        ScoringName::Softmax => Scoring::Softmax,
        ScoringName::Sigmoid => Scoring::Sigmoid,
    }
}

pub(crate) fn activation(name: ActivationName) -> Activation {
    match name {
        ActivationName::Silu => Activation::Silu,
        ActivationName::Relu => Activation::Relu,
        ActivationName::Gelu => Activation::Gelu,
    }
}
