//! Allocation as text: `> what happens`, then which job has which nodes and why.
//!
//! A node with a `+` is newly granted, one in brackets takes no new ranks.

// It prints how long it took.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

mod texts;

use moejob_manifest::job::Closeness;
use moejob_manifest::keys::Keys;
use moejob_manifest::resources::Resources;
use moejob_manifest::spec::Level;
use moejob_plan::allocate::{
    self, Allocation, Barred, ClusterNode, Demand, Ground, HOLD_TIMEOUT, Memory, Needs,
    Standing, Taint, Toleration, UNSEEN_TIMEOUT, nodes_of_group, unhealthy, unhealthy_label,
};
use moejob_protocol::{Layout, Mesh};
use proptest::prelude::*;
use proptest::test_runner::RngSeed;
use serde_json::json;
use std::collections::{BTreeMap, BTreeSet};
use std::fmt::Write;

#[derive(Clone, Debug, Default)]
struct Cluster {
    nodes: Vec<ClusterNode>,
    jobs: Vec<Demand>,
}

fn allocate(cluster: &Cluster, memory: &Memory, now: u64) -> Allocation {
    let ground = Ground::new(cluster.nodes.clone(), &Keys::default());
    let mut made = allocate::allocate(&ground, &cluster.jobs, memory, now);
    made.bound_missing(&ground, &cluster.jobs, u32::MAX);
    made
}

#[derive(Default)]
struct World {
    cluster: Cluster,
    memory: Memory,
    now: u64,
}

impl World {
    fn allocate(&self) -> Allocation {
        let made = allocate(&self.cluster, &self.memory, self.now);
        let mut turned = self.cluster.clone();
        turned.nodes.reverse();
        turned.jobs.reverse();
        assert_eq!(made, allocate(&turned, &self.memory, self.now), "the order is of no account");
        self.assert_sound(&made);
        made
    }

    fn assert_sound(&self, made: &Allocation) {
        let mut taken = BTreeSet::new();
        for job in &self.cluster.jobs {
            let granted = &made.jobs[&job.uid];
            let names: BTreeSet<&str> =
                granted.nodes.iter().map(|node| node.name.as_str()).collect();
            for name in &names {
                assert!(taken.insert(name.to_string()), "{name} is given to two jobs");
                let others = self.cluster.jobs.iter().filter(|of| of.uid != job.uid);
                assert!(!others.clone().any(|of| of.holds.contains(*name)), "{name} is another's");
            }
            // All or nothing: what is granted makes a gang, or is the job's own.
            let good = granted.nodes.iter().filter(|node| node.usable).count() as u32;
            let fits = job.sizes.iter().any(|size| *size <= good);
            let own = names.iter().all(|name| job.holds.contains(*name));
            let unseen = self.is_unseen(&job.uid);
            assert!(fits || own || unseen, "{} holds part of a gang: {names:?}", job.uid);
            let kept = job.holds.iter().all(|held| names.contains(held.as_str()));
            let standing = !matches!(job.standing, Standing::Waiting);
            let is_there = |of: &String| self.cluster.nodes.iter().any(|node| node.name == *of);
            let exists = job.holds.iter().all(is_there);
            assert!(!exists || kept || (names.is_empty() && job.standing != Standing::Running));
            assert!(standing || fits || names.is_empty() || job.sizes.is_empty() || unseen);
            let most = job.sizes.last().map_or(0, |most| most + job.spares) as usize;
            let new = names.iter().filter(|name| !job.holds.contains(**name)).count();
            let good = good as usize - job.leaving.len();
            assert!(new == 0 || good <= most.max(job.holds.len()) || unseen);
        }
    }

    fn is_unseen(&self, uid: &str) -> bool {
        let mut after = self.memory.clone();
        after.forget(uid);
        let mut later = self.memory.clone();
        later.expire(self.now);
        after.expire(self.now);
        after != later
    }

    fn job(&mut self, uid: &str) -> &mut Demand {
        self.cluster.jobs.iter_mut().find(|job| job.uid == uid).expect("a job of this scenario")
    }

