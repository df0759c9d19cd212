//! Buckets: what is owned, reduced, gathered and updated in one go.
//!
//! ```text
//! embedding | layer 0 dense | vectors | layer 0 experts of one set of holders | .. | head
//!
//! a bucket:  [tensor .. pad][tensor .. pad] .. [pad]      each tensor from a multiple of 4,096
//!            |  chunk 0  |  chunk 1  | .. |  chunk H-1 |  the r-th holder owns the r-th chunk
//! ```
//! So one reduce-scatter and one all-gather a bucket move everything, with equal chunks, as the
//! collectives of ZeRO (Rajbhandari et al. 2020) want them. A chunk is a whole number of blocks, so
//! statistics of blocks and the order of their sums do not depend on how many holders there are.
//! A tied head is the embedding: its gradient belongs to that bucket.

use crate::layout::BLOCK;
use crate::model::{MATRICES, ModelConfig, Param, Role, Visitor, numel};
use crate::owners::Holders;
use std::collections::BTreeMap;
use std::fmt::Arguments;
use std::ops::Range;
use std::sync::Arc;

/// What the tensors of a bucket are.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum BucketKind {
    Embedding,
    /// The matrices of a layer that every rank holds: attention, shared experts.
    Dense { layer: u32 },
    /// Experts of a layer with the same holders, by id.
    Experts { layer: u32 },
    /// The head, where it is not tied.
    Head,
    /// Gains, biases and routers of all layers: small, and kept in fp32 whatever the precision.
    Vectors,
}

impl BucketKind {
    pub fn is_of_vectors(self) -> bool {
        self == BucketKind::Vectors
    }
}

/// One tensor in its bucket.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSpan {
    /// In the parameter table.
    pub index: usize,
    /// First element in the bucket, a multiple of 4,096.
    pub start: u64,
    /// Elements, without what pads them.
    pub len: u64,
}

/// A part of a tensor that one rank owns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct OwnedRun {
    /// In the parameter table.
    pub index: usize,
    /// Of the flattened tensor.
    pub elements: Range<u64>,
    /// First element in the owner's chunk.
    pub start: u64,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bucket {
    pub kind: BucketKind,
    /// Ascending; the r-th owns the r-th chunk. Shared by all buckets with these holders.
    pub holders: Arc<[u32]>,
    /// Ascending by index and by place.
    pub spans: Vec<BucketSpan>,
    /// Elements in all, a multiple of holders times 4,096.
    pub len: u64,
}

impl Bucket {
    fn new(kind: BucketKind, holders: Arc<[u32]>) -> Bucket {
        Bucket { kind, holders, spans: Vec::new(), len: 0 }
    }

    fn push(&mut self, index: usize, len: u64) {
        self.spans.push(BucketSpan { index, start: self.len, len });
        self.len += len.next_multiple_of(BLOCK);
    }

    fn close(&mut self) {
        self.len = self.size().closed();
    }

    /// The bucket without its tensors.
    pub fn size(&self) -> BucketSize<'_> {
        BucketSize { kind: self.kind, holders: &self.holders, len: self.len }
    }

    /// Elements of each holder's chunk.
    pub fn chunk_len(&self) -> u64 {
        self.size().chunk_len()
    }

    /// The chunk that `rank` owns; none: it does not hold the bucket.
    pub fn chunk(&self, rank: u32) -> Option<Range<u64>> {
        let at = self.holders.binary_search(&rank).ok()? as u64;
        let len = self.chunk_len();
        Some(at * len..(at + 1) * len)
    }

    /// The tensors' parts in the chunk of `rank`, in order; what pads is nobody's.
    pub fn owned(&self, rank: u32) -> impl Iterator<Item = OwnedRun> + '_ {
        let chunk = self.chunk(rank).unwrap_or(0..0);
        // The first tensor that ends behind the chunk's start.
        let first = self.spans.partition_point(|span| span.start + span.len <= chunk.start);
        let inside = self.spans[first..].iter();
        inside.take_while(move |span| span.start < chunk.end).filter_map(move |span| {
            let start = chunk.start.max(span.start);
            let end = chunk.end.min(span.start + span.len);
            (start < end).then(|| OwnedRun {
                index: span.index,
                elements: start - span.start..end - span.start,
                start: start - chunk.start,
            })
        })
    }

    pub fn span(&self, index: usize) -> Option<BucketSpan> {
        let at = self.spans.binary_search_by_key(&index, |span| span.index).ok()?;
        Some(self.spans[at])
    }

    /// Elements from a matrix of an expert to the same one of the next expert of the bucket. All
    /// experts of a layer have the same shapes.
    pub fn expert_stride(&self, matrices: usize) -> Option<u64> {
        let BucketKind::Experts { .. } = self.kind else { return None };
        let next = self.spans.get(matrices).map_or(self.spans.last()?, |span| span);
        match self.spans.len() > matrices {
            true => Some(next.start - self.spans[0].start),
            // A single expert has no next one.
            false => Some(next.start + next.len.next_multiple_of(BLOCK)),
        }
    }
}

/// A bucket without its tensors: what is to be known of it where a whole gang is planned.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketSize<'a> {
    pub kind: BucketKind,
    /// Ascending.
    pub holders: &'a [u32],
    /// Elements in all.
    pub len: u64,
}

