//! Which processors the engines of a worker and the worker itself use, and which cards NCCL does.
//!
//! ```text
//! Machine x allowed processors x devices --bind--> Binding --apply--> threads
//!                                                     `--differences-- /proc/PID/task/*/status
//! ```
//! Linux gives a thread memory of the NUMA node that it runs on when it first touches it. So an
//! engine is bound before it starts a thread or allocates, and its buffers lie beside its device.
//! Its own threads (feeder, checkpoint writer, copies) are bound with it. The worker's threads,
//! which read data and move bytes between machines, get the processors that no engine has.

pub mod apply;
pub mod memory;

use moejob_protocol::cpus::cpu_text;
use super::machine::pci::{Address, Distance};
use super::machine::{Gpu, Hca, Machine, NumaNode};
use std::collections::BTreeMap;

/// Of a node's processors one in so many is left to the worker's own threads.
const WORKERS_PART: usize = 8;

/// Who runs where.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Binding {
    /// One an engine, in the order of its devices; none: it runs where it likes.
    pub engines: Vec<Option<Seat>>,
    /// Of the worker's own threads; none: where they like. Ascending.
    pub worker: Option<Vec<u32>>,
    /// Why somebody is not bound; empty where all are.
    pub why: String,
}

/// The processors of an engine.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Seat {
    /// The NUMA node of its device.
    pub node: u32,
    /// Its own, ascending; never empty.
    pub cpus: Vec<u32>,
    /// All of the node that the worker may use: NCCL puts its own threads anywhere there.
    pub near: Vec<u32>,
}

/// Seats for the engines of a worker that may use `allowed` (ascending) of `machine`. `devices` are
/// the PCI addresses of their GPUs, none for an engine that computes on processors; each engine
/// computes with up to `threads` threads.
///
/// A node's engines share it fairly, and an eighth of it is the worker's, unless the engines could
/// not have `threads` processors each then. Engines without a GPU spread over the nodes in runs.
/// Nobody is bound on one NUMA node alone: there all memory is equally near.
pub fn bind(
    machine: &Machine,
    allowed: &[u32],
    devices: &[Option<Address>],
    threads: usize,
) -> Binding {
    let free = |node: &NumaNode| {
        let mut cpus = node.cpus.clone();
        cpus.retain(|cpu| allowed.binary_search(cpu).is_ok());
        (node.id, cpus)
    };
    let nodes: Vec<(u32, Vec<u32>)> =
        machine.nodes.iter().map(free).filter(|(_, cpus)| !cpus.is_empty()).collect();
    let unbound = |why: &str| Binding {
        engines: vec![None; devices.len()],
        worker: None,
        why: why.to_string(),
    };
    if !machine.has_numa {
        return unbound("the kernel lists no NUMA nodes");
    }
    if nodes.len() < 2 {
        return unbound("all processors that may be used are of one NUMA node");
    }
    let mut why = Vec::new();
    let mut homes: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
    for (engine, device) in devices.iter().enumerate() {
        let home = match device {
            None => Ok(nodes[engine * nodes.len() / devices.len()].0),
            Some(address) => home(machine, &nodes, *address),
        };
        match home {
            Ok(node) => homes.entry(node).or_default().push(engine),
            Err(error) => why.push(format!("engine {engine} is not bound: {error}")),
        }
    }
    let mut engines = vec![None; devices.len()];
    let mut taken = Vec::new();
    for (node, near) in &nodes {
        let here = homes.get(node).map_or(&[][..], |here| here);
        for (engine, cpus) in here.iter().zip(divide(near, here.len(), threads)) {
            taken.extend(cpus.iter().copied());
            engines[*engine] = Some(Seat { node: *node, cpus, near: near.clone() });
        }
        if here.len() > near.len() {
            let cpus = cpu_text(near);
            why.push(format!("{} engines share processors {cpus} of node {node}", here.len()));
        }
    }
    taken.sort_unstable();
    let rest = allowed.iter().copied().filter(|cpu| taken.binary_search(cpu).is_err());
    let rest: Vec<u32> = rest.collect();
    let everybody = engines.iter().all(Option::is_some);
    let worker = (!rest.is_empty() && everybody).then_some(rest);
    Binding { engines, worker, why: why.join("; ") }
}

fn home(machine: &Machine, nodes: &[(u32, Vec<u32>)], address: Address) -> Result<u32, String> {
    let gpu = machine.gpus.iter().find(|gpu| gpu.place.address == address);
    let gpu = gpu.ok_or_else(|| format!("GPU {address} is not below /sys"))?;
    let node = gpu.place.numa_node;
    let node = node.ok_or_else(|| format!("the NUMA node of GPU {address} is not known"))?;
    match nodes.iter().any(|(id, _)| *id == node) {
        true => Ok(node),
        false => {
            Err(format!("no processor of NUMA node {node}, where GPU {address} is, may be used"))
        }
    }
}

