//! Weights of either kind, read as a stream: a Hugging Face directory, or a checkpoint of ours.

use super::directory::{Directory, Place};
use crate::checkpoint::recut::Sources;
use crate::checkpoint::values::{convert, first_non_finite, float_named};
use crate::checkpoint::{
    Disk, PARTS, Problem, Refusal, Shards, newest_usable, value_differences, verify,
};
use crate::checkpoint::fence::FenceError;
use crate::state::rank::{RankState, intersect};
use moejob_kernels::DType;
use moejob_protocol::checkpoint::Part;
use moejob_protocol::model::{Param, Role, RouterConfig, RouterKind};
use moejob_protocol::{CheckpointManifest, ModelConfig};
use std::collections::HashMap;
use std::path::{Path, PathBuf};

/// Elements that are read at once.
const CHUNK_ELEMENTS: u64 = 1 << 20;

/// Weights in files.
#[derive(Debug)]
pub enum Weights {
    HuggingFace(Directory),
    /// With whole experts, whatever slices they were trained in: `sources` says where these lie.
    Ours {
        disk: Disk,
        path: PathBuf,
        manifest: Box<CheckpointManifest>,
        model: Box<ModelConfig>,
        params: Vec<Param>,
        sources: Option<Box<Sources>>,
        /// Where the newest of a location was asked for: what is said of newer ones.
        passed_over: Vec<String>,
    },
}

