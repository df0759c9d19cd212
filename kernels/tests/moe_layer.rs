//! The mixture layer as an op: one test body, every device and every kind of element, against
//! float64.

mod cuda_common;

use cuda_common::bed::desc;
use cuda_common::{Inputs, error, reference};
use half::{bf16, f16};
use moejob_kernels::parts::Route;
use moejob_kernels::{
    ArenaPlan, Buffer, DType, Device, Gradients, Activation, MoeBackward, MoeDesc, MoeForward,
    MoeHidden, MoeTensors, Output, RouteGroups, Scoring, Stacked, Weights,
};

/// Memory of the device under test; shapes here are small.
const ARENA_BYTES: usize = 64 << 20;

/// Writes numbers as what the buffer holds.
fn write(device: &mut Device, buffer: Buffer, values: &[f64]) {
    match buffer.dtype() {
        DType::F64 => device.write(buffer, values),
        DType::F32 => device.write(buffer, &map(values, |x| x as f32)),
        DType::Bf16 => device.write(buffer, &map(values, bf16::from_f64)),
        DType::F16 => device.write(buffer, &map(values, f16::from_f64)),
        other => panic!("{other:?} is no float"),
    }
}

fn read(device: &Device, buffer: Buffer) -> Vec<f64> {
    match buffer.dtype() {
        DType::F64 => device.read_vec(buffer),
        DType::F32 => device.read_vec::<f32>(buffer).into_iter().map(f64::from).collect(),
        DType::Bf16 => device.read_vec::<bf16>(buffer).into_iter().map(f64::from).collect(),
        DType::F16 => device.read_vec::<f16>(buffer).into_iter().map(f64::from).collect(),
        other => panic!("{other:?} is no float"),
    }
}

fn map<T>(values: &[f64], as_element: impl Fn(f64) -> T) -> Vec<T> {
    values.iter().map(|x| as_element(*x)).collect()
}

fn doubles<T: Copy>(values: &[T]) -> Vec<f64>
where
    f64: From<T>,
{
    values.iter().map(|x| f64::from(*x)).collect()
}

/// Gradients of `experts` whose matrices follow each other.
fn gradients(
    experts: usize,
    router: Buffer,
    [up, down]: [Buffer; 2],
    accumulate: bool,
) -> Gradients {
    let [up, down] = [up, down].map(|buffer| Stacked::dense(buffer, experts));
    Gradients { router, up, down, accumulate, accumulate_router: accumulate }
}

/// Forward and backward of `desc` on `device`, its outputs against float64.
fn check(name: &str, device: &mut Device, desc: MoeDesc, accumulate: bool) {
    check_scaled(name, device, desc, accumulate, None);
}

