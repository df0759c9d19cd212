//! The router: the defaults of its kind, and what does not go together.

use crate::preset;
use crate::problem::{Code, Problem};
use crate::spec::{ModelSpec, RouterSpec, as_typed};
use moejob_protocol::ModelConfig;
use moejob_protocol::config::TrainingConfig;
use moejob_protocol::model::{AuxLossScope, BalanceLoss, RouterConfig, RouterKind, Scoring};

/// What is typed, over what the kind's source has.
pub fn fill(typed: &ModelSpec) -> RouterConfig {
    let mut router = typed.router.clone().unwrap_or_default();
    let top_k = typed.experts.as_ref().and_then(|experts| experts.per_token).unwrap_or(0);
    let base = of_kind(router.kind.map_or(RouterKind::TopK, |of| of.0), top_k);
    // Who sets the capacity means that of evaluation, too.
    router.eval_capacity_factor = router.eval_capacity_factor.or(router.capacity_factor);
    if router.balance_loss.map_or(base.balance_loss, |of| of.0) == BalanceLoss::None {
        router.aux_loss_coef = router.aux_loss_coef.or(Some(0.0));
    }
    if let Some(cosine) = &mut router.cosine {
        cosine.projection_size.get_or_insert(256);
        cosine.initial_temperature.get_or_insert(0.5);
    }
    // Both have the same fields, and what is typed is in their bounds.
    preset::over(&base, &router).unwrap_or(base)
}

/// What a kind's source has.
fn of_kind(kind: RouterKind, top_k: u32) -> RouterConfig {
    let plain = RouterConfig { kind, ..RouterConfig::default() };
    // Sources other than ST-MoE's heirs have no loss on the size of the logits.
    let base = RouterConfig { z_loss_coef: 0.0, ..plain.clone() };
    match kind {
        RouterKind::TopK => plain,
        RouterKind::Switch => RouterConfig {
            capacity_factor: 1.25,
            eval_capacity_factor: 2.0,
            jitter: 0.01,
            norm_topk_prob: false,
            ..base
        },
        RouterKind::Gshard => RouterConfig {
            capacity_factor: 1.0,
            eval_capacity_factor: 1.0,
            balance_loss: BalanceLoss::Gshard,
            ..base
        },
        RouterKind::Tutel => RouterConfig {
            capacity_factor: 1.0,
            eval_capacity_factor: 1.0,
            balance_loss: BalanceLoss::FirstChoice,
            norm_topk_prob: top_k > 1,
            ..base
        },
        RouterKind::NoisyTopK => {
            RouterConfig { balance_loss: BalanceLoss::CvSquared, aux_loss_coef: 0.1, ..base }
        }
        RouterKind::TopP => RouterConfig {
            top_p: 0.4,
            entropy_loss_coef: 1e-4,
            norm_topk_prob: false,
            ..base
        },
        RouterKind::ExpertChoice => RouterConfig {
            balance_loss: BalanceLoss::None,
            norm_topk_prob: false,
            ..base
        },
        RouterKind::Hash => RouterConfig { balance_loss: BalanceLoss::None, ..base },
    }
}

/// Everything about the router that does not go together.
pub fn problems(model: &ModelConfig, typed: Option<&RouterSpec>) -> Vec<Problem> {
    let typed = typed.cloned().unwrap_or_default();
    let mut broken = of_the_kind(model, &typed);
    broken.extend(of_losses(&model.router));
    broken.extend(of_options(&model.router));
    broken
}

/// Parts of a router that train by no gradient, or by none that says anything of the words, though
/// nothing in the manifest says that they are meant to stand still.
pub fn warnings(model: &ModelConfig, training: &TrainingConfig) -> Vec<Problem> {
    let (router, experts) = (&model.router, &model.experts);
    // Of one expert nothing can be learned.
    if experts.count < 2 {
        return Vec::new();
    }
    [alone(model), weightless(router), cold(router), late(router, training)]
        .into_iter()
        .flatten()
        .chain(without_room(model, training))
        .collect()
}

/// The weight of one expert over the sum of one is 1, whatever the router says of it.
fn alone(model: &ModelConfig) -> Option<Problem> {
    let (router, top_k) = (&model.router, model.experts.per_token);
    let of_choices = !matches!(router.kind, RouterKind::Hash | RouterKind::ExpertChoice);
    if top_k != 1 || !router.norm_topk_prob || !of_choices || router.frozen {
        return None;
    }
    let balance = router.balance_loss != BalanceLoss::None && router.aux_loss_coef > 0.0;
    let learns = balance || router.z_loss_coef > 0.0 || router.entropy_loss_coef > 0.0;
    let advice = match learns {
        true => {
            "the router learns from its own losses alone, and nothing of the words; set \
             normTopkProb: false"
        }
        false => {
            "the router never learns; set normTopkProb: false, or frozen: true if that is meant"
        }
    };
    Some(broken(
        "router.normTopkProb",
        "`true` with one expert a token, whose weight is 1 then",
        "false with one expert a token",
        advice,
    ))
}

