//! Routers beyond dropless top-k: their input, their gate, their losses, and all of it backwards.
//!
//! ```text
//! norm2 -> dropout -> the layer's input -> experts
//!                  -> jitter -> logits (linear | cosine) -> gate -> ids, weights, statistics
//! statistics -> balance (micro-batch | sequence | all of the step) -> their gradient -> gate
//! ```
//! The router computes in fp32 where elements have 16 bits, on what the layer's input is in fp32.
//! A micro-batch is routed where it is computed, whoever that is: noise is a function of (seed,
//! step, layer, token of the step), capacity and statistics are the micro-batch's. Evaluation has
//! no noise. docs/routers.md has the equations.

use crate::engine::forward::Pass;
use crate::engine::handles::DenseLayer;
use crate::engine::model::Model;
use moejob_kernels::balance::row;
use moejob_kernels::philox::Draw;
use moejob_kernels::{
    Add, ArenaPlan, BalanceLosses, Buffer, Cast, Choice, DType, Gate, GateBackward,
    Layout as Order, Load, LogitNoise, Mask, MaskRows, Matmul, NO_EXPERT, RouteGroups,
};
use moejob_protocol::buffers::{GateScratch, Router, RouterScratch};
use moejob_protocol::model::{
    AuxLossScope, BalanceLoss, ModelConfig, RouterConfig, RouterKind,
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
pub(crate) fn product(
    layout: Order,
    [m, n, k]: [usize; 3],
    a: Buffer,
    b: Buffer,
    c: Buffer,
) -> Matmul {
    Matmul { layout, m, n, k, accumulate: false, a, b, c }
}

/// A gate as far as it is no memory.
pub(crate) struct Rules {
    pub layer: usize,
    pub tokens: usize,
    pub segments: usize,
    /// There is noise, and the capacity of training.
    pub trains: bool,
}

impl Rules {
    /// The gate of a model without its buffers, but for the deviations of learned noise.
    pub fn gate(&self, model: &ModelConfig, raw: Option<Buffer>) -> Gate {
        let (config, experts) = (&model.router, &model.experts);
        let (count, tokens) = (experts.count as usize, self.tokens);
        let factor = match self.trains {
            true => config.capacity_factor,
            false => config.eval_capacity_factor,
        };
        let capacity = config.capacity(factor, tokens as u64, experts.count, experts.per_token);
        let groups =
            RouteGroups { count: config.groups as usize, kept: config.topk_groups as usize };
        let std = config.gate_noise / count as f64;
        Gate {
            segments: self.segments,
            choice: self.choice(model),
            scoring: config.scoring,
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
                (BalanceLoss::LoadImportance, _) if self.trains => Load::Tutel { std },
                (BalanceLoss::CvSquared, Some(raw)) => Load::Shazeer { raw },
                _ => Load::None,
            },
            ..Gate::of(tokens, count, model.slots() as usize)
        }
    }

    fn choice(&self, model: &ModelConfig) -> Choice {
        let (config, experts) = (&model.router, &model.experts);
        match config.kind {
            RouterKind::TopK | RouterKind::Switch | RouterKind::Tutel | RouterKind::NoisyTopK => {
                Choice::TopK
            }
            RouterKind::Gshard => Choice::RandomSecond,
            RouterKind::TopP => Choice::TopP { sum: config.top_p },
            RouterKind::ExpertChoice => {
                let (tokens, per_token) = (self.tokens as u64, experts.per_token);
                let rows = RouterConfig::chosen_rows(tokens, experts.count, per_token);
                Choice::Experts { rows: rows as usize }
            }
            RouterKind::Hash => {
                Choice::Hash { seed: config.hash_seed.into(), layer: self.layer as u32 }
            }
        }
    }
}

/// The gates of steps and of evaluation, as far as their kernels differ; none where one op chooses.
pub(crate) fn gates(model: &ModelConfig, tokens: usize) -> Vec<Gate> {
    let mixture = (0..model.num_hidden_layers).any(|layer| model.is_moe_layer(layer));
    if !mixture || model.router.is_of_one_op() {
        return Vec::new();
    }
    let none = ArenaPlan::new().alloc(DType::F32, 0);
    let learned = model.router.kind == RouterKind::NoisyTopK;
    let gate = |trains: bool| {
        let raw = (learned && trains).then_some(none);
        Rules { layer: 0, tokens, segments: 1, trains }.gate(model, raw)
    };
    vec![gate(true), gate(false)]
}

impl Model {
    /// What the next forward passes draw from; none: evaluation.
    pub fn set_noise(&mut self, noise: Option<Noise>) {
        self.noise = noise;
    }

