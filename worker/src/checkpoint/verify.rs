//! Every byte of a checkpoint, compared with what its manifest says.
//!
//! ```text
//! manifest -> files -> a share of them for each rank -> a thread a file: BLAKE3 of the file, and
//!                                                        of each piece as it passes
//! ```
//! A file is read once, block after block, and each block counts as progress.

use super::load::{Shards, check_values};
use super::manifest::NOT_FINITE;
use super::values::{first_non_finite, float_named};
use super::{Disk, Problem, read, safetensors};
use crate::disk::OpenFile;
use moejob_kernels::DType;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::{FileEntry, Piece, TensorEntry};
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, PoisonError};

/// Bytes read at once: a multiple of every number's.
const BLOCK: usize = 1 << 20;
/// Files that are read at once: each has a thread.
const THREADS_MAX: usize = 8;
/// Below this no thread is worth its start.
const ALONE_BYTES_MAX: u64 = 4 << 20;

/// Reads every byte of a checkpoint and compares it with the manifest.
///
/// # Errors
/// Everything that is wrong with it.
pub fn verify(disk: &Disk, directory: &Path) -> Result<CheckpointManifest, Vec<Problem>> {
    verify_share(disk, directory, (0, 1))
}

/// The same of share `index` of `of`: those of all shares together are every byte.
///
/// # Errors
/// Everything that is wrong with it.
pub fn verify_share(
    disk: &Disk,
    directory: &Path,
    share: (usize, usize),
) -> Result<CheckpointManifest, Vec<Problem>> {
    let manifest = read(disk, directory)?;
    let problems = problems(disk, directory, &manifest, share);
    if problems.is_empty() { Ok(manifest) } else { Err(problems) }
}

/// A piece, and the first tensor that names it.
type Named<'a> = (&'a Piece, &'a TensorEntry);

fn problems(
    disk: &Disk,
    directory: &Path,
    manifest: &CheckpointManifest,
    share: (usize, usize),
) -> Vec<Problem> {
    let own = of_share(&manifest.files, share);
    let mut pieces: Vec<Vec<Named>> = manifest.files.iter().map(|_| Vec::new()).collect();
    for tensor in &manifest.tensors {
        for piece in &tensor.pieces {
            pieces[piece.file as usize].push((piece, tensor));
        }
    }
    let work = |file: usize| {
        let mut of_file = pieces[file].clone();
        of_file.sort_by_key(|(piece, _)| (piece.begin, piece.end));
        of_file.dedup_by_key(|(piece, _)| (piece.begin, piece.end, &piece.blake3));
        let entry = &manifest.files[file];
        let whole = Whole { disk, directory, manifest, entry };
        let found = whole.verify(&of_file);
        found.unwrap_or_else(|problem| (vec![problem], Vec::new()))
    };
    let bytes: u64 = own.iter().map(|file| manifest.files[*file].bytes).sum();
    disk.progress().expect(bytes);
    let mut found = on_threads(&own, bytes, &work);
    found.sort_by_key(|(file, _)| *file);
    let (files, pieces): (Vec<_>, Vec<_>) = found.into_iter().map(|(_, found)| found).unzip();
    // A file that is damaged says all of its pieces.
    let files: Vec<Problem> = files.into_iter().flatten().collect();
    if files.is_empty() { pieces.into_iter().flatten().collect() } else { files }
}

/// The files of a share, the largest first: each goes to the share that has the fewest bytes.
fn of_share(files: &[FileEntry], (index, of): (usize, usize)) -> Vec<usize> {
    let mut order: Vec<usize> = (0..files.len()).collect();
    order.sort_by_key(|file| std::cmp::Reverse(files[*file].bytes));
    let mut loads = vec![0; of.max(1)];
    let mut own = Vec::new();
    for file in order {
        let least = (0..loads.len()).min_by_key(|share| loads[*share]).unwrap_or(0);
        loads[least] += files[file].bytes.max(1);
        if least == index {
            own.push(file);
        }
    }
    own
}

fn on_threads<T: Send>(
    files: &[usize],
    bytes: u64,
    work: &(dyn Fn(usize) -> T + Sync),
) -> Vec<(usize, T)> {
    let alone = || files.iter().map(|file| (*file, work(*file))).collect();
    let threads = crate::data::threads().min(THREADS_MAX).min(files.len());
    if threads <= 1 || bytes <= ALONE_BYTES_MAX {
        return alone();
    }
    let (next, found) = (AtomicUsize::new(0), Mutex::new(Vec::new()));
    let each = || {
        while let Some(file) = files.get(next.fetch_add(1, Ordering::Relaxed)) {
            let of_file = work(*file);
            found.lock().unwrap_or_else(PoisonError::into_inner).push((*file, of_file));
        }
    };
    std::thread::scope(|scope| {
        for _ in 1..threads {
            // Without a thread this one does more.
            let _ = std::thread::Builder::new().spawn_scoped(scope, each);
        }
        each();
    });
    found.into_inner().unwrap_or_else(PoisonError::into_inner)
}

