//! Parameters, gradients and moments in buckets, as a GPU computes with them.
//!
//! ```text
//! backward -> the bucket's gradient: a step's first micro-batch writes, others add
//!   -> reduce-scatter: each holder has the sum of its chunk
//!   -> GradientNumbers a chunk -> StepNumbers, summed over ranks -> DecideUpdate -> BucketAdamW
//!   -> all-gather: each holder has all weights
//! ```
//! Everything is decided on the device: the host enqueues the same ops in every step, and every
//! rank the same collectives in the same order, that of the buckets.

use crate::engine::backward::Leaf;
use crate::engine::handles::{Dense, ExpertStacks, is_frozen};
use crate::engine::links::{Links, Shared};
use crate::engine::model::Model;
use crate::engine::numbers::class_of;
use crate::engine::round::Round;
use crate::state::rank::name_hash;
use moejob_kernels::cuda::Stacked;
use moejob_kernels::{
    BucketAdamW, BucketBlock, Buffer, Fill, GradientNumbers, Master, MoveCorrections,
};
use moejob_protocol::buckets::{Bucket, BucketKind, Buckets};
use moejob_protocol::buffers::Bucket as Memory;
use moejob_protocol::config::AdamW as AdamWConfig;
use moejob_protocol::layout::Layout;
use moejob_protocol::model::{ModelConfig, Param};
use moejob_protocol::owners::Holders;
use std::ops::Range;

/// Matrices of an expert: gate, up, down.
const MATRICES: usize = 3;

/// Where each parameter that the rank holds lies in its buckets.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Those that are held, in the order of their memory.
    buckets: Vec<Bucket>,
    /// Of each, the elements that this rank owns.
    chunks: Vec<Range<usize>>,
    /// By parameter: bucket, first element and how many; none: not held.
    spans: Vec<Option<(usize, usize, usize)>>,
    /// Of all buckets that several ranks hold, in their order: who, and which of the held ones it
    /// is.
    shared: Vec<(Vec<u32>, Option<usize>)>,
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
        let own = |bucket: &Bucket| {
            let chunk = bucket.chunk(rank).expect("held");
            chunk.start as usize..chunk.end as usize
        };
        let chunks = buckets.iter().map(own).collect();
        let mut next = 0..buckets.len();
        let of = |bucket: &Bucket| {
            let held = bucket.holders.binary_search(&rank).is_ok();
            (bucket.holders.clone(), if held { next.next() } else { None })
        };
        let shared = all.buckets.iter().map(of).filter(|(holders, _)| holders.len() > 1).collect();
        Places { buckets, chunks, spans, shared }
    }

    /// The elements of the held bucket `at` that this rank owns.
    pub fn chunk(&self, at: usize) -> Range<usize> {
        self.chunks[at].clone()
    }

    /// The own chunks of what `part` names of each held bucket.
    pub fn owned<'a>(
        &'a self,
        memory: &'a [Memory<Buffer>],
        part: impl Fn(&Memory<Buffer>) -> Buffer + 'a,
    ) -> impl Iterator<Item = Buffer> + 'a {
        let own = move |(bucket, chunk): (&Memory<Buffer>, &Range<usize>)| {
            part(bucket).slice(chunk.start, chunk.len())
        };
        memory.iter().zip(&self.chunks).map(own)
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

    /// What `part` names of all buckets that several ranks hold.
    fn shared(
        &self,
        memory: &[Memory<Buffer>],
        part: impl Fn(&Memory<Buffer>) -> Buffer,
    ) -> Vec<Shared<'_>> {
        let of = |shared: &(Vec<u32>, Option<usize>)| shared.1.map(|at| part(&memory[at]));
        let all = self.shared.iter();
        all.map(|shared| Shared { holders: &shared.0, buffer: of(shared) }).collect()
    }

    /// The sets of ranks that share buckets.
    pub fn groups(&self) -> Vec<Vec<u32>> {
        let mut groups: Vec<Vec<u32>> = Vec::new();
        for (holders, _) in &self.shared {
            if !groups.contains(holders) {
                groups.push(holders.clone());
            }
        }
        groups
    }

    /// What each block of the own chunk of a bucket is, as the ops read it.
    fn table(&self, at: usize, model: &ModelConfig, params: &[Param]) -> Vec<u32> {
        let bucket = &self.buckets[at];
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
        const BLOCK: usize = moejob_kernels::SQUARE_SUM_BLOCK;
        blocks.resize(bucket.len as usize / BLOCK, padding);
        let own = self.chunk(at);
        BucketBlock::table(&blocks[own.start / BLOCK..own.end / BLOCK])
    }

    /// Writes what the ops read of the buckets.
    pub fn write_tables(&self, model: &mut Model) {
        for (at, memory) in model.buffers.buckets.clone().into_iter().enumerate() {
            let table = self.table(at, &model.config, &model.params);
            model.device.write(memory.table, &table);
        }
    }
}

