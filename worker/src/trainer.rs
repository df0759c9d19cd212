//! One attempt on the device's thread: load, train, validate, checkpoint, end.
//!
//! ```text
//! open data -> claim -> state (fresh | checkpoint | memory) -> snapshot
//!   -> step -> agree -> update -> [validate] [snapshot] [checkpoint] -> step ...
//!   -> empty steps until the last checkpoint is committed
//! ```
//! Whatever takes effect on all ranks was agreed on in a step's end, so all take it alike.

use crate::checkpoint::{Disk, Expected, Identity, Writer, differences, load, show};
use crate::comm::{Comm, CommError};
use crate::data::Corpus;
use crate::fence::{self, Claim, FenceError};
use crate::grads::Gradients;
use crate::model::Model;
use crate::records::{Records, event, now};
use crate::snapshot::{Snapshots, initialize, scatter};
use crate::step::{self, StepError, StepSummary};
use crate::step_end::StepEnd;
use crate::trainer_api::{AttemptEnd, Control, Failure, TrainerEvent};
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::{DataConfig, Precision, Resume, TrainingConfig};
use moejob_protocol::message::{Held, Phase, Request};
use moejob_protocol::model::{Activation, AuxLossScope, ModelConfig};
use moejob_protocol::report::{Detail, EventKind, StepReport};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Trains attempts, one after the other; keeps snapshots and data between them.
#[derive(Debug)]
pub struct Trainer {
    snapshots: Snapshots,
    corpus: Option<(DataConfig, TrainingConfig, Corpus)>,
    disk: Disk,
}

/// Why an attempt ended before its last step.
enum Stop {
    Comm(CommError),
    Fenced(u32),
    Failed(Failure),
}

impl From<CommError> for Stop {
    fn from(error: CommError) -> Stop {
        Stop::Comm(error)
    }
}

impl From<StepError> for Stop {
    fn from(error: StepError) -> Stop {
        match error {
            StepError::Comm(error) => Stop::Comm(error),
            StepError::Data(error) => Stop::Failed(error.failure()),
        }
    }
}

impl From<FenceError> for Stop {
    fn from(error: FenceError) -> Stop {
        match error {
            FenceError::Fenced { claimed, .. } => Stop::Fenced(claimed),
            FenceError::Io { ref source, .. } => storage_failed(&format!("{error}: {source}")),
        }
    }
}

fn storage_failed(message: &str) -> Stop {
    let advice = "make the checkpoint location writable, with room for one more checkpoint";
    fail(1, message, advice)
}

fn fail(exit_code: i32, message: &str, advice: &str) -> Stop {
    let (message, advice) = (message.to_string(), advice.to_string());
    Stop::Failed(Failure { exit_code, message, advice })
}

impl Default for Trainer {
    fn default() -> Trainer {
        Trainer::new()
    }
}

impl Trainer {
    pub fn new() -> Trainer {
        Trainer { snapshots: Snapshots::default(), corpus: None, disk: Disk::real() }
    }

    /// A trainer whose storage fails where `disk` says.
    pub fn with_disk(disk: Disk) -> Trainer {
        Trainer { disk, ..Trainer::new() }
    }

    /// What could be resumed from this worker's memory.
    pub fn held(&self) -> Vec<Held> {
        self.snapshots.held()
    }

    /// Runs one attempt to its end. `comm` is the group of its ranks; a spare has none to run.
    pub fn run_attempt(
        &mut self,
        config: &WorkerConfig,
        comm: Comm,
        control: &Control,
        out: &mut dyn FnMut(TrainerEvent),
    ) -> AttemptEnd {
        control.set_phase(Phase::Loading);
        let ended = self.attempt(config, comm, control, out);
        control.set_phase(Phase::Idle);
        match ended {
            Ok(end) => end,
            Err(Stop::Comm(error)) => AttemptEnd::Aborted(error),
            Err(Stop::Fenced(attempt)) => AttemptEnd::Fenced { attempt },
            Err(Stop::Failed(failure)) => AttemptEnd::Failed(failure),
        }
    }

