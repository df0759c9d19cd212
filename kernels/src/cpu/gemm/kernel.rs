//! The innermost loop: a tile of C in registers.

use crate::cpu::float::Float;
use crate::cpu::isa::Isa;

/// The most rows that a tile has.
pub(crate) const MR_MAX: usize = 8;

/// A tile of C [rows, columns] (+)= A [rows, k] B [k, NR], one chunk of k.
pub struct Tile<T> {
    pub(crate) rows: usize,
    /// Columns of C to store; B's panel has NR.
    pub(crate) columns: usize,
    pub(crate) k: usize,
    /// Where each row of A starts: `rows` pointers.
    pub(crate) a: *const *const T,
    /// Elements from there to the first k.
    pub(crate) a_first: usize,
    /// Elements from one k to the next in A.
    pub(crate) a_step: usize,
    pub(crate) b: *const T,
    pub(crate) c: *mut T,
    pub(crate) ldc: usize,
    /// Whether this chunk is C's first and nothing is added to.
    pub(crate) overwrite: bool,
}

/// A kernel and the size of its tiles.
pub struct Kernel<T> {
    pub(crate) mr: usize,
    pub(crate) nr: usize,
    pub(crate) run: unsafe fn(&Tile<T>),
}

/// Floats that have kernels.
pub trait GemmFloat: Float {
    fn kernel(isa: Isa) -> Kernel<Self>;
}

impl GemmFloat for f32 {
    fn kernel(isa: Isa) -> Kernel<f32> {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Kernel { mr: 8, nr: 32, run: x86::avx512_f32 },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Kernel { mr: 6, nr: 16, run: x86::avx2_f32 },
            _ => Kernel { mr: 4, nr: 16, run: scalar::<f32> },
        }
    }
}

impl GemmFloat for f64 {
    fn kernel(isa: Isa) -> Kernel<f64> {
        match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 => Kernel { mr: 8, nr: 16, run: x86::avx512_f64 },
            #[cfg(target_arch = "x86_64")]
            Isa::Avx2 => Kernel { mr: 6, nr: 8, run: x86::avx2_f64 },
            _ => Kernel { mr: 4, nr: 16, run: scalar::<f64> },
        }
    }
}

/// The definition of a tile, four rows by sixteen columns.
///
/// # Safety
/// The pointers of the tile cover what its sizes say.
unsafe fn scalar<T: Float>(tile: &Tile<T>) {
    const NR: usize = 16;
    let mut sums = [[T::ZERO; NR]; 4];
    for k in 0..tile.k {
        for (row, sums) in sums.iter_mut().enumerate().take(tile.rows) {
            // SAFETY: the caller promises `rows` x `k` elements of A and `k` x NR of B.
            unsafe {
                let a = *(*tile.a.add(row)).add(tile.a_first + k * tile.a_step);
                for (column, sum) in sums.iter_mut().enumerate() {
                    *sum = a.fma(*tile.b.add(k * NR + column), *sum);
                }
            }
        }
    }
    for (row, sums) in sums.iter().enumerate().take(tile.rows) {
        for (column, sum) in sums.iter().enumerate().take(tile.columns) {
            // SAFETY: the caller promises `rows` x `columns` elements of C.
            unsafe {
                let c = tile.c.add(row * tile.ldc + column);
                *c = if tile.overwrite { *sum } else { *c + *sum };
            }
        }
    }
}

