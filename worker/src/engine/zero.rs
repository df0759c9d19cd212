//! Dense buckets that lie with their owners alone, and are whole in turn: ZeRO-2 and 3.
//!
//! ```text
//! weights    want(l): gather l unless it is whole -> await -> handles of l; l + 1 leaves
//! gradients  claim(l) -> backward of l writes -> shed(l): reduce-scatter in its place
//!            (exact sums: in fp64, in a place of their own)
//!            -> settle, before the place is claimed again: own chunk = or += the own sum
//! ```
//! Which place a bucket gets and what leaves ahead stands in the protocol (`zero.rs`), as a
//! function of the order in which buckets are wanted. Every rank wants and sheds all buckets of a
//! round in that order, with or without a micro-batch.

use crate::engine::backward::Leaf;
use crate::engine::forward::Pass;
use crate::engine::handles::DenseLayer;
use crate::engine::links::{Links, Shared};
use crate::engine::model::Model;
use crate::engine::places::{Places, summed};
use crate::engine::round::Aim;
use moejob_kernels::{Add, AddUp, Buffer, StepPhase};
use moejob_protocol::buckets::{Bucket, BucketKind};
use moejob_protocol::buffers::{Bucket as Memory, Buffers};
use moejob_protocol::memory::Shape;
use moejob_protocol::zero::{self, PLACES, Turn, Turns, place_of_gradient};
use std::collections::{BTreeMap, BTreeSet, VecDeque};
use std::ops::Range;
use std::sync::Arc;

/// What takes turns at this rank, and whose turn it is.
#[derive(Debug)]
pub(crate) struct Turning {
    /// Not gradients alone.
    weights: bool,
    buckets: BTreeMap<BucketKind, Turned>,
    /// Weights of layers in the first place for them, and in the second.
    layers: [Vec<DenseLayer>; 2],
    turns: Turns,
    /// Whose weights the pass is still to want, in this order.
    ahead: VecDeque<BucketKind>,
    /// Behind this round of the step there is another one.
    another: bool,
    /// By place of gradients: the bucket whose sum is there, or on its way.
    sums: [Option<BucketKind>; PLACES],
    /// Those whose own chunk has sums of this step.
    begun: BTreeSet<BucketKind>,
    /// Number of the first mark.
    marks: usize,
}

/// Marks of what takes turns: of weights by place, then of gradients.
pub(crate) const MARKS: usize = 2 * PLACES;

/// A bucket that takes turns.
#[derive(Clone, Debug)]
pub(crate) struct Turned {
    /// Which of the held ones it is.
    pub at: usize,
    pub len: usize,
    /// The elements that this rank owns.
    pub own: Range<usize>,
    pub holders: Arc<[u32]>,
}

impl Turned {
    /// Its memory in a place, and the own chunk there.
    fn within(&self, place: Buffer) -> (Buffer, Buffer) {
        (place.slice(0, self.len), place.slice(self.own.start, self.own.len()))
    }
}

impl Turning {
    /// `layers` gives handles with each layer in that place. None: nothing takes turns.
    pub fn new(
        places: &Places,
        shape: &Shape,
        layers: impl Fn(usize) -> Vec<DenseLayer>,
    ) -> Option<Turning> {
        let buckets = places.turned();
        let weights = shape.buckets.iter().any(|of| of.weight_turn.is_some());
        (!buckets.is_empty()).then(|| Turning {
            weights,
            buckets,
            layers: [1, 2].map(layers),
            turns: Turns::default(),
            ahead: VecDeque::new(),
            another: false,
            sums: [None; PLACES],
            begun: BTreeSet::new(),
            marks: places.convoy_count(),
        })
    }

    fn mark_of_weights(&self, place: usize) -> usize {
        self.marks + place
    }

    fn mark_of_gradients(&self, place: usize) -> usize {
        self.marks + PLACES + place
    }
}

