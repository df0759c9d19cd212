//! What allocation remembers between two looks at the cluster.

use crate::observed::Millis;
use std::collections::BTreeMap;

/// A pod that was decided but is not seen yet counts as there for this long.
pub const UNSEEN_TIMEOUT: Millis = 30_000;
/// A node on which a job's worker failed is avoided by that job: 5 s, 10 s, 20 s, ...
pub const BACKOFF_FIRST: Millis = 5_000;
/// ... up to this.
pub const BACKOFF_MAX: Millis = 600_000;
/// Failures are forgotten so long after the last of them.
pub const BACKOFF_FORGOTTEN: Millis = 3_600_000;

/// By uid of the job and name of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Pods that were decided, and when.
    unseen: BTreeMap<String, BTreeMap<String, Millis>>,
    backoff: BTreeMap<String, BTreeMap<String, Backoff>>,
}

#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct Backoff {
    failures: u32,
    failed_at: Millis,
    until: Millis,
}

impl Memory {
    /// A pod of the job is being made on the node.
    pub fn decided(&mut self, job: &str, node: &str, now: Millis) {
        self.unseen.entry(job.to_string()).or_default().insert(node.to_string(), now);
    }

    /// The pod is there, or will never be.
    pub fn seen(&mut self, job: &str, node: &str) {
        if let Some(nodes) = self.unseen.get_mut(job) {
            nodes.remove(node);
        }
    }

    /// A worker of the job failed there, or did not come up in time.
    pub fn failed(&mut self, job: &str, node: &str, now: Millis) {
        let backoff = self.backoff_of(job, node);
        let wait = BACKOFF_FIRST << backoff.failures.min(20);
        backoff.failures += 1;
        backoff.failed_at = now;
        backoff.until = backoff.until.max(now + wait.min(BACKOFF_MAX));
    }

    /// The plan wants the node avoided (`Action::AvoidNode`).
    pub fn avoid(&mut self, job: &str, node: &str, until: Millis, now: Millis) {
        let backoff = self.backoff_of(job, node);
        backoff.failed_at = now;
        backoff.until = backoff.until.max(until);
    }

    /// A gang with a worker there has done a step: the node is as good as any.
    pub fn worked(&mut self, job: &str, node: &str) {
        if let Some(nodes) = self.backoff.get_mut(job) {
            nodes.remove(node);
        }
    }

    /// The job is gone.
    pub fn forget(&mut self, job: &str) {
        self.unseen.remove(job);
        self.backoff.remove(job);
    }

    /// Drops what no longer counts.
    pub fn expire(&mut self, now: Millis) {
        for nodes in self.unseen.values_mut() {
            nodes.retain(|_, at| now < *at + UNSEEN_TIMEOUT);
        }
        for nodes in self.backoff.values_mut() {
            nodes.retain(|_, of| now < of.until.max(of.failed_at + BACKOFF_FORGOTTEN));
        }
        self.unseen.retain(|_, nodes| !nodes.is_empty());
        self.backoff.retain(|_, nodes| !nodes.is_empty());
    }

    /// Until when the job avoids the node; 0 when it does not.
    pub fn avoided_until(&self, job: &str, node: &str) -> Millis {
        let nodes = self.backoff.get(job);
        nodes.and_then(|nodes| nodes.get(node)).map_or(0, |backoff| backoff.until)
    }

    /// A pod of the job was decided there and is not seen yet.
    pub fn is_unseen(&self, job: &str, node: &str) -> bool {
        self.unseen.get(job).is_some_and(|nodes| nodes.contains_key(node))
    }

    /// Nodes with pods of the job that were decided and are not seen yet, and when that was.
    pub(super) fn unseen_of(&self, job: &str, now: Millis) -> impl Iterator<Item = (&str, Millis)> {
        let nodes = self.unseen.get(job).into_iter().flatten();
        let fresh = nodes.filter(move |(_, at)| now < **at + UNSEEN_TIMEOUT);
        fresh.map(|(node, at)| (node.as_str(), *at))
    }

    fn backoff_of(&mut self, job: &str, node: &str) -> &mut Backoff {
        let nodes = self.backoff.entry(job.to_string()).or_default();
        nodes.entry(node.to_string()).or_default()
    }
}
