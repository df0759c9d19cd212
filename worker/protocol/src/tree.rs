//! The one reduction tree of a step.
//!
//! A gradient is a sum over the M micro-batches of a step. Floating-point sums depend on their
//! order, so the order is fixed: a binary tree over micro-batch indices in which node
//! (level, index) covers `[index << level, (index+1) << level)`. A node with one child present
//! is that child. Whoever holds a contiguous block of leaves can reduce it to its maximal
//! complete nodes alone, and whoever then receives all of these can finish: the bits do not
//! depend on who held what.

use std::ops::Range;

/// A complete node: all its `1 << level` leaves exist.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Node {
    pub level: u32,
    pub index: u32,
}

impl Node {
    pub fn leaf(index: u32) -> Node {
        Node { level: 0, index }
    }

    pub fn leaves(&self) -> Range<u32> {
        self.index << self.level..(self.index + 1) << self.level
    }

    pub fn parent(&self) -> Node {
        Node { level: self.level + 1, index: self.index / 2 }
    }

    fn is_left(&self) -> bool {
        self.index.is_multiple_of(2)
    }
}

/// The maximal complete nodes of a block of leaves, in ascending order of their leaves.
/// At most `2 * log2(len) + 1` of them.
pub fn subtrees(block: Range<u32>) -> Vec<Node> {
    each_subtree(block).collect()
}

/// The same, one after the other.
pub(crate) fn each_subtree(block: Range<u32>) -> impl Iterator<Item = Node> {
    let mut at = block.start;
    std::iter::from_fn(move || {
        if at >= block.end {
            return None;
        }
        let mut level = if at == 0 { 31 } else { at.trailing_zeros() };
        while (block.end - at) >> level == 0 {
            level -= 1;
        }
        let node = Node { level, index: at >> level };
        at += 1 << level;
        Some(node)
    })
}

/// A binary counter over one block: which stack entries to merge after each pushed leaf.
#[derive(Clone, Debug, Default)]
pub struct Counter {
    stack: Vec<Node>,
}

impl Counter {
    /// Pushes the next leaf and returns how many merges of the two topmost entries follow.
    /// Only complete siblings merge, so what remains is `subtrees` of the block so far.
    pub fn push(&mut self, leaf: u32) -> usize {
        let mut node = Node::leaf(leaf);
        let mut merges = 0;
        while !node.is_left() {
            match self.stack.last() {
                Some(left) if left.parent() == node.parent() && left.level == node.level => {
                    self.stack.pop();
                    node = node.parent();
                    merges += 1;
                }
                _ => break,
            }
        }
        self.stack.push(node);
        merges
    }

    pub fn nodes(&self) -> &[Node] {
        &self.stack
    }

    pub fn clear(&mut self) {
        self.stack.clear();
    }
}

/// Largest number of entries that the stack of a block ever holds, the pushed leaf included: as
/// many as `Counter` has, without counting through the block.
pub fn depth_max(block: Range<u32>) -> usize {
    let (mut at, mut depth, mut nodes) = (block.start, 0, 0);
    while at < block.end {
        // The next node that is complete whatever comes before the block has `1 << level` leaves.
        let level = if at == 0 { 31 } else { at.trailing_zeros() };
        let leaves = 1 << level;
        // Within it the entries are the ones in binary of the leaves so far. Of all numbers up to
        // `most` that has most ones which is `most` or has one digit less, all ones.
        let most: u32 = (block.end - 1 - at).min(leaves - 1);
        let digits = u32::BITS - most.leading_zeros();
        depth = depth.max(nodes + 1 + most.count_ones().max(digits.saturating_sub(1)));
        nodes += 1;
        match at.checked_add(leaves) {
            Some(next) => at = next,
            None => break,
        }
    }
    depth as usize
}

/// The root of the tree over `count` leaves. Its right edge may be incomplete.
pub fn root(count: u32) -> Node {
    Node { level: count.next_power_of_two().trailing_zeros(), index: 0 }
}

/// Additions `(into, from)` over positions of `nodes` that reduce them to `target`, in order, and
/// the position that then holds it.
///
/// `nodes` ascend, do not overlap and cover every existing leaf below `target`; a child without
/// leaves is absent. `None` when no node lies below `target`.
pub fn reduce(nodes: &[Node], target: Node) -> Option<(Vec<(usize, usize)>, usize)> {
    let mut additions = Vec::new();
    let position = reduce_into(nodes, 0, target, &mut additions)?;
    Some((additions, position))
}

