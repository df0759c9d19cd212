//! The router of a model, with every default resolved. docs/routers.md has the equations.

use serde::{Deserialize, Serialize};

/// How tokens and experts come together.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum RouterKind {
    /// The K best (Mixtral, Qwen3-MoE, OLMoE, DeepSeek-V3).
    #[default]
    TopK,
    /// The best one, with a capacity (Switch Transformer).
    Switch,
    /// The best and, by chance, the second (GShard).
    Gshard,
    /// The K best with Tutel's capacity.
    Tutel,
    /// The K best after noise of a learned size (Shazeer et al. 2017).
    NoisyTopK,
    /// As many as reach a sum of probabilities, at most K.
    TopP,
    /// Each expert takes its best tokens.
    ExpertChoice,
    /// A fixed table of words.
    Hash,
}

/// How logits become scores.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Scoring {
    /// scores = softmax(logits) over the experts (Mixtral, Qwen3-MoE, OLMoE).
    #[default]
    Softmax,
    /// scores = sigmoid(logits) (DeepSeek-V3).
    Sigmoid,
}

#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum AuxLossScope {
    /// Per micro-batch and layer, mean over layers and micro-batches.
    #[default]
    MicroBatch,
    /// Per sequence and layer, mean over all of them.
    Sequence,
    /// Per layer over all tokens of the step.
    Global,
    /// All layers concatenated, as the Hugging Face models compute it.
    Hf,
}

/// The loss that balances the experts. T tokens, E experts, of which K are chosen; chosen_e and
/// first_e are how many tokens have e among their choices, and first of them, P_e is the mean of
/// its scores. Kernels of GPUs name it by its number.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum BalanceLoss {
    None,
    /// E * sum_e f_e P_e, f_e = chosen_e / T. Fedus et al. 2021 (Switch Transformer, arXiv
    /// 2101.03961), eq. 4 to 6; with K > 1 perfect balance costs K, as in Hugging Face's
    /// `load_balancing_loss_func`. DeepSeek-V3's (arXiv 2412.19437, eq. 17 to 20) is 1/K of it.
    #[default]
    Switch,
    /// (1 / E) * sum_e g_e P_e, g_e = first_e / T. Lepikhin et al. 2020 (GShard, arXiv 2006.16668),
    /// Algorithm 1, line 13; perfect balance costs 1 / E^2.
    Gshard,
    /// E * sum_e g_e P_e: GShard's times E^2, as Tutel's `gshard_loss` has it.
    FirstChoice,
    /// (cv2(importance) + cv2(load)) / 2 with cv2(x) = var(x) / (mean(x)^2 + 1e-10), the variance
    /// divided by E - 1. Tutel's `load_importance_loss`, after Riquelme et al. 2021 (V-MoE, arXiv
    /// 2106.05974), appendix A.
    LoadImportance,
    /// cv2(importance) + cv2(load), the variance divided by E. Shazeer et al. 2017 (arXiv
    /// 1701.06538), eq. 6, 7 and 11.
    CvSquared,
    /// KL(P || uniform) = sum_e P_e ln(E P_e) = ln E - H(P): zero in balance, differentiable
    /// everywhere, blind to the choice itself. The part of a mutual-information loss that spreads
    /// the experts (Chen et al. 2023, Mod-Squad, arXiv 2212.08066).
    Kl,
}

