//! The ops beside a router's choice, on a GPU against a CPU: balance, entropies, counts, and the
//! cosine gate. Sums have other orders there, so that numbers are alike to their last bits.

use moejob_kernels::philox::{Draw, Site};
use moejob_kernels::{
    Add, AddRouting, ArenaPlan, BalanceLoss, BalanceLosses, Buffer, DType, Device, Mask, MaskRows,
    NO_EXPERT, NormalizeRows, NormalizeRowsBackward, RouteEntropy, Scoring, Temper,
    TemperBackward,
};

fn normals(seed: u64, len: usize) -> Vec<f64> {
    let draw = Draw { seed, step: 0, layer: 0, first_token: 0 };
    (0..len).map(|i| draw.normal(Site::Logits, i / 64, i % 64)).collect()
}

fn write(device: &mut Device, buffer: Buffer, values: &[f64]) {
    match buffer.dtype() {
        DType::F64 => device.write(buffer, values),
        _ => device.write(buffer, &values.iter().map(|x| *x as f32).collect::<Vec<f32>>()),
    }
}

fn read(device: &Device, buffer: Buffer) -> Vec<f64> {
    match buffer.dtype() {
        DType::F64 => device.read_vec(buffer),
        _ => device.read_vec::<f32>(buffer).into_iter().map(f64::from).collect(),
    }
}

/// Runs `op` on both devices, twice on the GPU; `inputs` are written first, `outputs` compared.
fn compare(
    name: &str,
    plan: &ArenaPlan,
    inputs: &[(Buffer, Vec<f64>)],
    outputs: &[Buffer],
    op: &dyn Fn(&mut Device),
) {
    let mut cuda = match Device::cuda(0, plan.bytes()) {
        Ok(device) => device,
        Err(error) => return eprintln!("skipped: {name}: no CUDA device: {error}"),
    };
    let mut cpu = Device::cpu(2, plan.bytes()).expect("a CPU");
    let run = |device: &mut Device| -> Vec<Vec<f64>> {
        inputs.iter().for_each(|(buffer, values)| write(device, *buffer, values));
        op(device);
        outputs.iter().map(|buffer| read(device, *buffer)).collect()
    };
    let (found, again, expected) = (run(&mut cuda), run(&mut cuda), run(&mut cpu));
    cuda.finish().expect("the op ran");
    assert!(found == again, "{name}: other bits a second time");
    for (at, (found, expected)) in found.iter().zip(&expected).enumerate() {
        let size = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
        let apart = found.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum::<f64>();
        let allowed = if outputs[at].dtype() == DType::F64 { 1e-10 } else { 1e-6 };
        assert!(apart.sqrt() <= allowed * size + 1e-12, "{name}: output {at}: {apart:e}");
    }
}

#[test]
fn losses_of_balance_and_their_gradients() {
    use BalanceLoss::{CvSquared, FirstChoice, Gshard, Kl, LoadImportance, None, Switch};
    for loss in [None, Switch, Gshard, FirstChoice, LoadImportance, CvSquared, Kl] {
        for (segments, experts) in [(1, 64), (70, 6), (3, 1)] {
            let mut plan = ArenaPlan::new();
            let stats = plan.alloc(DType::F64, segments * 5 * experts);
            let value = plan.alloc(DType::F64, 1);
            let into = plan.alloc(DType::F64, segments * 3 * experts);
            let values: Vec<f64> = normals(1, stats.len()).iter().map(|x| x.abs() * 9.0).collect();
            for gradient in [Option::None, Some((into, 0.7))] {
                let op = BalanceLosses { loss, tokens: 32, experts, stats, value, gradient };
                let inputs = [(stats, values.clone()), (into, vec![5.0; into.len()])];
                let name = format!("{loss:?} of {segments} x {experts}");
                compare(&name, &plan, &inputs, &[value, into], &|device| {
                    device.balance_losses(&op);
                });
            }
        }
    }
}

#[test]
fn entropies_of_scores() {
    for (tokens, experts) in [(1, 3), (3000, 64), (77, 130)] {
        for scoring in [Scoring::Softmax, Scoring::Sigmoid] {
            let mut plan = ArenaPlan::new();
            let [logits, probs] = [(); 2].map(|()| plan.alloc(DType::F32, tokens * experts));
            let (lse, entropy) = (plan.alloc(DType::F32, tokens), plan.alloc(DType::F64, 1));
            let x = normals(2, logits.len()).into_iter().map(|x| f64::from(x as f32));
            let x: Vec<f64> = x.collect();
            let sums = x.chunks(experts).map(|row| row.iter().map(|x| x.exp()).sum::<f64>().ln());
            let sums: Vec<f64> = sums.collect();
            let p = x.iter().enumerate().map(|(at, x)| match scoring {
                Scoring::Softmax => (x - sums[at / experts]).exp(),
                Scoring::Sigmoid => 1.0 / (1.0 + (-x).exp()),
            });
            let inputs = [(logits, x.clone()), (lse, sums.clone()), (probs, p.collect())];
            let op = RouteEntropy { experts, scoring, probs, logits, lse, entropy };
            let name = format!("{scoring:?} of {tokens} x {experts}");
            // Scores of a CPU are rounded to fp32.
            let rounded = |device: &mut Device| {
                device.route_entropy(&op);
                let value = read(device, entropy)[0];
                device.write(entropy, &[(value * 1e5).round() / 1e5]);
            };
            compare(&name, &plan, &inputs, &[entropy], &rounded);
        }
    }
}

