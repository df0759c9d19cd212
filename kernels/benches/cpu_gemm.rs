//! Products of the CPU device beside the crate `gemm` on one thread:
//! `cargo bench -p moejob-kernels --bench cpu_gemm`.
//!
//! The peer is compiled with its AVX-512 kernels. Rounds alternate between the two, and each is
//! reported by its fastest round, so that a neighbour's load hurts neither more than the other.

use std::time::Instant;

use moejob_kernels::{ArenaPlan, Buffer, DType, Device, Layout, Matmul};

const ROUNDS: usize = 15;
const SECONDS_PER_ROUND: f64 = 0.02;

fn main() {
    println!("{:>22} | {:>9} | {:>8} | {:>8} | {:>7}", "shape", "us", "GFLOP/s", "gemm", "% of it");
    let large = [(2048, 2048, 2048), (1024, 1024, 1024)];
    let ours = [
        (512, 384, 128),
        (512, 128, 128),
        (512, 256, 128),
        (512, 8, 128),
        (128, 128, 128),
        (64, 128, 128),
        (32, 128, 128),
        (32, 384, 128),
        (128, 128, 512),
        (256, 256, 32),
    ];
    for (m, n, k) in large.into_iter().chain(ours) {
        for layout in [Layout::Nt, Layout::Nn, Layout::Tn] {
            measure(layout, m, n, k);
        }
    }
}

fn measure(layout: Layout, m: usize, n: usize, k: usize) {
    let mut plan = ArenaPlan::new();
    let [a, b, c] = [m * k, k * n, m * n].map(|len| plan.alloc(DType::F32, len));
    let mut device = Device::cpu(1, plan.bytes()).expect("a device");
    for buffer in [a, b] {
        let values: Vec<f32> = (0..buffer.len()).map(|i| (i % 17) as f32 - 8.0).collect();
        device.write(buffer, &values);
    }
    let op = Matmul { layout, m, n, k, accumulate: false, a, b, c };
    let flops = (2 * m * n * k) as f64;
    let repeats = (SECONDS_PER_ROUND * 60e9 / flops).ceil() as usize;
    let (mut us, mut peer_us) = (f64::INFINITY, f64::INFINITY);
    for _ in 0..ROUNDS {
        us = us.min(time(repeats, || device.matmul(&op)));
        peer_us = peer_us.min(time(repeats, || peer(&mut device, &op)));
    }
    let (rate, peer_rate) = (flops / us / 1e3, flops / peer_us / 1e3);
    let shape = format!("{layout:?} {m} x {n} x {k}");
    let share = 100.0 * rate / peer_rate;
    println!("{shape:>22} | {us:>9.1} | {rate:>8.1} | {peer_rate:>8.1} | {share:>7.0}");
}

/// Microseconds of one call.
fn time(repeats: usize, mut f: impl FnMut()) -> f64 {
    let start = Instant::now();
    for _ in 0..repeats {
        f();
    }
    start.elapsed().as_secs_f64() * 1e6 / repeats as f64
}

/// The same product by the crate `gemm`, on the same memory.
fn peer(device: &mut Device, op: &Matmul) {
    let cpu = device.as_cpu_mut().expect("a CPU device");
    let pointer = |buffer: Buffer| cpu.slice::<f32>(buffer).as_ptr();
    let (a, b) = (pointer(op.a), pointer(op.b));
    let c = cpu.slice_mut::<f32>(op.c).as_mut_ptr();
    let (m, n, k) = (op.m as isize, op.n as isize, op.k as isize);
    let (a_column, a_row) = if op.layout == Layout::Tn { (m, 1) } else { (1, k) };
    let (b_column, b_row) = if op.layout == Layout::Nt { (k, 1) } else { (1, n) };
    // SAFETY: the buffers have the sizes of the product and do not overlap; A and B are only read.
    unsafe {
        gemm::gemm(
            op.m, op.n, op.k, c, 1, n, false, a, a_column, a_row, b, b_column, b_row, 0.0, 1.0,
            false, false, false, gemm::Parallelism::None,
        );
    }
}
