//! Collectives between the ranks of one attempt.
//!
//! ```text
//! device: exchange() -> header + bytes -> Pipe -> task -> TLS -> peer's task -> Pipe -> device
//! ```
//!
//! A call blocks the device's thread until its bytes are taken over and all that it waits for is
//! here. Every call of a rank has a number, and every frame carries it with the attempt, so a
//! stale or confused peer is refused before one of its bytes reaches a buffer. An [`AbortHandle`]
//! ends a blocked call at once.

mod data;
mod frame;
mod pipe;

pub use data::{DataOffers, DataPlane, JOIN_MS_MAX, Join, JoinError};
pub use frame::{HEADER_BYTES, Header, Kind};
pub use pipe::{CHUNK_BYTES_MAX, PIPE_BYTES_MAX, Pipe, Pop, Signal, Wake};

use pipe::lock;
use std::collections::BTreeSet;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Why a collective did not happen. After any of these the group is unusable: each later call
/// returns `Aborted`.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
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
    /// Number of the last collective that began.
    number: Arc<AtomicU64>,
    abort: AbortHandle,
}

/// Ends a blocked collective from any thread; all later ones fail too.
#[derive(Clone, Debug)]
pub struct AbortHandle {
    signal: Arc<Signal>,
    reason: Arc<Mutex<Option<String>>>,
}

impl AbortHandle {
    fn new(signal: Arc<Signal>) -> AbortHandle {
        AbortHandle { signal, reason: Arc::default() }
    }

    /// The first reason stays.
    pub fn abort(&self, reason: &str) {
        lock(&self.reason).get_or_insert_with(|| reason.to_string());
        self.signal.notify();
    }

    fn check(&self) -> Result<(), CommError> {
        match &*lock(&self.reason) {
            Some(reason) => Err(CommError::Aborted { reason: reason.clone() }),
            None => Ok(()),
        }
    }
}

/// Both directions of one peer, and what is left of the chunk that is being read.
#[derive(Debug)]
struct Lane {
    outgoing: Arc<Pipe>,
    incoming: Arc<Pipe>,
    chunk: Vec<u8>,
    taken: usize,
}

/// The pipes of one peer, as the mover of its bytes holds them.
#[derive(Clone, Debug)]
pub struct PeerPipes {
    pub rank: u32,
    /// From the device to the peer.
    pub outgoing: Arc<Pipe>,
    /// From the peer to the device.
    pub incoming: Arc<Pipe>,
}

impl Comm {
    /// The group of a single rank.
    pub fn solo(attempt: u32) -> Comm {
        let abort = AbortHandle::new(Arc::default());
        Comm { rank: 0, attempt, lanes: vec![None], number: Arc::default(), abort }
    }

    /// A group whose bytes `connect` moves: it is called once a peer, ascending, with a wake for
    /// the device's end, and returns the peer's pipes.
    pub fn new(
        rank: u32,
        world: u32,
        attempt: u32,
        mut connect: impl FnMut(u32, Wake) -> PeerPipes,
    ) -> Comm {
        assert!(rank < world, "rank {rank} of a world of {world}");
        let signal = Arc::<Signal>::default();
        let mut lane = |peer| {
            let pipes = connect(peer, Wake::Thread(Arc::clone(&signal)));
            let PeerPipes { outgoing, incoming, .. } = pipes;
            Lane { outgoing, incoming, chunk: Vec::new(), taken: 0 }
        };
        let lanes = (0..world).map(|peer| (peer != rank).then(|| lane(peer))).collect();
        Comm { rank, attempt, lanes, number: Arc::default(), abort: AbortHandle::new(signal) }
    }

    /// Groups whose ranks are threads of this process; for tests of exactness.
    pub fn in_process(world: u32) -> Vec<Comm> {
        let signals: Vec<Arc<Signal>> = (0..world).map(|_| Arc::default()).collect();
        let wake = |rank: u32| Wake::Thread(Arc::clone(&signals[rank as usize]));
        let pipe = |from: u32, to: u32| Pipe::new(wake(from), wake(to));
        let pipes: Vec<Vec<Arc<Pipe>>> = (0..world)
            .map(|from| (0..world).map(|to| pipe(from, to)).collect())
            .collect();
        let between = |from: u32, to: u32| Arc::clone(&pipes[from as usize][to as usize]);
        let lane = |rank: u32, peer: u32| Lane {
            outgoing: between(rank, peer),
            incoming: between(peer, rank),
            chunk: Vec::new(),
            taken: 0,
        };
        let comm = |rank: u32| Comm {
            rank,
            attempt: 1,
            lanes: (0..world).map(|peer| (peer != rank).then(|| lane(rank, peer))).collect(),
            number: Arc::default(),
            abort: AbortHandle::new(Arc::clone(&signals[rank as usize])),
        };
        (0..world).map(comm).collect()
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
        self.number.load(Ordering::Relaxed)
    }

