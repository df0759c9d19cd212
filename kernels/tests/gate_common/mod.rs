//! Random shapes and routers, and a router written from the equations alone.
#![allow(dead_code, reason = "each test crate uses a part")]

use crate::common::Bed;
use moejob_kernels::balance::row;
use moejob_kernels::philox::philox4x32_10;
use moejob_kernels::*;

/// Whole numbers of a seed, which `MOEJOB_TEST_SEED` changes.
pub struct Random {
    seed: u64,
    next: u32,
}

impl Random {
    pub fn new(case: u64) -> Random {
        let base = std::env::var("MOEJOB_TEST_SEED").ok().and_then(|text| text.parse().ok());
        Random { seed: case + base.unwrap_or(0_u64).wrapping_mul(1_000_003), next: 0 }
    }

    pub fn below(&mut self, end: usize) -> usize {
        self.next += 1;
        philox4x32_10(self.seed, [self.next, 1, 2, 3])[0] as usize % end
    }

    pub fn between(&mut self, low: usize, high: usize) -> usize {
        low + self.below(high - low + 1)
    }

    pub fn flag(&mut self) -> bool {
        self.below(2) == 1
    }

    pub fn real(&mut self) -> f64 {
        self.below(1 << 20) as f64 / f64::from(1 << 20)
    }

    /// Well apart, so that a step of finite differences changes no choice.
    pub fn reals(&mut self, len: usize, size: f64) -> Vec<f64> {
        (0..len).map(|_| (2.0 * self.real() - 1.0) * size).collect()
    }
}

/// A router: the op with what its buffers will hold in place of them.
#[derive(Clone, Debug)]
pub struct Case {
    /// Sizes and rules; its buffers are empty, and without noise, load and bias it is whole.
    pub gate: Gate,
    /// Normal noise of this deviation.
    pub noise: Option<f64>,
    pub learned: bool,
    /// Tutel's estimate of load, with this deviation.
    pub tutel: Option<f64>,
    pub bias: Option<Vec<f64>>,
    pub words: Vec<u32>,
    /// One sequence, unless a case says otherwise.
    pub positions: Vec<u32>,
}

impl std::ops::Deref for Case {
    type Target = Gate;

    fn deref(&self) -> &Gate {
        &self.gate
    }
}

impl std::ops::DerefMut for Case {
    fn deref_mut(&mut self) -> &mut Gate {
        &mut self.gate
    }
}

impl Case {
    pub fn new(tokens: usize, experts: usize, top_k: usize) -> Case {
        let gate = Gate::of(tokens, experts, top_k);
        let words = (0..tokens as u32).map(|t| t * 7 % 11).collect();
        let positions = (0..tokens as u32).collect();
        Case { gate, noise: None, learned: false, tutel: None, bias: None, words, positions }
    }

    /// The same with another margin.
    pub fn held_by(&self, hysteresis: f64) -> Case {
        let mut case = self.clone();
        case.hysteresis = hysteresis;
        case
    }

    /// The op in `bed`, run; `raw` is read with learned noise.
    pub fn run(&self, bed: &mut Bed, logits: &[f64], raw: &[f64]) -> Gate {
        let (t, e, k) = (self.tokens, self.experts, self.top_k);
        let raw = self.learned.then(|| bed.floats(raw));
        let op = Gate {
            noise: match (raw, self.noise) {
                (Some(raw), _) => LogitNoise::Learned { raw },
                (None, Some(std)) => LogitNoise::Normal { std },
                (None, None) => LogitNoise::None,
            },
            load: match (raw, self.tutel) {
                (Some(raw), _) => Load::Shazeer { raw },
                (None, Some(std)) => Load::Tutel { std },
                (None, None) => Load::None,
            },
            logits: bed.floats(logits),
            bias: self.bias.as_ref().map(|bias| bed.floats(bias)),
            words: bed.words(&self.words),
            positions: bed.words(&self.positions),
            noisy: bed.output(t * e),
            probs: bed.output(t * e),
            lse: bed.output(t),
            chosen: bed.output_of(DType::U32, t * k),
            ids: bed.output_of(DType::U32, t * k),
            weights: bed.output(t * k),
            first: bed.output_of(DType::U32, t),
            counts: bed.output_of(DType::U32, e),
            dropped: bed.output_of(DType::U32, e),
            stats: bed.output_of(DType::F64, self.segments * row::COUNT * e),
            losses: bed.output_of(DType::F64, 2),
            ..self.gate
        };
        bed.device.gate(&op);
        op
    }

    pub fn balance(&self, loss: BalanceLoss) -> Balance {
        Balance { loss, tokens: self.tokens / self.segments, experts: self.experts }
    }
}

