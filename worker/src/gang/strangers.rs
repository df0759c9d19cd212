//! Connections of which nobody knows yet whose they are: of the operator's listener and of peers.

use std::collections::VecDeque;
use std::future::Future;
use tokio::task::AbortHandle;

/// Connections that have not yet proven who they are. The oldest makes room for the newest: an
/// honest handshake takes milliseconds, so it is through long before 64 others have come.
pub const HANDSHAKES_MAX: usize = 64;
/// For handshake and first frame together.
pub const HANDSHAKE_MS_MAX: u64 = 5_000;

/// Tasks of strangers: at most `HANDSHAKES_MAX`, the oldest makes room.
#[derive(Debug, Default)]
pub struct Strangers(VecDeque<AbortHandle>);

impl Strangers {
    pub fn admit(&mut self, task: impl Future<Output = ()> + Send + 'static) {
        self.0.retain(|handle| !handle.is_finished());
        while self.0.len() >= HANDSHAKES_MAX {
            if let Some(oldest) = self.0.pop_front() {
                oldest.abort();
            }
        }
        self.0.push_back(tokio::spawn(task).abort_handle());
    }
}

impl Drop for Strangers {
    fn drop(&mut self) {
        self.0.iter().for_each(AbortHandle::abort);
    }
}
