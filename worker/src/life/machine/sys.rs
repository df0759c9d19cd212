//! The machine from the kernel's files below a folder like /sys, without any library.
//!
//! A file that is missing or says nonsense is told as odd, and what hangs on it is left out. No
//! text makes the reader fail: the tree may be of any machine.

use super::pci::{Address, Distance};
use super::{Gpu, Hca, LinkLayer, Machine, NumaNode, Odd, Place, Port};
use moejob_protocol::cpus::{cpu_list, cpu_text};
use std::collections::{BTreeMap, BTreeSet};
use std::io::{ErrorKind, Read};
use std::path::{Path, PathBuf};

/// A page, which is as long as the kernel's small files get; lists of processors stay below two.
const FILE_BYTES_MAX: u64 = 16 << 10;
/// PCI-SIG's id of NVIDIA.
const NVIDIA: u32 = 0x10de;
/// PCI classes of a GPU: 3D controllers, and VGA ones of machines with a screen.
const GPU_CLASSES: [u32; 2] = [0x0302, 0x0300];

/// The machine below `root`; of its processors this process may use `allowed`, or all.
pub fn read(root: &Path, allowed: Option<&[u32]>) -> Machine {
    let mut reader = Reader { root, odd: Vec::new() };
    let (online, has_numa, nodes) = reader.processors(allowed);
    let gpus = reader.gpus();
    let hcas = reader.hcas(&gpus);
    let Reader { odd, .. } = reader;
    let mut machine = Machine { online, has_numa, nodes, gpus, hcas, odd };
    let contradictions = contradictions(&machine);
    machine.odd.extend(contradictions);
    machine.odd.sort();
    machine.odd.dedup();
    machine
}

struct Reader<'a> {
    root: &'a Path,
    odd: Vec<Odd>,
}

