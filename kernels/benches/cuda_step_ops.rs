//! The memory-bound ops of a step on the device, under load.
//!
//! ```text
//! cargo bench --bench cuda_step_ops -- [--only norm,rope,embed,elements,optimizer]
//!     [--parameters MILLIONS] [--load MS] [--time MS]
//! ```
//! Prints `op | shape | us | GB/s | % of copy`: bytes are those that the op must read and write,
//! the ceiling is a copy of 1 GiB by the multiprocessors in the same run, before and after. The
//! peer is `bench-peers/step_ops_torch.py`.

#[path = "cuda_common/table.rs"]
#[allow(dead_code, reason = "the layer's bench uses the rest")]
mod table;

use std::time::{Duration, Instant};

use moejob_kernels::cuda::{CudaDevice, Event};
use moejob_kernels::*;
use table::{Reading, copy_rate, median};

type Failure = Box<dyn std::error::Error>;

const BF16: DType = DType::Bf16;

struct Bench {
    reading: Reading,
    /// Bytes a millisecond
    copy: f64,
}

/// A device with an arena of what `plan` has, all of it random.
struct Bed {
    device: Device,
    plan: ArenaPlan,
}

impl Bed {
    fn new(bytes: usize) -> Result<Bed, Failure> {
        Ok(Bed { device: Device::cuda(0, bytes)?, plan: ArenaPlan::new() })
    }

    /// Normal numbers of this standard deviation.
    fn random(&mut self, dtype: DType, len: usize, std: f64) -> Buffer {
        let buffer = self.plan.alloc(dtype, len);
        // Low halves are as random as any 16 bits.
        let x = if dtype == DType::I16 { buffer.reinterpret(BF16) } else { buffer };
        let name_hash = self.plan.bytes() as u64;
        let place = Strided::ALL;
        self.device.init_normal(&InitNormal { seed: 1, name_hash, first: 0, place, std, x });
        buffer
    }

    fn words(&mut self, values: &[u32]) -> Buffer {
        let buffer = self.plan.alloc(DType::U32, values.len());
        self.device.write(buffer, values);
        buffer
    }

    fn doubles(&mut self, values: &[f64]) -> Buffer {
        let buffer = self.plan.alloc(DType::F64, values.len());
        self.device.write(buffer, values);
        buffer
    }
}

impl Bench {
    /// Times `op` on the bed's stream and prints its row.
    fn row(
        &self,
        bed: &mut Bed,
        name: &str,
        bytes: f64,
        op: impl Fn(&mut Device),
    ) -> Result<f32, Failure> {
        op(&mut bed.device);
        bed.device.finish().map_err(|error| format!("{name}: {error:?}"))?;
        let ms = self.median_ms(&mut bed.device, op)?;
        let rate = bytes / f64::from(ms);
        println!(
            "{name} | {:.1} us | {:.0} GB/s | {:.1}% of copy",
            ms * 1e3,
            rate / 1e6,
            100.0 * rate / self.copy
        );
        Ok(ms)
    }

    /// The median of single runs, after and under the same load.
    fn median_ms(&self, device: &mut Device, op: impl Fn(&mut Device)) -> Result<f32, Failure> {
        let mut times = Vec::new();
        let started = Instant::now();
        while started.elapsed() < self.reading.load + self.reading.timed {
            let mut marks = Vec::new();
            for _ in 0..16 {
                let pair = [Event::new(on(device)?.gpu())?, Event::new(on(device)?.gpu())?];
                on(device)?.stream().record(&pair[0])?;
                op(device);
                on(device)?.stream().record(&pair[1])?;
                marks.push(pair);
            }
            on(device)?.stream().synchronize()?;
            if started.elapsed() < self.reading.load {
                continue;
            }
            for [first, last] in &marks {
                times.push(first.milliseconds_to(last)?);
            }
        }
        Ok(median(&mut times))
    }
}

fn on(device: &Device) -> Result<&CudaDevice, Failure> {
    match device {
        Device::Cuda(cuda) => Ok(cuda),
        _ => Err("no GPU".into()),
    }
}

