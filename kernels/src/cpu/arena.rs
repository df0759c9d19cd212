//! One anonymous mapping per device, and views of it that cannot alias.

use std::marker::PhantomData;

use rustix::mm::{MapFlags, ProtFlags, mmap_anonymous, munmap};

use crate::buffer::{ArenaPlan, Buffer, Element};
use crate::error::KernelError;

/// Address space reserved at once; the system commits a page when it is first touched, as zeros.
#[derive(Debug)]
pub(crate) struct Arena {
    base: *mut u8,
    bytes: usize,
    /// Where the part begins that on a GPU lies on the host.
    host_part: usize,
}

// SAFETY: the mapping belongs to this value alone, and memory has no tie to a thread.
unsafe impl Send for Arena {}
// SAFETY: through a shared reference the memory is only read.
unsafe impl Sync for Arena {}

impl Arena {
    pub(crate) fn new(bytes: usize) -> Result<Arena, KernelError> {
        Arena::with_host(bytes, 0)
    }

    /// The same with `host_bytes` of what on a GPU lies on the host.
    pub(crate) fn with_host(bytes: usize, host_bytes: usize) -> Result<Arena, KernelError> {
        let host_part = bytes.next_multiple_of(ArenaPlan::ALIGNMENT);
        let bytes = if host_bytes == 0 { bytes } else { host_part + host_bytes };
        let mapped = bytes.max(1);
        // SAFETY: a fresh anonymous mapping touches no memory that exists already.
        let base = unsafe {
            mmap_anonymous(
                std::ptr::null_mut(),
                mapped,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        };
        let base = base.map_err(|source| KernelError::Arena { bytes, source })?;
        Ok(Arena { base: base.cast(), bytes, host_part })
    }

    pub(crate) fn slice<E: Element>(&self, buffer: Buffer) -> &[E] {
        let at = self.at::<E>(buffer);
        // SAFETY: `at` checked kind, bounds and alignment; the shared borrow of the arena
        // keeps every writer away for as long as the slice lives.
        unsafe { std::slice::from_raw_parts(at, buffer.len()) }
    }

    pub(crate) fn slice_mut<E: Element>(&mut self, buffer: Buffer) -> &mut [E] {
        self.views().write(buffer)
    }

    /// Starts a set of views that live together: many readers, writers overlapping nothing.
    pub(crate) fn views(&mut self) -> Views<'_> {
        Views { arena: self, reads: Vec::new(), writes: Vec::new(), life: PhantomData }
    }

    fn at<E: Element>(&self, buffer: Buffer) -> *mut E {
        assert_eq!(buffer.dtype(), E::DTYPE, "a buffer is seen as what it was planned as");
        let start = match buffer.offset_on_host() {
            Some(offset) => self.host_part + offset,
            None => buffer.offset(),
        };
        let end = start.checked_add(buffer.bytes());
        let inside = end.is_some_and(|end| end <= self.bytes);
        assert!(inside, "{buffer:?} lies outside of an arena of {} bytes", self.bytes);
        assert!(start.is_multiple_of(size_of::<E>()), "{buffer:?} is not aligned");
        // SAFETY: the offset was just checked to lie inside the mapping.
        unsafe { self.base.add(start).cast() }
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        // SAFETY: `base` came from mmap with this length and nobody borrows it any more.
        let unmapped = unsafe { munmap(self.base.cast(), self.bytes.max(1)) };
        debug_assert!(unmapped.is_ok(), "unmapping the arena: {unmapped:?}");
    }
}

/// The views of one op. A view is handed out only if nothing handed out before conflicts with it,
/// so that all of them may live for `'a`, as long as the arena stays exclusively borrowed.
pub(crate) struct Views<'a> {
    arena: *const Arena,
    reads: Vec<Buffer>,
    writes: Vec<Buffer>,
    life: PhantomData<&'a mut Arena>,
}

impl<'a> Views<'a> {
    pub(crate) fn read<E: Element>(&mut self, buffer: Buffer) -> &'a [E] {
        let clash = self.writes.iter().find(|other| other.overlaps(&buffer));
        assert!(clash.is_none(), "input {buffer:?} overlaps output {clash:?}");
        self.reads.push(buffer);
        // SAFETY: the arena outlives 'a and is borrowed by this set alone; `at` checked the
        // bounds, and no view of this set that writes overlaps the range.
        unsafe { std::slice::from_raw_parts((*self.arena).at(buffer), buffer.len()) }
    }

    pub(crate) fn write<E: Element>(&mut self, buffer: Buffer) -> &'a mut [E] {
        let clash = self.writes.iter().chain(&self.reads).find(|other| other.overlaps(&buffer));
        assert!(clash.is_none(), "output {buffer:?} overlaps {clash:?}");
        self.writes.push(buffer);
        // SAFETY: as in `read`, and no view of this set at all overlaps the range.
        unsafe { std::slice::from_raw_parts_mut((*self.arena).at(buffer), buffer.len()) }
    }
}

#[cfg(test)]
mod tests {
    use crate::DType;

    use super::*;

    #[test]
    #[should_panic(expected = "overlaps output")]
    fn an_input_may_not_overlap_an_output() {
        let mut plan = ArenaPlan::new();
        let buffer = plan.alloc(DType::F32, 8);
        let mut arena = Arena::new(plan.bytes()).expect("a page of memory");
        let mut views = arena.views();
        views.write::<f32>(buffer.slice(0, 4));
        views.read::<f32>(buffer.slice(3, 2));
    }

    #[test]
    fn what_a_gpu_has_on_its_host_lies_behind_the_rest() {
        let mut plan = ArenaPlan::new();
        let (near, far) = (plan.alloc(DType::F32, 3), plan.alloc_on_host(DType::F32, 3));
        let arena = Arena::with_host(plan.bytes(), plan.host_bytes());
        let mut arena = arena.expect("a page of memory");
        arena.slice_mut::<f32>(far).fill(2.0);
        arena.slice_mut::<f32>(near).fill(1.0);
        assert_eq!([near, far].map(|of| arena.slice::<f32>(of)[2]), [1.0, 2.0]);
    }

    #[test]
    #[should_panic(expected = "lies outside")]
    fn a_buffer_of_a_larger_plan_is_refused() {
        let mut plan = ArenaPlan::new();
        let buffer = plan.alloc(DType::F32, 8);
        let arena = Arena::new(16).expect("a page of memory");
        arena.slice::<f32>(buffer);
    }
}
