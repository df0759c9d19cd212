//! Whether tokens of an expert group are to travel through windows, and by how many blocks.

use moejob_protocol::config::TrainingConfig;
use moejob_protocol::layout::Layout;
use moejob_protocol::memory::window_bytes;
use moejob_protocol::model::ModelConfig;
use moejob_protocol::rails::Rails;

/// How tokens of an expert group on one node travel, for measurements: `on` through windows, `off`
/// by NCCL; or how many blocks move them through windows, `16`. Without it, or with `auto`, by
/// NCCL: how a step with windows does on two GPUs is not measured yet.
pub const ENV_PEER: &str = "MOEJOB_PEER";

/// 8 blocks fill a link; more copy faster within the GPU, and leave less for what runs beside.
const BLOCKS: usize = 32;
/// With what travels beside the ops, fewer than any GPU has multiprocessors.
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
            Some("on") => Use::On { blocks: BLOCKS },
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
        self.blocks().unwrap_or(BLOCKS)
    }

    /// Windows are wanted, with so many blocks at most.
    pub fn blocks(self) -> Option<usize> {
        match self {
            Use::On { blocks } => Some(blocks),
            // Nobody has measured from which size on a step is faster with windows.
            Use::Auto | Use::Off => None,
        }
    }
}

/// Blocks that move so many bytes of a rank through windows.
pub(crate) fn blocks_for(bytes: usize, most: usize) -> usize {
    bytes.div_ceil(BYTES_A_BLOCK).clamp(1, most)
}

/// What a GPU takes for the window that the environment asks for.
pub fn window_wanted(
    model: &ModelConfig,
    layout: &Layout,
    training: &TrainingConfig,
    rails: Option<Rails>,
) -> u64 {
    let wanted = Use::said().blocks();
    wanted.map_or(0, |_| window_bytes(model, layout, training, rails))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn windows_are_for_who_asks() {
        for said in [None, Some(""), Some("auto"), Some("yes"), Some("0"), Some("65")] {
            assert_eq!(Use::parse(said), Use::Auto, "{said:?}");
            assert_eq!(Use::parse(said).blocks(), None, "not measured on two GPUs yet");
        }
        assert_eq!(Use::parse(Some("off")).blocks(), None);
        assert_eq!(Use::parse(Some("on")).blocks(), Some(BLOCKS));
        assert_eq!(Use::parse(Some(" 16 ")).blocks(), Some(16));
    }
}
