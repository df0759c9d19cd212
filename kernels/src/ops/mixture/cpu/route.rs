//! The router: scores, the choice of experts, weights, load statistics and balancing losses.

use crate::buffer::Buffer;
use crate::cpu::{CpuDevice, ROWS_PER_JOB, lanes};
use crate::cpu::exec::lanes_fn;
use crate::cpu::float::Float;
use crate::cpu::isa::Isa;
use crate::types::{RouteGroups, Scoring};

/// One call is one micro-batch: its statistics are those of the auxiliary loss.
///
/// choice = probs + bias; the K experts of the largest choice, ties to the lowest id, stored in
/// ascending id. weight = scale * probs[id], with `norm_topk` divided by the sum of the K probs
/// (plus 1e-20 when sigmoid). lse[t] = ln sum_e e^logits[t, e].
///
/// Auxiliary loss (Switch Transformer, as in Hugging Face's `load_balancing_loss_func`):
/// E * sum_e load[e] * mean_prob[e], with load[e] = counts[e] / T, so that the loads sum to K and
/// perfect balance costs K; mean_prob[e] = mean_t p[t, e], p = probs for softmax and probs
/// divided by their sum over experts for sigmoid. z loss (ST-MoE): mean_t lse[t]^2.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    pub tokens: usize,
    pub experts: usize,
    pub top_k: usize,
    pub scoring: Scoring,
    pub norm_topk: bool,
    pub scale: f64,
    pub groups: Option<RouteGroups>,
    /// [T, E]
    pub logits: Buffer,
    /// [E], enters the choice only
    pub bias: Option<Buffer>,
    /// Output [T, E]
    pub probs: Buffer,
    /// Output [T]
    pub lse: Buffer,
    /// Output u32 [T, K]
    pub ids: Buffer,
    /// Output [T, K]
    pub weights: Buffer,
    /// Output u32 [E]: slots that chose each expert
    pub counts: Buffer,
    /// Output F64 [E]: sum over tokens, ascending, of p[t, e]; divide by T for mean_prob
    pub prob_sums: Buffer,
    /// Output F64 [2]: auxiliary loss, z loss, unscaled
    pub losses: Buffer,
}

/// dlogits = the gradient of <dweights, weights> + aux_coef * auxiliary loss + z_coef * z loss,
/// the choice and the loads held constant.
#[derive(Clone, Copy, Debug)]
pub struct RouteBackward {
    pub tokens: usize,
    pub experts: usize,
    pub top_k: usize,
    pub scoring: Scoring,
    pub norm_topk: bool,
    pub scale: f64,
    pub aux_coef: f64,
    pub z_coef: f64,
    /// [T, E]; needed for the z loss and nothing else
    pub logits: Buffer,
    /// [T, E]
    pub probs: Buffer,
    /// [T]
    pub lse: Buffer,
    /// u32 [T, K]
    pub ids: Buffer,
    /// u32 [E]
    pub counts: Buffer,
    /// [T, K]
    pub dweights: Buffer,
    /// Output [T, E]
    pub dlogits: Buffer,
}

/// Keeps a quotient finite when every chosen sigmoid is zero (DeepSeek-V3).
const TOP_K_SUM_MIN: f64 = 1e-20;

