//! Documents -> a tokenizer of their own: byte pairs over bytes, as GPT-2 has them.
//!
//! Pairs that stand beside each other most often become one token, again and again, until the
//! vocabulary has its size (Sennrich, Haddow and Birch 2016, "Neural Machine Translation of Rare
//! Words with Subword Units"). Every byte is a token, so any text can be written. Ties go by ids:
//! the same documents give the same file.

use super::cut::Cutter;
use super::documents::{Format, Reader};
use super::files::DataFile;
use super::tokenize::each_text;
use super::{DataError, Position};
use std::sync::Arc;
use tokenizers::models::TrainerWrapper;
use tokenizers::models::bpe::{BPE, BpeTrainer};
use tokenizers::pre_tokenizers::byte_level::ByteLevel;
use tokenizers::{AddedToken, Tokenizer};

/// What ends a document: the token with the id 0.
pub const END_OF_DOCUMENT: &str = "<|endoftext|>";
/// All bytes, the end of a document, and one pair.
pub const TOKENS_MIN: u32 = 258;
/// The largest vocabulary of the field has a quarter of these.
pub const TOKENS_MAX: u32 = 1 << 20;
/// A pair that stands there once is no pattern.
const PAIRS_MIN: u64 = 2;

/// A tokenizer of at most `tokens` tokens, as the text of a `tokenizer.json`, and how many it has.
/// They are fewer where no pair is left that stands there twice. Memory grows with the number of
/// different words.
///
/// # Errors
/// Names the place of what cannot be read, or says what the library says.
pub fn learn(
    files: Vec<DataFile>,
    format: &Format,
    tokens: u32,
) -> Result<(String, u32), DataError> {
    let field = match format {
        Format::Text => "",
        Format::Jsonl(field) | Format::Parquet(field) => field,
    };
    let files = Arc::new(files);
    let mut tokenizer = Tokenizer::new(BPE::default());
    let bytes = ByteLevel::default().add_prefix_space(false);
    tokenizer.with_pre_tokenizer(Some(bytes)).with_decoder(Some(bytes));
    let cutter = Cutter::new(&tokenizer);
    let mut reader = Reader::new(files.clone(), format.clone(), Position::default(), cutter);
    let mut failed = None;
    let chunks = std::iter::from_fn(|| {
        let mut texts = Vec::new();
        let read = reader.next()?.and_then(|chunk| {
            let path = &files[chunk.file].path;
            each_text(&chunk, path, field, &mut |_, text| {
                texts.push(text.to_string());
                Ok(())
            })
        });
        match read {
            Ok(()) => Some(texts),
            Err(error) => {
                failed = Some(error);
                None
            }
        }
    });
    let mut trainer: TrainerWrapper = BpeTrainer::builder()
        .vocab_size(tokens as usize)
        .min_frequency(PAIRS_MIN)
        .show_progress(false)
        .special_tokens(vec![AddedToken::from(END_OF_DOCUMENT, true)])
        .initial_alphabet(ByteLevel::alphabet().into_iter().collect())
        .build()
        .into();
    let learned = tokenizer.train(&mut trainer, chunks.flatten()).map(|_| ());
    if let Some(error) = failed {
        return Err(error);
    }
    let said = |error: tokenizers::Error| DataError::Learn { why: error.to_string() };
    learned.map_err(said)?;
    let text = tokenizer.to_string(true).map_err(said)?;
    Ok((text, u32::try_from(tokenizer.get_vocab_size(true)).unwrap_or(u32::MAX)))
}
