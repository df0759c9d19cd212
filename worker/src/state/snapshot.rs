//! The state of a step, by owner: initial values, shards, and moving shards into another layout.
//!
//! ```text
//! a shard = for each owned run, in table order: weights | first moments | second moments
//! cut() -> bytes -> buddy, checkpoint      bytes -> scatter() -> any other layout
//! ```

use crate::gang::comm::{Comm, CommError};
use crate::engine::grads::weight_of;
use crate::engine::model::Model;
use crate::state::slots::{Memory, Slot};
use moejob_kernels::{Buffer, DType, Fill, InitNormal};
use moejob_protocol::config::ShardSource;
use moejob_protocol::layout::{Layout, elements};
use moejob_protocol::memory::EXCHANGE_BYTES_MAX;
use moejob_protocol::model::{ModelConfig, Param, Role};
use std::ops::Range;
use std::sync::Arc;

/// One run of a shard.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct ShardRun {
    /// In the parameter table.
    pub index: usize,
    /// Of the flattened parameter.
    pub elements: Range<u64>,
    /// Where its weights start in the shard, in bytes; both moments follow, as long each.
    pub offset: usize,
}

impl ShardRun {
    /// Where part 0 (weights), 1 or 2 (moments) of `elements` lies in the shard.
    fn range(&self, part: usize, elements: &Range<u64>, float_bytes: usize) -> Range<usize> {
        let len = (self.elements.end - self.elements.start) as usize;
        let start = (elements.start - self.elements.start) as usize;
        let start = self.offset + (part * len + start) * float_bytes;
        start..start + (elements.end - elements.start) as usize * float_bytes
    }
}

/// The runs of the shard of `rank`, in order, and its bytes.
pub fn shard_runs(
    model: &ModelConfig,
    params: &[Param],
    layout: &Layout,
    rank: u32,
    float_bytes: usize,
) -> (Vec<ShardRun>, usize) {
    let mut offset = 0;
    let mut runs = Vec::new();
    for (index, param) in params.iter().enumerate() {
        let elements = elements(&layout.owned(model, index, param, rank), param.numel());
        if elements.is_empty() {
            continue;
        }
        let bytes = (elements.end - elements.start) as usize * 3 * float_bytes;
        runs.push(ShardRun { index, elements, offset });
        offset += bytes;
    }
    (runs, offset)
}

/// Initial weights of everything held, from the seed; moments are zero in fresh memory.
pub fn initialize(model: &mut Model, seed: u64) {
    let config = &model.config;
    let router_std = config.router.initializer_range.unwrap_or(config.initializer_range);
    for index in 0..model.params.len() {
        let Some(x) = weight_of(model, index) else { continue };
        let param = &model.params[index];
        match param.role {
            Role::Gain => model.device.fill(&Fill { value: 1.0, x }),
            Role::Bias | Role::Correction { .. } | Role::RouterZeros { .. } => {
                model.device.fill(&Fill { value: 0.0, x });
            }
            Role::Temperature { .. } => {
                let cosine = config.router.cosine.as_ref();
                let temperature = cosine.map_or(1.0, |cosine| cosine.initial_temperature);
                // Our own logarithm: the same bits everywhere.
                let value = moejob_kernels::Float::ln(1.0 / temperature);
                model.device.fill(&Fill { value, x });
            }
            Role::Matrix | Role::Router { .. } | Role::Expert { .. } => {
                let hash = blake3::hash(param.name.as_bytes());
                let (first, _) = hash.as_bytes().split_first_chunk::<8>().expect("32 bytes");
                model.device.init_normal(&InitNormal {
                    seed,
                    name_hash: u64::from_le_bytes(*first),
                    first: 0,
                    std: match param.role {
                        Role::Router { .. } => router_std,
                        _ => model.config.initializer_range,
                    },
                    x,
                });
            }
        }
    }
    model.device.fill_zero(model.buffers.state.moment1);
    model.device.fill_zero(model.buffers.state.moment2);
}

/// The three parts of an owned run in this rank's memory.
fn owned_parts(model: &Model, run: &ShardRun) -> [Buffer; 3] {
    let (state, flat) = (&model.buffers.state, &model.shape.flats.owned);
    let weight = weight_of(model, run.index).expect("an owner holds");
    let len = (run.elements.end - run.elements.start) as usize;
    let moment = |base| {
        crate::engine::handles::slice(base, flat, run.index).expect("an owner's moments")
    };
    [weight.slice(run.elements.start as usize, len), moment(state.moment1), moment(state.moment2)]
}

