//! One row a kernel: shape | us | TFLOP/s or GB/s | % of the ceiling of this run | x peer.
//!
//! The ceilings are a product of 8192^3 by cuBLASLt and a copy, both under load. A product's peer
//! is cuBLASLt's batched one over E groups of equally many rows: the same operations with nothing
//! gathered, no activation, and nothing known but at run time.

use std::time::{Duration, Instant};

use moejob_kernels::cuda::{Arena, Compiler, DenseShape, Event, Gpu, Measure, Products, Stream};
use moejob_kernels::{ArenaPlan, DType, Layout, MoeDesc};

use super::Failure;

/// How long a reading loads the chip, and how long it measures.
#[derive(Clone, Copy)]
pub struct Reading {
    pub load: Duration,
    pub timed: Duration,
}

/// What this machine reaches in this run.
#[derive(Clone, Copy)]
pub struct Ceilings {
    /// Operations a millisecond
    pub dense: f64,
    /// Bytes a millisecond, read and written
    pub copy: f64,
}

impl Ceilings {
    pub fn measure(
        compiler: &Compiler,
        element: DType,
        reading: Reading,
    ) -> Result<Ceilings, Failure> {
        let n = 8192;
        let cube = DenseShape::new(Layout::Nt, [n; 3], element);
        let dense = dense_rate(compiler, cube, reading)?;
        let copy = copy_rate(compiler, element, reading)?;
        println!(
            "ceilings | cuBLASLt {n}^3 {element:?} {:.0} TFLOP/s | copy {:.0} GB/s",
            dense / 1e9,
            copy / 1e6
        );
        Ok(Ceilings { dense, copy })
    }
}

