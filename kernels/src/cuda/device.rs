//! A GPU as a [`crate::Device`]: one arena, one stream, and a cache of kernels.

use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError};
use std::time::{Duration, Instant};

use crate::buffer::{ArenaPlan, Buffer, DType, Element};
use crate::cuda::captured::Graphs;
use crate::cuda::comm_lane::CommLane;
use crate::cuda::compile::Compiler;
use crate::cuda::cubins::default_cache_dir;
use crate::cuda::dense_device::DenseState;
use crate::cuda::driver::{Arena, Gpu, Stream};
use crate::cuda::enqueue::KernelCache;
use crate::cuda::error::CudaError;
use crate::cuda::event::Event;
use crate::cuda::fault::Fault;
use crate::cuda::lane::{self, Lane};
use crate::cuda::room::{self, Wanted};
use crate::cuda::staging::{self, Post, Staging};
use crate::cuda::token_lane::TokenLane;
use crate::cuda::transfer::{self, Transfer};
use crate::error::LayerError;
use crate::pages::Pages;
use crate::stored::Stored;
use crate::traffic::TrafficCounts;

/// Asked while the host waits for a device whose work may wait for other devices: nothing on a GPU
/// notices that one of them is gone.
pub trait Watch: std::fmt::Debug + Send + Sync {
    /// Why waiting has no sense any more.
    fn given_up(&self) -> Option<String>;
}

/// Between two looks at a device that is waited for, once it takes longer than `SPIN`.
const PAUSE: Duration = Duration::from_micros(50);
const SPIN: Duration = Duration::from_micros(500);
/// How long memory is asked for again: that of a process that was killed comes back after it.
const MEMORY_MAX: Duration = Duration::from_secs(10);
const MEMORY_AGAIN: Duration = Duration::from_millis(50);

/// The memory and the kernels of one rank on a GPU.
///
/// Ops enqueue and cannot fail at once. The first failure is kept, later ops do nothing, and
/// [`CudaDevice::finish`] tells: results that were read before it say nothing.
#[derive(Debug)]
pub struct CudaDevice {
    /// Dropped before all that they name.
    pub(crate) graphs: Graphs,
    pub(crate) compiler: Compiler,
    pub(crate) stream: Stream,
    pub(crate) arena: Arena,
    pub(crate) cache: Box<KernelCache>,
    pub(crate) dense: DenseState,
    failure: OnceLock<LayerError>,
    transfer: OnceLock<Transfer>,
    staging: Mutex<Staging>,
    pub(crate) lane: Option<Lane>,
    pub(crate) traffic: TrafficCounts,
    watch: Option<Arc<dyn Watch>>,
    /// The longest wait for the stream of all ops.
    wait_max: Duration,
    pub(crate) comm_lane: Option<CommLane>,
    pub(crate) token_lane: Option<TokenLane>,
}

impl CudaDevice {
    /// GPU `ordinal` with an arena of `arena_bytes`, all bits zero, in its memory. Where it is
    /// full it is asked again for some seconds.
    pub fn new(ordinal: usize, arena_bytes: usize) -> Result<CudaDevice, CudaError> {
        let until = Instant::now() + MEMORY_MAX;
        loop {
            match CudaDevice::open(ordinal, arena_bytes) {
                // What its arena lacks was waited for.
                Err(error @ CudaError::Driver { .. })
                    if error.is_room() && Instant::now() < until =>
                {
                    std::thread::sleep(MEMORY_AGAIN);
                }
                made => return made,
            }
        }
    }

    fn open(ordinal: usize, arena_bytes: usize) -> Result<CudaDevice, CudaError> {
        let gpu = Gpu::open(ordinal)?;
        let compiler = Compiler::new(&gpu, default_cache_dir())?;
        let (stream, arena) = (gpu.stream()?, Arena::new(&gpu, 0)?);
        let mut device = CudaDevice {
            graphs: Graphs::default(),
            compiler,
            stream,
            arena,
            cache: Box::default(),
            dense: DenseState::default(),
            failure: OnceLock::new(),
            transfer: OnceLock::new(),
            staging: Mutex::default(),
            lane: None,
            traffic: TrafficCounts::default(),
            watch: None,
            wait_max: Duration::MAX,
            comm_lane: None,
            token_lane: None,
        };
        device.reserve(Wanted { arena: arena_bytes, ..Wanted::default() })?;
        Ok(device)
    }

