//! Large copies between device and host, through pinned memory that several threads share out.
//!
//! A copy from or to pageable memory goes through one small buffer of the driver's, at a fraction
//! of what the bus carries. Here each of a few threads has a stream and a pinned piece of its own:
//! while one copies its piece to where it belongs, the others' are on the bus.

use super::driver::{Gpu, PinnedBuffer, Stream};
use super::error::CudaError;
use crate::threads::begin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that copy: with eight the bus is the bound.
const LANES: usize = 8;
/// Bytes of a piece: short enough that lanes overlap in copies of some megabytes.
const PIECE: usize = 1 << 20;
/// Shorter copies go the driver's way: it takes longer to wake the lanes.
pub(super) const BYTES_MIN: usize = 4 << 20;

/// What the lanes keep from copy to copy.
#[derive(Debug)]
pub(super) struct Transfer {
    gpu: Gpu,
    lanes: Vec<Mutex<Lane>>,
}

#[derive(Debug)]
struct Lane {
    stream: Stream,
    pinned: PinnedBuffer<u8>,
}

impl Transfer {
    pub fn new(gpu: &Gpu) -> Result<Transfer, CudaError> {
        let lane = |_| Ok(Mutex::new(Lane {
            stream: gpu.stream()?,
            pinned: PinnedBuffer::new(gpu, PIECE)?,
        }));
        let lanes = (0..LANES).map(lane).collect::<Result<_, CudaError>>()?;
        Ok(Transfer { gpu: gpu.clone(), lanes })
    }

    /// Copies bytes from device addresses. What writes them has ended.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// The ranges are allocated on the device.
    pub unsafe fn read_all<'a>(
        &self,
        all: impl IntoIterator<Item = (u64, &'a mut [u8])>,
    ) -> Result<(), CudaError> {
        let mut pieces = Vec::new();
        for (from, into) in all {
            let parts = into.chunks_mut(PIECE).map(Mutex::new);
            pieces.extend((from..).step_by(PIECE).zip(parts));
        }
        self.each(pieces.len(), |lane, at| {
            let (address, piece) = &pieces[at];
            // Each piece is taken once, so nobody else waits for it.
            let mut piece = piece.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let len = piece.len();
            // SAFETY: within one of the caller's ranges.
            unsafe { lane.pinned.read_at(&lane.stream, *address, len)? };
            piece.copy_from_slice(&lane.pinned.as_slice()[..len]);
            Ok(())
        })
    }

    /// Copies bytes to device addresses. What used that memory has ended, and so have the copies
    /// when this returns.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// The ranges are allocated on the device and do not overlap.
    pub unsafe fn write_all(&self, all: &[(u64, &[u8])]) -> Result<(), CudaError> {
        let mut pieces = Vec::new();
        for (to, from) in all {
            pieces.extend((*to..).step_by(PIECE).zip(from.chunks(PIECE)));
        }
        self.each(pieces.len(), |lane, at| {
            let (address, piece) = pieces[at];
            lane.pinned.as_mut_slice()[..piece.len()].copy_from_slice(piece);
            // SAFETY: within one of the caller's ranges.
            unsafe { lane.pinned.write_at(&lane.stream, address, piece.len()) }
        })
    }

    /// Calls `each` with every piece, on whichever lane is free.
    fn each(
        &self,
        pieces: usize,
        each: impl Fn(&mut Lane, usize) -> Result<(), CudaError> + Sync,
    ) -> Result<(), CudaError> {
        let next = AtomicUsize::new(0);
        let run = |lane: &Mutex<Lane>| {
            self.gpu.make_current()?;
            let mut lane = lane.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            loop {
                let at = next.fetch_add(1, Ordering::Relaxed);
                if at >= pieces {
                    return Ok(());
                }
                each(&mut lane, at)?;
            }
        };
        std::thread::scope(|scope| {
            let threads: Vec<_> =
                self.lanes.iter().take(pieces).map(|lane| begin(scope, || run(lane))).collect();
            let ended = threads.into_iter().map(|thread| match thread.join() {
                Ok(ended) => ended,
                Err(panic) => std::panic::resume_unwind(panic),
            });
            ended.collect::<Result<Vec<()>, CudaError>>().map(|_| ())
        })
    }
}
