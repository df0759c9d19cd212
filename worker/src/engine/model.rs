//! The model on one rank: a decoder-only transformer, forward and backward over the ops.
//!
//! ```text
//! embed -> [norm -> q k v -> rope -> attention -> o -> + -> norm -> experts | dense -> +] x L
//!       -> norm -> logits -> cross-entropy
//! ```
//! Backward mirrors it, written out. One call is one round: a micro-batch here and one on each
//! peer of the expert group (`moe.rs`); a rank without one has `tokens == 0`.
//!
//! Letters: `T` tokens, `D` model, `N` heads, `H` head dim, `F` hidden, `V` vocabulary.

use crate::gang::comm::{Comm, CommError};
use crate::engine::dispatch::{ExpertGroup, Mail, Round};
use crate::engine::gate::Noise;
use crate::engine::moe::activation;
use crate::engine::handles::{Dense, DenseLayer, Experts, GatedWeights, Linear};
use moejob_kernels::{
    Add, AddBias, ArenaPlan, Attention, AttentionBackward, BiasBackward, Buffer, Clamp,
    ClampBackward, CrossEntropy, DType, Device, Embed, EmbedBackward, KernelError, Layout as Order,
    Matmul, RmsNorm, RmsNormBackward, Rope, GatedMul, GatedMulBackward, SumF64,
};
use moejob_protocol::buffers::{Buffers, Gated};
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Kind, Planner, Rows, Shape};
use moejob_protocol::model::{ModelConfig, Param, QkNorm};
use std::collections::BTreeMap;

/// A rank's model: its memory, where everything lies, and the device that computes.
#[derive(Debug)]
pub struct Model {
    pub config: ModelConfig,
    pub layout: Layout,
    pub rank: u32,
    pub params: Vec<Param>,
    pub shape: Shape,
    pub device: Device,
    pub buffers: Buffers<Buffer>,
    pub(crate) dense: Dense,
    pub(crate) experts: Vec<Experts>,
    pub(crate) group: ExpertGroup,
    pub(crate) mail: Mail,
    /// Dropless top-k, which one fused op computes; else `gate.rs`.
    pub(crate) plain: bool,
    pub(crate) noise: Option<Noise>,
    /// `[layer]`: routing statistics of the whole step, where the balance is its own.
    pub(crate) step_stats: BTreeMap<usize, Vec<f64>>,
    /// First choices of the held-out tokens when they were last looked at, by micro-batch.
    pub(crate) favourites: BTreeMap<u32, Vec<u32>>,
    /// Where the last step's forward pass stopped being finite.
    pub(crate) broken: Option<String>,
    /// `S`
    sequence: usize,
    /// Documents in a sequence are kept apart.
    apart: bool,
    /// 1 / valid targets of a step.
    loss_scale: f64,
    /// 1 / (mixture layers * micro-batches): what a mean over them multiplies by.
    pub(crate) router_scale: f64,
}

/// Where a round's gradients go: one leaf of each stack.
#[derive(Clone, Debug)]
pub struct Leaf<'a> {
    /// None for a rank without a micro-batch.
    pub dense: Option<&'a Dense>,
    /// `[source of the round][layer]`
    pub experts: Vec<&'a [Experts]>,
}

/// The device's arena, from the list that the plan counts.
struct ArenaPlanner<'a> {
    shape: &'a Shape,
    plan: ArenaPlan,
    float: DType,
}

impl Planner for ArenaPlanner<'_> {
    type Buffer = Buffer;

    fn part(&mut self, _name: &'static str) {}

    fn alloc(&mut self, kind: Kind, rows: Rows, width: u64) -> Buffer {
        let rows = match rows {
            Rows::Fixed(rows) => rows,
            Rows::Routed => self.shape.worst.routed,
            Rows::Arrived => self.shape.worst.arrived,
        };
        let dtype = match kind {
            Kind::Float => self.float,
            Kind::U32 => DType::U32,
            Kind::F64 => DType::F64,
        };
        self.plan.alloc(dtype, (rows * width) as usize)
    }
}

