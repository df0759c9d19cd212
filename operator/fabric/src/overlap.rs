//! In how many chunks tokens travel to experts of other ranks: an estimate of what it gains that
//! some travel while the experts compute another chunk.
//!
//! ```text
//! links      chunks out, one behind the other | rows back of chunk c, once it is computed
//! products   chunk c, once it is here
//! ```
//! Links by latencies and rates ([`travel`](crate::travel)), products by a roofline: operations at
//! the rate that the profile says, but no faster than the weights of the experts are read, once for
//! each chunk. So small chunks cost latencies and passes over weights.
//!
//! Gradients of weights are made chunk by chunk, and added up in memory. And products leave some
//! multiprocessors to what travels.

use crate::travel::{self, Machines};
use moejob_manifest::job::Job;
use moejob_manifest::profile::Backend;
use moejob_protocol::config::{Exchange, OVERLAP_DEGREES, Precision};
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::Types;
use moejob_protocol::rails::Rails;

/// More than one chunk takes copies, and a thread or a second stream, whose cost no estimate knows
/// exactly. So a layer is to take so much of its time with one at most.
const WORTH: f64 = 0.95;
/// The part of a GPU's multiprocessors that products leave free, in steps with chunks: 16 of an
/// A100's 108.
const LEFT_FREE: f64 = 16.0 / 108.0;

/// A mixture layer whose GPUs each get all tokens of their group: its bytes and its products.
#[derive(Clone, Copy, Debug)]
struct Layer<'a> {
    machines: Machines<'a>,
    rails: Option<Rails>,
    ep: u32,
    /// Bytes of all tokens of the group: out in forward, in backward, and back in both.
    out: [f64; 2],
    back: f64,
    /// Of one pass of products: operations, by rate, and a reading of the weights.
    products: f64,
    weights: f64,
    /// To read and write all of the gradients once more.
    gradients: f64,
    /// To lay the own rows into their chunks, in forward and in backward.
    copied: f64,
}

/// In how many chunks tokens of the expert groups of `layout` travel, and where there is something
/// to choose, why. The job may say it. Without a word of it it is one, since roundings of gradients
/// depend on it. Processors send rows at once.
pub fn choice(job: &Job, layout: &Layout) -> (u32, Option<String>) {
    if job.profile.backend == Backend::Cpu || layout.mesh.ep == 1 {
        return (1, None);
    }
    // `plan` also tells of a job that is refused for its degree.
    if let Some(degree) = job.overlap_degree.filter(|degree| job.takes_chunks(*degree)) {
        return (degree, Some("parallelism.overlapDegree says so".to_string()));
    }
    let Some(layer) = Layer::of(job, layout) else { return (1, None) };
    let one = layer.seconds(1);
    let best = OVERLAP_DEGREES
        .into_iter()
        .filter(|degree| *degree > 1 && job.takes_chunks(*degree))
        .map(|degree| (degree, layer.seconds(degree)))
        .filter(|(_, seconds)| *seconds <= WORTH * one)
        .min_by(|a, b| a.1.total_cmp(&b.1));
    let one = one * 1e3;
    let why = match best.map(|(degree, seconds)| (degree, seconds * 1e3)) {
        None => format!("{one:.2} ms a layer expected, and hardly less with several"),
        // Nobody has measured chunks between nodes, so they are for who asks.
        Some((degree, ms)) => format!(
            "{one:.2} ms a layer expected; `overlapDegree: {degree}` {ms:.2}, not measured on GPUs"
        ),
    };
    (1, Some(why))
}

