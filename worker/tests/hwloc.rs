//! The two readers of a machine agree: ours of /sys, and the C library hwloc, which is given the
//! same made folders by `HWLOC_FSROOT`. Without the feature `hwloc` there is one reader alone.

#[cfg(not(feature = "hwloc"))]
#[test]
fn both_readers_agree_on_made_machines() {
    println!("skipped: built without the feature hwloc (it needs libhwloc-dev and libudev-dev)");
}

#[cfg(feature = "hwloc")]
mod machines;

#[cfg(feature = "hwloc")]
mod readers {
    use super::machines;
    use moe_worker::life::machine::hwloc::see;
    use moejob_protocol::cpus::cpu_list;
    use moe_worker::life::machine::sys;
    use std::path::{Path, PathBuf};
    use std::process::Command;

    /// Where the child of the test finds its machine.
    const ENV: &str = "MOEJOB_TEST_MACHINE";

    /// `00000000,00ffffff`, as the kernel's masks are.
    fn mask(cpus: &[u32]) -> String {
        let words = cpus.last().map_or(1, |last| last / 32 + 1);
        let word = |at: u32| {
            let of_word = cpus.iter().filter(|cpu| **cpu / 32 == at);
            format!("{:08x}", of_word.fold(0_u32, |word, cpu| word | 1 << (cpu % 32)))
        };
        (0..words).rev().map(word).collect::<Vec<_>>().join(",")
    }

    fn put(path: PathBuf, text: &str) {
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, format!("{text}\n")).expect("a file");
    }

    /// Files that hwloc reads and we do not: masks beside lists, and what a processor is.
    fn for_hwloc(sys: &Path) {
        let machine = sys::read(sys, None);
        let list = std::fs::read_to_string(sys.join("devices/system/cpu/online")).expect("a list");
        for file in ["possible", "present"] {
            put(sys.join("devices/system/cpu").join(file), list.trim());
        }
        for node in &machine.nodes {
            if machine.has_numa {
                let folder = sys.join(format!("devices/system/node/node{}", node.id));
                put(folder.join("cpumap"), &mask(&node.cpus));
            }
            for cpu in &node.cpus {
                let folder = sys.join(format!("devices/system/cpu/cpu{cpu}/topology"));
                put(folder.join("core_id"), &cpu.to_string());
                put(folder.join("physical_package_id"), &node.id.to_string());
                put(folder.join("thread_siblings"), &mask(&[*cpu]));
                put(folder.join("core_siblings"), &mask(&node.cpus));
            }
        }
        let ids: Vec<String> = machine.nodes.iter().map(|node| node.id.to_string()).collect();
        if machine.has_numa {
            put(sys.join("devices/system/node/online"), &ids.join(","));
        }
        for gpu in &machine.gpus {
            let folder = sys.join(format!("bus/pci/devices/{}", gpu.place.address));
            let near = std::fs::read_to_string(folder.join("local_cpulist")).expect("a list");
            put(folder.join("local_cpus"), &mask(&cpu_list(&near).expect("a list")));
            put(folder.join("device"), "0x20b2");
        }
    }

    #[test]
    fn both_readers_agree_on_made_machines() {
        for name in ["ndm-a100-v4", "nd-h200-v5", "ndm-swapped", "server", "laptop"] {
            let made = machines::machine(name);
            for_hwloc(&made.path().join("sys"));
            let child = Command::new(std::env::current_exe().expect("this test"))
                .args(["--exact", "readers::what_hwloc_sees", "--nocapture"])
                .env(ENV, made.path())
                .env("HWLOC_FSROOT", made.path())
                .env("HWLOC_THISSYSTEM", "0")
                .env("HWLOC_COMPONENTS", "linux,stop")
                .output()
                .expect("this test");
            let out = String::from_utf8_lossy(&child.stdout).into_owned();
            let err = String::from_utf8_lossy(&child.stderr);
            assert!(child.status.success(), "{name}\n{out}\n{err}");
            assert!(out.contains("both agree"), "{name}\n{out}\n{err}");
        }
    }

    /// Run by the test above in a process of its own, since hwloc is told by its environment.
    #[test]
    fn what_hwloc_sees() {
        let Some(folder) = std::env::var_os(ENV) else { return };
        let ours = sys::read(&Path::new(&folder).join("sys"), None);
        let seen = see().expect("hwloc");
        let theirs: Vec<(u32, Vec<u32>)> = seen.nodes.clone().into_iter().collect();
        let nodes = ours.nodes.iter().map(|node| (node.id, node.cpus.clone()));
        assert_eq!(theirs, nodes.collect::<Vec<_>>());
        for gpu in &ours.gpus {
            let found = seen.devices.get(&gpu.place.address).expect("hwloc has the GPU");
            // Where no node is told, the only one there is.
            let node = gpu.place.numa_node.or((ours.nodes.len() == 1).then_some(0));
            assert_eq!(*found, node, "{}", gpu.place.address);
        }
        assert_eq!(ours.clone().beside(&seen), ours, "nothing is odd, nothing is new");
        let mut wrong = seen;
        wrong.nodes.insert(0, vec![0]);
        let told = !ours.clone().beside(&wrong).odd.is_empty();
        assert_eq!(told, ours.has_numa, "what differs from a list is told");
        println!("both agree");
    }
}
