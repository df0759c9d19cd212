//! The parts of a tensor's state and how each is kept in memory.
//!
//! ```text
//! fp32, fp64   Weight = Master                       Moment1, Moment2 as the master
//! bf16         Weight bf16 + 16 low bits = Master    moments fp32 or bf16
//! fp16         Weight fp16, Master fp32 of its own   moments fp32 or bf16
//! ```
//! A checkpoint holds the joined master and the moments in fp32 (fp64 of fp64 jobs) whatever the
//! precision, so any precision loads any other's. Half the memory of a separate fp32 master with
//! bf16 weights is saved by keeping of the master only what the weight does not say, as in
//! Zamirai et al. 2020, "Revisiting BFloat16 Training" and the split optimizers after it.

use half::f16;
use moejob_kernels::DType;
use moejob_kernels::philox::philox4x32_10;
use moejob_protocol::config::Precision;

/// How the master is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Master {
    /// It is the weight.
    Weight,
    /// 16 bits that, with the bf16 weight, give its fp32 bits.
    LowHalf,
    /// fp32 beside the weight.
    Separate,
}

/// How each part of all tensors is kept.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct StateTypes {
    pub weight: DType,
    pub master: Master,
    pub moments: DType,
}

impl StateTypes {
    /// `moments` is fp32 or bf16; where weights are kept whole, so are moments.
    pub fn of(precision: Precision, moments: DType) -> StateTypes {
        match precision {
            Precision::Fp32 | Precision::Tf32 => StateTypes::whole(DType::F32),
            Precision::Fp64 => StateTypes::whole(DType::F64),
            Precision::Bf16 => {
                StateTypes { weight: DType::Bf16, master: Master::LowHalf, moments }
            }
            Precision::Fp16 => {
                StateTypes { weight: DType::F16, master: Master::Separate, moments }
            }
        }
    }

    fn whole(dtype: DType) -> StateTypes {
        StateTypes { weight: dtype, master: Master::Weight, moments: dtype }
    }

    /// Bytes of an element that its holders keep, and those that its owner keeps beside.
    pub fn bytes(&self) -> (usize, usize) {
        let master = match self.master {
            Master::Weight => 0,
            Master::LowHalf => 2,
            Master::Separate => 4,
        };
        (self.weight.size(), master + 2 * self.moments.size())
    }

    /// The type of master and moments in a checkpoint.
    pub fn stored(&self) -> DType {
        if self.weight == DType::F64 { DType::F64 } else { DType::F32 }
    }
}

/// The bf16 weight nearest to `master` (halves away from zero) and the difference of their bits.
/// Every pattern of 32 bits comes back from [`join_bf16`], NaN and infinity included. A finite
/// master of 3.396e38 and more has an infinite weight, which forward then tells.
#[inline]
pub fn split_bf16(master: f32) -> (u16, i16) {
    let bits = master.to_bits();
    let weight = (bits.wrapping_add(0x8000) >> 16) as u16;
    let low = bits.wrapping_sub(u32::from(weight) << 16);
    // From -0x8000 to 0x7fff, as the weight is the nearest.
    (weight, low as u16 as i16)
}

/// The master of a bf16 weight and the difference of their bits.
#[inline]
pub fn join_bf16(weight: u16, low: i16) -> f32 {
    let low = i32::from(low) as u32;
    f32::from_bits((u32::from(weight) << 16).wrapping_add(low))
}

/// The fp16 weight of a separate master: the nearest, ties to even.
#[inline]
pub fn weight_f16(master: f32) -> u16 {
    f16::from_f32(master).to_bits()
}

/// A finite moment as bf16, up or down by chance so that its mean is itself: `random` is uniform
/// in 16 bits. Never infinite: the largest finite value stays finite.
#[inline]
pub fn round_by_chance(moment: f32, random: u16) -> u16 {
    const LARGEST: u32 = 0x7f7f;
    let bits = moment.to_bits();
    let magnitude = ((bits & 0x7fff_ffff) + u32::from(random)) >> 16;
    let magnitude = if bits & 0x7f80_0000 == 0x7f80_0000 {
        // Not finite: it stays what it is, so that it is noticed; a NaN of low bits alone, too.
        (bits >> 16 & 0x7fff) | u32::from(bits & 0x007f_ffff != 0) << 6
    } else {
        magnitude.min(LARGEST)
    };
    (magnitude | bits >> 16 & 0x8000) as u16
}

/// Random bits of a moment: a function of the tensor's name, the step, the moment and the element.
/// One draw of Philox serves eight elements.
pub fn random_bits(seed: u64, name_hash: u64, step: u64, moment: u32, element: u64) -> u16 {
    let key = seed ^ name_hash.rotate_left(17) ^ step.wrapping_mul(0x9e37_79b9_7f4a_7c15);
    let draw = element / 8;
    let words = philox4x32_10(key, [draw as u32, (draw >> 32) as u32, moment, 0x6d6f_6d65]);
    let word = words[(element % 8 / 2) as usize];
    (word >> (16 * (element % 2))) as u16
}

