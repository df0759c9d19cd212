//! One job: what has happened to it, what is planned, what is being written.
//!
//! ```text
//! pods, streams, spec, results of writes -> Tracker -> plan(&Observed, now) -> queue of actions
//! queue -> orders on streams at once | a batch of writes, one at a time -> results
//! ```
//!
//! While a batch with actions is under way nothing else happens to the job: what arrives waits, so
//! that the tracker sees the same order of things as in a local run.

use super::refusals::Refusals;
use super::report::Report;
use super::results::RETRY_MAX;
use super::spec::{judge, nothing_observed, restored};
use super::workers::Workers;
use super::{Batch, Context, Origin};
use crate::apply::{JobName, Template, Write};
use crate::control::{Leader, LeaderEvent};
use crate::observe::{Cluster, JobSeen, Key, NodeSeen, PodSeen, WorkerPod, key};
use moejob_plan::Job;
use moejob_plan::allocate::{Claim, Memory, Needs};
use moejob_plan::decide::{Action, plan};
use moejob_plan::job::Venue;
use moejob_plan::launch;
use moejob_plan::observed::{Millis, Node, Outcome, Record};
use moejob_plan::pods::{self, Birth, Surroundings};
use moejob_plan::record::Saved;
use moejob_plan::track::Tracker;
use moejob_protocol::message::{Down, Up};
use moejob_protocol::report::{Detail, EventKind};
use std::collections::VecDeque;
use std::sync::Arc;
use std::time::Duration;

/// A pod that is not ended is deleted with this grace: the kubelet is still asked, which tells
/// when it is really over.
const KILL_GRACE_S: u32 = 1;
/// Why a job is blocked that is on its way out.
const DELETED: &str = "Deleted";
/// Rounds of planning in one go; a plan converges within three.
const ROUNDS_MAX: usize = 16;

/// Something that waits while a batch is under way.
enum Waiting {
    Stream(String, LeaderEvent),
    Pod(Key),
}

/// Why a job is not planned at all.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Blocked {
    pub invalid: bool,
    pub reason: &'static str,
    pub message: String,
}

pub struct JobState {
    pub id: JobName,
    pub created_at: Millis,
    pub job: Option<Box<Job>>,
    pub tracker: Tracker,
    pub workers: Workers,
    pub report: Report,
    pub(super) context: Arc<Context>,
    pub(super) leader: Leader,
    pub(super) term: u64,
    generation: i64,
    blocked: Option<Blocked>,
    pub(super) queue: VecDeque<Action>,
    pub(super) busy: bool,
    /// A plan could not be recorded because a status is being written.
    awaits_status: bool,
    waiting: VecDeque<Waiting>,
    pub(super) retry_at: Millis,
    pub(super) failures: u32,
    /// A write was refused because the job had changed.
    pub(super) conflicted: bool,
    /// The last write that failed, for status.
    pub(super) failure: Option<(String, String)>,
    pub(super) refusals: Refusals,
    /// The NetworkPolicy was applied for this generation.
    pub(super) objects: Option<i64>,
    /// The PodDisruptionBudget was; and when it is tried again, where it could not be.
    pub(super) budgeted: Option<i64>,
    pub(super) budget_due: Option<Millis>,
    /// When the finished job is to be deleted.
    expires: Option<Millis>,
    pub dirty: bool,
    /// What its pods ask of nodes.
    pub needs: Needs,
    /// What it asked of the allocation when it was last planned.
    claimed: Option<Claim>,
    /// The nodes that it was given, in order of use, and why these.
    pub nodes_seen: Vec<Node>,
    pub nodes_why: String,
    requeue: Option<Millis>,
    pub(super) why: Vec<String>,
    batches: Vec<Batch>,
}

