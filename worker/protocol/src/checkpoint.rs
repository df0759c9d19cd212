//! The checkpoint manifest: `step-00000200/manifest.json`.
//!
//! A checkpoint exists if and only if its manifest does and every piece's BLAKE3 matches. Shards
//! are safetensors files `a<attempt>-r<rank>-<n>.safetensors`; the manifest says which run of
//! 4,096-element blocks of which logical tensor lies where, so that any layout can load any
//! other's.

use crate::model::ModelConfig;
use crate::layout::Layout;
use serde::{Deserialize, Serialize};
use std::collections::BTreeMap;

/// Of the manifest's own format. A newer one is refused with the advice to upgrade.
///
/// 1: the first part of a tensor is called `weight`; `specHash` is of a debug print.
/// 2: it is called `master`; `specHash` is of a canonical form.
pub const CHECKPOINT_VERSION: u32 = 2;

/// Rows of a model's table of parameters that a checkpoint may have. A manifest with more does not
/// validate, no writer makes more, and every reader takes as many: all bounds below follow from it.
pub const PARAMS_MAX: u64 = 262_144;

/// Tensors of a checkpoint, and of one of its files: each parameter has three parts.
pub const TENSORS_MAX: u64 = PARAMS_MAX * Part::ALL.len() as u64;

/// A name, a place and a shape, as a file's header has them for each tensor, are shorter together.
pub const HEADER_BYTES_MAX: u64 = TENSORS_MAX * 384;

/// A manifest's bytes for a tensor, beside those for its pieces, and for each piece of it.
pub const TENSOR_BYTES: u64 = 192;
pub const PIECE_BYTES: u64 = 192;

/// A longer manifest is refused before it is read, and is not written. It takes three pieces for
/// each parameter and owner.
pub const MANIFEST_BYTES_MAX: u64 = 16 << 30;

/// The first version whose `specHash` means something to others than its own program.
pub const SPEC_HASH_VERSION: u32 = 2;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct CheckpointManifest {
    pub version: u32,
    pub job_uid: String,
    #[serde(default)]
    pub job_name: String,
    pub attempt: u32,
    /// Steps done.
    pub step: u64,
    #[serde(default)]
    pub tokens: u64,
    pub model: ModelConfig,
    pub layout: Layout,
    /// Empty: it belongs to no job yet.
    #[serde(default)]
    pub spec_hash: String,
    /// A hash of how the job trains, which stays the same where its data are moved; `spec_hash`
    /// does not. Empty in checkpoints of releases before.
    #[serde(default, skip_serializing_if = "String::is_empty")]
    pub training_hash: String,
    #[serde(default)]
    pub data_fingerprint: String,
    pub seed: u64,
    /// Of jobs in fp16 alone.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub loss_scale: Option<ScaleEntry>,
    /// In table order.
    pub tensors: Vec<TensorEntry>,
    pub files: Vec<FileEntry>,
    /// Fields that this version does not know, as they were: they are written again.
    #[serde(flatten)]
    pub others: BTreeMap<String, serde_json::Value>,
}

/// What an fp16 loss is multiplied by, a power of two, and the steps since it last changed.
#[derive(Clone, Copy, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct ScaleEntry {
    pub scale: f64,
    pub good_steps: u32,
}

/// One logical tensor in one of its three parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct TensorEntry {
    pub name: String,
    pub part: Part,
    /// F32, of fp64 jobs F64, whatever the precision of training.
    pub dtype: String,
    pub shape: Vec<u32>,
    /// Ascending, without gap or overlap.
    pub pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Part {
    /// The weight at the optimizer's precision.
    #[serde(alias = "weight")]
    Master,
    /// Exponential moving average of the gradient.
    Moment1,
    /// Exponential moving average of its square.
    Moment2,
}

impl Part {
    /// In the order in which shards and manifests have them.
    pub const ALL: [Part; 3] = [Part::Master, Part::Moment1, Part::Moment2];

    /// As names in files have it.
    pub fn name(self) -> &'static str {
        match self {
            Part::Master => "master",
            Part::Moment1 => "moment1",
            Part::Moment2 => "moment2",
        }
    }
}

/// A run of elements of a flattened tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Piece {
    /// Position in `files`.
    pub file: u32,
    /// Byte range in the file.
    pub begin: u64,
    pub end: u64,
    /// First element, a multiple of 4,096.
    pub start: u64,
    pub len: u64,
    /// BLAKE3 of the bytes, hex.
    pub blake3: String,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct FileEntry {
    pub name: String,
    pub bytes: u64,
    /// BLAKE3 of the whole file, hex.
    pub blake3: String,
}

/// `step-00000200`.
pub fn directory_name(step: u64) -> String {
    format!("step-{step:08}")
}
