//! A mixture-of-experts layer, router included: forward and backward as fixed lists of launches.
//!
//! ```text
//! forward    split, logits = x Wr^T -> choose -> scan, place -> up (gather) -> down -> combine
//! backward   dh (gather) -> dlogits -> dW2 -> dx of the router -> dx rows -> sum -> dW1 -> dWr
//! ```
//! Between the two lie x, H and the router's small tables; dH takes the place of H. What else is
//! needed for a moment lies in one workspace that all layers share.

use super::arch::Arch;
use super::call::Call;
use super::compile::Compiler;
use super::driver::{Arena, Stream};
use super::error::CudaError;
use super::gemm::{Gemm, GemmConfig, Output, ProductOp};
use super::route::Router;
use super::shape::{MoeDesc, Refusal};
use crate::buffer::{ArenaPlan, Buffer, DType};

/// Why a layer could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("the layer's shape")]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

impl LayerError {
    /// What the GPU's side says, if it is that.
    pub fn of_gpu(&self) -> Option<&CudaError> {
        match self {
            LayerError::Refused(_) => None,
            LayerError::Cuda(error) => Some(error),
        }
    }
}

/// The experts' matrices in one buffer, as a bucket holds them: expert e's starts at e * `stride`.
#[derive(Clone, Copy, Debug)]
pub struct Stacked {
    pub buffer: Buffer,
    /// Elements from one expert's first to the next's: at least a matrix, and on a GPU a multiple
    /// of 32 of its rows. What lies between is neither read nor written.
    pub stride: usize,
    /// Elements between the last of a gate and the first of its up; on a GPU none.
    pub gap: usize,
}

impl Stacked {
    /// `experts` matrices that follow each other.
    pub fn dense(buffer: Buffer, experts: usize) -> Stacked {
        Stacked { buffer, stride: buffer.len() / experts, gap: 0 }
    }

    /// Checks that `experts` matrices of `size` elements of `dtype` are there.
    pub(crate) fn check(&self, dtype: DType, experts: usize, size: usize) {
        let size = size + self.gap;
        let ends = self.stride * (experts - 1) + size;
        let right = self.buffer.dtype() == dtype && self.buffer.len() >= ends;
        assert!(right && self.stride >= size, "{self:?} of {experts} x {size} {dtype:?}");
    }
}

/// Weights; the experts' are elements (`MoeDesc::element`).
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// f32 [E, D]
    pub router: Buffer,
    /// f32 [E], added to the scores for the choice of experts alone
    pub bias: Option<Buffer>,
    /// E of [W, D], gate rows before up rows
    pub up: Stacked,
    /// E of [D, F]
    pub down: Stacked,
}

/// Gradients of [`Weights`]; the experts' as `weight_gradients` says.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// f32 [E, D]
    pub router: Buffer,
    pub up: Stacked,
    pub down: Stacked,
    /// The experts' are added to what is there, else written. Elements of 16 bits are rounded,
    /// added, rounded again
    pub accumulate: bool,
    /// The same of the router's
    pub accumulate_router: bool,
}

/// What a layer keeps from its forward to its backward, beside x. On a CPU all floats are of one
/// kind; `order` and `router_halves` are empty.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
    /// elements [R, W]; backward leaves dH here
    pub h: Buffer,
    /// On a CPU alone, else empty: A [R, F]
    pub a: Buffer,
    /// f32 [T, E]
    pub logits: Buffer,
    /// On a CPU alone, else empty: scores [T, E]
    pub probs: Buffer,
    /// f32 [T]
    pub lse: Buffer,
    /// u32 [T, K], ascending
    pub ids: Buffer,
    /// f32 [T, K]
    pub weights: Buffer,
    /// u32 [E]
    pub counts: Buffer,
    /// u32 [E + 1]
    pub offsets: Buffer,
    /// u32 [E], heaviest first; on a CPU empty
    pub order: Buffer,
    /// u32 [R]: token of each row
    pub rows: Buffer,
    /// u32 [T, K]: row of each slot
    pub pos: Buffer,
    /// f32 [R]
    pub row_weights: Buffer,
    /// u32 [segments, E]
    pub segment_counts: Buffer,
    /// f64 [segments, E]
    pub prob_sums: Buffer,
    /// f64 [2]: auxiliary and z loss, unscaled
    pub losses: Buffer,
    /// elements [2 E, D]: the router's weights rounded, then what rounding took; in fp32 none
    pub router_halves: Buffer,
}

/// All buffers of a call.
#[derive(Clone, Copy, Debug)]
pub struct MoeTensors {
    /// elements [T, D]
    pub x: Buffer,
    /// elements [T, D]: added to what the forward puts out
    pub residual: Option<Buffer>,
    pub weights: Weights,
    pub saved: Saved,
    /// `MoeLayer::workspace_bytes` of U8
    pub workspace: Buffer,
    /// F32 [1], on the device: what `dout` was multiplied by, and what the layer's own losses are
    /// to be multiplied by beside it; none is 1
    pub loss_scale: Option<Buffer>,
    /// U32 [S + 1]: where the tokens of each source begin; None: the desc's sources have equally
    /// many
    pub starts: Option<Buffer>,
}

/// One layer's kernels.
#[derive(Debug)]
pub struct MoeLayer {
    pub(super) desc: MoeDesc,
    pub(super) plan: Workspace,
    pub(super) router: Router,
    pub(super) logits: Gemm,
    pub(super) up: Gemm,
    pub(super) down: Gemm,
    pub(super) dh: Gemm,
    pub(super) dx: Gemm,
    pub(super) dw_up: Gemm,
    pub(super) dw_down: Gemm,
    pub(super) dx_router: Gemm,
    pub(super) dw_router: Gemm,
    /// Offsets of one group of all tokens, then of the chunks of dWr, then those chunks' order.
    pub(super) tables: Arena,
    pub(super) all_tokens: Buffer,
    pub(super) chunk_offsets: Buffer,
    pub(super) chunk_order: Buffer,
    pub(super) chunks: usize,
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
pub(super) struct Workspace {
    pub(super) bytes: usize,
    /// Forward: f32 partial statistics, u32 histogram, then elements A [R, F] and Y [R, D / passes]
    pub(super) partials: Buffer,
    pub(super) histogram: Buffer,
    pub(super) a: Buffer,
    pub(super) y: Buffer,
    /// Backward: f32 partial ds [R, parts], elements dlogits [T, pitch], f32 partial dWr
    /// [chunks, E, D],
    /// then elements s * A [R, F] and later dX rows [R, D] in its place
    pub(super) partial_ds: Buffer,
    pub(super) dlogits: Buffer,
    pub(super) partial_dw: Buffer,
    pub(super) scaled_a: Buffer,
    pub(super) dx_rows: Buffer,
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
    pub(super) fn leave_free(&mut self, free: usize) {
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
