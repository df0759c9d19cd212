//! `moejob generate DIR --prompt TEXT`: a model goes on with a text; at a terminal, with one after
//! the other.
//!
//! ```text
//! prompt -> ids -> Decoder::feed -> logits -> Sampling::choose -> id -> TextStream -> out
//!                        ^------------------------------------------'
//! ```

use super::args::{self, THREADS_MAX, Written, whole};
use super::bench::DeviceName;
use super::checkpoint::tell_passed_over;
use super::eval::lacks_of_gpus;
use super::room::{Need, check_alone, largest};
use super::spoken::{Screen, TextStream};
use crate::cli::out::io;
use clap::{Args, ValueEnum};
use moe_worker::data::{DataError, Encoder};
use moe_worker::engine::computer::Computer;
use moe_worker::engine::decode::{DecodeError, Decoder};
use moe_worker::engine::sample::Sampling;
use moe_worker::hf::Weights;
use moe_worker::hf::text::{self, Text};
use moejob_kernels::DType;
use moejob_manifest::words::count;
use moejob_protocol::config::{Precision, Tokenizer};
use moejob_protocol::model::ModelConfig;
use serde_json::json;
use std::io::{BufRead, IsTerminal, Read, Write};
use std::path::{Path, PathBuf};
use std::process::ExitCode;
use std::time::{Duration, Instant};

/// Tokens of a conversation, where nothing says how many the model has seen at once.
const CONVERSATION: u32 = 4096;
/// Bytes of a prompt from standard input.
const PROMPT_BYTES_MAX: u64 = 64 << 20;

