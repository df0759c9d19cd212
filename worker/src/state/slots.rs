//! The snapshots of one worker, in memory that outlives its engines.
//!
//! ```text
//! a slot: u32 state | u32 confirmed | u32 attempt | u32 shard | u64 step | u64 use | 32: checksum
//!         | f64 loss scale, 0: none | u32 steps with it | 4096: bytes
//! ```
//! A slot is a file in memory that worker and engine both map. What it holds stands in it, so the
//! worker knows what could be resumed from without a word of an engine that has just died, and a
//! shard that was half cut is none: its state says so until its last byte is there. A device that
//! copies into it can also write there by mistake, at any later time. So a checksum is made when a
//! shard is complete, and compared before anybody resumes from it.

use crate::gang::memory::Mapping;
use moejob_protocol::checkpoint::ScaleEntry;
use moejob_protocol::config::Resume;
use moejob_protocol::message::Held;
use rustix::fd::{BorrowedFd, OwnedFd};
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::ops::Deref;
use std::sync::atomic::{AtomicU32, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

const STATE: usize = 0;
const CONFIRMED: usize = 4;
const ATTEMPT: usize = 8;
const SHARD: usize = 12;
const STEP: usize = 16;
const USE: usize = 24;
const CHECKSUM: usize = 32;
const SCALE: usize = 64;
const GOOD_STEPS: usize = 72;
const BYTES: usize = 4096;

/// Of nobody: it can be filled.
const FREE: u32 = 0;
const FILLING: u32 = 1;
const COMPLETE: u32 = 2;
/// Given up by its engine, so that the worker lets go of it, too.
const GONE: u32 = 3;

/// A shard in memory; its bytes stay as long as somebody holds it.
#[derive(Debug)]
pub struct Slot(Mapping);

/// Which shard of which state a slot holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
struct Label {
    attempt: u32,
    /// Steps done.
    step: u64,
    /// Rank of that attempt's layout.
    shard: u32,
}

impl Slot {
    /// A copy of the state that is no snapshot: nobody resumes from it.
    ///
    /// # Errors
    /// Those of `fill`.
    pub fn private<E>(
        len: usize,
        loss_scale: Option<ScaleEntry>,
        fill: impl FnOnce(&mut [u8]) -> Result<(), E>,
    ) -> Result<Arc<Slot>, E> {
        let slot = Slot(Mapping::private(BYTES + len));
        slot.set_loss_scale(loss_scale);
        // SAFETY: nobody else knows of the mapping.
        fill(unsafe { slot.0.bytes_mut(BYTES) })?;
        Ok(Arc::new(slot))
    }

    pub fn file(&self) -> Option<BorrowedFd<'_>> {
        self.0.file()
    }

    fn state(&self) -> &AtomicU32 {
        self.0.word(STATE)
    }

    fn is(&self, state: u32) -> bool {
        self.state().load(Ordering::SeqCst) == state
    }

    fn bytes_len(&self) -> usize {
        self.0.len() - BYTES
    }

    fn is_confirmed(&self) -> bool {
        self.0.word(CONFIRMED).load(Ordering::SeqCst) == 1
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

    /// Its bytes are those that were complete once.
    pub fn is_sound(&self) -> bool {
        let mut kept = [0; 32];
        self.0.read(CHECKSUM, &mut kept);
        self.label().is_some_and(|label| checksum(label, self.loss_scale(), self) == kept)
    }

    /// What it holds, when that is whole. It may be filled anew while we look.
    fn label(&self) -> Option<Label> {
        let used = || self.0.long(USE).load(Ordering::SeqCst);
        let before = used();
        let whole = self.is(COMPLETE);
        let label = self.written();
        (whole && self.is(COMPLETE) && used() == before).then_some(label)
    }

    fn written(&self) -> Label {
        Label {
            attempt: self.0.word(ATTEMPT).load(Ordering::SeqCst),
            step: self.0.long(STEP).load(Ordering::SeqCst),
            shard: self.0.word(SHARD).load(Ordering::SeqCst),
        }
    }
}

/// Bytes that one thread hashes at a time.
const CHECKSUM_CHUNK: usize = 4 << 20;
/// Threads that hash at once: together they read about as fast as memory gives.
const CHECKSUM_THREADS_MAX: usize = 8;

/// BLAKE3 of the label and of the hashes of all chunks, which several threads make.
fn checksum(label: Label, loss_scale: Option<ScaleEntry>, bytes: &[u8]) -> [u8; 32] {
    let chunks: Vec<&[u8]> = bytes.chunks(CHECKSUM_CHUNK).collect();
    let cores = std::thread::available_parallelism().map_or(1, usize::from);
    let threads = cores.min(CHECKSUM_THREADS_MAX).min(chunks.len()).max(1);
    let hashed = |own: &[&[u8]]| -> Vec<blake3::Hash> {
        own.iter().map(|chunk| blake3::hash(chunk)).collect()
    };
    let mut parts = chunks.chunks(chunks.len().div_ceil(threads).max(1));
    let mut hasher = blake3::Hasher::new();
    hasher.update(&label.attempt.to_le_bytes());
    hasher.update(&label.step.to_le_bytes());
    hasher.update(&label.shard.to_le_bytes());
    hasher.update(&(bytes.len() as u64).to_le_bytes());
    if let Some(ScaleEntry { scale, good_steps }) = loss_scale {
        hasher.update(&scale.to_le_bytes());
        hasher.update(&good_steps.to_le_bytes());
    }
    std::thread::scope(|scope| {
        let first = parts.next().unwrap_or_default();
        let others: Vec<_> = parts.map(|own| scope.spawn(move || hashed(own))).collect();
        let mut all = hashed(first);
        for other in others {
            all.extend(other.join().expect("hashing does not panic"));
        }
        for hash in all {
            hasher.update(hash.as_bytes());
        }
    });
    *hasher.finalize().as_bytes()
}

impl Deref for Slot {
    type Target = [u8];

    fn deref(&self) -> &[u8] {
        // SAFETY: whoever holds a slot beside its pool keeps it from being filled (`Memory::fill`
        // looks at the count), and a slot is handed out only after it was filled.
        unsafe { self.0.bytes(BYTES) }
    }
}

/// A slot that is being filled by its only user.
#[derive(Debug)]
pub struct Filling(Arc<Slot>);

impl Filling {
    pub fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: `Memory::fill` took it from a pool in which nobody else held it, and nobody reads
        // a slot in this state.
        unsafe { self.0.0.bytes_mut(BYTES) }
    }

    /// What goes with the bytes.
    pub fn set_loss_scale(&mut self, kept: Option<ScaleEntry>) {
        self.0.set_loss_scale(kept);
    }

    /// From now on it can be resumed from.
    pub fn complete(self) -> Arc<Slot> {
        let made = checksum(self.0.written(), self.0.loss_scale(), &self.0);
        self.0.0.write(CHECKSUM, &made);
        self.0.state().store(COMPLETE, Ordering::SeqCst);
        self.0
    }
}

