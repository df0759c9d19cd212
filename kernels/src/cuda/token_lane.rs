//! The lane of an expert group's tokens, where they travel beside the ops, in chunks or backward: a
//! second stream in which ops and verbs are enqueued as in that of all ops.
//!
//! ```text
//! ops     | copies |        wait 0 | experts 0 |  wait 1 | experts 1 | wait 2, 3 | router ..
//!                  v         ^     v           v   ^                   ^
//! tokens           | out 0 | out 1 |  back 0 | back 1 | ..
//! ```
//! A flight is what is enqueued in the lane at once. It begins when all ops that were enqueued
//! before it are done, and what reads its results waits for its end. As in the lane of buckets
//! (`comm_lane.rs`) everything waits only for what was enqueued earlier.

use std::sync::atomic::{AtomicBool, Ordering};

use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Gpu, Stream};
use crate::cuda::error::CudaError;
use crate::cuda::event::Event;

#[derive(Debug)]
pub(crate) struct TokenLane {
    /// While a flight is enqueued, the stream of all ops.
    stream: Stream,
    /// Behind the ops that were enqueued before the newest flight.
    handed: Event,
    flights: Vec<Flight>,
    /// Multiprocessors that the experts' products leave free while a flight is awaited.
    free: usize,
    /// A flight is being enqueued.
    open: bool,
}

#[derive(Debug)]
struct Flight {
    end: Event,
    /// It departed since the ops last waited for it.
    awaited: AtomicBool,
}

impl TokenLane {
    fn new(gpu: &Gpu, flights: usize, free: usize) -> Result<TokenLane, CudaError> {
        let flight = |_| Ok(Flight { end: Event::new(gpu)?, awaited: AtomicBool::new(false) });
        Ok(TokenLane {
            stream: gpu.urgent_stream()?,
            handed: Event::new(gpu)?,
            flights: (0..flights).map(flight).collect::<Result<_, CudaError>>()?,
            free,
            open: false,
        })
    }

    pub(crate) fn stream(&self) -> &Stream {
        &self.stream
    }

    /// Whether everything enqueued is done. Does not wait.
    pub(crate) fn is_idle(&self) -> Result<bool, CudaError> {
        self.stream.is_idle()
    }

    /// What products leave free at this moment.
    pub(crate) fn free(&self) -> usize {
        let awaited = |flight: &Flight| flight.awaited.load(Ordering::Relaxed);
        if self.flights.iter().any(awaited) { self.free } else { 0 }
    }
}

impl CudaDevice {
    /// Makes the lane for so many flights at once; `free` multiprocessors are left to it.
    pub(crate) fn open_token_lane(&mut self, flights: usize, free: usize) -> Result<(), CudaError> {
        self.gpu().make_current()?;
        self.token_lane = Some(TokenLane::new(self.gpu(), flights, free)?);
        Ok(())
    }

    /// Whether what is enqueued now is a flight.
    pub fn is_in_flight(&self) -> bool {
        self.token_lane.as_ref().is_some_and(|lane| lane.open)
    }

    /// From here to [`CudaDevice::flight_ends`] all is enqueued in the lane, behind all ops so far.
    pub(crate) fn flight_begins(&mut self) {
        let Some(mut lane) = self.token_lane.take() else { return };
        assert!(!lane.open, "one flight after the other");
        self.attempt(|| {
            self.stream.record(&lane.handed)?;
            Ok(lane.stream.wait(&lane.handed)?)
        });
        std::mem::swap(&mut self.stream, &mut lane.stream);
        lane.open = true;
        self.token_lane = Some(lane);
    }

    /// What was enqueued since it began is flight `at`.
    pub(crate) fn flight_ends(&mut self, at: usize) {
        let Some(mut lane) = self.token_lane.take() else { return };
        std::mem::swap(&mut self.stream, &mut lane.stream);
        lane.open = false;
        let flight = &lane.flights[at];
        self.attempt(|| Ok(lane.stream.record(&flight.end)?));
        flight.awaited.store(true, Ordering::Relaxed);
        self.token_lane = Some(lane);
    }

    /// Ops that are enqueued from now on wait for flight `at`, if it departed.
    pub(crate) fn await_flight(&self, at: usize) {
        let Some(lane) = &self.token_lane else { return };
        let flight = &lane.flights[at];
        if flight.awaited.swap(false, Ordering::Relaxed) {
            self.attempt(|| Ok(self.stream.wait(&flight.end)?));
        }
    }
}
