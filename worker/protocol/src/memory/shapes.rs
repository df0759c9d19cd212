//! Buckets as memory: their sizes, and what of them a rank has whole.

use crate::buckets::{BucketKind, BucketSize, sizes};
use crate::model::ModelConfig;
use crate::owners::Holders;
use crate::zero::{Turn, Zero};

/// A bucket's size and what it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct BucketShape {
    /// Elements, a multiple of 4,096, and those of them that the rank owns.
    pub len: u64,
    pub owned: u64,
    /// Vectors, which are kept whole, rather than matrices.
    pub vectors: bool,
    /// Of experts.
    pub experts: bool,
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
    let of = |size: BucketSize<'_>| {
        let turn = Turn::of(size.kind, size.holders.len());
        BucketShape {
            len: size.len,
            owned: size.chunk_len(),
            vectors: size.kind.is_of_vectors(),
            experts: matches!(size.kind, BucketKind::Experts { .. }),
            gradient_turn: turn.filter(|_| zero.divides_gradients()),
            weight_turn: turn.filter(|_| zero.divides_weights()),
        }
    };
    let held = |size: &BucketSize<'_>| size.holders.binary_search(&rank).is_ok();
    sizes(model, holders).into_iter().filter(held).map(of).collect()
}
