//! The embedded default: the loop of the operator, with processes in place of pods.
//!
//! ```text
//! process, stream, signal --Event--> JobLoop::on
//! JobLoop::turn(now) -> effects: streams; writes, which are spawn, kill, job.json; what is told
//! ```
//!
//! Nodes are `node-0`, `node-1`, ...: one worker process each. All state that must outlive the
//! runner lies in `DIR/NAME`: `job.json` (identity, attempt), the checkpoints, and the claims
//! beside them. Nothing is decided here.

mod ends;
mod error;
mod folder;
mod loss;
mod passed;
mod process;
mod signals;
mod stumbles;
pub(crate) mod words;

use crate::cli::disk::patient;
use crate::control::{Leader, LeaderEvent, Told, Verifier};
use crate::controller::Clock;
use crate::cli::progress::{Progress, clock, end};
use jiff::Zoned;
use crate::cli::run::mlflow::{About, MlFlow, Tracking};
use crate::cli::run::tfevents::TfEvents;
pub use error::LocalError;
pub use folder::FolderError;
use folder::{Folder, JobFile};
use loss::LossWatch;
use passed::pass_over;
use moe_worker::attempt::recorder::Recorder;
use moe_worker::attempt::records;
use moe_worker::checkpoint::{self, Refusal};
use moe_worker::data::Listing;
use moe_worker::life::affinity::Share;
use moejob_identity::authority::Authority;
use moejob_manifest::identity::{self, Steered};
use moejob_manifest::status::{CheckpointStatus, MoeJobStatus};
use moejob_manifest::words::count;
use moejob_plan::allocate::Granted;
use moejob_plan::decide::Action;
use moejob_plan::lead::{
    Batch, Effect, Event, JobLoop, JobSeen, Link, Local, Origin, Place, SLOW_LINK, Write,
};
use moejob_plan::observed::{Millis, Node, Record};
use moejob_plan::record::{self, Saved};
use moejob_plan::track::Recovery;
use moejob_protocol::message::{Heartbeat, Up};
use moejob_protocol::report::{Detail, Event as Line, EventKind, StepReport};
use process::{ProcessEvent, Processes};
use stumbles::{Stumbles, unwritten};
use std::collections::BTreeMap;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::Duration;
use tokio::sync::mpsc;
use words::Words;

/// Happenings that wait for the loop, and that are decided on together at most.
const EVENTS_MAX: usize = 1024;
/// Milliseconds for which the line of a loss waits for the recovery, whose line tells both.
const HELD_MAX: Millis = 3000;
/// Failures in a row to start a worker, after which a run that has trained nothing ends: half a
/// minute with the pauses between them. One that has trained tries on.
const SPAWNS_MAX: u32 = 12;

/// What a run writes beside its records.
#[derive(Clone, Debug, Default)]
pub struct Options {
    /// Where rank 0 writes a trace of a few steps.
    pub trace: Option<PathBuf>,
    /// What TensorBoard reads.
    pub tfevents: bool,
    /// The MLflow server that is told of the run.
    pub mlflow: Option<Tracking>,
    /// It begins at step 0 although checkpoints are there that cannot be used.
    pub fresh: bool,
}

/// Runs a job to its end, in `dir`. Returns the exit code.
///
/// # Errors
/// See `LocalError`.
pub fn run(job: Local, dir: &Path, options: Options) -> Result<i32, LocalError> {
    let runtime = tokio::runtime::Builder::new_current_thread().enable_all().build()?;
    // Workers die with the thread that started them, so all of it stays on this one.
    runtime.block_on(async { Runner::start(job, dir, options)?.run().await })
}

struct Runner {
    folder: Folder,
    /// Where its checkpoints lie.
    location: PathBuf,
    job: JobLoop,
    leader: Leader,
    processes: Processes,
    records: Recorder,
    progress: Progress,
    words: Words,
    losses: LossWatch,
    /// Why checkpoints fail at present.
    failing: Option<String>,
    /// Ranks of the attempt before, and of this one.
    ranks: [u32; 2],
    /// The price of a node and hour.
    price: Option<f64>,
    tfevents: Option<TfEvents>,
    mlflow: Option<MlFlow>,
    stumbles: Stumbles,
    /// Failures in a row to start a worker.
    spawns_failed: u32,
    clock: Clock,
    told: mpsc::Receiver<Told>,
    changes: mpsc::Receiver<(String, ProcessEvent)>,
}

