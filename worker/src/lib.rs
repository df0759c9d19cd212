//! A worker: one process a node, and an engine for each of its devices.
//!
//! ```text
//! leader --Down--> life (listener -> session (pure) --Effect--> shell)
//!                    | what the leader asked, what happened
//!                    v
//!                    attempt (load, steps, snapshots, checkpoints) -> engine (forward, backward)
//!                    |                                                  |
//!                    `---> hf, checkpoint -> state <-----------------'`-> gang (other ranks)
//! ```
//! A module imports only what stands below it in the list here.

pub mod life;
pub mod attempt;
pub mod engine;
pub mod hf;
pub mod checkpoint;
pub mod state;
pub mod data;
pub mod gang;
pub mod disk;
pub mod failure;
