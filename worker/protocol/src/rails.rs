//! An expert group of GPUs that lies on several nodes, with as many ranks on each: who exchanges
//! with whom where its tokens travel between nodes first, and whose rows then lie where.
//!
//! ```text
//! node A: a b    node B: x y    rails: a x, b y    buffers of all tokens: a b x y
//! out    along the rails   a has a . x .   b has . b . y   x has a . x .   y has . b . y
//!        within the nodes  everybody has a b x y
//! back   within the nodes  a has A's sums of the tokens of a and x, b those of b and y
//!        along the rails   a gets B's sums of its own tokens, and adds them to A's
//! ```
//! Ranks are named by their position in the group, and positions go by (node, place). A token's row
//! lies at the same place in the buffers of all ranks.

use crate::mesh::Mesh;
use std::ops::Range;

/// Nodes of a group, and its ranks on each of them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Rails {
    pub nodes: usize,
    pub places: usize,
}

impl Rails {
    /// Those of all expert groups of `mesh`, where a node has so many ranks. None: a group lies on
    /// one node, or not every node has as many ranks of every group.
    ///
    /// Ranks of a group are `stride` apart, and it begins at a multiple of its own length or less
    /// than a stride behind one. A job's sizes are all looked at, some of thousands of ranks: so
    /// this goes through none.
    pub fn of(mesh: &Mesh, ranks: u32) -> Option<Rails> {
        let (ranks, stride) = (ranks.max(1), mesh.cp * mesh.tp);
        let places = match stride {
            _ if stride >= ranks => 1,
            _ if ranks.is_multiple_of(stride) => ranks / stride,
            // A group that begins at a node has more ranks there than one that begins behind it.
            _ => return None,
        };
        let even = mesh.ep > places && mesh.ep.is_multiple_of(places);
        let rails = Rails { nodes: (mesh.ep / places) as usize, places: places as usize };
        even.then_some(rails)
    }

    pub fn node(&self, position: usize) -> usize {
        position / self.places
    }

    pub fn place(&self, position: usize) -> usize {
        position % self.places
    }

    /// The ranks of a node.
    pub fn on_node(&self, node: usize) -> Range<usize> {
        node * self.places..(node + 1) * self.places
    }

    /// The others of the rail of `me`, in the order of nodes.
    pub fn along(&self, me: usize) -> impl Iterator<Item = usize> {
        let Rails { nodes, places } = *self;
        (0..nodes).map(move |node| node * places + me % places).filter(move |other| *other != me)
    }

    /// Where the sums that `from`, of its rail, has of its tokens arrive at a rank: the place of a
    /// neighbour of `from`, whose rows are summed elsewhere by then. Only where nodes have several
    /// ranks.
    pub fn landing(&self, from: usize) -> usize {
        let (node, place) = (self.node(from), self.place(from));
        node * self.places + (place + 1) % self.places
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::BTreeSet;

    /// By the node of each rank, ascending: there are several, with as many ranks each.
    fn along(node_of: &[u32]) -> Option<Rails> {
        let runs: Vec<&[u32]> = node_of.chunk_by(|a, b| a == b).collect();
        let (nodes, places) = (runs.len(), runs.first()?.len());
        let even = runs.iter().all(|run| run.len() == places);
        (nodes > 1 && even).then_some(Rails { nodes, places })
    }

    #[test]
    fn rails_are_what_every_group_has() {
        let mut found = BTreeSet::new();
        let cases = (0..8 * 3 * 6 * 12).map(|at| (at % 8, at / 8 % 3, at / 24 % 6, at / 144));
        for (ep, edp, stride, ranks) in cases.map(|(a, b, c, d)| (a + 1, b + 1, c + 1, d + 1)) {
            for (cp, tp) in [(1, stride), (stride, 1)] {
                let mesh = Mesh { pp: 1, dp: ep * edp, ep, cp, tp };
                let nodes = |rank| -> Vec<u32> {
                    mesh.expert_group(rank).into_iter().map(|rank| rank / ranks).collect()
                };
                let each: Vec<_> = (0..mesh.world()).map(|rank| along(&nodes(rank))).collect();
                let of_all = each[0].filter(|_| each.iter().all(|of| *of == each[0]));
                assert_eq!(Rails::of(&mesh, ranks), of_all, "{mesh:?}, {ranks} a node");
                found.extend(of_all.map(|of| (of.nodes, of.places)));
            }
        }
        assert!(found.contains(&(4, 2)) && found.contains(&(2, 4)) && found.contains(&(7, 1)));
    }

    #[test]
    fn groups_have_rails_of_one_kind_or_none() {
        let of = |dp, ep, ranks| Rails::of(&Mesh::data_parallel(dp, ep), ranks);
        let rails = |nodes, places| Some(Rails { nodes, places });
        assert_eq!([of(4, 4, 2), of(8, 8, 4), of(16, 8, 2)], [
            rails(2, 2),
            rails(2, 4),
            rails(4, 2)
        ]);
        assert_eq!([of(2, 2, 1), of(4, 2, 1)], [rails(2, 1); 2]);
        // On one node each; uneven; the second of three groups alone lies on two nodes.
        assert_eq!([of(4, 2, 4), of(8, 4, 4), of(1, 1, 8)], [None; 3]);
        assert_eq!([of(6, 6, 4), of(12, 4, 6), of(12, 6, 4)], [None; 3]);
        // What the last node lacks is none of the group's.
        assert_eq!(of(6, 6, 2), rails(3, 2));
    }

    /// Plays who has whose rows, and whose sums, through both ways.
    #[test]
    fn everybodys_rows_arrive_and_every_sum_is_made_once() {
        for (nodes, places) in [(2, 1), (2, 2), (2, 3), (3, 2), (4, 4), (5, 1)] {
            let rails = Rails { nodes, places };
            let all = 0..nodes * places;
            let mut rows: Vec<BTreeSet<usize>> = all.clone().map(|me| [me].into()).collect();
            for me in all.clone() {
                rows[me].extend(rails.along(me));
                let of_rail: BTreeSet<usize> =
                    all.clone().filter(|of| rails.place(*of) == rails.place(me)).collect();
                assert_eq!(rows[me], of_rail);
            }
            let before = rows.clone();
            for me in all.clone() {
                for other in rails.on_node(rails.node(me)) {
                    assert_eq!(rails.node(other), rails.node(me));
                    rows[me].extend(&before[other]);
                }
                assert_eq!(rows[me], all.clone().collect(), "{rails:?}: {me}");
            }
            for me in all.clone().filter(|_| places > 1) {
                // What this rank still needs: its own sums, and those that it sends.
                let kept: BTreeSet<usize> = rails.along(me).chain([me]).collect();
                let landings: BTreeSet<usize> =
                    rails.along(me).map(|from| rails.landing(from)).collect();
                assert_eq!(landings.len(), nodes - 1, "each node's own");
                assert!(kept.is_disjoint(&landings), "{rails:?}: {me}");
                let whose: Vec<usize> = rails.along(me).map(|from| rails.node(from)).collect();
                assert!(whose.is_sorted() && !whose.contains(&rails.node(me)));
            }
        }
    }
}