/// Bytes of the shard of `rank`.
pub fn shard_bytes(model: &Model, rank: u32) -> usize {
    let float_bytes = model.shape.float_bytes as usize;
    shard_runs(&model.config, &model.params, &model.layout, rank, float_bytes).1
}

/// Copies this rank's shard into `bytes`, whose memory is used again.
pub fn cut(model: &Model, bytes: &mut Vec<u8>) {
    bytes.resize(shard_bytes(model, model.rank), 0);
    cut_into(model, bytes);
}

/// Copies this rank's shard into `bytes`, which are as many as it has.
pub fn cut_into(model: &Model, bytes: &mut [u8]) {
    let float_bytes = model.shape.float_bytes as usize;
    let (runs, len) =
        shard_runs(&model.config, &model.params, &model.layout, model.rank, float_bytes);
    assert_eq!(bytes.len(), len, "room for one shard");
    for run in &runs {
        for (part, buffer) in owned_parts(model, run).into_iter().enumerate() {
            let range = run.range(part, &run.elements, float_bytes);
            model.device.read(buffer.reinterpret(DType::U8), &mut bytes[range]);
        }
    }
}

/// Part `part` of elements of a parameter: where it goes in this rank's memory, if it is needed
/// here. Weights are needed by holders, moments by owners.
pub fn place_for(model: &Model, index: usize, part: usize, wanted: &Range<u64>) -> Option<Buffer> {
    let param = &model.params[index];
    let needed = needed(&model.config, &model.layout, index, param, model.rank, part);
    let both = intersect(&needed, wanted)?;
    assert_eq!(both, *wanted, "only what is needed is asked for");
    let base = if part == 0 {
        weight_of(model, index)?
    } else {
        let (state, flat) = (&model.buffers.state, &model.shape.flats.owned);
        let base = if part == 1 { state.moment1 } else { state.moment2 };
        crate::engine::handles::slice(base, flat, index)?
    };
    let start = wanted.start - needed.start;
    Some(base.slice(start as usize, (wanted.end - wanted.start) as usize))
}

/// The elements of a part of a parameter that `rank` needs to train under `layout`.
pub fn needed(
    model: &ModelConfig,
    layout: &Layout,
    index: usize,
    param: &Param,
    rank: u32,
    part: usize,
) -> Range<u64> {
    if part > 0 {
        return elements(&layout.owned(model, index, param, rank), param.numel());
    }
    let held = match param.role {
        Role::Expert { layer, expert } => {
            layout.experts(model, layer, rank).binary_search(&expert).is_ok()
        }
        _ => true,
    };
    if held { 0..param.numel() } else { 0..0 }
}

pub fn intersect(a: &Range<u64>, b: &Range<u64>) -> Option<Range<u64>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}

/// A piece of a shard on its way: the shard's range of bytes and what it is.
struct Piece {
    bytes: Range<usize>,
    index: usize,
    part: usize,
    elements: Range<u64>,
}

/// What `to` needs of `shard` of an earlier layout, among the parameters `indices`.
fn pieces(
    model: &Model,
    earlier: &Layout,
    shard: u32,
    to: u32,
    indices: &Range<usize>,
) -> Vec<Piece> {
    let float_bytes = model.shape.float_bytes as usize;
    let (runs, _) = shard_runs(&model.config, &model.params, earlier, shard, float_bytes);
    let mut pieces = Vec::new();
    for run in runs.iter().filter(|run| indices.contains(&run.index)) {
        for part in 0..3 {
            let param = &model.params[run.index];
            let needed = needed(&model.config, &model.layout, run.index, param, to, part);
            if let Some(elements) = intersect(&needed, &run.elements) {
                let bytes = run.range(part, &elements, float_bytes);
                pieces.push(Piece { bytes, index: run.index, part, elements });
            }
        }
    }
    pieces
}

/// Fills this rank's state from shards of an earlier layout that lie in the members' memory.
/// `held` gives the bytes of the shards that `sources` asks of this rank.
///
/// # Errors
/// A peer is lost.
pub fn scatter(
    model: &mut Model,
    comm: &mut Comm,
    earlier: &Layout,
    sources: &[ShardSource],
    held: impl Fn(u32) -> Arc<Slot>,
) -> Result<(), CommError> {
    for indices in batches(model) {
        scatter_some(model, comm, earlier, sources, &held, &indices)?;
    }
    Ok(())
}

