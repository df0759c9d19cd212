//! What a job's object says: its spec, judged, and what the leader before has left in its status.

use super::job::Blocked;
use moejob_plan::Job;
use moejob_plan::job::Venue;
use moejob_plan::observed::{Observed, Record, Stored, Wanted};
use moejob_plan::pods;
use moejob_plan::record::{self, Saved};
use moejob_plan::spec::MoeJobSpec;
use moejob_protocol::WorkerConfig;

/// The record of the leader before.
pub fn restored(status: &serde_json::Value) -> Result<Saved, record::RecordError> {
    match status["record"].as_str() {
        Some(text) if !text.is_empty() => record::read(text),
        _ => Ok(Saved::default()),
    }
}

/// The job, or why there is none to plan.
pub fn judge(name: &str, spec: &serde_json::Value) -> Result<Job, Blocked> {
    let blocked = |invalid: bool, reason: &'static str, message: String| {
        Err(Blocked { invalid, reason, message })
    };
    let spec: MoeJobSpec = match serde_json::from_value(spec.clone()) {
        Ok(spec) => spec,
        Err(error) => return blocked(true, "InvalidSpec", format!("spec: {error}")),
    };
    let job = match Job::from_spec(name, &spec) {
        Ok(job) => job,
        Err(problems) => return blocked(true, "InvalidSpec", sentences(&problems)),
    };
    let unsupported = job.unsupported(job.profile.backend);
    if !unsupported.is_empty() {
        return blocked(true, "Unsupported", sentences(&unsupported));
    }
    if let Some(message) = pods::not_durable(&job) {
        return blocked(false, "NoDurableCheckpoint", message);
    }
    let (sizes, skipped) = moejob_plan::placement::sizes(&job);
    if sizes.is_empty() {
        let lines = skipped.iter().map(|skip| format!("{} nodes: {}", skip.nodes, skip.why));
        let message = lines.collect::<Vec<_>>().join("\n");
        return blocked(false, "NoSizeFits", message);
    }
    Ok(job)
}

fn sentences(problems: &[moejob_plan::problem::Problem]) -> String {
    let lines: Vec<String> = problems.iter().map(|problem| problem.sentence()).collect();
    lines.join("\n")
}

/// Before the spec is read and the first pod is seen.
pub fn nothing_observed(job_uid: &str, record: Record, stored: Option<Stored>) -> Observed {
    let wanted = Wanted {
        nodes_min: 1,
        nodes_max: 1,
        spares: 0,
        sizes: Vec::new(),
        restarts_max: 0,
        restart_window: 0,
        growth_interval: 0,
        gang_timeout: 30_000,
        step_timeout: 0,
        suspend: false,
        venue: Venue::Kubernetes,
    };
    let template = WorkerConfig { job_uid: job_uid.to_string(), ..super::EMPTY_TEMPLATE.clone() };
    let (nodes, workers, interrupt) = (Vec::new(), Vec::new(), false);
    Observed { wanted, template, nodes, workers, record, stored, interrupt }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::{Value, json};

    fn good() -> Value {
        json!({
            "nodes": {"min": 1, "max": 2},
            "model": {"preset": "tiny"},
            "data": {"train": {"text": {"paths": ["corpus/*"]}}, "sequenceLength": 8},
            "training": {"steps": 1, "globalBatchSize": 4},
            "checkpoint": {"location": "checkpoints/a"},
            "volumes": [{"mountPath": "checkpoints", "claim": "c"}],
        })
    }

    fn blocked(change: impl Fn(&mut Value)) -> (String, String) {
        let mut spec = good();
        change(&mut spec);
        let blocked = judge("job", &spec).expect_err("blocked");
        (format!("{} {}", blocked.reason, blocked.invalid), blocked.message)
    }

    #[test]
    fn what_keeps_a_job_from_being_planned_has_a_reason() {
        assert!(judge("job", &good()).is_ok());
        let (reason, message) = blocked(|spec| spec["training"]["globalBatchSize"] = json!(0));
        assert_eq!(reason, "InvalidSpec true");
        assert!(message.contains("globalBatchSize"), "{message}");
        let (reason, message) = blocked(|spec| spec["newer"] = json!(1));
        assert_eq!(reason, "InvalidSpec true");
        assert!(message.contains("newer"), "{message}");
        let (reason, _) = blocked(|spec| spec["volumes"] = json!([]));
        assert_eq!(reason, "NoDurableCheckpoint false");
    }

    #[test]
    fn the_record_of_the_leader_before_is_read_or_named() {
        assert_eq!(restored(&Value::Null), Ok(Saved::default()));
        assert_eq!(restored(&json!({"record": ""})), Ok(Saved::default()));
        let saved = Saved { term: 4, ..Saved::default() };
        assert_eq!(restored(&json!({"record": record::write(&saved)})), Ok(saved));
        assert!(restored(&json!({"record": "x"})).is_err());
    }
}
