//! Copies to the host beside the ops, on a stream of their own.
//!
//! ```text
//! ops       .. update n | forward n+1, backward n+1  | hold | update n+1
//! lane        begin '--> conversions, copies .. end --'^
//! ```
//! What is copied must not change before the lane is through: whoever enqueues an op that changes
//! it calls `lane_hold` first. That op then waits on the device, and the host waits for nothing.
//! Host memory takes part once it is registered with the driver, which finds it by its address.

use std::ops::Range;

use cudarc::driver::{result as cu, sys};

use crate::buffer::{Buffer, DType};
use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::error::{CudaError, Doing};
use crate::cuda::event::Event;

/// Bytes of an address range that are registered at once: that holds up the launches of the whole
/// process, and so much of it takes 0.3 ms, or 1.5 at most.
const PIECE: usize = 8 << 20;

/// `len` bytes from `start` in ranges that lie between multiples of [`PIECE`]: the same ones for
/// registering and for copying, since a copy must not reach over two registrations.
fn pieces(start: usize, len: usize) -> impl Iterator<Item = Range<usize>> {
    let end = start + len;
    let mut at = start;
    std::iter::from_fn(move || {
        let next = (at / PIECE + 1) * PIECE;
        let piece = at..next.min(end);
        at = piece.end;
        (!piece.is_empty()).then_some(piece)
    })
}

/// Whether a range lies in more than one of such pieces.
pub(crate) fn crosses_pieces(start: usize, len: usize) -> bool {
    pieces(start, len).nth(1).is_some()
}

/// Host memory that devices copy to without a detour, as long as this is kept.
#[derive(Debug)]
pub struct Registered {
    gpu: Gpu,
    /// Where pieces begin.
    pieces: Vec<usize>,
}

impl Registered {
    /// Registers `len` bytes from `start`, a multiple of the size of a page, piece by piece. Pages
    /// that nobody has touched take much longer.
    ///
    /// # Errors
    /// The driver refuses, for want of memory that it may pin.
    ///
    /// # Safety
    /// The range is mapped, and stays so until this is dropped.
    pub unsafe fn new(gpu: &Gpu, start: *mut u8, len: usize) -> Result<Registered, CudaError> {
        gpu.make_current()?;
        let mut registered = Registered { gpu: gpu.clone(), pieces: Vec::new() };
        for piece in pieces(start.addr(), len) {
            let at = start.with_addr(piece.start);
            // For every context of the process.
            let flags = sys::CU_MEMHOSTREGISTER_PORTABLE;
            // SAFETY: mapped, as the caller promises, and unregistered before it is not.
            unsafe { sys::cuMemHostRegister_v2(at.cast(), piece.len(), flags) }
                .result()
                .doing(|| format!("registering {} bytes of host memory", piece.len()))?;
            registered.pieces.push(piece.start);
        }
        Ok(registered)
    }
}

impl Drop for Registered {
    fn drop(&mut self) {
        // A context that is gone has forgotten them.
        if self.gpu.make_current().is_err() {
            return;
        }
        for piece in &self.pieces {
            let at = std::ptr::without_provenance_mut::<std::ffi::c_void>(*piece);
            // SAFETY: registered by us and not unregistered yet.
            let _ = unsafe { sys::cuMemHostUnregister(at) };
        }
    }
}

/// How far the lane is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    Idle,
    /// What is enqueued now goes to the lane.
    Open,
    /// Under way.
    Closed,
    /// Ops that change what is copied wait for it.
    Held,
}

#[derive(Debug)]
pub(crate) struct Lane {
    /// While it is open, the stream of all ops.
    stream: Stream,
    /// Of the stream of all ops, when the lane began.
    begun: Event,
    /// Of the lane.
    copied: Event,
    /// Of the stream of all ops, around its wait.
    held: [Event; 2],
    state: State,
}

impl Lane {
    fn new(gpu: &Gpu) -> Result<Lane, CudaError> {
        Ok(Lane {
            stream: gpu.stream()?,
            begun: Event::new(gpu)?,
            copied: Event::new(gpu)?,
            held: [Event::new(gpu)?, Event::new(gpu)?],
            state: State::Idle,
        })
    }
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Whoever owns the host memory may give it back next.
        let _ = self.stream.synchronize();
    }
}

