//! The libraries that are loaded when a GPU is first used, and whether they have what we call.
//!
//! ```text
//! DRIVER, NVRTC, CUBLASLT: require()  it is there, with every function of its list
//!                          suits()    and of no newer CUDA than the driver knows
//! ```
//! cudarc looks a function up when it is first called, and panics where there is none. So nothing
//! of a library is called before `require`, and nothing that its list lacks. `tests/drivers.rs`
//! holds the lists against the sources of this crate and of cudarc.

use std::fmt;
use std::error::Error;
use std::sync::OnceLock;

use cudarc::{cublaslt, driver, nvrtc};

use crate::cuda::error::CudaError;

/// A version of CUDA: major, minor.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, PartialOrd, Ord)]
pub struct Cuda(pub u32, pub u32);

impl Cuda {
    /// Every function that is not said to be newer is in the libraries of this one.
    pub const EARLIEST: Cuda = Cuda(11, 4);
    /// Older ones lack kinds of kernels that we have.
    const LEAST: Cuda = Cuda(12, 0);
    /// From here on all of it is tried.
    pub(crate) const TRIED: Cuda = Cuda(12, 4);

    /// As the driver tells it: 12040.
    fn of_driver(code: i32) -> Cuda {
        let code = u32::try_from(code).unwrap_or(0);
        Cuda(code / 1000, code % 1000 / 10)
    }

    /// As cuBLASLt tells it: 120804 is 12.8. Seven digits have one more behind the minor version.
    fn of_cublas(code: usize) -> Cuda {
        let code = u32::try_from(code).unwrap_or(0);
        let (major, rest) = match code {
            0..1_000_000 => (code / 10_000, code % 10_000),
            _ => (code / 100_000, code % 100_000),
        };
        Cuda(major, rest / 100)
    }
}

impl fmt::Display for Cuda {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.0, self.1)
    }
}

/// A function that is called of a library.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Called {
    /// `libcuda`, `libnvrtc`, `libcublasLt`
    pub library: &'static str,
    pub symbol: &'static str,
    /// The first CUDA that has it.
    pub since: Cuda,
}

/// Everything that is called of CUDA's libraries.
pub fn called() -> impl Iterator<Item = Called> {
    [&DRIVER, &NVRTC, &CUBLASLT].into_iter().flat_map(Needed::called)
}

/// A library and what is called of it.
pub(crate) struct Needed {
    /// Its file's name up to the `.so`
    name: &'static str,
    symbols: &'static [&'static str],
    /// Those of `symbols` that came after [`Cuda::EARLIEST`]
    newer: &'static [(&'static str, Cuda)],
    /// The function that tells the version; called only where it is there
    version: (&'static str, fn() -> Option<Cuda>),
    present: unsafe fn() -> bool,
    loaded: unsafe fn() -> &'static libloading::Library,
    advice: &'static str,
    found: OnceLock<Cuda>,
}

pub(crate) static DRIVER: Needed = Needed {
    name: "libcuda",
    symbols: &DRIVER_SYMBOLS,
    newer: &[("cuTensorMapEncodeTiled", Cuda(12, 0))],
    version: ("cuDriverGetVersion", || {
        let mut code = 0;
        // SAFETY: the function was found; the target is valid for the call.
        let told = unsafe { driver::sys::cuDriverGetVersion(&mut code) }.result();
        told.ok().map(|()| Cuda::of_driver(code))
    }),
    present: driver::sys::is_culib_present,
    loaded: driver::sys::culib,
    advice: "install the NVIDIA driver, release 550 or newer (libcuda.so.1), or give the container \
             the driver's",
    found: OnceLock::new(),
};

pub(crate) static NVRTC: Needed = Needed {
    name: "libnvrtc",
    symbols: &NVRTC_SYMBOLS,
    newer: &[],
    version: ("nvrtcVersion", || {
        let (mut major, mut minor) = (0, 0);
        // SAFETY: the function was found; both targets are valid for the call.
        let told = unsafe { nvrtc::sys::nvrtcVersion(&mut major, &mut minor) }.result();
        let part = |number: i32| u32::try_from(number).unwrap_or(0);
        told.ok().map(|()| Cuda(part(major), part(minor)))
    }),
    present: nvrtc::sys::is_culib_present,
    loaded: nvrtc::sys::culib,
    advice: "install NVRTC of CUDA 12.4 to 13 (package cuda-nvrtc-12-8, or the wheel \
             nvidia-cuda-nvrtc-cu12) and add its folder to LD_LIBRARY_PATH",
    found: OnceLock::new(),
};

