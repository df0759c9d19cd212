//! The routers beyond dropless top-k: see [`crate::Gate`].

use super::arch::Arch;
use super::compile::{Compiler, Source};
use super::device::CudaDevice;
use super::driver::{Arena, Function, Launch, Stream, parameters};
use super::error::CudaError;
use super::gemm::element_macro;
use super::layer::LayerError;
use super::shape::MoeDesc;
use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::gate::{Choice, Gate, GateBackward, Load, LogitNoise};
use crate::philox::Draw;
use crate::route::{RouteGroups, Scoring};

/// WARPS of gate.cu: tokens of a block.
const WARPS: usize = 4;

/// Why a GPU does not have this gate, by the name of what it lacks; None if it has it.
pub(crate) fn unsupported(gate: &Gate) -> Option<&'static str> {
    let words = |buffer: Option<Buffer>| buffer.is_none_or(|buffer| buffer.dtype() == DType::F32);
    match gate {
        Gate { choice: Choice::Hash { .. }, .. } => Some("routing by hash"),
        Gate { noise: LogitNoise::Learned { .. }, .. } => Some("learned noise of logits"),
        Gate { load: Load::Tutel { .. }, .. } => Some("Tutel's estimate of load"),
        Gate { load: Load::Shazeer { .. }, .. } => Some("Shazeer's estimate of load"),
        Gate { experts, .. } if *experts > MoeDesc::EXPERTS_MAX => Some("more than 512 experts"),
        Gate { groups: Some(groups), .. } if groups.count > MoeDesc::GROUPS_MAX => {
            Some("more than 32 groups of experts")
        }
        Gate { probs, bias, .. } if !words(Some(*probs)) || !words(*bias) => {
            Some("scores that are not fp32")
        }
        _ => None,
    }
}

/// What is compiled in.
#[derive(Clone, Copy, Debug, PartialEq)]
struct GateShape {
    experts: usize,
    top_k: usize,
    choice: usize,
    sigmoid: bool,
    norm_topk: bool,
    groups: Option<RouteGroups>,
    held: bool,
}

impl GateShape {
    fn of(op: &Gate) -> GateShape {
        let choice = match op.choice {
            Choice::TopK | Choice::Hash { .. } => 0,
            Choice::RandomSecond => 1,
            Choice::TopP { .. } => 2,
            Choice::Experts { .. } => 3,
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
        }
    }

    fn source(&self, arch: &'static str) -> Source {
        let macros = [
            ("EXPERTS", self.experts),
            ("TOP_K", self.top_k),
            ("CHOICE", self.choice),
            ("SIGMOID", usize::from(self.sigmoid)),
            ("NORM_TOP_K", usize::from(self.norm_topk)),
            ("GROUPS", self.groups.map_or(0, |groups| groups.count)),
            ("GROUPS_KEPT", self.groups.map_or(0, |groups| groups.kept)),
            ("HELD", usize::from(self.held)),
            ("ELEMENT", element_macro(DType::F32)),
        ];
        let parts =
            [include_str!("philox.cu"), include_str!("random.cu"), include_str!("gate.cu")];
        Source::new(format!("gate {} of {}", self.top_k, self.experts), arch, &macros, &parts)
    }
}

/// A gate's kernels and its scratch for some number of tokens.
#[derive(Debug)]
pub(super) struct GateKernels {
    shape: GateShape,
    tokens: usize,
    functions: Vec<(&'static str, Function)>,
    scratch: Arena,
    at: Scratch,
}

/// In memory of the gate's own, for an op has no place for it.
#[derive(Clone, Copy, Debug)]
struct Scratch {
    /// u32 [T, K]
    ranked: Buffer,
    /// U8 [T, K]
    kept: Buffer,
    /// U8 [E, T], of experts that choose
    taken: Buffer,
    /// f32 [T], u32 [T]
    best: Buffer,
    order: Buffer,
    /// f64 [T, 3]
    parts: Buffer,
}

const NAMES: [&str; 9] = [
    "gate_scores",
    "gate_choose",
    "gate_experts",
    "gate_rank",
    "gate_order",
    "gate_take",
    "gate_finish",
    "gate_statistics",
    "gate_backward",
];

impl GateKernels {
    fn new(compiler: &Compiler, shape: GateShape, tokens: usize) -> Result<Self, CudaError> {
        let arch = Arch::of(compiler.gpu())?;
        let modules = compiler.load(&[shape.source(arch.target())], &|_, _| ())?;
        let functions = NAMES.map(|name| Ok((name, modules[0].function(name)?)));
        let mut plan = ArenaPlan::new();
        let at = Scratch {
            ranked: plan.alloc(DType::U32, tokens * shape.top_k),
            kept: plan.alloc(DType::U8, tokens * shape.top_k),
            taken: plan.alloc(DType::U8, tokens * shape.experts),
            best: plan.alloc(DType::F32, tokens),
            order: plan.alloc(DType::U32, tokens),
            parts: plan.alloc(DType::F64, tokens * 3),
        };
        let scratch = Arena::new(compiler.gpu(), plan.bytes())?;
        let functions = functions.into_iter().collect::<Result<_, CudaError>>()?;
        Ok(GateKernels { shape, tokens, functions, scratch, at })
    }

