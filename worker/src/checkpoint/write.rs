//! Writing: shards from snapshots in a thread of its own, and the commit.

use super::manifest::{NOT_FINITE, PARTS};
use super::values::{first_non_finite, name_of};
use super::{Disk, list, seal};
use crate::engine::diagnosis::place;
use crate::attempt::fence::{self, FenceError, staging_name};
use crate::state::slots::Slot;
use crate::state::snapshot::{ShardRun, shard_runs};
use moejob_kernels::DType;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::{
    CHECKPOINT_VERSION, FileEntry, Part, Piece, TensorEntry, directory_name,
};
use moejob_protocol::layout::Layout;
use moejob_protocol::model::{ModelConfig, Param};
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;
use std::fs::File;
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, MutexGuard};
use std::thread::JoinHandle;
use std::time::{Duration, Instant};

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
    pub data_fingerprint: String,
    pub seed: u64,
    pub tokens_per_step: u64,
    pub float_bytes: usize,
    pub location: PathBuf,
    pub keep: u32,
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
}

impl Identity {
    fn float(&self) -> DType {
        if self.float_bytes == 8 { DType::F64 } else { DType::F32 }
    }

    fn dtype(&self) -> &'static str {
        name_of(self.float())
    }

    fn staging(&self, step: u64) -> PathBuf {
        self.location.join(staging_name(self.attempt, step))
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
                let part = match part {
                    Part::Weight => "weight",
                    Part::Moment1 => "moment1",
                    Part::Moment2 => "moment2",
                };
                let name =
                    format!("{part}/{}/{}", self.params[run.index].name, run.elements.start);
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

/// Writes this rank's shard of `step` into staging and makes it durable.
///
/// # Errors
/// Storage failed, the shard exists already, or a value is not finite.
pub fn write_shard(
    disk: &Disk,
    identity: &Identity,
    step: u64,
    bytes: &[u8],
) -> std::io::Result<()> {
    let staging = identity.staging(step);
    let runs = identity.runs(identity.rank);
    for run in &runs {
        let len = (run.elements.end - run.elements.start) as usize * identity.float_bytes;
        let values = &bytes[run.offset..run.offset + len * PARTS.len()];
        if first_non_finite(values, identity.float()).is_some() {
            let name = place(&identity.params[run.index]);
            let message = format!("{name} after step {step}: {NOT_FINITE}");
            return Err(std::io::Error::other(message));
        }
    }
    disk.create_directory(&staging)?;
    let header = identity.header(&runs)?;
    let name = format!("a{}-r{}-0.safetensors", identity.attempt, identity.rank);
    let mut file = disk.create_new(&staging.join(&name))?;
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
    };
    let mut file = disk.create_new(&staging.join(identity.pieces_name(identity.rank)))?;
    disk.write(&mut file, &serde_json::to_vec(&written)?)?;
    disk.sync(&file)?;
    disk.sync_directory(&staging)
}

/// Puts the acknowledged shards of all ranks together: manifest, then the rename that commits.
/// `last_word` is asked right before the rename; gives whether it was done.
///
/// # Errors
/// `Fenced` under a higher claim; or storage failed.
pub fn commit(
    disk: &Disk,
    identity: &Identity,
    step: u64,
    last_word: impl FnOnce() -> bool,
) -> Result<bool, FenceError> {
    let staging = identity.staging(step);
    let io = |source| FenceError::Io { path: staging.clone(), source };
    let manifest = assemble(identity, step).map_err(io)?;
    let sealed = seal(&manifest).map_err(|error| io(error.into()))?;
    let (part, whole) = (staging.join("manifest.json.part"), staging.join("manifest.json"));
    (|| {
        let mut file = disk.create_new(&part)?;
        disk.write(&mut file, &sealed)?;
        disk.sync(&file)?;
        drop(file);
        for rank in 0..identity.layout.mesh.world() {
            disk.remove_file(&staging.join(identity.pieces_name(rank)))?;
        }
        disk.rename(&part, &whole)?;
        disk.sync_directory(&staging)
    })()
    .map_err(io)?;
    if !last_word() {
        return Ok(false);
    }
    if let Some(claimed) = fence::higher(&identity.location, identity.attempt)? {
        return Err(FenceError::Fenced { own: identity.attempt, claimed });
    }
    let target = identity.location.join(directory_name(step));
    (|| {
        if target.exists() {
            // It does not count, or this attempt would have resumed from it.
            let aside = format!(".aside-a{}-{}", identity.attempt, directory_name(step));
            disk.rename(&target, &identity.location.join(aside))?;
        }
        disk.rename(&staging, &target)?;
        disk.sync_directory(&identity.location)
    })()
    .map_err(io)?;
    Ok(true)
}

