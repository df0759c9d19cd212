//! Attention on the device, under sustained load (the chip is power-limited: a cold start ranks
//! wrongly).
//!
//! ```text
//! cargo bench --bench cuda_attention -- [--cases olmoe,gqa] [--shapes B,S,N,KV,D[,doc];...]
//!     [--fp16] [--fp32] [--stages] [--forward] [--load MS] [--time MS] [--dump FOLDER]
//! ```
//! Prints `ours CASE | forward | fastest backward | deterministic backward`, each in ms and
//! TFLOP/s (4 D a pair of query and key forward, 2.5 times that backward), with `--stages` each
//! launch, with `--forward` that alone. `doc` is the mean length of documents at random cuts; rates
//! then count the pairs that see each other. The peer is `bench-peers/attention_torch.py`, before
//! and after this in the same sitting. --dump: inputs and results of a small case for the peer to
//! hold against float64.

#[path = "cuda_common/table.rs"]
#[allow(dead_code, reason = "a part is used")]
mod table;

use std::time::{Duration, Instant};

use moejob_kernels::cuda::{Arena, Compiler, Event, Gpu, Measure, Stream, default_cache_dir};
use moejob_kernels::{
    ArenaPlan, Attention, AttentionBackward, AttentionDesc, AttentionKernels, Buffer, DType, philox,
};
use table::median;

type Failure = Box<dyn std::error::Error>;

/// Name, B, S, N, KV, D, mean length of documents
const CASES: [(&str, [usize; 5], Option<usize>); 7] = [
    ("olmoe", [4, 4096, 16, 16, 128], None),
    ("gqa", [4, 4096, 32, 4, 128], None),
    ("long", [1, 16384, 16, 16, 128], None),
    ("long_gqa", [1, 16384, 32, 4, 128], None),
    ("d64", [4, 4096, 32, 32, 64], None),
    ("d96", [4, 4096, 16, 16, 96], None),
    ("documents", [4, 4096, 16, 16, 128], Some(1024)),
];

struct Options {
    element: DType,
    stages: bool,
    forward: bool,
    load: Duration,
    timed: Duration,
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
    let element = match (flag("--fp16"), flag("--fp32")) {
        (true, _) => DType::F16,
        (_, true) => DType::F32,
        _ => DType::Bf16,
    };
    let options = Options {
        element,
        stages: flag("--stages"),
        forward: flag("--forward"),
        load: millis("--load", 500)?,
        timed: millis("--time", 1000)?,
    };
    let compiler = Compiler::new(&gpu, default_cache_dir())?;
    let (major, minor) = compiler.nvrtc_version();
    println!("{}, {} SMs, NVRTC {major}.{minor}", gpu.name(), gpu.multiprocessors());
    if let Some(folder) = value("--dump") {
        return dump(&compiler, &folder);
    }
    for shape in value("--shapes").iter().flat_map(|shapes| shapes.split(';')) {
        let sizes = shape.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        let (sizes, documents) = match sizes[..] {
            [b, s, n, kv, d] => ([b, s, n, kv, d], None),
            [b, s, n, kv, d, mean] => ([b, s, n, kv, d], Some(mean)),
            _ => return Err(format!("{shape}: expected B,S,N,KV,D[,doc]").into()),
        };
        case(&compiler, shape, sizes, documents, &options)?;
    }
    let wanted = value("--cases");
    for (name, sizes, documents) in CASES.into_iter().filter(|_| value("--shapes").is_none()) {
        if wanted.as_ref().is_none_or(|w| w.split(',').any(|w| w == name)) {
            case(&compiler, name, sizes, documents, &options)?;
        }
    }
    Ok(())
}

/// One attention with its buffers, filled.
struct Bed {
    kernels: AttentionKernels,
    stream: Stream,
    arena: Arena,
    op: AttentionBackward,
    /// Pairs of a query and a key that see each other, of all heads
    pairs: f64,
}

