//! What a job says about itself: the status of its object, written by the operator alone.

use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// What the operator last saw of the job. Written by the operator alone.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq)]
#[serde(rename_all = "camelCase", default)]
pub struct MoeJobStatus {
    /// The generation of the spec that this speaks of.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub observed_generation: Option<i64>,
    /// One word: Invalid, Pending, Starting, Running, Recovering, Stopping, Suspended, Complete or
    /// Failed.
    pub phase: String,
    /// Planned, Running, Degraded, Complete, Failed and Suspended, each with a reason; where nodes
    /// are measured also PreflightPassed, and where several GPUs train RingsVerified.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub conditions: Vec<Condition>,
    /// The newest incarnation of the gang; 0 before the first.
    pub attempt: u32,
    /// Nodes of the gang, wanted and present.
    pub nodes: NodesStatus,
    /// Degrees of parallelism of the gang.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub mesh: Option<MeshStatus>,
    /// Steps done.
    pub step: u64,
    /// Steps in all.
    pub steps: u64,
    /// Cross-entropy of the newest step, nats a token.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub loss: Option<f64>,
    /// Tokens a second of the newest step.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub tokens_per_second: Option<f64>,
    /// The newest checkpoint.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub checkpoint: Option<CheckpointStatus>,
    /// Where the experts are.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub placement: Option<PlacementStatus>,
    /// Unplanned losses within the window.
    pub restarts: u32,
    /// The last recoveries, newest last.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub recoveries: Vec<RecoveryStatus>,
    /// The engines that were lost last, newest last; at most 8. Where all ranks are, metrics and
    /// `kubectl moe show --ranks` tell.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub engines_lost: Vec<EngineLossStatus>,
    /// What the next operator goes on from; not for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub record: String,
    /// The same, in a form that operators may not know; not for people.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub record_more: String,
}

/// A condition as all Kubernetes objects write it.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase")]
pub struct Condition {
    /// What it is about.
    #[serde(rename = "type")]
    pub type_: String,
    /// True, False or Unknown.
    pub status: String,
    /// One stable word in CamelCase.
    pub reason: String,
    /// For a person.
    pub message: String,
    /// When the status changed last, RFC 3339; filled in by whoever writes it.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub last_transition_time: Option<String>,
}

/// Nodes of the gang.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct NodesStatus {
    /// Nodes whose workers have a rank.
    pub ready: u32,
    /// Nodes that the job would use.
    pub desired: u32,
    /// Workers that are connected without a rank.
    pub spares: u32,
    /// `3/4`.
    pub summary: String,
}

/// Degrees of parallelism.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct MeshStatus {
    /// Ranks in all.
    pub world: u32,
    /// Ranks that share the batch.
    pub dp: u32,
    /// Ranks that share the experts.
    pub ep: u32,
    /// Ranks that share each matrix.
    pub tp: u32,
    /// Ranks that share the layers.
    pub pp: u32,
}

/// A checkpoint.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct CheckpointStatus {
    /// Steps done in it.
    pub step: u64,
    /// Its directory.
    pub name: String,
}

/// Where the experts are.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct PlacementStatus {
    /// `64 over 8 ranks, 2 replicas`.
    pub summary: String,
    /// The node of each worker in the order of their ranks; runs are written as node-0..7.
    pub ranks: Vec<String>,
    /// What that order of ranks costs the network; absent where all nodes hang on one leaf.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub fabric: Option<FabricStatus>,
}

/// What the order of the ranks costs the network: links of NCCL between leaves.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct FabricStatus {
    /// All of it for a person.
    pub summary: String,
    /// Leaf switches that the gang's nodes hang on.
    pub leaves: u32,
    /// Links of the ring from leaf to leaf.
    pub ring_crossings: u32,
    /// Links of each tree from leaf to leaf.
    pub tree_crossings: Vec<u32>,
    /// Links of the ring and of both trees in the best order of as many nodes that the job has.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub least_crossings: Option<u32>,
    /// Links from leaf to leaf beyond those: members keep their places after a loss, and get the
    /// best order again when the gang grows.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub price: Option<u32>,
}

/// How long a loss took to mend; milliseconds since it was noticed.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct RecoveryStatus {
    /// What happened.
    pub cause: String,
    /// The attempt that it ended.
    pub attempt: u32,
    /// Until the next attempt was decided.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub replanned_millis: Option<u64>,
    /// Until all its ranks had found each other.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub rejoined_millis: Option<u64>,
    /// Until its first step was done.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub first_step_millis: Option<u64>,
    /// Steps that were done again.
    pub steps_lost: u64,
}

/// An engine that was lost.
#[derive(Serialize, Deserialize, JsonSchema, Clone, Debug, Default, PartialEq, Eq)]
#[serde(rename_all = "camelCase", default)]
pub struct EngineLossStatus {
    /// The rank that it computed.
    pub rank: u32,
    /// Its node.
    pub node: String,
    /// The number of its device on that node.
    pub device: u64,
    /// The uuid of its GPU; absent on processors.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uuid: String,
    /// The attempt that it took part in.
    pub attempt: u32,
    /// How it ended, and what it said last.
    pub cause: String,
    /// When that was told, RFC 3339.
    pub time: String,
}
