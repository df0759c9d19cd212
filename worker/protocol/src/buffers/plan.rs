//! How large each buffer is, and in what order they are laid out.

mod buckets;
mod fused;
mod router;

use super::{
    Batch, Bucket, Buffers, CONTROL_NUMBERS, Cache, Fused, Gated, Head, Layer, LayerCache, Numbers,
    QkNormBuffers, STAGE_ELEMENTS, Scratch, Whole, WideBalance,
};
use crate::memory::{Kind, Masters, PARAM_NUMBERS, Planner, RECORD_NUMBERS, Rows, STATISTICS, Shape};
use crate::model::{AuxLossScope, ModelConfig, QkNorm};

impl<B: Copy> Buffers<B> {
    pub fn plan<P>(model: &ModelConfig, shape: &Shape, planner: &mut P) -> Buffers<B>
    where
        P: Planner<Buffer = B>,
    {
        let buckets = shape.buckets.iter().map(|of| Bucket::plan(shape, of, planner)).collect();
        let whole = Whole::plan(shape, planner);
        let numbers = Numbers::plan(model, shape, planner);
        planner.part("activations");
        let mut plan = Plan { model, shape, planner };
        let t = shape.tokens;
        let batch = Batch {
            ids: plan.words(t, 1),
            targets: plan.words(t, 1),
            positions: plan.words(t, 1),
            starts: plan.words(t, 1),
        };
        let layers = plan.layers();
        let head = plan.head();
        plan.planner.part("scratch");
        let scratch = plan.scratch();
        let cache = (shape.cached > 0).then(|| plan.cache());
        Buffers {
            cache,
            buckets,
            whole,
            numbers,
            batch,
            layers,
            head,
            scratch,
        }
    }
}

impl<B: Copy> Numbers<B> {
    fn plan(
        model: &ModelConfig,
        shape: &Shape,
        planner: &mut impl Planner<Buffer = B>,
    ) -> Numbers<B> {
        planner.part("numbers");
        let mut doubles = |len| planner.alloc(Kind::F64, Rows::Fixed(len), 1);
        let numbers = &shape.numbers;
        let (params, reduced) = (doubles(PARAM_NUMBERS), doubles(numbers.reduced));
        let record = RECORD_NUMBERS;
        let parts = record * u64::from(shape.micro_batches);
        let (parts, record, records) = (doubles(parts), doubles(record), doubles(record));
        let control = doubles(CONTROL_NUMBERS);
        let loss_scale =
            shape.types.scaled.then(|| planner.alloc(Kind::F32, Rows::Fixed(1), 1));
        let target_scale = shape.masked.then(|| planner.alloc(Kind::F32, Rows::Fixed(1), 1));
        let squares = shape.on_cpu.then(|| planner.alloc(Kind::Pair, Rows::Fixed(1), 1));
        let mut doubles = |len| planner.alloc(Kind::F64, Rows::Fixed(len), 1);
        let width = numbers.loads * STATISTICS;
        let lens = match model.router.aux_loss_scope {
            AuxLossScope::Global => Some([u64::from(shape.micro_batches) * width, width]),
            AuxLossScope::Hf => Some([width, STATISTICS * u64::from(model.experts.count)]),
            _ => None,
        };
        let balance = lens.filter(|_| width > 0).map(|lens| {
            let [parts, sum] = lens.map(&mut doubles);
            WideBalance { parts, sum }
        });
        Numbers {
            params,
            parts,
            record,
            records,
            reduced,
            squares,
            control,
            loss_scale,
            target_scale,
            balance,
        }
    }
}

struct Plan<'a, P> {
    model: &'a ModelConfig,
    shape: &'a Shape,
    planner: &'a mut P,
}

