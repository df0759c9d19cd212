//! One job as its leader leads it: what happens goes in, what is to be done comes out.
//!
//! ```text
//! spec, granted nodes, pods, streams, results of writes --Event--> JobLoop::on(event, now)
//! JobLoop::turn(now) -> Turn { effects, due }
//! inside: Tracker -> plan(&Observed, now) -> outbox of actions -> orders, or a batch of writes
//! ```
//!
//! Pure: whoever holds it executes the effects in their order, retries nothing and chooses nothing.
//! While a batch with actions is under way nothing else happens to the job: what arrives waits, so
//! that the tracker sees the same order of things as in a local run.

mod crowd;
mod demands;
mod digest;
mod drains;
mod event_log;
mod fence;
mod gang_pods;
mod machine;
mod objects;
mod outbox;
mod place;
mod pairs;
mod placeholders;
mod pods;
mod refusals;
mod report;
mod rests;
mod results;
mod slow;
mod spec;
mod streams;
mod turn;

pub use crowd::is_crowd;
pub use demands::demands;
pub use digest::Digest;
pub use event_log::{EVENTS_BURST, EVENT_EVERY};
pub use fence::{FENCED_BY_RECORD, Fence, unfit};
pub use outbox::FRAMES_WAITING_MAX;
pub use place::{Local, Place};
pub use pods::{ENDED_MAX, FORCE_AFTER, OUT_OF_MEMORY, REDIAL, SILENT_AVOID};
pub use refusals::PATIENCE;
pub use report::Figures;
pub use slow::SLOW_LINK;
pub use spec::{Blocked, judge};

use crate::allocate::{Claim, Granted};
use crate::decide::Action;
use crate::engines::Engines;
use crate::observed::{Millis, Record};
use crate::pods::{Birth, Surroundings, placeholder_number};
use crate::preflight::{News, Passes};
use crate::record::{GangPods, Rest};
use crate::track::{Recovery, Tracker};
use moejob_manifest::Job;
use moejob_manifest::profile::Profiles;
use moejob_manifest::status::MoeJobStatus;
use moejob_protocol::config::WorkerConfig;
use moejob_protocol::message::{Down, Hello, Up};
use serde_json::Value;
use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::Duration;

/// Whose a pod is, or which job is meant: everything of a job is kept under this.
pub type Owner = Arc<str>;

/// A pod counts for a job of its own namespace alone, whatever uid its label has. The uid comes
/// first, so that jobs of one age are in the order of their uids.
pub fn owner(namespace: &str, job_uid: &str) -> Owner {
    Arc::from(format!("{job_uid}@{namespace}"))
}

#[derive(Clone, Debug, PartialEq, Eq)]
pub struct JobName {
    pub namespace: String,
    pub name: String,
    pub uid: String,
}

/// A MoeJob as the API server has it; not yet judged.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct JobSeen {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub generation: i64,
    pub resource_version: String,
    pub created_at: Millis,
    pub deleted: bool,
    /// Null where it was too much to be read.
    pub spec: Value,
    /// What was too much of it: its path, how much it is and how much may be.
    pub unread: Option<String>,
    pub status: Value,
}

impl JobSeen {
    pub fn owner(&self) -> Owner {
        owner(&self.namespace, &self.uid)
    }
}

/// A pod that carries our seal, or a process of this machine.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct WorkerPod {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    /// Of the job that it says it is of: its own namespace, and the label's uid.
    pub owner: Owner,
    /// None until it is bound.
    pub node: Option<Arc<str>>,
    /// The node that it is meant for, also before it is bound.
    pub meant_for: Option<String>,
    /// With its port, unless that is the one of all pods.
    pub address: Option<String>,
    /// Its container runs or ran.
    pub started: bool,
    /// It is bound, and neither volumes nor network are there yet: that comes before the image.
    pub mounting: bool,
    /// Why its container does not start, as the kubelet says: `ImagePullBackOff: ...`.
    pub trouble: Option<String>,
    /// What its container runs.
    pub image: Option<Arc<str>>,
    /// Exit code and words of its end.
    pub ended: Option<(Option<i32>, String)>,
    /// When its deletion was to be complete.
    pub deletion: Option<Millis>,
    /// The scheduler cannot place it: why.
    pub unschedulable: Option<String>,
}

impl WorkerPod {
    /// It stands for a node that is missing, and no worker is in it.
    pub fn is_placeholder(&self) -> bool {
        placeholder_number(&self.name).is_some()
    }
}

