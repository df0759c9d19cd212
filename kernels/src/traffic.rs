//! Counts of the host's copies from and to a device, and of its waits.

use std::sync::atomic::{AtomicU64, Ordering};

/// How often the host has had to do with a device's memory since the device was made. Ops, and what
/// links move between devices, are not among it.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Traffic {
    /// Copies from the host.
    pub writes: u64,
    /// Copies to the host, each of which waits for all that was enqueued.
    pub reads: u64,
    /// Times the host waited without reading.
    pub waits: u64,
}

/// [`Traffic`] while it is counted.
#[derive(Debug, Default)]
pub(crate) struct TrafficCounts {
    pub(crate) writes: AtomicU64,
    pub(crate) reads: AtomicU64,
    pub(crate) waits: AtomicU64,
}

impl TrafficCounts {
    pub(crate) fn now(&self) -> Traffic {
        let [writes, reads, waits] =
            [&self.writes, &self.reads, &self.waits].map(|count| count.load(Ordering::Relaxed));
        Traffic { writes, reads, waits }
    }
}
