//! Copies between ranks that travel beside collectives.
//!
//! A rank has a second pipe to and from each other rank, in which no step's bytes wait behind a
//! copy's. A thread of its own stands at them. Between two workers the mover takes up a copy's
//! bytes only where no collective has any.

use super::parcel::{Expected, Outbound, Receive, Target};
use super::strand::{Coming, Going, Strands};
use super::{AbortHandle, CommError, Header, Kind, Lane};
use crate::gang::memory::Signal;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};

/// What one rank carries beside its collectives: one thing at a time.
#[derive(Debug)]
pub struct Ferry {
    pub(super) rank: u32,
    pub(super) attempt: u32,
    /// By rank; none at the own one.
    pub(super) lanes: Vec<Option<Lane>>,
    /// Of the rank's collectives, which end with their attempt.
    pub(super) abort: AbortHandle,
    pub(super) stop: Stopper,
    pub(super) strands: Strands,
}

/// Ends what a ferry carries, from any thread.
#[derive(Clone, Debug)]
pub struct Stopper {
    signal: Signal,
    stopped: Arc<AtomicBool>,
}

impl Stopper {
    pub(super) fn new(signal: Signal) -> Stopper {
        Stopper { signal, stopped: Arc::default() }
    }

    pub fn stop(&self) {
        self.stopped.store(true, Ordering::SeqCst);
        self.signal.notify();
    }
}

impl Ferry {
    /// Sends each slice to its rank and fills each buffer from its rank. `number` is the same with
    /// all who take part, and differs from that of any other copy of the attempt. Those whose bytes
    /// have all come are added to `arrived`, whatever became of the others.
    ///
    /// # Errors
    /// The attempt is over, the ferry was stopped, or a peer has left or speaks nonsense. The
    /// collectives of the rank notice by themselves what concerns them.
    pub fn carry(
        &mut self,
        number: u64,
        sends: &[(u32, &[u8])],
        recvs: &mut [(u32, &mut [u8])],
        arrived: &mut Vec<u32>,
    ) -> Result<(), CommError> {
        let (attempt, source, kind) = (self.attempt, self.rank, Kind::Copy);
        let header =
            |length: usize| Header { attempt, number, source, kind, length: length as u64 };
        let (mut out, mut going): (Vec<Outbound>, Vec<Going>) = Default::default();
        for (peer, bytes) in sends {
            let (outbound, strands) = self.strands.announce(*peer, header(bytes.len()), bytes);
            out.push(outbound);
            going.extend((strands != 0).then_some((*peer, *bytes, strands)));
        }
        let mut receives: Vec<Receive> = (recvs.iter_mut())
            .map(|(peer, into)| Receive::new(*peer, Target::Exact(into)))
            .collect();
        let moved = self.drive(number, &mut out, &mut receives);
        let whole = receives.iter().filter(|receive| receive.is_done() && !receive.is_striped());
        arrived.extend(whole.map(|receive| receive.peer));
        moved?;
        let coming: Vec<Coming> = receives.into_iter().filter_map(Receive::into_striped).collect();
        self.strands.carry((number, kind), &going, coming, arrived, &|| self.check())
    }

    fn drive(
        &self,
        number: u64,
        out: &mut [Outbound],
        receives: &mut [Receive],
    ) -> Result<(), CommError> {
        let (attempt, kind) = (self.attempt, Kind::Copy);
        loop {
            let seen = self.stop.signal.generation();
            self.check()?;
            let mut moved = false;
            for send in out.iter_mut().filter(|send| !send.is_done()) {
                moved |= send.step(self.lane(send.peer))?;
            }
            for receive in receives.iter_mut().filter(|receive| !receive.is_done()) {
                let expected = Expected { attempt, number, source: receive.peer, kind };
                moved |= receive.step(self.lane(receive.peer), &expected)?;
            }
            let done = out.iter().all(Outbound::is_done);
            if done && receives.iter().all(Receive::is_done) {
                return Ok(());
            }
            if !moved {
                self.stop.signal.wait(seen);
            }
        }
    }

    pub fn stopper(&self) -> Stopper {
        self.stop.clone()
    }

    fn check(&self) -> Result<(), CommError> {
        if self.stop.stopped.load(Ordering::SeqCst) {
            return Err(CommError::Aborted { reason: "its copies were stopped".to_string() });
        }
        self.abort.check()
    }

    fn lane(&self, peer: u32) -> &Lane {
        self.lanes[peer as usize].as_ref().expect("a peer")
    }
}

impl Drop for Ferry {
    fn drop(&mut self) {
        super::leave(&self.lanes);
    }
}