    /// The same number, for heartbeats from another thread.
    pub fn counter(&self) -> Arc<AtomicU64> {
        Arc::clone(&self.number)
    }

    pub fn abort_handle(&self) -> AbortHandle {
        self.abort.clone()
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
        let mut blobs: Vec<Vec<u8>> = vec![Vec::new(); self.lanes.len()];
        blobs[self.rank as usize] = bytes.to_vec();
        let peers = (0..self.world()).filter(|peer| *peer != self.rank);
        let sends: Vec<(u32, &[u8])> = peers.map(|peer| (peer, bytes)).collect();
        let mut receives: Vec<Receive> = (0..self.world())
            .zip(&mut blobs)
            .filter(|(peer, _)| *peer != self.rank)
            .map(|(peer, into)| Receive::new(peer, Target::Bounded { into, bytes_max }))
            .collect();
        self.collect(Kind::Gather, &sends, &mut receives)?;
        Ok(blobs)
    }

    fn collect(
        &mut self,
        kind: Kind,
        sends: &[(u32, &[u8])],
        receives: &mut [Receive],
    ) -> Result<(), CommError> {
        assert_distinct(sends.iter().map(|(peer, _)| *peer), self.world());
        assert_distinct(receives.iter().map(|receive| receive.peer), self.world());
        let number = self.number.fetch_add(1, Ordering::Relaxed) + 1;
        let header = |length: usize| Header {
            attempt: self.attempt,
            number,
            source: self.rank,
            kind,
            length: length as u64,
        };
        let mut out: Vec<Outbound> = sends
            .iter()
            .filter(|(peer, _)| *peer != self.rank)
            .map(|(peer, bytes)| Outbound::new(*peer, header(bytes.len()), bytes))
            .collect();
        let result = self.drive(number, kind, &mut out, receives);
        if let Err(error) = &result {
            self.abort.abort(&error.to_string());
        }
        result
    }

