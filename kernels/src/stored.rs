//! Floats as a device keeps them, and as the host stores them.
//!
//! ```text
//! device                          host
//! Plain   bytes               <-> bytes
//! Halves  bf16 | i16          <-> f32       joined and split, lossless
//! Upper   bf16                <-> f32       rounded as the upper of two halves
//! Bf16, F16                   <-> f32       rounded to nearest even
//! ```
//! The host's processors convert: they copy every byte anyway, and memory is their bound.

use std::ops::Range;

use half::{bf16, f16};

use crate::buffer::{Buffer, DType};
use crate::pages::copy_past_caches;

/// Where a device keeps floats: `T` is a buffer or an address.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Stored<T = Buffer> {
    /// Bytes as they are, of any kind.
    Plain(T),
    /// The halves of [`crate::SplitMaster`].
    Halves { weight: T, low: T },
    /// The weight of [`crate::SplitMaster`], whose low half is not here.
    Upper(T),
    Bf16(T),
    F16(T),
}

/// Bytes that are converted in the first cache before they go past it.
const BLOCK: usize = 16 << 10;

impl<T: Copy> Stored<T> {
    /// The buffers that it is kept in, each with its bytes for four bytes of the host.
    pub(crate) fn parts(self) -> impl Iterator<Item = (T, usize)> {
        let (first, second) = match self {
            Stored::Plain(all) => ((all, 4), None),
            Stored::Halves { weight, low } => ((weight, 2), Some((low, 2))),
            Stored::Upper(weight) => ((weight, 2), None),
            Stored::Bf16(all) | Stored::F16(all) => ((all, 2), None),
        };
        [Some(first), second].into_iter().flatten()
    }

    /// Its parts as they are packed for `bytes` of the host, one behind the other: each with where
    /// its bytes are.
    pub(crate) fn packed(self, bytes: usize) -> impl Iterator<Item = (T, Range<usize>)> {
        let mut end = 0;
        self.parts().map(move |(part, each)| {
            let start = end;
            end += bytes * each / 4;
            (part, start..end)
        })
    }

    /// Bytes of all its parts, for as many of the host.
    pub(crate) fn packed_bytes(self, bytes: usize) -> usize {
        self.packed(bytes).last().map_or(0, |(_, at)| at.end)
    }

    pub(crate) fn map<U>(self, each: impl Fn(T) -> U) -> Stored<U> {
        match self {
            Stored::Plain(all) => Stored::Plain(each(all)),
            Stored::Halves { weight, low } => {
                Stored::Halves { weight: each(weight), low: each(low) }
            }
            Stored::Upper(weight) => Stored::Upper(each(weight)),
            Stored::Bf16(all) => Stored::Bf16(each(all)),
            Stored::F16(all) => Stored::F16(each(all)),
        }
    }

    /// `into` becomes the floats whose parts lie in `from` one after the other. It is written past
    /// the caches.
    pub(crate) fn unpack(&self, from: &[u8], into: &mut [u8]) {
        let (first, second) = from.split_at(from.len() / 2);
        match self {
            Stored::Plain(_) => copy_past_caches(from, into),
            Stored::Halves { .. } => widened(into, [first, second], |weight, low| {
                join(u16::from_ne_bytes(weight), i16::from_ne_bytes(low)).to_bits()
            }),
            Stored::Upper(_) | Stored::Bf16(_) => widened(into, [from, from], |of, _| {
                u32::from(u16::from_ne_bytes(of)) << 16
            }),
            Stored::F16(_) => widened(into, [from, from], |of, _| {
                f16::from_ne_bytes(of).to_f32().to_bits()
            }),
        }
    }

    /// The parts of the floats `from`, one after the other.
    pub(crate) fn pack(&self, from: &[u8], into: &mut [u8]) {
        match self {
            Stored::Plain(_) => copy_past_caches(from, into),
            Stored::Halves { .. } => {
                let (weights, lows) = into.split_at_mut(from.len() / 2);
                let both = weights.as_chunks_mut().0.iter_mut().zip(lows.as_chunks_mut().0);
                for ((weight, low), from) in both.zip(from.as_chunks().0) {
                    let (high, rest) = split(f32::from_ne_bytes(*from));
                    (*weight, *low) = (high.to_ne_bytes(), rest.to_ne_bytes());
                }
            }
            Stored::Upper(_) => narrowed(from, into, |x| split(x).0),
            Stored::Bf16(_) => narrowed(from, into, |x| bf16::from_f32(x).to_bits()),
            Stored::F16(_) => narrowed(from, into, |x| f16::from_f32(x).to_bits()),
        }
    }
}

