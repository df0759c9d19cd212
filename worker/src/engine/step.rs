//! One optimizer step: forward, backward, reduce, update, spread. What is begun when, and done
//! again, stands in `flight.rs`.

use crate::data::Batches;
use crate::engine::flight::Flight;
use crate::engine::forward::Pass;
use crate::engine::gate::Noise;
use crate::engine::graphs::Part;
use crate::engine::round::{Aim, Schedule};
use moejob_kernels::{StepPhase, SumRows};

pub use crate::engine::machine::{ENV_CPUS, ENV_DEVICE, Engine, OpenError, StepError};
pub use crate::engine::numbers::StepSummary;

pub(crate) use crate::engine::machine::{device_error, device_of};

impl Engine {
    /// Enqueues one step: forward, backward, reduce, update, spread. Its numbers are on their way
    /// to the host then.
    pub(super) fn enqueue(
        &mut self,
        step: u64,
        batches: &mut impl Batches,
    ) -> Result<Flight, StepError> {
        self.model.device.phase(StepPhase::Other);
        self.model.device.mark("between steps", None);
        self.model.begin_step(&self.training, step);
        self.links.at_step(step);
        self.gradients.clear();
        self.model.begin_sums();
        if let Some((_, fault)) = self.fault.take_if(|(at, _)| *at == step) {
            self.model.device.inject(fault);
        }
        // It is rank 0 that tells of steps.
        if self.model.rank == 0 && self.looks.is_at(step) {
            self.links.look(&mut self.model.device);
        }
        let plain = self.begin_graphs();
        self.whole_step_balance(step, batches)?;
        self.rounds(step, batches, |_| Aim::Record, |engine, schedule| {
            let round = &schedule.round;
            engine.model.begin_record();
            engine.part(engine.forward_part(schedule), |engine| {
                Pass::new(&mut engine.model, &mut engine.links, round).forward();
            });
            engine.model.device.phase(StepPhase::Forward);
            let leave = schedule.last && engine.links.work_beside();
            engine.part(engine.backward_part(schedule, leave), |engine| {
                let mut pass = Pass::new(&mut engine.model, &mut engine.links, round);
                let leaf = match leave {
                    true => engine.gradients.last_leaf(round),
                    false => engine.gradients.leaf(round),
                };
                pass.loss(Some(&leaf));
                pass.backward(&leaf);
            });
            engine.model.device.phase(StepPhase::Backward);
            if !leave {
                engine.gradients.push(round, &mut engine.model);
            }
            if let Some(micro_batch) = schedule.own {
                engine.model.keep_record(micro_batch);
            }
        })?;
        let Engine { model, gradients, links, spoiled, .. } = self;
        if !links.work_beside() {
            gradients.reduce(model, links);
        }
        model.device.phase(StepPhase::Communication);
        if let Some(at) = spoiled.iter().position(|spoiled| *spoiled == step) {
            spoiled.remove(at);
            gradients.spoil(model);
        }
        self.part(Part::Numbers, |engine| {
            engine.gradients.measure(&mut engine.model);
            engine.model.device.mark("numbers", None);
            engine.model.reduce_numbers(&mut engine.links);
        });
        self.model.device.phase(StepPhase::Numbers);
        // What was not summed over all ranks must not move a weight.
        self.links.check()?;
        let summed = self.model.device.point();
        self.model.hold();
        self.part(Part::Update, |Engine { model, gradients, links, training, .. }| {
            model.decide_update();
            gradients.update(model, links, &training.adamw);
        });
        let Engine { model, gradients, links, .. } = self;
        model.device.phase(StepPhase::Update);
        gradients.spread(model, links);
        model.device.phase(StepPhase::Communication);
        model.device.mark("update", None);
        links.check()?;
        let sent = links.looked(&mut model.device);
        Ok(Flight::new(model, (step, sent), summed, plain))
    }

    /// Calls `each` with every round of a step, its micro-batch loaded.
    pub(crate) fn rounds(
        &mut self,
        step: u64,
        batches: &mut impl Batches,
        aim: impl Fn(usize) -> Aim,
        mut each: impl FnMut(&mut Engine, &Schedule),
    ) -> Result<(), StepError> {
        let (count, tokens) = (self.model.shape.micro_batches, self.model.shape.tokens as usize);
        for round in 0..self.model.layout.mesh.rounds(count) {
            let schedule = Schedule::new(&self.model, round, count, &aim, |_| tokens);
            self.model.begin_round(!schedule.last);
            if let Some(micro_batch) = schedule.own {
                // Storage may be slow, which is no fault of the device.
                let batch = self.deadline.outside(|| batches.micro_batch(step, micro_batch))?;
                self.model.load_documents(&batch.ids, &batch.targets, batch.starts.as_deref());
                self.model.count_targets(batch.step_targets);
                let seed = self.training.seed;
                self.model.set_noise(Some(Noise { seed, step, micro_batch }));
                self.model.device.phase(StepPhase::Data);
                self.model.device.mark("data", None);
            }
            each(self, &schedule);
            self.links.check()?;
        }
        Ok(())
    }

    /// Where the balance is that of the whole step: its statistics, from a forward pass of their
    /// own over all micro-batches, since the first gradient needs them already. Every rank adds
    /// them up in the order of micro-batches.
    fn whole_step_balance(
        &mut self,
        step: u64,
        batches: &mut impl Batches,
    ) -> Result<(), StepError> {
        let balance = self.model.buffers.numbers.balance.clone();
        let Some(balance) = balance.filter(|_| !self.model.has_one_balance()) else {
            return Ok(());
        };
        self.model.device.fill_zero(balance.parts);
        self.rounds(step, batches, Aim::Statistics, |engine, schedule| {
            Pass::new(&mut engine.model, &mut engine.links, &schedule.round).forward();
            engine.model.device.phase(StepPhase::Forward);
        })?;
        // Each is 0 but at one rank, so that its sum over ranks is what it was.
        self.links.all_reduce(&mut self.model.device, &[balance.parts]);
        self.model.device.sum_rows(&SumRows { x: balance.parts, out: balance.sum });
        Ok(())
    }
}
