//! What the leader knows of nodes that were measured.

use super::{
    Cache, Grade, Key, Known, News, Outcome, Pairs, Passes, WORST_MAX, judge, worst,
};
use crate::observed::Millis;
use moejob_manifest::profile::{Limit, Profile};
use moejob_protocol::config::Backend;
use moejob_protocol::pair::{Meeting, PAIR_CHECK, PairOrder};
use moejob_protocol::preflight::{Answer, Expected, Order};
use std::collections::BTreeMap;

/// Nodes that are remembered as not good; beyond them those go that were measured first.
const NODES_MAX: usize = 256;
/// What is kept of a text of a worker's.
const TEXT_CHARS_MAX: usize = 200;

/// What a job's nodes are held against.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Standard {
    pub namespace: String,
    /// What the workers run.
    pub image: String,
    /// The profile's digest.
    pub profile: String,
    pub expected: Expected,
    pub expect: BTreeMap<String, Limit>,
}

impl Standard {
    pub fn of(profile: &Profile) -> Standard {
        Standard {
            profile: profile.digest.clone(),
            expected: profile.expected(),
            expect: profile.expect.clone(),
            ..Standard::default()
        }
    }

    /// What a pair of nodes must reach; none: they do not measure together.
    pub fn pair_limit(&self) -> Option<Limit> {
        let gpus = self.expected.backend == Backend::Cuda && self.expected.devices > 0;
        self.expect.get(PAIR_CHECK).copied().filter(|_| gpus)
    }

    fn key(&self, node: &str, boot_id: &str, paired: bool) -> Key {
        Key {
            paired,
            namespace: self.namespace.clone(),
            node: node.to_string(),
            boot_id: boot_id.to_string(),
            profile: self.profile.clone(),
            image: self.image.clone(),
        }
    }
}

/// Whether a worker's node was measured.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Checked {
    #[default]
    No,
    Asked { number: u64, at: Millis },
    Passed,
    Failed,
    /// It was asked and has said nothing.
    Silent,
}

/// A node that is not good.
#[derive(Clone, Debug, PartialEq)]
pub struct Found {
    /// Those that are not good, worst first.
    pub outcomes: Vec<Outcome>,
    pub at: Millis,
}

impl Found {
    pub fn grade(&self) -> Grade {
        self.outcomes.iter().map(|outcome| outcome.grade).max().unwrap_or(Grade::Good)
    }
}

/// In the leader's memory alone: the next one measures nodes of idle workers anew. Passes are told
/// to the other jobs of the namespace.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Results {
    cache: Cache,
    /// By name.
    nodes: BTreeMap<String, Found>,
    /// Orders so far.
    pub asked: u64,
    /// Nodes that measure with each other.
    pub pairs: Pairs,
}

impl Results {
    /// The next order, for a worker on `node`.
    pub fn order(&self, standard: &Standard, node: &str, now: Millis) -> Order {
        Order {
            number: self.asked + 1,
            expected: standard.expected.clone(),
            passed_at_boot: self.cache.boot_of(&standard.key(node, "", false), now),
        }
    }

    /// What the workers of a pair are asked, by their side.
    pub fn pair_order(
        &self,
        standard: &Standard,
        number: u64,
        meeting: Option<Meeting>,
    ) -> PairOrder {
        let Expected { devices, rdma, .. } = standard.expected;
        PairOrder { number, side: u32::from(meeting.is_some()), devices, rdma, meeting }
    }

    /// Whether the node was fast with another one not long ago.
    pub fn is_paired(&self, standard: &Standard, node: &str, boot: &str, now: Millis) -> bool {
        !boot.is_empty() && self.cache.is_fresh(&standard.key(node, boot, true), now)
    }

    /// What is known of a node by what it measured with others, and what is to be told of it.
    pub fn known(
        &mut self,
        standard: &Standard,
        known: Known,
        boot: &str,
        now: Millis,
    ) -> (Grade, String) {
        let grade = known.grade();
        let Known { node, mut outcomes, passed, .. } = known;
        let keys = [true, false].map(|paired| standard.key(&node, boot, paired));
        match grade {
            Grade::Fail => keys.iter().for_each(|key| self.cache.failed(key)),
            _ if passed && !boot.is_empty() => {
                let [paired, _] = keys;
                self.cache.passed(paired, now);
            }
            _ => {}
        }
        outcomes.iter_mut().for_each(|outcome| outcome.text = short(&outcome.text));
        let text: Vec<String> = outcomes.iter().map(line).collect();
        if grade > Grade::Unknown {
            self.keep(&node, Found { outcomes, at: now });
        }
        (grade, text.join("; "))
    }

