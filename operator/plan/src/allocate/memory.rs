//! What allocation remembers between two looks at the cluster.

use crate::observed::Millis;
use crate::preflight::Cache;
use std::collections::BTreeMap;

/// A pod that was decided but is not seen yet counts as there for this long.
pub const UNSEEN_TIMEOUT: Millis = 30_000;

/// By uid of the job and name of the node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Memory {
    /// Pods that were decided, and when.
    unseen: BTreeMap<String, BTreeMap<String, Millis>>,
    /// Until when the job wants no worker there.
    avoided: BTreeMap<String, BTreeMap<String, Millis>>,
    /// Nodes that passed a preflight of any job. The allocation does not look at them.
    pub passes: Cache,
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

    /// The job's loop wants the node avoided.
    pub fn avoid(&mut self, job: &str, node: &str, until: Millis) {
        let nodes = self.avoided.entry(job.to_string()).or_default();
        let known = nodes.entry(node.to_string()).or_default();
        *known = until.max(*known);
    }

    /// The job is gone.
    pub fn forget(&mut self, job: &str) {
        self.unseen.remove(job);
        self.avoided.remove(job);
    }

    /// Drops what no longer counts.
    pub fn expire(&mut self, now: Millis) {
        for nodes in self.unseen.values_mut() {
            nodes.retain(|_, at| now < *at + UNSEEN_TIMEOUT);
        }
        for nodes in self.avoided.values_mut() {
            nodes.retain(|_, until| now < *until);
        }
        self.unseen.retain(|_, nodes| !nodes.is_empty());
        self.avoided.retain(|_, nodes| !nodes.is_empty());
    }

    /// Until when the job avoids the node; 0 when it does not.
    pub fn avoided_until(&self, job: &str, node: &str) -> Millis {
        let until = self.avoided.get(job).and_then(|nodes| nodes.get(node));
        until.copied().unwrap_or(0)
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
}
