//! Nodes that are missing: how many jobs show, and which are no answer.

use super::{Allocation, Allocator, ClusterNode, Demand, in_order};
use crate::pods::LABEL_HOST;

/// Host names that a pod is kept from, at most.
const THERE_MAX: usize = 512;

impl Allocation {
    /// All jobs together miss so many nodes at most; those that are served first miss theirs first.
    pub fn bound_missing(&mut self, jobs: &[Demand], most: u32) {
        let mut left = most;
        for job in in_order(jobs) {
            let Some(granted) = self.jobs.get_mut(&job.uid) else { continue };
            granted.missing = granted.missing.min(left);
            left -= granted.missing;
        }
    }
}

impl<'a> Allocator<'a> {
    /// Host names of the nodes on which a worker of the job fits now, so many at most.
    pub(super) fn there(&mut self, job: &'a Demand) -> Vec<String> {
        let verdicts = self.verdicts(&job.needs);
        let of_all = self.nodes.iter().zip(&self.verdicts[verdicts].1);
        let fit = of_all.filter(|(_, against)| against.is_none());
        let host = |node: &ClusterNode| node.labels.get(LABEL_HOST).unwrap_or(&node.name).clone();
        fit.map(|(node, _)| host(node)).take(THERE_MAX).collect()
    }
}