/// The processors of each of `engines` engines on a node that has `cpus`, ascending each.
///
/// Processors that are counted apart, as 0-7,16-23, are mostly two threads of each core: so cuts go
/// through all runs at the same place, and no two engines share a core.
fn divide(cpus: &[u32], engines: usize, threads: usize) -> Vec<Vec<u32>> {
    if engines == 0 {
        return Vec::new();
    }
    let fair = cpus.len() / engines;
    if fair == 0 {
        return vec![cpus.to_vec(); engines];
    }
    let (mut order, mut start, mut runs) = (Vec::new(), 0, 1);
    for (at, cpu) in cpus.iter().enumerate() {
        if at > 0 && cpus[at - 1] + 1 != *cpu {
            (start, runs) = (at, runs + 1);
        }
        order.push((at - start, *cpu));
    }
    order.sort_unstable();
    let each = (cpus.len() - cpus.len() / WORKERS_PART) / engines;
    let whole = if each > runs { each - each % runs } else { each };
    let each = whole.max(threads.min(fair)).max(1);
    let seat = |of: &[(usize, u32)]| {
        let mut cpus: Vec<u32> = of.iter().map(|(_, cpu)| *cpu).collect();
        cpus.sort_unstable();
        cpus
    };
    order.chunks(each).take(engines).map(seat).collect()
}

/// The PCI addresses of the GPUs that a process sees, by CUDA's number. `device_files` is how many
/// GPUs this process may open (`/dev/nvidia0` and so on), `visible` is CUDA_VISIBLE_DEVICES.
///
/// None where it is not plain which GPU is which: a container shows all cards of its machine in
/// /sys, also those that it was not given.
pub fn addresses(
    gpus: &[Gpu],
    device_files: usize,
    visible: Option<&str>,
) -> Option<Vec<Address>> {
    let all: Vec<Address> = gpus.iter().map(|gpu| gpu.place.address).collect();
    if all.len() != device_files {
        return None;
    }
    match visible {
        None => Some(all),
        Some(list) => {
            let at = |text: &str| all.get(text.trim().parse::<usize>().ok()?).copied();
            list.split(',').map(at).collect()
        }
    }
}

/// What NCCL_IB_HCA must say for the GPUs at `gpus` (all of the machine's where there are none):
/// `=mlx5_0:1,mlx5_1:1`, exact names and ports. `listed` are the profile's cards; where it lists
/// none, all count. Only ports count that are InfiniBand and ACTIVE; cards of other NUMA nodes than
/// any of the GPUs count only where there is no other. None without such a port: NCCL would take
/// TCP then, whatever it is told.
pub fn hca_setting(machine: &Machine, gpus: &[Address], listed: &[Address]) -> Option<String> {
    let is_ours = |(_, gpu): &(usize, &Gpu)| gpus.is_empty() || gpus.contains(&gpu.place.address);
    let ours: Vec<usize> =
        machine.gpus.iter().enumerate().filter(is_ours).map(|(at, _)| at).collect();
    let is_listed = |hca: &&Hca| listed.is_empty() || listed.contains(&hca.place.address);
    let usable = machine.hcas.iter().filter(is_listed);
    let usable: Vec<&Hca> = usable.filter(|hca| hca.usable_port().is_some()).collect();
    let is_near = |hca: &&&Hca| ours.iter().any(|at| hca.distances[*at] < Distance::System);
    let near: Vec<&Hca> = usable.iter().filter(is_near).copied().collect();
    let chosen = if near.is_empty() { usable } else { near };
    let ports = chosen.iter().flat_map(|hca| {
        let usable = hca.ports.iter().filter(|port| port.is_usable());
        usable.map(|port| format!("{}:{}", hca.name, port.number))
    });
    let ports: Vec<String> = ports.collect();
    (!ports.is_empty()).then(|| format!("={}", ports.join(",")))
}

/// A thread as /proc shows it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Thread {
    pub id: u32,
    pub name: String,
    /// Ascending.
    pub allowed: Vec<u32>,
}

/// Threads of an engine that may run elsewhere than planned, in words. The first thread, which
/// drives the device, must be on the seat; others may be anywhere near the device.
pub fn differences(seat: &Seat, process: u32, threads: &[Thread]) -> Vec<String> {
    let wrong = |thread: &&Thread| {
        let planned = if thread.id == process { &seat.cpus } else { &seat.near };
        thread.allowed.iter().any(|cpu| planned.binary_search(cpu).is_err())
    };
    let say = |thread: &Thread| {
        let planned = if thread.id == process { &seat.cpus } else { &seat.near };
        let (found, planned) = (cpu_text(&thread.allowed), cpu_text(planned));
        format!("thread {} ({}) may use {found}, planned {planned}", thread.id, thread.name)
    };
    let mut found: Vec<String> = threads.iter().filter(wrong).map(say).collect();
    if !threads.iter().any(|thread| thread.id == process) {
        found.push(format!("process {process} does not show its first thread"));
    }
    found
}
