//! A mixture layer, whole and in parts, see [`crate::MoePlace`]: launches of the layer's own
//! kernels, and of those that place rows of a rank's own experts.

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Compiler, Source, element_macro};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Function, Launch, Stream, parameters};
use crate::cuda::enqueue::Kernels;
use crate::cuda::error::CudaError;
use crate::error::LayerError;
use crate::ops::mixture::call::Call;
use crate::ops::mixture::desc::{MoeDesc, MoeTensors};
use crate::ops::mixture::layer::MoeLayer;
use crate::ops::mixture::op::{
    MoeBackward, MoeCombine, MoeExperts, MoeExpertsBackward, MoeForward, MoeHidden, MoePlace,
    MoePlan, MoeRoute, MoeRouterBackward, MoeUpGradient, Sources,
};
use crate::ops::mixture::route::CombineCall;

/// TOKENS of moe_here.cu
const TOKENS: usize = 256;

/// The kernel's `Present`.
#[repr(C)]
struct Present {
    tokens: i32,
    listed: u64,
}

/// Kernels that place rows, of one number of choices a token.
#[derive(Debug)]
pub(crate) struct Here {
    top_k: usize,
    count: Function,
    scan: Function,
    place: Function,
    ds: Function,
    pub slices: Function,
    pub sums: Function,
    /// Histogram and counts; grown when more is asked for, which no step does.
    scratch: Option<Arena>,
}

pub(crate) fn source(top_k: usize, target: &'static str) -> Source {
    // It moves numbers alone, of whatever elements rows are.
    let macros = [("TOP_K", top_k), ("ELEMENT", element_macro(DType::F32))];
    let label = format!("rows here of {top_k}");
    Source::new(label, target, &macros, &[include_str!("moe_here.cu")])
}

impl Kernels for Here {
    type Desc = usize;

    fn make(compiler: &Compiler, top_k: &usize) -> Result<Here, LayerError> {
        let target = Arch::of(compiler.gpu())?.target();
        let modules = compiler.load(&[source(*top_k, target)], &|_, _| ())?;
        let function = |name| modules[0].function(name);
        Ok(Here {
            top_k: *top_k,
            count: function("here_count")?,
            scan: function("here_scan")?,
            place: function("here_place")?,
            ds: function("here_ds")?,
            slices: function("here_slices")?,
            sums: function("here_sums")?,
            scratch: None,
        })
    }

    fn desc(&self) -> &usize {
        &self.top_k
    }
}

impl Kernels for MoeLayer {
    type Desc = MoeDesc;

    fn make(compiler: &Compiler, desc: &MoeDesc) -> Result<MoeLayer, LayerError> {
        MoeLayer::new(compiler, *desc, &|_, _| ())
    }

    fn desc(&self) -> &MoeDesc {
        &self.desc
    }
}

impl CudaDevice {
    pub(crate) fn moe_plan(
        &mut self,
        desc: &MoeDesc,
        plan: &mut ArenaPlan,
    ) -> Result<MoePlan, LayerError> {
        let layer = self.kernels::<MoeLayer>(desc)?;
        let saved = layer.plan_saved(plan);
        Ok(MoePlan { saved, workspace_bytes: layer.workspace_bytes() })
    }

    /// `op` on the layer of `desc`, which may have to be made.
    fn on_layer(
        &mut self,
        desc: &MoeDesc,
        op: impl FnOnce(&MoeLayer, &Stream, &Arena) -> Result<(), CudaError>,
    ) {
        let free = self.kept_free().products;
        self.on::<MoeLayer>(desc, |layer, stream, arena| {
            layer.leave_free(free);
            op(layer, stream, arena)
        });
    }

    pub(crate) fn moe_forward(&mut self, op: &MoeForward) {
        self.on_layer(&op.desc, |layer, stream, arena| {
            layer.forward(stream, arena, &op.tensors, op.out)
        });
    }

    pub(crate) fn moe_hidden(&mut self, op: &MoeHidden) {
        self.on_layer(&op.desc, |layer, stream, arena| {
            layer.hidden_again(stream, arena, &op.tensors)
        });
    }

    pub(crate) fn moe_backward(&mut self, op: &MoeBackward) {
        self.on_layer(&op.desc, |layer, stream, arena| {
            layer.backward(stream, arena, &op.tensors, op.dout, op.dx, &op.gradients)
        });
    }

