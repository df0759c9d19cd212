//! What files hold: a hash, and the least and largest id, by several threads.
//!
//! ```text
//! file -> segments of 16 MiB -> a thread each: chaining value, ids -> the file's BLAKE3
//! ```
//! BLAKE3 is a tree (O'Connor et al. 2020, section 2.1): segments are subtrees, whose chaining
//! values are merged to the hash that one pass over the file would give. So one large file keeps
//! all threads busy, as many small ones do.

use super::DataError;
use super::files::DataFile;
use crate::disk::{OpenFile, Progress};
use super::store::Width;
use super::tokenize;
use moejob_kernels::threads::begin;
use blake3::hazmat::{
    ChainingValue, HasherExt, Mode, merge_subtrees_non_root, merge_subtrees_root,
};
use std::panic::resume_unwind;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::mpsc::{RecvTimeoutError, channel};
use std::sync::{Mutex, PoisonError};
use std::time::{Duration, SystemTime};

/// A power of two of BLAKE3's chunks, and a whole number of ids of any width.
const SEGMENT: u64 = 16 << 20;
/// Bytes read at once: few enough for the cache.
const BLOCK: usize = 1 << 18;
/// Below this no thread is worth its start.
const ALONE_BYTES_MAX: u64 = 1 << 20;
/// Between two looks at what the threads have done.
const TICK: Duration = Duration::from_millis(100);
/// A file that is written twice within one tick of the clock of its times looks unchanged; one
/// whose times are older than this when it is read cannot be. A file system that keeps whole
/// seconds shows itself by its times.
const FRESH: Duration = Duration::from_millis(20);
const FRESH_SECONDS: Duration = Duration::from_secs(2);

/// What is asked of a file.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Wish<'a> {
    pub file: &'a DataFile,
    /// The first so many bytes count.
    pub bytes: u64,
    pub ids: Option<Ids>,
}

/// How ids lie in a file, and the first that is none.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Ids {
    pub width: Width,
    /// The first id's byte.
    pub offset: u64,
    pub vocabulary: u32,
}

/// What a file holds. Without ids `low` is above `high`.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Content {
    /// BLAKE3.
    pub hash: [u8; 32],
    pub low: i64,
    pub high: i64,
}

/// The content, and whether it is sure to be what the file's size and times stand for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Found {
    pub content: Content,
    pub settled: bool,
}

impl<'a> Wish<'a> {
    /// The whole file, of whatever bytes.
    pub fn whole(file: &'a DataFile) -> Wish<'a> {
        Wish { file, bytes: file.bytes, ids: None }
    }

    fn segments(&self) -> u64 {
        self.bytes.div_ceil(SEGMENT).max(1)
    }
}

impl Content {
    pub const NO_IDS: (i64, i64) = (i64::MAX, i64::MIN);

    /// Whether every id is one of the vocabulary.
    pub fn is_within(&self, ids: &Option<Ids>) -> bool {
        let none = self.low > self.high;
        ids.is_none_or(|ids| none || self.low >= 0 && self.high < ids.vocabulary.into())
    }
}

/// A part of a file that is being read.
struct Part {
    value: ChainingValue,
    /// Of a file of one segment.
    root: blake3::Hash,
    low: i64,
    high: i64,
    settled: bool,
}

/// Reads files whole. What was found is given also where there is an error, which is that of the
/// first file that has one; the files before it are all found then. `tick` is called every 100 ms
/// with the bytes read of each file.
pub(crate) fn read(
    wishes: &[Wish],
    threads: usize,
    progress: &Progress,
    tick: &mut dyn FnMut(&dyn Fn(usize) -> u64),
) -> (Vec<Option<Found>>, Option<(usize, DataError)>) {
    let units: Vec<(usize, u64)> = (wishes.iter().enumerate())
        .flat_map(|(index, wish)| (0..wish.segments()).map(move |segment| (index, segment)))
        .collect();
    let reading = Reading {
        wishes,
        began: SystemTime::now(),
        next: AtomicUsize::new(0),
        first_error: AtomicUsize::new(units.len()),
        parts: units.iter().map(|_| Mutex::default()).collect(),
        units,
        error: Mutex::default(),
        progress,
    };
    let bytes: u64 = wishes.iter().map(|wish| wish.bytes).sum();
    let threads = if bytes <= ALONE_BYTES_MAX { 1 } else { threads.min(reading.units.len()) };
    if threads <= 1 && bytes <= ALONE_BYTES_MAX {
        reading.work();
    } else {
        std::thread::scope(|scope| {
            let (alive, ended) = channel::<()>();
            for _ in 0..threads {
                let (reading, alive) = (&reading, alive.clone());
                begin(scope, move || {
                    reading.work();
                    drop(alive);
                });
            }
            drop(alive);
            while ended.recv_timeout(TICK) == Err(RecvTimeoutError::Timeout) {
                tick(&|index| reading.bytes_done(index));
            }
        });
    }
    reading.finish()
}

struct Reading<'a> {
    wishes: &'a [Wish<'a>],
    began: SystemTime,
    /// (file, segment), ascending.
    units: Vec<(usize, u64)>,
    next: AtomicUsize,
    /// The lowest unit that has an error; those above it need not be read.
    first_error: AtomicUsize,
    parts: Vec<Mutex<Option<Part>>>,
    error: Mutex<Option<(usize, DataError)>>,
    progress: &'a Progress,
}

