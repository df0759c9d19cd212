//! The mixture-of-experts layer on the device, under sustained load (the chip is power-limited:
//! a cold start ranks wrongly).
//!
//! ```text
//! cargo bench --bench cuda_layer -- [--cases qwen3,olmoe] [--zipf] [--stages] [--fp32] [--search]
//! ```
//! Prints `ours CASE | forward | backward | both ms | TFLOP/s | memory | launches`, with
//! `--stages` the median of each stage. Its peer is `bench-peers/moe_torch.py`; run both in turn.

use std::time::{Duration, Instant};

use half::bf16;
use moejob_kernels::cuda::{
    Arch, Arena, Compiler, CudaError, Event, Gpu, Gradients, Measure, MoeActivation, MoeDesc,
    MoeLayer, MoeTensors, Output, ProductOp, Stream, Weights, default_cache_dir,
};
use moejob_kernels::{ArenaPlan, Buffer, DType};

type Failure = Box<dyn std::error::Error>;

/// T, D, F, E, K, gated
const CASES: [(&str, [usize; 5], bool); 6] = [
    ("tutel", [32768, 2048, 2048, 8, 2], false),
    ("olmoe", [32768, 2048, 1024, 64, 8], true),
    ("qwen3", [32768, 2048, 768, 128, 8], true),
    ("mixtral", [16384, 4096, 14336, 8, 2], true),
    ("sonic", [32768, 4096, 1024, 128, 8], true),
    ("dsv3", [8192, 7168, 2048, 32, 8], true),
];

const LOAD: Duration = Duration::from_millis(600);
const TIMED: Duration = Duration::from_millis(1500);

struct Bed {
    layer: MoeLayer,
    stream: Stream,
    arena: Arena,
    tensors: MoeTensors,
    dout: Buffer,
    out: Buffer,
    dx: Buffer,
    gradients: Gradients,
    saved_bytes: usize,
}

fn main() -> Result<(), Failure> {
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            eprintln!("skipped: no CUDA device: {error}");
            return Ok(());
        }
    };
    let args: Vec<String> = std::env::args().skip(1).collect();
    let flag = |name: &str| args.iter().any(|arg| arg == name);
    let value = |name: &str| args.iter().skip_while(|arg| *arg != name).nth(1).cloned();
    let compiler = Compiler::new(&gpu, default_cache_dir())?;
    let (major, minor) = compiler.nvrtc_version();
    println!("{}, {} SMs, NVRTC {major}.{minor}", gpu.name(), gpu.multiprocessors());
    let wanted = value("--cases");
    for (name, [tokens, dim, hidden, experts, top_k], gated) in CASES {
        if wanted.as_ref().is_some_and(|w| !w.split(',').any(|w| w == name)) {
            continue;
        }
        let activation = if gated { MoeActivation::Silu } else { MoeActivation::Relu };
        let fp32 = flag("--fp32");
        let weight_gradients = if fp32 { Output::F32Accumulate } else { Output::Bf16 };
        let desc = MoeDesc {
            tokens,
            dim,
            hidden,
            experts,
            top_k,
            activation,
            gated,
            sigmoid: false,
            norm_topk: true,
            scale: 1.0,
            aux_coef: 0.0,
            z_coef: 0.0,
            weight_gradients,
        };
        let configs = MoeLayer::configs(Arch::of(&gpu)?, &desc);
        let started = Instant::now();
        let layer = MoeLayer::with_configs(&compiler, desc, configs, &|_, _| ())?;
        let compiled = started.elapsed();
        let bed = Bed::new(&compiler, layer, flag("--zipf"))?;
        bed.report(name, compiled)?;
        if flag("--stages") {
            bed.stages()?;
        }
        drop(bed);
        if flag("--search") {
            search(&compiler, desc)?;
        }
    }
    Ok(())
}

/// Times single stages with other tiles than the chosen ones.
fn search(compiler: &Compiler, desc: MoeDesc) -> Result<(), Failure> {
    let base = MoeLayer::configs(Arch::of(compiler.gpu())?, &desc);
    // block_n, stages, cluster, ping-pong
    for (n, stages, cluster, pingpong) in
        [(256, 4, 2, false), (192, 5, 2, true), (128, 6, 2, true), (128, 6, 2, false)]
    {
        let mut configs = base;
        for config in &mut configs[1..7] {
            // Two m64n192 blocks and the operands of this epilogue do not fit in registers.
            let heavy = config.op == ProductOp::HiddenGradient && pingpong && n == 192;
            if !heavy {
                (config.block_n, config.stages) = (n, stages);
                (config.cluster, config.pingpong) = (cluster, pingpong);
            }
        }
        println!("  tiles 128x{n}, {stages} stages, cluster {cluster}, ping-pong {pingpong}");
        let layer = MoeLayer::with_configs(compiler, desc, configs, &|_, _| ())?;
        Bed::new(compiler, layer, false)?.stages()?;
    }
    Ok(())
}

