//! What a worker says of an attempt that its ranks have ended one by one.

use crate::attempt::api::AttemptEnd;
use crate::gang::comm::CommError;

pub(super) fn lost(reason: String) -> CommError {
    CommError::Aborted { reason }
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
