//! What the job says about itself: conditions with stable reasons, progress, recoveries.

mod fabric;
mod rings;
mod seats;

pub use fabric::FabricStatus;
use crate::words::{one_or_more, several};
use crate::job::Job;
use crate::observed::{Gang, Millis, Observed, Outcome, StopCause, Worker};
use crate::preflight::Checked;
use crate::track::Recovery as Tracked;
use moejob_protocol::Mesh;
use moejob_protocol::message::CONTROL_PREFLIGHT;
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

/// The status of a job whose spec is right and which cannot run as things are: its checkpoints are
/// not durable, a claim or ConfigMap that it names is missing. `message` says what to do.
pub fn blocked(reason: &str, message: String) -> MoeJobStatus {
    MoeJobStatus {
        phase: "Pending".to_string(),
        conditions: vec![condition("Planned", false, reason, message)],
        ..MoeJobStatus::default()
    }
}

/// The status of a job, but for what only its workers tell (loss, tokens a second, engines that
/// were lost) and for times. `why` is the newest plan's.
pub fn status(
    job: &Job,
    observed: &Observed,
    recoveries: &[Tracked],
    why: &[String],
    now: Millis,
) -> MoeJobStatus {
    let record = &observed.record;
    let gang = present(observed);
    let (phase, mut conditions) = conditions(observed, why);
    conditions.extend(rings::rings(job, observed, gang));
    conditions.extend(seats::seats(observed, gang));
    let available = observed.workers.iter().filter(|worker| worker.is_available()).count() as u32;
    let ready = gang.map_or(0, |gang| gang.members.len() as u32);
    let desired = observed.wanted.nodes_max;
    let since = now.saturating_sub(observed.wanted.restart_window);
    MoeJobStatus {
        phase: phase.to_string(),
        conditions,
        attempt: record.attempt,
        nodes: NodesStatus {
            ready,
            desired,
            spares: if gang.is_some() { available } else { 0 },
            summary: format!("{ready}/{desired}"),
        },
        mesh: gang.map(|gang| mesh(gang.layout.mesh)),
        step: record.step,
        steps: job.training.steps,
        checkpoint: observed.stored.clone(),
        placement: gang.map(|gang| PlacementStatus {
            summary: placement(job.model.experts.count, gang.layout.mesh),
            ranks: runs(gang.members.iter().map(|member| member.node.as_str())),
            fabric: fabric::fabric(observed, gang),
        }),
        restarts: record.restarts.iter().filter(|at| **at >= since).count() as u32,
        recoveries: recoveries.iter().map(recovery).collect(),
        ..MoeJobStatus::default()
    }
}

/// The gang that is under way, unless the job has an end.
fn present(observed: &Observed) -> Option<&Gang> {
    observed.gang().filter(|_| observed.record.outcome.is_none())
}

fn conditions(observed: &Observed, why: &[String]) -> (&'static str, Vec<Condition>) {
    let record = &observed.record;
    let gang = present(observed);
    let size = gang.map_or(0, |gang| gang.members.len() as u32);
    let stopping = gang.and_then(|gang| gang.stop_requested).filter(|(cause, _)| cause.halts());
    let running = gang.is_some_and(|gang| gang.stepped && gang.broken.is_none());
    let phase = match (&record.outcome, gang) {
        (Some(Outcome::Complete { .. }), _) => "Complete",
        (Some(Outcome::Failed { .. }), _) => "Failed",
        (Some(Outcome::Suspended | Outcome::Interrupted), _) => "Suspended",
        (None, _) if stopping.is_some() => "Stopping",
        (None, Some(_)) if running => "Running",
        (None, Some(gang)) if gang.broken.is_none() && gang.attempt == 1 => "Starting",
        (None, None) if record.attempt == 0 => "Pending",
        (None, _) => "Recovering",
    };
    let planned = match gang {
        Some(_) => {
            let have = one_or_more(size, "has", "have");
            let message = format!("{} {have} ranks", several(size, "node"));
            condition("Planned", true, "GangFormed", message)
        }
        None if record.outcome.is_some() => condition("Planned", true, "Over", String::new()),
        None => condition("Planned", false, "WaitingForNodes", why.join("; ")),
    };
    let is_running = match (running, phase) {
        (true, _) => condition("Running", true, "Training", String::new()),
        (false, phase) => condition("Running", false, phase, String::new()),
    };
    let desired = observed.wanted.nodes_max;
    let degraded = match gang {
        Some(_) if size < desired => {
            let message = format!("{size} of {desired} nodes");
            condition("Degraded", true, "FewerNodes", message)
        }
        _ => condition("Degraded", false, "AllNodes", String::new()),
    };
    let mut all = vec![planned, is_running, degraded];
    all.extend(preflight(observed, gang.is_some()));
    all.extend(ends(record.outcome.as_ref(), stopping.map(|(cause, _)| cause)));
    (phase, all)
}

