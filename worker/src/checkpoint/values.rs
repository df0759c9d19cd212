//! Numbers as they lie in files: little-endian, of one of four float types.

use half::{bf16, f16};
use moejob_kernels::DType;

/// The type that a safetensors header names, where it is a float that weights may have.
pub fn float_named(name: &str) -> Option<DType> {
    match name {
        "F16" => Some(DType::F16),
        "BF16" => Some(DType::Bf16),
        "F32" => Some(DType::F32),
        "F64" => Some(DType::F64),
        _ => None,
    }
}

/// As safetensors headers have it.
pub fn name_of(dtype: DType) -> &'static str {
    match dtype {
        DType::F16 => "F16",
        DType::Bf16 => "BF16",
        DType::F32 => "F32",
        DType::F64 => "F64",
        DType::I16 => "I16",
        DType::U32 => "U32",
        DType::U8 => "U8",
        DType::Pair => panic!("sums of a step are not stored"),
    }
}

/// The first element that is NaN or infinite: all bits of its exponent are set.
pub fn first_non_finite(bytes: &[u8], dtype: DType) -> Option<usize> {
    match dtype {
        DType::F16 => words(bytes).position(|bits| bits & 0x7c00 == 0x7c00),
        DType::Bf16 => words(bytes).position(|bits| bits & 0x7f80 == 0x7f80),
        DType::F32 => {
            let mut values = bytes.chunks_exact(4).map(|b| f32::from_le_bytes(four(b)));
            values.position(|value| !value.is_finite())
        }
        DType::F64 => {
            let mut values = bytes.chunks_exact(8).map(|b| f64::from_le_bytes(eight(b)));
            values.position(|value| !value.is_finite())
        }
        DType::I16 | DType::U32 | DType::U8 | DType::Pair => None,
    }
}

/// Rewrites floats of one type as another, rounded to the nearest, ties to even; appends to `out`.
///
/// # Errors
/// The first element that is finite, and infinite in the other type.
pub fn convert(bytes: &[u8], from: DType, to: DType, out: &mut Vec<u8>) -> Result<(), usize> {
    if from == to {
        out.extend_from_slice(bytes);
        return Ok(());
    }
    let start = out.len();
    match from {
        DType::F16 => encode(words(bytes).map(|bits| f16::from_bits(bits).to_f64()), to, out),
        DType::Bf16 => encode(words(bytes).map(|bits| bf16::from_bits(bits).to_f64()), to, out),
        DType::F64 => {
            encode(bytes.chunks_exact(8).map(|b| f64::from_le_bytes(eight(b))), to, out);
        }
        _ => {
            let values = bytes.chunks_exact(4).map(|b| f64::from(f32::from_le_bytes(four(b))));
            encode(values, to, out);
        }
    }
    let finite = first_non_finite(bytes, from).is_none();
    match first_non_finite(&out[start..], to) {
        Some(at) if finite => Err(at),
        _ => Ok(()),
    }
}

fn encode(values: impl Iterator<Item = f64>, to: DType, out: &mut Vec<u8>) {
    match to {
        DType::F16 => values.for_each(|x| out.extend(f16::from_f32(to_odd(x)).to_le_bytes())),
        DType::Bf16 => values.for_each(|x| out.extend(bf16::from_f32(to_odd(x)).to_le_bytes())),
        DType::F64 => values.for_each(|x| out.extend(x.to_le_bytes())),
        _ => values.for_each(|x| out.extend((x as f32).to_le_bytes())),
    }
}

/// The value in fp32, rounded to odd: what fp32 does not hold is cut off, and leaves its trace in
/// the last bit. A half that is rounded from it is the nearest to `x`, where one that is rounded
/// from the nearest fp32 may be its neighbour (Boldo and Melquiond 2008). `half` itself rounds
/// fp64 by the upper 32 bits alone.
fn to_odd(x: f64) -> f32 {
    let nearest = x as f32;
    let back = f64::from(nearest);
    if back == x || x.is_nan() {
        return nearest;
    }
    let toward_zero = nearest.to_bits() - u32::from(back.abs() > x.abs());
    f32::from_bits(toward_zero | 1)
}

fn words(bytes: &[u8]) -> impl Iterator<Item = u16> {
    bytes.chunks_exact(2).map(|b| u16::from_le_bytes([b[0], b[1]]))
}

fn four(b: &[u8]) -> [u8; 4] {
    [b[0], b[1], b[2], b[3]]
}

