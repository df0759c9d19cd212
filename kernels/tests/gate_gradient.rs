//! Values of the balancing losses against their equations, and every gradient against central
//! differences, over random shapes and routers. `MOEJOB_TEST_SEED` tries others.

mod common;
mod gate_common;

use common::{Bed, assert_close};
use gate_common::{Case, Random, found, softmax};
use moejob_kernels::balance::row;
use moejob_kernels::philox::Draw;
use moejob_kernels::*;

const LOSSES: [BalanceLoss; 6] = [
    BalanceLoss::Switch,
    BalanceLoss::Gshard,
    BalanceLoss::FirstChoice,
    BalanceLoss::LoadImportance,
    BalanceLoss::CvSquared,
    BalanceLoss::Kl,
];

/// What a case's objective is made of.
struct Objective {
    case: Case,
    loss: BalanceLoss,
    coef: f64,
    z: f64,
    entropy: f64,
    dweights: Vec<f64>,
}

impl Objective {
    /// <dweights, weights> + coef * mean balance + z * z loss + entropy * mean entropy, and the
    /// choice, which differences may not change.
    fn value(&self, logits: &[f64], raw: &[f64]) -> (f64, Vec<u32>) {
        let mut bed = Bed::f64();
        let op = self.case.run(&mut bed, logits, raw);
        let found = found(&bed, &op);
        let weights: f64 = found.weights.iter().zip(&self.dweights).map(|(w, d)| w * d).sum();
        let balance = self.case.balance(self.loss);
        let stats = found.stats.chunks(row::COUNT * self.case.experts);
        let balance: f64 = stats.map(|stats| balance.of(stats).value).sum();
        let value = weights
            + self.coef * balance / self.case.segments as f64
            + self.z * found.losses[0]
            + self.entropy * found.losses[1];
        // The thresholds of the load are choices too.
        let noisy = bed.get(op.noisy);
        let order = noisy.chunks(self.case.experts).flat_map(gate_common::descending);
        let ranks = order.map(|id| id as u32);
        (value, found.ids.into_iter().chain(ranks).collect())
    }

    fn gradient(&self, logits: &[f64], raw: &[f64]) -> (Vec<f64>, Vec<f64>) {
        let (t, e) = (self.case.tokens, self.case.experts);
        let mut bed = Bed::f64();
        let forward = self.case.run(&mut bed, logits, raw);
        let balance = self.case.balance(self.loss);
        let stats = found(&bed, &forward).stats;
        let mut dstats = Vec::new();
        for stats in stats.chunks(row::COUNT * e) {
            let balanced = balance.of(stats);
            dstats.extend([balanced.probs, balanced.importance, balanced.load].concat());
        }
        let factor = self.coef / self.case.segments as f64;
        dstats.iter_mut().for_each(|d| *d *= factor);
        let op = GateBackward {
            forward,
            z_coef: self.z,
            entropy_coef: self.entropy,
            dweights: bed.floats(&self.dweights),
            dstats: bed.plan_f64(&dstats),
            loss_scale: None,
            dlogits: bed.output(t * e),
            d_raw: self.case.learned.then(|| bed.output(t * e)),
        };
        bed.device.gate_backward(&op);
        (bed.get(op.dlogits), op.d_raw.map(|d_raw| bed.get(d_raw)).unwrap_or_default())
    }
}

