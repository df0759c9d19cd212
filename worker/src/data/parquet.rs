//! A column of text in a Parquet file, row group after row group.

use super::DataError;
use super::documents::{LINE_BYTES_MAX, Source};
use parquet::basic::Type as Physical;
use parquet::column::reader::{ColumnReader, ColumnReaderImpl};
use parquet::data_type::{ByteArray, ByteArrayType};
use parquet::errors::ParquetError;
use parquet::file::reader::{ChunkReader, FileReader, Length, SerializedFileReader};
use std::io::{BufReader, Read};
use std::path::{Path, PathBuf};

/// Rows read at once.
const ROWS: usize = 512;
/// Uncompressed bytes of a column in one row group at most: a bomb has more.
const COLUMN_BYTES_MAX: i64 = 4 << 30;

/// The texts of one column.
pub(crate) struct Rows {
    path: PathBuf,
    file: SerializedFileReader<Source>,
    column: usize,
    optional: bool,
    /// The next row group.
    group: usize,
    now: Option<ColumnReaderImpl<ByteArrayType>>,
    row: u64,
}

impl Rows {
    /// # Errors
    /// It is no Parquet, has no such column, or the column holds no text.
    pub fn open(handle: Source, path: &Path, column: &str) -> Result<Rows, DataError> {
        let bad = |at: &str, why: String| DataError::bad(path, at, why);
        let file =
            SerializedFileReader::new(handle).map_err(|error| bad("the footer", say(&error)))?;
        let metadata = file.metadata();
        let schema = metadata.file_metadata().schema_descr();
        let names: Vec<String> =
            schema.columns().iter().map(|column| column.path().string()).collect();
        let Some(index) = names.iter().position(|name| name == column) else {
            let why = format!("no column `{column}`; its columns: {}", names.join(", "));
            return Err(bad("the footer", why));
        };
        let found = schema.column(index);
        if found.physical_type() != Physical::BYTE_ARRAY || found.max_rep_level() > 0 {
            let why = format!("the column `{column}` holds no text in each row");
            return Err(bad("the footer", why));
        }
        if metadata.num_row_groups() == 0 || metadata.file_metadata().num_rows() <= 0 {
            return Err(bad("the footer", "it has no rows".to_string()));
        }
        for (number, group) in metadata.row_groups().iter().enumerate() {
            let bytes = group.column(index).uncompressed_size();
            if !(0..=COLUMN_BYTES_MAX).contains(&bytes) {
                let why = format!("{bytes} bytes in one column: too many");
                return Err(bad(&format!("row group {number}"), why));
            }
        }
        let optional = found.max_def_level() > 0;
        let path = path.to_path_buf();
        Ok(Rows { path, column: index, optional, group: 0, now: None, row: 0, file })
    }

    pub fn skip_to(mut self, row: u64) -> Result<Rows, DataError> {
        while self.row < row {
            if self.next_texts()?.is_none() {
                return Err(DataError::bad(&self.path, format!("row {row}"), "it is not there"));
            }
        }
        Ok(self)
    }

    /// The next rows' texts; none at the end.
    pub fn next_texts(&mut self) -> Result<Option<Vec<String>>, DataError> {
        loop {
            let Some(reader) = &mut self.now else {
                if self.group == self.file.metadata().num_row_groups() {
                    return Ok(None);
                }
                let group = self.file.get_row_group(self.group);
                let reader = group.and_then(|group| group.get_column_reader(self.column));
                self.group += 1;
                match reader.map_err(|error| self.bad(say(&error)))? {
                    ColumnReader::ByteArrayColumnReader(reader) => self.now = Some(reader),
                    _ => return Err(self.bad("the column holds no text".to_string())),
                }
                continue;
            };
            let (mut levels, mut values) = (Vec::new(), Vec::<ByteArray>::new());
            let wanted = self.optional.then_some(&mut levels);
            let read = reader.read_records(ROWS, wanted, None, &mut values);
            let (rows, ..) = read.map_err(|error| self.bad(say(&error)))?;
            if rows == 0 {
                self.now = None;
                continue;
            }
            if values.len() != rows {
                let null = levels.iter().position(|level| *level == 0).unwrap_or(0);
                self.row += null as u64;
                return Err(self.bad("nothing where a text should be".to_string()));
            }
            let mut texts = Vec::with_capacity(rows);
            for value in values {
                if value.len() > LINE_BYTES_MAX {
                    let most = LINE_BYTES_MAX >> 20;
                    return Err(self.bad(format!("the text has more than {most} MiB")));
                }
                let text = std::str::from_utf8(value.data()).map(str::to_string);
                texts.push(text.map_err(|_| self.bad("bytes that are no UTF-8".to_string()))?);
                self.row += 1;
            }
            return Ok(Some(texts));
        }
    }

    fn bad(&self, why: String) -> DataError {
        DataError::bad(&self.path, format!("row {}", self.row + 1), why)
    }
}

impl Length for Source {
    fn len(&self) -> u64 {
        // One that cannot be told is one that no footer fits into.
        self.bytes().unwrap_or(0)
    }
}

impl ChunkReader for Source {
    type T = BufReader<Source>;

    fn get_read(&self, start: u64) -> Result<BufReader<Source>, ParquetError> {
        Ok(BufReader::new(self.at(start)?))
    }

    fn get_bytes(&self, start: u64, length: usize) -> Result<bytes::Bytes, ParquetError> {
        let mut bytes = vec![0; length];
        self.at(start)?.read_exact(&mut bytes)?;
        Ok(bytes.into())
    }
}

fn say(error: &ParquetError) -> String {
    error.to_string()
}
