//! Attention on the device against the CPU's in float64, over shapes that break things.

mod cuda_common;

use cuda_common::{error, normal, wide};
use half::{bf16, f16};
use moejob_kernels::{
    ArenaPlan, Attention, AttentionBackward, AttentionDesc, Buffer, DType, Device, Refusal, philox,
};

const ARENA_BYTES: usize = 1 << 30;
/// Elements behind each output, which no kernel may touch.
const GUARD: usize = 512;

/// None, with the reason printed, where there is no device to test.
fn device(test: &str) -> Option<Device> {
    match Device::cuda(0, ARENA_BYTES) {
        Ok(device) => Some(device),
        Err(error) => {
            eprintln!("skipped: {test}: no CUDA device: {error}");
            None
        }
    }
}

#[derive(Clone, Copy, Debug)]
enum Documents {
    /// Of this mean length, at random cuts
    Mean(usize),
    /// Of these lengths, over and over; sequence n begins with the nth
    Lengths(&'static [usize]),
}

#[derive(Clone, Copy, Debug)]
struct Case {
    batch: usize,
    seq: usize,
    heads: usize,
    kv_heads: usize,
    head_dim: usize,
    documents: Option<Documents>,
    window: Option<usize>,
}

fn case(batch: usize, seq: usize, heads: usize, kv_heads: usize, head_dim: usize) -> Case {
    Case { batch, seq, heads, kv_heads, head_dim, documents: None, window: None }
}

impl Case {
    fn tokens(&self) -> usize {
        self.batch * self.seq
    }

    /// Elements of q and of k.
    fn sizes(&self) -> [usize; 2] {
        [self.heads, self.kv_heads].map(|heads| self.tokens() * heads * self.head_dim)
    }

    fn starts(&self) -> Option<Vec<u32>> {
        match self.documents? {
            Documents::Mean(mean) => Some(self.random_starts(mean)),
            Documents::Lengths(lengths) => {
                let sequence = |first: usize| {
                    let repeated = lengths.iter().cycle().skip(first % lengths.len());
                    let starts = repeated.scan(0, |end, length| {
                        *end += length;
                        Some(vec![(*end - length) as u32; *length])
                    });
                    starts.flatten().take(self.seq)
                };
                Some((0..self.batch).flat_map(sequence).collect())
            }
        }
    }

    fn random_starts(&self, mean: usize) -> Vec<u32> {
        let mut starts = Vec::new();
        for t in 0..self.tokens() {
            let at = (t % self.seq) as u32;
            let drawn = philox::philox4x32_10(7, [t as u32, 0, 0, 0])[0] as usize;
            let cut = drawn.is_multiple_of(mean);
            let before = starts.last().copied().unwrap_or(0);
            starts.push(if at == 0 || cut { at } else { before });
        }
        starts
    }

    /// The op with its buffers; outputs have guards behind them.
    fn plan(&self, plan: &mut ArenaPlan, element: DType, lse: DType, scale: f64) -> Buffers {
        let [query, key] = self.sizes();
        let mut elements = |len| plan.alloc(element, len);
        let [q, d_o] = [(); 2].map(|()| elements(query));
        let [k, v] = [(); 2].map(|()| elements(key));
        let mut output = |dtype, len| plan.alloc(dtype, len + GUARD);
        let outputs = [
            output(element, query),
            output(lse, self.tokens() * self.heads),
            output(element, query),
            output(element, key),
            output(element, key),
        ];
        let starts = self.documents.map(|_| plan.alloc(DType::U32, self.tokens()));
        let [o, lse, dq, dk, dv] = outputs.map(|guarded| guarded.slice(0, guarded.len() - GUARD));
        let forward = Attention {
            batch: self.batch,
            seq: self.seq,
            heads: self.heads,
            kv_heads: self.kv_heads,
            head_dim: self.head_dim,
            scale,
            q,
            k,
            v,
            starts,
            window: self.window,
            deterministic: true,
            workspace: None,
            o,
            lse,
        };
        Buffers { op: AttentionBackward { forward, d_o, dq, dk, dv }, outputs }
    }
}

struct Buffers {
    op: AttentionBackward,
    /// o, lse, dq, dk, dv with their guards
    outputs: [Buffer; 5],
}

impl Buffers {
    fn results(&self) -> [Buffer; 5] {
        let AttentionBackward { forward, dq, dk, dv, .. } = self.op;
        [forward.o, forward.lse, dq, dk, dv]
    }
}

struct Inputs {
    q: Vec<bf16>,
    k: Vec<bf16>,
    v: Vec<bf16>,
    d_o: Vec<bf16>,
    starts: Option<Vec<u32>>,
}

impl Inputs {
    fn new(case: &Case) -> Inputs {
        let [query, key] = case.sizes();
        Inputs {
            q: normal(1, query, 1.0),
            k: normal(2, key, 1.0),
            v: normal(3, key, 1.0),
            d_o: normal(4, query, 1.0),
            starts: case.starts(),
        }
    }
}

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
        _ => device.write(buffer, &wide(values)),
    }
}

