//! Writing: a rank's shard from its snapshot, the commit of all of them, and what goes for them.
//!
//! Whatever fails can be done again from its beginning: storage may fail between any two effects
//! and heal later.

use super::aside::{Put, set_aside};
use super::fence::{self, FenceError, aside_name, staging_name};
use super::manifest::{NOT_FINITE, PARTS, check, manifest_in};
use super::values::{first_non_finite, name_of};
use super::{Disk, Problem, Refusal, seal, verify};
use crate::state::rank::place;
use crate::state::slot::Slot;
use crate::state::snapshot::{ShardRun, shard_runs};
use moejob_kernels::DType;
use moejob_protocol::canonical::training_hash;
use moejob_protocol::config::Precision;
use moejob_protocol::{CheckpointManifest, WorkerConfig};
use moejob_protocol::checkpoint::{
    CHECKPOINT_VERSION, FileEntry, MANIFEST_BYTES_MAX, Piece, ScaleEntry, TENSORS_MAX, TensorEntry,
    directory_name,
};
use moejob_protocol::layout::Layout;
use moejob_protocol::model::{ModelConfig, Param};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};

/// Everything about a job and attempt that a checkpoint carries.
#[derive(Clone, Debug)]
pub struct Identity {
    pub job_uid: String,
    pub job_name: String,
    pub attempt: u32,
    pub rank: u32,
    pub model: ModelConfig,
    pub params: Vec<Param>,
    pub layout: Layout,
    pub spec_hash: String,
    pub training_hash: String,
    pub data_fingerprint: String,
    pub seed: u64,
    pub tokens_per_step: u64,
    pub float_bytes: usize,
    pub location: PathBuf,
    pub keep: u32,
}

/// What rank 0 says beside its shard.
#[derive(Clone, Debug, Default)]
pub struct Beside {
    /// The loss that was measured behind the step, where the best checkpoint is kept.
    pub held_out: Option<f64>,
    /// What its GPU has chosen, sealed; see [`super::products`].
    pub products: Option<String>,
}

/// `aN-rR.pieces`: what a rank tells rank 0's writer about its shard, beside it in staging.
#[derive(Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct Written {
    file: FileEntry,
    /// Where the data begins in the file.
    data: u64,
    /// BLAKE3 of each run's weights and moments, in shard order, hex.
    pieces: Vec<String>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    loss_scale: Option<ScaleEntry>,
}

impl Identity {
    /// Of the rank that `config` names.
    pub fn of(config: &WorkerConfig, data_fingerprint: &str) -> Identity {
        let training = &config.training;
        Identity {
            job_uid: config.job_uid.clone(),
            job_name: config.job_name.clone(),
            attempt: config.attempt,
            rank: config.rank.unwrap_or_default(),
            model: config.model.clone(),
            params: config.model.params(),
            layout: config.layout.clone(),
            spec_hash: config.checkpoint.spec_hash.clone(),
            training_hash: training_hash(training, config.data.validation.fraction),
            data_fingerprint: data_fingerprint.to_string(),
            seed: training.seed,
            tokens_per_step: training.tokens_per_step(),
            float_bytes: if training.precision == Precision::Fp64 { 8 } else { 4 },
            location: PathBuf::from(&config.checkpoint.location),
            keep: config.checkpoint.keep,
        }
    }

    fn float(&self) -> DType {
        if self.float_bytes == 8 { DType::F64 } else { DType::F32 }
    }

