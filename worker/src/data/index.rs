//! What files hold is looked up once a node: an index that its workers share.
//!
//! ```text
//! files -> groups by the hash of their path -> files-XX.index: known, if size, times, inode agree
//!   the others, by groups: files-XX.lock is free -> read them, write files-XX.index anew
//!                          another has it         -> other groups first, then wait for it
//! files-XX.index: magic, count, entries, BLAKE3 of all before
//! ```
//! Workers of a node that start at once divide the groups among them. A lock goes with its holder's
//! process. An index that is torn, or another program's, is as good as none.

use super::DataError;
use super::cache::{SHARED_BYTES_MIN, SILENT_MAX};
use super::content::{self, Content, Wish};
use crate::disk::{Progress, Verdict, verdict};
use super::tokenize;
use rustix::fs::{FlockOperation, flock};
use std::collections::{BTreeMap, HashMap};
use std::fs::{File, OpenOptions};
use std::io::{self, Write};
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

const MAGIC: &[u8; 8] = b"MOEFIDX1";
/// Files in each of which a share of the entries lies: what workers divide among them.
const GROUPS: usize = 64;
/// The oldest entries of a group go when it has more: a million in all, in 143 MB.
const ENTRIES_MAX: usize = 1 << 14;
/// Bytes a thread reads before what is known is written down.
const BATCH_BYTES: u64 = 1 << 30;
/// An entry that was used is marked so at most this often.
const USED_EVERY_S: u64 = 24 * 3600;
const POLL: Duration = Duration::from_millis(20);

const HEAD_BYTES: usize = 16;
const ENTRY_BYTES: usize = 2 * 32 + 9 * 8;
const HASH_BYTES: usize = 32;

type Key = [u8; 32];

/// What the system says of a file: size, time of its content, inode, time of the inode.
type Stamp = [u64; 6];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
struct Entry {
    stamp: Stamp,
    content: Content,
    /// Seconds since 1970.
    used: u64,
}

/// The entries of a group.
#[derive(Default)]
struct Entries {
    by_key: HashMap<Key, Entry>,
    /// What lies there cannot be read, and may be good: nothing is put in its place.
    unread: bool,
}

/// What the files hold, in their order, and which of them no index knew: from `folder`'s index, or
/// read, and written there.
///
/// # Errors
/// The first file that changed, cannot be read, or has an id outside of the vocabulary.
pub(crate) fn contents(
    wishes: &[Wish],
    folder: Option<&Path>,
    progress: &Progress,
) -> Result<Vec<(Content, bool)>, DataError> {
    let bytes: u64 = wishes.iter().map(|wish| wish.bytes).sum();
    progress.expect(bytes);
    let folder = folder.filter(|_| bytes >= SHARED_BYTES_MIN);
    let found = vec![None; wishes.len()];
    let mut asking = Asking { wishes, found, progress, error: None, now: now() };
    match folder {
        None => asking.read(&(0..wishes.len()).collect::<Vec<_>>(), &mut []),
        Some(folder) => asking.ask(folder),
    }
    match asking.error {
        Some((_, error)) => Err(error),
        None => Ok(asking.found.into_iter().map(|found| found.expect("no error")).collect()),
    }
}

fn now() -> u64 {
    SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default().as_secs()
}

/// What tells entries apart: the path and how the file is read.
fn key(wish: &Wish) -> Key {
    let path = std::path::absolute(&wish.file.path);
    let path = path.as_deref().unwrap_or(&wish.file.path);
    let mut hasher = blake3::Hasher::new();
    hasher.update(&(wish.file.bytes - wish.bytes).to_le_bytes());
    let ids = wish.ids.map(|ids| (ids.width.name(), ids.offset));
    let (name, offset) = ids.unwrap_or(("bytes", 0));
    hasher.update(&offset.to_le_bytes());
    hasher.update(name.as_bytes());
    hasher.update(&[0]);
    hasher.update(path.as_os_str().as_bytes());
    *hasher.finalize().as_bytes()
}

fn group_of(key: &Key) -> usize {
    usize::from(key[0]) % GROUPS
}