#[derive(Args)]
pub struct GenerateArgs {
    /// A run (NAME, runs/NAME), a `step-*` folder, a folder of them (the newest counts), or a
    /// Hugging Face directory.
    pub weights: PathBuf,
    /// The text to go on with. Without it standard input is; at a terminal you are asked for one
    /// text after the other.
    #[arg(long)]
    pub prompt: Option<String>,
    /// Tokens to generate at most.
    #[arg(long, default_value_t = 200, value_parser = whole(1, 1 << 20))]
    pub max_tokens: u32,
    /// 0 takes the likeliest token every time; the higher, the more is left to chance.
    #[arg(long, default_value_t = 0.8, value_parser = args::not_negative)]
    pub temperature: f64,
    /// Only the likeliest tokens, so many; 0 is all.
    #[arg(long, default_value_t = 0, value_parser = whole(0, u32::MAX))]
    pub top_k: u32,
    /// Only the likeliest tokens whose probabilities sum to this.
    #[arg(long, default_value_t = 0.95, value_parser = share)]
    pub top_p: f64,
    /// The same seed gives the same text.
    #[arg(long, default_value_t = 1, value_parser = args::seed)]
    pub seed: u64,
    /// `bytes`, or a tokenizer.json. Default: the one that the model was trained with.
    #[arg(long)]
    pub tokenizer: Option<String>,
    /// What computes: processors, or the first GPU that the driver shows.
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    pub device: DeviceName,
    /// Numbers to compute in. Default: those of the weights; processors, which have fp32 and fp64
    /// alone, take fp32 for all but fp64.
    #[arg(long, value_enum)]
    pub precision: Option<Numbers>,
    /// Threads that compute, on processors; 0 is all of them.
    #[arg(long, default_value_t = 0, value_parser = whole(0, THREADS_MAX))]
    pub threads: u32,
    #[command(flatten)]
    pub written: Written,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Numbers {
    Fp64,
    Fp32,
    Tf32,
    Bf16,
    Fp16,
}

fn share(text: &str) -> Result<f64, String> {
    let share = text.parse().ok().filter(|share| (0.0..=1.0).contains(share));
    share.ok_or_else(|| "a number from 0 to 1".to_string())
}

/// Why nothing, or nothing more, is said.
#[derive(Debug, thiserror::Error)]
enum GenerateError {
    #[error(transparent)]
    Decode(#[from] DecodeError),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error("{0}")]
    Input(String),
    #[error("{0}")]
    Encode(String),
    #[error("cannot write the text")]
    Write(#[source] std::io::Error),
}

impl GenerateError {
    fn exit_code(&self) -> u8 {
        match self {
            GenerateError::Input(_) => 2,
            GenerateError::Decode(DecodeError::Device(_) | DecodeError::Failed(_)) => 1,
            GenerateError::Encode(_) | GenerateError::Write(_) => 1,
            _ => 3,
        }
    }
}

pub fn run(args: &GenerateArgs) -> ExitCode {
    match generate(args) {
        Ok(()) => ExitCode::SUCCESS,
        // Who read it has seen enough.
        Err(GenerateError::Write(error)) if error.kind() == std::io::ErrorKind::BrokenPipe => {
            ExitCode::SUCCESS
        }
        Err(error) => {
            super::complain(&error);
            ExitCode::from(error.exit_code())
        }
    }
}

/// What a text ended with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum End {
    /// The model ended it.
    Said,
    MaxTokens,
}

/// One answer.
struct Answer {
    ids: Vec<u32>,
    text: String,
    end: End,
    /// For the prompt, and for all tokens after it.
    took: [Duration; 2],
}

/// A model, its tokens, and what it has said so far.
struct Speaker {
    decoder: Decoder,
    encoder: Encoder,
    text: Text,
    sampling: Sampling,
    /// Tokens chosen so far, of all texts: which random number comes next.
    chosen: u64,
    /// Chosen, but not yet fed.
    pending: Vec<u32>,
}

fn generate(args: &GenerateArgs) -> Result<(), GenerateError> {
    let weights = Weights::open(&args::place(&args.weights)).map_err(DecodeError::Weights)?;
    tell_passed_over(&weights);
    let text = text::find(&weights).map_err(DecodeError::Weights)?;
    let encoder = Encoder::open(&tokenizer(args, &text)?)?;
    encoder.check(weights.model().vocab_size)?;
    let asks = std::io::stdin().is_terminal() && args.prompt.is_none() && !args.written.is_json();
    let prompt = match (&args.prompt, asks) {
        (Some(prompt), _) => Some(prompt.clone()),
        (None, false) => Some(piped()?),
        (None, true) => None,
    };
    warn(&weights.warnings());
    let first = match &prompt {
        Some(prompt) => ids_of(&encoder, &text, prompt, true)?.len() as u32,
        None => text.trained.or(text.positions).unwrap_or(0).clamp(CONVERSATION, 1 << 17),
    };
    let capacity = first.saturating_add(args.max_tokens);
    let (on, precision) = ((args.device, args.threads), precision(args, &weights));
    let computer =
        computer(on, precision, weights.model(), capacity).map_err(GenerateError::Input)?;
    let wanted = |of: u32| Need::from(&computer.memory_of_generating(weights.model(), of));
    let less = |fits: &dyn Fn(Need) -> bool| {
        let most = largest(1, args.max_tokens, |of| fits(wanted(first.saturating_add(of))))?;
        Some(format!("--max-tokens {most} would fit"))
    };
    // A GPU asks for itself.
    if args.device == DeviceName::Cpu {
        check_alone("the model", wanted(capacity), less).map_err(GenerateError::Input)?;
    }
    let decoder = Decoder::open(&weights, capacity, computer)?;
    let sampling = Sampling {
        temperature: args.temperature,
        top_k: args.top_k,
        top_p: args.top_p,
        seed: args.seed,
    };
    let (chosen, pending) = (0, Vec::new());
    let mut speaker = Speaker { decoder, encoder, text, sampling, chosen, pending };
    match prompt {
        Some(prompt) => speaker.once(args, &weights, &prompt),
        None => speaker.converse(args, &weights),
    }
}

/// What is typed; else what the weights say; else why they do not.
fn tokenizer(args: &GenerateArgs, text: &Text) -> Result<Tokenizer, GenerateError> {
    let known = match args.tokenizer.as_deref() {
        Some("bytes") => Some(Tokenizer::Bytes),
        Some(path) => Some(Tokenizer::Path(path.to_string())),
        None => text.tokenizer.clone(),
    };
    known.ok_or_else(|| {
        let at = args.weights.display();
        GenerateError::Input(match &text.missing {
            Some(path) => format!(
                "{at} was trained with the tokenizer {}, which is not there: go where it is, or \
                 name it by --tokenizer FILE",
                path.display()
            ),
            None => format!(
                "{at} has no tokenizer.json, and nothing says how its text became tokens: name \
                 one by --tokenizer FILE"
            ),
        })
    })
}

/// The numbers that are typed, or those that the weights have.
fn precision(args: &GenerateArgs, weights: &Weights) -> Precision {
    match (args.precision, weights.dtype(0)) {
        (Some(Numbers::Fp64), _) => Precision::Fp64,
        (Some(Numbers::Fp32), _) => Precision::Fp32,
        (Some(Numbers::Tf32), _) => Precision::Tf32,
        (Some(Numbers::Bf16), _) => Precision::Bf16,
        (Some(Numbers::Fp16), _) => Precision::Fp16,
        (None, DType::F64) if args.device == DeviceName::Cpu => Precision::Fp64,
        (None, DType::Bf16) if args.device == DeviceName::Gpu => Precision::Bf16,
        (None, DType::F16) if args.device == DeviceName::Gpu => Precision::Fp16,
        (None, _) => Precision::Fp32,
    }
}

/// A device that generates a text of `capacity` tokens in this precision.
///
/// # Errors
/// It has no such numbers, or not what the model needs.
pub(super) fn computer(
    (device, threads): (DeviceName, u32),
    precision: Precision,
    model: &ModelConfig,
    capacity: u32,
) -> Result<Computer, String> {
    let what = match (device, precision) {
        (DeviceName::Cpu, Precision::Fp32 | Precision::Fp64) => {
            return Ok(Computer::Processors { threads: args::threads(threads), precision });
        }
        (DeviceName::Cpu, _) => {
            "--precision: processors compute in fp32 and fp64; --device gpu has others"
        }
        (DeviceName::Gpu, Precision::Fp64) => {
            "--precision: GPUs do not compute in fp64; --device cpu does"
        }
        (DeviceName::Gpu, _) => {
            let computer = Computer::Gpu { precision };
            let lacks = lacks_of_gpus(model, &computer.generating(capacity));
            return lacks.map_or(Ok(computer), Err);
        }
    };
    Err(what.to_string())
}

fn piped() -> Result<String, GenerateError> {
    let mut text = String::new();
    let read = std::io::stdin().lock().take(PROMPT_BYTES_MAX).read_to_string(&mut text);
    read.map_err(|error| {
        let why = match error.kind() {
            std::io::ErrorKind::InvalidData => "it is no UTF-8".to_string(),
            _ => io(&error),
        };
        GenerateError::Input(format!("no prompt can be read from standard input: {why}"))
    })?;
    Ok(text)
}

/// `begins`: it is the beginning of a text.
fn ids_of(
    encoder: &Encoder,
    text: &Text,
    prompt: &str,
    begins: bool,
) -> Result<Vec<u32>, GenerateError> {
    let ids = match text.special && begins {
        true => encoder.encode_with_special(prompt).map_err(GenerateError::Encode)?,
        false => {
            let mut ids = Vec::new();
            encoder.encode(prompt, &mut ids).map_err(GenerateError::Encode)?;
            ids
        }
    };
    match (ids.is_empty(), text.ends.first()) {
        (false, _) => Ok(ids),
        // Behind the end of a text another one begins.
        (true, Some(end)) => Ok(vec![*end]),
        (true, None) => Err(GenerateError::Input(
            "the prompt is empty: this model needs at least one token to go on with".to_string(),
        )),
    }
}

impl Speaker {
    fn once(
        &mut self,
        args: &GenerateArgs,
        weights: &Weights,
        prompt: &str,
    ) -> Result<(), GenerateError> {
        let ids = ids_of(&self.encoder, &self.text, prompt, true)?;
        let (prompt_tokens, mut out) = (ids.len(), Screen::new(args.written.is_json()));
        let answer = self.answer(ids, args.max_tokens, &mut out)?;
        let beyond = beyond(&self.text, prompt_tokens + answer.ids.len());
        if args.written.is_json() {
            let mut warnings = weights.warnings();
            warnings.extend(beyond);
            let line = json!({
                "prompt": prompt,
                "text": answer.text,
                "promptTokens": prompt_tokens,
                "tokens": answer.ids,
                "end": if answer.end == End::Said { "end" } else { "maxTokens" },
                "promptSeconds": answer.took[0].as_secs_f64(),
                "seconds": answer.took[1].as_secs_f64(),
                "from": weights.path(),
                "passedOver": weights.passed_over(),
                "warnings": warnings,
            });
            println!("{line}");
            return Ok(());
        }
        out.line().map_err(GenerateError::Write)?;
        warn(beyond.as_slice());
        if std::io::stderr().is_terminal() {
            self.summary(prompt_tokens, &answer);
        }
        Ok(())
    }