/// Runs of the table that fit into one exchange.
fn batches(model: &Model) -> Vec<Range<usize>> {
    let mut batches: Vec<Range<usize>> = Vec::new();
    let mut bytes = u64::MAX;
    for (index, param) in model.params.iter().enumerate() {
        let size = param.numel() * 3 * model.shape.float_bytes;
        match batches.last_mut() {
            Some(last) if bytes + size <= EXCHANGE_BYTES_MAX => {
                last.end = index + 1;
                bytes += size;
            }
            _ => {
                batches.push(index..index + 1);
                bytes = size;
            }
        }
    }
    batches
}

fn scatter_some(
    model: &mut Model,
    comm: &mut Comm,
    earlier: &Layout,
    sources: &[ShardSource],
    held: &impl Fn(u32) -> Arc<Slot>,
    indices: &Range<usize>,
) -> Result<(), CommError> {
    let (me, world) = (model.rank, comm.world());
    let mut outgoing: Vec<Vec<u8>> = vec![Vec::new(); world as usize];
    for source in sources.iter().filter(|source| source.from == me) {
        let shard = held(source.shard);
        for (to, out) in (0..world).zip(&mut outgoing) {
            for piece in pieces(model, earlier, source.shard, to, indices) {
                out.extend_from_slice(&shard[piece.bytes]);
            }
        }
    }
    let mut incoming: Vec<(u32, Vec<Piece>)> = Vec::new();
    for from in 0..world {
        let of = sources.iter().filter(|source| source.from == from);
        let all = of.flat_map(|source| pieces(model, earlier, source.shard, me, indices));
        incoming.push((from, all.collect()));
    }
    let mut memory: Vec<Vec<u8>> = (incoming.iter())
        .map(|(_, pieces)| vec![0; pieces.iter().map(|piece| piece.bytes.len()).sum()])
        .collect();
    let sends: Vec<(u32, &[u8])> = (0..world)
        .zip(&outgoing)
        .filter(|(_, bytes)| !bytes.is_empty())
        .map(|(to, bytes)| (to, bytes.as_slice()))
        .collect();
    let mut receives: Vec<(u32, &mut [u8])> = (0..world)
        .zip(&mut memory)
        .filter(|(_, bytes)| !bytes.is_empty())
        .map(|(from, bytes)| (from, bytes.as_mut_slice()))
        .collect();
    comm.exchange(&sends, &mut receives)?;
    for ((_, pieces), bytes) in incoming.iter().zip(&memory) {
        let mut at = 0;
        for piece in pieces {
            let end = at + piece.bytes.len();
            let into = place_for(model, piece.index, piece.part, &piece.elements);
            let into = into.expect("a piece that was asked for");
            model.device.write(into.reinterpret(DType::U8), &bytes[at..end]);
            at = end;
        }
    }
    Ok(())
}

/// Why a snapshot was not taken.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("no memory for a snapshot")]
    Memory(#[from] std::io::Error),
}

/// Cuts this rank's shard into `memory` and exchanges it with its buddies: `buddies[ward]` keeps
/// the second copy of the shard of `ward`.
///
/// # Errors
/// A peer is lost, or there is no memory; what is complete stays.
pub fn take(
    memory: &Memory,
    model: &Model,
    comm: &mut Comm,
    buddies: &[Option<u32>],
    attempt: u32,
    step: u64,
) -> Result<Arc<Slot>, SnapshotError> {
    memory.make_room(attempt, step);
    let len = shard_bytes(model, model.rank);
    let mut own = memory.fill(attempt, step, model.rank, len)?;
    cut_into(model, own.bytes_mut());
    let own = own.complete();
    let wards = (0..comm.world()).filter(|ward| buddies[*ward as usize] == Some(model.rank));
    let mut theirs = Vec::new();
    for ward in wards {
        theirs.push((ward, memory.fill(attempt, step, ward, shard_bytes(model, ward))?));
    }
    let buddy = buddies[model.rank as usize];
    let send = buddy.filter(|_| !own.is_empty()).map(|buddy| (buddy, &own[..]));
    let mut receives: Vec<(u32, &mut [u8])> = theirs
        .iter_mut()
        .map(|(ward, filling)| (*ward, filling.bytes_mut()))
        .filter(|(_, memory)| !memory.is_empty())
        .collect();
    // All take part, so that the call has the same number everywhere.
    if buddies.iter().any(Option::is_some) {
        comm.exchange(&send.into_iter().collect::<Vec<_>>(), &mut receives)?;
    }
    theirs.into_iter().for_each(|(_, filling)| drop(filling.complete()));
    memory.trim();
    Ok(own)
}
