//! `manifest.json`: written last, guarded by its own hash, believed only after every check.

use super::values::float_named;
use super::{Cause, Disk, Problem, Refusal};
use crate::disk::may_heal;
use moejob_kernels::LossScaling;
use moejob_protocol::checkpoint::{
    CHECKPOINT_VERSION, CheckpointManifest, MANIFEST_BYTES_MAX, PARAMS_MAX, Part,
    SPEC_HASH_VERSION, ScaleEntry, TENSORS_MAX, directory_name,
};
use moejob_protocol::layout::BLOCK;
use moejob_protocol::model::Param;
use moejob_protocol::slices::{SLICES, Slices};
use std::collections::BTreeSet;
use std::path::Path;

const HEX: usize = 64;
const SEAL: &str = ",\"blake3\":\"";

pub const PARTS: [Part; 3] = Part::ALL;

/// The file: the manifest's JSON with one more field at its end, the BLAKE3 of all text before it.
pub fn seal(manifest: &CheckpointManifest) -> Result<Vec<u8>, serde_json::Error> {
    let mut text = serde_json::to_vec(manifest)?;
    text.pop();
    let hash = blake3::hash(&text).to_hex();
    text.extend_from_slice(SEAL.as_bytes());
    text.extend_from_slice(hash.as_bytes());
    text.extend_from_slice(b"\"}\n");
    Ok(text)
}

/// Reads what `seal` wrote. Every byte of the file is covered: by the hash, or by being fixed.
///
/// # Errors
/// What is wrong with it.
pub fn unseal(text: &[u8]) -> Result<CheckpointManifest, Problem> {
    let broken = |why: &str| Problem::new("manifest.json", why);
    let tail = SEAL.len() + HEX + 3;
    let body = text.len().checked_sub(tail).ok_or_else(|| broken("it is cut short"))?;
    let (body, tail) = text.split_at(body);
    let (mark, tail) = tail.split_at(SEAL.len());
    let (hash, end) = tail.split_at(HEX);
    if mark != SEAL.as_bytes() || end != b"\"}\n" {
        return Err(broken("it does not end with its hash: cut short or damaged"));
    }
    if hash != blake3::hash(body).to_hex().as_bytes() {
        return Err(broken("its BLAKE3 differs: damaged or edited"));
    }
    let json = [body, b"}"].concat();
    #[derive(serde::Deserialize)]
    struct Version {
        version: u32,
    }
    let version = serde_json::from_slice::<Version>(&json)
        .map_err(|error| broken(&format!("it cannot be read: {error}")))?
        .version;
    if version > CHECKPOINT_VERSION {
        let why = format!(
            "version {version} is newer than {CHECKPOINT_VERSION}: upgrade moejob to read it"
        );
        return Err(Problem { cause: Cause::Newer, ..broken(&why) });
    }
    serde_json::from_slice(&json).map_err(|error| broken(&format!("it cannot be read: {error}")))
}

/// Whether the manifest describes one whole checkpoint of its model; all that is wrong with it.
pub fn check(manifest: &CheckpointManifest, directory: &str) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut problem = |what: &str, why: String| problems.push(Problem::new(what, &why));
    if manifest.version == 0 {
        problem("manifest.json", "version 0 does not exist".to_string());
    }
    if directory_name(manifest.step) != directory {
        let step = manifest.step;
        problem("manifest.json", format!("it is of step {step}, not of {directory}"));
    }
    if !manifest.layout.mesh.is_valid() {
        problem("manifest.json", "its mesh is impossible".to_string());
    }
    if let Some(ScaleEntry { scale, .. }) = manifest.loss_scale
        && !LossScaling::default().allows(scale)
    {
        problem("manifest.json", format!("a loss scale of {scale} is none that training makes"));
    }
    if manifest.tensors.len() as u64 > TENSORS_MAX {
        problem("manifest.json", format!("{} tensors", manifest.tensors.len()));
        return problems;
    }
    let mut names = BTreeSet::new();
    for file in &manifest.files {
        if !is_shard_name(&file.name) {
            problem("manifest.json", format!("{:?} is no name of a shard", file.name));
        }
        if !names.insert(&file.name) {
            problem(&file.name, "it is listed twice".to_string());
        }
    }
    problems.extend(check_tensors(manifest));
    problems
}