impl JobState {
    /// A job that this leader has not led before; its pods are told to it afterwards.
    pub fn new(seen: &JobSeen, context: Arc<Context>, lease_term: u64, now: Millis) -> JobState {
        let id = JobName {
            namespace: seen.namespace.clone(),
            name: seen.name.clone(),
            uid: seen.uid.clone(),
        };
        let (saved, damaged) = match restored(&seen.status) {
            Ok(saved) => (saved, None),
            Err(error) => {
                let message = error.to_string();
                (Saved::default(), Some(Blocked { invalid: false, reason: "BadRecord", message }))
            }
        };
        // Should the lease have been deleted, the workers still know the term before.
        let term = lease_term.max(saved.term);
        let report = Report::new(seen);
        let stored = report.stored();
        let leader = Leader::telling(
            Arc::clone(&context.authority),
            &id.uid,
            Duration::from_secs(3),
            term,
            context.told.clone(),
        );
        let record = Record { progressed_at: now, ..saved.record };
        let mut tracker = Tracker::new(nothing_observed(&id.uid, record, stored));
        tracker.recoveries = saved.recoveries;
        let mut state = JobState {
            id,
            created_at: seen.created_at,
            job: None,
            tracker,
            workers: Workers::default(),
            report,
            context,
            leader,
            term,
            generation: 0,
            blocked: None,
            queue: VecDeque::new(),
            busy: false,
            awaits_status: false,
            waiting: VecDeque::new(),
            retry_at: 0,
            failures: 0,
            conflicted: false,
            failure: None,
            refusals: Refusals::default(),
            objects: None,
            budgeted: None,
            budget_due: None,
            expires: None,
            dirty: true,
            needs: Needs::default(),
            claimed: None,
            nodes_seen: Vec::new(),
            nodes_why: String::new(),
            requeue: None,
            why: Vec::new(),
            batches: Vec::new(),
        };
        state.read_spec(seen);
        state.blocked = damaged.or(state.blocked.take());
        state
    }

    /// The object has changed. Own writes of status change nothing of interest.
    pub fn on_seen(&mut self, seen: &JobSeen) {
        self.report.on_version(&seen.resource_version);
        if seen.deleted {
            self.blocked = Some(Blocked {
                invalid: false,
                reason: DELETED,
                message: "the job is being deleted".to_string(),
            });
        } else if seen.generation != self.generation {
            self.read_spec(seen);
        }
        // A write on an older version may have waited for this.
        if std::mem::take(&mut self.conflicted) {
            self.retry_at = 0;
        }
        self.dirty = true;
    }

    fn read_spec(&mut self, seen: &JobSeen) {
        self.generation = seen.generation;
        self.dirty = true;
        let job = match judge(&seen.name, &seen.spec) {
            Ok(job) => job,
            Err(blocked) if self.job.is_none() => {
                self.event(true, blocked.reason, blocked.message.clone());
                self.blocked = Some(blocked);
                return;
            }
            // What runs goes on as it was.
            Err(blocked) => return self.event(true, blocked.reason, blocked.message),
        };
        self.blocked = None;
        self.report.generation = seen.generation;
        let observed = &mut self.tracker.observed;
        observed.wanted = launch::wanted(&job, Venue::Kubernetes);
        let places = pods::places(&job);
        observed.template = launch::template(&job, Venue::Kubernetes, &self.id.uid, &places);
        let timeout = Duration::from_millis(job.recovery.heartbeat_timeout);
        self.leader.set_heartbeat_timeout(timeout);
        self.needs = Needs::of(&job);
        self.job = Some(Box::new(job));
    }

    pub(super) fn is_deleted(&self) -> bool {
        self.blocked.as_ref().is_some_and(|blocked| blocked.reason == DELETED)
    }

    pub fn is_blocked(&self) -> Option<&Blocked> {
        self.blocked.as_ref()
    }

