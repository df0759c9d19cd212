//! Norms, rotations, biases: ops over rows, with sums over rows in two stages of fixed order.

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::error::CudaError;
use crate::cuda::step_ops::{Enqueue, TurnsAt, Unit, vector};
use crate::ops::matmul::op::{AddBias, BiasBackward};
use crate::ops::norm::op::{RmsNorm, RmsNormBackward};
use crate::ops::rope::op::{NormRope, NormRopeBackward, Rope};

/// Parts of a sum over rows at most: two blocks for each multiprocessor of an H200. Fixed, since
/// the bits depend on it.
const PARTS_MAX: usize = 264;

/// Threads of a block at least.
const BLOCK: usize = 256;

/// The kernels that norm rows of `dim`, by what did best on an H200: forward 256 threads a row of
/// up to four loads each; backward threads of two loads where that leaves none idle, else of up to
/// four.
pub(crate) fn norm_unit(element: DType, dim: usize, backward: bool) -> Unit {
    let units = dim / vector(element, dim);
    let fours = units.div_ceil(4).next_power_of_two();
    let group = match (backward, units.is_power_of_two()) {
        (false, _) => units.next_power_of_two().min(256).max(fours),
        (true, true) => (units / 2).max(1),
        (true, false) => fours,
    };
    Unit::Norm { element, dim, group: group.min(1024), rows: 1 }
}

/// The kernels that turn spans of `heads` heads: threads of a span, and spans in flight.
pub(crate) fn rope_unit(
    element: DType,
    head_dim: usize,
    heads: usize,
    norm: bool,
    backward: bool,
) -> Unit {
    let a_head = head_dim / 2 / vector(element, head_dim / 2);
    let units = heads * a_head;
    let (each, spans) = match (heads > 1, backward) {
        (true, false) => (2, 1),
        (false, false) => (1, 2),
        (_, true) => (1, 1),
    };
    let group = units.div_ceil(each).next_power_of_two().clamp(1, 1024);
    Unit::NormRope { element, head_dim, heads, norm, group, spans }
}

/// Groups of a block of a norm's or a rotation's kernel.
fn groups(group: usize) -> usize {
    BLOCK.max(group) / group
}

fn block(group: usize) -> u32 {
    BLOCK.max(group) as u32
}

impl CudaDevice {
    pub(crate) fn rms_norm(&mut self, op: &RmsNorm) {
        self.enqueue(|to| norm(to, op));
    }

    pub(crate) fn rms_norm_backward(&mut self, op: &RmsNormBackward) {
        self.enqueue(|to| norm_backward(to, op));
    }

