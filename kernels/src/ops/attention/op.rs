//! Causal grouped-query attention, with softmax statistics kept instead of probabilities (Dao et
//! al. 2022).

use moejob_protocol::kernel_sizes::AttentionSizes;

use crate::buffer::{Buffer, DType};
use crate::error::{Refusal, all_taken, range};

/// Per sequence, head n (which shares key and value head n / (N / KV)) and query i:
/// s[j] = scale * <q[i], k[j]> for max(starts[i], i + 1 - window) <= j <= i; lse = ln sum_j e^s[j];
/// o[i] = sum_j e^s[j] v[j] / sum_j e^s[j], j ascending as in a product.
///
/// On a GPU q, k, v and o are bf16, fp16 or fp32 and lse is fp32; sums are fp32, in tiles, and
/// weights e^(s - max) are rounded to the kind of v.
#[derive(Clone, Copy, Debug)]
pub struct Attention {
    /// Sequences; T = batch * seq.
    pub batch: usize,
    pub seq: usize,
    /// N, a multiple of `kv_heads`
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f64,
    /// [T, N * H]
    pub q: Buffer,
    /// [T, KV * H]
    pub k: Buffer,
    /// [T, KV * H]
    pub v: Buffer,
    /// u32 [T]: the first position in its sequence that a token attends to, at most its own; None:
    /// 0. Keeps documents in one sequence apart. On a GPU they may not fall within a sequence.
    pub starts: Option<Buffer>,
    /// Keys that a query sees at most, its own included; None: all
    pub window: Option<usize>,
    /// Whether a GPU's backward gives the same bits every time; otherwise dq is added up in no
    /// fixed order, which is faster. A CPU's always are the same.
    pub deterministic: bool,
    /// u8, what [`Device::attention_plan`] says, free between calls; a CPU needs none.
    pub workspace: Option<Buffer>,
    /// Output [T, N * H]
    pub o: Buffer,
    /// Output [T, N], kept for backward
    pub lse: Buffer,
}

/// With p[i, j] = e^(s[i, j] - lse[i]), delta[i] = <do[i], o[i]>:
/// ds[i, j] = p[i, j] * (<do[i], v[j]> - delta[i]) * scale, zero where i attends to one key alone;
/// dq[i] = sum_j ds[i, j] k[j]; dk[j] = sum ds[i, j] q[i]; dv[j] = sum p[i, j] do[i].
/// The last two sum over query blocks of 128 ascending, the heads that share a key within each.
#[derive(Clone, Copy, Debug)]
pub struct AttentionBackward {
    /// What was computed; its outputs are inputs here.
    pub forward: Attention,
    /// [T, N * H]
    pub d_o: Buffer,
    /// Output [T, N * H]
    pub dq: Buffer,
    /// Output [T, KV * H]
    pub dk: Buffer,
    /// Output [T, KV * H]
    pub dv: Buffer,
}

/// [`Attention`] of tokens that come after others whose keys and values are kept: one sequence, of
/// which `past` tokens are known and `queries` are new. The new keys and values are kept, too. Each
/// output of processors has the bits that attention over the whole sequence gives it; GPUs add up
/// parts of 256 keys each.
#[derive(Clone, Copy, Debug)]
pub struct CachedAttention {
    pub queries: usize,
    pub past: usize,
    /// Tokens that are kept at most, no fewer than `past + queries`.
    pub capacity: usize,
    /// N, a multiple of `kv_heads`
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f64,
    /// [queries, N * H]
    pub q: Buffer,
    /// [queries, KV * H]
    pub k: Buffer,
    /// [queries, KV * H]
    pub v: Buffer,
    /// In and out [KV * H, capacity]: an element of all keys side by side
    pub keys: Buffer,
    /// In and out [capacity, KV * H]
    pub values: Buffer,
    /// Output [queries, N * H]
    pub o: Buffer,
}

/// All that the kernels of an attention depend on ([`crate::Attention`]).
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct AttentionDesc {
    /// Of q, k, v, o and their gradients: bf16, fp16, or fp32 for checks. Sums, lse and softmax
    /// are fp32
    pub element: DType,
    pub batch: usize,
    pub seq: usize,
    pub heads: usize,
    pub kv_heads: usize,
    pub head_dim: usize,
    pub scale: f32,
    /// Whether queries have `starts`
    pub documents: bool,
    pub window: Option<usize>,
    pub deterministic: bool,
}

impl AttentionDesc {
    pub const HEAD_DIM_MAX: usize = 256;

    /// The shape of `op`.
    pub fn of(op: &Attention) -> AttentionDesc {
        AttentionDesc {
            element: op.q.dtype(),
            batch: op.batch,
            seq: op.seq,
            heads: op.heads,
            kv_heads: op.kv_heads,
            head_dim: op.head_dim,
            scale: op.scale as f32,
            documents: op.starts.is_some(),
            window: op.window,
            deterministic: op.deterministic,
        }
    }

    /// Useful floating-point operations of causal attention to all keys, forward and backward, what
    /// backward computes again left out.
    pub fn flops(&self) -> (f64, f64) {
        let pairs = (self.seq * self.seq) as f64 / 2.0;
        let forward = 4.0 * pairs * (self.batch * self.heads * self.head_dim) as f64;
        (forward, 2.5 * forward)
    }

    pub fn check(&self) -> Result<(), Refusal> {
        if !matches!(self.element, DType::Bf16 | DType::F16 | DType::F32) {
            let devices = "attention on a GPU is in bf16, fp16 or fp32";
            return Err(Refusal::Element { found: self.element, devices });
        }
        range("batch", self.batch, 1, usize::MAX)?;
        range("seq", self.seq, 1, 1 << 24)?;
        range("heads", self.heads, 1, 1 << 12)?;
        range("kv_heads", self.kv_heads, 1, self.heads)?;
        range("head_dim", self.head_dim, 8, Self::HEAD_DIM_MAX)?;
        range("window", self.window.unwrap_or(1), 1, 1 << 30)?;
        for (name, found, multiple) in
            [("head_dim", self.head_dim, 8), ("heads", self.heads, self.kv_heads)]
        {
            if !found.is_multiple_of(multiple) {
                return Err(Refusal::Unaligned { name, found, multiple });
            }
        }
        let sizes = AttentionSizes {
            sequences: self.batch as u64,
            sequence_length: self.seq as u64,
            heads: self.heads as u64,
        };
        all_taken(sizes.refused())
    }

    pub(crate) fn tokens(&self) -> usize {
        self.batch * self.seq
    }
}
