//! Grouped products over the rows of each expert.
//!
//! Routed rows lie expert-major: expert g has rows offsets[g] .. offsets[g + 1]. The number of
//! rows, offsets[G], is known to the device alone; row buffers may be longer. What a row becomes
//! never depends on the other rows. Each expert's weights are a buffer of their own. Weight
//! gradients may be asked for by smaller segments, such as each source's rows of an expert, so that
//! they can be summed in an order that does not depend on the number of ranks.
//!
//! A gated expert computes act(x Wg^T) * (x Wu^T), its hidden buffers hold gate | up, W = 2 F wide.
//! An ungated one computes act(x Wu^T); W = F, and the gate lists are empty.

use crate::buffer::Buffer;
use crate::cpu::{CpuDevice, ROWS_PER_JOB, lanes};
use crate::cpu::activation::{Gate, Gelu, Relu, Silu};
use crate::cpu::arena::Views;
use crate::cpu::exec::lanes_fn;
use crate::cpu::float::Float;
use crate::cpu::gemm::{Causal, Operand, Product, Target, products};
use crate::cpu::gemm::kernel::GemmFloat;
use crate::cpu::isa::Isa;
use crate::types::Activation;

/// h[r] = [x[row_index[r]] Wg^T | x[row_index[r]] Wu^T], a = act(gate) * up.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsUp<'a> {
    pub dim: usize,
    pub hidden: usize,
    pub activation: Activation,
    pub gated: bool,
    /// [any, D]
    pub x: Buffer,
    /// u32 [R]: the row of x that each routed row is
    pub row_index: Buffer,
    /// u32 [G + 1]
    pub offsets: Buffer,
    /// G of [F, D]; empty if not gated
    pub w_gate: &'a [Buffer],
    /// G of [F, D]
    pub w_up: &'a [Buffer],
    /// Output [R, W]
    pub h: Buffer,
    /// Output [R, F]
    pub a: Buffer,
}

/// y[r] = a[r] W2^T
#[derive(Clone, Copy, Debug)]
pub struct ExpertsDown<'a> {
    pub dim: usize,
    pub hidden: usize,
    /// [R, F]
    pub a: Buffer,
    /// u32 [G + 1]
    pub offsets: Buffer,
    /// G of [D, F]
    pub w_down: &'a [Buffer],
    /// Output [R, D]
    pub y: Buffer,
}

/// With da' = dy[row_index[r]] W2 (the gradient before the routing weight s):
/// ds[r] = <da', a[r]>, a_scaled[r] = s[r] * a[r], da = s[r] * da', and dh[r] is da taken back
/// through the activation.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsDownBackward<'a> {
    pub dim: usize,
    pub hidden: usize,
    pub activation: Activation,
    pub gated: bool,
    /// [any, D]: gradients of tokens
    pub dy: Buffer,
    /// u32 [R]: the row of dy that each routed row belongs to
    pub row_index: Buffer,
    /// u32 [G + 1]
    pub offsets: Buffer,
    /// G of [D, F]
    pub w_down: &'a [Buffer],
    /// [R, W]
    pub h: Buffer,
    /// [R, F]
    pub a: Buffer,
    /// [R]: routing weights
    pub s: Buffer,
    /// Output [R]
    pub ds: Buffer,
    /// Output [R, W]
    pub dh: Buffer,
    /// Output [R, F]
    pub a_scaled: Buffer,
}

/// dW2[s] = sum over the segment's rows, ascending as in a product, of dy[row_index[r]]^T
/// a_scaled[r]; zeros for an empty segment.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsDownWgrad<'a> {
    pub dim: usize,
    pub hidden: usize,
    /// [any, D]
    pub dy: Buffer,
    /// u32 [R]
    pub row_index: Buffer,
    /// u32 [S + 1]
    pub offsets: Buffer,
    /// [R, F]
    pub a_scaled: Buffer,
    /// Outputs: S of [D, F]
    pub dw_down: &'a [Buffer],
}

/// dx[r] = dgate[r] Wg, then += dup[r] Wu.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsDgrad<'a> {
    pub dim: usize,
    pub hidden: usize,
    pub gated: bool,
    /// [R, W]
    pub dh: Buffer,
    /// u32 [G + 1]
    pub offsets: Buffer,
    /// G of [F, D]; empty if not gated
    pub w_gate: &'a [Buffer],
    /// G of [F, D]
    pub w_up: &'a [Buffer],
    /// Output [R, D]
    pub dx: Buffer,
}

