//! Files of documents -> chunks of work: lines of JSON, pieces of text, rows of Parquet.
//!
//! A chunk is small enough for memory and large enough for a thread. Only whole lines are cut off,
//! so that chunks can be looked at in any order.

use super::cut::Cutter;
use super::{DataError, header};
use super::files::DataFile;
use crate::disk::{OpenFile, may_heal};
use serde::{Deserialize, Serialize};
use std::io::{self, BufRead, BufReader, Read};
use std::path::Path;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

/// Bytes of lines that one thread works on at once.
const CHUNK_BYTES: usize = 512 << 10;
/// A longer line is refused: more likely a file that has no lines. On the way to tokens a line
/// takes five times its bytes.
pub const LINE_BYTES_MAX: usize = 8 << 20;
/// By so much a chunk grows beyond its size for a long line.
const LINE_STEP: usize = 1 << 20;
/// A text file that is tokenised is cut into pieces of this size and, where no token is sure to
/// begin there, of a multiple of it, up to the longest line: tokens take a hundred times the memory
/// of their text on the way.
pub const PIECE_BYTES: usize = 1 << 20;
/// What a frame of zstd may ask for: what `zstd -19` does.
const ZSTD_WINDOW_MAX: u64 = 8 << 20;
const BUFFER: usize = 64 << 10;

/// How documents lie in files.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Format {
    /// A file is a document.
    Text,
    /// A line is one; its text has this key.
    Jsonl(String),
    /// A row is one; its text is in this column.
    Parquet(String),
}

/// Where in a list of files a chunk ends.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Position {
    pub file: usize,
    /// Bytes of the file, once it is decompressed.
    pub offset: u64,
    /// Lines or rows before it.
    pub documents: u64,
}

/// Some documents of one file.
#[derive(Debug)]
pub(crate) struct Chunk {
    pub file: usize,
    /// Lines or rows before the first.
    pub first: u64,
    pub body: Body,
    pub end: Position,
    /// Bytes read of all files, as they lie on the disk.
    pub raw: u64,
}

#[derive(Debug)]
pub(crate) enum Body {
    /// Whole lines; the file's last may lack its end.
    Lines(Vec<u8>),
    /// A piece of a text, from byte `at` on.
    Piece { bytes: Vec<u8>, at: u64, last: bool },
    /// Rows.
    #[cfg_attr(not(feature = "parquet"), allow(dead_code))]
    Texts(Vec<String>),
}

/// Reads files one after the other.
pub(crate) struct Reader {
    files: Arc<Vec<DataFile>>,
    format: Format,
    at: Position,
    open: Option<Open>,
    raw: Arc<AtomicU64>,
    /// Of texts.
    cutter: Cutter,
    failed: Failed,
}

enum Open {
    Lines { handle: OpenFile, source: Box<dyn BufRead + Send>, rest: Vec<u8> },
    Text { handle: OpenFile, source: BufReader<Source>, rest: Vec<u8> },
    #[cfg(feature = "parquet")]
    Rows(super::parquet::Rows),
}

impl Reader {
    /// From `at` on; the beginning is `Position::default()`.
    pub fn new(
        files: Arc<Vec<DataFile>>,
        format: Format,
        at: Position,
        cutter: Cutter,
    ) -> Reader {
        let done: u64 = files[..at.file.min(files.len())].iter().map(|file| file.bytes).sum();
        let (raw, failed) = (Arc::new(AtomicU64::new(done)), Failed::default());
        Reader { files, format, at, open: None, raw, cutter, failed }
    }

    fn start(&mut self, index: usize) -> Result<Open, DataError> {
        let file = &self.files[index];
        let handle = file.open()?;
        let (count, failed) = (self.raw.clone(), self.failed.clone());
        let counted = Source { file: handle.again(), count, failed };
        match &self.format {
            Format::Jsonl(_) => {
                let mut source = decompressed(Box::new(counted), &file.path)?;
                skip(&mut source, self.at.offset).map_err(|error| broken(&file.path, error))?;
                Ok(Open::Lines { handle, source, rest: Vec::new() })
            }
            Format::Text => {
                let mut source = BufReader::with_capacity(BUFFER, counted);
                skip(&mut source, self.at.offset).map_err(|error| broken(&file.path, error))?;
                Ok(Open::Text { handle, source, rest: Vec::new() })
            }
            #[cfg(feature = "parquet")]
            Format::Parquet(column) => {
                let rows = super::parquet::Rows::open(counted, &file.path, column);
                Ok(Open::Rows(rows?.skip_to(self.at.documents)?))
            }
            #[cfg(not(feature = "parquet"))]
            Format::Parquet(_) => Err(DataError::NoParquet { path: file.path.clone() }),
        }
    }

