//! What bounds the memory of a process, on machines that are folders made of text.

use moejob_kernels::memory_bounds::{BoundSource, Scope, MemoryBounds, Ulimits};
use std::path::Path;

const MEMINFO: &str = "proc/meminfo: MemTotal: 8 kB; MemAvailable: 6 kB; SwapFree: 1 kB";
const MACHINE: &str = "machine: 6144 left of 8192";

/// What the process is in and how groups are mounted, files of groups, and what is found of them.
struct Case {
    name: &'static str,
    cgroup: &'static str,
    mounts: &'static [&'static str],
    files: &'static [&'static str],
    found: &'static [&'static str],
}

const V2: &str = "30 23 0:26 / /sys/fs/cgroup rw,nosuid - cgroup2 cgroup2 rw,nsdelegate";
const V1: &str = "35 31 0:32 / /sys/fs/cgroup/memory rw shared:17 - cgroup cgroup rw,memory";

const CASES: [Case; 13] = [
    Case {
        name: "no group bounds anything",
        cgroup: "0::/",
        mounts: &[V2],
        files: &["sys/fs/cgroup/memory.stat: anon 5"],
        found: &[],
    },
    Case {
        name: "version 2: the least of a group and of those around it is not in the own one",
        cgroup: "0::/slice/pod/container",
        mounts: &[V2],
        files: &[
            "sys/fs/cgroup/slice/memory.max: 5000",
            "sys/fs/cgroup/slice/memory.current: 4000",
            "sys/fs/cgroup/slice/memory.stat: anon 1; inactive_file 500",
            "sys/fs/cgroup/slice/pod/memory.max: max",
            "sys/fs/cgroup/slice/pod/container/memory.max: 7000",
            "sys/fs/cgroup/slice/pod/container/memory.current: 100",
        ],
        found: &[
            "own /sys/fs/cgroup/slice/pod/container/memory.max: 6900 left of 7000",
            "around /sys/fs/cgroup/slice/memory.max: 1500 left of 5000",
        ],
    },
    Case {
        name: "version 2: what is held up counts as what is ended",
        cgroup: "0::/a",
        mounts: &[V2],
        files: &[
            "sys/fs/cgroup/a/memory.max: 5000",
            "sys/fs/cgroup/a/memory.high: 3000",
            "sys/fs/cgroup/a/memory.current: 4000",
        ],
        found: &["own /sys/fs/cgroup/a/memory.high: 0 left of 3000"],
    },
    Case {
        name: "version 2 in a namespace of its own: the mount is the own group",
        cgroup: "0::/",
        mounts: &[
            V2,
            // Of the host, as a node's agent has it: another's groups.
            "31 23 0:26 /../../.. /host/sys/fs/cgroup ro - cgroup2 cgroup2 rw",
        ],
        files: &[
            "sys/fs/cgroup/memory.max: 4096",
            "sys/fs/cgroup/memory.current: 96",
            "host/sys/fs/cgroup/memory.max: 7",
            "host/sys/fs/cgroup/memory.current: 1",
        ],
        found: &["own /sys/fs/cgroup/memory.max: 4000 left of 4096"],
    },
    Case {
        name: "version 2, mounted elsewhere, at a place with a space in it",
        cgroup: "0::/a",
        mounts: &["30 23 0:26 / /run/my\\040groups rw - cgroup2 none rw"],
        files: &["run/my groups/a/memory.max: 9", "run/my groups/a/memory.current: 1"],
        found: &["own /run/my groups/a/memory.max: 8 left of 9"],
    },
    Case {
        name: "version 1: nested, and what files have in the page cache is given back",
        cgroup: "5:cpu:/x\n4:hugetlb,memory:/jobs/one",
        mounts: &["33 31 0:29 / /sys/fs/cgroup/cpu rw - cgroup cgroup rw,cpu", V1],
        files: &[
            "sys/fs/cgroup/memory/memory.limit_in_bytes: 9223372036854771712",
            "sys/fs/cgroup/memory/jobs/memory.limit_in_bytes: 6000",
            "sys/fs/cgroup/memory/jobs/memory.usage_in_bytes: 5000",
            "sys/fs/cgroup/memory/jobs/memory.stat: total_inactive_file 1000",
            "sys/fs/cgroup/memory/jobs/one/memory.limit_in_bytes: 9223372036854771712",
            "sys/fs/cgroup/memory/jobs/one/memory.usage_in_bytes: 5",
        ],
        found: &["around /sys/fs/cgroup/memory/jobs/memory.limit_in_bytes: 2000 left of 6000"],
    },
    Case {
        name: "version 1 in a container: the path is the host's, and so is the mount's root",
        cgroup: "4:memory:/docker/abc",
        mounts: &["35 31 0:32 /docker/abc /sys/fs/cgroup/memory ro - cgroup cgroup rw,memory"],
        files: &[
            "sys/fs/cgroup/memory/memory.limit_in_bytes: 500",
            "sys/fs/cgroup/memory/memory.usage_in_bytes: 100",
        ],
        found: &["own /sys/fs/cgroup/memory/memory.limit_in_bytes: 400 left of 500"],
    },
    Case {
        name: "version 1 in a container of which no mount is known",
        cgroup: "4:memory:/docker/abc",
        mounts: &[],
        files: &[
            "sys/fs/cgroup/memory/memory.limit_in_bytes: 500",
            "sys/fs/cgroup/memory/memory.usage_in_bytes: 100",
        ],
        found: &["own /sys/fs/cgroup/memory/memory.limit_in_bytes: 400 left of 500"],
    },
    Case {
        name: "version 1: groups above the mount are known by one number",
        cgroup: "4:memory:/",
        mounts: &[V1],
        files: &[
            "sys/fs/cgroup/memory/memory.limit_in_bytes: 9223372036854771712",
            "sys/fs/cgroup/memory/memory.usage_in_bytes: 100",
            "sys/fs/cgroup/memory/memory.stat: cache 3; hierarchical_memory_limit 900; \
             total_inactive_file 50",
        ],
        found: &["own /sys/fs/cgroup/memory/memory.stat: 850 left of 900"],
    },
    Case {
        name: "version 1: a group that does not count its children bounds none",
        cgroup: "4:memory:/a/b",
        mounts: &[V1],
        files: &[
            "sys/fs/cgroup/memory/a/memory.use_hierarchy: 0",
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes: 10",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes: 1",
            "sys/fs/cgroup/memory/a/b/memory.use_hierarchy: 0",
            "sys/fs/cgroup/memory/a/b/memory.limit_in_bytes: 20",
            "sys/fs/cgroup/memory/a/b/memory.usage_in_bytes: 1",
        ],
        found: &["own /sys/fs/cgroup/memory/a/b/memory.limit_in_bytes: 19 left of 20"],
    },
    Case {
        name: "both at once: memory is version 1's",
        cgroup: "4:memory:/a\n0::/user.slice",
        mounts: &[V1, "41 31 0:38 / /sys/fs/cgroup/unified rw - cgroup2 cgroup2 rw"],
        files: &[
            "sys/fs/cgroup/memory/a/memory.limit_in_bytes: 20",
            "sys/fs/cgroup/memory/a/memory.usage_in_bytes: 1",
            "sys/fs/cgroup/unified/user.slice/cgroup.procs: 1",
        ],
        found: &["own /sys/fs/cgroup/memory/a/memory.limit_in_bytes: 19 left of 20"],
    },
    Case {
        name: "what cannot be read is told, and nothing else is lost by it",
        cgroup: "0::/a/b",
        mounts: &[V2],
        files: &[
            "sys/fs/cgroup/a/b/memory.max: many",
            "sys/fs/cgroup/a/memory.max: 70",
        ],
        found: &[
            "around /sys/fs/cgroup/a/memory.max: 70 left of 70",
            "unread: /sys/fs/cgroup/a/b/memory.max: `many` is no number of bytes",
            "unread: /sys/fs/cgroup/a/memory.current does not tell what is used: taken for none",
        ],
    },
    Case {
        name: "a limit of nothing is one",
        cgroup: "0::/a",
        mounts: &[V2],
        files: &["sys/fs/cgroup/a/memory.max: 0", "sys/fs/cgroup/a/memory.current: 4"],
        found: &["own /sys/fs/cgroup/a/memory.max: 0 left of 0"],
    },
];

