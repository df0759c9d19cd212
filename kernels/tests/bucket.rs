//! The end of a step over buckets: on the CPU the bits of AdamW element by element, on a GPU the
//! bits of the CPU.

#[path = "cuda_common/step_bed.rs"]
mod step_bed;

use moejob_kernels::*;
use step_bed::{StepBed, rounded};

const BLOCK: usize = SQUARE_SUM_BLOCK;

/// A bucket: tensors of these lengths, each from a multiple of a block on, and a block of padding.
struct Tensor {
    len: usize,
    about: BucketBlock,
}

fn tensors() -> Vec<Tensor> {
    let of = |len, name_hash, about: BucketBlock| {
        Tensor { len, about: BucketBlock { name_hash, ..about } }
    };
    let plain = BucketBlock::default();
    vec![
        of(3 * BLOCK + 77, 0x1234_5678_9abc_def0, BucketBlock { decays: true, ..plain }),
        of(5, 2, plain),
        of(BLOCK, 3, BucketBlock { frozen: true, ..plain }),
        of(2 * BLOCK, 4, BucketBlock { class: 1, decays: true, ..plain }),
        of(BLOCK + 1, 5, BucketBlock { class: 2, decays: true, ..plain }),
        of(2 * BLOCK - 1, u64::MAX, BucketBlock { uncounted: true, ..plain }),
    ]
}

fn blocks() -> Vec<BucketBlock> {
    let of = |(tensor, at): (Tensor, u32)| {
        BucketBlock { tensor: at, ..tensor.about }.of_tensor(tensor.len as u64)
    };
    let mut blocks: Vec<BucketBlock> = tensors().into_iter().zip(0..).flat_map(of).collect();
    blocks.push(BucketBlock::default());
    blocks
}

/// Of a model with a mixture layer of three experts.
const LAYOUT: StepNumbers = StepNumbers { layers: 1, experts: 3, tensors: 6 };

const LR: f64 = 3e-3;
const BETAS: (f64, f64) = (0.9, 0.95);
const EPS: f64 = 1e-8;
const DECAY: f64 = 0.1;
const STEP: u64 = 7;

fn params(norm_max: f64, loss_scale: f64) -> StepParams {
    let class = |updates| StepClass::new(updates, LR, BETAS, DECAY);
    // The second class began two updates ago, the third has not begun.
    let classes = [class(STEP), class(2), class(0), StepClass::default()];
    StepParams { loss_scale, norm_max, step: STEP, classes }
}

/// Kinds of weight, moments and gradient, and where the master lies.
#[derive(Clone, Copy, Debug)]
struct Kinds {
    weight: DType,
    master: &'static str,
    moment: DType,
    gradient: DType,
}

/// Buffers of a bucket on a bed.
struct Bucket {
    op: BucketAdamW,
    numbers: GradientNumbers,
    decide: DecideUpdate,
}

impl Bucket {
    fn new(bed: &mut StepBed, kinds: Kinds, params: StepParams) -> Bucket {
        let blocks = blocks();
        let len = blocks.len() * BLOCK;
        let table = bed.words(&BucketBlock::table(&blocks));
        let params = bed.put(DType::F64, &params.encode());
        let control = bed.put(DType::F64, &[9.0, 9.0, 9.0, 5.0, 0.0]);
        let numbers = bed.put(DType::F64, &[0.0; LAYOUT.len()]);
        let w: Vec<f64> = bed.values(len).iter().map(|x| f64::from((x * 0.1) as f32)).collect();
        let weight = bed.output(kinds.weight, len);
        let master = match kinds.master {
            "weight" => {
                step_bed::set(&mut bed.device, weight, &w);
                Master::Weight
            }
            "low bits" => {
                let (whole, low) = (bed.put(DType::F32, &w), bed.output(DType::I16, len));
                bed.device.split_master(&SplitMaster { master: whole, weight, low });
                Master::LowBits(low)
            }
            _ => {
                let whole = bed.put(DType::F32, &w);
                bed.device.cast(&Cast { from: whole, to: weight });
                Master::Separate(whole)
            }
        };
        let mut moment = |scale: f64, positive: bool| {
            let values: Vec<f64> = bed.values(len).iter().map(|x| x * scale).collect();
            let values = values.iter().map(|x| if positive { x * x } else { *x });
            bed.put(kinds.moment, &values.collect::<Vec<f64>>())
        };
        let (moment1, moment2) = (moment(0.01, false), moment(0.02, true));
        let scale = bed.get(params)[StepParams::LOSS_SCALE];
        let g: Vec<f64> = bed.values(len).iter().map(|x| 0.01 * x * scale).collect();
        let gradient = bed.put(kinds.gradient, &g);
        let sums = bed.output(DType::F64, blocks.len());
        let (beta1, beta2) = BETAS;
        Bucket {
            op: BucketAdamW {
                beta1, beta2, eps: EPS, table, params, control, weight, master, moment1, moment2,
                gradient,
            },
            numbers: GradientNumbers {
                layout: LAYOUT,
                table,
                params,
                gradient,
                sums,
                numbers,
                squares: None,
            },
            decide: DecideUpdate { params, numbers, control },
        }
    }

