//! See [`crate::Gate`].
//!
//! ```text
//! logits -> noisy, scores -> choose.rs: rank order -> capacity -> weights -> estimate.rs: load
//! backward.rs: the same, from the end
//! ```

mod backward;
mod choose;
pub(crate) mod estimate;

use choose::{Capacity, first_of, rank_order, take};
use estimate::{Estimate, softplus};

use crate::buffer::Buffer;
use crate::cpu::{CpuDevice, ROWS_PER_JOB};
use crate::cpu::float::{Float, ln};
use crate::ops::gate::op::{Choice, Gate, Load, LogitNoise};
use crate::ops::mixture::cpu::route::scores;
use crate::ops::router::balance::row;
use crate::philox::{Draw, Site};
use crate::types::{NO_EXPERT, Scoring};

/// Keeps a quotient finite when every chosen sigmoid is zero (DeepSeek-V3).
const TOP_K_SUM_MIN: f64 = 1e-20;
/// A score below it counts as this in a logarithm.
const PROB_MIN: f64 = 1e-300;

impl CpuDevice {
    pub(crate) fn gate<T: Float>(&mut self, op: &Gate) {
        op.check();
        self.scores_with_noise::<T>(op);
        let (mut views, _) = self.split();
        let (t, e, k) = (op.tokens, op.experts, op.top_k);
        let logits: &[T] = views.read(op.logits);
        let noisy: &[T] = views.read(op.noisy);
        let probs: &[T] = views.read(op.probs);
        let lse: &[T] = views.read(op.lse);
        let bias: Option<&[T]> = op.bias.map(|bias| views.read(bias));
        let words: &[u32] = views.read(op.words);
        let positions: &[u32] = views.read(op.positions);
        let raw: Option<&[T]> = raw_of(op).map(|raw| views.read(raw));
        let before: &[u32] = op.before.map_or(&[], |before| views.read(before));
        let chosen: &mut [u32] = views.write(op.chosen);
        let ids: &mut [u32] = views.write(op.ids);
        let weights: &mut [T] = views.write(op.weights);
        let first: &mut [u32] = views.write(op.first);
        let counts: &mut [u32] = views.write(op.counts);
        let dropped: &mut [u32] = views.write(op.dropped);
        let stats: &mut [f64] = views.write(op.stats);
        let losses: &mut [f64] = views.write(op.losses);
        let mut ranked = vec![NO_EXPERT; t * k];
        rank_order(op, probs, bias, [words, positions, before], &mut ranked);
        chosen.copy_from_slice(&ranked);
        chosen.chunks_exact_mut(k).for_each(<[u32]>::sort_unstable);
        let mut capacity = Capacity { counts, dropped };
        let kept = take(op, probs, &ranked, &mut capacity);
        first.copy_from_slice(&first_of(op, probs, &ranked));
        stats.fill(0.0);
        losses.fill(0.0);
        let mut weighed = vec![0.0; k];
        for token in 0..t {
            let at = token * k..(token + 1) * k;
            let row = Token::new(op, &probs[token * e..][..e], &chosen[at.clone()]);
            row.weights(&mut weighed);
            for slot in at.clone() {
                let expert = chosen[slot];
                let stays = expert != NO_EXPERT && kept[slot];
                ids[slot] = if stays { expert } else { NO_EXPERT };
                let weight = if stays { op.scale * weighed[slot - at.start] } else { 0.0 };
                weights[slot] = T::of(weight);
            }
            let segment = token / (t / op.segments);
            let stats = &mut stats[segment * row::COUNT * e..][..row::COUNT * e];
            row.statistics(&weighed, first[token], stats);
            let estimate = Estimate {
                op,
                logits: &logits[token * e..][..e],
                noisy: &noisy[token * e..][..e],
                raw: raw.map(|raw| &raw[token * e..][..e]),
            };
            estimate.add(stats);
            let lse = lse[token].wide();
            losses[0] += lse * lse / t as f64;
            losses[1] += row.entropy() / t as f64;
        }
    }

    /// noisy = logits + noise, probs and lse of that.
    fn scores_with_noise<T: Float>(&mut self, op: &Gate) {
        let (mut views, exec) = self.split();
        let (t, e) = (op.tokens, op.experts);
        let probs: &mut [T] = views.write(op.probs);
        let lse: &mut [T] = views.write(op.lse);
        let noisy: &mut [T] = views.write(op.noisy);
        if matches!(op.choice, Choice::Hash { .. }) {
            // Filled by the choice.
            probs.fill(T::ZERO);
            lse.fill(T::ZERO);
            noisy.fill(T::ZERO);
            let words: &[u32] = views.read(op.words);
            for (word, probs) in words.iter().zip(probs.chunks_exact_mut(e)) {
                let share = T::of(1.0 / op.top_k as f64);
                choose::hashed(op, *word).iter().for_each(|id| probs[*id as usize] = share);
            }
            return;
        }
        let logits: &[T] = views.read(op.logits);
        let raw: Option<&[T]> = match op.noise {
            LogitNoise::Learned { raw } => Some(views.read(raw)),
            _ => None,
        };
        let jobs = logits
            .chunks(ROWS_PER_JOB * e)
            .zip(noisy.chunks_mut(ROWS_PER_JOB * e))
            .zip(probs.chunks_mut(ROWS_PER_JOB * e))
            .zip(lse.chunks_mut(ROWS_PER_JOB))
            .enumerate()
            .collect();
        exec.run(jobs, t * e * 64, |(job, (((logits, noisy), probs), lse))| {
            for (i, lse) in lse.iter_mut().enumerate() {
                let token = job * ROWS_PER_JOB + i;
                let noisy = &mut noisy[i * e..][..e];
                noisy.copy_from_slice(&logits[i * e..][..e]);
                let raw = raw.map(|raw| &raw[token * e..][..e]);
                add_noise(op, token, raw, noisy);
                let softmax = op.scoring == Scoring::Softmax;
                *lse = scores::<T>(exec.isa, noisy, &mut probs[i * e..][..e], softmax);
            }
        });
    }
}

