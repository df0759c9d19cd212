//! .cu text -> cubin by NVRTC, kept on disk, several at once.

use std::ffi::CString;
use std::io::Write;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::nvrtc::{result as rtc, sys};

use super::arch::Arch;
use super::driver::{Function, Gpu, LoadedModule};
use super::error::CudaError;
use super::libraries::{Cuda, NVRTC};

/// A compilation unit: its macros are part of its text.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Source {
    /// For messages, such as `up 128x256`.
    pub label: String,
    pub text: String,
    /// `sm_90a`: of this very architecture, as wgmma asks for.
    pub arch: &'static str,
}

impl Source {
    /// Puts `macros` and the helpers every kernel uses before `parts`.
    pub(crate) fn new(
        label: String,
        arch: &'static str,
        macros: &[(&str, usize)],
        parts: &[&str],
    ) -> Source {
        let mut text: String =
            macros.iter().map(|(name, value)| format!("#define {name} {value}\n")).collect();
        text.push_str(include_str!("common.cu"));
        text.extend(parts.iter().copied());
        Source { label, text, arch }
    }
}

/// Kernels in the memory of one GPU.
#[derive(Clone, Debug)]
pub struct Module {
    label: String,
    loaded: Arc<LoadedModule>,
}

impl Module {
    pub fn function(&self, name: &str) -> Result<Function, CudaError> {
        self.loaded.function(&self.label, name)
    }
}

/// `$MOEJOB_CUBIN_CACHE`, else `moejob/cubins` in the user's cache folder; none without a home.
pub fn default_cache_dir() -> Option<PathBuf> {
    let var = |name| std::env::var_os(name).filter(|value| !value.is_empty()).map(PathBuf::from);
    var("MOEJOB_CUBIN_CACHE").or_else(|| {
        let caches = var("XDG_CACHE_HOME").or_else(|| Some(var("HOME")?.join(".cache")))?;
        Some(caches.join("moejob").join("cubins"))
    })
}

/// Compiles and loads kernels for one GPU.
#[derive(Clone, Debug)]
pub struct Compiler {
    gpu: Gpu,
    cache: Option<PathBuf>,
    nvrtc: (u32, u32),
}

/// More threads than this only wait for each other inside NVRTC.
const COMPILE_THREADS_MAX: usize = 16;

impl Compiler {
    /// With `cache`, cubins are kept there; several processes may share it.
    pub fn new(gpu: &Gpu, cache: Option<PathBuf>) -> Result<Compiler, CudaError> {
        let Cuda(major, minor) = compiles_for(Arch::of(gpu)?, gpu.name())?;
        Ok(Compiler { gpu: gpu.clone(), cache, nvrtc: (major, minor) })
    }

    /// NVRTC's version: major, minor.
    pub fn nvrtc_version(&self) -> (u32, u32) {
        self.nvrtc
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    /// Modules in the order of `sources`; `progress(done, of)` after each, from several threads.
    pub fn load(
        &self,
        sources: &[Source],
        progress: &(dyn Fn(usize, usize) + Sync),
    ) -> Result<Vec<Module>, CudaError> {
        let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
        let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
        let threads = sources.len().min(cores).min(COMPILE_THREADS_MAX);
        let work = || {
            let mut cubins = Vec::new();
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                let Some(source) = sources.get(at) else { return cubins };
                cubins.push((at, self.cubin(source)));
                progress(done.fetch_add(1, Ordering::Relaxed) + 1, sources.len());
            }
        };
        let mut cubins = std::thread::scope(|scope| {
            let workers: Vec<_> = (0..threads).map(|_| scope.spawn(work)).collect();
            let join = |worker: std::thread::ScopedJoinHandle<'_, Vec<_>>| match worker.join() {
                Ok(cubins) => cubins,
                Err(panic) => std::panic::resume_unwind(panic),
            };
            workers.into_iter().flat_map(join).collect::<Vec<(usize, Result<_, _>)>>()
        });
        cubins.sort_by_key(|(at, _)| *at);
        let load = |(at, cubin): (usize, Result<Vec<u8>, CudaError>)| {
            let label = sources[at].label.clone();
            let loaded = LoadedModule::new(&self.gpu, &label, &cubin?)?;
            Ok(Module { label, loaded })
        };
        cubins.into_iter().map(load).collect()
    }

    fn cubin(&self, source: &Source) -> Result<Vec<u8>, CudaError> {
        cached(source, self.cache.as_deref(), self.nvrtc)
    }
}

/// From the cache of `folder`, else compiled and left there.
fn cached(
    source: &Source,
    folder: Option<&Path>,
    nvrtc: (u32, u32),
) -> Result<Vec<u8>, CudaError> {
    let Some(folder) = folder else { return compile(source) };
    let entry = Entry::new(folder, source, nvrtc);
    if let Some(cubin) = entry.read() {
        return Ok(cubin);
    }
    let cubin = compile(source)?;
    // A cache that cannot be written costs the next start its time and nothing else.
    if let Err(error) = entry.write(&cubin) {
        eprintln!("moejob: the kernel cache is not used: {error}");
    }
    Ok(cubin)
}

