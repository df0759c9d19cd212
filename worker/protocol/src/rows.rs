//! How many rows a rank has of the tokens that its expert group routes.

use crate::layout::Layout;
use crate::model::ModelConfig;

/// Rows that a rank computes at most, and with even routing.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RowCounts {
    pub routed: u64,
    pub arrived: u64,
}

/// Routed and arriving rows of one round, with even routing and at most.
pub fn row_counts(
    model: &ModelConfig,
    layout: &Layout,
    rank: u32,
    tokens: u64,
) -> (RowCounts, RowCounts) {
    let slices = model.slices();
    let (top_k, slots) = (u64::from(slices.per_token), u64::from(slices.slots));
    let count = u64::from(slices.count).max(1);
    let sources = u64::from(layout.mesh.ep);
    let moe_layers = (0..model.num_hidden_layers).filter(|layer| model.is_moe_layer(*layer));
    let held = moe_layers.map(|layer| {
        let held = layout.experts(model, layer, rank);
        let experts = held.chunk_by(|a, b| a / slices.each == b / slices.each).count();
        (held.len() as u64, experts as u64)
    });
    // Slices here, and the experts that they are of.
    let (held, of) = held.max().unwrap_or((0, 0));
    let all = sources * tokens;
    let arriving = arriving(model, of as f64);
    let balanced = RowCounts {
        routed: (all * top_k * held).div_ceil(count),
        arrived: (all as f64 * arriving).ceil() as u64,
    };
    let arrived = if held > 0 { all } else { 0 };
    let worst = RowCounts { routed: all * slots.min(held), arrived };
    (balanced, worst)
}

/// The share of tokens that choose some of `held` experts, with even routing. A token misses them
/// when all its K distinct experts are others.
pub fn arriving(model: &ModelConfig, held: f64) -> f64 {
    let experts = f64::from(model.experts.count.max(1));
    let missed = (0..model.experts.per_token).map(f64::from);
    let missed = missed.map(|k| (experts - held - k).max(0.0) / (experts - k).max(1.0));
    1.0 - missed.product::<f64>()
}
