//! Finding the files of a data source, in an order that is the same everywhere, and holding them
//! to what they were when they were found.

use super::DataError;
use super::handles::Handles;
use crate::disk::{Disk, Effect, OpenFile, Verdict, gave_up, may_heal, verdict};
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use rustix::fs::OFlags;
use std::cell::RefCell;
use std::io;
use std::os::unix::ffi::OsStrExt;
use std::os::unix::fs::MetadataExt;
use std::path::{Component, Path, PathBuf};
use std::sync::Arc;
use std::time::SystemTime;
use walkdir::DirEntry;

/// Directories that hold no text of a project's own.
const SKIPPED: [&str; 2] = [".git", "target"];

/// Files of a source at most; more are a glob gone wrong.
const FILES_MAX: usize = 1 << 20;

/// Bytes read at once.
const BLOCK: usize = 1 << 18;

/// A file as it was when it was opened first.
#[derive(Clone, Debug)]
pub struct DataFile {
    /// What it is read by, with the patience that this has.
    pub disk: Disk,
    pub path: PathBuf,
    /// Relative to the root; what order, split and fingerprint go by.
    pub name: Vec<u8>,
    pub bytes: u64,
    pub modified: SystemTime,
    pub inode: u64,
    /// The file system that it was found on.
    pub device: u64,
    /// When its inode was changed last, as seconds and nanoseconds: no program sets it.
    pub changed: (i64, i64),
    /// BLAKE3 of the content.
    pub hash: [u8; 32],
}

/// The files under `root` that match one of `globs` and none of `excluded`, sorted by the bytes of
/// their names, not yet read. Empty files are left out, unless one is named without a wildcard.
///
/// # Errors
/// Names the file that is no readable file, or the globs when nothing matches.
pub fn find(
    disk: &Disk,
    root: &Path,
    globs: &[String],
    excluded: &[String],
    excluded_directories: &[String],
) -> Result<Vec<DataFile>, DataError> {
    let wanted = glob_set(root, globs)?;
    let unwanted = glob_set(root, excluded)?;
    let mut skipped = Vec::new();
    for path in excluded_directories {
        skipped.extend(resolved(disk, Path::new(path))?);
    }
    let mut files = Vec::new();
    for glob in globs {
        let full = normal(&root.join(glob));
        let base = literal_base(&full);
        let unreadable = |source| DataError::Read { path: base.clone(), source };
        if base == full {
            files.push(named_file(disk, root, &full)?);
            continue;
        }
        let is_folder = match disk.metadata(&base) {
            Ok(found) => found.is_dir(),
            Err(error) if verdict(&error) == Verdict::Missing => false,
            Err(error) => return Err(unreadable(error)),
        };
        if is_folder {
            let look = Look { disk, root, wanted: &wanted, unwanted: &unwanted };
            // What was found before it stumbled is found again.
            let found = disk.patiently(&base, None, |_| look.walk(&base, &skipped));
            files.extend(found.map_err(unreadable)??);
        }
    }
    files.sort_by(|a, b| a.name.cmp(&b.name));
    files.dedup_by(|a, b| a.name == b.name);
    if files.is_empty() {
        return Err(DataError::NothingMatches {
            root: root.to_path_buf(),
            globs: globs.join(", "),
        });
    }
    Ok(files)
}

fn glob_set(root: &Path, globs: &[String]) -> Result<GlobSet, DataError> {
    let mut set = GlobSetBuilder::new();
    for glob in globs {
        let full = normal(&root.join(glob));
        let refused = |source| DataError::Glob { glob: glob.clone(), source };
        let text = full.to_string_lossy();
        let built = GlobBuilder::new(&text).literal_separator(true).build().map_err(refused)?;
        set.add(built);
    }
    set.build().map_err(|source| DataError::Glob { glob: globs.join(", "), source })
}

/// Without `.` and `..`, so that a path found by walking can be compared as text.
fn normal(path: &Path) -> PathBuf {
    let mut out = PathBuf::new();
    for part in path.components() {
        match part {
            Component::CurDir => {}
            Component::ParentDir => {
                out.pop();
            }
            part => out.push(part),
        }
    }
    out
}

