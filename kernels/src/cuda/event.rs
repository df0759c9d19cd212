//! Points of a stream, which are waited for and timed.

use std::sync::OnceLock;

use cudarc::driver::{result as cu, sys};

use crate::cuda::driver::Gpu;
use crate::cuda::error::{CudaError, Doing};
use crate::cuda::libraries::DRIVER;

/// A point in a stream that can be waited for and timed.
#[derive(Debug)]
pub struct Event {
    pub(crate) handle: sys::CUevent,
    gpu: Gpu,
}

impl Event {
    pub fn new(gpu: &Gpu) -> Result<Event, CudaError> {
        let handle = cu::event::create(sys::CUevent_flags::CU_EVENT_DEFAULT)
            .doing(|| "creating an event".to_owned())?;
        Ok(Event { handle, gpu: gpu.clone() })
    }

    /// Whether everything before it is done. Does not wait.
    pub fn is_past(&self) -> Result<bool, CudaError> {
        // SAFETY: the event lives as long as `self`.
        match unsafe { sys::cuEventQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => status.result().map(|()| true).doing(|| "asking an event".to_owned()),
        }
    }

    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.gpu.waited();
        // SAFETY: the event lives as long as `self`.
        unsafe { cu::event::synchronize(self.handle) }.doing(|| "waiting for an event".to_owned())
    }

    /// Milliseconds from `self` to `later`, both past.
    pub fn milliseconds_to(&self, later: &Event) -> Result<f32, CudaError> {
        let mut milliseconds = 0.0;
        // SAFETY: both events are valid, and so is the target.
        let status = unsafe { elapsed()?(&mut milliseconds, self.handle, later.handle) };
        status.result().doing(|| "timing between two events".to_owned())?;
        Ok(milliseconds)
    }
}

type Elapsed = unsafe extern "C" fn(*mut f32, sys::CUevent, sys::CUevent) -> sys::CUresult;

/// cudarc calls cuEventElapsedTime_v2, which no driver before CUDA 12.8 has. This one is in all.
fn elapsed() -> Result<Elapsed, CudaError> {
    static FOUND: OnceLock<Elapsed> = OnceLock::new();
    if let Some(found) = FOUND.get() {
        return Ok(*found);
    }
    DRIVER.require()?;
    // SAFETY: the library is there and has the function, which is of this type in every version.
    let found = unsafe { sys::culib().get::<Elapsed>(b"cuEventElapsedTime") };
    let found = found.map(|found| *found).map_err(|error| CudaError::Missing {
        library: "libcuda",
        why: format!(" ({error})"),
        advice: "install the NVIDIA driver anew",
    })?;
    Ok(*FOUND.get_or_init(|| found))
}

impl Drop for Event {
    fn drop(&mut self) {
        // SAFETY: created by us, destroyed once.
        let _ = unsafe { cu::event::destroy(self.handle) };
    }
}
