//! Who sends which token where, within the ranks that together hold all experts.
//!
//! ```text
//! choices of all tokens of the group -> RoutePlan -> own tokens that leave, by rank
//!                                                 -> rows of here, by (expert, source, token)
//! ```
//! Every rank of the group has the choices of all, so that each works out its own part and nobody
//! tells counts to anybody. The host knows how many tokens a rank routes; how many rows come of it
//! is known to the device alone.

use crate::buffer::Buffer;
use crate::device::Device;

/// What a rank has memory for in one layer of one round.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Room {
    /// Rows that it computes.
    pub rows: usize,
    /// Tokens that arrive.
    pub tokens: usize,
}

/// `P` ranks of the group, `S` of them have tokens in this round, `G` experts are computed here.
///
/// A token travels once to each rank that computes one of its experts: a source's tokens arrive in
/// their order, without those that need nobody here. Rows lie by (expert here, source, token).
/// Choices that name no expert of the model have no rows, as empty ones have none. Where one rank
/// has too little room nothing is routed at all, on any rank, and the overflow is counted: before a
/// row is written, and alike by all, since all know all choices.
#[derive(Clone, Copy, Debug)]
pub struct RoutePlan<'a> {
    pub top_k: usize,
    /// `P`, and which of them this rank is.
    pub positions: usize,
    pub me: usize,
    /// `G`
    pub locals: usize,
    /// [S]: tokens of each source, in the order of `all_ids`
    pub sources: &'a [usize],
    /// [P]
    pub rooms: &'a [Room],
    /// u32 [sum of sources, K]: an expert or `NO_EXPERT`
    pub all_ids: Buffer,
    /// u32 [T, K]: the own tokens' part of them; T is 0 for a rank without tokens
    pub ids: Buffer,
    /// u32 [E]: the position that computes each expert, and which of the experts here it is
    pub owner: Buffer,
    pub local: Buffer,
    /// u32 [P + 1]: the first place of a position in the order of [`crate::Place`]
    pub first: Buffer,
    /// u32 [E + 1]: `offsets` of the own tokens' `Place`
    pub offsets: Buffer,
    /// Added to, F64 [1]: 1 for an overflow
    pub overflows: Buffer,
    /// Output u32 [G * S + 1]: rows of each (expert here, source)
    pub segments: Buffer,
    /// Output u32 [R], of which segments' last are written: the arrived token of each row, and its
    /// slot in `all_ids`
    pub rows: Buffer,
    pub slots: Buffer,
    /// Output u32 [S + 1]: where a source's tokens start among the arrived
    pub arrived: Buffer,
    /// Output u32 [T * K] and [P + 1]: own tokens that leave, and where each rank's start
    pub leaving: Buffer,
    pub departures: Buffer,
    /// Output u32 [P + 1]: where rows that each rank computes for own tokens start when they are
    /// back
    pub returns: Buffer,
}

/// y[r, :] = x[index[r], :] for r below count[0]; further rows stay as they are.
#[derive(Clone, Copy, Debug)]
pub struct GatherCounted {
    pub dim: usize,
    /// u32 [1], at most the length of index
    pub count: Buffer,
    /// [any, dim]
    pub x: Buffer,
    /// u32 [rows]
    pub index: Buffer,
    /// Output [rows, dim]
    pub y: Buffer,
}

/// out[i] = table[ids[i]], and `NO_EXPERT` where the id is that; all u32
#[derive(Clone, Copy, Debug)]
pub struct MapIds {
    pub table: Buffer,
    pub ids: Buffer,
    /// Output, as long as `ids`
    pub out: Buffer,
}

impl Device {
    pub fn route_plan(&mut self, op: &RoutePlan) {
        match self {
            Device::Cpu(cpu) => cpu.route_plan(op),
            Device::Cuda(cuda) => cuda.lacks("route_plan"),
        }
    }

    pub fn gather_counted(&mut self, op: &GatherCounted) {
        match self {
            Device::Cpu(cpu) => {
                crate::device::on_float!(op.y.dtype(), T => cpu.gather_counted::<T>(op));
            }
            Device::Cuda(cuda) => cuda.lacks("gather_counted"),
        }
    }

    pub fn map_ids(&mut self, op: &MapIds) {
        match self {
            Device::Cpu(cpu) => cpu.map_ids(op),
            Device::Cuda(cuda) => cuda.lacks("map_ids"),
        }
    }
}
