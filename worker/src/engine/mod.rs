//! How a rank computes: the model forward and backward, sums of gradients, one optimizer step.

pub mod handles;
pub mod model;
pub mod moe;
pub mod gate;
pub mod routing;
pub mod diagnosis;
pub mod dispatch;
pub mod grads;
pub mod step;
pub mod eval;