    pub(crate) fn norm_rope(&mut self, op: &NormRope) {
        let (spans, dim) = op.spans();
        self.enqueue(|to| {
            let element = op.x.dtype();
            let unit = rope_unit(element, op.head_dim, op.span_heads(), true, false);
            let turns = to.turns(unit, op.theta, op.head_dim / 2)?;
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
            let turns = to.turns(unit, op.theta, op.head_dim / 2)?;
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

    pub(crate) fn add_bias(&mut self, op: &AddBias) {
        let AddBias { rows, columns, x, bias } = *op;
        self.enqueue(|to| {
            let element = x.dtype();
            let (bias, fp32) = to.either(bias, element, columns);
            let x = to.of(x, element, rows * columns);
            let mut launch = Launch::new(columns.div_ceil(BLOCK), BLOCK as u32);
            launch.grid[1] = rows.clamp(1, 4096) as u32;
            let kernel = (Unit::ColumnSums { element }, "add_bias");
            let (rows, columns) = (rows as i32, columns as i32);
            // SAFETY: the parameters are those of `add_bias`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters![x, bias, fp32, rows, columns]) }
        });
    }

    pub(crate) fn bias_backward(&mut self, op: &BiasBackward) {
        let BiasBackward { rows, columns, accumulate, dy, dbias } = *op;
        self.enqueue(|to| {
            let element = dy.dtype();
            let dy = to.of(dy, element, rows * columns);
            let rows_a_part = rows.div_ceil(PARTS_MAX).next_multiple_of(8).max(8);
            let parts = rows.div_ceil(rows_a_part);
            let partial = partials(to, parts, columns)?;
            let mut launch = Launch::new(columns.div_ceil(32), 256);
            launch.grid[1] = parts as u32;
            let kernel = (Unit::ColumnSums { element }, "bias_backward");
            let (rows, wide, each) = (rows as i32, columns as i32, rows_a_part as i32);
            // SAFETY: the parameters are those of `bias_backward`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters![dy, partial, rows, wide, each])? };
            column_sums(to, element, (partial, parts), (dbias, columns), accumulate)
        });
    }
}

fn norm(to: &mut Enqueue<'_>, op: &RmsNorm) -> Result<(), CudaError> {
    let RmsNorm { rows, dim, eps, x, w, y, rstd } = *op;
    let element = x.dtype();
    let unit = norm_unit(element, dim, false);
    let Unit::Norm { group, rows: in_flight, .. } = unit else { unreachable!("a norm's unit") };
    let (w, w_fp32) = to.either(w, element, dim);
    let rstd = to.of(rstd, DType::F32, rows);
    let [x, y] = [x, y].map(|buffer| to.of(buffer, element, rows * dim));
    let launch = Launch::new(rows.div_ceil(groups(group) * in_flight), block(group));
    let (rows, eps) = (rows as i32, eps as f32);
    let parameters = parameters![x, w, w_fp32, y, rstd, rows, eps];
    // SAFETY: the parameters are those of `rms_norm`, the lengths were checked.
    unsafe { to.launch((unit, "rms_norm"), launch, parameters) }
}

fn norm_backward(to: &mut Enqueue<'_>, op: &RmsNormBackward) -> Result<(), CudaError> {
    let (rows, dim) = (op.rows, op.dim);
    let element = op.x.dtype();
    let unit = norm_unit(element, dim, true);
    let Unit::Norm { group, rows: in_flight, .. } = unit else { unreachable!("a norm's unit") };
    let (w, w_fp32) = to.either(op.w, element, dim);
    let rstd = to.of(op.rstd, DType::F32, rows);
    let [x, dy, dx] = [op.x, op.dy, op.dx].map(|buffer| to.of(buffer, element, rows * dim));
    let each = part_of(rows, groups(group) * in_flight);
    let parts = rows.div_ceil(each);
    let partial = partials(to, parts, dim)?;
    let accumulate = i32::from(op.accumulate_dx);
    let (rows, each) = (rows as i32, each as i32);
    let parameters =
        parameters![x, w, w_fp32, rstd, dy, dx, accumulate, partial, rows, each];
    let launch = Launch::new(parts, block(group));
    // SAFETY: the parameters are those of `rms_norm_backward`, the lengths were checked.
    unsafe { to.launch((unit, "rms_norm_backward"), launch, parameters)? };
    column_sums(to, element, (partial, parts), (op.dw, dim), op.accumulate_dw)
}

/// Rows of a part: all parts alike, whole turns of `a_turn` rows.
fn part_of(rows: usize, a_turn: usize) -> usize {
    rows.div_ceil(PARTS_MAX).next_multiple_of(a_turn).max(a_turn)
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
    unit: Unit,
    call: RopeCall,
    (w, w_fp32, rstd, eps): (u64, i32, u64, f32),
    inverse: bool,
) -> Result<(), CudaError> {
    let Unit::NormRope { group, spans: in_flight, .. } = unit else {
        unreachable!("a rotation's unit")
    };
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
    let Unit::NormRope { group, .. } = unit else { unreachable!("a rotation's unit") };
    let TurnsAt { table, positions: known, frequencies } =
        to.turns(unit, forward.theta, forward.head_dim / 2)?;
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

/// Scratch for f32 [parts, columns].
fn partials(to: &mut Enqueue<'_>, parts: usize, columns: usize) -> Result<u64, CudaError> {
    let mut plan = ArenaPlan::new();
    let partial = plan.alloc(DType::F32, parts * columns);
    Ok(to.scratch(&plan)?.at(partial))
}

/// The second stage: out (+)= the parts' sums in their order.
fn column_sums(
    to: &mut Enqueue<'_>,
    element: DType,
    (partial, parts): (u64, usize),
    (out, columns): (Buffer, usize),
    accumulate: bool,
) -> Result<(), CudaError> {
    let (out, fp32) = to.either(out, element, columns);
    let launch = Launch::new(columns.div_ceil(32), 1024);
    let (parts, columns, accumulate) = (parts as i32, columns as i32, i32::from(accumulate));
    let kernel = (Unit::ColumnSums { element }, "column_sums");
    let parameters = parameters![partial, parts, columns, out, fp32, accumulate];
    // SAFETY: the parameters are those of `column_sums`, the partial sums as many as it reads.
    unsafe { to.launch(kernel, launch, parameters) }
}
