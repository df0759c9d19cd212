//! A mixture-of-experts layer, router included: forward and backward as fixed lists of launches.
//!
//! ```text
//! forward    logits = x Wr^T -> choose -> histogram, scan, place -> up (gather) -> down -> combine
//! backward   dh (gather) -> dlogits -> dW2 -> dx of the router -> dx rows -> sum -> dW1 -> dWr
//! ```
//! Between the two lie x, H and the router's small tables; dH takes the place of H. What else is
//! needed for a moment lies in one workspace that all layers share.

use super::compile::Compiler;
use super::driver::{Arena, Stream};
use super::error::CudaError;
use super::gemm::{Arch, Gemm, GemmArgs, GemmConfig, Output, ProductOp};
use super::route::{CombineCall, RouteBuffers, Router};
use super::shape::{MoeDesc, Refusal};
use super::tensor_map::Matrix;
use crate::buffer::{ArenaPlan, Buffer, DType};

/// Why a layer could not be made.
#[derive(Debug, thiserror::Error)]
pub enum LayerError {
    #[error("the layer's shape")]
    Refused(#[from] Refusal),
    #[error(transparent)]
    Cuda(#[from] CudaError),
}

/// bf16 weights, each expert's after the other's.
#[derive(Clone, Copy, Debug)]
pub struct Weights {
    /// [E, D]
    pub router: Buffer,
    /// [E, W, D], gate rows before up rows
    pub up: Buffer,
    /// [E, D, F]
    pub down: Buffer,
}

/// Gradients of [`Weights`]; the experts' as `weight_gradients` says.
#[derive(Clone, Copy, Debug)]
pub struct Gradients {
    /// f32 [E, D], added to under `F32Accumulate`, else written
    pub router: Buffer,
    pub up: Buffer,
    pub down: Buffer,
}

/// What a layer keeps from its forward to its backward, beside x.
#[derive(Clone, Copy, Debug)]
pub struct Saved {
    /// bf16 [R, W]; backward leaves dH here
    pub h: Buffer,
    /// f32 [T, E]
    pub logits: Buffer,
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
    /// u32 [E], heaviest first
    pub order: Buffer,
    /// u32 [R]: token of each row
    pub rows: Buffer,
    /// u32 [T, K]: row of each slot
    pub pos: Buffer,
    /// f32 [R]
    pub row_weights: Buffer,
    /// f64 [E]
    pub prob_sums: Buffer,
    /// f64 [2]: auxiliary and z loss, unscaled
    pub losses: Buffer,
}

/// All buffers of a call.
#[derive(Clone, Copy, Debug)]
pub struct MoeTensors {
    /// bf16 [T, D]
    pub x: Buffer,
    pub weights: Weights,
    pub saved: Saved,
    /// `MoeLayer::workspace_bytes` of U8
    pub workspace: Buffer,
}

/// One layer's kernels.
#[derive(Debug)]
pub struct MoeLayer {
    desc: MoeDesc,
    plan: Workspace,
    router: Router,
    logits: Gemm,
    up: Gemm,
    down: Gemm,
    dh: Gemm,
    dx: Gemm,
    dw_up: Gemm,
    dw_down: Gemm,
    dx_router: Gemm,
    dw_router: Gemm,
    /// Offsets of one group of all tokens, then of the chunks of dWr, then those chunks' order.
    tables: Arena,
    all_tokens: Buffer,
    chunk_offsets: Buffer,
    chunk_order: Buffer,
    chunks: usize,
}

/// What is told of each stage, such as to record an event.
pub type Observer<'a> = dyn FnMut(&'static str) -> Result<(), CudaError> + 'a;

/// Ranges of the workspace, reused from phase to phase.
#[derive(Clone, Copy, Debug)]
struct Workspace {
    bytes: usize,
    /// Forward: f32 partial statistics, u32 histogram, then bf16 A [R, F] and Y [R, D / passes]
    partials: Buffer,
    histogram: Buffer,
    a: Buffer,
    y: Buffer,
    /// Backward: f32 partial ds [R, parts], bf16 dlogits [T, pitch], f32 partial dWr
    /// [chunks, E, D],
    /// then bf16 s * A [R, F] and later dX rows [R, D] in its place
    partial_ds: Buffer,
    dlogits: Buffer,
    partial_dw: Buffer,
    scaled_a: Buffer,
    dx_rows: Buffer,
}

impl Workspace {
    fn new(desc: &MoeDesc, ds_parts: usize, chunks: usize) -> Workspace {
        let (route, rows) = (desc.route(), desc.rows());
        let mut forward = ArenaPlan::new();
        let partials = forward.alloc(DType::F32, route.choose_blocks() * (desc.experts + 1));
        let histogram = forward.alloc(DType::U32, desc.experts * route.place_blocks());
        let a = forward.alloc(DType::Bf16, rows * desc.hidden);
        let y = forward.alloc(DType::Bf16, rows * desc.dim / desc.down_passes());
        let mut backward = ArenaPlan::new();
        let partial_ds = backward.alloc(DType::F32, rows * ds_parts);
        let dlogits = backward.alloc(DType::Bf16, desc.tokens * route.dlogits_pitch());
        let partial_dw = backward.alloc(DType::F32, chunks * desc.experts * desc.dim);
        let mut last = backward.clone();
        let scaled_a = backward.alloc(DType::Bf16, rows * desc.hidden);
        let dx_rows = last.alloc(DType::Bf16, rows * desc.dim);
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
        let arch = Arch::of(compiler.gpu())?;
        MoeLayer::with_configs(compiler, desc, configs(arch, &desc), progress)
    }

