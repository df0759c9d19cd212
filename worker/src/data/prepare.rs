//! Documents -> files of tokens that training reads where they lie: `moejob data tokenize`.
//!
//! ```text
//! OUTPUT.bin.part, OUTPUT.lengths.part   grow; what of them counts, OUTPUT.state.json says
//! OUTPUT.idx, OUTPUT.bin                 the end: Megatron's, or the .bin alone, flat
//! ```
//! A run that was killed goes on where its state was saved last.

use super::DataError;
use super::durable;
use super::documents::{Format, Position, Reader};
use super::files::DataFile;
use super::megatron;
use super::store::Width;
use super::tokenize::{self, Recipe, Tokens};
use crate::disk::{Disk, OpenFile};
use serde::{Deserialize, Serialize};
use std::fs::{File, OpenOptions};
use std::io::{self, BufReader, BufWriter, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant, UNIX_EPOCH};

/// Between two saved states: what a kill costs at most.
pub const SAVE_EVERY: Duration = Duration::from_secs(5);

/// How the tokens are left.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Layout {
    /// `.bin` and `.idx`, which knows the documents.
    Megatron,
    /// `.bin` alone.
    Flat,
}

/// What is to be done.
#[derive(Clone, Debug)]
pub struct Prepare {
    pub files: Vec<DataFile>,
    pub format: Format,
    pub recipe: Recipe,
    /// Without its ending.
    pub output: PathBuf,
    pub layout: Layout,
    pub threads: usize,
    pub save_every: Duration,
}

/// How far it is.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Done {
    /// Of the files, as they lie on the disk.
    pub bytes: u64,
    pub documents: u64,
    pub tokens: u64,
}

/// Why it stopped.
#[derive(Debug, thiserror::Error)]
pub enum PrepareError {
    #[error(transparent)]
    Data(#[from] DataError),
    #[error("{path} exists already")]
    Exists { path: PathBuf },
    #[error("{path} is the state of another run: other files, tokenizer or options")]
    OtherRun { path: PathBuf },
    #[error("{path} is damaged: {why}")]
    State { path: PathBuf, why: String },
    #[error("no document of the input has a token")]
    Nothing,
    #[error("{path} cannot be written")]
    Write { path: PathBuf, source: io::Error },
}

#[derive(Clone, Debug, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
struct State {
    /// BLAKE3 of files, tokenizer and options.
    run: String,
    position: Position,
    bytes: u64,
    documents: u64,
    tokens: u64,
}

impl Prepare {
    /// The number format of the output.
    pub fn width(&self) -> Width {
        let end = self.recipe.end_of_document.map_or(0, |end| end.saturating_add(1));
        match Width::of(self.recipe.encoder.vocabulary().max(end)) {
            Width::U8 | Width::U16 => Width::U16,
            _ if self.layout == Layout::Megatron => Width::I32,
            _ => Width::U32,
        }
    }

    fn with_ending(&self, ending: &str) -> PathBuf {
        let mut path = self.output.clone().into_os_string();
        path.push(ending);
        path.into()
    }

    /// What tells this run from another one.
    fn run_hash(&self) -> String {
        let mut hasher = blake3::Hasher::new();
        // Texts were cut elsewhere before.
        hasher.update(b"moejob data tokenize 2");
        for file in &self.files {
            let since = file.modified.duration_since(UNIX_EPOCH).unwrap_or_default();
            let line = format!("{:?} {} {}\n", file.path, file.bytes, since.as_nanos());
            hasher.update(line.as_bytes());
        }
        let Recipe { encoder, field, end_of_document } = &self.recipe;
        let options = (&self.format, field, end_of_document, self.layout, self.width());
        hasher.update(format!("{options:?}").as_bytes());
        hasher.update(&encoder.fingerprint());
        hasher.finalize().to_hex().to_string()
    }

