//! Who and what is where by name, looked up many times in one decision: a gang of hundreds asks for
//! each of its members, and each of them for its node.

use crate::observed::{Node, Observed, Worker};
use std::collections::{BTreeMap, BTreeSet};

pub(super) struct Index<'o> {
    workers: BTreeMap<&'o str, &'o Worker>,
    /// With the position in the order of use.
    nodes: BTreeMap<&'o str, (usize, &'o Node)>,
    /// Members of the gang that is under way or ended last.
    members: BTreeSet<&'o str>,
    /// Nodes with a worker that is not known to have ended.
    busy: BTreeSet<&'o str>,
}

impl<'o> Index<'o> {
    pub fn of(observed: &'o Observed) -> Index<'o> {
        let mut nodes = BTreeMap::new();
        for (at, node) in observed.nodes.iter().enumerate() {
            nodes.entry(node.name.as_str()).or_insert((at, node));
        }
        let gang = observed.record.gang.iter();
        let busy = observed.workers.iter().filter(|worker| !worker.is_dead());
        Index {
            workers: observed.workers.iter().map(|of| (of.name.as_str(), of)).collect(),
            nodes,
            members: gang.flat_map(|gang| &gang.members).map(|of| of.worker.as_str()).collect(),
            busy: busy.map(|worker| worker.node.as_str()).collect(),
        }
    }

    pub fn worker(&self, name: &str) -> Option<&'o Worker> {
        self.workers.get(name).copied()
    }

    /// Whether ranks may be put on this node.
    pub fn is_usable(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|(_, node)| node.usable)
    }

    /// Whether a job before this one waits for it.
    pub fn is_called_back(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|(_, node)| node.called_back)
    }

    /// Whether its machine is to stand still for seconds.
    pub fn freezes(&self, node: &str) -> bool {
        self.nodes.get(node).is_some_and(|(_, node)| node.freezes)
    }

    /// Whether the node is the job's at all.
    pub fn is_listed(&self, node: &str) -> bool {
        self.nodes.contains_key(node)
    }

    /// In the order of use; after all others where it is not listed.
    pub fn place(&self, node: &str) -> usize {
        self.nodes.get(node).map_or(usize::MAX, |(at, _)| *at)
    }

    pub fn is_member(&self, worker: &str) -> bool {
        self.members.contains(worker)
    }

    pub fn is_busy(&self, node: &str) -> bool {
        self.busy.contains(node)
    }
}
