//! Where each parameter lies in the buckets that a rank holds, and which ranks share them.

use crate::engine::beside;
use crate::engine::handles::{ExpertStacks, is_frozen};
use crate::engine::links::Shared;
use crate::engine::model::Model;
use crate::engine::numbers::class_of;
use crate::engine::zero::MARKS;
use crate::state::rank::name_hash;
use moejob_kernels::{BucketBlock, Buffer, Stacked};
use moejob_protocol::buckets::{Bucket, BucketKind, Buckets, mostly_shared};
use moejob_protocol::buffers::Bucket as Memory;
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
    len: usize,
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
            let (holders, len) = (bucket.holders.clone(), bucket.len as usize);
            SharedBucket { holders, len, held, convoy }
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

    /// Where its gradient is summed likewise.
    pub fn gradient(&self, memory: &[Memory<Buffer>], index: usize) -> Option<Buffer> {
        let (at, start, len) = self.place(index)?;
        let whole = self.shapes[at].gradient_turn.is_none();
        whole.then(|| summed(&memory[at]).slice(start, len))
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
            let all = part(&memory[at]);
            let from = |start: u64, gap: u64| {
                let (start, gap) = (start as usize, gap as usize);
                Stacked { buffer: all.slice(start, all.len() - start), stride, gap }
            };
            let gap = up.start - (gate.start + gate.len);
            Some(ExpertStacks { up: from(gate.start, gap), down: from(down.start, 0) })
        };
        (0..layers).map(of_layer).collect()
    }

    /// Whole weights of all buckets that several ranks hold: of one convoy, or of all.
    pub(super) fn weights(
        &self,
        convoy: Option<usize>,
        memory: &[Memory<Buffer>],
    ) -> Vec<Shared<'_>> {
        self.shared(convoy, |at| self.shapes[at].weight_turn, |at| memory[at].weight)
    }

    /// Their gradients.
    pub(super) fn gradients(
        &self,
        convoy: Option<usize>,
        memory: &[Memory<Buffer>],
    ) -> Vec<Shared<'_>> {
        self.shared(convoy, |at| self.shapes[at].gradient_turn, |at| summed(&memory[at]))
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
        let of = |shared: &'_ SharedBucket| shared.held.map(&part);
        let of = all.map(|shared| (shared, of(shared)));
        of.map(|(SharedBucket { holders, len, .. }, buffer)| Shared { holders, len: *len, buffer })
            .collect()
    }

    /// The held buckets of a convoy.
    pub(super) fn of_convoy(&self, convoy: usize) -> impl Iterator<Item = usize> + '_ {
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
    pub(super) fn own_of(&self, at: usize, buffer: Buffer) -> Buffer {
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

/// Where the gradients of a step are summed.
pub(super) fn summed(bucket: &Memory<Buffer>) -> Buffer {
    bucket.sum.unwrap_or(bucket.gradient)
}
