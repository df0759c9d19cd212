//! Collectives between the ranks of one attempt.
//!
//! ```text
//! engine: exchange() -> header + bytes -> Pipe -> mover -> TLS -> peer's mover -> Pipe -> engine
//!                                           `-> an engine of the same worker takes it at once
//! ```
//!
//! A call blocks the engine's thread until its bytes are taken over and all that it waits for is
//! here. Every call of a rank has a number, and every frame carries it with the attempt, so a
//! stale or confused peer is refused before one of its bytes reaches a buffer. An [`AbortHandle`]
//! ends a blocked call at once. One gather may be under way beside other calls: what
//! [`Comm::say`] says is sent at once, and [`Comm::hear`] waits for what the others said.

mod data;
mod ferry;
mod frame;
mod greet;
mod links;
mod mover;
mod parcel;
mod pipe;
mod precedence;
mod pump;
mod strand;

pub use data::{DataOffers, DataPlane, JOIN_MS_MAX, Join, JoinError};
pub use ferry::{Ferry, Stopper};
pub use frame::{HEADER_BYTES, Header, Kind};
pub use links::{Links, PeerPipes, Shape, Way};
pub use strand::{STRANDS_MAX, wanted_by};
pub use pipe::{CHUNK_BYTES_MAX, PIPE_BYTES_MAX, Pipe, Read, Wake, span};

