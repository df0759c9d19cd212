//! Lines that people and tools read: `metrics.jsonl` and `events.jsonl`.

use crate::communication::CommunicationReport;
use serde::{Deserialize, Serialize};

/// One line of `metrics.jsonl`; a replayed step is a new line with a higher attempt.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct StepReport {
    /// Steps done, so the first is 1.
    pub step: u64,
    /// Cross-entropy alone, nats a token.
    pub loss: f64,
    /// Unscaled, mean over layers and micro-batches.
    pub aux_loss: f64,
    /// Unscaled.
    pub z_loss: f64,
    /// Before clipping.
    pub grad_norm: f64,
    /// What the loss of an fp16 job was multiplied by.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub loss_scale: Option<f64>,
    pub learning_rate: f64,
    /// Seen since step 0.
    pub tokens: u64,
    /// While the step lasted; what stands between two steps is in `timing`.
    pub tokens_per_second: f64,
    #[serde(flatten, default)]
    pub timing: Timing,
    pub world_size: u32,
    pub attempt: u32,
    /// Largest tokens_per_expert over the mean, worst layer.
    pub expert_imbalance: f64,
    #[serde(flatten, default)]
    pub routing: RoutingReport,
    /// Of a GPU; absent on processors.
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub device: Option<DeviceReport>,
    /// What travelled between ranks: of one step in some, see [`crate::communication`].
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub communication: Option<CommunicationReport>,
    #[serde(skip_serializing_if = "Option::is_none", default)]
    pub validation_loss: Option<f64>,
    /// RFC 3339, UTC.
    pub time: String,
}

/// Where the time since the line before went, or since training began, where rank 0 saw it.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Timing {
    /// Over all of that time.
    pub wall_tokens_per_second: f64,
    pub stalls: Stalls,
    pub phases: Phases,
}

/// The same time in seconds, by what it went to. Parts of steps are by the clock of rank 0's
/// device. What took no time is absent.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Phases {
    /// Waiting for batches, and their way to the device.
    #[serde(skip_serializing_if = "is_zero")]
    pub data: f64,
    #[serde(skip_serializing_if = "is_zero")]
    pub forward: f64,
    /// With the head and its loss, and with what is computed again.
    #[serde(skip_serializing_if = "is_zero")]
    pub backward: f64,
    /// Sums of gradients over ranks, and weights to their holders. What travels within forward and
    /// backward counts there; [`CommunicationReport::within`] tells how much that is.
    #[serde(skip_serializing_if = "is_zero")]
    pub communication: f64,
    /// Norms of gradients.
    #[serde(skip_serializing_if = "is_zero")]
    pub numbers: f64,
    #[serde(skip_serializing_if = "is_zero")]
    pub update: f64,
    #[serde(skip_serializing_if = "is_zero")]
    pub validation: f64,
    #[serde(skip_serializing_if = "is_zero")]
    pub snapshot: f64,
    #[serde(skip_serializing_if = "is_zero")]
    pub checkpoint: f64,
    /// The rest, such as agreement between ranks and records.
    #[serde(skip_serializing_if = "is_zero")]
    pub other: f64,
}

fn is_zero(seconds: &f64) -> bool {
    *seconds == 0.0
}

impl Phases {
    /// All of them, by name.
    pub fn parts(&self) -> [(&'static str, f64); 10] {
        [
            ("data", self.data),
            ("forward", self.forward),
            ("backward", self.backward),
            ("communication", self.communication),
            ("numbers", self.numbers),
            ("update", self.update),
            ("validation", self.validation),
            ("snapshot", self.snapshot),
            ("checkpoint", self.checkpoint),
            ("other", self.other),
        ]
    }
}

/// Seconds in which no step was computed, by what was done instead.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct Stalls {
    pub validation: f64,
    pub snapshot: f64,
    /// Waiting for the one before to be written, and the copy of the state.
    pub checkpoint: f64,
    /// Of the step itself: waiting for a batch that was not read ahead.
    pub data: f64,
}

/// Rank 0's GPU, as it was within a second of the step's end. What the driver does not tell is
/// absent.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct DeviceReport {
    pub name: String,
    /// As NVML writes it.
    #[serde(skip_serializing_if = "String::is_empty")]
    pub uuid: String,
    /// Of the whole job in this step, by the convention of `flops.rs`.
    pub model_flops_per_second: f64,
    /// That, over what all the job's devices could do in bf16 by their data sheet.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ceiling_share: Option<f64>,
    /// In use on the device, by whomever.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub memory_bytes: Option<u64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub watts: Option<f64>,
    #[serde(skip_serializing_if = "Option::is_none")]
    pub celsius: Option<u32>,
    /// Clock of the multiprocessors.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub megahertz: Option<u32>,
    /// Why the clock is lower than it could be, worst first.
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub slowed_by: Vec<String>,
    /// Errors of its memory that could not be corrected, since the driver was loaded.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub ecc_uncorrected: Option<u64>,
}

