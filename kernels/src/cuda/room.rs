//! Whether a GPU, and its host, have the memory that is planned: asked before any of it is taken.
//!
//! ```text
//! Wanted, what driver and system tell --lack--> none: there is room; else what is missing, of what
//! ```
//! What is missing may come: a process that was killed gives its memory back some time later.

use std::fmt::Write;

use crate::cuda::driver::Gpu;
use crate::cuda::error::CudaError;
use crate::cuda::nvml::{GpuProcess, Monitor, Nvml};
use crate::memory_bounds::{Bound, MemoryBounds};

/// Bytes that are planned.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct Wanted {
    /// Of the GPU: what is taken next, and what follows it.
    pub arena: usize,
    /// What of the arena peers may read.
    pub shared: usize,
    /// What of the part that grows has memory from the beginning.
    pub committed: usize,
    pub beside: usize,
    pub host: usize,
}

/// What there is.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
struct There {
    free: usize,
    total: usize,
    /// What bounds the host's memory most.
    host: Option<Bound>,
}

/// What is missing.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(crate) enum Lack {
    Device { wanted: usize, free: usize, total: usize },
    Host { wanted: usize, bound: Bound },
}

impl Lack {
    /// Waiting for others cannot help.
    pub fn is_for_ever(&self) -> bool {
        match self {
            Lack::Device { wanted, total, .. } => wanted > total,
            Lack::Host { wanted, bound } => *wanted as u64 > bound.limit,
        }
    }

    /// In words, with who may have what is missing.
    pub fn refusal(self, gpu: &Gpu) -> CudaError {
        match self {
            Lack::Device { wanted, free, total } => {
                let device = format!("GPU {} ({})", gpu.ordinal(), gpu.name());
                let why = words(&device, [wanted, free, total], others(gpu).as_deref());
                CudaError::NoRoom { why }
            }
            Lack::Host { wanted, bound } => {
                let limit = gib(bound.limit as usize);
                let left = gib(bound.left as usize);
                let why = format!("{left} are {}; {}", bound.left_of(&limit), bound.raise());
                CudaError::HostMemory { bytes: wanted, why }
            }
        }
    }
}

/// What of `wanted` is not there at the moment.
pub(crate) fn lack(gpu: &Gpu, wanted: Wanted) -> Result<Option<Lack>, CudaError> {
    let (free, total) = gpu.memory()?;
    let bounds = if wanted.host > 0 { MemoryBounds::of_this_process() } else { Default::default() };
    Ok(judge(wanted, There { free, total, host: bounds.least_left().cloned() }))
}

fn judge(wanted: Wanted, there: There) -> Option<Lack> {
    let There { free, total, host } = there;
    let parts = [wanted.arena, wanted.shared, wanted.committed, wanted.beside];
    let of_device = parts.into_iter().fold(0, usize::saturating_add);
    if of_device > free {
        return Some(Lack::Device { wanted: of_device, free, total });
    }
    let bound = host.filter(|bound| wanted.host as u64 > bound.left)?;
    Some(Lack::Host { wanted: wanted.host, bound })
}

/// Processes of others on the GPU, and their names; none where the driver does not tell.
fn others(gpu: &Gpu) -> Option<Vec<(GpuProcess, String)>> {
    let monitor = Nvml::load().and_then(|nvml| Monitor::open(&nvml, gpu.uuid())).ok()?;
    let mut others = monitor.processes()?;
    others.retain(|process| process.pid != std::process::id());
    let named = |process: GpuProcess| {
        let name = std::fs::read_to_string(format!("/proc/{}/comm", process.pid));
        (process, name.unwrap_or_default().trim().to_owned())
    };
    Some(others.into_iter().map(named).collect())
}

/// `[wanted, free, total]` bytes of `device`, and who else computes on it.
fn words(
    device: &str,
    bytes: [usize; 3],
    others: Option<&[(GpuProcess, String)]>,
) -> String {
    let [wanted, free, total] = bytes.map(gib);
    let mut words = format!(
        "{wanted} of {device} are planned, and {free} of its {total} are free"
    );
    match others {
        None => words.push_str("; the driver does not tell who else uses it"),
        Some([]) => words.push_str(
            "; no other process is seen from here, so it may be one of another container, or one \
             that has just ended",
        ),
        Some(others) => {
            for (at, (process, name)) in others.iter().enumerate() {
                let sign = if at == 0 { ":" } else { "," };
                let _ = write!(words, "{sign} process {}", process.pid);
                if !name.is_empty() {
                    let _ = write!(words, " ({name})");
                }
                match process.bytes {
                    Some(bytes) => {
                        let _ = write!(words, " has {}", gib(bytes as usize));
                    }
                    None => words.push_str(" uses it, too"),
                }
            }
        }
    }
    words
}

fn gib(bytes: usize) -> String {
    format!("{:.1} GiB", bytes as f64 / f64::from(1 << 30))
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::memory_bounds::BoundSource;

    const GIB: usize = 1 << 30;

    #[test]
    fn there_is_room_or_something_is_missing() {
        let [limit, left] = [12, 9].map(|of| (of * GIB) as u64);
        let bound = Bound { by: BoundSource::Machine, limit, left };
        let there = There { free: 50 * GIB, total: 80 * GIB, host: Some(bound.clone()) };
        let of = |arena, beside, host| {
            let [arena, beside, host] = [arena, beside, host].map(|of| of * GIB);
            let wanted = Wanted { arena, beside, host, ..Wanted::default() };
            judge(wanted, there.clone())
        };
        assert_eq!(of(48, 2, 9), None);
        let device = |wanted: usize| {
            Some(Lack::Device { wanted: wanted * GIB, free: 50 * GIB, total: 80 * GIB })
        };
        assert_eq!((of(49, 2, 0), of(81, 0, 10)), (device(51), device(81)));
        assert_eq!(of(1, 1, 10), Some(Lack::Host { wanted: 10 * GIB, bound }));
        let lasts = [of(49, 2, 0), of(81, 0, 0), of(1, 1, 10), of(1, 1, 13)];
        let lasts = lasts.map(|lack| lack.expect("one").is_for_ever());
        assert_eq!(lasts, [false, true, false, true]);
        let unknown = There { host: None, ..there };
        let wanted = Wanted { arena: GIB, host: usize::MAX, ..Wanted::default() };
        assert_eq!(judge(wanted, unknown), None);
    }

    #[test]
    fn who_else_may_have_it_is_named() {
        let said = |others: Option<&[(GpuProcess, String)]>| {
            words("GPU 0 (NVIDIA H100)", [60 * GIB, 50 * GIB, 80 * GIB], others)
        };
        let begin = "60.0 GiB of GPU 0 (NVIDIA H100) are planned, and 50.0 GiB of its 80.0 GiB \
                     are free";
        let of = |pid, bytes: Option<u64>, name: &str| (GpuProcess { pid, bytes }, name.to_owned());
        let others = [of(4711, Some(5 << 30), "python"), of(12, None, "")];
        let named = "process 4711 (python) has 5.0 GiB, process 12 uses it, too";
        assert_eq!(said(Some(&others)), format!("{begin}: {named}"));
        assert!(said(Some(&[])).starts_with(&format!("{begin}; no other process is seen")));
        assert_eq!(said(None), format!("{begin}; the driver does not tell who else uses it"));
    }
}