/// The manifest in a directory of any name, whole in itself.
///
/// # Errors
/// Storage fails; or none: there is no such manifest.
pub(super) fn manifest_in(
    disk: &Disk,
    directory: &Path,
) -> Result<CheckpointManifest, Option<std::io::Error>> {
    let text = disk.read(&directory.join("manifest.json"), MANIFEST_BYTES_MAX);
    let text = text.map_err(|error| Some(error).filter(may_heal))?;
    let manifest = unseal(&text).map_err(|_| None)?;
    match check(&manifest, &directory_name(manifest.step)).is_empty() {
        true => Ok(manifest),
        false => Err(None),
    }
}

/// `a<attempt>-r<rank>-<n>.safetensors` and nothing that a path could hide in.
fn is_shard_name(name: &str) -> bool {
    let numbers = (|| {
        let rest = name.strip_prefix('a')?.strip_suffix(".safetensors")?;
        let (attempt, rest) = rest.split_once("-r")?;
        let (rank, count) = rest.split_once('-')?;
        Some([attempt, rank, count])
    })();
    let is_number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
    numbers.is_some_and(|numbers| numbers.into_iter().all(is_number))
}

fn check_tensors(manifest: &CheckpointManifest) -> Vec<Problem> {
    let params = match params_of(manifest) {
        Ok(params) => params,
        Err(problem) => return vec![problem],
    };
    let mut problems = Vec::new();
    let expected: Vec<(&Param, Part)> =
        params.iter().flat_map(|param| PARTS.map(|part| (param, part))).collect();
    if manifest.tensors.len() != expected.len() {
        let why = format!("{} tensors, the model has {}", manifest.tensors.len(), expected.len());
        problems.push(Problem::new("manifest.json", &why));
    }
    for (tensor, (param, part)) in manifest.tensors.iter().zip(expected) {
        let mut problem = |why: String| problems.push(Problem::new(&tensor.name, &why));
        if tensor.name != param.name || tensor.part != part {
            problem(format!("{part:?} of {} belongs in its place", param.name));
            break;
        }
        if tensor.shape != param.shape {
            problem(format!("its shape is {:?}, the model's {:?}", tensor.shape, param.shape));
        }
        let Some(width) = width_of(&tensor.dtype) else {
            problem(format!("its dtype {} is none of F16, BF16, F32, F64", tensor.dtype));
            continue;
        };
        let mut next = 0;
        for piece in &tensor.pieces {
            let bytes = piece.len.checked_mul(width);
            let span = piece.end.checked_sub(piece.begin);
            let file = manifest.files.get(piece.file as usize);
            if piece.start != next || piece.len == 0 || !piece.start.is_multiple_of(BLOCK) {
                problem(format!("a gap or overlap at element {next}"));
                break;
            }
            if bytes.is_none() || bytes != span || file.is_none_or(|file| piece.end > file.bytes) {
                problem(format!("the piece at element {} lies outside its file", piece.start));
                break;
            }
            next += piece.len;
        }
        if next != param.numel() {
            problem(format!("{next} of its {} elements are here", param.numel()));
        }
    }
    problems
}

/// Bytes of a float.
fn width_of(dtype: &str) -> Option<u64> {
    float_named(dtype).map(|dtype| dtype.size() as u64)
}

/// The parameter table, unless the model is too absurd to list.
fn params_of(manifest: &CheckpointManifest) -> Result<Vec<Param>, Problem> {
    model_is_sane(&manifest.model).map_err(|why| Problem::new("manifest.json", &why))?;
    Ok(manifest.model.params())
}

/// Whether the parameters of a model from a file can be listed at all.
///
/// # Errors
/// What is absurd about it.
pub(crate) fn model_is_sane(model: &moejob_protocol::ModelConfig) -> Result<(), String> {
    let Slices { width, .. } = model.slices();
    let each = model.experts.slices;
    if !SLICES.contains(&each) || width.checked_mul(each) != Some(model.experts.intermediate_size) {
        return Err(format!("a model with {each} slices of each expert"));
    }
    let sizes = [model.hidden_size, model.vocab_size, model.num_attention_heads, model.head_dim];
    if sizes.iter().any(|size| *size == 0 || *size > 1 << 24) {
        return Err("a model of impossible sizes".to_string());
    }
    let projection = model.router.cosine.as_ref().map_or(1, |cosine| cosine.projection_size);
    if projection == 0 || projection > 1 << 24 {
        return Err("a gate of impossible width".to_string());
    }
    if model.num_attention_heads.checked_mul(model.head_dim).is_none()
        || model.num_key_value_heads.checked_mul(model.head_dim).is_none()
        || model.experts.shared.checked_mul(model.experts.intermediate_size).is_none()
    {
        return Err("a model of impossible sizes".to_string());
    }
    match model.rows() {
        rows if rows > PARAMS_MAX => {
            Err(format!("a model of {rows} tensors, at most {PARAMS_MAX}"))
        }
        _ => Ok(()),
    }
}

