//! The life of a worker's process: its streams, what it decides by itself, and its end.

pub mod control;
pub mod dying;
pub mod listener;
pub mod session;
pub mod run;
pub mod preflight;
pub mod travel;
mod part;
pub mod binding;
pub mod affinity;
pub mod machine;
pub mod topology;
pub mod process;
pub mod variables;
