//! One attempt on the device's thread: load, train, validate, checkpoint, end.
//!
//! ```text
//! open data -> look into storage, claim -> state (fresh | checkpoint | memory) -> snapshot
//!   -> say -> step -> hear -> [validate] [snapshot] [checkpoint] -> say -> step ...
//!   -> empty steps until the last checkpoint is committed
//! ```
//! Whatever takes effect on all ranks was said and heard by all with a step, so all take it alike.

use crate::attempt::courier::Courier;
use crate::attempt::gauge::Gauge;
use crate::attempt::pace::{InMemory, Pace, Saving};
use crate::attempt::products;
use crate::attempt::snapshots::Over;
use crate::attempt::steps::Run;
use crate::attempt::telling::Clock;
use crate::checkpoint::desk::Ask;
use crate::checkpoint::{self, Disk};
use crate::gang::comm::{Comm, CommError};
use crate::data::{self, Corpus, DataError, Listing};
use crate::hf;
use crate::engine::model::Model;
use crate::attempt::recorder::{Recorder, Unwritten};
use crate::attempt::resume;
use crate::attempt::restore::agree_on_data;
use crate::attempt::start::{Passage, Start, fault_of};
use crate::attempt::stop::{Stop, no_thread, not_left, not_opened};
use crate::attempt::together::Verifiers;
use crate::attempt::saves::{Flush, News, Patience, Saves, pending_max};
use crate::state::slots::Memory;
use crate::engine::step::Engine;
use crate::engine::trace::{STEPS_SKIPPED, Trace};
use crate::attempt::api::{AttemptEnd, Control, Shown, TrainerEvent, Wait};
use crate::failure::Failure;
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::{Backend, DataConfig, Precision, Resume, TrainingConfig};
use moejob_protocol::memory::GENERATIONS;
use moejob_protocol::message::{Held, Phase, Request};
use moejob_protocol::model::{AuxLossScope, ModelConfig, RouterConfig};
use moejob_protocol::pod::{ENV_TRACE, ENV_WORKER};
use moejob_protocol::report::Event;
use std::path::{Path, PathBuf};
use std::time::{Duration, Instant};

/// Trains attempts, one after the other; keeps data between them. Snapshots stay in the memory of
/// the worker, which outlives it.
#[derive(Debug)]
pub struct Trainer {
    pub(super) memory: Memory,
    /// Where its checkpoints are written.
    desk: checkpoint::Desk,
    corpus: Option<(DataConfig, TrainingConfig, Corpus)>,
    /// Where the next attempt asks for its data, which the worker has open.
    batches: Option<data::Desk>,
    /// Where what is read is told.
    pub(super) shown: Shown,
    /// What its GPU chose in the attempt before, for the next one.
    products: Option<String>,
    pub(super) disk: Disk,
    pub(super) patience: Patience,
    /// See [`Engine::spoil`].
    spoiled: Vec<u64>,
    /// See [`Engine::runs_ahead`].
    pub(super) ahead: bool,
    /// See [`Model::cut_late`].
    late: bool,
    /// It was connected with other ranks.
    trained: bool,
    /// Of the attempt before, by a storage that was full.
    unwritten: Unwritten,
}

