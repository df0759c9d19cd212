//! What the kernel tells of the machine: NUMA nodes with their processors, GPUs, and the cards of
//! InfiniBand and RoCE (HCAs, host channel adapters).
//!
//! ```text
//! a folder like /sys --sys::read--> Machine, and what is odd about it
//! ```
//! With the feature `hwloc` the C library of that name is asked beside the kernel's files.
//! Nothing here is of this machine alone: a reader is told the folder, so that trees of other
//! machines are read alike. Names and forms of files are those of the kernel's
//! Documentation/ABI (sysfs-devices-node, sysfs-bus-pci, sysfs-class-infiniband).

pub mod pci;
pub mod sys;
pub mod topology;
#[cfg(feature = "hwloc")]
pub mod hwloc;

use moejob_protocol::cpus::cpu_text;
use pci::{Address, Distance};
use rustix::thread::{CpuSet, sched_getaffinity};
use serde::Serialize;
use std::io;
use std::path::Path;

/// Where the kernel shows the machine.
pub const SYS: &str = "/sys";
/// Names another folder, for tests.
pub const ENV_SYS: &str = "MOEJOB_SYS";

#[derive(Clone, Debug, Default, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Machine {
    /// Processors that are switched on, ascending.
    pub online: Vec<u32>,
    /// Whether the kernel lists NUMA nodes. Otherwise `nodes` has one, of all processors.
    pub has_numa: bool,
    /// Ascending by id. Nodes of memory alone are left out.
    pub nodes: Vec<NumaNode>,
    /// Ascending by address, as CUDA_DEVICE_ORDER=PCI_BUS_ID counts them.
    pub gpus: Vec<Gpu>,
    /// Ascending by address.
    pub hcas: Vec<Hca>,
    /// What cannot be read, and what contradicts itself.
    pub odd: Vec<Odd>,
}

/// The kind of the machine's processors, as NCCL asks for it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Processor {
    /// As `GenuineIntel` and `AuthenticAMD`.
    pub vendor: String,
    pub family: u32,
    pub model: u32,
}

impl Processor {
    /// What stands in the kernel's `/proc/cpuinfo`, of the first processor. None: not of x86, or in
    /// another form.
    pub fn parse(text: &str) -> Option<Processor> {
        let of = |name: &str| {
            let mut fields = text.lines().filter_map(|line| line.split_once(':'));
            fields.find(|(field, _)| field.trim() == name).map(|(_, value)| value.trim())
        };
        let number = |name| of(name)?.parse().ok();
        let vendor = of("vendor_id")?.to_string();
        Some(Processor { vendor, family: number("cpu family")?, model: number("model")? })
    }

    /// That of this machine.
    pub fn here() -> Option<Processor> {
        Processor::parse(&std::fs::read_to_string("/proc/cpuinfo").ok()?)
    }
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct NumaNode {
    pub id: u32,
    /// That are switched on, ascending; never empty.
    pub cpus: Vec<u32>,
    /// Of those, the ones that this process may use.
    pub allowed: Vec<u32>,
}

/// Where a device lies.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Place {
    pub address: Address,
    /// None where the firmware does not say.
    pub numa_node: Option<u32>,
    /// The processors that the kernel calls near, ascending; none where it does not say.
    pub local_cpus: Option<Vec<u32>>,
    /// Its host bridge, then each bridge down to the device.
    pub bridges: Vec<String>,
}

/// A GPU of NVIDIA's.
#[derive(Clone, Debug, PartialEq, Eq, Serialize)]
pub struct Gpu {
    #[serde(flatten)]
    pub place: Place,
}

/// A card that does RDMA.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Hca {
    /// As NCCL and the verbs library call it: `mlx5_0`, `mlx5_ib0`.
    pub name: String,
    #[serde(flatten)]
    pub place: Place,
    /// Ascending by number.
    pub ports: Vec<Port>,
    /// To each of the machine's GPUs, in their order.
    pub distances: Vec<Distance>,
}

#[derive(Clone, Debug, PartialEq, Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Port {
    pub number: u32,
    pub link_layer: LinkLayer,
    /// In the kernel's words: ACTIVE, DOWN, INIT, ARMED.
    pub state: String,
    /// Gb/s, of all lanes together.
    pub rate: Option<f64>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize)]
pub enum LinkLayer {
    InfiniBand,
    /// RoCE.
    Ethernet,
    Unknown,
}

/// Something that is not as the kernel has it on a sound machine.
#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Odd {
    /// The file below /sys, or the device.
    pub at: String,
    pub what: String,
}

impl Odd {
    pub fn new(at: impl Into<String>, what: impl Into<String>) -> Odd {
        Odd { at: at.into(), what: what.into() }
    }
}

