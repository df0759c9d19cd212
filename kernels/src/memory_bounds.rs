//! How much memory this process may have, by everything that bounds it: the one reader of it.
//!
//! ```text
//! /proc/meminfo                                the machine
//! /proc/self/cgroup, /proc/self/mountinfo -->  folders of its groups, up to their mounts
//!                                              -> what each allows, and what of it is left
//! ulimit -d, -v                                what a process may write to, and reserve
//! ```
//! Groups are nested, and each bounds all below it: a pod's slice may allow less than the
//! container in it. Both versions may be mounted at once, and version 1 tells of groups above the
//! mount by one number alone.

use std::path::{Component, Path, PathBuf};

use rustix::process::{Resource, getrlimit};

/// Groups that are nested in each other at most.
const DEPTH_MAX: usize = 64;
/// From here on a number of version 1 is no limit: it writes the largest one of whole pages.
const NO_LIMIT: u64 = 1 << 60;

/// What a bound counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scope {
    /// All processes together, on the machine or in a group.
    All,
    /// Each process, by the memory that it writes to.
    EachData,
    /// Each process, by the addresses that it reserves.
    EachAddresses,
}

/// Who bounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum BoundSource {
    Machine,
    /// The folder of a control group, the file that says so, and whether it is this process's own
    /// group rather than one around it.
    Group { folder: PathBuf, file: &'static str, own: bool },
    /// The letter of `ulimit`.
    Ulimit(char),
}

/// One bound, in bytes.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Bound {
    pub by: BoundSource,
    pub limit: u64,
    /// What of the limit nobody uses. Pages of files are given back when they are needed, and
    /// count as unused. Of a limit for each process it is all of it: another one begins with none.
    pub left: u64,
}

impl Bound {
    pub fn scope(&self) -> Scope {
        match self.by {
            BoundSource::Machine | BoundSource::Group { .. } => Scope::All,
            BoundSource::Ulimit('d') => Scope::EachData,
            BoundSource::Ulimit(_) => Scope::EachAddresses,
        }
    }

    /// As it continues `4.0 GiB are`, where `limit` is the limit in words.
    pub fn left_of(&self, limit: &str) -> String {
        match &self.by {
            BoundSource::Machine => "available on this machine".to_string(),
            BoundSource::Group { folder, file, own } => {
                let whose = if *own { "its control group" } else { "a control group around it" };
                let file = folder.join(file);
                format!("left of the {limit} that {whose} allows ({})", file.display())
            }
            BoundSource::Ulimit(letter) => format!("what `ulimit -{letter}` lets a process have"),
        }
    }

    /// What makes it larger.
    pub fn raise(&self) -> String {
        match &self.by {
            BoundSource::Machine => "end what else uses the memory".to_string(),
            BoundSource::Group { .. } => {
                "give the container, slice or job of this machine more memory".to_string()
            }
            BoundSource::Ulimit(letter) => format!("raise it: `ulimit -{letter} unlimited`"),
        }
    }
}

/// Limits for each process, where there are some.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Ulimits {
    pub data: Option<u64>,
    pub addresses: Option<u64>,
}

impl Ulimits {
    pub fn of_this_process() -> Ulimits {
        let current = |resource| getrlimit(resource).current;
        Ulimits { data: current(Resource::Data), addresses: current(Resource::As) }
    }
}

/// All that bounds a process.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct MemoryBounds {
    pub bounds: Vec<Bound>,
    /// Bytes that the machine could move to disk; in no bound.
    pub swap: u64,
    /// What could not be read although it is there: nothing is bounded by it.
    pub unread: Vec<String>,
}

impl MemoryBounds {
    /// Of this process, at this moment.
    pub fn of_this_process() -> MemoryBounds {
        MemoryBounds::under(Path::new("/"), Ulimits::of_this_process())
    }

