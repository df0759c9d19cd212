//! Rows in narrower formats, in which they travel between devices.
//!
//! ```text
//! PackRows:   rows [N, D] -> packed [N, bytes of a row]
//! UnpackRows: packed -> rows: what the packed ones stand for
//! ```
//! Whoever reads rows that have travelled reads the unpacked ones, also the rank that they come
//! from: packing what was unpacked changes no bit.
//!
//! A row of [`WireFormat::Fp8`] is its elements as e4m3, one byte each, then a byte for each block
//! of 128 of them: the scale of the block is 2^(byte - 127), as ue8m0 has it. It is the least power
//! of two that brings the block's largest element to 448 or less, which is the largest of e4m3. So
//! no element is cut off, multiplying by scales never rounds, and bf16 holds what is unpacked.
//!
//! With 2^k the scale of its block, an element x becomes one at most so far from it:
//!
//! ```text
//! 2^-4 |x|       e4m3 has three bits behind the first one
//! 2^(k - 10)     among its smallest numbers, which are 2^(k - 9) apart
//! ```
//! whichever is more, and 2^k < amax / 224. A block that has an element that is no number, or an
//! infinite one, has no number.

use crate::buffer::{Buffer, DType};
use crate::ops::convert::op::Cast;

/// Elements that share a scale.
pub const FP8_BLOCK: usize = 128;
/// The least scale: what its block unpacks to is a normal number of fp32 and bf16, or zero.
const SCALE_MIN: i32 = 10;
/// The scale of a block that has no number.
const NO_NUMBER: u8 = 255;
/// The code of e4m3 that is no number.
const NO_CODE: u8 = 0x7f;

/// What rows travel as, where that is narrower than what they are of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WireFormat {
    /// Of rows of F32, each element rounded to nearest even.
    Bf16,
    /// E4m3 with a scale for each 128 elements; of rows of F32 or Bf16, a multiple of 16 long.
    Fp8,
}

impl WireFormat {
    /// Bytes of a row of `dim` elements, a multiple of 16 for rows that `Fp8` takes.
    pub const fn row_bytes(self, dim: usize) -> usize {
        match self {
            WireFormat::Bf16 => 2 * dim,
            WireFormat::Fp8 => dim + dim.div_ceil(FP8_BLOCK).next_multiple_of(16),
        }
    }
}

/// packed[n] = rows[n] in the format; what lies behind a row's scales is undefined.
#[derive(Clone, Copy, Debug)]
pub struct PackRows {
    pub format: WireFormat,
    /// `D`
    pub dim: usize,
    /// [N, D]
    pub rows: Buffer,
    /// Output u8 [N, bytes of a row]
    pub packed: Buffer,
}

/// rows[n] = what packed[n] stands for.
#[derive(Clone, Copy, Debug)]
pub struct UnpackRows {
    pub format: WireFormat,
    /// `D`
    pub dim: usize,
    /// u8 [N, bytes of a row]
    pub packed: Buffer,
    /// Output [N, D]
    pub rows: Buffer,
}

impl PackRows {
    pub(crate) fn check(&self) {
        check(self.format, self.dim, self.rows, self.packed);
    }

    /// The conversion that packs rows as Bf16.
    pub(crate) fn cast(&self) -> Cast {
        Cast { from: self.rows, to: self.packed.reinterpret(DType::Bf16) }
    }
}

impl UnpackRows {
    pub(crate) fn check(&self) {
        check(self.format, self.dim, self.rows, self.packed);
    }

    /// The conversion that unpacks rows of Bf16.
    pub(crate) fn cast(&self) -> Cast {
        Cast { from: self.packed.reinterpret(DType::Bf16), to: self.rows }
    }
}

fn check(format: WireFormat, dim: usize, rows: Buffer, packed: Buffer) {
    let count = rows.len() / dim;
    let expected = (DType::U8, count * format.row_bytes(dim));
    assert_eq!((packed.dtype(), packed.len()), expected, "{rows:?} of {dim} as {format:?}");
    assert_eq!(rows.len(), count * dim, "{rows:?} of {dim}");
    let aligned = format == WireFormat::Bf16 || dim.is_multiple_of(16);
    assert!(aligned, "rows of {dim} as {format:?}");
}

