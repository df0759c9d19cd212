//! Which holder of an expert computes which tokens.
//!
//! Every rank knows how many tokens each source has for each expert: the counts are exchanged
//! anyway. From these alone each computes the same shares. A source's tokens of an expert, in their
//! order, go to its copies in runs, in the order of the copies.
//!
//! Every token begins with the nearest holder. Ranks above the lowest possible level then give up
//! what is above it ([`crate::flow`]), so tokens leave their node only where balance needs it.

use crate::flow::{Copies, Flow};
use crate::replicas::Replicas;
use std::cmp::Reverse;

/// The smallest amount of tokens that goes to one holder.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Unit {
    /// Tokens go one by one, so the fullest rank has the optimum.
    Token,
    /// All tokens of a source for an expert go to one holder, so no sum over them is cut. In fp32
    /// no bit depends on the replicas then.
    Source,
}

/// Tokens of each source by copy of an expert.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Shares {
    pub copies: Copies,
    /// `[P, C]`, tokens of each source that each copy computes.
    pub tokens: Vec<u32>,
}

impl Shares {
    /// `counts` are tokens by source and expert, `[P, E]`, and `nodes` the node of each rank of the
    /// expert group, `[P]`.
    pub fn split(counts: &[u32], replicas: &Replicas, nodes: &[u32], unit: Unit) -> Shares {
        let copies = replicas.copies();
        let sources = replicas.ranks as usize;
        assert_eq!(counts.len(), sources * copies.experts(), "tokens by source and expert");
        assert_eq!(nodes.len(), sources, "the node of each rank");
        let mut shares = Shares { tokens: vec![0; sources * copies.ranks.len()], copies };
        match unit {
            Unit::Token => shares.cut(counts, nodes),
            Unit::Source => shares.whole(counts, nodes),
        }
        shares
    }

    /// Tokens of each rank, `[P]`.
    pub fn loads(&self) -> Vec<u64> {
        let copies = self.copies.ranks.len().max(1);
        let mut loads = vec![0; self.tokens.len() / copies];
        for row in self.tokens.chunks_exact(copies) {
            for (rank, tokens) in self.copies.ranks.iter().zip(row) {
                loads[*rank as usize] += u64::from(*tokens);
            }
        }
        loads
    }

    /// The best tokens of each copy, `[C]`, that begin with the nearest holders, and the level of
    /// the fullest rank.
    fn quotas(&self, counts: &[u32], nodes: &[u32]) -> (Vec<u64>, u64) {
        let copies = &self.copies;
        let mut tokens = vec![0; copies.ranks.len()];
        for (source, row) in counts.chunks_exact(copies.experts().max(1)).enumerate() {
            for (expert, count) in row.iter().enumerate() {
                let range = copies.of(expert);
                let mut nearest = range.start;
                if range.len() > 1 {
                    let distance = |copy: &usize| distance(nodes, source, copies.ranks[*copy]);
                    nearest = range.min_by_key(distance).unwrap_or(nearest);
                }
                tokens[nearest] += u64::from(*count);
            }
        }
        let mut flow = Flow::new(copies, nodes.len() as u32, tokens);
        let level = flow.level();
        (flow.tokens, level)
    }

    /// Copies get their tokens from the nearest sources first.
    fn cut(&mut self, counts: &[u32], nodes: &[u32]) {
        let (mut quotas, _) = self.quotas(counts, nodes);
        let (experts, copies) = (self.copies.experts(), self.copies.ranks.len());
        for expert in 0..experts {
            let range = self.copies.of(expert);
            if range.len() == 1 {
                for source in 0..nodes.len() {
                    self.tokens[source * copies + range.start] = counts[source * experts + expert];
                }
                continue;
            }
            let mut left: Vec<u32> =
                (0..nodes.len()).map(|source| counts[source * experts + expert]).collect();
            for near in 0..=FAR {
                for copy in range.clone() {
                    for (source, left) in left.iter_mut().enumerate() {
                        if *left == 0 || distance(nodes, source, self.copies.ranks[copy]) != near {
                            continue;
                        }
                        let amount = quotas[copy].min(u64::from(*left));
                        quotas[copy] -= amount;
                        *left -= amount as u32;
                        self.tokens[source * copies + copy] += amount as u32;
                    }
                }
            }
        }
    }