/// The same with the loss multiplied by `scale`.
fn check_scaled(
    name: &str,
    device: &mut Device,
    desc: MoeDesc,
    accumulate: bool,
    scale: Option<f32>,
) {
    let MoeDesc { tokens, dim, hidden, experts, element, .. } = desc;
    let inputs = Inputs::new(&desc, &|e| e as f64 * -0.2);
    let mut plan = ArenaPlan::new();
    let planned = device.moe_plan(&desc, &mut plan).expect("the device has such a layer");
    let workspace = plan.alloc(DType::U8, planned.workspace_bytes);
    let router = plan.alloc(desc.router_element(), experts * dim);
    let mut elements = |len| plan.alloc(element, len);
    let (x, up) = (elements(tokens * dim), elements(experts * desc.width() * dim));
    let (down, dout) = (elements(experts * dim * hidden), elements(tokens * dim));
    let (out, dx) = (elements(tokens * dim), elements(tokens * dim));
    let mut gradient = |len| plan.alloc(desc.gradient_element(), len);
    let (dw_up, dw_down) = (gradient(up.len()), gradient(down.len()));
    let dw_router = plan.alloc(desc.router_element(), experts * dim);
    let loss_scale = scale.map(|_| plan.alloc(DType::F32, 1));
    assert!(plan.bytes() <= ARENA_BYTES, "{name} needs {} bytes", plan.bytes());
    let dense = |buffer| Stacked::dense(buffer, experts);
    let weights = Weights { router, bias: None, up: dense(up), down: dense(down) };
    let gradients = gradients(experts, dw_router, [dw_up, dw_down], accumulate);
    let factor = f64::from(scale.unwrap_or(1.0));
    // Everything that is not an input starts as NaN and as an index out of any bounds.
    let poison = vec![0xff_u8; plan.bytes()];
    let mut all = ArenaPlan::new();
    device.write(all.alloc(DType::U8, plan.bytes()), &poison);
    for (buffer, values) in [
        (x, doubles(&inputs.x)),
        (router, doubles(&inputs.w_router)),
        (up, doubles(&inputs.w_up)),
        (down, doubles(&inputs.w_down)),
        (dout, doubles(&inputs.dout).iter().map(|x| x * factor).collect()),
    ] {
        write(device, buffer, &values);
    }
    for gradient in [dw_router, dw_up, dw_down].into_iter().filter(|_| accumulate) {
        write(device, gradient, &vec![1.0; gradient.len()]);
    }
    let one = if accumulate { 1.0 } else { 0.0 };
    if let (Some(at), Some(scale)) = (loss_scale, scale) {
        device.write(at, &[scale]);
    }
    let (residual, saved) = (None, planned.saved);
    let tensors = MoeTensors { x, residual, weights, saved, workspace, loss_scale, starts: None };
    device.moe_forward(&MoeForward { desc, tensors, out });
    let hidden = [saved.h, saved.a].map(|rows| rows.reinterpret(DType::U8));
    let first = hidden.map(|rows| device.read_vec::<u8>(rows));
    hidden.iter().for_each(|rows| device.write(*rows, &vec![0xff_u8; rows.len()]));
    device.moe_hidden(&MoeHidden { desc, tensors });
    let again = hidden.map(|rows| device.read_vec::<u8>(rows));
    assert!(again == first, "{name} in {element:?}: hidden rows differ when computed again");
    device.moe_backward(&MoeBackward { desc, tensors, dout, dx, gradients });
    device.finish().expect("the layer ran");
    let ids: Vec<u32> = device.read_vec(planned.saved.ids);
    let expected = reference(&desc, &inputs, &ids);
    let count = |e: u32| ids.iter().filter(|id| **id == e).count() as u32;
    let counts: Vec<u32> = (0..experts as u32).map(count).collect();
    assert_eq!(device.read_vec::<u32>(planned.saved.counts), counts, "{name}");
    let (routed, products) = match element {
        DType::F64 => (1e-12, 1e-12),
        DType::F32 => (1e-5, 1e-5),
        DType::F16 => (1e-5, 4e-3),
        _ => (1e-5, 2e-2),
    };
    for (what, buffer, expected, limit) in [
        ("weights", planned.saved.weights, &expected.weights, routed),
        ("losses", planned.saved.losses, &expected.losses.to_vec(), routed),
        ("out", out, &expected.out, products),
        ("dx", dx, &expected.dx, products),
        ("dw_down", dw_down, &expected.dw_down, products),
        ("dw_up", dw_up, &expected.dw_up, products),
        ("dw_router", dw_router, &expected.dw_router, products),
    ] {
        let mut found = read(device, buffer);
        if what.starts_with("dw") {
            found.iter_mut().for_each(|x| *x -= one);
        }
        if what.starts_with('d') {
            found.iter_mut().for_each(|x| *x /= factor);
        }
        // Beside one, 16 bits keep little of a gradient.
        let limit = if accumulate && what.starts_with("dw") { 20.0 * limit } else { limit };
        let found = error(&found, expected);
        // Written so that an error which is no number fails.
        assert!(found <= limit, "{name} in {element:?}: {what} differs by {found:.2e}");
    }
    device.finish().expect("the copies ran");
}

