//! Ops on each element alone.

use half::{bf16, f16};

use crate::buffer::DType;
use crate::cuda::compile::element_macro;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::enqueue::{ELEMENTS, PHILOX, Text, Unit, all_whole};
use crate::ops::elementwise::op::{
    Add, Clamp, ClampBackward, Fill, GatedMul, GatedMulBackward, GatherRows, InitNormal, ScatterSum,
    Strided, Sum,
};

static ELEMENTWISE: Text = Text {
    name: "elements",
    macros: &["ELEMENT"],
    constants: &[],
    parts: &[ELEMENTS, PHILOX, include_str!("elementwise.cu")],
};

pub(crate) fn unit(element: DType) -> Unit {
    ELEMENTWISE.unit([element_macro(element)])
}

const THREADS: usize = 256;

/// A chunk of 16 bytes a thread; what no chunk holds is few elements.
fn launch(len: usize, element: DType, whole: i32) -> Launch {
    let each = if whole == 1 { 16 / element.size() } else { 1 };
    Launch::new(len.div_ceil(each).div_ceil(THREADS).clamp(1, i32::MAX as usize), THREADS as u32)
}

/// A number in an element.
fn rounded(element: DType, x: f64) -> f32 {
    match element {
        DType::Bf16 => bf16::from_f64(x).to_f32(),
        DType::F16 => f16::from_f64(x).to_f32(),
        _ => x as f32,
    }
}

/// Whether rows of `dim` may be read in chunks of 16 bytes.
fn whole_rows(addresses: &[u64], element: DType, dim: usize) -> i32 {
    let chunks = (dim * element.size()).is_multiple_of(16);
    if chunks { all_whole(addresses) } else { 0 }
}

impl CudaDevice {
    pub(crate) fn add(&mut self, op: &Add) {
        let (element, len) = (op.a.dtype(), op.a.len());
        if element == DType::F64 {
            return self.add_doubles(op);
        }
        self.enqueue(|to| {
            let (a, (b, _)) = (to.at(op.a), to.either(op.b, element, len));
            let whole = all_whole(&[a, b]);
            let (launch, len) = (launch(len, element, whole), len as u64);
            if op.b.dtype() != element {
                let kernel = (unit(element), "sum_wide");
                // SAFETY: the parameters are those of `sum_wide`, the lengths were checked.
                return unsafe { to.launch(kernel, launch, parameters![a, b, a, len, whole]) };
            }
            let kernel = (unit(element), "add");
            // SAFETY: the parameters are those of `add`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters![a, b, len, whole]) }
        });
    }

    pub(crate) fn sum(&mut self, op: &Sum) {
        let (element, len) = (op.out.dtype(), op.out.len());
        self.enqueue(|to| {
            let [a, out] = [op.a, op.out].map(|buffer| to.of(buffer, element, len));
            let (b, _) = to.either(op.b, element, len);
            let whole = all_whole(&[a, b, out]);
            let (launch, len) = (launch(len, element, whole), len as u64);
            let name = if op.b.dtype() == element { "sum" } else { "sum_wide" };
            let kernel = (unit(element), name);
            // SAFETY: the parameters are those of both kernels, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters![a, b, out, len, whole]) }
        });
    }

    pub(crate) fn gather_rows(&mut self, op: &GatherRows) {
        let GatherRows { rows, dim, .. } = *op;
        let (element, len) = (op.y.dtype(), rows * dim);
        if len == 0 {
            return;
        }
        self.enqueue(|to| {
            assert_eq!((op.x.dtype(), op.y.len()), (element, len), "{op:?}");
            let (x, y, index) = (to.at(op.x), to.at(op.y), to.of(op.index, DType::U32, rows));
            let whole = whole_rows(&[x, y], element, dim);
            let launch = launch(len, element, whole);
            let kernel = (unit(element), "gather_rows");
            let (len, dim) = (len as u64, dim as u32);
            // SAFETY: the parameters are those of `gather_rows`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters![x, index, y, len, dim, whole]) }
        });
    }

    pub(crate) fn scatter_sum(&mut self, op: &ScatterSum) {
        let ScatterSum { tokens, top_k, dim, accumulate, .. } = *op;
        let (element, len) = (op.out.dtype(), tokens * dim);
        if len == 0 {
            return;
        }
        self.enqueue(|to| {
            assert_eq!((op.x.dtype(), op.out.len()), (element, len), "{op:?}");
            let (x, out) = (to.at(op.x), to.at(op.out));
            let pos = to.of(op.pos, DType::U32, tokens * top_k);
            let whole = whole_rows(&[x, out], element, dim);
            let launch = launch(len, element, whole);
            let kernel = (unit(element), "sum_rows");
            let (len, top_k, dim) = (len as u64, top_k as u32, dim as u32);
            let accumulate = i32::from(accumulate);
            let parameters = parameters![x, pos, out, len, top_k, dim, accumulate, whole];
            // SAFETY: the parameters are those of `sum_rows`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters) }
        });
    }