    fn node(&mut self, name: &str) -> &mut ClusterNode {
        self.cluster.nodes.iter_mut().find(|node| node.name == name).expect("a node")
    }

    /// Every job makes a pod on each node that it has been granted, and ends those on others.
    fn start(&mut self) {
        let made = self.allocate();
        for job in &mut self.cluster.jobs {
            let granted = &made.jobs[&job.uid].nodes;
            let fits = |node: &str| granted.iter().any(|of| of.name == node);
            job.holds.retain(|held| fits(held));
            for node in granted.iter().filter(|node| node.usable) {
                if !job.holds.contains(&node.name) {
                    self.memory.decided(&job.uid, &node.name, self.now);
                }
            }
        }
    }

    /// The pods that were made are seen.
    fn see(&mut self) {
        let made = self.allocate();
        for job in &mut self.cluster.jobs {
            for node in &made.jobs[&job.uid].nodes {
                self.memory.seen(&job.uid, &node.name);
                job.holds.insert(node.name.clone());
            }
        }
    }
}

fn pairs<'w>(words: &'w [&'w str]) -> impl Iterator<Item = (&'w str, &'w str)> {
    words.iter().map(|word| word.split_once('=').unwrap_or((*word, "")))
}

/// `a1..3` is a1 a2 a3.
fn names(range: &str) -> Vec<String> {
    let Some((first, last)) = range.split_once("..") else { return vec![range.to_string()] };
    let stem = first.trim_end_matches(|c: char| c.is_ascii_digit());
    let (from, to): (u32, u32) =
        (first[stem.len()..].parse().expect("a number"), last.parse().expect("a number"));
    (from..=to).map(|number| format!("{stem}{number}")).collect()
}

fn change(node: &mut ClusterNode, words: &[&str]) {
    for (key, value) in pairs(words) {
        match key {
            "cordoned" => node.cordoned = true,
            "uncordoned" => node.cordoned = false,
            "notready" => node.ready = false,
            "ready" => node.ready = true,
            "healthy" => node.unhealthy = None,
            "condition" => {
                let (name, status) = value.split_once(':').expect("name:status");
                node.unhealthy = unhealthy([("Ready", "True"), (name, status)]);
            }
            "taint" => {
                let (key, effect) = value.split_once(':').expect("key:effect");
                let (key, effect) = (key.to_string(), effect.to_string());
                node.taints.push(Taint { key, value: String::new(), effect });
            }
            "zone" => drop(node.labels.insert("topology.kubernetes.io/zone".into(), value.into())),
            "rack" => drop(node.labels.insert("topology.kubernetes.io/rack".into(), value.into())),
            "tier1" => {
                drop(node.labels.insert("fabric.topograph.run/tier-1".into(), value.into()));
            }
            "health" => {
                let (key, value) = value.split_once(':').expect("label:value");
                node.labels.insert(key.into(), value.into());
                node.unhealthy = unhealthy_label(&node.labels);
            }
            "label" => drop(node.labels.insert(value.into(), "yes".into())),
            "used" => node.requested.put("cpu", value),
            "gpu" => node.allocatable.put("nvidia.com/gpu", value),
            _ => node.allocatable.put(key, value),
        }
    }
}

