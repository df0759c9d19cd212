//! The written-out backward pass against finite differences, in f64.

mod common;

use moe_worker::engine::gate::Noise;
use moe_worker::engine::buckets::BucketSums;
use moe_worker::engine::model::Model;
use moe_worker::engine::forward::Pass;
use moe_worker::engine::links::Links;
use moe_worker::engine::round::Round;
use moe_worker::state::snapshot::initialize;
use moejob_protocol::config::{Precision, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{
    Activation, AuxLossScope, BalanceLoss, CosineConfig, ModelConfig, QkNorm, RouterKind, Scoring,
};

const SEQUENCE: usize = 6;
const BATCH: usize = 2;

struct Bench {
    model: Model,
    gradients: BucketSums,
    round: Round,
    links: Links,
    training: TrainingConfig,
    aux: f64,
    z: f64,
    entropy: f64,
}

impl Bench {
    fn new(config: &ModelConfig) -> Bench {
        let mut training = common::training();
        training.precision = Precision::Fp64;
        training.global_batch_size = BATCH as u32;
        training.micro_batch_size = BATCH as u32;
        training.sequence_length = SEQUENCE as u32;
        let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
        let mut model = Model::new(config, &layout, 0, &training, 1).expect("a small arena");
        initialize(&mut model, 11);
        let tokens = BATCH * SEQUENCE;
        let ids: Vec<u32> = (0..tokens as u32).map(|i| i * 7 % 13).collect();
        let targets: Vec<u32> = (0..tokens as u32).map(|i| (i * 5 + 1) % 13).collect();
        model.load(&ids, &targets);
        model.set_noise(Some(Noise { seed: 5, step: 3, micro_batch: 0 }));
        let gradients = BucketSums::new(&model);
        let round = Round::alone(tokens);
        let mixture = model.buffers.layers.iter().filter(|layer| layer.fused.is_some()).count();
        let scale = 1.0 / mixture.max(1) as f64;
        Bench {
            aux: config.router.aux_loss_coef * scale,
            z: config.router.z_loss_coef * scale,
            entropy: config.router.entropy_loss_coef * scale,
            model,
            gradients,
            round,
            links: Links::solo(),
            training,
        }
    }

    /// What the gradients are the gradients of.
    fn objective(&mut self) -> f64 {
        self.model.begin_step(&self.training, 0);
        self.model.begin_record();
        let mut pass = Pass::new(&mut self.model, &mut self.links, &self.round);
        pass.forward();
        pass.loss(None);
        let [loss, _, aux, z, entropy] = self.model.read_record();
        loss / (BATCH * SEQUENCE) as f64 + self.aux * aux + self.z * z + self.entropy * entropy
    }

    /// The analytic gradient of every parameter.
    fn backward(&mut self) -> Vec<Vec<f64>> {
        self.model.begin_step(&self.training, 0);
        self.gradients.clear();
        let mut pass = Pass::new(&mut self.model, &mut self.links, &self.round);
        pass.forward();
        let leaf = self.gradients.leaf(&self.round);
        pass.loss(Some(&leaf));
        pass.backward(&leaf);
        self.gradients.push(&self.round, &mut self.model);
        (0..self.model.params.len()).map(|index| common::gradient(&self.model, index)).collect()
    }

    fn change(&mut self, index: usize, element: usize, by: f64) {
        let weight = self.model.weight(index).expect("one rank holds everything");
        let at = weight.slice(element, 1);
        let mut value = [0.0];
        self.model.device.read(at, &mut value);
        self.model.device.write(at, &[value[0] + by]);
    }
}

/// Compares the elements of each parameter whose gradients are largest, and a few others.
fn check(name: &str, change: impl FnOnce(&mut ModelConfig)) {
    let mut config = common::model();
    config.vocab_size = 13;
    config.initializer_range = 0.3;
    change(&mut config);
    let mut bench = Bench::new(&config);
    let gradients = bench.backward();
    let h = 1e-5;
    let mut compared = 0;
    for (index, gradient) in gradients.iter().enumerate() {
        let param = bench.model.params[index].name.clone();
        let mut order: Vec<usize> = (0..gradient.len()).collect();
        order.sort_by(|a, b| gradient[*b].abs().total_cmp(&gradient[*a].abs()));
        let few = order.len() / 2;
        let elements = order[..order.len().min(3)].iter().chain(&order[few..=few]);
        for element in elements.copied().collect::<Vec<_>>() {
            bench.change(index, element, h);
            let above = bench.objective();
            bench.change(index, element, -2.0 * h);
            let below = bench.objective();
            bench.change(index, element, h);
            let expected = (above - below) / (2.0 * h);
            let found = gradient[element];
            let error = (found - expected).abs() / (1e-4 + expected.abs());
            assert!(error < 1e-5, "{name}: {param}[{element}]: {found}, expected {expected}");
            compared += 1;
        }
    }
    let moving = gradients.iter().filter(|gradient| gradient.iter().any(|x| *x != 0.0)).count();
    let frozen = if config.router.frozen { config.num_hidden_layers as usize } else { 0 };
    assert!(moving + frozen + 6 >= gradients.len(), "{name}: {moving} of {}", gradients.len());
    assert!(compared >= gradients.len(), "{name}: {compared} elements compared");
}

#[test]
fn tied_with_grouped_queries() {
    check("tied", |_| {});
}

#[test]
fn untied_with_biases_and_raw_weights() {
    check("untied", |config| {
        config.tie_word_embeddings = false;
        config.attention_bias = true;
        config.router.norm_topk_prob = false;
    });
}

#[test]
fn norms_of_queries_and_keys() {
    check("per head", |config| config.qk_norm = QkNorm::PerHead);
    check("full", |config| {
        config.qk_norm = QkNorm::Full;
        config.num_key_value_heads = 2;
    });
}

#[test]
fn clamped_queries_keys_and_values() {
    check("clamped", |config| config.clip_qkv = 0.8);
    check("clamped after a norm", |config| {
        config.clip_qkv = 0.9;
        config.qk_norm = QkNorm::Full;
    });
}

#[test]
fn dense_layers_and_shared_experts() {
    check("dense", |config| config.dense_layers = vec![0]);
    check("shared", |config| config.experts.shared = 2);
}

#[test]
fn one_auxiliary_loss_over_all_layers() {
    check("hf", |config| {
        config.num_hidden_layers = 3;
        config.dense_layers = vec![1];
        config.router.aux_loss_scope = AuxLossScope::Hf;
        config.router.aux_loss_coef = 0.5;
    });
}

#[test]
fn other_routers() {
    check("one expert", |config| {
        config.experts.count = 1;
        config.experts.per_token = 1;
    });
    check("relu, all experts", |config| {
        config.experts.per_token = 4;
        config.experts.activation = Activation::Relu;
    });
    check("sigmoid in groups", |config| {
        config.router.scoring = Scoring::Sigmoid;
        config.router.groups = 2;
        config.router.topk_groups = 1;
        config.router.scale = 2.5;
    });
}

/// Every router of the field, with all of its noise: the whole model's gradients.
#[test]
fn routers_of_the_field() {
    let cosine = Some(CosineConfig { projection_size: 5, initial_temperature: 0.5 });
    let large = |config: &mut ModelConfig, kind, loss| {
        config.router.kind = kind;
        config.router.balance_loss = loss;
        config.router.aux_loss_coef = 0.5;
    };
    check("switch", |config| {
        large(config, RouterKind::Switch, BalanceLoss::Switch);
        config.experts.per_token = 1;
        config.router.norm_topk_prob = false;
        (config.router.capacity_factor, config.router.jitter) = (1.0, 0.2);
    });
    check("gshard", |config| {
        large(config, RouterKind::Gshard, BalanceLoss::Gshard);
        (config.router.capacity_factor, config.router.aux_loss_coef) = (0.9, 5.0);
    });
    check("tutel", |config| {
        large(config, RouterKind::Tutel, BalanceLoss::LoadImportance);
        config.router.capacity_factor = -1.1;
        (config.router.jitter, config.router.input_dropout) = (0.1, 0.2);
        (config.router.gate_noise, config.router.batch_prioritized) = (1.0, true);
    });
    check("cosine", |config| {
        large(config, RouterKind::Tutel, BalanceLoss::FirstChoice);
        (config.router.jitter, config.router.cosine) = (0.1, cosine.clone());
    });
    check("noisy", |config| large(config, RouterKind::NoisyTopK, BalanceLoss::CvSquared));
    check("top-p", |config| {
        large(config, RouterKind::TopP, BalanceLoss::Kl);
        (config.router.top_p, config.router.entropy_loss_coef) = (0.5, 0.3);
        (config.experts.per_token, config.router.norm_topk_prob) = (3, false);
    });
    check("experts choose", |config| {
        large(config, RouterKind::ExpertChoice, BalanceLoss::Kl);
        config.router.norm_topk_prob = false;
    });
    check("hash", |config| large(config, RouterKind::Hash, BalanceLoss::None));
    check("hysteresis", |config| {
        large(config, RouterKind::TopK, BalanceLoss::Switch);
        (config.router.hysteresis, config.router.bias) = (0.05, true);
        config.router.capacity_factor = 1.1;
    });
    check("sequences", |config| {
        large(config, RouterKind::TopK, BalanceLoss::Switch);
        config.router.aux_loss_scope = AuxLossScope::Sequence;
        config.router.scoring = Scoring::Sigmoid;
    });
}

/// Experts in slices, behind all kinds of choices.
#[test]
fn experts_in_slices() {
    for slices in [2, 4] {
        check("slices", |config| config.experts.slices = slices);
        check("slices, raw weights", |config| {
            (config.experts.slices, config.experts.activation) = (slices, Activation::Gelu);
            config.router.norm_topk_prob = false;
        });
        check("slices, dropped choices", |config| {
            (config.experts.slices, config.router.kind) = (slices, RouterKind::Gshard);
            config.router.capacity_factor = 0.9;
        });
        check("slices, experts choose", |config| {
            (config.experts.slices, config.router.kind) = (slices, RouterKind::ExpertChoice);
            config.router.norm_topk_prob = false;
        });
    }
}

/// Element by element the gradients of whole experts, but for the order of sums.
#[test]
fn gradients_of_slices_are_those_of_whole_experts() {
    for kind in [RouterKind::TopK, RouterKind::TopP, RouterKind::ExpertChoice, RouterKind::Tutel] {
        let mut config = common::model();
        (config.vocab_size, config.initializer_range) = (13, 0.3);
        (config.router.kind, config.router.top_p) = (kind, 0.5);
        config.experts.per_token = 3;
        config.router.norm_topk_prob = kind == RouterKind::TopK;
        let mut whole = Bench::new(&config);
        let (objective, expected) = (whole.objective(), whole.backward());
        let place = |name: &str| {
            let found = whole.model.params.iter().position(|param| param.name == name);
            found.expect("a tensor of whole experts")
        };
        for slices in [2, 4, 8] {
            let config = config.in_slices(slices);
            let mut sliced = Bench::new(&config);
            let away = (sliced.objective() - objective).abs();
            assert!(away < 1e-13 * objective, "{kind:?}, {slices} slices: {away:e}");
            let found = sliced.backward();
            for (param, found) in sliced.model.params.iter().zip(found) {
                let cut = config.cut(param);
                let name = cut.as_ref().map_or(&param.name, |cut| &cut.whole);
                let expected = &expected[place(name)];
                let size = expected.iter().fold(0.0, |size: f64, x| size.max(x.abs()));
                for (at, found) in (0..).zip(found) {
                    let at = cut.as_ref().map_or(at, |cut| cut.element(at)) as usize;
                    let away = (found - expected[at]).abs();
                    assert!(away <= 1e-12 * size, "{kind:?} {}[{at}]: {away:e}", param.name);
                }
            }
        }
    }
}
