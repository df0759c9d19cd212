//! Carries the copies of a snapshot to buddies beside the steps, a snapshot at a time.
//!
//! ```text
//! cut -> own shard: held -> courier -> buddies have theirs -> held and said by all: confirmed
//! ```
//! The snapshot before stays until then: a worker that is lost meanwhile costs the steps since that
//! one. A snapshot that comes due meanwhile is left out, so neither steps nor copies wait for each
//! other.

use crate::gang::comm::{CommError, Ferry, Stopper};
use crate::state::snapshot::Cargo;
use std::thread::JoinHandle;

/// What a copy left behind: the ferry, and how it ended.
type Carried = (Ferry, Result<(), CommError>);

#[derive(Debug)]
pub(crate) struct Courier {
    /// Where nothing is carried.
    ferry: Option<Ferry>,
    stopper: Stopper,
    /// Steps in what is carried.
    under_way: Option<(u64, JoinHandle<Carried>)>,
}

impl Courier {
    pub fn new(ferry: Ferry) -> Courier {
        let stopper = ferry.stopper();
        Courier { ferry: Some(ferry), stopper, under_way: None }
    }

    /// Begins with `cargo`; nothing else is under way.
    ///
    /// # Errors
    /// The system gives no thread.
    pub fn begin(&mut self, cargo: Cargo) -> std::io::Result<()> {
        let mut ferry = self.ferry.take().expect("one thing at a time");
        let step = cargo.step;
        let thread = std::thread::Builder::new().name("courier".to_string());
        let carried = thread.spawn(move || {
            let ended = cargo.carry(&mut ferry);
            (ferry, ended)
        })?;
        self.under_way = Some((step, carried));
        Ok(())
    }

    /// The steps in a snapshot whose copies have come and gone since the last call.
    ///
    /// # Errors
    /// They did not.
    pub fn arrived(&mut self) -> Result<Option<u64>, CommError> {
        match self.under_way.take_if(|(_, carried)| carried.is_finished()) {
            Some(carried) => self.take(carried).map(Some),
            None => Ok(None),
        }
    }

    /// Waits for what is under way.
    ///
    /// # Errors
    /// It did not arrive.
    pub fn wait(&mut self) -> Result<Option<u64>, CommError> {
        match self.under_way.take() {
            Some(carried) => self.take(carried).map(Some),
            None => Ok(None),
        }
    }

    fn take(&mut self, (step, carried): (u64, JoinHandle<Carried>)) -> Result<u64, CommError> {
        let (ferry, ended) = carried.join().expect("copying does not panic");
        self.ferry = Some(ferry);
        ended.map(|()| step)
    }
}

impl Drop for Courier {
    /// Nobody wants what is still under way.
    fn drop(&mut self) {
        self.stopper.stop();
        if let Some((_, carried)) = self.under_way.take() {
            let _ = carried.join();
        }
    }
}
