//! Small copies between device and host that nobody waits for, through pinned memory.
//!
//! ```text
//! host bytes -> pinned piece -> (stream) -> device     write: the piece is used again once it left
//! device -> (stream) -> pinned piece -> host bytes     post, then fetch
//! ```
//! They are in the order of the stream of all ops, so the host may run ahead of the device.

use crate::cuda::driver::{Gpu, PinnedBuffer, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::event::Event;

/// Longer copies wait for the device.
pub(crate) const BYTES_MAX: usize = 256 << 10;
/// Pieces that may be on their way to the device at once: two steps of some dozen micro-batches
/// each. Who needs one more waits for the oldest.
const PIECES_MAX: usize = 256;
/// The shortest piece: of a page.
const PIECE_MIN: usize = 4096;

/// Pinned pieces, those on their way in the order in which they left.
#[derive(Debug, Default)]
pub(crate) struct Staging {
    under_way: Vec<Piece>,
    free: Vec<PinnedBuffer<u8>>,
}

/// A pinned piece that the device uses until the event is past.
#[derive(Debug)]
struct Piece {
    event: Event,
    pinned: PinnedBuffer<u8>,
}

/// A copy on its way to the host.
#[derive(Debug)]
pub struct Post(Option<(Piece, usize)>);

impl Staging {
    /// Copies `from`, at most [`BYTES_MAX`], to the device address `to` in the order of `stream`.
    /// Where too many pieces are on their way, `wait` waits for the oldest.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// As many bytes are allocated there.
    pub unsafe fn write(
        &mut self,
        gpu: &Gpu,
        stream: &Stream,
        to: u64,
        from: &[u8],
        wait: impl FnOnce(&Event) -> Result<(), CudaError>,
    ) -> Result<(), CudaError> {
        let mut pinned = self.piece(gpu, from.len(), wait)?;
        pinned.as_mut_slice()[..from.len()].copy_from_slice(from);
        let event = Event::new(gpu)?;
        // SAFETY: the caller's range; the piece is kept until the event is past.
        unsafe { pinned.enqueue_write(stream, to, 0..from.len())? };
        let piece = Piece { event, pinned };
        let recorded = stream.record(&piece.event);
        self.under_way.push(piece);
        recorded
    }

    /// Enqueues the copy of `len` bytes from the device address `from`; `wait` as for a write.
    ///
    /// # Errors
    /// The device failed.
    ///
    /// # Safety
    /// As many bytes are allocated there.
    pub unsafe fn post(
        &mut self,
        gpu: &Gpu,
        stream: &Stream,
        from: u64,
        len: usize,
        wait: impl FnOnce(&Event) -> Result<(), CudaError>,
    ) -> Result<Post, CudaError> {
        let mut pinned = self.piece(gpu, len, wait)?;
        let event = Event::new(gpu)?;
        // SAFETY: the caller's range; the piece is kept until the event is past.
        unsafe { pinned.enqueue_read(stream, from, 0..len)? };
        stream.record(&event)?;
        Ok(Post(Some((Piece { event, pinned }, len))))
    }

    /// The bytes of what was posted, which `wait` has waited for; none after a failure.
    pub fn fetch(
        &mut self,
        post: Post,
        wait: impl FnOnce(&Event) -> Result<(), CudaError>,
    ) -> Result<Vec<u8>, CudaError> {
        let Some((piece, len)) = post.0 else { return Ok(Vec::new()) };
        if let Err(error) = wait(&piece.event) {
            // The device may still write to it, and freeing it would wait for that.
            std::mem::forget(piece);
            return Err(error);
        }
        let bytes = piece.pinned.as_slice()[..len].to_vec();
        self.free.push(piece.pinned);
        Ok(bytes)
    }

    /// A piece of at least `len` bytes that nobody uses.
    fn piece(
        &mut self,
        gpu: &Gpu,
        len: usize,
        wait: impl FnOnce(&Event) -> Result<(), CudaError>,
    ) -> Result<PinnedBuffer<u8>, CudaError> {
        if self.under_way.len() >= PIECES_MAX {
            wait(&self.under_way[0].event)?;
        }
        let mut left = 0;
        while left < self.under_way.len() && self.under_way[left].event.is_past()? {
            left += 1;
        }
        self.free.extend(self.under_way.drain(..left).map(|piece| piece.pinned));
        let fitting = self.free.iter().enumerate().filter(|(_, piece)| piece.len() >= len);
        let least = fitting.min_by_key(|(_, piece)| piece.len()).map(|(at, _)| at);
        match least {
            Some(at) => Ok(self.free.swap_remove(at)),
            None => PinnedBuffer::new(gpu, len.next_power_of_two().max(PIECE_MIN)),
        }
    }
}

impl Post {
    /// Of a device that has failed.
    pub fn none() -> Post {
        Post(None)
    }
}