fn random_case(random: &mut Random) -> Case {
    let segments = random.between(1, 3);
    let (tokens, experts) = (segments * random.between(1, 6), random.between(1, 7));
    let mut case = Case::new(tokens, experts, random.between(1, experts));
    case.segments = segments;
    case.norm_topk = random.flag();
    case.scale = 0.5 + random.real();
    case.capacity = random.flag().then(|| random.between(0, tokens));
    case.prioritized = random.flag();
    let draw = Draw { seed: 8, step: 2, layer: 0, first_token: 0 };
    case.draw = random.flag().then_some(draw);
    match random.below(7) {
        0 => case.scoring = Scoring::Sigmoid,
        1 => case.learned = true,
        2 => {
            let std = 0.2 + random.real();
            (case.noise, case.tutel) = (Some(std), Some(std));
        }
        3 if experts > 1 => {
            (case.choice, case.top_k) = (Choice::RandomSecond, 2);
        }
        4 => case.choice = Choice::TopP { sum: 0.1 + 0.9 * random.real() },
        5 => {
            case.choice = Choice::Experts { rows: random.between(1, tokens) };
            (case.top_k, case.capacity) = (experts, None);
        }
        _ => {
            if experts.is_multiple_of(2) && case.top_k <= experts / 2 {
                case.groups = Some(RouteGroups { count: 2, kept: 1 });
            }
        }
    }
    // Some have no draws, groups or losses of the load, some all of it.
    if case.choice == Choice::TopK && !case.learned && case.tutel.is_none() && random.flag() {
        case.hysteresis = 0.3 * random.real();
        case.positions = (0..tokens as u32).map(|token| token % 5).collect();
    }
    case
}

#[test]
fn every_gradient_is_that_of_its_value() {
    let h = 1e-5;
    let (mut compared, mut skipped) = (0, 0);
    for n in 0..240 {
        let mut random = Random::new(10_000 + n);
        let case = random_case(&mut random);
        let (t, e) = (case.tokens, case.experts);
        let objective = Objective {
            loss: LOSSES[n as usize % LOSSES.len()],
            coef: 0.5 + random.real(),
            z: random.real(),
            entropy: if random.flag() { random.real() } else { 0.0 },
            dweights: random.reals(t * case.top_k, 1.0),
            case,
        };
        let (logits, raw) = (random.reals(t * e, 2.0), random.reals(t * e, 1.5));
        let (_, choice) = objective.value(&logits, &raw);
        let (dlogits, d_raw) = objective.gradient(&logits, &raw);
        let name = format!("case {n}: {:?} {:?}", objective.loss, objective.case);
        for (which, gradient) in [&dlogits, &d_raw].into_iter().enumerate() {
            let (mut ours, mut expected) = (Vec::new(), Vec::new());
            for (i, found) in gradient.iter().enumerate() {
                let moved = |by: f64| {
                    let (mut logits, mut raw) = (logits.clone(), raw.clone());
                    [&mut logits, &mut raw][which][i] += by;
                    objective.value(&logits, &raw)
                };
                let (above, below) = (moved(h), moved(-h));
                if above.1 != choice || below.1 != choice {
                    skipped += 1;
                    continue;
                }
                ours.push(*found);
                expected.push((above.0 - below.0) / (2.0 * h));
                compared += 1;
            }
            if !ours.is_empty() {
                assert_close(&format!("{name}, {which}"), &ours, &expected, 1e-6);
            }
        }
    }
    assert!(compared > 5_000 && skipped < compared / 50, "{compared}, {skipped}");
}

