//! A start that is refused leaves nothing behind: the folders that it made go again, where nothing
//! was trained in them.

use std::path::{Path, PathBuf};

/// Exit codes of a start that is refused: the manifest or the arguments, data or a checkpoint.
const REFUSED: [i32; 2] = [2, 3];

/// Folders of a run that were not there before it.
pub struct Missing {
    /// The run's own, and where its checkpoints lie elsewhere.
    places: Vec<PathBuf>,
    /// What lies around them, innermost first.
    around: Vec<PathBuf>,
}

impl Missing {
    pub fn of(run: &Path, location: Option<&Path>) -> Missing {
        let is_new =
            |path: &&Path| !path.as_os_str().is_empty() && path.symlink_metadata().is_err();
        let all = [Some(run), location].into_iter().flatten().filter(is_new);
        let (mut places, mut around) = (Vec::new(), Vec::new());
        for path in all {
            places.push(path.to_path_buf());
            let outer = path.ancestors().skip(1).take_while(is_new);
            around.extend(outer.map(Path::to_path_buf));
        }
        Missing { places, around }
    }

    /// Takes them away again behind a run that ended with `code`, unless they hold what a person
    /// may want to see: a step, a checkpoint or a line that a worker wrote.
    pub fn remove(&self, code: i32) {
        if !REFUSED.contains(&code) || self.places.iter().any(|place| holds_something(place)) {
            return;
        }
        // What cannot be removed harms nobody.
        self.places.iter().for_each(|place| drop(std::fs::remove_dir_all(place)));
        self.around.iter().for_each(|place| drop(std::fs::remove_dir(place)));
    }
}

fn holds_something(place: &Path) -> bool {
    let has_bytes = |path: &Path| path.metadata().is_ok_and(|of| of.is_file() && of.len() > 0);
    let entries = |path: PathBuf| std::fs::read_dir(path).into_iter().flatten().flatten();
    let is_checkpoint = |path: PathBuf| {
        entries(path).any(|of| of.file_name().as_encoded_bytes().starts_with(b"step-"))
    };
    has_bytes(&place.join("metrics.jsonl"))
        || entries(place.join("logs")).any(|log| has_bytes(&log.path()))
        || is_checkpoint(place.to_path_buf())
        || is_checkpoint(place.join("checkpoints"))
}
