//! See [`crate::GateBackward`].

use crate::cpu::{CpuDevice, ROWS_PER_JOB};
use crate::cpu::float::{Float, ln};
use crate::ops::gate::cpu::{PROB_MIN, Token, noise_of, raw_of};
use crate::ops::gate::cpu::estimate::{Estimate, Gradients, sigmoid};
use crate::ops::gate::op::{GateBackward, Load, LogitNoise};
use crate::types::{NO_EXPERT, Scoring};

/// Everything that one token's gradient is made of.
struct Row<'a, T> {
    op: &'a GateBackward,
    token: usize,
    /// The scale of all losses, and so of their gradients.
    times: f64,
    scores: Token<'a, T>,
    estimate: Estimate<'a, T>,
    lse: f64,
    /// [K]
    ids: &'a [u32],
    dweights: &'a [T],
    /// [3, E] of the token's segment
    dstats: &'a [f64],
}

impl CpuDevice {
    pub(crate) fn gate_backward<T: Float>(&mut self, op: &GateBackward) {
        let (mut views, exec) = self.split();
        let gate = &op.forward;
        let (t, e, k) = (gate.tokens, gate.experts, gate.top_k);
        let logits: &[T] = views.read(gate.logits);
        let noisy: &[T] = views.read(gate.noisy);
        let probs: &[T] = views.read(gate.probs);
        let lse: &[T] = views.read(gate.lse);
        let raw: Option<&[T]> = raw_of(gate).map(|raw| views.read(raw));
        let chosen: &[u32] = views.read(gate.chosen);
        let ids: &[u32] = views.read(gate.ids);
        let dweights: &[T] = views.read(op.dweights);
        let dstats: &[f64] = views.read(op.dstats);
        let times = op.loss_scale.map_or(1.0, |scale| f64::from(views.read::<f32>(scale)[0]));
        let scaled: Vec<f64> = dstats.iter().map(|d| d * times).collect();
        let dlogits: &mut [T] = views.write(op.dlogits);
        let mut none: [T; 0] = [];
        let d_raw: &mut [T] = match op.d_raw {
            Some(d_raw) => views.write(d_raw),
            None => &mut none,
        };
        assert_eq!((dlogits.len(), dweights.len()), (t * e, t * k), "{op:?}");
        assert_eq!(dstats.len(), gate.segments * 3 * e, "{op:?}");
        assert!(d_raw.is_empty() || d_raw.len() == t * e, "{op:?}");
        // Without learned noise every token gets an empty part.
        let width = if d_raw.is_empty() { 0 } else { e };
        let mut parts: Vec<&mut [T]> = Vec::new();
        let mut rest = d_raw;
        for start in (0..t).step_by(ROWS_PER_JOB) {
            let (part, more) = rest.split_at_mut(width * ROWS_PER_JOB.min(t - start));
            parts.push(part);
            rest = more;
        }
        let jobs = dlogits.chunks_mut(ROWS_PER_JOB * e).zip(parts).enumerate().collect();
        exec.run(jobs, t * e * 64, |(job, (dlogits, d_raw))| {
            let zeros = || vec![0.0; e];
            let mut out = Gradients { logits: zeros(), noisy: zeros(), raw: zeros() };
            for (i, dlogits) in dlogits.chunks_exact_mut(e).enumerate() {
                let token = job * ROWS_PER_JOB + i;
                let (at, slots) = (token * e, token * k);
                let segment = token / (t / gate.segments);
                let raw = raw.map(|raw| &raw[at..][..e]);
                let (logits, noisy) = (&logits[at..][..e], &noisy[at..][..e]);
                let row = Row {
                    op,
                    token,
                    times,
                    scores: Token::new(gate, &probs[at..][..e], &chosen[slots..][..k]),
                    estimate: Estimate { op: gate, logits, noisy, raw },
                    lse: lse[token].wide(),
                    ids: &ids[slots..][..k],
                    dweights: &dweights[slots..][..k],
                    dstats: &scaled[segment * 3 * e..][..3 * e],
                };
                out.clear();
                row.gradient(&mut out);
                let of = |dlogits: &mut [T], from: &[f64]| {
                    dlogits.iter_mut().zip(from).for_each(|(d, from)| *d = T::of(*from));
                };
                of(dlogits, &out.logits);
                if width > 0 {
                    of(&mut d_raw[i * e..][..e], &out.raw);
                }
            }
        });
    }
}