    fn read(&mut self) -> Result<Option<Chunk>, DataError> {
        loop {
            let index = self.at.file;
            if index == self.files.len() {
                return Ok(None);
            }
            let mut open = match self.open.take() {
                Some(open) => open,
                None => self.start(index)?,
            };
            let mut file = self.files[index].clone();
            let first = self.at.documents;
            let body = match &mut open {
                Open::Lines { handle, source, rest } => {
                    let line = first;
                    let lines = lines(source, rest, &file.path, line)?;
                    if lines.is_none() {
                        file.check(handle)?;
                    }
                    lines.map(|(lines, bytes)| {
                        self.at.documents += lines;
                        self.at.offset += bytes.len() as u64;
                        Body::Lines(bytes)
                    })
                }
                Open::Text { handle, source, rest } => {
                    let at = self.at.offset;
                    let piece = piece(source, rest, &mut self.cutter)
                        .map_err(|error| broken(&file.path, error))?;
                    let Some((bytes, last)) = piece else {
                        return Err(too_long(&file.path, at));
                    };
                    if last {
                        file.check(handle)?;
                    }
                    self.at.offset += bytes.len() as u64;
                    Some(Body::Piece { bytes, at, last })
                }
                #[cfg(feature = "parquet")]
                Open::Rows(rows) => {
                    let texts = rows.next_texts()?;
                    texts.map(|texts| {
                        self.at.documents += texts.len() as u64;
                        Body::Texts(texts)
                    })
                }
            };
            let ended = matches!(&body, None | Some(Body::Piece { last: true, .. }));
            if ended {
                self.at = Position { file: index + 1, offset: 0, documents: 0 };
            } else {
                self.open = Some(open);
            }
            if let Some(body) = body {
                let raw = self.raw.load(Ordering::Relaxed);
                return Ok(Some(Chunk { file: index, first, body, end: self.at, raw }));
            }
        }
    }
}

impl Iterator for Reader {
    type Item = Result<Chunk, DataError>;

    fn next(&mut self) -> Option<Self::Item> {
        let read = self.read().map_err(|error| match self.failed.take() {
            // Whatever was made of it on the way: storage failed.
            Some(source) => match self.files.get(self.at.file) {
                Some(file) => file.unreadable(source),
                None => error,
            },
            None => error,
        });
        let item = read.transpose();
        if matches!(item, Some(Err(_))) {
            self.at.file = self.files.len();
        }
        item
    }
}

/// What storage answered in place of a file's bytes. Decoders make other errors of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Failed(Arc<Mutex<Option<io::Error>>>);

impl Failed {
    fn take(&self) -> Option<io::Error> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner).take()
    }
}

/// A file whose bytes are counted as they are read.
#[derive(Debug)]
pub(crate) struct Source {
    file: OpenFile,
    count: Arc<AtomicU64>,
    failed: Failed,
}

impl Source {
    #[cfg(feature = "parquet")]
    pub fn at(&self, start: u64) -> io::Result<Source> {
        let mut file = self.file.again();
        io::Seek::seek(&mut file, io::SeekFrom::Start(start))?;
        Ok(Source { file, count: self.count.clone(), failed: self.failed.clone() })
    }

    #[cfg(feature = "parquet")]
    pub fn bytes(&self) -> io::Result<u64> {
        self.file.metadata().map(|metadata| metadata.len())
    }
}

impl Read for Source {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        match self.file.read(into) {
            Ok(count) => {
                self.count.fetch_add(count as u64, Ordering::Relaxed);
                Ok(count)
            }
            Err(error) if may_heal(&error) => {
                let said = io::Error::other(error.to_string());
                *self.failed.0.lock().unwrap_or_else(PoisonError::into_inner) = Some(error);
                Err(said)
            }
            Err(error) => Err(error),
        }
    }
}

