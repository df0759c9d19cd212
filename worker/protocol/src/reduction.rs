//! Which partial gradients a rank has, and where every parameter lies in flat memory.
//!
//! An expert's gradient is computed at its rank, one leaf for each micro-batch of each source (a
//! rank whose tokens come here). A dense gradient is computed where the micro-batch is.

use crate::layout::Layout;
use crate::mesh::Mesh;
use crate::model::{ModelConfig, Param, Role};
use crate::tree::{Node, each_subtree, subtrees};
use std::ops::Range;

/// Elements at whose multiples a parameter starts in flat memory: 256 bytes of f32.
pub const ALIGNMENT_ELEMENTS: u64 = 64;

/// The blocks of micro-batches whose leaves of `param` `rank` computes, ascending; neighbouring
/// ones are joined, so that it may reduce them before it sends.
pub fn leaf_blocks(
    model: &ModelConfig,
    layout: &Layout,
    param: &Param,
    rank: u32,
    micro_batches: u32,
) -> Vec<Range<u32>> {
    let mesh = &layout.mesh;
    let sources = match param.role {
        Role::Expert { layer, expert } => (mesh.expert_group(rank).into_iter())
            .filter(|source| {
                layout.expert_ranks(model, layer, *source)[expert as usize] == rank
            })
            .collect(),
        _ => vec![rank],
    };
    joined(mesh, sources, micro_batches)
}

/// The micro-batches of `sources`, neighbouring blocks as one.
fn joined(mesh: &Mesh, sources: Vec<u32>, micro_batches: u32) -> Vec<Range<u32>> {
    let mut blocks: Vec<Range<u32>> = Vec::new();
    for source in sources {
        let block = mesh.micro_batches(source, micro_batches);
        match blocks.last_mut() {
            _ if block.is_empty() => {}
            Some(last) if last.end == block.start => last.end = block.end,
            _ => blocks.push(block),
        }
    }
    blocks
}

/// The nodes that `rank` contributes to the tree of `param`, ascending.
pub fn contribution(
    model: &ModelConfig,
    layout: &Layout,
    param: &Param,
    rank: u32,
    micro_batches: u32,
) -> Vec<Node> {
    let blocks = leaf_blocks(model, layout, param, rank, micro_batches);
    blocks.into_iter().flat_map(subtrees).collect()
}

/// How many nodes `rank`, one of the `holders` of a parameter, contributes to its tree: as many as
/// [`contribution`] has. An expert's tokens of a group are computed by the first holder in it.
pub(crate) fn subtrees_of(
    mesh: &Mesh,
    holders: &[u32],
    of_expert: bool,
    rank: u32,
    micro_batches: u32,
) -> u64 {
    let count = |block: Range<u32>| each_subtree(block).count() as u64;
    if !of_expert {
        return count(mesh.micro_batches(rank, micro_batches));
    }
    let group = mesh.expert_group(rank);
    let first = group.iter().find(|member| holders.binary_search(member).is_ok());
    if first != Some(&rank) {
        return 0;
    }
    joined(mesh, group, micro_batches).into_iter().map(count).sum()
}

/// Parameters side by side in one buffer, each from a multiple of [`ALIGNMENT_ELEMENTS`].
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flat {
    /// `(position in the table, first element, elements)`, ascending.
    pub spans: Vec<(usize, u64, u64)>,
    /// Elements in all.
    pub len: u64,
}

impl Flat {
    pub(crate) fn push(&mut self, index: usize, len: u64) {
        if len > 0 {
            self.spans.push((index, self.len, len));
            self.len += len.next_multiple_of(ALIGNMENT_ELEMENTS);
        }
    }

    /// First element and elements of the parameter at `index` of the table.
    pub fn span(&self, index: usize) -> Option<(u64, u64)> {
        let at = self.spans.binary_search_by_key(&index, |span| span.0).ok()?;
        Some((self.spans[at].1, self.spans[at].2))
    }
}

/// What lies where in the memory of a rank.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Flats {
    /// Parameters that every rank holds.
    pub dense: Flat,
    /// Parameters of the experts that this rank holds.
    pub experts: Flat,
    /// The owned run of each parameter.
    pub owned: Flat,
}
