//! The driver API as the rest of the crate sees it: owned handles, one context a device.

use std::ffi::{CString, c_void};
use std::marker::PhantomData;
use std::ops::Range;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cudarc::driver::{result as cu, sys};

use crate::buffer::{Buffer, Element};
use crate::cuda::error::{CudaError, Doing};
use crate::cuda::event::Event;
use crate::cuda::given::{Said, check_name, shares};
use crate::cuda::growing::Growing;
use crate::cuda::host_memory::HostMemory;
use crate::cuda::libraries::DRIVER;
use crate::cuda::window::{Joined, Window};

/// As the driver counts it.
pub(crate) fn device(ordinal: usize) -> Result<sys::CUdevice, cudarc::driver::DriverError> {
    cu::device::get(i32::try_from(ordinal / shares()).unwrap_or(i32::MAX))
}

/// One GPU and its primary context. Cheap to clone.
#[derive(Clone, Debug)]
pub struct Gpu {
    inner: Arc<GpuInner>,
}

#[derive(Debug)]
struct GpuInner {
    ordinal: i32,
    device: sys::CUdevice,
    context: sys::CUcontext,
    name: String,
    uuid: [u8; 16],
    capability: (i32, i32),
    multiprocessors: u32,
    /// Calls that may have waited, see [`Gpu::waits`]
    waits: AtomicU64,
}

// SAFETY: a primary context may be used from any thread that makes it current.
unsafe impl Send for GpuInner {}
// SAFETY: as above; the handles are only read after construction.
unsafe impl Sync for GpuInner {}

impl Drop for GpuInner {
    fn drop(&mut self) {
        // SAFETY: retained once in `Gpu::open`; nothing that uses it outlives the last clone.
        let _ = unsafe { cu::primary_ctx::release(self.device) };
    }
}

pub(crate) fn require_driver() -> Result<(), CudaError> {
    DRIVER.require()?;
    cu::init().doing(|| "initializing the CUDA driver".to_owned())
}

impl Gpu {
    /// How many GPUs the driver shows.
    pub fn count() -> Result<usize, CudaError> {
        require_driver()?;
        let count = cu::device::get_count().doing(|| "counting GPUs".to_owned())?;
        Ok(usize::try_from(count).unwrap_or(0) * shares())
    }

