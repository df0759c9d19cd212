//! The shell of the operator: one task for all jobs, which observes, asks and executes.
//!
//! ```text
//! watches, streams, results of writes --Event--> Cluster, JobLoop::on
//! Cluster + all jobs --allocate--> nodes of each job --JobLoop::turn--> effects --Crew--> done
//! ```
//!
//! What is to be done about a job its `JobLoop` says, which jobs get which nodes `allocate`:
//! nothing here chooses. A standby keeps its view of the cluster and nothing else.

mod crew;
pub(crate) mod nodes;

use crate::apply::Writer;
use crate::authority::Authority;
use crate::control::Told;
use crate::identity::{Keyring, Reviewer};
use crate::metrics::Metrics;
use crate::observe::{Change, Cluster, JobSeen, Key, Owner, PodSeen, Taken, Weight};
use crate::pulse::{ASK_EVERY, Pulse};
use crew::{Crew, Done};
use moejob_plan::allocate::{Allocation, Granted, Ground, Memory};
use moejob_plan::lead::{self, Event, Operator, Origin};
use moejob_plan::observed::Millis;
use moejob_plan::orphans::Orphans;
use moejob_plan::profile::{File, Profiles};
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant, SystemTime};
use tokio::sync::mpsc;

/// Events that wait for the loop.
pub const EVENTS_MAX: usize = 4096;
/// Events that are taken in before the next decision.
const TOGETHER_MAX: usize = 4096;
/// For so long, at the most.
const TOGETHER_FOR: Duration = Duration::from_millis(100);
/// A decision is followed by a pause of so many times what it took, up to the second: of large
/// gangs hundreds of workers come up one after the other, and are decided on together.
const PAUSES: u32 = 3;
const PAUSE_MAX: Duration = Duration::from_millis(100);

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
    /// See [`Operator::stand_in`].
    pub stand_in: bool,
    pub clock: Clock,
    /// The loop's answers.
    pub pulse: Pulse,
}

