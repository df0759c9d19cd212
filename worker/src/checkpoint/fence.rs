//! Claims in storage: which attempt may commit checkpoints.
//!
//! Rank 0 of attempt N creates `attempts/N.json` before it commits anything. A checkpoint of
//! attempt M at step s counts only if every later claim resumed at a step >= s; so whatever a
//! cut-off gang still writes is never used, and nothing it writes overwrites anything.
//!
//! A claim rules checkpoints out, so a damaged one must not: it carries the BLAKE3 of what it says.
//! Claims of releases that wrote none are taken as they stand.

use super::{Cause, Disk, aside};
use super::manifest::manifest_in;
use moejob_protocol::checkpoint::directory_name;
use serde::{Deserialize, Serialize};
use std::io::ErrorKind;
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
#[serde(rename_all = "camelCase")]
pub struct Claim {
    pub attempt: u32,
    /// Steps done in the state that it began with.
    pub resume_step: u64,
    pub job_uid: String,
    pub time: String,
}

/// A claim as its file has it.
#[derive(Debug, Serialize, Deserialize)]
struct Sealed {
    #[serde(flatten)]
    claim: Claim,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    blake3: Option<String>,
}

impl Claim {
    /// The claim of an attempt whose file says nothing.
    fn none(attempt: u32) -> Claim {
        let (job_uid, time) = (String::new(), String::new());
        Claim { attempt, resume_step: u64::MAX, job_uid, time }
    }

    fn is_none(&self) -> bool {
        *self == Claim::none(self.attempt)
    }

    fn hash(&self) -> String {
        let Claim { attempt, resume_step, job_uid, time } = self;
        let text = format!("{attempt} {resume_step} {job_uid:?} {time:?}");
        blake3::hash(text.as_bytes()).to_hex().to_string()
    }

    fn sealed(&self) -> serde_json::Result<Vec<u8>> {
        serde_json::to_vec(&Sealed { claim: self.clone(), blake3: Some(self.hash()) })
    }

    /// What a file says, where it says what was written.
    fn unsealed(text: &[u8]) -> Option<Claim> {
        let Sealed { claim, blake3 } = serde_json::from_slice(text).ok()?;
        blake3.is_none_or(|hash| hash == claim.hash()).then_some(claim)
    }
}

/// A longer file is no claim.
const CLAIM_BYTES_MAX: u64 = 64 << 10;

fn io(path: &Path) -> impl Fn(std::io::Error) -> FenceError {
    move |source| FenceError::Io { path: path.to_path_buf(), source }
}