    /// Retains the primary context of GPU `ordinal` and makes it current on this thread.
    pub fn open(ordinal: usize) -> Result<Gpu, CudaError> {
        let (said, shown) = (Said::here(), Gpu::count()?);
        said.check()?;
        if ordinal >= shown {
            return Err(CudaError::NoGpu { ordinal, shown, said: said.words() });
        }
        let what = || format!("opening GPU {ordinal}");
        let device = device(ordinal).doing(what)?;
        let ordinal = i32::try_from(ordinal / shares()).unwrap_or(i32::MAX);
        let name = cu::device::get_name(device).doing(what)?;
        check_name(&name)?;
        let uuid = cu::device::get_uuid(device).doing(what)?.bytes.map(|byte| byte as u8);
        use sys::CUdevice_attribute_enum as Attribute;
        let attribute = |attribute| {
            // SAFETY: `device` is a valid device of this process.
            unsafe { cu::device::get_attribute(device, attribute) }.doing(what)
        };
        let major = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MAJOR)?;
        let minor = attribute(Attribute::CU_DEVICE_ATTRIBUTE_COMPUTE_CAPABILITY_MINOR)?;
        let count = attribute(Attribute::CU_DEVICE_ATTRIBUTE_MULTIPROCESSOR_COUNT)?;
        // SAFETY: `device` is valid; released when the last clone is dropped.
        let context = unsafe { cu::primary_ctx::retain(device) }.doing(what)?;
        let inner = GpuInner {
            ordinal,
            device,
            context,
            name,
            uuid,
            capability: (major, minor),
            multiprocessors: u32::try_from(count).unwrap_or(1),
            waits: AtomicU64::new(0),
        };
        let gpu = Gpu { inner: Arc::new(inner) };
        gpu.make_current()?;
        Ok(gpu)
    }

    /// Every thread that launches or copies calls this once.
    pub fn make_current(&self) -> Result<(), CudaError> {
        // SAFETY: the context lives as long as `self`.
        unsafe { cu::ctx::set_current(self.inner.context) }
            .doing(|| format!("entering GPU {}", self.inner.ordinal))
    }

    pub fn name(&self) -> &str {
        &self.inner.name
    }

    /// Its number among the GPUs that the driver shows.
    pub(crate) fn ordinal(&self) -> i32 {
        self.inner.ordinal
    }

    /// What names it to every process and to NVML.
    pub fn uuid(&self) -> [u8; 16] {
        self.inner.uuid
    }

    /// Compute capability: major, minor.
    pub fn capability(&self) -> (i32, i32) {
        self.inner.capability
    }

    pub fn multiprocessors(&self) -> u32 {
        self.inner.multiprocessors
    }

    /// Free and total bytes of device memory.
    pub fn memory(&self) -> Result<(usize, usize), CudaError> {
        cu::mem_get_info().doing(|| format!("asking GPU {} for its memory", self.inner.ordinal))
    }

    /// How often the host has waited for the device so far, or called what may wait for running
    /// kernels (copies of the host's, allocations that end, modules that load). No step adds to it
    /// between its first op and the one read of its numbers.
    pub fn waits(&self) -> u64 {
        self.inner.waits.load(Ordering::Relaxed)
    }

    pub(crate) fn waited(&self) {
        self.inner.waits.fetch_add(1, Ordering::Relaxed);
    }

    /// Waits for everything enqueued on the device.
    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.waited();
        cu::ctx::synchronize().doing(|| format!("waiting for GPU {}", self.inner.ordinal))
    }

    pub fn stream(&self) -> Result<Stream, CudaError> {
        let handle = cu::stream::create(cu::stream::StreamKind::NonBlocking)
            .doing(|| "creating a stream".to_owned())?;
        Ok(Stream { handle, gpu: self.clone() })
    }

    /// A stream whose blocks start before those that wait in other streams. What runs is not
    /// stopped for them.
    pub fn urgent_stream(&self) -> Result<Stream, CudaError> {
        let what = || "creating a stream".to_owned();
        let (mut least, mut greatest) = (0, 0);
        let mut handle = std::ptr::null_mut();
        let flags = sys::CUstream_flags_enum::CU_STREAM_NON_BLOCKING as u32;
        // SAFETY: the targets are valid for the calls; a context is current, as for every stream.
        unsafe {
            sys::cuCtxGetStreamPriorityRange(&mut least, &mut greatest).result().doing(what)?;
            sys::cuStreamCreateWithPriority(&mut handle, flags, greatest).result().doing(what)?;
        }
        Ok(Stream { handle, gpu: self.clone() })
    }
}

/// Work in order. Streams run beside each other.
#[derive(Debug)]
pub struct Stream {
    handle: sys::CUstream,
    gpu: Gpu,
}

// SAFETY: a stream may be used from any thread with its context current.
unsafe impl Send for Stream {}
// SAFETY: as above; the driver takes calls on one stream from several threads.
unsafe impl Sync for Stream {}

impl Stream {
    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub(crate) fn handle(&self) -> sys::CUstream {
        self.handle
    }

    /// The driver's handle, for libraries that enqueue on this stream.
    pub fn raw(&self) -> *mut c_void {
        self.handle.cast()
    }

    /// Copies `bytes` from one device address to another.
    ///
    /// # Safety
    /// Both ranges are mapped and share no byte.
    pub(crate) unsafe fn copy_at(&self, from: u64, to: u64, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { cu::memcpy_dtod_async(to, from, bytes, self.handle) }
            .doing(|| format!("copying {bytes} bytes of device memory"))
    }