/// The cosine gate: logits are e^temperature times cosines in a projected space.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CosineConfig {
    pub projection_size: u32,
    /// The scale begins as its reciprocal.
    pub initial_temperature: f64,
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct RouterConfig {
    #[serde(default)]
    pub kind: RouterKind,
    pub aux_loss_coef: f64,
    pub z_loss_coef: f64,
    /// Weight of the mean entropy of the scores (top-p's dynamic loss).
    #[serde(default)]
    pub entropy_loss_coef: f64,
    #[serde(default)]
    pub balance_loss: BalanceLoss,
    /// Standard deviation of the router's initial weights; none: the model's.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub initializer_range: Option<f64>,
    pub aux_loss_scope: AuxLossScope,
    /// 0: dropless. Else an expert takes at most so many times its even share; the sign only says
    /// how Tutel sizes its memory.
    pub capacity_factor: f64,
    /// The same while evaluating.
    #[serde(default)]
    pub eval_capacity_factor: f64,
    /// The surest tokens are served first.
    #[serde(default)]
    pub batch_prioritized: bool,
    pub scoring: Scoring,
    /// The K weights of a token sum to one.
    pub norm_topk_prob: bool,
    /// A correction that takes part in the choice alone and balances the experts (DeepSeek-V3).
    pub bias: bool,
    /// What a step adds to the correction of an expert with less than the mean load, and takes
    /// from one with more.
    #[serde(default)]
    pub bias_update_rate: f64,
    pub groups: u32,
    pub topk_groups: u32,
    pub scale: f64,
    /// Factors of the router's input are uniform in 1 - jitter to 1 + jitter.
    pub jitter: f64,
    /// Share of the layer's input that is dropped.
    #[serde(default)]
    pub input_dropout: f64,
    /// E times the deviation of what is added to the logits (Tutel).
    #[serde(default)]
    pub gate_noise: f64,
    /// Sum of probabilities that top-p reaches; 0: no top-p.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub top_p: f64,
    /// Of the table of words.
    #[serde(default, skip_serializing_if = "is_first")]
    pub hash_seed: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub cosine: Option<CosineConfig>,
    /// What the choice, and it alone, adds to the scores of the experts that the position before in
    /// the same sequence and document chose; 0: nothing.
    #[serde(default, skip_serializing_if = "is_zero")]
    pub hysteresis: f64,
    /// The router keeps its initial weights (to measure what routing is worth).
    pub frozen: bool,
    /// First steps in which the experts keep their weights, so that the router finds its way
    /// among experts that hold still.
    #[serde(default, skip_serializing_if = "is_none")]
    pub warmup_steps: u64,
}

fn is_none(steps: &u64) -> bool {
    *steps == 0
}

fn is_zero(value: &f64) -> bool {
    *value == 0.0
}

fn is_first(seed: &u32) -> bool {
    *seed == 0
}

impl Default for RouterConfig {
    fn default() -> RouterConfig {
        RouterConfig {
            kind: RouterKind::TopK,
            aux_loss_coef: 0.01,
            z_loss_coef: 0.001,
            entropy_loss_coef: 0.0,
            balance_loss: BalanceLoss::Switch,
            initializer_range: None,
            aux_loss_scope: AuxLossScope::MicroBatch,
            capacity_factor: 0.0,
            eval_capacity_factor: 0.0,
            batch_prioritized: false,
            scoring: Scoring::Softmax,
            norm_topk_prob: true,
            bias: false,
            bias_update_rate: 0.001,
            groups: 1,
            topk_groups: 1,
            scale: 1.0,
            jitter: 0.0,
            input_dropout: 0.0,
            gate_noise: 0.0,
            top_p: 0.0,
            hash_seed: 0,
            cosine: None,
            hysteresis: 0.0,
            frozen: false,
            warmup_steps: 0,
        }
    }
}

impl RouterConfig {
    /// Dropless top-k with Switch's loss over micro-batches or all layers.
    pub fn is_plain(&self) -> bool {
        self.beyond_plain().is_none()
    }

    /// Whether one op of buckets chooses experts: dropless top-k has it, with a balance of each
    /// micro-batch or sequence. Other routers have a [`Gate`](crate::buffers::Gate).
    pub fn is_of_one_op(&self) -> bool {
        let beyond = self.all_beyond_plain();
        let scope = beyond.is_empty() || beyond == ["auxLossScope"];
        scope && matches!(self.aux_loss_scope, AuxLossScope::MicroBatch | AuxLossScope::Sequence)
    }