    fn dtype(&self) -> &'static str {
        name_of(self.float())
    }

    pub(super) fn staging(&self, step: u64) -> PathBuf {
        self.location.join(staging_name(self.attempt, step))
    }

    /// What was written of a checkpoint that is given up makes room for a newer one. The next
    /// attempt tidies what is left here.
    pub(super) fn clear(&self, disk: &Disk, step: u64) {
        let _ = disk.remove_directory(&self.staging(step));
    }

    fn runs(&self, rank: u32) -> Vec<ShardRun> {
        shard_runs(&self.model, &self.params, &self.layout, rank, self.float_bytes).0
    }

    fn pieces_name(&self, rank: u32) -> String {
        format!("a{}-r{rank}.pieces", self.attempt)
    }

    /// The safetensors header of a shard, padded so that the data is aligned.
    fn header(&self, runs: &[ShardRun]) -> Result<Vec<u8>, serde_json::Error> {
        #[derive(Serialize)]
        struct Entry {
            dtype: &'static str,
            shape: [u64; 1],
            data_offsets: [usize; 2],
        }
        let mut entries = BTreeMap::new();
        for run in runs {
            let len = run.elements.end - run.elements.start;
            let bytes = len as usize * self.float_bytes;
            for (at, part) in PARTS.iter().enumerate() {
                let begin = run.offset + at * bytes;
                let (part, of) = (part.name(), &self.params[run.index].name);
                let name = format!("{part}/{of}/{}", run.elements.start);
                let data_offsets = [begin, begin + bytes];
                entries.insert(name, Entry { dtype: self.dtype(), shape: [len], data_offsets });
            }
        }
        let mut json = serde_json::to_vec(&entries)?;
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut header = (json.len() as u64).to_le_bytes().to_vec();
        header.append(&mut json);
        Ok(header)
    }
}

/// Why a shard is not written.
#[derive(Debug, thiserror::Error)]
pub enum WriteError {
    /// No storage can help it.
    #[error("{0}")]
    NotFinite(String),
    #[error("{0}")]
    Io(#[from] std::io::Error),
}

/// Writes this rank's shard of `step` into staging and makes it durable; may be called again after
/// it failed.
///
/// # Errors
/// Storage failed, or a value is not finite.
pub fn write_shard(
    disk: &Disk,
    identity: &Identity,
    step: u64,
    shard: &Slot,
) -> Result<(), WriteError> {
    let bytes: &[u8] = shard;
    let staging = identity.staging(step);
    let runs = identity.runs(identity.rank);
    for run in &runs {
        let len = (run.elements.end - run.elements.start) as usize * identity.float_bytes;
        let values = &bytes[run.offset..run.offset + len * PARTS.len()];
        if first_non_finite(values, identity.float()).is_some() {
            let name = place(&identity.params[run.index]);
            let message = format!("{name} after step {step}: {NOT_FINITE}");
            return Err(WriteError::NotFinite(message));
        }
    }
    disk.create_directory(&staging)?;
    let header = identity.header(&runs).map_err(std::io::Error::from)?;
    let name = format!("a{}-r{}-0.safetensors", identity.attempt, identity.rank);
    let mut file = disk.create_anew(&staging.join(&name))?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&header);
    disk.write(&mut file, &header)?;
    let mut pieces = Vec::with_capacity(runs.len() * PARTS.len());
    for run in &runs {
        let len = (run.elements.end - run.elements.start) as usize * identity.float_bytes;
        let all = &bytes[run.offset..run.offset + len * PARTS.len()];
        pieces.extend(all.chunks(len).map(|part| blake3::hash(part).to_hex().to_string()));
        hasher.update(all);
    }
    disk.write(&mut file, bytes)?;
    disk.sync(&file)?;
    let written = Written {
        file: FileEntry {
            name,
            bytes: (header.len() + bytes.len()) as u64,
            blake3: hasher.finalize().to_hex().to_string(),
        },
        data: header.len() as u64,
        pieces,
        loss_scale: shard.loss_scale(),
    };
    let mut file = disk.create_anew(&staging.join(identity.pieces_name(identity.rank)))?;
    disk.write(&mut file, &serde_json::to_vec(&written).map_err(std::io::Error::from)?)?;
    disk.sync(&file)?;
    // The entry of the staging directory, too: nobody else will make it durable before the commit.
    disk.sync_directory(&staging)?;
    Ok(disk.sync_directory(&identity.location)?)
}

/// How a commit ended that did not fail.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Committed {
    Yes,
    /// `last_word` said no.
    No,
    /// What the ranks wrote has gone: this checkpoint will never be.
    Vanished,
    /// No reader would take it: no storage can help.
    Refused(Problem),
}

/// What became of a manifest.
enum Manifest {
    Written,
    /// The ranks' shards are not there.
    NoShards,
    Refused(Problem),
}

