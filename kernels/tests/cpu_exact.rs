//! Every op: the same bits on every instruction set and with any number of threads, and f32 close
//! to f64. Sizes are ragged, and large enough that threads are used.

mod common;

use common::{Bed, below, check_exact};
use moejob_kernels::parts::*;
use moejob_kernels::*;

#[test]
fn embed() {
    let (tokens, dim, vocab) = (700, 33, 50);
    check_exact("embed", 1e-6, |bed| {
        let ids = bed.words(&below(9, tokens, vocab));
        let (table, dx) = (bed.input(vocab * dim), bed.input(tokens * dim));
        let (x, dtable) = (bed.output(tokens * dim), bed.input(vocab * dim));
        bed.device.embed(&Embed { tokens, dim, vocab, ids, table, x });
        bed.device.embed_backward(&EmbedBackward { tokens, dim, vocab, ids, dx, dtable });
        vec![x, dtable]
    });
}

#[test]
fn rms_norm() {
    for (rows, dim, accumulate) in [(1, 5, false), (131, 32, true), (1000, 131, false)] {
        check_exact("rms_norm", 3e-6, |bed| {
            let (x, w, dy) = (bed.input(rows * dim), bed.input(dim), bed.input(rows * dim));
            let (y, rstd) = (bed.output(rows * dim), bed.output(rows));
            bed.device.rms_norm(&RmsNorm { rows, dim, eps: 1e-5, x, w, y, rstd });
            let mut gradient = |len| if accumulate { bed.input(len) } else { bed.output(len) };
            let (dx, dw) = (gradient(rows * dim), gradient(dim));
            bed.device.rms_norm_backward(&RmsNormBackward {
                rows,
                dim,
                x,
                w,
                rstd,
                dy,
                dx,
                dw,
                accumulate_dx: accumulate,
                accumulate_dw: accumulate,
            });
            vec![y, rstd, dx, dw]
        });
    }
}

#[test]
fn matmul_and_bias() {
    let (m, n, k) = (301, 130, 300);
    for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
        check_exact("matmul", 1e-6, |bed| {
            let (a, b, c) = (bed.input(m * k), bed.input(k * n), bed.output(m * n));
            let bias = bed.input(n);
            bed.device.matmul(&Matmul { layout, m, n, k, accumulate: false, a, b, c });
            bed.device.add_bias(&AddBias { rows: m, columns: n, x: c, bias });
            let dbias = bed.output(n);
            let (rows, columns) = (m, n);
            let op = BiasBackward { rows, columns, accumulate: false, dy: c, dbias };
            bed.device.bias_backward(&op);
            bed.device.bias_backward(&BiasBackward { accumulate: true, dbias: bias, ..op });
            vec![c, dbias, bias]
        });
    }
}

#[test]
fn rope() {
    let (tokens, heads, head_dim) = (1500, 3, 34);
    check_exact("rope", 1e-6, |bed| {
        let x = bed.input(tokens * heads * head_dim);
        let positions = bed.words(&below(3, tokens, 5000));
        let theta = 10_000.0;
        bed.device.rope(&Rope { tokens, heads, head_dim, theta, inverse: false, positions, x });
        let y = bed.output(x.len());
        bed.device.copy(x, y);
        bed.device.rope(&Rope { tokens, heads, head_dim, theta, inverse: true, positions, x: y });
        vec![x, y]
    });
}

#[test]
fn attention() {
    let cases = [(2, 150, 4, 2, 32, false), (1, 70, 2, 2, 17, true), (3, 1, 1, 1, 8, false)];
    for (batch, seq, heads, kv_heads, head_dim, documents) in cases {
        check_exact("attention", 1e-5, |bed| {
            let tokens = batch * seq;
            let (query, key) = (tokens * heads * head_dim, tokens * kv_heads * head_dim);
            let (q, k, v) = (bed.input(query), bed.input(key), bed.input(key));
            let first = |t: usize| ((t % seq) / 23 * 23) as u32;
            let starts: Vec<u32> = (0..tokens).map(first).collect();
            let starts = documents.then(|| bed.words(&starts));
            let (o, lse, d_o) = (bed.output(query), bed.output(tokens * heads), bed.input(query));
            let scale = 0.3;
            let forward = Attention {
                batch, seq, heads, kv_heads, head_dim, scale, q, k, v, starts, window: None,
                deterministic: true, workspace: None, o, lse,
            };
            bed.device.attention(&forward);
            let (dq, dk, dv) = (bed.output(query), bed.output(key), bed.output(key));
            bed.device.attention_backward(&AttentionBackward { forward, d_o, dq, dk, dv });
            vec![o, lse, dq, dk, dv]
        });
    }
}