/// dWg[s] = sum over the segment's rows of dgate[r]^T x[row_index[r]], dWu alike with dup; zeros
/// for an empty segment.
#[derive(Clone, Copy, Debug)]
pub struct ExpertsUpWgrad<'a> {
    pub dim: usize,
    pub hidden: usize,
    pub gated: bool,
    /// [any, D]
    pub x: Buffer,
    /// u32 [R]
    pub row_index: Buffer,
    /// u32 [S + 1]
    pub offsets: Buffer,
    /// [R, W]
    pub dh: Buffer,
    /// Outputs: S of [F, D]; empty if not gated
    pub dw_gate: &'a [Buffer],
    /// Outputs: S of [F, D]
    pub dw_up: &'a [Buffer],
}

impl CpuDevice {
    pub fn experts_up<T: GemmFloat>(&mut self, op: &ExpertsUp) {
        let (mut views, exec) = self.split();
        let x: &[T] = views.read(op.x);
        let offsets = Segments::new(views.read(op.offsets));
        let index: &[u32] = &views.read(op.row_index)[..offsets.rows()];
        let w_gate = weights::<T>(&mut views, op.w_gate, op.gated, &offsets, op.dim * op.hidden);
        let w_up = weights::<T>(&mut views, op.w_up, true, &offsets, op.dim * op.hidden);
        let h: &mut [T] = views.write(op.h);
        let a: &mut [T] = views.write(op.a);
        let (rows, width) = (offsets.rows(), width(op.hidden, op.gated));
        let bands = offsets.bands(Target::new(h, rows, width));
        let mut work = Vec::new();
        for (g, (first, h)) in bands.into_iter().enumerate() {
            let x = Operand::rows(x, op.dim).gathered(&index[first..first + h.rows()]);
            let (gate, up) = h.split_columns(width - op.hidden);
            let gate = w_gate.get(g).map(|w| (*w, gate));
            for (w, c) in gate.into_iter().chain([(w_up[g], up)]) {
                let (b, causal) = (Operand::rows(w, op.dim), Causal::None);
                work.push(Product { k: op.dim, a: x, b, c, accumulate: false, causal });
            }
        }
        products(exec, work);
        let jobs = h[..rows * width]
            .chunks(ROWS_PER_JOB * width)
            .zip(a[..rows * op.hidden].chunks_mut(ROWS_PER_JOB * op.hidden));
        exec.run(jobs.collect(), rows * op.hidden * 24, |(h, a)| {
            activate::<T>(exec.isa, op.activation, h, op.hidden, op.gated, a);
        });
    }

    pub fn experts_down<T: GemmFloat>(&mut self, op: &ExpertsDown) {
        let (mut views, exec) = self.split();
        let a: &[T] = views.read(op.a);
        let offsets = Segments::new(views.read(op.offsets));
        let w_down = weights::<T>(&mut views, op.w_down, true, &offsets, op.dim * op.hidden);
        let y: &mut [T] = views.write(op.y);
        let y = Target::new(y, offsets.rows(), op.dim);
        let work = offsets.bands(y).into_iter().enumerate().map(|(g, (first, c))| Product {
            k: op.hidden,
            a: Operand::rows(&a[first * op.hidden..], op.hidden),
            b: Operand::rows(w_down[g], op.hidden),
            c,
            accumulate: false,
            causal: Causal::None,
        });
        products(exec, work.collect());
    }

    pub fn experts_down_backward<T: GemmFloat>(&mut self, op: &ExpertsDownBackward) {
        let (mut views, exec) = self.split();
        let dy: &[T] = views.read(op.dy);
        let offsets = Segments::new(views.read(op.offsets));
        let rows = offsets.rows();
        let index: &[u32] = &views.read(op.row_index)[..rows];
        let w_down = weights::<T>(&mut views, op.w_down, true, &offsets, op.dim * op.hidden);
        let h: &[T] = views.read(op.h);
        let a: &[T] = views.read(op.a);
        let s: &[T] = views.read(op.s);
        let ds: &mut [T] = views.write(op.ds);
        let dh: &mut [T] = views.write(op.dh);
        let a_scaled: &mut [T] = views.write(op.a_scaled);
        // a_scaled holds da' until each row is through the activation.
        let da = Target::new(a_scaled, rows, op.hidden);
        let work = offsets.bands(da).into_iter().enumerate().map(|(g, (first, c))| Product {
            k: op.dim,
            a: Operand::rows(dy, op.dim).gathered(&index[first..first + c.rows()]),
            b: Operand::columns(w_down[g], op.hidden),
            c,
            accumulate: false,
            causal: Causal::None,
        });
        products(exec, work.collect());
        let width = width(op.hidden, op.gated);
        let (len, wide) = (ROWS_PER_JOB * op.hidden, ROWS_PER_JOB * width);
        let outputs = a_scaled[..rows * op.hidden]
            .chunks_mut(len)
            .zip(dh[..rows * width].chunks_mut(wide))
            .zip(ds[..rows].chunks_mut(ROWS_PER_JOB));
        let inputs = a[..rows * op.hidden]
            .chunks(len)
            .zip(h[..rows * width].chunks(wide))
            .zip(s[..rows].chunks(ROWS_PER_JOB));
        exec.run(inputs.zip(outputs).collect(), rows * op.hidden * 40, |job| {
            let (((a, h), s), ((a_scaled, dh), ds)) = job;
            let shape = (op.activation, op.hidden, op.gated);
            through_activation::<T>(exec.isa, shape, a, h, s, a_scaled, dh, ds);
        });
    }

