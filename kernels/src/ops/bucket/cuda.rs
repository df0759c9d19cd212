//! The end of a step: numbers of gradients, what they decide, and AdamW a bucket.

use crate::buffer::{ArenaPlan, DType};
use crate::cuda::compile::element_macro;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::enqueue::{ELEMENTS, Enqueue, PHILOX, Text, Unit};
use crate::cuda::error::CudaError;
use crate::ops::bucket::op::{BucketAdamW, BucketBlock, DecideUpdate, GradientNumbers, Master};
use crate::ops::bucket::step_numbers::{StepControl, StepNumbers, StepParams};

/// The places in the vectors of numbers, as macros.
const PLACES: &[(&str, usize)] = &[
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
];

static NUMBERS: Text = Text {
    name: "numbers",
    macros: &["ELEMENT"],
    constants: PLACES,
    parts: &[ELEMENTS, include_str!("step_numbers.cu")],
};

static ADAMW: Text = Text {
    name: "optimizer",
    macros: &["ELEMENT", "MASTER", "MOMENT", "GRADIENT", "AT_ONCE"],
    constants: PLACES,
    parts: &[PHILOX, include_str!("optimizer.cu")],
};

pub(crate) fn numbers_unit(gradient: DType) -> Unit {
    NUMBERS.unit([element_macro(gradient)])
}

/// Where the master of a weight lies, as the kernel's macro counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(crate) enum MasterKind {
    Weight = 0,
    LowBits = 1,
    Separate = 2,
}

pub(crate) fn adamw_unit(master: MasterKind, [weight, moment, gradient]: [DType; 3]) -> Unit {
    let [weight, moment, gradient] = [weight, moment, gradient].map(element_macro);
    ADAMW.unit([weight, master as usize, moment, gradient, 2])
}

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
            let kernel = (numbers_unit(DType::F32), "decide");
            let parameters = parameters![params, numbers, control];
            // SAFETY: the parameters are those of `decide`, the lengths were checked.
            unsafe { to.launch(kernel, Launch::new(1, 1), parameters) }
        });
    }

    pub(crate) fn bucket_adamw(&mut self, op: &BucketAdamW) {
        let blocks = op.blocks();
        self.enqueue(|to| adamw(to, op, blocks));
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
    let kernel = (numbers_unit(g.dtype()), "gradient_numbers");
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
    let unit = adamw_unit(kind, [op.weight, op.moment1, op.gradient].map(|part| part.dtype()));
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