    /// Moves what can be moved in either direction, and sleeps when nothing can.
    fn drive(
        &mut self,
        number: u64,
        kind: Kind,
        sends: &mut [Outbound],
        receives: &mut [Receive],
    ) -> Result<(), CommError> {
        let signal = Arc::clone(&self.abort.signal);
        loop {
            let seen = signal.generation();
            self.abort.check()?;
            let mut moved = false;
            let mut waiting = false;
            for send in sends.iter_mut().filter(|send| !send.is_done()) {
                moved |= send.step(self.lanes[send.peer as usize].as_ref().expect("a peer"))?;
                waiting |= !send.is_done();
            }
            for receive in receives.iter_mut().filter(|receive| !receive.is_done()) {
                let expected =
                    Expected { attempt: self.attempt, number, source: receive.peer, kind };
                let lane = self.lanes[receive.peer as usize].as_mut().expect("a peer");
                moved |= receive.step(lane, &expected)?;
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
}

impl Drop for Comm {
    /// What was sent still goes out; whatever comes in now has no reader.
    fn drop(&mut self) {
        for lane in self.lanes.iter().flatten() {
            lane.outgoing.end("the rank left the group");
            lane.incoming.refuse("the rank left the group");
        }
    }
}

fn assert_distinct(peers: impl Iterator<Item = u32>, world: u32) {
    let mut seen = BTreeSet::new();
    for peer in peers {
        assert!(peer < world, "rank {peer} of a world of {world}");
        assert!(seen.insert(peer), "rank {peer} twice in one collective");
    }
}

/// A frame on its way out.
struct Outbound<'a> {
    peer: u32,
    /// Until it left with the first chunk.
    header: Option<Header>,
    rest: &'a [u8],
}

impl<'a> Outbound<'a> {
    fn new(peer: u32, header: Header, bytes: &'a [u8]) -> Outbound<'a> {
        Outbound { peer, header: Some(header), rest: bytes }
    }

    fn is_done(&self) -> bool {
        self.header.is_none() && self.rest.is_empty()
    }

    /// Copies as much into the peer's pipe as fits; says whether anything moved.
    fn step(&mut self, lane: &Lane) -> Result<bool, CommError> {
        let mut moved = false;
        while !self.is_done() {
            let space = lane.outgoing.space();
            let space = space.map_err(|why| CommError::PeerLost { rank: self.peer, why })?;
            let head = self.header.map_or(0, |_| HEADER_BYTES);
            // A chunk goes out whole or waits: crumbs would cost a wake each.
            let size = (head + self.rest.len()).min(CHUNK_BYTES_MAX);
            if size > space {
                break;
            }
            let mut chunk = Vec::with_capacity(size);
            if let Some(header) = self.header.take() {
                chunk.extend_from_slice(&header.encode());
            }
            let (now, later) = self.rest.split_at(size - head);
            chunk.extend_from_slice(now);
            self.rest = later;
            lane.outgoing.push(chunk);
            moved = true;
        }
        Ok(moved)
    }
}

enum Target<'a> {
    Exact(&'a mut [u8]),
    Bounded { into: &'a mut Vec<u8>, bytes_max: usize },
}

/// A frame that is awaited.
struct Receive<'a> {
    peer: u32,
    target: Target<'a>,
    header: Vec<u8>,
    /// Bytes of the body that are still to come; none before the header is checked.
    missing: Option<usize>,
}

struct Expected {
    attempt: u32,
    number: u64,
    source: u32,
    kind: Kind,
}

impl<'a> Receive<'a> {
    fn new(peer: u32, target: Target<'a>) -> Receive<'a> {
        Receive { peer, target, header: Vec::with_capacity(HEADER_BYTES), missing: None }
    }

    fn is_done(&self) -> bool {
        self.missing == Some(0)
    }

    /// Takes as much from the peer's pipe as is there; says whether anything moved.
    fn step(&mut self, lane: &mut Lane, expected: &Expected) -> Result<bool, CommError> {
        let mut moved = false;
        while !self.is_done() {
            if lane.taken == lane.chunk.len() {
                lane.chunk = match lane.incoming.pop() {
                    Pop::Chunk(chunk) => chunk,
                    Pop::Empty => return Ok(moved),
                    Pop::Ended { why } => {
                        return Err(CommError::PeerLost { rank: self.peer, why });
                    }
                };
                lane.taken = 0;
            }
            lane.taken += self.take(&lane.chunk[lane.taken..], expected)?;
            moved = true;
        }
        Ok(moved)
    }

    /// Takes what belongs to this frame from `bytes`, and says how much that was.
    fn take(&mut self, bytes: &[u8], expected: &Expected) -> Result<usize, CommError> {
        let Some(missing) = self.missing else {
            let count = bytes.len().min(HEADER_BYTES - self.header.len());
            self.header.extend_from_slice(&bytes[..count]);
            if self.header.len() == HEADER_BYTES {
                self.missing = Some(self.open(expected)?);
            }
            return Ok(count);
        };
        let count = bytes.len().min(missing);
        match &mut self.target {
            Target::Exact(into) => {
                let at = into.len() - missing;
                into[at..at + count].copy_from_slice(&bytes[..count]);
            }
            Target::Bounded { into, .. } => into.extend_from_slice(&bytes[..count]),
        }
        self.missing = Some(missing - count);
        Ok(count)
    }

    /// Compares the header with what is expected; gives the body's length.
    fn open(&mut self, expected: &Expected) -> Result<usize, CommError> {
        let refuse = |found: String, expected: String| CommError::Protocol {
            rank: self.peer,
            found,
            expected,
        };
        let header = Header::decode(&self.header)
            .map_err(|found| refuse(found, "a frame header".to_string()))?;
        let Expected { attempt, number, source, kind } = *expected;
        let want = Header { attempt, number, source, kind, length: header.length };
        if header != want {
            return Err(refuse(header.to_string(), want.to_string()));
        }
        let length = usize::try_from(header.length).unwrap_or(usize::MAX);
        match &mut self.target {
            Target::Exact(into) if into.len() == length => {}
            Target::Exact(into) => {
                return Err(refuse(header.to_string(), format!("{} bytes", into.len())));
            }
            Target::Bounded { into, bytes_max } if length <= *bytes_max => {
                into.reserve_exact(length);
            }
            Target::Bounded { bytes_max, .. } => {
                return Err(refuse(header.to_string(), format!("at most {bytes_max} bytes")));
            }
        }
        Ok(length)
    }
}

#[cfg(test)]
mod tests;
