//! What of a job outlives its leader, as one line of JSON: it stands in `status.record`, and the
//! next leader goes on from it.
//!
//! Times are milliseconds since 1970 there: a leader on Kubernetes counts so.

use crate::observed::{Gang, Millis, Outcome, Record, StopCause};
use crate::track::Recovery;
use moejob_protocol::config::Member;
use moejob_protocol::layout::Layout;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value};
use std::collections::BTreeMap;

/// Of this text; another one is not understood.
const VERSION: u32 = 1;

/// Longer texts are nobody's record: a gang of 4,096 takes half of it.
pub const RECORD_BYTES_MAX: usize = 512 << 10;

/// What is restored.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Saved {
    /// Of the leader that wrote it.
    pub term: u64,
    pub record: Record,
    pub recoveries: Vec<Recovery>,
    pub more: More,
    /// Fields of a newer operator, written back as they are.
    pub rest: Rest,
}

/// What version 1 of the record has no place for: releases before refuse a record with another
/// field, and must be able to read what this one leaves. It stands in a field of its own.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct More {
    pub accepted: Option<Accepted>,
    /// Names the key by which the job's pods were sealed.
    pub keyring: String,
    pub rest: Rest,
}

/// Fields by name.
pub type Rest = BTreeMap<String, Value>;

/// The newest spec that was accepted.
#[derive(Clone, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Accepted {
    pub generation: i64,
    /// Of the fields that may change, by their paths.
    pub values: Map<String, Value>,
}

#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum RecordError {
    #[error("status.record is not understood: {0}; restore it, or delete the job's status")]
    Text(String),
    #[error("status.record is of version {0}, this operator knows {VERSION}; use a newer one")]
    Version(u32),
}

/// The line for `status.record`.
pub fn write(saved: &Saved) -> String {
    let line = Line::of(saved);
    serde_json::to_string(&line).unwrap_or_default()
}

/// # Errors
/// When the text is not such a line.
pub fn read(text: &str) -> Result<Saved, RecordError> {
    Ok(versioned::<Line>(text)?.saved())
}

/// The line for `status.recordMore`.
pub fn write_more(saved: &Saved) -> String {
    let More { accepted, keyring, rest } = saved.more.clone();
    serde_json::to_string(&MoreLine { v: VERSION, accepted, keyring, rest }).unwrap_or_default()
}

/// Both texts, of which each may be missing.
///
/// # Errors
/// When one of them is not understood: then nothing may be done for the job.
pub fn restore(record: &str, more: &str) -> Result<Saved, RecordError> {
    let mut saved = match record {
        "" => Saved::default(),
        text => read(text)?,
    };
    if !more.is_empty() {
        let MoreLine { accepted, keyring, rest, .. } = versioned(more)?;
        saved.more = More { accepted, keyring, rest };
    }
    Ok(saved)
}

fn versioned<T: for<'de> Deserialize<'de>>(text: &str) -> Result<T, RecordError> {
    #[derive(Deserialize)]
    struct Versioned {
        v: u32,
    }
    if text.len() > RECORD_BYTES_MAX {
        return Err(RecordError::Text(format!("it has {} bytes", text.len())));
    }
    let wrong = |error: serde_json::Error| RecordError::Text(error.to_string());
    let Versioned { v } = serde_json::from_str(text).map_err(wrong)?;
    if v != VERSION {
        return Err(RecordError::Version(v));
    }
    serde_json::from_str(text).map_err(wrong)
}

