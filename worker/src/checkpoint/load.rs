//! Loading a checkpoint of any layout into this rank's memory.

use super::manifest::{NOT_FINITE, PARTS, all_finite, dtype_bytes};
use super::{Problem, Refusal, open};
use crate::model::Model;
use crate::snapshot::{intersect, needed, place_for};
use moejob_kernels::DType;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::{Piece, TensorEntry};
use std::collections::HashMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// A safetensors header is at most this long.
const HEADER_BYTES_MAX: u64 = 100_000_000;

/// Shards of one checkpoint, opened as they are needed.
struct Shards<'a> {
    directory: &'a Path,
    manifest: &'a CheckpointManifest,
    open: HashMap<u32, File>,
}

impl Shards<'_> {
    /// The bytes of a piece, once their hash is right.
    fn piece(&mut self, piece: &Piece) -> Result<Vec<u8>, Problem> {
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
    let mut shards = Shards { directory, manifest, open: HashMap::new() };
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
    let width = dtype_bytes(&tensor.dtype).unwrap_or(8);
    if all_finite(bytes, width as usize) {
        return Ok(());
    }
    Err(Problem::new(&tensor.name, NOT_FINITE))
}

/// Every piece of every tensor.
pub(super) fn verify_pieces(directory: &Path, manifest: &CheckpointManifest) -> Vec<Problem> {
    let mut shards = Shards { directory, manifest, open: HashMap::new() };
    let mut problems = Vec::new();
    for tensor in &manifest.tensors {
        for piece in &tensor.pieces {
            let read = shards.piece(piece).and_then(|bytes| check_values(tensor, &bytes));
            problems.extend(read.err());
        }
    }
    problems
}

/// The safetensors header: its length, its JSON, and tensors that fill the rest without gap.
pub(super) fn check_header(file: &File, bytes: u64) -> Result<(), String> {
    let broken = |why: &str| Err(format!("its safetensors header is broken: {why}"));
    let mut prefix = [0; 8];
    if file.read_exact_at(&mut prefix, 0).is_err() {
        return broken("fewer than 8 bytes");
    }
    let length = u64::from_le_bytes(prefix);
    if length > HEADER_BYTES_MAX || length > bytes - 8 {
        return broken(&format!("a length of {length}"));
    }
    let mut header = vec![0; length as usize];
    if file.read_exact_at(&mut header, 8).is_err() {
        return broken("cut short");
    }
    #[derive(serde::Deserialize)]
    struct Entry {
        dtype: String,
        shape: Vec<u64>,
        data_offsets: [u64; 2],
    }
    let mut entries: std::collections::BTreeMap<String, serde_json::Value> =
        match serde_json::from_slice(&header) {
            Ok(entries) if header.starts_with(b"{") => entries,
            _ => return broken("no JSON"),
        };
    entries.remove("__metadata__");
    let parsed: Result<Vec<Entry>, _> = entries.into_values().map(serde_json::from_value).collect();
    let Ok(mut entries) = parsed else { return broken("an entry is no tensor") };
    entries.sort_by_key(|entry| entry.data_offsets);
    let mut at = 0;
    for entry in &entries {
        let numel = entry.shape.iter().try_fold(1_u64, |all, dim| all.checked_mul(*dim));
        let size = numel.zip(dtype_bytes(&entry.dtype)).and_then(|(n, b)| n.checked_mul(b));
        let [begin, end] = entry.data_offsets;
        if begin != at || end.checked_sub(begin) != size || size.is_none() {
            return broken("tensors with gaps, overlaps or wrong sizes");
        }
        at = end;
    }
    if at == bytes - 8 - length { Ok(()) } else { broken("tensors do not fill the file") }
}
