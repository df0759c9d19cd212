//! `moejob data inspect|tokenizer|tokenize`.

use super::args::{THREADS_MAX, TokenName, Written, whole};
use super::bar::{Bar, Unit};
use super::disk::patient;
use super::validate::Output;
use clap::{Args, Subcommand, ValueEnum};
use moe_worker::data::durable;
use moe_worker::data::inspect::{Inspection, Kind, detect, inspect};
use moe_worker::data::learn;
use moe_worker::data::prepare::{Done, Layout, Prepare, PrepareError, SAVE_EVERY};
use moe_worker::data::{DataError, DataFile, Encoder, Format, Recipe, find, threads};
use serde_json::Value;
use std::fs::File;
use std::io::ErrorKind::{AlreadyExists, NotFound};
use std::io::Write;
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Text shown of a file's first tokens.
const TEXT_CHARS_MAX: usize = 300;

#[derive(Subcommand)]
pub enum DataCommand {
    /// Say what files are, how many documents and tokens they hold, and how they begin.
    Inspect(InspectArgs),
    /// Make a tokenizer of your own from documents: byte pairs, as GPT-2 has them.
    Tokenizer(TokenizerArgs),
    /// Turn documents into files of tokens, once, instead of at the start of every worker.
    Tokenize(TokenizeArgs),
}

#[derive(Args)]
pub struct InspectArgs {
    /// Files: text, .jsonl (.gz, .zst), .bin, .idx, .parquet.
    #[arg(required = true)]
    paths: Vec<PathBuf>,
    /// `bytes`, or the path of a tokenizer.json: counts tokens of text, and decodes tokens.
    #[arg(long)]
    tokenizer: Option<String>,
    /// The key or column of a document's text.
    #[arg(long, default_value = "text")]
    field: String,
    /// How ids are written in files without a header.
    #[arg(long)]
    dtype: Option<TokenName>,
    /// One line of JSON a file.
    #[arg(long, conflicts_with = "output")]
    json: bool,
    /// How it is written; json is one list.
    #[arg(short, long, value_enum, default_value_t = Output::Text)]
    output: Output,
}

#[derive(Args)]
pub struct TokenizerArgs {
    /// Files or patterns, all of one format: text, .jsonl (.gz, .zst) or .parquet.
    #[arg(required = true)]
    inputs: Vec<String>,
    /// The file to make.
    #[arg(long, default_value = "tokenizer.json")]
    out: PathBuf,
    /// Size of the vocabulary, with every byte and the token that ends a document.
    #[arg(
        long,
        default_value_t = 8192,
        value_parser = whole(learn::TOKENS_MIN, learn::TOKENS_MAX)
    )]
    tokens: u32,
    /// The key or column of a document's text.
    #[arg(long, default_value = "text")]
    field: String,
    #[command(flatten)]
    written: Written,
}

#[derive(Args)]
pub struct TokenizeArgs {
    /// Files or patterns, all of one format: text, .jsonl (.gz, .zst) or .parquet.
    #[arg(required = true)]
    inputs: Vec<String>,
    /// Path of the result without its ending: OUT.bin, and OUT.idx.
    #[arg(long)]
    out: PathBuf,
    /// `bytes`, or the path of a tokenizer.json.
    #[arg(long)]
    tokenizer: String,
    /// The key or column of a document's text.
    #[arg(long, default_value = "text")]
    field: String,
    /// A token to put behind each document: its id, or as the vocabulary writes it.
    #[arg(long, value_name = "TOKEN")]
    end_of_document: Option<String>,
    /// How the tokens are left: megatron (.bin and .idx) or flat (.bin alone, for `tokens`).
    #[arg(long, value_enum, default_value_t = LayoutName::Megatron)]
    layout: LayoutName,
    /// Default: as many as there are processors.
    #[arg(long, value_parser = whole(1, THREADS_MAX))]
    threads: Option<u32>,
    #[command(flatten)]
    written: Written,
}

#[derive(Clone, Copy, ValueEnum)]
enum LayoutName {
    Megatron,
    Flat,
}

pub fn run(command: &DataCommand) -> ExitCode {
    match command {
        DataCommand::Inspect(args) => inspect_all(args),
        DataCommand::Tokenizer(args) => tokenizer(args).unwrap_or_else(|refused| refused),
        DataCommand::Tokenize(args) => tokenize(args).unwrap_or_else(|refused| refused),
    }
}

fn refuse(error: &DataError) -> ExitCode {
    let failure = error.failure();
    eprintln!("moejob: {}; {}", failure.message, failure.advice);
    ExitCode::from(u8::try_from(failure.exit_code).unwrap_or(1))
}

