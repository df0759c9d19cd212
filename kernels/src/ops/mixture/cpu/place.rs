//! Where routed rows lie, and moving rows to and from there.
//!
//! A slot (token, k) may be empty: its expert, and its row, are [`NO_EXPERT`]. Dropped choices and
//! tokens that choose fewer than K experts are nothing else. An empty slot has no row, adds nothing
//! to its token and has a gradient of zero.

use crate::buffer::Buffer;
use crate::cpu::{CpuDevice, ROWS_PER_JOB};
use crate::cpu::exec::lanes_fn;
use crate::cpu::float::Float;
use crate::cpu::isa::Isa;
use crate::types::NO_EXPERT;

/// Sorts the slots (token, k) by expert, then token: row order of the expert products. Empty slots
/// come nowhere; the rows in all are offsets[E].
#[derive(Clone, Copy, Debug)]
pub struct Place {
    pub tokens: usize,
    pub top_k: usize,
    pub experts: usize,
    /// u32 [T, K], each below E or `NO_EXPERT`
    pub ids: Buffer,
    /// Output u32 [E]
    pub counts: Buffer,
    /// Output u32 [E + 1]: the rows of expert e are offsets[e] .. offsets[e + 1]
    pub offsets: Buffer,
    /// Output u32 [T * K]: the token of each row; beyond offsets[E] nothing is written
    pub rows: Buffer,
    /// Output u32 [T, K]: the row of each slot, or `NO_EXPERT`
    pub pos: Buffer,
}

/// y[index[r], :] = x[r, :] unless the index is `NO_EXPERT`; the others are distinct, and rows that
/// none names stay as they are.
#[derive(Clone, Copy, Debug)]
pub struct ScatterRows {
    pub rows: usize,
    pub dim: usize,
    /// [rows, dim]
    pub x: Buffer,
    /// u32 [rows]
    pub index: Buffer,
    /// Output [any, dim]
    pub y: Buffer,
}

/// out[t, :] = residual[t, :] + (sum over k of weights[t, k] * y[pos[t, k], :]), the sum a chain of
/// fused multiply-adds from zero in slot order, which is ascending expert id; empty slots are
/// passed over.
#[derive(Clone, Copy, Debug)]
pub struct Combine {
    pub tokens: usize,
    pub top_k: usize,
    pub dim: usize,
    /// [R, D]
    pub y: Buffer,
    /// u32 [T, K]
    pub pos: Buffer,
    /// [T, K]
    pub weights: Buffer,
    /// [T, D]; may not be `out`
    pub residual: Option<Buffer>,
    /// Output [T, D]
    pub out: Buffer,
}

impl CpuDevice {
    pub fn place(&mut self, op: &Place) {
        let (mut views, _) = self.split();
        let ids: &[u32] = views.read(op.ids);
        let counts: &mut [u32] = views.write(op.counts);
        let offsets: &mut [u32] = views.write(op.offsets);
        let rows: &mut [u32] = views.write(op.rows);
        let pos: &mut [u32] = views.write(op.pos);
        let slots = op.tokens * op.top_k;
        assert_eq!((ids.len(), rows.len(), pos.len()), (slots, slots, slots), "{op:?}");
        assert_eq!((counts.len(), offsets.len()), (op.experts, op.experts + 1), "{op:?}");
        counts.fill(0);
        for id in ids.iter().filter(|id| **id != NO_EXPERT) {
            counts[*id as usize] += 1;
        }
        offsets[0] = 0;
        for e in 0..op.experts {
            offsets[e + 1] = offsets[e] + counts[e];
        }
        let mut next = offsets[..op.experts].to_vec();
        for (slot, (id, pos)) in ids.iter().zip(pos).enumerate() {
            if *id == NO_EXPERT {
                *pos = NO_EXPERT;
                continue;
            }
            let row = &mut next[*id as usize];
            rows[*row as usize] = (slot / op.top_k) as u32;
            *pos = *row;
            *row += 1;
        }
    }

    pub fn scatter_rows<T: Float>(&mut self, op: &ScatterRows) {
        let (mut views, _) = self.split();
        let x: &[T] = views.read(op.x);
        let index: &[u32] = views.read(op.index);
        let y: &mut [T] = views.write(op.y);
        assert_eq!((index.len(), x.len()), (op.rows, op.rows * op.dim), "{op:?}");
        let rows = x.chunks_exact(op.dim).zip(index).filter(|(_, row)| **row != NO_EXPERT);
        for (x, row) in rows {
            y[*row as usize * op.dim..][..op.dim].copy_from_slice(x);
        }
    }

    pub fn combine<T: Float>(&mut self, op: &Combine) {
        let (mut views, exec) = self.split();
        let y: &[T] = views.read(op.y);
        let pos: &[u32] = views.read(op.pos);
        let weights: &[T] = views.read(op.weights);
        let residual: Option<&[T]> = op.residual.map(|residual| views.read(residual));
        let out: &mut [T] = views.write(op.out);
        let (slots, size) = (op.tokens * op.top_k, op.tokens * op.dim);
        assert_eq!((pos.len(), weights.len(), out.len()), (slots, slots, size), "{op:?}");
        assert!(residual.is_none_or(|residual| residual.len() == size), "{op:?}");
        let (len, slots) = (ROWS_PER_JOB * op.dim, ROWS_PER_JOB * op.top_k);
        let jobs = out.chunks_mut(len).zip(pos.chunks(slots).zip(weights.chunks(slots)));
        exec.run(jobs.enumerate().collect(), 2 * size * op.top_k, |(job, (out, slots))| {
            for (t, out) in out.chunks_exact_mut(op.dim).enumerate() {
                let pos = &slots.0[t * op.top_k..][..op.top_k];
                let weights = &slots.1[t * op.top_k..][..op.top_k];
                weighted_sum::<T>(exec.isa, y, pos, weights, out);
                if let Some(residual) = residual {
                    let at = (job * ROWS_PER_JOB + t) * op.dim;
                    add_first::<T>(exec.isa, &residual[at..][..op.dim], out);
                }
            }
        });
    }
}

lanes_fn! {
/// out = sum over slots of weight * row, from zero in slot order
pub(crate) fn weighted_sum<T: Float>(x: &[T], pos: &[u32], weights: &[T], out: &mut [T]) {
    let dim = out.len();
    out.fill(T::ZERO);
    for (row, weight) in pos.iter().zip(weights).filter(|(row, _)| **row != NO_EXPERT) {
        let x = &x[*row as usize * dim..][..dim];
        for (out, x) in out.iter_mut().zip(x) {
            *out = weight.fma(*x, *out);
        }
    }
}
}

lanes_fn! {
pub(crate) fn add_first<T: Float>(first: &[T], out: &mut [T]) {
    for (out, first) in out.iter_mut().zip(first) {
        *out = *first + *out;
    }
}
}
