//! Kinds of machine, so that a user names the machine and not forty variables.

use crate::job::bytes_of;
use crate::spec::{BackendName, NodesSpec, ProfileName};
use std::collections::BTreeMap;

const GIB: u64 = 1 << 30;

/// What a rank computes on.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Backend {
    Cpu,
    Cuda,
}

/// A kind of machine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Profile {
    pub name: ProfileName,
    pub backend: Backend,
    /// GPUs of a node.
    pub devices: u32,
    /// Ranks of a node: one a device, or one for all its processors.
    pub ranks: u32,
    /// Bytes that a rank may use; none where the machine is not known beforehand.
    pub rank_memory: Option<u64>,
    /// Devices that reach each other by NVLink.
    pub nvlink_domain: u32,
    /// Network cards for RDMA.
    pub nics: u32,
    /// Labels of the nodes that are meant.
    pub node_selector: BTreeMap<String, String>,
    /// Settings of NCCL that the machine's network wants.
    pub env: Vec<(&'static str, &'static str)>,
}

impl Profile {
    /// `custom` is read for profile custom alone, `devicesPerNode` for profiles cpu and gpu.
    pub fn of(nodes: &NodesSpec) -> Profile {
        let name = nodes.profile.unwrap_or(ProfileName::Cpu);
        match name {
            ProfileName::Cpu => Profile::cpu(nodes.devices_per_node.unwrap_or(1)),
            ProfileName::Gpu => Profile::of_this_machine(nodes.devices_per_node.unwrap_or(1)),
            ProfileName::NdmA100V4 => gpus(name, 80 * GIB, "Standard_ND96amsr_A100_v4"),
            ProfileName::NdH100V5 => gpus(name, 80 * GIB, "Standard_ND96isr_H100_v5"),
            ProfileName::NdH200V5 => gpus(name, 141 * GIB, "Standard_ND96isr_H200_v5"),
            ProfileName::Custom => Profile::custom(nodes),
        }
    }

    fn cpu(ranks: u32) -> Profile {
        Profile {
            name: ProfileName::Cpu,
            backend: Backend::Cpu,
            devices: 0,
            ranks: ranks.max(1),
            rank_memory: None,
            nvlink_domain: 1,
            nics: 0,
            node_selector: BTreeMap::new(),
            env: Vec::new(),
        }
    }

    /// GPUs of whatever kind: what memory they have is known where the job runs.
    fn of_this_machine(devices: u32) -> Profile {
        Profile {
            name: ProfileName::Gpu,
            backend: Backend::Cuda,
            devices,
            ranks: devices.max(1),
            nvlink_domain: devices.max(1),
            ..Profile::cpu(1)
        }
    }

    fn custom(nodes: &NodesSpec) -> Profile {
        let typed = nodes.custom.clone().unwrap_or_default();
        let devices = typed.devices.unwrap_or(0);
        let backend = match typed.backend {
            Some(BackendName::Cpu) => Backend::Cpu,
            _ if devices == 0 => Backend::Cpu,
            Some(BackendName::Cuda) | None => Backend::Cuda,
        };
        Profile {
            name: ProfileName::Custom,
            backend,
            devices: if backend == Backend::Cuda { devices } else { 0 },
            ranks: devices.max(1),
            rank_memory: typed.device_memory.as_deref().and_then(bytes_of),
            nvlink_domain: typed.nvlink_domain.unwrap_or(devices.max(1)),
            nics: 0,
            node_selector: typed.node_selector.unwrap_or_default(),
            env: Vec::new(),
        }
    }
}

/// The Azure machines with eight GPUs and eight InfiniBand cards, one beside each GPU.
fn gpus(name: ProfileName, memory: u64, instance: &str) -> Profile {
    let label = "node.kubernetes.io/instance-type".to_string();
    Profile {
        name,
        backend: Backend::Cuda,
        devices: 8,
        ranks: 8,
        // The driver, the context and NCCL's own buffers take about 4 GiB of a device.
        rank_memory: Some(memory - 4 * GIB),
        nvlink_domain: 8,
        nics: 8,
        node_selector: BTreeMap::from([(label, instance.to_string())]),
        env: vec![
            ("NCCL_IB_PCI_RELAXED_ORDERING", "1"),
            ("NCCL_SOCKET_IFNAME", "eth0"),
            ("NCCL_IB_HCA", "mlx5_ib"),
        ],
    }
}
