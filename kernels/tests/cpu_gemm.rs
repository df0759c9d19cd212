//! Products against their definition, bit for bit.

mod common;

use common::{Bed, uniform};
use moejob_kernels::{DType, Isa, Layout, Matmul};

const M_MAX: usize = 300;

/// The definition: per chunk of 256 a chain of fused multiply-adds from zero, then the chunks.
fn define(a: &[f64], b: &[f64], before: Option<f64>, float: DType) -> f64 {
    let mut total = before;
    for (a, b) in a.chunks(256).zip(b.chunks(256)) {
        let pairs = a.iter().zip(b);
        let sum = match float {
            DType::F32 => f64::from(pairs.fold(0.0_f32, |sum, (a, b)| {
                (*a as f32).mul_add(*b as f32, sum)
            })),
            _ => pairs.fold(0.0, |sum, (a, b)| a.mul_add(*b, sum)),
        };
        total = Some(match (total, float) {
            (None, _) => sum,
            (Some(total), DType::F32) => f64::from(total as f32 + sum as f32),
            (Some(total), _) => total + sum,
        });
    }
    total.unwrap_or(0.0)
}

/// The rows of `matrix` [rows, columns] as columns.
fn transposed(matrix: &[f64], rows: usize, columns: usize) -> Vec<f64> {
    (0..columns).flat_map(|j| (0..rows).map(move |i| matrix[i * columns + j])).collect()
}

fn check(float: DType, n: usize, k: usize, accumulate: bool, m_of: impl Fn(Isa) -> Vec<usize>) {
    let (a, b) = (uniform(1, M_MAX * k), uniform(2, n * k));
    let before = uniform(3, M_MAX * n);
    let expected: Vec<f64> = (0..M_MAX * n)
        .map(|at| {
            let (a, b) = (&a[at / n * k..][..k], &b[at % n * k..][..k]);
            define(a, b, accumulate.then_some(before[at]), float)
        })
        .collect();
    let b_columns = transposed(&b, n, k);
    for isa in Isa::ALL.into_iter().filter(|isa| isa.is_available()) {
        for m in m_of(isa) {
            let a = &a[..m * k];
            let a_columns = transposed(a, m, k);
            for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
                let mut bed = Bed::new(float, 1 + m % 3, isa);
                let a = bed.floats(if layout == Layout::Tn { &a_columns } else { a });
                let b = bed.floats(if layout == Layout::Nt { &b } else { &b_columns });
                let c = bed.output(m * n);
                if accumulate {
                    bed.set(c, &before[..m * n]);
                }
                bed.device.matmul(&Matmul { layout, m, n, k, accumulate, a, b, c });
                let same = bed.get(c) == expected[..m * n];
                assert!(same, "{layout:?} m {m} n {n} k {k} {float:?} {isa:?} {accumulate}");
            }
        }
    }
}

/// Scalar code without a fused instruction is slow: it gets the edges only.
fn some_rows(isa: Isa) -> Vec<usize> {
    match isa {
        Isa::Scalar => vec![1, 2, 5, 15, 16, 33, 131],
        _ => (1..=M_MAX).step_by(7).chain([2, 3, 4, 5, 6, 7, 9, 255, 256, 257]).collect(),
    }
}

#[test]
fn every_number_of_rows_gives_the_defined_bits() {
    let rows = |isa| if isa == Isa::Scalar { vec![3] } else { (1..=M_MAX).collect() };
    check(DType::F32, 40, 40, false, rows);
    check(DType::F64, 20, 33, false, rows);
}

#[test]
fn ragged_columns_and_long_sums_give_the_defined_bits() {
    for (n, k) in [(1, 300), (7, 256), (33, 513), (96, 257), (8, 128), (129, 64)] {
        check(DType::F32, n, k, false, some_rows);
    }
    for (n, k) in [(1, 257), (9, 300), (65, 64)] {
        check(DType::F64, n, k, false, some_rows);
    }
}

#[test]
fn accumulating_adds_each_chunk_to_what_was_there() {
    check(DType::F32, 33, 600, true, some_rows);
    check(DType::F64, 17, 300, true, some_rows);
}

#[test]
fn more_than_one_block_of_columns_gives_the_defined_bits() {
    check(DType::F32, 700, 20, false, |_| vec![1, 70, 290]);
    check(DType::F32, 530, 1030, false, |isa| match isa {
        Isa::Scalar => vec![2],
        _ => vec![5, 280],
    });
}

#[test]
fn a_product_over_nothing_is_zero() {
    let mut bed = Bed::new(DType::F32, 1, Isa::detect());
    let (a, b, c) = (bed.floats(&[]), bed.floats(&[]), bed.output(6));
    let op = Matmul { layout: Layout::Tn, m: 2, n: 3, k: 0, accumulate: false, a, b, c };
    bed.device.matmul(&op);
    assert_eq!(bed.get(c), [0.0; 6]);
    bed.set(c, &[1.0; 6]);
    bed.device.matmul(&Matmul { accumulate: true, ..op });
    assert_eq!(bed.get(c), [1.0; 6]);
}
