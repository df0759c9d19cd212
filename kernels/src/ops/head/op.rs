//! The head with its loss as one op: logits are never whole in memory.
//!
//! logits = x table^T; the loss of [`crate::CrossEntropy`]; dx = dlogits table; dtable (+)=
//! dlogits^T x. Tokens go through in chunks of [`HeadPlan::chunk`], each chunk's logits into the
//! same scratch, where they become their gradient, so that forward and backward are one pass. The
//! gradient needs nothing that only a whole forward knows: the number of valid targets of a step is
//! known from the data.
//!
//! A CPU computes in F32 or F64, all float buffers of one kind. Its bits are those of `Matmul`,
//! `CrossEntropy`, a sum in f64 and two `Matmul` over all tokens at once, because a chunk is a
//! multiple of the 256 that one chain of a product covers. CUDA computes in Bf16, F16 or F32:
//! logits and their gradient are rounded to that kind (as PyTorch's composition rounds them), sums,
//! softmax and loss are fp32 or f64. In 16 bits the gradient of the table is rounded after every
//! chunk.

use crate::buffer::{ArenaPlan, Buffer, DType};

/// The target of a token that does not count.
pub const IGNORE: u32 = u32::MAX;

/// Where the numbers of a head lie in [`HeadLoss::numbers`].
pub mod head_numbers {
    /// Sum over valid targets of the cross-entropy, unscaled
    pub const LOSS_SUM: usize = 0;
    /// Valid targets
    pub const VALID: usize = 1;
    /// How many there are.
    pub const COUNT: usize = 2;
}

/// What shapes a head's kernels and its scratch.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct HeadDesc {
    /// Of x, the table and dx
    pub element: DType,
    pub tokens: usize,
    pub dim: usize,
    pub vocab: usize,
}

/// How a head goes through its tokens.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct HeadPlan {
    /// Tokens whose logits are in memory at once: a multiple of 256, or all of them
    pub chunk: usize,
    /// Elements from one token's logits to the next's
    pub pitch: usize,
    /// Bytes of [`HeadLoss::scratch`], which all that a device does in turn can share
    pub scratch_bytes: usize,
}

/// The loss of a micro-batch and, with `gradient`, what backward needs of it.
#[derive(Clone, Copy, Debug)]
pub struct HeadLoss {
    pub desc: HeadDesc,
    /// Of the gradient: 1 / the number of valid targets of the step, known from the data
    pub scale: f64,
    /// F32 [1], on the device: multiplies `scale`; none is 1
    pub loss_scale: Option<Buffer>,
    /// [T, D], normed
    pub x: Buffer,
    /// [V, D]; with tied embeddings theirs
    pub table: Buffer,
    /// u32 [T], below V or IGNORE
    pub targets: Buffer,
    /// U8, at least [`HeadPlan::scratch_bytes`]
    pub scratch: Buffer,
    /// F64 [2], see [`head_numbers`]: added to, tokens in a fixed order
    pub numbers: Buffer,
    /// None: the loss alone
    pub gradient: Option<HeadGradient>,
}

/// Where the gradients of a head go.
#[derive(Clone, Copy, Debug)]
pub struct HeadGradient {
    /// Output [T, D]
    pub dx: Buffer,
    /// Output [V, D], of the elements' kind or F32
    pub dtable: Buffer,
    /// dtable +=, else dtable =. With tied embeddings theirs is added to by both
    pub accumulate: bool,
}

/// Bytes of scratch that a head takes at most, where 256 tokens fit into them.
const SCRATCH_BYTES_MAX: usize = 512 << 20;
/// Of a CPU: beyond its caches nothing is gained.
const SCRATCH_BYTES_MAX_CPU: usize = 64 << 20;
/// Tokens of a chunk are a multiple of this, the length of one chain of a product on a CPU.
const CHUNK_STEP: usize = 256;

impl HeadDesc {
    /// Floating-point operations of one of its products, of which a gradient takes three.
    pub fn flops(&self) -> f64 {
        2.0 * self.tokens as f64 * self.dim as f64 * self.vocab as f64
    }

