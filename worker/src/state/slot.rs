//! One snapshot of one shard, in memory that worker and engine both map.
//!
//! ```text
//! a slot: u32 state | u32 confirmed | u32 attempt | u32 shard | u64 step | u64 use | 32: checksum
//!         | f64 loss scale, 0: none | u32 steps with it | u32 readers | u64 use that was summed
//!         | u32 whether all of its memory is there | u64 bytes that are summed | 4096: bytes
//! free -> filling -> complete -> free, once nobody reads it
//! ```
//! What it holds stands in it, so the worker knows what could be resumed from without a word of an
//! engine that has just died, and a shard that was half cut is none: its state says so until its
//! last byte is there. Whoever reads a slot that its engine may give up meanwhile is counted in it:
//! it is filled anew only when nobody is. A device that copies into it can also write there by
//! mistake, at any later time. So the worker makes a checksum soon after a shard is complete, and
//! it is compared before anybody resumes from it.

use crate::gang::memory::Mapping;
use crate::state::checksum::{SUM_THREADS_BESIDE, SUM_THREADS_RESUME, Soundness, checksum};
use crate::state::copy::threads_for;
use crate::state::farewell::{Farewell, Tell};
use moejob_kernels::cuda::{CudaError, Gpu, Registered};
use moejob_kernels::Pages;
use moejob_protocol::checkpoint::ScaleEntry;
use rustix::fd::{AsFd, BorrowedFd, OwnedFd};
use rustix::fs::fstat;
use std::io;
use std::ops::Deref;
use std::sync::mpsc::Sender;
use std::sync::{Arc, Weak};
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};
use std::time::{Duration, Instant};

const STATE: usize = 0;
const CONFIRMED: usize = 4;
const ATTEMPT: usize = 8;
const SHARD: usize = 12;
const STEP: usize = 16;
const USE: usize = 24;
const CHECKSUM: usize = 32;
const SCALE: usize = 64;
const GOOD_STEPS: usize = 72;
const READERS: usize = 76;
const SUMMED: usize = 80;
const RESERVED: usize = 88;
const SUMMED_BYTES: usize = 96;
pub(super) const BYTES: usize = 4096;

/// Of nobody: it can be filled, once nobody reads it.
pub(super) const FREE: u32 = 0;
const FILLING: u32 = 1;
const COMPLETE: u32 = 2;
/// Given up by its engine, so that the worker lets go of it, too.
pub(super) const GONE: u32 = 3;

/// Threads that let pages go beside the steps.
const REST_THREADS_BESIDE: usize = 2;

/// A checksum of which no further byte was summed for so long is waited for no more. A shard is as
/// large as the model makes it, so there is no limit for all of it.
const SUM_PAUSE_MAX: Duration = Duration::from_secs(60);

/// A shard in memory; its bytes stay as long as somebody holds it.
#[derive(Debug)]
pub struct Slot(Mapping, Maker, Farewell);

/// Who has made a slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Maker {
    Here,
    /// Another process, which fills it.
    Elsewhere,
}

/// Which shard of which state a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Label {
    pub attempt: u32,
    /// Steps done.
    pub step: u64,
    /// Rank of that attempt's layout.
    pub shard: u32,
}

impl Slot {
    /// # Errors
    /// The system has no memory for it.
    pub(super) fn new(len: usize) -> io::Result<Slot> {
        Slot::of(Mapping::shared("moejob-snapshot", BYTES + len)?, Maker::Here)
    }

    fn of(memory: Mapping, maker: Maker) -> io::Result<Slot> {
        let id = memory.file().map(id_of).transpose()?.unwrap_or_default();
        Ok(Slot(memory, maker, Farewell { id, to: None }))
    }

    /// In an engine: its worker is told when it is closed here.
    pub(super) fn telling(mut self, to: Option<Tell>) -> Slot {
        self.2.to = to;
        self
    }

    /// The same in every process that has it open, and no other slot's.
    pub fn id(&self) -> u64 {
        self.2.id
    }

