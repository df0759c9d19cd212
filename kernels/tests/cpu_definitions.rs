//! Forward ops against their equations, written out naively in f64.

mod common;

use common::{Bed, assert_close, below, uniform};
use moejob_kernels::parts::*;
use moejob_kernels::*;

#[test]
fn rms_norm_divides_by_the_root_mean_square() {
    let (rows, dim, eps) = (3, 37, 0.01);
    let mut bed = Bed::f64();
    let (x, w) = (bed.input(rows * dim), bed.input(dim));
    let (y, rstd) = (bed.output(rows * dim), bed.output(rows));
    bed.device.rms_norm(&RmsNorm { rows, dim, eps, x, w, y, rstd });
    let (x, w) = (bed.get(x), bed.get(w));
    let row = |r: usize| &x[r * dim..][..dim];
    let root = |r| (row(r).iter().map(|x| x * x).sum::<f64>() / dim as f64 + eps).sqrt();
    let expected = |i: usize| x[i] / root(i / dim) * w[i % dim];
    let expected: Vec<f64> = (0..rows * dim).map(expected).collect();
    assert_close("y", &bed.get(y), &expected, 1e-14);
    assert_close("rstd", &bed.get(rstd), &[0, 1, 2].map(|r| 1.0 / root(r)), 1e-14);
}

#[test]
fn rope_turns_pairs_half_a_head_apart() {
    let (tokens, heads, head_dim, theta) = (4, 2, 6, 1e6_f64);
    let mut bed = Bed::f64();
    let at = [0, 1, 77, 131_071];
    let (positions, x) = (bed.words(&at), bed.input(tokens * heads * head_dim));
    let before = bed.get(x);
    bed.device.rope(&Rope { tokens, heads, head_dim, theta, inverse: false, positions, x });
    let mut expected = before.clone();
    for (head, x) in before.chunks(head_dim).enumerate() {
        for i in 0..head_dim / 2 {
            let frequency = theta.powf(-((2 * i) as f64) / head_dim as f64);
            let angle = f64::from(at[head / heads]) * frequency;
            let (low, high) = (x[i], x[i + head_dim / 2]);
            expected[head * head_dim + i] = low * angle.cos() - high * angle.sin();
            expected[head * head_dim + i + head_dim / 2] = high * angle.cos() + low * angle.sin();
        }
    }
    // Turning back gives what there was. The angles reach 1e5, whose last bit is 1e-11.
    assert_close("rope", &bed.get(x), &expected, 1e-10);
    bed.device.rope(&Rope { tokens, heads, head_dim, theta, inverse: true, positions, x });
    assert_close("back", &bed.get(x), &before, 1e-14);
}

#[test]
fn attention_is_a_softmax_over_the_window() {
    for window in [None, Some(37), Some(1)] {
        check_attention(window);
    }
}

fn check_attention(window: Option<usize>) {
    let (batch, seq, heads, kv_heads, head_dim, scale) = (2, 300, 4, 2, 5, 0.7);
    let tokens = batch * seq;
    let mut bed = Bed::f64();
    let q = bed.input(tokens * heads * head_dim);
    let (k, v) = (bed.input(tokens * kv_heads * head_dim), bed.input(tokens * kv_heads * head_dim));
    let starts: Vec<u32> = (0..tokens).map(|t| ((t % seq) / 90 * 90) as u32).collect();
    let starts_buffer = Some(bed.words(&starts));
    let (o, lse) = (bed.output(tokens * heads * head_dim), bed.output(tokens * heads));
    bed.device.attention(&Attention {
        batch,
        seq,
        heads,
        kv_heads,
        head_dim,
        scale,
        q,
        k,
        v,
        starts: starts_buffer,
        window,
        deterministic: true,
        workspace: None,
        o,
        lse,
    });
    let (q, k, v) = (bed.get(q), bed.get(k), bed.get(v));
    let (mut expected_o, mut expected_lse) = (Vec::new(), Vec::new());
    for (t, start) in starts.iter().enumerate() {
        for head in 0..heads {
            let vector = |x: &[f64], j: usize, heads: usize, head: usize| {
                x[(j * heads + head) * head_dim..][..head_dim].to_vec()
            };
            let (first, kv_head) = (t / seq * seq, head / (heads / kv_heads));
            let query = vector(&q, t, heads, head);
            let seen = (t + 1).saturating_sub(window.unwrap_or(seq));
            let window = seen.max(first + *start as usize)..t + 1;
            let score = |j: usize| {
                let key = vector(&k, j, kv_heads, kv_head);
                scale * query.iter().zip(&key).map(|(q, k)| q * k).sum::<f64>()
            };
            let weights: Vec<f64> = window.clone().map(|j| score(j).exp()).collect();
            let sum: f64 = weights.iter().sum();
            expected_lse.push(sum.ln());
            for i in 0..head_dim {
                let values = window.clone().map(|j| vector(&v, j, kv_heads, kv_head)[i]);
                expected_o.push(values.zip(&weights).map(|(v, w)| v * w).sum::<f64>() / sum);
            }
        }
    }
    assert_close("o", &bed.get(o), &expected_o, 1e-13);
    assert_close("lse", &bed.get(lse), &expected_lse, 1e-13);
}

