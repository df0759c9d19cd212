//! Routers beyond dropless top-k: their input, their gate, their losses, and all of it backwards.
//!
//! ```text
//! norm2 -> dropout -> the layer's input -> experts
//!                  -> jitter -> logits (linear | cosine) -> gate -> ids, weights, statistics
//! statistics -> balance (micro-batch | sequence | all of the step) -> their gradient -> gate
//! ```
//! A micro-batch is routed where it is computed, whoever that is: noise is a function of (seed,
//! step, layer, token of the step), capacity and statistics are the micro-batch's. Evaluation has
//! no noise. docs/routers.md has the equations.

use crate::engine::dispatch::Round;
use crate::engine::handles::DenseLayer;
use crate::engine::model::Model;
use moejob_kernels::balance::row;
use moejob_kernels::philox::Draw;
use moejob_kernels::{
    AddBias, Balance, BalanceLoss, Balanced, BiasBackward, Buffer, Choice, Gate, GateBackward,
    Layout as Order, Load, LogitNoise, Mask, MaskRows, Matmul, NormalizeRows,
    NormalizeRowsBackward, RouteGroups, Temper, TemperBackward,
};
use moejob_protocol::buffers::GateScratch;
use moejob_protocol::model::{
    AuxLossScope, BalanceLoss as BalanceName, RouterConfig, RouterKind,
};

/// What the noise of a micro-batch depends on beside layer and token; none while evaluating.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Noise {
    pub seed: u64,
    /// Steps done.
    pub step: u64,
    pub micro_batch: u32,
}

/// y = x w^T, or one of its gradients.
fn product(layout: Order, [m, n, k]: [usize; 3], a: Buffer, b: Buffer, c: Buffer) -> Matmul {
    Matmul { layout, m, n, k, accumulate: false, a, b, c }
}

impl Model {
    /// What the next forward passes draw from; none: evaluation.
    pub fn set_noise(&mut self, noise: Option<Noise>) {
        self.noise = noise;
    }

    fn draw(&self, layer: usize) -> Option<Draw> {
        let noise = self.noise?;
        let first_token = u64::from(noise.micro_batch) * self.shape.tokens;
        Some(Draw { seed: noise.seed, step: noise.step, layer: layer as u32, first_token })
    }

    fn gate_scratch(&self) -> GateScratch<Buffer> {
        self.moe_scratch().gate.expect("a router with a gate has its memory")
    }

    fn mask(&mut self, layer: usize, t: usize, mask: Mask, [x, y]: [Buffer; 2], accumulate: bool) {
        let Some(draw) = self.draw(layer) else { return };
        let dim = self.dim();
        self.device.mask_rows(&MaskRows { rows: t, dim, mask, draw, accumulate, x, y });
    }

    /// Where the experts and the router read the layer's tokens, [T, D]. What dropout leaves is
    /// made anew by [`Model::drop_input`], in forward and in backward.
    pub(crate) fn moe_input(&self, layer: usize, t: usize) -> Buffer {
        let input = self.buffers.layers[layer].norm2;
        let drops = self.config.router.input_dropout > 0.0 && self.noise.is_some();
        let dropped = if drops { self.gate_scratch().dropped } else { None };
        dropped.unwrap_or(input).slice(0, t * self.dim())
    }

    /// Dropout of the layer's input.
    pub(crate) fn drop_input(&mut self, layer: usize, t: usize) {
        let x = self.buffers.layers[layer].norm2.slice(0, t * self.dim());
        let y = self.moe_input(layer, t);
        if x != y {
            let mask = Mask::Dropout { p: self.config.router.input_dropout };
            self.mask(layer, t, mask, [x, y], false);
        }
    }

    fn jitter(&self) -> Option<Mask> {
        let eps = self.config.router.jitter;
        (eps > 0.0 && self.noise.is_some()).then_some(Mask::Jitter { eps })
    }

    /// The layer's input as the router sees it.
    fn router_input(&mut self, layer: usize, t: usize) -> Buffer {
        let x = self.moe_input(layer, t);
        let (Some(mask), Some(jittered)) = (self.jitter(), self.gate_buffer_jittered(t)) else {
            return x;
        };
        self.mask(layer, t, mask, [x, jittered], false);
        jittered
    }