    /// A free one for a shard.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub(super) fn of_shard(shard: u32, len: usize) -> io::Result<Slot> {
        let slot = Slot::new(len)?;
        slot.0.word(SHARD).store(shard, Ordering::SeqCst);
        Ok(slot)
    }

    /// All of its memory is there, because it was reserved or filled.
    pub(super) fn is_reserved(&self) -> bool {
        self.0.word(RESERVED).load(Ordering::SeqCst) == 1
    }

    /// Gives it all of its memory, unless that is `over` before.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub(super) fn reserve(&self, over: impl Fn() -> bool) -> io::Result<()> {
        if self.0.reserve(over)? {
            self.0.word(RESERVED).store(1, Ordering::SeqCst);
        }
        Ok(())
    }

    /// The slot that another process has made.
    ///
    /// # Errors
    /// It is none.
    pub(super) fn attach(file: OwnedFd) -> io::Result<Slot> {
        let slot = Slot::of(Mapping::attach(file)?, Maker::Elsewhere)?;
        if slot.0.len() < BYTES {
            return Err(io::Error::other("memory that is no slot"));
        }
        Ok(slot)
    }

    /// Nobody here is about to read or fill it.
    pub(super) fn rest(&self) {
        let _ = self.0.rest(threads_for(self.0.len()));
    }

    /// Who has only read what another process fills, such as a worker behind its checksums, keeps
    /// no page of it: a worker that is killed gives them back before anybody knows that it is.
    pub(super) fn rest_behind(&self) {
        if self.1 == Maker::Elsewhere {
            let _ = self.0.rest(REST_THREADS_BESIDE);
        }
    }

    /// Has the driver of `gpu` copy here without a detour, for as long as there is the slot.
    ///
    /// # Errors
    /// The driver refuses.
    pub(super) fn pin(&self, gpu: &Gpu) -> Result<(), CudaError> {
        // Mapped anew its pages are there, and not in the table of this process.
        let _ = self.0.populate(threads_for(self.0.len()));
        // SAFETY: the mapping ends its guard before it unmaps the range.
        self.0.guard(|start, len| unsafe { Registered::new(gpu, start, len) })
    }

    pub(super) fn is_pinned(&self) -> bool {
        self.0.is_guarded()
    }

    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.0.file()
    }

    pub(super) fn state(&self) -> &AtomicU32 {
        self.0.word(STATE)
    }

    pub(super) fn is(&self, state: u32) -> bool {
        self.state().load(Ordering::SeqCst) == state
    }

    pub(super) fn bytes_len(&self) -> usize {
        self.0.len() - BYTES
    }

    pub(super) fn confirmed(&self) -> &AtomicU32 {
        self.0.word(CONFIRMED)
    }

    fn used(&self) -> u64 {
        self.0.long(USE).load(Ordering::SeqCst)
    }

    pub(super) fn summed_bytes(&self) -> &AtomicU64 {
        self.0.long(SUMMED_BYTES)
    }

    fn summed(&self) -> &AtomicU64 {
        self.0.long(SUMMED)
    }

    pub(super) fn readers(&self) -> &AtomicU32 {
        self.0.word(READERS)
    }

    pub(super) fn is_read(&self) -> bool {
        self.readers().load(Ordering::SeqCst) > 0
    }

    /// Its engine may give it up from here on, and does not fill it before the reader is done: the
    /// worker, which takes the reading over ([`Reading::of_lent`]).
    pub fn lend(&self) {
        self.readers().fetch_add(1, Ordering::SeqCst);
    }

    /// That of the state, where its job has one.
    pub fn loss_scale(&self) -> Option<ScaleEntry> {
        let scale = f64::from_bits(self.0.long(SCALE).load(Ordering::SeqCst));
        let good_steps = self.0.word(GOOD_STEPS).load(Ordering::SeqCst);
        (scale != 0.0).then_some(ScaleEntry { scale, good_steps })
    }

    fn set_loss_scale(&self, kept: Option<ScaleEntry>) {
        let ScaleEntry { scale, good_steps } =
            kept.unwrap_or(ScaleEntry { scale: 0.0, good_steps: 0 });
        self.0.long(SCALE).store(scale.to_bits(), Ordering::SeqCst);
        self.0.word(GOOD_STEPS).store(good_steps, Ordering::SeqCst);
    }

    /// Compares its bytes with their checksum. One that is being made is waited for.
    pub fn soundness(&self) -> Soundness {
        self.soundness_within(SUM_PAUSE_MAX)
    }

    pub(super) fn soundness_within(&self, pause_max: Duration) -> Soundness {
        let (mut summed, mut since) = (0, Instant::now());
        while !self.is_summed() {
            if self.label().is_none() {
                return Soundness::Damaged;
            }
            let now = self.summed_bytes().load(Ordering::SeqCst);
            if now != summed {
                (summed, since) = (now, Instant::now());
            }
            if since.elapsed() >= pause_max {
                return Soundness::NotSummed;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        let mut kept = [0; 32];
        self.0.read(CHECKSUM, &mut kept);
        let compared = AtomicU64::new(0);
        let threads = SUM_THREADS_RESUME;
        let sum = |label| checksum(label, self.loss_scale(), (self, &compared), threads);
        match self.label().is_some_and(|label| sum(label) == kept) {
            true => Soundness::Sound,
            false => Soundness::Damaged,
        }
    }

    pub(super) fn is_summed(&self) -> bool {
        self.summed().load(Ordering::SeqCst) == self.used()
    }

    /// Makes the checksum of what is complete here, for whoever will resume from it.
    pub(super) fn sum(self: &Arc<Slot>) {
        let reading = Reading::new(Arc::clone(self));
        // From here on it is not filled anew.
        let (Some(label), used) = (self.label(), self.used()) else { return };
        let bytes: (&[u8], &AtomicU64) = (&reading, self.summed_bytes());
        let made = checksum(label, self.loss_scale(), bytes, SUM_THREADS_BESIDE);
        self.0.write(CHECKSUM, &made);
        self.summed().store(used, Ordering::SeqCst);
    }

    /// What it holds, when that is whole. It may be filled anew while we look.
    pub(super) fn label(&self) -> Option<Label> {
        let before = self.used();
        let whole = self.is(COMPLETE);
        let label = self.written();
        (whole && self.is(COMPLETE) && self.used() == before).then_some(label)
    }

    /// What it holds or held last.
    pub(super) fn written(&self) -> Label {
        Label {
            attempt: self.0.word(ATTEMPT).load(Ordering::SeqCst),
            step: self.0.long(STEP).load(Ordering::SeqCst),
            shard: self.0.word(SHARD).load(Ordering::SeqCst),
        }
    }

    /// Takes a free slot that nobody reads, to fill it; whether it was one.
    fn try_take(&self) -> bool {
        let order = Ordering::SeqCst;
        if self.state().compare_exchange(FREE, FILLING, order, order).is_err() {
            return false;
        }
        // A reader counts itself first and then looks at the state, so one of us sees the other.
        let taken = !self.is_read();
        if !taken {
            self.state().store(FREE, order);
        }
        taken
    }

    #[cfg(test)]
    pub(super) fn memory(&self) -> &Mapping {
        &self.0
    }

    #[cfg(test)]
    pub(super) fn set_step(&self, step: u64) {
        self.0.long(STEP).store(step, Ordering::SeqCst);
    }
}

/// The number of its file, by which the kernel tells files in memory apart.
pub(super) fn id_of(file: impl AsFd) -> io::Result<u64> {
    Ok(fstat(file)?.st_ino)
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: whoever holds a slot beside its pool keeps it from being filled
        // (`Memory::fill` looks at the count of holders in this process and of readers in any), and
        // a slot is handed out only after it was filled.
        unsafe { self.0.bytes(BYTES) }
    }
}