struct Routed {
    ids: Vec<u32>,
    weights: Vec<f64>,
    counts: Vec<u32>,
    losses: Vec<f64>,
}

fn route(
    logits: &[f64],
    (experts, top_k): (usize, usize),
    (scoring, norm_topk): (Scoring, bool),
    bias: Option<&[f64]>,
    groups: Option<RouteGroups>,
) -> Routed {
    let mut bed = Bed::f64();
    let tokens = logits.len() / experts;
    let logits = bed.floats(logits);
    let bias = bias.map(|bias| bed.floats(bias));
    let (probs, lse) = (bed.output(tokens * experts), bed.output(tokens));
    let ids = bed.output_of(DType::U32, tokens * top_k);
    let weights = bed.output(tokens * top_k);
    let counts = bed.output_of(DType::U32, experts);
    let (prob_sums, losses) = (bed.output(experts), bed.output(2));
    bed.route(&Route {
        tokens,
        experts,
        top_k,
        scoring,
        norm_topk,
        scale: 1.0,
        groups,
        logits,
        bias,
        probs,
        lse,
        ids,
        weights,
        counts,
        prob_sums,
        losses,
    });
    Routed {
        ids: bed.values(ids),
        weights: bed.get(weights),
        counts: bed.values(counts),
        losses: bed.get(losses),
    }
}

#[test]
fn the_router_takes_the_best_and_breaks_ties_downwards() {
    let softmax = (Scoring::Softmax, false);
    let ids = |logits: &[f64]| route(logits, (4, 2), softmax, None, None).ids;
    assert_eq!(ids(&[0.0, 3.0, 1.0, 2.0]), [1, 3]);
    assert_eq!(ids(&[1.0, 1.0, 1.0, 1.0]), [0, 1]);
    assert_eq!(ids(&[0.0, 5.0, 1.0, 1.0]), [1, 2]);
    assert_eq!(ids(&[f64::NAN; 4]), [0, 1], "numbers that are none still give two experts");
    let biased = route(&[0.0; 4], (4, 2), softmax, Some(&[0.0, 0.0, 1.0, 2.0]), None);
    assert_eq!((biased.ids, biased.weights), (vec![2, 3], vec![0.25, 0.25]));
    // The best expert stands alone in its group; the other group has the better pair.
    let groups = Some(RouteGroups { count: 2, kept: 1 });
    let sigmoid = (Scoring::Sigmoid, false);
    let grouped = route(&[4.0, -9.0, 3.0, 2.0], (4, 2), sigmoid, None, groups);
    assert_eq!(grouped.ids, [2, 3]);
}

