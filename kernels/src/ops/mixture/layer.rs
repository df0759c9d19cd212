//! A mixture-of-experts layer, router included: forward and backward as fixed lists of launches.
//!
//! ```text
//! forward    split, logits = x Wr^T -> choose -> scan, place -> up (gather) -> down -> combine
//! backward   dh (gather) -> dlogits -> dW2 -> dx of the router -> dx rows -> sum -> dW1 -> dWr
//! ```
//! Between the two lie x, H and the router's small tables; dH takes the place of H. What else is
//! needed for a moment lies in one workspace that all layers share.

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::arch::Arch;
use crate::cuda::compile::Compiler;
use crate::cuda::driver::{Arena, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::gemm::{Gemm, GemmConfig, ProductOp};
use crate::error::LayerError;
use crate::ops::mixture::call::Call;
use crate::ops::mixture::desc::{Gradients, MoeDesc, MoeTensors, Saved};
use crate::ops::mixture::route::Router;
use crate::types::Output;

/// One layer's kernels.
#[derive(Debug)]
pub struct MoeLayer {
    pub(crate) desc: MoeDesc,
    pub(crate) plan: Workspace,
    pub(crate) router: Router,
    pub(crate) logits: Gemm,
    pub(crate) up: Gemm,
    pub(crate) down: Gemm,
    pub(crate) dh: Gemm,
    pub(crate) dx: Gemm,
    pub(crate) dw_up: Gemm,
    pub(crate) dw_down: Gemm,
    pub(crate) dx_router: Gemm,
    pub(crate) dw_router: Gemm,
    /// Offsets of one group of all tokens, then of the chunks of dWr, then those chunks' order.
    pub(crate) tables: Arena,
    pub(crate) all_tokens: Buffer,
    pub(crate) chunk_offsets: Buffer,
    pub(crate) chunk_order: Buffer,
    pub(crate) chunks: usize,
}

/// Places in `configs`.
const LOGITS: usize = 0;
const UP: usize = 1;
const DOWN: usize = 2;
const DH: usize = 3;
const DX: usize = 4;
const DW_UP: usize = 5;
const DW_DOWN: usize = 6;
const DX_ROUTER: usize = 7;
const DW_ROUTER: usize = 8;

/// What is told of each stage, such as to record an event.
pub type Observer<'a> = dyn FnMut(&'static str) -> Result<(), CudaError> + 'a;

/// Ranges of the workspace, reused from phase to phase.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Workspace {
    pub(crate) bytes: usize,
    /// Forward: f32 partial statistics, u32 histogram, then elements A [R, F] and Y [R, D / passes]
    pub(crate) partials: Buffer,
    pub(crate) histogram: Buffer,
    pub(crate) a: Buffer,
    pub(crate) y: Buffer,
    /// Backward: f32 partial ds [R, parts], elements dlogits [T, pitch], f32 partial dWr
    /// [chunks, E, D],
    /// then elements s * A [R, F] and later dX rows [R, D] in its place
    pub(crate) partial_ds: Buffer,
    pub(crate) dlogits: Buffer,
    pub(crate) partial_dw: Buffer,
    pub(crate) scaled_a: Buffer,
    pub(crate) dx_rows: Buffer,
}

impl Workspace {
    fn new(desc: &MoeDesc, ds_parts: usize, chunks: usize) -> Workspace {
        let (route, rows) = (desc.route(), desc.rows());
        let mut forward = ArenaPlan::new();
        let partials = forward.alloc(DType::F32, route.choose_blocks() * (desc.experts + 1));
        let histogram = forward.alloc(DType::U32, desc.experts * route.choose_blocks());
        let a = forward.alloc(desc.element, rows * desc.hidden);
        let y = forward.alloc(desc.element, rows * desc.dim / desc.down_passes());
        let mut backward = ArenaPlan::new();
        let partial_ds = backward.alloc(DType::F32, rows * ds_parts);
        let dlogits = backward.alloc(desc.element, desc.tokens * route.dlogits_pitch());
        let partial_dw = backward.alloc(DType::F32, chunks * desc.experts * desc.dim);
        let mut last = backward.clone();
        let scaled_a = backward.alloc(desc.element, rows * desc.hidden);
        let dx_rows = last.alloc(desc.element, rows * desc.dim);
        let bytes = forward.bytes().max(backward.bytes()).max(last.bytes());
        Workspace {
            bytes,
            partials,
            histogram,
            a,
            y,
            partial_ds,
            dlogits,
            partial_dw,
            scaled_a,
            dx_rows,
        }
    }
}

