//! Tensors of a checkpoint whose experts are cut into another number of slices than those of
//! whoever reads it: see [`moejob_protocol::slices`].
//!
//! ```text
//! tensor of a slice wanted --Cut--> elements of its whole expert <--Cut-- tensors that there are
//! ```
//! A checkpoint has the tensors that were trained, slice by slice, so nothing is rearranged while
//! one is written. Whoever reads it with another number takes the elements from where they lie.

use super::load::{Shards, check_values};
use super::manifest::PARTS;
use super::values::float_named;
use super::Problem;
use crate::state::rank::intersect;
use moejob_kernels::DType;
use moejob_protocol::checkpoint::{CheckpointManifest, Part, TensorEntry};
use moejob_protocol::model::{ModelConfig, Param};
use moejob_protocol::slices::Cut;
use std::collections::HashMap;
use std::ops::Range;

/// Where the tensors of a checkpoint's table are, by what they are parts of.
#[derive(Clone, Debug)]
pub struct Sources {
    /// Of an expert's tensor: the slices that there are, in their order. Positions in the table.
    slices: HashMap<String, Vec<(usize, Cut)>>,
    /// Of all others.
    others: HashMap<String, usize>,
}

impl Sources {
    /// Those of the table of `model`.
    pub fn new(model: &ModelConfig) -> Sources {
        let mut slices = HashMap::<String, Vec<(usize, Cut)>>::new();
        let mut others = HashMap::new();
        for (at, param) in model.params().into_iter().enumerate() {
            match model.cut(&param) {
                Some(cut) => slices.entry(cut.whole.clone()).or_default().push((at, cut)),
                None => _ = others.insert(param.name, at),
            }
        }
        Sources { slices, others }
    }

    /// The position of the tensor that has `param`, which is no expert's.
    pub fn other(&self, param: &Param) -> Result<usize, Problem> {
        self.others.get(&param.name).copied().ok_or_else(|| missing(&param.name))
    }

    /// The position of a tensor that has some of `param`, of the table of `model`.
    pub fn first(&self, model: &ModelConfig, param: &Param) -> Result<usize, Problem> {
        let Some(cut) = model.cut(param) else { return self.other(param) };
        let slices = self.slices.get(&cut.whole).and_then(|slices| slices.first());
        slices.map(|(at, _)| *at).ok_or_else(|| missing(&cut.whole))
    }

    /// The elements `needed` of a part of `param`, an expert's of the table of `model`, as they are
    /// stored. Every value was found to be finite.
    ///
    /// # Errors
    /// Names the file or tensor that is damaged.
    pub(crate) fn read(
        &self,
        shards: &mut Shards,
        (manifest, part): (&CheckpointManifest, Part),
        (model, param): (&ModelConfig, &Param),
        needed: &Range<u64>,
    ) -> Result<Vec<u8>, Problem> {
        let cut = model.cut(param).ok_or_else(|| missing(&param.name))?;
        let slices = self.slices.get(&cut.whole).ok_or_else(|| missing(&cut.whole))?;
        let at = PARTS.iter().position(|of| *of == part).unwrap_or(0);
        let mut bytes = Vec::new();
        for (index, from) in slices.iter().filter(|(_, from)| overlap(from, &cut)) {
            let tensor = &manifest.tensors[index * PARTS.len() + at];
            let size = float_named(&tensor.dtype).unwrap_or(DType::F32).size();
            bytes.resize((needed.end - needed.start) as usize * size, 0);
            let found = whole(shards, tensor)?;
            for run in from.runs() {
                for piece in cut.within(run.in_whole..run.in_whole + run.len) {
                    let own = piece.in_slice..piece.in_slice + piece.len;
                    let Some(kept) = intersect(needed, &own) else { continue };
                    let in_whole = piece.in_whole + (kept.start - piece.in_slice);
                    let source = (run.in_slice + (in_whole - run.in_whole)) as usize * size;
                    let target = (kept.start - needed.start) as usize * size;
                    let len = (kept.end - kept.start) as usize * size;
                    bytes[target..target + len].copy_from_slice(&found[source..source + len]);
                }
            }
        }
        Ok(bytes)
    }
}

fn missing(name: &str) -> Problem {
    Problem::new(name, "the checkpoint's model has no such tensor")
}

/// Whether two parts of an expert's tensor have elements in common: their first runs have then,
/// since runs of both begin at equal places of rows that are equally long.
fn overlap(one: &Cut, other: &Cut) -> bool {
    let first = |cut: &Cut| cut.from..cut.from + cut.run;
    intersect(&first(one), &first(other)).is_some()
}

/// All bytes of a tensor.
fn whole(shards: &mut Shards, tensor: &TensorEntry) -> Result<Vec<u8>, Problem> {
    let mut bytes = Vec::new();
    for piece in &tensor.pieces {
        bytes.extend(shards.piece(piece)?);
    }
    check_values(tensor, &bytes)?;
    Ok(bytes)
}
