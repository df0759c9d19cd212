//! What NCCL writes down of what it builds: a file in this process's memory.
//!
//! ```text
//! begin(): before there is a second thread; NCCL_DEBUG.. point into memory
//! news():  what was written since the last call -> moejob_nccl::log::read
//! built(): of a rank, for the leader
//! ```
//! A file on disk would need a folder that is this engine's alone and is removed however it ends.
//! NCCL opens the file by its path below /proc, so nothing has to be handed to it.

use moejob_kernels::cuda::shares;
use moejob_nccl::log::{self, Log};
use moejob_protocol::links::{Built, NEIGHBOURS_MAX};
use rustix::fs::{FallocateFlags, MemfdFlags, fallocate, memfd_create};
use std::fs::File;
use std::os::fd::AsRawFd;
use std::os::unix::fs::FileExt;
use std::sync::{Mutex, PoisonError};

/// What is read at once. A gang of 4,096 ranks writes a few hundred KB for each of them; what is
/// built first is what is looked for.
const LOG_BYTES_MAX: usize = 4 << 20;

/// With what NCCL writes what is needed: communicators (INIT) and their rings and trees (GRAPH).
const SETTINGS: [(&str, &str); 2] = [("NCCL_DEBUG", "INFO"), ("NCCL_DEBUG_SUBSYS", "INIT,GRAPH")];
const FILE: &str = "NCCL_DEBUG_FILE";
/// What NCCL takes for the name of the machine. It refuses two ranks of one machine on one GPU.
const HOST: &str = "NCCL_HOSTID";

/// Of this process.
static NOTES: Mutex<Notes> = Mutex::new(Notes::None("NCCL's log is read in engines alone"));

