//! One attempt on the device's thread: load, train, validate, checkpoint, end.
//!
//! ```text
//! open data -> look into storage, claim -> state (fresh | checkpoint | memory) -> snapshot
//!   -> say -> step -> hear -> [validate] [snapshot] [checkpoint] -> say -> step ...
//!   -> empty steps until the last checkpoint is committed
//! ```
//! Whatever takes effect on all ranks was said and heard by all with a step, so all take it alike.

use crate::attempt::gauge::Gauge;
use crate::attempt::pace::Pace;
use crate::attempt::steps::Run;
use crate::attempt::telling::Clock;
use crate::checkpoint::fence::FenceError;
use crate::checkpoint::desk::Ask;
use crate::checkpoint::look;
use crate::checkpoint::{self, Disk, Expected, Refusal, differences, load, show};
use crate::gang::comm::{AbortHandle, Comm, CommError};
use crate::data::{self, Corpus, DataError, Listing};
use crate::hf::{self, Weights};
use crate::engine::model::Model;
use crate::attempt::recorder::Recorder;
use crate::attempt::resume;
use crate::attempt::start::{Passage, Start, fault_of};
use crate::attempt::saves::{Flush, News, Patience, Saves, pending_max};
use crate::state::moves::scatter;
use crate::state::rank::{DeviceFailed, RankState};
use crate::state::slots::Memory;
use crate::state::snapshot::initialize;
use crate::engine::links::NoLinks;
use crate::engine::step::{Engine, OpenError, StepError};
use crate::engine::trace::{STEPS_SKIPPED, Trace};
use crate::attempt::api::{AttemptEnd, Control, TrainerEvent};
use crate::failure::{Failure, chain};
use moejob_protocol::{CheckpointManifest, WorkerConfig};
use moejob_protocol::config::{Backend, DataConfig, Precision, Resume, TrainingConfig};
use moejob_protocol::memory::GENERATIONS;
use moejob_protocol::message::{Held, Phase, Request};
use moejob_protocol::model::{AuxLossScope, ModelConfig, RouterConfig};
use moejob_protocol::pod::{ENV_TRACE, ENV_WORKER};
use moejob_protocol::report::Event;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// Trains attempts, one after the other; keeps data between them. Snapshots stay in the memory of
/// the worker, which outlives it.
#[derive(Debug)]
pub struct Trainer {
    memory: Memory,
    /// Where its checkpoints are written.
    desk: checkpoint::Desk,
    corpus: Option<(DataConfig, TrainingConfig, Corpus)>,
    /// Where the next attempt asks for its data, which the worker has open.
    batches: Option<data::Desk>,
    disk: Disk,
    patience: Patience,
    /// See [`Engine::spoil`].
    spoiled: Vec<u64>,
    /// See [`Engine::runs_ahead`].
    ahead: bool,
    /// See [`Model::cut_late`].
    late: bool,
}

/// How long the end of an attempt waits for its writer to remove old checkpoints.
const WRITER_END_MAX: Duration = Duration::from_secs(10);
/// How long a commit waits until the records before it are durable.
const RECORDS_MAX: Duration = Duration::from_secs(5);

/// Why an attempt ended before its last step.
pub(crate) enum Stop {
    Comm(CommError),
    Fenced(u32),
    Failed(Failure),
    /// See [`AttemptEnd::DeviceFailed`].
    Device(String),
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
            StepError::Device(_) => Stop::Device(error.to_string()),
        }
    }
}

