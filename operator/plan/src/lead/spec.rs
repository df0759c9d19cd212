//! What a job's object says: its spec, judged, and what the leader before has left in its status.

use super::{Effect, JobLoop, JobSeen, Link, Place};
use crate::allocate::Needs;
use crate::launch;
use crate::fits::{CUT, Change, changes};
use crate::observed::{Millis, Observed, Record, Stored, Wanted};
use crate::placement;
use crate::pods;
use crate::reasons;
use crate::record::{self, Accepted, Machine, Saved};
use moejob_manifest::Job;
use moejob_manifest::changes;
use moejob_manifest::cost::CHANGES_LED_MAX;
use moejob_manifest::devices;
use moejob_manifest::identity;
use moejob_manifest::job::Venue;
use moejob_manifest::problem::{Problem, bounded_lines};
use moejob_manifest::profile::Profiles;
use moejob_manifest::spec::MoeJobSpec;
use moejob_protocol::config::WorkerConfig;
use serde_json::Value;
use std::sync::LazyLock;
use std::time::Duration;

/// Why a job is blocked that is on its way out.
const DELETED: &str = "Deleted";

/// Numbers of nodes that do not work, of which a condition tells why. There may be 4,096 of them,
/// and it is written into the job's status.
const SKIPPED_TOLD: usize = 8;

/// Why a job is not planned at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    pub invalid: bool,
    pub reason: &'static str,
    pub message: String,
}

/// The spec as it was accepted last.
#[derive(Default)]
pub(super) struct Spec {
    job: Option<Box<Job>>,
    pub needs: Needs,
    /// The newest that was seen, whether accepted or not.
    generation: i64,
    pub accepted: Option<Accepted>,
    pub blocked: Option<Blocked>,
    /// It was planned, and is on its way out: it is saved, and ends.
    pub deleted: bool,
    /// What the job's profile said when it was accepted.
    pub machine: Option<Machine>,
    /// The profiles have changed since it was read.
    pub is_stale: bool,
}

impl Spec {
    /// The job that is planned.
    pub fn plannable(&self) -> Option<&Job> {
        self.job.as_deref().filter(|_| self.blocked.is_none())
    }

    /// Of the spec that is in force.
    pub fn generation(&self) -> i64 {
        self.accepted.as_ref().map_or(self.generation, |accepted| accepted.generation)
    }

    pub fn is_deleted(&self) -> bool {
        self.blocked.as_ref().is_some_and(|blocked| blocked.reason == DELETED)
    }

    /// After which a silent worker is lost, in milliseconds.
    pub fn heartbeat_timeout(&self) -> Millis {
        self.job.as_ref().map_or(3_000, |job| job.recovery.heartbeat_timeout)
    }
}

impl JobLoop {
    /// The object has changed. Own writes of status change nothing of interest.
    pub(super) fn on_spec(&mut self, seen: &JobSeen, now: Millis) {
        self.report.on_seen(&seen.resource_version);
        self.look_for_others(seen, now);
        if seen.deleted && self.spec.job.is_some() {
            // A finalizer of others may keep the object for long, and its pods with it.
            self.tracker.observed.interrupt = true;
            self.spec.deleted = true;
        } else if seen.deleted {
            self.spec.blocked = Some(Blocked {
                invalid: false,
                reason: DELETED,
                message: "the job is being deleted".to_string(),
            });
        } else if seen.generation != self.spec.generation || self.spec.is_stale {
            self.read_spec(seen, now);
        }
        self.outbox.job_changed();
        self.dirty = true;
    }

    pub(super) fn read_spec(&mut self, seen: &JobSeen, now: Millis) {
        self.spec.generation = seen.generation;
        self.spec.is_stale = false;
        self.dirty = true;
        let before = self.spec.accepted.as_ref();
        let known = before.map(|accepted| accepted.generation);
        let profiles = &*self.operator.profiles;
        let judged = match &self.place {
            Place::Cluster(_) => judge_seen(seen, profiles),
            Place::Machine(local) => Ok(local.job.clone()),
        };
        let judged = judged.and_then(|job| self.on_its_machine(job, seen));
        let (job, generation) = match judged {
            Ok(job) => (job, seen.generation),
            Err(blocked) => {
                // An edit that is refused changes nothing, also for a leader that comes after it.
                let accepted = before.filter(|_| self.spec.job.is_none());
                let was = accepted.and_then(|of| {
                    let was = of.judge(seen, profiles);
                    let was = was.and_then(|job| self.on_its_machine(job, seen)).ok()?;
                    Some((was, of.generation))
                });
                let (reason, message) = (blocked.reason, blocked.message.clone());
                self.event(true, reason, message, now);
                match was {
                    Some(was) => was,
                    None if self.spec.job.is_some() => return,
                    None => {
                        self.spec.blocked = Some(blocked);
                        return;
                    }
                }
            }
        };
        let job = if self.operator.stand_in { job.stand_in() } else { job };
        if generation == seen.generation {
            // Once for each version of the spec, by whoever leads then.
            for warning in job.warnings.iter().filter(|_| known != Some(generation)) {
                self.event(true, "SpecWarning", warning.sentence(), now);
            }
            let values = changes::values(&seen.spec);
            self.spec.accepted = Some(Accepted { generation, values });
        }
        self.spec.blocked = None;
        self.report.generation = generation;
        let observed = &mut self.tracker.observed;
        observed.wanted = launch::wanted(&job, self.place.venue());
        if let Some(standard) = &mut observed.wanted.preflight {
            standard.namespace = self.id.namespace.clone();
            let image = job.kubernetes.image.as_ref();
            standard.image = image.unwrap_or(&self.operator.image.0).clone();
        }
        observed.template = self.place.template(&job, &self.id.uid);
        let timeout = Duration::from_millis(job.recovery.heartbeat_timeout);
        self.effects.push(Effect::Link(Link::HeartbeatTimeout(timeout)));
        self.effects.push(Effect::Link(Link::Ranks(observed.ranks_max())));
        self.spec.needs = Needs::of(&job);
        self.keep_machine(&job, now);
        self.spec.job = Some(Box::new(job));
    }
}

