//! Cubins on disk: the cache that is written to, and a folder that is shipped beside the program.
//!
//! ```text
//! FOLDER/nvrtc-13.0/NAME.cubin     either of them
//! the cache, of this NVRTC -> shipped, of this NVRTC, then of others -> NVRTC, into the cache
//! ```
//! A shipped cubin of another NVRTC is taken as well. It is machine code for one architecture, and
//! its entry names the text, the options and the architecture that it was made from: nothing of it
//! hangs on the compiler that is here. What the driver could not load is left out by its version,
//! and what it refuses all the same is compiled. Compilers may differ in the last bits, but the
//! choice follows from the image and the driver's major version, so that the ranks of an image
//! make the same one.

use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cuda::compile::{OPTIONS, Source};
use crate::cuda::error::CudaError;
use crate::cuda::libraries::Cuda;

/// `$MOEJOB_CUBIN_CACHE`, else `moejob/cubins` in the user's cache folder; none without a home.
pub fn default_cache_dir() -> Option<PathBuf> {
    named("MOEJOB_CUBIN_CACHE").or_else(|| {
        let caches = named("XDG_CACHE_HOME").or_else(|| Some(named("HOME")?.join(".cache")))?;
        Some(caches.join("moejob").join("cubins"))
    })
}

/// `$MOEJOB_CUBINS`, else `cubins` beside the program: kernels that were compiled ahead of time. It
/// is only read, and need not be there.
pub fn shipped_dir() -> Option<PathBuf> {
    let beside = || Some(std::env::current_exe().ok()?.parent()?.join("cubins"));
    named("MOEJOB_CUBINS").or_else(beside)
}

fn named(variable: &str) -> Option<PathBuf> {
    std::env::var_os(variable).filter(|value| !value.is_empty()).map(PathBuf::from)
}

/// Where cubins lie that one compiler may take.
#[derive(Clone, Debug, Default)]
pub(crate) struct Cubins {
    nvrtc: Cuda,
    cache: Option<PathBuf>,
    /// Where they were shipped, and the NVRTC of each folder there, best first.
    shipped: Vec<(PathBuf, Cuda)>,
}

/// A cubin that was found.
#[derive(Debug, PartialEq, Eq)]
pub(crate) struct Found {
    pub cubin: Vec<u8>,
    /// The driver may refuse it where it takes what is compiled here.
    pub shipped: bool,
}

impl Cubins {
    /// For a compiler of this version, and a driver that knows CUDA up to `driver`. Cubins of a
    /// newer major version than the driver's are left out: it refuses them.
    pub fn new(
        cache: Option<PathBuf>,
        shipped: Option<&Path>,
        nvrtc: Cuda,
        driver: Cuda,
    ) -> Cubins {
        let mut versions = shipped.map(versions).unwrap_or_default();
        versions.retain(|version| version.0 <= driver.0);
        // This compiler's own first, then the newest.
        versions.sort_by_key(|version| (*version != nvrtc, std::cmp::Reverse(*version)));
        let place = |version| Some((shipped?.to_owned(), version));
        let shipped = versions.into_iter().filter_map(place).collect();
        Cubins { nvrtc, cache, shipped }
    }

    pub fn find(&self, source: &Source) -> Option<Found> {
        let read = |folder: &Path, nvrtc| Entry::new(folder, source, nvrtc).read();
        let cached = self.cache.as_deref().and_then(|cache| read(cache, self.nvrtc));
        cached.map(|cubin| Found { cubin, shipped: false }).or_else(|| {
            let mut shipped = self.shipped.iter();
            let cubin = shipped.find_map(|(folder, nvrtc)| read(folder, *nvrtc))?;
            Some(Found { cubin, shipped: true })
        })
    }

    /// Keeps what was compiled, where there is a cache.
    ///
    /// # Errors
    /// It cannot be written.
    pub fn keep(&self, source: &Source, cubin: &[u8]) -> Result<(), CudaError> {
        match &self.cache {
            Some(cache) => Entry::new(cache, source, self.nvrtc).write(cubin),
            None => Ok(()),
        }
    }
}

