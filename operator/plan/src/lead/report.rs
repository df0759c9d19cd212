//! What a job says of itself: status, metrics, and when they are written.

use super::crowd::{YIELD_MAX, YIELD_STARTING_MAX};
use super::outbox::RETRY_MAX;
use super::{
    Blocked, Effect, JobLoop, JobName, JobSeen, Origin, Write, WriteErrorKind, Written, doubled,
};
use crate::engines::{EngineLoss, RankPlace};
use crate::observed::{Millis, Stored};
use crate::reasons;
use crate::record::{self, Saved};
use crate::status;
use crate::track::{Recovery, Tracker};
use moejob_manifest::problem::bounded_lines;
use moejob_manifest::status::{Condition, EngineLossStatus, MoeJobStatus};
use moejob_manifest::words::{one_or_more, several};
use moejob_protocol::communication::CommunicationReport;
use moejob_protocol::report::StepReport;
use std::sync::Arc;

/// Of a condition: a line a node of thousands would make the API server refuse the whole status.
const MESSAGE_BYTES_MAX: usize = 8 << 10;

/// Progress alone is written this often at most.
const PROGRESS_EVERY: Millis = 10_000;
/// While a job comes up one change follows the other; they are written together.
const SETTLE: Millis = 400;
/// While its workers start, the record of the attempt is what follows: it tells all at once.
const SETTLE_STARTING: Millis = 5_000;
/// After a write that failed, doubled with each up to `RETRY_MAX`.
const RETRY_FIRST: Millis = 1_000;
/// After so many refusals for the version behind each other what the watch says counts.
const CONFLICTS_MAX: u32 = 3;

/// While a large gang starts, each of its engines tells its GPU: their table is made anew so often.
const RANKS_EVERY: Millis = 5_000;

/// The figures of one job.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Figures {
    pub namespace: String,
    pub name: String,
    pub phase: String,
    pub step: u64,
    pub loss: Option<f64>,
    pub tokens_per_second: Option<f64>,
    pub expert_imbalance: Option<f64>,
    pub router_entropy: Option<f64>,
    pub dropped_tokens: Option<f64>,
    pub nodes_ready: u32,
    pub nodes_desired: u32,
    /// Members wait for storage to take a checkpoint, or for their data.
    pub checkpoint_degraded: bool,
    pub data_degraded: bool,
    /// Of the newest step that was looked at.
    pub communication: Option<CommunicationReport>,
    /// Of the gang that is under way, ascending; made anew only when it changes.
    pub ranks: Arc<Vec<RankPlace>>,
    /// The last ones, oldest first.
    pub engines_lost: Vec<EngineLoss>,
}

/// The status as it was last written, and what is newer.
#[derive(Default)]
pub(super) struct Report {
    pub generation: i64,
    /// A write is under way; there is one at a time.
    pub in_flight: bool,
    /// When to look whether something is to be written.
    pub due: Option<Millis>,
    /// It is due later than it would be without a crowd.
    pub yields: bool,
    version: String,
    /// What the watch told last, also where it is older.
    seen: String,
    /// Writes behind each other that were refused for their version.
    conflicts: u32,
    /// Without its records, as `pending`: nobody compares them.
    written: MoeJobStatus,
    pending: Option<MoeJobStatus>,
    last_write: Millis,
    changed_at: Option<Millis>,
    not_before: Millis,
    failures: u32,
    /// A status of this leader has been written.
    pub has_written: bool,
    /// What only the next leader reads has changed.
    pub unsaved: bool,
    /// What was last told of a step.
    pub newest: Option<StepReport>,
    /// What was told of it last.
    figures: Figures,
    /// The attempt and the changes of engines of which `figures.ranks` speaks.
    ranks_of: Option<(u32, u64)>,
    /// When they were made.
    ranks_at: Millis,
}

impl Report {
    pub fn new(seen: &JobSeen) -> Report {
        Report {
            generation: seen.generation,
            version: seen.resource_version.clone(),
            written: MoeJobStatus {
                record: String::new(),
                record_more: String::new(),
                ..serde_json::from_value(seen.status.clone()).unwrap_or_default()
            },
            ..Report::default()
        }
    }

