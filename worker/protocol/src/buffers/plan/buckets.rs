//! Buckets, and the places in which some of them take turns.

use super::super::{BLOCK_WORDS, Bucket, Whole};
use crate::layout::BLOCK;
use crate::memory::{
    BucketShape, Kind, Masters, OFFLOADED_MASTERS, OFFLOADED_MOMENTS, Planner, Rows, Shape,
};
use crate::zero::{PLACES, Turn};

impl<B: Copy> Bucket<B> {
    pub(super) fn plan(
        shape: &Shape,
        of: &BucketShape,
        planner: &mut impl Planner<Buffer = B>,
    ) -> Bucket<B> {
        let types = &shape.types;
        let (weight, master, gradient) = match (of.vectors, types.masters) {
            (true, _) => (types.vector, None, types.vector),
            (_, Masters::Weights) => (types.element, None, types.gradient),
            (_, Masters::LowBits) => (types.element, Some(Kind::I16), types.gradient),
            (_, Masters::Separate) => (types.element, Some(Kind::F32), types.gradient),
        };
        let gradients = if shape.trains { of.gradients() } else { 0 };
        let sum = (types.exact && shape.trains).then_some(gradients);
        // The products of experts go to the sum at once.
        let gradients = if sum.is_some() && of.experts { of.owned } else { gradients };
        let blocks = of.owned / BLOCK;
        let mut part = |name, kind, len| match name {
            OFFLOADED_MASTERS | OFFLOADED_MOMENTS => planner.alloc_on_host(name, kind, len),
            name => {
                planner.part(name);
                planner.alloc(kind, Rows::Fixed(len), 1)
            }
        };
        // What nothing but the update of a step reads and writes.
        let (masters, moments) = match shape.offloads {
            true => (OFFLOADED_MASTERS, OFFLOADED_MOMENTS),
            false => ("masters", "moments"),
        };
        Bucket {
            weight: part("weights", weight, of.weights()),
            master: master.filter(|_| shape.trains).map(|kind| part(masters, kind, of.owned)),
            moment1: part(moments, types.moment, of.owned),
            moment2: part(moments, types.moment, of.owned),
            gradient: part("gradients", gradient, gradients),
            sum: sum.map(|len| part("gradients", types.sum(), len)),
            table: part("numbers", Kind::U32, blocks * BLOCK_WORDS),
            square_sums: part("numbers", Kind::F64, blocks),
        }
    }
}

impl<B: Copy> Whole<B> {
    pub(super) fn plan(shape: &Shape, planner: &mut impl Planner<Buffer = B>) -> Whole<B> {
        let types = &shape.types;
        let mut places = |name, kind, turn: fn(&BucketShape) -> Option<Turn>| -> Vec<B> {
            let lens = place_lens(&shape.buckets, turn);
            if lens.is_empty() {
                return Vec::new();
            }
            planner.part(name);
            let of = |len: &u64| planner.alloc(kind, Rows::Fixed(*len), 1);
            lens.iter().map(of).collect()
        };
        Whole {
            weights: places(WHOLE_WEIGHTS, types.element, |of| of.weight_turn),
            gradients: places(WHOLE_GRADIENTS, types.gradient, |of| of.gradient_turn),
            sums: match types.exact {
                true => places(WHOLE_GRADIENTS, types.sum(), |of| of.gradient_turn),
                false => Vec::new(),
            },
        }
    }
}

/// Parts of a rank's memory.
const WHOLE_WEIGHTS: &str = "whole weights, in turn";
const WHOLE_GRADIENTS: &str = "whole gradients, in turn";

/// Elements of each place: that of the ends, then of layers, as many as take turns there.
fn place_lens(buckets: &[BucketShape], turn: fn(&BucketShape) -> Option<Turn>) -> Vec<u64> {
    let of = |wanted| {
        let buckets = buckets.iter().filter(move |bucket| turn(bucket) == Some(wanted));
        buckets.map(|bucket| bucket.len)
    };
    let Some(ends) = of(Turn::Ends).max() else { return Vec::new() };
    let layers = of(Turn::Layers).max().unwrap_or(0);
    let count = of(Turn::Layers).count().min(PLACES - 1);
    std::iter::once(ends).chain(std::iter::repeat_n(layers, count)).collect()
}
