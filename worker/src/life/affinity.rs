//! Where the threads and the memory of a worker lie among those that share its machine.
//!
//! ```text
//! Machine -> share(machine, worker i of n) -> bind, before the first thread
//! ```
//!
//! Linux gives a thread memory of the NUMA node that it runs on, so threads that are bound before
//! they allocate have their memory beside them.

use super::machine::Machine;
use rustix::thread::{CpuSet, Pid, sched_setaffinity};
use std::io;

/// A worker's place among those that share its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq, serde::Serialize, serde::Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Share {
    pub index: u32,
    pub of: u32,
}

impl Default for Share {
    /// The machine is its own.
    fn default() -> Share {
        Share { index: 0, of: 1 }
    }
}

/// The processors that a worker may use, ascending.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Allowed {
    /// By its cpuset and by whoever started it.
    pub all: Vec<u32>,
    /// Of those, its share among the workers of its machine.
    pub share: Vec<u32>,
}

impl Allowed {
    /// How many are the worker's: where it is not bound, those that share the machine have as many
    /// each.
    pub fn count(&self, share: Share) -> usize {
        // By the limit of a control group, too.
        let here = std::thread::available_parallelism().map_or(1, usize::from);
        match self.share.len() < self.all.len() {
            true => here,
            false => (here / share.of.max(1) as usize).max(1),
        }
    }
}

/// The processors of one worker, or none where binding brings nothing: it has the machine for
/// itself, or all memory is equally near.
///
/// Of more workers than NUMA nodes each gets a node, of fewer each gets a run of them, so that no
/// worker's memory is far from any of its threads unless the worker spans nodes.
pub fn share(machine: &Machine, share: Share) -> Option<Vec<u32>> {
    let (index, of) = (share.index as usize, share.of as usize);
    let nodes: Vec<&[u32]> = machine.nodes.iter().map(|node| &node.allowed[..]).collect();
    let nodes: Vec<&[u32]> = nodes.into_iter().filter(|cpus| !cpus.is_empty()).collect();
    let count = nodes.len();
    if count < 2 || of < 2 || index >= of {
        return None;
    }
    let begin = index * count / of;
    let end = ((index + 1) * count / of).max(begin + 1);
    let mut cpus = nodes[begin..end].concat();
    cpus.sort_unstable();
    Some(cpus)
}

/// Binds a thread of this process, or the one that calls, and with it every thread that it starts
/// from now on.
///
/// # Errors
/// The system refused: a processor is not allowed or gone.
pub fn bind(thread: Option<Pid>, cpus: &[u32]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus.iter().filter(|cpu| (**cpu as usize) < CpuSet::MAX_CPU) {
        set.set(*cpu as usize);
    }
    Ok(sched_setaffinity(thread, &set)?)
}

#[cfg(test)]
#[path = "affinity/tests.rs"]
mod tests;
