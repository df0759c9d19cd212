//! Buckets as memory: their sizes, and what of them a rank has whole.

use crate::buckets::BucketKind;
use crate::layout::BLOCK;
use crate::model::{ModelConfig, numel};
use crate::owners::Holders;
use crate::zero::{Turn, Zero};
use std::collections::BTreeMap;

/// A bucket's size and what it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketShape {
    /// Elements, a multiple of 4,096, and those of them that the rank owns.
    pub len: u64,
    pub owned: u64,
    /// Vectors, which are kept whole, rather than matrices.
    pub vectors: bool,
    /// Where it takes turns to be whole, if the gradients do, or the weights.
    pub gradient_turn: Option<Turn>,
    pub weight_turn: Option<Turn>,
}

impl BucketShape {
    /// Elements of its gradient that the rank has at all times, and of its weights.
    pub fn gradients(&self) -> u64 {
        if self.gradient_turn.is_some() { self.owned } else { self.len }
    }

    pub fn weights(&self) -> u64 {
        if self.weight_turn.is_some() { self.owned } else { self.len }
    }

    /// Weights alone, all of them.
    pub(super) fn measuring(&mut self) {
        (self.owned, self.gradient_turn, self.weight_turn) = (0, None, None);
    }
}

/// Those that `rank` holds, as [`Buckets`](crate::buckets::Buckets) has them.
pub(super) fn of(
    model: &ModelConfig,
    holders: &Holders,
    rank: u32,
    zero: Zero,
) -> Vec<BucketShape> {
    let mut shapes: Vec<(BucketShape, u64)> = Vec::new();
    let mut known: BTreeMap<(BucketKind, usize), usize> = BTreeMap::new();
    let held: Vec<_> = holders.sets().iter().map(|set| set.binary_search(&rank).is_ok()).collect();
    model.each_param(|name, shape, role| {
        let set = holders.set(role);
        if !held[set] {
            return;
        }
        let kind = BucketKind::of(model, name, role);
        let at = *known.entry((kind, set)).or_insert_with(|| {
            let (vectors, count) = (kind.is_of_vectors(), holders.sets()[set].len());
            let turn = Turn::of(kind, count);
            let gradient_turn = turn.filter(|_| zero.divides_gradients());
            let weight_turn = turn.filter(|_| zero.divides_weights());
            let (len, owned) = (0, 0);
            let shape = BucketShape { len, owned, vectors, gradient_turn, weight_turn };
            shapes.push((shape, count as u64));
            shapes.len() - 1
        });
        shapes[at].0.len += numel(shape).next_multiple_of(BLOCK);
    });
    let closed = |(shape, count): (BucketShape, u64)| {
        let len = shape.len.next_multiple_of(BLOCK * count);
        BucketShape { len, owned: len / count, ..shape }
    };
    shapes.into_iter().map(closed).collect()
}
