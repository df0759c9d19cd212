//! A Hugging Face directory, opened: every header checked, every parameter found exactly once.

use super::config::{self, Config, Family};
use super::names::{candidates, is_ignored};
use crate::checkpoint::safetensors::{Tensor, read_header};
use crate::checkpoint::values::float_named;
use crate::checkpoint::{Disk, Problem, Refusal};
use crate::disk::OpenFile;
use moejob_kernels::DType;
use moejob_protocol::ModelConfig;
use moejob_protocol::model::Param;
use std::collections::{BTreeMap, BTreeSet, HashMap};
use rustix::fs::OFlags;
use std::path::{Path, PathBuf};

/// A longer `config.json` or index is refused.
const JSON_BYTES_MAX: u64 = 64 << 20;
/// Problems of one kind that are told one by one.
const PROBLEMS_TOLD: usize = 20;
/// Bytes that are compared at once.
const BLOCK_BYTES: usize = 1 << 20;
const OUTPUT: &str = "lm_head.weight";
const EMBEDDING: &str = "model.embed_tokens.weight";
/// All weights in one file: what `transformers` prefers to an index.
const SINGLE: &str = "model.safetensors";
const INDEX: &str = "model.safetensors.index.json";

/// What stands in one place of the directory's files.
#[derive(Clone, Debug)]
pub struct Place {
    /// In `files`.
    pub file: usize,
    pub tensor: String,
    pub dtype: DType,
    /// Of the file.
    pub begin: u64,
    /// Columns of the tensor, to name an element by row and column.
    pub columns: u64,
    /// First element, of the tensor.
    pub offset: u64,
}

/// Weights as `transformers` keeps them.
#[derive(Debug)]
pub struct Directory {
    pub path: PathBuf,
    pub family: Family,
    pub model: ModelConfig,
    /// That `config.json` claims.
    pub positions: u32,
    /// Fields of `config.json` that nothing here knows.
    pub unknown: Vec<String>,
    pub params: Vec<Param>,
    /// One a parameter.
    pub places: Vec<Place>,
    pub files: Vec<(String, OpenFile)>,
    /// BLAKE3 of `config.json` and of all names, shapes and places.
    pub digest: blake3::Hash,
}

impl Directory {
    /// Opens a directory; no weight is read, but those that should be the same twice.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn open(path: &Path) -> Result<Directory, Refusal> {
        Directory::open_on(&Disk::real(), path)
    }

    /// Read with the patience of `disk`.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn open_on(disk: &Disk, path: &Path) -> Result<Directory, Refusal> {
        open(disk, path).map_err(|problems| Refusal::of(&path.display().to_string(), problems))
    }
}

fn one(what: &str, why: &str) -> Vec<Problem> {
    vec![Problem::new(what, why)]
}

