//! One process a node: the life of a worker, its streams, and the training step.
//!
//! ```text
//! leader --Down--> listener -> control -> session (pure) --Effect--> run (shell)
//!                                                                      | Comm, Control
//!                                                                      v
//!                                              trainer (device thread) -> step -> checkpoint
//! ```

pub mod trainer_api;
pub mod tls;
pub mod control;
pub mod listener;
pub mod session;
pub mod run;
pub mod comm;
pub mod data;
pub mod handles;
pub mod model;
pub mod moe;
pub mod gate;
pub mod routing;
pub mod diagnosis;
pub mod dispatch;
pub mod grads;
pub mod snapshot;
pub mod records;
pub mod fence;
pub mod checkpoint;
pub mod hf;
pub mod eval;
pub mod step_end;
pub mod step;
pub mod affinity;
mod attempt;
mod resume;
pub mod trainer;
pub mod process;
