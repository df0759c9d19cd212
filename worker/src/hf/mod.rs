//! Weights as Hugging Face's `transformers` keeps them: read, trained from, written.
//!
//! ```text
//! config.json --config--> ModelConfig        names: which tensor holds which parameter
//! directory (headers checked, every parameter found once) --weights--> a stream of finite values
//!   -> the arena of a rank (load) | a checkpoint of step 0 (import) | another directory (export)
//! ```
//! At most one piece of one tensor is in memory.

mod config;
mod names;
mod directory;
mod weights;
mod import;
pub mod text;
mod export;

pub use config::Family;
pub use directory::Directory;
pub use export::{Options, export};
pub use import::import;
pub use weights::{Weights, differences, load};

use crate::checkpoint::{Disk, Problem, list, show};
use moejob_protocol::ModelConfig;
use std::path::Path;

/// The model of weights to start from, by `config.json` or manifest alone, with whole experts.
///
/// # Errors
/// Everything that is wrong with it or not built in.
pub fn read_model(path: &Path) -> Result<ModelConfig, Vec<Problem>> {
    if path.join("manifest.json").symlink_metadata().is_ok() {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        return show(&Disk::real(), &path).map(|manifest| manifest.model.in_slices(1));
    }
    if path.join("config.json").symlink_metadata().is_err()
        && let Some(newest) = list(&Disk::real(), path).ok().and_then(|mut found| found.pop())
    {
        return newest.manifest.map(|manifest| manifest.model.in_slices(1));
    }
    let text = directory::small_file(path, "config.json")?;
    config::read(&text).map(|(_, model)| model)
}
