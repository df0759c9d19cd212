//! The memory-bound ops of a step: their kernels, compiled when first asked for, and what they
//! share.
//!
//! ```text
//! Unit            which kernels, for which kinds and sizes: a compilation unit
//! Enqueue         one op on its way: kernels, addresses, scratch
//! norm.rs, embed.rs, elementwise.rs, convert.rs, wire.rs, optimizer.rs, cached_attention.rs
//!                 the ops
//! ```

use std::collections::HashMap;
use std::ffi::c_void;

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Compiler, Module, Source, element_macro};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Function, Launch, Stream, parameters};
use crate::cuda::error::CudaError;
use crate::ops::bucket::op::BucketBlock;
use crate::ops::bucket::step_numbers::{StepControl, StepNumbers, StepParams};

/// Scratch that ops share, one after the other: partial sums of 264 rows of 16,384 fp32, or the
/// order of a million tokens. An op that needs more makes it grow, which waits for the device.
pub(crate) const SCRATCH_BYTES: usize = 20 << 20;

/// Positions whose turns lie in a table; of those beyond each element computes its own.
const TURN_POSITIONS: usize = 1 << 15;

/// Where the master of a weight lies, as the kernel's macro counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MasterKind {
    Weight = 0,
    LowBits = 1,
    Separate = 2,
}

/// A compilation unit.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum Unit {
    Norm { element: DType, dim: usize, group: usize, rows: usize },
    NormRope {
        element: DType,
        head_dim: usize,
        heads: usize,
        norm: bool,
        group: usize,
        spans: usize,
    },
    ColumnSums { element: DType },
    Elementwise { element: DType },
    Embed { element: DType, table: DType },
    CachedAttention { element: DType, head_dim: usize },
    Convert,
    Wire { element: DType },
    Numbers { gradient: DType },
    Router,
    AdamW { master: MasterKind, weight: DType, moment: DType, gradient: DType },
}

/// Elements in 16 bytes if rows of `dim` are whole chunks, else one.
pub(crate) fn vector(element: DType, dim: usize) -> usize {
    let chunk = 16 / element.size();
    if dim.is_multiple_of(chunk) { chunk } else { 1 }
}

impl Unit {
    pub(crate) fn source(&self, arch: &'static str) -> Source {
        const ELEMENTS: &str = include_str!("elements.cu");
        const PHILOX: &str = include_str!("philox.cu");
        let kind = element_macro;
        let build = |name: &str, macros: &[(&str, usize)], parts: &[&str]| {
            Source::new(format!("{name} {self:?}"), arch, macros, parts)
        };
        match *self {
            Unit::Norm { element, dim, group, rows } => {
                let vec = vector(element, dim);
                let macros = [
                    ("ELEMENT", kind(element)),
                    ("DIM", dim),
                    ("VEC", vec),
                    ("GROUP", group),
                    ("ROWS", rows),
                ];
                build("norm", &macros, &[ELEMENTS, include_str!("../ops/norm/norm.cu")])
            }
            Unit::NormRope { element, head_dim, heads, norm, group, spans } => {
                let macros = [
                    ("ELEMENT", kind(element)),
                    ("HEAD_DIM", head_dim),
                    ("HEADS", heads),
                    ("NORM", usize::from(norm)),
                    ("VEC", vector(element, head_dim / 2)),
                    ("GROUP", group),
                    ("SPANS", spans),
                ];
                let parts = [ELEMENTS, PHILOX, include_str!("../ops/rope/norm_rope.cu")];
                build("rope", &macros, &parts)
            }
            Unit::ColumnSums { element } => {
                let parts = [ELEMENTS, include_str!("../ops/matmul/column_sums.cu")];
                build("sums", &[("ELEMENT", kind(element))], &parts)
            }
            Unit::Elementwise { element } => {
                let parts = [ELEMENTS, PHILOX, include_str!("../ops/elementwise/elementwise.cu")];
                build("elements", &[("ELEMENT", kind(element))], &parts)
            }
            Unit::Embed { element, table } => {
                let macros = [("ELEMENT", kind(element)), ("TABLE", kind(table))];
                build("embedding", &macros, &[ELEMENTS, include_str!("../ops/embed/embed.cu")])
            }
            Unit::CachedAttention { element, head_dim } => {
                let macros = [("ELEMENT", kind(element)), ("HEAD_DIM", head_dim)];
                let cached = include_str!("../ops/attention/cached_attention.cu");
                build("cache", &macros, &[ELEMENTS, cached])
            }
            Unit::Convert => {
                build("conversion", &[("ELEMENT", 0)], &[include_str!("../ops/convert/convert.cu")])
            }
            Unit::Wire { element } => {
                let macros = [("ELEMENT", 0), ("ROW", kind(element))];
                let rows = include_str!("../ops/wire/wire_rows.cu");
                let parts = [include_str!("../ops/wire/wire.cu"), rows];
                build("wire", &macros, &parts)
            }
            Unit::Numbers { gradient } => {
                let mut macros = places();
                macros.push(("ELEMENT", kind(gradient)));
                let numbers = include_str!("../ops/bucket/step_numbers.cu");
                build("numbers", &macros, &[ELEMENTS, numbers])
            }
            Unit::Router => {
                let macros = [("ELEMENT", kind(DType::F32))];
                build("router", &macros, &[include_str!("../ops/router/router.cu")])
            }
            Unit::AdamW { master, weight, moment, gradient } => {
                let mut macros = places();
                macros.extend([
                    ("ELEMENT", kind(weight)),
                    ("MASTER", master as usize),
                    ("MOMENT", kind(moment)),
                    ("GRADIENT", kind(gradient)),
                    ("AT_ONCE", 2),
                ]);
                build("optimizer", &macros, &[PHILOX, include_str!("../ops/bucket/optimizer.cu")])
            }
        }
    }
}

