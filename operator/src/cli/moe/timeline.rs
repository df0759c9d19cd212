//! The life of a job in words: what happened when, how long it took, and what to do now.
//!
//! ```text
//! job (status, record) + events + pods -> entries in the order of time -> text | JSON
//! ```
//!
//! Events live for an hour on most clusters; the record in status keeps the last recoveries.

use super::job::JobView;
use super::table::{age, millis, span, stamp};
use moejob_manifest::words::several;
use moejob_plan::observed::Millis;
use moejob_plan::track::Recovery;
use serde_json::{Value, json};

/// A loss and the event that tells of it are written within this time of each other.
const SAME: Millis = 3_000;

const HELD: &str = "held: it has no nodes";

/// One happening.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    pub at: Millis,
    /// One stable word.
    pub event: String,
    pub words: String,
    /// Durations and the like, a line each.
    pub details: Vec<String>,
}

impl Entry {
    fn new(at: Millis, event: &str, words: impl Into<String>) -> Entry {
        Entry { at, event: event.to_string(), words: words.into(), details: Vec::new() }
    }
}

/// An event of the API about the job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Told {
    pub at: Millis,
    pub reason: String,
    pub note: String,
    pub warning: bool,
}

impl Told {
    pub fn read(event: &Value) -> Option<Told> {
        let text = |field: &str| event[field].as_str().map(str::to_string);
        let at = text("eventTime").or_else(|| text("deprecatedLastTimestamp"));
        let at = at.or_else(|| event["metadata"]["creationTimestamp"].as_str().map(str::to_string));
        Some(Told {
            at: millis(&at?)?,
            reason: text("reason")?,
            note: text("note").unwrap_or_default(),
            warning: event["type"] == "Warning",
        })
    }
}

/// When a worker's pod was made, bound and started, in milliseconds since 1970.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PodView {
    pub name: String,
    pub attempt: u32,
    pub node: String,
    /// One word: Running, Pending, Deleting, or how it ended.
    pub state: String,
    pub made: Millis,
    pub bound: Option<Millis>,
    pub started: Option<Millis>,
    pub ended: bool,
}

impl PodView {
    pub fn read(pod: &Value) -> PodView {
        let text = |value: &Value| value.as_str().unwrap_or_default().to_string();
        let time = |value: &Value| value.as_str().and_then(millis);
        let (meta, status) = (&pod["metadata"], &pod["status"]);
        let conditions = status["conditions"].as_array().into_iter().flatten();
        let mut bound = conditions.filter(|of| of["type"] == "PodScheduled");
        let bound = bound.find(|of| of["status"] == "True");
        let container = &status["containerStatuses"][0]["state"];
        let started = time(&container["running"]["startedAt"])
            .or_else(|| time(&container["terminated"]["startedAt"]));
        let phase = text(&status["phase"]);
        let state = match (&container["terminated"], &container["waiting"]["reason"]) {
            (Value::Object(end), _) => ended(end),
            (_, Value::String(reason)) if phase == "Pending" => reason.clone(),
            _ if !meta["deletionTimestamp"].is_null() => "Deleting".to_string(),
            _ => phase.clone(),
        };
        PodView {
            name: text(&meta["name"]),
            attempt: text(&meta["labels"]["moejob.dev/attempt"]).parse().unwrap_or_default(),
            node: text(&pod["spec"]["nodeName"]),
            state,
            made: time(&meta["creationTimestamp"]).unwrap_or_default(),
            bound: bound.and_then(|of| time(&of["lastTransitionTime"])),
            started,
            ended: matches!(phase.as_str(), "Succeeded" | "Failed"),
        }
    }
}

fn ended(end: &serde_json::Map<String, Value>) -> String {
    let number = |field: &str| end.get(field).and_then(Value::as_i64).unwrap_or_default();
    let reason = end.get("reason").and_then(Value::as_str).unwrap_or_default();
    match (number("exitCode"), number("signal"), reason) {
        (0, ..) => "Completed".to_string(),
        (_, _, "OOMKilled") => "OOMKilled".to_string(),
        (75, ..) => "Fenced".to_string(),
        (code, 0, _) => format!("Exit {code}"),
        (_, signal, _) => format!("Signal {signal}"),
    }
}

