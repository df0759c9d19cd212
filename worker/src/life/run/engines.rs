//! The engines of a worker, one a rank: threads of it, or processes that it starts and, should one
//! be lost, starts again. Snapshots lie in the worker's memory and outlive them, and so do the
//! scribes that write their checkpoints from there. (A thread has its scribe to itself.)

mod again;
mod bound;
mod seats;
pub(crate) mod child;
mod ends;
mod place;
mod process;
mod shelf;
mod thread;
mod waits;
mod watch;
mod wire;

use super::Happened;
use crate::attempt::api::{AttemptEnd, Control, TrainerEvent};
use crate::checkpoint::Disk;
use crate::checkpoint::scribe::Scribe;
use crate::gang::comm::{Comm, CommError, Links};
use crate::life::affinity::{Allowed, Share};
use crate::life::session::Event;
use crate::state::slots::Memory;
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::{Backend, Resume};
use moejob_protocol::report::EventKind;
use again::Again;
use bound::{Bound, Of, Warning};
use ends::{Doing, weight};
use place::Place;
use process::Process;
use rustix::fd::OwnedFd;
use shelf::Shelf;
use std::io;
use std::sync::Arc;
use std::time::Instant;
use thread::Thread;
use waits::Waits;
use tokio::sync::mpsc;

/// `process` makes an engine a process also where a node has one device, which is a processor;
/// `thread` makes them threads where they would be processes.
pub const ENV_ENGINE: &str = "MOEJOB_ENGINE";
/// A trainer, as the shell sees it. It keeps its data from one attempt to the next.
pub trait Attempt {
    fn run_attempt(
        &mut self,
        config: &WorkerConfig,
        comm: Comm,
        control: &Control,
        out: &mut dyn FnMut(TrainerEvent),
    ) -> AttemptEnd;
}

/// Makes the trainer of an engine that is a thread.
pub(super) type Make = Arc<dyn Fn(Memory) -> Box<dyn Attempt> + Send + Sync>;

/// What an engine has said or what became of it.
pub(super) enum Said {
    /// Which GPU it opens.
    Device { uuid: String },
    Told(TrainerEvent),
    /// It has filled or given up a slot.
    Changed,
    Ended { attempt: u32, end: AttemptEnd },
    /// It is no more.
    Gone { how: String, last_words: String, doing: Doing },
}

/// Which one: its place, and its number among all that were started.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Name {
    pub index: usize,
    pub life: u64,
}

/// What follows from what an engine said.
#[derive(Default)]
pub(super) struct Outcome {
    pub tell: Vec<TrainerEvent>,
    /// All ranks have left the attempt.
    pub ended: Option<(u32, AttemptEnd)>,
    /// The worker cannot go on.
    pub exit: bool,
}

impl Outcome {
    /// As the session hears of it.
    pub fn events(self) -> impl Iterator<Item = Event> {
        let ended = self.ended.map(|(attempt, end)| Event::AttemptEnded { attempt, end });
        self.tell.into_iter().map(Event::Trainer).chain(ended)
    }
}

pub(super) struct Engines {
    make: Make,
    /// Workers of one machine take its devices in turn.
    share: Share,
    bound: Bound,
    ranks: u32,
    memory: Memory,
    shelf: Shelf,
    /// Of engines that are processes.
    scribes: Vec<Arc<Scribe>>,
    happened: mpsc::Sender<Happened>,
    /// None where one is being given up.
    engines: Vec<Option<Engine>>,
    /// The uuid of each one's GPU, as far as one of its lives has told it; empty on processors.
    uuids: Vec<String>,
    lives: u64,
    running: Option<Running>,
    again: Again,
    ending: bool,
}

struct Engine {
    life: u64,
    body: Body,
    started: Instant,
    /// Where it works, in the newest attempt that it was given.
    place: Option<Place>,
    /// `EngineStarted` was told.
    told: bool,
}

enum Body {
    Thread(Thread),
    Process(Process),
}

impl Engine {
    fn pid(&self) -> u32 {
        match &self.body {
            Body::Thread(_) => std::process::id(),
            Body::Process(process) => process.pid(),
        }
    }

    /// `EngineStarted`, once, of one that is a process and has a rank.
    fn begin(&mut self, uuid: &str) -> Option<TrainerEvent> {
        let place = self.place.as_ref()?;
        if self.told || !matches!(self.body, Body::Process(_)) {
            return None;
        }
        let kind = EventKind::EngineStarted;
        let told = place.told((uuid, self.pid()), kind, "Configured", "", []);
        self.told = true;
        Some(TrainerEvent::Event(told))
    }
}

impl Engine {
    /// What a person is told of its threads or its cards.
    fn warn(&self, uuid: &str, (reason, text): Warning) -> Option<TrainerEvent> {
        let (place, kind) = (self.place.as_ref()?, EventKind::Warning);
        let message = format!("{}: {text}", place.in_words(uuid, self.pid()));
        Some(TrainerEvent::Event(place.told((uuid, self.pid()), kind, reason, &message, [])))
    }
}

