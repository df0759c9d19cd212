//! `moejob eval DIR --data PATH`: the loss of weights on data.

use super::bar::{Bar, Unit};
use clap::{Args, ValueEnum};
use moe_worker::engine::eval::{EvalError, evaluate, source_of};
use moe_worker::hf::Weights;
use moejob_protocol::config::{DataConfig, TokenType, Tokenizer, ValidationConfig};
use serde_json::json;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Exit code of weights or data that are refused.
const EXIT_REFUSED: u8 = 3;
/// Ids that bytes have.
const BYTES: u32 = 256;

#[derive(Args)]
pub struct EvalArgs {
    /// A `step-*` folder, a folder of them (the newest counts), or a Hugging Face directory.
    pub weights: PathBuf,
    /// Text, a folder of text, .jsonl (also .gz and .zst), .bin or .idx of tokens, .parquet.
    #[arg(long)]
    pub data: PathBuf,
    /// Tokens that the model sees at once.
    #[arg(long, default_value_t = 512, value_parser = clap::value_parser!(u32).range(1..=1 << 20))]
    pub sequence_length: u32,
    /// `bytes`, or a tokenizer.json. Default: the one of a Hugging Face directory, else bytes.
    #[arg(long)]
    pub tokenizer: Option<String>,
    /// Field of JSON lines that holds the text.
    #[arg(long, default_value = "text")]
    pub field: String,
    /// Type of tokens in a .bin without header.
    #[arg(long, value_enum)]
    pub dtype: Option<TokenName>,
    /// Threads that compute; 0 is all processors.
    #[arg(long, default_value_t = 0)]
    pub threads: usize,
    /// One line of JSON.
    #[arg(long)]
    pub json: bool,
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
    let weights = Weights::open(&args.weights)?;
    let data = DataConfig {
        source,
        held_out: None,
        tokenizer: tokenizer(args, &weights),
        end_of_document: None,
        reset_at_boundaries: false,
        validation: ValidationConfig { fraction: 0.0, every_steps: 0, max_sequences: 0 },
        exclude: Vec::new(),
    };
    let threads = match args.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads,
    };
    let mut bar = Bar::new("eval", Unit::Tokens);
    let mut progress = |done, total| bar.set(done, total);
    let found = evaluate(&weights, &data, args.sequence_length, threads, &mut progress)?;
    drop(bar);
    if args.json {
        let line = json!({
            "loss": found.loss,
            "perplexity": found.perplexity(),
            "tokens": found.tokens,
            "sequences": found.sequences,
            "sequenceLength": args.sequence_length,
        });
        println!("{line}");
    } else {
        println!("loss        {:.6} nats a token", found.loss);
        println!("perplexity  {:.4}", found.perplexity());
        println!("tokens      {} in {} sequences", found.tokens, found.sequences);
    }
    Ok(())
}

/// What is typed; else the directory's own; else bytes.
fn tokenizer(args: &EvalArgs, weights: &Weights) -> Tokenizer {
    let own = weights.path().join("tokenizer.json");
    match args.tokenizer.as_deref() {
        Some("bytes") => Tokenizer::Bytes,
        Some(path) => Tokenizer::Path(path.to_string()),
        None if is_beside(weights, &own) => Tokenizer::Path(own.display().to_string()),
        None => Tokenizer::Bytes,
    }
}

fn is_beside(weights: &Weights, own: &Path) -> bool {
    weights.model().vocab_size != BYTES && own.is_file()
}