/// Puts the acknowledged shards of all ranks together: manifest, then the rename that commits. May
/// be called again after it failed. `last_word` is asked right before the rename.
///
/// # Errors
/// `Fenced` under a higher claim; or storage failed.
pub fn commit(
    disk: &Disk,
    identity: &Identity,
    step: u64,
    last_word: impl FnOnce() -> bool,
) -> Result<Committed, FenceError> {
    let (location, staging) = (&identity.location, identity.staging(step));
    let io = |source| FenceError::Io { path: staging.clone(), source };
    own_claim_is_highest(disk, identity)?;
    if is_committed(disk, identity, step)? {
        // An earlier try got as far as the rename and did not hear of it.
        disk.sync_directory(location).map_err(io)?;
        return Ok(Committed::Yes);
    }
    // One that an earlier try made durable says all that the ranks' pieces said, and they may be
    // gone.
    let is_made = || manifest_in(disk, &staging).is_ok_and(|made| made.step == step);
    if !is_made() {
        match write_manifest(disk, identity, step).map_err(io)? {
            Manifest::Written => {}
            Manifest::NoShards => return Ok(Committed::Vanished),
            Manifest::Refused(problem) => return Ok(Committed::Refused(problem)),
        }
        // What no reader takes back is no checkpoint. Its pieces are still there for another try.
        if !is_made() {
            return Err(io(std::io::Error::other("manifest.json is not read as it was written")));
        }
    }
    for rank in 0..identity.layout.mesh.world() {
        match disk.remove_file(&staging.join(identity.pieces_name(rank))) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => return Err(io(error)),
            _ => {}
        }
    }
    disk.sync_directory(&staging).map_err(io)?;
    if !last_word() {
        return Ok(Committed::No);
    }
    own_claim_is_highest(disk, identity)?;
    let target = location.join(directory_name(step));
    if target.exists() {
        move_aside(disk, identity, step, &target)?;
    }
    // Onto a checkpoint that came meanwhile this fails: a directory that is not empty stays.
    disk.rename(&staging, &target).map_err(io)?;
    disk.sync_directory(location).map_err(io)?;
    Ok(Committed::Yes)
}

/// Makes the manifest of a staged checkpoint durable, if readers will take it.
fn write_manifest(disk: &Disk, identity: &Identity, step: u64) -> std::io::Result<Manifest> {
    let staging = identity.staging(step);
    let manifest = match assemble(disk, identity, step) {
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => {
            return Ok(Manifest::NoShards);
        }
        assembled => assembled?,
    };
    if let Some(problem) = check(&manifest, &directory_name(step)).into_iter().next() {
        return Ok(Manifest::Refused(problem));
    }
    let sealed = seal(&manifest)?;
    if sealed.len() as u64 > MANIFEST_BYTES_MAX {
        let why = format!("{} bytes, at most {MANIFEST_BYTES_MAX}: use fewer ranks", sealed.len());
        return Ok(Manifest::Refused(Problem::new("manifest.json", &why)));
    }
    let (part, whole) = (staging.join("manifest.json.part"), staging.join("manifest.json"));
    let mut file = disk.create_anew(&part)?;
    disk.write(&mut file, &sealed)?;
    disk.sync(&file)?;
    drop(file);
    disk.rename(&part, &whole)?;
    disk.sync_directory(&staging)?;
    Ok(Manifest::Written)
}

/// The claim of this attempt lies where checkpoints go, so it is the storage that was claimed, and
/// no attempt after it has claimed.
fn own_claim_is_highest(disk: &Disk, identity: &Identity) -> Result<(), FenceError> {
    let own = identity.attempt;
    match fence::claims(disk, &identity.location)?.last() {
        Some(last) if last.attempt > own => {
            Err(FenceError::Fenced { own, claimed: last.attempt })
        }
        Some(last) if last.attempt == own => Ok(()),
        _ => {
            let why = "the claim of this attempt is not there: is another volume mounted?";
            let source = std::io::Error::other(why);
            Err(FenceError::Io { path: identity.location.join("attempts"), source })
        }
    }
}

/// This attempt's checkpoint of `step` stands in its place already.
fn is_committed(disk: &Disk, identity: &Identity, step: u64) -> Result<bool, FenceError> {
    let target = identity.location.join(directory_name(step));
    match manifest_in(disk, &target) {
        Ok(manifest) => Ok(manifest.attempt == identity.attempt
            && manifest.step == step
            && manifest.job_uid == identity.job_uid),
        Err(Some(source)) => Err(FenceError::Io { path: target, source }),
        Err(None) => Ok(false),
    }
}

