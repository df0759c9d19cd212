//! An open file whose reads and writes are tried again where they stumble.

use super::{Disk, Effect};
use rustix::fs::OFlags;
use std::fs::{File, Metadata, OpenOptions};
use std::io::{Error, ErrorKind, Read, Result, Seek, SeekFrom, Write};
use std::os::unix::fs::{FileExt, MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::{Arc, PoisonError, RwLock};

/// A file, and a place in it for those who read or write on and on.
#[derive(Debug)]
pub struct OpenFile {
    disk: Disk,
    path: PathBuf,
    /// How it is opened anew: a handle of NFS may be stale for good. None: it has no name.
    flags: Option<OFlags>,
    /// Of the file system it was found on.
    device: u64,
    file: RwLock<Arc<File>>,
    at: u64,
}

impl OpenFile {
    /// Opens a file to be read.
    ///
    /// # Errors
    /// It cannot be.
    pub fn open(disk: &Disk, path: &Path, flags: OFlags) -> Result<OpenFile> {
        let file = disk.patiently(path, None, |_| open(disk, path, flags))?;
        let device = disk.patiently(path, None, |_| file.metadata())?.dev();
        let (disk, path, flags) = (disk.clone(), path.to_path_buf(), Some(flags));
        Ok(OpenFile { disk, path, flags, device, file: RwLock::new(Arc::new(file)), at: 0 })
    }

    /// A file that is open already, and that no other handle leads to: `path` is what it is called
    /// where something is said of it.
    pub fn of(disk: &Disk, file: File, path: &Path) -> OpenFile {
        let (disk, path, file) = (disk.clone(), path.to_path_buf(), RwLock::new(Arc::new(file)));
        OpenFile { disk, path, flags: None, device: 0, file, at: 0 }
    }

    /// Another place in it, at its beginning.
    pub fn again(&self) -> OpenFile {
        let OpenFile { disk, path, flags, device, .. } = self;
        let (disk, path, file) = (disk.clone(), path.clone(), RwLock::new(self.handle()));
        OpenFile { disk, path, flags: *flags, device: *device, file, at: 0 }
    }

    pub fn path(&self) -> &Path {
        &self.path
    }

    pub fn disk(&self) -> &Disk {
        &self.disk
    }

    fn handle(&self) -> Arc<File> {
        Arc::clone(&self.file.read().unwrap_or_else(PoisonError::into_inner))
    }

    /// Does `work` with the handle; a further try has a new one.
    fn patiently<T>(&self, mut work: impl FnMut(&File) -> Result<T>) -> Result<T> {
        let device = self.flags.map(|_| self.device);
        self.disk.patiently(&self.path, device, |again| {
            if again && let Some(flags) = self.flags {
                let anew = Arc::new(open(&self.disk, &self.path, flags)?);
                *self.file.write().unwrap_or_else(PoisonError::into_inner) = anew;
            }
            work(&self.handle())
        })
    }

    pub fn metadata(&self) -> Result<Metadata> {
        self.patiently(File::metadata)
    }

    /// Some bytes from `offset` on, none at the end.
    ///
    /// # Errors
    /// They cannot be read.
    pub fn read_at(&self, into: &mut [u8], offset: u64) -> Result<usize> {
        self.patiently(|file| {
            self.disk.before(Effect::Bytes(&self.path))?;
            loop {
                match file.read_at(into, offset) {
                    Err(error) if error.kind() == ErrorKind::Interrupted => {}
                    other => return other,
                }
            }
        })
    }

    /// # Errors
    /// They are not all there, or cannot be read.
    pub fn read_exact_at(&self, into: &mut [u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < into.len() {
            match self.read_at(&mut into[done..], offset + done as u64)? {
                0 => return Err(Error::from(ErrorKind::UnexpectedEof)),
                count => done += count,
            }
        }
        Ok(())
    }

    /// # Errors
    /// It cannot be written.
    pub fn write_all_at(&self, bytes: &[u8], offset: u64) -> Result<()> {
        let mut done = 0;
        while done < bytes.len() {
            done += self.write_at(&bytes[done..], offset + done as u64)?;
        }
        Ok(())
    }

    fn write_at(&self, bytes: &[u8], offset: u64) -> Result<usize> {
        self.patiently(|file| {
            self.disk.before(Effect::Write(&self.path))?;
            match file.write_at(bytes, offset) {
                Ok(0) if !bytes.is_empty() => Err(Error::from(ErrorKind::WriteZero)),
                other => other,
            }
        })
    }

    /// # Errors
    /// It is not known to be durable.
    pub fn sync_data(&self) -> Result<()> {
        self.patiently(|file| {
            self.disk.before(Effect::Sync(&self.path))?;
            file.sync_data()
        })
    }
}

fn open(disk: &Disk, path: &Path, flags: OFlags) -> Result<File> {
    disk.effect(Effect::Read(path), || {
        OpenOptions::new().read(true).custom_flags(flags.bits() as i32).open(path)
    })
}

impl Read for OpenFile {
    fn read(&mut self, into: &mut [u8]) -> Result<usize> {
        let count = self.read_at(into, self.at)?;
        self.at += count as u64;
        Ok(count)
    }
}

impl Write for OpenFile {
    fn write(&mut self, bytes: &[u8]) -> Result<usize> {
        let count = self.write_at(bytes, self.at)?;
        self.at += count as u64;
        Ok(count)
    }

    fn flush(&mut self) -> Result<()> {
        Ok(())
    }
}

impl Seek for OpenFile {
    fn seek(&mut self, to: SeekFrom) -> Result<u64> {
        let from = match to {
            SeekFrom::Start(at) => Some(at),
            SeekFrom::Current(by) => self.at.checked_add_signed(by),
            SeekFrom::End(by) => self.metadata()?.len().checked_add_signed(by),
        };
        self.at = from.ok_or(ErrorKind::InvalidInput)?;
        Ok(self.at)
    }
}
