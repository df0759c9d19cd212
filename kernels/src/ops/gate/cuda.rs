//! The routers beyond dropless top-k: see [`crate::Gate`].

use std::ffi::c_void;

use moejob_protocol::kernel_sizes::EXPERTS_MAX;

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Compiler, Source, element_macro};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Function, Launch, Stream, parameters};
use crate::cuda::enqueue::Kernels;
use crate::cuda::error::CudaError;
use crate::error::{LayerError, range};
use crate::ops::gate::op::{Choice, Gate, GateBackward, Load, LogitNoise};
use crate::ops::mixture::desc::MoeDesc;
use crate::philox::Draw;
use crate::types::{RouteGroups, Scoring};

/// WARPS of gate.cu: tokens of a block.
const WARPS: usize = 4;

/// The properties of a gate that are compiled into its kernels.
#[derive(Clone, Debug, PartialEq)]
pub struct GateShape {
    experts: usize,
    top_k: usize,
    choice: usize,
    sigmoid: bool,
    norm_topk: bool,
    groups: Option<RouteGroups>,
    held: bool,
    load: usize,
}

impl GateShape {
    pub fn of(op: &Gate) -> GateShape {
        let choice = match op.choice {
            Choice::TopK => 0,
            Choice::RandomSecond => 1,
            Choice::TopP { .. } => 2,
            Choice::Experts { .. } => 3,
            Choice::Hash { .. } => 4,
        };
        GateShape {
            experts: op.experts,
            top_k: op.top_k,
            choice,
            sigmoid: op.scoring == Scoring::Sigmoid,
            norm_topk: op.norm_topk,
            // Only these two kinds of choice look at groups.
            groups: op.groups.filter(|_| choice < 2),
            held: op.hysteresis > 0.0,
            load: match op.load {
                Load::None => 0,
                Load::Tutel { .. } => 1,
                Load::Shazeer { .. } => 2,
            },
        }
    }

    pub(crate) fn source(&self, arch: &'static str) -> Source {
        let macros = [
            ("EXPERTS", self.experts),
            ("TOP_K", self.top_k),
            ("CHOICE", self.choice),
            ("SIGMOID", usize::from(self.sigmoid)),
            ("NORM_TOP_K", usize::from(self.norm_topk)),
            ("GROUPS", self.groups.map_or(0, |groups| groups.count)),
            ("GROUPS_KEPT", self.groups.map_or(0, |groups| groups.kept)),
            ("HELD", usize::from(self.held)),
            ("LOAD", self.load),
            ("ELEMENT", element_macro(DType::F32)),
        ];
        let parts = [
            include_str!("../../cuda/philox.cu"),
            include_str!("random.cu"),
            include_str!("scores.cu"),
            include_str!("gate_load.cu"),
            include_str!("gate.cu"),
        ];
        Source::new(format!("gate {} of {}", self.top_k, self.experts), arch, &macros, &parts)
    }
}

/// A gate's kernels.
#[derive(Debug)]
pub(crate) struct GateKernels {
    shape: GateShape,
    functions: Vec<(&'static str, Function)>,
}

/// Ranges of a gate's workspace.
#[derive(Clone, Copy, Debug)]
struct Workspace {
    bytes: usize,
    /// u32 [T, K]
    ranked: Buffer,
    /// U8 [T, K]
    kept: Buffer,
    /// U8 [E, T], of experts that choose
    taken: Buffer,
    /// f32 [T], u32 [T]
    best: Buffer,
    order: Buffer,
    /// f64 [T, 6], or [T, 3]
    parts: Buffer,
}

impl Workspace {
    fn new([tokens, experts, top_k]: [usize; 3]) -> Workspace {
        let mut plan = ArenaPlan::new();
        let ranked = plan.alloc(DType::U32, tokens * top_k);
        let kept = plan.alloc(DType::U8, tokens * top_k);
        let taken = plan.alloc(DType::U8, tokens * experts);
        let best = plan.alloc(DType::F32, tokens);
        let order = plan.alloc(DType::U32, tokens);
        let parts = plan.alloc(DType::F64, tokens * 6);
        Workspace { bytes: plan.bytes(), ranked, kept, taken, best, order, parts }
    }
}

/// Bytes of the workspace of a gate.
pub(crate) fn workspace_bytes(sizes: [usize; 3]) -> usize {
    Workspace::new(sizes).bytes
}

const NAMES: [&str; 10] = [
    "gate_scores",
    "gate_hash",
    "gate_choose",
    "gate_experts",
    "gate_rank",
    "gate_order",
    "gate_take",
    "gate_finish",
    "gate_statistics",
    "gate_backward",
];

/// Addresses of a call, and what its kernels are told.
struct Call<'a> {
    kernels: &'a GateKernels,
    stream: &'a Stream,
    op: &'a Gate,
    tokens: i32,
    logits: u64,
    noisy: u64,
    /// 0: none
    raw: u64,
    probs: u64,
    lse: u64,
    chosen: u64,
    ids: u64,
    ranked: u64,
    kept: u64,
    taken: u64,
    best: u64,
    order: u64,
    parts: u64,
    /// Deviation of the noise, and of Tutel's estimate
    std: f64,
    estimate: f64,
}