fn floats(device: &Device, buffer: Buffer) -> Vec<f64> {
    match buffer.dtype() {
        DType::Bf16 => wide(&device.read_vec::<bf16>(buffer)),
        DType::F16 => device.read_vec::<f16>(buffer).into_iter().map(f64::from).collect(),
        DType::F32 => device.read_vec::<f32>(buffer).into_iter().map(f64::from).collect(),
        _ => device.read_vec::<f64>(buffer),
    }
}

fn fill(device: &mut Device, buffers: &Buffers, inputs: &Inputs) {
    let AttentionBackward { forward, d_o, .. } = buffers.op;
    for (buffer, values) in
        [(forward.q, &inputs.q), (forward.k, &inputs.k), (forward.v, &inputs.v), (d_o, &inputs.d_o)]
    {
        write(device, buffer, values);
    }
    if let (Some(buffer), Some(starts)) = (forward.starts, &inputs.starts) {
        device.write(buffer, starts);
    }
    for buffer in buffers.outputs {
        let bytes = buffer.reinterpret(DType::U8);
        device.write(bytes, &vec![0xff_u8; bytes.len()]);
    }
}

fn scale(case: &Case) -> f64 {
    1.0 / (case.head_dim as f64).sqrt()
}

/// o, lse, dq, dk, dv in float64.
fn reference(case: &Case, inputs: &Inputs) -> [Vec<f64>; 5] {
    let mut plan = ArenaPlan::new();
    // The device's scale is fp32.
    let scale = f64::from(scale(case) as f32);
    let buffers = case.plan(&mut plan, DType::F64, DType::F64, scale);
    let threads = std::thread::available_parallelism().map_or(1, |n| n.get()).min(16);
    let mut cpu = Device::cpu(threads, plan.bytes()).expect("a CPU");
    fill(&mut cpu, &buffers, inputs);
    cpu.attention(&buffers.op.forward);
    cpu.attention_backward(&buffers.op);
    buffers.results().map(|buffer| cpu.read_vec(buffer))
}

const NAMES: [&str; 5] = ["o", "lse", "dq", "dk", "dv"];

/// The largest errors that rounding to the elements explains.
fn limits(element: DType) -> [f64; 5] {
    match element {
        DType::Bf16 => [3.2e-3, 1e-5, 5e-3, 5e-3, 4e-3],
        DType::F16 => [4e-4, 1e-5, 7e-4, 7e-4, 5e-4],
        _ => [3e-6, 3e-6, 5e-6, 5e-6, 5e-6],
    }
}

fn bits(device: &Device, buffers: &Buffers) -> [Vec<u8>; 5] {
    buffers.results().map(|buffer| device.read_vec(buffer.reinterpret(DType::U8)))
}

fn check_on_device(
    name: &str,
    case: &Case,
    inputs: &Inputs,
    expected: &[Vec<f64>; 5],
    (element, deterministic): (DType, bool),
    failures: &mut Vec<String>,
) {
    let Some(mut device) = device(name) else { return };
    let mut plan = ArenaPlan::new();
    let mut buffers = case.plan(&mut plan, element, DType::F32, scale(case));
    let forward = &mut buffers.op.forward;
    forward.deterministic = deterministic;
    let bytes = device.attention_plan(&AttentionDesc::of(forward)).expect("the kernels");
    forward.workspace = Some(plan.alloc(DType::U8, bytes));
    assert!(plan.bytes() <= ARENA_BYTES, "{case:?} takes {} bytes", plan.bytes());
    let op = buffers.op;
    let run = |device: &mut Device| {
        fill(device, &buffers, inputs);
        let workspace = op.forward.workspace.expect("just planned");
        device.write(workspace, &vec![0xff_u8; workspace.len()]);
        device.attention(&op.forward);
        device.write(workspace, &vec![0xff_u8; workspace.len()]);
        device.attention_backward(&op);
        device.finish().expect("attention");
    };
    run(&mut device);
    let first = bits(&device, &buffers);
    let what = format!("{case:?} {element:?} deterministic {deterministic}");
    eprintln!("{name}: {what}");
    for (i, buffer) in buffers.results().into_iter().enumerate() {
        let (error, limit) = (error(&floats(&device, buffer), &expected[i]), limits(element)[i]);
        eprintln!("  {:4} error {error:.2e}, limit {limit:.1e}", NAMES[i]);
        // Written so that an error which is no number fails.
        if !(error <= limit) {
            failures.push(format!("{what}: {} error {error:.3e} above {limit:.1e}", NAMES[i]));
        }
        let guarded = buffers.outputs[i];
        let guard = guarded.slice(buffer.len(), GUARD).reinterpret(DType::U8);
        if device.read_vec::<u8>(guard).iter().any(|byte| *byte != 0xff) {
            failures.push(format!("{what}: wrote behind {}", NAMES[i]));
        }
    }
    run(&mut device);
    for (i, (again, first)) in bits(&device, &buffers).iter().zip(&first).enumerate() {
        if again != first && (deterministic || NAMES[i] != "dq") {
            failures.push(format!("{what}: {} differs in a second run", NAMES[i]));
        }
    }
}