    fn run(&self, bed: &mut StepBed) {
        bed.device.gradient_numbers(&self.numbers);
        bed.device.decide_update(&self.decide);
        bed.device.bucket_adamw(&self.op);
    }

    /// Parts of the state.
    fn state(&self) -> Vec<Buffer> {
        let BucketAdamW { weight, master, moment1, moment2, .. } = self.op;
        let mut all = vec![weight, moment1, moment2];
        match master {
            Master::Weight => {}
            Master::LowBits(part) | Master::Separate(part) => all.push(part),
        }
        all
    }
}

/// AdamW of one element (Loshchilov and Hutter 2019), each operation rounded to a float.
fn adamw<T: Float>(class: StepClass, decays: bool, grad_scale: f64, of: [f64; 4]) -> [f64; 3] {
    let ([w, m, v, g], (beta1, beta2)) = (of.map(T::of), BETAS);
    let g = g * T::of(grad_scale);
    let m = m.fma(T::of(beta1), T::of(1.0 - beta1) * g);
    let v = v.fma(T::of(beta2), T::of(1.0 - beta2) * g * g);
    let root = (v * T::of(class.correction)).sqrt() + T::of(EPS);
    let keep = if decays { T::of(class.keep) } else { T::ONE };
    let w = w.fma(keep, -(T::of(class.rate) * m / root));
    [w, m, v].map(T::wide)
}

/// Weight and moments of a bucket behind its update, element by element.
fn updated(bed: &StepBed, bucket: &Bucket, grad_scale: f64) -> [Vec<f64>; 3] {
    let BucketAdamW { weight, moment1, moment2, gradient, params, .. } = bucket.op;
    let [mut w, mut m, mut v, g] = [weight, moment1, moment2, gradient].map(|part| bed.get(part));
    let (params, mut at) = (bed.get(params), 0);
    for Tensor { len, about } in tensors() {
        let class = StepParams::class(&params, about.class as usize);
        for i in (at..at + len).filter(|_| class.active && !about.frozen) {
            let of = [w[i], m[i], v[i], g[i]];
            [w[i], m[i], v[i]] = match weight.dtype() {
                DType::F64 => adamw::<f64>(class, about.decays, grad_scale, of),
                _ => adamw::<f32>(class, about.decays, grad_scale, of),
            };
        }
        at += len.next_multiple_of(BLOCK);
    }
    [w, m, v]
}

