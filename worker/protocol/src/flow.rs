//! The best division of experts' tokens among their holders, in whole tokens.
//!
//! A rank above the level gives tokens of an expert to another holder of it, which may pass on
//! tokens of an expert of its own, until they reach a rank below the level (Ford and Fulkerson
//! 1956, along shortest paths). Where none can be reached, the ranks that were found have no
//! holders but each other: so the level rises to their mean, and no division has a lower one (Hall
//! 1935). The level at the end is therefore the optimum of the linear program, rounded up.

use std::ops::Range;

/// Every place where an expert of one layer is held.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Copies {
    /// `[E + 1]`, the first copy of each expert.
    first: Vec<u32>,
    /// `[C]`, the rank that holds each copy. An expert's owner comes first, then ranks ascend.
    pub ranks: Vec<u32>,
}

impl Copies {
    /// `owners` is `[E]`; `replicas` are pairs of rank and expert, by rank.
    pub(crate) fn new(owners: &[u32], replicas: &[(u32, u32)]) -> Copies {
        let mut first = vec![0; owners.len() + 1];
        for (_, expert) in replicas {
            first[*expert as usize + 1] += 1;
        }
        for expert in 0..owners.len() {
            first[expert + 1] += first[expert] + 1;
        }
        let mut ranks = vec![0; owners.len() + replicas.len()];
        let mut next = first.clone();
        let of_owners = owners.iter().zip(0_u32..).map(|(rank, expert)| (*rank, expert));
        for (rank, expert) in of_owners.chain(replicas.iter().copied()) {
            ranks[next[expert as usize] as usize] = rank;
            next[expert as usize] += 1;
        }
        Copies { first, ranks }
    }

    pub fn experts(&self) -> usize {
        self.first.len() - 1
    }

    /// Indices of the copies of `expert`.
    pub fn of(&self, expert: usize) -> Range<usize> {
        self.first[expert] as usize..self.first[expert + 1] as usize
    }
}

/// Tokens of each copy and rank, on their way to the level.
pub(crate) struct Flow<'a> {
    copies: &'a Copies,
    /// `[C]`
    pub tokens: Vec<u64>,
    /// `[P]`
    pub load: Vec<u64>,
    /// Copies of experts that have several, by rank: `[P + 1]`, and pairs of copy and expert.
    first: Vec<u32>,
    shared: Vec<(u32, u32)>,
    /// `[P]`, for a search: the copy that gives and the one that gets on the way to each rank.
    steps: Vec<Option<(u32, u32)>>,
    queue: Vec<u32>,
}

impl<'a> Flow<'a> {
    /// `tokens` is `[C]`.
    pub fn new(copies: &'a Copies, ranks: u32, tokens: Vec<u64>) -> Flow<'a> {
        let ranks = ranks as usize;
        let (mut load, mut first) = (vec![0; ranks], vec![0; ranks + 1]);
        for (rank, tokens) in copies.ranks.iter().zip(&tokens) {
            load[*rank as usize] += tokens;
        }
        let several = || (0..copies.experts()).filter(|expert| copies.of(*expert).len() > 1);
        for copy in several().flat_map(|expert| copies.of(expert)) {
            first[copies.ranks[copy] as usize + 1] += 1;
        }
        for rank in 0..ranks {
            first[rank + 1] += first[rank];
        }
        let mut next = first.clone();
        let mut shared = vec![(0, 0); first[ranks] as usize];
        for expert in several() {
            for copy in copies.of(expert) {
                let at = &mut next[copies.ranks[copy] as usize];
                shared[*at as usize] = (copy as u32, expert as u32);
                *at += 1;
            }
        }
        let queue = Vec::with_capacity(ranks);
        Flow { copies, tokens, load, first, shared, steps: vec![None; ranks], queue }
    }

    /// Moves tokens until no rank is above the lowest possible level, which is returned. Ranks
    /// below it are not filled any further: tokens move only where they must.
    pub fn level(&mut self) -> u64 {
        let all: u64 = self.load.iter().sum();
        let mut level = all.div_ceil(self.load.len().max(1) as u64);
        for rank in 0..self.load.len() {
            while self.load[rank] > level {
                match self.reach(rank, level) {
                    Some(end) => self.push(rank, end, level),
                    None => {
                        let all: u64 = self.queue.iter().map(|at| self.load[*at as usize]).sum();
                        level = all.div_ceil(self.queue.len() as u64);
                    }
                }
            }
        }
        level
    }

    /// The first rank below `level` that tokens of `from` can reach. None: `queue` has all ranks
    /// that they can reach.
    fn reach(&mut self, from: usize, level: u64) -> Option<usize> {
        self.steps.fill(None);
        self.queue.clear();
        self.queue.push(from as u32);
        let mut next = 0;
        while let Some(rank) = self.queue.get(next).map(|rank| *rank as usize) {
            next += 1;
            for at in self.first[rank]..self.first[rank + 1] {
                let (gives, expert) = self.shared[at as usize];
                if self.tokens[gives as usize] == 0 {
                    continue;
                }
                for gets in self.copies.of(expert as usize) {
                    let to = self.copies.ranks[gets] as usize;
                    if to == from || self.steps[to].is_some() {
                        continue;
                    }
                    self.steps[to] = Some((gives, gets as u32));
                    if self.load[to] < level {
                        return Some(to);
                    }
                    self.queue.push(to as u32);
                }
            }
        }
        None
    }

    /// Sends along the way that `reach` has found what `from` has too much and `end` has room for.
    fn push(&mut self, from: usize, end: usize, level: u64) {
        let mut amount = (self.load[from] - level).min(level - self.load[end]);
        let mut rank = end;
        while let Some((gives, _)) = self.steps[rank] {
            amount = amount.min(self.tokens[gives as usize]);
            rank = self.copies.ranks[gives as usize] as usize;
        }
        debug_assert_eq!(rank, from);
        let mut rank = end;
        while let Some((gives, gets)) = self.steps[rank] {
            self.tokens[gives as usize] -= amount;
            self.tokens[gets as usize] += amount;
            rank = self.copies.ranks[gives as usize] as usize;
        }
        self.load[from] -= amount;
        self.load[end] += amount;
    }
}
