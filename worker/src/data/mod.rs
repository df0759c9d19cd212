//! The data: `batch = f(seed, step)`, so that resuming needs no state.
//!
//! ```text
//! globs -> files sorted by name -> held out or not, by the hash of the name
//!       -> one long text -> windows of S + 1 tokens, stride S -> permuted anew each epoch
//! ```
//! Text is read where it lies, a window at a time; nothing of it is kept in memory.

mod files;
mod order;

pub use files::TextFile;
pub use order::permute;

use crate::trainer_api::Failure;
use moejob_protocol::config::{DataConfig, DataSource, Tokenizer, TrainingConfig};
use std::fs::File;
use std::io::Read;
use std::os::unix::fs::{FileExt, OpenOptionsExt};
use std::path::{Path, PathBuf};

/// The epoch whose permutation orders the held-out windows; training never gets there.
const HELD_OUT_EPOCH: u64 = u64::MAX;

/// Why the data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("no file under {root} matches {globs}")]
    NothingMatches { root: PathBuf, globs: String },
    #[error("the glob {glob} cannot be read")]
    Glob { glob: String, source: globset::Error },
    #[error("{path} cannot be used: {why}")]
    Unusable { path: PathBuf, why: &'static str },
    #[error("{path} cannot be read")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the globs match more than {max} files")]
    TooMany { max: usize },
    #[error("{path} changed during training: {was} bytes, now {now}")]
    Resized { path: PathBuf, was: u64, now: u64 },
    #[error("{path} changed during training: its content differs")]
    Rewritten { path: PathBuf },
    #[error("the training files have {found} tokens, a step needs {needed}")]
    TooSmall { found: u64, needed: u64 },
    #[error("the tokenizer {name} is not built in; `bytes` is")]
    Tokenizer { name: String },
    #[error("bytes need a vocabulary of 256, the model has {found}")]
    Vocabulary { found: u32 },
}

impl DataError {
    /// As the worker's end: exit code 3, or 2 where the manifest is at fault.
    pub fn failure(&self) -> Failure {
        let mut message = self.to_string();
        let mut source = std::error::Error::source(self);
        while let Some(cause) = source {
            message = format!("{message}: {cause}");
            source = cause.source();
        }
        let (exit_code, advice) = match self {
            DataError::NothingMatches { .. } | DataError::TooMany { .. } => {
                (3, "check spec.data.train.text.paths and the directory the job runs in")
            }
            DataError::Glob { .. } | DataError::Tokenizer { .. } | DataError::Vocabulary { .. } => {
                (2, "change the manifest")
            }
            DataError::Unusable { .. } | DataError::Read { .. } => {
                (3, "make it a readable file, or exclude it")
            }
            DataError::Resized { .. } | DataError::Rewritten { .. } => {
                (3, "put the file back as it was and run again, or start a new job")
            }
            DataError::TooSmall { .. } => (3, "add text, or make batch or sequence smaller"),
        };
        Failure { exit_code, message, advice: advice.to_string() }
    }
}

/// The files, divided, and what a step reads of them.
#[derive(Clone, Debug)]
pub struct Corpus {
    training: Text,
    held_out: Text,
    fingerprint: String,
    seed: u64,
    global_batch: u64,
    micro_batch: u64,
    sequence: u64,
}

impl Corpus {
    /// Finds, reads and fingerprints the files.
    ///
    /// # Errors
    /// See [`DataError`]; it names the file.
    pub fn open(data: &DataConfig, training: &TrainingConfig) -> Result<Corpus, DataError> {
        if let Tokenizer::Path(name) = &data.tokenizer {
            return Err(DataError::Tokenizer { name: name.clone() });
        }
        let DataSource::Text { root, paths, exclude } = &data.source;
        let mut files = files::find(Path::new(root), paths, exclude, &data.exclude)?;
        let fingerprint = fingerprint(&mut files)?;
        let sequence = u64::from(training.sequence_length);
        let (training_files, held_out) = divide(files, data.validation.fraction, sequence + 1);
        let corpus = Corpus {
            training: Text::new(training_files),
            held_out: Text::new(held_out),
            fingerprint,
            seed: training.seed,
            global_batch: training.global_batch_size.into(),
            micro_batch: training.micro_batch_size.into(),
            sequence,
        };
        let needed = corpus.global_batch * sequence + 1;
        if corpus.training.tokens < needed {
            let found = corpus.training.tokens;
            return Err(DataError::TooSmall { found, needed });
        }
        Ok(corpus)
    }

