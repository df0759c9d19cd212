//! Where the threads and the memory of a worker lie: on processors near each other, and beside
//! their device and its network adapter.
//!
//! ```text
//! /sys (or hwloc) -> Machine -> share(machine, worker i of n) -> bind, before the first thread
//! ```
//!
//! Linux gives a thread memory of the NUMA node that it runs on, so threads that are bound before
//! they allocate have their memory beside them. The feature `hwloc` reads the same from hwloc,
//! for machines whose firmware tells the kernel less than hwloc's own tables know.

use rustix::thread::{CpuSet, sched_getaffinity, sched_setaffinity};
use std::io;
use std::path::{Path, PathBuf};

/// The processors that this process may use, by NUMA node.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Machine {
    /// Ascending by id; none is empty.
    pub nodes: Vec<NumaNode>,
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NumaNode {
    pub id: u32,
    /// Ascending.
    pub cpus: Vec<u32>,
}

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

/// The processors of one worker, or none where binding brings nothing: it has the machine for
/// itself, or all memory is equally near.
///
/// Of more workers than NUMA nodes each gets a node, of fewer each gets a run of them, so that no
/// worker's memory is far from any of its threads unless the worker spans nodes.
pub fn share(machine: &Machine, share: Share) -> Option<Vec<u32>> {
    let (index, of) = (share.index as usize, share.of as usize);
    let nodes = machine.nodes.len();
    if nodes < 2 || of < 2 || index >= of {
        return None;
    }
    let begin = index * nodes / of;
    let end = ((index + 1) * nodes / of).max(begin + 1);
    let mut cpus: Vec<u32> =
        machine.nodes[begin..end].iter().flat_map(|node| node.cpus.iter().copied()).collect();
    cpus.sort_unstable();
    Some(cpus)
}

/// Binds the calling thread, and with it every thread that it starts from now on.
///
/// # Errors
/// The system refused: a processor is not allowed or gone.
pub fn bind(cpus: &[u32]) -> io::Result<()> {
    let mut set = CpuSet::new();
    for cpu in cpus.iter().filter(|cpu| (**cpu as usize) < CpuSet::MAX_CPU) {
        set.set(*cpu as usize);
    }
    Ok(sched_setaffinity(None, &set)?)
}

/// This machine, as far as this process may use it.
///
/// # Errors
/// The allowed processors cannot be read.
pub fn machine() -> io::Result<Machine> {
    let allowed = sched_getaffinity(None)?;
    let is_allowed = |cpu: u32| (cpu as usize) < CpuSet::MAX_CPU && allowed.is_set(cpu as usize);
    #[cfg(feature = "hwloc")]
    if let Some(machine) = hwloc::machine(is_allowed) {
        return Ok(machine);
    }
    Ok(from_sys(Path::new("/sys"), is_allowed))
}

/// `devices/system/node/nodeN/cpulist` below `sys`; without it all processors are one node.
pub fn from_sys(sys: &Path, is_allowed: impl Fn(u32) -> bool) -> Machine {
    let mut nodes = Vec::new();
    for (name, path) in entries(&sys.join("devices/system/node")) {
        let id = name.strip_prefix("node").and_then(|id| id.parse().ok());
        let list = std::fs::read_to_string(path.join("cpulist")).ok();
        if let (Some(id), Some(cpus)) = (id, list.and_then(|list| cpu_list(&list))) {
            let cpus: Vec<u32> = cpus.into_iter().filter(|cpu| is_allowed(*cpu)).collect();
            nodes.push(NumaNode { id, cpus });
        }
    }
    // Nodes of memory alone have no processors.
    nodes.retain(|node| !node.cpus.is_empty());
    nodes.sort_by_key(|node| node.id);
    if nodes.is_empty() {
        let cpus = (0..CpuSet::MAX_CPU as u32).filter(|cpu| is_allowed(*cpu)).collect();
        nodes.push(NumaNode { id: 0, cpus });
    }
    Machine { nodes }
}

/// `0-3,8,10-11` as the kernel writes it.
fn cpu_list(text: &str) -> Option<Vec<u32>> {
    let mut cpus = Vec::new();
    for range in text.trim().split(',').filter(|range| !range.is_empty()) {
        let (first, last) = range.split_once('-').unwrap_or((range, range));
        let (first, last) = (first.parse::<u32>().ok()?, last.parse::<u32>().ok()?);
        if first > last || last as usize >= CpuSet::MAX_CPU {
            return None;
        }
        cpus.extend(first..=last);
    }
    Some(cpus)
}

