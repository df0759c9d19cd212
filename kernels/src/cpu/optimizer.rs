//! See [`crate::AdamW`].

use super::exec::{Isa, lanes_fn};
use super::{CpuDevice, ELEMENTS_PER_JOB, Float, lanes};
use crate::buffer::Buffer;
use crate::optimizer::{AdamW, BlockSquareSums, SQUARE_SUM_BLOCK};
use crate::step_numbers::StepClass;

impl CpuDevice {
    pub(crate) fn block_square_sums<T: Float>(&mut self, op: &BlockSquareSums) {
        let (mut views, exec) = self.split();
        let g: &[T] = views.read(op.g);
        let out: &mut [f64] = views.write(op.out);
        assert_eq!(out.len(), g.len().div_ceil(SQUARE_SUM_BLOCK), "{op:?}");
        let jobs = g.chunks(SQUARE_SUM_BLOCK).zip(out).collect();
        exec.run(jobs, 2 * g.len(), |(g, out)| *out = square_sum::<T>(exec.isa, g));
    }

    pub(crate) fn adamw<T: Float>(&mut self, op: &AdamW) {
        self.update(&Factors::<T>::of(op), op.w, op.m, op.v, op.g);
    }

    /// One tensor's weight and moments, by its gradient.
    pub(super) fn update<T: Float>(
        &mut self,
        factors: &Factors<T>,
        w: Buffer,
        m: Buffer,
        v: Buffer,
        g: Buffer,
    ) {
        let (mut views, exec) = self.split();
        let g: &[T] = views.read(g);
        let [w, m, v] = [w, m, v].map(|buffer| views.write::<T>(buffer));
        let lengths = (w.len(), m.len(), v.len());
        assert_eq!(lengths, (g.len(), g.len(), g.len()), "weight, moments and gradient");
        let len = ELEMENTS_PER_JOB;
        let jobs = w.chunks_mut(len).zip(m.chunks_mut(len)).zip(v.chunks_mut(len));
        exec.run(jobs.zip(g.chunks(len)).collect(), 24 * g.len(), |(((w, m), v), g)| {
            update::<T>(exec.isa, factors, w, m, v, g);
        });
    }
}

/// The coefficients of one update, computed in f64 and rounded once.
pub(super) struct Factors<T> {
    beta1: T,
    beta2: T,
    /// What g' is g times of
    grad_scale: T,
    one_minus_beta1: T,
    one_minus_beta2: T,
    /// lr / (1 - beta1^step)
    rate: T,
    /// 1 / (1 - beta2^step)
    v_correction: T,
    eps: T,
    /// 1 - lr * weight_decay
    keep: T,
}

impl<T: Float> Factors<T> {
    fn of(op: &AdamW) -> Factors<T> {
        assert!(op.step > 0, "steps count from 1");
        Factors::new(&StepClass::of(op), (op.beta1, op.beta2), op.eps, op.grad_scale, true)
    }

    pub(super) fn new(
        class: &StepClass,
        (beta1, beta2): (f64, f64),
        eps: f64,
        grad_scale: f64,
        decays: bool,
    ) -> Factors<T> {
        Factors {
            beta1: T::of(beta1),
            beta2: T::of(beta2),
            grad_scale: T::of(grad_scale),
            one_minus_beta1: T::of(1.0 - beta1),
            one_minus_beta2: T::of(1.0 - beta2),
            rate: T::of(class.rate),
            v_correction: T::of(class.correction),
            eps: T::of(eps),
            keep: if decays { T::of(class.keep) } else { T::ONE },
        }
    }
}

lanes_fn! {
pub(super) fn square_sum<T: Float>(g: &[T]) -> f64 {
    lanes::square_sum(g)
}
}

lanes_fn! {
pub(super) fn update<T: Float>(f: &Factors<T>, w: &mut [T], m: &mut [T], v: &mut [T], g: &[T]) {
    for (((w, m), v), g) in w.iter_mut().zip(m).zip(v).zip(g) {
        let g = *g * f.grad_scale;
        *m = m.fma(f.beta1, f.one_minus_beta1 * g);
        *v = v.fma(f.beta2, f.one_minus_beta2 * g * g);
        let root = (*v * f.v_correction).sqrt();
        *w = w.fma(f.keep, -(f.rate * *m / (root + f.eps)));
    }
}
}

lanes_fn! {
pub(super) fn non_finite<T: Float>(x: &[T]) -> u32 {
    let mut count = 0;
    for x in x {
        count += u32::from(!x.is_finite());
    }
    count
}
}