/// The places in the vectors of numbers, as macros.
fn places() -> Vec<(&'static str, usize)> {
    vec![
        ("NUMBER_LOSS", StepNumbers::LOSS),
        ("NUMBER_VALID_TARGETS", StepNumbers::VALID_TARGETS),
        ("NUMBER_AUX_LOSS", StepNumbers::AUX_LOSS),
        ("NUMBER_Z_LOSS", StepNumbers::Z_LOSS),
        ("NUMBER_SQUARED_NORM", StepNumbers::SQUARED_NORM),
        ("NUMBER_NON_FINITE", StepNumbers::NON_FINITE),
        ("NUMBER_ROUTED_OVERFLOWS", StepNumbers::ROUTED_OVERFLOWS),
        ("NUMBER_HALTED", StepNumbers::HALTED),
        ("NUMBER_UPDATES", StepNumbers::UPDATES),
        ("PARAM_LOSS_SCALE", StepParams::LOSS_SCALE),
        ("PARAM_NORM_MAX", StepParams::NORM_MAX),
        ("PARAM_STEP", StepParams::STEP),
        ("PARAM_CLASSES", StepParams::CLASSES),
        ("PARAM_EACH", StepParams::EACH),
        ("PARAM_RATE", StepParams::RATE),
        ("PARAM_CORRECTION", StepParams::CORRECTION),
        ("PARAM_KEEP", StepParams::KEEP),
        ("PARAM_ACTIVE", StepParams::ACTIVE),
        ("CONTROL_APPLY", StepControl::APPLY),
        ("CONTROL_GRADIENT_SCALE", StepControl::GRADIENT_SCALE),
        ("CONTROL_NORM", StepControl::NORM),
        ("CONTROL_UPDATES", StepControl::UPDATES),
        ("CONTROL_HALTED", StepControl::HALTED),
        ("BLOCK_WORDS", BucketBlock::WORDS),
        ("BLOCK_DECAYS", BucketBlock::DECAYS as usize),
        ("BLOCK_FROZEN", BucketBlock::FROZEN as usize),
        ("BLOCK_UNCOUNTED", BucketBlock::UNCOUNTED as usize),
        ("BLOCK_CLASS_SHIFT", BucketBlock::CLASS_SHIFT as usize),
    ]
}

/// The turns of one (theta, half of a head) on the device.
#[derive(Debug)]
struct Turns {
    theta: f64,
    half: usize,
    arena: Arena,
    /// F64 [half]
    frequencies: Buffer,
    /// F32 [`TURN_POSITIONS`, 2, half]
    table: Buffer,
}

/// Addresses of a table of turns.
#[derive(Clone, Copy, Debug)]
pub(crate) struct TurnsAt {
    pub table: u64,
    pub positions: u32,
    pub frequencies: u64,
}

/// What the ops keep from call to call.
#[derive(Debug, Default)]
pub(crate) struct StepOps {
    modules: HashMap<Unit, Module>,
    functions: HashMap<(Unit, &'static str), Function>,
    scratch: Option<Arena>,
    /// How often the scratch has moved: graphs name it.
    moves: u64,
    ticket: Option<Arena>,
    turns: Vec<Turns>,
}

/// One op on its way to the device.
pub(crate) struct Enqueue<'a> {
    ops: &'a mut StepOps,
    compiler: &'a Compiler,
    pub stream: &'a Stream,
    arena: &'a Arena,
    /// Ops are recorded: nothing may be made for them.
    captured: bool,
}