/// One file, all of it.
struct Whole<'a> {
    disk: &'a Disk,
    directory: &'a Path,
    manifest: &'a CheckpointManifest,
    entry: &'a FileEntry,
}

impl Whole<'_> {
    /// What is wrong with the pieces of a file that is as it was written.
    fn verify(&self, pieces: &[Named]) -> Result<(Vec<Problem>, Vec<Problem>), Problem> {
        let Whole { entry, .. } = self;
        let problem = |why: &str| Problem::new(&entry.name, why);
        let failed = |error: std::io::Error| match error.kind() {
            std::io::ErrorKind::NotFound => problem("it is missing"),
            _ => Problem::of_io(&entry.name, &error),
        };
        let (file, bytes) = self.disk.open(&self.directory.join(&entry.name)).map_err(failed)?;
        if bytes != entry.bytes {
            return Err(problem(&format!("{bytes} bytes, {} were written", entry.bytes)));
        }
        let (mut hasher, mut block) = (blake3::Hasher::new(), vec![0; BLOCK]);
        let (mut at, mut wrong, mut apart) = (0, Vec::new(), Vec::new());
        let mut pass = |from: u64, to: u64, see: &mut dyn FnMut(&[u8])| {
            self.pass(&file, from..to, &mut block, &mut |block| {
                hasher.update(block);
                see(block);
            })
        };
        for (piece, tensor) in pieces {
            // Pieces may have bytes in common: zeros lie in a file once.
            if piece.begin < at {
                apart.push((*piece, *tensor));
                continue;
            }
            pass(at, piece.begin, &mut |_| {}).map_err(failed)?;
            let (mut own, mut finite) = (blake3::Hasher::new(), true);
            let dtype = float_named(&tensor.dtype).unwrap_or(DType::F64);
            let see = &mut |block: &[u8]| {
                own.update(block);
                finite &= first_non_finite(block, dtype).is_none();
            };
            pass(piece.begin, piece.end, see).map_err(failed)?;
            at = piece.end;
            if own.finalize().to_hex().as_str() != piece.blake3 {
                let (begin, end) = (piece.begin, piece.end);
                let why = format!("the BLAKE3 of bytes {begin}..{end} differs: damaged");
                wrong.push(problem(&why));
            } else if !finite {
                wrong.push(Problem::new(&tensor.name, NOT_FINITE));
            }
        }
        pass(at, bytes, &mut |_| {}).map_err(failed)?;
        if hasher.finalize().to_hex().as_str() != entry.blake3 {
            return Err(problem("its BLAKE3 differs: damaged"));
        }
        safetensors::read_header(&file, bytes).map_err(failed)?;
        let mut shards = Shards::new(self.disk, self.directory, self.manifest);
        for (piece, tensor) in apart {
            let read = shards.piece(piece).and_then(|bytes| check_values(tensor, &bytes));
            wrong.extend(read.err());
        }
        Ok((Vec::new(), wrong))
    }

    fn pass(
        &self,
        file: &OpenFile,
        range: std::ops::Range<u64>,
        block: &mut [u8],
        see: &mut dyn FnMut(&[u8]),
    ) -> std::io::Result<()> {
        let mut at = range.start;
        while at < range.end {
            let count = (range.end - at).min(block.len() as u64) as usize;
            file.read_exact_at(&mut block[..count], at)?;
            see(&block[..count]);
            self.disk.progress().read(count as u64);
            at += count as u64;
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn shares_are_all_files_once_and_alike() {
        let entry = |bytes| FileEntry { name: String::new(), bytes, blake3: String::new() };
        let files: Vec<FileEntry> = [70, 10, 30, 30, 0, 20, 60].map(entry).into();
        for of in 1..9 {
            let share = |index| of_share(&files, (index, of));
            let shares: Vec<Vec<usize>> = (0..of).map(share).collect();
            let mut all: Vec<usize> = shares.iter().flatten().copied().collect();
            all.sort_unstable();
            assert_eq!(all, (0..files.len()).collect::<Vec<_>>(), "{of} shares");
        }
        let loads = |of: usize| -> Vec<u64> {
            let own = |index| of_share(&files, (index, of));
            let load = |index| own(index).iter().map(|at| files[*at].bytes).sum();
            (0..of).map(load).collect()
        };
        assert_eq!(loads(2).iter().max(), Some(&110));
        assert_eq!(loads(3).iter().max(), Some(&80));
    }
}
