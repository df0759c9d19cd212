//! What a worker says of itself when its stream is up.

use super::Tracker;
use crate::observed::WorkerState;
use crate::preflight::Checked;
use moejob_protocol::message::{Hello, LeftReason};

impl Tracker {
    /// A worker is of an attempt that the record does not know: somebody has emptied the record, or
    /// put an older one back. Attempts count on from there, since a worker obeys no attempt that is
    /// not above its own. Whether that is news.
    pub fn counts_on(&mut self, attempt: u32) -> bool {
        // An attempt is far from 2^32, unless the worker talks nonsense.
        if attempt <= self.observed.record.attempt.max(self.taken) || attempt >= u32::MAX / 2 {
            return false;
        }
        self.taken = attempt;
        if self.observed.gang().is_none() {
            self.observed.record.attempt = attempt;
        }
        true
    }

    /// A worker's stream is up. What it says of itself is true, except that it may repeat an
    /// attempt that it is already known to have left.
    pub fn connected(&mut self, name: &str, address: &str, hello: &Hello) {
        let stop = self.observed.gang().filter(|gang| gang.attempt == hello.attempt);
        let asked_to_stop = stop.is_some_and(|gang| gang.stop_requested.is_some());
        let Some(worker) = self.worker(name) else {
            return;
        };
        match worker.state {
            WorkerState::Dead { .. } | WorkerState::Completed { .. } => return,
            WorkerState::Left { attempt, .. } if attempt == hello.attempt => {}
            _ => worker.state = state_of(hello, asked_to_stop),
        }
        worker.address = Some(address.to_string());
        worker.held = hello.held.clone();
        worker.speaks = hello.version;
        // What it was told on a stream before it may not have heard.
        (worker.quiet_since, worker.patient_in) = (None, None);
        // What it was asked on a stream before it may not have heard, nor its answer have come.
        if matches!(worker.checked, Checked::Asked { .. }) {
            worker.checked = Checked::No;
        }
        self.observed.preflight.pairs.connected(name);
    }
}

/// What a worker is that says this of itself.
fn state_of(hello: &Hello, asked_to_stop: bool) -> WorkerState {
    let attempt = hello.attempt;
    match hello.rank {
        _ if attempt == 0 => WorkerState::Idle,
        Some(rank) => {
            WorkerState::Member { attempt, digest: hello.digest.clone(), rank, leaving: None }
        }
        None => {
            let newest = hello.held.iter().map(|held| held.step).max();
            let reason = match newest.filter(|_| asked_to_stop) {
                Some(step) => LeftReason::Stopped { step },
                None => LeftReason::Asked,
            };
            WorkerState::Left { attempt, reason }
        }
    }
}