impl From<DeviceFailed> for Stop {
    fn from(error: DeviceFailed) -> Stop {
        Stop::Device(error.to_string())
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

/// What an attempt says whose device could not be left. The next one could not use it, whatever
/// ended this one; but where none will come, why is what counts.
fn not_left(ended: Result<AttemptEnd, Stop>, device: Stop) -> Stop {
    match ended {
        Err(stop @ (Stop::Failed(_) | Stop::Fenced(_))) => stop,
        Err(Stop::Comm(_) | Stop::Device(_) | Stop::Elsewhere) | Ok(_) => device,
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
        Trainer::with_memory_and_disk(memory, Disk::real())
    }

    fn with_memory_and_disk(memory: Memory, disk: Disk) -> Trainer {
        let desk = checkpoint::Desk::with_scribe(disk.clone(), memory.clone());
        Trainer { disk, ..Trainer::with_desk(memory, desk) }
    }

    /// An engine in a process of its own, whose worker writes its checkpoints.
    pub fn with_desk(memory: Memory, desk: checkpoint::Desk) -> Trainer {
        let (disk, patience, spoiled) = (Disk::real(), Patience::default(), Vec::new());
        let (corpus, batches) = (None, None);
        let (ahead, late) = (false, false);
        Trainer { memory, desk, corpus, batches, disk, patience, spoiled, ahead, late }
    }

    /// The next attempt does not open its data: it asks at `desk`.
    pub(crate) fn ask_at(&mut self, desk: data::Desk) {
        self.batches = Some(desk);
    }

    /// Waits for storage as long as `patience` says.
    pub fn with_patience(self, patience: Patience) -> Trainer {
        Trainer { patience, ..self }
    }

    /// A trainer whose storage fails where `disk` says.
    pub fn with_disk(disk: Disk) -> Trainer {
        Trainer::with_memory_and_disk(Memory::default(), disk)
    }

    /// A trainer whose snapshots leave beside the next step, see [`Model::cut_late`].
    pub fn with_late_cuts(self) -> Trainer {
        Trainer { late: true, ..self }
    }

    /// A trainer whose next runs of these steps, counted from 0, break a number.
    pub fn with_spoiled(steps: Vec<u64>) -> Trainer {
        Trainer { spoiled: steps, ..Trainer::new() }
    }

    /// A trainer whose steps are begun ahead on every device, on all ranks alike.
    pub fn with_steps_ahead(self) -> Trainer {
        Trainer { ahead: true, ..self }
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
            Err(Stop::Device(message)) => AttemptEnd::DeviceFailed { message },
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
        self.desk.attempt(config);
        let mut start = Start::default();
        let mut corpus = self.corpus(config, &mut comm, control)?;
        start.passed(Passage::Data);
        let ended = self.attempt_on(&mut corpus, config, comm, control, start, out);
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
        mut start: Start,
        out: &mut dyn FnMut(TrainerEvent),
    ) -> Result<AttemptEnd, Stop> {
        // What earlier attempts wrote is out of the way on all ranks before the first one looks.
        self.desk.settle();
        agree_on_data(corpus, &mut comm)?;
        let (disk, desk, patience) = (&self.disk, &self.desk, &self.patience);
        let trouble = resume::open_storage(config, disk, desk, patience, &mut comm, out)?;
        let mut records = if comm.rank() == 0 { Some(recorder(config)?) } else { None };
        let rank = comm.rank();
        start.passed(Passage::Storage);
        let mut engine = engine(config, comm)?;
        start.passed(Passage::Device);
        if self.late {
            engine.model.cut_late();
        }
        std::mem::take(&mut self.spoiled).into_iter().for_each(|step| engine.spoil(step));
        if let Some((step, fault)) = fault_of(config.attempt, rank) {
            engine.inject(step, fault);
        }
        if let Some(file) = std::env::var_os(ENV_TRACE).filter(|_| rank == 0) {
            engine.trace(Trace::new(PathBuf::from(file), rank, STEPS_SKIPPED));
        }
        let mut tell = |event: Event| resume::tell(event, records.as_ref(), out);
        let Engine { model, links, .. } = &mut engine;
        let restored = self.restore(config, corpus, model, links.comm(), &mut tell);
        if restored.is_err() {
            out(TrainerEvent::Held(self.memory.held()));
        }
        restored?;
        start.passed(Passage::State);
        if let Some(records) = &mut records {
            keep_listing(config, corpus, records);
        }
        let retry_us = u64::try_from(self.patience.retry.as_micros()).unwrap_or(u64::MAX);
        let fingerprint = corpus.fingerprint().to_string();
        self.desk.ask(Ask::Begin { fingerprint, retry_us });
        let gauge = if rank == 0 { gauge(config, &engine) } else { None };
        let (state, buddies) = (state_bytes(&engine.model), resume::buddies(config));
        let pace = if config.recovery.memory_auto {
            Some(Pace::agreed(&config.members, &buddies, state, engine.links.comm())?)
        } else {
            None
        };
        let saves = self.saves(config, rank, state, records.as_ref());
        let ahead = self.ahead || engine.runs_ahead();
        let mut run = Run {
            config,
            control,
            out,
            records,
            saves,
            patience: self.patience,
            engine,
            start,
            buddies,
            step: config.resume.step(),
            asked: Request::default(),
            waits_until: None,
            snapshot_step: config.resume.step(),
            ahead,
            pace,
            leaving: None,
            skips: false,
            clock: Clock::start(),
            gauge,
            keeps_best: config.checkpoint.keep_best && rank == 0,
            held_out: None,
            memory: &self.memory,
        };
        if let Some(trouble) = trouble
            && let Some(news) = run.saves.begin_degraded(&trouble)
        {
            run.tell_storage(news)?;
        }
        let ended = run.train(corpus);
        match &ended {
            Ok(_) => run.saves.finish(WRITER_END_MAX.min(self.patience.stop)),
            // What was given to the writer is written all the same, and counts for the next
            // attempt.
            Err(Stop::Comm(_) | Stop::Device(_)) => {}
            Err(_) => run.saves.cancel(),
        }
        if ended.is_err()
            && let Some(committed) = run.saves.last_commit()
        {
            run.tell_storage(News::Committed(committed))?;
        }
        run.tell_removed()?;
        let ended = ended.and_then(|end| Ok(run.engine.all_arrived().map(|()| end)?));
        match run.engine.leave() {
            Ok(()) => {
                // Of a device that failed nothing is given back: that could wait for a kernel.
                if let Err(Stop::Device(_)) = &ended {
                    std::mem::forget(run.engine);
                }
                ended
            }
            // Whatever ended the attempt, its device would be waited for without an end.
            Err(error) => {
                std::mem::forget(run.engine);
                Err(not_left(ended, error.into()))
            }
        }
    }

    /// The data, opened once for all attempts of a job. It can take long: an attempt that is
    /// aborted meanwhile ends, and what was read stays in the index.
    fn corpus(
        &mut self,
        config: &WorkerConfig,
        comm: &mut Comm,
        control: &Control,
    ) -> Result<Corpus, Stop> {
        let abort = comm.abort_handle();
        let opened = match (self.batches.take(), self.corpus.take()) {
            (Some(desk), _) => {
                Corpus::behind(desk, &config.training, &|| abort.is_aborted())
            }
            (None, Some((data, training, corpus)))
                if data == config.data && training == config.training =>
            {
                Ok(corpus)
            }
            _ => {
                let progress = control.progress().until(move || abort.is_aborted());
                let (data, vocabulary) = (&config.data, config.model.vocab_size);
                Corpus::open_telling(data, &config.training, vocabulary, &progress)
            }
        };
        match opened {
            // The group says why.
            Err(DataError::GivenUp) => {
                comm.gather_all(&[], 0)?;
                Err(Stop::Failed(DataError::GivenUp.failure()))
            }
            opened => opened.map_err(|error| Stop::Failed(error.failure())),
        }
    }

    fn saves(
        &self,
        config: &WorkerConfig,
        rank: u32,
        state_bytes: u64,
        records: Option<&Recorder>,
    ) -> Saves {
        let flush = records.map(|records| Box::new(records.flusher(RECORDS_MAX)) as Flush);
        let pending = pending_max(state_bytes, &self.patience);
        let every = config.recovery.memory_every_steps.max(1);
        let shared = config.checkpoint.every_steps.is_multiple_of(every);
        let spare = usize::from(!shared && !config.recovery.memory_auto);
        // Those of checkpoints come beside what takes turns.
        self.memory.set_bounds(GENERATIONS as usize + pending, spare);
        let from_memory = matches!(config.resume, Resume::Memory { .. });
        let who = (rank, config.attempt);
        Saves::new(who, self.desk.clone(), flush, pending, from_memory)
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
                let abort = comm.abort_handle();
                let loaded =
                    self.restore_checkpoint(&directory, config, corpus, model, &abort)?;
                resume::agree_on_loaded(config, &self.disk, comm, *step, loaded, tell)?;
            }
            Resume::Memory { step, attempt, layout, sources } => {
                let rank = model.rank;
                let near = resume::near_shards(config, &self.memory, rank)?;
                let is_near = |other| resume::is_near(config, rank, other);
                let held = |shard| Arc::clone(&near[&shard]);
                resume::beside_sums(config, &self.memory, rank, &near, tell, || {
                    scatter(model, comm, layout, sources, is_near, held)?;
                    resume::take_loss_scale(&near, model, comm)
                })?;
                self.memory.confirm(*attempt, *step);
                drop(near);
                self.memory.give_borrowed_back();
            }
        }
        Ok(model.finish()?)
    }

