//! NCCL's file of a machine's topology (`NCCL_TOPO_FILE`).
//!
//! ```text
//! system > cpu (a NUMA node) > pci (a switch) > pci (a GPU or a card)
//! ```
//! NCCL reads it before it looks at /sys. A device of the file keeps its place there, and what the
//! file does not say of it (such as a link's speed) NCCL asks the kernel for. The form is that of
//! NCCL's own dump (`NCCL_TOPO_DUMP_FILE`).
//!
//! A virtual machine's kernel shows each device below a host bridge of its own, so NCCL takes a GPU
//! and the card on the same switch for strangers. Where the profile tells of switches, they are
//! written; where the kernel shows bridges itself, those are taken that NCCL would take.

use super::pci::Address;
use super::{Hca, LinkLayer, Machine, Place, Processor};
use moejob_protocol::topology::{Pci, SPEEDS, Topology};
use std::collections::BTreeMap;
use std::fmt::Write as _;

/// NCCL reads no longer values.
const VALUE_BYTES_MAX: usize = 255;
/// Switches that the file may name: their addresses are of a PCI domain that no machine has.
const SWITCHES_MAX: usize = 255;
const GPU: &str = "0x030200";
const CARD: &str = "0x020700";

/// A node of the file below a NUMA node.
#[derive(Debug, PartialEq, Eq)]
enum Node {
    /// A switch that the kernel does not show, by its number.
    Hidden(usize),
    /// A bridge that it does.
    Bridge(String),
    Device { address: Address, class: &'static str },
}

/// By their places: what lies below one NUMA node, from the node down.
type Ways = Vec<(Vec<Node>, Node)>;

/// The file for `machine`, whose processors are of that kind, if it is known. Of its cards those
/// count that `listed` names, or where it is empty all that are InfiniBand.
pub fn xml(
    machine: &Machine,
    processor: Option<&Processor>,
    profile: &Topology,
    listed: &[Address],
) -> String {
    let kind = processor.map(kind).unwrap_or_default();
    let is_listed = |hca: &&Hca| match listed.is_empty() {
        true => hca.ports.iter().any(|port| port.link_layer == LinkLayer::InfiniBand),
        false => listed.contains(&hca.place.address),
    };
    let mut of_nodes: BTreeMap<u32, (Vec<&Place>, Vec<&Place>)> = BTreeMap::new();
    let home = |place: &Place| {
        let address = place.address.to_string();
        let told = || profile.numa.iter().find(|near| near.has(&address))?.first_cpu();
        let of_cpu = |cpu| machine.nodes.iter().find(|node| node.cpus.contains(&cpu));
        let known = place.numa_node.filter(|id| machine.node(*id).is_some());
        known.or_else(|| of_cpu(told()?).map(|node| node.id))
    };
    for gpu in &machine.gpus {
        // NCCL finds a place for a device of which nobody knows one.
        let Some(node) = home(&gpu.place) else { continue };
        of_nodes.entry(node).or_default().0.push(&gpu.place);
    }
    for hca in machine.hcas.iter().filter(is_listed) {
        let Some(node) = home(&hca.place) else { continue };
        of_nodes.entry(node).or_default().1.push(&hca.place);
    }
    // A kernel that shows switches shows all that there are.
    let mut places = of_nodes.values().flat_map(|(gpus, cards)| gpus.iter().chain(cards));
    let hides = places.all(|place| shown(place).is_empty());
    let pci = profile.pci.as_ref().filter(|pci| hides && SPEEDS.contains(&&*pci.speed));
    let mut text = "<system version=\"1\">\n".to_string();
    let mut switches = 0;
    for (node, (gpus, cards)) in of_nodes {
        let cpus = machine.node(node).map(|node| mask(&node.cpus));
        let affinity = cpus.filter(|mask| mask.len() <= VALUE_BYTES_MAX);
        let affinity = affinity.map(|mask| format!(" affinity=\"{mask}\"")).unwrap_or_default();
        let _ = writeln!(text, "  <cpu numaid=\"{node}\"{affinity}{kind}>");
        let ways = ways(&gpus, &cards, pci, &mut switches);
        below(&mut text, &ways.iter().map(|(way, node)| (&way[..], node)).collect::<Vec<_>>(),
            pci, 2);
        text.push_str("  </cpu>\n");
    }
    text.push_str("</system>\n");
    text
}

/// NCCL looks for the kind of a node's processors only where it finds a device there by itself, and
/// takes no node without it: one that has a network card alone ended NCCL's start.
fn kind(Processor { vendor, family, model }: &Processor) -> String {
    let is_plain = |letter: char| letter.is_ascii_alphanumeric();
    let vendor: String = vendor.chars().filter(|letter| is_plain(*letter)).collect();
    format!(" arch=\"x86_64\" vendor=\"{vendor}\" familyid=\"{family}\" modelid=\"{model}\"")
}

/// GPUs and cards of one NUMA node, a GPU before the card of the same number.
fn ways(gpus: &[&Place], cards: &[&Place], pci: Option<&Pci>, switches: &mut usize) -> Ways {
    let first = *switches;
    let each = pci.map_or(0, |pci| pci.switches as usize).min(gpus.len().max(cards.len()));
    let each = if first + each <= SWITCHES_MAX { each } else { 0 };
    *switches += each;
    let way = |place: &Place, at: usize, of: usize| {
        let bridges = shown(place);
        match bridges.is_empty() && each > 0 {
            true => vec![Node::Hidden(first + at * each / of)],
            false => bridges.into_iter().map(Node::Bridge).collect(),
        }
    };
    let mut all = Vec::new();
    for at in 0..gpus.len().max(cards.len()) {
        for (places, class) in [(gpus, GPU), (cards, CARD)] {
            let Some(place) = places.get(at) else { continue };
            let device = Node::Device { address: place.address, class };
            all.push((way(place, at, places.len()), device));
        }
    }
    all
}

/// The bridges above a device that NCCL takes for switches, from the host bridge down: each second
/// one, since a switch is a bridge above and one below.
fn shown(place: &Place) -> Vec<String> {
    let bridges = place.bridges.get(1..).unwrap_or_default();
    let is_switch = |at: &usize| (bridges.len() - at).is_multiple_of(2);
    (0..bridges.len()).filter(is_switch).map(|at| bridges[at].clone()).collect()
}

/// What lies below one node of the file, each switch once.
fn below(text: &mut String, ways: &[(&[Node], &Node)], pci: Option<&Pci>, depth: usize) {
    let indent = "  ".repeat(depth);
    let mut done: Vec<&Node> = Vec::new();
    for (way, device) in ways {
        let Some((first, _)) = way.split_first() else {
            element(text, device, pci, &indent);
            text.push_str("/>\n");
            continue;
        };
        if done.contains(&first) {
            continue;
        }
        done.push(first);
        element(text, first, pci, &indent);
        text.push_str(">\n");
        let same = ways.iter().filter(|(way, _)| way.first() == Some(first));
        let inner: Vec<(&[Node], &Node)> = same.map(|(way, device)| (&way[1..], *device)).collect();
        below(text, &inner, pci, depth + 1);
        let _ = writeln!(text, "{indent}</pci>");
    }
}

fn element(text: &mut String, node: &Node, pci: Option<&Pci>, indent: &str) {
    let (busid, class) = match node {
        Node::Hidden(number) => (format!("ffff:ff:{:02x}.0", number + 1), Some("0x060400")),
        // NCCL asks the kernel for the rest.
        Node::Bridge(address) => (address.clone(), None),
        Node::Device { address, class } => (address.to_string(), Some(*class)),
    };
    let _ = write!(text, "{indent}<pci busid=\"{busid}\"");
    let Some(class) = class else { return };
    let _ = write!(text, " class=\"{class}\"");
    if let Some(Pci { speed, width, .. }) = pci {
        let _ = write!(text, " link_speed=\"{speed}\" link_width=\"{width}\"");
    }
}

/// `00000000,00ffffff`: words of 32 processors, the highest first.
fn mask(cpus: &[u32]) -> String {
    let words = cpus.last().map_or(1, |last| last / 32 + 1);
    let word = |at: u32| {
        let of_word = cpus.iter().filter(|cpu| **cpu / 32 == at);
        format!("{:08x}", of_word.fold(0_u32, |word, cpu| word | 1 << (cpu % 32)))
    };
    (0..words).rev().map(word).collect::<Vec<_>>().join(",")
}
