//! Nodes on which this job's workers fail rest from it, longer and longer.

use super::{JobLoop, Memo, doubled, place::Patience};
use crate::observed::Millis;
use crate::record::{NodeRest, RESTS_MAX};
use std::collections::BTreeMap;

/// Failures are forgotten so long after the last of them.
const FORGOTTEN: Millis = 3_600_000;

/// By node: failures in a row, when the last of them was, and until when it rests.
#[derive(Debug, Default)]
pub(super) struct Rests(pub BTreeMap<String, NodeRest>);

impl Rests {
    /// A worker failed there, or did not come up in time: until when the node rests.
    fn failed(&mut self, node: &str, patience: &Patience, now: Millis) -> Millis {
        let (failures, last, _) = self.of(node, now);
        let wait = doubled(patience.rest, *failures, patience.rest_max);
        (*failures, *last) = (failures.saturating_add(1), now);
        now + wait
    }

    /// The node rests for another reason, too.
    fn until(&mut self, node: &str, until: Millis, now: Millis) {
        let (_, _, known) = self.of(node, now);
        *known = until.max(*known);
    }

    fn of(&mut self, node: &str, now: Millis) -> &mut NodeRest {
        self.0.retain(|_, (_, last, until)| now < *last + FORGOTTEN || now < *until);
        if self.0.len() >= RESTS_MAX && !self.0.contains_key(node) {
            let ends = |(_, last, until): &NodeRest| (*until).max(*last + FORGOTTEN);
            let first = self.0.iter().min_by_key(|(_, of)| ends(of)).map(|(node, _)| node.clone());
            first.map(|first| self.0.remove(&first));
        }
        self.0.entry(node.to_string()).or_default()
    }
}

impl JobLoop {
    /// The allocation of this leader is told what the one before knew.
    pub(super) fn rest_again(&mut self, now: Millis) {
        let rests = self.rests.0.iter().filter(|(_, (.., until))| now < *until);
        let memo = |(node, (.., until)): (&String, &NodeRest)| {
            Memo::Avoid { node: node.clone(), until: *until }
        };
        rests.map(memo).collect::<Vec<_>>().into_iter().for_each(|memo| self.memo(memo));
    }

    /// Its worker failed there for that reason.
    pub(super) fn blame(&mut self, node: &str, message: &str, now: Millis) {
        self.pods.trouble(node, message);
        let until = self.rests.failed(node, self.place.patience(), now);
        self.avoid(node, until, now);
    }

    /// A worker trained there: the node is as good as any.
    pub(super) fn praise(&mut self, node: &str) {
        self.pods.came_up(node);
        if let Some((failures, last, _)) = self.rests.0.get_mut(node) {
            (*failures, *last) = (0, 0);
        }
    }

    /// No new worker there before that time: this turn knows it, and the allocation from now on.
    pub(super) fn avoid(&mut self, node: &str, until: Millis, now: Millis) {
        self.rests.until(node, until, now);
        for of in self.granted.nodes.iter_mut().filter(|of| of.name == node) {
            of.avoid_until = of.avoid_until.max(until);
        }
        self.memo(Memo::Avoid { node: node.to_string(), until });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn patience() -> Patience {
        let (rest, rest_max) = (5_000, 600_000);
        Patience { kill_grace_s: 0, ending: 0, rest, rest_max, retry_max: 0 }
    }

    #[test]
    fn a_node_rests_longer_with_each_failure_until_they_are_forgotten() {
        let patience = patience();
        let mut rests = Rests::default();
        for wait in [5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 600_000, 600_000] {
            assert_eq!(rests.failed("n0", &patience, 7), 7 + wait);
        }
        assert_eq!(rests.failed("n1", &patience, 7), 5_007, "each node by itself");
        assert_eq!(rests.failed("n0", &patience, 7 + FORGOTTEN), 7 + FORGOTTEN + 5_000);
    }

    #[test]
    fn a_node_that_rests_for_longer_than_failures_count_rests_on() {
        let mut rests = Rests::default();
        rests.until("n0", 3 * FORGOTTEN, 1);
        rests.until("n1", 2 * FORGOTTEN, 1);
        rests.until("n2", 0, 2 * FORGOTTEN);
        assert_eq!(rests.0.keys().collect::<Vec<_>>(), ["n0", "n2"], "n1 has rested");
        assert_eq!(rests.0["n0"], (0, 0, 3 * FORGOTTEN));
    }

    #[test]
    fn of_so_many_nodes_the_one_is_forgotten_that_would_be_next() {
        let patience = patience();
        let mut rests = Rests::default();
        for at in 0..RESTS_MAX as u64 {
            rests.failed(&format!("n{at}"), &patience, 1_000 + at);
        }
        rests.until("n0", 2 * FORGOTTEN, 2_000);
        rests.failed("one more", &patience, 2_000);
        assert_eq!(rests.0.len(), RESTS_MAX);
        assert!(rests.0.contains_key("n0") && !rests.0.contains_key("n1"));
        // What is over is forgotten with the next one.
        rests.until("late", 9 * FORGOTTEN, 8 * FORGOTTEN);
        assert_eq!(rests.0.keys().collect::<Vec<_>>(), ["late"]);
    }
}
