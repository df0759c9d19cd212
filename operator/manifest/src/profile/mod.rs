//! Kinds of machine, so that a user names the machine and not forty variables.
//!
//! ```text
//! manifests/profiles/NAME.yaml, an admin's own --read--> Profiles, or what is wrong with each
//! Profiles x spec.nodes --choose--> Profile of a job, or the problem of its name
//! ```
//!
//! A profile is data: `schema` says what may stand there, `read` judges it, with every problem at
//! once and in the words of a manifest's. [docs/ndm-a100.md] explains the values of those shipped.

mod choose;
mod read;
mod schema;

pub use choose::{Broken, CUSTOM_ENV, File, Profiles};
pub use read::read;
pub use schema::CHECKS;

pub use moejob_protocol::config::Backend;
use moejob_protocol::cpus::cpu_text;
use moejob_protocol::preflight::{self, LOOPBACK_CHECK};
use moejob_protocol::topology::{Near, Pci, Topology};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// The profile of processors, and the default.
pub const CPU: &str = "cpu";
/// The GPUs of the machine of `moejob run`.
pub const GPU: &str = "gpu";
/// The machine that the job itself describes.
pub const CUSTOM: &str = "custom";

/// A kind of machine, as one job uses it.
#[derive(Clone, Debug, PartialEq)]
pub struct Profile {
    pub name: String,
    pub backend: Backend,
    /// GPUs of a node.
    pub devices: u32,
    /// Ranks of a node: one a device, or one for all its processors.
    pub ranks: u32,
    /// Bytes that a rank may use; none where the machine is not known beforehand.
    pub rank_memory: Option<u64>,
    /// Devices that reach each other by NVLink.
    pub nvlink_domain: u32,
    /// Labels of the nodes that are meant.
    pub node_selector: BTreeMap<String, String>,
    /// What a pod asks for so that it may use the network cards.
    pub rdma: Option<Rdma>,
    /// Quantities that a pod asks for, `cpu` and `memory` among them.
    pub requests: BTreeMap<String, String>,
    /// Settings that the machine's network wants.
    pub env: Vec<Setting>,
    /// Ascending by processor; empty where the profile does not say.
    pub numa: Vec<Numa>,
    /// PCI as the machine's kernel does not show it.
    pub pci: Option<Pci>,
    pub topology_file: Option<TopologyFile>,
    /// By the name of the check.
    pub expect: BTreeMap<String, Limit>,
    /// What estimates of the time between GPUs rest on; none where the profile does not say.
    pub links: Option<LinkFigures>,
    /// What estimates of computing rest on; likewise.
    pub flops: Option<Flops>,
    /// The price of a node and hour, in whatever money.
    pub price: Option<f64>,
    /// A hash, in 16 hex digits, of all that the profile says but `links`, `flops` and `price`. The
    /// record compares it.
    pub digest: String,
}

/// An extended resource of Kubernetes.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Rdma {
    /// `rdma/ib`
    pub resource: String,
    pub count: u32,
}

/// A variable of the worker's environment.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct Setting {
    pub name: String,
    pub value: String,
    /// For the reader of the profile.
    #[serde(default)]
    pub why: String,
}

/// A NUMA node and what hangs on it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Numa {
    /// Ascending.
    pub cpus: Vec<u32>,
    /// PCI addresses of its GPUs, as `0001:00:00.0`.
    pub gpus: Vec<String>,
    /// Of its InfiniBand cards; the i-th is meant for the i-th GPU.
    pub hcas: Vec<String>,
}

/// Where NCCL reads the machine's topology, which virtual machines hide.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum TopologyFile {
    /// The worker writes it, of what its kernel tells, `numa` and `pci`.
    Generated,
    /// A file of the worker's image.
    Path(String),
}

/// What a check of a node must reach, in the unit that its name ends with.
#[derive(Clone, Copy, Debug, PartialEq, Serialize)]
pub struct Limit {
    /// Below it the node is bad.
    pub fail: f64,
    /// Below it a person is told. Azure's own checks warn within 5% above the limit.
    pub warn: f64,
}

/// What a rank computes.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Flops {
    /// Dense bf16 rate of a GPU by its data sheet, TFLOP/s; zero where nobody says it.
    #[serde(default)]
    pub bf16_tflops: f64,
    /// The same in fp32 of a rank's processors.
    #[serde(default)]
    pub fp32_tflops: f64,
    /// The part of it that training reaches.
    pub reached: f64,
}

/// How fast links between GPUs are expected to be: `moejob_fabric::travel` makes times of them.
#[derive(Clone, Debug, PartialEq)]
pub struct LinkFigures {
    /// All-to-all between the GPUs of a node, by the bytes that one sends to all others.
    pub all_to_all: Vec<Line>,
    /// Reduce-scatter or all-gather between them, by the bytes that pass each GPU.
    pub ring: Vec<Line>,
    /// From a GPU's adapter to one on another node.
    pub network: Line,
    /// Of a sender, for each message over the network.
    pub message_seconds: f64,
    /// At which a GPU copies within its memory, bytes read and bytes written, a second.
    pub copy_rate: f64,
}

/// The time of a protocol: the seconds of nothing, and bytes a second.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Line {
    pub seconds: f64,
    pub rate: f64,
}

impl Default for Profile {
    /// Processors that one rank uses.
    fn default() -> Profile {
        Profile {
            name: CPU.to_string(),
            backend: Backend::Cpu,
            devices: 0,
            ranks: 1,
            rank_memory: None,
            nvlink_domain: 1,
            node_selector: BTreeMap::new(),
            rdma: None,
            requests: BTreeMap::new(),
            env: Vec::new(),
            numa: Vec::new(),
            pci: None,
            topology_file: None,
            expect: BTreeMap::new(),
            links: None,
            flops: None,
            price: None,
            digest: String::new(),
        }
    }
}

impl Profile {
    /// What a machine of this profile can be compared with.
    pub fn expected(&self) -> preflight::Expected {
        let numa = |of: &Numa| preflight::Numa {
            cpus: of.cpus.clone(),
            gpus: of.gpus.clone(),
            hcas: of.hcas.clone(),
        };
        let cuda = self.backend == Backend::Cuda;
        preflight::Expected {
            backend: self.backend,
            devices: self.devices,
            counts: cuda && !self.is_this_machine(),
            numa: self.numa.iter().map(numa).collect(),
            rdma: self.rdma.is_some(),
            loopback: cuda && self.expect.contains_key(LOOPBACK_CHECK),
        }
    }

    /// What a worker makes NCCL's file of.
    pub fn topology(&self) -> Topology {
        let near = |of: &Numa| Near {
            cpus: cpu_text(&of.cpus),
            gpus: of.gpus.clone(),
            hcas: of.hcas.clone(),
        };
        Topology { numa: self.numa.iter().map(near).collect(), pci: self.pci.clone() }
    }

    /// Of whatever machine `moejob run` finds; a cluster refuses it.
    pub fn is_this_machine(&self) -> bool {
        self.name == GPU
    }

    /// The job says how many devices there are, by `nodes.devicesPerNode`.
    pub fn devices_are_the_jobs(&self) -> bool {
        takes_devices_per_node(&self.name)
    }
}

/// Whether `nodes.devicesPerNode` goes with the profile.
pub fn takes_devices_per_node(name: &str) -> bool {
    [CPU, GPU].contains(&name)
}
