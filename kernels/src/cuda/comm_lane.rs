//! The lane of what passes between devices beside the ops: a stream of its own, and marks.
//!
//! ```text
//! ops   | write bucket 2 | write bucket 1 | ..      | wait 2 | read bucket 2 | ..
//!                        v handed over              ^
//! comm  |                | reduce bucket 2 | mark 2 -+
//! ```
//! What is enqueued in the lane begins when all ops that were enqueued before it are done, and what
//! reads its results waits for its mark. Everything waits only for what was enqueued earlier, so
//! the order in which the host enqueues is one in which the device could do all of it one by one:
//! no two lanes wait for each other.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::event::Event;
use crate::cuda::token_lane::TokenLane;

/// How a lane shares the device with the ops.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    /// Marks, by number.
    pub marks: usize,
    /// Multiprocessors that kernels with a block for each multiprocessor leave free while a mark
    /// is waited for: such a kernel is done with its last block, and a block that finds no room
    /// would start when the others end.
    pub free: KeptFree,
}

/// By kind of kernel.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct KeptFree {
    pub attention: usize,
    /// The experts'.
    pub products: usize,
}

#[derive(Debug)]
pub(crate) struct CommLane {
    stream: Stream,
    /// Behind the ops that were enqueued before what is enqueued next in the lane.
    handed: Event,
    marks: Vec<Mark>,
    free: KeptFree,
}

#[derive(Debug)]
struct Mark {
    event: Event,
    /// It was set since the ops last waited for it.
    awaited: AtomicBool,
}

impl CommLane {
    fn new(gpu: &Gpu, how: &Beside) -> Result<CommLane, CudaError> {
        let mark = |_| Ok(Mark { event: Event::new(gpu)?, awaited: AtomicBool::new(false) });
        Ok(CommLane {
            stream: gpu.urgent_stream()?,
            handed: Event::new(gpu)?,
            marks: (0..how.marks).map(mark).collect::<Result<_, CudaError>>()?,
            free: how.free,
        })
    }

    fn is_awaited(&self) -> bool {
        self.marks.iter().any(|mark| mark.awaited.load(Ordering::Relaxed))
    }
}

impl CudaDevice {
    /// Makes the lane; one that is there ends.
    ///
    /// # Errors
    /// The device failed.
    pub fn open_comm_lane(&mut self, how: &Beside) -> Result<(), CudaError> {
        self.gpu().make_current()?;
        self.comm_lane = Some(CommLane::new(self.gpu(), how)?);
        Ok(())
    }

    /// The lane's stream, for who enqueues on it.
    pub fn comm_stream(&self) -> Option<&Stream> {
        self.comm_lane.as_ref().map(|lane| &lane.stream)
    }

    /// Whether everything enqueued is done, in all lanes. Does not wait.
    pub fn is_idle(&self) -> Result<bool, CudaError> {
        let lane = self.comm_stream().map_or(Ok(true), Stream::is_idle)?;
        let tokens = self.token_lane.as_ref().map_or(Ok(true), TokenLane::is_idle)?;
        Ok(self.stream.is_idle()? && lane && tokens)
    }

    /// What is enqueued next in the lane waits for all ops so far.
    pub fn hand_over(&self) {
        let Some(lane) = &self.comm_lane else { return };
        self.attempt(|| {
            self.stream.record(&lane.handed)?;
            Ok(lane.stream.wait(&lane.handed)?)
        });
    }

    /// Sets mark `at` behind all that was enqueued in the lane.
    pub fn set_mark(&self, at: usize) {
        let Some(lane) = &self.comm_lane else { return };
        let mark = &lane.marks[at];
        self.attempt(|| Ok(lane.stream.record(&mark.event)?));
        mark.awaited.store(true, Ordering::Relaxed);
    }

    /// Whether mark `at` was set since the ops last waited for it.
    pub(crate) fn is_mark_set(&self, at: usize) -> bool {
        let lane = self.comm_lane.as_ref();
        let mark = lane.and_then(|lane| lane.marks.get(at));
        mark.is_some_and(|mark| mark.awaited.load(Ordering::Relaxed))
    }

    /// Ops that are enqueued from now on wait for mark `at`, if it was set.
    pub(crate) fn await_mark(&self, at: usize) {
        let Some(lane) = &self.comm_lane else { return };
        let mark = &lane.marks[at];
        if mark.awaited.swap(false, Ordering::Relaxed) {
            self.attempt(|| Ok(self.stream.wait(&mark.event)?));
        }
    }

    /// The same with every mark that was set.
    pub(crate) fn await_marks(&self) {
        let marks = self.comm_lane.as_ref().map_or(0, |lane| lane.marks.len());
        (0..marks).for_each(|at| self.await_mark(at));
    }

    /// What kernels leave free at this moment.
    pub(crate) fn kept_free(&self) -> KeptFree {
        let lane = self.comm_lane.as_ref().filter(|lane| lane.is_awaited());
        let free = lane.map_or(KeptFree::default(), |lane| lane.free);
        let tokens = self.token_lane.as_ref().map_or(0, TokenLane::free);
        // Tokens fly beside products alone.
        KeptFree { products: free.products + tokens, ..free }
    }
}
