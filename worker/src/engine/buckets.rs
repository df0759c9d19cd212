//! Parameters, gradients and moments in buckets, as a GPU computes with them.
//!
//! ```text
//! backward -> the bucket's gradient: a step's first micro-batch writes, others add
//!   -> reduce-scatter: each holder has the sum of its chunk
//!   -> GradientNumbers a chunk -> StepNumbers, summed over ranks -> DecideUpdate -> BucketAdamW
//!   -> all-gather: each holder has all weights
//! ```
//! Everything is decided on the device: the host enqueues the same ops in every step, and every
//! rank the same collectives in the same order. Buckets travel in convoys beside other ops
//! (`beside.rs`), or all at once between the parts of a step where links do nothing beside.

use crate::engine::backward::Leaf;
use crate::engine::beside;
use crate::engine::handles::{Dense, ExpertStacks, is_frozen};
use crate::engine::links::{Links, Shared};
use crate::engine::model::Model;
use crate::engine::numbers::class_of;
use crate::engine::round::Round;
use crate::engine::zero::MARKS;
use crate::state::rank::name_hash;
use moejob_kernels::cuda::Stacked;
use moejob_kernels::{
    BucketAdamW, BucketBlock, Buffer, Fill, GradientNumbers, Master, MoveCorrections, StepPhase,
};
use moejob_protocol::buckets::{Bucket, BucketKind, Buckets, mostly_shared};
use moejob_protocol::buffers::Bucket as Memory;
use moejob_protocol::config::AdamW as AdamWConfig;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::BucketShape;
use moejob_protocol::model::{ModelConfig, Param};
use moejob_protocol::owners::Holders;
use moejob_protocol::zero::Turn;
use std::ops::Range;
use std::sync::Arc;

/// Matrices of an expert: gate, up, down.
const MATRICES: usize = 3;

/// Where each parameter that the rank holds lies in its buckets.
#[derive(Clone, Debug)]
pub(crate) struct Places {
    /// Those that are held, in the order of their memory.
    pub(super) buckets: Vec<Bucket>,
    /// Of each, the elements that this rank owns.
    chunks: Vec<Range<usize>>,
    /// By parameter: bucket, first element and how many; none: not held.
    spans: Vec<Option<(usize, usize, usize)>>,
    /// By held bucket: its convoy.
    convoys: Vec<usize>,
    /// How many convoys there are.
    convoy_count: usize,
    /// By held bucket: its memory.
    pub(super) shapes: Vec<BucketShape>,
    /// All buckets that several ranks hold, in their order.
    shared: Vec<SharedBucket>,
    mostly_shared: bool,
}

/// A bucket that several ranks hold, maybe others alone.
#[derive(Clone, Debug)]
struct SharedBucket {
    holders: Arc<[u32]>,
    /// Which of the held ones it is.
    held: Option<usize>,
    convoy: usize,
}

impl Places {
    /// `shapes` are those of the buckets that `rank` holds.
    pub fn new(
        model: &ModelConfig,
        params: &[Param],
        layout: &Layout,
        rank: u32,
        shapes: &[BucketShape],
    ) -> Places {
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
        let layers = model.num_hidden_layers;
        let of = |bucket: &Bucket| {
            let held = bucket.holders.binary_search(&rank).is_ok();
            let held = if held { next.next() } else { None };
            let convoy = beside::convoy_of(bucket.kind, layers);
            SharedBucket { holders: bucket.holders.clone(), held, convoy }
        };
        let shared = all.buckets.iter().map(of);
        let shared = shared.filter(|shared| shared.holders.len() > 1).collect();
        let convoys = buckets.iter().map(|bucket| beside::convoy_of(bucket.kind, layers)).collect();
        let convoy_count = beside::count(layers);
        assert_eq!(buckets.len(), shapes.len(), "as many as there is memory for");
        // What takes turns travels in every round.
        let turns = shapes.iter().any(|of| of.gradient_turn.is_some());
        let mostly_shared = turns || mostly_shared(all.buckets.iter().map(Bucket::size));
        let shapes = shapes.to_vec();
        Places { buckets, chunks, spans, convoys, convoy_count, shapes, shared, mostly_shared }
    }

    /// The elements of the held bucket `at` that this rank owns.
    pub fn chunk(&self, at: usize) -> Range<usize> {
        self.chunks[at].clone()
    }

    /// The whole weights of the parameter at `index`; none: they are elsewhere, or take turns.
    pub fn weight(&self, memory: &[Memory<Buffer>], index: usize) -> Option<Buffer> {
        let (at, start, len) = self.place(index)?;
        let whole = self.shapes[at].weight_turn.is_none();
        whole.then(|| memory[at].weight.slice(start, len))
    }

