//! The ops of a mixture-of-experts transformer, forward and backward, on one device.
//!
//! ```text
//! ArenaPlan -> Buffer (kind, offset, length)      planned once, before anything is computed
//! Device::cpu(threads, arena bytes), Device::cuda(ordinal, arena bytes)
//! device.op(&Op { sizes, buffers })               enqueues; the host reads results once a step
//!
//! ops/table.rs          every op, on every device
//! ops/OP/op.rs          the contract; cpu.rs the reference; cuda.rs and *.cu the launch
//! cpu/, cuda/           the machines, which know no op
//! ```
//! Each op is a struct whose named fields are its sizes and its buffers. Its documentation is the
//! contract that every device honours: the equation, the shapes, the order of every sum. The CPU
//! is the reference; its results are the same bits on every x86-64 machine, whatever the threads.
//! Letters: `T` tokens, `D` model dim, `N` query heads, `KV` key and value heads, `H` head dim,
//! `V` vocabulary, `E` experts, `K` top-k, `G` local experts, `S` sources, `F` expert hidden,
//! `R` routed rows. Matrices are row-major. Floats are F32 or F64, the same for all float buffers
//! of one call unless said otherwise. On a GPU floats are elements: Bf16, F16 or F32, the same for
//! all of a call; vectors of a model (gains, biases) and their gradients may be F32 beside them,
//! statistics are F32, and sums are fp32 rounded once.

mod buffer;
mod device;
mod error;
mod kept;
mod marks;
mod pages;
mod stored;
mod stretch;
mod traffic;
mod types;

pub mod memory_bounds;
pub mod philox;
pub mod threads;

mod cpu;
pub mod cuda;
mod ops;

pub use buffer::{Pair, ArenaPlan, Buffer, DType, Element};
pub use cpu::{CpuDevice, float::Float, isa::Isa};
pub use device::{Device, Posted};
pub use error::{KernelError, Lack, LayerError, Refusal};
pub use pages::Pages;
pub use stored::Stored;
pub use marks::{Pace, PhaseEnds, Span, StepPhase};
pub use traffic::Traffic;
pub use stretch::{StretchBegun, StretchEnds, StretchTook};
pub use types::{Activation, BalanceLoss, Layout, NO_EXPERT, Output, RouteGroups, Scoring};

pub use ops::attention::cuda::AttentionKernels;
pub use ops::attention::op::{Attention, AttentionBackward, AttentionDesc, CachedAttention};
pub use ops::bucket::op::{
    BucketAdamW, BucketBlock, DecideUpdate, GradientNumbers, Master, SQUARE_SUM_BLOCK,
};
pub use ops::bucket::step_numbers::{
    self, LossScale, LossScaling, StepClass, StepControl, StepNumbers, StepParams,
};
pub use ops::convert::op::{AddUp, Cast, JoinMaster, SplitMaster};
pub use ops::elementwise::op::{
    Add, Clamp, ClampBackward, Fill, GatedMul, GatedMulBackward, GatherRows, InitNormal, ScatterSum,
    Strided, Sum,
};
pub use ops::embed::op::{Embed, EmbedBackward};
pub use ops::gate::cuda::GateShape;
pub use ops::gate::op::{Choice, Gate, GateBackward, Load, LogitNoise};
pub use ops::head::cuda::Head;
pub use ops::head::op::{
    HeadDesc, HeadGradient, HeadLoss, HeadPlan, IGNORE, head_numbers,
};
pub use ops::kernel_list::StepKernels;
pub use ops::matmul::op::{AddBias, BiasBackward, Matmul};
pub use ops::mixture::desc::{Gradients, MoeDesc, MoeTensors, Saved, Stacked, Weights};
pub use ops::mixture::layer::{MoeLayer, Observer};
pub use ops::mixture::op::{
    Each, MoeBackward, MoeCombine, MoeExperts, MoeExpertsBackward, MoeForward, MoeHidden, MoePlace,
    MoePlan, MoeRoute, MoeRouterBackward, MoeUpGradient, Sources,
};
pub use ops::norm::op::{RmsNorm, RmsNormBackward};
pub use ops::rope::op::{NormRope, NormRopeBackward, Rope};
pub use ops::router::balance::{self, Balance, Balanced};
pub use ops::router::op::{
    self as numbers, AddRouting, BalanceLosses, Mask, MaskRows, MoveCorrections, NormalizeRows,
    NormalizeRowsBackward, RouteEntropy, SumRows, Temper, TemperBackward,
};
pub use ops::slices::op::{SliceChoices, SumSlices};
pub use ops::table::OPS;
pub use ops::wire::op::{
    FP8_BLOCK, PackRows, UnpackRows, WireFormat, fp8_pack, fp8_scale, fp8_unpack,
};

/// Rows and counts between the GPUs of a node.
pub mod peer {
    pub use crate::ops::peer::count::CountRows;
    pub use crate::ops::peer::cuda::{
        Awaited, COUNTS_MAX, MoveRows, PEERS_MAX, PeerDesc, PeerFailure, PeerLinks,
    };
    pub use crate::ops::peer::group::rooms_of_group;
    pub use crate::ops::peer::op::{GatherRows, Need, ScatterRows};
}

/// Parts of the mixture layer and of the head, which processors alone have by themselves.
pub mod parts {
    pub use crate::ops::head::cpu::CrossEntropy;
    pub use crate::ops::mixture::cpu::experts::{
        ExpertsDgrad, ExpertsDown, ExpertsDownBackward, ExpertsDownWgrad, ExpertsUp,
        ExpertsUpWgrad,
    };
    pub use crate::ops::mixture::cpu::place::{Combine, Place, ScatterRows};
    pub use crate::ops::mixture::cpu::route::{Route, RouteBackward};
}
