//! The thin shell of binding: what the kernel is told, and what it says then.

use super::Thread;
pub use crate::engine::step::ENV_CPUS;
use crate::life::affinity::bind;
use moejob_protocol::cpus::cpu_list;
use rustix::process::{Resource, getrlimit};
use rustix::thread::Pid;
use std::io;
use std::path::Path;

/// Threads of one process that are looked at.
const THREADS_MAX: usize = 4096;
/// Memory that must be lockable before cards of InfiniBand can be used. NCCL registers some MiB for
/// each channel and peer, a GiB and more in all; containers have 8 MiB unless they are given more.
const LOCKED_BYTES_MIN: u64 = 4 << 30;

/// Binds this process, before it has a second thread, to the processors that its worker named.
///
/// # Errors
/// What was named is no list, or the kernel refused it. The process goes on where it is.
pub fn take_seat() -> Result<(), String> {
    let Ok(text) = std::env::var(ENV_CPUS) else { return Ok(()) };
    let cpus = cpu_list(&text).filter(|cpus| !cpus.is_empty());
    let cpus = cpus.ok_or_else(|| format!("{ENV_CPUS}: {text:?} is no list of processors"))?;
    bind(None, &cpus).map_err(|error| format!("not bound to {text}: {error}"))
}

/// Binds every thread that this process has. One that begins meanwhile is bound with its maker.
///
/// # Errors
/// The kernel refused the first thread.
pub fn bind_process(cpus: &[u32]) -> io::Result<()> {
    bind(None, cpus)?;
    for entry in std::fs::read_dir("/proc/self/task")?.take(THREADS_MAX) {
        let id = entry?.file_name().to_string_lossy().parse::<i32>().ok();
        // A thread that has ended meanwhile needs no seat.
        if let Some(id) = id.and_then(Pid::from_raw) {
            let _ = bind(Some(id), cpus);
        }
    }
    Ok(())
}

/// The threads of a process, by `/proc/PID/task/*/status`.
///
/// # Errors
/// There is no such process.
pub fn threads(process: u32) -> io::Result<Vec<Thread>> {
    let mut threads = Vec::new();
    for entry in std::fs::read_dir(format!("/proc/{process}/task"))?.take(THREADS_MAX) {
        let path = entry?.path();
        let id = path.file_name().and_then(|name| name.to_str()?.parse().ok());
        if let (Some(id), Some((name, allowed))) = (id, status(&path)) {
            threads.push(Thread { id, name, allowed });
        }
    }
    threads.sort_by_key(|thread| thread.id);
    Ok(threads)
}

/// None where the thread has ended meanwhile.
fn status(task: &Path) -> Option<(String, Vec<u32>)> {
    let text = std::fs::read_to_string(task.join("status")).ok()?;
    let field = |name: &str| {
        text.lines().find_map(|line| line.strip_prefix(name)?.strip_prefix(':')).map(str::trim)
    };
    let allowed = cpu_list(field("Cpus_allowed_list")?)?;
    Some((field("Name").unwrap_or_default().to_string(), allowed))
}

/// How many GPUs this process may open.
pub fn device_files() -> usize {
    let is_gpu = |entry: io::Result<std::fs::DirEntry>| {
        let name = entry.ok()?.file_name();
        let number = name.to_str()?.strip_prefix("nvidia")?;
        number.parse::<u32>().ok()
    };
    std::fs::read_dir("/dev").into_iter().flatten().filter_map(is_gpu).count()
}

/// Bytes that this process may lock in memory; none: as many as it likes.
pub fn locked_bytes_max() -> Option<u64> {
    getrlimit(Resource::Memlock).current
}

/// What to say of a limit that is too small for cards of InfiniBand.
pub fn too_little_lockable(limit: Option<u64>) -> Option<String> {
    let limit = limit.filter(|limit| *limit < LOCKED_BYTES_MIN)?;
    let kib = limit >> 10;
    Some(format!(
        "only {kib} KiB of memory may be locked: registering memory with the InfiniBand cards will \
         fail and NCCL take TCP. Set LimitMEMLOCK=infinity for containerd on the node (`systemctl \
         edit containerd`); the capability IPC_LOCK does not help a container that is not root"
    ))
}
