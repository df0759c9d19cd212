//! The loop of the operator: observe -> allocate -> plan -> apply -> report, for all jobs.
//!
//! ```text
//! watches, streams, results of writes --Event--> Cluster, JobState
//! Cluster + all jobs --allocate--> nodes of each job --reconcile--> batches of writes
//! ```
//!
//! One task decides everything, so that no two jobs take the same node; only writing is done
//! beside it, a batch a job at a time. A standby keeps its view of the cluster and nothing else.

mod job;
pub(crate) mod nodes;
mod refusals;
mod report;
mod results;
mod spec;
mod workers;

use crate::apply::{Write, Writer, Written};
use crate::authority::Authority;
use crate::control::Told;
use crate::identity::{Keyring, Reviewer};
use crate::metrics::Metrics;
use crate::observe::{Change, Cluster, JobSeen, Key, PodSeen, Taken, Weight};
use job::{JobState, Lookup};
use moejob_plan::decide::Action;
use moejob_plan::observed::Millis;
use moejob_protocol::WorkerConfig;
use moejob_plan::allocate::{Allocation, Granted, Ground, Memory};
use std::collections::HashMap;
use std::sync::{Arc, LazyLock};
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::mpsc;

/// Events that wait for the loop.
pub const EVENTS_MAX: usize = 4096;
/// Events that are taken in before the next decision.
const TOGETHER_MAX: usize = 4096;
/// A decision is followed by a pause of so many times what it took, up to the second: of large
/// gangs hundreds of workers come up one after the other, and are decided on together.
const PAUSES: u32 = 3;
const PAUSE_MAX: Duration = Duration::from_millis(100);
/// Without any event the loop looks again after this.
const IDLE: Duration = Duration::from_secs(60);

/// What all jobs of this operator share.
pub struct Context {
    pub keyring: Arc<Keyring>,
    pub authority: Arc<Authority>,
    pub reviewer: Reviewer,
    pub writer: Writer,
    pub metrics: Metrics,
    /// Image and pull policy of the operator's own container.
    pub own_image: (String, Option<String>),
    /// The operator's own.
    pub namespace: String,
    pub told: mpsc::Sender<Told>,
    pub clock: Clock,
    /// When the API server last answered.
    pub heard: AtomicU64,
}

/// Why a job of this name and spec would not be planned; what `kubectl moe submit` asks beforehand.
///
/// # Errors
/// In the words of its condition.
pub fn plannable(name: &str, spec: &serde_json::Value) -> Result<(), String> {
    spec::judge(name, spec).map(drop).map_err(|blocked| blocked.message)
}

impl Context {
    pub fn hear_of_api(&self) {
        self.heard.store(self.clock.now(), Ordering::Relaxed);
    }

    pub fn heard_of_api(&self) -> Millis {
        self.heard.load(Ordering::Relaxed)
    }
}

/// Milliseconds since 1970 that never go back: the next leader reads them in the record.
#[derive(Clone, Copy)]
pub struct Clock {
    start: Instant,
    start_millis: Millis,
}

impl Clock {
    pub fn start() -> Clock {
        let since = SystemTime::UNIX_EPOCH.elapsed().unwrap_or_default();
        Clock { start: Instant::now(), start_millis: since.as_millis() as Millis }
    }

    pub fn now(&self) -> Millis {
        self.start_millis + self.start.elapsed().as_millis() as Millis
    }
}

/// What a write is for.
#[derive(Debug)]
pub enum Origin {
    Action(Action),
    /// A status that must be durable before the action counts as done.
    Recorded(Box<Action>),
    Status,
    Object,
    Budget,
    Event,
    Cleanup,
}

/// Writes of one job that are done together.
#[derive(Debug, Default)]
pub struct Batch {
    /// The job goes on meanwhile.
    pub aside: bool,
    writes: Vec<(Origin, Write)>,
}

impl Batch {
    fn add(&mut self, origin: Origin, write: Write) {
        self.writes.push((origin, write));
    }
}

/// The end of a batch.
struct Done {
    job_uid: Arc<str>,
    aside: bool,
    results: Vec<(Origin, Written)>,
}

enum Event {
    Change(Change),
    Told(Told),
    Done(Done),
    /// This process leads from now on.
    Lead(u64),
    Timer,
}

/// The inputs of the loop beside its own.
pub struct Inputs {
    pub changes: mpsc::Receiver<Change>,
    pub told: mpsc::Receiver<Told>,
    pub lead: mpsc::Receiver<u64>,
}

pub struct Controller {
    context: Arc<Context>,
    inputs: Inputs,
    done: (mpsc::Sender<Done>, mpsc::Receiver<Done>),
    cluster: Cluster,
    jobs: HashMap<Arc<str>, JobState>,
    term: Option<u64>,
    /// Pods, nodes or jobs have changed since nodes were allocated.
    stale: bool,
    /// What allocation knows of the nodes, while none of them changes.
    ground: Option<Ground>,
    /// Until then it only listens.
    pause: Instant,
    /// Something has come during the pause.
    awaits_decision: bool,
    allocation: Allocation,
    memory: Memory,
}