    /// The newest checkpoint that the status knows.
    pub fn stored(&self) -> Option<Stored> {
        self.written.checkpoint.clone()
    }

    /// The watch has told a version.
    pub fn on_seen(&mut self, version: &str) {
        self.seen = version.to_string();
        self.on_version(version);
    }

    /// Versions rise; what a watch tells may be older than the last answer to a write.
    fn on_version(&mut self, version: &str) {
        let number = |text: &str| text.parse::<u64>().unwrap_or(u64::MAX);
        if number(version) > number(&self.version) || number(version) == u64::MAX {
            self.version = version.to_string();
            self.not_before = 0;
        }
    }

    /// The object is no older than what this leader knows of it, and its status is not being
    /// written: who has changed it since is somebody else.
    pub fn is_newest(&self, version: &str) -> bool {
        self.has_written && !self.in_flight && self.version == version
    }

    /// When the job was over, if it is.
    pub fn finished_at(&self) -> Option<Millis> {
        finished_at(&self.written)
    }

    /// A status is being written, or is to be.
    pub fn is_under_way(&self) -> bool {
        self.in_flight || self.unsaved || self.due.is_some()
    }

    pub fn write(&mut self, job: &JobName, mut status: MoeJobStatus, now: Millis) -> Write {
        let time = rfc3339(now);
        status::stamp(&mut status.conditions, &self.written.conditions, &time);
        self.in_flight = true;
        self.last_write = now;
        (self.changed_at, self.due, self.unsaved) = (None, None, false);
        let record = std::mem::take(&mut status.record);
        let more = std::mem::take(&mut status.record_more);
        self.pending = Some(status.clone());
        (status.record, status.record_more) = (record, more);
        Write::Status {
            job: job.clone(),
            resource_version: self.version.clone(),
            status: Box::new(status),
        }
    }

    pub fn written(&mut self, written: &Written, now: Millis) {
        self.in_flight = false;
        let pending = self.pending.take();
        match written {
            Ok(version) => {
                if let Some(version) = version {
                    self.on_version(version);
                }
                self.written = pending.unwrap_or_default();
                (self.failures, self.not_before, self.has_written) = (0, 0, true);
                self.conflicts = 0;
            }
            Err(error) => {
                let conflict = error.kind == WriteErrorKind::Conflict;
                self.conflicts = if conflict { self.conflicts + 1 } else { 0 };
                // A watch lags for moments. Versions that stay behind what was written are those of
                // an etcd that was restored from a copy, and begin anew.
                if self.conflicts >= CONFLICTS_MAX && !self.seen.is_empty() {
                    self.version.clone_from(&self.seen);
                }
                self.unsaved = true;
                self.not_before = now + doubled(RETRY_FIRST, self.failures, RETRY_MAX);
                self.failures += 1;
            }
        }
    }

    /// Whether the status is to be written now; else `due` says when to look again.
    fn is_due(
        &mut self,
        status: &MoeJobStatus,
        (starting, crowd): (bool, bool),
        now: Millis,
    ) -> bool {
        (self.due, self.yields) = (None, false);
        if self.in_flight || (same(status, &self.written) && !self.unsaved) {
            return false;
        }
        let (at, yielding) = match gist(status) == gist(&self.written) {
            true => (self.last_write + PROGRESS_EVERY, 0),
            false => {
                let coming_up = matches!(status.phase.as_str(), "Pending" | "Starting");
                let since = *self.changed_at.get_or_insert(now);
                let (settle, most) = match (coming_up, starting) {
                    (true, true) => (SETTLE_STARTING, YIELD_STARTING_MAX),
                    (true, false) => (SETTLE, YIELD_MAX),
                    (false, _) => (0, YIELD_MAX),
                };
                (since + settle, if crowd { since + settle + most } else { 0 })
            }
        };
        let at = at.max(self.not_before);
        self.yields = yielding > at.max(now);
        let at = at.max(yielding);
        self.due = (at > now).then_some(at);
        self.due.is_none()
    }
}

