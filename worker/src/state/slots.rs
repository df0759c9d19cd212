//! The snapshots of one worker, in memory that outlives its engines.
//!
//! ```text
//! fill -> complete -> lent to the checkpoint writer, summed, handed over to be resumed from
//! ```
//! Slots are bounded in number. Without a free one a snapshot is left out, and nothing waits.

use crate::failure::chain;
use crate::state::farewell::{OfSlot, Tell};
use crate::state::holders::Holders;
use crate::state::slot::{Filling, FREE, GONE, Label, Reading, Slot, Sums};
use moejob_kernels::cuda::Gpu;
use moejob_protocol::config::Resume;
use moejob_protocol::memory::GENERATIONS;
use moejob_protocol::message::Held;
use rustix::fd::OwnedFd;
use std::collections::BTreeMap;
use std::fmt;
use std::io;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::mpsc::{Receiver, channel};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread::JoinHandle;

/// Slots of one shard that may be in use at once, unless [`Memory::set_bounds`] says otherwise: the
/// newest state that is whole everywhere, the next one, and one that a checkpoint is written from.
const IN_USE_MAX: usize = 3;

/// The slots of a worker, or those of them that one of its engines knows. A clone is the same.
#[derive(Clone)]
pub struct Memory(Arc<Inner>);

impl Default for Memory {
    fn default() -> Memory {
        let (sums, complete) = channel();
        let thread = std::thread::Builder::new().name("sums".to_string());
        // Without the thread no snapshot is resumed from: the job goes on from its checkpoints.
        if let Err(error) = thread.spawn(move || sum_all(&complete)) {
            tracing::error!(%error, "no thread for checksums of snapshots");
        }
        Memory(Arc::new(Inner::new(None, Some(Mutex::new(sums)))))
    }
}

impl Inner {
    fn new(announce: Option<Tell>, sums: Option<Mutex<Sums>>) -> Inner {
        let (in_use_max, spare) = (AtomicUsize::new(IN_USE_MAX), AtomicUsize::new(0));
        let (slots, borrowed) = (Mutex::default(), Mutex::default());
        let (rests, holders) = (AtomicUsize::new(RESTS), Mutex::default());
        Inner { slots, borrowed, holders, announce, sums, in_use_max, spare, rests }
    }

    fn sums(&self) -> Option<Sums> {
        let sums = self.sums.as_ref()?.lock().unwrap_or_else(PoisonError::into_inner);
        Some(sums.clone())
    }
}

/// Makes the checksum of each slot that is complete, of all at once: a worker has as many as it has
/// engines, and nobody resumes from one without.
fn sum_all(complete: &Receiver<Weak<Slot>>) {
    let mut summing: Vec<(Weak<Slot>, JoinHandle<()>)> = Vec::new();
    while let Ok(slot) = complete.recv() {
        summing.retain(|(_, thread)| !thread.is_finished());
        let is_being_summed = summing.iter().any(|(other, _)| other.ptr_eq(&slot));
        // One that was given up meanwhile is of no interest.
        let of_use = slot.upgrade().filter(|slot| !slot.is_summed() && !is_being_summed);
        let Some(whole) = of_use else { continue };
        let work = {
            let whole = Arc::clone(&whole);
            move || sum(&whole)
        };
        match std::thread::Builder::new().name("sum".to_string()).spawn(work) {
            Ok(thread) => summing.push((slot, thread)),
            // There are no more threads: it takes longer.
            Err(_) => sum(&whole),
        }
    }
}

fn sum(slot: &Arc<Slot>) {
    slot.sum();
    if slot.bytes_len() >= RESTS {
        slot.rest_behind();
    }
}

struct Inner {
    slots: Mutex<Vec<Arc<Slot>>>,
    /// In an engine: slots of others of its worker, to be read until they are given back.
    borrowed: Mutex<Vec<Arc<Slot>>>,
    /// In a worker: in which of its engines slots are open. Locked after `slots`, if with it.
    holders: Mutex<Holders<Arc<Slot>>>,
    /// Tells the worker of slots that its engine has made or closed.
    announce: Option<Tell>,
    /// Where checksums are made; an engine in a process of its own leaves them to its worker.
    sums: Option<Mutex<Sums>>,
    in_use_max: AtomicUsize,
    /// Free slots of a shard that are kept for the next checkpoint.
    spare: AtomicUsize,
    /// Bytes from which on an engine maps parts of a slot alone.
    rests: AtomicUsize,
}

impl fmt::Debug for Memory {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_tuple("Memory").field(&self.held()).finish()
    }
}