impl Weights {
    /// Opens a Hugging Face directory, a `step-*` directory, or the newest checkpoint of a
    /// location or of a run's folder.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn open(path: &Path) -> Result<Weights, Refusal> {
        Weights::open_on(&Disk::real(), path)
    }

    /// Read with the patience of `disk`.
    ///
    /// # Errors
    /// Everything that is wrong with it.
    pub fn open_on(disk: &Disk, path: &Path) -> Result<Weights, Refusal> {
        let is_there = |path: &Path| match disk.is_there(path) {
            Ok(found) => Ok(found || path.is_symlink()),
            Err(error) => {
                let shown = path.display().to_string();
                Err(Refusal::of(&shown, vec![Problem::of_io(".", &error)]))
            }
        };
        if is_there(&path.join("manifest.json"))? {
            // Of a location only what was read whole is usable. One that is named is held to
            // the same, by its own name: `.` and a link to it are ways to say it.
            let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
            return Weights::ours(disk, &path, verify(disk, &path), Vec::new());
        }
        let inside = path.join("checkpoints");
        if path.join("job.json").is_file() && inside.is_dir() {
            return Weights::open_on(disk, &inside);
        }
        if !is_there(path)? {
            let why = vec![Problem::new(".", &no_such_place(path))];
            return Err(Refusal::of(&path.display().to_string(), why));
        }
        let is_location = !is_there(&path.join("config.json"))?
            && crate::checkpoint::list(disk, path).is_ok_and(|found| !found.is_empty());
        let name = path.display().to_string();
        if !is_location && path.file_name().is_some_and(|name| name == "checkpoints") {
            let why = "there is no checkpoint here yet: the first is written after \
                       `checkpoint.everySteps` steps, and at the end of a run";
            return Err(Refusal::of(&name, vec![Problem::new(".", why)]));
        }
        if !is_location && path.is_dir() && !has_weights(path) {
            let why = "it is a folder without weights: no run (runs/NAME), no checkpoint (step-*) \
                       and no Hugging Face directory (config.json, *.safetensors)";
            return Err(Refusal::of(&name, vec![Problem::new(".", why)]));
        }
        if !is_location {
            return Directory::open_on(disk, path).map(Weights::HuggingFace);
        }
        let newest = newest_usable(disk, path).map_err(|error| {
            // Whether storage failed for a while stands in its source.
            let problem = match &error {
                FenceError::Io { source, .. } => Problem::of_io(".", source),
                FenceError::Fenced { .. } => Problem::new(".", &error.to_string()),
            };
            Refusal::of(&name, vec![problem])
        })?;
        let passed_over = newest.passed_over();
        let refusal = newest.none_usable(path);
        match newest.usable {
            Some(found) => Weights::ours(disk, &found.path, found.manifest, passed_over),
            None => {
                let why = vec![Problem::new(".", "no checkpoint in it can be used")];
                Err(refusal.unwrap_or_else(|| Refusal::of(&name, why)))
            }
        }
    }

    fn ours(
        disk: &Disk,
        path: &Path,
        manifest: Result<CheckpointManifest, Vec<Problem>>,
        passed_over: Vec<String>,
    ) -> Result<Weights, Refusal> {
        let manifest =
            manifest.map_err(|problems| Refusal::of(&path.display().to_string(), problems))?;
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        let model = Box::new(manifest.model.in_slices(1));
        let in_slices = *model != manifest.model;
        let sources = in_slices.then(|| Box::new(Sources::new(&manifest.model)));
        let (manifest, params) = (Box::new(manifest), model.params());
        let disk = disk.clone();
        Ok(Weights::Ours { disk, path, manifest, model, params, sources, passed_over })
    }

    /// What is said of newer checkpoints that are refused, where the newest was asked for: a line
    /// each. Whoever uses the weights tells it.
    pub fn passed_over(&self) -> &[String] {
        match self {
            Weights::HuggingFace(_) => &[],
            Weights::Ours { passed_over, .. } => passed_over,
        }
    }

    /// What somebody who uses them should know.
    pub fn warnings(&self) -> Vec<String> {
        let unknown = match self {
            Weights::HuggingFace(directory) => &directory.unknown[..],
            Weights::Ours { .. } => &[],
        };
        let warning = |fields: String| {
            format!(
                "config.json: {fields}: not known here, and not used. Compare a loss with the \
                 program that the model is from"
            )
        };
        (!unknown.is_empty()).then(|| warning(unknown.join(", "))).into_iter().collect()
    }

    pub fn path(&self) -> &Path {
        match self {
            Weights::HuggingFace(directory) => &directory.path,
            Weights::Ours { path, .. } => path,
        }
    }

    pub fn model(&self) -> &ModelConfig {
        match self {
            Weights::HuggingFace(directory) => &directory.model,
            Weights::Ours { model, .. } => model,
        }
    }

    pub fn params(&self) -> &[Param] {
        match self {
            Weights::HuggingFace(directory) => &directory.params,
            Weights::Ours { params, .. } => params,
        }
    }

    /// The float type in which a parameter is stored.
    pub fn dtype(&self, index: usize) -> DType {
        match self {
            Weights::HuggingFace(directory) => directory.places[index].dtype,
            Weights::Ours { manifest, model, params, sources, .. } => {
                let first = |of: &Sources| of.first(model, &params[index]).ok();
                let index = sources.as_deref().and_then(first).unwrap_or(index);
                float_named(&manifest.tensors[index * PARTS.len()].dtype).unwrap_or(DType::F32)
            }
        }
    }

    /// Bytes of all weights as stored.
    pub fn bytes(&self) -> u64 {
        let size = |(index, param): (usize, &Param)| {
            param.numel() * self.dtype(index).size() as u64
        };
        self.params().iter().enumerate().map(size).sum()
    }

    /// What tells these weights from others without reading them.
    fn digest(&self) -> blake3::Hash {
        match self {
            Weights::HuggingFace(directory) => directory.digest,
            Weights::Ours { manifest, .. } => blake3::hash(format!("{manifest:?}").as_bytes()),
        }
    }

    /// Gives a parameter piece by piece, ascending: its first element, and the bytes as stored.
    /// Every value was found to be finite, and a router to be more than zeros.
    ///
    /// # Errors
    /// What is wrong, by file, tensor and element; or what `take` refuses.
    pub fn stream(
        &self,
        index: usize,
        take: &mut dyn FnMut(u64, &[u8]) -> Result<(), Problem>,
    ) -> Result<(), Problem> {
        let param = &self.params()[index];
        let (dtype, mut zeros) = (self.dtype(index), true);
        let mut checked = |start: u64, bytes: &[u8]| {
            if let Some(at) = first_non_finite(bytes, dtype) {
                return Err(self.not_finite(index, start + at as u64));
            }
            zeros &= bytes.iter().all(|byte| byte & 0x7f == 0);
            take(start, bytes)
        };
        match self {
            Weights::HuggingFace(directory) => {
                stream_place(directory, &directory.places[index], param, &mut checked)?;
            }
            Weights::Ours { disk, path, manifest, model, sources, .. } => {
                let mut shards = Shards::new(disk, path, manifest);
                match sources {
                    Some(sources) if model.cut(param).is_some() => {
                        let (of, all) = ((&**model, param), 0..param.numel());
                        let part = (&**manifest, Part::Master);
                        let whole = sources.read(&mut shards, part, of, &all)?;
                        let size = CHUNK_ELEMENTS as usize * dtype.size();
                        for (bytes, at) in whole.chunks(size).zip(0..) {
                            checked(at * CHUNK_ELEMENTS, bytes)?;
                        }
                    }
                    _ => {
                        let found = sources.as_ref().map_or(Ok(index), |of| of.other(param))?;
                        for piece in &manifest.tensors[found * PARTS.len()].pieces {
                            checked(piece.start, &shards.piece(piece)?)?;
                        }
                    }
                }
            }
        }
        if zeros && matches!(param.role, Role::Router { .. }) {
            let why = "the router is all zeros: it was never loaded, or never saved";
            return Err(Problem::new(&self.file_of(index), &format!("{}: {why}", param.name)));
        }
        Ok(())
    }

    fn file_of(&self, index: usize) -> String {
        match self {
            Weights::HuggingFace(directory) => {
                directory.files[directory.places[index].file].0.clone()
            }
            Weights::Ours { path, .. } => path.display().to_string(),
        }
    }

    fn not_finite(&self, index: usize, element: u64) -> Problem {
        let (name, at, columns) = match self {
            Weights::HuggingFace(directory) => {
                let place = &directory.places[index];
                (&place.tensor, place.offset + element, place.columns)
            }
            Weights::Ours { params, .. } => {
                let param = &params[index];
                let columns = param.shape.last().copied().unwrap_or(1).max(1);
                (&param.name, element, u64::from(columns))
            }
        };
        let (row, column) = (at / columns, at % columns);
        let why = format!("{name}: NaN or infinity at row {row}, column {column}");
        Problem::new(&self.file_of(index), &why)
    }
}