    /// The best tokens of each copy, rounded to sources, and then improved.
    fn whole(&mut self, counts: &[u32], nodes: &[u32]) {
        let (experts, ranks) = (self.copies.experts(), nodes.len());
        let (quotas, level) = self.quotas(counts, nodes);
        let mut quotas: Vec<i64> = quotas.into_iter().map(|quota| quota as i64).collect();
        let mut items = Vec::new();
        let (mut load, mut plain) = (vec![0_u64; ranks], vec![0_u64; ranks]);
        for (source, row) in counts.chunks_exact(experts.max(1)).enumerate() {
            for (expert, count) in row.iter().enumerate() {
                let range = self.copies.of(expert);
                let owner = self.copies.ranks[range.start] as usize;
                plain[owner] += u64::from(*count);
                if range.len() == 1 || *count == 0 {
                    load[owner] += u64::from(*count);
                    self.tokens[source * self.copies.ranks.len() + range.start] = *count;
                } else {
                    items.push(Item { tokens: *count, source, expert, copy: range.start });
                }
            }
        }
        items.sort_unstable_by_key(|item| (Reverse(item.tokens), item.source, item.expert));
        for item in &mut items {
            let near = |copy: usize| distance(nodes, item.source, self.copies.ranks[copy]);
            // The nearest copy that it fits, or the one that it exceeds least.
            let fits = |copy: &usize| {
                let left = (quotas[*copy] - i64::from(item.tokens)).min(0);
                (left, Reverse(near(*copy)), Reverse(*copy))
            };
            item.copy = self.copies.of(item.expert).max_by_key(fits).unwrap_or(item.copy);
            quotas[item.copy] -= i64::from(item.tokens);
        }
        let mut held = Items { copies: &self.copies, by_rank: vec![Vec::new(); ranks], load };
        items.iter().for_each(|item| held.add(*item));
        for _ in &items {
            if !held.improve(level + level / WORTH) {
                break;
            }
        }
        let worse = held.load.iter().max() > plain.iter().max();
        for item in held.by_rank.iter().flatten() {
            let copy = if worse { self.copies.of(item.expert).start } else { item.copy };
            self.tokens[item.source * self.copies.ranks.len() + copy] = item.tokens;
        }
    }
}

/// One part in so many above the optimum is no longer improved.
const WORTH: u64 = 256;

/// Tokens of one source for an expert with several copies, and the copy that they go to.
#[derive(Clone, Copy)]
struct Item {
    tokens: u32,
    source: usize,
    expert: usize,
    copy: usize,
}

/// Items by the rank that they go to, and tokens of each rank, `[P]`.
struct Items<'a> {
    copies: &'a Copies,
    by_rank: Vec<Vec<Item>>,
    load: Vec<u64>,
}

impl Items<'_> {
    fn add(&mut self, item: Item) {
        let rank = self.copies.ranks[item.copy] as usize;
        self.load[rank] += u64::from(item.tokens);
        self.by_rank[rank].push(item);
    }

    /// Gives item `at` of `rank` to another copy.
    fn give(&mut self, rank: usize, at: usize, copy: usize) {
        let item = self.by_rank[rank].swap_remove(at);
        self.load[rank] -= u64::from(item.tokens);
        self.add(Item { copy, ..item });
    }

    /// Takes an item off the fullest rank, or exchanges it for a smaller one, so that both ranks
    /// stay below what the fullest had; the best of these. False where none does, or where the
    /// fullest is at `goal`.
    fn improve(&mut self, goal: u64) -> bool {
        let Some(full) = (0..self.load.len()).max_by_key(|rank| self.load[*rank]) else {
            return false;
        };
        let most = self.load[full];
        if most <= goal {
            return false;
        }
        let mut best = (most, 0, 0, None);
        for (at, item) in self.by_rank[full].iter().enumerate() {
            let tokens = u64::from(item.tokens);
            for copy in self.copies.of(item.expert).filter(|copy| *copy != item.copy) {
                let to = self.copies.ranks[copy] as usize;
                let after = (most - tokens).max(self.load[to] + tokens);
                if after < best.0 {
                    best = (after, at, copy, None);
                }
                if most - tokens >= best.0 || self.load[to] >= best.0 {
                    continue;
                }
                for (other_at, other) in self.by_rank[to].iter().enumerate() {
                    let back = u64::from(other.tokens);
                    if back >= tokens {
                        continue;
                    }
                    let after = (most - tokens + back).max(self.load[to] + tokens - back);
                    if after < best.0 {
                        let home = |copy: &usize| self.copies.ranks[*copy] as usize == full;
                        if let Some(home) = self.copies.of(other.expert).find(home) {
                            best = (after, at, copy, Some((other_at, home)));
                        }
                    }
                }
            }
        }
        let (_, at, copy, exchange) = best;
        if best.0 == most {
            return false;
        }
        if let Some((other_at, home)) = exchange {
            self.give(self.copies.ranks[copy] as usize, other_at, home);
        }
        self.give(full, at, copy);
        true
    }
}

/// The distance between ranks of different nodes.
const FAR: u32 = 2;

/// How far tokens of `source` travel to `rank`: not at all, within a node, or between nodes.
fn distance(nodes: &[u32], source: usize, rank: u32) -> u32 {
    match rank as usize {
        rank if rank == source => 0,
        rank if nodes[rank] == nodes[source] => 1,
        _ => FAR,
    }
}