fn skip(source: &mut dyn BufRead, mut bytes: u64) -> io::Result<()> {
    while bytes > 0 {
        let found = source.fill_buf()?.len();
        if found == 0 {
            return Err(io::ErrorKind::UnexpectedEof.into());
        }
        let count = bytes.min(found as u64) as usize;
        source.consume(count);
        bytes -= count as u64;
    }
    Ok(())
}

/// An error of reading; of a compressed file it says that it is damaged or cut off.
fn broken(path: &Path, error: io::Error) -> DataError {
    let why = match error.kind() {
        io::ErrorKind::UnexpectedEof => "the file is cut off".to_string(),
        _ => error.to_string(),
    };
    DataError::bad(path, "reading", why)
}

/// The content of a plain, gzip or zstd file; which it is, its first bytes say.
///
/// # Errors
/// The name says that it is compressed, and it is not.
pub(crate) fn decompressed(
    raw: Box<dyn Read + Send>,
    path: &Path,
) -> Result<Box<dyn BufRead + Send>, DataError> {
    let mut raw = BufReader::with_capacity(BUFFER, raw);
    let head = raw.fill_buf().map_err(|error| broken(path, error))?;
    let gzip = head.starts_with(&[0x1f, 0x8b]);
    let zstd = head.starts_with(&[0x28, 0xb5, 0x2f, 0xfd]) || is_skippable(head);
    let named = |ending: &str| path.extension().is_some_and(|found| found == ending);
    if named("gz") && !gzip || named("zst") && !zstd {
        return Err(DataError::bad(path, "byte 0", "it is not compressed as its name says"));
    }
    let mut plain: Box<dyn BufRead + Send> = match (gzip, zstd) {
        (true, _) => {
            let plain = Members { raw: Some(raw), now: None };
            Box::new(BufReader::with_capacity(BUFFER, plain))
        }
        (_, true) => {
            let plain = Frames { raw: Some(raw), now: None };
            Box::new(BufReader::with_capacity(BUFFER, plain))
        }
        _ => Box::new(raw),
    };
    // An archive may be compressed, too.
    let head = plain.fill_buf().map_err(|error| broken(path, error))?;
    header::not_foreign(head, false).map_err(|(at, why)| DataError::bad(path, at, why))?;
    Ok(plain)
}

type Raw = BufReader<Box<dyn Read + Send>>;
type Frame = ruzstd::decoding::StreamingDecoder<Raw, ruzstd::decoding::FrameDecoder>;

/// Members of gzip, one after the other.
struct Members {
    raw: Option<Raw>,
    now: Option<flate2::bufread::GzDecoder<Raw>>,
}

impl Read for Members {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        loop {
            let mut begun = false;
            if let Some(member) = &mut self.now {
                let count = member.read(into)?;
                if count > 0 || into.is_empty() {
                    return Ok(count);
                }
                self.raw = self.now.take().map(flate2::bufread::GzDecoder::into_inner);
                begun = true;
            }
            let Some(mut raw) = self.raw.take() else { return Ok(0) };
            match raw.fill_buf()?.first() {
                None => return Ok(0),
                Some(first) if begun && *first != 0x1f => {
                    let what = "bytes that are no gzip follow the compressed ones";
                    return Err(io::Error::new(io::ErrorKind::InvalidData, what));
                }
                Some(_) => self.now = Some(flate2::bufread::GzDecoder::new(raw)),
            }
        }
    }
}

/// Frames of zstd, one after the other.
struct Frames {
    raw: Option<Raw>,
    now: Option<Box<Frame>>,
}

impl Read for Frames {
    fn read(&mut self, into: &mut [u8]) -> io::Result<usize> {
        let broken = |what: String| io::Error::new(io::ErrorKind::InvalidData, what);
        loop {
            if let Some(frame) = &mut self.now {
                let count = frame.read(into)?;
                if count > 0 || into.is_empty() {
                    return Ok(count);
                }
                if let Some(said) = frame.decoder.get_checksum_from_data()
                    && frame.decoder.get_calculated_checksum() != Some(said)
                {
                    return Err(broken("a checksum of zstd differs".to_string()));
                }
                self.raw = self.now.take().map(|frame| frame.into_inner());
            }
            let Some(mut raw) = self.raw.take() else { return Ok(0) };
            while raw.fill_buf()?.first().is_some_and(|first| SKIPPABLE.contains(first)) {
                skip_frame(&mut raw)?;
            }
            if raw.fill_buf()?.is_empty() {
                return Ok(0);
            }
            let frame = Frame::new_with_max_window_size(raw, ZSTD_WINDOW_MAX)
                .map_err(|error| broken(format!("zstd: {error}")))?;
            self.now = Some(Box::new(frame));
        }
    }
}

