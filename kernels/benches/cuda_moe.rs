//! The mixture-of-experts layer on a GPU under sustained load, forward and backward, by stage:
//! `cargo bench -p moejob-kernels --bench cuda_moe -- [case ...] [zipf] [fp32] [seconds=1.5]`
//! Words such as `dh=128,6,2,p` try other tiles: columns, stages, cluster, p for ping-pong.
//!
//! The chip is power-limited, so a cold start ranks wrongly: each case first runs for 0.6 s, and
//! what is printed is the median of the rounds that follow. The twin in PyTorch is
//! `kernels/bench-peers/torch_moe.py`, which times itself in the same way.

use std::collections::BTreeMap;
use std::error::Error;
use std::time::{Duration, Instant};

use half::bf16;
use moejob_kernels::cuda::{
    Arch, Arena, Compiler, Event, GemmConfig, Gpu, Gradients, Measure, MoeActivation, MoeDesc, MoeLayer, MoeTensors,
    Output, Stream, Weights, default_cache_dir,
};
use moejob_kernels::{ArenaPlan, Buffer, DType};

const WARM_UP: Duration = Duration::from_millis(600);

/// Name, T, D, F, E, K, gated.
const CASES: [(&str, usize, usize, usize, usize, usize, bool); 6] = [
    ("tutel_fig1", 32768, 2048, 2048, 8, 2, false),
    ("olmoe", 32768, 2048, 1024, 64, 8, true),
    ("qwen3_30b", 32768, 2048, 768, 128, 8, true),
    ("mixtral", 16384, 4096, 14336, 8, 2, true),
    ("sonic_7b", 32768, 4096, 1024, 128, 8, true),
    ("dsv3_ep8", 8192, 7168, 2048, 32, 8, true),
];

struct Settings {
    picked: Vec<String>,
    zipf: bool,
    fp32: bool,
    seconds: f64,
    tiles: Vec<(usize, GemmTile)>,
}

/// Columns, stages, cluster, ping-pong.
type GemmTile = (usize, usize, usize, bool);

/// In the order of `MoeLayer::configs`.
const PRODUCTS: [&str; 9] =
    ["logits", "up", "down", "dh", "dx_rows", "dw_up", "dw_down", "dx_router", "dw_router"];

fn tile(word: &str) -> Option<(usize, GemmTile)> {
    let (name, tile) = word.split_once('=')?;
    let product = PRODUCTS.iter().position(|product| *product == name)?;
    let mut parts = tile.split(',');
    let mut number = || parts.next()?.parse().ok();
    let (columns, stages, cluster) = (number()?, number()?, number()?);
    Some((product, (columns, stages, cluster, parts.next() == Some("p"))))
}

fn main() -> Result<(), Box<dyn Error>> {
    let words: Vec<String> = std::env::args().skip(1).filter(|w| !w.starts_with('-')).collect();
    let has = |word: &str| words.iter().any(|w| w == word);
    let seconds = words.iter().find_map(|w| w.strip_prefix("seconds=")?.parse().ok());
    let settings = Settings {
        picked: words.iter().filter(|w| CASES.iter().any(|case| case.0 == *w)).cloned().collect(),
        zipf: has("zipf"),
        fp32: has("fp32"),
        seconds: seconds.unwrap_or(1.5),
        tiles: words.iter().filter_map(|word| tile(word)).collect(),
    };
    let gpu = match Gpu::open(0) {
        Ok(gpu) => gpu,
        Err(error) => {
            println!("nothing measured, no CUDA device: {error}");
            return Ok(());
        }
    };
    let compiler = Compiler::new(&gpu, default_cache_dir())?;
    println!("{}, NVRTC {:?}", gpu.name(), compiler.nvrtc_version());
    let copy = copy_ceiling(&compiler)?;
    println!("copy: {copy:.0} GB/s read and written");
    for (name, tokens, dim, hidden, experts, top_k, gated) in CASES {
        if !settings.picked.is_empty() && !settings.picked.iter().any(|w| w == name) {
            continue;
        }
        let desc = MoeDesc {
            tokens,
            dim,
            hidden,
            experts,
            top_k,
            activation: if gated { MoeActivation::Silu } else { MoeActivation::Relu },
            gated,
            sigmoid: false,
            norm_topk: true,
            scale: 1.0,
            aux_coef: 0.0,
            z_coef: 0.0,
            weight_gradients: if settings.fp32 { Output::F32Accumulate } else { Output::Bf16 },
        };
        Bench::new(&compiler, desc, &settings)?.run(name, &settings, copy)?;
    }
    Ok(())
}