    /// Sets `bytes` bytes from the device address `to` on.
    ///
    /// # Safety
    /// The range is mapped.
    pub(crate) unsafe fn fill_at(&self, to: u64, byte: u8, bytes: usize) -> Result<(), CudaError> {
        // SAFETY: the caller's promise.
        unsafe { cu::memset_d8_async(to, byte, bytes, self.handle) }
            .doing(|| format!("filling {bytes} bytes of device memory"))
    }

    /// Whether everything enqueued is done. Does not wait.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        // SAFETY: the stream lives as long as `self`.
        match unsafe { sys::cuStreamQuery(self.handle) } {
            sys::CUresult::CUDA_ERROR_NOT_READY => Ok(false),
            status => status.result().map(|()| true).doing(|| "asking a stream".to_owned()),
        }
    }

    pub fn synchronize(&self) -> Result<(), CudaError> {
        self.gpu.waited();
        // SAFETY: the stream lives as long as `self`.
        unsafe { cu::stream::synchronize(self.handle) }.doing(|| "waiting for a stream".to_owned())
    }

    pub fn record(&self, event: &Event) -> Result<(), CudaError> {
        // SAFETY: both handles are valid.
        unsafe { cu::event::record(event.handle, self.handle) }
            .doing(|| "recording an event".to_owned())
    }

    /// What is enqueued later on this stream waits for `event`.
    pub fn wait(&self, event: &Event) -> Result<(), CudaError> {
        let flags = sys::CUevent_wait_flags::CU_EVENT_WAIT_DEFAULT;
        // SAFETY: both handles are valid.
        unsafe { cu::stream::wait_event(self.handle, event.handle, flags) }
            .doing(|| "waiting for an event".to_owned())
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        // SAFETY: created by us; the driver finishes its work before freeing it.
        let _ = unsafe { cu::stream::destroy(self.handle) };
    }
}

/// One allocation of device memory, laid out beforehand by [`crate::ArenaPlan`].
#[derive(Debug)]
pub struct Arena {
    pub(crate) base: sys::CUdeviceptr,
    pub(crate) bytes: usize,
    pub(crate) gpu: Gpu,
    /// None: allocated in one piece.
    pub(crate) joined: Option<Joined>,
    /// What of the plan lies on the host.
    pub(crate) host: Option<HostMemory>,
    /// What of the plan peers may read.
    pub(crate) shared: Option<Arc<Window>>,
    /// What of it has memory only in part.
    pub(crate) growing: Option<Growing>,
}

impl Arena {
    pub fn new(gpu: &Gpu, bytes: usize) -> Result<Arena, CudaError> {
        // SAFETY: a plain allocation, freed once.
        let base = unsafe { cu::malloc_sync(bytes.max(1)) };
        let base = match base {
            Ok(base) => base,
            Err(source) => {
                let (free, total) = gpu.memory()?;
                let device = gpu.name().to_owned();
                return Err(CudaError::OutOfMemory { bytes, free, total, device, source });
            }
        };
        let (joined, host, shared, growing) = (None, None, None, None);
        Ok(Arena { base, bytes, gpu: gpu.clone(), joined, host, shared, growing })
    }

    /// What of it peers may read.
    pub(crate) fn shared(&self) -> Option<&Arc<Window>> {
        self.shared.as_ref()
    }

    pub fn gpu(&self) -> &Gpu {
        &self.gpu
    }

    pub fn bytes(&self) -> usize {
        self.bytes
    }

    /// The address of `buffer` as the device knows it.
    pub fn address(&self, buffer: Buffer) -> u64 {
        if let Some(offset) = buffer.offset_on_host() {
            let host = self.host.as_ref().expect("an arena with memory of the host");
            return host.address(offset, buffer.bytes());
        }
        if let Some(offset) = buffer.offset_shared() {
            let shared = self.shared.as_ref().expect("an arena with memory that peers read");
            let end = offset + buffer.bytes();
            assert!(end <= shared.bytes(), "{buffer:?} ends outside {shared:?}");
            return shared.address() + offset as u64;
        }
        if let Some(offset) = buffer.offset_growing() {
            let growing = self.growing.as_ref().expect("an arena with a part that grows");
            return growing.address(offset, buffer.bytes());
        }
        let end = buffer.offset() + buffer.bytes();
        assert!(end <= self.bytes, "{buffer:?} ends outside an arena of {} bytes", self.bytes);
        self.base + buffer.offset() as u64
    }

