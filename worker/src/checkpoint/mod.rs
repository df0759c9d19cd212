//! Checkpoints: shards by owner, a manifest last, a rename that commits.
//!
//! ```text
//! snapshot -> .aN-step-X/aN-rR-0.safetensors + aN-rR.pieces    every rank, by its worker's scribe
//!          -> acknowledged in a step's end -> manifest.json -> step-X/          rank 0
//! list -> which count -> verify -> the newest usable -> load into any layout
//!                          `-> refused: told, set aside by name, never removed
//! ```
//! A checkpoint exists if and only if its manifest does and every piece's BLAKE3 matches.

pub mod aside;
pub mod best;
pub mod desk;
pub mod fence;
mod grow;
mod load;
pub mod look;
mod manifest;
pub mod products;
pub(crate) mod recut;
mod retention;
pub(crate) mod safetensors;
pub mod scribe;
pub(crate) mod staging;
pub(crate) mod values;
mod verify;
mod write;
pub mod writer;

pub use desk::Desk;
pub use crate::disk::{Disk, Effect, EndsAfter, Faults, NewFile};
pub use grow::{Growth, grow, grown};
pub(crate) use load::Shards;
pub use load::load;
pub(crate) use manifest::{PARTS, model_is_sane, value_differences};
pub use manifest::{Expected, NOT_FINITE, check, differences, seal, unseal};
pub use staging::Failed;
pub use verify::{verify, verify_share};
pub use write::{Committed, Identity, WriteError, commit, write_shard};
pub use writer::Writer;

use fence::FenceError;
use moejob_protocol::CheckpointManifest;
use moejob_protocol::checkpoint::{MANIFEST_BYTES_MAX, directory_name};
use crate::disk::{GaveUp, OpenFile};
use std::fs::File;
use std::path::{Path, PathBuf};

/// Tensors in the header of a shard of `bytes` bytes, once all of it has been checked.
///
/// # Errors
/// What is wrong with it, and where.
pub fn shard_tensors(file: &File, bytes: u64) -> Result<usize, String> {
    let file = file.try_clone().map_err(|error| error.to_string())?;
    let file = &OpenFile::of(&Disk::real(), file, Path::new("a shard"));
    let header = safetensors::read_header(file, bytes).map_err(|error| error.to_string())?;
    Ok(header.tensors.len())
}

/// One thing that is wrong with a checkpoint: a file or tensor, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Problem {
    pub what: String,
    pub why: String,
    pub cause: Cause,
}

/// What a problem comes from.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cause {
    /// Something is missing, or other than it was written.
    Damage,
    /// A newer release wrote it.
    Newer,
    /// Storage failed while it was looked at: another try may find it well.
    Storage,
}

impl std::fmt::Display for Problem {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        // Of the place itself, whose name whoever shows this has told.
        match self.what.as_str() {
            "." => f.write_str(&self.why),
            what => write!(f, "{what}: {}", self.why),
        }
    }
}

/// A checkpoint that is not used, by name.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("the checkpoint {name} is refused: {}", shown(.problems))]
pub struct Refusal {
    /// `step-00000200`
    pub name: String,
    pub problems: Vec<Problem>,
}

impl Refusal {
    /// Storage failed while it was looked at: another try may find it well.
    pub fn may_heal(&self) -> bool {
        self.cause() == Cause::Storage
    }

    /// The gravest of its problems': what storage hides is not known to be damaged, and what a
    /// newer release wrote may be whole to that.
    pub fn cause(&self) -> Cause {
        let has = |cause| self.problems.iter().any(|problem| problem.cause == cause);
        let causes = [Cause::Storage, Cause::Newer];
        causes.into_iter().find(|cause| has(*cause)).unwrap_or(Cause::Damage)
    }

    /// Of the event that tells it.
    pub fn reason(&self) -> &'static str {
        match self.cause() {
            Cause::Newer => "NewerVersion",
            Cause::Damage | Cause::Storage => "Damaged",
        }
    }
}

impl Refusal {
    /// What is wrong with it, in one line.
    pub fn why(&self) -> String {
        shown(&self.problems)
    }
}

/// Problems that a message shows; `moejob checkpoint verify` lists all.
const PROBLEMS_SHOWN: usize = 5;

fn shown(problems: &[Problem]) -> String {
    let mut texts: Vec<String> =
        problems.iter().take(PROBLEMS_SHOWN).map(Problem::to_string).collect();
    if problems.len() > PROBLEMS_SHOWN {
        texts.push(format!("and {} more", problems.len() - PROBLEMS_SHOWN));
    }
    texts.join("; ")
}

/// A `step-*` directory, complete or not.
#[derive(Clone, Debug)]
pub struct Found {
    pub step: u64,
    /// `step-00000200`
    pub name: String,
    pub path: PathBuf,
    pub manifest: Result<CheckpointManifest, Vec<Problem>>,
}

/// All `step-*` directories below `location`, ascending; their shards are not read.
///
/// # Errors
/// The location cannot be read; that it does not exist is no error.
pub fn list(disk: &Disk, location: &Path) -> std::io::Result<Vec<Found>> {
    list_above(disk, location, None)
}

/// The same of more steps than `step`. A manifest may have a hundred megabytes: those that are not
/// asked for are not read.
///
/// # Errors
/// The location cannot be read; that it does not exist is no error.
pub fn list_above(
    disk: &Disk,
    location: &Path,
    above: Option<u64>,
) -> std::io::Result<Vec<Found>> {
    let names = match disk.names(location) {
        Ok(names) => names,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(error),
    };
    let mut found = Vec::new();
    for name in names {
        let step = name.strip_prefix("step-").and_then(|step| step.parse::<u64>().ok());
        let Some(step) = step.filter(|step| {
            name == directory_name(*step) && above.is_none_or(|above| *step > above)
        }) else {
            continue;
        };
        let path = location.join(&name);
        found.push(Found { step, name, manifest: read(disk, &path), path });
    }
    found.sort_by_key(|found| found.step);
    Ok(found)
}

