//! See [`crate::Rope`].

use crate::buffer::Buffer;
use crate::cpu::{CpuDevice, ROWS_PER_JOB};
use crate::cpu::exec::lanes_fn;
use crate::cpu::float::{Float, sin_cos};
use crate::cpu::isa::Isa;
use crate::ops::norm::op::{RmsNorm, RmsNormBackward};
use crate::ops::rope::op::{NormRope, NormRopeBackward, Rope};

impl CpuDevice {
    pub(crate) fn norm_rope<T: Float>(&mut self, op: &NormRope) {
        let (rows, dim) = op.spans();
        let NormRope { eps, x, w, y, rstd, .. } = *op;
        self.rms_norm::<T>(&RmsNorm { rows, dim, eps, x, w, y, rstd });
        self.rope::<T>(&op.rope(y, false));
    }

    pub(crate) fn norm_rope_backward<T: Float>(&mut self, op: &NormRopeBackward) {
        let (rows, dim) = op.forward.spans();
        let NormRopeBackward { dy, dx, dw, accumulate_dw, .. } = *op;
        let NormRope { x, w, rstd, .. } = op.forward;
        self.rope::<T>(&op.forward.rope(dy, true));
        let accumulate_dx = false;
        let op =
            RmsNormBackward { rows, dim, x, w, rstd, dy, dx, dw, accumulate_dx, accumulate_dw };
        self.rms_norm_backward::<T>(&op);
    }
}

impl NormRope {
    fn rope(&self, x: Buffer, inverse: bool) -> Rope {
        let NormRope { tokens, heads, head_dim, theta, positions, .. } = *self;
        Rope { tokens, heads, head_dim, theta, inverse, positions, x }
    }
}

/// Positions beyond this are a wrong buffer, not a long text.
const POSITIONS_MAX: usize = 1 << 24;

/// Cosines and sines of every position met, a table per (theta, head dim).
#[derive(Debug, Default)]
pub(crate) struct Tables {
    tables: Vec<Table>,
}

#[derive(Debug)]
struct Table {
    theta: f64,
    half: usize,
    /// [positions, H]: H / 2 cosines, then as many sines
    values: Vec<f64>,
}

impl Tables {
    /// The table that covers `positions` positions.
    fn get(&mut self, theta: f64, half: usize, positions: usize) -> &[f64] {
        assert!(positions <= POSITIONS_MAX, "a position of {positions}");
        let same = |table: &Table| table.theta.to_bits() == theta.to_bits() && table.half == half;
        let found = self.tables.iter().position(same).unwrap_or_else(|| {
            self.tables.push(Table { theta, half, values: Vec::new() });
            self.tables.len() - 1
        });
        let table = &mut self.tables[found];
        let frequencies = frequencies(theta, half);
        for position in table.values.len() / (2 * half)..positions {
            let angles = frequencies.iter().map(|frequency| sin_cos(position as f64 * frequency));
            let (sines, cosines): (Vec<f64>, Vec<f64>) = angles.unzip();
            table.values.extend(cosines);
            table.values.extend(sines);
        }
        &table.values
    }
}

/// theta^(-i / half): radians a position of each of `half` elements.
pub(crate) fn frequencies(theta: f64, half: usize) -> Vec<f64> {
    let ln_theta = crate::cpu::float::ln(theta);
    (0..half).map(|i| Float::exp(-(i as f64 / half as f64) * ln_theta)).collect()
}

impl CpuDevice {
    pub(crate) fn rope<T: Float>(&mut self, op: &Rope) {
        let mut views = self.arena.views();
        let positions: &[u32] = views.read(op.positions);
        let x: &mut [T] = views.write(op.x);
        let row = op.heads * op.head_dim;
        assert_eq!((positions.len(), x.len()), (op.tokens, op.tokens * row), "{op:?}");
        assert!(op.head_dim.is_multiple_of(2), "{op:?}");
        let end = positions.iter().max().map_or(0, |position| *position as usize + 1);
        let table = self.kept.of::<Tables>().get(op.theta, op.head_dim / 2, end);
        let sign = if op.inverse { -T::ONE } else { T::ONE };
        let jobs = x.chunks_mut(ROWS_PER_JOB * row).zip(positions.chunks(ROWS_PER_JOB)).collect();
        let isa = self.exec.isa;
        self.exec.run(jobs, 4 * op.tokens * row, |(x, positions)| {
            rotate_rows::<T>(isa, x, positions, table, row, op.head_dim, sign);
        });
    }
}

lanes_fn! {
fn rotate_rows<T: Float>(
    x: &mut [T], positions: &[u32], table: &[f64], row: usize, head_dim: usize, sign: T,
) {
    for (x, position) in x.chunks_exact_mut(row).zip(positions) {
        let turns = &table[*position as usize * head_dim..][..head_dim];
        let (cosines, sines) = turns.split_at(head_dim / 2);
        for head in x.chunks_exact_mut(head_dim) {
            let (low, high) = head.split_at_mut(head_dim / 2);
            for (((a, b), c), s) in low.iter_mut().zip(high).zip(cosines).zip(sines) {
                let (c, s) = (T::of(*c), T::of(*s) * sign);
                (*a, *b) = (a.fma(c, -(*b * s)), b.fma(c, *a * s));
            }
        }
    }
}
}