impl Saved {
    /// Times of another machine's clock, which may run ahead of this one's: none of them is later
    /// than now, or what is counted from them would wait for as long as the clocks differ.
    pub fn no_later_than(&mut self, now: Millis) {
        let clamp = |at: &mut Millis| *at = (*at).min(now);
        let record = &mut self.record;
        clamp(&mut record.progressed_at);
        record.restarts.iter_mut().for_each(clamp);
        record.stopping_since.iter_mut().for_each(clamp);
        record.start_failures.iter_mut().for_each(clamp);
        record.partings.iter_mut().for_each(|(.., at)| clamp(at));
        if let Some(gang) = &mut record.gang {
            clamp(&mut gang.started_at);
            gang.stop_requested.iter_mut().for_each(|(_, at)| clamp(at));
            gang.broken.iter_mut().for_each(|(at, _)| clamp(at));
            gang.ended.iter_mut().for_each(clamp);
        }
        for recovery in &mut self.recoveries {
            clamp(&mut recovery.detected_at);
            let Recovery { replanned_at, rejoined_at, first_step_at, .. } = recovery;
            let times = [replanned_at, rejoined_at, first_step_at];
            times.into_iter().flatten().for_each(clamp);
        }
    }
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct MoreLine {
    v: u32,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    accepted: Option<Accepted>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    keyring: String,
    #[serde(flatten)]
    rest: Rest,
}

/// Fields that are as they were at first are left out.
#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct Line {
    v: u32,
    term: u64,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    job_uid: String,
    attempt: u32,
    births: u32,
    step: u64,
    progressed_at: Millis,
    step_median: Millis,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stopping_since: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    outcome: Option<OutcomeLine>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    gang: Option<GangLine>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    layouts: Vec<(u32, Layout)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    restarts: Vec<Millis>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    start_failures: Vec<Millis>,
    #[serde(default, skip_serializing_if = "String::is_empty")]
    start_failure: String,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    partings: Vec<(String, String, Millis)>,
    #[serde(default, skip_serializing_if = "Vec::is_empty")]
    recoveries: Vec<RecoveryLine>,
    #[serde(flatten)]
    rest: Rest,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct GangLine {
    attempt: u32,
    digest: String,
    layout: Layout,
    /// `[worker, node, address]` in rank order.
    members: Vec<(String, String, String)>,
    resumed_at: u64,
    started_at: Millis,
    stepped: bool,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    stop_requested: Option<(Stop, Millis)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    broken: Option<(Millis, String)>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    ended: Option<Millis>,
}

#[derive(Clone, Copy, Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum Stop {
    Growth,
    Move,
    Shrink,
    Suspend,
    Interrupt,
    Withdrawn,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
enum OutcomeLine {
    Complete { step: u64 },
    Failed { exit_code: i32, reason: String, message: String },
    Suspended,
    Interrupted,
}

#[derive(Serialize, Deserialize)]
#[serde(rename_all = "camelCase")]
struct RecoveryLine {
    cause: String,
    attempt: u32,
    detected_at: Millis,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    replanned_at: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    rejoined_at: Option<Millis>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    first_step_at: Option<Millis>,
    steps_lost: u64,
}

impl Line {
    fn of(saved: &Saved) -> Line {
        let Saved { term, record, recoveries, rest, .. } = saved;
        Line {
            v: VERSION,
            term: *term,
            job_uid: record.job_uid.clone(),
            attempt: record.attempt,
            births: record.births,
            step: record.step,
            progressed_at: record.progressed_at,
            step_median: record.step_median,
            stopping_since: record.stopping_since,
            outcome: record.outcome.as_ref().map(outcome_line),
            gang: record.gang.as_ref().map(gang_line),
            layouts: record.layouts.clone(),
            restarts: record.restarts.clone(),
            start_failures: record.start_failures.clone(),
            start_failure: record.start_failure.clone(),
            partings: record.partings.clone(),
            recoveries: recoveries.iter().map(recovery_line).collect(),
            rest: rest.clone(),
        }
    }