/// The manifest of one checkpoint directory, checked in itself.
///
/// # Errors
/// Everything that is wrong with it.
pub fn show(disk: &Disk, directory: &Path) -> Result<CheckpointManifest, Vec<Problem>> {
    read(disk, directory)
}

fn read(disk: &Disk, directory: &Path) -> Result<CheckpointManifest, Vec<Problem>> {
    let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
    // What was set aside is looked at as what it was.
    let name = name.split('.').next().unwrap_or(name);
    match std::fs::symlink_metadata(directory) {
        Ok(of) if of.is_symlink() => return Err(vec![Problem::new(".", "it is a symbolic link")]),
        Ok(of) if !of.is_dir() => {
            return Err(vec![Problem::new(".", "it is a file, and a checkpoint is a folder")]);
        }
        _ => {}
    }
    let path = directory.join("manifest.json");
    let text = disk.read(&path, MANIFEST_BYTES_MAX).map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            vec![Problem::new("manifest.json", "it is missing: half written")]
        }
        _ => vec![Problem::of_io("manifest.json", &error)],
    })?;
    let manifest = unseal(&text).map_err(|problem| vec![problem])?;
    let problems = check(&manifest, name);
    if problems.is_empty() { Ok(manifest) } else { Err(problems) }
}

/// The newest checkpoint that can be used, and those newer ones that cannot.
#[derive(Clone, Debug, Default)]
pub struct Newest {
    pub usable: Option<Found>,
    /// Newest first.
    pub refused: Vec<Refusal>,
}

impl Newest {
    /// What is said of those that are passed over for the one that is used, a line each.
    pub fn passed_over(&self) -> Vec<String> {
        let used = self.usable.as_ref().map_or("nothing", |found| &found.name);
        self.refused.iter().map(|refusal| format!("{refusal}; {used} is used")).collect()
    }

    /// Something lies in `location`, and nothing of it can be used: all that is wrong with it.
    pub fn none_usable(&self, location: &Path) -> Option<Refusal> {
        if self.usable.is_some() || self.refused.is_empty() {
            return None;
        }
        let of = |refusal: &Refusal| {
            let of_one = |problem: &Problem| {
                let what = match problem.what.as_str() {
                    "." => refusal.name.clone(),
                    what => format!("{}/{what}", refusal.name),
                };
                Problem { what, ..problem.clone() }
            };
            refusal.problems.iter().map(of_one).collect::<Vec<Problem>>()
        };
        let problems = self.refused.iter().flat_map(of).collect();
        Some(Refusal::of(&location.display().to_string(), problems))
    }
}

/// How much of a checkpoint is read before it counts as usable.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Depth {
    /// Its manifest alone.
    Manifest,
    /// Every byte.
    Bytes,
}

/// Looks from the newest checkpoint backwards for one that counts under the claims and verifies.
///
/// # Errors
/// Storage fails, so that nothing can be said of one of them.
pub fn newest_usable(disk: &Disk, location: &Path) -> Result<Newest, FenceError> {
    newest_under(disk, location, None, &fence::claims(disk, location)?, Depth::Bytes)
}

/// The newest whose manifest can be read, as [`newest_usable`] finds the newest that is whole.
///
/// # Errors
/// Storage fails, so that nothing can be said of one of them.
pub fn newest_described(disk: &Disk, location: &Path) -> Result<Newest, FenceError> {
    newest_under(disk, location, None, &fence::claims(disk, location)?, Depth::Manifest)
}

/// The newest usable one under these claims, among those of more steps than `above`; older ones are
/// not looked at.
///
/// # Errors
/// Storage fails, so that nothing can be said of one of them.
pub fn newest_under(
    disk: &Disk,
    location: &Path,
    above: Option<u64>,
    claims: &[fence::Claim],
    depth: Depth,
) -> Result<Newest, FenceError> {
    newest_by(disk, location, above, claims, &mut |found| match depth {
        Depth::Manifest => Ok(()),
        Depth::Bytes => verify(disk, &found.path).map(|_| ()),
    })
}

/// The same; `verify` looks at each whose manifest can be read.
///
/// # Errors
/// Storage fails, so that nothing can be said of one of them.
pub(crate) fn newest_by(
    disk: &Disk,
    location: &Path,
    above: Option<u64>,
    claims: &[fence::Claim],
    verify: &mut dyn FnMut(&Found) -> Result<(), Vec<Problem>>,
) -> Result<Newest, FenceError> {
    let io = |source| FenceError::Io { path: location.to_path_buf(), source };
    let mut newest = Newest::default();
    for found in list_above(disk, location, above).map_err(io)?.into_iter().rev() {
        let verified = match &found.manifest {
            // What a fenced attempt left is no news, and nobody needs its bytes.
            Ok(manifest) if !fence::counts(claims, manifest.attempt, found.step) => continue,
            Ok(_) => verify(&found),
            Err(problems) => Err(problems.clone()),
        };
        let Err(problems) = verified else {
            newest.usable = Some(found);
            break;
        };
        match problems.iter().find(|problem| problem.cause == Cause::Storage) {
            Some(problem) => {
                let source = std::io::Error::other(format!("{}: {problem}", found.name));
                let gave_up = GaveUp { source, seconds: 0, unwanted: false };
                return Err(io(std::io::Error::other(gave_up)));
            }
            None => newest.refused.push(Refusal::of(&found.name, problems)),
        }
    }
    Ok(newest)
}
