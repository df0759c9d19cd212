//! Pairs of nodes that measure together, from the first round until each node is known.
//!
//! ```text
//! begin(Round) -> open pairs -- said --> a place to meet, to be passed on (`relay`)
//!                                 `----> what was measured; both sides: PairResult -> Rounds
//! no pair is open: the next round, or what is known of each node (`Known`)
//! ```
//! A pair of which a worker is gone tells nothing: its partner is measured with another one. One
//! that says nothing in time speaks against itself and not against its partner.

use super::{Grade, Measured, Outcome, PairResult, Rounds, Standing, judge};
use crate::observed::Millis;
use moejob_manifest::profile::Limit;
use moejob_protocol::pair::{Meeting, PAIR_CHECK, PairAnswer, PairSaid};
use std::collections::BTreeMap;

/// A round that is to begin.
#[derive(Clone, Debug, PartialEq)]
pub struct Round {
    /// As they are once it has begun.
    pub rounds: Rounds,
    /// None: nothing more can be known.
    pub pairs: Vec<Pair>,
}

/// Two workers that are to measure together.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Pair {
    pub number: u64,
    /// Worker and node of each side.
    pub sides: [(String, String); 2],
}

/// A preflight of pairs, or none.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Pairs {
    rounds: Option<Rounds>,
    open: Vec<Open>,
    /// What each node has given, in order.
    given: BTreeMap<String, Vec<Given>>,
}

/// A pair that measures.
#[derive(Clone, Debug, PartialEq)]
pub struct Open {
    pub number: u64,
    pub at: Millis,
    sides: [Side; 2],
    meeting: Option<Meeting>,
    /// The other side knows where to meet.
    relayed: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Side {
    worker: String,
    node: String,
    told: Option<Told>,
    /// Its stream is another one: what it said meanwhile is lost.
    again: bool,
}

#[derive(Clone, Debug, PartialEq)]
struct Told {
    rate: Option<f64>,
    /// Of a rate: what it is; else why there is none.
    text: String,
    /// What speaks against this node alone.
    own: Vec<Outcome>,
}

/// What a node has given with a partner.
#[derive(Clone, Debug, PartialEq)]
struct Given {
    partner: String,
    rate: Option<f64>,
    text: String,
}

impl Given {
    fn is_slow(&self, limit: Option<Limit>) -> bool {
        match (self.rate, limit) {
            (Some(rate), Some(limit)) => rate < limit.fail,
            (rate, _) => rate.is_none(),
        }
    }
}

/// What is known of a node in the end, or as soon as it is.
#[derive(Clone, Debug, PartialEq)]
pub struct Known {
    pub node: String,
    /// Not good: why, for a person.
    pub outcomes: Vec<Outcome>,
    /// Silent ones are asked again; the others are not.
    pub silent: bool,
    /// It was fast with another one.
    pub passed: bool,
}

impl Known {
    pub fn grade(&self) -> Grade {
        self.outcomes.iter().map(|outcome| outcome.grade).max().unwrap_or(Grade::Good)
    }
}

impl Pairs {
    pub fn rounds(&self) -> Option<&Rounds> {
        self.rounds.as_ref()
    }

    pub fn open(&self) -> &[Open] {
        &self.open
    }

    /// Workers that measure with others.
    pub fn measuring(&self) -> usize {
        2 * self.open.len()
    }

    /// What is known at once, where there is nothing to measure.
    pub fn begin(&mut self, round: Round, limit: Option<Limit>, now: Millis) -> Vec<Known> {
        if self.rounds.is_none() {
            self.given.clear();
        }
        self.rounds = Some(round.rounds);
        let side = |(worker, node)| Side { worker, node, told: None, again: false };
        self.open = (round.pairs.into_iter())
            .map(|Pair { number, sides }| Open {
                number,
                at: now,
                sides: sides.map(side),
                meeting: None,
                relayed: false,
            })
            .collect();
        self.settle(limit)
    }

