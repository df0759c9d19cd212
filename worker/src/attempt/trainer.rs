//! One attempt on the device's thread: load, train, validate, checkpoint, end.
//!
//! ```text
//! open data -> look into storage -> claim -> state (fresh | checkpoint | memory) -> snapshot
//!   -> step -> agree -> update -> [validate] [snapshot] [checkpoint] -> step ...
//!   -> empty steps until the last checkpoint is committed
//! ```
//! Whatever takes effect on all ranks was agreed on in a step's end, so all take it alike.

use crate::attempt::steps::{Clock, Run};
use crate::checkpoint::{Disk, Expected, Identity, Refusal, Writer, differences, load, show};
use crate::gang::comm::{Comm, CommError};
use crate::data::{Corpus, DataError};
use crate::attempt::fence::{self, Claim, FenceError};
use crate::hf::Weights;
use crate::engine::model::Model;
use crate::attempt::records::{Records, now};
use crate::attempt::resume;
use crate::state::slots::Memory;
use crate::state::snapshot::{initialize, scatter};
use crate::engine::step::{Engine, StepError};
use crate::attempt::api::{AttemptEnd, Control, Failure, TrainerEvent};
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::{DataConfig, Precision, Resume, TrainingConfig};
use moejob_protocol::message::{Held, Phase, Request};
use moejob_protocol::model::{AuxLossScope, ModelConfig, RouterConfig};
use moejob_protocol::pod::ENV_WORKER;
use moejob_protocol::report::Event;
use std::path::{Path, PathBuf};
use std::time::Duration;

/// Trains attempts, one after the other; keeps data between them. Snapshots stay in the memory of
/// the worker, which outlives it.
#[derive(Debug)]
pub struct Trainer {
    memory: Memory,
    corpus: Option<(DataConfig, TrainingConfig, Corpus)>,
    disk: Disk,
    /// Of an attempt that was aborted, cancelled; it may still be in the middle of a write.
    writer: Option<Writer>,
    /// See [`Engine::spoil`].
    spoiled: Vec<u64>,
}

/// For a write of an aborted attempt to end. Longer waits are for storage that hangs, where the
/// next attempt's first access will tell.
const WRITER_END: Duration = Duration::from_secs(5);

/// Why an attempt ended before its last step.
pub(crate) enum Stop {
    Comm(CommError),
    Fenced(u32),
    Failed(Failure),
    /// The storage has another state than the leader believes, and the leader has been told.
    Elsewhere,
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

pub(crate) fn storage_failed(message: &str) -> Stop {
    let advice = "make the checkpoint location writable, with room for one more checkpoint";
    fail(1, message, advice)
}

pub(crate) fn fail(exit_code: i32, message: &str, advice: &str) -> Stop {
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
        Trainer::with_memory(Memory::default())
    }

    /// One of the trainers of a worker, which share its memory.
    pub fn with_memory(memory: Memory) -> Trainer {
        let (disk, spoiled) = (Disk::real(), Vec::new());
        Trainer { memory, corpus: None, disk, writer: None, spoiled }
    }

    /// A trainer whose storage fails where `disk` says.
    pub fn with_disk(disk: Disk) -> Trainer {
        Trainer { disk, ..Trainer::new() }
    }

    /// A trainer whose next runs of these steps, counted from 0, break a number.
    pub fn with_spoiled(steps: Vec<u64>) -> Trainer {
        Trainer { spoiled: steps, ..Trainer::new() }
    }

    /// What could be resumed from this worker's memory.
    pub fn held(&self) -> Vec<Held> {
        self.memory.held()
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
            Err(Stop::Elsewhere) => AttemptEnd::Stopped { step: config.resume.step() },
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
        // Before the first collective, so before rank 0 tidies what is staged.
        if self.writer.take().is_some_and(|mut writer| !writer.end_within(WRITER_END)) {
            tracing::warn!("a write to storage of an earlier attempt does not end");
        }
        let mut corpus = self.corpus(config, &mut comm, control)?;
        let ended = self.attempt_on(&mut corpus, config, comm, control, out);
        // However it ended, the next one need not open it again.
        self.corpus = Some((config.data.clone(), config.training.clone(), corpus));
        ended
    }

