//! Why an attempt ends before its last step.

use crate::attempt::api::AttemptEnd;
use crate::checkpoint::fence::FenceError;
use crate::engine::step::StepError;
use crate::failure::Failure;
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

/// What an attempt says whose device could not be left. The next one could not use it, whatever
/// ended this one; but where none will come, why is what counts.
pub(super) fn not_left(ended: Result<AttemptEnd, Stop>, device: Stop) -> Stop {
    match ended {
        Err(stop @ (Stop::Failed(_) | Stop::Fenced(_))) => stop,
        Err(Stop::Comm(_) | Stop::Device(_) | Stop::Elsewhere) | Ok(_) => device,
    }
}

pub(crate) fn storage_failed(message: &str) -> Stop {
    let advice = "make the checkpoint location writable, with room for one more checkpoint";
    fail(1, message, advice)
}

pub(crate) fn fail(exit_code: i32, message: &str, advice: &str) -> Stop {
    let (message, advice) = (message.to_string(), advice.to_string());
    Stop::Failed(Failure { exit_code, message, advice })
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
}