impl Accepted {
    /// The job that was accepted: what cannot change is as it is, what can change as it was.
    fn judge(&self, seen: &JobSeen, profiles: &Profiles) -> Result<Job, Blocked> {
        let mut spec = seen.spec.clone();
        changes::put(&mut spec, &self.values);
        judge(&seen.name, &spec, profiles)
    }
}

fn judge_seen(seen: &JobSeen, profiles: &Profiles) -> Result<Job, Blocked> {
    if let Some(unread) = &seen.unread {
        let message = format!("{unread}; keep data out of it");
        return Err(Blocked { invalid: true, reason: reasons::INVALID_SPEC, message });
    }
    judge(&seen.name, &seen.spec, profiles)
}

/// The record of the leader before.
pub(super) fn restored(status: &Value) -> Result<Saved, record::RecordError> {
    let text = |field: &str| status[field].as_str().unwrap_or_default().to_string();
    record::restore(&text("record"), &text("recordMore"))
}

/// The name of the key by which the pods of a job were sealed whose gang is under way, as its
/// status tells. A status that is not understood tells nothing.
pub(super) fn sealed_by(status: &Value) -> Option<String> {
    let Saved { record, more, .. } = restored(status).ok()?;
    let gang = record.gang.filter(|gang| gang.ended.is_none() && record.outcome.is_none());
    gang.map(|_| more.keyring).filter(|keyring| !keyring.is_empty())
}

/// The job, or why there is none to plan.
///
/// # Errors
/// In the words of its condition.
pub fn judge(name: &str, spec: &Value, profiles: &Profiles) -> Result<Job, Blocked> {
    let blocked = |invalid: bool, reason: &'static str, message: String| {
        Err(Blocked { invalid, reason, message })
    };
    let spec: MoeJobSpec = match serde_json::from_value(spec.clone()) {
        Ok(spec) => spec,
        Err(error) => return blocked(true, reasons::INVALID_SPEC, format!("spec: {error}")),
    };
    let job = match Job::from_spec(name, &spec, profiles) {
        Ok(job) => job,
        Err(problems) => return blocked(true, reasons::INVALID_SPEC, sentences(&problems)),
    };
    let mut unsupported = job.unsupported();
    unsupported.extend(devices::on_cluster(&job));
    if !unsupported.is_empty() {
        return blocked(true, "Unsupported", sentences(&unsupported));
    }
    if let Some(message) = pods::not_durable(&job) {
        return blocked(false, "NoDurableCheckpoint", message);
    }
    let (sizes, skipped) = placement::sizes(&job);
    if sizes.is_empty() {
        let mut lines: Vec<String> =
            skipped.iter().take(SKIPPED_TOLD).map(placement::Skipped::sentence).collect();
        if let Some(more) = skipped.len().checked_sub(SKIPPED_TOLD).filter(|more| *more > 0) {
            lines.push(format!("and {more} more numbers of nodes"));
        }
        let found = changes(&job, CHANGES_LED_MAX);
        let ways: Vec<String> = found.changes.iter().map(Change::sentence).collect();
        let ways = match (ways.is_empty(), found.cut) {
            (false, cut) => {
                let cut = if cut { CUT } else { "" };
                format!("\nwhat would change it{cut}: {}", ways.join("; or "))
            }
            (true, true) => "\n`moejob plan` tries more of what would change it".to_string(),
            (true, false) => String::new(),
        };
        let message = lines.join("\n") + &ways;
        return blocked(false, "NoSizeFits", message);
    }
    Ok(job)
}

/// Of the problems of a spec, in a condition of its status.
const PROBLEMS_BYTES_MAX: usize = 8 << 10;

fn sentences(problems: &[Problem]) -> String {
    bounded_lines(problems.iter().map(Problem::sentence), PROBLEMS_BYTES_MAX)
}

/// Before the spec is read and the first pod is seen.
pub(super) fn nothing_observed(job_uid: &str, record: Record, stored: Option<Stored>) -> Observed {
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
        preflight: None,
        venue: Venue::Kubernetes,
    };
    let template = WorkerConfig { job_uid: job_uid.to_string(), ..EMPTY_TEMPLATE.clone() };
    Observed { record, stored, ..Observed::new(wanted, template) }
}

/// A template for a job that has none yet; read once.
static EMPTY_TEMPLATE: LazyLock<WorkerConfig> = LazyLock::new(|| {
    let job = identity::least();
    launch::template(&job, Venue::Kubernetes, "", &pods::places(&job))
});
