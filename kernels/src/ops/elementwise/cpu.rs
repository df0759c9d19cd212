//! See [`crate::GatedMul`].

use crate::cpu::{CpuDevice, ELEMENTS_PER_JOB, ROWS_PER_JOB};
use crate::cpu::activation::{Gate, Gelu, Relu, Silu};
use crate::cpu::exec::lanes_fn;
use crate::cpu::float::Float;
use crate::cpu::isa::Isa;
use crate::ops::elementwise::op::{
    Add, Clamp, ClampBackward, Fill, GatedMul, GatedMulBackward, GatherRows, InitNormal, ScatterSum,
    Sum,
};
use crate::ops::mixture::cpu::place::{add_first, weighted_sum};
use crate::ops::norm::cpu::add_to;
use crate::philox::normals;
use crate::types::{Activation, NO_EXPERT};

impl CpuDevice {
    pub fn gather_rows<T: Float>(&mut self, op: &GatherRows) {
        let (mut views, exec) = self.split();
        let x: &[T] = views.read(op.x);
        let index: &[u32] = views.read(op.index);
        let y: &mut [T] = views.write(op.y);
        assert_eq!((index.len(), y.len()), (op.rows, op.rows * op.dim), "{op:?}");
        let jobs = y.chunks_mut(ROWS_PER_JOB * op.dim).zip(index.chunks(ROWS_PER_JOB)).collect();
        exec.run(jobs, op.rows * op.dim, |(y, index)| {
            for (y, row) in y.chunks_exact_mut(op.dim).zip(index) {
                match *row {
                    NO_EXPERT => y.fill(T::ZERO),
                    row => y.copy_from_slice(&x[row as usize * op.dim..][..op.dim]),
                }
            }
        });
    }

    pub fn scatter_sum<T: Float>(&mut self, op: &ScatterSum) {
        let (mut views, exec) = self.split();
        let x: &[T] = views.read(op.x);
        let pos: &[u32] = views.read(op.pos);
        let out: &mut [T] = views.write(op.out);
        assert_eq!((pos.len(), out.len()), (op.tokens * op.top_k, op.tokens * op.dim), "{op:?}");
        let jobs = out.chunks_mut(ROWS_PER_JOB * op.dim).zip(pos.chunks(ROWS_PER_JOB * op.top_k));
        exec.run(jobs.collect(), op.top_k * op.tokens * op.dim, |(out, pos)| {
            let ones = vec![T::ONE; op.top_k];
            let mut sum = vec![T::ZERO; op.dim];
            for (out, pos) in out.chunks_exact_mut(op.dim).zip(pos.chunks_exact(op.top_k)) {
                if op.accumulate {
                    weighted_sum::<T>(exec.isa, x, pos, &ones, &mut sum);
                    add_first::<T>(exec.isa, &sum, out);
                } else {
                    weighted_sum::<T>(exec.isa, x, pos, &ones, out);
                }
            }
        });
    }

    pub(crate) fn sum<T: Float>(&mut self, op: &Sum) {
        self.copy(op.a, op.out);
        self.add::<T>(&Add { a: op.out, b: op.b });
    }

    pub(crate) fn add<T: Float>(&mut self, op: &Add) {
        let (mut views, exec) = self.split();
        let b: &[T] = views.read(op.b);
        let a: &mut [T] = views.write(op.a);
        assert_eq!(a.len(), b.len(), "{op:?}");
        let jobs = a.chunks_mut(ELEMENTS_PER_JOB).zip(b.chunks(ELEMENTS_PER_JOB)).collect();
        exec.run(jobs, b.len(), |(a, b)| add_to::<T>(exec.isa, a, b));
    }

    pub(crate) fn fill<T: Float>(&mut self, op: &Fill) {
        self.slice_mut::<T>(op.x).fill(T::of(op.value));
    }

    pub(crate) fn clamp<T: Float>(&mut self, op: &Clamp) {
        let limit = T::of(op.limit);
        for x in self.slice_mut::<T>(op.x) {
            let below = if *x > limit { limit } else { *x };
            *x = if below < -limit { -limit } else { below };
        }
    }

    pub(crate) fn clamp_backward<T: Float>(&mut self, op: &ClampBackward) {
        let limit = T::of(op.limit);
        let (mut views, _) = self.split();
        let x: &[T] = views.read(op.x);
        let dx: &mut [T] = views.write(op.dx);
        assert_eq!(x.len(), dx.len(), "{op:?}");
        for (x, dx) in x.iter().zip(dx) {
            *dx = if *x > limit || *x < -limit { T::ZERO } else { *dx };
        }
    }

