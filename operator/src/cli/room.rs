//! Whether this machine has the memory that a job wants: asked before a worker is started.
//!
//! ```text
//! /proc/meminfo, control groups (v1, v2), ulimit --> Limit --judge--> why it cannot run, or advice
//! ```

use moe_worker::attempt::pace::kernel_bytes;
use moejob_manifest::Job;
use moejob_manifest::profile::Backend;
use moejob_plan::observed::Size;
use moejob_plan::placement::{self, gib};
use moejob_protocol::memory::{OFFLOADED_MASTERS, OFFLOADED_MOMENTS, Part};
use rustix::process::{Resource, getrlimit};
use std::path::Path;

/// Of larger gangs each rank is taken for the first, which needs most.
const RANKS_COUNTED_MAX: u32 = 64;
/// The control groups of processes that are nested in each other at most.
const DEPTH_MAX: usize = 64;

/// What a worker's process writes to beside its state: the allocator's own, stacks, certificates. A
/// worker of the smallest preset ended under `ulimit -d 30000`, and ran under 32000; its state is
/// 25.5 MiB.
const PROCESS_DATA: u64 = 4 << 20;
/// Addresses that it reserves beside its state: the program, libraries, stacks. The same worker,
/// whose state reserves 28.3 MiB, ended under `ulimit -v 72000` and ran under 80000.
const PROCESS_ADDRESSES: u64 = 45 << 20;

/// Bytes that a job wants.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Wish {
    pub workers: u32,
    /// Of all workers: with even routing, and what more there may be.
    pub even: u64,
    pub kept: u64,
    /// When more is wanted, and what follows where it is not there.
    pub more: (&'static str, &'static str),
    /// Of the largest worker: with even routing, and the addresses that it reserves.
    pub even_each: u64,
    pub reserved_each: u64,
    /// What takes most, and its bytes.
    pub most: Option<(&'static str, u64)>,
}

/// What a bound counts.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Of {
    /// All processes together.
    All,
    /// Each process, by the memory that it writes to.
    EachData,
    /// Each process, by the addresses that it reserves.
    EachAddresses,
}

/// A bound, by where it stands.
#[derive(Clone, Debug, PartialEq, Eq)]
struct Limit {
    of: Of,
    bytes: u64,
    /// As it continues "4.0 GiB are".
    what: String,
    /// What raises it.
    raise: String,
}

/// A job that fits.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Fit {
    pub wish: Wish,
    /// Bytes that all processes together may have, where anything tells.
    pub available: Option<u64>,
    /// What is said of one that fits as long as all goes evenly.
    pub tight: Option<String>,
}

/// Holds the memory of a local job against this machine's.
///
/// # Errors
/// It cannot fit: how much it wants, what there is, and what to change.
pub fn check(job: &Job, size: &Size) -> Result<Fit, String> {
    let (wish, limits) = (wish(job, size), limits(Path::new("/")));
    let tight = judge(&wish, &limits)?;
    let all = limits.iter().filter(|limit| limit.of == Of::All);
    Ok(Fit { wish, available: all.map(|limit| limit.bytes).min(), tight })
}

/// What the workers of a gang of `size` want of the memory of their machine.
pub fn wish(job: &Job, size: &Size) -> Wish {
    let world = size.layout.mesh.world();
    if job.profile.backend == Backend::Cuda {
        let parts = placement::host_memory(job, &size.layout);
        let each =
            |parts: &mut dyn Iterator<Item = &Part>| parts.map(|part| part.bytes).sum::<u64>();
        // A worker on a machine without room for snapshots takes none, and goes on.
        let least = || parts.iter().filter(|part| !part.name.starts_with("snapshots"));
        let most = least().max_by_key(|part| part.bytes);
        let (needed, all) = (each(&mut least()), each(&mut parts.iter()));
        return Wish {
            workers: size.nodes,
            even: needed * u64::from(size.nodes),
            kept: all * u64::from(size.nodes),
            more: (
                "with copies of its state in memory",
                "it keeps none, and a loss goes back to the last checkpoint",
            ),
            even_each: needed,
            reserved_each: 0,
            most: most.map(|part| (part.name, part.bytes)),
        };
    }
    let first = placement::memory(job, &size.layout, 0);
    let counted = world.min(RANKS_COUNTED_MAX);
    let rest = u64::from(world - counted);
    let (mut even, mut kept) = (first.balanced * rest, first.committed * rest);
    for rank in 0..counted {
        let memory = placement::memory(job, &size.layout, rank);
        even += memory.balanced;
        kept += memory.committed;
    }
    let most = first.parts.iter().max_by_key(|part| part.bytes);
    Wish {
        workers: size.nodes,
        even,
        kept,
        more: ("where its router spreads tokens unevenly", "the system may end it"),
        even_each: first.balanced,
        reserved_each: first.worst,
        most: most.map(|part| (part.name, part.bytes)),
    }
}

