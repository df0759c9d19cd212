//! See [`crate::RmsNorm`].

use crate::cpu::{CpuDevice, ROWS_PER_JOB, lanes};
use crate::cpu::exec::{Exec, lanes_fn};
use crate::cpu::float::Float;
use crate::cpu::isa::Isa;
use crate::ops::norm::op::{RmsNorm, RmsNormBackward};

/// Rows per chunk of a sum over rows. Part of the definition of those sums.
pub(crate) const ROWS_PER_CHUNK: usize = 64;

impl CpuDevice {
    pub(crate) fn rms_norm<T: Float>(&mut self, op: &RmsNorm) {
        let (mut views, exec) = self.split();
        let x: &[T] = views.read(op.x);
        let w: &[T] = views.read(op.w);
        let y: &mut [T] = views.write(op.y);
        let rstd: &mut [T] = views.write(op.rstd);
        let size = op.rows * op.dim;
        assert_eq!((x.len(), y.len(), w.len(), rstd.len()), (size, size, op.dim, op.rows));
        let len = ROWS_PER_JOB * op.dim;
        let jobs = x.chunks(len).zip(y.chunks_mut(len)).zip(rstd.chunks_mut(ROWS_PER_JOB));
        exec.run(jobs.collect(), 4 * size, |((x, y), rstd)| {
            norm_rows::<T>(exec.isa, x, w, T::of(op.eps), y, rstd);
        });
    }

    pub(crate) fn rms_norm_backward<T: Float>(&mut self, op: &RmsNormBackward) {
        let (mut views, exec) = self.split();
        let x: &[T] = views.read(op.x);
        let w: &[T] = views.read(op.w);
        let rstd: &[T] = views.read(op.rstd);
        let dy: &[T] = views.read(op.dy);
        let dx: &mut [T] = views.write(op.dx);
        let dw: &mut [T] = views.write(op.dw);
        let size = op.rows * op.dim;
        assert_eq!((x.len(), dy.len(), dx.len()), (size, size, size), "{op:?}");
        assert_eq!((w.len(), dw.len(), rstd.len()), (op.dim, op.dim, op.rows), "{op:?}");
        let len = ROWS_PER_CHUNK * op.dim;
        sum_chunks(exec, op.rows, dw, op.accumulate_dw, 8 * size, dx.chunks_mut(len), {
            |chunk: usize, dx: &mut [T], sums: &mut [T]| {
                let (x, dy) = (&x[chunk * len..][..dx.len()], &dy[chunk * len..][..dx.len()]);
                let rstd = &rstd[chunk * ROWS_PER_CHUNK..][..dx.len() / w.len()];
                norm_backward_rows::<T>(exec.isa, x, w, rstd, dy, dx, op.accumulate_dx, sums);
            }
        });
    }
}

/// Sums over rows in fixed chunks: `f(chunk, its part, zeros)` gives each chunk's sum, and `total`
/// becomes (or grows by) those in order.
pub(crate) fn sum_chunks<T: Float, P: Send>(
    exec: &Exec,
    rows: usize,
    total: &mut [T],
    accumulate: bool,
    work: usize,
    parts: impl Iterator<Item = P>,
    f: impl Fn(usize, P, &mut [T]) + Sync + Send,
) {
    let columns = total.len();
    let mut sums = vec![T::ZERO; rows.div_ceil(ROWS_PER_CHUNK) * columns];
    let jobs = parts.zip(sums.chunks_exact_mut(columns)).enumerate().collect();
    exec.run(jobs, work, |(chunk, (part, sums))| f(chunk, part, sums));
    if !accumulate {
        total.fill(T::ZERO);
    }
    for sums in sums.chunks_exact(columns) {
        add_to::<T>(exec.isa, total, sums);
    }
}

lanes_fn! {
pub(crate) fn add_to<T: Float>(a: &mut [T], b: &[T]) {
    for (a, b) in a.iter_mut().zip(b) {
        *a += *b;
    }
}
}

lanes_fn! {
fn norm_rows<T: Float>(x: &[T], w: &[T], eps: T, y: &mut [T], rstd: &mut [T]) {
    let dim = w.len();
    let count = T::of(dim as f64);
    for ((x, y), rstd) in x.chunks_exact(dim).zip(y.chunks_exact_mut(dim)).zip(rstd) {
        *rstd = T::ONE / (lanes::dot(x, x) / count + eps).sqrt();
        for ((y, x), w) in y.iter_mut().zip(x).zip(w) {
            *y = *x * *rstd * *w;
        }
    }
}
}

lanes_fn! {
/// Rows of dx, and the chunk's sum for dw, which starts as zeros.
fn norm_backward_rows<T: Float>(
    x: &[T], w: &[T], rstd: &[T], dy: &[T], dx: &mut [T], accumulate: bool, dw: &mut [T],
) {
    let dim = w.len();
    let count = T::of(dim as f64);
    for (r, dx) in dx.chunks_exact_mut(dim).enumerate() {
        let (x, dy) = (&x[r * dim..][..dim], &dy[r * dim..][..dim]);
        let rstd = rstd[r];
        // dx is the place to build g = dy * w only when it holds nothing yet, so <g, x> is
        // summed lane by lane from its parts.
        let mean = weighted_dot(dy, w, x) * rstd / count;
        for d in 0..dim {
            let normal = x[d] * rstd;
            let gradient = rstd * (dy[d] * w[d] - normal * mean);
            dx[d] = if accumulate { dx[d] + gradient } else { gradient };
            dw[d] = dy[d].fma(normal, dw[d]);
        }
    }
}
}

/// sum of a * b * c in 16 lanes
#[inline(always)]
fn weighted_dot<T: Float>(a: &[T], b: &[T], c: &[T]) -> T {
    let mut sums = [T::ZERO; lanes::LANES];
    let whole = a.len() - a.len() % lanes::LANES;
    for i in (0..whole).step_by(lanes::LANES) {
        let (a, b, c) = (&a[i..][..16], &b[i..][..16], &c[i..][..16]);
        for l in 0..lanes::LANES {
            sums[l] = (a[l] * b[l]).fma(c[l], sums[l]);
        }
    }
    for (l, i) in (whole..a.len()).enumerate() {
        sums[l] = (a[i] * b[i]).fma(c[i], sums[l]);
    }
    lanes::tree(sums)
}
