//! Backward passes in f64 against central differences of the forward passes.

mod common;

use common::{Bed, below, check_gradients, uniform};
use moejob_kernels::parts::*;
use moejob_kernels::*;

#[test]
fn rms_norm() {
    let (rows, dim, eps) = (70, 19, 1e-3);
    let inputs = [uniform(1, rows * dim), uniform(2, dim)];
    let forward = |inputs: &[Vec<f64>], bed: &mut Bed| {
        let (x, w) = (bed.floats(&inputs[0]), bed.floats(&inputs[1]));
        let (y, rstd) = (bed.output(rows * dim), bed.output(rows));
        bed.device.rms_norm(&RmsNorm { rows, dim, eps, x, w, y, rstd });
        (x, w, y, rstd)
    };
    check_gradients(
        "rms_norm",
        &inputs,
        |inputs| {
            let bed = &mut Bed::f64();
            let y = forward(inputs, bed).2;
            bed.get(y)
        },
        |inputs, dy| {
            let bed = &mut Bed::f64();
            let (x, w, _, rstd) = forward(inputs, bed);
            let dy = bed.floats(dy);
            let (dx, dw) = (bed.output(rows * dim), bed.output(dim));
            bed.device.rms_norm_backward(&RmsNormBackward {
                rows,
                dim,
                x,
                w,
                rstd,
                dy,
                dx,
                dw,
                accumulate_dx: false,
                accumulate_dw: false,
            });
            vec![bed.get(dx), bed.get(dw)]
        },
    );
}

#[test]
fn rope_backward_is_its_inverse() {
    let (tokens, heads, head_dim, theta) = (9, 2, 12, 500.0);
    let rotate = |values: &[f64], inverse| {
        let mut bed = Bed::f64();
        let positions = bed.words(&[0, 1, 2, 3, 9, 5, 6, 70, 8]);
        let x = bed.floats(values);
        bed.device.rope(&Rope { tokens, heads, head_dim, theta, inverse, positions, x });
        bed.get(x)
    };
    let inputs = [uniform(1, tokens * heads * head_dim)];
    check_gradients(
        "rope",
        &inputs,
        |inputs| rotate(&inputs[0], false),
        |_, dy| vec![rotate(dy, true)],
    );
}

#[test]
fn attention() {
    let (batch, seq, heads, kv_heads, head_dim, scale) = (2, 67, 4, 2, 6, 0.4);
    let tokens = batch * seq;
    let (query, key) = (tokens * heads * head_dim, tokens * kv_heads * head_dim);
    for (documents, window) in [(false, None), (true, None), (false, Some(9)), (true, Some(4))] {
        let inputs = [uniform(1, query), uniform(2, key), uniform(3, key)];
        let forward = |inputs: &[Vec<f64>], bed: &mut Bed| {
            let first = |t: usize| ((t % seq) / 10 * 10) as u32;
            let starts: Vec<u32> = (0..tokens).map(first).collect();
            let starts = documents.then(|| bed.words(&starts));
            let [q, k, v] = [0, 1, 2].map(|i| bed.floats(&inputs[i]));
            let (o, lse) = (bed.output(query), bed.output(tokens * heads));
            let op = Attention {
                batch, seq, heads, kv_heads, head_dim, scale, q, k, v, starts, window,
                deterministic: true, workspace: None, o, lse,
            };
            bed.device.attention(&op);
            op
        };
        check_gradients(
            "attention",
            &inputs,
            |inputs| {
                let bed = &mut Bed::f64();
                let o = forward(inputs, bed).o;
                bed.get(o)
            },
            |inputs, dy| {
                let bed = &mut Bed::f64();
                let forward = forward(inputs, bed);
                let d_o = bed.floats(dy);
                let (dq, dk, dv) = (bed.output(query), bed.output(key), bed.output(key));
                bed.device.attention_backward(&AttentionBackward { forward, d_o, dq, dk, dv });
                vec![bed.get(dq), bed.get(dk), bed.get(dv)]
            },
        );
    }
}

