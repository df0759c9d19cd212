//! The shell of the operator: one task for all jobs, which observes, asks and executes.
//!
//! ```text
//! watches, streams, results of writes --Event--> Cluster, JobLoop::on
//! Cluster + all jobs --allocate--> nodes of each job --JobLoop::turn--> effects --Crew--> done
//! ```
//!
//! What is to be done about a job its `JobLoop` says, which jobs get which nodes `allocate`:
//! nothing here chooses. A standby keeps its view of the cluster and nothing else.

mod changes;
mod clock;
mod crew;
mod judging;

pub use clock::{Clock, now};

use crate::apply::Writer;
use crate::control::Told;
use crate::metrics::Metrics;
use crate::observe::{Change, Cluster, JobText, Owner};
use crate::pulse::{ASK_EVERY, Pulse};
use crew::Crew;
use judging::Judging;
use moejob_identity::authority::Authority;
use moejob_identity::{Keyring, Reviewer};
use moejob_plan::allocate::{Allocation, Ground, Memory, allocate};
use moejob_plan::lead::{self, Digest, Event, Operator, Origin};
use moejob_plan::observed::Millis;
use moejob_plan::orphans::Orphans;
use std::collections::{HashMap, HashSet};
use std::sync::Arc;
use std::time::{Duration, Instant};
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
    pub told: mpsc::Sender<Told>,
    pub clock: Clock,
    /// The loop's answers.
    pub pulse: Pulse,
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