/// Why a job of this name and spec would not be planned; what `kubectl moe submit` asks beforehand.
///
/// # Errors
/// In the words of its condition.
pub fn plannable(
    name: &str,
    spec: &serde_json::Value,
    profiles: &Profiles,
) -> Result<(), String> {
    lead::judge(name, spec, profiles).map(drop).map_err(|blocked| blocked.message)
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

/// What the process tells the loop.
#[derive(Debug)]
pub enum Order {
    /// This process leads from now on, in this term.
    Lead(u64),
    /// The API server has answered.
    Heard,
}

/// The inputs of the loop beside its own.
pub struct Inputs {
    pub changes: mpsc::Receiver<Change>,
    pub told: mpsc::Receiver<Told>,
    pub orders: mpsc::Receiver<Order>,
    /// Told why this process must not lead.
    pub unfit: mpsc::Sender<String>,
}

enum Input {
    Change(Change),
    Told(Told),
    Done(Done),
    Order(Order),
    Timer,
}

pub struct Controller {
    context: Arc<Context>,
    operator: Arc<Operator>,
    inputs: Inputs,
    done: (mpsc::Sender<Done>, mpsc::Receiver<Done>),
    cluster: Cluster,
    jobs: HashMap<Owner, Crew>,
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
    orphans: Orphans,
    heard_of_api: Millis,
}

impl Controller {
    pub fn new(context: Context, inputs: Inputs) -> Controller {
        let operator = Operator {
            image: context.own_image.clone(),
            namespace: context.namespace.clone(),
            trusted: context.keyring.trusted(),
            keyring: context.keyring.id(),
            stand_in: context.stand_in,
            profiles: Arc::default(),
        };
        Controller {
            context: Arc::new(context),
            operator: Arc::new(operator),
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
            orphans: Orphans::default(),
            heard_of_api: 0,
        }
    }

    /// Decides until the process ends.
    pub async fn run(mut self) {
        loop {
            let input = self.next().await;
            self.context.pulse.beat();
            let began = Instant::now();
            self.on(input);
            // What has arrived together is decided on together: two losses at once are one. Not so
            // specs that take their time to be judged: other jobs have their turns in between.
            for _ in 0..TOGETHER_MAX {
                if began.elapsed() > TOGETHER_FOR {
                    break;
                }
                let Some(input) = self.arrived() else { break };
                self.on(input);
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

    async fn next(&mut self) -> Input {
        let now = self.context.clock.now();
        let dues = self.jobs.values().filter_map(|job| job.due);
        let due = dues.chain(self.allocation.requeue).chain(self.orphans.due()).min();
        // It answers each second, also when nothing is to be done.
        let idle = ASK_EVERY / 2;
        let wait = due.map_or(idle, |at| Duration::from_millis(at.saturating_sub(now)).min(idle));
        let pause = self.pause.saturating_duration_since(Instant::now());
        // A decision may have changed what allocation is to see.
        let soon = self.awaits_decision || (self.stale && self.decides());
        let wait = if soon { pause } else { wait.max(pause) };
        // Results first: they are what a job waits for.
        tokio::select! {
            biased;
            Some(done) = self.done.1.recv() => Input::Done(done),
            Some(order) = self.inputs.orders.recv() => Input::Order(order),
            Some(told) = self.inputs.told.recv() => Input::Told(told),
            Some(change) = self.inputs.changes.recv() => Input::Change(change),
            () = tokio::time::sleep(wait.max(Duration::from_millis(1))) => Input::Timer,
        }
    }

    fn arrived(&mut self) -> Option<Input> {
        if let Ok(done) = self.done.1.try_recv() {
            return Some(Input::Done(done));
        }
        if let Ok(told) = self.inputs.told.try_recv() {
            return Some(Input::Told(told));
        }
        self.inputs.changes.try_recv().ok().map(Input::Change)
    }

    fn on(&mut self, input: Input) {
        let now = self.context.clock.now();
        match input {
            Input::Change(change) => self.on_change(change, now),
            Input::Told(told) => {
                if let Some(job) = self.jobs.get_mut(&told.owner) {
                    job.on_told(told, now);
                }
            }
            Input::Done(done) => self.on_done(done, now),
            Input::Order(Order::Lead(term)) => self.lead(term),
            Input::Order(Order::Heard) => self.heard_of_api = now,
            Input::Timer => {}
        }
    }

    fn on_done(&mut self, done: Done, now: Millis) {
        let Done { owner, aside, results } = done;
        let mut said = Vec::with_capacity(results.len());
        for (origin, label, written) in results {
            self.context.metrics.result(label);
            if written.is_ok() {
                self.heard_of_api = now;
            }
            said.push((origin, written));
        }
        if let Some(job) = self.jobs.get_mut(&owner) {
            job.on(Event::Done { aside, results: said }, now);
        }
    }

    fn on_change(&mut self, change: Change, now: Millis) {
        let was_complete = self.cluster.is_complete();
        let taken = self.cluster.take(change);
        if let Taken::Profiles = taken {
            self.on_profiles(now);
        }
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
            Taken::Nothing | Taken::Node | Taken::Profiles => {}
            Taken::Job(key, before) => self.on_job(&key, before.as_ref(), now),
            Taken::Pod(key, before) => self.on_pod(&key, before.as_ref(), now),
        }
    }

    /// An admin's own kinds of machine are others than before.
    fn on_profiles(&mut self, now: Millis) {
        let file = |(name, text): (&String, &String)| (name.clone(), text.clone().into_bytes());
        let files: Vec<File> = self.cluster.profiles.iter().map(file).collect();
        let (profiles, broken) = Profiles::shipped().with(files);
        for line in broken.iter().flat_map(crate::cli::profiles::lines) {
            tracing::warn!("ConfigMap {}: {line}", crate::observe::PROFILES);
        }
        let profiles = Arc::new(profiles);
        if profiles == self.operator.profiles {
            return;
        }
        self.operator = Arc::new(Operator { profiles, ..(*self.operator).clone() });
        (self.ground, self.stale) = (None, true);
        for seen in self.cluster.jobs.values() {
            let Some(job) = self.jobs.get_mut(&seen.owner()) else { continue };
            job.on(Event::Profiles(Arc::clone(&self.operator.profiles)), now);
            job.on(Event::Spec(Box::new(seen.clone())), now);
        }
    }

    fn on_pod(&mut self, key: &Key, before: Option<&PodSeen>, now: Millis) {
        let after = self.cluster.pods.get(key);
        let worker = after.and_then(|pod| pod.worker.as_deref());
        if let Some(worker) = worker
            && let Some(node) = &worker.meant_for
        {
            self.memory.seen(&worker.owner, node);
        }
        let name = key.rsplit('/').next().unwrap_or_default();
        let owner = worker.map(|worker| &worker.owner);
        if let Some(job) = owner.and_then(|owner| self.jobs.get_mut(owner))
            && let Some(worker) = worker
        {
            return job.on(Event::Pod(Box::new(worker.clone())), now);
        }
        let was = before.and_then(|pod| pod.worker.as_ref()).map(|worker| &worker.owner);
        if let Some(job) = was.and_then(|owner| self.jobs.get_mut(owner)) {
            job.on(Event::PodGone(name.to_string()), now);
        }
    }

    /// Whether allocation may come out otherwise for it.
    fn matters(&mut self, taken: &Taken) -> bool {
        match taken {
            // A job that becomes another by it says so itself.
            Taken::Nothing | Taken::Profiles => false,
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
                    (None, Some((node, Weight::Worker(owner)))) => {
                        !self.memory.is_unseen(owner, node)
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
            self.jobs.remove(&before.owner());
            self.context.metrics.forget_job(&before.uid);
            self.memory.forget(&before.owner());
        }
        let Some(after) = after.cloned() else { return };
        match self.jobs.get_mut(&after.owner()) {
            Some(job) if job.is_to_be_taken_anew(&after) => self.adopt(&after, now),
            Some(job) => job.on(Event::Spec(Box::new(after)), now),
            None => self.adopt(&after, now),
        }
    }

    /// This process leads from now on: it takes every job as it stands.
    fn lead(&mut self, term: u64) {
        tracing::info!(term, "this operator leads");
        self.term = Some(term);
        self.context.metrics.set_leader(true);
        let now = self.context.clock.now();
        self.heard_of_api = now;
        if self.cluster.is_complete() {
            self.adopt_all(now);
        }
    }

    fn adopt_all(&mut self, now: Millis) {
        if self.term.is_none() {
            return;
        }
        if let Some(why) = self.unfit() {
            tracing::error!(why, "this operator does not lead");
            self.term = None;
            // The process is about to end; if it cannot be told, it goes on as a standby.
            let _ = self.inputs.unfit.try_send(why);
            return;
        }
        let jobs: Vec<JobSeen> = self.cluster.jobs.values().cloned().collect();
        let mut pods = self.cluster.workers_by_owner();
        for seen in jobs {
            let owner = seen.owner();
            if !self.jobs.contains_key(&owner) {
                self.context.pulse.beat();
                let of = pods.remove(&owner).unwrap_or_default();
                self.adopt_with(&seen, of, now);
            }
        }
    }

    /// Why this process must not lead: jobs train whose pods another authority has sealed.
    fn unfit(&self) -> Option<String> {
        let sealed_by_others = self.cluster.jobs.values().filter(|seen| {
            lead::sealed_by(&seen.status).is_some_and(|keyring| keyring != self.operator.keyring)
        });
        let owners: Vec<Owner> = sealed_by_others.map(JobSeen::owner).collect();
        let lives = |pod: &PodSeen| {
            !pod.finished && pod.claims.as_ref().is_some_and(|owner| owners.contains(owner))
        };
        let pods = self.cluster.pods.values().filter(|pod| lives(pod)).count();
        (pods > 0).then(|| {
            format!(
                "the authority's Secret is not the one by which {pods} pods of {} jobs were made: \
                 restore it from a copy, or delete those pods (label {})",
                owners.len(),
                moejob_plan::pods::LABEL_JOB_UID
            )
        })
    }

    fn adopt(&mut self, seen: &JobSeen, now: Millis) {
        let owner = seen.owner();
        let pods = self.cluster.workers_by_owner().remove(&owner).unwrap_or_default();
        self.adopt_with(seen, pods, now);
    }

    fn adopt_with(&mut self, seen: &JobSeen, pods: Vec<Key>, now: Millis) {
        let Some(term) = self.term.filter(|_| !seen.deleted) else { return };
        let operator = Arc::clone(&self.operator);
        let mut job = Crew::new(seen, Arc::clone(&self.context), operator, term, now);
        for key in pods {
            let worker = self.cluster.pods.get(&key).and_then(|pod| pod.worker.clone());
            worker.into_iter().for_each(|worker| job.on(Event::Pod(worker), now));
        }
        self.jobs.insert(seen.owner(), job);
        self.stale = true;
    }

    fn decide(&mut self) {
        let (now, none) = (self.context.clock.now(), Granted::default());
        let look_again = self.allocation.requeue.is_some_and(|at| at <= now);
        if std::mem::take(&mut self.stale) || look_again {
            let ground = (&mut self.ground, self.operator.profiles.fabric());
            self.allocation =
                nodes::decide(&self.cluster, ground, &self.jobs, &mut self.memory, now);
            for (owner, job) in &mut self.jobs {
                let granted = self.allocation.jobs.get(&**owner).unwrap_or(&none);
                job.on(Event::Granted(granted.clone()), now);
            }
        }
        let mut sent = Vec::new();
        for (owner, job) in &mut self.jobs {
            if !job.is_to_turn(now) {
                continue;
            }
            job.on(Event::Api { heard: self.heard_of_api }, now);
            self.stale |= job.turn(&mut self.memory, &mut sent, owner, now);
        }
        if self.orphans.due().is_none_or(|at| at <= now) {
            let owners: HashSet<Owner> = self.cluster.jobs.values().map(JobSeen::owner).collect();
            let pods = self.cluster.pods.values().filter_map(|pod| pod.worker.as_deref());
            for (owner, write) in self.orphans.look(pods, |of| owners.contains(of), now) {
                let batch = lead::Batch { aside: true, writes: vec![(Origin::Expiry, write)] };
                sent.push((owner, batch));
            }
        }
        for (owner, batch) in sent {
            self.send(owner, batch);
        }
    }

    fn send(&self, owner: Owner, batch: lead::Batch) {
        let (writer, done) = (self.context.writer.clone(), self.done.0.clone());
        tokio::spawn(async move {
            let lead::Batch { aside, writes } = batch;
            let (origins, writes): (Vec<_>, Vec<_>) = writes.into_iter().unzip();
            let written = writer.write_all(&owner, writes).await;
            let results = origins.into_iter().zip(written);
            let results = results.map(|(origin, (label, written))| (origin, label, written));
            // Without a receiver the process ends.
            let _ = done.send(Done { owner, aside, results: results.collect() }).await;
        });
    }
}
