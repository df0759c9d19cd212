//! The embedded default: the same loop as on a cluster, with processes in place of pods.
//!
//! ```text
//! event (stream, child, signal, timer) -> Tracker -> plan(&Observed, now) -> apply -> Tracker
//! ```
//!
//! Nodes are `node-0`, `node-1`, ...: one worker process each. All state that must outlive the
//! runner lies in `DIR/NAME`: `job.json` (identity, attempt), the checkpoints, and the claims
//! beside them.

mod folder;
mod process;

use crate::authority::Authority;
use crate::control::{Leader, LeaderEvent};
use crate::progress::Progress;
use folder::{Folder, FolderError, JobFile};
use moe_worker::life::affinity::Share;
use moe_worker::checkpoint::{self, Disk, Refusal};
use moe_worker::attempt::records::{self, Records};
use moejob_plan::decide::{Action, plan};
use moejob_plan::observed::{Millis, Node, Observed, Outcome, Record, Stored, Wanted};
use moejob_plan::track::{Happening, Recovery, Tracker};
use moejob_protocol::config::WorkerConfig;
use moejob_protocol::message::{Down, Heartbeat, Up};
use moejob_protocol::report::{Detail, Event as Line, EventKind};
use process::{Processes, ProcessEvent};
use std::collections::{BTreeMap, HashMap, HashSet};
use std::path::PathBuf;
use std::time::{Duration, Instant};
use tokio::sync::mpsc;

/// Happenings that wait for the loop; workers are slower than it by far.
const EVENTS_MAX: usize = 1024;
/// A worker that keeps failing is started again after 100 ms, 200 ms, ... up to this.
const BACKOFF_MAX: Millis = 10_000;

/// What a local run needs of its job.
pub struct LocalJob {
    pub name: String,
    /// The spec as JSON, for the next start to compare with.
    pub spec: serde_json::Value,
    pub wanted: Wanted,
    /// The configuration of an attempt, less what the plan fills in.
    pub template: WorkerConfig,
    pub nodes: u32,
    pub heartbeat_timeout: Duration,
}

/// Runs a job to its end. Returns the exit code.
pub fn run(job: LocalJob, dir: PathBuf) -> Result<i32, LocalError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Workers die with the thread that started them, so all of it stays on this one.
    runtime.block_on(Runner::start(job, dir)?.run())
}

