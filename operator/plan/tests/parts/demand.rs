use moejob_manifest::identity::least;
use moejob_manifest::job::Venue;
use moejob_plan::allocate::{Claim, Demand, Needs};
use moejob_plan::launch::{template, wanted};
use moejob_plan::observed::{Observed, Size};
use moejob_plan::pods::places;
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;
use std::collections::{BTreeMap, BTreeSet};

/// Of nodes with 8 ranks each.
fn size(nodes: u32, ep: u32, like: &Size) -> Size {
    let layout = Layout::contiguous(Mesh { pp: 1, dp: nodes * 8, ep, cp: 1, tp: 1 });
    Size { nodes, layout, ..like.clone() }
}

#[test]
fn whole_nodes_of_an_expert_group_are_asked_for_side_by_side() {
    let job = least();
    let mut wanted = wanted(&job, Venue::Kubernetes);
    let like = wanted.sizes[0].clone();
    // In a node, of one node, of two and of four whole ones; of one and a half.
    let shapes = [(1, 4), (2, 8), (4, 16), (8, 32), (3, 12)];
    wanted.sizes = shapes.map(|(nodes, ep)| size(nodes, ep, &like)).into();
    let template = template(&job, Venue::Kubernetes, "uid", &places(&job));
    let observed = Observed::new(wanted, template);
    let claim = Claim::of(&observed, |_| false);
    let demand = Demand::of(&job, &observed, claim, Needs::of(&job), "uid", BTreeSet::new());
    assert_eq!(demand.groups, BTreeMap::from([(4, 2), (8, 4)]));
}