    /// An arena in place of the one that is there, all bits zero, also what of it lies on the host;
    /// what is planned beside it must have room, too.
    pub(crate) fn reserve(&mut self, wanted: Wanted) -> Result<(), CudaError> {
        self.gpu().make_current()?;
        self.stream.synchronize()?;
        self.forget_captured();
        // The old one goes first: the two might not fit beside each other.
        self.arena = Arena::new(self.gpu(), 0)?;
        let until = Instant::now() + MEMORY_MAX;
        while let Some(lack) = room::lack(self.gpu(), wanted)? {
            if lack.is_for_ever() || Instant::now() >= until {
                return Err(lack.refusal(self.gpu()));
            }
            std::thread::sleep(MEMORY_AGAIN);
        }
        self.arena = loop {
            let (own, host) = (wanted.arena, wanted.host);
            match Arena::in_parts(self.gpu(), own, host, wanted.shared) {
                // Between the two somebody else was faster.
                Err(CudaError::OutOfMemory { .. }) if Instant::now() < until => {
                    std::thread::sleep(MEMORY_AGAIN);
                }
                made => break made?,
            }
        };
        let mut all = ArenaPlan::new();
        let whole = all.alloc(DType::U8, wanted.arena);
        self.arena.fill_bytes(&self.stream, whole, 0)?;
        if wanted.shared > 0 {
            let shared = all.alloc_shared(DType::U8, wanted.shared);
            self.arena.fill_bytes(&self.stream, shared, 0)?;
        }
        self.stream.synchronize()
    }

    /// [`CudaDevice::reserve`] of all that `plan` has, where `beside` bytes of the GPU's memory are
    /// planned for what follows.
    pub(crate) fn reserve_planned(
        &mut self,
        plan: &ArenaPlan,
        beside: usize,
    ) -> Result<(), CudaError> {
        let (arena, host, shared) = (plan.bytes(), plan.host_bytes(), plan.shared_bytes());
        let committed = plan.committed().iter().map(Buffer::bytes).sum();
        self.reserve(Wanted { arena, shared, committed, beside, host })?;
        if plan.growing_bytes() > 0 {
            self.arena.reserve_growing(plan.growing_bytes())?;
            self.arena.commit(&self.stream, plan.committed())?;
            self.stream.synchronize()?;
        }
        Ok(())
    }

    /// Memory, all bits zero, for pieces of the part of the arena that grows.
    pub(crate) fn commit(&mut self, pieces: &[Buffer]) -> Result<(), CudaError> {
        self.gpu().make_current()?;
        self.arena.commit(&self.stream, pieces)
    }

    pub fn gpu(&self) -> &Gpu {
        self.compiler.gpu()
    }

    /// What compiles this device's kernels.
    pub fn compiler(&self) -> &Compiler {
        &self.compiler
    }

    /// The stream of all ops, to record events in.
    pub fn stream(&self) -> &Stream {
        &self.stream
    }

    /// The device address of a buffer of the arena, for libraries that enqueue on the stream. It
    /// is good until the arena is reserved anew.
    pub fn address(&self, buffer: Buffer) -> u64 {
        self.arena.address(buffer)
    }

    /// From now on no wait of the host outlasts what `watch` says.
    pub fn watch(&mut self, watch: Arc<dyn Watch>) {
        self.watch = Some(watch);
    }

    /// From now on a wait for the device that takes longer is given up.
    pub(crate) fn limit_waits(&mut self, longest: Duration) {
        self.wait_max = longest;
    }


    /// Enqueues what breaks the device.
    pub(crate) fn inject(&mut self, fault: Fault) {
        self.attempt_outside("a fault", || Ok(fault.enqueue(&self.compiler, &self.stream)?));
    }

    /// Waits for everything enqueued on the stream of all ops.
    fn settle(&self) -> Result<(), CudaError> {
        self.look_after(|| self.stream.is_idle())?;
        self.stream.synchronize()
    }