const OPTIONS: [&str; 1] = ["--std=c++17"];

/// NVRTC's version.
///
/// # Errors
/// It is missing or lacks functions, or the driver or the GPU ask for another one.
pub(super) fn compiles_for(arch: Arch, device: &str) -> Result<Cuda, CudaError> {
    let (version, least) = (NVRTC.suits()?, arch.least_nvrtc());
    if version >= least {
        return Ok(version);
    }
    let (library, device) = (NVRTC.described(Some(version)), device.to_owned());
    Err(CudaError::Compiler { library, device, least })
}

fn compile(source: &Source) -> Result<Vec<u8>, CudaError> {
    let failure = |code: String, log: String| CudaError::Compile {
        kernel: source.label.clone(),
        arch: source.arch.to_owned(),
        code,
        log,
    };
    let text = CString::new(source.text.as_str())
        .map_err(|nul| failure(nul.to_string(), String::new()))?;
    let program = rtc::create_program(&text, None)
        .map_err(|error| failure(format!("{error:?}"), String::new()))?;
    let mut options = vec![format!("--gpu-architecture={}", source.arch)];
    options.extend(OPTIONS.iter().map(|option| (*option).to_owned()));
    // SAFETY: `program` is valid until it is destroyed below, on the one path out.
    let cubin = unsafe {
        match rtc::compile_program(program, &options) {
            Ok(()) => cubin_of(program).map_err(|error| failure(error, String::new())),
            Err(error) => {
                let log = rtc::get_program_log(program).unwrap_or_default();
                let log: Vec<u8> = log.into_iter().map(|c| c as u8).filter(|c| *c != 0).collect();
                Err(failure(format!("{error:?}"), String::from_utf8_lossy(&log).into_owned()))
            }
        }
    };
    // SAFETY: created above, destroyed once. A failure here would leak memory and nothing else.
    let _ = unsafe { rtc::destroy_program(program) };
    cubin
}

/// # Safety
/// `program` was compiled for a real architecture.
unsafe fn cubin_of(program: sys::nvrtcProgram) -> Result<Vec<u8>, String> {
    let mut bytes = 0_usize;
    // SAFETY: the caller's promise; the targets are valid and as long as NVRTC said.
    unsafe {
        sys::nvrtcGetCUBINSize(program, &mut bytes).result().map_err(|e| format!("{e:?}"))?;
        let mut cubin = vec![0_u8; bytes];
        sys::nvrtcGetCUBIN(program, cubin.as_mut_ptr().cast())
            .result()
            .map_err(|e| format!("{e:?}"))?;
        Ok(cubin)
    }
}

/// One file: magic, length and hash of the rest, the whole key, the cubin. The key is compared in
/// full, so neither a collision of names nor damage can hand out a wrong kernel.
struct Entry {
    path: PathBuf,
    key: Vec<u8>,
}

const MAGIC: &[u8; 8] = b"MOEJCUB1";

impl Entry {
    fn new(folder: &Path, source: &Source, nvrtc: (u32, u32)) -> Entry {
        let options = OPTIONS.join(" ");
        let head = format!("{} {options} nvrtc {}.{}\n", source.arch, nvrtc.0, nvrtc.1);
        let key = [head.as_bytes(), source.text.as_bytes()].concat();
        let name = format!("{:016x}{:016x}.cubin", fnv1a(&key), fnv1a(source.label.as_bytes()));
        Entry { path: folder.join(name), key }
    }

