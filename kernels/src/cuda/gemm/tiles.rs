//! Which tiles a product takes: a function of its shape, by rule or from a searched table.

use crate::buffer::DType;
use crate::cuda::arch::Arch;
use crate::cuda::gemm::{GemmConfig, ProductOp};
use crate::types::Output;

/// Lines of `PRODUCT COLS DEPTH gated|plain TILE`, written by `cuda_layer --search FILE`.
const TABLE: &str = include_str!("tiles.txt");

/// The table's names, in the order of `ProductOp`.
const NAMES: [&str; 6] = ["up", "rows", "dx", "dh", "dw", "logits"];

impl GemmConfig {
    /// The tiles for `op` with `cols` columns and a reduction of `depth` (of weight gradients: the
    /// mean of an expert's rows), `gated` if H has both: from the table of tiles.txt, else by rule.
    ///
    /// Measured on an H200 under load (docs/benchmarks): ping-pong hides the epilogue and wins for
    /// products over rows, 128 x 192 unless 128 x 128 computes clearly fewer columns past the end.
    /// Very long reductions read less from memory in 128 x 256. Weight gradients take 128 x 192
    /// ping-pong, each CTA for itself, where it computes nothing for nothing or where sums are
    /// short, else 128 x 256; a cluster helps them by 2% up to a few thousand columns and costs as
    /// much beyond.
    pub fn choose(
        arch: Arch,
        op: ProductOp,
        (cols, depth): (usize, usize),
        gated: bool,
    ) -> GemmConfig {
        let wide = GemmConfig {
            arch,
            op,
            element: DType::Bf16,
            block_n: 256,
            stages: 4,
            cluster: 2,
            pingpong: false,
            staged: 0,
            gated: false,
            activation: 0,
            transposed: false,
            indexed: true,
            output: Output::Element,
        };
        let pingpong = GemmConfig { block_n: 192, stages: 5, pingpong: true, ..wide };
        let pingpong_128 = GemmConfig { block_n: 128, stages: 6, ..pingpong };
        let narrow = |block_n| GemmConfig { block_n, stages: 6, cluster: 1, ..wide };
        if let Arch::Plain(_) = arch {
            // <da', a> comes in a part a column.
            return GemmConfig { block_n: 1, stages: 1, cluster: 1, ..wide };
        }
        if let Arch::Ampere(_) = arch {
            return GemmConfig { block_n: 64, stages: 3, cluster: 1, ..wide };
        }
        if let Some(tile) = searched(op, (cols, depth), gated) {
            return wide.with_tile(tile).unwrap_or(wide);
        }
        match op {
            // Two columns of B for each of the output's.
            ProductOp::Logits if cols <= 32 => narrow(64),
            ProductOp::Logits if cols <= 64 => narrow(128),
            ProductOp::Logits => wide,
            ProductOp::WeightGradient if cols <= 128 => narrow(128),
            ProductOp::WeightGradient if cols > 512 && hidden_epilogue_pays(cols, depth) => {
                GemmConfig { cluster: 1, staged: 1, ..pingpong }
            }
            ProductOp::WeightGradient => {
                GemmConfig { cluster: if cols > 8192 { 1 } else { 2 }, staged: 2, ..wide }
            }
            ProductOp::Rows | ProductOp::InputGradient if depth > 8192 => wide,
            ProductOp::Rows | ProductOp::InputGradient if wasted_by_192(cols) > 0.03 => {
                pingpong_128
            }
            ProductOp::Up | ProductOp::Rows | ProductOp::InputGradient => pingpong,
            // The epilogue of a gated one takes most of what 192 columns leave of the registers.
            ProductOp::HiddenGradient if gated && wasted_by_192(cols) <= 0.01 => {
                GemmConfig { stages: 4, staged: 2, ..pingpong }
            }
            ProductOp::HiddenGradient if !gated && wasted_by_192(cols) <= 0.04 => {
                GemmConfig { staged: 1, ..pingpong }
            }
            ProductOp::HiddenGradient => GemmConfig { staged: 1, ..pingpong_128 },
        }
    }