impl BucketSize<'_> {
    /// Elements of each holder's chunk.
    pub fn chunk_len(&self) -> u64 {
        self.len / self.holders.len().max(1) as u64
    }

    /// Elements with what pads the end, so that each holder has a chunk of whole blocks.
    fn closed(&self) -> u64 {
        self.len.next_multiple_of(BLOCK * self.holders.len().max(1) as u64)
    }
}

/// Whether most elements lie in buckets that several ranks hold. These then travel beside the ops
/// of a step: for fewer, a lane of its own costs more than it gains.
pub fn mostly_shared<'a>(all: impl IntoIterator<Item = BucketSize<'a>>) -> bool {
    let [mut alone, mut shared] = [0; 2];
    for size in all {
        let sum = if size.holders.len() > 1 { &mut shared } else { &mut alone };
        *sum += size.len;
    }
    shared > alone
}

/// The sizes of all buckets, in the order of [`Buckets`]: counted by runs of experts with the same
/// holders, in the memory of as many sizes.
pub fn sizes<'a>(model: &ModelConfig, holders: &'a Holders) -> Vec<BucketSize<'a>> {
    let mut sizes = Sizes { model, holders, all: Vec::new(), known: BTreeMap::new() };
    model.walk(&mut sizes);
    sizes.all.iter_mut().for_each(|size| size.len = size.closed());
    sizes.all
}

struct Sizes<'a, 'm> {
    model: &'m ModelConfig,
    holders: &'a Holders,
    all: Vec<BucketSize<'a>>,
    /// By kind and set of holders.
    known: BTreeMap<(BucketKind, usize), usize>,
}

impl Sizes<'_, '_> {
    /// So many tensors of one size.
    fn add(&mut self, kind: BucketKind, set: usize, numel: u64, count: u64) {
        let all = &mut self.all;
        let at = *self.known.entry((kind, set)).or_insert_with(|| {
            all.push(BucketSize { kind, holders: &self.holders.sets()[set], len: 0 });
            all.len() - 1
        });
        all[at].len += count * numel.next_multiple_of(BLOCK);
    }
}

impl Visitor for Sizes<'_, '_> {
    fn param(&mut self, name: Arguments<'_>, shape: &[u32], role: Role) {
        let kind = BucketKind::of(self.model, name, role);
        self.add(kind, self.holders.set(role), numel(shape), 1);
    }

    fn experts(&mut self, model: &ModelConfig, layer: u32) {
        let numel = numel(&[model.slices().width, model.hidden_size]);
        for run in self.holders.row(layer).chunk_by(|one, other| one == other) {
            let count = run.len() as u64 * u64::from(MATRICES);
            self.add(BucketKind::Experts { layer }, run[0], numel, count);
        }
    }
}

/// The buckets of a model in the order of the parameter table: that of their first tensors.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Buckets {
    pub buckets: Vec<Bucket>,
    /// By parameter: its bucket.
    of: Vec<usize>,
}

impl Buckets {
    /// `params` is the table of `model`.
    pub fn new(model: &ModelConfig, params: &[Param], holders: &Holders) -> Buckets {
        debug_assert_eq!(params.first().map(|param| &param.name[..]), Some(EMBEDDING));
        let mut buckets: Vec<Bucket> = Vec::new();
        let mut known: BTreeMap<(BucketKind, usize), usize> = BTreeMap::new();
        let mut of = Vec::with_capacity(params.len());
        for (index, param) in params.iter().enumerate() {
            let kind = BucketKind::of(model, format_args!("{}", param.name), param.role);
            let set = holders.set(param.role);
            let at = *known.entry((kind, set)).or_insert_with(|| {
                buckets.push(Bucket::new(kind, holders.sets()[set].clone()));
                buckets.len() - 1
            });
            buckets[at].push(index, param.numel());
            of.push(at);
        }
        buckets.iter_mut().for_each(Bucket::close);
        Buckets { buckets, of }
    }

    /// The bucket of the parameter at `index`, by its place among all.
    pub fn of(&self, index: usize) -> usize {
        self.of[index]
    }

    /// Those that `rank` holds, in order.
    pub fn held(&self, rank: u32) -> impl Iterator<Item = &Bucket> {
        self.buckets.iter().filter(move |bucket| bucket.holders.binary_search(&rank).is_ok())
    }

    /// Elements that `rank` holds, and those that it owns; both with what pads them.
    pub fn elements(&self, rank: u32) -> (u64, u64) {
        let of = |sum: (u64, u64), bucket: &Bucket| {
            (sum.0 + bucket.len, sum.1 + bucket.chunk_len())
        };
        self.held(rank).fold((0, 0), of)
    }
}

const EMBEDDING: &str = "model.embed_tokens.weight";

impl BucketKind {
    /// Of the parameter of that name and role.
    fn of(model: &ModelConfig, name: Arguments<'_>, role: Role) -> BucketKind {
        match role {
            Role::Expert { layer, .. } => return BucketKind::Experts { layer },
            Role::Matrix => {}
            _ => return BucketKind::Vectors,
        }
        let name = name.to_string();
        if name == EMBEDDING {
            return BucketKind::Embedding;
        }
        let rest = name.strip_prefix("model.layers.");
        let layer = rest.and_then(|rest| rest.split('.').next()?.parse().ok());
        match layer {
            Some(layer) if layer < model.num_hidden_layers => BucketKind::Dense { layer },
            _ => BucketKind::Head,
        }
    }
}