    fn attempt_on(
        &mut self,
        corpus: &mut Corpus,
        config: &WorkerConfig,
        mut comm: Comm,
        control: &Control,
        out: &mut dyn FnMut(TrainerEvent),
    ) -> Result<AttemptEnd, Stop> {
        agree_on_data(corpus, &mut comm)?;
        resume::look_into_storage(config, &mut comm, out)?;
        let mut records = if comm.rank() == 0 { Some(self.claim(config)?) } else { None };
        let mut engine = engine(config, comm)?;
        std::mem::take(&mut self.spoiled).into_iter().for_each(|step| engine.spoil(step));
        let mut tell = |event: Event| resume::tell(event, records.as_mut(), out);
        let Engine { model, links, .. } = &mut engine;
        self.restore(config, corpus, model, links.comm(), &mut tell)?;
        let metrics = match &records {
            Some(records) => Some(records.metrics_handle().map_err(record_failed)?),
            None => None,
        };
        let identity = identity(config, &engine.model, corpus);
        let writer = Writer::start(identity, self.disk.clone(), metrics)
            .map_err(|error| storage_failed(&format!("no thread for checkpoints: {error}")))?;
        let mut run = Run {
            config,
            engine,
            control,
            out,
            records,
            writer,
            buddies: buddies(config),
            step: config.resume.step(),
            asked: Request::default(),
            pending: None,
            committed: 0,
            snapshot_step: config.resume.step(),
            clock: Clock::start(),
            memory: &self.memory,
        };
        let ended = run.train(corpus);
        if let Err(Stop::Comm(_)) = &ended {
            // Whatever the next attempt resumes from is decided after this.
            run.writer.cancel();
            run.tell_commit(run.writer.progress().committed)?;
            self.writer = Some(run.writer);
            return ended;
        }
        if ended.is_ok() {
            run.writer.finish();
            run.tell_removed()?;
        }
        ended
    }