fn assemble(identity: &Identity, step: u64) -> std::io::Result<CheckpointManifest> {
    let staging = identity.staging(step);
    let world = identity.layout.mesh.world();
    let mut files = Vec::new();
    let mut pieces: BTreeMap<(usize, usize), Vec<Piece>> = BTreeMap::new();
    for rank in 0..world {
        let text = std::fs::read(staging.join(identity.pieces_name(rank)))?;
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
        data_fingerprint: identity.data_fingerprint.clone(),
        seed: identity.seed,
        tensors,
        files,
    })
}

/// Removes all but the newest `keep` checkpoints that count; gives the steps of those removed.
///
/// # Errors
/// Storage failed.
pub fn prune(disk: &Disk, location: &Path, keep: u32) -> Result<Vec<u64>, FenceError> {
    let io = |source| FenceError::Io { path: location.to_path_buf(), source };
    let claims = fence::claims(location)?;
    let mut counted: Vec<_> = list(location)
        .map_err(io)?
        .into_iter()
        .filter(|found| {
            let manifest = found.manifest.as_ref();
            manifest.is_ok_and(|manifest| fence::counts(&claims, manifest.attempt, found.step))
        })
        .collect();
    counted.truncate(counted.len().saturating_sub(keep.max(1) as usize));
    let mut removed = Vec::new();
    for found in counted {
        // Out of sight first, so that a half-removed one is never taken for a checkpoint.
        let gone = location.join(format!(".gone-{}", found.name));
        disk.rename(&found.path, &gone).map_err(io)?;
        disk.remove_directory(&gone).map_err(io)?;
        removed.push(found.step);
    }
    Ok(removed)
}

/// What the writer has done so far.
#[derive(Clone, Debug, Default)]
pub struct Progress {
    /// Steps in the newest shard that is durable.
    pub written: u64,
    /// Steps in the newest checkpoint committed.
    pub committed: u64,
    /// Steps of the checkpoints removed since, as more than `keep`.
    pub removed: Vec<u64>,
    pub error: Option<String>,
    pub fenced_by: Option<u32>,
}

enum Job {
    Shard { step: u64, bytes: Arc<Slot> },
    Commit { step: u64 },
}

/// Jobs that wait at most: a shard and its commit.
const JOBS_MAX: usize = 2;

/// Between two looks at a writer that is to end.
const END_POLL: Duration = Duration::from_millis(1);

/// The thread that writes, so that steps go on meanwhile.
#[derive(Debug)]
pub struct Writer {
    jobs: Option<SyncSender<Job>>,
    shared: Arc<Mutex<Shared>>,
    thread: Option<JoinHandle<()>>,
}

#[derive(Debug, Default)]
struct Shared {
    progress: Progress,
    cancelled: bool,
}

fn lock(shared: &Mutex<Shared>) -> MutexGuard<'_, Shared> {
    shared.lock().unwrap_or_else(std::sync::PoisonError::into_inner)
}

impl Writer {
    /// Starts the thread. `metrics` is made durable before each manifest.
    ///
    /// # Errors
    /// No thread could be started.
    pub fn start(
        identity: Identity,
        disk: Disk,
        metrics: Option<File>,
    ) -> std::io::Result<Writer> {
        let (jobs, queue) = sync_channel(JOBS_MAX);
        let shared = Arc::<Mutex<Shared>>::default();
        let theirs = Arc::clone(&shared);
        let work = move || run(&identity, &disk, metrics.as_ref(), &queue, &theirs);
        let thread = std::thread::Builder::new().name("checkpoint".to_string()).spawn(work)?;
        Ok(Writer { jobs: Some(jobs), shared, thread: Some(thread) })
    }

