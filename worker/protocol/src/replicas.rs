//! Replicas: further copies of a layer's busiest experts, in spare slots of ranks with less to do.
//!
//! ```text
//! loads by expert + owners --choose()--> an expert for each spare slot, or none
//! counts by source and expert + replicas --Shares::split()--> who computes which tokens  shares
//! loads of steps + price --Balance::advance()--> changes of replicas, of owners last  balance
//! ```
//! Replicas are chosen as the alias method builds its table (Walker 1977; Vose 1991): the emptiest
//! rank with a free slot is filled up to a target by one expert of a rank above it. The rank that
//! gives may fall below the target, and then gets an expert itself. Where experts are large enough,
//! one slot a rank levels any loads. The target is the lowest that the best division of tokens
//! ([`crate::flow`]) reaches with the replicas chosen for it. It is found by halving.
//!
//! DeepSeek's EPLB (`replicate_experts`, `balanced_packing`) divides an expert evenly among its
//! copies, whatever else their ranks have. A shadow of FasterMoE (PPoPP'22, section 4.1) is a
//! replica on every rank. SmartMoE (ATC'23, section 5) places owners alone.

use crate::flow::{Copies, Flow};
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;

/// How often the target is halved: its last step is 1/64 of what the first choice misses.
const HALVINGS: u32 = 6;

/// Who holds the experts of one layer in each expert group.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct Replicas {
    /// Ranks of an expert group, `P`.
    pub ranks: u32,
    /// `[E]`, the rank that owns each expert.
    pub owners: Vec<u32>,
    /// `[P, S]`, the expert in each spare slot; none: it is empty.
    pub slots: Vec<Option<u32>>,
}

impl Replicas {
    /// All of `spare` slots a rank are empty.
    pub fn none(owners: &[u32], ranks: u32, spare: u32) -> Replicas {
        let slots = vec![None; ranks as usize * spare as usize];
        Replicas { ranks, owners: owners.to_vec(), slots }
    }

    /// Every owner is a rank, every rank has as many slots, and no rank has two copies of an
    /// expert. A file's replicas are checked by this first.
    pub fn is_valid(&self) -> bool {
        let of = |rank: u32| self.pairs().filter(move |(at, _)| *at == rank).map(|pair| pair.1);
        let once = (0..self.ranks).all(|rank| {
            let mut held: Vec<u32> = of(rank).collect();
            held.sort_unstable();
            let known = held.iter().all(|expert| {
                self.owners.get(*expert as usize).is_some_and(|owner| *owner != rank)
            });
            known && held.windows(2).all(|pair| pair[0] != pair[1])
        });
        self.ranks > 0
            && self.slots.len().is_multiple_of(self.ranks as usize)
            && self.owners.iter().all(|owner| *owner < self.ranks)
            && once
    }

    /// Spare slots of a rank, `S`.
    pub fn spare(&self) -> u32 {
        (self.slots.len() / self.ranks.max(1) as usize) as u32
    }

    /// Rank and expert of every slot that is not empty, by rank.
    pub fn pairs(&self) -> impl Iterator<Item = (u32, u32)> {
        let spare = self.spare().max(1) as usize;
        let held = self.slots.iter().enumerate();
        held.filter_map(move |(slot, expert)| Some(((slot / spare) as u32, (*expert)?)))
    }

    /// Experts by owner, ascending: a row of [`crate::layout::Placement::Ordered`].
    pub fn order(&self) -> Vec<u32> {
        let mut order: Vec<u32> = (0..self.owners.len() as u32).collect();
        order.sort_by_key(|expert| self.owners[*expert as usize]);
        order
    }

    /// Owners and replicas, by expert.
    pub fn copies(&self) -> Copies {
        Copies::new(&self.owners, &self.pairs().collect::<Vec<_>>())
    }

