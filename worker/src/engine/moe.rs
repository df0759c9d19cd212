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
//! A token's K contributions are summed at its own rank in ascending logical expert id, and the
//! rows of a segment (expert, source) stand in token order: no bit depends on who computes. How
//! many rows there are stands in device memory; buffers of rows are as long as the worst case.

use crate::engine::backward::Leaf;
use crate::engine::forward::Pass;
use crate::engine::links::{Links, Travelling};
use crate::engine::model::Model;
use crate::engine::round::Round;
use moejob_kernels::numbers::tally;
use moejob_kernels::{
    Activation, Buffer, Combine, ExpertsDgrad, ExpertsDown, ExpertsDownBackward, ExpertsDownWgrad,
    ExpertsUp, ExpertsUpWgrad, GatherCounted, GatherRows, Layout as Order, MapIds, Matmul, Place,
    Route, RouteBackward, RouteGroups, RoutePlan, ScatterRows, ScatterSum, Scoring, SumCounts,
};
use moejob_protocol::buffers::{Routes, Travel};
use moejob_protocol::model::{Activation as ActivationName, AuxLossScope, Scoring as ScoringName};

/// What the expert products of one rank read in one round.
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
    fn routes(&self, layer: usize) -> (Routes<Buffer>, Travel<Buffer>) {
        let travel = self.moe_scratch().travel.expect("expert parallel memory");
        (self.moe(layer).routes.expect("expert parallel memory"), travel)
    }

    /// The rows that this rank computes in `layer`.
    pub(crate) fn routed_rows(&self, layer: usize, round: &Round) -> RoutedRows {
        let moe = self.moe(layer);
        let Some(routes) = moe.routes else {
            let (t, k) = (round.tokens, self.top_k());
            let (x, index) = (self.moe_input(layer, t), moe.rows.slice(0, t * k));
            return RoutedRows { x, index, offsets: moe.offsets, sources: 1 };
        };
        let sources = round.sources.len();
        let segments = self.group.layers[layer].locals * sources + 1;
        let offsets = moe.segments.slice(0, segments);
        RoutedRows { x: routes.tokens, index: moe.row_index, offsets, sources }
    }

    /// Under the scope `hf` the layers are one: the loads of a layer's auxiliary loss are those of
    /// all layers together.
    pub(crate) fn has_one_balance(&self) -> bool {
        self.config.router.aux_loss_scope == AuxLossScope::Hf && !self.mixture.is_empty()
    }

    /// u32 [E] of each mixture layer
    pub(crate) fn all_counts(&self) -> Vec<Buffer> {
        self.mixture.iter().map(|layer| self.moe(*layer).counts).collect()
    }
}

