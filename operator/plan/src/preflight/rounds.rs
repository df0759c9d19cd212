//! Which pairs of nodes measure with each other, round after round, until each is known.
//!
//! A slow pair does not tell which of its two is to blame. So each suspect measures with a node
//! that is known to be good: all suspects at once, each with another partner, and those that were
//! slow again once more. A node that is slow with two good partners is bad.

use std::collections::{BTreeMap, BTreeSet, VecDeque};

/// However unlucky: with one good node left, each suspect takes two rounds.
const ROUNDS_MAX: u32 = 256;
/// Times that suspects measure with each other while no good node is known.
const REGROUPINGS_MAX: u32 = 3;

/// What is known of a node.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub enum Standing {
    /// It was fast with somebody. `slow` counts the good partners that it was slow with before: a
    /// person is told where there was one.
    Good { slow: u32 },
    /// It has not measured yet.
    New,
    /// It was slow, with so many good partners.
    Suspect { slow: u32 },
    /// It was slow with two good partners.
    Bad,
    /// There was no good node to compare it with.
    Undecided,
}

/// What a pair measured.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PairResult {
    pub pair: (String, String),
    /// Within the limit; a pair that gave no answer is not.
    pub fast: bool,
}

/// The rounds of one preflight. Equal inputs give equal rounds.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Rounds {
    /// In the order of the gang, so that first pairs are near each other.
    order: Vec<String>,
    standings: BTreeMap<String, Standing>,
    /// Pairs that have measured, both ways.
    tried: BTreeSet<(String, String)>,
    /// How often a node has served as a good partner.
    served: BTreeMap<String, u32>,
    round: u32,
    regroupings: u32,
}