impl Places {
    /// The weights of the parameter at `index` when they are whole: layers in this one of their
    /// places, if they take turns.
    pub fn weight_in(
        &self,
        buffers: &Buffers<Buffer>,
        place: usize,
        index: usize,
    ) -> Option<Buffer> {
        let (at, start, len) = self.place(index)?;
        let places = &buffers.whole.weights;
        let whole = match self.shapes[at].weight_turn {
            None => buffers.buckets[at].weight,
            Some(Turn::Ends) => places[0],
            // A model of one layer has one place for it.
            Some(Turn::Layers) => places[place.min(places.len() - 1)],
        };
        Some(whole.slice(start, len))
    }

    /// Where the gradient of the parameter at `index` is written.
    pub fn gradient_in(&self, buffers: &Buffers<Buffer>, index: usize) -> Option<Buffer> {
        let (at, start, len) = self.place(index)?;
        let whole = match self.shapes[at].gradient_turn {
            None => buffers.buckets[at].gradient,
            Some(_) => buffers.whole.gradients[place_of_gradient(self.buckets[at].kind)],
        };
        Some(whole.slice(start, len))
    }

    /// The held buckets that take turns.
    fn turned(&self) -> BTreeMap<BucketKind, Turned> {
        let of = |(at, bucket): (usize, &Bucket)| {
            let (len, own) = (bucket.len as usize, self.chunk(at));
            (bucket.kind, Turned { at, len, own, holders: bucket.holders.clone() })
        };
        let all = self.buckets.iter().enumerate();
        all.filter(|(at, _)| self.shapes[*at].gradient_turn.is_some()).map(of).collect()
    }

    /// What this rank owns of the weights of the parameter at `index`, and the first element of
    /// that, where they take turns.
    pub fn own_weight(&self, memory: &[Memory<Buffer>], index: usize) -> Option<(usize, Buffer)> {
        let (at, start, len) = self.place(index)?;
        let chunk = self.chunk(at);
        let within = |place: usize| place.clamp(start, start + len);
        let (first, end) = (within(chunk.start), within(chunk.end));
        let own = self.divides_weights(at) && first < end;
        own.then(|| (first - start, memory[at].weight.slice(first - chunk.start, end - first)))
    }
}

impl Model {
    /// A round begins, behind which there is another one of the same step, or not.
    pub(crate) fn begin_round(&mut self, another: bool) {
        if let Some(turning) = &mut self.turning {
            turning.another = another;
        }
    }

    /// A step begins: its gradients have no sums yet.
    pub(crate) fn begin_sums(&mut self) {
        if let Some(turning) = &mut self.turning {
            turning.sums = [None; PLACES];
            turning.begun.clear();
        }
    }

    /// Weights change: what is whole is whole no more.
    pub(crate) fn forget_whole(&mut self) {
        if let Some(turning) = &mut self.turning {
            turning.turns.clear();
        }
    }

    /// What the next forward pass wants first leaves, beside the updates of other buckets.
    pub(crate) fn gather_first(&mut self, links: &mut Links) {
        for kind in [BucketKind::Embedding, BucketKind::Dense { layer: 0 }] {
            self.gather_whole(kind, links);
        }
    }

    /// Whose weights are those of the head.
    /// Where a round writes the gradient of a tied table, and where that is added up exactly.
    pub(crate) fn tied_sum(&self, places: &Places) -> Option<(Buffer, Buffer)> {
        let of = |bucket: &Bucket| bucket.kind == BucketKind::Embedding;
        let at = places.buckets.iter().position(of).filter(|_| self.config.tie_word_embeddings)?;
        let memory = &self.buffers.buckets[at];
        if places.shapes[at].gradient_turn.is_none() {
            return Some((memory.gradient, memory.sum?));
        }
        let (place, whole) = (place_of_gradient(BucketKind::Embedding), &self.buffers.whole);
        let within = |of: &Buffer| of.slice(0, places.buckets[at].len as usize);
        Some((within(&whole.gradients[place]), within(whole.sums.get(place)?)))
    }

