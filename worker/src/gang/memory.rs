//! Memory that the processes of one worker share: an anonymous file that each of them maps, and
//! what wakes one of them when another has changed it.
//!
//! Who may touch which bytes is decided by words beside them: a pipe's two positions, a slot's
//! state. This module only promises that every access lies within memory that is really there.

use moejob_kernels::threads::begin;
use moejob_protocol::bounds::beginning;
use rustix::event::{EventfdFlags, eventfd};
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::{
    FallocateFlags, MemfdFlags, SealFlags, fallocate, fcntl_add_seals, fcntl_get_seals, fstat,
    ftruncate, memfd_create,
};
use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap, mmap_anonymous, munmap};
use rustix::thread::futex;
use rustix::time::Timespec;
use std::io;
use std::ptr::NonNull;
use std::sync::{Arc, OnceLock};
use std::sync::atomic::{AtomicU32, AtomicU64, AtomicUsize, Ordering};
use std::time::Duration;

/// No file can become shorter under its mappings, which would kill whoever touches them.
const SEALS: SealFlags = SealFlags::SHRINK;

/// Bytes from which on huge pages are asked for. To touch 430 MB for the first time cost 1.4 s of a
/// processor's time in pages of 4 KiB, and 0.2 to 0.7 s in pages of 2 MiB. To map them once more,
/// as a worker does with its engines' slots, another 0.14 s.
const LARGE: usize = 16 << 20;

/// Bytes that the kernel is asked to give or to take at once. While it does, no other thread of the
/// process can map memory, start or end a thread: with 11 GB at once a worker was deaf for 0.8 s.
const PIECE: usize = 32 << 20;

/// A piece of memory, zero at first.
#[derive(Debug)]
pub struct Mapping {
    base: NonNull<u8>,
    len: usize,
    /// None where no other process is to have it.
    file: Option<OwnedFd>,
    /// Ends before the memory does.
    guard: OnceLock<Guard>,
}

/// What something else keeps of a mapping, such as a driver that has pinned its pages.
type Guard = Box<dyn std::fmt::Debug + Send + Sync>;

// SAFETY: the mapping lives as long as the value, and all access goes through atomics and copies
// whose exclusion is the callers' protocol, across threads as across processes.
unsafe impl Send for Mapping {}
// SAFETY: as above.
unsafe impl Sync for Mapping {}

impl Mapping {
    /// Memory of `len` bytes that can be handed to other processes; pages cost nothing before they
    /// are touched.
    ///
    /// # Errors
    /// The system gives no file or no address space.
    pub fn shared(name: &str, len: usize) -> io::Result<Mapping> {
        let file = memfd_create(name, MemfdFlags::CLOEXEC | MemfdFlags::ALLOW_SEALING)?;
        ftruncate(&file, len as u64)?;
        fcntl_add_seals(&file, SEALS)?;
        Mapping::map(file, len)
    }

    /// The memory that another process has made.
    ///
    /// # Errors
    /// It could shrink, or it cannot be mapped.
    pub fn attach(file: OwnedFd) -> io::Result<Mapping> {
        if !fcntl_get_seals(&file)?.contains(SEALS) {
            return Err(io::Error::other("memory that could shrink"));
        }
        let len = usize::try_from(fstat(&file)?.st_size).unwrap_or(0);
        Mapping::map(file, len)
    }

    fn map(file: OwnedFd, len: usize) -> io::Result<Mapping> {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping at an address of the kernel's choice touches no memory of ours.
        let base = unsafe {
            mmap(std::ptr::null_mut(), len.max(1), protection, MapFlags::SHARED, &file, 0)?
        };
        let base: NonNull<u8> = NonNull::new(base.cast()).ok_or(io::ErrorKind::OutOfMemory)?;
        if len >= LARGE {
            // SAFETY: the range is the one just mapped, and the advice changes no byte of it. A
            // system without huge pages says so, and gives small ones.
            let _ = unsafe { madvise(base.as_ptr().cast(), len, Advice::LinuxHugepage) };
        }
        Ok(Mapping { base, len, file: Some(file), guard: OnceLock::new() })
    }

