//! What the job says about itself: conditions with stable reasons, progress, recoveries.

mod fabric;
mod rings;
mod seats;

use crate::observed::{Gang, Millis, Observed, Outcome, StopCause, Worker};
use crate::preflight::Checked;
use crate::track::Recovery as Tracked;
use moejob_manifest::job::Job;
use moejob_manifest::status::{
    Condition, MeshStatus, MoeJobStatus, NodesStatus, PlacementStatus, RecoveryStatus,
};
use moejob_manifest::words::{one_or_more, several};
use moejob_protocol::Mesh;
use moejob_protocol::message::CONTROL_PREFLIGHT;
use moejob_protocol::model::ModelConfig;

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
    conditions.extend(gang.map(|_| data(observed)));
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
            summary: placement(&job.model, gang.layout.mesh),
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
        Some(_) if observed.is_preempted() => {
            let message = "it stops with a checkpoint: a job before it needs its nodes";
            condition("Degraded", true, "Preempted", message.to_string())
        }
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

/// Whether some member waits for its data. The job goes on when they come.
fn data(observed: &Observed) -> Condition {
    let late = &observed.late_data;
    match late.values().next() {
        None => condition("DataDegraded", false, "DataComes", String::new()),
        Some((reason, message)) if late.len() == 1 => {
            condition("DataDegraded", true, reason, message.clone())
        }
        Some((reason, message)) => {
            let more = late.len() - 1;
            condition("DataDegraded", true, reason, format!("{message}; and {more} more"))
        }
    }
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
pub fn placement(model: &ModelConfig, mesh: Mesh) -> String {
    let experts = match model.slices().each {
        1 => model.experts.count.to_string(),
        each => format!("{} x {each} slices", model.experts.count),
    };
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