impl Runner {
    fn start(job: Local, dir: &Path, options: Options) -> Result<Runner, LocalError> {
        let (identity, steps) = (identity::of(&job.job), job.job.training.steps);
        let about = About {
            job: job.job.name.clone(),
            spec: identity.clone(),
            folder: dir.join(&job.job.name),
        };
        let (price, begins) = (job.job.profile.price, job.job.model_from.is_none());
        let folder = Folder::open(&dir.join(&job.job.name), &identity, &identity::defaults())?;
        let authority =
            Authority::new().map_err(|error| LocalError::Authority(Box::new(error)))?;
        let location = PathBuf::from(&job.places.checkpoints);
        let newest = checkpoint::newest_usable(&patient(), &location)
            .map_err(|error| LocalError::Checkpoints(Box::new(error)))?;
        let passed_over = pass_over(&location, &newest, options.fresh, steps)?;
        let stored = newest.usable;
        let stored = stored.map(|of| CheckpointStatus { step: of.step, name: of.name });
        let nodes = (0..job.job.nodes.max + job.job.nodes.spares).map(|index| {
            Node::good(&format!("node-{index}"))
        });
        let granted = Granted { nodes: nodes.collect(), ..Granted::default() };
        let done = stored.as_ref().map_or(0, |stored| stored.step);
        let begins = begins && done == 0;
        let jump = identity::stretched(&folder.file().spec, &job.job.training, done);
        let clock = Clock::start();
        let seen = seen(&folder, &job.job.name, stored);
        let mut job = JobLoop::new(&seen, Place::Machine(Box::new(job)), 1, clock.now());
        job.on(Event::Granted(granted), clock.now());
        let (sender, changes) = mpsc::channel(EVENTS_MAX);
        let processes = Processes::new(&folder, &authority, options.trace, sender);
        let (sender, told) = mpsc::channel(EVENTS_MAX);
        let leader = Leader::new(Arc::new(authority), (seen.owner(), &seen.uid), 1, sender);
        // Where they cannot be written at all there is no run.
        drop(folder.records()?);
        let records = Recorder::start(folder.path().to_path_buf(), 0, false)?;
        let progress = Progress::new(steps);
        let words = Words::new(&folder.logs());
        let tfevents = options.tfevents.then(|| TfEvents::create(folder.path())).transpose()?;
        let mlflow = options.mlflow.map(|tracking| tracking.start(about)).transpose()?;
        let mut runner = Runner {
            folder,
            location,
            job,
            leader,
            processes,
            records,
            progress,
            words,
            losses: LossWatch::new(begins),
            failing: None,
            ranks: [0; 2],
            price,
            tfevents,
            mlflow,
            stumbles: Stumbles::default(),
            spawns_failed: 0,
            clock,
            told,
            changes,
        };
        runner.tell_refused(&newest.refused, &passed_over);
        for Steered { field, was, is } in runner.folder.steered() {
            runner.progress.note(&format!("from step {} on {field}: was {was}, is {is}", done + 1));
        }
        jump.into_iter().for_each(|jump| runner.progress.note(&jump));
        Ok(runner)
    }

    /// A field has another value from `step` on, the first that was done with it.
    fn tell_steered(&mut self, Steered { field, was, is }: &Steered, step: u64) {
        let details = [
            ("step", Detail::Number(step)),
            ("field", Detail::Text(field.to_string())),
            ("was", Detail::Text(was.to_string())),
            ("is", Detail::Text(is.to_string())),
        ];
        let message = format!("{field}: was {was}, is {is}");
        self.event(EventKind::SpecChanged, "Resumed", &message, &details);
    }

    /// Checkpoints that are refused are named, with what became of each.
    fn tell_refused(&mut self, refused: &[Refusal], became: &[String]) {
        for (refusal, became) in refused.iter().zip(became) {
            let message = format!("{refusal}; {became}");
            self.progress.note(&message);
            let details = [("name", Detail::Text(refusal.name.clone()))];
            self.event(EventKind::CheckpointRefused, refusal.reason(), &message, &details);
        }
    }