fn demand(uid: &str, words: &[&str]) -> Demand {
    let requests = json!({ "cpu": "1", "pods": "1" });
    let mut needs = Needs { requests: Resources::read(&requests), ..Needs::default() };
    let (mut min, mut max, mut spares, mut priority, mut created) = (1, 0, 0, 0, 0);
    let mut topology = None;
    let (mut sizes, mut groups, mut preempts) = (None, BTreeMap::new(), true);
    for (key, value) in pairs(words) {
        let number = || value.parse::<u32>().expect("a number");
        match key {
            "min" => min = number(),
            "max" => max = number(),
            "spares" => spares = number(),
            "priority" => priority = number() as i32,
            "created" => created = u64::from(number()),
            "never" => preempts = false,
            "sizes" => {
                let all = value.split(',').map(|of| of.parse().expect("sizes"));
                sizes = Some(all.collect());
            }
            "group" => drop(groups.insert(max.max(min), number())),
            "prefer" | "require" => {
                let level = serde_json::from_value(json!(value)).expect("a level");
                let require = key == "require";
                let how = if require { Closeness::Required } else { Closeness::Preferred };
                topology = Some((level, how));
            }
            "gpu" => needs.requests.put("nvidia.com/gpu", value),
            "selector" => drop(needs.selector.insert(value.into(), "yes".into())),
            "tolerate" => {
                let key = Some(value.to_string());
                needs.tolerations.push(Toleration { key, ..Toleration::default() });
            }
            _ => needs.requests.put(key, value),
        }
    }
    let max: u32 = if max == 0 { min } else { max };
    Demand {
        uid: uid.to_string(),
        priority,
        preempts,
        created,
        sizes: sizes.unwrap_or_else(|| (min..=max).collect()),
        spares,
        groups,
        topology,
        needs,
        ..Demand::default()
    }
}

fn happen(world: &mut World, words: &[&str]) {
    match words {
        ["cluster"] => *world = World::default(),
        ["nodes", range, rest @ ..] => {
            for name in names(range) {
                let allocatable = Resources::read(&json!({ "cpu": "4", "pods": "110" }));
                let mut node =
                    ClusterNode { name, ready: true, allocatable, ..ClusterNode::default() };
                change(&mut node, rest);
                world.cluster.nodes.push(node);
            }
        }
        ["node", name, "gone"] => world.cluster.nodes.retain(|node| node.name != *name),
        ["node", range, rest @ ..] => {
            names(range).iter().for_each(|name| change(world.node(name), rest));
        }
        ["job", uid, rest @ ..] => {
            let since = Some(world.now);
            world.cluster.jobs.push(Demand { since, ..demand(uid, rest) });
        }
        ["end", uid] => {
            world.cluster.jobs.retain(|job| job.uid != *uid);
            world.memory.forget(uid);
        }
        ["suspend", uid] => world.job(uid).sizes.clear(),
        ["running", uids @ ..] => {
            let since = Some(world.now);
            for job in uids.iter() {
                let job = world.job(job);
                (job.standing, job.since) = (Standing::Running, since);
            }
        }
        ["holding", uid] => {
            let since = world.now;
            world.job(uid).standing = Standing::Holding { since };
        }
        ["waiting", uid] => {
            let since = Some(world.now);
            let job = world.job(uid);
            (job.standing, job.since) = (Standing::Waiting, since);
        }
        ["bar", uid, why @ ..] => {
            let why = match why {
                ["location", earlier] => Barred::Location(earlier.to_string()),
                _ => Barred::Refused,
            };
            let job = world.job(uid);
            *job = job.clone().barred_by(why);
        }
        ["leaves", uid, node] => drop(world.job(uid).leaving.insert(node.to_string())),
        ["lose", uid, node] => {
            world.job(uid).holds.remove(*node);
            world.job(uid).leaving.remove(*node);
        }
        ["fail", uid, node, rests @ ..] => {
            world.job(uid).holds.remove(*node);
            world.memory.seen(uid, node);
            let rests = rests.first().map_or(5_000, |millis| millis.parse().expect("a number"));
            let now = world.now;
            world.memory.avoid(uid, node, now + rests);
        }
        ["start"] => world.start(),
        ["see"] => world.see(),
        ["advance", millis] => {
            world.now += millis.parse::<u64>().expect("milliseconds");
            let now = world.now;
            world.memory.expire(now);
        }
        ["show"] => {}
        _ => panic!("no such command: {words:?}"),
    }
}

