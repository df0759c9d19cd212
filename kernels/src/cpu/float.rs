//! The two element types that the CPU computes in, and our own elementary functions.
//!
//! Everything is made of IEEE additions, products, quotients, roots and fused multiply-adds, each
//! correctly rounded, so that no result depends on a library or a processor. The series are
//! Taylor's, long enough that their truncation lies below the rounding of the sum.

use crate::buffer::Element;

mod sealed {
    pub trait Sealed {}
    impl Sealed for f32 {}
    impl Sealed for f64 {}
}

/// f32 trains; f64 is what parity is measured in.
pub trait Float:
    sealed::Sealed
    + Element
    + Default
    + PartialOrd
    + std::fmt::Debug
    + std::ops::Add<Output = Self>
    + std::ops::Sub<Output = Self>
    + std::ops::Mul<Output = Self>
    + std::ops::Div<Output = Self>
    + std::ops::Neg<Output = Self>
    + std::ops::AddAssign
{
    const ZERO: Self;
    const ONE: Self;
    const NEG_INFINITY: Self;

    fn of(value: f64) -> Self;
    fn wide(self) -> f64;
    /// `self * a + b`, rounded once.
    fn fma(self, a: Self, b: Self) -> Self;
    fn sqrt(self) -> Self;
    fn exp(self) -> Self;
    fn is_finite(self) -> bool;

    /// The larger one; `self` when `other` is not a number.
    #[inline(always)]
    fn larger(self, other: Self) -> Self {
        if other > self { other } else { self }
    }

    /// 1 / (1 + e^-x)
    #[inline(always)]
    fn sigmoid(self) -> Self {
        Self::ONE / (Self::ONE + (-self).exp())
    }

    /// ln(x) with the precision of f64.
    #[inline(always)]
    fn ln(self) -> Self {
        Self::of(ln(self.wide()))
    }
}

impl Float for f32 {
    const ZERO: f32 = 0.0;
    const ONE: f32 = 1.0;
    const NEG_INFINITY: f32 = f32::NEG_INFINITY;

    #[inline(always)]
    fn of(value: f64) -> f32 {
        value as f32
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        f64::from(self)
    }
    #[inline(always)]
    fn fma(self, a: f32, b: f32) -> f32 {
        self.mul_add(a, b)
    }
    #[inline(always)]
    fn sqrt(self) -> f32 {
        f32::sqrt(self)
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        f32::is_finite(self)
    }

    /// e^x within 1.5 ulp; 0 below -104, infinity above 88.8, subnormal results included.
    #[inline(always)]
    fn exp(self) -> f32 {
        /// 1.5 * 2^23: adding it rounds to an integer and leaves that in the low bits.
        const ROUND: f32 = 12_582_912.0;
        const LN2_HIGH: f32 = std::f32::consts::LN_2;
        const LN2_LOW: f32 = (std::f64::consts::LN_2 - std::f32::consts::LN_2 as f64) as f32;
        let x = if self > 89.0 { 89.0 } else { self };
        let x = if x < -104.0 { -104.0 } else { x };
        let rounded = x.mul_add(std::f32::consts::LOG2_E, ROUND);
        let n = rounded - ROUND;
        let r = (-n).mul_add(LN2_LOW, (-n).mul_add(LN2_HIGH, x));
        let mut sum = 1.0 / 5040.0;
        sum = r.mul_add(sum, 1.0 / 720.0);
        sum = r.mul_add(sum, 1.0 / 120.0);
        sum = r.mul_add(sum, 1.0 / 24.0);
        sum = r.mul_add(sum, 1.0 / 6.0);
        sum = r.mul_add(sum, 0.5);
        sum = r.mul_add(sum, 1.0);
        sum = r.mul_add(sum, 1.0);
        // Two factors, since 2^n alone may be subnormal or infinite where the product is neither.
        let n = (rounded.to_bits() as i32).wrapping_sub(ROUND.to_bits() as i32);
        let half = n >> 1;
        let power = |n: i32| f32::from_bits((n.wrapping_add(127) as u32) << 23);
        sum * power(half) * power(n.wrapping_sub(half))
    }
}