impl Reading<'_> {
    fn work(&self) {
        let mut block = vec![0; BLOCK];
        loop {
            let unit = self.next.fetch_add(1, Ordering::Relaxed);
            let Some((index, segment)) = self.units.get(unit) else { return };
            if unit > self.first_error.load(Ordering::Relaxed) {
                return;
            }
            match self.segment(&self.wishes[*index], *segment, &mut block) {
                Ok(part) => *lock(&self.parts[unit]) = Some(part),
                Err(error) => {
                    self.first_error.fetch_min(unit, Ordering::Relaxed);
                    let mut first = lock(&self.error);
                    if first.as_ref().is_none_or(|(other, _)| unit < *other) {
                        *first = Some((unit, error));
                    }
                }
            }
        }
    }

    fn segment(&self, wish: &Wish, segment: u64, block: &mut [u8]) -> Result<Part, DataError> {
        let file = wish.file;
        let handle = file.open()?;
        let (mut at, end) = (segment * SEGMENT, wish.bytes.min((segment + 1) * SEGMENT));
        let mut hasher = blake3::Hasher::new();
        hasher.set_input_offset(at);
        let before = file.is_as_found(&handle)?;
        let (mut low, mut high) = Content::NO_IDS;
        while at < end {
            if self.progress.is_given_up() {
                return Err(DataError::GivenUp);
            }
            let count = block.len().min((end - at) as usize);
            let block = &mut block[..count];
            handle.read_exact_at(block, at).or_else(|source| match file.resized(&handle) {
                Some(resized) => Err(resized),
                None => Err(file.unreadable(source)),
            })?;
            hasher.update(block);
            if let Some(ids) = wish.ids {
                let (least, largest) = self.ids(wish, &ids, at, block)?;
                (low, high) = (low.min(least), high.max(largest));
            }
            at += count as u64;
            self.progress.read(count as u64);
        }
        // The last one sees that the file goes on.
        if let Some(resized) = file.resized(&handle) {
            return Err(resized);
        }
        let settled = before && file.is_as_found(&handle)? && self.is_old(&handle, file)?;
        let single = wish.segments() == 1;
        let root = if single { hasher.finalize() } else { blake3::Hash::from_bytes([0; 32]) };
        let value = if single { [0; 32] } else { hasher.finalize_non_root() };
        Ok(Part { value, root, low, high, settled })
    }

    /// The least and the largest id of a block that begins at byte `at` of its file.
    fn ids(
        &self,
        wish: &Wish,
        ids: &Ids,
        at: u64,
        block: &[u8],
    ) -> Result<(i64, i64), DataError> {
        let skip = ids.offset.saturating_sub(at).min(block.len() as u64) as usize;
        let (rest, vocabulary) = (&block[skip..], ids.vocabulary);
        let Some((low, high)) = ids.width.range(rest) else { return Ok(Content::NO_IDS) };
        if low >= 0 && high < vocabulary.into() {
            return Ok((low, high));
        }
        let first = (at + skip as u64 - ids.offset) / ids.width.bytes();
        let wrong = |id: &i64| *id < 0 || *id >= vocabulary.into();
        let mut all = ids.width.ids(rest).enumerate();
        let (index, id) = all.find(|(_, id)| wrong(id)).unwrap_or((0, low));
        let (path, at) = (wish.file.path.clone(), format!("token {}", first + index as u64));
        Err(DataError::Token { path, at, id, vocabulary })
    }

    /// Its times cannot be those of a later change as well.
    fn is_old(&self, handle: &OpenFile, file: &DataFile) -> Result<bool, DataError> {
        let since = handle.metadata().map_err(|source| file.unreadable(source))?;
        use std::os::unix::fs::MetadataExt;
        let whole_seconds = since.mtime_nsec() == 0;
        let fresh = if whole_seconds { FRESH_SECONDS } else { FRESH };
        let changed = SystemTime::UNIX_EPOCH
            + Duration::new(since.ctime().max(0) as u64, since.ctime_nsec().max(0) as u32);
        let newest = changed.max(since.modified().unwrap_or(changed));
        // A time in the future is not old either.
        Ok(self.began.duration_since(newest).is_ok_and(|age| age > fresh))
    }

    /// Bytes of file `index` whose segments are read.
    fn bytes_done(&self, index: usize) -> u64 {
        let first = self.units.partition_point(|(of, _)| *of < index);
        let units = self.units[first..].iter().zip(&self.parts[first..]);
        let own = units.take_while(|((of, _), _)| *of == index);
        let done = own.filter(|(_, part)| lock(part).is_some()).count() as u64;
        (done * SEGMENT).min(self.wishes[index].bytes)
    }

    fn finish(self) -> (Vec<Option<Found>>, Option<(usize, DataError)>) {
        let units = self.units;
        let mut parts = self.parts.into_iter().map(|part| {
            part.into_inner().unwrap_or_else(PoisonError::into_inner)
        });
        let whole = |wish: &Wish| {
            let own: Vec<Option<Part>> = parts.by_ref().take(wish.segments() as usize).collect();
            own.into_iter().collect::<Option<Vec<Part>>>().map(|own| joined(&own))
        };
        let found = self.wishes.iter().map(whole).collect();
        let error = self.error.into_inner().unwrap_or_else(PoisonError::into_inner);
        (found, error.map(|(unit, error)| (units[unit].0, error)))
    }
}

