//! See [`crate::Cast`] and [`crate::SplitMaster`].

use half::{bf16, f16};

use crate::buffer::{Buffer, DType, Element, Pair};
use crate::cpu::{CpuDevice, ELEMENTS_PER_JOB};
use crate::cpu::exec::lanes_fn;
use crate::cpu::float::Float;
use crate::cpu::isa::Isa;
use crate::ops::convert::op::{AddUp, Cast, JoinMaster, SplitMaster};
use crate::stored::{join, split};

impl CpuDevice {
    /// From fp32: `half` rounds f64 by its upper half alone.
    pub(crate) fn cast(&mut self, op: &Cast) {
        let Cast { from, to } = *op;
        match (from.dtype(), to.dtype()) {
            (DType::F32, DType::Bf16) => self.cast_to(from, to, bf16::from_f32),
            (DType::F32, DType::F16) => self.cast_to(from, to, f16::from_f32),
            (DType::F32, DType::F64) => self.cast_to::<f32, f64>(from, to, f64::from),
            (DType::F64, DType::F32) => self.narrow(from, to),
            (DType::Pair, DType::F64) => self.cast_to(from, to, |x: Pair| x.high),
            (DType::Bf16, DType::F32) => self.cast_to(from, to, bf16::to_f32),
            (DType::F16, DType::F32) => self.cast_to(from, to, f16::to_f32),
            (DType::Bf16, DType::F16) => {
                self.cast_to(from, to, |x: bf16| f16::from_f32(x.to_f32()));
            }
            (DType::F16, DType::Bf16) => {
                self.cast_to(from, to, |x: f16| bf16::from_f32(x.to_f32()));
            }
            other => panic!("no conversion of {other:?}: {op:?}"),
        }
    }

    fn cast_to<From: Element, To: Element>(
        &mut self,
        from: Buffer,
        to: Buffer,
        convert: impl Fn(From) -> To,
    ) {
        let (mut views, _) = self.split();
        let from: &[From] = views.read(from);
        let to: &mut [To] = views.write(to);
        for (to, from) in to.iter_mut().zip(from) {
            *to = convert(*from);
        }
    }

    pub(crate) fn add_up(&mut self, op: &AddUp) {
        match (op.x.dtype(), op.sum.dtype()) {
            (DType::F64, DType::Pair) => self.add_up_of(op, Pair::plus, |x: f64| x.into()),
            (DType::Pair, _) => self.add_up_of(op, Pair::plus, |x: Pair| x),
            (DType::F64, _) => self.add_up_wide::<f64>(op),
            _ => self.add_up_wide::<f32>(op),
        }
    }

    fn add_up_of<T: Element, S: Element>(
        &mut self,
        op: &AddUp,
        plus: impl Fn(S, S) -> S,
        widen: impl Fn(T) -> S,
    ) {
        let (mut views, _) = self.split();
        let x: &[T] = views.read(op.x);
        let sums: &mut [S] = views.write(op.sum);
        for (sum, x) in sums.iter_mut().zip(x) {
            *sum = if op.adds { plus(*sum, widen(*x)) } else { widen(*x) };
        }
    }

    fn add_up_wide<T: Float>(&mut self, op: &AddUp) {
        let (mut views, exec) = self.split();
        let x: &[T] = views.read(op.x);
        let sums: &mut [f64] = views.write(op.sum);
        let jobs = sums.chunks_mut(ELEMENTS_PER_JOB).zip(x.chunks(ELEMENTS_PER_JOB)).collect();
        exec.run(jobs, x.len(), |(sums, x)| match op.adds {
            true => add_wide(exec.isa, sums, x),
            false => widen(exec.isa, sums, x),
        });
    }

    fn narrow(&mut self, from: Buffer, to: Buffer) {
        let (mut views, exec) = self.split();
        let from: &[f64] = views.read(from);
        let to: &mut [f32] = views.write(to);
        let jobs = to.chunks_mut(ELEMENTS_PER_JOB).zip(from.chunks(ELEMENTS_PER_JOB)).collect();
        exec.run(jobs, from.len(), |(to, from)| narrow(exec.isa, to, from));
    }

    pub(crate) fn split_master(&mut self, op: &SplitMaster) {
        let (mut views, _) = self.split();
        let master: &[f32] = views.read(op.master);
        let weight: &mut [bf16] = views.write(op.weight);
        let low: &mut [i16] = views.write(op.low);
        for ((master, weight), low) in master.iter().zip(weight).zip(low) {
            let (high, rest) = split(*master);
            (*weight, *low) = (bf16::from_bits(high), rest);
        }
    }

    pub(crate) fn join_master(&mut self, op: &JoinMaster) {
        let (mut views, _) = self.split();
        let weight: &[bf16] = views.read(op.weight);
        let low: &[i16] = views.read(op.low);
        let master: &mut [f32] = views.write(op.master);
        for ((master, weight), low) in master.iter_mut().zip(weight).zip(low) {
            *master = join(weight.to_bits(), *low);
        }
    }
}

lanes_fn! {
fn add_wide<T: Float>(sums: &mut [f64], x: &[T]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        *sum += x.wide();
    }
}
}

lanes_fn! {
fn widen<T: Float>(sums: &mut [f64], x: &[T]) {
    for (sum, x) in sums.iter_mut().zip(x) {
        *sum = x.wide();
    }
}
}

lanes_fn! {
fn narrow<T: Float>(to: &mut [T], from: &[f64]) {
    for (to, from) in to.iter_mut().zip(from) {
        *to = T::of(*from);
    }
}
}
