//! Every op of one layer and of the ends at the size of the first example:
//! `cargo bench -p moejob-kernels --bench cpu_ops`; after `--`, a word picks the ops of that name
//! and a number says how many threads.
//!
//! 512 tokens (a micro-batch of 2 x 256), D 128, 4 heads of 32, 8 experts, top-2, F 128, V 256.
//! Products count 2 m n k operations (attention: what its causal half needs); the other ops are
//! told by the bytes that they must read and write.

use std::time::Instant;

use moejob_kernels::parts::*;
use moejob_kernels::*;

const ROUNDS: usize = 25;
const SECONDS_PER_ROUND: f64 = 0.01;
const T: usize = 512;
const D: usize = 128;
const N: usize = 4;
const H: usize = 32;
const E: usize = 8;
const K: usize = 2;
const F: usize = 128;
const V: usize = 256;
const R: usize = T * K;

struct Bench {
    device: Device,
    plan: ArenaPlan,
    total_us: f64,
    picked: Option<String>,
}

fn main() {
    let words: Vec<String> = std::env::args().skip(1).filter(|w| !w.starts_with('-')).collect();
    let threads = words.iter().find_map(|word| word.parse().ok()).unwrap_or(1);
    let picked = words.into_iter().find(|word| word.parse::<usize>().is_err());
    let device = Device::cpu(threads, 1 << 28).expect("a device");
    let mut bench = Bench { device, plan: ArenaPlan::new(), total_us: 0.0, picked };
    println!("{:>22} | {:>8} | {:>8} | {:>6}", "op", "us", "GFLOP/s", "GB/s");
    norms_and_ends(&mut bench);
    attention(&mut bench);
    experts(&mut bench);
    println!("{:>22} | {:>8.1} |", "all", bench.total_us);
}

impl Bench {
    fn floats(&mut self, len: usize) -> Buffer {
        let x = self.plan.alloc(DType::F32, len);
        let values: Vec<f32> = (0..len).map(|i| (i * 37 % 101) as f32 / 50.0 - 1.0).collect();
        self.device.write(x, &values);
        x
    }

    fn words(&mut self, values: impl Iterator<Item = u32>) -> Buffer {
        let values: Vec<u32> = values.collect();
        let x = self.plan.alloc(DType::U32, values.len());
        self.device.write(x, &values);
        x
    }

    /// Measures a call that does `flops` operations and moves `floats` f32.
    fn time(&mut self, name: &str, flops: usize, floats: usize, f: impl Fn(&mut Device)) {
        if self.picked.as_ref().is_some_and(|picked| !name.contains(picked)) {
            f(&mut self.device);
            return;
        }
        let once = |device: &mut Device, repeats: usize| {
            let start = Instant::now();
            for _ in 0..repeats {
                f(device);
            }
            start.elapsed().as_secs_f64() / repeats as f64
        };
        let repeats = (SECONDS_PER_ROUND / once(&mut self.device, 3)).ceil() as usize;
        let rounds = (0..ROUNDS).map(|_| once(&mut self.device, repeats));
        let seconds = rounds.fold(f64::INFINITY, f64::min);
        let per_second = |count: usize| count as f64 / seconds / 1e9;
        let (rate, bytes) = (per_second(flops), per_second(4 * floats));
        println!("{name:>22} | {:>8.1} | {rate:>8.1} | {bytes:>6.1}", seconds * 1e6);
        self.total_us += seconds * 1e6;
    }

    /// [`Bench::time`] of a part of an op.
    fn part(&mut self, name: &str, flops: usize, floats: usize, f: impl Fn(&mut CpuDevice)) {
        self.time(name, flops, floats, |device| f(device.as_cpu_mut().expect("a processor")));
    }
}