/// What all jobs of an operator share.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Operator {
    /// Image and pull policy of its own container.
    pub image: (String, Option<String>),
    /// Its own.
    pub namespace: String,
    /// What new pods trust; PEM.
    pub trusted: String,
    /// Names the key of the seals, without telling it.
    pub keyring: String,
    /// Engines compute on processors in place of GPUs, see [`Job::stand_in`].
    pub stand_in: bool,
    /// The kinds of machine that jobs may name.
    pub profiles: Arc<Profiles>,
    /// Pods of all jobs together, at most, that stand for nodes which are missing.
    pub placeholders_max: u32,
}

/// What a stream says of a worker.
#[derive(Debug)]
pub enum Said {
    /// It has proven who it is.
    Opened(Hello),
    Up { attempt: u32, up: Up },
    /// Nothing came for the heartbeat timeout; the stream is still open.
    Silent,
    /// The stream has ended; this is its last word.
    Ended { why: Ending, reason: String },
}

/// How a stream ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Ending {
    /// Reset, closed, not reached, not believed.
    Broken,
    /// Its listener is not there any more: twice refused, 50 ms apart, where it was before.
    Refused,
    /// The API server did not say whether to believe it, which is none of its fault.
    Unjudged,
    /// It is there, and there is no protocol that both sides speak.
    Unspoken,
}

#[derive(Debug)]
pub enum Event {
    /// The job's object, new or changed.
    Spec(Box<JobSeen>),
    /// What the allocation gives it.
    Granted(Granted),
    /// A pod is otherwise than before.
    Pod(Box<WorkerPod>),
    PodGone(String),
    Stream { name: String, said: Said },
    Done { aside: bool, results: Vec<(Origin, Written)> },
    /// When the API server last answered.
    Api { heard: Millis },
    /// Whether pods of all jobs come up that other writes would delay, see [`is_crowd`].
    Crowd(bool),
    /// The kinds of machine have changed; the job's object follows.
    Profiles(Arc<Profiles>),
    /// Which nodes have passed a preflight of any job of its namespace.
    Passes(Passes),
    /// Somebody wants the whole job to end, with a checkpoint.
    Stop,
}

/// One thing to be done.
#[derive(Debug)]
pub enum Effect {
    Link(Link),
    Write(Batch),
    /// For the allocation's memory of nodes.
    Memory(Memo),
    /// For the log.
    Note { warning: bool, text: String },
    /// A worker is lost.
    Lost { name: String, node: String, cause: String },
    /// A recovery is complete.
    Recovered(Recovery),
    Figures(Box<Figures>),
}

/// What is to be done with the streams to the workers.
#[derive(Debug)]
pub enum Link {
    /// Opens a stream to a worker's listener, in place of an older one. `again`: it was there.
    Dial { name: String, address: String, pod: PodIdentity, again: bool },
    Close { name: String },
    Send { name: String, attempt: u32, body: Down },
    /// A certificate for the attempt, then its configuration.
    Configure { name: String, rank: u32, config: Arc<WorkerConfig> },
    HeartbeatTimeout(Duration),
    /// Ranks that the job can have, by its spec and by gangs whose snapshots may still be held.
    Ranks(u32),
}

/// What the allocation is to remember of a node for this job.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Memo {
    /// A pod is being made there.
    Decided(String),
    Avoid { node: String, until: Millis },
    /// Nodes have passed a preflight, or pass no more.
    Passed(Vec<News>),
}

/// The pod that is dialled.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct PodIdentity {
    pub namespace: String,
    pub name: String,
    pub uid: String,
    pub node: String,
}

/// What a write is for.
#[derive(Debug)]
pub enum Origin {
    Action(Action),
    /// A status that must be durable before the action counts as done.
    Recorded(Box<Action>),
    Status,
    /// The NetworkPolicy for this generation.
    Policy(i64),
    Budget(i64),
    Event,
    /// A pod that stands for a node which is missing, by its name.
    Placeholder(String),
    /// A pod's deletion, by its name.
    Deletion(String),
    Expiry,
}