impl Kernels for GateKernels {
    type Desc = GateShape;

    fn make(compiler: &Compiler, shape: &GateShape) -> Result<GateKernels, LayerError> {
        range("experts of a gate", shape.experts, 1, EXPERTS_MAX as usize)?;
        let groups = shape.groups.map_or(1, |groups| groups.count);
        range("groups of a gate", groups, 1, MoeDesc::GROUPS_MAX)?;
        let arch = Arch::of(compiler.gpu())?;
        let modules = compiler.load(&[shape.source(arch.target())], &|_, _| ())?;
        let functions = NAMES.map(|name| Ok((name, modules[0].function(name)?)));
        let functions = functions.into_iter().collect::<Result<_, CudaError>>()?;
        Ok(GateKernels { shape: shape.clone(), functions })
    }

    fn desc(&self) -> &GateShape {
        &self.shape
    }
}

impl GateKernels {
    fn function(&self, name: &str) -> &Function {
        let found = self.functions.iter().find(|(own, _)| *own == name);
        &found.expect("all of NAMES were loaded").1
    }

    fn call<'a>(&'a self, stream: &'a Stream, arena: &Arena, op: &'a Gate) -> Call<'a> {
        let at = |buffer| arena.address(buffer);
        let space = Workspace::new([op.tokens, op.experts, op.top_k]);
        assert!(op.workspace.bytes() >= space.bytes, "{:?} for {space:?}", op.workspace);
        let within = |range: Buffer| at(op.workspace) + range.offset() as u64;
        let raw = match (op.noise, op.load) {
            (LogitNoise::Learned { raw }, _) | (_, Load::Shazeer { raw }) => at(raw),
            _ => 0,
        };
        Call {
            kernels: self,
            stream,
            op,
            tokens: op.tokens as i32,
            logits: at(op.logits),
            noisy: at(op.noisy),
            raw,
            probs: at(op.probs),
            lse: at(op.lse),
            chosen: at(op.chosen),
            ids: at(op.ids),
            ranked: within(space.ranked),
            kept: within(space.kept),
            taken: within(space.taken),
            best: within(space.best),
            order: within(space.order),
            parts: within(space.parts),
            std: if let LogitNoise::Normal { std } = op.noise { std } else { 0.0 },
            estimate: if let Load::Tutel { std } = op.load { std } else { 1.0 },
        }
    }
}

