//! Top-k that holds on to the experts of the position before: by hand, against its definition
//! written anew over many random shapes, and at its two ends. `MOEJOB_TEST_SEED` tries others.

mod common;
mod gate_common;

use common::Bed;
use gate_common::{Case, Found, Random, descending, gate};
use moejob_kernels::*;

const CASES: u64 = 200;

/// The experts of each token, ascending.
fn chosen(found: &Found, top_k: usize) -> Vec<Vec<usize>> {
    let tokens = found.chosen.chunks(top_k);
    tokens.map(|ids| ids.iter().map(|id| *id as usize).collect()).collect()
}

/// Share of the experts that the position before in the same text did not have.
fn switches(case: &Case, chosen: &[Vec<usize>]) -> f64 {
    let (mut changed, mut all) = (0, 0);
    for token in (1..case.tokens).filter(|token| case.positions[*token] != 0) {
        all += case.top_k;
        let before = &chosen[token - 1];
        changed += chosen[token].iter().filter(|id| !before.contains(id)).count();
    }
    f64::from(changed as u32) / f64::from(all.max(1) as u32)
}

/// Lengths of texts one after the other.
fn texts(random: &mut Random, tokens: usize) -> Vec<u32> {
    let mut positions = Vec::new();
    while positions.len() < tokens {
        let len = random.between(1, 9).min(tokens - positions.len());
        positions.extend(0..len as u32);
    }
    positions
}

fn random_case(random: &mut Random) -> (Case, Vec<f64>) {
    let (tokens, experts) = (random.between(1, 40), random.between(1, 12));
    let mut case = Case::new(tokens, experts, random.between(1, experts));
    case.positions = texts(random, tokens);
    case.scoring = if random.flag() { Scoring::Softmax } else { Scoring::Sigmoid };
    case.norm_topk = random.flag();
    case.bias = random.flag().then(|| random.reals(experts, 0.2));
    if experts.is_multiple_of(3) && case.top_k <= 2 * experts / 3 {
        case.groups = Some(RouteGroups { count: 3, kept: 2 });
    }
    case.hysteresis = 0.4 * random.real();
    let logits = random.reals(tokens * experts, 3.0);
    (case, logits)
}

/// ln p, of which softmax makes p again.
fn logits_of(rows: &[[f64; 3]]) -> Vec<f64> {
    rows.iter().flatten().map(|p| p.ln()).collect()
}

#[test]
fn a_margin_holds_or_lets_go() {
    let rows = [[0.5, 0.3, 0.2], [0.4, 0.45, 0.15], [0.3, 0.32, 0.38], [0.1, 0.3, 0.6]];
    let logits = logits_of(&rows);
    // Expert 0 holds while it is within the margin of the best; who takes over is held then.
    for (margin, expected) in [
        (0.0, [0, 1, 2, 2]),
        (0.04, [0, 1, 2, 2]),
        (0.07, [0, 0, 2, 2]),
        (0.1, [0, 0, 0, 2]),
        (0.49, [0, 0, 0, 2]),
        (0.51, [0, 0, 0, 0]),
    ] {
        let mut case = Case::new(4, 3, 1);
        case.hysteresis = margin;
        let found = gate(&case, &logits);
        assert_eq!(found.chosen, expected, "margin {margin}");
        // The weight is the probability, the margin no part of it.
        for (token, expert) in expected.into_iter().enumerate() {
            let expected = rows[token][expert as usize];
            assert!((found.weights[token] - expected).abs() < 1e-14, "margin {margin}");
        }
    }
    // Of two experts one can be held and the other let go.
    let rows = [[0.5, 0.3, 0.2], [0.3, 0.31, 0.39], [0.2, 0.45, 0.35]];
    let mut case = Case::new(3, 3, 2);
    case.hysteresis = 0.05;
    assert_eq!(chosen(&gate(&case, &logits_of(&rows)), 2), [[0, 1], [1, 2], [1, 2]]);
}

/// One row after the other: scores, plus the margin where the token before has the expert, then
/// groups by their two best, then the best of these.
#[test]
fn the_choice_follows_its_definition() {
    let mut held = 0;
    for n in 0..CASES {
        let mut random = Random::new(30_000 + n);
        let (case, logits) = random_case(&mut random);
        let found = gate(&case, &logits);
        let mut before: Vec<usize> = Vec::new();
        for token in 0..case.tokens {
            if case.positions[token] == 0 {
                before.clear();
            }
            let score = |expert: usize, margin: f64| {
                let bias = case.bias.as_ref().map_or(0.0, |bias| bias[expert]);
                let more = if before.contains(&expert) { margin } else { 0.0 };
                found.probs[token * case.experts + expert] + bias + more
            };
            let best = |margin: f64| {
                let scores: Vec<f64> = (0..case.experts).map(|e| score(e, margin)).collect();
                let size = case.groups.map_or(case.experts, |groups| case.experts / groups.count);
                let sums = scores.chunks(size).map(|group| {
                    descending(group).into_iter().take(2).map(|id| group[id]).sum::<f64>()
                });
                let groups = descending(&sums.collect::<Vec<f64>>());
                let kept = &groups[..case.groups.map_or(1, |groups| groups.kept)];
                let best = descending(&scores).into_iter().filter(|e| kept.contains(&(e / size)));
                let mut best: Vec<usize> = best.take(case.top_k).collect();
                best.sort_unstable();
                best
            };
            let expected = best(case.hysteresis);
            held += usize::from(expected != best(0.0));
            let ids = &found.chosen[token * case.top_k..][..case.top_k];
            let ids: Vec<usize> = ids.iter().map(|id| *id as usize).collect();
            assert_eq!(ids, expected, "case {n}, token {token}: {case:?}");
            before = expected;
        }
    }
    assert!(held > 500, "the margin changed {held} choices");
}