fn encoder(name: &str) -> Result<Encoder, DataError> {
    if name == "bytes" { Ok(Encoder::Bytes) } else { Encoder::read(Path::new(name)) }
}

fn inspect_all(args: &InspectArgs) -> ExitCode {
    let dtype = args.dtype.map(TokenName::dtype);
    let encoder = match args.tokenizer.as_deref().map(encoder).transpose() {
        Ok(encoder) => encoder,
        Err(error) => return refuse(&error),
    };
    let (mut code, mut list) = (ExitCode::SUCCESS, Vec::new());
    for path in &args.paths {
        let counting = encoder.clone().unwrap_or(Encoder::Bytes);
        match inspect(path, &args.field, dtype, &counting) {
            Err(error) => code = refuse(&error),
            Ok(found) => {
                // Ids in files mean something to the tokenizer alone that made them.
                let text = match (&encoder, found.documents, found.what.starts_with("Megatron")) {
                    (Some(encoder), ..) => Some(encoder.decode(&found.first)),
                    (None, Some(_), false) => Some(Encoder::Bytes.decode(&found.first)),
                    _ => None,
                };
                let shown = match args.json {
                    _ if args.output == Output::Json => {
                        list.push(as_json(path, &found, text));
                        continue;
                    }
                    true => as_json(path, &found, text).to_string(),
                    false => as_text(path, &found, text),
                };
                println!("{shown}");
            }
        }
    }
    if args.output == Output::Json {
        println!("{}", Value::from(list));
    }
    code
}

fn as_json(path: &Path, found: &Inspection, text: Option<String>) -> Value {
    serde_json::json!({
        "path": path.display().to_string(),
        "what": found.what,
        "bytes": found.bytes,
        "documents": found.documents,
        "tokens": found.tokens,
        "largestId": found.largest,
        "first": found.first,
        "text": text,
    })
}

fn as_text(path: &Path, found: &Inspection, text: Option<String>) -> String {
    let mut lines = format!("{}: {}\n", path.display(), found.what);
    lines += &format!("  bytes      {}\n", found.bytes);
    if let Some(documents) = found.documents {
        lines += &format!("  documents  {documents}\n");
    }
    lines += &format!("  tokens     {}", found.tokens);
    if let Some(largest) = found.largest {
        lines += &format!(", ids up to {largest}");
    }
    let ids: Vec<String> = found.first.iter().take(16).map(u32::to_string).collect();
    lines += &format!("\n  first      {}", ids.join(" "));
    if let Some(text) = text {
        let text: String = text.chars().take(TEXT_CHARS_MAX).collect();
        lines += &format!("\n  text       {text:?}");
    }
    lines
}

/// The files that match, and how they are all read.
fn documents(inputs: &[String], field: &str) -> Result<(Vec<DataFile>, Format), ExitCode> {
    let current = std::env::current_dir().map_err(|error| {
        eprintln!("moejob: there is no current directory: {error}");
        ExitCode::FAILURE
    })?;
    let files = find(&patient(), &current, inputs, &[], &[]).map_err(|error| refuse(&error))?;
    let format = one_format(&files, field)?;
    Ok((files, format))
}

fn tokenizer(args: &TokenizerArgs) -> Result<ExitCode, ExitCode> {
    let unwritten = |error: std::io::Error| {
        let advice = match error.kind() {
            AlreadyExists => "choose another --out, or delete it",
            NotFound => "make the folder first",
            _ => "choose another --out",
        };
        eprintln!("moejob: {} cannot be made: {error}; {advice}", args.out.display());
        ExitCode::from(2)
    };
    let (files, format) = documents(&args.inputs, &args.field)?;
    let bytes: u64 = files.iter().map(|file| file.bytes).sum();
    // Made before the work, so that a path that cannot be written is told at once.
    let mut file = File::create_new(&args.out).map_err(unwritten)?;
    let made = learn::learn(files, &format, args.tokens).map_err(|error| refuse(&error));
    let written = made.and_then(|(text, tokens)| {
        let written = file.write_all(text.as_bytes()).and_then(|()| file.sync_all());
        written.and_then(|()| durable::sync_folder_of(&args.out)).map_err(unwritten)?;
        Ok(tokens)
    });
    let tokens = written.inspect_err(|_| {
        let _ = std::fs::remove_file(&args.out);
    })?;
    let output = args.out.display();
    if args.written.is_json() {
        let made = serde_json::json!({
            "path": output.to_string(),
            "tokens": tokens,
            "learnedFromBytes": bytes,
            "endOfDocument": 0,
        });
        println!("{made}");
        return Ok(ExitCode::SUCCESS);
    }
    let end = learn::END_OF_DOCUMENT;
    println!("{output}: {tokens} tokens, learned from {bytes} bytes; token 0 is {end}");
    println!("model: {{ vocabSize: {tokens} }}");
    println!("data: {{ tokenizer: {output}, endOfDocument: 0 }}");
    Ok(ExitCode::SUCCESS)
}