    /// Does it, or what is left of it.
    ///
    /// # Errors
    /// See [`PrepareError`]; what was done stays for the next run.
    pub fn run(&self, progress: &mut dyn FnMut(Done)) -> Result<Done, PrepareError> {
        let bin = self.with_ending(".bin");
        if bin.exists() {
            return Err(PrepareError::Exists { path: bin });
        }
        let mut output = Output::open(self)?;
        progress(output.done());
        let files = Arc::new(self.files.clone());
        let (position, cutter) = (output.state.position, self.recipe.encoder.cutter());
        let reader = Reader::new(files.clone(), self.format.clone(), position, cutter);
        let mut failed = None;
        let made = tokenize::tokenize(reader, &files, &self.recipe, self.threads, &mut |tokens| {
            output.push(&tokens).map_err(|error| {
                failed = Some(error);
                // The caller sees `failed`; this only ends the threads.
                DataError::bad(&self.output, "writing", "it cannot be written")
            })?;
            progress(output.done());
            Ok(())
        });
        if let Some(error) = failed {
            return Err(error);
        }
        if let Err(error) = made {
            output.save()?;
            return Err(error.into());
        }
        output.finish(self, &bin)
    }
}

/// The files that grow.
struct Output {
    tokens: BufWriter<OpenFile>,
    lengths: BufWriter<OpenFile>,
    paths: [PathBuf; 3],
    width: Width,
    state: State,
    saved: Instant,
    save_every: Duration,
    /// Tokens of a document whose end is not reached.
    begun: u64,
    scratch: Vec<u8>,
    /// The state as of the last whole document.
    whole: State,
}

impl Output {
    fn open(prepare: &Prepare) -> Result<Output, PrepareError> {
        let paths = [".bin.part", ".lengths.part", ".state.json"];
        let paths = paths.map(|ending| prepare.with_ending(ending));
        let run = prepare.run_hash();
        let fresh =
            State { run, position: Position::default(), bytes: 0, documents: 0, tokens: 0 };
        let state = saved(&paths[2], &fresh, prepare.files.len())?.unwrap_or(fresh);
        let width = prepare.width();
        // What is written has the patience of what is read.
        let disk = prepare.files.first().map_or_else(Disk::real, |file| file.disk.clone());
        let file = |path: &PathBuf, bytes: u64| {
            let write = |source| PrepareError::Write { path: path.clone(), source };
            let mut options = OpenOptions::new();
            options.read(true).write(true).create(true).truncate(false);
            let file = options.open(path).map_err(write)?;
            if file.metadata().map_err(write)?.len() < bytes {
                let why = "it is shorter than its state says; delete it and the state";
                return Err(PrepareError::State { path: path.clone(), why: why.to_string() });
            }
            file.set_len(bytes).map_err(write)?;
            let mut file = OpenFile::of(&disk, file, path);
            file.seek(SeekFrom::Start(bytes)).map_err(write)?;
            Ok(BufWriter::with_capacity(1 << 20, file))
        };
        Ok(Output {
            tokens: file(&paths[0], state.tokens * width.bytes())?,
            lengths: file(&paths[1], state.documents * 4)?,
            whole: state.clone(),
            paths,
            width,
            state,
            saved: Instant::now(),
            save_every: prepare.save_every,
            begun: 0,
            scratch: Vec::new(),
        })
    }

    fn done(&self) -> Done {
        let State { bytes, documents, tokens, .. } = self.state;
        Done { bytes, documents, tokens }
    }

    fn push(&mut self, made: &Tokens) -> Result<(), PrepareError> {
        self.scratch.clear();
        self.width.put(&made.ids, &mut self.scratch);
        self.tokens.write_all(&self.scratch).map_err(|source| self.failed(0, source))?;
        self.state.tokens += made.ids.len() as u64;
        for document in &made.documents {
            self.begun += u64::from(document.tokens);
            // A document without tokens is none to Megatron either.
            if document.ends && self.begun > 0 {
                let length = i32::try_from(self.begun).map_err(|_| {
                    let why = "a document has 2^31 tokens or more".to_string();
                    PrepareError::State { path: self.paths[0].clone(), why }
                })?;
                self.lengths
                    .write_all(&length.to_le_bytes())
                    .map_err(|source| self.failed(1, source))?;
                self.state.documents += 1;
                self.begun = 0;
            }
        }
        (self.state.position, self.state.bytes) = (made.end, made.raw);
        if self.begun == 0 {
            self.whole = self.state.clone();
            if self.saved.elapsed() >= self.save_every {
                self.save()?;
            }
        }
        Ok(())
    }