    /// BLAKE3 over names, sizes and contents, hex.
    pub fn fingerprint(&self) -> &str {
        &self.fingerprint
    }

    /// Training and held-out files and tokens.
    pub fn sizes(&self) -> [(usize, u64); 2] {
        [&self.training, &self.held_out].map(|text| (text.files.len(), text.tokens))
    }

    /// Names of the held-out files.
    pub fn held_out_names(&self) -> Vec<String> {
        let names = self.held_out.files.iter();
        names.map(|file| String::from_utf8_lossy(&file.name).into_owned()).collect()
    }

    /// Ids and targets, [sequences, S] each, of micro-batch `index` of step `step`.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn micro_batch(
        &mut self,
        step: u64,
        index: u32,
        ids: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let windows = self.training.windows(self.sequence);
        let first = step * self.global_batch + u64::from(index) * self.micro_batch;
        for row in 0..self.micro_batch {
            let sample = first + row;
            let at = permute(sample % windows, windows, self.seed, sample / windows);
            let range = self.row(row);
            self.training.window(at * self.sequence, &mut ids[range.clone()], &mut targets[range])?;
        }
        Ok(())
    }

    /// Held-out windows that one measurement of at most `most` uses.
    pub fn held_out_sequences(&self, most: u32) -> u32 {
        let windows = self.held_out.windows(self.sequence);
        windows.min(most.into()) as u32
    }

    /// Ids and targets of the held-out sequences `first ..`, as many as `ids` holds.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn held_out(
        &mut self,
        first: u32,
        ids: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let windows = self.held_out.windows(self.sequence);
        for row in 0..ids.len() as u64 / self.sequence {
            let at = permute(u64::from(first) + row, windows, self.seed, HELD_OUT_EPOCH);
            let range = self.row(row);
            self.held_out.window(at * self.sequence, &mut ids[range.clone()], &mut targets[range])?;
        }
        Ok(())
    }

    fn row(&self, row: u64) -> std::ops::Range<usize> {
        (row * self.sequence) as usize..((row + 1) * self.sequence) as usize
    }
}

/// Files one after the other, as one text.
#[derive(Clone, Debug)]
struct Text {
    files: Vec<TextFile>,
    /// First token of each file.
    starts: Vec<u64>,
    tokens: u64,
    bytes: Vec<u8>,
}

impl Text {
    fn new(files: Vec<TextFile>) -> Text {
        let mut tokens = 0;
        let start = |file: &TextFile| {
            tokens += file.bytes;
            tokens - file.bytes
        };
        let starts = files.iter().map(start).collect();
        Text { files, starts, tokens, bytes: Vec::new() }
    }

    /// Windows of `sequence + 1` tokens at multiples of `sequence`.
    fn windows(&self, sequence: u64) -> u64 {
        self.tokens.saturating_sub(1) / sequence
    }

    /// Reads `ids.len() + 1` tokens from token `at`; the targets are one further.
    fn window(
        &mut self,
        at: u64,
        ids: &mut [u32],
        targets: &mut [u32],
    ) -> Result<(), DataError> {
        let mut bytes = std::mem::take(&mut self.bytes);
        bytes.resize(ids.len() + 1, 0);
        let result = self.read(at, &mut bytes);
        for (i, (id, target)) in ids.iter_mut().zip(targets).enumerate() {
            (*id, *target) = (bytes[i].into(), bytes[i + 1].into());
        }
        self.bytes = bytes;
        result
    }

    fn read(&mut self, at: u64, mut into: &mut [u8]) -> Result<(), DataError> {
        let mut index = self.starts.partition_point(|start| *start <= at) - 1;
        let mut offset = at - self.starts[index];
        while !into.is_empty() {
            let file = &mut self.files[index];
            let count = (file.bytes - offset).min(into.len() as u64) as usize;
            let (now, later) = into.split_at_mut(count);
            let read = |source| DataError::Read { path: file.path.clone(), source };
            let handle = open(&file.path).map_err(read)?;
            handle.read_exact_at(now, offset).or_else(|source| {
                check(&handle, file)?;
                Err(DataError::Read { path: file.path.clone(), source })
            })?;
            // Looked at after the bytes were read, so that no change can slip in between.
            check(&handle, file)?;
            into = later;
            (index, offset) = (index + 1, 0);
        }
        Ok(())
    }
}