    fn gate_buffer_jittered(&self, t: usize) -> Option<Buffer> {
        let scratch = self.moe_scratch().gate?;
        Some(scratch.jittered?.slice(0, t * self.dim()))
    }

    /// Logits, choice and statistics of the layer's tokens.
    pub(crate) fn gate(&mut self, layer: usize, t: usize) {
        let (e, d) = (self.expert_count(), self.dim());
        let x = self.router_input(layer, t);
        let weights = self.dense.layers[layer].clone();
        let logits = self.moe(layer).logits.slice(0, t * e);
        if weights.cosine.is_some() {
            self.cosine_logits(layer, t, x, &weights);
        } else if let Some(router) = weights.router {
            self.device.matmul(&product(Order::Nt, [t, e, d], x, router, logits));
        }
        if let (Some(raw), Some(noise)) = (self.raw(layer, t), weights.noise) {
            self.device.matmul(&product(Order::Nt, [t, e, d], x, noise, raw));
        }
        let op = self.gate_op(layer, t);
        self.device.gate(&op);
    }

    /// Where the deviations of learned noise lie; none while evaluating.
    fn raw(&self, layer: usize, t: usize) -> Option<Buffer> {
        self.noise?;
        Some(self.moe(layer).gate?.raw?.slice(0, t * self.expert_count()))
    }

    fn gate_op(&self, layer: usize, t: usize) -> Gate {
        let (e, k) = (self.expert_count(), self.top_k());
        let (moe, config) = (self.moe(layer), &self.config.router);
        let gate = moe.gate.clone().expect("a router with a gate has its memory");
        let segments = self.segments(t);
        let factor = match self.noise {
            Some(_) => config.capacity_factor,
            None => config.eval_capacity_factor,
        };
        let per_token = self.config.experts.per_token;
        let capacity = config.capacity(factor, t as u64, e as u32, per_token);
        let groups =
            RouteGroups { count: config.groups as usize, kept: config.topk_groups as usize };
        let raw = self.raw(layer, t);
        let std = config.gate_noise / e as f64;
        Gate {
            tokens: t,
            experts: e,
            top_k: k,
            segments,
            choice: self.choice(layer, t),
            scoring: crate::engine::moe::scoring(config.scoring),
            norm_topk: config.norm_topk_prob,
            scale: config.scale,
            groups: (config.groups > 1).then_some(groups),
            capacity: capacity.map(|capacity| capacity as usize),
            prioritized: config.batch_prioritized,
            hysteresis: config.hysteresis,
            noise: match raw {
                Some(raw) => LogitNoise::Learned { raw },
                None if std > 0.0 => LogitNoise::Normal { std },
                None => LogitNoise::None,
            },
            load: match (config.balance_loss, raw) {
                (BalanceName::LoadImportance, _) if self.noise.is_some() => Load::Tutel { std },
                (BalanceName::CvSquared, Some(raw)) => Load::Shazeer { raw },
                _ => Load::None,
            },
            draw: self.draw(layer),
            logits: moe.logits.slice(0, t * e),
            bias: self.dense.layers[layer].correction,
            words: self.buffers.batch.ids.slice(0, t),
            positions: self.buffers.batch.positions.slice(0, t),
            noisy: gate.noisy.slice(0, t * e),
            probs: moe.probs.slice(0, t * e),
            lse: moe.lse.slice(0, t),
            chosen: gate.chosen.slice(0, t * k),
            ids: moe.ids.slice(0, t * k),
            weights: moe.weights.slice(0, t * k),
            first: gate.first.slice(0, t),
            counts: moe.counts,
            dropped: gate.dropped,
            stats: gate.stats.slice(0, segments * row::COUNT * e),
            losses: gate.losses,
        }
    }

