//! A float64 layer on the host, against which the device is held.
#![allow(dead_code, reason = "each test crate uses a part")]

pub mod bed;

use half::bf16;
use moejob_kernels::{Activation, MoeDesc};

/// Reproducible, roughly normal, already rounded to bf16, zero where fp16 would round once more.
pub fn normal(seed: u64, len: usize, scale: f64) -> Vec<bf16> {
    let mut state = seed.wrapping_mul(0x9e37_79b9_7f4a_7c15) | 1;
    let mut uniform = || {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        (state >> 11) as f64 / (1_u64 << 53) as f64
    };
    let mut next = || (0..4).map(|_| uniform()).sum::<f64>() - 2.0;
    let both = |x: f64| if x.abs() < f64::from(2_f32.powi(-16)) { 0.0 } else { x };
    (0..len).map(|_| bf16::from_f64(both(next() * 1.732 * scale))).collect()
}

pub fn wide(values: &[bf16]) -> Vec<f64> {
    values.iter().map(|x| x.to_f64()).collect()
}

/// ||found - expected|| / ||expected||; not a number if anything found is none.
pub fn error(found: &[f64], expected: &[f64]) -> f64 {
    assert_eq!(found.len(), expected.len());
    let pairs = || found.iter().zip(expected);
    let difference: f64 = pairs().map(|(a, b)| (a - b) * (a - b)).sum();
    let size: f64 = expected.iter().map(|b| b * b).sum();
    if size == 0.0 { difference.sqrt() } else { (difference / size).sqrt() }
}

/// Inputs of a layer, as the device sees them.
pub struct Inputs {
    pub x: Vec<bf16>,
    pub w_router: Vec<f32>,
    pub w_up: Vec<bf16>,
    pub w_down: Vec<bf16>,
    pub dout: Vec<bf16>,
    /// Added to the scores for the choice
    pub bias: Option<Vec<f32>>,
}

impl Inputs {
    /// `bias[e]` is added to every logit of expert e: the first column of x is 1.
    pub fn new(desc: &MoeDesc, bias: &dyn Fn(usize) -> f64) -> Inputs {
        let MoeDesc { tokens, dim, hidden, experts, .. } = *desc;
        let mut x = normal(1, tokens * dim, 1.0);
        x.iter_mut().step_by(dim).for_each(|x| *x = bf16::ONE);
        // Two of them make one that bf16 cannot hold.
        let (high, low) = (normal(2, experts * dim, 1.0), normal(6, experts * dim, 0.004));
        let sum = |(high, low): (&bf16, &bf16)| high.to_f32() + low.to_f32();
        let scale = 1.0 / (dim as f32).sqrt();
        let mut w_router: Vec<f32> = high.iter().zip(&low).map(|w| sum(w) * scale).collect();
        for (e, w) in w_router.iter_mut().step_by(dim).enumerate() {
            *w = bias(e) as f32;
        }
        let per_dim = 1.0 / (dim as f64).sqrt();
        Inputs {
            x,
            w_router,
            w_up: normal(3, experts * desc.width() * dim, per_dim),
            w_down: normal(4, experts * dim * hidden, 1.0 / (hidden as f64).sqrt()),
            dout: normal(5, tokens * dim, 1.0),
            bias: None,
        }
    }
}

/// What the device should find, given its choice of experts.
#[derive(Default)]
pub struct Expected {
    pub logits: Vec<f64>,
    pub weights: Vec<f64>,
    pub prob_sums: Vec<f64>,
    pub losses: [f64; 2],
    pub out: Vec<f64>,
    pub dx: Vec<f64>,
    pub dw_router: Vec<f64>,
    pub dw_up: Vec<f64>,
    pub dw_down: Vec<f64>,
}

/// The activation and its slope.
fn activation(kind: Activation, x: f64) -> (f64, f64) {
    let sigmoid = 1.0 / (1.0 + (-x).exp());
    match kind {
        Activation::Silu => (x * sigmoid, sigmoid * (1.0 + x * (1.0 - sigmoid))),
        Activation::Relu => (x.max(0.0), f64::from(x > 0.0)),
        Activation::Gelu => {
            let factor = (8.0 / std::f64::consts::PI).sqrt();
            let s = 1.0 / (1.0 + (-factor * (x + 0.044715 * x * x * x)).exp());
            let inner = factor * (1.0 + 3.0 * 0.044715 * x * x);
            (x * s, s + x * s * (1.0 - s) * inner)
        }
    }
}

