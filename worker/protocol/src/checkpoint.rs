//! The checkpoint manifest: `step-00000200/manifest.json`.
//!
//! A checkpoint exists if and only if its manifest does and every piece's BLAKE3 matches. Shards
//! are safetensors files `a<attempt>-r<rank>-<n>.safetensors`; the manifest says which run of
//! 4,096-element blocks of which logical tensor lies where, so that any layout can load any
//! other's.

use crate::model::ModelConfig;
use crate::layout::Layout;
use serde::{Deserialize, Serialize};

/// Of the manifest's own format. A newer one is refused with the advice to upgrade.
pub const CHECKPOINT_VERSION: u32 = 1;

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct CheckpointManifest {
    pub version: u32,
    pub job_uid: String,
    pub job_name: String,
    pub attempt: u32,
    /// Steps done.
    pub step: u64,
    pub tokens: u64,
    pub model: ModelConfig,
    pub layout: Layout,
    pub spec_hash: String,
    pub data_fingerprint: String,
    pub seed: u64,
    /// In table order.
    pub tensors: Vec<TensorEntry>,
    pub files: Vec<FileEntry>,
}

/// One logical tensor in one of its three parts.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct TensorEntry {
    pub name: String,
    pub part: Part,
    pub dtype: String,
    pub shape: Vec<u32>,
    /// Ascending, without gap or overlap.
    pub pieces: Vec<Piece>,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub enum Part {
    Weight,
    /// Exponential moving average of the gradient.
    Moment1,
    /// Exponential moving average of its square.
    Moment2,
}

/// A run of elements of a flattened tensor.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
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
#[serde(rename_all = "camelCase", deny_unknown_fields)]
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