/// What a line says of the routing.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase", default)]
pub struct RoutingReport {
    /// Entropy of the scores, nats, mean over tokens and layers: ln E where the router knows
    /// nothing. Absent where it is not measured.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub router_entropy: Option<f64>,
    /// Share of the choices that were dropped, because the expert was full.
    pub dropped_tokens: f64,
    /// Share of the tokens, over all layers, that no expert took.
    pub unrouted_tokens: f64,
    /// Share of a token's experts, over all layers, that the token before it in the same sequence
    /// and document did not choose. Absent where it is not measured.
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub expert_switches: Option<f64>,
    /// With the validation loss: share of the held-out tokens, over all layers, whose favourite
    /// expert is another than at the validation before; absent at the first one of an attempt.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub churn: Option<f64>,
    /// `[mixture layer][expert]`: tokens that it computed in this step. On lines with a validation
    /// loss alone, where layers times experts are more than [`TOKENS_PER_EXPERT_MAX`].
    #[serde(skip_serializing_if = "Vec::is_empty")]
    pub tokens_per_expert: Vec<Vec<u64>>,
}

/// Numbers of `tokensPerExpert` that stand on every line.
pub const TOKENS_PER_EXPERT_MAX: usize = 256;
/// The most that stand on any: a line is one bounded message, too.
pub const TOKENS_PER_EXPERT_EVER: usize = 32_768;

/// One line of `events.jsonl`.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
pub struct Event {
    /// RFC 3339, UTC.
    pub time: String,
    pub attempt: u32,
    pub event: EventKind,
    /// CamelCase, stable.
    pub reason: String,
    /// For a person.
    #[serde(skip_serializing_if = "String::is_empty", default)]
    pub message: String,
    /// `rank`, `node`, `pid`, `mesh`, `step`, as the event has them.
    #[serde(flatten)]
    pub details: std::collections::BTreeMap<String, Detail>,
}

impl Event {
    /// What no detail may be called: a reader finds the field twice, and refuses the event.
    pub const FIELDS: [&str; 5] = ["time", "attempt", "event", "reason", "message"];
}

#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(untagged)]
pub enum Detail {
    Number(u64),
    Real(f64),
    Text(String),
    Mesh(crate::Mesh),
}

/// Reason of an `EngineLost` that is the device's fault and not the engine's.
pub const DEVICE_FAILED: &str = "DeviceFailed";
/// Reason of an `EngineLost` that was killed, or does not say why it ended.
pub const LOST: &str = "Lost";
/// Reason of an `EngineLost` that followed from another loss of its attempt.
pub const VICTIM: &str = "Victim";

#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash, Serialize, Deserialize)]
pub enum EventKind {
    /// The program begins, or begins again: `command`, `version`, `machine`, and the `price` of a
    /// node and hour where its profile says it.
    RunStarted,
    WorkerStarted,
    WorkerLost,
    /// An engine that is a process of its own: `rank`, `node`, `device` (its number among the
    /// worker's), `uuid` (of its GPU; empty on processors), `pid`. The reason is `Running` where a
    /// new leader is told of one that has been there.
    EngineStarted,
    /// The same, and how it ended: `exit`, `lastWords`. Its worker starts it again. The reason is
    /// [`DEVICE_FAILED`] where its device gave it up.
    EngineLost,
    AttemptStarted,
    Resumed,
    /// The storage has claims of an earlier job of this folder; `claimed` is the highest attempt.
    AttemptsClaimed,
    CheckpointCommitted,
    CheckpointRefused,
    CheckpointRemoved,
    /// Storage is slow, full, failing or away: checkpoints are late or left out, steps go on.
    CheckpointDegraded,
    /// Checkpoints are committed as they are due again.
    CheckpointRecovered,
    /// A rank waits for its data, or cannot read them at present and tries again: `rank`, `node`,
    /// `seconds` so far. Nothing is lost by it but time.
    DataDegraded,
    /// They are read again; `seconds` is how long that took.
    DataRecovered,
    Recovered,
    StateSaved,
    /// A field of the manifest has another value from this step on: `field`, `was`, `is`.
    SpecChanged,
    /// Something that the user may not have meant, and that keeps nothing from running.
    Warning,
    JobCompleted,
    JobFailed,
    JobSuspended,
    Interrupted,
}