impl Reader<'_> {
    fn odd(&mut self, path: &Path, what: impl Into<String>) {
        let at = path.strip_prefix(self.root).unwrap_or(path);
        self.odd.push(Odd::new(at.display().to_string(), what));
    }

    /// The text of a file without the spaces around it; none where there is no such file.
    fn text(&mut self, path: &Path) -> Option<String> {
        let mut bytes = Vec::new();
        let read = std::fs::File::open(path)
            .and_then(|file| file.take(FILE_BYTES_MAX).read_to_end(&mut bytes));
        match read {
            Ok(_) => Some(String::from_utf8_lossy(&bytes).trim().to_string()),
            Err(error) if error.kind() == ErrorKind::NotFound => None,
            Err(error) => {
                self.odd(path, format!("cannot be read: {error}"));
                None
            }
        }
    }

    /// As `text`; a file that is missing is odd.
    fn must(&mut self, path: &Path) -> Option<String> {
        let before = self.odd.len();
        let text = self.text(path);
        if text.is_none() && self.odd.len() == before {
            self.odd(path, "is missing");
        }
        text
    }

    /// What `parse` makes of a file; one that it makes nothing of is odd.
    fn parsed<T>(
        &mut self,
        path: &Path,
        text: Option<String>,
        what: &str,
        parse: impl Fn(&str) -> Option<T>,
    ) -> Option<T> {
        let text = text?;
        let parsed = parse(&text);
        if parsed.is_none() {
            let shown: String = text.chars().take(40).collect();
            self.odd(path, format!("{shown:?} is no {what}"));
        }
        parsed
    }

    fn cpus(&mut self, path: &Path, text: Option<String>) -> Option<Vec<u32>> {
        self.parsed(path, text, "list of processors", cpu_list)
    }

    /// Those that are switched on, whether there are NUMA nodes, and the nodes.
    fn processors(&mut self, allowed: Option<&[u32]>) -> (Vec<u32>, bool, Vec<NumaNode>) {
        let mut lists = BTreeMap::new();
        for (name, folder) in entries(&self.root.join("devices/system/node")) {
            let id = name.strip_prefix("node").and_then(|id| id.parse::<u32>().ok());
            let Some(id) = id else { continue };
            let path = folder.join("cpulist");
            let text = self.must(&path);
            lists.insert(id, self.cpus(&path, text).unwrap_or_default());
        }
        let path = self.root.join("devices/system/cpu/online");
        let text = self.must(&path);
        let online = self.parsed(&path, text, "list of processors that are on", |text| {
            cpu_list(text).filter(|cpus| !cpus.is_empty())
        });
        let online = online.unwrap_or_else(|| {
            let listed = lists.values().flatten().copied().collect::<BTreeSet<u32>>();
            let known = if listed.is_empty() { allowed.unwrap_or(&[]) } else { &[] };
            listed.into_iter().chain(known.iter().copied()).collect()
        });
        lists.retain(|_, cpus| !cpus.is_empty());
        let has_numa = !lists.is_empty();
        if !has_numa {
            lists.insert(0, online.clone());
        }
        let is_allowed = |cpu: &u32| {
            online.binary_search(cpu).is_ok()
                && allowed.is_none_or(|allowed| allowed.contains(cpu))
        };
        let node = |(id, cpus): (u32, Vec<u32>)| {
            let allowed = cpus.iter().copied().filter(is_allowed).collect();
            NumaNode { id, cpus, allowed }
        };
        let nodes = lists.into_iter().map(node).filter(|node| !node.cpus.is_empty()).collect();
        (online, has_numa, nodes)
    }

    fn gpus(&mut self) -> Vec<Gpu> {
        let mut gpus = Vec::new();
        for (name, folder) in entries(&self.root.join("bus/pci/devices")) {
            let mut hex = |file: &str| {
                let path = folder.join(file);
                let text = self.must(&path);
                self.parsed(&path, text, "number such as 0x10de", |text| {
                    u32::from_str_radix(text.strip_prefix("0x")?, 16).ok()
                })
            };
            // The lowest byte of a class is the programming interface.
            let (vendor, class) = (hex("vendor"), hex("class").map(|class| class >> 8));
            let is_gpu = class.is_some_and(|class| GPU_CLASSES.contains(&class));
            if vendor != Some(NVIDIA) || !is_gpu {
                continue;
            }
            gpus.extend(self.place(&name, &folder).map(|place| Gpu { place }));
        }
        gpus.sort_by_key(|gpu| gpu.place.address);
        gpus
    }

    fn hcas(&mut self, gpus: &[Gpu]) -> Vec<Hca> {
        let mut hcas = Vec::new();
        for (name, folder) in entries(&self.root.join("class/infiniband")) {
            let device = folder.join("device");
            let Ok(path) = device.canonicalize() else {
                self.odd(&device, "is missing");
                continue;
            };
            let address = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
            let Some(place) = self.place(&address, &device) else { continue };
            let distance = |gpu: &Gpu| Distance::between(&gpu.place, &place);
            let distances = gpus.iter().map(distance).collect();
            hcas.push(Hca { name, ports: self.ports(&folder.join("ports")), place, distances });
        }
        hcas.sort_by(|a, b| (a.place.address, &a.name).cmp(&(b.place.address, &b.name)));
        hcas
    }

    fn ports(&mut self, folder: &Path) -> Vec<Port> {
        let mut ports = Vec::new();
        for (name, folder) in entries(folder) {
            let Ok(number) = name.parse() else { continue };
            let path = folder.join("link_layer");
            let text = self.must(&path);
            let layer = self.parsed(&path, text, "link layer", |text| match text {
                "InfiniBand" => Some(LinkLayer::InfiniBand),
                "Ethernet" => Some(LinkLayer::Ethernet),
                _ => None,
            });
            let link_layer = layer.unwrap_or(LinkLayer::Unknown);
            // `4: ACTIVE`
            let path = folder.join("state");
            let text = self.must(&path);
            let state = self.parsed(&path, text, "state such as `4: ACTIVE`", |text| {
                let (number, word) = text.split_once(": ")?;
                let is_word = word.bytes().all(|byte| byte.is_ascii_uppercase() || byte == b'_');
                (number.parse::<u32>().is_ok() && is_word).then(|| word.to_string())
            });
            // `200 Gb/sec (4X HDR)`, `2.5 Gb/sec (1X SDR)`
            let path = folder.join("rate");
            let text = self.must(&path);
            let rate = self.parsed(&path, text, "rate such as `200 Gb/sec (4X HDR)`", |text| {
                let (number, unit) = text.split_once(' ')?;
                let rate = number.parse::<f64>().ok().filter(|rate| rate.is_finite());
                rate.filter(|rate| *rate >= 0.0 && unit.starts_with("Gb/sec"))
            });
            let state = state.unwrap_or_else(|| "UNKNOWN".to_string());
            ports.push(Port { number, link_layer, state, rate });
        }
        ports.sort_by_key(|port| port.number);
        ports
    }

    /// Where the PCI device of that name lies, whose files `folder` has.
    fn place(&mut self, name: &str, folder: &Path) -> Option<Place> {
        let Some(address) = Address::parse(name) else {
            self.odd(folder, format!("{name:?} is no PCI address"));
            return None;
        };
        let path = folder.join("numa_node");
        let text = self.must(&path);
        // -1 where the firmware does not say.
        let node = self.parsed(&path, text, "NUMA node", |text| {
            text.parse::<i32>().ok().filter(|node| *node >= -1)
        });
        let path = folder.join("local_cpulist");
        let text = self.must(&path);
        let local_cpus = self.cpus(&path, text);
        let bridges = folder.canonicalize().map(|path| bridges(&path)).unwrap_or_default();
        Some(Place {
            address,
            numa_node: node.and_then(|node| u32::try_from(node).ok()),
            local_cpus,
            bridges,
        })
    }
}

