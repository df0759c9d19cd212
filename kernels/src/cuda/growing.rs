//! Addresses for the most that may be needed, and memory for what is.
//!
//! ```text
//! Growing::new(gpu, bytes): addresses -> commit(range) -> memory for the pages of it without any
//! ```
//! What is there stays where it is, so neither kernels nor captured graphs notice that it grows.

use std::ops::Range;

use cudarc::driver::{result as cu, sys};

use crate::buffer::Buffer;
use crate::cuda::driver::{Arena, Gpu, Stream};
use crate::cuda::error::{CudaError, Doing};
use crate::cuda::window::{Joined, granularity, pieces};

const NOT_EXPORTED: sys::CUmemAllocationHandleType =
    sys::CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;

#[derive(Debug)]
pub(crate) struct Growing {
    place: Joined,
    page: usize,
    /// Which pages have memory.
    pages: Vec<bool>,
}

impl Growing {
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Growing, CudaError> {
        let page = granularity(gpu, NOT_EXPORTED)?;
        let place = Joined::reserve(gpu, bytes.max(1).next_multiple_of(page))?;
        let pages = vec![false; place.bytes / page];
        Ok(Growing { place, page, pages })
    }

    /// The address of `bytes` at `offset`, whether they have memory or not.
    pub fn address(&self, offset: usize, bytes: usize) -> u64 {
        let end = offset + bytes;
        let all = self.place.bytes;
        assert!(end <= all, "{end} is outside of {all} bytes of addresses");
        self.place.base + offset as u64
    }

    /// Memory, all bits zero, for a range of bytes as far as it has none. What came before a
    /// failure stays.
    fn commit(&mut self, stream: &Stream, range: Range<usize>) -> Result<(), CudaError> {
        let page = self.page;
        for run in without_memory(&self.pages, page, range) {
            for piece in pieces(run.start * page..run.end * page) {
                let (address, bytes) = (self.address(piece.start, piece.len()), piece.len());
                self.place.fill(piece.clone(), NOT_EXPORTED)?;
                self.pages[piece.start / page..piece.end / page].fill(true);
                // SAFETY: mapped just now, for us alone.
                unsafe { cu::memset_d8_async(address, 0, bytes, stream.handle()) }
                    .doing(|| format!("filling {bytes} bytes that an arena has grown by"))?;
            }
        }
        Ok(())
    }
}

impl Arena {
    /// Gives it a part that grows, of so many bytes of addresses, without any memory yet.
    pub(crate) fn reserve_growing(&mut self, bytes: usize) -> Result<(), CudaError> {
        self.growing = Some(Growing::new(&self.gpu, bytes)?);
        Ok(())
    }

    /// Memory, all bits zero, for `pieces` of the part that grows, as far as they have none.
    pub(crate) fn commit(&mut self, stream: &Stream, pieces: &[Buffer]) -> Result<(), CudaError> {
        for piece in pieces {
            let offset = piece.offset_growing().expect("a piece of the part that grows");
            let growing = self.growing.as_mut().expect("an arena with a part that grows");
            growing.commit(stream, offset..offset + piece.bytes())?;
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
