//! Documents are tokenised once a node: a file of their tokens that its workers share.
//!
//! ```text
//! key (contents, how they are read, the tokenizer) -> KEY.tokens is there and whole -> read it
//!     -> somebody is at it (KEY.lock)              -> wait while that file grows
//!     -> else KEY.PID-N.part -> rename
//! KEY.tokens: magic, key, tokens, a table of documents, counts, BLAKE3 of all before
//! KEY.lock:   its time says when the tokens were used last
//! ```
//! The folder is this user's alone. Where there is none, or little to gain, each worker has a file
//! without a name.

use super::content::Wish;
use super::files::DataFile;
use super::{DataError, index};
use super::store::{Store, Width, nameless, spool_failed as failed};
use crate::disk::{Disk, OpenFile, Verdict, verdict};
use rustix::fs::OFlags;
use std::fs::{DirBuilder, OpenOptions};
use std::io::{BufWriter, Read, Seek, SeekFrom, Write};
use std::os::unix::fs::{DirBuilderExt, MetadataExt, OpenOptionsExt, PermissionsExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};

/// Sources of fewer bytes are read faster than they are looked for.
pub(crate) const SHARED_BYTES_MIN: u64 = 8 << 20;
/// What nobody has used for so long goes when somebody writes.
const UNUSED_MAX: Duration = Duration::from_secs(7 * 24 * 3600);
/// Whoever holds the lock and writes nothing for so long is not waited for.
pub(crate) const SILENT_MAX: Duration = Duration::from_secs(10);
const POLL: Duration = Duration::from_millis(20);

const MAGIC: &[u8; 8] = b"MOETOKS2";
const KEY_BYTES: u64 = 32;
/// Of the counts and the hash at the end.
const TAIL_BYTES: u64 = 16 + 32;
/// Of a document in the table.
const ENTRY_BYTES: usize = 32;
const ENTRIES_TOGETHER: usize = 4096;
const BUFFER: usize = 1 << 18;

/// One document.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Entry {
    /// Position in the list of files.
    pub file: u64,
    /// Line or row in it, counted from 0.
    pub number: u64,
    pub tokens: u64,
    /// The first bytes of the BLAKE3 of the tokens, as they are written.
    pub hash: u64,
}

/// Documents as tokens, one after the other.
#[derive(Clone, Debug)]
pub(crate) struct Tokenized {
    pub store: Store,
    table: Arc<OpenFile>,
    /// Byte of the first entry.
    at: u64,
    documents: u64,
}

impl Tokenized {
    /// Every document, in order.
    ///
    /// # Errors
    /// The table cannot be read, or what `see` says.
    pub fn each(
        &self,
        see: &mut dyn FnMut(Entry) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut block = vec![0; ENTRIES_TOGETHER * ENTRY_BYTES];
        let (mut at, mut left) = (self.at, self.documents);
        while left > 0 {
            let count = left.min(ENTRIES_TOGETHER as u64);
            let block = &mut block[..count as usize * ENTRY_BYTES];
            self.table.read_exact_at(block, at).map_err(failed)?;
            for entry in block.as_chunks::<ENTRY_BYTES>().0 {
                let (words, _) = entry.as_chunks::<8>();
                let word = |at: usize| u64::from_le_bytes(words[at]);
                let [file, number, tokens, hash] = [0, 1, 2, 3].map(word);
                see(Entry { file, number, tokens, hash })?;
            }
            (at, left) = (at + block.len() as u64, left - count);
        }
        Ok(())
    }
}

/// Tokens and documents on their way into a file.
pub(crate) struct Making {
    disk: Disk,
    file: BufWriter<OpenFile>,
    table: BufWriter<OpenFile>,
    width: Width,
    hasher: blake3::Hasher,
    tokens: u64,
    documents: u64,
    /// Of the document that is under way, and its tokens so far.
    document: (blake3::Hasher, u64),
    bytes: Vec<u8>,
}

impl Making {
    fn new(file: OpenFile, key: &blake3::Hash, width: Width) -> Result<Making, DataError> {
        let disk = file.disk().clone();
        let table = BufWriter::with_capacity(BUFFER, nameless(&disk)?);
        let file = BufWriter::with_capacity(BUFFER, file);
        let (hasher, bytes) = (blake3::Hasher::new(), Vec::new());
        let (tokens, documents, document) = (0, 0, (blake3::Hasher::new(), 0));
        let mut making =
            Making { disk, file, table, width, hasher, tokens, documents, document, bytes };
        making.put(&[&MAGIC[..], key.as_bytes()].concat())?;
        Ok(making)
    }

    fn put(&mut self, bytes: &[u8]) -> Result<(), DataError> {
        self.hasher.update(bytes);
        self.file.write_all(bytes).map_err(failed)
    }