/// A slot that is read by somebody whom its engine does not know; not filled anew meanwhile.
#[derive(Debug)]
pub struct Reading(Arc<Slot>);

impl Reading {
    pub(super) fn new(slot: Arc<Slot>) -> Reading {
        slot.lend();
        Reading(slot)
    }

    /// Takes over what [`Slot::lend`] has counted.
    pub(super) fn of_lent(slot: Arc<Slot>) -> Reading {
        Reading(slot)
    }
}

impl Deref for Reading {
    type Target = Slot;

    fn deref(&self) -> &Slot {
        &self.0
    }
}

impl Drop for Reading {
    fn drop(&mut self) {
        // Never below none: of a slot of a lost engine the worker takes back what nobody reads.
        let one_less = |readers: u32| readers.checked_sub(1);
        let _ = self.0.readers().fetch_update(Ordering::SeqCst, Ordering::SeqCst, one_less);
    }
}

/// To the thread that makes checksums.
pub(super) type Sums = Sender<Weak<Slot>>;

/// A slot that is being filled by its only user; free again if it is dropped before it is whole.
#[derive(Debug)]
pub struct Filling {
    slot: Arc<Slot>,
    /// Whoever makes checksums here.
    sums: Option<Sums>,
    /// What becomes of its pages once they are written.
    pages: Pages,
}