impl Controller {
    pub fn new(context: Context, inputs: Inputs) -> Controller {
        Controller {
            context: Arc::new(context),
            inputs,
            done: mpsc::channel(EVENTS_MAX),
            cluster: Cluster::default(),
            jobs: HashMap::new(),
            term: None,
            stale: true,
            ground: None,
            pause: Instant::now(),
            awaits_decision: false,
            allocation: Allocation::default(),
            memory: Memory::default(),
        }
    }

    pub fn context(&self) -> Arc<Context> {
        Arc::clone(&self.context)
    }

    /// Decides until the process ends.
    pub async fn run(mut self) {
        loop {
            let event = self.next().await;
            self.on(event);
            // What has arrived together is decided on together: two losses at once are one.
            for _ in 0..TOGETHER_MAX {
                let Some(event) = self.arrived() else { break };
                self.on(event);
            }
            self.awaits_decision = Instant::now() < self.pause;
            if self.awaits_decision {
                continue;
            }
            if self.decides() {
                let began = Instant::now();
                self.decide();
                let pause = (PAUSES * began.elapsed()).min(PAUSE_MAX);
                self.pause = Instant::now() + pause;
            }
        }
    }

    /// A standby only listens.
    fn decides(&self) -> bool {
        self.term.is_some() && self.cluster.is_complete()
    }

    async fn next(&mut self) -> Event {
        let now = self.context.clock.now();
        let due = self.jobs.values().filter_map(|job| job.due(now));
        let due = due.chain(self.allocation.requeue).min();
        let wait = due.map_or(IDLE, |at| Duration::from_millis(at.saturating_sub(now)));
        let pause = self.pause.saturating_duration_since(Instant::now());
        // A decision may have changed what allocation is to see.
        let soon = self.awaits_decision || (self.stale && self.decides());
        let wait = if soon { pause } else { wait.max(pause) };
        // Results first: they are what a job waits for.
        tokio::select! {
            biased;
            Some(done) = self.done.1.recv() => Event::Done(done),
            Some(term) = self.inputs.lead.recv() => Event::Lead(term),
            Some(told) = self.inputs.told.recv() => Event::Told(told),
            Some(change) = self.inputs.changes.recv() => Event::Change(change),
            () = tokio::time::sleep(wait.max(Duration::from_millis(1))) => Event::Timer,
        }
    }

    fn arrived(&mut self) -> Option<Event> {
        if let Ok(done) = self.done.1.try_recv() {
            return Some(Event::Done(done));
        }
        if let Ok(told) = self.inputs.told.try_recv() {
            return Some(Event::Told(told));
        }
        self.inputs.changes.try_recv().ok().map(Event::Change)
    }

    fn on(&mut self, event: Event) {
        let now = self.context.clock.now();
        match event {
            Event::Change(change) => self.on_change(change, now),
            Event::Told(told) => {
                if let Some(job) = self.jobs.get_mut(&told.job_uid) {
                    job.on_stream(told, now);
                }
            }
            Event::Done(done) => {
                if done.results.iter().any(|(_, written)| written.is_ok()) {
                    self.context.hear_of_api();
                }
                if let Some(job) = self.jobs.get_mut(&done.job_uid) {
                    job.on_written(done.aside, done.results, now);
                }
            }
            Event::Lead(term) => self.lead(term),
            Event::Timer => {}
        }
    }

    fn on_change(&mut self, change: Change, now: Millis) {
        let was_complete = self.cluster.is_complete();
        let taken = self.cluster.take(change);
        // Never taken back here: another change may wait for the same allocation.
        self.stale |= !was_complete || self.matters(&taken);
        if !was_complete && self.cluster.is_complete() {
            self.context.metrics.set_ready();
            self.adopt_all(now);
        }
        if self.term.is_none() || !was_complete {
            return;
        }
        match taken {
            Taken::Nothing | Taken::Node => {}
            Taken::Job(key, before) => self.on_job(&key, before.as_ref(), now),
            Taken::Pod(key, before) => {
                let after = self.cluster.pods.get(&key);
                if let Some(worker) = after.and_then(|pod| pod.worker.as_deref())
                    && let Some(node) = &worker.meant_for
                {
                    self.memory.seen(&worker.job_uid, node);
                }
                let of = |pod: &crate::observe::PodSeen| {
                    pod.worker.as_ref().map(|worker| worker.job_uid.clone())
                };
                let uid = after.and_then(of).or(before.as_ref().and_then(of));
                let job = uid.and_then(|uid| self.jobs.get_mut(uid.as_str()));
                if let Some(job) = job {
                    job.on_pod(&key, after, now);
                }
            }
        }
    }

