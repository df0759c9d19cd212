//! Documents -> token ids, by several threads, in the order of the documents.
//!
//! ```text
//! reader -> chunk k -> thread k % n -> what it made of chunk k -> sink, k ascending
//! ```

use super::documents::{self, Body, Chunk, Position, Reader};
use super::files::DataFile;
use super::tokenizer::Encoder;
use super::line::{self, Refused};
use super::DataError;
use std::io::Read;
use std::path::Path;
use std::sync::mpsc::{Receiver, SyncSender, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::Builder;

/// Chunks that wait at each thread.
const WAITING: usize = 2;

/// What becomes of documents.
#[derive(Clone, Debug)]
pub struct Recipe {
    pub encoder: Encoder,
    /// The key or column of a document's text.
    pub field: String,
    /// Put behind each document.
    pub end_of_document: Option<u32>,
}

/// The tokens of a chunk.
#[derive(Clone, Debug, Default)]
pub struct Tokens {
    pub file: usize,
    pub ids: Vec<u32>,
    pub documents: Vec<Document>,
    /// Where the next chunk begins.
    pub end: Position,
    /// Bytes read of all files so far.
    pub raw: u64,
}

/// A document, or a part of one.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Document {
    /// Line or row, counted from 0.
    pub number: u64,
    pub tokens: u32,
    /// False when more of it follows.
    pub ends: bool,
}

/// Gives `sink` the tokens of all of `reader`'s chunks, in order.
///
/// # Errors
/// The first that reading, tokenising or the sink meets, in the order of the documents.
pub(crate) fn tokenize(
    reader: Reader,
    files: &Arc<Vec<DataFile>>,
    recipe: &Recipe,
    threads: usize,
    sink: &mut dyn FnMut(Tokens) -> Result<(), DataError>,
) -> Result<(), DataError> {
    std::thread::scope(|scope| {
        let mut inputs = Vec::new();
        let mut outputs = Vec::new();
        for _ in 0..threads.max(1) {
            let (input, chunks) = sync_channel(WAITING);
            let (made, output) = sync_channel(WAITING);
            let recipe = recipe.clone();
            let work = move || work(files, &recipe, &chunks, &made);
            // With fewer threads it takes longer.
            if Builder::new().spawn_scoped(scope, work).is_err() {
                break;
            }
            inputs.push(input);
            outputs.push(output);
        }
        let reader = Arc::new(Mutex::new(reader));
        let theirs = Arc::clone(&reader);
        let read = move || {
            let mut reader = theirs.lock().unwrap_or_else(PoisonError::into_inner);
            for (chunk, input) in reader.by_ref().zip(inputs.iter().cycle()) {
                if input.send(chunk).is_err() {
                    break;
                }
            }
        };
        if !outputs.is_empty() && Builder::new().spawn_scoped(scope, read).is_ok() {
            return collect(outputs, sink);
        }
        // A thread that did not begin has read nothing.
        drop(outputs);
        let mut reader = reader.lock().unwrap_or_else(PoisonError::into_inner);
        reader.by_ref().try_for_each(|chunk| sink(encoded(chunk, files, recipe)?))
    })
}

fn collect(
    outputs: Vec<Receiver<Result<Tokens, DataError>>>,
    sink: &mut dyn FnMut(Tokens) -> Result<(), DataError>,
) -> Result<(), DataError> {
    for output in outputs.iter().cycle() {
        // The thread whose turn it is has ended: there was no further chunk.
        let Ok(made) = output.recv() else { break };
        sink(made?)?;
    }
    Ok(())
}

fn work(
    files: &[DataFile],
    recipe: &Recipe,
    chunks: &Receiver<Result<Chunk, DataError>>,
    made: &SyncSender<Result<Tokens, DataError>>,
) {
    while let Ok(chunk) = chunks.recv() {
        if made.send(encoded(chunk, files, recipe)).is_err() {
            break;
        }
    }
}

fn encoded(
    chunk: Result<Chunk, DataError>,
    files: &[DataFile],
    recipe: &Recipe,
) -> Result<Tokens, DataError> {
    chunk.and_then(|chunk| encode(&chunk, &files[chunk.file].path, recipe))
}

/// The tokens of one chunk.
fn encode(chunk: &Chunk, path: &Path, recipe: &Recipe) -> Result<Tokens, DataError> {
    let mut tokens =
        Tokens { file: chunk.file, end: chunk.end, raw: chunk.raw, ..Tokens::default() };
    match &chunk.body {
        Body::Piece { bytes, at, last } => tokens.piece(path, recipe, bytes, *at, *last)?,
        _ => each_text(chunk, path, &recipe.field, &mut |number, text| {
            tokens.push(recipe, text, number)
        })?,
    }
    Ok(tokens)
}

