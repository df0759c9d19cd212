//! In which engines a slot is open beside its worker, and when the worker lets go of it.
//!
//! ```text
//! made by an engine, or handed to it -> open there -> it has closed it, or is gone
//! given up by the worker: kept while it is open anywhere, then given back on a thread of its own
//! ```
//! Who closes a file in memory last gives its memory back: the kernel takes 0.13 s a gigabyte for
//! it, also where nothing of it is mapped. An engine that is killed would do so before its GPU is
//! free, and everybody would wait for that. So the worker is always the last.

use std::collections::{BTreeMap, BTreeSet};

/// Which slots are open where, and those that the worker keeps for that reason alone.
#[derive(Debug)]
pub(super) struct Holders<T> {
    /// Engines that have not ended, by the number of their life.
    lives: BTreeSet<u64>,
    /// How often a life has a slot open: it may be handed it anew before it has closed it.
    open: BTreeMap<(u64, u64), u32>,
    /// Handed over in this attempt, whose engines fill them anew.
    handed: BTreeSet<u64>,
    leaving: BTreeMap<u64, T>,
}

impl<T> Default for Holders<T> {
    fn default() -> Holders<T> {
        let (lives, open) = (BTreeSet::new(), BTreeMap::new());
        Holders { lives, open, handed: BTreeSet::new(), leaving: BTreeMap::new() }
    }
}

impl<T> Holders<T> {
    /// An engine begins.
    pub fn begins(&mut self, life: u64) {
        self.lives.insert(life);
    }

    /// An attempt begins.
    pub fn attempt(&mut self) {
        self.handed.clear();
    }

    /// An engine has made a slot. One that has ended has none open, whatever is said of it later.
    pub fn opens(&mut self, life: u64, slot: u64) {
        if self.lives.contains(&life) {
            *self.open.entry((slot, life)).or_default() += 1;
        }
    }

    /// A slot is handed to an engine.
    pub fn hands(&mut self, life: u64, slot: u64) {
        self.handed.insert(slot);
        self.opens(life, slot);
    }

    /// An engine of this attempt fills it anew some time, or gives it up itself.
    pub fn was_handed(&self, slot: u64) -> bool {
        self.handed.contains(&slot)
    }

    fn is_open(&self, slot: u64) -> bool {
        self.open.range((slot, 0)..=(slot, u64::MAX)).next().is_some()
    }

    /// The worker gives a slot up; what it gets is given back now.
    pub fn give_up(&mut self, slot: u64, memory: T) -> Option<T> {
        match self.is_open(slot) {
            true => self.leaving.insert(slot, memory),
            false => Some(memory),
        }
    }

    /// An engine has closed a slot once; what the worker gets is given back now.
    pub fn closed(&mut self, life: u64, slot: u64) -> Option<T> {
        let times = self.open.get_mut(&(slot, life))?;
        *times -= 1;
        if *times == 0 {
            self.open.remove(&(slot, life));
        }
        if self.is_open(slot) { None } else { self.leaving.remove(&slot) }
    }

    /// An engine has ended, and the kernel has closed all that it had open; what the worker gets is
    /// given back now.
    pub fn ended(&mut self, life: u64) -> Vec<T> {
        self.lives.remove(&life);
        self.open.retain(|(_, of), _| *of != life);
        let free: Vec<u64> =
            self.leaving.keys().copied().filter(|slot| !self.is_open(*slot)).collect();
        free.iter().filter_map(|slot| self.leaving.remove(slot)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of_lives(lives: [u64; 2]) -> Holders<&'static str> {
        let mut holders = Holders::default();
        lives.into_iter().for_each(|life| holders.begins(life));
        holders
    }

    #[test]
    fn what_is_open_nowhere_goes_at_once() {
        let mut holders = of_lives([1, 2]);
        assert_eq!(holders.give_up(7, "memory"), Some("memory"));
        holders.opens(1, 7);
        assert_eq!(holders.closed(1, 7), None, "nobody gave it up");
        assert_eq!(holders.give_up(7, "memory"), Some("memory"));
    }

    #[test]
    fn what_is_given_up_goes_when_the_last_engine_has_closed_it_or_is_gone() {
        let mut holders = of_lives([1, 2]);
        holders.opens(1, 7);
        holders.hands(2, 7);
        holders.opens(1, 8);
        assert_eq!(holders.give_up(7, "seven"), None);
        assert_eq!(holders.give_up(8, "eight"), None);
        assert_eq!(holders.closed(2, 7), None, "the other one has it open");
        assert_eq!(holders.ended(2), Vec::<&str>::new());
        assert_eq!(holders.ended(1), ["seven", "eight"]);
        assert_eq!(holders.ended(1), Vec::<&str>::new(), "once");
    }

    #[test]
    fn a_slot_that_is_handed_over_before_it_was_closed_is_open() {
        let mut holders = of_lives([1, 2]);
        holders.opens(1, 7);
        // The next attempt's, and only then the word of the last one's end.
        holders.hands(1, 7);
        assert_eq!(holders.closed(1, 7), None);
        assert_eq!(holders.give_up(7, "memory"), None);
        assert_eq!(holders.closed(1, 7), Some("memory"));
        assert_eq!(holders.closed(1, 7), None, "what is said too often changes nothing");
    }

    #[test]
    fn nothing_is_kept_for_an_engine_that_has_ended() {
        let mut holders = of_lives([1, 2]);
        holders.ended(1);
        holders.hands(1, 7);
        assert_eq!(holders.give_up(7, "memory"), Some("memory"));
    }

    #[test]
    fn what_was_handed_over_is_so_until_the_next_attempt() {
        let mut holders = of_lives([1, 2]);
        holders.opens(1, 6);
        holders.hands(1, 7);
        holders.ended(1);
        assert!(!holders.was_handed(6) && holders.was_handed(7));
        holders.attempt();
        assert!(!holders.was_handed(7));
    }
}
