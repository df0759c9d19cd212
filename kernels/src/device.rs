//! The device a rank computes on, and moving bytes to and from it.

use std::sync::atomic::Ordering;
use std::time::Duration;

use crate::buffer::{ArenaPlan, Buffer, DType, Element};
use crate::cpu::CpuDevice;
use crate::cpu::isa::Isa;
use crate::cuda::device::CudaDevice;
use crate::cuda::event::Event;
use crate::cuda::fault::Fault;
use crate::cuda::staging::Post;
use crate::error::{KernelError, LayerError};
use crate::kept::Kept;
use crate::marks::StepPhase;
use crate::pages::Pages;
use crate::stored::Stored;
use crate::traffic::{Traffic, TrafficCounts};

/// Where the ops run.
///
/// Ops enqueue work and return nothing; the CPU does it at once. A wrong shape, kind or overlap of
/// buffers is a programmer's error and panics. The exclusive borrow is what makes views of the
/// arena sound: nobody can hold a slice of it while an op writes.
#[derive(Debug)]
#[non_exhaustive]
pub enum Device {
    Cpu(CpuDevice),
    Cuda(CudaDevice),
}

/// A copy on its way to the host.
#[derive(Debug)]
pub struct Posted {
    dtype: DType,
    len: usize,
    at: At,
}

#[derive(Debug)]
enum At {
    Host(Vec<u8>),
    Gpu(Post),
}

impl Device {
    /// A CPU device with `threads` compute threads (1: the caller's own, no pool) and an arena of
    /// `arena_bytes` of address space, zero and without memory until first touched.
    pub fn cpu(threads: usize, arena_bytes: usize) -> Result<Device, KernelError> {
        Ok(Device::Cpu(CpuDevice::new(threads, arena_bytes, Isa::detect())?))
    }

    /// GPU `ordinal` with an arena of `arena_bytes` of its memory, zero.
    pub fn cuda(ordinal: usize, arena_bytes: usize) -> Result<Device, KernelError> {
        Ok(Device::Cuda(CudaDevice::new(ordinal, arena_bytes)?))
    }

    /// Gives the device an arena of `arena_bytes`, zero, in place of the one that it has: what a
    /// plan needs is known once the device was asked for its workspaces.
    pub fn reserve(&mut self, arena_bytes: usize) -> Result<(), KernelError> {
        let mut plan = ArenaPlan::new();
        plan.alloc(DType::U8, arena_bytes);
        self.reserve_planned(&plan, 0)
    }

    /// [`Device::reserve`] of all that `plan` has, also of what lies on the host: kernels of a GPU
    /// work on that over the bus, and a processor's memory is there in any case. A GPU must have
    /// room for `beside` bytes more, which follow.
    ///
    /// # Errors
    /// There is too little memory of either kind, or the system does not let it be pinned.
    pub fn reserve_planned(
        &mut self,
        plan: &ArenaPlan,
        beside: usize,
    ) -> Result<(), KernelError> {
        match self {
            Device::Cpu(cpu) => {
                assert_eq!(plan.shared_bytes(), 0, "a processor's peers read none of its memory");
                assert_eq!(plan.growing_bytes(), 0, "a processor's memory comes by itself");
                cpu.reserve(plan.bytes(), plan.host_bytes())
            }
            Device::Cuda(cuda) => Ok(cuda.reserve_planned(plan, beside)?),
        }
    }

    /// Memory, all bits zero, for pieces of the part of the arena that grows: see
    /// [`ArenaPlan::alloc_growing`].
    ///
    /// # Errors
    /// There is too little.
    pub fn commit(&mut self, pieces: &[Buffer]) -> Result<(), KernelError> {
        match self {
            Device::Cpu(_) => {
                assert!(pieces.is_empty(), "a processor's memory comes by itself");
                Ok(())
            }
            Device::Cuda(cuda) => Ok(cuda.commit(pieces)?),
        }
    }

    /// Bytes of a GPU's memory that are this device's share, as far as it is told; none for
    /// processors.
    pub fn memory_share(&self) -> Option<usize> {
        match self {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(cuda.gpu().memory().ok()?.1 / crate::cuda::shares()),
        }
    }

