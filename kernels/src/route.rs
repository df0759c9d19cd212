//! The router: scores, the choice of experts, weights, load statistics and balancing losses.

use crate::buffer::Buffer;
use crate::device::{Device, on_float};

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// probs = softmax(logits) over the experts (Mixtral, Qwen3-MoE, OLMoE).
    Softmax,
    /// probs = sigmoid(logits) (DeepSeek-V3).
    Sigmoid,
}

/// Group-limited choice (DeepSeek-V3): only experts of the `kept` best groups may be chosen. A
/// group's score is the sum of its two best choice scores; ties keep the lower group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteGroups {
    /// Groups of equal numbers of neighbouring experts.
    pub count: usize,
    pub kept: usize,
}

/// One call is one micro-batch: its statistics are those of the auxiliary loss.
///
/// choice = probs + bias; the K experts of the largest choice, ties to the lowest id, stored in
/// ascending id. weight = scale * probs[id], with `norm_topk` divided by the sum of the K probs
/// (plus 1e-20 when sigmoid). lse[t] = ln sum_e e^logits[t, e].
///
/// Auxiliary loss (Switch Transformer, as in Hugging Face's `load_balancing_loss_func`):
/// E * sum_e load[e] * mean_prob[e], with load[e] = counts[e] / T, so that the loads sum to K and
/// perfect balance costs K; mean_prob[e] = mean_t p[t, e], p = probs for softmax and probs
/// divided by their sum over experts for sigmoid. z loss (ST-MoE): mean_t lse[t]^2.
#[derive(Clone, Copy, Debug)]
pub struct Route {
    pub tokens: usize,
    pub experts: usize,
    pub top_k: usize,
    pub scoring: Scoring,
    pub norm_topk: bool,
    pub scale: f64,
    pub groups: Option<RouteGroups>,
    /// [T, E]
    pub logits: Buffer,
    /// [E], enters the choice only
    pub bias: Option<Buffer>,
    /// Output [T, E]
    pub probs: Buffer,
    /// Output [T]
    pub lse: Buffer,
    /// Output u32 [T, K]
    pub ids: Buffer,
    /// Output [T, K]
    pub weights: Buffer,
    /// Output u32 [E]: slots that chose each expert
    pub counts: Buffer,
    /// Output F64 [E]: sum over tokens, ascending, of p[t, e]; divide by T for mean_prob
    pub prob_sums: Buffer,
    /// Output F64 [2]: auxiliary loss, z loss, unscaled
    pub losses: Buffer,
}

/// dlogits = the gradient of <dweights, weights> + aux_coef * auxiliary loss + z_coef * z loss,
/// the choice and the loads held constant.
#[derive(Clone, Copy, Debug)]
pub struct RouteBackward {
    pub tokens: usize,
    pub experts: usize,
    pub top_k: usize,
    pub scoring: Scoring,
    pub norm_topk: bool,
    pub scale: f64,
    pub aux_coef: f64,
    pub z_coef: f64,
    /// [T, E]; needed for the z loss and nothing else
    pub logits: Buffer,
    /// [T, E]
    pub probs: Buffer,
    /// [T]
    pub lse: Buffer,
    /// u32 [T, K]
    pub ids: Buffer,
    /// u32 [E]
    pub counts: Buffer,
    /// [T, K]
    pub dweights: Buffer,
    /// Output [T, E]
    pub dlogits: Buffer,
}

impl Device {
    pub fn route(&mut self, op: &Route) {
        match self {
            Device::Cpu(cpu) => on_float!(op.logits.dtype(), T => cpu.route::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("route"),
        }
    }

    pub fn route_backward(&mut self, op: &RouteBackward) {
        match self {
            Device::Cpu(cpu) => on_float!(op.probs.dtype(), T => cpu.route_backward::<T>(op)),
            Device::Cuda(cuda) => cuda.lacks("route_backward"),
        }
    }
}
