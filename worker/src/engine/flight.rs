//! Steps that are begun, and what their numbers lead to.
//!
//! ```text
//! begin(n) -> begin(n + 1) -> end(): numbers of n -> fine                  -> n is done
//!                                                `-> skipped, so n + 1 was, too:
//!                                                    mend, n again, begin(n + 1) again
//! ```
//! The device goes from step to step without the host. Once it has skipped a step it skips all that
//! follow, until the host has read why, and says that it goes on: so a step whose predecessor was
//! skipped leaves nothing behind, and both are done again in their order.

use crate::data::Batches;
use crate::engine::links::Sent;
use crate::engine::looks::Look;
use crate::engine::machine::check;
use crate::engine::model::Model;
use crate::engine::numbers::StepSummary;
use crate::engine::patience::OTHERWISE;
use crate::engine::step::{Engine, StepError};
use crate::state::rank::DeviceError;
use moejob_kernels::cuda::Event;
use moejob_kernels::{LossScale, LossScaling, PhaseEnds, Posted};
use std::collections::VecDeque;
use std::time::{Duration, Instant};

/// How often a step in fp16 is done again with half the loss scale: from the largest to the least.
const HALVINGS_MAX: u32 = 24;
/// How often a step is run whose numbers are not finite: the first time it may have been a fault of
/// the machine.
const RUNS_MAX: u32 = 2;

/// A step that is enqueued.
#[derive(Debug)]
pub(super) struct Flight {
    step: u64,
    numbers: Posted,
    phases: PhaseEnds,
    /// What it sends, if it is looked at.
    look: Option<Look>,
    /// What its loss is multiplied by.
    scaling: Option<LossScale>,
    /// Where its sums over ranks are done.
    summed: Option<Event>,
    /// Its ops were enqueued as graphs would be.
    plain: bool,
}

/// Those that are, oldest first.
#[derive(Debug, Default)]
pub(super) struct Flights {
    begun: VecDeque<Flight>,
    /// Updates that were applied since the engine was made, by the numbers that were read.
    updates: u64,
    /// The device skips what it is given, until it is told to go on.
    halted: bool,
    /// A step was done again.
    again: bool,
    /// When the oldest step was begun, or the one before it ended.
    since: Option<Instant>,
}

/// What a step's numbers lead to.
enum Outcome {
    Done,
    Again,
    /// It cannot be done.
    Broken(Option<String>),
}

impl Flight {
    /// Of the step that was enqueued last. The scale of the next one is what it will be if this one
    /// has no overflow; else the next one is skipped, too.
    pub fn new(
        model: &mut Model,
        (step, sent): (u64, Option<Sent>),
        summed: Option<Event>,
        plain: bool,
    ) -> Flight {
        let scaling = model.scaling;
        model.scaling = scaling.map(|scale| scale.after(&LossScaling::default(), false));
        let numbers = model.post_numbers();
        let phases = model.device.cut_phases();
        let look = Look::new(&mut model.device, &phases, step, sent);
        Flight { step, numbers, phases, look, scaling, summed, plain }
    }
}

impl Engine {
    /// Whether a step is begun before the numbers of the one before it are known: a GPU would
    /// stand still meanwhile. A processor has computed a step when it is begun.
    pub fn runs_ahead(&self) -> bool {
        self.model.device.as_cuda().is_some()
    }

    /// No step is under way.
    pub fn is_settled(&self) -> bool {
        self.flights.begun.is_empty()
    }

    /// Begins a step, counted from 0, on all ranks: behind the one that was begun last.
    ///
    /// # Errors
    /// A peer is lost, or the data changed. The weights may be torn then.
    pub fn begin(&mut self, step: u64, batches: &mut impl Batches) -> Result<(), StepError> {
        if let Some(trace) = &mut self.trace {
            trace.begin(&mut self.model.device);
        }
        if self.is_settled() {
            self.flights.since = Some(Instant::now());
        }
        self.limited(|engine| engine.go(step, batches))
    }

    /// Reads the numbers of the oldest step that was begun; does it again where they say so, and
    /// then the one behind it. The same bits come of it as if nothing had happened. Where routed
    /// rows find no room it is done again with more; where gradients found none in fp16, with half
    /// the loss scale; where a number is not finite, once as it was. If that does not help, the
    /// summary says so, nothing of the step or behind it has changed the state, and no step is
    /// under way.
    ///
    /// # Errors
    /// A peer is lost, the data changed, or the device failed. The weights may be torn then.
    pub fn end(&mut self, batches: &mut impl Batches) -> Result<StepSummary, StepError> {
        self.end_by(RUNS_MAX, batches)
    }

    /// One step by itself. A number that is not finite is told the first time.
    ///
    /// # Errors
    /// See [`Engine::end`].
    pub fn step(
        &mut self,
        step: u64,
        batches: &mut impl Batches,
    ) -> Result<StepSummary, StepError> {
        self.begin(step, batches)?;
        self.end_by(1, batches)
    }

    fn end_by(
        &mut self,
        runs_max: u32,
        batches: &mut impl Batches,
    ) -> Result<StepSummary, StepError> {
        let done = self.limited(|engine| engine.end_in(runs_max, batches));
        let since = self.flights.since.replace(Instant::now());
        self.patience.took(since.map(|since| since.elapsed()).unwrap_or_default());
        done
    }

    /// Whether a step was done again since the last call, the same on all ranks.
    pub fn take_again(&mut self) -> bool {
        std::mem::take(&mut self.flights.again)
    }