    fn choice(&self, layer: usize, t: usize) -> Choice {
        let config = &self.config.router;
        let experts = &self.config.experts;
        match config.kind {
            RouterKind::TopK | RouterKind::Switch | RouterKind::Tutel | RouterKind::NoisyTopK => {
                Choice::TopK
            }
            RouterKind::Gshard => Choice::RandomSecond,
            RouterKind::TopP => Choice::TopP { sum: config.top_p },
            RouterKind::ExpertChoice => {
                let rows = RouterConfig::chosen_rows(t as u64, experts.count, experts.per_token);
                Choice::Experts { rows: rows as usize }
            }
            RouterKind::Hash => {
                Choice::Hash { seed: config.hash_seed.into(), layer: layer as u32 }
            }
        }
    }

    /// Parts of a micro-batch whose balance is a loss of its own.
    fn segments(&self, t: usize) -> usize {
        match self.config.router.aux_loss_scope {
            AuxLossScope::Sequence => t / self.sequence(),
            _ => 1,
        }
    }

    /// The balance of each segment of the layer, or of the whole step.
    fn balance_of(&self, layer: usize, t: usize) -> Vec<Balanced> {
        let (experts, loss) = (self.expert_count(), balance_loss(self.config.router.balance_loss));
        if let Some(stats) = self.step_stats.get(&layer) {
            let tokens = self.shape.tokens as usize * self.shape.micro_batches as usize;
            return vec![Balance { loss, tokens, experts }.of(stats)];
        }
        let segments = self.segments(t);
        let balance = Balance { loss, tokens: t / segments, experts };
        let stats = self.gate_stats(layer, t);
        stats.chunks_exact(row::COUNT * experts).map(|stats| balance.of(stats)).collect()
    }

    fn gate_stats(&self, layer: usize, t: usize) -> Vec<f64> {
        self.device.read_vec(self.gate_op(layer, t).stats)
    }

    /// Auxiliary loss, z loss and mean entropy of the layer's tokens.
    pub(crate) fn gate_losses(&self, layer: usize, t: usize) -> [f64; 3] {
        let balanced = self.balance_of(layer, t);
        let aux = balanced.iter().fold(0.0, |sum, part| sum + part.value) / balanced.len() as f64;
        let losses: Vec<f64> = self.device.read_vec(self.gate_op(layer, t).losses);
        [aux, losses[0], losses[1]]
    }

    /// Gradients of the router's weights, and dnorm += what flows through its input; dnorm is that
    /// of the layer's input then, before its dropout.
    pub(crate) fn gate_backward(&mut self, layer: usize, t: usize, gradients: &DenseLayer) {
        let (e, d) = (self.expert_count(), self.dim());
        if self.config.router.kind != RouterKind::Hash {
            let x = self.router_input(layer, t);
            self.gate_gradient(layer, t);
            let scratch = self.moe_scratch();
            let dlogits = scratch.dlogits.slice(0, t * e);
            let weights = self.dense.layers[layer].clone();
            let dnorm = self.buffers.scratch.dnorm.slice(0, t * d);
            if weights.cosine.is_some() {
                self.cosine_backward(layer, t, x, gradients);
            } else if let (Some(router), Some(gradient)) = (weights.router, gradients.router) {
                self.linear_gate_backward(t, x, dlogits, [router, gradient], true);
            }
            let d_raw = self.gate_scratch().d_raw.map(|d_raw| d_raw.slice(0, t * e));
            if let (Some(d_raw), Some(noise), Some(gradient)) =
                (d_raw, weights.noise, gradients.noise)
            {
                self.linear_gate_backward(t, x, d_raw, [noise, gradient], false);
            }
            if let (Some(mask), true) = (self.jitter(), x != self.moe_input(layer, t)) {
                self.mask(layer, t, mask, [x, dnorm], true);
            }
        }
        self.drop_backward(layer, t);
    }

    /// dW = dy^T x, and the gradient of x: into dnorm, or over x where noise stands between.
    /// `first` begins that.
    fn linear_gate_backward(
        &mut self,
        t: usize,
        x: Buffer,
        dy: Buffer,
        [weight, gradient]: [Buffer; 2],
        first: bool,
    ) {
        debug_assert!(first || self.jitter().is_none(), "rules refuse jitter with learned noise");
        let (n, d) = (dy.len() / t, self.dim());
        self.router_gradient(product(Order::Tn, [n, d, t], dy, x, gradient));
        let dnorm = self.buffers.scratch.dnorm.slice(0, t * d);
        let jittered = self.jitter().is_some();
        let into = if jittered { x } else { dnorm };
        let op = product(Order::Nn, [t, d, n], dy, weight, into);
        self.device.matmul(&Matmul { accumulate: !jittered, ..op });
    }