    /// Memory of this process alone. A system that has none left ends it, as any allocation does.
    pub fn private(len: usize) -> Mapping {
        let protection = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: as in `map`.
        let base = unsafe {
            mmap_anonymous(std::ptr::null_mut(), len.max(1), protection, MapFlags::PRIVATE)
        };
        let base = base.ok().and_then(|base| NonNull::new(base.cast()));
        let base = base.unwrap_or_else(|| panic!("no memory for {len} bytes"));
        Mapping { base, len, file: None, guard: OnceLock::new() }
    }

    /// Gives every page its memory now, by `threads` threads, and changes no byte.
    ///
    /// # Errors
    /// The system has no memory for all of it, or is older than Linux 5.14.
    pub fn populate(&self, threads: usize) -> io::Result<()> {
        self.advise(threads, Advice::LinuxPopulateWrite)
    }

    /// Gives the whole file its memory, of which this process maps nothing: whoever is ended
    /// meanwhile has no pages to take apart. Ends early once `over` is true; whether all is there.
    ///
    /// # Errors
    /// The system has no memory for all of it.
    pub fn reserve(&self, over: impl Fn() -> bool) -> io::Result<bool> {
        let Some(file) = &self.file else { return Ok(true) };
        for start in (0..self.len).step_by(PIECE) {
            if over() {
                return Ok(false);
            }
            let len = (self.len - start).min(PIECE) as u64;
            rustix::io::retry_on_intr(|| {
                fallocate(file, FallocateFlags::empty(), start as u64, len)
            })?;
        }
        Ok(true)
    }

    fn advise(&self, threads: usize, advice: Advice) -> io::Result<()> {
        let next = AtomicUsize::new(0);
        let work = || loop {
            let start = next.fetch_add(PIECE, Ordering::Relaxed);
            let Some(left) = self.len.checked_sub(start).filter(|left| *left > 0) else {
                return Ok(());
            };
            // SAFETY: the range lies within the mapping, which outlives the call. The advice
            // changes no byte of it: what of shared memory is not needed here stays in its file.
            unsafe {
                let base = self.base.add(start).as_ptr().cast();
                madvise(base, left.min(PIECE), advice)
            }?;
        };
        std::thread::scope(|scope| {
            let others: Vec<_> = (1..threads).map(|_| begin(scope, work)).collect();
            let first = work();
            let all = others.into_iter().map(|other| other.join().expect("no panic"));
            all.fold(first, |before, this| before.and(this))
        })
    }

    /// Forgets in which pages the bytes lie, and changes none of them: they are found again when
    /// they are touched. A process that ends does this first of all, before it closes what it has
    /// open, and 42 GB in small pages take it seconds, in which its GPU's memory is not free.
    ///
    /// # Errors
    /// Something has pinned the pages.
    pub fn rest(&self, threads: usize) -> io::Result<()> {
        assert!(self.file.is_some(), "memory without a file would lose its bytes");
        self.advise(threads, Advice::LinuxDontNeed)
    }

