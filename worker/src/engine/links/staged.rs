//! Exchanges of an expert group in two stages, between processors: within each worker, then between
//! workers. Who sends what to whom is [`Stages`]; here it is done.
//!
//! ```text
//! own parcels -> pieces --within--> pieces of mates, some to be passed on --between--> parcels
//! ```
//! Bytes are moved and never added, so no bit depends on it.

use super::{Parcel, Travelling};
use crate::gang::comm::{Comm, CommError};
use moejob_kernels::{Buffer, CpuDevice, DType, Room};
use moejob_protocol::stages::{Flows, Message, Piece, Stage, Stages};
use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;

/// That a group exchanges in stages, and what it knows for that.
#[derive(Debug)]
pub(super) struct Staging {
    /// Of a worker.
    ranks: u32,
    /// By [`Travelling::at`]: counted in forward, and read again in backward, when the choices are
    /// gone.
    flows: Vec<Arc<Flows>>,
}

impl Staging {
    pub fn new(ranks: u32) -> Staging {
        Staging { ranks: ranks.max(1), flows: Vec::new() }
    }

    /// Everybody's choices are here.
    pub fn count(
        &mut self,
        cpu: &CpuDevice,
        way: &Travelling,
        top_k: usize,
        rooms: &[Room],
    ) {
        let group = way.group;
        let positions = group.ranks.len();
        let sources: Vec<(usize, usize)> =
            way.round.sources.iter().map(|source| (source.position, source.tokens)).collect();
        let slots = sources.iter().map(|(_, tokens)| tokens * top_k).sum();
        let owner = cpu.slice::<u32>(way.routes.owner);
        let all_ids = cpu.slice::<u32>(way.travel.all_ids.slice(0, slots));
        let mut flows = Flows::new(positions, top_k, &sources, owner, all_ids);
        // As `RoutePlan` decides it: the step is done again with more room.
        if flows.overflow(rooms.iter().map(|room| (room.rows, room.tokens))) {
            flows = Flows::none(positions);
        }
        if self.flows.len() <= way.at {
            self.flows.resize_with(way.at + 1, Arc::default);
        }
        self.flows[way.at] = Arc::new(flows);
    }

    /// How the group of `way` exchanges.
    pub fn route(&self, way: &Travelling) -> Route {
        let (ranks, me) = (way.group.ranks.clone(), way.group.me);
        let nodes: Vec<u32> = ranks.iter().map(|rank| rank / self.ranks).collect();
        let flows = self.flows.get(way.at).cloned().unwrap_or_default();
        Route { ranks, me, stages: Stages::new(&nodes), flows }
    }

    /// One exchange of a group; `bytes` of each piece, which its flows tell. Two collectives, on
    /// every rank. Returns the bytes that this rank has sent, what it passed on among them.
    pub fn exchange(
        &self,
        cpu: &mut CpuDevice,
        comm: &mut Comm,
        way: &Travelling,
        [sends, receives]: [&[Parcel]; 2],
        bytes: impl Fn(&Flows, Piece) -> usize,
    ) -> Result<u64, CommError> {
        let route = self.route(way);
        let read = |part: &Buffer| cpu.slice::<u8>(part.reinterpret(DType::U8));
        let out = sends.iter().map(|(to, parts)| (*to, full(parts).map(read)));
        let (held, sent) = route.carry(comm, out, bytes)?;
        for (rank, parts) in receives {
            let mut from = held.of_rank(&route, *rank);
            for part in full(parts) {
                let (mine, rest) = from.split_at(part.bytes());
                cpu.slice_mut::<u8>(part.reinterpret(DType::U8)).copy_from_slice(mine);
                from = rest;
            }
            assert!(from.is_empty(), "rank {rank}: {} bytes too many", from.len());
        }
        Ok(sent)
    }
}

/// How a group exchanges once, as its rank `me` knows it.
#[derive(Debug)]
pub(super) struct Route {
    ranks: Vec<u32>,
    me: usize,
    stages: Stages,
    flows: Arc<Flows>,
}

