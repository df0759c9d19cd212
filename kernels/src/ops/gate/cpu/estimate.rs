//! Estimates of the experts' load that have a gradient, and the normal distribution they need.

use crate::cpu::float::Float;
use crate::ops::gate::op::{Gate, Load};
use crate::ops::mixture::cpu::route::best_first;
use crate::ops::router::balance::row;
use crate::types::NO_EXPERT;

/// A deviation below it counts as this, so that quotients stay finite.
const DEVIATION_MIN: f64 = 1e-30;

/// One token, as its load is estimated.
pub(crate) struct Estimate<'a, T> {
    pub op: &'a Gate,
    /// [E] each
    pub logits: &'a [T],
    pub noisy: &'a [T],
    pub raw: Option<&'a [T]>,
}

/// Gradients of one token by its logits, its logits with noise, and the raw deviations.
#[derive(Debug)]
pub(crate) struct Gradients {
    /// [E] each
    pub logits: Vec<f64>,
    pub noisy: Vec<f64>,
    pub raw: Vec<f64>,
}

impl Gradients {
    pub fn clear(&mut self) {
        for part in [&mut self.logits, &mut self.noisy, &mut self.raw] {
            part.fill(0.0);
        }
    }
}

impl<T: Float> Estimate<'_, T> {
    /// Adds the token to importance (Tutel's) and load.
    pub fn add(&self, stats: &mut [f64]) {
        let e = self.logits.len();
        match self.op.load {
            Load::None => {}
            Load::Tutel { std } => {
                let threshold = self.noisy[self.best(self.op.top_k)[self.op.top_k - 1]].wide();
                for (expert, p) in softmax(self.logits).into_iter().enumerate() {
                    stats[row::IMPORTANCE * e + expert] += p;
                    stats[row::LOAD * e + expert] += normal_cdf((p - threshold) / std);
                }
            }
            Load::Shazeer { .. } => {
                let best = self.best((self.op.top_k + 1).min(e));
                for expert in 0..e {
                    let margin = self.margin(expert, &best);
                    let load = margin.map_or(1.0, |margin| normal_cdf(margin.z));
                    stats[row::LOAD * e + expert] += load;
                }
            }
        }
    }

    /// Adds the gradient of <importance, `importance`> (Tutel's) + <load, `load`>.
    pub fn backward(&self, importance: &[f64], load: &[f64], out: &mut Gradients) {
        match self.op.load {
            Load::None => {}
            Load::Tutel { std } => {
                let kth = self.best(self.op.top_k)[self.op.top_k - 1];
                let threshold = self.noisy[kth].wide();
                let probs = softmax(self.logits);
                let mut by_prob = importance.to_vec();
                for ((by_prob, p), load) in by_prob.iter_mut().zip(&probs).zip(load) {
                    let slope = load * normal_pdf((p - threshold) / std) / std;
                    *by_prob += slope;
                    out.noisy[kth] -= slope;
                }
                let mean = by_prob.iter().zip(&probs).fold(0.0, |sum, (d, p)| sum + d * p);
                for ((out, d), p) in out.logits.iter_mut().zip(&by_prob).zip(&probs) {
                    *out += p * (d - mean);
                }
            }
            Load::Shazeer { .. } => {
                let best = self.best((self.op.top_k + 1).min(load.len()));
                for (expert, load) in load.iter().enumerate() {
                    let Some(margin) = self.margin(expert, &best) else { continue };
                    let slope = load * normal_pdf(margin.z) / margin.std;
                    if slope == 0.0 {
                        continue;
                    }
                    out.logits[expert] += slope;
                    out.noisy[margin.threshold] -= slope;
                    out.raw[expert] -= slope * margin.z * sigmoid(margin.raw);
                }
            }
        }
    }

    /// The experts of the `count` largest logits with noise, the largest first.
    fn best(&self, count: usize) -> Vec<usize> {
        let mut best = vec![NO_EXPERT; count];
        best_first(self.noisy, None, &mut best);
        best.into_iter().map(|id| id as usize).collect()
    }

    /// By how many deviations a logit lies above the K-th largest of the others, which is one of
    /// the `best` K + 1. None where each expert is chosen whatever the noise.
    fn margin(&self, expert: usize, best: &[usize]) -> Option<Margin> {
        let k = self.op.top_k;
        if k >= self.logits.len() {
            return None;
        }
        let threshold = if best[..k].contains(&expert) { best[k] } else { best[k - 1] };
        let raw = self.raw.map_or(0.0, |raw| raw[expert].wide());
        let std = softplus(raw).max(DEVIATION_MIN);
        let z = (self.logits[expert].wide() - self.noisy[threshold].wide()) / std;
        Some(Margin { threshold, raw, std, z })
    }
}