    fn plan(&self, bytes_max: usize, alignment: usize) -> HeadPlan {
        let pitch = self.vocab.next_multiple_of(alignment);
        let row = pitch * self.element.size();
        let losses = (self.tokens * 8).next_multiple_of(ArenaPlan::ALIGNMENT);
        let most = (bytes_max.saturating_sub(losses) / row / CHUNK_STEP * CHUNK_STEP)
            .max(CHUNK_STEP);
        // Chunks of about one size: a short last one would use the device badly.
        let chunks = self.tokens.div_ceil(most).max(1);
        let chunk = self.tokens.div_ceil(chunks).next_multiple_of(CHUNK_STEP).min(self.tokens);
        let mut all = ArenaPlan::new();
        let layout = Scratch::reserve(&mut all, self, chunk, pitch);
        debug_assert_eq!(layout.losses.len(), self.tokens);
        HeadPlan { chunk, pitch, scratch_bytes: all.bytes() }
    }
}

/// What lies in the scratch.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Scratch {
    /// F64 [T]: losses of the tokens
    pub(crate) losses: Buffer,
    /// Elements [chunk, pitch]
    pub(crate) logits: Buffer,
}

impl Scratch {
    fn reserve(plan: &mut ArenaPlan, desc: &HeadDesc, chunk: usize, pitch: usize) -> Scratch {
        let losses = plan.alloc(DType::F64, desc.tokens);
        Scratch { losses, logits: plan.alloc(desc.element, chunk * pitch) }
    }
}

impl HeadLoss {
    /// Checks all sizes, and cuts the scratch.
    pub(crate) fn parts(&self, plan: &HeadPlan) -> Scratch {
        let HeadDesc { element, tokens, dim, vocab } = self.desc;
        assert_eq!((self.x.dtype(), self.x.len()), (element, tokens * dim), "{self:?}");
        assert_eq!((self.table.dtype(), self.table.len()), (element, vocab * dim), "{self:?}");
        assert_eq!((self.targets.dtype(), self.targets.len()), (DType::U32, tokens), "{self:?}");
        let numbers = (DType::F64, head_numbers::COUNT);
        assert_eq!((self.numbers.dtype(), self.numbers.len()), numbers, "{self:?}");
        let one = |scale: Buffer| (scale.dtype(), scale.len()) == (DType::F32, 1);
        assert!(self.loss_scale.is_none_or(one), "{self:?}");
        assert!(self.scratch.bytes() >= plan.scratch_bytes, "{plan:?} {self:?}");
        if let Some(HeadGradient { dx, dtable, .. }) = self.gradient {
            assert_eq!((dx.dtype(), dx.len()), (element, tokens * dim), "{self:?}");
            assert_eq!(dtable.len(), vocab * dim, "{self:?}");
        }
        let mut all = ArenaPlan::new();
        let inner = Scratch::reserve(&mut all, &self.desc, plan.chunk, plan.pitch);
        let bytes = self.scratch.reinterpret(DType::U8);
        let place = |range: Buffer| {
            bytes.slice(range.offset(), range.bytes()).reinterpret(range.dtype())
        };
        Scratch { losses: place(inner.losses), logits: place(inner.logits) }
    }

    /// First tokens of the chunks and how many each has.
    pub(crate) fn chunks(&self, plan: &HeadPlan) -> impl Iterator<Item = (usize, usize)> {
        let (tokens, chunk) = (self.desc.tokens, plan.chunk);
        (0..tokens).step_by(chunk.max(1)).map(move |first| (first, chunk.min(tokens - first)))
    }
}

impl HeadPlan {
    /// The plan of any processor.
    pub(crate) fn cpu(desc: &HeadDesc) -> HeadPlan {
        desc.plan(SCRATCH_BYTES_MAX_CPU, 1)
    }

    /// The plan of any GPU: rows of logits are whole 16-byte chunks.
    pub fn cuda(desc: &HeadDesc) -> HeadPlan {
        desc.plan(SCRATCH_BYTES_MAX, 16 / desc.element.size())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_plan_keeps_within_its_scratch() {
        let check = |tokens, vocab, element, chunk, scratch_mib| {
            let desc = HeadDesc { element, tokens, dim: 64, vocab };
            let plan = HeadPlan::cuda(&desc);
            assert_eq!((plan.chunk, plan.scratch_bytes >> 20), (chunk, scratch_mib), "{desc:?}");
            assert!(plan.scratch_bytes <= SCRATCH_BYTES_MAX, "{plan:?}");
        };
        check(16384, 50304, DType::Bf16, 4096, 393);
        check(16384, 50304, DType::F32, 2560, 491);
        check(16384, 151_936, DType::Bf16, 1536, 445);
        check(100, 50257, DType::Bf16, 100, 9);
        check(4096, 256, DType::F16, 4096, 2);
    }
}
