//! Why a CUDA call failed, with what was being done.

use std::path::PathBuf;

use cudarc::driver::DriverError;

#[derive(Debug, thiserror::Error)]
pub enum CudaError {
    #[error("the library {library} cannot be loaded; {advice}")]
    Missing { library: &'static str, advice: &'static str },
    #[error("the library {library} has no {symbol}; {advice}")]
    MissingSymbol { library: &'static str, symbol: &'static str, advice: &'static str },
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
    #[error("{kernel} needs compute capability {needed}; {device} has {major}.{minor}")]
    Capability { kernel: String, needed: &'static str, device: String, major: i32, minor: i32 },
    #[error("waiting for the device was given up: {why}")]
    GivenUp { why: String },
    #[error("an arena of {bytes} bytes: {free} of {total} bytes are free on {device}")]
    OutOfMemory { bytes: usize, free: usize, total: usize, device: String, source: DriverError },
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