    /// Further tokens of the document that `document` ends.
    pub fn ids(&mut self, ids: &[u32]) -> Result<(), DataError> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.clear();
        self.width.put(ids, &mut bytes);
        self.tokens += ids.len() as u64;
        self.document.1 += ids.len() as u64;
        self.document.0.update(&bytes);
        self.put(&bytes)?;
        self.bytes = bytes;
        Ok(())
    }

    /// All tokens since the one before are document `number` of file `file`.
    pub fn document(&mut self, file: u64, number: u64) -> Result<(), DataError> {
        self.documents += 1;
        let (hasher, tokens) = &mut self.document;
        let hash = first_word(&hasher.finalize());
        let words = [file, number, *tokens, hash].map(u64::to_le_bytes);
        hasher.reset();
        *tokens = 0;
        self.table.write_all(words.as_flattened()).map_err(failed)
    }

    fn finish(mut self) -> Result<Tokenized, DataError> {
        let none = BufWriter::new(nameless(&self.disk)?);
        let mut table = std::mem::replace(&mut self.table, none)
            .into_inner()
            .map_err(|error| failed(error.into_error()))?;
        table.seek(SeekFrom::Start(0)).map_err(failed)?;
        let mut block = vec![0; BUFFER];
        loop {
            let count = table.read(&mut block).map_err(failed)?;
            if count == 0 {
                break;
            }
            self.put(&block[..count])?;
        }
        let counts = [self.tokens, self.documents].map(u64::to_le_bytes);
        self.put(counts.as_flattened())?;
        let hash = *self.hasher.finalize().as_bytes();
        self.file.write_all(&hash).map_err(failed)?;
        let (width, tokens, documents) = (self.width, self.tokens, self.documents);
        let file = self.file.into_inner().map_err(|error| failed(error.into_error()))?;
        Ok(tokenized_in(file, width, tokens, documents))
    }
}

fn first_word(hash: &blake3::Hash) -> u64 {
    let [first, ..] = hash.as_bytes().as_chunks::<8>().0 else { return 0 };
    u64::from_le_bytes(*first)
}

fn tokenized_in(file: OpenFile, width: Width, tokens: u64, documents: u64) -> Tokenized {
    let (table, offset) = (Arc::new(file), MAGIC.len() as u64 + KEY_BYTES);
    let store = Store::spooled(table.clone(), width, offset, tokens);
    Tokenized { store, table, at: offset + tokens * width.bytes(), documents }
}

type Make<'a> = &'a mut dyn FnMut(&mut Making) -> Result<(), DataError>;

/// The documents of `key`: found in `folder`, or made there by this process or another one.
/// Without a folder they are made for this process alone.
///
/// # Errors
/// What `make` says, or there is no room.
pub(crate) fn tokenized(
    folder: Option<&Path>,
    key: &blake3::Hash,
    width: Width,
    disk: &Disk,
    make: Make,
) -> Result<Tokenized, DataError> {
    let progress = disk.progress();
    let found = |folder, path: &Path| found(folder, path, key, width, disk);
    let alone = |make: Make| {
        let mut making = Making::new(nameless(disk)?, key, width)?;
        make(&mut making)?;
        making.finish()
    };
    let Some(folder) = folder else { return alone(make) };
    let name = key.to_hex();
    let path = folder.join(format!("{name}.tokens"));
    if let Some(found) = found(folder, &path) {
        return Ok(found);
    }
    let mut private = OpenOptions::new();
    private.read(true).write(true).create(true).truncate(false).mode(0o600);
    let Ok(lock) = private.open(folder.join(format!("{name}.lock"))) else { return alone(make) };
    let exclusive = rustix::fs::FlockOperation::NonBlockingLockExclusive;
    let (mut silent, mut written) = (Instant::now(), 0);
    while rustix::fs::flock(&lock, exclusive).is_err() {
        let now = bytes_of_parts(folder, &name);
        if now != written {
            (silent, written) = (Instant::now(), now);
            progress.stir();
        }
        if silent.elapsed() > SILENT_MAX {
            return alone(make);
        }
        if progress.is_given_up() {
            return Err(DataError::GivenUp);
        }
        std::thread::sleep(POLL);
    }
    // The lock goes with its handle, also when this process is killed.
    if let Some(found) = found(folder, &path) {
        return Ok(found);
    }
    forget_unused(folder, &name);
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let part = folder.join(format!("{name}.{}-{number}.part", std::process::id()));
    let Ok(file) = private.open(&part) else { return alone(make) };
    let mut making = Making::new(OpenFile::of(disk, file, &part), key, width)?;
    let part = Part { path: part };
    make(&mut making)?;
    let made = making.finish()?;
    // Not synced: after a crash of the machine the hash tells, and it is made again.
    std::fs::rename(&part.path, &path).map_err(failed)?;
    Ok(made)
}

