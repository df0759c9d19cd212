//! Loading a checkpoint of any layout into this rank's memory, with whatever number of slices its
//! experts have.

use super::manifest::{NOT_FINITE, PARTS};
use super::recut::Sources;
use super::values::{first_non_finite, float_named};
use super::{Disk, Problem, Refusal};
use crate::state::rank::{RankState, intersect};
use moejob_kernels::DType;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::{Part, Piece, TensorEntry};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Shards of one checkpoint, opened as they are needed.
pub(crate) struct Shards<'a> {
    disk: &'a Disk,
    directory: &'a Path,
    manifest: &'a CheckpointManifest,
    open: HashMap<u32, File>,
}

impl<'a> Shards<'a> {
    pub(crate) fn new(
        disk: &'a Disk,
        directory: &'a Path,
        manifest: &'a CheckpointManifest,
    ) -> Shards<'a> {
        Shards { disk, directory, manifest, open: HashMap::new() }
    }

    /// The bytes of a piece, once their hash is right.
    pub(crate) fn piece(&mut self, piece: &Piece) -> Result<Vec<u8>, Problem> {
        let entry = &self.manifest.files[piece.file as usize];
        let problem = |why: String| Problem::new(&entry.name, &why);
        if !self.open.contains_key(&piece.file) {
            let (file, bytes) = (self.disk.open(&self.directory.join(&entry.name)))
                .map_err(|error| Problem::of_io(&entry.name, &error))?;
            if bytes != entry.bytes {
                return Err(problem(format!("{bytes} bytes, {} were written", entry.bytes)));
            }
            self.open.insert(piece.file, file);
        }
        let mut bytes = vec![0; (piece.end - piece.begin) as usize];
        let file = &self.open[&piece.file];
        file.read_exact_at(&mut bytes, piece.begin)
            .map_err(|error| Problem::of_io(&entry.name, &error))?;
        if blake3::hash(&bytes).to_hex().as_str() != piece.blake3 {
            let (begin, end) = (piece.begin, piece.end);
            return Err(problem(format!("the BLAKE3 of bytes {begin}..{end} differs: damaged")));
        }
        Ok(bytes)
    }
}

/// Fills the state of a rank from the checkpoint in `directory`, whose manifest was read and
/// found to be this job's. Every byte is verified before it is copied; after an error the state
/// is not to be used. What came counts once the state was finished.
///
/// # Errors
/// Names the file or tensor that is damaged.
pub fn load(
    disk: &Disk,
    directory: &Path,
    manifest: &CheckpointManifest,
    state: &mut impl RankState,
) -> Result<(), Refusal> {
    let mut shards = Shards::new(disk, directory, manifest);
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let refused = |problem| Refusal::of(name, vec![problem]);
    if manifest.model.slices().each != state.table().model.slices().each {
        load_recut(&mut shards, manifest, state).map_err(refused)?;
        state.set_loss_scale(manifest.loss_scale);
        return Ok(());
    }
    for (at, tensor) in manifest.tensors.iter().enumerate() {
        let (index, part) = (at / PARTS.len(), PARTS[at % PARTS.len()]);
        load_tensor(&mut shards, tensor, index, part, state).map_err(refused)?;
    }
    state.set_loss_scale(manifest.loss_scale);
    Ok(())
}

/// The same where experts are cut into another number of slices.
fn load_recut(
    shards: &mut Shards,
    manifest: &CheckpointManifest,
    state: &mut impl RankState,
) -> Result<(), Problem> {
    let sources = Sources::new(&manifest.model);
    let (model, params) = (state.table().model.clone(), state.table().params.to_vec());
    for (index, param) in params.iter().enumerate() {
        for (at, part) in PARTS.into_iter().enumerate() {
            let needed = state.table().needed(part, index);
            if needed.is_empty() {
                continue;
            }
            if model.cut(param).is_none() {
                let tensor = &manifest.tensors[sources.other(param)? * PARTS.len() + at];
                load_tensor(shards, tensor, index, part, state)?;
                continue;
            }
            let of = (&model, param);
            let bytes = sources.read(shards, (manifest, part), of, &needed)?;
            state.write(part, index, needed, &bytes);
        }
    }
    Ok(())
}

fn load_tensor(
    shards: &mut Shards,
    tensor: &TensorEntry,
    index: usize,
    part: Part,
    state: &mut impl RankState,
) -> Result<(), Problem> {
    let table = state.table();
    let (float_bytes, needed) = (table.stored.size() as u64, table.needed(part, index));
    for piece in &tensor.pieces {
        let Some(wanted) = intersect(&needed, &(piece.start..piece.start + piece.len)) else {
            continue;
        };
        let bytes = shards.piece(piece)?;
        check_values(tensor, &bytes)?;
        let start = ((wanted.start - piece.start) * float_bytes) as usize;
        let len = ((wanted.end - wanted.start) * float_bytes) as usize;
        state.write(part, index, wanted, &bytes[start..start + len]);
    }
    Ok(())
}

/// No state that training makes holds anything but finite numbers.
pub(super) fn check_values(tensor: &TensorEntry, bytes: &[u8]) -> Result<(), Problem> {
    let dtype = float_named(&tensor.dtype).unwrap_or(DType::F64);
    match first_non_finite(bytes, dtype) {
        None => Ok(()),
        Some(_) => Err(Problem::new(&tensor.name, NOT_FINITE)),
    }
}

/// Every piece of every tensor.
pub(super) fn verify_pieces(
    disk: &Disk,
    directory: &Path,
    manifest: &CheckpointManifest,
) -> Vec<Problem> {
    let mut shards = Shards::new(disk, directory, manifest);
    let mut problems = Vec::new();
    for tensor in &manifest.tensors {
        for piece in &tensor.pieces {
            let read = shards.piece(piece).and_then(|bytes| check_values(tensor, &bytes));
            problems.extend(read.err());
        }
    }
    problems
}
