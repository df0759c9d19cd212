//! Megatron's indexed datasets: `.idx` says where the sequences and documents of a `.bin` lie.
//!
//! ```text
//! "MMIDIDX\0\0", u64 version 1, u8 dtype, u64 sequences, u64 documents + 1
//! i32 length of each sequence, i64 byte of each in the .bin
//! i64 first sequence of each document, and the number of sequences
//! ```
//! Nothing of it is believed: lengths, places and counts must agree with each other and with both
//! files' sizes before a token is read.

use super::store::Width;
use std::io;

pub const MAGIC: &[u8; 9] = b"MMIDIDX\0\0";
/// Bytes before the lengths.
pub const HEADER_BYTES: u64 = 34;
/// Entries of the index read at once.
const ENTRIES: u64 = 4096;

/// Random access to an index.
pub trait ReadAt {
    /// Fills `into` from byte `offset` on.
    ///
    /// # Errors
    /// When that cannot be read.
    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()>;
}

impl ReadAt for &[u8] {
    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        let end = offset as usize + into.len();
        let found = self.get(offset as usize..end).ok_or(io::ErrorKind::UnexpectedEof)?;
        into.copy_from_slice(found);
        Ok(())
    }
}

/// Why an index is refused: where, and what is wrong there.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[error("{at}: {why}")]
pub struct Refused {
    pub at: String,
    pub why: String,
}

fn refused<T>(at: impl Into<String>, why: impl Into<String>) -> Result<T, Refused> {
    Err(Refused { at: at.into(), why: why.into() })
}

/// The head of an index whose size is right.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Index {
    pub width: Width,
    pub sequences: u64,
    pub documents: u64,
}

impl Index {
    /// Reads and checks the head of an index of `bytes` bytes.
    ///
    /// # Errors
    /// Says what is wrong and where.
    pub fn open(file: &mut dyn ReadAt, bytes: u64) -> Result<Index, Refused> {
        if bytes < HEADER_BYTES {
            return refused("byte 0", format!("{bytes} bytes are no index, whose head has 34"));
        }
        let mut head = [0; HEADER_BYTES as usize];
        fill(file, 0, &mut head)?;
        if head[..9] != MAGIC[..] {
            return refused("byte 0", "it does not begin with MMIDIDX: it is no Megatron index");
        }
        let word = |at: usize| {
            let mut word = [0; 8];
            word.copy_from_slice(&head[at..at + 8]);
            u64::from_le_bytes(word)
        };
        if word(9) != 1 {
            return refused("byte 9", format!("version {}, and 1 is known", word(9)));
        }
        let width = match head[17] {
            1 => Width::U8,
            2 => Width::I8,
            3 => Width::I16,
            4 => Width::I32,
            5 => Width::I64,
            8 => Width::U16,
            code @ (6 | 7) => {
                return refused("byte 17", format!("dtype {code} is a float; token ids are whole"));
            }
            code => return refused("byte 17", format!("dtype {code} is unknown")),
        };
        let (sequences, marks) = (word(18), word(26));
        let needed = u128::from(sequences) * 12 + u128::from(marks) * 8 + 34;
        if needed != u128::from(bytes) {
            let modes = needed + u128::from(sequences) == u128::from(bytes);
            let why = if modes {
                "it has modes of sequences: multimodal data is not read".to_string()
            } else {
                format!(
                    "{sequences} sequences and {marks} marks of documents need {needed} bytes, \
                     the file has {bytes}"
                )
            };
            return refused("byte 18", why);
        }
        if sequences == 0 || marks < 2 {
            return refused("byte 18", "it has no documents");
        }
        Ok(Index { width, sequences, documents: marks - 1 })
    }

