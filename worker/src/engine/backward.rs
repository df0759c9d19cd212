//! A round through the model, backwards: the written-out gradient of `forward.rs`.

use crate::engine::forward::{Pass, rows};
use crate::engine::handles::{Dense, DenseLayer, Experts, GatedWeights, Linear};
use crate::engine::moe::activation;
use moejob_kernels::{
    AttentionBackward, BiasBackward, Buffer, ClampBackward, EmbedBackward, GatedMulBackward,
    Layout as Order, Matmul, RmsNormBackward,
};
use moejob_protocol::model::QkNorm;

/// Where a round's gradients go: one leaf of each stack.
#[derive(Clone, Debug)]
pub struct Leaf<'a> {
    /// None for a rank without a micro-batch.
    pub dense: Option<&'a Dense>,
    /// `[source of the round][layer]`
    pub experts: Vec<&'a [Experts]>,
}

impl Pass<'_> {
    /// Fills the round's leaf of every gradient, from the gradient of the logits.
    pub fn backward(&mut self, leaf: &Leaf) {
        let t = self.round.tokens;
        if let Some(gradients) = leaf.dense {
            self.logits_backward(t, gradients);
        }
        for layer in (0..self.model.config.num_hidden_layers as usize).rev() {
            if self.links.has_failed() {
                return;
            }
            self.recompute(layer);
            self.feed_forward_backward(layer, leaf);
            if let Some(gradients) = leaf.dense {
                self.attention_backward(layer, t, &gradients.layers[layer]);
            }
        }
        if let Some(gradients) = leaf.dense {
            self.embed_backward(t, gradients);
        }
    }

    fn logits_backward(&mut self, t: usize, gradients: &Dense) {
        let (d, head) = (self.model.dim(), self.model.buffers.head.clone());
        let x = head.norm.slice(0, t * d);
        let dnorm = self.model.buffers.scratch.dnorm.slice(0, t * d);
        let dlogits = head.logits.slice(0, t * self.model.config.vocab_size as usize);
        let plain = |weight| Linear { weight, bias: None };
        let (weight, gradient) = (plain(self.model.dense.head), plain(gradients.head));
        self.linear_backward(t, [x, dlogits, dnorm], weight, gradient, false);
        let dx = self.model.buffers.scratch.dx.slice(0, t * d);
        let (x, rstd) = (head.input.slice(0, t * d), head.rstd.slice(0, t));
        self.norm_backward(x, self.model.dense.norm, rstd, dnorm, dx, gradients.norm, false);
    }

    #[allow(clippy::too_many_arguments)]
    fn norm_backward(
        &mut self,
        x: Buffer,
        w: Buffer,
        rstd: Buffer,
        dy: Buffer,
        dx: Buffer,
        dw: Buffer,
        accumulate_dx: bool,
    ) {
        let (rows, dim) = (rstd.len(), w.len());
        let accumulate_dw = false;
        let op =
            RmsNormBackward { rows, dim, x, w, rstd, dy, dx, dw, accumulate_dx, accumulate_dw };
        self.model.device.rms_norm_backward(&op);
    }

    /// From the gradient of the layer's output to that of `mid`, both in `scratch.dx`.
    fn feed_forward_backward(&mut self, layer: usize, leaf: &Leaf) {
        let moe = self.model.buffers.layers[layer].moe.is_some();
        if moe {
            self.moe_backward(layer, leaf);
        }
        let Some(gradients) = leaf.dense else { return };
        let (t, d) = (self.round.tokens, self.model.dim());
        let gradients = &gradients.layers[layer];
        if let (Some(weights), Some(gradients)) =
            (self.model.dense.layers[layer].gated, gradients.gated)
        {
            self.gated_backward(layer, t, weights, gradients, moe);
        }
        let b = &self.model.buffers.layers[layer];
        let (x, rstd) = (b.mid.slice(0, t * d), b.rstd2.slice(0, t));
        let (dx, dnorm) = (self.model.buffers.scratch.dx, self.model.buffers.scratch.dnorm);
        let (dx, dnorm) = (dx.slice(0, t * d), dnorm.slice(0, t * d));
        let w = self.model.dense.layers[layer].norm2;
        self.norm_backward(x, w, rstd, dnorm, dx, gradients.norm2, true);
    }

    /// dnorm (+)= the gradient through the dense part or the shared experts.
    fn gated_backward(
        &mut self,
        layer: usize,
        t: usize,
        weights: GatedWeights,
        gradients: GatedWeights,
        accumulate: bool,
    ) {
        let d = self.model.dim();
        let b = &self.model.buffers.layers[layer];
        let (Some(kept), Some(scratch)) =
            (b.dense.clone(), self.model.buffers.scratch.dense.clone())
        else {
            return;
        };
        let width = weights.gate.len() / d;
        let x = b.norm2.slice(0, t * d);
        let dx = self.model.buffers.scratch.dx.slice(0, t * d);
        let dnorm = self.model.buffers.scratch.dnorm.slice(0, t * d);
        let [gate, up, hidden] = rows(&kept, t, width);
        let [dgate, dup, d_out] = rows(&scratch, t, width);
        let plain = |weight| Linear { weight, bias: None };
        let (down, d_down) = (plain(weights.down), plain(gradients.down));
        self.linear_backward(t, [hidden, dx, d_out], down, d_down, false);
        let activation = activation(self.model.config.experts.activation);
        let op = GatedMulBackward { activation, gate, up, d_out, dgate, dup };
        self.model.device.gated_mul_backward(&op);
        let (gate, d_gate) = (plain(weights.gate), plain(gradients.gate));
        self.linear_backward(t, [x, dgate, dnorm], gate, d_gate, accumulate);
        let (up, d_up) = (plain(weights.up), plain(gradients.up));
        self.linear_backward(t, [x, dup, dnorm], up, d_up, true);
    }

    /// From the gradient of `mid` to that of the layer's input, both in `scratch.dx`.
    fn attention_backward(&mut self, layer: usize, t: usize, gradients: &DenseLayer) {
        let d = self.model.dim();
        let (q_size, kv_size) = self.attention_sizes();
        let weights = self.model.dense.layers[layer].clone();
        let b = self.model.buffers.layers[layer].clone();
        let scratch = self.model.buffers.scratch.clone();
        let (dx, dnorm) = (scratch.dx.slice(0, t * d), scratch.dnorm.slice(0, t * d));
        let attended = b.attended.slice(0, t * q_size);
        let d_attended = scratch.d_attended.slice(0, t * q_size);
        let buffers = [attended, dx, d_attended];
        self.linear_backward(t, buffers, weights.o, gradients.o, false);
        let (dq, dk) = (scratch.dq.slice(0, t * q_size), scratch.dk.slice(0, t * kv_size));
        let dv = scratch.dv.slice(0, t * kv_size);
        let forward = self.attention_op(layer, t);
        let op = AttentionBackward { forward, d_o: d_attended, dq, dk, dv };
        self.model.device.attention_backward(&op);
        self.rope(t, dq, true);
        self.rope(t, dk, true);
        self.clip_backward(layer, [dq, dk, dv]);
        let (dq, dk) = self.qk_norm_backward(layer, t, dq, dk, gradients);
        let norm1 = b.norm1.slice(0, t * d);
        self.linear_backward(t, [norm1, dq, dnorm], weights.q, gradients.q, false);
        self.linear_backward(t, [norm1, dk, dnorm], weights.k, gradients.k, true);
        self.linear_backward(t, [norm1, dv, dnorm], weights.v, gradients.v, true);
        let (x, rstd) = (b.input.slice(0, t * d), b.rstd1.slice(0, t));
        self.norm_backward(x, weights.norm1, rstd, dnorm, dx, gradients.norm1, true);
    }

    /// Gradients of queries and keys before their norm, where there is one.
    fn qk_norm_backward(
        &mut self,
        layer: usize,
        t: usize,
        dq: Buffer,
        dk: Buffer,
        gradients: &DenseLayer,
    ) -> (Buffer, Buffer) {
        debug_assert!(t > 0 || self.model.config.qk_norm == QkNorm::None);
        let scratch = &self.model.buffers.scratch;
        let raw = self.model.buffers.layers[layer].qk_norm.clone();
        let parts = raw.zip(scratch.dq_raw.zip(scratch.dk_raw));
        let gains = self.model.dense.layers[layer].qk_norm.zip(gradients.qk_norm);
        let (Some((raw, (dq_raw, dk_raw))), Some(((q_gain, k_gain), (dq_gain, dk_gain)))) =
            (parts, gains)
        else {
            return (dq, dk);
        };
        let (dq_raw, dk_raw) = (dq_raw.slice(0, dq.len()), dk_raw.slice(0, dk.len()));
        let rstd = |rstd: Buffer, x: Buffer, gain: Buffer| rstd.slice(0, x.len() / gain.len());
        let (q, q_rstd) = (raw.q.slice(0, dq.len()), rstd(raw.q_rstd, dq, q_gain));
        self.norm_backward(q, q_gain, q_rstd, dq, dq_raw, dq_gain, false);
        let (k, k_rstd) = (raw.k.slice(0, dk.len()), rstd(raw.k_rstd, dk, k_gain));
        self.norm_backward(k, k_gain, k_rstd, dk, dk_raw, dk_gain, false);
        (dq_raw, dk_raw)
    }

    fn embed_backward(&mut self, t: usize, gradients: &Dense) {
        let (d, vocab) = (self.model.dim(), self.model.config.vocab_size as usize);
        // Tied, the head has written its part of the gradient already.
        if gradients.head != gradients.embed {
            self.model.device.fill_zero(gradients.embed);
        }
        self.model.device.embed_backward(&EmbedBackward {
            tokens: t,
            dim: d,
            vocab,
            ids: self.model.buffers.batch.ids.slice(0, t),
            dx: self.model.buffers.scratch.dx.slice(0, t * d),
            dtable: gradients.embed,
        });
    }

    fn clip_backward(&mut self, layer: usize, gradients: [Buffer; 3]) {
        let Some(kept) = self.unclipped(layer, gradients.map(|x| x.len())) else { return };
        for (dx, x) in gradients.into_iter().zip(kept) {
            self.model.device.clamp_backward(&ClampBackward {
                limit: self.model.config.clip_qkv,
                x,
                dx,
            });
        }
    }

    /// dW = dy^T x, db = sum of dy, and dx (+)= dy W.
    fn linear_backward(
        &mut self,
        t: usize,
        [x, dy, dx]: [Buffer; 3],
        weight: Linear,
        gradient: Linear,
        accumulate: bool,
    ) {
        let (k, n) = (x.len() / t, dy.len() / t);
        let order = Order::Tn;
        let c = gradient.weight;
        let op = Matmul { layout: order, m: n, n: k, k: t, accumulate: false, a: dy, b: x, c };
        self.model.device.matmul(&op);
        if let Some(dbias) = gradient.bias {
            let op = BiasBackward { rows: t, columns: n, accumulate: false, dy, dbias };
            self.model.device.bias_backward(&op);
        }
        let b = weight.weight;
        let op = Matmul { layout: Order::Nn, m: t, n: k, k: n, accumulate, a: dy, b, c: dx };
        self.model.device.matmul(&op);
    }
}