pub(crate) static CUBLASLT: Needed = Needed {
    name: "libcublasLt",
    symbols: &CUBLASLT_SYMBOLS,
    newer: &[],
    // SAFETY: the function was found; it asks for nothing.
    version: ("cublasLtGetVersion", || {
        Some(Cuda::of_cublas(unsafe { cublaslt::sys::cublasLtGetVersion() }))
    }),
    present: cublaslt::sys::is_culib_present,
    loaded: cublaslt::sys::culib,
    advice: "install cuBLAS of CUDA 12.4 to 13 (package libcublas-12-8, or the wheel \
             nvidia-cublas-cu12) and add its folder to LD_LIBRARY_PATH",
    found: OnceLock::new(),
};

impl Needed {
    fn called(&'static self) -> impl Iterator<Item = Called> {
        let of = |symbol| Called { library: self.name, symbol, since: self.since(symbol) };
        self.symbols.iter().copied().map(of)
    }

    fn since(&self, symbol: &str) -> Cuda {
        let newer = self.newer.iter().find(|(name, _)| *name == symbol);
        newer.map_or(Cuda::EARLIEST, |(_, since)| *since)
    }

    /// The library's version. From here on each function of its list may be called.
    ///
    /// # Errors
    /// It cannot be loaded, lacks functions, or is too old: in words, with what to install.
    pub(crate) fn require(&self) -> Result<Cuda, CudaError> {
        if let Some(version) = self.found.get() {
            return Ok(*version);
        }
        // SAFETY: opens and closes the library, which has no preconditions.
        if !unsafe { (self.present)() } {
            let why = self.why_not().map_or(String::new(), |why| format!(" ({why})"));
            return Err(CudaError::Missing { library: self.name, why, advice: self.advice });
        }
        let absent: Vec<&str> =
            self.symbols.iter().copied().filter(|symbol| !self.has(symbol)).collect();
        let version = if self.has(self.version.0) { (self.version.1)() } else { None };
        if !absent.is_empty() {
            return Err(CudaError::MissingSymbols {
                library: self.described(version),
                symbols: self.with_versions(&absent),
                advice: self.advice,
            });
        }
        let Some(version) = version.filter(|version| *version >= Cuda::LEAST) else {
            let library = self.described(version);
            return Err(CudaError::TooOld { library, least: Cuda::LEAST, advice: self.advice });
        };
        Ok(*self.found.get_or_init(|| version))
    }

    /// [`Needed::require`], and the driver takes what the library makes.
    ///
    /// # Errors
    /// As those of `require`; or the library is of a newer major version than the driver.
    pub(crate) fn suits(&self) -> Result<Cuda, CudaError> {
        let (version, known) = (self.require()?, DRIVER.require()?);
        if version.0 <= known.0 {
            return Ok(version);
        }
        let library = self.described(Some(version));
        Err(CudaError::TooNew { library, known, major: known.0 })
    }

    /// `/usr/lib/libnvrtc.so.12 (CUDA 12.4)`
    pub(crate) fn described(&self, version: Option<Cuda>) -> String {
        let file = self.file().unwrap_or_else(|| self.name.to_owned());
        match version {
            Some(version) => format!("{file} (CUDA {version})"),
            None => file,
        }
    }

    /// Where the loaded library lies.
    pub(crate) fn file(&self) -> Option<String> {
        let maps = std::fs::read_to_string("/proc/self/maps").ok()?;
        let begin = format!("{}.so", self.name);
        let mut paths = maps.lines().filter_map(|line| Some(&line[line.find('/')?..]));
        let found = paths.find(|path| {
            path.rsplit('/').next().is_some_and(|file| file.starts_with(&begin))
        });
        found.map(str::to_owned)
    }

    fn has(&self, symbol: &str) -> bool {
        // SAFETY: the library is there, so it is loaded; the function is looked up and not called.
        unsafe { (self.loaded)().get::<unsafe extern "C" fn()>(symbol.as_bytes()) }.is_ok()
    }

    /// `cuMemMap and cuTensorMapEncodeTiled (from CUDA 12.0 on)`
    fn with_versions(&self, symbols: &[&str]) -> String {
        /// A file that is another library lacks all of it.
        const NAMED_MAX: usize = 4;
        let named = symbols.iter().take(NAMED_MAX).map(|symbol| match self.since(symbol) {
            Cuda::EARLIEST => (*symbol).to_owned(),
            since => format!("{symbol} (there from CUDA {since} on)"),
        });
        let mut text = named.collect::<Vec<_>>().join(", ");
        if symbols.len() > NAMED_MAX {
            text += &format!(" and {} more", symbols.len() - NAMED_MAX);
        }
        text
    }

    /// What the loader says of a file that is there; none where no file is.
    fn why_not(&self) -> Option<String> {
        let stem = self.name.strip_prefix("lib").unwrap_or(self.name);
        cudarc::get_lib_name_candidates(stem).into_iter().find_map(|file| {
            // SAFETY: these libraries' constructors have no preconditions.
            let error = unsafe { libloading::Library::new(&file) }.err()?;
            let said = error.source().map_or_else(|| error.to_string(), ToString::to_string);
            let absent = said.starts_with(&file) && said.contains("No such file");
            (!absent).then_some(said)
        })
    }
}