    /// Copies host elements into `buffer`, which has as many. Waits.
    pub fn write<E: Element>(&self, buffer: Buffer, from: &[E]) -> Result<(), CudaError> {
        assert_eq!((buffer.dtype(), buffer.len()), (E::DTYPE, from.len()), "{buffer:?}");
        self.gpu.waited();
        // SAFETY: the range was checked, and the source is valid for the time of the call.
        unsafe { cu::memcpy_htod_sync(self.address(buffer), from) }
            .doing(|| format!("copying to {buffer:?}"))?;
        // The call returns once the source was read. Our streams do not wait for the default one,
        // so what they enqueue next could overtake the rest of the way.
        // SAFETY: null is the default stream of the current context.
        unsafe { cu::stream::synchronize(std::ptr::null_mut()) }
            .doing(|| format!("waiting for a copy to {buffer:?}"))
    }

    /// Waits for the device, then copies `buffer` to the host.
    pub fn read<E: Element + Default>(&self, buffer: Buffer) -> Result<Vec<E>, CudaError> {
        let mut into = vec![E::default(); buffer.len()];
        self.gpu.synchronize()?;
        self.read_into(buffer, &mut into)?;
        Ok(into)
    }

    /// Copies `buffer` into as many host elements. Waits for the copy alone.
    pub fn read_into<E: Element>(&self, buffer: Buffer, into: &mut [E]) -> Result<(), CudaError> {
        assert_eq!((buffer.dtype(), buffer.len()), (E::DTYPE, into.len()), "{buffer:?}");
        self.gpu.waited();
        // SAFETY: the range was checked, and the target is valid for the time of the call.
        unsafe { cu::memcpy_dtoh_sync(into, self.address(buffer)) }
            .doing(|| format!("copying from {buffer:?}"))
    }

    /// Copies the bytes of `from` to `to`, in the order of `stream`.
    pub fn copy(&self, stream: &Stream, from: Buffer, to: Buffer) -> Result<(), CudaError> {
        assert!(from.bytes() == to.bytes() && !from.overlaps(&to), "{from:?} {to:?}");
        let (source, target) = (self.address(from), self.address(to));
        let what = || format!("copying {from:?} to {to:?}");
        if from.offset_on_host().or(to.offset_on_host()).is_some() {
            // SAFETY: both ranges were checked, and share no byte; the driver finds out by the
            // addresses which of them is the host's.
            return unsafe { sys::cuMemcpyAsync(target, source, from.bytes(), stream.handle()) }
                .result()
                .doing(what);
        }
        // SAFETY: both ranges were checked, and share no byte.
        unsafe { cu::memcpy_dtod_async(target, source, from.bytes(), stream.handle()) }.doing(what)
    }

    /// Sets every byte of `buffer`, in the order of `stream`.
    pub fn fill_bytes(&self, stream: &Stream, buffer: Buffer, byte: u8) -> Result<(), CudaError> {
        // SAFETY: the range was checked.
        unsafe { cu::memset_d8_async(self.address(buffer), byte, buffer.bytes(), stream.handle()) }
            .doing(|| format!("filling {buffer:?}"))
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        if self.joined.is_some() {
            return;
        }
        self.gpu.waited();
        // SAFETY: allocated by us, freed once; the call waits for work that uses it.
        let _ = unsafe { cu::free_sync(self.base) };
    }
}

/// Host memory that the device copies to and from without a detour.
#[derive(Debug)]
pub struct PinnedBuffer<E: Element> {
    start: *mut E,
    len: usize,
    gpu: Gpu,
    _element: PhantomData<E>,
}

// SAFETY: owns its memory like a Vec.
unsafe impl<E: Element> Send for PinnedBuffer<E> {}