    pub(crate) fn draw(&self, layer: usize) -> Option<Draw> {
        let noise = self.noise?;
        let first_token = u64::from(noise.micro_batch) * self.shape.tokens;
        Some(Draw { seed: noise.seed, step: noise.step, layer: layer as u32, first_token })
    }

    /// What the router of a mixture layer keeps.
    pub(crate) fn router(&self, layer: usize) -> Router<Buffer> {
        let fused = self.buffers.layers[layer].fused.as_ref();
        fused.map(|fused| fused.router.clone()).expect("a mixture layer")
    }

    pub(crate) fn router_scratch(&self) -> RouterScratch<Buffer> {
        self.buffers.scratch.router.clone().expect("a router by itself has scratch memory")
    }

    pub(crate) fn gate_scratch(&self) -> GateScratch<Buffer> {
        self.router_scratch().gate
    }

    /// Where the experts and the router read the layer's tokens, [T, D]. What dropout leaves is
    /// made anew by `drop_input`, in forward and in backward.
    pub(crate) fn moe_input(&self, layer: usize, t: usize) -> Buffer {
        let input = self.buffers.layers[layer].norm2;
        let drops = self.config.router.input_dropout > 0.0 && self.noise.is_some();
        let dropped = if drops { self.gate_scratch().dropped } else { None };
        dropped.unwrap_or(input).slice(0, t * self.dim())
    }

    pub(crate) fn jitter(&self) -> Option<Mask> {
        let eps = self.config.router.jitter;
        (eps > 0.0 && self.noise.is_some()).then_some(Mask::Jitter { eps })
    }

    /// Where the router's own input is made, unless that is the layer's.
    fn own_input(&self, t: usize) -> Option<Buffer> {
        let own = self.gate_scratch().input?.slice(0, t * self.dim());
        let differs = own.dtype() != self.buffers.layers[0].norm2.dtype();
        (differs || self.jitter().is_some()).then_some(own)
    }

    /// Something of what a router does is random, and another in each step.
    pub(crate) fn draws(&self) -> bool {
        let RouterConfig { kind, jitter, input_dropout, gate_noise, .. } = self.config.router;
        let moves = [jitter, input_dropout, gate_noise].iter().any(|size| *size > 0.0);
        let coins = matches!(kind, RouterKind::Gshard | RouterKind::NoisyTopK);
        !self.mixture.is_empty() && (moves || coins)
    }

    /// Where the deviations of learned noise lie; none while evaluating.
    pub(crate) fn raw(&self, layer: usize, t: usize) -> Option<Buffer> {
        self.noise?;
        Some(self.router(layer).gate?.raw?.slice(0, t * self.expert_count()))
    }

    pub(crate) fn gate_op(&self, layer: usize, t: usize) -> Gate {
        let (e, k) = (self.expert_count(), self.top_k());
        let router = self.router(layer);
        let gate = router.gate.clone().expect("a router with a gate has its memory");
        let segments = self.segments(t);
        let of = Rules { layer, tokens: t, segments, trains: self.noise.is_some() };
        let rules = of.gate(&self.config, self.raw(layer, t));
        Gate {
            before: self.experts_before(layer),
            draw: self.draw(layer),
            logits: router.logits.slice(0, t * e),
            bias: self.dense.layers[layer].correction,
            words: self.buffers.batch.ids.slice(0, t),
            positions: self.buffers.batch.positions.slice(0, t),
            noisy: gate.noisy.slice(0, t * e),
            probs: router.probs.slice(0, t * e),
            lse: router.lse.slice(0, t),
            chosen: gate.chosen.slice(0, t * k),
            ids: router.ids.slice(0, t * k),
            weights: router.weights.slice(0, t * k),
            first: gate.first.slice(0, t),
            counts: router.counts,
            dropped: gate.dropped,
            stats: gate.stats.slice(0, segments * row::COUNT * e),
            losses: router.losses.slice(1, 2),
            workspace: self.buffers.scratch.workspace,
            ..rules
        }
    }

    /// Parts of a micro-batch whose balance is a loss of its own.
    pub(crate) fn segments(&self, t: usize) -> usize {
        match self.config.router.aux_loss_scope {
            AuxLossScope::Sequence => t / self.sequence(),
            _ => 1,
        }
    }