/// A half-written file goes with whoever writes it.
struct Part {
    path: PathBuf,
}

impl Drop for Part {
    fn drop(&mut self) {
        let _ = std::fs::remove_file(&self.path);
    }
}

/// This user's own folder; none where it cannot be had, or where others may write.
pub(crate) fn folder() -> Option<PathBuf> {
    let user = rustix::process::geteuid().as_raw();
    let path = std::env::temp_dir().join(format!("moejob-tokens-{user}"));
    let _ = DirBuilder::new().mode(0o700).create(&path);
    let metadata = path.symlink_metadata().ok()?;
    let own = metadata.is_dir() && metadata.uid() == user;
    (own && metadata.permissions().mode().trailing_zeros() >= 6).then_some(path)
}

/// What stands at `path`, if it is whole and of `key`. What is not whole is removed, but not what
/// could not be read: that may be good. Its hash is looked up in the node's index, so that a large
/// file is read once.
fn found(
    folder: &Path,
    path: &Path,
    key: &blake3::Hash,
    width: Width,
    disk: &Disk,
) -> Option<Tokenized> {
    let file = match OpenFile::open(disk, path, OFlags::NOFOLLOW) {
        Ok(file) => file,
        Err(error) if verdict(&error) == Verdict::Missing => return None,
        Err(error) => {
            tracing::warn!(%error, path = %path.display(), "tokens are made once more");
            return None;
        }
    };
    match whole(folder, path, &file, key, width) {
        Ok(Some((tokens, documents))) => {
            // Used: it stays another while. Its own time is what the index knows it by.
            let lock = OpenOptions::new().write(true).open(path.with_extension("lock"));
            let _ = lock.and_then(|lock| lock.set_modified(SystemTime::now()));
            Some(tokenized_in(file, width, tokens, documents))
        }
        Ok(None) => {
            let _ = std::fs::remove_file(path);
            None
        }
        Err(DataError::GivenUp) => None,
        Err(error) => {
            let error = crate::failure::chain(&error);
            tracing::warn!(error, path = %path.display(), "tokens are made once more");
            None
        }
    }
}

/// Tokens and documents of a file whose every byte is as it was written; none: it is not whole.
///
/// # Errors
/// It cannot be told.
fn whole(
    folder: &Path,
    path: &Path,
    file: &OpenFile,
    key: &blake3::Hash,
    width: Width,
) -> Result<Option<(u64, u64)>, DataError> {
    let named = DataFile::named_on(file.disk(), path)?;
    let (mut head, mut tail) = ([0; 40], [0; TAIL_BYTES as usize]);
    let bytes = file.metadata().map_err(failed)?.len();
    let (Some(counted), Some(end)) = (bytes.checked_sub(32), bytes.checked_sub(TAIL_BYTES)) else {
        return Ok(None);
    };
    if end < head.len() as u64 {
        return Ok(None);
    }
    file.read_exact_at(&mut head, 0).map_err(failed)?;
    file.read_exact_at(&mut tail, end).map_err(failed)?;
    let (words, _) = tail.as_chunks::<8>();
    let [tokens, documents] = [0, 1].map(|at| u64::from_le_bytes(words[at]));
    let size = u128::from(tokens) * u128::from(width.bytes())
        + u128::from(documents) * ENTRY_BYTES as u128
        + 40
        + u128::from(TAIL_BYTES);
    let good = head[..8] == MAGIC[..]
        && head[8..] == key.as_bytes()[..]
        && size == u128::from(bytes)
        && named.is_as_found(file)?;
    if !good {
        return Ok(None);
    }
    let wish = Wish { file: &named, bytes: counted, ids: None };
    let contents = index::contents(&[wish], Some(folder), file.disk().progress())?;
    let same = contents.first().is_some_and(|(content, _)| tail[16..] == content.hash);
    Ok(same.then_some((tokens, documents)))
}

/// How far others are with the files of `name`.
fn bytes_of_parts(folder: &Path, name: &str) -> u64 {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let parts = entries.filter(|entry| {
        let file = entry.file_name();
        let file = file.to_string_lossy();
        file.starts_with(name) && file.ends_with(".part")
    });
    parts.filter_map(|entry| entry.metadata().ok()).map(|metadata| metadata.len() + 1).sum()
}

/// Removes what others have left, and half-written files of `name`, whose lock is held.
fn forget_unused(folder: &Path, name: &str) {
    for entry in std::fs::read_dir(folder).into_iter().flatten().flatten() {
        let file = entry.file_name();
        let file = file.to_string_lossy();
        // Tokens that are read only keep their time; that of their lock goes on.
        let age = age(&entry.path()).min(age(&entry.path().with_extension("lock")));
        if age > UNUSED_MAX || file.starts_with(name) && file.ends_with(".part") {
            let _ = std::fs::remove_file(entry.path());
        }
    }
}