fn show(world: &World) -> String {
    let mut out = String::new();
    let made = world.allocate();
    for job in &world.cluster.jobs {
        let granted = &made.jobs[&job.uid];
        let node = |node: &moejob_plan::observed::Node| {
            let new = if job.holds.contains(&node.name) { "" } else { "+" };
            match node.usable {
                true => format!("{new}{}", node.name),
                false => format!("[{new}{}]", node.name),
            }
        };
        let nodes: Vec<String> = granted.nodes.iter().map(node).collect();
        let nodes = if nodes.is_empty() { "nothing".to_string() } else { nodes.join(" ") };
        writeln!(out, "  {}: {nodes}", job.uid).expect("a string");
        if !granted.why.is_empty() {
            writeln!(out, "    # {}", granted.why).expect("a string");
        }
        if granted.missing > 0 {
            let there = match granted.there.join(" ") {
                none if none.is_empty() => "no node".to_string(),
                names => names,
            };
            let missing = granted.missing;
            writeln!(out, "    # nodes missing: {missing}, beside {there}").expect("a string");
        }
    }
    if let Some(at) = made.requeue {
        writeln!(out, "  look again in {} ms", at - world.now).expect("a string");
    }
    out
}

#[test]
fn scenarios() {
    texts::replay("allocation", |world: &mut World, words| {
        happen(world, words);
        if ["cluster", "nodes"].contains(&words[0]) { String::new() } else { show(world) }
    });
}

/// What happens to the cluster of the properties; numbers are taken modulo how many there are.
#[derive(Clone, Copy, Debug)]
enum Happens {
    Start,
    See,
    Advance(u64),
    Cordon(usize, bool),
    Ready(usize, bool),
    Use(usize, u32),
    Lose(usize),
    Fail(usize),
    Run(usize),
    Hold(usize),
    Wait(usize),
    Suspend(usize),
}

fn happens() -> impl Strategy<Value = Happens> {
    let one = 0..32usize;
    prop_oneof![
        6 => Just(Happens::Start),
        6 => Just(Happens::See),
        3 => (1..40_000u64).prop_map(Happens::Advance),
        1 => (one.clone(), any::<bool>()).prop_map(|(at, on)| Happens::Cordon(at, on)),
        1 => (one.clone(), any::<bool>()).prop_map(|(at, on)| Happens::Ready(at, on)),
        1 => (one.clone(), 0..5u32).prop_map(|(at, cpus)| Happens::Use(at, cpus)),
        2 => one.clone().prop_map(Happens::Lose),
        2 => one.clone().prop_map(Happens::Fail),
        3 => one.clone().prop_map(Happens::Run),
        1 => one.clone().prop_map(Happens::Hold),
        1 => one.clone().prop_map(Happens::Wait),
        1 => one.prop_map(Happens::Suspend),
    ]
}

fn jobs() -> impl Strategy<Value = Vec<Demand>> {
    let one = (1..4u32, 0..4u32, 0..2u32, 0..3i32, 0..4u64, 0..4u32);
    prop::collection::vec(one, 1..7).prop_map(|all| {
        let job = |(index, (min, more, spares, priority, created, wish)): (usize, _)| Demand {
            uid: format!("job-{index}"),
            priority,
            created,
            sizes: (min..=min + more).collect(),
            spares,
            topology: match wish {
                1 => Some((Level::Rack, Closeness::Preferred)),
                2 => Some((Level::Rack, Closeness::Required)),
                _ => None,
            },
            ..demand("", &[])
        };
        all.into_iter().enumerate().map(job).collect()
    })
}