impl Float for f64 {
    const ZERO: f64 = 0.0;
    const ONE: f64 = 1.0;
    const NEG_INFINITY: f64 = f64::NEG_INFINITY;

    #[inline(always)]
    fn of(value: f64) -> f64 {
        value
    }
    #[inline(always)]
    fn wide(self) -> f64 {
        self
    }
    #[inline(always)]
    fn fma(self, a: f64, b: f64) -> f64 {
        self.mul_add(a, b)
    }
    #[inline(always)]
    fn sqrt(self) -> f64 {
        f64::sqrt(self)
    }
    #[inline(always)]
    fn is_finite(self) -> bool {
        f64::is_finite(self)
    }

    /// e^x within 1.5 ulp; 0 below -746, infinity above 709.8, subnormal results included.
    #[inline(always)]
    fn exp(self) -> f64 {
        /// 1.5 * 2^52, as above.
        const ROUND: f64 = 6_755_399_441_055_744.0;
        let x = if self > 710.0 { 710.0 } else { self };
        let x = if x < -746.0 { -746.0 } else { x };
        let rounded = x.mul_add(std::f64::consts::LOG2_E, ROUND);
        let n = rounded - ROUND;
        let r = (-n).mul_add(LN2_LOW, (-n).mul_add(std::f64::consts::LN_2, x));
        let mut sum = RECIPROCAL_FACTORIALS[13];
        for i in (0..13).rev() {
            sum = r.mul_add(sum, RECIPROCAL_FACTORIALS[i]);
        }
        let n = (rounded.to_bits() as i64).wrapping_sub(ROUND.to_bits() as i64);
        let half = n >> 1;
        let power = |n: i64| f64::from_bits((n.wrapping_add(1023) as u64) << 52);
        sum * power(half) * power(n.wrapping_sub(half))
    }
}

/// 1 / 0!, 1 / 1!, ... 1 / 13!
const RECIPROCAL_FACTORIALS: [f64; 14] = {
    let mut reciprocals = [1.0; 14];
    let (mut i, mut factorial) = (1, 1.0);
    while i < 14 {
        factorial *= i as f64;
        reciprocals[i] = 1.0 / factorial;
        i += 1;
    }
    reciprocals
};

/// 2/3, 2/5, ... 2/25
const TWO_OVER_ODD: [f64; 12] = {
    let mut terms = [0.0; 12];
    let mut i = 0;
    while i < 12 {
        terms[i] = 2.0 / (2 * i + 3) as f64;
        i += 1;
    }
    terms
};

/// ln 2 minus its nearest f64.
const LN2_LOW: f64 = 2.319_046_813_846_299_6e-17;

/// The natural logarithm, within 2 ulp away from 1 and within 1e-16 near it.
#[inline(always)]
pub(crate) fn ln(x: f64) -> f64 {
    if x.is_nan() || x < 0.0 {
        return f64::NAN;
    }
    if x == 0.0 {
        return f64::NEG_INFINITY;
    }
    if x == f64::INFINITY {
        return x;
    }
    // 2^54 lifts a subnormal into the normal numbers.
    let (x, lift) = if x < f64::MIN_POSITIVE { (x * 18_014_398_509_481_984.0, 54) } else { (x, 0) };
    let bits = x.to_bits();
    let mut exponent = ((bits >> 52) as i64) - 1023 - lift;
    let mut m = f64::from_bits((bits & ((1 << 52) - 1)) | (1023 << 52));
    if m > std::f64::consts::SQRT_2 {
        m *= 0.5;
        exponent += 1;
    }
    // ln m = 2 atanh(s), |s| <= 0.172
    let s = (m - 1.0) / (m + 1.0);
    let s2 = s * s;
    let sum = TWO_OVER_ODD.iter().rev().fold(0.0, |sum, c| s2.mul_add(sum, *c));
    let e = exponent as f64;
    let small = (s * s2).mul_add(sum, e * LN2_LOW);
    e.mul_add(std::f64::consts::LN_2, (2.0 * s) + small)
}

