//! What a model's tokens mean, and how many of them it has seen at once.
//!
//! ```text
//! a run  -> text.json and tokenizer.json beside its checkpoints  (keep)
//! weights -> those; of a run before them job.json; of a Hugging Face directory its files  (find)
//! ```

use super::directory::{Directory, small_file};
use crate::checkpoint::Disk;
use super::weights::Weights;
use crate::checkpoint::{Problem, Refusal};
use crate::data::{Encoder, replace};
use moejob_protocol::config::{DataConfig, DataSource, Tokenizer, WorkerConfig};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// Ids that bytes have.
const BYTES: u32 = 256;
/// A larger tokenizer is not kept beside checkpoints.
const KEPT_BYTES_MAX: u64 = 256 << 20;

const FILE: &str = "text.json";
const TOKENIZER: &str = "tokenizer.json";

/// What is known of the text that weights were trained on.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Text {
    /// None: the data were tokens from the beginning, or nothing tells.
    pub tokenizer: Option<Tokenizer>,
    /// Tokens of a sequence in training.
    pub trained: Option<u32>,
    /// Positions that a Hugging Face directory claims.
    pub positions: Option<u32>,
    /// The tokenizer's special tokens are around each text: those of weights from elsewhere. Our
    /// own runs never see them.
    pub special: bool,
    /// Tokens that end a text.
    pub ends: Vec<u32>,
    /// In training a text sees nothing of the texts before it in its sequence.
    pub apart: bool,
    /// In training the last token of a text predicts nothing.
    pub masked: bool,
    /// Where a tokenizer was looked for in vain.
    pub missing: Option<PathBuf>,
}

/// `text.json`, beside `step-*`.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct File {
    /// "bytes", or the name of a file beside this one.
    tokenizer: Option<String>,
    sequence_length: u32,
    end_of_document: Option<u32>,
    #[serde(default)]
    reset_at_boundaries: bool,
    #[serde(default, skip_serializing_if = "is_false")]
    mask_at_boundaries: bool,
    /// Of weights from elsewhere, which were not trained here: the length is their positions.
    #[serde(default, skip_serializing_if = "is_false")]
    imported: bool,
}

fn is_false(flag: &bool) -> bool {
    !*flag
}

/// Whether text becomes tokens in the job itself.
fn tokenizes(source: &DataSource) -> bool {
    match source {
        DataSource::Text { .. } | DataSource::Jsonl { .. } | DataSource::Parquet { .. } => true,
        DataSource::Tokens { .. } | DataSource::Megatron { .. } => false,
        DataSource::Mixture { parts } => parts.iter().any(|part| tokenizes(&part.source)),
    }
}

/// Writes what a run's text is beside its checkpoints. Whoever trains can do without it.
///
/// # Errors
/// The location, or the tokenizer, cannot be copied to.
pub fn keep(config: &WorkerConfig) -> std::io::Result<()> {
    let (location, data) = (Path::new(&config.checkpoint.location), &config.data);
    let tokenizer = kept_tokenizer(location, data)?;
    let file = File {
        tokenizer,
        sequence_length: config.training.sequence_length,
        end_of_document: data.end_of_document,
        reset_at_boundaries: data.reset_at_boundaries,
        mask_at_boundaries: data.mask_at_boundaries,
        imported: false,
    };
    let text = serde_json::to_vec_pretty(&file)?;
    if std::fs::read(location.join(FILE)).is_ok_and(|found| found == text) {
        return Ok(());
    }
    replace(location, FILE, |to| std::fs::write(to, &text))
}

/// Writes what a directory's text is beside the checkpoint that was made of it, unless that stands
/// beside others, whose text is known.
///
/// # Errors
/// The directory's files cannot be read, or the location cannot be written.
pub(super) fn keep_imported(weights: &Weights, location: &Path) -> std::io::Result<()> {
    let Weights::HuggingFace(directory) = weights else { return Ok(()) };
    if location.join(FILE).exists() {
        return Ok(());
    }
    let known = find(weights).map_err(std::io::Error::other)?;
    let tokenizer = match &known.tokenizer {
        Some(Tokenizer::Path(path)) => copied_tokenizer(location, Path::new(path)).map(Some)?,
        Some(Tokenizer::Bytes) => Some("bytes".to_string()),
        None => None,
    };
    let file = File {
        tokenizer,
        sequence_length: directory.positions,
        end_of_document: known.ends.first().copied(),
        reset_at_boundaries: false,
        mask_at_boundaries: false,
        imported: true,
    };
    let text = serde_json::to_vec_pretty(&file)?;
    replace(location, FILE, |to| std::fs::write(to, &text))
}

