//! Orders of ranks against exhaustive search and against chance, on made fabrics.

// It prints how long it took.
#![allow(clippy::disallowed_methods, clippy::disallowed_types)]

use moejob_fabric::{Crossings, FabricFacts, Wish, arrange, crossings, ring_optimum, tree_links};
use moejob_fabric::topology::{NodeInfo, Places};
use moejob_manifest::keys::{Keys, LEVELS, depth};
use moejob_manifest::spec::Level;
use std::collections::BTreeSet;

/// Numbers that are always the same (Marsaglia's xorshift).
struct Numbers(u64);

impl Numbers {
    fn below(&mut self, end: u64) -> u64 {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        self.0 % end
    }
}

/// Paths of nodes, one leaf a size.
fn flat(sizes: &[u32]) -> Vec<Vec<u32>> {
    let leaf = |(number, size): (u32, &u32)| vec![vec![number]; *size as usize];
    (0..).zip(sizes).flat_map(leaf).collect()
}

fn leaves(paths: &[Vec<u32>], order: &[usize]) -> Vec<u32> {
    // Numbers of leaves are unique in every fabric here.
    order.iter().map(|node| paths[*node][paths[*node].len() - 1]).collect()
}

fn arranged(paths: &[Vec<u32>], group: u32) -> Crossings {
    let order = arrange(paths, &Wish { group, leaf: paths[0].len() - 1 });
    let all: BTreeSet<usize> = order.iter().copied().collect();
    assert_eq!((all.len(), order.len()), (paths.len(), paths.len()), "each node once");
    crossings(&leaves(paths, &order))
}

#[test]
fn trees_are_those_of_nccl() {
    // Four and five nodes by hand, child and parent.
    assert_eq!(tree_links(4), [(1, 2), (2, 0), (3, 2), (2, 1), (1, 3), (0, 1)]);
    let five = [(1, 2), (2, 4), (3, 2), (4, 0), (2, 3), (3, 0), (4, 3), (0, 1)];
    assert_eq!(tree_links(5), five);
    for nodes in [1, 2, 3, 7, 8, 100, 129] {
        let links = tree_links(nodes);
        for tree in links.chunks(links.len().div_ceil(2).max(1)) {
            let children: BTreeSet<u32> = tree.iter().map(|(child, _)| *child).collect();
            assert_eq!((tree.len(), children.len()), (nodes as usize - 1, nodes as usize - 1));
        }
    }
}

#[test]
fn leaves_of_sixteen_and_uneven_ones() {
    let even = arranged(&flat(&[16; 8]), 1);
    assert_eq!(even, Crossings { ring: 8, trees: [11, 11] });
    // By trying all 20,160 orders: 25 to 53. (1,000 orders by chance give 26 to 49.)
    let uneven = arranged(&flat(&[18, 14, 17, 15, 16, 16, 19, 13]), 1);
    assert_eq!((uneven.ring, uneven.trees.iter().sum::<u32>()), (8, 25));
}

/// A fabric of one to three tiers: each leaf's way from the widest, and its nodes.
fn fabric(numbers: &mut Numbers) -> (Vec<Vec<u32>>, Vec<u32>) {
    let (leaves, tiers) = (2 + numbers.below(63) as usize, 1 + numbers.below(3));
    let most = if leaves > 8 { 12 } else { 20 };
    let sizes: Vec<u32> = (0..leaves).map(|_| 1 + numbers.below(most) as u32).collect();
    let (mut spine, mut core, mut ways) = (0, 0, Vec::new());
    for leaf in 0..leaves as u32 {
        if numbers.below(4) == 0 {
            spine += 1;
            core += numbers.below(2) as u32;
        }
        ways.push([core, spine, leaf][3 - tiers as usize..].to_vec());
    }
    (ways, sizes)
}

/// Links of both trees between leaves in this order of leaves.
fn between(links: &[(u32, u32)], sizes: &[u32], order: &[usize]) -> u32 {
    let leaf: Vec<usize> =
        order.iter().flat_map(|leaf| vec![*leaf; sizes[*leaf] as usize]).collect();
    links.iter().filter(|(a, b)| leaf[*a as usize] != leaf[*b as usize]).count() as u32
}

/// Every part of every tier stands together.
fn is_together(ways: &[Vec<u32>], order: &[usize]) -> bool {
    (0..ways[0].len()).all(|tier| {
        let parts: Vec<u32> = order.iter().map(|leaf| ways[*leaf][tier]).collect();
        let changes = parts.windows(2).filter(|two| two[0] != two[1]).count();
        changes + 1 == parts.iter().collect::<BTreeSet<_>>().len()
    })
}