    /// A gradient of the router's weights; zeros for a frozen one.
    fn router_gradient(&mut self, op: Matmul) {
        if self.config.router.frozen {
            self.device.fill_zero(op.c);
        } else {
            self.device.matmul(&op);
        }
    }

    /// dlogits (and those of learned noise) from the weights' gradients and the losses.
    fn gate_gradient(&mut self, layer: usize, t: usize) {
        let (e, k) = (self.expert_count(), self.top_k());
        let config = self.config.router.clone();
        let balanced = self.balance_of(layer, t);
        let whole_step = config.aux_loss_scope == AuxLossScope::Global;
        // A loss of the step is there once, not once a micro-batch.
        let times = if whole_step { f64::from(self.shape.micro_batches) } else { 1.0 };
        let factor = config.aux_loss_coef * self.router_scale * times / balanced.len() as f64;
        let mut dstats = Vec::new();
        for part in &balanced {
            let rows = part.probs.iter().chain(&part.importance).chain(&part.load);
            dstats.extend(rows.map(|d| d * factor));
        }
        let (scratch, gate) = (self.moe_scratch(), self.gate_scratch());
        let into = gate.dstats.slice(0, dstats.len());
        self.device.write(into, &dstats);
        let learned = self.raw(layer, t).is_some();
        let op = GateBackward {
            forward: self.gate_op(layer, t),
            z_coef: config.z_loss_coef * self.router_scale,
            entropy_coef: config.entropy_loss_coef * self.router_scale,
            dweights: scratch.dweights.slice(0, t * k),
            dstats: into,
            dlogits: scratch.dlogits.slice(0, t * e),
            d_raw: gate.d_raw.filter(|_| learned).map(|d_raw| d_raw.slice(0, t * e)),
        };
        self.device.gate_backward(&op);
    }

    /// dnorm through the layer's dropout.
    fn drop_backward(&mut self, layer: usize, t: usize) {
        let d = self.dim();
        let dropped = self.moe_input(layer, t);
        let dnorm = self.buffers.scratch.dnorm.slice(0, t * d);
        if dropped != self.buffers.layers[layer].norm2.slice(0, t * d) {
            // The input itself is not needed any more.
            self.device.copy(dnorm, dropped);
            let mask = Mask::Dropout { p: self.config.router.input_dropout };
            self.mask(layer, t, mask, [dropped, dnorm], false);
        }
    }

    /// logits = e^temperature * cos(projector x + bias, similarity)
    fn cosine_logits(&mut self, layer: usize, t: usize, x: Buffer, weights: &DenseLayer) {
        let (e, d) = (self.expert_count(), self.dim());
        let moe = self.moe(layer);
        let kept = moe.gate.and_then(|gate| gate.cosine);
        let (Some(gate), Some(kept)) = (weights.cosine, kept) else { return };
        let width = gate.similarity.len() / e;
        let rows = |buffer: Buffer| buffer.slice(0, t * width);
        let (projected, normed) = (rows(kept.projected), rows(kept.normed));
        let weight = gate.projector.weight;
        self.device.matmul(&product(Order::Nt, [t, width, d], x, weight, projected));
        if let Some(bias) = gate.projector.bias {
            self.device.add_bias(&AddBias { rows: t, columns: width, x: projected, bias });
        }
        let norm = kept.norm.slice(0, t);
        let op = NormalizeRows { rows: t, dim: width, x: projected, y: normed, norm };
        self.device.normalize_rows(&op);
        let (y, norm) = (kept.similarity, kept.similarity_norm);
        let op = NormalizeRows { rows: e, dim: width, x: gate.similarity, y, norm };
        self.device.normalize_rows(&op);
        let logits = moe.logits.slice(0, t * e);
        self.device.matmul(&product(Order::Nt, [t, e, width], normed, y, logits));
        self.device.temper(&Temper { temperature: gate.temperature, x: logits });
    }

