//! Operands rearranged so that a tile reads them in the order of its loop.

use std::ops::Range;

use crate::cpu::float::Float;
use crate::cpu::gemm::Operand;
use crate::cpu::isa::Isa;

/// Memory for packed panels of either float type, aligned to a cache line.
#[derive(Default)]
pub(crate) struct Panels {
    lines: Vec<Line>,
}

/// A cache line; only its size and its alignment matter.
#[derive(Clone, Copy)]
#[repr(align(64))]
struct Line {
    _bytes: [u8; 64],
}

impl Panels {
    pub(crate) fn take<T: Float>(&mut self, len: usize) -> &mut [T] {
        let lines = (len * size_of::<T>()).div_ceil(64);
        if self.lines.len() < lines {
            self.lines.resize(lines, Line { _bytes: [0; 64] });
        }
        // SAFETY: the lines hold at least `len` elements, are initialised and aligned beyond T's
        // need, and floats have no invalid bit pattern.
        unsafe { std::slice::from_raw_parts_mut(self.lines.as_mut_ptr().cast(), len) }
    }
}

/// Packs the elements `ks` x `others` (rows of A, columns of B) into panels of `width` others:
/// panel p holds, for each k, others p * width .. (p + 1) * width side by side, zero beyond the
/// last. A tile computes on those zeros and stores nothing of it.
pub(crate) fn pack<'p, T: Float>(
    isa: Isa,
    from: &Operand<'_, T>,
    ks: Range<usize>,
    others: Range<usize>,
    width: usize,
    panels: &'p mut Panels,
) -> &'p [T] {
    let panel_len = width * ks.len();
    let packed = panels.take::<T>(others.len().div_ceil(width) * panel_len);
    for (panel, first) in packed.chunks_exact_mut(panel_len).zip(others.clone().step_by(width)) {
        let count = width.min(others.end - first);
        if from.k_major {
            copy_rows(from, ks.clone(), first, count, width, panel);
        } else {
            transpose(isa, from, ks.clone(), first, count, width, panel);
        }
    }
    packed
}

/// Stored rows run along k: each gives `count` neighbours of one row of the panel.
fn copy_rows<T: Float>(
    from: &Operand<'_, T>,
    ks: Range<usize>,
    first: usize,
    count: usize,
    width: usize,
    panel: &mut [T],
) {
    match (count == width, width) {
        (true, 8) => copy_whole_rows::<T, 8>(from, ks, first, panel),
        (true, 16) => copy_whole_rows::<T, 16>(from, ks, first, panel),
        (true, 32) => copy_whole_rows::<T, 32>(from, ks, first, panel),
        _ => {
            for (to, k) in panel.chunks_exact_mut(width).zip(ks) {
                let start = from.start(k) + first;
                to[..count].copy_from_slice(&from.data[start..start + count]);
                to[count..].fill(T::ZERO);
            }
        }
    }
}

/// `copy_rows` of a width known to the compiler: a few vector moves instead of a call each.
fn copy_whole_rows<T: Float, const WIDTH: usize>(
    from: &Operand<'_, T>,
    ks: Range<usize>,
    first: usize,
    panel: &mut [T],
) {
    let (rows, _) = panel.as_chunks_mut::<WIDTH>();
    for (to, k) in rows.iter_mut().zip(ks) {
        let start = from.start(k) + first;
        let row = from.data[start..].first_chunk::<WIDTH>();
        *to = *row.expect("`check` has seen that the stored rows are whole");
    }
}

/// Stored rows run along m or n: each gives one column of the panel.
fn transpose<T: Float>(
    isa: Isa,
    from: &Operand<'_, T>,
    ks: Range<usize>,
    first: usize,
    count: usize,
    width: usize,
    panel: &mut [T],
) {
    let mut column = 0;
    while column < width {
        let block = match isa {
            #[cfg(target_arch = "x86_64")]
            Isa::Avx512 | Isa::Avx2 => x86::side::<T>(),
            _ => 1,
        };
        let rows = std::array::from_fn(|row| {
            let row = column + row.min(block - 1);
            let start = from.start(first + row.min(count - 1)) + ks.start;
            &from.data[start..start + ks.len()]
        });
        if block > 1 && column + block <= count {
            let done = ks.len() - ks.len() % block;
            for k in (0..done).step_by(block) {
                #[cfg(target_arch = "x86_64")]
                x86::transpose_block(rows, k, &mut panel[k * width + column..], width);
            }
            for k in done..ks.len() {
                for (to, row) in panel[k * width + column..].iter_mut().zip(&rows[..block]) {
                    *to = row[k];
                }
            }
            column += block;
            continue;
        }
        for k in 0..ks.len() {
            panel[k * width + column] = if column < count { rows[0][k] } else { T::ZERO };
        }
        column += 1;
    }
}

