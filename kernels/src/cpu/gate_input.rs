//! See [`crate::MaskRows`], [`crate::NormalizeRows`] and [`crate::Temper`].

use super::{CpuDevice, Float, ROWS_PER_JOB, ln};
use crate::gate_input::{
    Mask, MaskRows, NormalizeRows, NormalizeRowsBackward, Temper, TemperBackward,
};
use crate::philox::Site;

/// The least norm that a row is divided by, and the largest scale of a cosine.
const NORM_MIN: f64 = 1e-12;
const SCALE_MAX: f64 = 100.0;

impl CpuDevice {
    pub(crate) fn mask_rows<T: Float>(&mut self, op: &MaskRows) {
        let (mut views, exec) = self.split();
        let x: &[T] = views.read(op.x);
        let y: &mut [T] = views.write(op.y);
        let size = op.rows * op.dim;
        assert_eq!((x.len(), y.len()), (size, size), "{op:?}");
        let jobs = x.chunks(ROWS_PER_JOB * op.dim).zip(y.chunks_mut(ROWS_PER_JOB * op.dim));
        exec.run(jobs.enumerate().collect(), size * 16, |(job, (x, y))| {
            let rows = x.chunks_exact(op.dim).zip(y.chunks_exact_mut(op.dim));
            for (row, (x, y)) in rows.enumerate() {
                mask_row(op, job * ROWS_PER_JOB + row, x, y);
            }
        });
    }

    pub(crate) fn normalize_rows<T: Float>(&mut self, op: &NormalizeRows) {
        let (mut views, _) = self.split();
        let x: &[T] = views.read(op.x);
        let y: &mut [T] = views.write(op.y);
        let norm: &mut [f64] = views.write(op.norm);
        let size = op.rows * op.dim;
        assert_eq!((x.len(), y.len(), norm.len()), (size, size, op.rows), "{op:?}");
        for ((x, y), norm) in
            x.chunks_exact(op.dim).zip(y.chunks_exact_mut(op.dim)).zip(norm)
        {
            *norm = super::lanes::square_sum(x).sqrt();
            let divisor = norm.larger(NORM_MIN);
            y.iter_mut().zip(x).for_each(|(y, x)| *y = T::of(x.wide() / divisor));
        }
    }

    pub(crate) fn normalize_rows_backward<T: Float>(&mut self, op: &NormalizeRowsBackward) {
        let (mut views, _) = self.split();
        let y: &[T] = views.read(op.y);
        let norm: &[f64] = views.read(op.norm);
        let dy: &[T] = views.read(op.dy);
        let dx: &mut [T] = views.write(op.dx);
        let size = op.rows * op.dim;
        assert_eq!((y.len(), dy.len(), dx.len()), (size, size, size), "{op:?}");
        for (row, norm) in norm.iter().enumerate() {
            let at = row * op.dim..(row + 1) * op.dim;
            let (y, dy, dx) = (&y[at.clone()], &dy[at.clone()], &mut dx[at]);
            let clamped = *norm < NORM_MIN;
            let dot = y.iter().zip(dy).fold(0.0, |sum, (y, dy)| y.wide().mul_add(dy.wide(), sum));
            let along = if clamped { 0.0 } else { dot };
            for ((dx, dy), y) in dx.iter_mut().zip(dy).zip(y) {
                let own = T::of((dy.wide() - y.wide() * along) / norm.larger(NORM_MIN));
                *dx = if op.accumulate { *dx + own } else { own };
            }
        }
    }

    pub(crate) fn temper<T: Float>(&mut self, op: &Temper) {
        let (mut views, _) = self.split();
        let temperature: &[T] = views.read(op.temperature);
        let x: &mut [T] = views.write(op.x);
        let (scale, _) = scale_of(temperature[0].wide());
        x.iter_mut().for_each(|x| *x = T::of(x.wide() * scale));
    }

    pub(crate) fn temper_backward<T: Float>(&mut self, op: &TemperBackward) {
        let (mut views, _) = self.split();
        let temperature: &[T] = views.read(op.temperature);
        let x: &[T] = views.read(op.x);
        let dx: &mut [T] = views.write(op.dx);
        let d_temperature: &mut [T] = views.write(op.d_temperature);
        let (scale, moves) = scale_of(temperature[0].wide());
        let dot = x.iter().zip(&*dx).fold(0.0, |sum, (x, dx)| x.wide().mul_add(dx.wide(), sum));
        let own = T::of(if moves { dot } else { 0.0 });
        d_temperature[0] = if op.accumulate { d_temperature[0] + own } else { own };
        dx.iter_mut().for_each(|dx| *dx = T::of(dx.wide() * scale));
    }
}

/// The scale, and whether it follows the temperature.
fn scale_of(temperature: f64) -> (f64, bool) {
    let most = ln(SCALE_MAX);
    let moves = temperature <= most;
    (Float::exp(if moves { temperature } else { most }), moves)
}

fn mask_row<T: Float>(op: &MaskRows, row: usize, x: &[T], y: &mut [T]) {
    let site = match op.mask {
        Mask::Jitter { .. } => Site::Jitter,
        Mask::Dropout { .. } => Site::Dropout,
    };
    for (block, (x, y)) in x.chunks(4).zip(y.chunks_mut(4)).enumerate() {
        let uniforms = op.draw.uniforms(site, row, block);
        for ((x, y), u) in x.iter().zip(y).zip(uniforms) {
            let factor = match op.mask {
                Mask::Jitter { eps } => 1.0 - eps + 2.0 * eps * u,
                Mask::Dropout { p } if u < p => 0.0,
                Mask::Dropout { p } => 1.0 / (1.0 - p),
            };
            let masked = T::of(x.wide() * factor);
            *y = if op.accumulate { *y + masked } else { masked };
        }
    }
}