    /// Until the end of input.
    fn converse(&mut self, args: &GenerateArgs, weights: &Weights) -> Result<(), GenerateError> {
        let model = weights.model();
        eprintln!(
            "{}: {} parameters, {} of them for a token. Type a text and the model goes on with it; \
             what comes next is added to it. /new begins a new text, /quit or Ctrl-D ends.",
            args.weights.display(),
            count(model.numel()),
            count(model.active_numel()),
        );
        // Of each text it is said once how long it has become.
        let mut told = false;
        loop {
            let mut prompt = std::io::stderr();
            let _ = write!(prompt, "> ").and_then(|()| prompt.flush());
            let mut typed = Vec::new();
            let line = std::io::stdin().lock().take(PROMPT_BYTES_MAX).read_until(b'\n', &mut typed);
            match line {
                Ok(0) => return Ok(()),
                Ok(_) => {}
                Err(error) => {
                    return Err(GenerateError::Input(format!("standard input: {}", io(&error))));
                }
            }
            // What is typed in another encoding ends no conversation.
            let typed = String::from_utf8_lossy(&typed);
            let typed = typed.trim_end_matches(['\r', '\n']);
            match typed {
                "/new" => {
                    self.forget();
                    told = false;
                    continue;
                }
                "/quit" | "/exit" => return Ok(()),
                "/help" | "/?" => {
                    eprintln!("/new begins a new text, /quit or Ctrl-D ends; all else is text");
                    continue;
                }
                _ => {}
            }
            let begins = self.decoder.is_empty() && self.pending.is_empty();
            let asked = ids_of(&self.encoder, &self.text, typed, begins);
            let ids = match asked {
                Ok(ids) => ids,
                Err(GenerateError::Input(why)) => {
                    eprintln!("{why}");
                    continue;
                }
                Err(error) => return Err(error),
            };
            let mut out = Screen::new(false);
            match self.answer(ids, args.max_tokens, &mut out) {
                Ok(answer) => {
                    out.line().map_err(GenerateError::Write)?;
                    let all = self.decoder.len() + self.pending.len();
                    if !std::mem::replace(&mut told, true) {
                        match beyond(&self.text, all) {
                            Some(beyond) => warn(&[beyond]),
                            None => told = false,
                        }
                    }
                    if answer.end == End::Said {
                        self.forget();
                        told = false;
                    }
                }
                Err(GenerateError::Decode(DecodeError::Full { capacity, .. })) => {
                    eprintln!("the text has reached {capacity} tokens: a new one begins");
                    self.forget();
                    told = false;
                }
                Err(error) => return Err(error),
            }
        }
    }

