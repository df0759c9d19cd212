//! Rows of an expert group, and who needs them. `P` positions of each of `N` nodes have `T` tokens,
//! and a token has `K` choices.

use crate::buffer::Buffer;
use crate::ops::wire::op::WireFormat;

/// Who needs which token, the same on all ranks but for `node`.
#[derive(Clone, Debug)]
pub struct Need {
    /// `T`
    pub tokens: usize,
    /// `K`
    pub top_k: usize,
    /// u32 [N P T, K]
    pub ids: Buffer,
    /// Ranks that have tokens, the first ones by (node, position).
    pub present: usize,
    /// Experts of each of these ranks: first, and how many.
    pub experts: Vec<(u32, u32)>,
    /// `N`, and which of them this rank's is.
    pub nodes: usize,
    pub node: usize,
}

/// `rows` [N P T, D]: each position's own are there; those of tokens that need this rank come.
#[derive(Clone, Debug)]
pub struct GatherRows<'a> {
    pub need: &'a Need,
    pub rows: Buffer,
    /// What they travel as; none: as they are. The own ones become what it stands for, too, so that
    /// no rank reads other numbers than the others.
    pub format: Option<WireFormat>,
    /// f32 [N P T, K]: they come, and the ids, as far as they are not the own; none: both are here
    pub weights: Option<Buffer>,
    /// The same on every rank.
    pub blocks: usize,
    /// For the record of a failure.
    pub step: u32,
}

/// `rows` [N P T, D] and `slots` f32 [N P T, K]: what this rank adds to each token. The own ones
/// become sums, in fp32 and in the order of positions; the others keep what they were.
#[derive(Clone, Debug)]
pub struct ScatterRows<'a> {
    pub need: &'a Need,
    pub rows: Buffer,
    pub slots: Option<Buffer>,
    /// On one node, [T, D] each: the second becomes the first plus the sums, which are rounded
    /// before. The own rows then say nothing.
    pub onto: Option<[Buffer; 2]>,
    /// The same on every rank.
    pub blocks: usize,
    /// For the record of a failure.
    pub step: u32,
}