    fn attempt(
        &mut self,
        config: &WorkerConfig,
        mut comm: Comm,
        control: &Control,
        out: &mut dyn FnMut(TrainerEvent),
    ) -> Result<AttemptEnd, Stop> {
        if let Some(failure) = unsupported(config) {
            return Err(Stop::Failed(failure));
        }
        let mut corpus = self.corpus(config)?;
        agree_on_data(&corpus, &mut comm)?;
        let records = if comm.rank() == 0 { Some(self.claim(config)?) } else { None };
        let mut model = model(config, comm.rank())?;
        self.restore(config, &corpus, &mut model, &mut comm)?;
        let metrics = match &records {
            Some(records) => Some(records.metrics_handle().map_err(record_failed)?),
            None => None,
        };
        let identity = identity(config, &model, &corpus);
        let writer = Writer::start(identity, self.disk.clone(), metrics)
            .map_err(|error| storage_failed(&format!("no thread for checkpoints: {error}")))?;
        let gradients = Gradients::new(&model);
        let mut run = Run {
            config,
            comm,
            control,
            out,
            records,
            gradients,
            writer,
            buddies: buddies(config),
            step: config.resume.step(),
            asked: Request::default(),
            pending: None,
            committed: 0,
            snapshot_step: config.resume.step(),
            model,
            snapshots: &mut self.snapshots,
        };
        let ended = run.train(&mut corpus);
        if let Err(Stop::Comm(_)) = &ended {
            // Whatever the next attempt resumes from is decided after this.
            run.writer.cancel();
            run.tell_commit(run.writer.progress().committed)?;
        }
        let Run { writer, .. } = run;
        if ended.is_ok() {
            writer.finish();
        }
        self.corpus = Some((config.data.clone(), config.training.clone(), corpus));
        ended
    }

    /// The data, opened once for all attempts of a job.
    fn corpus(&mut self, config: &WorkerConfig) -> Result<Corpus, Stop> {
        match self.corpus.take() {
            Some((data, training, corpus))
                if data == config.data && training == config.training =>
            {
                Ok(corpus)
            }
            _ => {
                if config.model.vocab_size < 256 {
                    let found = config.model.vocab_size;
                    let error = crate::data::DataError::Vocabulary { found };
                    return Err(Stop::Failed(error.failure()));
                }
                Corpus::open(&config.data, &config.training)
                    .map_err(|error| Stop::Failed(error.failure()))
            }
        }
    }

    /// Rank 0's claim on the checkpoints, before anything of this attempt can reach them.
    fn claim(&self, config: &WorkerConfig) -> Result<Records, Stop> {
        let location = Path::new(&config.checkpoint.location);
        self.disk.create_directory(location).map_err(|error| {
            storage_failed(&format!("{} cannot be created: {error}", location.display()))
        })?;
        let claim = Claim {
            attempt: config.attempt,
            resume_step: config.resume.step(),
            job_uid: config.job_uid.clone(),
            time: now(),
        };
        fence::claim(&self.disk, location, &claim)?;
        Records::open(Path::new(&config.checkpoint.records)).map_err(record_failed)
    }

    /// The state that the attempt begins with.
    fn restore(
        &mut self,
        config: &WorkerConfig,
        corpus: &Corpus,
        model: &mut Model,
        comm: &mut Comm,
    ) -> Result<(), Stop> {
        match &config.resume {
            Resume::Fresh => initialize(model, config.training.seed),
            Resume::Checkpoint { name, .. } => {
                let directory = PathBuf::from(&config.checkpoint.location).join(name);
                restore_checkpoint(&directory, name, config, corpus, model)?;
            }
            Resume::Memory { step, attempt, layout, sources } => {
                let shard = |rank| self.snapshots.shard(*attempt, *step, rank);
                let me = model.rank;
                let mut own = sources.iter().filter(|source| source.from == me);
                if let Some(missing) = own.find(|source| shard(source.shard).is_none()) {
                    let message = format!(
                        "shard {} of step {step} of attempt {attempt} is not in memory here",
                        missing.shard
                    );
                    return Err(fail(75, &message, "start the job again"));
                }
                let held = |rank| shard(rank).expect("looked for above");
                scatter(model, comm, layout, sources, held)?;
                self.snapshots.confirm(*attempt, *step);
            }
        }
        Ok(())
    }
}

