//! Machines made of files, as /sys shows them.

use super::{Gpu, Machine, NumaNode, Share, bind, cpu_list, from_sys, gpus, machine, share};
use std::fs;
use std::os::unix::fs::symlink;
use std::path::Path;

fn of(nodes: &[&[u32]]) -> Machine {
    let node = |(id, cpus): (usize, &&[u32])| NumaNode { id: id as u32, cpus: cpus.to_vec() };
    Machine { nodes: nodes.iter().enumerate().map(node).collect() }
}

#[test]
fn lists_are_read_as_the_kernel_writes_them() {
    assert_eq!(cpu_list("0-3,8,10-11\n"), Some(vec![0, 1, 2, 3, 8, 10, 11]));
    assert_eq!(cpu_list("\n"), Some(Vec::new()));
    for wrong in ["3-1", "a", "0-", "0-99999999", "-1"] {
        assert_eq!(cpu_list(wrong), None, "{wrong}");
    }
}

#[test]
fn workers_get_whole_nodes_and_every_node_is_used() {
    let four = of(&[&[0, 4], &[1, 5], &[2, 6], &[3, 7]]);
    let shares = |workers: u32| -> Vec<Vec<u32>> {
        let one = |index| share(&four, Share { index, of: workers }).expect("bound");
        (0..workers).map(one).collect()
    };
    assert_eq!(shares(2), [vec![0, 1, 4, 5], vec![2, 3, 6, 7]]);
    assert_eq!(shares(3), [vec![0, 4], vec![1, 5], vec![2, 3, 6, 7]]);
    assert_eq!(shares(4), [vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7]]);
    let eight = shares(8);
    for (index, cpus) in eight.iter().enumerate() {
        assert_eq!(*cpus, four.nodes[index / 2].cpus, "worker {index} of 8");
    }
}

#[test]
fn nothing_is_bound_where_it_brings_nothing() {
    let two = of(&[&[0], &[1]]);
    assert_eq!(share(&two, Share::default()), None);
    assert_eq!(share(&of(&[&[0, 1]]), Share { index: 1, of: 4 }), None);
    assert_eq!(share(&two, Share { index: 4, of: 4 }), None, "not one of them");
}

#[test]
fn nodes_come_from_sys_without_what_is_not_ours() {
    let sys = tempfile::tempdir().expect("a folder");
    for (node, list) in [("node0", "0-1,4-5\n"), ("node10", "2-3\n"), ("node2", "\n")] {
        let folder = sys.path().join("devices/system/node").join(node);
        fs::create_dir_all(&folder).expect("a node");
        fs::write(folder.join("cpulist"), list).expect("its processors");
    }
    fs::create_dir_all(sys.path().join("devices/system/node/power")).expect("no node");
    let found = from_sys(sys.path(), |cpu| cpu != 4);
    let expected = [NumaNode { id: 0, cpus: vec![0, 1, 5] }, NumaNode { id: 10, cpus: vec![2, 3] }];
    assert_eq!(found.nodes, expected);
    let bare = from_sys(Path::new("/nonexistent"), |cpu| cpu < 2);
    assert_eq!(bare.nodes, [NumaNode { id: 0, cpus: vec![0, 1] }]);
}

fn device(sys: &Path, bridges: &str, address: &str, files: [&str; 3]) {
    let folder = sys.join("devices").join(bridges).join(address);
    fs::create_dir_all(&folder).expect("a device");
    for (name, text) in ["class", "vendor", "numa_node"].into_iter().zip(files) {
        fs::write(folder.join(name), text).expect("a file");
    }
    let all = sys.join("bus/pci/devices");
    fs::create_dir_all(&all).expect("the bus");
    symlink(&folder, all.join(address)).expect("a link");
}

#[test]
fn a_gpu_knows_its_node_and_its_nearest_adapter() {
    let sys = tempfile::tempdir().expect("a folder");
    let path = sys.path();
    let (gpu, nic) = (["0x030200\n", "0x10de\n"], ["0x020700\n", "0x15b3\n"]);
    let on = |kind: [&'static str; 2], node: &'static str| [kind[0], kind[1], node];
    device(path, "pci0000:00/0000:00:01.0/0000:01:00.0", "0000:02:00.0", on(gpu, "0\n"));
    device(path, "pci0000:00/0000:00:01.0/0000:01:00.0", "0000:03:00.0", on(nic, "0\n"));
    device(path, "pci0000:00/0000:00:02.0", "0000:04:00.0", on(nic, "0\n"));
    device(path, "pci0000:80/0000:80:01.0", "0000:81:00.0", on(gpu, "-1\n"));
    device(path, "pci0000:80/0000:80:02.0", "0000:82:00.0", on(nic, "-1\n"));
    device(path, "pci0000:80", "0000:83:00.0", ["0x030000\n", "0x1002\n", "1\n"]);
    let gpu = |pci: &str, numa_node, nic: &str| Gpu {
        pci: pci.to_string(),
        numa_node,
        nearest_nic: Some(nic.to_string()),
    };
    let expected =
        [gpu("0000:02:00.0", Some(0), "0000:03:00.0"), gpu("0000:81:00.0", None, "0000:82:00.0")];
    assert_eq!(gpus(path), expected);
    assert_eq!(gpus(Path::new("/nonexistent")), []);
}

#[test]
fn a_bound_thread_and_its_children_stay_on_their_processors() {
    let found = machine().expect("Linux tells");
    let cpu = found.nodes[0].cpus[0];
    let seen = std::thread::spawn(move || {
        bind(&[cpu]).expect("it is allowed");
        std::thread::spawn(machine).join().expect("no panic").expect("Linux tells")
    });
    let cpus: Vec<u32> =
        seen.join().expect("no panic").nodes.into_iter().flat_map(|node| node.cpus).collect();
    assert_eq!(cpus, [cpu]);
}