/// c[i] += sum_k a[k] b[k, i]
fn accumulate_row(c: &mut [f64], scale: f64, b: &[f64]) {
    c.iter_mut().zip(b).for_each(|(c, b)| *c += scale * b);
}

fn dot(a: &[f64], b: &[f64]) -> f64 {
    a.iter().zip(b).map(|(a, b)| a * b).sum()
}

struct Wide {
    x: Vec<f64>,
    w_router: Vec<f64>,
    w_up: Vec<f64>,
    w_down: Vec<f64>,
    dout: Vec<f64>,
}

/// The whole layer in float64. `ids` [T, K] is the device's choice.
pub fn reference(desc: &MoeDesc, inputs: &Inputs, ids: &[u32]) -> Expected {
    let MoeDesc { tokens, dim, hidden, experts, .. } = *desc;
    let wide = Wide {
        x: wide(&inputs.x),
        w_router: inputs.w_router.iter().map(|w| f64::from(*w)).collect(),
        w_up: wide(&inputs.w_up),
        w_down: wide(&inputs.w_down),
        dout: wide(&inputs.dout),
    };
    let mut expected = Expected {
        prob_sums: vec![0.0; desc.segments * experts],
        out: vec![0.0; tokens * dim],
        dx: vec![0.0; tokens * dim],
        dw_router: vec![0.0; experts * dim],
        dw_up: vec![0.0; experts * desc.width() * dim],
        dw_down: vec![0.0; experts * dim * hidden],
        ..Expected::default()
    };
    let per_segment = tokens / desc.segments;
    let mut counts = vec![0.0; desc.segments * experts];
    for (slot, id) in ids.iter().enumerate() {
        counts[slot / (per_segment * desc.top_k) * experts + *id as usize] += 1.0;
    }
    let mut probs = Vec::new();
    for t in 0..tokens {
        let x = &wide.x[t * dim..][..dim];
        let logits: Vec<f64> = wide.w_router.chunks(dim).map(|w| dot(x, w)).collect();
        probs.push(Scores::new(desc, &logits));
        expected.logits.extend(logits);
        let own = &mut expected.prob_sums[t / per_segment * experts..][..experts];
        let sums = own.iter_mut().zip(probs[t].shares());
        sums.for_each(|(sum, p)| *sum += p);
        expected.losses[1] += probs[t].lse * probs[t].lse / tokens as f64;
    }
    let tokens_f = per_segment as f64;
    let balance = |i: usize| counts[i] / tokens_f * (expected.prob_sums[i] / tokens_f);
    let all: f64 = (0..counts.len()).map(balance).sum();
    expected.losses[0] = experts as f64 * all / desc.segments as f64;
    for t in 0..tokens {
        token(
            desc,
            &wide,
            t,
            &ids[t * desc.top_k..][..desc.top_k],
            &probs[t],
            &counts[t / per_segment * experts..][..experts],
            &mut expected,
        );
    }
    expected
}

struct Scores {
    logits: Vec<f64>,
    p: Vec<f64>,
    total: f64,
    lse: f64,
}

impl Scores {
    fn new(desc: &MoeDesc, logits: &[f64]) -> Scores {
        let top = logits.iter().copied().fold(f64::NEG_INFINITY, f64::max);
        let lse = top + logits.iter().map(|x| (x - top).exp()).sum::<f64>().ln();
        let score = |x: &f64| if desc.sigmoid { 1.0 / (1.0 + (-x).exp()) } else { (x - lse).exp() };
        let p: Vec<f64> = logits.iter().map(score).collect();
        let total = if desc.sigmoid { p.iter().sum() } else { 1.0 };
        Scores { logits: logits.to_vec(), p, total, lse }
    }

    fn shares(&self) -> impl Iterator<Item = f64> {
        self.p.iter().map(|p| p / self.total)
    }
}