/// (sin x, cos x), each within about 1e-16 for |x| < 2^26; beyond, the reduction loses digits.
pub(crate) fn sin_cos(x: f64) -> (f64, f64) {
    /// pi / 2 in three parts, each the nearest f64 of what remains.
    const PI_2: [f64; 3] =
        [std::f64::consts::FRAC_PI_2, 6.123_233_995_736_766e-17, -1.497_384_904_859_169_8e-33];
    const ROUND: f64 = 6_755_399_441_055_744.0;
    let rounded = x.mul_add(std::f64::consts::FRAC_2_PI, ROUND);
    let n = rounded - ROUND;
    let r = PI_2.iter().fold(x, |r, part| (-n).mul_add(*part, r));
    let r2 = r * r;
    // Taylor up to r^19 and r^18: with |r| <= pi / 4 the next terms are below 1e-19.
    let (mut sin, mut cos) = (0.0, 0.0);
    let mut i = 9.0;
    while i >= 1.0 {
        sin = r2 * (1.0 - sin) / ((2.0 * i) * (2.0 * i + 1.0));
        cos = r2 * (1.0 - cos) / ((2.0 * i - 1.0) * (2.0 * i));
        i -= 1.0;
    }
    let (sin, cos) = ((-r).mul_add(sin, r), 1.0 - cos);
    match rounded.to_bits() & 3 {
        0 => (sin, cos),
        1 => (cos, -sin),
        2 => (-sin, -cos),
        _ => (-cos, sin),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn exp_is_within_two_ulp() {
        let (mut worst32, mut worst64) = (0.0_f64, 0.0_f64);
        for i in -200_000..200_000 {
            let x = f64::from(i) * 3.5e-3;
            let close = |ours: f64, theirs: f64, ulp: f64| (ours - theirs).abs() / (theirs * ulp);
            if x.abs() < 87.0 {
                let x = x as f32;
                let ours = Float::exp(x).wide();
                worst32 = worst32.max(close(ours, f64::from(x).exp(), f64::from(f32::EPSILON)));
            }
            worst64 = worst64.max(close(Float::exp(x), x.exp(), f64::EPSILON));
        }
        assert!(worst32 < 1.5 && worst64 < 2.0, "{worst32} and {worst64} ulp");
        let e32 = <f32 as Float>::exp;
        let e64 = <f64 as Float>::exp;
        assert_eq!((e32(0.0), e32(-1e30), e32(1e30)), (1.0, 0.0, f32::INFINITY));
        assert_eq!((e64(0.0), e64(-1e300), e64(1e300)), (1.0, 0.0, f64::INFINITY));
        assert_eq!((e32(f32::NEG_INFINITY), e32(f32::INFINITY)), (0.0, f32::INFINITY));
        assert_eq!(e32(-103.0), (-103.0_f64).exp() as f32, "a subnormal result");
        assert!(e32(f32::NAN).is_nan() && e64(f64::NAN).is_nan());
    }

    #[test]
    fn ln_is_accurate() {
        for i in 1..200_000 {
            for x in [f64::from(i) * 1e-4, f64::from(i) * 1e17, 1.0 / f64::from(i)] {
                let error = (ln(x) - x.ln()).abs();
                assert!(error <= 1e-16 + 4.5e-16 * x.ln().abs(), "ln({x}): off by {error}");
            }
        }
        assert_eq!((ln(1.0), ln(0.0), ln(f64::INFINITY)), (0.0, f64::NEG_INFINITY, f64::INFINITY));
        assert!(ln(-1.0).is_nan() && ln(f64::NAN).is_nan());
        assert!((ln(5e-324) - 5e-324_f64.ln()).abs() < 1e-12);
    }

    #[test]
    fn sin_and_cos_are_accurate() {
        for i in -300_000..300_000 {
            for x in [f64::from(i) * 1e-3, f64::from(i) * 37.7] {
                let (sin, cos) = sin_cos(x);
                let error = (sin - x.sin()).abs().max((cos - x.cos()).abs());
                assert!(error < 3e-16, "sin, cos of {x}: off by {error}");
            }
        }
        assert_eq!(sin_cos(0.0), (0.0, 1.0));
    }
}
