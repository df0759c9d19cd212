//! `moejob eval DIR --data PATH`: the loss of weights on data.

use super::args::{self, THREADS_MAX, TokenName, Written, whole};
use super::bar::{Bar, Unit};
use super::bench::DeviceName;
use super::checkpoint::tell_passed_over;
use super::room::{Need, check_alone, largest};
use clap::{Args, ValueEnum};
use moe_worker::engine::computer::Computer;
use moe_worker::engine::eval::{EvalError, evaluate, source_of};
use moe_worker::hf::Weights;
use moe_worker::hf::text::{self, Text};
use moejob_manifest::problem::Problem;
use moejob_manifest::devices::on_one_gpu;
use moejob_protocol::config::{
    DataConfig, Precision, Tokenizer, TrainingConfig, ValidationConfig,
};
use moejob_protocol::model::ModelConfig;
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
    /// What computes: processors, or the first GPU that the driver shows.
    #[arg(long, value_enum, default_value_t = DeviceName::Cpu)]
    pub device: DeviceName,
    /// Numbers to compute in, on a GPU. Default: fp32, which is what processors compute in.
    #[arg(long, value_enum)]
    pub precision: Option<Numbers>,
    /// Threads that compute, on processors; 0 is all of them.
    #[arg(long, default_value_t = 0, value_parser = whole(0, THREADS_MAX))]
    pub threads: u32,
    #[command(flatten)]
    pub written: Written,
}

/// What a GPU measures in.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
pub enum Numbers {
    Fp32,
    Tf32,
    Bf16,
    Fp16,
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
                EvalError::Kind { .. } | EvalError::Unsupported { .. } => 2,
                _ => 1,
            })
        }
    }
}

fn measure(args: &EvalArgs) -> Result<(), EvalError> {
    let dtype = args.dtype.map(TokenName::dtype);
    let source = source_of(&args.data, &args.field, dtype)?;
    let weights = Weights::open(&args::place(&args.weights))?;
    tell_passed_over(&weights);
    let known = text::find(&weights)?;
    let length = args.sequence_length.or(known.trained).unwrap_or(UNKNOWN_LENGTH);
    let data = DataConfig {
        source,
        held_out: None,
        tokenizer: tokenizer(args, &weights, &known),
        end_of_document: known.trained.and(known.ends.first().copied()),
        reset_at_boundaries: args.reset_at_boundaries.unwrap_or(known.apart),
        mask_at_boundaries: known.masked,
        validation: ValidationConfig { fraction: 0.0, every_steps: 0, max_sequences: 0 },
        exclude: Vec::new(),
    };
    let mut warnings = weights.warnings();
    warnings.extend(super::generate::beyond(&known, length as usize));
    super::generate::warn(&warnings);
    let computer = computer(args, weights.model(), length)?;
    room(args, computer, weights.model(), length)?;
    let mut bar = Bar::new("eval", Unit::Tokens);
    let mut progress = |done, total| bar.set(done, total);
    let found = evaluate(&weights, &data, length, computer, &mut progress)?;
    drop(bar);
    if args.written.is_json() {
        let line = json!({
            "loss": found.loss,
            "perplexity": found.perplexity(),
            "tokens": found.tokens,
            "sequences": found.sequences,
            "sequenceLength": length,
            "from": weights.path(),
            "passedOver": weights.passed_over(),
            "warnings": warnings,
        });
        println!("{line}");
    } else {
        println!("loss        {:.6} nats a token", found.loss);
        println!("perplexity  {:.4}", found.perplexity());
        println!("tokens      {} in {} sequences", found.tokens, found.sequences);
    }
    Ok(())
}

/// What computes, where it has what the model needs.
fn computer(args: &EvalArgs, model: &ModelConfig, length: u32) -> Result<Computer, EvalError> {
    if args.device == DeviceName::Cpu {
        if args.precision.is_some_and(|numbers| numbers != Numbers::Fp32) {
            let what = "--precision: processors measure in fp32; --device gpu has others";
            return Err(EvalError::Unsupported { what: what.to_string() });
        }
        return Ok(Computer::Processors {
            threads: args::threads(args.threads),
            precision: Precision::Fp32,
        });
    }
    let precision = match args.precision {
        None | Some(Numbers::Fp32) => Precision::Fp32,
        Some(Numbers::Tf32) => Precision::Tf32,
        Some(Numbers::Bf16) => Precision::Bf16,
        Some(Numbers::Fp16) => Precision::Fp16,
    };
    let computer = Computer::Gpu { precision };
    match lacks_of_gpus(model, &computer.measuring(model, length)) {
        None => Ok(computer),
        Some(what) => Err(EvalError::Unsupported { what }),
    }
}

