//! Nodes -> zone > tier N > .. > leaf > NVLink domain > host, from the labels that clouds and
//! topology operators put on nodes; and the order in which a job uses them.

use crate::{FabricFacts, Wish, arrange};
use moejob_manifest::job::Closeness;
use moejob_manifest::keys::{HOST, Keys, depth};
use moejob_manifest::spec::Level;
use moejob_manifest::words::several;
use serde::{Deserialize, Serialize};
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// A node as a cluster describes it.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", deny_unknown_fields)]
pub struct NodeInfo {
    pub name: String,
    #[serde(default)]
    pub labels: BTreeMap<String, String>,
    /// It accepts pods: ready, not cordoned, and well.
    #[serde(default = "yes")]
    pub usable: bool,
    /// Why it is not, where a cluster tells.
    #[serde(skip)]
    pub against: Option<String>,
    /// It is a cluster's own object, with all of its labels.
    #[serde(skip)]
    pub is_whole: bool,
}

fn yes() -> bool {
    true
}

impl NodeInfo {
    /// The parts that the node lies in, from wide to narrow, by the labels `keys`. A missing label
    /// is a part of its own name.
    pub fn path<'n>(&'n self, keys: &Keys) -> Vec<&'n str> {
        let mut path: Vec<&str> = keys.values(&self.labels).collect();
        if path[HOST].is_empty() {
            path[HOST] = &self.name;
        }
        path
    }
}

/// The nodes of a job in the order in which it uses them, and why.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Ordered {
    /// Names; neighbours in this list are neighbours in the cluster.
    pub nodes: Vec<String>,
    pub why: String,
}

/// Orders `nodes` for a job that wants at least `min` of them and uses up to `count`.
///
/// With a level, the part that has just enough nodes comes first; if that level is required, nodes
/// beyond it are left out. Parts and nodes of equal worth are taken by name, so equal inputs give
/// equal orders.
pub fn order(
    nodes: &[NodeInfo],
    keys: &Keys,
    wish: Option<(Level, Closeness)>,
    min: u32,
    count: u32,
) -> Ordered {
    let places = Places::new(nodes, keys);
    let usable: Vec<usize> = (0..nodes.len()).filter(|at| nodes[*at].usable).collect();
    let (ordered, first) = places.order(&usable, wish, min, count);
    let why = match (wish, ordered.first()) {
        (None, _) if usable.len() == 1 => "1 usable node".to_string(),
        (None, _) => format!("{} usable nodes, neighbours beside each other", usable.len()),
        (Some(_), None) => "no node is usable".to_string(),
        (Some((level, closeness)), Some(at)) => {
            let label = nodes[*at].path(keys)[depth(level)];
            let label = if label.is_empty() { "without a label" } else { label };
            let others = if closeness == Closeness::Required { ", no others" } else { "" };
            let first = several(first, "node");
            format!("{first} of {level:?} {label} first, of {}{others}", usable.len())
        }
    };
    Ordered { nodes: ordered.iter().map(|at| nodes[*at].name.clone()).collect(), why }
}

/// Where many nodes lie, looked up once.
#[derive(Clone, Debug)]
pub struct Places {
    /// The position of each node when neighbours stand beside each other.
    rank: Vec<u32>,
    /// For each level, zone first, the number of each node's part.
    parts: Vec<Vec<u32>>,
}

impl Places {
    pub fn new(nodes: &[NodeInfo], keys: &Keys) -> Places {
        let paths: Vec<Vec<&str>> = nodes.iter().map(|node| node.path(keys)).collect();
        let mut sorted: Vec<usize> = (0..nodes.len()).collect();
        sorted.sort_by_cached_key(|at| (&paths[*at][..HOST], natural(&nodes[*at].name)));
        let mut rank = vec![0; nodes.len()];
        for (position, at) in (0..).zip(&sorted) {
            rank[*at] = position;
        }
        // For each node the first level at which it is in another part than the one before it.
        let others: Vec<usize> = sorted
            .iter()
            .zip(sorted.iter().skip(1))
            .map(|(before, at)| {
                let pairs = paths[*before].iter().zip(&paths[*at]);
                pairs.take_while(|(before, at)| before == at).count()
            })
            .collect();
        let numbers = |level: usize| {
            let (mut numbers, mut number) = (vec![0; nodes.len()], 0);
            for (other, at) in others.iter().zip(sorted.iter().skip(1)) {
                number += u32::from(*other <= level);
                numbers[*at] = number;
            }
            numbers
        };
        Places { rank, parts: (0..=HOST).map(numbers).collect() }
    }

    /// Nodes of one number lie in one part of the level.
    pub fn part(&self, level: Level, node: usize) -> u32 {
        self.parts[depth(level)][node]
    }