    pub fn on_stream(&mut self, told: crate::control::Told, now: Millis) {
        let Some((name, event)) = self.leader.accept(told) else { return };
        if self.busy {
            // Each heartbeat repeats what the one before said.
            if !matches!(event, LeaderEvent::Up { up: Up::Heartbeat(_), .. }) {
                self.waiting.push_back(Waiting::Stream(name, event));
            }
            return;
        }
        self.stream(&name, event, now);
    }

    pub fn on_pod(&mut self, key: &Key, pod: Option<&PodSeen>, now: Millis) {
        self.dirty = true;
        match self.busy {
            true => self.waiting.push_back(Waiting::Pod(Arc::clone(key))),
            false => self.pod(key, pod, now),
        }
    }

    fn stream(&mut self, name: &str, event: LeaderEvent, now: Millis) {
        let quiet = matches!(event, LeaderEvent::Up { up: Up::Heartbeat(_), .. });
        self.dirty |= !quiet;
        let happenings = match event {
            LeaderEvent::Connected(hello) => {
                self.workers.connected(name);
                let address = self.workers.address(name).unwrap_or_default();
                self.tracker.connected(name, &address, &hello);
                if let Some(worker) = self.tracker.observed.worker(name) {
                    self.workers.came_up(&worker.node);
                }
                Vec::new()
            }
            LeaderEvent::Up { attempt, up } => {
                self.hear(&up);
                self.tracker.heard(name, attempt, &up, now)
            }
            LeaderEvent::Silent => {
                self.workers.silent(name, now);
                self.tracker.silent(name, "nothing heard of it")
            }
            LeaderEvent::Closed { reason } => self.closed(name, &reason, now),
        };
        self.tell(happenings);
    }

    fn hear(&mut self, up: &Up) {
        match up {
            Up::Step(report) => self.report.step(report),
            Up::Event(event) if event.event == EventKind::CheckpointRefused => {
                self.event(true, "CheckpointRefused", event.message.clone());
            }
            Up::Event(event) if event.event == EventKind::AttemptsClaimed => {
                self.event(false, "EarlierJob", event.message.clone());
            }
            Up::Event(event) if event.reason == "Found" => {
                let note = format!("the storage has {}: it is resumed from", event.message);
                self.event(false, "CheckpointFound", note);
            }
            Up::Event(event) if event.event == EventKind::Warning => {
                self.event(true, &event.reason, event.message.clone());
            }
            Up::Event(event) if event.event == EventKind::EngineLost => {
                let of = |name: &str| match event.details.get(name) {
                    Some(Detail::Text(text)) => text.clone(),
                    Some(Detail::Number(number)) => number.to_string(),
                    _ => String::new(),
                };
                let (node, device, words) = (of("node"), of("device"), of("lastWords"));
                let note = format!("{} on device {device} of {node}. {words}", event.message);
                self.event(true, "EngineLost", note.trim_end().to_string());
            }
            Up::Event(event) if event.event == EventKind::Resumed => {
                tracing::info!(job = self.id.name, attempt = event.attempt, "{}", event.message);
            }
            _ => {}
        }
    }

    /// Plans, and gives what is to be written.
    pub fn reconcile(&mut self, cluster: &Lookup, now: Millis) -> Vec<Batch> {
        self.dirty = false;
        self.budget_due = self.budget_due.filter(|at| now < *at);
        if !self.busy {
            self.catch_up(cluster, now);
            self.look_after(cluster, now);
            self.expire(now);
        }
        if !self.busy && self.blocked.is_none() && self.job.is_some() && now >= self.retry_at {
            self.decide(cluster, now);
        }
        self.report_status(now);
        std::mem::take(&mut self.batches)
    }

    /// What waited for the end of the batch.
    fn catch_up(&mut self, cluster: &Lookup, now: Millis) {
        while let Some(waiting) = self.waiting.pop_front() {
            match waiting {
                Waiting::Stream(name, event) => self.stream(&name, event, now),
                Waiting::Pod(key) => self.pod(&key, cluster.get(&key), now),
            }
        }
    }