/// Sums of gradients in buckets.
#[derive(Debug)]
pub struct BucketSums {
    places: Places,
    dense: Dense,
    stacks: Vec<Option<ExpertStacks>>,
    /// An own micro-batch of this step is in the buckets, and tokens of anybody in those of
    /// experts.
    begun: bool,
    begun_experts: bool,
}

impl BucketSums {
    pub(crate) fn new(model: &Model, places: &Places) -> BucketSums {
        let memory = &model.buffers.buckets;
        let gradient = |bucket: &Memory<Buffer>| bucket.gradient;
        let find = |index| places.find(memory, gradient, index);
        BucketSums {
            dense: Dense::new(&model.config, &model.params, &find),
            stacks: places.stacks(model.config.num_hidden_layers, memory, gradient),
            places: places.clone(),
            begun: false,
            begun_experts: false,
        }
    }

    pub(crate) fn leaf(&self, round: &Round) -> Leaf<'_> {
        Leaf {
            dense: (round.tokens > 0).then_some(&self.dense),
            experts: Vec::new(),
            stacks: &self.stacks,
            accumulate: self.begun,
            accumulate_experts: self.begun_experts,
        }
    }

    pub(crate) fn clear(&mut self) {
        (self.begun, self.begun_experts) = (false, false);
    }

    pub(crate) fn push(&mut self, round: &Round) {
        self.begun |= round.tokens > 0;
        self.begun_experts |= !round.sources.is_empty();
    }

    /// The sum over its holders of each chunk that this rank owns. A rank that computed nothing
    /// gives zeros.
    pub(crate) fn reduce(&self, model: &mut Model, links: &mut Links) {
        let memory = model.buffers.buckets.clone();
        for (bucket, of) in memory.iter().zip(&self.places.buckets) {
            let experts = matches!(of.kind, BucketKind::Experts { .. });
            if !if experts { self.begun_experts } else { self.begun } {
                model.device.fill_zero(bucket.gradient);
            }
        }
        let gradients = self.places.shared(&memory, |bucket| bucket.gradient);
        links.reduce_scatter(&mut model.device, &gradients);
    }

    /// Makes a gradient no finite number.
    pub(crate) fn spoil(&self, model: &mut Model) {
        let value = f64::NAN;
        model.device.fill(&Fill { value, x: self.dense.norm.slice(0, 1) });
    }

    /// Squared norm and counts of what is not finite, of what is owned, into the step's numbers.
    pub(crate) fn measure(&self, model: &mut Model) {
        let (numbers, layout) = (model.buffers.numbers.clone(), model.numbers.layout());
        let memory = model.buffers.buckets.clone();
        let gradients = self.places.owned(&memory, |bucket| bucket.gradient);
        for (bucket, gradient) in memory.iter().zip(gradients) {
            model.device.gradient_numbers(&GradientNumbers {
                layout,
                table: bucket.table,
                params: numbers.params,
                gradient,
                sums: bucket.square_sums,
                numbers: numbers.reduced,
            });
        }
    }

    /// Updates what is owned as the step's numbers say, or nothing.
    pub(crate) fn update(&self, model: &mut Model, config: &AdamWConfig) {
        let numbers = model.buffers.numbers.clone();
        let memory = model.buffers.buckets.clone();
        let weights = self.places.owned(&memory, |bucket| bucket.weight);
        let gradients = self.places.owned(&memory, |bucket| bucket.gradient);
        for (bucket, (weight, gradient)) in memory.iter().zip(weights.zip(gradients)) {
            model.device.bucket_adamw(&BucketAdamW {
                beta1: config.beta1,
                beta2: config.beta2,
                eps: config.epsilon,
                table: bucket.table,
                params: numbers.params,
                control: numbers.control,
                weight,
                master: master(bucket),
                moment1: bucket.moment1,
                moment2: bucket.moment2,
                gradient,
            });
        }
        move_corrections(model);
    }

    /// All weights to all of their holders.
    pub(crate) fn spread(&self, model: &mut Model, links: &mut Links) {
        let weights = self.places.shared(&model.buffers.buckets, |bucket| bucket.weight);
        links.all_gather(&mut model.device, &weights);
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