impl Call<'_> {
    /// # Safety
    /// As of [`Function::launch`].
    unsafe fn launch(
        &self,
        name: &str,
        launch: Launch,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { self.kernels.function(name).launch(self.stream, launch, parameters) }
    }

    /// A warp a token.
    fn warps(&self) -> Launch {
        Launch::new(self.op.tokens.div_ceil(WARPS), 32 * WARPS as u32)
    }

    /// Where the noise of logits is learned: the deviations, before softplus; else 0.
    fn learned(&self) -> u64 {
        if let LogitNoise::Learned { .. } = self.op.noise { self.raw } else { 0 }
    }

    fn forward(&self, arena: &Arena) -> Result<(), CudaError> {
        let at = |buffer| arena.address(buffer);
        let Call { op, tokens, logits, noisy, raw, probs, lse, chosen, ids, .. } = *self;
        let Call { ranked, kept, parts, estimate, .. } = *self;
        let draw = DrawAt::of(op.draw);
        self.choose(arena, draw)?;
        let order = if op.prioritized { self.order()? } else { 0 };
        let capacity = op.capacity.map_or(-1, |capacity| capacity.min(i32::MAX as usize) as i32);
        let (counts, dropped) = (at(op.counts), at(op.dropped));
        let (weights, first) = (at(op.weights), at(op.first));
        let (stats, losses) = (at(op.stats), at(op.losses));
        let (scale, segments) = (op.scale, op.segments as i32);
        let mut blocks = Launch::new(op.experts + 1, 256);
        blocks.grid[1] = op.segments as u32;
        // SAFETY, here and below: the parameters are those of each kernel, whose sizes `check_gate`
        // and `call` hold.
        unsafe {
            self.launch(
                "gate_take",
                Launch::new(op.experts, 1024),
                parameters![probs, ranked, order, tokens, capacity, draw, kept, counts, dropped],
            )?;
            self.launch(
                "gate_finish",
                self.warps(),
                parameters![
                    logits, noisy, probs, lse, ranked, kept, tokens, scale, chosen, ids, weights,
                    first, parts
                ],
            )?;
            self.launch(
                "gate_statistics",
                blocks,
                parameters![
                    logits, noisy, raw, probs, chosen, first, parts, tokens, segments, estimate,
                    stats, losses
                ],
            )
        }
    }

    /// Scores, and each token's choices in their order.
    fn choose(&self, arena: &Arena, draw: DrawAt) -> Result<(), CudaError> {
        let Call { op, tokens, logits, noisy, probs, lse, ranked, taken, std, .. } = *self;
        if let Choice::Hash { seed, layer } = op.choice {
            let table = DrawAt::of(Some(Draw { seed, step: 0, layer, first_token: 0 }));
            let words = arena.address(op.words);
            let parameters = parameters![words, tokens, table, noisy, probs, lse, ranked];
            // SAFETY: as in `forward`.
            return unsafe { self.launch("gate_hash", self.warps(), parameters) };
        }
        let raw = self.learned();
        // SAFETY: as in `forward`.
        unsafe {
            let parameters = parameters![logits, raw, tokens, draw, std, noisy, probs, lse];
            self.launch("gate_scores", self.warps(), parameters)?;
            if let Choice::Experts { rows } = op.choice {
                let rows = rows.min(op.tokens) as i32;
                let parameters = parameters![probs, tokens, rows, taken];
                self.launch("gate_experts", Launch::new(op.experts, 1024), parameters)?;
                let parameters = parameters![probs, taken, tokens, ranked];
                return self.launch("gate_rank", self.warps(), parameters);
            }
            // Of the other choices top-k and a random second alone know a bias.
            let bias = op.bias.filter(|_| !matches!(op.choice, Choice::TopP { .. }));
            let [bias, before] = [bias, op.before].map(|of| of.map_or(0, |of| arena.address(of)));
            let positions = arena.address(op.positions);
            let hysteresis = op.hysteresis;
            let sum = if let Choice::TopP { sum } = op.choice { sum } else { 0.0 };
            let parameters = parameters![
                probs, bias, positions, before, tokens, hysteresis, sum, ranked
            ];
            self.launch("gate_choose", self.warps(), parameters)
        }
    }

    /// The address of the tokens in the order of their largest score.
    fn order(&self) -> Result<u64, CudaError> {
        let Call { op, tokens, probs, best, order, .. } = *self;
        let launch = Launch::new(op.tokens.div_ceil(256), 256);
        for pass in 0..2_i32 {
            let parameters = parameters![probs, tokens, best, order, pass];
            // SAFETY: as in `forward`.
            unsafe { self.launch("gate_order", launch, parameters)? };
        }
        Ok(order)
    }

    fn backward(&self, arena: &Arena, back: &GateBackward) -> Result<(), CudaError> {
        let at = |buffer| arena.address(buffer);
        let Call { op, tokens, logits, noisy, raw, probs, lse, chosen, ids, estimate, .. } = *self;
        let (dweights, dstats) = (at(back.dweights), at(back.dstats));
        let [loss_scale, d_raw] = [back.loss_scale, back.d_raw].map(|of| of.map_or(0, at));
        let (dlogits, count) = (at(back.dlogits), op.tokens as f64);
        let segment_tokens = (op.tokens / op.segments) as i32;
        let (z, entropy) = (2.0 * back.z_coef / count, back.entropy_coef / count);
        // Noise of a given size has no gradient.
        let draw = DrawAt::of(op.draw.filter(|_| self.learned() != 0));
        let scale = op.scale;
        let parameters = parameters![
            logits,
            noisy,
            raw,
            probs,
            lse,
            chosen,
            ids,
            dweights,
            dstats,
            draw,
            tokens,
            segment_tokens,
            estimate,
            scale,
            z,
            entropy,
            loss_scale,
            dlogits,
            d_raw
        ];
        // SAFETY: as in `forward`.
        unsafe { self.launch("gate_backward", self.warps(), parameters) }
    }
}

