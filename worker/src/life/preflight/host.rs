//! What a worker measures of its machine by itself: memory of the host, and what the kernel allows.

use crate::life::affinity::bind;
use crate::life::binding::apply::{locked_bytes_max, too_little_lockable};
use crate::life::machine::{Machine, NumaNode, allowed};
use moejob_protocol::cpus::cpu_text;
use moejob_protocol::preflight::{Check, Grade, Measured, Value};
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Instant;

/// Threads that copy at once: enough to fill the memory of a NUMA node of the machines known.
const THREADS_MAX: usize = 16;
/// Of each thread: beyond its share of the caches.
const COPY_BYTES: usize = 32 << 20;
/// The fastest counts: what else runs on the machine makes copies slower and never faster.
const COPIES: usize = 5;

/// Copies within the memory of one NUMA node.
#[derive(Clone, Debug, PartialEq)]
pub struct HostCopy {
    pub node: u32,
    /// 10^9 bytes that were copied a second; a byte that is read and written counts once.
    pub gigabytes_per_second: f64,
    /// How a thread that was bound to the node's processors differs from that, if it does.
    pub bound: Result<(), String>,
}

/// Of each NUMA node that this process may use, by threads bound there, one node after the other.
pub fn host_copies(machine: &Machine) -> Vec<HostCopy> {
    machine.nodes.iter().filter(|node| !node.allowed.is_empty()).map(host_copy).collect()
}

fn host_copy(node: &NumaNode) -> HostCopy {
    let wanted = node.allowed.len().min(THREADS_MAX);
    let all_are_there = AtomicBool::new(false);
    let copy = || {
        let bound = read_back(&node.allowed);
        // Memory is of the node whose thread touches it first.
        let (from, mut to) = (vec![1_u8; COPY_BYTES], vec![2_u8; COPY_BYTES]);
        while !all_are_there.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let mut fastest = f64::INFINITY;
        for _ in 0..COPIES {
            let begin = Instant::now();
            to.copy_from_slice(std::hint::black_box(&from));
            std::hint::black_box(&mut to);
            fastest = fastest.min(begin.elapsed().as_secs_f64());
        }
        (bound, fastest)
    };
    let results: Vec<(Result<(), String>, f64)> = std::thread::scope(|scope| {
        let start = || std::thread::Builder::new().spawn_scoped(scope, copy);
        let started: Vec<_> = (0..wanted).map(|_| start()).collect();
        all_are_there.store(true, Ordering::Release);
        let end = |thread: std::io::Result<ScopedJoinHandle<'_, _>>| match thread {
            Ok(thread) => thread.join().ok(),
            Err(error) => Some((Err(format!("no thread: {error}")), f64::INFINITY)),
        };
        started.into_iter().filter_map(end).collect()
    });
    // A thread that was not to be had has copied nothing: bytes / infinity.
    let rates = results.iter().map(|(_, seconds)| COPY_BYTES as f64 / seconds.max(1e-9));
    let gigabytes_per_second = rates.sum::<f64>() / 1e9;
    let bound = results.into_iter().map(|(bound, _)| bound).find(Result::is_err).unwrap_or(Ok(()));
    HostCopy { node: node.id, gigabytes_per_second, bound }
}

/// Binds this thread, and asks the kernel where it may run then.
fn read_back(cpus: &[u32]) -> Result<(), String> {
    bind(None, cpus).map_err(|error| format!("not bound to {}: {error}", cpu_text(cpus)))?;
    let found = allowed().map_err(|error| error.to_string())?;
    let (found, planned) = (cpu_text(&found), cpu_text(cpus));
    if found == planned { Ok(()) } else { Err(format!("may use {found}, planned {planned}")) }
}

/// Copies within each NUMA node, and whether threads stay where they are bound.
pub fn measured(machine: &Machine) -> Vec<Measured> {
    let mut measured = Vec::new();
    for copy in host_copies(machine) {
        let of = format!("NUMA node {}", copy.node);
        let bound = match copy.bound {
            Ok(()) => Value::Fine("threads run where they are bound".to_string()),
            Err(what) => Value::Wrong { grade: Grade::Warn, what },
        };
        measured.push(Measured::of_check(Check::Binding, bound).on(of.clone()));
        measured.push(Measured::number("hostCopyGBps", copy.gigabytes_per_second).on(of));
    }
    measured
}

/// Memory that may be locked, which cards of InfiniBand need.
pub fn locked_memory(rdma: bool) -> Measured {
    let limit = locked_bytes_max();
    let value = match too_little_lockable(limit) {
        Some(what) if rdma => Value::Wrong { grade: Grade::Fail, what },
        _ => Value::Fine(match limit {
            Some(bytes) => format!("{} KiB", bytes >> 10),
            None => "without a limit".to_string(),
        }),
    };
    Measured::of_check(Check::LockedMemory, value)
}