/// Never waits for a writer, should the file have become a pipe.
fn open(path: &Path) -> std::io::Result<File> {
    let flags = rustix::fs::OFlags::NONBLOCK.bits() as i32;
    std::fs::OpenOptions::new().read(true).custom_flags(flags).open(path)
}

/// The file is what it was when it was fingerprinted.
fn check(handle: &File, file: &mut TextFile) -> Result<(), DataError> {
    let read = |source| DataError::Read { path: file.path.clone(), source };
    let metadata = handle.metadata().map_err(read)?;
    if metadata.len() != file.bytes {
        let (was, now) = (file.bytes, metadata.len());
        return Err(DataError::Resized { path: file.path.clone(), was, now });
    }
    let modified = metadata.modified().map_err(read)?;
    if modified != file.modified {
        // Touched, or checked out anew: the content decides.
        if hash(handle).map_err(read)?.1 != file.hash {
            return Err(DataError::Rewritten { path: file.path.clone() });
        }
        file.modified = modified;
    }
    Ok(())
}

/// Bytes and BLAKE3 of a whole file, from its start.
fn hash(handle: &File) -> std::io::Result<(u64, [u8; 32])> {
    let mut hasher = blake3::Hasher::new();
    let mut buffer = vec![0; 1 << 16];
    let mut bytes = 0;
    loop {
        let count = handle.read_at(&mut buffer, bytes)?;
        if count == 0 {
            return Ok((bytes, *hasher.finalize().as_bytes()));
        }
        hasher.update(&buffer[..count]);
        bytes += count as u64;
    }
}

/// Reads every file once and fills in its hash.
fn fingerprint(files: &mut [TextFile]) -> Result<String, DataError> {
    let mut hasher = blake3::Hasher::new();
    for file in files {
        let read = |source| DataError::Read { path: file.path.clone(), source };
        let mut handle = open(&file.path).map_err(read)?;
        // Reading nothing finds out early what only reading would tell.
        handle.read(&mut [0; 0]).map_err(read)?;
        let (bytes, content) = hash(&handle).map_err(read)?;
        if bytes != file.bytes {
            let was = file.bytes;
            return Err(DataError::Resized { path: file.path.clone(), was, now: bytes });
        }
        file.hash = content;
        hasher.update(&(file.name.len() as u64).to_le_bytes());
        hasher.update(&file.name);
        hasher.update(&bytes.to_le_bytes());
        hasher.update(&content);
    }
    Ok(hasher.finalize().to_hex().to_string())
}

/// Training and held-out files, each in order. The files with the smallest hashes of their names
/// are held out: those below `fraction`, and further ones until they fill a window of `needed`
/// tokens; at least one file stays for training.
fn divide(files: Vec<TextFile>, fraction: f64, needed: u64) -> (Vec<TextFile>, Vec<TextFile>) {
    if fraction <= 0.0 || files.len() < 2 {
        return (files, Vec::new());
    }
    let share = |file: &TextFile| {
        let hash = blake3::hash(&file.name);
        let mut first = [0; 8];
        first.copy_from_slice(&hash.as_bytes()[..8]);
        u64::from_le_bytes(first)
    };
    let mut by_share: Vec<(u64, usize)> =
        files.iter().enumerate().map(|(index, file)| (share(file), index)).collect();
    by_share.sort_unstable();
    let mut held = vec![false; files.len()];
    let mut tokens = 0;
    for (share, index) in &by_share[..files.len() - 1] {
        let below = (*share as f64) < fraction * 2.0_f64.powi(64);
        if !below && tokens >= needed {
            break;
        }
        held[*index] = true;
        tokens += files[*index].bytes;
    }
    let mut held = held.into_iter();
    let (held_out, training) = files.into_iter().partition(|_| held.next() == Some(true));
    (training, held_out)
}
