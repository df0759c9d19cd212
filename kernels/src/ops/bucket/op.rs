//! What happens to a bucket at the end of a step: its gradient's numbers, and AdamW.
//!
//! A bucket is many logical tensors in one buffer, each from a multiple of 4,096 elements on, what
//! lies between being padding. A table says for each block of 4,096 whose it is; so one launch
//! serves all tensors of a bucket. What changes from step to step lies in device memory: see
//! [`crate::StepParams`], [`crate::StepNumbers`] and [`crate::StepControl`].

use crate::buffer::{Buffer, DType};
use crate::ops::bucket::step_numbers::{CLASSES_MAX, StepNumbers};

/// Elements per partial sum of squares; every logical tensor is cut at its multiples.
pub const SQUARE_SUM_BLOCK: usize = 4096;

/// One block of 4,096 elements of a bucket.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct BucketBlock {
    /// Of the logical tensor's name.
    pub name_hash: u64,
    /// The logical tensor's place in the model's table of parameters.
    pub tensor: u32,
    /// Index in the logical tensor of the block's first element, a multiple of 4,096.
    pub first: u64,
    /// Elements of the tensor in this block; what follows is padding, never changed nor counted.
    pub len: u32,
    pub decays: bool,
    /// Never updated.
    pub frozen: bool,
    /// Left out of the norm.
    pub uncounted: bool,
    /// Whose coefficients it takes: see [`crate::StepParams`].
    pub class: u8,
}

impl BucketBlock {
    /// Words of a block in a table.
    pub const WORDS: usize = 8;
    pub const DECAYS: u32 = 1;
    pub const FROZEN: u32 = 2;
    pub const UNCOUNTED: u32 = 4;
    pub const CLASS_SHIFT: u32 = 8;

    pub fn encode(&self) -> [u32; BucketBlock::WORDS] {
        assert!(self.len as usize <= SQUARE_SUM_BLOCK, "{self:?}");
        assert!((self.class as usize) < CLASSES_MAX, "{self:?}");
        let words = |x: u64| [x as u32, (x >> 32) as u32];
        let ([n0, n1], [f0, f1]) = (words(self.name_hash), words(self.first));
        let flag = |set: bool, flag: u32| if set { flag } else { 0 };
        let flags = flag(self.decays, Self::DECAYS)
            | flag(self.frozen, Self::FROZEN)
            | flag(self.uncounted, Self::UNCOUNTED)
            | u32::from(self.class) << Self::CLASS_SHIFT;
        [n0, n1, f0, f1, self.len, flags, self.tensor, 0]
    }

    pub fn decode(words: &[u32; BucketBlock::WORDS]) -> BucketBlock {
        let [n0, n1, f0, f1, len, flags, tensor, _] = *words;
        let wide = |low: u32, high: u32| u64::from(high) << 32 | u64::from(low);
        BucketBlock {
            name_hash: wide(n0, n1),
            tensor,
            first: wide(f0, f1),
            len,
            decays: flags & Self::DECAYS != 0,
            frozen: flags & Self::FROZEN != 0,
            uncounted: flags & Self::UNCOUNTED != 0,
            class: (flags >> Self::CLASS_SHIFT) as u8,
        }
    }

    /// The blocks of one tensor of `len` elements, all alike but for their place.
    pub fn of_tensor(self, len: u64) -> impl Iterator<Item = BucketBlock> {
        let block = SQUARE_SUM_BLOCK as u64;
        (0..len.div_ceil(block)).map(move |at| BucketBlock {
            first: at * block,
            len: (len - at * block).min(block) as u32,
            ..self
        })
    }

    /// The words of a table.
    pub fn table(blocks: &[BucketBlock]) -> Vec<u32> {
        blocks.iter().flat_map(BucketBlock::encode).collect()
    }
}

/// numbers[SQUARED_NORM] += the sum over blocks of sums[b], those left out that are not counted or
/// not active; numbers[NON_FINITE] += elements that are infinite or not a number, and so each
/// tensor's own in the table of [`StepNumbers::non_finite`].
///
/// sums[b] = sum in f64 of g[i]^2 over block b, of gradients as they lie; the total is divided by
/// the square of the loss scale. The CPU adds blocks in order (each as
/// [`crate::BlockSquareSums`] does), a GPU in parts of a fixed order.
#[derive(Clone, Copy, Debug)]
pub struct GradientNumbers {
    pub layout: StepNumbers,
    /// U32 [blocks, `BucketBlock::WORDS`]
    pub table: Buffer,
    /// F64 [`StepParams::LEN`](crate::StepParams::LEN)
    pub params: Buffer,
    /// [blocks * 4096]; on a GPU F32, Bf16 or F16
    pub gradient: Buffer,
    /// Output F64 [blocks]
    pub sums: Buffer,
    /// Added to: F64 [`StepNumbers::len`]
    pub numbers: Buffer,
    /// Added to: Pair [1], on a CPU in place of the squared norm among `numbers`, so that its bits
    /// do not depend on the order of buckets and ranks
    pub squares: Option<Buffer>,
}