    fn decide(&mut self, cluster: &Lookup, now: Millis) {
        self.requeue = None;
        for _ in 0..ROUNDS_MAX {
            self.advance(cluster, now);
            if self.busy || std::mem::take(&mut self.awaits_status) {
                return;
            }
            self.tracker.prune();
            self.tracker.observed.nodes.clone_from(&self.nodes_seen);
            if self.workers.is_alone(&self.tracker.observed, self.context.heard_of_api(), now) {
                // Nobody is heard and the API server neither: it is the operator that is cut off.
                self.requeue = Some(now + 500);
                return;
            }
            let plan = plan(&self.tracker.observed, now);
            if plan.why != self.why {
                let job = &self.id.name;
                plan.why.iter().for_each(|why| tracing::info!(job, "{why}"));
                self.why = plan.why;
            }
            if plan.actions.is_empty() {
                self.requeue = plan.requeue;
                return self.budget();
            }
            self.queue.extend(plan.actions);
        }
        tracing::error!(job = self.id.name, "the plan does not converge");
        self.requeue = Some(now + 1_000);
    }

    /// Carries out what is planned, up to the first batch of writes.
    fn advance(&mut self, cluster: &Lookup, now: Millis) {
        while let Some(action) = self.queue.pop_front() {
            match &action {
                Action::StartWorker { .. } => return self.start_workers(action),
                Action::StopWorker { name, grace } => {
                    let (name, grace) = (name.clone(), *grace);
                    if self.stop_worker(cluster, &name, grace, action, now) {
                        return;
                    }
                }
                Action::RecordAttempt(_) | Action::Finish(_) => {
                    // Status has one writer at a time, and this one must see its result.
                    if self.report.in_flight {
                        // Until then things may change: it is planned anew.
                        self.awaits_status = true;
                        return self.queue.clear();
                    }
                    return self.record(action, now);
                }
                Action::Configure { name, rank, config } => {
                    self.leader.configure(name, *rank, config);
                    self.workers.trained(name);
                    self.tracker.done(&action, now);
                }
                Action::LeaveAttempt { name, attempt, reason } => {
                    self.leader.send(name, *attempt, Down::Leave { reason: reason.clone() });
                    self.tracker.done(&action, now);
                }
                Action::Request { attempt, request, .. } => {
                    let gang = self.tracker.observed.record.gang.as_ref();
                    let members = gang.map_or(&[][..], |gang| &gang.members);
                    self.leader.request(members, *attempt, *request);
                    self.tracker.done(&action, now);
                }
                Action::AvoidNode { node, until } => {
                    for of in self.nodes_seen.iter_mut().filter(|of| of.name == *node) {
                        of.avoid_until = of.avoid_until.max(*until);
                    }
                    self.workers.avoid(node, *until);
                    self.tracker.done(&action, now);
                }
                Action::EndAttempt { .. } | Action::NoteStop | Action::WithdrawStop => {
                    self.tracker.done(&action, now);
                }
            }
        }
    }

    /// Evictions have a limit as soon as there is a gang. Earlier the cluster would count the
    /// budget anew, and write its status, with every pod that starts.
    fn budget(&mut self) {
        let known = self.budgeted == Some(self.generation) || self.budget_due.is_some();
        if known || self.tracker.observed.gang().is_none() {
            return;
        }
        let Some(job) = &self.job else { return };
        let budget = pods::disruption_budget(job, &self.surroundings(job));
        self.budgeted = Some(self.generation);
        self.send_aside(Origin::Budget, Write::Object(budget));
    }