enum Notes {
    /// There are none, and why.
    None(&'static str),
    /// The file, and how far it was read.
    Here(File, u64),
}

/// Lets NCCL write into memory, unless a person has said what it is to write, or where to. Where
/// ranks share a GPU, each is a machine for NCCL; `device` is this one's of those of the machine.
///
/// # Safety
/// The process has one thread: nobody else reads the environment meanwhile.
pub(crate) unsafe fn begin(device: usize) {
    if shares() > 1 && std::env::var_os(HOST).is_none() {
        let host = std::fs::read_to_string("/proc/sys/kernel/hostname").unwrap_or_default();
        // SAFETY: the caller's promise.
        unsafe { std::env::set_var(HOST, format!("{}-{device}", host.trim())) };
    }
    let theirs = SETTINGS.iter().map(|(name, _)| *name).chain([FILE]);
    let notes = if theirs.into_iter().any(|name| std::env::var_os(name).is_some()) {
        Notes::None("NCCL_DEBUG, NCCL_DEBUG_SUBSYS or NCCL_DEBUG_FILE is set for the job")
    } else if let Ok(file) = memfd_create("nccl-log", MemfdFlags::CLOEXEC).map(File::from) {
        let path = format!("/proc/self/fd/{}", file.as_raw_fd());
        for (name, value) in SETTINGS.into_iter().chain([(FILE, path.as_str())]) {
            // SAFETY: the caller's promise.
            unsafe { std::env::set_var(name, value) };
        }
        Notes::Here(file, 0)
    } else {
        Notes::None("there was no memory for NCCL's log")
    };
    *NOTES.lock().unwrap_or_else(PoisonError::into_inner) = notes;
}

/// What NCCL has written since the last call.
///
/// # Errors
/// Why nothing can be read, for a person.
pub(crate) fn news() -> Result<Log, String> {
    let mut notes = NOTES.lock().unwrap_or_else(PoisonError::into_inner);
    match &mut *notes {
        Notes::None(why) => Err(why.to_string()),
        Notes::Here(file, at) => {
            let text = taken(file, at).map_err(|error| format!("NCCL's log: {error}"))?;
            Ok(log::read(String::from_utf8_lossy(&text).lines()))
        }
    }
}

/// What `file` has from `at` on, at most [`LOG_BYTES_MAX`]. Its memory is given back; whoever
/// writes to it goes on where it was.
fn taken(file: &File, at: &mut u64) -> std::io::Result<Vec<u8>> {
    let end = file.metadata()?.len();
    let new = usize::try_from(end.saturating_sub(*at)).unwrap_or(usize::MAX);
    let mut text = vec![0; new.min(LOG_BYTES_MAX)];
    let mut done = 0;
    while done < text.len() {
        match file.read_at(&mut text[done..], *at + done as u64) {
            Ok(0) => break,
            Ok(count) => done += count,
            Err(error) if error.kind() == std::io::ErrorKind::Interrupted => {}
            Err(error) => return Err(error),
        }
    }
    text.truncate(done);
    *at = end;
    // Only memory is at stake: what cannot be given back stays until the process ends.
    let _ = fallocate(file, FallocateFlags::PUNCH_HOLE | FallocateFlags::KEEP_SIZE, 0, end.max(1));
    Ok(text)
}

/// What the NCCL of `rank` says it has built for all ranks, once it has.
pub(crate) fn built(rank: u32, world: u32, version: String) -> Built {
    let of = news().and_then(|log| told(&log, rank, world));
    match of {
        Ok(built) => Built { version, ..built },
        Err(unknown) => Built { rank, version, unknown, ..Built::default() },
    }
}

fn told(log: &Log, rank: u32, world: u32) -> Result<Built, String> {
    let Some(links) = log.of_all(rank, world).filter(|links| !links.rings.is_empty()) else {
        return Err("NCCL's log has no rings that are understood".to_string());
    };
    let rings = links.rings.values().copied().take(NEIGHBOURS_MAX).collect();
    let parents = links.trees.values().filter_map(|tree| tree.up).take(NEIGHBOURS_MAX).collect();
    let sockets = log.uses_sockets();
    Ok(Built { rank, rings, parents, sockets, ..Built::default() })
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;
    use std::io::Write;

    #[test]
    fn a_golden_log_tells_what_each_rank_has_built() {
        let text = include_str!("../../nccl/tests/logs/2.28.9-two-h200.log");
        let log = log::read(text.lines());
        for (rank, other) in [(0, 1), (1, 0)] {
            let built = told(&log, rank, 2).expect("it is there");
            assert_eq!(built.rings, BTreeSet::from([(other, other)]), "rank {rank}");
            assert_eq!(built.parents, BTreeSet::from([other]), "half of the trees");
            assert!(!built.sockets);
        }
        let why = told(&log, 2, 3).expect_err("no such rank");
        assert_eq!(why, "NCCL's log has no rings that are understood");
        let text = include_str!("../../nccl/tests/logs/2.18-three-nodes.log");
        let built = told(&log::read(text.lines()), 8, 24).expect("it is there");
        assert_eq!(built.rings, BTreeSet::from([(7, 15)]));
        assert_eq!(built.parents, BTreeSet::from([0]), "it is the root of the other one");
    }

    #[test]
    fn what_was_read_is_given_back_and_the_writer_goes_on() {
        let memory = memfd_create("test", MemfdFlags::CLOEXEC).map(File::from).expect("a file");
        // As NCCL opens it.
        let path = format!("/proc/self/fd/{}", memory.as_raw_fd());
        let mut writer = File::create(path).expect("it is opened by its path");
        let mut at = 0;
        assert_eq!(taken(&memory, &mut at).expect("nothing yet"), b"");
        for text in [&b"first\n"[..], b"second\n", b""] {
            writer.write_all(text).expect("written");
            assert_eq!(taken(&memory, &mut at).expect("it is there"), text);
        }
        writer.write_all(&vec![b'x'; LOG_BYTES_MAX + 100]).expect("written");
        assert_eq!(taken(&memory, &mut at).expect("as much as is allowed").len(), LOG_BYTES_MAX);
        writer.write_all(b"later").expect("written");
        assert_eq!(taken(&memory, &mut at).expect("the rest was passed over"), b"later");
        let blocks = std::os::unix::fs::MetadataExt::blocks(&memory.metadata().expect("a file"));
        assert!(blocks * 512 <= 2 << 20, "{blocks} blocks are kept");
    }
}