#[test]
fn router_weights_and_losses_follow_their_equations() {
    let (tokens, experts, top_k) = (50, 6, 2);
    let logits = uniform(3, tokens * experts);
    for norm_topk in [false, true] {
        let routed = route(&logits, (experts, top_k), (Scoring::Softmax, norm_topk), None, None);
        let mut mean_probs = vec![0.0; experts];
        let (mut weights, mut z) = (Vec::new(), 0.0);
        for (t, logits) in logits.chunks(experts).enumerate() {
            let sum: f64 = logits.iter().map(|x| x.exp()).sum();
            let probs: Vec<f64> = logits.iter().map(|x| x.exp() / sum).collect();
            mean_probs.iter_mut().zip(&probs).for_each(|(mean, p)| *mean += p / tokens as f64);
            z += sum.ln().powi(2) / tokens as f64;
            let ids = &routed.ids[t * top_k..][..top_k];
            assert!(ids[0] < ids[1], "ascending: {ids:?}");
            let chosen: f64 = ids.iter().map(|id| probs[*id as usize]).sum();
            let divisor = if norm_topk { chosen } else { 1.0 };
            weights.extend(ids.iter().map(|id| probs[*id as usize] / divisor));
        }
        let count = |e| routed.ids.iter().filter(|id| **id == e as u32).count() as u32;
        assert_eq!(routed.counts, (0..experts).map(count).collect::<Vec<u32>>());
        let loads = routed.counts.iter().map(|count| f64::from(*count) / tokens as f64);
        let balance: f64 = loads.zip(&mean_probs).map(|(f, p)| f * p).sum();
        assert_close("weights", &routed.weights, &weights, 1e-14);
        assert_close("losses", &routed.losses, &[experts as f64 * balance, z], 1e-13);
    }
    let balanced = route(&[0.0; 12], (6, 6), (Scoring::Softmax, false), None, None);
    assert_close("balanced", &balanced.losses[..1], &[6.0], 1e-14);
}

#[test]
fn place_sorts_by_expert_then_token() {
    let (tokens, top_k, experts) = (4, 2, 4);
    let mut bed = Bed::f64();
    let ids = bed.words(&[0, 3, 0, 2, 2, 3, 0, 3]);
    let counts = bed.output_of(DType::U32, experts);
    let offsets = bed.output_of(DType::U32, experts + 1);
    let [rows, pos] = [0, 1].map(|_| bed.output_of(DType::U32, tokens * top_k));
    bed.place(&Place { tokens, top_k, experts, ids, counts, offsets, rows, pos });
    assert_eq!(bed.values::<u32>(counts), [3, 0, 2, 3]);
    assert_eq!(bed.values::<u32>(offsets), [0, 3, 3, 5, 8]);
    assert_eq!(bed.values::<u32>(rows), [0, 1, 3, 1, 2, 0, 2, 3]);
    assert_eq!(bed.values::<u32>(pos), [0, 5, 1, 3, 4, 6, 2, 7]);
}

/// Up and down products by hand, and each row alone: the same bits as among the others.
#[test]
fn an_expert_row_does_not_see_the_others() {
    let (dim, hidden, experts, rows, tokens) = (35, 50, 3, 140, 60);
    let starts = [0, 70, 70, rows as u32];
    let index = below(5, rows, tokens);
    let run = |bed: &mut Bed, keep: std::ops::Range<usize>| {
        let x = bed.input(tokens * dim);
        let mut weights = || -> Vec<Buffer> {
            (0..experts).map(|_| bed.input(dim * hidden)).collect()
        };
        let (w_gate, w_up, w_down) = (weights(), weights(), weights());
        let clamp = |start: &u32| (*start as usize).clamp(keep.start, keep.end) - keep.start;
        let offsets: Vec<u32> = starts.iter().map(|start| clamp(start) as u32).collect();
        let (offsets, row_index) = (bed.words(&offsets), bed.words(&index[keep.clone()]));
        let rows = keep.len();
        let (h, a) = (bed.output(rows * 2 * hidden), bed.output(rows * hidden));
        let y = bed.output(rows * dim);
        bed.experts_up(&ExpertsUp {
            dim,
            hidden,
            activation: Activation::Silu,
            gated: true,
            x,
            row_index,
            offsets,
            w_gate: &w_gate,
            w_up: &w_up,
            h,
            a,
        });
        let w_down = &w_down[..];
        bed.experts_down(&ExpertsDown { dim, hidden, a, offsets, w_down, y });
        (x, w_gate, w_up, w_down.to_vec(), y)
    };
    let new_bed = || Bed::new(DType::F32, 2, Isa::detect());
    let mut bed = new_bed();
    let (x, w_gate, w_up, w_down, y) = run(&mut bed, 0..rows);
    let y = bed.get(y);
    for row in [0, 1, 69, 70, 100, 139] {
        let mut alone = new_bed();
        let found = run(&mut alone, row..row + 1).4;
        assert_eq!(alone.get(found), y[row * dim..][..dim], "row {row} alone");
        let expert = if row < 70 { 0 } else { 2 };
        let x = &bed.get(x)[index[row] as usize * dim..][..dim];
        let times = |w: &[f64], x: &[f64]| -> Vec<f64> {
            w.chunks(x.len()).map(|w| w.iter().zip(x).map(|(w, x)| w * x).sum()).collect()
        };
        let (gate, up) = (times(&bed.get(w_gate[expert]), x), times(&bed.get(w_up[expert]), x));
        let silu = |(gate, up): (&f64, &f64)| gate / (1.0 + (-gate).exp()) * up;
        let hidden: Vec<f64> = gate.iter().zip(&up).map(silu).collect();
        let expected = times(&bed.get(w_down[expert]), &hidden);
        assert_close("expert", &y[row * dim..][..dim], &expected, 1e-5);
    }
}

