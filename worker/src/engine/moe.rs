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
//! rows of a segment (expert, source) stand in token order: no bit depends on who computes.

use crate::gang::comm::{Comm, CommError};
use crate::engine::dispatch::{Round, Rows};
use crate::engine::model::{Leaf, Model};
use moejob_kernels::{
    Activation, Buffer, Combine, ExpertsDgrad, ExpertsDown, ExpertsDownBackward, ExpertsDownWgrad,
    ExpertsUp, ExpertsUpWgrad, GatherRows, Layout as Order, Matmul, NO_EXPERT, Place, Route,
    RouteBackward, RouteGroups, ScatterRows, ScatterSum, Scoring,
};
use moejob_protocol::buffers::{Moe, MoeScratch, Travel};
use moejob_protocol::model::{Activation as ActivationName, AuxLossScope, Scoring as ScoringName};

impl Model {
    /// `K`: slots of a token.
    pub(crate) fn top_k(&self) -> usize {
        self.config.slots() as usize
    }

    /// Rows of the own tokens: a slot without an expert has none.
    pub(crate) fn own_rows(&self, layer: usize, t: usize) -> usize {
        if self.plain || t == 0 {
            return t * self.top_k();
        }
        let offsets: Vec<u32> = self.device.read_vec(self.moe(layer).offsets);
        offsets.last().map_or(0, |end| *end as usize)
    }

    pub(crate) fn expert_count(&self) -> usize {
        self.config.experts.count as usize
    }

    pub(crate) fn moe(&self, layer: usize) -> Moe<Buffer> {
        self.buffers.layers[layer].moe.clone().expect("a mixture layer")
    }

    pub(crate) fn moe_scratch(&self) -> MoeScratch<Buffer> {
        self.buffers.scratch.moe.clone().expect("a model with experts has their scratch memory")
    }

    pub(crate) fn travel(&self) -> Travel<Buffer> {
        self.moe_scratch().travel.expect("expert parallel memory")
    }

    /// out = mid + sum over the token's experts
    pub(crate) fn moe_forward(
        &mut self,
        layer: usize,
        round: &Round,
        out: Buffer,
        comm: &mut Comm,
    ) -> Result<(), CommError> {
        let (t, k, d) = (round.tokens, self.top_k(), self.dim());
        if t > 0 {
            if self.plain {
                self.route(layer, t);
            } else {
                self.drop_input(layer, t);
                self.gate(layer, t);
            }
            self.place(layer, t);
        }
        let rows = if self.group.ranks.len() == 1 {
            if t == 0 {
                return Ok(());
            }
            self.rows_here(layer, t)
        } else {
            self.dispatch(layer, round, comm)?
        };
        if rows.count > 0 {
            self.experts_forward(layer, &rows);
        }
        let returned = if self.group.ranks.len() == 1 {
            self.moe_scratch().y.slice(0, rows.count * d)
        } else {
            self.send_back(layer, round, comm, false)?;
            self.travel().returned.slice(0, t * k * d)
        };
        if t > 0 {
            let moe = self.moe(layer);
            self.device.combine(&Combine {
                tokens: t,
                top_k: k,
                dim: d,
                y: returned,
                pos: moe.pos.slice(0, t * k),
                weights: moe.weights.slice(0, t * k),
                residual: Some(self.buffers.layers[layer].mid.slice(0, t * d)),
                out,
            });
        }
        Ok(())
    }

    fn route(&mut self, layer: usize, t: usize) {
        let (e, k, d) = (self.expert_count(), self.top_k(), self.dim());
        let moe = self.moe(layer);
        let logits = moe.logits.slice(0, t * e);
        let router = self.dense.layers[layer].router.expect("a mixture layer has a router");
        self.device.matmul(&Matmul {
            layout: Order::Nt,
            m: t,
            n: e,
            k: d,
            accumulate: false,
            a: self.buffers.layers[layer].norm2.slice(0, t * d),
            b: router,
            c: logits,
        });
        let config = &self.config.router;
        let groups = RouteGroups {
            count: config.groups as usize,
            kept: config.topk_groups as usize,
        };
        self.device.route(&Route {
            tokens: t,
            experts: e,
            top_k: k,
            scoring: scoring(config.scoring),
            norm_topk: config.norm_topk_prob,
            scale: config.scale,
            groups: (config.groups > 1).then_some(groups),
            logits,
            bias: self.dense.layers[layer].correction,
            probs: moe.probs.slice(0, t * e),
            lse: moe.lse.slice(0, t),
            ids: moe.ids.slice(0, t * k),
            weights: moe.weights.slice(0, t * k),
            counts: moe.counts,
            prob_sums: moe.prob_sums,
            losses: moe.losses,
        });
    }