fn eight(b: &[u8]) -> [u8; 8] {
    [b[0], b[1], b[2], b[3], b[4], b[5], b[6], b[7]]
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_half_survives_the_way_there_and_back() {
        for dtype in [DType::F16, DType::Bf16] {
            let all: Vec<u8> = (0..=u16::MAX).flat_map(u16::to_le_bytes).collect();
            let finite: Vec<u8> = (all.chunks_exact(2))
                .filter(|b| first_non_finite(b, dtype).is_none())
                .flatten()
                .copied()
                .collect();
            for wide in [DType::F32, DType::F64] {
                let (mut there, mut back) = (Vec::new(), Vec::new());
                convert(&finite, dtype, wide, &mut there).expect("all fit");
                convert(&there, wide, dtype, &mut back).expect("all fit");
                assert_eq!(back, finite, "{dtype:?} through {wide:?}");
            }
        }
    }

    /// All finite halves of a type, ascending, as f64.
    fn halves(of: impl Fn(u16) -> f64) -> Vec<f64> {
        let mut all: Vec<f64> = (0..=u16::MAX).map(of).filter(|x| x.is_finite()).collect();
        all.sort_by(f64::total_cmp);
        all.dedup();
        all
    }

    /// Between two halves lie a middle, which goes to the even one, and what is nearer to one of
    /// them, by however little.
    #[test]
    fn a_half_is_the_nearest_to_what_it_was_made_of() {
        let types: [(DType, fn(u16) -> f64); 2] = [
            (DType::F16, |bits| f16::from_bits(bits).to_f64()),
            (DType::Bf16, |bits| bf16::from_bits(bits).to_f64()),
        ];
        for (dtype, of) in types {
            let all = halves(of);
            let (mut f64s, mut expected) = (Vec::new(), Vec::new());
            let (mut f32s, mut expected32) = (Vec::new(), Vec::new());
            for pair in all.windows(2) {
                let (low, high) = (pair[0], pair[1]);
                let middle = low + (high - low) / 2.0;
                for x in [middle, middle.next_down(), middle.next_up()] {
                    let is_even = |half: f64| match dtype {
                        DType::F16 => f16::from_f64(half).to_bits() & 1 == 0,
                        _ => bf16::from_f64(half).to_bits() & 1 == 0,
                    };
                    let upper = x > middle || x == middle && is_even(high);
                    f64s.extend(x.to_le_bytes());
                    expected.push(if upper { high } else { low });
                }
                let middle = middle as f32;
                for x in [middle.next_down(), middle.next_up()] {
                    f32s.extend(x.to_le_bytes());
                    expected32.push(if x > middle { high } else { low });
                }
            }
            for (bytes, from, expected) in
                [(f64s, DType::F64, expected), (f32s, DType::F32, expected32)]
            {
                let mut out = Vec::new();
                convert(&bytes, from, dtype, &mut out).expect("all fit");
                let found: Vec<f64> = words(&out).map(of).collect();
                let wrong = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
                assert_eq!(wrong, 0, "of {} {dtype:?} from {from:?}", expected.len());
            }
        }
    }

    #[test]
    fn rounding_goes_to_even_and_overflow_is_told() {
        let f32s = |values: &[f32]| values.iter().flat_map(|x| x.to_le_bytes()).collect::<Vec<_>>();
        let mut out = Vec::new();
        // 1 + 2^-8 lies half-way between two bf16.
        let halves = f32s(&[1.003_906_25, 1.011_718_75]);
        convert(&halves, DType::F32, DType::Bf16, &mut out).expect("both fit");
        assert_eq!(out, [0x80, 0x3f, 0x82, 0x3f]);
        let large = f32s(&[1.0, 70_000.0]);
        assert_eq!(convert(&large, DType::F32, DType::F16, &mut Vec::new()), Err(1));
        let large: Vec<u8> = [1e39, -1e39].iter().flat_map(|x: &f64| x.to_le_bytes()).collect();
        assert_eq!(convert(&large, DType::F64, DType::Bf16, &mut Vec::new()), Err(0));
        // 1 + 2^-8 + 2^-23 is nearer to 1 + 2^-7 than to 1.
        out.clear();
        convert(&f32s(&[1.003_906_4]), DType::F32, DType::Bf16, &mut out).expect("it fits");
        assert_eq!(out, [0x81, 0x3f]);
        assert_eq!(first_non_finite(&f32s(&[0.0, f32::NAN]), DType::F32), Some(1));
    }
}