impl Model {
    /// Plans and reserves the memory; nothing is initialised.
    ///
    /// # Errors
    /// The device cannot be made.
    pub fn new(
        config: &ModelConfig,
        layout: &Layout,
        rank: u32,
        training: &TrainingConfig,
        threads: usize,
    ) -> Result<Model, KernelError> {
        let shape = Shape::new(config, layout, rank, training);
        let float = if shape.float_bytes == 8 { DType::F64 } else { DType::F32 };
        let mut planner = ArenaPlanner { shape: &shape, plan: ArenaPlan::new(), float };
        let buffers = Buffers::plan(config, &shape, &mut planner);
        let mut device = Device::cpu(threads, planner.plan.bytes())?;
        let params = config.params();
        let flats = &shape.flats;
        let dense = Dense::new(config, &params, buffers.state.dense, &flats.dense);
        let experts =
            Experts::new(config, layout, rank, &params, buffers.state.experts, &flats.experts);
        let sequence = training.sequence_length as usize;
        let positions: Vec<u32> =
            (0..shape.tokens as usize).map(|token| (token % sequence) as u32).collect();
        device.write(buffers.batch.positions, &positions);
        let targets = f64::from(training.global_batch_size) * sequence as f64;
        let mixture = (0..config.num_hidden_layers).filter(|layer| config.is_moe_layer(*layer));
        let means = mixture.count().max(1) as f64 * f64::from(shape.micro_batches);
        Ok(Model {
            group: ExpertGroup::new(config, layout, rank),
            plain: config.router.is_plain(),
            noise: None,
            step_stats: BTreeMap::new(),
            favourites: BTreeMap::new(),
            config: config.clone(),
            layout: layout.clone(),
            rank,
            params,
            shape,
            device,
            buffers,
            dense,
            experts,
            mail: Mail::default(),
            broken: None,
            sequence,
            apart: false,
            loss_scale: 1.0 / targets,
            router_scale: 1.0 / means,
        })
    }

    /// `S`
    pub fn sequence(&self) -> usize {
        self.sequence
    }

    pub(crate) fn dim(&self) -> usize {
        self.config.hidden_size as usize
    }

    /// Writes the round's own tokens, sequences of one document each.
    pub fn load(&mut self, ids: &[u32], targets: &[u32]) {
        self.load_documents(ids, targets, None);
    }

    /// Writes the round's own tokens. `starts` [T] says for each where its document begins in its
    /// sequence: attention reaches back so far, and positions count from there.
    pub fn load_documents(&mut self, ids: &[u32], targets: &[u32], starts: Option<&[u32]>) {
        let batch = &self.buffers.batch;
        self.device.write(batch.ids.slice(0, ids.len()), ids);
        self.device.write(batch.targets.slice(0, targets.len()), targets);
        let position = |token: usize| (token % self.sequence) as u32;
        if let Some(starts) = starts {
            let positions: Vec<u32> =
                starts.iter().enumerate().map(|(token, start)| position(token) - start).collect();
            self.device.write(batch.starts.slice(0, starts.len()), starts);
            self.device.write(batch.positions.slice(0, starts.len()), &positions);
        } else if self.apart {
            let positions: Vec<u32> = (0..batch.positions.len()).map(position).collect();
            self.device.write(batch.positions, &positions);
        }
        self.apart = starts.is_some();
    }

    /// Where attention of the loaded tokens begins; none when each sequence is one document.
    fn starts(&self, t: usize) -> Option<Buffer> {
        self.apart.then(|| self.buffers.batch.starts.slice(0, t))
    }

    /// Logits of the loaded micro-batch, and what backward needs.
    ///
    /// # Errors
    /// A peer of the expert group is lost.
    pub fn forward(&mut self, round: &Round, comm: &mut Comm) -> Result<(), CommError> {
        let (t, d) = (round.tokens, self.dim());
        if t > 0 {
            let x = self.layer_input(0).slice(0, t * d);
            self.device.embed(&Embed {
                tokens: t,
                dim: d,
                vocab: self.config.vocab_size as usize,
                ids: self.buffers.batch.ids.slice(0, t),
                table: self.dense.embed,
                x,
            });
        }
        for layer in 0..self.config.num_hidden_layers as usize {
            if t > 0 {
                self.attention(layer, round);
            }
            self.feed_forward(layer, round, comm)?;
        }
        if t > 0 {
            self.logits(t);
        }
        Ok(())
    }