fn starts(tokens: usize, seq: usize, mean: usize) -> Vec<u32> {
    let mut starts: Vec<u32> = Vec::new();
    for t in 0..tokens {
        let at = (t % seq) as u32;
        let drawn = philox::philox4x32_10(7, [t as u32, 0, 0, 0])[0] as usize;
        let cut = at == 0 || drawn.is_multiple_of(mean);
        let before = starts.last().copied().unwrap_or(0);
        starts.push(if cut { at } else { before });
    }
    starts
}

impl Bed {
    fn new(
        compiler: &Compiler,
        [batch, seq, heads, kv_heads, head_dim]: [usize; 5],
        documents: Option<usize>,
        (element, deterministic): (DType, bool),
    ) -> Result<Bed, Failure> {
        let tokens = batch * seq;
        let mut plan = ArenaPlan::new();
        let [q, o, d_o, dq] = [(); 4].map(|()| plan.alloc(element, tokens * heads * head_dim));
        let [k, v, dk, dv] = [(); 4].map(|()| plan.alloc(element, tokens * kv_heads * head_dim));
        let lse = plan.alloc(DType::F32, tokens * heads);
        let words = documents.map(|mean| starts(tokens, seq, mean));
        let mut forward = Attention {
            batch,
            seq,
            heads,
            kv_heads,
            head_dim,
            scale: 1.0 / (head_dim as f64).sqrt(),
            q,
            k,
            v,
            starts: words.as_ref().map(|words| plan.alloc(DType::U32, words.len())),
            window: None,
            deterministic,
            workspace: None,
            o,
            lse,
        };
        let kernels = AttentionKernels::new(compiler, AttentionDesc::of(&forward))?;
        forward.workspace = Some(plan.alloc(DType::U8, kernels.workspace_bytes()));
        let (stream, arena) = (compiler.gpu().stream()?, Arena::new(compiler.gpu(), plan.bytes())?);
        let pairs = match (&words, forward.starts) {
            (Some(words), Some(buffer)) => {
                arena.write(buffer, words)?;
                let seen = |(t, start): (usize, &u32)| (t % seq + 1) as f64 - f64::from(*start);
                words.iter().enumerate().map(seen).sum()
            }
            _ => batch as f64 * (seq * seq) as f64 / 2.0,
        };
        for (seed, buffer) in (1..).zip([q, k, v, d_o]) {
            fill(compiler, &stream, &arena, buffer, seed)?;
        }
        stream.synchronize()?;
        let op = AttentionBackward { forward, d_o, dq, dk, dv };
        Ok(Bed { kernels, stream, arena, op, pairs: pairs * heads as f64 })
    }

    fn forward(&self) -> Result<(), Failure> {
        let Bed { kernels, stream, arena, op, .. } = self;
        Ok(kernels.forward(stream, arena, &op.forward, &mut |_| Ok(()))?)
    }

    fn backward(&self) -> Result<(), Failure> {
        let Bed { kernels, stream, arena, op, .. } = self;
        Ok(kernels.backward(stream, arena, op, &mut |_| Ok(()))?)
    }
}

/// Roughly normal numbers, by the device where they have 16 bits.
fn fill(
    compiler: &Compiler,
    stream: &Stream,
    arena: &Arena,
    buffer: Buffer,
    seed: u32,
) -> Result<(), Failure> {
    if buffer.dtype() != DType::F32 {
        let measure = Measure::new(compiler, buffer.dtype())?;
        return Ok(measure.fill_random(stream, arena, buffer, (seed, 1.0, 0))?);
    }
    let normal = |i: usize| philox::normals(u64::from(seed), 0, i as u64)[0] as f32;
    Ok(arena.write(buffer, &(0..buffer.len()).map(normal).collect::<Vec<_>>())?)
}

fn case(
    compiler: &Compiler,
    name: &str,
    sizes: [usize; 5],
    documents: Option<usize>,
    options: &Options,
) -> Result<(), Failure> {
    let [_, _, _, _, head_dim] = sizes;
    let mut line = format!("ours {name} {sizes:?} {:?}", options.element);
    for deterministic in [false, true] {
        let bed = Bed::new(compiler, sizes, documents, (options.element, deterministic))?;
        let flops = 4.0 * bed.pairs * head_dim as f64;
        bed.forward()?;
        let mut add = |what: &str, ms: f32, flops: f64| {
            line += &format!(" | {what} {ms:.3} ms {:.0}", flops / f64::from(ms) / 1e9);
        };
        if !deterministic {
            let ms = time(&bed, options, &|| bed.forward())?;
            add("forward", ms, flops);
        }
        if options.forward {
            break;
        }
        let what = if deterministic { "deterministic" } else { "fastest" };
        add(what, time(&bed, options, &|| bed.backward())?, 2.5 * flops);
        if options.stages {
            stages(&bed, options, name)?;
        }
    }
    println!("{line} TFLOP/s");
    Ok(())
}

