//! See [`crate::numbers`].

use std::cmp::Ordering;

use crate::cpu::{CpuDevice, ROWS_PER_JOB};
use crate::cpu::float::{Float, ln};
use crate::ops::bucket::step_numbers::StepNumbers;
use crate::ops::router::balance::{Balance, row};
use crate::ops::router::op::{
    AddRouting, BalanceLosses, Mask, MaskRows, MoveCorrections, NormalizeRows,
    NormalizeRowsBackward, RouteEntropy, SumRows, Temper, TemperBackward, tally,
};
use crate::philox::Site;
use crate::types::{NO_EXPERT, Scoring};

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
            *norm = crate::cpu::lanes::square_sum(x).sqrt();
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

impl CpuDevice {
    pub(crate) fn route_entropy<T: Float>(&mut self, op: &RouteEntropy) {
        let (mut views, _) = self.split();
        let probs: &[T] = views.read(op.probs);
        let logits: &[T] = views.read(op.logits);
        let lse: &[T] = views.read(op.lse);
        let entropy: &mut [f64] = views.write(op.entropy);
        let size = lse.len() * op.experts;
        assert_eq!((probs.len(), logits.len(), entropy.len()), (size, size, 1), "{op:?}");
        let rows = probs.chunks_exact(op.experts).zip(logits.chunks_exact(op.experts)).zip(lse);
        let sum = rows.fold(0.0, |sum, ((probs, logits), lse)| {
            sum + match op.scoring {
                Scoring::Softmax => of_softmax(probs, logits, *lse),
                Scoring::Sigmoid => of_shares(probs),
            }
        });
        entropy[0] = sum / lse.len() as f64;
    }

    pub(crate) fn balance_losses(&mut self, op: &BalanceLosses) {
        let (mut views, _) = self.split();
        let stats: &[f64] = views.read(op.stats);
        let value: &mut [f64] = views.write(op.value);
        let width = row::COUNT * op.experts;
        assert!(stats.len().is_multiple_of(width) && value.len() == 1, "{op:?}");
        let segments = (stats.len() / width) as f64;
        let balance = Balance { loss: op.loss, tokens: op.tokens, experts: op.experts };
        let mut gradient = op.gradient.map(|(into, factor)| {
            let into: &mut [f64] = views.write(into);
            assert_eq!(into.len(), stats.len() / row::COUNT * 3, "{op:?}");
            (into.chunks_exact_mut(3 * op.experts), factor / segments)
        });
        let mut sum = 0.0;
        for stats in stats.chunks_exact(width) {
            let part = balance.of(stats);
            sum += part.value;
            if let Some((into, factor)) = &mut gradient {
                let d = part.probs.iter().chain(&part.importance).chain(&part.load);
                let into = into.next().expect("a gradient a segment");
                into.iter_mut().zip(d).for_each(|(into, d)| *into = d * *factor);
            }
        }
        value[0] = sum / segments;
    }

    pub(crate) fn add_routing(&mut self, op: &AddRouting) {
        let (mut views, _) = self.split();
        let losses: &[f64] = views.read(op.losses);
        let counts: &[u32] = views.read(op.counts);
        let dropped: Option<&[u32]> = op.dropped.map(|dropped| views.read(dropped));
        let chosen: &[u32] = views.read(op.chosen);
        let ids: &[u32] = views.read(op.ids);
        let positions: &[u32] = views.read(op.positions);
        let record: &mut [f64] = views.write(op.record);
        let tally: &mut [f64] = views.write(op.tally);
        let loads: &mut [f64] = views.write(op.loads);
        let drops: &mut [f64] = views.write(op.drops);
        let slots = positions.len() * op.top_k;
        assert_eq!((chosen.len(), ids.len()), (slots, slots), "{op:?}");
        assert_eq!((losses.len(), record.len(), tally.len()), (3, 3, tally::ROUTED), "{op:?}");
        record.iter_mut().zip(losses).for_each(|(sum, loss)| *sum += loss);
        loads.iter_mut().zip(counts).for_each(|(sum, count)| *sum += f64::from(*count));
        if let Some(dropped) = dropped {
            drops.iter_mut().zip(dropped).for_each(|(sum, count)| *sum += f64::from(*count));
            let mut tokens = ids.chunks_exact(op.top_k);
            let empty = |ids: &&[u32]| ids.iter().all(|id| *id == NO_EXPERT);
            tally[tally::UNROUTED] += tokens.by_ref().filter(empty).count() as f64;
        }
        let (followed, switched) = switches(chosen, positions, op.top_k);
        tally[tally::FOLLOWED] += followed as f64;
        tally[tally::SWITCHED] += switched as f64;
        tally[tally::ENTROPIES] += 1.0;
    }