/// On every instruction set, by any number of threads.
#[test]
fn a_bucket_has_the_bits_of_its_elements() {
    let StepClass { rate, correction, .. } = StepClass::new(STEP, LR, BETAS, DECAY);
    let [rest1, rest2] = [BETAS.0, BETAS.1].map(|beta| 1.0 - beta.powi(STEP as i32));
    assert!((rate * rest1 / LR - 1.0).abs() < 1e-15 && (correction * rest2 - 1.0).abs() < 1e-15);
    let isas = Isa::ALL.into_iter().filter(|isa| isa.is_available());
    for (isa, threads) in isas.flat_map(|isa| [(isa, 1), (isa, 5)]) {
        for (float, norm_max) in [DType::F32, DType::F64].map(|float| [(float, 0.0), (float, 0.05)])
            .concat()
        {
            let kinds = Kinds { weight: float, master: "weight", moment: float, gradient: float };
            let mut bed = StepBed::cpu(DType::F32, float);
            let cpu = CpuDevice::new(threads, step_bed::ARENA_BYTES, isa).expect("a CPU");
            bed.device = Device::Cpu(cpu);
            let bucket = Bucket::new(&mut bed, kinds, params(norm_max, 1.0));
            bed.device.gradient_numbers(&bucket.numbers);
            bed.device.decide_update(&bucket.decide);
            let control = bed.get(bucket.op.control);
            assert_eq!((control[0], control[3]), (1.0, 6.0));
            assert_eq!(control[1] < 1.0, norm_max > 0.0, "{control:?}");
            let expected = updated(&bed, &bucket, control[1]);
            bed.device.bucket_adamw(&bucket.op);
            let found = bucket.state().into_iter().map(|part| bed.get(part));
            for (part, (found, expected)) in found.zip(expected).enumerate() {
                assert!(found == expected, "part {part} of {float:?}, {isa:?}, {threads} threads");
            }
        }
    }
}

#[test]
fn the_numbers_of_a_bucket_are_those_of_its_tensors() {
    let float = DType::F32;
    let kinds = Kinds { weight: float, master: "weight", moment: float, gradient: float };
    let mut bed = StepBed::cpu(float, float);
    let bucket = Bucket::new(&mut bed, kinds, params(0.0, 4.0));
    bed.device.gradient_numbers(&bucket.numbers);
    let g = bed.get(bucket.op.gradient);
    let square = |(g, of): (&[f64], &BucketBlock)| -> f64 {
        g[..of.len as usize].iter().map(|x| x * x).sum()
    };
    let blocks = blocks();
    let expected: Vec<f64> = g.chunks(BLOCK).zip(&blocks).map(square).collect();
    let counted = blocks.iter().zip(&expected).map(|(of, sum)| match of.uncounted {
        false if of.class != 2 => *sum,
        _ => 0.0,
    });
    let numbers = bed.get(bucket.numbers.numbers);
    let squares = [counted.sum::<f64>() / 16.0];
    assert!(step_bed::error(&[numbers[StepNumbers::SQUARED_NORM]], &squares) < 1e-13);
    assert!(step_bed::error(&bed.get(bucket.numbers.sums), &expected) < 1e-13);
    assert_eq!(numbers[StepNumbers::NON_FINITE], 0.0);
}

/// Over many elements random rounding neither gains nor loses.
#[test]
fn random_rounding_is_right_on_average() {
    let bf16 = DType::Bf16;
    let kinds = Kinds { weight: bf16, master: "low bits", moment: bf16, gradient: DType::F32 };
    let wide = Kinds { moment: DType::F32, ..kinds };
    let [rounded, exact] = [kinds, wide].map(|kinds| {
        let mut bed = StepBed::cpu(bf16, DType::F32);
        let bucket = Bucket::new(&mut bed, kinds, params(0.0, 1.0));
        // Moments that fp32 keeps and bf16 holds exactly before the update.
        let len = bucket.op.moment1.len();
        for moment in [bucket.op.moment1, bucket.op.moment2] {
            step_bed::set(&mut bed.device, moment, &vec![0.0078125; len]);
        }
        bucket.run(&mut bed);
        [bed.get(bucket.op.moment1), bed.get(bucket.op.moment2)]
    });
    for (rounded, exact) in rounded.iter().zip(&exact) {
        let first = 3 * BLOCK;
        let pairs = || rounded[..first].iter().zip(&exact[..first]);
        let off = pairs().map(|(a, b)| a - b).sum::<f64>() / first as f64;
        let unit = 0.0078125 * 2_f64.powi(-7);
        assert!(off.abs() < 0.02 * unit, "off by {off} on average, a unit being {unit}");
        assert!(pairs().all(|(a, b)| (a - b).abs() <= unit), "more than a unit off");
        assert!(pairs().any(|(a, b)| a > b) && pairs().any(|(a, b)| a < b));
    }
}

