//! Addresses for the most that may be needed, and memory for what is.
//!
//! ```text
//! Growing::new(gpu, bytes): addresses -> commit(range) -> memory for the pages of it without any
//! ```
//! What is there stays where it is, so neither kernels nor captured graphs notice that it grows.

use std::ops::Range;

use cudarc::driver::{result as cu, sys};

use super::driver::{Arena, Gpu, Stream};
use super::error::{CudaError, Doing};
use super::window::{PIECE, allow, create, granularity};
use crate::buffer::Buffer;

const NOT_EXPORTED: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;

#[derive(Debug)]
pub(super) struct Growing {
    base: sys::CUdeviceptr,
    bytes: usize,
    page: usize,
    /// Which pages have memory.
    pages: Vec<bool>,
    /// Address and bytes of each mapping.
    mapped: Vec<(sys::CUdeviceptr, usize)>,
    gpu: Gpu,
}

impl Growing {
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Growing, CudaError> {
        let page = granularity(gpu, NOT_EXPORTED)?;
        let bytes = bytes.max(1).next_multiple_of(page);
        let mut base = 0;
        // SAFETY: the target is valid for the call; given back when it is dropped.
        unsafe { sys::cuMemAddressReserve(&mut base, bytes, 0, 0, 0) }
            .result()
            .doing(|| format!("reserving {bytes} bytes of addresses"))?;
        let pages = vec![false; bytes / page];
        Ok(Growing { base, bytes, page, pages, mapped: Vec::new(), gpu: gpu.clone() })
    }

    /// The address of `bytes` at `offset`, whether they have memory or not.
    pub fn address(&self, offset: usize, bytes: usize) -> u64 {
        let end = offset + bytes;
        assert!(end <= self.bytes, "{end} is outside of {} bytes of addresses", self.bytes);
        self.base + offset as u64
    }

    /// Memory for a range of bytes, as far as it has none: where it came, and how much. What came
    /// before a failure stays.
    pub fn commit(&mut self, range: Range<usize>) -> Result<Vec<(u64, usize)>, CudaError> {
        let before = self.mapped.len();
        for run in without_memory(&self.pages, self.page, range) {
            let end = run.end * self.page;
            let mut at = run.start * self.page;
            while at < end {
                let bytes = PIECE.min(end - at);
                self.map(at, bytes)?;
                self.pages[at / self.page..(at + bytes) / self.page].fill(true);
                at += bytes;
            }
        }
        Ok(self.mapped[before..].to_vec())
    }

    fn map(&mut self, offset: usize, bytes: usize) -> Result<(), CudaError> {
        let address = self.base + offset as u64;
        let handle = create(&self.gpu, bytes, NOT_EXPORTED)?;
        // SAFETY: a part of the reserved range where nothing is mapped, the memory is as long.
        let mapped = unsafe { sys::cuMemMap(address, bytes, 0, handle, 0) };
        // SAFETY: created above; from here on the mapping alone keeps the memory.
        let _ = unsafe { sys::cuMemRelease(handle) };
        mapped.result().doing(|| format!("mapping {bytes} bytes that an arena grows by"))?;
        self.mapped.push((address, bytes));
        allow(&self.gpu, address, bytes)
    }
}

impl Arena {
    /// Gives it a part that grows, of so many bytes of addresses, without any memory yet.
    pub(super) fn reserve_growing(&mut self, bytes: usize) -> Result<(), CudaError> {
        self.growing = Some(Growing::new(&self.gpu, bytes)?);
        Ok(())
    }

    /// Memory, all bits zero, for `pieces` of the part that grows, as far as they have none.
    pub(super) fn commit(&mut self, stream: &Stream, pieces: &[Buffer]) -> Result<(), CudaError> {
        for piece in pieces {
            let offset = piece.offset_growing().expect("a piece of the part that grows");
            let growing = self.growing.as_mut().expect("an arena with a part that grows");
            for (address, bytes) in growing.commit(offset..offset + piece.bytes())? {
                // SAFETY: mapped just now, for us alone.
                unsafe { cu::memset_d8_async(address, 0, bytes, stream.handle()) }
                    .doing(|| format!("filling {bytes} bytes that an arena has grown by"))?;
            }
        }
        Ok(())
    }
}

/// Runs of pages of `range`, in bytes, that have no memory.
fn without_memory(pages: &[bool], page: usize, range: Range<usize>) -> Vec<Range<usize>> {
    let mut runs: Vec<Range<usize>> = Vec::new();
    if range.is_empty() {
        return runs;
    }
    for at in (range.start / page..range.end.div_ceil(page)).filter(|at| !pages[*at]) {
        match runs.last_mut() {
            Some(run) if run.end == at => run.end += 1,
            _ => runs.push(at..at + 1),
        }
    }
    runs
}

impl Drop for Growing {
    /// Does not wait: the arena has waited for the streams that use it.
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn pages_without_memory_are_found_run_by_run() {
        let mut pages = vec![false; 8];
        let found = |pages: &[bool], range| without_memory(pages, 10, range);
        assert_eq!(found(&pages, 0..80), vec![0..8]);
        assert_eq!(found(&pages, 19..20), vec![1..2]);
        assert_eq!(found(&pages, 19..21), vec![1..3]);
        assert_eq!(found(&pages, 30..30), vec![]);
        pages[2..4].fill(true);
        assert_eq!(found(&pages, 15..55), vec![1..2, 4..6]);
        assert_eq!(found(&pages, 20..40), vec![]);
    }
}
