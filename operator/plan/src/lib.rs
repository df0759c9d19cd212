//! The pure plan. `observed.rs` and `decide.rs` hold the core, which the local runner already uses.

pub mod observed;
pub mod decide;

pub use decide::{Action, Plan, plan};
pub use observed::Observed;
