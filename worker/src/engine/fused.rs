//! The mixture layer where a rank holds all experts of its layers.
//!
//! ```text
//! dropless top-k     one op: choose -> place -> experts -> combine, and all of it backwards
//! any other router   gate (`gate.rs`) -> choices -> place -> experts -> combine
//! ```
//! What it keeps for backward lies in `Layer::fused`. Nobody behind a choice knows which router
//! made it.

use crate::engine::backward::Leaf;
use crate::engine::forward::Pass;
use crate::engine::model::Model;
use moejob_kernels::{
    Buffer, DType, Each, Gradients, MoeBackward, MoeDesc, MoeExperts,
    MoeExpertsBackward, MoeForward, MoeHidden, MoePlace, MoeRoute, MoeTensors, Output, RouteGroups,
    Saved, Sources, Weights,
};
use moejob_protocol::buffers::Fused;
use moejob_protocol::model::{ModelConfig, Scoring};

/// The layer of `tokens` in `segments`, whose losses count `router_scale` times. Where a gate
/// chooses it is a part: the experts alone.
pub(crate) fn describe(
    model: &ModelConfig,
    [element, gradient]: [DType; 2],
    tokens: usize,
    segments: usize,
    router_scale: f64,
) -> MoeDesc {
    let (experts, router) = (&model.experts, &model.router);
    let (count, kept) = (router.groups as usize, router.topk_groups as usize);
    let plain = router.is_of_one_op();
    MoeDesc {
        element,
        tokens,
        dim: model.hidden_size as usize,
        hidden: experts.intermediate_size as usize,
        experts: experts.count as usize,
        top_k: model.slots() as usize,
        part: !plain,
        activation: experts.activation,
        gated: true,
        sigmoid: router.scoring == Scoring::Sigmoid,
        norm_topk: router.norm_topk_prob,
        scale: router.scale as f32,
        groups: (plain && count > 1).then_some(RouteGroups { count, kept }),
        segments: if plain { segments } else { 1 },
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
    /// The layer of the tokens of a round.
    fn layer_of(&self, tokens: usize) -> Option<MoeDesc> {
        Some(MoeDesc { tokens, ..self.fused? })
    }

    /// What the layer's ops read and keep of `t` tokens.
    fn moe_tensors(&self, layer: usize, t: usize) -> Option<MoeTensors> {
        let b = &self.buffers.layers[layer];
        let stacks = self.stacks[layer]?;
        let dense = &self.dense.layers[layer];
        let fused = b.fused.as_ref()?;
        Some(MoeTensors {
            x: self.moe_input(layer, t),
            residual: Some(b.mid.slice(0, t * self.dim())),
            weights: Weights {
                // A router by itself reads its own weights.
                router: dense.router.unwrap_or(fused.router.losses.slice(0, 0)),
                bias: dense.correction,
                up: stacks.up,
                down: stacks.down,
            },
            saved: saved(fused, t, self.fused?.tokens, [self.expert_count(), self.top_k()]),
            workspace: self.buffers.scratch.workspace,
            loss_scale: self.buffers.numbers.loss_scale,
            starts: None,
        })
    }
}

/// What is kept of `t` of `most` tokens with `K` of `E` experts each.
fn saved(fused: &Fused<Buffer>, t: usize, most: usize, [e, k]: [usize; 2]) -> Saved {
    let (router, rows) = (&fused.router, |all: Buffer| all.slice(0, all.len() / most * t));
    Saved {
        h: rows(fused.h),
        a: rows(fused.a),
        logits: router.logits.slice(0, t * e),
        probs: router.probs.slice(0, router.probs.len().min(t * e)),
        lse: router.lse.slice(0, t),
        ids: router.ids.slice(0, t * k),
        weights: router.weights.slice(0, t * k),
        counts: router.counts,
        offsets: fused.offsets,
        order: fused.order,
        rows: fused.rows.slice(0, t * k),
        pos: fused.pos.slice(0, t * k),
        row_weights: fused.row_weights.slice(0, t * k),
        segment_counts: fused.segment_counts,
        prob_sums: router.prob_sums,
        losses: router.losses.slice(0, 2),
        router_halves: fused.router_halves,
    }
}

impl Pass<'_> {
    /// out = mid + the layer
    pub(crate) fn fused_forward(&mut self, layer: usize, out: Buffer) {
        let t = self.round.tokens;
        let Some(desc) = self.model.layer_of(t) else { return };
        let Some(tensors) = self.model.moe_tensors(layer, t) else { return };
        let own = (t > 0).then_some(tensors);
        if self.model.here.is_some() {
            return self.shared_experts_forward(layer, own, out);
        }
        let Some(tensors) = own else { return };
        if self.model.plain {
            self.model.device.moe_forward(&MoeForward { desc, tensors, out });
            return self.record_routing(layer, t);
        }
        self.choose(layer, &desc, &tensors);
        self.place_all(&desc, &tensors);
        self.model.device.moe_experts(&MoeExperts { desc, tensors, out, each: None });
    }

    /// The experts of each own token, and what is recorded of that.
    pub(crate) fn choose(&mut self, layer: usize, desc: &MoeDesc, tensors: &MoeTensors) {
        let t = self.round.tokens;
        if self.model.plain {
            self.model.device.moe_route(&MoeRoute { desc: *desc, tensors: *tensors });
        } else {
            self.drop_input(layer, t);
            self.gate(layer, t);
        }
        self.record_routing(layer, t);
    }

    /// Where the rows of each expert lie, all of which are here.
    fn place_all(&mut self, desc: &MoeDesc, tensors: &MoeTensors) {
        let (top_k, saved) = (desc.top_k, tensors.saved);
        self.model.device.moe_place(&MoePlace {
            top_k,
            sources: Sources::Even { ranks: 1, each: desc.tokens, present: 1 },
            first: 0,
            locals: desc.experts,
            room: desc.slots(),
            overflows: self.model.routed_overflows(),
            saved,
            choices: None,
        });
    }

    /// dnorm = the gradient of the layer's output, `scratch.dx`, through experts and router.
    pub(crate) fn fused_backward(&mut self, layer: usize, leaf: &Leaf) {
        let t = self.round.tokens;
        let Some(desc) = self.model.layer_of(t) else { return };
        let Some(tensors) = self.model.moe_tensors(layer, t) else { return };
        let own = (t > 0).then_some(tensors);
        if t > 0 && !self.model.plain {
            self.drop_input(layer, t);
        }
        if self.model.here.is_some() {
            return self.shared_experts_backward(layer, own, leaf);
        }
        let Some(tensors) = own else { return };
        let (Some(dense), Some(Some(stacks))) = (leaf.dense, leaf.stacks.get(layer)) else {
            return;
        };
        let router = dense.layers[layer].router.unwrap_or(tensors.weights.router);
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
        let size = t * self.model.dim();
        let scratch = &self.model.buffers.scratch;
        let (dout, dx) = (scratch.dx.slice(0, size), scratch.dnorm.slice(0, size));
        if self.model.plain {
            return self
                .model
                .device
                .moe_backward(&MoeBackward { desc, tensors, dout, dx, gradients });
        }
        let ds = self.model.router_scratch().dweights.slice(0, desc.slots());
        let (each, up_later) = (false, false);
        self.model.device.moe_experts_backward(&MoeExpertsBackward {
            desc,
            tensors,
            dout,
            dx,
            each,
            choices: Each::Slots,
            ds,
            gradients,
            up_later,
        });
        self.gate_backward(layer, t, (&dense.layers[layer], leaf.accumulate), ds);
    }
}
