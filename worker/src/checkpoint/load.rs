//! Loading a checkpoint of any layout into this rank's memory, with whatever number of slices its
//! experts have.
//!
//! ```text
//! what the rank needs -> reads, in their order -> threads: bytes, hash, values -> the rank's state
//! ```

use super::manifest::{NOT_FINITE, PARTS};
use super::recut::Sources;
use super::values::{first_non_finite, float_named};
use super::{Disk, Problem, Refusal};
use crate::disk::OpenFile;
use crate::state::rank::{RankState, intersect};
use moejob_kernels::DType;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::{Part, Piece, TensorEntry};
use moejob_protocol::model::{ModelConfig, Param};
use std::collections::HashMap;
use std::ops::Range;
use std::path::Path;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::sync_channel;
use std::sync::{Condvar, Mutex, PoisonError};

/// Bytes read at once: what comes is told this often.
const BLOCK: usize = 4 << 20;
/// Threads that read, where there is enough to read.
const THREADS_MAX: usize = 8;
/// Bytes that are read and not yet in the state, unless one read has more.
const ON_THE_WAY_MAX: u64 = 256 << 20;
/// Below this no thread is worth its start.
const ALONE_BYTES_MAX: u64 = 4 << 20;

/// Shards of one checkpoint, opened as they are needed.
pub(crate) struct Shards<'a> {
    disk: &'a Disk,
    directory: &'a Path,
    manifest: &'a CheckpointManifest,
    open: HashMap<u32, OpenFile>,
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
        let (file, mut hasher) = (&self.open[&piece.file], blake3::Hasher::new());
        for (block, at) in bytes.chunks_mut(BLOCK).zip((piece.begin..).step_by(BLOCK)) {
            file.read_exact_at(block, at).map_err(|error| Problem::of_io(&entry.name, &error))?;
            hasher.update(block);
            self.disk.progress().read(block.len() as u64);
        }
        if hasher.finalize().to_hex().as_str() != piece.blake3 {
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
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    let refused = |problem| Refusal::of(name, vec![problem]);
    let wanted = Wanted::of(manifest, state).map_err(refused)?;
    let open = || Shards::new(disk, directory, manifest);
    wanted.read_all(&open, disk, state).map_err(refused)?;
    state.set_loss_scale(manifest.loss_scale);
    Ok(())
}

/// One thing to read, and where it belongs in the state.
struct Read {
    part: Part,
    /// Of the rank's table.
    index: usize,
    elements: Range<u64>,
    source: Source,
    bytes: u64,
}

enum Source {
    /// A piece of a tensor of the manifest.
    Piece { tensor: usize, piece: usize },
    /// Elements of an expert that is cut into another number of slices there.
    Slices,
}

/// All that a rank needs of a checkpoint.
struct Wanted<'a> {
    manifest: &'a CheckpointManifest,
    /// Where experts are cut otherwise.
    sources: Option<Sources>,
    model: ModelConfig,
    params: Vec<Param>,
    reads: Vec<Read>,
}

