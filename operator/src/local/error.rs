//! Why a local run does not start, or go on.

use super::folder::FolderError;
use moe_worker::checkpoint::Refusal;
use moe_worker::checkpoint::aside::WAYS_ON;

/// What keeps a local run from starting or going on; workers' own failures are outcomes.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("cannot create the run's certificate authority")]
    Authority(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot start a worker process")]
    Spawn(#[source] std::io::Error),
    #[error("cannot read the checkpoints of this run")]
    Checkpoints(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("no checkpoint in {} can be used: {}\n  {WAYS_ON}", .0.name, .0.why())]
    Refused(Refusal),
    #[error(
        "--fresh: {name} in {location} is whole, and the run goes on from it; give the job another \
         --name to begin anew"
    )]
    Usable { name: String, location: String },
    #[error("--fresh: {name} cannot be set aside: {why}; move it away by hand")]
    NotAside { name: String, why: String },
    #[error("the asynchronous runtime failed")]
    Runtime(#[from] std::io::Error),
}

impl LocalError {
    pub fn exit_code(&self) -> i32 {
        match self {
            LocalError::Folder(error) => error.exit_code(),
            LocalError::Checkpoints(_) | LocalError::Refused(_) => 3,
            LocalError::Usable { .. } => 2,
            _ => 1,
        }
    }
}