    fn cosine_backward(&mut self, layer: usize, t: usize, x: Buffer, gradients: &DenseLayer) {
        let e = self.expert_count();
        let moe = self.moe(layer);
        let weights = self.dense.layers[layer].cosine;
        let kept = moe.gate.and_then(|gate| gate.cosine);
        let scratch = self.gate_scratch().cosine;
        let (Some(gate), Some(kept), Some(scratch), Some(gradient)) =
            (weights, kept, scratch, gradients.cosine)
        else {
            return;
        };
        let width = gate.similarity.len() / e;
        let rows = |buffer: Buffer| buffer.slice(0, t * width);
        let [d_normed, d_projected, d_similarity] =
            [rows(scratch[0]), rows(scratch[1]), scratch[2]];
        let dlogits = self.moe_scratch().dlogits.slice(0, t * e);
        self.device.temper_backward(&TemperBackward {
            temperature: gate.temperature,
            x: moe.logits.slice(0, t * e),
            dx: dlogits,
            d_temperature: gradient.temperature,
        });
        let normed = rows(kept.normed);
        let op = product(Order::Nn, [t, width, e], dlogits, kept.similarity, d_normed);
        self.device.matmul(&op);
        let op = product(Order::Tn, [e, width, t], dlogits, normed, d_similarity);
        self.device.matmul(&op);
        self.device.normalize_rows_backward(&NormalizeRowsBackward {
            rows: e,
            dim: width,
            y: kept.similarity,
            norm: kept.similarity_norm,
            dy: d_similarity,
            dx: gradient.similarity,
        });
        let norm = kept.norm.slice(0, t);
        let (y, dy, dx) = (normed, d_normed, d_projected);
        let op = NormalizeRowsBackward { rows: t, dim: width, y, norm, dy, dx };
        self.device.normalize_rows_backward(&op);
        if let Some(dbias) = gradient.projector.bias {
            let (rows, columns, accumulate) = (t, width, false);
            self.device.bias_backward(&BiasBackward { rows, columns, accumulate, dy: dx, dbias });
        }
        let pair = [gate.projector.weight, gradient.projector.weight];
        self.linear_gate_backward(t, x, dx, pair, true);
        if self.config.router.frozen {
            self.device.fill_zero(gradient.similarity);
            self.device.fill_zero(gradient.temperature);
            gradient.projector.bias.into_iter().for_each(|bias| self.device.fill_zero(bias));
        }
    }

    /// Statistics of the round's own micro-batch, `[mixture layer][5][E]`.
    pub(crate) fn round_stats(&self, round: &Round) -> Vec<f64> {
        let layers = self.mixture_layers();
        layers.flat_map(|layer| self.gate_stats(layer, round.tokens)).collect()
    }

    /// Statistics of the whole step, `[mixture layer][5][E]`, which the losses are of from here
    /// on; empty: those of each micro-batch.
    pub(crate) fn set_step_stats(&mut self, stats: &[f64]) {
        let width = row::COUNT * self.expert_count();
        let parts = stats.chunks_exact(width.max(1)).map(<[f64]>::to_vec);
        self.step_stats = self.mixture_layers().zip(parts).collect();
    }

    pub(crate) fn mixture_layers(&self) -> impl Iterator<Item = usize> {
        let layers = self.buffers.layers.iter().enumerate();
        let mixture = layers.filter(|(_, buffers)| buffers.moe.is_some());
        mixture.map(|(layer, _)| layer).collect::<Vec<_>>().into_iter()
    }
}

fn balance_loss(name: BalanceName) -> BalanceLoss {
    match name {
        BalanceName::Switch => BalanceLoss::Switch,
        BalanceName::Gshard => BalanceLoss::Gshard,
        BalanceName::FirstChoice => BalanceLoss::FirstChoice,
        BalanceName::LoadImportance => BalanceLoss::LoadImportance,
        BalanceName::CvSquared => BalanceLoss::CvSquared,
        BalanceName::Kl => BalanceLoss::Kl,
        BalanceName::None => BalanceLoss::None,
    }
}
