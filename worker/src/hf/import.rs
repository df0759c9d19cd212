//! Hugging Face directory -> a checkpoint of step 0.
//!
//! Weights keep the bits and the float type that they have; moments are zeros, which lie in the
//! file once and are named by every piece.

use super::text;
use super::weights::Weights;
use crate::checkpoint::staging::{Failed, Staging, Writing, runs};
use crate::checkpoint::values::name_of;
use crate::checkpoint::{PARTS, seal};
use moejob_protocol::checkpoint::{
    CHECKPOINT_VERSION, CheckpointManifest, Part, Piece, TensorEntry, directory_name,
};
use moejob_protocol::layout::{BLOCK, Layout};
use moejob_protocol::mesh::Mesh;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};

/// Elements of a piece: what a reader verifies and holds at once.
const PIECE_ELEMENTS: u64 = 1 << 20;
/// Bytes of a shard at most, unless one tensor is larger.
const SHARD_BYTES_MAX: u64 = 1 << 30;
const ZEROS: &str = "moments/zeros";

/// Writes `out/step-00000000` and gives its path. `progress` hears bytes done and in all.
///
/// # Errors
/// Something stands in its place, the disk is full, or a weight is refused.
pub fn import(
    weights: &Weights,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PathBuf, Failed> {
    let target = out.join(directory_name(0));
    let staging = Staging::new(out, &target)?;
    let mut writing = Writing::new(&staging.path, weights.bytes(), progress);
    let params = weights.params();
    let sizes = params.iter().enumerate().map(|(index, param)| {
        param.numel() * weights.dtype(index).size() as u64
    });
    let shards = runs(&sizes.collect::<Vec<_>>(), SHARD_BYTES_MAX);
    let zeros = params.iter().map(|param| param.numel()).max().unwrap_or(0).min(PIECE_ELEMENTS);
    let mut tensors = Vec::new();
    let mut moments = HashMap::new();
    let mut zero_bytes = 0;
    for (number, shard) in shards.into_iter().enumerate() {
        let name = format!("a0-r0-{number}.safetensors");
        let mut entries = Vec::new();
        if number == 0 {
            entries.push((ZEROS.to_string(), "F32", vec![zeros], zeros * 4));
        }
        for index in shard.clone() {
            let (param, dtype) = (&params[index], weights.dtype(index));
            let bytes = param.numel() * dtype.size() as u64;
            let name = format!("{}/{}/0", Part::Master.name(), param.name);
            entries.push((name, name_of(dtype), vec![param.numel()], bytes));
        }
        writing.begin(&name, &entries)?;
        if number == 0 {
            zero_bytes = writing.at();
            let block = vec![0; (zeros * 4) as usize];
            writing.write(&block, false)?;
            let lengths = params.iter().flat_map(|param| pieces(param.numel()).map(|(_, len)| len));
            for len in lengths {
                moments.entry(len).or_insert_with(|| {
                    blake3::hash(&block[..(len * 4) as usize]).to_hex().to_string()
                });
            }
        }
        for index in shard {
            let found = stream_pieces(weights, index, number as u32, &mut writing)?;
            tensors.push((index, found));
        }
        writing.end()?;
    }
    let mut entries = Vec::new();
    for (index, found) in tensors {
        let param = &params[index];
        let mut entry = |part, dtype: &str, pieces| {
            let (name, shape, dtype) = (param.name.clone(), param.shape.clone(), dtype.to_string());
            entries.push(TensorEntry { name, part, dtype, shape, pieces });
        };
        let [weight, moment1, moment2] = PARTS;
        entry(weight, name_of(weights.dtype(index)), found);
        for part in [moment1, moment2] {
            entry(part, "F32", zero_pieces(param.numel(), zero_bytes, &moments));
        }
    }
    let manifest = CheckpointManifest {
        version: CHECKPOINT_VERSION,
        job_uid: "imported".to_string(),
        job_name: name_of_directory(weights),
        attempt: 0,
        step: 0,
        tokens: 0,
        model: weights.model().clone(),
        layout: Layout::contiguous(Mesh::data_parallel(1, 1)),
        spec_hash: String::new(),
        training_hash: String::new(),
        data_fingerprint: String::new(),
        seed: 0,
        loss_scale: None,
        tensors: entries,
        files: writing.files.clone(),
        others: BTreeMap::new(),
    };
    let sealed = seal(&manifest).map_err(|error| staging.io(error.into()))?;
    staging.small_file("manifest.json", &sealed)?;
    let path = staging.commit(&target)?;
    text::keep_imported(weights, out)
        .map_err(|source| Failed::Write { path: out.to_path_buf(), source })?;
    Ok(path)
}

fn name_of_directory(weights: &Weights) -> String {
    let name = weights.path().file_name();
    name.map(|name| name.to_string_lossy().into_owned()).unwrap_or_default()
}

/// First elements and lengths.
fn pieces(numel: u64) -> impl Iterator<Item = (u64, u64)> {
    const { assert!(PIECE_ELEMENTS.is_multiple_of(BLOCK), "pieces begin at blocks") };
    (0..numel.div_ceil(PIECE_ELEMENTS)).map(move |at| {
        let start = at * PIECE_ELEMENTS;
        (start, PIECE_ELEMENTS.min(numel - start))
    })
}

fn stream_pieces(
    weights: &Weights,
    index: usize,
    file: u32,
    writing: &mut Writing,
) -> Result<Vec<Piece>, Failed> {
    let width = weights.dtype(index).size() as u64;
    let mut found = Vec::new();
    let mut failed = None;
    let streamed = weights.stream(index, &mut |start, bytes| {
        let begin = writing.at();
        if let Err(error) = writing.write(bytes, true) {
            let problem = error.as_problem();
            failed = Some(error);
            return Err(problem);
        }
        let len = bytes.len() as u64 / width;
        let blake3 = blake3::hash(bytes).to_hex().to_string();
        found.push(Piece { file, begin, end: begin + bytes.len() as u64, start, len, blake3 });
        Ok(())
    });
    match (failed, streamed) {
        (Some(error), _) => Err(error),
        (None, streamed) => streamed.map(|()| found).map_err(Failed::Refused),
    }
}

fn zero_pieces(numel: u64, begin: u64, hashes: &HashMap<u64, String>) -> Vec<Piece> {
    let piece = |(start, len): (u64, u64)| Piece {
        file: 0,
        begin,
        end: begin + len * 4,
        start,
        len,
        blake3: hashes.get(&len).cloned().unwrap_or_default(),
    };
    pieces(numel).map(piece).collect()
}