fn main() -> Result<(), Failure> {
    let device = match Device::cuda(0, 1 << 20) {
        Ok(device) => device,
        Err(error) => {
            eprintln!("skipped: no CUDA device: {error}");
            return Ok(());
        }
    };
    let args: Vec<String> = std::env::args().skip(1).collect();
    let value = |name: &str| args.iter().skip_while(|arg| *arg != name).nth(1).cloned();
    let number = |name, default| value(name).map_or(Ok(default), |text| text.parse::<u64>());
    let millis = |name, default| number(name, default).map(Duration::from_millis);
    let reading = Reading { load: millis("--load", 200)?, timed: millis("--time", 400)? };
    let cuda = on(&device)?;
    let copy = || copy_rate(cuda.compiler(), BF16, reading);
    let bench = Bench { reading, copy: copy()? };
    println!("{} | copy {:.0} GB/s", cuda.gpu().name(), bench.copy / 1e6);
    let only = value("--only");
    let wanted = |name: &str| only.as_ref().is_none_or(|only| only.split(',').any(|w| w == name));
    type Part = fn(&Bench) -> Result<(), Failure>;
    let parts: [(&str, Part); 4] =
        [("norm", norms), ("rope", rotations), ("embed", embeddings), ("elements", elements)];
    for (name, part) in parts {
        if wanted(name) {
            part(&bench)?;
        }
    }
    if wanted("optimizer") {
        let millions = number("--parameters", 1500)? as usize;
        for (moment, gradient) in [
            (DType::F32, BF16),
            (BF16, BF16),
            (DType::F32, DType::F32),
            (BF16, DType::F32),
        ] {
            optimizer(&bench, millions * 1_000_000, moment, gradient)?;
        }
    }
    println!("copy {:.0} GB/s at the end", copy()? / 1e6);
    Ok(())
}

fn norms(bench: &Bench) -> Result<(), Failure> {
    for (rows, dim) in [(16384, 2048), (32768, 2048), (16384, 4096), (8192, 7168), (16384, 2880)] {
        let size = rows * dim;
        let mut bed = Bed::new(size * 2 * 6 + (1 << 20))?;
        let [x, dy, y] = [(); 3].map(|()| bed.random(BF16, size, 1.0));
        let (w, dw) = (bed.random(BF16, dim, 1.0), bed.random(BF16, dim, 1.0));
        let rstd = bed.random(DType::F32, rows, 1.0);
        let (bytes, eps) = (size as f64 * 2.0, 1e-5);
        bench.row(&mut bed, &format!("norm {rows} x {dim}"), 2.0 * bytes, |device| {
            device.rms_norm(&RmsNorm { rows, dim, eps, x, w, y, rstd });
        })?;
        for (name, accumulate_dx, passes) in
            [("norm backward", false, 3.0), ("norm backward, added", true, 4.0)]
        {
            let op = RmsNormBackward {
                rows, dim, x, w, rstd, dy, dx: y, dw, accumulate_dx, accumulate_dw: false,
            };
            bench.row(&mut bed, &format!("{name} {rows} x {dim}"), passes * bytes, |device| {
                device.rms_norm_backward(&op);
            })?;
        }
    }
    Ok(())
}

fn rotations(bench: &Bench) -> Result<(), Failure> {
    for (tokens, heads, head_dim, per_head) in
        [(16384, 16, 128, false), (16384, 32, 128, true), (16384, 4, 128, true)]
    {
        let size = tokens * heads * head_dim;
        let mut bed = Bed::new(size * 2 * 5 + (16 << 20))?;
        let [x, y, dy, dx] = [(); 4].map(|()| bed.random(BF16, size, 1.0));
        let positions: Vec<u32> = (0..tokens as u32).map(|t| t % 4096).collect();
        let positions = bed.words(&positions);
        let (spans, dim) =
            if per_head { (tokens * heads, head_dim) } else { (tokens, heads * head_dim) };
        let (w, dw) = (bed.random(BF16, dim, 1.0), bed.random(BF16, dim, 1.0));
        let rstd = bed.random(DType::F32, spans, 1.0);
        let (eps, theta, bytes) = (1e-5, 1e4, size as f64 * 2.0);
        let forward =
            NormRope { tokens, heads, head_dim, per_head, eps, theta, positions, x, w, y, rstd };
        let shape = format!("{tokens} x {heads} x {head_dim}, per head {per_head}");
        bench.row(&mut bed, &format!("norm, turn {shape}"), 2.0 * bytes, |device| {
            device.norm_rope(&forward);
        })?;
        bench.row(&mut bed, &format!("norm, turn backward {shape}"), 3.0 * bytes, |device| {
            let accumulate_dw = false;
            device.norm_rope_backward(&NormRopeBackward { forward, dy, dx, dw, accumulate_dw });
        })?;
        bench.row(&mut bed, &format!("turn {shape}"), 2.0 * bytes, |device| {
            device.rope(&Rope { tokens, heads, head_dim, theta, inverse: false, positions, x: y });
        })?;
    }
    Ok(())
}

