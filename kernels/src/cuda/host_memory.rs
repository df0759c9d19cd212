//! Memory of the host that kernels read and write over the bus, as if it were the device's.
//!
//! ```text
//! map (pages of 2 MiB where there are such) -> touch, several threads -> register -> an address
//! ```
//! The driver pins what is registered and gives it an address, which kernels and copies between
//! addresses take like any other. What passes goes at the rate of the bus, some 50 GB/s each way.

use std::ffi::c_void;
use std::sync::Arc;
use std::sync::atomic::{AtomicUsize, Ordering};

use cudarc::driver::sys;
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

use crate::threads;
use crate::cuda::driver::{Arena, Gpu};
use crate::cuda::error::{CudaError, Doing};
use crate::cuda::window::Window;

/// Large pages of x86: as many fewer to pin, and to give back when the process ends.
const LARGE_PAGE: usize = 2 << 20;
const PAGE: usize = 4 << 10;
/// Bytes that a thread touches at once.
const STRETCH: usize = 32 << 20;
/// Threads that touch: zeroing pages is bound by memory with fewer than that.
const THREADS_MAX: usize = 8;

#[derive(Debug)]
pub(crate) struct HostMemory {
    mapping: Mapping,
    /// Of the mapping's first byte, as the device knows it.
    address: u64,
    gpu: Gpu,
}

impl HostMemory {
    /// `bytes`, all bits zero.
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<HostMemory, CudaError> {
        let refused = |why: String| CudaError::HostMemory { bytes, why };
        let mapping = Mapping::new(bytes).map_err(|error| {
            refused(format!("the system does not give it ({error})"))
        })?;
        mapping.touch();
        gpu.make_current()?;
        let (start, len) = (mapping.start.cast::<c_void>(), mapping.bytes);
        let flags = sys::CU_MEMHOSTREGISTER_PORTABLE | sys::CU_MEMHOSTREGISTER_DEVICEMAP;
        // SAFETY: mapped, and unregistered before it is not.
        unsafe { sys::cuMemHostRegister_v2(start, len, flags) }.result().map_err(|error| {
            refused(format!("the driver may not pin it ({error})"))
        })?;
        // From here on it is unregistered when it is dropped.
        let mut memory = HostMemory { mapping, address: 0, gpu: gpu.clone() };
        // SAFETY: the target is valid for the call, the range was just registered.
        unsafe { sys::cuMemHostGetDevicePointer_v2(&mut memory.address, start, 0) }
            .result()
            .doing(|| format!("asking for the address of {bytes} bytes of host memory"))?;
        Ok(memory)
    }

    /// Of `bytes` bytes from `offset` on.
    pub fn address(&self, offset: usize, bytes: usize) -> u64 {
        let inside = offset.checked_add(bytes).is_some_and(|end| end <= self.mapping.bytes);
        assert!(inside, "{bytes} bytes at {offset} of {} on the host", self.mapping.bytes);
        self.address + offset as u64
    }
}

impl Arena {
    /// [`Arena::new`] with `host_bytes` of the host's memory beside it, all bits zero, and
    /// `shared_bytes` of the GPU's that peers may read.
    pub fn in_parts(
        gpu: &Gpu,
        bytes: usize,
        host_bytes: usize,
        shared_bytes: usize,
    ) -> Result<Arena, CudaError> {
        let mut arena = Arena::new(gpu, bytes)?;
        arena.host = (host_bytes > 0).then(|| HostMemory::new(gpu, host_bytes)).transpose()?;
        let shared = (shared_bytes > 0).then(|| Window::shared(gpu, shared_bytes));
        arena.shared = shared.transpose()?.map(Arc::new);
        Ok(arena)
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        // A context that is gone has forgotten it.
        if self.gpu.make_current().is_err() {
            return;
        }
        self.gpu.waited();
        // SAFETY: registered by us, once; the call waits for what uses it.
        let _ = unsafe { sys::cuMemHostUnregister(self.mapping.start.cast()) };
    }
}

/// Anonymous memory of this process, from a multiple of a large page on.
#[derive(Debug)]
struct Mapping {
    start: *mut u8,
    bytes: usize,
    /// What was mapped to find such a start.
    whole: (*mut c_void, usize),
}

// SAFETY: the mapping belongs to this value alone, and memory has no tie to a thread.
unsafe impl Send for Mapping {}
// SAFETY: nobody reads or writes it through a shared reference but `touch`, before it is used.
unsafe impl Sync for Mapping {}

impl Mapping {
    fn new(bytes: usize) -> Result<Mapping, rustix::io::Errno> {
        let bytes = bytes.max(1).next_multiple_of(PAGE);
        let len = bytes.checked_add(LARGE_PAGE).ok_or(rustix::io::Errno::NOMEM)?;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a fresh anonymous mapping touches no memory that exists already.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len, access, MapFlags::PRIVATE)
        }?;
        let skipped = base.addr().next_multiple_of(LARGE_PAGE) - base.addr();
        // SAFETY: less than a large page was skipped, which is what was mapped beyond `bytes`.
        let start = unsafe { base.cast::<u8>().add(skipped) };
        // SAFETY: within the mapping. A system without large pages does as well.
        let _ = unsafe { madvise(start.cast(), bytes, Advice::LinuxHugepage) };
        // SAFETY: as above. What the driver has pinned is no memory of a child process.
        let _ = unsafe { madvise(start.cast(), bytes, Advice::LinuxDontFork) };
        Ok(Mapping { start, bytes, whole: (base, len) })
    }

    /// Writes to each page, so that it is there: several threads, since the system makes it zero.
    fn touch(&self) {
        let next = AtomicUsize::new(0);
        let run = || loop {
            let from = next.fetch_add(STRETCH, Ordering::Relaxed);
            if from >= self.bytes {
                return;
            }
            for at in (from..self.bytes.min(from + STRETCH)).step_by(PAGE) {
                // SAFETY: within the mapping; each stretch is one thread's.
                unsafe { self.start.add(at).write_volatile(0) };
            }
        };
        let here = std::thread::available_parallelism().map_or(1, usize::from);
        let threads = here.min(THREADS_MAX).min(self.bytes.div_ceil(STRETCH));
        std::thread::scope(|scope| {
            (1..threads).for_each(|_| drop(threads::begin(scope, run)));
            run();
        });
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        // SAFETY: mapped by us with this length, and nobody uses it any more.
        let unmapped = unsafe { munmap(self.whole.0, self.whole.1) };
        debug_assert!(unmapped.is_ok(), "unmapping host memory: {unmapped:?}");
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mapped_memory_begins_at_a_large_page_and_is_zero_to_its_end() {
        for bytes in [1, PAGE + 1, 3 * STRETCH + 5] {
            let mapping = Mapping::new(bytes).expect("some memory");
            assert!(mapping.start.addr().is_multiple_of(LARGE_PAGE));
            assert!(mapping.bytes >= bytes && mapping.bytes < bytes + PAGE);
            mapping.touch();
            // SAFETY: mapped, touched, and borrowed by nobody else.
            let all = unsafe { std::slice::from_raw_parts(mapping.start, mapping.bytes) };
            assert!(all.iter().all(|byte| *byte == 0), "{bytes}");
        }
    }

    #[test]
    fn more_than_there_are_addresses_is_refused() {
        assert!(Mapping::new(usize::MAX / 2).is_err());
    }
}