    pub fn experts_down_wgrad<T: GemmFloat>(&mut self, op: &ExpertsDownWgrad) {
        let (mut views, exec) = self.split();
        let dy: &[T] = views.read(op.dy);
        let offsets = Segments::new(views.read(op.offsets));
        let index: &[u32] = &views.read(op.row_index)[..offsets.rows()];
        let a: &[T] = views.read(op.a_scaled);
        assert_eq!(op.dw_down.len(), offsets.count(), "a gradient a segment: {op:?}");
        let mut work = Vec::new();
        for (segment, dw) in op.dw_down.iter().enumerate() {
            let (first, count) = offsets.of_segment(segment);
            let dw: &mut [T] = views.write(*dw);
            work.push(Product {
                k: count,
                a: Operand::columns(dy, op.dim).gathered(&index[first..first + count]),
                b: of_segment(a, (0, op.hidden), first),
                c: Target::new(dw, op.dim, op.hidden),
                accumulate: false,
                causal: Causal::None,
            });
        }
        products(exec, work);
    }

    pub fn experts_dgrad<T: GemmFloat>(&mut self, op: &ExpertsDgrad) {
        let (mut views, exec) = self.split();
        let dh: &[T] = views.read(op.dh);
        let offsets = Segments::new(views.read(op.offsets));
        let w_gate = weights::<T>(&mut views, op.w_gate, op.gated, &offsets, op.dim * op.hidden);
        let w_up = weights::<T>(&mut views, op.w_up, true, &offsets, op.dim * op.hidden);
        let dx: &mut [T] = views.write(op.dx);
        let width = width(op.hidden, op.gated);
        let passes = [(&w_gate, 0, false), (&w_up, width - op.hidden, op.gated)];
        for (w, column, accumulate) in passes.into_iter().skip(usize::from(!op.gated)) {
            let dx = Target::new(&mut *dx, offsets.rows(), op.dim);
            let bands = offsets.bands(dx).into_iter().enumerate();
            let work = bands.filter(|(_, (_, c))| c.rows() > 0).map(|(g, (first, c))| Product {
                k: op.hidden,
                a: Operand::rows(&dh[first * width + column..], width),
                b: Operand::columns(w[g], op.dim),
                c,
                accumulate,
                causal: Causal::None,
            });
            products(exec, work.collect());
        }
    }

    pub fn experts_up_wgrad<T: GemmFloat>(&mut self, op: &ExpertsUpWgrad) {
        let (mut views, exec) = self.split();
        let x: &[T] = views.read(op.x);
        let offsets = Segments::new(views.read(op.offsets));
        let index: &[u32] = &views.read(op.row_index)[..offsets.rows()];
        let dh: &[T] = views.read(op.dh);
        let width = width(op.hidden, op.gated);
        assert_eq!(op.dw_up.len(), offsets.count(), "a gradient a segment: {op:?}");
        let gates = if op.gated { offsets.count() } else { 0 };
        assert_eq!(op.dw_gate.len(), gates, "a gradient a segment: {op:?}");
        let mut work = Vec::new();
        for (dws, column) in [(op.dw_gate, 0), (op.dw_up, width - op.hidden)] {
            for (segment, dw) in dws.iter().enumerate() {
                let (first, count) = offsets.of_segment(segment);
                let dw: &mut [T] = views.write(*dw);
                work.push(Product {
                    k: count,
                    a: of_segment(dh, (column, width), first),
                    b: Operand::columns(x, op.dim).gathered(&index[first..first + count]),
                    c: Target::new(dw, op.hidden, op.dim),
                    accumulate: false,
                    causal: Causal::None,
                });
            }
        }
        products(exec, work);
    }
}

/// Columns of the hidden buffers: gate | up, or up alone.
fn width(hidden: usize, gated: bool) -> usize {
    if gated { 2 * hidden } else { hidden }
}

/// The rows of a segment that begins at `first`, along k, each from `column` of `width` on.
fn of_segment<T>(rows: &[T], (column, width): (usize, usize), first: usize) -> Operand<'_, T> {
    Operand::columns(rows.get(first * width + column..).unwrap_or_default(), width)
}

/// Where the rows of each expert lie, or of a part of them.
struct Segments<'a> {
    offsets: &'a [u32],
}

