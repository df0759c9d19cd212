//! What this machine has for CUDA, and what it lacks.

use cudarc::driver::{result as cu, sys};

use super::compile::default_cache_dir;
use super::driver::{Gpu, require_driver};
use super::error::CudaError;
use super::nvml::{Monitor, Nvml};

/// One line of a diagnosis.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Inspection {
    /// `driver`, `nvrtc`, `cublasLt`, `gpu 0`, `link 0-1`, `kernel cache`
    pub name: String,
    /// Version, name or state; None: missing.
    pub found: Option<String>,
    /// How to get what is missing.
    pub advice: Option<String>,
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
        }
        Err(error) => lines.push(missing("gpu", &error.to_string())),
    }
    lines.push(match default_cache_dir() {
        Some(folder) => present("kernel cache", folder.display().to_string()),
        None => missing("kernel cache", "set MOEJOB_CUBIN_CACHE to a folder that can be written"),
    });
    lines
}

fn present(name: &str, found: String) -> Inspection {
    Inspection { name: name.to_owned(), found: Some(found), advice: None }
}

fn missing(name: &str, advice: &str) -> Inspection {
    Inspection { name: name.to_owned(), found: None, advice: Some(advice.to_owned()) }
}

pub(super) fn driver() -> Inspection {
    if let Err(error) = require_driver() {
        return missing("driver", &error.to_string());
    }
    let mut version = 0;
    // SAFETY: the library is loaded; the target is valid.
    match unsafe { sys::cuDriverGetVersion(&mut version) }.result() {
        Ok(()) => {
            let own = Nvml::load().ok().and_then(|nvml| nvml.driver_version());
            let own = own.map_or(String::new(), |own| format!("{own}, "));
            let (major, minor) = (version / 1000, version % 1000 / 10);
            present("driver", format!("{own}up to CUDA {major}.{minor}"))
        }
        Err(error) => missing("driver", &format!("its version cannot be read: {error:?}")),
    }
}

/// Power, clocks and errors; training does without.
fn nvml() -> Inspection {
    match Nvml::load() {
        Ok(_) => present("nvml", "loadable".to_owned()),
        Err(error) => missing("nvml", &error.to_string()),
    }
}

pub(super) fn nvrtc() -> Inspection {
    use cudarc::nvrtc::sys as nvrtc;
    // SAFETY: opens and closes the library.
    if !unsafe { nvrtc::is_culib_present() } {
        let advice = "install NVRTC of CUDA 12 or 13 (package cuda-nvrtc-12-8 or \
                      nvidia-cuda-nvrtc-cu12) and add its folder to LD_LIBRARY_PATH";
        return missing("nvrtc", advice);
    }
    let (mut major, mut minor) = (0, 0);
    // SAFETY: the library is present; both targets are valid.
    let _ = unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) };
    present("nvrtc", format!("{major}.{minor}"))
}

pub(super) fn cublaslt() -> Inspection {
    use cudarc::cublaslt::sys as cublaslt;
    // SAFETY: opens and closes the library.
    if !unsafe { cublaslt::is_culib_present() } {
        let advice = "install cuBLAS of CUDA 12 or 13 (package libcublas-12-8 or \
                      nvidia-cublas-cu12) and add its folder to LD_LIBRARY_PATH";
        return missing("cublasLt", advice);
    }
    // SAFETY: the library is present; it asks for nothing.
    let version = unsafe { cublaslt::cublasLtGetVersion() };
    // 120804 is 12.8.4; from 13 on a thousand more lies between.
    let (major, rest) = match version {
        0..1_000_000 => (version / 10_000, version % 10_000),
        _ => (version / 100_000, version % 100_000),
    };
    present("cublasLt", format!("{major}.{}", rest / 100))
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
        let advice = match major {
            ..8 => Some("too old to train: compute capability 8.0 or newer is needed"),
            8 | 9 => None,
            _ => Some("newer than sm_90: it takes the kernels of sm_80, which are slower"),
        };
        Ok(Inspection { advice: advice.map(str::to_owned), ..present(&name, found) })
    };
    describe().unwrap_or_else(|error| missing(&name, &error.to_string()))
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
