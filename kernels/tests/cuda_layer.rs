//! The layer on the device against float64, over shapes that break things.

mod cuda_common;

use std::sync::{Mutex, MutexGuard};

use cuda_common::bed::{Bed, Spread, desc};
use cuda_common::{Expected, Inputs, choices, error, reference, wide};
use half::{bf16, f16};
use moejob_kernels::cuda::{Arena, Compiler, Gpu, default_cache_dir};
use moejob_kernels::{
    Buffer, DType, Gradients, Activation, MoeDesc, MoeLayer, Output, Refusal, RouteGroups, Saved,
    Stacked,
};
use moejob_protocol::kernel_sizes::{Size, SizeRefusal};

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

/// The layer of `desc` on `inputs`, fp32 gradients at one.
fn bed(compiler: &Compiler, desc: MoeDesc, inputs: &Inputs) -> Bed {
    bed_with(compiler, desc, inputs, Kept { spread: Spread::Dense, accumulate: false })
}

/// How a layer's weights and gradients are kept.
#[derive(Clone, Copy)]
struct Kept {
    spread: Spread,
    accumulate: bool,
}

fn write(arena: &Arena, buffer: Buffer, values: &[bf16]) {
    let wide = || values.iter().map(|x| x.to_f32());
    match buffer.dtype() {
        DType::F32 => arena.write(buffer, &wide().collect::<Vec<f32>>()),
        DType::F16 => arena.write(buffer, &wide().map(f16::from_f32).collect::<Vec<f16>>()),
        _ => arena.write(buffer, values),
    }
    .expect("inputs");
}

/// The same where experts may lie apart, and gradients of one may be added to.
fn bed_with(compiler: &Compiler, desc: MoeDesc, inputs: &Inputs, kept: Kept) -> Bed {
    let layer = MoeLayer::new(compiler, desc, &|_, _| ()).expect("the layer's kernels");
    let biased = inputs.bias.is_some();
    let mut bed = Bed::new(compiler, layer, biased, kept.spread).expect("device memory");
    bed.gradients.accumulate = kept.accumulate;
    bed.gradients.accumulate_router = kept.accumulate;
    let weights = bed.tensors.weights;
    write(&bed.arena, bed.tensors.x, &inputs.x);
    write(&bed.arena, bed.dout, &inputs.dout);
    for (stacked, values) in [(weights.up, &inputs.w_up), (weights.down, &inputs.w_down)] {
        let size = values.len() / desc.experts;
        for (e, values) in values.chunks(size).enumerate() {
            write(&bed.arena, stacked.buffer.slice(e * stacked.stride, size), values);
        }
    }
    bed.arena.write(weights.router, &inputs.w_router).expect("inputs");
    if let (Some(buffer), Some(bias)) = (weights.bias, &inputs.bias) {
        bed.arena.write(buffer, bias).expect("inputs");
    }
    if kept.accumulate {
        let Gradients { router, up, down, .. } = bed.gradients;
        for gradient in [router, up.buffer, down.buffer] {
            write(&bed.arena, gradient, &vec![bf16::ONE; gradient.len()]);
        }
    }
    bed
}

/// What came out of a bed.
trait Results {
    fn run(&self);
    fn floats(&self, buffer: Buffer) -> Vec<f64>;
    fn words(&self, buffer: Buffer) -> Vec<u32>;
    fn bits(&self) -> Vec<Vec<u8>>;
    fn results(&self) -> [Buffer; 7];
}

impl Results for Bed {
    fn run(&self) {
        self.forward().expect("forward");
        self.backward().expect("backward");
        self.stream.synchronize().expect("the layer");
    }

    fn floats(&self, buffer: Buffer) -> Vec<f64> {
        match buffer.dtype() {
            DType::Bf16 => wide(&self.arena.read::<bf16>(buffer).expect("read")),
            DType::F16 => {
                self.arena.read::<f16>(buffer).expect("read").into_iter().map(f64::from).collect()
            }
            DType::F32 => {
                self.arena.read::<f32>(buffer).expect("read").into_iter().map(f64::from).collect()
            }
            _ => self.arena.read::<f64>(buffer).expect("read"),
        }
    }

    fn words(&self, buffer: Buffer) -> Vec<u32> {
        self.arena.read(buffer).expect("read")
    }