/// The slots of a worker, or those of them that one of its engines knows. A clone is the same.
#[derive(Clone, Default)]
pub struct Memory(Arc<Inner>);

#[derive(Default)]
struct Inner {
    slots: Mutex<Vec<Arc<Slot>>>,
    /// Tells the worker of a slot that its engine has made.
    announce: Option<Announce>,
}

type Announce = Box<dyn Fn(&Slot) + Send + Sync>;

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Memory").field(&self.held()).finish()
    }
}

impl Memory {
    /// The view of an engine in a process of its own.
    pub fn of_engine(announce: impl Fn(&Slot) + Send + Sync + 'static) -> Memory {
        let announce: Announce = Box::new(announce);
        Memory(Arc::new(Inner { slots: Mutex::default(), announce: Some(announce) }))
    }

    /// No code panics while it holds the lock.
    fn slots(&self) -> MutexGuard<'_, Vec<Arc<Slot>>> {
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Takes a slot over that another process has made.
    ///
    /// # Errors
    /// It is none.
    pub fn adopt(&self, file: OwnedFd) -> io::Result<()> {
        let slot = Slot(Mapping::attach(file)?);
        if slot.0.len() < BYTES {
            return Err(io::Error::other("memory that is no slot"));
        }
        self.slots().push(Arc::new(slot));
        Ok(())
    }

    /// What could be resumed from here, oldest first.
    pub fn held(&self) -> Vec<Held> {
        let mut generations: BTreeMap<(u32, u64), Vec<u32>> = BTreeMap::new();
        for label in self.slots().iter().filter_map(|slot| slot.label()) {
            let shards = generations.entry((label.attempt, label.step)).or_default();
            shards.push(label.shard);
        }
        let held = |((attempt, step), mut shards): ((u32, u64), Vec<u32>)| {
            shards.sort_unstable();
            shards.dedup();
            Held { attempt, step, shards }
        };
        generations.into_iter().map(held).collect()
    }

    pub fn shard(&self, attempt: u32, step: u64, shard: u32) -> Option<Arc<Slot>> {
        let wanted = Some(Label { attempt, step, shard });
        self.slots().iter().find(|slot| slot.label() == wanted).cloned()
    }

    /// Lets go of a shard whose bytes are not those that were complete; the worker does, too.
    pub fn give_up(&self, attempt: u32, step: u64, shard: u32) {
        let damaged = Some(Label { attempt, step, shard });
        self.slots().retain(|slot| {
            let goes = slot.label() == damaged;
            if goes {
                slot.state().store(GONE, Ordering::SeqCst);
            }
            !goes
        });
    }