    fn function(&self, name: &str) -> &Function {
        let found = self.functions.iter().find(|(own, _)| *own == name);
        &found.expect("all of NAMES were loaded").1
    }

    /// A warp a token.
    fn warps(&self) -> Launch {
        Launch::new(self.tokens.div_ceil(WARPS), 32 * WARPS as u32)
    }

    fn forward(&self, stream: &Stream, arena: &Arena, op: &Gate) -> Result<(), CudaError> {
        let at = |buffer| arena.address(buffer);
        let own = |buffer| self.scratch.address(buffer);
        let (tokens, draw) = (self.tokens as i32, DrawAt::of(op.draw));
        let (noisy, probs, lse) = (at(op.noisy), at(op.probs), at(op.lse));
        let (ranked, kept, parts) =
            (own(self.at.ranked), own(self.at.kept), own(self.at.parts));
        let logits = at(op.logits);
        let std = if let LogitNoise::Normal { std } = op.noise { std } else { 0.0 };
        let none = 0_u64;
        // SAFETY, here and below: the parameters are those of each kernel, whose sizes `check_gate`
        // and `Scratch` hold.
        unsafe {
            self.function("gate_scores").launch(
                stream,
                self.warps(),
                parameters![logits, tokens, draw, std, noisy, probs, lse],
            )?;
        }
        self.choose(stream, arena, op)?;
        let order = if op.prioritized { self.order(stream, probs)? } else { none };
        let capacity = op.capacity.map_or(-1, |capacity| capacity.min(i32::MAX as usize) as i32);
        let (counts, dropped) = (at(op.counts), at(op.dropped));
        let (chosen, ids, weights) = (at(op.chosen), at(op.ids), at(op.weights));
        let (first, stats, losses) = (at(op.first), at(op.stats), at(op.losses));
        let (scale, segments) = (op.scale, op.segments as i32);
        let experts = self.shape.experts;
        let mut blocks = Launch::new(experts + 1, 256);
        blocks.grid[1] = op.segments as u32;
        // SAFETY: as above.
        unsafe {
            self.function("gate_take").launch(
                stream,
                Launch::new(experts, 1024),
                parameters![probs, ranked, order, tokens, capacity, draw, kept, counts, dropped],
            )?;
            self.function("gate_finish").launch(
                stream,
                self.warps(),
                parameters![
                    probs, lse, ranked, kept, tokens, scale, chosen, ids, weights, first, parts
                ],
            )?;
            self.function("gate_statistics").launch(
                stream,
                blocks,
                parameters![probs, chosen, first, parts, tokens, segments, stats, losses],
            )
        }
    }

    /// Ranks each token's choices.
    fn choose(&self, stream: &Stream, arena: &Arena, op: &Gate) -> Result<(), CudaError> {
        let probs = arena.address(op.probs);
        let bias = op.bias.map_or(0, |bias| arena.address(bias));
        let (positions, tokens) = (arena.address(op.positions), self.tokens as i32);
        let (ranked, taken) =
            (self.scratch.address(self.at.ranked), self.scratch.address(self.at.taken));
        let hysteresis = op.hysteresis;
        let sum = if let Choice::TopP { sum } = op.choice { sum } else { 0.0 };
        // SAFETY: as in `forward`.
        unsafe {
            if let Choice::Experts { rows } = op.choice {
                let rows = rows.min(self.tokens) as i32;
                self.function("gate_experts").launch(
                    stream,
                    Launch::new(self.shape.experts, 1024),
                    parameters![probs, tokens, rows, taken],
                )?;
                let rank = self.function("gate_rank");
                return rank.launch(stream, self.warps(), parameters![probs, taken, tokens, ranked]);
            }
            // Of the other choices top-k and a random second alone know a bias.
            let bias = if matches!(op.choice, Choice::TopP { .. }) { 0 } else { bias };
            self.function("gate_choose").launch(
                stream,
                self.warps(),
                parameters![probs, bias, positions, tokens, hysteresis, sum, ranked],
            )
        }
    }