/// When a job with this status was over, if it is.
pub(super) fn finished_at(status: &MoeJobStatus) -> Option<Millis> {
    let over = |of: &&Condition| {
        matches!(of.type_.as_str(), "Complete" | "Failed") && of.status == "True"
    };
    since(status.conditions.iter().find(over)?)
}

fn since(condition: &Condition) -> Option<Millis> {
    let time = condition.last_transition_time.as_deref()?;
    let time: k8s_openapi::jiff::Timestamp = time.parse().ok()?;
    Some(time.as_millisecond().max(0) as Millis)
}

/// All but what only the next leader reads.
fn same(a: &MoeJobStatus, b: &MoeJobStatus) -> bool {
    let plain = |status: &MoeJobStatus| {
        let (record, record_more) = Default::default();
        let mut status = MoeJobStatus { record, record_more, ..status.clone() };
        for condition in &mut status.conditions {
            condition.last_transition_time = None;
        }
        status
    };
    plain(a) == plain(b)
}

/// What is written at once when it changes.
fn gist(status: &MoeJobStatus) -> impl PartialEq + use<'_> {
    let conditions: Vec<(&str, &str, &str)> = (status.conditions.iter())
        .map(|of| (of.type_.as_str(), of.status.as_str(), of.reason.as_str()))
        .collect();
    // Of a job that is over nothing more is to come: its last figures are no progress.
    let over = matches!(status.phase.as_str(), "Complete" | "Failed" | "Suspended");
    let last = over.then_some((status.step, &status.checkpoint, status.loss));
    (
        (status.observed_generation, &status.phase, status.attempt, conditions, last),
        (&status.nodes, &status.mesh, &status.placement, status.restarts, &status.recoveries),
    )
}

fn rfc3339(now: Millis) -> String {
    let time = k8s_openapi::jiff::Timestamp::from_millisecond(now as i64).unwrap_or_default();
    format!("{time:.0}")
}

impl JobLoop {
    /// Status and figures, each when it is time.
    pub(super) fn report_status(&mut self, now: Millis) {
        if self.spec.is_deleted() || !self.place.has_api() {
            return;
        }
        let mut status = self.status_of(&self.tracker, now);
        let ranks = self.ranks(now);
        let figures = self.figures(&status, ranks);
        if figures != self.report.figures {
            self.report.figures = figures.clone();
            self.effects.push(Effect::Figures(Box::new(figures)));
        }
        // Nothing is amiss with them, or a person would be told at once; they are being made, or
        // are there.
        let starting = self.outbox.failure.as_ref().or(self.refusals.standing_back()).is_none()
            && self.pods.troubles().is_empty()
            && self.tracker.observed.record.attempt == 0
            && (self.outbox.busy || !self.tracker.observed.workers.is_empty());
        if self.report.is_due(&status, (starting, self.crowd), now) {
            self.write_record(&self.tracker, &mut status);
            let write = self.report.write(&self.id, status, now);
            self.send_aside(Origin::Status, write);
        }
    }

    /// What the next leader goes on from; of a large gang some 30 KB.
    pub(super) fn write_record(&self, tracker: &Tracker, status: &mut MoeJobStatus) {
        let saved = Saved {
            term: self.term,
            record: tracker.observed.record.clone(),
            recoveries: tracker.recoveries.clone(),
            more: record::More {
                accepted: self.spec.accepted.clone(),
                keyring: self.operator.keyring.clone(),
                machine: self.spec.machine.clone(),
                pods: self.gang_pods(tracker),
                refused: self.refusals.of.clone(),
                rests: self.rests.0.clone(),
                engines_lost: tracker.engines.lost.clone(),
                rest: self.rest.1.clone(),
            },
            rest: self.rest.0.clone(),
        };
        status.record = record::write(&saved);
        status.record_more = record::write_more(&saved.more);
    }

