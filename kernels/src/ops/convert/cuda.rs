//! Conversions between kinds.

use crate::buffer::DType;
use crate::cuda::compile::element_macro;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::enqueue::{Text, Unit};
use crate::ops::convert::op::{AddUp, Cast, JoinMaster, SplitMaster};

static CONVERT: Text = Text {
    name: "conversion",
    macros: &[],
    constants: &[("ELEMENT", 0)],
    parts: &[include_str!("convert.cu")],
};

pub(crate) fn unit() -> Unit {
    CONVERT.unit([])
}

/// Eight blocks for each multiprocessor of an H200, of 256 threads that go on from there.
fn launch(len: usize, each: usize) -> Launch {
    Launch::new(len.div_ceil(256 * each).clamp(1, 1056 * 4), 256)
}

impl CudaDevice {
    pub(crate) fn cast(&mut self, op: &Cast) {
        self.enqueue(|to| {
            let (from, into) = (to.at(op.from), to.at(op.to));
            if (op.from.dtype(), op.to.dtype()) == (DType::F64, DType::F32) {
                let (launch, len) = (launch(op.from.len(), 1), op.from.len() as u64);
                let kernel = (unit(), "cast_f64");
                // SAFETY: the parameters are those of `cast_f64`, both lengths were checked.
                return unsafe { to.launch(kernel, launch, parameters![from, into, len]) };
            }
            let kinds = [op.from, op.to].map(|buffer| element_macro(buffer.dtype()) as i32);
            let (launch, len) = (launch(op.from.len(), 4), op.from.len() as u64);
            let parameters = parameters![from, kinds[0], into, kinds[1], len];
            // SAFETY: the parameters are those of `cast`, both lengths were checked.
            unsafe { to.launch((unit(), "cast"), launch, parameters) }
        });
    }

    pub(crate) fn add_up(&mut self, op: &AddUp) {
        self.enqueue(|to| {
            let [x, sum] = [op.x, op.sum].map(|buffer| to.at(buffer));
            let name = if op.x.dtype() == DType::F64 { "add_up_f64" } else { "add_up_f32" };
            let (launch, len) = (launch(op.x.len(), 1), op.x.len() as u64);
            let adds = i32::from(op.adds);
            let parameters = parameters![x, sum, adds, len];
            // SAFETY: the parameters are those of both kernels, the lengths were checked.
            unsafe { to.launch((unit(), name), launch, parameters) }
        });
    }

    pub(crate) fn split_master(&mut self, op: &SplitMaster) {
        self.enqueue(|to| {
            let [master, weight, low] = [op.master, op.weight, op.low].map(|buffer| to.at(buffer));
            let (launch, len) = (launch(op.master.len(), 1), op.master.len() as u64);
            let parameters = parameters![master, weight, low, len];
            // SAFETY: the parameters are those of `split_master`, the lengths were checked.
            unsafe { to.launch((unit(), "split_master"), launch, parameters) }
        });
    }

    pub(crate) fn join_master(&mut self, op: &JoinMaster) {
        self.enqueue(|to| {
            let [weight, low, master] = [op.weight, op.low, op.master].map(|buffer| to.at(buffer));
            let (launch, len) = (launch(op.master.len(), 1), op.master.len() as u64);
            let parameters = parameters![weight, low, master, len];
            // SAFETY: the parameters are those of `join_master`, the lengths were checked.
            unsafe { to.launch((unit(), "join_master"), launch, parameters) }
        });
    }
}
