//! The same machine as the C library hwloc sees it, which knows the quirks of more firmware than
//! the kernel's files tell. It is asked beside them, and where the two differ that is odd.
//!
//! What NUMA nodes there are is hwloc's word where the kernel lists none.

use moejob_protocol::cpus::cpu_text;
use super::pci::Address;
use super::{Machine, NumaNode, Odd};
use hwlocality::Topology;
use hwlocality::object::TopologyObject;
use hwlocality::object::attributes::ObjectAttributes;
use hwlocality::object::types::ObjectType;
use hwlocality::topology::builder::TypeFilter;
use std::collections::BTreeMap;

/// What hwloc knows of a machine.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Seen {
    /// Processors by NUMA node, ascending.
    pub nodes: BTreeMap<u32, Vec<u32>>,
    /// By PCI address: the NUMA node of each device, where there is one alone.
    pub devices: BTreeMap<Address, Option<u32>>,
}

/// # Errors
/// hwloc cannot read the machine; it says why.
pub fn see() -> Result<Seen, String> {
    let failed = |error: &dyn std::fmt::Display| format!("hwloc: {error}");
    let builder = Topology::builder().with_io_type_filter(TypeFilter::KeepAll);
    let topology = builder.map_err(|error| failed(&error))?.build();
    let topology = topology.map_err(|error| failed(&error))?;
    let nodes = topology.objects_with_type(ObjectType::NUMANode).filter_map(|node| {
        let cpus: Vec<u32> = node.cpuset()?.iter_set().map(|cpu| usize::from(cpu) as u32).collect();
        Some((node.os_index()? as u32, cpus))
    });
    let nodes = nodes.filter(|(_, cpus)| !cpus.is_empty()).collect();
    let devices = topology.pci_devices().filter_map(device).collect();
    Ok(Seen { nodes, devices })
}

fn device(object: &TopologyObject) -> Option<(Address, Option<u32>)> {
    let Some(ObjectAttributes::PCIDevice(pci)) = object.attributes() else { return None };
    let (domain, bus, device) = (pci.domain(), pci.bus_id(), pci.bus_device());
    let text = format!("{domain:04x}:{bus:02x}:{device:02x}.{:x}", pci.function());
    let near = object.first_non_io_ancestor().and_then(TopologyObject::nodeset);
    let near: Vec<u32> =
        near.map(|set| set.iter_set().map(|node| usize::from(node) as u32).collect())?;
    let node = if let [node] = near[..] { Some(node) } else { None };
    Some((Address::parse(&text)?, node))
}

impl Machine {
    /// With what hwloc sees: nodes where the kernel lists none, and what differs.
    pub fn beside(mut self, seen: &Seen) -> Machine {
        if !self.has_numa && seen.nodes.len() > 1 {
            let allowed = self.allowed();
            let node = |(id, cpus): (&u32, &Vec<u32>)| {
                let is_allowed = |cpu: &u32| allowed.binary_search(cpu).is_ok();
                let allowed = cpus.iter().copied().filter(is_allowed).collect();
                NumaNode { id: *id, cpus: cpus.clone(), allowed }
            };
            self.nodes = seen.nodes.iter().map(node).collect();
            self.has_numa = true;
        }
        for node in &self.nodes {
            let found = seen.nodes.get(&node.id).map(|cpus| cpu_text(cpus)).unwrap_or_default();
            let cpus = cpu_text(&node.cpus);
            // Without a list of its own the one node is ours.
            if self.has_numa && found != cpus {
                let at = format!("devices/system/node/node{}/cpulist", node.id);
                self.odd.push(Odd::new(at, format!("is {cpus}, and {found:?} for hwloc")));
            }
        }
        let places = self.gpus.iter().map(|gpu| &gpu.place);
        for place in places.chain(self.hcas.iter().map(|hca| &hca.place)) {
            let (Some(node), Some(Some(found))) =
                (place.numa_node, seen.devices.get(&place.address))
            else {
                continue;
            };
            if node != *found {
                let what = format!("numa_node is {node}, and {found} for hwloc");
                self.odd.push(Odd::new(place.address.to_string(), what));
            }
        }
        self.odd.sort();
        self.odd.dedup();
        self
    }
}
