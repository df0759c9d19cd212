//! How a rank computes: the model forward and backward, sums of gradients, one optimizer step.
//!
//! ```text
//! micro-batch -> Pass: forward, loss, backward -> gradients -> sums in buckets
//!             -> records, counts               -> Numbers: summed over ranks
//! StepParams, StepNumbers -> update -> weights to their holders -> the host reads numbers once
//! ```
//! Forward and backward enqueue ops and verbs of links, and return nothing. In a step the host
//! writes batches and StepParams, and reads StepNumbers.

mod arena;
pub mod handles;
pub mod group;
pub(crate) mod beside;
pub(crate) mod places;
pub mod buckets;
pub(crate) mod zero;
pub mod model;
pub mod parts;
pub mod lane;
pub mod round;
pub mod links;
mod looks;
mod flight;
pub(crate) mod patience;
pub(crate) mod notes;
pub mod forward;
mod recompute;
pub mod backward;
pub(crate) mod slices;
pub mod fused;
pub(crate) mod expert_parallel;
pub(crate) mod local_experts;
pub mod gate;
pub mod cosine;
pub mod recording;
pub mod numbers;
pub mod trace;
mod machine;
pub mod graphs;
pub mod step;
pub mod validate;
pub mod diagnosis;
pub mod computer;
pub mod eval;
pub mod decode;
pub mod sample;
