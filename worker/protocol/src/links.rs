//! What the NCCL of one rank says it has built, for the leader to hold against its plan.
//!
//! ```text
//! engine: NCCL's log, read once after the communicators are made --> Up::Built(Built), a rank each
//! ```
//! It is told for people alone: the job trains on, whatever it says.

use serde::{Deserialize, Serialize};
use std::collections::BTreeSet;

/// Neighbours that are told of one rank. NCCL has at most as many channels.
pub const NEIGHBOURS_MAX: usize = 64;

/// Of the communicator of all ranks.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Built {
    pub rank: u32,
    /// NCCL's, such as `2.28.9`.
    pub version: String,
    /// The ranks before and behind it, over all channels.
    pub rings: BTreeSet<(u32, u32)>,
    /// The ranks above it in a tree, over all channels.
    pub parents: BTreeSet<u32>,
    /// Bytes between nodes go by TCP.
    pub sockets: bool,
    /// Why nothing is known; empty where something is.
    pub unknown: String,
}

impl Built {
    /// A worker may say anything: what no NCCL has is cut off.
    pub fn bound(&mut self) {
        while self.rings.len() > NEIGHBOURS_MAX {
            self.rings.pop_last();
        }
        while self.parents.len() > NEIGHBOURS_MAX {
            self.parents.pop_last();
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Up;

    #[test]
    fn what_was_built_is_what_the_page_on_the_wire_shows() {
        let built = Built {
            rank: 8,
            version: "2.28.9".to_string(),
            rings: BTreeSet::from([(7, 9)]),
            parents: BTreeSet::from([0]),
            ..Built::default()
        };
        let up = Up::Built(built);
        let text = serde_json::to_string(&up).expect("JSON");
        let shown = r#"{"built":{"rank":8,"version":"2.28.9","rings":[[7,9]],"parents":[0],"#;
        assert!(text.starts_with(shown), "{text}");
        assert_eq!(serde_json::from_str::<Up>(&text).expect("the same"), up);
    }

    #[test]
    fn what_no_nccl_has_is_cut_off() {
        let mut built = Built { parents: (0..1_000).collect(), ..Built::default() };
        built.rings = (0..1_000).map(|rank| (rank, rank)).collect();
        built.bound();
        assert_eq!((built.rings.len(), built.parents.len()), (NEIGHBOURS_MAX, NEIGHBOURS_MAX));
    }
}
