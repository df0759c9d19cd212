//! A MoeJob as the API server has it, read for people.

use super::table::{self, age, cut, span};
use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_manifest::spec::MoeJobSpec;
use moejob_manifest::status::{Condition, MoeJobStatus};
use moejob_plan::engines::{Engines, RankPlace};
use moejob_plan::observed::{Gang, Millis};
use moejob_plan::record::{self, Saved};
use serde_json::Value;
use std::cmp::Reverse;
use std::collections::BTreeMap;

/// What the commands know of one job.
#[derive(Clone, Debug, Default)]
pub struct JobView {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub created: Millis,
    pub deleted: bool,
    /// `spec.suspend`.
    pub held: bool,
    pub generation: i64,
    pub priority_class: String,
    pub status: MoeJobStatus,
    /// The operator's own notes in `status.record`, where this version understands them.
    pub saved: Option<Saved>,
    /// The spec, where it is valid for this version.
    pub job: Option<Box<Job>>,
}

impl JobView {
    pub fn read(object: &Value) -> JobView {
        JobView::read_with(object, Profiles::shipped())
    }

    /// The same, where machines are known that are not shipped.
    pub fn read_with(object: &Value, profiles: &Profiles) -> JobView {
        let meta = &object["metadata"];
        let text = |field: &str| meta[field].as_str().unwrap_or_default().to_string();
        let name = text("name");
        let status: MoeJobStatus =
            serde_json::from_value(object["status"].clone()).unwrap_or_default();
        let spec: Option<MoeJobSpec> = serde_json::from_value(object["spec"].clone()).ok();
        let priority = object["spec"]["priorityClassName"].as_str().unwrap_or_default();
        JobView {
            job: spec.and_then(|spec| Job::from_spec(&name, &spec, profiles).ok()).map(Box::new),
            saved: record::read(&status.record).ok(),
            namespace: text("namespace"),
            uid: text("uid"),
            created: table::millis(&text("creationTimestamp")).unwrap_or_default(),
            deleted: !meta["deletionTimestamp"].is_null(),
            held: object["spec"]["suspend"] == true,
            generation: meta["generation"].as_i64().unwrap_or_default(),
            priority_class: priority.to_string(),
            status,
            name,
        }
    }

    /// The phase in the status, or what is known better.
    pub fn phase(&self) -> &str {
        match self.status.phase.as_str() {
            _ if self.deleted => "Deleting",
            "" if self.held => "Held",
            "" => "Submitted",
            "Pending" | "Suspended" if self.held => "Held",
            phase => phase,
        }
    }

    /// Nothing will happen to it any more, unless somebody changes it.
    pub fn is_over(&self) -> bool {
        matches!(self.status.phase.as_str(), "Complete" | "Failed")
    }

    /// The operator has not looked at what was changed last.
    pub fn is_unseen(&self) -> bool {
        self.status.observed_generation.is_none_or(|seen| seen < self.generation)
    }

    pub fn condition(&self, type_: &str) -> Option<&Condition> {
        self.status.conditions.iter().find(|condition| condition.type_ == type_)
    }

    /// Since when a condition holds.
    pub fn since(&self, type_: &str) -> Option<Millis> {
        let condition = self.condition(type_).filter(|condition| condition.status == "True")?;
        table::millis(condition.last_transition_time.as_deref()?)
    }

    /// Milliseconds until the last step at the present speed.
    pub fn left(&self) -> Option<Millis> {
        self.left_at(self.status.step, self.status.tokens_per_second?)
    }

    /// The same from this step and at this rate, in tokens a second.
    pub fn left_at(&self, step: u64, rate: f64) -> Option<Millis> {
        let training = &self.job.as_ref()?.training;
        let sequence = training.global_batch_size as f64 * training.sequence_length as f64;
        let rate = Some(rate).filter(|rate| *rate > 0.0)?;
        let steps = self.status.steps.checked_sub(step)?;
        (self.status.phase == "Running").then(|| (steps as f64 * sequence / rate * 1e3) as Millis)
    }

