//! Every router of the field trains: the same bits on any mesh and after any stop, with all of its
//! noise; whole-step balance; what a user can watch; evaluation.

mod common;

use common::routers::routers;
use common::{Job, bits, sources, state_hash, trainers};
use moe_worker::engine::computer::Computer;
use moe_worker::engine::eval::evaluate;
use moe_worker::engine::forward::Pass;
use moe_worker::engine::gate::Noise;
use moe_worker::engine::buckets::BucketSums;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::round::Round;
use moe_worker::state::snapshot::initialize;
use moe_worker::engine::step::Engine;
use moe_worker::attempt::trainer::Trainer;
use moejob_protocol::config::{Precision, Resume};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{
    AuxLossScope, BalanceLoss, ModelConfig, RouterConfig, RouterKind,
};
use moejob_protocol::report::StepReport;

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

fn job(layout: Layout, top_k: u32, router: &RouterConfig) -> Job {
    let mut job = Job::new(layout);
    job.config.model.router = router.clone();
    job.config.model.experts.per_token = top_k;
    job
}

/// Losses and norms, and what is told of the routing, churn excepted, which an attempt begins anew.
fn told(reports: &[StepReport]) -> Vec<([u64; 5], [u64; 4], Vec<Vec<u64>>)> {
    let routing = reports.iter().map(|report| {
        let routing = &report.routing;
        let shares = [
            routing.router_entropy.expect("it is measured"),
            routing.dropped_tokens,
            routing.unrouted_tokens,
            routing.expert_switches.expect("it is measured"),
        ];
        (shares.map(f64::to_bits), routing.tokens_per_expert.clone())
    });
    let rows = bits(reports).into_iter().zip(routing);
    rows.map(|(bits, (shares, loads))| (bits, shares, loads)).collect()
}

fn last_hash(job: &Job) -> String {
    state_hash(&job.location().join("step-00000010"))
}

#[test]
fn any_mesh_and_any_stop_give_the_same_bits() {
    for (name, top_k, router) in routers() {
        train_anywhere(name, &|layout| job(layout, top_k, &router));
    }
}

fn train_anywhere(name: &str, job: &dyn Fn(Layout) -> Job) {
    let one = job(layout(1, 1));
    let reports = one.run(&mut trainers(1), None).1;
    let losses: Vec<f64> = reports.iter().map(|report| report.loss).collect();
    assert!(losses.len() == 10 && losses[9] < losses[0], "{name}: {losses:?}");
    assert!(losses.iter().all(|loss| loss.is_finite()), "{name}: {losses:?}");
    for other in [layout(2, 2), layout(3, 1), layout(3, 3), layout(6, 2)] {
        let job = job(other.clone());
        let (ends, found) = job.run(&mut trainers(other.mesh.world()), None);
        assert!(ends.iter().all(|end| *end == ends[0]), "{name}: {other:?}: {ends:?}");
        assert_eq!(told(&found), told(&reports), "{name}: {other:?}");
        assert_eq!(last_hash(&job), last_hash(&one), "{name}: {other:?}");
    }
    // Stops, another mesh, on from memory.
    let mut stopped = job(layout(2, 2));
    let mut group = trainers(2);
    let mut found = stopped.run(&mut group, Some(4)).1;
    let sources = sources(&group, 1, 4, 2);
    let next = job(layout(3, 3)).config.layout;
    let earlier = std::mem::replace(&mut stopped.config.layout, next);
    group.push(Trainer::new());
    stopped.config.attempt = 2;
    stopped.config.resume =
        Resume::Memory { step: 4, attempt: 1, layout: earlier, sources };
    found.extend(stopped.run(&mut group, None).1);
    assert_eq!(told(&found), told(&reports), "{name}: after a stop");
    assert_eq!(last_hash(&stopped), last_hash(&one), "{name}: after a stop");
}