/// What has no number, or rows without room, changes nothing.
#[test]
fn a_flagged_step_changes_nothing() {
    for cuda in [false, true] {
        let bf16 = DType::Bf16;
        let kinds = Kinds { weight: bf16, master: "low bits", moment: bf16, gradient: bf16 };
        for flag in ["infinite", "not a number", "overflow", "loss", "none"] {
            let Some(mut bed) = bed(cuda, "a flagged step", DType::F32) else { return };
            let bucket = Bucket::new(&mut bed, kinds, params(1.0, 1.0));
            let before: Vec<_> = bucket.state().iter().map(|part| bed.bytes(*part)).collect();
            let number = |at| bucket.numbers.numbers.slice(at, 1);
            // Of the fourth tensor.
            let element = bucket.op.gradient.slice(6 * BLOCK + 5, 1);
            match flag {
                "infinite" => step_bed::set(&mut bed.device, element, &[f64::NEG_INFINITY]),
                "not a number" => step_bed::set(&mut bed.device, element, &[f64::NAN]),
                "overflow" => bed.device.write(number(StepNumbers::ROUTED_OVERFLOWS), &[1.0]),
                "loss" => bed.device.write(number(StepNumbers::LOSS), &[f64::NAN]),
                _ => {}
            }
            bucket.run(&mut bed);
            let after: Vec<_> = bucket.state().iter().map(|part| bed.bytes(*part)).collect();
            let control = bed.get(bucket.op.control);
            let applied = f64::from(u8::from(flag == "none"));
            assert_eq!((control[0], control[3]), (applied, 5.0 + applied), "{flag}");
            assert_eq!(before != after, flag == "none", "{flag}");
            let found = bed.get(bucket.numbers.numbers);
            let expected = if matches!(flag, "infinite" | "not a number") { 1.0 } else { 0.0 };
            assert_eq!(found[StepNumbers::NON_FINITE], expected, "{flag}");
            let of_tensors = [0.0, 0.0, 0.0, expected, 0.0, 0.0];
            assert_eq!(found[LAYOUT.non_finite()], of_tensors, "{flag}");
        }
    }
}

fn bed(cuda: bool, test: &str, float: DType) -> Option<StepBed> {
    match cuda {
        true => StepBed::cuda(test, float, float),
        false => Some(StepBed::cpu(float, float)),
    }
}

fn all_kinds() -> Vec<Kinds> {
    let (bf16, f16, f32) = (DType::Bf16, DType::F16, DType::F32);
    let mut all = Vec::new();
    for moment in [f32, bf16] {
        for (weight, master, gradient) in [
            (f32, "weight", f32),
            (f32, "weight", bf16),
            (bf16, "low bits", bf16),
            (bf16, "low bits", f32),
            (f16, "separate", f16),
            (f16, "separate", f32),
            (bf16, "separate", bf16),
        ] {
            all.push(Kinds { weight, master, moment, gradient });
        }
    }
    all
}

#[test]
fn updates_on_a_gpu_have_the_bits_of_the_cpu() {
    for kinds in all_kinds() {
        for (norm_max, loss_scale) in [(0.0, 1.0), (0.05, 1024.0)] {
            let run = |mut bed: StepBed| {
                let bucket = Bucket::new(&mut bed, kinds, params(norm_max, loss_scale));
                bed.device.gradient_numbers(&bucket.numbers);
                bed.device.decide_update(&bucket.decide);
                let numbers = bed.get(bucket.numbers.numbers);
                let control = bed.get(bucket.op.control);
                // Sums of squares differ in their order: the update is compared from equal ones.
                let scale = rounded(DType::F32, control[1]);
                let decided = [1.0, scale, control[2], control[3], control[4]];
                step_bed::set(&mut bed.device, bucket.op.control, &decided);
                bed.device.bucket_adamw(&bucket.op);
                bed.device.finish().expect("the update");
                let state: Vec<_> = bucket.state().iter().map(|part| bed.bytes(*part)).collect();
                (numbers, control, bed.get(bucket.numbers.sums), state)
            };
            let Some(gpu) = bed(true, "updates on a GPU", DType::F32) else { return };
            let (numbers, control, sums, state) = run(gpu);
            let (cpu_numbers, cpu_control, cpu_sums, cpu_state) =
                run(StepBed::cpu(DType::F32, DType::F32));
            let close = |a: &[f64], b: &[f64]| step_bed::error(a, b) < 1e-12;
            assert!(close(&numbers, &cpu_numbers), "{kinds:?} {numbers:?} {cpu_numbers:?}");
            assert!(close(&control, &cpu_control), "{kinds:?} {control:?} {cpu_control:?}");
            assert!(close(&sums, &cpu_sums), "{kinds:?}");
            assert_eq!(control[1] * loss_scale < 1.0, norm_max > 0.0, "{kinds:?} {control:?}");
            for (part, (found, expected)) in state.iter().zip(&cpu_state).enumerate() {
                let off = found.iter().zip(expected).filter(|(a, b)| a != b).count();
                assert_eq!(off, 0, "{kinds:?} {norm_max}: bytes of part {part} that differ");
            }
        }
    }
}

