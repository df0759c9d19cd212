//! A layer with all its buffers on the device: what tests check and benchmarks time.
#![allow(dead_code, reason = "tests and benchmarks each use a part")]

use moejob_kernels::cuda::{Arena, Compiler, CudaError, Stream};
use moejob_kernels::{
    ArenaPlan, Buffer, DType, Gradients, Activation, MoeDesc, MoeLayer, MoeTensors, Observer,
    Output, Stacked, Weights,
};

/// A gated layer with softmax scores, no losses and gradients in elements.
pub fn desc(
    tokens: usize,
    dim: usize,
    hidden: usize,
    experts: usize,
    top_k: usize,
) -> MoeDesc {
    MoeDesc {
        element: DType::Bf16,
        tokens,
        dim,
        hidden,
        experts,
        top_k,
        part: false,
        activation: Activation::Silu,
        gated: true,
        sigmoid: false,
        norm_topk: true,
        scale: 1.0,
        groups: None,
        segments: 1,
        sources: 1,
        aux_coef: 0.0,
        z_coef: 0.0,
        weight_gradients: Output::Element,
    }
}

pub struct Bed {
    pub layer: MoeLayer,
    pub stream: Stream,
    pub arena: Arena,
    pub tensors: MoeTensors,
    pub dout: Buffer,
    pub out: Buffer,
    pub dx: Buffer,
    pub gradients: Gradients,
    /// What the layer keeps from forward to backward.
    pub saved_bytes: usize,
}

/// How far experts lie from each other: one after the other, or as where each tensor of a bucket
/// is followed by others.
#[derive(Clone, Copy, PartialEq)]
pub enum Spread {
    Dense,
    Bucket,
}

/// `experts` of [rows, cols].
fn stacked(
    plan: &mut ArenaPlan,
    dtype: DType,
    (experts, rows, cols): (usize, usize, usize),
    spread: Spread,
) -> Stacked {
    let size = rows * cols;
    let stride = match spread {
        Spread::Dense => size,
        // Whole rows, and 4,096 elements.
        Spread::Bucket => size + 64 * cols,
    };
    Stacked { buffer: plan.alloc(dtype, (experts - 1) * stride + size), stride, gap: 0 }
}

impl Bed {
    /// Every output, table and scrap starts as NaN and as an index out of any bounds.
    pub fn new(
        compiler: &Compiler,
        layer: MoeLayer,
        biased: bool,
        spread: Spread,
    ) -> Result<Bed, CudaError> {
        let desc = *layer.desc();
        let MoeDesc { tokens, dim, hidden, experts, .. } = desc;
        let mut plan = ArenaPlan::new();
        let bias = biased.then(|| plan.alloc(DType::F32, experts));
        let router = plan.alloc(DType::F32, experts * dim);
        let x = plan.alloc(desc.element, tokens * dim);
        let (up, down) = ((experts, desc.width(), dim), (experts, dim, hidden));
        let weights = Weights {
            router,
            bias,
            up: stacked(&mut plan, desc.element, up, spread),
            down: stacked(&mut plan, desc.element, down, spread),
        };
        let [dout, out, dx] = [(); 3].map(|()| plan.alloc(desc.element, tokens * dim));
        let kind = desc.gradient_element();
        let gradients = Gradients {
            router: plan.alloc(DType::F32, experts * dim),
            up: stacked(&mut plan, kind, up, spread),
            down: stacked(&mut plan, kind, down, spread),
            accumulate: false,
            accumulate_router: false,
        };
        let before = plan.bytes();
        let saved = layer.plan_saved(&mut plan);
        let saved_bytes = plan.bytes() - before;
        let workspace = plan.alloc(DType::U8, layer.workspace_bytes());
        let arena = Arena::new(compiler.gpu(), plan.bytes())?;
        let stream = compiler.gpu().stream()?;
        let mut all = ArenaPlan::new();
        arena.fill_bytes(&stream, all.alloc(DType::U8, plan.bytes()), 0xff)?;
        stream.synchronize()?;
        let (residual, loss_scale) = (None, None);
        let tensors =
            MoeTensors { x, residual, weights, saved, workspace, loss_scale, starts: None };
        Ok(Bed { layer, stream, arena, tensors, dout, out, dx, gradients, saved_bytes })
    }

    pub fn forward(&self) -> Result<(), CudaError> {
        self.layer.forward(&self.stream, &self.arena, &self.tensors, self.out)
    }

    pub fn backward(&self) -> Result<(), CudaError> {
        let Bed { stream, arena, tensors, dout, dx, gradients, .. } = self;
        self.layer.backward(stream, arena, tensors, *dout, *dx, gradients)
    }

    /// Both, telling `after` of each stage.
    pub fn observed(&self, after: &mut Observer<'_>) -> Result<(), CudaError> {
        let Bed { stream, arena, tensors, dout, out, dx, gradients, .. } = self;
        self.layer.forward_observed(stream, arena, tensors, *out, after)?;
        self.layer.backward_observed(stream, arena, tensors, (*dout, *dx), gradients, after)
    }
}