/// `into` becomes the f32 whose bits `each` makes of two halves.
#[inline(always)]
fn widened(into: &mut [u8], [a, b]: [&[u8]; 2], each: impl Fn([u8; 2], [u8; 2]) -> u32) {
    let mut block = [0; BLOCK];
    let halves = a.chunks(BLOCK / 2).zip(b.chunks(BLOCK / 2));
    for (into, (a, b)) in into.chunks_mut(BLOCK).zip(halves) {
        let out = &mut block[..into.len()];
        let both = a.as_chunks().0.iter().zip(b.as_chunks().0);
        for (out, (a, b)) in out.as_chunks_mut().0.iter_mut().zip(both) {
            *out = each(*a, *b).to_ne_bytes();
        }
        copy_past_caches(out, into);
    }
}

#[inline(always)]
fn narrowed(from: &[u8], into: &mut [u8], each: impl Fn(f32) -> u16) {
    for (into, from) in into.as_chunks_mut().0.iter_mut().zip(from.as_chunks().0) {
        *into = each(f32::from_ne_bytes(*from)).to_ne_bytes();
    }
}

impl Stored {
    /// Bytes that the host has of it.
    ///
    /// # Panics
    /// The kinds of its buffers are others than it says.
    fn bytes(&self) -> usize {
        let kind = |buffer: &Buffer, kind: DType| {
            assert_eq!(buffer.dtype(), kind, "{self:?}");
            4 * buffer.len()
        };
        match self {
            Stored::Plain(all) => all.bytes(),
            Stored::Halves { weight, low } => {
                assert_eq!(kind(weight, DType::Bf16), kind(low, DType::I16), "{self:?}");
                4 * weight.len()
            }
            Stored::Upper(all) | Stored::Bf16(all) => kind(all, DType::Bf16),
            Stored::F16(all) => kind(all, DType::F16),
        }
    }

    pub(crate) fn check(&self, bytes: usize) {
        assert_eq!(self.bytes(), bytes, "{self:?}");
    }
}

/// The weight and the low half of a master's bits.
#[inline(always)]
pub(crate) fn split(master: f32) -> (u16, i16) {
    let bits = master.to_bits();
    ((bits.wrapping_add(0x8000) >> 16) as u16, bits as i16)
}

#[inline(always)]
pub(crate) fn join(weight: u16, low: i16) -> f32 {
    f32::from_bits((u32::from(weight) << 16).wrapping_add(i32::from(low) as u32))
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Floats of all kinds, not a number among them, and lengths that fill no block.
    fn floats(len: usize) -> Vec<u8> {
        let bits = |at: usize| (at as u32).wrapping_mul(0x9e37_79b9) ^ at as u32;
        (0..len).flat_map(|at| bits(at).to_ne_bytes()).collect()
    }

    fn packed(place: Stored<()>, from: &[u8]) -> Vec<u8> {
        let mut into = vec![7; place.packed_bytes(from.len())];
        place.pack(from, &mut into);
        into
    }

    #[test]
    fn halves_and_bytes_come_back_as_they_went() {
        for place in [Stored::Plain(()), Stored::Halves { weight: (), low: () }] {
            for len in [0, 1, 2, 7, 4096, 10_001] {
                let from = floats(len);
                let mut into = vec![9; from.len()];
                place.unpack(&packed(place, &from), &mut into);
                assert!(into == from, "{place:?}: {len}");
            }
        }
    }

    #[test]
    fn what_is_rounded_is_the_nearest() {
        type Rounds = fn(f32) -> f32;
        let of_upper: Rounds = |x| f32::from_bits(u32::from(split(x).0) << 16);
        let of_bf16: Rounds = |x| bf16::from_f32(x).to_f32();
        let of_f16: Rounds = |x| f16::from_f32(x).to_f32();
        let places =
            [(Stored::Upper(()), of_upper), (Stored::Bf16(()), of_bf16), (Stored::F16(()), of_f16)];
        for (place, rounds) in places {
            let from = floats(9_999);
            let mut into = vec![9; from.len()];
            place.unpack(&packed(place, &from), &mut into);
            for (into, from) in into.as_chunks().0.iter().zip(from.as_chunks().0) {
                let (came, went) = (f32::from_ne_bytes(*into), f32::from_ne_bytes(*from));
                assert_eq!(came.to_bits(), rounds(went).to_bits(), "{place:?}: {went}");
            }
        }
    }

    #[test]
    fn halves_lose_nothing_and_round_to_nearest() {
        for i in 0..1_u64 << 22 {
            // All exponents and signs, and low halves around their middle.
            let low = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff][i as usize % 6];
            let bits = ((i >> 6) as u32) << 16 | low;
            let (weight, low) = split(f32::from_bits(bits));
            assert_eq!(join(weight, low).to_bits(), bits);
            let (near, master) = (f32::from_bits(u32::from(weight) << 16), f32::from_bits(bits));
            if near.is_finite() && master.is_finite() {
                let nearest = half::bf16::from_f32(master).to_f32();
                let distance = |x: f32| (f64::from(x) - f64::from(master)).abs();
                assert!(distance(near) <= distance(nearest), "{bits:x}");
            }
        }
    }
}
