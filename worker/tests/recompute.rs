//! Activations that backward computes again: less memory, the same bits.

mod common;

use common::{Job, bits, route_like_deepseek, state_hash, trainers};
use moe_worker::attempt::api::AttemptEnd;
use moejob_protocol::config::Recompute;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::rank_memory;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{AuxLossScope, BalanceLoss, ModelConfig, QkNorm, RouterKind};

fn layout(dp: u32, ep: u32) -> Layout {
    Layout::contiguous(Mesh::data_parallel(dp, ep))
}

fn train(
    layout: Layout,
    change: &impl Fn(&mut ModelConfig),
    recompute: Recompute,
) -> (Vec<[u64; 5]>, String) {
    let mut job = Job::new(layout);
    let world = job.config.layout.mesh.world();
    job.config.training.steps = 4;
    job.config.training.recompute = recompute;
    change(&mut job.config.model);
    let (ends, reports) = job.run(&mut trainers(world), None);
    assert!(ends.iter().all(|end| *end == AttemptEnd::Completed { step: 4 }), "{ends:?}");
    (bits(&reports), state_hash(&job.location().join("step-00000004")))
}

const KINDS: [Recompute; 5] = [
    Recompute::Selective,
    Recompute::Experts,
    Recompute::Full,
    Recompute::Every(2),
    Recompute::Every(3),
];

fn check(name: &str, change: impl Fn(&mut ModelConfig)) {
    let change = |model: &mut ModelConfig| {
        model.num_hidden_layers = 5;
        change(model);
    };
    let one = train(layout(1, 1), &change, Recompute::None);
    for recompute in KINDS {
        for layout in [layout(1, 1), layout(3, 3)] {
            let found = train(layout.clone(), &change, recompute);
            assert_eq!(found, one, "{name}: {recompute:?}, {layout:?}");
        }
    }
}

#[test]
fn plain_layers() {
    check("plain", |_| {});
}

#[test]
fn norms_of_queries_and_keys() {
    check("per head", |model| model.qk_norm = QkNorm::PerHead);
    check("clamped", |model| {
        (model.qk_norm, model.clip_qkv) = (QkNorm::Full, 0.05);
    });
}

#[test]
fn layers_of_several_kinds() {
    check("deepseek", |model| {
        route_like_deepseek(model);
        model.num_hidden_layers = 5;
        model.dense_layers = vec![0, 3];
    });
}

#[test]
fn other_balances_and_noise() {
    check("hf", |model| {
        model.router.aux_loss_scope = AuxLossScope::Hf;
        model.router.aux_loss_coef = 0.5;
    });
    check("tutel", |model| {
        let router = &mut model.router;
        (router.kind, router.capacity_factor) = (RouterKind::Tutel, 1.1);
        (router.jitter, router.input_dropout, router.gate_noise) = (0.1, 0.2, 1.0);
        router.balance_loss = BalanceLoss::LoadImportance;
        router.aux_loss_scope = AuxLossScope::Global;
    });
}

/// Bytes of activations of the parts that the plan counts.
fn activations(recompute: Recompute, layers: u32) -> u64 {
    let mut config = Job::new(layout(1, 1)).config;
    config.model.num_hidden_layers = layers;
    config.model.qk_norm = QkNorm::PerHead;
    config.training.recompute = recompute;
    let (model, layout, training) = (&config.model, &config.layout, &config.training);
    let memory = rank_memory(model, layout, 0, training, &config.recovery, 4, None);
    memory.parts.iter().find(|part| part.name == "activations").expect("a part").bytes
}

#[test]
fn what_is_computed_again_needs_no_memory() {
    let of = |recompute| activations(recompute, 12);
    let none = of(Recompute::None);
    let [selective, experts, full, pairs, _] = KINDS.map(of);
    assert!(selective < none && experts < selective && full < experts, "{none} {selective}");
    assert!(full < pairs && pairs < none, "{full} {pairs} {none}");
    // A layer's input is all that remains of it, and small counts.
    let grows = activations(Recompute::Full, 24) - full;
    let tokens = common::training().sequence_length;
    let input = 12 * u64::from(tokens) * 16 * 4;
    assert!(grows >= input && grows < 2 * input, "{grows} bytes for 12 inputs of {input}");
    assert_eq!(of(Recompute::Every(12)), none);
    assert_eq!(of(Recompute::Every(u32::MAX)), none);
}
