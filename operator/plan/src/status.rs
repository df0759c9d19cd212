//! What the job says about itself: conditions with stable reasons, progress, recoveries.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the operator last saw of the job. Written by the operator alone.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase")]
pub struct MoeJobStatus {
    /// One word: Pending, Starting, Running, Recovering, Suspended, Complete or Failed.
    #[serde(default)]
    pub phase: String,
}
