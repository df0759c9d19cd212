//! The words that descriptions of ops have in common.

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

/// The function between the two products of an expert.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Activation {
    /// x * sigmoid(x)
    Silu,
    /// max(x, 0); its derivative at 0 is 0
    Relu,
    /// x * sigmoid(2 sqrt(2 / pi) (x + 0.044715 x^3)), which is the tanh form of x * Phi(x)
    /// (Hendrycks and Gimpel 2016; `gelu_pytorch_tanh` of Hugging Face)
    Gelu,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum MoeActivation {
    Silu = 0,
    Relu = 1,
    /// x * Phi(x), the exact one; not on a CPU
    Gelu = 2,
    /// The tanh form of it: `Activation::Gelu` of the CPU's ops
    GeluTanh = 3,
}

/// How logits become scores.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Scoring {
    /// probs = softmax(logits) over the experts (Mixtral, Qwen3-MoE, OLMoE).
    Softmax,
    /// probs = sigmoid(logits) (DeepSeek-V3).
    Sigmoid,
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