    /// The data, opened once for all attempts of a job. It can take long: an attempt that is
    /// aborted meanwhile ends, and what was read stays in the index.
    fn corpus(
        &mut self,
        config: &WorkerConfig,
        comm: &mut Comm,
        control: &Control,
    ) -> Result<Corpus, Stop> {
        match self.corpus.take() {
            Some((data, training, corpus))
                if data == config.data && training == config.training =>
            {
                Ok(corpus)
            }
            _ => {
                let abort = comm.abort_handle();
                let progress = control.progress().until(move || abort.is_aborted());
                let (data, vocabulary) = (&config.data, config.model.vocab_size);
                match Corpus::open_telling(data, &config.training, vocabulary, &progress) {
                    // The group says why.
                    Err(DataError::GivenUp) => {
                        comm.gather_all(&[], 0)?;
                        Err(Stop::Failed(DataError::GivenUp.failure()))
                    }
                    opened => opened.map_err(|error| Stop::Failed(error.failure())),
                }
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
        let records = Records::open(Path::new(&config.checkpoint.records));
        let in_pod = std::env::var_os(ENV_WORKER).is_some();
        records.map(|records| records.echo(in_pod)).map_err(record_failed)
    }

    /// The state that the attempt begins with.
    fn restore(
        &mut self,
        config: &WorkerConfig,
        corpus: &Corpus,
        model: &mut Model,
        comm: &mut Comm,
        tell: &mut dyn FnMut(Event) -> Result<(), Stop>,
    ) -> Result<(), Stop> {
        match &config.resume {
            Resume::Fresh => match &config.model_from {
                None => initialize(model, config.training.seed),
                Some(path) => start_from(Path::new(path), model, comm)?,
            },
            Resume::Checkpoint { step, name } => {
                let directory = PathBuf::from(&config.checkpoint.location).join(name);
                let loaded = restore_checkpoint(&directory, name, config, corpus, model)?;
                resume::agree_on_loaded(config, comm, *step, loaded, tell)?;
            }
            Resume::Memory { step, attempt, layout, sources } => {
                let shard = |rank| self.memory.shard(*attempt, *step, rank);
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
                self.memory.confirm(*attempt, *step);
            }
        }
        Ok(())
    }
}

pub(crate) fn record_failed(error: crate::attempt::records::RecordsError) -> Stop {
    storage_failed(&format!("{error}: {}", error.source))
}

/// Weights that others trained, the same on every rank.
fn start_from(path: &Path, model: &mut Model, comm: &mut Comm) -> Result<(), Stop> {
    let refused = |refusal: crate::checkpoint::Refusal| {
        let advice = "leave out of spec.model what the weights say; `moejob checkpoint import` of \
                      the directory lists what else is wrong";
        fail(3, &format!("spec.model.from: {refusal}"), advice)
    };
    let weights = Weights::open(path).map_err(refused)?;
    let own = crate::hf::load(&weights, model).map_err(refused)?;
    for (rank, other) in comm.gather_all(&own, own.len())?.iter().enumerate() {
        if *other != own {
            let (path, me) = (path.display(), comm.rank());
            let message = format!("{path} holds other weights for rank {rank} than for rank {me}");
            return Err(fail(3, &message, "give every node the same files"));
        }
    }
    Ok(())
}

/// A checkpoint that is whole but of another job, model or data ends the job; one that is damaged
/// is the inner error.
fn restore_checkpoint(
    directory: &Path,
    name: &str,
    config: &WorkerConfig,
    corpus: &Corpus,
    model: &mut Model,
) -> Result<Result<(), Refusal>, Stop> {
    let manifest = match show(directory) {
        Ok(manifest) => manifest,
        Err(problems) => return Ok(Err(Refusal::of(name, problems))),
    };
    let expected = Expected {
        model: &config.model,
        data_fingerprint: corpus.fingerprint(),
        seed: config.training.seed,
        spec_hash: &config.checkpoint.spec_hash,
        float_bytes: model.shape.float_bytes,
    };
    let other = differences(&manifest, &expected);
    if !other.is_empty() {
        return Err(resume::refused(&Refusal::of(name, other)));
    }
    Ok(load(directory, &manifest, model))
}

fn engine(config: &WorkerConfig, comm: Comm) -> Result<Engine, Stop> {
    Engine::open(config, comm.rank(), comm).map_err(|error| {
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

pub(crate) fn tokens_per_step(training: &TrainingConfig) -> u64 {
    u64::from(training.global_batch_size) * u64::from(training.sequence_length)
}

/// The rank that keeps each rank's second copy: the next on another node, else the next of another
/// worker. The ranks of one worker are lost together.
fn buddies(config: &WorkerConfig) -> Vec<Option<u32>> {
    let members = &config.members;
    let node = |rank: u32| {
        let of = |rank: u32| members.get(rank as usize).map(|member| member.node.as_str());
        let first = members.iter().position(|other| Some(other.node.as_str()) == of(rank));
        first.map_or(rank, |at| at as u32)
    };
    let world = config.layout.mesh.world();
    let nodes: Vec<u32> = (0..world).map(node).collect();
    let worker = |rank: u32| members.get(rank as usize).map(|member| member.worker.as_str());
    let next = |rank: u32| {
        let others = (1..world).map(|more| (rank + more) % world);
        others.into_iter().find(|other| worker(*other) != worker(rank))
    };
    (0..world).map(|rank| config.layout.buddy(rank, &nodes).or_else(|| next(rank))).collect()
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
            model.router.aux_loss_scope == AuxLossScope::Hf && {
                let scope = AuxLossScope::MicroBatch;
                !RouterConfig { aux_loss_scope: scope, ..model.router.clone() }.is_plain()
            },
            "model.router.auxLossScope: hf goes with dropless top-k and balanceLoss switch",
        ),
        (mesh.pp > 1 || mesh.tp > 1 || mesh.cp > 1, "parallelism: expert and data alone"),
        (!config.layout.covers(model), "the placement leaves an expert without a rank"),
    ];
    let found = wrong.into_iter().find(|(wrong, _)| *wrong)?;
    let (message, advice) = (found.1.to_string(), "change the manifest".to_string());
    Some(Failure { exit_code: 2, message, advice })
}