/// <dweights, weights> + a * auxiliary loss + z * z loss, with all three weights random. The choice
/// is held by logits that lie far enough apart for the step of the differences.
#[test]
fn route() {
    let (tokens, experts, top_k, scale) = (13, 8, 3, 1.7);
    let cases = [
        (Scoring::Softmax, false),
        (Scoring::Softmax, true),
        (Scoring::Sigmoid, false),
        (Scoring::Sigmoid, true),
    ];
    for (scoring, norm_topk) in cases {
        let forward = |inputs: &[Vec<f64>], bed: &mut Bed| {
            let logits = bed.floats(&inputs[0]);
            let (probs, lse) = (bed.output(tokens * experts), bed.output(tokens));
            let ids = bed.output_of(DType::U32, tokens * top_k);
            let weights = bed.output(tokens * top_k);
            let counts = bed.output_of(DType::U32, experts);
            let prob_sums = bed.output_of(DType::F64, experts);
            let losses = bed.output_of(DType::F64, 2);
            let op = Route {
                tokens, experts, top_k, scoring, norm_topk, scale, groups: None, logits,
                bias: None, probs, lse, ids, weights, counts, prob_sums, losses,
            };
            bed.route(&op);
            op
        };
        let inputs = [uniform(1, tokens * experts).iter().map(|x| x * 3.0).collect()];
        check_gradients(
            "route",
            &inputs,
            |inputs| {
                let bed = &mut Bed::f64();
                let op = forward(inputs, bed);
                [bed.get(op.weights), bed.get(op.losses)].concat()
            },
            |inputs, dy| {
                let bed = &mut Bed::f64();
                let Route { logits, probs, lse, ids, counts, .. } = forward(inputs, bed);
                let (dweights, coefs) = dy.split_at(tokens * top_k);
                let (aux_coef, z_coef) = (coefs[0], coefs[1]);
                let dweights = bed.floats(dweights);
                let dlogits = bed.output(tokens * experts);
                bed.route_backward(&RouteBackward {
                    tokens, experts, top_k, scoring, norm_topk, scale, aux_coef, z_coef, logits,
                    probs, lse, ids, counts, dweights, dlogits,
                });
                vec![bed.get(dlogits)]
            },
        );
    }
}

/// The whole layer behind the router: out[t] = sum_k weight[t, k] * expert(x[t]), with two sources'
/// weight gradients added by the test.
#[test]
fn experts() {
    let cases = [(true, Activation::Silu), (false, Activation::Silu), (true, Activation::Gelu)];
    for (gated, activation) in cases {
        experts_case(gated, activation);
    }
}