impl Port {
    /// Whether NCCL can train over it as InfiniBand.
    pub fn is_usable(&self) -> bool {
        self.link_layer == LinkLayer::InfiniBand && self.state == "ACTIVE"
    }
}

impl Hca {
    /// Its first port that is InfiniBand and up.
    pub fn usable_port(&self) -> Option<&Port> {
        self.ports.iter().find(|port| port.is_usable())
    }
}

impl Machine {
    /// This machine, as far as this process may use it.
    ///
    /// # Errors
    /// The allowed processors cannot be read.
    pub fn here() -> io::Result<Machine> {
        let root = std::env::var_os(ENV_SYS).unwrap_or_else(|| SYS.into());
        let machine = sys::read(Path::new(&root), Some(&allowed()?));
        #[cfg(feature = "hwloc")]
        let machine = match hwloc::see() {
            Ok(seen) => machine.beside(&seen),
            Err(error) => {
                tracing::warn!(error, "the kernel's files alone tell of this machine");
                machine
            }
        };
        Ok(machine)
    }

    pub fn node(&self, id: u32) -> Option<&NumaNode> {
        self.nodes.iter().find(|node| node.id == id)
    }

    /// The node that a device lies on, if the kernel says one that there is.
    pub fn node_of(&self, place: &Place) -> Option<&NumaNode> {
        self.node(place.numa_node?)
    }

    /// All processors that this process may use, ascending.
    pub fn allowed(&self) -> Vec<u32> {
        let mut all: Vec<u32> =
            self.nodes.iter().flat_map(|node| node.allowed.iter().copied()).collect();
        all.sort_unstable();
        all.dedup();
        all
    }

    /// For each GPU the HCA that serves it best, as its place in `hcas`: the nearest, and of
    /// equally near ones those that serve fewer GPUs, then the lower address. So the i-th GPU of a
    /// node has the i-th HCA there. None without an HCA that is up.
    pub fn hca_of_gpus(&self) -> Vec<Option<usize>> {
        let mut served = vec![0_u32; self.hcas.len()];
        let nearest = |gpu: usize| {
            let usable = |(_, hca): &(usize, &Hca)| hca.usable_port().is_some();
            let near = |(at, hca): &(usize, &Hca)| (hca.distances.get(gpu).copied(), served[*at]);
            let found = self.hcas.iter().enumerate().filter(usable).min_by_key(near);
            let at = found.map(|(at, _)| at)?;
            served[at] += 1;
            Some(at)
        };
        (0..self.gpus.len()).map(nearest).collect()
    }

    /// For a person: what it is called, and what is known of it.
    pub fn lines(&self) -> Vec<(String, String)> {
        let node = |node: &NumaNode| {
            let mut text = format!("{} processors: {}", node.cpus.len(), cpu_text(&node.cpus));
            if node.allowed != node.cpus {
                text += &match node.allowed.is_empty() {
                    true => "; none of them may be used here".to_string(),
                    false => format!("; allowed here: {}", cpu_text(&node.allowed)),
                };
            }
            (format!("NUMA node {}", node.id), text)
        };
        let serving = self.hca_of_gpus();
        let gpu = |(at, gpu): (usize, &Gpu)| {
            let hca = match serving[at].map(|hca| &self.hcas[hca]) {
                Some(hca) => format!("HCA {} ({})", hca.name, hca.distances[at]),
                None => "no InfiniBand card that is up".to_string(),
            };
            (format!("GPU {}", gpu.place.address), format!("{}, {hca}", on_node(&gpu.place)))
        };
        let hca = |hca: &Hca| {
            let ports: Vec<String> = hca.ports.iter().map(Port::to_string).collect();
            let ports = if ports.is_empty() { "no port".to_string() } else { ports.join(", ") };
            let address = &hca.place.address;
            (format!("HCA {}", hca.name), format!("{address}, {}, {ports}", on_node(&hca.place)))
        };
        let nodes = self.nodes.iter().map(node);
        let gpus = self.gpus.iter().enumerate().map(gpu);
        nodes.chain(gpus).chain(self.hcas.iter().map(hca)).collect()
    }
}

fn on_node(place: &Place) -> String {
    match place.numa_node {
        Some(node) => format!("NUMA node {node}"),
        None => "NUMA node unknown".to_string(),
    }
}

impl std::fmt::Display for Port {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        let Port { number, link_layer, state, rate } = self;
        write!(f, "port {number} {link_layer:?} {state}")?;
        rate.map_or(Ok(()), |rate| write!(f, " {rate} Gb/s"))
    }
}

/// The processors that this thread may use, ascending: its affinity, which a cpuset narrows.
///
/// # Errors
/// The kernel has more processors than the call takes.
pub fn allowed() -> io::Result<Vec<u32>> {
    let set = sched_getaffinity(None)?;
    Ok((0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).map(|cpu| cpu as u32).collect())
}
