//! Buffers that several ranks have, as verbs name them.

use moejob_kernels::Buffer;
use moejob_protocol::memory::EXCHANGE_BYTES_MAX;

/// A buffer that several ranks have, in equal chunks, one for each of them.
pub(crate) struct Shared<'a> {
    /// Ascending; the r-th of them owns the r-th chunk.
    pub holders: &'a [u32],
    /// Elements of all chunks, which also those know that hold none.
    pub len: usize,
    /// None on a rank that is none of them.
    pub buffer: Option<Buffer>,
}

/// Elements, of f64, that processors move in one exchange, unless one buffer alone has more.
const EXCHANGED_AT_ONCE: usize = EXCHANGE_BYTES_MAX as usize / 8;

/// Runs of buffers that processors move in one exchange each, the same on all ranks.
pub(super) fn in_exchanges<'a, 'b>(all: &'a [Shared<'b>]) -> Vec<&'a [Shared<'b>]> {
    let (mut runs, mut first, mut len) = (Vec::new(), 0, 0);
    for (at, shared) in all.iter().enumerate() {
        if at > first && len + shared.len > EXCHANGED_AT_ONCE {
            runs.push(&all[first..at]);
            (first, len) = (at, 0);
        }
        len += shared.len;
    }
    if first < all.len() {
        runs.push(&all[first..]);
    }
    runs
}

/// The same on a holder.
pub(super) struct Chunks<'a> {
    holders: &'a [u32],
    all: Buffer,
    own: usize,
}

/// Buffers that all of `ranks` have.
pub(super) fn of_all<'a>(ranks: &'a [u32], all: &[Buffer]) -> Vec<Shared<'a>> {
    let of = |buffer: &Buffer| Shared { holders: ranks, len: buffer.len(), buffer: Some(*buffer) };
    all.iter().map(of).collect()
}

impl Shared<'_> {
    pub(super) fn chunks(&self, me: u32) -> Option<Chunks<'_>> {
        let (all, own) = (self.buffer?, self.holders.binary_search(&me).ok()?);
        let count = self.holders.len();
        assert!(all.len().is_multiple_of(count), "{all:?} in {count} equal chunks");
        Some(Chunks { holders: self.holders, all, own })
    }
}

impl Chunks<'_> {
    fn at(&self, at: usize) -> Buffer {
        let len = self.all.len() / self.holders.len();
        self.all.slice(at * len, len)
    }

    pub(super) fn all(&self) -> Buffer {
        self.all
    }

    pub(super) fn own(&self) -> Buffer {
        self.at(self.own)
    }

    /// The others and their chunks.
    pub(super) fn others(&self, me: u32) -> impl Iterator<Item = (u32, Buffer)> + '_ {
        let all = self.holders.iter().copied().enumerate();
        all.filter(move |(_, rank)| *rank != me).map(|(at, rank)| (rank, self.at(at)))
    }
}