    /// What was found of nodes since the last call, for other jobs.
    pub fn take_news(&mut self) -> Vec<News> {
        self.cache.take_news()
    }

    /// What all jobs of the namespace have found.
    pub fn take_over(&mut self, namespace: &str, passes: Passes) {
        self.cache.take_over(namespace, passes);
    }

    /// What a worker on `node` has answered; how good the node is, and what is to be told of it.
    pub fn heard(
        &mut self,
        standard: &Standard,
        node: &str,
        answer: &Answer,
        now: Millis,
    ) -> (Grade, String) {
        let key = standard.key(node, &answer.boot_id, false);
        let Some(measured) = &answer.measured else {
            // It was told so only where it had passed.
            return (Grade::Good, String::new());
        };
        let outcomes = judge(&standard.expect, measured);
        let mut bad: Vec<Outcome> =
            outcomes.into_iter().filter(|outcome| outcome.grade > Grade::Unknown).collect();
        bad.sort_by(|a, b| b.badness().total_cmp(&a.badness()));
        bad.truncate(WORST_MAX);
        bad.iter_mut().for_each(|outcome| outcome.text = short(&outcome.text));
        let found = Found { outcomes: bad, at: now };
        let grade = found.grade();
        let text: Vec<String> = found.outcomes.iter().map(line).collect();
        match grade {
            Grade::Fail => self.cache.failed(&key),
            // Where the kernel does not tell its boot, a reboot could not be told from none.
            _ if answer.boot_id.is_empty() => {}
            _ => self.cache.passed(key, now),
        }
        self.nodes.remove(node);
        if grade > Grade::Unknown {
            self.keep(node, found);
        }
        (grade, text.join("; "))
    }

    /// A worker that was asked and says nothing: its node is not good.
    pub fn silent(&mut self, node: &str, seconds: u64, now: Millis) {
        let outcome = Outcome {
            check: "answer".to_string(),
            of: String::new(),
            grade: Grade::Fail,
            value: None,
            limit: None,
            text: format!("no answer within {seconds} s"),
            code: None,
        };
        self.keep(node, Found { outcomes: vec![outcome], at: now });
    }

    fn keep(&mut self, node: &str, found: Found) {
        self.nodes.insert(node.to_string(), found);
        while self.nodes.len() > NODES_MAX {
            let oldest = self.nodes.iter().min_by_key(|(_, found)| found.at);
            let Some(oldest) = oldest.map(|(name, _)| name.clone()) else { return };
            self.nodes.remove(&oldest);
        }
    }

    /// The nodes that failed, worst first and at most eight, a line each; and how many there are.
    pub fn failed(&self) -> (usize, Vec<String>) {
        let failed = || self.nodes.iter().filter(|(_, found)| found.grade() == Grade::Fail);
        let all = failed().map(|(name, found)| (name.as_str(), found.outcomes.as_slice()));
        let lines = worst(all).into_iter();
        let lines = lines.map(|(name, outcome)| format!("{name}: {}", line(outcome)));
        (failed().count(), lines.collect())
    }

    pub fn node(&self, name: &str) -> Option<&Found> {
        self.nodes.get(name)
    }
}

/// `peerReadGBps of GPU 0 (...): 120.0 GB/s, below 238 (NHC2016)`
pub fn line(outcome: &Outcome) -> String {
    let of = if outcome.of.is_empty() { String::new() } else { format!(" of {}", outcome.of) };
    let code = outcome.code.map(|code| format!(" ({code})")).unwrap_or_default();
    format!("{}{}: {}{code}", outcome.check, short(&of), outcome.text)
}

/// A worker may say anything.
fn short(text: &str) -> String {
    text.chars().take(TEXT_CHARS_MAX).collect()
}
