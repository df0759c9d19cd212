//! `moejob eval DIR --data PATH`: the loss of weights on data.

use super::args::{self, THREADS_MAX, Written, whole};
use super::bar::{Bar, Unit};
use clap::{Args, ValueEnum};
use moe_worker::engine::eval::{EvalError, evaluate, source_of};
use moe_worker::hf::Weights;
use moe_worker::hf::text::{self, Text};
use moejob_protocol::config::{DataConfig, TokenType, Tokenizer, ValidationConfig};
use serde_json::json;
use std::path::PathBuf;
use std::process::ExitCode;

/// Exit code of weights or data that are refused.
const EXIT_REFUSED: u8 = 3;
/// Tokens of a sequence where nothing tells what the model was trained on.
const UNKNOWN_LENGTH: u32 = 512;
/// Ids that bytes have.
const BYTES: u32 = 256;

#[derive(Args)]
pub struct EvalArgs {
    /// A run (NAME, runs/NAME), a `step-*` folder, a folder of them (the newest counts), or a
    /// Hugging Face directory.
    pub weights: PathBuf,
    /// Text, a folder of text, .jsonl (also .gz and .zst), .bin or .idx of tokens, .parquet.
    #[arg(long)]
    pub data: PathBuf,
    /// Tokens that the model sees at once. Default: as many as in training, else 512.
    #[arg(long, value_parser = whole(1, 1 << 20))]
    pub sequence_length: Option<u32>,
    /// `bytes`, or a tokenizer.json. Default: the one that the model was trained with, else bytes.
    #[arg(long)]
    pub tokenizer: Option<String>,
    /// Whether a document sees nothing of those before it in its sequence, as
    /// `data.resetAtBoundaries` says in a manifest. Default: as in training, else false.
    #[arg(long, num_args = 0..=1, default_missing_value = "true", value_name = "BOOL")]
    pub reset_at_boundaries: Option<bool>,
    /// Field of JSON lines that holds the text.
    #[arg(long, default_value = "text")]
    pub field: String,
    /// Type of tokens in a .bin without header.
    #[arg(long, value_enum)]
    pub dtype: Option<TokenName>,
    /// Threads that compute; 0 is all processors.
    #[arg(long, default_value_t = 0, value_parser = whole(0, THREADS_MAX))]
    pub threads: u32,
    #[command(flatten)]
    pub written: Written,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum TokenName {
    Uint16,
    Uint32,
}

pub fn run(args: &EvalArgs) -> ExitCode {
    match measure(args) {
        Ok(()) => ExitCode::SUCCESS,
        Err(error) => {
            super::complain(&error);
            ExitCode::from(match &error {
                EvalError::Weights(_) | EvalError::Data(_) | EvalError::TooSmall { .. } => {
                    EXIT_REFUSED
                }
                EvalError::Kind { .. } => 2,
                _ => 1,
            })
        }
    }
}

fn measure(args: &EvalArgs) -> Result<(), EvalError> {
    let dtype = args.dtype.map(|name| match name {
        TokenName::Uint16 => TokenType::Uint16,
        TokenName::Uint32 => TokenType::Uint32,
    });
    let source = source_of(&args.data, &args.field, dtype)?;
    let weights = Weights::open(&args::place(&args.weights))?;
    let known = text::find(&weights)?;
    let length = args.sequence_length.or(known.trained).unwrap_or(UNKNOWN_LENGTH);
    let data = DataConfig {
        source,
        held_out: None,
        tokenizer: tokenizer(args, &weights, &known),
        end_of_document: known.trained.and(known.ends.first().copied()),
        reset_at_boundaries: args.reset_at_boundaries.unwrap_or(known.apart),
        validation: ValidationConfig { fraction: 0.0, every_steps: 0, max_sequences: 0 },
        exclude: Vec::new(),
    };
    let threads = match args.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads as usize,
    };
    let mut bar = Bar::new("eval", Unit::Tokens);
    let mut progress = |done, total| bar.set(done, total);
    let found = evaluate(&weights, &data, length, threads, &mut progress)?;
    drop(bar);
    if args.written.is_json() {
        let line = json!({
            "loss": found.loss,
            "perplexity": found.perplexity(),
            "tokens": found.tokens,
            "sequences": found.sequences,
            "sequenceLength": length,
        });
        println!("{line}");
    } else {
        println!("loss        {:.6} nats a token", found.loss);
        println!("perplexity  {:.4}", found.perplexity());
        println!("tokens      {} in {} sequences", found.tokens, found.sequences);
    }
    Ok(())
}

/// What is typed; else what the model was trained with; else bytes.
fn tokenizer(args: &EvalArgs, weights: &Weights, known: &Text) -> Tokenizer {
    match (args.tokenizer.as_deref(), &known.tokenizer) {
        (Some("bytes"), _) => Tokenizer::Bytes,
        (Some(path), _) => Tokenizer::Path(path.to_string()),
        // Of 256 tokens each is a byte, whatever tokenizer spells them.
        (None, _) if weights.model().vocab_size == BYTES => Tokenizer::Bytes,
        (None, Some(own)) => own.clone(),
        (None, None) => Tokenizer::Bytes,
    }
}