/// Square blocks transposed in registers: single stores of a column would cost more than the
/// product of a few rows.
#[cfg(target_arch = "x86_64")]
mod x86 {
    use std::arch::x86_64::*;

    use crate::cpu::float::Float;

    /// The side of a block: 8 f32 or 4 f64, 256 bits.
    pub(crate) const fn side<T>() -> usize {
        32 / size_of::<T>()
    }

    /// Writes `rows[i][k + j]` to `to[j * width + i]` for i and j below the side.
    #[inline]
    pub(crate) fn transpose_block<T: Float>(
        rows: [&[T]; 8],
        k: usize,
        to: &mut [T],
        width: usize,
    ) {
        let side = side::<T>();
        assert!(rows[..side].iter().all(|row| k + side <= row.len()), "a block beyond its rows");
        assert!((side - 1) * width + side <= to.len(), "a block beyond its panel");
        let rows = rows.map(|row| row[k..].as_ptr());
        // SAFETY: the bounds were just asserted, a float of 4 bytes is f32 and of 8 is f64, and
        // callers have at least AVX2.
        unsafe {
            match side {
                8 => transpose_f32(rows.map(<*const T>::cast), to.as_mut_ptr().cast(), width),
                _ => transpose_f64(rows.map(<*const T>::cast), to.as_mut_ptr().cast(), width),
            }
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn transpose_f32(rows: [*const f32; 8], to: *mut f32, width: usize) {
        // SAFETY: the caller promises 8 floats in each row and 8 of 8 in the panel.
        unsafe {
            let r = rows.map(|row| _mm256_loadu_ps(row));
            // Pairs of rows, then quarters, then halves.
            let mut pairs = [_mm256_setzero_ps(); 8];
            for i in 0..4 {
                pairs[2 * i] = _mm256_unpacklo_ps(r[2 * i], r[2 * i + 1]);
                pairs[2 * i + 1] = _mm256_unpackhi_ps(r[2 * i], r[2 * i + 1]);
            }
            let mut fours = [_mm256_setzero_ps(); 8];
            for i in 0..2 {
                let p = &pairs[4 * i..4 * i + 4];
                fours[4 * i] = _mm256_shuffle_ps::<0b01_00_01_00>(p[0], p[2]);
                fours[4 * i + 1] = _mm256_shuffle_ps::<0b11_10_11_10>(p[0], p[2]);
                fours[4 * i + 2] = _mm256_shuffle_ps::<0b01_00_01_00>(p[1], p[3]);
                fours[4 * i + 3] = _mm256_shuffle_ps::<0b11_10_11_10>(p[1], p[3]);
            }
            for i in 0..4 {
                let low = _mm256_permute2f128_ps::<0x20>(fours[i], fours[i + 4]);
                let high = _mm256_permute2f128_ps::<0x31>(fours[i], fours[i + 4]);
                _mm256_storeu_ps(to.add(i * width), low);
                _mm256_storeu_ps(to.add((i + 4) * width), high);
            }
        }
    }

    #[target_feature(enable = "avx2")]
    unsafe fn transpose_f64(rows: [*const f64; 8], to: *mut f64, width: usize) {
        // SAFETY: the caller promises 4 floats in each of 4 rows and 4 of 4 in the panel.
        unsafe {
            let [a, b, c, d] = [0, 1, 2, 3].map(|i| _mm256_loadu_pd(rows[i]));
            let pairs = [
                _mm256_unpacklo_pd(a, b),
                _mm256_unpackhi_pd(a, b),
                _mm256_unpacklo_pd(c, d),
                _mm256_unpackhi_pd(c, d),
            ];
            for i in 0..2 {
                let low = _mm256_permute2f128_pd::<0x20>(pairs[i], pairs[i + 2]);
                let high = _mm256_permute2f128_pd::<0x31>(pairs[i], pairs[i + 2]);
                _mm256_storeu_pd(to.add(i * width), low);
                _mm256_storeu_pd(to.add((i + 2) * width), high);
            }
        }
    }
}