impl MoeLayer {
    /// Chooses, compiles and loads the layer's kernels. `progress(done, of)` after each.
    pub fn new(
        compiler: &Compiler,
        desc: MoeDesc,
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<MoeLayer, LayerError> {
        let arch = Arch::for_elements(compiler.gpu(), desc.element)?;
        MoeLayer::with_configs(compiler, desc, configs(arch, &desc), progress)
    }

    /// The configurations that [`MoeLayer::new`] takes for `desc`, in launch order: logits, up,
    /// down, dh, dx, dw_up, dw_down, dx_router, dw_router.
    pub fn configs(arch: Arch, desc: &MoeDesc) -> [GemmConfig; 9] {
        configs(arch, desc)
    }

    /// Columns and reduction of each of them, the key of the table of tiles.
    pub fn sizes(desc: &MoeDesc) -> [(usize, usize); 9] {
        sizes(desc).map(|(_, size)| size)
    }

    /// As [`MoeLayer::new`] with the caller's tiles: for tests and for the search of better ones.
    pub fn with_configs(
        compiler: &Compiler,
        desc: MoeDesc,
        configs: [GemmConfig; 9],
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<MoeLayer, LayerError> {
        desc.check()?;
        let gpu = compiler.gpu();
        let (route, target) = (desc.route(), configs[0].arch.target());
        let mut sources: Vec<_> = configs.iter().map(GemmConfig::source).collect();
        sources.push(route.rows_source(target));
        sources.extend((!desc.part).then(|| route.source(target)));
        let modules = compiler.load(&sources, progress)?;
        let gemm = |i: usize| Gemm::new(gpu, configs[i], &modules[i]);
        let chunks = router_chunks(&desc, configs[DW_ROUTER].block_n);
        let (tables, [all_tokens, chunk_offsets, chunk_order]) = tables(compiler, &desc, chunks)?;
        let ds_parts = desc.hidden.div_ceil(configs[DH].block_n);
        Ok(MoeLayer {
            desc,
            plan: Workspace::new(&desc, ds_parts, chunks),
            router: Router::new(route, modules.get(10), &modules[9])?,
            logits: gemm(LOGITS)?,
            up: gemm(UP)?,
            down: gemm(DOWN)?,
            dh: gemm(DH)?,
            dx: gemm(DX)?,
            dw_up: gemm(DW_UP)?,
            dw_down: gemm(DW_DOWN)?,
            dx_router: gemm(DX_ROUTER)?,
            dw_router: gemm(DW_ROUTER)?,
            tables,
            all_tokens,
            chunk_offsets,
            chunk_order,
            chunks,
        })
    }

    pub fn desc(&self) -> &MoeDesc {
        &self.desc
    }

    /// From now on the experts' products leave `free` multiprocessors to kernels of other streams.
    pub(crate) fn leave_free(&mut self, free: usize) {
        let MoeLayer { up, down, dh, dx, dw_up, dw_down, .. } = self;
        for product in [up, down, dh, dx, dw_up, dw_down] {
            product.leave_free(free);
        }
    }

    /// Bytes of the workspace that all layers of a device can share.
    pub fn workspace_bytes(&self) -> usize {
        self.plan.bytes
    }

    /// Reserves what one layer keeps from forward to backward.
    pub fn plan_saved(&self, plan: &mut ArenaPlan) -> Saved {
        let MoeDesc { tokens, dim, experts, element, segments, .. } = self.desc;
        let halves = if element == DType::F32 { 0 } else { 2 };
        let (rows, slots) = (self.desc.rows(), self.desc.slots());
        Saved {
            h: plan.alloc(element, rows * self.desc.width()),
            a: plan.alloc(element, 0),
            logits: plan.alloc(DType::F32, tokens * experts),
            probs: plan.alloc(DType::F32, 0),
            lse: plan.alloc(DType::F32, tokens),
            ids: plan.alloc(DType::U32, slots),
            weights: plan.alloc(DType::F32, slots),
            counts: plan.alloc(DType::U32, experts),
            offsets: plan.alloc(DType::U32, experts + 1),
            order: plan.alloc(DType::U32, experts),
            rows: plan.alloc(DType::U32, rows),
            pos: plan.alloc(DType::U32, slots),
            row_weights: plan.alloc(DType::F32, rows),
            segment_counts: plan.alloc(DType::U32, segments * experts),
            prob_sums: plan.alloc(DType::F64, segments * experts),
            losses: plan.alloc(DType::F64, 2),
            router_halves: plan.alloc(element, halves * experts * dim),
        }
    }

    /// `out` [T, D] = the layer of `tensors.x`; fills `tensors.saved`.
    pub fn forward(
        &self,
        stream: &Stream,
        arena: &Arena,
        tensors: &MoeTensors,
        out: Buffer,
    ) -> Result<(), CudaError> {
        self.forward_observed(stream, arena, tensors, out, &mut |_| Ok(()))
    }

    /// [`MoeLayer::forward`] that calls `after` with each stage's name once it is enqueued.
    pub fn forward_observed(
        &self,
        stream: &Stream,
        arena: &Arena,
        tensors: &MoeTensors,
        out: Buffer,
        after: &mut Observer<'_>,
    ) -> Result<(), CudaError> {
        let call = Call::new(self, stream, arena, tensors);
        call.logits()?;
        after("logits")?;
        self.router.choose(stream, &call.route)?;
        after("choose")?;
        self.router.place(stream, &call.route)?;
        after("place")?;
        call.up(call.at(self.plan.a))?;
        after("up")?;
        let passes = self.desc.down_passes();
        for pass in 0..passes {
            let cols = self.desc.dim / passes;
            call.down(pass * cols, cols)?;
            after("down")?;
            call.combine(out, pass * cols, cols)?;
            after("combine")?;
        }
        Ok(())
    }

    /// H again, from x and the routing that the forward left.
    pub fn hidden_again(
        &self,
        stream: &Stream,
        arena: &Arena,
        tensors: &MoeTensors,
    ) -> Result<(), CudaError> {
        Call::new(self, stream, arena, tensors).up(0)
    }

    /// From `dout` [T, D]: `dx` [T, D] and the gradients. `tensors` are those of the forward, whose
    /// H becomes dH.
    pub fn backward(
        &self,
        stream: &Stream,
        arena: &Arena,
        tensors: &MoeTensors,
        dout: Buffer,
        dx: Buffer,
        gradients: &Gradients,
    ) -> Result<(), CudaError> {
        self.backward_observed(stream, arena, tensors, (dout, dx), gradients, &mut |_| Ok(()))
    }

    /// [`MoeLayer::backward`] that calls `after` with each stage's name once it is enqueued.
    pub fn backward_observed(
        &self,
        stream: &Stream,
        arena: &Arena,
        tensors: &MoeTensors,
        (dout, dx): (Buffer, Buffer),
        gradients: &Gradients,
        after: &mut Observer<'_>,
    ) -> Result<(), CudaError> {
        let call = Call::new(self, stream, arena, tensors);
        let dlogits = call.at(self.plan.dlogits);
        let partial_ds = call.at(self.plan.partial_ds);
        let ds_parts = self.desc.hidden.div_ceil(self.dh.config.block_n);
        call.dh(dout)?;
        after("dh")?;
        let coefs = (self.desc.aux_coef, self.desc.z_coef);
        let loss_scale = call.loss_scale();
        let parts = (partial_ds, ds_parts);
        self.router.backward(stream, &call.route, parts, (coefs, loss_scale), dlogits)?;
        after("dlogits")?;
        call.dw_down(dout, gradients)?;
        after("dw_down")?;
        call.dx_router(dx)?;
        after("dx_router")?;
        call.dx_rows()?;
        after("dx_rows")?;
        call.sum_dx(dx)?;
        after("sum_dx")?;
        call.dw_up(gradients)?;
        after("dw_up")?;
        call.dw_router(gradients)?;
        after("dw_router")
    }
}

/// Columns and reduction of the products, in the order of `configs`; of weight gradients the mean
/// of an expert's rows.
fn sizes(desc: &MoeDesc) -> [(ProductOp, (usize, usize)); 9] {
    use ProductOp::{HiddenGradient, InputGradient, Logits, Rows, Up, WeightGradient};
    let MoeDesc { tokens, dim, hidden, experts, .. } = *desc;
    let (width, rows) = (desc.width(), desc.rows() / experts);
    [
        (Logits, (experts, dim)),
        (Up, (hidden, dim)),
        (Rows, (dim / desc.down_passes(), hidden)),
        (HiddenGradient, (hidden, dim)),
        (InputGradient, (dim, width)),
        (WeightGradient, (width, rows)),
        (WeightGradient, (hidden, rows)),
        (InputGradient, (dim, experts)),
        (WeightGradient, (experts, tokens)),
    ]
}

fn configs(arch: Arch, desc: &MoeDesc) -> [GemmConfig; 9] {
    let mut all = sizes(desc).map(|(op, size)| GemmConfig::choose(arch, op, size, desc.gated));
    for at in [UP, DH] {
        all[at].gated = desc.gated;
        all[at].activation = desc.activation as usize;
    }
    for (at, transposed, output) in [
        (LOGITS, false, Output::F32),
        (DW_UP, true, desc.weight_gradients),
        (DW_DOWN, false, desc.weight_gradients),
        (DW_ROUTER, true, Output::F32),
    ] {
        (all[at].transposed, all[at].output) = (transposed, output);
    }
    all[DW_ROUTER].indexed = false;
    all.iter_mut().for_each(|config| config.element = desc.element);
    all.map(|config| config.fitting(desc.experts))
}

/// Parts of the sum over tokens in dWr: enough tiles for every multiprocessor of an H200, and no
/// part shorter than eight steps of the reduction. Independent of the device, so that the bits are.
fn router_chunks(desc: &MoeDesc, block_n: usize) -> usize {
    let tiles = desc.dim.div_ceil(256) * desc.experts.div_ceil(block_n);
    (132_usize / 2 / tiles).clamp(1, desc.tokens.div_ceil(512))
}

fn tables(
    compiler: &Compiler,
    desc: &MoeDesc,
    chunks: usize,
) -> Result<(Arena, [Buffer; 3]), CudaError> {
    let mut plan = ArenaPlan::new();
    let all_tokens = plan.alloc(DType::U32, 2);
    let chunk_offsets = plan.alloc(DType::U32, chunks + 1);
    let chunk_order = plan.alloc(DType::U32, chunks);
    let arena = Arena::new(compiler.gpu(), plan.bytes())?;
    let tokens = desc.tokens;
    arena.write(all_tokens, &[0, tokens as u32])?;
    let offsets: Vec<u32> = (0..=chunks).map(|i| (i * tokens / chunks) as u32).collect();
    arena.write(chunk_offsets, &offsets)?;
    arena.write(chunk_order, &(0..chunks as u32).collect::<Vec<_>>())?;
    Ok((arena, [all_tokens, chunk_offsets, chunk_order]))
}