fn open(disk: &Disk, path: &Path) -> Result<Directory, Vec<Problem>> {
    let shown = path.display().to_string();
    let metadata =
        disk.metadata(path).map_err(|error| vec![Problem::of_io(&shown, &error)])?;
    if !metadata.is_dir() {
        let why = foreign(&shown).unwrap_or("it is a file; give the directory that holds it");
        return Err(one(&shown, why));
    }
    let text = small_file(disk, path, "config.json")?;
    let Config { family, model, positions, unknown } = config::read(&text)?;
    let mut hasher = blake3::Hasher::new();
    hasher.update(&text);
    let (names, index) = file_names(disk, path)?;
    let mut files = Vec::new();
    let mut tensors: HashMap<String, (usize, Tensor)> = HashMap::new();
    let mut problems = Vec::new();
    for name in names {
        let (file, header) = match open_weights(disk, path, &name) {
            Ok(opened) => opened,
            Err(problem) => {
                problems.push(problem);
                continue;
            }
        };
        for tensor in header {
            hasher.update(format!("{tensor:?}").as_bytes());
            if let Some(index) = &index
                && index.get(&tensor.name) != Some(&name)
            {
                let why = format!("{} is here, {INDEX} says otherwise", tensor.name);
                problems.push(Problem::new(&name, &why));
            }
            if let Some((earlier, _)) = tensors.get(&tensor.name) {
                let (earlier, _): &(String, OpenFile) = &files[*earlier];
                let why = format!("{} comes twice: here and in {earlier}", tensor.name);
                problems.push(Problem::new(&name, &why));
            }
            tensors.insert(tensor.name.clone(), (files.len(), tensor));
        }
        files.push((name, file));
    }
    if problems.is_empty()
        && let Some(index) = &index
    {
        let lost = index.iter().filter(|(tensor, _)| !tensors.contains_key(*tensor));
        problems.extend(lost.map(|(tensor, file)| {
            Problem::new(INDEX, &format!("{tensor} should be in {file}, and is not"))
        }));
    }
    if !problems.is_empty() {
        return Err(few(problems));
    }
    let params = model.params();
    let second = tensors.get(OUTPUT).filter(|_| is_tied(&model, OUTPUT)).cloned();
    let places = find_all(&model, &params, &files, tensors)?;
    if let Some((file, output)) = second
        && let Some(at) = params.iter().position(|param| param.name == EMBEDDING)
    {
        let bytes = params[at].numel() * places[at].dtype.size() as u64;
        same_bytes(&files, (&places[at], bytes), (file, &output))?;
    }
    let path = path.to_path_buf();
    let digest = hasher.finalize();
    Ok(Directory { path, family, model, positions, unknown, params, places, files, digest })
}

/// What is said of weights in a format that is not read.
fn foreign(name: &str) -> Option<&'static str> {
    let extension = Path::new(name).extension()?.to_str()?;
    match extension {
        "bin" | "pt" | "pth" | "ckpt" | "pkl" | "pickle" => Some(
            "pickle is refused: to read it may run code of its author. Convert it where you trust \
             it: AutoModelForCausalLM.from_pretrained(DIR).save_pretrained(OUT)",
        ),
        "gguf" | "ggml" => {
            Some("GGUF is not read: give the safetensors directory that it was made from")
        }
        "h5" | "msgpack" | "onnx" => Some("this format is not read: give safetensors"),
        "safetensors" => Some("it is one file; give the directory with its config.json"),
        _ => None,
    }
}

pub(super) fn small_file(
    disk: &Disk,
    path: &Path,
    name: &str,
) -> Result<Vec<u8>, Vec<Problem>> {
    let read = || -> std::io::Result<Vec<u8>> {
        let (file, bytes) = open_regular(disk, &path.join(name))?;
        if bytes > JSON_BYTES_MAX {
            let why = format!("{bytes} bytes, at most {JSON_BYTES_MAX}");
            return Err(std::io::Error::other(why));
        }
        let mut text = vec![0; bytes as usize];
        file.read_exact_at(&mut text, 0)?;
        Ok(text)
    };
    read().map_err(|error| match error.kind() {
        std::io::ErrorKind::NotFound => {
            let why = "it is missing: a Hugging Face directory holds it beside its *.safetensors";
            one(name, why)
        }
        _ => vec![Problem::of_io(name, &error)],
    })
}

/// Links are followed: the hub's cache is made of them.
fn open_regular(disk: &Disk, path: &Path) -> std::io::Result<(OpenFile, u64)> {
    let file = OpenFile::open(disk, path, OFlags::NONBLOCK)?;
    let metadata = file.metadata()?;
    if !metadata.is_file() {
        return Err(std::io::Error::other("it is no regular file"));
    }
    Ok((file, metadata.len()))
}

type Index = BTreeMap<String, String>;

