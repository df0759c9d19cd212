//! Claims in storage: which attempt may commit checkpoints.
//!
//! Rank 0 of attempt N creates `attempts/N.json` before its first step. A checkpoint of attempt M
//! at step s counts only if every later claim resumed at a step >= s; so whatever a cut-off gang
//! still writes is never used, and nothing it writes overwrites anything.

use crate::checkpoint::Disk;
use moejob_protocol::checkpoint::directory_name;
use serde::{Deserialize, Serialize};
use std::path::{Path, PathBuf};

/// Why an attempt may not go on.
#[derive(Debug, thiserror::Error)]
pub enum FenceError {
    #[error("attempt {claimed} has claimed the checkpoints; this is attempt {own}")]
    Fenced { own: u32, claimed: u32 },
    #[error("{path} cannot be used")]
    Io { path: PathBuf, source: std::io::Error },
}

/// `attempts/N.json`
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Claim {
    pub attempt: u32,
    /// Steps done in the state that it began with.
    pub resume_step: u64,
    pub job_uid: String,
    pub time: String,
}

fn io(path: &Path) -> impl Fn(std::io::Error) -> FenceError {
    move |source| FenceError::Io { path: path.to_path_buf(), source }
}

/// All claims, ascending. One that was never completed was never acted upon: its attempt made no
/// step, so it fences what came before but resumed from nothing.
///
/// # Errors
/// The directory cannot be read; that there is none is no error.
pub fn claims(location: &Path) -> Result<Vec<Claim>, FenceError> {
    let directory = location.join("attempts");
    let entries = match std::fs::read_dir(&directory) {
        Ok(entries) => entries,
        Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io(&directory)(error)),
    };
    let mut claims = Vec::new();
    for entry in entries {
        let path = entry.map_err(io(&directory))?.path();
        let number = path.file_name().and_then(|name| name.to_str());
        let number = number.and_then(|name| name.strip_suffix(".json")?.parse::<u32>().ok());
        let Some(attempt) = number else { continue };
        let text = std::fs::read(&path).map_err(io(&path))?;
        let claim = serde_json::from_slice(&text).ok().filter(|claim: &Claim| {
            claim.attempt == attempt
        });
        claims.push(claim.unwrap_or(Claim {
            attempt,
            resume_step: u64::MAX,
            job_uid: String::new(),
            time: String::new(),
        }));
    }
    claims.sort_by_key(|claim| claim.attempt);
    Ok(claims)
}

/// Whether a checkpoint of `attempt` at `step` counts under `claims`.
pub fn counts(claims: &[Claim], attempt: u32, step: u64) -> bool {
    claims.iter().filter(|claim| claim.attempt > attempt).all(|claim| claim.resume_step >= step)
}

/// The highest attempt that has claimed, if it is higher than `attempt`.
///
/// # Errors
/// See [`claims`].
pub fn higher(location: &Path, attempt: u32) -> Result<Option<u32>, FenceError> {
    let highest = claims(location)?.last().map(|claim| claim.attempt);
    Ok(highest.filter(|highest| *highest > attempt))
}

/// Claims the checkpoints for `claim.attempt`, then removes what earlier attempts left half done
/// and moves their checkpoints that no longer count aside.
///
/// # Errors
/// `Fenced` when this or a higher attempt is claimed already.
pub fn claim(disk: &Disk, location: &Path, claim: &Claim) -> Result<(), FenceError> {
    let directory = location.join("attempts");
    disk.create_directory(&directory).map_err(io(&directory))?;
    let own = claim.attempt;
    if let Some(claimed) = higher(location, own)? {
        return Err(FenceError::Fenced { own, claimed });
    }
    let path = directory.join(format!("{own}.json"));
    let mut file = match disk.create_new(&path) {
        Ok(file) => file,
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            return Err(FenceError::Fenced { own, claimed: own });
        }
        Err(error) => return Err(io(&path)(error)),
    };
    let text = serde_json::to_vec(claim).map_err(|error| io(&path)(error.into()))?;
    disk.write(&mut file, &text).map_err(io(&path))?;
    disk.sync(&file).map_err(io(&path))?;
    disk.sync_directory(&directory).map_err(io(&directory))?;
    disk.sync_directory(location).map_err(io(location))?;
    // Another one may have claimed while this one did; the higher one stays.
    if let Some(claimed) = higher(location, own)? {
        return Err(FenceError::Fenced { own, claimed });
    }
    tidy(disk, location, own)
}