    /// What a worker says of its pair; what is known then.
    pub fn heard(&mut self, worker: &str, answer: &PairAnswer, limit: Option<Limit>) -> Vec<Known> {
        let Some(at) = self.open.iter().position(|open| open.number == answer.number) else {
            return Vec::new();
        };
        let open = &mut self.open[at];
        let Some(side) = open.sides.iter().position(|side| side.worker == worker) else {
            return Vec::new();
        };
        match &answer.said {
            PairSaid::Meets(meeting) => {
                if side == 0 && open.meeting.is_none() && meeting.is_valid() {
                    open.meeting = Some(meeting.clone());
                }
            }
            PairSaid::Measured(measured) => {
                open.sides[side].told = Some(told(measured, limit));
            }
        }
        // A side that was never asked has nothing to tell.
        let [first, second] = &open.sides;
        let unasked = open.meeting.is_none() && first.told.is_some();
        match first.told.is_some() && (second.told.is_some() || unasked) {
            true => {
                let open = self.open.remove(at);
                let mut known = self.learn(open, limit);
                known.extend(self.settle(limit));
                known
            }
            false => Vec::new(),
        }
    }

    /// What both have told.
    fn learn(&mut self, open: Open, limit: Option<Limit>) -> Vec<Known> {
        let Some(rounds) = &mut self.rounds else { return Vec::new() };
        let mut known = Vec::new();
        for side in &open.sides {
            let own = side.told.iter().flat_map(|told| &told.own).cloned();
            let outcomes: Vec<Outcome> = own.collect();
            if !outcomes.is_empty() {
                rounds.lose(&side.node);
                let node = side.node.clone();
                known.push(Known { node, outcomes, silent: false, passed: false });
            }
        }
        // Beside a node that is bad by itself the other one could not be fast.
        if !known.is_empty() {
            return known;
        }
        let [left, right] = &open.sides;
        let rates = [left, right].map(|side| side.told.as_ref().and_then(|told| told.rate));
        let rate = match rates {
            [Some(left), Some(right)] => Some(left.min(right)),
            _ => None,
        };
        let fast = rate.is_some_and(|rate| limit.is_none_or(|limit| rate >= limit.fail));
        for (own, other) in [(left, right), (right, left)] {
            let said = [own, other].map(|side| side.told.as_ref());
            let worst = said.into_iter().flatten().find(|told| told.rate == rate);
            let text = worst.map(|told| told.text.clone()).unwrap_or_default();
            let given = Given { partner: other.node.clone(), rate, text };
            self.given.entry(own.node.clone()).or_default().push(given);
        }
        let pair = (left.node.clone(), right.node.clone());
        rounds.heard(&[PairResult { pair, fast }]);
        known
    }

    /// A pair that cannot go on, or is `late` after so many seconds. `is_there` tells which workers
    /// could still measure.
    pub fn end(
        &mut self,
        number: u64,
        late: Option<u64>,
        limit: Option<Limit>,
        is_there: impl Fn(&str) -> bool,
    ) -> Vec<Known> {
        let Some(at) = self.open.iter().position(|open| open.number == number) else {
            return Vec::new();
        };
        let open = self.open.remove(at);
        let Some(rounds) = &mut self.rounds else { return Vec::new() };
        let mut known = Vec::new();
        for (index, side) in open.sides.iter().enumerate() {
            if !is_there(&side.worker) {
                rounds.lose(&side.node);
            }
            let asked = index == 0 || open.relayed;
            let silent = late.filter(|_| asked && side.told.is_none());
            if let Some(seconds) = silent {
                rounds.lose(&side.node);
                let (check, text) = ("answer".to_string(), format!("no answer within {seconds} s"));
                let outcome = Outcome { check, text, code: None, ..failed(None, None) };
                let (node, outcomes) = (side.node.clone(), vec![outcome]);
                known.push(Known { node, outcomes, silent: true, passed: false });
            }
        }
        rounds.restart();
        known.extend(self.settle(limit));
        known
    }

    /// Its stream is another one.
    pub fn connected(&mut self, worker: &str) {
        let sides = self.open.iter_mut().flat_map(|open| &mut open.sides);
        sides.filter(|side| side.worker == worker).for_each(|side| side.again = true);
    }

    /// Nobody asks any more.
    pub fn forget(&mut self) {
        *self = Pairs::default();
    }

    pub fn relayed(&mut self, number: u64) {
        let open = self.open.iter_mut().find(|open| open.number == number);
        open.into_iter().for_each(|open| open.relayed = true);
    }

