//! What of dense buckets lies with its owner alone (ZeRO, Rajbhandari et al. 2020), and which of
//! them is whole where, and when.
//!
//! ```text
//! place 0: embedding | head      places 1, 2: layer 0 | layer 1 | layer 2 | ..
//! forward:   embedding, layer 0 .. layer L - 1, head
//! backward:  layer L - 1 .. layer 0, before each what is computed again
//! ```
//! A bucket that is whole lies in a place. All ranks come to the same buckets in the same order, so
//! what is gathered into which place is a function of that order, here and in the plan.

use crate::buckets::BucketKind;
use crate::config::Recompute;
use serde::{Deserialize, Serialize};

/// The stage: what a rank keeps of its own chunk alone, of what all ranks hold.
#[derive(
    Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize,
)]
#[serde(rename_all = "camelCase")]
pub enum Zero {
    /// 1: masters and moments.
    #[default]
    Optimizer,
    /// 2: gradients, too.
    Gradients,
    /// 3: and weights.
    Weights,
}

impl Zero {
    /// By its number.
    pub fn of(stage: u32) -> Option<Zero> {
        match stage {
            1 => Some(Zero::Optimizer),
            2 => Some(Zero::Gradients),
            3 => Some(Zero::Weights),
            _ => None,
        }
    }

    pub fn stage(self) -> u32 {
        self as u32 + 1
    }

    /// Nothing takes turns.
    pub fn is_first(&self) -> bool {
        *self == Zero::Optimizer
    }

    pub fn divides_gradients(self) -> bool {
        self >= Zero::Gradients
    }

    pub fn divides_weights(self) -> bool {
        self >= Zero::Weights
    }
}

/// Which places a bucket takes turns in.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Turn {
    /// The model's ends.
    Ends,
    Layers,
}

impl Turn {
    /// None: the bucket is whole in every stage, or nobody else holds it.
    pub fn of(kind: BucketKind, holders: usize) -> Option<Turn> {
        let turn = match kind {
            BucketKind::Embedding | BucketKind::Head => Turn::Ends,
            BucketKind::Dense { .. } => Turn::Layers,
            BucketKind::Experts { .. } | BucketKind::Vectors => return None,
        };
        (holders > 1).then_some(turn)
    }
}

/// Places for layers, behind the one for the ends: one that is used, and one for the next.
const OF_LAYERS: usize = 2;
/// Of each kind of what is whole.
pub const PLACES: usize = 1 + OF_LAYERS;

/// Where the gradient of a bucket is written: backward goes down the layers.
pub fn place_of_gradient(kind: BucketKind) -> usize {
    match kind {
        BucketKind::Dense { layer } => 1 + layer as usize % OF_LAYERS,
        _ => 0,
    }
}

/// Which weights are whole.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Turns {
    at: [Option<BucketKind>; PLACES],
    /// The place of the layer that is used.
    used: Option<usize>,
}

impl Turns {
    /// Where the bucket is whole, or will be: it may be on its way.
    pub fn place(&self, kind: BucketKind) -> Option<usize> {
        self.at.iter().position(|at| *at == Some(kind))
    }

    /// The place into which the bucket is to be gathered; none: it is whole already. The layer that
    /// is used stays where it is.
    pub fn take(&mut self, kind: BucketKind) -> Option<usize> {
        if self.place(kind).is_some() {
            return None;
        }
        let place = match kind {
            BucketKind::Dense { .. } => if self.used == Some(1) { 2 } else { 1 },
            _ => 0,
        };
        self.at[place] = Some(kind);
        Some(place)
    }

    /// The bucket is used from now on, in place of the one before; where it is whole.
    pub fn begin(&mut self, kind: BucketKind) -> Option<usize> {
        let place = self.place(kind)?;
        if let BucketKind::Dense { .. } = kind {
            self.used = Some(place);
        }
        Some(place)
    }

    /// Nothing is whole any more.
    pub fn clear(&mut self) {
        *self = Turns::default();
    }
}

/// Whose weights a round forward needs, in their order.
pub fn forward(layers: u32, tied: bool) -> impl Iterator<Item = BucketKind> {
    let dense = (0..layers).map(|layer| BucketKind::Dense { layer });
    std::iter::once(BucketKind::Embedding).chain(dense).chain(std::iter::once(head(tied)))
}

/// The same of a round backward, which follows a forward one.
pub fn backward(layers: u32, recompute: Recompute) -> impl Iterator<Item = BucketKind> {
    let before = move |layer| recompute.again(layer, layers).chain(std::iter::once(layer));
    (0..layers).rev().flat_map(before).map(|layer| BucketKind::Dense { layer })
}

/// The bucket of the head.
pub fn head(tied: bool) -> BucketKind {
    if tied { BucketKind::Embedding } else { BucketKind::Head }
}

/// How often each bucket is gathered in a step of so many rounds: the embedding, the head where it
/// is another bucket, and each layer.
pub fn gathers(
    layers: u32,
    tied: bool,
    recompute: Recompute,
    rounds: u32,
) -> impl Fn(BucketKind) -> u64 {
    let mut turns = Turns::default();
    let mut counts = std::collections::BTreeMap::new();
    // The first round begins with nothing, each of the others with what one leaves. A step may have
    // half a million.
    for alike in [rounds.min(1), rounds.saturating_sub(1)].map(u64::from) {
        for kind in forward(layers, tied).chain(backward(layers, recompute)) {
            if turns.take(kind).is_some() {
                *counts.entry(kind).or_insert(0) += alike;
            }
            turns.begin(kind);
        }
    }
    move |kind| counts.get(&kind).copied().unwrap_or(0)
}