impl<B: Copy, P: Planner<Buffer = B>> Plan<'_, P> {
    fn floats(&mut self, rows: u64, width: u64) -> B {
        self.planner.alloc(self.shape.types.element, Rows::Fixed(rows), width)
    }

    /// Statistics of rows.
    fn statistics(&mut self, rows: u64, width: u64) -> B {
        self.planner.alloc(self.shape.types.statistic, Rows::Fixed(rows), width)
    }

    fn words(&mut self, rows: u64, width: u64) -> B {
        self.planner.alloc(Kind::U32, Rows::Fixed(rows), width)
    }

    fn doubles(&mut self, rows: u64) -> B {
        self.planner.alloc(Kind::F64, Rows::Fixed(rows), 1)
    }

    fn routed(&mut self, width: u64) -> B {
        self.planner.alloc(self.shape.types.element, Rows::Routed, width)
    }

    fn cache(&mut self) -> Cache<B> {
        self.planner.part("cache");
        let (model, kept) = (self.model, self.shape.cached);
        let kv = u64::from(model.kv_size());
        let layers = (0..model.num_hidden_layers).map(|_| LayerCache {
            keys: self.floats(kv, kept),
            values: self.floats(kept, kv),
            chosen: self.words(1, model.slots().into()),
        });
        let layers = layers.collect();
        Cache { layers, logits: self.statistics(1, model.vocab_size.into()) }
    }

    /// Layers that are computed again share the memory of earlier ones.
    fn layers(&mut self) -> Vec<Layer<B>> {
        let count = self.model.num_hidden_layers;
        let span = self.shape.recompute.span(count) as usize;
        let mut layers: Vec<Layer<B>> = Vec::new();
        for at in 0..count {
            let place = at as usize;
            let layer = match place.checked_sub(span) {
                Some(_) => {
                    let shared = layers.iter().skip(place % span).step_by(span);
                    let shared: Vec<Layer<B>> = shared.cloned().collect();
                    self.layer_again(at, &shared, place.is_multiple_of(span))
                }
                None => self.layer(at, &layers),
            };
            layers.push(layer);
        }
        layers
    }

    /// A layer in the memory of earlier ones, but for what outlives its own computation.
    fn layer_again(&mut self, layer: u32, shared: &[Layer<B>], begins: bool) -> Layer<B> {
        let (t, d) = (self.shape.tokens, u64::from(self.model.hidden_size));
        let before = shared[0].clone();
        let input = if begins { self.floats(t, d) } else { before.input };
        let before_fused = shared.iter().find_map(|layer| layer.fused.clone());
        let fused = self.model.is_moe_layer(layer).then(|| match before_fused {
            Some(fused) => fused,
            None => self.fused(None),
        });
        let norm2 = self.norm2(fused.as_ref(), shared);
        let dense = self.kept_width(layer).map(|width| {
            let before = shared.iter().find_map(|layer| layer.dense.clone());
            before.unwrap_or_else(|| self.gated(width))
        });
        Layer { input, norm2, fused, dense, ..before }
    }

    /// Width of the memory of a layer's dense part: the widest one's where layers share it.
    fn kept_width(&self, layer: u32) -> Option<u64> {
        let layers = self.model.num_hidden_layers;
        let shares = self.shape.recompute.span(layers) < layers;
        let own = self.dense_width(layer)?;
        let widest = (0..layers).filter_map(|layer| self.dense_width(layer)).max();
        if shares { widest } else { Some(own) }
    }

    /// Some of the memory of earlier layers may be used again.
    fn layer(&mut self, layer: u32, earlier: &[Layer<B>]) -> Layer<B> {
        let recompute = self.shape.recompute;
        let first = earlier.first().filter(|_| recompute.drops_norms());
        let drops = recompute.drops_hidden();
        let mut hidden = earlier.iter().filter_map(|layer| layer.fused.as_ref()).filter(|_| drops);
        let shared = hidden.next().map(|fused| [fused.h, fused.a]);
        let (t, model) = (self.shape.tokens, self.model);
        let d = u64::from(model.hidden_size);
        let (q, kv) = (u64::from(model.q_size()), u64::from(model.kv_size()));
        let normed = first.filter(|_| model.qk_norm != QkNorm::None);
        let width = self.kept_width(layer);
        let fused = model.is_moe_layer(layer).then(|| self.fused(shared));
        Layer {
            input: self.floats(t, d),
            norm1: first.map_or_else(|| self.floats(t, d), |first| first.norm1),
            rstd1: self.statistics(t, 1),
            q: normed.map_or_else(|| self.floats(t, q), |first| first.q),
            k: normed.map_or_else(|| self.floats(t, kv), |first| first.k),
            v: self.floats(t, kv),
            qk_norm: (model.qk_norm != QkNorm::None).then(|| self.qk_norm()),
            unclipped: (model.clip_qkv > 0.0).then(|| self.floats(t, q + 2 * kv)),
            attended: self.floats(t, q),
            lse: self.statistics(t, model.num_attention_heads.into()),
            mid: self.floats(t, d),
            norm2: self.norm2(fused.as_ref(), if recompute.drops_norms() { earlier } else { &[] }),
            rstd2: self.statistics(t, 1),
            fused,
            dense: width.map(|width| self.gated(width)),
        }
    }

    /// What a mixture's tokens are before they travel lies where the group's tokens meet, if they
    /// leave from there. Other layers may have the memory of those before.
    fn norm2(&mut self, fused: Option<&Fused<B>>, before: &[Layer<B>]) -> B {
        let leaves = self.shape.leaves_in_place();
        let travels = |fused: Option<&Fused<B>>| {
            fused.filter(|_| leaves).and_then(|of| Some(of.spread.as_ref()?.x))
        };
        if let Some(all) = travels(fused) {
            return self.own_of(all);
        }
        let mut stays = before.iter().filter(|layer| travels(layer.fused.as_ref()).is_none());
        let (t, d) = (self.shape.tokens, u64::from(self.model.hidden_size));
        stays.next().map_or_else(|| self.floats(t, d), |layer| layer.norm2)
    }

    /// The part of this rank of what all ranks of its expert group have.
    fn own_of(&mut self, all: B) -> B {
        self.planner.part_of(all, self.shape.expert_place, self.shape.expert_parallel)
    }

    /// Hidden width of a layer's dense part or shared experts.
    fn dense_width(&self, layer: u32) -> Option<u64> {
        let experts = &self.model.experts;
        let width = if self.model.is_moe_layer(layer) {
            experts.shared * experts.intermediate_size
        } else {
            self.model.dense_intermediate_size
        };
        (width > 0).then_some(width.into())
    }

    fn qk_norm(&mut self) -> QkNormBuffers<B> {
        let (t, model) = (self.shape.tokens, self.model);
        let per_head = model.qk_norm == QkNorm::PerHead;
        let norms = |heads: u32| if per_head { t * u64::from(heads) } else { t };
        QkNormBuffers {
            q: self.floats(t, model.q_size().into()),
            k: self.floats(t, model.kv_size().into()),
            q_rstd: self.statistics(norms(model.num_attention_heads), 1),
            k_rstd: self.statistics(norms(model.num_key_value_heads), 1),
        }
    }

    fn gated(&mut self, width: u64) -> Gated<B> {
        let t = self.shape.tokens;
        Gated {
            gate: self.floats(t, width),
            up: self.floats(t, width),
            hidden: self.floats(t, width),
        }
    }

    fn head(&mut self) -> Head<B> {
        let t = self.shape.tokens;
        let d = u64::from(self.model.hidden_size);
        Head {
            input: self.floats(t, d),
            norm: self.floats(t, d),
            rstd: self.statistics(t, 1),
            measured: self.doubles(2),
        }
    }

    fn scratch(&mut self) -> Scratch<B> {
        let (t, model) = (self.shape.tokens, self.model);
        let d = u64::from(model.hidden_size);
        let (q, kv) = (u64::from(model.q_size()), u64::from(model.kv_size()));
        let raw = model.qk_norm != QkNorm::None;
        let layers = 0..model.num_hidden_layers;
        let moe = layers.clone().any(|layer| model.is_moe_layer(layer));
        let dense = layers.filter_map(|layer| self.dense_width(layer)).max();
        let spread = (moe && self.shares_out()).then(|| self.spread_scratch());
        Scratch {
            // The gradient of a mixture's outputs leaves from where it is.
            dx: match &spread {
                Some(spread) if self.shape.leaves_in_place() => self.own_of(spread.dout),
                _ => self.floats(t, d),
            },
            dnorm: self.floats(t, d),
            d_attended: self.floats(t, q),
            dq: self.floats(t, q),
            dk: self.floats(t, kv),
            dv: self.floats(t, kv),
            dq_raw: raw.then(|| self.floats(t, q)),
            dk_raw: raw.then(|| self.floats(t, kv)),
            router: (moe && !self.model.router.is_of_one_op()).then(|| self.router_scratch()),
            dense: dense.map(|width| self.gated(width)),
            spread,
            workspace: self.planner.alloc(Kind::U8, Rows::Workspace, 1),
            stage: {
                let as_stored =
                    self.shape.types.masters == Masters::Weights && !self.shape.offloads;
                let len = if self.shape.on_cpu && as_stored { 0 } else { STAGE_ELEMENTS };
                self.planner.alloc(self.shape.types.vector, Rows::Fixed(len), 1)
            },
        }
    }
}