const DRIVER_SYMBOLS: [&str; 65] = [
    "cuCtxGetStreamPriorityRange",
    "cuCtxSetCurrent",
    "cuCtxSynchronize",
    "cuDeviceGet",
    "cuDeviceGetAttribute",
    "cuDeviceGetCount",
    "cuDeviceGetName",
    "cuDeviceGetP2PAttribute",
    "cuDeviceGetUuid_v2",
    "cuDevicePrimaryCtxRelease_v2",
    "cuDevicePrimaryCtxRetain",
    "cuDeviceTotalMem_v2",
    "cuDriverGetVersion",
    "cuEventCreate",
    "cuEventDestroy_v2",
    "cuEventElapsedTime",
    "cuEventQuery",
    "cuEventRecord",
    "cuEventSynchronize",
    "cuFuncSetAttribute",
    "cuGetErrorString",
    "cuGraphDestroy",
    "cuGraphExecDestroy",
    "cuGraphGetNodes",
    "cuGraphInstantiateWithFlags",
    "cuGraphLaunch",
    "cuInit",
    "cuLaunchKernel",
    "cuMemAddressFree",
    "cuMemAddressReserve",
    "cuMemAlloc_v2",
    "cuMemCreate",
    "cuMemExportToShareableHandle",
    "cuMemFreeHost",
    "cuMemFree_v2",
    "cuMemGetAllocationGranularity",
    "cuMemGetInfo_v2",
    "cuMemHostAlloc",
    "cuMemHostGetDevicePointer_v2",
    "cuMemHostRegister_v2",
    "cuMemHostUnregister",
    "cuMemImportFromShareableHandle",
    "cuMemMap",
    "cuMemRelease",
    "cuMemSetAccess",
    "cuMemUnmap",
    "cuMemcpyAsync",
    "cuMemcpyDtoDAsync_v2",
    "cuMemcpyDtoHAsync_v2",
    "cuMemcpyDtoH_v2",
    "cuMemcpyHtoDAsync_v2",
    "cuMemcpyHtoD_v2",
    "cuMemsetD8Async",
    "cuModuleGetFunction",
    "cuModuleLoadData",
    "cuModuleUnload",
    "cuStreamBeginCapture_v2",
    "cuStreamCreate",
    "cuStreamCreateWithPriority",
    "cuStreamDestroy_v2",
    "cuStreamEndCapture",
    "cuStreamQuery",
    "cuStreamSynchronize",
    "cuStreamWaitEvent",
    "cuTensorMapEncodeTiled",
];

const NVRTC_SYMBOLS: [&str; 8] = [
    "nvrtcCompileProgram",
    "nvrtcCreateProgram",
    "nvrtcDestroyProgram",
    "nvrtcGetCUBIN",
    "nvrtcGetCUBINSize",
    "nvrtcGetProgramLog",
    "nvrtcGetProgramLogSize",
    "nvrtcVersion",
];

const CUBLASLT_SYMBOLS: [&str; 14] = [
    "cublasLtCreate",
    "cublasLtDestroy",
    "cublasLtGetVersion",
    "cublasLtMatmul",
    "cublasLtMatmulAlgoGetHeuristic",
    "cublasLtMatmulDescCreate",
    "cublasLtMatmulDescDestroy",
    "cublasLtMatmulDescSetAttribute",
    "cublasLtMatmulPreferenceCreate",
    "cublasLtMatmulPreferenceDestroy",
    "cublasLtMatmulPreferenceSetAttribute",
    "cublasLtMatrixLayoutCreate",
    "cublasLtMatrixLayoutDestroy",
    "cublasLtMatrixLayoutSetAttribute",
];

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn versions_are_read_as_each_library_writes_them() {
        assert_eq!(Cuda::of_driver(12040), Cuda(12, 4));
        assert_eq!(Cuda::of_driver(13000), Cuda(13, 0));
        assert_eq!(Cuda::of_cublas(120_402), Cuda(12, 4));
        assert_eq!(Cuda::of_cublas(130_201), Cuda(13, 2));
        assert_eq!(Cuda::of_cublas(11_1103), Cuda(11, 11));
    }

    #[test]
    fn a_list_has_each_function_once_and_in_order() {
        for needed in [&DRIVER, &NVRTC, &CUBLASLT] {
            assert!(needed.symbols.is_sorted_by(|a, b| a < b), "{}", needed.name);
            assert!(needed.symbols.contains(&needed.version.0));
            let known = |name: &&'static str| needed.symbols.contains(name);
            assert!(needed.newer.iter().all(|(name, _)| known(name)));
        }
    }
}
