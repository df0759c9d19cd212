//! The mixture-of-experts layer on the device, under sustained load (the chip is power-limited:
//! a cold start ranks wrongly).
//!
//! ```text
//! cargo bench --bench cuda_layer -- [--cases qwen3,olmoe] [--shapes T,D,F,E,K[,plain];...]
//!     [--zipf] [--stages] [--graph] [--fp16] [--fp32] [--add] [--search FILE]
//!     [--tiles PRODUCT=N,STAGES,CLUSTER[,p][,sS];...] [--load MS] [--time MS]
//! ```
//! --search adds lines to FILE, which is `src/cuda/gemm/tiles.txt` in the end: tiles that were
//! faster than the chosen ones. --fp16: elements of fp16; --fp32: weight gradients in fp32; --add:
//! added to what is there.
//! Prints the ceilings, first and last; `ours CASE | forward | backward | both ms | TFLOP/s, % of
//! the ceiling | memory | launches | cold start`; with `--stages` the table of `table.rs`, whose
//! peer is cuBLASLt. The layer's peer is `bench-peers/moe_torch.py`; run both in turn.

#[path = "../tests/cuda_common/bed.rs"]
mod bed;
#[path = "cuda_common/table.rs"]
mod table;

use std::io::Write;
use std::time::{Duration, Instant};

use bed::{Bed, Spread};
use moejob_kernels::cuda::{
    Arch, Compiler, CudaError, Event, GemmConfig, Gpu, Measure, ProductOp, default_cache_dir,
};
use moejob_kernels::{DType, Gradients, Activation, MoeDesc, MoeLayer, Output};
use table::{Ceilings, Reading, median};

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

/// The products in the order of `MoeLayer::configs`, named as their stages.
const PRODUCTS: [&str; 9] =
    ["logits", "up", "down", "dh", "dx_rows", "dw_up", "dw_down", "dx_router", "dw_router"];

struct Options {
    zipf: bool,
    stages: bool,
    graph: bool,
    search: Option<String>,
    fp32: bool,
    add: bool,
    element: DType,
    tiles: Option<String>,
    load: Duration,
    timed: Duration,
}

impl Options {
    /// A part of the time.
    fn reading(&self, part: u32) -> Reading {
        Reading { load: self.load / part, timed: self.timed / part }
    }
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
    let millis = |name, default| -> Result<Duration, Failure> {
        Ok(Duration::from_millis(value(name).map_or(Ok(default), |ms| ms.parse())?))
    };
    let options = Options {
        zipf: flag("--zipf"),
        stages: flag("--stages"),
        graph: flag("--graph"),
        search: value("--search"),
        fp32: flag("--fp32"),
        add: flag("--add"),
        element: if flag("--fp16") { DType::F16 } else { DType::Bf16 },
        tiles: value("--tiles"),
        load: millis("--load", 600)?,
        timed: millis("--time", 1500)?,
    };
    let compiler = Compiler::new(&gpu, default_cache_dir())?;
    let (major, minor) = compiler.nvrtc_version();
    println!("{}, {} SMs, NVRTC {major}.{minor}", gpu.name(), gpu.multiprocessors());
    let ceilings = Ceilings::measure(&compiler, options.element, options.reading(1))?;
    let wanted = value("--cases");
    for shape in value("--shapes").iter().flat_map(|shapes| shapes.split(';')) {
        let (sizes, gated) = parse_shape(shape)?;
        case(&compiler, shape, sizes, gated, ceilings, &options)?;
    }
    for (name, shape, gated) in CASES.into_iter().filter(|_| value("--shapes").is_none()) {
        if wanted.as_ref().is_none_or(|w| w.split(',').any(|w| w == name)) {
            case(&compiler, name, shape, gated, ceilings, &options)?;
        }
    }
    Ceilings::measure(&compiler, options.element, options.reading(1))?;
    Ok(())
}

/// `T,D,F,E,K` of a gated layer, of two matrices and ReLU with `,plain` behind.
fn parse_shape(text: &str) -> Result<([usize; 5], bool), Failure> {
    let (sizes, gated) = match text.strip_suffix(",plain") {
        Some(sizes) => (sizes, false),
        None => (text, true),
    };
    let sizes = sizes.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
    let sizes = sizes.try_into().map_err(|_| format!("{text}: expected T,D,F,E,K[,plain]"))?;
    Ok((sizes, gated))
}

