//! The fabric that a gang's nodes hang on: which labels tell it, and the order of ranks that costs
//! it least.
//!
//! ```text
//! labels of nodes x Keys -> path of each node: zone > tier 9 > .. > tier 0 > NVLink domain > host
//! paths x expert group -> arrange: the order of ranks; crossings: what that order costs
//! nodes of ranks x what NCCL has built -> verify: whether the links are those that were counted
//! what each rank tells of it -> Rings: once all have, what is found
//! nodes x a level -> topology: the order in which a job uses them
//! Profile x GPUs x bytes -> travel: seconds of an exchange between GPUs
//! job x what the two chose -> ways: between which of them the first steps choose
//! ```

#![deny(clippy::disallowed_methods, clippy::disallowed_types)]

mod arrange;
mod facts;
mod rings;
pub mod topology;
pub mod travel;
mod trees;
mod verify;

pub use arrange::{Wish, arrange};
pub use facts::FabricFacts;
pub use rings::{Found, Rings};
pub use trees::{Crossings, crossings, ring_optimum, tree_links};
pub use verify::{Beside, Verdict, verify};
