//! The head with its loss on the device, beside its three products alone, under sustained load.
//!
//! ```text
//! cargo bench --bench cuda_head -- [--shapes T,D,V[;...]] [--bf16-gradient]
//!     [--load MS] [--time MS]
//! ```
//! The yardstick is cuBLASLt's logits, dx and dtable over all tokens at once, [T, V] in memory, in
//! turn with ours in the same loop, so that both meet the same clock. The peer is
//! `bench-peers/head_torch.py`; run both in turn.

use std::cell::RefCell;
use std::time::{Duration, Instant};

use moejob_kernels::cuda::{
    Arena, Compiler, CudaError, DenseShape, Event, Gpu, Measure, Products, Stream,
    default_cache_dir,
};
use moejob_kernels::{ArenaPlan, Buffer, DType, Head, HeadDesc, HeadGradient, HeadLoss, Layout};

type Failure = Box<dyn std::error::Error>;

struct Options {
    gradient: DType,
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
    let value = |name: &str| args.iter().skip_while(|arg| *arg != name).nth(1).cloned();
    let millis = |name, default| -> Result<Duration, Failure> {
        Ok(Duration::from_millis(value(name).map_or(Ok(default), |ms| ms.parse())?))
    };
    let narrow = args.iter().any(|arg| arg == "--bf16-gradient");
    let options = Options {
        gradient: if narrow { DType::Bf16 } else { DType::F32 },
        load: millis("--load", 600)?,
        timed: millis("--time", 1500)?,
    };
    let compiler = Compiler::new(&gpu, default_cache_dir())?;
    let (major, minor) = compiler.nvrtc_version();
    println!("{}, NVRTC {major}.{minor}, cuBLASLt {}", gpu.name(), {
        Products::new(&gpu)?;
        Products::version()
    });
    let shapes = value("--shapes").unwrap_or_else(|| "16384,2048,50304".to_owned());
    for shape in shapes.split(';') {
        let sizes = shape.split(',').map(str::parse).collect::<Result<Vec<usize>, _>>()?;
        let [tokens, dim, vocab] = sizes[..] else { return Err("expected T,D,V".into()) };
        case(&compiler, HeadDesc { element: DType::Bf16, tokens, dim, vocab }, &options)?;
    }
    Ok(())
}

/// All that a shape's runs use.
struct Bed {
    products: RefCell<Products>,
    head: Head,
    stream: Stream,
    arena: Arena,
    op: HeadLoss,
    gradient: HeadGradient,
    /// [T, V], which only the yardstick needs
    logits: Buffer,
}

impl Bed {
    fn new(compiler: &Compiler, desc: HeadDesc, options: &Options) -> Result<Bed, Failure> {
        let HeadDesc { element, tokens, dim, vocab } = desc;
        let head = Head::new(compiler, desc)?;
        let mut plan = ArenaPlan::new();
        let [x, dx] = [(); 2].map(|()| plan.alloc(element, tokens * dim));
        let table = plan.alloc(element, vocab * dim);
        let dtable = plan.alloc(options.gradient, vocab * dim);
        let (targets, numbers) = (plan.alloc(DType::U32, tokens), plan.alloc(DType::F64, 2));
        let scratch = plan.alloc(DType::U8, head.plan().scratch_bytes);
        let logits = plan.alloc(element, tokens * vocab);
        let (arena, stream) = (Arena::new(compiler.gpu(), plan.bytes())?, compiler.gpu().stream()?);
        let measure = Measure::new(compiler, element)?;
        measure.fill_random(&stream, &arena, x, (1, 1.0, 0))?;
        measure.fill_random(&stream, &arena, table, (2, 1.0 / (dim as f32).sqrt(), 0))?;
        measure.fill_random(&stream, &arena, logits, (3, 1.0, 0))?;
        arena.fill_bytes(&stream, dtable, 0)?;
        arena.fill_bytes(&stream, numbers, 0)?;
        stream.synchronize()?;
        let word = |t: u32| t.wrapping_mul(2_654_435_761) % vocab as u32;
        arena.write(targets, &(0..tokens as u32).map(word).collect::<Vec<_>>())?;
        let (scale, loss_scale) = (1.0 / tokens as f64, None);
        let gradient = HeadGradient { dx, dtable, accumulate: false };
        let op = HeadLoss {
            desc,
            scale,
            loss_scale,
            x,
            table,
            targets,
            scratch,
            numbers,
            gradient: Some(gradient),
        };
        let products = RefCell::new(Products::new(compiler.gpu())?);
        Ok(Bed { products, head, stream, arena, op, gradient, logits })
    }

