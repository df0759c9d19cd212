//! Token ids in files: numbers of one width, read where they lie.

use super::DataError;
use super::files::DataFile;
use super::handles::Handles;
use crate::disk::{Disk, OpenFile, gave_up};
use moejob_protocol::config::TokenType;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

/// How a token id is written, little-endian.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Width {
    U8,
    I8,
    U16,
    I16,
    U32,
    I32,
    I64,
}

impl Width {
    pub fn bytes(self) -> u64 {
        match self {
            Width::U8 | Width::I8 => 1,
            Width::U16 | Width::I16 => 2,
            Width::U32 | Width::I32 => 4,
            Width::I64 => 8,
        }
    }

    /// The narrowest that holds every id below `vocabulary`.
    pub fn of(vocabulary: u32) -> Width {
        match vocabulary {
            0..=0x100 => Width::U8,
            0x101..=0x1_0000 => Width::U16,
            _ => Width::U32,
        }
    }

    pub fn name(self) -> &'static str {
        match self {
            Width::U8 => "uint8",
            Width::I8 => "int8",
            Width::U16 => "uint16",
            Width::I16 => "int16",
            Width::U32 => "uint32",
            Width::I32 => "int32",
            Width::I64 => "int64",
        }
    }

    /// The ids in `bytes`, a whole number of them.
    pub fn ids(self, bytes: &[u8]) -> impl Iterator<Item = i64> {
        bytes.chunks_exact(self.bytes() as usize).map(move |id| match (self, id) {
            (Width::U8, &[a]) => a.into(),
            (Width::I8, &[a]) => i64::from(a as i8),
            (Width::U16, &[a, b]) => u16::from_le_bytes([a, b]).into(),
            (Width::I16, &[a, b]) => i16::from_le_bytes([a, b]).into(),
            (Width::U32, &[a, b, c, d]) => u32::from_le_bytes([a, b, c, d]).into(),
            (Width::I32, &[a, b, c, d]) => i32::from_le_bytes([a, b, c, d]).into(),
            (_, id) => i64::from_le_bytes(id.try_into().unwrap_or([0; 8])),
        })
    }

    /// The least and the largest id in `bytes`, a whole number of them; none of none.
    pub fn range(self, bytes: &[u8]) -> Option<(i64, i64)> {
        // One loop a width, so that the compiler makes vectors of it.
        fn of<const N: usize, T: Ord + Copy + Into<i64>>(
            bytes: &[u8],
            read: fn([u8; N]) -> T,
        ) -> Option<(i64, i64)> {
            let (ids, _) = bytes.as_chunks::<N>();
            let first = read(*ids.first()?);
            let mut range = (first, first);
            for id in ids {
                let id = read(*id);
                range = (range.0.min(id), range.1.max(id));
            }
            Some((range.0.into(), range.1.into()))
        }
        match self {
            Width::U8 => of(bytes, u8::from_le_bytes),
            Width::I8 => of(bytes, i8::from_le_bytes),
            Width::U16 => of(bytes, u16::from_le_bytes),
            Width::I16 => of(bytes, i16::from_le_bytes),
            Width::U32 => of(bytes, u32::from_le_bytes),
            Width::I32 => of(bytes, i32::from_le_bytes),
            Width::I64 => of(bytes, i64::from_le_bytes),
        }
    }

    /// Appends `ids`, all of which fit.
    pub fn put(self, ids: &[u32], into: &mut Vec<u8>) {
        match self.bytes() {
            1 => into.extend(ids.iter().map(|id| *id as u8)),
            2 => into.extend(ids.iter().flat_map(|id| (*id as u16).to_le_bytes())),
            4 => into.extend(ids.iter().flat_map(|id| id.to_le_bytes())),
            _ => into.extend(ids.iter().flat_map(|id| u64::from(*id).to_le_bytes())),
        }
    }
}

impl From<TokenType> for Width {
    fn from(dtype: TokenType) -> Width {
        match dtype {
            TokenType::Uint16 => Width::U16,
            TokenType::Uint32 => Width::U32,
        }
    }
}

/// Token ids from a byte of a file on.
#[derive(Clone, Debug)]
pub struct Store {
    backing: Backing,
    pub width: Width,
    /// The first id's byte.
    pub offset: u64,
    pub tokens: u64,
}

