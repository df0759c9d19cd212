//! See [`crate::Attention`]. Blocks of 128 queries meet all keys up to their last: two products and
//! a softmax, no running rescale, so that a row's sums have one order.

use std::cell::RefCell;

use crate::cpu::{CpuDevice, lanes};
use crate::cpu::exec::lanes_fn;
use crate::cpu::float::Float;
use crate::cpu::gemm::{Causal, K_CHUNK, Operand, Product, Target, product};
use crate::cpu::gemm::kernel::GemmFloat;
use crate::cpu::gemm::pack::Panels;
use crate::cpu::isa::Isa;
use crate::ops::attention::op::{Attention, AttentionBackward, CachedAttention};

/// Sums that are kept in registers at once.
const WIDE: usize = 4 * lanes::LANES;
const PAIR: usize = 2 * lanes::LANES;

thread_local! {
    /// The weights of one query.
    static WEIGHTS: RefCell<Panels> = RefCell::default();
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
            WEIGHTS.with_borrow_mut(|scratch| {
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

/// Queries per block. Part of the definition of dk and dv.
const QUERIES: usize = 128;

/// What is left of a row's score gradients, by the sum of their sizes, that is taken from them:
/// above the rounding of an ordinary row in f32, so that those go without another pass.
const CANCELS: f64 = 1e-6;

thread_local! {
    /// Scores of one block and their gradients.
    static SCRATCH: RefCell<[Panels; 2]> = RefCell::default();
}

impl CpuDevice {
    pub(crate) fn attention<T: GemmFloat>(&mut self, op: &Attention) {
        let (mut views, exec) = self.split();
        let q: &[T] = views.read(op.q);
        let k: &[T] = views.read(op.k);
        let v: &[T] = views.read(op.v);
        let starts: Option<&[u32]> = op.starts.map(|starts| views.read(starts));
        let o: &mut [T] = views.write(op.o);
        let lse: &mut [T] = views.write(op.lse);
        let shape = Shape::new(op, starts);
        shape.check(op.batch, &[q, o], &[k, v], lse);
        let tokens = op.batch * op.seq;
        let work = tokens * op.seq * shape.query_row() / 2;
        let mut jobs = Vec::new();
        let o = Target::new(o, tokens, shape.query_row()).row_bands(op.seq);
        let lse = Target::new(lse, tokens, op.heads).row_bands(op.seq);
        for (b, (o, lse)) in o.into_iter().zip(lse).enumerate() {
            let heads = o.column_bands(op.head_dim).into_iter().zip(lse.column_bands(1));
            for (head, (o, lse)) in heads.enumerate() {
                let blocks = o.row_bands(QUERIES).into_iter().zip(lse.row_bands(QUERIES));
                for (index, (o, lse)) in blocks.enumerate() {
                    jobs.push((shape.block(b, head, index), o, lse));
                }
            }
        }
        exec.run(jobs, work, |(block, o, lse)| {
            forward_block(exec.isa, &shape, &block, [q, k, v], o, lse);
        });
    }

    pub(crate) fn attention_backward<T: GemmFloat>(&mut self, op: &AttentionBackward) {
        let (mut views, exec) = self.split();
        let forward = &op.forward;
        let q: &[T] = views.read(forward.q);
        let k: &[T] = views.read(forward.k);
        let v: &[T] = views.read(forward.v);
        let starts: Option<&[u32]> = forward.starts.map(|starts| views.read(starts));
        let o: &[T] = views.read(forward.o);
        let lse: &[T] = views.read(forward.lse);
        let d_o: &[T] = views.read(op.d_o);
        let dq: &mut [T] = views.write(op.dq);
        let dk: &mut [T] = views.write(op.dk);
        let dv: &mut [T] = views.write(op.dv);
        let shape = Shape::new(forward, starts);
        shape.check(forward.batch, &[q, o, d_o, dq], &[k, v, dk, dv], lse);
        dk.fill(T::ZERO);
        dv.fill(T::ZERO);
        let tokens = forward.batch * forward.seq;
        let group = forward.heads / forward.kv_heads;
        let work = tokens * forward.seq * shape.query_row();
        let mut jobs = Vec::new();
        let dq = Target::new(dq, tokens, shape.query_row()).row_bands(forward.seq);
        let dk = Target::new(dk, tokens, shape.key_row()).row_bands(forward.seq);
        let dv = Target::new(dv, tokens, shape.key_row()).row_bands(forward.seq);
        for (b, (dq, (dk, dv))) in dq.into_iter().zip(dk.into_iter().zip(dv)).enumerate() {
            let width = forward.head_dim;
            let dk = dk.column_bands(width).into_iter().zip(dv.column_bands(width));
            let dq = dq.column_bands(group * forward.head_dim);
            for (kv_head, (dq, (dk, dv))) in dq.into_iter().zip(dk).enumerate() {
                jobs.push((b, kv_head, dq.column_bands(forward.head_dim), dk, dv));
            }
        }
        exec.run(jobs, work, |(b, kv_head, dq, mut dk, mut dv)| {
            let mut dq: Vec<_> = dq.into_iter().map(|dq| dq.row_bands(QUERIES)).collect();
            for index in 0..forward.seq.div_ceil(QUERIES) {
                for (member, dq) in dq.iter_mut().enumerate() {
                    let block = shape.block(b, kv_head * group + member, index);
                    let given = Given { q, k, v, o, d_o, lse };
                    let dq = dq[index].reborrow();
                    let (dk, dv) = (dk.reborrow(), dv.reborrow());
                    backward_block(exec.isa, &shape, &block, given, dq, dk, dv);
                }
            }
        });
    }
}

struct Shape<'a, T> {
    seq: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    scale: T,
    starts: Option<&'a [u32]>,
    window: usize,
}

/// Some queries of one head of one sequence.
struct Block {
    queries: usize,
    /// Keys up to the last query's own.
    keys: usize,
    /// Position in its sequence of the first query.
    first: usize,
    /// The first query among all tokens.
    token: usize,
    head: usize,
    /// Where the first query's vector, and that of its sequence's first key, start.
    query_at: usize,
    key_at: usize,
}

impl<'a, T: Float> Shape<'a, T> {
    fn new(op: &Attention, starts: Option<&'a [u32]>) -> Shape<'a, T> {
        Shape {
            seq: op.seq,
            heads: op.heads,
            kv_heads: op.kv_heads,
            head_dim: op.head_dim,
            scale: T::of(op.scale),
            starts,
            window: op.window.unwrap_or(op.seq),
        }
    }

    fn query_row(&self) -> usize {
        self.heads * self.head_dim
    }

    fn key_row(&self) -> usize {
        self.kv_heads * self.head_dim
    }

    fn check(&self, batch: usize, queries: &[&[T]], keys: &[&[T]], lse: &[T]) {
        let tokens = batch * self.seq;
        assert!(self.scale > T::ZERO, "a scale of {:?}", self.scale);
        assert!(self.heads.is_multiple_of(self.kv_heads), "{} heads", self.heads);
        assert!(queries.iter().all(|q| q.len() == tokens * self.query_row()), "queries' sizes");
        assert!(keys.iter().all(|k| k.len() == tokens * self.key_row()), "keys' sizes");
        assert_eq!(lse.len(), tokens * self.heads, "lse's size");
        assert!(self.window > 0 || self.seq == 0, "a window of no keys");
        assert!(self.starts.is_none_or(|starts| starts.len() == tokens), "starts' size");
    }

    fn block(&self, b: usize, head: usize, index: usize) -> Block {
        let first = index * QUERIES;
        let queries = QUERIES.min(self.seq - first);
        let token = b * self.seq + first;
        let kv_head = head / (self.heads / self.kv_heads);
        Block {
            queries,
            keys: first + queries,
            first,
            token,
            head,
            query_at: token * self.query_row() + head * self.head_dim,
            key_at: b * self.seq * self.key_row() + kv_head * self.head_dim,
        }
    }

    /// The keys that query `i` of a block attends to.
    fn keys_of(&self, block: &Block, i: usize) -> std::ops::Range<usize> {
        let own = block.first + i;
        let start = self.starts.map_or(0, |starts| starts[block.token + i] as usize);
        assert!(start <= own, "the token at {own} attends from {start} on");
        start.max((own + 1).saturating_sub(self.window))..own + 1
    }

    /// scores [queries, keys] = Q K^T of vectors in rows of `query_row` and `key_row`
    fn scores(&self, isa: Isa, block: &Block, q: &[T], k: &[T], scores: &mut [T])
    where
        T: GemmFloat,
    {
        let product_of = Product {
            k: self.head_dim,
            a: Operand::rows(&q[block.query_at..], self.query_row()),
            b: Operand::rows(&k[block.key_at..], self.key_row()),
            c: Target::new(scores, block.queries, block.keys),
            accumulate: false,
            causal: Causal::Scores(block.first),
        };
        product(isa, product_of);
    }
}

fn forward_block<T: GemmFloat>(
    isa: Isa,
    shape: &Shape<'_, T>,
    block: &Block,
    [q, k, v]: [&[T]; 3],
    mut o: Target<'_, T>,
    mut lse: Target<'_, T>,
) {
    SCRATCH.with_borrow_mut(|[scratch, _]| {
        let scores = scratch.take::<T>(block.queries * block.keys);
        shape.scores(isa, block, q, k, scores);
        let (mut maxima, mut sums) = ([T::ZERO; QUERIES], [T::ONE; QUERIES]);
        for (i, row) in scores.chunks_exact_mut(block.keys).enumerate() {
            let window = shape.keys_of(block, i);
            (maxima[i], sums[i]) = softmax_row::<T>(isa, row, window, shape.scale);
        }
        let mut logs = sums;
        logarithms::<T>(isa, &mut logs[..block.queries]);
        for i in 0..block.queries {
            lse.row_mut(i)[0] = maxima[i] + logs[i];
        }
        let product_of = Product {
            k: block.keys,
            a: Operand::rows(scores, block.keys),
            b: Operand::columns(&v[block.key_at..], shape.key_row()),
            c: o.reborrow(),
            accumulate: false,
            causal: Causal::Weights(block.first),
        };
        product(isa, product_of);
        for (i, sum) in sums[..block.queries].iter().enumerate() {
            divide::<T>(isa, o.row_mut(i), *sum);
        }
    });
}

/// What backward reads, all of it whole.
struct Given<'a, T> {
    q: &'a [T],
    k: &'a [T],
    v: &'a [T],
    o: &'a [T],
    d_o: &'a [T],
    lse: &'a [T],
}

fn backward_block<T: GemmFloat>(
    isa: Isa,
    shape: &Shape<'_, T>,
    block: &Block,
    given: Given<'_, T>,
    dq: Target<'_, T>,
    dk: Target<'_, T>,
    dv: Target<'_, T>,
) {
    SCRATCH.with_borrow_mut(|[p, ds]| {
        let p = p.take::<T>(block.queries * block.keys);
        let ds = ds.take::<T>(block.queries * block.keys);
        shape.scores(isa, block, given.q, given.k, p);
        shape.scores(isa, block, given.d_o, given.v, ds);
        let rows = p.chunks_exact_mut(block.keys).zip(ds.chunks_exact_mut(block.keys));
        for (i, (p, ds)) in rows.enumerate() {
            let window = shape.keys_of(block, i);
            let at = block.query_at + i * shape.query_row();
            let (o, d_o) = (&given.o[at..][..shape.head_dim], &given.d_o[at..][..shape.head_dim]);
            let lse = given.lse[(block.token + i) * shape.heads + block.head];
            score_gradients::<T>(isa, p, ds, window.start, window.end, o, d_o, lse, shape.scale);
        }
        let (query_row, key_row) = (shape.query_row(), shape.key_row());
        let keys = Operand::columns(&given.k[block.key_at..], key_row);
        let into_dq = Product {
            k: block.keys,
            a: Operand::rows(ds, block.keys),
            b: keys,
            c: dq,
            accumulate: false,
            causal: Causal::Weights(block.first),
        };
        product(isa, into_dq);
        for (weights, vectors, sums) in [(&*ds, given.q, dk), (&*p, given.d_o, dv)] {
            let into_keys = Product {
                k: block.queries,
                a: Operand::columns(weights, block.keys),
                b: Operand::columns(&vectors[block.query_at..], query_row),
                c: sums.split_rows(block.keys).0,
                accumulate: true,
                causal: Causal::WeightsTransposed(block.first),
            };
            product(isa, into_keys);
        }
    });
}

lanes_fn! {
/// Turns scores inside of the window into exponentials and the others into zeros; gives the largest
/// scaled score and the sum.
fn softmax_row<T: Float>(row: &mut [T], window: std::ops::Range<usize>, scale: T) -> (T, T) {
    row[..window.start].fill(T::ZERO);
    row[window.end..].fill(T::ZERO);
    lanes::exponentials(&mut row[window], scale)
}
}

lanes_fn! {
/// Apart from the rows, so that the long chains of several logarithms overlap.
fn logarithms<T: Float>(values: &mut [T]) {
    for x in values {
        *x = x.ln();
    }
}
}

lanes_fn! {
fn divide<T: Float>(row: &mut [T], divisor: T) {
    for x in row {
        *x = *x / divisor;
    }
}
}

lanes_fn! {
/// Turns a row of scores into probabilities and a row of dp = <do, v> into scaled score gradients
/// p (dp - sum p dp).
///
/// <o, do> is that sum but for its rounding, so dp - <o, do> loses nothing. Where one key has
/// nearly all of the attention, these differences nearly cancel, too, and their own sum, which
/// would be zero but for rounding, is taken from them, in the same roundings.
fn score_gradients<T: Float>(
    p: &mut [T], ds: &mut [T], start: usize, end: usize, o: &[T], d_o: &[T], lse: T, scale: T,
) {
    for row in [&mut *p, &mut *ds] {
        row[..start].fill(T::ZERO);
        row[end..].fill(T::ZERO);
    }
    let near = lanes::dot(o, d_o);
    let (whole_p, rest_p) = p[start..end].as_chunks_mut::<{ lanes::LANES }>();
    let (whole_ds, rest_ds) = ds[start..end].as_chunks_mut::<{ lanes::LANES }>();
    let mut sums = [[T::ZERO; lanes::LANES]; 2];
    for (p, ds) in whole_p.iter_mut().zip(whole_ds) {
        gradient_lanes(p, ds, lse, near, scale, &mut sums);
    }
    if !rest_p.is_empty() {
        let mut p = lanes::padded(rest_p, T::NEG_INFINITY);
        let mut ds = lanes::padded(rest_ds, near);
        gradient_lanes(&mut p, &mut ds, lse, near, scale, &mut sums);
        rest_p.copy_from_slice(&p[..rest_p.len()]);
        rest_ds.copy_from_slice(&ds[..rest_ds.len()]);
    }
    let [left, sizes] = sums.map(lanes::tree);
    if left.larger(-left) > T::of(CANCELS) * sizes {
        for (p, ds) in p[start..end].iter().zip(&mut ds[start..end]) {
            *ds = (-*p).fma(left, *ds);
        }
    }
    // One sum, rounded in two orders: the difference would be noise, and AdamW makes steps of it.
    if end - start == 1 {
        ds[start] = T::ZERO;
    }
}
}

/// p = e^(score - lse), ds = p (ds - near) scale; adds ds, and its sizes, to `sums`.
#[inline(always)]
fn gradient_lanes<T: Float>(
    p: &mut [T; lanes::LANES],
    ds: &mut [T; lanes::LANES],
    lse: T,
    near: T,
    scale: T,
    [sums, sizes]: &mut [[T; lanes::LANES]; 2],
) {
    for l in 0..lanes::LANES {
        p[l] = (p[l] * scale - lse).exp();
        ds[l] = p[l] * (ds[l] - near) * scale;
        sums[l] += ds[l];
        sizes[l] += ds[l].larger(-ds[l]);
    }
}
