//! Buffers that several ranks have, as verbs name them.

use moejob_kernels::Buffer;

/// A buffer that several ranks have, in equal chunks, one for each of them.
pub(crate) struct Shared<'a> {
    /// Ascending; the r-th of them owns the r-th chunk.
    pub holders: &'a [u32],
    /// None on a rank that is none of them.
    pub buffer: Option<Buffer>,
}

/// The same on a holder.
pub(super) struct Chunks<'a> {
    holders: &'a [u32],
    all: Buffer,
    own: usize,
}

/// Buffers that all of `ranks` have.
pub(super) fn of_all<'a>(ranks: &'a [u32], all: &[Buffer]) -> Vec<Shared<'a>> {
    all.iter().map(|buffer| Shared { holders: ranks, buffer: Some(*buffer) }).collect()
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
