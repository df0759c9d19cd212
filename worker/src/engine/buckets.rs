//! Parameters, gradients and moments in buckets, as a GPU computes with them.
//!
//! ```text
//! backward -> the bucket's gradient: a step's first micro-batch writes, others add
//!          -> GradientNumbers a bucket -> StepNumbers -> DecideUpdate -> BucketAdamW a bucket
//! ```
//! Everything is decided on the device: the host enqueues the same ops in every step.

use crate::engine::backward::Leaf;
use crate::engine::handles::{Dense, ExpertStacks, is_frozen};
use crate::engine::model::Model;
use crate::engine::numbers::class_of;
use crate::engine::round::Round;
use crate::state::rank::name_hash;
use moejob_kernels::cuda::Stacked;
use moejob_kernels::{
    BucketAdamW, BucketBlock, Buffer, DecideUpdate, Fill, GradientNumbers, Master, MoveCorrections,
};
use moejob_protocol::buckets::{Bucket, BucketKind, Buckets};
use moejob_protocol::buffers::Bucket as Memory;
use moejob_protocol::config::AdamW as AdamWConfig;
use moejob_protocol::layout::Layout;
use moejob_protocol::model::{ModelConfig, Param};
use moejob_protocol::owners::Holders;

/// Matrices of an expert: gate, up, down.
const MATRICES: usize = 3;

/// Where each parameter that the rank holds lies in its buckets.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Those that are held, in the order of their memory.
    buckets: Vec<Bucket>,
    /// By parameter: bucket, first element and how many; none: not held.
    spans: Vec<Option<(usize, usize, usize)>>,
}

impl Places {
    pub fn new(model: &ModelConfig, params: &[Param], layout: &Layout, rank: u32) -> Places {
        let all = Buckets::new(model, params, &Holders::new(model, layout));
        let buckets: Vec<Bucket> = all.held(rank).cloned().collect();
        let mut spans = vec![None; params.len()];
        for (at, bucket) in buckets.iter().enumerate() {
            for span in &bucket.spans {
                spans[span.index] = Some((at, span.start as usize, span.len as usize));
            }
        }
        Places { buckets, spans }
    }

    /// Where the parameter at `index` lies among the buffers that `part` names of each bucket.
    pub fn find(
        &self,
        memory: &[Memory<Buffer>],
        part: impl Fn(&Memory<Buffer>) -> Buffer,
        index: usize,
    ) -> Option<Buffer> {
        let (bucket, start, len) = self.place(index)?;
        Some(part(&memory[bucket]).slice(start, len))
    }

    /// The bucket of the parameter at `index`, its first element there and how many it has.
    pub fn place(&self, index: usize) -> Option<(usize, usize, usize)> {
        self.spans[index]
    }

    /// The experts of each layer among the buffers that `part` names; none of a layer without.
    pub fn stacks(
        &self,
        layers: u32,
        memory: &[Memory<Buffer>],
        part: impl Fn(&Memory<Buffer>) -> Buffer,
    ) -> Vec<Option<ExpertStacks>> {
        let of_layer = |layer| {
            let kind = BucketKind::Experts { layer };
            let at = self.buckets.iter().position(|bucket| bucket.kind == kind)?;
            let bucket = &self.buckets[at];
            let stride = bucket.expert_stride(MATRICES)? as usize;
            let [gate, up, down] = bucket.spans.first_chunk::<MATRICES>()?;
            assert_eq!(gate.start + gate.len, up.start, "widths of experts are multiples of 64");
            let all = part(&memory[at]);
            let from = |start: u64| {
                let start = start as usize;
                Stacked { buffer: all.slice(start, all.len() - start), stride }
            };
            Some(ExpertStacks { up: from(gate.start), down: from(down.start) })
        };
        (0..layers).map(of_layer).collect()
    }

    /// What each block of a bucket is, as the ops read it.
    fn table(&self, bucket: &Bucket, model: &ModelConfig, params: &[Param]) -> Vec<u32> {
        let mut blocks: Vec<BucketBlock> = Vec::new();
        for span in &bucket.spans {
            let param = &params[span.index];
            let frozen = is_frozen(model, param);
            let block = BucketBlock {
                name_hash: name_hash(param),
                decays: param.decays(),
                frozen,
                uncounted: frozen,
                class: class_of(param) as u8,
                tensor: span.index as u32,
                ..BucketBlock::default()
            };
            blocks.extend(block.of_tensor(span.len));
        }
        // What pads the bucket is nobody's.
        let padding = BucketBlock { frozen: true, uncounted: true, ..BucketBlock::default() };
        let all = bucket.len as usize / moejob_kernels::SQUARE_SUM_BLOCK;
        blocks.resize(all, padding);
        BucketBlock::table(&blocks)
    }