/// One write.
#[derive(Clone, Debug, PartialEq)]
pub enum Write {
    /// The pod is put together when it is written: hundreds at once would take megabytes.
    CreatePod { template: Arc<Template>, birth: Birth },
    DeletePod { namespace: String, name: String, uid: String, grace_s: u32 },
    /// On the version of the job that was seen last.
    Status { job: JobName, resource_version: String, status: Box<MoeJobStatus> },
    /// Made where it is missing, brought up to date where it is the job's own, and left alone where
    /// it is not. What is `fresh` nobody is known to have made: it is looked at only where there is
    /// one.
    Ensure { job: JobName, object: Value, fresh: bool },
    DeleteJob(JobName),
    /// In `namespace`, which is the job's own unless it cannot be written there.
    Event { job: JobName, namespace: String, warning: bool, reason: String, note: String },
}

/// What all pods of a job have in common.
#[derive(Clone, Debug, PartialEq)]
pub struct Template {
    pub job: Job,
    pub around: Surroundings,
}

/// Writes that are done together.
#[derive(Debug, Default)]
pub struct Batch {
    /// The job goes on meanwhile.
    pub aside: bool,
    pub writes: Vec<(Origin, Write)>,
}

/// Of a status: the job's new resource version. Of others: nothing.
pub type Written = Result<Option<String>, WriteError>;

/// Why a write was not done.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct WriteError {
    pub kind: WriteErrorKind,
    pub message: String,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum WriteErrorKind {
    Slow,
    Conflict,
    Exists,
    Gone,
    Forbidden,
    Refused,
    /// This process may no longer lead: nothing was sent.
    Deposed,
    /// An object of this name is not the job's.
    NotOurs,
    Other,
}

impl WriteErrorKind {
    /// As `result` of the metrics.
    pub fn label(self) -> &'static str {
        match self {
            WriteErrorKind::Slow => "slow",
            WriteErrorKind::Conflict => "conflict",
            WriteErrorKind::Exists => "exists",
            WriteErrorKind::Gone => "gone",
            WriteErrorKind::Forbidden => "forbidden",
            WriteErrorKind::Refused => "refused",
            WriteErrorKind::Deposed => "deposed",
            WriteErrorKind::NotOurs => "not_ours",
            WriteErrorKind::Other => "error",
        }
    }
}

/// What is to be done now, and when to ask again even if nothing happens.
#[derive(Debug, Default)]
pub struct Turn {
    pub effects: Vec<Effect>,
    pub due: Option<Millis>,
    /// It stands back, or comes forth again: the allocation must look at it.
    pub turned: bool,
}

/// One job. Its parts keep to themselves; what needs several of them stands in this folder.
pub struct JobLoop {
    pub(super) id: JobName,
    created_at: Millis,
    operator: Arc<Operator>,
    place: Place,
    spec: spec::Spec,
    tracker: Tracker,
    pods: pods::Pods,
    placeholders: placeholders::Placeholders,
    drains: drains::Drains,
    outbox: outbox::Outbox,
    report: report::Report,
    refusals: refusals::Refusals,
    rests: rests::Rests,
    objects: objects::Objects,
    events: event_log::EventLog,
    slow: slow::Slow,
    granted: Granted,
    /// Why nothing is done for this job, if nothing may be.
    fence: Option<Fence>,
    /// The record that it began with.
    found: fence::Found,
    /// It had a status: a leader before this one has made something for it.
    was_led: bool,
    /// Fields of a newer operator's record, written back as they are.
    rest: (Rest, Rest),
    /// The gang's pods as the leader before knew them.
    inherited: GangPods,
    /// What the pods of the gang run; empty before the first.
    image: String,
    term: u64,
    heard_of_api: Millis,
    /// Pods of many jobs are coming up.
    crowd: bool,
    /// When the finished job is to be deleted.
    expires: Option<Millis>,
    requeue: Option<Millis>,
    why: Vec<String>,
    effects: Vec<Effect>,
    dirty: bool,
}