/// What is said of a place that is not there: the name of a published model is likely meant.
fn no_such_place(path: &Path) -> String {
    let mut parts = path.components();
    let plain = |part: Option<std::path::Component>| {
        matches!(part, Some(std::path::Component::Normal(_)))
    };
    let (first, second, third) = (parts.next(), parts.next(), parts.next());
    let known = ["runs", "checkpoints", "examples", "target", "models", "data", "tmp"];
    let in_folder = known.iter().any(|known| path.starts_with(known));
    if plain(first) && plain(second) && third.is_none() && !in_folder {
        return "there is no such folder. If this is the name of a model on a hub: nothing is \
                downloaded here. Fetch its files first, and name the folder that they lie in"
            .to_string();
    }
    "there is no such folder. `moejob ls` lists the runs of this one".to_string()
}

/// Whether a folder has anything that a Hugging Face directory has, in whatever format: who reads
/// it says what is wrong with that.
fn has_weights(path: &Path) -> bool {
    const ENDINGS: [&str; 8] = ["bin", "ckpt", "gguf", "h5", "json", "msgpack", "pt", "pth"];
    let is_weights = |name: &std::ffi::OsStr| {
        let ending = Path::new(name).extension().and_then(|ending| ending.to_str());
        name.to_string_lossy().contains(".safetensors")
            || ending.is_some_and(|ending| ENDINGS.contains(&ending))
    };
    // What cannot be listed is told by whoever reads it.
    let Ok(mut entries) = std::fs::read_dir(path) else { return true };
    entries.any(|entry| entry.map_or(true, |entry| is_weights(&entry.file_name())))
}

fn stream_place(
    directory: &Directory,
    place: &Place,
    param: &Param,
    take: &mut dyn FnMut(u64, &[u8]) -> Result<(), Problem>,
) -> Result<(), Problem> {
    let (name, file) = &directory.files[place.file];
    let width = place.dtype.size() as u64;
    let mut buffer = Vec::new();
    let mut start = 0;
    while start < param.numel() {
        let count = CHUNK_ELEMENTS.min(param.numel() - start);
        buffer.resize((count * width) as usize, 0);
        let at = place.begin + (place.offset + start) * width;
        file.read_exact_at(&mut buffer, at).map_err(|error| {
            let why = format!("{} at byte {at}: {error}", place.tensor);
            Problem { why, ..Problem::of_io(name, &error) }
        })?;
        file.disk().progress().read(count * width);
        take(start, &buffer)?;
        start += count;
    }
    Ok(())
}

