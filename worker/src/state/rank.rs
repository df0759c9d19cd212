//! What snapshots, moves, checkpoints, imports and exports need of a rank: its state as logical
//! tensors of stored floats, wherever and however its device keeps them.
//!
//! ```text
//! StateTable: which elements of which part of which parameter a rank needs
//! RankState:  stored floats <-> those elements in its memory
//! ```
//! Stored floats are fp32 whatever the precision of training, and fp64 of fp64 jobs.

use moejob_kernels::{DType, Pages, Strided};
use moejob_protocol::checkpoint::{Part, ScaleEntry};
use moejob_protocol::layout::Layout;
use moejob_protocol::model::{ModelConfig, Param, Role};
use moejob_protocol::owners::Owners;
use std::ops::Range;

/// Which state a rank has.
#[derive(Clone, Copy, Debug)]
pub struct StateTable<'a> {
    pub model: &'a ModelConfig,
    /// Its parameter table.
    pub params: &'a [Param],
    pub layout: &'a Layout,
    /// What the layout says of the whole table.
    pub owners: &'a Owners,
    pub rank: u32,
    /// F32 or F64.
    pub stored: DType,
}

impl StateTable<'_> {
    /// See [`needed`].
    pub fn needed(&self, part: Part, index: usize) -> Range<u64> {
        needed(self.owners, index, &self.params[index], self.rank, part)
    }
}

/// The elements of a part of a parameter that `rank` needs to train. Masters are needed by who
/// keeps the weights that are made of them; moments by owners.
pub fn needed(owners: &Owners, index: usize, param: &Param, rank: u32, part: Part) -> Range<u64> {
    match part {
        Part::Master => owners.kept(index, param, rank),
        _ => owners.of(index, param, rank),
    }
}

pub fn intersect(a: &Range<u64>, b: &Range<u64>) -> Option<Range<u64>> {
    let both = a.start.max(b.start)..a.end.min(b.end);
    (both.start < both.end).then_some(both)
}

/// The device does not have what was asked of it: bytes that were read before this say nothing.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum DeviceError {
    /// Only a new process can use it again.
    #[error("the device failed: {0}")]
    Failed(String),
    /// Its memory is full, and others may have it.
    #[error("the device has no room: {0}")]
    Full(String),
    /// Its work may be right and waits for another rank, which was lost.
    #[error("{0}")]
    GivenUp(String),
    /// It hangs, or a rank that it waits for does.
    #[error("this rank or one that it waits for hangs: {0}")]
    Hangs(String),
}

/// The state of one rank. A device may put work off and may fail at any of it, so nothing that was
/// read or written counts before [`RankState::finish`].
///
/// Elements are of the flattened logical parameter at `index` of the table. Calls cost the same
/// however much they move, so they are few and large: a run of an owner at a time.
pub trait RankState {
    fn table(&self) -> StateTable<'_>;

    /// Copies elements that this rank owns into `into`, which has as many stored floats. Of a
    /// master that it holds and does not own it gives the weight that is computed with.
    fn read(&mut self, part: Part, index: usize, elements: Range<u64>, into: &mut [u8]);

    /// [`RankState::read`] of all `pieces`, whose `pages` stay mapped or leave.
    fn read_all(&mut self, pieces: Vec<(Part, usize, Range<u64>, &mut [u8])>, pages: Pages);

    /// Sets elements that this rank needs. With a master goes the weight that is computed with;
    /// where a rank holds and does not own, it may keep the weight alone.
    fn write(&mut self, part: Part, index: usize, elements: Range<u64>, from: &[u8]);

    /// [`RankState::write`] of all `pieces`, which do not overlap.
    fn write_all(&mut self, pieces: &[(Part, usize, Range<u64>, &[u8])]);

    /// Sets all of the master of a parameter that is needed, and its weight.
    fn fill(&mut self, index: usize, value: f64);

    /// The same, from a normal distribution: a function of `normal` and the element.
    fn fill_normal(&mut self, index: usize, normal: &Normal);

    /// All moments become zero.
    fn clear_moments(&mut self);

    /// What the next step's loss is multiplied by, the same on every rank; none but in fp16.
    fn loss_scale(&self) -> Option<ScaleEntry> {
        None
    }

    /// Goes on with a scale that was kept; with none, from the first one. Not in fp16 it is
    /// nothing.
    fn set_loss_scale(&mut self, _kept: Option<ScaleEntry>) {}

    /// Waits for all of the above.
    ///
    /// # Errors
    /// The first failure of the device since it was made.
    fn finish(&mut self) -> Result<(), DeviceError>;
}

/// Initial values of one parameter.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Normal {
    pub seed: u64,
    /// Of the logical name; of a slice that of its whole expert.
    pub name_hash: u64,
    /// Where the parameter's elements lie in what that name is of.
    pub place: Strided,
    pub std: f64,
}

/// Of a parameter's name: what its initial values and its random rounding depend on.
pub fn name_hash(param: &Param) -> u64 {
    hash_of_name(&param.name)
}

/// The same of a name.
pub fn hash_of_name(name: &str) -> u64 {
    let hash = blake3::hash(name.as_bytes());
    let (first, _) = hash.as_bytes().split_first_chunk::<8>().expect("32 bytes");
    u64::from_le_bytes(*first)
}

/// A parameter's name, with layer and expert in words.
pub fn place(param: &Param) -> String {
    match param.role {
        Role::Expert { layer, expert } => {
            // The role has the id of a slice where there are some, and the name the expert's.
            let of_name = param.name.split(".experts.").nth(1).and_then(|at| at.split('.').next());
            let expert = of_name.map_or_else(|| expert.to_string(), str::to_string);
            format!("{} (expert {expert} of layer {layer})", param.name)
        }
        _ => {
            let rest = param.name.strip_prefix("model.layers.");
            match rest.and_then(|rest| rest.split('.').next()) {
                Some(layer) => format!("{} (layer {layer})", param.name),
                None => param.name.clone(),
            }
        }
    }
}
