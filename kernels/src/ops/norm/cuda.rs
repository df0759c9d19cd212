//! Norms of rows.

use crate::buffer::DType;
use crate::cuda::compile::element_macro;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::enqueue::{ELEMENTS, Enqueue, Text, Unit, vector};
use crate::cuda::error::CudaError;
use crate::ops::matmul::cuda::{block, column_sums, groups, part_of, partials};
use crate::ops::norm::op::{RmsNorm, RmsNormBackward};

static NORM: Text = Text {
    name: "norm",
    macros: &["ELEMENT", "DIM", "VEC", "GROUP", "ROWS"],
    constants: &[],
    parts: &[ELEMENTS, include_str!("norm.cu")],
};

/// The kernels that norm rows of `dim`, by what did best on an H200: forward 256 threads a row of
/// up to four loads each; backward threads of two loads where that leaves none idle, else of up to
/// four.
pub(crate) fn norm_unit(element: DType, dim: usize, backward: bool) -> (Unit, usize) {
    let units = dim / vector(element, dim);
    let fours = units.div_ceil(4).next_power_of_two();
    let group = match (backward, units.is_power_of_two()) {
        (false, _) => units.next_power_of_two().min(256).max(fours),
        (true, true) => (units / 2).max(1),
        (true, false) => fours,
    };
    let group = group.min(1024);
    (NORM.unit([element_macro(element), dim, vector(element, dim), group, 1]), group)
}

impl CudaDevice {
    pub(crate) fn rms_norm(&mut self, op: &RmsNorm) {
        self.enqueue(|to| norm(to, op));
    }

    pub(crate) fn rms_norm_backward(&mut self, op: &RmsNormBackward) {
        self.enqueue(|to| norm_backward(to, op));
    }
}

fn norm(to: &mut Enqueue<'_>, op: &RmsNorm) -> Result<(), CudaError> {
    let RmsNorm { rows, dim, eps, x, w, y, rstd } = *op;
    let element = x.dtype();
    let (unit, group) = norm_unit(element, dim, false);
    let (w, w_fp32) = to.either(w, element, dim);
    let rstd = to.of(rstd, DType::F32, rows);
    let [x, y] = [x, y].map(|buffer| to.of(buffer, element, rows * dim));
    let launch = Launch::new(rows.div_ceil(groups(group)), block(group));
    let (rows, eps) = (rows as i32, eps as f32);
    let parameters = parameters![x, w, w_fp32, y, rstd, rows, eps];
    // SAFETY: the parameters are those of `rms_norm`, the lengths were checked.
    unsafe { to.launch((unit, "rms_norm"), launch, parameters) }
}

fn norm_backward(to: &mut Enqueue<'_>, op: &RmsNormBackward) -> Result<(), CudaError> {
    let (rows, dim) = (op.rows, op.dim);
    let element = op.x.dtype();
    let (unit, group) = norm_unit(element, dim, true);
    let (w, w_fp32) = to.either(op.w, element, dim);
    let rstd = to.of(op.rstd, DType::F32, rows);
    let [x, dy, dx] = [op.x, op.dy, op.dx].map(|buffer| to.of(buffer, element, rows * dim));
    let each = part_of(rows, groups(group));
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