/// How long the end of an attempt waits for its writer to remove old checkpoints.
const WRITER_END_MAX: Duration = Duration::from_secs(10);
/// How long a commit waits until the records before it are durable.
const RECORDS_MAX: Duration = Duration::from_secs(5);

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
        let (corpus, batches, products) = (None, None, None);
        let shown = Shown::default();
        Trainer {
            memory, desk, corpus, batches, shown, products, disk, patience, spoiled,
            ahead: false, late: false, trained: false, unwritten: Unwritten::default(),
        }
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
            Err(Stop::Hangs(reason)) => AttemptEnd::Aborted(CommError::Aborted { reason }),
            Err(Stop::Device { message, own }) => AttemptEnd::DeviceFailed { message, own },
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
        let (mut start, abort) = (Start::default(), comm.abort_handle());
        let mut corpus = self.corpus(config, &mut comm, control)?;
        start.passed(Passage::Data);
        let ended = self.attempt_on(&mut corpus, config, comm, control, start, out);
        // However it ended, the next one need not open it again, unless a read of it still hangs.
        if corpus.sequence() > 0 {
            self.corpus = Some((config.data.clone(), config.training.clone(), corpus));
        }
        match ended {
            // A read that was not waited for any longer is no failure: the group says why.
            Err(Stop::Failed(failure)) if DataError::is_given_up(&failure) => {
                abort.check()?;
                Err(Stop::Failed(failure))
            }
            ended => ended,
        }
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
        let stamina = self.patience.of_start(config);
        let disk = self.shown.disk(&self.disk, stamina, Wait::Storage, || false);
        let location = Path::new(&config.checkpoint.location);
        let (comm_, failed) = (&mut comm, None);
        let verifiers = Verifiers { comm: comm_, disk: &disk, control, location, failed };
        let (desk, patience) = (&self.desk, &self.patience);
        let found = resume::open_storage(config, desk, patience, verifiers, out)?;
        let mut records = match comm.rank() {
            0 => Some(recorder(config, &self.disk, std::mem::take(&mut self.unwritten))?),
            _ => None,
        };
        if let Some(records) = &mut records {
            found.refused.iter().for_each(|refused| records.event(refused));
        }
        let rank = comm.rank();
        start.passed(Passage::Storage);
        control.stir();
        let trained = self.trained;
        let refused = |error| not_opened(config.attempt, trained, error);
        let mut engine = Engine::open(config, rank, comm).map_err(refused)?;
        start.passed(Passage::Device);
        control.stir();
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
        let from = (&disk, control);
        let restored = self.restore(config, corpus, model, links.comm(), from, &mut tell);
        if restored.is_err() {
            out(TrainerEvent::Held(self.memory.held()));
        }
        let sums = restored?;
        let kept = self.products.clone();
        let mut tell = |event: Event| resume::tell(event, records.as_ref(), out);
        let read = || products::agree(config, &disk, kept, model, links.comm(), &mut tell);
        control.waiting(Wait::Storage, read)?;
        engine.links.meet().map_err(|error| refused(error.into()))?;
        self.trained = true;
        if let Some(built) = engine.links.take_built() {
            out(TrainerEvent::Built(built));
        }
        start.passed(Passage::State);
        if let Some(records) = &mut records {
            keep_listing(config, corpus, records);
        }
        let retry_us = u64::try_from(self.patience.retry.as_micros()).unwrap_or(u64::MAX);
        let fingerprint = corpus.fingerprint().to_string();
        self.desk.ask(Ask::Begin { fingerprint, retry_us });
        let gauge = gauge(config, &engine);
        let (state, buddies) = (state_bytes(&engine.model), resume::buddies(config));
        let offloaded = engine.model.offloaded_bytes() * u64::from(config.ranks.max(1));
        let held = InMemory { state, offloaded };
        let pace = if config.recovery.memory_auto {
            Some(Pace::agreed(config.ranks.max(1), &buddies, held, engine.links.comm())?)
        } else {
            None
        };
        let saving = config.checkpoint.auto.then(|| {
            let bytes = state.div_ceil(buddies.len().max(1) as u64);
            let every = config.checkpoint.every_steps;
            Saving::new(every, config.resume.step(), bytes, Instant::now())
        });
        let saves = self.saves(config, rank, state, records.as_ref());
        let ahead = self.ahead || engine.runs_ahead();
        let ferry = engine.links.comm().take_ferry().expect("nobody else takes it");
        let mut run = Run {
            config,
            control,
            out,
            records,
            saves,
            patience: self.patience.for_state(state),
            engine,
            start,
            sums,
            buddies,
            step: config.resume.step(),
            asked: Request::default(),
            waits_until: None,
            held: None,
            travels: None,
            courier: Courier::new(ferry),
            slow_told: false,
            ahead,
            pace,
            preparing: None,
            over: Over::default(),
            anew: false,
            saving,
            leaving: None,
            skips: false,
            clock: Clock::start(),
            gauge,
            keeps_best: config.checkpoint.keep_best && rank == 0,
            held_out: None,
            memory: &self.memory,
        };
        if let Some(trouble) = found.trouble
            && let Some(news) = run.saves.begin_degraded(&trouble)
        {
            run.tell_storage(news)?;
        }
        let ended = run.train(corpus);
        let ended = ended.map_err(|stop| stop.in_step(run.step));
        run.over.tell();
        tracing::debug!("steps are over");
        self.products = products::of(&run.engine.model);
        match &ended {
            Ok(_) => run.saves.finish(WRITER_END_MAX.min(self.patience.stop)),
            // What was given to the writer is written all the same, and counts for the next
            // attempt.
            Err(Stop::Comm(_) | Stop::Hangs(_) | Stop::Device { .. }) => {}
            Err(_) => run.saves.cancel(),
        }
        if ended.is_err()
            && let Some(committed) = run.saves.last_commit()
        {
            run.tell_storage(News::Committed(committed))?;
        }
        run.tell_removed()?;
        self.unwritten = run.records.take().map(Recorder::end).unwrap_or_default();
        let ended = ended.and_then(|end| Ok(run.engine.all_arrived().map(|()| end)?));
        match run.engine.leave() {
            Ok(()) => {
                // Of a device that failed nothing is given back: that could wait for a kernel.
                let began = Instant::now();
                match &ended {
                    Err(Stop::Device { .. }) => std::mem::forget(run.engine),
                    _ => drop(run.engine),
                }
                let seconds = began.elapsed().as_secs_f64();
                tracing::debug!(seconds, "its device is given back");
                ended
            }
            // Whatever ended the attempt, its device would be waited for without an end.
            Err(error) => {
                std::mem::forget(run.engine);
                Err(not_left(ended, error))
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
        let begin = |disk: &Disk| {
            self.shown.begin(control.clone(), Some(abort.clone()), disk.trouble());
        };
        let opened = match (self.batches.take(), self.corpus.take()) {
            (Some(desk), _) => {
                begin(&self.disk);
                let abort = abort.clone();
                let open = || Corpus::behind(desk, &config.training, move || abort.is_aborted());
                control.waiting(Wait::Data, open)
            }
            (None, Some((data, training, corpus)))
                if data == config.data && training == config.training =>
            {
                begin(corpus.disk());
                Ok(corpus)
            }
            _ => {
                let stamina = self.patience.of_data(config);
                let disk = self.shown.disk(&self.disk, stamina, Wait::Data, || false);
                begin(&disk);
                let (data, vocabulary) = (&config.data, config.model.vocab_size);
                let kept = Listing::of_job(config);
                let data = (data, kept.as_deref());
                let open = || Corpus::open_on(&disk, data, &config.training, vocabulary);
                control.waiting(Wait::Data, open)
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
}

/// Rank 0's records.
fn recorder(config: &WorkerConfig, disk: &Disk, unwritten: Unwritten) -> Result<Recorder, Stop> {
    let in_pod = std::env::var_os(ENV_WORKER).is_some();
    let (disk, directory) = (disk.clone(), PathBuf::from(&config.checkpoint.records));
    let mut recorder = Recorder::start_with(unwritten, disk, directory, config.attempt, in_pod)
        .map_err(|error| no_thread("for records", &error))?;
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

fn gauge(config: &WorkerConfig, engine: &Engine) -> Option<Gauge> {
    let sequence = u64::from(config.training.sequence_length);
    let world = config.layout.mesh.world();
    Gauge::of(&engine.model.device, config.model.flops_per_token(sequence), world)
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
    Some(Failure::new(2, found.1, "change the manifest"))
}
