//! What this machine has for CUDA, and what it lacks.

use cudarc::driver::{result as cu, sys};

use crate::cuda::arch::Arch;
use crate::cuda::compile::compiles_for;
use crate::cuda::cubins::{counted, default_cache_dir, shipped_dir};
use crate::cuda::driver::{Gpu, require_driver};
use crate::cuda::error::CudaError;
use crate::cuda::given::Said;
use crate::cuda::libraries::{CUBLASLT, Cuda, DRIVER, NVRTC, Needed};
use crate::cuda::machine::uuid_of;
use crate::cuda::nvml::{Monitor, Nvml, uuid_text};

/// One line of a diagnosis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// `driver`, `nvrtc`, `cublasLt`, `gpu 0`, `link 0-1`, `kernel cache`
    pub name: String,
    /// Version, name or state; None: missing.
    pub found: Option<String>,
    /// How to get what is missing.
    pub advice: Option<String>,
    /// No job trains with it, or without it.
    pub refused: bool,
}

/// Driver, libraries, GPUs and links between them, in that order. Never fails: what cannot be
/// asked is reported as missing with the reason.
pub fn inspect() -> Vec<Inspection> {
    let mut lines = vec![driver(), nvrtc(), cublaslt(), nvml()];
    match Gpu::count() {
        Ok(count) => {
            lines.extend((0..count).map(gpu));
            let pairs = (0..count).flat_map(|a| (a + 1..count).map(move |b| (a, b)));
            lines.extend(pairs.map(|(a, b)| link(a, b)));
            if count == 0 {
                lines.push(missing("gpu", "no GPU is visible: see CUDA_VISIBLE_DEVICES"));
            }
            lines.extend(given(count));
        }
        // The driver's own line says why.
        Err(_) if lines[0].refused => {}
        Err(error) => lines.push(missing("gpu", &error.in_full())),
    }
    lines.extend(shipped());
    lines.push(match default_cache_dir() {
        Some(folder) => present("kernel cache", folder.display().to_string()),
        None => missing("kernel cache", "set MOEJOB_CUBIN_CACHE to a folder that can be written"),
    });
    lines
}

fn present(name: &str, found: String) -> Inspection {
    Inspection { name: name.to_owned(), found: Some(found), advice: None, refused: false }
}

fn missing(name: &str, advice: &str) -> Inspection {
    let (name, advice) = (name.to_owned(), Some(advice.to_owned()));
    Inspection { name, found: None, advice, refused: false }
}

pub(crate) fn driver() -> Inspection {
    let version = match require_driver().and_then(|()| DRIVER.require()) {
        Ok(version) => version,
        Err(error) => return refused("driver", &DRIVER, &error),
    };
    let own = Nvml::load().ok().and_then(|nvml| nvml.driver_version());
    let own = own.map_or(String::new(), |own| format!("{own}, "));
    let advice = "older than what is tried: install driver 550 or newer if a job fails";
    Inspection {
        advice: (version < Cuda::TRIED).then(|| advice.to_owned()),
        ..present("driver", format!("{own}up to CUDA {version}{}", place(&DRIVER)))
    }
}

/// Power, clocks and errors; training does without.
fn nvml() -> Inspection {
    match Nvml::load() {
        Ok(_) => present("nvml", "loadable".to_owned()),
        Err(error) => missing("nvml", &error.to_string()),
    }
}

pub(crate) fn nvrtc() -> Inspection {
    library("nvrtc", &NVRTC)
}

pub(crate) fn cublaslt() -> Inspection {
    library("cublasLt", &CUBLASLT)
}

/// A library of CUDA; without a driver it may be good for any.
fn library(name: &str, needed: &Needed) -> Inspection {
    let version = match DRIVER.require() {
        Ok(_) => needed.suits(),
        Err(_) => needed.require(),
    };
    match version {
        Ok(version) => present(name, format!("{version}{}", place(needed))),
        Err(error) => refused(name, needed, &error),
    }
}

/// What is not there, or is there and of no use.
fn refused(name: &str, needed: &Needed, error: &CudaError) -> Inspection {
    let found = match error {
        CudaError::Missing { .. } => None,
        _ => needed.file(),
    };
    Inspection { found, refused: true, ..missing(name, &error.in_full()) }
}