struct Margin {
    /// The expert whose logit is the threshold.
    threshold: usize,
    raw: f64,
    std: f64,
    z: f64,
}

fn softmax<T: Float>(logits: &[T]) -> Vec<f64> {
    let max = logits.iter().fold(f64::NEG_INFINITY, |max, x| max.larger(x.wide()));
    let mut probs: Vec<f64> = logits.iter().map(|x| Float::exp(x.wide() - max)).collect();
    let sum = probs.iter().fold(0.0, |sum, p| sum + p);
    probs.iter_mut().for_each(|p| *p /= sum);
    probs
}

pub(crate) fn sigmoid(x: f64) -> f64 {
    Float::sigmoid(x)
}

/// ln(1 + e^x), within a few ulp for all x.
pub(crate) fn softplus(x: f64) -> f64 {
    let small = Float::exp(-x.abs());
    x.larger(0.0) + ln_1p(small)
}

/// ln(1 + x) of x in [0, 1]: 2 atanh(x / (2 + x)), the series in s^2 <= 1/9.
fn ln_1p(x: f64) -> f64 {
    let s = x / (2.0 + x);
    let s2 = s * s;
    let sum = (0..20).rev().fold(0.0, |sum: f64, n| sum.mul_add(s2, 1.0 / f64::from(2 * n + 1)));
    2.0 * s * sum
}

/// e^(-x^2 / 2) / sqrt(2 pi)
pub(crate) fn normal_pdf(x: f64) -> f64 {
    const INV_SQRT_2PI: f64 = 0.398_942_280_401_432_7;
    INV_SQRT_2PI * Float::exp(-0.5 * x * x)
}

/// The standard normal distribution function, within 1e-15: 1/2 + phi(x) (x + x^3 / 3 + x^5 / 15 +
/// ...), the terms being x^(2n+1) / (2n+1)!!, all of one sign.
pub(crate) fn normal_cdf(x: f64) -> f64 {
    // Beyond it the tail is below half an ulp of one.
    const END: f64 = 8.5;
    if x >= END {
        return 1.0;
    }
    if x <= -END {
        return 0.0;
    }
    let (mut term, mut sum, mut odd) = (x, x, 1.0);
    while term.abs() > 1e-18 * sum.abs() {
        odd += 2.0;
        term *= x * x / odd;
        sum += term;
    }
    0.5 + normal_pdf(x) * sum
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_normal_distribution_is_accurate() {
        // Tables of the distribution function, to 15 digits.
        for (x, expected) in [
            (0.0, 0.5),
            (1.0, 0.841_344_746_068_542_9),
            (-1.96, 0.024_997_895_148_220_435),
            (3.0, 0.998_650_101_968_369_9),
            (-5.0, 2.866_515_718_791_939e-7),
        ] {
            let found = normal_cdf(x);
            assert!((found - expected).abs() < 1e-14, "{x}: {found}, expected {expected}");
        }
        assert_eq!((normal_cdf(9.0), normal_cdf(-9.0)), (1.0, 0.0));
        for i in -800..800 {
            let (x, h) = (f64::from(i) * 0.01, 1e-5);
            let slope = (normal_cdf(x + h) - normal_cdf(x - h)) / (2.0 * h);
            assert!((slope - normal_pdf(x)).abs() < 1e-9, "{x}: {slope}");
            assert!((normal_cdf(x) + normal_cdf(-x) - 1.0).abs() < 1e-14, "{x}");
        }
    }

    #[test]
    fn softplus_is_accurate_on_both_sides() {
        for i in -7000..7000 {
            let x = f64::from(i) * 0.01;
            let expected = x.max(0.0) + (-x.abs()).exp().ln_1p();
            assert!((softplus(x) - expected).abs() <= 4e-16 * (1.0 + 2.0 * expected), "{x}");
            assert!(softplus(x) > 0.0 && (softplus(x) / expected - 1.0).abs() < 1e-14, "{x}");
        }
        assert_eq!((softplus(-1e4), softplus(1e4)), (0.0, 1e4));
    }
}