    /// Where the residual stream enters `layer`; the head's input after the last.
    pub(crate) fn layer_input(&self, layer: usize) -> Buffer {
        let layer = self.buffers.layers.get(layer);
        layer.map_or(self.buffers.head.input, |layer| layer.input)
    }

    /// y = x W^T + b
    fn linear(&mut self, t: usize, x: Buffer, linear: Linear, y: Buffer, accumulate: bool) {
        let (k, n) = (x.len() / t, y.len() / t);
        let op = Matmul { layout: Order::Nt, m: t, n, k, accumulate, a: x, b: linear.weight, c: y };
        self.device.matmul(&op);
        if let Some(bias) = linear.bias {
            self.device.add_bias(&AddBias { rows: t, columns: n, x: y, bias });
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
        self.device.matmul(&op);
        if let Some(dbias) = gradient.bias {
            let op = BiasBackward { rows: t, columns: n, accumulate: false, dy, dbias };
            self.device.bias_backward(&op);
        }
        let b = weight.weight;
        let op = Matmul { layout: Order::Nn, m: t, n: k, k: n, accumulate, a: dy, b, c: dx };
        self.device.matmul(&op);
    }

    fn norm(&mut self, rows: usize, x: Buffer, w: Buffer, y: Buffer, rstd: Buffer) {
        let eps = self.config.rms_norm_eps;
        self.device.rms_norm(&RmsNorm { rows, dim: x.len() / rows, eps, x, w, y, rstd });
    }

    /// mid = input + attention(norm(input))
    fn attention(&mut self, layer: usize, round: &Round) {
        let (t, d) = (round.tokens, self.dim());
        let (q_size, kv_size) = self.attention_sizes();
        let weights: DenseLayer = self.dense.layers[layer].clone();
        let b = self.buffers.layers[layer].clone();
        let (input, norm1) = (b.input.slice(0, t * d), b.norm1.slice(0, t * d));
        let (q, k) = (b.q.slice(0, t * q_size), b.k.slice(0, t * kv_size));
        let v = b.v.slice(0, t * kv_size);
        self.norm(t, input, weights.norm1, norm1, b.rstd1.slice(0, t));
        match (&b.qk_norm, weights.qk_norm) {
            (Some(raw), Some((q_gain, k_gain))) => {
                let (q_raw, k_raw) = (raw.q.slice(0, q.len()), raw.k.slice(0, k.len()));
                self.linear(t, norm1, weights.q, q_raw, false);
                self.linear(t, norm1, weights.k, k_raw, false);
                let (q_rows, k_rows) = (q.len() / q_gain.len(), k.len() / k_gain.len());
                self.norm(q_rows, q_raw, q_gain, q, raw.q_rstd.slice(0, q_rows));
                self.norm(k_rows, k_raw, k_gain, k, raw.k_rstd.slice(0, k_rows));
            }
            _ => {
                self.linear(t, norm1, weights.q, q, false);
                self.linear(t, norm1, weights.k, k, false);
            }
        }
        self.linear(t, norm1, weights.v, v, false);
        self.clip(layer, [q, k, v]);
        self.rope(t, q, false);
        self.rope(t, k, false);
        let attended = b.attended.slice(0, t * q_size);
        let op = self.attention_op(layer, t);
        self.device.attention(&op);
        let mid = b.mid.slice(0, t * d);
        self.device.copy(input, mid);
        self.linear(t, attended, weights.o, mid, true);
        let (norm2, rstd2) = (b.norm2.slice(0, t * d), b.rstd2.slice(0, t));
        self.norm(t, mid, weights.norm2, norm2, rstd2);
    }

    /// Where q, k and v of a layer are kept as they were before the clamp.
    fn unclipped(&self, layer: usize, sizes: [usize; 3]) -> Option<[Buffer; 3]> {
        let all = self.buffers.layers[layer].unclipped?;
        let [q, k, v] = sizes;
        Some([all.slice(0, q), all.slice(q, k), all.slice(q + k, v)])
    }

    fn clip(&mut self, layer: usize, qkv: [Buffer; 3]) {
        let Some(kept) = self.unclipped(layer, qkv.map(|x| x.len())) else { return };
        for (x, kept) in qkv.into_iter().zip(kept) {
            self.device.copy(x, kept);
            self.device.clamp(&Clamp { limit: self.config.clip_qkv, x });
        }
    }

    fn clip_backward(&mut self, layer: usize, gradients: [Buffer; 3]) {
        let Some(kept) = self.unclipped(layer, gradients.map(|x| x.len())) else { return };
        for (dx, x) in gradients.into_iter().zip(kept) {
            self.device.clamp_backward(&ClampBackward { limit: self.config.clip_qkv, x, dx });
        }
    }

    fn attention_sizes(&self) -> (usize, usize) {
        (self.config.q_size() as usize, self.config.kv_size() as usize)
    }

    /// The attention of the first `t` tokens of `layer`, forward and for its gradient.
    fn attention_op(&self, layer: usize, t: usize) -> Attention {
        let (config, b) = (&self.config, &self.buffers.layers[layer]);
        let (q_size, kv_size) = self.attention_sizes();
        Attention {
            batch: t / self.sequence,
            seq: self.sequence,
            heads: config.num_attention_heads as usize,
            kv_heads: config.num_key_value_heads as usize,
            head_dim: config.head_dim as usize,
            scale: 1.0 / f64::from(config.head_dim).sqrt(),
            q: b.q.slice(0, t * q_size),
            k: b.k.slice(0, t * kv_size),
            v: b.v.slice(0, t * kv_size),
            starts: self.starts(t),
            window: None,
            deterministic: true,
            workspace: None,
            o: b.attended.slice(0, t * q_size),
            lse: b.lse.slice(0, t * config.num_attention_heads as usize),
        }
    }

    fn rope(&mut self, t: usize, x: Buffer, inverse: bool) {
        let head_dim = self.config.head_dim as usize;
        self.device.rope(&Rope {
            tokens: t,
            heads: x.len() / (t * head_dim),
            head_dim,
            theta: self.config.rope_theta,
            inverse,
            positions: self.buffers.batch.positions.slice(0, t),
            x,
        });
    }

    /// The next layer's input = mid + experts(norm2) (+ shared(norm2)), or mid + dense(norm2).
    fn feed_forward(
        &mut self,
        layer: usize,
        round: &Round,
        comm: &mut Comm,
    ) -> Result<(), CommError> {
        let (t, d) = (round.tokens, self.dim());
        let out = self.layer_input(layer + 1).slice(0, t * d);
        if self.buffers.layers[layer].moe.is_some() {
            self.moe_forward(layer, round, out, comm)?;
        } else if t > 0 {
            self.device.copy(self.buffers.layers[layer].mid.slice(0, t * d), out);
        }
        if t > 0
            && let Some(weights) = self.dense.layers[layer].gated
        {
            self.gated(layer, t, weights, out);
        }
        Ok(())
    }

    /// out += (act(x Wg^T) * x Wu^T) Wd^T
    fn gated(&mut self, layer: usize, t: usize, weights: GatedWeights, out: Buffer) {
        let b = &self.buffers.layers[layer];
        let Some(gated) = b.dense.clone() else { return };
        let width = weights.gate.len() / self.dim();
        let x = b.norm2.slice(0, t * self.dim());
        let [gate, up, hidden] = rows(&gated, t, width);
        let plain = |weight| Linear { weight, bias: None };
        self.linear(t, x, plain(weights.gate), gate, false);
        self.linear(t, x, plain(weights.up), up, false);
        let activation = activation(self.config.experts.activation);
        self.device.gated_mul(&GatedMul { activation, gate, up, out: hidden });
        self.linear(t, hidden, plain(weights.down), out, true);
    }

    fn logits(&mut self, t: usize) {
        let (d, head) = (self.dim(), self.buffers.head.clone());
        let norm = head.norm.slice(0, t * d);
        let x = head.input.slice(0, t * d);
        self.norm(t, x, self.dense.norm, norm, head.rstd.slice(0, t));
        let logits = head.logits.slice(0, t * self.config.vocab_size as usize);
        let weight = Linear { weight: self.dense.head, bias: None };
        self.linear(t, norm, weight, logits, false);
    }

    /// The sum of the cross-entropies of the round's own tokens; with `gradient` the logits become
    /// their gradient.
    pub fn loss(&mut self, round: &Round, gradient: bool) -> f64 {
        let (t, vocab) = (round.tokens, self.config.vocab_size as usize);
        if t == 0 {
            return 0.0;
        }
        let head = self.buffers.head.clone();
        let loss = head.loss.slice(0, t);
        self.device.cross_entropy(&CrossEntropy {
            tokens: t,
            vocab,
            scale: self.loss_scale,
            gradient,
            logits: head.logits.slice(0, t * vocab),
            targets: self.buffers.batch.targets.slice(0, t),
            loss,
        });
        self.device.sum_f64(&SumF64 { x: loss, out: head.loss_sum });
        let mut sum = [0.0];
        self.device.read(head.loss_sum, &mut sum);
        sum[0]
    }

    /// Fills the round's leaf of every gradient.
    ///
    /// # Errors
    /// A peer of the expert group is lost.
    pub fn backward(
        &mut self,
        round: &Round,
        leaf: &Leaf,
        comm: &mut Comm,
    ) -> Result<(), CommError> {
        if let Some(gradients) = leaf.dense {
            self.sum_counts();
            self.logits_backward(round.tokens, gradients);
        }
        for layer in (0..self.config.num_hidden_layers as usize).rev() {
            self.feed_forward_backward(layer, round, leaf, comm)?;
            if let Some(gradients) = leaf.dense {
                self.attention_backward(layer, round.tokens, &gradients.layers[layer]);
            }
        }
        if let Some(gradients) = leaf.dense {
            self.embed_backward(round.tokens, gradients);
        }
        Ok(())
    }

    fn logits_backward(&mut self, t: usize, gradients: &Dense) {
        let (d, head) = (self.dim(), self.buffers.head.clone());
        let x = head.norm.slice(0, t * d);
        let dnorm = self.buffers.scratch.dnorm.slice(0, t * d);
        let dlogits = head.logits.slice(0, t * self.config.vocab_size as usize);
        let plain = |weight| Linear { weight, bias: None };
        let (weight, gradient) = (plain(self.dense.head), plain(gradients.head));
        self.linear_backward(t, [x, dlogits, dnorm], weight, gradient, false);
        let dx = self.buffers.scratch.dx.slice(0, t * d);
        let (x, rstd) = (head.input.slice(0, t * d), head.rstd.slice(0, t));
        self.norm_backward(x, self.dense.norm, rstd, dnorm, dx, gradients.norm, false);
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
        self.device.rms_norm_backward(&op);
    }

    /// From the gradient of the layer's output to that of `mid`, both in `scratch.dx`.
    fn feed_forward_backward(
        &mut self,
        layer: usize,
        round: &Round,
        leaf: &Leaf,
        comm: &mut Comm,
    ) -> Result<(), CommError> {
        let moe = self.buffers.layers[layer].moe.is_some();
        if moe {
            self.moe_backward(layer, round, leaf, comm)?;
        }
        let Some(gradients) = leaf.dense else { return Ok(()) };
        let (t, d) = (round.tokens, self.dim());
        let gradients = &gradients.layers[layer];
        if let (Some(weights), Some(gradients)) = (self.dense.layers[layer].gated, gradients.gated)
        {
            self.gated_backward(layer, t, weights, gradients, moe);
        }
        let b = &self.buffers.layers[layer];
        let (x, rstd) = (b.mid.slice(0, t * d), b.rstd2.slice(0, t));
        let (dx, dnorm) = (self.buffers.scratch.dx, self.buffers.scratch.dnorm);
        let (dx, dnorm) = (dx.slice(0, t * d), dnorm.slice(0, t * d));
        let w = self.dense.layers[layer].norm2;
        self.norm_backward(x, w, rstd, dnorm, dx, gradients.norm2, true);
        Ok(())
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
        let d = self.dim();
        let b = &self.buffers.layers[layer];
        let (Some(kept), Some(scratch)) = (b.dense.clone(), self.buffers.scratch.dense.clone())
        else {
            return;
        };
        let width = weights.gate.len() / d;
        let x = b.norm2.slice(0, t * d);
        let dx = self.buffers.scratch.dx.slice(0, t * d);
        let dnorm = self.buffers.scratch.dnorm.slice(0, t * d);
        let [gate, up, hidden] = rows(&kept, t, width);
        let [dgate, dup, d_out] = rows(&scratch, t, width);
        let plain = |weight| Linear { weight, bias: None };
        let (down, d_down) = (plain(weights.down), plain(gradients.down));
        self.linear_backward(t, [hidden, dx, d_out], down, d_down, false);
        let activation = activation(self.config.experts.activation);
        let op = GatedMulBackward { activation, gate, up, d_out, dgate, dup };
        self.device.gated_mul_backward(&op);
        let (gate, d_gate) = (plain(weights.gate), plain(gradients.gate));
        self.linear_backward(t, [x, dgate, dnorm], gate, d_gate, accumulate);
        let (up, d_up) = (plain(weights.up), plain(gradients.up));
        self.linear_backward(t, [x, dup, dnorm], up, d_up, true);
    }

    /// From the gradient of `mid` to that of the layer's input, both in `scratch.dx`.
    fn attention_backward(&mut self, layer: usize, t: usize, gradients: &DenseLayer) {
        let d = self.dim();
        let (q_size, kv_size) = self.attention_sizes();
        let weights = self.dense.layers[layer].clone();
        let b = self.buffers.layers[layer].clone();
        let scratch = self.buffers.scratch.clone();
        let (dx, dnorm) = (scratch.dx.slice(0, t * d), scratch.dnorm.slice(0, t * d));
        let attended = b.attended.slice(0, t * q_size);
        let d_attended = scratch.d_attended.slice(0, t * q_size);
        let buffers = [attended, dx, d_attended];
        self.linear_backward(t, buffers, weights.o, gradients.o, false);
        let (dq, dk) = (scratch.dq.slice(0, t * q_size), scratch.dk.slice(0, t * kv_size));
        let dv = scratch.dv.slice(0, t * kv_size);
        let forward = self.attention_op(layer, t);
        let op = AttentionBackward { forward, d_o: d_attended, dq, dk, dv };
        self.device.attention_backward(&op);
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
        debug_assert!(t > 0 || self.config.qk_norm == QkNorm::None);
        let scratch = &self.buffers.scratch;
        let raw = self.buffers.layers[layer].qk_norm.clone();
        let parts = raw.zip(scratch.dq_raw.zip(scratch.dk_raw));
        let gains = self.dense.layers[layer].qk_norm.zip(gradients.qk_norm);
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
        let (d, vocab) = (self.dim(), self.config.vocab_size as usize);
        // Tied, the head has written its part of the gradient already.
        if gradients.head != gradients.embed {
            self.device.fill_zero(gradients.embed);
        }
        self.device.embed_backward(&EmbedBackward {
            tokens: t,
            dim: d,
            vocab,
            ids: self.buffers.batch.ids.slice(0, t),
            dx: self.buffers.scratch.dx.slice(0, t * d),
            dtable: gradients.embed,
        });
    }

    /// a += b
    pub(crate) fn add(&mut self, a: Buffer, b: Buffer) {
        self.device.add(&Add { a, b });
    }
}

/// The first `t` rows of the three parts.
fn rows(gated: &Gated<Buffer>, t: usize, width: usize) -> [Buffer; 3] {
    [gated.gate, gated.up, gated.hidden].map(|buffer| buffer.slice(0, t * width))
}