/// All that is known, oldest first.
pub fn entries(job: &JobView, told: &[Told], pods: &[PodView]) -> Vec<Entry> {
    let mut entries = vec![Entry::new(job.created, "Submitted", "submitted")];
    entries.extend(births(job, pods));
    let recoveries = job.saved.as_ref().map(|saved| saved.recoveries.as_slice());
    let recoveries = recoveries.unwrap_or_default();
    entries.extend(recoveries.iter().map(recovery));
    for event in told {
        let (at, note) = (event.at, event.note.as_str());
        let near = |recovery: &Recovery| recovery.detected_at.abs_diff(at) <= SAME;
        let entry = match event.reason.as_str() {
            // The record tells them with all their times.
            "Recovered" if !recoveries.is_empty() => continue,
            "WorkerLost" if recoveries.iter().any(near) => continue,
            "AttemptStarted" => Entry::new(at, "AttemptStarted", format!("began {note}")),
            "WorkerLost" => Entry::new(at, "WorkerLost", format!("lost {note}")),
            "Complete" => Entry::new(at, "Complete", format!("complete: {note}")),
            "Suspended" => Entry::new(at, "Suspended", HELD),
            "Draining" => Entry::new(at, "Draining", note),
            reason => Entry::new(at, reason, format!("{reason}: {note}")),
        };
        entries.push(entry);
    }
    fill(job, &mut entries);
    for entry in &mut entries {
        entry.words = entry.words.replace(" 1 nodes", " 1 node").replace(" 1 steps", " 1 step");
    }
    entries.sort_by_key(|entry| entry.at);
    entries.dedup_by(|b, a| (&a.event, &a.words) == (&b.event, &b.words) && b.at - a.at < 60_000);
    entries
}

/// What conditions and the record know where events have expired.
fn fill(job: &JobView, entries: &mut Vec<Entry>) {
    let knows = |entries: &[Entry], event: &str| entries.iter().any(|of| of.event == event);
    let gang = job.saved.as_ref().and_then(|saved| saved.record.gang.as_ref());
    if let Some(gang) = gang {
        let nodes = several(gang.members.len(), "node");
        let words = format!("began attempt {} on {nodes}", gang.attempt);
        let told = entries.iter().any(|of| of.words.starts_with(&words));
        if !told && gang.started_at > 0 {
            let words = format!("{words} from step {}", gang.resumed_at);
            entries.push(Entry::new(gang.started_at, "AttemptStarted", words));
        }
    }
    // The first step of the only attempt; of later ones the recoveries tell.
    let first = job.status.attempt == 1 && job.status.recoveries.is_empty();
    if let Some(at) = job.since("Running").filter(|_| first) {
        let took = span(at.saturating_sub(job.created));
        let words = format!("training, {took} after it was submitted");
        entries.push(Entry::new(at, "Training", words));
    }
    for (condition, verb) in [("Complete", "complete"), ("Failed", "failed")] {
        if let Some(at) = job.since(condition) {
            let message = job.condition(condition).map_or("", |of| of.message.as_str());
            let reason = job.condition(condition).map_or("", |of| of.reason.as_str());
            let told = knows(entries, condition) || knows(entries, reason);
            if !told {
                let words = format!("{verb}: {message}");
                entries.push(Entry::new(at, condition, words.trim_end_matches(": ")));
            }
        }
    }
    if let Some(at) = job.since("Suspended").filter(|_| !knows(entries, "Suspended")) {
        entries.push(Entry::new(at, "Suspended", HELD));
    }
}

/// The pods of each attempt: allocated, placed, started.
fn births(job: &JobView, pods: &[PodView]) -> Vec<Entry> {
    let mut attempts: Vec<u32> = pods.iter().map(|pod| pod.attempt).collect();
    attempts.sort_unstable();
    attempts.dedup();
    let mut entries = Vec::new();
    for attempt in attempts {
        let mut all: Vec<&PodView> = pods.iter().filter(|pod| pod.attempt == attempt).collect();
        all.sort_by_key(|pod| pod.made);
        // A replacement that comes a minute later is another happening.
        for group in all.chunk_by(|a, b| b.made - a.made < 10_000) {
            entries.extend(birth(job, group));
        }
    }
    entries
}