/// Bytes a second that a copy reads and writes, in GB/s, under load.
fn copy_ceiling(compiler: &Compiler) -> Result<f64, Box<dyn Error>> {
    let (measure, stream) = (Measure::new(compiler)?, compiler.gpu().stream()?);
    let mut plan = ArenaPlan::new();
    let (a, b) = (plan.alloc(DType::U8, 1 << 30), plan.alloc(DType::U8, 1 << 30));
    let arena = Arena::new(compiler.gpu(), plan.bytes())?;
    arena.fill_bytes(&stream, a, 1)?;
    let (start, end) = (Event::new(compiler.gpu())?, Event::new(compiler.gpu())?);
    let mut times = Vec::new();
    for _ in 0..200 {
        stream.record(&start)?;
        measure.copy(&stream, &arena, a, b)?;
        stream.record(&end)?;
        end.synchronize()?;
        times.push(f64::from(start.milliseconds_to(&end)?));
    }
    Ok(2.0 * (1_u64 << 30) as f64 / median(&mut times) / 1e6)
}

fn median(values: &mut [f64]) -> f64 {
    values.sort_by(f64::total_cmp);
    values[values.len() / 2]
}

struct Bench {
    desc: MoeDesc,
    layer: MoeLayer,
    stream: Stream,
    arena: Arena,
    tensors: MoeTensors,
    dout: Buffer,
    out: Buffer,
    dx: Buffer,
    gradients: Gradients,
    built_s: f64,
    saved_bytes: usize,
}

