//! Loading a checkpoint of any layout into this rank's memory.

use super::manifest::{NOT_FINITE, PARTS};
use super::values::{first_non_finite, float_named};
use super::{Problem, Refusal, open};
use crate::engine::model::Model;
use crate::state::snapshot::{intersect, needed, place_for};
use moejob_kernels::DType;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::{Piece, TensorEntry};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// Shards of one checkpoint, opened as they are needed.
pub(crate) struct Shards<'a> {
    directory: &'a Path,
    manifest: &'a CheckpointManifest,
    open: HashMap<u32, File>,
}

impl<'a> Shards<'a> {
    pub(crate) fn new(directory: &'a Path, manifest: &'a CheckpointManifest) -> Shards<'a> {
        Shards { directory, manifest, open: HashMap::new() }
    }

    /// The bytes of a piece, once their hash is right.
    pub(crate) fn piece(&mut self, piece: &Piece) -> Result<Vec<u8>, Problem> {
        let entry = &self.manifest.files[piece.file as usize];
        let problem = |why: String| Problem::new(&entry.name, &why);
        if !self.open.contains_key(&piece.file) {
            let (file, bytes) = open(&self.directory.join(&entry.name))
                .map_err(|error| problem(error.to_string()))?;
            if bytes != entry.bytes {
                return Err(problem(format!("{bytes} bytes, {} were written", entry.bytes)));
            }
            self.open.insert(piece.file, file);
        }
        let mut bytes = vec![0; (piece.end - piece.begin) as usize];
        let file = &self.open[&piece.file];
        file.read_exact_at(&mut bytes, piece.begin).map_err(|error| problem(error.to_string()))?;
        if blake3::hash(&bytes).to_hex().as_str() != piece.blake3 {
            let (begin, end) = (piece.begin, piece.end);
            return Err(problem(format!("the BLAKE3 of bytes {begin}..{end} differs: damaged")));
        }
        Ok(bytes)
    }
}

/// Fills the state of `model` from the checkpoint in `directory`, whose manifest was read and
/// found to be this job's. Every byte is verified before it is copied; after an error the state
/// is not to be used.
///
/// # Errors
/// Names the file or tensor that is damaged.
pub fn load(
    directory: &Path,
    manifest: &CheckpointManifest,
    model: &mut Model,
) -> Result<(), Refusal> {
    let mut shards = Shards::new(directory, manifest);
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    for (at, tensor) in manifest.tensors.iter().enumerate() {
        let (index, part) = (at / PARTS.len(), at % PARTS.len());
        load_tensor(&mut shards, tensor, index, part, model)
            .map_err(|problem| Refusal::of(name, vec![problem]))?;
    }
    Ok(())
}

fn load_tensor(
    shards: &mut Shards,
    tensor: &TensorEntry,
    index: usize,
    part: usize,
    model: &mut Model,
) -> Result<(), Problem> {
    let float_bytes = model.shape.float_bytes;
    let param = &model.params[index];
    let needed = needed(&model.config, &model.layout, index, param, model.rank, part);
    for piece in &tensor.pieces {
        let Some(wanted) = intersect(&needed, &(piece.start..piece.start + piece.len)) else {
            continue;
        };
        let bytes = shards.piece(piece)?;
        check_values(tensor, &bytes)?;
        let start = ((wanted.start - piece.start) * float_bytes) as usize;
        let len = ((wanted.end - wanted.start) * float_bytes) as usize;
        let into = place_for(model, index, part, &wanted).expect("what is needed has a place");
        model.device.write(into.reinterpret(DType::U8), &bytes[start..start + len]);
    }
    Ok(())
}

/// No state that training makes holds anything but finite numbers.
fn check_values(tensor: &TensorEntry, bytes: &[u8]) -> Result<(), Problem> {
    let dtype = float_named(&tensor.dtype).unwrap_or(DType::F64);
    match first_non_finite(bytes, dtype) {
        None => Ok(()),
        Some(_) => Err(Problem::new(&tensor.name, NOT_FINITE)),
    }
}

/// Every piece of every tensor.
pub(super) fn verify_pieces(directory: &Path, manifest: &CheckpointManifest) -> Vec<Problem> {
    let mut shards = Shards::new(directory, manifest);
    let mut problems = Vec::new();
    for tensor in &manifest.tensors {
        for piece in &tensor.pieces {
            let read = shards.piece(piece).and_then(|bytes| check_values(tensor, &bytes));
            problems.extend(read.err());
        }
    }
    problems
}