fn stamp(wish: &Wish) -> Stamp {
    let file = wish.file;
    let since = file.modified.duration_since(UNIX_EPOCH).unwrap_or_default();
    let (seconds, nanoseconds) = file.changed;
    let modified = [since.as_secs(), since.subsec_nanos().into()];
    [file.bytes, modified[0], modified[1], file.inode, seconds as u64, nanoseconds as u64]
}

struct Asking<'a> {
    wishes: &'a [Wish<'a>],
    /// And whether it had to be read.
    found: Vec<Option<(Content, bool)>>,
    progress: &'a Progress,
    /// Of the first file that has one.
    error: Option<(usize, DataError)>,
    now: u64,
}

/// Files of one group, which nobody else reads meanwhile.
struct Taken {
    group: usize,
    wanted: Vec<usize>,
    /// Goes with its handle, also when this process is killed. None where the holder is silent.
    lock: Option<File>,
    entries: Entries,
}

/// A group that another worker has.
#[derive(Clone, Copy)]
struct Watched {
    life: u64,
    since: Instant,
}

impl Asking<'_> {
    fn ask(&mut self, folder: &Path) {
        let mut groups: BTreeMap<usize, Vec<usize>> = BTreeMap::new();
        for (index, wish) in self.wishes.iter().enumerate() {
            groups.entry(group_of(&key(wish))).or_default().push(index);
        }
        groups.retain(|group, wanted| {
            let mut entries = load(folder, *group);
            let stale = self.look(&mut entries, wanted);
            if let Some(_lock) = stale.then(|| try_lock(folder, *group)).flatten() {
                entries.save(folder, *group);
            }
            !wanted.is_empty()
        });
        // Workers that start at once begin with different groups.
        let mut left: Vec<(usize, Vec<usize>)> = groups.into_iter().collect();
        let turn = std::process::id() as usize % left.len().max(1);
        left.rotate_left(turn);
        let mut watched: HashMap<usize, Watched> = HashMap::new();
        while !left.is_empty() && !self.is_over() {
            let (taken, found) = self.take(folder, &mut left);
            if !taken.is_empty() {
                self.read_groups(folder, taken);
            } else if !found && !self.watch(folder, &mut left, &mut watched) {
                std::thread::sleep(POLL);
            }
        }
    }

    /// Sets `error` when nobody waits any more.
    fn is_over(&mut self) -> bool {
        if self.progress.is_given_up() {
            self.error = Some((0, DataError::GivenUp));
        }
        matches!(self.error, Some((_, DataError::GivenUp)))
    }

    /// Takes what the entries know from `wanted`; whether some should be marked as used.
    fn look(&mut self, entries: &mut Entries, wanted: &mut Vec<usize>) -> bool {
        let mut stale = false;
        wanted.retain(|index| {
            let wish = &self.wishes[*index];
            let Some(entry) = entries.by_key.get_mut(&key(wish)) else { return true };
            // An id that is too large is named by whoever reads the file.
            if entry.stamp != stamp(wish) || !entry.content.is_within(&wish.ids) {
                return true;
            }
            stale |= entry.used + USED_EVERY_S < self.now;
            entry.used = entry.used.max(self.now);
            self.progress.know(wish.bytes);
            self.found[*index] = Some((entry.content, false));
            false
        });
        stale
    }

    /// Locks groups for a batch of work, and drops those that have become known, and files behind
    /// the first that is refused. Also whether anything was dropped.
    fn take(
        &mut self,
        folder: &Path,
        left: &mut Vec<(usize, Vec<usize>)>,
    ) -> (Vec<Taken>, bool) {
        let most = BATCH_BYTES * tokenize::threads() as u64;
        let limit = self.error.as_ref().map_or(usize::MAX, |(index, _)| *index);
        let (mut taken, mut bytes, mut dropped) = (Vec::new(), 0, false);
        left.retain_mut(|(group, wanted)| {
            if bytes >= most {
                return true;
            }
            let Some(lock) = try_lock(folder, *group) else { return true };
            wanted.retain(|index| *index < limit);
            let mut entries = load(folder, *group);
            self.look(&mut entries, wanted);
            dropped = true;
            if !wanted.is_empty() {
                bytes += wanted.iter().map(|index| self.wishes[*index].bytes).sum::<u64>();
                let wanted = std::mem::take(wanted);
                taken.push(Taken { group: *group, wanted, lock: Some(lock), entries });
            }
            false
        });
        (taken, dropped)
    }

    fn read_groups(&mut self, folder: &Path, mut taken: Vec<Taken>) {
        let mut indices: Vec<usize> =
            taken.iter().flat_map(|taken| &taken.wanted).copied().collect();
        indices.sort_unstable();
        taken.iter().for_each(|taken| taken.say(0));
        self.read(&indices, &mut taken);
        for mut taken in taken {
            taken.entries.save(folder, taken.group);
        }
    }

    /// Reads the files `indices`, ascending; what is sure goes into the entries of `taken`.
    fn read(&mut self, indices: &[usize], taken: &mut [Taken]) {
        let wishes: Vec<Wish> = indices.iter().map(|index| self.wishes[*index]).collect();
        let threads = tokenize::threads();
        let tick = &mut |done: &dyn Fn(usize) -> u64| {
            for taken in taken.iter() {
                let place = |index| indices.binary_search(index).unwrap_or(usize::MAX);
                taken.say(taken.wanted.iter().map(|index| done(place(index))).sum());
            }
        };
        let (found, error) = content::read(&wishes, threads, self.progress, tick);
        let places: HashMap<usize, usize> =
            taken.iter().enumerate().map(|(place, taken)| (taken.group, place)).collect();
        for ((index, wish), found) in indices.iter().zip(&wishes).zip(found) {
            let Some(found) = found else { continue };
            self.found[*index] = Some((found.content, true));
            let (key, stamp, content) = (key(wish), stamp(wish), found.content);
            if let Some(place) = places.get(&group_of(&key)).filter(|_| found.settled) {
                let entry = Entry { stamp, content, used: self.now };
                taken[*place].entries.by_key.insert(key, entry);
            }
        }
        if let Some((at, error)) = error {
            let index = indices[at];
            if self.error.as_ref().is_none_or(|(first, _)| index < *first) {
                self.error = Some((index, error));
            }
        }
    }

    /// Others have all groups that are left. One that has done nothing for a while is not waited
    /// for; whether there was one, whose files are read then.
    fn watch(
        &mut self,
        folder: &Path,
        left: &mut Vec<(usize, Vec<usize>)>,
        watched: &mut HashMap<usize, Watched>,
    ) -> bool {
        for at in 0..left.len() {
            let (group, life) = (left[at].0, life(folder, left[at].0));
            let start = Watched { life, since: Instant::now() };
            let seen = watched.entry(group).or_insert(start);
            if seen.life != life {
                *seen = start;
                self.progress.stir();
            }
            if seen.since.elapsed() > SILENT_MAX {
                let (group, wanted) = left.remove(at);
                let entries = load(folder, group);
                self.read_groups(folder, vec![Taken { group, wanted, lock: None, entries }]);
                return true;
            }
        }
        false
    }
}