/// Whether the nodes are good, where they are measured. A gang has good nodes alone.
fn preflight(observed: &Observed, has_gang: bool) -> Option<Condition> {
    observed.wanted.preflight.as_ref()?;
    let type_ = "PreflightPassed";
    let (count, worst) = observed.preflight.failed();
    let listed = match count {
        0 => String::new(),
        count if count > worst.len() => {
            format!("{count} nodes failed, the worst of them:\n{}", worst.join("\n"))
        }
        _ => worst.join("\n"),
    };
    let asked = |worker: &&Worker| matches!(worker.checked, Checked::Asked { .. });
    let alone = observed.workers.iter().filter(asked).count();
    let measuring = alone + observed.preflight.pairs.measuring();
    let mute = |worker: &&Worker| (1..CONTROL_PREFLIGHT).contains(&worker.speaks);
    let mute = observed.workers.iter().filter(mute).count();
    Some(match (has_gang, count) {
        (true, 0) if mute > 0 => {
            let message = format!("workers of a release that does not measure nodes: {mute}");
            unknown(type_, "NotMeasured", message)
        }
        (true, 0) => condition(type_, true, "Passed", String::new()),
        (true, _) => condition(type_, true, "NodesLeftOut", listed),
        (false, 0) => {
            let message = match measuring {
                0 => String::new(),
                count => format!("being measured: {count}"),
            };
            unknown(type_, "NotYet", message)
        }
        (false, _) => condition(type_, false, "NodesFailed", listed),
    })
}

fn ends(outcome: Option<&Outcome>, stopping: Option<StopCause>) -> Vec<Condition> {
    let complete = match outcome {
        Some(Outcome::Complete { step }) => {
            condition("Complete", true, "AllStepsDone", several(*step, "step"))
        }
        _ => condition("Complete", false, "NotYet", String::new()),
    };
    let failed = match outcome {
        Some(Outcome::Failed { reason, message, .. }) => {
            condition("Failed", true, reason, message.clone())
        }
        _ => condition("Failed", false, "NotFailed", String::new()),
    };
    let suspended = match (outcome, stopping) {
        (Some(Outcome::Suspended), _) => condition("Suspended", true, "Asked", String::new()),
        (_, Some(StopCause::Suspend)) => condition("Suspended", false, "Stopping", String::new()),
        _ => condition("Suspended", false, "NotAsked", String::new()),
    };
    vec![complete, failed, suspended]
}

fn condition(type_: &str, holds: bool, reason: &str, message: String) -> Condition {
    Condition {
        type_: type_.to_string(),
        status: if holds { "True" } else { "False" }.to_string(),
        reason: reason.to_string(),
        message,
        last_transition_time: None,
    }
}

fn unknown(type_: &str, reason: &str, message: String) -> Condition {
    let open = condition(type_, false, reason, message);
    Condition { status: "Unknown".to_string(), ..open }
}

/// Keeps the time of conditions whose status is the same, and gives the others `now`.
pub fn stamp(conditions: &mut [Condition], before: &[Condition], now: &str) {
    for condition in conditions {
        let same = before.iter().find(|old| {
            (&old.type_, &old.status) == (&condition.type_, &condition.status)
        });
        let time = same.and_then(|old| old.last_transition_time.clone());
        condition.last_transition_time = Some(time.unwrap_or_else(|| now.to_string()));
    }
}

fn mesh(mesh: Mesh) -> MeshStatus {
    MeshStatus { world: mesh.world(), dp: mesh.dp, ep: mesh.ep, tp: mesh.tp, pp: mesh.pp }
}

/// `64 over 8 ranks, 2 replicas`.
pub fn placement(experts: u32, mesh: Mesh) -> String {
    let replicas = match mesh.edp() {
        1 => String::new(),
        count => format!(", {count} replicas"),
    };
    format!("{experts} over {}{replicas}", several(mesh.ep, "rank"))
}

/// Names in order, neighbours in number as one: `node-0..7`. The status of 512 nodes stays small.
pub fn runs<'n>(names: impl IntoIterator<Item = &'n str>) -> Vec<String> {
    let mut runs: Vec<(&str, Option<(u64, u64)>)> = Vec::new();
    for name in names {
        let stem = name.trim_end_matches(|c: char| c.is_ascii_digit());
        let digits = &name[stem.len()..];
        // 007 is not the number 7.
        let number = digits.parse().ok().filter(|number: &u64| number.to_string() == digits);
        match (runs.last_mut(), number) {
            (Some((of, Some((_, last)))), Some(number))
                if *of == stem && last.checked_add(1) == Some(number) =>
            {
                *last = number;
            }
            (_, Some(number)) => runs.push((stem, Some((number, number)))),
            (_, None) => runs.push((name, None)),
        }
    }
    let show = |(stem, numbers): &(&str, Option<(u64, u64)>)| match numbers {
        None => stem.to_string(),
        Some((first, last)) if first == last => format!("{stem}{first}"),
        Some((first, last)) => format!("{stem}{first}..{last}"),
    };
    runs.iter().map(show).collect()
}

fn recovery(tracked: &Tracked) -> RecoveryStatus {
    let since = |at: Option<Millis>| at.map(|at| at.saturating_sub(tracked.detected_at));
    RecoveryStatus {
        cause: tracked.cause.clone(),
        attempt: tracked.attempt,
        replanned_millis: since(tracked.replanned_at),
        rejoined_millis: since(tracked.rejoined_at),
        first_step_millis: since(tracked.first_step_at),
        steps_lost: tracked.steps_lost,
    }
}