impl<E: Element> PinnedBuffer<E> {
    /// `len` elements, all bits zero.
    pub fn new(gpu: &Gpu, len: usize) -> Result<PinnedBuffer<E>, CudaError> {
        let bytes = (len * size_of::<E>()).max(1);
        // SAFETY: a plain allocation, freed once.
        let start = unsafe { cu::malloc_host(bytes, 0) }
            .doing(|| format!("pinning {bytes} bytes of host memory"))?;
        // SAFETY: `start` is valid for `bytes`, and zero is a value of every `Element`.
        unsafe { start.cast::<u8>().write_bytes(0, bytes) };
        Ok(PinnedBuffer { start: start.cast(), len, gpu: gpu.clone(), _element: PhantomData })
    }

    pub fn as_slice(&self) -> &[E] {
        // SAFETY: valid for `len` initialized elements, borrowed with `self`.
        unsafe { std::slice::from_raw_parts(self.start, self.len) }
    }

    pub fn as_mut_slice(&mut self) -> &mut [E] {
        // SAFETY: as above, and the borrow is exclusive.
        unsafe { std::slice::from_raw_parts_mut(self.start, self.len) }
    }

    /// Elements.
    pub(crate) fn len(&self) -> usize {
        self.len
    }

    /// The first element, for what the device and the host look at by turns.
    pub(crate) fn start(&self) -> *mut E {
        self.start
    }

    /// Copies `buffer` here, in the order of `stream`, and waits for the copy.
    pub fn read_from(
        &mut self,
        stream: &Stream,
        arena: &Arena,
        buffer: Buffer,
    ) -> Result<(), CudaError> {
        assert_eq!((buffer.dtype(), buffer.len()), (E::DTYPE, self.len), "{buffer:?}");
        // SAFETY: a buffer of the arena, as long as this.
        unsafe { self.read_at(stream, arena.address(buffer), self.len) }
    }

    /// Copies the first `len` elements from the device address `from`, and waits.
    ///
    /// # Safety
    /// As many are allocated there.
    pub(crate) unsafe fn read_at(
        &mut self,
        stream: &Stream,
        from: u64,
        len: usize,
    ) -> Result<(), CudaError> {
        // SAFETY: the caller's range, and the stream is waited for before the borrow ends.
        unsafe { self.enqueue_read(stream, from, 0..len)? };
        stream.synchronize()
    }

    /// Enqueues a copy of the elements `at` from the device address `from`.
    ///
    /// # Safety
    /// As many are allocated there, and this is neither used nor dropped before the copy is done.
    pub(crate) unsafe fn enqueue_read(
        &mut self,
        stream: &Stream,
        from: u64,
        at: Range<usize>,
    ) -> Result<(), CudaError> {
        let len = at.len();
        let into = &mut self.as_mut_slice()[at];
        // SAFETY: the caller's promise.
        unsafe { cu::memcpy_dtoh_async(into, from, stream.handle()) }
            .doing(|| format!("copying {len} elements from {from:#x}"))
    }

    /// Enqueues a copy of the elements `at` to the device address `to`.
    ///
    /// # Safety
    /// As many are allocated there, and this is not written to nor dropped before the copy is done.
    pub(crate) unsafe fn enqueue_write(
        &self,
        stream: &Stream,
        to: u64,
        at: Range<usize>,
    ) -> Result<(), CudaError> {
        let len = at.len();
        let from = &self.as_slice()[at];
        // SAFETY: the caller's promise.
        unsafe { cu::memcpy_htod_async(to, from, stream.handle()) }
            .doing(|| format!("copying {len} elements to {to:#x}"))
    }
}

impl<E: Element> Drop for PinnedBuffer<E> {
    fn drop(&mut self) {
        self.gpu.waited();
        // SAFETY: allocated by us, freed once.
        let _ = unsafe { cu::free_host(self.start.cast()) };
    }
}

/// A kernel of a loaded module.
#[derive(Clone, Debug)]
pub struct Function {
    handle: sys::CUfunction,
    name: String,
    _module: Arc<LoadedModule>,
}