    /// All that are to start now, in one batch; before them what shuts strangers out.
    fn start_workers(&mut self, first: Action) {
        let Some(job) = self.job.clone() else { return };
        let around = self.surroundings(&job);
        let template = Arc::new(Template { job: *job, around });
        let Template { job, around } = &*template;
        let mut batch = Batch::default();
        if self.objects != Some(self.generation) {
            batch.add(Origin::Object, Write::Object(pods::network_policy(job, around)));
            self.objects = Some(self.generation);
        }
        let mut next = Some(first);
        while let Some(action) = next {
            let Action::StartWorker { name, node } = &action else {
                self.queue.push_front(action);
                break;
            };
            let seal = self.context.keyring.seal(&self.id.uid, name);
            let birth = Birth { name: name.clone(), node: node.clone(), seal };
            let template = Arc::clone(&template);
            batch.add(Origin::Action(action), Write::CreatePod { template, birth });
            next = self.queue.pop_front();
        }
        self.send(batch);
    }

    fn surroundings(&self, job: &Job) -> Surroundings {
        let context = &self.context;
        let (own, policy) = context.own_image.clone();
        Surroundings {
            namespace: self.id.namespace.clone(),
            job_uid: self.id.uid.clone(),
            image: job.kubernetes.image.clone().unwrap_or(own),
            image_pull_policy: policy,
            authority: context.keyring.trusted(),
            operator_namespace: context.namespace.clone(),
            memory_mib: Default::default(),
        }
    }

    /// Whether a batch is under way.
    fn stop_worker(
        &mut self,
        cluster: &Lookup,
        name: &str,
        grace: Millis,
        action: Action,
        now: Millis,
    ) -> bool {
        let attempt = self.tracker.observed.record.attempt;
        self.leader.send(name, attempt, Down::Shutdown);
        let pod = cluster.worker(&self.id.namespace, name).cloned();
        let Some(pod) = pod.filter(|pod| pod.ended.is_none()) else {
            self.tracker.done(&action, now);
            let happenings = self.tracker.exited(name, None, "it has no pod", now);
            self.tell(happenings);
            return false;
        };
        self.gave_up(&pod);
        if !self.workers.stopped(&pod, now) {
            self.tracker.done(&action, now);
            return false;
        }
        // One that hears ends by itself, and its pod stays for its log.
        let over = matches!(
            self.tracker.observed.record.outcome,
            Some(Outcome::Complete { .. } | Outcome::Failed { .. })
        );
        if over && grace > 0 && self.leader.is_linked(name) {
            self.workers.delete_at(name, now + grace);
            self.tracker.done(&action, now);
            return false;
        }
        let mut batch = Batch::default();
        let grace_s = u32::try_from(grace / 1000).unwrap_or(u32::MAX).max(KILL_GRACE_S);
        batch.add(Origin::Action(action), delete(&pod, grace_s));
        while let Some(Action::StopWorker { name, grace }) = self.queue.front().cloned() {
            let Some(pod) = cluster.worker(&self.id.namespace, &name).cloned() else { break };
            if over || pod.ended.is_some() || !self.workers.stopped(&pod, now) {
                break;
            }
            self.leader.send(&name, attempt, Down::Shutdown);
            self.gave_up(&pod);
            let grace_s = u32::try_from(grace / 1000).unwrap_or(u32::MAX).max(KILL_GRACE_S);
            if let Some(action) = self.queue.pop_front() {
                batch.add(Origin::Action(action), delete(&pod, grace_s));
            }
        }
        self.send(batch);
        true
    }

    /// Before any order that follows from it.
    fn record(&mut self, action: Action, now: Millis) {
        let mut after = self.tracker.clone();
        after.done(&action, now);
        let mut status = self.status_of(&after, now);
        status.record = self.record_of(&after);
        let mut batch = Batch::default();
        batch.add(Origin::Recorded(Box::new(action)), self.report.write(&self.id, status, now));
        self.send(batch);
    }

    fn send(&mut self, batch: Batch) {
        self.busy = true;
        self.batches.push(batch);
    }

    /// Writes that nothing waits for.
    pub(super) fn send_aside(&mut self, origin: Origin, write: Write) {
        let mut batch = Batch { aside: true, ..Batch::default() };
        batch.add(origin, write);
        self.batches.push(batch);
    }