    fn run(&self, op: &HeadLoss) -> Result<(), CudaError> {
        let mut products = self.products.borrow_mut();
        self.head.launch(&mut products, &self.stream, &self.arena, op, false)
    }

    /// One of the three products over `count` tokens: 0 logits, 1 dx, 2 dtable.
    fn product(&self, which: usize, count: usize, accumulate: bool) -> Result<(), CudaError> {
        let HeadDesc { element, dim, vocab, .. } = self.op.desc;
        let x = self.op.x.slice(0, count * dim);
        let dx = self.gradient.dx.slice(0, count * dim);
        let logits = self.logits.slice(0, count * vocab);
        let (layout, sizes, operands) = match which {
            0 => (Layout::Nt, [count, vocab, dim], [x, self.op.table, logits]),
            1 => (Layout::Nn, [count, dim, vocab], [logits, self.op.table, dx]),
            _ => (Layout::Tn, [vocab, dim, count], [logits, x, self.gradient.dtable]),
        };
        let output = operands[2].dtype();
        let shape =
            DenseShape { output, accumulate, ..DenseShape::new(layout, sizes, element) };
        self.products.borrow_mut().product(&self.stream, &self.arena, shape, operands)
    }
}

type Run<'a> = (&'static str, Box<dyn Fn() -> Result<(), CudaError> + 'a>);

fn case(compiler: &Compiler, desc: HeadDesc, options: &Options) -> Result<(), Failure> {
    let bed = Bed::new(compiler, desc, options)?;
    let (tokens, plan) = (desc.tokens, bed.head.plan());
    let each = |which, first: bool| {
        let bed = &bed;
        move || {
            for at in (0..tokens).step_by(plan.chunk) {
                let adds = which == 2 && (at > 0 || !first);
                bed.product(which, plan.chunk.min(tokens - at), adds)?;
            }
            Ok(())
        }
    };
    let runs: Vec<Run> = vec![
        ("head, forward + backward", Box::new(|| bed.run(&bed.op))),
        ("logits alone", Box::new(|| bed.product(0, tokens, false))),
        ("dx alone", Box::new(|| bed.product(1, tokens, false))),
        ("dtable alone", Box::new(|| bed.product(2, tokens, false))),
        ("head, loss alone", Box::new(|| bed.run(&HeadLoss { gradient: None, ..bed.op }))),
        ("logits by chunks", Box::new(each(0, true))),
        ("dx by chunks", Box::new(each(1, true))),
        ("dtable by chunks", Box::new(each(2, true))),
    ];
    let ms = time(compiler.gpu(), &bed.stream, &runs, options)?;
    let HeadDesc { dim, vocab, .. } = desc;
    println!("head {tokens},{dim},{vocab} {:?} | ms | TFLOP/s", bed.gradient.dtable.dtype());
    for ((name, _), ms) in runs.iter().zip(&ms) {
        let products = if name.contains('+') { 3.0 } else { 1.0 };
        println!("  {name} | {ms:.3} | {:.0}", products * desc.flops() / f64::from(*ms) / 1e9);
    }
    let (alone, chunks) = (ms[1] + ms[2] + ms[3], ms[5] + ms[6] + ms[7]);
    println!(
        "  {:.1}% of the three products alone ({alone:.3} ms), {:.3} ms beside those by chunks \
         | loss {:.1}% of its product | chunks of {} | scratch {} MiB",
        100.0 * alone / ms[0],
        ms[0] - chunks,
        100.0 * ms[1] / ms[4],
        plan.chunk,
        plan.scratch_bytes >> 20
    );
    for record in bed.products.borrow().record() {
        println!("  {record}");
    }
    Ok(())
}

/// The median of each run, all in turn, after and under the same load.
fn time(
    gpu: &Gpu,
    stream: &Stream,
    runs: &[Run],
    options: &Options,
) -> Result<Vec<f32>, Failure> {
    let mut times = vec![Vec::new(); runs.len()];
    let started = Instant::now();
    while started.elapsed() < options.load + options.timed || times[0].len() < 3 {
        let mut marks = vec![Event::new(gpu)?];
        stream.record(&marks[0])?;
        for (_, run) in runs {
            run()?;
            let mark = Event::new(gpu)?;
            stream.record(&mark)?;
            marks.push(mark);
        }
        gpu.synchronize()?;
        if started.elapsed() < options.load {
            continue;
        }
        for (pair, times) in marks.windows(2).zip(&mut times) {
            times.push(pair[0].milliseconds_to(&pair[1])?);
        }
    }
    Ok(times
        .into_iter()
        .map(|mut of| {
            of.sort_by(f32::total_cmp);
            of[of.len() / 2]
        })
        .collect())
}