fn apply(world: &mut World, what: Happens) {
    let nodes = world.cluster.nodes.len();
    let jobs = world.cluster.jobs.len();
    let now = world.now;
    match what {
        Happens::Start => world.start(),
        Happens::See => world.see(),
        Happens::Advance(millis) => {
            world.now += millis;
            world.memory.expire(world.now);
        }
        Happens::Cordon(at, on) => world.cluster.nodes[at % nodes].cordoned = on,
        Happens::Ready(at, on) => world.cluster.nodes[at % nodes].ready = on,
        Happens::Use(at, cpus) => {
            world.cluster.nodes[at % nodes].requested.put("cpu", &cpus.to_string());
        }
        Happens::Lose(at) | Happens::Fail(at) => {
            let job = &mut world.cluster.jobs[at % jobs];
            let node = job.holds.iter().nth(at / jobs).cloned();
            if let Some(node) = node.filter(|node| job.holds.remove(node)) {
                if matches!(what, Happens::Fail(_)) {
                    world.memory.avoid(&job.uid, &node, now + 5_000);
                }
            }
        }
        Happens::Run(at) => {
            let job = &mut world.cluster.jobs[at % jobs];
            if job.sizes.first().is_some_and(|least| job.holds.len() >= *least as usize) {
                job.standing = Standing::Running;
            }
        }
        Happens::Hold(at) => {
            world.cluster.jobs[at % jobs].standing = Standing::Holding { since: now };
        }
        Happens::Wait(at) => world.cluster.jobs[at % jobs].standing = Standing::Waiting,
        Happens::Suspend(at) => world.cluster.jobs[at % jobs].sizes.clear(),
    }
}

proptest! {
    #![proptest_config(ProptestConfig {
        failure_persistence: None,
        rng_seed: RngSeed::Fixed(1),
        ..ProptestConfig::with_cases(200)
    })]

    /// Every allocation of any story is sound (`assert_sound`); and when the faults stop, as many
    /// jobs run as fit, one after the other: none waits for ever.
    #[test]
    fn no_node_is_given_twice_and_nobody_starves(
        jobs in jobs(),
        count in 2..9u32,
        racks in 1..4u32,
        story in prop::collection::vec(happens(), 1..60),
    ) {
        let mut world = World::default();
        for index in 0..count {
            let rack = format!("rack={}", index % racks);
            happen(&mut world, &["nodes", &format!("n{index}"), &rack]);
        }
        world.cluster.jobs = jobs;
        for what in story {
            apply(&mut world, what);
            world.allocate();
        }
        for node in &mut world.cluster.nodes {
            (node.cordoned, node.ready) = (false, true);
            node.requested = Resources::default();
        }
        for job in &mut world.cluster.jobs {
            if job.sizes.is_empty() {
                job.holds.clear();
            }
            if job.standing != Standing::Waiting {
                job.standing = Standing::Holding { since: world.now };
            }
        }
        world.now += HOLD_TIMEOUT + 1_000_000;
        world.memory.expire(world.now);
        let most = |job: &Demand| match job.topology {
            Some((_, Closeness::Required)) => count.div_ceil(racks),
            _ => count,
        };
        // Jobs that can run at all run to their end, one after the other or together.
        let mut left: Vec<String> = (world.cluster.jobs.iter())
            .filter(|job| job.sizes.first().is_some_and(|least| *least <= most(job)))
            .map(|job| job.uid.clone())
            .collect();
        for _ in 0..40 {
            world.start();
            world.see();
            let done: Vec<String> = (world.cluster.jobs.iter())
                .filter(|job| job.sizes.first().is_some_and(|of| job.holds.len() >= *of as usize))
                .map(|job| job.uid.clone())
                .collect();
            for uid in done {
                happen(&mut world, &["end", &uid]);
                left.retain(|of| *of != uid);
            }
        }
        prop_assert!(left.is_empty(), "{left:?} never got their nodes: {:#?}", world.cluster);
    }
}

