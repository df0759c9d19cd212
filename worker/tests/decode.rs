//! Text, token after token: what the cache knows is what a pass over the whole text computes, for
//! every family and every router; and what cannot be generated is refused by name.

mod common;

use common::{fit_gpus, has_gpu};
use common::reference::Reference;
use moe_worker::engine::computer::Computer;
use moe_worker::engine::decode::{DecodeError, Decoder};
use moe_worker::engine::forward::Pass;
use moe_worker::engine::links::Links;
use moe_worker::engine::model::Model;
use moe_worker::engine::round::{Aim, Round};
use moe_worker::engine::sample::Sampling;
use moe_worker::state::rank::RankState;
use moe_worker::state::snapshot::initialize;
use moejob_protocol::config::Precision;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{
    AuxLossScope, BalanceLoss, CosineConfig, ModelConfig, RouterConfig, RouterKind, Scoring,
};
use std::path::Path;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/../tests/parity/data");
const FAMILIES: [&str; 4] = ["mixtral", "qwen3_moe", "olmoe", "glm4_moe"];

/// Fills a model's memory, where it lies in f64.
type Fill<'a> = &'a dyn Fn(&mut Model);

/// The logits [V] behind each of `ids`, from one pass over all of them.
fn whole(config: &ModelConfig, fill: Fill, ids: &[u32]) -> Vec<Vec<f64>> {
    let mut training = common::training();
    (training.global_batch_size, training.micro_batch_size) = (1, 1);
    (training.sequence_length, training.precision) = (ids.len() as u32, Precision::Fp64);
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let mut model = Model::new(config, &layout, 0, &training, 1).expect("a small arena");
    fill(&mut model);
    model.load(ids, ids);
    let round = Round { aim: Aim::Activations, ..Round::alone(ids.len()) };
    Pass::new(&mut model, &mut Links::solo(), &round).forward();
    let named = |name: &str| model.params.iter().position(|param| param.name == name);
    let table = named("lm_head.weight").or(named("model.embed_tokens.weight"));
    let table = model.weight(table.expect("a head")).expect("one rank holds all");
    let (table, x) = (model.device.read_vec::<f64>(table), model.buffers.head.norm);
    let (x, d) = (model.device.read_vec::<f64>(x), config.hidden_size as usize);
    let row = |x: &[f64]| {
        let dot = |w: &[f64]| x.iter().zip(w).fold(0.0, |sum, (x, w)| x.mul_add(*w, sum));
        table.chunks_exact(d).map(dot).collect()
    };
    x.chunks_exact(d).map(row).collect()
}

fn on_processors(precision: Precision, threads: usize) -> Computer {
    Computer::Processors { threads, precision }
}

fn decoder(config: &ModelConfig, fill: Fill, capacity: usize, threads: usize) -> Decoder {
    let opened = Decoder::empty(config, capacity as u32, on_processors(Precision::Fp64, threads));
    let mut decoder = opened.expect("a small arena");
    fill(decoder.model_mut());
    decoder
}

/// A prompt in one piece, the rest a token at a time, or a few: the same bits every time.
fn same_as_whole(name: &str, config: &ModelConfig, fill: Fill, ids: &[u32]) {
    let expected = whole(config, fill, ids);
    let mut decoder = decoder(config, fill, ids.len(), 2);
    for pieces in [&[1][..], &[7, 1, 1, 1, 5], &[ids.len()], &[3, 260, 1]] {
        decoder.forget();
        let (mut at, mut pieces) = (0, pieces.iter().cycle());
        while at < ids.len() {
            let next = ids.len().min(at + pieces.next().expect("a cycle"));
            let found = decoder.feed(&ids[at..next]).expect("a token");
            let largest = expected[next - 1].iter().fold(0.0_f64, |most, x| most.max(x.abs()));
            for (found, expected) in found.iter().zip(&expected[next - 1]) {
                let error = (found - expected).abs() / largest;
                assert!(error <= 1e-12, "{name}, token {next}: {found} and {expected}");
            }
            at = next;
        }
    }
    let refused = decoder.feed(&ids[..1]);
    assert!(matches!(refused, Err(DecodeError::Full { .. })), "{name}: {refused:?}");
}

