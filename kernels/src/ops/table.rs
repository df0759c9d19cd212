//! The table of ops: the method of [`Device`] that enqueues each, and its description.
//!
//! A row calls the method by the same name of both devices, so an op that one of them has not is an
//! error of the compiler. `by` names the buffer whose kind says in which float a processor
//! computes, and `after check` lets the description judge itself first.

use crate::buffer::{ArenaPlan, DType};
use crate::device::Device;
use crate::error::LayerError;
use crate::ops::{gate, mixture};
use crate::ops::attention::op::{Attention, AttentionBackward, AttentionDesc, CachedAttention};
use crate::ops::bucket::op::{BucketAdamW, DecideUpdate, GradientNumbers};
use crate::ops::convert::op::{AddUp, Cast, JoinMaster, SplitMaster};
use crate::ops::elementwise::op::{
    Add, Clamp, ClampBackward, Fill, GatedMul, GatedMulBackward, GatherRows, InitNormal, ScatterSum,
    Sum,
};
use crate::ops::embed::op::{Embed, EmbedBackward};
use crate::ops::gate::op::{Gate, GateBackward};
use crate::ops::head::op::{HeadDesc, HeadLoss, HeadPlan};
use crate::ops::matmul::op::{AddBias, BiasBackward, Matmul};
use crate::ops::mixture::desc::MoeDesc;
use crate::ops::mixture::op::{
    MoeBackward, MoeCombine, MoeExperts, MoeExpertsBackward, MoeForward, MoeHidden, MoePlace,
    MoePlan, MoeRoute, MoeRouterBackward, MoeUpGradient,
};
use crate::ops::norm::op::{RmsNorm, RmsNormBackward};
use crate::ops::rope::op::{NormRope, NormRopeBackward, Rope};
use crate::ops::router::op::{
    AddRouting, BalanceLosses, MaskRows, MoveCorrections, NormalizeRows, NormalizeRowsBackward,
    RouteEntropy, SumRows, Temper, TemperBackward,
};
use crate::ops::slices::op::{SliceChoices, SumSlices};
use crate::ops::wire::op::{PackRows, UnpackRows};

macro_rules! ops {
    ($($name:ident($op:ty) $(by $($kind:ident).+)? $(after $check:ident)?;)*) => {
        /// The names of all ops.
        pub const OPS: &[&str] = &[$(stringify!($name)),*];

        impl Device {$(
            #[doc = concat!("Enqueues a [`", stringify!($op), "`].")]
            pub fn $name(&mut self, op: &$op) {
                $(op.$check();)?
                match self {
                    Device::Cpu(cpu) => ops!(@float cpu, $name, op $(, $($kind).+)?),
                    Device::Cuda(cuda) => cuda.$name(op),
                }
            }
        )*}
    };
    (@float $cpu:ident, $name:ident, $op:ident) => {
        $cpu.$name($op)
    };
    (@float $cpu:ident, $name:ident, $op:ident, $($kind:ident).+) => {
        match $op.$($kind).+.dtype() {
            DType::F32 => $cpu.$name::<f32>($op),
            DType::F64 => $cpu.$name::<f64>($op),
            other => panic!("the CPU computes in F32 or F64, not {other:?}"),
        }
    };
}