    /// An attempt begins. What it resumes from stays, and what the plan may have thought of using.
    pub fn begin(&self, resume: &Resume) {
        self.slots().retain(|slot| match (slot.label(), resume) {
            (None, _) => false,
            (Some(label), Resume::Memory { step, attempt, .. }) => {
                (label.attempt, label.step) == (*attempt, *step)
            }
            (Some(_), _) => true,
        });
    }

    /// Everything goes; what is needed again comes from the worker.
    pub fn clear(&self) {
        self.slots().clear();
    }

    /// Every rank has finished its snapshot of `step` of `attempt`: a later collective succeeded,
    /// or the plan found all its shards.
    pub fn confirm(&self, attempt: u32, step: u64) {
        for slot in self.slots().iter() {
            if slot.label().is_some_and(|of| (of.attempt, of.step) == (attempt, step)) {
                slot.0.word(CONFIRMED).store(1, Ordering::SeqCst);
            }
        }
    }

    /// Before the snapshot of `step` of `attempt`: all that is neither of that nor of the newest
    /// state that is known to be whole everywhere can be overwritten.
    pub fn make_room(&self, attempt: u32, step: u64) {
        let slots = self.slots();
        let stays = newest_confirmed(&slots);
        for slot in slots.iter() {
            let Some(label) = slot.label() else { continue };
            let of = (label.attempt, label.step);
            if Some(of) != stays && of != (attempt, step) {
                slot.state().store(FREE, Ordering::SeqCst);
            }
        }
    }

    /// A slot of `len` bytes for a shard: one that is free, or a new one.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub fn fill(&self, attempt: u32, step: u64, shard: u32, len: usize) -> io::Result<Filling> {
        let mut slots = self.slots();
        let usable = |slot: &&Arc<Slot>| {
            // One that a checkpoint is still written from is held there, too.
            slot.is(FREE) && slot.bytes_len() == len && Arc::strong_count(slot) == 1
        };
        let slot = match slots.iter().find(usable) {
            Some(slot) => Arc::clone(slot),
            None => {
                let slot = Slot(Mapping::shared("moejob-snapshot", BYTES + len)?);
                let slot = Arc::new(slot);
                slots.push(Arc::clone(&slot));
                if let Some(announce) = &self.0.announce {
                    announce(&slot);
                }
                slot
            }
        };
        slot.state().store(FILLING, Ordering::SeqCst);
        slot.0.long(USE).fetch_add(1, Ordering::SeqCst);
        slot.0.word(CONFIRMED).store(0, Ordering::SeqCst);
        slot.0.word(ATTEMPT).store(attempt, Ordering::SeqCst);
        slot.0.word(SHARD).store(shard, Ordering::SeqCst);
        slot.0.long(STEP).store(step, Ordering::SeqCst);
        slot.set_loss_scale(None);
        Ok(Filling(slot))
    }

    /// After a snapshot: slots that it had no use for are given back to the system.
    pub fn trim(&self) {
        self.slots().retain(|slot| {
            let surplus = slot.is(FREE) && Arc::strong_count(slot) == 1;
            if surplus {
                slot.state().store(GONE, Ordering::SeqCst);
            }
            !surplus
        });
    }

    /// In the worker, whenever an engine of `attempt` has changed something: lets go of what
    /// engines gave up, and of earlier attempts' state once this one's is whole everywhere.
    pub fn follow(&self, attempt: u32) {
        let mut slots = self.slots();
        let own = newest_confirmed(&slots).is_some_and(|(of, _)| of == attempt);
        let earlier = |slot: &Slot| slot.label().is_some_and(|label| label.attempt < attempt);
        slots.retain(|slot| !slot.is(GONE) && !(own && earlier(slot)));
    }

    /// Shards of one state, as files to hand over.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn files(&self, attempt: u32, step: u64, shards: &[u32]) -> io::Result<Vec<OwnedFd>> {
        let found = shards.iter().filter_map(|shard| self.shard(attempt, step, *shard));
        found.filter_map(|slot| slot.file().map(|file| file.try_clone_to_owned())).collect()
    }
}