use crate::gang::memory::{Mapping, Signal};
use serde::{Deserialize, Serialize};
use std::borrow::Cow;
use std::collections::BTreeSet;
use std::sync::atomic::Ordering;
use parcel::{Expected, Outbound, Receive, Said, Target};
use strand::{Coming, Going, Strands};
use std::sync::{Arc, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Why a collective did not happen. After any of these the group is unusable: each later call
/// returns `Aborted`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize, thiserror::Error)]
pub enum CommError {
    #[error("the collective was aborted: {reason}")]
    Aborted { reason: String },
    #[error("rank {rank} is lost: {why}")]
    PeerLost { rank: u32, why: String },
    #[error("rank {rank} sent {found}, expected {expected}")]
    Protocol { rank: u32, found: String, expected: String },
}

/// The group of all ranks of an attempt. A world of one has no peers and never blocks.
#[derive(Debug)]
pub struct Comm {
    rank: u32,
    attempt: u32,
    /// By rank; none at the own one.
    lanes: Vec<Option<Lane>>,
    memory: Arc<Mapping>,
    /// Where in it the number of the last collective that began is.
    number: usize,
    abort: AbortHandle,
    /// A gather that was said and not heard.
    said: Option<Said>,
    /// Until a thread takes it.
    ferry: Option<Ferry>,
    strands: Strands,
}

/// Ends a blocked collective of one rank, from any thread or process that shares its memory; all
/// later ones fail too.
#[derive(Clone, Debug)]
pub struct AbortHandle {
    signal: Signal,
    /// Wakes what travels beside collectives.
    beside: Signal,
    memory: Arc<Mapping>,
    /// 0 none, 1 being told, 2 told.
    state: usize,
    why: usize,
    room: usize,
}

impl AbortHandle {
    /// The first reason stays.
    pub fn abort(&self, reason: &str) {
        let state = self.memory.word(self.state);
        if state.compare_exchange(0, 1, Ordering::SeqCst, Ordering::SeqCst).is_ok() {
            self.memory.write_text(self.why, self.room, reason);
            state.store(2, Ordering::SeqCst);
        }
        self.signal.notify();
        self.beside.notify();
    }

    pub fn is_aborted(&self) -> bool {
        self.memory.word(self.state).load(Ordering::SeqCst) != 0
    }

    /// # Errors
    /// `Aborted`, once it is.
    pub fn check(&self) -> Result<(), CommError> {
        match self.memory.word(self.state).load(Ordering::SeqCst) {
            2 => Err(CommError::Aborted { reason: self.memory.read_text(self.why, self.room) }),
            _ => Ok(()),
        }
    }
}

/// Looks after a group while its rank waits for something else than a collective, from any thread.
#[derive(Debug)]
pub struct Lookout {
    abort: AbortHandle,
    incoming: Vec<(u32, Pipe)>,
    /// When a peer was first seen to have left.
    left: Mutex<Option<Instant>>,
}

/// A peer that leaves in order may do so a moment before this rank has noticed its own end.
const LEFT_FOR: Duration = Duration::from_millis(300);

impl Lookout {
    /// # Errors
    /// The group was aborted, or a peer has left it for good.
    pub fn look(&self) -> Result<(), CommError> {
        self.abort.check()?;
        let gone = |(rank, pipe): &(u32, Pipe)| Some((*rank, pipe.ended()?));
        let Some((rank, why)) = self.incoming.iter().find_map(gone) else { return Ok(()) };
        let mut left = self.left.lock().unwrap_or_else(PoisonError::into_inner);
        match left.get_or_insert_with(Instant::now).elapsed() {
            since if since < LEFT_FOR => Ok(()),
            _ => Err(CommError::PeerLost { rank, why }),
        }
    }
}

/// Both directions of one peer.
#[derive(Debug)]
struct Lane {
    outgoing: Pipe,
    incoming: Pipe,
}

impl Comm {
    /// The group of a single rank.
    pub fn solo(attempt: u32) -> Comm {
        Links::in_process(1, attempt).comm(0)
    }

    /// Groups whose ranks are threads of this process; for tests of exactness.
    pub fn in_process(world: u32) -> Vec<Comm> {
        let links = Links::in_process(world, 1);
        (0..world).map(|rank| links.comm(rank)).collect()
    }

    pub fn rank(&self) -> u32 {
        self.rank
    }

    pub fn world(&self) -> u32 {
        self.lanes.len() as u32
    }

    pub fn attempt(&self) -> u32 {
        self.attempt
    }

    /// Number of the collective that was begun last, from 1; 0 before the first.
    pub fn collective(&self) -> u64 {
        self.memory.long(self.number).load(Ordering::Relaxed)
    }

    pub fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
    }

    pub fn lookout(&self) -> Lookout {
        let lanes = (0..self.world()).zip(&self.lanes);
        let incoming =
            lanes.filter_map(|(peer, lane)| Some((peer, lane.as_ref()?.incoming.clone())));
        Lookout {
            abort: self.abort_handle(),
            incoming: incoming.collect(),
            left: Mutex::default(),
        }
    }

    /// Strands over which bulk data could go to `peer` now.
    pub fn strands(&self, peer: u32) -> u32 {
        self.strands.for_message(peer, usize::MAX).count_ones()
    }

    /// What carries copies beside the collectives, for a thread of its own; once.
    pub fn take_ferry(&mut self) -> Option<Ferry> {
        self.ferry.take()
    }

    /// One collective: sends each slice to its rank and fills each buffer from its rank.
    ///
    /// Each rank stands in `sends` and in `recvs` at most once; the own rank may stand in both,
    /// with equal lengths. All ranks make their calls in the same order, so that a call has the
    /// same number everywhere; a rank with nothing to do in one still makes it. The length of a
    /// buffer is exact: it is compared with the frame's header before a byte is stored.
    ///
    /// # Errors
    /// See [`CommError`]. The contents of `recvs` are then unspecified.
    pub fn exchange(
        &mut self,
        sends: &[(u32, &[u8])],
        recvs: &mut [(u32, &mut [u8])],
    ) -> Result<(), CommError> {
        let own = sends.iter().find(|(rank, _)| *rank == self.rank).map(|(_, bytes)| *bytes);
        let mut receives = Vec::with_capacity(recvs.len());
        for (peer, into) in recvs.iter_mut() {
            if *peer == self.rank {
                into.copy_from_slice(own.expect("the own rank receives what it sends"));
            } else {
                receives.push(Receive::new(*peer, Target::Exact(into)));
            }
        }
        self.collect(Kind::Exchange, sends, &mut receives)
    }

    /// [`Comm::exchange`] of what its sender alone knows the length of, at most `bytes_max`. What
    /// comes is in the order of `from`.
    ///
    /// # Errors
    /// See [`CommError`]; a longer one is `Protocol`.
    pub fn exchange_unequal(
        &mut self,
        sends: &[(u32, &[u8])],
        from: &[u32],
        bytes_max: usize,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        let mut receives: Vec<Receive> =
            from.iter().map(|peer| Receive::bounded(*peer, bytes_max)).collect();
        self.collect(Kind::Exchange, sends, &mut receives)?;
        Ok(receives.into_iter().map(Receive::into_bytes).collect())
    }

    /// [`Comm::exchange`] of bulk data, which goes over strands where there are some. The same call
    /// to those with which there are none.
    ///
    /// # Errors
    /// See [`CommError`]. The contents of `recvs` are then unspecified.
    pub fn exchange_bulk(
        &mut self,
        sends: &[(u32, &[u8])],
        recvs: &mut [(u32, &mut [u8])],
    ) -> Result<(), CommError> {
        assert!(recvs.iter().all(|(peer, _)| *peer != self.rank), "the own bytes lie here");
        assert_distinct(sends.iter().map(|(peer, _)| *peer), self.world());
        assert_distinct(recvs.iter().map(|(peer, _)| *peer), self.world());
        let (number, kind) = (self.count(), Kind::Exchange);
        let (mut out, mut going): (Vec<Outbound>, Vec<Going>) = Default::default();
        for (peer, bytes) in sends {
            let header = self.header(kind, number, bytes.len());
            let (outbound, strands) = self.strands.announce(*peer, header, bytes);
            out.push(outbound);
            going.extend((strands != 0).then_some((*peer, *bytes, strands)));
        }
        let into = recvs.iter_mut().map(|(peer, into)| Receive::new(*peer, Target::Exact(into)));
        let mut receives: Vec<Receive> = into.collect();
        let mut said = self.said.take();
        let driven = self.drive(number, kind, &mut out, &mut receives, said.as_mut());
        self.said = said;
        let carried = driven.and_then(|()| {
            let coming: Vec<Coming> =
                receives.into_iter().filter_map(Receive::into_striped).collect();
            let abort = &self.abort;
            let check = || abort.check();
            self.strands.carry((number, kind), &going, coming, &mut Vec::new(), &check)
        });
        self.ended(carried)
    }

    /// One collective that gives every rank's bytes, in rank order. `bytes_max` bounds each rank's.
    ///
    /// # Errors
    /// See [`CommError`]; a longer one from a peer is `Protocol`.
    pub fn gather_all(
        &mut self,
        bytes: &[u8],
        bytes_max: usize,
    ) -> Result<Vec<Vec<u8>>, CommError> {
        assert!(bytes.len() <= bytes_max, "{} bytes, at most {bytes_max}", bytes.len());
        let peers = (0..self.world()).filter(|peer| *peer != self.rank);
        let sends: Vec<(u32, &[u8])> = peers.clone().map(|peer| (peer, bytes)).collect();
        let mut receives: Vec<Receive> =
            peers.map(|peer| Receive::bounded(peer, bytes_max)).collect();
        self.collect(Kind::Gather, &sends, &mut receives)?;
        let mut all: Vec<Vec<u8>> = receives.into_iter().map(Receive::into_bytes).collect();
        all.insert(self.rank as usize, bytes.to_vec());
        Ok(all)
    }

    /// The first half of a gather of all ranks' bytes, each at most `bytes_max`: sends, and waits
    /// for nothing. Other calls may be made before [`Comm::hear`], the same on all ranks.
    ///
    /// # Errors
    /// See [`CommError`].
    pub fn say(&mut self, bytes: &[u8], bytes_max: usize) -> Result<(), CommError> {
        assert!(bytes.len() <= bytes_max, "{} bytes, at most {bytes_max}", bytes.len());
        assert!(self.said.is_none(), "what was said is heard first");
        let number = self.count();
        let header = self.header(Kind::Gather, number, bytes.len());
        let world = self.world();
        let out = |peer| match peer == self.rank {
            true => Outbound::nothing(peer),
            false => Outbound::new(peer, header, Cow::Owned(bytes.to_vec())),
        };
        let receive = |peer| match peer == self.rank {
            true => Receive::done(peer, bytes.to_vec()),
            false => Receive::bounded(peer, bytes_max),
        };
        let mut said = Said {
            number,
            out: (0..world).map(out).collect(),
            receives: (0..world).map(receive).collect(),
        };
        let moved = self.abort.check().and_then(|()| self.step_said(&mut said));
        self.ended(moved.map(|_| ()))?;
        self.said = Some(said);
        Ok(())
    }

    /// The second half of the gather that was said: every rank's bytes, in rank order.
    ///
    /// # Errors
    /// See [`CommError`]; a longer one than said from a peer is `Protocol`.
    pub fn hear(&mut self) -> Result<Vec<Vec<u8>>, CommError> {
        let mut said = self.said.take().expect("something was said");
        let heard = self.drive_said(&mut said);
        self.ended(heard)?;
        Ok(said.receives.into_iter().map(Receive::into_bytes).collect())
    }

    /// The number of a call that begins.
    fn count(&self) -> u64 {
        self.memory.long(self.number).fetch_add(1, Ordering::Relaxed) + 1
    }

    fn header(&self, kind: Kind, number: u64, length: usize) -> Header {
        let (attempt, source) = (self.attempt, self.rank);
        Header { attempt, number, source, kind, length: length as u64 }
    }

    /// After a failure of any call the group is unusable.
    fn ended(&self, result: Result<(), CommError>) -> Result<(), CommError> {
        if let Err(error) = &result {
            self.abort.abort(&error.to_string());
        }
        result
    }

    fn collect(
        &mut self,
        kind: Kind,
        sends: &[(u32, &[u8])],
        receives: &mut [Receive],
    ) -> Result<(), CommError> {
        assert_distinct(sends.iter().map(|(peer, _)| *peer), self.world());
        assert_distinct(receives.iter().map(|receive| receive.peer), self.world());
        let number = self.count();
        let mut out: Vec<Outbound> = sends
            .iter()
            .filter(|(peer, _)| *peer != self.rank)
            .map(|(peer, bytes)| {
                let header = self.header(kind, number, bytes.len());
                Outbound::new(*peer, header, Cow::Borrowed(bytes))
            })
            .collect();
        let mut said = self.said.take();
        let result = self.drive(number, kind, &mut out, receives, said.as_mut());
        self.said = said;
        self.ended(result)
    }

    /// Moves what can be moved in either direction, and sleeps when nothing can. What was said
    /// before comes first in each pipe.
    fn drive(
        &self,
        number: u64,
        kind: Kind,
        sends: &mut [Outbound],
        receives: &mut [Receive],
        mut said: Option<&mut Said>,
    ) -> Result<(), CommError> {
        let signal = self.abort.signal.clone();
        loop {
            let seen = signal.generation();
            self.abort.check()?;
            let (mut moved, mut waiting) = (false, false);
            if let Some(said) = &mut said {
                moved |= self.step_said(said)?;
            }
            let sent = |peer: u32| {
                said.as_ref().is_none_or(|said| said.out[peer as usize].is_done())
            };
            for send in sends.iter_mut().filter(|send| !send.is_done()) {
                if sent(send.peer) {
                    moved |= send.step(self.lane(send.peer))?;
                }
                waiting |= !send.is_done();
            }
            let heard = |peer: u32| {
                said.as_ref().is_none_or(|said| said.receives[peer as usize].is_done())
            };
            for receive in receives.iter_mut().filter(|receive| !receive.is_done()) {
                if heard(receive.peer) {
                    moved |= self.receive(receive, number, kind)?;
                }
                waiting |= !receive.is_done();
            }
            if !waiting {
                return Ok(());
            }
            if !moved {
                signal.wait(seen);
            }
        }
    }

    /// Waits for all that was said.
    fn drive_said(&self, said: &mut Said) -> Result<(), CommError> {
        let signal = self.abort.signal.clone();
        loop {
            let seen = signal.generation();
            self.abort.check()?;
            let moved = self.step_said(said)?;
            if said.is_done() {
                return Ok(());
            }
            if !moved {
                signal.wait(seen);
            }
        }
    }

    /// Moves what can be moved of a gather; says whether anything did.
    fn step_said(&self, said: &mut Said) -> Result<bool, CommError> {
        let mut moved = false;
        for send in said.out.iter_mut().filter(|send| !send.is_done()) {
            moved |= send.step(self.lane(send.peer))?;
        }
        for receive in said.receives.iter_mut().filter(|receive| !receive.is_done()) {
            moved |= self.receive(receive, said.number, Kind::Gather)?;
        }
        Ok(moved)
    }

    fn receive(
        &self,
        receive: &mut Receive,
        number: u64,
        kind: Kind,
    ) -> Result<bool, CommError> {
        let expected = Expected { attempt: self.attempt, number, source: receive.peer, kind };
        receive.step(self.lane(receive.peer), &expected)
    }

    fn lane(&self, peer: u32) -> &Lane {
        self.lanes[peer as usize].as_ref().expect("a peer")
    }
}

impl Drop for Comm {
    /// What was sent still goes out; whatever comes in now has no reader.
    fn drop(&mut self) {
        leave(&self.lanes);
        self.strands.leave("the rank left the group");
    }
}

fn leave(lanes: &[Option<Lane>]) {
    for lane in lanes.iter().flatten() {
        lane.outgoing.end("the rank left the group");
        lane.incoming.refuse("the rank left the group");
    }
}

fn assert_distinct(peers: impl Iterator<Item = u32>, world: u32) {
    let mut seen = BTreeSet::new();
    for peer in peers {
        assert!(peer < world, "rank {peer} of a world of {world}");
        assert!(seen.insert(peer), "rank {peer} twice in one collective");
    }
}

#[cfg(test)]
mod tests;