    /// What is known of each node, once no pair can tell more.
    fn settle(&mut self, limit: Option<Limit>) -> Vec<Known> {
        let Some(rounds) = self.rounds.as_mut().filter(|_| self.open.is_empty()) else {
            return Vec::new();
        };
        let mut last = rounds.clone();
        if !last.next_round().is_empty() {
            return Vec::new();
        }
        self.rounds = None;
        let given = std::mem::take(&mut self.given);
        let known = |(node, standing): (&String, &Standing)| {
            let given = given.get(node).map_or(&[][..], |given| given);
            let outcomes = outcome(*standing, given, limit).into_iter().collect();
            // Where nobody was left to measure with, nothing was shown.
            let fast = given.iter().any(|of| !of.is_slow(limit));
            let passed = fast && matches!(standing, Standing::Good { .. });
            Known { node: node.clone(), outcomes, silent: false, passed }
        };
        last.standings().iter().map(known).collect()
    }
}

impl Open {
    pub fn workers(&self) -> impl Iterator<Item = &str> {
        self.sides.iter().map(|side| side.worker.as_str())
    }

    pub fn has_another_stream(&self) -> bool {
        self.sides.iter().any(|side| side.again)
    }

    /// Whom to tell where to meet, once that is known.
    pub fn relay(&self) -> Option<(&str, &Meeting)> {
        let meeting = self.meeting.as_ref().filter(|_| !self.relayed)?;
        Some((self.sides[1].worker.as_str(), meeting))
    }
}

/// What a worker's answer says of the pair, and of its own node.
fn told(measured: &[Measured], limit: Option<Limit>) -> Told {
    let expect = limit.map(|limit| (PAIR_CHECK.to_string(), limit)).into_iter().collect();
    let (pair, own): (Vec<Outcome>, Vec<Outcome>) =
        judge(&expect, measured).into_iter().partition(|outcome| outcome.check == PAIR_CHECK);
    let pair = pair.into_iter().next();
    Told {
        rate: pair.as_ref().and_then(|pair| pair.value),
        text: pair.map_or_else(|| "nobody measured it".to_string(), |pair| pair.text),
        own: own.into_iter().filter(|outcome| outcome.grade == Grade::Fail).collect(),
    }
}

/// Why a node is not good, if it is not.
fn outcome(standing: Standing, given: &[Given], limit: Option<Limit>) -> Option<Outcome> {
    let slow = |of: &&Given| of.is_slow(limit);
    let words = |given: &mut dyn Iterator<Item = &Given>| {
        let one = |of: &Given| format!("with {}: {}", of.partner, of.text);
        given.map(one).collect::<Vec<_>>().join("; ")
    };
    let best = given.iter().filter_map(|of| of.rate).reduce(f64::max);
    let warned = |text| Some(Outcome { grade: Grade::Warn, text, ..failed(best, limit) });
    match standing {
        Standing::Bad => {
            let text = words(&mut given.iter().filter(slow));
            Some(Outcome { text, ..failed(best, limit) })
        }
        Standing::Undecided => {
            let with = words(&mut given.iter().filter(slow));
            warned(format!("no good node to compare it with; {with}"))
        }
        Standing::Good { slow: 1.. } => {
            let with = words(&mut given.iter().filter(slow));
            warned(format!("{with}; with another node it was fast"))
        }
        Standing::Good { slow: 0 } | Standing::New | Standing::Suspect { .. } => {
            let near = best.zip(limit).filter(|(best, limit)| *best < limit.warn);
            near.and_then(|_| warned(words(&mut given.iter().filter(|of| of.rate == best))))
        }
    }
}

fn failed(value: Option<f64>, limit: Option<Limit>) -> Outcome {
    Outcome {
        check: PAIR_CHECK.to_string(),
        of: String::new(),
        grade: Grade::Fail,
        value,
        limit: limit.filter(|_| value.is_some()),
        text: String::new(),
        code: super::nhc(PAIR_CHECK),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::preflight::{Check, Value};
    use std::collections::BTreeSet;

    const LIMIT: Option<Limit> = Some(Limit { fail: 180.0, warn: 189.0 });

    fn begun(nodes: &[&str]) -> Pairs {
        let mut rounds = Rounds::new(nodes.iter().copied(), &BTreeSet::new());
        let side = |node: String| (format!("w-{node}"), node);
        let pairs = (1..).zip(rounds.next_round());
        let pairs =
            pairs.map(|(number, (a, b))| Pair { number, sides: [side(a), side(b)] }).collect();
        let mut all = Pairs::default();
        assert_eq!(all.begin(Round { rounds, pairs }, LIMIT, 0), []);
        all
    }

    fn meets(id: &str) -> PairAnswer {
        let meeting = Meeting { id: id.to_string(), bytes: 1 };
        PairAnswer { number: 1, said: PairSaid::Meets(meeting) }
    }

    fn gave(value: Value) -> PairAnswer {
        let one = Measured { check: PAIR_CHECK.to_string(), of: String::new(), value };
        PairAnswer { number: 1, said: PairSaid::Measured(vec![one]) }
    }

    fn shown(known: &[Known]) -> Vec<String> {
        let one = |of: &Known| {
            let texts: Vec<&str> = of.outcomes.iter().map(|of| of.text.as_str()).collect();
            format!("{} {:?} {}", of.node, of.grade(), texts.join(", "))
        };
        known.iter().map(one).collect()
    }

    #[test]
    fn only_digits_of_the_first_side_are_passed_on_and_only_once() {
        let mut pairs = begun(&["a", "b"]);
        let good = "0f".repeat(128);
        for (worker, id) in [("w-a", "0f"), ("w-a", &"/x".repeat(128)), ("w-b", &good)] {
            pairs.heard(worker, &meets(id), LIMIT);
            assert_eq!(pairs.open()[0].relay(), None, "{worker} {id}");
        }
        pairs.heard("w-a", &meets(&good), LIMIT);
        pairs.heard("w-a", &meets(&"1e".repeat(128)), LIMIT);
        let (worker, meeting) = pairs.open()[0].relay().expect("a place to meet");
        assert_eq!((worker, &meeting.id), ("w-b", &good));
        pairs.relayed(1);
        assert_eq!(pairs.open()[0].relay(), None);
    }

    #[test]
    fn a_first_side_without_a_place_ends_the_pair_and_blames_nobody_alone() {
        let mut pairs = begun(&["a", "b"]);
        let known = pairs.heard("w-a", &gave(Value::Unmeasured("no card".to_string())), LIMIT);
        assert_eq!(shown(&known), [
            "a Warn no good node to compare it with; with b: not measured: no card",
            "b Warn no good node to compare it with; with a: not measured: no card",
        ]);
        assert!(pairs.rounds().is_none() && pairs.open().is_empty());
    }

    #[test]
    fn a_pair_whose_stream_broke_measures_again_and_a_partner_that_is_gone_does_not() {
        let mut pairs = begun(&["a", "b"]);
        pairs.connected("w-b");
        assert!(pairs.open()[0].has_another_stream());
        assert_eq!(pairs.end(1, None, LIMIT, |_| true), []);
        let mut rounds = pairs.rounds().expect("it goes on").clone();
        assert_eq!(rounds.next_round(), [("a".to_string(), "b".to_string())]);
        let mut pairs = begun(&["a", "b"]);
        let known = pairs.end(1, None, LIMIT, |worker| worker == "w-a");
        assert_eq!(shown(&known), ["a Good "], "nobody is left to measure with");
        assert!(pairs.rounds().is_none());
    }

    #[test]
    fn what_strangers_and_earlier_pairs_say_changes_nothing() {
        let mut pairs = begun(&["a", "b"]);
        let before = pairs.clone();
        pairs.heard("w-c", &gave(Value::Number(5.0)), LIMIT);
        pairs.heard("w-a", &PairAnswer { number: 9, ..gave(Value::Number(5.0)) }, LIMIT);
        assert_eq!(pairs.end(9, Some(60), LIMIT, |_| true), []);
        assert_eq!(pairs, before);
    }

    #[test]
    fn a_node_that_is_bad_by_itself_leaves_its_partner_to_be_measured() {
        let mut pairs = begun(&["a", "b"]);
        pairs.heard("w-a", &meets(&"0f".repeat(128)), LIMIT);
        pairs.relayed(1);
        let tcp = Value::Wrong { grade: Grade::Fail, what: "by TCP".to_string() };
        let rate = Measured::number(PAIR_CHECK, 3.0);
        let measured = vec![rate.clone(), Measured::of_check(Check::Transport, tcp)];
        let answer = PairAnswer { number: 1, said: PairSaid::Measured(measured) };
        assert_eq!(pairs.heard("w-a", &answer, LIMIT), []);
        let known = pairs.heard("w-b", &gave(rate.value), LIMIT);
        assert_eq!(shown(&known), ["a Fail by TCP", "b Good "]);
        assert_eq!(known[0].outcomes[0].code, Some("NHC2003"));
    }
}
