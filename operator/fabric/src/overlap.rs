//! In how many chunks processors send tokens to experts of other ranks: an estimate of what it
//! gains that some travel while the experts compute another chunk.
//!
//! ```text
//! links      chunks out, one behind the other | rows back of chunk c, once it is computed
//! products   chunk c, once it is here | behind the last one: weight gradients
//! ```
//! Links by latencies and rates ([`travel`](crate::travel)), products by a roofline: operations at
//! the rate that the profile says, but no faster than the weights of the experts are read, once for
//! each chunk. So small chunks cost latencies and passes over weights.

use crate::travel::{self, Machines, reached};
use moejob_manifest::job::Job;
use moejob_manifest::profile::Backend;
use moejob_protocol::config::{Exchange, OVERLAP_DEGREES};
use moejob_protocol::layout::Layout;

/// More than one chunk takes a thread and copies that no estimate knows exactly, so a layer is to
/// take so much of its time with one at most.
const WORTH: f64 = 0.95;

/// What one layer does with a rank's micro-batch, in seconds of all its tokens.
#[derive(Clone, Copy, Debug)]
struct Layer<'a> {
    machines: Machines<'a>,
    exchange: Exchange,
    ep: u32,
    /// Bytes that a rank sends out, and back.
    out: f64,
    back: f64,
    /// Of one pass of products: operations, by rate, and a reading of the weights.
    products: f64,
    weights: f64,
}

/// In how many chunks tokens of the expert groups of `layout` travel, and where there is something
/// to choose, why. The job may say it. No bit depends on it, so a wrong guess costs time alone.
pub fn choice(job: &Job, layout: &Layout) -> (u32, Option<String>) {
    let ep = layout.mesh.ep;
    if ep == 1 || job.profile.backend == Backend::Cuda {
        return (1, None);
    }
    if let Some(degree) = job.overlap_degree {
        return (degree, Some("parallelism.overlapDegree says so".to_string()));
    }
    let Some(layer) = Layer::of(job, layout) else { return (1, None) };
    let one = layer.seconds(1);
    let best = OVERLAP_DEGREES
        .into_iter()
        .map(|degree| (degree, layer.seconds(degree)))
        .filter(|(degree, seconds)| *degree == 1 || *seconds <= WORTH * one)
        .reduce(|best, other| if other.1 < best.1 { other } else { best });
    let (degree, seconds) = best.unwrap_or((1, one));
    let (ms, one) = (seconds * 1e3, one * 1e3);
    let why = match degree {
        1 => format!("{one:.2} ms a layer expected, and hardly less with several"),
        _ => format!("{ms:.2} ms a layer expected, with one {one:.2}"),
    };
    (degree, Some(why))
}

impl<'a> Layer<'a> {
    /// None: the profile says too little.
    fn of(job: &'a Job, layout: &Layout) -> Option<Layer<'a>> {
        let machines = Machines::of(&job.profile)?;
        let flops = job.profile.flops.filter(|flops| flops.fp32_tflops > 0.0)?;
        let (model, training, ep) = (&job.model, &job.training, layout.mesh.ep);
        let tokens = f64::from(training.micro_batch_size) * f64::from(training.sequence_length);
        let (dim, top_k) = (f64::from(model.hidden_size), f64::from(model.slices().per_token));
        let element = training.precision.element().bytes() as f64;
        let rows = tokens * dim * element;
        // Gate, up and down.
        let expert = 3.0 * dim * f64::from(model.slices().width);
        let held = f64::from(model.slices().count) / f64::from(ep);
        Some(Layer {
            machines,
            exchange: travel::choice(job, layout).0,
            ep,
            out: rows * reached(model, ep),
            back: rows * top_k,
            products: 2.0 * tokens * top_k * expert / (flops.fp32_tflops * 1e12 * flops.reached),
            weights: held * expert * element / machines.figures.copy_rate,
        })
    }

    /// Forward and backward in so many chunks.
    fn seconds(&self, chunks: u32) -> f64 {
        let of = f64::from(chunks);
        let [out, back] = [self.out, self.back].map(|bytes| self.exchanged(bytes / of));
        let work = (self.products / of).max(self.weights);
        // Gradients of weights are made at once.
        let behind = self.products.max(self.weights);
        if chunks == 1 {
            return 2.0 * (out + work + back) + behind;
        }
        // What a thread sends and gets is copied: read and written.
        let copied = 2.0 * (self.out + self.back) * 2.0 / self.machines.figures.copy_rate;
        let forward = overlapped(chunks, [out, work, back], 0.0);
        forward + overlapped(chunks, [out, work, back], behind) + 2.0 * copied
    }

    /// Seconds in which each rank sends so many bytes.
    fn exchanged(&self, bytes: f64) -> f64 {
        match self.exchange {
            Exchange::Flat => self.machines.flat(self.ep, bytes),
            Exchange::Hierarchical => self.machines.hierarchical(self.ep, bytes),
        }
    }
}

/// Seconds of so many chunks, each of which takes so long out, in the products and back; and
/// `behind` of products more behind the last one.
fn overlapped(chunks: u32, [out, work, back]: [f64; 3], behind: f64) -> f64 {
    let (mut link, mut done) = (f64::from(chunks) * out, 0.0_f64);
    for chunk in 1..=chunks {
        done = done.max(f64::from(chunk) * out) + work;
        link = link.max(done) + back;
    }
    link.max(done + behind)
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
        close(overlapped(4, [1.0, 5.0, 2.0], 0.0), 1.0 + 4.0 * 5.0 + 2.0);
        // Behind them weight gradients hide that one, too.
        close(overlapped(4, [1.0, 5.0, 2.0], 20.0), 1.0 + 4.0 * 5.0 + 20.0);
        // The link is never idle: all goes out, and back behind the first chunk.
        close(overlapped(4, [5.0, 1.0, 5.0], 0.0), 40.0);
        close(overlapped(2, [1.0, 1.0, 1.0], 0.0), 4.0);
        close(overlapped(1, [1.0, 2.0, 3.0], 0.0), 6.0);
    }
}
