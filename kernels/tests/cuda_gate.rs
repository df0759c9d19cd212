//! The routers on a GPU against those on the CPU: the same choices, the same noise, nearly the same
//! numbers.

use moejob_kernels::philox::{Draw, Site};
use moejob_kernels::{
    ArenaPlan, Buffer, Choice, DType, Device, Gate, GateBackward, Load, LogitNoise, Mask,
    MaskRows, RouteGroups, Scoring, balance,
};

const DRAW: Draw = Draw { seed: 11, step: (3 << 32) + 5, layer: 2, first_token: 77 };

fn normals(seed: u64, len: usize) -> Vec<f32> {
    let draw = Draw { seed, step: 0, layer: 0, first_token: 0 };
    (0..len).map(|i| draw.normal(Site::Logits, i / 64, i % 64) as f32).collect()
}

/// A gate with all its buffers, which `vary` may change.
fn gate(plan: &mut ArenaPlan, [tokens, experts, top_k, segments]: [usize; 4]) -> Gate {
    let mut floats = |len| plan.alloc(DType::F32, len);
    let (logits, noisy, probs) =
        (floats(tokens * experts), floats(tokens * experts), floats(tokens * experts));
    let (lse, weights, bias) = (floats(tokens), floats(tokens * top_k), floats(experts));
    let mut words = |len| plan.alloc(DType::U32, len);
    let (chosen, ids) = (words(tokens * top_k), words(tokens * top_k));
    let (first, positions, spoken) = (words(tokens), words(tokens), words(tokens));
    let (counts, dropped) = (words(experts), words(experts));
    Gate {
        tokens,
        experts,
        top_k,
        segments,
        choice: Choice::TopK,
        scoring: Scoring::Softmax,
        norm_topk: true,
        scale: 1.5,
        groups: None,
        capacity: None,
        prioritized: false,
        hysteresis: 0.0,
        before: None,
        noise: LogitNoise::None,
        load: Load::None,
        draw: Some(DRAW),
        logits,
        bias: Some(bias),
        words: spoken,
        positions,
        noisy,
        probs,
        lse,
        chosen,
        ids,
        weights,
        first,
        counts,
        dropped,
        stats: plan.alloc(DType::F64, segments * balance::row::COUNT * experts),
        losses: plan.alloc(DType::F64, 2),
        workspace: plan.alloc(DType::U8, 64 * tokens * (experts + top_k + 8)),
    }
}

