//! See [`crate::Cast`] and [`crate::SplitMaster`].

use half::{bf16, f16};

use super::CpuDevice;
use crate::buffer::{Buffer, DType};
use crate::convert::{Cast, JoinMaster, SplitMaster, join, split};

impl CpuDevice {
    pub(crate) fn cast(&mut self, op: &Cast) {
        match op.from.dtype() {
            DType::F32 => self.cast_from::<f32>(op, f64::from),
            DType::F64 => self.cast_from::<f64>(op, |x| x),
            DType::Bf16 => self.cast_from::<bf16>(op, bf16::to_f64),
            DType::F16 => self.cast_from::<f16>(op, f16::to_f64),
            other => panic!("{other:?} is no float: {op:?}"),
        }
    }

    /// Every kind fits into f64, so one rounding is all there is.
    fn cast_from<From: crate::Element>(&mut self, op: &Cast, wide: fn(From) -> f64) {
        match op.to.dtype() {
            DType::F32 => self.cast_to::<From, f32>(op.from, op.to, |x| wide(x) as f32),
            DType::F64 => self.cast_to::<From, f64>(op.from, op.to, wide),
            DType::Bf16 => self.cast_to(op.from, op.to, |x| bf16::from_f64(wide(x))),
            DType::F16 => self.cast_to(op.from, op.to, |x| f16::from_f64(wide(x))),
            other => panic!("{other:?} is no float: {op:?}"),
        }
    }

    fn cast_to<From: crate::Element, To: crate::Element>(
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