    /// The first field that asks for more than that.
    pub fn beyond_plain(&self) -> Option<&'static str> {
        self.all_beyond_plain().first().copied()
    }

    /// All such fields.
    fn all_beyond_plain(&self) -> Vec<&'static str> {
        // Each field is named here, so that nobody adds one without a thought of that op.
        let RouterConfig {
            kind,
            capacity_factor,
            eval_capacity_factor,
            jitter,
            input_dropout,
            gate_noise,
            cosine,
            hysteresis,
            balance_loss,
            entropy_loss_coef,
            aux_loss_scope,
            // These are parts of the fused op, or of the step around it.
            scoring: _,
            norm_topk_prob: _,
            bias: _,
            bias_update_rate: _,
            groups: _,
            topk_groups: _,
            scale: _,
            aux_loss_coef: _,
            z_loss_coef: _,
            initializer_range: _,
            frozen: _,
            warmup_steps: _,
            // These say nothing without a capacity, kind topP, kind hash.
            batch_prioritized: _,
            top_p: _,
            hash_seed: _,
        } = self;
        let micro_batch = matches!(aux_loss_scope, AuxLossScope::MicroBatch | AuxLossScope::Hf);
        let fields = [
            (*kind != RouterKind::TopK, "kind"),
            (*capacity_factor != 0.0, "capacityFactor"),
            (*eval_capacity_factor != 0.0, "evalCapacityFactor"),
            (*jitter != 0.0, "jitter"),
            (*input_dropout != 0.0, "inputDropout"),
            (*gate_noise != 0.0, "gateNoise"),
            (cosine.is_some(), "cosine"),
            (*hysteresis != 0.0, "hysteresis"),
            (*balance_loss != BalanceLoss::Switch, "balanceLoss"),
            (*entropy_loss_coef != 0.0, "entropyLossCoef"),
            (!micro_batch, "auxLossScope"),
        ];
        fields.into_iter().filter(|(beyond, _)| *beyond).map(|(_, field)| field).collect()
    }

    /// Choices that an expert takes of `tokens`; none: all. Switch and GShard (eq. 3 of Fedus et
    /// al. 2021; C of GShard's Algorithm 1): floor(|factor| K T / E). Tutel and the others: K
    /// floor(|factor| ceil(T / E)).
    pub fn capacity(&self, factor: f64, tokens: u64, experts: u32, top_k: u32) -> Option<u64> {
        if factor == 0.0 || experts == 0 {
            return None;
        }
        let (factor, k, e) = (factor.abs(), u64::from(top_k), u64::from(experts));
        Some(match self.kind {
            RouterKind::Switch | RouterKind::Gshard => {
                (factor * (k * tokens) as f64 / e as f64).floor() as u64
            }
            _ => k * (factor * tokens.div_ceil(e) as f64).floor() as u64,
        })
    }

    /// Tokens that each expert takes where experts choose: K T / E (k = n c / e of Zhou et al.
    /// 2022, eq. 1), at least one, at most all.
    pub fn chosen_rows(tokens: u64, experts: u32, top_k: u32) -> u64 {
        (u64::from(top_k) * tokens / u64::from(experts.max(1))).clamp(1, tokens.max(1))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn capacities_are_those_of_their_sources() {
        let capacity = |kind, factor, tokens, experts, k| {
            let config = RouterConfig { kind, ..RouterConfig::default() };
            config.capacity(factor, tokens, experts, k)
        };
        // Switch: 6 tokens, 4 experts, factor 1.25: 1.875.
        assert_eq!(capacity(RouterKind::Switch, 1.25, 6, 4, 1), Some(1));
        assert_eq!(capacity(RouterKind::Gshard, 1.0, 10, 4, 2), Some(5));
        // Tutel: 2 * int(1.0 * ceil(10 / 4)).
        assert_eq!(capacity(RouterKind::Tutel, 1.0, 10, 4, 2), Some(6));
        assert_eq!(capacity(RouterKind::Tutel, -1.25, 10, 4, 2), Some(6));
        assert_eq!(capacity(RouterKind::TopK, 0.1, 10, 4, 2), Some(0));
        assert_eq!(capacity(RouterKind::TopK, 0.0, 10, 4, 2), None);
        assert_eq!(RouterConfig::chosen_rows(10, 4, 2), 5);
        assert_eq!(RouterConfig::chosen_rows(1, 4, 2), 1);
        assert_eq!(RouterConfig::chosen_rows(3, 1, 1), 3);
    }

    #[test]
    fn the_default_is_plain_and_nothing_else() {
        let plain = RouterConfig::default();
        assert!(plain.is_plain());
        let sigmoid = RouterConfig { scoring: Scoring::Sigmoid, bias: true, ..plain.clone() };
        assert!(sigmoid.is_plain());
        let jitter = RouterConfig { jitter: 0.1, ..plain.clone() };
        assert_eq!(jitter.beyond_plain(), Some("jitter"));
        let global = RouterConfig { aux_loss_scope: AuxLossScope::Global, ..plain };
        assert_eq!(global.beyond_plain(), Some("auxLossScope"));
    }
}