    /// Writes this rank's shard of `step`.
    pub fn shard(&self, step: u64, bytes: Arc<Slot>) {
        self.send(Job::Shard { step, bytes });
    }

    /// All ranks have acknowledged `step`: commit it.
    pub fn commit(&self, step: u64) {
        self.send(Job::Commit { step });
    }

    fn send(&self, job: Job) {
        let sent = self.jobs.as_ref().map(|jobs| jobs.send(job));
        if !matches!(sent, Some(Ok(()))) {
            lock(&self.shared).progress.error.get_or_insert("the writer has ended".to_string());
        }
    }

    pub fn progress(&self) -> Progress {
        lock(&self.shared).progress.clone()
    }

    /// The checkpoints removed since this was last asked.
    pub fn take_removed(&self) -> Vec<u64> {
        std::mem::take(&mut lock(&self.shared).progress.removed)
    }

    /// From now on nothing is committed; what is committed already is told by `progress`.
    pub fn cancel(&self) {
        lock(&self.shared).cancelled = true;
    }

    /// Waits until a cancelled writer writes no more, for at most so long: storage may hang. Says
    /// whether it has ended.
    pub fn end_within(&mut self, most: Duration) -> bool {
        self.jobs = None;
        let since = Instant::now();
        while self.thread.as_ref().is_some_and(|thread| !thread.is_finished()) {
            if since.elapsed() >= most {
                return false;
            }
            std::thread::sleep(END_POLL);
        }
        self.finish();
        true
    }

    /// Waits until everything asked for is done.
    pub fn finish(&mut self) {
        self.jobs = None;
        if let Some(thread) = self.thread.take() {
            // A panic there was reported as an error, or nothing was acknowledged.
            let _ = thread.join();
        }
    }
}

impl Drop for Writer {
    fn drop(&mut self) {
        self.cancel();
    }
}

fn run(
    identity: &Identity,
    disk: &Disk,
    metrics: Option<&File>,
    queue: &Receiver<Job>,
    shared: &Mutex<Shared>,
) {
    while let Ok(job) = queue.recv() {
        let done = match job {
            Job::Shard { .. } | Job::Commit { .. } if lock(shared).cancelled => continue,
            Job::Shard { step, bytes } => write_shard(disk, identity, step, &bytes)
                .map(|()| lock(shared).progress.written = step)
                .map_err(|source| FenceError::Io { path: identity.staging(step), source }),
            Job::Commit { step } => commit_and_prune(identity, disk, metrics, shared, step),
        };
        if let Err(error) = done {
            let progress = &mut lock(shared).progress;
            match &error {
                FenceError::Fenced { claimed, .. } => progress.fenced_by = Some(*claimed),
                FenceError::Io { source, .. } => {
                    progress.error.get_or_insert(format!("{error}: {source}"));
                }
            }
        }
    }
}

fn commit_and_prune(
    identity: &Identity,
    disk: &Disk,
    metrics: Option<&File>,
    shared: &Mutex<Shared>,
    step: u64,
) -> Result<(), FenceError> {
    if let Some(metrics) = metrics {
        let io = |source| FenceError::Io { path: identity.location.clone(), source };
        metrics.sync_data().map_err(io)?;
    }
    // Held over the rename, so that nothing is committed once `cancel` has returned.
    let mut held = None;
    let last_word = || !held.insert(lock(shared)).cancelled;
    let committed = commit(disk, identity, step, last_word)?;
    if let Some(mut shared) = held.filter(|_| committed) {
        shared.progress.committed = step;
    }
    let removed = prune(disk, &identity.location, identity.keep)?;
    lock(shared).progress.removed.extend(removed);
    Ok(())
}
