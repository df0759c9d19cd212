//! Where the engines of a gang run, as their workers have read it back.

use moejob_manifest::words::several;
use moejob_protocol::seat::Seated;
use std::collections::{BTreeMap, BTreeSet};

/// Of one attempt, as far as its ranks have told.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Seats {
    attempt: u32,
    told: BTreeMap<u32, Seated>,
}

impl Seats {
    /// A rank of this attempt has told.
    pub fn heard(&mut self, attempt: u32, seated: Seated) {
        if self.attempt != attempt {
            *self = Seats { attempt, ..Seats::default() };
        }
        self.told.insert(seated.rank, seated);
    }

    /// How many ranks of this attempt have told.
    pub fn count(&self, attempt: u32) -> usize {
        if self.attempt == attempt { self.told.len() } else { 0 }
    }

    /// What is otherwise than planned, a line a rank.
    pub fn differences(&self) -> Vec<String> {
        let differs = self.told.values().filter(|seated| !seated.differences.is_empty());
        differs.map(|of| format!("rank {}: {}", of.rank, of.differences.join("; "))).collect()
    }

    /// Why not all is known, once each, with how many ranks say so.
    pub fn unknown(&self) -> Vec<String> {
        let why = self.told.values().map(|seated| &seated.unknown).filter(|why| !why.is_empty());
        let all: Vec<&String> = why.collect();
        let each: BTreeSet<&String> = all.iter().copied().collect();
        let count = |why: &String| all.iter().filter(|of| **of == why).count();
        let line = |why: &String| format!("{}: {why}", several(count(why), "rank"));
        each.into_iter().map(line).collect()
    }
}