fn text(vocabulary: u32, len: usize) -> Vec<u32> {
    (0..len as u32).map(|at| (at * at * 7 + at / 3 * 5 + 11) % vocabulary).collect()
}

fn reference(name: &str) -> Reference {
    Reference::open(&Path::new(FOLDER).join(format!("{name}.safetensors")))
}

/// The reference's initial weights.
fn given(reference: &Reference, model: &mut Model) {
    for index in 0..model.params.len() {
        let name = format!("initial/{}", model.params[index].name);
        let weight = model.weight(index).expect("one rank holds everything");
        model.device.write(weight, reference.get(&name));
    }
}

#[test]
fn every_family_computes_with_a_cache_what_it_computes_without() {
    for name in FAMILIES {
        let reference = reference(name);
        let config = &reference.config;
        let fill = |model: &mut Model| given(&reference, model);
        // More than a chunk of the products' sums, and more than pass at once.
        same_as_whole(name, config, &fill, &text(config.vocab_size, 300));
    }
}

fn routers() -> Vec<(&'static str, RouterConfig)> {
    let of = |kind| RouterConfig { kind, ..RouterConfig::default() };
    let top_k = || of(RouterKind::TopK);
    let cosine = CosineConfig { projection_size: 6, initial_temperature: 0.5 };
    vec![
        ("topK", top_k()),
        ("sigmoid", RouterConfig { scoring: Scoring::Sigmoid, bias: true, ..top_k() }),
        ("groups", RouterConfig { groups: 2, topk_groups: 1, scale: 2.5, ..top_k() }),
        ("switch", RouterConfig { jitter: 0.1, capacity_factor: 1.0, ..of(RouterKind::Switch) }),
        ("sequence", RouterConfig { aux_loss_scope: AuxLossScope::Sequence, ..top_k() }),
        ("global", RouterConfig { aux_loss_scope: AuxLossScope::Global, ..top_k() }),
        ("gshard", RouterConfig { balance_loss: BalanceLoss::Gshard, ..of(RouterKind::Gshard) }),
        ("tutel", RouterConfig { input_dropout: 0.1, gate_noise: 1.0, ..of(RouterKind::Tutel) }),
        ("cosine", RouterConfig { cosine: Some(cosine), ..of(RouterKind::Tutel) }),
        ("noisyTopK", of(RouterKind::NoisyTopK)),
        ("topP", RouterConfig { top_p: 0.45, norm_topk_prob: false, ..of(RouterKind::TopP) }),
        ("hash", of(RouterKind::Hash)),
        ("hysteresis", RouterConfig { hysteresis: 0.02, ..top_k() }),
        ("held for good", RouterConfig { hysteresis: 1000.0, bias: true, ..top_k() }),
    ]
}

fn tiny(router: RouterConfig) -> ModelConfig {
    let mut config = common::model();
    config.initializer_range = 0.3;
    config.experts.shared = 1;
    config.router = router;
    config
}

#[test]
fn every_router_does() {
    let fill = |model: &mut Model| initialize(model, 5);
    for (name, router) in routers() {
        same_as_whole(name, &tiny(router), &fill, &text(256, 40));
    }
}