/// Experts that count for nothing learn nothing.
fn weightless(router: &RouterConfig) -> Option<Problem> {
    let advice = "neither the experts nor the router learn; delete it";
    let none = router.scale == 0.0;
    none.then(|| broken("router.scale", "`0`, so that no expert counts", "above 0", advice))
}

/// The scale of cosines stops at 100 and has no gradient there; it is kept in fp32.
fn cold(router: &RouterConfig) -> Option<Problem> {
    let temperature = router.cosine.as_ref()?.initial_temperature;
    let stuck = f64::from((1.0 / temperature).ln() as f32) > SCALE_MAX.ln();
    stuck.then(|| {
        broken(
            "router.cosine.initialTemperature",
            format!("`{temperature}`, at which the scale begins at its bound of {SCALE_MAX}"),
            "above 0.01",
            "the scale never learns; raise it",
        )
    })
}

/// The largest scale of the cosine gate.
const SCALE_MAX: f64 = 100.0;

/// While the router warms up, experts keep their weights.
fn late(router: &RouterConfig, training: &TrainingConfig) -> Option<Problem> {
    let (warmup, steps) = (router.warmup_steps, training.steps);
    (warmup >= steps && steps > 0).then(|| {
        broken(
            "router.warmupSteps",
            format!("`{warmup}` of {steps} steps"),
            "less than training.steps",
            "the experts never learn; lower it, or raise training.steps",
        )
    })
}

/// A capacity that is rounded down to nothing.
fn without_room(model: &ModelConfig, training: &TrainingConfig) -> Vec<Problem> {
    let (router, experts) = (&model.router, &model.experts);
    let tokens = u64::from(training.micro_batch_size) * u64::from(training.sequence_length);
    let fields = [
        ("router.capacityFactor", router.capacity_factor, "no expert ever learns"),
        ("router.evalCapacityFactor", router.eval_capacity_factor, "no expert is ever evaluated"),
    ];
    let none = |factor: f64| {
        let room = router.capacity(factor, tokens, experts.count, experts.per_token);
        router.kind != RouterKind::ExpertChoice && room == Some(0)
    };
    let found = fields.into_iter().filter(|(_, factor, _)| none(*factor));
    found
        .map(|(field, factor, why)| {
            let given = format!("`{factor}`, of which none of {tokens} tokens has room");
            let advice = format!("{why}; raise it");
            broken(field, given, "so much that an expert takes a token", &advice)
        })
        .collect()
}

/// The field of the model, what stands there, what may, and what to do.
fn broken(
    field: &str,
    found: impl Into<String>,
    allowed: impl Into<String>,
    advice: &str,
) -> Problem {
    Problem::of(Code::Router, format!("spec.model.{field}"), found, allowed, advice)
}

