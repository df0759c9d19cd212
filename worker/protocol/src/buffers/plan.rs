//! How large each buffer is, and in what order they are laid out.

mod buckets;
mod fused;
mod router;

use super::{
    Batch, Bucket, Buffers, CONTROL_NUMBERS, Cache, Fused, Gated, Gradients, Head, Layer,
    LayerCache, Moe, MoeScratch, Numbers, Order, QkNormBuffers, Router, Routes, STAGE_ELEMENTS,
    Scratch, State, Travel, Whole, WideBalance,
};
use crate::memory::{Kind, PARAM_NUMBERS, Planner, RECORD_NUMBERS, Rows, STATISTICS, Shape, Sums};
use crate::model::{AuxLossScope, ModelConfig, QkNorm};

impl<B: Copy> Buffers<B> {
    pub fn plan<P>(model: &ModelConfig, shape: &Shape, planner: &mut P) -> Buffers<B>
    where
        P: Planner<Buffer = B>,
    {
        let state = State::plan(shape, planner);
        let gradients = Gradients::plan(shape, planner);
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
            state,
            gradients,
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

impl<B: Copy> State<B> {
    fn plan(shape: &Shape, planner: &mut impl Planner<Buffer = B>) -> State<B> {
        let (flats, tree) = (&shape.flats, shape.types.sums == Sums::Tree);
        let mut float = |name, len| {
            planner.part(name);
            let len = if tree { len } else { 0 };
            planner.alloc(shape.types.element, Rows::Fixed(len), 1)
        };
        State {
            dense: float("weights", flats.dense.len),
            experts: float("weights", flats.experts.len),
            moment1: float("moments", flats.owned.len),
            moment2: float("moments", flats.owned.len),
        }
    }
}

impl<B: Copy> Gradients<B> {
    fn plan(shape: &Shape, planner: &mut impl Planner<Buffer = B>) -> Gradients<B> {
        planner.part("gradients");
        let (flats, float) = (&shape.flats, shape.types.element);
        if shape.types.sums == Sums::Buckets {
            let inbox = planner.alloc(float, Rows::Fixed(0), 1);
            return Gradients { dense: Vec::new(), experts: Vec::new(), inbox };
        }
        let mut float = |len| planner.alloc(float, Rows::Fixed(len), 1);
        let dense = (0..shape.dense_depth).map(|_| float(flats.dense.len)).collect();
        let source = |depth: &usize| (0..*depth).map(|_| float(flats.experts.len)).collect();
        let experts = shape.expert_depths.iter().map(source).collect();
        let inbox = float(shape.inbox);
        Gradients { dense, experts, inbox }
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
        let tree = shape.types.sums == Sums::Tree;
        let (parts, record) = match tree {
            true => (numbers.parts.iter().sum(), 0),
            false => (RECORD_NUMBERS * u64::from(shape.micro_batches), RECORD_NUMBERS),
        };
        let (parts, record, records) = (doubles(parts), doubles(record), doubles(record));
        let control = doubles(CONTROL_NUMBERS);
        let loss_scale =
            shape.types.scaled.then(|| planner.alloc(Kind::F32, Rows::Fixed(1), 1));
        let target_scale = shape.masked.then(|| planner.alloc(Kind::F32, Rows::Fixed(1), 1));
        let pairs = shape.on_cpu && !tree;
        let squares = pairs.then(|| planner.alloc(Kind::Pair, Rows::Fixed(1), 1));
        let mut doubles = |len| planner.alloc(Kind::F64, Rows::Fixed(len), 1);
        let width = numbers.loads * STATISTICS;
        let lens = match model.router.aux_loss_scope {
            AuxLossScope::Global => Some([u64::from(shape.micro_batches) * width, width]),
            AuxLossScope::Hf if !tree => {
                Some([width, STATISTICS * u64::from(model.experts.count)])
            }
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
        Cache { layers, logits: self.floats(1, model.vocab_size.into()) }
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
        let with_experts = shared.iter().find_map(|layer| layer.moe.clone());
        let mixture = self.model.is_moe_layer(layer);
        let moe = (mixture && !self.is_fused()).then(|| match with_experts {
            Some(moe) => self.moe_again(moe),
            None => self.moe(None),
        });
        let before_fused = shared.iter().find_map(|layer| layer.fused.clone());
        let fused = (mixture && self.is_fused()).then(|| match before_fused {
            Some(fused) => fused,
            None => self.fused(None),
        });
        let norm2 = self.norm2(fused.as_ref(), shared);
        let dense = self.kept_width(layer).map(|width| {
            let before = shared.iter().find_map(|layer| layer.dense.clone());
            before.unwrap_or_else(|| self.gated(width))
        });
        Layer { input, norm2, moe, fused, dense, ..before }
    }

    /// Width of the memory of a layer's dense part: the widest one's where layers share it.
    fn kept_width(&self, layer: u32) -> Option<u64> {
        let layers = self.model.num_hidden_layers;
        let shares = self.shape.recompute.span(layers) < layers;
        let own = self.dense_width(layer)?;
        let widest = (0..layers).filter_map(|layer| self.dense_width(layer)).max();
        if shares { widest } else { Some(own) }
    }

    /// Counts are those of all layers at the end of forward; tables are the layer's own.
    fn moe_again(&mut self, before: Moe<B>) -> Moe<B> {
        let (e, computed) = (u64::from(self.model.experts.count), self.model.slices().count);
        let (sources, computed) = (self.shape.expert_parallel, u64::from(computed));
        let routes = before.routes.clone().map(|routes| Routes {
            owner: self.words(computed, 1),
            local: self.words(computed, 1),
            order: self.words(computed, 1),
            first: self.words(sources + 1, 1),
            ..routes
        });
        let (counts, prob_sums) = (self.words(e, 1), self.doubles(e));
        Moe { router: Router { counts, prob_sums, ..before.router }, routes, ..before }
    }

    /// Some of the memory of earlier layers may be used again.
    fn layer(&mut self, layer: u32, earlier: &[Layer<B>]) -> Layer<B> {
        let recompute = self.shape.recompute;
        let first = earlier.first().filter(|_| recompute.drops_norms());
        let drops = recompute.drops_hidden();
        let mut hidden = earlier.iter().filter_map(|layer| layer.moe.as_ref()).filter(|_| drops);
        let shared = hidden.next().map(|moe| [moe.h, moe.a]);
        let mut hidden = earlier.iter().filter_map(|layer| layer.fused.as_ref()).filter(|_| drops);
        let shared_fused = hidden.next().map(|fused| [fused.h, fused.a]);
        let (t, model) = (self.shape.tokens, self.model);
        let d = u64::from(model.hidden_size);
        let (q, kv) = (u64::from(model.q_size()), u64::from(model.kv_size()));
        let moe = model.is_moe_layer(layer);
        let normed = first.filter(|_| model.qk_norm != QkNorm::None);
        let width = self.kept_width(layer);
        let fused = (moe && self.is_fused()).then(|| self.fused(shared_fused));
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
            moe: (moe && !self.is_fused()).then(|| self.moe(shared)),
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

    /// `shared`: hidden rows that are computed again.
    fn moe(&mut self, shared: Option<[B; 2]>) -> Moe<B> {
        let t = self.shape.tokens;
        let (sources, chunks) = (self.shape.expert_parallel, self.shape.chunks);
        let d = u64::from(self.model.hidden_size);
        let gate = !self.model.router.is_plain();
        let router = self.router(1, gate);
        // From here on of slices.
        let slices = self.model.slices();
        let [e, k, f] = [slices.count, slices.slots, slices.width].map(u64::from);
        Moe {
            router,
            slices: (slices.each > 1).then(|| [self.words(t, k), self.floats(t, k)]),
            offsets: self.words(e + 1, 1),
            rows: self.words(t, k),
            pos: self.words(t, k),
            segments: self.words(e * sources + 1, chunks),
            row_index: self.planner.alloc(Kind::U32, Rows::Routed, 1),
            row_weights: self.routed(1),
            routes: (sources > 1).then(|| Routes {
                owner: self.words(e, 1),
                local: self.words(e, 1),
                order: self.words(e, 1),
                first: self.words(sources + 1, 1),
                tokens: self.planner.alloc(self.shape.types.element, Rows::Arrived, d),
                arrived: self.words(sources + 1, chunks),
                leaving: self.words(t, k),
                departures: self.words(sources + 1, chunks),
                returns: self.words(sources + 1, chunks),
            }),
            h: shared.map_or_else(|| self.routed(2 * f), |shared| shared[0]),
            a: shared.map_or_else(|| self.routed(f), |shared| shared[1]),
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
        let spread = (moe && self.is_fused() && self.shape.expert_parallel > 1)
            .then(|| self.spread_scratch());
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
            moe: (moe && !self.is_fused()).then(|| self.moe_scratch()),
            router: (moe && !(self.is_fused() && self.model.router.is_of_one_op()))
                .then(|| self.router_scratch()),
            dense: dense.map(|width| self.gated(width)),
            spread,
            workspace: self.planner.alloc(Kind::U8, Rows::Fixed(self.shape.workspace), 1),
            stage: {
                let len = if self.is_fused() { STAGE_ELEMENTS } else { 0 };
                self.planner.alloc(self.shape.types.vector, Rows::Fixed(len), 1)
            },
        }
    }

    fn moe_scratch(&mut self) -> MoeScratch<B> {
        let (t, slices) = (self.shape.tokens, self.model.slices());
        let [e, k, f] = [slices.count, slices.slots, slices.width].map(u64::from);
        let d = u64::from(self.model.hidden_size);
        MoeScratch {
            counts: self.words(e, 1),
            ids: self.words(t, k),
            slice_dweights: (slices.each > 1).then(|| self.floats(t, k)),
            y: self.routed(d),
            ds: self.routed(1),
            dh: self.routed(2 * f),
            a_scaled: self.routed(f),
            travel: (self.shape.expert_parallel > 1).then(|| Travel {
                all_ids: self.words(self.shape.expert_parallel * t, k),
                all_weights: self.floats(self.shape.expert_parallel * t, k),
                slots: self.planner.alloc(Kind::U32, Rows::Routed, 1),
                leaving: self.floats(t * k, d),
                dy: self.planner.alloc(self.shape.types.element, Rows::Arrived, d),
                returned: self.floats(t * k, d),
                ds: self.floats(t, k),
                order: (self.shape.chunks > 1).then(|| Order {
                    offsets: self.words(e * self.shape.expert_parallel + 1, 1),
                    rows: self.planner.alloc(Kind::U32, Rows::Routed, 1),
                    tokens: self.planner.alloc(Kind::U32, Rows::Routed, 1),
                }),
            }),
        }
    }
}
