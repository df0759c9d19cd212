//! Finding the text files of a data source, in an order that is the same everywhere.

use super::DataError;
use globset::{GlobBuilder, GlobSet, GlobSetBuilder};
use std::os::unix::ffi::OsStrExt;
use std::path::{Component, Path, PathBuf};
use std::time::SystemTime;

/// Directories that hold no text of a project's own.
const SKIPPED: [&str; 2] = [".git", "target"];

/// Files of a source at most; more are a glob gone wrong.
const FILES_MAX: usize = 1 << 20;

/// A file as it was when it was opened first.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct TextFile {
    pub path: PathBuf,
    /// Relative to the root; what order, split and fingerprint go by.
    pub name: Vec<u8>,
    pub bytes: u64,
    pub modified: SystemTime,
    /// BLAKE3 of the content.
    pub hash: [u8; 32],
}

/// The files under `root` that match one of `globs` and none of `excluded`, sorted by the bytes of
/// their names, not yet read. Empty files are left out, unless one is named without a wildcard.
///
/// # Errors
/// Names the file that is no readable file, or the globs when nothing matches.
pub fn find(
    root: &Path,
    globs: &[String],
    excluded: &[String],
    excluded_directories: &[String],
) -> Result<Vec<TextFile>, DataError> {
    let wanted = glob_set(root, globs)?;
    let unwanted = glob_set(root, excluded)?;
    let resolve = |path: &String| Path::new(path).canonicalize().ok();
    let skipped: Vec<PathBuf> = excluded_directories.iter().filter_map(resolve).collect();
    let mut files = Vec::new();
    for glob in globs {
        let full = normal(&root.join(glob));
        let base = literal_base(&full);
        if base == full {
            files.push(named_file(root, &full)?);
        } else if base.is_dir() {
            walk(root, &base, &wanted, &unwanted, &skipped, &mut files)?;
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
fn named_file(root: &Path, path: &Path) -> Result<TextFile, DataError> {
    let file = examine(root, path)?;
    match file {
        Some(file) if file.bytes > 0 => Ok(file),
        Some(_) => Err(DataError::Unusable { path: path.to_path_buf(), why: "it is empty" }),
        None => Err(DataError::Unusable {
            path: path.to_path_buf(),
            why: "it is a directory; write DIRECTORY/**/*.txt for the files in it",
        }),
    }
}

fn walk(
    root: &Path,
    base: &Path,
    wanted: &GlobSet,
    unwanted: &GlobSet,
    skipped: &[PathBuf],
    files: &mut Vec<TextFile>,
) -> Result<(), DataError> {
    let enter = |entry: &walkdir::DirEntry| {
        entry.depth() == 0
            || !(SKIPPED.iter().any(|name| entry.file_name() == *name)
                && entry.file_type().is_dir()
                || entry.file_type().is_dir()
                    && !skipped.is_empty()
                    && entry.path().canonicalize().is_ok_and(|path| skipped.contains(&path)))
    };
    let walk = walkdir::WalkDir::new(base).follow_links(true).into_iter().filter_entry(enter);
    for entry in walk {
        let entry = match entry {
            Ok(entry) => entry,
            Err(error) if ignorable(&error, wanted, unwanted) => continue,
            Err(error) => return Err(walk_error(base, error)),
        };
        let path = entry.path();
        if !wanted.is_match(path) || unwanted.is_match(path) {
            continue;
        }
        if let Some(file) = examine(root, path)?
            && file.bytes > 0
        {
            files.push(file);
        }
        if files.len() > FILES_MAX {
            return Err(DataError::TooMany { max: FILES_MAX });
        }
    }
    Ok(())
}

/// Something broken that no glob asked for: a dangling link, or a file that vanished.
fn ignorable(error: &walkdir::Error, wanted: &GlobSet, unwanted: &GlobSet) -> bool {
    let Some(path) = error.path() else { return false };
    let gone = error.io_error().is_some_and(|e| e.kind() == std::io::ErrorKind::NotFound);
    gone && (!wanted.is_match(path) || unwanted.is_match(path))
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

/// Size and time of a regular file; none for a directory.
fn examine(root: &Path, path: &Path) -> Result<Option<TextFile>, DataError> {
    let read = |source: std::io::Error| {
        if source.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error()) {
            let why = "it is a symbolic link into a loop";
            return DataError::Unusable { path: path.to_path_buf(), why };
        }
        DataError::Read { path: path.to_path_buf(), source }
    };
    let metadata = std::fs::metadata(path).map_err(read)?;
    if metadata.is_dir() {
        return Ok(None);
    }
    if !metadata.is_file() {
        let why = "it is no regular file (a pipe, a socket or a device)";
        return Err(DataError::Unusable { path: path.to_path_buf(), why });
    }
    let name = path.strip_prefix(normal(root)).unwrap_or(path).as_os_str().as_bytes().to_vec();
    Ok(Some(TextFile {
        path: path.to_path_buf(),
        name,
        bytes: metadata.len(),
        modified: metadata.modified().map_err(read)?,
        hash: [0; 32],
    }))
}