    /// A checkpoint that is whole but of another job, model or data ends the job; one that is
    /// damaged is the inner error. Storage that fails is waited for.
    fn restore_checkpoint(
        &self,
        directory: &Path,
        config: &WorkerConfig,
        corpus: &Corpus,
        model: &mut Model,
        abort: &AbortHandle,
    ) -> Result<Result<(), Refusal>, Stop> {
        let name = directory.file_name().and_then(|name| name.to_str()).unwrap_or_default();
        let until = Instant::now() + self.patience.start;
        let location = Path::new(&config.checkpoint.location);
        loop {
            let loaded = match show(&self.disk, directory) {
                Ok(manifest) => {
                    of_this_job(&manifest, name, config, corpus, model)?;
                    load(&self.disk, directory, &manifest, model)
                }
                Err(problems) => Err(Refusal::of(name, problems)),
            };
            let away = || look::is_empty(&self.disk, location).unwrap_or(true);
            match loaded {
                Err(refusal) if Instant::now() < until && (refusal.may_heal() || away()) => {
                    abort.check()?;
                    std::thread::sleep(self.patience.retry);
                }
                loaded => return Ok(loaded),
            }
        }
    }
}

/// Refuses a checkpoint of another job, model or data.
fn of_this_job(
    manifest: &CheckpointManifest,
    name: &str,
    config: &WorkerConfig,
    corpus: &Corpus,
    model: &Model,
) -> Result<(), Stop> {
    let expected = Expected {
        model: &config.model,
        data_fingerprint: corpus.fingerprint(),
        seed: config.training.seed,
        spec_hash: &config.checkpoint.spec_hash,
        float_bytes: model.shape.float_bytes,
    };
    let other = differences(manifest, &expected);
    if other.is_empty() {
        return Ok(());
    }
    let refusal = Refusal::of(name, other);
    match data_changes(manifest, config, corpus) {
        Some(changes) => {
            let message = format!("{refusal}; of the data's files {changes}");
            let advice = "put the files back as they were, or give the job another name";
            Err(fail(3, &message, advice))
        }
        None => Err(resume::refused(&refusal)),
    }
}