    pub(super) fn event(&mut self, warning: bool, reason: &str, note: String) {
        let (job, reason) = (self.id.clone(), reason.to_string());
        self.send_aside(Origin::Event, Write::Event { job, warning, reason, note });
    }

    /// What it asks of the allocation, beside its spec and its pods.
    pub fn claim(&self) -> Claim {
        Claim::of(&self.tracker.observed, |name| self.workers.ends_soon(name))
    }

    /// What the allocation of nodes is to know; whether that changes anything.
    pub fn remember(&mut self, batches: &[Batch], memory: &mut Memory, now: Millis) -> bool {
        let blamed = self.workers.take_blamed();
        blamed.iter().for_each(|node| memory.failed(&self.id.uid, node, now));
        let claim = self.claim();
        let same = self.claimed.as_ref() == Some(&claim);
        self.claimed = Some(claim);
        let mut any = !same || !blamed.is_empty();
        any |= self.refusals.take_turned(now);
        for (node, until) in self.workers.take_avoided() {
            memory.avoid(&self.id.uid, &node, until, now);
            any = true;
        }
        for node in self.workers.take_worked() {
            memory.worked(&self.id.uid, &node);
        }
        for batch in batches {
            for (origin, _) in &batch.writes {
                // Workers that were decided on take their nodes before their pods are seen.
                if let Origin::Action(Action::StartWorker { node, .. }) = origin {
                    memory.decided(&self.id.uid, node, now);
                }
            }
        }
        any
    }

    /// A finished job is deleted after its time.
    fn expire(&mut self, now: Millis) {
        let kubernetes = self.job.as_ref().map(|job| &job.kubernetes);
        let ttl = kubernetes.and_then(|kubernetes| kubernetes.ttl_seconds_after_finished);
        let finished = self.report.finished_at();
        let at = ttl.zip(finished).map(|(ttl, at)| at + u64::from(ttl) * 1000);
        // A deletion that did not succeed is tried again after a while.
        self.expires = self.expires.or(at).filter(|_| at.is_some());
        if self.expires.is_some_and(|at| now >= at) {
            self.expires = Some(now + RETRY_MAX);
            let job = self.id.clone();
            self.send_aside(Origin::Cleanup, Write::DeleteJob(job));
        }
    }

    /// When to look again even if nothing happens.
    pub fn due(&self, now: Millis) -> Option<Millis> {
        let waits = (!self.busy && self.retry_at > now).then_some(self.retry_at);
        let workers = self.workers.due();
        let refusals = self.refusals.due();
        let dues = [self.requeue, waits, workers, self.report.due, self.expires, refusals];
        dues.into_iter().chain([self.budget_due]).flatten().min()
    }
}

/// Pods and nodes of the cluster by name.
pub struct Lookup<'a>(pub &'a Cluster);

impl Lookup<'_> {
    pub fn get(&self, key: &Key) -> Option<&PodSeen> {
        self.0.pods.get(key)
    }

    /// As its kubelet, or the node's lease, says.
    pub fn is_ready(&self, node: &str) -> bool {
        self.0.nodes.get(node).is_some_and(NodeSeen::is_ready)
    }

    /// Where it is bound to.
    pub fn node_of(&self, namespace: &str, name: &str) -> Option<Arc<str>> {
        self.0.pods.get(&key(namespace, name))?.node.clone()
    }

    pub fn worker(&self, namespace: &str, name: &str) -> Option<&WorkerPod> {
        self.0.pods.get(&key(namespace, name))?.worker.as_deref()
    }
}

pub(super) fn delete(pod: &WorkerPod, grace_s: u32) -> Write {
    let (namespace, name, uid) = (pod.namespace.clone(), pod.name.clone(), pod.uid.clone());
    Write::DeletePod { namespace, name, uid, grace_s }
}
