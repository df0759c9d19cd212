//! Floating-point operations of training one token, by the usual convention.
//!
//! ```text
//! 6 * (parameters a token uses, without the embedding table)      forward 2, backward 4 each
//! + 12 * layers * N * H * S / 2                                   scores and their sums, causal
//! ```
//! The head counts even where it is the embedding table, because a product is computed with it;
//! looking rows up is free. Recomputation, the router's choice, norms and the optimizer are not
//! counted: what is told by this is the model's rate, which other programs give too (Chowdhery et
//! al. 2022, appendix B, there without the half for the causal mask).

use crate::model::ModelConfig;

/// Operations of a parameter and token: a multiplication and an addition, forward once and
/// backward twice.
const OF_PARAMETER: u64 = 6;

/// Backward is twice forward.
const PASSES: u64 = 3;

impl ModelConfig {
    /// Parameters that multiply one token's row: all that are active but the table that is only
    /// looked up.
    pub fn multiplied_numel(&self) -> u64 {
        let table = u64::from(self.vocab_size) * u64::from(self.hidden_size);
        let looked_up = if self.tie_word_embeddings { 0 } else { table };
        self.active_numel() - looked_up
    }

    /// Operations of a token in a text of `sequence` tokens, forward and backward.
    pub fn flops_per_token(&self, sequence: u64) -> u64 {
        let width = u64::from(self.q_size());
        // Half of S positions are seen on average, by two products of 2 operations.
        let attention = u64::from(self.num_hidden_layers) * PASSES * 4 * width * sequence / 2;
        OF_PARAMETER * self.multiplied_numel() + attention
    }
}

/// The dense bf16 rate of a device by its maker's data sheet, FLOP/s; none where it is not known
/// here. The names are those that the driver tells.
pub fn bf16_ceiling(device: &str) -> Option<f64> {
    const TERA: f64 = 1e12;
    // The PCIe and NVL forms are slower; the longer names come first.
    const RATES: [(&str, f64); 9] = [
        ("H100 PCIe", 756.0),
        ("H100 NVL", 835.0),
        ("H200 NVL", 835.0),
        ("GH200", 989.0),
        ("H200", 989.0),
        ("H100", 989.0),
        ("B200", 2250.0),
        ("A100", 312.0),
        ("A10", 125.0),
    ];
    let found = RATES.iter().find(|(name, _)| device.contains(name));
    found.map(|(_, rate)| rate * TERA)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_known_device_has_the_rate_of_its_data_sheet() {
        assert_eq!(bf16_ceiling("NVIDIA H200"), Some(989e12));
        assert_eq!(bf16_ceiling("NVIDIA H100 80GB HBM3"), Some(989e12));
        assert_eq!(bf16_ceiling("NVIDIA H100 PCIe"), Some(756e12));
        assert_eq!(bf16_ceiling("NVIDIA A100-SXM4-80GB"), Some(312e12));
        assert_eq!(bf16_ceiling("Some GPU"), None);
    }
}