/// Gated, of two matrices, in groups, with losses, an expert without a token.
fn check_all(device: &mut Device, element: DType) {
    let base = MoeDesc { element, ..desc(97, 128, 64, 6, 2) };
    check("gated", device, base, false);
    check("gated, added", device, base, true);
    let relu = MoeDesc { activation: Activation::Relu, gated: false, ..base };
    check("relu of two matrices", device, relu, false);
    check("relu of two matrices, added", device, relu, true);
    let gelu = MoeDesc { activation: Activation::Gelu, gated: false, ..base };
    check("gelu of two matrices", device, gelu, false);
    let losses = MoeDesc { aux_coef: 2.0, z_coef: 1.0, scale: 1.5, norm_topk: false, ..base };
    check("losses", device, losses, false);
    check_scaled("losses, scaled", device, losses, false, Some(256.0));
    for (tokens, segments) in [(97, 97), (96, 3), (98, 2)] {
        let sequences = MoeDesc { tokens, segments, ..losses };
        check("losses by segment", device, sequences, false);
        check("sigmoid by segment", device, MoeDesc { sigmoid: true, ..sequences }, false);
    }
    let groups = Some(RouteGroups { count: 3, kept: 2 });
    if element == DType::F32 {
        let sums = MoeDesc { weight_gradients: Output::Sums, ..base };
        check("sums in fp64", device, sums, false);
        check("sums in fp64, added", device, sums, true);
        let of_ranks = MoeDesc { tokens: 96, sources: 3, ..sums };
        check("sums in fp64 of three ranks", device, of_ranks, false);
        add_up_ranks(device, &sums);
    }
    check("sigmoid in groups", device, MoeDesc { sigmoid: true, groups, ..losses }, false);
    check("every expert, one token", device, MoeDesc { tokens: 1, top_k: 6, ..base }, false);
}

/// The experts' gradients, up's and down's, of `count` tokens of `desc` from `first` on.
fn gradients_of(
    device: &mut Device,
    desc: &MoeDesc,
    (first, count): (usize, usize),
) -> [Vec<f64>; 2] {
    let MoeDesc { dim, hidden, experts, .. } = *desc;
    let inputs = Inputs::new(desc, &|e| e as f64 * -0.2);
    let desc = MoeDesc { tokens: count, sources: count * desc.sources / desc.tokens, ..*desc };
    let mut plan = ArenaPlan::new();
    let planned = device.moe_plan(&desc, &mut plan).expect("the device has such a layer");
    let workspace = plan.alloc(DType::U8, planned.workspace_bytes);
    let mut floats = |len| plan.alloc(DType::F32, len);
    let [router, dw_router] = [(); 2].map(|()| floats(experts * dim));
    let [x, dout, out, dx] = [(); 4].map(|()| floats(count * dim));
    let (up, down) = (floats(experts * desc.width() * dim), floats(experts * dim * hidden));
    let [dw_up, dw_down] = [up, down].map(|of| plan.alloc(DType::F64, of.len()));
    let dense = |buffer| Stacked::dense(buffer, experts);
    let weights = Weights { router, bias: None, up: dense(up), down: dense(down) };
    let gradients = gradients(experts, dw_router, [dw_up, dw_down], false);
    let own = |values: &[bf16]| doubles(&values[first * dim..(first + count) * dim]);
    for (buffer, values) in [
        (x, own(&inputs.x)),
        (dout, own(&inputs.dout)),
        (router, doubles(&inputs.w_router)),
        (up, doubles(&inputs.w_up)),
        (down, doubles(&inputs.w_down)),
    ] {
        // No number that products could leave as it is.
        let values: Vec<f64> = values.iter().map(|x| x * 1.1).collect();
        write(device, buffer, &values);
    }
    let (residual, loss_scale, saved) = (None, None, planned.saved);
    let tensors = MoeTensors { x, residual, weights, saved, workspace, loss_scale, starts: None };
    device.moe_forward(&MoeForward { desc, tensors, out });
    device.moe_backward(&MoeBackward { desc, tensors, dout, dx, gradients });
    device.finish().expect("the layer ran");
    [dw_up, dw_down].map(|of| device.read_vec(of))
}