/// What is said of a tensor with a value that no training makes.
pub const NOT_FINITE: &str = "it holds NaN or infinity";

/// What a job expects of the checkpoint that it resumes from.
#[derive(Clone, Debug)]
pub struct Expected<'a> {
    pub model: &'a moejob_protocol::ModelConfig,
    pub data_fingerprint: &'a str,
    pub seed: u64,
    pub spec_hash: &'a str,
    /// See [`CheckpointManifest::training_hash`]: as it is made, and as it was made before.
    pub training_hashes: [String; 2],
    pub float_bytes: u64,
}

/// Why a good checkpoint is none of this job's; empty: it is.
pub fn differences(manifest: &CheckpointManifest, expected: &Expected) -> Vec<Problem> {
    let mut problems = Vec::new();
    let mut differs = |what: &str, found: String, wanted: String| {
        let why = format!("{what} is {found}, this job's is {wanted}");
        problems.push(Problem::new("manifest.json", &why));
    };
    let as_value = |model| serde_json::to_value(model).unwrap_or_default();
    // Into how many slices experts are cut says how they are computed; `load` goes from any number
    // to any other.
    let [theirs, ours] = [&manifest.model, expected.model].map(|model| model.in_slices(1));
    let is_same = theirs == ours;
    let (theirs, ours) = (as_value(&theirs), as_value(&ours));
    value_differences("model", &theirs, &ours, &mut differs);
    if manifest.seed != expected.seed {
        differs("seed", manifest.seed.to_string(), expected.seed.to_string());
    }
    if manifest.data_fingerprint != expected.data_fingerprint {
        let short = |hash: &str| hash.chars().take(12).collect::<String>();
        let (theirs, ours) = (short(&manifest.data_fingerprint), short(expected.data_fingerprint));
        differs("the fingerprint of its data", theirs, ours);
    }
    let both = !manifest.spec_hash.is_empty()
        && !expected.spec_hash.is_empty()
        && manifest.version >= SPEC_HASH_VERSION;
    // The same data may lie elsewhere, and their fingerprint stands for what they are; or the
    // training is steered from here on.
    let goes_on = expected.training_hashes.contains(&manifest.training_hash);
    if both && manifest.spec_hash != expected.spec_hash && is_same && !goes_on {
        let (theirs, ours) = (manifest.spec_hash.clone(), expected.spec_hash.to_string());
        differs("the hash of its immutable fields", theirs, ours);
    }
    let other = manifest.tensors.iter().find(|tensor| {
        width_of(&tensor.dtype) != Some(expected.float_bytes)
    });
    if let Some(tensor) = other {
        let wanted = format!("{} bytes a number", expected.float_bytes);
        differs("the dtype of its tensors", tensor.dtype.clone(), wanted);
    }
    problems
}

/// Field by field, so that the message says which.
pub(crate) fn value_differences(
    at: &str,
    theirs: &serde_json::Value,
    ours: &serde_json::Value,
    differs: &mut impl FnMut(&str, String, String),
) {
    match (theirs, ours) {
        (serde_json::Value::Object(a), serde_json::Value::Object(b)) => {
            // A field that has its default may stand on one side alone.
            let absent = &serde_json::Value::Null;
            let only_theirs = a.keys().filter(|name| !b.contains_key(*name));
            for name in b.keys().chain(only_theirs) {
                let [theirs, ours] = [a, b].map(|side| side.get(name).unwrap_or(absent));
                value_differences(&format!("{at}.{name}"), theirs, ours, differs);
            }
        }
        _ if theirs != ours => differs(at, theirs.to_string(), ours.to_string()),
        _ => {}
    }
}

impl Problem {
    pub(crate) fn new(what: &str, why: &str) -> Problem {
        Problem { what: what.to_string(), why: why.to_string(), cause: Cause::Damage }
    }

    /// What storage answered.
    pub(crate) fn of_io(what: &str, error: &std::io::Error) -> Problem {
        let cause = if may_heal(error) { Cause::Storage } else { Cause::Damage };
        Problem { cause, ..Problem::new(what, &error.to_string()) }
    }
}

impl Refusal {
    pub(crate) fn of(name: &str, problems: Vec<Problem>) -> Refusal {
        Refusal { name: name.to_string(), problems }
    }
}