fn age(path: &Path) -> Duration {
    let modified = path.symlink_metadata().and_then(|metadata| metadata.modified());
    // A time that cannot be had says nothing against it.
    modified.map_or(Duration::MAX, |time| time.elapsed().unwrap_or_default())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::sync::atomic::AtomicUsize;

    const COUNT: u64 = 10_000;

    fn made_in(folder: &Path, key: &blake3::Hash, make: Make) -> Result<Tokenized, DataError> {
        tokenized(Some(folder), key, Width::U16, &Disk::real(), make)
    }

    /// As they are written.
    fn ids_of(number: u64) -> [u8; 4] {
        let [low, high, ..] = number.to_le_bytes();
        [low, high, 7, 0]
    }

    fn fill(making: &mut Making) -> Result<(), DataError> {
        for number in 0..COUNT {
            making.ids(&[number as u32, 7])?;
            making.document(number / 100, number)?;
        }
        Ok(())
    }

    fn check(made: &Tokenized) {
        let mut number = 0;
        made.each(&mut |entry| {
            let hash = first_word(&blake3::hash(&ids_of(number)));
            assert_eq!(entry, Entry { file: number / 100, number, tokens: 2, hash });
            number += 1;
            Ok(())
        })
        .expect("the table");
        assert_eq!((number, made.store.tokens), (COUNT, 2 * COUNT));
        let mut ids = [0; 4];
        made.store.clone().read(2 * 777, &mut ids, &mut Vec::new()).expect("tokens");
        assert_eq!(ids, [777, 7, 778, 7]);
    }

    fn names(folder: &Path) -> Vec<String> {
        let entries = std::fs::read_dir(folder).expect("a folder");
        let name = |entry: std::io::Result<std::fs::DirEntry>| entry.expect("an entry").file_name();
        entries.map(|entry| name(entry).to_string_lossy().into_owned()).collect()
    }

    #[test]
    fn many_at_once_make_it_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let (key, made) = (blake3::hash(b"key"), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..8 {
                scope.spawn(|| {
                    let result = made_in(folder.path(), &key, &mut |making| {
                        made.fetch_add(1, Ordering::Relaxed);
                        std::thread::sleep(Duration::from_millis(100));
                        fill(making)
                    });
                    check(&result.expect("tokens"));
                });
            }
        });
        assert_eq!(made.into_inner(), 1);
        assert!(!names(folder.path()).iter().any(|name| name.ends_with(".part")));
        let other = blake3::hash(b"another key");
        let mut anew = 0;
        let result = made_in(folder.path(), &other, &mut |making| {
            anew += 1;
            fill(making)
        });
        check(&result.expect("tokens"));
        assert_eq!(anew, 1);
    }

    #[test]
    fn what_is_damaged_is_made_anew() {
        let folder = tempfile::tempdir().expect("a folder");
        let key = blake3::hash(b"key");
        let path = folder.path().join(format!("{}.tokens", key.to_hex()));
        let mut times = 0;
        let mut once = || {
            let result = made_in(folder.path(), &key, &mut |making| {
                times += 1;
                fill(making)
            });
            check(&result.expect("tokens"));
            times
        };
        assert_eq!((once(), once()), (1, 1));
        let good = std::fs::read(&path).expect("a file");
        for at in [0, 20, 5000, good.len() - 40, good.len() - 1] {
            let mut bytes = good.clone();
            bytes[at] ^= 4;
            std::fs::write(&path, bytes).expect("a file");
            let before = once();
            assert_eq!(std::fs::read(&path).expect("a file"), good, "byte {at}");
            assert_eq!(once(), before, "byte {at}");
        }
        std::fs::write(&path, &good[..good.len() / 2]).expect("a file");
        assert_eq!(once(), 7);
        std::fs::write(&path, b"").expect("a file");
        assert_eq!(once(), 8);
    }

    #[test]
    fn what_cannot_be_made_leaves_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        let key = blake3::hash(b"key");
        let result = made_in(folder.path(), &key, &mut |making| {
            fill(making)?;
            Err(DataError::bad(Path::new("a.jsonl"), "line 3", "bad"))
        });
        assert!(result.expect_err("a bad line").to_string().contains("line 3"));
        assert!(names(folder.path()).iter().all(|name| name.ends_with(".lock")));
        let nowhere = Some(Path::new("/nowhere/at/all"));
        let alone = tokenized(nowhere, &key, Width::U16, &Disk::real(), &mut fill);
        check(&alone.expect("without a place to share it"));
    }
}