fn birth(job: &JobView, pods: &[&PodView]) -> Option<Entry> {
    let made = pods.first()?.made;
    let count = pods.len();
    let mut names: Vec<&str> = pods.iter().map(|pod| pod.node.as_str()).collect();
    names.retain(|name| !name.is_empty());
    names.sort_unstable();
    let on = moejob_plan::status::runs(names.iter().copied()).join(", ");
    let on = if on.is_empty() { "nodes".to_string() } else { on };
    let waited = match pods.iter().any(|pod| pod.name.ends_with("-0")) {
        true if made > job.created + 1_000 => {
            format!(", after {}", span(made - job.created))
        }
        _ => String::new(),
    };
    // No count: pods that were deleted are not among these.
    let words = format!("allocated {on}{waited}");
    let mut entry = Entry::new(made, "Allocated", words);
    let latest = |of: fn(&PodView) -> Option<Millis>| {
        let times: Vec<Millis> = pods.iter().filter_map(|pod| of(pod)).collect();
        (times.len() == count).then(|| times.into_iter().max().unwrap_or_default())
    };
    let (bound, started) = (latest(|pod| pod.bound), latest(|pod| pod.started));
    let missing = pods.iter().filter(|pod| pod.started.is_none() && !pod.ended);
    let missing: Vec<&str> = missing.map(|pod| pod.name.as_str()).collect();
    entry.details.push(match (bound, started) {
        // Kubernetes writes whole seconds.
        (Some(_), Some(started)) => {
            format!("workers started {}", within(started.saturating_sub(made)))
        }
        (Some(bound), None) => format!(
            "placed {}; not started yet: {}",
            within(bound.saturating_sub(made)),
            missing.join(", ")
        ),
        (None, _) => format!("not placed yet: {}", missing.join(", ")),
    });
    Some(entry)
}

fn within(took: Millis) -> String {
    if took < 1_000 { "within a second".to_string() } else { format!("after {}", age(took)) }
}

fn recovery(recovery: &Recovery) -> Entry {
    let words = format!("attempt {} ended: {}", recovery.attempt, recovery.cause);
    let mut entry = Entry::new(recovery.detected_at, "Recovery", words);
    let since = |at: Millis| span(at.saturating_sub(recovery.detected_at));
    let mut parts = Vec::new();
    parts.extend(recovery.replanned_at.map(|at| format!("planned anew after {}", since(at))));
    parts.extend(recovery.rejoined_at.map(|at| format!("joined after {}", since(at))));
    parts.extend(recovery.first_step_at.map(|at| format!("trained on after {}", since(at))));
    if recovery.first_step_at.is_none() {
        parts.push("has not trained on yet".to_string());
    }
    entry.details.push(parts.join(", "));
    if recovery.first_step_at.is_some() {
        entry.details.push(match recovery.steps_lost {
            0 => "no step was done again".to_string(),
            1 => "1 step was done again".to_string(),
            steps => format!("{steps} steps were done again"),
        });
    }
    entry
}

/// `  17:05:02    +1m2s  words`; the day stands before the first time of it.
pub fn text(entries: &[Entry]) -> String {
    let Some(first) = entries.first() else { return String::new() };
    let mut text = String::new();
    let mut day = String::new();
    for entry in entries {
        let time = stamp(entry.at);
        let (date, clock) = time.split_once('T').unwrap_or((&time, ""));
        if date != day {
            day = date.to_string();
            text += &format!("  {day} (UTC)\n");
        }
        let after = format!("+{}", age(entry.at.saturating_sub(first.at)));
        let clock = clock.trim_end_matches('Z');
        text += &format!("  {clock} {after:>8}  {}\n", entry.words.replace('\n', "; "));
        for detail in &entry.details {
            text += &format!("{:21}{detail}\n", "");
        }
    }
    text
}

pub fn json(entries: &[Entry]) -> Value {
    let one = |entry: &Entry| {
        json!({
            "time": stamp(entry.at), "event": entry.event, "message": entry.words,
            "details": entry.details,
        })
    };
    entries.iter().map(one).collect()
}

#[cfg(test)]
mod tests {
    use super::super::job::tests::{START, condition, object};
    use super::*;
    use moejob_plan::observed::{Gang, Record};
    use moejob_plan::record::{self, Saved};
    use moejob_protocol::Mesh;
    use moejob_protocol::config::Member;
    use moejob_protocol::layout::Layout;

    fn told(after: Millis, reason: &str, note: &str) -> Told {
        let at = START + after;
        Told { at, reason: reason.into(), note: note.into(), warning: false }
    }

    fn pod(slot: u32, attempt: u32, made: Millis, started: Option<Millis>) -> PodView {
        PodView {
            name: format!("a-a{attempt}-{slot}"),
            attempt,
            node: format!("worker-{}", slot % 2 + 1),
            state: "Running".into(),
            made: START + made,
            bound: Some(START + made),
            started: started.map(|after| START + after),
            ended: false,
        }
    }