    async fn run(mut self) -> Result<i32, LocalError> {
        if let Some(code) = self.already_done() {
            return Ok(code);
        }
        self.tell_start();
        let mut signals = signals::watch()?;
        loop {
            let due = self.turn()?;
            if let Some(outcome) = self.job.tracker().observed.record.outcome.clone() {
                self.processes.end_all().await;
                return Ok(self.conclude(&outcome));
            }
            let wait = due.map_or(3_600_000, |at| at.saturating_sub(self.clock.now()));
            let wait = if self.words.holds() { wait.min(HELD_MAX) } else { wait };
            tokio::select! {
                biased;
                Some(hangs_up) = signals.recv() => self.interrupt(hangs_up),
                // What a worker said last comes before its end.
                Some(told) = self.told.recv() => self.on_told(told),
                Some((name, change)) = self.changes.recv() => self.on_process(&name, change),
                () = tokio::time::sleep(Duration::from_millis(wait)) => {}
            }
            // What has arrived together is decided on together: two losses at once are one.
            for _ in 0..EVENTS_MAX {
                let Ok(told) = self.told.try_recv() else { break };
                self.on_told(told);
            }
            for _ in 0..EVENTS_MAX {
                let Ok((name, change)) = self.changes.try_recv() else { break };
                self.on_process(&name, change);
            }
            self.tell_held(HELD_MAX);
            if let Some(news) = self.records.take_news() {
                self.progress.note(&news);
            }
        }
    }

    /// Nothing to do: the newest checkpoint is that of the last step.
    fn already_done(&mut self) -> Option<i32> {
        let observed = &self.job.tracker().observed;
        let steps = observed.template.training.steps;
        let stored = observed.stored.as_ref().filter(|stored| stored.step >= steps)?;
        if stored.step > steps {
            self.progress.note(&format!(
                "{folder} has done {} steps, and training.steps is {steps}: give it as many at \
                 least, or begin a run from an earlier checkpoint of it (`moejob checkpoint ls \
                 {folder}`) by --name OTHER --set model.from.path=CHECKPOINT",
                stored.step,
                folder = self.folder.path().display(),
            ));
            return Some(2);
        }
        self.progress.note(&format!(
            "{folder} is complete: {} has done all of its steps ({steps}). Raise training.steps to \
             go on, or remove {folder} to start anew.",
            stored.name,
            folder = self.folder.path().display(),
        ));
        Some(0)
    }

    fn interrupt(&mut self, hangs_up: bool) {
        if self.job.tracker().observed.interrupt {
            // The terminal is gone, and kernel and shell may both say so: once is enough.
            if hangs_up {
                return;
            }
            self.progress.note("interrupted twice: ending at once, without a checkpoint");
            std::process::exit(130);
        }
        self.progress.note("stopping after this step with a checkpoint (again to end at once)");
        self.job.on(Event::Stop, self.clock.now());
    }

    fn on_process(&mut self, name: &str, change: ProcessEvent) {
        if let Some(pod) = self.processes.changed(name, change) {
            self.job.on(Event::Pod(Box::new(pod)), self.clock.now());
        }
    }

    fn on_told(&mut self, told: Told) {
        if let Some((name, said)) = self.leader.accept(told) {
            if let LeaderEvent::Up { up, .. } = &said {
                self.show(&name, up);
            }
            self.job.on(Event::Stream { name, said }, self.clock.now());
        }
    }

