//! Which experts a token takes, in the order of preference, and which of them have room.

use crate::cpu::float::Float;
use crate::ops::gate::op::{Choice, Gate};
use crate::ops::mixture::cpu::route::best_first;
use crate::philox::{Draw, Site};
use crate::types::NO_EXPERT;

/// Every token's choices, the best first; empty slots last. [T, K]
pub(crate) fn rank_order<T: Float>(
    op: &Gate,
    probs: &[T],
    bias: Option<&[T]>,
    [words, positions, before]: [&[u32]; 3],
    ranked: &mut [u32],
) {
    let (e, k) = (op.experts, op.top_k);
    let rows = ranked.chunks_exact_mut(k).zip(probs.chunks_exact(e)).zip(words);
    match op.choice {
        Choice::TopK if op.hysteresis > 0.0 => {
            held(op, probs, bias, [positions, before], ranked);
        },
        Choice::TopK | Choice::RandomSecond => {
            let mut choice = vec![T::ZERO; e];
            for ((ranked, probs), _) in rows {
                choice.copy_from_slice(probs);
                if let Some(bias) = bias {
                    choice.iter_mut().zip(bias).for_each(|(choice, bias)| *choice += *bias);
                }
                best_first(&choice, op.groups, ranked);
            }
        }
        Choice::TopP { sum } => {
            for ((ranked, probs), _) in rows {
                best_first(probs, None, ranked);
                let mut reached = 0.0;
                for id in ranked.iter_mut() {
                    // The best one is always taken.
                    if reached >= sum && reached > 0.0 {
                        *id = NO_EXPERT;
                    } else {
                        reached += probs[*id as usize].wide();
                    }
                }
            }
        }
        Choice::Experts { rows } => by_experts(op, rows, probs, ranked),
        Choice::Hash { .. } => {
            for ((ranked, _), word) in rows {
                ranked.copy_from_slice(&hashed(op, *word));
            }
        }
    }
}

/// Top-k where the experts of the position before have `hysteresis` more. In f64, lest a large one
/// swallow the scores. `before` are those of the position before the first one, if there are any.
fn held<T: Float>(
    op: &Gate,
    probs: &[T],
    bias: Option<&[T]>,
    [positions, before]: [&[u32]; 2],
    ranked: &mut [u32],
) {
    let rows = ranked.chunks_exact_mut(op.top_k).zip(probs.chunks_exact(op.experts));
    let mut choice = vec![0.0; op.experts];
    let mut before = before;
    for ((ranked, probs), position) in rows.zip(positions) {
        for (expert, (choice, p)) in choice.iter_mut().zip(probs).enumerate() {
            // Rounded as without hysteresis.
            *choice = bias.map_or(*p, |bias| *p + bias[expert]).wide();
        }
        if *position != 0 {
            before.iter().for_each(|id| choice[*id as usize] += op.hysteresis);
        }
        best_first(&choice, op.groups, ranked);
        before = ranked;
    }
}

/// Each expert's `rows` best tokens, ties to the first token; a token's experts by score, ties to
/// the lowest id.
fn by_experts<T: Float>(op: &Gate, rows: usize, probs: &[T], ranked: &mut [u32]) {
    let (t, e) = (op.tokens, op.experts);
    let mut taken: Vec<Vec<u32>> = vec![Vec::new(); t];
    let mut order: Vec<usize> = Vec::with_capacity(t);
    for expert in 0..e {
        let score = |token: usize| probs[token * e + expert].wide();
        order.clear();
        order.extend(0..t);
        order.sort_by(|a, b| score(*b).total_cmp(&score(*a)).then(a.cmp(b)));
        for token in &order[..rows.min(t)] {
            taken[*token].push(expert as u32);
        }
    }
    ranked.fill(NO_EXPERT);
    for ((ranked, mut taken), probs) in
        ranked.chunks_exact_mut(e).zip(taken).zip(probs.chunks_exact(e))
    {
        let score = |id: u32| probs[id as usize].wide();
        taken.sort_by(|a, b| score(*b).total_cmp(&score(*a)).then(a.cmp(b)));
        ranked[..taken.len()].copy_from_slice(&taken);
    }
}

