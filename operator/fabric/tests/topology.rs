//! The order in which a job uses the nodes of a cluster.

use moejob_fabric::topology::{NodeInfo, order};
use moejob_manifest::job::Closeness;
use moejob_manifest::keys::Keys;
use moejob_manifest::spec::Level;

fn node(name: &str, zone: &str, rack: &str) -> NodeInfo {
    let labels = [
        ("topology.kubernetes.io/zone", zone),
        ("network.topology.nvidia.com/leaf", rack),
    ];
    let labels = labels.iter().map(|(key, value)| (key.to_string(), value.to_string()));
    let (name, labels) = (name.to_string(), labels.collect());
    NodeInfo { name, labels, usable: true, ..NodeInfo::default() }
}

fn cluster() -> Vec<NodeInfo> {
    vec![
        node("n-10", "a", "1"),
        node("n-2", "a", "1"),
        node("n-1", "a", "2"),
        node("n-3", "b", "1"),
        node("n-4", "b", "1"),
        node("n-5", "b", "1"),
    ]
}

fn names(wish: Option<(Level, Closeness)>, min: u32, count: u32) -> String {
    order(&cluster(), &Keys::default(), wish, min, count).nodes.join(" ")
}

#[test]
fn neighbours_stand_beside_each_other() {
    assert_eq!(names(None, 1, 6), "n-2 n-10 n-1 n-3 n-4 n-5");
}

#[test]
fn the_part_that_fits_best_comes_first() {
    let rack = Some((Level::Rack, Closeness::Preferred));
    assert_eq!(names(rack, 1, 1), "n-1 n-2 n-10 n-3 n-4 n-5");
    assert_eq!(names(rack, 1, 2), "n-2 n-10 n-1 n-3 n-4 n-5");
    assert_eq!(names(rack, 1, 3), "n-3 n-4 n-5 n-2 n-10 n-1");
    assert_eq!(names(rack, 1, 6), "n-3 n-4 n-5 n-2 n-10 n-1");
}

/// Three tiers: a gang that fills no leaf stays below one core where that has enough nodes.
#[test]
fn what_a_leaf_lacks_comes_from_leaves_beside_it() {
    let tiers = ["fabric.topograph.run/tier-2", "fabric.topograph.run/tier-1"];
    let mut nodes = Vec::new();
    for core in 0..2 {
        for (leaf, size) in [1, 3, 2, 2].into_iter().enumerate() {
            let spine = format!("{core}-{}", leaf / 2);
            for at in 0..size {
                let mut one = node(&format!("n-{core}{leaf}{at}"), "", "");
                one.labels = [
                    (tiers[0].to_string(), format!("core-{core}")),
                    (tiers[1].to_string(), format!("spine-{spine}")),
                    ("fabric.topograph.run/tier-0".to_string(), format!("{core}/{leaf}")),
                ]
                .into();
                nodes.push(one);
            }
        }
    }
    let leaf = Some((Level::Leaf, Closeness::Preferred));
    let found = order(&nodes, &Keys::default(), leaf, 2, 8).nodes;
    let first: Vec<&str> = found[..8].iter().map(String::as_str).collect();
    // Its own leaf, the other one of its spine, then the core's other spine.
    assert_eq!(first[..4], ["n-010", "n-011", "n-012", "n-000"]);
    assert!(first.iter().all(|name| name.starts_with("n-0")), "{found:?}");
}

#[test]
fn a_required_level_leaves_the_others_out() {
    let rack = Some((Level::Rack, Closeness::Required));
    assert_eq!(names(rack, 2, 2), "n-2 n-10");
    let zone = Some((Level::Zone, Closeness::Required));
    assert_eq!(names(zone, 2, 3), "n-2 n-10 n-1");
}

#[test]
fn nodes_that_accept_no_pods_are_left_out() {
    let mut nodes = cluster();
    nodes.iter_mut().for_each(|node| node.usable = node.name == "n-4");
    assert_eq!(order(&nodes, &Keys::default(), None, 1, 6).nodes, ["n-4"]);
    nodes[4].usable = false;
    let wish = Some((Level::Rack, Closeness::Preferred));
    assert_eq!(order(&nodes, &Keys::default(), wish, 1, 6).nodes, Vec::<String>::new());
}