    /// Keeps what `make` gives for the range until just before it is unmapped; once.
    ///
    /// # Errors
    /// What `make` says.
    pub fn guard<G: std::fmt::Debug + Send + Sync + 'static, E>(
        &self,
        make: impl FnOnce(*mut u8, usize) -> Result<G, E>,
    ) -> Result<(), E> {
        if self.guard.get().is_none() {
            let guard = make(self.base.as_ptr(), self.len)?;
            // Of two threads at once the first has it, and the other's ends here.
            let _ = self.guard.set(Box::new(guard));
        }
        Ok(())
    }

    pub fn is_guarded(&self) -> bool {
        self.guard.get().is_some()
    }

    /// To hand it to another process.
    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.file.as_ref().map(AsFd::as_fd)
    }

    pub fn len(&self) -> usize {
        self.len
    }

    pub fn is_empty(&self) -> bool {
        self.len == 0
    }

    fn check(&self, at: usize, len: usize) {
        let end = at.checked_add(len);
        assert!(end.is_some_and(|end| end <= self.len), "{len} bytes at {at} of {}", self.len);
    }

    pub fn word(&self, at: usize) -> &AtomicU32 {
        self.check(at, 4);
        assert!(at.is_multiple_of(4));
        // SAFETY: within the mapping, aligned since a mapping begins at a page, and every bit
        // pattern is a number.
        unsafe { self.base.add(at).cast::<AtomicU32>().as_ref() }
    }

    pub fn long(&self, at: usize) -> &AtomicU64 {
        self.check(at, 8);
        assert!(at.is_multiple_of(8));
        // SAFETY: as in `word`.
        unsafe { self.base.add(at).cast::<AtomicU64>().as_ref() }
    }

    /// Copies from the memory. The caller's protocol keeps writers away meanwhile.
    pub fn read(&self, at: usize, into: &mut [u8]) {
        self.check(at, into.len());
        // SAFETY: both ranges are whole, and ours is exclusively borrowed, so they do not overlap.
        unsafe {
            self.base.add(at).copy_to_nonoverlapping(NonNull::from(&mut *into).cast(), into.len());
        }
    }

    /// Copies into the memory. The caller's protocol keeps readers and other writers away.
    pub fn write(&self, at: usize, from: &[u8]) {
        self.check(at, from.len());
        // SAFETY: both ranges are whole; a slice of this memory is only given out by `bytes` and
        // `bytes_mut`, whose callers keep writers away.
        unsafe {
            self.base.add(at).copy_from_nonoverlapping(NonNull::from(from).cast(), from.len());
        }
    }

    /// Everything from `at` on.
    ///
    /// # Safety
    /// Nobody writes there as long as the slice lives.
    pub unsafe fn bytes(&self, at: usize) -> &[u8] {
        self.check(at, 0);
        // SAFETY: within the mapping and initialised by the kernel; the caller keeps writers away.
        unsafe { std::slice::from_raw_parts(self.base.add(at).as_ptr(), self.len - at) }
    }

    /// Everything from `at` on.
    ///
    /// # Safety
    /// Nobody else reads or writes there as long as the slice lives.
    #[allow(clippy::mut_from_ref)]
    pub unsafe fn bytes_mut(&self, at: usize) -> &mut [u8] {
        self.check(at, 0);
        // SAFETY: as in `bytes`, and the caller keeps everybody else away.
        unsafe { std::slice::from_raw_parts_mut(self.base.add(at).as_ptr(), self.len - at) }
    }

    /// A short text behind its length; the longest that fits into `room` bytes.
    pub fn write_text(&self, at: usize, room: usize, text: &str) {
        let text = beginning(text, room - 4);
        self.write(at + 4, text.as_bytes());
        self.word(at).store(text.len() as u32, Ordering::Release);
    }

    pub fn read_text(&self, at: usize, room: usize) -> String {
        let len = (self.word(at).load(Ordering::Acquire) as usize).min(room - 4);
        let mut text = vec![0; len];
        self.read(at + 4, &mut text);
        String::from_utf8_lossy(&text).into_owned()
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        drop(self.guard.take());
        for start in (0..self.len.max(1)).step_by(PIECE) {
            // SAFETY: the range is a part of the one that was mapped, and every reference into it
            // has ended with the borrow of this value.
            let _ = unsafe {
                let base = self.base.add(start).as_ptr().cast();
                munmap(base, (self.len.max(1) - start).min(PIECE))
            };
        }
    }
}

/// Wakes a thread, of this or another process, that waits for several pipes at once.
///
/// ```text
/// u32 generation | u32 waiting
/// ```
#[derive(Clone, Debug)]
pub struct Signal {
    memory: Arc<Mapping>,
    at: usize,
}

impl Signal {
    pub fn new(memory: Arc<Mapping>, at: usize) -> Signal {
        Signal { memory, at }
    }

    fn waiting(&self) -> &AtomicU32 {
        self.memory.word(self.at + 4)
    }

    pub fn generation(&self) -> u32 {
        self.memory.word(self.at).load(Ordering::SeqCst)
    }

