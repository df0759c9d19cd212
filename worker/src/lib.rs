//! A worker: one process a node, and an engine for each of its devices.
//!
//! ```text
//! leader --Down--> life (listener -> session (pure) --Effect--> shell)
//!                    | what the leader asked, what happened
//!                    v
//!                    attempt (load, steps, snapshots, checkpoints) -> engine (forward, backward)
//!                    |                                                  |
//!                    `---> checkpoint, hf, data                         `-> gang (other ranks)
//! ```

pub mod life;
pub mod attempt;
pub mod engine;
pub mod state;
pub mod gang;
pub mod checkpoint;
pub mod hf;
pub mod data;
