//! A round through the model, backwards: the written-out gradient of `forward.rs`.

use crate::engine::beside;
use crate::engine::buckets::Last;
use crate::engine::forward::{Pass, rows};
use crate::engine::handles::{Dense, DenseLayer, ExpertStacks, GatedWeights, Linear};
use moejob_kernels::{
    AddUp, AttentionBackward, BiasBackward, Buffer, ClampBackward, EmbedBackward, GatedMulBackward,
    Layout as Order, Matmul, NormRopeBackward, RmsNormBackward, StepPhase,
};

/// Where a round's gradients go.
#[derive(Clone, Debug)]
pub struct Leaf<'a> {
    /// None for a rank without a micro-batch.
    pub dense: Option<&'a Dense>,
    /// `[layer]`; none of layers without experts
    pub stacks: &'a [Option<ExpertStacks>],
    /// Added to what is there, else written: of what each rank computes for its own tokens.
    pub accumulate: bool,
    /// The same of matrices outside of experts, whose gradients may be each round's own.
    pub accumulate_matrices: bool,
    /// The same of experts, which in a rank's first round may be others' tokens alone.
    pub accumulate_experts: bool,
    /// The head is the embedding, and its sums are exact: this adds the head's product up before
    /// the embedding's is written to the memory of the first.
    pub tied: Option<AddUp>,
    /// In a step's last round, where buckets travel as soon as they are complete.
    pub last: Option<Last<'a>>,
}

/// Whether gradients are added to what is there, else written: see [`Leaf`].
#[derive(Clone, Copy, Debug)]
pub(crate) struct Adds {
    vectors: bool,
    matrices: bool,
}

/// The gradients of a layer's matrices of queries, keys and values, which are made beside what
/// leaves for the experts below. Nothing they read is written until that has arrived.
#[derive(Clone, Debug)]
pub(crate) struct Later {
    layer: usize,
    /// What all three were multiplied by.
    x: Buffer,
    /// dy, and where the gradient goes.
    of: [(Buffer, Linear); 3],
    adds: Adds,
}

