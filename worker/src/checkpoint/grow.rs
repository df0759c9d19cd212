//! A checkpoint with twice the experts: each is split in two, and the model computes the same.
//!
//! ```text
//! expert i -> experts i and i + E, top-k K -> 2 K
//! router row i, correction i, matrices of i -> twice        weights of others -> as they are
//! moments of what is twice -> times 1/2 and 1/4
//! ```
//! Why it is the same function: both copies of an expert have one score, so the best 2 K are the
//! copies of the best K. The softmax over twice the logits lowers each by ln 2 (what a shift of
//! all logits would do is nothing), so that two copies weigh what one did; weights that are
//! normalised add up to one again; and where neither holds, for a sigmoid that is not normalised,
//! `router.scale` is halved. Groups are doubled, too: experts i + E are in groups of their own.
//!
//! Why the moments are scaled: each copy gets half the gradient of its original, whose running
//! mean and mean square they are. AdamW then moves both copies as it would have moved the one.
//! What ends the symmetry is noise on one of the two: w (1 + noise z), z normal.

use super::load::Shards;
use super::manifest::PARTS;
use super::values::{convert, first_non_finite, float_named, name_of};
use super::{Disk, NOT_FINITE, Problem, check, model_is_sane, seal};
use super::staging::{Failed, Staging, Writing, runs};
use moejob_kernels::DType;
use moejob_kernels::philox::normals;
use moejob_protocol::checkpoint::{
    CHECKPOINT_VERSION, CheckpointManifest, Part, Piece, TensorEntry, directory_name,
};
use moejob_protocol::layout::{BLOCK, Layout};
use moejob_protocol::mesh::Mesh;
use moejob_protocol::model::{BalanceLoss, Param, Role, RouterKind, Scoring};
use moejob_protocol::ModelConfig;
use std::path::{Path, PathBuf};

/// Elements of a piece: what a reader verifies and holds at once.
const PIECE_ELEMENTS: u64 = 1 << 20;
/// Bytes of a shard at most, unless one tensor is larger.
const SHARD_BYTES_MAX: u64 = 1 << 30;
/// A router with more elements than this has no place in memory twice.
const ROUTER_ELEMENTS_MAX: u64 = 1 << 28;

/// How the copies differ.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Growth {
    /// Standard deviation of the noise on a copy's matrices, relative to each weight.
    pub noise: f64,
    pub seed: u64,
    /// Experts a token in the grown model; none: twice as many, which keeps the function.
    pub per_token: Option<u32>,
}

/// The model whose experts are all there twice.
pub fn grown(model: &ModelConfig, growth: &Growth) -> ModelConfig {
    let mut grown = model.clone();
    grown.experts.count *= 2;
    grown.experts.per_token = growth.per_token.unwrap_or(2 * model.experts.per_token);
    let router = &mut grown.router;
    if router.groups > 1 {
        router.groups *= 2;
        router.topk_groups *= 2;
    }
    if router.scoring == Scoring::Sigmoid && !router.norm_topk_prob {
        router.scale /= 2.0;
    }
    // Softmax's scores are halved, and with them what is added to them.
    if router.scoring == Scoring::Softmax {
        router.hysteresis /= 2.0;
        router.bias_update_rate /= if router.bias { 2.0 } else { 1.0 };
    }
    // Its loads sum to K: twice as much now.
    let keeps = grown.experts.per_token == 2 * model.experts.per_token;
    if router.balance_loss == BalanceLoss::Switch && keeps {
        router.aux_loss_coef /= 2.0;
    }
    grown
}