#[cfg(test)]
mod tests {
    use super::*;
    use half::bf16;

    /// Every exponent and sign with the mantissas that could go wrong, and a stride through all.
    fn patterns() -> impl Iterator<Item = u32> {
        let edges = [0, 1, 0x7fff, 0x8000, 0x8001, 0xffff, 0x10000, 0x17fff, 0x18000, 0x7fffff];
        let exponents = (0..=0x1ffu32).flat_map(move |high| {
            edges.into_iter().flat_map(move |low| [high << 23 | low, high << 23 | 0x7fffff ^ low])
        });
        exponents.chain((0..=u32::MAX).step_by(65_521))
    }

    #[test]
    fn a_master_comes_back_from_weight_and_low_half_whatever_its_bits() {
        for bits in patterns() {
            let (weight, low) = split_bf16(f32::from_bits(bits));
            assert_eq!(join_bf16(weight, low).to_bits(), bits, "{bits:#010x}");
        }
    }

    #[test]
    fn the_weight_is_the_nearest_bf16() {
        for master in patterns().map(f32::from_bits).filter(|master| master.is_finite()) {
            let (weight, _) = split_bf16(master);
            let nearest = bf16::from_f32(master);
            let error = |weight: bf16| (f64::from(master) - weight.to_f64()).abs();
            let own = bf16::from_bits(weight);
            // Half-way both are nearest, and ties go to even there.
            assert!(own == nearest || error(own) == error(nearest), "{master:e}");
        }
    }

    #[test]
    fn every_weight_with_every_low_half_is_some_master() {
        for weight in (0..=u16::MAX).step_by(257) {
            for low in (i16::MIN..=i16::MAX).step_by(97) {
                let master = join_bf16(weight, low);
                assert_eq!(split_bf16(master), (weight, low), "{weight:#06x} {low}");
            }
        }
    }

    #[test]
    fn rounding_by_chance_hits_both_neighbours_as_often_as_it_should() {
        for value in [1.0f32, 1.001, -3.3e-5, 7.7e20, 1e-40, 0.0] {
            let sum: f64 = (0..=u16::MAX)
                .map(|random| bf16::from_bits(round_by_chance(value, random)).to_f64())
                .sum();
            let mean = sum / 65_536.0;
            let error = (mean - f64::from(value)).abs();
            assert!(error <= 1e-6 * f64::from(value).abs(), "{value:e}: {mean:e}");
        }
        let exact = bf16::from_f32(0.15625);
        assert!((0..=u16::MAX).all(|r| round_by_chance(exact.to_f32(), r) == exact.to_bits()));
        let largest = bf16::from_bits(round_by_chance(f32::MAX, u16::MAX));
        assert!(largest.is_finite());
        for broken in [f32::INFINITY, f32::NEG_INFINITY, f32::NAN, f32::from_bits(0x7f80_0001)] {
            let rounded = bf16::from_bits(round_by_chance(broken, 0xffff));
            assert!(!rounded.is_finite() && rounded.is_nan() == broken.is_nan(), "{broken}");
        }
    }

    #[test]
    fn random_bits_are_even_and_differ_by_all_that_they_are_of() {
        let count = 1 << 16;
        let bits = |step, moment| (0..count).map(move |at| random_bits(1, 2, step, moment, at));
        let mean = bits(3, 1).map(f64::from).sum::<f64>() / count as f64;
        assert!((mean - 32_767.5).abs() < 400.0, "{mean}");
        let same = bits(3, 1).zip(bits(3, 2)).filter(|(a, b)| a == b).count();
        assert!(same < 20, "{same} of {count} are the same for both moments");
        let same = bits(3, 1).zip(bits(4, 1)).filter(|(a, b)| a == b).count();
        assert!(same < 20, "{same} of {count} are the same at two steps");
    }

    #[test]
    fn bytes_are_those_of_the_parts() {
        let of = |precision, moments| StateTypes::of(precision, moments).bytes();
        assert_eq!(of(Precision::Fp32, DType::Bf16), (4, 8));
        assert_eq!(of(Precision::Fp64, DType::F32), (8, 16));
        assert_eq!(of(Precision::Bf16, DType::F32), (2, 10));
        assert_eq!(of(Precision::Bf16, DType::Bf16), (2, 6));
        assert_eq!(of(Precision::Fp16, DType::F32), (2, 12));
        let fp16 = StateTypes::of(Precision::Fp16, DType::F32);
        assert_eq!(fp16.stored(), DType::F32);
        assert_eq!(StateTypes::of(Precision::Fp64, DType::F32).stored(), DType::F64);
        assert_eq!(weight_f16(1.0), 0x3c00);
    }
}