impl CudaDevice {
    /// Does `op`, unless one failed before it.
    pub(crate) fn enqueue(&mut self, op: impl FnOnce(&mut Enqueue<'_>) -> Result<(), CudaError>) {
        let mut ops = std::mem::take(&mut *self.step_ops);
        let (moves, captured) = (ops.moves, self.graphs.open);
        self.attempt(|| {
            let (compiler, stream, arena) = (&self.compiler, &self.stream, &self.arena);
            Ok(op(&mut Enqueue { ops: &mut ops, compiler, stream, arena, captured })?)
        });
        if ops.moves != moves {
            self.forget_captured();
        }
        *self.step_ops = ops;
    }
}

impl Enqueue<'_> {
    pub(crate) fn at(&self, buffer: Buffer) -> u64 {
        self.arena.address(buffer)
    }

    /// The address of a buffer whose kind and length were promised.
    pub(crate) fn of(&self, buffer: Buffer, dtype: DType, len: usize) -> u64 {
        assert_eq!((buffer.dtype(), buffer.len()), (dtype, len), "{buffer:?}");
        self.at(buffer)
    }

    /// The address of a vector of elements or of fp32, and whether it is of fp32.
    pub(crate) fn either(&self, buffer: Buffer, element: DType, len: usize) -> (u64, i32) {
        let dtype = buffer.dtype();
        assert!(dtype == element || dtype == DType::F32, "{buffer:?} beside {element:?}");
        assert_eq!(buffer.len(), len, "{buffer:?}");
        (self.at(buffer), i32::from(dtype == DType::F32))
    }

    /// What is made for an op waits for the device, or its bytes come from the host.
    fn makes(&self, what: &str) -> Result<(), CudaError> {
        match self.captured {
            true => Err(CudaError::NotCaptured { why: format!("{what} would have to be made") }),
            false => Ok(()),
        }
    }

    fn function(&mut self, unit: Unit, name: &'static str) -> Result<&Function, CudaError> {
        if !self.ops.functions.contains_key(&(unit, name)) {
            self.makes(name)?;
            if !self.ops.modules.contains_key(&unit) {
                let arch = Arch::of(self.compiler.gpu())?.target();
                let loaded = self.compiler.load(&[unit.source(arch)], &|_, _| ())?;
                self.ops.modules.extend(loaded.into_iter().map(|module| (unit, module)));
            }
            let function = self.ops.modules[&unit].function(name)?;
            self.ops.functions.insert((unit, name), function);
        }
        Ok(&self.ops.functions[&(unit, name)])
    }