#[test]
fn route() {
    for (scoring, norm_topk, groups) in [
        (Scoring::Softmax, false, None),
        (Scoring::Softmax, true, None),
        (Scoring::Sigmoid, true, Some(RouteGroups { count: 4, kept: 2 })),
    ] {
        let (tokens, experts, top_k) = (1500, 24, 3);
        check_exact("route", 1e-5, |bed| {
            let logits = bed.input(tokens * experts);
            let bias = (scoring == Scoring::Sigmoid).then(|| bed.input(experts));
            let (probs, lse) = (bed.output(tokens * experts), bed.output(tokens));
            let ids = bed.output_of(DType::U32, tokens * top_k);
            let weights = bed.output(tokens * top_k);
            let counts = bed.output_of(DType::U32, experts);
            let prob_sums = bed.output_of(DType::F64, experts);
            let losses = bed.output_of(DType::F64, 2);
            let scale = 1.5;
            bed.route(&Route {
                tokens, experts, top_k, scoring, norm_topk, scale, groups, logits, bias, probs,
                lse, ids, weights, counts, prob_sums, losses,
            });
            let dweights = bed.input(tokens * top_k);
            let dlogits = bed.output(tokens * experts);
            bed.route_backward(&RouteBackward {
                tokens, experts, top_k, scoring, norm_topk, scale, aux_coef: 0.1, z_coef: 0.01,
                logits, probs, lse, ids, counts, dweights, dlogits,
            });
            vec![probs, lse, ids, weights, counts, prob_sums, losses, dlogits]
        });
    }
}

#[test]
fn moving_rows() {
    let (tokens, top_k, experts, dim) = (2000, 2, 7, 130);
    check_exact("rows", 1e-6, |bed| {
        let slots = tokens * top_k;
        let firsts = below(4, tokens, experts - 1);
        let ids: Vec<u32> = firsts.iter().flat_map(|e| [*e, *e + 1]).collect();
        let ids = bed.words(&ids);
        let counts = bed.output_of(DType::U32, experts);
        let offsets = bed.output_of(DType::U32, experts + 1);
        let rows = bed.output_of(DType::U32, slots);
        let pos = bed.output_of(DType::U32, slots);
        bed.place(&Place { tokens, top_k, experts, ids, counts, offsets, rows, pos });
        let (x, weights) = (bed.input(tokens * dim), bed.input(slots));
        let (y, back) = (bed.output(slots * dim), bed.output(slots * dim));
        bed.gather_rows(&GatherRows { rows: slots, dim, x, index: rows, y });
        bed.scatter_rows(&ScatterRows { rows: slots, dim, x: y, index: pos, y: back });
        let (out, residual) = (bed.output(tokens * dim), Some(bed.input(tokens * dim)));
        bed.combine(&Combine { tokens, top_k, dim, y, pos, weights, residual, out });
        let (sum, more) = (bed.output(tokens * dim), bed.input(tokens * dim));
        let op = ScatterSum { tokens, top_k, dim, accumulate: false, x: y, pos, out: sum };
        bed.scatter_sum(&op);
        bed.scatter_sum(&ScatterSum { accumulate: true, out: more, ..op });
        vec![counts, offsets, rows, pos, y, back, out, sum, more]
    });
}

#[test]
fn experts() {
    let cases = [(true, Activation::Silu), (false, Activation::Relu), (true, Activation::Gelu)];
    for (gated, activation) in cases {
        check_exact("experts", 1e-5, |bed| experts_case(bed, gated, activation));
    }
}