impl Memory {
    /// The view of an engine in a process of its own.
    pub fn of_engine(announce: impl Fn(OfSlot<'_>) + Send + Sync + 'static) -> Memory {
        let announce: Tell = Arc::new(announce);
        Memory(Arc::new(Inner::new(Some(announce), None)))
    }

    /// No code panics while it holds the lock.
    fn slots(&self) -> MutexGuard<'_, Vec<Arc<Slot>>> {
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In an engine: takes a slot over that its worker hands to it.
    ///
    /// # Errors
    /// It is none.
    pub fn adopt(&self, file: OwnedFd) -> io::Result<()> {
        let slot = Slot::attach(file)?.telling(self.0.announce.clone());
        self.slots().push(Arc::new(slot));
        Ok(())
    }

    /// Reads a slot that another engine of the worker fills.
    ///
    /// # Errors
    /// It is none.
    pub fn borrow(&self, file: OwnedFd) -> io::Result<()> {
        let slot = Slot::attach(file)?.telling(self.0.announce.clone());
        self.borrowed().push(Arc::new(slot));
        Ok(())
    }

    fn borrowed(&self) -> MutexGuard<'_, Vec<Arc<Slot>>> {
        self.0.borrowed.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What others fill is not read any more.
    pub fn give_borrowed_back(&self) {
        self.retain(&mut self.borrowed(), |_| false);
    }

    /// How many slots of one shard may be in use at once, and how many free ones are kept.
    pub fn set_bounds(&self, in_use_max: usize, spare: usize) {
        self.0.in_use_max.store(in_use_max, Ordering::Relaxed);
        self.0.spare.store(spare, Ordering::Relaxed);
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
        let of_wanted = |slot: &&Arc<Slot>| slot.label() == wanted;
        let own = self.slots().iter().find(of_wanted).cloned();
        own.or_else(|| self.borrowed().iter().find(of_wanted).cloned())
    }

    /// Lets go of a shard whose bytes are not those that were complete; the worker does, too.
    pub fn give_up(&self, attempt: u32, step: u64, shard: u32) {
        let damaged = Some(Label { attempt, step, shard });
        self.retain(&mut self.slots(), |slot| {
            let goes = slot.label() == damaged;
            if goes {
                slot.state().store(GONE, Ordering::SeqCst);
            }
            !goes
        });
    }

    /// An attempt begins. What it resumes from stays, and what the plan may have thought of using.
    /// Of each shard in `again` one more slot stays, free: its memory has been touched, and whoever
    /// makes it anew would need as much beside it until the system has it back.
    pub fn begin(&self, resume: &Resume, again: &[u32]) {
        self.holders().attempt();
        let mut again = again.to_vec();
        let mut slots = self.slots();
        let is_resumed = |slot: &Slot| match resume {
            Resume::Memory { step, attempt, .. } => {
                slot.label().is_some_and(|of| (of.attempt, of.step) == (*attempt, *step))
            }
            Resume::Fresh | Resume::Checkpoint { .. } => false,
        };
        let resumed = slots.iter().filter(|slot| is_resumed(slot));
        let bytes: BTreeMap<u32, usize> =
            resumed.map(|slot| (slot.written().shard, slot.bytes_len())).collect();
        self.retain(&mut slots, |slot| {
            let (label, shard) = (slot.label(), slot.written().shard);
            let is_thought_of = !matches!(resume, Resume::Memory { .. }) && label.is_some();
            if is_resumed(slot) || is_thought_of {
                return true;
            }
            // One of an earlier layout may be longer or shorter.
            let fits = bytes.get(&shard).is_none_or(|bytes| *bytes == slot.bytes_len());
            // One that is half filled may still be somebody's, and one that is read is.
            let is_nobodys = (label.is_some() || slot.is(FREE)) && !slot.is_read();
            let wanted = again.iter().position(|of| is_nobodys && fits && *of == shard);
            if let Some(at) = wanted {
                again.swap_remove(at);
                slot.state().store(FREE, Ordering::SeqCst);
            }
            wanted.is_some()
        });
    }

    /// Free slots of a shard, as files to hand over: their engine fills them again.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn free_files(&self, shard: u32) -> io::Result<Vec<OwnedFd>> {
        let slots = self.slots();
        files_of(slots.iter().filter(|slot| slot.is(FREE) && slot.written().shard == shard))
    }

    /// Everything goes; what is needed again comes from the worker.
    pub fn clear(&self) {
        self.retain(&mut self.slots(), |_| false);
        self.give_borrowed_back();
    }