    /// Its gradient likewise.
    pub fn gradient(&self, memory: &[Memory<Buffer>], index: usize) -> Option<Buffer> {
        let (at, start, len) = self.place(index)?;
        let whole = self.shapes[at].gradient_turn.is_none();
        whole.then(|| memory[at].gradient.slice(start, len))
    }

    /// Whether this rank has but its own chunk of the weights of the held bucket `at`.
    pub fn divides_weights(&self, at: usize) -> bool {
        self.shapes[at].weight_turn.is_some()
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

    /// Whole weights of all buckets that several ranks hold: of one convoy, or of all.
    fn weights(&self, convoy: Option<usize>, memory: &[Memory<Buffer>]) -> Vec<Shared<'_>> {
        self.shared(convoy, |at| self.shapes[at].weight_turn, |at| memory[at].weight)
    }

    /// Their gradients.
    fn gradients(&self, convoy: Option<usize>, memory: &[Memory<Buffer>]) -> Vec<Shared<'_>> {
        self.shared(convoy, |at| self.shapes[at].gradient_turn, |at| memory[at].gradient)
    }

    /// Those that take no turns. All ranks hold what takes turns, so it is left out by all.
    fn shared(
        &self,
        convoy: Option<usize>,
        turn: impl Fn(usize) -> Option<Turn>,
        part: impl Fn(usize) -> Buffer,
    ) -> Vec<Shared<'_>> {
        let all = self.shared.iter();
        let all = all.filter(|shared| convoy.is_none_or(|convoy| convoy == shared.convoy));
        let all = all.filter(|shared| shared.held.and_then(&turn).is_none());
        let of = |shared: &SharedBucket| shared.held.map(&part);
        all.map(|shared| Shared { holders: &shared.holders, buffer: of(shared) }).collect()
    }

    /// The held buckets of a convoy.
    fn of_convoy(&self, convoy: usize) -> impl Iterator<Item = usize> + '_ {
        (0..self.buckets.len()).filter(move |at| self.convoys[*at] == convoy)
    }

    /// See [`beside::count`].
    pub fn convoy_count(&self) -> usize {
        self.convoy_count
    }

    /// Marks of all that travels beside the ops.
    pub fn mark_count(&self) -> usize {
        self.convoy_count + MARKS
    }

    /// Whether several ranks hold most of the model: the same answer on all.
    pub fn mostly_shared(&self) -> bool {
        self.mostly_shared
    }

    /// The own chunk of the held bucket `at` in a buffer of the whole bucket, or of that alone.
    fn own_of(&self, at: usize, buffer: Buffer) -> Buffer {
        let chunk = self.chunk(at);
        if buffer.len() == chunk.len() { buffer } else { buffer.slice(chunk.start, chunk.len()) }
    }

    /// The sets of ranks that share buckets.
    pub fn groups(&self) -> Vec<Vec<u32>> {
        let mut groups: Vec<Vec<u32>> = Vec::new();
        for SharedBucket { holders, .. } in &self.shared {
            if !groups.iter().any(|group| group[..] == holders[..]) {
                groups.push(holders.to_vec());
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
    /// Gradients of dense matrices take turns to be whole.
    takes_turns: bool,
}

impl BucketSums {
    pub(crate) fn new(model: &Model, places: &Places) -> BucketSums {
        let memory = &model.buffers.buckets;
        let gradient = |bucket: &Memory<Buffer>| bucket.gradient;
        let find = |index| places.gradient_in(&model.buffers, index);
        BucketSums {
            dense: Dense::new(&model.config, &model.params, &find),
            stacks: places.stacks(model.config.num_hidden_layers, memory, gradient),
            places: places.clone(),
            begun: false,
            begun_experts: false,
            takes_turns: places.shapes.iter().any(|of| of.gradient_turn.is_some()),
        }
    }

    pub(crate) fn leaf(&self, round: &Round) -> Leaf<'_> {
        Leaf {
            dense: (round.tokens > 0).then_some(&self.dense),
            experts: Vec::new(),
            stacks: &self.stacks,
            accumulate: self.begun,
            accumulate_matrices: self.begun && !self.takes_turns,
            accumulate_experts: self.begun_experts,
            last: None,
        }
    }

    /// The same in a step's last round, where buckets travel as soon as they are complete.
    pub(crate) fn last_leaf(&self, round: &Round) -> Leaf<'_> {
        let own = self.begun || round.tokens > 0;
        let experts = self.begun_experts || !round.sources.is_empty();
        Leaf { last: Some(Last { sums: self, own, experts }), ..self.leaf(round) }
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
        for convoy in 0..self.places.convoy_count() {
            self.fill_unwritten(convoy, self.begun, self.begun_experts, model);
        }
        let memory = &model.buffers.buckets;
        let gradients = self.places.gradients(None, memory);
        links.reduce_scatter(&mut model.device, &gradients);
    }

    /// Zeros in gradients of a convoy in which this rank has written nothing: `own` says whether it
    /// had a micro-batch, `experts` whether its experts had tokens of anybody.
    fn fill_unwritten(&self, convoy: usize, own: bool, experts: bool, model: &mut Model) {
        for at in self.places.of_convoy(convoy) {
            let of_experts = matches!(self.places.buckets[at].kind, BucketKind::Experts { .. });
            if self.places.shapes[at].gradient_turn.is_some() {
                continue;
            }
            if !if of_experts { experts } else { own } {
                model.device.fill_zero(model.buffers.buckets[at].gradient);
            }
        }
    }

    /// Makes a gradient no finite number.
    pub(crate) fn spoil(&self, model: &mut Model) {
        let value = f64::NAN;
        model.device.await_marks();
        model.device.fill(&Fill { value, x: self.dense.norm.slice(0, 1) });
    }

    /// Squared norm and counts of what is not finite, of what is owned, into the step's numbers.
    pub(crate) fn measure(&self, model: &mut Model) {
        let (numbers, layout) = (model.buffers.numbers.clone(), model.numbers.layout());
        // In the order in which they were reduced: the last ones travel meanwhile.
        for convoy in (0..self.places.convoy_count()).rev() {
            model.device.await_mark(convoy, StepPhase::Numbers);
            for at in self.places.of_convoy(convoy) {
                model.settle_bucket(self.places.buckets[at].kind);
                let bucket = model.buffers.buckets[at].clone();
                model.device.gradient_numbers(&GradientNumbers {
                    layout,
                    table: bucket.table,
                    params: numbers.params,
                    gradient: self.places.own_of(at, bucket.gradient),
                    sums: bucket.square_sums,
                    numbers: numbers.reduced,
                });
            }
        }
    }

    /// Updates what is owned as was decided, or nothing. Where links work beside, new weights leave
    /// at once, a convoy beside the update of the next.
    pub(crate) fn update(&self, model: &mut Model, links: &mut Links, config: &AdamWConfig) {
        // Nothing of the weights is under way from the last step.
        model.device.await_marks();
        model.forget_whole();
        // Before they leave: what arrives from its owner must not undo the own move, nor miss his.
        move_corrections(model);
        for convoy in 0..self.places.convoy_count() {
            for at in self.places.of_convoy(convoy) {
                self.update_bucket(at, model, config);
            }
            if links.work_beside() {
                let weights = self.places.weights(Some(convoy), &model.buffers.buckets);
                links.all_gather_beside(&mut model.device, &weights, convoy);
                if convoy == beside::FIRST {
                    model.gather_first(links);
                }
            }
        }
    }

    fn update_bucket(&self, at: usize, model: &mut Model, config: &AdamWConfig) {
        let (numbers, bucket) = (&model.buffers.numbers, model.buffers.buckets[at].clone());
        let (params, control) = (numbers.params, numbers.control);
        model.device.bucket_adamw(&BucketAdamW {
            beta1: config.beta1,
            beta2: config.beta2,
            eps: config.epsilon,
            table: bucket.table,
            params,
            control,
            weight: self.places.own_of(at, bucket.weight),
            master: master(&bucket),
            moment1: bucket.moment1,
            moment2: bucket.moment2,
            gradient: self.places.own_of(at, bucket.gradient),
        });
    }

    /// All weights to all of their holders, where they have not left already.
    pub(crate) fn spread(&self, model: &mut Model, links: &mut Links) {
        if !links.work_beside() {
            let weights = self.places.weights(None, &model.buffers.buckets);
            links.all_gather(&mut model.device, &weights);
        }
    }
}

/// The sums of a step in its last round: which of them this rank has written, `own` of what it
/// computes for its own tokens, `experts` of its experts.
#[derive(Clone, Copy, Debug)]
pub struct Last<'a> {
    sums: &'a BucketSums,
    own: bool,
    experts: bool,
}

impl Last<'_> {
    /// Nothing writes to the gradients of `convoy` any more in this step: their sums over ranks
    /// begin beside what follows.
    pub(crate) fn reduce(&self, convoy: usize, model: &mut Model, links: &mut Links) {
        let places = &self.sums.places;
        self.sums.fill_unwritten(convoy, self.own, self.experts, model);
        let gradients = places.gradients(Some(convoy), &model.buffers.buckets);
        links.reduce_scatter_beside(&mut model.device, &gradients, convoy);
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
