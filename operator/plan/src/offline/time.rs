//! How long a step of a gang of GPUs may take: an estimate of what its profile says of products and
//! links.
//!
//! ```text
//! products    operations of a rank's tokens / (data sheet's rate x the part that is reached)
//! tokens      of each layer and micro-batch: out to experts and back, forward and backward
//! gradients   of dense weights over all ranks, of experts over their replicas, and weights back
//! offload     optimizer state over the bus to the host and back, in the update
//! ```
//! Products and tokens follow each other. Gradients travel beside backward, so that only what takes
//! longer than it counts.

use crate::job::Job;
use super::offload::OffloadPrice;
use crate::placement::{self, gib};
use crate::travel::{self, Machines};
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
    /// Tokens between the GPUs of an expert group.
    pub tokens_seconds: f64,
    /// Gradients and weights between GPUs, of which `exposed` counts.
    pub gradients_seconds: f64,
    pub exposed_seconds: f64,
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
    let flops = profile.flops.filter(|_| profile.backend == Backend::Cuda)?;
    let links = Machines::of(profile);
    if links.is_none() && mesh.world() > 1 {
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

    let element = training.precision.element().bytes() as f64;
    let ranks = f64::from(mesh.ep);
    let formats =
        training.compute.formats(training.precision.element(), model.experts.per_token);
    let dim = u64::from(model.hidden_size);
    // A token travels once to each rank that has one of its experts, and comes back as often as it
    // chose one.
    let reached = tokens * travel::reached(model, mesh.ep);
    let [out, out_again] =
        [formats.tokens, formats.gradients].map(|of| reached * of.bytes(dim) as f64);
    let back =
        tokens * f64::from(model.experts.per_token) * (dim * formats.sums.bytes()) as f64;
    let layers = (0..model.num_hidden_layers).filter(|layer| model.is_moe_layer(*layer)).count();
    let exchange = links.filter(|_| mesh.ep > 1).map_or(0.0, |links| {
        // Forward, and the same ways in backward.
        let ways = [out, back, out_again, back].map(|bytes| links.flat(mesh.ep, bytes));
        ways.iter().sum::<f64>() * layers as f64 * rounds
    });

    let extent = crate::cost::Extent::of(model);
    let dense = extent.other_elements as f64 * element;
    let experts = extent.expert_elements as f64 * element / ranks;
    let gradients = links.map_or(0.0, |links| {
        // A sum in pieces, and the weights back from their owners.
        2.0 * (links.ring(mesh.dp, dense) + links.ring(mesh.edp(), experts))
    });
    let exposed = (gradients - BACKWARD * products / rounds).max(0.0);
    let price = (!training.compute.offload.is_none())
        .then(|| OffloadPrice::of(job, &placement::memory(job, layout, 0)))
        .flatten();
    let offload = price.as_ref().and_then(|price| price.seconds);
    let seconds = products + exchange + exposed + offload.unwrap_or(0.0);
    let all = f64::from(training.global_batch_size) * f64::from(training.sequence_length);
    let mut assumes = vec![format!(
        "products at {:.0}% of {} TFLOP/s, as profile {} says",
        flops.reached * 100.0,
        flops.bf16_tflops,
        profile.name
    )];
    if mesh.ep > 1 {
        assumes.push(format!(
            "even routing; each GPU sends {} a layer and micro-batch forward, by a model of \
             latencies and rates (docs/exchange.md)",
            gib((out + back) as u64)
        ));
    }
    if mesh.world() > 1 {
        let beside = "gradients travel beside backward; no contention between switches";
        assumes.push(beside.to_string());
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
        tokens_seconds: exchange,
        gradients_seconds: gradients,
        exposed_seconds: exposed,
        offload_seconds: offload,
        assumes,
    })
}

impl StepTime {
    /// For a person.
    pub fn lines(&self) -> Vec<String> {
        let mut lines = vec![
            format!(
                "expected, an estimate: {} a step, {} tokens/s",
                duration(self.seconds),
                super::count(self.tokens_per_second as u64)
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
