//! The numbers of a step, on the device: what each round adds, how rounds and ranks are summed, and
//! what follows from the sums.
//!
//! ```text
//! a rank's part: records of its micro-batches, [5] each | tally: five counts | loads, dropped
//!                | sums of squares of its owned blocks
//! rounds -> AddRouting, SumF64 -> the rank's part
//! parts of all ranks -> ReduceNumbers -> StepNumbers -> MoveCorrections, AdamWUpdate, the host
//! ```
//! Sums over micro-batches and blocks are taken in the order of the step, whoever computed what, so
//! that no bit of them depends on the number of ranks.

use crate::balance::BalanceLoss;
use crate::buffer::{Buffer, DType};
use crate::device::{Device, on_float};
use crate::step_numbers::StepNumbers;
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
/// lse - <p, logits>.
#[derive(Clone, Copy, Debug)]
pub struct RouteEntropy {
    pub experts: usize,
    pub softmax: bool,
    /// [T, E]
    pub probs: Buffer,
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

/// out[e] = the sum over the layers of counts[e], u32
#[derive(Clone, Copy, Debug)]
pub struct SumCounts<'a> {
    /// Each u32 [E]
    pub counts: &'a [Buffer],
    /// Output u32 [E]
    pub out: Buffer,
}

/// The auxiliary loss of all layers concatenated, as `load_balancing_loss_func` of Hugging Face has
/// it: E * sum_e load[e] * mean_prob[e], both means over the layers. It comes times the layers, as
/// a sum over them would.
#[derive(Clone, Copy, Debug)]
pub struct ConcatenatedBalance<'a> {
    pub tokens: usize,
    /// Of each layer: u32 [E], F64 [E]
    pub counts: &'a [Buffer],
    pub prob_sums: &'a [Buffer],
    /// Output F64 [1]
    pub value: Buffer,
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

/// Where the sums of squares of an owned run of a parameter stand among the parts of all ranks.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct SquareRun {
    pub at: Range<usize>,
    /// In the table of parameters.
    pub tensor: usize,
    /// It counts in the norm while this class of StepParams is active.
    pub class: usize,
}

/// StepNumbers of the parts of all ranks. Losses are summed in the order of micro-batches, squares
/// in that of the table of parameters.
#[derive(Clone, Copy, Debug)]
pub struct ReduceNumbers<'a> {
    pub layout: StepNumbers,
    /// F64: the ranks' parts side by side
    pub parts: Buffer,
    /// First element of each micro-batch's record, in the order of the step
    pub records: &'a [usize],
    /// First element of each rank's tally, behind which loads and dropped stand
    pub tallies: &'a [usize],
    /// In the order of the table, then of the blocks
    pub squares: &'a [SquareRun],
    /// StepParams
    pub params: Buffer,
    /// Output F64: StepNumbers
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

/// [`crate::AdamW`] with the coefficients of a class of StepParams and the gradient scale of
/// [`crate::StepControl::decide`], or nothing if that or the class says so.
#[derive(Clone, Copy, Debug)]
pub struct AdamWUpdate {
    pub beta1: f64,
    pub beta2: f64,
    /// Added outside of the root.
    pub eps: f64,
    /// Whose coefficients it takes.
    pub class: usize,
    /// F64: StepParams, StepNumbers
    pub params: Buffer,
    pub numbers: Buffer,
    /// Changed in place
    pub w: Buffer,
    /// Changed in place
    pub m: Buffer,
    /// Changed in place
    pub v: Buffer,
    pub g: Buffer,
}

impl Device {
    pub fn route_entropy(&mut self, op: &RouteEntropy) {
        match self {
            Device::Cpu(cpu) => on_float!(op.probs.dtype(), T => cpu.route_entropy::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("route_entropy"),
        }
    }

    pub fn balance_losses(&mut self, op: &BalanceLosses) {
        match self {
            Device::Cpu(cpu) => cpu.balance_losses(op),
            Device::Cuda(cuda) => cuda.lacks("balance_losses"),
        }
    }

    pub fn sum_counts(&mut self, op: &SumCounts) {
        match self {
            Device::Cpu(cpu) => cpu.sum_counts(op),
            Device::Cuda(cuda) => cuda.lacks("sum_counts"),
        }
    }

    pub fn concatenated_balance(&mut self, op: &ConcatenatedBalance) {
        match self {
            Device::Cpu(cpu) => cpu.concatenated_balance(op),
            Device::Cuda(cuda) => cuda.lacks("concatenated_balance"),
        }
    }

    pub fn add_routing(&mut self, op: &AddRouting) {
        match self {
            Device::Cpu(cpu) => cpu.add_routing(op),
            Device::Cuda(cuda) => cuda.lacks("add_routing"),
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

    pub fn reduce_numbers(&mut self, op: &ReduceNumbers) {
        match self {
            Device::Cpu(cpu) => cpu.reduce_numbers(op),
            Device::Cuda(cuda) => cuda.lacks("reduce_numbers"),
        }
    }

    pub fn move_corrections(&mut self, op: &MoveCorrections) {
        match self {
            Device::Cpu(cpu) => on_float!(op.bias.dtype(), T => cpu.move_corrections::<T>(op)),
            Device::Cuda(cuda) => cuda.move_corrections(op),
        }
    }

    pub fn adamw_update(&mut self, op: &AdamWUpdate) {
        match self {
            Device::Cpu(cpu) => on_float!(op.w.dtype(), T => cpu.adamw_update::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("adamw_update"),
        }
    }
}