fn reduce_into(
    nodes: &[Node],
    base: usize,
    target: Node,
    additions: &mut Vec<(usize, usize)>,
) -> Option<usize> {
    let range = target.leaves();
    let first = nodes.partition_point(|node| node.leaves().end <= range.start);
    let last = nodes.partition_point(|node| node.leaves().start < range.end);
    let below = &nodes[first..last];
    if below.is_empty() {
        return None;
    }
    if below == [target] {
        return Some(base + first);
    }
    assert!(target.level > 0, "a node of {below:?} reaches beyond {target:?}");
    let child = |side| Node { level: target.level - 1, index: target.index * 2 + side };
    let left = reduce_into(below, base + first, child(0), additions);
    let right = reduce_into(below, base + first, child(1), additions);
    match (left, right) {
        (Some(into), Some(from)) => {
            additions.push((into, from));
            Some(into)
        }
        (one, other) => one.or(other),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::mesh::split;

    /// Sums `leaves[block]` the way a rank does: push, merge, push, merge.
    fn partial(leaves: &[f32], block: Range<u32>) -> Vec<(Node, f32)> {
        let mut counter = Counter::default();
        let mut stack: Vec<f32> = Vec::new();
        for leaf in block.clone() {
            stack.push(leaves[leaf as usize]);
            for _ in 0..counter.push(leaf) {
                let top = stack.pop().expect("two entries");
                *stack.last_mut().expect("two entries") += top;
            }
            assert!(stack.len() <= depth_max(block.clone()));
        }
        assert_eq!(counter.nodes(), subtrees(block));
        counter.nodes().iter().copied().zip(stack).collect()
    }

    fn total(leaves: &[f32], parts: u32) -> f32 {
        let count = leaves.len() as u32;
        let pieces: Vec<(Node, f32)> =
            (0..parts).flat_map(|part| partial(leaves, split(count, parts, part))).collect();
        let nodes: Vec<Node> = pieces.iter().map(|piece| piece.0).collect();
        let mut sums: Vec<f32> = pieces.iter().map(|piece| piece.1).collect();
        let (additions, at) = reduce(&nodes, root(count)).expect("leaves");
        for (into, from) in additions {
            sums[into] += sums[from];
        }
        sums[at]
    }

    #[test]
    fn every_split_gives_the_same_bits() {
        for count in 1..40u32 {
            let leaves: Vec<f32> =
                (0..count).map(|i| ((i * 7919 % 1000) as f32 * 0.37).sin() * 1e3).collect();
            let one = total(&leaves, 1);
            for parts in 2..=count {
                assert_eq!(total(&leaves, parts).to_bits(), one.to_bits(), "{count}/{parts}");
            }
        }
    }

    #[test]
    fn blocks_decompose_into_maximal_complete_nodes() {
        let show = |block: Range<u32>| {
            let nodes = subtrees(block);
            nodes.iter().map(|n| format!("{:?}", n.leaves())).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(show(0..4), "0..4");
        assert_eq!(show(0..7), "0..4 4..6 6..7");
        assert_eq!(show(3..9), "3..4 4..8 8..9");
        assert_eq!(show(5..5), "");
    }

    #[test]
    fn a_depth_is_that_of_counting_through_the_block() {
        let counted = |block: Range<u32>| {
            let (mut counter, mut depth) = (Counter::default(), 0);
            for leaf in block {
                depth = depth.max(counter.nodes().len() + 1);
                counter.push(leaf);
            }
            depth
        };
        for start in 0..70 {
            for end in 0..=140 {
                assert_eq!(depth_max(start..end), counted(start..end), "{start}..{end}");
            }
        }
        let far = u32::MAX - 1000;
        for len in [0, 1, 2, 7, 64, 999] {
            assert_eq!(depth_max(far..far + len), counted(far..far + len), "{len}");
        }
    }

    #[test]
    fn a_holder_can_merge_the_blocks_of_its_sources_first() {
        // Sources [0,2) [2,3) [3,4) of a group reduce to [0,4).
        let nodes: Vec<Node> = [0..2, 2..3, 3..4].into_iter().flat_map(subtrees).collect();
        let (additions, at) = reduce(&nodes, subtrees(0..4)[0]).expect("leaves");
        assert_eq!((additions, at), (vec![(1, 2), (0, 1)], 0));
    }
}
