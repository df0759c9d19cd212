//! A gang of hundreds: what would be little for one member must not be done or kept for each.

mod world;

use moejob_plan::decide::Action;
use std::sync::Arc;
use world::{Setup, World};

#[test]
fn all_members_of_a_gang_share_one_configuration() {
    let nodes = 128;
    let mut world =
        World::new(Setup { min: nodes, max: nodes, nodes, experts: 8, ..Setup::default() });
    world.settle();
    let names: Vec<String> = world.sims.keys().cloned().collect();
    assert_eq!(names.len(), nodes as usize);
    for name in &names {
        assert!(world.connect(name));
    }
    let mut configs = Vec::new();
    for plan in world.settle() {
        configs.extend(plan.actions.into_iter().filter_map(|action| match action {
            Action::Configure { rank, config, .. } => Some((rank, config)),
            _ => None,
        }));
    }
    let ranks: Vec<u32> = configs.iter().map(|(rank, _)| *rank).collect();
    assert_eq!(ranks, Vec::from_iter(0..nodes));
    assert!(configs.iter().all(|(_, config)| Arc::ptr_eq(config, &configs[0].1)));
}