fn put(root: &Path, file: &str) {
    let (name, text) = file.split_once(": ").expect("a name and a text");
    let path = root.join(name);
    std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
    std::fs::write(path, text.replace("; ", "\n") + "\n").expect("a file");
}

fn said(bounds: &MemoryBounds) -> Vec<String> {
    let line = |bound: &moejob_kernels::memory_bounds::Bound| {
        let by = match &bound.by {
            BoundSource::Machine => "machine".to_string(),
            BoundSource::Group { folder, file, own } => {
                let whose = if *own { "own" } else { "around" };
                format!("{whose} {}", folder.join(file).display())
            }
            BoundSource::Ulimit(letter) => format!("ulimit -{letter}"),
        };
        format!("{by}: {} left of {}", bound.left, bound.limit)
    };
    let unread = bounds.unread.iter().map(|why| format!("unread: {why}"));
    bounds.bounds.iter().map(line).chain(unread).collect()
}

#[test]
fn groups_of_both_versions_are_read_up_to_their_mounts() {
    let home = std::env::temp_dir().join(format!("moejob-bounds-{}", std::process::id()));
    for case in &CASES {
        put(&home, MEMINFO);
        put(&home, &format!("proc/self/cgroup: {}", case.cgroup));
        put(&home, &format!("proc/self/mountinfo: {}", case.mounts.join("\n")));
        case.files.iter().for_each(|file| put(&home, file));
        let bounds = MemoryBounds::under(&home, Ulimits::default());
        let expected: Vec<&str> = [MACHINE].iter().chain(case.found).copied().collect();
        assert_eq!(said(&bounds), expected, "{}", case.name);
        assert_eq!(bounds.swap, 1024);
        std::fs::remove_dir_all(&home).expect("a folder");
    }
}