fn norms_and_ends(bench: &mut Bench) {
    let ids = bench.words((0..T as u32).map(|t| t * 7 % V as u32));
    let [x, y, dx] = [(); 3].map(|_| bench.floats(T * D));
    let [w, dw, rstd] = [D, D, T].map(|len| bench.floats(len));
    let [table, logits] = [V * D, T * V].map(|len| bench.floats(len));
    let loss = bench.plan.alloc(DType::F64, T);
    let embed = Embed { tokens: T, dim: D, vocab: V, ids, table, x };
    bench.time("embed", 0, 2 * T * D, |device| device.embed(&embed));
    let op = EmbedBackward { tokens: T, dim: D, vocab: V, ids, dx, dtable: table };
    bench.time("embed_backward", 0, 3 * T * D, |device| device.embed_backward(&op));
    let op = RmsNorm { rows: T, dim: D, eps: 1e-5, x, w, y, rstd };
    bench.time("rms_norm", 0, 2 * T * D, |device| device.rms_norm(&op));
    let op = RmsNormBackward {
        rows: T, dim: D, x, w, rstd, dy: y, dx, dw, accumulate_dx: false, accumulate_dw: false,
    };
    bench.time("rms_norm_backward", 0, 3 * T * D, |device| device.rms_norm_backward(&op));
    let op = CrossEntropy {
        tokens: T, vocab: V, scale: 1e-3, gradient: true, logits, targets: ids, loss,
    };
    bench.part("cross_entropy", 0, 2 * T * V, |cpu| cpu.cross_entropy::<f32>(&op));
    let n = 1 << 20;
    let [w, m, g] = [(); 3].map(|_| bench.floats(n));
    bench.time("add of 1 Mi", 0, 3 * n, |device| device.add(&Add { a: m, b: g }));
    let op = InitNormal { seed: 1, name_hash: 2, first: 0, place: Strided::ALL, std: 0.02, x: w };
    bench.time("init_normal of 1 Mi", 0, n, |device| device.init_normal(&op));
    bench.total_us = 0.0;
}

fn attention(bench: &mut Bench) {
    let [q, k, v, o, d_o, dq, dk, dv] = [(); 8].map(|_| bench.floats(T * N * H));
    let lse = bench.floats(T * N);
    let positions = bench.words((0..T as u32).map(|t| t % 256));
    let op = Rope {
        tokens: T, heads: N, head_dim: H, theta: 1e4, inverse: false, positions, x: q,
    };
    bench.time("rope", 0, 2 * T * N * H, |device| device.rope(&op));
    let (batch, seq, heads, kv_heads, head_dim, scale) = (2, T / 2, N, N, H, 0.1);
    let op = Attention {
        batch, seq, heads, kv_heads, head_dim, scale, q, k, v, starts: None, window: None,
        deterministic: true, workspace: None, o, lse,
    };
    let flops = 2 * batch * heads * seq * seq * head_dim;
    bench.time("attention", flops, 4 * T * N * H, |device| device.attention(&op));
    let op = AttentionBackward { forward: op, d_o, dq, dk, dv };
    let backward = |device: &mut Device| device.attention_backward(&op);
    bench.time("attention_backward", 5 * flops / 2, 8 * T * N * H, backward);
}

