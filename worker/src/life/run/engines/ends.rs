//! What a worker says of an attempt that its ranks have ended one by one.

use crate::attempt::api::AttemptEnd;
use crate::gang::comm::CommError;
use moejob_protocol::report::{DEVICE_FAILED, LOST, VICTIM};

pub(super) fn lost(reason: String) -> CommError {
    CommError::Aborted { reason }
}

/// Whose doing the end of an engine was.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(in crate::life::run) enum Doing {
    /// Its own device's.
    Device,
    /// Another rank's, or whoever else has what it needs.
    Another,
    /// It was killed, or does not say.
    Unknown,
}

/// The reason of `EngineLost`. What comes behind the first loss of an attempt follows from it: a
/// device whose neighbour is torn away fails, too.
pub(super) fn reason(doing: Doing, is_first: bool) -> &'static str {
    match doing {
        Doing::Device if is_first => DEVICE_FAILED,
        Doing::Unknown if is_first => LOST,
        _ => VICTIM,
    }
}

/// Of several ranks' ends the one that says most: why it ended, then which rank elsewhere was lost.
pub(super) fn weight(end: &AttemptEnd, is_local: impl Fn(u32) -> bool) -> u32 {
    match end {
        AttemptEnd::Failed(_) | AttemptEnd::DeviceFailed { .. } => 6,
        AttemptEnd::Fenced { .. } => 5,
        AttemptEnd::Aborted(CommError::Aborted { .. }) => 4,
        AttemptEnd::Aborted(
            CommError::PeerLost { rank, .. } | CommError::Protocol { rank, .. },
        ) => 2 + u32::from(!is_local(*rank)),
        AttemptEnd::Stopped { .. } => 1,
        AttemptEnd::Completed { .. } => 0,
    }
}