impl CpuDevice {
    pub fn route<T: Float>(&mut self, op: &Route) {
        let (mut views, exec) = self.split();
        let logits: &[T] = views.read(op.logits);
        let bias: Option<&[T]> = op.bias.map(|bias| views.read(bias));
        let probs: &mut [T] = views.write(op.probs);
        let lse: &mut [T] = views.write(op.lse);
        let ids: &mut [u32] = views.write(op.ids);
        let weights: &mut [T] = views.write(op.weights);
        let counts: &mut [u32] = views.write(op.counts);
        let prob_sums: &mut [f64] = views.write(op.prob_sums);
        let losses: &mut [f64] = views.write(op.losses);
        let (tokens, experts, top_k) = (op.tokens, op.experts, op.top_k);
        assert!(1 <= top_k && top_k <= experts, "{op:?}");
        assert_eq!((logits.len(), probs.len()), (tokens * experts, tokens * experts), "{op:?}");
        assert_eq!((ids.len(), weights.len()), (tokens * top_k, tokens * top_k), "{op:?}");
        assert_eq!((lse.len(), losses.len()), (tokens, 2), "{op:?}");
        assert_eq!((counts.len(), prob_sums.len()), (experts, experts), "{op:?}");
        assert!(bias.is_none_or(|bias| bias.len() == experts), "{op:?}");
        let jobs = logits
            .chunks(ROWS_PER_JOB * experts)
            .zip(probs.chunks_mut(ROWS_PER_JOB * experts))
            .zip(lse.chunks_mut(ROWS_PER_JOB))
            .zip(ids.chunks_mut(ROWS_PER_JOB * top_k))
            .zip(weights.chunks_mut(ROWS_PER_JOB * top_k));
        exec.run(jobs.collect(), tokens * experts * (16 + top_k), |job| {
            let ((((logits, probs), lse), ids), weights) = job;
            let mut choice = vec![T::ZERO; experts];
            for (t, lse) in lse.iter_mut().enumerate() {
                let probs = &mut probs[t * experts..][..experts];
                let logits = &logits[t * experts..][..experts];
                *lse = scores::<T>(exec.isa, logits, probs, op.scoring == Scoring::Softmax);
                choice.copy_from_slice(probs);
                if let Some(bias) = bias {
                    choice.iter_mut().zip(bias).for_each(|(choice, bias)| *choice += *bias);
                }
                let ids = &mut ids[t * top_k..][..top_k];
                choose(&choice, op.groups, ids);
                weigh(op, probs, ids, &mut weights[t * top_k..][..top_k]);
            }
        });
        statistics(op, probs, lse, ids, counts, prob_sums);
        let mut balance = 0.0;
        for (count, sum) in counts.iter().zip(&*prob_sums) {
            balance += f64::from(*count) / tokens as f64 * (sum / tokens as f64);
        }
        let squares = lse.iter().fold(0.0, |sum, lse| lse.wide().mul_add(lse.wide(), sum));
        losses[0] = experts as f64 * balance;
        losses[1] = squares / tokens as f64;
    }

    pub fn route_backward<T: Float>(&mut self, op: &RouteBackward) {
        let (mut views, exec) = self.split();
        let logits: &[T] = views.read(op.logits);
        let probs: &[T] = views.read(op.probs);
        let lse: &[T] = views.read(op.lse);
        let ids: &[u32] = views.read(op.ids);
        let counts: &[u32] = views.read(op.counts);
        let dweights: &[T] = views.read(op.dweights);
        let dlogits: &mut [T] = views.write(op.dlogits);
        let (tokens, experts, top_k) = (op.tokens, op.experts, op.top_k);
        let size = tokens * experts;
        assert_eq!((logits.len(), probs.len(), dlogits.len()), (size, size, size), "{op:?}");
        assert_eq!((ids.len(), dweights.len()), (tokens * top_k, tokens * top_k), "{op:?}");
        assert_eq!((lse.len(), counts.len()), (tokens, experts), "{op:?}");
        // d(auxiliary loss) / d p[t, e]: E * load[e] / T
        let per_load = op.aux_coef * experts as f64 / (tokens as f64 * tokens as f64);
        let balance: Vec<f64> = counts.iter().map(|c| per_load * f64::from(*c)).collect();
        let z = 2.0 * op.z_coef / tokens as f64;
        let jobs = dlogits.chunks_mut(ROWS_PER_JOB * experts).enumerate().collect();
        exec.run(jobs, size * 32, |(job, dlogits)| {
            let mut d = vec![0.0; experts];
            for (t, dlogits) in dlogits.chunks_exact_mut(experts).enumerate() {
                let t = job * ROWS_PER_JOB + t;
                let row = Row {
                    logits: &logits[t * experts..][..experts],
                    probs: &probs[t * experts..][..experts],
                    ids: &ids[t * top_k..][..top_k],
                    dweights: &dweights[t * top_k..][..top_k],
                    lse: lse[t],
                    z: z * lse[t].wide(),
                };
                backward_row(exec.isa, op, &row, &balance, &mut d, dlogits);
            }
        });
    }
}

