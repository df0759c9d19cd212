//! One rule for ties, whatever the device: scores that rounding made equal are told apart by their
//! logits, equal logits by the lowest id.

use moejob_kernels::{ArenaPlan, DType, Device, Route, Scoring, philox};

struct Chosen {
    ids: Vec<u32>,
    probs: Vec<f32>,
}

fn route(scoring: Scoring, experts: usize, top_k: usize, logits: &[f32], bias: bool) -> Chosen {
    let tokens = logits.len() / experts;
    let mut plan = ArenaPlan::new();
    let [all, probs] = [(); 2].map(|()| plan.alloc(DType::F32, tokens * experts));
    let zero = plan.alloc(DType::F32, experts);
    let [lse, weights] = [tokens, tokens * top_k].map(|len| plan.alloc(DType::F32, len));
    let [ids, counts] = [tokens * top_k, experts].map(|len| plan.alloc(DType::U32, len));
    let [prob_sums, losses] = [experts, 2].map(|len| plan.alloc(DType::F64, len));
    let mut device = Device::cpu(1, plan.bytes()).expect("a device");
    device.write(all, logits);
    device.route(&Route {
        tokens,
        experts,
        top_k,
        scoring,
        norm_topk: true,
        scale: 1.0,
        groups: None,
        logits: all,
        bias: bias.then_some(zero),
        probs,
        lse,
        ids,
        weights,
        counts,
        prob_sums,
        losses,
    });
    Chosen { ids: device.read_vec(ids), probs: device.read_vec(probs) }
}

#[test]
fn equal_scores_of_different_logits_go_to_the_larger() {
    for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
        let next = 0.25_f32.next_up();
        let chosen = route(scoring, 4, 2, &[0.25, next, 3.0, 0.25], false);
        assert_eq!(chosen.probs[0], chosen.probs[1], "one score of two logits");
        assert_eq!(chosen.ids, [1, 2], "{scoring:?}");
        let true_tie = route(scoring, 4, 2, &[0.25, 0.25, 3.0, next.next_down()], false);
        assert_eq!(true_tie.ids, [0, 2], "{scoring:?}");
        // With a bias, here of zeros, choices are scores and nothing else.
        assert_eq!(route(scoring, 4, 2, &[0.25, next, 3.0, 0.25], true).ids, [0, 2]);
    }
}

/// Where no scores are equal nothing else than the scores decides: as it was before the rule.
#[test]
fn without_equal_scores_the_scores_decide() {
    let (experts, top_k, tokens) = (16, 4, 500);
    let draw = philox::Draw { seed: 7, step: 0, layer: 0, first_token: 0 };
    let normal = |i: usize| draw.normal(philox::Site::Logits, i / experts, i % experts) as f32;
    let logits: Vec<f32> = (0..tokens * experts).map(normal).collect();
    for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
        let chosen = route(scoring, experts, top_k, &logits, false);
        let mut compared = 0;
        for (probs, ids) in chosen.probs.chunks(experts).zip(chosen.ids.chunks(top_k)) {
            let mut order: Vec<usize> = (0..experts).collect();
            order.sort_by(|a, b| probs[*b].total_cmp(&probs[*a]));
            if order.windows(2).any(|pair| probs[pair[0]] == probs[pair[1]]) {
                continue;
            }
            compared += 1;
            let mut best: Vec<u32> = order[..top_k].iter().map(|e| *e as u32).collect();
            best.sort_unstable();
            assert_eq!(ids, best);
        }
        assert!(compared > tokens * 9 / 10, "{compared} of {tokens} tokens");
    }
}
