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

use crate::checkpoint::{Disk, Problem, newest_described, show};
use crate::failure::chain;
use moejob_protocol::{CheckpointManifest, ModelConfig};
use std::path::Path;

/// The model of weights to start from, by `config.json` or manifest alone, with whole experts, and
/// what is said of newer checkpoints that are refused.
///
/// # Errors
/// Everything that is wrong with it or not built in.
pub fn read_model(path: &Path) -> Result<(ModelConfig, Vec<String>), Vec<Problem>> {
    let whole = |manifest: CheckpointManifest| manifest.model.in_slices(1);
    if path.join("manifest.json").symlink_metadata().is_ok() {
        let path = path.canonicalize().unwrap_or_else(|_| path.to_path_buf());
        return show(&Disk::real(), &path).map(|manifest| (whole(manifest), Vec::new()));
    }
    let inside = path.join("checkpoints");
    let is_run = path.join("job.json").is_file() && inside.is_dir();
    let location = if is_run { &inside } else { path };
    if path.join("config.json").symlink_metadata().is_err() {
        let newest = newest_described(&Disk::real(), location)
            .map_err(|error| vec![Problem::new(".", &chain(&error))])?;
        if let Some(refusal) = newest.none_usable(location) {
            return Err(refusal.problems);
        }
        let passed_over = newest.passed_over();
        if let Some(found) = newest.usable {
            return found.manifest.map(|manifest| (whole(manifest), passed_over));
        }
    }
    let text = directory::small_file(&Disk::real(), path, "config.json")?;
    config::read(&text).map(|config| (config.model, Vec::new()))
}