/// Two ranks' tokens in one layer have the gradients that each has alone, added up: bit for bit.
fn add_up_ranks(device: &mut Device, desc: &MoeDesc) {
    let both = MoeDesc { tokens: 194, sources: 2, ..*desc };
    let together = gradients_of(device, &both, (0, 194));
    let alone = [0, 97].map(|first| gradients_of(device, &both, (first, 97)));
    for (at, together) in together.iter().enumerate() {
        let sums = alone[0][at].iter().zip(&alone[1][at]).map(|(a, b)| a + b);
        let differ = together.iter().zip(sums).filter(|(a, b)| a.to_bits() != b.to_bits()).count();
        assert_eq!(differ, 0, "of {} numbers of the gradient", together.len());
        let rounded = |x: &f64| f64::from(*x as f32) == *x;
        assert!(!together.iter().all(rounded), "sums of two are more than one float holds");
        assert!(alone[0][at].iter().all(rounded), "a product of one rank is rounded");
    }
}

#[test]
fn on_a_cpu() {
    for element in [DType::F64, DType::F32] {
        check_all(&mut Device::cpu(2, ARENA_BYTES).expect("a CPU"), element);
    }
}

#[test]
fn on_a_gpu() {
    for element in [DType::Bf16, DType::F16, DType::F32] {
        match Device::cuda(0, ARENA_BYTES) {
            Ok(mut device) => check_all(&mut device, element),
            Err(error) => return eprintln!("skipped: on_a_gpu: no CUDA device: {error}"),
        }
    }
}

/// The ids that a processor chooses by these logits.
fn chosen_by_a_processor(desc: &MoeDesc, logits: &[f32], bias: Option<&[f32]>) -> Vec<u32> {
    let MoeDesc { tokens, experts, top_k, .. } = *desc;
    let mut plan = ArenaPlan::new();
    let mut floats = |len| plan.alloc(DType::F32, len);
    let (at, probs, lse) = (floats(tokens * experts), floats(tokens * experts), floats(tokens));
    let (weights, biases) = (floats(tokens * top_k), floats(experts));
    let (ids, counts) = (plan.alloc(DType::U32, tokens * top_k), plan.alloc(DType::U32, experts));
    let (prob_sums, losses) = (plan.alloc(DType::F64, experts), plan.alloc(DType::F64, 2));
    let mut device = Device::cpu(1, plan.bytes()).expect("a CPU");
    device.write(at, logits);
    if let Some(bias) = bias {
        device.write(biases, bias);
    }
    device.as_cpu_mut().expect("a processor").route::<f32>(&Route {
        tokens,
        experts,
        top_k,
        scoring: if desc.sigmoid { Scoring::Sigmoid } else { Scoring::Softmax },
        norm_topk: desc.norm_topk,
        scale: f64::from(desc.scale),
        groups: desc.groups,
        logits: at,
        bias: bias.map(|_| biases),
        probs,
        lse,
        ids,
        weights,
        counts,
        prob_sums,
        losses,
    });
    device.read_vec(ids)
}

/// One rule: the largest rounded scores, ties to the lowest expert. The same logits choose the same
/// experts on a GPU as on a processor, where they tie and where only their scores do.
#[test]
fn a_gpu_chooses_as_a_processor_does() {
    let mut device = match Device::cuda(0, ARENA_BYTES) {
        Ok(device) => device,
        Err(error) => return eprintln!("skipped: a_gpu_chooses: no CUDA device: {error}"),
    };
    let groups = Some(RouteGroups { count: 4, kept: 2 });
    for (experts, top_k) in [(64, 8), (60, 4), (128, 8), (24, 3), (512, 16), (5, 2)] {
        for kind in 0..6 {
            let base = MoeDesc { element: DType::Bf16, ..desc(500, 128, 64, experts, top_k) };
            let desc = MoeDesc {
                sigmoid: kind >= 2,
                groups: if kind >= 4 && experts % 4 == 0 { groups } else { None },
                ..base
            };
            // Logits of about 1, 1e-3 and 1e-7, of which the last have few different scores.
            for spread in [1.0, 1e-3, 3e-7, 0.0] {
                check_choice(&mut device, desc, spread, kind % 2 == 1);
            }
        }
    }
}

