//! What a person is to do about a job, by what is known of it.

use super::job::JobView;
use super::timeline::PodView;

/// One piece of advice a line; never empty.
pub fn advice(job: &JobView, pods: &[PodView]) -> Vec<String> {
    let name = &job.name;
    let planned = job.condition("Planned").filter(|of| of.status == "False");
    let reason = planned.map_or("", |of| of.reason.as_str());
    let show_logs = format!("kubectl moe logs {name}");
    let mut advice = match (job.phase(), reason) {
        ("Deleting", _) => vec!["nothing: it is being deleted, and its checkpoints stay".into()],
        ("Submitted", _) => vec![format!(
            "wait a few seconds for an operator to tell of it. If none does, `kubectl moe doctor` \
             says whether one runs, and whether it may work in the namespace {}",
            job.namespace
        )],
        ("Held", _) => vec![format!("kubectl moe release {name}, when it is to go on")],
        ("Stopping", _) => vec!["nothing: it saves a checkpoint and gives its nodes back".into()],
        ("Complete", _) => vec![format!(
            "nothing: it is done. Its checkpoints and metrics.jsonl lie in {}; `kubectl moe cancel \
             {name}` deletes the job and keeps them",
            location(job)
        )],
        ("Failed", _) => failed(job, &show_logs),
        (_, "") => vec!["nothing: it makes its way".into()],
        (_, reason) => waiting(job, reason, &show_logs),
    };
    if job.phase() == "Running" && job.status.restarts > 2 {
        advice.push(format!(
            "it has restarted {} times lately: look at the causes above, and cordon a node that \
             returns in them",
            job.status.restarts
        ));
    }
    let starved = pods.iter().filter(|pod| pod.state == "OOMKilled").count();
    if starved > 0 {
        advice.push(
            "a worker was killed for its memory: raise its limit in spec.podTemplate, or let \
             nodes.min be larger, so that each rank holds less"
                .to_string(),
        );
    }
    advice
}

fn location(job: &JobView) -> String {
    let of = job.job.as_ref().and_then(|job| job.checkpoint.location.clone());
    of.unwrap_or_else(|| "the folder of its checkpoints".to_string())
}

/// There is no gang, and why.
fn waiting(job: &JobView, reason: &str, show_logs: &str) -> Vec<String> {
    let name = &job.name;
    vec![match reason {
        "InvalidSpec" | "Unsupported" => format!(
            "correct the manifest as the reason says, check it with `moejob validate`, and submit \
             it again (kubectl moe cancel {name} first)"
        ),
        "NoDurableCheckpoint" => format!(
            "let spec.checkpoint.location lie on a claim that all nodes can write (ReadWriteMany), \
             and submit it again (kubectl moe cancel {name} first)"
        ),
        "NoSizeFits" => format!(
            "no number of nodes between nodes.min and nodes.max has the memory: `kubectl moe plan \
             {name}` shows what each needs"
        ),
        "WaitingForNodes" => format!(
            "wait for nodes to become free, or let it run on fewer (nodes.min). `kubectl moe \
             queue -A` shows who has them, `kubectl moe plan {name}` which are free"
        ),
        "WorkersDoNotStart" => format!(
            "look at the reason and at `{show_logs}`; a wrong image is changed while the job is \
             held (kubectl moe hold {name})"
        ),
        "ObjectNotApplied" => "the operator was refused by the API server, see the reason; \
             `kubectl moe doctor` says whether it may work in this namespace"
            .to_string(),
        "BadRecord" => "status.record was damaged or is of a newer operator: install that one, or \
             submit the job anew under another name"
            .to_string(),
        reason if reason.contains("Claim") || reason.contains("ConfigMap") => {
            "make what it mounts (see the reason); it goes on by itself then".to_string()
        }
        _ => format!("see the reason, and `{show_logs}`"),
    }]
}

fn failed(job: &JobView, show_logs: &str) -> Vec<String> {
    let name = &job.name;
    let reason = job.condition("Failed").map_or("", |of| of.reason.as_str());
    let first = match reason {
        "DataOrCheckpointRefused" => format!(
            "see `{show_logs}`: put the data back as it was, or submit the job with another \
             checkpoint.location to begin anew"
        ),
        "RestartBudgetUsedUp" => {
            "its workers were lost too often: find what ends them in the timeline above; \
             recovery.maxRestarts and recovery.window set how often is too often"
                .to_string()
        }
        "WorkersDoNotStart" => format!(
            "its workers ended before they trained: `{show_logs}` says why"
        ),
        _ => format!("see `{show_logs}`, and correct the manifest"),
    };
    let next = match &job.status.checkpoint {
        Some(checkpoint) => format!(
            "then `kubectl moe cancel {name}` and submit it again: it goes on from {}",
            checkpoint.name
        ),
        None => format!("then `kubectl moe cancel {name}` and submit it again"),
    };
    vec![first, next]
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::{condition, object};
    use super::*;
    use serde_json::json;

    fn about(phase: &str, reason: &str) -> String {
        let type_ = if phase == "Failed" { "Failed" } else { "Planned" };
        let status = if phase == "Failed" { "True" } else { "False" };
        let conditions = match reason {
            "" => json!([]),
            reason => json!([condition(type_, status, reason, "MESSAGE")]),
        };
        let job = object("a", json!({"phase": phase, "conditions": conditions,
            "checkpoint": {"step": 50, "name": "step-00000050"}}));
        advice(&JobView::read(&job), &[]).join("\n")
    }

    #[test]
    fn each_reason_has_a_remedy() {
        for (phase, reason, part) in [
            ("", "", "kubectl moe doctor"),
            ("Running", "", "nothing"),
            ("Complete", "", "lie in checkpoints/a"),
            ("Invalid", "InvalidSpec", "moejob validate"),
            ("Pending", "NoDurableCheckpoint", "ReadWriteMany"),
            ("Pending", "NoSizeFits", "kubectl moe plan a"),
            ("Pending", "WaitingForNodes", "kubectl moe queue -A"),
            ("Recovering", "WaitingForNodes", "kubectl moe queue -A"),
            ("Starting", "WorkersDoNotStart", "kubectl moe logs a"),
            ("Pending", "ObjectNotApplied", "kubectl moe doctor"),
            ("Pending", "ClaimMissing", "make what it mounts"),
            ("Failed", "DataOrCheckpointRefused", "goes on from step-00000050"),
            ("Failed", "RestartBudgetUsedUp", "recovery.maxRestarts"),
        ] {
            let found = about(phase, reason);
            assert!(found.contains(part), "{phase} {reason}: {found}");
        }
    }

    #[test]
    fn a_killed_worker_and_many_restarts_are_named() {
        let job = object("a", json!({"phase": "Running", "restarts": 3}));
        let pod = PodView { state: "OOMKilled".into(), ..PodView::default() };
        let found = advice(&JobView::read(&job), &[pod]);
        assert_eq!(found.len(), 3);
        assert!(found[1].contains("3 times") && found[2].contains("memory"), "{found:?}");
    }
}