/// The leading components of a glob that have no wildcard.
fn literal_base(glob: &Path) -> PathBuf {
    let literal = |part: &Component| {
        !part.as_os_str().as_bytes().iter().any(|byte| b"*?[{\\".contains(byte))
    };
    glob.components().take_while(literal).collect()
}

/// A file that the user named outright: whatever is wrong with it is refused.
fn named_file(disk: &Disk, root: &Path, path: &Path) -> Result<DataFile, DataError> {
    let file = examine(disk, root, path)?;
    match file {
        Some(file) if file.bytes > 0 => Ok(file),
        Some(_) => Err(DataError::Unusable { path: path.to_path_buf(), why: "it is empty" }),
        None => Err(DataError::Unusable {
            path: path.to_path_buf(),
            why: "it is a directory; write DIRECTORY/**/*.txt for the files in it",
        }),
    }
}

/// A path without links; none where nothing stands there.
fn resolved(disk: &Disk, path: &Path) -> Result<Option<PathBuf>, DataError> {
    match disk.patiently(path, None, |_| path.canonicalize()) {
        Ok(path) => Ok(Some(path)),
        Err(error) if verdict(&error) == Verdict::Missing => Ok(None),
        Err(source) => Err(DataError::Read { path: path.to_path_buf(), source }),
    }
}

/// What is looked for in folders.
struct Look<'a> {
    disk: &'a Disk,
    root: &'a Path,
    wanted: &'a GlobSet,
    unwanted: &'a GlobSet,
}

impl Look<'_> {
    /// The files below `base`. The outer error is one of listing a folder.
    fn walk(
        &self,
        base: &Path,
        skipped: &[PathBuf],
    ) -> io::Result<Result<Vec<DataFile>, DataError>> {
        self.disk.before(Effect::Read(base))?;
        let mut files = Vec::new();
        let stumbled = RefCell::new(None);
        // A kubelet mounts a ConfigMap as links into `..data`, a link to a directory with the date
        // in its name: whatever begins so would be the same files again, named otherwise in each
        // pod.
        let of_kubelet = |entry: &DirEntry| entry.file_name().as_bytes().starts_with(b"..");
        let is_skipped = |entry: &DirEntry| match entry.path().canonicalize() {
            Ok(path) => skipped.contains(&path),
            Err(error) => {
                // A folder that should be left out would be trained on.
                if verdict(&error) != Verdict::Missing {
                    *stumbled.borrow_mut() = Some(error);
                }
                false
            }
        };
        let enter = |entry: &DirEntry| {
            let named = SKIPPED.iter().any(|name| entry.file_name() == *name);
            let is_out = || named || of_kubelet(entry) || !skipped.is_empty() && is_skipped(entry);
            entry.depth() == 0 || !(entry.file_type().is_dir() && is_out())
        };
        let walk = walkdir::WalkDir::new(base).follow_links(true).into_iter().filter_entry(enter);
        for entry in walk {
            if let Some(error) = stumbled.borrow_mut().take() {
                return Err(error);
            }
            let entry = match entry {
                Ok(entry) => entry,
                Err(error) if self.is_ignorable(&error) => continue,
                Err(error) if error.io_error().is_some_and(may_heal) => {
                    return Err(error.into());
                }
                Err(error) => return Ok(Err(walk_error(base, error))),
            };
            let path = entry.path();
            if !self.wanted.is_match(path) || self.unwanted.is_match(path) {
                continue;
            }
            match examine(self.disk, self.root, path) {
                Ok(Some(file)) if file.bytes > 0 => files.push(file),
                Ok(_) => {}
                Err(error) => return Ok(Err(error)),
            }
            if files.len() > FILES_MAX {
                return Ok(Err(DataError::TooMany { max: FILES_MAX }));
            }
        }
        match stumbled.take() {
            Some(error) => Err(error),
            None => Ok(Ok(files)),
        }
    }

    /// Something broken that no glob asked for: a dangling link, or a file that vanished.
    fn is_ignorable(&self, error: &walkdir::Error) -> bool {
        let Some(path) = error.path() else { return false };
        let gone = error.io_error().is_some_and(|error| error.kind() == io::ErrorKind::NotFound);
        gone && (!self.wanted.is_match(path) || self.unwanted.is_match(path))
    }
}

