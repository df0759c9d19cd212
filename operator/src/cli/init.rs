//! `moejob init [NAME] [--data PATH]`: a manifest to begin with, and with `--data` one that fits
//! the data and this machine.
//!
//! ```text
//! PATH -> files -> format, field, tokens (Found) --\
//! --preset, --gpu, memory ------------------------> manifest -> Job, as `run` would have it
//! ```

use super::args::{TokenName, word};
use super::disk::patient;
use super::machine::gpus_here;
use super::room;
use crate::cli::out::io;
use clap::Args;
use moe_worker::data::inspect::{Kind, detect, inspect};
use moe_worker::data::{DataFile, Encoder, Format, find};
use moejob_manifest::problem::{Problem, printable_lines};
use moejob_manifest::words::several;
use moejob_manifest::{Job, edit};
use moejob_plan::placement;
use std::collections::BTreeSet;
use std::fs::OpenOptions;
use std::io::{BufRead, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;

/// Files that are looked at: all of a source are of one format.
const FILES_MAX: usize = 256;
/// Bytes of a first line in which keys are looked for.
const LINE_MAX: u64 = 1 << 20;
/// Larger data are not read for their tokens: four bytes are taken for one.
const READ_MAX: u64 = 64 << 20;
/// Keys that hold texts, before all others.
const KEYS: [&str; 6] = ["text", "content", "body", "document", "story", "output"];
/// Steps of a run that nobody has said more of, and of its warmup.
const STEPS: u64 = 600;
const WARMUP: u64 = 10;
/// Times that data are gone through at most.
const EPOCHS_MAX: u64 = 20;

#[derive(Args)]
pub struct InitArgs {
    /// The job's name; the manifest is NAME.yaml.
    #[arg(default_value = "my-job")]
    pub name: String,
    /// What to train on, a file, a folder or a pattern: it is looked at, and the manifest fits it.
    #[arg(long, value_name = "PATH")]
    pub data: Option<String>,
    /// A well-known model in place of a small one; `moejob explain model.preset` lists them.
    #[arg(long)]
    pub preset: Option<String>,
    /// For a GPU of the machine, in place of processors.
    #[arg(long)]
    pub gpu: bool,
    /// A tokenizer.json. Default: one that lies with the data, else bytes.
    #[arg(long, requires = "data")]
    pub tokenizer: Option<PathBuf>,
    /// The key or column of a document's text. Default: the one that looks like it.
    #[arg(long, requires = "data")]
    pub field: Option<String>,
    /// How ids are written in files of tokens without a header.
    #[arg(long, requires = "data", value_enum)]
    pub dtype: Option<TokenName>,
    /// The file to make; `-` is standard output. Default: NAME.yaml.
    #[arg(long)]
    pub out: Option<PathBuf>,
}

/// Writes a manifest to begin with; one that is there stays.
pub fn init(args: &InitArgs) -> ExitCode {
    let out = args.out.clone().unwrap_or_else(|| PathBuf::from(format!("{}.yaml", args.name)));
    let called = match out.as_os_str() == "-" {
        true => word(Path::new(&format!("{}.yaml", args.name))),
        false => word(&out),
    };
    let first = match (&args.data, args.gpu) {
        (Some(data), _) => fitting(args, data, &called),
        (None, false) => edit::first(&args.name, args.preset.as_deref(), &called),
        (None, true) => Err("--gpu fits a manifest to data: name them by --data PATH".to_string()),
    };
    let first = match first {
        Ok(first) => first,
        Err(why) => {
            eprintln!("moejob: {}", printable_lines(&why));
            return ExitCode::from(2);
        }
    };
    if out.as_os_str() == "-" {
        print!("{}", first.text);
        return ExitCode::SUCCESS;
    }
    let made = OpenOptions::new().write(true).create_new(true).open(&out);
    match made.and_then(|mut file| file.write_all(first.text.as_bytes())) {
        Ok(()) => {
            let (out, typed) = (out.display(), word(&out));
            for why in &first.unsupported {
                eprintln!("{out}: {why}");
            }
            match (first.unsupported.is_empty(), &args.data) {
                (true, Some(_)) => println!("{out}: moejob run {typed}"),
                (true, None) => {
                    println!("{out}: put your text where it says, then: moejob run {typed}");
                }
                _ => println!("{out}: `moejob plan {typed}` shows it; it cannot run yet"),
            }
            ExitCode::SUCCESS
        }
        Err(error) if error.kind() == std::io::ErrorKind::AlreadyExists => {
            eprintln!("moejob: {} is there already: give another name, or --out", out.display());
            ExitCode::from(2)
        }
        Err(error) => {
            eprintln!("moejob: {} cannot be written: {}", out.display(), io(&error));
            eprintln!("  name a file in a folder that is there");
            ExitCode::from(2)
        }
    }
}

/// What the data are.
struct Found {
    /// `text: { paths: [..] }` and the like.
    source: String,
    /// In words.
    what: String,
    tokens: u64,
    /// Ids of the data are below it, and the tokenizer that makes them, if one is named.
    vocabulary: u32,
    tokenizer: Option<String>,
}

/// A manifest for `data` on this machine.
fn fitting(args: &InitArgs, data: &str, called: &str) -> Result<edit::First, String> {
    let found = look(args, data)?;
    let text = manifest(args, &found, called)?;
    let job = Job::read(text.as_bytes()).map_err(|problems| {
        let all: Vec<String> = problems.iter().map(Problem::sentence).collect();
        all.join("\n")
    })?;
    let unsupported: Vec<String> = job.unsupported().iter().map(Problem::sentence).collect();
    let (sizes, _) = placement::sizes(&job);
    match (args.gpu, sizes.last()) {
        (false, Some(size)) => {
            room::check(&job, size).map_err(|why| {
                let smaller = "a model that fits: no --preset, or --preset tiny; for a machine \
                               with GPUs add --gpu";
                format!("{why}\n  {smaller}")
            })?;
        }
        (true, _) => {
            if let Err(why) = gpus_here() {
                eprintln!("moejob: no GPU of this machine is checked: {why}");
            }
        }
        _ => {}
    }
    Ok(edit::First { text, unsupported })
}

/// # Errors
/// The data cannot be trained on: what they are, and what to do.
fn look(args: &InitArgs, data: &str) -> Result<Found, String> {
    let path = Path::new(data);
    let pattern = match path.is_dir() {
        true => format!("{}/**/*", data.trim_end_matches('/')),
        false => data.to_string(),
    };
    let here = std::env::current_dir().map_err(|error| io(&error))?;
    let told = |error: moe_worker::data::DataError| {
        let failure = error.failure();
        format!("{}\n  {}", failure.message, failure.advice)
    };
    let mut files = find(&patient(), &here, &[pattern.clone()], &[], &[]).map_err(told)?;
    // What lies with the data and is none.
    let beside = |file: &DataFile| {
        let name = file.path.file_name().unwrap_or_default().to_string_lossy().into_owned();
        name.starts_with('.') || ["tokenizer.json", "README.md", "LICENSE"].contains(&&name[..])
    };
    if path.is_dir() {
        files.retain(|file| !beside(file));
    }
    for file in &files {
        let ending = file.path.extension().map(|of| of.to_string_lossy().to_lowercase());
        if let Some(table @ ("csv" | "tsv" | "xlsx")) = ending.as_deref() {
            return Err(format!(
                "{}: tables ({table}) are not read: write the column that holds the text as JSONL, \
                 a line {{\"text\": \"..\"}} each",
                file.path.display()
            ));
        }
    }
    let dtype = args.dtype.map(TokenName::dtype);
    let typed = args.field.as_deref().unwrap_or("text");
    let mut kind: Option<(Kind, PathBuf)> = None;
    for file in files.iter().take(FILES_MAX) {
        let is = detect(file, typed, dtype).map_err(told)?;
        match &kind {
            Some((first, of)) if *first != is => {
                return Err(format!(
                    "{} and {} are of two formats: name one of them, or a pattern such as \
                     '{}/**/*.txt'",
                    of.display(),
                    file.path.display(),
                    data.trim_end_matches('/')
                ));
            }
            Some(_) => {}
            None => kind = Some((is, file.path.clone())),
        }
    }
    let Some((kind, first)) = kind else {
        return Err(format!("{data}: there is no file to train on"));
    };
    let tokenizer = match (&args.tokenizer, &kind) {
        (Some(path), _) => Some(path.clone()),
        (None, Kind::Documents(_)) => {
            let folder = if path.is_dir() { Some(path) } else { first.parent() };
            folder.map(|folder| folder.join("tokenizer.json")).filter(|path| path.is_file())
        }
        (None, _) => None,
    };
    let encoder = match &tokenizer {
        Some(path) => Encoder::read(path).map_err(told)?,
        None => Encoder::Bytes,
    };
    let field = match (&args.field, &kind) {
        (Some(field), _) => field.clone(),
        (None, Kind::Documents(Format::Jsonl(_))) => key_of(&first)?,
        _ => "text".to_string(),
    };
    let bytes: u64 = files.iter().map(|file| file.bytes).sum();
    let (mut tokens, mut largest) = (0, 0);
    let is_tokens = !matches!(kind, Kind::Documents(_));
    let reads_all = bytes <= READ_MAX || is_tokens;
    for file in files.iter().take(if reads_all { usize::MAX } else { 0 }) {
        // Of a pair of Megatron's that is found whole the index stands for both.
        let index = file.path.with_extension("idx");
        let is_half = kind == Kind::Megatron && index != file.path;
        if is_half && files.iter().any(|other| other.path == index) {
            continue;
        }
        let found = inspect(&file.path, &field, dtype, &encoder).map_err(told)?;
        tokens += found.tokens;
        largest = largest.max(found.largest.unwrap_or(0));
    }
    if !reads_all {
        tokens = if tokenizer.is_some() { bytes / 4 } else { bytes };
    }
    let pattern = match kind {
        Kind::Megatron => megatron_pattern(&pattern),
        _ => narrowed(&pattern, &files),
    };
    let quoted = serde_json::to_string(&pattern).unwrap_or_default();
    let keyed = |name: &str| match field.as_str() {
        "text" => format!("{name}: {{ paths: [{quoted}] }}"),
        field => format!("{name}: {{ paths: [{quoted}], field: {field} }}"),
    };
    let flat = match args.dtype {
        Some(TokenName::Uint16) => ", dtype: uint16",
        Some(TokenName::Uint32) => ", dtype: uint32",
        None => "",
    };
    let (source, what) = match &kind {
        Kind::Documents(Format::Text) => (format!("text: {{ paths: [{quoted}] }}"), "text"),
        Kind::Documents(Format::Jsonl(_)) => (keyed("jsonl"), "JSON lines"),
        Kind::Documents(Format::Parquet(_)) => (keyed("parquet"), "Parquet"),
        Kind::Tokens => (format!("tokens: {{ paths: [{quoted}]{flat} }}"), "tokens"),
        Kind::Megatron => (format!("megatron: {{ paths: [{quoted}] }}"), "Megatron's"),
    };
    let vocabulary = match &tokenizer {
        Some(_) => encoder.vocabulary(),
        // A multiple of 64, as vocabularies are.
        None if is_tokens => largest.saturating_add(1).next_multiple_of(64).max(256),
        None => encoder.vocabulary(),
    };
    let files = several(files.len(), "file");
    let about = if reads_all { "" } else { "about " };
    let what = format!("{files} of {what}, {about}{tokens} tokens");
    let tokenizer = tokenizer.map(|path| path.display().to_string());
    Ok(Found { source, what, tokens, vocabulary, tokenizer })
}

/// The pattern with the ending that all files have.
fn narrowed(pattern: &str, files: &[DataFile]) -> String {
    let endings: BTreeSet<_> = files.iter().map(|file| file.path.extension()).collect();
    match (pattern.strip_suffix("/**/*"), endings.iter().next()) {
        (Some(folder), Some(Some(ending))) if endings.len() == 1 => {
            format!("{folder}/**/*.{}", ending.to_string_lossy())
        }
        _ => pattern.to_string(),
    }
}

fn megatron_pattern(pattern: &str) -> String {
    match (pattern.strip_suffix(".bin"), pattern.strip_suffix("/**/*")) {
        (Some(stem), _) => format!("{stem}.idx"),
        (None, Some(folder)) => format!("{folder}/**/*.idx"),
        (None, None) => pattern.to_string(),
    }
}

/// The key of a first line that holds its text: a known one, else the longest text.
fn key_of(path: &Path) -> Result<String, String> {
    let unread = |error: std::io::Error| format!("{}: {}", path.display(), io(&error));
    let ending = path.extension().map(|of| of.to_string_lossy().into_owned());
    if ending.is_some_and(|ending| ["gz", "zst"].contains(&&ending[..])) {
        return Ok("text".to_string());
    }
    let file = std::fs::File::open(path).map_err(unread)?;
    let mut line = String::new();
    let mut reader = std::io::BufReader::new(std::io::Read::take(file, LINE_MAX));
    reader.read_line(&mut line).map_err(unread)?;
    let fields: serde_json::Map<String, serde_json::Value> = serde_json::from_str(&line)
        .map_err(|_| format!("{}, line 1: it is no JSON object", path.display()))?;
    let texts = fields.iter().filter_map(|(key, value)| Some((key, value.as_str()?.len())));
    let texts: Vec<(&String, usize)> = texts.collect();
    let known = KEYS.iter().find(|key| texts.iter().any(|(of, _)| of == *key));
    let longest = texts.iter().max_by_key(|(_, length)| *length).map(|(key, _)| key.to_string());
    known.map(|key| key.to_string()).or(longest).ok_or_else(|| {
        let keys: Vec<&str> = fields.keys().map(String::as_str).collect();
        format!(
            "{}, line 1: no key holds a text; its keys: {}",
            path.display(),
            keys.join(", ")
        )
    })
}

/// The manifest, as YAML.
fn manifest(args: &InitArgs, found: &Found, called: &str) -> Result<String, String> {
    let (batch, micro, longest) = if args.gpu { (32, 8, 1024) } else { (8, 2, 256) };
    // Two steps at least have data of their own, and a part is held out.
    let most = found.tokens.saturating_sub(found.tokens / 8) / (2 * batch);
    let length = std::iter::successors(Some(longest), |length| Some(length / 2))
        .take_while(|length| *length >= 8)
        .find(|length| *length < most)
        .ok_or_else(|| {
            format!("{} is too little: name {} tokens or more", found.what, 2 * batch * 10)
        })?;
    let steps = (EPOCHS_MAX * found.tokens / (batch * length)).clamp(2 * WARMUP, STEPS);
    let vocabulary = found.vocabulary;
    let (model, rate) = match (&args.preset, args.gpu) {
        (Some(preset), _) => {
            let tokens = match found.tokenizer.is_some() || vocabulary > 256 {
                true => format!(", vocabSize: {vocabulary}"),
                false => String::new(),
            };
            (format!("  model: {{ preset: {preset}{tokens} }}\n"), "4.0e-4")
        }
        (None, false) => (own_model(vocabulary, 128, 4, 8, 2, "0.08"), "3.0e-3"),
        (None, true) => (own_model(vocabulary, 512, 8, 32, 4, "0.04"), "1.0e-3"),
    };
    let profile = if args.gpu { "{ profile: gpu }" } else { "{ profile: cpu, min: 1, max: 1 }" };
    let tokenizer = match &found.tokenizer {
        Some(path) => format!("    tokenizer: {}\n", serde_json::json!(path)),
        None => String::new(),
    };
    let (every, kept) = ((steps / 10).max(1), (steps / 5).max(1));
    Ok(format!(
        "# {what}
#   moejob run {called}
#   moejob explain training.steps   says what a field means
apiVersion: moejob.dev/v1alpha1
kind: MoeJob
metadata:
  name: {name}
spec:
  nodes: {profile}
{model}  data:
    train: {{ {source} }}
    validation: {{ fraction: 0.05, everySteps: {every} }}
{tokenizer}    sequenceLength: {length}
  training:
    steps: {steps}
    globalBatchSize: {batch}
    microBatchSize: {micro}
    optimizer: {{ adamw: {{ learningRate: {rate} }} }}
    schedule: {{ cosine: {{ warmupSteps: {WARMUP}, minLearningRate: 1.0e-4 }} }}
    maxGradNorm: 1.0
  checkpoint: {{ everySteps: {kept}, keep: 3 }}
",
        what = found.what,
        name = args.name,
        source = found.source,
    ))
}

fn own_model(
    vocabulary: u32,
    hidden: u32,
    layers: u32,
    experts: u32,
    per_token: u32,
    range: &str,
) -> String {
    format!(
        "  model:
    vocabSize: {vocabulary}
    hiddenSize: {hidden}
    numHiddenLayers: {layers}
    numAttentionHeads: {layers}
    tieWordEmbeddings: true
    initializerRange: {range}
    experts: {{ count: {experts}, perToken: {per_token}, intermediateSize: {hidden} }}
    router: {{ auxLossCoef: 0.01, initializerRange: 0.02 }}
"
    )
}