    /// None for a missing, foreign or damaged file.
    fn read(&self) -> Option<Vec<u8>> {
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
    fn write(&self, cubin: &[u8]) -> Result<(), CudaError> {
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
    use std::collections::HashSet;

    use super::super::attention_shape::AttentionDesc;
    use super::super::gemm::{GemmConfig, Output};
    use super::super::layer::MoeLayer;
    use super::super::shape::{MoeActivation, MoeDesc};
    use super::*;
    use crate::buffer::DType;

    fn entry(text: &str) -> Entry {
        let folder = std::env::temp_dir().join(format!("moejob-cubins-{}", std::process::id()));
        let source = Source { label: "test".into(), text: text.into(), arch: "sm_80" };
        Entry::new(&folder, &source, (13, 0))
    }

    /// Compiles them, wherever NVRTC is; into the folder MOEJOB_CUBIN_CACHE where that is set, so
    /// that a machine without a device fills the cache of one that has it.
    fn check_that_all_compile(test: &str, sources: HashSet<Source>) {
        let version = match NVRTC.require() {
            Ok(Cuda(major, minor)) => (major, minor),
            Err(error) => return eprintln!("skipped: {test}: {error}"),
        };
        let folder = std::env::var_os("MOEJOB_CUBIN_CACHE").map(PathBuf::from);
        let sources: Vec<Source> = sources.into_iter().collect();
        let next = AtomicUsize::new(0);
        let work = || {
            while let Some(source) = sources.get(next.fetch_add(1, Ordering::Relaxed)) {
                let cubin = cached(source, folder.as_deref(), version);
                let cubin = cubin.unwrap_or_else(|error| panic!("{error}"));
                assert!(!cubin.is_empty(), "{}", source.label);
            }
        };
        std::thread::scope(|scope| (0..2).for_each(|_| _ = scope.spawn(work)));
    }

    /// Every kernel of attention: heads for each path, masked and not, both backwards.
    #[test]
    fn the_kernels_of_attention_compile() {
        let mut sources = HashSet::new();
        let halves = [DType::Bf16, DType::F16];
        for (arch, elements, head_dims) in ATTENTIONS {
            for element in elements.unwrap_or(&halves) {
                for head_dim in head_dims {
                    for bits in 0..4 {
                        let desc = AttentionDesc {
                            element: *element,
                            batch: 2,
                            seq: 512,
                            heads: 8,
                            kv_heads: if bits & 1 == 0 { 8 } else { 2 },
                            head_dim: *head_dim,
                            scale: 0.1,
                            documents: bits & 2 != 0,
                            window: None,
                            deterministic: false,
                        };
                        sources.extend(desc.sources(arch));
                        let desc = AttentionDesc { deterministic: true, ..desc };
                        sources.extend(desc.sources(arch));
                    }
                }
            }
        }
        check_that_all_compile("the_kernels_of_attention_compile", sources);
    }

    /// Elements (none: both of 16 bits) and head dims.
    const ATTENTIONS: [(Arch, Option<&[DType]>, &[usize]); 3] = [
        (Arch::Hopper, None, &[64, 96, 128]),
        (Arch::Ampere("sm_80"), None, &[72, 128, 256]),
        (Arch::Plain("sm_80"), Some(&[DType::F32]), &[40, 256]),
    ];

    /// Every kernel of a layer, for both paths and all elements.
    #[test]
    fn the_kernels_of_layers_compile() {
        let mut sources = HashSet::new();
        for (arch, elements) in [
            (Arch::Hopper, [DType::Bf16, DType::F16].as_slice()),
            (Arch::Ampere("sm_80"), &[DType::Bf16, DType::F16]),
            (Arch::Plain("sm_80"), &[DType::F32]),
        ] {
            for (element, gated) in elements.iter().flat_map(|e| [(*e, true), (*e, false)]) {
                let desc = MoeDesc { element, gated, ..layer_desc() };
                let configs = MoeLayer::configs(arch, &desc);
                sources.extend(configs.iter().map(GemmConfig::source));
                sources.insert(desc.route().source(arch.target()));
                sources.insert(desc.route().rows_source(arch.target()));
            }
        }
        check_that_all_compile("the_kernels_of_layers_compile", sources);
    }

    /// The same of the ops of a step.
    #[test]
    fn the_kernels_of_a_step_compile() {
        let units = super::super::step_ops::tests::units();
        let of = |arch| units.iter().map(move |unit| unit.source(arch));
        let sources = of("sm_90a").chain(of("sm_80")).collect();
        check_that_all_compile("the_kernels_of_a_step_compile", sources);
    }

    /// And of heads and gates.
    #[test]
    fn the_kernels_of_heads_and_gates_compile() {
        let arches = [Arch::Hopper, Arch::Ampere("sm_80")];
        let heads = arches.into_iter().flat_map(super::super::head::tests::sources);
        let gates = |arch: Arch| super::super::gate::tests::sources(arch.target());
        let sources = heads.chain(arches.into_iter().flat_map(gates)).collect();
        check_that_all_compile("the_kernels_of_heads_and_gates_compile", sources);
    }

    /// And of links between GPUs.
    #[test]
    fn the_kernels_of_links_compile() {
        let source = |arch: Arch| super::super::peer::source(arch.target());
        let sources = [Arch::Hopper, Arch::Ampere("sm_80")].into_iter().map(source).collect();
        check_that_all_compile("the_kernels_of_links_compile", sources);
    }

    fn layer_desc() -> MoeDesc {
        MoeDesc {
            element: DType::Bf16,
            tokens: 4096,
            dim: 2048,
            hidden: 768,
            experts: 128,
            top_k: 8,
            activation: MoeActivation::Silu,
            gated: true,
            sigmoid: false,
            norm_topk: true,
            scale: 1.0,
            groups: None,
            segments: 1,
            aux_coef: 0.01,
            z_coef: 0.001,
            weight_gradients: Output::Element,
        }
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
}