fn experts_case(gated: bool, activation: Activation) {
    let (dim, hidden, tokens, top_k, experts) = (6, 9, 31, 2, 3);
    let (slots, size) = (tokens * top_k, hidden * dim);
    let width = if gated { 2 * hidden } else { hidden };
    let gates = if gated { experts } else { 0 };
    // x, routing weights, up, down, gate
    let mut inputs = vec![uniform(1, tokens * dim), uniform(2, slots)];
    inputs.extend((0..2 * experts + gates).map(|i| uniform(10 + i as u64, size)));
    struct Layer {
        pos: Buffer,
        rows: Buffer,
        offsets: Buffer,
        up: Vec<Buffer>,
        down: Vec<Buffer>,
        gate: Vec<Buffer>,
        x: Buffer,
        weights: Buffer,
        h: Buffer,
        a: Buffer,
        out: Buffer,
    }
    let forward = |inputs: &[Vec<f64>], bed: &mut Bed| {
        let ids = below(4, tokens, experts);
        let pair = |e: &u32| {
            let other = (e + 1) % experts as u32;
            [other.min(*e), other.max(*e)]
        };
        let ids: Vec<u32> = ids.iter().flat_map(pair).collect();
        let ids = bed.words(&ids);
        let counts = bed.output_of(DType::U32, experts);
        let offsets = bed.output_of(DType::U32, experts + 1);
        let (rows, pos) = (bed.output_of(DType::U32, slots), bed.output_of(DType::U32, slots));
        bed.place(&Place { tokens, top_k, experts, ids, counts, offsets, rows, pos });
        let (x, weights) = (bed.floats(&inputs[0]), bed.floats(&inputs[1]));
        let w: Vec<Buffer> = inputs[2..].iter().map(|w| bed.floats(w)).collect();
        let (up, rest) = w.split_at(experts);
        let (down, gate) = rest.split_at(experts);
        let [h, a, y] = [width, hidden, dim].map(|columns| bed.output(slots * columns));
        bed.experts_up(&ExpertsUp {
            dim, hidden, activation, gated, x, row_index: rows, offsets, w_gate: gate,
            w_up: up, h, a,
        });
        bed.experts_down(&ExpertsDown {
            dim, hidden, a, offsets, w_down: down, y,
        });
        let out = bed.output(tokens * dim);
        let residual = Some(x);
        bed.combine(&Combine { tokens, top_k, dim, y, pos, weights, residual, out });
        let (up, down, gate) = (up.to_vec(), down.to_vec(), gate.to_vec());
        Layer { pos, rows, offsets, up, down, gate, x, weights, h, a, out }
    };
    let backward = |inputs: &[Vec<f64>], dy: &[f64]| {
        let bed = &mut Bed::f64();
        let layer = forward(inputs, bed);
        let (pos, row_index, offsets) = (layer.pos, layer.rows, layer.offsets);
        let dy = bed.floats(dy);
        let s = bed.output(slots);
        bed.scatter_rows(&ScatterRows {
            rows: slots, dim: 1, x: layer.weights, index: pos, y: s,
        });
        let (ds, dh) = (bed.output(slots), bed.output(slots * width));
        let a_scaled = bed.output(slots * hidden);
        bed.experts_down_backward(&ExpertsDownBackward {
            dim, hidden, activation, gated, dy, row_index, offsets,
            w_down: &layer.down, h: layer.h, a: layer.a, s, ds, dh, a_scaled,
        });
        let outputs = |bed: &mut Bed, count| -> Vec<Buffer> {
            (0..count).map(|_| bed.output(size)).collect()
        };
        let (dw_down, dw_up) = (outputs(bed, experts), outputs(bed, experts));
        let dw_gate = outputs(bed, gates);
        bed.experts_down_wgrad(&ExpertsDownWgrad {
            dim, hidden, dy, row_index, offsets, a_scaled, dw_down: &dw_down,
        });
        let dx_rows = bed.output(slots * dim);
        bed.experts_dgrad(&ExpertsDgrad {
            dim, hidden, gated, dh, offsets, w_gate: &layer.gate, w_up: &layer.up,
            dx: dx_rows,
        });
        bed.experts_up_wgrad(&ExpertsUpWgrad {
            dim, hidden, gated, x: layer.x, row_index, offsets, dh, dw_gate: &dw_gate,
            dw_up: &dw_up,
        });
        // The residual brings dy itself.
        let dx = bed.output(tokens * dim);
        bed.device.copy(dy, dx);
        bed.scatter_sum(&ScatterSum {
            tokens, top_k, dim, accumulate: true, x: dx_rows, pos, out: dx,
        });
        let dweights = bed.output(slots);
        bed.gather_rows(&GatherRows { rows: slots, dim: 1, x: ds, index: pos, y: dweights });
        [&[dx, dweights], &dw_up[..], &dw_down[..], &dw_gate[..]]
            .concat()
            .into_iter()
            .map(|gradient| bed.get(gradient))
            .collect()
    };
    let out = |inputs: &[Vec<f64>]| {
        let bed = &mut Bed::f64();
        let out = forward(inputs, bed).out;
        bed.get(out)
    };
    check_gradients("experts", &inputs, out, backward);
}