    fn recovering() -> JobView {
        let gang = Gang {
            attempt: 2,
            digest: "d".into(),
            layout: Layout::contiguous(Mesh::data_parallel(1, 1)),
            members: vec![Member {
                rank: 0,
                worker: "u".into(),
                node: "worker-1".into(),
                address: "10.0.0.1:1".into(),
            }],
            resumed_at: 40,
            started_at: START + 65_100,
            stepped: true,
            stop_requested: None,
            broken: None,
            ended: None,
            inherited: false,
        };
        let recovery = Recovery {
            cause: "rank 1 (a-a1-1) was killed".into(),
            attempt: 1,
            detected_at: START + 65_000,
            replanned_at: Some(START + 65_012),
            rejoined_at: Some(START + 65_400),
            first_step_at: Some(START + 65_620),
            steps_lost: 4,
        };
        let saved = Saved {
            record: Record { gang: Some(gang), attempt: 2, ..Record::default() },
            recoveries: vec![recovery],
            ..Saved::default()
        };
        let status = json!({
            "phase": "Running", "attempt": 2, "record": record::write(&saved),
            "conditions": [condition("Running", "True", "Training", "")],
            "recoveries": [{"cause": "c", "attempt": 1, "stepsLost": 4}],
        });
        JobView::read(&object("a", status))
    }

    #[test]
    fn the_life_of_a_job_reads_as_a_story() {
        let events = [
            told(5_000, "AttemptStarted", "attempt 1 on 2 nodes from step 0"),
            told(65_001, "WorkerLost", "a-a1-1 on worker-2: killed by signal 9"),
            told(65_105, "AttemptStarted", "attempt 2 on 1 node from step 40"),
            told(65_700, "Recovered", "training again"),
            told(90_000, "CheckpointRefused", "step-50: a damaged shard"),
        ];
        let pods = [
            pod(0, 1, 2_000, Some(4_000)),
            pod(1, 1, 2_000, Some(4_000)),
            pod(2, 2, 66_000, None),
        ];
        let expected = "  \
            2026-11-21 (UTC)
  17:00:00      +0s  submitted
  17:00:02      +2s  allocated worker-1..2, after 2.0 s
                     workers started after 2s
  17:00:05      +5s  began attempt 1 on 2 nodes from step 0
  17:01:05     +65s  attempt 1 ended: rank 1 (a-a1-1) was killed
                     planned anew after 12 ms, joined after 400 ms, trained on after 620 ms
                     4 steps were done again
  17:01:05     +65s  began attempt 2 on 1 node from step 40
  17:01:06     +66s  allocated worker-1
                     placed within a second; not started yet: a-a2-2
  17:01:30     +90s  CheckpointRefused: step-50: a damaged shard
";
        let found = text(&entries(&recovering(), &events, &pods));
        assert_eq!(found, expected);
    }

    #[test]
    fn what_events_no_longer_tell_the_record_does() {
        let found = entries(&recovering(), &[], &[]);
        let words: Vec<&str> = found.iter().map(|entry| entry.words.as_str()).collect();
        assert_eq!(
            words,
            [
                "submitted",
                "attempt 1 ended: rank 1 (a-a1-1) was killed",
                "began attempt 2 on 1 node from step 40",
            ]
        );
        let status = json!({"phase": "Complete", "attempt": 1, "conditions": [
            condition("Complete", "True", "AllStepsDone", "300 steps")]});
        let found = entries(&JobView::read(&object("a", status)), &[], &[]);
        assert_eq!(found.last().map(|entry| entry.words.as_str()), Some("complete: 300 steps"));
    }

    #[test]
    fn pods_say_how_they_are() {
        let pod = |status: Value| {
            PodView::read(&json!({"metadata": {"name": "a-a1-0", "creationTimestamp":
                stamp(START), "labels": {"moejob.dev/attempt": "1"}}, "status": status}))
        };
        let state = |state: Value| {
            pod(json!({"phase": "Running", "containerStatuses": [{"state": state}]})).state
        };
        assert_eq!(state(json!({"running": {"startedAt": stamp(START)}})), "Running");
        assert_eq!(state(json!({"terminated": {"exitCode": 0}})), "Completed");
        assert_eq!(state(json!({"terminated": {"exitCode": 75}})), "Fenced");
        assert_eq!(state(json!({"terminated": {"exitCode": 3}})), "Exit 3");
        assert_eq!(state(json!({"terminated": {"exitCode": 137, "signal": 9}})), "Signal 9");
        let waiting = json!({"phase": "Pending", "containerStatuses": [
            {"state": {"waiting": {"reason": "ErrImagePull"}}}]});
        let seen = pod(waiting);
        assert_eq!((seen.state.as_str(), seen.attempt, seen.made), ("ErrImagePull", 1, START));
        let event = json!({"eventTime": "2026-11-21T17:00:05.000000Z", "reason": "Complete",
            "note": "all", "type": "Normal"});
        assert_eq!(Told::read(&event), Some(told(5_000, "Complete", "all")));
    }
}