/// Makes room for the commit of `step`. What stands there does not count, or this attempt would
/// have resumed from it; should it turn out to be a newer attempt's, it goes back. What is damaged
/// keeps lying there under another name.
fn move_aside(
    disk: &Disk,
    identity: &Identity,
    step: u64,
    target: &Path,
) -> Result<(), FenceError> {
    let own = identity.attempt;
    let io = |source| FenceError::Io { path: target.to_path_buf(), source };
    let newer = |path: &Path| match manifest_in(disk, path) {
        Ok(manifest) => Ok(Some(manifest.attempt).filter(|attempt| *attempt > own)),
        Err(Some(source)) => Err(io(source)),
        Err(None) => Ok(None),
    };
    if let Some(claimed) = newer(target)? {
        return Err(FenceError::Fenced { own, claimed });
    }
    if let Err(problems) = verify(disk, target) {
        let refusal = Refusal::of(&directory_name(step), problems);
        if refusal.may_heal() {
            return Err(io(std::io::Error::other(refusal.to_string())));
        }
        let put = set_aside(disk, &identity.location, &refusal).map_err(io)?;
        tracing::warn!("{refusal}; {}", put.words());
        if let Put::Aside(_) = put {
            return Ok(());
        }
    }
    let mut aside = identity.location.join(aside_name(own, step));
    for number in 1.. {
        if !aside.exists() {
            break;
        }
        aside = identity.location.join(format!("{}.{number}", aside_name(own, step)));
    }
    disk.rename(target, &aside).map_err(io)?;
    if let Some(claimed) = newer(&aside)? {
        disk.rename(&aside, target).map_err(io)?;
        return Err(FenceError::Fenced { own, claimed });
    }
    Ok(())
}

/// The longest list of a rank's pieces: a hash each.
const PIECES_BYTES_MAX: u64 = TENSORS_MAX * 128;

fn assemble(disk: &Disk, identity: &Identity, step: u64) -> std::io::Result<CheckpointManifest> {
    let staging = identity.staging(step);
    let world = identity.layout.mesh.world();
    let mut files = Vec::new();
    let mut loss_scale = None;
    let mut pieces: BTreeMap<(usize, usize), Vec<Piece>> = BTreeMap::new();
    for rank in 0..world {
        let text = disk.read(&staging.join(identity.pieces_name(rank)), PIECES_BYTES_MAX)?;
        let written: Written = serde_json::from_slice(&text)?;
        let runs = identity.runs(rank);
        if written.pieces.len() != runs.len() * PARTS.len() {
            return Err(std::io::Error::other(format!("rank {rank} wrote another layout")));
        }
        let hashes = written.pieces.chunks_exact(PARTS.len());
        for (run, hashes) in runs.iter().zip(hashes) {
            let len = run.elements.end - run.elements.start;
            let bytes = len * identity.float_bytes as u64;
            for (part, hash) in hashes.iter().enumerate() {
                let begin = written.data + run.offset as u64 + part as u64 * bytes;
                pieces.entry((run.index, part)).or_default().push(Piece {
                    file: rank,
                    begin,
                    end: begin + bytes,
                    start: run.elements.start,
                    len,
                    blake3: hash.clone(),
                });
            }
        }
        files.push(written.file);
        // The same on every rank.
        loss_scale = loss_scale.or(written.loss_scale);
    }
    let mut tensors = Vec::new();
    for (index, param) in identity.params.iter().enumerate() {
        for (at, part) in PARTS.into_iter().enumerate() {
            let mut pieces = pieces.remove(&(index, at)).unwrap_or_default();
            pieces.sort_by_key(|piece| piece.start);
            let (name, shape) = (param.name.clone(), param.shape.clone());
            tensors.push(TensorEntry { name, part, dtype: identity.dtype().into(), shape, pieces });
        }
    }
    Ok(CheckpointManifest {
        version: CHECKPOINT_VERSION,
        job_uid: identity.job_uid.clone(),
        job_name: identity.job_name.clone(),
        attempt: identity.attempt,
        step,
        tokens: step * identity.tokens_per_step,
        model: identity.model.clone(),
        layout: identity.layout.clone(),
        spec_hash: identity.spec_hash.clone(),
        training_hash: identity.training_hash.clone(),
        data_fingerprint: identity.data_fingerprint.clone(),
        seed: identity.seed,
        loss_scale,
        tensors,
        files,
        others: BTreeMap::new(),
    })
}