    /// Checks the whole index against a `.bin` of `bin_bytes` bytes and gives the tokens of each
    /// document, in order; documents lie one after the other.
    ///
    /// # Errors
    /// Says what is wrong and where; or what `see` says.
    pub fn each_document<E: From<Refused>>(
        &self,
        file: &mut dyn ReadAt,
        bin_bytes: u64,
        see: &mut dyn FnMut(u64) -> Result<(), E>,
    ) -> Result<(), E> {
        let lengths_at = HEADER_BYTES;
        let places_at = lengths_at + self.sequences * 4;
        let marks_at = places_at + self.sequences * 8;
        let mut lengths = Entries::<4>::new(lengths_at, self.sequences);
        let mut places = Entries::<8>::new(places_at, self.sequences);
        let mut marks = Entries::<8>::new(marks_at, self.documents + 1);
        let mut place: u64 = 0;
        let mut sequence = 0;
        let first = i64::from_le_bytes(marks.next(file)?);
        if first != 0 {
            let at = "document 0".to_string();
            let why = format!("it begins with sequence {first}, and 0 is the first");
            return Err(Refused { at, why }.into());
        }
        for document in 0..self.documents {
            let end = i64::from_le_bytes(marks.next(file)?);
            let possible = sequence..=self.sequences;
            let end = u64::try_from(end).ok().filter(|end| possible.contains(end));
            let Some(end) = end else {
                let at = format!("document {}", document + 1);
                let why = "its first sequence lies before the one before, or behind all";
                return Err(Refused { at, why: why.to_string() }.into());
            };
            let mut tokens = 0;
            for number in sequence..end {
                let length = i32::from_le_bytes(lengths.next(file)?);
                let found = i64::from_le_bytes(places.next(file)?);
                tokens += self.sequence(number, length, found, place, bin_bytes)?;
                place += u64::from(length.unsigned_abs()) * self.width.bytes();
            }
            sequence = end;
            see(tokens)?;
        }
        if sequence != self.sequences {
            let at = format!("sequence {sequence}");
            return Err(Refused { at, why: "it belongs to no document".to_string() }.into());
        }
        if place != bin_bytes {
            let at = "the end".to_string();
            let why = format!("the sequences have {place} bytes, the .bin has {bin_bytes}");
            return Err(Refused { at, why }.into());
        }
        Ok(())
    }

    /// Tokens of sequence `number`, which lies at `place`.
    fn sequence(
        &self,
        number: u64,
        length: i32,
        found: i64,
        place: u64,
        bin_bytes: u64,
    ) -> Result<u64, Refused> {
        let at = || format!("sequence {number}");
        let Ok(tokens) = u64::try_from(length) else {
            return refused(at(), format!("a length of {length}"));
        };
        if found != place as i64 {
            return refused(at(), format!("it is said to lie at byte {found}, and lies at {place}"));
        }
        if tokens * self.width.bytes() > bin_bytes.saturating_sub(place) {
            let why = format!("{tokens} tokens at byte {place} of a .bin of {bin_bytes} bytes");
            return refused(at(), why);
        }
        Ok(tokens)
    }
}

fn fill(file: &mut dyn ReadAt, offset: u64, into: &mut [u8]) -> Result<(), Refused> {
    file.read_at(offset, into)
        .or_else(|error| refused(format!("byte {offset}"), format!("it cannot be read: {error}")))
}

/// Entries of `N` bytes, a block at a time.
struct Entries<const N: usize> {
    offset: u64,
    left: u64,
    block: Vec<u8>,
    used: usize,
}

impl<const N: usize> Entries<N> {
    fn new(offset: u64, count: u64) -> Entries<N> {
        Entries { offset, left: count, block: Vec::new(), used: 0 }
    }

    fn next(&mut self, file: &mut dyn ReadAt) -> Result<[u8; N], Refused> {
        if self.used == self.block.len() {
            let count = self.left.min(ENTRIES);
            self.block.resize(count as usize * N, 0);
            fill(file, self.offset, &mut self.block)?;
            (self.offset, self.left) = (self.offset + count * N as u64, self.left - count);
            self.used = 0;
        }
        let mut entry = [0; N];
        entry.copy_from_slice(&self.block[self.used..self.used + N]);
        self.used += N;
        Ok(entry)
    }
}

/// Writes an index over documents of one sequence each; the `.bin` is their tokens one after the
/// other. `lengths` opens their lengths, `i32` each, anew.
///
/// # Errors
/// Reading or writing fails.
pub fn write_index<R: io::Read>(
    out: &mut dyn io::Write,
    width: Width,
    documents: u64,
    lengths: &mut dyn FnMut() -> io::Result<R>,
) -> io::Result<()> {
    let code = match width {
        Width::U8 => 1,
        Width::I8 => 2,
        Width::I16 => 3,
        Width::U32 | Width::I32 => 4,
        Width::I64 => 5,
        Width::U16 => 8,
    };
    out.write_all(MAGIC)?;
    out.write_all(&1_u64.to_le_bytes())?;
    out.write_all(&[code])?;
    out.write_all(&documents.to_le_bytes())?;
    out.write_all(&(documents + 1).to_le_bytes())?;
    let copied = io::copy(&mut lengths()?, out)?;
    if copied != documents * 4 {
        return Err(io::Error::other("the lengths of the documents are not all there"));
    }
    let mut source = lengths()?;
    let mut place = 0_i64;
    for _ in 0..documents {
        out.write_all(&place.to_le_bytes())?;
        let mut length = [0; 4];
        source.read_exact(&mut length)?;
        place += i64::from(i32::from_le_bytes(length)) * width.bytes() as i64;
    }
    (0..=documents).try_for_each(|document| out.write_all(&document.to_le_bytes()))
}