/// The attempt that runs.
struct Running {
    config: Box<WorkerConfig>,
    links: Links,
    node: String,
    ends: Vec<Option<AttemptEnd>>,
    /// What this worker first heard of that ended the attempt. All that comes behind it follows.
    first: Option<String>,
    watches: Vec<Watch>,
    /// What its ranks wait for, and how often one did at a tick.
    waits: Vec<Waits>,
    life: u64,
    since: Instant,
}

/// An engine's beats, as they were seen last, for how many ticks they have not changed, and for how
/// many ticks it has not left an attempt that is over.
#[derive(Clone, Copy, Default)]
struct Watch {
    beats: u32,
    ticks: u64,
    stays: u64,
}

impl Running {
    fn attempt(&self) -> u32 {
        self.config.attempt
    }

    fn rank(&self, index: usize) -> u32 {
        self.links.shape().first + index as u32
    }

    fn control(&self, index: usize) -> Control {
        let rank = self.rank(index);
        Control::new(Arc::clone(self.links.memory()), self.links.progress(rank))
    }

    fn abort(&self, reason: &str) {
        let ranks = self.links.shape().ranks();
        ranks.for_each(|rank| self.links.abort_handle(rank).abort(reason));
    }
}

impl Engines {
    /// Of a worker that may use these processors.
    pub fn new(
        make: Make,
        share: Share,
        happened: mpsc::Sender<Happened>,
        allowed: Allowed,
    ) -> Engines {
        Engines {
            make,
            share,
            bound: Bound::new(allowed),
            ranks: 1,
            memory: Memory::default(),
            shelf: Shelf::default(),
            scribes: Vec::new(),
            happened,
            engines: Vec::new(),
            uuids: Vec::new(),
            lives: 0,
            running: None,
            again: Again::default(),
            ending: false,
        }
    }

    /// Starts what is missing of the worker's engines, and ends what there is too many of. They
    /// start while the workers connect. An engine on a GPU is a process: some errors of CUDA are
    /// cured by the end of the process alone.
    ///
    /// # Errors
    /// The system gives no thread or process.
    pub fn prepare(&mut self, config: &WorkerConfig) -> io::Result<()> {
        self.ranks = config.ranks.max(1);
        let ranks = self.ranks as usize;
        let processes = match std::env::var(ENV_ENGINE).as_deref() {
            Ok("process") => true,
            Ok("thread") => false,
            _ => ranks > 1 || config.training.compute.backend == Backend::Cuda,
        };
        let share = (self.share.index, self.share.of);
        self.bound.prepare(Of::new(config, share), processes);
        self.engines.resize_with(ranks, || None);
        self.uuids.resize(ranks, String::new());
        let memory = self.memory.clone();
        let scribe = || Arc::new(Scribe::new(Disk::real(), memory.clone()));
        self.scribes.resize_with(ranks, scribe);
        for index in 0..ranks {
            let fits = self.engines[index].as_ref().is_some_and(|engine| {
                matches!(engine.body, Body::Process(_)) == processes
            });
            if !fits {
                self.engines[index] = None;
                self.engines[index] = Some(self.start(index, processes)?);
            }
        }
        Ok(())
    }

    fn start(&mut self, index: usize, process: bool) -> io::Result<Engine> {
        self.lives += 1;
        let name = Name { index, life: self.lives };
        let happened = self.happened.clone();
        let body = match process {
            true => {
                let device = self.share.index * self.ranks + index as u32;
                let (environment, memory) = (self.bound.environment(index), self.memory.clone());
                let scribe = Arc::clone(&self.scribes[index]);
                Body::Process(Process::start(name, device, environment, memory, scribe, happened)?)
            }
            false => {
                let (make, memory) = (Arc::clone(&self.make), self.memory.clone());
                Body::Thread(Thread::start(name, move || make(memory), happened)?)
            }
        };
        Ok(Engine { life: name.life, body, started: Instant::now(), place: None, told: false })
    }