fn record_failed(error: crate::records::RecordsError) -> Stop {
    storage_failed(&format!("{error}: {}", error.source))
}

fn restore_checkpoint(
    directory: &Path,
    name: &str,
    config: &WorkerConfig,
    corpus: &Corpus,
    model: &mut Model,
) -> Result<(), Stop> {
    let refused = |why: String| {
        let message = format!("the checkpoint {name} is refused: {why}");
        fail(3, &message, "`moejob checkpoint verify` lists all problems; remove it or the cause")
    };
    let lines = |problems: Vec<crate::checkpoint::Problem>| {
        problems.iter().map(ToString::to_string).collect::<Vec<_>>().join("; ")
    };
    let manifest = show(directory).map_err(|problems| refused(lines(problems)))?;
    let expected = Expected {
        model: &config.model,
        data_fingerprint: corpus.fingerprint(),
        seed: config.training.seed,
        spec_hash: &config.checkpoint.spec_hash,
        float_bytes: model.shape.float_bytes,
    };
    let other = differences(&manifest, &expected);
    if !other.is_empty() {
        return Err(refused(lines(other)));
    }
    load(directory, &manifest, model).map_err(|refusal| refused(lines(refusal.problems)))
}

fn model(config: &WorkerConfig, rank: u32) -> Result<Model, Stop> {
    let threads = match config.threads {
        0 => std::thread::available_parallelism().map_or(1, usize::from),
        threads => threads as usize,
    };
    Model::new(&config.model, &config.layout, rank, &config.training, threads).map_err(|error| {
        fail(1, &format!("the device cannot be made: {error}"), "free memory or use fewer threads")
    })
}

fn identity(config: &WorkerConfig, model: &Model, corpus: &Corpus) -> Identity {
    let training = &config.training;
    Identity {
        job_uid: config.job_uid.clone(),
        job_name: config.job_name.clone(),
        attempt: config.attempt,
        rank: model.rank,
        model: config.model.clone(),
        params: model.params.clone(),
        layout: config.layout.clone(),
        spec_hash: config.checkpoint.spec_hash.clone(),
        data_fingerprint: corpus.fingerprint().to_string(),
        seed: training.seed,
        tokens_per_step: tokens_per_step(training),
        float_bytes: model.shape.float_bytes as usize,
        location: PathBuf::from(&config.checkpoint.location),
        keep: config.checkpoint.keep,
    }
}

fn tokens_per_step(training: &TrainingConfig) -> u64 {
    u64::from(training.global_batch_size) * u64::from(training.sequence_length)
}

/// The rank that keeps each rank's second copy: the next on another node, else the next.
fn buddies(config: &WorkerConfig) -> Vec<Option<u32>> {
    let world = config.layout.mesh.world();
    let names: Vec<&str> = config.members.iter().map(|member| member.node.as_str()).collect();
    let node = |rank: u32| {
        let name = names.get(rank as usize);
        names.iter().position(|other| Some(other) == name).map_or(rank, |at| at as u32)
    };
    let nodes: Vec<u32> = (0..world).map(node).collect();
    let next = |rank: u32| (world > 1).then_some((rank + 1) % world);
    (0..world).map(|rank| config.layout.buddy(rank, &nodes).or(next(rank))).collect()
}

/// All ranks read the same text.
fn agree_on_data(corpus: &Corpus, comm: &mut Comm) -> Result<(), Stop> {
    let own = corpus.fingerprint().as_bytes();
    for (rank, other) in comm.gather_all(own, 256)?.iter().enumerate() {
        if other != own {
            let message = format!(
                "rank {rank} reads other data than rank {}: fingerprints {} and {}",
                comm.rank(),
                String::from_utf8_lossy(other),
                corpus.fingerprint()
            );
            return Err(fail(3, &message, "give every node the same files"));
        }
    }
    Ok(())
}