    /// # Safety
    /// As of [`Function::launch`].
    pub(crate) unsafe fn launch(
        &mut self,
        (unit, name): (Unit, &'static str),
        launch: Launch,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let stream = self.stream;
        let function = self.function(unit, name)?;
        // SAFETY: the caller's promise.
        unsafe { function.launch(stream, launch, parameters) }
    }

    /// Scratch for what `plan` has; good until the next op asks.
    pub(crate) fn scratch(&mut self, plan: &ArenaPlan) -> Result<Scratch, CudaError> {
        let held = self.ops.scratch.as_ref().map_or(0, Arena::bytes);
        if held < plan.bytes() {
            self.makes("more scratch")?;
            self.ops.moves += u64::from(held > 0);
            self.ops.scratch = None;
            let bytes = plan.bytes().max(SCRATCH_BYTES);
            self.ops.scratch = Some(Arena::new(self.compiler.gpu(), bytes)?);
        }
        let mut all = ArenaPlan::new();
        let base = all.alloc(DType::U8, plan.bytes());
        Ok(Scratch(self.ops.scratch.as_ref().map_or(0, |arena| arena.address(base))))
    }

    /// Sets every byte of a range of the scratch to zero.
    pub(crate) fn zero_scratch(&self, range: Buffer) -> Result<(), CudaError> {
        match &self.ops.scratch {
            Some(arena) => arena.fill_bytes(self.stream, range, 0),
            None => Ok(()),
        }
    }

    /// The address of a word that is zero between launches.
    pub(crate) fn ticket(&mut self) -> Result<u64, CudaError> {
        let mut plan = ArenaPlan::new();
        let word = plan.alloc(DType::U32, 1);
        if self.ops.ticket.is_none() {
            self.makes("a ticket")?;
            let arena = Arena::new(self.compiler.gpu(), plan.bytes())?;
            arena.fill_bytes(self.stream, word, 0)?;
            self.ops.ticket = Some(arena);
        }
        Ok(self.ops.ticket.as_ref().map_or(0, |arena| arena.address(word)))
    }

    /// The table of turns, made when first asked for by `unit`, a kernel of rotations.
    pub(crate) fn turns(
        &mut self,
        unit: Unit,
        theta: f64,
        half: usize,
    ) -> Result<TurnsAt, CudaError> {
        let same = |turns: &Turns| turns.theta.to_bits() == theta.to_bits() && turns.half == half;
        let found = match self.ops.turns.iter().position(same) {
            Some(found) => found,
            None => {
                let made = self.make_turns(unit, theta, half)?;
                self.ops.turns.push(made);
                self.ops.turns.len() - 1
            }
        };
        let turns = &self.ops.turns[found];
        Ok(TurnsAt {
            table: turns.arena.address(turns.table),
            positions: TURN_POSITIONS as u32,
            frequencies: turns.arena.address(turns.frequencies),
        })
    }

    fn make_turns(&mut self, unit: Unit, theta: f64, half: usize) -> Result<Turns, CudaError> {
        self.makes("a table of turns")?;
        let mut plan = ArenaPlan::new();
        let frequencies = plan.alloc(DType::F64, half);
        let table = plan.alloc(DType::F32, 2 * half * TURN_POSITIONS);
        let arena = Arena::new(self.compiler.gpu(), plan.bytes())?;
        arena.write(frequencies, &crate::ops::rope::cpu::frequencies(theta, half))?;
        let (from, to) = (arena.address(frequencies), arena.address(table));
        let (positions, len) = (TURN_POSITIONS as i32, half * TURN_POSITIONS);
        let launch = Launch::new(len.div_ceil(256), 256);
        // SAFETY: the parameters are those of `rope_table`, the buffers as long as it writes.
        unsafe { self.launch((unit, "rope_table"), launch, parameters![from, to, positions])? };
        Ok(Turns { theta, half, arena, frequencies, table })
    }
}

/// Addresses in the scratch of one op.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch(u64);

impl Scratch {
    /// Of a buffer of the plan that the scratch was asked for.
    pub(crate) fn at(self, buffer: Buffer) -> u64 {
        self.0 + buffer.offset() as u64
    }
}

/// Whether 16-byte accesses to all of these are aligned.
pub(crate) fn all_whole(addresses: &[u64]) -> i32 {
    i32::from(addresses.iter().all(|address| address.is_multiple_of(16)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// A unit of every kind, for every element and odd sizes: what tests compile.
    pub(crate) fn units() -> Vec<Unit> {
        use crate::ops::norm::cuda::{norm_unit, rope_unit};
        let mut units = vec![Unit::Convert, Unit::Router];
        units.extend([DType::Bf16, DType::F32].map(|element| Unit::Wire { element }));
        for element in [DType::Bf16, DType::F16, DType::F32] {
            for dim in [33, 2048] {
                units.extend([false, true].map(|backward| norm_unit(element, dim, backward)));
            }
            for (head_dim, heads, norm) in [(128, 16, true), (128, 1, true), (34, 3, false)] {
                let unit = |backward| rope_unit(element, head_dim, heads, norm, backward);
                units.extend([false, true].map(unit));
            }
            units.extend([Unit::ColumnSums { element }, Unit::Elementwise { element }]);
            units.push(Unit::Embed { element, table: element });
            units.push(Unit::Embed { element, table: DType::F32 });
            units.push(Unit::Numbers { gradient: element });
            units.extend([16, 96, 128, 256].map(|head_dim| {
                Unit::CachedAttention { element, head_dim }
            }));
        }
        for moment in [DType::F32, DType::Bf16] {
            for (master, weight, gradient) in [
                (MasterKind::Weight, DType::F32, DType::F32),
                (MasterKind::LowBits, DType::Bf16, DType::Bf16),
                (MasterKind::LowBits, DType::Bf16, DType::F32),
                (MasterKind::Separate, DType::F16, DType::F16),
                (MasterKind::Separate, DType::F16, DType::F32),
                (MasterKind::Separate, DType::Bf16, DType::Bf16),
            ] {
                units.push(Unit::AdamW { master, weight, moment, gradient });
            }
        }
        units
    }
}