fn check(name: &str, cases: &[Case], elements: &[DType]) {
    if device(name).is_none() {
        return;
    }
    let mut failures = Vec::new();
    for case in cases {
        let inputs = Inputs::new(case);
        let expected = reference(case, &inputs);
        for element in elements {
            for deterministic in [true, false] {
                let kind = (*element, deterministic);
                check_on_device(name, case, &inputs, &expected, kind, &mut failures);
            }
        }
    }
    assert!(failures.is_empty(), "{name}: {failures:#?}");
}

const HALVES: [DType; 2] = [DType::Bf16, DType::F16];

/// Tails of every tile, one key head for several queries', several tiles for a block.
fn shapes(head_dim: usize) -> Vec<Case> {
    [
        (1, 1, 2, 1),
        (1, 64, 2, 2),
        (1, 129, 3, 1),
        (2, 333, 4, 2),
        (2, 1000, 8, 2),
        (1, 2048, 8, 1),
        (3, 640, 4, 4),
        (6, 129, 48, 48),
        (6, 300, 48, 24),
    ]
    .map(|(batch, seq, heads, kv_heads)| case(batch, seq, heads, kv_heads, head_dim))
    .to_vec()
}

fn masked(head_dim: usize) -> Vec<Case> {
    let base = |batch, seq, heads, kv_heads| case(batch, seq, heads, kv_heads, head_dim);
    vec![
        Case { documents: Some(Documents::Mean(200)), ..base(2, 1000, 4, 2) },
        Case { documents: Some(Documents::Mean(40)), ..base(2, 333, 4, 4) },
        Case { documents: Some(Documents::Mean(2)), ..base(1, 300, 2, 1) },
        Case { documents: Some(Documents::Mean(900)), ..base(1, 2048, 8, 1) },
        Case { documents: Some(Documents::Mean(70)), ..base(6, 300, 48, 24) },
        Case { window: Some(1), ..base(1, 200, 2, 1) },
        Case { window: Some(100), ..base(2, 777, 4, 2) },
        Case { window: Some(512), ..base(1, 1500, 4, 1) },
        Case { window: Some(5000), ..base(1, 400, 2, 2) },
        Case { documents: Some(Documents::Mean(300)), window: Some(128), ..base(2, 1000, 4, 2) },
    ]
}

/// Documents whose ends fall at, before and behind the bounds of tiles and blocks; long ones amid
/// short ones; the shortest, thousands of them; one.
fn packed(head_dim: usize) -> Vec<Case> {
    let base = |batch, seq, heads, kv_heads| case(batch, seq, heads, kv_heads, head_dim);
    let of = |lengths| Some(Documents::Lengths(lengths));
    let bounds = &[384, 128, 127, 129, 383, 385, 256, 255, 257, 64, 65, 63, 500];
    let wide_bounds = &[576, 575, 192, 577, 191, 193, 768, 769];
    let mixed = &[1, 2, 700, 3, 1, 450, 5, 1200, 90, 1, 1];
    vec![
        Case { documents: of(&[1]), ..base(2, 300, 2, 1) },
        Case { documents: of(&[1, 2, 3]), ..base(1, 4500, 2, 2) },
        Case { documents: of(&[1000]), ..base(1, 1000, 4, 2) },
        Case { documents: of(&[1, 999]), ..base(2, 1000, 2, 2) },
        Case { documents: of(bounds), ..base(3, 1500, 2, 1) },
        Case { documents: of(wide_bounds), ..base(2, 1600, 2, 2) },
        Case { documents: of(mixed), ..base(4, 1300, 4, 4) },
        Case { documents: of(mixed), window: Some(300), ..base(3, 1300, 2, 1) },
        Case { documents: of(bounds), window: Some(1), ..base(1, 1000, 2, 2) },
        Case { documents: of(&[700, 129]), window: Some(129), ..base(2, 1024, 2, 1) },
    ]
}

