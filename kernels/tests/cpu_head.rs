//! The head with its loss on a CPU: the bits of the ops that it is made of.

use moejob_kernels::parts::CrossEntropy;
use moejob_kernels::{
    ArenaPlan, Buffer, DType, Device, HeadDesc, HeadGradient, HeadLoss, IGNORE,
    Layout, Matmul, head_numbers, philox,
};

struct Case {
    desc: HeadDesc,
    accumulate: bool,
    loss_scale: Option<f32>,
}

/// Uniform in [-1, 1), a function of (seed, element).
fn uniform(seed: u64, len: usize) -> Vec<f64> {
    let draw = philox::Draw { seed, step: 0, layer: 0, first_token: 0 };
    let at = |i| 2.0 * draw.uniform(philox::Site::Table, i / 1000, i % 1000) - 1.0;
    (0..len).map(at).collect()
}

fn write(device: &mut Device, buffer: Buffer, values: &[f64]) {
    if buffer.dtype() == DType::F64 {
        return device.write(buffer, values);
    }
    let values: Vec<f32> = values.iter().map(|x| *x as f32).collect();
    device.write(buffer, &values);
}

fn bytes(device: &Device, buffer: Buffer) -> Vec<u8> {
    device.read_vec(buffer.reinterpret(DType::U8))
}

/// The op against the ops, on the same inputs; every byte of loss and gradients.
fn check(threads: usize, case: &Case) {
    let HeadDesc { element, tokens, dim, vocab } = case.desc;
    let mut plan = ArenaPlan::new();
    let mut floats = |len| plan.alloc(element, len);
    let [x, table] = [floats(tokens * dim), floats(vocab * dim)];
    let [dx, dtable] = [floats(tokens * dim), floats(vocab * dim)];
    let [dx_whole, dtable_whole] = [floats(tokens * dim), floats(vocab * dim)];
    let logits = floats(tokens * vocab);
    let targets = plan.alloc(DType::U32, tokens);
    let numbers = plan.alloc(DType::F64, 2);
    let losses = plan.alloc(DType::F64, tokens);
    let scale = plan.alloc(DType::F32, 1);
    let head_plan = Device::cpu(1, 0).expect("a device").head_plan(&case.desc);
    let scratch = plan.alloc(DType::U8, head_plan.scratch_bytes);
    let mut device = Device::cpu(threads, plan.bytes()).expect("a device");
    write(&mut device, x, &uniform(1, tokens * dim));
    write(&mut device, table, &uniform(2, vocab * dim));
    let words: Vec<u32> = (0..tokens as u32)
        .map(|t| if t % 7 == 3 { IGNORE } else { t.wrapping_mul(2_654_435_761) % vocab as u32 })
        .collect();
    device.write(targets, &words);
    for gradient in [dtable, dtable_whole] {
        write(&mut device, gradient, &uniform(3, vocab * dim));
    }
    device.write(scale, &[case.loss_scale.unwrap_or(f32::NAN)]);
    let per_token = 1.0 / tokens as f64;
    let factor = case.loss_scale.map_or(per_token, |scale| per_token * f64::from(scale));
    let op = HeadLoss {
        desc: case.desc,
        scale: per_token,
        loss_scale: case.loss_scale.map(|_| scale),
        x,
        table,
        targets,
        scratch,
        numbers,
        gradient: None,
    };
    device.head_loss(&op);
    let valid = words.iter().filter(|word| **word != IGNORE).count() as f64;
    let alone: Vec<f64> = device.read_vec(numbers);
    let gradient = HeadGradient { dx, dtable, accumulate: case.accumulate };
    device.write(numbers, &[0.0, 0.0]);
    device.head_loss(&HeadLoss { gradient: Some(gradient), ..op });
    let product = |layout, [m, n, k]: [usize; 3], accumulate, [a, b, c]: [Buffer; 3]| Matmul {
        layout,
        m,
        n,
        k,
        accumulate,
        a,
        b,
        c,
    };
    let all = [x, table, logits];
    device.matmul(&product(Layout::Nt, [tokens, vocab, dim], false, all));
    let part = CrossEntropy {
        tokens,
        vocab,
        scale: factor,
        gradient: true,
        logits,
        targets,
        loss: losses,
    };
    let cpu = device.as_cpu_mut().expect("a processor");
    match case.desc.element {
        DType::F64 => cpu.cross_entropy::<f64>(&part),
        _ => cpu.cross_entropy::<f32>(&part),
    }
    let all = [logits, table, dx_whole];
    device.matmul(&product(Layout::Nn, [tokens, dim, vocab], false, all));
    let all = [logits, x, dtable_whole];
    device.matmul(&product(Layout::Tn, [vocab, dim, tokens], case.accumulate, all));
    let expected = device.read_vec::<f64>(losses).iter().fold(0.0, |sum, loss| sum + loss);
    let found: Vec<f64> = device.read_vec(numbers);
    assert!(expected.is_finite() && expected > 0.0, "{expected:?}");
    assert_eq!(found[head_numbers::LOSS_SUM].to_bits(), expected.to_bits());
    assert_eq!(alone, found, "the loss alone is the loss");
    assert_eq!(found[head_numbers::VALID], valid);
    assert!(bytes(&device, dx) == bytes(&device, dx_whole), "dx {:?}", case.desc);
    assert!(bytes(&device, dtable) == bytes(&device, dtable_whole), "dtable {:?}", case.desc);
    device.head_loss(&op);
    assert_eq!(device.read_vec::<f64>(numbers)[1], 2.0 * valid, "numbers are added to");
}

#[test]
fn chunks_change_no_bit() {
    // 33,001 words leave room for 512 tokens of fp32 and 256 of fp64 at once.
    for (element, tokens, dim, vocab) in [
        (DType::F32, 1100, 24, 33_001),
        (DType::F64, 700, 8, 33_001),
        (DType::F32, 1, 5, 3),
        (DType::F32, 300, 300, 65),
    ] {
        let desc = HeadDesc { element, tokens, dim, vocab };
        let plan = Device::cpu(1, 0).expect("a device").head_plan(&desc);
        assert_eq!(plan.chunk < tokens, vocab == 33_001, "{plan:?}");
        check(1, &Case { desc, accumulate: false, loss_scale: None });
        check(2, &Case { desc, accumulate: true, loss_scale: Some(1024.0) });
    }
}

#[test]
fn a_head_without_tokens_has_gradients_of_zero() {
    let desc = HeadDesc { element: DType::F32, tokens: 0, dim: 4, vocab: 3 };
    let mut plan = ArenaPlan::new();
    let [x, table, dtable] = [0, 12, 12].map(|len| plan.alloc(DType::F32, len));
    let (targets, numbers) = (plan.alloc(DType::U32, 0), plan.alloc(DType::F64, 2));
    let mut device = Device::cpu(1, 4096).expect("a device");
    let scratch = plan.alloc(DType::U8, device.head_plan(&desc).scratch_bytes);
    device.write(dtable, &[1.0_f32; 12]);
    let gradient = Some(HeadGradient { dx: x, dtable, accumulate: false });
    let (scale, loss_scale) = (1.0, None);
    device.head_loss(&HeadLoss {
        desc,
        scale,
        loss_scale,
        x,
        table,
        targets,
        scratch,
        numbers,
        gradient,
    });
    assert_eq!(device.read_vec::<f32>(dtable), [0.0; 12]);
    assert_eq!(device.read_vec::<f64>(numbers), [0.0; 2]);
}