/// Three experts, two sources of each, an empty segment, more rows than 256 in one.
fn experts_case(bed: &mut Bed, gated: bool, activation: Activation) -> Vec<Buffer> {
    let (dim, hidden, tokens) = (40, 100, 300);
    let offsets = bed.words(&[0, 310, 333, 450]);
    let rows = 450;
    let width = if gated { 2 * hidden } else { hidden };
    let row_index = bed.words(&below(5, rows, tokens));
    let (x, dy, s) = (bed.input(tokens * dim), bed.input(tokens * dim), bed.input(rows));
    let w_up: Vec<Buffer> = (0..3).map(|_| bed.input(hidden * dim)).collect();
    let gates = if gated { 3 } else { 0 };
    let w_gate: Vec<Buffer> = (0..gates).map(|_| bed.input(hidden * dim)).collect();
    let w_down: Vec<Buffer> = (0..3).map(|_| bed.input(hidden * dim)).collect();
    let (h, a, y) = (bed.output(rows * width), bed.output(rows * hidden), bed.output(rows * dim));
    let (w_gate, w_up, w_down) = (&w_gate[..], &w_up[..], &w_down[..]);
    bed.experts_up(&ExpertsUp {
        dim, hidden, activation, gated, x, row_index, offsets, w_gate, w_up, h, a,
    });
    bed.experts_down(&ExpertsDown { dim, hidden, a, offsets, w_down, y });
    let (ds, dh) = (bed.output(rows), bed.output(rows * width));
    let (a_scaled, dx) = (bed.output(rows * hidden), bed.output(rows * dim));
    bed.experts_down_backward(&ExpertsDownBackward {
        dim, hidden, activation, gated, dy, row_index, offsets, w_down, h, a, s, ds, dh,
        a_scaled,
    });
    let mut gradients = || -> Vec<Buffer> { (0..6).map(|_| bed.output(hidden * dim)).collect() };
    let (dw_down, dw_up) = (&gradients()[..], &gradients()[..]);
    let dw_gate = if gated { &gradients()[..] } else { &[] };
    bed.experts_dgrad(&ExpertsDgrad {
        dim, hidden, gated, dh, offsets, w_gate, w_up, dx,
    });
    let offsets = bed.words(&[0, 300, 310, 310, 333, 400, 450]);
    bed.experts_down_wgrad(&ExpertsDownWgrad {
        dim, hidden, dy, row_index, offsets, a_scaled, dw_down,
    });
    bed.experts_up_wgrad(&ExpertsUpWgrad {
        dim, hidden, gated, x, row_index, offsets, dh, dw_gate, dw_up,
    });
    [&[h, a, y, ds, dh, a_scaled, dx], dw_down, dw_gate, dw_up].concat()
}

#[test]
fn loss() {
    let (tokens, vocab) = (300, 259);
    check_exact("loss", 2e-6, |bed| {
        let logits = bed.input(tokens * vocab);
        let mut targets = below(6, tokens, vocab);
        targets[7] = IGNORE;
        let targets = bed.words(&targets);
        let loss = bed.output_of(DType::F64, tokens);
        let op =
            CrossEntropy { tokens, vocab, scale: 0.01, gradient: true, logits, targets, loss };
        bed.cross_entropy(&op);
        vec![logits, loss]
    });
}

#[test]
fn elementwise() {
    let n = (1 << 15) + 13;
    check_exact("elementwise", 2e-6, |bed| {
        let (gate, up, d_out) = (bed.input(n), bed.input(n), bed.input(n));
        let (out, dgate, dup) = (bed.output(n), bed.output(n), bed.output(n));
        let activation = Activation::Gelu;
        bed.device.gated_mul(&GatedMul { activation, gate, up, out });
        let op = GatedMulBackward { activation, gate, up, d_out, dgate, dup };
        bed.device.gated_mul_backward(&op);
        bed.device.add(&Add { a: gate, b: up });
        let (normal, three) = (bed.output(n), bed.output(n));
        let place = Strided { from: 5, run: 33, stride: 50 };
        let op = InitNormal { seed: 5, name_hash: 6, first: 3, place, std: 0.02, x: normal };
        bed.device.init_normal(&op);
        bed.device.fill(&Fill { value: 3.0, x: three });
        vec![out, dgate, dup, gate, up, normal, three]
    });
}
