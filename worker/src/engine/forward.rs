//! A round through the model, forwards.
//!
//! Ops and verbs of links are enqueued in order; nothing comes back. Once a link has failed the
//! rest of a round is left out, since nobody will look at it.

use crate::engine::backward::{Later, Leaf};
use crate::engine::beside;
use crate::engine::handles::{DenseLayer, GatedWeights, Linear};
use crate::engine::links::Links;
use crate::engine::model::Model;
use crate::engine::round::{Aim, Round};
use moejob_kernels::{
    AddBias, Attention, Buffer, Clamp, Embed, GatedMul, HeadGradient, HeadLoss,
    Layout as Order, Matmul, NormRope, RmsNorm, Rope, StepPhase,
};
use moejob_protocol::buffers::Gated;
use moejob_protocol::model::QkNorm;

/// One call is one round: a micro-batch here and one on each peer of the expert group
/// (`expert_parallel.rs`); a rank without one has `tokens == 0`.
pub struct Pass<'a> {
    pub(crate) model: &'a mut Model,
    pub(crate) links: &'a mut Links,
    pub(crate) round: &'a Round,
    /// Activations are computed again: what is recorded of the round has been.
    pub(crate) again: bool,
    /// What backward has left for when something travels.
    pub(crate) later: Option<Later>,
}

