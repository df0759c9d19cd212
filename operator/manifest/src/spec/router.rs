//! The router as typed. docs/routers.md has each one's equations and sources.

use super::Word;
use kube_derive::KubeSchema;
use moejob_protocol::model::{AuxLossScope, BalanceLoss, RouterKind, Scoring};
use serde::{Deserialize, Serialize};

/// The router of a layer. A kind brings the defaults of its source with it.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(
    crates(kube_core = "::kube_core"),
    validation = Rule::new("!has(self.topP) || (has(self.kind) && self.kind == 'topP')")
        .message("model.router: topP goes with kind topP"),
    validation = Rule::new("!has(self.hashSeed) || (has(self.kind) && self.kind == 'hash')")
        .message("model.router: hashSeed goes with kind hash"),
    validation = Rule::new("!has(self.balanceLoss) || self.balanceLoss != 'cvSquared' || \
        (has(self.kind) && self.kind == 'noisyTopK')")
        .message("model.router: balanceLoss cvSquared goes with kind noisyTopK"),
    validation = Rule::new("!has(self.balanceLoss) || self.balanceLoss != 'loadImportance' || \
        (has(self.gateNoise) && self.gateNoise > 0.0)")
        .message("model.router: balanceLoss loadImportance needs gateNoise above 0"),
    validation = Rule::new("!has(self.hysteresis) || self.hysteresis == 0.0 || \
        !has(self.kind) || self.kind in ['topK', 'switch', 'tutel']")
        .message("model.router: hysteresis goes with kinds topK, switch and tutel")
)]
pub struct RouterSpec {
    /// topK (the best K), switch (the best one), gshard (the second best by chance), tutel,
    /// noisyTopK, topP (as many as reach a sum, at most K), expertChoice (experts take tokens) or
    /// hash (a table of words). Default: topK.
    pub kind: Option<Word<RouterKind>>,
    /// softmax or sigmoid of the logits. Default: softmax.
    pub scoring: Option<Word<Scoring>>,
    /// The K weights of a token are scaled to sum to one. With one expert a token that is always 1,
    /// and the router learns nothing of the words. Default: true; false with switch, topP,
    /// expertChoice, and tutel with one expert a token.
    pub norm_topk_prob: Option<bool>,
    /// A correction of the choice alone balances the experts (DeepSeek-V3). Default: false.
    pub bias: Option<bool>,
    /// What each step adds to the correction of an expert with less than the mean load, and takes
    /// from one with more; 0 leaves the corrections as they are. Default: 0.001.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub bias_update_rate: Option<f64>,
    /// Experts are chosen within groups; must divide the number of experts. Default: 1.
    #[schemars(range(min = 1, max = 4096))]
    pub groups: Option<u32>,
    /// Groups that a token may choose from. Default: 1.
    #[schemars(range(min = 1, max = 4096))]
    pub topk_groups: Option<u32>,
    /// Factor on the K weights. Default: 1.
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub scale: Option<f64>,
    /// Noise on the router's input while training: factors between 1 - jitter and 1 + jitter.
    /// Default: 0; 0.01 with switch.
    #[schemars(range(min = 0.0, max = 1.0))]
    pub jitter: Option<f64>,
    /// Share of the layer's input that is dropped while training. Default: 0.
    #[schemars(range(min = 0.0, max = 0.9))]
    pub input_dropout: Option<f64>,
    /// Normal noise on the logits while training, of this deviation over the number of experts.
    /// Default: 0.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub gate_noise: Option<f64>,
    /// Sum of probabilities at which a token has enough experts. Default: 0.4.
    #[schemars(range(min = 0.001, max = 1.0))]
    pub top_p: Option<f64>,
    /// Another table of words. Default: 0.
    pub hash_seed: Option<u32>,
    /// Logits are cosines in a learned space.
    pub cosine: Option<CosineSpec>,
    /// switch, gshard, firstChoice, loadImportance, cvSquared, kl or none. Default: switch; gshard
    /// with gshard, firstChoice with tutel, cvSquared with noisyTopK, none with expertChoice and
    /// hash.
    pub balance_loss: Option<Word<BalanceLoss>>,
    /// Over what the balancing loss is taken: microBatch, sequence, global (all of the step, for
    /// one more forward pass) or hf (all layers together, as the Hugging Face models do). Default:
    /// microBatch.
    pub aux_loss_scope: Option<Word<AuxLossScope>>,
    /// Weight of the balancing loss. Default: 0.01; 0.1 with noisyTopK, 0 without such a loss.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub aux_loss_coef: Option<f64>,
    /// Weight of the loss on the size of the logits. Default: 0.001 with topK, else 0.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub z_loss_coef: Option<f64>,
    /// Weight of the entropy of the scores, which keeps top-p from taking ever more experts.
    /// Default: 0.0001 with topP, else 0.
    #[schemars(range(min = 0.0, max = 100.0))]
    pub entropy_loss_coef: Option<f64>,
    /// Standard deviation of the router's initial weights: a tenth of the others' steadies large
    /// models (Fedus et al. 2021). Default: the model's initializerRange.
    #[schemars(range(min = 0.0, max = 10.0))]
    pub initializer_range: Option<f64>,
    /// Rows an expert takes at most in a micro-batch, as a multiple of the even share; 0 takes all.
    /// Below 0: Tutel's automatic capacity with that bound, which drops the same. Default: 0; 1.25
    /// with switch, 1 with gshard and tutel.
    #[schemars(range(min = -64.0, max = 64.0))]
    pub capacity_factor: Option<f64>,
    /// The same while evaluating. Default: capacityFactor; 2 with switch.
    #[schemars(range(min = -64.0, max = 64.0))]
    pub eval_capacity_factor: Option<f64>,
    /// Tokens with the largest scores get room first, not those that come first. Default: false.
    pub batch_prioritized: Option<bool>,
    /// The experts of the position before in the same sequence have so much more in the choice, on
    /// the scale of the scores, which lie between 0 and 1: fewer switches of expert along a text.
    /// With kinds topK, switch and tutel. Default: 0.
    #[schemars(range(min = 0.0, max = 1000.0))]
    pub hysteresis: Option<f64>,
    /// The router keeps its initial weights, to measure what routing is worth. Default: false.
    pub frozen: Option<bool>,
    /// Steps at the beginning in which the experts keep their weights and the router learns to
    /// choose among them; of use with experts that are trained already. Default: 0.
    #[schemars(range(min = 0, max = 1_000_000_000))]
    pub warmup_steps: Option<u64>,
}

/// The cosine gate.
#[derive(KubeSchema, Serialize, Deserialize, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
#[x_kube(crates(kube_core = "::kube_core"))]
pub struct CosineSpec {
    /// Width of the space in which tokens and experts are compared. Default: 256.
    #[schemars(range(min = 1, max = 65536))]
    pub projection_size: Option<u32>,
    /// Cosines begin divided by it; the scale is learned, at most 100. Default: 0.5.
    #[schemars(range(min = 0.01, max = 1000.0))]
    pub initial_temperature: Option<f64>,
}