/// Prints the rows of the stages, each with its milliseconds.
pub fn print_stages(
    compiler: &Compiler,
    name: &str,
    desc: &MoeDesc,
    stages: &[(&'static str, f32)],
    ceilings: Ceilings,
    reading: Reading,
) -> Result<(), Failure> {
    println!("{name} kernel | shape | us | rate | % of ceiling | x peer");
    for (stage, ms) in stages {
        let (us, ms) = (ms * 1e3, f64::from(*ms));
        if let Some(peer) = peer(desc, stage) {
            let DenseShape { batch, m, n, k, .. } = peer;
            let rate = flops(desc, stage) / ms;
            let x = dense_rate(compiler, peer, reading)? / rate;
            println!(
                "{name} {stage} | {batch} x {m} x {n} x {k} | {us:.0} us | {:.0} TFLOP/s \
                 | {:.0}% | {x:.2}",
                rate / 1e9,
                100.0 * rate / ceilings.dense
            );
        } else if let Some(bytes) = moved_bytes(desc, stage) {
            let rate = bytes / ms;
            println!(
                "{name} {stage} | {} rows of {} | {us:.0} us | {:.0} GB/s | {:.0}% | -",
                desc.rows(),
                desc.dim,
                rate / 1e6,
                100.0 * rate / ceilings.copy
            );
        } else {
            println!("{name} {stage} | {} pairs | {us:.1} us | - | - | -", desc.rows());
        }
    }
    Ok(())
}

/// cuBLASLt's product of as many operations.
fn peer(desc: &MoeDesc, stage: &str) -> Option<DenseShape> {
    use Layout::{Nn, Nt, Tn};
    let MoeDesc { tokens, dim, hidden, experts, element, .. } = *desc;
    let (width, rows) = (desc.width(), (desc.rows() / experts).max(1));
    let (layout, batch, m, n, k) = match stage {
        "logits" => (Nt, 1, tokens, experts, dim),
        "up" => (Nt, experts, rows, width, dim),
        "down" => (Nt, experts, rows, dim, hidden),
        "dh" => (Nn, experts, rows, hidden, dim),
        "dx_rows" => (Nn, experts, rows, dim, width),
        "dw_up" => (Tn, experts, width, dim, rows),
        "dw_down" => (Tn, experts, dim, hidden, rows),
        "dx_router" => (Nn, 1, tokens, dim, experts),
        "dw_router" => (Tn, 1, experts, dim, tokens),
        _ => return None,
    };
    Some(DenseShape { batch, ..DenseShape::new(layout, [m, n, k], element) })
}

/// Useful operations of a stage that is a product.
fn flops(desc: &MoeDesc, stage: &str) -> f64 {
    let (rows, cols) = match stage {
        "up" | "dx_rows" | "dw_up" => (desc.rows(), desc.width()),
        "down" | "dh" | "dw_down" => (desc.rows(), desc.hidden),
        _ => (desc.tokens, desc.experts),
    };
    2.0 * rows as f64 * desc.dim as f64 * cols as f64
}

/// Bytes that the stages which only move rows must read and write.
fn moved_bytes(desc: &MoeDesc, stage: &str) -> Option<f64> {
    let (rows, tokens) = ((desc.rows() * desc.dim * 2) as f64, (desc.tokens * desc.dim * 2) as f64);
    match stage {
        "combine" => Some(rows + tokens),
        "sum_dx" => Some(rows + 2.0 * tokens),
        _ => None,
    }
}

/// Operations a millisecond of a dense product.
fn dense_rate(compiler: &Compiler, shape: DenseShape, reading: Reading) -> Result<f64, Failure> {
    let gpu = compiler.gpu();
    let products = std::cell::RefCell::new(Products::new(gpu)?);
    let mut plan = ArenaPlan::new();
    let operands = shape.sizes().map(|len| plan.alloc(shape.element, len));
    let (arena, stream) = (Arena::new(gpu, plan.bytes())?, gpu.stream()?);
    let measure = Measure::new(compiler, shape.element)?;
    for (seed, operand) in (11..).zip(operands) {
        measure.fill_random(&stream, &arena, operand, (seed, 0.1, 0))?;
    }
    let addresses = operands.map(|operand| arena.address(operand));
    // SAFETY: the operands are as long as the shape says, and this stream's alone.
    let run = || Ok(unsafe { products.borrow_mut().launch(&stream, shape, addresses) }?);
    Ok(shape.flops() / f64::from(median_ms(gpu, &stream, reading, &run)?))
}

/// Bytes a millisecond of a copy of 1 GiB, read and written.
pub fn copy_rate(compiler: &Compiler, element: DType, reading: Reading) -> Result<f64, Failure> {
    let gpu = compiler.gpu();
    let measure = Measure::new(compiler, element)?;
    let mut plan = ArenaPlan::new();
    let [from, to] = [(); 2].map(|()| plan.alloc(element, 1 << 29));
    let (arena, stream) = (Arena::new(gpu, plan.bytes())?, gpu.stream()?);
    measure.fill_random(&stream, &arena, from, (7, 1.0, 0))?;
    let run = || Ok(measure.copy(&stream, &arena, from, to).map(|_| ())?);
    Ok(2.0 * from.bytes() as f64 / f64::from(median_ms(gpu, &stream, reading, &run)?))
}

/// The median of single runs, after and under the same load.
fn median_ms(
    gpu: &Gpu,
    stream: &Stream,
    reading: Reading,
    run: &dyn Fn() -> Result<(), Failure>,
) -> Result<f32, Failure> {
    let started = Instant::now();
    while started.elapsed() < reading.load {
        for _ in 0..16 {
            run()?;
        }
        gpu.synchronize()?;
    }
    let mut times = Vec::new();
    let started = Instant::now();
    while started.elapsed() < reading.timed {
        let mut marks = Vec::new();
        for _ in 0..16 {
            let pair = [Event::new(gpu)?, Event::new(gpu)?];
            stream.record(&pair[0])?;
            run()?;
            stream.record(&pair[1])?;
            marks.push(pair);
        }
        gpu.synchronize()?;
        for [first, last] in &marks {
            times.push(first.milliseconds_to(last)?);
        }
    }
    Ok(median(&mut times))
}

pub fn median(values: &mut [f32]) -> f32 {
    values.sort_by(f32::total_cmp);
    values[values.len() / 2]
}
