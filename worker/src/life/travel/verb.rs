//! What travels, and how its bytes are counted.

use serde::{Deserialize, Serialize};

/// What ranks do together.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Verb {
    /// Each rank a part to each.
    AllToAll,
    /// The sum of all, on all.
    AllReduce,
    /// A part of the sum to each.
    ReduceScatter,
    /// Each rank's part to all.
    AllGather,
    /// An all-to-all of a few words: how many rows will come.
    Counts,
}

/// By what it is done.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "kebab-case")]
pub enum Way {
    Nccl,
    /// Memory of each other's GPUs: `move_rows`, `scatter_rows`, `gather_rows`, `exchange_counts`.
    Windows,
}

/// One of what is measured.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Call {
    pub verb: Verb,
    pub way: Way,
    /// Of the larger buffer of a rank.
    pub bytes: usize,
}

/// What a rank tells each other one: 128 words, as if it had so many experts.
const COUNTS_BYTES: usize = 4 * 128;
/// What a rank has for another one is a multiple of it: a row that every kernel takes.
const PIECE: usize = 256;
/// Of a row at most: one of OLMoE in bf16.
const ROW_BYTES_MAX: usize = 4096;

impl Verb {
    pub const ALL: [Verb; 5] =
        [Verb::AllToAll, Verb::AllReduce, Verb::ReduceScatter, Verb::AllGather, Verb::Counts];

    pub fn name(self) -> &'static str {
        match self {
            Verb::AllToAll => "all-to-all",
            Verb::AllReduce => "all-reduce",
            Verb::ReduceScatter => "reduce-scatter",
            Verb::AllGather => "all-gather",
            Verb::Counts => "counts",
        }
    }

    /// There is a kernel for it.
    pub fn has_windows(self) -> bool {
        self != Verb::AllReduce
    }

    /// Bytes that leave each GPU as nccl-tests counts them (`busbw`): of the larger buffer of a
    /// rank all but its own part, and of an all-reduce twice that.
    pub fn bus_bytes(self, bytes: usize, world: u32) -> f64 {
        let world = f64::from(world.max(1));
        let once = bytes as f64 * (world - 1.0) / world;
        if self == Verb::AllReduce { 2.0 * once } else { once }
    }

    /// Bytes a second on the bus.
    pub fn bus_rate(self, bytes: usize, world: u32, seconds: f64) -> f64 {
        self.bus_bytes(bytes, world) / seconds
    }

    /// The sizes of the larger buffer of a rank that are measured: those that are wanted, or the
    /// next smaller ones that parts divide. Counts have a size of their own.
    pub fn sizes(self, wanted: &[usize], world: u32) -> Vec<usize> {
        let world = world as usize;
        if self == Verb::Counts {
            return vec![COUNTS_BYTES * world];
        }
        let fitting = |bytes: &usize| (bytes / world / PIECE).max(1) * PIECE * world;
        let mut sizes: Vec<usize> = wanted.iter().map(fitting).collect();
        sizes.sort_unstable();
        sizes.dedup();
        sizes
    }
}

impl Way {
    pub fn name(self) -> &'static str {
        match self {
            Way::Nccl => "NCCL",
            Way::Windows => "windows",
        }
    }
}

/// Bytes of a row, where each rank has `part` bytes for each.
pub(super) fn row_bytes(part: usize) -> usize {
    1 << part.trailing_zeros().min(ROW_BYTES_MAX.trailing_zeros())
}

/// Rows that lie in `part` bytes.
pub(super) fn rows_of(part: usize) -> usize {
    part / row_bytes(part)
}

/// `all-reduce of 16 MiB by NCCL`
impl std::fmt::Display for Call {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "{} of {} by {}", self.verb.name(), in_units(self.bytes), self.way.name())
    }
}

/// Whole KiB, MiB or GiB where they are; else bytes.
pub fn in_units(bytes: usize) -> String {
    let units = [(30, "GiB"), (20, "MiB"), (10, "KiB")];
    let whole = units.iter().find(|(shift, _)| bytes > 0 && bytes.is_multiple_of(1 << shift));
    whole.map_or_else(|| format!("{bytes} B"), |(shift, unit)| format!("{} {unit}", bytes >> shift))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Of two and of eight GPUs, as the tables of nccl-tests' PERFORMANCE.md have their factors.
    #[test]
    fn rates_are_those_of_the_bus() {
        let rate = |verb: Verb, world| verb.bus_rate(8_000_000, world, 0.001) / 1e9;
        for verb in [Verb::AllToAll, Verb::ReduceScatter, Verb::AllGather, Verb::Counts] {
            assert_eq!((rate(verb, 2), rate(verb, 8)), (4.0, 7.0), "{verb:?}");
        }
        assert_eq!((rate(Verb::AllReduce, 2), rate(Verb::AllReduce, 8)), (8.0, 14.0));
        assert_eq!(rate(Verb::AllReduce, 1), 0.0, "nothing leaves the only one");
    }

    #[test]
    fn sizes_are_those_that_parts_divide() {
        let of = |world| Verb::AllGather.sizes(&[1 << 20, 64 << 10, 64 << 10], world);
        assert_eq!(of(2), [64 << 10, 1 << 20]);
        assert_eq!(of(16), [64 << 10, 1 << 20]);
        assert_eq!(of(3), [85 * 768, 1365 * 768]);
        assert_eq!(Verb::AllGather.sizes(&[1], 2), [512], "less than a row each is a row each");
        assert_eq!(Verb::Counts.sizes(&[1 << 20], 8), [4096]);
        for bytes in of(3) {
            let part = bytes / 3;
            let row = row_bytes(part);
            assert!(row >= PIECE && rows_of(part) * row == part, "{bytes}");
        }
        assert_eq!((row_bytes(128 << 20), rows_of(128 << 20)), (4096, 32768));
    }

    #[test]
    fn a_call_is_told_in_words() {
        let call = Call { verb: Verb::AllReduce, way: Way::Nccl, bytes: 16 << 20 };
        assert_eq!(call.to_string(), "all-reduce of 16 MiB by NCCL");
        let units = [1 << 10, 3 << 29, 1 << 30, 65280, 0].map(in_units);
        assert_eq!(units, ["1 KiB", "1536 MiB", "1 GiB", "65280 B", "0 B"]);
    }
}