    /// Whether allocation may come out otherwise for it.
    fn matters(&mut self, taken: &Taken) -> bool {
        match taken {
            Taken::Nothing => false,
            Taken::Node => {
                self.ground = None;
                true
            }
            // Own writes of status change nothing.
            Taken::Job(key, before) => {
                let spec = |job: &JobSeen| (job.uid.clone(), job.generation, job.deleted);
                self.cluster.jobs.get(key).map(spec) != before.as_ref().map(spec)
            }
            Taken::Pod(key, before) => {
                let after = self.cluster.pods.get(key).and_then(PodSeen::weight);
                let before = before.as_ref().and_then(PodSeen::weight);
                if after == before {
                    return false;
                }
                for (node, weight) in before.iter().chain(&after) {
                    if let (Weight::Other(_), Some(ground)) = (weight, &mut self.ground) {
                        ground.set_requested(node, self.cluster.requested(node));
                    }
                }
                // A pod that was decided has its node already.
                match (before, after) {
                    (None, Some((node, Weight::Worker(uid)))) => {
                        !self.memory.is_unseen(uid, node)
                    }
                    _ => true,
                }
            }
        }
    }

    fn on_job(&mut self, key: &Key, before: Option<&JobSeen>, now: Millis) {
        let after = self.cluster.jobs.get(key);
        if let Some(before) = before
            && after.is_none_or(|after| after.uid != before.uid)
        {
            self.jobs.remove(before.uid.as_str());
            self.context.metrics.forget_job(&before.uid);
            self.memory.forget(&before.uid);
        }
        let Some(after) = after.cloned() else { return };
        match self.jobs.get_mut(after.uid.as_str()) {
            Some(job) => job.on_seen(&after),
            None => self.adopt(&after, now),
        }
    }

    /// This process leads from now on: it takes every job as it stands.
    fn lead(&mut self, term: u64) {
        tracing::info!(term, "this operator leads");
        self.term = Some(term);
        self.context.metrics.set_leader(true);
        self.context.hear_of_api();
        let now = self.context.clock.now();
        if self.cluster.is_complete() {
            self.adopt_all(now);
        }
    }

    fn adopt_all(&mut self, now: Millis) {
        if self.term.is_none() {
            return;
        }
        let jobs: Vec<JobSeen> = self.cluster.jobs.values().cloned().collect();
        for seen in jobs {
            if !self.jobs.contains_key(seen.uid.as_str()) {
                self.adopt(&seen, now);
            }
        }
    }

    fn adopt(&mut self, seen: &JobSeen, now: Millis) {
        let Some(term) = self.term.filter(|_| !seen.deleted) else { return };
        let mut job = JobState::new(seen, Arc::clone(&self.context), term, now);
        let mut pods: Vec<_> = (self.cluster.pods.values())
            .filter(|pod| pod.worker.as_ref().is_some_and(|of| of.job_uid == seen.uid))
            .collect();
        pods.sort_by(|a, b| a.key.cmp(&b.key));
        for pod in pods {
            job.on_pod(&pod.key, Some(pod), now);
        }
        self.jobs.insert(Arc::from(seen.uid.as_str()), job);
        self.stale = true;
    }

    fn decide(&mut self) {
        let (now, none) = (self.context.clock.now(), Granted::default());
        let look_again = self.allocation.requeue.is_some_and(|at| at <= now);
        if std::mem::take(&mut self.stale) || look_again {
            self.allocation =
                nodes::decide(&self.cluster, &mut self.ground, &self.jobs, &mut self.memory, now);
            for (uid, job) in &mut self.jobs {
                let granted = self.allocation.jobs.get(&**uid).unwrap_or(&none);
                job.dirty |= nodes::changed(granted, job);
            }
        }
        let lookup = Lookup(&self.cluster);
        let mut sent = Vec::new();
        for (uid, job) in &mut self.jobs {
            let due = job.due(now).is_some_and(|at| at <= now);
            if !job.dirty && !due {
                continue;
            }
            let began = Instant::now();
            let batches = job.reconcile(&lookup, now);
            self.context.metrics.reconciled(began.elapsed());
            self.stale |= job.remember(&batches, &mut self.memory, now);
            sent.extend(batches.into_iter().map(|batch| (Arc::clone(uid), batch)));
        }
        for (uid, batch) in sent {
            self.send(uid, batch);
        }
    }

    fn send(&self, job_uid: Arc<str>, batch: Batch) {
        let (writer, done) = (self.context.writer.clone(), self.done.0.clone());
        tokio::spawn(async move {
            let Batch { aside, writes } = batch;
            let (origins, writes): (Vec<_>, Vec<_>) = writes.into_iter().unzip();
            let results = writer.write_all(writes).await;
            let results = origins.into_iter().zip(results).collect();
            // Without a receiver the process ends.
            let _ = done.send(Done { job_uid, aside, results }).await;
        });
    }
}

/// A template for a job that has none yet; read once.
static EMPTY_TEMPLATE: LazyLock<WorkerConfig> = LazyLock::new(|| {
    use moejob_plan::job::{Job, Venue};
    let text = "apiVersion: moejob.dev/v1alpha1\nkind: MoeJob\nmetadata: {name: none}\nspec:\n  \
                nodes: {min: 1}\n  model: {preset: tiny}\n  data: {train: {text: {paths: [none]}}, \
                sequenceLength: 8}\n  training: {steps: 1, globalBatchSize: 1}\n";
    let job = Job::read(text.as_bytes()).expect("a valid manifest");
    let places = moejob_plan::pods::places(&job);
    moejob_plan::launch::template(&job, Venue::Kubernetes, "", &places)
});