/// The weight files, and which tensor is in which, if there is an index.
fn file_names(
    disk: &Disk,
    path: &Path,
) -> Result<(Vec<String>, Option<Index>), Vec<Problem>> {
    let is_there = |name: &str| {
        let found = disk.is_there(&path.join(name));
        found.map_err(|error| vec![Problem::of_io(name, &error)])
    };
    if is_there(INDEX)? || path.join(INDEX).is_symlink() {
        let text = small_file(disk, path, INDEX)?;
        let (names, index) = read_index(&text)?;
        let beside = is_there(SINGLE)?;
        if beside && !names.iter().any(|name| name == SINGLE) {
            let why = format!("{SINGLE}, which it does not name, is here too: delete what is old");
            return Err(one(INDEX, &why));
        }
        return Ok((names, Some(index)));
    }
    let names = disk.names(path).map_err(|error| vec![Problem::of_io(".", &error)]);
    let mut names: Vec<String> = names?;
    names.sort();
    let weights: Vec<String> =
        names.iter().filter(|name| name.ends_with(".safetensors")).cloned().collect();
    match weights.len() {
        1 => Ok((weights, None)),
        0 => {
            let other = names.iter().find_map(|name| Some((name, foreign(name)?)));
            let why = other.map_or("it holds no *.safetensors".to_string(), |(name, why)| {
                format!("it holds no *.safetensors, but {name}: {why}")
            });
            Err(one(".", &why))
        }
        several => {
            let why = format!("it is missing, and {several} *.safetensors are here");
            Err(one(INDEX, &why))
        }
    }
}

fn read_index(text: &[u8]) -> Result<(Vec<String>, Index), Vec<Problem>> {
    #[derive(serde::Deserialize)]
    struct Whole {
        weight_map: Index,
    }
    let whole: Whole =
        serde_json::from_slice(text).map_err(|error| one(INDEX, &error.to_string()))?;
    let mut names = BTreeSet::new();
    for (tensor, file) in &whole.weight_map {
        let plain = !file.contains(['/', '\\', '\0']) && file.ends_with(".safetensors");
        if !plain {
            let shown: String = file.chars().take(128).collect();
            let why = format!("{tensor}: {shown:?} is no *.safetensors of this directory");
            let other = foreign(&shown).filter(|_| !file.ends_with(".safetensors"));
            let told = other.map(|more| format!("{why}. {more}"));
            return Err(one(INDEX, &told.unwrap_or(why)));
        }
        names.insert(file.clone());
    }
    if names.is_empty() {
        return Err(one(INDEX, "weight_map names no file"));
    }
    Ok((names.into_iter().collect(), whole.weight_map))
}

fn open_weights(
    disk: &Disk,
    path: &Path,
    name: &str,
) -> Result<(OpenFile, Vec<Tensor>), Problem> {
    let refused = |error: std::io::Error| match error.kind() {
        std::io::ErrorKind::NotFound => Problem::new(name, "it is missing"),
        _ => Problem::of_io(name, &error),
    };
    let (file, bytes) = open_regular(disk, &path.join(name)).map_err(refused)?;
    let header = read_header(&file, bytes).map_err(refused)?;
    Ok((file, header.tensors))
}

