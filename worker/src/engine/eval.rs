//! The loss of weights on data, without training: `moejob eval`.

use crate::checkpoint::Refusal;
use crate::data::{Batch, Corpus, DataError};
use crate::engine::computer::Computer;
use crate::engine::forward::Pass;
use crate::engine::links::Links;
use crate::engine::machine::check;
use crate::engine::round::{Aim, Round};
use crate::hf::{Weights, load};
use crate::engine::model::Model;
use crate::state::rank::{DeviceError, RankState};
use moejob_kernels::KernelError;
use moejob_protocol::config::{DataConfig, DataSource, TokenType, TrainingConfig};
use moejob_protocol::layout::Layout;
use moejob_protocol::kernel_sizes::on_gpus;
use moejob_protocol::memory::{RankMemory, Shape, model_memory};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::ModelConfig;
use std::path::Path;

/// Tokens that processors compute together at most, unless one sequence has more.
const TOKENS_TOGETHER: u64 = 2048;
/// The same of a GPU, which is idle with fewer.
const TOKENS_OF_A_GPU: u64 = 16384;
/// Logits that processors keep at once.
const LOGITS_MAX: u64 = 1 << 26;

/// What was measured.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Evaluation {
    /// Mean cross-entropy, nats a token.
    pub loss: f64,
    /// Targets; what does not fill a last sequence is left out.
    pub tokens: u64,
    pub sequences: u64,
}

impl Evaluation {
    pub fn perplexity(&self) -> f64 {
        self.loss.exp()
    }
}

