//! The GPUs that this machine shows, asked without a context on any of them: whoever starts workers
//! must take no memory of their devices.

use std::sync::{Mutex, PoisonError};

use cudarc::driver::{result as cu, sys};

use crate::cuda::arch::Arch;
use crate::cuda::compile::compiles_for;
use crate::cuda::doctor::{cublaslt, driver, nvrtc};
use crate::cuda::driver::{Gpu, device, require_driver};
use crate::cuda::error::{CudaError, Doing};
use crate::cuda::given::{Said, check_name, shares};
use crate::cuda::nvml::{Monitor, Nvml};

/// A GPU, as the driver tells of it from outside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct VisibleGpu {
    /// Among those that `CUDA_VISIBLE_DEVICES` leaves.
    pub ordinal: usize,
    pub name: String,
    pub uuid: [u8; 16],
    /// Compute capability: major, minor.
    pub capability: (i32, i32),
    pub total_bytes: u64,
    /// None without NVML.
    pub free_bytes: Option<u64>,
}

/// What is missing before any GPU can train, or of no use: driver and libraries, each with why and
/// how to get it.
pub fn missing_libraries() -> Vec<(String, String)> {
    let lines = [driver(), nvrtc(), cublaslt()];
    let missing = lines.into_iter().filter(|line| line.refused);
    missing.map(|line| (line.name, line.advice.unwrap_or_default())).collect()
}

impl VisibleGpu {
    /// What a person should know of how it trains, if anything.
    ///
    /// # Errors
    /// There are no kernels for it, or NVRTC cannot compile them.
    pub fn fit(&self) -> Result<Option<&'static str>, CudaError> {
        let device = || format!("GPU {} ({})", self.ordinal, self.name);
        check_name(&self.name)?;
        let arch = Arch::of_capability(self.capability, false)
            .map_err(|source| CudaError::Unfit { device: device(), source })?;
        compiles_for(arch, &device())?;
        Ok(Arch::remark(self.capability))
    }
}

/// All that are visible, in the driver's order.
///
/// # Errors
/// There is no driver, it does not answer, or the container was given parts of GPUs.
pub fn visible_gpus() -> Result<Vec<VisibleGpu>, CudaError> {
    let count = Gpu::count()?;
    Said::here().check()?;
    // Optional: without it nobody says how much memory is free.
    let nvml = Nvml::load().ok();
    (0..count).map(|ordinal| describe(ordinal, nvml.as_ref())).collect()
}

/// The uuid of GPU `ordinal`, among those that `CUDA_VISIBLE_DEVICES` leaves.
///
/// # Errors
/// There is no driver, or no such GPU.
pub fn uuid_of(ordinal: usize) -> Result<[u8; 16], CudaError> {
    require_driver()?;
    let what = || format!("asking GPU {ordinal} who it is");
    let device = device(ordinal).doing(what)?;
    Ok(cu::device::get_uuid(device).doing(what)?.bytes.map(|byte| byte as u8))
}

/// Opens GPU `ordinal` and keeps its context until the process ends. Whoever opens it later is
/// faster: the driver takes some 0.3 s to begin and 0.15 s for a context.
///
/// # Errors
/// There is no driver, no such GPU, or it gives no context.
pub fn keep_open(ordinal: usize) -> Result<(), CudaError> {
    static KEPT: Mutex<Vec<Gpu>> = Mutex::new(Vec::new());
    let gpu = Gpu::open(ordinal)?;
    KEPT.lock().unwrap_or_else(PoisonError::into_inner).push(gpu);
    Ok(())
}

fn describe(
    ordinal: usize,
    nvml: Option<&std::sync::Arc<Nvml>>,
) -> Result<VisibleGpu, CudaError> {
    use sys::CUdevice_attribute_enum as Attribute;
    let what = || format!("asking GPU {ordinal} what it is");
    let device = device(ordinal).doing(what)?;
    let attribute = |attribute| {
        // SAFETY: `device` is a valid device of this process.
        unsafe { cu::device::get_attribute(device, attribute) }.doing(what)
    };
    let uuid = cu::device::get_uuid(device).doing(what)?.bytes.map(|byte| byte as u8);
    let monitor = nvml.and_then(|nvml| Monitor::open(nvml, uuid).ok());
    Ok(VisibleGpu {
        ordinal,
        name: cu::device::get_name(device).doing(what)?,
        uuid,
        capability: (
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?,
            attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?,
        ),
        // SAFETY: as above.
        total_bytes: unsafe { cu::device::total_mem(device) }.doing(what)? as u64,
        free_bytes: monitor
            .and_then(|monitor| monitor.memory())
            .map(|(free, _)| free / shares() as u64),
    })
}
