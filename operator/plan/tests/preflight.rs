//! Preflight as text: what nodes are like, then the rounds that are measured and what follows.

mod texts;

use moejob_manifest::profile::Profiles;
use moejob_plan::preflight::{
    CACHED_MS, Cache, Check, Grade, Key, Measured, Outcome, PairResult, Rounds, Standing, Value,
    WORST_MAX, judge, worst,
};
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

#[derive(Default)]
struct World {
    /// Slow with whomever, so many times; `u32::MAX` is always.
    slow: BTreeMap<String, u32>,
    /// Pairs that do not reach each other well, though both are good.
    apart: BTreeSet<(String, String)>,
    measured: BTreeMap<String, Vec<Measured>>,
    cache: Cache,
}

impl World {
    fn measure(&mut self, (left, right): &(String, String)) -> bool {
        let mut fast = !self.apart.contains(&(left.clone(), right.clone()));
        for node in [left, right] {
            let times = self.slow.entry(node.clone()).or_default();
            fast &= *times == 0;
            *times = if *times == u32::MAX { *times } else { times.saturating_sub(1) };
        }
        fast
    }
}

/// `n1..4` is n1 n2 n3 n4.
fn names(words: &[&str]) -> Vec<String> {
    let one = |word: &&str| match word.split_once("..") {
        None => vec![word.to_string()],
        Some((first, last)) => {
            let digits = first.find(|c: char| c.is_ascii_digit()).expect("n1..4");
            let (name, first) = first.split_at(digits);
            let range = first.parse::<u32>().expect("n1..4")..=last.parse().expect("n1..4");
            range.map(|number| format!("{name}{number}")).collect()
        }
    };
    words.iter().flat_map(one).collect()
}

fn run(world: &mut World, words: &[&str]) -> String {
    match words {
        ["slow", names @ ..] => {
            // Who was slow before is so no longer.
            world.slow.clear();
            for name in names {
                let (name, times) = name.split_once('=').unwrap_or((name, ""));
                world.slow.insert(name.to_string(), times.parse().unwrap_or(u32::MAX));
            }
            String::new()
        }
        ["apart", left, right] => {
            world.apart.insert((left.to_string(), right.to_string()));
            world.apart.insert((right.to_string(), left.to_string()));
            String::new()
        }
        ["rounds", rest @ ..] => rounds(world, rest),
        ["measured", node, check, value @ ..] => {
            let (check, of) = check.split_once('@').unwrap_or((check, ""));
            let text = || value[1..].join(" ");
            let value = match value[0] {
                "fine" => Value::Fine(text()),
                "wrong" => Value::Wrong { grade: Grade::Fail, what: text() },
                "doubtful" => Value::Wrong { grade: Grade::Warn, what: text() },
                "unmeasured" => Value::Unmeasured(text()),
                number => Value::Number(number.parse().expect("a number")),
            };
            let one = Measured { check: check.to_string(), of: of.to_string(), value };
            world.measured.entry(node.to_string()).or_default().push(one);
            String::new()
        }
        ["judge", profile] => judged(world, profile),
        ["cache", what, node, boot, hours] => {
            let now = hours.parse::<u64>().expect("hours") * CACHED_MS / 10;
            let key = Key {
                namespace: "a".to_string(),
                node: node.to_string(),
                boot_id: boot.to_string(),
                profile: "p".to_string(),
                image: "i".to_string(),
                paired: false,
            };
            match *what {
                "passed" => world.cache.passed(key, now),
                "failed" => world.cache.failed(&key),
                _ => return format!("  {}\n", world.cache.is_fresh(&key, now)),
            }
            String::new()
        }
        _ => panic!("{words:?} is not understood"),
    }
}

