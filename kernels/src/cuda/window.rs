//! Device memory that other processes of the machine map, too.
//!
//! ```text
//! Window::new(gpu, bytes) -> export() -> a file -> (another process) Window::open(gpu, file, ..)
//! ```
//! Memory lives until its last mapping goes, whoever made it: a peer that dies leaves it valid.
//! `Arena::joined` is an arena at whose end a window lies: what peers store there is a buffer.

use std::ffi::c_void;
use std::ops::Range;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};

use cudarc::driver::sys;

use crate::cuda::driver::{Arena, Gpu};
use crate::cuda::error::{CudaError, Doing};

const POSIX_FILE: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A mapped piece of memory of this or of another GPU.
#[derive(Debug)]
pub struct Window {
    address: sys::CUdeviceptr,
    bytes: usize,
    handle: sys::CUmemGenericAllocationHandle,
    gpu: Gpu,
}

// SAFETY: an address and a handle, which any thread with the context current may use.
unsafe impl Send for Window {}
// SAFETY: as above; both are only read.
unsafe impl Sync for Window {}

impl Window {
    /// At least `bytes` of this GPU's memory, as they come.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Window, CudaError> {
        let bytes = bytes.max(1).next_multiple_of(granularity(gpu, POSIX_FILE)?);
        Window::mapped(gpu, create(gpu, bytes, POSIX_FILE)?, bytes)
    }

    /// The same for memory that is needed in any case: where the driver exports none, its export
    /// fails.
    pub(crate) fn shared(gpu: &Gpu, bytes: usize) -> Result<Window, CudaError> {
        match Window::new(gpu, bytes) {
            Err(error) if !matches!(error, CudaError::OutOfMemory { .. }) => {
                let none = sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
                let bytes = bytes.max(1).next_multiple_of(granularity(gpu, none)?);
                Window::mapped(gpu, create(gpu, bytes, none)?, bytes)
            }
            made => made,
        }
    }

    /// The window of `bytes` that another process exported.
    pub fn open(gpu: &Gpu, file: OwnedFd, bytes: usize) -> Result<Window, CudaError> {
        let mut handle = 0;
        // The number of the file takes the place of a pointer.
        let number = std::ptr::without_provenance_mut::<c_void>(file.as_raw_fd() as usize);
        // SAFETY: the target is valid for the call, and the file is open; released once.
        unsafe { sys::cuMemImportFromShareableHandle(&mut handle, number, POSIX_FILE) }
            .result()
            .doing(|| format!("opening a peer's window of {bytes} bytes"))?;
        Window::mapped(gpu, handle, bytes)
    }

    /// Owns `handle` from here on.
    fn mapped(
        gpu: &Gpu,
        handle: sys::CUmemGenericAllocationHandle,
        bytes: usize,
    ) -> Result<Window, CudaError> {
        let mut window = Window { address: 0, bytes, handle, gpu: gpu.clone() };
        let what = || format!("mapping a window of {bytes} bytes");
        let mut address = 0;
        // SAFETY: the target is valid for the call; given back when the window is dropped.
        unsafe { sys::cuMemAddressReserve(&mut address, bytes, 0, 0, 0) }.result().doing(what)?;
        // SAFETY: the range was just reserved, and the memory is as long.
        let mapped = unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) };
        if let Err(error) = mapped.result().doing(what) {
            // SAFETY: reserved above, nothing is mapped there.
            let _ = unsafe { sys::cuMemAddressFree(address, bytes) };
            return Err(error);
        }
        window.address = address;
        allow(gpu, address, bytes)?;
        Ok(window)
    }

    /// A file by which other processes open it.
    pub fn export(&self) -> Result<OwnedFd, CudaError> {
        let mut file: i32 = -1;
        let target = std::ptr::from_mut(&mut file).cast::<c_void>();
        // SAFETY: the target is as long as this kind of handle and valid for the call.
        unsafe { sys::cuMemExportToShareableHandle(target, self.handle, POSIX_FILE, 0) }
            .result()
            .doing(|| format!("exporting a window of {} bytes", self.bytes))?;
        if file < 0 {
            let source = cudarc::driver::DriverError(sys::CUresult::CUDA_ERROR_UNKNOWN);
            let doing = "exporting a window: the driver gave no file".to_owned();
            return Err(CudaError::Driver { doing, source });
        }
        // SAFETY: the driver has opened it for us, and nobody else owns it.
        Ok(unsafe { OwnedFd::from_raw_fd(file) })
    }

    pub fn address(&self) -> u64 {
        self.address
    }

    /// A whole number of the driver's pages.
    pub fn bytes(&self) -> usize {
        self.bytes
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }
}

impl Drop for Window {
    /// Does not wait: who drops it has drained the streams that use it, or loses the context.
    fn drop(&mut self) {
        // SAFETY: mapped and reserved by us, each undone once; the owner's streams are drained.
        unsafe {
            if self.address != 0 {
                let _ = sys::cuMemUnmap(self.address, self.bytes);
                let _ = sys::cuMemAddressFree(self.address, self.bytes);
            }
            let _ = sys::cuMemRelease(self.handle);
        }
    }
}

/// A range of addresses, and the memory of a GPU that is mapped there.
#[derive(Debug)]
pub(crate) struct Joined {
    pub base: sys::CUdeviceptr,
    pub bytes: usize,
    /// Address and bytes of each mapping.
    mapped: Vec<(sys::CUdeviceptr, usize)>,
    gpu: Gpu,
}

/// Memory is committed in pieces of this: in small ones it takes as long, in one of 60 GiB longer.
const PIECE: usize = 1 << 30;

/// A range of bytes in the pieces in which memory for it is made.
pub(crate) fn pieces(range: Range<usize>) -> impl Iterator<Item = Range<usize>> {
    range.clone().step_by(PIECE).map(move |at| at..range.end.min(at + PIECE))
}