/// The losses, each by its equation from probabilities and choices.
#[test]
fn balancing_losses_follow_their_equations() {
    for n in 0..100 {
        let mut random = Random::new(20_000 + n);
        let (t, e) = (random.between(1, 30), random.between(2, 8));
        let k = random.between(1, e);
        let mut case = Case::new(t, e, k);
        let std = 0.3;
        (case.noise, case.tutel) = (Some(std), Some(std));
        case.draw = Some(Draw { seed: n, step: 0, layer: 0, first_token: 0 });
        let logits = random.reals(t * e, 2.0);
        let mut bed = Bed::f64();
        let op = case.run(&mut bed, &logits, &[]);
        let (gated, noisy) = (found(&bed, &op), bed.get(op.noisy));
        let (count, experts) = (t as f64, e as f64);
        let column = |rows: &dyn Fn(usize, usize) -> f64| -> Vec<f64> {
            (0..e).map(|e| (0..t).map(|t| rows(t, e)).sum::<f64>()).collect()
        };
        let probs: Vec<Vec<f64>> = noisy.chunks(e).map(softmax).collect();
        let clean: Vec<Vec<f64>> = logits.chunks(e).map(softmax).collect();
        let p = column(&|t, e| probs[t][e] / count);
        let is = |ids: &[u32], e: usize| f64::from(u8::from(ids.contains(&(e as u32))));
        let f = column(&|t, e| is(&gated.chosen[t * k..][..k], e) / count);
        let g = column(&|t, e| is(&gated.first[t..=t], e) / count);
        let dot = |a: &[f64]| a.iter().zip(&p).map(|(a, p)| a * p).sum::<f64>();
        let cv = |x: &[f64], degrees: f64| {
            let mean = x.iter().sum::<f64>() / x.len() as f64;
            let variance = x.iter().map(|x| (x - mean).powi(2)).sum::<f64>() / degrees;
            variance / (mean * mean + 1e-10)
        };
        let importance = column(&|t, e| clean[t][e]);
        let load = column(&|t, e| {
            let mut row = noisy[t * experts as usize..][..experts as usize].to_vec();
            row.sort_by(|a, b| b.total_cmp(a));
            phi((clean[t][e] - row[k - 1]) / std)
        });
        let value = |loss| case.balance(loss).of(&gated.stats).value;
        let kl: f64 = p.iter().map(|p| p * (experts * p).ln()).sum();
        for (loss, expected) in [
            (BalanceLoss::Switch, experts * dot(&f)),
            (BalanceLoss::FirstChoice, experts * dot(&g)),
            (BalanceLoss::Gshard, dot(&g) / experts),
            (BalanceLoss::Kl, kl),
            (
                BalanceLoss::LoadImportance,
                (cv(&importance, experts - 1.0) + cv(&load, experts - 1.0)) / 2.0,
            ),
        ] {
            assert_close(&format!("{n}: {loss:?}"), &[value(loss)], &[expected], 1e-9);
        }
        assert!(value(BalanceLoss::Kl) >= -1e-15, "a divergence is not negative");
        let entropy: f64 =
            probs.iter().flatten().map(|p| -p * p.ln()).sum::<f64>() / count;
        assert_close("entropy", &gated.losses[1..], &[entropy], 1e-12);
    }
}

/// Shazeer's load: the chance that the expert is among the K best when its noise alone is drawn
/// anew; and his importance: the sum of the weights.
#[test]
fn shazeers_load_is_a_probability_of_being_chosen() {
    for n in 0..60 {
        let mut random = Random::new(30_000 + n);
        let (t, e) = (random.between(1, 20), random.between(1, 8));
        let k = random.between(1, e);
        let mut case = Case { learned: true, ..Case::new(t, e, k) };
        case.norm_topk = true;
        case.draw = Some(Draw { seed: n, step: 5, layer: 1, first_token: 0 });
        let (logits, raw) = (random.reals(t * e, 2.0), random.reals(t * e, 1.5));
        let mut bed = Bed::f64();
        let op = case.run(&mut bed, &logits, &raw);
        let (gated, noisy) = (found(&bed, &op), bed.get(op.noisy));
        let (mut load, mut importance) = (vec![0.0; e], vec![0.0; e]);
        for token in 0..t {
            for expert in 0..e {
                let mut others: Vec<f64> = (0..e)
                    .filter(|other| *other != expert)
                    .map(|other| noisy[token * e + other])
                    .collect();
                others.sort_by(|a, b| b.total_cmp(a));
                let at = token * e + expert;
                let std = raw[at].exp().ln_1p();
                load[expert] += match others.get(k - 1) {
                    Some(kth) => phi((logits[at] - kth) / std),
                    None => 1.0,
                };
            }
            for (id, weight) in
                gated.ids[token * k..][..k].iter().zip(&gated.weights[token * k..][..k])
            {
                importance[*id as usize] += weight;
            }
        }
        assert_close("load", &gated.stats[row::LOAD * e..][..e], &load, 1e-12);
        assert_close("importance", &gated.stats[row::IMPORTANCE * e..][..e], &importance, 1e-12);
        let sum: f64 = importance.iter().sum();
        assert!((sum - t as f64).abs() < 1e-10, "the weights of a token sum to one: {sum}");
    }
}