fn of_the_kind(model: &ModelConfig, typed: &RouterSpec) -> Vec<Problem> {
    let (router, experts) = (&model.router, &model.experts);
    let needed = match router.kind {
        RouterKind::Switch => Some((1, "switch sends a token to one expert: set perToken: 1")),
        RouterKind::Gshard => Some((2, "gshard sends a token to two experts: set perToken: 2")),
        _ => None,
    };
    let kind = as_typed(router.kind);
    let mut found = Vec::new();
    if let Some((count, advice)) = needed.filter(|(count, _)| *count != experts.per_token) {
        let allowed = format!("{count} with router.kind {kind}");
        let given = format!("`{}`", experts.per_token);
        found.push(broken("experts.perToken", given, allowed, advice));
    }
    for (field, typed, its_kind) in [
        ("router.topP", typed.top_p.is_some(), RouterKind::TopP),
        ("router.hashSeed", typed.hash_seed.is_some(), RouterKind::Hash),
    ] {
        if typed && router.kind != its_kind {
            let allowed = format!("nothing but with router.kind {}", as_typed(its_kind));
            let advice = "delete it, or choose that kind";
            let given = format!("a value with router.kind {kind}");
            found.push(broken(field, given, allowed, advice));
        }
    }
    let ranked = matches!(router.kind, RouterKind::TopK | RouterKind::Tutel);
    let best = ranked || router.kind == RouterKind::Switch;
    let softmax = !matches!(router.kind, RouterKind::TopK | RouterKind::ExpertChoice);
    let hash = router.kind == RouterKind::Hash;
    let no_room = hash || router.kind == RouterKind::ExpertChoice;
    let refused = [
        ("router.scoring", softmax && router.scoring == Scoring::Sigmoid, "softmax"),
        ("router.bias", !ranked && router.bias, "false"),
        ("router.groups", !ranked && router.groups > 1, "1"),
        ("router.cosine", hash && router.cosine.is_some(), "nothing"),
        ("router.cosine", noisy(router) && router.cosine.is_some(), "nothing"),
        ("router.gateNoise", (hash || noisy(router)) && router.gate_noise > 0.0, "0"),
        ("router.jitter", (hash || noisy(router)) && router.jitter > 0.0, "0"),
        ("router.zLossCoef", hash && router.z_loss_coef > 0.0, "0"),
        ("router.entropyLossCoef", hash && router.entropy_loss_coef > 0.0, "0"),
        ("router.balanceLoss", hash && router.balance_loss != BalanceLoss::None, "none"),
        (
            "router.capacityFactor",
            router.kind == RouterKind::ExpertChoice && router.capacity_factor != 0.0,
            "0, since each expert takes perToken times its even share",
        ),
        ("router.batchPrioritized", no_room && router.batch_prioritized, "false"),
        ("router.hysteresis", !best && router.hysteresis > 0.0, "0"),
    ];
    for (field, _, allowed) in refused.into_iter().filter(|(_, applies, _)| *applies) {
        let given = format!("a value that router.kind {kind} does not have");
        let advice = "delete it, or choose another kind; docs/routers.md lists their options";
        found.push(broken(field, given, allowed, advice));
    }
    found
}

fn noisy(router: &RouterConfig) -> bool {
    router.kind == RouterKind::NoisyTopK
}

fn of_losses(router: &RouterConfig) -> Vec<Problem> {
    let mut found = Vec::new();
    let loss = router.balance_loss;
    if loss == BalanceLoss::CvSquared && !noisy(router) {
        found.push(broken(
            "router.balanceLoss",
            "`cvSquared`",
            "cvSquared with router.kind noisyTopK, whose noise it is about",
            "choose switch, kl or another loss, or that kind",
        ));
    }
    let top_k = matches!(router.kind, RouterKind::TopK | RouterKind::Switch | RouterKind::Tutel);
    let noise = router.gate_noise > 0.0 && router.scoring == Scoring::Softmax;
    if loss == BalanceLoss::LoadImportance && !(top_k && noise) {
        found.push(broken(
            "router.balanceLoss",
            "`loadImportance`",
            "loadImportance with gateNoise above 0, softmax, and kind topK or tutel",
            "set gateNoise: 1.0, or choose another loss",
        ));
    }
    if loss == BalanceLoss::LoadImportance && router.hysteresis > 0.0 {
        found.push(broken(
            "router.hysteresis",
            format!("`{}` with balanceLoss loadImportance", router.hysteresis),
            "0, since its load is the chance to be among the K largest logits",
            "choose switch, kl or another loss, or delete hysteresis",
        ));
    }
    if loss == BalanceLoss::None && router.aux_loss_coef > 0.0 {
        found.push(broken(
            "router.auxLossCoef",
            format!("`{}`", router.aux_loss_coef),
            "0 without a balanceLoss",
            "delete it, or choose a balanceLoss",
        ));
    }
    let micro_batch =
        RouterConfig { aux_loss_scope: AuxLossScope::MicroBatch, ..router.clone() };
    if let (AuxLossScope::Hf, Some(field)) = (router.aux_loss_scope, micro_batch.beyond_plain()) {
        found.push(broken(
            "router.auxLossScope",
            format!("`hf` with router.{field}"),
            "hf with dropless top-k and balanceLoss switch alone",
            "choose microBatch, sequence or global",
        ));
    }
    found
}

fn of_options(router: &RouterConfig) -> Option<Problem> {
    let no_room = matches!(router.kind, RouterKind::Hash | RouterKind::ExpertChoice);
    let idle = router.batch_prioritized && router.capacity_factor == 0.0 && !no_room;
    idle.then(|| {
        broken(
            "router.batchPrioritized",
            "`true` where every token has room",
            "true with a capacityFactor other than 0",
            "set capacityFactor: 1.0, or delete it",
        )
    })
}
