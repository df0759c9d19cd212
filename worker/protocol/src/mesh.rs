//! The mesh: world = pp * dp * cp * tp, with dp = edp * ep.

use serde::{Deserialize, Serialize};
use std::ops::Range;

/// Degrees of parallelism. Rank order: `rank = (((pp*EDP + edp)*EP + ep)*CP + cp)*TP + tp`.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Mesh {
    pub pp: u32,
    pub dp: u32,
    pub ep: u32,
    pub cp: u32,
    pub tp: u32,
}

/// Where a rank stands on each axis.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Coord {
    pub pp: u32,
    pub edp: u32,
    pub ep: u32,
    pub cp: u32,
    pub tp: u32,
}

impl Mesh {
    /// A mesh of `dp` data-parallel ranks with experts sharded over `ep` of them.
    pub fn data_parallel(dp: u32, ep: u32) -> Mesh {
        Mesh { pp: 1, dp, ep, cp: 1, tp: 1 }
    }

    pub fn world(&self) -> u32 {
        self.pp * self.dp * self.cp * self.tp
    }

    /// Number of expert groups: how many replicas each expert has.
    pub fn edp(&self) -> u32 {
        self.dp / self.ep
    }

    /// All degrees are at least 1, ep divides dp, and the world fits in 32 bits.
    pub fn is_valid(&self) -> bool {
        let degrees = [self.pp, self.dp, self.ep, self.cp, self.tp];
        let world = [self.pp, self.dp, self.cp, self.tp]
            .iter()
            .try_fold(1u32, |world, degree| world.checked_mul(*degree));
        let positive = degrees.iter().all(|degree| *degree > 0);
        positive && self.dp.is_multiple_of(self.ep) && world.is_some()
    }

    pub fn coord(&self, rank: u32) -> Coord {
        assert!(rank < self.world(), "rank {rank} of a world of {}", self.world());
        let (rest, tp) = (rank / self.tp, rank % self.tp);
        let (rest, cp) = (rest / self.cp, rest % self.cp);
        let (rest, ep) = (rest / self.ep, rest % self.ep);
        let (pp, edp) = (rest / self.edp(), rest % self.edp());
        Coord { pp, edp, ep, cp, tp }
    }

    pub fn rank(&self, at: Coord) -> u32 {
        (((at.pp * self.edp() + at.edp) * self.ep + at.ep) * self.cp + at.cp) * self.tp + at.tp
    }

    /// Index on the data-parallel axis, `edp * EP + ep`.
    pub fn dp_index(&self, rank: u32) -> u32 {
        let at = self.coord(rank);
        at.edp * self.ep + at.ep
    }

    /// The ranks that together hold every expert once and exchange tokens with `rank`, in ep order.
    pub fn expert_group(&self, rank: u32) -> Vec<u32> {
        let at = self.coord(rank);
        (0..self.ep).map(|ep| self.rank(Coord { ep, ..at })).collect()
    }

    /// The ranks that differ from `rank` on the dp axis alone, in dp order.
    pub fn data_group(&self, rank: u32) -> Vec<u32> {
        let at = self.coord(rank);
        (0..self.dp)
            .map(|dp| self.rank(Coord { edp: dp / self.ep, ep: dp % self.ep, ..at }))
            .collect()
    }

    /// Micro-batches of a step that `rank` computes, of `count` in all.
    pub fn micro_batches(&self, rank: u32, count: u32) -> Range<u32> {
        split(count, self.dp, self.dp_index(rank))
    }

    /// Rounds in a step: the largest number of micro-batches that any rank has.
    pub fn rounds(&self, count: u32) -> u32 {
        count.div_ceil(self.dp)
    }
}

/// The `index`-th of `parts` contiguous runs of `count` things; sizes differ by at most one and
/// the larger come first.
pub fn split(count: u32, parts: u32, index: u32) -> Range<u32> {
    assert!(index < parts);
    let (size, extra) = (count / parts, count % parts);
    let start = index * size + index.min(extra);
    start..start + size + u32::from(index < extra)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn coordinates_and_ranks_are_inverse() {
        let mesh = Mesh { pp: 2, dp: 6, ep: 3, cp: 1, tp: 2 };
        for rank in 0..mesh.world() {
            assert_eq!(mesh.rank(mesh.coord(rank)), rank);
        }
        assert_eq!(mesh.world(), 24);
        assert_eq!(mesh.expert_group(0), vec![0, 2, 4]);
        assert_eq!(mesh.data_group(1), vec![1, 3, 5, 7, 9, 11]);
    }

    #[test]
    fn runs_are_contiguous_and_even() {
        for count in 0..40 {
            for parts in 1..9 {
                let runs: Vec<_> = (0..parts).map(|i| split(count, parts, i)).collect();
                assert_eq!(runs[0].start, 0);
                assert_eq!(runs[parts as usize - 1].end, count);
                for pair in runs.windows(2) {
                    assert_eq!(pair[0].end, pair[1].start);
                    assert!(pair[0].len() == pair[1].len() || pair[0].len() == pair[1].len() + 1);
                }
            }
        }
    }

    #[test]
    fn impossible_meshes_are_recognised() {
        assert!(Mesh::data_parallel(4, 2).is_valid());
        assert!(!Mesh::data_parallel(4, 3).is_valid());
        assert!(!Mesh::data_parallel(0, 1).is_valid());
        assert!(!Mesh { pp: 1 << 20, dp: 1 << 20, ep: 1, cp: 1, tp: 1 }.is_valid());
    }
}
