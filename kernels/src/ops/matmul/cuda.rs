//! Products by cuBLASLt, and biases.

use crate::buffer::{ArenaPlan, Buffer, DType};
use crate::cuda::compile::element_macro;
use crate::cuda::dense::DenseShape;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::enqueue::{ELEMENTS, Enqueue, Text, Unit};
use crate::cuda::error::CudaError;
use crate::ops::matmul::op::{AddBias, BiasBackward, Matmul};

/// Sums over rows, in two stages of fixed order.
static COLUMN_SUMS: Text = Text {
    name: "sums",
    macros: &["ELEMENT"],
    constants: &[],
    parts: &[ELEMENTS, include_str!("column_sums.cu")],
};

pub(crate) fn unit(element: DType) -> Unit {
    COLUMN_SUMS.unit([element_macro(element)])
}

/// Parts of a sum over rows at most: two blocks for each multiprocessor of an H200. Fixed, since
/// the bits depend on it.
const PARTS_MAX: usize = 264;

/// Threads of a block at least.
const BLOCK: usize = 256;

/// Groups of a block of a norm's or a rotation's kernel.
pub(crate) fn groups(group: usize) -> usize {
    BLOCK.max(group) / group
}

pub(crate) fn block(group: usize) -> u32 {
    BLOCK.max(group) as u32
}

/// Rows of a part: all parts alike, whole turns of `a_turn` rows.
pub(crate) fn part_of(rows: usize, a_turn: usize) -> usize {
    rows.div_ceil(PARTS_MAX).next_multiple_of(a_turn).max(a_turn)
}

impl CudaDevice {
    pub(crate) fn matmul(&mut self, op: &Matmul) {
        self.product(op, self.dense.tf32);
    }

    pub(crate) fn exact_matmul(&mut self, op: &Matmul) {
        self.product(op, false);
    }

    fn product(&mut self, op: &Matmul, tf32: bool) {
        let shape = DenseShape {
            output: op.c.dtype(),
            accumulate: op.accumulate,
            tf32,
            ..DenseShape::new(op.layout, [op.m, op.n, op.k], op.a.dtype())
        };
        self.on_products(|products, stream, arena| {
            products.product(stream, arena, shape, [op.a, op.b, op.c])
        });
    }

    pub(crate) fn add_bias(&mut self, op: &AddBias) {
        let AddBias { rows, columns, x, bias } = *op;
        self.enqueue(|to| {
            let element = x.dtype();
            let (bias, fp32) = to.either(bias, element, columns);
            let x = to.of(x, element, rows * columns);
            let mut launch = Launch::new(columns.div_ceil(BLOCK), BLOCK as u32);
            launch.grid[1] = rows.clamp(1, 4096) as u32;
            let kernel = (unit(element), "add_bias");
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
            let kernel = (unit(element), "bias_backward");
            let (rows, wide, each) = (rows as i32, columns as i32, rows_a_part as i32);
            // SAFETY: the parameters are those of `bias_backward`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters![dy, partial, rows, wide, each])? };
            column_sums(to, element, (partial, parts), (dbias, columns), accumulate)
        });
    }
}

/// Scratch for f32 [parts, columns].
pub(crate) fn partials(
    to: &mut Enqueue<'_>,
    parts: usize,
    columns: usize,
) -> Result<u64, CudaError> {
    let mut plan = ArenaPlan::new();
    let partial = plan.alloc(DType::F32, parts * columns);
    Ok(to.scratch(&plan)?.at(partial))
}

/// The second stage: out (+)= the parts' sums in their order.
pub(crate) fn column_sums(
    to: &mut Enqueue<'_>,
    element: DType,
    (partial, parts): (u64, usize),
    (out, columns): (Buffer, usize),
    accumulate: bool,
) -> Result<(), CudaError> {
    let (out, fp32) = to.either(out, element, columns);
    let launch = Launch::new(columns.div_ceil(32), 1024);
    let (parts, columns, accumulate) = (parts as i32, columns as i32, i32::from(accumulate));
    let kernel = (unit(element), "column_sums");
    let parameters = parameters![partial, parts, columns, out, fp32, accumulate];
    // SAFETY: the parameters are those of `column_sums`, the partial sums as many as it reads.
    unsafe { to.launch(kernel, launch, parameters) }
}