    /// Why it is in this phase, in one line; empty where the phase says it all.
    pub fn reason(&self) -> String {
        let message = |type_: &str| {
            let condition = self.condition(type_)?;
            Some(match condition.message.is_empty() {
                true => condition.reason.clone(),
                false => condition.message.clone(),
            })
        };
        // An older one has been mended: it is gathered again for another reason.
        let recent = |attempt: u32| self.status.attempt <= attempt + 1;
        let last = || {
            let recovery = self.status.recoveries.last()?;
            recent(recovery.attempt).then(|| recovery.cause.clone())
        };
        let reason = match self.phase() {
            "Submitted" => Some("no operator has told of it yet".to_string()),
            "Held" => Some("until `kubectl moe release`".to_string()),
            "Invalid" | "Pending" | "Starting" => message("Planned"),
            "Recovering" => match self.condition("Planned") {
                Some(planned) if planned.status == "False" => message("Planned"),
                _ => last(),
            },
            "Running" => message("Degraded")
                .filter(|_| self.condition("Degraded").is_some_and(|of| of.status == "True")),
            "Failed" => message("Failed"),
            "Suspended" => Some("released; it goes on when it has nodes".to_string()),
            _ => None,
        };
        reason.unwrap_or_default()
    }

    /// `Running for 2m10s`.
    pub fn phase_in_words(&self, now: Millis) -> String {
        let since = match self.status.phase.as_str() {
            "Running" | "Complete" | "Failed" | "Suspended" => self.since(&self.status.phase),
            _ => None,
        };
        match (self.phase(), since) {
            (phase @ ("Complete" | "Failed"), Some(since)) => {
                let took = span(since.saturating_sub(self.created));
                format!("{phase} {took} after it was submitted")
            }
            (phase, Some(since)) => format!("{phase} for {}", age(now.saturating_sub(since))),
            (phase, None) => phase.to_string(),
        }
    }

    /// `120/300`.
    pub fn steps(&self) -> String {
        match self.status.steps {
            0 => "-".to_string(),
            steps => format!("{}/{steps}", self.status.step),
        }
    }

    /// The worker of each rank of the newest gang, and its node.
    pub fn members(&self) -> Vec<(String, String)> {
        let gang = self.saved.as_ref().and_then(|saved| saved.record.gang.as_ref());
        let members = gang.iter().flat_map(|gang| &gang.members);
        members.map(|member| (member.worker.clone(), member.node.clone())).collect()
    }

    /// The first rank that a worker has in the gang that is under way.
    pub fn rank_of(&self, worker: &str) -> Option<u32> {
        let gang = self.gang()?;
        Some(gang.members.iter().find(|member| member.worker == worker)?.rank)
    }

    /// Ranks of each worker of the newest gang: one a device.
    pub fn ranks_a_worker(&self) -> u32 {
        let gang = self.saved.as_ref().and_then(|saved| saved.record.gang.as_ref());
        gang.map_or(1, Gang::ranks_a_worker)
    }

    /// `3`, or `8-15` of a worker with eight devices.
    pub fn ranks_in_words(&self, first: u32) -> String {
        match self.ranks_a_worker() {
            1 => first.to_string(),
            ranks => format!("{first}-{}", first + ranks - 1),
        }
    }

    /// Where each rank of the gang that is under way computes, ascending. Of the uuids only those
    /// are known that stand in the status: of devices that were lost there.
    pub fn ranks(&self) -> Vec<RankPlace> {
        let Some(gang) = self.gang() else { return Vec::new() };
        let mut ranks = Engines::default().table(gang);
        for loss in &self.status.engines_lost {
            let place = (loss.node.as_str(), loss.device);
            let same = |of: &&mut RankPlace| (of.node.as_str(), u64::from(of.device)) == place;
            if let Some(of) = ranks.iter_mut().find(same) {
                of.uuid.clone_from(&loss.uuid);
            }
        }
        ranks
    }