    /// Runs the attempt that was joined. The engines are idle: the session starts an attempt only
    /// after the one before has ended. What is told is that they have begun.
    pub fn train(&mut self, config: Box<WorkerConfig>, links: Links) -> Outcome {
        let shape = links.shape();
        let again: Vec<u32> = match &config.resume {
            // Shards are as long as before.
            Resume::Memory { layout, .. } if *layout == config.layout => shape.ranks().collect(),
            _ => Vec::new(),
        };
        self.memory.begin(&config.resume, &again);
        self.bound.begin();
        let count = shape.count as usize;
        let node = config.member_of(shape.first).map_or(String::new(), |of| of.node.clone());
        let (ends, watches) = (vec![None; count], vec![Watch::default(); count]);
        let (waits, life, since) = (vec![Waits::default(); count], 0, Instant::now());
        let first = None;
        let running = Running { config, links, node, ends, first, watches, waits, life, since };
        let running = self.running.insert(running);
        self.shelf.begin(&running.config, running.control(0));
        let mut outcome = Outcome::default();
        for (index, engine) in self.engines.iter_mut().enumerate() {
            let rank = shape.first + index as u32;
            // One that was lost just now is missing below.
            let Some(engine) = engine else { continue };
            let of_rank = WorkerConfig { rank: Some(rank), ..(*running.config).clone() };
            let (attempt, node) = (running.attempt(), running.node.clone());
            engine.place = Some(Place { attempt, rank, node, device: index });
            let gpu = running.config.training.compute.backend == Backend::Cuda;
            // One on a GPU is told of when it has said on which.
            if !gpu || !self.uuids[index].is_empty() {
                outcome.tell.extend(engine.begin(&self.uuids[index]));
            }
            let warnings = self.bound.take_warnings().into_iter();
            let uuid = &self.uuids[index];
            outcome.tell.extend(warnings.filter_map(|warning| engine.warn(uuid, warning)));
            match &mut engine.body {
                Body::Thread(thread) => {
                    let comm = running.links.comm(rank);
                    thread.train(Box::new(of_rank), comm, running.control(index));
                }
                Body::Process(process) => {
                    // What it does not get it misses by name.
                    let sources = handed_over(&self.memory, running, rank, engine.life);
                    let sources = sources.unwrap_or_else(|error| {
                        tracing::error!(%error, "a snapshot cannot be handed over");
                        Vec::new()
                    });
                    self.scribes[index].attempt(&of_rank);
                    match self.shelf.serve(index) {
                        Ok(at) => process.train(Box::new(of_rank), &running.links, sources, at),
                        Err(error) => {
                            tracing::error!(%error, "no desk for an engine's data");
                            process.kill();
                        }
                    }
                }
            }
        }
        self.miss(&mut outcome);
        outcome
    }

    pub fn on(&mut self, name: Name, said: Said) -> Outcome {
        let mut outcome = Outcome::default();
        let current = |engine: &Option<Engine>| {
            engine.as_ref().is_some_and(|engine| engine.life == name.life)
        };
        if !self.engines.get(name.index).is_some_and(current) {
            return outcome;
        }
        match said {
            Said::Device { uuid } => {
                if !uuid.is_empty() {
                    self.uuids[name.index] = uuid;
                }
                let engine = self.engines[name.index].as_mut();
                let uuid = &self.uuids[name.index];
                outcome.tell.extend(engine.and_then(|engine| engine.begin(uuid)));
            }
            Said::Told(event) => outcome.tell.push(event),
            Said::Changed => self.follow(&mut outcome),
            Said::Ended { attempt, end } => {
                self.follow_process(name.index, &mut outcome);
                self.ended(name.index, attempt, end, &mut outcome);
            }
            Said::Gone { how, last_words, doing } => {
                self.gone(name.index, (&how, &last_words), doing, &mut outcome);
            }
        }
        outcome
    }

    /// What engines that are processes hold is told by the worker, which sees it.
    fn follow(&mut self, outcome: &mut Outcome) {
        if let Some(running) = &self.running {
            self.memory.follow(running.attempt());
        }
        outcome.tell.push(TrainerEvent::Held(self.memory.held()));
    }

    fn follow_process(&mut self, index: usize, outcome: &mut Outcome) {
        let engine = self.engines[index].as_ref();
        if engine.is_some_and(|engine| matches!(engine.body, Body::Process(_))) {
            self.follow(outcome);
        }
    }

    fn ended(&mut self, index: usize, attempt: u32, end: AttemptEnd, outcome: &mut Outcome) {
        let Some(running) = self.running.as_mut().filter(|of| of.attempt() == attempt) else {
            return;
        };
        let ranks = running.links.shape().ranks();
        // Ranks of this worker leave because one of them has: that says nothing by itself.
        if let AttemptEnd::Aborted(error @ CommError::PeerLost { rank, .. }) = &end
            && !ranks.contains(rank)
        {
            running.first.get_or_insert_with(|| error.to_string());
        }
        running.ends[index].get_or_insert(end);
        if running.ends.iter().all(Option::is_some) {
            let ends = running.ends.iter_mut().filter_map(Option::take);
            let end = ends.max_by_key(|end| weight(end, |rank| ranks.contains(&rank)));
            outcome.ended = end.map(|end| (attempt, end));
            self.running = None;
        }
    }
}

/// What the worker holds of the state that the attempt resumes from, for the engine of `rank`: to
/// send, to read, and, where it is its own, to fill anew later. With it what that engine may fill
/// at once. That engine has it open from here on.
fn handed_over(
    memory: &Memory,
    running: &Running,
    rank: u32,
    life: u64,
) -> io::Result<Vec<(bool, OwnedFd)>> {
    let Resume::Memory { step, attempt, sources, .. } = &running.config.resume else {
        return Ok(Vec::new());
    };
    let ranks = running.links.shape().ranks();
    let mut all = Vec::new();
    for source in sources.iter().filter(|source| ranks.contains(&source.from)) {
        let files = memory.files(*attempt, *step, &[source.shard])?;
        all.extend(files.into_iter().map(|file| (source.from != rank, file)));
    }
    all.extend(memory.free_files(rank)?.into_iter().map(|file| (false, file)));
    memory.hand_over(life, all.iter().map(|(_, file)| file))?;
    Ok(all)
}