    fn forget(&mut self) {
        self.decoder.forget();
        self.pending.clear();
    }

    /// Goes on with what was said and `ids`.
    fn answer(
        &mut self,
        ids: Vec<u32>,
        tokens_max: u32,
        out: &mut Screen,
    ) -> Result<Answer, GenerateError> {
        let started = Instant::now();
        let mut next = std::mem::take(&mut self.pending);
        next.extend(ids);
        if self.decoder.room() < next.len() {
            let capacity = self.decoder.len() + self.decoder.room();
            let wanted = self.decoder.len() + next.len();
            return Err(DecodeError::Full { capacity, wanted }.into());
        }
        let mut stream = TextStream::behind(&self.encoder, &next);
        let (mut said, mut text, mut end) = (Vec::new(), String::new(), End::MaxTokens);
        let mut prompt_took = None;
        while said.len() < tokens_max as usize && self.decoder.room() >= next.len() {
            let logits = self.decoder.feed(&next)?;
            prompt_took.get_or_insert_with(|| started.elapsed());
            let id = self.sampling.choose(&logits, self.chosen);
            self.chosen += 1;
            next = vec![id];
            if self.text.ends.contains(&id) {
                end = End::Said;
                break;
            }
            said.push(id);
            let more = stream.push(id);
            out.text(&more).map_err(GenerateError::Write)?;
            text.push_str(&more);
        }
        let rest = stream.finish();
        out.text(&rest).map_err(GenerateError::Write)?;
        text.push_str(&rest);
        self.pending = next;
        let prompt_took = prompt_took.unwrap_or_default();
        Ok(Answer { ids: said, text, end, took: [prompt_took, started.elapsed() - prompt_took] })
    }

