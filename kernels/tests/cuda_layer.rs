//! The layer on the device against float64, over shapes that break things.

mod cuda_common;

use std::sync::{Mutex, MutexGuard};

use cuda_common::{Expected, Inputs, error, reference, wide};
use half::bf16;
use moejob_kernels::cuda::{
    Arena, Compiler, Gpu, Gradients, MoeActivation, MoeDesc, MoeLayer, MoeTensors, Output, Refusal,
    Saved, Stream, Weights, default_cache_dir,
};
use moejob_kernels::{ArenaPlan, Buffer, DType};

/// Tests take turns: they share one device and its memory.
static TURN: Mutex<()> = Mutex::new(());

/// None, with the reason printed, where there is no device to test.
fn compiler(test: &str) -> Option<(Compiler, MutexGuard<'static, ()>)> {
    let turn = TURN.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
    let open = || Compiler::new(&Gpu::open(0)?, default_cache_dir());
    match open() {
        Ok(compiler) => Some((compiler, turn)),
        Err(error) => {
            eprintln!("skipped: {test}: no CUDA device: {error}");
            None
        }
    }
}

fn desc(tokens: usize, dim: usize, hidden: usize, experts: usize, top_k: usize) -> MoeDesc {
    MoeDesc {
        tokens,
        dim,
        hidden,
        experts,
        top_k,
        activation: MoeActivation::Silu,
        gated: true,
        sigmoid: false,
        norm_topk: true,
        scale: 1.0,
        aux_coef: 0.0,
        z_coef: 0.0,
        weight_gradients: Output::Bf16,
    }
}

/// A layer with all its buffers on the device.
struct Bed {
    layer: MoeLayer,
    stream: Stream,
    arena: Arena,
    tensors: MoeTensors,
    dout: Buffer,
    out: Buffer,
    dx: Buffer,
    gradients: Gradients,
}

impl Bed {
    fn new(compiler: &Compiler, desc: MoeDesc, inputs: &Inputs) -> Bed {
        let layer = MoeLayer::new(compiler, desc, &|_, _| ()).expect("the layer's kernels");
        let mut plan = ArenaPlan::new();
        let MoeDesc { tokens, dim, hidden, experts, .. } = desc;
        let mut bf16s = |len| plan.alloc(DType::Bf16, len);
        let x = bf16s(tokens * dim);
        let weights = Weights {
            router: bf16s(experts * dim),
            up: bf16s(experts * desc.width() * dim),
            down: bf16s(experts * dim * hidden),
        };
        let (dout, out, dx) = (bf16s(tokens * dim), bf16s(tokens * dim), bf16s(tokens * dim));
        let kind = if desc.weight_gradients == Output::Bf16 { DType::Bf16 } else { DType::F32 };
        let gradients = Gradients {
            router: plan.alloc(DType::F32, experts * dim),
            up: plan.alloc(kind, experts * desc.width() * dim),
            down: plan.alloc(kind, experts * dim * hidden),
        };
        let saved = layer.plan_saved(&mut plan);
        let workspace = plan.alloc(DType::U8, layer.workspace_bytes());
        let arena = Arena::new(compiler.gpu(), plan.bytes()).expect("device memory");
        let stream = compiler.gpu().stream().expect("a stream");
        let whole = {
            let mut all = ArenaPlan::new();
            all.alloc(DType::U8, plan.bytes())
        };
        // Every output, table and scrap starts as NaN and as an index out of any bounds.
        arena.fill_bytes(&stream, whole, 0xff).expect("poison");
        stream.synchronize().expect("poison");
        for (buffer, values) in [
            (x, &inputs.x),
            (weights.router, &inputs.w_router),
            (weights.up, &inputs.w_up),
            (weights.down, &inputs.w_down),
            (dout, &inputs.dout),
        ] {
            arena.write(buffer, values).expect("inputs");
        }
        if kind == DType::F32 {
            for gradient in [gradients.router, gradients.up, gradients.down] {
                arena.write(gradient, &vec![1.0_f32; gradient.len()]).expect("ones");
            }
        }
        let tensors = MoeTensors { x, weights, saved, workspace };
        Bed { layer, stream, arena, tensors, dout, out, dx, gradients }
    }

