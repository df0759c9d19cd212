//! What NCCL has built against what the order of ranks was chosen for.
//!
//! The plan counts crossings by NCCL's own construction (`trees`). A version may build otherwise,
//! and a setting (NCCL_RINGS, a topology file) may as well. Then the order was chosen for nothing,
//! and a person is told. Nothing else follows: the job trains on.

use super::trees::tree_links;
use std::collections::{BTreeMap, BTreeSet};

/// Differences that are told; more of them say nothing new.
pub const TOLD_MAX: usize = 8;

/// The ranks beside one rank, over all channels.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Beside {
    pub rank: u32,
    /// Before it and behind it in a ring.
    pub rings: BTreeSet<(u32, u32)>,
    /// Above it in a tree.
    pub parents: BTreeSet<u32>,
}

/// What is found out.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Verdict {
    /// Nothing is known of some ranks: so many.
    Unknown { ranks: u32 },
    /// Links between nodes are those of the plan.
    AsPlanned,
    Differs(Vec<String>),
}

/// Of a communicator of all ranks. `nodes` names the node of each rank, in rank order.
pub fn verify<'n>(nodes: &[&'n str], found: &[Beside]) -> Verdict {
    let mut numbers: BTreeMap<&'n str, u32> = BTreeMap::new();
    let mut names: Vec<&'n str> = Vec::new();
    let number = |name: &&'n str| {
        let next = names.len() as u32;
        *numbers.entry(name).or_insert_with(|| {
            names.push(name);
            next
        })
    };
    let of_rank: Vec<u32> = nodes.iter().map(number).collect();
    let count = names.len() as u32;
    let links: BTreeSet<(u32, u32)> = tree_links(count).into_iter().collect();
    let mut differences = BTreeSet::new();
    let mut known = BTreeSet::new();
    let node = |rank: u32| of_rank.get(rank as usize).copied();
    let name = |node: u32| names.get(node as usize).copied().unwrap_or("a node that is none");
    for Beside { rank, rings, parents } in found {
        let Some(own) = node(*rank) else { continue };
        if rings.is_empty() {
            continue;
        }
        known.insert(*rank);
        for (before, behind) in rings {
            let beside = |rank: u32, expected: u32| match node(rank) {
                Some(found) => found == own || found == expected,
                None => false,
            };
            if !beside(*behind, (own + 1) % count) {
                let there = node(*behind).map_or("a rank that is none", name);
                let planned = name((own + 1) % count);
                differences.insert(format!(
                    "a ring goes from {} to {there}, planned was {planned}",
                    name(own)
                ));
            }
            if !beside(*before, (own + count - 1) % count) {
                let there = node(*before).map_or("a rank that is none", name);
                let planned = name((own + count - 1) % count);
                differences.insert(format!(
                    "a ring comes to {} from {there}, planned was {planned}",
                    name(own)
                ));
            }
        }
        for parent in parents {
            let above = node(*parent);
            if above.is_none_or(|above| above != own && !links.contains(&(own, above))) {
                let there = above.map_or("a rank that is none", name);
                differences.insert(format!(
                    "in a tree {} hangs below {there}, which neither of the two trees has",
                    name(own)
                ));
            }
        }
    }
    if !differences.is_empty() {
        let more = differences.len().saturating_sub(TOLD_MAX);
        let mut told: Vec<String> = differences.into_iter().take(TOLD_MAX).collect();
        if more > 0 {
            told.push(format!("{more} more"));
        }
        return Verdict::Differs(told);
    }
    match nodes.len() as u32 - known.len() as u32 {
        0 => Verdict::AsPlanned,
        ranks => Verdict::Unknown { ranks },
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What NCCL builds over these nodes of two ranks each: rings through both ranks of a node,
    /// and trees that hang a node's first rank below another's.
    fn built(count: u32) -> Vec<Beside> {
        let ranks = 2 * count;
        let mut all: Vec<Beside> = (0..ranks)
            .map(|rank| {
                let ring = ((rank + ranks - 1) % ranks, (rank + 1) % ranks);
                Beside { rank, rings: BTreeSet::from([ring]), parents: BTreeSet::new() }
            })
            .collect();
        for (child, above) in tree_links(count) {
            all[2 * child as usize].parents.insert(2 * above + 1);
        }
        for node in 0..count {
            all[2 * node as usize + 1].parents.insert(2 * node);
        }
        all
    }

    fn names(count: u32) -> Vec<String> {
        (0..2 * count).map(|rank| format!("n{}", rank / 2)).collect()
    }

    #[test]
    fn what_nccl_builds_by_itself_is_as_planned() {
        for count in 1..40 {
            let names = names(count);
            let nodes: Vec<&str> = names.iter().map(String::as_str).collect();
            assert_eq!(verify(&nodes, &built(count)), Verdict::AsPlanned, "{count} nodes");
        }
    }

    #[test]
    fn another_order_is_named_and_silence_is_not_taken_for_consent() {
        let names = names(4);
        let nodes: Vec<&str> = names.iter().map(String::as_str).collect();
        let mut found = built(4);
        assert_eq!(verify(&nodes, &found[..6]), Verdict::Unknown { ranks: 2 });
        assert_eq!(verify(&nodes, &[]), Verdict::Unknown { ranks: 8 });
        found[1].rings = BTreeSet::from([(0, 4)]);
        found[4].parents.insert(99);
        let Verdict::Differs(told) = verify(&nodes, &found) else { panic!("it differs") };
        assert_eq!(told, [
            "a ring goes from n0 to n2, planned was n1",
            "in a tree n2 hangs below a rank that is none, which neither of the two trees has",
        ]);
        // Ranks that were dealt out in turns meet another node with each link.
        let turns: Vec<&str> = (0..8).map(|rank| nodes[(rank * 2) % 8]).collect();
        assert_eq!(verify(&turns, &built(4)[..0]), Verdict::Unknown { ranks: 8 });
    }
}