/// The experts of a word: the first K of a shuffle that (seed, layer, word) alone decides.
pub(crate) fn hashed(op: &Gate, word: u32) -> Vec<u32> {
    let Choice::Hash { seed, layer } = op.choice else { return vec![NO_EXPERT; op.top_k] };
    let draw = Draw { seed, step: 0, layer, first_token: 0 };
    let mut experts: Vec<u32> = (0..op.experts as u32).collect();
    for slot in 0..op.top_k {
        let left = op.experts - slot;
        let at = (draw.uniform(Site::Table, word as usize, slot) * left as f64) as usize;
        experts.swap(slot, slot + at.min(left - 1));
    }
    experts.truncate(op.top_k);
    experts
}

/// The token's best choice.
pub(crate) fn first_of<T: Float>(op: &Gate, probs: &[T], ranked: &[u32]) -> Vec<u32> {
    let (e, k) = (op.experts, op.top_k);
    if !matches!(op.choice, Choice::Experts { .. }) {
        return ranked.chunks_exact(k).map(|ranked| ranked[0]).collect();
    }
    // A token that no expert took has a favourite all the same.
    let best = |probs: &[T]| {
        let mut best = [0];
        best_first(probs, None, &mut best);
        best[0]
    };
    probs.chunks_exact(e).map(best).collect()
}

/// Choices of each expert, and those of them for which there was no room.
pub(crate) struct Capacity<'a> {
    pub counts: &'a mut [u32],
    pub dropped: &'a mut [u32],
}

/// Whether each slot of `chosen` (the ranked ones by ascending id) keeps its expert.
pub(crate) fn take<T: Float>(
    op: &Gate,
    probs: &[T],
    ranked: &[u32],
    capacity: &mut Capacity<'_>,
) -> Vec<bool> {
    let (e, k) = (op.experts, op.top_k);
    let mut kept = vec![false; op.tokens * k];
    let mut taken = vec![0_usize; e];
    capacity.counts.fill(0);
    capacity.dropped.fill(0);
    let order = token_order(op, probs);
    for rank in 0..k {
        for token in order.iter().copied() {
            let choices = &ranked[token * k..][..k];
            let id = choices[rank];
            if id == NO_EXPERT {
                continue;
            }
            let place = taken[id as usize];
            taken[id as usize] += 1;
            if rank > 0 && !takes_second(op, token, &probs[token * e..][..e], choices) {
                continue;
            }
            capacity.counts[id as usize] += 1;
            if op.capacity.is_some_and(|capacity| place >= capacity) {
                capacity.dropped[id as usize] += 1;
                continue;
            }
            let slot = choices.iter().filter(|other| **other < id).count();
            kept[token * k + slot] = true;
        }
    }
    kept
}

/// In which order tokens are taken up.
fn token_order<T: Float>(op: &Gate, probs: &[T]) -> Vec<usize> {
    let mut order: Vec<usize> = (0..op.tokens).collect();
    if op.prioritized {
        let best = |probs: &[T]| probs.iter().fold(T::NEG_INFINITY, |max, p| max.larger(*p)).wide();
        let best: Vec<f64> = probs.chunks_exact(op.experts).map(best).collect();
        order.sort_by(|a, b| best[*b].total_cmp(&best[*a]).then(a.cmp(b)));
    }
    order
}

/// GShard's coin: with probability min(1, 2 g2).
fn takes_second<T: Float>(op: &Gate, token: usize, probs: &[T], choices: &[u32]) -> bool {
    let (Choice::RandomSecond, Some(draw)) = (op.choice, op.draw) else { return true };
    let [first, second] = [choices[0], choices[1]].map(|id| probs[id as usize].wide());
    let share = if first + second > 0.0 { second / (first + second) } else { 0.5 };
    2.0 * share > draw.uniform(Site::Second, token, 0)
}