    fn forward(&self) {
        self.layer.forward(&self.stream, &self.arena, &self.tensors, self.out).expect("forward");
        self.stream.synchronize().expect("forward");
    }

    fn backward(&self) {
        self.enqueue_backward().expect("backward");
        self.stream.synchronize().expect("backward");
    }

    fn enqueue_backward(&self) -> Result<(), moejob_kernels::cuda::CudaError> {
        let Bed { stream, arena, tensors, dout, dx, gradients, .. } = self;
        self.layer.backward(stream, arena, tensors, *dout, *dx, gradients)
    }

    fn floats(&self, buffer: Buffer) -> Vec<f64> {
        match buffer.dtype() {
            DType::Bf16 => wide(&self.arena.read::<bf16>(buffer).expect("read")),
            DType::F32 => {
                self.arena.read::<f32>(buffer).expect("read").into_iter().map(f64::from).collect()
            }
            _ => self.arena.read::<f64>(buffer).expect("read"),
        }
    }

    fn words(&self, buffer: Buffer) -> Vec<u32> {
        self.arena.read(buffer).expect("read")
    }

    fn bytes(&self, buffer: Buffer) -> Vec<u8> {
        self.arena.read(buffer.reinterpret(DType::U8)).expect("read")
    }

    fn results(&self) -> [Buffer; 7] {
        let Gradients { router, up, down } = self.gradients;
        let Saved { ids, losses, .. } = self.tensors.saved;
        [self.out, self.dx, router, up, down, ids, losses]
    }
}

fn compare(what: &str, found: &[f64], expected: &[f64], limit: f64, failures: &mut Vec<String>) {
    let error = error(found, expected);
    eprintln!("  {what:10} error {error:.2e}, limit {limit:.0e}");
    // Written so that an error which is no number fails.
    if !(error <= limit) {
        failures.push(format!("{what}: error {error:.3e} above {limit:.0e}"));
    }
}

/// ids ascending and different, and no unchosen logit above a chosen one beyond rounding.
fn check_choice(desc: &MoeDesc, logits: &[f64], ids: &[u32], failures: &mut Vec<String>) {
    for (t, ids) in ids.chunks(desc.top_k).enumerate() {
        let logits = &logits[t * desc.experts..][..desc.experts];
        let ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = ids.iter().all(|id| (*id as usize) < desc.experts);
        if !(ascending && inside) {
            failures.push(format!("token {t}: ids {ids:?}"));
            return;
        }
        let least = ids.iter().map(|id| logits[*id as usize]).fold(f64::INFINITY, f64::min);
        let others = (0..desc.experts).filter(|e| !ids.contains(&(*e as u32)));
        let most = others.map(|e| logits[e]).fold(f64::NEG_INFINITY, f64::max);
        if most > least + 1e-4 {
            failures.push(format!("token {t}: chose {least} over {most}"));
        }
    }
}

/// Order of rows, exactly: stable by expert.
fn check_tables(bed: &Bed, desc: &MoeDesc, ids: &[u32], failures: &mut Vec<String>) {
    let saved = &bed.tensors.saved;
    let mut slots: Vec<usize> = (0..ids.len()).collect();
    slots.sort_by_key(|slot| (ids[*slot], *slot));
    let rows: Vec<u32> = slots.iter().map(|slot| (slot / desc.top_k) as u32).collect();
    let mut pos = vec![0; ids.len()];
    slots.iter().enumerate().for_each(|(row, slot)| pos[*slot] = row as u32);
    let below = |e: usize| ids.iter().filter(|id| (**id as usize) < e).count() as u32;
    let offsets: Vec<u32> = (0..=desc.experts).map(below).collect();
    let counts: Vec<u32> = offsets.windows(2).map(|w| w[1] - w[0]).collect();
    let mut order: Vec<u32> = (0..desc.experts as u32).collect();
    order.sort_by_key(|e| (u32::MAX - counts[*e as usize], *e));
    for (what, buffer, expected) in [
        ("rows", saved.rows, &rows),
        ("pos", saved.pos, &pos),
        ("offsets", saved.offsets, &offsets),
        ("counts", saved.counts, &counts),
        ("order", saved.order, &order),
    ] {
        if bed.words(buffer) != *expected {
            failures.push(format!("{what} differ"));
        }
    }
}

