//! The state of a step, by owner: initial values, shards, and the snapshots of a worker.
//!
//! ```text
//! a shard = for each owned run, in table order: weights | first moments | second moments
//! cut() -> bytes -> buddy, checkpoint      bytes -> moves::scatter() -> any other layout
//! ```

use crate::gang::comm::{Comm, CommError, Ferry};
use crate::state::rank::{
    DeviceError, Normal, RankState, StateTable, hash_of_name, name_hash,
};
use crate::state::slot::{Filling, Slot};
use crate::state::slots::Memory;
use moejob_kernels::{Pages, Strided};
use moejob_protocol::checkpoint::{Part, ScaleEntry};
use moejob_protocol::layout::Layout;
use moejob_protocol::model::{ModelConfig, Param, Role};
use moejob_protocol::owners::Owners;
use moejob_protocol::slices::Cut;
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
    /// Where its three parts lie in the shard, one after the other, as long each.
    fn bytes(&self, float_bytes: usize) -> Range<usize> {
        let len = (self.elements.end - self.elements.start) as usize * float_bytes;
        self.offset..self.offset + len * Part::ALL.len()
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
    let owners = Owners::new(model, layout);
    let mut offset = 0;
    let mut runs = Vec::new();
    for (index, param) in params.iter().enumerate() {
        let elements = owners.of(index, param, rank);
        if elements.is_empty() {
            continue;
        }
        let bytes = (elements.end - elements.start) as usize * Part::ALL.len() * float_bytes;
        runs.push(ShardRun { index, elements, offset });
        offset += bytes;
    }
    (runs, offset)
}

/// Initial weights of everything held, from the seed; moments are zero. Counts once the state was
/// finished.
pub fn initialize(state: &mut impl RankState, seed: u64) {
    initialize_telling(state, seed, &mut || {});
}

/// The same; `tell` is called with each parameter.
pub fn initialize_telling(state: &mut impl RankState, seed: u64, tell: &mut dyn FnMut()) {
    let values: Vec<(usize, Initial)> = {
        let table = state.table();
        let held = |index: &usize| !table.needed(Part::Master, *index).is_empty();
        let of = |index| (index, initial(table.model, &table.params[index], seed));
        (0..table.params.len()).filter(held).map(of).collect()
    };
    for (index, value) in values {
        tell();
        match value {
            Initial::Constant(value) => state.fill(index, value),
            Initial::Normal(normal) => state.fill_normal(index, &normal),
        }
    }
    state.clear_moments();
}

/// How a parameter begins.
enum Initial {
    Constant(f64),
    Normal(Normal),
}

fn initial(model: &ModelConfig, param: &Param, seed: u64) -> Initial {
    match param.role {
        Role::Gain => Initial::Constant(1.0),
        Role::Bias | Role::Correction { .. } | Role::RouterZeros { .. } => Initial::Constant(0.0),
        Role::Temperature { .. } => {
            let cosine = model.router.cosine.as_ref();
            let temperature = cosine.map_or(1.0, |cosine| cosine.initial_temperature);
            // Our own logarithm: the same bits everywhere.
            Initial::Constant(moejob_kernels::Float::ln(1.0 / temperature))
        }
        Role::Matrix | Role::Router { .. } | Role::Expert { .. } => {
            let of_router = model.router.initializer_range;
            // Slices draw what their expert would have drawn.
            let slice = model.cut(param).filter(|cut| cut.whole != param.name);
            let (name_hash, place) = match slice {
                None => (name_hash(param), Strided::ALL),
                Some(Cut { whole, from, run, stride, .. }) => {
                    (hash_of_name(&whole), Strided { from, run, stride })
                }
            };
            Initial::Normal(Normal {
                seed,
                name_hash,
                place,
                std: match param.role {
                    Role::Router { .. } => of_router.unwrap_or(model.initializer_range),
                    _ => model.initializer_range,
                },
            })
        }
    }
}

/// Bytes of the shard of `rank`.
pub fn shard_bytes(table: &StateTable, rank: u32) -> usize {
    shard_runs(table.model, table.params, table.layout, rank, table.stored.size()).1
}

/// Copies this rank's shard into `bytes`, whose memory is used again.
///
/// # Errors
/// The device failed: the bytes say nothing.
pub fn cut(state: &mut impl RankState, bytes: &mut Vec<u8>) -> Result<(), DeviceError> {
    let table = state.table();
    let len = shard_bytes(&table, table.rank);
    bytes.resize(len, 0);
    cut_into(state, bytes)
}