    /// Of a process of the machine whose `/proc` and `/sys` lie under `root`.
    pub fn under(root: &Path, ulimits: Ulimits) -> MemoryBounds {
        let mut found = MemoryBounds::default();
        let meminfo = found.read(&root.join("proc/meminfo")).unwrap_or_default();
        if let (Some(limit), Some(left)) =
            (kib_of(&meminfo, "MemTotal:"), kib_of(&meminfo, "MemAvailable:"))
        {
            found.bounds.push(Bound { by: BoundSource::Machine, limit, left });
        } else {
            found.unread.push("/proc/meminfo names no MemTotal and MemAvailable".to_string());
        }
        found.swap = kib_of(&meminfo, "SwapFree:").unwrap_or(0);
        let cgroup = found.read(&root.join("proc/self/cgroup")).unwrap_or_default();
        let mountinfo = found.read(&root.join("proc/self/mountinfo")).unwrap_or_default();
        for branch in branches(&cgroup, &mountinfo) {
            let seen = |folder: &Path| root.join(folder.strip_prefix("/").unwrap_or(folder));
            let there = branch.folders().filter(|folder| seen(folder).is_dir());
            for (depth, folder) in there.enumerate() {
                found.group(&seen(&folder), &folder, branch.version, depth == 0);
            }
        }
        for (letter, limit) in [('d', ulimits.data), ('v', ulimits.addresses)] {
            let by = BoundSource::Ulimit(letter);
            found.bounds.extend(limit.map(|limit| Bound { by, limit, left: limit }));
        }
        found
    }

    /// The bound on all processes together of which the least is left.
    pub fn least_left(&self) -> Option<&Bound> {
        let all = self.bounds.iter().filter(|bound| bound.scope() == Scope::All);
        all.min_by_key(|bound| bound.left)
    }

    /// What a file says, if it is there.
    fn read(&mut self, path: &Path) -> Option<String> {
        match std::fs::read_to_string(path) {
            Ok(text) => Some(text),
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => None,
            Err(error) => {
                self.unread.push(format!("{}: {error}", path.display()));
                None
            }
        }
    }

    /// The bound of one group, whose files lie at `place` and which the process knows as `folder`.
    fn group(&mut self, place: &Path, folder: &Path, version: Version, own: bool) {
        // One that does not count its children bounds none of them.
        let apart = self.read(&place.join("memory.use_hierarchy"));
        if !own && apart.is_some_and(|text| text.trim() == "0") {
            return;
        }
        let Files { limits, usage, cached } = version.files();
        let mut found: Vec<(&'static str, u64)> = Vec::new();
        for file in limits {
            let Some(text) = self.read(&place.join(file)) else { continue };
            match limit_of(&text) {
                Some(limit) => found.extend(limit.map(|limit| (*file, limit))),
                None => self.unread.push(format!(
                    "{}: `{}` is no number of bytes",
                    folder.join(file).display(),
                    text.trim()
                )),
            }
        }
        let stat = self.read(&place.join(STAT)).unwrap_or_default();
        // Of all groups around this one, also of those above the mount.
        let around = number_of(&stat, "hierarchical_memory_limit");
        found.extend(around.filter(|of| own && *of < NO_LIMIT).map(|of| (STAT, of)));
        let Some((file, limit)) = found.into_iter().min_by_key(|(_, limit)| *limit) else { return };
        let used = self.read(&place.join(usage)).and_then(|text| text.trim().parse().ok());
        if used.is_none() {
            let what = folder.join(usage).display().to_string();
            self.unread.push(format!("{what} does not tell what is used: taken for none"));
        }
        let cached = number_of(&stat, cached).unwrap_or(0);
        let used = used.unwrap_or(0u64).saturating_sub(cached);
        let by = BoundSource::Group { folder: folder.to_path_buf(), file, own };
        self.bounds.push(Bound { by, limit, left: limit.saturating_sub(used) });
    }
}

/// The file with a group's figures.
const STAT: &str = "memory.stat";

/// The files of a group.
struct Files {
    limits: &'static [&'static str],
    usage: &'static str,
    /// The figure of pages of files that nothing has used lately; the usage counts them.
    cached: &'static str,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Version {
    One,
    Two,
}

impl Version {
    /// Where systems mount it, for those that show no mounts.
    fn usual_mount(self) -> &'static Path {
        Path::new(match self {
            Version::One => "/sys/fs/cgroup/memory",
            Version::Two => "/sys/fs/cgroup",
        })
    }

    fn files(self) -> Files {
        match self {
            Version::One => Files {
                limits: &["memory.limit_in_bytes"],
                usage: "memory.usage_in_bytes",
                cached: "total_inactive_file",
            },
            Version::Two => Files {
                // Above `high` a process is held up until it hardly moves.
                limits: &["memory.max", "memory.high"],
                usage: "memory.current",
                cached: "inactive_file",
            },
        }
    }
}