impl<'a> Segments<'a> {
    fn new(offsets: &'a [u32]) -> Segments<'a> {
        assert!(offsets.is_sorted(), "rows of an expert that go back: {offsets:?}");
        Segments { offsets }
    }

    fn count(&self) -> usize {
        self.offsets.len() - 1
    }

    fn rows(&self) -> usize {
        self.offsets[self.count()] as usize
    }

    /// (first row, rows)
    fn of_segment(&self, segment: usize) -> (usize, usize) {
        let [first, end] = [segment, segment + 1].map(|i| self.offsets[i] as usize);
        (first, end - first)
    }

    /// Cuts a buffer of all rows by segment: (first row, its rows).
    fn bands<'t, T>(&self, target: Target<'t, T>) -> Vec<(usize, Target<'t, T>)> {
        let mut rest = target;
        let mut bands = Vec::with_capacity(self.count());
        for g in 0..self.count() {
            let (first, count) = self.of_segment(g);
            let (band, below) = rest.split_rows(count);
            bands.push((first, band));
            rest = below;
        }
        bands
    }
}

/// The weights of every expert, `size` elements each; none when they are not `present`.
fn weights<'a, T: Float>(
    views: &mut Views<'a>,
    buffers: &[Buffer],
    present: bool,
    segments: &Segments<'_>,
    size: usize,
) -> Vec<&'a [T]> {
    let expected = if present { segments.count() } else { 0 };
    assert_eq!(buffers.len(), expected, "a weight an expert");
    let weights: Vec<&[T]> = buffers.iter().map(|buffer| views.read(*buffer)).collect();
    assert!(weights.iter().all(|w| w.len() == size), "weights of {size} elements");
    weights
}

lanes_fn! {
fn activate<T: Float>(activation: Activation, h: &[T], hidden: usize, gated: bool, a: &mut [T]) {
    match activation {
        Activation::Silu => activate_rows::<Silu, T>(h, hidden, gated, a),
        Activation::Relu => activate_rows::<Relu, T>(h, hidden, gated, a),
        Activation::Gelu => activate_rows::<Gelu, T>(h, hidden, gated, a),
    }
}
}

#[inline(always)]
fn activate_rows<G: Gate, T: Float>(h: &[T], hidden: usize, gated: bool, a: &mut [T]) {
    if !gated {
        for (a, x) in a.iter_mut().zip(h) {
            *a = G::value(*x);
        }
        return;
    }
    for (a, h) in a.chunks_exact_mut(hidden).zip(h.chunks_exact(2 * hidden)) {
        let (gate, up) = h.split_at(hidden);
        for ((a, gate), up) in a.iter_mut().zip(gate).zip(up) {
            *a = G::value(*gate) * *up;
        }
    }
}

lanes_fn! {
/// Per row: ds = <da', a>, dh = s * da' through the activation, a_scaled = s * a; `a_scaled` comes
/// in as da'.
fn through_activation<T: Float>(
    shape: (Activation, usize, bool), a: &[T], h: &[T], s: &[T],
    a_scaled: &mut [T], dh: &mut [T], ds: &mut [T],
) {
    let (activation, hidden, gated) = shape;
    let shape = (hidden, gated);
    match activation {
        Activation::Silu => rows_through::<Silu, T>(shape, a, h, s, a_scaled, dh, ds),
        Activation::Relu => rows_through::<Relu, T>(shape, a, h, s, a_scaled, dh, ds),
        Activation::Gelu => rows_through::<Gelu, T>(shape, a, h, s, a_scaled, dh, ds),
    }
}
}

#[inline(always)]
fn rows_through<G: Gate, T: Float>(
    (hidden, gated): (usize, bool),
    a: &[T],
    h: &[T],
    s: &[T],
    a_scaled: &mut [T],
    dh: &mut [T],
    ds: &mut [T],
) {
    let width = if gated { 2 * hidden } else { hidden };
    for (r, (ds, s)) in ds.iter_mut().zip(s).enumerate() {
        let (a, da) = (&a[r * hidden..][..hidden], &mut a_scaled[r * hidden..][..hidden]);
        let (h, dh) = (&h[r * width..][..width], &mut dh[r * width..][..width]);
        *ds = lanes::dot(da, a);
        if gated {
            let (gate, up) = h.split_at(hidden);
            let (dgate, dup) = dh.split_at_mut(hidden);
            for i in 0..hidden {
                let (value, slope) = G::with_slope(gate[i]);
                let da = *s * da[i];
                dgate[i] = da * up[i] * slope;
                dup[i] = da * value;
            }
        } else {
            for i in 0..hidden {
                dh[i] = *s * da[i] * G::with_slope(h[i]).1;
            }
        }
        for (scaled, a) in da.iter_mut().zip(a) {
            *scaled = *s * *a;
        }
    }
}
