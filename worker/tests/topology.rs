//! NCCL's file of made machines. Each golden text is `machines/NAME.xml`; run with
//! `UPDATE_GOLDEN=1` to write what is made now, and read the difference.

mod machines;

use moe_worker::life::machine::pci::Address;
use moe_worker::life::machine::topology::xml;
use moe_worker::life::machine::{Machine, Processor, sys};
use moejob_protocol::topology::{Near, Pci, Topology};

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/machines");

fn read(name: &str) -> Machine {
    sys::read(&machines::machine(name).path().join("sys"), None)
}

fn switches(switches: u32, speed: &str) -> Topology {
    let pci = Pci { switches, speed: speed.to_string(), width: 16 };
    Topology { numa: Vec::new(), pci: Some(pci) }
}

/// NCCL's bounds: at most 16 attributes, values of 255 characters, 640 children, 1024 nodes; and
/// what is opened is closed, which is all of XML that its parser knows.
fn assert_is_read_by_nccl(text: &str) {
    let (mut open, mut nodes) = (vec![("", 0_u32)], 0);
    for line in text.lines().map(str::trim) {
        let inside = line.strip_prefix('<').and_then(|line| line.strip_suffix('>')).expect(line);
        if let Some(name) = inside.strip_prefix('/') {
            assert_eq!(open.pop().expect("something is open").0, name);
            continue;
        }
        let (inside, leaf) = inside.strip_suffix('/').map_or((inside, false), |of| (of, true));
        let (name, attributes) = inside.split_once(' ').expect("attributes");
        let values: Vec<&str> = attributes.split('"').skip(1).step_by(2).collect();
        assert!(values.len() <= 16 && values.iter().all(|value| value.len() <= 255), "{line}");
        let (above, children) = open.last_mut().expect("a root");
        *children += 1;
        nodes += 1;
        assert!(*children <= 640 && nodes <= 1024, "too many below {above}");
        if !leaf {
            open.push((name, 0));
        }
    }
    assert_eq!(open, [("", 1)], "one root, and it is closed");
}

/// As the kernels of such machines tell of them; one that is not known is left out.
fn processor(name: &str) -> Option<Processor> {
    let text = match name {
        "ndm-a100-v4" | "ndm-swapped" => "AuthenticAMD\ncpu family\t: 23\nmodel\t\t: 49",
        "nd-h200-v5" => "GenuineIntel\ncpu family\t: 6\nmodel\t\t: 143",
        _ => "",
    };
    let text = format!("processor\t: 0\nvendor_id\t: {text}\nmodel name\t: Made\n");
    Processor::parse(&text)
}

#[test]
fn files_of_made_machines_are_the_golden_ones() {
    let none = Topology::default();
    let ndm = switches(1, "16 GT/s");
    let pairs = switches(4, "32 GT/s");
    let machines = [
        ("ndm-a100-v4", &ndm),
        ("ndm-swapped", &ndm),
        ("nd-h200-v5", &pairs),
        ("server", &none),
        ("laptop", &none),
        ("bare", &none),
        ("broken", &ndm),
    ];
    for (name, profile) in machines {
        let made = xml(&read(name), processor(name).as_ref(), profile, &[]);
        assert_is_read_by_nccl(&made);
        let path = format!("{FOLDER}/{name}.xml");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, &made).expect("written");
        } else {
            let golden = std::fs::read_to_string(&path).expect("a golden text");
            assert_eq!(made, golden, "{name}");
        }
    }
}

/// Each device once, with the one above it: `0x030200 0001:00:00.0 below ffff:ff:01.0 on 1`.
fn places(text: &str) -> Vec<String> {
    let value = |line: &str, name: &str| {
        let start = line.split_once(&format!("{name}=\""));
        let found = start.and_then(|(_, rest)| rest.split_once('"'));
        found.map_or_else(String::new, |(value, _)| value.to_string())
    };
    let (mut node, mut switch, mut found) = (String::new(), String::new(), Vec::new());
    for line in text.lines() {
        match line.trim() {
            of if of.starts_with("<cpu") => node = value(of, "numaid"),
            of if of.starts_with("<pci") && of.ends_with("/>") => {
                found.push(format!("{} below {switch} on {node}", value(of, "busid")));
            }
            of if of.starts_with("<pci") => switch = value(of, "busid"),
            "</pci>" => switch.clear(),
            _ => {}
        }
    }
    found
}