fn embeddings(bench: &Bench) -> Result<(), Failure> {
    let (tokens, dim, vocab) = (16384, 2048, 50304);
    let size = tokens * dim;
    let mut bed = Bed::new((size + vocab * dim) * 2 * 3)?;
    // By Zipf, as words are: rank r with a probability like 1 / r.
    let ids: Vec<u32> = (0..tokens as u64)
        .map(|t| {
            let uniform = (t.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 11) as f64 / 2_f64.powi(53);
            ((vocab as f64).powf(uniform) as u32 - 1) * 7919 % vocab as u32
        })
        .collect();
    let mut distinct = ids.clone();
    distinct.sort_unstable();
    distinct.dedup();
    let ids = bed.words(&ids);
    let (table, x) = (bed.random(BF16, vocab * dim, 0.02), bed.random(BF16, size, 1.0));
    let row = dim as f64 * 2.0;
    bench.row(&mut bed, "embedding 16384 of 50304 x 2048", 2.0 * tokens as f64 * row, |device| {
        device.embed(&Embed { tokens, dim, vocab, ids, table, x });
    })?;
    let bytes = (tokens + 2 * distinct.len()) as f64 * row;
    let name = format!("embedding backward, {} different", distinct.len());
    bench.row(&mut bed, &name, bytes, |device| {
        device.embed_backward(&EmbedBackward { tokens, dim, vocab, ids, dx: x, dtable: table });
    })?;
    Ok(())
}

fn elements(bench: &Bench) -> Result<(), Failure> {
    let size = 16384 * 8192;
    let mut bed = Bed::new(size * 2 * 6)?;
    let [gate, up, d_out, dgate, dup] = [(); 5].map(|()| bed.random(BF16, size, 1.0));
    let bytes = size as f64 * 2.0;
    let activation = Activation::Silu;
    bench.row(&mut bed, "gated product 16384 x 8192", 3.0 * bytes, |device| {
        device.gated_mul(&GatedMul { activation, gate, up, out: dgate });
    })?;
    bench.row(&mut bed, "gated product backward", 5.0 * bytes, |device| {
        let op = GatedMulBackward { activation, gate, up, d_out, dgate, dup };
        device.gated_mul_backward(&op);
    })?;
    bench.row(&mut bed, "sum", 3.0 * bytes, |device| {
        device.add(&Add { a: dup, b: gate });
    })?;
    bench.row(&mut bed, "clamp", 2.0 * bytes, |device| {
        device.clamp(&Clamp { limit: 8.0, x: gate });
    })?;
    let wide = dgate.slice(0, size / 2).reinterpret(DType::U8).reinterpret(DType::F32);
    let narrow = gate.slice(0, wide.len());
    bench.row(&mut bed, "bf16 to fp32", 6.0 * wide.len() as f64, |device| {
        device.cast(&Cast { from: narrow, to: wide });
    })?;
    bench.row(&mut bed, "fp32 to bf16", 6.0 * wide.len() as f64, |device| {
        device.cast(&Cast { from: wide, to: narrow });
    })?;
    let (rows, columns) = (16384, 2048);
    let (dy, dbias) = (gate.slice(0, rows * columns), up.slice(0, columns));
    let bytes = dy.bytes() as f64;
    bench.row(&mut bed, "bias backward 16384 x 2048", bytes, |device| {
        device.bias_backward(&BiasBackward { rows, columns, accumulate: false, dy, dbias });
    })?;
    Ok(())
}

