//! Between which ways to exchange the first steps of an attempt choose, by what they measure.
//!
//! ```text
//! flat | hierarchical   where the manifest leaves it to the plan and both send other messages
//! planned chunks | one  where the manifest leaves it to the plan and the plan has several
//! ```
//! On processors alone, where no bit depends on the way. What a manifest says by name is not tried.

use crate::{overlap, travel};
use moejob_manifest::job::Job;
use moejob_manifest::profile::Backend;
use moejob_protocol::config::{Exchange, Way};
use moejob_protocol::layout::Layout;
use moejob_protocol::mesh::Mesh;

/// The ways that the gang of `layout` tries, the planned one first; none where there is nothing to
/// choose. The planned one has the most chunks, so memory is counted by it.
pub fn tried(job: &Job, layout: &Layout) -> Vec<Way> {
    if job.profile.backend == Backend::Cuda || layout.mesh.ep == 1 {
        return Vec::new();
    }
    let mut exchanges = vec![travel::choice(job, layout).0];
    if job.exchange.is_none() && stages_differ(&layout.mesh, job.profile.ranks.max(1)) {
        exchanges.push(match exchanges[0] {
            Exchange::Flat => Exchange::Hierarchical,
            Exchange::Hierarchical => Exchange::Flat,
        });
    }
    let mut degrees = vec![overlap::choice(job, layout).0];
    if job.overlap_degree.is_none() && degrees[0] > 1 {
        degrees.push(1);
    }
    let of = |chunks: &u32| {
        let chunks = *chunks;
        exchanges.iter().map(move |exchange| Way { exchange: *exchange, chunks })
    };
    let ways: Vec<Way> = degrees.iter().flat_map(of).collect();
    if ways.len() > 1 { ways } else { Vec::new() }
}

/// Two stages send other messages than one: an expert group lies on several nodes of so many ranks,
/// with several of its ranks on one of them.
fn stages_differ(mesh: &Mesh, ranks: u32) -> bool {
    let (ep, groups) = (mesh.ep, mesh.world() / mesh.ep);
    // Ranks of a group follow each other. As many groups as a node has ranks begin at all the
    // places of a node at which a group may begin.
    (0..groups.min(ranks)).any(|group| {
        let first = group * ep;
        let nodes = (first + ep - 1) / ranks - first / ranks + 1;
        nodes > 1 && ep > nodes
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn stages_differ_where_a_node_has_several_of_a_group_that_lies_on_several() {
        let of = |dp, ep, ranks| stages_differ(&Mesh::data_parallel(dp, ep), ranks);
        assert!(of(4, 4, 2), "two nodes of two");
        assert!(of(8, 4, 3), "uneven: three and one, two and two");
        assert!(of(6, 3, 2), "two and one, one and two");
        assert!(!of(4, 4, 4), "one node");
        assert!(!of(4, 2, 2), "a group on each node");
        assert!(!of(4, 4, 1), "a rank on each node: nothing to pass on");
        // The middle one of three groups lies on two nodes, a rank on each.
        assert!(!of(6, 2, 3));
        // The first group is on one node. The second one has one rank there and two on the next.
        assert!(of(12, 3, 4));
    }
}