#[test]
fn what_is_told_of_the_routing_adds_up() {
    for (name, top_k, router) in routers() {
        let job = job(layout(2, 2), top_k, &router);
        let reports = job.run(&mut trainers(2), None).1;
        let training = &job.config.training;
        let tokens = u64::from(training.global_batch_size * training.sequence_length);
        let micro_batches = training.global_batch_size / training.micro_batch_size;
        let each = tokens / u64::from(micro_batches);
        let experts = job.config.model.experts.count;
        let capacity = router.capacity(router.capacity_factor, each, experts, top_k);
        for report in &reports {
            let routing = &report.routing;
            let most = f64::from(experts).ln() + 1e-6;
            let entropy = routing.router_entropy;
            assert!(entropy.is_some_and(|x| (0.0..=most).contains(&x)), "{name}: {routing:?}");
            assert_eq!(routing.tokens_per_expert.len(), 2, "{name}: two layers");
            for loads in &routing.tokens_per_expert {
                let all: u64 = loads.iter().sum();
                assert!(all <= tokens * u64::from(job.config.model.slots()), "{name}: {loads:?}");
                let full = capacity.map(|capacity| capacity * u64::from(micro_batches));
                assert!(full.is_none_or(|full| loads.iter().all(|n| *n <= full)), "{name}");
                if routing.dropped_tokens == 0.0 && router.kind == RouterKind::TopK {
                    assert_eq!(all, tokens * u64::from(top_k), "{name}");
                }
            }
            let switches = routing.expert_switches.expect("it is measured");
            assert!((0.0..=1.0).contains(&switches), "{name}: {routing:?}");
            let held_out = report.validation_loss.is_some();
            let churns = held_out && report.step > 4;
            assert_eq!(routing.churn.is_some(), churns, "{name}: step {}", report.step);
            assert!(routing.churn.is_none_or(|churn| (0.0..=1.0).contains(&churn)), "{name}");
        }
        let drops = reports.iter().any(|report| report.routing.dropped_tokens > 0.0);
        assert_eq!(drops, capacity.is_some(), "{name}: drops");
        let misses = reports.iter().any(|report| report.routing.unrouted_tokens > 0.0);
        assert!(!misses || capacity.is_some() || router.kind == RouterKind::ExpertChoice, "{name}");
    }
}

/// Evaluation of a checkpoint is without noise: the same number every time, and near the loss that
/// the last validation found on other text.
#[test]
fn checkpoints_of_every_router_are_evaluated() {
    for (name, top_k, router) in routers() {
        let job = job(layout(1, 1), top_k, &router);
        let reports = job.run(&mut trainers(1), None).1;
        let directory = job.location().join("step-00000010");
        let weights = moe_worker::hf::Weights::open(&directory).expect("a checkpoint");
        let length = job.config.training.sequence_length;
        let measure = || {
            let one = Computer::Processors { threads: 1, precision: Precision::Fp32 };
            evaluate(&weights, &job.config.data, length, one, &mut |_, _| {})
                .expect("a loss")
        };
        let (first, second) = (measure(), measure());
        assert_eq!(first, second, "{name}");
        let held_out = reports[9].validation_loss.expect("the last step validates");
        if router.aux_loss_scope == AuxLossScope::Hf {
            continue;
        }
        // Nothing of Hugging Face computes these.
        let out = job.folder.path().join("exported");
        let options = moe_worker::hf::Options::default();
        let exported = moe_worker::hf::export(&weights, &out, options, &mut |_, _| {});
        let refusal = format!("{:?}", exported.err());
        assert!(refusal.contains("router"), "{name}: {refusal}");
        let difference = (first.loss - held_out).abs();
        assert!(difference < 0.5, "{name}: {} and {held_out}", first.loss);
    }
}