/// Tiles held in vector registers, two vectors wide: 16 (AVX-512: 8 rows) or 12 (AVX2: 6 rows) sums
/// hide the latency of a fused multiply-add and leave registers for B.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use super::Tile;
    use std::arch::x86_64::*;


    macro_rules! kernel {
        (
            $name:ident, $rows_fn:ident, $float:ty, $lanes:literal, $features:literal,
            $zero:ident, $load:ident, $splat:ident, $fma:ident, $add:ident, $store:ident,
            [$($rows:literal)*], $rows_max:literal
        ) => {
            /// # Safety
            /// The processor has the features, and the tile's pointers cover its sizes.
            pub(crate) unsafe fn $name(tile: &Tile<$float>) {
                // SAFETY: the caller promises what each instance needs.
                unsafe {
                    match (tile.rows, tile.columns <= $lanes) {
                        $(($rows, false) => $rows_fn::<$rows, 2>(tile),
                          ($rows, true) => $rows_fn::<$rows, 1>(tile),)*
                        (_, false) => $rows_fn::<$rows_max, 2>(tile),
                        (_, true) => $rows_fn::<$rows_max, 1>(tile),
                    }
                }
            }

            #[target_feature(enable = $features)]
            unsafe fn $rows_fn<const R: usize, const V: usize>(tile: &Tile<$float>) {
                const LANES: usize = $lanes;
                debug_assert_eq!(tile.rows, R);
                let mut sums = [[$zero(); V]; R];
                let mut b = tile.b;
                let mut at = tile.a_first;
                // SAFETY: the caller promises `rows` pointers.
                let a: [_; R] = std::array::from_fn(|r| unsafe { *tile.a.add(r) });
                for _ in 0..tile.k {
                    // SAFETY: the caller promises `k` x 2 LANES of B and `rows` x `k` of A.
                    unsafe {
                        let mut bs = [$zero(); V];
                        for v in 0..V {
                            bs[v] = $load(b.add(v * LANES));
                        }
                        for r in 0..R {
                            let a = $splat(*a[r].add(at));
                            for v in 0..V {
                                sums[r][v] = $fma(a, bs[v], sums[r][v]);
                            }
                        }
                        b = b.add(2 * LANES);
                        at += tile.a_step;
                    }
                }
                for r in 0..R {
                    // SAFETY: the caller promises `rows` x `columns` of C; vectors are stored
                    // whole only where all of their columns exist.
                    unsafe {
                        let c = tile.c.add(r * tile.ldc);
                        for v in 0..V {
                            let c = c.add(v * LANES);
                            let count = LANES.min(tile.columns - v * LANES);
                            let mut sum = sums[r][v];
                            if count == LANES {
                                if !tile.overwrite {
                                    sum = $add($load(c), sum);
                                }
                                $store(c, sum);
                            } else {
                                let mut spare = [0.0; LANES];
                                $store(spare.as_mut_ptr(), sum);
                                for (l, sum) in spare[..count].iter().enumerate() {
                                    let c = c.add(l);
                                    *c = if tile.overwrite { *sum } else { *c + *sum };
                                }
                            }
                        }
                    }
                }
            }
        };
    }

    kernel!(
        avx512_f32, avx512_f32_rows, f32, 16, "avx512f",
        _mm512_setzero_ps, _mm512_loadu_ps, _mm512_set1_ps, _mm512_fmadd_ps, _mm512_add_ps,
        _mm512_storeu_ps, [1 2 3 4 5 6 7], 8
    );
    kernel!(
        avx512_f64, avx512_f64_rows, f64, 8, "avx512f",
        _mm512_setzero_pd, _mm512_loadu_pd, _mm512_set1_pd, _mm512_fmadd_pd, _mm512_add_pd,
        _mm512_storeu_pd, [1 2 3 4 5 6 7], 8
    );
    kernel!(
        avx2_f32, avx2_f32_rows, f32, 8, "avx2,fma",
        _mm256_setzero_ps, _mm256_loadu_ps, _mm256_set1_ps, _mm256_fmadd_ps, _mm256_add_ps,
        _mm256_storeu_ps, [1 2 3 4 5], 6
    );
    kernel!(
        avx2_f64, avx2_f64_rows, f64, 4, "avx2,fma",
        _mm256_setzero_pd, _mm256_loadu_pd, _mm256_set1_pd, _mm256_fmadd_pd, _mm256_add_pd,
        _mm256_storeu_pd, [1 2 3 4 5], 6
    );
}
