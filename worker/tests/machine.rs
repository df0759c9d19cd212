//! Machines made of files, as their kernels would show them, and what is read of them.
//!
//! Each description in `machines` ends with what is found, behind `---`. Run with `UPDATE_GOLDEN=1`
//! to write what is found now, and read the difference.

mod machines;

use moe_worker::life::machine::{Machine, sys};
use std::fmt::Write as _;
use std::path::Path;

const FOLDER: &str = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/machines");
const BEHIND: &str = "---\n";

fn shown(machine: &Machine) -> String {
    let mut text = String::new();
    for (name, found) in machine.lines() {
        let _ = writeln!(text, "{name}: {found}");
    }
    for odd in &machine.odd {
        let _ = writeln!(text, "odd: {}: {}", odd.at, odd.what);
    }
    text
}

#[test]
fn machines_are_read_as_they_were_described() {
    let mut seen = 0;
    for entry in std::fs::read_dir(FOLDER).expect("the descriptions") {
        let path = entry.expect("a description").path();
        if path.extension().is_none_or(|end| end != "txt") {
            continue;
        }
        seen += 1;
        let name = path.file_stem().expect("a name").to_string_lossy().into_owned();
        let made = machines::machine(&name);
        let found = shown(&sys::read(&made.path().join("sys"), None));
        let text = std::fs::read_to_string(&path).expect("a description");
        let (described, expected) = text.split_once(BEHIND).unwrap_or((&text, ""));
        assert!(described.starts_with("# Made, not recorded: "), "{name} does not say what it is");
        if std::env::var_os("UPDATE_GOLDEN").is_some() {
            std::fs::write(&path, format!("{described}{BEHIND}{found}")).expect("written");
        } else {
            assert_eq!(found, expected, "{name}");
        }
    }
    assert!(seen >= 9, "only {seen} descriptions");
}

#[test]
fn a_machine_without_files_is_one_node_of_what_is_allowed() {
    let nothing = sys::read(Path::new("/nonexistent"), Some(&[2, 5]));
    assert!(!nothing.has_numa);
    assert_eq!((nothing.online.clone(), nothing.allowed()), (vec![2, 5], vec![2, 5]));
    assert_eq!(nothing.nodes.len(), 1);
    assert_eq!((nothing.gpus.len(), nothing.hcas.len()), (0, 0));
    let at: Vec<&str> = nothing.odd.iter().map(|odd| odd.at.as_str()).collect();
    assert_eq!(at, ["devices/system/cpu/online"]);
    assert_eq!(sys::read(Path::new("/nonexistent"), None).nodes, []);
}

#[test]
fn a_cpuset_narrows_each_node() {
    let made = machines::machine("ndm-a100-v4");
    let allowed: Vec<u32> = (20..50).chain(200..300).collect();
    let machine = sys::read(&made.path().join("sys"), Some(&allowed));
    let of_nodes: Vec<usize> = machine.nodes.iter().map(|node| node.allowed.len()).collect();
    assert_eq!(of_nodes, [4, 24, 2, 0]);
    assert_eq!(machine.allowed(), (20..50).collect::<Vec<u32>>());
    assert!(machine.nodes.iter().all(|node| node.cpus.len() == 24), "the machine is the same");
}

/// No file that is cut, emptied or filled with bytes makes the reader fail.
#[test]
fn whatever_stands_in_the_files_is_read() {
    let files = [
        "devices/system/cpu/online",
        "devices/system/node/node0/cpulist",
        "bus/pci/devices/0000:1b:00.0/class",
        "bus/pci/devices/0000:1b:00.0/vendor",
        "bus/pci/devices/0000:1b:00.0/numa_node",
        "bus/pci/devices/0000:1b:00.0/local_cpulist",
        "class/infiniband/mlx5_0/ports/1/state",
        "class/infiniband/mlx5_0/ports/1/rate",
        "class/infiniband/mlx5_0/ports/1/link_layer",
    ];
    let long = "9,".repeat(20_000);
    let garbage: [&[u8]; 7] =
        [b"", b"\0\0", &[0xff; 64], b"-", b"0x", b"4: \xc3\x28", long.as_bytes()];
    let made = machines::machine("server");
    let sys = made.path().join("sys");
    let sound = sys::read(&sys, None);
    assert_eq!(sound.odd, []);
    for file in files {
        let before = std::fs::read(sys.join(file)).expect(file);
        for bytes in garbage {
            std::fs::write(sys.join(file), bytes).expect(file);
            let machine = sys::read(&sys, None);
            assert!(!machine.odd.is_empty(), "{file}: {bytes:?}\n{}", shown(&machine));
            assert!(machine.gpus.len() <= 3 && machine.hcas.len() <= 4, "{file}: {bytes:?}");
        }
        std::fs::write(sys.join(file), before).expect(file);
    }
    assert_eq!(sys::read(&sys, None), sound);
}