    pub(crate) fn sum_rows(&mut self, op: &SumRows) {
        let (mut views, _) = self.split();
        let x: &[f64] = views.read(op.x);
        let out: &mut [f64] = views.write(op.out);
        out.fill(0.0);
        for x in x.chunks_exact(out.len().max(1)) {
            out.iter_mut().zip(x).for_each(|(sum, x)| *sum += x);
        }
    }

    pub(crate) fn move_corrections<T: Float>(&mut self, op: &MoveCorrections) {
        let (mut views, _) = self.split();
        let numbers: &[f64] = views.read(op.numbers);
        let bias: &mut [T] = views.write(op.bias);
        if StepNumbers::is_skipped(numbers) {
            return;
        }
        let loads = &numbers[op.loads.clone()];
        assert_eq!(loads.len(), bias.len(), "{op:?}");
        let total: u128 = loads.iter().map(|load| *load as u128).sum();
        for (bias, load) in bias.iter_mut().zip(loads) {
            *bias = T::of(corrected(bias.wide(), op.rate, *load as u128, total, loads.len()));
        }
    }
}

/// The correction of an expert after a step in which `count` of `total` slots chose it.
fn corrected(bias: f64, rate: f64, count: u128, total: u128, experts: usize) -> f64 {
    match (count * experts as u128).cmp(&total) {
        Ordering::Less => bias + rate,
        Ordering::Equal => bias,
        Ordering::Greater => bias - rate,
    }
}

/// Choices of tokens that stand behind another in their text, and those of them that the token
/// before did not make.
fn switches(chosen: &[u32], positions: &[u32], top_k: usize) -> (u64, u64) {
    let (mut followed, mut switched) = (0, 0);
    let tokens = chosen.chunks_exact(top_k);
    let pairs = tokens.clone().zip(tokens.skip(1)).zip(positions.iter().skip(1));
    for ((before, now), _) in pairs.filter(|(_, position)| **position != 0) {
        for id in now.iter().filter(|id| **id != NO_EXPERT) {
            followed += 1;
            switched += u64::from(!before.contains(id));
        }
    }
    (followed, switched)
}

fn of_softmax<T: Float>(probs: &[T], logits: &[T], lse: T) -> f64 {
    let slots = probs.iter().zip(logits);
    let mean = slots.fold(0.0, |sum, (p, x)| p.wide().mul_add(x.wide(), sum));
    lse.wide() - mean
}

fn of_shares<T: Float>(scores: &[T]) -> f64 {
    let total = scores.iter().fold(0.0, |sum, p| sum + p.wide());
    scores.iter().fold(0.0, |sum, p| {
        let share = p.wide() / total.max(1e-20);
        sum - share * Float::ln(share.max(1e-300))
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_correction_moves_against_the_load() {
        let of = |count| corrected(0.5, 0.25, count, 12, 4);
        assert_eq!([of(0), of(2), of(3), of(4), of(12)], [0.75, 0.75, 0.5, 0.25, 0.25]);
        // The mean of 7 over 3 lies between 2 and 3.
        assert_eq!([2, 3].map(|count| corrected(0.0, 1.0, count, 7, 3)), [1.0, -1.0]);
    }

    #[test]
    fn a_text_begins_at_position_zero() {
        // Two texts of two tokens, two experts each; the second token of the first switches once.
        let chosen = [0, 1, 1, 2, 3, NO_EXPERT, 3, NO_EXPERT];
        assert_eq!(switches(&chosen, &[0, 1, 0, 1], 2), (3, 1));
        assert_eq!(switches(&chosen, &[0, 1, 2, 3], 2), (4, 2));
    }
}