fn tokenize(args: &TokenizeArgs) -> Result<ExitCode, ExitCode> {
    let refused = |error: DataError| refuse(&error);
    let encoder = encoder(&args.tokenizer).map_err(refused)?;
    let end_of_document = match args.end_of_document.as_deref() {
        None => None,
        Some(token) => Some(token_id(&encoder, token)?),
    };
    let (files, format) = documents(&args.inputs, &args.field)?;
    let total = files.iter().map(|file| file.bytes).sum();
    let layout = match args.layout {
        LayoutName::Megatron => Layout::Megatron,
        LayoutName::Flat => Layout::Flat,
    };
    let prepare = Prepare {
        files,
        format,
        recipe: Recipe { encoder, field: args.field.clone(), end_of_document },
        output: args.out.clone(),
        layout,
        threads: args.threads.map_or_else(threads, |threads| threads as usize),
        save_every: SAVE_EVERY,
    };
    let mut bar = Bar::new("tokenize", Unit::Bytes);
    let result = prepare.run(&mut |done| bar.set(done.bytes, total));
    drop(bar);
    match result {
        Ok(done) => {
            match args.written.is_json() {
                true => println!("{}", result_json(&prepare, &done)),
                false => println!("{}", say_result(&prepare, &done)),
            }
            Ok(ExitCode::SUCCESS)
        }
        Err(PrepareError::Data(error)) => Err(refuse(&error)),
        Err(error) => {
            super::complain(&error);
            let advice = match error {
                PrepareError::Exists { .. } => "choose another --out, or delete it",
                PrepareError::OtherRun { .. } => "delete it and the .part files to begin anew",
                PrepareError::Nothing => "look at it with `moejob data inspect`",
                PrepareError::Write { ref source, .. } if source.kind() == NotFound => {
                    "make the folder first"
                }
                _ => "what was done is kept: run the same command again",
            };
            eprintln!("moejob: {advice}");
            Err(ExitCode::from(match error {
                PrepareError::Write { source, .. } if source.kind() != NotFound => 1,
                PrepareError::Nothing => 3,
                _ => 2,
            }))
        }
    }
}

fn describe(done: &Done) -> String {
    format!("{} documents, {} tokens", done.documents, done.tokens)
}

/// What there is, and how a manifest names it.
fn say_result(prepare: &Prepare, done: &Done) -> String {
    let output = prepare.output.display();
    let dtype = prepare.width().name();
    let source = match prepare.layout {
        Layout::Megatron => format!("megatron: {{ paths: [{output}.idx] }}"),
        Layout::Flat => format!("tokens: {{ paths: [{output}.bin], dtype: {dtype} }}"),
    };
    format!("{output}.bin: {}, {dtype}\ndata.train: {{ {source} }}", describe(done))
}

fn result_json(prepare: &Prepare, done: &Done) -> Value {
    let path = |ending: &str| format!("{}.{ending}", prepare.output.display());
    let index = matches!(prepare.layout, Layout::Megatron).then(|| path("idx"));
    serde_json::json!({
        "bin": path("bin"),
        "idx": index,
        "documents": done.documents,
        "tokens": done.tokens,
        "dtype": prepare.width().name(),
    })
}

fn token_id(encoder: &Encoder, token: &str) -> Result<u32, ExitCode> {
    // A number is an id, even where the vocabulary has a token that is written so.
    token.parse().ok().or_else(|| encoder.id_of(token)).ok_or_else(|| {
        eprintln!("moejob: --end-of-document: {token:?} is no id and not in the vocabulary");
        ExitCode::from(2)
    })
}

/// All files must be read alike.
fn one_format(files: &[DataFile], field: &str) -> Result<Format, ExitCode> {
    let mut format: Option<(Format, &DataFile)> = None;
    for file in files {
        let kind = detect(file, field, None).map_err(|error| refuse(&error))?;
        let Kind::Documents(found) = kind else {
            eprintln!("moejob: {} holds tokens already", file.path.display());
            return Err(ExitCode::from(2));
        };
        match &format {
            None => format = Some((found, file)),
            Some((first, other)) if *first != found => {
                let (a, b) = (other.path.display(), file.path.display());
                eprintln!("moejob: {a} and {b} are of two formats; tokenize them one by one");
                return Err(ExitCode::from(2));
            }
            Some(_) => {}
        }
    }
    format.map(|(format, _)| format).ok_or(ExitCode::from(2))
}