impl<'a> Wanted<'a> {
    fn of(
        manifest: &'a CheckpointManifest,
        state: &impl RankState,
    ) -> Result<Wanted<'a>, Problem> {
        let table = state.table();
        let recut = manifest.model.slices().each != table.model.slices().each;
        let sources = recut.then(|| Sources::new(&manifest.model));
        let size = table.stored.size() as u64;
        let mut reads = Vec::new();
        for (index, param) in table.params.iter().enumerate() {
            for (at, part) in PARTS.into_iter().enumerate() {
                let needed = table.needed(part, index);
                if needed.is_empty() {
                    continue;
                }
                if sources.is_some() && table.model.cut(param).is_some() {
                    let bytes = (needed.end - needed.start) * size;
                    let (elements, source) = (needed, Source::Slices);
                    reads.push(Read { part, index, elements, source, bytes });
                    continue;
                }
                let of = sources.as_ref().map_or(Ok(index), |sources| sources.other(param))?;
                let tensor = of * PARTS.len() + at;
                for (piece, found) in manifest.tensors[tensor].pieces.iter().enumerate() {
                    let range = found.start..found.start + found.len;
                    let Some(elements) = intersect(&needed, &range) else { continue };
                    let bytes = found.end - found.begin;
                    let source = Source::Piece { tensor, piece };
                    reads.push(Read { part, index, elements, source, bytes });
                }
            }
        }
        let (model, params) = (table.model.clone(), table.params.to_vec());
        Ok(Wanted { manifest, sources, model, params, reads })
    }

    /// The bytes of a read, as they are stored.
    fn read(&self, read: &Read, shards: &mut Shards) -> Result<Vec<u8>, Problem> {
        let manifest = self.manifest;
        match (&read.source, &self.sources) {
            (Source::Piece { tensor, piece }, _) => {
                let tensor = &manifest.tensors[*tensor];
                let piece = &tensor.pieces[*piece];
                let mut bytes = shards.piece(piece)?;
                check_values(tensor, &bytes)?;
                let size = bytes.len() as u64 / piece.len.max(1);
                let start = ((read.elements.start - piece.start) * size) as usize;
                let len = ((read.elements.end - read.elements.start) * size) as usize;
                if start > 0 {
                    bytes.drain(..start);
                }
                bytes.truncate(len);
                Ok(bytes)
            }
            (Source::Slices, Some(sources)) => {
                let of = (&self.model, &self.params[read.index]);
                sources.read(shards, (manifest, read.part), of, &read.elements)
            }
            (Source::Slices, None) => unreachable!("slices are read where there are others"),
        }
    }

    /// Reads all of it, on threads where that is worth it, and puts it into the state.
    fn read_all<'s>(
        &self,
        open: &(dyn Fn() -> Shards<'s> + Sync),
        disk: &Disk,
        state: &mut impl RankState,
    ) -> Result<(), Problem> {
        let reads = &self.reads;
        let bytes: u64 = reads.iter().map(|read| read.bytes).sum();
        disk.progress().expect(bytes);
        let threads = crate::data::threads().min(THREADS_MAX).min(reads.len());
        if threads <= 1 || bytes <= ALONE_BYTES_MAX {
            let mut shards = open();
            for read in reads {
                let bytes = self.read(read, &mut shards)?;
                state.write(read.part, read.index, read.elements.clone(), &bytes);
            }
            return Ok(());
        }
        let (next, failed, room) = (AtomicUsize::new(0), AtomicBool::new(false), Room::default());
        let (came, coming) = sync_channel(threads);
        let work = |came: std::sync::mpsc::SyncSender<_>| {
            let mut shards = open();
            while !failed.load(Ordering::Relaxed) {
                let number = next.fetch_add(1, Ordering::Relaxed);
                let Some(read) = reads.get(number) else { return };
                room.take(read.bytes);
                let bytes = self.read(read, &mut shards);
                failed.fetch_or(bytes.is_err(), Ordering::Relaxed);
                if came.send((number, bytes)).is_err() {
                    return;
                }
            }
        };
        std::thread::scope(|scope| {
            let work = &work;
            let start = |came| {
                std::thread::Builder::new().spawn_scoped(scope, move || work(came)).is_ok()
            };
            let started = (0..threads).filter(|_| start(came.clone())).count();
            drop(came);
            if started == 0 {
                return Err(Problem::new(".", "the system gives no thread to read it"));
            }
            let mut first: Option<(usize, Problem)> = None;
            for (number, bytes) in coming {
                let read = &reads[number];
                room.give(read.bytes);
                match bytes {
                    Ok(bytes) => {
                        state.write(read.part, read.index, read.elements.clone(), &bytes);
                    }
                    Err(problem) if first.as_ref().is_none_or(|(other, _)| number < *other) => {
                        first = Some((number, problem));
                    }
                    Err(_) => {}
                }
            }
            first.map_or(Ok(()), |(_, problem)| Err(problem))
        })
    }
}

/// Bytes that are on their way.
#[derive(Default)]
struct Room(Mutex<u64>, Condvar);

impl Room {
    /// Waits for room; whatever is alone has some.
    fn take(&self, bytes: u64) {
        let taken = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        let full = |taken: &mut u64| *taken > 0 && *taken + bytes > ON_THE_WAY_MAX;
        let mut taken =
            self.1.wait_while(taken, full).unwrap_or_else(PoisonError::into_inner);
        *taken += bytes;
    }

    fn give(&self, bytes: u64) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner) -= bytes;
        self.1.notify_all();
    }
}

/// No state that training makes holds anything but finite numbers.
pub(super) fn check_values(tensor: &TensorEntry, bytes: &[u8]) -> Result<(), Problem> {
    let dtype = float_named(&tensor.dtype).unwrap_or(DType::F64);
    match first_non_finite(bytes, dtype) {
        None => Ok(()),
        Some(_) => Err(Problem::new(&tensor.name, NOT_FINITE)),
    }
}