fn lock<T>(mutex: &Mutex<T>) -> std::sync::MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A file of its segments, one at least.
fn joined(parts: &[Part]) -> Found {
    let hash = match parts {
        [one] => one.root,
        parts => {
            let (left, right) = parts.split_at(left_of(parts.len()));
            merge_subtrees_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    };
    let content = Content {
        hash: *hash.as_bytes(),
        low: parts.iter().map(|part| part.low).min().unwrap_or(i64::MAX),
        high: parts.iter().map(|part| part.high).max().unwrap_or(i64::MIN),
    };
    Found { content, settled: parts.iter().all(|part| part.settled) }
}

fn subtree(parts: &[Part]) -> ChainingValue {
    match parts {
        [one] => one.value,
        parts => {
            let (left, right) = parts.split_at(left_of(parts.len()));
            merge_subtrees_non_root(&subtree(left), &subtree(right), Mode::Hash)
        }
    }
}

/// Segments of the left subtree: the largest power of two below all.
fn left_of(segments: usize) -> usize {
    segments.next_power_of_two() / 2
}

/// What `look` makes of each: it waits for files far away more than it computes.
///
/// # Errors
/// The first of them that has one.
pub(crate) fn in_parallel<T: Sync, R: Send>(
    all: &[T],
    look: impl Fn(&T) -> Result<R, DataError> + Sync,
) -> Result<Vec<R>, DataError> {
    const TOGETHER: usize = 64;
    let each = all.len().div_ceil(tokenize::threads()).max(TOGETHER);
    if each >= all.len() {
        return all.iter().map(look).collect();
    }
    let work = |some: &[T]| some.iter().map(&look).collect::<Result<Vec<R>, _>>();
    std::thread::scope(|scope| {
        let work = &work;
        let threads: Vec<_> =
            all.chunks(each).map(|some| begin(scope, move || work(some))).collect();
        let mut made = Vec::with_capacity(all.len());
        for thread in threads {
            // A panic goes on here.
            made.append(&mut thread.join().unwrap_or_else(|panic| resume_unwind(panic))?);
        }
        Ok(made)
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    fn file(folder: &std::path::Path, name: &str, bytes: &[u8]) -> DataFile {
        let path = folder.join(name);
        std::fs::write(&path, bytes).expect("a file");
        DataFile::named(&path).expect("a file")
    }

    #[test]
    fn the_hash_of_segments_is_that_of_the_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let sizes = [1, BLOCK as u64 + 1, SEGMENT - 1, SEGMENT, SEGMENT + 1, 5 * SEGMENT + 77];
        for threads in [1, 3] {
            for size in sizes {
                let bytes: Vec<u8> = (0..size).map(|at| (at * at >> 7) as u8).collect();
                let file = file(folder.path(), "a", &bytes);
                let progress = Progress::default();
                let (found, error) =
                    read(&[Wish::whole(&file)], threads, &progress, &mut |_| {});
                assert!(error.is_none());
                let found = found[0].expect("read").content;
                assert_eq!(found.hash, *blake3::hash(&bytes).as_bytes(), "{size} bytes");
                assert_eq!(progress.bytes_read(), size);
            }
        }
    }

    #[test]
    fn the_first_wrong_id_of_the_first_file_is_named() {
        let folder = tempfile::tempdir().expect("a folder");
        let tokens = (SEGMENT + (SEGMENT >> 2)) as usize / 2;
        let mut ids = vec![7_u16; tokens];
        let good = file(folder.path(), "good", &bytes_of(&ids));
        let (first, second) = (tokens - 3, tokens - 2);
        (ids[first], ids[second]) = (300, 400);
        let late = file(folder.path(), "late", &bytes_of(&ids));
        ids[5] = 900;
        let early = file(folder.path(), "early", &bytes_of(&ids));
        let ids = Some(Ids { width: Width::U16, offset: 0, vocabulary: 256 });
        for threads in [1, 4] {
            let files = [&good, &late, &early];
            let wishes = files.map(|file| Wish { file, bytes: file.bytes, ids });
            let (found, error) = read(&wishes, threads, &Progress::default(), &mut |_| {});
            let (index, error) = error.expect("a wrong id");
            let found = found[0].expect("before the error").content;
            assert_eq!((index, found.low, found.high), (1, 7, 7));
            let at = format!("token {first}: the id 300");
            assert!(error.to_string().contains(&at), "{error}");
        }
    }

    fn bytes_of(ids: &[u16]) -> Vec<u8> {
        ids.iter().flat_map(|id| id.to_le_bytes()).collect()
    }
}