    /// How many of `own` lie in one part with a node: of `level` first, then of each wider level
    /// from there on, then of each narrower one. So what compares greater lies nearer to them.
    pub fn beside(&self, own: &[usize], level: Level) -> impl Fn(usize) -> Vec<u32> + '_ {
        let levels = (0..=depth(level)).rev().chain(depth(level) + 1..HOST);
        let counted = |level: usize| {
            let mut counts: BTreeMap<u32, u32> = BTreeMap::new();
            for at in own {
                *counts.entry(self.parts[level][*at]).or_default() += 1;
            }
            (level, counts)
        };
        let counts: Vec<_> = levels.map(counted).collect();
        move |node| {
            let of = |(level, counts): &(usize, BTreeMap<u32, u32>)| {
                counts.get(&self.parts[*level][node]).copied().unwrap_or_default()
            };
            counts.iter().map(of).collect()
        }
    }

    /// These nodes in the order in which a gang of them is given its ranks, see `arrange`; `group`
    /// of them make an expert group.
    pub fn arranged(&self, nodes: &[usize], group: u32) -> Vec<usize> {
        let path = |at: &usize| self.parts[..HOST].iter().map(|level| level[*at]).collect();
        let paths: Vec<Vec<u32>> = nodes.iter().map(path).collect();
        let wish = Wish { group, leaf: depth(Level::Leaf) };
        arrange(&paths, &wish).into_iter().map(|index| nodes[index]).collect()
    }

    /// What ranks in the order of `nodes` cost; none where all lie on one leaf.
    pub fn facts(&self, nodes: &[usize], group: u32) -> Option<FabricFacts> {
        FabricFacts::of(&self.leaves(nodes), group)
    }

    /// The number of the leaf of each node.
    pub fn leaves(&self, nodes: &[usize]) -> Vec<u32> {
        nodes.iter().map(|at| self.part(Level::Leaf, *at)).collect()
    }

    /// `nodes` in the order that [`order`] describes, and how many of them lie in the first part.
    pub fn order(
        &self,
        nodes: &[usize],
        wish: Option<(Level, Closeness)>,
        min: u32,
        count: u32,
    ) -> (Vec<usize>, usize) {
        let mut nodes = nodes.to_vec();
        nodes.sort_unstable_by_key(|at| self.rank[*at]);
        let Some((level, closeness)) = wish else {
            let first = nodes.len();
            return (nodes, first);
        };
        let mut parts: BTreeMap<u32, Vec<usize>> = BTreeMap::new();
        for at in &nodes {
            parts.entry(self.part(level, *at)).or_default().push(*at);
        }
        // The part with the fewest spare nodes that has enough; else the largest.
        let (least, most) = (min as usize, count as usize);
        let worth = |nodes: &[usize]| {
            let size = nodes.len();
            match (size >= most, size >= least) {
                (true, _) => (0, size - most),
                (_, true) => (1, most - size),
                _ => (2, most.saturating_sub(size)),
            }
        };
        let mut ranked: Vec<Vec<usize>> = parts.into_values().collect();
        ranked.sort_by_key(|nodes| worth(nodes));
        let first = ranked.first().map_or(0, Vec::len);
        // What the first part does not have comes from parts near it: of the same wider ones.
        if let Some(home) = ranked.first().and_then(|nodes| nodes.first()).copied() {
            let shared = |nodes: &[usize]| {
                let same = |of: &&Vec<u32>| of[nodes[0]] == of[home];
                self.parts[..depth(level)].iter().take_while(same).count()
            };
            ranked[1..].sort_by_key(|nodes| Reverse(shared(nodes)));
        }
        if closeness == Closeness::Required {
            ranked.truncate(1);
        }
        (ranked.concat(), first)
    }
}

/// Puts the named nodes in the order in which a gang of them is given its ranks, and tells what
/// that costs.
pub fn arranged(
    nodes: &[NodeInfo],
    keys: &Keys,
    gang: &mut [String],
    group: u32,
) -> Option<FabricFacts> {
    let places = Places::new(nodes, keys);
    let known: BTreeMap<&str, usize> = nodes.iter().map(|node| &*node.name).zip(0..).collect();
    let seats: Vec<usize> = gang.iter().filter_map(|name| known.get(&**name).copied()).collect();
    let order = places.arranged(&seats, group);
    for (seat, node) in gang.iter_mut().zip(&order) {
        seat.clone_from(&nodes[*node].name);
    }
    places.facts(&order, group)
}

/// `node-10` after `node-9`: the digits at the end count as a number.
fn natural(name: &str) -> (&str, u64, &str) {
    let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
    (stem, name[stem.len()..].parse().unwrap_or(0), name)
}
