//! The mixture layer as one op, where a rank holds all experts of its layers.
//!
//! The op routes, computes the experts and combines, and adds its losses and loads to the step's
//! numbers by itself. What it keeps for backward lies in `Layer::fused`.

use crate::engine::backward::Leaf;
use crate::engine::forward::Pass;
use crate::engine::model::Model;
use crate::engine::round::Aim;
use moejob_kernels::cuda::{
    Gradients, MoeActivation, MoeDesc, MoeNumbers, MoeTensors, Output, Saved, Weights,
};
use moejob_kernels::numbers::record;
use moejob_kernels::{Buffer, DType, MoeBackward, MoeForward, MoeHidden, RouteGroups};
use moejob_protocol::buffers::Fused;
use moejob_protocol::model::{Activation, ModelConfig, Scoring};

/// The layer of `tokens` in `segments`, whose losses count `router_scale` times.
pub(crate) fn describe(
    model: &ModelConfig,
    [element, gradient]: [DType; 2],
    tokens: usize,
    segments: usize,
    router_scale: f64,
) -> MoeDesc {
    let (experts, router) = (&model.experts, &model.router);
    let (count, kept) = (router.groups as usize, router.topk_groups as usize);
    MoeDesc {
        element,
        tokens,
        dim: model.hidden_size as usize,
        hidden: experts.intermediate_size as usize,
        experts: experts.count as usize,
        top_k: experts.per_token as usize,
        part: false,
        activation: match experts.activation {
            Activation::Silu => MoeActivation::Silu,
            Activation::Relu => MoeActivation::Relu,
            Activation::Gelu => MoeActivation::GeluTanh,
        },
        gated: true,
        sigmoid: router.scoring == Scoring::Sigmoid,
        norm_topk: router.norm_topk_prob,
        scale: router.scale as f32,
        groups: (count > 1).then_some(RouteGroups { count, kept }),
        segments,
        sources: 1,
        aux_coef: router.aux_loss_coef * router_scale,
        z_coef: router.z_loss_coef * router_scale,
        weight_gradients: match gradient {
            same if same == element => Output::Element,
            DType::F64 | DType::Pair => Output::Sums,
            _ => Output::F32,
        },
    }
}

impl Model {
    /// What the layer's op reads and keeps; `counted`: it adds to the step's numbers.
    fn moe_tensors(&self, layer: usize, counted: bool) -> Option<MoeTensors> {
        let b = &self.buffers.layers[layer];
        let stacks = self.stacks[layer]?;
        let dense = &self.dense.layers[layer];
        let numbers = self.buffers.numbers.reduced;
        let loads = self.numbers.loads(self.mixture_place(layer));
        let numbers = MoeNumbers {
            losses: self.buffers.numbers.record.slice(record::AUX, 2),
            loads: numbers.slice(loads.start, loads.len()),
        };
        Some(MoeTensors {
            x: b.norm2,
            residual: Some(b.mid),
            weights: Weights {
                router: dense.router?,
                bias: dense.correction,
                up: stacks.up,
                down: stacks.down,
            },
            saved: saved(b.fused.as_ref()?),
            workspace: self.buffers.scratch.workspace,
            numbers: counted.then_some(numbers),
            loss_scale: self.buffers.numbers.loss_scale,
        })
    }
}

fn saved(fused: &Fused<Buffer>) -> Saved {
    Saved {
        h: fused.h,
        a: fused.a,
        logits: fused.logits,
        probs: fused.probs,
        lse: fused.lse,
        ids: fused.ids,
        weights: fused.weights,
        counts: fused.counts,
        offsets: fused.offsets,
        order: fused.order,
        rows: fused.rows,
        pos: fused.pos,
        row_weights: fused.row_weights,
        segment_counts: fused.segment_counts,
        prob_sums: fused.prob_sums,
        losses: fused.losses,
        router_halves: fused.router_halves,
    }
}

impl Pass<'_> {
    /// out = mid + the layer; false: this model has its layers in parts.
    pub(crate) fn fused_forward(&mut self, layer: usize, out: Buffer) -> bool {
        let Some(desc) = self.model.fused else { return false };
        let counted = matches!(self.round.aim, Aim::Record(_)) && !self.again;
        let Some(tensors) = self.model.moe_tensors(layer, counted) else { return false };
        let own = (self.round.tokens > 0).then_some(tensors);
        if self.model.here.is_some() {
            self.spread_forward(layer, own, out);
            return true;
        }
        let Some(tensors) = own else { return true };
        self.model.device.moe_forward(&MoeForward { desc, tensors, out });
        true
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, through experts and router.
    pub(crate) fn fused_backward(&mut self, layer: usize, leaf: &Leaf) -> bool {
        let Some(desc) = self.model.fused else { return false };
        let Some(tensors) = self.model.moe_tensors(layer, false) else { return false };
        let own = (self.round.tokens > 0).then_some(tensors);
        if self.model.here.is_some() {
            self.spread_backward(layer, own, leaf);
            return true;
        }
        let Some(tensors) = own else { return true };
        let (Some(dense), Some(Some(stacks))) = (leaf.dense, leaf.stacks.get(layer)) else {
            return false;
        };
        let router = dense.layers[layer].router.expect("a mixture layer has a router");
        let gradients = Gradients {
            router,
            up: stacks.up,
            down: stacks.down,
            accumulate: leaf.accumulate_experts,
            accumulate_router: leaf.accumulate,
        };
        let recompute = self.model.shape.recompute;
        // The last mixture layer's rows are those that forward left.
        if recompute.drops_hidden() && self.model.mixture.last() != Some(&layer) {
            self.model.device.moe_hidden(&MoeHidden { desc, tensors });
            self.mark("hidden again", Some(layer));
        }
        let (dout, dx) = (self.model.buffers.scratch.dx, self.model.buffers.scratch.dnorm);
        self.model.device.moe_backward(&MoeBackward { desc, tensors, dout, dx, gradients });
        true
    }
}
