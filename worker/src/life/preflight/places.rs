//! A node against its profile: what differs, and which of the two is odd.
//!
//! A kernel's own files can contradict each other, and then the machine is odd. Where they agree
//! with each other and not with the profile, one node alone cannot tell: a second one can.

use crate::life::affinity::Share;
use crate::life::machine::pci::{Address, Distance};
use crate::life::machine::{Hca, LinkLayer, Machine, NumaNode, Place};
use moejob_protocol::config::Backend;
use moejob_protocol::cpus::cpu_text;
use moejob_protocol::preflight::{Check, Expected, Grade, Measured, Numa, Value};
use serde::Serialize;
use std::collections::BTreeMap;

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Odd {
    Machine,
    Profile,
    /// This node alone cannot tell.
    OneOfTheTwo,
}

impl Odd {
    pub fn in_words(self) -> &'static str {
        match self {
            Odd::Machine => "odd: machine",
            Odd::Profile => "odd: profile",
            Odd::OneOfTheTwo => "odd: either",
        }
    }
}

#[derive(Clone, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
pub struct Difference {
    pub odd: Odd,
    /// Which check of a preflight it speaks against.
    #[serde(skip)]
    pub check: Check,
    pub what: String,
    /// What to do about it.
    pub next: &'static str,
}

const REPORT: &str = "keep jobs off this node, and report it to who runs the machines";
const LOOK: &str = "look for it with lspci -D on the node, and in the kernel's log";
const OTHER: &str = "look at another node of this type: where all say the same, the profile is \
                     odd (put one of your own over it); otherwise this node is (report it)";
const OWN: &str = "put a profile of your own over it (docs/ndm-a100.md)";
const LINK: &str = "look at ibstat and at the switch's port; jobs on this node would use fewer \
                    cards";
const DRIVER: &str = "on the node load the drivers mlx5_ib and ib_uverbs; a pod asks for the \
                      profile's rdma resource";

/// Everything that differs, what the machine is to blame for first. Workers that `share` a machine
/// stand for a node each, and it has the GPUs of all of them.
pub fn compare(machine: &Machine, profile: &Expected, share: Share) -> Vec<Difference> {
    let mut found = Found::default();
    for odd in &machine.odd {
        found.add((Odd::Machine, Check::Numa), format!("{}: {}", odd.at, odd.what), REPORT);
    }
    if found.of_another_machine(machine, profile) {
        return found.sorted();
    }
    found.count(machine, profile, share);
    found.processors(machine, profile);
    found.places(machine, profile);
    found.cards(machine, profile);
    found.sorted()
}

fn addresses(numa: &[Numa], which: impl Fn(&Numa) -> &Vec<String>) -> Vec<Address> {
    numa.iter().flat_map(which).filter_map(|text| Address::parse(text)).collect()
}

