//! Moving state: shards of an earlier layout, in the members' memory, into any other layout.
//!
//! ```text
//! table x earlier owners x needs of this layout --Moves::plan--> pieces, by exchange and peer
//! of the own worker:  slot -> into place
//! of others:          exchange: each peer's pieces one after the other -> into place
//! ```
//! The table is walked once. Both ends of a piece plan it alike, so nothing but bytes travels. What
//! the memory of the own worker holds, be it from this rank or from another one of the worker, is
//! read where it lies: it is copied once.

use crate::gang::comm::{Comm, CommError};
use crate::state::rank::{RankState, StateTable, intersect};
use moejob_protocol::checkpoint::Part;
use moejob_protocol::config::ShardSource;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::EXCHANGE_BYTES_MAX;
use moejob_protocol::owners::Owners;
use std::collections::BTreeMap;
use std::ops::{Deref, Range};
use std::sync::Arc;

/// A piece of a shard on its way.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Piece {
    /// Rank of the earlier layout.
    pub shard: u32,
    /// Bytes of that shard.
    pub bytes: Range<usize>,
    /// In the parameter table.
    pub index: usize,
    pub part: Part,
    /// Of the flattened parameter.
    pub elements: Range<u64>,
}

/// What one exchange moves for this rank: by peer, in the order of its bytes.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Exchange {
    pub outgoing: BTreeMap<u32, Vec<Piece>>,
    pub incoming: BTreeMap<u32, Vec<Piece>>,
}

/// All that one rank sends and receives.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Moves {
    pub exchanges: Vec<Exchange>,
    /// Runs that were held against the needs of a rank.
    pub looks: u64,
}

impl Moves {
    /// For each piece the order is that of exchanges, then of `sources`, then of the table.
    pub fn plan(table: &StateTable, earlier: &Layout, sources: &[ShardSource]) -> Moves {
        let StateTable { model, params, owners, rank: me, stored, .. } = *table;
        let float_bytes = stored.size() as u64;
        let before = Owners::new(model, earlier);
        let holders = owners.holders();
        let mut of_shard: Vec<Vec<u32>> = vec![Vec::new(); earlier.mesh.world() as usize];
        for source in sources {
            of_shard[source.shard as usize].push(source.from);
        }
        let mut offsets = vec![0; of_shard.len()];
        let mut moves = Moves::default();
        let mut bytes_of_exchange = u64::MAX;
        for (index, param) in params.iter().enumerate() {
            let bytes = param.numel() * Part::ALL.len() as u64 * float_bytes;
            if bytes_of_exchange.saturating_add(bytes) > EXCHANGE_BYTES_MAX {
                moves.exchanges.push(Exchange::default());
                bytes_of_exchange = 0;
            }
            bytes_of_exchange += bytes;
            let all = 0..param.numel();
            let own = owners.of(index, param, me);
            for (shard, run) in before.runs(index, param) {
                let at = Run { index, shard, elements: run, offset: offsets[shard as usize] };
                offsets[shard as usize] += at.bytes(float_bytes);
                for from in &of_shard[shard as usize] {
                    if *from == me {
                        let moments = owners.runs(index, param);
                        moves.send(&at, float_bytes, &all, holders.of(param), moments);
                    }
                    let held = if holders.holds(param, me) { &all } else { &(0..0) };
                    moves.receive(*from, &at, float_bytes, held, &own);
                }
            }
        }
        // By source, as both ends know them, then as they were found.
        let order: BTreeMap<u32, usize> =
            sources.iter().enumerate().map(|(at, source)| (source.shard, at)).collect();
        for exchange in &mut moves.exchanges {
            let Exchange { outgoing, incoming } = exchange;
            for pieces in outgoing.values_mut().chain(incoming.values_mut()) {
                pieces.sort_by_key(|piece| (order[&piece.shard], piece.index, piece.part));
            }
        }
        moves
    }

    fn exchange(&mut self) -> &mut Exchange {
        self.exchanges.last_mut().expect("pushed before the first parameter")
    }

    /// To all that hold the weights and to those that own the moments.
    fn send(
        &mut self,
        run: &Run,
        float_bytes: u64,
        all: &Range<u64>,
        holders: &[u32],
        moments: impl Iterator<Item = (u32, Range<u64>)>,
    ) {
        for to in holders {
            self.looks += 1;
            if let Some(piece) = run.piece(Part::Master, all, float_bytes) {
                self.exchange().outgoing.entry(*to).or_default().push(piece);
            }
        }
        for (to, needed) in moments {
            self.looks += 1;
            let moments = [Part::Moment1, Part::Moment2].into_iter();
            for piece in moments.filter_map(|part| run.piece(part, &needed, float_bytes)) {
                self.exchange().outgoing.entry(to).or_default().push(piece);
            }
        }
    }

