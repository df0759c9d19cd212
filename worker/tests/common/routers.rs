//! Routers, each with everything it has.

use moejob_protocol::model::{
    AuxLossScope, BalanceLoss, CosineConfig, RouterConfig, RouterKind,
};

/// Names, experts a token, and routers.
pub fn routers() -> Vec<(&'static str, u32, RouterConfig)> {
    let of = |kind, balance_loss| RouterConfig {
        kind,
        balance_loss,
        aux_loss_coef: if balance_loss == BalanceLoss::None { 0.0 } else { 0.02 },
        ..RouterConfig::default()
    };
    let capacity = |factor, config: RouterConfig| RouterConfig {
        capacity_factor: factor,
        eval_capacity_factor: factor,
        ..config
    };
    let switch = RouterConfig {
        jitter: 0.1,
        norm_topk_prob: false,
        aux_loss_scope: AuxLossScope::Sequence,
        ..capacity(1.0, of(RouterKind::Switch, BalanceLoss::Switch))
    };
    let tutel = RouterConfig {
        jitter: 0.05,
        input_dropout: 0.1,
        gate_noise: 1.0,
        batch_prioritized: true,
        cosine: Some(CosineConfig { projection_size: 6, initial_temperature: 0.5 }),
        ..capacity(-1.0, of(RouterKind::Tutel, BalanceLoss::LoadImportance))
    };
    let top_p = RouterConfig {
        top_p: 0.45,
        entropy_loss_coef: 0.01,
        norm_topk_prob: false,
        aux_loss_scope: AuxLossScope::Global,
        ..of(RouterKind::TopP, BalanceLoss::Kl)
    };
    let global = RouterConfig {
        aux_loss_scope: AuxLossScope::Global,
        bias: true,
        ..of(RouterKind::TopK, BalanceLoss::Switch)
    };
    let hysteresis = RouterConfig {
        hysteresis: 0.01,
        bias: true,
        jitter: 0.1,
        ..capacity(1.2, of(RouterKind::TopK, BalanceLoss::Switch))
    };
    let all_layers = RouterConfig {
        aux_loss_scope: AuxLossScope::Hf,
        ..of(RouterKind::TopK, BalanceLoss::Switch)
    };
    vec![
        ("switch", 1, switch),
        ("gshard", 2, capacity(0.8, of(RouterKind::Gshard, BalanceLoss::Gshard))),
        ("tutel", 2, tutel),
        ("noisy", 2, of(RouterKind::NoisyTopK, BalanceLoss::CvSquared)),
        ("top-p", 3, top_p),
        ("experts choose", 2, of(RouterKind::ExpertChoice, BalanceLoss::None)),
        ("hash", 2, of(RouterKind::Hash, BalanceLoss::None)),
        ("global", 2, global),
        ("hysteresis", 2, hysteresis),
        ("all layers", 2, all_layers),
    ]
}