    /// Sorts the own slots by (rank that computes, expert, token).
    fn place(&mut self, layer: usize, t: usize) {
        let k = self.top_k();
        let (moe, scratch) = (self.moe(layer), self.moe_scratch());
        let order = &self.group.layers[layer].order;
        let mut ids = moe.ids.slice(0, t * k);
        if order.iter().enumerate().any(|(expert, at)| expert as u32 != *at) {
            let mut host: Vec<u32> = self.device.read_vec(ids);
            for id in host.iter_mut().filter(|id| **id != NO_EXPERT) {
                *id = order[*id as usize];
            }
            ids = scratch.ids.slice(0, t * k);
            self.device.write(ids, &host);
        }
        self.device.place(&Place {
            tokens: t,
            top_k: k,
            experts: self.expert_count(),
            ids,
            counts: scratch.counts,
            offsets: moe.offsets,
            rows: moe.rows.slice(0, t * k),
            pos: moe.pos.slice(0, t * k),
        });
    }

    /// Without expert parallelism the routed rows are read where they lie.
    fn rows_here(&mut self, layer: usize, t: usize) -> Rows {
        let k = self.top_k();
        let moe = self.moe(layer);
        self.device.scatter_rows(&ScatterRows {
            rows: t * k,
            dim: 1,
            x: moe.weights.slice(0, t * k),
            index: moe.pos.slice(0, t * k),
            y: moe.row_weights.slice(0, t * k),
        });
        let count = self.own_rows(layer, t);
        Rows {
            x: self.moe_input(layer, t),
            index: moe.rows.slice(0, count),
            offsets: moe.offsets,
            count,
            sources: 1,
        }
    }