#[cfg(test)]
mod tests {
    use super::*;

    const SPANS: [Recompute; 6] = [
        Recompute::None,
        Recompute::Selective,
        Recompute::Full,
        Recompute::Every(2),
        Recompute::Every(3),
        Recompute::Every(100),
    ];

    #[test]
    fn rounds_that_are_not_gone_through_are_counted() {
        for (layers, tied) in (1..9).flat_map(|layers| [(layers, false), (layers, true)]) {
            for (recompute, rounds) in
                SPANS.into_iter().flat_map(|of| (0..12).map(move |rounds| (of, rounds)))
            {
                let mut turns = Turns::default();
                let mut counts = std::collections::BTreeMap::new();
                let kinds = || forward(layers, tied).chain(backward(layers, recompute));
                for kind in (0..rounds).flat_map(|_| kinds()) {
                    *counts.entry(kind).or_insert(0) += u64::from(turns.take(kind).is_some());
                    turns.begin(kind);
                }
                let found = gathers(layers, tied, recompute, rounds);
                for kind in kinds() {
                    let expected = counts.get(&kind).copied().unwrap_or(0);
                    assert_eq!(found(kind), expected, "{layers} {recompute:?} {rounds} {kind:?}");
                }
            }
        }
    }

    /// As an engine goes: what comes next leaves while the one before is used.
    fn walk(kinds: &[BucketKind]) -> (u64, u64) {
        let (mut turns, mut all, mut late) = (Turns::default(), 0, 0);
        for (at, kind) in kinds.iter().enumerate() {
            let taken = turns.take(*kind).is_some();
            (all, late) = (all + u64::from(taken), late + u64::from(taken));
            let place = turns.begin(*kind).expect("whole");
            if let Some(next) = kinds[at..].iter().find(|next| *next != kind) {
                all += u64::from(turns.take(*next).is_some());
            }
            assert_eq!(turns.place(*kind), Some(place), "{kind:?} was used");
        }
        (all, late)
    }

    #[test]
    fn what_is_used_stays_and_what_is_next_is_there() {
        for (layers, tied) in [(1, true), (1, false), (2, false), (3, true), (7, false)] {
            for recompute in SPANS {
                let round = || forward(layers, tied).chain(backward(layers, recompute));
                let rounds: Vec<_> = round().chain(round()).chain(round()).collect();
                let (all, late) = walk(&rounds);
                // Nothing but the very first one is waited for.
                assert_eq!(late, 1, "{layers} {recompute:?}");
                let count = gathers(layers, tied, recompute, 3);
                let kinds = forward(layers, tied).collect::<std::collections::BTreeSet<_>>();
                let counted: u64 = kinds.into_iter().map(count).sum();
                assert_eq!(all, counted, "{layers} {recompute:?}");
            }
        }
    }

    #[test]
    fn what_is_still_there_is_not_gathered_again() {
        let of = |layers, tied, recompute, rounds| {
            let count = gathers(layers, tied, recompute, rounds);
            let layers = (0..layers).map(|layer| count(BucketKind::Dense { layer }));
            let ends = [BucketKind::Embedding, BucketKind::Head].map(&count);
            (ends, layers.collect::<Vec<_>>())
        };
        assert_eq!(of(4, false, Recompute::None, 1), ([1, 1], vec![2, 2, 1, 1]));
        // A tied head keeps its place for the whole step; layers 0 and 1 are there for the next
        // round.
        assert_eq!(of(4, true, Recompute::None, 2), ([1, 0], vec![3, 3, 2, 2]));
        assert_eq!(of(4, false, Recompute::None, 2), ([2, 2], vec![3, 3, 2, 2]));
        // One by one what is computed again is used at once.
        assert_eq!(of(4, false, Recompute::Full, 1), ([1, 1], vec![2, 2, 1, 1]));
        // 0 1 2 3, back: 3 2, again 0 1, back: 1 0.
        assert_eq!(of(4, false, Recompute::Every(2), 1), ([1, 1], vec![2, 2, 1, 1]));
        // Three together do not fit: 0 1 2 3 4 5, back: 5 4 3, again 0 1 2, back: 2 1 0.
        let three = of(6, false, Recompute::Every(3), 1);
        assert_eq!(three, ([1, 1], vec![3, 2, 2, 2, 1, 1]));
    }

    #[test]
    fn gradients_of_neighbours_have_places_of_their_own() {
        let place = |layer| place_of_gradient(BucketKind::Dense { layer });
        for layer in 0..9 {
            assert_ne!(place(layer), place(layer + 1));
            assert!((1..PLACES).contains(&place(layer)));
        }
        for kind in [BucketKind::Embedding, BucketKind::Head] {
            assert_eq!(place_of_gradient(kind), 0);
        }
    }

    #[test]
    fn stages_have_numbers() {
        for stage in 1..=3 {
            assert_eq!(Zero::of(stage).map(Zero::stage), Some(stage));
        }
        assert_eq!([Zero::of(0), Zero::of(4)], [None, None]);
    }
}
