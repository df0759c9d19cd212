//! Shares of machines, and threads that are bound.

use super::{Share, bind, share};
use crate::life::machine::{Machine, NumaNode, allowed};

fn of(nodes: &[&[u32]]) -> Machine {
    let node = |(id, cpus): (usize, &&[u32])| {
        let (id, cpus) = (id as u32, cpus.to_vec());
        NumaNode { id, allowed: cpus.clone(), cpus }
    };
    let nodes = nodes.iter().enumerate().map(node).collect();
    Machine { has_numa: true, nodes, ..Machine::default() }
}

#[test]
fn workers_get_whole_nodes_and_every_node_is_used() {
    let four = of(&[&[0, 4], &[1, 5], &[2, 6], &[3, 7]]);
    let shares = |workers: u32| -> Vec<Vec<u32>> {
        let one = |index| share(&four, Share { index, of: workers }).expect("bound");
        (0..workers).map(one).collect()
    };
    assert_eq!(shares(2), [vec![0, 1, 4, 5], vec![2, 3, 6, 7]]);
    assert_eq!(shares(3), [vec![0, 4], vec![1, 5], vec![2, 3, 6, 7]]);
    assert_eq!(shares(4), [vec![0, 4], vec![1, 5], vec![2, 6], vec![3, 7]]);
    let eight = shares(8);
    for (index, cpus) in eight.iter().enumerate() {
        assert_eq!(*cpus, four.nodes[index / 2].cpus, "worker {index} of 8");
    }
}

#[test]
fn nothing_is_bound_where_it_brings_nothing() {
    let mut two = of(&[&[0], &[1]]);
    assert_eq!(share(&two, Share::default()), None);
    assert_eq!(share(&of(&[&[0, 1]]), Share { index: 1, of: 4 }), None);
    assert_eq!(share(&two, Share { index: 4, of: 4 }), None, "not one of them");
    two.nodes[1].allowed.clear();
    assert_eq!(share(&two, Share { index: 0, of: 2 }), None, "one node is left of the two");
}

#[test]
fn a_bound_thread_and_its_children_stay_on_their_processors() {
    let cpu = allowed().expect("Linux tells")[0];
    let seen = std::thread::spawn(move || {
        bind(None, &[cpu]).expect("it is allowed");
        std::thread::spawn(allowed).join().expect("no panic").expect("Linux tells")
    });
    assert_eq!(seen.join().expect("no panic"), [cpu]);
}