/// Routes with weights `spread` times as large as usual, every third expert being another's double;
/// with corrections of few values, if `biased`.
fn check_choice(device: &mut Device, desc: MoeDesc, spread: f32, biased: bool) {
    let MoeDesc { tokens, dim, experts, element, .. } = desc;
    let mut inputs = Inputs::new(&desc, &|_| 0.0);
    inputs.w_router.iter_mut().for_each(|w| *w *= spread);
    for e in (2..experts).step_by(3) {
        inputs.w_router.copy_within((e - 1) * dim..e * dim, e * dim);
    }
    let corrections: Vec<f32> = (0..experts).map(|e| (e % 3) as f32 * 0.25).collect();
    let mut plan = ArenaPlan::new();
    let planned = device.moe_plan(&desc, &mut plan).expect("the device has such a layer");
    let workspace = plan.alloc(DType::U8, planned.workspace_bytes);
    let (router, bias) = (plan.alloc(DType::F32, experts * dim), plan.alloc(DType::F32, experts));
    let mut elements = |len| plan.alloc(element, len);
    let (x, out) = (elements(tokens * dim), elements(tokens * dim));
    let up = Stacked::dense(elements(experts * desc.width() * dim), experts);
    let down = Stacked::dense(elements(experts * dim * desc.hidden), experts);
    assert!(plan.bytes() <= ARENA_BYTES, "{desc:?} needs {} bytes", plan.bytes());
    write(device, x, &doubles(&inputs.x));
    device.write(router, &inputs.w_router);
    device.write(bias, &corrections);
    let bias = biased.then_some(bias);
    let weights = Weights { router, bias, up, down };
    let (residual, loss_scale, saved) = (None, None, planned.saved);
    let tensors = MoeTensors { x, residual, weights, saved, workspace, loss_scale, starts: None };
    device.moe_forward(&MoeForward { desc, tensors, out });
    device.finish().expect("the layer ran");
    let logits: Vec<f32> = device.read_vec(saved.logits);
    let found: Vec<u32> = device.read_vec(saved.ids);
    let corrections = biased.then_some(&corrections[..]);
    let expected = chosen_by_a_processor(&desc, &logits, corrections);
    let differ = found.iter().zip(&expected).filter(|(a, b)| a != b).count();
    assert!(differ == 0, "{desc:?} {spread} {biased}: {differ} of {} differ", found.len());
}

#[test]
fn a_cpu_says_what_it_has_not() {
    let mut device = Device::cpu(1, 1 << 20).expect("a CPU");
    let base = MoeDesc { element: DType::F32, ..desc(10, 20, 30, 4, 2) };
    for (desc, expected) in [
        (
            MoeDesc { element: DType::Bf16, ..base },
            "elements of Bf16; a CPU computes in F32 or F64",
        ),
        (MoeDesc { top_k: 5, ..base }, "top_k is 5; it must be between 1 and 4"),
        (
            MoeDesc { weight_gradients: Output::F32, ..base },
            "weight gradients as F32 of F32: on a CPU they are elements, or sums",
        ),
        (MoeDesc { sources: 3, ..base }, "10 tokens are no whole number for each of 3 ranks"),
    ] {
        let error = device.moe_plan(&desc, &mut ArenaPlan::new()).expect_err(expected);
        let source = std::error::Error::source(&error).expect("the refusal").to_string();
        assert_eq!(source, expected);
    }
    device.moe_plan(&base, &mut ArenaPlan::new()).expect("any sizes are fine on a CPU");
}
