//! Why an attempt ends before its last step.

use crate::attempt::api::AttemptEnd;
use crate::checkpoint::fence::FenceError;
use crate::disk::may_heal;
use crate::engine::links::{NoLinks, NotLeft};
use crate::engine::step::{OpenError, StepError, device_error};
use crate::failure::{Failure, advice_on, chain};
use crate::gang::comm::CommError;
use crate::state::rank::DeviceError;

/// Why an attempt ended before its last step.
pub(crate) enum Stop {
    Comm(CommError),
    /// This rank or one that it waits for hangs. Whose device can be left was not the one.
    Hangs(String),
    Fenced(u32),
    Failed(Failure),
    /// See [`AttemptEnd::DeviceFailed`].
    Device { message: String, own: bool },
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
            StepError::Device(error) => error.into(),
        }
    }
}

impl From<DeviceError> for Stop {
    fn from(error: DeviceError) -> Stop {
        let message = error.to_string();
        match error {
            DeviceError::Failed(_) => Stop::Device { message, own: true },
            DeviceError::Full(_) => Stop::Device { message, own: false },
            DeviceError::GivenUp(reason) => Stop::Comm(CommError::Aborted { reason }),
            DeviceError::Hangs(_) => Stop::Hangs(message),
        }
    }
}

impl From<FenceError> for Stop {
    fn from(error: FenceError) -> Stop {
        match error {
            FenceError::Fenced { claimed, .. } => Stop::Fenced(claimed),
            FenceError::Io { ref source, .. } if may_heal(source) => {
                stumbled(&format!("{error}: {source}"))
            }
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
/// ended this one; but where none will come, why is what counts. The device is to blame where it
/// says so itself, where nothing came before, or a hang whose place nobody knew: a rank whose
/// device breaks may hear first of a collective that this has broken.
pub(super) fn not_left(ended: Result<AttemptEnd, Stop>, left: NotLeft) -> Stop {
    let NotLeft { words: device, broken } = left;
    let behind = |why: &str| format!("{device}, behind this: {why}");
    match ended {
        Err(stop @ (Stop::Failed(_) | Stop::Fenced(_) | Stop::Device { .. })) => stop,
        Err(Stop::Comm(error)) => {
            Stop::Device { message: behind(&error.to_string()), own: broken }
        }
        Err(Stop::Hangs(why)) => Stop::Device { message: behind(&why), own: true },
        Err(Stop::Elsewhere) | Ok(_) => Stop::Device { message: device, own: true },
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
        OpenError::Kernel(error) if again && error.is_of_process() => {
            device_error(error.of_gpu(), chain(&error), 1).into()
        }
        OpenError::Kernel(error) => failed(&error, advice_on(&error)),
        OpenError::Links(NoLinks::Comm(error)) => Stop::Comm(error),
        OpenError::Links(error) if again && error.is_of_process() => {
            Stop::Device { message: chain(&error), own: error.is_own() }
        }
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

/// The system gives no thread, under a limit of processes for example: the next attempt may get it,
/// and its worker keeps what it holds.
pub(crate) fn no_thread(what: &str, error: &std::io::Error) -> Stop {
    Stop::Comm(CommError::Aborted { reason: format!("there is no thread {what}: {error}") })
}

/// Storage stumbled for longer than patience lasts: another attempt may find it well.
pub(crate) fn stumbled(message: &str) -> Stop {
    fail(75, message, "have the storage looked at; the job goes on when it is well")
}

pub(crate) fn fail(exit_code: i32, message: &str, advice: &str) -> Stop {
    Stop::Failed(Failure::new(exit_code, message, advice))
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_kernels::KernelError;
    use moejob_kernels::cuda::CudaError;

    /// Whether the device is to blame, where its process has to end.
    fn blamed(stop: Stop) -> Option<bool> {
        match stop {
            Stop::Device { own, .. } => Some(own),
            _ => None,
        }
    }

    #[test]
    fn a_device_that_cannot_be_left_is_to_blame_where_nothing_came_before() {
        let words = "it does not end";
        let left = |ended| not_left(ended, NotLeft { words: words.to_string(), broken: false });
        let broken = |ended| not_left(ended, NotLeft { words: words.to_string(), broken: true });
        let lost = || CommError::PeerLost { rank: 3, why: "killed".to_string() };
        let aborted = || CommError::Aborted { reason: "rank 3 is lost".to_string() };
        assert_eq!(blamed(left(Ok(AttemptEnd::Completed { step: 9 }))), Some(true));
        assert_eq!(blamed(left(Err(Stop::Elsewhere))), Some(true));
        assert_eq!(blamed(left(Err(Stop::Hangs("somewhere".to_string())))), Some(true));
        assert_eq!(blamed(left(Err(Stop::Comm(lost())))), Some(false));
        assert_eq!(blamed(left(Err(Stop::Comm(aborted())))), Some(false));
        assert_eq!(blamed(broken(Err(Stop::Comm(aborted())))), Some(true));
        assert!(matches!(broken(Err(Stop::Fenced(3))), Stop::Fenced(3)));
        assert!(matches!(left(Err(Stop::Fenced(3))), Stop::Fenced(3)));
        assert!(matches!(left(Err(fail(3, "no data", "put it back"))), Stop::Failed(_)));
        let (message, own) = ("an illegal address".to_string(), true);
        match left(Err(Stop::Device { message, own })) {
            Stop::Device { message, own: true } => assert_eq!(message, "an illegal address"),
            _ => panic!("what came first is why"),
        }
    }

    #[test]
    fn a_device_is_to_blame_for_its_own_failures_alone() {
        let text = || "words".to_string();
        assert_eq!(blamed(DeviceError::Failed(text()).into()), Some(true));
        assert_eq!(blamed(DeviceError::Full(text()).into()), Some(false));
        assert!(matches!(DeviceError::GivenUp(text()).into(), Stop::Comm(_)));
        assert!(matches!(DeviceError::Hangs(text()).into(), Stop::Hangs(_)));
        let of = |error: CudaError, world| device_error(Some(&error), text(), world);
        let given_up = || CudaError::GivenUp { why: text() };
        let full = || CudaError::NoRoom { why: text() };
        assert!(matches!(of(given_up(), 2), DeviceError::GivenUp(_)));
        assert!(matches!(of(CudaError::Late { seconds: 5.0 }, 2), DeviceError::Hangs(_)));
        assert!(matches!(of(CudaError::Late { seconds: 5.0 }, 1), DeviceError::Failed(_)));
        assert!(matches!(of(full(), 2), DeviceError::Full(_)));
        let captured = CudaError::NotCaptured { why: text() };
        assert!(matches!(of(captured, 2), DeviceError::Failed(_)));
        let kernel = |error: CudaError| OpenError::Kernel(KernelError::Cuda(error));
        assert_eq!(blamed(not_opened(2, true, kernel(full()))), Some(false));
        assert!(matches!(not_opened(2, true, kernel(given_up())), Stop::Comm(_)));
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
        assert_eq!(blamed(stop(2, false, refused())), Some(true));
        assert_eq!(blamed(stop(2, true, refused())), Some(true));
        let late = Error::Late { call: "ncclGetUniqueId", limit: std::time::Duration::ZERO };
        assert_eq!(blamed(stop(2, true, late)), Some(false), "a peer may be dead");
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