impl CudaDevice {
    /// From here to [`CudaDevice::lane_end`] ops are enqueued on the lane, behind all that was
    /// enqueued before.
    pub fn lane_begin(&mut self) {
        if self.lane.is_none() {
            let mut made = None;
            self.attempt(|| {
                made = Some(Lane::new(self.gpu())?);
                Ok(())
            });
            self.lane = made;
        }
        let Some(mut lane) = self.lane.take() else { return };
        assert_eq!(lane.state, State::Idle, "one at a time");
        // Whatever is under way between devices is waited for by the ops, not by the lane alone.
        self.await_marks();
        self.attempt(|| {
            self.stream.record(&lane.begun)?;
            Ok(lane.stream.wait(&lane.begun)?)
        });
        std::mem::swap(&mut self.stream, &mut lane.stream);
        lane.state = State::Open;
        self.lane = Some(lane);
    }

    /// Copies a buffer of bytes into host memory that is registered, in the order of the lane.
    ///
    /// # Safety
    /// Nobody looks at `into`, and it is neither unmapped nor unregistered, until
    /// [`CudaDevice::lane_settle`] has returned or the device was dropped.
    pub unsafe fn lane_read(&mut self, from: Buffer, into: &mut [u8]) {
        assert_eq!((from.dtype(), from.len()), (DType::U8, into.len()), "{from:?}");
        let open = self.lane.as_ref().is_some_and(|lane| lane.state == State::Open);
        self.attempt(|| {
            assert!(open, "a copy of the lane belongs between its begin and its end");
            let (address, start) = (self.arena.address(from), into.as_ptr().addr());
            for piece in pieces(start, into.len()) {
                let at = piece.start - start;
                let to = &mut into[at..at + piece.len()];
                // SAFETY: a buffer of the arena, as long as the target, which the caller keeps.
                unsafe { cu::memcpy_dtoh_async(to, address + at as u64, self.stream.handle()) }
                    .doing(|| format!("copying {} bytes on the lane", piece.len()))?;
            }
            Ok(())
        });
    }

    /// Ops are enqueued on their own stream again.
    pub fn lane_end(&mut self) {
        let Some(mut lane) = self.lane.take() else { return };
        if lane.state == State::Open {
            std::mem::swap(&mut self.stream, &mut lane.stream);
            self.attempt(|| Ok(lane.stream.record(&lane.copied)?));
            lane.state = State::Closed;
        }
        self.lane = Some(lane);
    }

    /// What is enqueued from here on waits until the lane is through.
    pub fn lane_hold(&mut self) {
        let Some(mut lane) = self.lane.take() else { return };
        if lane.state == State::Closed {
            self.attempt(|| {
                self.stream.record(&lane.held[0])?;
                self.stream.wait(&lane.copied)?;
                Ok(self.stream.record(&lane.held[1])?)
            });
            lane.state = State::Held;
        }
        self.lane = Some(lane);
    }

    /// Waits for the lane; the seconds that ops have waited for it. A failure is kept.
    pub fn lane_settle(&mut self) -> f64 {
        let Some(mut lane) = self.lane.take() else { return 0.0 };
        let mut seconds = 0.0;
        if lane.state != State::Idle {
            // Also behind a failure: nobody else knows when the host's memory is its own again.
            let through = lane.stream.synchronize();
            self.attempt(|| {
                through?;
                if lane.state == State::Held {
                    lane.held[1].synchronize()?;
                    seconds = f64::from(lane.held[0].milliseconds_to(&lane.held[1])?) / 1e3;
                }
                Ok(())
            });
            lane.state = State::Idle;
        }
        self.lane = Some(lane);
        seconds
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn no_piece_crosses_a_boundary_and_all_bytes_are_in_one() {
        for (start, len) in [
            (0, 0),
            (4096, 1),
            (4096, 3 * PIECE),
            (PIECE, PIECE),
            (PIECE - 4096, 4097),
            (7 * PIECE + 4096, 2 * PIECE - 4096),
        ] {
            let mut next = start;
            for piece in pieces(start, len) {
                assert_eq!(piece.start, next);
                assert!(!piece.is_empty() && piece.start / PIECE == (piece.end - 1) / PIECE);
                next = piece.end;
            }
            assert_eq!(next, start + len, "{len} bytes from {start}");
            assert_eq!(crosses_pieces(start, len), pieces(start, len).count() > 1);
        }
    }
}