impl Route {
    /// What all ranks have for each other, of which `sends` are the own parts for each rank. With
    /// the bytes that this rank has sent.
    pub fn carry<'a, P>(
        &self,
        comm: &mut Comm,
        sends: impl Iterator<Item = (u32, P)>,
        bytes: impl Fn(&Flows, Piece) -> usize,
    ) -> Result<(Held, u64), CommError>
    where
        P: IntoIterator<Item = &'a [u8]>,
    {
        let bytes = |piece: &Piece| bytes(&self.flows, *piece);
        let (mut held, mut sent) = (Held::default(), 0);
        for (rank, parts) in sends {
            let piece = Piece { from: self.me, to: self.position(rank) };
            parts.into_iter().for_each(|part| held.bytes.extend_from_slice(part));
            let len = held.added(piece);
            assert_eq!(len, bytes(&piece), "{piece:?} as everybody's choices say");
        }
        for stage in [self.stages.within(self.me), self.stages.between(self.me)] {
            sent += held.pass(comm, &self.ranks, &stage, &bytes)?;
        }
        Ok((held, sent))
    }

    fn position(&self, rank: u32) -> usize {
        self.ranks.iter().position(|known| *known == rank).expect("a member")
    }
}

fn full(parts: &[Buffer]) -> impl Iterator<Item = &Buffer> {
    parts.iter().filter(|part| !part.is_empty())
}

/// The pieces that this rank has: its own, those for it, and those that it passes on.
#[derive(Debug, Default)]
pub(super) struct Held {
    bytes: Vec<u8>,
    at: BTreeMap<Piece, Range<usize>>,
    end: usize,
}

impl Held {
    /// What a rank had for this one.
    pub fn of_rank(&self, route: &Route, rank: u32) -> &[u8] {
        self.get(&Piece { from: route.position(rank), to: route.me })
    }

    /// What stands at the end is `piece`; its length.
    fn added(&mut self, piece: Piece) -> usize {
        let range = self.end..self.bytes.len();
        self.end = range.end;
        self.at.insert(piece, range.clone());
        range.len()
    }

    /// Nothing of a piece that has no bytes.
    fn get(&self, piece: &Piece) -> &[u8] {
        self.at.get(piece).map_or(&[], |range| &self.bytes[range.clone()])
    }

    /// One collective: messages without bytes are left out on both sides. The bytes of those that
    /// were sent.
    fn pass(
        &mut self,
        comm: &mut Comm,
        ranks: &[u32],
        stage: &Stage,
        bytes: &impl Fn(&Piece) -> usize,
    ) -> Result<u64, CommError> {
        let length = |message: &Message| message.pieces.iter().map(bytes).sum::<usize>();
        let joined = |message: &Message| -> Vec<u8> {
            message.pieces.iter().flat_map(|piece| self.get(piece)).copied().collect()
        };
        let sends = stage.sends.iter().filter(|message| length(message) > 0);
        let sends: Vec<(u32, Vec<u8>)> =
            sends.map(|message| (ranks[message.peer], joined(message))).collect();
        let receives: Vec<&Message> =
            stage.receives.iter().filter(|message| length(message) > 0).collect();
        let came = receives.iter().map(|message| length(message)).sum::<usize>();
        self.bytes.resize(self.end + came, 0);
        let mut room = &mut self.bytes[self.end..];
        let mut incoming: Vec<(u32, &mut [u8])> = Vec::with_capacity(receives.len());
        for message in &receives {
            let mine = room.split_off_mut(..length(message)).expect("room for all");
            incoming.push((ranks[message.peer], mine));
        }
        let outgoing: Vec<(u32, &[u8])> = sends.iter().map(|(to, of)| (*to, &of[..])).collect();
        comm.exchange(&outgoing, &mut incoming)?;
        for piece in receives.iter().flat_map(|message| &message.pieces) {
            let range = self.end..self.end + bytes(piece);
            self.end = range.end;
            self.at.insert(*piece, range);
        }
        Ok(outgoing.iter().map(|(_, part)| part.len() as u64).sum())
    }
}