fn rounds(world: &mut World, words: &[&str]) -> String {
    let good = words.iter().find_map(|word| word.strip_prefix("good=")).unwrap_or_default();
    let good: Vec<&str> = good.split(',').filter(|name| !name.is_empty()).collect();
    let good: BTreeSet<String> = names(&good).into_iter().collect();
    let listed: Vec<&str> = words.iter().filter(|word| !word.contains('=')).copied().collect();
    let nodes = names(&listed);
    let mut rounds = Rounds::new(nodes.iter().map(String::as_str), &good);
    let mut text = String::new();
    loop {
        let pairs = rounds.next_round();
        if pairs.is_empty() {
            break;
        }
        let mut busy = BTreeSet::new();
        for (left, right) in &pairs {
            assert!(busy.insert(left) && busy.insert(right), "a node is in two pairs: {pairs:?}");
        }
        let measure = |pair: &(String, String)| {
            let fast = world.measure(pair);
            PairResult { pair: pair.clone(), fast }
        };
        let results: Vec<PairResult> = pairs.iter().map(measure).collect();
        let show = |one: &PairResult| {
            format!("{}+{}{}", one.pair.0, one.pair.1, if one.fast { "" } else { " slow" })
        };
        let shown: Vec<String> = results.iter().map(show).collect();
        let _ = writeln!(text, "  {}: {}", rounds.round(), shown.join(", "));
        rounds.heard(&results);
    }
    let mut by: BTreeMap<String, Vec<&str>> = BTreeMap::new();
    for (name, standing) in rounds.standings() {
        let key = match standing {
            Standing::Good { slow: 0 } => continue,
            Standing::Good { slow } => format!("good, slow {slow} times"),
            Standing::Bad => "bad".to_string(),
            Standing::Undecided => "undecided".to_string(),
            other => panic!("{name} is {other:?} at the end"),
        };
        by.entry(key).or_default().push(name);
    }
    for (key, names) in by {
        let _ = writeln!(text, "  {key}: {}", names.join(" "));
    }
    text
}

fn judged(world: &World, profile: &str) -> String {
    let profile = Profiles::shipped().get(profile).expect("a profile");
    let outcomes: BTreeMap<&str, Vec<Outcome>> = (world.measured.iter())
        .map(|(node, measured)| (node.as_str(), judge(&profile.expect, measured)))
        .collect();
    let mut text = String::new();
    for (node, outcomes) in &outcomes {
        for one in outcomes.iter().filter(|one| one.grade != Grade::Good) {
            let of = if one.of.is_empty() { String::new() } else { format!(" of {}", one.of) };
            let code = one.code.map(|code| format!(" ({code})")).unwrap_or_default();
            let (grade, check) = (one.grade, &one.check);
            let _ = writeln!(text, "  {node}: {grade:?} {check}{of}: {}{code}", one.text);
        }
    }
    let listed = worst(outcomes.iter().map(|(node, outcomes)| (*node, outcomes.as_slice())));
    assert!(listed.len() <= WORST_MAX);
    let listed: Vec<String> =
        listed.iter().map(|(node, one)| format!("{node} ({})", one.check)).collect();
    let _ = writeln!(text, "  worst: {}", listed.join(", "));
    text
}

#[test]
fn preflight_does_what_is_written() {
    texts::replay("preflight", run);
}

/// Whatever nodes are slow, each round names a node once, and with one good pair the bad ones are
/// found, all of them and no other.
#[test]
fn the_bad_ones_are_found_and_no_other() {
    for nodes in 2..=9_u32 {
        for slow in 0..1_u32 << nodes {
            let names: Vec<String> = (0..nodes).map(|node| format!("n{node}")).collect();
            let is_slow = |name: &str| {
                let at = names.iter().position(|of| of == name).expect("a node");
                slow >> at & 1 == 1
            };
            let mut rounds = Rounds::new(names.iter().map(String::as_str), &BTreeSet::new());
            loop {
                let pairs = rounds.next_round();
                if pairs.is_empty() {
                    break;
                }
                let result = |pair: &(String, String)| PairResult {
                    pair: pair.clone(),
                    fast: !is_slow(&pair.0) && !is_slow(&pair.1),
                };
                rounds.heard(&pairs.iter().map(result).collect::<Vec<_>>());
            }
            assert!(rounds.round() <= 4 * nodes, "{} rounds of {nodes}", rounds.round());
            let good = nodes - slow.count_ones();
            for (name, standing) in rounds.standings() {
                match standing {
                    Standing::Good { .. } => assert!(!is_slow(name), "{name} of {slow:b}"),
                    Standing::Bad => assert!(is_slow(name), "{name} of {slow:b}"),
                    _ => {
                        let all = rounds.standings().values();
                        let none = all.clone().all(|one| *one == Standing::Undecided);
                        assert!(none && (good < 2 || nodes > 4), "{name} of {slow:b}");
                    }
                }
            }
        }
    }
}

#[test]
fn checks_have_names_of_their_own() {
    let all = [
        Check::Gpus, Check::Numa, Check::Cards, Check::Links, Check::Rates, Check::Binding,
        Check::LockedMemory, Check::Clocks, Check::Ecc, Check::Even, Check::Transport,
    ];
    let names: BTreeSet<&str> = all.iter().map(|check| check.name()).collect();
    assert_eq!(names.len(), all.len());
    let limits = moejob_manifest::profile::CHECKS.iter().map(|(name, _)| *name);
    assert!(limits.clone().all(|name| !names.contains(name)));
}
