//! What NCCL's file of a machine's topology is made of, beside what the machine's kernel tells.

use crate::cpus::cpu_list;
use serde::{Deserialize, Serialize};

/// Of a profile with `topologyFile: generated`: a [`Topology`] as JSON.
pub const ENV_TOPOLOGY: &str = "MOEJOB_TOPOLOGY";

/// As the profile has it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Topology {
    pub numa: Vec<Near>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub pci: Option<Pci>,
}

/// What lies on one NUMA node. It counts for devices of which the kernel does not tell.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Near {
    /// Its processors, as `0-23`.
    pub cpus: String,
    /// PCI addresses of GPUs and of InfiniBand cards.
    pub gpus: Vec<String>,
    pub hcas: Vec<String>,
}

/// PCI as a virtual machine's kernel does not show it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Pci {
    /// Of a NUMA node; its GPUs and cards lie below them in equal parts.
    pub switches: u32,
    /// Of a lane, as `16 GT/s`: one of [`SPEEDS`].
    pub speed: String,
    /// Lanes.
    pub width: u32,
}

/// From PCI Express 1 to 6, in NCCL's words.
pub const SPEEDS: [&str; 6] = ["2.5 GT/s", "5 GT/s", "8 GT/s", "16 GT/s", "32 GT/s", "64 GT/s"];

impl Near {
    /// Its first processor, by which the kernel's own node is found.
    pub fn first_cpu(&self) -> Option<u32> {
        cpu_list(&self.cpus)?.first().copied()
    }

    /// Whether the device of this PCI address lies here.
    pub fn has(&self, address: &str) -> bool {
        self.gpus.iter().chain(&self.hcas).any(|of| of == address)
    }
}