// SAFETY: a function handle may be launched from any thread with its context current.
unsafe impl Send for Function {}
// SAFETY: as above; the handle is only read.
unsafe impl Sync for Function {}

#[derive(Debug)]
pub(crate) struct LoadedModule {
    handle: sys::CUmodule,
    _gpu: Gpu,
}

// SAFETY: a module handle may be used from any thread with its context current.
unsafe impl Send for LoadedModule {}
// SAFETY: as above; the handle is only read.
unsafe impl Sync for LoadedModule {}

impl LoadedModule {
    pub(crate) fn new(gpu: &Gpu, name: &str, cubin: &[u8]) -> Result<Arc<Self>, CudaError> {
        gpu.waited();
        // SAFETY: `cubin` is a whole image, as NVRTC made it or the checked cache kept it.
        let handle = unsafe { cu::module::load_data(cubin.as_ptr().cast()) }
            .doing(|| format!("loading the kernels of {name}"))?;
        Ok(Arc::new(LoadedModule { handle, _gpu: gpu.clone() }))
    }

    pub(crate) fn function(
        self: &Arc<Self>,
        label: &str,
        name: &str,
    ) -> Result<Function, CudaError> {
        let entry = CString::new(name).unwrap_or_default();
        // SAFETY: the module is loaded.
        let handle = unsafe { cu::module::get_function(self.handle, entry) }
            .doing(|| format!("finding the kernel {name} in {label}"))?;
        Ok(Function { handle, name: format!("{label}:{name}"), _module: self.clone() })
    }
}

impl Drop for LoadedModule {
    fn drop(&mut self) {
        // SAFETY: loaded by us; no function of it is alive.
        let _ = unsafe { cu::module::unload(self.handle) };
    }
}

/// Grid, block and dynamic shared memory of a launch.
#[derive(Clone, Copy, Debug)]
pub struct Launch {
    pub grid: [u32; 3],
    pub block: [u32; 3],
    pub shared_bytes: u32,
}

impl Launch {
    pub fn new(blocks: usize, threads: u32) -> Launch {
        let blocks = u32::try_from(blocks).unwrap_or(u32::MAX);
        Launch { grid: [blocks, 1, 1], block: [threads, 1, 1], shared_bytes: 0 }
    }
}

impl Function {
    pub fn name(&self) -> &str {
        &self.name
    }

    /// Raises the limit of dynamic shared memory above the default 48 KiB.
    pub(crate) fn allow_shared(&self, bytes: u32) -> Result<(), CudaError> {
        use sys::CUfunction_attribute_enum::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES as MAX;
        // SAFETY: the handle is valid.
        unsafe { cu::function::set_function_attribute(self.handle, MAX, bytes as i32) }
            .doing(|| format!("asking for {bytes} bytes of shared memory for {}", self.name))
    }

    /// Enqueues the kernel.
    ///
    /// # Safety
    /// `parameters` point to values of the kernel's parameter types, in order, and every address in
    /// them is good for what the kernel does with it.
    pub(crate) unsafe fn launch(
        &self,
        stream: &Stream,
        launch: Launch,
        parameters: &mut [*mut c_void],
    ) -> Result<(), CudaError> {
        let Launch { grid, block, shared_bytes } = launch;
        // SAFETY: the caller's promise.
        unsafe {
            cu::launch_kernel(
                self.handle,
                grid.into(),
                block.into(),
                shared_bytes,
                stream.handle(),
                parameters,
            )
        }
        .map_err(|source| {
            let kernel = self.name.clone();
            CudaError::Launch { kernel, grid, block, shared_bytes, source }
        })
    }
}

/// Pointers to the parameters of a launch, which are variables of the caller.
macro_rules! parameters {
    ($($value:expr),* $(,)?) => {
        // The compiler refuses so what is gone before the launch.
        &mut [$( (&raw const $value).cast_mut().cast::<std::ffi::c_void>() ),*]
    };
}
pub(crate) use parameters;