#[test]
fn cross_entropy() {
    let (tokens, vocab) = (9, 37);
    let run = |values: &[f64], scale| {
        let bed = &mut Bed::f64();
        let logits = bed.floats(values);
        let mut targets = below(6, tokens, vocab);
        targets[2] = IGNORE;
        let targets = bed.words(&targets);
        let loss = bed.output(tokens);
        bed.cross_entropy(&CrossEntropy {
            tokens, vocab, scale, gradient: true, logits, targets, loss,
        });
        (bed.get(loss), bed.get(logits))
    };
    // Each token's loss has a weight of its own, which the op's one scale cannot have: scale here.
    let logits = [uniform(1, tokens * vocab).iter().map(|x| x * 4.0).collect::<Vec<f64>>()];
    check_gradients(
        "cross_entropy",
        &logits,
        |inputs| run(&inputs[0], 1.0).0,
        |inputs, weights| {
            let gradients = run(&inputs[0], 2.0).1;
            let weighted = |(i, d): (usize, &f64)| d * 0.5 * weights[i / vocab];
            vec![gradients.iter().enumerate().map(weighted).collect()]
        },
    );
}

#[test]
fn gated_mul() {
    gated_mul_case(Activation::Silu);
    gated_mul_case(Activation::Gelu);
    gated_mul_case(Activation::Relu);
}

fn gated_mul_case(activation: Activation) {
    let n = 41;
    let inputs = [uniform(1, n), uniform(2, n)];
    check_gradients(
        "gated_mul",
        &inputs,
        |inputs| {
            let bed = &mut Bed::f64();
            let (gate, up, out) = (bed.floats(&inputs[0]), bed.floats(&inputs[1]), bed.output(n));
            bed.device.gated_mul(&GatedMul { activation, gate, up, out });
            bed.get(out)
        },
        |inputs, dy| {
            let bed = &mut Bed::f64();
            let [gate, up, d_out] = [&inputs[0], &inputs[1], dy].map(|values| bed.floats(values));
            let (dgate, dup) = (bed.output(n), bed.output(n));
            let op = GatedMulBackward { activation, gate, up, d_out, dgate, dup };
            bed.device.gated_mul_backward(&op);
            vec![bed.get(dgate), bed.get(dup)]
        },
    );
}

#[test]
fn linear() {
    let (rows, columns, k) = (5, 7, 11);
    let inputs = [uniform(1, rows * k), uniform(2, columns * k), uniform(3, columns)];
    check_gradients(
        "linear",
        &inputs,
        |inputs| {
            let bed = &mut Bed::f64();
            let [a, b, bias] = [0, 1, 2].map(|i| bed.floats(&inputs[i]));
            let c = bed.output(rows * columns);
            let (m, n, layout) = (rows, columns, Layout::Nt);
            bed.device.matmul(&Matmul { layout, m, n, k, accumulate: false, a, b, c });
            bed.device.add_bias(&AddBias { rows, columns, x: c, bias });
            bed.get(c)
        },
        |inputs, dy| {
            let bed = &mut Bed::f64();
            let [a, b] = [0, 1].map(|i| bed.floats(&inputs[i]));
            let dy = bed.floats(dy);
            let (da, db) = (bed.output(rows * k), bed.output(columns * k));
            let dbias = bed.output(columns);
            let (layout, accumulate) = (Layout::Nn, false);
            bed.device.matmul(&Matmul {
                layout, m: rows, n: k, k: columns, accumulate, a: dy, b, c: da,
            });
            let layout = Layout::Tn;
            bed.device.matmul(&Matmul {
                layout, m: columns, n: k, k: rows, accumulate, a: dy, b: a, c: db,
            });
            bed.device.bias_backward(&BiasBackward { rows, columns, accumulate, dy, dbias });
            vec![bed.get(da), bed.get(db), bed.get(dbias)]
        },
    );
}