fn case(
    compiler: &Compiler,
    name: &str,
    [tokens, dim, hidden, experts, top_k]: [usize; 5],
    gated: bool,
    ceilings: Ceilings,
    options: &Options,
) -> Result<(), Failure> {
    let desc = MoeDesc {
        element: options.element,
        activation: if gated { Activation::Silu } else { Activation::Relu },
        gated,
        weight_gradients: if options.fp32 { Output::F32 } else { Output::Element },
        ..bed::desc(tokens, dim, hidden, experts, top_k)
    };
    let mut configs = MoeLayer::configs(Arch::of(compiler.gpu())?, &desc);
    if let Some(tiles) = &options.tiles {
        set_tiles(&mut configs, tiles)?;
    }
    let started = Instant::now();
    let layer = MoeLayer::with_configs(compiler, desc, configs, &|_, _| ())?;
    let compiled = started.elapsed();
    let bed = filled(compiler, layer, options.zipf, options.add)?;
    report(&bed, name, compiled, ceilings, options)?;
    if options.stages {
        time_stages(compiler, &bed, name, ceilings, options)?;
    }
    drop(bed);
    options.search.as_ref().map_or(Ok(()), |file| search(compiler, desc, options, file))
}

/// `dh=128,5,2,p,s2;up=256,4,1`: columns, stages, cluster, ping-pong, staged buffers.
fn set_tiles(configs: &mut [GemmConfig; 9], tiles: &str) -> Result<(), Failure> {
    for text in tiles.split(';') {
        let wrong = || format!("{text}: expected PRODUCT=N,STAGES,CLUSTER[,p][,sS]");
        let (product, tile) = text.split_once('=').ok_or_else(wrong)?;
        let at = PRODUCTS.iter().position(|name| *name == product).ok_or_else(wrong)?;
        configs[at] = configs[at].with_tile(tile).ok_or_else(wrong)?;
    }
    Ok(())
}

/// What the search tries for all products beside the chosen tiles; dh's stages and buffers of H.
const CANDIDATES: [(&str, &str); 4] = [
    ("192,5,2,p", "192,4,2,p,s2"),
    ("192,5,1,p,s1", "192,4,1,p,s2"),
    ("128,6,2,p", "128,6,2,p,s1"),
    ("256,4,2,s2", "256,4,2,s1"),
];
/// A tile enters the table if the whole layer takes this part of its time or less with it: stages
/// change the clock for each other, so that a stage's own time says nothing.
const CLEARLY_FASTER: f32 = 0.99;

/// Times the layer with other tiles of one of the experts' products at a time; the clearly faster
/// go into `file`.
fn search(
    compiler: &Compiler,
    desc: MoeDesc,
    options: &Options,
    file: &str,
) -> Result<(), Failure> {
    let base = MoeLayer::configs(Arch::of(compiler.gpu())?, &desc);
    let measured = |configs: [GemmConfig; 9]| -> Result<f32, Failure> {
        let layer = MoeLayer::with_configs(compiler, desc, configs, &|_, _| ())?;
        Ok(time_passes(&filled(compiler, layer, false, options.add)?, options)?.1)
    };
    let mut lines = std::fs::OpenOptions::new().create(true).append(true).open(file)?;
    for at in 1..7 {
        let (first, mut best) = (measured(base)?, (f32::INFINITY, base));
        for (tile, dh) in CANDIDATES {
            let tile = if base[at].op == ProductOp::HiddenGradient { dh } else { tile };
            let Some(config) = base[at].with_tile(tile) else { continue };
            let config = config.fitting(desc.experts);
            if config == base[at] {
                continue;
            }
            let mut configs = base;
            configs[at] = config;
            let ms = measured(configs)?;
            if ms < best.0 {
                best = (ms, configs);
            }
        }
        if best.0 > CLEARLY_FASTER * first {
            println!("  {}: {first:.3} ms, the best other {:.3}", PRODUCTS[at], best.0);
            continue;
        }
        // In turn, twice, so that no drift of the clock decides.
        let (chosen, other) = (measured(base)?, measured(best.1)?);
        let (chosen, other) = (chosen.min(measured(base)?), other.max(measured(best.1)?));
        let line = best.1[at].table_line(MoeLayer::sizes(&desc)[at], desc.gated);
        println!("  {}: {chosen:.3} ms, with {line} {other:.3}", PRODUCTS[at]);
        if other <= CLEARLY_FASTER * chosen {
            writeln!(lines, "{line}")?;
        }
    }
    Ok(())
}

/// A bed of random numbers; with `zipf` expert e's logits have a bias of -ln(e + 1).
fn filled(
    compiler: &Compiler,
    layer: MoeLayer,
    zipf: bool,
    add: bool,
) -> Result<Bed, Failure> {
    let MoeDesc { dim, hidden, experts, element, .. } = *layer.desc();
    let mut bed = Bed::new(compiler, layer, false, Spread::Dense)?;
    bed.gradients.accumulate = add;
    bed.gradients.accumulate_router = add;
    let (stream, arena, weights) = (&bed.stream, &bed.arena, bed.tensors.weights);
    let measure = Measure::new(compiler, element)?;
    let per_dim = 1.0 / (dim as f32).sqrt();
    let ones = if zipf { dim as u32 } else { 0 };
    for (buffer, how) in [
        (bed.tensors.x, (1, 1.0, ones)),
        (weights.up.buffer, (3, per_dim, 0)),
        (weights.down.buffer, (4, 1.0 / (hidden as f32).sqrt(), 0)),
        (bed.dout, (5, 1.0, 0)),
    ] {
        measure.fill_random(stream, arena, buffer, how)?;
    }
    let Gradients { router, up, down, .. } = bed.gradients;
    for gradient in [router, up.buffer, down.buffer] {
        arena.fill_bytes(stream, gradient, 0)?;
    }
    // Uniform of the same variance: the device makes elements of 16 bits only.
    let mut state = 2_u32;
    let mut uniform = || {
        state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        (f64::from(state) / f64::from(u32::MAX) * 2.0 - 1.0) as f32 * 1.732 * per_dim
    };
    let mut router: Vec<f32> = (0..experts * dim).map(|_| uniform()).collect();
    // The first column of x is 1.
    for e in (0..experts).filter(|_| zipf) {
        router[e * dim] = -((e + 1) as f32).ln();
    }
    arena.write(weights.router, &router)?;
    stream.synchronize()?;
    Ok(bed)
}