ops! {
    embed(Embed) by x;
    embed_backward(EmbedBackward) by dx;
    rms_norm(RmsNorm) by x;
    rms_norm_backward(RmsNormBackward) by x;
    matmul(Matmul) by c;
    exact_matmul(Matmul) by c;
    add_bias(AddBias) by x;
    bias_backward(BiasBackward) by dy;
    rope(Rope) by x;
    norm_rope(NormRope) by x;
    norm_rope_backward(NormRopeBackward) by dy;
    attention(Attention) by o;
    cached_attention(CachedAttention) by o;
    attention_backward(AttentionBackward) by d_o;
    mask_rows(MaskRows) by y;
    normalize_rows(NormalizeRows) by y;
    normalize_rows_backward(NormalizeRowsBackward) by y;
    temper(Temper) by x;
    temper_backward(TemperBackward) by x;
    route_entropy(RouteEntropy) by logits;
    balance_losses(BalanceLosses);
    add_routing(AddRouting);
    sum_rows(SumRows) after check;
    move_corrections(MoveCorrections) by bias;
    gate(Gate) by probs;
    gate_backward(GateBackward) by dlogits;
    moe_forward(MoeForward) by tensors.x;
    moe_hidden(MoeHidden) by tensors.x;
    moe_backward(MoeBackward) by tensors.x;
    moe_route(MoeRoute) by tensors.x;
    moe_place(MoePlace) by saved.row_weights;
    moe_experts(MoeExperts) by tensors.x;
    moe_combine(MoeCombine) by rows after check;
    moe_experts_backward(MoeExpertsBackward) by tensors.x;
    moe_up_gradient(MoeUpGradient) by tensors.x;
    moe_router_backward(MoeRouterBackward) by tensors.x;
    slice_choices(SliceChoices) by weights after check;
    sum_slices(SumSlices) by sums after check;
    pack_rows(PackRows) after check;
    unpack_rows(UnpackRows) after check;
    add(Add) by a;
    sum(Sum) by out;
    gather_rows(GatherRows) by y;
    scatter_sum(ScatterSum) by out;
    fill(Fill) by x;
    gated_mul(GatedMul) by out;
    gated_mul_backward(GatedMulBackward) by d_out;
    clamp(Clamp) by x;
    clamp_backward(ClampBackward) by x;
    init_normal(InitNormal) by x;
    head_loss(HeadLoss) by x;
    gradient_numbers(GradientNumbers);
    decide_update(DecideUpdate);
    bucket_adamw(BucketAdamW);
    cast(Cast) after check;
    add_up(AddUp) after check;
    split_master(SplitMaster) after check;
    join_master(JoinMaster) after check;
}

impl Device {
    /// Bytes of workspace that attentions of `desc` share. Makes their kernels, so that no step
    /// waits for them.
    pub fn attention_plan(&mut self, desc: &AttentionDesc) -> Result<usize, LayerError> {
        match self {
            Device::Cpu(_) => Ok(0),
            Device::Cuda(cuda) => cuda.attention_plan(desc),
        }
    }

    /// Bytes that a gate of [tokens, experts, K] works in.
    pub fn gate_workspace(&self, sizes: [usize; 3]) -> usize {
        match self {
            Device::Cpu(_) => 0,
            Device::Cuda(_) => gate::cuda::workspace_bytes(sizes),
        }
    }

    /// Makes ready whatever `op` needs, such as kernels, so that the first step does not.
    pub fn gate_load(&mut self, op: &Gate) -> Result<(), LayerError> {
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(cuda) => cuda.gate_load(op).map(|_| ()),
        }
    }

    /// How this device goes through a head of `desc`.
    pub fn head_plan(&self, desc: &HeadDesc) -> HeadPlan {
        match self {
            Device::Cpu(_) => HeadPlan::cpu(desc),
            Device::Cuda(_) => HeadPlan::cuda(desc),
        }
    }

    /// Makes ready whatever a head needs, such as kernels and cuBLASLt, so that the first step does
    /// not; an error names what is absent.
    pub fn head_load(&mut self, desc: &HeadDesc) -> Result<(), LayerError> {
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(cuda) => cuda.head_load(desc).map(|_| ()),
        }
    }

    /// Whether a GPU may round F32 operands of products to 11 bits of mantissa (tf32), from the
    /// next op on. A CPU never does.
    pub fn set_tf32(&mut self, tf32: bool) {
        if let Device::Cuda(cuda) = self {
            cuda.set_tf32(tf32);
        }
    }

    /// Reserves what one layer of `desc` keeps on this device; says why if it cannot have one.
    /// On CUDA compiles its kernels.
    pub fn moe_plan(
        &mut self,
        desc: &MoeDesc,
        plan: &mut ArenaPlan,
    ) -> Result<MoePlan, LayerError> {
        match self {
            Device::Cpu(_) => Ok(mixture::cpu::plan(desc, plan)?),
            Device::Cuda(cuda) => cuda.moe_plan(desc, plan),
        }
    }

    /// Makes the kernels of [`MoePlace`], so that no step waits for them.
    ///
    /// # Errors
    /// The device cannot have them.
    pub fn moe_place_load(&mut self, top_k: usize) -> Result<(), LayerError> {
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(cuda) => cuda.moe_place_load(top_k),
        }
    }
}
