//! Why an attempt ends before its last step.

use crate::attempt::api::AttemptEnd;
use crate::checkpoint::fence::FenceError;
use crate::engine::links::NoLinks;
use crate::engine::step::{OpenError, StepError};
use crate::failure::{Failure, advice_on, chain};
use crate::gang::comm::CommError;
use crate::state::rank::DeviceFailed;

/// Why an attempt ended before its last step.
pub(crate) enum Stop {
    Comm(CommError),
    Fenced(u32),
    Failed(Failure),
    /// See [`AttemptEnd::DeviceFailed`].
    Device(String),
    /// The storage has another state than the leader believes, and the leader has been told.
    Elsewhere,
}

impl From<CommError> for Stop {
    fn from(error: CommError) -> Stop {
        Stop::Comm(error)
    }
}

impl From<StepError> for Stop {
    fn from(error: StepError) -> Stop {
        match error {
            StepError::Comm(error) => Stop::Comm(error),
            StepError::Data(error) => Stop::Failed(error.failure()),
            StepError::Device(_) => Stop::Device(error.to_string()),
        }
    }
}

impl From<DeviceFailed> for Stop {
    fn from(error: DeviceFailed) -> Stop {
        Stop::Device(error.to_string())
    }
}

impl From<FenceError> for Stop {
    fn from(error: FenceError) -> Stop {
        match error {
            FenceError::Fenced { claimed, .. } => Stop::Fenced(claimed),
            FenceError::Io { ref source, .. } => storage_failed(&format!("{error}: {source}")),
        }
    }
}

impl Stop {
    /// It came of the step behind so many.
    pub(super) fn in_step(self, step: u64) -> Stop {
        match self {
            Stop::Failed(failure) => Stop::Failed(Failure { step: Some(step), ..failure }),
            other => other,
        }
    }
}

/// What an attempt says whose device could not be left. The next one could not use it, whatever
/// ended this one; but where none will come, why is what counts.
pub(super) fn not_left(ended: Result<AttemptEnd, Stop>, device: Stop) -> Stop {
    match ended {
        Err(stop @ (Stop::Failed(_) | Stop::Fenced(_))) => stop,
        Err(Stop::Comm(_) | Stop::Device(_) | Stop::Elsewhere) | Ok(_) => device,
    }
}

/// What attempt number `attempt` says that has no engine; `trained`: this process was connected
/// with others before.
pub(super) fn not_opened(attempt: u32, trained: bool, error: OpenError) -> Stop {
    let failed = |error: &dyn std::error::Error, advice: &str| {
        fail(1, &format!("the device cannot be made: {}", chain(error)), advice)
    };
    // The gang has trained. A worker that ended would take its snapshots along; an engine does
    // not.
    let again = attempt > 1;
    match error {
        OpenError::Kernel(error) if again && error.is_of_process() => Stop::Device(chain(&error)),
        OpenError::Kernel(error) => failed(&error, advice_on(&error)),
        OpenError::Links(NoLinks::Comm(error)) => Stop::Comm(error),
        OpenError::Links(error) if again && error.is_of_process() => Stop::Device(chain(&error)),
        // A newcomer lacks something. It says so itself, and its worker ends.
        OpenError::Links(error)
            if again && (trained || matches!(error, NoLinks::Elsewhere { .. })) =>
        {
            Stop::Comm(CommError::Aborted { reason: chain(&error) })
        }
        OpenError::Links(error) => failed(&error, "`moejob doctor` tells what this machine has"),
    }
}

pub(crate) fn storage_failed(message: &str) -> Stop {
    let advice = "make the checkpoint location writable, with room for one more checkpoint";
    fail(1, message, advice)
}

pub(crate) fn fail(exit_code: i32, message: &str, advice: &str) -> Stop {
    Stop::Failed(Failure::new(exit_code, message, advice))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_left_ends_its_process_unless_the_job_ends() {
        let left = |ended| not_left(ended, Stop::Device("it hangs".to_string()));
        let aborted = || CommError::Aborted { reason: "a peer hangs".to_string() };
        assert!(matches!(left(Ok(AttemptEnd::Completed { step: 9 })), Stop::Device(_)));
        assert!(matches!(left(Err(Stop::Comm(aborted()))), Stop::Device(_)));
        assert!(matches!(left(Err(Stop::Elsewhere)), Stop::Device(_)));
        assert!(matches!(left(Err(Stop::Fenced(3))), Stop::Fenced(3)));
        assert!(matches!(left(Err(fail(3, "no data", "put it back"))), Stop::Failed(_)));
    }

    #[test]
    fn a_gang_that_has_trained_keeps_its_workers_when_it_cannot_connect() {
        use moejob_nccl::{Error, Version};
        let stop = |attempt, trained, source| {
            let error = NoLinks::Nccl { world: 2, source };
            not_opened(attempt, trained, OpenError::Links(error))
        };
        let refused = || {
            let (text, last) = ("unhandled system error".to_string(), String::new());
            Error::Refused { call: "ncclGetUniqueId", code: 2, text, last }
        };
        let [ours, theirs] = [22_809, 22_705].map(Version::of_code);
        let mixed = || Error::Mixed { rank: 1, theirs, ours };
        // Before the first step the job says what is wrong.
        assert!(matches!(stop(1, false, refused()), Stop::Failed(_)));
        assert!(matches!(stop(1, false, mixed()), Stop::Failed(_)));
        // Later another process may do better, but not where something is missing.
        assert!(matches!(stop(2, false, refused()), Stop::Device(_)));
        assert!(matches!(stop(2, true, refused()), Stop::Device(_)));
        assert!(matches!(stop(2, false, mixed()), Stop::Failed(_)));
        assert!(matches!(stop(2, true, mixed()), Stop::Comm(_)));
        let without = |attempt| {
            let error = NoLinks::Elsewhere { rank: 1, why: "no NCCL".to_string() };
            not_opened(attempt, false, OpenError::Links(error))
        };
        assert!(matches!(without(1), Stop::Failed(_)));
        assert!(matches!(without(2), Stop::Comm(_)));
    }
}
