//! Why a call failed, with what was being done and what to do about it.

use std::error::Error as _;
use std::time::Duration;

use crate::library::Version;

/// After any error of a communicator it is good for [`crate::abandon`] alone.
#[derive(Debug, thiserror::Error)]
pub enum Error {
    #[error("NCCL cannot be loaded as {name}{}; install it {HOW}", broken(.name, .source))]
    Missing { name: String, source: libloading::Error },
    #[error(
        "{name} has no {symbol}, which NCCL has from {least} on; install a newer one {HOW}"
    )]
    Symbol { name: String, symbol: &'static str, least: Version, source: libloading::Error },
    #[error("{name} is NCCL {found}; {least} or newer is needed, but below 3; install it {HOW}")]
    Version { name: String, found: Version, least: Version },
    #[error("rank {rank} has NCCL {theirs}, this rank has {ours}; give both the same")]
    Mixed { rank: u32, theirs: Version, ours: Version },
    #[error("{call}: {text} ({code}){}", last_words(.last))]
    Refused { call: &'static str, code: i32, text: String, last: String },
    #[error("{call} was not done within {limit:?}; a peer may be dead or late")]
    Late { call: &'static str, limit: Duration },
    #[error("{call} was left, because this attempt is to end")]
    Stopped { call: &'static str },
    #[error("this NCCL ({found}) has no {call}, which came with {since}")]
    Absent { call: &'static str, found: Version, since: Version },
    #[error("{what} did not end within {limit:?}; this process has to be replaced")]
    Unended { what: String, limit: Duration },
    #[error("starting a thread to end a communicator")]
    Thread { source: std::io::Error },
}

impl Error {
    /// NCCL refused on its own account: no other rank was late, gone, or the first to fail.
    pub fn is_own(&self) -> bool {
        /// `ncclRemoteError`
        const REMOTE: i32 = 6;
        matches!(self, Error::Refused { code, .. } if *code != REMOTE)
    }

    /// NCCL refused or did not come to an end; nothing is missing, and versions agree. A process
    /// that begins anew may not meet it.
    pub fn is_of_process(&self) -> bool {
        matches!(
            self,
            Error::Refused { .. }
                | Error::Late { .. }
                | Error::Stopped { .. }
                | Error::Unended { .. }
                | Error::Thread { .. }
        )
    }
}

/// For every way in which it can be absent.
const HOW: &str = "(package libnccl2, or the wheel nvidia-nccl-cu13, nvidia-nccl-cu12 for drivers \
                   of CUDA 12) and add its folder to LD_LIBRARY_PATH, or name the file in \
                   MOEJOB_NCCL";

/// What the loader says of a file that is there.
fn broken(name: &str, source: &libloading::Error) -> String {
    let said = source.source().map_or_else(|| source.to_string(), ToString::to_string);
    let absent = said.starts_with(name) && said.contains("No such file");
    if absent { String::new() } else { format!(" ({said})") }
}

/// What the library said last, where it said anything.
fn last_words(last: &str) -> String {
    if last.is_empty() { String::new() } else { format!(": {last}") }
}