    pub(crate) fn moe_place_load(&mut self, top_k: usize) -> Result<(), LayerError> {
        self.kernels::<Here>(&top_k).map(drop)
    }

    pub(crate) fn moe_route(&mut self, op: &MoeRoute) {
        self.on_layer(&op.desc, |layer, stream, arena| layer.route(stream, arena, &op.tensors));
    }

    pub(crate) fn moe_place(&mut self, op: &MoePlace) {
        self.on::<Here>(&op.top_k, |here, stream, arena| here.place(stream, arena, op));
    }

    pub(crate) fn moe_experts(&mut self, op: &MoeExperts) {
        self.on_layer(&op.desc, |layer, stream, arena| layer.experts(stream, arena, op));
    }

    pub(crate) fn moe_combine(&mut self, op: &MoeCombine) {
        self.on_layer(&op.desc, |layer, stream, arena| layer.combine(stream, arena, op));
    }

    pub(crate) fn moe_experts_backward(&mut self, op: &MoeExpertsBackward) {
        let ds = match self.kernels::<Here>(&op.desc.top_k) {
            Ok(here) => here.ds.clone(),
            Err(error) => return self.attempt(|| Err(error)),
        };
        self.on_layer(&op.desc, |layer, stream, arena| {
            layer.experts_backward(stream, arena, op, &ds)
        });
    }

    pub(crate) fn moe_up_gradient(&mut self, op: &MoeUpGradient) {
        self.on_layer(&op.desc, |layer, stream, arena| {
            Call::new(layer, stream, arena, &op.tensors).dw_up(&op.gradients)
        });
    }

    pub(crate) fn moe_router_backward(&mut self, op: &MoeRouterBackward) {
        self.on_layer(&op.desc, |layer, stream, arena| layer.router_backward(stream, arena, op));
    }
}

impl Here {
    fn place(
        &mut self,
        stream: &Stream,
        arena: &Arena,
        op: &MoePlace,
    ) -> Result<(), CudaError> {
        let all = op.check();
        let blocks = all.div_ceil(TOKENS);
        let mut plan = ArenaPlan::new();
        let histogram = plan.alloc(DType::U32, (op.locals + 1) * blocks);
        let counts = plan.alloc(DType::U32, op.locals + 1);
        if self.scratch.as_ref().is_none_or(|scratch| scratch.bytes() < plan.bytes()) {
            self.scratch = Some(Arena::new(stream.gpu(), plan.bytes())?);
        }
        let scratch = self.scratch.as_ref().expect("made above");
        let [histogram, counts] = [histogram, counts].map(|buffer| scratch.address(buffer));
        let saved = &op.saved;
        let [ids, weights, offsets, order, rows, pos, row_weights] = [
            saved.ids,
            saved.weights,
            saved.offsets,
            saved.order,
            saved.rows,
            saved.pos,
            saved.row_weights,
        ]
        .map(|buffer| arena.address(buffer));
        let present = match op.sources {
            Sources::Even { each, present, .. } => {
                Present { tokens: (present * each) as i32, listed: 0 }
            }
            Sources::Listed(starts) => {
                let count = starts.slice(starts.len() - 1, 1);
                Present { tokens: 0, listed: arena.address(count) }
            }
        };
        // What is behind the last choice is none.
        op.choices.map_or(Ok(()), |choices| arena.fill_bytes(stream, choices, u8::MAX))?;
        let choices = op.choices.map_or(0, |choices| arena.address(choices));
        let (tokens, first, locals) = (all as i32, op.first as i32, op.locals as i32);
        let threads = TOKENS as u32;
        let masks = op.locals * TOKENS / 8;
        let count = Launch { shared_bytes: masks as u32, ..Launch::new(blocks, threads) };
        let starts = (op.locals + 1) * 4;
        let place = Launch { shared_bytes: starts as u32, ..Launch::new(blocks + 1, threads) };
        let count_of = blocks as i32;
        let room = i32::try_from(op.room).unwrap_or(i32::MAX);
        let overflows = arena.address(op.overflows);
        // SAFETY: the parameters are those of each kernel, the lengths were checked.
        unsafe {
            let parameters = parameters![ids, present, tokens, first, locals, pos, histogram];
            self.count.launch(stream, count, parameters)?;
            let parameters = parameters![histogram, count_of, counts];
            self.scan.launch(stream, Launch::new(op.locals + 1, 32), parameters)?;
            let parameters = parameters![
                ids, weights, present, tokens, first, locals, histogram, counts, offsets, order,
                rows, pos, row_weights, choices, room, overflows
            ];
            self.place.launch(stream, place, parameters)
        }
    }
}