    fn bits(&self) -> Vec<Vec<u8>> {
        let bytes = |buffer: Buffer| self.arena.read(buffer.reinterpret(DType::U8)).expect("read");
        self.results().map(bytes).into()
    }

    fn results(&self) -> [Buffer; 7] {
        let Gradients { router, up, down, .. } = self.gradients;
        let Saved { ids, losses, .. } = self.tensors.saved;
        [self.out, self.dx, router, up.buffer, down.buffer, ids, losses]
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

/// ids ascending and different, and no choice left out above a chosen one beyond rounding.
fn check_choice(
    desc: &MoeDesc,
    inputs: &Inputs,
    logits: &[f64],
    ids: &[u32],
    failures: &mut Vec<String>,
) {
    for (t, ids) in ids.chunks(desc.top_k).enumerate() {
        let choice = choices(desc, inputs, &logits[t * desc.experts..][..desc.experts]);
        let ascending = ids.windows(2).all(|pair| pair[0] < pair[1]);
        let inside = ids.iter().all(|id| (*id as usize) < desc.experts);
        if !(ascending && inside) {
            failures.push(format!("token {t}: ids {ids:?}"));
            return;
        }
        let least = ids.iter().map(|id| choice[*id as usize]).fold(f64::INFINITY, f64::min);
        let others = (0..desc.experts).filter(|e| !ids.contains(&(*e as u32)));
        let most = others.map(|e| choice[e]).fold(f64::NEG_INFINITY, f64::max);
        let kept = ids.iter().all(|id| !choice[*id as usize].is_nan());
        if most > least + 1e-4 || !kept {
            failures.push(format!("token {t}: chose {ids:?}, {least} over {most}"));
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
    let one = if bed.gradients.accumulate { 1.0 } else { 0.0 };
    let gradient = |buffer| bed.floats(buffer).into_iter().map(|x| x - one).collect::<Vec<_>>();
    let experts = |stacked: Stacked, size| {
        let each = |e| gradient(stacked.buffer.slice(e * stacked.stride, size));
        (0..desc.experts).flat_map(each).collect::<Vec<_>>()
    };
    let saved = &bed.tensors.saved;
    let Gradients { router, up, down, .. } = bed.gradients;
    check_gaps(bed, [up, down], [desc.width() * desc.dim, desc.dim * desc.hidden], failures);
    let (down, up) = (
        experts(down, desc.dim * desc.hidden),
        experts(up, desc.width() * desc.dim),
    );
    // Beside one, elements of 16 bits keep three digits of a gradient.
    let coarse = bed.gradients.accumulate && desc.weight_gradients == Output::Element;
    let weight_limit = if coarse && desc.element != DType::F32 { 0.1 } else { 8e-3 };
    let found = [
        ("logits", bed.floats(saved.logits), &expected.logits, 1e-5),
        ("weights", bed.floats(saved.weights), &expected.weights, 1e-5),
        ("prob_sums", bed.floats(saved.prob_sums), &expected.prob_sums, 1e-5),
        ("losses", bed.floats(saved.losses), &expected.losses.to_vec(), 1e-5),
        ("out", bed.floats(bed.out), &expected.out, 6e-3),
        ("dx", bed.floats(bed.dx), &expected.dx, 8e-3),
        ("dw_down", down, &expected.dw_down, weight_limit),
        ("dw_up", up, &expected.dw_up, weight_limit),
        ("dw_router", gradient(router), &expected.dw_router, 2e-2),
    ];
    for (what, found, expected, limit) in found {
        let limit = match desc.element {
            DType::F32 => 1e-5,
            // Three bits more than bf16.
            DType::F16 if limit > 1e-5 => limit / 4.0,
            _ => limit,
        };
        compare(what, &found, expected, limit, failures);
    }
}

/// What lies between the experts' gradients is as it was: poison, or the ones that were there.
fn check_gaps(bed: &Bed, stacked: [Stacked; 2], sizes: [usize; 2], failures: &mut Vec<String>) {
    for (Stacked { buffer, stride, .. }, size) in stacked.into_iter().zip(sizes) {
        for start in (0..buffer.len() - size).step_by(stride) {
            let gap = bed.floats(buffer.slice(start + size, stride - size));
            let kept = |x: &f64| if bed.gradients.accumulate { *x == 1.0 } else { x.is_nan() };
            if !gap.iter().all(kept) {
                failures.push(format!("written to between experts: {stride} {size}"));
            }
        }
    }
}

fn check(name: &str, desc: MoeDesc, bias: &dyn Fn(usize) -> f64) {
    check_both(name, desc, &Inputs::new(&desc, bias));
}

/// A layer in bf16 in fp16, too.
fn check_both(name: &str, desc: MoeDesc, inputs: &Inputs) {
    check_with(name, desc, inputs);
    if desc.element == DType::Bf16 {
        check_with(name, MoeDesc { element: DType::F16, ..desc }, inputs);
    }
}

fn check_with(name: &str, desc: MoeDesc, inputs: &Inputs) {
    check_kept(name, desc, inputs, Kept { spread: Spread::Dense, accumulate: false });
}

fn check_kept(name: &str, desc: MoeDesc, inputs: &Inputs, kept: Kept) {
    let Some((compiler, turn)) = compiler(name) else { return };
    let bed = bed_with(&compiler, desc, inputs, kept);
    bed.run();
    // The reference takes its time, the device not.
    drop(turn);
    eprintln!("{name}: {desc:?}");
    let ids = bed.words(bed.tensors.saved.ids);
    let expected = reference(&desc, inputs, &ids);
    let mut failures = Vec::new();
    check_choice(&desc, inputs, &expected.logits, &ids, &mut failures);
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
fn very_long_reductions() {
    check("very_long_reductions", desc(70, 128, 8256, 2, 2), &even);
}

/// Multiples of 192, which all products take in tiles of 192 columns.
#[test]
fn tiles_of_192() {
    let base = desc(400, 640, 576, 3, 2);
    check("tiles_of_192", base, &|e| [0.0, 0.5, -1.0][e]);
    let relu = MoeDesc { activation: Activation::Relu, gated: false, ..base };
    check("tiles_of_192, relu", relu, &even);
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
    let relu = MoeDesc { activation: Activation::Relu, gated: false, ..base };
    check("relu_of_two_matrices", relu, &even);
}

#[test]
fn gelu_gated_and_not() {
    let base = MoeDesc { activation: Activation::Gelu, ..desc(200, 192, 128, 8, 2) };
    check("gelu_gated", base, &even);
    check("gelu_of_two_matrices", MoeDesc { gated: false, ..base }, &even);
}

#[test]
fn losses_and_plain_weights() {
    let base = desc(257, 128, 128, 12, 3);
    let softmax = MoeDesc { norm_topk: false, aux_coef: 20.0, z_coef: 10.0, scale: 2.5, ..base };
    check("losses, softmax", softmax, &|e| e as f64 * 0.1);
    check("losses, sigmoid", MoeDesc { sigmoid: true, norm_topk: true, ..softmax }, &even);
    // Sequences of more tokens than a block takes, and of fewer.
    for (tokens, segments) in [(3000, 3), (512, 512), (260, 4)] {
        let base = MoeDesc { tokens, segments, ..softmax };
        check("losses by segment", base, &|e| e as f64 * 0.1);
    }
}

#[test]
fn biased_choice_in_groups() {
    let base = MoeDesc { sigmoid: true, scale: 2.5, ..desc(321, 128, 64, 48, 6) };
    let bias = |experts| Some((0..experts).map(|e| (e * 7 % 11) as f32 * 0.02).collect());
    for (count, kept) in [(8, 3), (48, 9), (1, 1)] {
        let groups = (count <= 32).then_some(RouteGroups { count, kept });
        let desc = MoeDesc { groups, sigmoid: count != 1, ..base };
        check_both("biased", desc, &Inputs { bias: bias(48), ..Inputs::new(&desc, &even) });
    }
    let grouped = MoeDesc { groups: Some(RouteGroups { count: 16, kept: 4 }), ..base };
    check("groups without a bias", grouped, &even);
}

/// Sizes around the tiles of 128 rows: odd numbers of tiles, last tiles of up to 64 rows.
#[test]
fn tails_of_tiles() {
    for tokens in [1, 64, 65, 128, 129, 192, 193, 256, 300, 385] {
        check("tails_of_tiles", desc(tokens, 128, 448, 1, 1), &even);
    }
}

#[test]
fn gradients_added_and_experts_apart() {
    let base = desc(600, 256, 192, 5, 2);
    let activation = Activation::Relu;
    let relu = MoeDesc { activation, gated: false, ..desc(300, 64, 640, 3, 2) };
    for (desc, element) in [(base, DType::Bf16), (relu, DType::F16), (base, DType::F32)] {
        for weight_gradients in [Output::Element, Output::F32] {
            let desc = MoeDesc { weight_gradients, element, ..desc };
            let inputs = Inputs::new(&desc, &even);
            for (spread, accumulate) in
                [(Spread::Bucket, false), (Spread::Bucket, true), (Spread::Dense, true)]
            {
                let kept = Kept { spread, accumulate };
                check_kept("gradients_added_and_experts_apart", desc, &inputs, kept);
            }
        }
    }
}

/// Layers in fp32: every kind of product, ragged, with empty experts, choices by group and losses.
#[test]
fn in_fp32() {
    let fp32 = |desc| MoeDesc { element: DType::F32, ..desc };
    check("fp32, two passes of down", fp32(desc(315, 320, 128, 12, 4)), &|e| e as f64 * -0.3);
    let relu = MoeDesc { activation: Activation::Relu, gated: false, ..desc(97, 64, 192, 3, 2) };
    check("fp32, relu of two matrices", fp32(relu), &even);
    let base = MoeDesc { aux_coef: 20.0, z_coef: 10.0, scale: 2.5, ..desc(130, 128, 64, 16, 3) };
    let groups = Some(RouteGroups { count: 4, kept: 2 });
    check("fp32, in groups", fp32(MoeDesc { sigmoid: true, groups, ..base }), &even);
    let gelu = MoeDesc { activation: Activation::Gelu, ..desc(1, 64, 64, 5, 1) };
    check("fp32, gelu of one token", fp32(gelu), &|e| if e == 3 { 9.0 } else { 0.0 });
}

/// What is not finite stays with its expert: rows past the end of an expert's are the next one's.
#[test]
fn an_expert_that_is_not_finite_spoils_no_other() {
    let name = "an_expert_that_is_not_finite_spoils_no_other";
    let Some((compiler, _turn)) = compiler(name) else { return };
    for element in [DType::Bf16, DType::F16] {
        let base = MoeDesc { element, ..desc(333, 128, 192, 6, 2) };
        let mut inputs = Inputs::new(&base, &even);
        let clean = bed(&compiler, base, &inputs);
        clean.run();
        let (up, down) = (base.width() * base.dim, base.dim * base.hidden);
        for e in [1, 4] {
            inputs.w_up[e * up..][..up].fill(bf16::NAN);
            inputs.w_down[e * down..][..down].fill(bf16::NAN);
        }
        let spoilt = bed(&compiler, base, &inputs);
        spoilt.run();
        assert_eq!(clean.words(clean.tensors.saved.ids), spoilt.words(spoilt.tensors.saved.ids));
        let offsets = clean.words(clean.tensors.saved.offsets);
        assert!(offsets.iter().any(|end| end % 16 != 0), "a tail to clear: {offsets:?}");
        for (gradient, each) in
            [(clean.gradients.up.buffer, up), (clean.gradients.down.buffer, down)]
        {
            let (expected, found) = (clean.floats(gradient), spoilt.floats(gradient));
            for e in 0..base.experts {
                let [expected, found] = [&expected, &found].map(|all| &all[e * each..][..each]);
                let own = [1, 4].contains(&e);
                let same = expected == found;
                assert!(if own { found[0].is_nan() } else { same }, "{element:?}, expert {e}");
            }
        }
    }
}

/// Where fp16 ends the results say so: a step is taken back by what its gradients hold.
#[test]
fn an_overflow_of_fp16_is_seen() {
    let Some((compiler, _turn)) = compiler("an_overflow_of_fp16_is_seen") else { return };
    let base = MoeDesc { element: DType::F16, ..desc(200, 128, 64, 4, 2) };
    let spoilt = |values: &[f64]| values.iter().any(|x| !x.is_finite());
    let inputs = || Inputs::new(&base, &even);
    let large = |x: &bf16| bf16::from_f32(x.to_f32() * 1e4);
    let scaled = |values: &[bf16]| values.iter().map(large).collect();
    let (fits, w_up, dout) = (inputs(), scaled(&inputs().w_up), scaled(&inputs().dout));
    let fits = bed(&compiler, base, &fits);
    fits.run();
    for (what, inputs) in
        [("w_up", Inputs { w_up, ..inputs() }), ("dout", Inputs { dout, ..inputs() })]
    {
        let over = bed(&compiler, base, &inputs);
        over.run();
        for (name, stacked) in [("up", over.gradients.up), ("down", over.gradients.down)] {
            let tells = spoilt(&over.floats(stacked.buffer));
            assert!(tells, "{what} overflows, d{name} does not tell");
        }
        assert_eq!(spoilt(&over.floats(over.out)), what == "w_up", "{what}");
    }
    for buffer in [fits.out, fits.dx, fits.gradients.up.buffer, fits.gradients.down.buffer] {
        assert!(!spoilt(&fits.floats(buffer)), "what fits is finite");
    }
}

#[test]
fn equal_logits_go_to_the_lowest_experts() {
    let name = "equal_logits_go_to_the_lowest_experts";
    let Some((compiler, _turn)) = compiler(name) else { return };
    let desc = desc(65, 64, 64, 40, 3);
    let mut inputs = Inputs::new(&desc, &even);
    inputs.w_router.fill(0.0);
    let bed = bed(&compiler, desc, &inputs);
    bed.run();
    let ids = bed.words(bed.tensors.saved.ids);
    assert!(ids.chunks(3).all(|ids| ids == [0, 1, 2]), "{ids:?}");
}

#[test]
fn runs_and_graphs_give_the_same_bits() {
    let name = "runs_and_graphs_give_the_same_bits";
    let Some((compiler, _turn)) = compiler(name) else { return };
    let desc = desc(1500, 512, 384, 24, 4);
    let inputs = Inputs::new(&desc, &|e| e as f64 * -0.1);
    let (bed, other) = (bed(&compiler, desc, &inputs), bed(&compiler, desc, &inputs));
    bed.run();
    let first = bed.bits();
    // Twice more, two streams at once.
    for bed in [&bed, &other] {
        bed.forward().expect("forward");
        bed.backward().expect("backward");
    }
    assert!(bed.bits() == first, "a second run differs");
    assert!(other.bits() == first, "a run beside another differs");
    let graph = bed
        .stream
        .capture(|| {
            bed.forward()?;
            bed.backward()
        })
        .expect("nothing in a layer waits for the device");
    for buffer in bed.results() {
        bed.arena.fill_bytes(&bed.stream, buffer, 0xff).expect("poison");
    }
    bed.stream.launch_graph(&graph).expect("launch");
    bed.stream.synchronize().expect("graph");
    assert!(bed.bits() == first, "a graph differs");
}

#[test]
fn shapes_the_kernels_cannot_take_are_refused() {
    let refusal = |desc: MoeDesc| desc.check().expect_err("refused").to_string();
    let base = desc(10, 128, 128, 8, 2);
    let cases = [
        (MoeDesc { dim: 100, ..base }, "100 elements of a token; kernels take multiples of 64"),
        (
            MoeDesc { hidden: 96, ..base },
            "96 hidden elements of an expert; kernels take multiples of 64",
        ),
        (MoeDesc { top_k: 9, ..base }, "top_k is 9; it must be between 1 and 8"),
        (MoeDesc { experts: 513, ..base }, "513 experts; kernels take at most 512"),
        (
            MoeDesc { element: DType::F64, ..base },
            "elements of F64; layers on a GPU are in bf16, fp16 or fp32",
        ),
        (
            MoeDesc { segments: 3, ..base },
            "10 tokens are no whole number for each of 3 segments",
        ),
        (MoeDesc { tokens: 0, ..base }, "tokens is 0; it must be between 1 and 1073741824"),
    ];
    let groups = |count, kept| MoeDesc { groups: Some(RouteGroups { count, kept }), ..base };
    assert_eq!(
        refusal(groups(3, 2)),
        "2 of 3 groups of 8 experts: groups have equally many experts"
    );
    assert_eq!(refusal(groups(8, 1)), "1 of 8 groups of 8 experts: they hold fewer than top_k");
    for (desc, expected) in cases {
        assert_eq!(refusal(desc), expected);
    }
    // A token's experts may lie elsewhere: it has rows of those here alone.
    let part = MoeDesc { part: true, top_k: 9, ..base };
    assert_eq!((part.check(), part.rows(), part.slots()), (Ok(()), 80, 90));
    let huge = MoeDesc { tokens: 1 << 20, dim: 8192, ..base };
    let of_inputs = |of: &SizeRefusal| of.size == Size::Inputs;
    assert!(matches!(huge.check(), Err(Refusal::Size(of)) if of_inputs(&of)));
}
