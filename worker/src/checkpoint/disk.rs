//! The effects of a checkpoint on storage, one by one, so that a test can make any of them fail,
//! wait or be lost.

use std::fs::{File, OpenOptions};
use std::io::Write;
use std::os::unix::fs::OpenOptionsExt;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicI64, Ordering};

/// One thing that is done to storage.
#[derive(Clone, Copy, Debug)]
pub enum Effect<'a> {
    Create(&'a Path),
    Write(&'a Path),
    Sync(&'a Path),
    SyncDirectory(&'a Path),
    CreateDirectory(&'a Path),
    Rename { from: &'a Path, to: &'a Path },
    RemoveFile(&'a Path),
    RemoveDirectory(&'a Path),
    /// A file or directory is opened to be read.
    Read(&'a Path),
}

/// What goes wrong, and when.
pub trait Faults: std::fmt::Debug + Send + Sync {
    /// Called before each effect; may block. After an error the effect is not done, but for a
    /// write, which leaves half its bytes.
    ///
    /// # Errors
    /// What storage is to answer.
    fn before(&self, effect: Effect) -> std::io::Result<()>;

    /// Called after each effect that was done.
    fn after(&self, _effect: Effect) {}
}

/// Does effects, for real or with faults.
#[derive(Clone, Debug, Default)]
pub struct Disk {
    faults: Option<Arc<dyn Faults>>,
}

/// A file that is being written.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    path: PathBuf,
}

impl Disk {
    pub fn real() -> Disk {
        Disk { faults: None }
    }

    pub fn with_faults(faults: Arc<dyn Faults>) -> Disk {
        Disk { faults: Some(faults) }
    }

    fn effect<T>(
        &self,
        effect: Effect,
        act: impl FnOnce() -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let Some(faults) = &self.faults else { return act() };
        faults.before(effect)?;
        let done = act()?;
        faults.after(effect);
        Ok(done)
    }

    /// A new file; one that exists already is an error, as is a link in its place.
    pub fn create_new(&self, path: &Path) -> std::io::Result<NewFile> {
        let flags = rustix::fs::OFlags::NOFOLLOW.bits() as i32;
        let file = self.effect(Effect::Create(path), || {
            OpenOptions::new().write(true).create_new(true).custom_flags(flags).open(path)
        })?;
        Ok(NewFile { file, path: path.to_path_buf() })
    }

    /// A new file in the place of one that an earlier try of the same writer may have left.
    pub fn create_anew(&self, path: &Path) -> std::io::Result<NewFile> {
        match self.remove_file(path) {
            Err(error) if error.kind() != std::io::ErrorKind::NotFound => Err(error),
            _ => self.create_new(path),
        }
    }

    pub fn write(&self, file: &mut NewFile, bytes: &[u8]) -> std::io::Result<()> {
        let NewFile { file, path } = file;
        if let Some(faults) = &self.faults
            && let Err(error) = faults.before(Effect::Write(path))
        {
            file.write_all(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        file.write_all(bytes)?;
        if let Some(faults) = &self.faults {
            faults.after(Effect::Write(path));
        }
        Ok(())
    }

    pub fn sync(&self, file: &NewFile) -> std::io::Result<()> {
        self.effect(Effect::Sync(&file.path), || file.file.sync_all())
    }

    /// Makes the entries of a directory durable.
    pub fn sync_directory(&self, path: &Path) -> std::io::Result<()> {
        self.effect(Effect::SyncDirectory(path), || File::open(path)?.sync_all())
    }

    /// With all above it that are missing, and durable: a checkpoint is no more so than the folder
    /// that it lies in.
    pub fn create_directories(&self, path: &Path) -> std::io::Result<()> {
        if path.is_dir() {
            return Ok(());
        }
        let Some(above) = path.parent() else { return self.create_directory(path) };
        if !above.as_os_str().is_empty() {
            self.create_directories(above)?;
        }
        self.create_directory(path)?;
        self.sync_directory(if above.as_os_str().is_empty() { Path::new(".") } else { above })
    }

    /// Below one that exists: where storage is not mounted nothing is made in its place. One that
    /// exists already is no error.
    pub fn create_directory(&self, path: &Path) -> std::io::Result<()> {
        let made = self.effect(Effect::CreateDirectory(path), || std::fs::create_dir(path));
        match made {
            Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists && path.is_dir() => {
                Ok(())
            }
            other => other,
        }
    }

    pub fn rename(&self, from: &Path, to: &Path) -> std::io::Result<()> {
        self.effect(Effect::Rename { from, to }, || std::fs::rename(from, to))
    }

    pub fn remove_file(&self, path: &Path) -> std::io::Result<()> {
        self.effect(Effect::RemoveFile(path), || std::fs::remove_file(path))
    }

    pub fn remove_directory(&self, path: &Path) -> std::io::Result<()> {
        self.effect(Effect::RemoveDirectory(path), || std::fs::remove_dir_all(path))
    }

    /// Opens a regular file, never through a link and never waiting, and says how long it is.
    pub fn open(&self, path: &Path) -> std::io::Result<(File, u64)> {
        self.effect(Effect::Read(path), || super::open(path))
    }

    /// All bytes of a regular file of at most `bytes_max`.
    ///
    /// # Errors
    /// It is longer (`InvalidData`), or cannot be read.
    pub fn read(&self, path: &Path, bytes_max: u64) -> std::io::Result<Vec<u8>> {
        let (file, bytes) = self.open(path)?;
        if bytes > bytes_max {
            let why = format!("{bytes} bytes, at most {bytes_max}");
            return Err(std::io::Error::new(std::io::ErrorKind::InvalidData, why));
        }
        let mut text = vec![0; bytes as usize];
        std::os::unix::fs::FileExt::read_exact_at(&file, &mut text, 0)?;
        Ok(text)
    }

    /// The names of a directory's entries that are text.
    pub fn names(&self, path: &Path) -> std::io::Result<Vec<String>> {
        self.effect(Effect::Read(path), || {
            let mut names = Vec::new();
            for entry in std::fs::read_dir(path)? {
                names.extend(entry?.file_name().into_string().ok());
            }
            Ok(names)
        })
    }
}

/// Whether storage itself failed, so that another try may do: not that something is missing, is
/// there already, or is no regular file.
pub fn may_heal(error: &std::io::Error) -> bool {
    use std::io::ErrorKind;
    let lasting = [
        ErrorKind::NotFound,
        ErrorKind::UnexpectedEof,
        ErrorKind::InvalidData,
        ErrorKind::NotADirectory,
    ];
    // What `open` says of a link in a file's place.
    let is_link = error.raw_os_error() == Some(rustix::io::Errno::LOOP.raw_os_error());
    error.raw_os_error().is_some() && !is_link && !lasting.contains(&error.kind())
}

/// All effects after the first `effects` fail, as if the process had ended there.
#[derive(Debug)]
pub struct EndsAfter {
    left: AtomicI64,
}

impl EndsAfter {
    pub fn new(effects: i64) -> Arc<EndsAfter> {
        Arc::new(EndsAfter { left: AtomicI64::new(effects) })
    }

    /// Whether the limit was reached.
    pub fn has_ended(&self) -> bool {
        self.left.load(Ordering::Relaxed) < 0
    }
}

impl Faults for EndsAfter {
    fn before(&self, effect: Effect) -> std::io::Result<()> {
        if matches!(effect, Effect::Read(_)) || self.left.fetch_sub(1, Ordering::Relaxed) > 0 {
            return Ok(());
        }
        Err(std::io::Error::other("stopped by the test"))
    }
}