impl Taken {
    /// Bytes of the group that are read, for those that wait.
    fn say(&self, bytes: u64) {
        if let Some(lock) = &self.lock {
            // Whoever waits and hears nothing reads by itself, which is right, too.
            let _ = lock.write_all_at(&bytes.to_le_bytes(), 0);
        }
    }
}

fn path(folder: &Path, group: usize, ending: &str) -> PathBuf {
    folder.join(format!("files-{group:02}.{ending}"))
}

fn private() -> OpenOptions {
    let mut options = OpenOptions::new();
    options.read(true).write(true).create(true).truncate(false).mode(0o600);
    options
}

fn try_lock(folder: &Path, group: usize) -> Option<File> {
    let file = private().open(path(folder, group, "lock")).ok()?;
    flock(&file, FlockOperation::NonBlockingLockExclusive).ok()?;
    Some(file)
}

/// What the holder of a lock says.
fn life(folder: &Path, group: usize) -> u64 {
    let mut bytes = [0; 8];
    let file = File::open(path(folder, group, "lock"));
    let read = file.and_then(|file| file.read_exact_at(&mut bytes, 0));
    read.map_or(0, |()| u64::from_le_bytes(bytes))
}

/// The entries of a group; none where the file is missing, torn or not ours.
fn load(folder: &Path, group: usize) -> Entries {
    let most = HEAD_BYTES + ENTRIES_MAX * ENTRY_BYTES + HASH_BYTES;
    let path = path(folder, group, "index");
    let read = || -> io::Result<Option<Vec<u8>>> {
        let file = File::open(&path)?;
        let size = file.metadata()?.len();
        let Some(size) = usize::try_from(size).ok().filter(|size| *size <= most) else {
            return Ok(None);
        };
        let mut bytes = vec![0; size];
        file.read_exact_at(&mut bytes, 0)?;
        Ok(Some(bytes))
    };
    match read() {
        Ok(bytes) => {
            let by_key = bytes.and_then(|bytes| decode(&bytes)).unwrap_or_else(|| {
                tracing::warn!(path = %path.display(), "an index that is not whole; made anew");
                HashMap::new()
            });
            Entries { by_key, unread: false }
        }
        Err(error) => {
            let unread = verdict(&error) != Verdict::Missing;
            if unread {
                tracing::warn!(%error, path = %path.display(), "an index that cannot be read");
            }
            Entries { unread, ..Entries::default() }
        }
    }
}

