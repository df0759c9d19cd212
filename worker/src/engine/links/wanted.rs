//! Whether tokens of an expert group are to travel through windows, and by how many blocks.

use moejob_protocol::config::TrainingConfig;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::{Shape, window_bytes};
use moejob_protocol::model::ModelConfig;

/// How tokens of an expert group on one node travel, for measurements: `off` by NCCL; or how many
/// blocks move them through windows, `16`. Without it, or with `on` or `auto`, by as many as are
/// fastest.
pub const ENV_PEER: &str = "MOEJOB_PEER";

/// 8 blocks fill a link; more copy faster within the GPU. With what travels beside the ops, fewer
/// than any GPU has multiprocessors.
const BLOCKS_MAX: usize = 64;
/// A block has at least so many bytes of a rank's rows.
const BYTES_A_BLOCK: usize = 64 << 10;

/// What [`ENV_PEER`] says.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub enum Use {
    #[default]
    Auto,
    Off,
    On {
        /// At most.
        blocks: usize,
    },
}

impl Use {
    pub fn parse(said: Option<&str>) -> Use {
        match said.map(str::trim) {
            None | Some("" | "auto") => Use::Auto,
            Some("off") => Use::Off,
            Some("on") => Use::On { blocks: BLOCKS_MAX },
            Some(said) => match said.parse() {
                Ok(blocks @ 1..=BLOCKS_MAX) => Use::On { blocks },
                _ => {
                    tracing::warn!(
                        "{ENV_PEER}={said} is not `on`, `off`, `auto` or 1 to {BLOCKS_MAX}: ignored"
                    );
                    Use::Auto
                }
            },
        }
    }

    /// What the environment says.
    pub fn said() -> Use {
        Use::parse(std::env::var(ENV_PEER).ok().as_deref())
    }

    /// With how many blocks windows are measured: those that are asked for, else those of `on`.
    pub(crate) fn blocks_measured(self) -> usize {
        self.blocks().unwrap_or(BLOCKS_MAX)
    }

    /// Windows are wanted, with so many blocks at most.
    pub fn blocks(self) -> Option<usize> {
        match self {
            Use::On { blocks } => Some(blocks),
            // Faster than NCCL at every size of a step's tokens that was measured.
            Use::Auto => Some(BLOCKS_MAX),
            Use::Off => None,
        }
    }
}

/// Blocks that move so many bytes of a rank through windows.
pub(crate) fn blocks_for(bytes: usize, most: usize) -> usize {
    bytes.div_ceil(BYTES_A_BLOCK).clamp(1, most)
}

/// What a GPU takes for a window, if the environment lets it have one.
pub(crate) fn window_wanted(
    model: &ModelConfig,
    layout: &Layout,
    training: &TrainingConfig,
    shape: &Shape,
) -> u64 {
    match Use::said().blocks() {
        Some(_) if !shape.by_need() => window_bytes(model, layout, training, shape.rails),
        _ => 0,
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_for_all_but_who_asks_for_none() {
        for said in [None, Some(""), Some("auto"), Some("yes"), Some("0"), Some("65")] {
            assert_eq!(Use::parse(said), Use::Auto, "{said:?}");
            assert_eq!(Use::parse(said).blocks(), Some(BLOCKS_MAX), "{said:?}");
        }
        assert_eq!(Use::parse(Some("off")).blocks(), None);
        assert_eq!(Use::parse(Some("on")).blocks(), Some(BLOCKS_MAX));
        assert_eq!(Use::parse(Some(" 16 ")).blocks(), Some(16));
    }
}