    fn failed(&self, file: usize, source: io::Error) -> PrepareError {
        PrepareError::Write { path: self.paths[file].clone(), source }
    }

    /// First the tokens, then what says how many of them count.
    fn save(&mut self) -> Result<(), PrepareError> {
        for (file, path) in [&mut self.tokens, &mut self.lengths].into_iter().zip(&self.paths) {
            let written = file.flush().and_then(|()| file.get_ref().sync_data());
            written.map_err(|source| PrepareError::Write { path: path.clone(), source })?;
        }
        let text = serde_json::to_vec(&self.whole).unwrap_or_default();
        replace(&self.paths[2], |file| file.write_all(&text))?;
        self.saved = Instant::now();
        Ok(())
    }

    fn finish(mut self, prepare: &Prepare, bin: &Path) -> Result<Done, PrepareError> {
        if self.state.tokens == 0 {
            // No run would go on from here.
            for path in &self.paths {
                drop(std::fs::remove_file(path));
            }
            return Err(PrepareError::Nothing);
        }
        self.save()?;
        let lengths = &self.paths[1];
        if prepare.layout == Layout::Megatron {
            replace(&prepare.with_ending(".idx"), |file| {
                let mut read = || File::open(lengths).map(BufReader::new);
                megatron::write_index(file, self.width, self.state.documents, &mut read)
            })?;
        }
        // The .bin comes last: where it is, all is.
        let write = |path: &Path| {
            let path = path.to_path_buf();
            move |source| PrepareError::Write { path, source }
        };
        durable::rename(&self.paths[0], bin).map_err(write(bin))?;
        for path in &self.paths[1..] {
            std::fs::remove_file(path).map_err(write(path))?;
        }
        Ok(self.done())
    }
}

/// The state that an earlier run left, if it did.
fn saved(path: &Path, fresh: &State, files: usize) -> Result<Option<State>, PrepareError> {
    const STATE_BYTES_MAX: u64 = 1 << 16;
    let mut text = Vec::new();
    match File::open(path) {
        Err(error) if error.kind() == io::ErrorKind::NotFound => return Ok(None),
        Err(source) => return Err(PrepareError::Write { path: path.to_path_buf(), source }),
        Ok(file) => file
            .take(STATE_BYTES_MAX)
            .read_to_end(&mut text)
            .map_err(|source| PrepareError::Write { path: path.to_path_buf(), source })?,
    };
    let damaged = |why: String| PrepareError::State { path: path.to_path_buf(), why };
    let state: State =
        serde_json::from_slice(&text).map_err(|error| damaged(error.to_string()))?;
    if state.run != fresh.run {
        return Err(PrepareError::OtherRun { path: path.to_path_buf() });
    }
    if state.position.file > files {
        return Err(damaged("it names a file behind the last".to_string()));
    }
    Ok(Some(state))
}

fn replace(
    path: &Path,
    write: impl FnOnce(&mut BufWriter<File>) -> io::Result<()>,
) -> Result<(), PrepareError> {
    let folder = path.parent().filter(|folder| !folder.as_os_str().is_empty());
    let name = path.file_name().unwrap_or_default();
    let made = durable::replace(folder.unwrap_or(Path::new(".")), name, |to| {
        let mut file = BufWriter::new(File::create(to)?);
        write(&mut file)?;
        file.flush()
    });
    made.map_err(|source| PrepareError::Write { path: path.to_path_buf(), source })
}
