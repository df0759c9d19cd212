//! How long a step of a gang of GPUs may take: an estimate of what its profile says of products and
//! links.
//!
//! ```text
//! products    operations of a rank's tokens / (data sheet's rate x the part that is reached)
//! tokens      out to experts and back, forward and backward (`traffic`)
//! gradients   of what several ranks hold, and new weights (`traffic`)
//! offload     optimizer state over the bus to the host and back, in the update
//! ```
//! Products and tokens follow each other. In chunks tokens travel beside products, but for the
//! first chunk on its way out and the last one on its way back. Where several ranks hold most of
//! the model, gradients travel beside backward, so that only what takes longer than it counts.

use super::offload::OffloadPrice;
use moejob_manifest::job::Job;
use moejob_manifest::words::count;
use moejob_plan::placement;
use moejob_plan::traffic::{self, Expected};
use moejob_protocol::communication::Verb;
use moejob_protocol::config::{Backend, Recompute};
use moejob_protocol::layout::Layout;
use serde::Serialize;

/// Backward is two of the three passes of a step.
const BACKWARD: f64 = 2.0 / 3.0;
/// A forward pass more.
const AGAIN: f64 = 4.0 / 3.0;

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct StepTime {
    pub seconds: f64,
    pub tokens_per_second: f64,
    /// Of it, products of the rank that has most tokens.
    pub products_seconds: f64,
    /// Tokens between the GPUs of an expert group, as far as the ops wait for them.
    pub tokens_seconds: f64,
    /// Gradients and weights between GPUs, of which `exposed` counts.
    pub gradients_seconds: f64,
    pub exposed_seconds: f64,
    /// What a rank sends, by verb, and how much of it the ops wait for.
    #[serde(skip)]
    pub communication: Vec<Expected>,
    /// Of the update, where optimizer state lies on the host.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub offload_seconds: Option<f64>,
    /// What all of it rests on, a sentence each.
    pub assumes: Vec<String>,
}

/// Of a gang in this layout; none where the profile does not say what its GPUs compute, or those of
/// several how they are linked.
pub fn step_time(job: &Job, layout: &Layout) -> Option<StepTime> {
    let (profile, mesh) = (&job.profile, layout.mesh);
    let on_gpus = profile.backend == Backend::Cuda;
    let flops = profile.flops.filter(|of| on_gpus && of.bf16_tflops > 0.0)?;
    if profile.links.is_none() && mesh.world() > 1 {
        return None;
    }
    let (model, training) = (&job.model, &job.training);
    let sequence = u64::from(training.sequence_length);
    // Micro-batches are dealt as evenly as they can be: the others wait for who has one more.
    let rounds = f64::from(job.micro_batches().div_ceil(mesh.dp));
    let tokens = f64::from(training.micro_batch_size) * f64::from(training.sequence_length);
    let again = matches!(training.recompute, Recompute::Full | Recompute::Every(_));
    let operations = model.flops_per_token(sequence) as f64 * if again { AGAIN } else { 1.0 };
    let rate = flops.bf16_tflops * 1e12 * flops.reached;
    let products = rounds * tokens * operations / rate;

    let mut communication = traffic::expected(job, layout);
    let sum = |of_tokens: bool| -> f64 {
        let all = communication.iter().filter(|of| is_of_tokens(of) == of_tokens);
        all.filter_map(|of| of.seconds).sum()
    };
    let (all_tokens, gradients) = (sum(true), sum(false));
    let beside = communication.iter().any(|of| of.beside && !is_of_tokens(of));
    let hidden = if beside { BACKWARD * products / rounds } else { 0.0 };
    let exposed = (gradients - hidden).max(0.0);
    for of in &mut communication {
        // All of what travels among the ops; of the rest what is not hidden, shared out alike.
        let part = match is_of_tokens(of) {
            true => 1.0,
            false => exposed / gradients,
        };
        of.exposed_seconds = of.seconds.filter(|seconds| *seconds > 0.0).map(|all| part * all);
    }
    let price = (!training.compute.offload.is_none())
        .then(|| OffloadPrice::of(job, &placement::memory(job, layout, 0)))
        .flatten();
    let offload = price.as_ref().and_then(|price| price.seconds);
    let seconds = products + all_tokens + exposed + offload.unwrap_or(0.0);
    let all = f64::from(training.global_batch_size) * f64::from(training.sequence_length);
    let mut assumes = vec![format!(
        "products at {:.0}% of {} TFLOP/s, as profile {} says",
        flops.reached * 100.0,
        flops.bf16_tflops,
        profile.name
    )];
    if mesh.world() > 1 {
        let model = "links by a model of latencies and rates (docs/exchange.md)";
        assumes.push(format!("{model}; no contention between switches"));
    }
    if mesh.ep > 1 {
        assumes.push("each token travels to every GPU of its expert group, as by NCCL".to_string());
    }
    if beside {
        assumes.push("gradients travel beside backward".to_string());
    }
    if again {
        assumes.push("what is computed again is a forward pass".to_string());
    }
    if let Some(rate) = price.and_then(|price| price.rate) {
        assumes.push(format!("optimizer state at {rate} GB/s each way between GPU and host"));
    }
    Some(StepTime {
        seconds,
        tokens_per_second: all / seconds,
        products_seconds: products,
        tokens_seconds: all_tokens,
        gradients_seconds: gradients,
        exposed_seconds: exposed,
        communication,
        offload_seconds: offload,
        assumes,
    })
}

/// Tokens, and what becomes of them, rather than weights.
fn is_of_tokens(of: &Expected) -> bool {
    matches!(of.verb, Verb::Dispatch | Verb::Combine | Verb::SendRecv)
}

impl StepTime {
    /// For a person.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            format!(
                "expected, an estimate: {} a step, {} tokens/s",
                duration(self.seconds),
                count(self.tokens_per_second as u64)
            ),
            format!(
                "  {} products, {} tokens between GPUs, {} of {} gradients not beside them",
                duration(self.products_seconds),
                duration(self.tokens_seconds),
                duration(self.exposed_seconds),
                duration(self.gradients_seconds)
            ),
        ];
        if let Some(seconds) = self.offload_seconds {
            lines.push(format!("  {} optimizer state to the host and back", duration(seconds)));
        }
        lines.extend(self.assumes.iter().map(|of| format!("  assumes {of}")));
        lines
    }
}

/// `290 ms`, `1.9 s`, `0`.
pub(super) fn duration(seconds: f64) -> String {
    match seconds * 1e3 {
        ms if ms < 0.05 => "0 ms".to_string(),
        ms if ms < 10.0 => format!("{ms:.1} ms"),
        ms if ms < 1000.0 => format!("{ms:.0} ms"),
        ms => format!("{:.1} s", ms / 1e3),
    }
}