    fn head_kind(&self) -> BucketKind {
        zero::head(self.config.tie_word_embeddings)
    }

    /// None where weights are whole at all times.
    fn turning_weights(&mut self) -> Option<&mut Turning> {
        self.turning.as_mut().filter(|turning| turning.weights)
    }

    /// Begins to gather the weights of a bucket, unless it is whole.
    fn gather_whole(&mut self, kind: BucketKind, links: &mut Links) {
        let Some(turning) = self.turning_weights() else { return };
        let Some(place) = turning.turns.take(kind) else { return };
        let (mark, of) = (turning.mark_of_weights(place), turning.buckets[&kind].clone());
        // What was on its way into this place and nobody waited for.
        self.device.await_mark(mark, StepPhase::Communication);
        let (whole, own) = of.within(self.buffers.whole.weights[place]);
        self.device.copy(self.buffers.buckets[of.at].weight, own);
        let (holders, len) = (&of.holders[..], whole.len());
        let all = [Shared { holders, len, buffer: Some(whole) }];
        if links.work_beside() {
            links.all_gather_beside(&mut self.device, &all, mark);
        } else {
            links.all_gather(&mut self.device, &all);
        }
    }

    /// The sum that lies in a place of gradients, if any, goes to where the update reads it.
    fn settle_place(&mut self, place: usize, phase: StepPhase) {
        let Some(turning) = &mut self.turning else { return };
        let Some(kind) = turning.sums[place].take() else { return };
        let first = turning.begun.insert(kind);
        let (mark, of) = (turning.mark_of_gradients(place), turning.buckets[&kind].clone());
        self.device.await_mark(mark, phase);
        if let Some(exact) = self.buffers.whole.sums.get(place) {
            let (_, x) = of.within(*exact);
            let sum = summed(&self.buffers.buckets[of.at]);
            return self.device.add_up(&AddUp { x, sum, adds: !first });
        }
        let (_, sum) = of.within(self.buffers.whole.gradients[place]);
        let own = self.buffers.buckets[of.at].gradient;
        match first {
            true => self.device.copy(sum, own),
            false => self.device.add(&Add { a: own, b: sum }),
        }
    }

    /// The sum of the bucket, if it takes turns, is where the update reads it.
    pub(crate) fn settle_bucket(&mut self, kind: BucketKind) {
        let sums = self.turning.as_ref().map_or([None; PLACES], |turning| turning.sums);
        if let Some(place) = sums.iter().position(|sum| *sum == Some(kind)) {
            self.settle_place(place, StepPhase::Numbers);
        }
    }
}