/// The deviations before softplus, where there are any.
fn raw_of(op: &Gate) -> Option<Buffer> {
    match (op.noise, op.load) {
        (LogitNoise::Learned { raw }, _) | (_, Load::Shazeer { raw }) => Some(raw),
        _ => None,
    }
}

/// The deviation of a logit's noise.
fn deviation<T: Float>(op: &Gate, raw: Option<&[T]>, expert: usize) -> f64 {
    match (op.noise, raw) {
        (LogitNoise::Normal { std }, _) => std,
        (LogitNoise::Learned { .. }, Some(raw)) => softplus(raw[expert].wide()),
        _ => 0.0,
    }
}

fn noise_of(draw: &Draw, token: usize, expert: usize) -> f64 {
    draw.normal(Site::Logits, token, expert)
}

fn add_noise<T: Float>(op: &Gate, token: usize, raw: Option<&[T]>, noisy: &mut [T]) {
    let Some(draw) = op.draw.filter(|_| op.noise != LogitNoise::None) else { return };
    for (expert, x) in noisy.iter_mut().enumerate() {
        let noise = noise_of(&draw, token, expert) * deviation(op, raw, expert);
        *x = T::of(x.wide() + noise);
    }
}

/// The scores and choices of one token.
struct Token<'a, T> {
    op: &'a Gate,
    /// [E]
    probs: &'a [T],
    /// [K]
    chosen: &'a [u32],
    /// Sum of all scores: 1 of softmax.
    total: f64,
    /// What scores of choices are divided by, and whether that is their sum.
    divisor: f64,
    normed: bool,
}

impl<'a, T: Float> Token<'a, T> {
    fn new(op: &'a Gate, probs: &'a [T], chosen: &'a [u32]) -> Token<'a, T> {
        let sigmoid = op.scoring == Scoring::Sigmoid;
        let all = || probs.iter().fold(0.0, |sum, p| sum + p.wide());
        let choices = chosen.iter().filter(|id| **id != NO_EXPERT);
        let sum = choices.fold(0.0, |sum, id| sum + probs[*id as usize].wide());
        let sum = if sigmoid { sum + TOP_K_SUM_MIN } else { sum };
        // Experts may choose a token of whose probability nothing is left.
        let normed = op.norm_topk && sum > 0.0;
        let divisor = if normed { sum } else { 1.0 };
        // Of sigmoids that are all zero nothing can be shared out.
        let total = if sigmoid { all().max(TOP_K_SUM_MIN) } else { 1.0 };
        Token { op, probs, chosen, total, divisor, normed }
    }

    /// The share of each slot, before `scale`.
    fn weights(&self, out: &mut [f64]) {
        for (out, id) in out.iter_mut().zip(self.chosen) {
            *out = match *id {
                NO_EXPERT => 0.0,
                id => self.probs[id as usize].wide() / self.divisor,
            };
        }
    }

    /// Score over the sum of all.
    fn share(&self, expert: usize) -> f64 {
        self.probs[expert].wide() / self.total
    }

    fn entropy(&self) -> f64 {
        (0..self.probs.len()).fold(0.0, |sum, expert| {
            let share = self.share(expert);
            sum - share * ln(share.max(PROB_MIN))
        })
    }

    /// Adds the token to its segment's statistics, the estimates of importance by Tutel and of
    /// load excepted.
    fn statistics(&self, weights: &[f64], first: u32, stats: &mut [f64]) {
        let e = self.probs.len();
        if first != NO_EXPERT {
            stats[row::FIRST * e + first as usize] += 1.0;
        }
        for (weight, id) in weights.iter().zip(self.chosen).filter(|(_, id)| **id != NO_EXPERT) {
            stats[row::CHOSEN * e + *id as usize] += 1.0;
            if matches!(self.op.load, Load::Shazeer { .. }) {
                stats[row::IMPORTANCE * e + *id as usize] += weight;
            }
        }
        for expert in 0..e {
            stats[row::PROBS * e + expert] += self.share(expert);
        }
    }
}