    /// Waits until `is_over`, or until waiting has no sense.
    fn look_after(
        &self,
        is_over: impl Fn() -> Result<bool, CudaError>,
    ) -> Result<(), CudaError> {
        let began = Instant::now();
        while !is_over()? {
            let waited = began.elapsed();
            if let Some(why) = self.watch.as_ref().and_then(|watch| watch.given_up()) {
                return Err(CudaError::GivenUp { why });
            }
            if waited > self.wait_max {
                return Err(CudaError::Late { seconds: waited.as_secs_f64() });
            }
            if waited < SPIN {
                std::hint::spin_loop();
            } else {
                std::thread::sleep(PAUSE);
            }
        }
        Ok(())
    }

    /// Waits for everything enqueued; the first failure since the device was made.
    pub fn finish(&self) -> Result<(), &LayerError> {
        self.attempt_outside("a wait", || Ok(self.settle()?));
        self.check()
    }

    /// An event behind all that was enqueued.
    pub(crate) fn event(&self) -> Option<Event> {
        self.event_again(None)
    }

    /// Waits for all that was enqueued.
    pub(crate) fn wait(&self) {
        self.attempt_outside("a wait", || Ok(self.stream.synchronize()?));
    }

    /// The same with an event that nobody needs any more, if there is one.
    pub(crate) fn event_again(&self, spare: Option<Event>) -> Option<Event> {
        let mut made = None;
        self.attempt_outside("a time", || {
            let event = spare.map_or_else(|| Event::new(self.gpu()), Ok)?;
            self.stream.record(&event)?;
            made = Some(event);
            Ok(())
        });
        made
    }

    /// The same in the lane of what passes between devices beside the ops.
    pub(crate) fn event_beside(&self, spare: Option<Event>) -> Option<Event> {
        let mut made = None;
        self.attempt_outside("a time", || {
            let Some(stream) = self.comm_stream() else { return Ok(()) };
            let event = spare.map_or_else(|| Event::new(self.gpu()), Ok)?;
            stream.record(&event)?;
            made = Some(event);
            Ok(())
        });
        made
    }

    /// The first failure that is known of; waits for nothing.
    pub(crate) fn check(&self) -> Result<(), &LayerError> {
        self.failure.get().map_or(Ok(()), Err)
    }

    /// Does nothing after a failure; keeps one. Threads that never saw this GPU enter it here.
    ///
    /// What fails while a graph is captured spoils the capture alone: nothing was to be done yet.
    pub(crate) fn attempt(&self, enqueue: impl FnOnce() -> Result<(), LayerError>) {
        let kept = if self.graphs.open { &self.graphs.spoiled } else { &self.failure };
        if kept.get().is_some() {
            return;
        }
        let entered = self.gpu().make_current().map_err(LayerError::from);
        if let Err(error) = entered.and_then(|()| enqueue()) {
            // Another thread may have been first; one failure is enough.
            let _ = kept.set(error);
        }
    }

    pub(crate) fn write<E: Element>(&self, buffer: Buffer, from: &[E]) {
        self.attempt_outside("bytes of the host", || {
            assert_eq!((buffer.dtype(), buffer.len()), (E::DTYPE, from.len()), "{buffer:?}");
            let bytes = size_of_val(from);
            // SAFETY: an `Element` has no padding; the bytes are borrowed as long as `from` is.
            let bytes = unsafe { std::slice::from_raw_parts(from.as_ptr().cast(), bytes) };
            if bytes.len() <= staging::BYTES_MAX {
                let address = self.arena.address(buffer);
                // SAFETY: the address is that of a buffer of the arena, as long as `from`.
                return Ok(unsafe {
                    let wait = |event: &Event| self.wait_for(event);
                    self.staging().write(self.gpu(), &self.stream, address, bytes, wait)
                }?);
            }
            self.settle()?;
            // As in `read`.
            let crosses = lane::crosses_pieces(bytes.as_ptr().addr(), bytes.len());
            if bytes.len() < transfer::BYTES_MIN && !crosses {
                return Ok(self.arena.write(buffer, from)?);
            }
            // SAFETY: the address is that of a buffer of the arena, as long as `from`.
            let to = Stored::Plain(self.arena.address(buffer));
            Ok(unsafe { self.transfer()?.write_all([(to, bytes)]) }?)
        });
    }

