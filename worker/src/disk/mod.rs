//! Storage: its effects one by one, so that a test can make any of them fail, wait or be lost; what
//! its errors mean; and who tries again how long.
//!
//! ```text
//! effect -> error -> verdict: missing, broken     -> whoever asked says what is wrong
//!                    `------- stumbles            -> again, as long as the disk's patience lasts;
//!                             `-> trouble, told      then it was given up
//! bytes that come -> progress: nobody takes for hung what only takes its time
//! ```
//! A checkpoint's writer tries whole files again by itself, and has a disk without patience.

mod file;
mod progress;
mod trouble;
mod verdict;

pub use file::OpenFile;
pub use progress::Progress;
pub use trouble::{Stumbling, Trouble};
pub use verdict::{GaveUp, Verdict, gave_up, may_heal, verdict};

use std::fs::{File, Metadata, OpenOptions};
use std::io::Write;
use std::os::unix::fs::{MetadataExt, OpenOptionsExt};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicI64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

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
    /// A file or directory is opened to be read, or asked what it is.
    Read(&'a Path),
    /// Bytes of an open file are read.
    Bytes(&'a Path),
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

    /// The time by which patience is measured.
    fn now(&self) -> Duration {
        since_start()
    }

    /// Lets time pass.
    fn pause(&self, time: Duration) {
        std::thread::sleep(time);
    }
}

fn since_start() -> Duration {
    static START: OnceLock<Instant> = OnceLock::new();
    START.get_or_init(Instant::now).elapsed()
}

/// How long what stumbles is tried again.
#[derive(Clone, Debug)]
pub struct Stamina {
    pub longest: Duration,
    /// Before the second try; doubled with each further one, up to two seconds.
    pub retry: Duration,
    /// What is asked for has been there before: that it is refused is no mistake of a person.
    pub known: Arc<AtomicBool>,
}

/// Between two tries at most: storage that is well again is noticed soon.
const PAUSE_MAX: Duration = Duration::from_secs(2);
/// So often whoever pauses looks whether it is still wanted.
const PAUSE_LOOK: Duration = Duration::from_millis(100);

/// Does effects, for real or with faults. A clone is the same one.
#[derive(Clone, Debug, Default)]
pub struct Disk(Arc<Inner>);

#[derive(Clone, Debug, Default)]
struct Inner {
    faults: Option<Arc<dyn Faults>>,
    /// None: nothing is tried twice.
    stamina: Option<Stamina>,
    progress: Progress,
    trouble: Trouble,
}

/// A file that is being written.
#[derive(Debug)]
pub struct NewFile {
    file: File,
    path: PathBuf,
}

impl Disk {
    pub fn real() -> Disk {
        Disk::default()
    }

    pub fn with_faults(faults: Arc<dyn Faults>) -> Disk {
        Disk(Arc::new(Inner { faults: Some(faults), ..Inner::default() }))
    }

    /// This disk, whose work counts into `progress`, which may end it.
    pub fn counting(&self, progress: Progress) -> Disk {
        Disk(Arc::new(Inner { progress, ..(*self.0).clone() }))
    }

    /// This disk, on which what stumbles is tried again. `trouble` says while it does.
    pub fn patient(&self, stamina: Stamina, trouble: Trouble) -> Disk {
        Disk(Arc::new(Inner { stamina: Some(stamina), trouble, ..(*self.0).clone() }))
    }

    pub fn progress(&self) -> &Progress {
        &self.0.progress
    }

    pub fn trouble(&self) -> &Trouble {
        &self.0.trouble
    }

    /// What is asked for from here on is known to be there.
    pub fn is_known(&self) {
        if let Some(stamina) = &self.0.stamina {
            stamina.known.store(true, Ordering::Relaxed);
        }
    }

    /// Time, from any start.
    pub fn now(&self) -> Duration {
        self.0.faults.as_ref().map_or_else(since_start, |faults| faults.now())
    }

    /// Lets time pass, unless nobody waits any more.
    pub fn pause(&self, time: Duration) {
        let mut left = time;
        while !left.is_zero() && !self.0.progress.is_given_up() {
            let some = left.min(PAUSE_LOOK);
            match &self.0.faults {
                Some(faults) => faults.pause(some),
                None => std::thread::sleep(some),
            }
            left -= some;
        }
    }

    /// Does what `attempt` does, again where it stumbles: then it is told that it is done again.
    ///
    /// # Errors
    /// What no try mends; or it was given up (`gave_up`).
    pub fn patiently<T>(
        &self,
        path: &Path,
        device: Option<u64>,
        mut attempt: impl FnMut(bool) -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let first = attempt(false);
        let Some(stamina) = &self.0.stamina else { return first };
        let mut result = first;
        let mut stumble = None;
        let mut pause = stamina.retry;
        loop {
            let error = match result {
                Err(error) if stumbles(&error, stamina, path, device) => error,
                other => return other,
            };
            let now = self.now();
            let (since, _) = stumble.get_or_insert_with(|| {
                (now, self.0.trouble.begin(format!("{}: {error}", path.display()), now))
            });
            let waited = now.saturating_sub(*since);
            let unwanted = self.0.progress.is_given_up();
            if unwanted || waited >= stamina.longest {
                let seconds = waited.as_secs();
                return Err(std::io::Error::other(GaveUp { source: error, seconds, unwanted }));
            }
            self.0.progress.stir();
            self.pause(pause);
            pause = (pause * 2).min(PAUSE_MAX);
            result = attempt(true);
            if result.is_ok() {
                let now = self.now();
                if let Some((_, stumble)) = stumble.take() {
                    stumble.end(now);
                }
                self.0.progress.stir();
            }
        }
    }

    /// An effect is about to be done by whoever asks.
    ///
    /// # Errors
    /// It fails.
    pub fn before(&self, effect: Effect) -> std::io::Result<()> {
        self.0.faults.as_ref().map_or(Ok(()), |faults| faults.before(effect))
    }

    fn effect<T>(
        &self,
        effect: Effect,
        act: impl FnOnce() -> std::io::Result<T>,
    ) -> std::io::Result<T> {
        let Some(faults) = &self.0.faults else { return act() };
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
        if let Some(faults) = &self.0.faults
            && let Err(error) = faults.before(Effect::Write(path))
        {
            file.write_all(&bytes[..bytes.len() / 2])?;
            return Err(error);
        }
        file.write_all(bytes)?;
        if let Some(faults) = &self.0.faults {
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
    pub fn open(&self, path: &Path) -> std::io::Result<(OpenFile, u64)> {
        let flags = rustix::fs::OFlags::NOFOLLOW | rustix::fs::OFlags::NONBLOCK;
        let file = OpenFile::open(self, path, flags)?;
        let metadata = file.metadata()?;
        if !metadata.is_file() {
            return Err(std::io::Error::other("it is no regular file"));
        }
        Ok((file, metadata.len()))
    }

    /// What stands at `path`, behind links.
    pub fn metadata(&self, path: &Path) -> std::io::Result<Metadata> {
        let look = |_| self.effect(Effect::Read(path), || std::fs::metadata(path));
        self.patiently(path, None, look)
    }

    /// What stands at `path` of a file that was found on `device` before.
    pub fn metadata_of(&self, path: &Path, device: u64) -> std::io::Result<Metadata> {
        let look = |_| self.effect(Effect::Read(path), || std::fs::metadata(path));
        self.patiently(path, Some(device), look)
    }


    /// Whether something stands at `path`.
    ///
    /// # Errors
    /// It cannot be told.
    pub fn is_there(&self, path: &Path) -> std::io::Result<bool> {
        match self.metadata(path) {
            Ok(_) => Ok(true),
            Err(error) if verdict(&error) == Verdict::Missing => Ok(false),
            Err(error) => Err(error),
        }
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
        file.read_exact_at(&mut text, 0)?;
        Ok(text)
    }

    /// The names of a directory's entries that are text.
    pub fn names(&self, path: &Path) -> std::io::Result<Vec<String>> {
        let list = |_| {
            self.effect(Effect::Read(path), || {
                let mut names = Vec::new();
                for entry in std::fs::read_dir(path)? {
                    names.extend(entry?.file_name().into_string().ok());
                }
                Ok(names)
            })
        };
        self.patiently(path, None, list)
    }
}

/// Whether another try may do. What was there and whose volume has gone is not missing.
fn stumbles(error: &std::io::Error, stamina: &Stamina, path: &Path, device: Option<u64>) -> bool {
    match verdict(error) {
        Verdict::Stumbles => true,
        Verdict::Refuses => stamina.known.load(Ordering::Relaxed),
        Verdict::Missing => device.is_some_and(|device| is_away(path, device)),
        Verdict::Broken => false,
    }
}

/// Whether the volume that a file was on is not where it was: what stands there by now is on
/// another device.
fn is_away(path: &Path, device: u64) -> bool {
    for above in path.ancestors().skip(1) {
        let above = if above.as_os_str().is_empty() { Path::new(".") } else { above };
        match std::fs::metadata(above) {
            Ok(found) => return found.dev() != device,
            Err(error) if verdict(&error) == Verdict::Missing => {}
            Err(_) => return true,
        }
    }
    false
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
        let reads = matches!(effect, Effect::Read(_) | Effect::Bytes(_));
        if reads || self.left.fetch_sub(1, Ordering::Relaxed) > 0 {
            return Ok(());
        }
        Err(std::io::Error::other("stopped by the test"))
    }
}