struct Found {
    words: Vec<(&'static str, Vec<u32>)>,
    floats: Vec<(&'static str, Vec<f64>)>,
}

fn run(device: &mut Device, gate: &Gate, back: &GateBackward) -> Found {
    let (tokens, experts) = (gate.tokens, gate.experts);
    device.write(gate.logits, &normals(1, tokens * experts));
    if let Some(bias) = gate.bias {
        let bias_of = |e: usize| (e * 7 % 11) as f32 * 0.01;
        device.write(bias, &(0..experts).map(bias_of).collect::<Vec<f32>>());
    }
    let first = u32::from(gate.before.is_some());
    let positions: Vec<u32> = (0..tokens as u32).map(|t| (t + first) % 37).collect();
    // With hysteresis the first two are experts.
    device.write(gate.words, &(0..tokens as u32).map(|t| t * 7 % 16).collect::<Vec<u32>>());
    if let LogitNoise::Learned { raw } = gate.noise {
        device.write(raw, &normals(6, tokens * experts));
    }
    if let Some(scale) = back.loss_scale {
        device.write(scale, &[8.0_f32]);
    }
    device.write(gate.positions, &positions);
    device.write(back.dweights, &normals(2, tokens * gate.top_k));
    let dstats: Vec<f64> = normals(3, back.dstats.len()).into_iter().map(f64::from).collect();
    device.write(back.dstats, &dstats);
    for buffer in [gate.noisy, gate.probs, gate.weights, back.dlogits] {
        device.write(buffer, &vec![f32::NAN; buffer.len()]);
    }
    for buffer in [gate.chosen, gate.ids, gate.first, gate.counts, gate.dropped] {
        device.write(buffer, &vec![0xffff_fff0_u32; buffer.len()]);
    }
    device.gate_load(gate).expect("the kernels");
    let waits = device.waits();
    device.gate(gate);
    device.gate_backward(back);
    assert_eq!(device.waits(), waits, "an op waits for nothing");
    device.finish().expect("a gate");
    let float = |buffer: Buffer| match buffer.dtype() {
        DType::F64 => device.read_vec(buffer),
        _ => device.read_vec::<f32>(buffer).into_iter().map(f64::from).collect::<Vec<f64>>(),
    };
    let noisy: Vec<u32> = device.read_vec(gate.noisy.reinterpret(DType::U32));
    Found {
        words: vec![
            ("noisy", noisy),
            ("chosen", device.read_vec(gate.chosen)),
            ("ids", device.read_vec(gate.ids)),
            ("first", device.read_vec(gate.first)),
            ("counts", device.read_vec(gate.counts)),
            ("dropped", device.read_vec(gate.dropped)),
        ],
        floats: vec![
            ("probs", float(gate.probs)),
            ("lse", float(gate.lse)),
            ("weights", float(gate.weights)),
            ("stats", float(gate.stats)),
            ("losses", float(gate.losses)),
            ("dlogits", float(back.dlogits)),
            ("d_raw", back.d_raw.map(float).unwrap_or_default()),
        ],
    }
}

fn check(name: &str, sizes: [usize; 4], vary: &dyn Fn(&mut Gate, Buffer)) -> Vec<String> {
    let mut plan = ArenaPlan::new();
    let mut gate = gate(&mut plan, sizes);
    let [tokens, experts, top_k, segments] = sizes;
    let raw = plan.alloc(DType::F32, tokens * experts);
    vary(&mut gate, raw);
    let learned = matches!(gate.noise, LogitNoise::Learned { .. });
    let d_raw = learned.then(|| plan.alloc(DType::F32, tokens * experts));
    let scaled = gate.hysteresis > 0.0 || learned;
    let back = GateBackward {
        forward: gate,
        z_coef: 0.3,
        entropy_coef: if gate.scale > 2.0 { 0.2 } else { 0.0 },
        dweights: plan.alloc(DType::F32, tokens * top_k),
        dstats: plan.alloc(DType::F64, segments * 3 * experts),
        loss_scale: scaled.then(|| plan.alloc(DType::F32, 1)),
        dlogits: plan.alloc(DType::F32, tokens * experts),
        d_raw,
    };
    let mut cuda = Device::cuda(0, plan.bytes()).expect("device memory");
    let mut cpu = Device::cpu(2, plan.bytes()).expect("a CPU");
    let (found, expected) = (run(&mut cuda, &gate, &back), run(&mut cpu, &gate, &back));
    let again = run(&mut cuda, &gate, &back);
    let mut failures = Vec::new();
    for ((what, found), (_, expected)) in found.words.iter().zip(&expected.words) {
        let differ = found.iter().zip(expected).filter(|(a, b)| a != b).count();
        if differ > 0 {
            failures.push(format!("{name} {what}: {differ} of {} differ", found.len()));
        }
    }
    for ((what, found), (_, expected)) in found.floats.iter().zip(&expected.floats) {
        let size = expected.iter().map(|x| x * x).sum::<f64>().sqrt();
        let apart = found.iter().zip(expected).map(|(a, b)| (a - b) * (a - b)).sum::<f64>();
        // Written so that an error which is no number fails.
        if !(apart.sqrt() <= 3e-6 * size + 1e-12) {
            failures.push(format!("{name} {what}: {:.2e} of {size:.2e}", apart.sqrt()));
        }
    }
    let same = found.floats.iter().zip(&again.floats).all(|(a, b)| a.1 == b.1);
    assert!(same && found.words == again.words, "{name}: other bits a second time");
    failures
}

#[test]
fn gates_choose_as_on_a_cpu() {
    if let Err(error) = Device::cuda(0, 256) {
        return eprintln!("skipped: gates_choose_as_on_a_cpu: no CUDA device: {error}");
    }
    let plain = |gate: &mut Gate, _: Buffer| gate.bias = None;
    let mut failures = Vec::new();
    let mut of = |name: &str, sizes, vary: &dyn Fn(&mut Gate, Buffer)| {
        failures.extend(check(name, sizes, vary));
    };
    of("top-k", [700, 64, 8, 7], &plain);
    of("sigmoid, bias, groups", [513, 64, 6, 1], &|gate, _| {
        gate.scoring = Scoring::Sigmoid;
        gate.groups = Some(RouteGroups { count: 8, kept: 3 });
        gate.scale = 2.5;
    });
    of("bias, capacity", [600, 16, 2, 2], &|gate, _| gate.capacity = Some(60));
    of("capacity by score", [600, 12, 3, 1], &|gate, raw| {
        plain(gate, raw);
        gate.capacity = Some(100);
        gate.prioritized = true;
    });
    of("noise", [300, 40, 4, 1], &|gate, raw| {
        plain(gate, raw);
        gate.noise = LogitNoise::Normal { std: 0.7 };
        gate.norm_topk = false;
    });
    of("a random second", [1000, 8, 2, 1], &|gate, raw| {
        plain(gate, raw);
        gate.choice = Choice::RandomSecond;
        gate.capacity = Some(200);
    });
    of("the fewest that reach a sum", [333, 24, 6, 1], &|gate, raw| {
        plain(gate, raw);
        gate.choice = Choice::TopP { sum: 0.6 };
        gate.scale = 2.5;
    });
    of("experts choose", [700, 32, 32, 1], &|gate, raw| {
        plain(gate, raw);
        gate.choice = Choice::Experts { rows: 45 };
        gate.norm_topk = false;
    });
    of("experts choose all", [20, 8, 8, 1], &|gate, raw| {
        plain(gate, raw);
        gate.choice = Choice::Experts { rows: 50 };
    });
    of("hysteresis", [500, 16, 2, 1], &|gate, _| {
        gate.hysteresis = 0.05;
        gate.groups = Some(RouteGroups { count: 4, kept: 2 });
    });
    of("hysteresis from a token before", [70, 16, 2, 1], &|gate, _| {
        gate.hysteresis = 0.05;
        // The first position is none that begins a text.
        gate.before = Some(gate.words.slice(0, 2));
    });
    of("hashed words", [300, 24, 3, 1], &|gate, raw| {
        plain(gate, raw);
        gate.choice = Choice::Hash { seed: 9, layer: 3 };
        gate.norm_topk = false;
        gate.capacity = Some(30);
    });
    of("Tutel's load", [500, 16, 2, 5], &|gate, raw| {
        plain(gate, raw);
        gate.noise = LogitNoise::Normal { std: 0.1 };
        gate.load = Load::Tutel { std: 0.1 };
    });
    of("learned noise, Shazeer's load", [400, 40, 4, 2], &|gate, raw| {
        plain(gate, raw);
        (gate.noise, gate.load) = (LogitNoise::Learned { raw }, Load::Shazeer { raw });
    });
    of("learned noise, all experts", [40, 4, 4, 1], &|gate, raw| {
        plain(gate, raw);
        (gate.noise, gate.load) = (LogitNoise::Learned { raw }, Load::Shazeer { raw });
        gate.norm_topk = false;
    });
    of("without d_s", [64, 8, 2, 1], &|gate, _| {
        gate.draw = None;
        gate.noise = LogitNoise::Normal { std: 1.0 };
        gate.choice = Choice::RandomSecond;
    });
    of("many experts", [50, 512, 16, 5], &plain);
    assert!(failures.is_empty(), "{failures:#?}");
}

#[test]
fn masks_have_the_bits_of_a_cpu() {
    let name = "masks_have_the_bits_of_a_cpu";
    let (rows, dim) = (100, 130);
    let mut plan = ArenaPlan::new();
    let [x, y] = [(); 2].map(|()| plan.alloc(DType::F32, rows * dim));
    let mut cuda = match Device::cuda(0, plan.bytes()) {
        Ok(device) => device,
        Err(error) => return eprintln!("skipped: {name}: no CUDA device: {error}"),
    };
    let mut cpu = Device::cpu(1, plan.bytes()).expect("a CPU");
    for mask in [Mask::Jitter { eps: 0.01 }, Mask::Dropout { p: 0.3 }] {
        for accumulate in [false, true] {
            let op = MaskRows { rows, dim, mask, draw: DRAW, accumulate, x, y };
            let run = |device: &mut Device| -> Vec<u32> {
                device.write(x, &normals(4, rows * dim));
                device.write(y, &normals(5, rows * dim));
                device.mask_rows(&op);
                device.read_vec(y.reinterpret(DType::U32))
            };
            let (found, expected) = (run(&mut cuda), run(&mut cpu));
            assert!(found == expected, "{mask:?} {accumulate}");
        }
    }
    cuda.finish().expect("masks");
}