    fn saved(self) -> Saved {
        let record = Record {
            job_uid: self.job_uid,
            outcome: self.outcome.map(outcome),
            attempt: self.attempt,
            gang: self.gang.map(gang),
            layouts: self.layouts,
            restarts: self.restarts,
            stopping_since: self.stopping_since,
            step: self.step,
            progressed_at: self.progressed_at,
            step_median: self.step_median,
            births: self.births,
            start_failures: self.start_failures,
            start_failure: self.start_failure,
            partings: self.partings,
            device_failures: Vec::new(),
        };
        let recoveries = self.recoveries.into_iter().map(recovery).collect();
        let (more, rest) = (More::default(), self.rest);
        Saved { term: self.term, record, recoveries, more, rest }
    }
}

fn gang_line(gang: &Gang) -> GangLine {
    let member = |member: &Member| {
        (member.worker.clone(), member.node.clone(), member.address.clone())
    };
    GangLine {
        attempt: gang.attempt,
        digest: gang.digest.clone(),
        layout: gang.layout.clone(),
        members: gang.members.iter().map(member).collect(),
        resumed_at: gang.resumed_at,
        started_at: gang.started_at,
        stepped: gang.stepped,
        stop_requested: gang.stop_requested.map(|(cause, at)| (stop(cause), at)),
        broken: gang.broken.clone(),
        ended: gang.ended,
    }
}

fn gang(line: GangLine) -> Gang {
    let member = |(worker, node, address)| Member { rank: 0, worker, node, address };
    let mut gang = Gang {
        attempt: line.attempt,
        digest: line.digest,
        layout: line.layout,
        members: line.members.into_iter().map(member).collect(),
        resumed_at: line.resumed_at,
        started_at: line.started_at,
        stepped: line.stepped,
        stop_requested: line.stop_requested.map(|(stop, at)| (cause(stop), at)),
        broken: line.broken,
        ended: line.ended,
        inherited: false,
    };
    let ranks = gang.ranks_a_worker();
    for (index, member) in (0..).zip(&mut gang.members) {
        member.rank = index * ranks;
    }
    gang
}

fn stop(cause: StopCause) -> Stop {
    match cause {
        StopCause::Growth => Stop::Growth,
        StopCause::Move => Stop::Move,
        StopCause::Shrink => Stop::Shrink,
        StopCause::Suspend => Stop::Suspend,
        StopCause::Interrupt => Stop::Interrupt,
        StopCause::Withdrawn => Stop::Withdrawn,
    }
}

fn cause(stop: Stop) -> StopCause {
    match stop {
        Stop::Growth => StopCause::Growth,
        Stop::Move => StopCause::Move,
        Stop::Shrink => StopCause::Shrink,
        Stop::Suspend => StopCause::Suspend,
        Stop::Interrupt => StopCause::Interrupt,
        Stop::Withdrawn => StopCause::Withdrawn,
    }
}

fn outcome_line(outcome: &Outcome) -> OutcomeLine {
    match outcome {
        Outcome::Complete { step } => OutcomeLine::Complete { step: *step },
        Outcome::Failed { exit_code, reason, message } => OutcomeLine::Failed {
            exit_code: *exit_code,
            reason: reason.to_string(),
            message: message.clone(),
        },
        Outcome::Suspended => OutcomeLine::Suspended,
        Outcome::Interrupted => OutcomeLine::Interrupted,
    }
}

/// Reasons are stable words; one that this operator does not know was another version's.
const REASONS: [&str; 4] =
    ["InvalidSpec", "DataOrCheckpointRefused", "RestartBudgetUsedUp", "WorkersDoNotStart"];

fn outcome(line: OutcomeLine) -> Outcome {
    match line {
        OutcomeLine::Complete { step } => Outcome::Complete { step },
        OutcomeLine::Failed { exit_code, reason, message } => {
            let known = REASONS.iter().find(|known| **known == reason);
            Outcome::Failed { exit_code, reason: known.copied().unwrap_or("Failed"), message }
        }
        OutcomeLine::Suspended => Outcome::Suspended,
        OutcomeLine::Interrupted => Outcome::Interrupted,
    }
}

fn recovery_line(recovery: &Recovery) -> RecoveryLine {
    RecoveryLine {
        cause: recovery.cause.clone(),
        attempt: recovery.attempt,
        detected_at: recovery.detected_at,
        replanned_at: recovery.replanned_at,
        rejoined_at: recovery.rejoined_at,
        first_step_at: recovery.first_step_at,
        steps_lost: recovery.steps_lost,
    }
}

fn recovery(line: RecoveryLine) -> Recovery {
    Recovery {
        cause: line.cause,
        attempt: line.attempt,
        detected_at: line.detected_at,
        replanned_at: line.replanned_at,
        rejoined_at: line.rejoined_at,
        first_step_at: line.first_step_at,
        steps_lost: line.steps_lost,
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use moejob_protocol::Mesh;

    fn full() -> Saved {
        let layout = Layout::contiguous(Mesh::data_parallel(2, 2));
        let member = |rank: u32| Member {
            rank,
            worker: format!("job-{rank}"),
            node: format!("node-{rank}"),
            address: format!("10.0.0.{rank}:7777"),
        };
        let gang = Gang {
            attempt: 3,
            digest: "d".into(),
            layout: layout.clone(),
            members: vec![member(0), member(1)],
            resumed_at: 10,
            started_at: 1_700_000_000_000,
            stepped: true,
            stop_requested: Some((StopCause::Withdrawn, 5)),
            broken: Some((7, "rank 1 went silent".into())),
            ended: Some(9),
            inherited: false,
        };
        let record = Record {
            job_uid: "uid".into(),
            outcome: Some(Outcome::Failed {
                exit_code: 3,
                reason: "DataOrCheckpointRefused",
                message: "no".into(),
            }),
            attempt: 3,
            gang: Some(gang),
            layouts: vec![(2, layout)],
            restarts: vec![1, 2],
            stopping_since: Some(4),
            step: 12,
            progressed_at: 6,
            step_median: 70,
            births: 5,
            start_failures: vec![3],
            start_failure: "job-4 ended".into(),
            partings: vec![("node-0".into(), "node-1".into(), 2)],
            device_failures: Vec::new(),
        };
        let recovery = Recovery {
            cause: "lost".into(),
            attempt: 2,
            detected_at: 1,
            replanned_at: Some(2),
            rejoined_at: Some(3),
            first_step_at: None,
            steps_lost: 3,
        };
        let (more, rest) = Default::default();
        Saved { term: 8, record, recoveries: vec![recovery], more, rest }
    }

    #[test]
    fn all_of_it_survives() {
        for saved in [full(), Saved::default()] {
            assert_eq!(read(&write(&saved)), Ok(saved));
        }
    }

    #[test]
    fn what_a_newer_operator_adds_is_written_back() {
        let text = write(&full()).replacen('{', "{\"newer\":[1,2],", 1);
        let saved = read(&text).expect("readable");
        assert!(write(&saved).contains("\"newer\":[1,2]"));
        let more = "{\"v\":1,\"newer\":{\"a\":1},\"keyring\":\"k\"}";
        let saved = restore(&text, more).expect("readable");
        assert_eq!(saved.more.keyring, "k");
        assert!(write_more(&saved).contains("\"newer\":{\"a\":1}"));
        assert_eq!(restore(&text, "{\"v\":7}"), Err(RecordError::Version(7)));
        assert!(matches!(restore(&text, "x"), Err(RecordError::Text(_))));
        assert_eq!(restore("", ""), Ok(Saved::default()));
    }

    /// What this release writes, a release before reads: it refuses any field that it does not
    /// know.
    #[test]
    fn the_record_has_no_field_that_releases_before_refuse() {
        const KNOWN: [&str; 17] = [
            "v", "term", "jobUid", "attempt", "births", "step", "progressedAt", "stepMedian",
            "stoppingSince", "outcome", "gang", "layouts", "restarts", "startFailures",
            "startFailure", "partings", "recoveries",
        ];
        const GANG: [&str; 10] = [
            "attempt", "digest", "layout", "members", "resumedAt", "startedAt", "stepped",
            "stopRequested", "broken", "ended",
        ];
        let value: Value = serde_json::from_str(&write(&full())).expect("JSON");
        let unknown = |value: &Value, known: &[&str]| {
            let fields = value.as_object().expect("an object").keys();
            fields.filter(|name| !known.contains(&name.as_str())).count()
        };
        assert_eq!((unknown(&value, &KNOWN), unknown(&value["gang"], &GANG)), (0, 0));
    }

    #[test]
    fn no_time_is_later_than_now() {
        let mut saved = full();
        let now = 3;
        saved.no_later_than(now);
        let text = format!("{:?}", saved.record.gang);
        let gang = saved.record.gang.expect("a gang");
        assert_eq!((gang.started_at, gang.ended), (now, Some(now)), "{text}");
        assert_eq!(gang.stop_requested.map(|(_, at)| at), Some(now));
        assert_eq!(gang.broken.map(|(at, _)| at), Some(now));
        assert_eq!((saved.record.progressed_at, saved.record.stopping_since), (now, Some(now)));
        assert_eq!(saved.record.restarts, [1, 2], "what is past stays");
        assert_eq!(saved.recoveries[0].rejoined_at, Some(now));
    }

    #[test]
    fn a_gang_of_512_takes_little_of_an_objects_size() {
        let mut saved = full();
        if let Some(gang) = &mut saved.record.gang {
            gang.members = (0..512)
                .map(|rank| Member { rank, ..gang.members[0].clone() })
                .collect();
        }
        assert!(write(&saved).len() < 32 << 10, "{}", write(&saved).len());
    }

    #[test]
    fn what_is_not_understood_is_refused_by_name() {
        let newer = write(&full()).replacen("\"v\":1", "\"v\":2", 1);
        assert_eq!(read(&newer), Err(RecordError::Version(2)));
        for text in ["", "{}", "[]", "{\"v\":1}"] {
            assert!(matches!(read(text), Err(RecordError::Text(_))), "{text}");
        }
    }
}