#[test]
fn an_empty_segment_gets_a_gradient_of_zeros() {
    let (dim, hidden) = (3, 5);
    let mut bed = Bed::f64();
    let (x, dy, a_scaled) = (bed.input(dim), bed.input(dim), bed.input(hidden));
    let (dh, row_index, offsets) = (bed.input(2 * hidden), bed.words(&[0]), bed.words(&[0, 0, 1]));
    let outputs = [0; 6].map(|_| bed.output(dim * hidden));
    let [dw_down, dw_gate, dw_up] = [&outputs[..2], &outputs[2..4], &outputs[4..]];
    bed.experts_down_wgrad(&ExpertsDownWgrad {
        dim, hidden, dy, row_index, offsets, a_scaled, dw_down,
    });
    bed.experts_up_wgrad(&ExpertsUpWgrad {
        dim, hidden, gated: true, x, row_index, offsets, dh, dw_gate, dw_up,
    });
    for dw in [dw_down, dw_gate, dw_up] {
        assert_eq!(bed.get(dw[0]), [0.0; 15]);
        assert!(bed.get(dw[1]).iter().all(|x| *x != 0.0 && x.is_finite()));
    }
    let (x, dh) = (bed.get(x), bed.get(dh));
    let outer = (0..hidden * dim).map(|i| dh[hidden + i / dim] * x[i % dim]);
    assert_close("dw_up", &bed.get(dw_up[1]), &outer.collect::<Vec<f64>>(), 1e-15);
}

#[test]
fn combine_adds_the_residual_last_and_in_slot_order() {
    let (tokens, top_k, dim) = (1, 3, 1);
    let mut bed = Bed::new(DType::F32, 1, Isa::detect());
    let y = bed.floats(&[1e8, 1.0, -1e8]);
    let (pos, weights) = (bed.words(&[0, 2, 1]), bed.floats(&[1.0; 3]));
    let (residual, out) = (Some(bed.floats(&[0.5])), bed.output(1));
    bed.combine(&Combine { tokens, top_k, dim, y, pos, weights, residual, out });
    // 1e8 - 1e8 + 1 is 1; with 1 in second place it would have been lost.
    assert_eq!(bed.get(out), [1.5]);
}

#[test]
fn cross_entropy_ignores_what_it_is_told_to() {
    let (tokens, vocab, scale) = (3, 5, 0.25);
    let mut bed = Bed::f64();
    let logits = bed.input(tokens * vocab);
    let before = bed.get(logits);
    let (targets, loss) = (bed.words(&[4, IGNORE, 0]), bed.output(tokens));
    bed.cross_entropy(&CrossEntropy {
        tokens, vocab, scale, gradient: true, logits, targets, loss,
    });
    let (loss, gradient) = (bed.get(loss), bed.get(logits));
    assert_eq!((loss[1], &gradient[5..10]), (0.0, &[0.0; 5][..]));
    for (t, target) in [(0, 4), (2, 0)] {
        let row = &before[t * vocab..][..vocab];
        let sum: f64 = row.iter().map(|x| x.exp()).sum();
        assert_close("loss", &loss[t..=t], &[sum.ln() - row[target]], 1e-14);
        let d = |v: usize| scale * (row[v].exp() / sum - f64::from(u8::from(v == target)));
        let expected: Vec<f64> = (0..vocab).map(d).collect();
        assert_close("gradient", &gradient[t * vocab..][..vocab], &expected, 1e-14);
    }
}