/// What keeps a local run from starting or going on; workers' own failures are outcomes.
#[derive(Debug, thiserror::Error)]
pub enum LocalError {
    #[error(transparent)]
    Folder(#[from] FolderError),
    #[error("cannot create the run's certificate authority")]
    Authority(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("cannot start a worker process")]
    Spawn(#[source] std::io::Error),
    #[error("cannot read the checkpoints of this run")]
    Checkpoints(#[source] Box<dyn std::error::Error + Send + Sync>),
    #[error("the asynchronous runtime failed")]
    Runtime(#[from] std::io::Error),
}

impl LocalError {
    pub fn exit_code(&self) -> i32 {
        match self {
            LocalError::Folder(error) => error.exit_code(),
            LocalError::Checkpoints(_) => 3,
            _ => 1,
        }
    }
}

enum Event {
    Control(String, LeaderEvent),
    Process(String, ProcessEvent),
    Interrupt,
    HangUp,
    Timer,
}

struct Runner {
    folder: Folder,
    tracker: Tracker,
    leader: Leader,
    processes: Processes,
    records: Records,
    progress: Progress,
    started: Instant,
    receiver: mpsc::Receiver<Event>,
    sender: mpsc::Sender<Event>,
    /// Workers whose `WorkerStarted` line is written.
    announced: HashSet<String>,
    /// Failures in a row, by node.
    failures: HashMap<String, u32>,
    last_why: Vec<String>,
}

impl Runner {
    fn start(job: LocalJob, dir: PathBuf) -> Result<Runner, LocalError> {
        let defaults = moejob_plan::launch::defaults();
        let folder = Folder::open(&dir.join(&job.name), &job.spec, &defaults)?;
        let (sender, receiver) = mpsc::channel(EVENTS_MAX);
        let authority =
            Authority::new().map_err(|error| LocalError::Authority(Box::new(error)))?;
        let uid = folder.file().uid.clone();
        let processes = Processes::new(&folder, &authority, &uid);
        let leader = Leader::new(authority, uid.clone(), job.heartbeat_timeout);
        let location = PathBuf::from(&job.template.checkpoint.location);
        let steps = job.template.training.steps;
        let newest = checkpoint::newest_usable(&Disk::real(), &location)
            .map_err(|error| LocalError::Checkpoints(Box::new(error)))?;
        let stored = newest.usable.map(|found| Stored { step: found.step, name: found.name });
        let observed = observe(&folder, job, stored, &uid);
        let records = folder.records()?;
        let mut runner = Runner {
            tracker: Tracker::new(observed),
            leader,
            processes,
            records,
            progress: Progress::new(steps),
            started: Instant::now(),
            receiver,
            sender,
            announced: HashSet::new(),
            failures: HashMap::new(),
            last_why: Vec::new(),
            folder,
        };
        runner.tell_refused(&newest.refused);
        Ok(runner)
    }

    /// Damaged checkpoints are named, and the one before them is used.
    fn tell_refused(&mut self, refused: &[Refusal]) {
        for refusal in refused {
            let message = refusal.to_string();
            self.progress.note(&message);
            let details = [("name", Detail::Text(refusal.name.clone()))];
            self.event(EventKind::CheckpointRefused, "Damaged", &message, &details);
        }
    }

    fn now(&self) -> Millis {
        self.started.elapsed().as_millis() as Millis
    }

    async fn run(mut self) -> Result<i32, LocalError> {
        if let Some(code) = self.already_done() {
            return Ok(code);
        }
        self.watch_signals()?;
        loop {
            let requeue = self.decide()?;
            if let Some(outcome) = self.tracker.observed.record.outcome.clone() {
                self.processes.end_all().await;
                return Ok(self.conclude(&outcome));
            }
            let event = self.next(requeue).await;
            self.on_event(event);
            // What has arrived together is decided on together: two losses at once are one.
            while let Ok(event) = self.receiver.try_recv() {
                self.on_event(event);
            }
        }
    }

    /// Nothing to do: the newest checkpoint is that of the last step.
    fn already_done(&mut self) -> Option<i32> {
        let steps = self.tracker.observed.template.training.steps;
        let stored = self.tracker.observed.stored.as_ref()?;
        (stored.step >= steps).then(|| {
            self.progress.note(&format!(
                "{} is complete: {} has all {steps} steps. Raise training.steps to go on, or \
                 remove {} to start anew.",
                self.folder.path().display(),
                stored.name,
                self.folder.path().display()
            ));
            0
        })
    }

    fn watch_signals(&self) -> Result<(), LocalError> {
        use tokio::signal::unix::{SignalKind, signal};
        // A dropped terminal ends a run as Ctrl-C does: with a checkpoint.
        let kinds = [SignalKind::interrupt(), SignalKind::terminate(), SignalKind::hangup()];
        for kind in kinds {
            let mut signals = signal(kind)?;
            let sender = self.sender.clone();
            let hangs_up = kind == SignalKind::hangup();
            tokio::spawn(async move {
                while signals.recv().await.is_some() {
                    let event = if hangs_up { Event::HangUp } else { Event::Interrupt };
                    let _ = sender.send(event).await;
                }
            });
        }
        Ok(())
    }

    async fn next(&mut self, requeue: Option<Millis>) -> Event {
        let wait = requeue.map(|at| Duration::from_millis(at.saturating_sub(self.now())));
        let wait = wait.unwrap_or(Duration::from_secs(3600));
        tokio::select! {
            event = self.receiver.recv() => event.unwrap_or(Event::Timer),
            (name, event) = self.leader.next_event() => Event::Control(name, event),
            () = tokio::time::sleep(wait) => Event::Timer,
        }
    }

    fn on_event(&mut self, event: Event) {
        let now = self.now();
        match event {
            Event::Timer => {}
            Event::Interrupt => self.interrupt(),
            // The terminal is gone, and kernel and shell may both say so: once is enough.
            Event::HangUp if self.tracker.observed.interrupt => {}
            Event::HangUp => self.interrupt(),
            Event::Process(name, event) => self.on_process(&name, event, now),
            Event::Control(name, event) => self.on_control(&name, event, now),
        }
    }

    fn interrupt(&mut self) {
        if self.tracker.observed.interrupt {
            self.progress.note("interrupted twice: ending at once, without a checkpoint");
            std::process::exit(130);
        }
        self.progress.note("stopping after this step with a checkpoint (again to end at once)");
        self.tracker.observed.interrupt = true;
    }

    fn on_process(&mut self, name: &str, event: ProcessEvent, now: Millis) {
        match event {
            ProcessEvent::Listening { port } => {
                let address = format!("127.0.0.1:{port}");
                self.processes.listening(name, &address);
                self.leader.dial(name, &address, self.processes.secret());
            }
            ProcessEvent::Exited { exit_code, how } => {
                self.leader.close(name);
                self.processes.forget(name);
                let happenings = self.tracker.exited(name, exit_code, &how, now);
                self.back_off(name, now);
                self.tell(happenings);
            }
        }
    }

    fn on_control(&mut self, name: &str, event: LeaderEvent, now: Millis) {
        let happenings = match event {
            LeaderEvent::Opened(hello) => {
                let address = self.processes.address(name).unwrap_or_default();
                self.tracker.connected(name, &address, &hello);
                Vec::new()
            }
            LeaderEvent::Up { attempt, up } => {
                self.show(name, &up);
                self.tracker.heard(name, attempt, &up, now)
            }
            LeaderEvent::Silent => self.tracker.silent(name, "nothing heard of it"),
            LeaderEvent::Ended { reason, .. } => self.tracker.silent(name, &reason),
        };
        self.tell(happenings);
    }

    fn show(&mut self, name: &str, up: &Up) {
        match up {
            Up::Heartbeat(Heartbeat { loading: Some(loading), .. }) => {
                self.progress.loading(name, loading);
            }
            Up::Step(report) => self.progress.step(report),
            Up::Event(event) => {
                let kinds = [
                    EventKind::CheckpointRefused,
                    EventKind::CheckpointDegraded,
                    EventKind::CheckpointRecovered,
                    EventKind::Resumed,
                    EventKind::Warning,
                ];
                if kinds.contains(&event.event) || event.event == EventKind::EngineLost {
                    self.progress.note(&event.message);
                }
                // The ranks' own records lie with rank 0; of its engines a worker tells us.
                if [EventKind::EngineStarted, EventKind::EngineLost].contains(&event.event) {
                    self.write(event);
                }
            }
            Up::Failed { message, .. } => self.progress.note(message),
            _ => {}
        }
    }

    /// Plans and applies until the plan has nothing more to do.
    fn decide(&mut self) -> Result<Option<Millis>, LocalError> {
        loop {
            self.tracker.prune();
            let now = self.now();
            let plan = plan(&self.tracker.observed, now);
            if plan.why != self.last_why {
                plan.why.iter().for_each(|why| tracing::info!("{why}"));
                self.last_why = plan.why;
            }
            if plan.actions.is_empty() {
                return Ok(plan.requeue);
            }
            for action in plan.actions {
                self.apply(&action)?;
                self.tracker.done(&action, self.now());
            }
            if self.tracker.observed.record.outcome.is_some() {
                return Ok(None);
            }
        }
    }

    /// One arm an action, and no choice left.
    fn apply(&mut self, action: &Action) -> Result<(), LocalError> {
        match action {
            Action::StartWorker { name, node } => {
                let sender = self.sender.clone();
                let of = name.clone();
                let share = self.share(node);
                self.processes
                    .start(name, node, share, move |event| {
                        let (sender, of) = (sender.clone(), of.clone());
                        async move {
                            let _ = sender.send(Event::Process(of, event)).await;
                        }
                    })
                    .map_err(LocalError::Spawn)?;
            }
            Action::StopWorker { name, grace } => {
                self.leader.send(name, self.tracker.observed.record.attempt, Down::Shutdown);
                self.processes.stop(name, Duration::from_millis(*grace));
            }
            Action::EndAttempt { .. }
            | Action::AvoidNode { .. }
            | Action::NoteStop
            | Action::WithdrawStop => {}
            Action::RecordAttempt(gang) => {
                let file = self.folder.file().clone();
                self.folder.record(JobFile { attempt: gang.attempt, ..file })?;
                let details = [
                    ("mesh", Detail::Mesh(gang.layout.mesh)),
                    ("step", Detail::Number(gang.resumed_at)),
                    ("nodes", Detail::Number(gang.members.len() as u64)),
                ];
                // The record still names the attempt before.
                let line =
                    line(gang.attempt, EventKind::AttemptStarted, "Planned", "", &details);
                self.write(&line);
            }
            Action::Configure { name, rank, config } => {
                self.announce(name, *rank, config.attempt);
                self.leader.configure(name, *rank, config);
            }
            Action::LeaveAttempt { name, attempt, reason } => {
                self.leader.send(name, *attempt, Down::Leave { reason: reason.clone() });
            }
            Action::Request { attempt, request, .. } => {
                let gang = self.tracker.observed.record.gang.as_ref();
                let members = gang.map_or(&[][..], |gang| &gang.members);
                self.leader.request(members, *attempt, *request);
            }
            Action::Finish(outcome) => self.record_outcome(outcome),
        }
        Ok(())
    }

    /// All nodes of a local run are this machine.
    fn share(&self, node: &str) -> Share {
        let nodes = &self.tracker.observed.nodes;
        let index = nodes.iter().position(|of| of.name == node).unwrap_or_default();
        Share { index: index as u32, of: nodes.len() as u32 }
    }

    fn announce(&mut self, name: &str, rank: u32, attempt: u32) {
        if !self.announced.insert(name.to_string()) {
            return;
        }
        let node = self.tracker.observed.worker(name).map(|worker| worker.node.clone());
        let details = [
            ("rank", Detail::Number(u64::from(rank))),
            ("node", Detail::Text(node.unwrap_or_default())),
            ("pid", Detail::Number(self.processes.pid(name).unwrap_or_default().into())),
            ("worker", Detail::Text(name.to_string())),
        ];
        // The line names the attempt that it joins first.
        let line = line(attempt, EventKind::WorkerStarted, "Configured", "", &details);
        self.write(&line);
    }

    fn back_off(&mut self, name: &str, now: Millis) {
        let Some(worker) = self.tracker.observed.worker(name) else {
            return;
        };
        let (node, stopping) = (worker.node.clone(), worker.stopping);
        // One that had trained was lost; one that had not will likely fail again.
        let trained = self.announced.remove(name);
        let failures = self.failures.entry(node.clone()).or_default();
        *failures = if trained || stopping { 0 } else { *failures + 1 };
        let wait = match *failures {
            0 => 0,
            count => (100 << count.min(10)).min(BACKOFF_MAX),
        };
        let nodes = &mut self.tracker.observed.nodes;
        if let Some(node) = nodes.iter_mut().find(|of| of.name == node) {
            node.avoid_until = node.avoid_until.max(now + wait);
        }
    }

    fn tell(&mut self, happenings: Vec<Happening>) {
        for happening in happenings {
            match happening {
                Happening::WorkerLost { name, cause } => {
                    let worker = self.tracker.observed.worker(&name);
                    let node = worker.map(|worker| worker.node.clone()).unwrap_or_default();
                    let details = [
                        ("worker", Detail::Text(name.clone())),
                        ("node", Detail::Text(node)),
                        ("pid", Detail::Number(self.processes.pid(&name).unwrap_or(0).into())),
                    ];
                    self.progress.note(&format!("lost {name}: {cause}"));
                    self.event(EventKind::WorkerLost, "Lost", &cause, &details);
                }
                Happening::Recovered(recovery) => self.recovered(&recovery),
            }
        }
    }

    fn recovered(&mut self, recovery: &Recovery) {
        let took = |at: Option<Millis>| at.unwrap_or_default().saturating_sub(recovery.detected_at);
        let details = [
            ("replannedMs", Detail::Number(took(recovery.replanned_at))),
            ("firstStepMs", Detail::Number(took(recovery.first_step_at))),
            ("stepsLost", Detail::Number(recovery.steps_lost)),
        ];
        let message = format!(
            "training again {} ms after the loss was noticed",
            took(recovery.first_step_at)
        );
        self.progress.note(&message);
        self.event(EventKind::Recovered, "FirstStep", &recovery.cause, &details);
    }

    fn record_outcome(&mut self, outcome: &Outcome) {
        match outcome {
            Outcome::Complete { step } => {
                let details = [("step", Detail::Number(*step))];
                self.event(EventKind::JobCompleted, "AllStepsDone", "", &details);
            }
            Outcome::Failed { reason, message, exit_code } => {
                let details = [("exitCode", Detail::Number(*exit_code as u64))];
                self.event(EventKind::JobFailed, reason, message, &details);
            }
            Outcome::Suspended => self.event(EventKind::JobSuspended, "Asked", "", &[]),
            Outcome::Interrupted => self.event(EventKind::Interrupted, "Asked", "", &[]),
        }
    }

    /// Says how it ended, and what to do next.
    fn conclude(&mut self, outcome: &Outcome) -> i32 {
        self.progress.finish();
        let folder = self.folder.path().display().to_string();
        match outcome {
            Outcome::Complete { step } => {
                let name = checkpoint_name(*step);
                self.progress.note(&format!("done: the model lies in {folder}/checkpoints/{name}"));
                0
            }
            Outcome::Failed { exit_code, reason, message } => {
                self.progress.note(&format!(
                    "failed: {reason}: {message}\n  the workers' own words are in {folder}/logs"
                ));
                *exit_code
            }
            Outcome::Suspended => 0,
            Outcome::Interrupted => {
                let stored = self.tracker.observed.stored.as_ref();
                let from = stored.map_or("the beginning", |stored| stored.name.as_str());
                self.progress.note(&format!(
                    "interrupted; the same command goes on from {from} in {folder}/checkpoints"
                ));
                130
            }
        }
    }

    fn event(&mut self, kind: EventKind, reason: &str, message: &str, details: &[(&str, Detail)]) {
        let attempt = self.tracker.observed.record.attempt;
        let line = line(attempt, kind, reason, message, details);
        self.write(&line);
    }

    fn write(&mut self, line: &Line) {
        if let Err(error) = self.records.event(line) {
            self.progress.note(&format!("cannot write to events.jsonl: {error}"));
        }
    }
}

fn checkpoint_name(step: u64) -> String {
    moejob_protocol::checkpoint::directory_name(step)
}

fn line(
    attempt: u32,
    event: EventKind,
    reason: &str,
    message: &str,
    details: &[(&str, Detail)],
) -> Line {
    let details: BTreeMap<String, Detail> =
        details.iter().map(|(key, value)| (key.to_string(), value.clone())).collect();
    let time = records::now();
    Line { time, attempt, event, reason: reason.into(), message: message.into(), details }
}

/// The first observation: what earlier runs have left behind.
fn observe(folder: &Folder, job: LocalJob, stored: Option<Stored>, uid: &str) -> Observed {
    let node = |index| Node { name: format!("node-{index}"), usable: true, avoid_until: 0 };
    let record = Record {
        attempt: folder.file().attempt,
        step: stored.as_ref().map_or(0, |stored| stored.step),
        ..Record::default()
    };
    Observed {
        wanted: job.wanted,
        template: WorkerConfig { job_uid: uid.to_string(), ..job.template },
        nodes: (0..job.nodes).map(node).collect(),
        workers: Vec::new(),
        record,
        stored,
        interrupt: false,
    }
}