#[test]
fn the_limits_of_a_process_are_no_limits_of_all() {
    let home = std::env::temp_dir().join(format!("moejob-ulimits-{}", std::process::id()));
    put(&home, MEMINFO);
    let ulimits = Ulimits { data: Some(100), addresses: Some(200) };
    let bounds = MemoryBounds::under(&home, ulimits);
    let expected = [MACHINE, "ulimit -d: 100 left of 100", "ulimit -v: 200 left of 200"];
    assert_eq!(said(&bounds), expected);
    assert_eq!(bounds.least_left().map(|bound| bound.left), Some(6144));
    let scopes: Vec<Scope> = bounds.bounds.iter().map(|bound| bound.scope()).collect();
    assert_eq!(scopes, [Scope::All, Scope::EachData, Scope::EachAddresses]);
    std::fs::remove_dir_all(&home).expect("a folder");
    let nothing = MemoryBounds::under(&home, Ulimits::default());
    assert!(nothing.bounds.is_empty() && nothing.unread.len() == 1, "{nothing:?}");
}

#[test]
fn this_machine_has_memory() {
    let bounds = MemoryBounds::of_this_process();
    let least = bounds.least_left().expect("a bound");
    assert!(least.left > 1 << 20 && least.left <= least.limit, "{bounds:?}");
    assert!(moejob_kernels::memory_bounds::peak_of_this_process().is_some_and(|of| of > 1 << 20));
}