fn kept_tokenizer(location: &Path, data: &DataConfig) -> std::io::Result<Option<String>> {
    let path = match &data.tokenizer {
        Tokenizer::Bytes => return Ok(tokenizes(&data.source).then(|| "bytes".to_string())),
        Tokenizer::Path(path) => Path::new(path),
    };
    let path = if path.is_dir() { path.join(TOKENIZER) } else { path.to_path_buf() };
    copied_tokenizer(location, &path).map(Some)
}

/// Copies a tokenizer beside checkpoints, and gives its name there.
fn copied_tokenizer(location: &Path, path: &Path) -> std::io::Result<String> {
    let len = std::fs::metadata(path)?.len();
    if len > KEPT_BYTES_MAX {
        return Err(std::io::Error::other(format!("a tokenizer of {len} bytes")));
    }
    let same = std::fs::read(location.join(TOKENIZER)).ok() == Some(std::fs::read(path)?);
    if !same {
        replace(location, TOKENIZER, |to| std::fs::copy(path, to).map(|_| ()))?;
    }
    Ok(TOKENIZER.to_string())
}

/// What is known of the text of `weights`.
///
/// # Errors
/// A file that should tell cannot be read.
pub fn find(weights: &Weights) -> Result<Text, Refusal> {
    let found = match weights {
        Weights::HuggingFace(directory) => of_directory(directory),
        Weights::Ours { path, .. } => of_checkpoint(path),
    };
    let name = weights.path().display().to_string();
    let mut text = found.map_err(|problems| Refusal::of(&name, problems))?;
    // Of a model of 256 tokens nothing else is likely.
    if text.tokenizer.is_none() && weights.model().vocab_size == BYTES {
        text.tokenizer = Some(Tokenizer::Bytes);
    }
    Ok(text)
}

fn tokenizer_in(folder: &Path) -> Option<Tokenizer> {
    let path = folder.join(TOKENIZER);
    path.is_file().then(|| Tokenizer::Path(path.display().to_string()))
}

fn json_in(folder: &Path, name: &str) -> Result<Option<Value>, Vec<Problem>> {
    if folder.join(name).symlink_metadata().is_err() {
        return Ok(None);
    }
    let text = small_file(&Disk::real(), folder, name)?;
    let shown = folder.join(name).display().to_string();
    let value = serde_json::from_slice(&text);
    value.map(Some).map_err(|error| vec![Problem::new(&shown, &error.to_string())])
}

fn of_checkpoint(path: &Path) -> Result<Text, Vec<Problem>> {
    let location = path.parent().unwrap_or(path);
    if let Some(value) = json_in(location, FILE)? {
        let shown = location.join(FILE).display().to_string();
        let file: File = serde_json::from_value(value)
            .map_err(|error| vec![Problem::new(&shown, &error.to_string())])?;
        let tokenizer = match file.tokenizer.as_deref() {
            Some("bytes") => Some(Tokenizer::Bytes),
            Some(_) => tokenizer_in(location),
            None => None,
        };
        let length = Some(file.sequence_length);
        return Ok(Text {
            tokenizer,
            trained: length.filter(|_| !file.imported),
            positions: length.filter(|_| file.imported),
            special: file.imported,
            ends: file.end_of_document.into_iter().collect(),
            apart: file.reset_at_boundaries,
            masked: file.mask_at_boundaries,
            ..Text::default()
        });
    }
    let beside = tokenizer_in(path).or_else(|| tokenizer_in(location));
    let run = location.parent().unwrap_or(location);
    let Some(job) = json_in(run, "job.json")? else {
        return Ok(Text { tokenizer: beside, ..Text::default() });
    };
    let (data, training) = (&job["spec"]["data"], &job["spec"]["training"]);
    let named: Option<Tokenizer> = serde_json::from_value(data["tokenizer"].clone()).ok();
    let (named, missing) = match named {
        Some(Tokenizer::Path(path)) if !Path::new(&path).exists() => (None, Some(path.into())),
        named => (named, None),
    };
    let id = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    Ok(Text {
        tokenizer: beside.or(named),
        trained: id(&training["sequenceLength"]),
        ends: id(&data["endOfDocument"]).into_iter().collect(),
        apart: data["resetAtBoundaries"].as_bool().unwrap_or(false),
        masked: data["maskAtBoundaries"].as_bool().unwrap_or(false),
        missing,
        ..Text::default()
    })
}