    fn summary(&self, prompt_tokens: usize, answer: &Answer) {
        let (count, seconds) = (answer.ids.len(), answer.took[1].as_secs_f64());
        let rate = count.saturating_sub(1) as f64 / seconds.max(1e-9);
        eprintln!("[{prompt_tokens} tokens of prompt, {count} more at {rate:.0} a second]");
    }
}

pub fn warn(warnings: &[String]) {
    warnings.iter().for_each(|warning| eprintln!("warning: {warning}"));
}

/// What is said of a text of so many tokens, where the model knows none that are so long.
pub fn beyond(text: &Text, tokens: usize) -> Option<String> {
    let known = text.trained.or(text.positions).filter(|known| tokens > *known as usize)?;
    let why = match text.trained {
        Some(_) => format!("the model was trained on {known} tokens at once"),
        None => format!("the model has {known} positions (max_position_embeddings)"),
    };
    Some(format!("{why}, and here are {tokens}: what comes after them is beyond what it knows"))
}

/// The command that tries a model: as typed at this place.
pub fn command_for(program: &str, place: &Path) -> String {
    let (program, place) = (args::word(Path::new(program)), args::word(place));
    format!("{program} generate {place} --prompt \"The \"")
}

/// The command that draws a run, of a model that cannot be asked.
pub fn command_to_look(program: &str, run: &Path) -> String {
    format!("{} report {}", args::word(Path::new(program)), args::word(run))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_text_beyond_the_length_of_training_is_told() {
        let text = |trained, positions| Text { trained, positions, ..Text::default() };
        assert_eq!(beyond(&text(Some(32), None), 32), None);
        assert_eq!(beyond(&text(None, None), 1 << 20), None);
        let told = beyond(&text(Some(32), Some(64)), 40).expect("it is told");
        assert!(told.starts_with("the model was trained on 32 tokens at once, and here are 40"));
        let told = beyond(&text(None, Some(64)), 65).expect("it is told");
        assert!(told.starts_with("the model has 64 positions (max_position_embeddings)"), "{told}");
    }

    #[test]
    fn a_command_can_be_typed_as_it_is_shown() {
        let of = |place| command_for("target/release/moejob", Path::new(place));
        let plain = "target/release/moejob generate runs/first-run --prompt \"The \"";
        assert_eq!(of("runs/first-run"), plain);
        let quoted = r#"target/release/moejob generate 'my runs/it'\''s' --prompt "The ""#;
        assert_eq!(of("my runs/it's"), quoted);
    }
}