fn walk_error(base: &Path, error: walkdir::Error) -> DataError {
    let path = error.path().unwrap_or(base).to_path_buf();
    if error.loop_ancestor().is_some() {
        return DataError::Unusable { path, why: "it is a symbolic link into a loop" };
    }
    let source = error
        .into_io_error()
        .unwrap_or_else(|| std::io::Error::other("the directory could not be listed"));
    DataError::Read { path, source }
}

impl DataFile {
    /// A file outside of any source, by its path.
    ///
    /// # Errors
    /// It is no readable file.
    pub fn named(path: &Path) -> Result<DataFile, DataError> {
        DataFile::named_on(&Disk::real(), path)
    }

    /// A file outside of any source, by its path, read with the patience of `disk`.
    ///
    /// # Errors
    /// It is no readable file.
    pub(crate) fn named_on(disk: &Disk, path: &Path) -> Result<DataFile, DataError> {
        named_file(disk, Path::new(""), path)
    }

    /// Never waits for a writer, should the file have become a pipe.
    ///
    /// # Errors
    /// It cannot be read.
    pub fn open(&self) -> Result<OpenFile, DataError> {
        let opened = OpenFile::open(&self.disk, &self.path, OFlags::NONBLOCK);
        let handle = opened.map_err(|source| self.unreadable(source))?;
        // Reading nothing finds out early what only reading would tell.
        handle.read_at(&mut [0; 0], 0).map_err(|source| self.unreadable(source))?;
        Ok(handle)
    }

    /// Whether a file of the same name with another ending lies beside it.
    ///
    /// # Errors
    /// It cannot be told.
    pub(crate) fn is_beside(&self, ending: &str) -> Result<bool, DataError> {
        let found = self.disk.is_there(&self.path.with_extension(ending));
        found.map_err(|source| self.unreadable(source))
    }

    /// Its first bytes: `most` of them, or all that it had when it was found.
    ///
    /// # Errors
    /// It cannot be read.
    pub(crate) fn head(&self, most: usize) -> Result<Vec<u8>, DataError> {
        let mut head = vec![0; self.bytes.min(most as u64) as usize];
        let read = self.open()?.read_exact_at(&mut head, 0);
        read.map_err(|source| self.unreadable(source))?;
        Ok(head)
    }

    pub(crate) fn unreadable(&self, source: std::io::Error) -> DataError {
        DataError::unread(&self.path, source)
    }

    /// Reads bytes that the file had when it was found, from a handle that stays open.
    ///
    /// # Errors
    /// The file changed or cannot be read.
    pub(crate) fn read_at(
        &mut self,
        offset: u64,
        into: &mut [u8],
        handles: &Handles,
    ) -> Result<(), DataError> {
        let (handle, kept) = handles.get(&self.path, || self.open())?;
        let read = handle.read_exact_at(into, offset);
        // The path is looked at after the bytes were read, so that no change can slip in between;
        // and it is the path that counts: what the handle still reads may have been replaced.
        if read.is_ok() && self.stands_at_its_path()? {
            return Ok(());
        }
        handles.forget(&self.path);
        let handle = if kept { Arc::new(self.open()?) } else { handle };
        handle.read_exact_at(into, offset).or_else(|source| {
            self.check(&handle)?;
            Err(self.unreadable(source))
        })?;
        self.check(&handle)
    }

    fn stands_at_its_path(&self) -> Result<bool, DataError> {
        let found = self.disk.metadata_of(&self.path, self.device);
        let metadata = found.map_err(|source| self.unreadable(source))?;
        let modified = metadata.modified().map_err(|source| self.unreadable(source))?;
        Ok((metadata.len(), metadata.ino(), modified) == (self.bytes, self.inode, self.modified))
    }

    /// Whether all that the system says of the open file is what it said when it was found.
    ///
    /// # Errors
    /// The system says nothing.
    pub(crate) fn is_as_found(&self, handle: &OpenFile) -> Result<bool, DataError> {
        let metadata = handle.metadata().map_err(|source| self.unreadable(source))?;
        let modified = metadata.modified().map_err(|source| self.unreadable(source))?;
        Ok((metadata.len(), metadata.ino(), modified) == (self.bytes, self.inode, self.modified)
            && (metadata.ctime(), metadata.ctime_nsec()) == self.changed)
    }

