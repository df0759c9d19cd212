//! NCCL's rings and trees over nodes, as functions of their order alone.
//!
//! NCCL numbers nodes by their first appearance in rank order. Its ring goes from each node to the
//! next, and from the last to the first. Its two trees are binary trees over the numbers: in the
//! first a node hangs below the number with its lowest set bit cleared and the next one set, or,
//! where there is no such number, with the bit cleared alone. The second is the first one's mirror
//! image for an even number of nodes, and shifted by one for an odd one, so that leaves of the one
//! are inner nodes of the other. (Sanders, Speck, Träff: Two-tree algorithms, 2009; NCCL 2.4 and
//! later.)

/// Child and parent of each link of both trees over `nodes` nodes: 2 (nodes - 1) of them.
pub fn tree_links(nodes: u32) -> Vec<(u32, u32)> {
    let parent = |node: u32| {
        let bit = node & node.wrapping_neg();
        let above = (node ^ bit) | (bit << 1);
        if above < nodes { above } else { node ^ bit }
    };
    let first = (1..nodes).map(|node| (node, parent(node)));
    let other = |node: u32| match nodes.is_multiple_of(2) {
        true => nodes - 1 - node,
        false => (node + 1) % nodes,
    };
    let second = first.clone().map(|(child, above)| (other(child), other(above)));
    first.clone().chain(second).collect()
}

/// Links between nodes of different parts.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, serde::Serialize)]
#[serde(rename_all = "camelCase")]
pub struct Crossings {
    /// Of the ring.
    pub ring: u32,
    /// Of each tree.
    pub trees: [u32; 2],
}

/// Of nodes in this order, each given by the number of its part.
pub fn crossings(parts: &[u32]) -> Crossings {
    let nodes = parts.len() as u32;
    let differ = |a: u32, b: u32| u32::from(parts[a as usize] != parts[b as usize]);
    let links = tree_links(nodes);
    let (first, second) = links.split_at(links.len() / 2);
    let count = |links: &[(u32, u32)]| links.iter().map(|(a, b)| differ(*a, *b)).sum();
    Crossings {
        ring: (0..nodes).map(|node| differ(node, (node + 1) % nodes)).sum(),
        trees: [count(first), count(second)],
    }
}

/// The fewest crossings that any ring over these parts has: one a part, none where there is one.
pub fn ring_optimum(parts: &[u32]) -> u32 {
    let mut all = parts.to_vec();
    all.sort_unstable();
    all.dedup();
    if all.len() > 1 { all.len() as u32 } else { 0 }
}

/// How many links of both trees lie within a run of nodes, for any run.
pub(super) struct Inside {
    nodes: usize,
    links: Vec<(u32, u32)>,
    /// By length: the count for a run that begins at each node.
    tables: Vec<Option<Vec<u32>>>,
}

impl Inside {
    pub fn new(nodes: u32) -> Inside {
        let links = tree_links(nodes).into_iter().map(|(a, b)| (a.min(b), a.max(b))).collect();
        let tables = vec![None; nodes as usize + 1];
        Inside { nodes: nodes as usize, links, tables }
    }

    /// To be called before `of` is asked for runs of this length.
    pub fn prepare(&mut self, length: u32) {
        let table = &mut self.tables[length as usize];
        if table.is_some() {
            return;
        }
        // A link (a, b) lies in the runs that begin after b - length and not after a.
        let mut steps = vec![0i32; self.nodes + 1];
        for (a, b) in self.links.iter().filter(|(a, b)| b - a < length) {
            steps[(b + 1).saturating_sub(length) as usize] += 1;
            steps[*a as usize + 1] -= 1;
        }
        let mut sum = 0;
        let counts = steps[..self.nodes].iter().map(|step| {
            sum += step;
            sum as u32
        });
        *table = Some(counts.collect());
    }

    pub fn of(&self, first: u32, length: u32) -> u32 {
        let table = self.tables[length as usize].as_ref();
        table.map_or(0, |table| table[first as usize])
    }
}
