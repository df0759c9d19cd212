//! Folders like /sys, made of the descriptions beside this file.
//!
//! | line | makes |
//! |---|---|
//! | `cpus LIST` | the processors that are switched on |
//! | `node ID LIST` | a NUMA node |
//! | `gpu ADDRESS node N local LIST under BRIDGES` | a GPU of NVIDIA's |
//! | `hca NAME ADDRESS node N local LIST under BRIDGES port LAYER STATE GBPS` | a card |
//! | `set FILE TEXT`, `remove FILE` | a file as it is told, or none |
//! | `like FILE` | all of another description first |
//!
//! Behind a line `---` stands what a reader finds.
//!
//! A device's files lie where the kernel has them: below `devices`, in a folder a bridge; `bus` and
//! `class` have links to it.

use std::fs;
use std::os::unix::fs::symlink;
use std::path::{Path, PathBuf};

/// Where the descriptions lie.
fn described() -> PathBuf {
    Path::new(concat!(env!("CARGO_MANIFEST_DIR"), "/tests/machines"))
        .canonicalize()
        .or_else(|_| {
            let beside = concat!(env!("CARGO_MANIFEST_DIR"), "/../worker/tests/machines");
            Path::new(beside).canonicalize()
        })
        .expect("the descriptions")
}

/// The machine `name.txt` as a folder; its `/sys` is the folder `sys` in it.
pub fn machine(name: &str) -> tempfile::TempDir {
    let folder = tempfile::tempdir().expect("a folder");
    make(&folder.path().join("sys"), &format!("{name}.txt"));
    folder
}

fn make(sys: &Path, file: &str) {
    let text = fs::read_to_string(described().join(file)).expect(file);
    let lines = text.lines().take_while(|line| *line != "---");
    for line in lines.filter(|line| !line.starts_with('#')) {
        let words: Vec<&str> = line.split(' ').collect();
        match &words[..] {
            ["like", other] => make(sys, other),
            ["cpus", list] => write(sys, "devices/system/cpu/online", list),
            ["node", id, list] => {
                write(sys, &format!("devices/system/node/node{id}/cpulist"), list);
            }
            ["gpu", address, "node", node, "local", list, "under", bridges] => {
                device(sys, (address, bridges), ["0x030200", "0x10de"], (node, list));
            }
            ["hca", name, address, "node", node, "local", list, "under", bridges, "port", layer,
                state, rate] =>
            {
                device(sys, (address, bridges), ["0x020700", "0x15b3"], (node, list));
                let own = format!("devices/{bridges}/{address}/infiniband/{name}");
                write(sys, &format!("{own}/ports/1/link_layer"), layer);
                let number = if *state == "ACTIVE" { 4 } else { 1 };
                write(sys, &format!("{own}/ports/1/state"), &format!("{number}: {state}"));
                write(sys, &format!("{own}/ports/1/rate"), &format!("{rate} Gb/sec (4X)"));
                symlink("../..", sys.join(&own).join("device")).expect("a link");
                link(sys, &own, &format!("class/infiniband/{name}"));
            }
            ["set", file, text @ ..] => write(sys, file, &text.join(" ")),
            ["remove", file] => remove(&sys.join(file)),
            _ => panic!("{file}: {line:?} is not understood"),
        }
    }
}

fn device(sys: &Path, (address, bridges): (&str, &str), kind: [&str; 2], near: (&str, &str)) {
    let own = format!("devices/{bridges}/{address}");
    let files = [("class", kind[0]), ("vendor", kind[1]), ("numa_node", near.0)];
    for (file, text) in files.into_iter().chain([("local_cpulist", near.1)]) {
        write(sys, &format!("{own}/{file}"), text);
    }
    link(sys, &own, &format!("bus/pci/devices/{address}"));
}

fn write(sys: &Path, file: &str, text: &str) {
    let path = sys.join(file);
    fs::create_dir_all(path.parent().expect("a folder")).expect(file);
    fs::write(path, format!("{text}\n")).expect(file);
}

/// Relative, as the kernel's are.
fn link(sys: &Path, to: &str, at: &str) {
    let path = sys.join(at);
    fs::create_dir_all(path.parent().expect("a folder")).expect(at);
    let up = "../".repeat(at.matches('/').count());
    symlink(format!("{up}{to}"), path).expect(at);
}

fn remove(path: &Path) {
    let kind = fs::symlink_metadata(path).expect("what is removed is there").file_type();
    let removed = if kind.is_dir() { fs::remove_dir_all(path) } else { fs::remove_file(path) };
    removed.expect("removed");
}
