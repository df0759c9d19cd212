//! Checkpoints that are refused lie aside, under a name that says why, until a person removes them.
//!
//! ```text
//! step-00000020, refused --set_aside--> step-00000020.damaged | step-00000020.newer, one each
//! ```
//! What is damaged may be mended from a copy, and what a newer release wrote may be the best state
//! that there is. So neither is removed here, and neither stands where a run writes.

use super::{Cause, Disk, Refusal};
use moejob_protocol::checkpoint::directory_name;
use std::io;
use std::path::{Path, PathBuf};

/// What a person can do about checkpoints that no attempt can go on from. Nothing of them is
/// removed meanwhile.
pub const WAYS_ON: &str = "put back what is damaged, or run the release that wrote what is newer; \
                           to begin at step 0 and keep them, use `moejob run --fresh`, or give the \
                           job another name or another checkpoint.location";

/// Entries of a folder of checkpoints whose bytes are counted at most.
const COUNTED_MAX: usize = 100_000;

/// A refused checkpoint that was set aside.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Aside {
    pub step: u64,
    /// `step-00000200.damaged`
    pub name: String,
    pub path: PathBuf,
    /// `damaged` or `newer`
    pub cause: &'static str,
    /// Of its files; a link has none.
    pub bytes: u64,
}

/// What became of a refused checkpoint.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Put {
    /// It has this name now.
    Aside(String),
    /// Another one of its step and cause has the name, so it stays.
    Stays { other: String },
}

impl Put {
    /// What is said of it behind the refusal.
    pub fn words(&self) -> String {
        match self {
            Put::Aside(name) => format!("it is set aside as {name}, and nothing removes it"),
            Put::Stays { other } => {
                format!("{other} is kept already, so this one goes when its step is written again")
            }
        }
    }
}

fn word(cause: Cause) -> &'static str {
    match cause {
        Cause::Newer => "newer",
        Cause::Damage | Cause::Storage => "damaged",
    }
}

/// Gives what was refused a name under which no run looks for a checkpoint.
///
/// # Errors
/// Storage failed. It can be tried again.
pub fn set_aside(disk: &Disk, location: &Path, refusal: &Refusal) -> io::Result<Put> {
    put(disk, location, &location.join(&refusal.name), (&refusal.name, refusal.cause()))
}

/// What lies at `path` and was once the checkpoint `name`.
pub(super) fn put(
    disk: &Disk,
    location: &Path,
    path: &Path,
    (name, cause): (&str, Cause),
) -> io::Result<Put> {
    let name = format!("{name}.{}", word(cause));
    let target = location.join(&name);
    if target.symlink_metadata().is_ok() {
        return Ok(Put::Stays { other: name });
    }
    disk.rename(path, &target)?;
    disk.sync_directory(location)?;
    Ok(Put::Aside(name))
}

/// Whether something of this step was set aside, as the names in a location say.
pub(super) fn has_any(names: &[String], step: u64) -> bool {
    [Cause::Damage, Cause::Newer].into_iter().any(|cause| {
        let name = format!("{}.{}", directory_name(step), word(cause));
        names.contains(&name)
    })
}

/// All that was set aside in a location, ascending.
///
/// # Errors
/// The location cannot be read; that it does not exist is no error.
pub fn list(disk: &Disk, location: &Path) -> io::Result<Vec<Aside>> {
    let names = match disk.names(location) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Vec::new()),
        names => names?,
    };
    let mut found = Vec::new();
    for name in names {
        let Some((of, cause)) = name.split_once('.') else { continue };
        let step = of.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok());
        let Some(step) = step.filter(|step| of == directory_name(*step)) else { continue };
        let causes = [Cause::Damage, Cause::Newer].map(word);
        let Some(cause) = causes.into_iter().find(|word| *word == cause) else { continue };
        let path = location.join(&name);
        let bytes = bytes_of(&path);
        found.push(Aside { step, name, path, cause, bytes });
    }
    found.sort_by(|a, b| a.name.cmp(&b.name));
    Ok(found)
}

/// Bytes of the files at a place. A checkpoint has no folders in it.
pub fn bytes_of(path: &Path) -> u64 {
    let of = |path: &Path| path.symlink_metadata().ok();
    match of(path) {
        Some(found) if found.is_dir() => {
            let entries = std::fs::read_dir(path).into_iter().flatten().flatten();
            let files = entries.take(COUNTED_MAX).filter_map(|entry| of(&entry.path()));
            files.filter(|found| found.is_file()).map(|found| found.len()).sum()
        }
        Some(found) if found.is_file() => found.len(),
        _ => 0,
    }
}
