//! Documents one after the other, as one stream of tokens, cut into windows.

use super::DataError;
use super::store::{Store, nameless, spool_failed};
use crate::disk::{Disk, OpenFile};
use moejob_kernels::IGNORE;
use std::sync::Arc;

/// Documents between two anchors of `Marks`: a block of 4 KiB.
const MARKS_PER_ANCHOR: usize = 512;
/// Starts of documents kept in memory; further ones go to a file.
const MARKS_IN_MEMORY: usize = 1 << 20;

/// Parts of stores in a row.
#[derive(Clone, Debug, Default)]
pub struct Stream {
    stores: Vec<Store>,
    segments: Vec<Segment>,
    tokens: u64,
    documents: u64,
    /// Where documents begin, if anybody asks.
    marks: Option<Marks>,
    /// The last token of a document predicts nothing.
    masks: bool,
    /// Ends a document, in stores that know no documents.
    end: Option<u32>,
    scratch: Vec<u8>,
    window: Vec<u32>,
    begins: Vec<u64>,
}

/// Tokens of a store that follow each other in the stream, too.
#[derive(Clone, Copy, Debug)]
struct Segment {
    /// Token of the stream.
    start: u64,
    store: u32,
    /// Token of the store.
    at: u64,
}

impl Stream {
    /// `apart`: windows will be asked where documents begin. `masks`: targets behind the end of a
    /// document are [`IGNORE`].
    pub fn new(apart: bool, masks: bool) -> Stream {
        Stream { marks: (apart || masks).then(Marks::default), masks, ..Stream::default() }
    }

    /// Whatever it keeps in files goes by way of `disk`.
    pub(crate) fn on(mut self, disk: &Disk) -> Stream {
        self.marks.iter_mut().for_each(|marks| marks.disk = disk.clone());
        self
    }

    /// Documents end with this id, which is looked for in every window.
    pub fn ends_with(&mut self, end: Option<u32>) {
        self.end = end.filter(|_| self.marks.is_some());
    }

    pub fn tokens(&self) -> u64 {
        self.tokens
    }

    pub fn documents(&self) -> u64 {
        self.documents
    }

    /// A store whose tokens `push` then names.
    pub fn add(&mut self, store: Store) -> u32 {
        self.stores.push(store);
        self.stores.len() as u32 - 1
    }

    /// Appends a document: tokens `at .. at + count` of a store.
    ///
    /// # Errors
    /// Temporary files cannot be written.
    pub fn push(&mut self, store: u32, at: u64, count: u64) -> Result<(), DataError> {
        if count == 0 {
            return Ok(());
        }
        let follows = self.segments.last().is_some_and(|last| {
            last.store == store && last.at + (self.tokens - last.start) == at
        });
        if !follows {
            self.segments.push(Segment { start: self.tokens, store, at });
        }
        if let Some(marks) = &mut self.marks {
            marks.push(self.tokens)?;
        }
        self.tokens += count;
        self.documents += 1;
        Ok(())
    }

    /// Appends a whole store as one document.
    ///
    /// # Errors
    /// Temporary files cannot be written.
    pub fn push_store(&mut self, store: Store) -> Result<(), DataError> {
        let tokens = store.tokens;
        let store = self.add(store);
        self.push(store, 0, tokens)
    }

    /// Windows of `sequence + 1` tokens at multiples of `sequence`.
    pub fn windows(&self, sequence: u64) -> u64 {
        self.tokens.saturating_sub(1) / sequence
    }