impl Joined {
    /// Addresses without memory.
    pub fn reserve(gpu: &Gpu, bytes: usize) -> Result<Joined, CudaError> {
        let mut base = 0;
        // SAFETY: the target is valid for the call; given back when it is dropped.
        unsafe { sys::cuMemAddressReserve(&mut base, bytes, 0, 0, 0) }
            .result()
            .doing(|| format!("reserving {bytes} bytes of addresses"))?;
        Ok(Joined { base, bytes, mapped: Vec::new(), gpu: gpu.clone() })
    }

    /// Maps `bytes` of `handle`, which the mapping keeps alive, at `offset`, where nothing is.
    fn map(
        &mut self,
        offset: usize,
        handle: sys::CUmemGenericAllocationHandle,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let address = self.base + offset as u64;
        assert!(offset + bytes <= self.bytes, "{offset} and {bytes} of {self:?}");
        // SAFETY: the range was reserved and nothing is mapped there, the memory is as long.
        unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) }
            .result()
            .doing(|| format!("mapping {bytes} bytes of an arena"))?;
        self.mapped.push((address, bytes));
        allow(&self.gpu, address, bytes)
    }

    /// New memory for a range in which nothing is mapped.
    pub fn fill(
        &mut self,
        range: Range<usize>,
        exported: sys::CUmemAllocationHandleType,
    ) -> Result<(), CudaError> {
        let handle = create(&self.gpu, range.len(), exported)?;
        let mapped = self.map(range.start, handle, range.len());
        // SAFETY: created above; from here on the mapping alone keeps the memory.
        let _ = unsafe { sys::cuMemRelease(handle) };
        mapped
    }
}

impl Drop for Joined {
    /// Does not wait, as a window's does not.
    fn drop(&mut self) {
        // SAFETY: reserved and mapped by us, each undone once; the streams are drained.
        unsafe {
            for (address, bytes) in &self.mapped {
                let _ = sys::cuMemUnmap(*address, *bytes);
            }
            let _ = sys::cuMemAddressFree(self.base, self.bytes);
        }
    }
}

impl Arena {
    /// An arena of at least `bytes`, behind which `window` lies: at [`Arena::bytes`] less the
    /// window's. The streams that use it are drained before it is dropped, which does not wait.
    pub fn joined(gpu: &Gpu, bytes: usize, window: &Window) -> Result<Arena, CudaError> {
        let own = bytes.max(1).next_multiple_of(granularity(gpu, POSIX_FILE)?);
        let whole = own + window.bytes;
        let mut joined = Joined::reserve(gpu, whole)?;
        for piece in pieces(0..own) {
            joined.fill(piece, POSIX_FILE)?;
        }
        joined.map(own, window.handle, window.bytes)?;
        let (gpu, base, joined) = (gpu.clone(), joined.base, Some(joined));
        let (host, shared, growing) = (None, None, None);
        Ok(Arena { base, bytes: whole, gpu, joined, host, shared, growing })
    }
}

/// What every piece of memory is a multiple of.
pub(crate) fn granularity(
    gpu: &Gpu,
    exported: sys::CUmemAllocationHandleType,
) -> Result<usize, CudaError> {
    let (property, mut granularity) = (property(gpu, exported), 0);
    let least = sys::CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
    // SAFETY: both pointers are valid for the call.
    unsafe { sys::cuMemGetAllocationGranularity(&mut granularity, &property, least) }
        .result()
        .doing(|| "asking how memory is divided".to_owned())?;
    Ok(granularity.max(1))
}

/// Memory that its caller releases.
fn create(
    gpu: &Gpu,
    bytes: usize,
    exported: sys::CUmemAllocationHandleType,
) -> Result<sys::CUmemGenericAllocationHandle, CudaError> {
    let (property, mut handle) = (property(gpu, exported), 0);
    // SAFETY: both pointers are valid for the call.
    let created = unsafe { sys::cuMemCreate(&mut handle, bytes, &property, 0) };
    if created == sys::CUresult::CUDA_ERROR_OUT_OF_MEMORY {
        let ((free, total), device) = (gpu.memory()?, gpu.name().to_owned());
        let source = cudarc::driver::DriverError(created);
        return Err(CudaError::OutOfMemory { bytes, free, total, device, source });
    }
    created.result().doing(|| format!("creating {bytes} bytes of device memory"))?;
    Ok(handle)
}

/// Lets `gpu` read and write what is mapped there.
fn allow(gpu: &Gpu, address: sys::CUdeviceptr, bytes: usize) -> Result<(), CudaError> {
    let access = sys::CUmemAccessDesc {
        location: location(gpu),
        flags: sys::CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE,
    };
    // SAFETY: the range is mapped, the description valid for the call.
    unsafe { sys::cuMemSetAccess(address, bytes, &access, 1) }
        .result()
        .doing(|| format!("allowing access to {bytes} bytes"))
}

fn location(gpu: &Gpu) -> sys::CUmemLocation {
    let type_ = sys::CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE;
    sys::CUmemLocation { type_, id: gpu.ordinal() }
}

/// Memory of `gpu` that can be `exported` so.
fn property(gpu: &Gpu, exported: sys::CUmemAllocationHandleType) -> sys::CUmemAllocationProp {
    sys::CUmemAllocationProp {
        type_: sys::CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: exported,
        location: location(gpu),
        win32HandleMetaData: std::ptr::null_mut(),
        allocFlags: sys::CUmemAllocationProp_st__bindgen_ty_1 {
            compressionType: 0,
            gpuDirectRDMACapable: 0,
            usage: 0,
            reserved: [0; 4],
        },
    }
}
