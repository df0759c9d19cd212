//! The ops of a mixture-of-experts transformer, forward and backward, on one device.
//!
//! ```text
//! ArenaPlan -> Buffer (kind, offset, length)      planned once, before anything is computed
//! Device::cpu(threads, arena bytes), Device::cuda(ordinal, arena bytes)   one match per op
//! device.op(&Op { sizes, buffers })               enqueues; the host reads results once a step
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
mod marks;
mod pages;
mod stored;
mod stretch;

pub mod memory_bounds;
pub mod philox;
pub mod threads;

mod embed;
mod norm;
mod matmul;
mod rope;
mod norm_rope;
mod attention;
mod route;
pub mod balance;
mod gate;
mod gate_input;
mod place;
mod experts;
mod elementwise;
mod loss;
mod head;
mod optimizer;
mod bucket;
pub mod step_numbers;
mod convert;
pub mod numbers;
mod moe;
mod moe_here;
mod slices;
mod wire;

mod cpu;
pub mod cuda;

pub use attention::{Attention, AttentionBackward, CachedAttention};
pub use bucket::{BucketAdamW, BucketBlock, DecideUpdate, GradientNumbers, Master};
pub use buffer::{Pair, ArenaPlan, Buffer, DType, Element};
pub use convert::{AddUp, Cast, JoinMaster, SplitMaster};
pub use cpu::{CpuDevice, Float, Isa};
pub use device::{Device, KernelError, Lack, Posted, Traffic};
pub use elementwise::{
    Add, Clamp, ClampBackward, Fill, GatedMul, GatedMulBackward, InitNormal, Strided, Sum,
};
pub use embed::{Embed, EmbedBackward};
pub use experts::{
    Activation, ExpertsDgrad, ExpertsDown, ExpertsDownBackward, ExpertsDownWgrad, ExpertsUp,
    ExpertsUpWgrad,
};
pub use balance::{Balance, BalanceLoss, Balanced};
pub use gate::{Choice, Gate, GateBackward, Load, LogitNoise};
pub use gate_input::{
    Mask, MaskRows, NormalizeRows, NormalizeRowsBackward, Temper, TemperBackward,
};
pub use head::{HeadDesc, HeadGradient, HeadLoss, HeadPlan, head_numbers};
pub use loss::{CrossEntropy, IGNORE};
pub use pages::Pages;
pub use stored::Stored;
pub use marks::{Pace, PhaseEnds, Span, StepPhase};
pub use stretch::{StretchBegun, StretchEnds, StretchTook};
pub use matmul::{AddBias, BiasBackward, Layout, Matmul};
pub use moe::{MoeBackward, MoeForward, MoeHidden, MoePlan};
pub use moe_here::{
    Each, MoeCombine, MoeExperts, MoeExpertsBackward, MoePlace, MoeRoute, MoeRouterBackward,
    MoeUpGradient, Sources,
};
pub use norm::{AddRmsNorm, RmsNorm, RmsNormBackward};
pub use norm_rope::{NormRope, NormRopeBackward};
pub use optimizer::{AdamW, BlockSquareSums, SQUARE_SUM_BLOCK};
pub use place::{Combine, GatherRows, NO_EXPERT, Place, ScatterRows, ScatterSum};
pub use rope::Rope;
pub use step_numbers::{
    LossScale, LossScaling, StepClass, StepControl, StepNumbers, StepParams,
};
pub use numbers::{
    AddRouting, BalanceLosses, MoveCorrections, RouteEntropy, SumRows,
};
pub use route::{Route, RouteBackward, RouteGroups, Scoring};
pub use slices::{SliceChoices, SumSlices};
pub use wire::{
    FP8_BLOCK, PackRows, UnpackRows, WireFormat, fp8_pack, fp8_scale, fp8_unpack,
};