/// The byte of the scale of a block.
pub fn fp8_scale(block: &[f32]) -> u8 {
    // Bits of magnitudes are in their order, and those of what is no number are the largest.
    let largest = block.iter().map(|x| x.to_bits() & 0x7fff_ffff).max().unwrap_or(0);
    if largest >= f32::INFINITY.to_bits() {
        return NO_NUMBER;
    }
    // 448 is 1.75 * 2^8.
    let above = i32::from(largest & 0x7f_ffff > 0x60_0000);
    ((largest >> 23) as i32 - 8 + above).max(SCALE_MIN) as u8
}

/// A row of the format from its elements.
///
/// # Panics
/// Lengths do not fit.
pub fn fp8_pack(row: &[f32], packed: &mut [u8]) {
    assert_eq!(packed.len(), WireFormat::Fp8.row_bytes(row.len()));
    let (codes, scales) = packed.split_at_mut(row.len());
    scales.fill(0);
    let blocks = row.chunks(FP8_BLOCK).zip(codes.chunks_mut(FP8_BLOCK));
    for ((block, codes), scale) in blocks.zip(scales) {
        *scale = fp8_scale(block);
        if *scale == NO_NUMBER {
            codes.fill(NO_CODE);
            continue;
        }
        let inverse = f32::from_bits((254 - u32::from(*scale)) << 23);
        codes.iter_mut().zip(block).for_each(|(code, x)| *code = e4m3(x * inverse));
    }
}

/// The elements that a row of the format stands for.
///
/// # Panics
/// Lengths do not fit.
pub fn fp8_unpack(packed: &[u8], row: &mut [f32]) {
    assert_eq!(packed.len(), WireFormat::Fp8.row_bytes(row.len()));
    let (codes, scales) = packed.split_at(row.len());
    let blocks = row.chunks_mut(FP8_BLOCK).zip(codes.chunks(FP8_BLOCK));
    for ((block, codes), scale) in blocks.zip(scales) {
        let factor = match *scale {
            NO_NUMBER => f32::NAN,
            scale => f32::from_bits(u32::from(scale) << 23),
        };
        block.iter_mut().zip(codes).for_each(|(x, code)| *x = of_e4m3(*code) * factor);
    }
}

/// The nearest code of what is 448 at most; of two the even one.
fn e4m3(x: f32) -> u8 {
    let (bits, magnitude) = (x.to_bits(), x.abs());
    let code = match magnitude < 1.0 / 64.0 {
        // 2^-9 apart; the eighth of them is the first that is not small.
        true => (magnitude * 512.0).round_ties_even() as u32,
        false => {
            let bits = magnitude.to_bits();
            ((bits + 0x7_ffff + (bits >> 20 & 1)) >> 20) - (120 << 3)
        }
    };
    ((bits >> 24 & 0x80) | code) as u8
}

/// What a code stands for, which fp32 holds.
fn of_e4m3(code: u8) -> f32 {
    let code = u32::from(code);
    if code & 0x7f == u32::from(NO_CODE) {
        return f32::NAN;
    }
    // Exponents of fp32 count from 127, those of e4m3 from 7.
    let magnitude = f32::from_bits((code & 0x7f) << 20) * f32::from_bits((127 + 120) << 23);
    f32::from_bits(((code & 0x80) << 24) | magnitude.to_bits())
}

#[cfg(test)]
mod tests {
    use super::*;

    /// By its definition: sign, four bits of exponent, three behind the first one.
    fn value(code: u8) -> f64 {
        let (exponent, rest) = (i32::from(code >> 3 & 15), f64::from(code & 7));
        let magnitude = match exponent {
            0 => rest * 2.0_f64.powi(-9),
            _ => (1.0 + rest / 8.0) * 2.0_f64.powi(exponent - 7),
        };
        if code & 0x80 == 0 { magnitude } else { -magnitude }
    }

    #[test]
    fn codes_are_those_of_e4m3() {
        for code in 0..=255_u8 {
            if code & 0x7f == NO_CODE {
                assert!(of_e4m3(code).is_nan());
                continue;
            }
            assert_eq!(f64::from(of_e4m3(code)), value(code), "{code:x}");
            assert_eq!(e4m3(of_e4m3(code)), code);
        }
        assert_eq!(value(0x7e), 448.0);
    }

    /// Between two codes the nearer one, and of two as near the even one.
    #[test]
    fn codes_are_rounded_to_nearest_even() {
        for code in 0..0x7e_u8 {
            let (low, high) = (value(code), value(code + 1));
            let middle = ((low + high) / 2.0) as f32;
            let even = if code % 2 == 0 { code } else { code + 1 };
            for sign in [0, 0x80] {
                let signed = |x: f32| if sign == 0 { x } else { -x };
                assert_eq!(e4m3(signed(middle)), even | sign, "{middle}");
                assert_eq!(e4m3(signed(middle.next_down())), code | sign, "{middle}");
                assert_eq!(e4m3(signed(middle.next_up())), (code + 1) | sign, "{middle}");
            }
        }
    }