impl JobLoop {
    /// A job that this leader has not led before; its pods are told to it afterwards.
    pub fn new(seen: &JobSeen, place: Place, lease_term: u64, now: Millis) -> JobLoop {
        let id = JobName {
            namespace: seen.namespace.clone(),
            name: seen.name.clone(),
            uid: seen.uid.clone(),
        };
        let (mut saved, fence) = match spec::restored(&seen.status) {
            Ok(saved) => (saved, None),
            Err(error) => (Default::default(), Some(Fence::of(&error))),
        };
        saved.no_later_than(now);
        let report = report::Report::new(seen);
        let stored = report.stored();
        let record = Record { progressed_at: now, ..saved.record };
        let mut tracker = Tracker::new(spec::nothing_observed(&id.uid, record, stored));
        tracker.recoveries = saved.recoveries;
        tracker.engines = Engines::restored(saved.more.engines_lost);
        let mut job = JobLoop {
            id,
            created_at: seen.created_at,
            operator: match &place {
                Place::Cluster(operator) => Arc::clone(operator),
                Place::Machine(_) => Arc::default(),
            },
            place,
            spec: spec::Spec::default(),
            tracker,
            pods: pods::Pods::default(),
            placeholders: placeholders::Placeholders::default(),
            drains: drains::Drains::default(),
            outbox: outbox::Outbox::default(),
            report,
            refusals: refusals::Refusals::restore(saved.more.refused),
            rests: rests::Rests(saved.more.rests),
            objects: objects::Objects::default(),
            events: event_log::EventLog::default(),
            slow: slow::Slow::default(),
            granted: Granted::default(),
            fence,
            found: fence::Found::of(seen),
            was_led: seen.status.as_object().is_some_and(|status| !status.is_empty()),
            rest: (saved.rest, saved.more.rest),
            image: saved.more.pods.image.clone(),
            inherited: saved.more.pods,
            // Should the lease have been deleted, the workers still know the term before.
            term: match saved.term > lease_term {
                true => saved.term.saturating_add(1),
                false => lease_term,
            },
            heard_of_api: now,
            crowd: false,
            expires: None,
            requeue: None,
            why: Vec::new(),
            effects: Vec::new(),
            dirty: true,
        };
        (job.spec.accepted, job.spec.machine) = (saved.more.accepted, saved.more.machine);
        job.rest_again(now);
        match &job.fence {
            Some(fence) => {
                let message = fence.message.clone();
                job.event(true, FENCED_BY_RECORD, message, now);
            }
            None => job.read_spec(seen, now),
        }
        job
    }

    pub fn id(&self) -> &JobName {
        &self.id
    }

    /// Above all terms of leaders before.
    pub fn term(&self) -> u64 {
        self.term
    }

    pub fn tracker(&self) -> &Tracker {
        &self.tracker
    }

    /// Nothing may be done for this job: why.
    pub fn fence(&self) -> Option<&Fence> {
        self.fence.as_ref()
    }

    /// The job, if it is one that can be planned.
    pub fn job(&self) -> Option<&Job> {
        self.spec.plannable().filter(|_| self.fence.is_none())
    }

    /// What it asks of the allocation, beside its spec and its pods.
    pub fn claim(&self) -> Claim {
        let claim = Claim::of(&self.tracker.observed, |name| self.pods.ends_soon(name));
        Claim { since: self.has_or_waits_since(), ..claim }
    }

    /// Something has come that the next turn must look at.
    pub fn is_dirty(&self) -> bool {
        self.dirty || !self.effects.is_empty()
    }

    fn note(&mut self, warning: bool, text: String) {
        self.effects.push(Effect::Note { warning, text });
    }

    fn memo(&mut self, memo: Memo) {
        self.effects.push(Effect::Memory(memo));
    }

    fn send(&mut self, name: &str, attempt: u32, body: Down) {
        self.effects.push(Effect::Link(Link::Send { name: name.to_string(), attempt, body }));
    }

    /// Writes that nothing waits for.
    fn send_aside(&mut self, origin: Origin, write: Write) {
        let writes = vec![(origin, write)];
        self.effects.push(Effect::Write(Batch { aside: true, writes }));
    }

    /// What people are told of the job; bounded by `EventLog`.
    fn event(&mut self, warning: bool, reason: &str, note: String, now: Millis) {
        self.event_in(self.id.namespace.clone(), warning, (reason, note), now);
    }

    fn event_in(
        &mut self,
        namespace: String,
        warning: bool,
        (reason, note): (&str, String),
        now: Millis,
    ) {
        let Some(note) = self.events.admit(reason, note, now) else { return };
        let (job, reason) = (self.id.clone(), reason.to_string());
        let write = Write::Event { job, namespace, warning, reason, note };
        self.send_aside(Origin::Event, write);
    }
}

/// The first pause, doubled as many times, up to the longest.
fn doubled(first: Millis, times: u32, most: Millis) -> Millis {
    (first << times.min(20)).min(most)
}

/// Pods by name; a name is never used twice.
type ByName<T> = BTreeMap<String, T>;