    /// Columns, stages, cluster; `p` ping-pong; `s` and the number of buffers.
    pub fn tile(&self) -> String {
        let GemmConfig { block_n, stages, cluster, pingpong, staged, .. } = self;
        let p = if *pingpong { ",p" } else { "" };
        format!("{block_n},{stages},{cluster}{p},s{staged}")
    }

    /// The same product in the tile that [`GemmConfig::tile`] wrote; None for other text.
    pub fn with_tile(self, tile: &str) -> Option<GemmConfig> {
        let parts: Vec<&str> = tile.split(',').collect();
        let [block_n, stages, cluster, ..] = parts[..] else { return None };
        let mut config = GemmConfig {
            block_n: block_n.parse().ok()?,
            stages: stages.parse().ok()?,
            cluster: cluster.parse().ok()?,
            pingpong: false,
            staged: 0,
            ..self
        };
        for part in &parts[3..] {
            match (*part, part.strip_prefix('s')) {
                ("p", _) => config.pingpong = true,
                (_, Some(staged)) => config.staged = staged.parse().ok()?,
                _ => return None,
            }
        }
        Some(config)
    }

    /// A line of the table, for this configuration at `cols` and `depth`.
    pub fn table_line(&self, (cols, depth): (usize, usize), gated: bool) -> String {
        let kind = if gated { "gated" } else { "plain" };
        format!("{} {cols} {depth} {kind} {}", NAMES[self.op as usize], self.tile())
    }
}

/// The tile that the table has for this very shape.
fn searched(op: ProductOp, size: (usize, usize), gated: bool) -> Option<&'static str> {
    let kind = if gated { "gated" } else { "plain" };
    let key = format!("{} {} {} {kind} ", NAMES[op as usize], size.0, size.1);
    TABLE.lines().find_map(|line| line.strip_prefix(key.as_str()))
}

/// Whether a weight gradient gains more by 128 x 192 ping-pong, which hides its epilogue, than it
/// loses by columns past the end. With sums of 512 to 1234 rows it gained 1.0 to 2.8% of the layer
/// at a loss of up to 5% of the columns of 128 x 256; with 2048 rows and a loss of 3% nothing.
fn hidden_epilogue_pays(cols: usize, depth: usize) -> bool {
    let over_256 = cols.next_multiple_of(192) as f64 / cols.next_multiple_of(256) as f64 - 1.0;
    wasted_by_192(cols) <= 0.02 || (depth <= 1280 && over_256 <= 0.05)
}

/// The part of `cols` that tiles of 192 columns compute past the end and tiles of 128 do not.
fn wasted_by_192(cols: usize) -> f64 {
    let (narrow, wide) = (cols.next_multiple_of(128), cols.next_multiple_of(192));
    wide as f64 / narrow as f64 - 1.0
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_line_of_the_table_is_a_tile() {
        let lines = TABLE.lines().filter(|line| !line.starts_with('#'));
        for line in lines {
            let words: Vec<&str> = line.split(' ').collect();
            let [name, cols, depth, kind, tile] = words[..] else { panic!("{line}") };
            assert!(NAMES.contains(&name) && ["gated", "plain"].contains(&kind), "{line}");
            assert!(cols.parse::<usize>().is_ok() && depth.parse::<usize>().is_ok(), "{line}");
            let base = GemmConfig::choose(Arch::Hopper, ProductOp::Up, (64, 64), true);
            let config = base.with_tile(tile).expect(line);
            assert_eq!(config.tile(), tile, "{line}");
        }
    }

    #[test]
    fn a_tile_survives_its_text() {
        let base = GemmConfig::choose(Arch::Hopper, ProductOp::HiddenGradient, (768, 2048), true);
        assert_eq!(base.with_tile(&base.tile()), Some(base));
        for wrong in ["", "192,5", "192,5,2,x", "192,five,2", "192,5,2,s"] {
            assert_eq!(base.with_tile(wrong), None, "{wrong}");
        }
    }
}
