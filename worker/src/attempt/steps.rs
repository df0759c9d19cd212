//! The steps of one attempt, and what is due between them.

use crate::attempt::courier::Courier;
use crate::attempt::gauge::Gauge;
use crate::attempt::pace::{Pace, Saving};
use crate::attempt::recorder::Recorder;
use crate::attempt::resume::{self, Sums, resumes_in_place};
use crate::attempt::snapshots::{Goes, Leaving, Over, Taken};
use crate::attempt::start::Start;
use crate::attempt::telling::Clock;
use crate::attempt::saves::{Ends, Patience, Saves};
use crate::data::{Batch, Batches, Corpus, DataError, Feeder};
use crate::engine::patience::OTHERWISE;
use crate::state::slots::Memory;
use crate::engine::step::{Engine, StepError, StepSummary};
use crate::engine::validate::{HeldOut, Validation};
use crate::gang::comm::AbortHandle;
use crate::gang::step_end::{self, StepEnd};
use crate::attempt::turns::{Due, Schedule, Turns, Wanted};
use crate::attempt::stop::{Stop, fail};
use crate::gang::comm::CommError;
use crate::attempt::api::{AttemptEnd, Control, TrainerEvent, Wait};
use moejob_protocol::WorkerConfig;
use moejob_protocol::config::Resume;
use moejob_protocol::message::{Phase, Request};
use std::thread::JoinHandle;
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
    /// Of what was resumed from: no other copy of the state is made before they are right.
    pub sums: Option<Sums>,
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
    /// Steps in the newest snapshot that is whole here, with those of the wards; none yet.
    pub held: Option<u64>,
    /// Steps in a snapshot whose copies left beside the steps, until all have said that theirs are
    /// there. The same on all ranks.
    pub travels: Option<u64>,
    /// What carries them.
    pub courier: Courier,
    /// One step is begun before the numbers of the one before it are known.
    pub ahead: bool,
    /// When state is copied to memory, where that is not every so many steps.
    pub pace: Option<Pace>,
    /// Makes the slots of the next snapshot.
    pub preparing: Option<JoinHandle<()>>,
    pub over: Over,
    /// What was resumed from is of other ranks or another layout, and these have no snapshot yet.
    pub anew: bool,
    /// The same of checkpoints.
    pub saving: Option<Saving>,
    /// A copy of the state that is on its way.
    pub leaving: Option<Leaving>,
    /// The last snapshot that was due was left out.
    pub skips: bool,
    /// It was told that copies take longer than the time between two snapshots.
    pub slow_told: bool,
    pub clock: Clock,
    /// Of a GPU.
    pub gauge: Option<Gauge>,
    /// Rank 0's, where the best checkpoint is kept.
    pub keeps_best: bool,
    /// Measured behind this step.
    pub held_out: Option<f64>,
}

/// What to do about numbers that are not finite.
const DIVERGED: &str = "lower the learning rate, warm up longer, or clip gradients";

/// Whoever reads knows more of why a batch does not come, and gives up first.
const BATCH_GRACE: Duration = Duration::from_secs(2);

/// Between two empty steps that wait for storage: at first, and at most.
pub(super) const STORAGE_POLL: Duration = Duration::from_millis(2);
const STORAGE_POLL_MAX: Duration = Duration::from_millis(100);
/// An end that storage holds up for so long is told.
const TOLD_AFTER: Duration = Duration::from_secs(2);

