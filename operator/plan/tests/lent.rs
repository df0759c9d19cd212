//! Nodes beyond the least gang of a running job are lent, in drawn queues on nodes that are alike.

use moejob_manifest::keys::Keys;
use moejob_manifest::resources::Resources;
use moejob_plan::allocate::{ClusterNode, Demand, Ground, Memory, Needs, Standing, allocate};
use proptest::prelude::*;
use serde_json::json;
use std::collections::BTreeSet;

/// Least and largest gang, priority, and nodes of its own: none while it waits.
type Drawn = (u32, u32, i32, u32);

fn job(number: usize, (min, more, priority, has): Drawn, at: &mut u32, nodes: u32) -> Demand {
    let max = min + more;
    let holds = if has == 0 { 0 } else { (min + has % (more + 1)).min(max) };
    let holds = if *at + holds > nodes { 0 } else { holds };
    let names = (*at..*at + holds).map(|node| format!("n{node:02}"));
    let holds: BTreeSet<String> = names.collect();
    *at += holds.len() as u32;
    let requests = Resources::read(&json!({ "cpu": "1", "pods": "1" }));
    Demand {
        uid: format!("j{number}"),
        priority,
        created: number as u64,
        sizes: (min..=max).collect(),
        needs: Needs { requests, ..Needs::default() },
        standing: if holds.is_empty() { Standing::Waiting } else { Standing::Running },
        holds,
        ..Demand::default()
    }
}

/// Those that are served first show first what they lack, and all of them together no more than is
/// allowed; what others give back is not missing.
#[test]
fn missing_nodes_of_all_jobs_are_bounded_in_the_order_of_the_jobs() {
    let mut at = 0;
    // The third runs on two nodes, of which it needs one.
    let drawn = [(6, 0, 0, 0), (4, 0, 2, 0), (1, 1, 0, 3), (3, 0, 1, 0)];
    let jobs = drawn.into_iter().enumerate();
    let jobs: Vec<Demand> = jobs.map(|(of, drawn)| job(of, drawn, &mut at, 2)).collect();
    let ground = Ground::new((0..2).map(node).collect(), &Keys::default());
    let missing = |jobs: &[Demand], most: u32| {
        let mut made = allocate(&ground, jobs, &Memory::default(), 0);
        made.bound_missing(jobs, most);
        jobs.iter().map(|job| made.jobs[&job.uid].missing).collect::<Vec<_>>()
    };
    assert_eq!(missing(&jobs, 64), [6, 4, 0, 3]);
    assert_eq!(missing(&jobs, 8), [1, 4, 0, 3]);
    assert_eq!(missing(&jobs, 5), [0, 4, 0, 1]);
    assert_eq!(missing(&jobs, 0), [0, 0, 0, 0]);
    let first = [job(0, (1, 0, 9, 0), &mut 0, 2), jobs[2].clone()];
    assert_eq!(missing(&first, 64), [0, 0], "called back");
}

fn node(number: u32) -> ClusterNode {
    ClusterNode {
        name: format!("n{number:02}"),
        ready: true,
        allocatable: Resources::read(&json!({ "cpu": "4", "pods": "9" })),
        ..ClusterNode::default()
    }
}

proptest! {
    #![proptest_config(ProptestConfig { cases: 2_000, ..ProptestConfig::default() })]

    /// The first in line calls back what it lacks whenever that is enough, and exactly that; and
    /// otherwise nothing is idle that a running job could borrow.
    #[test]
    fn the_first_in_line_waits_for_no_elastic_job_behind_it(
        nodes in 1u32..14,
        drawn in prop::collection::vec((1u32..5, 0u32..6, 0i32..3, 0u32..8), 1..6),
    ) {
        let mut at = 0;
        let jobs = drawn.into_iter().enumerate();
        let jobs: Vec<Demand> = jobs.map(|(of, drawn)| job(of, drawn, &mut at, nodes)).collect();
        let ground = Ground::new((0..nodes).map(node).collect(), &Keys::default());
        let made = allocate(&ground, &jobs, &Memory::default(), 0);
        let mut order: Vec<&Demand> = jobs.iter().collect();
        order.sort_by_key(|job| (-job.priority, job.created));
        let granted = |job: &Demand| made.jobs[&job.uid].nodes.len() as u32;
        let called = |job: &Demand| {
            made.jobs[&job.uid].nodes.iter().filter(|node| node.called_back).count() as u32
        };
        let held: u32 = jobs.iter().map(|job| job.holds.len() as u32).sum();
        let new: u32 = jobs.iter().map(|job| granted(job) - job.holds.len() as u32).sum();
        let first = order.iter().position(|job| job.holds.is_empty() && granted(job) == 0);
        for job in &jobs {
            let held = job.holds.len() as u32;
            prop_assert!(held - called(job) >= job.sizes[0].min(held));
        }
        let Some(first) = first else { return Ok(()) };
        let before = order[..first].iter();
        let before: u32 = before.map(|job| granted(job) - job.holds.len() as u32).sum();
        let free = nodes - held - before;
        let behind = order[first + 1..].iter().filter(|job| !job.holds.is_empty());
        let lent: u32 = behind.map(|job| job.holds.len() as u32 - job.sizes[0]).sum();
        let least = order[first].sizes[0];
        prop_assert!(free < least, "it would have been given its gang");
        let all: u32 = jobs.iter().map(called).sum();
        if free + lent >= least {
            prop_assert!(all >= least - free, "{all} of {}", least - free);
            prop_assert!(made.jobs[&order[first].uid].why.contains("called back"));
        } else {
            let idle = nodes - held - new;
            let could = order.iter().any(|job| {
                !job.holds.is_empty() && called(job) == 0
                    && granted(job) < *job.sizes.last().expect("a size")
            });
            let waits = order.iter().any(|job| made.jobs[&job.uid].why.contains("called back"));
            prop_assert!(idle == 0 || !could || waits, "{idle} idle");
        }
    }
}
