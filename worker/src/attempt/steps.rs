//! The steps of one attempt, and what is due between them.

use crate::checkpoint::best::Best;
use crate::attempt::gauge::Gauge;
use crate::attempt::pace::Pace;
use crate::attempt::recorder::Recorder;
use crate::attempt::records::{event, now};
use crate::attempt::resume::resumes_in_place;
use crate::attempt::start::Start;
use crate::attempt::saves::{Ends, News, Patience, Saves};
use crate::data::{Corpus, DocumentOverlap, Doubled, Feeder, Overlaps};
use crate::state::rank::RankState;
use crate::state::slot::Slot;
use crate::state::slots::Memory;
use crate::state::snapshot::{self, SnapshotError};
use crate::engine::step::{Engine, StepSummary};
use crate::engine::validate::Validation;
use crate::gang::step_end::{StepEnd, agree};
use crate::attempt::trainer::{Stop, fail, storage_failed};
use crate::attempt::api::{AttemptEnd, Control, TrainerEvent};
use moejob_kernels::StepPhase;
use moejob_protocol::WorkerConfig;
use moejob_protocol::checkpoint::directory_name;
use moejob_protocol::config::Resume;
use moejob_protocol::message::{Phase, Request};
use moejob_protocol::report::{
    Detail, EventKind, Phases, RoutingReport, Stalls, StepReport, TOKENS_PER_EXPERT_EVER,
    TOKENS_PER_EXPERT_MAX, Timing,
};
use std::sync::Arc;
use std::time::{Duration, Instant};

/// An attempt that trains.
pub(crate) struct Run<'a> {
    pub config: &'a WorkerConfig,
    pub control: &'a Control,
    pub out: &'a mut dyn FnMut(TrainerEvent),
    /// Rank 0's.
    pub records: Option<Recorder>,
    pub engine: Engine,
    /// What came before the first step.
    pub start: Start,
    pub saves: Saves,
    pub patience: Patience,
    pub memory: &'a Memory,
    pub buddies: Vec<Option<u32>>,
    /// Steps done.
    pub step: u64,
    /// Taken from `control`, not yet agreed on.
    pub asked: Request,
    /// When waiting for storage ends, since this attempt does.
    pub waits_until: Option<Instant>,
    /// Steps in the newest snapshot.
    pub snapshot_step: u64,
    /// When state is copied to memory, where that is not every so many steps.
    pub pace: Option<Pace>,
    /// All ranks take a snapshot after this step.
    pub snapshot_agreed: bool,
    /// The last snapshot that was due was left out.
    pub skips: bool,
    pub clock: Clock,
    /// Rank 0's, of a GPU.
    pub gauge: Option<Gauge>,
    /// Rank 0's, where the best checkpoint is kept.
    pub best: Option<Best>,
    /// Measured behind this step.
    pub held_out: Option<f64>,
}

/// What of the time since the last report was no step.
pub(crate) struct Clock {
    since: Instant,
    stalls: Stalls,
}

impl Clock {
    pub fn start() -> Clock {
        Clock { since: Instant::now(), stalls: Stalls::default() }
    }

    /// Of the time since the last report, in which `tokens` were trained on; `parts` are the
    /// seconds of the steps' phases.
    fn report(&mut self, tokens: u64, parts: [f64; StepPhase::COUNT]) -> Timing {
        let Clock { since, stalls } = std::mem::replace(self, Clock::start());
        let wall = since.elapsed().as_secs_f64();
        let of = |phase| parts[phase as usize];
        let mut phases = Phases {
            data: of(StepPhase::Data),
            forward: of(StepPhase::Forward),
            backward: of(StepPhase::Backward),
            communication: of(StepPhase::Communication),
            numbers: of(StepPhase::Numbers),
            update: of(StepPhase::Update),
            validation: stalls.validation,
            snapshot: stalls.snapshot,
            checkpoint: stalls.checkpoint,
            other: 0.0,
        };
        let told: f64 = phases.parts().iter().map(|(_, seconds)| seconds).sum();
        phases.other = (wall - told).max(0.0);
        Timing { wall_tokens_per_second: tokens as f64 / wall, stalls, phases }
    }
}