impl Rounds {
    /// Of nodes in the order of the gang; those in `good` passed not long ago and are partners from
    /// the beginning. A name that comes twice counts once.
    pub fn new<'a>(nodes: impl IntoIterator<Item = &'a str>, good: &BTreeSet<String>) -> Rounds {
        let mut standings = BTreeMap::new();
        let mut order = Vec::new();
        for node in nodes {
            let is_good = good.contains(node);
            let standing = if is_good { Standing::Good { slow: 0 } } else { Standing::New };
            if standings.insert(node.to_string(), standing).is_none() {
                order.push(node.to_string());
            }
        }
        Rounds {
            order,
            standings,
            tried: BTreeSet::new(),
            served: BTreeMap::new(),
            round: 0,
            regroupings: 0,
        }
    }

    pub fn standings(&self) -> &BTreeMap<String, Standing> {
        &self.standings
    }

    /// Measures no more with anybody: its worker is gone, or it is bad for another reason.
    pub fn lose(&mut self, node: &str) {
        self.standings.remove(node);
        self.order.retain(|of| of != node);
    }

    /// Where nothing was heard of anybody, the first round comes again.
    pub fn restart(&mut self) {
        if self.standings.values().all(|standing| *standing == Standing::New) {
            self.round = 0;
        }
    }

    pub fn round(&self) -> u32 {
        self.round
    }

    /// The pairs that measure at once in the next round, each node in one at most; none when all
    /// that can be known is. Nodes that nothing can be known of are `Undecided` then. One node
    /// alone has nothing between nodes that could be bad.
    pub fn next_round(&mut self) -> Vec<(String, String)> {
        if let [only] = &self.order[..] {
            self.standings.insert(only.clone(), Standing::Good { slow: 0 });
            return Vec::new();
        }
        let pairs = if self.round < ROUNDS_MAX { self.pairs() } else { Vec::new() };
        if pairs.is_empty() {
            for standing in self.standings.values_mut() {
                if matches!(standing, Standing::New | Standing::Suspect { .. }) {
                    *standing = Standing::Undecided;
                }
            }
            return pairs;
        }
        self.round += 1;
        pairs
    }

    fn pairs(&mut self) -> Vec<(String, String)> {
        let are = |is: fn(&Standing) -> bool| -> Vec<String> {
            let names = self.order.iter();
            names.filter(|name| self.standings.get(*name).is_some_and(is)).cloned().collect()
        };
        let good = are(|standing| matches!(standing, Standing::Good { .. }));
        let new = are(|standing| *standing == Standing::New);
        let suspects = are(|standing| matches!(standing, Standing::Suspect { .. }));
        if !good.is_empty() && !(new.is_empty() && suspects.is_empty()) {
            // In the first round new ones measure with each other: half as many good are needed.
            if self.round == 0 && new.len() > good.len() {
                return self.neighbours(&new, &good);
            }
            let asking: Vec<String> = suspects.into_iter().chain(new).collect();
            return self.with_partners(&asking, &good);
        }
        if !new.is_empty() && self.round == 0 {
            return self.neighbours(&new, &good);
        }
        let asking: Vec<String> = suspects.into_iter().chain(new).collect();
        if good.is_empty() && asking.len() > 2 && self.regroupings < REGROUPINGS_MAX {
            self.regroupings += 1;
            return self.regrouped(&asking);
        }
        Vec::new()
    }

    /// First with second, third with fourth; one that is left over takes a good partner, or waits.
    fn neighbours(&mut self, new: &[String], good: &[String]) -> Vec<(String, String)> {
        let chunks = new.chunks_exact(2);
        let rest = chunks.remainder().to_vec();
        let mut pairs: Vec<(String, String)> =
            chunks.map(|pair| (pair[0].clone(), pair[1].clone())).collect();
        pairs.extend(self.with_partners(&rest, good));
        pairs
    }

    /// Each with a good partner of its own that it has not measured with, the least used first;
    /// with one that it knows where there is no other. Those without a partner wait.
    fn with_partners(&mut self, asking: &[String], good: &[String]) -> Vec<(String, String)> {
        let mut free: Vec<&String> = good.iter().collect();
        let mut pairs = Vec::new();
        for node in asking {
            let served = |name: &String| self.served.get(name).copied().unwrap_or(0);
            let known = |name: &String| self.tried.contains(&(node.clone(), name.clone()));
            let place = |name: &String| self.order.iter().position(|of| of == name);
            let best = free.iter().enumerate().min_by_key(|(_, name)| {
                (known(name), served(name), place(name))
            });
            let Some((at, _)) = best else { break };
            let partner = free.remove(at).clone();
            *self.served.entry(partner.clone()).or_default() += 1;
            pairs.push((node.clone(), partner));
        }
        pairs
    }

    /// While no node is good: suspects with others than before, so that two good ones that both
    /// had a bad partner meet.
    fn regrouped(&self, asking: &[String]) -> Vec<(String, String)> {
        let mut waiting: VecDeque<&String> = asking.iter().collect();
        let mut pairs = Vec::new();
        while let Some(node) = waiting.pop_front() {
            let fresh = |other: &&String| !self.tried.contains(&(node.clone(), (*other).clone()));
            if let Some(at) = waiting.iter().position(fresh) {
                let partner = waiting.remove(at).cloned().unwrap_or_default();
                pairs.push((node.clone(), partner));
            }
        }
        pairs
    }

    /// What the pairs of a round gave. Pairs that nobody asked for change nothing.
    pub fn heard(&mut self, results: &[PairResult]) {
        // By what was known before the round: its results do not judge each other.
        let before = self.standings.clone();
        for PairResult { pair: (left, right), fast } in results {
            let (Some(of_left), Some(of_right)) = (before.get(left), before.get(right)) else {
                continue;
            };
            if left == right {
                continue;
            }
            self.tried.insert((left.clone(), right.clone()));
            self.tried.insert((right.clone(), left.clone()));
            self.learn(left, *of_left, *of_right, *fast);
            self.learn(right, *of_right, *of_left, *fast);
        }
    }

    fn learn(&mut self, node: &str, own: Standing, partner: Standing, fast: bool) {
        let is_good = matches!(partner, Standing::Good { .. });
        let now = match (own, fast) {
            // A good node is not blamed for a partner.
            (Standing::Good { .. } | Standing::Bad, _) => own,
            (Standing::Suspect { slow }, true) => Standing::Good { slow },
            (Standing::New | Standing::Undecided, true) => Standing::Good { slow: 0 },
            (Standing::Suspect { slow }, false) if is_good && slow >= 1 => Standing::Bad,
            (Standing::Suspect { slow }, false) => {
                Standing::Suspect { slow: slow + u32::from(is_good) }
            }
            (Standing::New | Standing::Undecided, false) => {
                Standing::Suspect { slow: u32::from(is_good) }
            }
        };
        self.standings.insert(node.to_string(), now);
    }
}