/// The kernels' `Draw`.
#[repr(C)]
#[derive(Clone, Copy, Debug, Default)]
struct DrawAt {
    seed: u64,
    place: u32,
    step: u32,
    first_token: u32,
    live: u32,
}

impl DrawAt {
    fn of(draw: Option<Draw>) -> DrawAt {
        let Some(Draw { seed, step, layer, first_token }) = draw else { return DrawAt::default() };
        let place = layer << 8 | ((step >> 32) as u32) << 20;
        DrawAt { seed, place, step: step as u32, first_token: first_token as u32, live: 1 }
    }
}

impl CudaDevice {
    fn on_gate(
        &mut self,
        op: &Gate,
        enqueue: impl FnOnce(&GateKernels, &Stream, &Arena) -> Result<(), CudaError>,
    ) {
        op.check();
        let scores = [Some(op.probs), op.bias].into_iter().flatten();
        scores.for_each(|of| assert_eq!(of.dtype(), DType::F32, "scores are fp32: {op:?}"));
        self.on::<GateKernels>(&GateShape::of(op), |gate, stream, arena| {
            enqueue(gate, stream, arena)
        });
    }

    /// Compiles and loads the kernels of a gate, if they are not there.
    pub(crate) fn gate_load(&mut self, op: &Gate) -> Result<(), LayerError> {
        self.kernels::<GateKernels>(&GateShape::of(op)).map(drop)
    }

    pub(crate) fn gate(&mut self, op: &Gate) {
        self.on_gate(op, |gate, stream, arena| gate.call(stream, arena, op).forward(arena));
    }

    pub(crate) fn gate_backward(&mut self, op: &GateBackward) {
        let gate = &op.forward;
        let sizes = [op.dlogits, op.dweights, op.dstats].map(|buffer| buffer.len());
        let (t, e, k) = (gate.tokens, gate.experts, gate.top_k);
        assert_eq!(sizes, [t * e, t * k, gate.segments * 3 * e], "{op:?}");
        assert!(op.d_raw.is_none_or(|d_raw| d_raw.len() == t * e), "{op:?}");
        self.on_gate(gate, |kernels, stream, arena| {
            kernels.call(stream, arena, gate).backward(arena, op)
        });
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Kernels of every kind of choice.
    pub(crate) fn sources(arch: &'static str) -> Vec<Source> {
        let base = GateShape {
            experts: 64,
            top_k: 2,
            choice: 0,
            sigmoid: false,
            norm_topk: true,
            groups: None,
            held: false,
            load: 0,
        };
        let groups = Some(RouteGroups { count: 8, kept: 3 });
        let shapes = [
            GateShape { sigmoid: true, groups, held: true, ..base },
            GateShape { experts: 40, choice: 1, groups, ..base },
            GateShape { choice: 2, norm_topk: false, ..base },
            GateShape { choice: 3, top_k: 64, ..base },
            GateShape { choice: 4, experts: 512, top_k: 16, ..base },
            GateShape { load: 1, ..base },
            GateShape { load: 2, experts: 24, top_k: 3, ..base },
        ];
        shapes.iter().map(|shape| shape.source(arch)).collect()
    }
}