fn judge(wish: &Wish, limits: &[Limit]) -> Result<Option<String>, String> {
    let wants = |bytes: u64| match wish.workers {
        1 => format!("the job wants {} of memory", gib(bytes)),
        workers => format!("the job wants {} of memory for {workers} workers", gib(bytes)),
    };
    let each = |bytes: u64| format!("a worker wants {} of memory", gib(bytes));
    for limit in limits {
        let (needed, sentence) = match limit.of {
            Of::All => (wish.even, wants(wish.even)),
            Of::EachData => {
                let bytes = wish.even_each + PROCESS_DATA;
                (bytes, each(bytes))
            }
            Of::EachAddresses => {
                let bytes = wish.reserved_each + PROCESS_ADDRESSES;
                (bytes, each(bytes))
            }
        };
        if needed > limit.bytes {
            let (bytes, what) = (gib(limit.bytes), &limit.what);
            let advice = advice(wish, &limit.raise);
            return Err(format!("{sentence}, and {bytes} are {what}\n  {advice}"));
        }
    }
    let tight = limits.iter().find(|limit| limit.of == Of::All && wish.kept > limit.bytes);
    Ok(tight.map(|limit| {
        let (bytes, what) = (gib(limit.bytes), &limit.what);
        format!(
            "{} {}, and {bytes} are {what}: {}. {}",
            wants(wish.kept),
            wish.more.0,
            wish.more.1,
            advice(wish, &limit.raise)
        )
    }))
}

/// What to change, after what takes most.
fn advice(wish: &Wish, raise: &str) -> String {
    let Some((name, bytes)) = wish.most else { return raise.to_string() };
    // Of the smallest models: no other model needs less.
    if name == "process" {
        return raise.to_string();
    }
    let lower = match name {
        "activations" | "scratch" | "logits" | "routed rows" | "exchange" => {
            "a smaller training.microBatchSize or data.sequenceLength needs less"
        }
        OFFLOADED_MASTERS | OFFLOADED_MOMENTS => {
            "training.momentDtype: bf16 needs less, training.offload: none nothing of it"
        }
        _ => "a smaller model needs less: fewer layers, experts, or a smaller hiddenSize",
    };
    let largest = gib(bytes);
    format!("most of it are {name}, {largest} of the first rank; {lower}; or {raise}")
}

/// Every bound on memory of the machine whose `/proc` and `/sys` lie under `root`.
fn limits(root: &Path) -> Vec<Limit> {
    let mut limits = Vec::new();
    let meminfo = root.join("proc/meminfo");
    let of = |field| kernel_bytes(&meminfo.to_string_lossy(), field);
    if let Some(available) = of("MemAvailable:") {
        limits.push(Limit {
            of: Of::All,
            bytes: available + of("SwapFree:").unwrap_or(0),
            what: "available on this machine".to_string(),
            raise: "end what else uses the memory".to_string(),
        });
    }
    limits.extend(groups(root));
    for (resource, of, option) in
        [(Resource::Data, Of::EachData, "-d"), (Resource::As, Of::EachAddresses, "-v")]
    {
        if let Some(bytes) = getrlimit(resource).current {
            limits.push(Limit {
                of,
                bytes,
                what: format!("what `ulimit {option}` lets a process have"),
                raise: format!("raise it: `ulimit {option} unlimited`"),
            });
        }
    }
    limits
}

/// What is left in the control groups that this process is in, and in those around them.
fn groups(root: &Path) -> Vec<Limit> {
    let text = std::fs::read_to_string(root.join("proc/self/cgroup")).unwrap_or_default();
    let mut limits = Vec::new();
    for line in text.lines() {
        // `0::/path` is version 2, `9:memory:/path` version 1.
        let mut parts = line.splitn(3, ':').skip(1);
        let (Some(controllers), Some(path)) = (parts.next(), parts.next()) else { continue };
        let (base, names) = match controllers {
            "" => (root.join("sys/fs/cgroup"), ["memory.max", "memory.current", "inactive_file "]),
            of if of.split(',').any(|of| of == "memory") => (
                root.join("sys/fs/cgroup/memory"),
                ["memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file "],
            ),
            _ => continue,
        };
        // In a container the path may be the host's, and its own group the root.
        for folder in Path::new(path.trim_start_matches('/')).ancestors().take(DEPTH_MAX) {
            let folder = base.join(folder);
            limits.extend(left(&folder, names));
        }
    }
    limits
}