    /// The one that is under way.
    fn gang(&self) -> Option<&Gang> {
        let gang = self.saved.as_ref()?.record.gang.as_ref()?;
        (gang.ended.is_none() && !self.is_over()).then_some(gang)
    }

    /// Bytes that each rank of the gang that is under way keeps, as `moejob plan` counts them.
    pub fn planned_memory(&self) -> Option<Vec<u64>> {
        let job = self.job.as_ref()?;
        let gang = self.saved.as_ref()?.record.gang.as_ref()?;
        let ranks = 0..gang.layout.mesh.world();
        let of = |rank| moejob_plan::placement::memory(job, &gang.layout, rank).committed;
        Some(ranks.map(of).collect())
    }
}

/// What each PriorityClass is worth, and a job without one.
#[derive(Clone, Debug, Default)]
pub struct Priorities {
    classes: BTreeMap<String, i64>,
    usual: i64,
}

impl Priorities {
    /// From objects of the kind PriorityClass.
    pub fn read(objects: &[Value]) -> Priorities {
        let mut read = Priorities::default();
        for object in objects {
            let value = object["value"].as_i64().unwrap_or_default();
            if object["globalDefault"] == true {
                read.usual = value;
            }
            let name = object["metadata"]["name"].as_str().unwrap_or_default();
            read.classes.insert(name.to_string(), value);
        }
        read
    }

    fn of(&self, job: &JobView) -> i64 {
        match &*job.priority_class {
            "" => self.usual,
            class => self.classes.get(class).copied().unwrap_or_default(),
        }
    }
}

/// As they are served: the highest priority first, then by age, then uid. What runs stands before
/// what waits, and what waits before what is over.
pub fn in_order(jobs: &mut [JobView], priorities: &Priorities) {
    jobs.sort_by(|a, b| {
        let key = |job: &JobView| {
            let group = match job.phase() {
                "Complete" | "Failed" | "Invalid" | "Deleting" => 3,
                "Held" => 2,
                _ if job.status.nodes.ready > 0 => 0,
                _ => 1,
            };
            (group, Reverse(priorities.of(job)), job.created, job.uid.clone())
        };
        key(a).cmp(&key(b))
    });
}

/// A reason that fits a column.
pub fn reason_cell(job: &JobView, wide: bool) -> String {
    cut(&job.reason(), if wide { 400 } else { 60 })
}

#[cfg(test)]
pub mod tests {
    use super::*;
    use serde_json::json;

    /// 2026-11-21T17:00:00Z.
    pub const START: Millis = 1_795_280_400_000;

    /// A job of 300 steps of 512 tokens, with this status.
    pub fn object(name: &str, status: Value) -> Value {
        json!({
            "apiVersion": "moejob.dev/v1alpha1",
            "kind": "MoeJob",
            "metadata": {
                "name": name, "namespace": "team-a", "uid": format!("uid-{name}"),
                "generation": 1, "creationTimestamp": table::stamp(START),
            },
            "spec": {
                "nodes": {"min": 1, "max": 2},
                "model": {"preset": "tiny"},
                "data": {"train": {"text": {"paths": ["corpus/*"]}}, "sequenceLength": 64},
                "training": {"steps": 300, "globalBatchSize": 8},
                "checkpoint": {"location": "checkpoints/a"},
                "volumes": [{"mountPath": "checkpoints", "claim": "c"}],
            },
            "status": status,
        })
    }

    pub fn condition(type_: &str, status: &str, reason: &str, message: &str) -> Value {
        json!({
            "type": type_, "status": status, "reason": reason, "message": message,
            "lastTransitionTime": table::stamp(START + 5_000),
        })
    }