    /// Since when it has a gang, or waits for one, by what its status says; a job of which no
    /// status was written waits since it was created, and one that was suspended since it goes on.
    /// None where the status is yet to say so. Times of a status are whole seconds: a wait begins
    /// at the end of one, so that nobody stops for a job that came in the same second.
    pub(super) fn has_or_waits_since(&self) -> Option<Millis> {
        const REST_OF_SECOND: Millis = 999;
        let has = self.tracker.observed.gang().is_some();
        let find = |kind: &str| self.report.written.conditions.iter().find(|of| of.type_ == kind);
        match find("Planned") {
            None => (!has).then_some(self.created_at + REST_OF_SECOND),
            Some(planned) if has && planned.status == "True" => since(planned),
            Some(planned) if !has && planned.status != "True" => match find("Suspended") {
                Some(suspended) if suspended.status == "True" => None,
                suspended => {
                    let goes_on = suspended.and_then(since).unwrap_or(0);
                    Some(since(planned)?.max(goes_on) + REST_OF_SECOND)
                }
            },
            Some(_) => None,
        }
    }

    /// Without the record, which only what is written needs.
    pub(super) fn status_of(&self, tracker: &Tracker, now: Millis) -> MoeJobStatus {
        let mut status = match self.spec.plannable() {
            Some(job) => {
                let why = &self.why;
                status::status(job, &tracker.observed, &tracker.recoveries, why, now)
            }
            None => blocked_status(self.spec.blocked.as_ref()),
        };
        status.observed_generation = Some(self.report.generation);
        if let Some(report) = &self.report.newest {
            // As people read them: `kubectl get mj` shows every digit there is.
            status.loss = Some(places(report.loss, 4));
            let rate = report.tokens_per_second;
            status.tokens_per_second = Some(places(rate, if rate < 100.0 { 1 } else { 0 }));
        } else {
            status.loss = self.report.written.loss;
            status.tokens_per_second = self.report.written.tokens_per_second;
        }
        status.engines_lost = tracker.engines.lost.iter().map(engine_lost).collect();
        self.explain(&mut status.conditions);
        self.tell_of_drains(&mut status.conditions);
        for condition in &mut status.conditions {
            if condition.message.len() > MESSAGE_BYTES_MAX {
                let lines = condition.message.lines().map(str::to_string);
                condition.message = bounded_lines(lines, MESSAGE_BYTES_MAX);
            }
        }
        status
    }

    /// Where the ranks are: of a large gang some thousand lines, so they are kept while they hold.
    fn ranks(&mut self, now: Millis) -> Arc<Vec<RankPlace>> {
        let Tracker { observed, engines, .. } = &self.tracker;
        let gang = observed.gang().filter(|_| observed.record.outcome.is_none());
        let of = gang.map(|gang| (gang.attempt, engines.changes()));
        let attempt = |of: Option<(u32, u64)>| of.map(|(attempt, _)| attempt);
        let other = attempt(of) != attempt(self.report.ranks_of);
        let old = of != self.report.ranks_of && now >= self.report.ranks_at + RANKS_EVERY;
        if other || old {
            (self.report.ranks_of, self.report.ranks_at) = (of, now);
            return Arc::new(gang.map(|gang| engines.table(gang)).unwrap_or_default());
        }
        Arc::clone(&self.report.figures.ranks)
    }

    /// Why there is no gang, if it is known better than the plan knows it.
    fn explain(&self, conditions: &mut [Condition]) {
        let waits = |of: &&mut Condition| of.type_ == "Planned" && of.reason == "WaitingForNodes";
        let Some(planned) = conditions.iter_mut().find(waits) else { return };
        let troubles = self.pods.troubles();
        let failure = self.outbox.failure.as_ref().or(self.refusals.standing_back());
        if let Some((reason, message)) = failure {
            planned.reason.clone_from(reason);
            planned.message.clone_from(message);
        } else if !troubles.is_empty() {
            planned.reason = reasons::WORKERS_DO_NOT_START.to_string();
            planned.message = troubles.join("\n");
        } else if !self.granted.why.is_empty() {
            let shown = match self.placeholders.count() {
                0 => String::new(),
                1 => "; a placeholder pod shows autoscalers the node that it lacks".to_string(),
                some => {
                    format!("; {some} placeholder pods show autoscalers the nodes that it lacks")
                }
            };
            planned.message = format!("{}{shown}; {}", self.granted.why, planned.message);
        }
    }

