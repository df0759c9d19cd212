//! The node is measured beside the shell.

use super::Happened;
use crate::life::affinity::Share;
use crate::life::preflight;
use moejob_protocol::pair::PairOrder;
use moejob_protocol::preflight::Order;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use tokio::sync::mpsc;

/// What is measured by now, if anything is.
#[derive(Default)]
pub(super) struct Measuring {
    stop: Arc<AtomicBool>,
}

impl Measuring {
    /// On a thread of its own, whose processes end with it. What was measured before is given up.
    pub fn start(&mut self, order: Box<Order>, share: Share, happened: mpsc::Sender<Happened>) {
        self.begin(move |stop| {
            let answer = preflight::answer(&order, share, stop);
            let _ = happened.blocking_send(Happened::Measured(answer));
        });
    }

    /// Likewise, with another worker.
    pub fn start_pair(
        &mut self,
        order: Box<PairOrder>,
        share: Share,
        happened: mpsc::Sender<Happened>,
    ) {
        self.begin(move |stop| {
            preflight::answer_pair(&order, share, stop, |answer| {
                let _ = happened.blocking_send(Happened::Paired(answer));
            });
        });
    }

    fn begin(&mut self, work: impl FnOnce(&AtomicBool) + Send + 'static) {
        self.stop();
        let stop = Arc::clone(&self.stop);
        let measure = move || work(&stop);
        let thread = std::thread::Builder::new().name("preflight".to_string());
        if let Err(error) = thread.spawn(measure) {
            // The leader waits for a minute, and takes another node.
            tracing::error!(%error, "no thread to measure the node");
        }
    }

    pub fn stop(&mut self) {
        std::mem::take(&mut self.stop).store(true, Ordering::Relaxed);
    }
}