    /// Reads `ids.len() + 1` tokens from token `at`; the targets are one further. `starts` says for
    /// each where its document begins in the window.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn window(
        &mut self,
        at: u64,
        ids: &mut [u32],
        targets: &mut [u32],
        starts: Option<&mut [u32]>,
    ) -> Result<(), DataError> {
        let mut window = std::mem::take(&mut self.window);
        window.resize(ids.len() + 1, 0);
        let result = self.read(at, &mut window);
        ids.copy_from_slice(&window[..ids.len()]);
        targets.copy_from_slice(&window[1..]);
        self.window = window;
        result?;
        if self.masks {
            self.mask(at, ids, targets)?;
        }
        match starts {
            Some(starts) => self.starts(at, ids, starts),
            None => Ok(()),
        }
    }

    fn mask(&mut self, at: u64, ids: &[u32], targets: &mut [u32]) -> Result<(), DataError> {
        if let Some(end) = self.end {
            let ends = ids.iter().zip(targets).filter(|(id, _)| **id == end);
            ends.for_each(|(_, target)| *target = IGNORE);
            return Ok(());
        }
        let Some(marks) = &self.marks else { return Ok(()) };
        marks.between(at, at + ids.len() as u64 + 1, &mut self.begins)?;
        self.begins.iter().for_each(|mark| targets[(mark - at) as usize - 1] = IGNORE);
        Ok(())
    }

    /// Targets that count of a window of `count` tokens from token `at` on.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn targets(&mut self, at: u64, count: usize) -> Result<u64, DataError> {
        if !self.masks {
            return Ok(count as u64);
        }
        let (mut ids, mut targets) = (vec![0; count], vec![0; count]);
        if self.end.is_some() {
            self.read(at, &mut ids)?;
        }
        self.mask(at, &ids, &mut targets)?;
        Ok(targets.iter().filter(|target| **target != IGNORE).count() as u64)
    }

    /// Tokens `at ..` of the stream.
    ///
    /// # Errors
    /// A file changed or cannot be read.
    pub fn read(&mut self, at: u64, mut into: &mut [u32]) -> Result<(), DataError> {
        let mut index = self.segments.partition_point(|segment| segment.start <= at) - 1;
        let mut at = at;
        while !into.is_empty() {
            let Segment { start, store, at: first } = self.segments[index];
            let end = self.segments.get(index + 1).map_or(self.tokens, |next| next.start);
            let count = (end - at).min(into.len() as u64) as usize;
            let (now, later) = into.split_at_mut(count);
            let store = &mut self.stores[store as usize];
            store.read(first + (at - start), now, &mut self.scratch)?;
            into = later;
            at += count as u64;
            index += 1;
        }
        Ok(())
    }

    fn starts(&mut self, at: u64, ids: &[u32], starts: &mut [u32]) -> Result<(), DataError> {
        let mut begin = 0;
        if let Some(end) = self.end {
            for (i, start) in starts.iter_mut().enumerate() {
                *start = begin;
                if ids[i] == end {
                    begin = i as u32 + 1;
                }
            }
            return Ok(());
        }
        let Some(marks) = &self.marks else {
            starts.fill(0);
            return Ok(());
        };
        marks.between(at, at + ids.len() as u64, &mut self.begins)?;
        let mut begins = self.begins.iter().map(|mark| (mark - at) as u32).peekable();
        for (i, start) in starts.iter_mut().enumerate() {
            if begins.next_if_eq(&(i as u32)).is_some() {
                begin = i as u32;
            }
            *start = begin;
        }
        Ok(())
    }
}

/// Ascending positions; all but the first million in a file, with every 512th in memory.
#[derive(Clone, Debug, Default)]
struct Marks {
    disk: Disk,
    anchors: Vec<u64>,
    /// Complete blocks of 512.
    file: Option<Arc<OpenFile>>,
    /// In memory; the first of it is number `written`.
    tail: Vec<u64>,
    written: usize,
}

impl Marks {
    fn push(&mut self, mark: u64) -> Result<(), DataError> {
        if (self.written + self.tail.len()).is_multiple_of(MARKS_PER_ANCHOR) {
            self.anchors.push(mark);
        }
        self.tail.push(mark);
        if self.tail.len() == MARKS_IN_MEMORY {
            if self.file.is_none() {
                self.file = Some(Arc::new(nameless(&self.disk)?));
            }
            let bytes: Vec<u8> = self.tail.iter().flat_map(|mark| mark.to_le_bytes()).collect();
            if let Some(file) = &self.file {
                let at = self.written as u64 * 8;
                file.write_all_at(&bytes, at).map_err(spool_failed)?;
            }
            self.written += self.tail.len();
            self.tail.clear();
        }
        Ok(())
    }

    /// All `m` with `low < m < high`, ascending.
    fn between(&self, low: u64, high: u64, found: &mut Vec<u64>) -> Result<(), DataError> {
        found.clear();
        let mut block = self.anchors.partition_point(|anchor| *anchor <= low).saturating_sub(1);
        while self.anchors.get(block).is_some_and(|anchor| *anchor < high) {
            self.block(block, |mark| {
                if low < mark && mark < high {
                    found.push(mark);
                }
            })?;
            block += 1;
        }
        Ok(())
    }

    fn block(&self, block: usize, mut see: impl FnMut(u64)) -> Result<(), DataError> {
        let first = block * MARKS_PER_ANCHOR;
        if let Some(first) = first.checked_sub(self.written) {
            let end = self.tail.len().min(first + MARKS_PER_ANCHOR);
            self.tail[first..end].iter().for_each(|mark| see(*mark));
            return Ok(());
        }
        let Some(file) = &self.file else { return Ok(()) };
        let mut bytes = vec![0; MARKS_PER_ANCHOR * 8];
        file.read_exact_at(&mut bytes, first as u64 * 8).map_err(spool_failed)?;
        let (words, _) = bytes.as_chunks::<8>();
        words.iter().for_each(|word| see(u64::from_le_bytes(*word)));
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn marks_are_found_in_memory_and_in_the_file() {
        let mut marks = Marks::default();
        let count = MARKS_IN_MEMORY as u64 + 1500;
        for i in 0..count {
            marks.push(i * 3).expect("a temporary file");
        }
        let mut found = Vec::new();
        let last = count * 3;
        for (low, high) in [
            (0, 10),
            (0, 1),
            (1534, 1540),
            (3 * MARKS_IN_MEMORY as u64 - 7, 3 * MARKS_IN_MEMORY as u64 + 4),
            (last - 9, last + 50),
            (last, last + 9),
            (5, 4000),
        ] {
            marks.between(low, high, &mut found).expect("the file");
            let expected: Vec<u64> =
                (low + 1..high.min(last)).filter(|mark| mark % 3 == 0).collect();
            assert_eq!(found, expected, "{low} to {high}");
        }
    }
}
