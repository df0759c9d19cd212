//! Nodes on which this job's workers fail rest from it, longer and longer.

use super::{JobLoop, Memo, place::Patience};
use crate::observed::Millis;
use std::collections::BTreeMap;

/// Failures are forgotten so long after the last of them.
const FORGOTTEN: Millis = 3_600_000;

/// By node: failures in a row, and when the last of them was.
#[derive(Debug, Default)]
pub(super) struct Rests(BTreeMap<String, (u32, Millis)>);

impl Rests {
    /// A worker failed there, or did not come up in time: until when the node rests.
    fn failed(&mut self, node: &str, patience: &Patience, now: Millis) -> Millis {
        self.0.retain(|_, (_, last)| now < *last + FORGOTTEN);
        let (failures, last) = self.0.entry(node.to_string()).or_default();
        let wait = patience.rest << (*failures).min(20);
        (*failures, *last) = (*failures + 1, now);
        now + wait.min(patience.rest_max)
    }
}

impl JobLoop {
    /// Its worker failed there for that reason.
    pub(super) fn blame(&mut self, node: &str, message: &str, now: Millis) {
        self.pods.trouble(node, message);
        let until = self.rests.failed(node, self.place.patience(), now);
        self.avoid(node, until);
    }

    /// A worker trained there: the node is as good as any.
    pub(super) fn praise(&mut self, node: &str) {
        self.pods.came_up(node);
        self.rests.0.remove(node);
    }

    /// No new worker there before that time: this turn knows it, and the allocation from now on.
    pub(super) fn avoid(&mut self, node: &str, until: Millis) {
        for of in self.granted.nodes.iter_mut().filter(|of| of.name == node) {
            of.avoid_until = of.avoid_until.max(until);
        }
        self.memo(Memo::Avoid { node: node.to_string(), until });
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_node_rests_longer_with_each_failure_until_they_are_forgotten() {
        let patience = Patience { kill_grace_s: 0, ending: 0, rest: 5_000, rest_max: 600_000 };
        let mut rests = Rests::default();
        for wait in [5_000, 10_000, 20_000, 40_000, 80_000, 160_000, 320_000, 600_000, 600_000] {
            assert_eq!(rests.failed("n0", &patience, 7), 7 + wait);
        }
        assert_eq!(rests.failed("n1", &patience, 7), 5_007, "each node by itself");
        assert_eq!(rests.failed("n0", &patience, 7 + FORGOTTEN), 7 + FORGOTTEN + 5_000);
    }
}
