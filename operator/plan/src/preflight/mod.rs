//! Preflight: whether nodes are good enough for a gang, before it trains on them.
//!
//! ```text
//! each node by itself: Measured --judge--> Outcomes        against the profile's `expect`  verdict
//! nodes that passed --Rounds--> pairs at once, suspects with good partners --> Standings    rounds
//! answers of two workers --Pairs--> a place to meet, results of a round; what is known       pairs
//! Outcomes, Standings --worst--> the nodes to look at, at most eight
//! a node that passed is not measured again for an hour                                      cache
//! what was found of which node                                                            results
//! ```
//! Whoever measures is told what, and gives numbers; all that follows from them is decided here.

mod cache;
mod pairs;
mod results;
mod rounds;
mod verdict;

pub use cache::{CACHED_MS, Cache, Key, News, Passes};
pub use pairs::{Known, Open, Pair, Pairs, Round};
pub use results::{Checked, Found, Results, Standard, line};
pub use rounds::{PairResult, Rounds, Standing};
pub use moejob_protocol::preflight::{Check, Grade, Measured, Value};
pub use verdict::{Outcome, judge, nhc};

/// Nodes that are listed as the worst.
pub const WORST_MAX: usize = 8;

/// The nodes that are not good, worst first: by grade, then by how far below their limit they are,
/// then by name. At most eight, each with its worst outcome.
pub fn worst<'a>(
    nodes: impl IntoIterator<Item = (&'a str, &'a [Outcome])>,
) -> Vec<(&'a str, &'a Outcome)> {
    let worst_of = |(name, outcomes): (&'a str, &'a [Outcome])| {
        let bad = outcomes.iter().filter(|outcome| outcome.grade > Grade::Good);
        Some((name, bad.max_by(|a, b| a.badness().total_cmp(&b.badness()))?))
    };
    let mut all: Vec<(&str, &Outcome)> = nodes.into_iter().filter_map(worst_of).collect();
    all.sort_by(|(left, a), (right, b)| {
        b.badness().total_cmp(&a.badness()).then_with(|| left.cmp(right))
    });
    all.truncate(WORST_MAX);
    all
}