    /// The configurations that [`MoeLayer::new`] takes for `desc`, in launch order: logits, up,
    /// down, dh, dx, dw_up, dw_down, dx_router, dw_router.
    pub fn configs(arch: Arch, desc: &MoeDesc) -> [GemmConfig; 9] {
        configs(arch, desc)
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
        sources.push(route.source(target));
        sources.push(route.rows_source(target));
        let modules = compiler.load(&sources, progress)?;
        let gemm = |i: usize| Gemm::new(gpu, configs[i], &modules[i]);
        let chunks = router_chunks(&desc, configs[8].block_n);
        let (tables, [all_tokens, chunk_offsets, chunk_order]) = tables(compiler, &desc, chunks)?;
        let ds_parts = desc.hidden.div_ceil(configs[3].block_n);
        Ok(MoeLayer {
            desc,
            plan: Workspace::new(&desc, ds_parts, chunks),
            router: Router::new(route, &modules[9], &modules[10])?,
            logits: gemm(0)?,
            up: gemm(1)?,
            down: gemm(2)?,
            dh: gemm(3)?,
            dx: gemm(4)?,
            dw_up: gemm(5)?,
            dw_down: gemm(6)?,
            dx_router: gemm(7)?,
            dw_router: gemm(8)?,
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

    /// Bytes of the workspace that all layers of a device can share.
    pub fn workspace_bytes(&self) -> usize {
        self.plan.bytes
    }

    /// Reserves what one layer keeps from forward to backward.
    pub fn plan_saved(&self, plan: &mut ArenaPlan) -> Saved {
        let MoeDesc { tokens, experts, .. } = self.desc;
        let rows = self.desc.rows();
        Saved {
            h: plan.alloc(DType::Bf16, rows * self.desc.width()),
            logits: plan.alloc(DType::F32, tokens * experts),
            lse: plan.alloc(DType::F32, tokens),
            ids: plan.alloc(DType::U32, rows),
            weights: plan.alloc(DType::F32, rows),
            counts: plan.alloc(DType::U32, experts),
            offsets: plan.alloc(DType::U32, experts + 1),
            order: plan.alloc(DType::U32, experts),
            rows: plan.alloc(DType::U32, rows),
            pos: plan.alloc(DType::U32, rows),
            row_weights: plan.alloc(DType::F32, rows),
            prob_sums: plan.alloc(DType::F64, experts),
            losses: plan.alloc(DType::F64, 2),
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
        call.up()?;
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
        self.router.backward(stream, &call.route, (partial_ds, ds_parts), coefs, dlogits)?;
        after("dlogits")?;
        call.dw_down(dout, gradients.down)?;
        after("dw_down")?;
        call.dx_router(dx)?;
        after("dx_router")?;
        call.dx_rows()?;
        after("dx_rows")?;
        call.sum_dx(dx)?;
        after("sum_dx")?;
        call.dw_up(gradients.up)?;
        after("dw_up")?;
        call.dw_router(gradients.router)?;
        after("dw_router")
    }
}

fn configs(arch: Arch, desc: &MoeDesc) -> [GemmConfig; 9] {
    use ProductOp::{HiddenGradient, InputGradient, Logits, Rows, Up, WeightGradient};
    let MoeDesc { dim, hidden, experts, .. } = *desc;
    let width = desc.width();
    let choose = |op, cols| GemmConfig::choose(arch, op, cols);
    let expert = |config: GemmConfig| GemmConfig {
        gated: desc.gated,
        activation: desc.activation as usize,
        ..config
    };
    let gradient =
        |config: GemmConfig, transposed, output| GemmConfig { transposed, output, ..config };
    let output = desc.weight_gradients;
    [
        gradient(choose(Logits, experts), false, Output::F32),
        expert(choose(Up, hidden)),
        choose(Rows, dim / desc.down_passes()),
        expert(choose(HiddenGradient, hidden)),
        choose(InputGradient, dim),
        gradient(choose(WeightGradient, width), true, output),
        gradient(choose(WeightGradient, hidden), false, output),
        choose(InputGradient, dim),
        GemmConfig {
            indexed: false,
            ..gradient(choose(WeightGradient, experts), true, Output::F32)
        },
    ]
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

/// One pass over a layer: the addresses, and a method for each launch.
struct Call<'a> {
    layer: &'a MoeLayer,
    stream: &'a Stream,
    arena: &'a Arena,
    tensors: &'a MoeTensors,
    route: RouteBuffers,
}

impl<'a> Call<'a> {
    fn new(
        layer: &'a MoeLayer,
        stream: &'a Stream,
        arena: &'a Arena,
        tensors: &'a MoeTensors,
    ) -> Call<'a> {
        let bytes = tensors.workspace.bytes();
        assert!(bytes >= layer.plan.bytes, "a workspace of {bytes}, needed {}", layer.plan.bytes);
        let saved = &tensors.saved;
        let workspace = arena.address(tensors.workspace);
        let route = RouteBuffers {
            logits: arena.address(saved.logits),
            lse: arena.address(saved.lse),
            ids: arena.address(saved.ids),
            weights: arena.address(saved.weights),
            partials: workspace + layer.plan.partials.offset() as u64,
            histogram: workspace + layer.plan.histogram.offset() as u64,
            counts: arena.address(saved.counts),
            offsets: arena.address(saved.offsets),
            order: arena.address(saved.order),
            rows: arena.address(saved.rows),
            pos: arena.address(saved.pos),
            row_weights: arena.address(saved.row_weights),
            prob_sums: arena.address(saved.prob_sums),
            losses: arena.address(saved.losses),
        };
        Call { layer, stream, arena, tensors, route }
    }

    fn desc(&self) -> &MoeDesc {
        &self.layer.desc
    }

    /// The address of a range of the workspace.
    fn at(&self, range: Buffer) -> u64 {
        self.arena.address(self.tensors.workspace) + range.offset() as u64
    }

    fn matrix(&self, address: u64, rows: usize, cols: usize) -> Matrix {
        Matrix { address, rows, cols }
    }

    fn buffer(&self, buffer: Buffer, rows: usize, cols: usize) -> Matrix {
        assert_eq!((buffer.dtype(), buffer.len()), (DType::Bf16, rows * cols), "{buffer:?}");
        self.matrix(self.arena.address(buffer), rows, cols)
    }

    fn x(&self) -> Matrix {
        self.buffer(self.tensors.x, self.desc().tokens, self.desc().dim)
    }

    fn h(&self) -> Matrix {
        self.buffer(self.tensors.saved.h, self.desc().rows(), self.desc().width())
    }

    fn w_up(&self) -> Matrix {
        let MoeDesc { experts, dim, .. } = *self.desc();
        self.buffer(self.tensors.weights.up, experts * self.desc().width(), dim)
    }

    /// [E D, F]
    fn w_down(&self) -> Matrix {
        let MoeDesc { experts, dim, hidden, .. } = *self.desc();
        self.buffer(self.tensors.weights.down, experts * dim, hidden)
    }

    fn w_router(&self) -> Matrix {
        self.buffer(self.tensors.weights.router, self.desc().experts, self.desc().dim)
    }

    fn dlogits(&self) -> Matrix {
        let address = self.at(self.layer.plan.dlogits);
        self.matrix(address, self.desc().tokens, self.desc().route().dlogits_pitch())
    }

    /// What every product over the experts' rows has in common.
    fn experts_args(&self) -> GemmArgs {
        GemmArgs {
            index: self.route.rows,
            offsets: self.route.offsets,
            order: self.route.order,
            row_scale: self.route.row_weights,
            groups: self.desc().experts as i32,
            ..GemmArgs::default()
        }
    }

    fn all_tokens_args(&self) -> GemmArgs {
        let offsets = self.layer.tables.address(self.layer.all_tokens);
        GemmArgs { offsets, groups: 1, ..GemmArgs::default() }
    }

    fn logits(&self) -> Result<(), CudaError> {
        let MoeDesc { dim, experts, .. } = *self.desc();
        let args = GemmArgs {
            out_f32: self.route.logits,
            depth: dim as i32,
            cols: experts as i32,
            weight_rows: experts as i32,
            out_pitch: experts as i32,
            ..self.all_tokens_args()
        };
        self.layer.logits.launch(self.stream, self.x(), self.w_router(), args)
    }

    fn up(&self) -> Result<(), CudaError> {
        let MoeDesc { dim, hidden, .. } = *self.desc();
        let width = self.desc().width() as i32;
        let args = GemmArgs {
            gathered: self.x().address,
            out: self.h().address,
            out_activation: self.at(self.layer.plan.a),
            depth: dim as i32,
            cols: hidden as i32,
            gathered_pitch: dim as i32,
            weight_rows: width,
            out_pitch: width,
            ..self.experts_args()
        };
        self.layer.up.launch(self.stream, self.x(), self.w_up(), args)
    }

    /// Y, columns first .. first + cols of D, as a matrix of its own.
    fn down(&self, first: usize, cols: usize) -> Result<(), CudaError> {
        let MoeDesc { dim, hidden, .. } = *self.desc();
        let a = self.matrix(self.at(self.layer.plan.a), self.desc().rows(), hidden);
        let args = GemmArgs {
            out: self.at(self.layer.plan.y),
            depth: hidden as i32,
            cols: cols as i32,
            weight_rows: dim as i32,
            first_col: first as i32,
            out_pitch: cols as i32,
            ..self.experts_args()
        };
        self.layer.down.launch(self.stream, a, self.w_down(), args)
    }

    fn combine(&self, out: Buffer, first: usize, cols: usize) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, .. } = *self.desc();
        let call = CombineCall {
            y: self.at(self.layer.plan.y),
            pos: self.route.pos,
            weights: self.route.weights,
            base: 0,
            out: self.buffer(out, tokens, dim).address,
            cols,
            out_pitch: dim,
            out_first: first,
        };
        self.layer.router.combine(self.stream, call)
    }

    fn dh(&self, dout: Buffer) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, hidden, .. } = *self.desc();
        let dout = self.buffer(dout, tokens, dim);
        let args = GemmArgs {
            gathered: dout.address,
            out: self.h().address,
            out_activation: self.at(self.layer.plan.scaled_a),
            out_f32: self.at(self.layer.plan.partial_ds),
            depth: dim as i32,
            cols: hidden as i32,
            gathered_pitch: dim as i32,
            out_pitch: self.desc().width() as i32,
            ..self.experts_args()
        };
        self.layer.dh.launch(self.stream, dout, self.w_down(), args)
    }