    /// Tokens of the fullest rank when tokens are divided as well as they can be. `loads` are
    /// tokens by expert, `[E]`.
    pub fn level(&self, loads: &[u64]) -> u64 {
        let copies = self.copies();
        let mut tokens = vec![0; copies.ranks.len()];
        for (expert, load) in loads.iter().enumerate() {
            tokens[copies.of(expert).start] = *load;
        }
        Flow::new(&copies, self.ranks, tokens).level()
    }

    /// Replicas with which the fullest of `ranks` has as few as can be of `loads`, tokens by
    /// expert, `[E]`. Each rank has `spare` slots, and `owners`, `[E]`, stay. A slot that would not
    /// help stays empty. Experts that have no owner among the ranks are an error of the program.
    pub fn choose(loads: &[u64], owners: &[u32], ranks: u32, spare: u32) -> Replicas {
        assert_eq!(loads.len(), owners.len(), "a load and an owner of each expert");
        let all: u64 = loads.iter().sum();
        let mean = all.div_ceil(u64::from(ranks.max(1)));
        let filled = |target| {
            let replicas = Replicas::fill(loads, owners, ranks, spare, target);
            (replicas.level(loads), replicas)
        };
        let none = Replicas::none(owners, ranks, spare);
        let before = none.level(loads);
        if before <= mean {
            return none;
        }
        let mut best = (before, none);
        let (mut low, mut target) = (mean, mean);
        for _ in 0..=HALVINGS {
            let found = filled(target);
            if found.0 > target {
                low = target;
            }
            if found.0 < best.0 {
                best = found;
            }
            target = low.midpoint(best.0);
            if target <= low {
                break;
            }
        }
        best.1
    }

    /// Fills ranks below `target`, the emptiest first, until they have no free slot or no rank
    /// above has an expert for them.
    fn fill(loads: &[u64], owners: &[u32], ranks: u32, spare: u32, target: u64) -> Replicas {
        let mut replicas = Replicas::none(owners, ranks, spare);
        let (ranks, spare) = (ranks as usize, spare as usize);
        let mut load = vec![0; ranks];
        for (owner, tokens) in owners.iter().zip(loads) {
            load[*owner as usize] += tokens;
        }
        let mut left = loads.to_vec();
        let mut used = vec![0; ranks];
        loop {
            let open = (0..ranks).filter(|rank| used[*rank] < spare && load[*rank] < target);
            let Some(gets) = open.min_by_key(|rank| load[*rank]) else { break };
            let room = target - load[gets];
            let slots = gets * spare..gets * spare + used[gets];
            // The most that one expert can bring; from the fullest rank where several bring it.
            let mut best = (0, 0, Reverse(0));
            for (expert, (owner, left)) in owners.iter().zip(&left).enumerate() {
                let gives = *owner as usize;
                if load[gives] <= target {
                    continue;
                }
                let above = if used[gives] < spare { room } else { load[gives] - target };
                let found = ((*left).min(room).min(above), load[gives], Reverse(expert));
                if found > best && !replicas.slots[slots.clone()].contains(&Some(expert as u32)) {
                    best = found;
                }
            }
            let (amount, _, Reverse(expert)) = best;
            if amount == 0 {
                break;
            }
            replicas.slots[gets * spare + used[gets]] = Some(expert as u32);
            used[gets] += 1;
            left[expert] -= amount;
            load[gets] += amount;
            load[owners[expert] as usize] -= amount;
        }
        replicas
    }

    /// Puts every expert that its rank held `before` into its former slot, so that no weights move
    /// within a rank.
    #[must_use]
    pub fn seated(mut self, before: &Replicas) -> Replicas {
        let spare = self.spare().max(1) as usize;
        if before.slots.len() != self.slots.len() {
            return self;
        }
        for (slots, before) in self.slots.chunks_mut(spare).zip(before.slots.chunks(spare)) {
            for (slot, expert) in before.iter().enumerate().filter(|(_, expert)| expert.is_some()) {
                if let Some(at) = slots.iter().position(|other| other == expert) {
                    slots.swap(at, slot);
                }
            }
        }
        self
    }
}