    fn experts_forward(&mut self, layer: usize, rows: &Rows) {
        let (d, f) = (self.dim(), self.config.experts.intermediate_size as usize);
        let (moe, scratch) = (self.moe(layer), self.moe_scratch());
        let a = moe.a.slice(0, rows.count * f);
        self.device.experts_up(&ExpertsUp {
            dim: d,
            hidden: f,
            sources: rows.sources,
            activation: activation(self.config.experts.activation),
            gated: true,
            x: rows.x,
            row_index: rows.index,
            offsets: rows.offsets,
            w_gate: &self.experts[layer].gate,
            w_up: &self.experts[layer].up,
            h: moe.h.slice(0, rows.count * 2 * f),
            a,
        });
        self.device.experts_down(&ExpertsDown {
            dim: d,
            hidden: f,
            sources: rows.sources,
            a,
            offsets: rows.offsets,
            w_down: &self.experts[layer].down,
            y: scratch.y.slice(0, rows.count * d),
        });
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, through experts and router.
    pub(crate) fn moe_backward(
        &mut self,
        layer: usize,
        round: &Round,
        leaf: &Leaf,
        comm: &mut Comm,
    ) -> Result<(), CommError> {
        let (t, k, d) = (round.tokens, self.top_k(), self.dim());
        let dx = self.buffers.scratch.dx;
        let alone = self.group.ranks.len() == 1;
        if t > 0 && !self.plain {
            self.drop_input(layer, t);
        }
        let dy = if alone {
            dx.slice(0, t * d)
        } else {
            let into = self.travel().dy;
            self.send_tokens(layer, round, dx, into, comm)?;
            into
        };
        let rows = self.arrived_rows(layer, round);
        if rows.sources > 0 && !leaf.experts.is_empty() {
            self.experts_backward(layer, &rows, dy, leaf);
        }
        let scratch = self.moe_scratch();
        let (returned, ds) = if alone {
            (scratch.y.slice(0, rows.count * d), scratch.ds.slice(0, rows.count))
        } else {
            self.send_back(layer, round, comm, true)?;
            let travel = self.travel();
            (travel.returned.slice(0, t * k * d), travel.ds.slice(0, t * k))
        };
        let Some(gradients) = leaf.dense else { return Ok(()) };
        let pos = self.moe(layer).pos.slice(0, t * k);
        let dnorm = self.buffers.scratch.dnorm.slice(0, t * d);
        self.device.scatter_sum(&ScatterSum {
            tokens: t,
            top_k: k,
            dim: d,
            accumulate: false,
            x: returned,
            pos,
            out: dnorm,
        });
        let y = scratch.dweights.slice(0, t * k);
        self.device.gather_rows(&GatherRows { rows: t * k, dim: 1, x: ds, index: pos, y });
        let gradients = &gradients.layers[layer];
        if let Some(gradient) = gradients.correction {
            self.device.fill_zero(gradient);
        }
        if self.plain {
            let gradient = gradients.router.expect("a mixture layer has a router");
            self.route_backward(layer, t, gradient);
        } else {
            self.gate_backward(layer, t, gradients);
        }
        Ok(())
    }

    fn experts_backward(&mut self, layer: usize, rows: &Rows, dy: Buffer, leaf: &Leaf) {
        let (dim, hidden) = (self.dim(), self.config.experts.intermediate_size as usize);
        let (moe, scratch) = (self.moe(layer), self.moe_scratch());
        let (sources, offsets, row_index) = (rows.sources, rows.offsets, rows.index);
        let dh = scratch.dh.slice(0, rows.count * 2 * hidden);
        let a_scaled = scratch.a_scaled.slice(0, rows.count * hidden);
        self.device.experts_down_backward(&ExpertsDownBackward {
            dim,
            hidden,
            sources,
            activation: activation(self.config.experts.activation),
            gated: true,
            dy,
            row_index,
            offsets,
            w_down: &self.experts[layer].down,
            h: moe.h.slice(0, rows.count * 2 * hidden),
            a: moe.a.slice(0, rows.count * hidden),
            s: moe.row_weights.slice(0, rows.count),
            ds: scratch.ds.slice(0, rows.count),
            dh,
            a_scaled,
        });
        let locals = self.experts[layer].gate.len();
        let mut dw: [Vec<Buffer>; 3] = Default::default();
        for g in 0..locals {
            for source in &leaf.experts {
                dw[0].push(source[layer].gate[g]);
                dw[1].push(source[layer].up[g]);
                dw[2].push(source[layer].down[g]);
            }
        }
        let dw_down = &dw[2];
        let op =
            ExpertsDownWgrad { dim, hidden, sources, dy, row_index, offsets, a_scaled, dw_down };
        self.device.experts_down_wgrad(&op);
        self.device.experts_up_wgrad(&ExpertsUpWgrad {
            dim,
            hidden,
            sources,
            gated: true,
            x: rows.x,
            row_index,
            offsets,
            dh,
            dw_gate: &dw[0],
            dw_up: &dw[1],
        });
        self.device.experts_dgrad(&ExpertsDgrad {
            dim,
            hidden,
            sources,
            gated: true,
            dh,
            offsets,
            w_gate: &self.experts[layer].gate,
            w_up: &self.experts[layer].up,
            dx: scratch.y.slice(0, rows.count * dim),
        });
    }

    /// The router's gradient, and dnorm += what flows through its logits.
    fn route_backward(&mut self, layer: usize, t: usize, gradient: Buffer) {
        let (e, k, d) = (self.expert_count(), self.top_k(), self.dim());
        let (moe, scratch) = (self.moe(layer), self.moe_scratch());
        let dlogits = scratch.dlogits.slice(0, t * e);
        let config = &self.config.router;
        let mut aux_coef = config.aux_loss_coef * self.router_scale;
        let mut counts = moe.counts;
        if config.aux_loss_scope == AuxLossScope::Hf {
            aux_coef /= self.mixture_layers().count() as f64;
            counts = scratch.counts;
        }
        self.device.route_backward(&RouteBackward {
            tokens: t,
            experts: e,
            top_k: k,
            scoring: scoring(config.scoring),
            norm_topk: config.norm_topk_prob,
            scale: config.scale,
            aux_coef,
            z_coef: config.z_loss_coef * self.router_scale,
            logits: moe.logits.slice(0, t * e),
            probs: moe.probs.slice(0, t * e),
            lse: moe.lse.slice(0, t),
            ids: moe.ids.slice(0, t * k),
            counts,
            dweights: scratch.dweights.slice(0, t * k),
            dlogits,
        });
        let x = self.buffers.layers[layer].norm2.slice(0, t * d);
        if self.config.router.frozen {
            self.device.fill_zero(gradient);
        } else {
            let (layout, accumulate) = (Order::Tn, false);
            let (a, b, c) = (dlogits, x, gradient);
            self.device.matmul(&Matmul { layout, m: e, n: d, k: t, accumulate, a, b, c });
        }
        let (layout, accumulate) = (Order::Nn, true);
        let b = self.dense.layers[layer].router.expect("a mixture layer has a router");
        let (a, c) = (dlogits, self.buffers.scratch.dnorm.slice(0, t * d));
        self.device.matmul(&Matmul { layout, m: t, n: d, k: e, accumulate, a, b, c });
    }

    /// Moves the corrections of every layer by the loads of the whole step, `[layer][expert]`. Each
    /// rank holds all corrections and knows all loads, so all do alike.
    pub fn balance(&mut self, loads: &[u64]) {
        let (experts, config) = (self.expert_count(), &self.config.router);
        let rate = config.bias_update_rate;
        if rate == 0.0 || config.frozen {
            return;
        }
        let corrections: Vec<Buffer> =
            self.dense.layers.iter().filter_map(|layer| layer.correction).collect();
        for (buffer, loads) in corrections.into_iter().zip(loads.chunks_exact(experts)) {
            let total = loads.iter().sum();
            let next = |(bias, count): (f64, &u64)| {
                corrected(bias, rate, *count, total, experts as u64)
            };
            if self.shape.float_bytes == 8 {
                let old: Vec<f64> = self.device.read_vec(buffer);
                let new: Vec<f64> = old.into_iter().zip(loads).map(next).collect();
                self.device.write(buffer, &new);
            } else {
                let old: Vec<f32> = self.device.read_vec(buffer);
                let old = old.into_iter().map(f64::from);
                let new: Vec<f32> = old.zip(loads).map(|pair| next(pair) as f32).collect();
                self.device.write(buffer, &new);
            }
        }
    }

    /// Under the scope `hf` the layers are one: the loads of a layer's auxiliary loss are those of
    /// all layers together. `Place` is done with `scratch.counts` before backward begins.
    pub(crate) fn sum_counts(&mut self) {
        let none = self.mixture_layers().count() == 0;
        if self.config.router.aux_loss_scope != AuxLossScope::Hf || none {
            return;
        }
        let mut sums = vec![0_u32; self.expert_count()];
        for moe in self.buffers.layers.iter().filter_map(|layer| layer.moe.as_ref()) {
            let counts: Vec<u32> = self.device.read_vec(moe.counts);
            sums.iter_mut().zip(counts).for_each(|(sum, count)| *sum += count);
        }
        self.device.write(self.moe_scratch().counts, &sums);
    }

    /// The auxiliary loss of all layers concatenated, as Hugging Face's
    /// `load_balancing_loss_func` has it: E * sum_e load[e] * mean_prob[e], both means over the
    /// layers. It comes times the layers, as a sum over them would.
    pub(crate) fn concatenated_aux_loss(&self, tokens: usize) -> f64 {
        let experts = self.expert_count();
        let (mut loads, mut probs) = (vec![0_u64; experts], vec![0.0; experts]);
        for moe in self.buffers.layers.iter().filter_map(|layer| layer.moe.as_ref()) {
            let counts: Vec<u32> = self.device.read_vec(moe.counts);
            loads.iter_mut().zip(counts).for_each(|(sum, count)| *sum += u64::from(count));
            let sums: Vec<f64> = self.device.read_vec(moe.prob_sums);
            probs.iter_mut().zip(sums).for_each(|(sum, more)| *sum += more);
        }
        let products = loads.iter().zip(&probs).fold(0.0, |sum, (load, prob)| {
            sum + *load as f64 * prob
        });
        let tokens = tokens as f64;
        let layers = self.mixture_layers().count().max(1) as f64;
        experts as f64 * products / (tokens * tokens * layers)
    }
}

/// The correction of an expert after a step in which `count` of `total` slots chose it, of
/// `experts`: a rate more below the mean load, a rate less above it (Wang et al. 2024,
/// auxiliary-loss-free balancing). The loads are whole numbers, so no rounding decides.
pub fn corrected(bias: f64, rate: f64, count: u64, total: u64, experts: u64) -> f64 {
    match (u128::from(count) * u128::from(experts)).cmp(&u128::from(total)) {
        std::cmp::Ordering::Less => bias + rate,
        std::cmp::Ordering::Equal => bias,
        std::cmp::Ordering::Greater => bias - rate,
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

#[cfg(test)]
mod tests {
    use super::corrected;

    #[test]
    fn a_correction_moves_against_the_load() {
        let of = |count| corrected(0.5, 0.25, count, 12, 4);
        assert_eq!([of(0), of(2), of(3), of(4), of(12)], [0.75, 0.75, 0.5, 0.25, 0.25]);
        // The mean of 7 over 3 lies between 2 and 3.
        assert_eq!([2, 3].map(|count| corrected(0.0, 1.0, count, 7, 3)), [1.0, -1.0]);
    }
}