/// The standard normal distribution function by Simpson's rule.
fn phi(x: f64) -> f64 {
    const STEPS: usize = 2_000;
    let x = x.clamp(-12.0, 12.0);
    let density = |x: f64| (-0.5 * x * x).exp() / (2.0 * std::f64::consts::PI).sqrt();
    let h = x / STEPS as f64;
    let inner = (1..STEPS).map(|i| {
        let weight = if i % 2 == 1 { 4.0 } else { 2.0 };
        weight * density(h * i as f64)
    });
    0.5 + h / 3.0 * (density(0.0) + inner.sum::<f64>() + density(x))
}

#[test]
fn a_segment_is_a_micro_batch_of_its_own() {
    let (tokens, experts, top_k) = (12, 5, 2);
    let mut random = Random::new(40_000);
    let logits = random.reals(tokens * experts, 2.0);
    let mut case = Case::new(tokens, experts, top_k);
    case.segments = 3;
    let whole = gate_common::gate(&case, &logits).stats;
    (case.tokens, case.segments, case.words) = (4, 1, vec![0; 4]);
    case.positions = (0..4).collect();
    let parts = logits.chunks(4 * experts).map(|logits| gate_common::gate(&case, logits).stats);
    assert_eq!(whole, parts.collect::<Vec<_>>().concat());
}

