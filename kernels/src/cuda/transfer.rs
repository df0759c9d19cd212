//! Large copies between device and host, through pinned memory that several threads share out.
//!
//! A copy from or to pageable memory goes through one small buffer of the driver's, at a fraction
//! of what the bus carries. Here each of a few threads has two pinned pieces of its own: while one
//! is on the bus, the other is copied from or to where it belongs, and the pages of the next are
//! mapped. Two H200 of one host read 11 GB each at 24 GB/s so, and at 9 with pages that fault.
//! That copy also joins and parts the halves of floats.

use std::sync::Mutex;
use std::sync::atomic::{AtomicUsize, Ordering};

use crate::cuda::driver::{Gpu, PinnedBuffer, Stream};
use crate::cuda::error::CudaError;
use crate::pages::Pages;
use crate::stored::Stored;
use crate::threads::begin;

/// Threads that copy: with eight the bus is the bound.
const LANES: usize = 8;
/// Bytes of a piece: long enough that starting one costs nothing beside it.
const PIECE: usize = 2 << 20;
/// Shorter copies go the driver's way: it takes longer to wake the lanes.
pub(crate) const BYTES_MIN: usize = 4 << 20;

/// What the lanes keep from copy to copy.
#[derive(Debug)]
pub(crate) struct Transfer {
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

/// Where floats lie on the device.
pub(crate) type Place = Stored<u64>;

impl Place {
    /// The places of `bytes` of the host, piece by piece.
    fn pieces(self, bytes: usize) -> impl Iterator<Item = Place> {
        let behind = move |start: usize| match self {
            Stored::Plain(address) => Stored::Plain(address + start as u64),
            halves => halves.map(|address| address + (start / 2) as u64),
        };
        (0..bytes).step_by(PIECE).map(behind)
    }
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

    /// Copies floats from the device. What writes them has ended.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// The places are allocated on the device, for as many bytes of the host.
    pub unsafe fn read_all<'a>(
        &self,
        all: impl IntoIterator<Item = (Place, &'a mut [u8])>,
        pages: Pages,
    ) -> Result<(), CudaError> {
        let mut pieces = Vec::new();
        for (from, into) in all {
            let places = from.pieces(into.len());
            pieces.extend(places.zip(into.chunks_mut(PIECE).map(Mutex::new)));
        }
        self.each(pieces.len(), |lane, next| {
            let mut on_the_bus: Option<&(Place, Mutex<&mut [u8]>)> = None;
            loop {
                let begun = next().map(|at| &pieces[at]);
                let [coming, came] = &mut lane.0;
                if let Some((place, piece)) = begun {
                    // Each piece is taken once, so nobody else waits for it.
                    let mut piece = piece.lock().unwrap_or_else(|broken| broken.into_inner());
                    for (address, bytes) in place.packed(piece.len()) {
                        let Piece { stream, pinned } = &mut *coming;
                        // SAFETY: within one of the caller's places, and waited for below.
                        unsafe { pinned.enqueue_read(stream, address, bytes)? };
                    }
                    Pages::come(&mut piece);
                }
                if let Some((place, piece)) = on_the_bus {
                    let mut piece = piece.lock().unwrap_or_else(|broken| broken.into_inner());
                    came.stream.synchronize()?;
                    let packed = place.packed_bytes(piece.len());
                    place.unpack(&came.pinned.as_slice()[..packed], &mut piece);
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

    /// Copies floats to the device. What used that memory has ended, and so have the copies when
    /// this returns.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// The places are allocated on the device, for as many bytes of the host, and do not overlap.
    pub unsafe fn write_all<'a>(
        &self,
        all: impl IntoIterator<Item = (Place, &'a [u8])>,
    ) -> Result<(), CudaError> {
        let mut pieces = Vec::new();
        for (to, from) in all {
            pieces.extend(to.pieces(from.len()).zip(from.chunks(PIECE)));
        }
        self.each(pieces.len(), |lane, next| {
            while let Some((place, piece)) = next().map(|at| pieces[at]) {
                let Piece { stream, pinned } = &mut lane.0[0];
                Pages::come_to_read(piece);
                // The bus may still read what this half held before.
                stream.synchronize()?;
                let packed = place.packed_bytes(piece.len());
                place.pack(piece, &mut pinned.as_mut_slice()[..packed]);
                for (address, bytes) in place.packed(piece.len()) {
                    // SAFETY: within one of the caller's places, and waited for above or below.
                    unsafe { pinned.enqueue_write(stream, address, bytes)? };
                }
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