impl Bench {
    fn new(
        compiler: &Compiler,
        desc: MoeDesc,
        settings: &Settings,
    ) -> Result<Bench, Box<dyn Error>> {
        let start = Instant::now();
        let mut configs = MoeLayer::configs(Arch::of(compiler.gpu())?, &desc);
        for (product, (block_n, stages, cluster, pingpong)) in settings.tiles.iter().copied() {
            let config = configs[product];
            configs[product] = GemmConfig { block_n, stages, cluster, pingpong, ..config };
        }
        let layer = MoeLayer::with_configs(compiler, desc, configs, &|_, _| ())?;
        let built_s = start.elapsed().as_secs_f64();
        let MoeDesc { tokens, dim, hidden, experts, .. } = desc;
        let mut plan = ArenaPlan::new();
        let saved = layer.plan_saved(&mut plan);
        let saved_bytes = plan.bytes();
        let workspace = plan.alloc(DType::U8, layer.workspace_bytes());
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
            up: plan.alloc(kind, weights.up.len()),
            down: plan.alloc(kind, weights.down.len()),
        };
        let (arena, stream) = (Arena::new(compiler.gpu(), plan.bytes())?, compiler.gpu().stream()?);
        let measure = Measure::new(compiler)?;
        let per_dim = 1.0 / (dim as f32).sqrt();
        for (buffer, how) in [
            (x, (1, 1.0, dim as u32)),
            (weights.router, (2, per_dim, 0)),
            (weights.up, (3, per_dim, 0)),
            (weights.down, (4, 1.0 / (hidden as f32).sqrt(), 0)),
            (dout, (5, 0.01, 0)),
        ] {
            measure.fill_random(&stream, &arena, buffer, how)?;
        }
        for gradient in [gradients.router, gradients.up, gradients.down] {
            arena.fill_bytes(&stream, gradient, 0)?;
        }
        stream.synchronize()?;
        for e in 0..experts {
            // The first column of x is 1, so this is a bias: random loads, or a long tail of them.
            let bias = if settings.zipf { -((e + 1) as f64).ln() } else { 0.0 };
            arena.write(weights.router.slice(e * dim, 1), &[bf16::from_f64(bias)])?;
        }
        let tensors = MoeTensors { x, weights, saved, workspace };
        Ok(Bench {
            desc, layer, stream, arena, tensors, dout, out, dx, gradients, built_s, saved_bytes,
        })
    }

    fn run(&self, name: &str, settings: &Settings, copy: f64) -> Result<(), Box<dyn Error>> {
        let gpu = self.stream.gpu();
        let events = (0..40).map(|_| Event::new(gpu)).collect::<Result<Vec<_>, _>>()?;
        let start = Instant::now();
        while start.elapsed() < WARM_UP {
            self.round(&events)?;
        }
        let mut stages: BTreeMap<usize, (&'static str, Vec<f64>)> = BTreeMap::new();
        let (mut whole, mut forward) = (Vec::new(), Vec::new());
        let start = Instant::now();
        while start.elapsed().as_secs_f64() < settings.seconds {
            let (names, forward_stages) = self.round(&events)?;
            for (i, name) in names.iter().enumerate() {
                let ms = f64::from(events[i].milliseconds_to(&events[i + 1])?);
                stages.entry(i).or_insert((name, Vec::new())).1.push(ms);
            }
            whole.push(f64::from(events[0].milliseconds_to(&events[names.len()])?));
            forward.push(f64::from(events[0].milliseconds_to(&events[forward_stages])?));
        }
        self.print(name, settings, (median(&mut whole), median(&mut forward)));
        for (_, (stage, mut times)) in stages {
            self.print_stage(stage, median(&mut times), copy);
        }
        Ok(())
    }

    /// One forward and backward between events: the stages' names, and how many are forward.
    fn round(&self, events: &[Event]) -> Result<(Vec<&'static str>, usize), Box<dyn Error>> {
        let Bench { stream, arena, tensors, gradients, .. } = self;
        let mut names = Vec::new();
        stream.record(&events[0])?;
        self.layer.forward_observed(stream, arena, tensors, self.out, &mut |name| {
            names.push(name);
            stream.record(&events[names.len()])
        })?;
        let forward = names.len();
        let (dout, dx) = (self.dout, self.dx);
        self.layer.backward_observed(stream, arena, tensors, (dout, dx), gradients, &mut |name| {
            names.push(name);
            stream.record(&events[names.len()])
        })?;
        events[names.len()].synchronize()?;
        Ok((names, forward))
    }

    fn print(&self, name: &str, settings: &Settings, (whole, forward): (f64, f64)) {
        let MoeDesc { tokens, dim, hidden, experts, top_k, .. } = self.desc;
        let (forward_flops, backward_flops) = self.desc.flops();
        let rate = |flops: f64, ms: f64| flops / ms / 1e9;
        let mib = |bytes: usize| bytes >> 20;
        let routing = if settings.zipf { "zipf" } else { "random" };
        println!(
            "\nmoejob | {name} ({tokens}, {dim}, {hidden}, {experts}, {top_k}) {routing} | \
             {whole:.3} ms, {:.0} TFLOP/s | forward {forward:.3} ms, {:.0} | backward {:.3} ms, \
             {:.0} | saved {} MiB, workspace {} MiB | kernels ready in {:.2} s",
            rate(forward_flops + backward_flops, whole),
            rate(forward_flops, forward),
            whole - forward,
            rate(backward_flops, whole - forward),
            mib(self.saved_bytes),
            mib(self.layer.workspace_bytes()),
            self.built_s,
        );
    }

    /// Useful operations or bytes of a stage over its time.
    fn print_stage(&self, stage: &str, ms: f64, copy: f64) {
        let MoeDesc { tokens, dim, hidden, .. } = self.desc;
        let rows = self.desc.rows();
        let product = |cols: usize| 2.0 * rows as f64 * dim as f64 * cols as f64;
        let rate = match stage {
            "up" | "dx_rows" | "dw_up" => Some(product(self.desc.width())),
            "down" => Some(product(hidden) / if 2 * hidden <= dim { 2.0 } else { 1.0 }),
            "dh" | "dw_down" => Some(product(hidden)),
            _ => None,
        };
        let passes = if stage == "combine" && 2 * hidden <= dim { 2 } else { 1 };
        let bytes = match stage {
            "combine" => Some((rows + tokens) * dim * 2 / passes),
            "sum_dx" => Some((rows + 2 * tokens) * dim * 2),
            _ => None,
        };
        let detail = match (rate, bytes) {
            (Some(flops), _) => format!("{:.0} TFLOP/s", flops / ms / 1e9),
            (_, Some(bytes)) => {
                let speed = bytes as f64 / ms / 1e6;
                format!("{speed:.0} GB/s, {:.0}% of a copy", 100.0 * speed / copy)
            }
            _ => String::new(),
        };
        println!("  {stage:>10} | {:>9.1} us | {detail}", ms * 1e3);
    }
}