#[test]
fn counts_of_a_layer_are_added() {
    let (tokens, top_k, experts) = (5000, 3, 16);
    let mut plan = ArenaPlan::new();
    let mut words = |len| plan.alloc(DType::U32, len);
    let (chosen, ids, positions) = (words(tokens * top_k), words(tokens * top_k), words(tokens));
    let (counts, dropped) = (words(experts), words(experts));
    let mut doubles = |len| plan.alloc(DType::F64, len);
    let (losses, record, tally) = (doubles(3), doubles(3), doubles(4));
    let (loads, drops) = (doubles(experts), doubles(experts));
    let choice = |slot: u32| slot.wrapping_mul(2_654_435_761) >> 28;
    let all: Vec<u32> = (0..(tokens * top_k) as u32).map(choice).collect();
    let kept: Vec<u32> =
        all.iter().map(|id| if *id < 9 { NO_EXPERT } else { *id }).collect();
    for dropped in [None, Some(dropped)] {
        let op = AddRouting {
            top_k, losses, counts, dropped, chosen, ids, positions, record, tally, loads, drops,
        };
        let run = |device: &mut Device| {
            device.write(chosen, &all);
            device.write(ids, &kept);
            let of_texts: Vec<u32> = (0..tokens as u32).map(|t| t % 41).collect();
            device.write(positions, &of_texts);
            let of = |seed: u32| (0..experts as u32).map(|e| e * seed % 13).collect::<Vec<u32>>();
            device.write(counts, &of(5));
            if let Some(dropped) = dropped {
                device.write(dropped, &of(7));
            }
            device.add_routing(&op);
            device.add_routing(&op);
        };
        let sums = [record, tally, loads, drops];
        let mut inputs: Vec<(Buffer, Vec<f64>)> =
            sums.iter().map(|sum| (*sum, vec![2.0; sum.len()])).collect();
        inputs.push((losses, vec![0.25, 0.5, 0.125]));
        compare(&format!("counts, {dropped:?}"), &plan, &inputs, &sums, &run);
    }
}

#[test]
fn rows_of_length_one_and_their_scale() {
    let (rows, dim) = (300, 70);
    for accumulate in [false, true] {
        let mut plan = ArenaPlan::new();
        let [x, y, dy, dx] = [(); 4].map(|()| plan.alloc(DType::F32, rows * dim));
        let norm = plan.alloc(DType::F64, rows);
        let [temperature, d_temperature] = [(); 2].map(|()| plan.alloc(DType::F32, 1));
        let mut values = normals(3, rows * dim);
        values[..dim].fill(0.0);
        let inputs = |start: f64| {
            vec![
                (x, values.clone()),
                (dy, normals(4, rows * dim)),
                (dx, normals(5, rows * dim)),
                (temperature, vec![start]),
                (d_temperature, vec![3.0]),
            ]
        };
        let lengths = |device: &mut Device| {
            device.normalize_rows(&NormalizeRows { rows, dim, x, y, norm });
            let op = NormalizeRowsBackward { rows, dim, accumulate, y, norm, dy, dx };
            device.normalize_rows_backward(&op);
        };
        // A row of zeros has a gradient of 1e12.
        let kept = dx.slice(dim, dx.len() - dim);
        compare("lengths", &plan, &inputs(0.5), &[y, norm, kept], &lengths);
        for start in [0.5, 5.0] {
            let scale = |device: &mut Device| {
                device.temper(&Temper { temperature, x });
                let op = TemperBackward { accumulate, temperature, x, dx, d_temperature };
                device.temper_backward(&op);
            };
            compare("a scale", &plan, &inputs(start), &[x, dx, d_temperature], &scale);
        }
    }
}

#[test]
fn doubles_are_added() {
    let mut plan = ArenaPlan::new();
    let [a, b] = [(); 2].map(|()| plan.alloc(DType::F64, 1000));
    let inputs = [(a, normals(6, 1000)), (b, normals(7, 1000))];
    compare("doubles", &plan, &inputs, &[a], &|device| device.add(&Add { a, b }));
}

/// Rows of bf16 become fp32 under a mask, and fp32 is added to bf16 under it.
#[test]
fn masks_stand_between_elements_and_fp32() {
    let name = "masks_stand_between_elements_and_fp32";
    let (rows, dim) = (50, 130);
    let mut plan = ArenaPlan::new();
    let (half, wide) = (plan.alloc(DType::Bf16, rows * dim), plan.alloc(DType::F32, rows * dim));
    let mut cuda = match Device::cuda(0, plan.bytes()) {
        Ok(device) => device,
        Err(error) => return eprintln!("skipped: {name}: no CUDA device: {error}"),
    };
    let draw = Draw { seed: 3, step: 1, layer: 1, first_token: 5 };
    let mask = Mask::Jitter { eps: 0.1 };
    let ones = vec![0x3f80_i16; rows * dim];
    cuda.write(half.reinterpret(DType::I16), &ones);
    let of = |accumulate, x, y| MaskRows { rows, dim, mask, draw, accumulate, x, y };
    cuda.mask_rows(&of(false, half, wide));
    let factors: Vec<f32> = cuda.read_vec(wide);
    let factor = |at: usize| 0.9 + 0.2 * draw.uniform(Site::Jitter, at / dim, at % dim);
    assert!(factors.iter().enumerate().all(|(at, x)| (f64::from(*x) - factor(at)).abs() < 1e-6));
    cuda.mask_rows(&of(true, wide, half));
    let sums: Vec<i16> = cuda.read_vec(half.reinterpret(DType::I16));
    for (at, sum) in sums.iter().enumerate() {
        let sum = f32::from_bits(u32::from(*sum as u16) << 16);
        let expected = 1.0 + factor(at) * factor(at);
        assert!((f64::from(sum) - expected).abs() < 0.01, "{at}: {sum}, expected {expected}");
    }
    cuda.finish().expect("masks");
}