    fn dw_down(&self, dout: Buffer, into: Buffer) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, hidden, .. } = *self.desc();
        let dout = self.buffer(dout, tokens, dim);
        let a = self.matrix(self.at(self.layer.plan.scaled_a), self.desc().rows(), hidden);
        let args =
            GemmArgs { gathered: dout.address, ..self.weight_gradient(hidden, hidden, into) };
        self.layer.dw_down.launch(self.stream, dout, a, args)
    }

    fn dw_up(&self, into: Buffer) -> Result<(), CudaError> {
        let width = self.desc().width();
        let args = GemmArgs {
            gathered: self.x().address,
            ..self.weight_gradient(width, self.desc().dim, into)
        };
        self.layer.dw_up.launch(self.stream, self.x(), self.h(), args)
    }

    /// `cols` of the operand that is not gathered; `pitch` of the stored gradient.
    fn weight_gradient(&self, cols: usize, pitch: usize, into: Buffer) -> GemmArgs {
        let MoeDesc { experts, dim, .. } = *self.desc();
        let dtype = match self.desc().weight_gradients {
            Output::Bf16 => DType::Bf16,
            Output::F32Accumulate | Output::F32 => DType::F32,
        };
        assert_eq!((into.dtype(), into.len()), (dtype, experts * dim * cols), "{into:?}");
        GemmArgs {
            out: self.arena.address(into),
            out_f32: self.arena.address(into),
            cols: cols as i32,
            gathered_pitch: dim as i32,
            out_pitch: pitch as i32,
            ..self.experts_args()
        }
    }

    /// dx = dlogits Wr, the router's part; the experts' is added to it.
    fn dx_router(&self, dx: Buffer) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, experts, .. } = *self.desc();
        let args = GemmArgs {
            out: self.buffer(dx, tokens, dim).address,
            depth: experts as i32,
            cols: dim as i32,
            out_pitch: dim as i32,
            ..self.all_tokens_args()
        };
        self.layer.dx_router.launch(self.stream, self.dlogits(), self.w_router(), args)
    }

    fn dx_rows(&self) -> Result<(), CudaError> {
        let args = GemmArgs {
            out: self.at(self.layer.plan.dx_rows),
            depth: self.desc().width() as i32,
            cols: self.desc().dim as i32,
            out_pitch: self.desc().dim as i32,
            ..self.experts_args()
        };
        self.layer.dx.launch(self.stream, self.h(), self.w_up(), args)
    }

    fn sum_dx(&self, dx: Buffer) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, .. } = *self.desc();
        let dx = self.buffer(dx, tokens, dim).address;
        let call = CombineCall {
            y: self.at(self.layer.plan.dx_rows),
            pos: self.route.pos,
            weights: 0,
            base: dx,
            out: dx,
            cols: dim,
            out_pitch: dim,
            out_first: 0,
        };
        self.layer.router.combine(self.stream, call)
    }

    fn dw_router(&self, into: Buffer) -> Result<(), CudaError> {
        let MoeDesc { dim, experts, .. } = *self.desc();
        assert_eq!((into.dtype(), into.len()), (DType::F32, experts * dim), "{into:?}");
        let partials = self.at(self.layer.plan.partial_dw);
        let args = GemmArgs {
            gathered: self.x().address,
            offsets: self.layer.tables.address(self.layer.chunk_offsets),
            order: self.layer.tables.address(self.layer.chunk_order),
            out_f32: partials,
            groups: self.layer.chunks as i32,
            cols: experts as i32,
            gathered_pitch: dim as i32,
            out_pitch: dim as i32,
            ..GemmArgs::default()
        };
        self.layer.dw_router.launch(self.stream, self.x(), self.dlogits(), args)?;
        let accumulate = self.desc().weight_gradients == Output::F32Accumulate;
        let into = self.arena.address(into);
        let parts = (partials, self.layer.chunks);
        self.layer.router.sum_parts(self.stream, parts, experts * dim, accumulate, into)
    }
}