impl<T: Float> Row<'_, T> {
    fn gradient(&self, out: &mut Gradients) {
        let gate = &self.op.forward;
        let e = gate.experts;
        let (by_probs, rest) = self.dstats.split_at(e);
        let (importance, load) = rest.split_at(e);
        self.estimate.backward(importance, load, out);
        let by_score = self.by_score(by_probs, importance);
        self.through_scores(&by_score, out);
        for (noisy, logit) in out.noisy.iter().zip(&mut out.logits) {
            *logit += noisy;
        }
        if let (LogitNoise::Learned { .. }, Some(draw)) = (gate.noise, gate.draw) {
            let raw = self.estimate.raw.unwrap_or_default();
            for (expert, ((d_raw, noisy), raw)) in
                out.raw.iter_mut().zip(&out.noisy).zip(raw).enumerate()
            {
                let noise = noise_of(&draw, self.token, expert);
                *d_raw += noisy * noise * sigmoid(raw.wide());
            }
        }
    }

    /// The gradient by the scores: of weights, mean scores and entropy.
    fn by_score(&self, by_probs: &[f64], importance: &[f64]) -> Vec<f64> {
        let (gate, scores) = (&self.op.forward, &self.scores);
        let entropy = self.times * self.op.entropy_coef / gate.tokens as f64;
        let by_share = |expert: usize| {
            let share = scores.share(expert).max(PROB_MIN);
            let of_entropy = if entropy == 0.0 { 0.0 } else { -entropy * (ln(share) + 1.0) };
            by_probs[expert] + of_entropy
        };
        let mut out: Vec<f64> = (0..gate.experts).map(by_share).collect();
        if gate.scoring == Scoring::Sigmoid {
            // share = score / total
            let mean = out.iter().enumerate().fold(0.0, |sum, (expert, d)| {
                d.mul_add(scores.share(expert), sum)
            });
            out.iter_mut().for_each(|d| *d = (*d - mean) / scores.total);
        }
        let by_weight = |slot: usize| {
            let id = scores.chosen[slot];
            if id == NO_EXPERT {
                return None;
            }
            let kept = self.ids[slot] != NO_EXPERT;
            let mut d = if kept { gate.scale * self.dweights[slot].wide() } else { 0.0 };
            if matches!(gate.load, Load::Shazeer { .. }) {
                d += importance[id as usize];
            }
            Some((id as usize, d))
        };
        let slots: Vec<(usize, f64)> = (0..gate.top_k).filter_map(by_weight).collect();
        let mean = match scores.normed {
            true => slots.iter().fold(0.0, |sum, (id, d)| {
                d.mul_add(scores.probs[*id].wide() / scores.divisor, sum)
            }),
            false => 0.0,
        };
        for (id, d) in slots {
            out[id] += (d - mean) / scores.divisor;
        }
        out
    }

    /// Adds the gradient by the logits with noise: through the scores, and of the z loss.
    fn through_scores(&self, by_score: &[f64], out: &mut Gradients) {
        let (gate, scores) = (&self.op.forward, &self.scores);
        let softmax = gate.scoring == Scoring::Softmax;
        let z = 2.0 * self.times * self.op.z_coef * self.lse / gate.tokens as f64;
        let mean = by_score.iter().zip(scores.probs).fold(0.0, |sum, (d, p)| {
            d.mul_add(p.wide(), sum)
        });
        for (expert, (out, d)) in out.noisy.iter_mut().zip(by_score).enumerate() {
            let p = scores.probs[expert].wide();
            *out += if softmax {
                p * (d - mean + z)
            } else {
                let q = Float::exp(self.estimate.noisy[expert].wide() - self.lse);
                d * p * (1.0 - p) + z * q
            };
        }
    }
}