impl<'a> Pass<'a> {
    /// A round of the loaded micro-batch.
    pub fn new(model: &'a mut Model, links: &'a mut Links, round: &'a Round) -> Pass<'a> {
        Pass { model, links, round, again: false, later: None }
    }

    /// The last norm of the loaded micro-batch, what backward needs, and what the round's aim asks
    /// for.
    pub fn forward(&mut self) {
        let (t, d) = (self.round.tokens, self.model.dim());
        self.model.device.await_mark(beside::FIRST, StepPhase::Forward);
        self.want_forward();
        self.want_embedding();
        if t > 0 {
            let x = self.model.layer_input(0).slice(0, t * d);
            self.model.device.embed(&Embed {
                tokens: t,
                dim: d,
                vocab: self.model.config.vocab_size as usize,
                ids: self.model.buffers.batch.ids.slice(0, t),
                table: self.model.dense.embed,
                x,
            });
            self.mark("embedding", None);
        }
        for layer in 0..self.model.config.num_hidden_layers as usize {
            if self.links.has_failed() {
                return;
            }
            self.layer(layer);
        }
        self.record_all_layers();
        if t > 0 {
            self.last_norm(t);
            self.mark("last norm", None);
        }
    }

    /// What was enqueued since the last mark.
    pub(crate) fn mark(&mut self, name: &'static str, layer: Option<usize>) {
        self.model.device.mark(name, layer);
    }

    /// From the layer's input to that of the next.
    pub(crate) fn layer(&mut self, layer: usize) {
        self.want_layer(layer, if self.again { StepPhase::Backward } else { StepPhase::Forward });
        if self.round.tokens > 0 {
            self.attention(layer);
        }
        self.feed_forward(layer);
    }

    /// The cross-entropies of the round's own tokens; their sum goes to the micro-batch's record,
    /// or to `head.measured` in a round without one. With a leaf also the head's gradient, and that
    /// of the last norm's output in `scratch.dnorm`.
    pub fn loss(&mut self, leaf: Option<&Leaf>) {
        let (t, d) = (self.round.tokens, self.model.dim());
        self.want_head(if leaf.is_some() { StepPhase::Backward } else { StepPhase::Forward });
        if t == 0 {
            return;
        }
        if leaf.is_some() {
            self.claim_head();
        }
        let head = self.model.buffers.head.clone();
        let numbers = match self.round.aim {
            Aim::Record => self.model.loss_numbers(),
            _ => {
                self.model.device.fill_zero(head.measured);
                head.measured
            }
        };
        let dx = self.model.buffers.scratch.dnorm.slice(0, t * d);
        let gradient = leaf.and_then(|leaf| {
            let (dtable, accumulate) = (leaf.dense?.head, leaf.accumulate_matrices);
            Some(HeadGradient { dx, dtable, accumulate })
        });
        let loss_scale = self.model.buffers.numbers.loss_scale;
        let op = HeadLoss {
            desc: self.model.head_desc(t),
            scale: self.model.target_share,
            loss_scale: self.model.buffers.numbers.target_scale.or(loss_scale),
            x: head.norm.slice(0, t * d),
            table: self.model.dense.head,
            targets: self.model.buffers.batch.targets.slice(0, t),
            scratch: self.model.buffers.scratch.workspace,
            numbers,
            gradient,
        };
        self.model.device.head_loss(&op);
        if let Some(tied) = leaf.and_then(|leaf| leaf.tied) {
            self.model.device.add_up(&tied);
        }
        self.mark("head", None);
    }

    /// mid = input + attention(norm(input))
    fn attention(&mut self, layer: usize) {
        let (t, d) = (self.round.tokens, self.model.dim());
        let (q_size, kv_size) = self.attention_sizes();
        let weights: DenseLayer = self.model.dense.layers[layer].clone();
        let b = self.model.buffers.layers[layer].clone();
        let (input, norm1) = (b.input.slice(0, t * d), b.norm1.slice(0, t * d));
        let (q, k) = (b.q.slice(0, t * q_size), b.k.slice(0, t * kv_size));
        let v = b.v.slice(0, t * kv_size);
        self.norm(t, input, weights.norm1, norm1, b.rstd1.slice(0, t));
        self.mark("norm", Some(layer));
        let raw = b.qk_norm.as_ref();
        let q_to = raw.map_or(q, |raw| raw.q.slice(0, q.len()));
        let k_to = raw.map_or(k, |raw| raw.k.slice(0, k.len()));
        self.linear(t, norm1, weights.q, q_to, false);
        self.linear(t, norm1, weights.k, k_to, false);
        self.linear(t, norm1, weights.v, v, false);
        self.mark("q k v", Some(layer));
        self.turn(layer, t, [q, k, v]);
        self.mark("turn", Some(layer));
        let attended = b.attended.slice(0, t * q_size);
        match self.model.cached_attention_op(layer, t) {
            Some(op) => self.model.device.cached_attention(&op),
            None => {
                let op = self.attention_op(layer, t);
                self.model.device.attention(&op);
            }
        }
        self.mark("attention", Some(layer));
        let mid = b.mid.slice(0, t * d);
        self.model.device.copy(input, mid);
        self.linear(t, attended, weights.o, mid, true);
        self.mark("o", Some(layer));
        let (norm2, rstd2) = (b.norm2.slice(0, t * d), b.rstd2.slice(0, t));
        self.norm(t, mid, weights.norm2, norm2, rstd2);
        self.mark("norm", Some(layer));
    }

    /// Queries and keys as attention sees them: normed, clamped, turned; values clamped.
    pub(crate) fn turn(&mut self, layer: usize, t: usize, [q, k, v]: [Buffer; 3]) {
        if let Some(ops) = self.norm_ropes(layer, t) {
            ops.iter().for_each(|op| self.model.device.norm_rope(op));
            return;
        }
        let raw = self.model.buffers.layers[layer].qk_norm.clone();
        if let (Some(raw), Some((q_gain, k_gain))) = (raw, self.model.dense.layers[layer].qk_norm) {
            let (q_raw, k_raw) = (raw.q.slice(0, q.len()), raw.k.slice(0, k.len()));
            let (q_rows, k_rows) = (q.len() / q_gain.len(), k.len() / k_gain.len());
            self.norm(q_rows, q_raw, q_gain, q, raw.q_rstd.slice(0, q_rows));
            self.norm(k_rows, k_raw, k_gain, k, raw.k_rstd.slice(0, k_rows));
        }
        self.clip(layer, [q, k, v]);
        self.rope(t, q, false);
        self.rope(t, k, false);
    }

    /// The norm and turn of queries and of keys, as one op each; none where they have no norm, or a
    /// clamp comes between.
    pub(crate) fn norm_ropes(&self, layer: usize, t: usize) -> Option<[NormRope; 2]> {
        let (b, config) = (&self.model.buffers.layers[layer], &self.model.config);
        let (raw, gains) = (b.qk_norm.as_ref()?, self.model.dense.layers[layer].qk_norm?);
        if b.unclipped.is_some() {
            return None;
        }
        let per_head = config.qk_norm == QkNorm::PerHead;
        let head_dim = config.head_dim as usize;
        let op = |heads: u32, [x, w, y, rstd]: [Buffer; 4]| {
            let heads = heads as usize;
            let spans = if per_head { t * heads } else { t };
            NormRope {
                tokens: t,
                heads,
                head_dim,
                per_head,
                eps: config.rms_norm_eps,
                theta: config.rope_theta,
                positions: self.model.buffers.batch.positions.slice(0, t),
                x: x.slice(0, t * heads * head_dim),
                w,
                y: y.slice(0, t * heads * head_dim),
                rstd: rstd.slice(0, spans),
            }
        };
        Some([
            op(config.num_attention_heads, [raw.q, gains.0, b.q, raw.q_rstd]),
            op(config.num_key_value_heads, [raw.k, gains.1, b.k, raw.k_rstd]),
        ])
    }

    pub(crate) fn clip(&mut self, layer: usize, qkv: [Buffer; 3]) {
        let Some(kept) = self.unclipped(layer, qkv.map(|x| x.len())) else { return };
        for (x, kept) in qkv.into_iter().zip(kept) {
            self.model.device.copy(x, kept);
            self.model.device.clamp(&Clamp { limit: self.model.config.clip_qkv, x });
        }
    }

    /// Where q, k and v of a layer are kept as they were before the clamp.
    pub(crate) fn unclipped(&self, layer: usize, sizes: [usize; 3]) -> Option<[Buffer; 3]> {
        let all = self.model.buffers.layers[layer].unclipped?;
        let [q, k, v] = sizes;
        Some([all.slice(0, q), all.slice(q, k), all.slice(q + k, v)])
    }

    pub(crate) fn attention_sizes(&self) -> (usize, usize) {
        (self.model.config.q_size() as usize, self.model.config.kv_size() as usize)
    }

    /// The attention of the first `t` tokens of `layer`, forward and for its gradient.
    pub(crate) fn attention_op(&self, layer: usize, t: usize) -> Attention {
        let (config, b) = (&self.model.config, &self.model.buffers.layers[layer]);
        let (q_size, kv_size) = self.attention_sizes();
        Attention {
            batch: t / self.model.sequence(),
            seq: self.model.sequence(),
            heads: config.num_attention_heads as usize,
            kv_heads: config.num_key_value_heads as usize,
            head_dim: config.head_dim as usize,
            scale: 1.0 / f64::from(config.head_dim).sqrt(),
            q: b.q.slice(0, t * q_size),
            k: b.k.slice(0, t * kv_size),
            v: b.v.slice(0, t * kv_size),
            starts: self.model.starts(t),
            window: None,
            deterministic: !self.model.fast_attention,
            workspace: Some(self.model.buffers.scratch.workspace),
            o: b.attended.slice(0, t * q_size),
            lse: b.lse.slice(0, t * config.num_attention_heads as usize),
        }
    }

    pub(crate) fn rope(&mut self, t: usize, x: Buffer, inverse: bool) {
        let head_dim = self.model.config.head_dim as usize;
        self.model.device.rope(&Rope {
            tokens: t,
            heads: x.len() / (t * head_dim),
            head_dim,
            theta: self.model.config.rope_theta,
            inverse,
            positions: self.model.buffers.batch.positions.slice(0, t),
            x,
        });
    }

    /// The next layer's input = mid + experts(norm2) (+ shared(norm2)), or mid + dense(norm2).
    fn feed_forward(&mut self, layer: usize) {
        let (t, d) = (self.round.tokens, self.model.dim());
        self.model.device.await_mark(beside::convoy_at(layer), StepPhase::Forward);
        let out = self.model.layer_input(layer + 1).slice(0, t * d);
        if self.model.config.is_moe_layer(layer as u32) {
            self.fused_forward(layer, out);
            self.mark("mixture", Some(layer));
        } else if t > 0 {
            self.model.device.copy(self.model.buffers.layers[layer].mid.slice(0, t * d), out);
        }
        if t > 0
            && let Some(weights) = self.model.dense.layers[layer].gated
        {
            self.gated(layer, t, weights, out);
            self.mark("dense part", Some(layer));
        }
    }

    /// out += (act(x Wg^T) * x Wu^T) Wd^T
    fn gated(&mut self, layer: usize, t: usize, weights: GatedWeights, out: Buffer) {
        let b = &self.model.buffers.layers[layer];
        let Some(gated) = b.dense.clone() else { return };
        let width = weights.gate.len() / self.model.dim();
        let x = b.norm2.slice(0, t * self.model.dim());
        let [gate, up, hidden] = rows(&gated, t, width);
        let plain = |weight| Linear { weight, bias: None };
        self.linear(t, x, plain(weights.gate), gate, false);
        self.linear(t, x, plain(weights.up), up, false);
        let activation = self.model.config.experts.activation;
        self.model.device.gated_mul(&GatedMul { activation, gate, up, out: hidden });
        self.linear(t, hidden, plain(weights.down), out, true);
    }

    fn last_norm(&mut self, t: usize) {
        let (d, head) = (self.model.dim(), self.model.buffers.head.clone());
        let (x, norm) = (head.input.slice(0, t * d), head.norm.slice(0, t * d));
        self.norm(t, x, self.model.dense.norm, norm, head.rstd.slice(0, t));
    }

    /// y = x W^T + b
    fn linear(&mut self, t: usize, x: Buffer, linear: Linear, y: Buffer, accumulate: bool) {
        let (k, n) = (x.len() / t, y.len() / t);
        let op = Matmul { layout: Order::Nt, m: t, n, k, accumulate, a: x, b: linear.weight, c: y };
        self.model.device.matmul(&op);
        if let Some(bias) = linear.bias {
            self.model.device.add_bias(&AddBias { rows: t, columns: n, x: y, bias });
        }
    }

    pub(crate) fn norm(&mut self, rows: usize, x: Buffer, w: Buffer, y: Buffer, rstd: Buffer) {
        let eps = self.model.config.rms_norm_eps;
        self.model.device.rms_norm(&RmsNorm { rows, dim: x.len() / rows, eps, x, w, y, rstd });
    }

}

/// The first `t` rows of the three parts.
pub(crate) fn rows(gated: &Gated<Buffer>, t: usize, width: usize) -> [Buffer; 3] {
    [gated.gate, gated.up, gated.hidden].map(|buffer| buffer.slice(0, t * width))
}