/// All claims, ascending. One that was never completed was never acted upon: its attempt committed
/// nothing, so it fences what came before but resumed from nothing. Whatever else has a claim's
/// name (a link, a FIFO, a file too large, one that is damaged) is taken for such.
///
/// # Errors
/// Storage fails; that there is no directory of claims is no error.
pub fn claims(disk: &Disk, location: &Path) -> Result<Vec<Claim>, FenceError> {
    let directory = location.join("attempts");
    let names = match disk.names(&directory) {
        Ok(names) => names,
        Err(error) if error.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        Err(error) => return Err(io(&directory)(error)),
    };
    let mut claims = Vec::new();
    for name in names {
        let number = name.strip_suffix(".json").and_then(|name| name.parse::<u32>().ok());
        let Some(attempt) = number else { continue };
        let path = directory.join(name);
        let text = match disk.read(&path, CLAIM_BYTES_MAX) {
            Ok(text) => text,
            Err(error) if crate::disk::may_heal(&error) => return Err(io(&path)(error)),
            Err(_) => Vec::new(),
        };
        let claim = Claim::unsealed(&text).filter(|claim| claim.attempt == attempt);
        claims.push(claim.unwrap_or(Claim::none(attempt)));
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
pub fn higher(disk: &Disk, location: &Path, attempt: u32) -> Result<Option<u32>, FenceError> {
    let highest = claims(disk, location)?.last().map(|claim| claim.attempt);
    Ok(highest.filter(|highest| *highest > attempt))
}

/// A claim on its way into storage, tried until it is there.
#[derive(Debug)]
pub struct Claiming {
    claim: Claim,
    /// The attempt began before it was claimed: what others have committed since still counts.
    late: bool,
    /// Its file was created by this claim, so a try that failed may write it anew.
    created: bool,
    /// A try to create it failed, which storage may have done nevertheless.
    unsure: bool,
    done: bool,
}

impl Claiming {
    pub fn new(claim: Claim) -> Claiming {
        Claiming { claim, late: false, created: false, unsure: false, done: false }
    }

    /// From here on the attempt trains, claimed or not.
    pub fn be_late(&mut self) {
        self.late = true;
    }

    pub fn is_done(&self) -> bool {
        self.done
    }

    /// Claims the checkpoints, unless that is done.
    ///
    /// # Errors
    /// `Fenced` when this or a higher attempt is claimed already. After `Io` it can be tried again.
    pub fn go(&mut self, disk: &Disk, location: &Path) -> Result<(), FenceError> {
        let own = self.claim.attempt;
        let directory = location.join("attempts");
        if self.done {
            return Ok(());
        }
        disk.create_directory(&directory).map_err(io(&directory))?;
        if let Some(claimed) = higher(disk, location, own)? {
            return Err(FenceError::Fenced { own, claimed });
        }
        if self.late {
            self.claim.resume_step = self.claim.resume_step.max(newest(disk, location, own)?);
        }
        self.write(disk, &directory)?;
        disk.sync_directory(&directory).map_err(io(&directory))?;
        disk.sync_directory(location).map_err(io(location))?;
        // Another one may have claimed while this one did; the higher one stays.
        let all = claims(disk, location)?;
        let of_another = |claim: &&Claim| {
            let whole = !claim.is_none() && !self.claim.time.is_empty();
            claim.attempt == own && whole && !self.is_own(claim)
        };
        let highest = all.last().filter(|claim| claim.attempt > own);
        if let Some(by) = highest.or(all.iter().find(of_another)) {
            return Err(FenceError::Fenced { own, claimed: by.attempt });
        }
        self.done = true;
        Ok(())
    }

    fn write(&mut self, disk: &Disk, directory: &Path) -> Result<(), FenceError> {
        let own = self.claim.attempt;
        let path = directory.join(format!("{own}.json"));
        let text = self.claim.sealed().map_err(|error| io(&path)(error.into()))?;
        if self.created {
            match disk.remove_file(&path) {
                Err(error) if error.kind() != ErrorKind::NotFound => return Err(io(&path)(error)),
                _ => self.created = false,
            }
        }
        let mut file = match disk.create_new(&path) {
            Ok(file) => file,
            Err(error) if error.kind() == ErrorKind::AlreadyExists => {
                let found = match disk.read(&path, CLAIM_BYTES_MAX) {
                    Err(error) if crate::disk::may_heal(&error) => return Err(io(&path)(error)),
                    found => found.unwrap_or_default(),
                };
                self.created = match Claim::unsealed(&found) {
                    Some(claim) => self.is_own(&claim),
                    None => self.unsure,
                };
                return match self.created {
                    // It was created though storage had said that it was not.
                    true => self.write(disk, directory),
                    false => Err(FenceError::Fenced { own, claimed: own }),
                };
            }
            Err(error) => {
                self.unsure = true;
                return Err(io(&path)(error));
            }
        };
        (self.created, self.unsure) = (true, false);
        disk.write(&mut file, &text).map_err(io(&path))?;
        disk.sync(&file).map_err(io(&path))
    }

    /// Whether it was this one that wrote a claim, whatever it said of the step then: no two are
    /// made at the same time.
    fn is_own(&self, claim: &Claim) -> bool {
        let Claim { attempt, job_uid, time, .. } = &self.claim;
        let same = (attempt, job_uid, time) == (&claim.attempt, &claim.job_uid, &claim.time);
        same && !time.is_empty()
    }

    /// Gives the claim back: its attempt ends without a step.
    pub fn give_back(&mut self, disk: &Disk, location: &Path) {
        let path = location.join("attempts").join(format!("{}.json", self.claim.attempt));
        if self.created && disk.remove_file(&path).is_ok() {
            (self.created, self.done) = (false, false);
        }
    }
}

/// The step of the newest checkpoint of an attempt below `own` that counts; 0: there is none.
fn newest(disk: &Disk, location: &Path, own: u32) -> Result<u64, FenceError> {
    let claims = claims(disk, location)?;
    let mut newest = 0;
    for found in super::list(disk, location).map_err(io(location))? {
        if let Ok(manifest) = &found.manifest
            && manifest.attempt < own
            && counts(&claims, manifest.attempt, found.step)
        {
            newest = newest.max(found.step);
        }
    }
    Ok(newest)
}

/// Claims the checkpoints for `claim.attempt`, then removes what earlier attempts left half done
/// and moves their checkpoints that no longer count aside.
///
/// # Errors
/// `Fenced` when this or a higher attempt is claimed already; or storage failed.
pub fn claim(disk: &Disk, location: &Path, claim: &Claim) -> Result<(), FenceError> {
    Claiming::new(claim.clone()).go(disk, location)?;
    tidy(disk, location, claim.attempt)
}

/// Removes staging of attempts before `attempt`, and moves checkpoints aside that do not count. One
/// that was moved aside and does count, since its mover was cut off on the way, goes back. Staging
/// of a step of which something was set aside stays: it may be the other half of that.
///
/// # Errors
/// The first thing that could not be done; the others are done nevertheless.
pub fn tidy(disk: &Disk, location: &Path, attempt: u32) -> Result<(), FenceError> {
    let claims = claims(disk, location)?;
    let mut first = Ok(());
    let mut keep = |done: std::io::Result<()>, path: &Path| match done {
        Err(error) if error.kind() != ErrorKind::NotFound && first.is_ok() => {
            first = Err(io(path)(error));
        }
        _ => {}
    };
    let names = disk.names(location).map_err(io(location))?;
    for name in &names {
        let path = location.join(name);
        let is_old = staged_by(name).is_some_and(|(staged, step)| {
            staged < attempt && !aside::has_any(&names, step)
        });
        if is_old || name.starts_with(".gone-") {
            keep(disk.remove_directory(&path), &path);
        } else if name.starts_with(".aside-") {
            keep(back_or_away(disk, location, &path, &claims), &path);
        }
    }
    // What earlier claims ruled out went when they were made.
    let own = claims.iter().find(|claim| claim.attempt == attempt).map(|claim| claim.resume_step);
    for found in super::list_above(disk, location, own).map_err(io(location))? {
        let of = found.manifest.as_ref().ok().map(|manifest| manifest.attempt);
        if let Some(of) = of.filter(|of| !counts(&claims, *of, found.step)) {
            let aside = location.join(aside_name(of, found.step));
            keep(disk.rename(&found.path, &aside), &found.path);
        }
    }
    first
}

/// What lies aside goes back into its place where it counts and nothing has taken it. What an
/// attempt wrote that was cut off goes; what cannot be read is a refused checkpoint as any other.
fn back_or_away(
    disk: &Disk,
    location: &Path,
    path: &Path,
    claims: &[Claim],
) -> std::io::Result<()> {
    let manifest = match manifest_in(disk, path) {
        Ok(manifest) => manifest,
        Err(Some(error)) => return Err(error),
        Err(None) => {
            let name = path.file_name().and_then(|name| name.to_str()).unwrap_or_default();
            let step = name.split_once("-step-").and_then(|(_, step)| step.split('.').next());
            let Some(step) = step.and_then(|step| step.parse().ok()) else { return Ok(()) };
            let of = (&directory_name(step)[..], Cause::Damage);
            return aside::put(disk, location, path, of).map(|_| ());
        }
    };
    let place = location.join(directory_name(manifest.step));
    if !counts(claims, manifest.attempt, manifest.step) {
        return disk.remove_directory(path);
    }
    if place.symlink_metadata().is_err() {
        disk.rename(path, &place)?;
        return disk.sync_directory(location);
    }
    match manifest_in(disk, &place) {
        Ok(_) => disk.remove_directory(path),
        // Of the two this is the better one.
        Err(error) => error.map_or(Ok(()), Err),
    }
}

/// `.aside-a3-step-00000200` was moved aside and is of attempt 3.
pub fn aside_name(attempt: u32, step: u64) -> String {
    format!(".aside-a{attempt}-{}", directory_name(step))
}

/// `.a3-step-00000200` is staged by attempt 3.
pub fn staging_name(attempt: u32, step: u64) -> String {
    format!(".a{attempt}-{}", directory_name(step))
}

/// The attempt and the step of a staging directory's name.
fn staged_by(name: &str) -> Option<(u32, u64)> {
    let (attempt, rest) = name.strip_prefix(".a")?.split_once('-')?;
    let step = rest.strip_prefix("step-")?.parse().ok()?;
    Some((attempt.parse().ok()?, step))
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
        assert_eq!(higher(&disk, location, 2).expect("claims"), None);
        claim(&disk, location, &made(3, 5)).expect("a higher one");
        assert_eq!(higher(&disk, location, 2).expect("claims"), Some(3));
        assert!(!location.join(".a2-step-00000010").exists(), "staging of attempt 2 stayed");
    }

    #[test]
    fn a_claim_that_was_never_completed_disqualifies_nothing() {
        let folder = tempfile::tempdir().expect("a folder");
        claim(&Disk::real(), folder.path(), &made(1, 0)).expect("the first");
        std::fs::write(folder.path().join("attempts/2.json"), "{\"atte").expect("a torn claim");
        let all = claims(&Disk::real(), folder.path()).expect("claims");
        assert_eq!(all.len(), 2);
        assert!(counts(&all, 1, 1000));
        assert_eq!(higher(&Disk::real(), folder.path(), 1).expect("claims"), Some(2));
    }

    #[test]
    fn what_only_has_a_claims_name_is_neither_followed_nor_waited_for() {
        let folder = tempfile::tempdir().expect("a folder");
        let (disk, location) = (Disk::real(), folder.path());
        claim(&disk, location, &made(1, 0)).expect("the first");
        let attempts = location.join("attempts");
        let fifo = rustix::fs::FileType::Fifo;
        rustix::fs::mknodat(rustix::fs::CWD, attempts.join("2.json"), fifo, 0o600.into(), 0)
            .expect("a FIFO");
        let whole = serde_json::to_vec(&made(3, 0)).expect("JSON");
        std::fs::write(location.join("elsewhere"), whole).expect("a file");
        std::os::unix::fs::symlink(location.join("elsewhere"), attempts.join("3.json"))
            .expect("a link");
        let huge = std::fs::File::create(attempts.join("4.json")).expect("a file");
        huge.set_len(1 << 40).expect("a sparse file");
        std::fs::create_dir(attempts.join("5.json")).expect("a folder");
        let all = claims(&disk, location).expect("claims");
        let resumed: Vec<u64> = all.iter().map(|claim| claim.resume_step).collect();
        assert_eq!(resumed, [0, u64::MAX, u64::MAX, u64::MAX, u64::MAX]);
        let refused = claim(&disk, location, &made(5, 0)).expect_err("taken");
        assert!(matches!(refused, FenceError::Fenced { claimed: 5, .. }), "{refused}");
        claim(&disk, location, &made(6, 0)).expect("a higher one");
    }

    /// Storage creates a file and says that it did not, as NFS does whose answer is lost.
    #[test]
    fn a_claim_knows_its_own_file_again() {
        let at = |time: &str| Claim { time: time.to_string(), ..made(1, 7) };
        let whole = at("12:00").sealed().expect("JSON");
        let other = at("12:01").sealed().expect("JSON");
        let cases = [
            (false, &whole[..], true),
            (true, &whole[..], true),
            (true, &other[..], false),
            (false, &other[..], false),
            (true, b"", true),
            (true, &whole[..9], true),
            // Somebody else may be writing it.
            (false, b"", false),
        ];
        for (unsure, text, taken) in cases {
            let folder = tempfile::tempdir().expect("a folder");
            let attempts = folder.path().join("attempts");
            std::fs::create_dir(&attempts).expect("a folder");
            std::fs::write(attempts.join("1.json"), text).expect("a file");
            let mut claiming = Claiming { unsure, ..Claiming::new(at("12:00")) };
            let gone = claiming.go(&Disk::real(), folder.path());
            assert_eq!(gone.is_ok(), taken, "{unsure} {text:?}: {gone:?}");
            let all = claims(&Disk::real(), folder.path()).expect("claims");
            assert!(!taken || all == [at("12:00")], "{all:?}");
        }
    }

    #[test]
    fn a_claim_that_failed_on_the_way_is_made_by_a_later_try() {
        for effects in 0.. {
            let folder = tempfile::tempdir().expect("a folder");
            let ended = crate::checkpoint::EndsAfter::new(effects);
            let dying = Disk::with_faults(ended.clone());
            let mut claiming = Claiming::new(made(1, 7));
            let first = claiming.go(&dying, folder.path());
            assert_eq!(first.is_err(), ended.has_ended(), "after {effects} effects");
            claiming.go(&Disk::real(), folder.path()).expect("storage has healed");
            let all = claims(&Disk::real(), folder.path()).expect("claims");
            assert_eq!(all, [made(1, 7)], "after {effects} effects");
            if !ended.has_ended() {
                assert!(effects > 4, "{effects} effects in all");
                break;
            }
        }
    }
}
