//! The operator and the command line.
//!
//! ```text
//! cli -> local (processes of this machine) -> decide: moejob_plan
//!                  \-> control: a stream to each worker, with identities (moejob_identity)
//!
//! cli -> operator: observe -> controller (allocate, plan) -> apply; lease, metrics,
//!     scrape (who may read them)
//! ```

#[macro_use]
pub mod cli;
pub mod local;
pub mod control;
pub mod observe;
pub mod apply;
pub mod turnstile;
pub mod lease;
pub mod pulse;
pub mod http;
pub mod metrics;
pub mod scrape;
pub mod controller;
