//! Nodes that are missing: how many jobs show, and which are no answer.

use super::{Allocation, Demand, Ground, in_order};
use crate::pods::LABEL_HOST;

/// Host names that a pod is kept from, at most.
const THERE_MAX: usize = 512;

impl Allocation {
    /// All jobs together miss so many nodes at most; those that are served first miss theirs first.
    /// Jobs that show some are told which nodes are there.
    pub fn bound_missing(&mut self, ground: &Ground, jobs: &[Demand], most: u32) {
        let mut left = most;
        for job in in_order(jobs) {
            let Some(granted) = self.jobs.get_mut(&job.uid) else { continue };
            granted.missing = granted.missing.min(left);
            left -= granted.missing;
            if granted.missing > 0 {
                let fit = ground.nodes.iter().filter(|node| job.needs.refuses(node).is_none());
                let hosts = fit.map(|node| node.labels.get(LABEL_HOST).unwrap_or(&node.name));
                granted.there = hosts.take(THERE_MAX).cloned().collect();
            }
        }
    }
}