/// Begins the name of a folder of cubins of one NVRTC.
const BY: &str = "nvrtc-";

/// Those that cubins of `folder` were compiled by.
fn versions(folder: &Path) -> Vec<Cuda> {
    let version = |name: &str| {
        let (major, minor) = name.strip_prefix(BY)?.split_once('.')?;
        Some(Cuda(major.parse().ok()?, minor.parse().ok()?))
    };
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries.filter_map(|entry| version(entry.file_name().to_str()?)).collect()
}

/// Kernels of `folder`: how many of each NVRTC.
pub(crate) fn counted(folder: &Path) -> Vec<(Cuda, usize)> {
    let mut versions = versions(folder);
    versions.sort_unstable();
    let count = |version: Cuda| {
        let entries = std::fs::read_dir(folder.join(format!("{BY}{version}")));
        let is_cubin = |path: PathBuf| path.extension().is_some_and(|kind| kind == "cubin");
        entries.into_iter().flatten().flatten().filter(|entry| is_cubin(entry.path())).count()
    };
    versions.into_iter().map(|version| (version, count(version))).collect()
}

/// One file: magic, length and hash of the rest, the whole key, the cubin. The key is compared in
/// full, so neither a collision of names nor damage can hand out a wrong kernel.
pub(crate) struct Entry {
    path: PathBuf,
    key: Vec<u8>,
}

const MAGIC: &[u8; 8] = b"MOEJCUB1";

impl Entry {
    pub fn new(folder: &Path, source: &Source, nvrtc: Cuda) -> Entry {
        let options = OPTIONS.join(" ");
        let head = format!("{} {options} nvrtc {nvrtc}\n", source.arch);
        let key = [head.as_bytes(), source.text.as_bytes()].concat();
        let name = format!("{:016x}{:016x}.cubin", fnv1a(&key), fnv1a(source.label.as_bytes()));
        Entry { path: folder.join(format!("{BY}{nvrtc}")).join(name), key }
    }

    /// None for a missing, foreign or damaged file.
    pub fn read(&self) -> Option<Vec<u8>> {
        let file = std::fs::read(&self.path).ok()?;
        let body = file.strip_prefix(MAGIC)?;
        let (hash, body) = body.split_first_chunk::<8>()?;
        if u64::from_le_bytes(*hash) != fnv1a(body) {
            return None;
        }
        let (key_len, body) = body.split_first_chunk::<8>()?;
        let (key, cubin) =
            body.split_at_checked(usize::try_from(u64::from_le_bytes(*key_len)).ok()?)?;
        (key == self.key && !cubin.is_empty()).then(|| cubin.to_vec())
    }

    /// Written aside, synced, renamed: a reader sees all of it or nothing.
    pub fn write(&self, cubin: &[u8]) -> Result<(), CudaError> {
        static WRITES: AtomicUsize = AtomicUsize::new(0);
        let count = WRITES.fetch_add(1, Ordering::Relaxed);
        let aside = self.path.with_extension(format!("{}-{count}.tmp", std::process::id()));
        let failure = |source| CudaError::Cache { path: self.path.clone(), source };
        if let Some(folder) = self.path.parent() {
            std::fs::create_dir_all(folder).map_err(failure)?;
        }
        let mut body = (self.key.len() as u64).to_le_bytes().to_vec();
        body.extend_from_slice(&self.key);
        body.extend_from_slice(cubin);
        let written = std::fs::File::create(&aside).and_then(|mut file| {
            file.write_all(MAGIC)?;
            file.write_all(&fnv1a(&body).to_le_bytes())?;
            file.write_all(&body)?;
            file.sync_all()
        });
        let renamed = written.and_then(|()| std::fs::rename(&aside, &self.path));
        if renamed.is_err() {
            // Nothing else knows the name; what cannot be removed is a stray file.
            let _ = std::fs::remove_file(&aside);
        }
        renamed.map_err(failure)
    }
}

