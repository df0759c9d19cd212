//! Which checkpoints are kept: the newest `keep` that verify, and the best one.
//!
//! ```text
//! committed here, or resumed from --know--> whole        else every byte is read, once
//! step-10, step-15 damaged, step-20, step-25, keep 2 --prune--> step-15, step-20, step-25
//! ```
//! What is damaged is neither counted nor removed: else the last good ones would go for its sake.

use super::fence::{self, FenceError};
use super::{Disk, Found, Identity, best, list, verify};
use std::collections::BTreeMap;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

/// So many bytes are read between two commits. More are read beside them, and count at a later one.
const READ_BETWEEN_MAX: u64 = 1 << 30;

/// What a worker knows of the checkpoints in its location, whichever attempt has learned it.
#[derive(Clone, Debug, Default)]
pub struct Retention {
    known: Arc<Mutex<Known>>,
}

#[derive(Debug, Default)]
struct Known {
    /// By step: whether it is whole.
    whole: BTreeMap<u64, bool>,
    /// A thread reads.
    busy: bool,
}

impl Retention {
    fn lock(&self) -> MutexGuard<'_, Known> {
        self.known.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// This process has written the checkpoint of `step`, or has loaded all of it.
    pub fn know(&self, step: u64) {
        self.lock().whole.insert(step, true);
    }

    fn read(&self, disk: &Disk, found: &Found) {
        let is_whole = verify(disk, &found.path).is_ok();
        self.lock().whole.insert(found.step, is_whole);
    }

    /// Removes what is more than `keep`; gives the steps of those removed. What could not be
    /// removed is looked at again after the next commit.
    ///
    /// # Errors
    /// The higher claim, whose attempt may have resumed from what would go.
    pub fn prune(&self, disk: &Disk, identity: &Identity) -> Result<Vec<u64>, u32> {
        match self.try_prune(disk, identity) {
            Ok(removed) => Ok(removed),
            Err(FenceError::Fenced { claimed, .. }) => Err(claimed),
            Err(FenceError::Io { path, source }) => {
                tracing::warn!("older checkpoints stay: {}: {source}", path.display());
                Ok(Vec::new())
            }
        }
    }

    fn try_prune(&self, disk: &Disk, identity: &Identity) -> Result<Vec<u64>, FenceError> {
        let (location, own) = (&identity.location, identity.attempt);
        let io = |source| FenceError::Io { path: location.clone(), source };
        let claims = fence::claims(disk, location)?;
        let keep = identity.keep.max(1) as usize;
        let mut counted = list(disk, location).map_err(io)?;
        counted.retain(|found| {
            let manifest = found.manifest.as_ref();
            manifest.is_ok_and(|manifest| fence::counts(&claims, manifest.attempt, found.step))
        });
        if counted.len() <= keep {
            return Ok(Vec::new());
        }
        self.learn(disk, &counted);
        counted.retain(|found| self.lock().whole.get(&found.step) == Some(&true));
        counted.truncate(counted.len().saturating_sub(keep));
        let spared = best::spared(location, disk).map_err(io)?;
        counted.retain(|found| !spared.contains(&found.step));
        let mut removed = Vec::new();
        for found in counted {
            // Out of sight first, so that a half-removed one is never taken for a checkpoint.
            let gone = location.join(format!(".gone-a{own}-{}", found.name));
            disk.rename(&found.path, &gone).map_err(io)?;
            if let Some(claimed) = fence::higher(disk, location, own)? {
                disk.rename(&gone, &found.path).map_err(io)?;
                return Err(FenceError::Fenced { own, claimed });
            }
            disk.remove_directory(&gone).map_err(io)?;
            removed.push(found.step);
        }
        Ok(removed)
    }

    /// Reads those of which nothing is known, if need be beside the commits that follow.
    fn learn(&self, disk: &Disk, counted: &[Found]) {
        let mut known = self.lock();
        let is_unknown = |found: &&Found| !known.whole.contains_key(&found.step);
        let unknown: Vec<Found> = counted.iter().filter(is_unknown).cloned().collect();
        if known.busy || unknown.is_empty() {
            return;
        }
        let manifests = unknown.iter().filter_map(|found| found.manifest.as_ref().ok());
        let bytes = manifests.flat_map(|of| &of.files).map(|file| file.bytes);
        let bytes = bytes.fold(0, u64::saturating_add);
        known.busy = bytes > READ_BETWEEN_MAX;
        let beside = known.busy;
        drop(known);
        if !beside {
            return unknown.iter().for_each(|found| self.read(disk, found));
        }
        let (retention, disk) = (self.clone(), disk.clone());
        let read = move || {
            unknown.iter().for_each(|found| retention.read(&disk, found));
            retention.lock().busy = false;
        };
        if std::thread::Builder::new().name("retention".to_string()).spawn(read).is_err() {
            // The next commit tries it again.
            self.lock().busy = false;
        }
    }
}