/// What a router holds on to is part of what is remembered: without it other experts answer.
#[test]
fn a_router_that_holds_on_to_experts_remembers_them() {
    let fill = |model: &mut Model| initialize(model, 5);
    let config = tiny(RouterConfig { hysteresis: 1000.0, ..RouterConfig::default() });
    let ids = text(256, 20);
    let mut decoder = decoder(&config, &fill, 40, 1);
    decoder.feed(&ids[..10]).expect("a token");
    let held = decoder.feed(&ids[10..]).expect("a token");
    decoder.forget();
    let mut plain = config.clone();
    plain.router.hysteresis = 0.0;
    let without = Decoder::empty(&plain, 40, on_processors(Precision::Fp64, 1));
    let mut without = without.expect("a small arena");
    fill(without.model_mut());
    without.feed(&ids[..10]).expect("a token");
    assert_ne!(held, without.feed(&ids[10..]).expect("a token"));
    decoder.feed(&ids).expect("a token");
    decoder.forget();
    decoder.feed(&ids[..10]).expect("a token");
    assert_eq!(held, decoder.feed(&ids[10..]).expect("a token"), "a new text begins anew");
}

#[test]
fn experts_that_choose_among_a_whole_text_are_refused_by_name() {
    let router = RouterConfig {
        kind: RouterKind::ExpertChoice,
        balance_loss: BalanceLoss::None,
        aux_loss_coef: 0.0,
        ..RouterConfig::default()
    };
    let refused = Decoder::empty(&tiny(router), 10, on_processors(Precision::Fp32, 1));
    let refused = refused.expect_err("is refused");
    assert!(refused.to_string().contains("`expertChoice`"), "{refused}");
    let fill = |model: &mut Model| initialize(model, 5);
    let mut decoder = decoder(&tiny(RouterConfig::default()), &fill, 10, 1);
    let unknown = decoder.feed(&[1, 256]).expect_err("is none of its tokens");
    assert!(matches!(unknown, DecodeError::Unknown { id: 256, vocabulary: 256 }), "{unknown}");
    assert!(decoder.is_empty() && decoder.room() == 10, "nothing has happened");
}

/// 200 tokens, the likeliest every time, one by one: those that a pass over all of them finds,
/// which `parity.rs` holds against `transformers`.
#[test]
fn the_likeliest_tokens_are_those_of_a_pass_over_the_whole_text() {
    for name in FAMILIES {
        let reference = reference(name);
        let (config, prompt) = (&reference.config, 5);
        let fill = |model: &mut Model| given(&reference, model);
        let mut decoder = decoder(config, &fill, prompt + 200, 1);
        let mut ids = text(config.vocab_size, prompt);
        let mut next = ids.clone();
        for at in 0..200 {
            let logits = decoder.feed(&next).expect("a token");
            next = vec![Sampling::GREEDY.choose(&logits, at)];
            ids.extend(&next);
        }
        let logits = whole(config, &fill, &ids);
        for (at, logits) in logits.iter().enumerate().skip(prompt - 1).take(200) {
            assert_eq!(ids[at + 1], Sampling::GREEDY.choose(logits, 0), "{name}, token {at}");
        }
    }
}

/// What `tests/parity/greedy.py` wrote: 200 tokens of `transformers`, in f64 with its own cache.
#[test]
fn the_likeliest_tokens_are_those_of_transformers() {
    let text = std::fs::read(Path::new(FOLDER).join("greedy.json")).expect("greedy.json");
    let kept: serde_json::Value = serde_json::from_slice(&text).expect("JSON");
    let ids = |of: &serde_json::Value| -> Vec<u32> {
        let ids = of.as_array().expect("a list").iter();
        ids.map(|id| id.as_u64().expect("an id") as u32).collect()
    };
    for name in FAMILIES {
        let reference = reference(name);
        let fill = |model: &mut Model| given(&reference, model);
        let of = &kept["families"][name];
        let (prompt, expected) = (ids(&of["prompt"]), ids(&of["tokens"]));
        assert_eq!(expected.len(), 200, "{name}");
        let mut decoder = decoder(&reference.config, &fill, prompt.len() + 200, 1);
        let (mut next, mut found) = (prompt, Vec::<u32>::new());
        for at in 0..200 {
            let logits = decoder.feed(&next).expect("a token");
            next = vec![Sampling::GREEDY.choose(&logits, at)];
            found.extend(&next);
        }
        assert_eq!(found, expected, "{name}");
    }
}