/// 512 nodes and 64 jobs of 8, with as many labels as real nodes have. It prints how long it took;
/// a bound would measure the machine that the tests run on.
#[test]
fn a_large_cluster_is_allocated_at_once() {
    let mut world = World::default();
    for index in 0..512 {
        let rack = format!("rack={}", index / 16);
        happen(&mut world, &["nodes", &format!("node-{index}"), &rack, "zone=a", "gpu=8"]);
    }
    for node in &mut world.cluster.nodes {
        for label in 0..24 {
            node.labels.insert(format!("example.org/label-{label}"), "a value".to_string());
        }
    }
    for index in 0..64 {
        let created = format!("created={index}");
        happen(&mut world, &["job", &format!("job-{index}"), "min=8", "gpu=8", &created]);
    }
    let began = std::time::Instant::now();
    let first = allocate(&world.cluster, &world.memory, 0);
    let took = began.elapsed();
    assert!(first.jobs.values().all(|granted| granted.nodes.len() == 8));
    world.start();
    world.see();
    let full = std::time::Instant::now();
    allocate(&world.cluster, &world.memory, 0);
    println!("empty cluster {took:?}, full cluster {:?}", full.elapsed());
    // A gang lies in one rack.
    for granted in first.jobs.values() {
        let racks: BTreeSet<&str> = (granted.nodes.iter())
            .filter_map(|node| world.cluster.nodes.iter().find(|of| of.name == node.name))
            .filter_map(|node| node.labels.get("topology.kubernetes.io/rack"))
            .map(String::as_str)
            .collect();
        assert_eq!(racks.len(), 1, "{granted:?}");
    }
}

/// An expert group that takes whole nodes wants them beside each other, so it is counted in nodes.
#[test]
fn an_expert_group_is_counted_in_nodes_where_it_takes_whole_ones() {
    let group = |nodes: u32, dp: u32, ep: u32| {
        nodes_of_group(nodes, &Layout::contiguous(Mesh::data_parallel(dp, ep)))
    };
    assert_eq!(group(4, 32, 16), 2, "sixteen ranks on nodes of eight");
    assert_eq!(group(4, 32, 32), 4);
    assert_eq!(group(4, 32, 8), 1, "a node each");
    assert_eq!(group(4, 32, 4), 1, "two in a node");
    assert_eq!(group(3, 36, 18), 1, "it ends within a node");
    assert_eq!(group(4, 4, 4), 4, "a rank each");
    // Nothing runs there, and nothing is divided by it.
    assert_eq!((group(8, 4, 4), group(0, 4, 4)), (1, 1));
}

#[test]
fn memory_ends_at_its_very_millisecond() {
    let mut memory = Memory::default();
    memory.decided("a", "n1", 1_000);
    memory.avoid("a", "n2", 50_000);
    assert!(memory.is_unseen("a", "n1") && !memory.is_unseen("a", "n2"));
    assert!(!memory.is_unseen("b", "n1"));
    let end = 1_000 + UNSEEN_TIMEOUT;
    memory.expire(end - 1);
    assert!(memory.is_unseen("a", "n1"));
    memory.expire(end);
    assert!(!memory.is_unseen("a", "n1"));
    memory.expire(49_999);
    assert_eq!(memory.avoided_until("a", "n2"), 50_000);
    memory.expire(50_000);
    assert_eq!((memory.avoided_until("a", "n2"), &memory), (0, &Memory::default()));
}

/// A gang that lies still loses nothing to a pod of somebody else that has come since.
#[test]
fn what_other_pods_ask_of_a_node_counts_from_when_it_is_known() {
    let node = |name: &str| ClusterNode {
        name: name.into(),
        ready: true,
        allocatable: Resources::read(&json!({ "cpu": "4", "pods": "10" })),
        ..ClusterNode::default()
    };
    let mut ground = Ground::new(vec![node("n2"), node("n1")], &Keys::default());
    let job = demand("a", &["cpu=2"]);
    let granted = |ground: &Ground| {
        let made = allocate::allocate(ground, std::slice::from_ref(&job), &Memory::default(), 0);
        made.jobs["a"].nodes.iter().map(|node| node.name.clone()).collect::<Vec<_>>()
    };
    assert_eq!(granted(&ground), ["n1"]);
    ground.set_requested("n1", Resources::read(&json!({ "cpu": "3" })));
    assert_eq!(granted(&ground), ["n2"]);
    ground.set_requested("nobody", Resources::read(&json!({ "cpu": "3" })));
    ground.set_requested("n1", Resources::default());
    assert_eq!(granted(&ground), ["n1"]);
}