impl Filling {
    /// Of a slot that is free, nobody's, and of the right length; none: it is not.
    pub(super) fn take(slot: &Arc<Slot>, label: Label, sums: Option<Sums>) -> Option<Filling> {
        if !slot.try_take() {
            return None;
        }
        slot.0.long(USE).fetch_add(1, Ordering::SeqCst);
        slot.confirmed().store(0, Ordering::SeqCst);
        slot.0.word(ATTEMPT).store(label.attempt, Ordering::SeqCst);
        slot.0.word(SHARD).store(label.shard, Ordering::SeqCst);
        slot.0.long(STEP).store(label.step, Ordering::SeqCst);
        slot.set_loss_scale(None);
        Some(Filling { slot: Arc::clone(slot), sums, pages: Pages::Stay })
    }

    /// The same, of whose pages this process maps few at a time: an engine that is killed has all
    /// that it maps to take apart before its device is free.
    pub(super) fn with_few_pages(mut self, few: bool) -> Filling {
        self.pages = if few { Pages::Leave } else { Pages::Stay };
        self
    }

    /// What becomes of its pages once they are written.
    pub(super) fn pages(&self) -> Pages {
        self.pages
    }

    /// A device can copy into it by itself.
    pub fn is_pinned(&self) -> bool {
        self.slot.is_pinned()
    }

    pub fn len(&self) -> usize {
        self.slot.bytes_len()
    }

    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: it was taken from a pool in which nobody else held it, and nobody reads a slot in
        // this state.
        unsafe { self.slot.0.bytes_mut(BYTES) }
    }

    /// What goes with the bytes.
    pub fn set_loss_scale(&mut self, kept: Option<ScaleEntry>) {
        self.slot.set_loss_scale(kept);
    }

    /// From now on it can be resumed from. Its checksum follows beside the steps.
    pub fn complete(self) -> Arc<Slot> {
        let slot = Arc::clone(&self.slot);
        slot.0.word(RESERVED).store(1, Ordering::SeqCst);
        slot.state().store(COMPLETE, Ordering::SeqCst);
        if let Some(sums) = &self.sums {
            // Without the thread nobody resumes here any more.
            let _ = sums.send(Arc::downgrade(&slot));
        }
        slot
    }

    /// It is a checkpoint's alone: nobody resumes from it, and it is free when it has been written.
    pub fn complete_for_checkpoint(self) -> Arc<Slot> {
        self.slot.lend();
        Arc::clone(&self.slot)
    }
}

impl Drop for Filling {
    fn drop(&mut self) {
        let order = Ordering::SeqCst;
        let _ = self.slot.state().compare_exchange(FILLING, FREE, order, order);
    }
}