    fn figures(&self, status: &MoeJobStatus, ranks: Arc<Vec<RankPlace>>) -> Figures {
        let newest = self.report.newest.as_ref();
        let lasts = self.tracker.observed.record.outcome.is_none();
        Figures {
            namespace: self.id.namespace.clone(),
            name: self.id.name.clone(),
            phase: status.phase.clone(),
            step: status.step,
            loss: status.loss,
            tokens_per_second: status.tokens_per_second,
            expert_imbalance: newest.map(|report| report.expert_imbalance),
            router_entropy: newest.and_then(|report| report.routing.router_entropy),
            dropped_tokens: newest.map(|report| report.routing.dropped_tokens),
            nodes_ready: status.nodes.ready,
            nodes_desired: status.nodes.desired,
            checkpoint_degraded: lasts && !self.tracker.observed.late_checkpoints.is_empty(),
            data_degraded: lasts && !self.tracker.observed.late_data.is_empty(),
            communication: self.slow.newest.clone(),
            ranks,
            engines_lost: self.tracker.engines.lost.clone(),
        }
    }

    pub(super) fn recovered(&mut self, recovery: Recovery, now: Millis) {
        let note = format!(
            "training again {} ms after the loss was noticed: {}; {} {} done again",
            recovery.took(recovery.first_step_at).as_millis(),
            recovery.cause,
            several(recovery.steps_lost, "step"),
            one_or_more(recovery.steps_lost, "was", "were")
        );
        self.event(false, "Recovered", note, now);
        self.effects.push(Effect::Recovered(recovery));
    }
}

fn engine_lost(loss: &EngineLoss) -> EngineLossStatus {
    EngineLossStatus {
        rank: loss.rank,
        node: loss.node.clone(),
        device: loss.device,
        uuid: loss.uuid.clone(),
        attempt: loss.attempt,
        cause: loss.cause.clone(),
        time: rfc3339(loss.at),
    }
}

fn blocked_status(blocked: Option<&Blocked>) -> MoeJobStatus {
    let Some(blocked) = blocked else { return status::blocked("NotYet", String::new()) };
    let status = status::blocked(blocked.reason, blocked.message.clone());
    match blocked.invalid {
        true => MoeJobStatus { phase: "Invalid".to_string(), ..status },
        false => status,
    }
}

/// To so many places behind the point.
fn places(value: f64, count: i32) -> f64 {
    let unit = 10_f64.powi(count);
    let rounded = (value * unit).round() / unit;
    if rounded.is_finite() { rounded } else { value }
}

#[cfg(test)]
mod tests {
    use super::super::WriteError;
    use super::*;

    /// Whether its own workers start, and whether there is a crowd.
    const STARTS: (bool, bool) = (true, false);
    const ALONE: (bool, bool) = (false, false);

    fn report() -> Report {
        let (generation, resource_version) = (1, "10".into());
        Report::new(&JobSeen { generation, resource_version, ..JobSeen::default() })
    }

    fn status(phase: &str, step: u64) -> MoeJobStatus {
        MoeJobStatus { phase: phase.into(), step, ..MoeJobStatus::default() }
    }

    fn write(report: &mut Report, status: MoeJobStatus, now: Millis) -> String {
        let job = JobName { namespace: "n".into(), name: "j".into(), uid: "u".into() };
        match report.write(&job, status, now) {
            Write::Status { resource_version, .. } => resource_version,
            other => panic!("{other:?}"),
        }
    }