/// Copies this rank's shard into `bytes`, which are as many as it has.
///
/// # Errors
/// The device failed: the bytes say nothing.
pub fn cut_into(state: &mut impl RankState, bytes: &mut [u8]) -> Result<(), DeviceError> {
    begin_cut_into(state, bytes);
    state.finish()
}

/// [`cut_into`] of a slot.
///
/// # Errors
/// The device failed: the bytes say nothing.
pub fn cut_into_slot(
    state: &mut impl RankState,
    filling: &mut Filling,
) -> Result<(), DeviceError> {
    let pages = filling.pages();
    let pieces = pieces(&state.table(), filling.bytes_mut());
    state.read_all(pieces, pages);
    state.finish()
}

/// The same of a device that may put the copying off: the bytes count once it was waited for.
pub fn begin_cut_into(state: &mut impl RankState, bytes: &mut [u8]) {
    let pieces = pieces(&state.table(), bytes);
    state.read_all(pieces, Pages::Stay);
}

/// A part of a parameter, and where it goes.
type Piece<'a> = (Part, usize, Range<u64>, &'a mut [u8]);

/// What a shard consists of, in the order of its bytes.
fn pieces<'a>(table: &StateTable, bytes: &'a mut [u8]) -> Vec<Piece<'a>> {
    let float_bytes = table.stored.size();
    let (runs, len) =
        shard_runs(table.model, table.params, table.layout, table.rank, float_bytes);
    assert_eq!(bytes.len(), len, "room for one shard");
    let (mut pieces, mut rest) = (Vec::new(), bytes);
    for run in runs {
        let (parts, after) = rest.split_at_mut(run.bytes(float_bytes).len());
        rest = after;
        let len = parts.len() / Part::ALL.len();
        for (part, into) in Part::ALL.into_iter().zip(parts.chunks_exact_mut(len)) {
            pieces.push((part, run.index, run.elements.clone(), into));
        }
    }
    pieces
}