/// By chance, parts together: tiers from the narrowest, by keys of their own.
fn by_chance(ways: &[Vec<u32>], numbers: &mut Numbers) -> Vec<usize> {
    let keys: Vec<Vec<u64>> =
        (0..ways[0].len()).map(|_| (0..64).map(|_| numbers.below(1 << 40)).collect()).collect();
    let mut order: Vec<usize> = (0..ways.len()).collect();
    order.sort_by_key(|leaf| {
        let way = ways[*leaf].iter().enumerate();
        way.map(|(tier, part)| keys[tier][*part as usize]).collect::<Vec<_>>()
    });
    order
}

fn permutations(order: &mut Vec<usize>, from: usize, each: &mut impl FnMut(&[usize])) {
    if from == order.len() {
        return each(order);
    }
    for other in from..order.len() {
        order.swap(from, other);
        permutations(order, from + 1, each);
        order.swap(from, other);
    }
}

/// `FABRICS` says how many, 1,000 without it where the build is optimised.
#[test]
fn no_order_by_chance_is_better_and_of_few_leaves_none_at_all() {
    let few = if cfg!(debug_assertions) { 200 } else { 1_000 };
    let fabrics = std::env::var("FABRICS").ok().and_then(|of| of.parse().ok()).unwrap_or(few);
    let mut numbers = Numbers(0x5eed_0f_fab);
    for case in 0..fabrics {
        let (ways, sizes) = fabric(&mut numbers);
        let node = |(way, size): (&Vec<u32>, &u32)| vec![way.clone(); *size as usize];
        let paths: Vec<Vec<u32>> = ways.iter().zip(&sizes).flat_map(node).collect();
        let order = arrange(&paths, &Wish { group: 1, leaf: ways[0].len() - 1 });
        for tier in 0..ways[0].len() {
            let parts: Vec<u32> = order.iter().map(|node| paths[*node][tier]).collect();
            let Crossings { ring, .. } = crossings(&parts);
            assert_eq!(ring, ring_optimum(&parts), "case {case}, tier {tier}");
        }
        let found: u32 = crossings(&leaves(&paths, &order)).trees.iter().sum();
        let links = tree_links(paths.len() as u32);
        let mut best = u32::MAX;
        if sizes.len() <= if cfg!(debug_assertions) { 6 } else { 8 } {
            permutations(&mut (0..sizes.len()).collect(), 0, &mut |order| {
                if is_together(&ways, order) {
                    best = best.min(between(&links, &sizes, order));
                }
            });
            assert_eq!(found, best, "case {case}: {ways:?} {sizes:?}");
        } else {
            let tries = if cfg!(debug_assertions) { 100 } else { 1_000 };
            for _ in 0..tries {
                let order = by_chance(&ways, &mut numbers);
                best = best.min(between(&links, &sizes, &order));
            }
            assert!(found <= best, "case {case}: {found} > {best}: {ways:?} {sizes:?}");
        }
    }
}

#[test]
fn the_largest_gang_is_arranged_at_once() {
    let mut numbers = Numbers(7);
    for leaf in [16, 64] {
        let mut sizes: Vec<u32> =
            (0..leaf).map(|_| (1_024 / leaf - 8 + numbers.below(16)) as u32).collect();
        let short = 1_024 - sizes.iter().sum::<u32>() as i64;
        sizes[0] = (i64::from(sizes[0]) + short).max(1) as u32;
        let paths = flat(&sizes);
        let began = std::time::Instant::now();
        arranged(&paths, 1);
        let took = began.elapsed();
        println!("{} nodes on {leaf} leaves: {took:?}", paths.len());
        // The bar is 30 ms in a release, on a machine that does nothing else. Here it is what a
        // search without bounds would break.
        assert!(took.as_secs() < 60, "{took:?}");
    }
}

#[test]
fn expert_groups_come_before_rings() {
    let within = |sizes: &[u32], group: u32| {
        let paths = flat(sizes);
        let order = arrange(&paths, &Wish { group, leaf: 0 });
        let facts = FabricFacts::of(&leaves(&paths, &order), group).expect("several leaves");
        (facts.groups_within, facts.groups, facts.ring_crossings)
    };
    // Two uneven leaves beside each other share one group.
    assert_eq!(within(&[3, 4, 3], 2), (4, 5, 3));
    assert_eq!(within(&[4, 4], 2), (4, 4, 2));
    // One node of each leaf is left over: together they are the fifth group.
    let (groups, of, ring) = within(&[5, 5, 5, 5], 4);
    assert_eq!((groups, of), (4, 5));
    assert!(ring <= 8, "{ring}");
    let mut numbers = Numbers(99);
    for case in 0..200 {
        let group = 2 + numbers.below(3) as u32;
        let mut sizes: Vec<u32> =
            (0..2 + numbers.below(8)).map(|_| 1 + numbers.below(12) as u32).collect();
        let odd = sizes.iter().sum::<u32>() % group;
        sizes[0] += (group - odd) % group;
        let possible: u32 = sizes.iter().map(|size| size / group).sum();
        let (groups, ..) = within(&sizes, group);
        assert_eq!(groups, possible, "case {case}: {sizes:?} in groups of {group}");
    }
}

