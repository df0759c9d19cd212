//! One pass over a layer: the addresses of its operands and a method for each launch.

use crate::buffer::{Buffer, DType};
use crate::cuda::driver::{Arena, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::gemm::GemmArgs;
use crate::cuda::tensor_map::Matrix;
use crate::ops::mixture::desc::{Gradients, MoeDesc, MoeTensors, Stacked};
use crate::ops::mixture::layer::MoeLayer;
use crate::ops::mixture::op::Each;
use crate::ops::mixture::route::{CombineCall, RouteBuffers};
use crate::types::Output;

pub(crate) struct Call<'a> {
    layer: &'a MoeLayer,
    stream: &'a Stream,
    arena: &'a Arena,
    tensors: &'a MoeTensors,
    pub(crate) route: RouteBuffers,
}

impl<'a> Call<'a> {
    pub(crate) fn new(
        layer: &'a MoeLayer,
        stream: &'a Stream,
        arena: &'a Arena,
        tensors: &'a MoeTensors,
    ) -> Call<'a> {
        let bytes = tensors.workspace.bytes();
        assert!(bytes >= layer.plan.bytes, "a workspace of {bytes}, needed {}", layer.plan.bytes);
        let bias = tensors.weights.bias;
        let fits = |bias: Buffer| (bias.dtype(), bias.len()) == (DType::F32, layer.desc.experts);
        assert!(bias.is_none_or(fits), "{bias:?}");
        let saved = &tensors.saved;
        let workspace = arena.address(tensors.workspace);
        let route = RouteBuffers {
            logits: arena.address(saved.logits),
            bias: bias.map_or(0, |bias| arena.address(bias)),
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
            segment_counts: arena.address(saved.segment_counts),
            prob_sums: arena.address(saved.prob_sums),
            losses: arena.address(saved.losses),
        };
        Call { layer, stream, arena, tensors, route }
    }

    pub(crate) fn desc(&self) -> &MoeDesc {
        &self.layer.desc
    }

    /// The address of a range of the workspace.
    pub(crate) fn at(&self, range: Buffer) -> u64 {
        self.arena.address(self.tensors.workspace) + range.offset() as u64
    }

    pub(crate) fn matrix(&self, address: u64, rows: usize, cols: usize) -> Matrix {
        Matrix { address, rows, cols }
    }

    pub(crate) fn buffer(&self, buffer: Buffer, rows: usize, cols: usize) -> Matrix {
        let expected = (self.desc().element, rows * cols);
        assert_eq!((buffer.dtype(), buffer.len()), expected, "{buffer:?}");
        self.matrix(self.arena.address(buffer), rows, cols)
    }

    pub(crate) fn x(&self) -> Matrix {
        self.buffer(self.tensors.x, self.desc().tokens, self.desc().dim)
    }

    pub(crate) fn h(&self) -> Matrix {
        self.buffer(self.tensors.saved.h, self.desc().rows(), self.desc().width())
    }

    /// The experts' [rows, cols] below each other with what lies between them, and the rows from
    /// one expert's first to the next's.
    fn stacked(
        &self,
        stacked: Stacked,
        dtype: DType,
        [rows, cols]: [usize; 2],
    ) -> (Matrix, i32) {
        let experts = self.desc().experts;
        stacked.check(dtype, experts, rows * cols);
        let stride = stacked.stride / cols;
        // The copy engine permutes 32 rows at a time, and counts rows in 31 bits.
        let aligned = stacked.gap == 0 && stacked.stride.is_multiple_of(32 * cols);
        assert!(aligned && stride * experts <= i32::MAX as usize, "{stacked:?} of rows of {cols}");
        let rows = (experts - 1) * stride + rows;
        (self.matrix(self.arena.address(stacked.buffer), rows, cols), stride as i32)
    }

    fn w_up(&self) -> (Matrix, i32) {
        let size = [self.desc().width(), self.desc().dim];
        self.stacked(self.tensors.weights.up, self.desc().element, size)
    }

    fn w_down(&self) -> (Matrix, i32) {
        let size = [self.desc().dim, self.desc().hidden];
        self.stacked(self.tensors.weights.down, self.desc().element, size)
    }

    /// The router's weights [E, D] as products take them: in 16 bits as `route_split` left them,
    /// rounded and then what rounding took.
    fn w_router(&self) -> Matrix {
        let MoeDesc { experts, dim, element, .. } = *self.desc();
        match element {
            DType::F32 => self.buffer(self.tensors.weights.router, experts, dim),
            _ => self.buffer(self.tensors.saved.router_halves, 2 * experts, dim),
        }
    }

    pub(crate) fn dlogits(&self) -> Matrix {
        let address = self.at(self.layer.plan.dlogits);
        self.matrix(address, self.desc().tokens, self.desc().route().dlogits_pitch())
    }

    /// What every product over the experts' rows has in common.
    pub(crate) fn experts_args(&self) -> GemmArgs {
        GemmArgs {
            index: self.route.rows,
            offsets: self.route.offsets,
            order: self.route.order,
            row_scale: self.route.row_weights,
            groups: self.desc().experts as i32,
            ..GemmArgs::default()
        }
    }

    pub(crate) fn all_tokens_args(&self) -> GemmArgs {
        let offsets = self.layer.tables.address(self.layer.all_tokens);
        GemmArgs { offsets, groups: 1, ..GemmArgs::default() }
    }

    pub(crate) fn logits(&self) -> Result<(), CudaError> {
        let MoeDesc { dim, experts, .. } = *self.desc();
        let weights = self.tensors.weights.router;
        assert_eq!((weights.dtype(), weights.len()), (DType::F32, experts * dim), "{weights:?}");
        let halves = self.w_router();
        if self.desc().element != DType::F32 {
            let both = (self.arena.address(weights), halves.address);
            self.layer.router.split(self.stream, both, experts * dim)?;
        }
        let args = GemmArgs {
            out_f32: self.route.logits,
            depth: dim as i32,
            cols: experts as i32,
            weight_rows: experts as i32,
            out_pitch: experts as i32,
            ..self.all_tokens_args()
        };
        self.layer.logits.launch(self.stream, self.x(), halves, args)
    }

    /// The address of what gradients are multiplied by; 0: 1.
    pub(crate) fn loss_scale(&self) -> u64 {
        self.tensors.loss_scale.map_or(0, |scale| {
            assert_eq!((scale.dtype(), scale.len()), (DType::F32, 1), "{scale:?}");
            self.arena.address(scale)
        })
    }

    /// H, and A to `activation` unless that is 0.
    pub(crate) fn up(&self, activation: u64) -> Result<(), CudaError> {
        let MoeDesc { dim, hidden, .. } = *self.desc();
        let width = self.desc().width() as i32;
        let (weights, weight_rows) = self.w_up();
        let args = GemmArgs {
            gathered: self.x().address,
            out: self.h().address,
            out_activation: activation,
            depth: dim as i32,
            cols: hidden as i32,
            gathered_pitch: dim as i32,
            weight_rows,
            out_pitch: width,
            ..self.experts_args()
        };
        self.layer.up.launch(self.stream, self.x(), weights, args)
    }

    /// Y, columns first .. first + cols of D, as a matrix of its own.
    pub(crate) fn down(&self, first: usize, cols: usize) -> Result<(), CudaError> {
        let hidden = self.desc().hidden;
        let (weights, weight_rows) = self.w_down();
        let a = self.matrix(self.at(self.layer.plan.a), self.desc().rows(), hidden);
        let args = GemmArgs {
            out: self.at(self.layer.plan.y),
            depth: hidden as i32,
            cols: cols as i32,
            weight_rows,
            first_col: first as i32,
            out_pitch: cols as i32,
            ..self.experts_args()
        };
        self.layer.down.launch(self.stream, a, weights, args)
    }

    pub(crate) fn combine(&self, out: Buffer, first: usize, cols: usize) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, .. } = *self.desc();
        let (out, wide) = self.sums(out);
        let call = CombineCall {
            y: self.at(self.layer.plan.y),
            pos: self.route.pos,
            weights: self.route.weights,
            base: (self.tensors.residual)
                .map_or(0, |residual| self.buffer(residual, tokens, dim).address),
            out,
            wide,
            cols,
            out_pitch: dim,
            out_first: first,
        };
        self.layer.router.combine(self.stream, call)
    }

    /// Y's columns `first ..`, a row for each choice.
    pub(crate) fn each_row(
        &self,
        each: Each,
        out: Buffer,
        (first, cols): (usize, usize),
    ) -> Result<(), CudaError> {
        self.rows_of_choices(each, self.layer.plan.y, out, (first, cols))
    }

    /// The gradient of each choice's row of x.
    pub(crate) fn each_dx(&self, each: Each, dx: Buffer) -> Result<(), CudaError> {
        self.rows_of_choices(each, self.layer.plan.dx_rows, dx, (0, self.desc().dim))
    }

    /// Where the rows of choices are told, and how many there are.
    pub(crate) fn choices(&self, each: Each) -> (u64, usize) {
        match each {
            Each::Slots => (self.route.pos, self.desc().slots()),
            Each::Choices(choices) => (self.arena.address(choices), choices.len()),
        }
    }

    fn rows_of_choices(
        &self,
        each: Each,
        from: Buffer,
        out: Buffer,
        (out_first, cols): (usize, usize),
    ) -> Result<(), CudaError> {
        let dim = self.desc().dim;
        let (pos, slots) = self.choices(each);
        let call = CombineCall {
            y: self.at(from),
            pos,
            weights: 0,
            base: 0,
            out: self.buffer(out, slots, dim).address,
            wide: false,
            cols,
            out_pitch: dim,
            out_first,
        };
        self.layer.router.each_row(self.stream, call, slots)
    }

    /// Where sums over each token's rows go [T, D], of elements or of fp32, which it says.
    fn sums(&self, out: Buffer) -> (u64, bool) {
        let MoeDesc { tokens, dim, element, .. } = *self.desc();
        assert_eq!(out.len(), tokens * dim, "{out:?}");
        let wide = out.dtype() != element;
        assert!(!wide || out.dtype() == DType::F32, "{out:?} for sums of {element:?}");
        (self.arena.address(out), wide)
    }

    pub(crate) fn dh(&self, dout: Buffer) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, hidden, .. } = *self.desc();
        let dout = self.buffer(dout, tokens, dim);
        let (weights, weight_rows) = self.w_down();
        let args = GemmArgs {
            gathered: dout.address,
            weight_rows,
            out: self.h().address,
            out_activation: self.at(self.layer.plan.scaled_a),
            out_f32: self.at(self.layer.plan.partial_ds),
            depth: dim as i32,
            cols: hidden as i32,
            gathered_pitch: dim as i32,
            out_pitch: self.desc().width() as i32,
            ..self.experts_args()
        };
        self.layer.dh.launch(self.stream, self.h(), weights, args)
    }

    pub(crate) fn dw_down(&self, dout: Buffer, into: &Gradients) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, hidden, .. } = *self.desc();
        let dout = self.buffer(dout, tokens, dim);
        let a = self.matrix(self.at(self.layer.plan.scaled_a), self.desc().rows(), hidden);
        let (out, args) = self.weight_gradient(hidden, [dim, hidden], into.down, into.accumulate);
        let args = GemmArgs { gathered: dout.address, ..args };
        self.layer.dw_down.launch(self.stream, out, a, args)
    }

    pub(crate) fn dw_up(&self, into: &Gradients) -> Result<(), CudaError> {
        let (width, dim) = (self.desc().width(), self.desc().dim);
        let (out, args) = self.weight_gradient(width, [width, dim], into.up, into.accumulate);
        let args = GemmArgs { gathered: self.x().address, ..args };
        self.layer.dw_up.launch(self.stream, out, self.h(), args)
    }

    /// The experts' gradients of `size`; `cols` of the operand that is not gathered.
    fn weight_gradient(
        &self,
        cols: usize,
        size: [usize; 2],
        into: Stacked,
        accumulate: bool,
    ) -> (Matrix, GemmArgs) {
        let desc = self.desc();
        // Other weight gradients have no depth.
        let tokens_of_each = match desc.weight_gradients {
            Output::Sums => (desc.tokens / desc.sources) as i32,
            Output::Element | Output::F32 => 0,
        };
        let (out, out_rows) = self.stacked(into, desc.gradient_element(), size);
        let args = GemmArgs {
            out: out.address,
            out_f32: out.address,
            starts: self.tensors.starts.map_or(0, |starts| self.arena.address(starts)),
            depth: tokens_of_each,
            cols: cols as i32,
            gathered_pitch: desc.dim as i32,
            out_pitch: size[1] as i32,
            out_rows,
            accumulate: i32::from(accumulate),
            ..self.experts_args()
        };
        (out, args)
    }

    /// dx = dlogits Wr, the router's part, Wr rounded to an element; the experts' is added to it.
    pub(crate) fn dx_router(&self, dx: Buffer) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, experts, .. } = *self.desc();
        let args = GemmArgs {
            out: self.buffer(dx, tokens, dim).address,
            depth: experts as i32,
            cols: dim as i32,
            out_pitch: dim as i32,
            ..self.all_tokens_args()
        };
        let rounded = Matrix { rows: experts, ..self.w_router() };
        self.layer.dx_router.launch(self.stream, self.dlogits(), rounded, args)
    }

    pub(crate) fn dx_rows(&self) -> Result<(), CudaError> {
        let (weights, weight_rows) = self.w_up();
        let args = GemmArgs {
            weight_rows,
            out: self.at(self.layer.plan.dx_rows),
            depth: self.desc().width() as i32,
            cols: self.desc().dim as i32,
            out_pitch: self.desc().dim as i32,
            ..self.experts_args()
        };
        self.layer.dx.launch(self.stream, self.h(), weights, args)
    }

    /// dx += the sum of its rows.
    pub(crate) fn sum_dx(&self, dx: Buffer) -> Result<(), CudaError> {
        self.sum_rows(dx, true)
    }

    /// dx = the sum of its rows.
    pub(crate) fn rows_to_dx(&self, dx: Buffer) -> Result<(), CudaError> {
        self.sum_rows(dx, false)
    }

    fn sum_rows(&self, dx: Buffer, accumulate: bool) -> Result<(), CudaError> {
        let dim = self.desc().dim;
        let (dx, wide) = self.sums(dx);
        assert!(!(accumulate && wide), "what is added to is of elements");
        let call = CombineCall {
            y: self.at(self.layer.plan.dx_rows),
            pos: self.route.pos,
            weights: 0,
            base: if accumulate { dx } else { 0 },
            out: dx,
            wide,
            cols: dim,
            out_pitch: dim,
            out_first: 0,
        };
        self.layer.router.combine(self.stream, call)
    }

    pub(crate) fn dw_router(&self, gradients: &Gradients) -> Result<(), CudaError> {
        let MoeDesc { dim, experts, .. } = *self.desc();
        let into = gradients.router;
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
            // Its groups are parts of the sum over tokens.
            out_rows: experts as i32,
            ..GemmArgs::default()
        };
        self.layer.dw_router.launch(self.stream, self.x(), self.dlogits(), args)?;
        let into = self.arena.address(into);
        let (parts, adds) = ((partials, self.layer.chunks), gradients.accumulate_router);
        self.layer.router.sum_parts(self.stream, parts, experts * dim, adds, into)
    }
}