/// The median of single runs, after and under the same load.
fn time(
    bed: &Bed,
    options: &Options,
    run: &dyn Fn() -> Result<(), Failure>,
) -> Result<f32, Failure> {
    let gpu = bed.arena.gpu();
    let started = Instant::now();
    while started.elapsed() < options.load {
        for _ in 0..8 {
            run()?;
        }
        gpu.synchronize()?;
    }
    let mut times = Vec::new();
    let started = Instant::now();
    while started.elapsed() < options.timed {
        let mut marks = vec![Event::new(gpu)?];
        bed.stream.record(&marks[0])?;
        for _ in 0..16 {
            run()?;
            marks.push(Event::new(gpu)?);
            bed.stream.record(&marks[marks.len() - 1])?;
        }
        gpu.synchronize()?;
        for pair in marks.windows(2) {
            times.push(pair[0].milliseconds_to(&pair[1])?);
        }
    }
    Ok(median(&mut times))
}

/// Each launch's median in the stream of all of them.
fn stages(bed: &Bed, options: &Options, name: &str) -> Result<(), Failure> {
    let gpu = bed.arena.gpu();
    let Bed { kernels, stream, arena, op, .. } = bed;
    let mut times: Vec<(&'static str, Vec<f32>)> = Vec::new();
    let started = Instant::now();
    while started.elapsed() < options.timed / 2 {
        let mut marks = vec![("start", Event::new(gpu)?)];
        stream.record(&marks[0].1)?;
        kernels.backward(stream, arena, op, &mut |stage| {
            let event = Event::new(gpu)?;
            stream.record(&event)?;
            marks.push((stage, event));
            Ok(())
        })?;
        gpu.synchronize()?;
        for (i, pair) in marks.windows(2).enumerate() {
            let ms = pair[0].1.milliseconds_to(&pair[1].1)?;
            match times.get_mut(i) {
                Some((_, of)) => of.push(ms),
                None => times.push((pair[1].0, vec![ms])),
            }
        }
    }
    let parts: Vec<String> =
        times.iter_mut().map(|(stage, ms)| format!("{stage} {:.3}", median(ms))).collect();
    println!("  {name} backward: {} ms", parts.join(", "));
    Ok(())
}

/// Inputs and results of small cases, each buffer a file of its elements.
fn dump(compiler: &Compiler, folder: &str) -> Result<(), Failure> {
    for (name, sizes) in
        [("d128", [1, 1024, 4, 2, 128]), ("d96", [1, 1024, 4, 4, 96]), ("d64", [1, 1024, 4, 2, 64])]
    {
        for deterministic in [true, false] {
            let bed = Bed::new(compiler, sizes, None, (DType::Bf16, deterministic))?;
            bed.forward()?;
            bed.backward()?;
            bed.stream.synchronize()?;
            let AttentionBackward { forward, d_o, dq, dk, dv } = bed.op;
            let kind = if deterministic { "deterministic" } else { "fastest" };
            let to = format!("{folder}/{name}-{kind}");
            std::fs::create_dir_all(&to)?;
            std::fs::write(format!("{to}/sizes"), sizes.map(|n| n.to_string()).join(" "))?;
            for (file, buffer) in [
                ("q", forward.q),
                ("k", forward.k),
                ("v", forward.v),
                ("d_o", d_o),
                ("o", forward.o),
                ("dq", dq),
                ("dk", dk),
                ("dv", dv),
            ] {
                let bytes = bed.arena.read::<u8>(buffer.reinterpret(DType::U8))?;
                std::fs::write(format!("{to}/{file}"), bytes)?;
            }
        }
    }
    Ok(())
}