/// The first bytes of zstd's frames that hold no data: an index for seeking, a size, a name.
const SKIPPABLE: std::ops::RangeInclusive<u8> = 0x50..=0x5f;

fn is_skippable(head: &[u8]) -> bool {
    matches!(head, [first, 0x2a, 0x4d, 0x18, ..] if SKIPPABLE.contains(first))
}

fn skip_frame(raw: &mut Raw) -> io::Result<()> {
    let mut head = [0; 8];
    raw.read_exact(&mut head)?;
    if !is_skippable(&head) {
        let what = "bytes that are no zstd follow the compressed ones";
        return Err(io::Error::new(io::ErrorKind::InvalidData, what));
    }
    let [.., a, b, c, d] = head;
    skip(raw, u32::from_le_bytes([a, b, c, d]).into())
}

/// The next whole lines and how many they are; `rest` is what was read too far. None at the end.
pub(crate) fn lines(
    source: &mut dyn BufRead,
    rest: &mut Vec<u8>,
    path: &Path,
    before: u64,
) -> Result<Option<(u64, Vec<u8>)>, DataError> {
    let mut chunk = std::mem::take(rest);
    let mut searched = 0;
    let ends = |bytes: &[u8]| bytes.iter().filter(|byte| **byte == b'\n').count() as u64;
    loop {
        let found = source.fill_buf().map_err(|error| broken(path, error))?;
        if found.is_empty() {
            let unended = chunk.last().is_some_and(|last| *last != b'\n');
            let count = ends(&chunk) + u64::from(unended);
            return Ok((!chunk.is_empty()).then_some((count, chunk)));
        }
        if chunk.len() >= CHUNK_BYTES && chunk.capacity() - chunk.len() < found.len() {
            chunk.reserve_exact(LINE_STEP);
        }
        chunk.extend_from_slice(found);
        let count = found.len();
        source.consume(count);
        if chunk.len() < CHUNK_BYTES {
            continue;
        }
        if let Some(last) = chunk[searched..].iter().rposition(|byte| *byte == b'\n') {
            *rest = chunk.split_off(searched + last + 1);
            return Ok(Some((ends(&chunk), chunk)));
        }
        searched = chunk.len();
        if chunk.len() > LINE_BYTES_MAX {
            let (line, most) = (before + ends(&chunk) + 1, LINE_BYTES_MAX >> 20);
            let why = format!("the line has more than {most} MiB");
            return Err(DataError::bad(path, format!("line {line}"), why));
        }
    }
}

/// The next piece of a text, and whether it is the last; an empty text has one, empty. None: it may
/// not be cut, and is longer than what is tokenised in one.
fn piece(
    source: &mut dyn BufRead,
    rest: &mut Vec<u8>,
    cutter: &mut Cutter,
) -> io::Result<Option<(Vec<u8>, bool)>> {
    let mut bytes = std::mem::take(rest);
    let mut searched = 0;
    while searched < LINE_BYTES_MAX {
        let goal = (searched + PIECE_BYTES).max(bytes.len());
        while bytes.len() < goal {
            let found = source.fill_buf()?;
            if found.is_empty() {
                return Ok(Some((bytes, true)));
            }
            let count = found.len().min(goal - bytes.len());
            bytes.extend_from_slice(&found[..count]);
            source.consume(count);
        }
        if source.fill_buf()?.is_empty() {
            return Ok(Some((bytes, true)));
        }
        if let Some(cut) = cutter.last(&bytes, searched) {
            *rest = bytes.split_off(cut);
            return Ok(Some((bytes, false)));
        }
        searched = bytes.len();
    }
    Ok(None)
}

fn too_long(path: &Path, at: u64) -> DataError {
    let why = format!(
        "this tokenizer may make tokens across every place of the {} MiB from here on, and a \
         longer text is not tokenised in one: write it as lines of JSON, a document each",
        LINE_BYTES_MAX >> 20
    );
    DataError::bad(path, format!("byte {at}"), why)
}