/// A batch of a job's writes is done, or is not; and the number of the crew that it was for.
type Done = (Owner, u64, Event);

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
    /// Those that are over, or Invalid.
    finished: HashMap<Owner, Digest>,
    /// Those that are to be judged.
    judging: Judging,
    /// All jobs that there were when it began to lead are judged.
    settled: bool,
    /// Nodes were allocated since it began to lead.
    begun: bool,
    /// How many there have been.
    crews: u64,
    term: Option<u64>,
    /// Pods, nodes or jobs have changed since nodes were allocated.
    stale: bool,
    /// Pods of many jobs were coming up when somebody last had something to do.
    crowd: bool,
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
    pub fn new(context: Context, operator: Operator, inputs: Inputs) -> Controller {
        Controller {
            context: Arc::new(context),
            operator: Arc::new(operator),
            inputs,
            done: mpsc::channel(EVENTS_MAX),
            cluster: Cluster::default(),
            jobs: HashMap::new(),
            finished: HashMap::new(),
            judging: Judging::default(),
            settled: false,
            begun: false,
            crews: 0,
            term: None,
            stale: true,
            crowd: false,
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
            // what takes its time: other jobs have their turns in between.
            for _ in 0..TOGETHER_MAX {
                if began.elapsed() > TOGETHER_FOR {
                    break;
                }
                let Some(input) = self.arrived() else { break };
                self.on(input);
            }
            self.judge_some();
            // Whoever renews the lease has a turn after each of ours.
            tokio::task::yield_now().await;
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

    /// A standby only listens, and who begins to lead knows first what trains.
    fn decides(&self) -> bool {
        self.term.is_some() && self.cluster.is_complete() && !self.judging.holds_up()
    }

    async fn next(&mut self) -> Input {
        let now = self.context.clock.now();
        let dues = self.jobs.values().filter_map(|job| job.due);
        let ends = self.finished.values().filter_map(Digest::due);
        let due = dues.chain(ends).chain(self.allocation.requeue).chain(self.orphans.due()).min();
        // It answers each second, also when nothing is to be done.
        let idle = ASK_EVERY / 2;
        let wait = due.map_or(idle, |at| Duration::from_millis(at.saturating_sub(now)).min(idle));
        let pause = self.pause.saturating_duration_since(Instant::now());
        // A decision may have changed what allocation is to see.
        let soon = self.awaits_decision || (self.stale && self.decides());
        let wait = if soon { pause } else { wait.max(pause) };
        let wait = if self.judging.is_empty() { wait } else { Duration::ZERO };
        // Results first: they are what a job waits for.
        tokio::select! {
            biased;
            Some(done) = self.done.1.recv() => Input::Done(done),
            Some(order) = self.inputs.orders.recv() => Input::Order(order),
            Some(told) = self.inputs.told.recv() => Input::Told(told),
            Some(change) = self.inputs.changes.recv() => Input::Change(change),
            () = tokio::task::yield_now(), if wait.is_zero() => Input::Timer,
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

    fn on_done(&mut self, (owner, number, done): Done, now: Millis) {
        if let Event::Done { results, .. } = &done {
            for (_, written) in results {
                let label = written.as_ref().map_or_else(|error| error.kind.label(), |_| "ok");
                self.context.metrics.result(label);
                if written.is_ok() {
                    self.heard_of_api = now;
                }
            }
        }
        // A job that was taken anew sees by its watches what became of what was sent before.
        if let Some(job) = self.jobs.get_mut(&owner).filter(|job| job.number == number) {
            job.job.on(done, now);
        }
    }

    fn decide(&mut self) {
        let now = self.context.clock.now();
        let look_again = self.allocation.requeue.is_some_and(|at| at <= now);
        // Those that train have their nodes at once. Nobody else is given any before all that may
        // have a better right to them are known.
        let may = self.settled || !self.begun;
        if may && (self.stale || look_again) {
            (self.stale, self.begun) = (false, true);
            self.allocate(now);
        }
        self.take_back(now);
        let (mut sent, mut invalid) = (Vec::new(), Vec::new());
        // One begins only where a job has something to do, so a heartbeat alone is no reason to
        // look at the workers of all jobs.
        let looks = self.crowd || self.jobs.values().any(|job| job.is_to_turn(now));
        self.crowd = looks && lead::is_crowd(self.jobs.values().map(|job| &job.job), now);
        for (owner, job) in &mut self.jobs {
            job.job.on(Event::Crowd(self.crowd), now);
            if !job.is_granted || !job.is_to_turn(now) {
                continue;
            }
            job.job.on(Event::Api { heard: self.heard_of_api }, now);
            self.stale |= job.turn(&mut self.memory, &mut sent, owner, now);
            invalid.extend(job.job.digest_of_invalid().map(|of| (Owner::clone(owner), of)));
        }
        for (owner, digest) in invalid {
            if !self.cluster.has_pods(&owner) {
                self.jobs.remove(&owner);
                self.finish(owner, digest);
            }
        }
        if self.orphans.due().is_none_or(|at| at <= now) {
            let owners: HashSet<Owner> = self.cluster.jobs.values().map(JobText::owner).collect();
            let pods = self.cluster.pods.values().filter_map(|pod| pod.worker.as_deref());
            for (owner, write) in self.orphans.look(pods, |of| owners.contains(of), now) {
                let batch = lead::Batch { aside: true, writes: vec![(Origin::Expiry, write)] };
                sent.push((owner, 0, batch));
            }
        }
        for (owner, digest) in &mut self.finished {
            if let Some(write) = digest.expire(now) {
                let batch = lead::Batch { aside: true, writes: vec![(Origin::Expiry, write)] };
                sent.push((Owner::clone(owner), 0, batch));
            }
        }
        for (owner, number, batch) in sent {
            self.send(owner, number, batch);
        }
    }

    /// The nodes of each job, decided for all of them together.
    fn allocate(&mut self, now: Millis) {
        self.memory.expire(now);
        let keys = self.operator.profiles.fabric();
        let ground = self.ground.get_or_insert_with(|| Ground::new(self.cluster.nodes(), keys));
        let jobs = self.jobs.iter().map(|(owner, job)| (&**owner, &job.job));
        let held = self.cluster.held().collect();
        let demands = lead::demands(jobs, held, |class| self.cluster.priority(class));
        self.allocation = allocate(ground, &demands, &self.memory, now);
        self.allocation.bound_missing(ground, &demands, self.operator.placeholders_max);
        for (owner, job) in &mut self.jobs {
            let granted = self.allocation.jobs.get(&**owner).cloned().unwrap_or_default();
            job.job.on(Event::Granted(granted), now);
            job.is_granted = true;
        }
    }

    fn send(&self, owner: Owner, number: u64, batch: lead::Batch) {
        let (writer, done) = (self.context.writer.clone(), self.done.0.clone());
        tokio::spawn(async move {
            let results = writer.write_all(&owner, batch.writes).await;
            // Without a receiver the process ends.
            done.send((owner, number, Event::Done { aside: batch.aside, results })).await
        });
    }
}
