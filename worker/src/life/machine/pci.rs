//! Addresses of PCI devices, and how far two of them are from each other.

use super::Place;
use serde::{Serialize, Serializer};
use std::fmt::{self, Display};

/// `0001:00:00.0`: domain, bus, device, function. Ordered as CUDA_DEVICE_ORDER=PCI_BUS_ID does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Address {
    domain: u32,
    bus: u8,
    device: u8,
    function: u8,
}

impl Address {
    /// None where it is no address. Domains of virtual bridges have more than four digits.
    pub fn parse(text: &str) -> Option<Address> {
        let hex = |text: &str, least: usize, most: usize| {
            let digits = text.bytes().all(|byte| byte.is_ascii_hexdigit());
            let fits = (least..=most).contains(&text.len());
            (digits && fits).then(|| u32::from_str_radix(text, 16).ok()).flatten()
        };
        let (domain, rest) = text.split_once(':')?;
        let (bus, rest) = rest.split_once(':')?;
        let (device, function) = rest.split_once('.')?;
        Some(Address {
            domain: hex(domain, 4, 8)?,
            bus: hex(bus, 2, 2)? as u8,
            device: hex(device, 2, 2)? as u8,
            function: hex(function, 1, 1)? as u8,
        })
    }
}

impl Display for Address {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Address { domain, bus, device, function } = self;
        f.pad(&format!("{domain:04x}:{bus:02x}:{device:02x}.{function:x}"))
    }
}

impl Serialize for Address {
    fn serialize<S: Serializer>(&self, serializer: S) -> Result<S::Ok, S::Error> {
        serializer.collect_str(self)
    }
}

/// From near to far.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize)]
#[serde(rename_all = "camelCase")]
pub enum Distance {
    /// So many bridges lie on the way between the two (`PIX`, `PXB` of `nvidia-smi topo -m`).
    Bridges(u32),
    /// They have the host bridge in common, and no other (`PHB`).
    HostBridge,
    /// Host bridges of one NUMA node (`NODE`). In virtual machines no two devices are nearer,
    /// since each has a PCI domain of its own.
    Node,
    /// Another NUMA node (`SYS`), or nobody knows.
    System,
}

impl Distance {
    pub fn between(left: &Place, right: &Place) -> Distance {
        let pairs = left.bridges.iter().zip(&right.bridges);
        let shared = pairs.take_while(|(left, right)| left == right).count();
        let same_node = left.numa_node.is_some() && left.numa_node == right.numa_node;
        match shared {
            0 if same_node => Distance::Node,
            0 => Distance::System,
            1 => Distance::HostBridge,
            // The lowest that both are below, and each that one of the two alone is below.
            _ => Distance::Bridges(
                (1 + left.bridges.len() + right.bridges.len() - 2 * shared) as u32,
            ),
        }
    }
}

impl Display for Distance {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Distance::Bridges(1) => f.pad("below the same bridge"),
            Distance::Bridges(count) => f.pad(&format!("{count} bridges apart")),
            Distance::HostBridge => f.pad("on the same host bridge"),
            Distance::Node => f.pad("on the same NUMA node"),
            Distance::System => f.pad("on another NUMA node, or on one that is not known"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn addresses_are_read_written_and_ordered() {
        for text in ["0001:00:00.0", "0000:3b:1f.7", "10000:e1:00.0"] {
            assert_eq!(Address::parse(text).expect(text).to_string(), text);
        }
        let wrong = ["", "0001", "0001:00:00", "1:00:00.0", "0001:00:00.0.0", "000g:00:00.0",
            "0001:00:00.00", "000000001:00:00.0", "+001:00:00.0"];
        for text in wrong {
            assert_eq!(Address::parse(text), None, "{text}");
        }
        assert!(Address::parse("0002:00:00.0") < Address::parse("10000:00:00.0"));
        assert!(Address::parse("0002:ff:00.0") < Address::parse("0003:00:00.0"));
    }

    #[test]
    fn fewer_bridges_are_nearer() {
        let place = |bridges: &str, numa_node| Place {
            address: Address::parse("0001:00:00.0").expect("an address"),
            numa_node,
            local_cpus: None,
            bridges: bridges.split('/').map(str::to_string).collect(),
        };
        let far = |left: (&str, Option<u32>), right: (&str, Option<u32>)| {
            Distance::between(&place(left.0, left.1), &place(right.0, right.1))
        };
        assert_eq!(far(("h/a/b", None), ("h/a/b", None)), Distance::Bridges(1));
        assert_eq!(far(("h/a/b", None), ("h/a/c", None)), Distance::Bridges(3));
        assert_eq!(far(("h/a/b", None), ("h/a", None)), Distance::Bridges(2));
        assert_eq!(far(("h/a", None), ("h/b", None)), Distance::HostBridge);
        assert_eq!(far(("h", Some(0)), ("i", Some(0))), Distance::Node);
        assert_eq!(far(("h", Some(0)), ("i", Some(1))), Distance::System);
        assert_eq!(far(("h", None), ("i", None)), Distance::System);
        let near = [
            Distance::Bridges(1),
            Distance::Bridges(3),
            Distance::HostBridge,
            Distance::Node,
            Distance::System,
        ];
        assert!(near.is_sorted());
    }
}
