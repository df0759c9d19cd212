//! Threads that share the jobs of one op.
//!
//! A step is some thousand ops of a few dozen microseconds, so threads wait for the next one
//! spinning, and sleep only when none has come for a while. The caller computes as well and
//! never waits for a thread that has not begun: on a busy machine, where the others may not run
//! for milliseconds, it does the work alone.
//!
//! ```text
//! state: rounds so far | open | threads inside
//! ```
//! A thread enters a round by counting itself into the state while the round is open; the caller
//! closes the round when no job is left and waits until nobody is inside.

use std::any::Any;
use std::cell::UnsafeCell;
use std::panic::{AssertUnwindSafe, catch_unwind, resume_unwind};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::sync::atomic::{AtomicBool, AtomicPtr, AtomicU64, AtomicUsize, Ordering};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

/// How long a thread spins for the next round, or for the others, before it lets others run.
const SPIN: Duration = Duration::from_micros(100);

/// Looks at the state between two looks at the clock.
const LOOKS: u32 = 64;

const OPEN: u64 = 1 << 16;
const INSIDE: u64 = OPEN - 1;
const ROUND: u64 = OPEN << 1;

/// What everybody inside of a round calls once; it returns when no job is left.
type Work<'a> = &'a (dyn Fn() + Sync);

#[derive(Debug)]
pub(crate) struct Pool {
    shared: Arc<Shared>,
    threads: Vec<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    state: AtomicU64,
    /// Where the round's `Work` lies, on the stack of the caller.
    work: AtomicPtr<()>,
    /// Whether somebody has the pool: two callers cannot.
    taken: AtomicBool,
    ends: AtomicBool,
    sleepers: AtomicUsize,
    lock: Mutex<()>,
    wake: Condvar,
    panic: Mutex<Option<Box<dyn Any + Send>>>,
}

/// The jobs of a round, each taken once.
struct Jobs<J> {
    cells: Vec<UnsafeCell<Option<J>>>,
    next: AtomicUsize,
}

// SAFETY: `next` gives each cell to one thread alone, which moves the job out.
unsafe impl<J: Send> Sync for Jobs<J> {}

impl<J> Jobs<J> {
    fn take(&self) -> Option<J> {
        let cell = self.cells.get(self.next.fetch_add(1, Ordering::Relaxed))?;
        // SAFETY: no other call has got, or will get, this index.
        unsafe { (*cell.get()).take() }
    }
}

impl Pool {
    /// A pool in which `threads` threads compute, the caller's being one of them; fewer, where the
    /// system gives no more. No bit depends on how many there are.
    pub(crate) fn new(threads: usize) -> Pool {
        let shared = Arc::<Shared>::default();
        let begin = |index: usize| {
            let shared = Arc::clone(&shared);
            let thread = std::thread::Builder::new().name(format!("compute-{index}"));
            thread.spawn(move || shared.serve()).ok()
        };
        let threads = (1..threads).map_while(begin).collect();
        Pool { shared, threads }
    }

    /// Does every job, here and on the pool's threads.
    ///
    /// # Panics
    /// When a job does, with its panic.
    pub(crate) fn run<J: Send>(&self, jobs: Vec<J>, f: impl Fn(J) + Sync) {
        let shared = &*self.shared;
        if shared.taken.swap(true, Ordering::Acquire) {
            return jobs.into_iter().for_each(f);
        }
        let cells = jobs.into_iter().map(|job| UnsafeCell::new(Some(job))).collect();
        let jobs = Jobs { cells, next: AtomicUsize::new(0) };
        let work = || {
            while let Some(job) = jobs.take() {
                f(job);
            }
        };
        let work: Work<'_> = &work;
        let own = shared.round(&work);
        let other = shared.panic.lock().unwrap_or_else(PoisonError::into_inner).take();
        shared.taken.store(false, Ordering::Release);
        if let Some(panic) = own.err().or(other) {
            resume_unwind(panic);
        }
    }
}

impl Drop for Pool {
    fn drop(&mut self) {
        self.shared.ends.store(true, Ordering::SeqCst);
        self.shared.rouse();
        for thread in self.threads.drain(..) {
            // A job's panic was caught and went to the caller; nothing else in there panics.
            let ended = thread.join();
            debug_assert!(ended.is_ok(), "a compute thread panicked outside of a job");
        }
    }
}

impl Shared {
    /// Opens a round, works in it and returns when nobody is inside any more. What comes back is
    /// the caller's own panic.
    fn round(&self, work: &Work<'_>) -> std::thread::Result<()> {
        self.work.store(std::ptr::from_ref(work).cast_mut().cast(), Ordering::Relaxed);
        let closed = self.state.load(Ordering::Relaxed);
        self.state.store((closed & !INSIDE).wrapping_add(ROUND) | OPEN, Ordering::SeqCst);
        if self.sleepers.load(Ordering::SeqCst) > 0 {
            self.rouse();
        }
        let own = catch_unwind(AssertUnwindSafe(work));
        self.state.fetch_and(!OPEN, Ordering::Relaxed);
        let mut spin = Spin::default();
        while self.state.load(Ordering::Acquire) & INSIDE > 0 {
            if spin.is_long() {
                std::thread::yield_now();
            }
        }
        own
    }

