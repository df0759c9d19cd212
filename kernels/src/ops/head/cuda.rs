//! The head with its loss: see [`crate::HeadLoss`].
//!
//! ```text
//! for each chunk: logits = x table^T -> softmax, loss, gradient in place -> dx, dtable
//! ```
//! The products are cuBLASLt's. What lies between them reads and writes the logits once: a block
//! keeps its token's row in shared memory while it looks for the sum.

use crate::buffer::DType;
use crate::cuda::arch::Arch;
use crate::cuda::compile::{Compiler, Source, element_macro};
use crate::cuda::dense::{DenseShape, Products};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Function, Launch, Stream, parameters};
use crate::cuda::enqueue::Kernels;
use crate::cuda::error::CudaError;
use crate::error::LayerError;
use crate::ops::head::op::{HeadDesc, HeadGradient, HeadLoss, HeadPlan, Scratch};
use crate::types::Layout;

/// Threads of a block, and 16-byte chunks of its row that each keeps in shared memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Rows {
    threads: usize,
    held: usize,
}

/// Bytes of a row with which two blocks share a multiprocessor of an H200, so that one computes
/// while the other loads and stores.
const SHARED_BYTES_OF_TWO: usize = 110 << 10;
/// Rounds of 1,024 chunks that one block keeps: 208 of an H200's 227 KiB, 144 of an A100's 163.
const ROUNDS_HELD_HOPPER: usize = 13;
const ROUNDS_HELD_OTHERS: usize = 9;

impl Rows {
    fn choose(arch: Arch, desc: &HeadDesc) -> Rows {
        let chunks = (desc.vocab * desc.element.size()).div_ceil(16);
        let small = chunks.next_power_of_two().clamp(32, 512);
        let rounds = chunks.div_ceil(small);
        if rounds * small * 16 <= SHARED_BYTES_OF_TWO {
            return Rows { threads: small, held: rounds };
        }
        let held = if arch.target() == "sm_90a" { ROUNDS_HELD_HOPPER } else { ROUNDS_HELD_OTHERS };
        Rows { threads: 1024, held: held.min(chunks.div_ceil(1024)) }
    }

    fn shared_bytes(self) -> u32 {
        (self.held * self.threads * 16) as u32
    }
}

/// A head's kernels and its plan.
#[derive(Clone, Debug)]
pub struct Head {
    desc: HeadDesc,
    plan: HeadPlan,
    rows: Rows,
    softmax: Function,
    sum: Function,
}

pub(crate) fn source(arch: Arch, desc: &HeadDesc) -> Source {
    let rows = Rows::choose(arch, desc);
    let macros = [
        ("ELEMENT", element_macro(desc.element)),
        ("VOCAB", desc.vocab),
        ("THREADS", rows.threads),
        ("HELD", rows.held),
    ];
    let parts = [include_str!("../../cuda/chunks.cu"), include_str!("head.cu")];
    let label = format!("head of {} in {:?}", desc.vocab, desc.element);
    Source::new(label, arch.target(), &macros, &parts)
}

impl Head {
    /// Compiles and loads what lies between the products.
    pub fn new(compiler: &Compiler, desc: HeadDesc) -> Result<Head, CudaError> {
        let arch = Arch::for_elements(compiler.gpu(), desc.element)?;
        let modules = compiler.load(&[source(arch, &desc)], &|_, _| ())?;
        let rows = Rows::choose(arch, &desc);
        let softmax = modules[0].function("head_softmax")?;
        softmax.allow_shared(rows.shared_bytes())?;
        let sum = modules[0].function("head_sum")?;
        Ok(Head { desc, plan: HeadPlan::cuda(&desc), rows, softmax, sum })
    }

    pub fn plan(&self) -> HeadPlan {
        self.plan
    }

