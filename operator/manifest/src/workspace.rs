//! A worker's container as its job sees it: its name, and where the job's files lie in it.

use crate::job::Job;
use crate::problem::{Code, Problem, quoted};
use crate::spec::VolumeSpec;
use moejob_protocol::config::Tokenizer;
use moejob_protocol::pod::TOKEN_FOLDER;

/// The worker's container.
pub const CONTAINER: &str = "worker";
/// The worker's program in our image.
pub const PROGRAM: &str = "/moejob";
/// What relative paths mean in a pod, and where relative mount paths lie.
pub const WORKSPACE: &str = "/workspace";

/// A path as it is in a pod, as the kernel would walk it were there no links: relative ones lie in
/// `/workspace`, `//` and `/./` are `/`, and `..` goes up.
pub fn in_workspace(path: &str) -> String {
    let whole = match path.starts_with('/') {
        true => path.to_string(),
        false => format!("{WORKSPACE}/{path}"),
    };
    let mut parts: Vec<&str> = Vec::new();
    for part in whole.split('/') {
        match part {
            "" | "." => {}
            ".." => drop(parts.pop()),
            name => parts.push(name),
        }
    }
    format!("/{}", parts.join("/"))
}

/// The paths that a job names, each behind its field.
pub fn paths(job: &Job) -> Vec<(String, &str)> {
    let data = &job.data;
    let train = data.train.iter().enumerate().map(|(index, part)| match part.weight {
        None => ("spec.data.train".to_string(), &part.source),
        Some(_) => (format!("spec.data.train.mixture[{index}]"), &part.source),
    });
    let held_out = data.held_out.iter();
    let held_out = held_out.map(|source| ("spec.data.validation.from".to_string(), source));
    let mut found = Vec::new();
    for (at, source) in train.chain(held_out) {
        let at = format!("{at}.{}", source.format.name());
        for (list, paths) in [("paths", &source.paths), ("exclude", &source.exclude)] {
            let each = paths.iter().enumerate();
            found.extend(each.map(|(index, path)| (format!("{at}.{list}[{index}]"), &path[..])));
        }
    }
    if let Tokenizer::Path(path) = &data.tokenizer {
        found.push(("spec.data.tokenizer".to_string(), path));
    }
    let location = job.checkpoint.location.iter();
    found.extend(location.map(|path| ("spec.checkpoint.location".to_string(), &path[..])));
    let from = job.model_from.iter();
    found.extend(from.map(|path| ("spec.model.from.path".to_string(), &path[..])));
    found
}

/// Whether a path leads out of its folder. On one machine that is a place like any other; in a pod
/// there is nothing.
pub fn goes_up(path: &str) -> bool {
    path.split('/').any(|part| part == "..")
}

/// What is said of an address in the place of a path. What stands before an @ may be a password: it
/// is not repeated.
pub fn address(path: &str) -> Option<String> {
    let (scheme, _) = path.split_once("://")?;
    Some(format!("an address with the scheme {}", quoted(scheme)))
}

pub fn no_path(at: &str, found: String) -> Problem {
    let allowed = "a path of this machine or of a mounted volume, without `..`";
    Problem::of(Code::Path, at, found, allowed, "mount what is elsewhere")
}

/// Where the system's files are, the worker's program, and volumes of ours.
const RESERVED: &[&str] = &[
    PROGRAM, WORKSPACE, TOKEN_FOLDER, "/bin", "/boot", "/dev", "/etc", "/lib", "/lib64", "/proc",
    "/run", "/sbin", "/sys", "/tmp", "/usr", "/var/run",
];

/// Whether nothing may be mounted there: it is a reserved place, lies in one other than the
/// workspace, or would hide one.
pub fn is_reserved(path: &str) -> bool {
    let path = in_workspace(path);
    let lies_in = |inner: &str, outer: &str| {
        outer == "/" || inner == outer || inner.starts_with(&format!("{outer}/"))
    };
    RESERVED.iter().any(|reserved| {
        lies_in(reserved, &path) || (*reserved != WORKSPACE && lies_in(&path, reserved))
    })
}

/// The job's volume on which a path of `in_workspace` lies, and the rest of the path there.
pub fn volume_of<'a>(job: &'a Job, path: &'a str) -> Option<(&'a VolumeSpec, &'a str)> {
    let mounts = job.kubernetes.volumes.iter().filter_map(|volume| {
        let mount = in_workspace(volume.mount_path.as_deref()?);
        let rest = path.strip_prefix(mount.trim_end_matches('/'))?;
        (rest.is_empty() || rest.starts_with('/')).then_some((mount.len(), volume, rest))
    });
    mounts.max_by_key(|(length, ..)| *length).map(|(_, volume, rest)| (volume, rest))
}