impl Run<'_> {
    /// The corpus is left empty where a read of it has not come back.
    pub fn train(&mut self, corpus: &mut Corpus) -> Result<AttemptEnd, Stop> {
        let training = &self.config.training;
        let model = &self.engine.model;
        let own = model.layout.mesh.micro_batches(model.rank, model.shape.micro_batches);
        let opened = std::mem::take(corpus);
        let feeder = Feeder::start(opened, own, self.step, training.steps);
        let mut feeder = feeder.with_patience(self.patience.data + BATCH_GRACE);
        let ended = self.train_on(&mut feeder);
        *corpus = feeder.into_corpus().unwrap_or_default();
        ended
    }

    fn train_on(&mut self, feeder: &mut Feeder) -> Result<AttemptEnd, Stop> {
        self.clock = Clock::start();
        self.tell_resumed()?;
        self.tell_overlaps(feeder)?;
        self.control.set_step(self.step);
        let from_memory = matches!(self.config.resume, Resume::Memory { .. });
        let in_place = resumes_in_place(self.config, &self.buddies);
        let dear = self.is_dear();
        let resumed = if self.pace.is_none() && !in_place && !dear {
            self.compare()?;
            let on = self.step < self.config.training.steps;
            self.snapshot(Goes { on, beside: false })?
        } else {
            Taken::No
        };
        // Where a copy is dear, it is made as soon as its slots are, beside the first steps: until
        // then what the attempt came from stays. Where nobody said how often, what was loaded or
        // made from a seed can be so again, and has none.
        self.anew = !in_place && if self.pace.is_some() { from_memory } else { dear };
        self.prepare();
        let steps = self.config.training.steps;
        // The attempt before was lost when all was trained and the last checkpoint was not written.
        if self.step >= steps && from_memory {
            self.waits_until = Some(Instant::now() + self.patience.end);
            self.compare()?;
            self.checkpoint(resumed)?;
        } else {
            // Whoever holds a slot keeps it from being filled anew.
            drop(resumed);
        }
        let mut turns = Turns::new(self.schedule(), self.step, self.ahead);
        let abort = self.engine.links.comm().abort_handle();
        let mut began = Instant::now();
        self.say_ready(feeder, &turns)?;
        while !turns.are_over() {
            self.control.set_phase(Phase::Training);
            // A device that waits for another one does so within the limit of a step, and a peer
            // may still copy its state or wait for data. So all of them are here first. One that
            // waits for data gives up by itself, so that whoever is longer on its way hangs.
            let longest = self.patience.data + OTHERWISE;
            let heard = if self.ahead { Some(self.hear_within(longest)?) } else { None };
            let mut rounds = Rounds { feeder, control: self.control, abort: &abort };
            while let Some(step) = turns.begin() {
                self.engine.begin(step, &mut rounds)?;
            }
            let summary = self.finish_step(&mut rounds)?;
            if self.sums.as_ref().is_some_and(Sums::are_made) {
                self.compare()?;
            }
            let wanted = heard.map_or_else(|| self.hear(), Ok)?;
            let due = turns.end(wanted);
            // Behind the last step a peer may have left already, and nobody needs its copy.
            let goes_on = !turns.are_over();
            if goes_on {
                self.copies_arrive()?;
            }
            self.arrive(goes_on)?;
            self.step = turns.done();
            self.control.set_step(self.step);
            let ended = Instant::now();
            let seconds = ended.duration_since(began).as_secs_f64();
            self.clock.stalls.data += feeder.take_waited().as_secs_f64();
            let validation = if due.validation { self.validate(feeder)? } else { None };
            self.held_out = validation.as_ref().map(|validation| validation.loss);
            self.report(&summary, validation, seconds)?;
            self.keep(due)?;
            // The device has gone on meanwhile, unless no step is under way.
            began = if self.engine.is_settled() { Instant::now() } else { ended };
            self.say_ready(feeder, &turns)?;
        }
        self.control.set_phase(Phase::Stopping);
        self.compare()?;
        self.wait_for_storage()?;
        if self.step >= steps && self.saves.has_given_up(self.step) {
            // Memory has what was trained: the next attempt goes on from there, and waits again.
            let waited = self.patience.end.as_secs();
            let reason = format!("the last checkpoint could not be written in {waited} seconds");
            return Err(Stop::Comm(CommError::Aborted { reason }));
        }
        if self.step >= steps {
            return Ok(AttemptEnd::Completed { step: self.step });
        }
        Ok(AttemptEnd::Stopped { step: self.step })
    }

    /// Waits until it is known that what was resumed from was whole.
    fn compare(&mut self) -> Result<(), Stop> {
        let Some(sums) = self.sums.take() else { return Ok(()) };
        let (records, out) = (self.records.as_ref(), &mut *self.out);
        let mut tell = |event| resume::tell(event, records, out);
        sums.end(self.config, self.memory, self.engine.model.rank, &mut tell)
    }

    /// When something is due whatever is asked.
    fn schedule(&self) -> Schedule {
        let config = self.config;
        Schedule {
            steps: config.training.steps,
            validation: config.data.validation.every_steps,
            snapshot: match self.pace {
                Some(_) => 0,
                None => config.recovery.memory_every_steps,
            },
            checkpoint: match self.saving {
                Some(_) => 0,
                None => config.checkpoint.every_steps,
            },
        }
    }

    /// The numbers of the oldest step that was begun. One that is not finite may have come from a
    /// fault of the machine: the engine has done the step once again then.
    fn finish_step(&mut self, rounds: &mut Rounds) -> Result<StepSummary, Stop> {
        let summary = self.engine.end(rounds)?;
        let Some(what) = &summary.non_finite else { return Ok(summary) };
        let began = self.engine.diagnose(self.step, rounds)?;
        let began = began.map(|place| format!("; it began in {place}")).unwrap_or_default();
        let number = self.step + 1;
        let message =
            format!("{what} is not finite at step {number}, twice: nothing was updated{began}");
        Err(fail(1, &message, DIVERGED))
    }

    /// Tells the others, with the step that is done next, that this rank has the batches for all
    /// that is begun before it speaks again: no device waits for storage.
    fn say_ready(&mut self, feeder: &mut Feeder, turns: &Turns) -> Result<(), Stop> {
        if turns.are_over() {
            return Ok(());
        }
        let mut next = turns.clone();
        self.control.waiting(Wait::Data, || -> Result<(), StepError> {
            while let Some(step) = next.begin() {
                feeder.prepare(step)?;
            }
            Ok(())
        })?;
        self.say()
    }

    /// Tells the others, with the step that is done next, what this rank was asked, and how far
    /// its snapshots and its storage are.
    fn say(&mut self) -> Result<(), Stop> {
        self.engine.be_patient(self.control.patience());
        let asked = self.control.take_requests();
        self.asked.checkpoint_now |= asked.checkpoint_now;
        self.asked.stop_after_this_step |= asked.stop_after_this_step;
        let (now, free) = (Instant::now(), self.leaving.is_none() && self.travels.is_none());
        let due = free && (self.pace.is_some_and(|pace| pace.is_due(now)) || self.is_anew());
        let with = self.pace.filter(Pace::fits).map(|_| due);
        let saving = self.saving.filter(|_| free && self.saves.has_room());
        let saves = saving.is_some_and(|saving| saving.is_due(self.step + 1, with, now));
        let first = self.engine.model.rank == 0;
        let mut end = StepEnd {
            checkpoint_now: self.asked.checkpoint_now || first && saves,
            stop_after_this_step: self.asked.stop_after_this_step,
            snapshot_now: first && due,
            held: self.held,
            ..StepEnd::default()
        };
        self.saves.fill(&mut end);
        Ok(step_end::say(&end, self.engine.links.comm())?)
    }

    /// Acts on what all ranks have said, the same on each of them.
    fn hear(&mut self) -> Result<Wanted, Stop> {
        let ends = step_end::hear(self.engine.links.comm())?;
        self.asked = Request::default();
        let held = ends.iter().map(|end| end.held).min().flatten();
        if let Some(held) = held {
            self.memory.confirm(self.config.attempt, held);
        }
        self.travels.take_if(|step| held >= Some(*step));
        let news = self.saves.take_in(&ends).map_err(|end| match end {
            Ends::Fenced(by) => Stop::Fenced(by),
            Ends::NotFinite(message) => fail(1, &message, DIVERGED),
        })?;
        for news in news {
            self.tell_storage(news)?;
        }
        Ok(Wanted {
            snapshot: ends.iter().any(|end| end.snapshot_now),
            checkpoint: ends.iter().any(|end| end.checkpoint_now) || self.saves.is_overdue(),
            stop: ends.iter().any(|end| end.stop_after_this_step),
        })
    }

    /// The same. An attempt in which a peer is longer on its way than `longest` is over.
    fn hear_within(&mut self, longest: Duration) -> Result<Wanted, Stop> {
        self.engine.limit_peers(Some(longest));
        let heard = self.hear();
        self.engine.limit_peers(None);
        heard
    }

    /// Snapshots and checkpoints that are due after this step.
    fn keep(&mut self, due: Due) -> Result<(), Stop> {
        if due == Due::default() {
            return Ok(());
        }
        assert!(self.engine.is_settled(), "what is kept is the state of one step");
        self.compare()?;
        let last = self.step >= self.config.training.steps;
        let memory = due.snapshot || due.stop && self.pace.is_none_or(|pace| pace.fits());
        // What arrives at a step's end is known to be whole everywhere at the end of the next one:
        // a snapshot of each step would be overwritten before.
        let beside = !last && !due.stop && self.config.recovery.memory_every_steps > 1;
        let goes = Goes { on: !last && !due.stop, beside };
        let snapshot = if memory { self.snapshot(goes)? } else { Taken::No };
        if last || due.stop {
            let patience = match (last, due.checkpoint) {
                (true, _) => self.patience.end,
                (false, true) => self.patience.save,
                (false, false) => self.patience.stop,
            };
            self.waits_until = Some(Instant::now() + patience);
        }
        if due.checkpoint { self.checkpoint(snapshot) } else { Ok(()) }
    }

    /// Goes on with empty steps until nothing waits for storage, or rank 0 has lost patience.
    pub(super) fn wait_for_storage(&mut self) -> Result<(), Stop> {
        let mut pause = STORAGE_POLL;
        let last = self.patience.end;
        let until = *self.waits_until.get_or_insert_with(|| Instant::now() + last);
        let began = Instant::now();
        let mut told = false;
        // The leader looks for progress of another kind than steps.
        self.control.set_phase(Phase::Stopping);
        while self.saves.is_waiting() {
            if began.elapsed() >= TOLD_AFTER && !std::mem::replace(&mut told, true) {
                self.tell_waits(until)?;
                self.saves.give_up_older(self.step);
            }
            std::thread::sleep(pause);
            pause = (pause + pause / 8).min(STORAGE_POLL_MAX);
            if Instant::now() >= until {
                self.saves.lose_patience();
            }
            self.say()?;
            let asked = std::mem::take(&mut self.asked);
            self.hear()?;
            // Asked for meanwhile: it takes effect with the next real step.
            self.asked = asked;
            self.tell_records()?;
        }
        Ok(())
    }

    fn validate(&mut self, feeder: &Feeder) -> Result<Option<Validation>, Stop> {
        self.control.set_phase(Phase::Validating);
        let most = self.config.data.validation.max_sequences;
        let began = Instant::now();
        let mut corpus = self.control.waiting(Wait::Data, || feeder.corpus());
        let mut held_out = Watched { corpus: &mut corpus, control: self.control };
        let measured = self.engine.validate(&mut held_out, most)?;
        self.clock.stalls.validation += began.elapsed().as_secs_f64();
        Ok(measured)
    }
}

/// The micro-batches of steps, one after the other: each is life, and a chance to leave an attempt
/// that is over.
pub(crate) struct Rounds<'a> {
    feeder: &'a mut Feeder,
    control: &'a Control,
    abort: &'a AbortHandle,
}

impl Batches for Rounds<'_> {
    fn micro_batch(&mut self, step: u64, index: u32) -> Result<&Batch, DataError> {
        if self.abort.is_aborted() {
            return Err(DataError::GivenUp);
        }
        self.control.stir();
        let Rounds { feeder, control, .. } = self;
        control.waiting(Wait::Data, || feeder.micro_batch(step, index))
    }
}

/// Held-out sequences, and that they are waited for.
struct Watched<'a> {
    corpus: &'a mut Corpus,
    control: &'a Control,
}

impl HeldOut for Watched<'_> {
    fn sequences(&self, most: u32) -> u32 {
        self.corpus.held_out_sequences(most)
    }

    fn fill(&mut self, first: u32, batch: &mut Batch) -> Result<(), DataError> {
        self.control.waiting(Wait::Data, || self.corpus.fill_held_out(first, batch))
    }
}