    fn receive(
        &mut self,
        from: u32,
        run: &Run,
        float_bytes: u64,
        held: &Range<u64>,
        own: &Range<u64>,
    ) {
        self.looks += 1;
        for part in Part::ALL {
            let needed = if part == Part::Master { held } else { own };
            if let Some(piece) = run.piece(part, needed, float_bytes) {
                self.exchange().incoming.entry(from).or_default().push(piece);
            }
        }
    }
}

/// An owned run of a shard.
struct Run {
    index: usize,
    shard: u32,
    elements: Range<u64>,
    /// Where its weights start in the shard, in bytes; both moments follow, as long each.
    offset: usize,
}

impl Run {
    fn bytes(&self, float_bytes: u64) -> usize {
        (self.elements.end - self.elements.start) as usize * Part::ALL.len() * float_bytes as usize
    }

    fn piece(&self, part: Part, needed: &Range<u64>, float_bytes: u64) -> Option<Piece> {
        let elements = intersect(needed, &self.elements)?;
        let len = self.elements.end - self.elements.start;
        let first = part as u64 * len + elements.start - self.elements.start;
        let start = self.offset + (first * float_bytes) as usize;
        let end = start + ((elements.end - elements.start) * float_bytes) as usize;
        let (shard, index) = (self.shard, self.index);
        Some(Piece { shard, bytes: start..end, index, part, elements })
    }
}

/// Fills this rank's state from shards of an earlier layout that lie in the members' memory. `held`
/// gives the bytes of the shards that `sources` asks of the ranks that `is_near`: those whose
/// worker is this one's, and this rank itself. What came counts once the state was finished.
///
/// # Errors
/// A peer is lost.
pub fn scatter<B: Deref<Target = [u8]>>(
    state: &mut impl RankState,
    comm: &mut Comm,
    earlier: &Layout,
    sources: &[ShardSource],
    is_near: impl Fn(u32) -> bool,
    held: impl Fn(u32) -> Arc<B>,
) -> Result<(), CommError> {
    let moves = Moves::plan(&state.table(), earlier, sources);
    let near = sources.iter().filter(|source| is_near(source.from));
    let shards: BTreeMap<u32, Arc<B>> =
        near.map(|source| (source.shard, held(source.shard))).collect();
    for exchange in &moves.exchanges {
        let near = exchange.incoming.iter().filter(|(from, _)| is_near(**from));
        let pieces = near.flat_map(|(_, pieces)| pieces).map(|piece| {
            let bytes = &shards[&piece.shard][piece.bytes.clone()];
            (piece.part, piece.index, piece.elements.clone(), bytes)
        });
        state.write_all(&pieces.collect::<Vec<_>>());
    }
    // The same for all: whose layout and sources are the same plan the same exchanges.
    for exchange in &moves.exchanges {
        move_some(state, comm, exchange, &is_near, &shards)?;
    }
    Ok(())
}

fn move_some<B: Deref<Target = [u8]>>(
    state: &mut impl RankState,
    comm: &mut Comm,
    exchange: &Exchange,
    is_near: &impl Fn(u32) -> bool,
    shards: &BTreeMap<u32, Arc<B>>,
) -> Result<(), CommError> {
    let joined = |pieces: &Vec<Piece>| {
        let mut bytes = Vec::with_capacity(len_of(pieces));
        for piece in pieces {
            bytes.extend_from_slice(&shards[&piece.shard][piece.bytes.clone()]);
        }
        bytes
    };
    let far = |peers: &BTreeMap<u32, Vec<Piece>>| -> Vec<u32> {
        peers.keys().copied().filter(|peer| !is_near(*peer)).collect()
    };
    let outgoing = far(&exchange.outgoing).into_iter();
    let outgoing: Vec<(u32, Vec<u8>)> =
        outgoing.map(|to| (to, joined(&exchange.outgoing[&to]))).collect();
    let incoming = far(&exchange.incoming).into_iter();
    let mut incoming: Vec<(u32, Vec<u8>)> =
        incoming.map(|from| (from, vec![0; len_of(&exchange.incoming[&from])])).collect();
    let sends: Vec<(u32, &[u8])> =
        outgoing.iter().map(|(to, bytes)| (*to, bytes.as_slice())).collect();
    let mut receives: Vec<(u32, &mut [u8])> =
        incoming.iter_mut().map(|(from, bytes)| (*from, bytes.as_mut_slice())).collect();
    comm.exchange(&sends, &mut receives)?;
    for (from, bytes) in &incoming {
        let mut rest = bytes.as_slice();
        for piece in &exchange.incoming[from] {
            let (own, after) = rest.split_at(piece.bytes.len());
            state.write(piece.part, piece.index, piece.elements.clone(), own);
            rest = after;
        }
    }
    Ok(())
}

fn len_of(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.bytes.len()).sum()
}