    fn show(&mut self, name: &str, up: &Up) {
        match up {
            Up::Heartbeat(Heartbeat { loading: Some(loading), .. }) => {
                self.progress.loading(name, loading);
            }
            Up::Step(report) => {
                let begun = self.folder.begin();
                let what = "noting in job.json that steps are done";
                self.stumble(what, &begun, "it is tried again with each step");
                begun.iter().flatten().for_each(|of| self.tell_steered(of, report.step));
                self.words.stepped();
                self.progress.step(report);
                self.watch_loss(report);
                self.draw(report);
                if let Some(left) = self.progress.first_measure() {
                    self.expect(left);
                }
            }
            Up::Event(event) => {
                let kinds = [
                    EventKind::CheckpointRefused,
                    EventKind::CheckpointDegraded,
                    EventKind::CheckpointRecovered,
                    EventKind::DataDegraded,
                    EventKind::DataRecovered,
                    EventKind::Resumed,
                    EventKind::Warning,
                    EventKind::EngineLost,
                ];
                let words = match event.event {
                    // The line of the recovery tells it.
                    EventKind::Resumed if self.words.holds() => String::new(),
                    EventKind::Resumed if event.reason == "Memory" => {
                        words::goes_on_with(self.ranks[1])
                    }
                    EventKind::Resumed => words::goes_on_from(&event.message),
                    EventKind::EngineLost => words::of_lost_engine(event),
                    EventKind::CheckpointDegraded => {
                        self.failing = Some(event.message.clone());
                        words::of_failing(&event.message, self.newest())
                    }
                    _ => event.message.clone(),
                };
                let mended = [EventKind::CheckpointRecovered, EventKind::CheckpointCommitted];
                if mended.contains(&event.event) {
                    self.failing = None;
                }
                // Each attempt says of its data what the one before has said.
                let is_news = event.event != EventKind::Warning || self.words.is_news(&words);
                let is_held = event.event == EventKind::EngineLost
                    && !event.details.contains_key("lastWords");
                if is_held {
                    self.words.hold(words.clone(), self.clock.now());
                } else if kinds.contains(&event.event) && is_news {
                    match event.event {
                        EventKind::Resumed => self.progress.note(&words),
                        EventKind::CheckpointRecovered | EventKind::DataRecovered => {
                            self.progress.recovered(&words);
                        }
                        _ => self.progress.warn(&words),
                    }
                }
                if event.event == EventKind::Warning {
                    self.words.warned(&words);
                }
                // Rank 0 records what it tells. A worker tells us of its engines and of what they
                // wait for, with their numbers, and the other ranks of their devices.
                let of_engine = event.details.contains_key("pid");
                let other = matches!(event.details.get("rank"), Some(Detail::Number(1..)));
                if of_engine || event.event == EventKind::Warning && other {
                    self.write(event);
                }
            }
            // It is told with the worker's end, or with the job's.
            Up::Failed { exit_code, message, .. } => self.words.failed(name, *exit_code, message),
            _ => {}
        }
    }

    /// The newest checkpoint that is whole.
    fn newest(&self) -> Option<&str> {
        self.job.tracker().observed.stored.as_ref().map(|stored| stored.name.as_str())
    }

    /// A person is told of a loss that climbs or never falls.
    fn watch_loss(&mut self, report: &StepReport) {
        let found = self.losses.push(report.step, report.loss, report.learning_rate);
        if let Some(found) = found {
            self.progress.warn(&found.words);
            self.words.warned(&found.words);
            let details = [("step", Detail::Number(report.step))];
            self.event(EventKind::Warning, found.reason, &found.words, &details);
        }
    }

    /// For TensorBoard and MLflow. Training goes on without them.
    fn draw(&mut self, report: &StepReport) {
        if let Some(mlflow) = &mut self.mlflow {
            mlflow.step(report);
            mlflow.notes().iter().for_each(|note| self.progress.note(note));
        }
        if let Some(events) = &mut self.tfevents {
            let drawn = events.step(report);
            self.stumble("writing for TensorBoard", &drawn, "its steps are left out meanwhile");
        }
    }

    /// How long it will take, and how often the data are read, once a few steps were measured.
    fn expect(&mut self, left: Duration) {
        let training = &self.job.tracker().observed.template.training;
        let steps = training.steps;
        let tokens = u64::from(training.global_batch_size) * u64::from(training.sequence_length);
        let listing = Listing::read(&self.location).filter(|listing| listing.training_tokens > 0);
        let epochs = listing.map(|listing| {
            let times = (tokens * steps) as f64 / listing.training_tokens as f64;
            let all = count(listing.training_tokens);
            format!("; {steps} steps are {times:.2} epochs of {all} tokens")
        });
        let epochs = epochs.unwrap_or_default();
        let span = match left.as_secs() {
            0 => "less than a second".to_string(),
            _ => format!("about {}", clock(left)),
        };
        let end = end(left, &Zoned::now()).filter(|_| left.as_secs() > 0);
        let end = end.map_or(String::new(), |end| format!(" ({end})"));
        self.progress.note(&format!("{span} to go{end}{epochs}"));
    }