fn of_directory(directory: &Directory) -> Result<Text, Vec<Problem>> {
    let path = &directory.path;
    let config = json_in(path, "config.json")?.unwrap_or_default();
    let generation = json_in(path, "generation_config.json")?.unwrap_or_default();
    let number = |value: &Value| value.as_u64().and_then(|id| u32::try_from(id).ok());
    let ends = |value: &Value| -> Vec<u32> {
        match value {
            Value::Array(ids) => ids.iter().filter_map(number).collect(),
            id => number(id).into_iter().collect(),
        }
    };
    let own = ends(&generation["eos_token_id"]);
    Ok(Text {
        tokenizer: tokenizer_in(path),
        positions: Some(directory.positions),
        special: true,
        ends: if own.is_empty() { ends(&config["eos_token_id"]) } else { own },
        ..Text::default()
    })
}

impl Text {
    /// What `config.json` of an export says of it.
    pub(super) fn fields(&self) -> Map<String, Value> {
        let mut fields = Map::new();
        for token in ["pad_token_id", "bos_token_id", "eos_token_id"] {
            fields.insert(token.to_string(), Value::Null);
        }
        if let [end, ..] = self.ends[..] {
            fields.insert("eos_token_id".to_string(), json!(end));
        }
        if let Some(length) = self.trained.or(self.positions) {
            fields.insert("max_position_embeddings".to_string(), json!(length));
        }
        fields
    }

    /// The files of a tokenizer that `transformers` reads: of bytes one of its own.
    ///
    /// # Errors
    /// The tokenizer is none.
    pub(super) fn files(&self) -> Result<Vec<(&'static str, Vec<u8>)>, Problem> {
        let refused = |why: String| Problem::new(TOKENIZER, &why);
        let (bytes, end) = match &self.tokenizer {
            None => return Ok(Vec::new()),
            Some(Tokenizer::Bytes) => {
                let own = self.ends.first().filter(|end| **end == BYTES);
                (pretty(&byte_level(own.is_some())), own.map(|_| END.to_string()))
            }
            Some(Tokenizer::Path(path)) => {
                let encoder =
                    Encoder::read(Path::new(path)).map_err(|error| refused(error.to_string()))?;
                let end = self.ends.first().and_then(|end| encoder.token_of(*end));
                let file = std::fs::read(path).map_err(|error| refused(error.to_string()))?;
                match self.special {
                    true => (file, end),
                    false => (without_special(&file).map_err(refused)?, end),
                }
            }
        };
        let mut config = json!({ "tokenizer_class": "PreTrainedTokenizerFast" });
        config["clean_up_tokenization_spaces"] = json!(false);
        if let Some(end) = end {
            config["eos_token"] = json!(end);
        }
        if let Some(length) = self.trained.or(self.positions) {
            config["model_max_length"] = json!(length);
        }
        Ok(vec![(TOKENIZER, bytes), ("tokenizer_config.json", pretty(&config))])
    }
}

/// A tokenizer that puts no token around a text: the part that does so goes, what trims offsets
/// stays. One that puts none is as it was, to the byte.
fn without_special(file: &[u8]) -> Result<Vec<u8>, String> {
    let mut tokenizer: Value = serde_json::from_slice(file).map_err(|error| error.to_string())?;
    match tokenizer.get_mut("post_processor").is_some_and(puts_no_token) {
        true => Ok(pretty(&tokenizer)),
        false => Ok(file.to_vec()),
    }
}

/// Makes it so, and says whether it was otherwise.
fn puts_no_token(processor: &mut Value) -> bool {
    let kind = processor["type"].as_str().unwrap_or_default();
    if matches!(kind, "TemplateProcessing" | "BertProcessing" | "RobertaProcessing") {
        *processor = Value::Null;
        return true;
    }
    let parts = processor.get_mut("processors").and_then(Value::as_array_mut);
    parts.is_some_and(|parts| {
        let before = parts.iter_mut().filter_map(|part| puts_no_token(part).then_some(())).count();
        parts.retain(|part| !part.is_null());
        before > 0
    })
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut text = format!("{value:#}").into_bytes();
    text.push(b'\n');
    text
}