/// The K experts of the largest choice among the kept groups, ascending; ties go to the lowest id.
/// Also of numbers that are none: always K different experts.
pub(crate) fn choose<T: Float>(choice: &[T], groups: Option<RouteGroups>, ids: &mut [u32]) {
    best_first(choice, groups, ids);
    ids.sort_unstable();
}

/// The same, the best first.
pub(crate) fn best_first<T: Float>(choice: &[T], groups: Option<RouteGroups>, ids: &mut [u32]) {
    let kept = groups.map(|groups| kept_experts(choice, groups));
    let allowed = |e: usize| kept.as_ref().is_none_or(|kept| kept[e]);
    for slot in 0..ids.len() {
        let (chosen, rest) = ids.split_at_mut(slot);
        let free = |e: &usize| allowed(*e) && !chosen.contains(&(*e as u32));
        let best = (0..choice.len()).filter(free).reduce(|best, e| {
            if choice[e] > choice[best] { e } else { best }
        });
        rest[0] = best.expect("the kept groups hold at least top_k experts") as u32;
    }
}

/// Which experts lie in the groups whose two best choices have the largest sums.
fn kept_experts<T: Float>(choice: &[T], groups: RouteGroups) -> Vec<bool> {
    assert!(choice.len().is_multiple_of(groups.count) && groups.kept <= groups.count);
    let size = choice.len() / groups.count;
    let score = |group: &[T]| {
        let (mut first, mut second) = (T::NEG_INFINITY, T::NEG_INFINITY);
        for x in group {
            if *x > first {
                (first, second) = (*x, first);
            } else if *x > second {
                second = *x;
            }
        }
        if size == 1 { first } else { first + second }
    };
    let scores: Vec<T> = choice.chunks_exact(size).map(score).collect();
    let mut chosen = vec![0; groups.kept];
    choose(&scores, None, &mut chosen);
    (0..choice.len()).map(|e| chosen.contains(&((e / size) as u32))).collect()
}

/// The routing weights of one token.
fn weigh<T: Float>(op: &Route, probs: &[T], ids: &[u32], weights: &mut [T]) {
    let divisor = if op.norm_topk { top_sum(op.scoring, probs, ids) } else { T::ONE };
    for (weight, id) in weights.iter_mut().zip(ids) {
        *weight = T::of(op.scale) * (probs[*id as usize] / divisor);
    }
}

fn top_sum<T: Float>(scoring: Scoring, probs: &[T], ids: &[u32]) -> T {
    let sum = ids.iter().fold(T::ZERO, |sum, id| sum + probs[*id as usize]);
    if scoring == Scoring::Sigmoid { sum + T::of(TOP_K_SUM_MIN) } else { sum }
}

fn statistics<T: Float>(
    op: &Route,
    probs: &[T],
    lse: &[T],
    ids: &[u32],
    counts: &mut [u32],
    prob_sums: &mut [f64],
) {
    debug_assert_eq!(lse.len(), op.tokens);
    counts.fill(0);
    for id in ids {
        counts[*id as usize] += 1;
    }
    prob_sums.fill(0.0);
    for probs in probs.chunks_exact(op.experts) {
        let total = match op.scoring {
            Scoring::Softmax => 1.0,
            Scoring::Sigmoid => lanes::sum(probs).wide(),
        };
        for (sum, p) in prob_sums.iter_mut().zip(probs) {
            *sum += p.wide() / total;
        }
    }
}

