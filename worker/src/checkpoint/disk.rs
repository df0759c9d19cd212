//! The effects of a checkpoint on storage, one by one, so that a test can stop between any two.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::Path;
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// Does effects, for real or up to a number of them.
#[derive(Clone, Debug)]
pub struct Disk {
    /// Effects that are left; negative: no limit.
    left: Option<Arc<AtomicI64>>,
}

impl Disk {
    pub fn real() -> Disk {
        Disk { left: None }
    }

    /// Does `effects` of them; all later ones fail, and the first of those that is a write leaves
    /// half its bytes.
    pub fn failing_after(effects: i64) -> Disk {
        Disk { left: Some(Arc::new(AtomicI64::new(effects))) }
    }

    /// Whether the limit was reached.
    pub fn has_failed(&self) -> bool {
        self.left.as_ref().is_some_and(|left| left.load(Ordering::Relaxed) < 0)
    }

    fn effect(&self) -> std::io::Result<()> {
        match &self.left {
            Some(left) if left.fetch_sub(1, Ordering::Relaxed) <= 0 => {
                Err(std::io::Error::other("stopped by the test"))
            }
            _ => Ok(()),
        }
    }

    /// A new file; one that exists already is an error, as is a link in its place.
    pub fn create_new(&self, path: &Path) -> std::io::Result<File> {
        self.effect()?;
        let flags = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
        OpenOptions::new().write(true).create_new(true).custom_flags(flags).open(path)
    }

    pub fn write(&self, file: &mut File, bytes: &[u8]) -> std::io::Result<()> {
        if let Err(error) = self.effect() {
            file.write_all(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        file.write_all(bytes)
    }

    pub fn sync(&self, file: &File) -> std::io::Result<()> {
        self.effect()?;
        file.sync_all()
    }

    /// Makes the entries of a directory durable.
    pub fn sync_directory(&self, path: &Path) -> std::io::Result<()> {
        self.effect()?;
        File::open(path)?.sync_all()
    }

    pub fn create_directory(&self, path: &Path) -> std::io::Result<()> {
        self.effect()?;
        std::fs::create_dir_all(path)
    }

    pub fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        self.effect()?;
        std::fs::rename(from, to)
    }

    pub fn remove_file(&self, path: &Path) -> std::io::Result<()> {
        self.effect()?;
        std::fs::remove_file(path)
    }

    pub fn remove_directory(&self, path: &Path) -> std::io::Result<()> {
        self.effect()?;
        std::fs::remove_dir_all(path)
    }
}