    /// From the next step on one may take longer by `more`: a machine may stand still for so long.
    pub fn be_patient(&mut self, more: Duration) {
        self.patience.wait_out(more);
    }

    /// Until it is said otherwise, whoever drives the device waits for peers, so long at most.
    pub fn limit_peers(&self, longest: Option<Duration>) {
        match longest {
            Some(longest) => self.deadline.set(longest),
            None => self.deadline.clear(),
        }
    }

    /// Waits for a device that never answers no longer than steps take.
    fn limited<T>(&mut self, work: impl FnOnce(&mut Engine) -> T) -> T {
        let limit = self.patience.limit();
        self.model.device.limit_waits(limit);
        self.deadline.set(limit);
        let done = work(self);
        self.deadline.clear();
        self.model.device.limit_waits(OTHERWISE);
        done
    }

    fn end_in(
        &mut self,
        runs_max: u32,
        batches: &mut impl Batches,
    ) -> Result<StepSummary, StepError> {
        let flight = self.flights.begun.pop_front().expect("a step was begun");
        let (step, mut scaling) = (flight.step, flight.scaling);
        let mut summary = self.land(flight)?;
        let (mut halvings, mut runs) = (0, 1);
        let mut behind = Vec::new();
        loop {
            let outcome = self.outcome(&summary, scaling, &mut halvings, &mut runs, runs_max)?;
            if let Outcome::Done = outcome {
                break;
            }
            self.flights.again = true;
            // They were skipped: their numbers say nothing.
            while let Some(flight) = self.flights.begun.pop_front() {
                behind.push(flight.step);
                self.land(flight)?;
            }
            if let Outcome::Broken(what) = outcome {
                return Ok(StepSummary { non_finite: what.or(summary.non_finite), ..summary });
            }
            self.go(step, batches)?;
            let flight = self.flights.begun.pop_front().expect("it was begun");
            scaling = flight.scaling;
            summary = self.land(flight)?;
        }
        behind.into_iter().try_for_each(|step| self.go(step, batches))?;
        Ok(summary)
    }

    /// Enqueues a step, behind a skipped one as the first that counts again.
    fn go(&mut self, step: u64, batches: &mut impl Batches) -> Result<(), StepError> {
        if std::mem::take(&mut self.flights.halted) {
            assert!(self.is_settled(), "all that was skipped was read");
            self.model.go_on();
        }
        // A device takes a bounded number of launches, and the host would wait in the next one for
        // a peer that may be dead. So nothing is enqueued behind a sum of the step before.
        if let Some(summed) = self.flights.begun.back().and_then(|last| last.summed.as_ref()) {
            self.model.device.reach(summed);
            self.links.check()?;
        }
        let flight = self.enqueue(step, batches)?;
        self.flights.begun.push_back(flight);
        Ok(())
    }

    /// Waits for the numbers of a step.
    fn land(&mut self, flight: Flight) -> Result<StepSummary, StepError> {
        let Engine { model, links, training, flights, phases, paces, graphs, looks, .. } = self;
        let numbers = model.device.fetch(flight.numbers);
        // What was read before a failure says nothing. What the gang says of a failure says more.
        links.check()?;
        check(&model.device, links.world())?;
        if graphs.is_looking()
            && flight.plain
            && let Some(decided) = flight.phases.first_round().and_then(|pace| graphs.saw(pace))
        {
            tracing::info!("{decided}");
        }
        let taken = model.device.phase_paces(flight.phases);
        phases.iter_mut().zip(taken).for_each(|(sum, own)| *sum += own.device);
        paces.add(&taken);
        looks.over(flight.look, taken.map(|pace| pace.device));
        looks.settle(&mut model.device, || links.window_rows());
        let summary = model.summary(training, flight.step, flight.scaling, &numbers);
        flights.halted |= summary.skipped;
        flights.updates += u64::from(!summary.skipped);
        match summary.updates {
            found if found == flights.updates => Ok(summary),
            found => Err(StepError::Device(DeviceError::Failed(format!(
                "it counts {found} updates of this attempt behind step {}, where there were {}",
                flight.step + 1,
                flights.updates
            )))),
        }
    }

    /// What numbers lead to, with what mends them.
    fn outcome(
        &mut self,
        summary: &StepSummary,
        scaling: Option<LossScale>,
        halvings: &mut u32,
        runs: &mut u32,
        runs_max: u32,
    ) -> Result<Outcome, StepError> {
        if !summary.skipped {
            return Ok(Outcome::Done);
        }
        self.model.scaling = scaling;
        if summary.overflows {
            return Ok(match self.grow_routed()? {
                true => Outcome::Again,
                false => Outcome::Broken(Some("a count of routed rows".to_string())),
            });
        }
        if *halvings < HALVINGS_MAX && self.halve(summary) {
            *halvings += 1;
            return Ok(Outcome::Again);
        }
        Ok(match *runs < runs_max {
            true => {
                *runs += 1;
                Outcome::Again
            }
            false => Outcome::Broken(None),
        })
    }

    /// Moves the loss scale after an overflow; whether it is smaller then.
    fn halve(&mut self, summary: &StepSummary) -> bool {
        let Some(scaling) = self.model.scaling else { return false };
        // A loss that is no number is so under any scale.
        if !summary.loss.is_finite() {
            return false;
        }
        let next = scaling.after(&LossScaling::default(), true);
        self.model.scaling = Some(next);
        next.scale < scaling.scale
    }
}