/// Writes the grown checkpoint of the same step into the folder `out` and gives its path.
/// `progress` hears bytes done and in all.
///
/// # Errors
/// Something stands in its place, the disk is full, or the checkpoint is damaged.
pub fn grow(
    directory: &Path,
    source: &CheckpointManifest,
    growth: &Growth,
    out: &Path,
    progress: &mut dyn FnMut(u64, u64),
) -> Result<PathBuf, Failed> {
    let router = &source.model.router;
    if router.kind != RouterKind::TopK || router.cosine.is_some() {
        let why = "experts are split under kind topK with a linear gate alone";
        return Err(Failed::Refused(Problem::new("manifest.json: model.router", why)));
    }
    let name = directory_name(source.step);
    let target = out.join(&name);
    let model = grown(&source.model, growth);
    let refused = |why: String| Failed::Refused(Problem::new("manifest.json", &why));
    model_is_sane(&model).map_err(refused)?;
    let params = model.params();
    let tensors = origins(source, &params);
    let largest = tensors.iter().filter(|tensor| tensor.doubled).map(Origin::numel).max();
    if largest.unwrap_or(0) > ROUTER_ELEMENTS_MAX {
        return Err(Failed::Refused(Problem::new("manifest.json", "its router is too large")));
    }
    let staging = Staging::new(out, &target)?;
    let sizes: Vec<u64> = tensors.iter().map(Origin::bytes).collect();
    let mut writing = Writing::new(&staging.path, sizes.iter().sum(), progress);
    let disk = Disk::real();
    let mut shards = Shards::new(&disk, directory, source);
    let mut entries = Vec::new();
    for (number, run) in runs(&sizes, SHARD_BYTES_MAX).into_iter().enumerate() {
        let of_run = &tensors[run];
        let header: Vec<_> = of_run.iter().map(Origin::header).collect();
        writing.begin(&format!("a0-r0-{number}.safetensors"), &header)?;
        for tensor in of_run {
            let pieces = tensor.write(growth, number as u32, &mut shards, &mut writing)?;
            entries.push(tensor.entry(pieces));
        }
        writing.end()?;
    }
    let manifest = CheckpointManifest {
        version: CHECKPOINT_VERSION,
        job_uid: "grown".to_string(),
        attempt: 0,
        model,
        layout: Layout::contiguous(Mesh::data_parallel(1, 1)),
        // Of the manifest that it will be trained with: not known yet.
        spec_hash: String::new(),
        training_hash: String::new(),
        tensors: entries,
        files: writing.files.clone(),
        ..source.clone()
    };
    if let Some(problem) = check(&manifest, &name).into_iter().next() {
        return Err(Failed::Refused(problem));
    }
    let sealed = seal(&manifest).map_err(|error| staging.io(error.into()))?;
    staging.small_file("manifest.json", &sealed)?;
    staging.commit(&target)
}

/// A tensor of the grown checkpoint and where it comes from.
struct Origin<'a> {
    param: &'a Param,
    part: Part,
    from: &'a TensorEntry,
    dtype: DType,
    /// The whole of `from` twice: routers and corrections.
    doubled: bool,
    /// The second of two experts.
    is_copy: bool,
    /// What the values of `from` are multiplied by.
    factor: f64,
}

/// For each tensor of the grown table, in its order, the one it is made of.
fn origins<'a>(source: &'a CheckpointManifest, params: &'a [Param]) -> Vec<Origin<'a>> {
    let (experts, slices) = (source.model.experts.count, source.model.slices().each);
    let old = source.model.params();
    let softmax = source.model.router.scoring == Scoring::Softmax;
    let index_of: std::collections::HashMap<&str, usize> =
        old.iter().enumerate().map(|(index, param)| (&param.name[..], index)).collect();
    let mut origins = Vec::new();
    for param in params {
        let (mut name, mut is_copy) = (param.name.clone(), false);
        if let Role::Expert { expert, .. } = param.role
            && expert / slices >= experts
        {
            let expert = expert / slices;
            let at = |expert: u32| format!(".experts.{expert}.");
            name = name.replace(&at(expert), &at(expert - experts));
            is_copy = true;
        }
        let doubled = matches!(param.role, Role::Router { .. } | Role::Correction { .. });
        let halved = doubled || matches!(param.role, Role::Expert { .. });
        let index = index_of[&name[..]];
        for (at, part) in PARTS.into_iter().enumerate() {
            let from = &source.tensors[index * PARTS.len() + at];
            let dtype = float_named(&from.dtype).unwrap_or(DType::F32);
            let factor = match part {
                Part::Moment1 if halved => 0.5,
                Part::Moment2 if halved => 0.25,
                // It is added to scores that are halved.
                Part::Master if softmax && matches!(param.role, Role::Correction { .. }) => 0.5,
                _ => 1.0,
            };
            origins.push(Origin { param, part, from, dtype, doubled, is_copy, factor });
        }
    }
    origins
}