/// The place of every parameter; whatever is missing, twice, too much or of another shape.
fn find_all(
    model: &ModelConfig,
    params: &[Param],
    files: &[(String, OpenFile)],
    tensors: HashMap<String, (usize, Tensor)>,
) -> Result<Vec<Place>, Vec<Problem>> {
    let mut problems = Vec::new();
    let (mut places, mut used, mut wrong) = (Vec::new(), BTreeSet::new(), BTreeMap::new());
    for param in params {
        let all = candidates(model, param);
        let found: Vec<_> = (all.iter())
            .filter_map(|candidate| Some((candidate, tensors.get(&candidate.tensor)?)))
            .collect();
        used.extend(found.iter().map(|(candidate, _)| candidate.tensor.clone()));
        let [(candidate, (file, tensor))] = found.as_slice() else {
            let names = found.iter().map(|(candidate, _)| candidate.tensor.as_str());
            let why = match found.len() {
                0 => "it is missing".to_string(),
                _ => format!("it comes twice: {}", names.collect::<Vec<_>>().join(" and ")),
            };
            problems.push(Problem::new(&param.name, &why));
            continue;
        };
        let name = &files[*file].0;
        let Some(dtype) = float_named(&tensor.dtype) else {
            let why = format!("{} is {}, not F16, BF16, F32 or F64", tensor.name, tensor.dtype);
            problems.push(Problem::new(name, &why));
            continue;
        };
        if tensor.shape != candidate.shape {
            let shapes = (candidate.shape.clone(), tensor.shape.clone(), name);
            wrong.insert(tensor.name.clone(), shapes);
            continue;
        }
        places.push(Place {
            file: *file,
            tensor: tensor.name.clone(),
            dtype,
            begin: tensor.begin,
            columns: candidate.shape.last().copied().unwrap_or(1).max(1),
            offset: candidate.offset,
        });
    }
    for (tensor, (expected, found, file)) in wrong {
        let why = format!("{tensor}\n    - {expected:?} by config.json\n    + {found:?} found");
        problems.push(Problem::new(file, &why));
    }
    // Shared experts of width 0 are tensors without any element.
    let is_empty = |name: &String| tensors[name].1.shape.contains(&0);
    let mut extra: Vec<&String> = (tensors.keys())
        .filter(|name| !used.contains(*name) && !is_ignored(name) && !is_tied(model, name))
        .filter(|name| !is_empty(name))
        .collect();
    extra.sort();
    problems.extend(extra.into_iter().map(|name| {
        let file = &files[tensors[name].0].0;
        Problem::new(file, &format!("{name} is none of the model's tensors"))
    }));
    if problems.is_empty() { Ok(places) } else { Err(few(problems)) }
}

/// Tied, the output is the embedding, which some writers store a second time.
fn is_tied(model: &ModelConfig, name: &str) -> bool {
    model.tie_word_embeddings && name == OUTPUT
}

/// An output that is stored beside the embedding although it is tied to it is the embedding, or
/// one of the two would be lost without a word.
fn same_bytes(
    files: &[(String, OpenFile)],
    (embedding, bytes): (&Place, u64),
    (file, output): (usize, &Tensor),
) -> Result<(), Vec<Problem>> {
    let name = &files[file].0;
    let differs = |why: &str| {
        let advice = "set it to false, or delete the one that is old";
        one(name, &format!("{OUTPUT} {why}, and config.json has tie_word_embeddings: {advice}"))
    };
    if float_named(&output.dtype) != Some(embedding.dtype) {
        return Err(differs("has another type than the embedding"));
    }
    if output.end - output.begin != bytes {
        return Err(differs("has another size than the embedding"));
    }
    let mut blocks = [vec![0; BLOCK_BYTES], vec![0; BLOCK_BYTES]];
    let mut at = 0;
    while at < bytes {
        let count = (bytes - at).min(BLOCK_BYTES as u64) as usize;
        let places = [(embedding.file, embedding.begin), (file, output.begin)];
        for (block, (file, begin)) in blocks.iter_mut().zip(places) {
            let read = files[file].1.read_exact_at(&mut block[..count], begin + at);
            read.map_err(|error| vec![Problem::of_io(&files[file].0, &error)])?;
        }
        if blocks[0][..count] != blocks[1][..count] {
            return Err(differs("differs from the embedding"));
        }
        at += count as u64;
    }
    Ok(())
}

fn few(mut problems: Vec<Problem>) -> Vec<Problem> {
    let more = problems.len().saturating_sub(PROBLEMS_TOLD);
    problems.truncate(PROBLEMS_TOLD);
    if more > 0 {
        problems.push(Problem::new("and", &format!("{more} more of the kind")));
    }
    problems
}
