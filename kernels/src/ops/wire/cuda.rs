//! Rows to fp8 and back, see [`crate::PackRows`].

use crate::buffer::{Buffer, DType};
use crate::cuda::compile::element_macro;
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Launch, parameters};
use crate::cuda::enqueue::{Text, Unit};
use crate::ops::wire::op::{FP8_BLOCK, PackRows, UnpackRows, WireFormat};

static WIRE: Text = Text {
    name: "wire",
    macros: &["ROW"],
    constants: &[("ELEMENT", 0)],
    parts: &[include_str!("wire.cu"), include_str!("wire_rows.cu")],
};

pub(crate) fn unit(element: DType) -> Unit {
    WIRE.unit([element_macro(element)])
}

const THREADS: usize = 256;

/// A thread for so many elements, of which there are `len`.
fn launch(len: usize, each: usize) -> Launch {
    Launch::new(len.div_ceil(each * THREADS).clamp(1, 1056 * 4), THREADS as u32)
}

impl CudaDevice {
    pub(crate) fn pack_rows(&mut self, op: &PackRows) {
        match op.format {
            WireFormat::Bf16 => self.cast(&op.cast()),
            WireFormat::Fp8 => self.pack_fp8(op),
        }
    }

    pub(crate) fn unpack_rows(&mut self, op: &UnpackRows) {
        match op.format {
            WireFormat::Bf16 => self.cast(&op.cast()),
            WireFormat::Fp8 => self.unpack_fp8(op),
        }
    }

    fn pack_fp8(&mut self, op: &PackRows) {
        // Rows of whole blocks: the threads of the last one may have nothing.
        let len = op.rows.len() / op.dim * op.dim.next_multiple_of(FP8_BLOCK);
        self.fp8("pack_fp8", launch(len, 8), (op.rows, op.packed), (op.rows, op.dim));
    }

    fn unpack_fp8(&mut self, op: &UnpackRows) {
        let launch = launch(op.rows.len(), 16);
        self.fp8("unpack_fp8", launch, (op.packed, op.rows), (op.rows, op.dim));
    }

    fn fp8(
        &mut self,
        name: &'static str,
        launch: Launch,
        (from, into): (Buffer, Buffer),
        (rows, dim): (Buffer, usize),
    ) {
        self.enqueue(|to| {
            let (from, into) = (to.at(from), to.at(into));
            assert!(from.is_multiple_of(16) && into.is_multiple_of(16), "{rows:?} as fp8");
            let (count, bytes) = (rows.len() / dim, WireFormat::Fp8.row_bytes(dim));
            // And a grid beyond them, which threads count up to.
            assert!(rows.len() / 16 < 1 << 31, "{rows:?} as fp8");
            let (count, dim, bytes) = (count as u32, dim as u32, bytes as u32);
            let kernel = (unit(rows.dtype()), name);
            let parameters = parameters![from, into, count, dim, bytes];
            // SAFETY: the parameters are those of both kernels, the lengths were checked.
            unsafe { to.launch(kernel, launch, parameters) }
        });
    }
}