impl Pass<'_> {
    /// out = mid + sum over the token's experts
    pub(crate) fn moe_forward(&mut self, layer: usize, out: Buffer) {
        let (t, k, d) = (self.round.tokens, self.model.top_k(), self.model.dim());
        if t > 0 {
            if self.model.plain {
                self.route(layer, t);
            } else {
                self.drop_input(layer, t);
                self.gate(layer, t);
            }
            self.record_routing(layer, t);
            self.place(layer, t);
        }
        let alone = self.model.group.is_alone();
        if alone && t == 0 {
            return;
        }
        if alone {
            self.weights_to_rows(layer, t);
        } else {
            self.dispatch(layer);
        }
        let rows = self.model.routed_rows(layer, self.round);
        if rows.sources > 0 {
            self.experts_up(layer, &rows);
            self.experts_down(layer, &rows);
        }
        let returned = self.rows_back(layer, false).0;
        if t > 0 {
            let moe = self.model.moe(layer);
            let op = Combine {
                tokens: t,
                top_k: k,
                dim: d,
                y: returned,
                pos: moe.pos.slice(0, t * k),
                weights: moe.weights.slice(0, t * k),
                residual: Some(self.model.buffers.layers[layer].mid.slice(0, t * d)),
                out,
            };
            self.model.device.combine(&op);
        }
    }

    fn route(&mut self, layer: usize, t: usize) {
        let (e, k, d) = (self.model.expert_count(), self.model.top_k(), self.model.dim());
        let moe = self.model.moe(layer);
        let logits = moe.logits.slice(0, t * e);
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
            probs: moe.probs.slice(0, t * e),
            lse: moe.lse.slice(0, t),
            ids: moe.ids.slice(0, t * k),
            weights: moe.weights.slice(0, t * k),
            counts: moe.counts,
            prob_sums: moe.prob_sums,
            losses: moe.losses.slice(0, 2),
        };
        self.model.device.route(&op);
    }

    /// Sorts the own slots by (rank that computes, expert, token).
    fn place(&mut self, layer: usize, t: usize) {
        let k = self.model.top_k();
        let (moe, scratch) = (self.model.moe(layer), self.model.moe_scratch());
        let mut ids = moe.ids.slice(0, t * k);
        if let Some(routes) = &moe.routes
            && self.model.group.layers[layer].is_shuffled()
        {
            let out = scratch.ids.slice(0, t * k);
            self.model.device.map_ids(&MapIds { table: routes.order, ids, out });
            ids = out;
        }
        let op = Place {
            tokens: t,
            top_k: k,
            experts: self.model.expert_count(),
            ids,
            counts: scratch.counts,
            offsets: moe.offsets,
            rows: moe.rows.slice(0, t * k),
            pos: moe.pos.slice(0, t * k),
        };
        self.model.device.place(&op);
    }

    /// Without expert parallelism the routed rows are read where they lie; their weights are not.
    fn weights_to_rows(&mut self, layer: usize, t: usize) {
        let slots = t * self.model.top_k();
        let moe = self.model.moe(layer);
        self.model.device.scatter_rows(&ScatterRows {
            rows: slots,
            dim: 1,
            x: moe.weights.slice(0, slots),
            index: moe.pos.slice(0, slots),
            y: moe.row_weights.slice(0, slots),
        });
    }

    /// Tells all choices to the group, then sends each own token once to each rank that needs it.
    fn dispatch(&mut self, layer: usize) {
        let (k, t, d) = (self.model.top_k(), self.round.tokens, self.model.dim());
        let (routes, travel) = self.model.routes(layer);
        let moe = self.model.moe(layer);
        self.travelling(layer, |links, model, way| {
            links.share_choices(&mut model.device, way, &moe, k);
        });
        let sources: Vec<usize> = self.round.sources.iter().map(|source| source.tokens).collect();
        let slots = sources.iter().sum::<usize>() * k;
        let rows = self.model.routed_rows(layer, self.round);
        let rooms = self.model.group.rooms();
        let op = RoutePlan {
            top_k: k,
            positions: self.model.group.ranks.len(),
            me: self.model.group.me,
            locals: self.model.group.layers[layer].locals,
            sources: &sources,
            rooms: &rooms,
            all_ids: travel.all_ids.slice(0, slots),
            ids: moe.ids.slice(0, t * k),
            owner: routes.owner,
            local: routes.local,
            first: routes.first,
            offsets: moe.offsets,
            overflows: self.model.tally().slice(tally::OVERFLOWS, 1),
            segments: rows.offsets,
            rows: rows.index,
            slots: travel.slots,
            arrived: routes.arrived.slice(0, sources.len() + 1),
            leaving: routes.leaving,
            departures: routes.departures,
            returns: routes.returns,
        };
        self.model.device.route_plan(&op);
        let count = rows.offsets.slice(rows.offsets.len() - 1, 1);
        let (x, index, y) = (travel.all_weights, travel.slots, moe.row_weights);
        self.model.device.gather_counted(&GatherCounted { dim: 1, count, x, index, y });
        let x = self.model.moe_input(layer, t);
        self.send_tokens(layer, x.slice(0, t * d), routes.tokens);
    }

    /// Rows of `x` [T, D] to the ranks that need them; what arrives goes to `into` [U, D].
    fn send_tokens(&mut self, layer: usize, x: Buffer, into: Buffer) {
        let (routes, travel) = self.model.routes(layer);
        let count = routes.departures.slice(routes.departures.len() - 1, 1);
        let (dim, index, y) = (self.model.dim(), routes.leaving, travel.leaving);
        self.model.device.gather_counted(&GatherCounted { dim, count, x, index, y });
        self.travelling(layer, |links, model, way| links.dispatch(&mut model.device, way, into));
    }

    /// The experts' rows of the own tokens, and with `with_ds` their `ds`.
    fn rows_back(&mut self, layer: usize, with_ds: bool) -> (Buffer, Buffer) {
        let (t, k, d) = (self.round.tokens, self.model.top_k(), self.model.dim());
        let scratch = self.model.moe_scratch();
        let Some(travel) = scratch.travel.clone() else { return (scratch.y, scratch.ds) };
        let segments = self.model.routed_rows(layer, self.round).offsets;
        self.travelling(layer, |links, model, way| {
            links.combine(&mut model.device, way, &scratch, segments, with_ds);
        });
        (travel.returned.slice(0, t * k * d), travel.ds.slice(0, t * k))
    }

    /// Calls a verb with what it moves.
    fn travelling(&mut self, layer: usize, verb: impl FnOnce(&mut Links, &mut Model, &Travelling)) {
        let (routes, travel) = self.model.routes(layer);
        let group = self.model.group.clone();
        let (round, dim) = (self.round, self.model.dim());
        let way = Travelling { layer, group: &group, round, dim, routes: &routes, travel: &travel };
        verb(self.links, self.model, &way);
    }

    fn experts_up(&mut self, layer: usize, rows: &RoutedRows) {
        let model = &mut *self.model;
        let (dim, hidden) = (model.dim(), model.config.experts.intermediate_size as usize);
        let (moe, sources, offsets) = (model.moe(layer), rows.sources, rows.offsets);
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

    fn experts_down(&mut self, layer: usize, rows: &RoutedRows) {
        let model = &mut *self.model;
        let (dim, hidden) = (model.dim(), model.config.experts.intermediate_size as usize);
        let (moe, scratch) = (model.moe(layer), model.moe_scratch());
        let (sources, offsets) = (rows.sources, rows.offsets);
        let (w_down, a, y) = (&model.experts[layer].down, moe.a, scratch.y);
        model.device.experts_down(&ExpertsDown { dim, hidden, sources, a, offsets, w_down, y });
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, through experts and router.
    pub(crate) fn moe_backward(&mut self, layer: usize, leaf: &Leaf) {
        let (t, k, d) = (self.round.tokens, self.model.top_k(), self.model.dim());
        let dx = self.model.buffers.scratch.dx.slice(0, t * d);
        if t > 0 && !self.model.plain {
            self.drop_input(layer, t);
        }
        let dy = if self.model.group.is_alone() {
            dx
        } else {
            let into = self.model.routes(layer).1.dy;
            self.send_tokens(layer, dx, into);
            into
        };
        let rows = self.model.routed_rows(layer, self.round);
        if rows.sources > 0 && !leaf.experts.is_empty() {
            if self.model.shape.recompute.drops_hidden() {
                self.experts_up(layer, &rows);
            }
            self.experts_backward(layer, &rows, dy, leaf);
        }
        let (returned, ds) = self.rows_back(layer, true);
        let Some(gradients) = leaf.dense else { return };
        let pos = self.model.moe(layer).pos.slice(0, t * k);
        let out = self.model.buffers.scratch.dnorm.slice(0, t * d);
        let (accumulate, x) = (false, returned);
        let op = ScatterSum { tokens: t, top_k: k, dim: d, accumulate, x, pos, out };
        self.model.device.scatter_sum(&op);
        let y = self.model.moe_scratch().dweights.slice(0, t * k);
        self.model.device.gather_rows(&GatherRows { rows: t * k, dim: 1, x: ds, index: pos, y });
        let gradients = &gradients.layers[layer];
        if let Some(gradient) = gradients.correction {
            self.model.device.fill_zero(gradient);
        }
        if self.model.plain {
            self.sum_counts();
            let gradient = gradients.router.expect("a mixture layer has a router");
            self.route_backward(layer, t, gradient);
        } else {
            self.gate_backward(layer, t, gradients);
        }
    }

    fn experts_backward(&mut self, layer: usize, rows: &RoutedRows, dy: Buffer, leaf: &Leaf) {
        let model = &mut *self.model;
        let (dim, hidden) = (model.dim(), model.config.experts.intermediate_size as usize);
        let (moe, scratch) = (model.moe(layer), model.moe_scratch());
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
        let mut dw: [Vec<Buffer>; 3] = Default::default();
        for g in 0..weights.gate.len() {
            for source in &leaf.experts {
                dw[0].push(source[layer].gate[g]);
                dw[1].push(source[layer].up[g]);
                dw[2].push(source[layer].down[g]);
            }
        }
        let dw_down = &dw[2];
        let op =
            ExpertsDownWgrad { dim, hidden, sources, dy, row_index, offsets, a_scaled, dw_down };
        model.device.experts_down_wgrad(&op);
        let (x, dw_gate, dw_up) = (rows.x, &dw[0], &dw[1]);
        let op = ExpertsUpWgrad {
            dim, hidden, sources, gated, x, row_index, offsets, dh, dw_gate, dw_up,
        };
        model.device.experts_up_wgrad(&op);
        let (w_gate, w_up, dx) = (&weights.gate, &weights.up, scratch.y);
        let op = ExpertsDgrad { dim, hidden, sources, gated, dh, offsets, w_gate, w_up, dx };
        model.device.experts_dgrad(&op);
    }

    /// The router's gradient, and dnorm += what flows through its logits.
    fn route_backward(&mut self, layer: usize, t: usize, gradient: Buffer) {
        let (e, k, d) = (self.model.expert_count(), self.model.top_k(), self.model.dim());
        let (moe, scratch) = (self.model.moe(layer), self.model.moe_scratch());
        let dlogits = scratch.dlogits.slice(0, t * e);
        let config = &self.model.config.router;
        let mut aux_coef = config.aux_loss_coef * self.model.router_scale;
        let mut counts = moe.counts;
        if config.aux_loss_scope == AuxLossScope::Hf {
            aux_coef /= self.model.mixture.len() as f64;
            counts = scratch.counts;
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
            logits: moe.logits.slice(0, t * e),
            probs: moe.probs.slice(0, t * e),
            lse: moe.lse.slice(0, t),
            ids: moe.ids.slice(0, t * k),
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