fn opened(config: &ModelConfig, computer: Computer) -> Decoder {
    let mut decoder = Decoder::empty(config, 600, computer).expect("a small arena");
    initialize(decoder.model_mut(), 5);
    decoder.model_mut().finish().expect("a state");
    decoder
}

/// `count` of the likeliest tokens behind `prompt` by processors in fp32, with their logits.
fn likeliest(config: &ModelConfig, prompt: &[u32], count: u64) -> Vec<(u32, Vec<f64>)> {
    let (mut processors, mut next) =
        (opened(config, on_processors(Precision::Fp32, 2)), prompt.to_vec());
    let each = |at| {
        let logits = processors.feed(&next).expect("a token");
        next = vec![Sampling::GREEDY.choose(&logits, at)];
        (next[0], logits)
    };
    (0..count).map(each).collect()
}

/// How far apart a GPU's logits behind the same tokens are, relative to the largest of them, and
/// whether the likeliest token is that of processors.
fn on_gpu(
    config: &ModelConfig,
    precision: Precision,
    prompt: &[u32],
    expected: &[(u32, Vec<f64>)],
) -> Vec<(f64, bool)> {
    let (mut gpu, mut next) = (opened(config, Computer::Gpu { precision }), prompt.to_vec());
    let each = |(token, expected): &(u32, Vec<f64>)| {
        let found = gpu.feed(&next).expect("a token");
        let distance = |(found, expected): (&f64, &f64)| (found - expected).abs();
        let largest = expected.iter().fold(0.0_f64, |most, x| most.max(x.abs()));
        let apart = found.iter().zip(expected).map(distance).fold(0.0, f64::max) / largest;
        next = vec![*token];
        (apart, Sampling::GREEDY.choose(&found, 0) == *token)
    };
    expected.iter().map(each).collect()
}

/// The likeliest tokens of a GPU in fp32 are those of processors, over more than one part of keys,
/// and its numbers of 16 bits come near.
#[test]
fn a_gpu_generates_what_processors_do() {
    if !has_gpu() {
        return;
    }
    let mut config = common::model();
    fit_gpus(&mut config);
    config.initializer_range = 0.1;
    let prompt = text(config.vocab_size, 300);
    let expected = likeliest(&config, &prompt, 300);
    // Choices of experts that lie close flip in numbers of fewer bits.
    for (precision, most, flips) in [
        (Precision::Fp32, 1e-4, 0),
        (Precision::Tf32, 2e-2, 30),
        (Precision::Bf16, 1e-1, 30),
        (Precision::Fp16, 2e-2, 30),
    ] {
        let found = on_gpu(&config, precision, &prompt, &expected);
        let far = found.iter().filter(|(apart, _)| *apart >= most).count();
        assert!(far <= flips, "{precision:?}: {far} of 300 tokens are {most:e} apart or more");
        let same = found.iter().all(|(_, is_same)| *is_same);
        assert!(same || precision != Precision::Fp32, "{precision:?}: other tokens");
    }
}

#[test]
fn every_router_generates_on_a_gpu() {
    if !has_gpu() {
        return;
    }
    for (name, router) in routers() {
        let mut config = common::model();
        fit_gpus(&mut config);
        (config.initializer_range, config.router) = (0.1, router);
        let prompt = text(config.vocab_size, 50);
        let expected = likeliest(&config, &prompt, 40);
        let found = on_gpu(&config, Precision::Fp32, &prompt, &expected);
        // A choice that flips is as far as another expert is.
        let far = found.iter().filter(|(apart, _)| *apart >= 1e-4).count();
        assert!(far <= 2, "{name}: {far} of 40 tokens are apart: {found:?}");
    }
}
