//! What a worker can measure of its machine without computing on a GPU. What follows from it is
//! decided elsewhere (`moejob_plan::preflight`).

use super::affinity::bind;
use super::machine::{Machine, NumaNode, allowed};
use moejob_kernels::cuda::{Monitor, Nvml, uuid_of, uuid_text};
use moejob_protocol::cpus::cpu_text;
use std::sync::atomic::{AtomicBool, Ordering};
use std::thread::ScopedJoinHandle;
use std::time::Instant;

/// Threads that copy at once: enough to fill the memory of a NUMA node of the machines known.
const THREADS_MAX: usize = 16;
/// Of each thread: beyond its share of the caches.
const COPY_BYTES: usize = 32 << 20;
/// The fastest counts: what else runs on the machine makes copies slower and never faster.
const COPIES: usize = 5;
/// GPUs of a node.
const GPUS_MAX: usize = 64;

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

/// What the driver tells of a GPU that does nothing.
#[derive(Clone, Debug, PartialEq)]
pub struct GpuState {
    /// `GPU 0 (GPU-8-4-4-4-12)`
    pub name: String,
    /// Why its clock is low, without what an idle GPU does by itself; empty: it is not.
    pub slowed_by: Vec<&'static str>,
    pub ecc_uncorrected: Option<u64>,
}

/// The GPUs that this process may use, by NVML.
///
/// # Errors
/// There is no driver, or no NVML.
pub fn gpu_states() -> Result<Vec<GpuState>, String> {
    let nvml = Nvml::load().map_err(|error| error.to_string())?;
    let mut states = Vec::new();
    for ordinal in 0..GPUS_MAX {
        let uuid = match uuid_of(ordinal) {
            Ok(uuid) => uuid,
            Err(error) if ordinal == 0 => return Err(error.to_string()),
            Err(_) => break,
        };
        let name = format!("GPU {ordinal} ({})", uuid_text(uuid));
        let monitor = Monitor::open(&nvml, uuid).map_err(|error| format!("{name}: {error}"))?;
        let reading = monitor.read();
        let (slowed_by, ecc_uncorrected) = (reading.slowed_by, reading.ecc_uncorrected);
        states.push(GpuState { name, slowed_by, ecc_uncorrected });
    }
    Ok(states)
}