    #[test]
    fn numbers_are_as_people_read_them() {
        let shown = |value, count| places(value, count).to_string();
        assert_eq!(shown(0.091_229_461_277_745_74, 4), "0.0912");
        assert_eq!(shown(105_062.235_010_266_13, 0), "105062");
        assert_eq!(shown(f64::NAN, 4), "NaN");
        assert_eq!(shown(f64::MAX, 4), f64::MAX.to_string());
    }

    #[test]
    fn changes_are_written_at_once_and_progress_every_ten_seconds() {
        let mut report = report();
        // While it comes up, what follows closely is written together.
        assert!(!report.is_due(&status("Pending", 0), STARTS, 1_000));
        assert_eq!(report.due, Some(1_000 + SETTLE_STARTING));
        assert!(!report.is_due(&status("Pending", 0), ALONE, 1_000));
        assert_eq!(report.due, Some(1_000 + SETTLE));
        assert!(report.is_due(&status("Starting", 0), ALONE, 1_000 + SETTLE));
        assert_eq!(write(&mut report, status("Starting", 0), 1_500), "10");
        assert!(!report.is_due(&status("Running", 1), ALONE, 1_600), "one write at a time");
        report.written(&Ok(Some("11".into())), 1_700);
        assert!(report.is_due(&status("Running", 1), ALONE, 1_700));
        assert_eq!(write(&mut report, status("Running", 1), 1_700), "11");
        report.written(&Ok(Some("12".into())), 1_800);
        assert!(!report.is_due(&status("Running", 2), ALONE, 1_900), "progress alone");
        assert_eq!(report.due, Some(11_700));
        assert!(report.is_due(&status("Running", 50), ALONE, 11_700));
        assert!(!report.is_due(&status("Running", 1), ALONE, 60_000), "unchanged");
        assert_eq!(report.due, None);
    }

    #[test]
    fn what_only_the_next_leader_reads_is_no_change() {
        let mut report = report();
        write(&mut report, status("Running", 1), 0);
        report.written(&Ok(None), 0);
        let (record, record_more) = ("r".into(), "m".into());
        let other = MoeJobStatus { record, record_more, ..status("Running", 1) };
        assert!(!report.is_due(&other, ALONE, 60_000) && report.due.is_none());
    }

    #[test]
    fn a_refused_write_waits_and_a_newer_version_ends_the_wait() {
        let mut report = report();
        write(&mut report, status("Running", 1), 0);
        let conflict = WriteError { kind: WriteErrorKind::Conflict, message: String::new() };
        report.written(&Err(conflict), 100);
        assert!(!report.is_due(&status("Running", 1), ALONE, 200));
        assert_eq!(report.due, Some(1_100));
        report.on_seen("9");
        assert!(!report.is_due(&status("Running", 1), ALONE, 200), "older than what is known");
        report.on_seen("10");
        assert!(!report.is_due(&status("Running", 1), ALONE, 200), "that it was refused on");
        report.on_seen("15");
        assert!(report.is_due(&status("Running", 1), ALONE, 200));
        assert_eq!(write(&mut report, status("Running", 1), 200), "15");
        // The second in a row waits for longer.
        let slow = WriteError { kind: WriteErrorKind::Slow, message: String::new() };
        report.written(&Err(slow), 300);
        assert!(!report.is_due(&status("Running", 1), ALONE, 2_299));
        assert_eq!(report.due, Some(2_300));
    }

    /// An etcd that was restored from a copy counts on from there: what is known stays higher.
    #[test]
    fn versions_of_a_restored_etcd_are_taken_once_writes_are_refused_again_and_again() {
        let mut report = report();
        let conflict = || WriteError { kind: WriteErrorKind::Conflict, message: String::new() };
        report.on_seen("7");
        let mut at = 0;
        let mut on = |report: &mut Report| {
            at += 600_000;
            assert!(report.is_due(&status("Running", at), ALONE, at));
            let version = write(report, status("Running", at), at);
            report.written(&Err(conflict()), at);
            version
        };
        assert_eq!([on(&mut report), on(&mut report), on(&mut report)], ["10", "10", "10"]);
        assert_eq!(on(&mut report), "7");
    }
}