/// control = what [`crate::StepControl::decide`] says; control[UPDATES] += 1 if weights change,
/// else control[HALTED] = 1, and so it stays. Both are copied to where `numbers` has room for them.
#[derive(Clone, Copy, Debug)]
pub struct DecideUpdate {
    /// F64 [`StepParams::LEN`](crate::StepParams::LEN)
    pub params: Buffer,
    /// F64, reduced over ranks; HALTED and UPDATES are set
    pub numbers: Buffer,
    /// Output F64 [`StepControl::LEN`](crate::StepControl::LEN); UPDATES is added to
    pub control: Buffer,
}

/// Where the fp32 master of a weight lies.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Master {
    /// The weight is its own: F32, on a CPU also F64.
    Weight,
    /// I16: the master's bits are weight << 16 plus this; the weight is Bf16, rounded to nearest,
    /// halves away from zero. Lossless.
    LowBits(Buffer),
    /// F32; the weight is this rounded to Bf16 or F16, to nearest even.
    Separate(Buffer),
}

/// AdamW (Loshchilov and Hutter 2019) of a whole bucket, each block by the coefficients of its
/// class; nothing if control says so. With g' = control's gradient scale * g:
/// m = beta1 m + (1 - beta1) g'; v = beta2 v + (1 - beta2) g'^2;
/// w = w keep - rate m / (sqrt(v correction) + eps). Sums are fp32 (f64 for F64 weights),
/// coefficients are computed in f64 and rounded once.
///
/// Moments in Bf16 are rounded at random: up with the probability of what is cut off, by 16 bits of
/// Philox4x32-10, key = name hash, counter = (element / 4; step), each as two words, low first;
/// word element % 4, its low half for the first moment and its high half for the second.
#[derive(Clone, Copy, Debug)]
pub struct BucketAdamW {
    pub beta1: f64,
    pub beta2: f64,
    /// Added outside of the root.
    pub eps: f64,
    /// U32 [blocks, `BucketBlock::WORDS`]
    pub table: Buffer,
    /// F64 [`StepParams::LEN`](crate::StepParams::LEN)
    pub params: Buffer,
    /// F64 [`StepControl::LEN`](crate::StepControl::LEN)
    pub control: Buffer,
    /// Changed in place: [blocks * 4096]
    pub weight: Buffer,
    /// Changed in place
    pub master: Master,
    /// Changed in place: [blocks * 4096] F32 or Bf16, as the other; F64 with F64 weights
    pub moment1: Buffer,
    /// Changed in place
    pub moment2: Buffer,
    /// [blocks * 4096] F32, Bf16 or F16; F64 with F64 weights
    pub gradient: Buffer,
}

impl BucketAdamW {
    /// Blocks, all lengths checked.
    pub(crate) fn blocks(&self) -> usize {
        let blocks = self.table.len() / BucketBlock::WORDS;
        let len = blocks * SQUARE_SUM_BLOCK;
        assert_eq!(self.table.len(), blocks * BucketBlock::WORDS, "{self:?}");
        for buffer in [self.weight, self.moment1, self.moment2, self.gradient] {
            assert_eq!(buffer.len(), len, "{self:?}");
        }
        assert_eq!(self.moment1.dtype(), self.moment2.dtype(), "{self:?}");
        match self.master {
            Master::Weight => {}
            Master::LowBits(low) => {
                let kinds = (self.weight.dtype(), low.dtype());
                assert_eq!((kinds, low.len()), ((DType::Bf16, DType::I16), len), "{self:?}");
            }
            Master::Separate(master) => {
                assert_eq!((master.dtype(), master.len()), (DType::F32, len), "{self:?}");
            }
        }
        blocks
    }
}

impl GradientNumbers {
    /// Blocks, all lengths checked.
    pub(crate) fn blocks(&self) -> usize {
        let blocks = self.sums.len();
        assert_eq!(self.gradient.len(), blocks * SQUARE_SUM_BLOCK, "{self:?}");
        assert_eq!(self.table.len(), blocks * BucketBlock::WORDS, "{self:?}");
        assert_eq!(self.numbers.len(), self.layout.len(), "{self:?}");
        let squares = self.squares.map(|squares| (squares.dtype(), squares.len()));
        assert!(squares.is_none_or(|squares| squares == (DType::Pair, 1)), "{self:?}");
        blocks
    }
}
