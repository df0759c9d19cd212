//! See [`crate::Matmul`].

use crate::cpu::CpuDevice;
use crate::cpu::float::Float;
use crate::cpu::gemm::{Causal, Operand, Product, Target, products};
use crate::cpu::gemm::kernel::GemmFloat;
use crate::ops::matmul::op::{AddBias, BiasBackward, Matmul};
use crate::ops::norm::cpu::{ROWS_PER_CHUNK, add_to, sum_chunks};
use crate::types::Layout;

impl CpuDevice {
    pub(crate) fn matmul<T: GemmFloat>(&mut self, op: &Matmul) {
        let (mut views, exec) = self.split();
        let a: &[T] = views.read(op.a);
        let b: &[T] = views.read(op.b);
        let c: &mut [T] = views.write(op.c);
        let (m, n, k) = (op.m, op.n, op.k);
        assert_eq!((a.len(), b.len(), c.len()), (m * k, k * n, m * n), "{op:?}");
        let (a, b) = match op.layout {
            Layout::Nt => (Operand::rows(a, k), Operand::rows(b, k)),
            Layout::Nn => (Operand::rows(a, k), Operand::columns(b, n)),
            Layout::Tn => (Operand::columns(a, m), Operand::columns(b, n)),
        };
        let c = Target::new(c, m, n);
        let product =
            Product { k, a, b, c, accumulate: op.accumulate, causal: Causal::None };
        products(exec, vec![product]);
    }

    pub(crate) fn exact_matmul<T: GemmFloat>(&mut self, op: &Matmul) {
        self.matmul::<T>(op);
    }

    pub(crate) fn add_bias<T: Float>(&mut self, op: &AddBias) {
        let (mut views, exec) = self.split();
        let bias: &[T] = views.read(op.bias);
        let x: &mut [T] = views.write(op.x);
        assert_eq!((x.len(), bias.len()), (op.rows * op.columns, op.columns), "{op:?}");
        for x in x.chunks_exact_mut(op.columns) {
            add_to::<T>(exec.isa, x, bias);
        }
    }

    pub(crate) fn bias_backward<T: Float>(&mut self, op: &BiasBackward) {
        let (mut views, exec) = self.split();
        let dy: &[T] = views.read(op.dy);
        let dbias: &mut [T] = views.write(op.dbias);
        assert_eq!((dy.len(), dbias.len()), (op.rows * op.columns, op.columns), "{op:?}");
        let chunks = dy.chunks(ROWS_PER_CHUNK * op.columns);
        sum_chunks(exec, op.rows, dbias, op.accumulate, dy.len(), chunks, {
            |_, dy: &[T], sums: &mut [T]| {
                for dy in dy.chunks_exact(op.columns) {
                    add_to::<T>(exec.isa, sums, dy);
                }
            }
        });
    }
}