#[derive(Clone, Debug)]
enum Backing {
    /// The user's, which may change under us.
    Named(DataFile, Handles),
    /// Ours: nobody writes it any more.
    Spooled(Arc<OpenFile>),
}

impl Store {
    pub(crate) fn named(file: DataFile, handles: &Handles, width: Width, offset: u64) -> Store {
        let tokens = (file.bytes - offset) / width.bytes();
        Store { backing: Backing::Named(file, handles.clone()), width, offset, tokens }
    }

    /// Of a file of ours.
    pub fn spooled(file: Arc<OpenFile>, width: Width, offset: u64, tokens: u64) -> Store {
        Store { backing: Backing::Spooled(file), width, offset, tokens }
    }

    /// What the file's content was when it was found: a file that is only touched keeps it.
    pub fn is_of(&mut self, hash: [u8; 32]) {
        if let Backing::Named(file, _) = &mut self.backing {
            file.hash = hash;
        }
    }

    /// Ids of `into.len()` tokens from token `at` on.
    ///
    /// # Errors
    /// The file changed or cannot be read.
    pub fn read(
        &mut self,
        at: u64,
        into: &mut [u32],
        scratch: &mut Vec<u8>,
    ) -> Result<(), DataError> {
        scratch.resize(into.len() * self.width.bytes() as usize, 0);
        let offset = self.offset + at * self.width.bytes();
        match &mut self.backing {
            Backing::Named(file, handles) => file.read_at(offset, scratch, handles)?,
            Backing::Spooled(file) => file.read_exact_at(scratch, offset).map_err(spool_failed)?,
        }
        for (into, id) in into.iter_mut().zip(self.width.ids(scratch)) {
            *into = id as u32;
        }
        Ok(())
    }
}

impl Store {
    /// The largest id; none where there is no id. Refused are ids that no vocabulary has.
    ///
    /// # Errors
    /// The file changed or cannot be read.
    pub fn largest(&mut self) -> Result<Option<u32>, DataError> {
        let Backing::Named(file, _) = &mut self.backing else { return Ok(None) };
        let (path, width) = (file.path.clone(), self.width);
        let (mut skip, mut token, mut largest) = (self.offset as usize, 0, None);
        file.fingerprint(&mut |block| {
            let rest = &block[skip.min(block.len())..];
            skip -= skip.min(block.len());
            for (index, id) in width.ids(rest).enumerate() {
                let Ok(id) = u32::try_from(id) else {
                    let (path, at) = (path.clone(), format!("token {}", token + index));
                    return Err(DataError::Token { path, at, id, vocabulary: u32::MAX });
                };
                largest = largest.max(Some(id));
            }
            token += rest.len() / width.bytes() as usize;
            Ok(())
        })?;
        Ok(largest)
    }
}

/// What keeps a file of ours from being written or read.
pub(crate) fn spool_failed(source: std::io::Error) -> DataError {
    match gave_up(&source) {
        Some(gave_up) if gave_up.unwanted => DataError::GivenUp,
        _ => DataError::Spool { folder: std::env::temp_dir(), source },
    }
}

/// A temporary file without a name: it goes with the process.
///
/// # Errors
/// The folder for temporary files cannot be written.
pub(crate) fn nameless(disk: &Disk) -> Result<OpenFile, DataError> {
    static NUMBER: AtomicU64 = AtomicU64::new(0);
    let number = NUMBER.fetch_add(1, Ordering::Relaxed);
    let name = format!("moejob-{}-{number}", std::process::id());
    let path: PathBuf = std::env::temp_dir().join(name);
    let create = |path: &Path| {
        std::fs::OpenOptions::new().read(true).write(true).create_new(true).open(path)
    };
    let made = create(&path).or_else(|error| {
        // Left by a process of the same number that died between two lines.
        if error.kind() != std::io::ErrorKind::AlreadyExists {
            return Err(error);
        }
        std::fs::remove_file(&path)?;
        create(&path)
    });
    let file = made.map_err(spool_failed)?;
    std::fs::remove_file(&path).map_err(spool_failed)?;
    Ok(OpenFile::of(disk, file, &path))
}
