//! See [`crate::PackRows`].

use crate::cpu::CpuDevice;
use crate::ops::wire::op::{PackRows, UnpackRows, WireFormat, fp8_pack, fp8_unpack};

impl CpuDevice {
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
        let (mut views, exec) = self.split();
        let rows: &[f32] = views.read(op.rows);
        let packed: &mut [u8] = views.write(op.packed);
        let bytes = WireFormat::Fp8.row_bytes(op.dim);
        let jobs = rows.chunks_exact(op.dim).zip(packed.chunks_exact_mut(bytes)).collect();
        exec.run(jobs, 8 * rows.len(), |(row, packed)| fp8_pack(row, packed));
    }

    fn unpack_fp8(&mut self, op: &UnpackRows) {
        let (mut views, exec) = self.split();
        let packed: &[u8] = views.read(op.packed);
        let rows: &mut [f32] = views.write(op.rows);
        let bytes = WireFormat::Fp8.row_bytes(op.dim);
        let work = 4 * rows.len();
        let jobs = packed.chunks_exact(bytes).zip(rows.chunks_exact_mut(op.dim)).collect();
        exec.run(jobs, work, |(packed, row)| fp8_unpack(packed, row));
    }
}
