//! Elements of one kind to another.

use crate::buffer::{Buffer, DType};

/// to[i] = from[i] in the kind of `to`, rounded to nearest even; what is too large becomes
/// infinite.
/// Kinds: two different ones of F32, Bf16 and F16; F64 to F32; on a CPU also F32 to F64, and a Pair
/// to F64.
#[derive(Clone, Copy, Debug)]
pub struct Cast {
    pub from: Buffer,
    /// Output
    pub to: Buffer,
}

/// sum = x, or sum += x, in fp64. A float has 24 bits of mantissa and a sum 53, so nothing is
/// rounded while the largest of its numbers is within 2^28 times of the smallest. The order in
/// which they are added then changes nothing. Doubles are added to a [`Pair`](crate::Pair), on a
/// CPU alone.
#[derive(Clone, Copy, Debug)]
pub struct AddUp {
    /// F32 or F64; of pairs F64 or Pair
    pub x: Buffer,
    /// F64 or Pair, as long; changed in place
    pub sum: Buffer,
    /// Else `sum` is written.
    pub adds: bool,
}

/// An fp32 master in two halves: weight = (bits + 0x8000) >> 16, low = bits - (weight << 16), which
/// lies in -0x8000 .. 0x7fff. Lossless: what is not a number, too.
#[derive(Clone, Copy, Debug)]
pub struct SplitMaster {
    /// F32
    pub master: Buffer,
    /// Output Bf16
    pub weight: Buffer,
    /// Output I16
    pub low: Buffer,
}

/// master's bits = (weight << 16) + low: the way back of [`SplitMaster`].
#[derive(Clone, Copy, Debug)]
pub struct JoinMaster {
    /// Bf16
    pub weight: Buffer,
    /// I16
    pub low: Buffer,
    /// Output F32
    pub master: Buffer,
}

impl Cast {
    pub(crate) fn check(&self) {
        assert_eq!(self.from.len(), self.to.len(), "{self:?}");
        assert_ne!(self.from.dtype(), self.to.dtype(), "{self:?}");
    }
}

impl AddUp {
    pub(crate) fn check(&self) {
        use DType::{F32, F64, Pair};
        let kinds = (self.x.dtype(), self.sum.dtype());
        assert!(matches!(kinds, (F32 | F64, F64) | (F64 | Pair, Pair)), "{self:?}");
        assert_eq!(self.sum.len(), self.x.len(), "{self:?}");
    }
}

impl SplitMaster {
    pub(crate) fn check(&self) {
        check_halves(self.master, self.weight, self.low);
    }
}

impl JoinMaster {
    pub(crate) fn check(&self) {
        check_halves(self.master, self.weight, self.low);
    }
}

/// Length and kinds of a master and its halves.
fn check_halves(master: Buffer, weight: Buffer, low: Buffer) {
    let kinds = (master.dtype(), weight.dtype(), low.dtype());
    assert_eq!(kinds, (DType::F32, DType::Bf16, DType::I16));
    assert_eq!((weight.len(), low.len()), (master.len(), master.len()));
}
