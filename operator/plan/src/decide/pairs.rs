//! Nodes that are good by themselves measure with each other before their workers get a rank.

use super::{ANSWER_TIMEOUT, Action, Planner};
use crate::observed::{Millis, Worker, WorkerState};
use crate::preflight::{Checked, Open, Pair, Round, Rounds, Standing};
use moejob_protocol::message::CONTROL_PREFLIGHT;
use std::collections::{BTreeMap, BTreeSet};

/// For so long pairs wait for a worker that is starting: the more nodes there are, the fewer
/// rounds they take.
const STARTING_PATIENCE: Millis = 30_000;

impl<'o> Planner<'o> {
    /// One round after the other; what a round has shown the tracker knows.
    pub(super) fn pairs(&mut self) {
        let open = self.observed.preflight.pairs.open();
        for pair in open {
            self.look_after(pair);
        }
        if open.is_empty() && self.measures_pairs() && !self.waits_for_more() {
            self.next_round();
        }
    }

    fn measures_pairs(&self) -> bool {
        let standard = self.observed.wanted.preflight.as_ref();
        let wanted = standard.is_some_and(|standard| standard.pair_limit().is_some());
        wanted && self.observed.halting().is_none()
    }

    /// Its node is good by itself, and has yet to measure with others.
    pub(super) fn waits_for_pair(&self, worker: &Worker) -> bool {
        self.measures_pairs()
            && !worker.paired
            && self.can_pair(worker)
            && self.index.is_usable(&worker.node)
    }

    /// It could measure with another one now.
    fn can_pair(&self, worker: &Worker) -> bool {
        worker.checked == Checked::Passed
            && worker.state == WorkerState::Idle
            && worker.speaks >= CONTROL_PREFLIGHT
            && !worker.stopping
    }

    fn look_after(&mut self, pair: &'o Open) {
        let number = pair.number;
        let gone = pair.workers().find(|name| {
            let worker = self.observed.worker(name);
            !worker.is_some_and(|worker| self.can_pair(worker) && !self.is_ending(worker))
        });
        let until = pair.at + ANSWER_TIMEOUT;
        let mut late = false;
        let why = match gone {
            Some(name) => format!("{name} does not measure any more"),
            None if !self.measures_pairs() => "nothing is to be measured any more".to_string(),
            None if pair.has_another_stream() => {
                "one of its streams broke meanwhile".to_string()
            }
            None if self.now >= until => {
                late = true;
                format!("no answer within {} s", ANSWER_TIMEOUT / 1000)
            }
            None => {
                if let Some((name, _)) = pair.relay() {
                    self.why(format!("{name} is told where to meet"));
                    self.act(Action::RelayPair { number, name: name.to_string() });
                }
                return self.look_again_at(until);
            }
        };
        let names: Vec<&str> = pair.workers().collect();
        self.why(format!("the pair {} is over: {why}", names.join(" ")));
        self.act(Action::EndPair { number, late });
    }

    /// Nodes that are still to be measured by themselves, or start, may soon be among them.
    fn waits_for_more(&mut self) -> bool {
        if self.observed.preflight.pairs.rounds().is_some() {
            return false;
        }
        let mut waits = false;
        for worker in self.observed.workers.iter().filter(|worker| !worker.stopping) {
            let open = matches!(worker.checked, Checked::No | Checked::Asked { .. });
            waits |= open && self.waits_for_check(worker);
            if let WorkerState::Starting { since } = worker.state {
                let until = since + STARTING_PATIENCE;
                if self.now < until && self.has_waiting() {
                    self.look_again_at(until);
                    waits = true;
                }
            }
        }
        waits
    }

    fn has_waiting(&self) -> bool {
        self.observed.workers.iter().any(|worker| self.waits_for_pair(worker))
    }

    fn next_round(&mut self) {
        let pairs = &self.observed.preflight.pairs;
        let usable = |worker: &&&'o Worker| {
            self.can_pair(worker) && !self.is_ending(worker) && self.index.is_usable(&worker.node)
        };
        let workers = self.observed.workers.iter().collect::<Vec<&'o Worker>>();
        let there: BTreeMap<&str, &Worker> =
            workers.iter().filter(usable).map(|worker| (worker.node.as_str(), *worker)).collect();
        let mut rounds = match pairs.rounds() {
            Some(rounds) => rounds.clone(),
            None if there.values().all(|worker| worker.paired) => return,
            None => {
                let good = there.values().filter(|worker| worker.paired);
                let good: BTreeSet<String> = good.map(|worker| worker.node.clone()).collect();
                let order = self.observed.nodes.iter().map(|node| node.name.as_str());
                Rounds::new(order.filter(|name| there.contains_key(name)), &good)
            }
        };
        let is_lost = |node: &&String| !there.contains_key(node.as_str());
        let lost: Vec<String> = rounds.standings().keys().filter(is_lost).cloned().collect();
        lost.iter().for_each(|node| rounds.lose(node));
        // Orders for single nodes of this plan are given before.
        let is_order = |action: &&Action| matches!(action, Action::Preflight { .. });
        let orders = self.plan.actions.iter().filter(is_order).count() as u64;
        let first = self.observed.preflight.asked + orders + 1;
        let chosen = rounds.next_round();
        let side = |node: String| (there[node.as_str()].name.clone(), node);
        let pairs: Vec<Pair> = (first..)
            .zip(chosen)
            .map(|(number, (left, right))| Pair { number, sides: [side(left), side(right)] })
            .collect();
        let known = rounds.standings().values();
        let open = known.filter(|of| !matches!(of, Standing::Good { .. } | Standing::Bad)).count();
        match pairs.len() {
            0 => self.why("no pair of nodes is left to measure".to_string()),
            count => self.why(format!(
                "round {}: pairs of nodes that measure: {count}, nodes that are open: {open}",
                rounds.round()
            )),
        }
        self.act(Action::MeasurePairs(Box::new(Round { rounds, pairs })));
    }
}