#[test]
fn packed_documents() {
    check("packed_documents", &packed(128), &HALVES);
    for head_dim in [64, 96] {
        check("packed_documents", &packed(head_dim), &[DType::Bf16]);
    }
}

#[test]
fn heads_of_128() {
    check("heads_of_128", &shapes(128), &HALVES);
}

#[test]
fn heads_of_96() {
    check("heads_of_96", &shapes(96), &HALVES);
}

#[test]
fn heads_of_64() {
    check("heads_of_64", &shapes(64), &HALVES);
}

#[test]
fn documents_and_windows_of_heads_of_128() {
    check("documents_and_windows_of_heads_of_128", &masked(128), &HALVES);
}

#[test]
fn documents_and_windows_of_heads_of_96() {
    check("documents_and_windows_of_heads_of_96", &masked(96), &[DType::Bf16]);
}

#[test]
fn documents_and_windows_of_heads_of_64() {
    check("documents_and_windows_of_heads_of_64", &masked(64), &[DType::Bf16]);
}

/// Head dims that sm_90a's own kernels do not take, columns padded and split.
#[test]
fn other_head_dims() {
    for (head_dim, element) in [
        (8, DType::Bf16),
        (72, DType::F16),
        (80, DType::Bf16),
        (192, DType::Bf16),
        (256, DType::F16),
    ] {
        let cases = [
            case(1, 1, 2, 1, head_dim),
            case(2, 333, 4, 2, head_dim),
            case(3, 130, 6, 6, head_dim),
            Case {
                documents: Some(Documents::Mean(60)),
                window: Some(100),
                ..case(2, 500, 4, 1, head_dim)
            },
            Case {
                documents: Some(Documents::Lengths(&[1, 400, 63])),
                ..case(2, 500, 2, 1, head_dim)
            },
        ];
        check("other_head_dims", &cases, &[element]);
    }
}

#[test]
fn in_fp32() {
    for head_dim in [40, 128, 256] {
        let cases = [
            case(1, 1, 2, 1, head_dim),
            case(2, 333, 4, 2, head_dim),
            Case {
                documents: Some(Documents::Mean(60)),
                window: Some(100),
                ..case(2, 300, 4, 1, head_dim)
            },
        ];
        check("in_fp32", &cases, &[DType::F32]);
    }
}

/// So long that heads which share keys add to dq in no order.
#[test]
fn long_sequences_of_heads_that_share_keys() {
    for head_dim in [64, 96, 128] {
        let cases = [case(1, 4190, 2, 1, head_dim)];
        check("long_sequences_of_heads_that_share_keys", &cases, &[DType::Bf16]);
    }
}

/// Small, for compute-sanitizer: every kernel, more tiles than one for some blocks, ragged.
#[test]
fn sanitized() {
    for head_dim in [64, 96, 128] {
        let (alone, shared) = (case(2, 200, 2, 2, head_dim), case(2, 200, 4, 2, head_dim));
        let masked = Case { documents: Some(Documents::Mean(50)), window: Some(100), ..shared };
        let long = Case {
            documents: Some(Documents::Lengths(&[10, 600])),
            ..case(1, 700, 2, 2, head_dim)
        };
        check("sanitized", &[alone, shared, masked, long], &[DType::Bf16]);
    }
}

#[test]
fn shapes_that_no_kernel_takes_are_refused_by_name() {
    let mut plan = ArenaPlan::new();
    let base = case(1, 64, 4, 2, 64).plan(&mut plan, DType::Bf16, DType::F32, 0.125).op.forward;
    let base = AttentionDesc::of(&base);
    assert_eq!(base.check(), Ok(()));
    for (desc, expected) in [
        (
            AttentionDesc { head_dim: 60, ..base },
            Refusal::Unaligned { name: "head_dim", found: 60, multiple: 8 },
        ),
        (
            AttentionDesc { head_dim: 264, ..base },
            Refusal::Range { name: "head_dim", found: 264, min: 8, max: 256 },
        ),
        (
            AttentionDesc { kv_heads: 3, ..base },
            Refusal::Unaligned { name: "heads", found: 4, multiple: 3 },
        ),
        (
            AttentionDesc { window: Some(0), ..base },
            Refusal::Range { name: "window", found: 0, min: 1, max: 1 << 30 },
        ),
    ] {
        assert_eq!(desc.check(), Err(expected), "{desc:?}");
    }
}
