//! A checkpoint of ours, or a Hugging Face directory, -> a directory that `transformers` loads
//! without remote code.

use super::config::{self, Family, family_of, write as write_config};
use super::names::exported;
use super::weights::{Weights, differences, does_not_fit};
use crate::checkpoint::Problem;
use crate::checkpoint::staging::{Entry, Failed, Staging, Writing, runs};
use crate::checkpoint::values::{convert, name_of};
use moejob_kernels::DType;
use moejob_protocol::model::Role;
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Bytes of a file at most, unless one tensor is larger.
const FILE_BYTES_MAX: u64 = 4 << 30;
/// A file of `like` that is copied is at most this long.
const COPIED_BYTES_MAX: u64 = 256 << 20;
/// What belongs to a model beside its weights.
const COPIED: [&str; 11] = [
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "vocab.txt",
    "chat_template.jinja",
    "chat_template.json",
    "generation_config.json",
];

/// What an export may be told.
#[derive(Clone, Copy, Debug, Default)]
pub struct Options<'a> {
    /// Of all tensors but corrections, which are F32 then; none keeps each tensor's own.
    pub dtype: Option<DType>,
    /// A Hugging Face directory that gives tokenizer and the fields of `config.json` that we do
    /// not know. Without it both are those of the weights, as far as they are known.
    pub like: Option<&'a Path>,
}

