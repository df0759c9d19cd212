//! How many bytes of rows pass windows, for who tells people of it. How many tokens need a rank
//! follows from their choices, which the device alone knows.

use crate::cuda::device::CudaDevice;
use crate::cuda::driver::{Arena, Launch, Stream, parameters};
use crate::cuda::error::CudaError;
use crate::error::LayerError;
use crate::ops::peer::cuda::{COUNTERS, LinksData, PeerLinks};
use crate::ops::peer::group::NeedData;
use crate::ops::peer::op::Need;

const THREADS: u32 = 1024;

/// Adds the bytes of the rows that this rank gathers of others, or scatters to them, to a counter.
#[derive(Clone, Debug)]
pub struct CountRows<'a> {
    /// Its ids are those of all tokens.
    pub need: &'a Need,
    pub row_bytes: usize,
    /// 0 or 1
    pub counter: usize,
}

impl PeerLinks {
    /// See [`CountRows`].
    ///
    /// # Errors
    /// It cannot be enqueued.
    ///
    /// # Panics
    /// Lengths do not fit, or there is no such counter.
    pub fn count_rows(
        &self,
        (stream, arena): (&Stream, &Arena),
        op: &CountRows,
    ) -> Result<(), CudaError> {
        assert!(op.counter < COUNTERS, "{op:?}");
        let (links, need) = (self.data(), op.need.data(self.desc(), arena));
        let bytes = u32::try_from(op.row_bytes).expect("bytes of a row fit in 32 bits");
        let counter = op.counter as u32;
        // SAFETY: the parameters are those of `count_rows`; the ids were checked.
        unsafe {
            let parameters = parameters![links, need, bytes, counter];
            self.group.count.launch(stream, Launch::new(1, THREADS), parameters)
        }
    }

    /// What was counted so far, by counter: whole once the stream has come so far. Waits for
    /// nothing. Counters begin again behind 2^64.
    pub fn rows_passed(&self) -> [u64; COUNTERS] {
        self.passed()
    }

    /// Launches it once, of nobody's tokens.
    pub(crate) fn warm_up_count(
        &self,
        (stream, once): (&Stream, Launch),
        links: LinksData,
        need: NeedData,
    ) -> Result<(), CudaError> {
        let (bytes, counter) = (0_u32, 0_u32);
        // SAFETY: the parameters are those of `count_rows`; without tokens it adds nothing.
        unsafe {
            self.group.count.launch(stream, once, parameters![links, need, bytes, counter])
        }
    }
}

impl CudaDevice {
    /// Enqueues [`PeerLinks::count_rows`] among the ops.
    pub fn count_rows(&self, links: &PeerLinks, op: &CountRows) {
        self.attempt(|| Ok::<(), LayerError>(links.count_rows((&self.stream, &self.arena), op)?));
    }
}