    /// Every rank has finished its snapshot of `step` of `attempt`: a later collective succeeded,
    /// or the plan found all its shards.
    pub fn confirm(&self, attempt: u32, step: u64) {
        for slot in self.slots().iter() {
            if slot.label().is_some_and(|of| (of.attempt, of.step) == (attempt, step)) {
                slot.confirmed().store(1, Ordering::SeqCst);
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

    /// Before a checkpoint is cut: what is older than the newest state that is known to be whole
    /// everywhere can be overwritten, since nobody resumes from it.
    pub fn free_older(&self) {
        let slots = self.slots();
        let stays = newest_confirmed(&slots);
        for slot in slots.iter() {
            if slot.label().is_some_and(|label| Some((label.attempt, label.step)) < stays) {
                slot.state().store(FREE, Ordering::SeqCst);
            }
        }
    }

    /// A slot of `len` bytes for a shard: one that is free, or a new one. None where as many of
    /// that shard as may be are in use.
    ///
    /// # Errors
    /// The system has no memory for it.
    pub fn fill(
        &self,
        attempt: u32,
        step: u64,
        shard: u32,
        len: usize,
    ) -> io::Result<Option<Filling>> {
        let mut slots = self.slots();
        let label = Label { attempt, step, shard };
        let in_use = |slot: &&Arc<Slot>| slot.written().shard == shard && !is_unused(slot);
        if slots.iter().filter(in_use).count() >= self.0.in_use_max.load(Ordering::Relaxed) {
            return Ok(None);
        }
        let usable = |slot: &&Arc<Slot>| slot.bytes_len() == len && is_unused(slot);
        let taken = slots.iter().filter(usable).find_map(|slot| {
            Some((Filling::take(slot, label, self.0.sums())?, Arc::clone(slot)))
        });
        if let Some((filling, slot)) = taken {
            return Ok(Some(filling.with_few_pages(self.rests(&slot))));
        }
        let slot = Arc::new(Slot::new(len)?.telling(self.0.announce.clone()));
        let filling = Filling::take(&slot, label, self.0.sums());
        slots.push(Arc::clone(&slot));
        if let Some(announce) = &self.0.announce {
            announce(OfSlot::Made(&slot));
        }
        Ok(filling.map(|filling| filling.with_few_pages(self.rests(&slot))))
    }

    /// Makes what a snapshot of `shards` (each with its bytes) will need and does not find, and has
    /// the system give it memory, so that the snapshot need not wait for that. Takes its time: for
    /// a thread beside the steps. It ends early once the attempt is `over`, whose successor goes on
    /// where this one stopped: the worker knows of a slot before it has memory.
    pub fn prepare(&self, shards: &[(u32, usize)], over: &AtomicBool) {
        for (shard, len) in shards {
            let of_shard = self.of_shard(*shard, *len);
            let begun = of_shard.iter().find(|slot| slot.is(FREE) && !slot.is_reserved());
            let slot = match begun {
                Some(slot) => Arc::clone(slot),
                None if of_shard.len() as u64 >= GENERATIONS => continue,
                None => {
                    // Where there is no memory for it the snapshot will say so.
                    let Ok(slot) = Slot::of_shard(*shard, *len) else { return };
                    let slot = Arc::new(slot.telling(self.0.announce.clone()));
                    self.slots().push(Arc::clone(&slot));
                    if let Some(announce) = &self.0.announce {
                        announce(OfSlot::Made(&slot));
                    }
                    slot
                }
            };
            drop(of_shard);
            if slot.reserve(|| over.load(Ordering::Relaxed)).is_err() {
                slot.state().store(GONE, Ordering::SeqCst);
                self.retain(&mut self.slots(), |of| !Arc::ptr_eq(of, &slot));
                return;
            }
        }
    }

    /// An engine maps no page of a large slot while it does nothing with it.
    fn rests(&self, slot: &Slot) -> bool {
        let large = slot.bytes_len() >= self.0.rests.load(Ordering::Relaxed);
        self.0.announce.is_some() && large && !slot.is_pinned()
    }

    /// From how many bytes on a slot is large. For tests, whose states are small.
    pub fn rest_from(&self, bytes: usize) {
        self.0.rests.store(bytes, Ordering::Relaxed);
    }

    /// Once what was read or filled is done with, on a thread beside the steps. A process whose
    /// slots rest ends at once, and its GPU is free for the next one.
    pub fn rest(&self) {
        let large: Vec<Arc<Slot>> =
            self.slots().iter().filter(|slot| self.rests(slot)).cloned().collect();
        if !large.is_empty() {
            let thread = std::thread::Builder::new().name("rest".to_string());
            // Without the thread its end takes longer.
            let _ = thread.spawn(move || large.iter().for_each(|slot| slot.rest()));
        }
    }

    /// The slots of a shard of `len` bytes that no checkpoint is written from.
    fn of_shard(&self, shard: u32, len: usize) -> Vec<Arc<Slot>> {
        let of_shard = |slot: &&Arc<Slot>| {
            slot.written().shard == shard && slot.bytes_len() == len && !slot.is_read()
        };
        self.slots().iter().filter(of_shard).cloned().collect()
    }

    /// The same of one shard, of which a GPU copies into two slots by itself, and into a third one
    /// while a checkpoint is written from another. They stay as long as the attempt does, since to
    /// give one back would stop its steps.
    pub fn prepare_pinned(&self, gpu: &Gpu, shard: u32, len: usize, over: &AtomicBool) {
        self.prepare(&[(shard, len)], over);
        self.prepare(&[(shard, len)], over);
        // One after the other: a slot that somebody holds is not filled.
        let next = || self.of_shard(shard, len).into_iter().find(|slot| !slot.is_pinned());
        while let Some(slot) = next() {
            if let Err(error) = slot.pin(gpu) {
                let why = chain(&error);
                tracing::warn!(why, "snapshots leave by a detour: their memory is not pinned");
                return;
            }
        }
    }

    /// In the worker: takes over the reading of a slot that its engine has lent for a checkpoint.
    pub fn lent(&self, attempt: u32, step: u64, shard: u32) -> Option<Reading> {
        let wanted = Label { attempt, step, shard };
        let slots = self.slots();
        let slot = slots.iter().find(|slot| slot.is_read() && slot.written() == wanted);
        slot.map(|slot| Reading::of_lent(Arc::clone(slot)))
    }

    /// In the worker, when the engine of rank `shard` is lost: what it has lent and nobody took
    /// over is free again.
    pub fn take_back(&self, shard: u32) {
        let untaken = |slot: &&Arc<Slot>| {
            slot.written().shard == shard && Arc::strong_count(slot) == 1
        };
        for slot in self.slots().iter().filter(untaken) {
            slot.readers().store(0, Ordering::SeqCst);
        }
    }

    /// After a snapshot: slots that it had no use for are given back to the system.
    pub fn trim(&self) {
        let spare = self.0.spare.load(Ordering::Relaxed);
        let mut free: BTreeMap<(u32, usize), usize> = BTreeMap::new();
        self.retain(&mut self.slots(), |slot| {
            if !is_unused(slot) || slot.is_pinned() {
                return true;
            }
            let of_shard = free.entry((slot.written().shard, slot.bytes_len())).or_default();
            *of_shard += 1;
            let surplus = *of_shard > spare;
            if surplus {
                slot.state().store(GONE, Ordering::SeqCst);
            }
            !surplus
        });
    }

    /// In the worker, whenever an engine of `attempt` has changed something: lets go of what
    /// engines gave up, and of earlier attempts' state once this one's is whole everywhere, unless
    /// it was handed to an engine, which fills it anew or gives it up. What is complete gets its
    /// checksum.
    pub fn follow(&self, attempt: u32) {
        let mut slots = self.slots();
        let own = newest_confirmed(&slots).is_some_and(|(of, _)| of == attempt);
        let earlier = |slot: &Slot| slot.label().is_some_and(|label| label.attempt < attempt);
        let is_past = |slot: &Slot| {
            own && earlier(slot) && !self.holders().was_handed(slot.id())
        };
        self.retain(&mut slots, |slot| !slot.is(GONE) && !is_past(slot));
        let Some(sums) = self.0.sums() else { return };
        for slot in slots.iter().filter(|slot| slot.label().is_some() && !slot.is_summed()) {
            let _ = sums.send(Arc::downgrade(slot));
        }
    }

    /// Shards of one state, as files to hand over.
    ///
    /// # Errors
    /// The process has no descriptors left.
    pub fn files(&self, attempt: u32, step: u64, shards: &[u32]) -> io::Result<Vec<OwnedFd>> {
        files_of(shards.iter().filter_map(|shard| self.shard(attempt, step, *shard)))
    }
}

fn files_of(slots: impl Iterator<Item = impl AsRef<Slot>>) -> io::Result<Vec<OwnedFd>> {
    let file = |slot: &Slot| slot.file().map(|file| file.try_clone_to_owned());
    slots.filter_map(|slot| file(slot.as_ref())).collect()
}

/// Bytes from which on the pages of a slot hold up the end of a process.
const RESTS: usize = if cfg!(test) { 1 << 20 } else { 1 << 30 };
/// It is free, and nobody reads it here or elsewhere.
fn is_unused(slot: &Arc<Slot>) -> bool {
    slot.is(FREE) && !slot.is_read() && Arc::strong_count(slot) == 1
}

fn newest_confirmed(slots: &[Arc<Slot>]) -> Option<(u32, u64)> {
    let confirmed = slots.iter().filter(|slot| slot.confirmed().load(Ordering::SeqCst) == 1);
    confirmed.filter_map(|slot| slot.label()).map(|label| (label.attempt, label.step)).max()
}

mod open;
#[cfg(test)]
mod tests;
