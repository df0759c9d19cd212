//! Dense products and the head with its loss on a GPU, against float64 by the CPU's own ops.

mod cuda_common;

use std::sync::{Mutex, MutexGuard};

use cuda_common::{error, normal};
use half::{bf16, f16};
use moejob_kernels::{
    ArenaPlan, Buffer, DType, Device, HeadDesc, HeadGradient, HeadLoss, HeadPlan, IGNORE, Layout,
    Matmul, head_numbers,
};

/// Tests take turns: they share one device and its memory.
static TURN: Mutex<()> = Mutex::new(());

/// None, with the reason printed, where there is no device to test.
fn device(test: &str, bytes: usize) -> Option<(Device, MutexGuard<'static, ()>)> {
    let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    match Device::cuda(0, bytes) {
        Ok(device) => Some((device, turn)),
        Err(error) => {
            eprintln!("skipped: {test}: no CUDA device: {error}");
            None
        }
    }
}

/// Numbers of bf16 as elements of the buffer.
fn write(device: &mut Device, buffer: Buffer, values: &[bf16]) {
    match buffer.dtype() {
        DType::Bf16 => device.write(buffer, values),
        DType::F16 => {
            let values: Vec<f16> = values.iter().map(|x| f16::from_f32(x.to_f32())).collect();
            device.write(buffer, &values);
        }
        DType::F32 => {
            let values: Vec<f32> = values.iter().map(|x| x.to_f32()).collect();
            device.write(buffer, &values);
        }
        _ => device.write(buffer, &values.iter().map(|x| x.to_f64()).collect::<Vec<f64>>()),
    }
}

fn floats(device: &Device, buffer: Buffer) -> Vec<f64> {
    match buffer.dtype() {
        DType::Bf16 => device.read_vec::<bf16>(buffer).iter().map(|x| x.to_f64()).collect(),
        DType::F16 => device.read_vec::<f16>(buffer).iter().map(|x| x.to_f64()).collect(),
        DType::F32 => device.read_vec::<f32>(buffer).iter().map(|x| f64::from(*x)).collect(),
        _ => device.read_vec(buffer),
    }
}

fn bytes(device: &Device, buffer: Buffer) -> Vec<u8> {
    device.read_vec(buffer.reinterpret(DType::U8))
}

/// Every bit one: no number of any kind.
fn poison(device: &mut Device, buffer: Buffer) {
    let buffer = buffer.reinterpret(DType::U8);
    device.write(buffer, &vec![0xff_u8; buffer.len()]);
}

fn reference(bytes: usize) -> Device {
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get());
    Device::cpu(threads, bytes).expect("a CPU device")
}

const LAYOUTS: [Layout; 3] = [Layout::Nt, Layout::Nn, Layout::Tn];

/// One product in one kind; its bits. `shift` elements lie before each operand.
fn product(
    device: &mut Device,
    [layout, inputs, output]: [usize; 3],
    sizes: [usize; 3],
    accumulate: bool,
    shift: usize,
) -> (f64, Vec<u8>) {
    let [m, n, k] = sizes;
    let kinds = [DType::Bf16, DType::F16, DType::F32, DType::F64];
    let (layout, element, output) = (LAYOUTS[layout], kinds[inputs], kinds[output]);
    let (a, b, c) = (normal(1, m * k, 1.0), normal(2, n * k, 1.0), normal(3, m * n, 1.0));
    let place = |element, output, shift: usize| {
        let mut plan = ArenaPlan::new();
        let operand = |plan: &mut ArenaPlan, dtype, len: usize| {
            plan.alloc(dtype, len + shift).slice(shift, len)
        };
        let a = operand(&mut plan, element, m * k);
        let b = operand(&mut plan, element, n * k);
        ([a, b, operand(&mut plan, output, m * n)], plan.bytes())
    };
    let run = |device: &mut Device, buffers: [Buffer; 3]| {
        write(device, buffers[0], &a);
        write(device, buffers[1], &b);
        if accumulate { write(device, buffers[2], &c) } else { poison(device, buffers[2]) }
        let [a, b, c] = buffers;
        device.matmul(&Matmul { layout, m, n, k, accumulate, a, b, c });
        device.finish().expect("a product");
        floats(device, buffers[2])
    };
    let (buffers, _) = place(element, output, shift);
    let found = run(device, buffers);
    let (wide, bytes_needed) = place(DType::F64, DType::F64, 0);
    let mut wide_device = reference(bytes_needed);
    let expected = run(&mut wide_device, wide);
    (error(&found, &expected), bytes(device, buffers[2]))
}