    /// Enqueues `op`, whose desc is this head's.
    pub fn launch(
        &self,
        products: &mut Products,
        stream: &Stream,
        arena: &Arena,
        op: &HeadLoss,
        tf32: bool,
    ) -> Result<(), CudaError> {
        assert_eq!(op.desc, self.desc, "{op:?}");
        let HeadDesc { tokens, dim, .. } = self.desc;
        let parts = op.parts(&self.plan);
        if let (0, Some(HeadGradient { dtable, accumulate: false, .. })) = (tokens, op.gradient) {
            arena.fill_bytes(stream, dtable, 0)?;
        }
        for (first, count) in op.chunks(&self.plan) {
            let shape = |layout, sizes, pitches| DenseShape {
                tf32,
                pitches,
                ..DenseShape::new(layout, sizes, self.desc.element)
            };
            let (vocab, pitch) = (self.desc.vocab, self.plan.pitch);
            let x = op.x.slice(first * dim, count * dim);
            let logits = parts.logits.slice(0, count * pitch);
            let nt = shape(Layout::Nt, [count, vocab, dim], [dim, dim, pitch]);
            products.product(stream, arena, nt, [x, op.table, logits])?;
            self.softmax(stream, arena, op, &parts, (first, count))?;
            let Some(HeadGradient { dx, dtable, accumulate }) = op.gradient else { continue };
            let nn = shape(Layout::Nn, [count, dim, vocab], [pitch, dim, dim]);
            let dx = dx.slice(first * dim, count * dim);
            products.product(stream, arena, nn, [logits, op.table, dx])?;
            let tn = DenseShape {
                output: dtable.dtype(),
                accumulate: accumulate || first > 0,
                ..shape(Layout::Tn, [vocab, dim, count], [pitch, dim, dim])
            };
            products.product(stream, arena, tn, [logits, x, dtable])?;
        }
        let (losses, targets) = (arena.address(parts.losses), arena.address(op.targets));
        let (numbers, tokens) = (arena.address(op.numbers), tokens as i32);
        // SAFETY: the parameters are those of `head_sum`, the ranges were checked by `parts`.
        unsafe {
            let parameters = parameters![losses, targets, tokens, numbers];
            self.sum.launch(stream, Launch::new(1, 1024), parameters)
        }
    }

    fn softmax(
        &self,
        stream: &Stream,
        arena: &Arena,
        op: &HeadLoss,
        parts: &Scratch,
        (first, count): (usize, usize),
    ) -> Result<(), CudaError> {
        let mut launch = Launch::new(count, self.rows.threads as u32);
        launch.shared_bytes = self.rows.shared_bytes();
        let logits = arena.address(parts.logits);
        let targets = arena.address(op.targets.slice(first, count));
        let losses = arena.address(parts.losses.slice(first, count));
        let loss_scale = op.loss_scale.map_or(0, |scale| arena.address(scale));
        let (scale, gradient) = (op.scale as f32, i32::from(op.gradient.is_some()));
        // SAFETY: the parameters are those of `head_softmax`; rows are `pitch` elements, which are
        // the kernel's whole chunks.
        unsafe {
            self.softmax.launch(
                stream,
                launch,
                parameters![logits, targets, scale, loss_scale, gradient, losses],
            )
        }
    }
}

impl Kernels for Head {
    type Desc = HeadDesc;

    fn make(compiler: &Compiler, desc: &HeadDesc) -> Result<Head, LayerError> {
        Ok(Head::new(compiler, *desc)?)
    }

    fn desc(&self) -> &HeadDesc {
        &self.desc
    }
}

impl CudaDevice {
    /// The head of `desc`, made if it is not there, and cuBLASLt.
    pub(crate) fn head_load(&mut self, desc: &HeadDesc) -> Result<Head, LayerError> {
        self.load_products()?;
        Ok(self.kernels::<Head>(desc)?.clone())
    }

    pub(crate) fn head_loss(&mut self, op: &HeadLoss) {
        let head = match self.head_load(&op.desc) {
            Ok(head) => head,
            Err(error) => return self.attempt(|| Err(error)),
        };
        let tf32 = self.dense.tf32 && op.desc.element == DType::F32;
        self.on_products(|products, stream, arena| head.launch(products, stream, arena, op, tf32));
    }
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;

    /// Kernels of rows that shared memory holds, and of others.
    pub(crate) fn sources(arch: Arch) -> Vec<Source> {
        let kinds = [(DType::Bf16, 50304), (DType::F16, 300), (DType::F32, 151_937)];
        let of = |(element, vocab)| {
            source(arch, &HeadDesc { element, tokens: 1, dim: 64, vocab })
        };
        kinds.into_iter().map(of).collect()
    }

    #[test]
    fn rows_fit_into_shared_memory() {
        let check = |vocab, element, threads, held| {
            let desc = HeadDesc { element, tokens: 1, dim: 64, vocab };
            assert_eq!(Rows::choose(Arch::Hopper, &desc), Rows { threads, held }, "{desc:?}");
            for arch in [Arch::Hopper, Arch::Ampere("sm_80")] {
                let most = if arch == Arch::Hopper { 232_448 } else { 166_912 };
                assert!(Rows::choose(arch, &desc).shared_bytes() < most - 1024, "{desc:?}");
            }
        };
        check(50304, DType::Bf16, 512, 13);
        check(50257, DType::F16, 512, 13);
        check(151_936, DType::Bf16, 1024, 13);
        check(32000, DType::F32, 1024, 8);
        check(256, DType::Bf16, 32, 1);
    }
}