/// Where the groups of this process lie that bound its memory by one version: a mount, and the own
/// group below it.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Branch {
    version: Version,
    mount: PathBuf,
    below: PathBuf,
}

impl Branch {
    /// The own group, and each around it up to the mount.
    fn folders(&self) -> impl Iterator<Item = PathBuf> {
        self.below.ancestors().take(DEPTH_MAX).map(|below| self.mount.join(below))
    }
}

/// A mounted tree of groups that bound memory.
struct Mount {
    version: Version,
    /// Which group the mount shows as its root, as /proc/self/cgroup names groups.
    root: PathBuf,
    place: PathBuf,
}

/// By what /proc/self/cgroup and /proc/self/mountinfo say.
fn branches(cgroup: &str, mountinfo: &str) -> Vec<Branch> {
    let mounts: Vec<Mount> = mountinfo.lines().filter_map(mount).collect();
    let mut found = Vec::new();
    for line in cgroup.lines() {
        // `0::/path` is version 2, `9:memory:/path` version 1.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let version = match controllers {
            "" => Version::Two,
            of if of.split(',').any(|of| of == "memory") => Version::One,
            _ => continue,
        };
        let own: Vec<&Mount> = mounts.iter().filter(|mount| mount.version == version).collect();
        let at = |place: &Path, below: &Path| {
            let named = below.components().all(|part| matches!(part, Component::Normal(_)));
            named.then(|| Branch { version, mount: place.into(), below: below.into() })
        };
        let below = |mount: &&Mount| {
            at(&mount.place, Path::new(path).strip_prefix(&mount.root).ok()?)
        };
        let mut shown: Vec<Branch> = own.iter().filter_map(below).collect();
        if shown.is_empty() {
            // The path is the host's, as in a container, or another namespace's. What is mounted is
            // then the container's own group, or has it below.
            let places: Vec<&Path> = own.iter().map(|mount| &*mount.place).collect();
            let places = if places.is_empty() { vec![version.usual_mount()] } else { places };
            let below = Path::new(path.trim_start_matches('/'));
            let either = |place| at(place, below).or_else(|| at(place, Path::new("")));
            shown.extend(places.into_iter().filter_map(either));
        }
        shown.retain(|branch| !found.contains(branch));
        found.extend(shown);
    }
    found
}

/// One line of mountinfo: `36 35 98:0 ROOT PLACE OPTIONS FIELDS - TYPE SOURCE OPTIONS`.
fn mount(line: &str) -> Option<Mount> {
    let (left, right) = line.split_once(" - ")?;
    let mut left = left.split(' ').skip(3);
    let (root, place) = (left.next()?, left.next()?);
    let mut right = right.split(' ');
    let (kind, options) = (right.next()?, right.nth(1).unwrap_or_default());
    let version = match kind {
        "cgroup2" => Version::Two,
        "cgroup" if options.split(',').any(|option| option == "memory") => Version::One,
        _ => return None,
    };
    Some(Mount { version, root: unescaped(root).into(), place: unescaped(place).into() })
}

/// Spaces and the like stand in mountinfo as `\040`.
fn unescaped(text: &str) -> String {
    let mut parts = text.split('\\');
    let mut plain = parts.next().unwrap_or_default().to_string();
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                plain.push(char::from(code));
                plain.push_str(&part[3..]);
            }
            None => {
                plain.push('\\');
                plain.push_str(part);
            }
        }
    }
    plain
}

/// A limit in bytes, `Some(None)` where the file says that there is none.
fn limit_of(text: &str) -> Option<Option<u64>> {
    match text.trim() {
        "max" => Some(None),
        number => number.parse().ok().map(|bytes| Some(bytes).filter(|of| *of < NO_LIMIT)),
    }
}

/// What stands behind `field` in lines of a name and a number.
fn number_of(text: &str, field: &str) -> Option<u64> {
    text.lines().find_map(|line| {
        let mut words = line.split_whitespace();
        (words.next()? == field).then(|| words.next()?.parse().ok())?
    })
}

/// What stands behind `field`, which ends with a colon, where the kernel counts in kB.
fn kib_of(text: &str, field: &str) -> Option<u64> {
    number_of(text, field)?.checked_mul(1 << 10)
}

/// The most that this process had in memory so far; None where the kernel does not tell.
pub fn peak_of_this_process() -> Option<u64> {
    kib_of(&std::fs::read_to_string("/proc/self/status").ok()?, "VmHWM:")
}
