//! Sums over a row: lane l adds elements l, l + 16, ... and a fixed tree adds the lanes.

use super::float::Float;

pub(crate) const LANES: usize = 16;

/// Adds 16 lanes: l with l + 8, then + 4, + 2, + 1.
#[inline(always)]
pub(crate) fn tree<T: Float>(mut lanes: [T; LANES]) -> T {
    let mut width = LANES / 2;
    while width > 0 {
        for l in 0..width {
            lanes[l] += lanes[l + width];
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

/// The largest element; minus infinity of none. Not-a-number is passed over.
#[inline(always)]
pub(crate) fn max<T: Float>(a: &[T]) -> T {
    let mut lanes = [T::NEG_INFINITY; LANES];
    let mut chunks = a.chunks_exact(LANES);
    for a in chunks.by_ref() {
        for l in 0..LANES {
            lanes[l] = lanes[l].larger(a[l]);
        }
    }
    for (lane, a) in lanes.iter_mut().zip(chunks.remainder()) {
        *lane = lane.larger(*a);
    }
    lanes.iter().fold(T::NEG_INFINITY, |max, lane| max.larger(*lane))
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

/// Replaces a row of logits by e^(x - max) and returns (max, sum of the results).
#[inline(always)]
pub(crate) fn exponentials<T: Float>(row: &mut [T]) -> (T, T) {
    let max = max(row);
    for x in row.iter_mut() {
        *x = (*x - max).exp();
    }
    (max, sum(row))
}