fn check_floats(bed: &Bed, desc: &MoeDesc, expected: &Expected, failures: &mut Vec<String>) {
    let one = if desc.weight_gradients == Output::F32Accumulate { 1.0 } else { 0.0 };
    let gradient = |buffer| bed.floats(buffer).into_iter().map(|x| x - one).collect::<Vec<_>>();
    let saved = &bed.tensors.saved;
    let Gradients { router, up, down } = bed.gradients;
    let found = [
        ("logits", bed.floats(saved.logits), &expected.logits, 1e-5),
        ("weights", bed.floats(saved.weights), &expected.weights, 1e-5),
        ("prob_sums", bed.floats(saved.prob_sums), &expected.prob_sums, 1e-5),
        ("losses", bed.floats(saved.losses), &expected.losses.to_vec(), 1e-5),
        ("out", bed.floats(bed.out), &expected.out, 6e-3),
        ("dx", bed.floats(bed.dx), &expected.dx, 8e-3),
        ("dw_down", gradient(down), &expected.dw_down, 8e-3),
        ("dw_up", gradient(up), &expected.dw_up, 8e-3),
        ("dw_router", gradient(router), &expected.dw_router, 2e-2),
    ];
    for (what, found, expected, limit) in found {
        compare(what, &found, expected, limit, failures);
    }
}

fn check(name: &str, desc: MoeDesc, bias: &dyn Fn(usize) -> f64) {
    let Some((compiler, _turn)) = compiler(name) else { return };
    eprintln!("{name}: {desc:?}");
    let inputs = Inputs::new(&desc, bias);
    let bed = Bed::new(&compiler, desc, &inputs);
    bed.forward();
    bed.backward();
    let ids = bed.words(bed.tensors.saved.ids);
    let expected = reference(&desc, &inputs, &ids);
    let mut failures = Vec::new();
    check_choice(&desc, &expected.logits, &ids, &mut failures);
    check_tables(&bed, &desc, &ids, &mut failures);
    check_floats(&bed, &desc, &expected, &mut failures);
    assert!(failures.is_empty(), "{name}: {failures:#?}");
}

fn even(_: usize) -> f64 {
    0.0
}

#[test]
fn ragged() {
    check("ragged", desc(777, 256, 192, 5, 2), &even);
}

#[test]
fn two_passes_of_down() {
    check("two_passes_of_down", desc(515, 640, 320, 16, 4), &even);
}

#[test]
fn long_reductions() {
    check("long_reductions", desc(300, 2176, 2112, 4, 2), &even);
}

#[test]
fn empty_experts() {
    check("empty_experts", desc(333, 128, 128, 7, 2), &|e| {
        [0.0, -60.0, 0.0, -4.0, 0.0, 0.0, -60.0][e]
    });
}

#[test]
fn all_tokens_to_one_expert() {
    check("all_tokens_to_one_expert", desc(301, 128, 64, 6, 1), &|e| {
        if e == 4 { 40.0 } else { 0.0 }
    });
}

#[test]
fn every_expert_chosen() {
    check("every_expert_chosen", desc(100, 64, 64, 5, 5), &even);
}

#[test]
fn one_expert_one_token() {
    check("one_expert_one_token", desc(1, 64, 64, 1, 1), &even);
}

#[test]
fn many_experts_few_tokens() {
    check("many_experts_few_tokens", desc(37, 128, 64, 512, 16), &even);
}

#[test]
fn relu_of_two_matrices() {
    let base = desc(777, 256, 320, 5, 2);
    let relu = MoeDesc { activation: MoeActivation::Relu, gated: false, ..base };
    check("relu_of_two_matrices", relu, &even);
}

