//! .cu text -> cubin, from disk (`cubins.rs`) or by NVRTC, several at once.

use std::ffi::CString;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::nvrtc::{result as rtc, sys};

use crate::buffer::DType;
use crate::cuda::arch::Arch;
use crate::cuda::cubins::{Cubins, shipped_dir};
use crate::cuda::driver::{Function, Gpu, LoadedModule};
use crate::cuda::error::CudaError;
use crate::cuda::libraries::{Cuda, DRIVER, NVRTC};
use crate::threads::{self, Work};

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

/// ELEMENT of common.cu.
pub(crate) fn element_macro(element: DType) -> usize {
    match element {
        DType::Bf16 => 0,
        DType::F16 => 1,
        DType::F32 => 2,
        other => panic!("kernels compute in Bf16, F16 or F32, not {other:?}"),
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

/// Compiles and loads kernels for one GPU.
#[derive(Clone, Debug)]
pub struct Compiler {
    gpu: Gpu,
    cubins: Cubins,
    nvrtc: Cuda,
}

/// More threads than this only wait for each other inside NVRTC.
const COMPILE_THREADS_MAX: usize = 16;

impl Compiler {
    /// With `cache`, cubins are kept there; several processes may share it. Those that were shipped
    /// beside the program are taken before one is compiled.
    pub fn new(gpu: &Gpu, cache: Option<PathBuf>) -> Result<Compiler, CudaError> {
        let nvrtc = compiles_for(Arch::of(gpu)?, gpu.name())?;
        let cubins = Cubins::new(cache, shipped_dir().as_deref(), nvrtc, DRIVER.require()?);
        Ok(Compiler { gpu: gpu.clone(), cubins, nvrtc })
    }

    /// NVRTC's version: major, minor.
    pub fn nvrtc_version(&self) -> (u32, u32) {
        (self.nvrtc.0, self.nvrtc.1)
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
        let cubins = in_turn(sources, progress, |source| self.cubin(source));
        let load = |(source, cubin): (&Source, Result<(Vec<u8>, bool), CudaError>)| {
            let (label, (cubin, shipped)) = (source.label.clone(), cubin?);
            let loaded = match LoadedModule::new(&self.gpu, &label, &cubin) {
                Err(error) if shipped && error.is_foreign_code() => {
                    LoadedModule::new(&self.gpu, &label, &self.make(source)?)?
                }
                loaded => loaded?,
            };
            Ok(Module { label, loaded })
        };
        sources.iter().zip(cubins).map(load).collect()
    }

    /// The cubin, and whether it was shipped.
    fn cubin(&self, source: &Source) -> Result<(Vec<u8>, bool), CudaError> {
        match self.cubins.find(source) {
            Some(found) => Ok((found.cubin, found.shipped)),
            None => Ok((self.make(source)?, false)),
        }
    }

    /// Compiles it, and keeps it for the next start.
    fn make(&self, source: &Source) -> Result<Vec<u8>, CudaError> {
        let cubin = compile(source)?;
        // A cache that cannot be written costs the next start its time and nothing else.
        if let Err(error) = self.cubins.keep(source, &cubin) {
            eprintln!("moejob: the kernel cache is not used: {error}");
        }
        Ok(cubin)
    }
}

/// What `work` makes of each source, in their order; `progress(done, of)` after each, from several
/// threads.
fn in_turn<T: Send>(
    sources: &[Source],
    progress: &(dyn Fn(usize, usize) + Sync),
    work: impl Fn(&Source) -> T + Sync,
) -> Vec<T> {
    let (next, done) = (AtomicUsize::new(0), AtomicUsize::new(0));
    let cores = std::thread::available_parallelism().map_or(1, |n| n.get());
    let threads = sources.len().min(cores).min(COMPILE_THREADS_MAX);
    let turns = || {
        let mut made = Vec::new();
        loop {
            let at = next.fetch_add(1, Ordering::Relaxed);
            let Some(source) = sources.get(at) else { return made };
            made.push((at, work(source)));
            progress(done.fetch_add(1, Ordering::Relaxed) + 1, sources.len());
        }
    };
    let mut made = std::thread::scope(|scope| {
        let workers: Vec<_> = (0..threads).map(|_| threads::begin(scope, turns)).collect();
        let join = |worker: Work<'_, Vec<_>>| match worker.join() {
            Ok(made) => made,
            Err(panic) => std::panic::resume_unwind(panic),
        };
        workers.into_iter().flat_map(join).collect::<Vec<(usize, T)>>()
    });
    made.sort_by_key(|(at, _)| *at);
    made.into_iter().map(|(_, made)| made).collect()
}

/// Compiles `sources` into `folder`, as a cache or as what is shipped, without a GPU or a driver.
/// What is there already stays. NVRTC's version: major, minor.
///
/// # Errors
/// NVRTC is missing or refuses a source, or the folder cannot be written.
pub fn compile_into(
    folder: &Path,
    sources: &[Source],
    progress: &(dyn Fn(usize, usize) + Sync),
) -> Result<(u32, u32), CudaError> {
    let nvrtc = NVRTC.require()?;
    let cubins = Cubins::new(Some(folder.to_owned()), None, nvrtc, nvrtc);
    let made = in_turn(sources, progress, |source| match cubins.find(source) {
        Some(_) => Ok(()),
        None => cubins.keep(source, &compile(source)?),
    });
    made.into_iter().collect::<Result<(), CudaError>>()?;
    Ok((nvrtc.0, nvrtc.1))
}

pub(crate) const OPTIONS: [&str; 1] = ["--std=c++17"];

/// NVRTC's version.
///
/// # Errors
/// It is missing or lacks functions, or the driver or the GPU ask for another one.
pub(crate) fn compiles_for(arch: Arch, device: &str) -> Result<Cuda, CudaError> {
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

#[cfg(test)]
mod tests {
    use std::collections::HashSet;

    use crate::ops::attention::shape::AttentionDesc;
    use crate::cuda::gemm::GemmConfig;
    use crate::ops::mixture::layer::MoeLayer;
    use crate::ops::mixture::desc::MoeDesc;
    use super::*;
    use crate::buffer::DType;
    use crate::types::{MoeActivation, Output};

    /// Compiles them, wherever NVRTC is; into the folder MOEJOB_CUBIN_CACHE where that is set, so
    /// that a machine without a device fills the cache of one that has it.
    fn check_that_all_compile(test: &str, sources: HashSet<Source>) {
        if let Err(error) = NVRTC.require() {
            return eprintln!("skipped: {test}: {error}");
        }
        let folder = std::env::var_os("MOEJOB_CUBIN_CACHE").map(PathBuf::from);
        let sources: Vec<Source> = sources.into_iter().collect();
        let Some(folder) = folder else {
            let cubins = in_turn(&sources, &|_, _| (), compile);
            for (source, cubin) in sources.iter().zip(cubins) {
                let cubin = cubin.unwrap_or_else(|error| panic!("{error}"));
                assert!(!cubin.is_empty(), "{}", source.label);
            }
            return;
        };
        compile_into(&folder, &sources, &|_, _| ()).unwrap_or_else(|error| panic!("{error}"));
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
                // Experts that choose leave a slot for each of them.
                let all = MoeDesc { top_k: 40, ..desc };
                sources.insert(all.route().rows_source(arch.target()));
                sources.insert(crate::ops::mixture::cuda::source(all.top_k, arch.target()));
            }
        }
        check_that_all_compile("the_kernels_of_layers_compile", sources);
    }

    /// The same of the ops of a step.
    #[test]
    fn the_kernels_of_a_step_compile() {
        let units = crate::cuda::step_ops::tests::units();
        let of = |arch| units.iter().map(move |unit| unit.source(arch));
        let sources = of("sm_90a").chain(of("sm_80")).collect();
        check_that_all_compile("the_kernels_of_a_step_compile", sources);
    }

    /// And of heads and gates.
    #[test]
    fn the_kernels_of_heads_and_gates_compile() {
        let arches = [Arch::Hopper, Arch::Ampere("sm_80")];
        let heads = arches.into_iter().flat_map(crate::ops::head::cuda::tests::sources);
        let gates = |arch: Arch| crate::ops::gate::cuda::tests::sources(arch.target());
        let sources = heads.chain(arches.into_iter().flat_map(gates)).collect();
        check_that_all_compile("the_kernels_of_heads_and_gates_compile", sources);
    }

    /// And of links between GPUs.
    #[test]
    fn the_kernels_of_links_compile() {
        let source = |arch: Arch| crate::ops::peer::cuda::source(arch.target());
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
            part: false,
            activation: MoeActivation::Silu,
            gated: true,
            sigmoid: false,
            norm_topk: true,
            scale: 1.0,
            groups: None,
            segments: 1,
            sources: 1,
            aux_coef: 0.01,
            z_coef: 0.001,
            weight_gradients: Output::Element,
        }
    }
}
