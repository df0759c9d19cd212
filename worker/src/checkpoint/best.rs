//! The checkpoint with the least held-out loss, which is kept beside the newest ones.
//!
//! ```text
//! held-out loss of a step whose checkpoint begins --begins--> candidate --committed--> best
//!                                     best.json beside `step-*`  <- spared by `prune`
//! ```
//! The writer of rank 0 alone writes the file, on its thread: storage that hangs holds up no step.
//! Losing it loses no state: the next checkpoint is a candidate. One that cannot be read tells no
//! more which checkpoint is best, so that all that are there then stay.

use super::{Disk, list};
use moejob_protocol::checkpoint::directory_name;
use serde::{Deserialize, Serialize};
use std::io;
use std::path::{Path, PathBuf};

const FILE: &str = "best.json";

/// A checkpoint and what was measured of it, nats a token.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Measured {
    step: u64,
    validation_loss: f64,
}

#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
struct Kept {
    #[serde(default, skip_serializing_if = "Option::is_none")]
    best: Option<Measured>,
    /// Each better than those before it, and not known to be committed: storage may be behind.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    candidates: Vec<Measured>,
    /// Steps of checkpoints one of which may be the best: the file could not be read when they were
    /// there.
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    unknown: Vec<u64>,
}

/// What rank 0 knows of the best checkpoint in a location.
#[derive(Debug)]
pub struct Best {
    location: PathBuf,
    disk: Disk,
    kept: Kept,
}

impl Best {
    /// As the attempts before have left it. What counts is a checkpoint that is there.
    ///
    /// # Errors
    /// The file, or the location, cannot be read or written.
    pub fn open(location: &Path, disk: &Disk) -> io::Result<Best> {
        let Kept { best, candidates, mut unknown } = read(location, disk)?;
        let is_there = |step: u64| location.join(directory_name(step)).is_dir();
        let best = best.iter().chain(&candidates).rfind(|of| is_there(of.step)).copied();
        unknown.retain(|step| is_there(*step));
        let kept = Kept { best, candidates: Vec::new(), unknown };
        Ok(Best { location: location.to_path_buf(), disk: disk.clone(), kept })
    }

    /// A checkpoint of `step` is about to begin, and this is its held-out loss.
    ///
    /// # Errors
    /// The file cannot be written; the checkpoint is then kept as any other.
    pub fn begins(&mut self, step: u64, validation_loss: f64) -> io::Result<()> {
        let mut known = self.kept.best.iter().chain(&self.kept.candidates);
        let is_better = known.all(|of| validation_loss < of.validation_loss);
        if !is_better || !validation_loss.is_finite() {
            return Ok(());
        }
        self.kept.candidates.push(Measured { step, validation_loss });
        self.write()
    }

    /// The checkpoint of `step` is committed.
    ///
    /// # Errors
    /// The file cannot be written.
    pub fn committed(&mut self, step: u64) -> io::Result<()> {
        let Some(candidate) = self.kept.candidates.iter().find(|of| of.step == step).copied() else {
            return Ok(());
        };
        self.kept.best = Some(candidate);
        // Those before it are worse, or were never written.
        self.kept.candidates.retain(|of| of.step > step);
        self.write()
    }

    fn write(&self) -> io::Result<()> {
        self.kept.write(&self.location, &self.disk)
    }
}

impl Kept {
    fn write(&self, location: &Path, disk: &Disk) -> io::Result<()> {
        let staged = location.join(format!(".{FILE}.tmp"));
        let mut file = disk.create_anew(&staged)?;
        disk.write(&mut file, &serde_json::to_vec(self)?)?;
        disk.sync(&file)?;
        disk.rename(&staged, &location.join(FILE))?;
        disk.sync_directory(location)
    }
}

/// Steps whose checkpoints `prune` leaves where they are.
///
/// # Errors
/// The file, or the location, cannot be read or written.
pub fn spared(location: &Path, disk: &Disk) -> io::Result<Vec<u64>> {
    let Kept { best, candidates, unknown } = read(location, disk)?;
    Ok(best.iter().chain(&candidates).map(|of| of.step).chain(unknown).collect())
}