    #[test]
    fn each_phase_has_its_reason() {
        let view = |change: &dyn Fn(&mut Value)| {
            let mut object = object("a", json!({}));
            change(&mut object);
            let job = JobView::read(&object);
            format!("{}: {}", job.phase(), job.reason())
        };
        let status = |phase: &str, condition: Value| {
            let status = json!({"phase": phase, "conditions": [condition]});
            view(&move |object| object["status"] = status.clone())
        };
        assert_eq!(view(&|_| ()), "Submitted: no operator has told of it yet");
        let held = |phase: &'static str| {
            view(&move |object| {
                object["spec"]["suspend"] = json!(true);
                object["status"]["phase"] = json!(phase);
            })
        };
        assert_eq!(held(""), "Held: until `kubectl moe release`");
        assert_eq!(held("Suspended"), "Held: until `kubectl moe release`");
        assert_eq!(held("Stopping"), "Stopping: ");
        let recovering = |attempt: u32| {
            view(&move |object| {
                object["status"] = json!({"phase": "Recovering", "attempt": attempt,
                    "recoveries": [{"cause": "rank 1 was killed", "attempt": 1, "stepsLost": 0}]});
            })
        };
        assert_eq!(recovering(2), "Recovering: rank 1 was killed");
        assert_eq!(recovering(3), "Recovering: ", "that one was mended");
        let waits = condition("Planned", "False", "WaitingForNodes", "1 of 2 nodes is free");
        assert_eq!(status("Pending", waits), "Pending: 1 of 2 nodes is free");
        let fewer = condition("Degraded", "True", "FewerNodes", "1 of 2 nodes");
        assert_eq!(status("Running", fewer), "Running: 1 of 2 nodes");
        let all = condition("Degraded", "False", "AllNodes", "");
        assert_eq!(status("Running", all), "Running: ");
        let failed = condition("Failed", "True", "RestartBudgetUsedUp", "");
        assert_eq!(status("Failed", failed), "Failed: RestartBudgetUsedUp");
    }

    #[test]
    fn the_time_left_follows_from_the_rate() {
        let status = json!({"phase": "Running", "step": 100, "steps": 300,
            "tokensPerSecond": 1024.0});
        // 200 steps of 512 tokens at 1024 tokens a second.
        assert_eq!(JobView::read(&object("a", status)).left(), Some(100_000));
        let status = json!({"phase": "Pending", "step": 100, "steps": 300,
            "tokensPerSecond": 1024.0});
        assert_eq!(JobView::read(&object("a", status)).left(), None);
    }

    #[test]
    fn what_runs_stands_before_what_waits() {
        let job = |name: &str, phase: &str, ready: u32| {
            let status = json!({"phase": phase, "nodes": {"ready": ready}});
            JobView::read(&object(name, status))
        };
        let mut jobs = [
            job("done", "Complete", 0),
            job("waits", "Pending", 0),
            job("runs", "Running", 2),
            job("new", "", 0),
        ];
        in_order(&mut jobs, &Priorities::default());
        assert_eq!(jobs.map(|job| job.name), ["runs", "new", "waits", "done"]);
    }

    #[test]
    fn the_more_important_of_those_that_wait_stands_first() {
        let class = |name: &str, value: i64, usual: bool| {
            json!({"metadata": {"name": name}, "value": value, "globalDefault": usual})
        };
        let job = |name: &str, class: &str| {
            let mut object = object(name, json!({"phase": "Pending"}));
            object["spec"]["priorityClassName"] = json!(class);
            JobView::read(&object)
        };
        let order = |classes: &[Value]| {
            let mut jobs = [job("low", "low"), job("none", ""), job("high", "high")];
            in_order(&mut jobs, &Priorities::read(classes));
            jobs.map(|job| job.name).join(" ")
        };
        let (low, high) = (class("low", -5, false), class("high", 1000, false));
        assert_eq!(order(&[low.clone(), high.clone()]), "high none low");
        assert_eq!(order(&[low, high, class("usual", 2000, true)]), "none high low");
    }
}