/// bf16 weights with low bits, as a step does: numbers, decision, update.
fn optimizer(
    bench: &Bench,
    parameters: usize,
    moment: DType,
    gradient: DType,
) -> Result<(), Failure> {
    let blocks = parameters / SQUARE_SUM_BLOCK;
    let len = blocks * SQUARE_SUM_BLOCK;
    let each = 4 + 2 * moment.size() + gradient.size();
    let mut bed = Bed::new(len * each + blocks * 40 + (1 << 20))?;
    // Tensors of Qwen3's experts' size, say: the table is what a bucket's would be.
    let tensor = 768 * 2048 / SQUARE_SUM_BLOCK;
    let table: Vec<BucketBlock> = (0..blocks)
        .map(|at| BucketBlock {
            name_hash: (at / tensor) as u64 * 0x9E37_79B9,
            tensor: (at / tensor) as u32,
            first: (at % tensor * SQUARE_SUM_BLOCK) as u64,
            len: SQUARE_SUM_BLOCK as u32,
            decays: true,
            ..BucketBlock::default()
        })
        .collect();
    let table = bed.words(&BucketBlock::table(&table));
    let class = StepClass::new(3, 1e-4, (0.9, 0.95), 0.1);
    let params = StepParams { loss_scale: 1.0, norm_max: 1.0, step: 2, classes: [class; 4] };
    let params = bed.doubles(&params.encode());
    let control = bed.doubles(&[0.0; StepControl::LEN]);
    let layout = StepNumbers { tensors: blocks.div_ceil(tensor), ..StepNumbers::default() };
    let numbers = bed.doubles(&vec![0.0; layout.len()]);
    let sums = bed.plan.alloc(DType::F64, blocks);
    let (weight, low) = (bed.random(BF16, len, 0.02), bed.random(DType::I16, len, 1.0));
    let moment1 = bed.random(moment, len, 1e-3);
    let moment2 = bed.plan.alloc(moment, len);
    // Squares of the positive ones, zero for the others: no moment is below zero.
    let activation = Activation::Relu;
    bed.device.gated_mul(&GatedMul { activation, gate: moment1, up: moment1, out: moment2 });
    let gradient_of = bed.random(gradient, len, 1e-3);
    let gradient_op =
        GradientNumbers {
            layout,
            table,
            params,
            gradient: gradient_of,
            sums,
            numbers,
            squares: None,
        };
    let op = BucketAdamW {
        beta1: 0.9,
        beta2: 0.95,
        eps: 1e-8,
        table,
        params,
        control,
        weight,
        master: Master::LowBits(low),
        moment1,
        moment2,
        gradient: gradient_of,
    };
    let decide = DecideUpdate { params, numbers, control };
    let (n, g) = (len as f64, gradient.size() as f64);
    let shape = format!("{:.2}e9, moments {moment:?}, gradients {gradient:?}", n * 1e-9);
    let update = 8.0 + 4.0 * moment.size() as f64 + g;
    bench.row(&mut bed, &format!("gradients' numbers {shape}"), g * n, |device| {
        device.gradient_numbers(&gradient_op);
    })?;
    bed.device.decide_update(&decide);
    bench.row(&mut bed, &format!("AdamW {update} B {shape}"), update * n, |device| {
        device.bucket_adamw(&op);
    })?;
    let all = bench.row(&mut bed, &format!("both {shape}"), (update + g) * n, |device| {
        device.fill_zero(numbers);
        device.gradient_numbers(&gradient_op);
        device.decide_update(&decide);
        device.bucket_adamw(&op);
    })?;
    println!("  that is {:.1} ms for 6.9e9 parameters", f64::from(all) * 6.9e9 / n);
    let updated = bed.device.read_vec::<f64>(control)[StepControl::UPDATES];
    if updated == 0.0 {
        return Err("no update was applied".into());
    }
    Ok(())
}
