//! How fast bytes travel: between host and GPU, within a GPU, and from another GPU of the node.
//!
//! Copies go in one stream by the driver's own engines, several behind each other, and are timed by
//! events. The fastest of a few readings counts: what else runs makes a copy slower, never faster.

use crate::cuda::driver::{Arena, Gpu, PinnedBuffer, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::event::Event;
use crate::cuda::window::Window;

/// Of the host: what one copy engine needs to be at its full rate, many times over.
const HOST_BYTES: usize = 32 << 20;
/// Within a GPU: far beyond its caches.
const DEVICE_BYTES: usize = 512 << 20;
/// From another GPU: a copy engine is at its full rate from 64 MiB on.
const PEER_BYTES: usize = 128 << 20;
/// Copies of one reading, and readings.
const COPIES: usize = 8;
const READINGS: usize = 3;
/// Copies within a GPU last at least so long together that a kernel of another process, with which
/// the GPU takes turns of some milliseconds, has its share of them.
const DEVICE_COPIES: usize = 96;

/// 10^9 bytes a second; a byte that is read and written counts once.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct CopyRates {
    pub host_to_device: f64,
    pub device_to_host: f64,
    pub within_device: f64,
}

/// What copies with the host need, made before it is their turn.
#[derive(Debug)]
pub struct Copies {
    stream: Stream,
    arena: Arena,
    pinned: PinnedBuffer<u8>,
    gpu: Gpu,
}

impl Copies {
    /// # Errors
    /// There is no memory, on the GPU or to be pinned.
    pub fn new(gpu: &Gpu) -> Result<Copies, CudaError> {
        Ok(Copies {
            stream: gpu.stream()?,
            arena: Arena::new(gpu, 2 * DEVICE_BYTES)?,
            pinned: PinnedBuffer::new(gpu, HOST_BYTES)?,
            gpu: gpu.clone(),
        })
    }

    /// One after the other.
    ///
    /// # Errors
    /// The GPU failed.
    pub fn rates(&mut self) -> Result<CopyRates, CudaError> {
        let (stream, base) = (&self.stream, self.arena.base);
        let host_to_device = fastest(&self.gpu, stream, COPIES * HOST_BYTES, READINGS, || {
            // SAFETY: the arena is longer, and the stream is drained before this is dropped.
            (0..COPIES).try_for_each(|_| unsafe {
                self.pinned.enqueue_write(stream, base, 0..HOST_BYTES)
            })
        })?;
        let pinned = &mut self.pinned;
        let device_to_host = fastest(&self.gpu, stream, COPIES * HOST_BYTES, READINGS, || {
            // SAFETY: as above.
            (0..COPIES).try_for_each(|_| unsafe {
                pinned.enqueue_read(stream, base, 0..HOST_BYTES)
            })
        })?;
        let bytes = DEVICE_COPIES * DEVICE_BYTES;
        // The one reading is long: the fastest of short ones could fall between two turns of
        // another process.
        let within_device = fastest(&self.gpu, stream, bytes, 1, || {
            // SAFETY: the two halves of the arena.
            (0..DEVICE_COPIES).try_for_each(|_| unsafe {
                stream.copy_at(base, base + DEVICE_BYTES as u64, DEVICE_BYTES)
            })
        })?;
        Ok(CopyRates { host_to_device, device_to_host, within_device })
    }
}

/// Reads of the memory of the GPU `peer` of this process by `gpu`, 10^9 bytes a second. The context
/// of `gpu` is current afterwards.
///
/// # Errors
/// There is no such GPU, the two do not reach each other, or one of them failed.
pub fn peer_read_rate(gpu: &Gpu, peer: usize) -> Result<f64, CudaError> {
    let there = Gpu::open(peer)?;
    let theirs = Window::new(&there, PEER_BYTES)?;
    gpu.make_current()?;
    let seen = Window::open(gpu, theirs.export()?, theirs.bytes())?;
    let own = Arena::new(gpu, PEER_BYTES)?;
    let stream = gpu.stream()?;
    let rate = fastest(gpu, &stream, COPIES * PEER_BYTES, READINGS, || {
        // SAFETY: both are as long, and the stream is drained before they are dropped.
        (0..COPIES).try_for_each(|_| unsafe {
            stream.copy_at(seen.address(), own.base, PEER_BYTES)
        })
    });
    stream.synchronize()?;
    drop(seen);
    there.make_current()?;
    drop(theirs);
    gpu.make_current()?;
    rate
}

/// `bytes` that `enqueue` moves over the time that they take, of the fastest of some readings. A
/// first one is not counted.
fn fastest(
    gpu: &Gpu,
    stream: &Stream,
    bytes: usize,
    readings: usize,
    mut enqueue: impl FnMut() -> Result<(), CudaError>,
) -> Result<f64, CudaError> {
    let [first, last] = [Event::new(gpu)?, Event::new(gpu)?];
    let mut seconds = f64::INFINITY;
    for reading in 0..=readings {
        stream.record(&first)?;
        enqueue()?;
        stream.record(&last)?;
        stream.synchronize()?;
        if reading > 0 {
            seconds = seconds.min(f64::from(first.milliseconds_to(&last)?) / 1e3);
        }
    }
    Ok(bytes as f64 / seconds / 1e9)
}