/// What this build cannot train, as the user's mistake.
pub fn unsupported(config: &WorkerConfig) -> Option<Failure> {
    let model: &ModelConfig = &config.model;
    let mesh = &config.layout.mesh;
    let wrong = [
        (
            !matches!(config.training.precision, Precision::Fp32 | Precision::Fp64),
            "training.precision: the CPU computes in fp32",
        ),
        (
            model.experts.activation == Activation::Gelu,
            "model.experts.activation: silu and relu are built in",
        ),
        (
            model.experts.activation == Activation::Relu
                && (model.experts.shared > 0 || !model.dense_layers.is_empty()),
            "model.experts.activation: dense layers and shared experts use silu",
        ),
        (
            model.router.aux_loss_scope != AuxLossScope::MicroBatch,
            "model.router.auxLossScope: microBatch is built in",
        ),
        (model.router.capacity_factor != 0.0, "model.router.capacityFactor: 0, dropless, alone"),
        (model.router.bias, "model.router.bias is not built in"),
        (model.router.jitter != 0.0, "model.router.jitter is not built in"),
        (mesh.pp > 1 || mesh.tp > 1 || mesh.cp > 1, "parallelism: expert and data alone"),
        (!config.layout.covers(model), "the placement leaves an expert without a rank"),
    ];
    let found = wrong.into_iter().find(|(wrong, _)| *wrong)?;
    let (message, advice) = (found.1.to_string(), "change the manifest".to_string());
    Some(Failure { exit_code: 2, message, advice })
}

/// An attempt that trains.
struct Run<'a> {
    config: &'a WorkerConfig,
    comm: Comm,
    control: &'a Control,
    out: &'a mut dyn FnMut(TrainerEvent),
    /// Rank 0's.
    records: Option<Records>,
    model: Model,
    gradients: Gradients,
    writer: Writer,
    snapshots: &'a mut Snapshots,
    buddies: Vec<Option<u32>>,
    /// Steps done.
    step: u64,
    /// Taken from `control`, not yet agreed on.
    asked: Request,
    /// A checkpoint that is not committed yet, and whether its commit was ordered.
    pending: Option<(u64, bool)>,
    /// Newest commit that was told.
    committed: u64,
    /// Steps in the newest snapshot.
    snapshot_step: u64,
}

/// Between two empty steps that wait for storage.
const STORAGE_POLL: Duration = Duration::from_millis(2);

