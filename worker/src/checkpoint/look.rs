//! What an attempt finds in storage before its first step, and its claim.
//!
//! ```text
//! is it there? -> checkpoints beyond what is resumed from? -> another job's claim? -> claim
//! ```
//! Checkpoints that are refused count as there: a fresh job does not begin over them.

use super::fence::{self, Claim, Claiming, FenceError, tidy};
use super::{Disk, list_above};
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::Resume;
use serde::{Deserialize, Serialize};
use std::path::Path;
use std::sync::{Mutex, PoisonError};

/// What storage says of an attempt before its first step.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum Looked {
    Claimed,
    /// The attempt before is still writing: the claim comes before this one's first commit.
    Later,
    /// There are checkpoints beyond the one that the attempt resumes from, usable or refused.
    Newer,
    /// Another job has claimed attempts up to this one.
    Taken { attempt: u32 },
    /// A higher attempt is claimed, or this one.
    Fenced { claimed: u32 },
    /// Storage fails; `is_mistake`: no waiting makes good what its place is.
    Failed { why: String, is_mistake: bool },
}

impl From<FenceError> for Looked {
    fn from(error: FenceError) -> Looked {
        match &error {
            FenceError::Fenced { claimed, .. } => Looked::Fenced { claimed: *claimed },
            FenceError::Io { source, .. } => {
                let why = format!("{error}: {source}");
                Looked::Failed { why, is_mistake: is_mistake(source) }
            }
        }
    }
}

fn is_mistake(error: &std::io::Error) -> bool {
    use std::io::ErrorKind::{
        AlreadyExists, NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem,
    };
    // A file where a folder is asked for exists already.
    let kinds =
        [AlreadyExists, NotADirectory, NotFound, PermissionDenied, ReadOnlyFilesystem];
    kinds.contains(&error.kind())
}

/// Looks, and claims where nothing speaks against it. Whoever has `looked_at_newer` checkpoints
/// knows that none of them can be used, and has set them aside.
pub fn look_and_claim(
    config: &WorkerConfig,
    disk: &Disk,
    claiming: &Mutex<Claiming>,
    looked_at_newer: bool,
) -> Looked {
    try_look(config, disk, claiming, looked_at_newer).unwrap_or_else(Looked::from)
}

fn try_look(
    config: &WorkerConfig,
    disk: &Disk,
    claiming: &Mutex<Claiming>,
    looked_at_newer: bool,
) -> Result<Looked, FenceError> {
    let location = Path::new(&config.checkpoint.location);
    let io = |source| FenceError::Io { path: location.to_path_buf(), source };
    match &config.resume {
        Resume::Fresh => disk.create_directories(location).map_err(io)?,
        _ if is_empty(disk, location).map_err(io)? => {
            let why = "nothing of this job is there: is its volume mounted?";
            return Err(io(std::io::Error::other(why)));
        }
        _ => {}
    }
    if !looked_at_newer && has_newer(config, disk)? {
        return Ok(Looked::Newer);
    }
    if let Some(attempt) = claim_of_another(config, disk)? {
        return Ok(Looked::Taken { attempt });
    }
    let mut claiming = claiming.lock().unwrap_or_else(PoisonError::into_inner);
    claiming.go(disk, location)?;
    // The attempt before may have committed between the look and the claim, and the claim would
    // rule that out.
    if !looked_at_newer && has_newer(config, disk)? {
        claiming.give_back(disk, location);
        return Ok(Looked::Newer);
    }
    // What earlier attempts left only takes room; the next claim tries it again.
    let _ = tidy(disk, location, config.attempt);
    Ok(Looked::Claimed)
}

/// Storage that is not mounted shows an empty folder, or none.
///
/// # Errors
/// It cannot be read.
pub fn is_empty(disk: &Disk, location: &Path) -> std::io::Result<bool> {
    match disk.names(location) {
        Ok(names) => Ok(names.is_empty()),
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(true),
        Err(error) => Err(error),
    }
}

/// The claims of other attempts than this.
///
/// # Errors
/// Storage fails.
pub fn others_claims(config: &WorkerConfig, disk: &Disk) -> Result<Vec<Claim>, FenceError> {
    let mut claims = fence::claims(disk, Path::new(&config.checkpoint.location))?;
    claims.retain(|claim| claim.attempt != config.attempt);
    Ok(claims)
}

/// The step of what the attempt resumes from; none: it begins with initial weights, so that a
/// checkpoint of step 0 is news, too.
pub fn resumed_step(config: &WorkerConfig) -> Option<u64> {
    match &config.resume {
        Resume::Fresh => None,
        Resume::Checkpoint { .. } | Resume::Memory { .. } => Some(config.resume.step()),
    }
}

fn has_newer(config: &WorkerConfig, disk: &Disk) -> Result<bool, FenceError> {
    let location = Path::new(&config.checkpoint.location);
    let claims = others_claims(config, disk)?;
    let io = |source| FenceError::Io { path: location.to_path_buf(), source };
    let found = list_above(disk, location, resumed_step(config)).map_err(io)?;
    Ok(found.iter().any(|found| match &found.manifest {
        Ok(manifest) => fence::counts(&claims, manifest.attempt, found.step),
        Err(_) => true,
    }))
}

/// The newest claimed attempt, if it is this one or a later one, by another job than this.
///
/// # Errors
/// Storage fails.
pub fn claim_of_another(config: &WorkerConfig, disk: &Disk) -> Result<Option<u32>, FenceError> {
    let location = Path::new(&config.checkpoint.location);
    let Some(newest) = fence::claims(disk, location)?.pop() else { return Ok(None) };
    let own = newest.job_uid == config.job_uid || newest.job_uid.is_empty();
    let taken = !own && newest.attempt >= config.attempt;
    Ok(taken.then_some(newest.attempt))
}