/// The words of the file. Where it has others than ours, a new one names the checkpoints that are
/// there; storage that stumbles changes nothing.
fn read(location: &Path, disk: &Disk) -> io::Result<Kept> {
    let path = location.join(FILE);
    let text = match std::fs::metadata(&path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(Kept::default()),
        Err(error) => return Err(error),
        Ok(of) if of.is_file() => std::fs::read(&path)?,
        // Of a pipe nothing would ever come.
        Ok(_) => Vec::new(),
    };
    let error = match serde_json::from_slice(&text) {
        Ok(kept) => return Ok(kept),
        Err(error) => error,
    };
    let unknown: Vec<u64> = list(disk, location)?.iter().map(|found| found.step).collect();
    tracing::warn!(
        "{}: {error}; which checkpoint is best is not known any more, so all that are there stay \
         ({unknown:?}): remove those that you do not need",
        path.display()
    );
    let kept = Kept { unknown, ..Kept::default() };
    kept.write(location, disk)?;
    Ok(kept)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn spared(location: &Path) -> Vec<u64> {
        super::spared(location, &Disk::real()).expect("read")
    }

    fn open(location: &Path) -> Best {
        Best::open(location, &Disk::real()).expect("read")
    }

    #[test]
    fn a_better_one_takes_its_place_once_it_is_committed() {
        let home = tempfile::tempdir().expect("a folder");
        let location = home.path();
        let commit = |best: &mut Best, step: u64| {
            std::fs::create_dir(location.join(directory_name(step))).expect("a folder");
            best.committed(step).expect("written");
        };
        let mut best = open(location);
        best.begins(10, 2.0).expect("written");
        commit(&mut best, 10);
        assert_eq!(spared(location), [10]);
        for (step, loss) in [(20, 2.5), (30, f64::NAN), (40, 2.0)] {
            best.begins(step, loss).expect("nothing to write");
            commit(&mut best, step);
            assert_eq!(spared(location), [10], "{step}");
        }
        best.begins(50, 1.5).expect("written");
        assert_eq!(spared(location), [10, 50], "both, until it is known which");
        // It ended in between: the file tells whether the checkpoint came to be.
        assert_eq!(open(location).kept.best.map(|best| best.step), Some(10));
        // Storage is behind: the next ones are measured before that one is committed.
        for (step, loss) in [(60, 1.2), (70, 1.3)] {
            best.begins(step, loss).expect("written");
        }
        assert_eq!(spared(location), [10, 50, 60]);
        commit(&mut best, 50);
        assert_eq!(spared(location), [50, 60]);
        for step in [60, 70] {
            commit(&mut best, step);
            assert_eq!(spared(location), [60]);
        }
        std::fs::remove_dir(location.join(directory_name(60))).expect("removed by hand");
        assert_eq!(open(location).kept, Kept::default());
    }

    /// A disk that lost a block, or an editor: nobody knows any more which one was best.
    #[test]
    fn a_file_that_cannot_be_read_keeps_all_that_are_there() {
        for damaged in ["{", "", "[1]", "\0\0"] {
            let home = tempfile::tempdir().expect("a folder");
            let location = home.path();
            for step in [10, 20] {
                std::fs::create_dir(location.join(directory_name(step))).expect("a folder");
            }
            std::fs::write(location.join(FILE), damaged).expect("a file");
            assert_eq!(spared(location), [10, 20], "{damaged:?}");
            std::fs::create_dir(location.join(directory_name(30))).expect("a folder");
            assert_eq!(spared(location), [10, 20], "{damaged:?}: those that were there");
            let mut best = open(location);
            best.begins(30, 2.0).expect("written");
            best.committed(30).expect("written");
            assert_eq!(spared(location), [30, 10, 20], "{damaged:?}");
            std::fs::remove_dir(location.join(directory_name(20))).expect("removed by hand");
            assert_eq!(open(location).kept.unknown, [10], "{damaged:?}");
        }
    }
}
