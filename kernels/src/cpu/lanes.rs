//! Sums over a row: lane l adds elements l, l + 16, ... and a fixed tree adds the lanes.

use crate::cpu::float::Float;

pub(crate) const LANES: usize = 16;

/// Adds 16 lanes: l with l + 8, then + 4, + 2, + 1.
#[inline(always)]
pub(crate) fn tree<T: Float>(lanes: [T; LANES]) -> T {
    tree_of(lanes, |a, b| a + b)
}

#[inline(always)]
fn tree_of<T: Float>(mut lanes: [T; LANES], join: impl Fn(T, T) -> T) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] = join(lanes[l], lanes[l + width]);
        }
        width /= 2;
    }
    lanes[0]
}

#[inline(always)]
pub(crate) fn dot<T: Float>(a: &[T], b: &[T]) -> T {
    debug_assert_eq!(a.len(), b.len());
    let mut lanes = [T::ZERO; LANES];
    let (mut a, mut b) = (a.chunks_exact(LANES), b.chunks_exact(LANES));
    for (a, b) in a.by_ref().zip(b.by_ref()) {
        for l in 0..LANES {
            lanes[l] = a[l].fma(b[l], lanes[l]);
        }
    }
    for (lane, (a, b)) in lanes.iter_mut().zip(a.remainder().iter().zip(b.remainder())) {
        *lane = a.fma(*b, *lane);
    }
    tree(lanes)
}

#[inline(always)]
pub(crate) fn sum<T: Float>(a: &[T]) -> T {
    let mut lanes = [T::ZERO; LANES];
    let mut chunks = a.chunks_exact(LANES);
    for a in chunks.by_ref() {
        for l in 0..LANES {
            lanes[l] += a[l];
        }
    }
    for (lane, a) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane += *a;
    }
    tree(lanes)
}

/// The last few elements of a row as 16, `pad` behind them: rows of any length then run in whole
/// vectors, which a compiler's own loop over the last few would not.
#[inline(always)]
pub(crate) fn padded<T: Float>(rest: &[T], pad: T) -> [T; LANES] {
    let mut lanes = [pad; LANES];
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane = *x;
    }
    lanes
}

/// Replaces x by e^(scale * x - max), max being the largest scale * x, not-a-number passed over;
/// gives (max, sum of the results). The scale is positive.
#[inline(always)]
pub(crate) fn exponentials<T: Float>(row: &mut [T], scale: T) -> (T, T) {
    let (whole, rest) = row.as_chunks_mut::<LANES>();
    let mut last = padded(rest, T::NEG_INFINITY);
    let mut maxima = [T::NEG_INFINITY; LANES];
    for x in &*whole {
        for l in 0..LANES {
            maxima[l] = maxima[l].larger(x[l] * scale);
        }
    }
    for l in 0..LANES {
        maxima[l] = maxima[l].larger(last[l] * scale);
    }
    let max = tree_of(maxima, T::larger);
    let mut sums = [T::ZERO; LANES];
    for x in whole {
        for l in 0..LANES {
            x[l] = (x[l] * scale - max).exp();
            sums[l] += x[l];
        }
    }
    if !rest.is_empty() {
        for l in 0..LANES {
            last[l] = (last[l] * scale - max).exp();
            sums[l] += last[l];
        }
        rest.copy_from_slice(&last[..rest.len()]);
    }
    (max, tree(sums))
}

/// The sum of squares in f64.
#[inline(always)]
pub(crate) fn square_sum<T: Float>(a: &[T]) -> f64 {
    let mut lanes = [0.0_f64; LANES];
    let mut chunks = a.chunks_exact(LANES);
    for a in chunks.by_ref() {
        for l in 0..LANES {
            lanes[l] = a[l].wide().mul_add(a[l].wide(), lanes[l]);
        }
    }
    for (lane, a) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = a.wide().mul_add(a.wide(), *lane);
    }
    tree(lanes)
}