    /// Does what the loop says until it has nothing more to say. When it wants to be asked again.
    fn turn(&mut self) -> Result<Option<Millis>, LocalError> {
        loop {
            let turn = self.job.turn(self.clock.now());
            if turn.effects.is_empty() {
                return Ok(turn.due);
            }
            for effect in turn.effects {
                self.execute(effect)?;
            }
        }
    }

    fn execute(&mut self, effect: Effect) -> Result<(), LocalError> {
        match effect {
            Effect::Link(link) => {
                if let Link::Configure { name, rank, config } = &link {
                    self.announce(name, *rank, config.attempt);
                }
                let secret = self.processes.secret();
                self.leader.execute(link, |_| Verifier::Local { secret: secret.to_string() });
            }
            Effect::Write(batch) => self.write_all(batch)?,
            Effect::Lost { name, node, cause } => self.lost(&name, node, &cause),
            Effect::Recovered(recovery) => self.recovered(&recovery),
            Effect::Note { text, .. } => tracing::info!("{text}"),
            // Nobody but this job has its nodes, or asks for its figures.
            Effect::Memory(_) | Effect::Figures(_) => {}
        }
        Ok(())
    }

    fn write_all(&mut self, batch: Batch) -> Result<(), LocalError> {
        let (mut results, mut changed) = (Vec::new(), Vec::new());
        for (origin, write) in batch.writes {
            match (&origin, write) {
                (_, Write::CreatePod { birth, .. }) => {
                    let share = self.share(&birth.node);
                    let pod = self.processes.start(&birth.name, &birth.node, share);
                    let then = "it is tried again; snapshots stay in the memory of those that live";
                    self.stumble("starting a worker", &pod, then);
                    match pod {
                        Ok(pod) => {
                            self.spawns_failed = 0;
                            changed.push(Event::Pod(Box::new(pod)));
                        }
                        Err(error) => {
                            self.spawns_failed += 1;
                            if self.spawns_failed >= SPAWNS_MAX && !self.words.has_stepped() {
                                return Err(LocalError::Spawn(error));
                            }
                            results.push((origin, Err(unwritten(&error))));
                            continue;
                        }
                    }
                }
                (_, Write::DeletePod { name, grace_s, .. }) => {
                    if self.processes.stop(&name, Duration::from_secs(grace_s.into())) {
                        changed.push(Event::PodGone(name));
                    }
                }
                (Origin::Recorded(action), Write::Status { .. }) => {
                    let recorded = self.record(action);
                    let then = "the next attempt waits for that, and it is tried again; snapshots \
                                stay in memory";
                    self.stumble("writing job.json", &recorded, then);
                    if let Err(error) = recorded {
                        results.push((origin, Err(unwritten(&error))));
                        continue;
                    }
                }
                // Other events a person here is told of in other words.
                (_, Write::Event { reason, note, .. })
                    if reason.starts_with("Preflight") || reason == "RingsDiffer" =>
                {
                    self.progress.note(&note);
                }
                (_, Write::Event { reason, note, .. }) if reason == SLOW_LINK => {
                    self.progress.note(&note);
                    let attempt = self.job.tracker().observed.gang().map_or(0, |of| of.attempt);
                    let kind = EventKind::Warning;
                    self.write(&line(attempt, kind, SLOW_LINK, &note, &[]));
                }
                // A status without an action and objects are an API server's.
                _ => {}
            }
            results.push((origin, Ok(None)));
        }
        let now = self.clock.now();
        self.job.on(Event::Done { aside: batch.aside, results }, now);
        changed.into_iter().for_each(|event| self.job.on(event, now));
        Ok(())
    }

