//! Moving state: shards of an earlier layout, in the members' memory, into any other layout.
//!
//! ```text
//! table x earlier owners x needs of this layout --Moves::plan--> pieces, by exchange and peer
//! of the own worker:  slot -> into place
//! of others:          exchange: each peer's pieces one after the other -> into place
//!
//! exchange k + 1 is fetched | exchange k travels | exchange k - 1 goes into place: at once
//! ```
//! The table is walked once. Both ends of a piece plan it alike, so nothing but bytes travels. What
//! the memory of the own worker holds, be it from this rank or from another one of the worker, is
//! read where it lies: it is copied once.

use crate::gang::comm::{Comm, CommError};
use crate::state::rank::{RankState, StateTable, intersect};
use moejob_kernels::threads::begin;
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
            let (whole, kept) = (owners.is_whole(index), owners.kept(index, param, me));
            for (shard, run) in before.runs(index, param) {
                let at = Run { index, shard, elements: run, offset: offsets[shard as usize] };
                offsets[shard as usize] += at.bytes(float_bytes);
                for from in &of_shard[shard as usize] {
                    if *from == me {
                        let to = if whole { holders.of(param) } else { &[] };
                        let owned = owners.runs(index, param);
                        moves.send(&at, float_bytes, (&all, to), owned);
                    }
                    moves.receive(*from, &at, float_bytes, &kept, &own);
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

    /// To those that hold all weights and to those that own the moments; where nobody holds all,
    /// to the owners of both.
    fn send(
        &mut self,
        run: &Run,
        float_bytes: u64,
        (all, holders): (&Range<u64>, &[u32]),
        owned: impl Iterator<Item = (u32, Range<u64>)>,
    ) {
        for to in holders {
            self.looks += 1;
            if let Some(piece) = run.piece(Part::Master, all, float_bytes) {
                self.exchange().outgoing.entry(*to).or_default().push(piece);
            }
        }
        let of_owners = if holders.is_empty() { &Part::ALL[..] } else { &Part::ALL[1..] };
        for (to, needed) in owned {
            self.looks += 1;
            let parts = of_owners.iter();
            for piece in parts.filter_map(|part| run.piece(*part, &needed, float_bytes)) {
                self.exchange().outgoing.entry(to).or_default().push(piece);
            }
        }
    }

    fn receive(
        &mut self,
        from: u32,
        run: &Run,
        float_bytes: u64,
        kept: &Range<u64>,
        own: &Range<u64>,
    ) {
        self.looks += 1;
        for part in Part::ALL {
            let needed = if part == Part::Master { kept } else { own };
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

/// Bytes of what lies near that one call copies, unless something travels beside it: a call of a
/// GPU takes a while to begin and to end, and between two of them a rank hears of an end.
const NEAR_BYTES: usize = 4 << 30;

/// Fills this rank's state from shards of an earlier layout that lie in the members' memory. `held`
/// gives the bytes of the shards that `sources` asks of the ranks that `is_near`: those whose
/// worker is this one's, and this rank itself. What came counts once the state was finished.
///
/// # Errors
/// A peer is lost.
pub fn scatter<B: Deref<Target = [u8]> + Send + Sync>(
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
    let is_far = |peer: &u32| !is_near(*peer);
    let far: Vec<(Far, Far)> = (moves.exchanges.iter())
        .map(|Exchange { outgoing, incoming }| (far(outgoing, is_far), far(incoming, is_far)))
        .collect();
    let mut loaded = far.first().map(|(outgoing, _)| load(outgoing, &shards, Vec::new()));
    let (mut before, mut spare): (Option<(&Far, Messages)>, Vec<Vec<u8>>) = Default::default();
    let (mut pieces, mut bytes) = (Vec::new(), 0);
    // The same for all: whose layout and sources are the same plan the same exchanges.
    for (at, exchange) in moves.exchanges.iter().enumerate() {
        let (outgoing, incoming) = &far[at];
        let next = far.get(at + 1).map(|(outgoing, _)| outgoing);
        let messages = loaded.take().unwrap_or_default();
        let mut came = room(incoming, &mut spare);
        let near = exchange.incoming.iter().filter(|(from, _)| is_near(**from));
        pieces.extend(near.flat_map(|(_, pieces)| pieces).map(|piece| {
            let own = &shards[&piece.shard][piece.bytes.clone()];
            bytes += own.len();
            (piece.part, piece.index, piece.elements.clone(), own)
        }));
        let travels = !(outgoing.is_empty() && incoming.is_empty());
        let is_due = travels || at + 1 == moves.exchanges.len() || bytes >= NEAR_BYTES;
        let mut write = |state: &mut _, before: Option<(&Far, Messages)>, spare: &mut Vec<_>| {
            if is_due {
                RankState::write_all(state, &pieces);
                (pieces, bytes) = (Vec::new(), 0);
            }
            if let Some((of, messages)) = before {
                put(state, of, &messages);
                spare.extend(messages.into_iter().map(|(_, bytes)| bytes));
            }
        };
        let before_this = before.take();
        if !travels {
            exchange_all(comm, &messages, &mut came)?;
            write(state, before_this, &mut spare);
            loaded = next.map(|next| load(next, &shards, Vec::new()));
            continue;
        }
        // What came is put into its place, and what goes next is fetched, while others travel.
        std::thread::scope(|scope| {
            let moved = begin(scope, || {
                let moved = exchange_all(comm, &messages, &mut came);
                moved.map(|()| messages)
            });
            let used = std::mem::take(&mut spare);
            let fetched = begin(scope, || next.map(|next| load(next, &shards, used)));
            write(state, before_this, &mut spare);
            loaded = fetched.join().expect("copying does not panic");
            let sent = moved.join().expect("an exchange does not panic")?;
            spare.extend(sent.into_iter().map(|(_, bytes)| bytes));
            Ok(())
        })?;
        before = Some((incoming, came));
    }
    if let Some((of, messages)) = before {
        put(state, of, &messages);
    }
    Ok(())
}

/// The pieces of each peer that is elsewhere.
type Far<'a> = Vec<(u32, &'a Vec<Piece>)>;
/// By peer.
type Messages = Vec<(u32, Vec<u8>)>;

fn far(peers: &BTreeMap<u32, Vec<Piece>>, is_far: impl Fn(&u32) -> bool) -> Far<'_> {
    let far = peers.iter().filter(|(peer, _)| is_far(peer));
    far.map(|(peer, pieces)| (*peer, pieces)).collect()
}

/// What goes to each peer, in memory that was used before where there is some: pages that are
/// touched for the first time cost more than their bytes.
fn load<B: Deref<Target = [u8]>>(
    outgoing: &Far,
    shards: &BTreeMap<u32, Arc<B>>,
    mut used: Vec<Vec<u8>>,
) -> Messages {
    let message = |(peer, pieces): &(u32, &Vec<Piece>)| {
        let mut bytes = used.pop().unwrap_or_default();
        bytes.clear();
        bytes.reserve(len_of(pieces));
        for piece in *pieces {
            bytes.extend_from_slice(&shards[&piece.shard][piece.bytes.clone()]);
        }
        (*peer, bytes)
    };
    outgoing.iter().map(message).collect()
}

/// Memory for what comes.
fn room(incoming: &Far, used: &mut Vec<Vec<u8>>) -> Messages {
    let room = |(peer, pieces): &(u32, &Vec<Piece>)| {
        let mut bytes = used.pop().unwrap_or_default();
        bytes.resize(len_of(pieces), 0);
        (*peer, bytes)
    };
    incoming.iter().map(room).collect()
}

fn exchange_all(comm: &mut Comm, sent: &Messages, came: &mut Messages) -> Result<(), CommError> {
    let sends: Vec<(u32, &[u8])> =
        sent.iter().map(|(to, bytes)| (*to, bytes.as_slice())).collect();
    let mut receives: Vec<(u32, &mut [u8])> =
        came.iter_mut().map(|(from, bytes)| (*from, bytes.as_mut_slice())).collect();
    comm.exchange_bulk(&sends, &mut receives)
}

/// Writes what came from each peer.
fn put(state: &mut impl RankState, incoming: &Far, messages: &Messages) {
    for ((_, pieces), (_, bytes)) in incoming.iter().zip(messages) {
        let mut rest = bytes.as_slice();
        for piece in *pieces {
            let (own, after) = rest.split_at(piece.bytes.len());
            state.write(piece.part, piece.index, piece.elements.clone(), own);
            rest = after;
        }
    }
}

fn len_of(pieces: &[Piece]) -> usize {
    pieces.iter().map(|piece| piece.bytes.len()).sum()
}