/// Which files are others than those that a checkpoint was trained on, where that is known.
fn data_changes(
    manifest: &CheckpointManifest,
    config: &WorkerConfig,
    corpus: &Corpus,
) -> Option<String> {
    let kept = Listing::read(Path::new(&config.checkpoint.location))?;
    let of_it = kept.fingerprint == manifest.data_fingerprint;
    let differs = manifest.data_fingerprint != corpus.fingerprint();
    kept.changes(&corpus.listing().filter(|_| of_it && differs)?)
}

/// Rank 0's records.
fn recorder(config: &WorkerConfig) -> Result<Recorder, Stop> {
    let in_pod = std::env::var_os(ENV_WORKER).is_some();
    let directory = PathBuf::from(&config.checkpoint.records);
    let mut recorder = Recorder::start(directory, config.attempt, in_pod)
        .map_err(|error| storage_failed(&format!("no thread for records: {error}")))?;
    let config = config.clone();
    recorder.aside(move || {
        if let Err(error) = hf::text::keep(&config) {
            tracing::warn!("the tokenizer is not kept beside the checkpoints: {error}");
        }
    });
    Ok(recorder)
}

/// The files of the data, for whoever changes them. Training goes on without.
fn keep_listing(config: &WorkerConfig, corpus: &Corpus, records: &mut Recorder) {
    let Some(listing) = corpus.listing() else { return };
    let location = PathBuf::from(&config.checkpoint.location);
    records.aside(move || {
        if let Err(error) = listing.keep(&location) {
            tracing::warn!("the names of the data's files are not kept: {error}");
        }
    });
}

/// Weights and moments of all ranks together, each element once.
fn state_bytes(model: &Model) -> u64 {
    let elements: u64 = model.params.iter().map(|param| param.numel()).sum();
    elements * 3 * model.shape.float_bytes
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

fn engine(config: &WorkerConfig, comm: Comm) -> Result<Engine, Stop> {
    let failed = |error: &dyn std::error::Error, advice: &str| {
        fail(1, &format!("the device cannot be made: {}", chain(error)), advice)
    };
    let again = config.attempt > 1;
    Engine::open(config, comm.rank(), comm).map_err(|error| match error {
        // It had room before. Who took it may be gone when the next engine looks.
        OpenError::Kernel(error) if again && error.is_memory() => Stop::Device(chain(&error)),
        OpenError::Kernel(error) => failed(&error, "free memory or use fewer threads"),
        OpenError::Links(NoLinks::Comm(error)) => Stop::Comm(error),
        OpenError::Links(error) => failed(&error, "`moejob doctor` tells what this machine has"),
    })
}

fn gauge(config: &WorkerConfig, engine: &Engine) -> Option<Gauge> {
    let sequence = u64::from(config.training.sequence_length);
    let world = config.layout.mesh.world();
    Gauge::of(&engine.model.device, config.model.flops_per_token(sequence), world)
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
            config.training.compute.backend == Backend::Cpu
                && !matches!(config.training.precision, Precision::Fp32 | Precision::Fp64),
            "training.precision: processors compute in fp32",
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

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_device_that_cannot_be_left_ends_its_process_unless_the_job_ends() {
        let left = |ended| not_left(ended, Stop::Device("it hangs".to_string()));
        let aborted = || CommError::Aborted { reason: "a peer hangs".to_string() };
        assert!(matches!(left(Ok(AttemptEnd::Completed { step: 9 })), Stop::Device(_)));
        assert!(matches!(left(Err(Stop::Comm(aborted()))), Stop::Device(_)));
        assert!(matches!(left(Err(Stop::Elsewhere)), Stop::Device(_)));
        assert!(matches!(left(Err(Stop::Fenced(3))), Stop::Fenced(3)));
        assert!(matches!(left(Err(fail(3, "no data", "put it back"))), Stop::Failed(_)));
    }
}
