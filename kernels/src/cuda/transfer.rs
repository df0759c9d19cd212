//! Large copies between device and host, through pinned memory that several threads share out.
//!
//! A copy from or to pageable memory goes through one small buffer of the driver's, at a fraction
//! of what the bus carries. Here each of a few threads has two pinned pieces of its own: while one
//! is on the bus, the other is copied from or to where it belongs, and the pages of the next are
//! mapped. Two H200 of one host read 11 GB each at 24 GB/s so, and at 9 with pages that fault.

use super::driver::{Gpu, PinnedBuffer, Stream};
use super::error::CudaError;
use crate::pages::{Pages, copy_past_caches};
use crate::threads::begin;
use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

/// Threads that copy: with eight the bus is the bound.
const LANES: usize = 8;
/// Bytes of a piece: long enough that starting one costs nothing beside it.
const PIECE: usize = 2 << 20;
/// Shorter copies go the driver's way: it takes longer to wake the lanes.
pub(super) const BYTES_MIN: usize = 4 << 20;

/// What the lanes keep from copy to copy.
#[derive(Debug)]
pub(super) struct Transfer {
    gpu: Gpu,
    lanes: Vec<Mutex<Lane>>,
}

/// Two pieces that take turns.
#[derive(Debug)]
struct Lane([Piece; 2]);

#[derive(Debug)]
struct Piece {
    stream: Stream,
    pinned: PinnedBuffer<u8>,
}

impl Transfer {
    pub fn new(gpu: &Gpu) -> Result<Transfer, CudaError> {
        let piece = || -> Result<Piece, CudaError> {
            Ok(Piece { stream: gpu.stream()?, pinned: PinnedBuffer::new(gpu, PIECE)? })
        };
        let lane = |_| Ok(Mutex::new(Lane([piece()?, piece()?])));
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
        pages: Pages,
    ) -> Result<(), CudaError> {
        let mut pieces = Vec::new();
        for (from, into) in all {
            let parts = into.chunks_mut(PIECE).map(Mutex::new);
            pieces.extend((from..).step_by(PIECE).zip(parts));
        }
        self.each(pieces.len(), |lane, next| {
            let mut on_the_bus: Option<&(u64, Mutex<&mut [u8]>)> = None;
            loop {
                let begun = next().map(|at| &pieces[at]);
                let [coming, came] = &mut lane.0;
                if let Some((address, piece)) = begun {
                    // Each piece is taken once, so nobody else waits for it.
                    let mut piece = piece.lock().unwrap_or_else(|broken| broken.into_inner());
                    // SAFETY: within one of the caller's ranges, and waited for below.
                    unsafe { coming.pinned.enqueue_read(&coming.stream, *address, piece.len())? };
                    Pages::come(&mut piece);
                }
                if let Some((_, piece)) = on_the_bus {
                    let mut piece = piece.lock().unwrap_or_else(|broken| broken.into_inner());
                    came.stream.synchronize()?;
                    copy_past_caches(&came.pinned.as_slice()[..piece.len()], &mut piece);
                    pages.settle(&mut piece);
                }
                if begun.is_none() {
                    return Ok(());
                }
                on_the_bus = begun;
                lane.0.swap(0, 1);
            }
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
        self.each(pieces.len(), |lane, next| {
            while let Some((address, piece)) = next().map(|at| pieces[at]) {
                let going = &mut lane.0[0];
                Pages::come_to_read(piece);
                // The bus may still read what this half held before.
                going.stream.synchronize()?;
                copy_past_caches(piece, &mut going.pinned.as_mut_slice()[..piece.len()]);
                // SAFETY: within one of the caller's ranges, and waited for above or below.
                unsafe { going.pinned.enqueue_write(&going.stream, address, piece.len())? };
                lane.0.swap(0, 1);
            }
            lane.0.iter().try_for_each(|half| half.stream.synchronize())
        })
    }

    /// Calls `each` on every lane, with what gives it the next of so many pieces.
    fn each(
        &self,
        pieces: usize,
        each: impl Fn(&mut Lane, &dyn Fn() -> Option<usize>) -> Result<(), CudaError> + Sync,
    ) -> Result<(), CudaError> {
        let next = AtomicUsize::new(0);
        let run = |lane: &Mutex<Lane>| {
            self.gpu.make_current()?;
            let mut lane = lane.lock().unwrap_or_else(|poisoned| poisoned.into_inner());
            let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|at| *at < pieces);
            each(&mut lane, &take)
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