impl MoeLayer {
    fn route(
        &self,
        stream: &Stream,
        arena: &Arena,
        tensors: &MoeTensors,
    ) -> Result<(), CudaError> {
        let call = Call::new(self, stream, arena, tensors);
        call.logits()?;
        self.router.choose(stream, &call.route)?;
        self.router.place(stream, &call.route)
    }

    /// `out` = the residual and the sum over the rows that were placed; or these rows.
    fn experts(&self, stream: &Stream, arena: &Arena, op: &MoeExperts) -> Result<(), CudaError> {
        let call = Call::new(self, stream, arena, &op.tensors);
        call.up(call.at(self.plan.a))?;
        let passes = self.desc.down_passes();
        let cols = self.desc.dim / passes;
        for pass in 0..passes {
            call.down(pass * cols, cols)?;
            match op.each {
                Some(each) => call.each_row(each, op.out, (pass * cols, cols))?,
                None => call.combine(op.out, pass * cols, cols)?,
            }
        }
        Ok(())
    }

    fn combine(&self, stream: &Stream, arena: &Arena, op: &MoeCombine) -> Result<(), CudaError> {
        let MoeDesc { tokens, dim, element, .. } = self.desc;
        for own in [op.base, op.out] {
            assert_eq!((own.dtype(), own.len()), (element, tokens * dim), "{op:?}");
        }
        assert_eq!((op.rows.dtype(), op.slots.dtype()), (element, DType::U32), "{op:?}");
        let of_weights = |weights: Buffer| {
            assert_eq!((weights.dtype(), weights.len()), (DType::F32, op.slots.len()), "{op:?}");
            arena.address(weights)
        };
        self.router.combine(stream, CombineCall {
            y: arena.address(op.rows),
            pos: arena.address(op.slots),
            weights: op.weights.map_or(0, of_weights),
            base: arena.address(op.base),
            out: arena.address(op.out),
            wide: false,
            cols: dim,
            out_pitch: dim,
            out_first: 0,
        })
    }

    fn experts_backward(
        &self,
        stream: &Stream,
        arena: &Arena,
        op: &MoeExpertsBackward,
        ds: &Function,
    ) -> Result<(), CudaError> {
        let call = Call::new(self, stream, arena, &op.tensors);
        call.dh(op.dout)?;
        let (pos, slots) = call.choices(op.choices);
        assert_eq!((op.ds.dtype(), op.ds.len()), (DType::F32, slots), "{:?}", op.ds);
        let partial = call.at(self.plan.partial_ds);
        let parts = self.desc.hidden.div_ceil(self.dh.config.block_n) as i32;
        let (launch, slots, into) =
            (Launch::new(slots.div_ceil(256), 256), slots as i32, arena.address(op.ds));
        // SAFETY: the parameters are those of `here_ds`, the lengths were checked.
        unsafe { ds.launch(stream, launch, parameters![pos, partial, parts, slots, into])? };
        call.dw_down(op.dout, &op.gradients)?;
        call.dx_rows()?;
        match op.each {
            true => call.each_dx(op.choices, op.dx)?,
            false => call.rows_to_dx(op.dx)?,
        }
        if op.up_later {
            return Ok(());
        }
        call.dw_up(&op.gradients)
    }

    fn router_backward(
        &self,
        stream: &Stream,
        arena: &Arena,
        op: &MoeRouterBackward,
    ) -> Result<(), CudaError> {
        let mut call = Call::new(self, stream, arena, &op.tensors);
        let slots = self.desc.slots();
        assert_eq!((op.ds.dtype(), op.ds.len()), (DType::F32, slots), "{:?}", op.ds);
        assert_eq!((op.slots.dtype(), op.slots.len()), (DType::U32, slots), "{:?}", op.slots);
        // A slot's gradient lies at its own place, and not at that of a row.
        call.route.pos = arena.address(op.slots);
        let coefs = (self.desc.aux_coef, self.desc.z_coef);
        let (ds, dlogits) = (arena.address(op.ds), call.at(self.plan.dlogits));
        let coefs = (coefs, call.loss_scale());
        self.router.backward(stream, &call.route, (ds, 1), coefs, dlogits)?;
        call.dx_router(op.dx)?;
        call.dw_router(&op.gradients)
    }
}
