//! Writing a directory of safetensors: staged beside its place, one tensor after the other, renamed
//! when it is whole.

use super::{Disk, Problem};
use crate::data::durable;
use moejob_protocol::checkpoint::FileEntry;
use serde_json::{Map, Value, json};
use std::fs::{File, OpenOptions};
use std::io::Write;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// Why weights were not converted.
#[derive(Debug, thiserror::Error)]
pub enum Failed {
    #[error("{path} cannot be written")]
    Write { path: PathBuf, source: std::io::Error },
    #[error("{path} exists already: give another place, or remove it")]
    Exists { path: PathBuf },
    #[error("{0}")]
    Refused(Problem),
    #[error("no family of transformers computes this model: {}", joined(.0))]
    NoFamily(Vec<Problem>),
}

fn joined(problems: &[Problem]) -> String {
    problems.iter().map(Problem::to_string).collect::<Vec<_>>().join("; ")
}

impl Failed {
    pub(crate) fn as_problem(&self) -> Problem {
        Problem::new(".", &self.to_string())
    }
}

/// A directory that nobody sees under its name before it is whole; dropped before, it goes.
#[derive(Debug)]
pub struct Staging {
    pub path: PathBuf,
    done: bool,
}

impl Staging {
    /// For `target`, in `parent`.
    ///
    /// # Errors
    /// Something stands there already, or nothing can be made.
    pub fn new(parent: &Path, target: &Path) -> Result<Staging, Failed> {
        if target.symlink_metadata().is_ok() {
            return Err(Failed::Exists { path: target.to_path_buf() });
        }
        let write = |path: &Path, source| Failed::Write { path: path.to_path_buf(), source };
        Disk::real().create_directories(parent).map_err(|error| write(parent, error))?;
        let name = target.file_name().unwrap_or_default().to_string_lossy();
        let path = parent.join(format!(".{name}.{}.part", std::process::id()));
        std::fs::create_dir(&path).map_err(|error| write(&path, error))?;
        Ok(Staging { path, done: false })
    }

    pub fn io(&self, source: std::io::Error) -> Failed {
        Failed::Write { path: self.path.clone(), source }
    }

    /// # Errors
    /// The disk is full, or the file exists.
    pub fn small_file(&self, name: &str, bytes: &[u8]) -> Result<(), Failed> {
        let write = || {
            let mut file = create(&self.path.join(name))?;
            file.write_all(bytes)?;
            file.sync_all()
        };
        write().map_err(|error| self.io(error))
    }

    /// A file of another directory, by this name.
    ///
    /// # Errors
    /// The disk is full, or one of both cannot be used.
    pub fn copy(&self, from: &Path, name: &str) -> Result<(), Failed> {
        let to = self.path.join(name);
        let copy = || {
            std::fs::copy(from, &to)?;
            // It has the rights of what it is a copy of, which may forbid to write.
            File::open(&to)?.sync_all()
        };
        copy().map_err(|error| self.io(error))
    }

    /// Makes everything durable and gives it its name.
    ///
    /// # Errors
    /// The disk failed, or something has taken the name meanwhile.
    pub fn commit(mut self, target: &Path) -> Result<PathBuf, Failed> {
        let rename = || {
            File::open(&self.path)?.sync_all()?;
            durable::rename(&self.path, target)
        };
        rename().map_err(|source| Failed::Write { path: target.to_path_buf(), source })?;
        self.done = true;
        Ok(target.to_path_buf())
    }
}

impl Drop for Staging {
    fn drop(&mut self) {
        if !self.done {
            // What is left of it is hidden by its name and tells what it was.
            let _ = std::fs::remove_dir_all(&self.path);
        }
    }
}

fn create(path: &Path) -> std::io::Result<File> {
    OpenOptions::new().write(true).create_new(true).open(path)
}

/// Name, dtype, shape and bytes of a tensor that follows.
pub type Entry = (String, &'static str, Vec<u64>, u64);

/// The safetensors files of a directory, one after the other.
pub struct Writing<'a> {
    directory: &'a Path,
    pub files: Vec<FileEntry>,
    current: Option<Current>,
    done: u64,
    total: u64,
    progress: &'a mut dyn FnMut(u64, u64),
}

struct Current {
    name: String,
    file: File,
    hasher: blake3::Hasher,
    at: u64,
    expected: u64,
}

impl<'a> Writing<'a> {
    /// `total` bytes of weights are to come.
    pub fn new(
        directory: &'a Path,
        total: u64,
        progress: &'a mut dyn FnMut(u64, u64),
    ) -> Writing<'a> {
        Writing { directory, files: Vec::new(), current: None, done: 0, total, progress }
    }

    /// Begins a file with its header.
    ///
    /// # Errors
    /// The disk failed.
    pub fn begin(&mut self, name: &str, entries: &[Entry]) -> Result<(), Failed> {
        let mut header = Map::new();
        header.insert("__metadata__".to_string(), json!({ "format": "pt" }));
        let mut at = 0;
        for (name, dtype, shape, bytes) in entries {
            let entry = json!({ "dtype": dtype, "shape": shape, "data_offsets": [at, at + bytes] });
            header.insert(name.clone(), entry);
            at += bytes;
        }
        let mut text = Value::Object(header).to_string().into_bytes();
        text.resize(text.len().next_multiple_of(8), b' ');
        let file = create(&self.directory.join(name)).map_err(|error| self.failed(error))?;
        let expected = 8 + text.len() as u64 + at;
        let (name, hasher) = (name.to_string(), blake3::Hasher::new());
        self.current = Some(Current { name, file, hasher, at: 0, expected });
        self.write(&(text.len() as u64).to_le_bytes(), false)?;
        self.write(&text, false)
    }

    /// Where the next byte of the current file goes.
    pub fn at(&self) -> u64 {
        self.current.as_ref().map_or(0, |current| current.at)
    }

    /// # Errors
    /// The disk failed.
    pub fn write(&mut self, bytes: &[u8], counts: bool) -> Result<(), Failed> {
        let current = self.current.as_mut().expect("a file was begun");
        current.hasher.update(bytes);
        current.at += bytes.len() as u64;
        let written = current.file.write_all(bytes);
        written.map_err(|error| self.failed(error))?;
        if counts {
            self.done += bytes.len() as u64;
            (self.progress)(self.done, self.total);
        }
        Ok(())
    }

    /// Ends the current file.
    ///
    /// # Errors
    /// The disk failed.
    pub fn end(&mut self) -> Result<(), Failed> {
        let current = self.current.take().expect("a file was begun");
        assert_eq!(current.at, current.expected, "{}: the header's tensors", current.name);
        current.file.sync_all().map_err(|error| self.failed(error))?;
        self.files.push(FileEntry {
            name: current.name,
            bytes: current.at,
            blake3: current.hasher.finalize().to_hex().to_string(),
        });
        Ok(())
    }

    fn failed(&self, source: std::io::Error) -> Failed {
        Failed::Write { path: self.directory.to_path_buf(), source }
    }
}

/// Runs of parameters that share a file of at most `most` bytes.
pub fn runs(sizes: &[u64], most: u64) -> Vec<Range<usize>> {
    let mut shards: Vec<Range<usize>> = Vec::new();
    let mut filled = u64::MAX;
    for (index, size) in sizes.iter().enumerate() {
        match shards.last_mut() {
            Some(last) if filled.saturating_add(*size) <= most => {
                last.end = index + 1;
                filled += size;
            }
            _ => {
                shards.push(index..index + 1);
                filled = *size;
            }
        }
    }
    shards
}