    /// That its size is another than when it was found, if it is.
    pub(crate) fn resized(&self, handle: &OpenFile) -> Option<DataError> {
        let now = handle.metadata().ok()?.len();
        let (path, was) = (self.path.clone(), self.bytes);
        (now != was).then_some(DataError::Resized { path, was, now })
    }

    /// The file is what it was when it was fingerprinted.
    ///
    /// # Errors
    /// It is not.
    pub fn check(&mut self, handle: &OpenFile) -> Result<(), DataError> {
        let metadata = handle.metadata().map_err(|source| self.unreadable(source))?;
        if metadata.len() != self.bytes {
            let (was, now) = (self.bytes, metadata.len());
            return Err(DataError::Resized { path: self.path.clone(), was, now });
        }
        let modified = metadata.modified().map_err(|source| self.unreadable(source))?;
        if (modified, metadata.ino()) != (self.modified, self.inode) {
            // Touched, or checked out anew: the content decides.
            let mut hasher = blake3::Hasher::new();
            self.each_block(handle, &mut |block| {
                hasher.update(block);
                Ok(())
            })?;
            if *hasher.finalize().as_bytes() != self.hash {
                return Err(DataError::Rewritten { path: self.path.clone() });
            }
            (self.modified, self.inode) = (modified, metadata.ino());
        }
        Ok(())
    }

    /// Fills in the hash, and shows the content to `see`, block after block of a multiple of 8.
    ///
    /// # Errors
    /// The file changed or cannot be read; or what `see` finds.
    pub fn fingerprint(
        &mut self,
        see: &mut dyn FnMut(&[u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let handle = self.open()?;
        let mut hasher = blake3::Hasher::new();
        let mut seen = 0;
        self.each_block(&handle, &mut |block| {
            hasher.update(block);
            seen += block.len() as u64;
            see(block)
        })?;
        if seen != self.bytes {
            return Err(DataError::Resized { path: self.path.clone(), was: self.bytes, now: seen });
        }
        self.hash = *hasher.finalize().as_bytes();
        Ok(())
    }

    fn each_block(
        &self,
        handle: &OpenFile,
        see: &mut dyn FnMut(&[u8]) -> Result<(), DataError>,
    ) -> Result<(), DataError> {
        let mut block = vec![0; BLOCK];
        let mut offset = 0;
        loop {
            let mut filled = 0;
            while filled < block.len() {
                let at = offset + filled as u64;
                match handle.read_at(&mut block[filled..], at) {
                    Ok(0) => break,
                    Ok(count) => filled += count,
                    Err(source) => return Err(self.unreadable(source)),
                }
            }
            see(&block[..filled])?;
            offset += filled as u64;
            if filled < block.len() {
                return Ok(());
            }
        }
    }
}

/// Size and time of a regular file; none for a directory.
fn examine(disk: &Disk, root: &Path, path: &Path) -> Result<Option<DataFile>, DataError> {
    let read = |source: std::io::Error| {
        if gave_up(&source).is_some_and(|gave_up| gave_up.unwanted) {
            return DataError::GivenUp;
        }
        if source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
            let why = "it is a symbolic link into a loop";
            return DataError::Unusable { path: path.to_path_buf(), why };
        }
        DataError::Read { path: path.to_path_buf(), source }
    };
    let metadata = disk.metadata(path).map_err(read)?;
    if metadata.is_dir() {
        return Ok(None);
    }
    if !metadata.is_file() {
        let why = "it is no regular file (a pipe, a socket or a device)";
        return Err(DataError::Unusable { path: path.to_path_buf(), why });
    }
    let name = path.strip_prefix(normal(root)).unwrap_or(path).as_os_str().as_bytes().to_vec();
    Ok(Some(DataFile {
        disk: disk.clone(),
        path: path.to_path_buf(),
        name,
        bytes: metadata.len(),
        modified: metadata.modified().map_err(read)?,
        inode: metadata.ino(),
        device: metadata.dev(),
        changed: (metadata.ctime(), metadata.ctime_nsec()),
        hash: [0; 32],
    }))
}