impl Pass<'_> {
    /// A pass begins that wants weights in this order.
    pub(crate) fn want_forward(&mut self) {
        let (layers, tied) = (self.layer_count(), self.model.config.tie_word_embeddings);
        if let Some(turning) = self.model.turning_weights() {
            turning.ahead = zero::forward(layers, tied).collect();
        }
    }

    /// The same backward.
    pub(crate) fn want_backward(&mut self) {
        let (layers, recompute) = (self.layer_count(), self.model.shape.recompute);
        if let Some(turning) = self.model.turning_weights() {
            let next = turning.another.then_some(BucketKind::Embedding);
            turning.ahead = zero::backward(layers, recompute).chain(next).collect();
        }
    }

    fn layer_count(&self) -> u32 {
        self.model.config.num_hidden_layers
    }

    pub(crate) fn want_embedding(&mut self) {
        self.want(BucketKind::Embedding, StepPhase::Forward);
    }

    pub(crate) fn want_layer(&mut self, layer: usize, phase: StepPhase) {
        self.want(BucketKind::Dense { layer: layer as u32 }, phase);
    }

    pub(crate) fn want_head(&mut self, phase: StepPhase) {
        self.want(self.model.head_kind(), phase);
    }

    /// The ops that follow read the weights of this bucket whole. The next one that is wanted
    /// leaves, if links work beside.
    fn want(&mut self, kind: BucketKind, phase: StepPhase) {
        let Pass { model, links, round, .. } = self;
        // Nobody computes with what follows, and a pass may have been left in its middle.
        if links.has_failed() {
            return;
        }
        let Some(turning) = model.turning_weights() else { return };
        assert_eq!(turning.ahead.pop_front(), Some(kind), "weights are wanted in one order");
        model.gather_whole(kind, links);
        let Some(turning) = model.turning_weights() else { return };
        let place = turning.turns.begin(kind).expect("gathered");
        let next = turning.ahead.iter().find(|next| **next != kind).copied();
        let mark = turning.mark_of_weights(place);
        if let BucketKind::Dense { layer } = kind {
            let layer = layer as usize;
            let here = turning.layers[place - 1][layer].clone();
            model.dense.layers[layer] = here;
        }
        match round.aim {
            // No part of a step, whose phases are timed.
            Aim::Activations => model.device.await_marks(),
            _ => model.device.await_mark(mark, phase),
        }
        if let Some(next) = next.filter(|_| links.work_beside()) {
            model.gather_whole(next, links);
        }
    }

    /// What follows writes gradients of the layer.
    pub(crate) fn claim_layer(&mut self, layer: usize) {
        self.claim(BucketKind::Dense { layer: layer as u32 });
    }

    pub(crate) fn claim_head(&mut self) {
        self.claim(self.model.head_kind());
    }

    /// The embedding's gradient is written behind that of its own head, if it has one.
    pub(crate) fn claim_embedding(&mut self) {
        self.claim(BucketKind::Embedding);
    }

    fn claim(&mut self, kind: BucketKind) {
        self.model.settle_place(place_of_gradient(kind), StepPhase::Backward);
    }

    /// Behind the last op that writes to gradients of what is above `layer` in this round: its sum
    /// over ranks leaves.
    pub(crate) fn shed_above(&mut self, layer: usize, leaf: &Leaf) {
        let above = layer as u32 + 1;
        if above < self.layer_count() {
            self.shed(BucketKind::Dense { layer: above }, leaf);
        } else if !self.model.config.tie_word_embeddings {
            self.shed(BucketKind::Head, leaf);
        }
    }

    /// The same of the lowest layer and the embedding.
    pub(crate) fn shed_lowest(&mut self, leaf: &Leaf) {
        self.shed(BucketKind::Dense { layer: 0 }, leaf);
        self.shed(BucketKind::Embedding, leaf);
    }

    fn shed(&mut self, kind: BucketKind, leaf: &Leaf) {
        let Some(turning) = &self.model.turning else { return };
        let place = place_of_gradient(kind);
        let (mark, of) = (turning.mark_of_gradients(place), turning.buckets[&kind].clone());
        let (whole, _) = of.within(self.model.buffers.whole.gradients[place]);
        // Who computed nothing gives zeros.
        if leaf.dense.is_none() {
            self.claim(kind);
            self.model.device.fill_zero(whole);
        }
        let Pass { model, links, .. } = self;
        let mut leaves = whole;
        if let Some(exact) = model.buffers.whole.sums.get(place) {
            (leaves, _) = of.within(*exact);
            // The head's part of a tied table is there already.
            let adds = kind == BucketKind::Embedding
                && leaf.dense.is_some()
                && leaf.tied.is_some();
            model.device.add_up(&AddUp { x: whole, sum: leaves, adds });
        }
        let (holders, len) = (&of.holders[..], leaves.len());
        let all = [Shared { holders, len, buffer: Some(leaves) }];
        if links.work_beside() {
            links.reduce_scatter_beside(&mut model.device, &all, mark);
        } else {
            links.reduce_scatter(&mut model.device, &all);
        }
        let sums = model.turning.as_mut().map(|turning| &mut turning.sums[place]);
        let before = sums.and_then(|sum| sum.replace(kind));
        assert_eq!(before, None, "a place is claimed before it is written");
    }
}
