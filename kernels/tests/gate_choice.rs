//! Every router's choice, capacity, weights and statistics against its equations written anew, over
//! many random shapes. `MOEJOB_TEST_SEED` tries others.

mod common;
mod gate_common;

use common::Bed;
use gate_common::{Case, Found, Random, descending, found, gate, kept, same, scores, with_room};
use moejob_kernels::balance::row;
use moejob_kernels::parts::Route;
use moejob_kernels::philox::{Draw, Site};
use moejob_kernels::*;

const CASES: u64 = 150;
const ALL: usize = usize::MAX;

/// T from 1, E from 1, K from 1 to E, logits that sometimes tie.
fn shape(random: &mut Random) -> (usize, usize, usize, Vec<f64>) {
    let (tokens, experts) = (random.between(1, 40), random.between(1, 12));
    let top_k = random.between(1, experts);
    let logits = match random.below(4) {
        0 => (0..tokens * experts).map(|_| random.below(3) as f64).collect(),
        _ => random.reals(tokens * experts, 3.0),
    };
    (tokens, experts, top_k, logits)
}

/// Top-k choices of each token with weights, in rank order.
fn top_k(case: &Case, probs: &[Vec<f64>]) -> Vec<Vec<(usize, f64)>> {
    let token = |p: &Vec<f64>| {
        let best: Vec<usize> = descending(p).into_iter().take(case.top_k).collect();
        let sum: f64 = best.iter().map(|id| p[*id]).sum();
        let divisor = if case.norm_topk { sum } else { 1.0 };
        best.into_iter().map(|id| (id, p[id] / divisor)).collect()
    };
    probs.iter().map(token).collect()
}

fn in_order(tokens: usize) -> Vec<usize> {
    (0..tokens).collect()
}

#[test]
fn it_is_the_fast_path_where_both_apply() {
    for n in 0..CASES {
        let mut random = Random::new(n);
        let (t, e, k, logits) = shape(&mut random);
        let mut case = Case::new(t, e, k);
        case.scoring = if random.flag() { Scoring::Softmax } else { Scoring::Sigmoid };
        case.norm_topk = random.flag();
        case.scale = 1.0 + random.real();
        case.bias = random.flag().then(|| random.reals(e, 0.2));
        if e.is_multiple_of(2) && k <= e / 2 {
            case.groups = Some(RouteGroups { count: 2, kept: 1 });
        }
        let mut bed = Bed::f64();
        let op = case.run(&mut bed, &logits, &[]);
        let gated = found(&bed, &op);
        let route = Route {
            tokens: t,
            experts: e,
            top_k: k,
            scoring: case.scoring,
            norm_topk: case.norm_topk,
            scale: case.scale,
            groups: case.groups,
            logits: op.logits,
            bias: op.bias,
            probs: bed.output(t * e),
            lse: bed.output(t),
            ids: bed.output_of(DType::U32, t * k),
            weights: bed.output(t * k),
            counts: bed.output_of(DType::U32, e),
            prob_sums: bed.output_of(DType::F64, e),
            losses: bed.output_of(DType::F64, 2),
        };
        bed.route(&route);
        assert_eq!(gated.ids, bed.values::<u32>(route.ids), "case {n}: {case:?}");
        assert_eq!(gated.counts, bed.values::<u32>(route.counts), "case {n}");
        assert_eq!(bed.get(op.probs), bed.get(route.probs), "case {n}");
        common::assert_close("weights", &gated.weights, &bed.get(route.weights), 1e-15);
        let losses = bed.get(route.losses);
        common::assert_close("z", &gated.losses[..1], &losses[1..], 1e-14);
        let aux = case.balance(BalanceLoss::Switch).of(&gated.stats).value;
        common::assert_close("balance", &[aux], &losses[..1], 1e-13);
    }
}