    pub(crate) fn gated_mul<T: Float>(&mut self, op: &GatedMul) {
        let (mut views, exec) = self.split();
        let gate: &[T] = views.read(op.gate);
        let up: &[T] = views.read(op.up);
        let out: &mut [T] = views.write(op.out);
        assert_eq!((gate.len(), up.len()), (out.len(), out.len()), "{op:?}");
        let (len, work) = (ELEMENTS_PER_JOB, 24 * out.len());
        let jobs = gate.chunks(len).zip(up.chunks(len)).zip(out.chunks_mut(len)).collect();
        exec.run(jobs, work, |((gate, up), out)| {
            gated_mul::<T>(exec.isa, op.activation, gate, up, out);
        });
    }

    pub(crate) fn gated_mul_backward<T: Float>(&mut self, op: &GatedMulBackward) {
        let (mut views, exec) = self.split();
        let gate: &[T] = views.read(op.gate);
        let up: &[T] = views.read(op.up);
        let d_out: &[T] = views.read(op.d_out);
        let dgate: &mut [T] = views.write(op.dgate);
        let dup: &mut [T] = views.write(op.dup);
        let size = d_out.len();
        assert_eq!((gate.len(), up.len(), dgate.len(), dup.len()), (size, size, size, size));
        let len = ELEMENTS_PER_JOB;
        let inputs = gate.chunks(len).zip(up.chunks(len)).zip(d_out.chunks(len));
        let jobs = inputs.zip(dgate.chunks_mut(len).zip(dup.chunks_mut(len))).collect();
        exec.run(jobs, 32 * size, |(((gate, up), d_out), (dgate, dup))| {
            gated_mul_backward::<T>(exec.isa, op.activation, gate, up, d_out, dgate, dup);
        });
    }

    pub(crate) fn init_normal<T: Float>(&mut self, op: &InitNormal) {
        let (mut views, exec) = self.split();
        let x: &mut [T] = views.write(op.x);
        let work = 200 * x.len();
        let jobs = x.chunks_mut(ELEMENTS_PER_JOB).enumerate().collect();
        exec.run(jobs, work, |(job, x)| {
            let first = op.first + (job * ELEMENTS_PER_JOB) as u64;
            let of = |element: u64| normals(op.seed, op.name_hash, element / 2);
            let mut last = op.place.element(first) / 2;
            let mut pair = of(2 * last);
            for (at, x) in (first..).zip(x) {
                let element = op.place.element(at);
                if element / 2 != last {
                    (last, pair) = (element / 2, of(element));
                }
                *x = T::of(op.std * pair[(element % 2) as usize]);
            }
        });
    }
}

lanes_fn! {
fn gated_mul<T: Float>(activation: Activation, gate: &[T], up: &[T], out: &mut [T]) {
    match activation {
        Activation::Silu => multiply::<Silu, T>(gate, up, out),
        Activation::Relu => multiply::<Relu, T>(gate, up, out),
        Activation::Gelu => multiply::<Gelu, T>(gate, up, out),
    }
}
}

#[inline(always)]
fn multiply<G: Gate, T: Float>(gate: &[T], up: &[T], out: &mut [T]) {
    for ((out, gate), up) in out.iter_mut().zip(gate).zip(up) {
        *out = G::value(*gate) * *up;
    }
}

lanes_fn! {
fn gated_mul_backward<T: Float>(
    activation: Activation, gate: &[T], up: &[T], d_out: &[T], dgate: &mut [T], dup: &mut [T],
) {
    match activation {
        Activation::Silu => multiply_backward::<Silu, T>(gate, up, d_out, dgate, dup),
        Activation::Relu => multiply_backward::<Relu, T>(gate, up, d_out, dgate, dup),
        Activation::Gelu => multiply_backward::<Gelu, T>(gate, up, d_out, dgate, dup),
    }
}
}

#[inline(always)]
fn multiply_backward<G: Gate, T: Float>(
    gate: &[T],
    up: &[T],
    d_out: &[T],
    dgate: &mut [T],
    dup: &mut [T],
) {
    for i in 0..d_out.len().min(gate.len()).min(up.len()).min(dgate.len()).min(dup.len()) {
        let (value, slope) = G::with_slope(gate[i]);
        dgate[i] = d_out[i] * up[i] * slope;
        dup[i] = d_out[i] * value;
    }
}
