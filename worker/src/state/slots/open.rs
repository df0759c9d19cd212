//! What a worker knows of the slots that its engines have open.

use super::Memory;
use crate::state::holders::Holders;
use crate::state::slot::{Slot, id_of};
use rustix::fd::OwnedFd;
use std::io;
use std::sync::{Arc, MutexGuard, PoisonError};
use std::time::Instant;

/// Bytes from which on giving memory back takes long enough to be another thread's work.
const LARGE: usize = 16 << 20;

impl Memory {
    pub(super) fn holders(&self) -> MutexGuard<'_, Holders<Arc<Slot>>> {
        self.0.holders.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// In the worker: an engine that is a process begins, whose life has this number.
    pub fn engine_begins(&self, life: u64) {
        self.holders().begins(life);
    }

    /// In the worker: takes a slot over that this engine has made.
    ///
    /// # Errors
    /// It is none.
    pub fn adopt_from(&self, life: u64, file: OwnedFd) -> io::Result<()> {
        let slot = Slot::attach(file)?;
        // First of all, so that nobody gives it up between.
        self.holders().opens(life, slot.id());
        self.slots().push(Arc::new(slot));
        Ok(())
    }

    /// In the worker, before these files of slots go to an engine.
    ///
    /// # Errors
    /// One of them is no file.
    pub fn hand_over<'a>(
        &self,
        life: u64,
        files: impl Iterator<Item = &'a OwnedFd>,
    ) -> io::Result<()> {
        for file in files {
            let slot = id_of(file)?;
            self.holders().hands(life, slot);
        }
        Ok(())
    }

    /// In the worker: this engine has closed a slot.
    pub fn engine_closed(&self, life: u64, slot: u64) {
        let free = self.holders().closed(life, slot);
        give_back(free.into_iter().collect());
    }

    /// In the worker: this engine was waited for, so the kernel has closed all that it had open.
    pub fn engine_ended(&self, life: u64) {
        let free = self.holders().ended(life);
        give_back(free);
    }

    /// Keeps the slots that `stays` holds for. The others go, as soon as no engine has them open.
    pub(super) fn retain(
        &self,
        slots: &mut Vec<Arc<Slot>>,
        mut stays: impl FnMut(&Arc<Slot>) -> bool,
    ) {
        let gone: Vec<Arc<Slot>> = slots.extract_if(.., |slot| !stays(slot)).collect();
        let mut holders = self.holders();
        let free = gone.into_iter().filter_map(|slot| holders.give_up(slot.id(), slot));
        let free = free.collect();
        drop(holders);
        give_back(free);
    }
}

/// To give gigabytes back takes the kernel seconds, in which the worker would hear and say nothing,
/// and an engine would do no step.
fn give_back(slots: Vec<Arc<Slot>>) {
    let bytes: usize = slots.iter().map(|slot| slot.bytes_len()).sum();
    if bytes >= LARGE {
        let work = move || {
            let began = Instant::now();
            drop(slots);
            let seconds = began.elapsed().as_secs_f64();
            tracing::debug!(bytes, seconds, "slots are given back");
        };
        let thread = std::thread::Builder::new().name("give-back".to_string());
        // Without the thread they are dropped with it, here.
        let _ = thread.spawn(work);
    }
}