/// What a gate gave.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    pub probs: Vec<f64>,
    pub chosen: Vec<u32>,
    pub ids: Vec<u32>,
    pub weights: Vec<f64>,
    pub first: Vec<u32>,
    pub counts: Vec<u32>,
    pub dropped: Vec<u32>,
    pub stats: Vec<f64>,
    pub losses: Vec<f64>,
}

pub fn found(bed: &Bed, op: &Gate) -> Found {
    Found {
        probs: bed.get(op.probs),
        chosen: bed.values(op.chosen),
        ids: bed.values(op.ids),
        weights: bed.get(op.weights),
        first: bed.values(op.first),
        counts: bed.values(op.counts),
        dropped: bed.values(op.dropped),
        stats: bed.get(op.stats),
        losses: bed.get(op.losses),
    }
}

pub fn gate(case: &Case, logits: &[f64]) -> Found {
    let mut bed = Bed::f64();
    let op = case.run(&mut bed, logits, &[]);
    found(&bed, &op)
}

/// The gate's own scores, row by row, once they are what the library makes them: two tokens may
/// tie in one rounding and not in the other.
pub fn scores(case: &Case, logits: &[f64], found: &Found) -> Vec<Vec<f64>> {
    for (found, logits) in found.probs.chunks(case.experts).zip(logits.chunks(case.experts)) {
        for (found, expected) in found.iter().zip(softmax(logits)) {
            assert!((found - expected).abs() < 1e-14, "{case:?}: {found}, expected {expected}");
        }
    }
    found.probs.chunks(case.experts).map(<[f64]>::to_vec).collect()
}

/// Softmax by the library.
pub fn softmax(row: &[f64]) -> Vec<f64> {
    let max = row.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let powers: Vec<f64> = row.iter().map(|x| (x - max).exp()).collect();
    let sum: f64 = powers.iter().sum();
    powers.into_iter().map(|power| power / sum).collect()
}

/// Indices of a row, the largest first, ties to the lowest.
pub fn descending(row: &[f64]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..row.len()).collect();
    order.sort_by(|a, b| row[*b].partial_cmp(&row[*a]).expect("numbers").then(a.cmp(b)));
    order
}

/// The experts that each token keeps with their weights, ascending: from lists of choices in rank
/// order, `(expert, weight)`, taken up rank by rank in the order of `tokens`.
pub fn with_room(
    choices: &[Vec<(usize, f64)>],
    tokens: &[usize],
    experts: usize,
    capacity: usize,
) -> Vec<Vec<(usize, f64)>> {
    let mut seats = vec![0; experts];
    let mut kept = vec![Vec::new(); choices.len()];
    let ranks = choices.iter().map(Vec::len).max().unwrap_or(0);
    for rank in 0..ranks {
        for token in tokens {
            if let Some((expert, weight)) = choices[*token].get(rank) {
                seats[*expert] += 1;
                if seats[*expert] <= capacity {
                    kept[*token].push((*expert, *weight));
                }
            }
        }
    }
    kept.iter_mut().for_each(|kept| kept.sort_by_key(|(expert, _)| *expert));
    kept
}

/// What a gate kept of each token, as `with_room` writes it.
pub fn kept(case: &Case, found: &Found) -> Vec<Vec<(usize, f64)>> {
    let slots = found.ids.chunks(case.top_k).zip(found.weights.chunks(case.top_k));
    let token = |(ids, weights): (&[u32], &[f64])| {
        let slots = ids.iter().zip(weights);
        let empty = slots.clone().filter(|(id, _)| **id == NO_EXPERT);
        assert!(empty.clone().all(|(_, weight)| *weight == 0.0), "an empty slot has a weight");
        slots
            .filter(|(id, _)| **id != NO_EXPERT)
            .map(|(id, weight)| (*id as usize, *weight))
            .collect()
    };
    slots.map(token).collect()
}

pub fn same(name: &str, found: &[Vec<(usize, f64)>], expected: &[Vec<(usize, f64)>]) {
    assert_eq!(found.len(), expected.len(), "{name}");
    for (t, (found, expected)) in found.iter().zip(expected).enumerate() {
        let ids = |slots: &[(usize, f64)]| slots.iter().map(|slot| slot.0).collect::<Vec<_>>();
        assert_eq!(ids(found), ids(expected), "{name}: token {t}");
        for (found, expected) in found.iter().zip(expected) {
            assert!((found.1 - expected.1).abs() < 1e-13, "{name}: {t}: {found:?}, {expected:?}");
        }
    }
}