#[test]
fn gelu_gated_and_not() {
    let base = MoeDesc { activation: MoeActivation::Gelu, ..desc(200, 192, 128, 8, 2) };
    check("gelu_gated", base, &even);
    check("gelu_of_two_matrices", MoeDesc { gated: false, ..base }, &even);
}

#[test]
fn losses_and_plain_weights() {
    let base = desc(257, 128, 128, 12, 3);
    let softmax = MoeDesc { norm_topk: false, aux_coef: 20.0, z_coef: 10.0, scale: 2.5, ..base };
    check("losses, softmax", softmax, &|e| e as f64 * 0.1);
    check("losses, sigmoid", MoeDesc { sigmoid: true, norm_topk: true, ..softmax }, &even);
}

#[test]
fn gradients_added_in_fp32() {
    let base = desc(600, 256, 192, 5, 2);
    check(
        "gradients_added_in_fp32",
        MoeDesc { weight_gradients: Output::F32Accumulate, ..base },
        &even,
    );
}

#[test]
fn equal_logits_go_to_the_lowest_experts() {
    let name = "equal_logits_go_to_the_lowest_experts";
    let Some((compiler, _turn)) = compiler(name) else { return };
    let desc = desc(65, 64, 64, 40, 3);
    let mut inputs = Inputs::new(&desc, &even);
    inputs.w_router.fill(bf16::ZERO);
    let bed = Bed::new(&compiler, desc, &inputs);
    bed.forward();
    let ids = bed.words(bed.tensors.saved.ids);
    assert!(ids.chunks(3).all(|ids| ids == [0, 1, 2]), "{ids:?}");
}

#[test]
fn runs_and_graphs_give_the_same_bits() {
    let name = "runs_and_graphs_give_the_same_bits";
    let Some((compiler, _turn)) = compiler(name) else { return };
    let desc = desc(1500, 512, 384, 24, 4);
    let inputs = Inputs::new(&desc, &|e| e as f64 * -0.1);
    let bed = Bed::new(&compiler, desc, &inputs);
    let other = Bed::new(&compiler, desc, &inputs);
    let bits = |bed: &Bed| bed.results().map(|buffer| bed.bytes(buffer));
    bed.forward();
    bed.backward();
    let first = bits(&bed);
    // Twice more, two streams at once.
    for bed in [&bed, &other] {
        bed.layer.forward(&bed.stream, &bed.arena, &bed.tensors, bed.out).expect("forward");
        bed.enqueue_backward().expect("backward");
    }
    assert!(bits(&bed) == first, "a second run differs");
    assert!(bits(&other) == first, "a run beside another differs");
    let graph = bed
        .stream
        .capture(|| {
            bed.layer.forward(&bed.stream, &bed.arena, &bed.tensors, bed.out)?;
            bed.enqueue_backward()
        })
        .expect("nothing in a layer waits for the device");
    for buffer in bed.results() {
        bed.arena.fill_bytes(&bed.stream, buffer, 0xff).expect("poison");
    }
    bed.stream.launch_graph(&graph).expect("launch");
    bed.stream.synchronize().expect("graph");
    assert!(bits(&bed) == first, "a graph differs");
}

#[test]
fn shapes_the_kernels_cannot_take_are_refused() {
    let refusal = |desc: MoeDesc| desc.check().expect_err("refused").to_string();
    let base = desc(10, 128, 128, 8, 2);
    let cases = [
        (MoeDesc { dim: 100, ..base }, "dim is 100; the kernels take multiples of 64 only"),
        (MoeDesc { hidden: 96, ..base }, "hidden is 96; the kernels take multiples of 64 only"),
        (MoeDesc { top_k: 9, ..base }, "top_k is 9; it must be between 1 and 8"),
        (MoeDesc { experts: 513, ..base }, "experts is 513; it must be between 1 and 512"),
        (MoeDesc { tokens: 0, ..base }, "tokens is 0; it must be between 1 and 1073741824"),
    ];
    for (desc, expected) in cases {
        assert_eq!(refusal(desc), expected);
    }
    let huge = MoeDesc { tokens: 1 << 20, dim: 8192, ..base };
    assert!(matches!(huge.check(), Err(Refusal::TooLarge { what: "x", .. })));
}