#[test]
fn products_are_those_of_float64() {
    let Some((mut device, _turn)) = device("products_are_those_of_float64", 64 << 20) else {
        return;
    };
    let mut failures = Vec::new();
    for sizes in [[128, 256, 512], [1, 8, 64], [37, 100, 41], [200, 1, 777], [1000, 96, 8]] {
        for layout in 0..3 {
            for (inputs, output, limit) in [
                (0, 0, 6e-3),
                (0, 2, 1e-6),
                (1, 1, 1e-3),
                (1, 2, 1e-6),
                (2, 2, 1e-6),
            ] {
                for (accumulate, shift) in [(false, 0), (true, 0), (false, 3), (true, 1)] {
                    let what = [layout, inputs, output];
                    let (error, bits) =
                        product(&mut device, what, sizes, accumulate, shift);
                    // Written so that an error which is no number fails.
                    if !(error <= limit) {
                        failures.push(format!("{what:?} {sizes:?} {accumulate} {shift}: {error}"));
                    }
                    let again = product(&mut device, what, sizes, accumulate, shift);
                    assert!(bits == again.1, "{what:?} {sizes:?}: other bits a second time");
                }
            }
        }
    }
    device.set_tf32(true);
    let (error, _) = product(&mut device, [0, 2, 2], [256, 256, 512], false, 0);
    // Numbers of bf16 are exact in tf32.
    assert!(error < 1e-6, "tf32: {error}");
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn a_recorded_algorithm_gives_the_same_bits() {
    let name = "a_recorded_algorithm_gives_the_same_bits";
    let Some((mut device, _turn)) = device(name, 64 << 20) else { return };
    let sizes = [300, 200, 4096];
    let (_, bits) = product(&mut device, [1, 0, 2], sizes, false, 0);
    let record = |device: &Device| match device {
        Device::Cuda(cuda) => cuda.dense_record(),
        Device::Cpu(_) => Vec::new(),
        _ => Vec::new(),
    };
    let lines: Vec<String> = record(&device).iter().map(|line| line.to_string()).collect();
    assert_eq!(lines.len(), 1, "{lines:?}");
    eprintln!("  {}", lines[0]);
    let mut other = Device::cuda(0, 64 << 20).expect("a second device of the GPU");
    if let Device::Cuda(cuda) = &mut other {
        cuda.fix_dense(&[lines[0].parse().expect("a record")]);
    }
    let (_, again) = product(&mut other, [1, 0, 2], sizes, false, 0);
    assert_eq!(record(&other), record(&device));
    assert!(bits == again, "other bits from the recorded algorithm");
}

struct Head {
    desc: HeadDesc,
    /// Of the gradient of the table
    gradient: DType,
    accumulate: bool,
    loss_scale: f32,
}

struct Found {
    numbers: Vec<f64>,
    dx: Vec<f64>,
    dtable: Vec<f64>,
    bits: Vec<Vec<u8>>,
}

fn targets(tokens: usize, vocab: usize) -> Vec<u32> {
    let word = |t: u32| t.wrapping_mul(2_654_435_761) % vocab as u32;
    (0..tokens as u32).map(|t| if t % 5 == 2 { IGNORE } else { word(t) }).collect()
}

/// The head on a device of its own; `wide`: on a CPU in float64.
fn head(case: &Head, wide: bool) -> Found {
    let HeadDesc { tokens, dim, vocab, .. } = case.desc;
    let element = if wide { DType::F64 } else { case.desc.element };
    let desc = HeadDesc { element, ..case.desc };
    let mut plan = ArenaPlan::new();
    let [x, dx] = [(); 2].map(|()| plan.alloc(element, tokens * dim));
    let table = plan.alloc(element, vocab * dim);
    let dtable = plan.alloc(if wide { DType::F64 } else { case.gradient }, vocab * dim);
    let (words, numbers) = (plan.alloc(DType::U32, tokens), plan.alloc(DType::F64, 2));
    let scale = plan.alloc(DType::F32, 1);
    let bytes_of_scratch = if wide {
        Device::cpu(1, 0).expect("a device").head_plan(&desc).scratch_bytes
    } else {
        HeadPlan::cuda(&desc).scratch_bytes
    };
    let scratch = plan.alloc(DType::U8, bytes_of_scratch);
    let mut device = match wide {
        true => reference(plan.bytes()),
        false => Device::cuda(0, plan.bytes()).expect("device memory"),
    };
    write(&mut device, x, &normal(1, tokens * dim, 1.0));
    write(&mut device, table, &normal(2, vocab * dim, 1.5 / (dim as f64).sqrt()));
    device.write(words, &targets(tokens, vocab));
    device.write(numbers, &[1.0, 2.0]);
    device.write(scale, &[case.loss_scale]);
    poison(&mut device, dx);
    poison(&mut device, scratch.slice(0, scratch.len().min(64 << 20)));
    match case.accumulate {
        true => write(&mut device, dtable, &normal(3, vocab * dim, 1e-3)),
        false => poison(&mut device, dtable),
    }
    let op = HeadLoss {
        desc,
        scale: 1.0 / tokens as f64,
        loss_scale: Some(scale),
        x,
        table,
        targets: words,
        scratch,
        numbers,
        gradient: None,
    };
    device.head_load(&desc).expect("the head's kernels");
    let waits = device.waits();
    device.head_loss(&op);
    let gradient = HeadGradient { dx, dtable, accumulate: case.accumulate };
    device.head_loss(&HeadLoss { gradient: Some(gradient), ..op });
    assert_eq!(device.waits(), waits, "an op waits for nothing");
    device.finish().expect("a head");
    let bits = [numbers, dx, dtable].map(|buffer| bytes(&device, buffer)).into();
    let numbers = floats(&device, numbers);
    Found { numbers, dx: floats(&device, dx), dtable: floats(&device, dtable), bits }
}

#[test]
fn a_head_is_that_of_float64() {
    let Some((probe, _turn)) = device("a_head_is_that_of_float64", 256) else { return };
    drop(probe);
    let mut failures = Vec::new();
    for (tokens, dim, vocab, element, gradient, accumulate) in [
        (300, 64, 1000, DType::Bf16, DType::F32, false),
        (300, 64, 1001, DType::Bf16, DType::Bf16, true),
        (77, 128, 50_257, DType::Bf16, DType::F32, true),
        (64, 64, 300, DType::F16, DType::F16, false),
        (129, 192, 32_000, DType::F16, DType::F32, false),
        (100, 40, 321, DType::F32, DType::F32, true),
        (50, 64, 40_003, DType::F32, DType::F32, false),
        // Two chunks, rows longer than shared memory.
        (2000, 64, 151_936, DType::Bf16, DType::F32, false),
    ] {
        let desc = HeadDesc { element, tokens, dim, vocab };
        let case = Head { desc, gradient, accumulate, loss_scale: 512.0 };
        let (found, expected) = (head(&case, false), head(&case, true));
        let limit = match element {
            DType::Bf16 => 6e-3,
            DType::F16 => 1e-3,
            _ => 3e-6,
        };
        let loss = found.numbers[head_numbers::LOSS_SUM];
        let loss_error = (loss / expected.numbers[head_numbers::LOSS_SUM] - 1.0).abs();
        let (dx, dtable) =
            (error(&found.dx, &expected.dx), error(&found.dtable, &expected.dtable));
        eprintln!("  {desc:?} {gradient:?}: loss {loss_error:.1e} dx {dx:.1e} dtable {dtable:.1e}");
        let right = loss_error <= limit / 10.0 && dx <= limit && dtable <= limit;
        let counted = found.numbers[1] == expected.numbers[1];
        if !(right && counted) {
            failures.push(format!("{desc:?} {gradient:?}: {:?}", found.numbers));
        }
        assert!(head(&case, false).bits == found.bits, "{desc:?}: other bits a second time");
    }
    assert!(failures.is_empty(), "{failures:#?}");
}

/// A target that is no word must not pass as a small loss, and neither may logits that are no
/// numbers.
#[test]
fn what_is_wrong_shows_in_the_loss() {
    let Some((mut device, _turn)) = device("what_is_wrong_shows_in_the_loss", 1 << 20) else {
        return;
    };
    let desc = HeadDesc { element: DType::Bf16, tokens: 8, dim: 64, vocab: 100 };
    let mut plan = ArenaPlan::new();
    let (x, table) = (plan.alloc(DType::Bf16, 8 * 64), plan.alloc(DType::Bf16, 100 * 64));
    let (words, numbers) = (plan.alloc(DType::U32, 8), plan.alloc(DType::F64, 2));
    let scratch = plan.alloc(DType::U8, HeadPlan::cuda(&desc).scratch_bytes);
    let (scale, loss_scale, targets, gradient) = (1.0, None, words, None);
    let op = HeadLoss {
        desc,
        scale,
        loss_scale,
        x,
        table,
        targets,
        scratch,
        numbers,
        gradient,
    };
    let mut loss = |value: f32, word: u32| {
        let mut rows = vec![bf16::from_f32(0.5); 8 * 64];
        rows[70] = bf16::from_f32(value);
        device.write(x, &rows);
        device.write(table, &vec![bf16::from_f32(0.1); 100 * 64]);
        device.write(words, &[1, 2, word, 4, 5, 6, 7, 8]);
        device.write(numbers, &[0.0, 0.0]);
        device.head_loss(&op);
        device.read_vec::<f64>(numbers)[0]
    };
    assert!((loss(0.5, 3) - 8.0 * 100_f64.ln()).abs() < 1e-3);
    assert!(loss(0.5, 100).is_nan(), "a word past the end");
    assert!(loss(f32::NAN, 3).is_nan() && loss(f32::INFINITY, 3).is_nan());
}
