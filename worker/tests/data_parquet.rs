//! Parquet, in builds that read it:
//! `cargo test -p moe-worker --features parquet --test data_parquet`.
#![cfg(feature = "parquet")]

mod common;

use moe_worker::data::{Batch, Corpus, DataError};
use moejob_protocol::config::DataSource;
use parquet::basic::{Compression, ZstdLevel};
use parquet::data_type::{ByteArray, ByteArrayType, Int32Type};
use parquet::file::properties::WriterProperties;
use parquet::file::writer::SerializedFileWriter;
use parquet::schema::parser::parse_message_type;
use std::path::Path;
use std::sync::Arc;

const TEXTS: usize = 2_000;

fn text(i: usize) -> String {
    format!("document {i} of ü, {}", "x".repeat(i % 50))
}

/// Row groups of 300 rows: a number and a text, the text of row `null` missing.
fn write(path: &Path, compression: Compression, null: Option<usize>) {
    write_rows(path, compression, null, TEXTS);
}

fn write_rows(path: &Path, compression: Compression, null: Option<usize>, count: usize) {
    write_texts(path, (compression, null), count, text);
}

fn write_texts(
    path: &Path,
    (compression, null): (Compression, Option<usize>),
    count: usize,
    text: impl Fn(usize) -> String,
) {
    let schema = "message rows { REQUIRED INT32 id; OPTIONAL BYTE_ARRAY text (UTF8); \
                  REPEATED BYTE_ARRAY tags (UTF8); }";
    let schema = Arc::new(parse_message_type(schema).expect("a schema"));
    let properties = Arc::new(WriterProperties::builder().set_compression(compression).build());
    let file = std::fs::File::create(path).expect("a file");
    let mut writer = SerializedFileWriter::new(file, schema, properties).expect("a writer");
    for first in (0..count).step_by(300) {
        let rows: Vec<usize> = (first..count.min(first + 300)).collect();
        let mut group = writer.next_row_group().expect("a row group");
        let mut column = group.next_column().expect("a column").expect("id");
        let ids: Vec<i32> = rows.iter().map(|row| *row as i32).collect();
        column.typed::<Int32Type>().write_batch(&ids, None, None).expect("ids");
        column.close().expect("a column");
        let mut column = group.next_column().expect("a column").expect("text");
        let levels: Vec<i16> = rows.iter().map(|row| i16::from(Some(*row) != null)).collect();
        let texts: Vec<ByteArray> = rows
            .iter()
            .filter(|row| Some(**row) != null)
            .map(|row| ByteArray::from(text(*row).into_bytes()))
            .collect();
        column.typed::<ByteArrayType>().write_batch(&texts, Some(&levels), None).expect("texts");
        column.close().expect("a column");
        let mut column = group.next_column().expect("a column").expect("tags");
        let none = vec![0; rows.len()];
        column.typed::<ByteArrayType>().write_batch(&[], Some(&none), Some(&none)).expect("none");
        column.close().expect("a column");
        group.close().expect("a row group");
    }
    writer.close().expect("a file");
}

fn open(path: &Path, field: &str) -> Result<Corpus, DataError> {
    let folder = path.parent().expect("a folder");
    let mut data = common::data(folder);
    data.validation.fraction = 0.0;
    data.source = DataSource::Parquet {
        root: folder.display().to_string(),
        paths: vec!["*.parquet".to_string()],
        exclude: vec![],
        field: field.to_string(),
    };
    Corpus::open(&data, &common::training(), 256)
}

#[test]
fn rows_are_documents() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.parquet");
    let bytes: Vec<u32> = (0..TEXTS).flat_map(|i| text(i).into_bytes()).map(u32::from).collect();
    let zstd = Compression::ZSTD(ZstdLevel::default());
    for compression in [Compression::UNCOMPRESSED, Compression::SNAPPY, zstd] {
        write(&path, compression, None);
        let mut corpus = open(&path, "text").expect("texts");
        assert_eq!(corpus.documents()[0], TEXTS as u64);
        assert_eq!(corpus.sizes()[0].1, bytes.len() as u64);
        for window in (0..corpus.windows()).step_by(97) {
            let mut batch = Batch::new(16);
            corpus.fill_in_order(window, &mut batch).expect("data");
            assert_eq!(batch.ids, bytes[window as usize * 16..][..16]);
        }
    }
}

#[test]
fn bad_parquet_is_refused_by_place() {
    let folder = tempfile::tempdir().expect("a folder");
    let path = folder.path().join("a.parquet");
    let refused = |field: &str, why: &str| {
        let failure = open(&path, field).expect_err(why).failure();
        assert_eq!(failure.exit_code, 3, "{failure}");
        assert!(failure.message.contains("a.parquet, "), "{failure}");
        assert!(failure.message.contains(why), "{failure}\nexpected {why}");
    };
    write(&path, Compression::SNAPPY, None);
    refused("body", "no column `body`; its columns: id, text, tags");
    refused("id", "the column `id` holds no text in each row");
    refused("tags", "the column `tags` holds no text in each row");
    let good = std::fs::read(&path).expect("a file");
    write(&path, Compression::SNAPPY, Some(777));
    refused("text", "row 778: nothing where a text should be");
    for damaged in [good[..good.len() - 4].to_vec(), b"PAR1PAR1".to_vec(), good[..100].to_vec()] {
        std::fs::write(&path, damaged).expect("a file");
        refused("text", "the footer: ");
    }
    // Encrypted files end with another mark.
    let encrypted = [&good[..good.len() - 4], b"PARE"].concat();
    std::fs::write(&path, encrypted).expect("a file");
    refused("text", "the footer: ");
    write_rows(&path, Compression::SNAPPY, None, 0);
    refused("text", "the footer: it has no rows");
    // As a line of JSONL, a text is none that takes all memory on its way to tokens.
    let long = |row| "x".repeat(if row == 7 { (8 << 20) + 1 } else { 8 });
    write_texts(&path, (Compression::SNAPPY, None), 20, long);
    refused("text", "row 8: the text has more than 8 MiB");
    // A footer that lies is refused, never a panic.
    let mut seed = 7_u32;
    for _ in 0..300 {
        let mut bytes = good.clone();
        seed = seed.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
        let at = bytes.len() - 9 - seed as usize % 900;
        bytes[at] ^= 1 << (seed >> 29);
        std::fs::write(&path, bytes).expect("a file");
        drop(open(&path, "text"));
    }
}