/// The token behind the bytes that ends a text.
const END: &str = "<|endoftext|>";

/// A tokenizer whose ids are bytes: an alphabet of 256 characters, one for each byte, and no
/// merges. Bytes that print stand for themselves, the others for U+0100 and on (Radford et al.
/// 2019, whose `bytes_to_unicode` the library's byte level follows).
fn byte_level(with_end: bool) -> Value {
    let prints = |byte: u32| matches!(byte, 33..=126 | 161..=172 | 174..=255);
    let mut others = 0;
    let mut vocabulary = Map::new();
    for byte in 0..BYTES {
        let place = if prints(byte) { byte } else { BYTES + others };
        others += u32::from(!prints(byte));
        let character = char::from_u32(place).unwrap_or(char::REPLACEMENT_CHARACTER);
        vocabulary.insert(character.to_string(), json!(byte));
    }
    let end = json!({
        "id": BYTES, "content": END, "single_word": false, "lstrip": false, "rstrip": false,
        "normalized": false, "special": true,
    });
    let level = json!({
        "type": "ByteLevel", "add_prefix_space": false, "trim_offsets": false, "use_regex": false,
    });
    json!({
        "version": "1.0",
        "truncation": null,
        "padding": null,
        "added_tokens": if with_end { vec![end] } else { Vec::new() },
        "normalizer": null,
        "pre_tokenizer": level,
        "post_processor": null,
        "decoder": level,
        "model": {
            "type": "BPE", "dropout": null, "unk_token": null,
            "continuing_subword_prefix": null, "end_of_word_suffix": null,
            "fuse_unk": false, "byte_fallback": false, "ignore_merges": false,
            "vocab": vocabulary, "merges": [],
        },
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_puts_tokens_around_a_text_goes_and_nothing_else() {
        let special = |kind: &str| json!({ "type": kind, "sep": ["</s>", 2], "cls": ["<s>", 1] });
        let level = json!({ "type": "ByteLevel", "trim_offsets": false });
        let sequence =
            |parts: &[&Value]| json!({ "type": "Sequence", "processors": parts.to_vec() });
        let left = |processor: &Value| {
            let file = format!("{{ \"post_processor\": {processor},\n\"model\": 0.1 }}");
            let found = without_special(file.as_bytes()).expect("JSON");
            let value: Value = serde_json::from_slice(&found).expect("JSON");
            (value["post_processor"].clone(), found == file.as_bytes())
        };
        for kind in ["TemplateProcessing", "BertProcessing", "RobertaProcessing"] {
            assert_eq!(left(&special(kind)), (Value::Null, false));
        }
        let [template, roberta] = ["TemplateProcessing", "RobertaProcessing"].map(special);
        let inner = sequence(&[&roberta]);
        let found = left(&sequence(&[&template, &level, &inner]));
        assert_eq!(found, (sequence(&[&level, &sequence(&[])]), false));
        for whole in [Value::Null, level.clone(), sequence(&[&level])] {
            assert_eq!(left(&whole), (whole, true));
        }
    }

    #[test]
    fn a_tokenizer_of_bytes_gives_bytes() {
        let folder = tempfile::tempdir().expect("a folder");
        for with_end in [false, true] {
            let path = folder.path().join(TOKENIZER);
            std::fs::write(&path, pretty(&byte_level(with_end))).expect("a file");
            let encoder = Encoder::read(&path).expect("a tokenizer");
            assert_eq!(encoder.vocabulary(), 256 + u32::from(with_end));
            let all: String = (0..600).filter_map(char::from_u32).collect();
            for text in ["two words,\n\tand a tab", "漢字 ümläut \u{0}\u{7f}", &all] {
                let mut ids = Vec::new();
                encoder.encode(text, &mut ids).expect("ids");
                let bytes: Vec<u32> = text.bytes().map(u32::from).collect();
                assert_eq!(ids, bytes);
                assert_eq!(encoder.decode(&ids), text);
            }
        }
    }
}