/// Why a snapshot was not taken.
#[derive(Debug, thiserror::Error)]
pub enum SnapshotError {
    #[error(transparent)]
    Comm(#[from] CommError),
    #[error("no memory for a snapshot")]
    Memory(#[from] std::io::Error),
    #[error(transparent)]
    Device(#[from] DeviceError),
}

/// The slots of a snapshot that is being taken.
#[derive(Debug)]
pub struct Opened {
    /// For this rank's shard.
    pub own: Filling,
    /// For the shards of those whose buddy this rank is.
    pub theirs: Vec<(u32, Filling)>,
    /// Every rank can copy beside its next step.
    pub beside: bool,
    /// Some rank's copies are large enough to travel beside the steps.
    pub large: bool,
}

/// Bytes of what a rank sends and takes in from which on a copy travels beside the steps. A
/// smaller one is there before a thread for it would be.
const LARGE: usize = 4 << 20;

/// Finds the slots for this rank's shard and for those of its wards: `buddies[ward]` keeps the
/// second copy of the shard of `ward`. None, on all ranks alike, where one of them has no free
/// slot: then no snapshot is taken, and nothing waits. `can_leave` says whether this rank could
/// copy into the slot beside its next step.
///
/// # Errors
/// A peer is lost, or there is no memory.
pub fn open(
    memory: &Memory,
    state: &impl RankState,
    comm: &mut Comm,
    buddies: &[Option<u32>],
    (attempt, step): (u32, u64),
    can_leave: impl Fn(&Filling) -> bool,
) -> Result<Option<Opened>, SnapshotError> {
    memory.make_room(attempt, step);
    let rank = state.table().rank;
    let wards = (0..comm.world()).filter(|ward| buddies[*ward as usize] == Some(rank));
    let wards: Vec<u32> = wards.collect();
    let mut slots = Vec::new();
    for shard in std::iter::once(rank).chain(wards.iter().copied()) {
        let len = shard_bytes(&state.table(), shard);
        let filling = memory.fill(attempt, step, shard, len)?;
        slots.extend(filling.map(|filling| (shard, filling)));
    }
    opened(comm, slots, 1 + wards.len(), state.loss_scale(), can_leave)
}

/// The same for a checkpoint alone: no other rank gets a copy, and nobody resumes from it.
///
/// # Errors
/// See [`open`].
pub fn open_for_checkpoint(
    memory: &Memory,
    state: &impl RankState,
    comm: &mut Comm,
    (attempt, step): (u32, u64),
    can_leave: impl Fn(&Filling) -> bool,
) -> Result<Option<Opened>, SnapshotError> {
    let rank = state.table().rank;
    let filling = memory.fill(attempt, step, rank, shard_bytes(&state.table(), rank))?;
    let slots = filling.map(|filling| (rank, filling)).into_iter().collect();
    opened(comm, slots, 1, state.loss_scale(), can_leave)
}

/// What every rank has: slots, and a way to copy beside its next step. The scale is the same on
/// every rank, so that a buddy knows its ward's.
fn opened(
    comm: &mut Comm,
    mut slots: Vec<(u32, Filling)>,
    wanted: usize,
    loss_scale: Option<ScaleEntry>,
    can_leave: impl Fn(&Filling) -> bool,
) -> Result<Option<Opened>, SnapshotError> {
    let beside = slots.first().is_some_and(|(_, own)| can_leave(own));
    let bytes: usize = slots.iter().map(|(_, filling)| filling.len()).sum();
    let small = bytes < LARGE;
    let said =
        [u8::from(slots.len() == wanted) | u8::from(beside) << 1 | u8::from(small) << 2];
    let all = match comm.world() {
        1 => said[0],
        _ => comm.gather_all(&said, 1)?.iter().fold(7, |all, said| all & byte(said)),
    };
    if all & 1 == 0 {
        return Ok(None);
    }
    slots.iter_mut().for_each(|(_, filling)| filling.set_loss_scale(loss_scale));
    let theirs = slots.split_off(1);
    let (_, own) = slots.pop().expect("its own comes first");
    Ok(Some(Opened { own, theirs, beside: all & 2 != 0, large: all & 4 == 0 }))
}

fn byte(said: &[u8]) -> u8 {
    said.first().copied().unwrap_or(0)
}

/// Copies that are still to be carried: the own shard to its buddy, those of wards to here.
#[derive(Debug)]
pub struct Cargo {
    /// Steps done.
    pub step: u64,
    own: Arc<Slot>,
    buddy: Option<u32>,
    theirs: Vec<(u32, Filling)>,
}

impl Cargo {
    /// The own shard is whole, and can be resumed from. Gives it, and what is to be carried.
    pub fn of(
        rank: u32,
        step: u64,
        buddies: &[Option<u32>],
        Opened { own, theirs, .. }: Opened,
    ) -> (Arc<Slot>, Cargo) {
        let own = own.complete();
        let cargo = Cargo { step, own: Arc::clone(&own), buddy: buddies[rank as usize], theirs };
        (own, cargo)
    }

    /// Carries it, beside the steps. Each shard that has come can be resumed from.
    ///
    /// # Errors
    /// A peer is lost, or the attempt is over.
    pub fn carry(self, ferry: &mut Ferry) -> Result<(), CommError> {
        let Cargo { step, own, buddy, mut theirs } = self;
        let send = buddy.filter(|_| !own.is_empty()).map(|buddy| (buddy, &own[..]));
        let (send, mut arrived) = (send.into_iter().collect::<Vec<_>>(), Vec::new());
        let carried = ferry.carry(step, &send, &mut into(&mut theirs), &mut arrived);
        // Also where the ward is lost meanwhile: then it is what is left of it.
        let is_here = |(ward, filling): &(u32, Filling)| {
            arrived.contains(ward) || carried.is_ok() && filling.is_empty()
        };
        let here = theirs.into_iter().filter(is_here);
        here.for_each(|(_, filling)| drop(filling.complete()));
        carried
    }
}

/// Where the shards of wards go.
fn into(theirs: &mut [(u32, Filling)]) -> Vec<(u32, &mut [u8])> {
    let all = theirs.iter_mut().map(|(ward, filling)| (*ward, filling.bytes_mut()));
    all.filter(|(_, memory)| !memory.is_empty()).collect()
}

/// The own shard is whole: exchanges it with the buddies.
///
/// # Errors
/// A peer is lost; what is complete stays.
pub fn complete(
    memory: &Memory,
    comm: &mut Comm,
    buddies: &[Option<u32>],
    Opened { own, mut theirs, .. }: Opened,
) -> Result<Arc<Slot>, SnapshotError> {
    let own = own.complete();
    let buddy = buddies[comm.rank() as usize];
    let send = buddy.filter(|_| !own.is_empty()).map(|buddy| (buddy, &own[..]));
    // All take part, so that the call has the same number everywhere.
    if buddies.iter().any(Option::is_some) {
        comm.exchange_bulk(&send.into_iter().collect::<Vec<_>>(), &mut into(&mut theirs))?;
    }
    theirs.into_iter().for_each(|(_, filling)| drop(filling.complete()));
    memory.trim();
    memory.rest();
    Ok(own)
}