    /// Of which statistics the layer's balance is: its own ones, or those of the whole step.
    pub(crate) fn balance_op(
        &self,
        layer: usize,
        t: usize,
        gradient: Option<(Buffer, f64)>,
    ) -> BalanceLosses {
        let (experts, segments) = (self.expert_count(), self.segments(t));
        let width = row::COUNT * experts;
        let loss = self.config.router.balance_loss;
        let (tokens, stats) = match &self.buffers.numbers.balance {
            Some(of_layers) if self.has_one_balance() => {
                (t * self.mixture.len(), of_layers.sum)
            }
            Some(of_step) => {
                let tokens = self.shape.tokens as usize * self.shape.micro_batches as usize;
                (tokens, of_step.sum.slice(self.mixture_place(layer) * width, width))
            }
            None => (t / segments, self.gate_op(layer, t).stats),
        };
        let value = self.router(layer).losses.slice(0, 1);
        let gradient =
            gradient.map(|(into, factor)| (into.slice(0, stats.len() / row::COUNT * 3), factor));
        BalanceLosses { loss, tokens, experts, stats, value, gradient }
    }

    /// Which of the mixture layers it is.
    pub(crate) fn mixture_place(&self, layer: usize) -> usize {
        self.mixture.iter().position(|other| *other == layer).expect("a mixture layer")
    }
}