/// Removes staging of earlier attempts, and moves checkpoints aside that do not count.
fn tidy(disk: &Disk, location: &Path, attempt: u32) -> Result<(), FenceError> {
    let entries = std::fs::read_dir(location).map_err(io(location))?;
    let names = entries.filter_map(|entry| entry.ok()?.file_name().into_string().ok());
    let names: Vec<String> = names.collect();
    for name in &names {
        let path = location.join(name);
        let left = staged_by(name).is_some_and(|staged| staged < attempt);
        let removable = left || name.starts_with(".aside-") || name.starts_with(".gone-");
        if removable {
            disk.remove_directory(&path).map_err(io(&path))?;
        }
    }
    let claims = claims(location)?;
    for found in crate::checkpoint::list(location).map_err(io(location))? {
        let of = found.manifest.as_ref().ok().map(|manifest| manifest.attempt);
        if let Some(of) = of.filter(|of| !counts(&claims, *of, found.step)) {
            let aside = location.join(format!(".aside-a{of}-{}", directory_name(found.step)));
            disk.rename(&found.path, &aside).map_err(io(&found.path))?;
        }
    }
    Ok(())
}

/// `.a3-step-00000200` is staged by attempt 3.
pub fn staging_name(attempt: u32, step: u64) -> String {
    format!(".a{attempt}-{}", directory_name(step))
}

fn staged_by(name: &str) -> Option<u32> {
    let (attempt, rest) = name.strip_prefix(".a")?.split_once('-')?;
    rest.strip_prefix("step-")?;
    attempt.parse().ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn made(attempt: u32, resume_step: u64) -> Claim {
        Claim { attempt, resume_step, job_uid: "job".to_string(), time: String::new() }
    }

    #[test]
    fn a_checkpoint_counts_until_a_later_claim_resumed_before_it() {
        let claims = [made(1, 0), made(2, 30), made(5, 60)];
        for (attempt, step, expected) in
            [
                (1, 20, true),
                (1, 30, true),
                (1, 40, false),
                (2, 60, true),
                (2, 70, false),
                (5, 9, true),
            ]
        {
            assert_eq!(counts(&claims, attempt, step), expected, "attempt {attempt} at {step}");
        }
    }

    #[test]
    fn only_the_highest_attempt_claims_and_only_once() {
        let folder = tempfile::tempdir().expect("a folder");
        let (disk, location) = (Disk::real(), folder.path());
        claim(&disk, location, &made(2, 0)).expect("the first");
        std::fs::create_dir(location.join(".a2-step-00000010")).expect("a folder");
        for (attempt, by) in [(2, 2), (1, 2)] {
            let refused = claim(&disk, location, &made(attempt, 0)).expect_err("fenced");
            assert!(matches!(refused, FenceError::Fenced { claimed, .. } if claimed == by));
        }
        assert_eq!(higher(location, 2).expect("claims"), None);
        claim(&disk, location, &made(3, 5)).expect("a higher one");
        assert_eq!(higher(location, 2).expect("claims"), Some(3));
        assert!(!location.join(".a2-step-00000010").exists(), "staging of attempt 2 stayed");
    }

    #[test]
    fn a_claim_that_was_never_completed_disqualifies_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        claim(&Disk::real(), folder.path(), &made(1, 0)).expect("the first");
        std::fs::write(folder.path().join("attempts/2.json"), "{\"atte").expect("a torn claim");
        let all = claims(folder.path()).expect("claims");
        assert_eq!(all.len(), 2);
        assert!(counts(&all, 1, 1000));
        assert_eq!(higher(folder.path(), 1).expect("claims"), Some(2));
    }
}