impl Pass<'_> {
    /// Fills the round's leaf of every gradient but the head's, from what `loss` left.
    pub fn backward(&mut self, leaf: &Leaf) {
        let t = self.round.tokens;
        let adds = Adds { vectors: leaf.accumulate, matrices: leaf.accumulate_matrices };
        self.want_backward();
        if let Some(gradients) = leaf.dense {
            self.last_norm_backward(t, gradients, leaf.accumulate);
            self.mark("last norm'", None);
        }
        for layer in (0..self.model.config.num_hidden_layers as usize).rev() {
            if self.links.has_failed() {
                return;
            }
            self.recompute(layer);
            self.mark("computed again", Some(layer));
            self.want_layer(layer, StepPhase::Backward);
            self.feed_forward_backward(layer, leaf);
            if let Some(gradients) = leaf.dense {
                self.output_backward(layer, t, &gradients.layers[layer], adds);
            }
            // Attention leaves room for what travels meanwhile, products leave none.
            self.reduce(beside::convoy_at(layer), leaf);
            self.shed_above(layer, leaf);
            if let Some(gradients) = leaf.dense {
                self.attention_backward(layer, t, &gradients.layers[layer], adds);
            }
        }
        if let Some(gradients) = leaf.dense {
            self.model.attention_loaded[usize::from(adds.matrices)] = true;
            self.claim_embedding();
            self.embed_backward(t, gradients, leaf);
            self.mark("embedding'", None);
        }
        self.reduce(beside::FIRST, leaf);
        self.shed_lowest(leaf);
    }

    /// Behind the last op that writes to gradients of `convoy`.
    fn reduce(&mut self, convoy: usize, leaf: &Leaf) {
        if let Some(last) = &leaf.last {
            last.reduce(convoy, self.model, self.links);
        }
    }

    fn last_norm_backward(&mut self, t: usize, gradients: &Dense, accumulate: bool) {
        let (d, head) = (self.model.dim(), self.model.buffers.head.clone());
        let scratch = &self.model.buffers.scratch;
        let (dx, dnorm) = (scratch.dx.slice(0, t * d), scratch.dnorm.slice(0, t * d));
        let (x, rstd) = (head.input.slice(0, t * d), head.rstd.slice(0, t));
        let gain = [self.model.dense.norm, gradients.norm];
        self.norm_backward([x, rstd], gain, [dnorm, dx], [false, accumulate]);
    }

    /// Of a norm of x: dx and the gradient of its gain; of both, whether they are added to.
    fn norm_backward(
        &mut self,
        [x, rstd]: [Buffer; 2],
        [w, dw]: [Buffer; 2],
        [dy, dx]: [Buffer; 2],
        [accumulate_dx, accumulate_dw]: [bool; 2],
    ) {
        let (rows, dim) = (rstd.len(), w.len());
        let op =
            RmsNormBackward { rows, dim, x, w, rstd, dy, dx, dw, accumulate_dx, accumulate_dw };
        self.model.device.rms_norm_backward(&op);
    }

    /// From the gradient of the layer's output to that of `mid`, both in `scratch.dx`.
    fn feed_forward_backward(&mut self, layer: usize, leaf: &Leaf) {
        let moe = self.model.config.is_moe_layer(layer as u32);
        if moe {
            self.fused_backward(layer, leaf);
        }
        self.mark("mixture'", Some(layer));
        self.claim_layer(layer);
        let adds = Adds { vectors: leaf.accumulate, matrices: leaf.accumulate_matrices };
        let Some(gradients) = leaf.dense else { return };
        let (t, d) = (self.round.tokens, self.model.dim());
        let gradients = &gradients.layers[layer];
        if let (Some(weights), Some(gradients)) =
            (self.model.dense.layers[layer].gated, gradients.gated)
        {
            self.gated_backward(layer, t, weights, gradients, (moe, adds));
            self.mark("dense part'", Some(layer));
        }
        let b = &self.model.buffers.layers[layer];
        let (x, rstd) = (b.mid.slice(0, t * d), b.rstd2.slice(0, t));
        let (dx, dnorm) = (self.model.buffers.scratch.dx, self.model.buffers.scratch.dnorm);
        let (dx, dnorm) = (dx.slice(0, t * d), dnorm.slice(0, t * d));
        let w = self.model.dense.layers[layer].norm2;
        let gain = [w, gradients.norm2];
        self.norm_backward([x, rstd], gain, [dnorm, dx], [true, leaf.accumulate]);
        self.mark("norm'", Some(layer));
    }

    /// dnorm (+)= the gradient through the dense part or the shared experts.
    fn gated_backward(
        &mut self,
        layer: usize,
        t: usize,
        weights: GatedWeights,
        gradients: GatedWeights,
        (accumulate, adds): (bool, Adds),
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
        self.linear_backward(t, [hidden, dx, d_out], [down, d_down], (false, adds));
        let activation = self.model.config.experts.activation;
        let op = GatedMulBackward { activation, gate, up, d_out, dgate, dup };
        self.model.device.gated_mul_backward(&op);
        let (gate, d_gate) = (plain(weights.gate), plain(gradients.gate));
        self.linear_backward(t, [x, dgate, dnorm], [gate, d_gate], (accumulate, adds));
        let (up, d_up) = (plain(weights.up), plain(gradients.up));
        self.linear_backward(t, [x, dup, dnorm], [up, d_up], (true, adds));
    }

    /// From the gradient of `mid`, in `scratch.dx`, to that of what attention gives.
    fn output_backward(
        &mut self,
        layer: usize,
        t: usize,
        gradients: &DenseLayer,
        adds: Adds,
    ) {
        let (d, (q_size, _)) = (self.model.dim(), self.attention_sizes());
        let weight = self.model.dense.layers[layer].o;
        let attended = self.model.buffers.layers[layer].attended.slice(0, t * q_size);
        let scratch = &self.model.buffers.scratch;
        let (dx, d_attended) = (scratch.dx.slice(0, t * d), scratch.d_attended);
        let buffers = [attended, dx, d_attended.slice(0, t * q_size)];
        self.linear_backward(t, buffers, [weight, gradients.o], (false, adds));
        self.mark("o'", Some(layer));
    }

    /// From there to the gradient of the layer's input, in `scratch.dx`, to which that of `mid` is
    /// added.
    fn attention_backward(
        &mut self,
        layer: usize,
        t: usize,
        gradients: &DenseLayer,
        adds: Adds,
    ) {
        let d = self.model.dim();
        let (q_size, kv_size) = self.attention_sizes();
        let weights = self.model.dense.layers[layer].clone();
        let b = self.model.buffers.layers[layer].clone();
        let scratch = self.model.buffers.scratch.clone();
        let (dx, dnorm) = (scratch.dx.slice(0, t * d), scratch.dnorm.slice(0, t * d));
        let d_attended = scratch.d_attended.slice(0, t * q_size);
        let (dq, dk) = (scratch.dq.slice(0, t * q_size), scratch.dk.slice(0, t * kv_size));
        let dv = scratch.dv.slice(0, t * kv_size);
        let forward = self.attention_op(layer, t);
        let op = AttentionBackward { forward, d_o: d_attended, dq, dk, dv };
        self.model.device.attention_backward(&op);
        self.mark("attention'", Some(layer));
        let (dq, dk) = self.turn_backward(layer, t, [dq, dk, dv], gradients, adds.vectors);
        self.mark("turn'", Some(layer));
        let norm1 = b.norm1.slice(0, t * d);
        let of = [(dq, gradients.q), (dk, gradients.k), (dv, gradients.v)];
        let loaded = self.model.attention_loaded[usize::from(adds.matrices)];
        let later = loaded && layer > 0 && self.gradients_leave_beside(layer - 1);
        for (at, weight) in [weights.q, weights.k, weights.v].into_iter().enumerate() {
            let (dy, gradient) = of[at];
            if !later {
                self.weight_backward(t, [norm1, dy], gradient, adds);
            }
            self.input_backward(t, [dy, dnorm], weight, at > 0);
        }
        self.later = later.then_some(Later { layer, x: norm1, of, adds });
        self.mark("q k v'", Some(layer));
        let (x, rstd) = (b.input.slice(0, t * d), b.rstd1.slice(0, t));
        let gain = [weights.norm1, gradients.norm1];
        self.norm_backward([x, rstd], gain, [dnorm, dx], [true, adds.vectors]);
        self.mark("norm'", Some(layer));
    }

    /// What the layer above left for later.
    pub(crate) fn made_later(&mut self) {
        let Some(Later { layer, x, of, adds }) = self.later.take() else { return };
        for (dy, gradient) in of {
            self.weight_backward(self.round.tokens, [x, dy], gradient, adds);
        }
        self.mark("q k v' weights", Some(layer));
    }

    /// Gradients of queries and keys before their turn, clamp and norm; of values before the clamp.
    fn turn_backward(
        &mut self,
        layer: usize,
        t: usize,
        [dq, dk, dv]: [Buffer; 3],
        gradients: &DenseLayer,
        accumulate: bool,
    ) -> (Buffer, Buffer) {
        let scratch = &self.model.buffers.scratch;
        let raw = scratch.dq_raw.zip(scratch.dk_raw);
        let raw = raw.map(|(q, k)| (q.slice(0, dq.len()), k.slice(0, dk.len())));
        let (ops, gains) = (self.norm_ropes(layer, t), gradients.qk_norm);
        if let (Some([q, k]), Some((dq_raw, dk_raw)), Some((q_gain, k_gain))) = (ops, raw, gains) {
            for (forward, dy, dx, dw) in [(q, dq, dq_raw, q_gain), (k, dk, dk_raw, k_gain)] {
                let op = NormRopeBackward { forward, dy, dx, dw, accumulate_dw: accumulate };
                self.model.device.norm_rope_backward(&op);
            }
            return (dq_raw, dk_raw);
        }
        self.rope(t, dq, true);
        self.rope(t, dk, true);
        self.clip_backward(layer, [dq, dk, dv]);
        let kept = self.model.buffers.layers[layer].qk_norm.clone();
        let weights = self.model.dense.layers[layer].qk_norm;
        let (Some(kept), Some(raw), Some(weights), Some(gains)) = (kept, raw, weights, gains)
        else {
            return (dq, dk);
        };
        for (x, rstd, gain, dy, dx) in [
            (kept.q, kept.q_rstd, [weights.0, gains.0], dq, raw.0),
            (kept.k, kept.k_rstd, [weights.1, gains.1], dk, raw.1),
        ] {
            let rstd = rstd.slice(0, dy.len() / gain[0].len());
            let x = x.slice(0, dy.len());
            self.norm_backward([x, rstd], gain, [dy, dx], [false, accumulate]);
        }
        raw
    }

    fn embed_backward(&mut self, t: usize, gradients: &Dense, leaf: &Leaf) {
        let (d, vocab) = (self.model.dim(), self.model.config.vocab_size as usize);
        // A tied head has written its part of the gradient, unless that is in the sum already.
        let begins = leaf.tied.is_some() || !self.model.config.tie_word_embeddings;
        if begins && !leaf.accumulate_matrices {
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

    /// dW (+)= dy^T x, db (+)= sum of dy, and dx (+)= dy W; of dx and of the rest, whether they are
    /// added to.
    fn linear_backward(
        &mut self,
        t: usize,
        [x, dy, dx]: [Buffer; 3],
        [weight, gradient]: [Linear; 2],
        (accumulate, adds): (bool, Adds),
    ) {
        self.weight_backward(t, [x, dy], gradient, adds);
        self.input_backward(t, [dy, dx], weight, accumulate);
    }

    /// dW (+)= dy^T x, db (+)= sum of dy
    fn weight_backward(&mut self, t: usize, [x, dy]: [Buffer; 2], gradient: Linear, adds: Adds) {
        let (m, n, c) = (dy.len() / t, x.len() / t, gradient.weight);
        let (layout, accumulate) = (Order::Tn, adds.matrices);
        self.model.device.matmul(&Matmul { layout, m, n, k: t, accumulate, a: dy, b: x, c });
        if let Some(dbias) = gradient.bias {
            let op = BiasBackward { rows: t, columns: m, accumulate: adds.vectors, dy, dbias };
            self.model.device.bias_backward(&op);
        }
    }

    /// dx (+)= dy W
    fn input_backward(
        &mut self,
        t: usize,
        [dy, dx]: [Buffer; 2],
        weight: Linear,
        accumulate: bool,
    ) {
        let (n, k, b) = (dx.len() / t, dy.len() / t, weight.weight);
        let layout = Order::Nn;
        self.model.device.matmul(&Matmul { layout, m: t, n, k, accumulate, a: dy, b, c: dx });
    }
}