/// What a token's experts are chosen by: logits, or scores where a bias or groups need them. No
/// number where an expert's group is not kept.
pub fn choices(desc: &MoeDesc, inputs: &Inputs, logits: &[f64]) -> Vec<f64> {
    if desc.groups.is_none() && inputs.bias.is_none() {
        return logits.to_vec();
    }
    let mut choice = Scores::new(desc, logits).p;
    if let Some(bias) = &inputs.bias {
        choice.iter_mut().zip(bias).for_each(|(choice, bias)| *choice += f64::from(*bias));
    }
    let Some(groups) = desc.groups else { return choice };
    let size = desc.experts / groups.count;
    let score = |group: &[f64]| {
        let mut group = group.to_vec();
        group.sort_by(|a, b| b.total_cmp(a));
        group.iter().take(2).sum::<f64>()
    };
    let scores: Vec<f64> = choice.chunks(size).map(score).collect();
    let mut best: Vec<usize> = (0..groups.count).collect();
    best.sort_by(|a, b| scores[*b].total_cmp(&scores[*a]));
    for group in &best[groups.kept..] {
        choice[group * size..][..size].fill(f64::NAN);
    }
    choice
}

/// Forward and backward of one token.
fn token(
    desc: &MoeDesc,
    wide: &Wide,
    t: usize,
    ids: &[u32],
    scores: &Scores,
    counts: &[f64],
    expected: &mut Expected,
) {
    let MoeDesc { tokens, dim, hidden, experts, .. } = *desc;
    let (x, dout) = (&wide.x[t * dim..][..dim], &wide.dout[t * dim..][..dim]);
    let width = desc.width();
    let chosen: f64 = ids.iter().map(|id| scores.p[*id as usize]).sum();
    let divisor = if desc.norm_topk { chosen } else { 1.0 };
    let scale = f64::from(desc.scale);
    let mut ds = Vec::new();
    for id in ids {
        let e = *id as usize;
        let s = scale * scores.p[e] / divisor;
        expected.weights.push(s);
        let w_up = &wide.w_up[e * width * dim..][..width * dim];
        let w_down = &wide.w_down[e * dim * hidden..][..dim * hidden];
        let h: Vec<f64> = w_up.chunks(dim).map(|w| dot(x, w)).collect();
        let mut da = vec![0.0; hidden];
        w_down.chunks(hidden).zip(dout).for_each(|(w, d)| accumulate_row(&mut da, *d, w));
        let (mut a, mut dh, mut d_weight) = (vec![0.0; hidden], vec![0.0; width], 0.0);
        for f in 0..hidden {
            let (act, slope) = activation(desc.activation, h[f]);
            let up = if desc.gated { h[hidden + f] } else { 1.0 };
            a[f] = act * up;
            d_weight += da[f] * a[f];
            dh[f] = s * da[f] * up * slope;
            if desc.gated {
                dh[hidden + f] = s * da[f] * act;
            }
        }
        ds.push(d_weight);
        for (d, w) in w_down.chunks(hidden).enumerate() {
            expected.out[t * dim + d] += s * dot(w, &a);
            let into = &mut expected.dw_down[(e * dim + d) * hidden..][..hidden];
            accumulate_row(into, s * dout[d], &a);
        }
        for (n, w) in w_up.chunks(dim).enumerate() {
            accumulate_row(&mut expected.dx[t * dim..][..dim], dh[n], w);
            accumulate_row(&mut expected.dw_up[(e * width + n) * dim..][..dim], dh[n], x);
        }
    }
    let tokens = tokens as f64;
    let per_load = desc.aux_coef * (desc.segments * experts) as f64 / (tokens * tokens);
    let mut d: Vec<f64> = counts.iter().map(|count| per_load * count).collect();
    if desc.sigmoid {
        let mean = dot(&d, &scores.p) / scores.total;
        d.iter_mut().for_each(|d| *d = (*d - mean) / scores.total);
    }
    let mean: f64 =
        ids.iter().zip(&ds).map(|(id, ds)| scores.p[*id as usize] * ds).sum::<f64>() / chosen;
    for (id, ds) in ids.iter().zip(&ds) {
        let mean = if desc.norm_topk { mean } else { 0.0 };
        d[*id as usize] += scale * (ds - mean) / divisor;
    }
    let inner = dot(&d, &scores.p);
    let z = 2.0 * desc.z_coef / tokens * scores.lse;
    for e in 0..experts {
        let p = scores.p[e];
        let dlogit = if desc.sigmoid {
            d[e] * p * (1.0 - p) + z * (scores.logits[e] - scores.lse).exp()
        } else {
            p * (d[e] - inner + z)
        };
        accumulate_row(
            &mut expected.dx[t * dim..][..dim],
            dlogit,
            &wide.w_router[e * dim..][..dim],
        );
        accumulate_row(&mut expected.dw_router[e * dim..][..dim], dlogit, x);
    }
}