/// Gives `take` the texts of a chunk, each with the number of its line or row; a piece of a text
/// counts as one.
///
/// # Errors
/// Names the place of what is no text, or of what `take` refuses.
pub(crate) fn each_text(
    chunk: &Chunk,
    path: &Path,
    field: &str,
    take: &mut dyn FnMut(u64, &str) -> Result<(), String>,
) -> Result<(), DataError> {
    match &chunk.body {
        Body::Lines(bytes) => {
            let bytes = bytes.strip_suffix(b"\n").unwrap_or(bytes);
            for (number, line) in (chunk.first..).zip(bytes.split(|byte| *byte == b'\n')) {
                let bad = |(column, why): (usize, String)| {
                    let at = format!("line {}, column {column}", number + 1);
                    DataError::bad(path, at, why)
                };
                let text = line::text(line, field, number == 0).map_err(|refused| match refused {
                    Refused::At(column, why) => bad((column, why)),
                    Refused::NoKey(keys) => DataError::NoKey {
                        path: path.to_path_buf(),
                        line: number + 1,
                        field: field.to_string(),
                        keys,
                    },
                })?;
                let Some(text) = text else { continue };
                take(number, &text).map_err(|why| bad((1, why)))?;
            }
        }
        Body::Texts(texts) => {
            for (number, text) in (chunk.first..).zip(texts) {
                let bad = |why| DataError::bad(path, format!("row {}", number + 1), why);
                take(number, text).map_err(bad)?;
            }
        }
        Body::Piece { bytes, at, .. } => {
            let text = utf8(bytes, path, *at)?;
            take(0, text).map_err(|why| DataError::bad(path, format!("byte {at}"), why))?;
        }
    }
    Ok(())
}

/// The text of a piece that begins at byte `at` of its file.
fn utf8<'a>(bytes: &'a [u8], path: &Path, at: u64) -> Result<&'a str, DataError> {
    std::str::from_utf8(bytes).map_err(|error| {
        let at = format!("byte {}", at + error.valid_up_to() as u64);
        DataError::bad(path, at, "bytes that are no UTF-8")
    })
}

impl Tokens {
    fn push(&mut self, recipe: &Recipe, text: &str, number: u64) -> Result<(), String> {
        let mut count = recipe.encoder.encode(text, &mut self.ids)?;
        // A document without tokens has no end either, as in Megatron's `preprocess_data`.
        if let Some(end) = recipe.end_of_document.filter(|_| count > 0) {
            self.ids.push(end);
            count += 1;
        }
        self.documents.push(Document { number, tokens: count as u32, ends: true });
        Ok(())
    }

    fn piece(
        &mut self,
        path: &Path,
        recipe: &Recipe,
        bytes: &[u8],
        at: u64,
        last: bool,
    ) -> Result<(), DataError> {
        match &recipe.encoder {
            // Bytes need not be text.
            Encoder::Bytes => self.ids.extend(bytes.iter().map(|byte| u32::from(*byte))),
            encoder => {
                let text = utf8(bytes, path, at)?;
                encoder
                    .encode_piece(text, at, &mut self.ids)
                    .map_err(|why| DataError::bad(path, format!("byte {at}"), why))?;
            }
        }
        // A document without tokens has no end either.
        if last && (at > 0 || !self.ids.is_empty()) {
            self.ids.extend(recipe.end_of_document);
        }
        let tokens = self.ids.len() as u32;
        self.documents.push(Document { number: 0, tokens, ends: last });
        Ok(())
    }
}

/// Gives `sink` the tokens of lines of JSON from anywhere, on this thread; `path` stands in what is
/// refused.
///
/// # Errors
/// Names the line.
pub fn jsonl(
    raw: Box<dyn Read + Send>,
    path: &Path,
    recipe: &Recipe,
    sink: &mut dyn FnMut(Tokens) -> Result<(), DataError>,
) -> Result<(), DataError> {
    let mut source = documents::decompressed(raw, path)?;
    let (mut rest, mut first) = (Vec::new(), 0);
    while let Some((count, bytes)) = documents::lines(&mut source, &mut rest, path, first)? {
        let (body, end) = (Body::Lines(bytes), Position::default());
        sink(encode(&Chunk { file: 0, first, body, end, raw: 0 }, path, recipe)?)?;
        first += count;
    }
    Ok(())
}

/// Threads that this process may use.
pub fn threads() -> usize {
    std::thread::available_parallelism().map_or(1, usize::from)
}
