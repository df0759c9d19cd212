//! Rotations, and norms with them.

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::compile::element_macro;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Launch, parameters};
use crate::cuda::enqueue::{ELEMENTS, Enqueue, PHILOX, Text, Unit, vector};
use crate::cuda::error::CudaError;
use crate::ops::matmul::cuda::{block, column_sums, groups, part_of, partials};
use crate::ops::rope::op::{NormRope, NormRopeBackward, Rope};

static ROPE: Text = Text {
    name: "rope",
    macros: &["ELEMENT", "HEAD_DIM", "HEADS", "NORM", "VEC", "GROUP", "SPANS"],
    constants: &[],
    parts: &[ELEMENTS, PHILOX, include_str!("norm_rope.cu")],
};

/// Positions whose turns lie in a table; of those beyond each element computes its own.
const TURN_POSITIONS: usize = 1 << 15;

/// Kernels of a rotation, and how they are launched.
#[derive(Clone, Copy, Debug)]
pub(crate) struct RopeUnit {
    pub unit: Unit,
    /// Threads of a span
    group: usize,
    /// Spans in flight
    spans: usize,
}

/// The kernels that turn spans of `heads` heads together.
pub(crate) fn rope_unit(
    element: DType,
    head_dim: usize,
    heads: usize,
    norm: bool,
    backward: bool,
) -> RopeUnit {
    let a_head = head_dim / 2 / vector(element, head_dim / 2);
    let units = heads * a_head;
    let (each, spans) = match (heads > 1, backward) {
        (true, false) => (2, 1),
        (false, false) => (1, 2),
        (_, true) => (1, 1),
    };
    let group = units.div_ceil(each).next_power_of_two().clamp(1, 1024);
    let vec = vector(element, head_dim / 2);
    let macros =
        [element_macro(element), head_dim, heads, usize::from(norm), vec, group, spans];
    RopeUnit { unit: ROPE.unit(macros), group, spans }
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

impl CudaDevice {
    pub(crate) fn norm_rope(&mut self, op: &NormRope) {
        let (spans, dim) = op.spans();
        self.enqueue(|to| {
            let element = op.x.dtype();
            let unit = rope_unit(element, op.head_dim, op.span_heads(), true, false);
            let turns = turns(to, unit.unit, op.theta, op.head_dim / 2)?;
            let (w, w_fp32) = to.either(op.w, element, dim);
            let rstd = to.of(op.rstd, DType::F32, spans);
            let call = RopeCall {
                x: to.at(op.x),
                y: to.of(op.y, element, spans * dim),
                positions: to.of(op.positions, DType::U32, op.tokens),
                spans,
                spans_a_token: op.heads / op.span_heads(),
                turns,
            };
            rotate(to, unit, call, (w, w_fp32, rstd, op.eps as f32), false)
        });
    }

    pub(crate) fn rope(&mut self, op: &Rope) {
        self.enqueue(|to| {
            let element = op.x.dtype();
            assert!(op.head_dim.is_multiple_of(2), "{op:?}");
            let unit = rope_unit(element, op.head_dim, op.heads, false, false);
            let turns = turns(to, unit.unit, op.theta, op.head_dim / 2)?;
            let x = to.of(op.x, element, op.tokens * op.heads * op.head_dim);
            let positions = to.of(op.positions, DType::U32, op.tokens);
            let (spans, spans_a_token) = (op.tokens, 1);
            let call = RopeCall { x, y: x, positions, spans, spans_a_token, turns };
            rotate(to, unit, call, (0, 0, 0, 0.0), op.inverse)
        });
    }

    pub(crate) fn norm_rope_backward(&mut self, op: &NormRopeBackward) {
        self.enqueue(|to| norm_rope_backward(to, op));
    }
}

/// What a rotation reads and writes.
struct RopeCall {
    x: u64,
    y: u64,
    positions: u64,
    spans: usize,
    spans_a_token: usize,
    turns: TurnsAt,
}

fn rotate(
    to: &mut Enqueue<'_>,
    unit: RopeUnit,
    call: RopeCall,
    (w, w_fp32, rstd, eps): (u64, i32, u64, f32),
    inverse: bool,
) -> Result<(), CudaError> {
    let RopeUnit { unit, group, spans: in_flight } = unit;
    let RopeCall { x, y, positions, spans, spans_a_token, turns } = call;
    let TurnsAt { table, positions: known, frequencies } = turns;
    let launch = Launch::new(spans.div_ceil(groups(group) * in_flight), block(group));
    let (spans, a_token, inverse) = (spans as i32, spans_a_token as i32, i32::from(inverse));
    let parameters = parameters![
        x, w, w_fp32, positions, table, known, frequencies, y, rstd, spans, a_token, eps, inverse
    ];
    // SAFETY: the parameters are those of `norm_rope`, the lengths were checked.
    unsafe { to.launch((unit, "norm_rope"), launch, parameters) }
}

fn norm_rope_backward(to: &mut Enqueue<'_>, op: &NormRopeBackward) -> Result<(), CudaError> {
    let forward = &op.forward;
    let (spans, dim) = forward.spans();
    let element = forward.x.dtype();
    let unit = rope_unit(element, forward.head_dim, forward.span_heads(), true, true);
    let RopeUnit { unit, group, .. } = unit;
    let TurnsAt { table, positions: known, frequencies } =
        turns(to, unit, forward.theta, forward.head_dim / 2)?;
    let (w, w_fp32) = to.either(forward.w, element, dim);
    let rstd = to.of(forward.rstd, DType::F32, spans);
    let positions = to.of(forward.positions, DType::U32, forward.tokens);
    let [x, dy, dx] =
        [forward.x, op.dy, op.dx].map(|buffer| to.of(buffer, element, spans * dim));
    let each = part_of(spans, groups(group));
    let parts = spans.div_ceil(each);
    let partial = partials(to, parts, dim)?;
    let a_token = (forward.heads / forward.span_heads()) as i32;
    let (spans, each) = (spans as i32, each as i32);
    let parameters = parameters![
        x, w, w_fp32, rstd, positions, table, known, frequencies, dy, dx, partial, spans, a_token,
        each
    ];
    let launch = Launch::new(parts, block(group));
    // SAFETY: the parameters are those of `norm_rope_backward`, the lengths were checked.
    unsafe { to.launch((unit, "norm_rope_backward"), launch, parameters)? };
    column_sums(to, element, (partial, parts), (op.dw, dim), op.accumulate_dw)
}

/// The table of turns, made when first asked for by `unit`, a kernel of rotations.
fn turns(
    to: &mut Enqueue<'_>,
    unit: Unit,
    theta: f64,
    half: usize,
) -> Result<TurnsAt, CudaError> {
    let same = |turns: &Turns| turns.theta.to_bits() == theta.to_bits() && turns.half == half;
    let found = match to.kept::<Vec<Turns>>().iter().position(same) {
        Some(found) => found,
        None => {
            let made = make_turns(to, unit, theta, half)?;
            to.kept::<Vec<Turns>>().push(made);
            to.kept::<Vec<Turns>>().len() - 1
        }
    };
    let turns = &to.kept::<Vec<Turns>>()[found];
    Ok(TurnsAt {
        table: turns.arena.address(turns.table),
        positions: TURN_POSITIONS as u32,
        frequencies: turns.arena.address(turns.frequencies),
    })
}

fn make_turns(
    to: &mut Enqueue<'_>,
    unit: Unit, theta: f64, half: usize) -> Result<Turns, CudaError> {
    let mut plan = ArenaPlan::new();
    let frequencies = plan.alloc(DType::F64, half);
    let table = plan.alloc(DType::F32, 2 * half * TURN_POSITIONS);
    let arena = to.memory("a table of turns", plan.bytes())?;
    arena.write(frequencies, &crate::ops::rope::cpu::frequencies(theta, half))?;
    let (from, into) = (arena.address(frequencies), arena.address(table));
    let (positions, len) = (TURN_POSITIONS as i32, half * TURN_POSITIONS);
    let launch = Launch::new(len.div_ceil(256), 256);
    // SAFETY: the parameters are those of `rope_table`, the buffers as long as it writes.
    unsafe { to.launch((unit, "rope_table"), launch, parameters![from, into, positions])? };
    Ok(Turns { theta, half, arena, frequencies, table })
}