    /// Writes what the ops read of the buckets.
    pub fn write_tables(&self, model: &mut Model) {
        for (bucket, memory) in self.buckets.iter().zip(model.buffers.buckets.clone()) {
            let table = self.table(bucket, &model.config, &model.params);
            model.device.write(memory.table, &table);
        }
    }
}

/// Sums of gradients in buckets.
#[derive(Debug)]
pub struct BucketSums {
    dense: Dense,
    stacks: Vec<Option<ExpertStacks>>,
    /// A micro-batch of this step is in the buckets.
    begun: bool,
}

impl BucketSums {
    pub(crate) fn new(model: &Model, places: &Places) -> BucketSums {
        let memory = &model.buffers.buckets;
        let gradient = |bucket: &Memory<Buffer>| bucket.gradient;
        let find = |index| places.find(memory, gradient, index);
        BucketSums {
            dense: Dense::new(&model.config, &model.params, &find),
            stacks: places.stacks(model.config.num_hidden_layers, memory, gradient),
            begun: false,
        }
    }

    pub(crate) fn leaf(&self, round: &Round) -> Leaf<'_> {
        Leaf {
            dense: (round.tokens > 0).then_some(&self.dense),
            experts: Vec::new(),
            stacks: &self.stacks,
            accumulate: self.begun,
        }
    }

    pub(crate) fn clear(&mut self) {
        self.begun = false;
    }

    pub(crate) fn push(&mut self) {
        self.begun = true;
    }

    /// Makes a gradient no finite number.
    pub(crate) fn spoil(&self, model: &mut Model) {
        let value = f64::NAN;
        model.device.fill(&Fill { value, x: self.dense.norm.slice(0, 1) });
    }

    /// Squared norm and counts of what is not finite, into the step's numbers.
    pub(crate) fn measure(&self, model: &mut Model) {
        let (numbers, layout) = (model.buffers.numbers.clone(), model.numbers.layout());
        for bucket in model.buffers.buckets.clone() {
            model.device.gradient_numbers(&GradientNumbers {
                layout,
                table: bucket.table,
                params: numbers.params,
                gradient: bucket.gradient,
                sums: bucket.square_sums,
                numbers: numbers.reduced,
            });
        }
    }

    /// Updates everything as the step's numbers say, or nothing.
    pub(crate) fn update(&self, model: &mut Model, config: &AdamWConfig) {
        let numbers = model.buffers.numbers.clone();
        model.device.decide_update(&DecideUpdate {
            params: numbers.params,
            numbers: numbers.reduced,
            control: numbers.control,
        });
        for bucket in model.buffers.buckets.clone() {
            model.device.bucket_adamw(&BucketAdamW {
                beta1: config.beta1,
                beta2: config.beta2,
                eps: config.epsilon,
                table: bucket.table,
                params: numbers.params,
                control: numbers.control,
                weight: bucket.weight,
                master: master(&bucket),
                moment1: bucket.moment1,
                moment2: bucket.moment2,
                gradient: bucket.gradient,
            });
        }
        move_corrections(model);
    }
}

/// How a bucket's masters are kept.
pub(crate) fn master(bucket: &Memory<Buffer>) -> Master {
    use moejob_kernels::DType::I16;
    match bucket.master {
        None => Master::Weight,
        Some(low) if low.dtype() == I16 => Master::LowBits(low),
        Some(whole) => Master::Separate(whole),
    }
}

/// Corrections of routers follow the loads of the step. Each rank holds all corrections and knows
/// all loads, so all do alike.
pub(crate) fn move_corrections(model: &mut Model) {
    let (rate, frozen) = (model.config.router.bias_update_rate, model.config.router.frozen);
    if rate == 0.0 || frozen {
        return;
    }
    let numbers = model.buffers.numbers.reduced;
    for (at, layer) in model.mixture.clone().into_iter().enumerate() {
        let Some(bias) = model.dense.layers[layer].correction else { continue };
        let loads = model.numbers.loads(at);
        model.device.move_corrections(&MoveCorrections { rate, loads, numbers, bias });
    }
}