/// `pci0000:00`, then the address of each bridge above the device.
fn bridges(device: &Path) -> Vec<String> {
    let names: Vec<String> =
        device.iter().map(|part| part.to_string_lossy().into_owned()).collect();
    let is_host = |name: &String| {
        name.strip_prefix("pci").is_some_and(|rest| rest.contains(':'))
    };
    let Some(host) = names.iter().position(is_host) else { return Vec::new() };
    let above = &names[host..names.len() - 1];
    let is_bridge = |(at, name): &(usize, &String)| *at == 0 || Address::parse(name).is_some();
    above.iter().enumerate().filter(is_bridge).map(|(_, name)| name.clone()).collect()
}

/// Sorted by name. A folder that is not there has none.
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

/// Where two files of one machine cannot both be right.
fn contradictions(machine: &Machine) -> Vec<Odd> {
    let mut odd = Vec::new();
    let mut owner = BTreeMap::new();
    for node in machine.nodes.iter().filter(|_| machine.has_numa) {
        let at = format!("devices/system/node/node{}/cpulist", node.id);
        let is_off = |cpu: &&u32| machine.online.binary_search(cpu).is_err();
        let off: Vec<u32> = node.cpus.iter().filter(is_off).copied().collect();
        if !off.is_empty() {
            let what = format!("processors {} are not switched on", cpu_text(&off));
            odd.push(Odd::new(&at, what));
        }
        for cpu in &node.cpus {
            if let Some(other) = owner.insert(*cpu, node.id) {
                let what = format!("processor {cpu} is also on NUMA node {other}");
                odd.push(Odd::new(&at, what));
                break;
            }
        }
    }
    let homeless = |cpu: &&u32| machine.has_numa && !owner.contains_key(cpu);
    let homeless: Vec<u32> = machine.online.iter().filter(homeless).copied().collect();
    if !homeless.is_empty() {
        let what = format!("processors {} are on no NUMA node", cpu_text(&homeless));
        odd.push(Odd::new("devices/system/node", what));
    }
    let gpus = machine.gpus.iter().map(|gpu| &gpu.place);
    let places: Vec<&Place> = gpus.chain(machine.hcas.iter().map(|hca| &hca.place)).collect();
    odd.extend(places.iter().filter_map(|place| of_device(machine, place)));
    odd.extend(below_one_bridge(machine));
    odd
}

fn of_device(machine: &Machine, place: &Place) -> Option<Odd> {
    let said = |what: String| Some(Odd::new(place.address.to_string(), what));
    let several = machine.nodes.len() > 1;
    let Some(node) = place.numa_node else {
        let what = "the firmware does not say on which NUMA node it lies";
        return several.then(|| Odd::new(place.address.to_string(), what));
    };
    let Some(found) = machine.node(node) else {
        return match machine.has_numa {
            true => said(format!("numa_node is {node}, and there is no such NUMA node")),
            false => None,
        };
    };
    let local = place.local_cpus.as_ref().filter(|local| **local != found.cpus)?;
    let (local, cpus) = (cpu_text(local), cpu_text(&found.cpus));
    said(format!("local_cpulist is {local:?}, but its NUMA node {node} has {cpus:?}"))
}

/// What shares a PCI bridge lies on one NUMA node.
fn below_one_bridge(machine: &Machine) -> Vec<Odd> {
    let mut odd = Vec::new();
    for hca in &machine.hcas {
        for (gpu, distance) in machine.gpus.iter().zip(&hca.distances) {
            let (left, right) = (gpu.place.numa_node, hca.place.numa_node);
            let (Some(left), Some(right)) = (left, right) else { continue };
            if left != right && matches!(distance, Distance::Bridges(_)) {
                let (gpu, name) = (gpu.place.address, &hca.name);
                let what = format!(
                    "shares a PCI bridge with HCA {name}, but is said to lie on NUMA node {left} \
                     and the HCA on {right}"
                );
                odd.push(Odd::new(gpu.to_string(), what));
            }
        }
    }
    odd
}