/// A gradient of more blocks than parts, with the last one cut.
#[test]
fn sums_of_squares_on_a_gpu() {
    for dtype in step_bed::ELEMENTS {
        for len in [1, 4096, 4097, 20_000 * 331] {
            let Some(mut gpu) = bed(true, "sums of squares", DType::F32) else { return };
            let mut cpu = StepBed::cpu(DType::F32, DType::F32);
            let [found, expected] = [&mut gpu, &mut cpu].map(|bed| {
                let blocks: Vec<_> = BucketBlock::default().of_tensor(len as u64).collect();
                let mut values: Vec<f64> =
                    (0..len as u64).map(|i| ((i * 7919) % 8191) as f64 / 8192.0 - 0.4).collect();
                values.resize(blocks.len() * BLOCK, 0.0);
                let op = GradientNumbers {
                    layout: LAYOUT,
                    table: bed.words(&BucketBlock::table(&blocks)),
                    params: bed.put(DType::F64, &params(0.0, 1.0).encode()),
                    gradient: bed.put(dtype, &values),
                    sums: bed.output(DType::F64, blocks.len()),
                    numbers: bed.put(DType::F64, &[0.0; LAYOUT.len()]),
                    squares: None,
                };
                bed.device.gradient_numbers(&op);
                [bed.get(op.sums), bed.get(op.numbers)].concat()
            });
            assert!(step_bed::error(&found, &expected) < 1e-13, "{dtype:?} {len}");
        }
    }
}

/// The fused ops on the CPU have the bits of the ops they stand for.
#[test]
fn fused_ops_have_the_bits_of_their_parts() {
    for float in [DType::F32, DType::F64] {
        let (tokens, heads, head_dim) = (70, 3, 10);
        let (dim, eps, theta) = (heads * head_dim, 1e-5, 1e4);
        let run = |fused: bool, per_head: bool| {
            let mut bed = StepBed::cpu(DType::F32, float);
            let (x, positions) =
                (bed.input(tokens * dim), bed.words(&step_bed::below(2, tokens, 900)));
            let spans = if per_head { tokens * heads } else { tokens };
            let width = tokens * dim / spans;
            let (gain, dy) = (bed.input(width), bed.input(tokens * dim));
            let (turned, dx) = (bed.floats(tokens * dim), bed.floats(tokens * dim));
            let (turned_rstd, dw) = (bed.floats(spans), bed.input(width));
            if fused {
                let forward = NormRope {
                    tokens, heads, head_dim, per_head, eps, theta, positions, x, w: gain,
                    y: turned, rstd: turned_rstd,
                };
                bed.device.norm_rope(&forward);
                let op = NormRopeBackward { forward, dy, dx, dw, accumulate_dw: true };
                bed.device.norm_rope_backward(&op);
            } else {
                let (rows, dim, w, rstd) = (spans, width, gain, turned_rstd);
                bed.device.rms_norm(&RmsNorm { rows, dim, eps, x, w, y: turned, rstd });
                let rope = Rope {
                    tokens, heads, head_dim, theta, inverse: false, positions, x: turned,
                };
                bed.device.rope(&rope);
                bed.device.rope(&Rope { inverse: true, x: dy, ..rope });
                bed.device.rms_norm_backward(&RmsNormBackward {
                    rows, dim, x, w, rstd, dy, dx, dw,
                    accumulate_dx: false,
                    accumulate_dw: true,
                });
            }
            [turned, turned_rstd, dx, dw].map(|buffer| bed.bytes(buffer))
        };
        for per_head in [false, true] {
            assert!(run(true, per_head) == run(false, per_head), "{float:?} {per_head}");
        }
    }
}
