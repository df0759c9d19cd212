//! Nodes that are not there, for scale: a fake kubelet and fake workers before a real API server,
//! scheduler and operator.
//!
//! ```text
//! API server <--nodes, leases, pods' status--> nodes (a kubelet for all of them)
//!                                                |  starts and ends
//! operator <--control stream, the real one--> worker (the real session, no trainer)
//!                                                |  joins
//!                                              gang (a clock in place of training)
//! ```
//!
//! A fake worker is the pure `Session` of a real one behind a real TLS listener at its pod's own
//! address. What it does not do is train: its gang counts steps.

pub mod api;
pub mod gang;
pub mod nodes;
pub mod worker;

use std::sync::atomic::{AtomicU64, AtomicUsize};

/// What all fake workers of this process have in common, for whoever measures.
#[derive(Debug, Default)]
pub struct Gauge {
    /// Workers whose stream to a leader is open.
    pub linked: AtomicUsize,
    /// Steps that leaders were told of.
    pub steps: AtomicU64,
}