fn experts(bench: &mut Bench) {
    let logits: Vec<f32> = (0..T * E).map(|i| (i * 7919 % 1013) as f32 / 500.0).collect();
    let [router_logits, probs, dlogits] = [(); 3].map(|_| bench.floats(T * E));
    bench.device.write(router_logits, &logits);
    let [weights, dweights, s, ds, lse] = [R, R, R, R, T].map(|len| bench.floats(len));
    let words = |bench: &mut Bench, len| bench.plan.alloc(DType::U32, len);
    let [ids, rows, pos] = [(); 3].map(|_| words(bench, R));
    let [counts, offsets] = [E, E + 1].map(|len| words(bench, len));
    let [prob_sums, losses] = [E, 2].map(|len| bench.plan.alloc(DType::F64, len));
    let (tokens, experts, top_k, dim, hidden) = (T, E, K, D, F);
    let (scoring, norm_topk, scale) = (Scoring::Softmax, true, 1.0);
    let op = Route {
        tokens, experts, top_k, scoring, norm_topk, scale, groups: None, logits: router_logits,
        bias: None, probs, lse, ids, weights, counts, prob_sums, losses,
    };
    bench.part("route", 0, 2 * T * E, |cpu| cpu.route::<f32>(&op));
    let op = RouteBackward {
        tokens, experts, top_k, scoring, norm_topk, scale, aux_coef: 0.01, z_coef: 0.0,
        logits: router_logits, probs, lse, ids, counts, dweights, dlogits,
    };
    bench.part("route_backward", 0, 2 * T * E, |cpu| cpu.route_backward::<f32>(&op));
    let op = Place { tokens, top_k, experts, ids, counts, offsets, rows, pos };
    bench.part("place", 0, 3 * R, |cpu| cpu.place(&op));
    let [x, dy, out] = [(); 3].map(|_| bench.floats(T * D));
    let [y, dx] = [(); 2].map(|_| bench.floats(R * D));
    let [h, dh] = [(); 2].map(|_| bench.floats(R * 2 * F));
    let [a, a_scaled] = [(); 2].map(|_| bench.floats(R * F));
    let [w_gate, w_up, w_down, dw_gate, dw_up, dw_down] =
        [(); 6].map(|_| (0..E).map(|_| bench.floats(D * F)).collect::<Vec<Buffer>>());
    let (gated, activation, row_index) = (true, Activation::Silu, rows);
    let op = ExpertsUp {
        dim, hidden, activation, gated, x, row_index, offsets, w_gate: &w_gate,
        w_up: &w_up, h, a,
    };
    let flops = 2 * R * D * F;
    bench.part("experts_up", 2 * flops, R * (D + 3 * F), |cpu| cpu.experts_up::<f32>(&op));
    let op = ExpertsDown { dim, hidden, a, offsets, w_down: &w_down, y };
    bench.part("experts_down", flops, R * (D + F), |cpu| cpu.experts_down::<f32>(&op));
    let op = Combine { tokens, top_k, dim, y, pos, weights, residual: Some(x), out };
    bench.part("combine", 0, R * D + 2 * T * D, |cpu| cpu.combine::<f32>(&op));
    let op = ExpertsDownBackward {
        dim, hidden, activation, gated, dy, row_index, offsets, w_down: &w_down, h, a, s,
        ds, dh, a_scaled,
    };
    let floats = R * (D + 6 * F);
    bench.part("experts_down_backward", flops, floats, |cpu| cpu.experts_down_backward::<f32>(&op));
    let op = ExpertsDownWgrad {
        dim, hidden, dy, row_index, offsets, a_scaled, dw_down: &dw_down,
    };
    bench.part("experts_down_wgrad", flops, R * (D + F), |cpu| cpu.experts_down_wgrad::<f32>(&op));
    let op = ExpertsDgrad {
        dim, hidden, gated, dh, offsets, w_gate: &w_gate, w_up: &w_up, dx,
    };
    bench.part("experts_dgrad", 2 * flops, R * (D + 2 * F), |cpu| cpu.experts_dgrad::<f32>(&op));
    let op = ExpertsUpWgrad {
        dim, hidden, gated, x, row_index, offsets, dh, dw_gate: &dw_gate, dw_up: &dw_up,
    };
    let floats = R * (D + 2 * F);
    bench.part("experts_up_wgrad", 2 * flops, floats, |cpu| cpu.experts_up_wgrad::<f32>(&op));
    let op = ScatterSum { tokens, top_k, dim, accumulate: false, x: dx, pos, out };
    bench.part("scatter_sum", 0, R * D + T * D, |cpu| cpu.scatter_sum::<f32>(&op));
}
