//! Files that are read again and again stay open, within a bound.

use crate::disk::OpenFile;
use std::collections::{BTreeMap, HashMap};
use std::path::{Path, PathBuf};
use std::sync::{Arc, Mutex, PoisonError};

/// Of the files that this process may have open, the share that data may take.
const SHARE: u64 = 4;
const KEPT_MIN: u64 = 16;
const KEPT_MAX: u64 = 4096;

/// A clone is the same one.
#[derive(Clone, Debug)]
pub(crate) struct Handles(Arc<Mutex<Kept>>);

#[derive(Debug)]
struct Kept {
    by_path: HashMap<PathBuf, (Arc<OpenFile>, u64)>,
    /// By their last use.
    by_use: BTreeMap<u64, PathBuf>,
    uses: u64,
    most: usize,
}

impl Default for Handles {
    fn default() -> Handles {
        let limit = rustix::process::getrlimit(rustix::process::Resource::Nofile).current;
        let share = limit.map_or(KEPT_MAX, |limit| limit / SHARE);
        Handles::at_most(share.clamp(KEPT_MIN, KEPT_MAX) as usize)
    }
}

impl Handles {
    fn at_most(most: usize) -> Handles {
        let (by_path, by_use) = Default::default();
        Handles(Arc::new(Mutex::new(Kept { by_path, by_use, uses: 0, most })))
    }

    /// The handle of `path`, kept or just opened, and whether it was kept.
    pub fn get<E>(
        &self,
        path: &Path,
        open: impl FnOnce() -> Result<OpenFile, E>,
    ) -> Result<(Arc<OpenFile>, bool), E> {
        if let Some(file) = self.locked().used(path) {
            return Ok((file, true));
        }
        // Not while others wait: it may be a file far away.
        let file = Arc::new(open()?);
        self.locked().put(path, Arc::clone(&file));
        Ok((file, false))
    }

    /// What stands at `path` may be another file by now.
    pub fn forget(&self, path: &Path) {
        let mut kept = self.locked();
        if let Some((_, used)) = kept.by_path.remove(path) {
            kept.by_use.remove(&used);
        }
    }

    fn locked(&self) -> std::sync::MutexGuard<'_, Kept> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Kept {
    fn used(&mut self, path: &Path) -> Option<Arc<OpenFile>> {
        let (file, used) = self.by_path.get_mut(path)?;
        let path = self.by_use.remove(used)?;
        self.uses += 1;
        *used = self.uses;
        self.by_use.insert(self.uses, path);
        Some(Arc::clone(file))
    }

    fn put(&mut self, path: &Path, file: Arc<OpenFile>) {
        self.uses += 1;
        if let Some((_, before)) = self.by_path.insert(path.to_path_buf(), (file, self.uses)) {
            self.by_use.remove(&before);
        }
        self.by_use.insert(self.uses, path.to_path_buf());
        while self.by_path.len() > self.most {
            let Some((_, oldest)) = self.by_use.pop_first() else { return };
            self.by_path.remove(&oldest);
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::disk::Disk;
    use rustix::fs::OFlags;
    use std::io::Error;

    #[test]
    fn the_least_used_is_closed_first() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = |number: usize| folder.path().join(number.to_string());
        (0..5).for_each(|number| std::fs::write(path(number), "text").expect("a file"));
        let handles = Handles::at_most(3);
        let get = |number| {
            let open = || OpenFile::open(&Disk::real(), &path(number), OFlags::empty());
            let found = handles.get::<Error>(&path(number), open);
            found.expect("a file").1
        };
        assert_eq!([0, 1, 2, 0, 3].map(get), [false, false, false, true, false]);
        // 1 has gone for 3.
        assert_eq!([0, 2, 3, 1].map(get), [true, true, true, false]);
        handles.forget(&path(3));
        assert_eq!([3, 1, 2].map(get), [false, true, true]);
        let kept = handles.locked();
        assert_eq!((kept.by_path.len(), kept.by_use.len()), (3, 3));
    }
}
