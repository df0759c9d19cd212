//! What a checkpoint knows its data by.

use super::files::DataFile;
use super::open::Opened;
use super::tokenizer::Encoder;
use moejob_protocol::config::{DataConfig, DataSource, Tokenizer};

/// What a checkpoint belongs to. Text read as bytes alone has its files' own fingerprint.
pub(super) fn of(
    data: &DataConfig,
    encoder: &Encoder,
    weights: &[f64],
    opened: &[Opened],
    held_out: Option<&Opened>,
) -> String {
    let plain = matches!(data.source, DataSource::Text { .. })
        && data.tokenizer == Tokenizer::Bytes
        && data.end_of_document.is_none()
        && !data.reset_at_boundaries
        && !data.mask_at_boundaries
        && data.held_out.is_none();
    if plain && let [part] = opened {
        return part.fingerprint.to_hex().to_string();
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(b"moejob data 1");
    let mut source = |source: &DataSource, weight: f64, print: &blake3::Hash| {
        let kind = match source {
            DataSource::Text { .. } => "text".to_string(),
            DataSource::Jsonl { field, .. } => format!("jsonl {field}"),
            DataSource::Parquet { field, .. } => format!("parquet {field}"),
            DataSource::Tokens { dtype, .. } => format!("tokens {dtype:?}"),
            DataSource::Megatron { .. } => "megatron".to_string(),
            DataSource::Mixture { .. } => "mixture".to_string(),
        };
        hasher.update(&(kind.len() as u64).to_le_bytes());
        hasher.update(kind.as_bytes());
        hasher.update(&weight.to_bits().to_le_bytes());
        hasher.update(print.as_bytes());
    };
    match &data.source {
        DataSource::Mixture { parts } => {
            for ((part, opened), weight) in parts.iter().zip(opened).zip(weights) {
                source(&part.source, *weight, &opened.fingerprint);
            }
        }
        one => opened.iter().for_each(|part| source(one, 1.0, &part.fingerprint)),
    }
    if let Some((held_out, opened)) = data.held_out.as_ref().zip(held_out) {
        source(held_out, 0.0, &opened.fingerprint);
    }
    hasher.update(&encoder.fingerprint());
    hasher.update(&data.end_of_document.map_or(u64::MAX, u64::from).to_le_bytes());
    hasher.update(&[u8::from(data.reset_at_boundaries)]);
    if data.mask_at_boundaries {
        hasher.update(b"masked");
    }
    hasher.finalize().to_hex().to_string()
}

/// Adds a file to the fingerprint of its source: its name, its size, and the BLAKE3 of its content.
pub(super) fn print_file(hasher: &mut blake3::Hasher, file: &DataFile, content: &[u8; 32]) {
    hasher.update(&(file.name.len() as u64).to_le_bytes());
    hasher.update(&file.name);
    hasher.update(&file.bytes.to_le_bytes());
    hasher.update(content);
}
