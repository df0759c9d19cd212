//! Text -> token ids: bytes, or a `tokenizer.json` of the `tokenizers` library.

use super::DataError;
use super::cut::Cutter;
use crate::disk::{Disk, OpenFile, Verdict, gave_up, verdict};
use moejob_protocol::config::Tokenizer;
use rustix::fs::OFlags;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Larger vocabularies of the field have files of 35 MB.
const FILE_BYTES_MAX: u64 = 256 << 20;

/// Turns text into ids and back. A clone has caches of its own, as a thread wants them.
#[derive(Clone, Debug)]
pub enum Encoder {
    Bytes,
    File(Box<FileEncoder>),
}

/// A `tokenizer.json`.
#[derive(Clone, Debug)]
pub struct FileEncoder {
    path: Arc<PathBuf>,
    /// BLAKE3 of the file.
    hash: [u8; 32],
    largest: u32,
    /// Bytes of a text's later pieces that it puts there by itself.
    skipped: usize,
    tokenizer: tokenizers::Tokenizer,
}

impl FileEncoder {
    fn ids(&self, text: &str, special: bool) -> Result<Vec<u32>, String> {
        // The engine of regular expressions panics where its own bounds are passed.
        let encoded = catch_unwind(AssertUnwindSafe(|| self.tokenizer.encode_fast(text, special)));
        let encoding = match encoded {
            Ok(encoding) => encoding.map_err(|error| format!("the tokenizer fails: {error}"))?,
            Err(panic) => {
                let why = panic.downcast_ref::<String>().map(String::as_str);
                let why = why.or(panic.downcast_ref::<&str>().copied()).unwrap_or("a panic");
                return Err(format!("the tokenizer gives up: {why}"));
            }
        };
        Ok(encoding.get_ids().to_vec())
    }
}

impl Encoder {
    /// # Errors
    /// The file is no tokenizer.
    pub fn open(tokenizer: &Tokenizer) -> Result<Encoder, DataError> {
        Encoder::open_on(&Disk::real(), tokenizer)
    }

    /// Read with the patience of `disk`.
    ///
    /// # Errors
    /// The file is no tokenizer.
    pub(crate) fn open_on(disk: &Disk, tokenizer: &Tokenizer) -> Result<Encoder, DataError> {
        match tokenizer {
            Tokenizer::Bytes => Ok(Encoder::Bytes),
            Tokenizer::Path(path) => Encoder::read_on(disk, Path::new(path)),
        }
    }

    /// A `tokenizer.json`, or the folder it lies in.
    ///
    /// # Errors
    /// The file is no tokenizer.
    pub fn read(path: &Path) -> Result<Encoder, DataError> {
        Encoder::read_on(&Disk::real(), path)
    }

    fn read_on(disk: &Disk, path: &Path) -> Result<Encoder, DataError> {
        let in_folder = disk.metadata(path).is_ok_and(|found| found.is_dir());
        let path = if in_folder { path.join("tokenizer.json") } else { path.to_path_buf() };
        let refused = |why: String| DataError::Tokenizer { path: path.clone(), why };
        let unread = |source: std::io::Error| match gave_up(&source) {
            Some(gave_up) if gave_up.unwanted => DataError::GivenUp,
            None if verdict(&source) != Verdict::Stumbles => refused(source.to_string()),
            _ => DataError::Read { path: path.clone(), source },
        };
        let metadata = disk.metadata(&path).map_err(unread)?;
        if !metadata.is_file() || metadata.len() > FILE_BYTES_MAX {
            return Err(refused(format!("it is no file of at most {FILE_BYTES_MAX} bytes")));
        }
        let file = OpenFile::open(disk, &path, OFlags::NONBLOCK).map_err(unread)?;
        let mut bytes = vec![0; metadata.len() as usize];
        file.read_exact_at(&mut bytes, 0).map_err(unread)?;
        let mut tokenizer = tokenizers::Tokenizer::from_bytes(&bytes)
            .map_err(|error| refused(error.to_string()))?;
        follows_its_file(&tokenizer, &bytes).map_err(refused)?;
        // Sequences are packed, never padded; what a file says of that is for other uses.
        tokenizer.with_padding(None);
        tokenizer.with_truncation(None).map_err(|error| refused(error.to_string()))?;
        let largest = tokenizer.get_vocab(true).into_values().max();
        let largest = largest.ok_or_else(|| refused("it has no tokens".to_string()))?;
        let hash = *blake3::hash(&bytes).as_bytes();
        let (path, skipped) = (Arc::new(path), Cutter::skipped(&tokenizer));
        Ok(Encoder::File(Box::new(FileEncoder { path, hash, largest, skipped, tokenizer })))
    }

    /// Finds where texts may be cut.
    pub(crate) fn cutter(&self) -> Cutter {
        match self {
            Encoder::Bytes => Cutter::default(),
            Encoder::File(file) => Cutter::new(&file.tokenizer),
        }
    }