/// Of one group. What files have in the page cache is given back when it is needed.
fn left(folder: &Path, [limit, usage, cached]: [&str; 3]) -> Option<Limit> {
    let read = |name: &str| std::fs::read_to_string(folder.join(name)).ok();
    // `max`, and in version 1 a number above all machines, are no limit.
    let limit: u64 = read(limit)?.trim().parse().ok().filter(|bytes| *bytes < 1 << 60)?;
    let usage: u64 = read(usage)?.trim().parse().ok()?;
    let stat = read("memory.stat").unwrap_or_default();
    let cached = stat.lines().find_map(|line| line.strip_prefix(cached)?.trim().parse().ok());
    let used = usage.saturating_sub(cached.unwrap_or(0u64));
    Some(Limit {
        of: Of::All,
        bytes: limit.saturating_sub(used),
        what: format!("left of the {} that its control group allows", gib(limit)),
        raise: "give the container, slice or job of this machine more memory".to_string(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    const GIB: u64 = 1 << 30;

    fn wish() -> Wish {
        Wish {
            workers: 4,
            even: 8 * GIB,
            kept: 12 * GIB,
            more: ("where its router spreads tokens unevenly", "the system may end it"),
            even_each: 2 * GIB,
            reserved_each: 5 * GIB,
            most: Some(("activations", GIB)),
        }
    }

    fn limit(of: Of, bytes: u64) -> Limit {
        let (what, raise) = ("available here".to_string(), "end what else runs".to_string());
        Limit { of, bytes, what, raise }
    }

    #[test]
    fn what_cannot_fit_is_refused_with_what_to_change() {
        assert_eq!(judge(&wish(), &[]), Ok(None));
        assert_eq!(judge(&wish(), &[limit(Of::All, 12 * GIB)]), Ok(None));
        let refused = judge(&wish(), &[limit(Of::All, 7 * GIB)]).expect_err("refused");
        assert_eq!(
            refused,
            "the job wants 8.0 GiB of memory for 4 workers, and 7.0 GiB are available here\n  \
             most of it are activations, 1.0 GiB of the first rank; a smaller \
             training.microBatchSize or data.sequenceLength needs less; or end what else runs"
        );
        let tight = judge(&wish(), &[limit(Of::All, 9 * GIB)]).expect("fits").expect("a word");
        assert!(tight.starts_with("the job wants 12.0 GiB of memory for 4 workers where"));
        let (data, addresses) = (2 * GIB + PROCESS_DATA, 5 * GIB + PROCESS_ADDRESSES);
        let bounds = [(Of::EachData, 2 * GIB, data), (Of::EachAddresses, 5 * GIB, addresses)];
        for (of, room, enough) in bounds {
            let refused = judge(&wish(), &[limit(of, room)]).expect_err("refused");
            assert!(refused.starts_with("a worker wants "), "{refused}");
            assert_eq!(judge(&wish(), &[limit(of, enough)]), Ok(None));
        }
    }

    #[test]
    fn control_groups_of_both_versions_are_read_upwards() {
        let home = tempfile::tempdir().expect("a folder");
        let put = |name: &str, text: &str| {
            let path = home.path().join(name);
            std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
            std::fs::write(path, text).expect("a file");
        };
        put("proc/self/cgroup", "0::/a/b\n");
        put("sys/fs/cgroup/a/b/memory.max", "max\n");
        put("sys/fs/cgroup/a/memory.max", "4096000\n");
        put("sys/fs/cgroup/a/memory.current", "3000000\n");
        put("sys/fs/cgroup/a/memory.stat", "anon 1\ninactive_file 1000000\n");
        let left = |root: &Path| groups(root).iter().map(|of| of.bytes).collect::<Vec<_>>();
        assert_eq!(left(home.path()), [2_096_000]);
        put("proc/self/cgroup", "5:cpu:/x\n4:hugetlb,memory:/docker/of-the-host\n");
        put("sys/fs/cgroup/memory/memory.limit_in_bytes", "5000\n");
        put("sys/fs/cgroup/memory/memory.usage_in_bytes", "1000\n");
        assert_eq!(left(home.path()), [4_000]);
        put("sys/fs/cgroup/memory/memory.limit_in_bytes", "9223372036854771712\n");
        assert_eq!(left(home.path()), [0; 0]);
        put("proc/meminfo", "MemTotal: 9 kB\nMemAvailable: 3 kB\nSwapFree: 1 kB\n");
        assert_eq!(limits(home.path())[0].bytes, 4096);
    }
}