impl<'a> Layer<'a> {
    /// None: the profile says too little; of products it says the rate of bf16 alone.
    fn of(job: &'a Job, layout: &Layout) -> Option<Layer<'a>> {
        let machines = Machines::of(&job.profile)?;
        let flops = job.profile.flops.filter(|flops| flops.bf16_tflops > 0.0)?;
        let (model, training, ep) = (&job.model, &job.training, layout.mesh.ep);
        if training.precision != Precision::Bf16 {
            return None;
        }
        let rails = Rails::of(&layout.mesh, job.profile.ranks.max(1));
        let tokens = f64::from(training.micro_batch_size) * f64::from(training.sequence_length);
        let (dim, top_k) = (u64::from(model.hidden_size), model.experts.per_token);
        let types = Types::of(training, layout.mesh.rounds(job.micro_batches()));
        let formats = training.compute.formats(types.element, top_k);
        let of_all = |row: u64| tokens * row as f64 * f64::from(ep);
        // Gate, up and down.
        let expert = 3.0 * dim as f64 * f64::from(model.experts.intermediate_size);
        let held = f64::from(model.experts.count) / f64::from(ep) * expert;
        let (rate, copy_rate) = (flops.bf16_tflops * 1e12, machines.figures.copy_rate);
        let element = types.element.bytes() as f64;
        Some(Layer {
            machines,
            rails: rails.filter(|_| travel::choice(job, layout).0 == Exchange::Hierarchical),
            ep,
            out: [formats.tokens, formats.gradients].map(|of| of_all(of.bytes(dim))),
            back: of_all(formats.token_bytes(dim)[1]),
            products: 2.0 * tokens * f64::from(top_k) * expert / (rate * flops.reached),
            weights: held * element / copy_rate,
            gradients: 2.0 * held * types.summed(types.gradient).bytes() as f64 / copy_rate,
            copied: 2.0 * 2.0 * tokens * dim as f64 * element / copy_rate,
        })
    }

    /// Forward and backward in so many chunks.
    fn seconds(&self, chunks: u32) -> f64 {
        let of = f64::from(chunks);
        let [forward, backward] = self.out.map(|bytes| self.gathered(bytes / of));
        let back = self.summed(self.back / of);
        if chunks == 1 {
            let work = self.products.max(self.weights);
            return forward + work + back + backward + 2.0 * work + back;
        }
        let work = (self.products / of / (1.0 - LEFT_FREE)).max(self.weights);
        // The first chunk writes gradients as one does that is all; others add to them.
        let again = 2.0 * work + self.gradients * (of - 1.0) / of;
        let forward = overlapped(chunks, [forward, work, back]);
        forward + overlapped(chunks, [backward, again, back]) + self.copied
    }

    /// Seconds until each GPU has so many bytes of all tokens.
    fn gathered(&self, bytes: f64) -> f64 {
        match self.rails {
            Some(rails) => self.machines.along_rails(rails, bytes),
            None => self.machines.ring(self.ep, bytes),
        }
    }

    /// Seconds until sums of so many bytes of all tokens are back.
    fn summed(&self, bytes: f64) -> f64 {
        let added = self.rails.map_or(0.0, |rails| self.machines.added(rails, bytes));
        self.gathered(bytes) + added
    }
}

/// Seconds of so many chunks, each of which takes so long out, in the products and back.
fn overlapped(chunks: u32, [out, work, back]: [f64; 3]) -> f64 {
    let (mut link, mut done) = (f64::from(chunks) * out, 0.0_f64);
    for chunk in 1..=chunks {
        done = done.max(f64::from(chunk) * out) + work;
        link = link.max(done) + back;
    }
    link
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_hide_what_is_shorter() {
        let close = |found: f64, expected: f64| {
            assert!((found - expected).abs() < 1e-9, "{found}, expected {expected}");
        };
        // Products hide all but the first dispatch and the last combine.
        close(overlapped(4, [1.0, 5.0, 2.0]), 1.0 + 4.0 * 5.0 + 2.0);
        // The link is never idle: all goes out, and back behind the first chunk.
        close(overlapped(4, [5.0, 1.0, 5.0]), 40.0);
        close(overlapped(2, [1.0, 1.0, 1.0]), 4.0);
        close(overlapped(1, [1.0, 2.0, 3.0]), 6.0);
    }
}