/// Without a margin, and with one below every difference of scores, nothing is changed.
#[test]
fn no_margin_is_no_difference() {
    for n in 0..CASES {
        let mut random = Random::new(31_000 + n);
        let (case, logits) = random_case(&mut random);
        let plain = gate(&case.held_by(0.0), &logits);
        let whole = Case { positions: vec![0; case.tokens], ..case.clone() };
        // Texts of one token have nothing to hold on to.
        assert_eq!(gate(&whole, &logits), plain, "case {n}");
        assert_eq!(gate(&case.held_by(1e-300), &logits), plain, "case {n}");
    }
}

/// A margin above all scores keeps the first position's experts to the end of each text.
#[test]
fn a_large_margin_keeps_the_first_choice() {
    for n in 0..CASES {
        let mut random = Random::new(32_000 + n);
        let (case, logits) = random_case(&mut random);
        let first = chosen(&gate(&case.held_by(0.0), &logits), case.top_k);
        let case = case.held_by(1000.0);
        let held = chosen(&gate(&case, &logits), case.top_k);
        for (token, held) in held.iter().enumerate() {
            let begin = token - case.positions[token] as usize;
            assert_eq!(held, &first[begin], "case {n}, token {token}: {case:?}");
        }
        assert_eq!(switches(&case, &held), 0.0);
    }
}

/// No token's choice depends on a later one, nor on another text.
#[test]
fn the_choice_is_causal_and_stays_in_its_text() {
    for n in 0..CASES {
        let mut random = Random::new(33_000 + n);
        let (case, mut logits) = random_case(&mut random);
        let before = chosen(&gate(&case, &logits), case.top_k);
        let token = random.between(0, case.tokens - 1);
        let at = token * case.experts;
        logits[at..][..case.experts].copy_from_slice(&random.reals(case.experts, 3.0));
        let after = chosen(&gate(&case, &logits), case.top_k);
        let ends = (token + 1..case.tokens).find(|later| case.positions[*later] == 0);
        let end = ends.unwrap_or(case.tokens);
        assert_eq!(after[..token], before[..token], "case {n}: earlier tokens");
        assert_eq!(after[end..], before[end..], "case {n}: other texts");
    }
}

/// The more margin, the fewer switches along a text; capacity and losses count what was chosen.
#[test]
fn switches_fall_with_the_margin() {
    let mut random = Random::new(34_000);
    let (tokens, experts) = (600, 8);
    let logits = random.reals(tokens * experts, 2.0);
    let mut last = f64::INFINITY;
    for margin in [0.0, 0.05, 0.1, 0.2, 0.4, 1.0] {
        let mut case = Case::new(tokens, experts, 2);
        (case.hysteresis, case.capacity) = (margin, Some(tokens / 4));
        case.positions = (0..tokens as u32).map(|token| token % 60).collect();
        let found = gate(&case, &logits);
        let now = switches(&case, &chosen(&found, 2));
        assert!(now < last, "margin {margin}: {now} after {last}");
        last = now;
        let all: u32 = found.counts.iter().sum();
        assert_eq!(all as usize, 2 * tokens);
        let served: Vec<u32> =
            found.counts.iter().zip(&found.dropped).map(|(all, dropped)| all - dropped).collect();
        assert!(served.iter().all(|served| *served as usize <= tokens / 4), "{served:?}");
    }
    assert_eq!(last, 0.0, "scores differ by less than one");
}

/// In f32 a large margin does not round the scores away that it is added to: the order of
/// held experts, by which capacity is served, is still theirs.
#[test]
fn a_large_margin_keeps_the_order_of_scores() {
    let mut case = Case::new(2, 3, 2);
    case.hysteresis = 1000.0;
    let rows = [[0.5, 0.4, 0.1], [0.4, 0.400_01, 0.199_99]];
    let mut bed = Bed::new(DType::F32, 1, Isa::detect());
    let op = case.run(&mut bed, &logits_of(&rows), &[]);
    assert_eq!(gate_common::found(&bed, &op).first, [0, 1]);
}
