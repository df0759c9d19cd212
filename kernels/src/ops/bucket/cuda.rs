//! The end of a step: numbers of gradients, what they decide, and AdamW a bucket.

use crate::buffer::{ArenaPlan, DType};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::error::CudaError;
use crate::cuda::step_ops::{Enqueue, MasterKind, Unit};
use crate::ops::bucket::op::{BucketAdamW, DecideUpdate, GradientNumbers, Master};
use crate::ops::bucket::step_numbers::{StepControl, StepNumbers, StepParams};
use crate::ops::router::op::{MoveCorrections, SumRows};

/// Parts of the sum of squares: eight blocks for each multiprocessor of an H200. Fixed, since the
/// bits depend on it.
const PARTS_MAX: usize = 1056;

/// The kernel's `Factors`.
#[repr(C)]
struct Factors {
    beta1: f32,
    one_minus_beta1: f32,
    beta2: f32,
    one_minus_beta2: f32,
    eps: f32,
}

impl CudaDevice {
    pub(crate) fn gradient_numbers(&mut self, op: &GradientNumbers) {
        let blocks = op.blocks();
        self.enqueue(|to| gradient_numbers(to, op, blocks));
    }

    pub(crate) fn decide_update(&mut self, op: &DecideUpdate) {
        self.enqueue(|to| {
            let params = to.of(op.params, DType::F64, StepParams::LEN);
            let control = to.of(op.control, DType::F64, StepControl::LEN);
            assert!(op.numbers.len() >= StepNumbers::LOADS, "{op:?}");
            let numbers = to.at(op.numbers);
            let kernel = (Unit::Numbers { gradient: DType::F32 }, "decide");
            let parameters = parameters![params, numbers, control];
            // SAFETY: the parameters are those of `decide`, the lengths were checked.
            unsafe { to.launch(kernel, Launch::new(1, 1), parameters) }
        });
    }

    pub(crate) fn bucket_adamw(&mut self, op: &BucketAdamW) {
        let blocks = op.blocks();
        self.enqueue(|to| adamw(to, op, blocks));
    }

    pub(crate) fn sum_rows(&mut self, op: &SumRows) {
        self.enqueue(|to| {
            let (x, out) = (to.at(op.x), to.at(op.out));
            let width = op.out.len();
            let (rows, columns) = ((op.x.len() / width.max(1)) as u64, width as u64);
            let kernel = (Unit::Numbers { gradient: DType::F32 }, "sum_rows");
            let parameters = parameters![x, out, rows, columns];
            let launch = Launch::new(width.div_ceil(256).max(1), 256);
            // SAFETY: the parameters are those of `sum_rows`, `x` has that many whole rows.
            unsafe { to.launch(kernel, launch, parameters) }
        });
    }

    pub(crate) fn move_corrections(&mut self, op: &MoveCorrections) {
        self.enqueue(|to| {
            let bias = to.of(op.bias, DType::F32, op.loads.len());
            let numbers = to.of(op.numbers, DType::F64, op.numbers.len());
            assert!(op.loads.end <= op.numbers.len(), "{op:?}");
            let (loads, experts, rate) = (op.loads.start as i32, op.loads.len() as i32, op.rate);
            let kernel = (Unit::Numbers { gradient: DType::F32 }, "move_corrections");
            let parameters = parameters![numbers, bias, rate, loads, experts];
            // SAFETY: the parameters are those of `move_corrections`, the lengths were checked.
            unsafe { to.launch(kernel, Launch::new(1, 256), parameters) }
        });
    }
}

fn gradient_numbers(
    to: &mut Enqueue<'_>,
    op: &GradientNumbers,
    blocks: usize,
) -> Result<(), CudaError> {
    if blocks == 0 {
        return Ok(());
    }
    let each = blocks.div_ceil(PARTS_MAX).next_multiple_of(8);
    let parts = blocks.div_ceil(each);
    let mut plan = ArenaPlan::new();
    let part_squares = plan.alloc(DType::F64, parts);
    let part_counts = plan.alloc(DType::U32, parts);
    let scratch = to.scratch(&plan)?;
    let [part_squares, part_counts] = [part_squares, part_counts].map(|part| scratch.at(part));
    let ticket = to.ticket()?;
    let params = to.of(op.params, DType::F64, StepParams::LEN);
    let numbers = to.of(op.numbers, DType::F64, op.layout.len());
    let non_finite = op.layout.non_finite();
    let of_tensors = to.at(op.numbers.slice(non_finite.start, non_finite.len()));
    let tensors = op.layout.tensors as u32;
    let (table, g) = (to.at(op.table), op.gradient);
    let (values, out) = (to.at(g), to.of(op.sums, DType::F64, blocks));
    assert!(values.is_multiple_of(16), "gradients start at multiples of 16 bytes: {g:?}");
    let (len, blocks, each) = (g.len() as u64, blocks as i32, each as i32);
    let kernel = (Unit::Numbers { gradient: g.dtype() }, "gradient_numbers");
    let parameters = parameters![
        table, params, values, out, part_squares, part_counts, ticket, numbers, of_tensors, len,
        blocks, each, tensors
    ];
    // SAFETY: the parameters are those of `gradient_numbers`, the lengths were checked.
    unsafe { to.launch(kernel, Launch::new(parts, 256), parameters) }
}

fn adamw(to: &mut Enqueue<'_>, op: &BucketAdamW, blocks: usize) -> Result<(), CudaError> {
    if blocks == 0 {
        return Ok(());
    }
    let params = to.of(op.params, DType::F64, StepParams::LEN);
    let control = to.of(op.control, DType::F64, StepControl::LEN);
    let (low, master, kind) = match op.master {
        Master::Weight => (0, 0, MasterKind::Weight),
        Master::LowBits(low) => (to.at(low), 0, MasterKind::LowBits),
        Master::Separate(master) => (0, to.at(master), MasterKind::Separate),
    };
    let unit = Unit::AdamW {
        master: kind,
        weight: op.weight.dtype(),
        moment: op.moment1.dtype(),
        gradient: op.gradient.dtype(),
    };
    let weights = match kind {
        MasterKind::Weight => op.weight.dtype() == DType::F32,
        MasterKind::LowBits => op.weight.dtype() == DType::Bf16,
        MasterKind::Separate => matches!(op.weight.dtype(), DType::Bf16 | DType::F16),
    };
    let moments = matches!(op.moment1.dtype(), DType::F32 | DType::Bf16);
    assert!(weights && moments, "a GPU has no such update: {op:?}");
    let factors = Factors {
        beta1: op.beta1 as f32,
        one_minus_beta1: (1.0 - op.beta1) as f32,
        beta2: op.beta2 as f32,
        one_minus_beta2: (1.0 - op.beta2) as f32,
        eps: op.eps as f32,
    };
    let [table, weight, m, v, g] = [op.table, op.weight, op.moment1, op.moment2, op.gradient]
        .map(|buffer| to.at(buffer));
    for address in [weight, low, master, m, v, g] {
        assert!(address.is_multiple_of(16), "parts start at multiples of 16 bytes: {op:?}");
    }
    let parameters =
        parameters![table, params, control, factors, weight, low, master, m, v, g];
    // SAFETY: the parameters are those of `adamw_bucket`, the lengths were checked.
    unsafe { to.launch((unit, "adamw_bucket"), Launch::new(blocks, 256), parameters) }
}