fn newest_confirmed(slots: &[Arc<Slot>]) -> Option<(u32, u64)> {
    let confirmed = slots.iter().filter(|slot| slot.is_confirmed());
    confirmed.filter_map(|slot| slot.label()).map(|label| (label.attempt, label.step)).max()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn take(memory: &Memory, attempt: u32, step: u64, shard: u32) -> Arc<Slot> {
        memory.make_room(attempt, step);
        let mut filling = memory.fill(attempt, step, shard, 8).expect("memory");
        filling.bytes_mut().fill(step as u8);
        let slot = filling.complete();
        memory.trim();
        slot
    }

    fn held(memory: &Memory) -> Vec<(u32, u64, Vec<u32>)> {
        memory.held().into_iter().map(|held| (held.attempt, held.step, held.shards)).collect()
    }

    #[test]
    fn the_newest_whole_state_stays_until_the_next_is_whole() {
        let memory = Memory::default();
        take(&memory, 1, 10, 0);
        take(&memory, 1, 10, 1);
        memory.confirm(1, 10);
        // The first of two ranks is ahead: neither state of the other is lost.
        take(&memory, 1, 20, 1);
        assert_eq!(held(&memory), [(1, 10, vec![0, 1]), (1, 20, vec![1])]);
        take(&memory, 1, 20, 0);
        memory.confirm(1, 20);
        let slot = take(&memory, 1, 30, 0);
        assert_eq!(held(&memory), [(1, 20, vec![0, 1]), (1, 30, vec![0])]);
        assert_eq!(slot[..], [30; 8]);
    }

    #[test]
    fn a_shard_that_is_half_cut_is_none() {
        let memory = Memory::default();
        let mut filling = memory.fill(1, 10, 0, 8).expect("memory");
        filling.bytes_mut().fill(1);
        assert_eq!(held(&memory), []);
        drop(filling);
        assert_eq!(held(&memory), [], "its engine died");
        memory.begin(&Resume::Fresh);
        assert!(memory.slots().is_empty());
    }

    #[test]
    fn what_a_checkpoint_is_written_from_is_not_overwritten() {
        let memory = Memory::default();
        let written = take(&memory, 1, 1, 0);
        for step in 2..6 {
            take(&memory, 1, step, 0);
            memory.confirm(1, step);
        }
        assert_eq!(written[..], [1; 8]);
        drop(written);
        take(&memory, 1, 6, 0);
        assert_eq!(memory.slots().len(), 2, "and then it is used again or given back");
    }

    #[test]
    fn a_byte_that_changes_later_is_noticed() {
        for len in [0, 8, CHECKSUM_CHUNK, 3 * CHECKSUM_CHUNK + 5] {
            let memory = Memory::default();
            let mut filling = memory.fill(1, 10, 0, len).expect("memory");
            filling.bytes_mut().iter_mut().enumerate().for_each(|(at, byte)| *byte = at as u8);
            let slot = filling.complete();
            assert!(slot.is_sound(), "{len} bytes");
            for at in [0, len / 2, len.saturating_sub(1)] {
                let flip = || {
                    let mut byte = [0];
                    slot.0.read(BYTES + at, &mut byte);
                    slot.0.write(BYTES + at, &[byte[0] ^ 16]);
                };
                if len > 0 {
                    flip();
                    assert!(!slot.is_sound(), "byte {at} of {len}");
                    flip();
                }
            }
            assert!(slot.is_sound(), "{len} bytes");
            slot.0.long(STEP).store(11, Ordering::SeqCst);
            assert!(!slot.is_sound(), "it would be of another step");
        }
    }

    #[test]
    fn what_an_engine_gives_up_its_worker_lets_go_of() {
        let worker = Memory::default();
        take(&worker, 1, 10, 0);
        take(&worker, 1, 10, 1);
        worker.confirm(1, 10);
        let engine = Memory::default();
        for file in worker.files(1, 10, &[0]).expect("descriptors") {
            engine.adopt(file).expect("a slot");
        }
        engine.give_up(1, 10, 0);
        worker.follow(2);
        assert_eq!(held(&worker), [(1, 10, vec![1])]);
        assert_eq!(worker.slots().len(), 1);
    }

    #[test]
    fn a_worker_sees_what_its_engine_holds_and_keeps_it() {
        let worker = Memory::default();
        let to = worker.clone();
        let engine = Memory::of_engine(move |slot| {
            let file = slot.file().expect("a file").try_clone_to_owned().expect("a descriptor");
            to.adopt(file).expect("a slot");
        });
        take(&engine, 3, 10, 1);
        engine.confirm(3, 10);
        take(&engine, 3, 20, 1);
        drop(engine);
        worker.follow(3);
        assert_eq!(held(&worker), [(3, 10, vec![1]), (3, 20, vec![1])]);
        assert_eq!(worker.shard(3, 20, 1).expect("held")[..], [20; 8]);
        let resume = Resume::Memory {
            step: 10,
            attempt: 3,
            layout: moejob_protocol::layout::Layout::contiguous(
                moejob_protocol::mesh::Mesh::data_parallel(2, 1),
            ),
            sources: Vec::new(),
        };
        worker.begin(&resume);
        assert_eq!(held(&worker), [(3, 10, vec![1])]);
        let files = worker.files(3, 10, &[0, 1]).expect("descriptors");
        assert_eq!(files.len(), 1);
    }
}
