//! The memory that attention, the mixture layer and the head use in turn.
//!
//! ```text
//! head        f64 [T] losses | logits of a chunk of tokens
//! attention   backward alone: what it adds up in fp32, statistics of rows
//! mixture     forward: A [R, F], Y; backward: s * A [R, F], then dX rows [R, D]
//! ```
//! A head's is exact, since `moejob_kernels` lays it out by the same rules. Those of a GPU's
//! attention and mixture layers are what their kernels take, rounded up: the device says the exact
//! number when it has made them, and that is what a worker reserves.

use crate::config::TrainingConfig;
use crate::memory::Types;
use crate::model::ModelConfig;

/// Tokens of a head's chunk are a multiple of this.
const CHUNK_STEP: u64 = 256;
/// Where buffers start.
const ALIGNMENT: u64 = 256;

/// Bytes of the workspace of a rank with `tokens` of a micro-batch, whose experts compute `rows`.
pub fn bytes(
    model: &ModelConfig,
    [tokens, rows]: [u64; 2],
    training: &TrainingConfig,
    types: &Types,
) -> u64 {
    let gpu = training.compute.backend == crate::config::Backend::Cuda;
    let head = head_bytes(tokens, model.vocab_size.into(), types.element.bytes(), gpu);
    head.max(attention(model, tokens)).max(mixture(model, rows, types))
}

/// Bytes of a head's scratch, as `HeadDesc::plan` of the kernels has it.
pub fn head_bytes(tokens: u64, vocab: u64, element: u64, gpu: bool) -> u64 {
    let (most, alignment) = if gpu { (512 << 20, 16 / element) } else { (64 << 20, 1) };
    let row = vocab.next_multiple_of(alignment) * element;
    let losses = (tokens * 8).next_multiple_of(ALIGNMENT);
    let fits = u64::saturating_sub(most, losses) / row / CHUNK_STEP * CHUNK_STEP;
    let chunks = tokens.div_ceil(fits.max(CHUNK_STEP)).max(1);
    let chunk = tokens.div_ceil(chunks).next_multiple_of(CHUNK_STEP).min(tokens);
    losses + (chunk * row).next_multiple_of(ALIGNMENT)
}

/// Dq in fp32 and two statistics a row and head.
fn attention(model: &ModelConfig, tokens: u64) -> u64 {
    let rows = tokens.next_multiple_of(128);
    rows * u64::from(model.q_size()) * 4 + rows * u64::from(model.num_attention_heads) * 8 + 65536
}

fn mixture(model: &ModelConfig, rows: u64, types: &Types) -> u64 {
    let experts = &model.experts;
    let (count, dim) = (u64::from(experts.count), u64::from(model.hidden_size));
    let slices = model.slices();
    let tokens = rows.div_ceil(u64::from(slices.slots).max(1));
    let row = u64::from(slices.width).max(dim) + dim;
    let of_token = count.next_multiple_of(8) + 16 * u64::from(slices.slots);
    let tables = tokens.saturating_mul(of_token);
    // Partial gradients of the router, in at most 66 parts.
    let partial = 66 * count * dim * 4;
    let bytes = rows.saturating_mul(row * types.element.bytes());
    bytes.saturating_add(tables.saturating_mul(4)).saturating_add(partial)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_head_takes_what_its_chunks_take() {
        assert_eq!(head_bytes(16384, 50304, 2, true), 16384 * 8 + 4096 * 50304 * 2);
        assert_eq!(head_bytes(100, 50257, 2, true), 1024 + 10_052_864);
        assert_eq!(head_bytes(256, 256, 4, false), 2048 + 256 * 256 * 4);
    }
}