    /// Appends the ids of a piece of a text that begins at byte `at` of it.
    ///
    /// # Errors
    /// Says what the tokenizer says.
    pub fn encode_piece(&self, text: &str, at: u64, ids: &mut Vec<u32>) -> Result<(), String> {
        let skipped = match self {
            Encoder::File(file) if at > 0 => file.skipped,
            _ => 0,
        };
        self.encode(text.get(skipped..).unwrap_or_default(), ids).map(drop)
    }

    /// One more than the largest id.
    pub fn vocabulary(&self) -> u32 {
        match self {
            Encoder::Bytes => 256,
            Encoder::File(file) => file.largest.saturating_add(1),
        }
    }

    /// The id of a token as the vocabulary writes it.
    pub fn id_of(&self, token: &str) -> Option<u32> {
        match self {
            Encoder::Bytes => None,
            Encoder::File(file) => file.tokenizer.token_to_id(token),
        }
    }

    /// The token of an id, as the vocabulary writes it.
    pub fn token_of(&self, id: u32) -> Option<String> {
        match self {
            Encoder::Bytes => None,
            Encoder::File(file) => file.tokenizer.id_to_token(id),
        }
    }

    /// The ids of a prompt, with the special tokens that the tokenizer puts around a text.
    ///
    /// # Errors
    /// Says what the tokenizer says.
    pub fn encode_with_special(&self, text: &str) -> Result<Vec<u32>, String> {
        match self {
            Encoder::Bytes => Ok(text.bytes().map(u32::from).collect()),
            Encoder::File(file) => file.ids(text, true),
        }
    }

    /// Every id that can come out is below `vocabulary`.
    ///
    /// # Errors
    /// Names the tokenizer.
    pub fn check(&self, vocabulary: u32) -> Result<(), DataError> {
        match self {
            Encoder::Bytes if vocabulary < 256 => Err(DataError::Vocabulary { found: vocabulary }),
            Encoder::File(file) if file.largest >= vocabulary => Err(DataError::TokenizerSize {
                path: file.path.to_path_buf(),
                largest: file.largest,
                vocabulary,
            }),
            _ => Ok(()),
        }
    }

    /// What tells two tokenizers apart.
    pub fn fingerprint(&self) -> [u8; 32] {
        match self {
            Encoder::Bytes => [0; 32],
            Encoder::File(file) => file.hash,
        }
    }

    /// Appends the ids of `text`, without special tokens; how many.
    ///
    /// # Errors
    /// Says what the tokenizer says.
    pub fn encode(&self, text: &str, ids: &mut Vec<u32>) -> Result<usize, String> {
        let before = ids.len();
        match self {
            Encoder::Bytes => {
                // Room for it and its end: a long text shall not double what there is already.
                if text.len() > ids.capacity() {
                    ids.reserve_exact(text.len() + 1);
                }
                ids.extend(text.bytes().map(u32::from));
            }
            Encoder::File(file) => ids.extend_from_slice(&file.ids(text, false)?),
        }
        Ok(ids.len() - before)
    }

    /// Text of `ids`, special tokens included; what is no text is marked as such.
    pub fn decode(&self, ids: &[u32]) -> String {
        match self {
            Encoder::Bytes => {
                let bytes: Vec<u8> =
                    ids.iter().map(|id| u8::try_from(*id).unwrap_or(b'?')).collect();
                String::from_utf8_lossy(&bytes).into_owned()
            }
            Encoder::File(file) => file.tokenizer.decode(ids, false).unwrap_or_default(),
        }
    }
}

/// What the library makes of a file without a word, and would be another tokenizer.
fn follows_its_file(tokenizer: &tokenizers::Tokenizer, bytes: &[u8]) -> Result<(), String> {
    #[derive(serde::Deserialize)]
    struct Said {
        #[serde(default)]
        added_tokens: Vec<Added>,
        model: Model,
    }
    #[derive(serde::Deserialize)]
    struct Added {
        id: u32,
        content: String,
    }
    #[derive(serde::Deserialize)]
    struct Model {
        #[serde(default)]
        dropout: Option<f64>,
    }
    let said: Said = serde_json::from_slice(bytes).map_err(|error| error.to_string())?;
    if let Some(dropout) = said.model.dropout.filter(|dropout| *dropout > 0.0) {
        let why = "text would become other tokens each time; set it to null";
        return Err(format!("model.dropout is {dropout}: {why}"));
    }
    for Added { id, content } in said.added_tokens {
        let given = tokenizer.token_to_id(&content);
        if given != Some(id) {
            let given = given.map_or("none".to_string(), |given| given.to_string());
            return Err(format!(
                "the added token {content:?} has the id {id}, and the library gives it {given}: \
                 ids of added tokens follow the vocabulary without a gap"
            ));
        }
    }
    Ok(())
}
