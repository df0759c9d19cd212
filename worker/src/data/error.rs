//! What keeps data from being used: where it lies, what was found, what to do.

use crate::disk::{Verdict, gave_up, verdict};
use crate::failure::{Failure, chain};
use std::path::{Path, PathBuf};

/// Why the data cannot be used.
#[derive(Debug, thiserror::Error)]
pub enum DataError {
    #[error("no file under {root} matches {globs}")]
    NothingMatches { root: PathBuf, globs: String },
    #[error("the glob {glob} cannot be read")]
    Glob { glob: String, source: globset::Error },
    #[error("{path} cannot be used: {why}")]
    Unusable { path: PathBuf, why: &'static str },
    #[error("{path} cannot be read")]
    Read { path: PathBuf, source: std::io::Error },
    #[error("the globs match more than {max} files")]
    TooMany { max: usize },
    /// `at` is a position: a line, a token, a sequence, a byte.
    #[error("{path}, {at}: {why}")]
    Bad { path: PathBuf, at: String, why: String },
    #[error("{path}, line {line}: no key `{field}`; its keys: {keys}")]
    NoKey { path: PathBuf, line: u64, field: String, keys: String },
    #[error("{path} is half of Megatron's data, and {index} is not there")]
    NoIndex { path: PathBuf, index: PathBuf },
    #[error("{path} is half of Megatron's data, and the other one, {index}, is not named")]
    IndexUnnamed { path: PathBuf, index: PathBuf },
    #[error("{path}, {at}: the id {id} is outside of the vocabulary of {vocabulary}")]
    Token { path: PathBuf, at: String, id: i64, vocabulary: u32 },
    #[error("{path} changed during training: {was} bytes, now {now}")]
    Resized { path: PathBuf, was: u64, now: u64 },
    #[error("{path} changed during training: its content differs")]
    Rewritten { path: PathBuf },
    #[error("the training files have {found} tokens, a step needs {needed}")]
    TooSmall { found: u64, needed: u64 },
    #[error("part {part} of the mixture has {found} tokens, a sequence needs {needed}")]
    PartTooSmall { part: usize, found: u64, needed: u64 },
    #[error("the weight {weight} of part {part} of the mixture {why}")]
    Weight { part: usize, weight: f64, why: &'static str },
    #[error("the tokenizer {path} cannot be used: {why}")]
    Tokenizer { path: PathBuf, why: String },
    #[error("the tokenizer {path} has ids up to {largest}, the model's vocabulary is {vocabulary}")]
    TokenizerSize { path: PathBuf, largest: u32, vocabulary: u32 },
    #[error("no tokenizer could be made of these documents: {why}")]
    Learn { why: String },
    #[error("bytes need a vocabulary of 256, the model has {found}")]
    Vocabulary { found: u32 },
    #[error("data.endOfDocument is {id}, the model's vocabulary is {vocabulary}")]
    EndOfDocument { id: u32, vocabulary: u32 },
    #[error("{path}: this build reads no Parquet")]
    NoParquet { path: PathBuf },
    /// Nobody waits for the data any more.
    #[error("the data were not opened to their end")]
    GivenUp,
    /// A read that has not come back.
    #[error("a batch of step {step} has not been read for {seconds} s")]
    Late { step: u64, seconds: u64 },
    /// What the worker found, which has the data open for its engines.
    #[error("{}", .0.message)]
    Elsewhere(Failure),
    #[error("{folder} cannot hold the tokens of the data")]
    Spool { folder: PathBuf, source: std::io::Error },
}

impl DataError {
    pub(crate) fn bad(path: &Path, at: impl Into<String>, why: impl Into<String>) -> DataError {
        DataError::Bad { path: path.to_path_buf(), at: at.into(), why: why.into() }
    }

    /// A file could not be read, or nobody waits for it any more.
    pub(crate) fn unread(path: &Path, source: std::io::Error) -> DataError {
        match gave_up(&source) {
            Some(gave_up) if gave_up.unwanted => DataError::GivenUp,
            _ => DataError::Read { path: path.to_path_buf(), source },
        }
    }

    /// Whether storage stumbles, so that another try may find the data well.
    pub(crate) fn may_heal(&self) -> bool {
        match self {
            DataError::Read { source, .. } | DataError::Spool { source, .. } => {
                verdict(source) == Verdict::Stumbles || gave_up(source).is_some()
            }
            _ => false,
        }
    }

    /// The exit code, 3, or 2 where the manifest is at fault; and what to do.
    fn remedy(&self) -> (i32, &'static str) {
        match self {
            DataError::Spool { .. } if self.may_heal() => {
                (75, "give TMPDIR room, or set it to a folder that has some; then start it again")
            }
            _ if self.may_heal() => {
                (75, "have its storage looked at; the job goes on from its newest state")
            }
            DataError::Late { .. } => (75, "have its storage looked at; the job goes on"),
            DataError::NothingMatches { .. } | DataError::TooMany { .. } => {
                (3, "check the paths of spec.data.train and the directory the job runs in")
            }
            DataError::Glob { .. }
            | DataError::Vocabulary { .. }
            | DataError::EndOfDocument { .. }
            | DataError::Weight { .. } => (2, "change the manifest"),
            DataError::TokenizerSize { .. } => {
                (2, "raise model.vocabSize, or name the tokenizer that the model was made with")
            }
            DataError::Tokenizer { .. } => (3, "name a tokenizer.json of the tokenizers library"),
            DataError::Learn { .. } => (1, "name other documents, or ask for fewer tokens"),
            DataError::Unusable { .. } | DataError::Read { .. } => {
                (3, "make it a readable file, or exclude it")
            }
            DataError::Bad { .. } => (3, "repair or exclude the file"),
            DataError::NoKey { line: 1, .. } => {
                (3, "say which key holds the text: `field: KEY` beside `paths`, or --field KEY")
            }
            DataError::NoKey { .. } => (3, "give the line its text, or exclude the file"),
            DataError::IndexUnnamed { .. } => (3, "name the .idx: its .bin is found beside it"),
            DataError::NoIndex { .. } => {
                (3, "put the .idx beside its .bin, and name the .idx; `tokens` reads flat ids")
            }
            DataError::Token { .. } => {
                (3, "raise model.vocabSize, or correct the dtype or the file")
            }
            DataError::Resized { .. } | DataError::Rewritten { .. } => {
                (3, "put the file back as it was and run again, or start a new job")
            }
            DataError::TooSmall { .. } | DataError::PartTooSmall { .. } => {
                (3, "add text, or make batch or sequence smaller")
            }
            DataError::NoParquet { .. } => {
                (2, "build with --features parquet, or write the column as JSONL")
            }
            DataError::GivenUp => (75, "start the job again"),
            DataError::Elsewhere(failure) => (failure.exit_code, ""),
            DataError::Spool { .. } => {
                (1, "set TMPDIR to a folder with room, or run `moejob data tokenize` first")
            }
        }
    }

    /// Whether a failure says only that nobody waits for the data any more, in whatever step.
    pub(crate) fn is_given_up(failure: &Failure) -> bool {
        failure.message == DataError::GivenUp.to_string()
    }

    /// As the worker's end.
    pub fn failure(&self) -> Failure {
        if let DataError::Elsewhere(failure) = self {
            return failure.clone();
        }
        let (exit_code, advice) = self.remedy();
        Failure::new(exit_code, chain(self), advice)
    }
}