/// Why nothing was measured.
#[derive(Debug, thiserror::Error)]
pub enum EvalError {
    #[error(transparent)]
    Weights(#[from] Refusal),
    #[error(transparent)]
    Data(#[from] DataError),
    #[error("the data have {found} tokens, a sequence of {length} needs {}", length + 1)]
    TooSmall { found: u64, length: u32 },
    #[error("the device cannot be made")]
    Device(#[from] KernelError),
    #[error(transparent)]
    Failed(#[from] DeviceError),
    #[error("the loss of sequence {sequence} is not finite")]
    NotFinite { sequence: u64 },
    /// By name: what of the model or of the numbers the device does not have.
    #[error("{what}")]
    Unsupported { what: String },
    #[error("{path} is of no kind that is read: text, .jsonl, .idx, .bin or .parquet")]
    Kind { path: String },
}

/// How a file or folder is read, by its name; `field` is of JSON lines, `dtype` of flat tokens.
///
/// # Errors
/// The name says nothing, or there is no such file.
pub fn source_of(
    path: &Path,
    field: &str,
    dtype: Option<TokenType>,
) -> Result<DataSource, EvalError> {
    let absolute = std::path::absolute(path).unwrap_or_else(|_| path.to_path_buf());
    let unknown = || EvalError::Kind { path: path.display().to_string() };
    let text = |path: &Path| path.to_str().map(str::to_string).ok_or_else(unknown);
    let exclude = Vec::new();
    if absolute.is_dir() {
        let (root, paths) = (text(&absolute)?, vec!["**/*".to_string()]);
        return Ok(DataSource::Text { root, paths, exclude });
    }
    let name = absolute.file_name().and_then(|name| name.to_str()).ok_or_else(unknown)?;
    let root = text(absolute.parent().unwrap_or(Path::new("/")))?;
    let paths = vec![escaped(name)];
    let lines = ["", ".gz", ".zst"];
    let is_lines = |ending: &&str| name.ends_with(&format!(".jsonl{ending}"));
    if lines.iter().any(is_lines) {
        return Ok(DataSource::Jsonl { root, paths, exclude, field: field.to_string() });
    }
    match absolute.extension().and_then(|extension| extension.to_str()) {
        Some("idx") => Ok(DataSource::Megatron { root, paths, exclude }),
        Some("bin") if absolute.with_extension("idx").exists() => {
            let paths = vec![escaped(&format!("{}idx", &name[..name.len() - 3]))];
            Ok(DataSource::Megatron { root, paths, exclude })
        }
        Some("bin") => Ok(DataSource::Tokens { root, paths, exclude, dtype }),
        Some("parquet") => {
            Ok(DataSource::Parquet { root, paths, exclude, field: field.to_string() })
        }
        Some("gz" | "zst" | "tar" | "zip" | "npy" | "safetensors") => Err(unknown()),
        _ => Ok(DataSource::Text { root, paths, exclude }),
    }
}

/// A name in which a glob sees no pattern.
fn escaped(name: &str) -> String {
    let each = |c: char| match c {
        '*' | '?' | '[' | ']' | '{' | '}' => format!("[{c}]"),
        other => other.to_string(),
    };
    name.chars().map(each).collect()
}

impl Computer {
    /// What a model of `config` is measured by where sequences have so many tokens.
    pub fn measuring(self, config: &ModelConfig, sequence_length: u32) -> TrainingConfig {
        let together = match self.is_gpu() {
            true => TOKENS_OF_A_GPU,
            false => TOKENS_TOGETHER.min(LOGITS_MAX / u64::from(config.vocab_size)),
        };
        let batch = (together / u64::from(sequence_length)).max(1) as u32;
        let mut training = self.planned(sequence_length, batch);
        let is_too_much = |training: &TrainingConfig| {
            let refused = on_gpus(config, training, 1).into_iter();
            refused.into_iter().any(|of| of.size.is_of_tokens())
        };
        while self.is_gpu() && training.micro_batch_size > 1 && is_too_much(&training) {
            training.micro_batch_size /= 2;
            training.global_batch_size = training.micro_batch_size;
        }
        training
    }

    /// A model without weights yet.
    fn model(
        self,
        config: &ModelConfig,
        training: &TrainingConfig,
        documents: bool,
    ) -> Result<Model, KernelError> {
        let (shape, layout) = shape(config, training, documents);
        Model::on(self.device()?, shape, config, &layout, 0, training)
    }

    /// What a model of `config` takes of its device where sequences have so many tokens.
    pub fn memory_of_measuring(self, config: &ModelConfig, sequence_length: u32) -> RankMemory {
        let training = self.measuring(config, sequence_length);
        model_memory(config, &shape(config, &training, true).0)
    }
}

fn shape(config: &ModelConfig, training: &TrainingConfig, documents: bool) -> (Shape, Layout) {
    let layout = Layout::contiguous(Mesh::data_parallel(1, 1));
    let shape = Shape::new(config, &layout, 0, training).measuring();
    (Shape { documents, ..shape }, layout)
}

/// Measures. `progress` hears targets done and in all.
///
/// # Errors
/// Weights or data are refused, or the device has no room or fails.
pub fn evaluate(
    weights: &Weights,
    data: &DataConfig,
    sequence_length: u32,
    computer: Computer,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Evaluation, EvalError> {
    let config = weights.model();
    let training = computer.measuring(config, sequence_length);
    let one = TrainingConfig { global_batch_size: 1, micro_batch_size: 1, ..training.clone() };
    let mut corpus = match Corpus::open(data, &one, config.vocab_size) {
        Err(DataError::TooSmall { found, .. }) => {
            return Err(EvalError::TooSmall { found, length: sequence_length });
        }
        opened => opened?,
    };
    let mut model = computer.model(config, &training, data.reset_at_boundaries)?;
    load(weights, &mut model)?;
    model.finish()?;
    measure(&mut model, &mut corpus, progress)
}

/// The same of a model that has its weights, on sequences as long as it was planned for.
///
/// # Errors
/// The data changed, the device failed, or a loss is no number.
pub fn measure(
    model: &mut Model,
    corpus: &mut Corpus,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<Evaluation, EvalError> {
    let mut links = Links::solo();
    let (batch, length) = (model.shape.batch, model.sequence());
    let windows = corpus.windows();
    let (mut sum, mut done, mut tokens) = (0.0, 0, 0);
    while done < windows {
        let count = batch.min(windows - done);
        let loaded = count as usize * length;
        let mut rows = Batch::new(loaded);
        corpus.fill_in_order(done, &mut rows)?;
        model.load_documents(&rows.ids, &rows.targets, rows.starts.as_deref());
        let computed = model.computed_together(loaded);
        let round = Round { aim: Aim::Activations, ..Round::alone(computed) };
        let mut pass = Pass::new(model, &mut links, &round);
        pass.forward();
        pass.loss(None);
        let loss = model.read_loss();
        check(&model.device, 1)?;
        if !loss.is_finite() {
            return Err(EvalError::NotFinite { sequence: done });
        }
        sum += loss;
        tokens += rows.counted();
        done += count;
        progress(done * length as u64, windows * length as u64);
    }
    Ok(Evaluation { loss: sum / tokens.max(1) as f64, tokens, sequences: windows })
}
