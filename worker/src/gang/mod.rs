//! The ranks of an attempt to each other: their identity, their streams, their collectives.

pub mod memory;
pub mod tls;
pub mod strangers;
pub mod comm;
pub mod step_end;