#[test]
fn the_cosine_gate_and_masks() {
    let (rows, dim, experts) = (7, 9, 4);
    let mut random = Random::new(50_000);
    for (temperature, moves) in [(0.7, true), (5.5, false)] {
        let inputs = [
            random.reals(rows * dim, 1.0),
            random.reals(experts * dim, 1.0),
            vec![temperature],
        ];
        let forward = |inputs: &[Vec<f64>], bed: &mut Bed| {
            let [x, similarity, temperature] = [0, 1, 2].map(|i| bed.floats(&inputs[i]));
            let (y, z) = (bed.output(rows * dim), bed.output(experts * dim));
            let norm = bed.output_of(DType::F64, rows);
            let norms = bed.output_of(DType::F64, experts);
            bed.device.normalize_rows(&NormalizeRows { rows, dim, x, y, norm });
            let op = NormalizeRows { rows: experts, dim, x: similarity, y: z, norm: norms };
            bed.device.normalize_rows(&op);
            let logits = bed.output(rows * experts);
            let (layout, accumulate) = (Layout::Nt, false);
            let (m, n, k, a, b, c) = (rows, experts, dim, y, z, logits);
            bed.device.matmul(&Matmul { layout, m, n, k, accumulate, a, b, c });
            bed.device.temper(&Temper { temperature, x: logits });
            (y, norm, z, norms, temperature, logits)
        };
        let bed = &mut Bed::f64();
        let logits = forward(&inputs, bed).5;
        let scale = if moves { f64::exp(temperature) } else { 100.0 };
        let cosine = |t: usize, e: usize| {
            let (a, b) = (&inputs[0][t * dim..][..dim], &inputs[1][e * dim..][..dim]);
            let dot = |a: &[f64], b: &[f64]| a.iter().zip(b).map(|(a, b)| a * b).sum::<f64>();
            scale * dot(a, b) / (dot(a, a) * dot(b, b)).sqrt()
        };
        let expected: Vec<f64> =
            (0..rows * experts).map(|i| cosine(i / experts, i % experts)).collect();
        assert_close("cosine", &bed.get(logits), &expected, 1e-13);
        common::check_gradients(
            "cosine",
            &inputs,
            |inputs| {
                let bed = &mut Bed::f64();
                let logits = forward(inputs, bed).5;
                bed.get(logits)
            },
            |inputs, dy| {
                let bed = &mut Bed::f64();
                let (y, norm, z, norms, temperature, x) = forward(inputs, bed);
                let (dx, d_temperature) = (bed.floats(dy), bed.output(1));
                let accumulate = false;
                bed.device.temper_backward(&TemperBackward {
                    accumulate, temperature, x, dx, d_temperature,
                });
                let (dy, dz) = (bed.output(rows * dim), bed.output(experts * dim));
                let product = |layout, m, n, k, b, c| {
                    Matmul { layout, m, n, k, accumulate: false, a: dx, b, c }
                };
                bed.device.matmul(&product(Layout::Nn, rows, dim, experts, z, dy));
                bed.device.matmul(&product(Layout::Tn, experts, dim, rows, y, dz));
                let (da, db) = (bed.output(rows * dim), bed.output(experts * dim));
                let both = [(rows, y, norm, dy, da), (experts, z, norms, dz, db)];
                for (rows, y, norm, dy, dx) in both {
                    let op = NormalizeRowsBackward { rows, dim, accumulate, y, norm, dy, dx };
                    bed.device.normalize_rows_backward(&op);
                }
                vec![bed.get(da), bed.get(db), bed.get(d_temperature)]
            },
        );
    }
    let draw = Draw { seed: 3, step: 1, layer: 0, first_token: 0 };
    for mask in [Mask::Jitter { eps: 0.3 }, Mask::Dropout { p: 0.25 }] {
        let (rows, dim) = (50, 41);
        let run = |value: f64, accumulate, rows, draw| {
            let bed = &mut Bed::f64();
            let x = bed.floats(&vec![value; rows * dim]);
            let y = bed.floats(&vec![1.0; rows * dim]);
            bed.device.mask_rows(&MaskRows { rows, dim, mask, draw, accumulate, x, y });
            bed.get(y)
        };
        let once = run(1.0, false, rows, draw);
        assert_close("mean", &[once.iter().sum::<f64>() / (rows * dim) as f64], &[1.0], 0.05);
        let expected: Vec<f64> = once.iter().map(|m| 1.0 + 2.0 * m).collect();
        assert_close("linear, accumulated", &run(2.0, true, rows, draw), &expected, 1e-15);
        assert!(once.iter().all(|m| match mask {
            Mask::Jitter { .. } => (0.7..1.3).contains(m),
            Mask::Dropout { .. } => *m == 0.0 || (m - 4.0 / 3.0).abs() < 1e-15,
        }));
        let rest = run(1.0, false, 20, Draw { first_token: 30, ..draw });
        assert_eq!(rest, once[30 * dim..], "the mask belongs to the token");
    }
}

/// Instruction sets and threads change no bit, and f32 is near f64.
#[test]
fn the_gate_gives_the_same_bits_everywhere() {
    let (t, e, k) = (150, 21, 3);
    let mut random = Random::new(60_000);
    let (logits, raw) = (random.reals(t * e, 2.0), random.reals(t * e, 1.0));
    for learned in [false, true] {
        let mut case = Case { learned, ..Case::new(t, e, k) };
        (case.norm_topk, case.segments) = (true, 3);
        case.draw = Some(Draw { seed: 1, step: 2, layer: 3, first_token: 4 });
        case.capacity = Some(25);
        if !learned {
            (case.noise, case.tutel) = (Some(0.4), Some(0.4));
        }
        common::check_exact("gate", 2e-4, |bed| {
            let forward = case.run(bed, &logits, &raw);
            let dstats: Vec<f64> = (0..3 * 3 * e).map(|i| (i % 7) as f64 * 0.1).collect();
            let op = GateBackward {
                forward,
                z_coef: 0.3,
                entropy_coef: 0.2,
                dweights: bed.input(t * k),
                dstats: bed.plan_f64(&dstats),
                loss_scale: None,
                dlogits: bed.output(t * e),
                d_raw: learned.then(|| bed.output(t * e)),
            };
            bed.device.gate_backward(&op);
            let outputs = [forward.probs, forward.weights, forward.stats, op.dlogits];
            outputs.into_iter().chain(op.d_raw).collect()
        });
    }
}