/// Writes `out` and gives its path. `progress` hears bytes done and in all.
///
/// # Errors
/// No family computes the model, something stands in its place, a weight is refused or too large
/// for the type.
pub fn export(
    weights: &Weights,
    out: &Path,
    options: Options,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PathBuf, Failed> {
    let family = match weights {
        Weights::HuggingFace(directory) => directory.family,
        Weights::Ours { manifest, .. } => family_of(&manifest.model).map_err(Failed::NoFamily)?,
    };
    let text = super::text::find(weights)
        .map_err(|refusal| Failed::Refused(Problem::new(".", &refusal.to_string())))?;
    let like = match options.like {
        Some(like) => read_like(like).map_err(Failed::Refused)?,
        None => Map::new(),
    };
    // What is told wins over what is known.
    let like: Map<String, Value> = text.fields().into_iter().chain(like).collect();
    let parent = out.parent().filter(|at| !at.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let staging = Staging::new(parent, out)?;
    let tensors = tensors_of(weights, family, options.dtype);
    let sizes: Vec<u64> = tensors.iter().map(Exported::bytes).collect();
    let shards = runs(&sizes, FILE_BYTES_MAX);
    let mut writing = Writing::new(&staging.path, sizes.iter().sum(), progress);
    let mut index_of = Map::new();
    for (number, shard) in shards.iter().enumerate() {
        let name = file_name(number, shards.len());
        let of_file = &tensors[shard.clone()];
        let entries: Vec<Entry> = of_file.iter().map(Exported::entry).collect();
        for entry in &entries {
            index_of.insert(entry.0.clone(), json!(name));
        }
        writing.begin(&name, &entries)?;
        for tensor in of_file {
            match tensor.from {
                Some(from) => write_param(weights, from, tensor.dtype, &mut writing)?,
                None => writing.write(&vec![0; tensor.bytes() as usize], true)?,
            }
        }
        writing.end()?;
    }
    drop(writing);
    let first = tensors.first().map_or(DType::F32, |tensor| tensor.dtype);
    let dtype = options.dtype.unwrap_or(first);
    let config = pretty(&write_config(family, weights.model(), dtype, like));
    reads_back(weights, family, &config).map_err(Failed::NoFamily)?;
    staging.small_file("config.json", &config)?;
    if shards.len() > 1 {
        let total: u64 = sizes.iter().sum();
        let index = json!({ "metadata": { "total_size": total }, "weight_map": index_of });
        staging.small_file("model.safetensors.index.json", &pretty(&index))?;
    }
    match (options.like, weights) {
        (Some(like), _) => copy_beside(like, &staging)?,
        (None, Weights::HuggingFace(directory)) => copy_beside(&directory.path, &staging)?,
        (None, Weights::Ours { .. }) => {
            for (name, bytes) in text.files().map_err(Failed::Refused)? {
                staging.small_file(name, &bytes)?;
            }
        }
    }
    staging.commit(out)
}

/// A tensor of an export.
struct Exported {
    name: String,
    dtype: DType,
    shape: Vec<u64>,
    /// Which parameter it is; none is zeros.
    from: Option<usize>,
}

impl Exported {
    fn bytes(&self) -> u64 {
        self.shape.iter().product::<u64>() * self.dtype.size() as u64
    }

    fn entry(&self) -> Entry {
        (self.name.clone(), name_of(self.dtype), self.shape.clone(), self.bytes())
    }
}

/// All tensors that a model of the family has: those of the weights, and those that it has where
/// ours need none. A correction that is not there is zeros, and so many shared experts as none are
/// matrices without elements.
fn tensors_of(weights: &Weights, family: Family, dtype: Option<DType>) -> Vec<Exported> {
    let (model, own) = (weights.model(), weights.params());
    let mut whole = model.clone();
    whole.router.bias |= family.routes_like_deepseek();
    let at: HashMap<&str, usize> = own.iter().map(|param| &param.name[..]).zip(0..).collect();
    let mut tensors: Vec<Exported> = (whole.params().iter())
        .map(|param| {
            let from = at.get(&param.name[..]).copied();
            let is_correction = matches!(param.role, Role::Correction { .. });
            let dtype = match (from, dtype) {
                (None, _) => DType::F32,
                (Some(from), None) => weights.dtype(from),
                (_, Some(_)) if is_correction => DType::F32,
                (_, Some(dtype)) => dtype,
            };
            let shape = param.shape.iter().map(|dim| u64::from(*dim)).collect();
            Exported { name: exported(family, param), dtype, shape, from }
        })
        .collect();
    if family.routes_like_deepseek() && model.experts.shared == 0 {
        let (dtype, width) = (tensors[0].dtype, u64::from(model.hidden_size));
        for layer in (0..model.num_hidden_layers).filter(|layer| model.is_moe_layer(*layer)) {
            let (rows, columns) = (vec![0, width], vec![width, 0]);
            let parts = [("gate", rows.clone()), ("up", rows), ("down", columns)];
            tensors.extend(parts.map(|(part, shape)| {
                let name = format!("model.layers.{layer}.mlp.shared_experts.{part}_proj.weight");
                Exported { name, dtype, shape, from: None }
            }));
        }
    }
    tensors
}

/// What is exported has to be read as the model that it is.
fn reads_back(weights: &Weights, family: Family, config: &[u8]) -> Result<(), Vec<Problem>> {
    let found = config::read(config)?;
    let mut model = weights.model().clone();
    model.router.bias |= family.routes_like_deepseek();
    match differences(&found.model, &model) {
        problems if problems.is_empty() => Ok(()),
        problems => Err(problems),
    }
}

fn file_name(number: usize, count: usize) -> String {
    match count {
        1 => "model.safetensors".to_string(),
        _ => format!("model-{:05}-of-{count:05}.safetensors", number + 1),
    }
}

fn pretty(value: &Value) -> Vec<u8> {
    let mut text = format!("{value:#}").into_bytes();
    text.push(b'\n');
    text
}

fn write_param(
    weights: &Weights,
    index: usize,
    to: DType,
    writing: &mut Writing,
) -> Result<(), Failed> {
    let (from, param) = (weights.dtype(index), &weights.params()[index]);
    let (mut values, mut failed) = (Vec::new(), None);
    let streamed = weights.stream(index, &mut |start, bytes| {
        values.clear();
        convert(bytes, from, to, &mut values)
            .map_err(|at| does_not_fit(param, start + at as u64, to))?;
        writing.write(&values, true).map_err(|error| {
            let problem = error.as_problem();
            failed = Some(error);
            problem
        })
    });
    match (failed, streamed) {
        (Some(error), _) => Err(error),
        (None, streamed) => streamed.map_err(Failed::Refused),
    }
}

fn read_like(like: &Path) -> Result<Map<String, Value>, Problem> {
    let path = like.join("config.json");
    let shown = path.display().to_string();
    let text = std::fs::read(&path).map_err(|error| Problem::new(&shown, &error.to_string()))?;
    serde_json::from_slice(&text).map_err(|error| Problem::new(&shown, &error.to_string()))
}

/// Copies what belongs to the model and is no weight.
fn copy_beside(like: &Path, staging: &Staging) -> Result<(), Failed> {
    for name in COPIED {
        let from = like.join(name);
        let Ok(metadata) = std::fs::metadata(&from) else { continue };
        if !metadata.is_file() || metadata.len() > COPIED_BYTES_MAX {
            let why = format!("it is no file of at most {COPIED_BYTES_MAX} bytes");
            return Err(Failed::Refused(Problem::new(&from.display().to_string(), &why)));
        }
        staging.copy(&from, name)?;
    }
    Ok(())
}