    /// Waits for everything enqueued. On a GPU, where ops cannot fail at once, tells of the first
    /// failure since the device was made: what was read before this says nothing.
    pub fn finish(&self) -> Result<(), &LayerError> {
        self.await_marks();
        self.counts().waits.fetch_add(1, Ordering::Relaxed);
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(cuda) => cuda.finish(),
        }
    }

    /// The first failure that is known of, without waiting: after a read it covers all that the
    /// read waited for.
    pub fn check(&self) -> Result<(), &LayerError> {
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(cuda) => cuda.check(),
        }
    }

    /// From now on a wait of the host for a GPU that takes longer than `longest` is given up, and
    /// the device has failed.
    pub fn limit_waits(&mut self, longest: Duration) {
        if let Device::Cuda(cuda) = self {
            cuda.limit_waits(longest);
        }
    }

    /// Breaks a GPU, for tests of what happens then.
    pub fn inject(&mut self, fault: Fault) {
        if let Device::Cuda(cuda) = self {
            cuda.inject(fault);
        }
    }

    /// Ops that are enqueued from now on wait for mark `at` of what is under way beside them, see
    /// [`CudaDevice::set_mark`]. They belong to `phase` until here; the wait is communication that
    /// nothing hides. Processors do one thing after the other.
    pub fn await_mark(&mut self, at: usize, phase: StepPhase) {
        let set = self.as_cuda().is_some_and(|cuda| cuda.is_mark_set(at));
        if !set {
            return;
        }
        self.phase(phase);
        if let Device::Cuda(cuda) = self {
            cuda.await_mark(at);
        }
        self.phase(StepPhase::Communication);
    }

    /// The same with every mark.
    pub fn await_marks(&self) {
        if let Device::Cuda(cuda) = self {
            cuda.await_marks();
        }
    }

    /// A lane for so many flights of tokens at once, see [`Device::flight_begins`]. While one is
    /// awaited, products of experts leave `free` multiprocessors to it. Processors need none.
    ///
    /// # Errors
    /// The device failed.
    pub fn open_token_lane(&mut self, flights: usize, free: usize) -> Result<(), KernelError> {
        match self {
            Device::Cpu(_) => Ok(()),
            Device::Cuda(cuda) => Ok(cuda.open_token_lane(flights, free)?),
        }
    }

    /// What is enqueued from here to [`Device::flight_ends`] is a flight of tokens: on a GPU with a
    /// lane for them it begins behind all that was enqueued so far, and is beside what is enqueued
    /// later, until [`Device::await_flight`]. Nothing in between touches what it reads and writes.
    /// Processors do one thing after the other.
    pub fn flight_begins(&mut self) {
        if let Device::Cuda(cuda) = self {
            cuda.flight_begins();
        }
    }

    /// That was flight `at`.
    pub fn flight_ends(&mut self, at: usize) {
        if let Device::Cuda(cuda) = self {
            cuda.flight_ends(at);
        }
    }

    /// Ops that are enqueued from now on wait for flight `at`, if it departed.
    pub fn await_flight(&mut self, at: usize) {
        if let Device::Cuda(cuda) = self {
            cuda.await_flight(at);
        }
    }

    /// Whether what is enqueued now is a flight, beside the ops.
    pub fn is_in_flight(&self) -> bool {
        self.as_cuda().is_some_and(CudaDevice::is_in_flight)
    }

    /// How often the host has waited for a GPU so far, see [`crate::cuda::Gpu::waits`]; a CPU is
    /// never waited for.
    pub fn waits(&self) -> u64 {
        match self {
            Device::Cpu(_) => 0,
            Device::Cuda(cuda) => cuda.gpu().waits(),
        }
    }

    /// The CPU device inside, for views of its memory without a copy.
    pub fn as_cpu(&self) -> Option<&CpuDevice> {
        match self {
            Device::Cpu(cpu) => Some(cpu),
            Device::Cuda(_) => None,
        }
    }

    /// See [`Device::as_cpu`].
    pub fn as_cpu_mut(&mut self) -> Option<&mut CpuDevice> {
        match self {
            Device::Cpu(cpu) => Some(cpu),
            Device::Cuda(_) => None,
        }
    }

    /// The GPU inside, for what passes between GPUs.
    pub fn as_cuda(&self) -> Option<&CudaDevice> {
        match self {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(cuda),
        }
    }

    /// See [`Device::as_cuda`].
    pub fn as_cuda_mut(&mut self) -> Option<&mut CudaDevice> {
        match self {
            Device::Cpu(_) => None,
            Device::Cuda(cuda) => Some(cuda),
        }
    }

    /// What the host has done with this device's memory so far.
    pub fn traffic(&self) -> Traffic {
        self.counts().now()
    }

    /// Tables, kernels and times that are kept on this device.
    pub(crate) fn kept(&mut self) -> &mut Kept {
        match self {
            Device::Cpu(cpu) => &mut cpu.kept,
            Device::Cuda(cuda) => &mut cuda.cache.kept,
        }
    }

    pub(crate) fn counts(&self) -> &TrafficCounts {
        match self {
            Device::Cpu(cpu) => &cpu.traffic,
            Device::Cuda(cuda) => &cuda.traffic,
        }
    }

    /// Copies host elements into `buffer`, which has as many.
    pub fn write<E: Element>(&mut self, buffer: Buffer, from: &[E]) {
        self.counts().writes.fetch_add(1, Ordering::Relaxed);
        match self {
            Device::Cpu(cpu) => cpu.slice_mut(buffer).copy_from_slice(from),
            Device::Cuda(cuda) => cuda.write(buffer, from),
        }
    }

    /// Waits for everything enqueued, then copies `buffer` into host elements, as many.
    pub fn read<E: Element>(&self, buffer: Buffer, into: &mut [E]) {
        self.await_marks();
        self.read_ops(buffer, into);
    }

    /// [`Device::read`] of what ops alone have written: what is under way beside them is not waited
    /// for.
    pub fn read_ops<E: Element>(&self, buffer: Buffer, into: &mut [E]) {
        self.counts().reads.fetch_add(1, Ordering::Relaxed);
        match self {
            Device::Cpu(cpu) => into.copy_from_slice(cpu.slice(buffer)),
            Device::Cuda(cuda) => cuda.read(buffer, into),
        }
    }

    /// A point behind all ops so far; of a processor, which is always there, there is none.
    pub fn point(&self) -> Option<Event> {
        self.as_cuda().and_then(CudaDevice::event)
    }

    /// Waits until the device has come to a point.
    pub fn reach(&self, point: &Event) {
        self.counts().waits.fetch_add(1, Ordering::Relaxed);
        if let Device::Cuda(cuda) = self {
            cuda.reach(point);
        }
    }

    /// Enqueues a copy of `buffer` to the host, which [`Device::fetch`] gives. It is of what stands
    /// there behind all that was enqueued so far, whatever is enqueued later.
    pub fn post(&mut self, buffer: Buffer) -> Posted {
        self.counts().reads.fetch_add(1, Ordering::Relaxed);
        match self {
            Device::Cpu(cpu) => {
                let bytes = cpu.slice::<u8>(buffer.reinterpret(DType::U8)).to_vec();
                Posted { dtype: buffer.dtype(), len: buffer.len(), at: At::Host(bytes) }
            }
            Device::Cuda(cuda) => {
                let at = At::Gpu(cuda.post(buffer));
                Posted { dtype: buffer.dtype(), len: buffer.len(), at }
            }
        }
    }

    /// Waits for what was posted, and for no more. After a failure all is 0.
    pub fn fetch<E: Element + Default>(&mut self, posted: Posted) -> Vec<E> {
        assert_eq!(posted.dtype, E::DTYPE, "{posted:?}");
        let bytes = match (posted.at, self) {
            (At::Host(bytes), _) => bytes,
            (At::Gpu(post), Device::Cuda(cuda)) => cuda.fetch(post),
            (At::Gpu(_), Device::Cpu(_)) => panic!("posted by another device"),
        };
        let mut values = vec![E::default(); posted.len];
        let len = bytes.len().min(size_of_val(&values[..]));
        // SAFETY: every pattern of bytes is an `Element`, and no more are written than there are.
        unsafe { values.as_mut_ptr().cast::<u8>().copy_from(bytes.as_ptr(), len) };
        values
    }

    /// [`Device::read`] into a new vector.
    pub fn read_vec<E: Element + Default>(&self, buffer: Buffer) -> Vec<E> {
        let mut values = vec![E::default(); buffer.len()];
        self.read(buffer, &mut values);
        values
    }

    /// Copies the bytes of `from` to `to`: same kind, same length, no overlap.
    pub fn copy(&mut self, from: Buffer, to: Buffer) {
        assert_eq!(from.dtype(), to.dtype(), "a copy keeps the kind of its elements");
        match self {
            Device::Cpu(cpu) => cpu.copy(from, to),
            Device::Cuda(cuda) => cuda.copy(from, to),
        }
    }

    /// Sets every bit of `buffer` to zero.
    pub fn fill_zero(&mut self, buffer: Buffer) {
        match self {
            Device::Cpu(cpu) => cpu.fill_zero(buffer),
            Device::Cuda(cuda) => cuda.fill_zero(buffer),
        }
    }

    /// Waits for everything enqueued, then the floats of each of some places come to the host,
    /// where as many bytes wait for them, and `pages` of those leave or stay. From a GPU they come
    /// together, which is faster than one by one.
    pub fn read_all(&self, all: Vec<(Stored, &mut [u8])>, pages: Pages) {
        self.await_marks();
        self.counts().reads.fetch_add(all.len() as u64, Ordering::Relaxed);
        all.iter().for_each(|(place, into)| place.check(into.len()));
        match self {
            Device::Cuda(cuda) => cuda.read_all(all, pages),
            Device::Cpu(cpu) => {
                for (place, into) in all {
                    let parts = place.parts().map(|(of, _)| cpu.slice(of.reinterpret(DType::U8)));
                    let parts: Vec<&[u8]> = parts.collect();
                    place.unpack(&parts.concat(), into);
                    pages.settle(into);
                }
            }
        }
    }

    /// Floats of the host go to each of some places, which do not overlap. To a GPU they go
    /// together, which is faster than one by one.
    pub fn write_all(&mut self, all: &[(Stored, &[u8])]) {
        self.counts().writes.fetch_add(all.len() as u64, Ordering::Relaxed);
        all.iter().for_each(|(place, from)| place.check(from.len()));
        match self {
            Device::Cuda(cuda) => cuda.write_all(all),
            Device::Cpu(cpu) => {
                for (place, from) in all {
                    let mut packed = vec![0; place.packed_bytes(from.len())];
                    place.pack(from, &mut packed);
                    for (part, at) in place.packed(from.len()) {
                        cpu.slice_mut(part.reinterpret(DType::U8)).copy_from_slice(&packed[at]);
                    }
                }
            }
        }
    }
}
