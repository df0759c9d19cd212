//! `--profiles FILE|DIR`: kinds of machine beside those that are shipped, as the ConfigMap
//! `moejob-profiles` has them on a cluster.

use clap::Args;
use moejob_manifest::problem::printable;
use moejob_manifest::profile::{Broken, File, Profiles};
use moejob_manifest::yaml::BYTES_MAX;
use std::io::Read;
use std::path::{Path, PathBuf};

/// Files of a folder that are looked at.
const FILES_MAX: usize = 1_000;

#[derive(Args, Clone, Debug, Default)]
pub struct OwnProfiles {
    /// Your own profiles of machines: a file NAME.yaml, or a folder of such files. NAME is what
    /// spec.nodes.profile says.
    #[arg(long = "profiles", value_name = "FILE|DIR")]
    pub from: Option<PathBuf>,
}

impl OwnProfiles {
    /// # Errors
    /// A file cannot be read, or is no profile: every problem, a line each.
    pub fn read(&self) -> Result<Profiles, String> {
        let Some(from) = &self.from else { return Ok(Profiles::shipped().clone()) };
        let files = files(from).map_err(|error| format!("{}: {error}", from.display()))?;
        let (profiles, broken) = Profiles::shipped().with(files);
        match broken.is_empty() {
            true => Ok(profiles),
            false => Err(broken.iter().flat_map(lines).collect::<Vec<_>>().join("\n")),
        }
    }
}

/// `FILE:4:9: E0212 memory: found ..`, a line a problem.
pub fn lines(broken: &Broken) -> Vec<String> {
    let line = |problem: &moejob_manifest::problem::Problem| {
        let place = problem.place.map(|place| format!("{}:{}: ", place.line, place.column));
        format!("{}: {}{}", printable(&broken.file), place.unwrap_or_default(), problem.sentence())
    };
    broken.problems.iter().map(line).collect()
}

fn files(from: &Path) -> std::io::Result<Vec<File>> {
    if !from.is_dir() {
        return Ok(vec![file(from)?]);
    }
    let mut paths = Vec::new();
    for entry in std::fs::read_dir(from)?.take(FILES_MAX) {
        let path = entry?.path();
        let known = ["yaml", "yml"].map(Some);
        if known.contains(&path.extension().and_then(|end| end.to_str())) {
            paths.push(path);
        }
    }
    paths.sort();
    paths.iter().map(|path| file(path)).collect()
}

/// One byte more than a profile may have, so that a longer one is refused by its length.
fn file(path: &Path) -> std::io::Result<File> {
    let name = path.file_name().unwrap_or_default().to_string_lossy().into_owned();
    let mut text = Vec::new();
    std::fs::File::open(path)?.take(BYTES_MAX as u64 + 1).read_to_end(&mut text)?;
    Ok((name, text))
}