/// The best checkpoint is a service: training goes on without it.
fn warn_of(written: Option<std::io::Result<()>>) {
    if let Some(Err(error)) = written {
        tracing::warn!("the best checkpoint is not noted: {error}");
    }
}

fn not_taken(error: SnapshotError) -> Stop {
    match error {
        SnapshotError::Comm(error) => Stop::Comm(error),
        SnapshotError::Device(error) => Stop::from(error),
        SnapshotError::Memory(source) => {
            let advice = "give the worker more memory, or make the model smaller";
            fail(1, &format!("no memory for a snapshot: {source}"), advice)
        }
    }
}

/// What to do about numbers that are not finite.
const DIVERGED: &str = "lower the learning rate, warm up longer, or clip gradients";

/// Between two empty steps that wait for storage: at first, and at most.
const STORAGE_POLL: Duration = Duration::from_millis(2);
/// Looks for a free slot, that long apart, before an attempt ends without its last checkpoint.
const SLOT_TRIES: u32 = 30_000;
const STORAGE_POLL_MAX: Duration = Duration::from_millis(100);

impl Run<'_> {
    pub fn train(&mut self, corpus: &mut Corpus) -> Result<AttemptEnd, Stop> {
        let training = &self.config.training;
        let model = &self.engine.model;
        let own = model.layout.mesh.micro_batches(model.rank, model.shape.micro_batches);
        let opened = std::mem::take(corpus);
        let mut feeder = Feeder::start(opened, own, self.step, training.steps);
        let ended = self.train_on(&mut feeder);
        *corpus = feeder.into_corpus();
        ended
    }

    fn train_on(&mut self, feeder: &mut Feeder) -> Result<AttemptEnd, Stop> {
        self.clock = Clock::start();
        self.tell_resumed()?;
        self.tell_overlaps(feeder)?;
        self.control.set_step(self.step);
        // What was loaded or made from a seed can be so again: only what came from memory goes back
        // there at once, where a copy is dear.
        let from_memory = matches!(self.config.resume, Resume::Memory { .. });
        let resumed = match self.pace {
            Some(pace) if !(from_memory && pace.fits()) => None,
            _ if resumes_in_place(self.config, &self.buddies) => None,
            _ => self.snapshot()?,
        };
        self.prepare();
        let steps = self.config.training.steps;
        // The attempt before was lost when all was trained and the last checkpoint was not written.
        if self.step >= steps && from_memory {
            self.waits_until = Some(Instant::now() + self.patience.end);
            self.checkpoint(resumed)?;
        }
        let mut stopped = false;
        while self.step < steps && !stopped {
            self.control.set_phase(Phase::Training);
            let started = Instant::now();
            let (summary, agreed) = self.step_twice_at_most(feeder)?;
            self.step += 1;
            self.control.set_step(self.step);
            let seconds = started.elapsed().as_secs_f64();
            self.clock.stalls.data += feeder.take_waited().as_secs_f64();
            let validation = self.validate(feeder)?;
            self.held_out = validation.as_ref().map(|validation| validation.loss);
            self.report(&summary, validation, seconds)?;
            stopped = agreed.stop_after_this_step;
            self.keep(agreed, stopped)?;
        }
        self.control.set_phase(Phase::Stopping);
        self.wait_for_storage()?;
        if self.step >= steps && self.saves.has_given_up(self.step) {
            let waited = self.patience.end.as_secs();
            let why = format!("the last checkpoint could not be written in {waited} seconds");
            return Err(storage_failed(&why));
        }
        if self.step >= steps {
            return Ok(AttemptEnd::Completed { step: self.step });
        }
        Ok(AttemptEnd::Stopped { step: self.step })
    }

    /// A step and what the ranks agree on after it. A number that is not finite may have come from
    /// a fault of the machine; nothing was updated then, and the step is done once again.
    fn step_twice_at_most(
        &mut self,
        feeder: &mut Feeder,
    ) -> Result<(StepSummary, Request), Stop> {
        let mut agreed = Request::default();
        for attempt in 0..2 {
            let summary = self.engine.step(self.step, feeder)?;
            let mut end = StepEnd::default();
            self.fill(&mut end);
            let ends = agree(&end, self.engine.links.comm())?;
            // Whoever is here has finished the snapshot that came before.
            self.memory.confirm(self.config.attempt, self.snapshot_step);
            let request = self.take_in(&ends)?;
            agreed.checkpoint_now |= request.checkpoint_now;
            agreed.stop_after_this_step |= request.stop_after_this_step;
            match &summary.non_finite {
                None => return Ok((summary, agreed)),
                Some(what) if attempt == 1 => {
                    let what = what.clone();
                    let first = self.engine.diagnose(self.step, feeder)?;
                    let first = first.map(|first| format!("; it began in {first}"));
                    let message = format!(
                        "{what} is not finite at step {}, twice: nothing was updated{}",
                        self.step + 1,
                        first.unwrap_or_default()
                    );
                    return Err(fail(1, &message, DIVERGED));
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
        end.checkpoint_now = self.asked.checkpoint_now;
        end.stop_after_this_step = self.asked.stop_after_this_step;
        let due = self.pace.is_some_and(|pace| pace.is_due(Instant::now()));
        end.snapshot_now = due && self.engine.model.rank == 0;
        self.saves.fill(end);
    }

    /// Acts on what all ranks said, the same on each of them.
    fn take_in(&mut self, ends: &[StepEnd]) -> Result<Request, Stop> {
        self.asked = Request::default();
        let news = self.saves.take_in(ends).map_err(|end| match end {
            Ends::Fenced(by) => Stop::Fenced(by),
            Ends::NotFinite(message) => fail(1, &message, DIVERGED),
        })?;
        for news in news {
            self.tell_storage(news)?;
        }
        self.snapshot_agreed = ends.iter().any(|end| end.snapshot_now);
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
        let checkpoint = every(config.checkpoint.every_steps)
            || last
            || agreed.checkpoint_now
            || self.saves.is_overdue();
        let due = match self.pace {
            Some(_) => self.snapshot_agreed,
            None => every(config.recovery.memory_every_steps),
        };
        let memory = due || stopped && self.pace.is_none_or(|pace| pace.fits());
        let snapshot = if memory { self.snapshot()? } else { None };
        if last || stopped {
            let patience = if last { self.patience.end } else { self.patience.stop };
            self.waits_until = Some(Instant::now() + patience);
        }
        if checkpoint { self.checkpoint(snapshot) } else { Ok(()) }
    }

    /// Begins a checkpoint of this step, from its snapshot where there is one. Where storage has
    /// not caught up it is put off, unless there is no step after this one.
    fn checkpoint(&mut self, snapshot: Option<Arc<Slot>>) -> Result<(), Stop> {
        let began = Instant::now();
        if !self.saves.has_room() {
            if self.waits_until.is_none() {
                let news = self.saves.put_off(self.step);
                return news.map_or(Ok(()), |news| self.tell_storage(news));
            }
            self.wait_for_storage()?;
        }
        if self.saves.has_committed(self.step) {
            return Ok(());
        }
        match snapshot {
            Some(snapshot) => snapshot.lend(),
            None if self.cut_for_checkpoint()? => {}
            None => {
                self.saves.leave_out();
                return Ok(());
            }
        }
        // Before the commit, which removes what is not spared.
        let begins = self.best.as_mut().zip(self.held_out);
        warn_of(begins.map(|(best, loss)| best.begins(self.step, loss)));
        self.saves.begin(self.step);
        self.clock.stalls.checkpoint += began.elapsed().as_secs_f64();
        Ok(())
    }

    /// Cuts the state for a checkpoint alone; false, on all ranks alike: a rank has no memory for
    /// that. Where there is no step after this one, memory is waited for: all who read are done.
    fn cut_for_checkpoint(&mut self) -> Result<bool, Stop> {
        let attempt = self.config.attempt;
        for _ in 0..SLOT_TRIES {
            let (model, comm) = (&mut self.engine.model, self.engine.links.comm());
            let taken = snapshot::take_for_checkpoint(self.memory, model, comm, attempt, self.step);
            if taken.map_err(not_taken)?.is_some() {
                return Ok(true);
            }
            if self.waits_until.is_none() {
                return Ok(false);
            }
            std::thread::sleep(STORAGE_POLL);
        }
        let advice = "give the worker more memory, or make the model smaller";
        Err(fail(1, "no memory for the last checkpoint", advice))
    }

    /// Goes on with empty steps until nothing waits for storage, or rank 0 has lost patience.
    fn wait_for_storage(&mut self) -> Result<(), Stop> {
        let mut pause = STORAGE_POLL;
        let last = self.patience.end;
        let until = *self.waits_until.get_or_insert_with(|| Instant::now() + last);
        while self.saves.is_waiting() {
            std::thread::sleep(pause);
            pause = (pause + pause / 8).min(STORAGE_POLL_MAX);
            if Instant::now() >= until {
                self.saves.lose_patience();
            }
            let mut end = StepEnd::default();
            self.fill(&mut end);
            let ends = agree(&end, self.engine.links.comm())?;
            let request = self.take_in(&ends)?;
            // Asked for meanwhile: it takes effect with the next real step.
            self.asked.checkpoint_now |= request.checkpoint_now;
            self.asked.stop_after_this_step |= request.stop_after_this_step;
        }
        Ok(())
    }

    /// What the next snapshot needs is made ready beside the first steps.
    fn prepare(&self) {
        if self.pace.is_some_and(|pace| !pace.fits()) {
            return;
        }
        let (table, memory) = (self.engine.model.table(), self.memory.clone());
        let wards = (0..).zip(&self.buddies).filter(|(_, buddy)| **buddy == Some(table.rank));
        let shards = wards.map(|(ward, _)| ward).chain([table.rank]);
        let shards: Vec<(u32, usize)> =
            shards.map(|shard| (shard, snapshot::shard_bytes(&table, shard))).collect();
        let thread = std::thread::Builder::new().name("prepare".to_string());
        // Without the thread the next snapshot takes longer.
        let _ = thread.spawn(move || memory.prepare(&shards));
    }

    /// None: a rank has no memory for another copy of its state, and training goes on without.
    fn snapshot(&mut self) -> Result<Option<Arc<Slot>>, Stop> {
        let (attempt, began) = (self.config.attempt, Instant::now());
        let taken = snapshot::take(
            self.memory,
            &mut self.engine.model,
            self.engine.links.comm(),
            &self.buddies,
            attempt,
            self.step,
        );
        let taken = taken.map_err(not_taken);
        if !matches!(taken, Ok(None)) {
            self.snapshot_step = self.step;
        }
        let ended = Instant::now();
        self.clock.stalls.snapshot += (ended - began).as_secs_f64();
        if let Some(pace) = &mut self.pace {
            pace.taken(began, ended);
        }
        (self.out)(TrainerEvent::Held(self.memory.held()));
        let taken = taken?;
        let told = std::mem::replace(&mut self.skips, taken.is_none());
        if taken.is_none() && !told {
            let message = "no memory for another copy of the state while a checkpoint is written \
                           from the last one; training goes on, and an engine that is lost now \
                           costs more steps"
                .to_string();
            self.tell(EventKind::Warning, "SnapshotSkipped", message, self.step)?;
        }
        Ok(taken)
    }

    fn validate(&mut self, feeder: &Feeder) -> Result<Option<Validation>, Stop> {
        let validation = &self.config.data.validation;
        let last = self.step >= self.config.training.steps;
        let every = validation.every_steps;
        if every == 0 || !(last || self.step.is_multiple_of(every)) {
            return Ok(None);
        }
        self.control.set_phase(Phase::Validating);
        let most = validation.max_sequences;
        let began = Instant::now();
        let measured = self.engine.validate(&mut feeder.corpus(), most)?;
        self.clock.stalls.validation += began.elapsed().as_secs_f64();
        Ok(measured)
    }

    fn report(
        &mut self,
        summary: &StepSummary,
        validation: Option<Validation>,
        seconds: f64,
    ) -> Result<(), Stop> {
        let phases = self.engine.take_phases();
        if self.records.is_none() {
            return Ok(());
        }
        self.tell_troubles()?;
        if let Some(Err(error)) = self.engine.take_traced() {
            let message = format!("the trace could not be written: {error}");
            self.tell(EventKind::Warning, "TraceFailed", message, self.step)?;
        }
        let routing = self.routing(summary, validation);
        let tokens = self.config.training.tokens_per_step();
        let tokens_per_second = tokens as f64 / seconds;
        let gauge = self.gauge.as_mut();
        let report = StepReport {
            step: self.step,
            loss: summary.loss,
            aux_loss: summary.aux_loss,
            z_loss: summary.z_loss,
            grad_norm: summary.grad_norm,
            loss_scale: summary.loss_scale,
            learning_rate: summary.learning_rate,
            tokens: self.step * tokens,
            tokens_per_second,
            timing: self.clock.report(tokens, phases),
            world_size: self.engine.links.world(),
            attempt: self.config.attempt,
            expert_imbalance: summary.expert_imbalance,
            routing,
            device: gauge.map(|gauge| gauge.report(&self.engine.model.device, tokens_per_second)),
            validation_loss: validation.map(|validation| validation.loss),
            time: now(),
        };
        if let Some(records) = &self.records {
            records.step(&report);
        }
        (self.out)(TrainerEvent::Step(report));
        Ok(())
    }

    fn routing(&self, summary: &StepSummary, validation: Option<Validation>) -> RoutingReport {
        let experts = (self.engine.model.config.experts.count as usize).max(1);
        let layers = summary.loads.len() / experts;
        let share = |part: u64, all: u64| if all == 0 { 0.0 } else { part as f64 / all as f64 };
        let tokens = self.config.training.tokens_per_step() * layers as u64;
        let mut computed = summary.loads.clone();
        computed.iter_mut().zip(&summary.dropped).for_each(|(load, dropped)| *load -= dropped);
        let most = match validation {
            Some(_) => TOKENS_PER_EXPERT_EVER,
            None => TOKENS_PER_EXPERT_MAX,
        };
        let told = computed.len() <= most;
        RoutingReport {
            router_entropy: summary.router_entropy,
            dropped_tokens: share(summary.dropped.iter().sum(), summary.loads.iter().sum()),
            unrouted_tokens: share(summary.unrouted, tokens),
            expert_switches: (summary.followed > 0)
                .then(|| share(summary.switched, summary.followed)),
            churn: validation.and_then(|validation| validation.churn),
            tokens_per_expert: match told {
                true => computed.chunks_exact(experts).map(<[u64]>::to_vec).collect(),
                false => Vec::new(),
            },
        }
    }

    /// On rank 0: what the driver reports of its GPU.
    fn tell_troubles(&mut self) -> Result<(), Stop> {
        let troubles = self.gauge.as_mut().map(Gauge::troubles).unwrap_or_default();
        for trouble in troubles {
            self.tell(EventKind::Warning, "DeviceTrouble", trouble, self.step)?;
        }
        Ok(())
    }

    fn tell_resumed(&mut self) -> Result<(), Stop> {
        let (reason, message) = match &self.config.resume {
            Resume::Fresh => ("Fresh", String::new()),
            Resume::Checkpoint { name, .. } => ("Checkpoint", name.clone()),
            Resume::Memory { attempt, .. } => ("Memory", format!("snapshots of attempt {attempt}")),
        };
        let Some(records) = &self.records else { return Ok(()) };
        let details = [("step", Detail::Number(self.step))].into_iter().chain(self.start.details());
        let told = event(self.config.attempt, EventKind::Resumed, reason, message, details);
        records.event(&told);
        (self.out)(TrainerEvent::Event(told));
        Ok(())
    }

    /// On rank 0, once a job: held-out data that are trained on.
    fn tell_overlaps(&mut self, feeder: &Feeder) -> Result<(), Stop> {
        if self.step > 0 || self.records.is_none() {
            return Ok(());
        }
        let found = feeder.corpus().all_overlaps();
        let Overlaps { files, named, documents } =
            found.map_err(|error| Stop::Failed(error.failure()))?;
        self.tell_doubled_documents(&documents)?;
        if files == 0 {
            return Ok(());
        }
        let pairs: Vec<String> = (named.iter())
            .map(|(held, trained)| match held == trained {
                true => held.clone(),
                false => format!("{held} (as {trained})"),
            })
            .collect();
        let more = files - named.len();
        let more = if more > 0 { format!(" and {more} more") } else { String::new() };
        let message = format!(
            "held-out data are trained on, too: {}{more}. The held-out loss will look too good; \
             leave them out of data.train",
            pairs.join(", ")
        );
        self.tell(EventKind::Warning, "HeldOutOverlaps", message, self.step)
    }

    /// The same of documents.
    fn tell_doubled_documents(&mut self, found: &DocumentOverlap) -> Result<(), Stop> {
        let DocumentOverlap { compared, doubled, first } = found;
        if *doubled == 0 {
            return Ok(());
        }
        let place = |(name, number): &(String, u64)| format!("{name}, document {}", number + 1);
        let shown: Vec<String> = (first.iter())
            .map(|Doubled { held_out, trained }| {
                format!("{} (as {})", place(held_out), place(trained))
            })
            .collect();
        let message = format!(
            "{doubled} of {compared} held-out documents are trained on, too: {}. The held-out \
             loss will look too good; leave out what is there twice",
            shown.join(", ")
        );
        self.tell(EventKind::Warning, "HeldOutOverlaps", message, self.step)
    }

    /// On rank 0: what became of storage.
    pub fn tell_storage(&mut self, news: News) -> Result<(), Stop> {
        let step = self.step;
        match news {
            News::Committed(step) => {
                warn_of(self.best.as_mut().map(|best| best.committed(step)));
                let name = directory_name(step);
                self.tell(EventKind::CheckpointCommitted, "Committed", name, step)?;
                self.tell_removed()
            }
            News::Degraded(reason, why) => {
                self.tell(EventKind::CheckpointDegraded, reason, why, step)
            }
            News::Recovered => {
                let message = "checkpoints are committed as they are due again".to_string();
                self.tell(EventKind::CheckpointRecovered, "Committed", message, step)
            }
        }
    }

    /// On rank 0: checkpoints that made room for newer ones.
    pub fn tell_removed(&mut self) -> Result<(), Stop> {
        for step in self.saves.take_removed() {
            self.tell(EventKind::CheckpointRemoved, "MoreThanKeep", directory_name(step), step)?;
        }
        Ok(())
    }

    fn tell(
        &mut self,
        kind: EventKind,
        reason: &str,
        message: String,
        step: u64,
    ) -> Result<(), Stop> {
        let Some(records) = &self.records else { return Ok(()) };
        let details = [("step", Detail::Number(step))];
        let told = event(self.config.attempt, kind, reason, message, details);
        records.event(&told);
        (self.out)(TrainerEvent::Event(told));
        Ok(())
    }
}