/// Switch Transformer and Tutel: rank by rank, token by token, or the surest tokens first.
#[test]
fn capacity_is_first_come_first_served_by_rank() {
    for n in 0..CASES {
        let mut random = Random::new(1_000 + n);
        let (t, e, k, logits) = shape(&mut random);
        let mut case = Case::new(t, e, k);
        case.norm_topk = random.flag();
        case.prioritized = random.flag();
        let capacity = random.between(0, t);
        case.capacity = Some(capacity);
        let gated = gate(&case, &logits);
        let probs = scores(&case, &logits, &gated);
        let best: Vec<f64> = probs.iter().map(|p| p.iter().copied().fold(0.0, f64::max)).collect();
        let order = if case.prioritized { descending(&best) } else { in_order(t) };
        let choices = top_k(&case, &probs);
        same(&format!("{n}"), &kept(&case, &gated), &with_room(&choices, &order, e, capacity));
        counts_agree(&case, &gated);
        let most = |e: u32| gated.ids.iter().filter(|id| **id == e).count();
        assert!((0..e as u32).all(|e| most(e) <= capacity), "case {n}");
    }
}

/// Counts, drops and the rows of the statistics that count.
fn counts_agree(case: &Case, gated: &Found) {
    let (e, k) = (case.experts, case.top_k);
    for expert in 0..e {
        let of = |ids: &[u32]| ids.iter().filter(|id| **id == expert as u32).count() as u32;
        let stays = of(&gated.ids);
        assert_eq!(gated.counts[expert], stays + gated.dropped[expert], "{case:?}");
        let stat = |row: usize| {
            gated.stats.chunks(row::COUNT * e).map(|stats| stats[row * e + expert]).sum::<f64>()
        };
        assert_eq!(stat(row::CHOSEN), f64::from(of(&gated.chosen)), "{case:?}");
        assert_eq!(stat(row::FIRST), f64::from(of(&gated.first)), "{case:?}");
    }
    for chosen in gated.chosen.chunks(k) {
        assert!(chosen.windows(2).all(|pair| pair[0] < pair[1] || pair[1] == NO_EXPERT));
    }
}

/// GShard, Algorithm 1, line by line.
#[test]
fn the_second_expert_is_taken_by_chance() {
    let (mut taken, mut left) = (0, 0);
    for n in 0..CASES {
        let mut random = Random::new(2_000 + n);
        let (t, e) = (random.between(1, 40), random.between(2, 12));
        let logits = random.reals(t * e, 3.0);
        let mut case = Case::new(t, e, 2);
        (case.choice, case.norm_topk) = (Choice::RandomSecond, true);
        let draw = Draw { seed: n, step: 3, layer: 1, first_token: 40 };
        case.draw = random.flag().then_some(draw);
        let capacity = random.between(1, t);
        case.capacity = Some(capacity);
        let mut seats = vec![0; e];
        let mut expected = vec![Vec::new(); t];
        let gated = gate(&case, &logits);
        let probs = scores(&case, &logits, &gated);
        let best = |t: usize| {
            let p = &probs[t];
            let order = descending(p);
            let sum = p[order[0]] + p[order[1]];
            [(order[0], p[order[0]] / sum), (order[1], p[order[1]] / sum)]
        };
        for (t, expected) in expected.iter_mut().enumerate() {
            let [(e1, g1), _] = best(t);
            if seats[e1] < capacity {
                expected.push((e1, g1));
            }
            seats[e1] += 1;
        }
        for (t, expected) in expected.iter_mut().enumerate() {
            let [_, (e2, g2)] = best(t);
            let chance = case.draw.is_none_or(|draw| 2.0 * g2 > draw.uniform(Site::Second, t, 0));
            if seats[e2] < capacity && chance {
                expected.push((e2, g2));
            }
            (taken, left) = (taken + usize::from(chance), left + usize::from(!chance));
            seats[e2] += 1;
        }
        expected.iter_mut().for_each(|slots| slots.sort_by_key(|slot| slot.0));
        same(&format!("{n}"), &kept(&case, &gated), &expected);
    }
    assert!(taken > 100 && left > 100, "{taken} and {left}");
}

#[test]
fn top_p_takes_the_fewest_that_reach_the_sum() {
    for n in 0..CASES {
        let mut random = Random::new(3_000 + n);
        let (t, e, k, logits) = shape(&mut random);
        let mut case = Case::new(t, e, k);
        let sum = 0.05 + 0.95 * random.real();
        case.choice = Choice::TopP { sum };
        case.norm_topk = random.flag();
        let gated = gate(&case, &logits);
        let token = |p: Vec<f64>| {
            let mut slots: Vec<(usize, f64)> = Vec::new();
            for id in descending(&p).into_iter().take(k) {
                if slots.iter().map(|slot| slot.1).sum::<f64>() < sum {
                    slots.push((id, p[id]));
                }
            }
            let all: f64 = slots.iter().map(|slot| slot.1).sum();
            let divisor = if case.norm_topk { all } else { 1.0 };
            slots.iter_mut().for_each(|slot| slot.1 /= divisor);
            slots
        };
        let probs = scores(&case, &logits, &gated);
        let choices: Vec<Vec<(usize, f64)>> = probs.into_iter().map(token).collect();
        same(&format!("{n}"), &kept(&case, &gated), &with_room(&choices, &in_order(t), e, ALL));
        counts_agree(&case, &gated);
    }
}

