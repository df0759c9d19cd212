//! The all-reduce of a node's GPUs by its InfiniBand cards: each byte leaves by one card and comes
//! back by another, so no other node is needed.
//!
//! NCCL takes the cards where it may use neither NVLink nor shared memory.

use super::gpus::reduced;
use super::{pair, settings};
use crate::life::machine::Machine;
use crate::life::machine::pci::Address;
use moejob_protocol::preflight::{Expected, LOOPBACK_CHECK, Measured, Value};
use std::ops::Range;
use std::sync::atomic::AtomicBool;
use std::time::Instant;

/// Enough for the rate of the cards, which is a tenth of NVLink's.
const BYTES: usize = 2 << 30;

/// Of the GPUs with these numbers, until then or until it is to stop. Where no card is up, or a GPU
/// is alone, that is said.
pub fn measured(
    machine: &Machine,
    expected: &Expected,
    ordinals: Range<usize>,
    until: (Instant, &AtomicBool),
) -> Vec<Measured> {
    let why = match why_not(machine, expected) {
        Some(why) => Some(why),
        None if ordinals.len() < 2 => Some("one GPU alone has no ring".to_string()),
        None => None,
    };
    if let Some(why) = why {
        return vec![unmeasured(why)];
    }
    let only_cards = ["NCCL_P2P_DISABLE", "NCCL_SHM_DISABLE"].map(|name| (name, "1".to_string()));
    let environment = [settings::here(machine), only_cards.to_vec()].concat();
    let (buses, why) = reduced(ordinals, &environment, BYTES, until);
    let ways: Vec<Option<bool>> = buses.iter().map(|bus| bus.sockets).collect();
    let rates = buses.iter().map(|bus| bus.rate);
    match rates.reduce(f64::min) {
        Some(rate) => {
            let by_tcp = ways.contains(&Some(true));
            let way = by_tcp.then(|| pair::transport(expected.rdma, &ways));
            [Measured::number(LOOPBACK_CHECK, rate)].into_iter().chain(way).collect()
        }
        None => vec![unmeasured(why.unwrap_or_else(|| "the GPUs say nothing".to_string()))],
    }
}

/// The profile's cards count, or where it names none, all.
fn why_not(machine: &Machine, expected: &Expected) -> Option<String> {
    let listed = expected.numa.iter().flat_map(|node| &node.hcas);
    let listed: Vec<Address> = listed.filter_map(|hca| Address::parse(hca)).collect();
    let mut cards = machine.hcas.iter().filter(|hca| {
        listed.is_empty() || listed.contains(&hca.place.address)
    });
    if machine.hcas.is_empty() {
        return Some("this machine has no InfiniBand card".to_string());
    }
    match cards.any(|hca| hca.usable_port().is_some()) {
        true => None,
        false => Some("no InfiniBand card of the profile is ACTIVE".to_string()),
    }
}

fn unmeasured(why: String) -> Measured {
    let (check, of) = (LOOPBACK_CHECK.to_string(), String::new());
    Measured { check, of, value: Value::Unmeasured(why) }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::life::machine::pci::Distance;
    use crate::life::machine::{Hca, LinkLayer, Place, Port};
    use moejob_protocol::preflight::Numa;

    fn card(address: &str, link_layer: LinkLayer, state: &str) -> Hca {
        let place = Place {
            address: Address::parse(address).expect("an address"),
            numa_node: Some(0),
            local_cpus: None,
            bridges: Vec::new(),
        };
        let port = Port { number: 1, link_layer, state: state.to_string(), rate: Some(200.0) };
        let distances = vec![Distance::Node];
        Hca { name: "mlx5_0".to_string(), place, ports: vec![port], distances }
    }

    #[test]
    fn a_machine_whose_cards_cannot_be_used_says_so_by_name() {
        let machine = |hcas: Vec<Hca>| Machine { hcas, ..Machine::default() };
        let of = |hca: &str| Expected {
            rdma: true,
            loopback: true,
            numa: vec![Numa { hcas: vec![hca.to_string()], ..Numa::default() }],
            ..Expected::default()
        };
        let (stop, first) = (AtomicBool::new(false), "0101:00:00.0");
        let said = |machine: &Machine, expected: &Expected, gpus: usize| {
            let all = measured(machine, expected, 0..gpus, (Instant::now(), &stop));
            assert_eq!(all.len(), 1, "{all:?}");
            match &all[0].value {
                Value::Unmeasured(why) => why.clone(),
                other => panic!("{other:?}"),
            }
        };
        assert_eq!(said(&machine(vec![]), &of(first), 8), "this machine has no InfiniBand card");
        let down = machine(vec![card(first, LinkLayer::InfiniBand, "DOWN")]);
        let not_up = "no InfiniBand card of the profile is ACTIVE";
        assert_eq!(said(&down, &of(first), 8), not_up);
        let ethernet = machine(vec![card(first, LinkLayer::Ethernet, "ACTIVE")]);
        assert_eq!(said(&ethernet, &of(first), 8), not_up);
        let good = machine(vec![card(first, LinkLayer::InfiniBand, "ACTIVE")]);
        assert_eq!(said(&good, &of("0102:00:00.0"), 8), not_up, "it is not the profile's");
        assert_eq!(said(&good, &of(first), 1), "one GPU alone has no ring");
        assert_eq!(why_not(&good, &of(first)), None);
        assert_eq!(why_not(&good, &Expected::default()), None, "a profile without a list");
    }
}