/// Why GPUs do not compute a model so, where they do not.
pub(super) fn lacks_of_gpus(model: &ModelConfig, training: &TrainingConfig) -> Option<String> {
    let lacks = on_one_gpu(model, training);
    // No manifest has been read whose fields could be named.
    let each = |of: &Problem| {
        let field = of.path.trim_start_matches("spec.");
        format!("\n  {field}: {}, allowed: {}", of.found, of.allowed)
    };
    let all: String = lacks.iter().map(each).collect();
    let what = "--device gpu: the kernels for GPUs are not made for this model; --device cpu \
                computes it:";
    (!lacks.is_empty()).then(|| format!("{what}{all}"))
}

/// Whether processors have the memory, before any of it is taken. A GPU asks for itself.
fn room(
    args: &EvalArgs,
    computer: Computer,
    model: &ModelConfig,
    length: u32,
) -> Result<(), EvalError> {
    if args.device != DeviceName::Cpu {
        return Ok(());
    }
    let wanted = |length: u32| Need::from(&computer.memory_of_measuring(model, length));
    let less = |fits: &dyn Fn(Need) -> bool| {
        let shorter = largest(1, length, |length| fits(wanted(length)));
        Some(match shorter {
            Some(length) => format!("--sequence-length {length} would fit"),
            None => "--device gpu measures it on a GPU".to_string(),
        })
    };
    let refused = check_alone("the model", wanted(length), less);
    refused.map_err(|what| EvalError::Unsupported { what })
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

#[cfg(test)]
mod tests {
    use super::*;
    use clap::Parser;
    use moejob_manifest::Job;

    #[derive(Parser)]
    struct Typed {
        #[command(flatten)]
        eval: EvalArgs,
    }

    fn model(more: &str) -> ModelConfig {
        let text = format!(
            "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {{ name: a }}\nspec:\n  \
             nodes: {{ profile: cpu }}\n  model: {{ preset: olmoe-1b-7b{more} }}\n  data: {{ \
             train: {{ text: {{ paths: [a] }} }}, sequenceLength: 8 }}\n  training: {{ steps: 1 \
             }}\n"
        );
        Job::read(text.as_bytes()).unwrap_or_else(|problems| panic!("{problems:?}")).model
    }

    fn measured(typed: &str, model: &ModelConfig) -> Result<Computer, String> {
        let words = "eval a --data b".split(' ').chain(typed.split_whitespace());
        let typed = Typed::try_parse_from(words).unwrap_or_else(|error| panic!("{error}"));
        computer(&typed.eval, model, 512).map_err(|error| error.to_string())
    }

    #[test]
    fn a_gpu_measures_where_one_is_asked_for() {
        let model = model("");
        let precision = Precision::Fp32;
        let processors = |threads| Ok(Computer::Processors { threads, precision });
        assert_eq!(measured("--threads 3", &model), processors(3));
        assert_eq!(measured("--threads 3 --precision fp32", &model), processors(3));
        for (typed, precision) in [
            ("", Precision::Fp32),
            ("--precision bf16", Precision::Bf16),
            ("--precision tf32", Precision::Tf32),
            ("--precision fp16", Precision::Fp16),
        ] {
            let found = measured(&format!("--device gpu {typed}"), &model);
            assert_eq!(found, Ok(Computer::Gpu { precision }));
        }
    }

    #[test]
    fn what_a_device_does_not_compute_is_refused_by_name() {
        let refused = measured("--precision bf16", &model("")).expect_err("refused");
        assert!(refused.starts_with("--precision: processors measure in fp32"), "{refused}");
        let other = model(", headDim: 80");
        let refused = measured("--device gpu", &other).expect_err("refused");
        let headed = "model.headDim: `80` on GPUs, allowed: one of ";
        for words in ["--device cpu computes it", headed] {
            assert!(refused.contains(words), "{words} in {refused}");
        }
    }
}
