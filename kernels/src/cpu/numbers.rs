//! See [`crate::numbers`].

use super::{CpuDevice, Float};
use crate::balance::{Balance, row};
use crate::numbers::{
    AddRouting, BalanceLosses, MoveCorrections, RouteEntropy, SumRows, tally,
};
use crate::place::NO_EXPERT;
use crate::route::Scoring;
use crate::step_numbers::StepNumbers;
use std::cmp::Ordering;

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
