//! Losses that balance the experts, and their gradients, from the statistics of a batch.
//!
//! ```text
//! Gate -> statistics of each segment -> Balance::of -> value, and d value / d statistics
//!      -> GateBackward
//! ```
//! Pure and in f64. Letters of the equations: T tokens of the segment, E experts, f_e and g_e the
//! tokens that chose e at all and first, P_e = mean_t p[t, e] with p the scores divided by their
//! sum over the experts. Choices are counted before any is dropped, and held constant.

use crate::cpu::float::ln;
use crate::types::BalanceLoss;

/// Rows of the statistics of a segment, each [E] in f64.
pub mod row {
    /// Tokens whose first choice the expert was.
    pub const FIRST: usize = 0;
    /// Tokens that chose the expert.
    pub const CHOSEN: usize = 1;
    /// Sum over tokens of p[t, e].
    pub const PROBS: usize = 2;
    /// Importance, see [`crate::Load`].
    pub const IMPORTANCE: usize = 3;
    /// Estimated load, see [`crate::Load`].
    pub const LOAD: usize = 4;
    /// How many there are.
    pub const COUNT: usize = 5;
}

/// A loss of segments of `tokens` tokens.
#[derive(Clone, Copy, Debug)]
pub struct Balance {
    pub loss: BalanceLoss,
    pub tokens: usize,
    pub experts: usize,
}

/// Value of a loss of one segment, and its gradient by the rows PROBS, IMPORTANCE and LOAD.
#[derive(Clone, Debug, PartialEq)]
pub struct Balanced {
    pub value: f64,
    /// Each [E].
    pub probs: Vec<f64>,
    pub importance: Vec<f64>,
    pub load: Vec<f64>,
}

/// Below it a mean probability counts as this, so that its logarithm stays finite.
const PROB_MIN: f64 = 1e-300;
/// Keeps a quotient by a squared mean finite (Tutel, Tensor2Tensor).
const SQUARE_MIN: f64 = 1e-10;

impl Balance {
    /// `stats`: [5, E] as [`row`] names them.
    pub fn of(&self, stats: &[f64]) -> Balanced {
        let (tokens, e) = (self.tokens as f64, self.experts);
        assert_eq!(stats.len(), row::COUNT * e, "{self:?}");
        let of = |row: usize| &stats[row * e..][..e];
        let zeros = || vec![0.0; e];
        let mut out =
            Balanced { value: 0.0, probs: zeros(), importance: zeros(), load: zeros() };
        if self.tokens == 0 {
            return out;
        }
        let mut product = |counts: &[f64], factor: f64| {
            for ((gradient, count), sum) in out.probs.iter_mut().zip(counts).zip(of(row::PROBS)) {
                *gradient = factor * (count / tokens) / tokens;
                out.value += factor * (count / tokens * (sum / tokens));
            }
        };
        match self.loss {
            BalanceLoss::None => {}
            BalanceLoss::Switch => product(of(row::CHOSEN), e as f64),
            BalanceLoss::FirstChoice => product(of(row::FIRST), e as f64),
            BalanceLoss::Gshard => product(of(row::FIRST), 1.0 / e as f64),
            BalanceLoss::Kl => {
                for (gradient, sum) in out.probs.iter_mut().zip(of(row::PROBS)) {
                    let prob = sum / tokens;
                    let ratio = ln(e as f64 * prob.max(PROB_MIN));
                    out.value += prob * ratio;
                    *gradient = (ratio + 1.0) / tokens;
                }
            }
            BalanceLoss::LoadImportance => {
                let degrees = e as f64 - 1.0;
                out.value = 0.5
                    * (cv_squared(of(row::IMPORTANCE), degrees, 0.5, &mut out.importance)
                        + cv_squared(of(row::LOAD), degrees, 0.5, &mut out.load));
            }
            BalanceLoss::CvSquared => {
                out.value =
                    cv_squared(of(row::IMPORTANCE), e as f64, 1.0, &mut out.importance)
                        + cv_squared(of(row::LOAD), e as f64, 1.0, &mut out.load);
            }
        }
        out
    }
}

/// var / (mean^2 + 1e-10), the variance divided by `degrees`; its gradient times `factor`. One
/// expert varies from nobody: zero.
fn cv_squared(x: &[f64], degrees: f64, factor: f64, gradient: &mut [f64]) -> f64 {
    if x.len() < 2 {
        return 0.0;
    }
    let count = x.len() as f64;
    let mean = x.iter().sum::<f64>() / count;
    let variance = x.iter().fold(0.0, |sum, x| (x - mean).mul_add(x - mean, sum)) / degrees;
    let square = mean * mean + SQUARE_MIN;
    for (gradient, x) in gradient.iter_mut().zip(x) {
        let by_variance = 2.0 * (x - mean) / degrees / square;
        let by_mean = variance * 2.0 * mean / count / (square * square);
        *gradient = factor * (by_variance - by_mean);
    }
    variance / square
}