impl Run<'_> {
    fn train(&mut self, corpus: &mut Corpus) -> Result<AttemptEnd, Stop> {
        self.tell_resumed()?;
        self.control.set_step(self.step);
        self.snapshot()?;
        let steps = self.config.training.steps;
        let mut stopped = false;
        while self.step < steps && !stopped {
            self.control.set_phase(Phase::Training);
            let started = Instant::now();
            let (summary, agreed) = self.step_twice_at_most(corpus)?;
            step::update(
                &mut self.model,
                &self.gradients,
                &self.config.training,
                &summary,
                &mut self.comm,
                self.step,
            )?;
            self.step += 1;
            self.control.set_step(self.step);
            let seconds = started.elapsed().as_secs_f64();
            let validation_loss = self.validate(corpus)?;
            self.report(&summary, validation_loss, seconds)?;
            stopped = agreed.stop_after_this_step;
            self.keep(agreed, stopped)?;
        }
        self.control.set_phase(Phase::Stopping);
        self.wait_for_storage()?;
        if self.step >= steps {
            return Ok(AttemptEnd::Completed { step: self.step });
        }
        Ok(AttemptEnd::Stopped { step: self.step })
    }

    /// Gradients and agreement on them. A number that is not finite may have come from a fault of
    /// the machine, so the step is done once again before it counts.
    fn step_twice_at_most(
        &mut self,
        corpus: &mut Corpus,
    ) -> Result<(StepSummary, Request), Stop> {
        let mut agreed = Request::default();
        for attempt in 0..2 {
            let (model, gradients) = (&mut self.model, &mut self.gradients);
            let mut end = step::gradients(model, gradients, corpus, &mut self.comm, self.step)?;
            self.fill(&mut end);
            let ends = step::agree(&self.model, &end, &mut self.comm)?;
            // Whoever is here has finished the snapshot that came before.
            self.snapshots.confirm(self.config.attempt, self.snapshot_step);
            let request = self.take_in(&ends)?;
            agreed.checkpoint_now |= request.checkpoint_now;
            agreed.stop_after_this_step |= request.stop_after_this_step;
            let training = &self.config.training;
            let summary =
                step::summarize(&self.model, &self.gradients, training, &ends, self.step)?;
            match &summary.non_finite {
                None => return Ok((summary, agreed)),
                Some(what) if attempt == 1 => {
                    let message = format!(
                        "{what} is not finite at step {}, twice: nothing was updated",
                        self.step + 1
                    );
                    let advice = "lower the learning rate, warm up longer, or clip gradients";
                    return Err(fail(1, &message, advice));
                }
                Some(_) => {}
            }
        }
        unreachable!("the second time returns")
    }

    /// What every step's end says beside its numbers.
    fn fill(&mut self, end: &mut StepEnd) {
        let asked = self.control.take_requests();
        self.asked.checkpoint_now |= asked.checkpoint_now;
        self.asked.stop_after_this_step |= asked.stop_after_this_step;
        let progress = self.writer.progress();
        end.checkpoint_now = self.asked.checkpoint_now;
        end.stop_after_this_step = self.asked.stop_after_this_step;
        end.written = progress.written;
        end.committed = progress.committed;
        end.fenced_by = progress.fenced_by.unwrap_or(0);
        end.write_error = progress.error.unwrap_or_default();
    }

    /// Acts on what all ranks said, the same on each of them.
    fn take_in(&mut self, ends: &[StepEnd]) -> Result<Request, Stop> {
        self.asked = Request::default();
        if let Some(fenced) = ends.iter().map(|end| end.fenced_by).max().filter(|by| *by > 0) {
            return Err(Stop::Fenced(fenced));
        }
        if let Some((rank, end)) = ends.iter().enumerate().find(|(_, end)| !end.write_error.is_empty())
        {
            let message = format!("rank {rank} cannot write its checkpoint: {}", end.write_error);
            return Err(storage_failed(&message));
        }
        if let Some((step, ordered)) = &mut self.pending {
            let all_written = ends.iter().all(|end| end.written >= *step);
            if all_written && !*ordered {
                *ordered = true;
                if self.model.rank == 0 {
                    self.writer.commit(*step);
                }
            }
            if ends[0].committed >= *step {
                self.pending = None;
            }
        }
        self.tell_commit(ends[0].committed)?;
        Ok(Request {
            checkpoint_now: ends.iter().any(|end| end.checkpoint_now),
            stop_after_this_step: ends.iter().any(|end| end.stop_after_this_step),
        })
    }

    /// Snapshots and checkpoints that are due after this step.
    fn keep(&mut self, agreed: Request, stopped: bool) -> Result<(), Stop> {
        let config = self.config;
        let last = self.step >= config.training.steps;
        let every = |steps: u64| steps > 0 && self.step.is_multiple_of(steps);
        let checkpoint =
            every(config.checkpoint.every_steps) || last || agreed.checkpoint_now;
        let memory = every(config.recovery.memory_every_steps) || stopped;
        let snapshot = if memory { Some(self.snapshot()?) } else { None };
        if checkpoint {
            // One at a time: its staging and its copy of the state are counted once.
            self.wait_for_storage()?;
            let bytes = match snapshot {
                Some(bytes) => bytes,
                None => {
                    let mut bytes = Vec::new();
                    crate::snapshot::cut(&self.model, &mut bytes);
                    Arc::new(bytes)
                }
            };
            self.writer.shard(self.step, bytes);
            self.pending = Some((self.step, false));
        }
        Ok(())
    }

    /// Goes on with empty steps until nothing waits for storage.
    fn wait_for_storage(&mut self) -> Result<(), Stop> {
        while self.pending.is_some() {
            std::thread::sleep(STORAGE_POLL);
            let mut end = StepEnd::default();
            self.fill(&mut end);
            let ends = step::agree(&self.model, &end, &mut self.comm)?;
            let request = self.take_in(&ends)?;
            // Asked for meanwhile: it takes effect with the next real step.
            self.asked.checkpoint_now |= request.checkpoint_now;
            self.asked.stop_after_this_step |= request.stop_after_this_step;
        }
        Ok(())
    }

    fn snapshot(&mut self) -> Result<Arc<Vec<u8>>, Stop> {
        let attempt = self.config.attempt;
        let taken = self.snapshots.take(
            &self.model,
            &mut self.comm,
            &self.buddies,
            attempt,
            self.step,
        );
        self.snapshot_step = self.step;
        (self.out)(TrainerEvent::Held(self.snapshots.held()));
        Ok(taken?)
    }

    fn validate(&mut self, corpus: &mut Corpus) -> Result<Option<f64>, Stop> {
        let validation = &self.config.data.validation;
        let last = self.step >= self.config.training.steps;
        let every = validation.every_steps;
        if every == 0 || !(last || self.step.is_multiple_of(every)) {
            return Ok(None);
        }
        self.control.set_phase(Phase::Validating);
        let most = validation.max_sequences;
        Ok(step::validate(&mut self.model, corpus, &mut self.comm, most)?)
    }

    fn report(
        &mut self,
        summary: &StepSummary,
        validation_loss: Option<f64>,
        seconds: f64,
    ) -> Result<(), Stop> {
        let Some(records) = &mut self.records else { return Ok(()) };
        let tokens = tokens_per_step(&self.config.training);
        let report = StepReport {
            step: self.step,
            loss: summary.loss,
            aux_loss: summary.aux_loss,
            z_loss: summary.z_loss,
            grad_norm: summary.grad_norm,
            learning_rate: summary.learning_rate,
            tokens: self.step * tokens,
            tokens_per_second: tokens as f64 / seconds,
            world_size: self.comm.world(),
            attempt: self.config.attempt,
            expert_imbalance: summary.expert_imbalance,
            validation_loss,
            time: now(),
        };
        records.step(&report).map_err(record_failed)?;
        (self.out)(TrainerEvent::Step(report));
        Ok(())
    }

    fn tell_resumed(&mut self) -> Result<(), Stop> {
        let (reason, message) = match &self.config.resume {
            Resume::Fresh => ("Fresh", String::new()),
            Resume::Checkpoint { name, .. } => ("Checkpoint", name.clone()),
            Resume::Memory { attempt, .. } => ("Memory", format!("snapshots of attempt {attempt}")),
        };
        self.tell(EventKind::Resumed, reason, message, self.step)
    }

    /// On rank 0: a commit that was not told yet.
    fn tell_commit(&mut self, committed: u64) -> Result<(), Stop> {
        if committed <= self.committed {
            return Ok(());
        }
        self.committed = committed;
        let name = moejob_protocol::checkpoint::directory_name(committed);
        self.tell(EventKind::CheckpointCommitted, "Committed", name, committed)
    }

    fn tell(
        &mut self,
        kind: EventKind,
        reason: &str,
        message: String,
        step: u64,
    ) -> Result<(), Stop> {
        let Some(records) = &mut self.records else { return Ok(()) };
        let details = [("step", Detail::Number(step))];
        let told = event(self.config.attempt, kind, reason, message, details);
        records.event(&told).map_err(record_failed)?;
        (self.out)(TrainerEvent::Event(told));
        Ok(())
    }
}
