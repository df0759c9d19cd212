//! Where an engine runs and where its memory lies, for the leader's condition.
//!
//! It is told for people alone: the job trains on, whatever it says.

use serde::{Deserialize, Serialize};

/// Differences that are told of one engine.
pub const DIFFERENCES_MAX: usize = 4;

/// What the worker has read of one of its engines.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Seated {
    pub rank: u32,
    /// What is otherwise than planned, a sentence each.
    pub differences: Vec<String>,
    /// Why it is not bound, or what could not be read; empty where all is known.
    pub unknown: String,
}

impl Seated {
    /// A worker may say anything: what is not shown is cut off.
    pub fn bound(&mut self) {
        self.differences.truncate(DIFFERENCES_MAX);
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::message::Up;

    #[test]
    fn what_is_told_is_what_the_page_on_the_wire_shows() {
        let up = Up::Seated(Seated { rank: 3, ..Seated::default() });
        let text = serde_json::to_string(&up).expect("JSON");
        assert_eq!(text, r#"{"seated":{"rank":3,"differences":[],"unknown":""}}"#);
        assert_eq!(serde_json::from_str::<Up>(&text).expect("the same"), up);
    }
}