/// FNV-1a: finds damage, and names files; it is not asked to resist an attacker.
fn fnv1a(bytes: &[u8]) -> u64 {
    bytes.iter().fold(0xcbf2_9ce4_8422_2325, |hash, byte| {
        (hash ^ u64::from(*byte)).wrapping_mul(0x0000_0100_0000_01b3)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn folder(name: &str) -> PathBuf {
        std::env::temp_dir().join(format!("moejob-cubins-{name}-{}", std::process::id()))
    }

    fn source(text: &str) -> Source {
        Source { label: "test".into(), text: text.into(), arch: "sm_80" }
    }

    fn entry(text: &str) -> Entry {
        Entry::new(&folder("entries"), &source(text), Cuda(13, 0))
    }

    #[test]
    fn a_damaged_or_foreign_entry_is_not_served() {
        let entry = entry("kernel of the damage test");
        entry.write(b"a cubin").expect("the temporary folder can be written");
        assert_eq!(entry.read().as_deref(), Some(b"a cubin".as_slice()));
        let whole = std::fs::read(&entry.path).expect("just written");
        for at in [0, 9, 20, whole.len() - 1] {
            let mut damaged = whole.clone();
            damaged[at] ^= 1;
            std::fs::write(&entry.path, &damaged).expect("writable");
            assert_eq!(entry.read(), None, "byte {at} flipped");
        }
        std::fs::write(&entry.path, &whole[..whole.len() / 2]).expect("writable");
        assert_eq!(entry.read(), None, "cut in half");
        let foreign = Entry { path: entry.path.clone(), key: b"another key".to_vec() };
        std::fs::write(&entry.path, &whole).expect("writable");
        assert_eq!(foreign.read(), None, "another key under the same name");
        std::fs::remove_file(&entry.path).expect("removable");
        assert_eq!(entry.read(), None);
    }

    /// The cache, then what was shipped by this NVRTC, then by the newest other one that the driver
    /// takes; and never a cubin of another text.
    #[test]
    fn a_cubin_is_looked_for_in_order() {
        let (cache, shipped) = (folder("cache"), folder("shipped"));
        let kernel = source("a kernel");
        let cubins = |nvrtc, driver| {
            Cubins::new(Some(cache.clone()), Some(&shipped), nvrtc, driver)
        };
        let ours = || cubins(Cuda(12, 8), Cuda(12, 4));
        assert_eq!(ours().find(&kernel), None, "no folder is there");
        let ship = |nvrtc, cubin: &[u8]| {
            Entry::new(&shipped, &kernel, nvrtc).write(cubin).expect("a folder for the test");
        };
        let found = |cubin: &[u8], shipped| Some(Found { cubin: cubin.to_vec(), shipped });
        ship(Cuda(13, 0), b"13.0");
        std::fs::create_dir_all(shipped.join("nvrtc-x.y")).expect("a folder for the test");
        assert_eq!(ours().find(&kernel), None, "a driver of 12 refuses what 13 makes");
        assert_eq!(cubins(Cuda(12, 8), Cuda(13, 0)).find(&kernel), found(b"13.0", true));
        ship(Cuda(12, 6), b"12.6");
        ship(Cuda(12, 9), b"12.9");
        assert_eq!(ours().find(&kernel), found(b"12.9", true), "the newest of the others");
        ship(Cuda(12, 8), b"12.8");
        assert_eq!(ours().find(&kernel), found(b"12.8", true), "its own");
        assert_eq!(ours().find(&source("another")), None);
        assert_eq!(counted(&shipped).len(), 4);
        assert_eq!(counted(&shipped)[1], (Cuda(12, 8), 1));
        ours().keep(&kernel, b"made here").expect("a folder for the test");
        assert_eq!(ours().find(&kernel), found(b"made here", false));
        assert_eq!(cubins(Cuda(12, 9), Cuda(12, 4)).find(&kernel), found(b"12.9", true));
        for folder in [cache, shipped] {
            std::fs::remove_dir_all(folder).expect("made above");
        }
    }
}
