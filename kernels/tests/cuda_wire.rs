//! Rows in the formats in which they travel, against those of a processor bit for bit, and sums of
//! two kinds. Skipped where there is no GPU.

use half::bf16;
use moejob_kernels::cuda::Gpu;
use moejob_kernels::philox::philox4x32_10;
use moejob_kernels::{
    Add, ArenaPlan, DType, Device, FP8_BLOCK, PackRows, UnpackRows, WireFormat, fp8_pack,
    fp8_unpack,
};

/// Numbers of all sizes, zeros, and where a row says so what is none.
fn numbers(len: usize, dim: usize) -> Vec<f32> {
    let number = |at: usize| {
        let [a, b, c, _] = philox4x32_10(7, [at as u32, 3, 0, 0]);
        let size = 2.0_f64.powi((b % 24) as i32 - 12 + 4 * (at / FP8_BLOCK % 30) as i32 - 60);
        match c % 4099 {
            0 if at / dim % 2 == 1 => f32::INFINITY,
            1 if at / dim % 2 == 1 => f32::NAN,
            n if n % 13 == 0 => 0.0,
            _ => ((f64::from(a) / f64::from(1 << 31) - 1.0) * size) as f32,
        }
    };
    (0..len).map(number).collect()
}

fn gpu() -> bool {
    let found = Gpu::open(0);
    if let Err(error) = &found {
        println!("skipped: {error}");
    }
    found.is_ok()
}

#[test]
fn rows_are_packed_as_a_processor_packs_them() {
    if !gpu() {
        return;
    }
    for (rows, dim) in [(1, 16), (3, 64), (257, 144), (64, 2048), (9, 7168), (5000, 128)] {
        for dtype in [DType::F32, DType::Bf16] {
            let mut given = numbers(rows * dim, dim);
            if dtype == DType::Bf16 {
                given.iter_mut().for_each(|x| *x = bf16::from_f32(*x).to_f32());
            }
            let bytes = WireFormat::Fp8.row_bytes(dim);
            let mut plan = ArenaPlan::new();
            let (from, to) = (plan.alloc(dtype, rows * dim), plan.alloc(dtype, rows * dim));
            let packed = plan.alloc(DType::U8, rows * bytes);
            let mut device = Device::cuda(0, plan.bytes()).expect("a GPU");
            match dtype {
                DType::F32 => device.write(from, &given),
                _ => {
                    let halves: Vec<bf16> = given.iter().map(|x| bf16::from_f32(*x)).collect();
                    device.write(from, &halves);
                }
            }
            let format = WireFormat::Fp8;
            device.pack_rows(&PackRows { format, dim, rows: from, packed });
            device.unpack_rows(&UnpackRows { format, dim, packed, rows: to });
            let (codes, found) = (device.read_vec::<u8>(packed), match dtype {
                DType::F32 => device.read_vec::<f32>(to),
                _ => device.read_vec::<bf16>(to).iter().map(|x| x.to_f32()).collect(),
            });
            let told = dim + dim.div_ceil(FP8_BLOCK);
            for row in 0..rows {
                let mut expected = vec![0; bytes];
                fp8_pack(&given[row * dim..][..dim], &mut expected);
                let codes = &codes[row * bytes..][..told];
                assert!(codes == &expected[..told], "row {row} of {dim} {dtype:?}");
                let mut numbers = vec![0.0; dim];
                fp8_unpack(&expected, &mut numbers);
                for (found, expected) in found[row * dim..][..dim].iter().zip(numbers) {
                    let same = found.to_bits() == expected.to_bits();
                    let none = found.is_nan() && expected.is_nan();
                    assert!(same || none, "row {row} of {dim} {dtype:?}: {found} for {expected}");
                }
            }
        }
    }
}

#[test]
fn sums_of_fp32_are_added_to_elements_and_rounded_once() {
    if !gpu() {
        return;
    }
    for len in [1, 7, 4096, 100_003] {
        let mut plan = ArenaPlan::new();
        let (a, b) = (plan.alloc(DType::Bf16, len), plan.alloc(DType::F32, len));
        let mut device = Device::cuda(0, plan.bytes()).expect("a GPU");
        let own: Vec<bf16> = (0..len).map(|i| bf16::from_f32((i % 97) as f32 / 7.0)).collect();
        let more: Vec<f32> = (0..len).map(|i| (i % 1009) as f32 / 333.0 - 1.0).collect();
        device.write(a, &own);
        device.write(b, &more);
        device.add(&Add { a, b });
        let found = device.read_vec::<bf16>(a);
        for (found, (own, more)) in found.iter().zip(own.iter().zip(&more)) {
            assert_eq!(*found, bf16::from_f32(own.to_f32() + more), "{own} + {more}");
        }
    }
}