    /// Wakes all that sleep; the lock is held so that nobody falls asleep unseen.
    fn rouse(&self) {
        let _asleep = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.wake.notify_all();
    }

    /// The life of a thread.
    fn serve(&self) {
        let mut done = self.state.load(Ordering::Relaxed) & !(OPEN | INSIDE);
        let mut spin = Spin::default();
        while !self.ends.load(Ordering::Relaxed) {
            let state = self.state.load(Ordering::Relaxed);
            if state & OPEN == 0 || state & !(OPEN | INSIDE) == done {
                if spin.is_long() {
                    self.sleep(done);
                    spin = Spin::default();
                }
                continue;
            }
            let (order, failed) = (Ordering::Acquire, Ordering::Relaxed);
            if self.state.compare_exchange_weak(state, state + 1, order, failed).is_err() {
                continue;
            }
            let work = self.work.load(Ordering::Relaxed).cast::<Work<'_>>();
            // SAFETY: the round was open when this thread counted itself in, so its caller stays
            // in `round`, below which the closure lives, until this thread counts itself out.
            let work = unsafe { *work };
            if let Err(panic) = catch_unwind(AssertUnwindSafe(work)) {
                *self.panic.lock().unwrap_or_else(PoisonError::into_inner) = Some(panic);
            }
            self.state.fetch_sub(1, Ordering::Release);
            done = state & !(OPEN | INSIDE);
            spin = Spin::default();
        }
    }

    /// Waits for a round other than `done`, or the end.
    fn sleep(&self, done: u64) {
        let mut asleep = self.lock.lock().unwrap_or_else(PoisonError::into_inner);
        self.sleepers.fetch_add(1, Ordering::SeqCst);
        // Either this sees the new round or its caller sees the sleeper.
        let nothing = |state: u64| state & OPEN == 0 || state & !(OPEN | INSIDE) == done;
        while nothing(self.state.load(Ordering::SeqCst)) && !self.ends.load(Ordering::SeqCst) {
            asleep = self.wake.wait(asleep).unwrap_or_else(PoisonError::into_inner);
        }
        self.sleepers.fetch_sub(1, Ordering::SeqCst);
    }
}

/// Counts how long somebody has been spinning.
#[derive(Default)]
struct Spin {
    looks: u32,
    began: Option<Instant>,
}

impl Spin {
    /// One pause; whether there have been enough.
    fn is_long(&mut self) -> bool {
        std::hint::spin_loop();
        self.looks += 1;
        if !self.looks.is_multiple_of(LOOKS) {
            return false;
        }
        self.began.get_or_insert_with(Instant::now).elapsed() > SPIN
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_job_is_done_once_in_every_round() {
        let pool = Pool::new(4);
        for round in 0..2_000_usize {
            let mut out = vec![0_usize; round % 37];
            pool.run(out.iter_mut().enumerate().collect(), |(i, out)| *out += i + round);
            assert!(out.iter().enumerate().all(|(i, out)| *out == i + round), "{out:?}");
            if round % 500 == 0 {
                std::thread::sleep(3 * SPIN);
            }
        }
    }

    #[test]
    fn a_job_that_panics_ends_its_round_alone() {
        let pool = Pool::new(2);
        for bad in 0..50 {
            let ran = AtomicUsize::new(0);
            let jobs: Vec<usize> = (0..50).collect();
            let result = catch_unwind(AssertUnwindSafe(|| {
                pool.run(jobs, |job| {
                    assert!(job != bad, "job {job}");
                    ran.fetch_add(1, Ordering::Relaxed);
                });
            }));
            let panic = result.expect_err("the bad job's panic");
            assert_eq!(panic.downcast_ref::<String>(), Some(&format!("job {bad}")));
            assert!(ran.load(Ordering::Relaxed) < 50);
        }
        let sum = AtomicUsize::new(0);
        pool.run(vec![1, 2, 3], |job| {
            sum.fetch_add(job, Ordering::Relaxed);
        });
        assert_eq!(sum.into_inner(), 6);
    }

    #[test]
    fn a_job_may_find_the_pool_taken() {
        let pool = Pool::new(2);
        let sum = AtomicUsize::new(0);
        pool.run(vec![1, 2], |outer| {
            pool.run(vec![10, 20], |inner| {
                sum.fetch_add(outer * inner, Ordering::Relaxed);
            });
        });
        assert_eq!(sum.into_inner(), 90);
    }
}