#[test]
fn initial_weights_depend_on_the_element_alone() {
    let normal_at = |place, first, len| {
        let mut bed = Bed::f64();
        let x = bed.output(len);
        bed.device.init_normal(&InitNormal { seed: 3, name_hash: 11, first, place, std: 0.5, x });
        bed.get(x)
    };
    let normal = |first, len| normal_at(Strided::ALL, first, len);
    let whole = normal(0, 40_000);
    assert_eq!(normal(7, 20_001), whole[7..20_008]);
    // Columns 30 .. 65 of rows of 100.
    let place = Strided { from: 30, run: 35, stride: 100 };
    let rows: Vec<f64> = whole.chunks(100).flat_map(|row| row[30..65].to_vec()).collect();
    assert_eq!(normal_at(place, 0, rows.len()), rows);
    assert_eq!(normal_at(place, 4_001, 5_000), rows[4_001..9_001]);
    let expected = philox::normals(3, 11, 10_000).map(|z| 0.5 * z);
    assert_eq!(whole[20_000..20_002], expected);
}

/// Empty slots have no row, add nothing, and have a gradient of zero.
#[test]
fn empty_slots_are_passed_over() {
    let (tokens, top_k, experts, dim) = (4, 2, 4, 3);
    let mut bed = Bed::f64();
    let none = NO_EXPERT;
    let ids = bed.words(&[0, none, none, none, 2, 3, none, 0]);
    let counts = bed.output_of(DType::U32, experts);
    let offsets = bed.output_of(DType::U32, experts + 1);
    let [rows, pos] = [0, 1].map(|_| bed.output_of(DType::U32, tokens * top_k));
    bed.place(&Place { tokens, top_k, experts, ids, counts, offsets, rows, pos });
    assert_eq!(bed.values::<u32>(counts), [2, 0, 1, 1]);
    assert_eq!(bed.values::<u32>(offsets), [0, 2, 2, 3, 4]);
    assert_eq!(bed.values::<u32>(rows)[..4], [0, 3, 2, 2]);
    assert_eq!(bed.values::<u32>(pos), [0, none, none, none, 2, 3, none, 1]);
    let y = bed.floats(&(1..=4).flat_map(|row| [f64::from(row); 3]).collect::<Vec<f64>>());
    let weights = bed.floats(&[2.0, f64::NAN, f64::NAN, 0.0, 10.0, 100.0, 0.0, 3.0]);
    let out = bed.output(tokens * dim);
    bed.combine(&Combine { tokens, top_k, dim, y, pos, weights, residual: None, out });
    let expected = [2.0, 0.0, 430.0, 6.0].map(|x| [x; 3]).concat();
    assert_eq!(bed.get(out), expected);
    let sum = bed.output(tokens * dim);
    let op = ScatterSum { tokens, top_k, dim, accumulate: false, x: y, pos, out: sum };
    bed.scatter_sum(&op);
    assert_eq!(bed.get(sum), [1.0, 0.0, 7.0, 2.0].map(|x| [x; 3]).concat());
    let (ds, dweights) = (bed.floats(&[5.0, 6.0, 7.0, 8.0]), bed.output(tokens * top_k));
    let rows = tokens * top_k;
    bed.gather_rows(&GatherRows { rows, dim: 1, x: ds, index: pos, y: dweights });
    assert_eq!(bed.get(dweights), [5.0, 0.0, 0.0, 0.0, 7.0, 8.0, 0.0, 6.0]);
    let row_weights = bed.output(4);
    let op = ScatterRows { rows, dim: 1, x: weights, index: pos, y: row_weights };
    bed.scatter_rows(&op);
    assert_eq!(bed.get(row_weights), [2.0, 3.0, 10.0, 100.0]);
}