/// One token of the backward pass.
struct Row<'a, T> {
    logits: &'a [T],
    probs: &'a [T],
    ids: &'a [u32],
    dweights: &'a [T],
    lse: T,
    /// d(z loss) / d lse, with its coefficient
    z: f64,
}

/// In f64, because means are taken from what they are the means of: with normalised weights and one
/// expert a token, or all of them, nothing is left, and rounding must not take its place. `d` is
/// room for a row.
fn backward_row<T: Float>(
    isa: Isa,
    op: &RouteBackward,
    row: &Row<'_, T>,
    balance: &[f64],
    d: &mut [f64],
    dlogits: &mut [T],
) {
    let probs = row.probs;
    // d(all but z loss) / d probs
    d.copy_from_slice(balance);
    if op.scoring == Scoring::Sigmoid {
        // p = probs / total: d/dprobs = (d/dp - <d/dp, p>) / total
        let (total, mean) = mean_by(balance, probs);
        d.iter_mut().for_each(|d| *d = (*d - mean) / total);
    }
    let slots = || row.ids.iter().zip(row.dweights).map(|(id, dw)| (*id as usize, dw.wide()));
    let (sum, mean) = if op.norm_topk {
        let of_zeros = if op.scoring == Scoring::Sigmoid { TOP_K_SUM_MIN } else { 0.0 };
        let sum = slots().fold(of_zeros, |sum, (id, _)| sum + probs[id].wide());
        (sum, slots().fold(0.0, |dot, (id, dw)| probs[id].wide().mul_add(dw, dot)) / sum)
    } else {
        (1.0, 0.0)
    };
    for (id, dw) in slots() {
        d[id] += op.scale * (dw - mean) / sum;
    }
    let softmax = op.scoring == Scoring::Softmax;
    through_scores::<T>(isa, row.logits, probs, softmax, row.lse, row.z, d, dlogits);
}

/// The sum of the weights, and the mean of `values` under them.
#[inline(always)]
fn mean_by<T: Float>(values: &[f64], weights: &[T]) -> (f64, f64) {
    let mut totals = [0.0; lanes::LANES];
    let mut dots = [0.0; lanes::LANES];
    for (x, weights) in values.chunks(lanes::LANES).zip(weights.chunks(lanes::LANES)) {
        for (l, (x, weight)) in x.iter().zip(weights).enumerate() {
            totals[l] += weight.wide();
            dots[l] = weight.wide().mul_add(*x, dots[l]);
        }
    }
    let total = lanes::tree(totals);
    (total, lanes::tree(dots) / total)
}

lanes_fn! {
/// Scores of one row of logits, and ln sum_e e^logit.
pub(crate) fn scores<T: Float>(logits: &[T], probs: &mut [T], softmax: bool) -> T {
    probs.copy_from_slice(logits);
    let (max, sum) = lanes::exponentials(probs, T::ONE);
    if softmax {
        for p in probs.iter_mut() {
            *p = *p / sum;
        }
    } else {
        for (p, x) in probs.iter_mut().zip(logits) {
            *p = x.sigmoid();
        }
    }
    max + sum.ln()
}
}

lanes_fn! {
/// From d/dprobs to d/dlogits, the z loss added. The probabilities of a softmax are rounded, so
/// that their sum is not quite 1; the mean is over what it is.
fn through_scores<T: Float>(
    logits: &[T], probs: &[T], softmax: bool, lse: T, z: f64, d: &[f64], dlogits: &mut [T],
) {
    if softmax {
        let (_, mean) = mean_by(d, probs);
        for ((out, d), p) in dlogits.iter_mut().zip(d).zip(probs) {
            *out = T::of(p.wide() * (*d - mean + z));
        }
    } else {
        for (((out, d), p), x) in dlogits.iter_mut().zip(d).zip(probs).zip(logits) {
            let p = p.wide();
            *out = T::of(d * p * (1.0 - p) + z * (*x - lse).exp().wide());
        }
    }
}
}