/// Median milliseconds of the forward and of both passes, between events, under load.
fn time_passes(bed: &Bed, options: &Options) -> Result<(f32, f32), Failure> {
    let gpu = bed.arena.gpu();
    let graphs = [
        options.graph.then(|| bed.stream.capture(|| bed.forward())).transpose()?,
        options.graph.then(|| bed.stream.capture(|| bed.backward())).transpose()?,
    ];
    let [first, second] = graphs.each_ref().map(Option::as_ref);
    let forward = || first.map_or_else(|| bed.forward(), |g| bed.stream.launch_graph(g));
    let backward = || second.map_or_else(|| bed.backward(), |g| bed.stream.launch_graph(g));
    let started = Instant::now();
    while started.elapsed() < options.load {
        for _ in 0..4 {
            forward()?;
            backward()?;
        }
        gpu.synchronize()?;
    }
    let (mut first, mut both) = (Vec::new(), Vec::new());
    let started = Instant::now();
    while started.elapsed() < options.timed {
        let mut events = Vec::new();
        for _ in 0..4 {
            let marks = [Event::new(gpu)?, Event::new(gpu)?, Event::new(gpu)?];
            bed.stream.record(&marks[0])?;
            forward()?;
            bed.stream.record(&marks[1])?;
            backward()?;
            bed.stream.record(&marks[2])?;
            events.push(marks);
        }
        gpu.synchronize()?;
        for [a, b, c] in &events {
            first.push(a.milliseconds_to(b)?);
            both.push(a.milliseconds_to(c)?);
        }
    }
    Ok((median(&mut first), median(&mut both)))
}

fn report(
    bed: &Bed,
    name: &str,
    compiled: Duration,
    ceilings: Ceilings,
    options: &Options,
) -> Result<(), Failure> {
    let launches = |enqueue: &dyn Fn() -> Result<(), CudaError>| -> Result<usize, CudaError> {
        Ok(bed.stream.capture(enqueue)?.launches())
    };
    let launches = (launches(&|| bed.forward())?, launches(&|| bed.backward())?);
    let (first, both) = time_passes(bed, options)?;
    let flops = bed.layer.desc().flops();
    let rate = (flops.0 + flops.1) / f64::from(both) / 1e9;
    println!(
        "ours {name} | forward {first:.3} | backward {:.3} | both {both:.3} ms \
         | {rate:.0} TFLOP/s, {:.0}% | saved {} MiB, workspace {} MiB \
         | {} + {} launches | kernels ready in {:.2} s",
        both - first,
        100.0 * rate * 1e9 / ceilings.dense,
        bed.saved_bytes >> 20,
        bed.layer.workspace_bytes() >> 20,
        launches.0,
        launches.1,
        compiled.as_secs_f64(),
    );
    Ok(())
}

/// Each stage's median, in the stream of all of them, under load; gaps between launches are in.
fn time_stages(
    compiler: &Compiler,
    bed: &Bed,
    name: &str,
    ceilings: Ceilings,
    options: &Options,
) -> Result<(), Failure> {
    let gpu = bed.arena.gpu();
    let mut times: Vec<(&'static str, Vec<f32>)> = Vec::new();
    let load = options.load / 2;
    let started = Instant::now();
    while started.elapsed() < load + options.timed / 2 {
        let mut marks = vec![("start", Event::new(gpu)?)];
        bed.stream.record(&marks[0].1)?;
        let mut after = |stage| {
            let event = Event::new(gpu)?;
            bed.stream.record(&event)?;
            marks.push((stage, event));
            Ok(())
        };
        bed.observed(&mut after)?;
        gpu.synchronize()?;
        if started.elapsed() < load {
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
    let mut sums: Vec<(&'static str, f32)> = Vec::new();
    for (stage, ms) in &mut times {
        let ms = median(ms);
        match sums.iter_mut().find(|(name, _)| name == stage) {
            Some((_, sum)) => *sum += ms,
            None => sums.push((stage, ms)),
        }
    }
    table::print_stages(compiler, name, bed.layer.desc(), &sums, ceilings, options.reading(3))
}
