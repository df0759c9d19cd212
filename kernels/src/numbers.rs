//! The numbers of a step, on the device: what each round adds, how rounds and ranks are summed, and
//! what follows from the sums.
//!
//! ```text
//! micro-batch -> AddRouting, HeadLoss -> its record, and counts of the step's StepNumbers
//! records, StepNumbers -> sums over ranks -> MoveCorrections, BucketAdamW, the host
//! ```
//! A record is summed over micro-batches in the order of the step, whoever computed what, so that
//! no bit of the sum depends on the number of ranks.

use crate::balance::BalanceLoss;
use crate::buffer::{Buffer, DType};
use crate::device::{Device, on_float};
use crate::route::Scoring;
use std::ops::Range;

/// What a micro-batch's record holds.
pub mod record {
    /// Sum of its cross-entropies, and its valid targets where they are counted: side by side, as
    /// [`crate::HeadLoss`] adds to them.
    pub const LOSS: usize = 0;
    pub const VALID: usize = 1;
    /// Its auxiliary loss, z loss and mean entropy, each summed over the mixture layers.
    pub const AUX: usize = 2;
    pub const Z: usize = 3;
    pub const ENTROPY: usize = 4;
    pub const COUNT: usize = 5;
}

/// What a rank's tally holds: sums over its micro-batches and mixture layers.
pub mod tally {
    /// See [`crate::StepNumbers`], where the first four stand in this order, too.
    pub const UNROUTED: usize = 0;
    pub const FOLLOWED: usize = 1;
    pub const SWITCHED: usize = 2;
    pub const ENTROPIES: usize = 3;
    pub const OVERFLOWS: usize = 4;
    pub const COUNT: usize = 5;
    /// Those that a router counts.
    pub const ROUTED: usize = OVERFLOWS;
}

/// entropy[0] = mean_t -sum_e q ln q, q = p / sum p, tokens ascending. Of a softmax that is
/// lse - <p, logits>. A GPU makes the scores anew.
#[derive(Clone, Copy, Debug)]
pub struct RouteEntropy {
    pub experts: usize,
    pub scoring: Scoring,
    /// [T, E]; on a GPU maybe empty
    pub probs: Buffer,
    /// [T, E]
    pub logits: Buffer,
    /// [T]
    pub lse: Buffer,
    /// Output F64 [1]
    pub entropy: Buffer,
}

/// The balancing loss of equal segments of a batch (see [`crate::Balance`]), and its gradient.
#[derive(Clone, Copy, Debug)]
pub struct BalanceLosses {
    pub loss: BalanceLoss,
    /// Tokens of a segment.
    pub tokens: usize,
    pub experts: usize,
    /// F64 [segments, 5, E]
    pub stats: Buffer,
    /// Output F64 [1]: the mean over the segments
    pub value: Buffer,
    /// Output F64 [segments, 3, E]: factor / segments * d value of the segment / d stats
    pub gradient: Option<(Buffer, f64)>,
}

/// Adds one layer of one micro-batch to the rank's part of a step's numbers.
#[derive(Clone, Copy, Debug)]
pub struct AddRouting {
    pub top_k: usize,
    /// F64 [3]: auxiliary loss, z loss, mean entropy
    pub losses: Buffer,
    /// u32 [E]
    pub counts: Buffer,
    /// u32 [E], where the router drops
    pub dropped: Option<Buffer>,
    /// u32 [T, K]: choices before any was dropped, and what is left of them
    pub chosen: Buffer,
    pub ids: Buffer,
    /// u32 [T]: 0 begins a text
    pub positions: Buffer,
    /// Added to, F64: [3] of the micro-batch's record, the first [4] of [`tally`], [E], [E]
    pub record: Buffer,
    pub tally: Buffer,
    pub loads: Buffer,
    pub drops: Buffer,
}

/// out[i] = x[0][i] + x[1][i] + ..., rows ascending from zero, F64
#[derive(Clone, Copy, Debug)]
pub struct SumRows {
    /// [rows, n]
    pub x: Buffer,
    /// Output [n]
    pub out: Buffer,
}

/// bias[e] += rate where the expert's load of the step is below the mean, -= rate where it is
/// above (Wang et al. 2024, auxiliary-loss-free balancing). The loads are whole numbers, so no
/// rounding decides. Nothing moves in a step whose update is skipped.
#[derive(Clone, Debug)]
pub struct MoveCorrections {
    pub rate: f64,
    /// F64 [E], of `numbers`
    pub loads: Range<usize>,
    /// StepNumbers
    pub numbers: Buffer,
    /// Changed in place: [E]; on a GPU F32
    pub bias: Buffer,
}

impl Device {
    pub fn route_entropy(&mut self, op: &RouteEntropy) {
        match self {
            Device::Cpu(cpu) => on_float!(op.logits.dtype(), T => cpu.route_entropy::<T>(op)),
            Device::Cuda(cuda) => cuda.route_entropy(op),
        }
    }

    pub fn balance_losses(&mut self, op: &BalanceLosses) {
        match self {
            Device::Cpu(cpu) => cpu.balance_losses(op),
            Device::Cuda(cuda) => cuda.balance_losses(op),
        }
    }

    pub fn add_routing(&mut self, op: &AddRouting) {
        match self {
            Device::Cpu(cpu) => cpu.add_routing(op),
            Device::Cuda(cuda) => cuda.add_routing(op),
        }
    }

    pub fn sum_rows(&mut self, op: &SumRows) {
        assert_eq!([op.x.dtype(), op.out.dtype()], [DType::F64; 2], "{op:?}");
        assert!(op.x.len().is_multiple_of(op.out.len().max(1)), "{op:?}");
        match self {
            Device::Cpu(cpu) => cpu.sum_rows(op),
            Device::Cuda(cuda) => cuda.sum_rows(op),
        }
    }

    pub fn move_corrections(&mut self, op: &MoveCorrections) {
        match self {
            Device::Cpu(cpu) => on_float!(op.bias.dtype(), T => cpu.move_corrections::<T>(op)),
            Device::Cuda(cuda) => cuda.move_corrections(op),
        }
    }
}