    pub fn notify(&self) {
        let word = self.memory.word(self.at);
        word.fetch_add(1, Ordering::SeqCst);
        if self.waiting().load(Ordering::SeqCst) > 0 {
            let _ = futex::wake(word, futex::Flags::empty(), u32::MAX >> 1);
        }
    }

    /// Returns once `notify` was called after `generation` gave `seen`.
    pub fn wait(&self, seen: u32) {
        self.waiting().fetch_add(1, Ordering::SeqCst);
        while self.generation() == seen {
            // Whatever ends it, the generation tells whether there is something.
            let _ = futex::wait(self.memory.word(self.at), futex::Flags::empty(), seen, None);
        }
        self.waiting().fetch_sub(1, Ordering::SeqCst);
    }

    /// The same, or after `most`.
    pub fn wait_for(&self, seen: u32, most: Duration) {
        let most = Timespec::try_from(most).unwrap_or(Timespec { tv_sec: 1, tv_nsec: 0 });
        self.waiting().fetch_add(1, Ordering::SeqCst);
        if self.generation() == seen {
            let word = self.memory.word(self.at);
            let _ = futex::wait(word, futex::Flags::empty(), seen, Some(&most));
        }
        self.waiting().fetch_sub(1, Ordering::SeqCst);
    }
}

/// Wakes the tasks of the worker's data thread, which wait in an event queue.
#[derive(Clone, Debug)]
pub struct Bell {
    event: Arc<OwnedFd>,
    memory: Arc<Mapping>,
    /// Of the word that says that somebody listens.
    at: usize,
}

impl Bell {
    /// # Errors
    /// The system gives no event.
    pub fn new(memory: Arc<Mapping>, at: usize) -> io::Result<Bell> {
        let event = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?;
        Ok(Bell::of(event, memory, at))
    }

    /// The bell that another process listens to.
    pub fn of(event: OwnedFd, memory: Arc<Mapping>, at: usize) -> Bell {
        Bell { event: Arc::new(event), memory, at }
    }

    pub fn event(&self) -> BorrowedFd<'_> {
        self.event.as_fd()
    }

    /// From now on the next `ring` is heard. What there is to do is looked for after this.
    pub fn arm(&self) {
        self.memory.word(self.at).store(1, Ordering::SeqCst);
    }

    /// Costs a system call only where somebody waits.
    pub fn ring(&self) {
        if self.memory.word(self.at).swap(0, Ordering::SeqCst) == 1 {
            // A full counter has been rung already.
            let _ = rustix::io::write(&*self.event, &1u64.to_ne_bytes());
        }
    }

    /// Takes all that was rung.
    pub fn take(&self) {
        let _ = rustix::io::read(&*self.event, &mut [0; 8]);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn populated_memory_has_its_bytes() {
        for len in [1, 4096, (5 << 20) + 17] {
            let memory = Mapping::shared("test", len).expect("memory");
            memory.write(len - 1, &[7]);
            memory.populate(3).expect("memory");
            let mut last = [0];
            memory.read(len - 1, &mut last);
            assert_eq!(last, [7], "{len} bytes");
            memory.rest(2).expect("shared memory");
            memory.read(len - 1, &mut last);
            assert_eq!(last, [7], "{len} bytes that rested");
        }
    }

    #[test]
    fn reserved_memory_is_there_and_not_mapped() {
        let memory = Mapping::shared("test", (2 * PIECE) + 17).expect("memory");
        let there = || {
            let stat = fstat(memory.file().expect("a file")).expect("its facts");
            stat.st_blocks as usize * 512
        };
        memory.write(2 * PIECE, &[7]);
        let calls = AtomicUsize::new(0);
        let second = || calls.fetch_add(1, Ordering::Relaxed) > 0;
        assert!(!memory.reserve(second).expect("memory"), "it was over after one piece");
        assert!((PIECE..2 * PIECE).contains(&there()), "{} bytes", there());
        assert!(memory.reserve(|| false).expect("memory"));
        assert!(there() >= memory.len(), "{} bytes", there());
        let mut last = [0];
        memory.read(2 * PIECE, &mut last);
        assert_eq!(last, [7], "what was there stays");
    }
}
