//! See [`crate::CachedAttention`]. A query is one row, for which rearranging keys and values would
//! cost more than the products: keys are kept element by element, so that both products read what
//! they need in order, and each in the order of sums that a product of many rows has.

use std::cell::RefCell;

use super::exec::{Isa, lanes_fn};
use super::gemm::{GemmFloat, K_CHUNK, Panels};
use super::{CpuDevice, Float, lanes};
use crate::attention::CachedAttention;

/// Sums that are kept in registers at once.
const WIDE: usize = 4 * lanes::LANES;
const PAIR: usize = 2 * lanes::LANES;

thread_local! {
    /// The weights of one query.
    static SCRATCH: RefCell<Panels> = RefCell::default();
}

impl CpuDevice {
    pub(crate) fn cached_attention<T: GemmFloat>(&mut self, op: &CachedAttention) {
        check(op);
        let (mut views, exec) = self.split();
        let q: &[T] = views.read(op.q);
        let k: &[T] = views.read(op.k);
        let v: &[T] = views.read(op.v);
        let keys: &mut [T] = views.write(op.keys);
        let values: &mut [T] = views.write(op.values);
        let o: &mut [T] = views.write(op.o);
        let key_row = op.kv_heads * op.head_dim;
        values[op.past * key_row..][..v.len()].copy_from_slice(v);
        for (element, keys) in keys.chunks_exact_mut(op.capacity).enumerate() {
            for (key, k) in keys[op.past..].iter_mut().zip(k.chunks_exact(key_row)) {
                *key = k[element];
            }
        }
        let (keys, values, scale) = (&*keys, &*values, T::of(op.scale));
        let group = op.heads / op.kv_heads;
        let heads = q.chunks_exact(op.head_dim).zip(o.chunks_exact_mut(op.head_dim));
        let jobs = heads.enumerate().collect();
        let work = op.queries * op.heads * (op.past + op.queries) * op.head_dim / 4;
        exec.run(jobs, work, |(job, (q, o)): (usize, (&[T], &mut [T]))| {
            let (query, head) = (job / op.heads, job % op.heads);
            let column = head / group * op.head_dim;
            let count = op.past + query + 1;
            SCRATCH.with_borrow_mut(|scratch| {
                let weights = scratch.take::<T>(count);
                let keys = &keys[column * op.capacity..];
                let sum = weigh::<T>(exec.isa, q, keys, op.capacity, scale, weights);
                mix::<T>(exec.isa, weights, &values[column..], key_row, sum, o);
            });
        });
    }
}

fn check(op: &CachedAttention) {
    let (query_row, key_row) = (op.heads * op.head_dim, op.kv_heads * op.head_dim);
    assert!(op.scale > 0.0 && op.heads.is_multiple_of(op.kv_heads), "{op:?}");
    assert!(op.past + op.queries <= op.capacity, "{op:?}");
    assert_eq!([op.q.len(), op.o.len()], [op.queries * query_row; 2], "{op:?}");
    assert_eq!([op.k.len(), op.v.len()], [op.queries * key_row; 2], "{op:?}");
    assert_eq!([op.keys.len(), op.values.len()], [op.capacity * key_row; 2], "{op:?}");
}

lanes_fn! {
/// weights[j] = e^(scale <q, key j> - max); gives their sum.
fn weigh<T: Float>(q: &[T], keys: &[T], stride: usize, scale: T, weights: &mut [T]) -> T {
    combine(q, keys, stride, weights);
    lanes::exponentials(weights, scale).1
}
}

lanes_fn! {
/// o = (sum over j of weights[j] value j) / sum
fn mix<T: Float>(weights: &[T], values: &[T], stride: usize, sum: T, o: &mut [T]) {
    combine(weights, values, stride, o);
    for o in o {
        *o = *o / sum;
    }
}
}

/// out[j] = sum over i of factors[i] * rows[i * stride + j], summed as a product is.
#[inline(always)]
fn combine<T: Float>(factors: &[T], rows: &[T], stride: usize, out: &mut [T]) {
    let mut first = 0;
    while out.len() - first >= WIDE {
        combine_few::<T, WIDE>(factors, &rows[first..], stride, &mut out[first..]);
        first += WIDE;
    }
    // The width of many heads: in one pass there are two sums to add to while one waits.
    while out.len() - first >= PAIR {
        combine_few::<T, PAIR>(factors, &rows[first..], stride, &mut out[first..]);
        first += PAIR;
    }
    while out.len() - first >= lanes::LANES {
        combine_few::<T, { lanes::LANES }>(factors, &rows[first..], stride, &mut out[first..]);
        first += lanes::LANES;
    }
    for (at, out) in out.iter_mut().enumerate().skip(first) {
        combine_few::<T, 1>(factors, &rows[at..], stride, std::slice::from_mut(out));
    }
}

#[inline(always)]
fn combine_few<T: Float, const N: usize>(
    factors: &[T],
    rows: &[T],
    stride: usize,
    out: &mut [T],
) {
    let mut whole = [T::ZERO; N];
    for (chunk, factors) in factors.chunks(K_CHUNK).enumerate() {
        let mut sums = [T::ZERO; N];
        for (at, factor) in factors.iter().enumerate() {
            let row = &rows[(chunk * K_CHUNK + at) * stride..][..N];
            for l in 0..N {
                sums[l] = factor.fma(row[l], sums[l]);
            }
        }
        for l in 0..N {
            whole[l] = if chunk == 0 { sums[l] } else { whole[l] + sums[l] };
        }
    }
    out[..N].copy_from_slice(&whole);
}
