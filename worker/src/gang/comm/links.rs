//! What the ranks of one worker share in one attempt: a page each, and their pipes.
//!
//! ```text
//! page 0: the data thread's bell
//! page 1 + i, of local rank i:  0 signal | 8 abort | 16 collective | 32 progress words
//!                               | 512 signal of what travels beside | 1024 why
//! then of each local rank i, for each rank p of the world: pipe i -> p, pipe p -> i, and the same
//! for what travels beside
//! then, in the same order, the pipes of all strands (`strand`): i -> p, p -> i of each
//! ```
//! Between two local ranks the sender's pipe is the one that is used. Nothing is touched, so
//! nothing costs memory, before it is needed.

use super::pipe::{PIPE_BYTES_MAX, Pipe, Wake, span};
use super::ferry::{Ferry, Stopper};
use super::strand::{Strand, Strands};
use super::{AbortHandle, Comm, Lane};
use crate::gang::memory::{Bell, Mapping, Signal};
use rustix::fd::OwnedFd;
use serde::{Deserialize, Serialize};
use std::io;
use std::ops::Range;
use std::sync::Arc;

const PAGE: usize = 4096;
const ABORT: usize = 8;
const COLLECTIVE: usize = 16;
/// Of the words that the worker reads while its engine computes (`Control`).
const PROGRESS: usize = 32;
const BESIDE: usize = 512;
const WHY: usize = 1024;
const WHY_ROOM: usize = 1024;

/// Which pipe between two ranks.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Way {
    /// Collectives: somebody waits for what is in it.
    Step = 0,
    /// Copies that travel beside them, see [`Ferry`].
    Beside = 1,
}

impl Way {
    pub const ALL: [Way; 2] = [Way::Step, Way::Beside];
}

/// Which ranks a `Links` is of; both sides of an engine's socket derive the same places from it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(deny_unknown_fields)]
pub struct Shape {
    pub attempt: u32,
    /// The first rank here.
    pub first: u32,
    /// Ranks here.
    pub count: u32,
    /// Ranks in all.
    pub world: u32,
    /// That there may be between a rank here and one elsewhere, in each direction.
    pub strands: u32,
}

impl Shape {
    pub fn ranks(&self) -> Range<u32> {
        self.first..self.first + self.count
    }

    fn is_local(&self, rank: u32) -> bool {
        self.ranks().contains(&rank)
    }

    fn page(&self, rank: u32) -> usize {
        assert!(self.is_local(rank), "rank {rank} is not one of {:?}", self.ranks());
        PAGE * (1 + (rank - self.first) as usize)
    }

    fn bytes(&self) -> usize {
        let pairs = self.count as usize * self.world as usize;
        self.first_strand() + 2 * self.strands as usize * pairs * span(PIPE_BYTES_MAX)
    }

    /// Bytes that a pipe holds which is no strand's: the same on all workers, which have as many
    /// ranks each.
    fn holds(&self) -> usize {
        moejob_protocol::memory::pipe_bytes(self.count.into(), self.world.into()) as usize
    }

    fn first_strand(&self) -> usize {
        let pairs = self.count as usize * self.world as usize;
        PAGE * (1 + self.count as usize) + 2 * Way::ALL.len() * pairs * span(self.holds())
    }

    /// Of the pipe of a strand between a local rank and another, 0 outgoing, 1 incoming.
    fn strand(&self, local: u32, other: u32, index: u32, direction: usize) -> usize {
        assert!(index < self.strands, "strand {index} of {}", self.strands);
        let row = (local - self.first) as usize * self.world as usize + other as usize;
        let pipe = 2 * (self.strands as usize * row + index as usize) + direction;
        self.first_strand() + pipe * span(PIPE_BYTES_MAX)
    }

    /// Of the pipe between a local rank and another, 0 outgoing, 1 incoming.
    fn pipe(&self, local: u32, other: u32, way: Way, direction: usize) -> usize {
        let row = (local - self.first) as usize * self.world as usize + other as usize;
        let pipe = 2 * (Way::ALL.len() * row + way as usize) + direction;
        PAGE * (1 + self.count as usize) + pipe * span(self.holds())
    }
}

/// A clone is the same.
#[derive(Clone, Debug)]
pub struct Links {
    shape: Shape,
    memory: Arc<Mapping>,
    /// None where all ranks are here.
    bell: Option<Bell>,
}

/// The pipes between a local rank and one elsewhere.
#[derive(Clone, Debug)]
pub struct PeerPipes {
    pub way: Way,
    pub local: u32,
    pub remote: u32,
    pub outgoing: Pipe,
    pub incoming: Pipe,
}

impl Links {
    /// # Errors
    /// The system gives no memory or no event.
    pub fn create(shape: Shape) -> io::Result<Links> {
        assert!(shape.first + shape.count <= shape.world, "{shape:?}");
        let memory = Arc::new(Mapping::shared("moejob-links", shape.bytes())?);
        let bell = Bell::new(Arc::clone(&memory), 0)?;
        Ok(Links { shape, memory, bell: Some(bell) })
    }

    /// What the worker has created, in its engine.
    ///
    /// # Errors
    /// The memory is not the one that is described.
    pub fn attach(shape: Shape, memory: OwnedFd, bell: OwnedFd) -> io::Result<Links> {
        let memory = Arc::new(Mapping::attach(memory)?);
        if memory.len() != shape.bytes() {
            return Err(io::Error::other("memory of another attempt"));
        }
        let bell = Some(Bell::of(bell, Arc::clone(&memory), 0));
        Ok(Links { shape, memory, bell })
    }

