//! How long a loss took to mend.

use crate::observed::Millis;
use serde::{Deserialize, Serialize};
use std::time::Duration;

/// From the moment that a loss is noticed to the first step after it.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Recovery {
    pub cause: String,
    /// The attempt that the loss ended.
    pub attempt: u32,
    pub detected_at: Millis,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub replanned_at: Option<Millis>,
    /// All ranks of the next attempt have found each other.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub rejoined_at: Option<Millis>,
    /// First completed step of the next attempt.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub first_step_at: Option<Millis>,
    /// Steps that had been done and were done again.
    pub steps_lost: u64,
}

impl Recovery {
    /// From the loss to that phase of its mending.
    pub fn took(&self, phase: Option<Millis>) -> Duration {
        Duration::from_millis(phase.unwrap_or_default().saturating_sub(self.detected_at))
    }
}