/// What a person calls a device of a profile, by where its kind is listed.
type Kind = (&'static str, fn(&Numa) -> &Vec<String>);
const KINDS: [Kind; 2] = [("GPU", |of| &of.gpus), ("HCA", |of| &of.hcas)];

#[derive(Default)]
struct Found {
    all: Vec<Difference>,
}

impl Found {
    fn add(&mut self, (odd, check): (Odd, Check), what: String, next: &'static str) {
        self.all.push(Difference { odd, check, what, next });
    }

    fn sorted(mut self) -> Vec<Difference> {
        self.all.sort();
        self.all.dedup();
        self.all
    }

    /// None of the profile's addresses is here, though there are GPUs.
    fn of_another_machine(&mut self, machine: &Machine, profile: &Expected) -> bool {
        let listed = addresses(&profile.numa, |of| &of.gpus);
        let here = |address: &Address| place_of(machine, *address).is_some();
        if listed.is_empty() || machine.gpus.is_empty() || listed.iter().any(here) {
            return false;
        }
        let (count, first) = (machine.gpus.len(), machine.gpus[0].place.address);
        let here = match count {
            1 => format!("the only GPU is {first}"),
            count => format!("the first of {count} GPUs is {first}"),
        };
        let what = format!("none of its {} GPU addresses is here, where {here}", listed.len());
        self.add((Odd::Profile, Check::Gpus), what, OWN);
        true
    }

    fn count(&mut self, machine: &Machine, profile: &Expected, share: Share) {
        let (there, said) = (machine.gpus.len(), (profile.devices * share.of.max(1)) as usize);
        let listed = profile.numa.iter().any(|node| !node.gpus.is_empty());
        if profile.counts && !listed && there != said {
            let each = match share.of {
                0 | 1 => format!("the profile has {said}"),
                of => format!("{of} workers with {} of the profile each need {said}",
                    profile.devices),
            };
            let what = format!("{there} GPUs are here, {each}");
            self.add((Odd::Machine, Check::Gpus), what, LOOK);
        }
        if !listed {
            return;
        }
        for address in addresses(&profile.numa, |of| &of.gpus) {
            if place_of(machine, address).is_none() {
                self.add((Odd::Machine, Check::Gpus), format!("GPU {address} is not here"), LOOK);
            }
        }
        let known = addresses(&profile.numa, |of| &of.gpus);
        for gpu in machine.gpus.iter().filter(|gpu| !known.contains(&gpu.place.address)) {
            let what = format!("GPU {} is not in the profile", gpu.place.address);
            self.add((Odd::Profile, Check::Gpus), what, OWN);
        }
    }

    fn processors(&mut self, machine: &Machine, profile: &Expected) {
        let (said, there) = (&profile.numa, &machine.nodes);
        if said.is_empty() {
            return;
        }
        let all: Vec<u32> = said.iter().flat_map(|node| node.cpus.iter().copied()).collect();
        let off = all.iter().filter(|cpu| machine.online.binary_search(cpu).is_err());
        let mut off: Vec<u32> = off.copied().collect();
        off.sort_unstable();
        if !off.is_empty() {
            let what = format!("processors {} are off or not there", cpu_text(&off));
            self.add((Odd::Machine, Check::Numa), what, REPORT);
            return;
        }
        if said.len() != there.len() {
            let (there, said) = (there.len(), said.len());
            let what = format!("the kernel has {there} NUMA nodes, the profile {said}");
            self.add((Odd::OneOfTheTwo, Check::Numa), what, OTHER);
            return;
        }
        for node in there.iter().filter(|node| !said.iter().any(|of| of.cpus == node.cpus)) {
            let (id, cpus) = (node.id, cpu_text(&node.cpus));
            let what = format!("NUMA node {id} has processors {cpus}, no node of the profile does");
            self.add((Odd::OneOfTheTwo, Check::Numa), what, OTHER);
        }
    }

    /// Devices that the machine has beside other processors than the profile. A device whose own
    /// files contradict each other was told already.
    fn places(&mut self, machine: &Machine, profile: &Expected) {
        // By the processors of the profile, then those of the machine.
        let mut moved: BTreeMap<(String, String), Vec<String>> = BTreeMap::new();
        let same = |node: &NumaNode| profile.numa.iter().any(|of| of.cpus == node.cpus);
        for numa in &profile.numa {
            for (kind, listed) in KINDS {
                for address in listed(numa).iter().filter_map(|text| Address::parse(text)) {
                    let Some(place) = place_of(machine, address) else { continue };
                    let Some(node) = machine.node_of(place) else { continue };
                    let sound = place.local_cpus.as_ref().is_none_or(|near| *near == node.cpus);
                    if node.cpus != numa.cpus && same(node) && sound {
                        let at = (cpu_text(&numa.cpus), cpu_text(&node.cpus));
                        moved.entry(at).or_default().push(format!("{kind} {address}"));
                    }
                }
            }
        }
        for ((said, here), devices) in &moved {
            let listed = devices.join(", ");
            let what = match moved.get(&(here.clone(), said.clone())) {
                Some(others) if said < here => format!(
                    "the map of NUMA nodes is swapped: {listed} are near processors {here} here \
                     and {said} in the profile, {} the other way round",
                    others.join(", ")
                ),
                Some(_) => continue,
                None => format!("near processors {here} here, {said} in the profile: {listed}"),
            };
            self.add((Odd::OneOfTheTwo, Check::Numa), what, OTHER);
        }
        let pairs = profile.numa.iter().flat_map(|of| of.gpus.iter().zip(&of.hcas));
        for (gpu, hca) in pairs {
            self.nearer(machine, gpu, hca);
        }
    }

    /// Bridges do not lie: a GPU whose own bridge has another card than the profile's is told.
    fn nearer(&mut self, machine: &Machine, gpu: &str, hca: &str) {
        let (Some(gpu), Some(said)) = (Address::parse(gpu), Address::parse(hca)) else { return };
        let at = machine.gpus.iter().position(|of| of.place.address == gpu);
        let paired = machine.hcas.iter().find(|of| of.place.address == said);
        let (Some(at), Some(paired)) = (at, paired) else { return };
        let nearest = machine.hcas.iter().min_by_key(|of| of.distances[at]).unwrap_or(paired);
        let (near, far) = (nearest.distances[at], paired.distances[at]);
        if matches!(near, Distance::Bridges(_)) && near < far {
            let what = format!(
                "GPU {gpu} is paired with HCA {said} ({far}), and {} is nearer ({near})",
                nearest.place.address
            );
            self.add((Odd::Profile, Check::Numa), what, OWN);
        }
    }

    fn cards(&mut self, machine: &Machine, profile: &Expected) {
        let listed = addresses(&profile.numa, |of| &of.hcas);
        if !profile.rdma && listed.is_empty() {
            return;
        }
        if machine.hcas.is_empty() {
            let what = "no card is below /sys/class/infiniband".to_string();
            return self.add((Odd::Machine, Check::Cards), what, DRIVER);
        }
        let is_meant = |hca: &&Hca| listed.is_empty() || listed.contains(&hca.place.address);
        let meant: Vec<&Hca> = machine.hcas.iter().filter(is_meant).collect();
        for address in &listed {
            if !meant.iter().any(|hca| hca.place.address == *address) {
                self.add((Odd::Machine, Check::Cards), format!("HCA {address} is not here"), LOOK);
            }
        }
        let rates = meant.iter().flat_map(|hca| &hca.ports).filter_map(|port| port.rate);
        let most = rates.fold(0.0_f64, f64::max);
        for hca in meant {
            self.card(hca, most);
        }
        let usable = |hca: &&Hca| hca.usable_port().is_some() && !is_meant(hca);
        for hca in machine.hcas.iter().filter(usable) {
            let (name, address) = (&hca.name, hca.place.address);
            let what = format!("HCA {name} ({address}) is InfiniBand and not in the profile");
            self.add((Odd::Profile, Check::Cards), what, OWN);
        }
    }

    fn card(&mut self, hca: &Hca, most: f64) {
        let named = format!("HCA {} ({})", hca.name, hca.place.address);
        if hca.ports.is_empty() {
            return self.add((Odd::Machine, Check::Links), format!("{named} has no port"), DRIVER);
        }
        let Some(port) = hca.usable_port() else {
            for port in &hca.ports {
                let what = match port.link_layer {
                    LinkLayer::InfiniBand => {
                        format!("{named}: port {} is {}", port.number, port.state)
                    }
                    other => format!("{named}: port {} is {other:?}, not InfiniBand", port.number),
                };
                self.add((Odd::Machine, Check::Links), what, LINK);
            }
            return;
        };
        if let Some(rate) = port.rate.filter(|rate| *rate < most) {
            let what = format!("{named} runs at {rate} Gb/s, others at {most}");
            self.add((Odd::Machine, Check::Rates), what, LINK);
        }
    }
}

fn place_of(machine: &Machine, address: Address) -> Option<&Place> {
    let gpus = machine.gpus.iter().map(|gpu| &gpu.place);
    let mut places = gpus.chain(machine.hcas.iter().map(|hca| &hca.place));
    places.find(|place| place.address == address)
}

/// A line a difference, or one that all is as it should be.
pub fn measured(machine: &Machine, profile: &Expected, share: Share) -> Vec<Measured> {
    let differences = compare(machine, profile, share);
    let mut checks = vec![Check::Numa];
    if profile.backend == Backend::Cuda {
        checks.push(Check::Gpus);
    }
    if profile.rdma {
        checks.extend([Check::Cards, Check::Links, Check::Rates]);
    }
    let mut measured: Vec<Measured> = differences.iter().map(wrong).collect();
    for check in checks {
        if differences.iter().all(|difference| difference.check != check) {
            measured.push(Measured::of_check(check, Value::Fine(found(check, machine))));
        }
    }
    measured
}

/// Only what the machine lacks keeps a node from being used; a wrong map makes it slower.
fn wrong(difference: &Difference) -> Measured {
    let lacks = difference.check != Check::Numa && difference.odd == Odd::Machine;
    let grade = if lacks { Grade::Fail } else { Grade::Warn };
    let what = format!("{}: {}", difference.odd.in_words(), difference.what);
    Measured::of_check(difference.check, Value::Wrong { grade, what })
}

fn found(check: Check, machine: &Machine) -> String {
    let ports = || machine.hcas.iter().filter_map(|hca| hca.usable_port());
    match check {
        Check::Numa => format!("{} NUMA nodes", machine.nodes.len()),
        Check::Gpus => format!("{} GPUs", machine.gpus.len()),
        Check::Cards => format!("{} cards", machine.hcas.len()),
        Check::Links => format!("{} ports are InfiniBand and ACTIVE", ports().count()),
        Check::Rates => {
            let rates = ports().filter_map(|port| port.rate).fold(0.0, f64::max);
            format!("{rates} Gb/s")
        }
        _ => String::new(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::life::machine::Gpu;

    #[test]
    fn workers_that_share_a_machine_need_the_gpus_of_all_of_them() {
        let gpu = |address: &str| Gpu {
            place: Place {
                address: Address::parse(address).unwrap(),
                numa_node: None,
                local_cpus: None,
                bridges: Vec::new(),
            },
        };
        let gpus = vec![gpu("0000:00:06.0"), gpu("0000:00:07.0")];
        let machine = Machine { gpus, ..Machine::default() };
        let expected = |devices| Expected {
            backend: Backend::Cuda,
            devices,
            counts: true,
            ..Expected::default()
        };
        let told = |devices, of| -> Vec<String> {
            let found = compare(&machine, &expected(devices), Share { index: 0, of });
            found.into_iter().map(|difference| difference.what).collect()
        };
        assert_eq!(told(2, 1), [""; 0]);
        assert_eq!(told(1, 2), [""; 0]);
        assert_eq!(told(1, 1), ["2 GPUs are here, the profile has 1"]);
        assert_eq!(told(2, 2), ["2 GPUs are here, 2 workers with 2 of the profile each need 4"]);
    }
}