impl Origin<'_> {
    fn numel(&self) -> u64 {
        self.param.numel()
    }

    fn bytes(&self) -> u64 {
        self.numel() * self.dtype.size() as u64
    }

    fn header(&self) -> (String, &'static str, Vec<u64>, u64) {
        let name = format!("{}/{}/0", self.part.name(), self.param.name);
        (name, name_of(self.dtype), vec![self.numel()], self.bytes())
    }

    fn entry(&self, pieces: Vec<Piece>) -> TensorEntry {
        TensorEntry {
            name: self.param.name.clone(),
            part: self.part,
            dtype: name_of(self.dtype).to_string(),
            shape: self.param.shape.clone(),
            pieces,
        }
    }

    /// Copies the tensor, piece by piece; routers and corrections pass through memory whole.
    fn write(
        &self,
        growth: &Growth,
        file: u32,
        shards: &mut Shards,
        writing: &mut Writing,
    ) -> Result<Vec<Piece>, Failed> {
        let mut pieces = Vec::new();
        let mut put = |start: u64, bytes: &[u8]| -> Result<(), Failed> {
            let (begin, len) = (writing.at(), (bytes.len() / self.dtype.size()) as u64);
            writing.write(bytes, true)?;
            let blake3 = blake3::hash(bytes).to_hex().to_string();
            pieces.push(Piece { file, begin, end: writing.at(), start, len, blake3 });
            Ok(())
        };
        let mut whole = Vec::new();
        for piece in &self.from.pieces {
            let bytes = shards.piece(piece).map_err(Failed::Refused)?;
            let bytes = self.changed(growth, piece.start, bytes).map_err(Failed::Refused)?;
            match self.doubled {
                false => put(piece.start, &bytes)?,
                true => whole.extend(bytes),
            }
        }
        if self.doubled {
            let all = whole.repeat(2);
            const { assert!(PIECE_ELEMENTS.is_multiple_of(BLOCK), "pieces begin at blocks") };
            let size = PIECE_ELEMENTS as usize * self.dtype.size();
            for (number, bytes) in all.chunks(size).enumerate() {
                put(number as u64 * PIECE_ELEMENTS, bytes)?;
            }
        }
        Ok(pieces)
    }

    /// Values of the original from element `start` on, as the grown checkpoint has them.
    fn changed(&self, growth: &Growth, start: u64, bytes: Vec<u8>) -> Result<Vec<u8>, Problem> {
        let problem = |why: &str| Problem::new(&self.from.name, why);
        if first_non_finite(&bytes, self.dtype).is_some() {
            return Err(problem(NOT_FINITE));
        }
        let noise = self.is_copy && self.part == Part::Master && growth.noise != 0.0;
        if !noise && self.factor == 1.0 {
            return Ok(bytes);
        }
        let mut wide = Vec::new();
        convert(&bytes, self.dtype, DType::F64, &mut wide).map_err(|_| problem("too large"))?;
        let hash = blake3::hash(self.param.name.as_bytes());
        let (key, _) = hash.as_bytes().split_first_chunk::<8>().expect("32 bytes");
        let key = u64::from_le_bytes(*key);
        let (words, _) = wide.as_chunks_mut::<8>();
        for (element, word) in (start..).zip(words) {
            let mut value = f64::from_le_bytes(*word) * self.factor;
            if noise {
                let z = normals(growth.seed, key, element / 2)[(element % 2) as usize];
                value *= 1.0 + growth.noise * z;
            }
            *word = value.to_le_bytes();
        }
        let mut narrow = Vec::with_capacity(bytes.len());
        convert(&wide, DType::F64, self.dtype, &mut narrow)
            .map_err(|_| problem("a weight with its noise is too large for its type"))?;
        Ok(narrow)
    }
}
