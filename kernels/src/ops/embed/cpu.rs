//! See [`crate::Embed`].

use crate::cpu::CpuDevice;
use crate::cpu::float::Float;
use crate::ops::embed::op::{Embed, EmbedBackward};

impl CpuDevice {
    pub(crate) fn embed<T: Float>(&mut self, op: &Embed) {
        let (mut views, _) = self.split();
        let ids: &[u32] = views.read(op.ids);
        let table: &[T] = views.read(op.table);
        let x: &mut [T] = views.write(op.x);
        assert_eq!((ids.len(), table.len()), (op.tokens, op.vocab * op.dim), "{op:?}");
        assert_eq!(x.len(), op.tokens * op.dim, "{op:?}");
        for (x, id) in x.chunks_exact_mut(op.dim).zip(ids) {
            x.copy_from_slice(&table[*id as usize * op.dim..][..op.dim]);
        }
    }

    pub(crate) fn embed_backward<T: Float>(&mut self, op: &EmbedBackward) {
        let (mut views, _) = self.split();
        let ids: &[u32] = views.read(op.ids);
        let dx: &[T] = views.read(op.dx);
        let dtable: &mut [T] = views.write(op.dtable);
        assert_eq!((ids.len(), dtable.len()), (op.tokens, op.vocab * op.dim), "{op:?}");
        assert_eq!(dx.len(), op.tokens * op.dim, "{op:?}");
        for (dx, id) in dx.chunks_exact(op.dim).zip(ids) {
            let row = &mut dtable[*id as usize * op.dim..][..op.dim];
            for (sum, dx) in row.iter_mut().zip(dx) {
                *sum += *dx;
            }
        }
    }
}