    /// The address of the tokens in the order of their largest score.
    fn order(&self, stream: &Stream, probs: u64) -> Result<u64, CudaError> {
        let (best, order) =
            (self.scratch.address(self.at.best), self.scratch.address(self.at.order));
        let (tokens, launch) = (self.tokens as i32, Launch::new(self.tokens.div_ceil(256), 256));
        for pass in 0..2_i32 {
            // SAFETY: as in `forward`.
            unsafe {
                let parameters = parameters![probs, tokens, best, order, pass];
                self.function("gate_order").launch(stream, launch, parameters)?;
            }
        }
        Ok(order)
    }

    fn backward(
        &self,
        stream: &Stream,
        arena: &Arena,
        op: &GateBackward,
    ) -> Result<(), CudaError> {
        let gate = &op.forward;
        let at = |buffer| arena.address(buffer);
        let (noisy, probs, lse) = (at(gate.noisy), at(gate.probs), at(gate.lse));
        let (chosen, ids) = (at(gate.chosen), at(gate.ids));
        let (dweights, dstats, dlogits) = (at(op.dweights), at(op.dstats), at(op.dlogits));
        let (tokens, count) = (self.tokens as i32, self.tokens as f64);
        let segment_tokens = (self.tokens / gate.segments) as i32;
        let (scale, z, entropy) = (gate.scale, 2.0 * op.z_coef / count, op.entropy_coef / count);
        // SAFETY: as in `forward`.
        unsafe {
            self.function("gate_backward").launch(
                stream,
                self.warps(),
                parameters![
                    noisy,
                    probs,
                    lse,
                    chosen,
                    ids,
                    dweights,
                    dstats,
                    tokens,
                    segment_tokens,
                    scale,
                    z,
                    entropy,
                    dlogits
                ],
            )
        }
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
        crate::cpu::check_gate(op);
        match self.gate_load(op) {
            Ok(at) => self.attempt(|| Ok(enqueue(&self.gates[at], &self.stream, &self.arena)?)),
            Err(error) => self.attempt(|| Err(error)),
        }
    }

    /// Compiles and loads the kernels of a gate, if they are not there; where they lie.
    pub(crate) fn gate_load(&mut self, op: &Gate) -> Result<usize, LayerError> {
        if let Some(what) = unsupported(op) {
            panic!("{} has no {what}; `Gate::unsupported` tells before a job runs", {
                self.gpu().name()
            });
        }
        let (shape, tokens) = (GateShape::of(op), op.tokens);
        let own = |gate: &GateKernels| gate.shape == shape && gate.tokens == tokens;
        if let Some(at) = self.gates.iter().position(own) {
            return Ok(at);
        }
        self.gpu().make_current()?;
        self.gates.push(GateKernels::new(&self.compiler, shape, tokens)?);
        Ok(self.gates.len() - 1)
    }

    pub(crate) fn gate(&mut self, op: &Gate) {
        self.on_gate(op, |gate, stream, arena| gate.forward(stream, arena, op));
    }

    pub(crate) fn gate_backward(&mut self, op: &GateBackward) {
        let gate = &op.forward;
        let sizes = [op.dlogits, op.dweights, op.dstats].map(|buffer| buffer.len());
        let (t, e, k) = (gate.tokens, gate.experts, gate.top_k);
        assert_eq!(sizes, [t * e, t * k, gate.segments * 3 * e], "{op:?}");
        assert!(op.d_raw.is_none(), "no learned noise: {op:?}");
        self.on_gate(gate, |kernels, stream, arena| kernels.backward(stream, arena, op));
    }
}

#[cfg(test)]
pub(super) mod tests {
    use super::*;

    /// Kernels of every kind of choice.
    pub(in super::super) fn sources(arch: &'static str) -> Vec<Source> {
        let base = GateShape {
            experts: 64,
            top_k: 2,
            choice: 0,
            sigmoid: false,
            norm_topk: true,
            groups: None,
            held: false,
        };
        let groups = Some(RouteGroups { count: 8, kept: 3 });
        let shapes = [
            GateShape { sigmoid: true, groups, held: true, ..base },
            GateShape { experts: 40, choice: 1, groups, ..base },
            GateShape { choice: 2, norm_topk: false, ..base },
            GateShape { choice: 3, top_k: 64, ..base },
        ];
        shapes.iter().map(|shape| shape.source(arch)).collect()
    }
}
