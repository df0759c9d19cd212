//! What a file is, how much it holds, and how it begins.

use super::documents::{Format, Position, Reader};
use super::files::DataFile;
use super::handles::Handles;
use super::open::token_store;
use super::pairs::{checked, megatron_bin};
use super::store::Store;
use super::tokenize::{self, Recipe};
use super::tokenizer::Encoder;
use super::{DataError, header};
use moejob_protocol::config::TokenType;
use std::path::Path;
use std::sync::Arc;

/// Tokens shown of a file.
const SHOWN: usize = 64;

/// What a file is.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Kind {
    Documents(Format),
    /// Flat, or with llm.c's header.
    Tokens,
    Megatron,
}

/// What a file holds.
#[derive(Clone, Debug)]
pub struct Inspection {
    /// In words.
    pub what: String,
    pub bytes: u64,
    /// None where a file does not know its documents.
    pub documents: Option<u64>,
    pub tokens: u64,
    /// The largest id.
    pub largest: Option<u32>,
    /// How the tokens begin.
    pub first: Vec<u32>,
}

/// Tells the formats apart by what a file holds and, where it cannot be seen, by its name.
///
/// # Errors
/// It is none of them, or could be several.
pub fn detect(
    file: &DataFile,
    field: &str,
    dtype: Option<TokenType>,
) -> Result<Kind, DataError> {
    let head = file.head(4096)?;
    let name = file.path.file_name().map(|name| name.to_string_lossy().to_lowercase());
    let name = name.unwrap_or_default();
    let plain = name.strip_suffix(".gz").or(name.strip_suffix(".zst")).unwrap_or(&name);
    let ends = |endings: &[&str]| endings.iter().any(|ending| plain.ends_with(ending));
    let bad = |why: &str| Err(DataError::bad(&file.path, "byte 0", why));
    if ends(&[".idx"]) || ends(&[".bin"]) && file.is_beside("idx")? {
        return Ok(Kind::Megatron);
    }
    if header::is_headered(&head) || dtype.is_some() {
        return Ok(Kind::Tokens);
    }
    if head.starts_with(b"PAR1") {
        return Ok(Kind::Documents(Format::Parquet(field.to_string())));
    }
    if ends(&[".jsonl", ".json", ".ndjson"]) {
        return Ok(Kind::Documents(Format::Jsonl(field.to_string())));
    }
    if plain != name {
        return bad("it is compressed; of compressed files JSONL is read (.jsonl.gz, .jsonl.zst)");
    }
    if ends(&[".npy"]) {
        return bad("NumPy's .npy is not read: write the flat numbers (`array.tofile`)");
    }
    if ends(&[".pt", ".pth", ".pkl", ".arrow", ".tar"]) {
        return bad("its format is not read: write JSONL, Parquet or flat tokens");
    }
    header::not_foreign(&head, false).map_err(|(at, why)| DataError::bad(&file.path, at, why))?;
    if ends(&[".bin"]) || head.contains(&0) {
        return bad("it has no header: say --dtype uint16 or uint32 if it holds flat tokens");
    }
    Ok(Kind::Documents(Format::Text))
}

/// Reads the whole file.
///
/// # Errors
/// Whatever would keep a job from training on it.
pub fn inspect(
    path: &Path,
    field: &str,
    dtype: Option<TokenType>,
    encoder: &Encoder,
) -> Result<Inspection, DataError> {
    let file = DataFile::named(path)?;
    match detect(&file, field, dtype)? {
        Kind::Tokens => tokens(&file, dtype),
        Kind::Megatron => {
            let index = match path.extension() {
                Some(ending) if ending == "bin" => DataFile::named(&path.with_extension("idx"))?,
                _ => file,
            };
            megatron(&index)
        }
        Kind::Documents(format) => documents(file, format, field, encoder),
    }
}

fn tokens(file: &DataFile, dtype: Option<TokenType>) -> Result<Inspection, DataError> {
    let mut store = token_store(file, &Handles::default(), dtype)?;
    let kind = if store.offset > 0 { "tokens with llm.c's header" } else { "flat tokens" };
    let what = format!("{kind}, {}", store.width.name());
    let (largest, first) = look(&mut store)?;
    let (bytes, tokens) = (file.bytes, store.tokens);
    Ok(Inspection { what, bytes, documents: None, tokens, largest, first })
}

/// The largest id and the first ones.
fn look(store: &mut Store) -> Result<(Option<u32>, Vec<u32>), DataError> {
    let largest = store.largest()?;
    let mut first = vec![0; store.tokens.min(SHOWN as u64) as usize];
    store.read(0, &mut first, &mut Vec::new())?;
    Ok((largest, first))
}

fn megatron(index: &DataFile) -> Result<Inspection, DataError> {
    let Some(bin) = megatron_bin(index)? else {
        return Err(DataError::Unusable { path: index.path.clone(), why: "it is no .idx file" });
    };
    let head = checked(index, &bin)?;
    let documents = head.documents;
    let bytes = index.bytes + bin.bytes;
    let mut store = Store::named(bin, &Handles::default(), head.width, 0);
    let (largest, first) = look(&mut store)?;
    let what = format!(
        "Megatron's indexed dataset, {}, {} sequences",
        head.width.name(),
        head.sequences
    );
    let tokens = store.tokens;
    Ok(Inspection { what, bytes, documents: Some(documents), tokens, largest, first })
}

fn documents(
    file: DataFile,
    format: Format,
    field: &str,
    encoder: &Encoder,
) -> Result<Inspection, DataError> {
    let what = match &format {
        Format::Text => "text, one document".to_string(),
        Format::Jsonl(field) => format!("JSONL, text in `{field}`"),
        Format::Parquet(field) => format!("Parquet, text in `{field}`"),
    };
    let (mut tokens, mut documents, mut largest, mut first) = (0, 0, None, Vec::new());
    let mut begun = 0;
    let bytes = file.bytes;
    let files = Arc::new(vec![file]);
    let reader = Reader::new(files.clone(), format, Position::default(), encoder.cutter());
    let recipe =
        Recipe { encoder: encoder.clone(), field: field.to_string(), end_of_document: None };
    tokenize::tokenize(reader, &files, &recipe, tokenize::threads(), &mut |made| {
        tokens += made.ids.len() as u64;
        for document in &made.documents {
            begun += u64::from(document.tokens);
            if document.ends {
                // One without tokens is none.
                documents += u64::from(begun > 0);
                begun = 0;
            }
        }
        largest = largest.max(made.ids.iter().max().copied());
        let missing = SHOWN - first.len();
        first.extend(made.ids.iter().take(missing));
        Ok(())
    })?;
    Ok(Inspection { what, bytes, documents: Some(documents), tokens, largest, first })
}