fn node(name: &str, labels: &[(&str, &str)]) -> NodeInfo {
    let labels = labels.iter().map(|(key, value)| (key.to_string(), value.to_string()));
    let labels = labels.collect();
    NodeInfo { name: name.to_string(), labels, usable: true, ..NodeInfo::default() }
}

#[test]
fn labels_of_every_cloud_tell_where_a_node_lies() {
    let part = |level: Level, labels: &[(&str, &str)]| {
        node("n", labels).path(&Keys::default())[depth(level)].to_string()
    };
    let topograph =
        [("fabric.topograph.run/tier-0", "l"), ("fabric.topograph.run/tier-7", "core")];
    assert_eq!(part(Level::Rack, &topograph), "l");
    assert_eq!(part(Level::Tier7, &topograph), "core");
    assert_eq!(part(Level::Tier3, &topograph), "");
    for (level, key) in [
        (Level::Leaf, "ib/torset"),
        (Level::Leaf, "topology.k8s.aws/network-node-layer-3"),
        (Level::Tier2, "topology.k8s.aws/network-node-layer-1"),
        (Level::Tier1, "ib.coreweave.cloud/superpod"),
        (Level::Leaf, "backend.coreweave.cloud/leafgroup"),
        (Level::Tier1, "crusoe.ai/ib.partition.id"),
        (Level::Leaf, "crusoe.ai/pod.id"),
        (Level::NvlinkDomain, "accelerator.topograph.run/domain"),
        (Level::Tier1, "network.topology.nvidia.com/spine"),
    ] {
        assert_eq!(part(level, &[(key, "here")]), "here", "{key}");
    }
    assert_eq!(part(Level::Host, &[]), "n");
}

#[test]
fn an_admin_names_labels_of_his_own() {
    let text = "version: 1\nlevels: { leaf: [example.org/switch], tier-1: [example.org/row] }\n";
    let keys = Keys::read(text.as_bytes()).unwrap();
    let all = [("example.org/switch", "s"), ("ib/torset", "t"), ("example.org/row", "r")];
    let nodes = [node("n", &all), node("m", &all[1..2])];
    let leaf = |node: &NodeInfo| node.path(&keys)[depth(Level::Leaf)].to_string();
    assert_eq!([leaf(&nodes[0]), leaf(&nodes[1])], ["s", "t"]);
    assert_eq!(nodes[0].path(&keys)[depth(Level::Tier1)], "r");
    for (text, expected) in [
        ("version: 1\nlevels: { shelf: [a] }\n", "E0102 levels.shelf"),
        ("version: 1\nlevels: { leaf: a }\n", "E0105 levels.leaf"),
        ("levels: { leaf: [] }\n", "E0108 levels.leaf"),
    ] {
        let found = Keys::read(text.as_bytes()).unwrap_err();
        let found: Vec<String> = found.iter().map(ToString::to_string).collect();
        assert!(found.iter().any(|of| of.contains(expected)), "{expected}: {found:?}");
    }
    // Every word is a level's, and every level has a word.
    let level = |name: &&str| {
        let name = serde_json::Value::String(name.to_string());
        serde_json::from_value::<Level>(name).map(depth).unwrap()
    };
    let depths: BTreeSet<usize> = LEVELS.iter().map(level).collect();
    assert_eq!(depths, (0..=12).collect());
}

#[test]
fn parts_of_one_name_in_two_spines_are_two() {
    let nodes: Vec<NodeInfo> = ["x", "y"]
        .iter()
        .flat_map(|spine| {
            let labels =
                [("fabric.topograph.run/tier-0", "1"), ("fabric.topograph.run/tier-1", *spine)];
            [node(&format!("{spine}1"), &labels), node(&format!("{spine}2"), &labels)]
        })
        .collect();
    let places = Places::new(&nodes, &Keys::default());
    assert_eq!(places.leaves(&[0, 1, 2, 3]), [0, 0, 1, 1]);
    let facts = places.facts(&places.arranged(&[0, 2, 1, 3], 1), 1).unwrap();
    assert_eq!((facts.leaves, facts.ring_crossings), (2, 2));
}