/// `, /usr/lib/libnvrtc.so.12`
fn place(needed: &Needed) -> String {
    needed.file().map_or(String::new(), |file| format!(", {file}"))
}

/// What the container was given, beside what the driver shows of it.
fn given(count: usize) -> Option<Inspection> {
    let uuid = |ordinal| Some(uuid_text(uuid_of(ordinal).ok()?));
    let shown: Vec<String> = (0..count).filter_map(uuid).collect();
    Some(match Said::here().beside(&shown)? {
        Ok(found) => present("container", found),
        Err(why) => Inspection { refused: true, ..missing("container", &why) },
    })
}

/// Kernels that lie beside the program, where there are some.
fn shipped() -> Option<Inspection> {
    let folder = shipped_dir()?;
    let of = |(nvrtc, count)| format!("{count} modules by NVRTC {nvrtc}");
    let found: Vec<String> = counted(&folder).into_iter().map(of).collect();
    let found = format!("{}, in {}", found.join(", "), folder.display());
    (!counted(&folder).is_empty()).then(|| present("shipped kernels", found))
}

fn gpu(ordinal: usize) -> Inspection {
    let name = format!("gpu {ordinal}");
    let describe = || -> Result<Inspection, CudaError> {
        let gpu = Gpu::open(ordinal)?;
        let ((major, minor), (free, total)) = (gpu.capability(), gpu.memory()?);
        let (free, total) = (free >> 20, total >> 20);
        let count = gpu.multiprocessors();
        let model = gpu.name();
        let clocks = clocks(gpu.uuid());
        let found = format!(
            "{model}, sm_{major}{minor}, {count} SMs, {free} of {total} MiB free{clocks}"
        );
        let fit = Arch::of(&gpu).and_then(|arch| compiles_for(arch, model));
        let advice = match &fit {
            // Told of the library itself.
            Err(CudaError::Missing { .. } | CudaError::MissingSymbols { .. }) | Ok(_) => {
                Arch::remark(gpu.capability()).map(str::to_owned)
            }
            Err(error) => Some(error.in_full()),
        };
        let refused = matches!(fit, Err(CudaError::Unfit { .. } | CudaError::Compiler { .. }));
        Ok(Inspection { advice, refused, ..present(&name, found) })
    };
    describe().unwrap_or_else(|error| missing(&name, &error.in_full()))
}

/// `, 345 of 1980 MHz, 71 of 700 W, slowed by power cap`, as far as NVML tells.
fn clocks(uuid: [u8; 16]) -> String {
    let monitor = Nvml::load().and_then(|nvml| Monitor::open(&nvml, uuid));
    let Ok(monitor) = monitor else { return String::new() };
    let (now, most) = (monitor.read(), monitor.limits());
    let mut text = String::new();
    if let (Some(now), Some(most)) = (now.megahertz, most.megahertz) {
        text += &format!(", {now} of {most} MHz");
    }
    if let (Some(now), Some(most)) = (now.watts, most.watts) {
        text += &format!(", {now:.0} of {most:.0} W");
    }
    if !now.slowed_by.is_empty() {
        text += &format!(", slowed by {}", now.slowed_by.join(", "));
    }
    text
}

/// Whether two GPUs reach each other's memory, and how well (the driver's rank, 0 is best).
fn link(a: usize, b: usize) -> Inspection {
    use sys::CUdevice_P2PAttribute_enum as Attribute;
    let name = format!("link {a}-{b}");
    let device = |ordinal: usize| cu::device::get(i32::try_from(ordinal).unwrap_or(i32::MAX));
    let (Ok(first), Ok(second)) = (device(a), device(b)) else {
        return missing(&name, "a GPU of the pair cannot be opened");
    };
    let ask = |attribute| {
        let mut value = 0;
        // SAFETY: both devices are valid; the target is too.
        let status = unsafe { sys::cuDeviceGetP2PAttribute(&mut value, attribute, first, second) };
        status.result().ok().map(|()| value)
    };
    let access = ask(Attribute::CU_DEVICE_P2P_ATTRIBUTE_ACCESS_SUPPORTED);
    let rank = ask(Attribute::CU_DEVICE_P2P_ATTRIBUTE_PERFORMANCE_RANK);
    match (access, rank) {
        (Some(1), Some(rank)) => present(&name, format!("peer access, performance rank {rank}")),
        _ => missing(&name, "no peer access: copies go through host memory"),
    }
}