/// Fills the weights that a rank holds, with moments of zero, which count once the state was
/// finished. What comes back is the same on all ranks that read the same weights.
///
/// # Errors
/// The weights are of another model, or damaged.
pub fn load(weights: &Weights, state: &mut impl RankState) -> Result<[u8; 32], Refusal> {
    let name = weights.path().display().to_string();
    let differences = differences(weights.model(), state.table().model);
    if !differences.is_empty() {
        return Err(Refusal::of(&name, differences));
    }
    let mut hasher = blake3::Hasher::new();
    hasher.update(weights.digest().as_bytes());
    let float = state.table().stored;
    let mut values = Vec::new();
    let (model, params) = (state.table().model.clone(), state.table().params.to_vec());
    let known = weights.params().iter().map(|param| &param.name[..]).zip(0..);
    let known: HashMap<&str, usize> = known.collect();
    for (index, param) in params.iter().enumerate() {
        let needed = state.table().needed(Part::Master, index);
        let shared = !matches!(param.role, Role::Expert { .. });
        // What all ranks hold, all ranks look at, whatever they keep of it.
        if needed.is_empty() && !shared {
            continue;
        }
        let slice = model.cut(param).filter(|cut| cut.whole != param.name);
        let whole = slice.as_ref().map_or(&param.name, |cut| &cut.whole);
        let Some(from) = known.get(&whole[..]).copied() else {
            let problem = Problem::new(whole, "the weights have no such tensor");
            return Err(Refusal::of(&name, vec![problem]));
        };
        let (dtype, whole) = (weights.dtype(from), &weights.params()[from]);
        let mut gathered = Vec::new();
        if slice.is_some() {
            gathered.resize((needed.end - needed.start) as usize * float.size(), 0);
        }
        weights
            .stream(from, &mut |start, bytes| {
                if shared {
                    hasher.update(bytes);
                }
                values.clear();
                convert(bytes, dtype, float, &mut values)
                    .map_err(|at| does_not_fit(whole, start + at as u64, float))?;
                let end = start + (values.len() / float.size()) as u64;
                let byte = |element: u64| (element - start) as usize * float.size();
                let Some(slice) = &slice else {
                    if let Some(kept) = intersect(&needed, &(start..end)) {
                        let kept_values = &values[byte(kept.start)..byte(kept.end)];
                        state.write(Part::Master, index, kept, kept_values);
                    }
                    return Ok(());
                };
                for run in slice.within(start..end) {
                    let own = run.in_slice..run.in_slice + run.len;
                    let Some(kept) = intersect(&needed, &own) else { continue };
                    let begin = run.in_whole + (kept.start - run.in_slice);
                    let found = &values[byte(begin)..byte(begin + (kept.end - kept.start))];
                    let target = (kept.start - needed.start) as usize * float.size();
                    gathered[target..target + found.len()].copy_from_slice(found);
                }
                Ok(())
            })
            .map_err(|problem| Refusal::of(&name, vec![problem]))?;
        if slice.is_some() {
            state.write(Part::Master, index, needed, &gathered);
        }
    }
    state.clear_moments();
    Ok(*hasher.finalize().as_bytes())
}

pub(super) fn does_not_fit(param: &Param, element: u64, dtype: DType) -> Problem {
    let why = format!("element {element} is too large for {dtype:?}");
    Problem::new(&param.name, &why)
}

/// In what two models compute differently; how they are trained is no difference. Weights without
/// hysteresis may be trained with it: who types it means it. The other way it was forgotten.
pub fn differences(theirs: &ModelConfig, ours: &ModelConfig) -> Vec<Problem> {
    let mut problems = Vec::new();
    let (theirs, mut ours) = (computed(theirs), computed(ours));
    if theirs.router.hysteresis == 0.0 {
        ours.router.hysteresis = 0.0;
    }
    let value = |model| serde_json::to_value(model).unwrap_or_default();
    let (theirs, ours) = (value(theirs), value(ours));
    value_differences("model", &theirs, &ours, &mut |field, found, wanted| {
        let why = format!("{found} in the weights, {wanted} in the job");
        problems.push(Problem::new(field, &why));
    });
    problems
}

/// The model with everything that training alone uses set alike.
fn computed(model: &ModelConfig) -> ModelConfig {
    let mut model = model.clone();
    model.initializer_range = 0.0;
    model.experts.routed_headroom = 1.0;
    model.experts.slices = 1;
    if model.dense_layers.is_empty() {
        model.dense_intermediate_size = 0;
    }
    model.router = RouterConfig {
        aux_loss_coef: 0.0,
        z_loss_coef: 0.0,
        entropy_loss_coef: 0.0,
        balance_loss: moejob_protocol::model::BalanceLoss::None,
        initializer_range: None,
        aux_loss_scope: moejob_protocol::model::AuxLossScope::MicroBatch,
        // The K best experts with a capacity are the K best without one where there is room.
        kind: match model.router.kind {
            RouterKind::Switch | RouterKind::Tutel => RouterKind::TopK,
            kind => kind,
        },
        capacity_factor: 0.0,
        eval_capacity_factor: 0.0,
        batch_prioritized: false,
        bias_update_rate: 0.0,
        jitter: 0.0,
        input_dropout: 0.0,
        gate_noise: 0.0,
        frozen: false,
        warmup_steps: 0,
        ..model.router
    };
    model
}