/// Gradients of a step of several micro-batches with the balance of the whole step, against those
/// of one micro-batch that is as large: without capacity they are the same function.
#[test]
fn the_balance_of_a_step_is_that_of_one_large_micro_batch() {
    let losses = [BalanceLoss::Switch, BalanceLoss::Kl, BalanceLoss::FirstChoice];
    for loss in losses {
        let mut config: ModelConfig = common::model();
        config.initializer_range = 0.3;
        config.router = RouterConfig {
            aux_loss_coef: 3.0,
            z_loss_coef: 0.0,
            balance_loss: loss,
            ..RouterConfig::default()
        };
        let one = one_step(&config, AuxLossScope::MicroBatch, 6);
        let many = one_step(&config, AuxLossScope::Global, 2);
        assert!((one.1 - many.1).abs() < 1e-12 * one.1.abs(), "{loss:?}: {} {}", one.1, many.1);
        let largest = one.0.iter().fold(0.0_f64, |max, sum| max.max(*sum));
        for (at, (one, many)) in one.0.iter().zip(&many.0).enumerate() {
            assert!((one - many).abs() < 1e-10 * largest, "{loss:?}: block {at}: {one}, {many}");
        }
    }
}

/// Sums of squares of all gradients, and the auxiliary loss, of a step of six sequences.
fn one_step(config: &ModelConfig, scope: AuxLossScope, micro_batch: u32) -> (Vec<f64>, f64) {
    let job = Job::new(layout(1, 1));
    let mut training = job.config.training.clone();
    training.precision = Precision::Fp64;
    (training.global_batch_size, training.micro_batch_size) = (6, micro_batch);
    let mut config = config.clone();
    config.router.aux_loss_scope = scope;
    let mut model = Model::new(&config, &layout(1, 1), 0, &training, 1).expect("a small arena");
    initialize(&mut model, 3);
    let vocabulary = config.vocab_size;
    let mut corpus =
        moe_worker::data::Corpus::open(&job.config.data, &training, vocabulary).expect("text");
    let mut engine = Engine::new(model, &training, Links::solo());
    let summary = engine.step(0, &mut corpus).expect("one rank");
    let model = &engine.model;
    let squares = model.buffers.buckets.iter().flat_map(|bucket| {
        model.device.read_vec::<f64>(bucket.square_sums)
    });
    (squares.collect(), summary.aux_loss)
}

/// A rank whose tokens are all dropped, and experts that get none, compute zeros, not nonsense.
#[test]
fn nothing_routed_is_a_layer_of_zeros() {
    let mut config = common::model();
    config.router.capacity_factor = 0.01;
    let mut training = common::training();
    (training.global_batch_size, training.micro_batch_size) = (1, 1);
    let mut model = Model::new(&config, &layout(1, 1), 0, &training, 1).expect("a small arena");
    initialize(&mut model, 3);
    let tokens = training.sequence_length as usize;
    let ids: Vec<u32> = (0..tokens as u32).map(|id| id % 7).collect();
    model.load(&ids, &ids);
    model.set_noise(Some(Noise { seed: 1, step: 0, micro_batch: 0 }));
    let (round, mut links) = (Round::alone(tokens), Links::solo());
    let mut gradients = BucketSums::new(&model);
    model.begin_step(&training, 0);
    let mut pass = Pass::new(&mut model, &mut links, &round);
    pass.forward();
    let leaf = gradients.leaf(&round);
    pass.loss(Some(&leaf));
    pass.backward(&leaf);
    gradients.push(&round, &mut model);
    model.keep_record(0);
    model.reduce_numbers(&mut links);
    let numbers = model.read_numbers(&training, 0);
    assert!(numbers.loss.is_finite());
    assert_eq!(numbers.dropped, numbers.loads, "all are dropped");
    assert_eq!(numbers.unrouted, 2 * tokens as u64);
    for index in 0..model.params.len() {
        let (gradient, name) = (common::gradient(&model, index), &model.params[index].name);
        assert!(gradient.iter().all(|x| x.is_finite()), "{name}");
        assert!(!name.contains("experts") || gradient.iter().all(|x| *x == 0.0), "{name}");
    }
}
