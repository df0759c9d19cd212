//! An index of Megatron and the `.bin` beside it.

use super::DataError;
use super::files::DataFile;
use super::megatron::{self, Index, ReadAt};
use crate::disk::{OpenFile, may_heal};
use std::io;
use std::os::unix::ffi::OsStrExt;

/// An index in a file, and what storage answered in place of it.
pub(crate) struct At<'a> {
    file: &'a OpenFile,
    failed: Option<io::Error>,
}

impl<'a> At<'a> {
    pub fn new(file: &'a OpenFile) -> At<'a> {
        At { file, failed: None }
    }

    pub fn refused(self, index: &DataFile, refused: megatron::Refused) -> DataError {
        match self.failed {
            Some(source) => index.unreadable(source),
            None => DataError::bad(&index.path, refused.at, refused.why),
        }
    }
}

impl ReadAt for At<'_> {
    fn read_at(&mut self, offset: u64, into: &mut [u8]) -> io::Result<()> {
        match self.file.read_exact_at(into, offset) {
            Err(error) if may_heal(&error) => {
                let said = io::Error::other(error.to_string());
                self.failed = Some(error);
                Err(said)
            }
            other => other,
        }
    }
}

/// The `.bin` beside an `.idx`. None for a `.bin` whose `.idx` stands for it.
///
/// # Errors
/// It is neither, or the other one is not there.
pub(crate) fn megatron_bin(index: &DataFile) -> Result<Option<DataFile>, DataError> {
    let ending = index.path.extension().map(OsStrExt::as_bytes);
    match ending {
        Some(b"idx") => {
            let mut bin = DataFile::named_on(&index.disk, &index.path.with_extension("bin"))?;
            // Its name as the sources have it: relative to the root.
            bin.name = bin_name(&index.name);
            Ok(Some(bin))
        }
        Some(b"bin") if index.is_beside("idx")? => Ok(None),
        Some(b"bin") => {
            let (path, index) = (index.path.clone(), index.path.with_extension("idx"));
            Err(DataError::NoIndex { path, index })
        }
        _ => {
            let why = "it is no .idx file of Megatron";
            Err(DataError::Unusable { path: index.path.clone(), why })
        }
    }
}

/// A `.bin` that a glob has found together with its `.idx` may stay; alone it would be left out.
///
/// # Errors
/// The index is none of `files`.
pub(crate) fn is_beside_its_index(bin: &DataFile, files: &[DataFile]) -> Result<(), DataError> {
    let index = bin.path.with_extension("idx");
    match files.iter().any(|file| file.path == index) {
        true => Ok(()),
        false => Err(DataError::IndexUnnamed { path: bin.path.clone(), index }),
    }
}

/// The name of what lies beside an index of this name, which ends with `idx`.
pub(crate) fn bin_name(index: &[u8]) -> Vec<u8> {
    let stem = &index[..index.len().saturating_sub(3)];
    [stem, b"bin"].concat()
}

/// The head of an index that agrees with its `.bin` throughout.
pub(crate) fn checked(index: &DataFile, bin: &DataFile) -> Result<Index, DataError> {
    let handle = index.open()?;
    let mut at = At::new(&handle);
    let head = match Index::open(&mut at, index.bytes) {
        Ok(head) => head,
        Err(refused) => return Err(at.refused(index, refused)),
    };
    if !bin.bytes.is_multiple_of(head.width.bytes()) {
        let why = format!("{} bytes are no whole number of {}", bin.bytes, head.width.name());
        return Err(DataError::bad(&bin.path, "the end", why));
    }
    match head.each_document(&mut at, bin.bytes, &mut |_| Ok::<(), megatron::Refused>(())) {
        Ok(()) => Ok(head),
        Err(refused) => Err(at.refused(index, refused)),
    }
}
