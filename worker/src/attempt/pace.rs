//! When state is copied to memory, where nobody said how often.
//!
//! A copy of a GPU's state stalls its steps. So the next one comes when it costs at most half a
//! percent of the time since the last, by what the last one cost. Until one was taken, by what a
//! copy of so many bytes usually costs.

use std::time::{Duration, Instant};

/// Time between snapshots over what one costs: 0.5%.
const TIMES: u32 = 200;
/// Bytes a second from a GPU to the memory of its host, before one was measured.
const USUAL: f64 = 2e10;
/// Two generations may take so much of a machine's memory.
const SHARE: f64 = 0.7;

#[derive(Clone, Copy, Debug)]
pub struct Pace {
    since: Instant,
    cost: Duration,
    /// Two generations fit into the machine's memory.
    fits: bool,
}

impl Pace {
    /// Of a state of `bytes` on a machine with `memory` bytes.
    pub fn new(bytes: u64, memory: u64, now: Instant) -> Pace {
        let cost = Duration::from_secs_f64(bytes as f64 / USUAL);
        Pace { since: now, cost, fits: 2.0 * bytes as f64 <= SHARE * memory as f64 }
    }

    /// Memory has room for snapshots at all; else checkpoints alone protect the state.
    pub fn fits(&self) -> bool {
        self.fits
    }

    pub fn is_due(&self, now: Instant) -> bool {
        self.fits && now.duration_since(self.since) >= self.cost * TIMES
    }

    /// A snapshot was taken between the two.
    pub fn taken(&mut self, began: Instant, ended: Instant) {
        (self.since, self.cost) = (ended, ended.duration_since(began));
    }
}

/// Bytes of memory that this process may use: the machine's, or less by its control group.
pub fn machine_memory() -> u64 {
    let machine = kernel_bytes("/proc/meminfo", "MemTotal:").unwrap_or(0);
    let limit = std::fs::read_to_string("/sys/fs/cgroup/memory.max").unwrap_or_default();
    limit.trim().parse().map_or(machine, |limit: u64| limit.min(machine))
}

/// What stands behind `field` in a file of the kernel's that counts in kB, such as /proc/meminfo.
pub fn kernel_bytes(file: &str, field: &str) -> Option<u64> {
    let text = std::fs::read_to_string(file).ok()?;
    let rest = text.lines().find_map(|line| line.strip_prefix(field))?;
    let kib: u64 = rest.split_whitespace().next()?.parse().ok()?;
    Some(kib << 10)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_snapshot_costs_half_a_percent() {
        let start = Instant::now();
        let at = |seconds: f64| start + Duration::from_secs_f64(seconds);
        // 20 GB take a second, until one was measured.
        let mut pace = Pace::new(20_000_000_000, 64_000_000_000, start);
        assert!(!pace.is_due(at(199.0)) && pace.is_due(at(200.0)));
        pace.taken(at(200.0), at(200.5));
        assert!(!pace.is_due(at(300.0)) && pace.is_due(at(300.5)));
        let large = Pace::new(83_000_000_000, 128_000_000_000, start);
        assert!(!large.fits() && !large.is_due(at(1e6)));
    }

    #[test]
    fn this_machine_has_memory() {
        assert!(machine_memory() > 1 << 20);
    }
}
