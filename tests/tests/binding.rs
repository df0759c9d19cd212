//! Engines that are bound to NUMA nodes: real processes, on a machine that files say has two.

use moejob_tests::Bench;
use rustix::thread::{CpuSet, Pid, sched_getaffinity, sched_setaffinity};
use std::path::Path;
use std::time::Duration;

const LIMIT: Duration = Duration::from_secs(120);

/// The processors that this test may use.
fn allowed(thread: Option<Pid>) -> Vec<usize> {
    let Ok(set) = sched_getaffinity(thread) else { return Vec::new() };
    (0..CpuSet::MAX_CPU).filter(|cpu| set.is_set(*cpu)).collect()
}

/// A folder like /sys with two NUMA nodes of these processors; none where there is one alone.
fn two_nodes(cpus: &[usize]) -> Option<(tempfile::TempDir, [Vec<usize>; 2])> {
    if cpus.len() < 2 {
        println!("skipped: this machine has one processor, and two nodes need two");
        return None;
    }
    let (left, right) = cpus.split_at(cpus.len() / 2);
    let folder = tempfile::tempdir().expect("a folder");
    let put = |file: &str, cpus: &[usize]| {
        let path = folder.path().join("devices/system").join(file);
        let list: Vec<String> = cpus.iter().map(usize::to_string).collect();
        std::fs::create_dir_all(path.parent().expect("a folder")).expect("a folder");
        std::fs::write(path, list.join(",")).expect("a file");
    };
    put("cpu/online", cpus);
    put("node/node0/cpulist", left);
    put("node/node1/cpulist", right);
    Some((folder, [left.to_vec(), right.to_vec()]))
}

fn environment(folder: &Path) -> [(&'static str, &str); 1] {
    [("MOEJOB_SYS", folder.to_str().expect("a path"))]
}

#[test]
fn engines_that_are_bound_give_the_same_bits() {
    let Some((sys, _)) = two_nodes(&allowed(None)) else { return };
    let one = Bench::small(12, 6, 2);
    assert_eq!(one.run(&[], LIMIT), Some(0), "{}", one.output());
    let bound = Bench::with_engines(12, 6, 2, 2);
    let run = bound.start_with(&["--workers", "1"], &environment(sys.path()));
    assert_eq!(run.wait(LIMIT), Some(0), "{}", bound.output());
    assert_eq!(bound.losses(), one.losses());
    assert_eq!(bound.count("EngineStarted"), 2);
}

/// What the kernel says of every thread of both engines; and that a thread which somebody has let
/// go elsewhere is told.
#[test]
fn engines_run_where_they_are_bound() {
    let all = allowed(None);
    let Some((sys, halves)) = two_nodes(&all) else { return };
    let bench = Bench::with_engines(1_000_000, 1_000_000, 4, 2);
    let _run = bench.start_with(&["--workers", "1"], &environment(sys.path()));
    bench.wait_until("two engines that train", LIMIT, |bench| {
        bench.engine_pids().len() == 2 && bench.metrics().len() > 2
    });
    let pids = bench.engine_pids();
    for (pid, half) in pids.iter().zip(&halves) {
        let tasks = std::fs::read_dir(format!("/proc/{pid}/task")).expect("a process");
        let ids = tasks.filter_map(|task| task.ok()?.file_name().to_str()?.parse().ok());
        let ids: Vec<i32> = ids.collect();
        assert!(ids.len() > 3, "an engine has threads: {ids:?}");
        for id in ids {
            // One that has ended meanwhile has no processors.
            let found = allowed(Pid::from_raw(id));
            assert!(found.iter().all(|cpu| half.contains(cpu)), "{id} of {pid}: {found:?}");
        }
    }
    assert!(!bench.output().contains("planned"), "{}", bench.output());
    let mut set = CpuSet::new();
    all.iter().for_each(|cpu| set.set(*cpu));
    sched_setaffinity(Pid::from_raw(pids[0]), &set).expect("our own process");
    bench.wait_until("the difference is told", LIMIT, |bench| {
        bench.output().contains(&format!("thread {} ", pids[0]))
    });
    let told = bench.output();
    assert!(told.contains("rank 0 (device 0 of ") && told.contains(", planned "), "{told}");
}