    /// All ranks are threads of this process.
    pub fn in_process(world: u32, attempt: u32) -> Links {
        let shape = Shape { attempt, first: 0, count: world, world, strands: 0 };
        Links { shape, memory: Arc::new(Mapping::private(shape.bytes())), bell: None }
    }

    pub fn shape(&self) -> Shape {
        self.shape
    }

    pub fn memory(&self) -> &Arc<Mapping> {
        &self.memory
    }

    pub fn bell(&self) -> Option<&Bell> {
        self.bell.as_ref()
    }

    fn signal(&self, rank: u32, way: Way) -> Signal {
        let at = match way {
            Way::Step => 0,
            Way::Beside => BESIDE,
        };
        Signal::new(Arc::clone(&self.memory), self.shape.page(rank) + at)
    }

    pub fn abort_handle(&self, rank: u32) -> AbortHandle {
        let page = self.shape.page(rank);
        AbortHandle {
            signal: self.signal(rank, Way::Step),
            beside: self.signal(rank, Way::Beside),
            memory: Arc::clone(&self.memory),
            state: page + ABORT,
            why: page + WHY,
            room: WHY_ROOM,
        }
    }

    /// Where `rank` counts its collectives.
    pub fn collective(&self, rank: u32) -> usize {
        self.shape.page(rank) + COLLECTIVE
    }

    /// Where `rank` says how far it is.
    pub fn progress(&self, rank: u32) -> usize {
        self.shape.page(rank) + PROGRESS
    }

    fn wake(&self, rank: u32, way: Way) -> Wake {
        match &self.bell {
            Some(bell) if !self.shape.is_local(rank) => Wake::Mover(bell.clone()),
            _ => Wake::Rank(self.signal(rank, way)),
        }
    }

    fn pipe(&self, from: u32, to: u32, way: Way) -> Pipe {
        let at = match self.shape.is_local(from) {
            true => self.shape.pipe(from, to, way, 0),
            false => self.shape.pipe(to, from, way, 1),
        };
        let ends = [from, to].map(|rank| self.wake(rank, way));
        Pipe::new(Arc::clone(&self.memory), (at, self.shape.holds()), ends)
    }

    /// Of `rank`, by peer.
    fn lanes(&self, rank: u32, way: Way) -> Vec<Option<Lane>> {
        let lane = |peer: u32| Lane {
            outgoing: self.pipe(rank, peer, way),
            incoming: self.pipe(peer, rank, way),
        };
        (0..self.shape.world).map(|peer| (peer != rank).then(|| lane(peer))).collect()
    }

    /// The strand that carries bytes of `from` to `to`, one of which is here.
    pub(super) fn strand(&self, from: u32, to: u32, index: u32) -> Strand {
        let at = match self.shape.is_local(from) {
            true => self.shape.strand(from, to, index, 0),
            false => self.shape.strand(to, from, index, 1),
        };
        Strand::new(Pipe::alone(Arc::clone(&self.memory), at))
    }

    /// Of `rank`, with all that are elsewhere.
    fn strands(&self, rank: u32) -> Strands {
        let with = |peer: u32| -> (Vec<Strand>, Vec<Strand>) {
            let all = if self.shape.is_local(peer) { 0 } else { self.shape.strands };
            let pair = |at| (self.strand(rank, peer, at), self.strand(peer, rank, at));
            (0..all).map(pair).unzip()
        };
        Strands::new(rank, self.shape.attempt, (0..self.shape.world).map(with).collect())
    }

    /// The group as `rank` sees it; made once a rank.
    pub fn comm(&self, rank: u32) -> Comm {
        let attempt = self.shape.attempt;
        let strands = self.strands(rank);
        let ferry = Ferry {
            rank,
            attempt,
            lanes: self.lanes(rank, Way::Beside),
            abort: self.abort_handle(rank),
            stop: Stopper::new(self.signal(rank, Way::Beside)),
            strands: strands.clone(),
        };
        Comm {
            rank,
            attempt,
            lanes: self.lanes(rank, Way::Step),
            memory: Arc::clone(&self.memory),
            number: self.collective(rank),
            abort: self.abort_handle(rank),
            said: None,
            ferry: Some(ferry),
            strands,
        }
    }

    /// The pairs of a rank here and one of `others`, which are elsewhere: first all of one way,
    /// then all of the other.
    pub fn pairs(&self, others: Range<u32>) -> Vec<PeerPipes> {
        let pair = |way: Way, local: u32, remote: u32| PeerPipes {
            way,
            local,
            remote,
            outgoing: self.pipe(local, remote, way),
            incoming: self.pipe(remote, local, way),
        };
        let of = |way, local| others.clone().map(move |remote| pair(way, local, remote));
        let all = |way| self.shape.ranks().flat_map(move |local| of(way, local));
        Way::ALL.into_iter().flat_map(all).collect()
    }

    /// The rank has gone without a word: what it would have said when it left the group.
    pub fn lose(&self, rank: u32, why: &str) {
        for peer in (0..self.shape.world).filter(|peer| *peer != rank) {
            for way in Way::ALL {
                self.pipe(rank, peer, way).end(why);
                self.pipe(peer, rank, way).refuse(why);
            }
        }
        self.strands(rank).leave(why);
    }
}