    /// Makes it durable, and tells of it.
    fn record(&mut self, action: &Action) -> Result<(), FolderError> {
        match action {
            Action::RecordAttempt(gang) => {
                self.ranks = [self.ranks[1], gang.layout.mesh.world()];
                let file = self.folder.file().clone();
                self.folder.record(JobFile { attempt: gang.attempt, ..file })?;
                let details = [
                    ("mesh", Detail::Mesh(gang.layout.mesh)),
                    ("step", Detail::Number(gang.resumed_at)),
                    ("nodes", Detail::Number(gang.members.len() as u64)),
                ];
                // The loop still names the attempt before.
                let kind = EventKind::AttemptStarted;
                self.write(&line(gang.attempt, kind, "Planned", "", &details));
            }
            Action::Finish(outcome) => self.record_outcome(outcome),
            _ => {}
        }
        Ok(())
    }

    /// All nodes of a local run are this machine.
    fn share(&self, node: &str) -> Share {
        let nodes = &self.job.tracker().observed.nodes;
        let index = nodes.iter().position(|of| of.name == node).unwrap_or_default();
        Share { index: index as u32, of: nodes.len() as u32 }
    }

    /// Once a worker. The line names the attempt that it joins first.
    fn announce(&mut self, name: &str, rank: u32, attempt: u32) {
        let Some((pid, node)) = self.processes.introduce(name) else { return };
        let details = [
            ("rank", Detail::Number(rank.into())),
            ("node", Detail::Text(node)),
            ("pid", Detail::Number(pid.into())),
            ("worker", Detail::Text(name.to_string())),
        ];
        self.write(&line(attempt, EventKind::WorkerStarted, "Configured", "", &details));
    }

    fn lost(&mut self, name: &str, node: String, cause: &str) {
        let details = [
            ("worker", Detail::Text(name.to_string())),
            ("node", Detail::Text(node)),
            ("pid", Detail::Number(self.processes.pid(name).into())),
        ];
        match self.words.lost(name, cause) {
            // The line of the recovery says as much.
            Some(told) if !self.words.has_said(name) => self.words.hold(told, self.clock.now()),
            Some(told) => self.progress.warn(&told),
            None => {}
        }
        self.event(EventKind::WorkerLost, "Lost", cause, &details);
    }

    fn recovered(&mut self, recovery: &Recovery) {
        let took = |at: Option<Millis>| recovery.took(at).as_millis() as u64;
        let first_step = took(recovery.first_step_at);
        let details = [
            ("replannedMs", Detail::Number(took(recovery.replanned_at))),
            ("firstStepMs", Detail::Number(first_step)),
            ("stepsLost", Detail::Number(recovery.steps_lost)),
        ];
        self.words.release();
        let line = words::of_recovery(&recovery.cause, self.ranks, first_step, recovery.steps_lost);
        self.progress.recovered(&line);
        self.event(EventKind::Recovered, "FirstStep", &recovery.cause, &details);
    }

    /// Losses that no recovery has followed for so long.
    fn tell_held(&mut self, since: Millis) {
        for told in self.words.held(self.clock.now().saturating_sub(since)) {
            self.progress.warn(&told);
        }
    }

    fn event(&mut self, kind: EventKind, reason: &str, message: &str, details: &[(&str, Detail)]) {
        let attempt = self.job.tracker().observed.record.attempt;
        let line = line(attempt, kind, reason, message, details);
        self.write(&line);
    }

    fn write(&mut self, line: &Line) {
        self.records.event(line);
    }

    fn stumble<T, E: std::error::Error + 'static>(
        &mut self,
        what: &'static str,
        result: &Result<T, E>,
        then: &str,
    ) {
        if let Some(news) = self.stumbles.news(what, result, then) {
            self.progress.note(&news);
        }
    }
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

/// The job as earlier runs have left it behind, in the form in which an API server would have it.
fn seen(folder: &Folder, name: &str, stored: Option<CheckpointStatus>) -> JobSeen {
    let step = stored.as_ref().map_or(0, |stored| stored.step);
    let record = Record { attempt: folder.file().attempt, step, ..Record::default() };
    let record = record::write(&Saved { record, ..Saved::default() });
    let status = MoeJobStatus { record, checkpoint: stored, ..MoeJobStatus::default() };
    JobSeen {
        name: name.to_string(),
        uid: folder.file().uid.clone(),
        status: serde_json::to_value(status).unwrap_or_default(),
        ..JobSeen::default()
    }
}