    /// The least power of two with which no element is larger than 448.
    #[test]
    fn a_scale_is_the_least_that_does() {
        for exponent in -149..=127_i32 {
            for part in [1.0, 1.0 + 1.0 / 128.0, 1.74999, 1.75, 1.7501, 1.99] {
                let amax = (part * 2.0_f64.powi(exponent)) as f32;
                if !amax.is_finite() || amax == 0.0 {
                    continue;
                }
                let k = i32::from(fp8_scale(&[0.0, -amax, amax / 3.0])) - 127;
                let scaled = |k: i32| f64::from(amax) * 2.0_f64.powi(-k);
                assert!(scaled(k) <= 448.0, "{amax}: {k}");
                assert!(k == SCALE_MIN - 127 || scaled(k - 1) > 448.0, "{amax}: {k}");
            }
        }
        assert_eq!(fp8_scale(&[0.0]), SCALE_MIN as u8);
        assert_eq!(fp8_scale(&[1.0, f32::NAN]), NO_NUMBER);
        assert_eq!(fp8_scale(&[f32::NEG_INFINITY]), NO_NUMBER);
    }

    fn round(row: &[f32]) -> Vec<f32> {
        let mut packed = vec![0; WireFormat::Fp8.row_bytes(row.len())];
        fp8_pack(row, &mut packed);
        let mut out = vec![0.0; row.len()];
        fp8_unpack(&packed, &mut out);
        out
    }

    /// Numbers of all sizes in one block, and blocks of all sizes.
    fn rows() -> Vec<Vec<f32>> {
        let mut seed = 1_u64;
        let mut random = move || {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 40) as f64 / (1 << 23) as f64 - 1.0
        };
        let row = |at: i32| -> Vec<f32> {
            let len = [16, 128, 144, 272, 2048][at as usize % 5];
            let size = |random: f64| 2.0_f64.powi((random * 12.0) as i32 + 3 * at - 110);
            (0..len).map(|_| (random() * size(random())) as f32).collect()
        };
        (0..72).map(row).collect()
    }

    /// The bound follows from the format alone.
    #[test]
    fn an_element_is_as_near_as_the_format_says() {
        for row in rows() {
            for (block, found) in row.chunks(FP8_BLOCK).zip(round(&row).chunks(FP8_BLOCK)) {
                let k = i32::from(fp8_scale(block)) - 127;
                let amax = block.iter().fold(0.0, |most: f64, x| most.max(f64::from(x.abs())));
                assert!(2.0_f64.powi(k) < amax / 224.0 || k == SCALE_MIN - 127);
                for (x, found) in block.iter().zip(found) {
                    let (x, found) = (f64::from(*x), f64::from(*found));
                    let most = (x.abs() / 16.0).max(2.0_f64.powi(k - 10));
                    assert!((x - found).abs() <= most, "{found} for {x}, {k}");
                }
            }
        }
    }

    #[test]
    fn what_was_rounded_is_rounded_no_more_and_bf16_holds_it() {
        for row in rows() {
            let once = round(&row);
            let bits = |row: &[f32]| row.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
            assert_eq!(bits(&round(&once)), bits(&once));
            let halves: Vec<f32> =
                once.iter().map(|x| half::bf16::from_f32(*x).to_f32()).collect();
            assert_eq!(bits(&halves), bits(&once));
        }
    }

    /// A block that overflowed is no number, and its neighbours stay.
    #[test]
    fn what_is_no_number_stays_none() {
        let mut row = vec![1.5_f32; 300];
        (row[7], row[140]) = (f32::INFINITY, f32::NAN);
        let found = round(&row);
        assert!(found[..256].iter().all(|x| x.is_nan()));
        assert!(found[256..].iter().all(|x| *x == 1.5));
    }

    #[test]
    fn a_row_is_about_half_as_long_as_in_bf16() {
        assert_eq!(WireFormat::Fp8.row_bytes(2048), 2048 + 16);
        assert_eq!(WireFormat::Fp8.row_bytes(4096), 4096 + 32);
        assert_eq!(WireFormat::Fp8.row_bytes(16), 32);
        assert_eq!(WireFormat::Bf16.row_bytes(2048), 4096);
    }
}
