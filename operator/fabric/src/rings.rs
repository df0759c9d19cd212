//! What the ranks of a gang say that NCCL has built, and whether it is what was planned.

use super::verify::{Beside, TOLD_MAX, Verdict, verify};
use moejob_protocol::links::Built;
use std::collections::{BTreeMap, BTreeSet};

/// Of one attempt, as far as its ranks have told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Rings {
    attempt: u32,
    told: BTreeMap<u32, Built>,
    /// Once all have.
    found: Option<Found>,
}

/// What follows from what all have told.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Found {
    /// NCCL's version.
    pub version: String,
    pub verdict: Verdict,
    /// Why nothing is known of some ranks, once each, at most a few.
    pub unknown: Vec<String>,
    /// Ranks whose bytes to other nodes go by TCP.
    pub sockets: Vec<u32>,
}

impl Found {
    /// What is otherwise than planned, a sentence each; none where nothing is known to be.
    pub fn differences(&self) -> Vec<String> {
        match &self.verdict {
            Verdict::Differs(told) => told.clone(),
            Verdict::AsPlanned | Verdict::Unknown { .. } => Vec::new(),
        }
    }

    /// For a person.
    pub fn in_words(&self) -> String {
        let Found { version, verdict, unknown, .. } = self;
        match verdict {
            Verdict::AsPlanned => format!("NCCL {version} has built rings and trees as planned"),
            Verdict::Differs(told) => told.join("\n"),
            Verdict::Unknown { ranks } => {
                format!("ranks of which nothing is known: {ranks}; {}", unknown.join("; "))
            }
        }
    }
}

impl Rings {
    /// A rank of this attempt, of `world`, has told. `nodes` names the node of each, in rank order.
    /// What is found, where all have told now.
    pub fn heard<'n>(
        &mut self,
        attempt: u32,
        built: Built,
        world: usize,
        nodes: impl FnOnce() -> Vec<&'n str>,
    ) -> Option<&Found> {
        if self.attempt != attempt {
            *self = Rings { attempt, ..Rings::default() };
        }
        let known = self.told.insert(built.rank, built.clone());
        // A new leader's worker says it again.
        if known.as_ref() == Some(&built) || self.told.len() < world {
            return None;
        }
        self.found = Some(found(&self.told, &nodes()));
        self.found.as_ref()
    }

    /// How many ranks of this attempt have told.
    pub fn count(&self, attempt: u32) -> usize {
        if self.attempt == attempt { self.told.len() } else { 0 }
    }

    pub fn found(&self, attempt: u32) -> Option<&Found> {
        self.found.as_ref().filter(|_| self.attempt == attempt)
    }
}

fn found(told: &BTreeMap<u32, Built>, nodes: &[&str]) -> Found {
    let beside: Vec<Beside> = (told.values())
        .map(|Built { rank, rings, parents, .. }| Beside {
            rank: *rank,
            rings: rings.clone(),
            parents: parents.clone(),
        })
        .collect();
    let why: BTreeSet<&String> =
        told.values().map(|built| &built.unknown).filter(|why| !why.is_empty()).collect();
    let sockets = told.values().filter(|built| built.sockets).map(|built| built.rank);
    Found {
        version: told.values().next().map(|built| built.version.clone()).unwrap_or_default(),
        verdict: verify(nodes, &beside),
        unknown: why.into_iter().take(TOLD_MAX).cloned().collect(),
        sockets: sockets.collect(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn built(rank: u32, before: u32, behind: u32) -> Built {
        let rings = BTreeSet::from([(before, behind)]);
        Built { rank, version: "2.28.9".to_string(), rings, ..Built::default() }
    }

    fn heard(rings: &mut Rings, attempt: u32, built: Built, nodes: &[&str]) -> Option<Found> {
        rings.heard(attempt, built, nodes.len(), || nodes.to_vec()).cloned()
    }

    #[test]
    fn nothing_is_found_before_all_have_told_and_another_attempt_begins_anew() {
        let nodes = ["a", "a", "b", "b"];
        let mut rings = Rings::default();
        for rank in [2, 0, 3] {
            let told = built(rank, (rank + 3) % 4, (rank + 1) % 4);
            assert_eq!(heard(&mut rings, 1, told, &nodes), None);
        }
        assert_eq!((rings.count(1), rings.count(2)), (3, 0));
        let found = heard(&mut rings, 1, built(1, 0, 2), &nodes).expect("all have told");
        assert_eq!((&found.verdict, &found.version[..]), (&Verdict::AsPlanned, "2.28.9"));
        assert_eq!(heard(&mut rings, 1, built(1, 0, 2), &nodes), None, "it was told before");
        assert!(rings.found(1).is_some() && rings.found(2).is_none());
        assert_eq!(heard(&mut rings, 2, built(0, 3, 1), &nodes), None);
        assert_eq!((rings.count(1), rings.count(2), rings.found(1)), (0, 1, None));
    }

    #[test]
    fn who_knows_nothing_says_why_and_sockets_are_named() {
        let nodes = ["a", "b"];
        let mut rings = Rings::default();
        let why = "NCCL_DEBUG is set".to_string();
        for rank in 0..2 {
            let built = Built { rank, unknown: why.clone(), ..Built::default() };
            heard(&mut rings, 1, built, &nodes);
        }
        let found = rings.found(1).expect("all have told");
        assert_eq!(found.verdict, Verdict::Unknown { ranks: 2 });
        assert_eq!(found.unknown, [why]);
        let found = heard(&mut rings, 1, Built { sockets: true, ..built(1, 0, 0) }, &nodes);
        assert_eq!(found.expect("it tells more").sockets, [1]);
    }
}
