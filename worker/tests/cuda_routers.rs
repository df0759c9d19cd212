//! Every router, loss, scope and capacity trains on a GPU as on processors: losses of 20 steps are
//! within 1e-5, or up to the first token that chose another expert by a last bit. With experts over
//! two GPUs it is the state of one.

mod common;
#[path = "common/places.rs"]
mod places;

use common::routers::routers;
use common::{Job, state_hash, trainers};
use moe_worker::attempt::api::AttemptEnd;
use moe_worker::engine::step::{Engine, StepSummary};
use moejob_kernels::cuda::Gpu;
use moejob_kernels::{DType, NO_EXPERT};
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::config::{Backend, Precision, Recompute, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{
    AuxLossScope, BalanceLoss, ModelConfig, RouterConfig, RouterKind,
};
use moejob_protocol::report::StepReport;
use places::{Where, apart, engine, has_gpu};

const STEPS: u64 = 20;

/// Two micro-batches of two sequences; a small learning rate, so that few choices flip.
fn training() -> TrainingConfig {
    let mut training = common::training();
    (training.global_batch_size, training.micro_batch_size) = (4, 2);
    training.sequence_length = 32;
    (training.steps, training.adamw.learning_rate) = (STEPS, 1e-3);
    training
}

fn model(top_k: u32, router: &RouterConfig) -> ModelConfig {
    let mut model = common::model();
    common::fit_gpus(&mut model);
    model.router = router.clone();
    model.experts.per_token = top_k;
    model
}

/// A kind with each loss that goes with it, over each scope, with and without a capacity.
fn of_kind(kind: RouterKind, top_k: u32, losses: &[BalanceLoss]) -> Vec<(String, RouterConfig)> {
    use AuxLossScope::{Global, MicroBatch, Sequence};
    let mut all = Vec::new();
    for loss in losses {
        for scope in [MicroBatch, Sequence, Global] {
            for capacity in [0.0, 1.0] {
                let chooses = kind == RouterKind::ExpertChoice;
                if capacity > 0.0 && chooses {
                    continue;
                }
                let estimated = *loss == BalanceLoss::LoadImportance;
                let router = RouterConfig {
                    kind,
                    balance_loss: *loss,
                    aux_loss_coef: if *loss == BalanceLoss::None { 0.0 } else { 0.02 },
                    aux_loss_scope: scope,
                    capacity_factor: capacity,
                    eval_capacity_factor: capacity,
                    gate_noise: if estimated { 1.0 } else { 0.0 },
                    top_p: if kind == RouterKind::TopP { 0.4 } else { 0.0 },
                    norm_topk_prob: top_k > 1 && !chooses,
                    ..RouterConfig::default()
                };
                let name = format!("{kind:?}, {loss:?}, {scope:?}, capacity {capacity}");
                all.push((name, router));
            }
        }
    }
    all
}

fn product() -> Vec<(String, u32, RouterConfig)> {
    use BalanceLoss::{CvSquared, FirstChoice, Gshard, Kl, LoadImportance, None, Switch};
    let plain = [Switch, Gshard, FirstChoice, Kl, None];
    let noisy = [Switch, FirstChoice, Kl, LoadImportance];
    let of = |kind, top_k, losses: &[BalanceLoss]| {
        let all = of_kind(kind, top_k, losses).into_iter();
        all.map(move |(name, router)| (name, top_k, router)).collect::<Vec<_>>()
    };
    [
        of(RouterKind::TopK, 2, &plain),
        of(RouterKind::Switch, 1, &plain),
        of(RouterKind::Gshard, 2, &plain),
        of(RouterKind::Tutel, 2, &noisy),
        of(RouterKind::NoisyTopK, 2, &[Switch, Kl, CvSquared]),
        of(RouterKind::TopP, 3, &plain),
        of(RouterKind::ExpertChoice, 2, &[None]),
        of(RouterKind::Hash, 2, &[None]),
    ]
    .concat()
}

/// The smallest distance between the last score that was taken and the next one, of the last
/// micro-batch, where tokens choose.
fn margin(engine: &Engine) -> Option<f64> {
    let model = &engine.model;
    let (experts, slots) =
        (model.config.experts.count as usize, model.config.slots() as usize);
    let floats = |buffer: moejob_kernels::Buffer| -> Vec<f64> {
        match buffer.dtype() {
            DType::F64 => model.device.read_vec(buffer),
            _ => model.device.read_vec::<f32>(buffer).into_iter().map(f64::from).collect(),
        }
    };
    let layers = model.buffers.layers.iter().filter_map(|layer| layer.fused.as_ref());
    let of_layer = |router: &moejob_protocol::buffers::Router<moejob_kernels::Buffer>| {
        let (scores, ids) = (floats(router.probs), model.device.read_vec::<u32>(router.ids));
        let chosen = router.gate.as_ref().map(|gate| model.device.read_vec::<u32>(gate.chosen));
        let chosen = chosen.unwrap_or(ids);
        let rows = scores.chunks(experts).zip(chosen.chunks(slots));
        let of_token = |(scores, chosen): (&[f64], &[u32])| {
            let taken = |e: &usize| chosen.contains(&(*e as u32));
            let has = chosen.iter().any(|id| *id != NO_EXPERT);
            let least = (0..experts).filter(taken).map(|e| scores[e]).fold(f64::MAX, f64::min);
            let rest = (0..experts).filter(|e| !taken(e)).map(|e| scores[e]);
            let most = rest.fold(f64::MIN, f64::max);
            (has && most > f64::MIN).then_some((least - most).abs())
        };
        rows.filter_map(of_token).fold(f64::MAX, f64::min)
    };
    layers.map(|fused| of_layer(&fused.router)).reduce(f64::min)
}

/// Whether every token has the experts of the other run, and as many were dropped.
fn same_choices(a: &StepSummary, b: &StepSummary) -> bool {
    let counts = |step: &StepSummary| (step.followed, step.switched, step.unrouted);
    (&a.loads, &a.dropped, counts(a)) == (&b.loads, &b.dropped, counts(b))
}

/// The first step whose choices are others; losses are within 1e-5 before it.
fn compare(name: &str, model: &ModelConfig, training: &TrainingConfig) -> u64 {
    let mut cpu = engine(Where::Processor, model, training);
    let mut gpu = engine(Where::Gpu, model, training);
    let mut data = common::made::Made::new(model, training);
    let mut worst = 0.0_f64;
    for step in 0..training.steps {
        let expected = cpu.step(step, &mut data).expect("a step");
        let found = gpu.step(step, &mut data).expect("a step");
        if !same_choices(&found, &expected) {
            let margin = margin(&cpu);
            println!("{name}: a choice flips at step {step}; top-k margin {margin:?}");
            return step;
        }
        let pairs = [
            (found.loss, expected.loss),
            (found.aux_loss, expected.aux_loss),
            (found.z_loss, expected.z_loss),
            (found.router_entropy.unwrap_or(-1.0), expected.router_entropy.unwrap_or(-2.0)),
        ];
        for (at, (found, expected)) in pairs.into_iter().enumerate() {
            let apart = if found == expected { 0.0 } else { apart(found, expected) };
            let told = || format!("{name}: step {step}: number {at} is {found} for {expected}");
            // A loss of balance may be next to nothing, as the difference of larger numbers.
            assert!(apart < 1e-5 || (found - expected).abs() < 1e-7, "{}", told());
            worst = if at == 0 { worst.max(apart) } else { worst };
        }
        let norm = apart(found.grad_norm, expected.grad_norm);
        assert!(norm < 1e-3, "{name}: step {step}: norms are {norm:e} apart");
    }
    println!("{name}: losses {worst:.1e} apart");
    training.steps
}

fn compare_all(all: Vec<(String, u32, RouterConfig)>, training: &TrainingConfig) {
    let (count, mut whole) = (all.len(), 0);
    for (name, top_k, router) in all {
        whole += u64::from(compare(&name, &model(top_k, &router), training) == STEPS);
    }
    println!("{whole} of {count} routers without a flip");
    assert!(2 * whole >= count as u64, "{whole} of {count} routers without a flip");
}

#[test]
fn every_kind_loss_scope_and_capacity_trains_as_on_processors() {
    let all = product();
    assert!(all.len() > 150, "{}", all.len());
    if has_gpu() {
        compare_all(all, &training());
    }
}

/// Noise, masks, the cosine gate, hysteresis, corrections and whole-step balance, all at once.
#[test]
fn routers_with_everything_train_as_on_processors() {
    if !has_gpu() {
        return;
    }
    let named = |(name, top_k, router): (&str, u32, RouterConfig)| {
        (name.to_string(), top_k, router)
    };
    compare_all(routers().into_iter().map(named).collect(), &training());
    let mut again = training();
    again.recompute = Recompute::Full;
    compare_all(routers().into_iter().map(named).collect(), &again);
}

/// More slots a token than the op of dropless top-k takes.
#[test]
fn many_slots_train_as_on_processors() {
    if !has_gpu() {
        return;
    }
    let of = |kind, norm_topk_prob| RouterConfig {
        kind,
        norm_topk_prob,
        balance_loss: BalanceLoss::None,
        aux_loss_coef: 0.0,
        ..RouterConfig::default()
    };
    for (top_k, router) in
        [(2, of(RouterKind::ExpertChoice, false)), (20, of(RouterKind::TopK, true))]
    {
        let mut model = model(top_k, &router);
        model.experts.count = 40;
        compare(&format!("{:?} of 40", router.kind), &model, &training());
    }
}

/// In 16 bits losses are near those of fp32, fall, and are the same bits twice.
#[test]
fn routers_train_in_16_bits() {
    if !has_gpu() {
        return;
    }
    for (name, top_k, router) in routers() {
        let model = model(top_k, &router);
        let run = |precision| {
            let mut training = training();
            training.precision = precision;
            places::steps(Where::Gpu, &model, &training)
        };
        let exact = run(Precision::Fp32);
        for precision in [Precision::Bf16, Precision::Fp16, Precision::Tf32] {
            let (found, again) = (run(precision), run(precision));
            let losses = |steps: &[StepSummary]| -> Vec<u64> {
                steps.iter().map(|step| step.loss.to_bits()).collect()
            };
            assert_eq!(losses(&found), losses(&again), "{name} {precision:?}: other bits twice");
            let apart = found.iter().zip(&exact).map(|(a, b)| apart(a.loss, b.loss));
            let worst = apart.fold(0.0, f64::max);
            println!("{name} {precision:?}: losses {worst:.1e} from those of fp32");
            assert!(worst < 0.02, "{name} {precision:?}: {worst:e}");
            assert!(found[19].loss < found[0].loss, "{name} {precision:?}: nothing is learned");
        }
    }
}

/// With experts over two GPUs, also one expert a rank, the state has the bits of one GPU.
#[test]
fn experts_over_gpus_train_as_one() {
    match Gpu::count() {
        Ok(count) if count >= 2 => {}
        _ => return println!("skipped: no two GPUs"),
    }
    for (name, top_k, router) in routers() {
        check_meshes(name, &|layout| job(layout, &model(top_k, &router)));
    }
    let one = RouterConfig {
        kind: RouterKind::Switch,
        norm_topk_prob: false,
        capacity_factor: 1.0,
        jitter: 0.1,
        ..RouterConfig::default()
    };
    check_meshes("an expert a rank", &|layout| {
        let mut model = model(1, &one);
        model.experts.count = 2;
        job(layout, &model)
    });
}

fn job(layout: Layout, model: &ModelConfig) -> Job {
    let mut job = Job::new(layout);
    job.config.model = model.clone();
    let training = &mut job.config.training;
    (training.steps, training.adamw.learning_rate) = (STEPS, 1e-3);
    training.sequence_length = 32;
    training.compute.backend = Backend::Cuda;
    job.config.ranks = job.config.layout.mesh.world();
    job
}

fn check_meshes(name: &str, job: &dyn Fn(Layout) -> Job) {
    let run = |dp: u32, ep: u32| -> (Vec<StepReport>, String) {
        let job = job(Layout::contiguous(Mesh::data_parallel(dp, ep)));
        let (ends, reports) = job.run(&mut trainers(dp), None);
        let completed = |end: &AttemptEnd| *end == AttemptEnd::Completed { step: STEPS };
        assert!(ends.iter().all(completed), "{name}: {dp} ranks: {ends:?}");
        let last = job.location().join(directory_name(STEPS));
        (reports, state_hash(&last))
    };
    let (expected, state) = run(1, 1);
    for (dp, ep) in [(2, 1), (2, 2)] {
        let (found, of_mesh) = run(dp, ep);
        let told = |step: &StepReport| [step.loss, step.aux_loss].map(f64::to_bits);
        let same = found.iter().map(told).eq(expected.iter().map(told));
        assert!(same, "{name}: {dp} ranks, experts over {ep}: other losses");
        assert_eq!(of_mesh, state, "{name}: {dp} ranks, experts over {ep}: another state");
    }
}
