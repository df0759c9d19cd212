//! The words that descriptions of ops have in common.

pub use moejob_protocol::model::{Activation, BalanceLoss, Scoring};

/// How the operands of C [m, n] = A B lie in memory: N as written, T transposed.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Layout {
    /// A [m, k], B [n, k]: y = x W^T, forward.
    Nt,
    /// A [m, k], B [k, n]: dx = dy W.
    Nn,
    /// A [k, m], B [k, n]: dW = dy^T x.
    Tn,
}

/// What a weight gradient is stored as.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Output {
    /// As the layer's elements.
    Element = 0,
    F32 = 1,
    /// Sums of products that are rounded to elements, each of the tokens of one rank: in fp64 of
    /// fp32, in pairs of fp64.
    Sums = 2,
}

/// Group-limited choice (DeepSeek-V3): only experts of the `kept` best groups may be chosen. A
/// group's score is the sum of its two best choice scores; ties keep the lower group.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RouteGroups {
    /// Groups of equal numbers of neighbouring experts.
    pub count: usize,
    pub kept: usize,
}

/// The id, and the row, of a slot without an expert.
pub const NO_EXPERT: u32 = u32::MAX;