fn entries(folder: &Path) -> Vec<(String, PathBuf)> {
    let Ok(entries) = std::fs::read_dir(folder) else { return Vec::new() };
    let named = |entry: std::fs::DirEntry| Some((entry.file_name().into_string().ok()?, entry));
    let mut all: Vec<_> = entries
        .filter_map(|entry| named(entry.ok()?))
        .map(|(name, entry)| (name, entry.path()))
        .collect();
    all.sort();
    all
}

/// A GPU, with what lies beside it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Gpu {
    /// Its PCI address, as `0000:3b:00.0`.
    pub pci: String,
    /// None where the firmware does not say.
    pub numa_node: Option<u32>,
    /// The PCI address of the network adapter that the fewest bridges separate from it.
    pub nearest_nic: Option<String>,
}

/// NVIDIA's GPUs and their neighbours, from `bus/pci/devices` below `sys`.
pub fn gpus(sys: &Path) -> Vec<Gpu> {
    let devices: Vec<Pci> =
        entries(&sys.join("bus/pci/devices")).into_iter().filter_map(Pci::read).collect();
    let nics: Vec<&Pci> = devices.iter().filter(|device| device.is_nic()).collect();
    let gpu = |device: &Pci| Gpu {
        pci: device.address.clone(),
        numa_node: device.numa_node,
        nearest_nic: (nics.iter())
            .min_by_key(|nic| (device.distance(nic), nic.address.clone()))
            .map(|nic| nic.address.clone()),
    };
    devices.iter().filter(|device| device.is_gpu()).map(gpu).collect()
}

struct Pci {
    address: String,
    class: u32,
    vendor: u32,
    numa_node: Option<u32>,
    /// From the root complex to the device: a component a bridge.
    path: Vec<String>,
}

/// PCI-SIG's id of NVIDIA.
const NVIDIA: u32 = 0x10de;

impl Pci {
    fn read((address, path): (String, PathBuf)) -> Option<Pci> {
        let text = |name: &str| std::fs::read_to_string(path.join(name)).ok();
        let hex = |name: &str| {
            u32::from_str_radix(text(name)?.trim().trim_start_matches("0x"), 16).ok()
        };
        Some(Pci {
            class: hex("class")?,
            vendor: hex("vendor")?,
            // -1 where unknown.
            numa_node: text("numa_node").and_then(|node| node.trim().parse().ok()),
            path: (path.canonicalize().ok()?.components())
                .map(|part| part.as_os_str().to_string_lossy().into_owned())
                .collect(),
            address,
        })
    }

    /// Base class 3, displays: VGA (0300) or 3D (0302) controllers.
    fn is_gpu(&self) -> bool {
        self.vendor == NVIDIA && self.class >> 16 == 3
    }

    /// Base class 2, networks: Ethernet (0200) or InfiniBand (0207).
    fn is_nic(&self) -> bool {
        self.class >> 16 == 2
    }

    /// Bridges between the two; on different root complexes, another NUMA node counts most.
    fn distance(&self, other: &Pci) -> (bool, usize) {
        let shared =
            self.path.iter().zip(&other.path).take_while(|(left, right)| left == right).count();
        let apart = self.path.len() + other.path.len() - 2 * shared;
        (self.numa_node != other.numa_node, apart)
    }
}

#[cfg(feature = "hwloc")]
mod hwloc {
    use super::{Machine, NumaNode};
    use hwloc2::{ObjectType, Topology};
    use std::collections::BTreeMap;

    /// Processing units by the NUMA node that each is nearest to. hwloc2 cannot list NUMA nodes
    /// themselves: they stand beside the levels of hwloc 2's tree, at negative depths.
    pub fn machine(is_allowed: impl Fn(u32) -> bool) -> Option<Machine> {
        let topology = Topology::new()?;
        let mut nodes: BTreeMap<u32, Vec<u32>> = BTreeMap::new();
        for unit in topology.objects_with_type(&ObjectType::PU).ok()? {
            let node = u32::try_from(unit.nodeset()?.first()).ok()?;
            if is_allowed(unit.os_index()) {
                nodes.entry(node).or_default().push(unit.os_index());
            }
        }
        let node = |(id, mut cpus): (u32, Vec<u32>)| {
            cpus.sort_unstable();
            NumaNode { id, cpus }
        };
        let nodes: Vec<NumaNode> = nodes.into_iter().map(node).collect();
        (!nodes.is_empty()).then_some(Machine { nodes })
    }
}

#[cfg(test)]
#[path = "affinity/tests.rs"]
mod tests;
