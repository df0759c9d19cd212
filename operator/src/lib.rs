//! The operator and the command line.
//!
//! ```text
//! cli -> local (processes of this machine) -> decide: moejob_plan
//!                  \-> control: a stream to each worker, with identities by authority
//! ```

pub mod cli;
pub mod local;
pub mod control;
pub mod authority;
pub mod identity;
pub mod progress;