#[test]
fn experts_choose_their_tokens() {
    for n in 0..CASES {
        let mut random = Random::new(4_000 + n);
        let (t, e, _, logits) = shape(&mut random);
        let rows = random.between(1, t);
        let mut case = Case::new(t, e, e);
        case.choice = Choice::Experts { rows };
        let gated = gate(&case, &logits);
        let probs = scores(&case, &logits, &gated);
        let mut expected = vec![Vec::new(); t];
        for expert in 0..e {
            let column: Vec<f64> = probs.iter().map(|p| p[expert]).collect();
            for token in descending(&column).into_iter().take(rows) {
                expected[token].push((expert, column[token]));
            }
        }
        same(&format!("{n}"), &kept(&case, &gated), &expected);
        assert!(gated.counts.iter().all(|count| *count as usize == rows), "case {n}");
        assert!(gated.dropped.iter().all(|dropped| *dropped == 0), "case {n}");
    }
}

/// A word has the same experts wherever it stands; all experts get words.
#[test]
fn a_word_is_hashed_for_good() {
    for n in 0..CASES {
        let mut random = Random::new(5_000 + n);
        let (e, words) = (random.between(1, 12), 400);
        let k = random.between(1, e);
        let mut case = Case::new(words, e, k);
        case.choice = Choice::Hash { seed: n, layer: 3 };
        case.words = (0..words as u32).collect();
        let all = gate(&case, &vec![0.0; words * e]);
        assert!(all.weights.iter().all(|weight| (weight - 1.0 / k as f64).abs() < 1e-15));
        assert!(all.counts.iter().all(|count| *count > 0), "case {n}: {:?}", all.counts);
        assert_eq!(all.counts.iter().sum::<u32>() as usize, words * k);
        let mut few = Case { words: vec![7, 399, 7, 0], ..Case::new(4, e, k) };
        few.choice = case.choice;
        let some = gate(&few, &vec![f64::NAN; 4 * e]);
        let expected: Vec<u32> = [7, 399, 7, 0].map(|w| all.ids[w * k..][..k].to_vec()).concat();
        assert_eq!(some.ids, expected, "case {n}");
        case.choice = Choice::Hash { seed: n, layer: 4 };
        let other = gate(&case, &vec![0.0; words * e]);
        assert!(k == e || other.ids != all.ids, "case {n}: two layers hash alike");
    }
}

/// Noise is a function of what it says it is: a micro-batch cut in two draws the same.
#[test]
fn noise_does_not_depend_on_the_cut() {
    let (t, e, k) = (24, 6, 2);
    let mut random = Random::new(6_000);
    let (logits, raw) = (random.reals(t * e, 1.0), random.reals(t * e, 1.0));
    for learned in [false, true] {
        let mut case = Case { learned, noise: Some(0.7), ..Case::new(t, e, k) };
        let draw = |first_token| Draw { seed: 4, step: 9, layer: 2, first_token };
        case.draw = Some(draw(0));
        let run = |case: &Case, at: std::ops::Range<usize>| {
            let mut bed = Bed::f64();
            let op = case.run(&mut bed, &logits[at.clone()], &raw[at]);
            (bed.get(op.noisy), found(&bed, &op).ids)
        };
        let whole = run(&case, 0..t * e);
        assert_ne!(whole.0, logits);
        let half = |first: usize| {
            let (words, positions) = (vec![0; 12], vec![0; 12]);
            let mut half = Case { words, positions, ..case.clone() };
            (half.tokens, half.draw) = (12, Some(draw(first as u64)));
            run(&half, first * e..(first + 12) * e)
        };
        let (a, b) = (half(0), half(12));
        assert_eq!(whole, ([a.0, b.0].concat(), [a.1, b.1].concat()));
        case.draw = None;
        let silent = run(&case, 0..t * e);
        assert_eq!(silent.0, logits, "evaluation has no noise");
        // Deviations of the noise.
        let ratio = |i: usize| {
            let std = if learned { raw[i].exp().ln_1p() } else { 0.7 };
            (whole.0[i] - logits[i]) / std
        };
        let squares = (0..t * e).map(|i| ratio(i).powi(2)).sum::<f64>() / (t * e) as f64;
        assert!((0.6..1.5).contains(&squares), "{squares}");
    }
}