#[test]
fn a_gpu_and_its_card_lie_below_one_switch() {
    let found = places(&xml(&read("ndm-a100-v4"), None, &switches(1, "16 GT/s"), &[]));
    assert_eq!(found.len(), 16, "the Ethernet card is left out: {found:?}");
    let first = ["0003:00:00.0", "0103:00:00.0", "0004:00:00.0", "0104:00:00.0"];
    assert_eq!(found[..4], first.map(|of| format!("{of} below ffff:ff:01.0 on 0")));
    let found = places(&xml(&read("nd-h200-v5"), None, &switches(4, "32 GT/s"), &[]));
    assert_eq!(found[6], "0008:00:00.0 below ffff:ff:04.0 on 0");
    assert_eq!(found[7], "0104:00:00.0 below ffff:ff:04.0 on 0");
    assert_eq!(found[8], "0009:00:00.0 below ffff:ff:05.0 on 1");
}

#[test]
fn cards_of_the_profile_alone_are_written() {
    let machine = read("ndm-a100-v4");
    let listed = ["0101:00:00.0", "0110:00:02.0"].map(|of| Address::parse(of).expect("one"));
    let found = places(&xml(&machine, None, &switches(1, "16 GT/s"), &listed));
    let cards: Vec<&String> = found.iter().filter(|of| of.starts_with("01")).collect();
    assert_eq!(
        cards,
        ["0110:00:02.0 below ffff:ff:01.0 on 0", "0101:00:00.0 below ffff:ff:02.0 on 1"]
    );
}

/// Bridges that the kernel shows are those that NCCL would take: each second one.
#[test]
fn a_tree_that_the_kernel_shows_is_kept() {
    let found = places(&xml(&read("server"), None, &switches(1, "16 GT/s"), &[]));
    assert!(found.contains(&"0000:1b:00.0 below 0000:18:00.0 on 0".to_string()), "{found:?}");
    assert!(found.contains(&"0000:1d:00.0 below 0000:18:00.0 on 0".to_string()), "{found:?}");
    let beside = found.iter().find(|of| of.starts_with("0000:a1")).expect("a card of its own");
    assert_eq!(beside, "0000:a1:00.0 below  on 1", "its root port is no switch");
}

#[test]
fn the_profile_tells_of_devices_that_the_kernel_does_not_place() {
    let mut machine = read("ndm-a100-v4");
    for gpu in &mut machine.gpus {
        gpu.place.numa_node = None;
    }
    let silent = xml(&machine, None, &switches(1, "16 GT/s"), &[]);
    assert!(!silent.contains("0x030200"), "NCCL finds a place for them: {silent}");
    let near = |cpus: &str, gpu: &str| Near {
        cpus: cpus.to_string(),
        gpus: vec![gpu.to_string()],
        hcas: Vec::new(),
    };
    let numa = vec![near("24-47", "0001:00:00.0"), near("what", "0002:00:00.0")];
    let told = Topology { numa, ..switches(1, "16 GT/s") };
    let found = places(&xml(&machine, None, &told, &[]));
    let gpus: Vec<&String> = found.iter().filter(|of| of.starts_with("000")).collect();
    assert_eq!(gpus, ["0001:00:00.0 below ffff:ff:02.0 on 1"]);
}

/// A profile may say anything that its schema allows, and the environment more than that.
#[test]
fn odd_profiles_give_a_file_that_nccl_reads() {
    let names = ["ndm-a100-v4", "ndm-masks", "ndm-cards", "server", "broken", "bare"];
    for name in names {
        for count in [0, 1, 3, 16, u32::MAX] {
            for speed in ["16 GT/s", "\"/><", ""] {
                let text = xml(&read(name), None, &switches(count, speed), &[]);
                assert_is_read_by_nccl(&text);
                assert!(!text.contains("/><"), "{text}");
            }
        }
    }
}

/// More processors than a value has room for: NCCL asks the kernel.
#[test]
fn a_mask_that_is_too_long_is_left_out() {
    let mut machine = read("ndm-a100-v4");
    machine.nodes[3].cpus = (0..4096).collect();
    let text = xml(&machine, None, &switches(1, "16 GT/s"), &[]);
    assert_is_read_by_nccl(&text);
    assert!(text.contains("<cpu numaid=\"3\">") && text.contains("<cpu numaid=\"2\" affinity="));
}