impl Pass<'_> {
    fn mask(&mut self, layer: usize, t: usize, mask: Mask, [x, y]: [Buffer; 2], accumulate: bool) {
        let Some(draw) = self.model.draw(layer) else { return };
        let dim = self.model.dim();
        self.model.device.mask_rows(&MaskRows { rows: t, dim, mask, draw, accumulate, x, y });
    }

    /// Dropout of the layer's input.
    pub(crate) fn drop_input(&mut self, layer: usize, t: usize) {
        let x = self.model.buffers.layers[layer].norm2.slice(0, t * self.model.dim());
        let y = self.model.moe_input(layer, t);
        if x != y {
            let mask = Mask::Dropout { p: self.model.config.router.input_dropout };
            self.mask(layer, t, mask, [x, y], false);
        }
    }

    /// The layer's input as the router sees it.
    fn router_input(&mut self, layer: usize, t: usize) -> Buffer {
        let x = self.model.moe_input(layer, t);
        let Some(own) = self.model.own_input(t) else { return x };
        match self.model.jitter() {
            Some(mask) => self.mask(layer, t, mask, [x, own], false),
            None => self.model.device.cast(&Cast { from: x, to: own }),
        }
        own
    }

    /// Logits, choice and statistics of the layer's tokens. What pads the last of a round's tokens
    /// takes no part, and has no expert.
    pub(crate) fn gate(&mut self, layer: usize, computed: usize) {
        let t = self.model.loaded.min(computed);
        if t < computed {
            let ids = self.model.router(layer).ids;
            let k = self.model.top_k();
            let empty = vec![NO_EXPERT; (computed - t) * k];
            self.model.device.write(ids.slice(t * k, empty.len()), &empty);
        }
        let (e, d) = (self.model.expert_count(), self.model.dim());
        let x = self.router_input(layer, t);
        let weights = self.model.dense.layers[layer].clone();
        let logits = self.model.router(layer).logits.slice(0, t * e);
        if weights.cosine.is_some() {
            self.cosine_logits(layer, t, x, &weights);
        } else if let Some(router) = weights.router {
            let op = product(Order::Nt, [t, e, d], x, router, logits);
            self.model.device.exact_matmul(&op);
        }
        if let (Some(raw), Some(noise)) = (self.model.raw(layer, t), weights.noise) {
            let op = product(Order::Nt, [t, e, d], x, noise, raw);
            self.model.device.exact_matmul(&op);
        }
        let op = self.model.gate_op(layer, t);
        self.model.device.gate(&op);
        self.model.keep_experts(layer, &op);
    }

    /// Gradients of the router's weights, added to what is there or not, and dnorm += what flows
    /// through its input; dnorm is that of the layer's input then, before its dropout. `dweights`
    /// [T, K] are those of choices.
    pub(crate) fn gate_backward(
        &mut self,
        layer: usize,
        t: usize,
        (gradients, accumulate): (&DenseLayer, bool),
        dweights: Buffer,
    ) {
        if self.model.config.router.kind != RouterKind::Hash {
            let e = self.model.expert_count();
            let x = self.router_input(layer, t);
            self.gate_gradient(layer, t, dweights);
            let dlogits = self.model.router_scratch().dlogits.slice(0, t * e);
            let weights = self.model.dense.layers[layer].clone();
            let scores = match (weights.router, gradients.router) {
                (Some(weight), Some(gradient)) => Some((dlogits, [weight, gradient])),
                _ => self.cosine_backward(layer, t, (gradients, accumulate)),
            };
            let d_raw = self.model.gate_scratch().d_raw.map(|d_raw| d_raw.slice(0, t * e));
            let noise = d_raw.zip(weights.noise.zip(gradients.noise));
            let noise = noise.map(|(d_raw, (weight, gradient))| (d_raw, [weight, gradient]));
            let products: Vec<_> = scores.into_iter().chain(noise).collect();
            self.weights_backward(t, x, &products, accumulate);
            self.input_backward_of_router(layer, t, x, &products);
        }
        self.drop_backward(layer, t);
    }

    /// dW (+)= dy^T x of each product of the router's input; zeros for a frozen router.
    fn weights_backward(
        &mut self,
        t: usize,
        x: Buffer,
        products: &[(Buffer, [Buffer; 2])],
        accumulate: bool,
    ) {
        for (dy, [_, gradient]) in products {
            let sizes = [dy.len() / t, self.model.dim(), t];
            let op = Matmul { accumulate, ..product(Order::Tn, sizes, *dy, x, *gradient) };
            match self.model.config.router.frozen {
                true => self.model.device.fill_zero(*gradient),
                false => self.model.device.exact_matmul(&op),
            }
        }
    }

    /// dnorm += the gradient of the router's input `x`, which it may overwrite.
    fn input_backward_of_router(
        &mut self,
        layer: usize,
        t: usize,
        x: Buffer,
        products: &[(Buffer, [Buffer; 2])],
    ) {
        let d = self.model.dim();
        let dnorm = self.model.buffers.scratch.dnorm.slice(0, t * d);
        let own = x != self.model.moe_input(layer, t);
        for (at, (dy, [weight, _])) in products.iter().enumerate() {
            let (into, sizes) = (if own { x } else { dnorm }, [t, d, dy.len() / t]);
            let accumulate = !own || at > 0;
            let op = Matmul { accumulate, ..product(Order::Nn, sizes, *dy, *weight, into) };
            self.model.device.exact_matmul(&op);
        }
        match self.model.jitter() {
            Some(mask) => self.mask(layer, t, mask, [x, dnorm], true),
            None if own => self.model.device.add(&Add { a: dnorm, b: x }),
            None => {}
        }
    }

    /// dlogits (and those of learned noise) from the weights' gradients and the losses.
    fn gate_gradient(&mut self, layer: usize, t: usize, dweights: Buffer) {
        let (e, k) = (self.model.expert_count(), self.model.top_k());
        let config = &self.model.config.router;
        // A loss of the step is there once, not once a micro-batch; and one of all layers once.
        let times = match config.aux_loss_scope {
            AuxLossScope::Global => f64::from(self.model.shape.micro_batches),
            AuxLossScope::Hf => self.model.mixture.len() as f64,
            AuxLossScope::MicroBatch | AuxLossScope::Sequence => 1.0,
        };
        let factor = config.aux_loss_coef * self.model.router_scale * times;
        let (z, entropy) = (config.z_loss_coef, config.entropy_loss_coef);
        let (scratch, gate) = (self.model.router_scratch(), self.model.gate_scratch());
        let balance = self.model.balance_op(layer, t, Some((gate.dstats, factor)));
        self.model.device.balance_losses(&balance);
        let learned = self.model.raw(layer, t).is_some();
        let op = GateBackward {
            forward: self.model.gate_op(layer, t),
            z_coef: z * self.model.router_scale,
            entropy_coef: entropy * self.model.router_scale,
            loss_scale: self.model.buffers.numbers.loss_scale,
            dweights: dweights.slice(0, t * k),
            dstats: balance.gradient.map_or(gate.dstats, |(into, _)| into),
            dlogits: scratch.dlogits.slice(0, t * e),
            d_raw: gate.d_raw.filter(|_| learned).map(|d_raw| d_raw.slice(0, t * e)),
        };
        self.model.device.gate_backward(&op);
    }

    /// dnorm through the layer's dropout.
    fn drop_backward(&mut self, layer: usize, t: usize) {
        let d = self.model.dim();
        let dropped = self.model.moe_input(layer, t);
        let dnorm = self.model.buffers.scratch.dnorm.slice(0, t * d);
        if dropped != self.model.buffers.layers[layer].norm2.slice(0, t * d) {
            // The input itself is not needed any more.
            self.model.device.copy(dnorm, dropped);
            let mask = Mask::Dropout { p: self.model.config.router.input_dropout };
            self.mask(layer, t, mask, [dropped, dnorm], false);
        }
    }
}