/// Empty experts, all tokens on one, K = E, T = 1, E = 1, extreme logits: nothing but numbers.
#[test]
fn extremes_stay_numbers() {
    let choices = [
        Choice::TopK,
        Choice::TopP { sum: 0.3 },
        Choice::TopP { sum: 1.0 },
        Choice::RandomSecond,
        Choice::Experts { rows: 1 },
        Choice::Hash { seed: 1, layer: 0 },
    ];
    let losses = [
        BalanceLoss::Switch,
        BalanceLoss::Gshard,
        BalanceLoss::FirstChoice,
        BalanceLoss::LoadImportance,
        BalanceLoss::CvSquared,
        BalanceLoss::Kl,
    ];
    let draw = Some(Draw { seed: 1, step: 1, layer: 1, first_token: 0 });
    let mut tried = 0;
    for (t, e, k) in [(1, 1, 1), (1, 4, 4), (5, 4, 1), (9, 2, 2), (3, 8, 3), (1, 2, 1)] {
        for (logit, choice) in [0.0, 800.0, -800.0, 1e30].into_iter().flat_map(|logit| {
            choices.map(|choice| (logit, choice))
        }) {
            let pair = matches!(choice, Choice::RandomSecond);
            let k = if matches!(choice, Choice::Experts { .. }) { e } else { k };
            let k = if pair { e.min(2) } else { k };
            for (sigmoid, learned, capacity) in [
                (false, false, None),
                (true, false, Some(0)),
                (false, true, Some(1)),
                (false, false, Some(1)),
            ] {
                let mut case = Case { learned, ..Case::new(t, e, k) };
                (case.choice, case.draw) = (choice, draw);
                case.scoring = if sigmoid { Scoring::Sigmoid } else { Scoring::Softmax };
                (case.capacity, case.norm_topk, case.tutel) = (capacity, true, Some(0.1));
                // All tokens on expert 0, the others empty.
                let logits: Vec<f64> =
                    (0..t * e).map(|i| if i % e == 0 { logit } else { 0.0 }).collect();
                let name = format!("{case:?} with {logit}");
                let mut bed = Bed::f64();
                let op = case.run(&mut bed, &logits, &vec![-2000.0; t * e]);
                let gated = found(&bed, &op);
                let parts = [&gated.weights, &gated.stats];
                assert!(parts.into_iter().flatten().all(|x| x.is_finite()), "{name}: {gated:?}");
                assert!(logit > 1e20 || gated.losses.iter().all(|x| x.is_finite()), "{name}");
                for loss in losses {
                    let balanced = case.balance(loss).of(&gated.stats);
                    let dstats = [balanced.probs, balanced.importance, balanced.load].concat();
                    assert!(balanced.value.is_finite(), "{name}: {loss:?}");
                    assert!(dstats.iter().all(|x| x.is_finite()), "{name}: {loss:?}");
                    let d_raw = learned.then(|| bed.output(t * e));
                    let op = GateBackward {
                        forward: op,
                        z_coef: if logit > 1e20 { 0.0 } else { 0.1 },
                        entropy_coef: 0.1,
                        dweights: bed.floats(&vec![0.5; t * k]),
                        dstats: bed.plan_f64(&dstats),
                        loss_scale: None,
                        dlogits: bed.output(t * e),
                        d_raw,
                    };
                    bed.device.gate_backward(&op);
                    let gradients = bed.get(op.dlogits).into_iter();
                    let raw = d_raw.map(|d_raw| bed.get(d_raw)).unwrap_or_default();
                    assert!(gradients.chain(raw).all(|x| x.is_finite()), "{name}: {loss:?}");
                    tried += 1;
                }
            }
        }
    }
    assert!(tried > 3000, "{tried}");
}