    /// Floats into each of some places, which have room for as many.
    pub(crate) fn write_all(&self, all: &[(Stored, &[u8])]) {
        self.attempt_outside("bytes of the host", || {
            self.settle()?;
            let address = |buffer| self.arena.address(buffer);
            let all = all.iter().map(|(to, from)| (to.map(address), *from));
            // SAFETY: the addresses are those of buffers of the arena, with room for as much.
            Ok(unsafe { self.transfer()?.write_all(all) }?)
        });
    }

    fn staging(&self) -> MutexGuard<'_, Staging> {
        // A piece that was being filled when a thread panicked is nobody's.
        self.staging.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn wait_for(&self, event: &Event) -> Result<(), CudaError> {
        self.look_after(|| event.is_past())?;
        event.synchronize()
    }

    /// Waits until the device has come to an event.
    pub(crate) fn reach(&self, event: &Event) {
        self.attempt_outside("a wait", || Ok(self.wait_for(event)?));
    }

    /// Enqueues a copy of a small buffer to the host.
    pub(crate) fn post(&self, buffer: Buffer) -> Post {
        let mut posted = Post::none();
        self.attempt_outside("a copy to the host", || {
            let address = self.arena.address(buffer);
            // SAFETY: a buffer of the arena.
            posted = unsafe {
                let wait = |event: &Event| self.wait_for(event);
                self.staging().post(self.gpu(), &self.stream, address, buffer.bytes(), wait)
            }?;
            Ok(())
        });
        posted
    }

    /// What was posted, once the device has come so far; nothing after a failure.
    pub(crate) fn fetch(&self, post: Post) -> Vec<u8> {
        let mut bytes = Vec::new();
        self.attempt_outside("a wait", || {
            bytes = self.staging().fetch(post, |event| self.wait_for(event))?;
            Ok(())
        });
        bytes
    }

    /// The lanes of large copies, made when the first is asked for.
    fn transfer(&self) -> Result<&Transfer, CudaError> {
        if self.transfer.get().is_none() {
            // Another thread may have been first; its lanes do as well.
            let _ = self.transfer.set(Transfer::new(self.gpu())?);
        }
        Ok(self.transfer.get().expect("set above"))
    }

    /// After a failure `into` stays as it is.
    pub(crate) fn read<E: Element>(&self, buffer: Buffer, into: &mut [E]) {
        self.attempt_outside("a copy to the host", || {
            self.settle()?;
            let bytes = size_of_val(into);
            // Memory that is registered in two pieces is none to the driver's own copies.
            let crosses = lane::crosses_pieces(into.as_ptr().addr(), bytes);
            if bytes < transfer::BYTES_MIN && !crosses {
                return Ok(self.arena.read_into(buffer, into)?);
            }
            assert_eq!((buffer.dtype(), buffer.len()), (E::DTYPE, into.len()), "{buffer:?}");
            // SAFETY: every pattern of bytes is an `Element`, and the borrow is exclusive.
            let bytes = unsafe { std::slice::from_raw_parts_mut(into.as_mut_ptr().cast(), bytes) };
            let from = Stored::Plain(self.arena.address(buffer));
            // SAFETY: the address is that of a buffer of the arena, as long as `into`.
            Ok(unsafe { self.transfer()?.read_all([(from, bytes)], Pages::Stay) }?)
        });
    }

    /// The floats of each of some places, where as many bytes wait for them.
    pub(crate) fn read_all(&self, all: Vec<(Stored, &mut [u8])>, pages: Pages) {
        self.attempt_outside("a copy to the host", || {
            self.settle()?;
            let address = |buffer| self.arena.address(buffer);
            let all = all.into_iter().map(|(from, into)| (from.map(address), into));
            // SAFETY: the addresses are those of buffers of the arena, which hold as much.
            Ok(unsafe { self.transfer()?.read_all(all, pages) }?)
        });
    }

    pub(crate) fn copy(&self, from: Buffer, to: Buffer) {
        self.attempt(|| Ok(self.arena.copy(&self.stream, from, to)?));
    }

    pub(crate) fn fill_zero(&self, buffer: Buffer) {
        self.attempt(|| Ok(self.arena.fill_bytes(&self.stream, buffer, 0)?));
    }
}