fn decode(bytes: &[u8]) -> Option<HashMap<Key, Entry>> {
    let (body, hash) = bytes.split_at_checked(bytes.len().checked_sub(HASH_BYTES)?)?;
    let (head, entries) = body.split_at_checked(HEAD_BYTES)?;
    if head[..8] != MAGIC[..] || hash != blake3::hash(body).as_bytes() {
        return None;
    }
    let (entries, rest) = entries.as_chunks::<ENTRY_BYTES>();
    let count = u64::from_le_bytes(*head.last_chunk()?);
    if !rest.is_empty() || entries.len() as u64 != count {
        return None;
    }
    entries.iter().map(decode_entry).collect()
}

fn decode_entry(bytes: &[u8; ENTRY_BYTES]) -> Option<(Key, Entry)> {
    let (key, rest) = bytes.split_first_chunk::<32>()?;
    let (hash, rest) = rest.split_first_chunk::<32>()?;
    let mut words = rest.as_chunks::<8>().0.iter().map(|word| u64::from_le_bytes(*word));
    let mut stamp = Stamp::default();
    for word in &mut stamp {
        *word = words.next()?;
    }
    let (low, high) = (words.next()? as i64, words.next()? as i64);
    let content = Content { hash: *hash, low, high };
    Some((*key, Entry { stamp, content, used: words.next()? }))
}

fn encode(entries: &HashMap<Key, Entry>) -> Vec<u8> {
    let size = HEAD_BYTES + entries.len() * ENTRY_BYTES + HASH_BYTES;
    let mut bytes = Vec::with_capacity(size);
    bytes.extend(MAGIC);
    bytes.extend((entries.len() as u64).to_le_bytes());
    for (key, Entry { stamp, content, used }) in entries {
        bytes.extend(key);
        bytes.extend(content.hash);
        let ids = [content.low as u64, content.high as u64];
        for word in stamp.iter().chain(&ids).chain([used]) {
            bytes.extend(word.to_le_bytes());
        }
    }
    let hash = blake3::hash(&bytes);
    bytes.extend(hash.as_bytes());
    bytes
}

impl Entries {
    /// Keeps those that were used last. What cannot be written is read again the next time.
    fn save(&mut self, folder: &Path, group: usize) {
        if self.unread {
            return;
        }
        let entries = &mut self.by_key;
        if entries.len() > ENTRIES_MAX {
            let mut by_use: Vec<(u64, Key)> =
                entries.iter().map(|(key, entry)| (entry.used, *key)).collect();
            by_use.sort_unstable();
            let surplus = entries.len() - ENTRIES_MAX;
            for (_, key) in &by_use[..surplus] {
                entries.remove(key);
            }
        }
        // Only one without a lock can meet another of its name: then the last one counts.
        let part = path(folder, group, &format!("{}.part", std::process::id()));
        let written = private().truncate(true).open(&part).and_then(|mut file| {
            file.write_all(&encode(entries))?;
            file.sync_data()?;
            std::fs::rename(&part, path(folder, group, "index"))
        });
        if let Err(error) = written {
            tracing::warn!(%error, folder = %folder.display(), "the index cannot be written");
            let _ = std::fs::remove_file(&part);
        }
    }
}

#[cfg(test)]
mod tests;
