//! Libraries that stand in for the driver and CUDA's, with what each version has, or less.
//!
//! ```text
//! cudarc's bindings -> functions of a version -> C -> cc -> libcuda.so, libnvrtc.so, ..
//! a library without one function: the same file, in which that name is another
//! ```

#![allow(dead_code, reason = "each test target uses a part")]

pub mod cudarc;

use cudarc::Cudarc;
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::process::Command;

/// CUDA's versions, as drivers tell them.
pub const VERSIONS: [u32; 4] = [12_040, 12_060, 12_080, 13_000];

/// A library: its file's name up to the `.so`, its folder in cudarc, and what of it does something.
pub const LIBRARIES: [(&str, &str, &str); 3] = [
    ("libcuda", "driver", concat!(include_str!("peer.c"), include_str!("cuda.c"))),
    ("libnvrtc", "nvrtc", include_str!("nvrtc.c")),
    ("libcublasLt", "cublaslt", include_str!("cublaslt.c")),
];

/// The files of each library at each version.
pub struct Stubs {
    folder: PathBuf,
    made: BTreeMap<(&'static str, u32), Vec<u8>>,
}

impl Stubs {
    /// Of these versions; `folder` is there and empty.
    pub fn make(cudarc: &Cudarc, versions: &[u32], folder: &Path) -> Stubs {
        let mut made = BTreeMap::new();
        for (library, module, source) in LIBRARIES {
            let bound = cudarc.bound(module);
            for version in versions {
                // A library keeps its functions for programs that were built with an older one.
                let has = |since: &u32| since <= version;
                let names = bound.iter().filter(|(_, since)| since.iter().any(has));
                let names: Vec<&str> = names.map(|(name, _)| name.as_str()).collect();
                made.insert((library, *version), compile(source, &names, *version, folder));
            }
        }
        Stubs { folder: folder.to_owned(), made }
    }

    /// A folder with all three, of these versions, in this order; 0: without that library.
    pub fn folder(&self, name: &str, versions: [u32; 3]) -> PathBuf {
        let folder = self.folder.join(name);
        std::fs::create_dir_all(&folder).expect("a folder");
        for ((library, ..), version) in LIBRARIES.into_iter().zip(versions) {
            if let Some(bytes) = self.made.get(&(library, version)) {
                write(&folder, library, bytes);
            }
        }
        folder
    }

    /// The same of one version, where `library` lacks `symbols`.
    pub fn without(&self, version: u32, library: &'static str, symbols: &[&str]) -> PathBuf {
        let folder = self.folder(&format!("{version}-{}", symbols.join("-")), [version; 3]);
        let mut bytes = self.made[&(library, version)].clone();
        symbols.iter().for_each(|symbol| rename(&mut bytes, symbol));
        write(&folder, library, &bytes);
        folder
    }
}

/// An NCCL of the version with this code, into `folder`.
pub fn nccl(folder: &Path, code: u32) {
    nccl_of(include_str!("nccl.c"), folder, code);
}

/// The same, of which `source` is what does something.
pub fn nccl_of(source: &str, folder: &Path, code: u32) {
    let list = include_str!("../../../worker/nccl/src/library.rs");
    let names: Vec<&str> = list.split('"').filter(|part| part.starts_with("nccl")).collect();
    let library = compile(source, &names, code, folder);
    std::fs::write(folder.join("libnccl.so.2"), library).expect("a library");
}

/// As the name that is looked for first.
pub fn write(folder: &Path, library: &str, bytes: &[u8]) {
    std::fs::write(folder.join(format!("{library}.so")), bytes).expect("a library");
}

/// Gives a function another name, so that who looks for it finds none.
pub fn rename(bytes: &mut [u8], symbol: &str) {
    let name = [b"\0", symbol.as_bytes(), b"\0"].concat();
    let mut found = 0;
    for at in 0..=bytes.len() - name.len() {
        if bytes[at..].starts_with(&name) {
            bytes[at + 1] = b'_';
            found += 1;
        }
    }
    assert!(found > 0, "no {symbol} in the stub");
}

/// A library of `source` and of functions that answer 0.
pub fn compile(source: &str, names: &[&str], version: u32, folder: &Path) -> Vec<u8> {
    let mut text = source.to_owned();
    for name in names.iter().filter(|name| !source.contains(&format!("{name}("))) {
        text += &format!("int {name}(void) {{ return 0; }}\n");
    }
    let (c, so) = (folder.join("stub.c"), folder.join("stub.so"));
    std::fs::write(&c, text).expect("a folder for the test");
    let made = Command::new("cc")
        .args(["-shared", "-fPIC", "-w", "-s"])
        .arg(format!("-DVERSION={version}"))
        .arg("-o")
        .args([&so, &c])
        .status();
    assert!(made.expect("a C compiler").success(), "{source}");
    std::fs::read(&so).expect("just made")
}