impl Bed {
    fn new(compiler: &Compiler, layer: MoeLayer, zipf: bool) -> Result<Bed, Failure> {
        let desc = *layer.desc();
        let MoeDesc { tokens, dim, hidden, experts, .. } = desc;
        let mut plan = ArenaPlan::new();
        let mut bf16s = |len| plan.alloc(DType::Bf16, len);
        let x = bf16s(tokens * dim);
        let weights = Weights {
            router: bf16s(experts * dim),
            up: bf16s(experts * desc.width() * dim),
            down: bf16s(experts * dim * hidden),
        };
        let (dout, out, dx) = (bf16s(tokens * dim), bf16s(tokens * dim), bf16s(tokens * dim));
        let kind = if desc.weight_gradients == Output::Bf16 { DType::Bf16 } else { DType::F32 };
        let gradients = Gradients {
            router: plan.alloc(DType::F32, experts * dim),
            up: plan.alloc(kind, experts * desc.width() * dim),
            down: plan.alloc(kind, experts * dim * hidden),
        };
        let before = plan.bytes();
        let saved = layer.plan_saved(&mut plan);
        let saved_bytes = plan.bytes() - before;
        let workspace = plan.alloc(DType::U8, layer.workspace_bytes());
        let arena = Arena::new(compiler.gpu(), plan.bytes())?;
        let stream = compiler.gpu().stream()?;
        let measure = Measure::new(compiler)?;
        let per_dim = 1.0 / (dim as f32).sqrt();
        let ones = if zipf { dim as u32 } else { 0 };
        for (buffer, how) in [
            (x, (1, 1.0, ones)),
            (weights.router, (2, per_dim, 0)),
            (weights.up, (3, per_dim, 0)),
            (weights.down, (4, 1.0 / (hidden as f32).sqrt(), 0)),
            (dout, (5, 1.0, 0)),
        ] {
            measure.fill_random(&stream, &arena, buffer, how)?;
        }
        if zipf {
            // The first column of x is 1: a bias of -ln(rank) on each logit.
            stream.synchronize()?;
            for e in 0..experts {
                let bias = bf16::from_f32(-((e + 1) as f32).ln());
                arena.write(weights.router.slice(e * dim, 1), &[bias])?;
            }
        }
        let tensors = MoeTensors { x, weights, saved, workspace };
        Ok(Bed { layer, stream, arena, tensors, dout, out, dx, gradients, saved_bytes })
    }

    fn forward(&self) -> Result<(), CudaError> {
        self.layer.forward(&self.stream, &self.arena, &self.tensors, self.out)
    }

    fn backward(&self) -> Result<(), CudaError> {
        let Bed { stream, arena, tensors, dout, dx, gradients, .. } = self;
        self.layer.backward(stream, arena, tensors, *dout, *dx, gradients)
    }

    /// Medians of the forward, the backward and both, between events, under load.
    fn report(&self, name: &str, compiled: Duration) -> Result<(), Failure> {
        let gpu = self.arena.gpu();
        let started = Instant::now();
        while started.elapsed() < LOAD {
            for _ in 0..4 {
                self.forward()?;
                self.backward()?;
            }
            gpu.synchronize()?;
        }
        let (mut forward, mut both) = (Vec::new(), Vec::new());
        let started = Instant::now();
        while started.elapsed() < TIMED {
            let mut events = Vec::new();
            for _ in 0..4 {
                let marks = [Event::new(gpu)?, Event::new(gpu)?, Event::new(gpu)?];
                self.stream.record(&marks[0])?;
                self.forward()?;
                self.stream.record(&marks[1])?;
                self.backward()?;
                self.stream.record(&marks[2])?;
                events.push(marks);
            }
            gpu.synchronize()?;
            for [a, b, c] in &events {
                forward.push(a.milliseconds_to(b)?);
                both.push(a.milliseconds_to(c)?);
            }
        }
        let (forward, both) = (median(&mut forward), median(&mut both));
        let flops = self.layer.desc().flops();
        let rate = (flops.0 + flops.1) / f64::from(both) / 1e9;
        println!(
            "ours {name} | forward {forward:.3} | backward {:.3} | both {both:.3} ms \
             | {rate:.0} TFLOP/s | saved {} MiB, workspace {} MiB | kernels ready in {:.2} s",
            both - forward,
            self.saved_bytes >> 20,
            self.layer.workspace_bytes() >> 20,
            compiled.as_secs_f64(),
        );
        Ok(())
    }

    /// Each stage's median, in the stream of all of them, under load.
    fn stages(&self) -> Result<(), Failure> {
        let gpu = self.arena.gpu();
        let mut times: Vec<(&'static str, Vec<f32>)> = Vec::new();
        let started = Instant::now();
        while started.elapsed() < LOAD + TIMED / 2 {
            let mut marks = vec![("start", Event::new(gpu)?)];
            self.stream.record(&marks[0].1)?;
            let mut after = |stage| {
                let event = Event::new(gpu)?;
                self.stream.record(&event)?;
                marks.push((stage, event));
                Ok(())
            };
            let Bed { stream, arena, tensors, dout, dx, gradients, .. } = self;
            self.layer.forward_observed(stream, arena, tensors, self.out, &mut after)?;
            let ends = (*dout, *dx);
            self.layer.backward_observed(stream, arena, tensors, ends, gradients, &mut after)?;
            gpu.synchronize()?;
            if started.elapsed() < LOAD {
                continue;
            }
            for (i, pair) in marks.windows(2).enumerate() {
                let ms = pair[0].1.milliseconds_to(&pair[1].1)?;
                match times.get_mut(i) {
                    Some((_, of)) => of.push(ms),
                    None => times.push((pair[1].0, vec![ms])),
                }
            }
        }
        let line = times.iter_mut().map(|(stage, ms)| format!("{stage} {:.3}", median(ms)));
        println!("  stages, ms: {}", line.collect::<Vec<_>>().join(", "));
        Ok(())
    }
}

fn median(values: &mut [f32]) -> f32 {
    values.sort_by(f32::total_cmp);
    values[values.len() / 2]
}