    pub(crate) fn fill(&mut self, op: &Fill) {
        let (element, len) = (op.x.dtype(), op.x.len());
        self.enqueue(|to| {
            let x = to.at(op.x);
            let whole = all_whole(&[x]);
            let (launch, len, value) = (launch(len, element, whole), len as u64, op.value as f32);
            let kernel = (unit(element), "fill");
            // SAFETY: the parameters are those of `fill`.
            unsafe { to.launch(kernel, launch, parameters![x, len, whole, value]) }
        });
    }

    pub(crate) fn clamp(&mut self, op: &Clamp) {
        let (element, len) = (op.x.dtype(), op.x.len());
        self.enqueue(|to| {
            let x = to.at(op.x);
            let whole = all_whole(&[x]);
            let limit = rounded(element, op.limit);
            let (launch, len) = (launch(len, element, whole), len as u64);
            let kernel = (unit(element), "clamp");
            // SAFETY: the parameters are those of `clamp`.
            unsafe { to.launch(kernel, launch, parameters![x, len, whole, limit]) }
        });
    }

    pub(crate) fn clamp_backward(&mut self, op: &ClampBackward) {
        let (element, len) = (op.dx.dtype(), op.dx.len());
        self.enqueue(|to| {
            let (dx, x) = (to.at(op.dx), to.of(op.x, element, len));
            let whole = all_whole(&[dx, x]);
            let limit = rounded(element, op.limit);
            let (launch, len) = (launch(len, element, whole), len as u64);
            let kernel = (unit(element), "clamp_backward");
            // SAFETY: the parameters are those of `clamp_backward`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters![dx, x, len, whole, limit]) }
        });
    }

    pub(crate) fn gated_mul(&mut self, op: &GatedMul) {
        let (element, len) = (op.out.dtype(), op.out.len());
        self.enqueue(|to| {
            let [gate, up, out] =
                [op.gate, op.up, op.out].map(|buffer| to.of(buffer, element, len));
            let whole = all_whole(&[gate, up, out]);
            let (launch, kind) = (launch(len, element, whole), op.activation as i32);
            let len = len as u64;
            let kernel = (unit(element), "gated_mul");
            // SAFETY: the parameters are those of `gated_mul`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters![gate, up, out, len, whole, kind]) }
        });
    }

    pub(crate) fn gated_mul_backward(&mut self, op: &GatedMulBackward) {
        let (element, len) = (op.d_out.dtype(), op.d_out.len());
        self.enqueue(|to| {
            let all = [op.gate, op.up, op.d_out, op.dgate, op.dup];
            let [gate, up, d_out, dgate, dup] = all.map(|buffer| to.of(buffer, element, len));
            let whole = all_whole(&[gate, up, d_out, dgate, dup]);
            let (launch, kind) = (launch(len, element, whole), op.activation as i32);
            let len = len as u64;
            let kernel = (unit(element), "gated_mul_backward");
            let parameters = parameters![gate, up, d_out, dgate, dup, len, whole, kind];
            // SAFETY: the parameters are those of `gated_mul_backward`, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters) }
        });
    }

    pub(crate) fn init_normal(&mut self, op: &InitNormal) {
        let (element, len) = (op.x.dtype(), op.x.len());
        if len == 0 {
            return;
        }
        self.enqueue(|to| {
            let x = to.at(op.x);
            let InitNormal { seed, name_hash, first, place, std, .. } = *op;
            if place != Strided::ALL {
                let Strided { from, run, stride } = place;
                let launch = Launch::new(len.div_ceil(THREADS), THREADS as u32);
                let (kernel, len) =
                    ((unit(element), "init_normal_strided"), len as u64);
                let parameters =
                    parameters![x, len, seed, name_hash, first, from, run, stride, std];
                // SAFETY: the parameters are those of `init_normal_strided`.
                return unsafe { to.launch(kernel, launch, parameters) };
            }
            let pairs = (first + len as u64 - 1) / 2 - first / 2 + 1;
            let launch = Launch::new((pairs as usize).div_ceil(THREADS), THREADS as u32);
            let (kernel, len) = ((unit(element), "init_normal"), len as u64);
            let parameters = parameters![x, len, seed, name_hash, first, std];
            // SAFETY: the parameters are those of `init_normal`.
            unsafe { to.launch(kernel, launch, parameters) }
        });
    }
}
