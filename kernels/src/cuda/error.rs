//! Why a CUDA call failed, with what was being done.

use std::error::Error;
use std::path::PathBuf;

use cudarc::driver::DriverError;

use crate::cuda::arch::Unfit;
use crate::cuda::given::NotGiven;
use crate::cuda::libraries::Cuda;

#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    /// `why` is what the loader says of a file that is there, in brackets.
    #[error("the library {library} cannot be loaded{why}; {advice}")]
    Missing { library: &'static str, why: String, advice: &'static str },
    #[error("{library} has no {symbols}; {advice}")]
    MissingSymbols { library: String, symbols: String, advice: &'static str },
    #[error("{library} is too old: CUDA {least} or newer is needed; {advice}")]
    TooOld { library: String, least: Cuda, advice: &'static str },
    #[error(
        "{library} is newer than the driver, which knows CUDA up to {known}; install a newer \
         driver, or give the library of CUDA {major} alone in LD_LIBRARY_PATH"
    )]
    TooNew { library: String, known: Cuda, major: u32 },
    #[error(
        "{library} cannot compile for {device}, which CUDA {least} can first; install NVRTC of \
         CUDA {least} or newer and add its folder to LD_LIBRARY_PATH"
    )]
    Compiler { library: String, device: String, least: Cuda },
    #[error(transparent)]
    NotGiven(#[from] NotGiven),
    #[error("there is no GPU {ordinal}: the driver shows {shown}{said}")]
    NoGpu { ordinal: usize, shown: usize, said: String },
    #[error("{doing}")]
    Driver { doing: String, source: DriverError },
    #[error(
        "launching {kernel}, grid {grid:?}, block {block:?}, {shared_bytes} bytes of shared memory"
    )]
    Launch {
        kernel: String,
        grid: [u32; 3],
        block: [u32; 3],
        shared_bytes: u32,
        source: DriverError,
    },
    #[error("NVRTC refused {kernel} for {arch} ({code}):\n{log}")]
    Compile { kernel: String, arch: String, code: String, log: String },
    #[error("{doing} with cuBLASLt")]
    Cublas { doing: String, source: cudarc::cublaslt::result::CublasError },
    #[error("kernel cache at {path}")]
    Cache { path: PathBuf, source: std::io::Error },
    #[error("{device} cannot train")]
    Unfit { device: String, source: Unfit },
    #[error("no graph was captured: {why}")]
    NotCaptured { why: String },
    #[error("waiting for the device was given up: {why}")]
    GivenUp { why: String },
    #[error("it did not end in {seconds:.1} s")]
    Late { seconds: f64 },
    #[error("position {position} of this node shares nothing of its memory, as this rank does")]
    NotShared { position: usize },
    #[error("{why}")]
    NoRoom { why: String },
    #[error("{bytes} bytes of this machine's memory for what is offloaded: {why}")]
    HostMemory { bytes: usize, why: String },
    #[error("an arena of {bytes} bytes: {free} of {total} bytes are free on {device}")]
    OutOfMemory { bytes: usize, free: usize, total: usize, device: String, source: DriverError },
}

impl CudaError {
    /// The GPU's memory is full, or the GPU is another's alone: an end of another process may
    /// change that.
    pub fn is_room(&self) -> bool {
        use cudarc::driver::sys::CUresult as Code;
        match self {
            CudaError::OutOfMemory { .. } | CudaError::NoRoom { .. } => true,
            CudaError::Driver { source, .. } | CudaError::Launch { source, .. } => matches!(
                source.0,
                Code::CUDA_ERROR_OUT_OF_MEMORY | Code::CUDA_ERROR_DEVICE_UNAVAILABLE
            ),
            _ => false,
        }
    }

    /// The driver or a library refused in the midst of work; nothing is missing. A process that
    /// begins anew may not meet it.
    pub fn is_of_process(&self) -> bool {
        match self {
            CudaError::Driver { .. } | CudaError::Launch { .. } => !self.is_foreign_code(),
            CudaError::Cublas { .. }
            | CudaError::NotCaptured { .. }
            | CudaError::GivenUp { .. }
            | CudaError::Late { .. }
            | CudaError::NotShared { .. }
            | CudaError::NoRoom { .. }
            | CudaError::OutOfMemory { .. }
            | CudaError::HostMemory { .. } => true,
            _ => false,
        }
    }

    /// The driver does not take the code of a module: it was made for another GPU or driver.
    pub(crate) fn is_foreign_code(&self) -> bool {
        use cudarc::driver::sys::CUresult as Code;
        let CudaError::Driver { source, .. } = self else { return false };
        matches!(
            source.0,
            Code::CUDA_ERROR_INVALID_IMAGE
                | Code::CUDA_ERROR_NO_BINARY_FOR_GPU
                | Code::CUDA_ERROR_UNSUPPORTED_PTX_VERSION
        )
    }

    /// With what lies beneath it.
    pub(crate) fn in_full(&self) -> String {
        let (mut text, mut below) = (self.to_string(), self.source());
        while let Some(error) = below {
            text += &format!(": {error}");
            below = error.source();
        }
        text
    }
}

/// Says what was being done when the driver refused.
pub(crate) trait Doing<T> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, CudaError>;
}

impl<T> Doing<T> for Result<T, DriverError> {
    fn doing(self, what: impl FnOnce() -> String) -> Result<T, CudaError> {
        self.map_err(|source| CudaError::Driver { doing: what(), source })
    }
}
