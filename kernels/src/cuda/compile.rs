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

/// FP32 of common.cu.
pub(crate) const FP32: usize = 2;

/// ELEMENT of common.cu.
pub(crate) fn element_macro(element: DType) -> usize {
    match element {
        DType::Bf16 => 0,
        DType::F16 => 1,
        DType::F32 => FP32,
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
pub(crate) fn in_turn<T: Send>(
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

pub(crate) fn compile(source: &Source) -> Result<Vec<u8>, CudaError> {
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
